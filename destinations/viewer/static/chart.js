/** One chart of one metric: the lines of the selected runs, drawn by Plotly, and what one can do with it. */

import {
  coarse,
  joinedTraces,
  nearest,
  outline,
  smoothed,
  stretchEnds,
  weightFor,
  weightOf,
} from "./curves.js";
import { readBands, readSeries, runInfo } from "./data.js";
import {
  debounce,
  download,
  el,
  fill,
  formatDuration,
  formatNumber,
  formatTime,
  iconButton,
  isDark,
  popover,
  icon,
  shorten,
  toCsv,
  toast,
} from "./dom.js";
import {
  drawable,
  faded,
  PLOT_CONFIG,
  plotLayout,
  plotText,
  plotlyReady,
  savePlot,
  turnToDraw,
} from "./plot.js";
import { keepNumbers, numbersOf, state, styleOf, styleOfSlot, toggle, visibleRuns } from "./state.js";

const POINTS = 1000;
/** Points of all lines of a chart together: what is finer than its pixels is not seen, and takes a second to draw. */
const MOST_POINTS = 20000;
const LEAST_POINTS = 200;
/** More lines than these have no ranges of their own: those of all are one pale ground. */
const MOST_RANGES = 10;
const GROW_MS = 900;
const AGAIN_MS = 3000;
const MOST_IN_HOVER = 14;
const MOST_RUNS = 200;
/** Lines of named writers; runs beyond the colours have other dashes. */
const WRITER_DASHES = ["longdash", "dashdot", "longdashdot"];

function nameOfStraggler({ run, rank }) {
  return state.band === "ranks" ? `rank ${rank}` : shorten(runInfo(run).name, 100);
}

/** Returns the zoom of a metric that is in the URL: `[x0, x1, y0, y1]`, where a missing one is null. */
function zoomOf(metric) {
  const zoom = numbersOf("zoom", metric);
  return zoom?.length === 4 ? zoom : null;
}

/** A chart of one metric, as a card. It asks for data when it comes into view, and is taken down when it leaves. */
export class MetricChart {
  /**
   * @param {string} metric
   * @param {{noteBand?: (band: {label: string, number: number, members: any[]}) => void, runs?: () => string[]}} about
   *   `noteBand` is told of each band that is drawn: without it there are none, and the card is not pinned or hidden.
   *   `runs` returns the ids of the runs that it shows.
   */
  constructor(metric, { noteBand, runs = visibleRuns }) {
    this.metric = metric;
    this.noteBand = noteBand;
    this.runs = runs;
    this.series = [];
    this.bands = null;
    /** @type {any[]} What is drawn, in the coordinates of the axes. */
    this.lines = [];
    this.isVisible = false;
    this.isDrawn = false;
    this.isStale = true;
    this.isLoading = false;
    this.isBehind = false;
    /** @type {Promise<void> | null} The draw that waits for its turn. */
    this.drawing = null;
    this.question = 0;
    this.unit = 1;
    this.plot = el("div", { class: "plot" });
    this.note = el("div", { class: "note" }, "Loading…");
    this.box = el("div", { class: "hover-box", hidden: true });
    this.furthest = el("p", { hidden: true });
    /** @type {any[]} The bands at the place of the mouse that have a straggler. */
    this.hoveredBands = [];
    this.foot = el("p", { class: "card-foot" });
    this.badge = el("span", { class: "badge" });
    this.pinButton = iconButton("pin", "Pin", () => toggle("pin", metric));
    this.wideButton = iconButton("expand", "Enlarge", () => toggle("open", metric));
    const save = popover(
      [icon("download")],
      { class: "icon-button", title: "Save", "aria-label": `Save ${shorten(metric, 60)}` },
      (close) =>
        [
          ["png", "PNG"],
          ["svg", "SVG"],
          ["csv", "CSV of the points drawn"],
        ].map(([kind, name]) =>
          el(
            "button",
            {
              type: "button",
              class: "choice",
              onclick: () => {
                close();
                this.save(kind);
              },
            },
            name,
          ),
        ),
    );
    this.element = el(
      "section",
      { class: "card chart", "data-metric": metric, "aria-label": `Chart of ${shorten(metric, 100)}` },
      el(
        "div",
        { class: "card-head" },
        el("h3", { title: shorten(metric, 300), dir: "auto" }, shorten(metric, 120)),
        this.badge,
        noteBand && iconButton("eyeOff", "Hide this chart", () => toggle("hide", metric)),
        noteBand && this.pinButton,
        this.wideButton,
        save,
      ),
      this.plot,
      this.foot,
    );
    this.plot.append(this.note);
    // Plotly tells of a move along x alone.
    this.plot.addEventListener("pointermove", (event) => {
      if (!this.box.hidden) this.nameStraggler(event.clientY);
    });
    this.resized = new ResizeObserver(
      debounce(() => {
        if (this.isDrawn && this.plot.clientWidth) globalThis.Plotly.Plots.resize(this.plot);
      }, 60),
    );
    this.resized.observe(this.plot);
    this.mark();
  }

  mark() {
    const isPinned = state.pin.includes(this.metric),
      isWide = state.open.includes(this.metric);
    this.pinButton.setAttribute("aria-pressed", String(isPinned));
    this.wideButton.setAttribute("aria-pressed", String(isWide));
    this.element.classList.toggle("wide", isWide);
  }

  setVisible(isVisible) {
    this.isVisible = isVisible;
    if (isVisible && this.isStale) this.load();
    else if (isVisible && !this.isDrawn) this.draw();
    else if (!isVisible && this.isDrawn) {
      globalThis.Plotly.purge(this.plot);
      this.isDrawn = false;
    }
  }

  /** Asks again if the zoom in the URL is another than the one drawn. */
  followZoom() {
    if (JSON.stringify(zoomOf(this.metric)) !== JSON.stringify(this.zoom ?? null)) this.invalidate();
  }

  /** Says that the data is no longer what the view asks for. */
  invalidate() {
    this.isStale = true;
    if (this.isVisible) this.load();
  }

  async load() {
    this.isStale = false;
    this.isLoading = true;
    this.question += 1;
    const mine = this.question;
    const zoom = zoomOf(this.metric);
    const runs = this.runs().slice(0, MOST_RUNS);
    this.zoom = zoom;
    const part = { from: zoom?.[0] ?? undefined, to: zoom?.[1] ?? undefined };
    try {
      let found = [],
        bands = null;
      const kind = this.noteBand ? state.band.split(":", 1)[0] : "";
      if (runs.length && kind) {
        const by = { group: "group", over: "over" }[kind];
        const x = ["step", "epoch", "relative"].includes(state.x) ? state.x : "step";
        bands = await readBands({
          runs,
          metric: this.metric,
          x,
          ...part,
          points: POINTS,
          ...(by ? { [by]: state.band.slice(kind.length + 1) } : { ranks: 1 }),
        });
      } else if (runs.length) {
        found = await readSeries({
          runs,
          metric: this.metric,
          x: state.x,
          ...part,
          points: pointsFor(runs.length),
          branches: true,
        });
      }
      if (mine !== this.question) return;
      this.series = found;
      this.bands = bands;
      this.problem = "";
    } catch (error) {
      if (mine !== this.question) return;
      this.series = [];
      this.bands = null;
      this.problem = error.message;
    }
    this.isLoading = false;
    if (this.isBehind) setTimeout(() => this.catchUp(), GROW_MS);
    if (this.isVisible) await this.draw();
    else this.isDrawn = false;
  }

  /** Asks for what was told of while something else was asked for. */
  catchUp() {
    if (!this.isBehind || this.isLoading || this.isGrowing) return;
    this.isBehind = false;
    this.grow(this.runs());
  }

  /** Asks for what runs have logged since, and adds it to the lines. */
  async grow(ids) {
    if (!ids.some((id) => this.runs().includes(id))) return;
    if (!this.isVisible) {
      this.isStale = true;
      return;
    }
    if (this.isGrowing || this.isLoading) {
      // An answer that is on its way need not have it.
      this.isBehind = true;
      return;
    }
    const held = this.series.length > 0 && this.series.every((one) => one.cursor !== undefined);
    if (!held || this.bands || this.zoom) {
      this.load();
      return;
    }
    const points = pointsFor(this.series.length);
    if (this.series.some((one) => one.x.length > 2 * points)) {
      this.load();
      return;
    }
    this.isGrowing = true;
    const mine = this.question;
    try {
      const runs = [...new Set(this.series.map((one) => one.run))];
      const news = await readSeries({
        runs,
        metric: this.metric,
        x: state.x,
        points,
        known: this.series.filter((one) => !isBranch(one)),
      });
      if (mine !== this.question) return;
      // Where rows are gone, a resume may have left a branch that is not here yet.
      const hadRows = new Set(this.series.filter((one) => one.x.length).map(keyOf));
      const held = new Set(this.series.filter((one) => !isBranch(one)).map(keyOf));
      // Where another writer has begun, or one is gone, there are other lines.
      const isSame = news.length === held.size && news.every((one) => held.has(keyOf(one)));
      if (!isSame || news.some((one) => !one.append && hadRows.has(keyOf(one)))) {
        this.isStale = true;
        return;
      }
      const newOf = new Map(news.map((one) => [keyOf(one), one]));
      this.series = this.series.map((one) => {
        const more = newOf.get(keyOf(one));
        return isBranch(one) ? one : more.append ? joined(one, more) : more;
      });
      if (this.isVisible) await this.draw();
    } catch {
      // What is shown stays; what is new is asked for with the next change, or when the server answers again.
    } finally {
      setTimeout(() => {
        this.isGrowing = false;
        if (this.isStale) this.invalidate();
        else this.catchUp();
      }, GROW_MS);
    }
  }

  /** Converts x of the API to that of the axis: local time in ms, or another unit. */
  toAxis(x) {
    if (state.x === "time") return x * 1000 - new Date(x * 1000).getTimezoneOffset() * 60000;
    return x / this.unit;
  }

  fromAxis(value) {
    if (state.x !== "time") return Number(value) * this.unit;
    const local = typeof value === "number" ? value : Date.parse(`${String(value).replace(" ", "T")}Z`);
    return (local + new Date(local).getTimezoneOffset() * 60000) / 1000;
  }

  chooseUnit(lists) {
    this.unit = 1;
    this.axisTitle =
      { step: "step", epoch: "epoch", time: "", relative: "seconds" }[state.x] ??
      state.x.replace(/^metric:/, "");
    if (state.x !== "relative") return;
    const most = Math.max(0, ...lists.map((x) => x.at(-1) ?? 0));
    if (most > 3 * 3600) [this.unit, this.axisTitle] = [3600, "hours"];
    else if (most > 180) [this.unit, this.axisTitle] = [60, "minutes"];
  }

  /** Draws what is held, when it is its turn; what is asked for until then is drawn with it. */
  draw() {
    this.drawing ??= turnToDraw().then(() => {
      this.drawing = null;
      return this.drawNow();
    });
    return this.drawing;
  }

  async drawNow() {
    let Plotly;
    try {
      Plotly = await plotlyReady();
    } catch (error) {
      fill(this.note, error.message);
      setTimeout(() => this.isVisible && !this.isDrawn && this.draw(), AGAIN_MS);
      return;
    }
    if (!this.isVisible) return;
    const isEmpty = !(this.bands ?? this.series).some((one) => one.x.length || one.nan?.length);
    if (isEmpty) {
      if (this.isDrawn) Plotly.purge(this.plot);
      this.isDrawn = false;
      fill(
        this.note,
        this.problem ||
          (this.runs().length
            ? (this.series.find((one) => one.error)?.error ?? "No value yet.")
            : "No run is selected."),
      );
      fill(this.plot, this.note);
      fill(this.foot);
      return;
    }
    this.box.hidden = true;
    const traces = this.bands ? this.bandTraces() : this.lineTraces();
    const isNew = !this.isDrawn;
    if (isNew) fill(this.plot);
    // Before it is waited for: what is drawn meanwhile is drawn into this plot.
    this.isDrawn = true;
    const drawn = Plotly.react(this.plot, traces, this.layout(), PLOT_CONFIG);
    if (isNew) {
      this.plot.on("plotly_relayout", (event) => this.zoomed(event));
      this.plot.on("plotly_hover", (event) => this.hovered(event));
      this.plot.on("plotly_unhover", () => {
        this.box.hidden = true;
      });
      this.plot.append(this.box);
    }
    this.drawFoot();
    await drawn;
  }

  /** @param {boolean} isJoined whether many lines of one style are one trace, which takes a third of the time. */
  lineTraces(isJoined = this.series.length > MOST_RANGES) {
    this.chooseUnit(this.series.map((one) => one.x));
    const behind = [],
      ranges = [],
      lines = [];
    const isMany = this.series.length > MOST_RANGES;
    const writersOf = writersByRun(this.series);
    this.lines = [];
    // The last run that was selected is drawn first, so that the first is on top.
    for (const one of this.series.slice().reverse()) {
      const { color, dash: ownDash } = styleOf(one.run, isDark());
      const isLeft = isBranch(one);
      const x = drawable(one.x.map((value) => this.toAxis(value)));
      const writers = writersOf.get(one.run) ?? [];
      const dash = writers.length > 1 && one.writer ? dashOf(writers, one.writer) : ownDash;
      const label = labelOf(one, writers);
      const name = plotText(shorten(label, 60));
      const base = {
        type: "scatter",
        mode: "lines",
        hoverinfo: "none",
        name,
        meta: { run: one.run, writer: one.writer ?? "", branch: one.branch ?? null },
      };
      if (one.low && isMany) ranges.push(outline(...coarse(x, drawable(one.low), drawable(one.high))));
      else if (one.low)
        behind.push({
          ...base,
          ...outline(x, drawable(one.low), drawable(one.high)),
          line: { width: 0, color },
          fill: "toself",
          fillcolor: faded(color, isDark() ? 0.2 : 0.16),
          hoverinfo: "skip",
          meta: { ...base.meta, part: "range" },
        });
      const line = { color, dash: isLeft ? "dot" : dash, width: isLeft ? 1.2 : 1.7 };
      const weight = isLeft ? 0 : weightFor(one.y, state.smooth, isMany);
      const isSmooth = weight > 0;
      if (isSmooth)
        behind.push({
          ...base,
          x,
          y: drawable(one.y),
          line: { ...line, width: 1.1 },
          opacity: 0.3,
          hoverinfo: "skip",
          meta: { ...base.meta, part: "raw" },
        });
      const y = isSmooth ? smoothed(one.y, weight) : one.y;
      const isPoint = one.y.filter((value) => value !== null).length === 1;
      lines.push({
        ...base,
        x,
        y: drawable(y),
        line: isSmooth ? { ...line, width: 2 } : line,
        opacity: isLeft ? 0.6 : 1,
        mode: isPoint ? "markers" : "lines",
        marker: { color, size: 7 },
        meta: { ...base.meta, part: "line" },
      });
      this.lines.push({ run: one.run, label, isLeft, color, x, y, raw: one.y });
      for (const [list, symbol, kind] of [
        [one.nan, "x-thin", "NaN"],
        [one.inf, "triangle-up", "infinite"],
      ]) {
        if (list?.length)
          lines.push({
            ...base,
            mode: "markers",
            yaxis: "y2",
            x: drawable(stretchEnds(list, one).map((value) => this.toAxis(value))),
            y: stretchEnds(list, one).map(() => 0.03),
            hoverinfo: "skip",
            marker: { symbol, size: 8, color, line: { color, width: 2 } },
            meta: { ...base.meta, part: kind },
          });
      }
    }
    if (ranges.length)
      behind.unshift({
        type: "scatter",
        mode: "lines",
        hoverinfo: "skip",
        x: ranges.flatMap((one) => [...one.x, null]),
        y: ranges.flatMap((one) => [...one.y, null]),
        line: { width: 0 },
        fill: "toself",
        fillcolor: isDark() ? "rgba(162, 165, 173, 0.14)" : "rgba(93, 95, 102, 0.1)",
        meta: { run: null, branch: null, part: "ranges" },
      });
    return isJoined ? joinedTraces([...behind, ...lines]) : [...behind, ...lines];
  }

  bandTraces() {
    this.chooseUnit(this.bands.map((one) => one.x));
    const traces = [];
    this.lines = [];
    this.bands.forEach((band) => {
      const isRun = state.band === "ranks" && band.members.length;
      const { color, dash } = isRun
        ? { ...styleOf(band.members[0].run, isDark()), dash: "solid" }
        : styleOfSlot(band.number, isDark());
      if (!isRun) this.noteBand?.(band);
      const x = drawable(band.x.map((value) => this.toAxis(value)));
      const name = plotText(shorten(isRun ? runInfo(band.members[0].run).name : band.label, 60));
      const base = { type: "scatter", mode: "lines", name, meta: { band: band.label } };
      traces.unshift({
        ...base,
        ...outline(x, drawable(band.low), drawable(band.high)),
        line: { width: 0, color },
        fill: "toself",
        fillcolor: faded(color, 0.2),
        hoverinfo: "skip",
        meta: { ...base.meta, part: "range" },
      });
      traces.push({
        ...base,
        x,
        y: drawable(smoothed(band.median, weightOf(state.smooth))),
        line: { color, dash, width: 2 },
        hoverinfo: "none",
        meta: { ...base.meta, part: "median" },
      });
      this.lines.push({
        label: isRun ? runInfo(band.members[0].run).name : `${band.label} (${band.members.length})`,
        name: isRun ? runInfo(band.members[0].run).name : band.label,
        color,
        x,
        y: band.median,
        raw: band.median,
        straggler: band.straggler,
        low: band.low,
        high: band.high,
      });
    });
    return traces;
  }

  layout() {
    const zoom = this.zoom;
    const isLogX = state.logx === "1" && state.x !== "time",
      isLogY = state.logy === "1";
    const log = (value, isLog) => (isLog ? Math.log10(Math.max(value, 1e-300)) : value);
    const range = (low, high, isLog) =>
      low !== null && low !== undefined && high !== null
        ? { range: [log(low, isLog), log(high, isLog)], autorange: false }
        : { autorange: true };
    return plotLayout({
      margin: { l: 54, r: 14, t: 6, b: this.axisTitle ? 40 : 28 },
      uirevision: `${state.x}${zoom}`,
      xaxis: {
        type: state.x === "time" ? "date" : isLogX ? "log" : "linear",
        title: { text: plotText(shorten(this.axisTitle, 60)), standoff: 4 },
        showgrid: false,
        showline: true,
        ticks: "outside",
        ticklen: 4,
        nticks: 7,
        showspikes: true,
        spikemode: "across",
        spikethickness: 1,
        spikedash: "solid",
        spikecolor: isDark() ? "#4a4d55" : "#c4c4bd",
        spikesnap: "cursor",
        ...(zoom
          ? range(this.toAxis(zoom[0] ?? 0), zoom[1] === null ? null : this.toAxis(zoom[1]), isLogX)
          : { autorange: true }),
      },
      yaxis: {
        type: isLogY ? "log" : "linear",
        nticks: 6,
        ...(zoom ? range(zoom[2], zoom[3], isLogY) : { autorange: true }),
      },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
    });
  }

  zoomed(event) {
    const isReset = event["xaxis.autorange"] || event["yaxis.autorange"];
    if (isReset) {
      if (this.zoom) keepNumbers("zoom", this.metric, null);
      return;
    }
    const of = (axis, isLog) => {
      const pair = [
        event[`${axis}.range[0]`] ?? event[`${axis}.range`]?.[0],
        event[`${axis}.range[1]`] ?? event[`${axis}.range`]?.[1],
      ];
      return pair[0] === undefined ? null : pair.map((value) => (isLog ? 10 ** Number(value) : value));
    };
    const x = of("xaxis", state.logx === "1" && state.x !== "time")?.map((value) => this.fromAxis(value));
    const y = of("yaxis", state.logy === "1");
    if (!x && !y) return;
    const [x0, x1, y0, y1] = this.zoom ?? [null, null, null, null];
    // Thirteen digits are milliseconds since 1970.
    const round = (value) => (value === null ? null : Number(Number(value).toPrecision(13)));
    keepNumbers(
      "zoom",
      this.metric,
      [...(x ?? [x0, x1]), ...(y ?? (x ? [null, null] : [y0, y1]))].map(round),
    );
  }

  hovered(event) {
    const at = Number(event.xvals?.[0] ?? event.points[0].x);
    const isLogX = state.logx === "1" && state.x !== "time";
    const where = isLogX && event.xvals ? 10 ** at : at;
    const found = [];
    for (const line of this.lines) {
      const index = nearest(line.x, where);
      if (index >= 0 && line.raw[index] !== null) found.push({ ...line, index, value: line.raw[index] });
    }
    if (!found.length) {
      this.box.hidden = true;
      return;
    }
    found.sort((one, other) => other.value - one.value);
    const close = found.reduce((best, one) =>
      Math.abs(one.x[one.index] - where) < Math.abs(best.x[best.index] - where) ? one : best,
    );
    const x = close.x[close.index];
    const title =
      state.x === "time"
        ? formatTime(this.fromAxis(x))
        : state.x === "relative"
          ? formatDuration(x * this.unit)
          : `${this.axisTitle} ${formatNumber(x)}`;
    fill(
      this.box,
      el("header", {}, shorten(title, 60)),
      found
        .slice(0, MOST_IN_HOVER)
        .map((one) =>
          el(
            "div",
            {},
            el("i", { style: { background: one.color } }),
            el(
              "span",
              { dir: "auto" },
              shorten(one.label ?? runInfo(one.run).name, 34),
              one.isLeft ? " (left)" : "",
            ),
            el("b", {}, formatNumber(one.value)),
            one.low
              ? el(
                  "small",
                  { class: "muted" },
                  `${formatNumber(one.low[one.index])} – ${formatNumber(one.high[one.index])}`,
                )
              : null,
          ),
        ),
      found.length > MOST_IN_HOVER &&
        el("div", { class: "more" }, `and ${found.length - MOST_IN_HOVER} more`),
      this.furthest,
    );
    this.hoveredBands = found.filter((one) => one.straggler);
    this.nameStraggler(event.event?.clientY ?? 0);
    this.box.hidden = false;
    const across = event.event?.clientX ?? 0,
      width = this.box.offsetWidth;
    const isRoom = across + 20 + width < document.documentElement.clientWidth;
    const edge = this.plot.getBoundingClientRect().left;
    this.box.style.left = `${Math.max(8, isRoom ? across + 20 : across - 20 - width) - edge}px`;
    this.box.style.top = "4px";
  }

  /** Says which member of the band that is nearest to the mouse is furthest from its median. */
  nameStraggler(clientY) {
    const { top, height } = this.plot.querySelector(".nsewdrag").getBoundingClientRect();
    const [low, high] = this.plot.layout.yaxis.range;
    const level = high - ((clientY - top) / height) * (high - low);
    const gap = ({ value }) => Math.abs((state.logy === "1" ? Math.log10(value) : value) - level);
    const [near] = this.hoveredBands.toSorted((one, other) => gap(one) - gap(other));
    this.furthest.hidden = !near;
    if (!near) return;
    fill(
      this.furthest,
      "Furthest from the median",
      this.bands.length > 1 && [" of ", el("b", { dir: "auto" }, shorten(near.name, 34))],
      ": ",
      el("b", { dir: "auto" }, nameOfStraggler(near.straggler)),
      `, by ${formatNumber(near.straggler.distance)} in the mean`,
    );
  }

  drawFoot() {
    const parts = [];
    const merged = Math.max(1, ...this.series.map((one) => one.merged ?? 1));
    const missing = this.series.reduce((sum, one) => sum + (one.nan?.length ?? 0), 0),
      infinite = this.series.reduce((sum, one) => sum + (one.inf?.length ?? 0), 0);
    if (missing) parts.push(`× NaN at ${missing} ${missing === 1 ? "place" : "places"}.`);
    if (infinite) parts.push(`▲ infinite at ${infinite} ${infinite === 1 ? "place" : "places"}.`);
    if (this.series.some((one) => isBranch(one) && one.x.length)) parts.push("Dotted: left by a resume.");
    const unread = this.series.filter((one) => one.unread);
    if (unread.length) parts.push(`Without ${unread.length} of the runs: ${unread[0].error}`);
    // Of more bands they are many lines: hovering names them.
    const straggler = this.bands?.length === 1 ? this.bands[0].straggler : null;
    if (straggler)
      parts.push(
        `The straggler is ${nameOfStraggler(straggler)}, ${formatNumber(straggler.distance)} from the median.`,
      );
    if (this.runs().length > MOST_RUNS) parts.push(`The first ${MOST_RUNS} runs.`);
    fill(this.foot, parts.join(" "));
    const about = `A point is the mean of up to ${formatNumber(merged)} values; what is pale behind are their min and max. Zoom in for all.`;
    fill(
      this.badge,
      merged > 1 && el("span", { class: "means", title: about, role: "img", "aria-label": about }, "≈"),
      this.zoom
        ? el(
            "button",
            {
              type: "button",
              class: "button quiet",
              style: { height: "24px", "font-size": "11.5px", padding: "0 7px" },
              onclick: () => keepNumbers("zoom", this.metric, null),
            },
            "Reset zoom",
          )
        : null,
    );
  }

  async save(kind) {
    const name = this.metric;
    try {
      if (kind === "csv") {
        // The ids are those of the shell.
        const idOf = (run) => runInfo(run).run_id ?? run;
        const rows = [["run", "name", "metric", state.x, "value", "min", "max"]];
        const writersOf = writersByRun(this.series);
        for (const one of this.series)
          for (const [index, x] of one.x.entries())
            rows.push([
              idOf(one.run),
              labelOf(one, writersOf.get(one.run) ?? []),
              name,
              x,
              one.y[index],
              one.low?.[index],
              one.high?.[index],
            ]);
        for (const one of this.bands ?? [])
          for (const [index, x] of one.x.entries())
            rows.push([one.label, one.label, name, x, one.median[index], one.low[index], one.high[index]]);
        download(`${name}.csv`, toCsv(rows), "text/csv");
        return;
      }
      // With a legend of each run, where many are one trace.
      const traces = this.bands ? this.plot.data : this.lineTraces(false);
      await savePlot(this.plot, name, kind, traces);
    } catch (error) {
      toast(`The chart could not be saved: ${error.message ?? error}`, "error");
    }
  }

  remove() {
    this.question += 1;
    this.isVisible = false;
    this.resized.disconnect();
    if (this.isDrawn) globalThis.Plotly.purge(this.plot);
    this.element.remove();
  }
}

/** Returns how many points each of some lines has. */
function pointsFor(count) {
  return Math.max(LEAST_POINTS, Math.min(POINTS, Math.round(MOST_POINTS / Math.max(1, count))));
}

/** Whether a series has rows that a resume has left: they never change. */
function isBranch(series) {
  return series.branch !== null && series.branch !== undefined;
}

/** Returns what tells the series of a chart apart, but for branches. */
function keyOf(series) {
  return `${series.run} ${series.writer ?? ""}`;
}

/** Returns the writers of each run that have a series, that of the trainer as "". */
function writersByRun(series) {
  const found = new Map();
  for (const one of series) {
    if (isBranch(one)) continue;
    if (!found.has(one.run)) found.set(one.run, []);
    found.get(one.run).push(one.writer ?? "");
  }
  return found;
}

/** Returns the name of a line: that of its run, with that of its writer where several have the metric. */
function labelOf({ run, writer }, writers) {
  const { name } = runInfo(run);
  return writers.length > 1 && writer ? `${name} · ${writer}` : name;
}

/** Returns the dash of a named writer, whose colour is that of the run. */
function dashOf(writers, writer) {
  const named = writers.filter(Boolean);
  return WRITER_DASHES[named.indexOf(writer) % WRITER_DASHES.length];
}

function joined(old, more) {
  const both = (name) =>
    old[name] === null && more[name] === null ? null : [...(old[name] ?? old.y), ...(more[name] ?? more.y)];
  return {
    ...more,
    x: [...old.x, ...more.x],
    y: [...old.y, ...more.y],
    low: both("low"),
    high: both("high"),
    nan: [...(old.nan ?? []), ...(more.nan ?? [])],
    inf: [...(old.inf ?? []), ...(more.inf ?? [])],
    merged: Math.max(old.merged ?? 1, more.merged ?? 1),
  };
}
