/** What all plots share: Plotly itself, the layout for light and dark, texts that are no markup, and saving. */

import { download, isDark, shorten } from "./dom.js";

/** Beyond this Plotly computes with infinite ranges; below its reciprocal with empty ones. */
const MOST_DRAWN = 1e300;

/** @type {Promise<any> | undefined} */
let loading;

/** Loads Plotly with the first plot: its script is large, and many views have none. */
export function plotlyReady() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = "static/plotly.min.js";
    script.addEventListener("load", () => resolve(globalThis.Plotly));
    script.addEventListener("error", () => {
      loading = undefined;
      reject(new Error("plotly.min.js could not be loaded."));
    });
    document.head.append(script);
  });
  return loading;
}

/** @type {Promise<unknown>} */
let lastTurn = Promise.resolve();

/** Waits for those that asked before and lets the browser paint: charts appear one by one, and clicks are heard. */
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

/** Returns a text as Plotly shows it: it would take some tags and entities for markup. */
export function plotText(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

/** Returns values as they are drawn: those at the edges of what a double holds are moved to where Plotly can draw. */
export function drawable(values) {
  const isDrawable = (value) =>
    typeof value !== "number" ||
    (Math.abs(value) >= 1 / MOST_DRAWN && Math.abs(value) <= MOST_DRAWN) ||
    value === 0;
  if (values.every(isDrawable)) return values;
  return values.map((value) => {
    if (typeof value !== "number") return value;
    if (Math.abs(value) < 1 / MOST_DRAWN) return 0;
    return Math.max(-MOST_DRAWN, Math.min(MOST_DRAWN, value));
  });
}

/** Returns a colour of the palette with some opacity. */
export function faded(color, opacity) {
  return (
    color +
    Math.round(opacity * 255)
      .toString(16)
      .padStart(2, "0")
  );
}

/** Returns the layout that all plots share. */
export function plotLayout(more = {}) {
  const dark = isDark();
  const axis = {
    gridcolor: dark ? "#25272c" : "#ecece8",
    linecolor: dark ? "#3a3d44" : "#cfcfc8",
    zeroline: false,
    showline: false,
    automargin: false,
    tickfont: { size: 11, color: dark ? "#a2a5ad" : "#5d5f66" },
    title: { font: { size: 11.5, color: dark ? "#a2a5ad" : "#5d5f66" }, standoff: 6 },
    exponentformat: "e",
    fixedrange: false,
  };
  const { xaxis, yaxis, ...rest } = more;
  const merged = (own) => ({ ...axis, ...own, title: { ...axis.title, ...own?.title } });
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "Inter, system-ui, sans-serif", color: dark ? "#ececef" : "#1a1b1e" },
    margin: { l: 52, r: 14, t: 8, b: 34 },
    showlegend: false,
    dragmode: "zoom",
    hovermode: "x",
    hoverdistance: -1,
    autosize: true,
    ...rest,
    xaxis: merged(xaxis),
    yaxis: merged(yaxis),
  };
}

/** What all plots are made with. */
export const PLOT_CONFIG = {
  displayModeBar: false,
  responsive: false,
  doubleClick: "reset",
  showTips: false,
  scrollZoom: false,
};

/** Saves a plot as PNG or SVG, with a title and a legend; of its own traces, or of others. */
export async function savePlot(plot, name, kind, traces = plot.data) {
  const dark = isDark();
  const figure = {
    data: traces.map((trace) => ({ ...trace, showlegend: ["line", "median"].includes(trace.meta?.part) })),
    layout: {
      ...plot.layout,
      width: 900,
      height: 520,
      showlegend: traces.length > 1,
      paper_bgcolor: dark ? "#17181b" : "#ffffff",
      title: { text: plotText(shorten(name, 100)), font: { size: 16 }, x: 0.02, xanchor: "left" },
      margin: { l: 64, r: 20, t: 50, b: 50 },
      legend: { orientation: "h", y: -0.14 },
    },
  };
  const url = await globalThis.Plotly.toImage(figure, { format: kind, width: 900, height: 520, scale: 2 });
  if (kind === "svg")
    download(`${name}.svg`, decodeURIComponent(url.replace(/^data:image\/svg\+xml,/, "")), "image/svg+xml");
  else download(`${name}.png`, url, "image/png");
}
