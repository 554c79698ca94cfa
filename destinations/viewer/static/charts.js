/** The view of charts: one for each metric, in sections by prefix. Only those in the viewport are drawn. */

import { MetricChart } from "./chart.js";
import { isExported, listFields } from "./data.js";
import { debounce, el, fill, icon, inTurn, shorten } from "./dom.js";
import { chartRank } from "./names.js";
import { plotlyReady } from "./plot.js";
import { bandSwatch, ensureSelection, showBesideRuns, visibleRows } from "./sidebar.js";
import { linkTo, state, toggle, update, visibleRuns } from "./state.js";
import { View } from "./view.js";

const PINNED = "\u0000pinned";
const X_AXES = [
  ["step", "Step"],
  ["epoch", "Epoch"],
  ["time", "Wall time"],
  ["relative", "Relative time"],
];
const MOST_AXES = 200;
const LEAST_WIDTH = 325;
const GAP = 14;

/** Shows the charts in an element until the returned function is called. */
export function showCharts(root) {
  // Its script is large: it is compiled while the server is asked.
  plotlyReady().catch(() => {});
  const charts = new Map();
  let metrics = [];
  /** Metrics that have one value throughout, in all visible runs. */
  let constants = new Set();
  const rankOf = (name) => chartRank(name, constants);
  let hparams = [];
  const view = new View("charts");
  let isBegun = false;
  let problem = "";

  const sections = el("div", { class: "sections" });
  const find = el("input", {
    type: "search",
    id: "search",
    placeholder: "Search metrics",
    "aria-label": "Search metrics",
    value: state.find,
    oninput: debounce(() => update({ find: find.value }), 120),
    onchange: () => update({ find: find.value }),
  });
  const axis = el("select", {
    "aria-label": "X axis",
    id: "x-axis",
    onchange: () => update({ x: axis.value, zoom: [] }),
  });
  const band = el("select", {
    "aria-label": "Band",
    id: "band",
    onchange: () => update({ band: band.value }),
  });
  const logX = el(
    "button",
    {
      type: "button",
      class: "button",
      id: "log-x",
      onclick: () => update({ logx: state.logx === "1" ? "" : "1", zoom: [] }),
    },
    "log x",
  );
  const logY = el(
    "button",
    { type: "button", class: "button", id: "log-y", onclick: () => update({ logy: state.logy ? "" : "1" }) },
    "log y",
  );
  const said = el("output", {});
  const smooth = el("input", {
    type: "range",
    id: "smooth",
    min: 0,
    max: 0.99,
    step: 0.01,
    "aria-label": "Smoothing",
    title: "Double-click for auto: lines that are mostly noise are smoothed, with the values behind",
    oninput: () => update({ smooth: String(Number(smooth.value)) }),
    ondblclick: () => update({ smooth: "" }),
  });
  const legend = el("ul", { class: "band-legend", "aria-label": "Bands", hidden: true });
  /** Number of the colour and of the runs of each band, by its label. */
  const bands = new Map();
  const hidden = el("button", { type: "button", class: "button quiet", onclick: () => update({ hide: [] }) });
  const leaveSidebar = showBesideRuns(
    root,
    el(
      "div",
      { class: "toolbar" },
      el("label", { class: "field search" }, icon("search"), find),
      axis,
      logX,
      logY,
      el("label", { class: "slider button" }, "Smooth", smooth, said),
      !isExported && band,
      hidden,
    ),
    legend,
    sections,
  );

  // A section of few charts takes as many columns, so that small sections stand side by side.
  const fitted = new ResizeObserver(fit);
  fitted.observe(sections);
  view.until(leaveSidebar);
  view.until(() => fitted.disconnect());
  function fit() {
    const columns = Math.max(1, Math.floor((sections.clientWidth + GAP) / (LEAST_WIDTH + GAP)));
    sections.style.setProperty("--grid", String(columns));
    for (const section of sections.querySelectorAll(".chart-section"))
      section.style.setProperty(
        "--span",
        String(Math.min(columns, Number(section.style.getPropertyValue("--charts")))),
      );
  }

  const inView = new IntersectionObserver(
    (entries) => {
      for (const entry of entries)
        charts.get(entry.target.getAttribute("data-metric"))?.setVisible(entry.isIntersecting);
    },
    { rootMargin: "160px" },
  );

  function drawTools() {
    const others = metrics.slice(0, MOST_AXES).map((name) => [`metric:${name}`, shorten(name, 60)]);
    if (!isExported && !others.concat(X_AXES).some(([value]) => value === state.x))
      others.push([state.x, shorten(state.x.replace(/^metric:/, ""), 60)]);
    fill(
      axis,
      X_AXES.map(([value, name]) => el("option", { value }, name)),
      !isExported &&
        el(
          "optgroup",
          { label: "Metrics" },
          others.map(([value, name]) => el("option", { value }, name)),
        ),
    );
    axis.value = state.x;
    fill(
      band,
      el("option", { value: "" }, "Single runs"),
      el("option", { value: "ranks" }, "Band over ranks"),
      el(
        "optgroup",
        { label: "Runs alike but for" },
        hparams.map((name) =>
          el("option", { value: `over:${name}` }, `Band over ${shorten(name.replace(/^hparams\./, ""), 50)}`),
        ),
      ),
      el(
        "optgroup",
        { label: "Runs of the same value of" },
        hparams.map((name) =>
          el(
            "option",
            { value: `group:${name}` },
            `Band for each ${shorten(name.replace(/^hparams\./, ""), 50)}`,
          ),
        ),
      ),
    );
    band.value = state.band;
    logX.setAttribute("aria-pressed", String(state.logx === "1"));
    logY.setAttribute("aria-pressed", String(state.logy === "1"));
    smooth.value = state.smooth || "0";
    fill(said, Number(state.smooth) ? Number(state.smooth).toFixed(2) : state.smooth ? "off" : "auto");
    hidden.hidden = !state.hide.length;
    fill(hidden, `Show ${state.hide.length} hidden`);
    if (document.activeElement !== find) find.value = state.find;
  }

  /** Returns the number of the colour of a band, the same in all charts, and shows it in the legend. */
  function bandStyle(label, count) {
    if (!bands.has(label)) bands.set(label, { number: bands.size, count: 0 });
    const band = bands.get(label);
    if (count > band.count) {
      band.count = count;
      drawLegend();
    }
    return band.number;
  }

  function drawLegend() {
    legend.hidden = !bands.size;
    fill(
      legend,
      [...bands].map(([label, { number, count }]) =>
        el(
          "li",
          {},
          bandSwatch(number),
          el("span", { title: shorten(label, 300), dir: "auto" }, shorten(label, 60)),
          el("span", { class: "muted" }, count === 1 ? "1 run" : `${count} runs`),
        ),
      ),
    );
  }

  function forgetBands() {
    bands.clear();
    drawLegend();
  }

  function chartOf(metric) {
    if (!charts.has(metric)) charts.set(metric, new MetricChart(metric, { bandStyle }));
    return charts.get(metric);
  }

  /** Puts the charts in their sections; those that stay are not drawn again. */
  function arrange() {
    const word = state.find.toLowerCase();
    const shown = metrics.filter((name) => !state.hide.includes(name) && name.toLowerCase().includes(word));
    const groups = new Map();
    const pinned = shown.filter((name) => state.pin.includes(name));
    if (pinned.length) groups.set(PINNED, pinned);
    for (const name of shown) {
      if (state.pin.includes(name)) continue;
      const prefix = name.includes("/") ? name.slice(0, name.indexOf("/")) : "";
      if (!groups.has(prefix)) groups.set(prefix, []);
      groups.get(prefix).push(name);
    }
    const placeOf = (prefix) => (prefix === PINNED ? -1 : Math.min(...groups.get(prefix).map(rankOf)));
    const order = [...groups.keys()].sort(
      (one, other) => placeOf(one) - placeOf(other) || one.localeCompare(other),
    );
    const kept = new Set(shown);
    for (const [name, chart] of charts)
      if (!kept.has(name)) {
        inView.unobserve(chart.element);
        chart.remove();
        charts.delete(name);
      }
    const nodes = order.map((prefix) => {
      const isFolded = state.fold.includes(`/${prefix}`);
      const title = prefix === PINNED ? "Pinned" : prefix || "Metrics";
      const isWide = isFolded || groups.get(prefix).some((name) => state.open.includes(name));
      return el(
        "section",
        {
          "data-section": prefix,
          class: "chart-section",
          style: { "--charts": isWide ? 999 : groups.get(prefix).length },
        },
        el(
          "div",
          { class: "section-head" },
          el(
            "button",
            {
              type: "button",
              "aria-expanded": String(!isFolded),
              onclick: () => toggle("fold", `/${prefix}`),
            },
            icon("chevron"),
            shorten(title, 80),
          ),
          el("span", { class: "muted" }, String(groups.get(prefix).length)),
        ),
        el(
          "div",
          { class: "cards", hidden: isFolded },
          groups.get(prefix).map((name) => chartOf(name).element),
        ),
      );
    });
    fill(
      sections,
      nodes.length
        ? nodes
        : el(
            "div",
            { class: "empty" },
            emptyText(),
            el("br", {}),
            visibleRuns().length
              ? null
              : el("a", { class: "button", ...linkTo({ page: "runs" }) }, "Choose runs"),
          ),
    );
    fit();
    for (const chart of charts.values()) {
      chart.mark();
      inView.observe(chart.element);
    }
  }

  function emptyText() {
    if (!visibleRuns().length) return "No run is selected.";
    if (metrics.length) return "No metric has this name.";
    if (problem) return problem;
    return "These runs have no metrics yet.";
  }

  /** Asks which metrics the visible runs have; returns whether there are others than before. */
  async function loadMetrics() {
    let isNew = false;
    const wasWrong = problem !== "";
    await view.ask(
      visibleRows,
      (rows) => {
        const there = rows.filter(Boolean);
        problem =
          there.length || !rows.length
            ? ""
            : isExported
              ? "These runs are not in the exported site."
              : "These runs are not there any more.";
        if (problem) return;
        const moving = new Set(
          there.flatMap(({ metrics, constant }) => metrics.filter((name) => !constant.includes(name))),
        );
        const found = [...new Set(there.flatMap((row) => row.metrics))];
        constants = new Set(found.filter((name) => !moving.has(name)));
        found.sort((one, other) => rankOf(one) - rankOf(other) || one.localeCompare(other));
        isNew = wasWrong || JSON.stringify(found) !== JSON.stringify(metrics);
        metrics = found;
      },
      // Where no run answers, the charts stay.
      (error) => {
        problem = error.message;
      },
    );
    return isNew;
  }

  async function begin() {
    try {
      await ensureSelection(() => view.isGone);
      const [fields] = await Promise.all([listFields(), loadMetrics()]);
      hparams = fields.fields
        .map(({ name }) => name)
        .filter((name) => name.startsWith("hparams."))
        .slice(0, MOST_AXES);
    } catch (error) {
      fill(sections, el("p", { class: "empty" }, error.message));
      return;
    }
    if (view.isGone) return;
    isBegun = true;
    drawTools();
    arrange();
  }

  view.onState(async (changed) => {
    if (changed.has("run") || changed.has("off")) {
      await loadMetrics();
      if (view.isGone) return;
      for (const chart of charts.values()) chart.isStale = true;
      arrange();
      for (const chart of charts.values()) if (chart.isVisible) chart.load();
    } else if (["find", "pin", "hide", "fold", "open"].some((name) => changed.has(name))) arrange();
    if (changed.has("band") || changed.has("run") || changed.has("off")) forgetBands();
    if (changed.has("x") || changed.has("band")) for (const chart of charts.values()) chart.invalidate();
    else if (changed.has("zoom")) for (const chart of charts.values()) chart.followZoom();
    else if (["smooth", "logx", "logy"].some((name) => changed.has(name)))
      for (const chart of charts.values()) if (chart.isVisible) chart.draw();
    drawTools();
  });
  const refresh = inTurn(async () => {
    if (!isBegun) await begin();
    else if (await loadMetrics()) {
      arrange();
      drawTools();
    }
  });
  view.onData(async (changed) => {
    const ids = changed.all ? visibleRuns() : Object.keys(changed.runs);
    if (changed.all || Object.values(changed.runs).some(({ record, gone }) => record || gone))
      await refresh();
    if (ids.length) for (const chart of charts.values()) chart.grow(ids);
  });
  view.onTheme(() => {
    drawLegend();
    for (const chart of charts.values()) if (chart.isVisible) chart.draw();
  });
  view.until(() => {
    inView.disconnect();
    for (const chart of charts.values()) chart.remove();
  });
  begin();
  return () => view.leave();
}
