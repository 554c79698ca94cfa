/** The page of charts: one for each metric, in sections by prefix. Only charts on screen are drawn. */

import { MetricChart } from "./chart.js";
import { colorOfBand } from "./colors.js";
import { isExported } from "./data.js";
import { button, debounce, el, fill, icon, inTurn, menu, nothing, setMenu, shorten } from "./dom.js";
import { colorLegend } from "./legend.js";
import { chartRank, matcherOf } from "./names.js";
import { pieceOf, showBesideRuns, visibleRows } from "./sidebar.js";
import { linkTo, state, toggle, update, visibleRuns, whenViewed } from "./state.js";
import { View } from "./view.js";
import { unfoldButton } from "./viewbar.js";

const PINNED = "\u0000pinned";
const X_AXES = [
  ["step", "Step"],
  ["epoch", "Epoch"],
  ["time", "Wall time"],
  ["relative", "Relative time"],
];
const BANDS = [
  ["", "Single runs"],
  ["std", "Mean ± std"],
  ["stderr", "Mean ± stderr"],
  ["range", "Median, min – max"],
  ["ranks", "Over ranks"],
];
const MOST_AXES = 100;
const LEAST_WIDTH = 325;
const GAP = 14;
const CARD_HEIGHT = 296;
/** Sections get their cards when they are this near: most of thousands are never seen. */
const NEAR_PX = 3000;

/** The controls above the charts. */
class ChartTools {
  constructor() {
    this.find = el("input", {
      type: "search",
      id: "search",
      placeholder: "Metrics: words, glob, /re/",
      "aria-label": "Search metrics",
      value: state.find,
      oninput: debounce(() => update({ find: this.find.value }), 120),
      onchange: () => update({ find: this.find.value }),
    });
    this.axis = menu("x-axis", "X axis", (x) => update({ x, zoom: [] }));
    this.band = menu("band", "Band", (band) => update({ band }));
    this.logX = button("log x", () => update({ logx: state.logx === "1" ? "" : "1", zoom: [] }), {
      id: "log-x",
    });
    this.logY = button("log y", () => update({ logy: state.logy ? "" : "1" }), { id: "log-y" });
    this.said = el("output");
    this.outliers = button("Outliers", () => update({ outliers: state.outliers ? "" : "1" }), {
      id: "outliers",
    });
    this.smooth = el("input", {
      type: "range",
      id: "smooth",
      min: 0,
      max: 0.99,
      step: 0.01,
      "aria-label": "Smoothing",
      title: "Double-click for auto: only noisy lines are smoothed, with the raw values behind",
      oninput: () => update({ smooth: String(Number(this.smooth.value)) }),
      ondblclick: () => update({ smooth: "" }),
    });
    this.colors = colorLegend();
    this.fold = () => {};
    this.folds = button("", () => this.fold(), { class: "button quiet", id: "fold-all" });
    this.hidden = button("", () => update({ hide: [] }), { class: "button quiet" });
    this.zoom = button("Reset zoom", () => update({ zoom: [] }));
    this.element = el(
      "div.toolbar",
      el("label.field.search", icon("search"), this.find),
      this.axis,
      this.logX,
      this.logY,
      this.outliers,
      el("label.slider.button", "Smooth", this.smooth, this.said),
      !isExported && this.band,
      this.folds,
      this.hidden,
      this.zoom,
      this.colors,
      unfoldButton(),
    );
  }

  /** Draws the button that folds or unfolds all sections. */
  drawFolds(prefixes) {
    const all = prefixes.map((prefix) => `/${prefix}`);
    const isAll = all.length > 0 && all.every((one) => state.fold.includes(one));
    this.folds.hidden = all.length < 2;
    fill(this.folds, isAll ? "Unfold all" : "Fold all");
    this.fold = () => update({ fold: isAll ? [] : all });
  }

  /** Draws the choices, and the current one of each. */
  draw(metrics) {
    const others = metrics.slice(0, MOST_AXES).map((name) => [`metric:${name}`, shorten(name, 60)]);
    if (!others.concat(X_AXES).some(([value]) => value === state.x))
      others.push([state.x, shorten(state.x.replace(/^metric:/, ""), 60)]);
    setMenu(this.axis, X_AXES, state.x, isExported ? {} : { Metrics: others });
    setMenu(this.band, BANDS, state.band);
    this.logX.setAttribute("aria-pressed", String(state.logx === "1"));
    this.logY.setAttribute("aria-pressed", String(state.logy === "1"));
    this.outliers.setAttribute("aria-pressed", String(state.outliers === "1"));
    this.smooth.value = state.smooth || "0";
    fill(this.said, Number(state.smooth) ? Number(state.smooth).toFixed(2) : state.smooth ? "off" : "auto");
    this.zoom.hidden = !state.zoom.length;
    this.hidden.hidden = !state.hide.length;
    fill(this.hidden, `Show ${state.hide.length} hidden`);
    if (document.activeElement !== this.find) this.find.value = state.find;
  }
}

/** The legend of bands, beside the charts in place of the runs. */
class BandLegend {
  constructor() {
    /** The band of each label, from the chart that has most of its runs. */
    this.bands = new Map();
    this.element = el("ul", { class: "legend band-legend", "aria-label": "Bands", hidden: true });
  }

  /** Adds a band. The server numbers the bands, so that colours are the same in all charts. */
  note(band) {
    const held = this.bands.get(band.label);
    if (band.number === held?.number && band.members.length <= held.members.length) return;
    this.bands.set(band.label, band);
    this.draw();
  }

  draw() {
    this.element.hidden = !this.bands.size;
    fill(
      this.element,
      [...this.bands.values()]
        .toSorted((one, other) => one.number - other.number)
        .map((band) =>
          el(
            "li",
            pieceOf(colorOfBand(band)),
            el("span", { title: shorten(band.label, 300), dir: "auto" }, shorten(band.label, 60)),
            el("span.muted", band.members.length === 1 ? "1 run" : `${band.members.length} runs`),
          ),
        ),
    );
  }

  forget() {
    this.bands.clear();
    this.draw();
  }
}

/** The charts of the visible runs, in their sections. */
class Charts {
  /** @param {View} view of the page. */
  constructor(view) {
    this.view = view;
    this.charts = new Map();
    this.metrics = [];
    /** Metrics that never change in any visible run. */
    this.constants = new Set();
    this.isBegun = false;
    this.problem = "";
    this.tools = new ChartTools();
    this.legend = new BandLegend();
    this.sections = el("div.sections");
    // A small section takes only as many columns as it has charts, so that others fit beside it.
    const fitted = new ResizeObserver(() => this.fit());
    fitted.observe(this.sections);
    this.inView = new IntersectionObserver(
      (entries) => {
        for (const { target, isIntersecting } of entries)
          this.charts.get(target.getAttribute("data-metric"))?.setVisible(isIntersecting);
      },
      { rootMargin: "160px" },
    );
    this.columns = 3;
    /** The metrics of sections that have no cards yet. */
    this.waiting = new WeakMap();
    /** The metrics of cards that have several, by the name of the card. */
    this.joined = new Map();
    this.near = new IntersectionObserver(
      (entries) => {
        for (const { target, isIntersecting } of entries) if (isIntersecting) this.fillCards(target);
      },
      { rootMargin: `${NEAR_PX}px` },
    );
    view.until(() => {
      fitted.disconnect();
      this.inView.disconnect();
      this.near.disconnect();
      for (const chart of this.charts.values()) chart.remove();
    });
  }

  fit() {
    const columns = Math.max(1, Math.floor((this.sections.clientWidth + GAP) / (LEAST_WIDTH + GAP)));
    this.columns = columns;
    this.sections.style.setProperty("--grid", String(columns));
    for (const section of this.sections.querySelectorAll(".chart-section"))
      section.style.setProperty(
        "--span",
        String(Math.min(columns, Number(section.style.getPropertyValue("--charts")))),
      );
  }

  chartOf(metric) {
    const metrics = this.joined.get(metric);
    const about = metrics ? { metrics } : { noteBand: (band) => this.legend.note(band) };
    if (!this.charts.has(metric)) this.charts.set(metric, new MetricChart(metric, about));
    return this.charts.get(metric);
  }

  rankOf(name) {
    return chartRank(name, this.constants);
  }

  /** Puts the charts in their sections; charts that stay are not drawn again. */
  arrange() {
    const isFound = matcherOf(state.find);
    const shown = this.metrics.filter((name) => !state.hide.includes(name) && isFound(name));
    const groups = this.grouped(shown);
    const joined = groups.filter((group) => state.join.includes(`/${group[0]}`));
    this.joined = new Map(joined.map(([prefix, names]) => [`${prefix}/*`, names]));
    const kept = new Set(groups.flatMap(([prefix, names]) => this.cardsOf(prefix, names)));
    for (const [name, chart] of this.charts)
      if (!kept.has(name)) {
        this.inView.unobserve(chart.element);
        chart.remove();
        this.charts.delete(name);
      }
    for (const [name, metrics] of this.joined) this.charts.get(name)?.setMetrics(metrics);
    fill(
      this.sections,
      groups.length ? groups.map(([prefix, names]) => this.section(prefix, names)) : this.nothing(),
    );
    this.tools.drawFolds(groups.map(([prefix]) => prefix));
    this.fit();
    for (const chart of this.charts.values()) chart.mark();
  }

  /** Returns the names of the cards of a section: one for each metric, or a single one for all. */
  cardsOf(prefix, names) {
    return this.joined.has(`${prefix}/*`) ? [`${prefix}/*`] : names;
  }

  /** Fills a section with its cards. */
  fillCards(cards) {
    const names = this.waiting.get(cards);
    if (!names) return;
    this.waiting.delete(cards);
    this.near.unobserve(cards);
    cards.style.minHeight = "";
    fill(
      cards,
      names.map((name) => this.chartOf(name).element),
    );
    for (const name of names) this.inView.observe(this.chartOf(name).element);
  }

  /** Returns the metrics by prefix, in order; pinned metrics are the first group. */
  grouped(shown) {
    const groups = new Map();
    const pinned = shown.filter((name) => state.pin.includes(name));
    if (pinned.length) groups.set(PINNED, pinned);
    for (const name of shown) {
      if (state.pin.includes(name)) continue;
      const prefix = name.includes("/") ? name.slice(0, name.indexOf("/")) : "";
      if (!groups.has(prefix)) groups.set(prefix, []);
      groups.get(prefix).push(name);
    }
    const placeOf = ([prefix, names]) =>
      prefix === PINNED ? -1 : Math.min(...names.map((name) => this.rankOf(name)));
    return [...groups].sort((one, other) => placeOf(one) - placeOf(other) || one[0].localeCompare(other[0]));
  }

  section(prefix, names) {
    const isFolded = state.fold.includes(`/${prefix}`);
    const title = prefix === PINNED ? "Pinned" : prefix || "Metrics";
    const shown = this.cardsOf(prefix, names);
    const isWide = isFolded || shown.some((name) => state.open.includes(name));
    const height = Math.ceil(shown.length / Math.min(this.columns, shown.length)) * CARD_HEIGHT;
    const cards = el("div", { class: "cards", hidden: isFolded, style: { "min-height": `${height}px` } });
    this.waiting.set(cards, shown);
    // Cards that exist already stay, without a flicker.
    if (shown.some((name) => this.charts.has(name))) this.fillCards(cards);
    else this.near.observe(cards);
    return el(
      "section",
      {
        "data-section": prefix,
        class: "chart-section",
        style: { "--charts": isWide ? 999 : shown.length },
      },
      el(
        "div.section-head",
        button([icon("chevron"), shorten(title, 80)], () => toggle("fold", `/${prefix}`), {
          class: "",
          "aria-expanded": String(!isFolded),
        }),
        el("span.muted", String(names.length)),
        names.length > 1 &&
          !isFolded &&
          prefix !== PINNED &&
          button(shown === names ? "as one chart" : "as single charts", () => toggle("join", `/${prefix}`), {
            class: "join",
          }),
        isFolded &&
          el(
            "span.muted.inside",
            names
              .slice(0, 8)
              .map((name) => name.slice(name.indexOf("/") + 1))
              .join(", "),
          ),
      ),
      cards,
    );
  }

  /** Returns the text for a page without charts. */
  nothing() {
    const isChosen = visibleRuns().length > 0;
    const reason = this.metrics.length
      ? "No metric has this name."
      : this.problem || "These runs have no metrics yet.";
    return isChosen ? nothing(reason) : nothing("No run is selected.", linkTo({ page: "runs" }));
  }

  /** Requests the metrics of the visible runs; returns whether they changed. */
  async loadMetrics() {
    let isNew = false;
    const wasWrong = this.problem !== "";
    await this.view.ask(
      visibleRows,
      (rows) => {
        const there = rows.filter(Boolean);
        this.problem =
          there.length || !rows.length
            ? ""
            : isExported
              ? "These runs are not in the exported site."
              : "These runs don't exist any more.";
        if (this.problem) return;
        const moving = new Set(
          there.flatMap(({ metrics, constant }) => metrics.filter((name) => !constant.includes(name))),
        );
        const found = [...new Set(there.flatMap((row) => row.metrics))];
        this.constants = new Set(found.filter((name) => !moving.has(name)));
        found.sort((one, other) => this.rankOf(one) - this.rankOf(other) || one.localeCompare(other));
        isNew = wasWrong || JSON.stringify(found) !== JSON.stringify(this.metrics);
        this.metrics = found;
      },
      // If the request fails, the charts stay.
      (error) => {
        this.problem = error.message;
      },
    );
    return isNew;
  }

  async begin() {
    try {
      await whenViewed();
      await this.loadMetrics();
    } catch (error) {
      fill(this.sections, el("p.empty", error.message));
      return;
    }
    if (this.view.isGone) return;
    this.isBegun = true;
    this.tools.draw(this.metrics);
    this.arrange();
  }

  async refresh() {
    if (!this.isBegun) await this.begin();
    else if (await this.loadMetrics()) {
      this.arrange();
      this.tools.draw(this.metrics);
    }
  }

  /** Applies a change of the URL. */
  async follow(changed) {
    const { charts } = this;
    const has = (...names) => names.some((name) => changed.has(name));
    if (has("run", "off")) {
      await this.loadMetrics();
      if (this.view.isGone) return;
      for (const chart of charts.values()) chart.isStale = true;
      this.arrange();
      for (const chart of charts.values()) if (chart.isVisible) chart.load();
    } else if (has("find", "pin", "hide", "fold", "open", "join")) this.arrange();
    if (has("band", "group", "goal", "run", "off")) this.legend.forget();
    if (has("x", "band") || (has("group", "goal") && state.band))
      for (const chart of charts.values()) chart.invalidate();
    else if (has("zoom")) for (const chart of charts.values()) chart.followZoom();
    else if (has("smooth", "logx", "logy", "outliers", "hues")) this.drawVisible();
    if (has("hues")) this.legend.draw();
    this.tools.draw(this.metrics);
  }

  drawVisible() {
    for (const chart of this.charts.values()) if (chart.isVisible) chart.draw();
  }
}

/** Shows the charts in an element until the returned function is called. */
export function showCharts(root) {
  const view = new View("charts");
  const charts = new Charts(view);
  view.until(showBesideRuns(root, charts.tools.colors, charts.tools.element, charts.sections));
  root.querySelector(".sidebar").append(charts.legend.element);
  view.onState((changed) => charts.follow(changed));
  const refresh = inTurn(() => charts.refresh());
  view.onData(async (changed) => {
    const ids = changed.all ? visibleRuns() : Object.keys(changed.runs);
    if (changed.all || Object.values(changed.runs).some(({ record, gone }) => record || gone))
      await refresh();
    if (ids.length) for (const chart of charts.charts.values()) chart.grow(ids);
  });
  view.onTheme(() => {
    charts.legend.draw();
    charts.drawVisible();
  });
  charts.begin();
  return () => view.leave();
}
