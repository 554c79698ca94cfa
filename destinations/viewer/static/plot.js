/** Plots as SVG: axes, lines, areas and marks, zoom by dragging, and the cursor. Knows nothing of runs. */

import { download, el, fill, isDark, shorten, svg } from "./dom.js";
import { sameNotation, ticksOf } from "./ticks.js";

/** Coordinates are clamped to this many pixels. */
const FAR = 20000;
const LEAST_DRAG = 6;
const MOST_LETTERS = 17;
const MOST_SPIKES = 3;
const CHARACTER = 6.4;
const DASHES = { dash: "6 4", dot: "2 3", longdash: "10 4" };
let clips = 0;

/** @type {Promise<unknown>} */
let lastTurn = Promise.resolve();

/** Waits for earlier callers and lets the browser paint, so that charts appear one by one and clicks are handled. */
export function turnToDraw() {
  lastTurn = lastTurn.then(
    () =>
      new Promise((resolve) => {
        const { port1, port2 } = new MessageChannel();
        port1.onmessage = resolve;
        port2.postMessage(null);
      }),
  );
  return lastTurn;
}

/** The colours of axes, texts and the background. */
function inks() {
  return isDark()
    ? { grid: "#25272c", axis: "#3a3d44", text: "#a2a5ad", ink: "#ececef", ground: "#17181b" }
    : { grid: "#ecece8", axis: "#cfcfc8", text: "#5d5f66", ink: "#1a1b1e", ground: "#ffffff" };
}

/** Returns the least and the greatest value that an axis can show; null for none. */
function extentOf(lists, type) {
  let low = Infinity,
    high = -Infinity;
  for (const list of lists)
    for (const value of list) {
      if (typeof value !== "number" || !Number.isFinite(value) || (type === "log" && value <= 0)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  return low <= high ? [low, high] : null;
}

/**
 * Returns a range with some room on both sides, also around a single value.
 *
 * @param {number[]} range
 * @param {string} type
 * @param {number} share
 * @returns {[number, number]}
 */
function padded([low, high], type, share) {
  if (type === "log") {
    const [from, to] = [Math.log10(low), Math.log10(high)];
    const room = (to - from) * share || (share ? 0.3 : 0.05);
    return [10 ** Math.max(-300, from - room), 10 ** Math.min(300, to + room)];
  }
  const room = low === high ? Math.abs(low) * 0.1 || 1 : (high / 2 - low / 2) * 2 * share;
  return [Math.max(-Number.MAX_VALUE, low - room), Math.min(Number.MAX_VALUE, high + room)];
}

/** Returns an axis with its range, `place` from values to pixels, and `valueAt` from pixels to values. */
function axisOf({ type = "linear", range, share = 0.05, ...rest }, lists, from, to) {
  const shown = range ?? padded(extentOf(lists, type) ?? (type === "log" ? [1, 10] : [0, 1]), type, share);
  const scaled = type === "log" ? Math.log10 : (value) => value;
  const [low, high] = shown.map((value) => scaled(value) / 2);
  const place = (value) => from + ((scaled(value) / 2 - low) / (high - low)) * (to - from);
  const valueAt = (pixel) => {
    const found = 2 * (low + ((pixel - from) / (to - from)) * (high - low));
    return type === "log" ? 10 ** found : found;
  };
  return { ...rest, type, range: shown, place, valueAt };
}

/** Returns the commands of a path through points; a missing point leaves a gap. */
function pathOf(xs, ys, x, y, isClosed = false) {
  let path = "",
    length = 0;
  const end = () => {
    if (length) path += isClosed ? "Z" : length === 1 ? "h0.01" : "";
    length = 0;
  };
  for (const [index, value] of ys.entries()) {
    const across = value === null || xs[index] === null ? NaN : x.place(xs[index]);
    const down = y.place(value);
    if (!Number.isFinite(across) || !Number.isFinite(down)) {
      end();
      continue;
    }
    const near = Math.max(-FAR, Math.min(FAR, down));
    path += `${length ? "L" : "M"}${across.toFixed(1)},${near.toFixed(1)}`;
    length += 1;
  }
  end();
  return path;
}

/** Returns the path of a mark. */
function markOf(symbol, across, down, size) {
  const half = size / 2;
  if (symbol === "x-thin")
    return `M${across - half},${down - half}l${size},${size}m0,${-size}l${-size},${size}`;
  const tip = symbol === "triangle-down" ? half : -half;
  return `M${across},${down + tip}l${-half},${-2 * tip}h${size}Z`;
}

const at = (list, index) => (Array.isArray(list) ? list[index] : list);

function drawMarks(trace, x, y, strip) {
  const { symbol = "circle", size, color, opacity = 1, line = {} } = trace.marker;
  return trace.x.flatMap((value, index) => {
    const across = value === null ? NaN : x.place(value);
    const down = trace.isInStrip ? strip : y.place(trace.y[index]);
    if (!Number.isFinite(across) || !Number.isFinite(down)) return [];
    const look = {
      fill: at(color, index),
      "fill-opacity": at(opacity, index),
      stroke: at(line.color, index) ?? "none",
      "stroke-width": at(line.width, index) ?? 0,
    };
    if (symbol === "circle")
      return [
        svg("circle", {
          class: "point",
          cx: across.toFixed(1),
          cy: down.toFixed(1),
          r: at(size, index) / 2,
          ...look,
        }),
      ];
    return [svg("path", { class: "point", d: markOf(symbol, across, down, size), ...look })];
  });
}

function drawTrace(trace, x, y, strip) {
  const { line = {}, fillcolor, mode, opacity = 1, meta = {} } = trace;
  const group = svg("g", { class: `trace ${meta.part ?? ""}`, opacity });
  if (mode === "markers") group.append(...drawMarks(trace, x, y, strip));
  else
    group.append(
      svg("path", {
        class: fillcolor ? "js-fill" : "js-line",
        d: pathOf(trace.x, trace.y, x, y, Boolean(fillcolor)),
        fill: fillcolor ?? "none",
        stroke: line.width ? line.color : "none",
        "stroke-width": line.width ?? 0,
        "stroke-dasharray": DASHES[line.dash] ?? null,
        "stroke-linejoin": "round",
        "stroke-linecap": line.dash && line.dash !== "solid" ? "butt" : "round",
      }),
    );
  return group;
}

/** Returns the ticks whose texts don't overlap. */
function fitting(ticks, place, room) {
  const found = [];
  let end = -Infinity;
  for (const [value, text] of ticks) {
    const half = (text.length * CHARACTER) / 2 + 4;
    const middle = place(value);
    if (room === 0 || middle - half >= end) {
      found.push([value, text]);
      end = middle + half;
    }
  }
  return found;
}

/** Returns a text in the font of ticks, unless attributes say another. */
function textOf(content, attributes) {
  return svg(
    "text",
    { "font-size": 11, "font-family": "Inter, system-ui, sans-serif", ...attributes },
    content,
  );
}

function drawAxes(x, y, area, ink) {
  const text = (content, attributes) => textOf(content, { fill: ink.text, ...attributes });
  const { left, right, top, bottom } = area;
  const xs = x.ticks ?? ticksOf(x.type, x.range, Math.max(2, Math.floor((right - left) / 62)));
  const ys = y.ticks ?? ticksOf(y.type, y.range, Math.max(2, Math.min(5, Math.floor((bottom - top) / 36))));
  const inside = (axis, from, to) => (tick) =>
    axis.place(tick[0]) >= from - 1 && axis.place(tick[0]) <= to + 1;
  const title = x.title ? shorten(x.title, 60) : "";
  const titleLeft = right - title.length * CHARACTER;
  const group = svg("g", { class: "axes" });
  for (const [value, content] of ys.filter(inside(y, top, bottom))) {
    const down = y.place(value);
    if (!y.isBare) group.append(svg("path", { d: `M${left},${down}H${right}`, stroke: ink.grid }));
    group.append(
      svg("g", { class: "ytick" }, text(content, { x: left - 6, y: down + 4, "text-anchor": "end" })),
    );
  }
  group.append(svg("path", { d: `M${left},${bottom + 0.5}H${right}`, stroke: ink.axis }));
  // The name of the axis is at its end; a tick that would touch it is left out.
  const free = (tick) =>
    !title || area.isTall || x.place(tick[0]) + (tick[1].length * CHARACTER) / 2 < titleLeft - 8;
  for (const [value, content] of fitting(xs.filter(inside(x, left, right)).filter(free), x.place, 1)) {
    const across = x.place(value);
    group.append(svg("path", { d: `M${across},${bottom}v4`, stroke: ink.axis }));
    const half = (content.length * CHARACTER) / 2;
    const middle = Math.max(half, Math.min(area.width - half, across));
    group.append(
      svg("g", { class: "xtick" }, text(content, { x: middle, y: bottom + 16, "text-anchor": "middle" })),
    );
  }
  const names = [];
  if (title)
    names.push(
      text(title, { class: "xtitle", x: right, y: bottom + (area.isTall ? 32 : 16), "text-anchor": "end" }),
    );
  if (y.title) names.push(text(shorten(y.title, 60), { class: "ytitle", x: 4, y: top - 4 }));
  group.append(...names);
  return group;
}

/** Returns a label cut to fit beside the lines; it keeps its end, where names differ. */
function endOf(text) {
  return text.length > MOST_LETTERS ? `…${text.slice(1 - MOST_LETTERS)}` : text;
}

/** Draws the values of the largest spikes; a spike that leaves the chart gets a triangle at the edge. */
function drawSpikes(spikes, x, y, area, ink) {
  const isOut = ({ to }) => !(y.place(to) >= area.top && y.place(to) <= area.bottom);
  const reach = ({ from, to }) => Math.abs(y.place(to) - y.place(from));
  // Spikes inside the chart are labelled only if they stand out.
  const isTall = (one) => isOut(one) || reach(one) > (area.bottom - area.top) / 2;
  const shown = spikes
    .filter((one) => x.place(one.x) >= area.left && x.place(one.x) <= area.right && isTall(one))
    .sort((one, other) => reach(other) - reach(one))
    .slice(0, MOST_SPIKES);
  const group = svg("g", { class: "spike-labels" });
  for (const one of shown) {
    const [across, end] = [x.place(one.x), y.place(one.to)];
    const isAbove = end < area.top;
    const down = Math.max(area.top + 4, Math.min(area.bottom - 4, end));
    if (isOut(one))
      group.append(
        svg("path", {
          d: markOf(isAbove ? "triangle-up" : "triangle-down", across, down, 8),
          fill: one.color,
        }),
      );
    const isLeft = across + 50 > area.right;
    const place = { x: across + (isLeft ? -7 : 7), y: down + 4, "text-anchor": isLeft ? "end" : "start" };
    const digit = 10 ** (Math.floor(Math.log10(Math.abs(one.to) || 1)) - 2);
    group.append(textOf(sameNotation([one.to], digit)[0], { fill: ink.text, ...place }));
  }
  return group;
}

/** Draws names at the ends of lines, with leaders so that they don't overlap. */
function drawLabels(labels, y, area, ink) {
  const placed = labels
    .map((one) => ({ ...one, from: y.place(one.value) }))
    .filter(({ from }) => Number.isFinite(from))
    .sort((one, other) => one.from - other.from);
  let end = area.top - 6;
  const group = svg("g", { class: "line-labels" });
  for (const [index, one] of placed.entries()) {
    const from = Math.max(area.top, Math.min(area.bottom, one.from));
    const rest = area.bottom + 4 - (placed.length - index) * 12.5 + 12.5;
    const down = Math.min(Math.max(from, end + 12.5), Math.max(rest, end + 12.5));
    end = down;
    group.append(
      svg("path", {
        d: `M${area.right},${from}L${area.right + 8},${down}h5`,
        stroke: one.color,
        fill: "none",
      }),
      textOf(endOf(one.text), { x: area.right + 16, y: down + 4, fill: ink.text }),
    );
  }
  return group;
}

function build(traces, layout, width, height) {
  const ink = inks();
  const labels = layout.labels ?? [];
  const widest = Math.max(0, ...labels.map(({ text }) => endOf(text).length));
  const margin = { l: 50, r: labels.length ? 24 + widest * CHARACTER : 14, t: 8, b: 26, ...layout.margin };
  const area = {
    left: margin.l,
    right: Math.max(margin.l + 20, width - margin.r),
    top: margin.t,
    bottom: Math.max(margin.t + 20, height - margin.b),
    width,
    isTall: margin.b >= 40,
  };
  const on = traces.filter((trace) => !trace.isInStrip);
  const x = axisOf(
    { share: 0, ...layout.x },
    traces.map((trace) => trace.x),
    area.left,
    area.right,
  );
  const y = axisOf(
    layout.y ?? {},
    on.map((trace) => trace.y),
    area.bottom,
    area.top,
  );
  clips += 1;
  const clip = `plot-clip-${clips}`;
  const frame = {
    x: area.left,
    y: area.top - 2,
    width: area.right - area.left,
    height: area.bottom - area.top + 3,
  };
  const strip = area.bottom - 7;
  const picture = svg(
    "svg",
    {
      class: "main-svg",
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      xmlns: "http://www.w3.org/2000/svg",
    },
    svg("clipPath", { id: clip }, svg("rect", frame)),
    drawAxes(x, y, area, ink),
    svg(
      "g",
      { class: "scatterlayer", "clip-path": `url(#${clip})` },
      ...traces.map((trace) => drawTrace(trace, x, y, strip)),
    ),
    drawSpikes(layout.spikes ?? [], x, y, area, ink),
    drawLabels(labels, y, area, ink),
  );
  return { picture, x, y, area, ink, clip: `url(#${clip})` };
}

/**
 * Draws a plot in an element, in place of an earlier one.
 *
 * @param {any} node gets `data`, the traces, `layout`, and `axes`.
 * @param {any[]} traces lines, areas (with `fillcolor`) and markers, from the back to the front.
 * @param {Object<string, any>} layout `x` and `y`: type, range, ticks, title; margin; labels at the ends of lines; and
 *   callbacks: `onzoom` gets ranges, null for all; `onhover` and `onclick` get a place in the plot; `onleave`.
 */
export function drawPlot(node, traces, layout) {
  const { clientWidth: width, clientHeight: height } = node;
  if (!width || !height) return;
  const { picture, x, y, area, ink, clip } = build(traces, layout, width, height);
  const cursor = svg("g", { class: "cursor", "pointer-events": "none" });
  const brush = svg("rect", { class: "zoom-box", fill: ink.ink, "fill-opacity": 0.08 });
  const drag = svg("rect", {
    class: "nsewdrag",
    x: area.left,
    y: area.top,
    width: area.right - area.left,
    height: area.bottom - area.top,
    fill: "transparent",
  });
  picture.append(cursor, brush, drag);
  Object.assign(node, {
    data: traces,
    layout: { ...layout, xaxis: x, yaxis: y },
    axes: { x, y, area, cursor, brush, ink, clip },
  });
  const old = node.querySelector(":scope > .main-svg");
  // Programs outside find drawn plots by this class.
  node.classList.add("js-plotly-plot");
  if (old) old.replaceWith(picture);
  else {
    fill(node, picture);
    if (!node.isHeard) listen(node);
  }
}

/** Removes a plot. */
export function clearPlot(node) {
  node.querySelector(":scope > .main-svg")?.remove();
  node.classList.remove("js-plotly-plot");
  node.data = undefined;
}

/** Returns the place of the mouse in a plot in pixels, and whether it is within the axes. */
function placeIn(node, event) {
  const box = node.getBoundingClientRect();
  const { area } = node.axes;
  const [across, down] = [event.clientX - box.left, event.clientY - box.top];
  const isIn = across >= area.left && across <= area.right && down >= area.top && down <= area.bottom;
  return { across, down, isIn };
}

/** Handles mouse and touch; the plot may be drawn again meanwhile. */
function listen(node) {
  node.isHeard = true;
  /** @type {{across: number, down: number} | null} */
  let begin = null;
  const within = (value, low, high) => Math.max(low, Math.min(high, value));
  const spanOf = (event) => {
    const { area } = node.axes;
    const place = placeIn(node, event);
    const xs = [begin?.across ?? 0, within(place.across, area.left, area.right)].sort(
      (one, other) => one - other,
    );
    const ys = [begin?.down ?? 0, within(place.down, area.top, area.bottom)].sort(
      (one, other) => one - other,
    );
    const [wide, tall] = [xs[1] - xs[0], ys[1] - ys[0]];
    return {
      xs: wide > LEAST_DRAG && wide * 3 > tall ? xs : null,
      ys: tall > 4 * LEAST_DRAG && tall * 3 > wide ? ys : null,
    };
  };
  node.addEventListener("pointerdown", (event) => {
    if (!node.data || event.button || event.pointerType === "touch" || !node.layout.onzoom) return;
    const place = placeIn(node, event);
    if (place.isIn) begin = place;
  });
  node.addEventListener("pointermove", (event) => {
    if (!node.data) return;
    const place = placeIn(node, event);
    if (begin) {
      const { xs, ys } = spanOf(event);
      const { area, brush } = node.axes;
      const [left, right] = xs ?? [area.left, area.right];
      const [top, bottom] = ys ?? [area.top, area.bottom];
      const box =
        xs || ys ? { x: left, y: top, width: right - left, height: bottom - top } : { width: 0, height: 0 };
      for (const [name, value] of Object.entries(box)) brush.setAttribute(name, String(value));
      if (!node.hasPointerCapture(event.pointerId)) node.setPointerCapture(event.pointerId);
    } else if (place.isIn) node.layout.onhover?.(place);
    else node.layout.onleave?.();
  });
  node.addEventListener("pointerleave", () => node.data && !begin && node.layout.onleave?.());
  node.addEventListener("pointerup", (event) => {
    if (!begin || !node.data) return;
    const { xs, ys } = spanOf(event);
    const { x, y, brush } = node.axes;
    begin = null;
    brush.setAttribute("width", "0");
    if (xs || ys)
      node.layout.onzoom({
        x: xs?.map(x.valueAt) ?? null,
        y: ys ? [y.valueAt(ys[1]), y.valueAt(ys[0])] : null,
      });
  });
  node.addEventListener("pointercancel", () => {
    begin = null;
  });
  node.addEventListener("dblclick", () => node.data && node.layout.onzoom?.(null));
  node.addEventListener("click", (event) => node.data && node.layout.onclick?.(placeIn(node, event)));
}

/** Draws the cursor at a value of x (null removes it), with dots, `{y, color}`, and lines in front of all others. */
export function moveCursor(node, value, dots = [], lines = []) {
  if (!node.data) return;
  const { x, y, area, cursor, ink } = node.axes;
  cursor.replaceChildren();
  const across = value === null ? NaN : x.place(value);
  if (!(across >= area.left && across <= area.right)) return;
  cursor.append(
    svg("path", { d: `M${across},${area.top}V${area.bottom}`, stroke: ink.text, "stroke-opacity": 0.7 }),
  );
  for (const one of lines) {
    const d = pathOf(one.x, one.y, x, y);
    const look = { d, fill: "none", "stroke-linejoin": "round", "clip-path": node.axes.clip };
    cursor.append(svg("path", { ...look, stroke: ink.ground, "stroke-width": 5, "stroke-opacity": 0.7 }));
    cursor.append(svg("path", { ...look, stroke: one.color, "stroke-width": 2.5 }));
  }
  for (const one of dots) {
    const down = y.place(one.y);
    if (down >= area.top && down <= area.bottom)
      cursor.append(
        svg("circle", {
          cx: across,
          cy: down,
          r: 4,
          fill: one.color,
          stroke: ink.ground,
          "stroke-width": 1.5,
        }),
      );
  }
}

/** Returns the nearest marker within some pixels of a place: its trace and index. */
function nearestMark(node, { across, down }, reach) {
  const { x, y } = node.axes;
  /** @type {{trace: any, index: number} | null} */
  let best = null;
  let least = reach;
  for (const trace of node.data)
    for (const [index, value] of trace.x.entries()) {
      const gap = Math.hypot(x.place(value) - across, y.place(trace.y[index]) - down);
      if (gap < least) [best, least] = [{ trace, index }, gap];
    }
  return best;
}

/** Puts a box on the side of a place in a plot where it has room. */
export function putBeside(box, node, across) {
  const isRoom = across + 20 + box.offsetWidth < node.clientWidth;
  const left = isRoom ? across + 16 : across - 16 - box.offsetWidth;
  box.style.left = `${Math.max(4 - node.getBoundingClientRect().left, left)}px`;
}

/** Returns the callbacks of a layout whose marks show their `text` when the mouse is near, and can be clicked. */
export function talking(node, chosen = (_) => {}) {
  const box = el("div", { class: "hover-box", hidden: true });
  return {
    onhover: (place) => {
      const near = nearestMark(node, place, 16);
      box.hidden = !near;
      node.style.cursor = near ? "pointer" : "";
      if (!near) return;
      if (box.parentElement !== node) node.append(box);
      const [first, ...others] = near.trace.text[near.index].split("\n");
      fill(
        box,
        el("b", { dir: "auto" }, first),
        others.map((line) => el("div", { dir: "auto" }, line)),
      );
      putBeside(box, node, place.across);
      box.style.top = `${Math.max(4, place.down - box.offsetHeight - 8)}px`;
    },
    onleave: () => {
      box.hidden = true;
    },
    onclick: (place) => {
      const near = nearestMark(node, place, 16);
      if (near) chosen(near.trace.customdata?.[near.index]);
    },
  };
}

/** Saves a plot as PNG or SVG, with a title and a legend. */
export async function savePlot(node, name, kind) {
  const traces = node.data;
  const named = traces.filter((trace) => ["line", "median"].includes(trace.meta?.part));
  const rows = Math.ceil(named.length / 3);
  const [width, height] = [900, 470 + 18 * rows];
  const margin = { l: 64, r: 20, t: 50, b: 50 + 18 * rows };
  const { picture, ink } = build(traces, { ...node.layout, margin, labels: [] }, width, height);
  const text = (content, attributes) => textOf(content, { fill: ink.ink, "font-size": 12, ...attributes });
  picture.prepend(svg("rect", { width, height, fill: ink.ground }));
  picture.append(text(shorten(name, 100), { x: 18, y: 28, "font-size": 16 }));
  for (const [index, trace] of named.entries()) {
    const [across, down] = [64 + (index % 3) * 280, 470 + 18 * Math.floor(index / 3)];
    picture.append(
      svg("path", {
        d: `M${across},${down - 4}h18`,
        stroke: trace.line?.color ?? trace.marker?.color,
        "stroke-width": 3,
      }),
      text(shorten(trace.name, 38), { x: across + 24, y: down }),
    );
  }
  const content = new XMLSerializer().serializeToString(picture);
  if (kind === "svg") {
    download(`${name}.svg`, content, "image/svg+xml");
    return;
  }
  const image = new Image();
  const canvas = Object.assign(document.createElement("canvas"), { width: 2 * width, height: 2 * height });
  await new Promise((resolve, reject) => {
    image.onload = resolve;
    image.onerror = () => reject(new Error("the browser cannot draw it"));
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(content)}`;
  });
  canvas.getContext("2d")?.drawImage(image, 0, 0, 2 * width, 2 * height);
  download(`${name}.png`, canvas.toDataURL("image/png"), "image/png");
}
