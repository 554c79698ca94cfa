/** The colours of runs in Explore by a column: a scale of numbers, or a colour for each word. */

import { bare, labelsOf, STOPS, valueIn } from "./columns.js";
import { el, fill, isDark, shorten } from "./dom.js";
import { plotText } from "./plot.js";
import { ramp } from "./points.js";
import { state, styleOfSlot } from "./state.js";

/** Values of words that have a colour of their own; the others are grey. */
const MOST_COLORS = 8;

export function neutral() {
  return isDark() ? "#8b93a5" : "#7b8496";
}

/** Returns the colour of a place on a scale, from 0 to 1, which the ground of the page does not swallow. */
export function shade(place) {
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

/** Returns a function that colours a run by the chosen field: its place on a scale, or its word. */
export function coloring(columns) {
  if (columns.isOfWords(state.sc)) {
    const words = columns.wordsOf(state.sc).slice(0, MOST_COLORS);
    const colors = new Map(words.map((word, at) => [word, styleOfSlot(at, isDark()).color]));
    return (row) => colors.get(valueIn(row, state.sc)) ?? neutral();
  }
  const { place } = columns.axisOf(state.sc);
  return (row) => {
    const at = place(valueIn(row, state.sc));
    return at === null ? neutral() : shade(at);
  };
}

/** Draws what the colours mean. */
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
          .map((word, at) => dot(styleOfSlot(at, isDark()).color, shorten(labels.get(word), 40))),
      isWords && words.length > MOST_COLORS && dot(neutral(), `${words.length - MOST_COLORS} more values`),
      without > 0 && dot(neutral(), `no value: ${without === 1 ? "1 run" : `${without} runs`}`),
    ),
  );
}

/** Returns traces without points, which are a legend of the colours where the plot is saved. */
export function legendTraces(columns) {
  const trace = { type: "scatter", mode: "markers", x: [null], y: [null] };
  if (!state.sc) return [];
  if (columns.isOfWords(state.sc)) {
    const words = columns.wordsOf(state.sc).slice(0, MOST_COLORS);
    const labels = labelsOf(words);
    return words.map((word, at) => ({
      ...trace,
      name: plotText(shorten(labels.get(word), 40)),
      marker: { color: styleOfSlot(at, isDark()).color, size: 10 },
      meta: { part: "line" },
    }));
  }
  const ticks = apart(columns.axisOf(state.sc).ticks);
  const colorbar = {
    title: { text: plotText(bare(state.sc)) },
    tickvals: ticks.map(([place]) => place),
    ticktext: ticks.map(([, text]) => text),
    thickness: 12,
  };
  const colorscale = STOPS.map((place) => [place, shade(place)]);
  return [{ ...trace, marker: { color: [0], cmin: 0, cmax: 1, colorscale, showscale: true, colorbar } }];
}
