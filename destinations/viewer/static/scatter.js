/** The scatter plot of Explore: a point for each run, a column against a metric. */

import { colorOf, neutral } from "./colors.js";
import { bare, isLog, labelsOf, MOST_TICKS, textIn, valueIn } from "./columns.js";
import { formatNumber, isDark, shorten } from "./dom.js";
import { coloring } from "./legend.js";
import { drawPlot, talking } from "./plot.js";
import { state, update } from "./state.js";

/** Returns ticks at the values of an axis, if these are few. */
function ticksAt(values) {
  const found = [...new Set(values)].sort((one, other) => one - other);
  if (!found.length || found.length > MOST_TICKS) return {};
  return { ticks: found.map((value) => [value, formatNumber(value)]) };
}

/** Returns ticks at the words of an axis, at every nth if there are many. */
function ticksOfWords(words) {
  const every = Math.ceil(words.length / MOST_TICKS);
  const labels = labelsOf(words);
  const places = [...words.keys()].filter((place) => place % every === 0);
  return { ticks: places.map((place) => [place, shorten(labels.get(words[place]), 40)]) };
}

/** Returns the points of runs with colours, sizes and texts. */
function traceOf(columns, shown, xs, sx, sy) {
  const byField = state.sc ? coloring(columns) : null;
  const isOut = columns.outside();
  const isChosen = (row) => state.run.includes(row.id);
  const [ground, ink] = isDark() ? ["#17181b", "#ececef"] : ["#ffffff", "#1a1b1e"];
  const said = [...new Set([sy, sx, state.sc])].filter(Boolean);
  return {
    mode: "markers",
    x: xs,
    y: shown.map((row) => valueIn(row, sy)),
    customdata: shown.map(({ id }) => id),
    text: shown.map((row) =>
      [shorten(row.name, 60), ...said.map((name) => `${bare(name)} ${textIn(row, name)}`)].join("\n"),
    ),
    marker: {
      size: shown.map((row) => (isChosen(row) ? 14 : 10)),
      opacity: shown.map((row) => (isOut(row) ? 0.15 : 0.85)),
      color: shown.map((row) => (byField ? byField(row) : isChosen(row) ? colorOf(row.id) : neutral())),
      line: {
        width: shown.map((row) => (state.sc && isChosen(row) ? 2 : 1)),
        color: shown.map((row) => (state.sc && isChosen(row) ? ink : ground)),
      },
    },
  };
}

/** Draws the plot, and shows in the button whether the x axis is logarithmic; returns what a log axis leaves out. */
export function drawScatter(plot, logX, columns) {
  const { sx, sy } = columns.chosen();
  // The chosen runs are drawn last: in front.
  const shown = columns.rows
    .filter((row) => valueIn(row, sx) !== undefined && typeof valueIn(row, sy) === "number")
    .sort((one, other) => Number(state.run.includes(one.id)) - Number(state.run.includes(other.id)));
  const isTime = sx === "created_at",
    isText = columns.isOfWords(sx);
  // The place of a word is its rank: values that look alike, such as 1 and "1", stay apart.
  const words = isText ? columns.wordsOf(sx) : [];
  const places = new Map(words.map((word, place) => [word, place]));
  const xs = shown.map((row) =>
    isTime ? row.created_at : isText ? places.get(valueIn(row, sx)) : valueIn(row, sx),
  );
  const isLogX = !isTime && !isText && isLog(state.logx, xs);
  logX.setAttribute("aria-pressed", String(isLogX));
  drawPlot(plot, [traceOf(columns, shown, xs, sx, sy)], {
    margin: { l: 58, r: 18, t: 18, b: 44 },
    x: {
      type: isTime ? "date" : isLogX ? "log" : "linear",
      share: 0.04,
      title: bare(sx),
      ...(isText ? ticksOfWords(words) : ticksAt(isTime ? [] : xs)),
    },
    y: { type: state.logy ? "log" : "linear", title: bare(sy) },
    ...talking(plot, (id) => update({ page: "run", id })),
  });
  const isOut = (row, at) => (isLogX && !(xs[at] > 0)) || (state.logy && !(valueIn(row, sy) > 0));
  const count = shown.filter(isOut).length;
  return count ? `▾ ${count === 1 ? "1 run" : `${count} runs`} at ≤ 0: a log axis can't show them.` : "";
}
