/** The colours of runs by a field: a scale for numbers, or a colour for each word. */

import { bare, labelsOf, RunColumns, STOPS, valueIn } from "./columns.js";
import { el, fill, isDark, shorten } from "./dom.js";
import { ramp } from "./points.js";
import { colorOfSlot, state } from "./state.js";

/** The number of words with a colour of their own; further words are grey. */
const MOST_COLORS = 8;

export function neutral() {
  return isDark() ? "#8b93a5" : "#7b8496";
}

/** Returns the colour of a place on a scale from 0 to 1, readable on the page's background. */
export function shade(place) {
  return `rgb(${ramp(isDark() ? 0.2 + 0.8 * place : 0.88 * place)})`;
}

/** Returns the first, the last, and other ticks whose texts don't overlap. */
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

/** Returns a function that colours a run by the chosen field. */
export function coloring(columns) {
  if (columns.isOfWords(state.sc)) {
    const words = columns.wordsOf(state.sc).slice(0, MOST_COLORS);
    const colors = new Map(words.map((word, at) => [word, colorOfSlot(at, isDark())]));
    return (row) => colors.get(valueIn(row, state.sc)) ?? neutral();
  }
  const { place } = columns.axisOf(state.sc);
  return (row) => {
    const at = place(valueIn(row, state.sc));
    return at === null ? neutral() : shade(at);
  };
}

/** Returns the colours of runs by the chosen field, by id; empty if no run has the field. */
export function huesOf(rows) {
  const columns = Object.assign(new RunColumns(/** @type {any} */ (null), /** @type {any} */ (null)), {
    rows,
  });
  if (!state.sc || rows.every((row) => valueIn(row, state.sc) === undefined)) return new Map();
  const colorOfRow = coloring(columns);
  return new Map(rows.map((row) => [row.id, colorOfRow(row)]));
}

/** Draws the legend of the colours. */
export function drawLegend(legend, columns) {
  legend.hidden = !state.sc;
  if (!state.sc) return;
  const { rows } = columns;
  const isWords = columns.isOfWords(state.sc);
  const { place, ticks } = columns.axisOf(state.sc);
  const words = columns.wordsOf(state.sc);
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
          .map((word, at) => dot(colorOfSlot(at, isDark()), shorten(labels.get(word), 40))),
      isWords && words.length > MOST_COLORS && dot(neutral(), `${words.length - MOST_COLORS} more values`),
      without > 0 && dot(neutral(), `no value: ${without === 1 ? "1 run" : `${without} runs`}`),
    ),
  );
}

/** Returns traces without points: the legend of a saved plot. */
export function legendTraces(columns) {
  const trace = { mode: "markers", x: [], y: [] };
  if (!state.sc) return [];
  if (columns.isOfWords(state.sc)) {
    const words = columns.wordsOf(state.sc).slice(0, MOST_COLORS);
    const labels = labelsOf(words);
    return words.map((word, at) => ({
      ...trace,
      name: shorten(labels.get(word), 40),
      marker: { color: colorOfSlot(at, isDark()), size: 10 },
      meta: { part: "line" },
    }));
  }
  return apart(columns.axisOf(state.sc).ticks).map(([place, text]) => ({
    ...trace,
    name: `${bare(state.sc)} ${text}`,
    marker: { color: shade(place), size: 10 },
    meta: { part: "line" },
  }));
}
