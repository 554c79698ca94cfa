/** The scatter plot of Explore: a point for each run, a column against a metric. */

import { coloring, neutral } from "./colors.js";
import { bare, isLog, labelsOf, MOST_TICKS, textIn, valueIn } from "./columns.js";
import { formatNumber, isDark, shorten } from "./dom.js";
import { drawable, PLOT_CONFIG, plotLayout, plotText, plotlyReady } from "./plot.js";
import { state, styleOf, update } from "./state.js";

/** Returns the ticks of an axis with few values: at these values. */
function ticksAt(values) {
  const found = [...new Set(values)].sort((one, other) => one - other);
  if (!found.length || found.length > MOST_TICKS) return {};
  return { tickmode: "array", tickvals: found, ticktext: found.map(formatNumber) };
}

/** Returns the ticks of an axis of words, some of them where there are many. */
function ticksOfWords(words) {
  const every = Math.ceil(words.length / MOST_TICKS);
  const labels = labelsOf(words);
  const places = [...words.keys()].filter((place) => place % every === 0);
  return {
    tickmode: "array",
    tickvals: places,
    ticktext: places.map((place) => plotText(shorten(labels.get(words[place]), 40))),
  };
}

/** Returns the points of runs: their colours, sizes, and what they say of themselves. */
function traceOf(columns, shown, xs, sx, sy) {
  const colorOf = state.sc ? coloring(columns) : null;
  const isOut = columns.outside();
  const isChosen = (row) => state.run.includes(row.id);
  const [ground, ink] = isDark() ? ["#17181b", "#ececef"] : ["#ffffff", "#1a1b1e"];
  const said = [...new Set([sy, sx, state.sc])].filter(Boolean);
  return {
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
        color: shown.map((row) => (state.sc && isChosen(row) ? ink : ground)),
      },
    },
  };
}

/** Draws the plot, and presses a button where its horizontal axis is logarithmic. */
export async function drawScatter(plot, logX, columns) {
  const { sx, sy } = columns.chosen();
  const Plotly = await plotlyReady();
  if (columns.view.isGone) return;
  // What is drawn last is in front: the selected runs.
  const shown = columns.rows
    .filter((row) => valueIn(row, sx) !== undefined && typeof valueIn(row, sy) === "number")
    .sort((one, other) => Number(state.run.includes(one.id)) - Number(state.run.includes(other.id)));
  const isTime = sx === "created_at",
    isText = columns.isOfWords(sx);
  // Words have the places of their order: values that look alike, such as 1 and "1", have two.
  const words = isText ? columns.wordsOf(sx) : [];
  const places = new Map(words.map((word, place) => [word, place]));
  const xs = shown.map((row) =>
    isTime ? row.created_at * 1000 : isText ? places.get(valueIn(row, sx)) : valueIn(row, sx),
  );
  const isLogX = !isTime && !isText && isLog(state.logx, xs);
  logX.setAttribute("aria-pressed", String(isLogX));
  const isNew = !plot.data;
  await Plotly.react(
    plot,
    [traceOf(columns, shown, xs, sx, sy)],
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
        ...(isText ? ticksOfWords(words) : ticksAt(isTime ? [] : xs)),
        title: { text: plotText(bare(sx)), standoff: 6 },
      },
      yaxis: { type: state.logy ? "log" : "linear", title: { text: plotText(bare(sy)), standoff: 6 } },
    }),
    PLOT_CONFIG,
  );
  if (isNew) plot.on("plotly_click", (event) => update({ page: "run", id: event.points[0].customdata }));
}
