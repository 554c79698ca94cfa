/** Hyperparameters against a metric, over all runs that match: a scatter plot and parallel coordinates. */

import { drawable, PLOT_CONFIG, plotLayout, plotText, plotlyReady, savePlot } from "./plot.js";
import { listFields, listRuns } from "./data.js";
import {
  debounce,
  download,
  el,
  fill,
  formatApart,
  formatNumber,
  formatTime,
  inTurn,
  isDark,
  shorten,
  svg,
  toCsv,
} from "./dom.js";
import { FilterField } from "./filter.js";
import { Importance } from "./importance.js";
import { ramp } from "./points.js";
import { filterOf, keepNumbers, numbersOf, state, styleOf, styleOfSlot, update } from "./state.js";
import { View } from "./view.js";

const MOST_SHOWN = 1000;
const MOST_AXES_SHOWN = 12;
const HEIGHT = 340;
const MARGIN = { top: 46, bottom: 24, side: 60 };
/** The least distance of two axes, and the width of a letter of their names. */
const LEAST_GAP = 84;
const LETTER = 7;

const MOST_TICKS = 12;
const MOST_COLUMNS = 300;
/** Values of words that have a colour of their own; the others are grey. */
const MOST_COLORS = 8;
/** Stops of the scale of colours. */
const STOPS = [0, 0.25, 0.5, 0.75, 1];

/** Whether an axis is logarithmic: as chosen, "0" or "1", or else where its positive values span two decades. */
function isLog(chosen, values) {
  if (chosen !== "") return chosen === "1";
  const numbers = values.filter((value) => typeof value === "number");
  const least = Math.min(...numbers);
  return (
    numbers.length > 1 && numbers.length === values.length && least > 0 && Math.max(...numbers) / least >= 100
  );
}

/** Returns the ticks of an axis with few values: at these values. */
function ticksAt(values) {
  const found = [...new Set(values)].sort((one, other) => one - other);
  if (!found.length || found.length > MOST_TICKS) return {};
  return { tickmode: "array", tickvals: found, ticktext: found.map(formatNumber) };
}

/** Returns a text for each of some different values; those that would look alike are told apart. */
function labelsOf(values) {
  const texts = formatApart(values);
  return new Map(values.map((value, at) => [value, texts[at]]));
}

function neutral() {
  return isDark() ? "#8b93a5" : "#7b8496";
}

/** Returns the colour of a place on a scale, from 0 to 1, which the ground of the page does not swallow. */
function shade(place) {
  return `rgb(${ramp(isDark() ? 0.2 + 0.8 * place : 0.88 * place)})`;
}

/** Returns ticks that leave room for their texts beside one another, with the first and the last. */
function apart(ticks) {
  const sorted = ticks.toSorted((one, other) => one[0] - other[0]);
  const last = sorted.at(-1);
  const found = [];
  for (const tick of sorted) {
    const isFree = !found.length || tick[0] - found.at(-1)[0] >= 0.2;
    if (tick === last || (isFree && last[0] - tick[0] >= 0.2)) found.push(tick);
  }
  return found;
}

/** Shows the plots in an element until the returned function is called. */
export function showExplore(root) {
  let fields = [];
  let rows = [];
  let total = 0;
  /** The columns that the rows have. */
  let loaded = new Set();
  /** The values of columns of words, as the server sorts them. */
  const orders = new Map();
  const view = new View("explore");

  const filter = new FilterField(() => fields);
  const x = el("select", {
    id: "scatter-x",
    "aria-label": "Horizontal",
    onchange: () => update({ sx: x.value }),
  });
  const y = el("select", {
    id: "scatter-y",
    "aria-label": "Metric",
    onchange: () => update({ sy: y.value }),
  });
  const hue = el("select", {
    id: "scatter-color",
    "aria-label": "Colours",
    onchange: () => update({ sc: hue.value }),
  });
  const logX = el(
    "button",
    {
      type: "button",
      class: "button",
      onclick: () => update({ logx: logX.getAttribute("aria-pressed") === "true" ? "0" : "1" }),
    },
    "log x",
  );
  const logY = el(
    "button",
    { type: "button", class: "button", onclick: () => update({ logy: state.logy ? "" : "1" }) },
    "log y",
  );
  const count = el("span", { class: "muted count" });
  const plot = el("div", { class: "plot", id: "scatter", style: { height: "310px" } });
  const holder = el("div", { id: "parallel", style: { padding: "0 8px 10px" } });
  const legend = el("div", { class: "color-legend", id: "colors" });
  const importance = new Importance((name) => update({ sx: name }));
  const title = el("h3", {});
  const saves = (kinds) =>
    kinds.map(([kind, act]) =>
      el(
        "button",
        {
          type: "button",
          class: "icon-button",
          style: { width: "auto", padding: "0 7px", "font-size": "11.5px" },
          "aria-label": `Save as ${kind}`,
          onclick: act,
        },
        kind,
      ),
    );
  fill(
    root,
    el(
      "section",
      { class: "page" },
      el(
        "div",
        { class: "toolbar" },
        filter.element,
        y,
        el("label", { class: "pair" }, "against", x),
        logX,
        logY,
        el("label", { class: "pair" }, "colours", hue),
        count,
      ),
      filter.problem,
      el(
        "div",
        { class: "explore-top" },
        el(
          "section",
          { class: "card" },
          el(
            "div",
            { class: "card-head" },
            title,
            saves([
              ["PNG", () => saveScatter("png")],
              ["SVG", () => saveScatter("svg")],
              ["CSV", saveCsv],
            ]),
          ),
          legend,
          plot,
        ),
        importance.element,
      ),
      el(
        "section",
        { class: "card wide" },
        el(
          "div",
          { class: "card-head" },
          el("h3", {}, "Parallel coordinates"),
          el("span", { class: "badge" }, "Drag along an axis to choose a range; click its name to leave it."),
          saves([
            ["SVG", saveParallel],
            ["CSV", saveCsv],
          ]),
        ),
        holder,
      ),
    ),
  );

  const resized = new ResizeObserver(
    debounce(() => {
      if (plot.data && plot.clientWidth) globalThis.Plotly.Plots.resize(plot);
      drawParallel();
    }, 80),
  );
  resized.observe(holder);
  view.until(() => resized.disconnect());

  function hparams() {
    return fields
      .filter(
        ({ name, kind }) =>
          name.startsWith("hparams.") && (kind === "number" || kind === "bool" || kind === "text"),
      )
      .map(({ name }) => name);
  }

  function metrics() {
    return fields
      .filter(({ name, kind }) => name.startsWith("summary.") && kind === "number")
      .map(({ name }) => name);
  }

  /** Returns the chosen column, or the one that says most: a hyperparameter that differs, a metric of evaluation. */
  function chosen() {
    const varied = hparams().filter((name) => new Set(rows.map((row) => row.values[name])).size > 1);
    const main = metrics().toSorted((one, other) => rank(one) - rank(other))[0];
    return {
      sx:
        state.sx ||
        varied.find((name) => /lr|learning/i.test(name)) ||
        varied[0] ||
        hparams()[0] ||
        "created_at",
      sy: state.sy || main || "",
      varied,
    };
  }

  function rank(name) {
    return (
      [/(val|test|eval).*acc/i, /acc/i, /(val|test|eval).*loss/i, /loss|reward|score/i].findIndex((kind) =>
        kind.test(name),
      ) >>> 0
    );
  }

  /** Returns the columns that the link names. */
  function asked() {
    return [state.sx, state.sy, state.sc].filter((name) => /^(hparams|summary)\./.test(name));
  }

  function load() {
    return view.ask(
      async () => {
        fields = (await listFields()).fields;
        // Of more names than an answer has columns: those of the link, and some of both kinds.
        const known = [...hparams().slice(0, MOST_COLUMNS / 2), ...metrics(), ...hparams()];
        const names = [...new Set([...asked().filter((name) => known.includes(name)), ...known])];
        loaded = new Set(names.slice(0, MOST_COLUMNS));
        return listRuns({ where: filterOf(), columns: [...loaded], limit: MOST_SHOWN });
      },
      (answer) => {
        filter.complain(null);
        ({ rows, total } = answer);
        orders.clear();
        drawInOrder();
      },
      (error) => filter.complain(error),
    );
  }

  function isOfWords(name) {
    return rows.some((row) => valueIn(row, name) !== undefined && typeof valueIn(row, name) !== "number");
  }

  /** Asks in which order the words of an axis come, where that is not known yet, and draws. */
  async function drawInOrder() {
    const of = rows;
    const names = [...new Set([chosen().sx, state.sc, ...axes()])].filter(
      (name) => isOfWords(name) && !orders.has(name),
    );
    const sorted = await Promise.all(
      names.map((name) =>
        listRuns({ where: filterOf(), columns: [name], sort: name, limit: MOST_SHOWN }).then(
          (answer) => answer.rows,
          // Without an order they come as the runs do.
          () => rows,
        ),
      ),
    );
    if (view.isGone || of !== rows) return;
    for (const [at, name] of names.entries())
      orders.set(name, [...new Set([...sorted[at], ...rows].map((row) => valueIn(row, name)))]);
    draw();
  }

  function draw() {
    const { sx, sy } = chosen();
    const option = (name) =>
      el("option", { value: name }, shorten(name.replace(/^(summary|hparams)\./, ""), 60));
    fill(
      x,
      el("optgroup", { label: "Hyperparameters" }, hparams().map(option)),
      el("optgroup", { label: "Metrics" }, metrics().map(option)),
      option("created_at"),
    );
    fill(y, metrics().map(option));
    fill(
      hue,
      el("option", { value: "" }, "selected runs"),
      el("optgroup", { label: "Hyperparameters" }, hparams().map(option)),
      el("optgroup", { label: "Metrics" }, metrics().map(option)),
      ["status", "created_at"].map(option),
    );
    x.value = sx;
    y.value = sy;
    hue.value = state.sc;
    logY.setAttribute("aria-pressed", String(state.logy === "1"));
    fill(
      count,
      total > rows.length
        ? `${rows.length} of ${formatNumber(total)} runs`
        : total === 1
          ? "1 run"
          : `${total} runs`,
    );
    fill(title, `${bare(sy)} against ${bare(sx)}`);
    drawLegend();
    drawScatter(sx, sy);
    drawParallel();
    if (sy) importance.follow(sy.replace(/^summary\./, ""), filterOf(), rows);
  }

  function bare(name) {
    return shorten(name.replace(/^(summary|hparams)\./, ""), 60);
  }

  function valueIn(row, name) {
    // What is none has no place on an axis.
    return (name === "created_at" || name === "status" ? row[name] : row.values[name]) ?? undefined;
  }

  /** Returns a value of a column as a text. */
  function textIn(row, name) {
    const value = valueIn(row, name);
    return name === "created_at" ? formatTime(value) : shorten(formatNumber(value), 40);
  }

  /** Returns a function that colours a run by the chosen field: its place on a scale, or its word. */
  function coloring() {
    if (isOfWords(state.sc)) {
      const words = wordsOf(state.sc).slice(0, MOST_COLORS);
      const colors = new Map(words.map((word, at) => [word, styleOfSlot(at, isDark()).color]));
      return (row) => colors.get(valueIn(row, state.sc)) ?? neutral();
    }
    const { place } = axisOf(state.sc);
    return (row) => {
      const at = place(valueIn(row, state.sc));
      return at === null ? neutral() : shade(at);
    };
  }

  function drawLegend() {
    legend.hidden = !state.sc;
    if (!state.sc) return;
    const isWords = isOfWords(state.sc);
    const { place, ticks } = axisOf(state.sc);
    const words = wordsOf(state.sc);
    const labels = labelsOf(words);
    const without = rows.filter((row) => place(valueIn(row, state.sc)) === null).length;
    const dot = (color, text) => el("li", {}, el("i", { style: { background: color } }), text);
    fill(
      legend,
      el("strong", { dir: "auto" }, bare(state.sc)),
      !isWords &&
        without < rows.length &&
        el(
          "div",
          { class: "ramp", style: { background: `linear-gradient(to right, ${STOPS.map(shade)})` } },
          apart(ticks).map(([at, text]) => el("span", { style: { left: `${100 * at}%` } }, text)),
        ),
      el(
        "ul",
        { "aria-label": "Colours" },
        isWords &&
          words
            .slice(0, MOST_COLORS)
            .map((word, at) => dot(styleOfSlot(at, isDark()).color, shorten(labels.get(word), 40))),
        isWords && words.length > MOST_COLORS && dot(neutral(), `${words.length - MOST_COLORS} more values`),
        without > 0 && dot(neutral(), `no value: ${without === 1 ? "1 run" : `${without} runs`}`),
      ),
    );
  }

  /** Returns traces without points, which are a legend of the colours where the plot is saved. */
  function legendTraces() {
    const trace = { type: "scatter", mode: "markers", x: [null], y: [null] };
    if (!state.sc) return [];
    if (isOfWords(state.sc)) {
      const words = wordsOf(state.sc).slice(0, MOST_COLORS);
      const labels = labelsOf(words);
      return words.map((word, at) => ({
        ...trace,
        name: plotText(shorten(labels.get(word), 40)),
        marker: { color: styleOfSlot(at, isDark()).color, size: 10 },
        meta: { part: "line" },
      }));
    }
    const ticks = apart(axisOf(state.sc).ticks);
    const colorbar = {
      title: { text: plotText(bare(state.sc)) },
      tickvals: ticks.map(([place]) => place),
      ticktext: ticks.map(([, text]) => text),
      thickness: 12,
    };
    const colorscale = STOPS.map((place) => [place, shade(place)]);
    return [{ ...trace, marker: { color: [0], cmin: 0, cmax: 1, colorscale, showscale: true, colorbar } }];
  }

  function saveScatter(kind) {
    savePlot(plot, title.textContent, kind, [...plot.data, ...legendTraces()]);
  }

  function isOut(row) {
    for (const name of axes()) {
      const [low, high] = numbersOf("brush", name) ?? [0, 1];
      if (low === 0 && high === 1) continue;
      const place = axisOf(name).place(valueIn(row, name));
      if (place === null || place < low || place > high) return true;
    }
    return false;
  }

  async function drawScatter(sx, sy) {
    const Plotly = await plotlyReady();
    if (view.isGone) return;
    // What is drawn last is in front: the selected runs.
    const shown = rows
      .filter((row) => valueIn(row, sx) !== undefined && typeof valueIn(row, sy) === "number")
      .sort((one, other) => Number(state.run.includes(one.id)) - Number(state.run.includes(other.id)));
    const isTime = sx === "created_at",
      isText = isOfWords(sx);
    // Words have the places of their order: values that look alike, such as 1 and "1", have two.
    const words = isText ? wordsOf(sx) : [];
    const places = new Map(words.map((word, place) => [word, place]));
    const every = Math.ceil(words.length / MOST_TICKS);
    const labels = labelsOf(words);
    const named = words.filter((_, place) => place % every === 0);
    const xs = shown.map((row) =>
      isTime ? row.created_at * 1000 : isText ? places.get(valueIn(row, sx)) : valueIn(row, sx),
    );
    const colorOf = state.sc ? coloring() : null;
    const isChosen = (row) => state.run.includes(row.id);
    const ground = isDark() ? "#17181b" : "#ffffff";
    const said = [...new Set([sy, sx, state.sc])].filter(Boolean);
    const trace = {
      type: "scatter",
      mode: "markers",
      x: drawable(xs),
      y: drawable(shown.map((row) => valueIn(row, sy))),
      hoverinfo: "text",
      customdata: shown.map(({ id }) => id),
      text: shown.map((row) =>
        [shorten(row.name, 60), ...said.map((name) => `${bare(name)} ${textIn(row, name)}`)]
          .map(plotText)
          .join("<br>"),
      ),
      marker: {
        size: shown.map((row) => (isChosen(row) ? 14 : 10)),
        opacity: shown.map((row) => (isOut(row) ? 0.15 : 0.85)),
        color: shown.map((row) =>
          colorOf ? colorOf(row) : isChosen(row) ? styleOf(row.id, isDark()).color : neutral(),
        ),
        line: {
          width: shown.map((row) => (state.sc && isChosen(row) ? 2 : 1)),
          color: shown.map((row) =>
            state.sc && isChosen(row) ? (isDark() ? "#ececef" : "#1a1b1e") : ground,
          ),
        },
      },
    };
    const isLogX = !isTime && !isText && isLog(state.logx, xs);
    logX.setAttribute("aria-pressed", String(isLogX));
    const isNew = !plot.data;
    await Plotly.react(
      plot,
      [trace],
      plotLayout({
        hovermode: "closest",
        hoverdistance: 12,
        margin: { l: 64, r: 18, t: 8, b: 44 },
        hoverlabel: {
          bgcolor: isDark() ? "#1e2024" : "#ffffff",
          bordercolor: isDark() ? "#3a3d44" : "#cfcfc8",
          font: { color: isDark() ? "#ececef" : "#1a1b1e", size: 12 },
        },
        xaxis: {
          type: isTime ? "date" : isLogX ? "log" : "linear",
          ...(isText
            ? {
                tickmode: "array",
                tickvals: named.map((word) => places.get(word)),
                ticktext: named.map((word) => plotText(shorten(labels.get(word), 40))),
              }
            : ticksAt(isTime ? [] : xs)),
          title: { text: plotText(bare(sx)), standoff: 6 },
        },
        yaxis: { type: state.logy ? "log" : "linear", title: { text: plotText(bare(sy)), standoff: 6 } },
      }),
      PLOT_CONFIG,
    );
    if (isNew) plot.on("plotly_click", (event) => update({ page: "run", id: event.points[0].customdata }));
  }

  /** Returns the different values of a column, in order. */
  function wordsOf(name) {
    const there = new Set(rows.map((row) => valueIn(row, name)));
    return (orders.get(name) ?? [...there]).filter((value) => value !== undefined && there.has(value));
  }

  /** Returns where values lie on an axis, from 0 to 1, and its ticks. Positive values over two decades are on a log scale. */
  function axisOf(name) {
    const values = rows
      .map((row) => valueIn(row, name))
      .filter((value) => value !== undefined && value !== null && !Number.isNaN(value));
    if (values.every((value) => typeof value === "number")) {
      const finite = values.filter(Number.isFinite);
      const low = finite.length ? Math.min(...finite) : 0,
        high = finite.length ? Math.max(...finite) : 0;
      const isLogAxis = isLog("", finite);
      // Halves: of two numbers at opposite ends of what a double holds, the distance is infinite.
      const text = name === "created_at" ? formatTime : (value) => formatNumber(Number(value.toPrecision(3)));
      const to = isLogAxis ? Math.log10 : (value) => value;
      const from = isLogAxis ? (value) => 10 ** value : (value) => value;
      const share = (value) => (to(value) / 2 - to(low) / 2) / (to(high) / 2 - to(low) / 2);
      const place = (value) =>
        typeof value === "number" && Number.isFinite(value)
          ? high / 2 > low / 2
            ? share(value)
            : 0.5
          : null;
      // At the values themselves, unless they would lie on one another.
      const few = [...new Set(finite)].sort((one, other) => one - other);
      const isFew =
        few.length <= MOST_TICKS &&
        few.every((value, at) => !at || (place(value) ?? 0) - (place(few[at - 1]) ?? 0) > 0.04);
      return {
        place,
        ticks: isFew
          ? few.map((value) => [
              place(value),
              name === "created_at" ? formatTime(value) : formatNumber(value),
            ])
          : (high > low ? STOPS : [0.5]).map((at) => [at, text(from(to(low) * (1 - at) + to(high) * at))]),
      };
    }
    const words = wordsOf(name);
    const place = (value) => {
      const at = words.indexOf(value);
      return at < 0 ? null : words.length > 1 ? at / (words.length - 1) : 0.5;
    };
    const labels = labelsOf(words);
    return { place, ticks: words.slice(0, 20).map((word) => [place(word), shorten(labels.get(word), 14)]) };
  }

  function axes() {
    const { sy, varied } = chosen();
    const left = state.hide.filter((name) => name.startsWith("hparams."));
    return [...varied.filter((name) => !left.includes(name)).slice(0, MOST_AXES_SHOWN - 1), sy].filter(
      Boolean,
    );
  }

  function drawParallel() {
    if (view.isGone) return;
    const names = axes();
    // On a phone the axes are scrolled.
    if (names.length < 2) {
      fill(holder, el("p", { class: "empty" }, "There is no hyperparameter in which these runs differ."));
      return;
    }
    const width = Math.max(2 * MARGIN.side + (names.length - 1) * LEAST_GAP, holder.clientWidth - 16);
    const gap = (width - 2 * MARGIN.side) / (names.length - 1);
    const inner = HEIGHT - MARGIN.top - MARGIN.bottom;
    const left = (at) => MARGIN.side + at * gap;
    // The names at both ends stand over half of their gap and a part of the margin, the others over half of two.
    const lettersOf = (at) =>
      Math.min(24, Math.floor((at % (names.length - 1) ? gap : gap / 2 + MARGIN.side / 2) / LETTER));
    const top = (place) => MARGIN.top + (1 - place) * inner;
    const scales = names.map(axisOf);
    const color = state.sc
      ? coloring()
      : (row) => {
          const place = scales[names.length - 1].place(valueIn(row, names[names.length - 1]));
          return place === null ? "gray" : shade(place);
        };
    const said = el("p", { class: "muted", style: { padding: "0 10px", "min-height": "20px" } });
    const lines = rows
      .toSorted((one, other) => Number(isOut(other)) - Number(isOut(one)))
      .map((row) => {
        const points = names
          .map((name, at) => ({ across: left(at), place: scales[at].place(valueIn(row, name)) }))
          .filter(({ place }) => place !== null)
          .map(({ across, place }) => `${across.toFixed(1)},${top(place).toFixed(1)}`);
        const line = svg("polyline", {
          points: points.join(" "),
          stroke: color(row),
          class: isOut(row) ? "out" : "",
          "data-run": row.id,
          onpointerenter: () => {
            line.classList.add("over");
            said.textContent = `${shorten(row.name, 80)}: ${names.map((name) => `${bare(name)} ${textIn(row, name)}`).join(", ")}`;
          },
          onpointerleave: () => {
            line.classList.remove("over");
            said.textContent = "";
          },
          onclick: () => update({ page: "run", id: row.id }),
        });
        return line;
      });
    const groups = names.map((name, at) => {
      const held = numbersOf("brush", name);
      const ground = svg("rect", {
        class: "brush-ground",
        x: left(at) - 14,
        y: MARGIN.top - 6,
        width: 28,
        height: inner + 12,
      });
      ground.addEventListener("pointerdown", (event) => startBrush(event, name, ground));
      return svg(
        "g",
        { "data-axis": name },
        svg("line", { class: "axis", x1: left(at), x2: left(at), y1: MARGIN.top, y2: MARGIN.top + inner }),
        svg(
          "text",
          {
            class: "axis-name",
            x: left(at),
            y: 20,
            "text-anchor": at === 0 ? "start" : at === names.length - 1 ? "end" : "middle",
            dx: at === 0 ? -MARGIN.side / 2 : at === names.length - 1 ? MARGIN.side / 2 : 0,
            onclick: () => {
              if (at < names.length - 1) update({ hide: [...state.hide, name] });
            },
          },
          svg("title", {}, bare(name)),
          shorten(bare(name), lettersOf(at)),
        ),
        scales[at].ticks.map(([place, text]) =>
          svg(
            "text",
            {
              x: left(at) + (at === names.length - 1 ? 8 : -8),
              y: top(place) + 4,
              "text-anchor": at === names.length - 1 ? "start" : "end",
            },
            text,
          ),
        ),
        held
          ? svg("rect", {
              class: "brush",
              x: left(at) - 7,
              width: 14,
              y: top(held[1]),
              height: Math.max(2, (held[1] - held[0]) * inner),
              rx: 3,
            })
          : null,
        ground,
      );
    });
    fill(
      holder,
      svg(
        "svg",
        {
          class: "parallel",
          viewBox: `0 0 ${width} ${HEIGHT}`,
          width,
          height: HEIGHT,
          role: "img",
          "aria-label": "Parallel coordinates of hyperparameters and a metric",
        },
        lines,
        groups,
      ),
      said,
      state.hide.some((name) => name.startsWith("hparams.")) &&
        el(
          "button",
          {
            type: "button",
            class: "button quiet",
            onclick: () => update({ hide: state.hide.filter((name) => !name.startsWith("hparams.")) }),
          },
          "Show all axes",
        ),
    );
  }

  function startBrush(event, name, ground) {
    const box = ground.getBoundingClientRect();
    const placeAt = (clientY) => Math.max(0, Math.min(1, 1 - (clientY - box.top - 6) / (box.height - 12)));
    const from = placeAt(event.clientY);
    const move = (moved) => {
      const to = placeAt(moved.clientY);
      keepNumbers(
        "brush",
        name,
        Math.abs(to - from) < 0.015
          ? null
          : [Math.min(from, to), Math.max(from, to)].map((place) => Number(place.toFixed(3))),
      );
    };
    const end = (last) => {
      move(last);
      removeEventListener("pointermove", move);
    };
    addEventListener("pointermove", move);
    addEventListener("pointerup", end, { once: true });
  }

  function saveCsv() {
    const names = [...new Set([...axes(), chosen().sx, state.sc])].filter(Boolean);
    download(
      "runs.csv",
      toCsv([
        ["run", "name", ...names.map(bare)],
        ...rows.map((row) => [row.run_id, row.name, ...names.map((name) => valueIn(row, name))]),
      ]),
      "text/csv",
    );
  }

  function saveParallel() {
    const drawn = holder.querySelector("svg").cloneNode(true);
    const style = document.createElementNS("http://www.w3.org/2000/svg", "style");
    style.textContent = `text{font:11.5px sans-serif;fill:${isDark() ? "#ddd" : "#444"}}.axis{stroke:#999}polyline{fill:none;stroke-width:1.6;stroke-opacity:.75}.out{stroke:#ccc}.brush-ground{fill:none}.brush{fill:#2456c9;fill-opacity:.16}`;
    drawn.prepend(style);
    download("parallel.svg", new XMLSerializer().serializeToString(drawn), "image/svg+xml");
  }

  view.onState((changed) => {
    if (changed.has("where") || changed.has("without")) load();
    else if (
      ["sx", "sy", "sc"].some((name) => changed.has(name)) &&
      asked().some((name) => !loaded.has(name))
    )
      load();
    else if (["sx", "sy", "sc", "logx", "logy", "hide", "run"].some((name) => changed.has(name)))
      drawInOrder();
    else if (changed.has("brush")) {
      const { sx, sy } = chosen();
      drawScatter(sx, sy);
      drawParallel();
    }
  });
  const refresh = inTurn(load);
  view.onData((changed) => {
    if (changed.table) refresh();
  });
  view.onTheme(draw);
  view.until(() => importance.view.leave());
  view.until(() => plot.data && globalThis.Plotly.purge(plot));
  load();
  return () => view.leave();
}
