/** The colours of runs by a field: a scale for numbers, or a colour for each word; and their legend, one line. */

import { colorOfSlot, neutral, shade } from "./colors.js";
import { bare, labelsOf, valueIn } from "./columns.js";
import { el, fill, shorten } from "./dom.js";
import { state } from "./state.js";

/** The number of words with a colour of their own; further words are grey. */
const MOST_WORDS = 8;
const STOPS = [0, 0.25, 0.5, 0.75, 1];

/** Returns a function that colours a run by the chosen field. */
export function coloring(columns) {
  if (columns.isOfWords(state.sc)) {
    const words = columns.wordsOf(state.sc).slice(0, MOST_WORDS);
    const colors = new Map(words.map((word, at) => [word, colorOfSlot(at)]));
    return (row) => colors.get(valueIn(row, state.sc)) ?? neutral();
  }
  const { place } = columns.axisOf(state.sc);
  return (row) => {
    const at = place(valueIn(row, state.sc));
    return at === null ? neutral() : shade(at);
  };
}

/** Returns the colours of runs by the chosen field, by id; empty if no run has the field. */
export function huesOf(columns) {
  const { rows } = columns;
  if (!state.sc || rows.every((row) => valueIn(row, state.sc) === undefined)) return new Map();
  const colorOfRow = coloring(columns);
  return new Map(rows.map((row) => [row.id, colorOfRow(row)]));
}

/** Makes the place of the legend. */
export function colorLegend() {
  return el("div", { class: "color-legend", id: "colors", hidden: true });
}

/** Draws the legend of the colours. */
export function drawLegend(legend, columns) {
  const { rows } = columns;
  const without = rows.filter((row) => valueIn(row, state.sc) === undefined).length;
  legend.hidden = !state.sc || without === rows.length;
  if (legend.hidden) return;
  const words = columns.isOfWords(state.sc) ? columns.wordsOf(state.sc) : [];
  const labels = labelsOf(words);
  const dot = (color, text) => el("li", el("i", { style: { background: color } }), text);
  const ticks = columns.axisOf(state.sc).ticks.toSorted((one, other) => one[0] - other[0]);
  fill(
    legend,
    el("strong", { dir: "auto" }, bare(state.sc)),
    !words.length && [
      el("span", ticks[0][1]),
      el("i", { class: "ramp", style: { background: `linear-gradient(to right, ${STOPS.map(shade)})` } }),
      el("span", ticks.at(-1)[1]),
    ],
    el(
      "ul",
      { "aria-label": "Colours" },
      words.slice(0, MOST_WORDS).map((word, at) => dot(colorOfSlot(at), shorten(labels.get(word), 40))),
      words.length > MOST_WORDS && dot(neutral(), `${words.length - MOST_WORDS} more values`),
      without > 0 && dot(neutral(), `no value: ${without === 1 ? "1 run" : `${without} runs`}`),
    ),
  );
}
