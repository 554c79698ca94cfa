/** Parallel coordinates: a line for each run over axes of hyperparameters and a metric; each axis can have a range. */

import { shade } from "./colors.js";
import { bare, textIn, valueIn } from "./columns.js";
import { el, fill, shorten, svg } from "./dom.js";
import { coloring } from "./legend.js";
import { keepNumbers, numbersOf, state, update } from "./state.js";

const HEIGHT = 340;
const MARGIN = { top: 46, bottom: 24, side: 60 };
const INNER = HEIGHT - MARGIN.top - MARGIN.bottom;
/** The least distance between two axes, and the width of a letter. */
const LEAST_GAP = 84;
const LETTER = 7;

/** Returns the y of a place on an axis. */
function yOf(place) {
  return MARGIN.top + (1 - place) * INNER;
}

/** Sets the range that the pointer drags along an axis. */
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
  const ended = new AbortController();
  const { signal } = ended;
  addEventListener("pointermove", move, { signal });
  addEventListener(
    "pointerup",
    (last) => {
      move(last);
      ended.abort();
    },
    { signal },
  );
  // When a touch becomes a scroll, the range so far stays.
  addEventListener("pointercancel", () => ended.abort(), { signal });
}

/** Draws the line of a run; its values are shown while the pointer is on it. */
function lineOf(row, { names, scales, left }, look, said) {
  const points = names
    .map((name, at) => ({ across: left(at), place: scales[at].place(valueIn(row, name)) }))
    .filter(({ place }) => place !== null)
    .map(({ across, place }) => `${across.toFixed(1)},${yOf(place).toFixed(1)}`);
  const line = svg("polyline", {
    points: points.join(" "),
    ...look,
    "data-run": row.id,
    onpointerenter: () => {
      const values = names.map((name) => `${bare(name)} ${textIn(row, name)}`);
      line.classList.add("over");
      said.textContent = `${shorten(row.name, 80)}: ${values.join(", ")}`;
    },
    onpointerleave: () => {
      line.classList.remove("over");
      said.textContent = "";
    },
    onclick: () => update({ page: "run", id: row.id }),
  });
  return line;
}

/** Draws an axis with its name, ticks and range. */
function axisAt(at, { names, scales, left, gap }) {
  const name = names[at];
  const x = left(at);
  const isFirst = at === 0,
    isLast = at === names.length - 1;
  const held = numbersOf("brush", name);
  // Names at both ends have half a gap and a part of the margin; the others have two halves.
  const room = isFirst || isLast ? gap / 2 + MARGIN.side / 2 : gap;
  const ground = svg("rect", {
    class: "brush-ground",
    x: x - 14,
    y: MARGIN.top - 6,
    width: 28,
    height: INNER + 12,
  });
  ground.addEventListener("pointerdown", (event) => startBrush(event, name, ground));
  return svg(
    "g",
    { "data-axis": name },
    svg("line", { class: "axis", x1: x, x2: x, y1: MARGIN.top, y2: MARGIN.top + INNER }),
    svg(
      "text",
      {
        class: "axis-name",
        x,
        y: 20,
        "text-anchor": isFirst ? "start" : isLast ? "end" : "middle",
        dx: isFirst ? -MARGIN.side / 2 : isLast ? MARGIN.side / 2 : 0,
        onclick: () => !isLast && update({ hide: [...state.hide, name] }),
      },
      svg("title", {}, bare(name)),
      shorten(bare(name), Math.min(24, Math.floor(room / LETTER))),
    ),
    scales[at].ticks.map(([place, text]) =>
      svg(
        "text",
        { x: x + (isLast ? 8 : -8), y: yOf(place) + 4, "text-anchor": isLast ? "start" : "end" },
        text,
      ),
    ),
    held
      ? svg("rect", {
          class: "brush",
          x: x - 7,
          width: 14,
          y: yOf(held[1]),
          height: Math.max(2, (held[1] - held[0]) * INNER),
          rx: 3,
        })
      : null,
    ground,
  );
}

/** Draws the plot into an element. */
export function drawParallel(holder, columns) {
  if (columns.view.isGone) return;
  const names = columns.axes();
  if (names.length < 2) {
    fill(holder, el("p.empty", "These runs have the same hyperparameters."));
    return;
  }
  // On a phone the axes scroll.
  const width = Math.max(2 * MARGIN.side + (names.length - 1) * LEAST_GAP, holder.clientWidth - 16);
  const gap = (width - 2 * MARGIN.side) / (names.length - 1);
  const scales = names.map((name) => columns.axisOf(name));
  const frame = { names, scales, gap, left: (at) => MARGIN.side + at * gap };
  const shadeOfMetric = (row) => {
    const place = scales[names.length - 1].place(valueIn(row, names[names.length - 1]));
    return place === null ? "gray" : shade(place);
  };
  const color = state.sc ? coloring(columns) : shadeOfMetric;
  const isOut = columns.outside();
  const said = el("p", { class: "muted", style: { padding: "0 10px", "min-height": "20px" } });
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
      columns.rows
        .toSorted((one, other) => Number(isOut(other)) - Number(isOut(one)))
        .map((row) => lineOf(row, frame, { stroke: color(row), class: isOut(row) ? "out" : "" }, said)),
      names.map((_, at) => axisAt(at, frame)),
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
