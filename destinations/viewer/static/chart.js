/** One chart of one metric: the lines of the selected runs, and what one can do with it. */

import {
  coarse,
  joinedTraces,
  nearest,
  outline,
  rangeOf,
  smoothed,
  spikesOf,
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
import { clearPlot, drawable, drawPlot, faded, moveCursor, savePlot, turnToDraw } from "./plot.js";
import {
  colorOf,
  colorOfBand,
  contextColor,
  keepNumbers,
  numbersOf,
  state,
  toggle,
  update,
  visibleRuns,
} from "./state.js";

const POINTS = 1000;
/** Points of all lines of a chart together: what is finer than its pixels is not seen, and takes a second to draw. */
const MOST_POINTS = 20000;
const LEAST_POINTS = 200;
/** More lines than these have no ranges of their own: those of all are one pale ground. */
const MOST_RANGES = 10;
const GROW_MS = 900;
const MOST_NEIGHBOURS = 4;
const MOST_LABELS = 10;
/** A line that ends this many pixels before the mouse is not there. */
const BEYOND = 12;
const MOST_RUNS = 200;
/** Lines of named writers; runs beyond the colours have other dashes. */
const WRITER_DASHES = ["longdash", "dashdot", "longdashdot"];

/** The charts that are shown: the cursor of one is drawn in all. */
const shown = new Set();

function nameOfStraggler({ run, rank }) {
  return state.band === "ranks" ? `rank ${rank}` : shorten(runInfo(run).name, 100);
}

/** The name by which the URL has the range of x that all charts share. */
const ALL = "";

/** Returns the zoom of a metric, as the URL has it: `[x0, x1, y0, y1]`, where null is no limit; null for none. */
function zoomOf(metric) {
  const [all, own] = [ALL, metric].map((name) => numbersOf("zoom", name) ?? []);
  const zoom = [0, 1, 2, 3].map((at) => own[at] ?? all[at] ?? null);
  return zoom.some((one) => one !== null) ? zoom : null;
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
    /** @type {any} What the card holds, once it has been in view. */
    this.plot = null;
    this.element = el("section", {
      class: "card chart",
      "data-metric": metric,
      "aria-label": `Chart of ${shorten(metric, 100)}`,
    });
    this.mark();
  }

  /** Fills the card when it first comes into view: of thousands, most never do. */
  build() {
    const { metric } = this;
    this.plot = el("div", { class: "plot" });
    this.note = el("div", { class: "note" }, "Loading…");
    this.box = el("div", { class: "hover-box", hidden: true });
    this.furthest = el("p", { hidden: true });
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
    fill(
      this.element,
      el(
        "div",
        { class: "card-head" },
        el(
          "h3",
          { title: shorten(metric, 300), dir: "auto" },
          el("span", { class: "prefix" }, shorten(metric.slice(0, metric.indexOf("/") + 1), 60)),
          shorten(metric.slice(metric.indexOf("/") + 1), 120),
        ),
        this.badge,
        this.noteBand && iconButton("eyeOff", "Hide this chart", () => toggle("hide", metric)),
        this.noteBand && this.pinButton,
        this.wideButton,
        save,
      ),
      this.plot,
      this.foot,
    );
    this.plot.append(this.note);
    this.resized = new ResizeObserver(
      debounce(() => {
        if (this.isDrawn && this.isVisible) this.drawNow();
      }, 60),
    );
    this.resized.observe(this.plot);
    this.mark();
  }

  mark() {
    const isPinned = state.pin.includes(this.metric),
      isWide = state.open.includes(this.metric);
    this.pinButton?.setAttribute("aria-pressed", String(isPinned));
    this.wideButton?.setAttribute("aria-pressed", String(isWide));
    this.element.classList.toggle("wide", isWide);
  }

  setVisible(isVisible) {
    this.isVisible = isVisible;
    if (isVisible && !this.plot) this.build();
    if (isVisible) shown.add(this);
    else shown.delete(this);
    if (isVisible && this.isStale) this.load();
    else if (isVisible && !this.isDrawn) this.draw();
    else if (!isVisible && this.isDrawn) {
      clearPlot(this.plot);
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
      const kind = this.noteBand ? state.band : "";
      if (runs.length && kind) {
        const x = ["step", "epoch", "relative"].includes(state.x) ? state.x : "step";
        bands = await readBands({
          runs,
          metric: this.metric,
          x,
          ...part,
          points: POINTS,
          ...(kind === "ranks" ? { ranks: 1 } : state.group.length ? { group: state.group } : { split: 1 }),
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

  /** Converts x of the API to that of the axis. */
  toAxis(x) {
    return x / this.unit;
  }

  fromAxis(value) {
    return Number(value) * this.unit;
  }

  chooseUnit(lists) {
    this.unit = 1;
    const last = Math.max(0, ...lists.map((x) => x.at(-1) ?? 0));
    if (state.x === "time") this.axisTitle = formatTime(last).slice(0, 10);
    else
      this.axisTitle =
        { step: "step", epoch: "epoch", relative: "seconds" }[state.x] ?? state.x.replace(/^metric:/, "");
    if (state.x !== "relative") return;
    if (last > 3 * 3600) [this.unit, this.axisTitle] = [3600, "hours"];
    else if (last > 180) [this.unit, this.axisTitle] = [60, "minutes"];
  }

  /** Draws what is held, when it is its turn; what is asked for until then is drawn with it. */
  draw() {
    this.drawing ??= turnToDraw().then(() => {
      this.drawing = null;
      return this.drawNow();
    });
    return this.drawing;
  }

  drawNow() {
    if (!this.isVisible) return;
    const isEmpty = !(this.bands ?? this.series).some((one) => one.x.length || one.nan?.length);
    if (isEmpty) {
      clearPlot(this.plot);
      this.isDrawn = false;
      fill(
        this.note,
        this.problem ||
          (this.runs().length
            ? (this.series.find((one) => one.error)?.error ??
              (this.zoom ? "No value in this range." : "No value yet."))
            : "No run is selected."),
      );
      fill(this.plot, this.note);
      fill(this.foot);
      return;
    }
    this.note.remove();
    this.box.hidden = true;
    const traces = this.bands ? this.bandTraces() : this.lineTraces();
    this.isDrawn = true;
    drawPlot(this.plot, traces, this.layout());
    if (this.box.parentElement !== this.plot) this.plot.append(this.box);
    this.drawFoot();
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
    this.spikes = [];
    // The last run that was selected is drawn first, so that the first is on top.
    for (const one of this.series.slice().reverse()) {
      const color = colorOf(one.run, isDark());
      const isLeft = isBranch(one);
      const x = drawable(one.x.map((value) => this.toAxis(value)));
      const writers = writersOf.get(one.run) ?? [];
      const dash = writers.length > 1 && one.writer ? dashOf(writers, one.writer) : "solid";
      const label = labelOf(one, writers);
      const base = {
        mode: "lines",
        name: shorten(label, 60),
        meta: { run: one.run, writer: one.writer ?? "", branch: one.branch ?? null },
      };
      if (one.low && isMany) ranges.push(outline(...coarse(x, drawable(one.low), drawable(one.high))));
      else if (one.low)
        behind.push({
          ...base,
          ...outline(x, drawable(one.low), drawable(one.high)),
          line: { width: 0, color },
          fillcolor: faded(color, isDark() ? 0.2 : 0.16),
          meta: { ...base.meta, part: "range" },
        });
      const count = this.series.length;
      const width = isLeft ? 1.2 : count <= MOST_RANGES ? 1.75 : count <= 30 ? 1.25 : 1;
      const line = { color, dash: isLeft ? "dot" : dash, width };
      const weight = isLeft ? 0 : weightFor(one.y, state.smooth, isMany);
      const isSmooth = weight > 0;
      if (isSmooth)
        behind.push({
          ...base,
          x,
          y: drawable(one.y),
          line: { ...line, width: 1.1 },
          opacity: 0.3,
          meta: { ...base.meta, part: "raw" },
        });
      const y = isSmooth ? smoothed(one.y, weight) : one.y;
      const isPoint = one.y.filter((value) => value !== null).length === 1;
      lines.push({
        ...base,
        x,
        y: drawable(y),
        line,
        opacity: isLeft || count > 30 ? 0.6 : 1,
        mode: isPoint ? "markers" : "lines",
        marker: { color, size: 7 },
        meta: { ...base.meta, part: "line" },
      });
      this.lines.push({ run: one.run, label, isLeft, color, x, y: drawable(y), raw: one.y });
      const spikes = one.low
        ? spikesOf({ x, y: one.y, low: drawable(one.low), high: drawable(one.high) })
        : [];
      this.spikes.push(...spikes.map((spike) => ({ ...spike, color })));
      if (spikes.length)
        lines.push({
          ...base,
          x: spikes.flatMap((spike) => [spike.x, spike.x, null]),
          y: spikes.flatMap((spike) => [spike.from, spike.to, null]),
          line: { color, width: 1.5 },
          meta: { ...base.meta, part: "spike" },
        });
      const ends = (places) => stretchEnds(places ?? [], one).map((value) => this.toAxis(value));
      const red = isDark() ? "#ff8a80" : "#b3261e";
      lines.push(
        ...marksBelow(base, red, ends(one.nan), "x-thin", "NaN"),
        ...marksBelow(base, color, ends(one.inf), "triangle-up", "infinite"),
        ...this.lowMarks(base, color, x, one.y),
      );
    }
    if (ranges.length)
      behind.unshift({
        mode: "lines",
        x: ranges.flatMap((one) => [...one.x, null]),
        y: ranges.flatMap((one) => [...one.y, null]),
        line: { width: 0 },
        fillcolor: isDark() ? "rgba(162, 165, 173, 0.14)" : "rgba(93, 95, 102, 0.1)",
        meta: { run: null, branch: null, part: "ranges" },
      });
    return isJoined ? joinedTraces([...behind, ...lines]) : [...behind, ...lines];
  }

  /** Returns the marks of the values that a log axis cannot show. */
  lowMarks(base, color, x, y) {
    const places = state.logy === "1" ? x.filter((_, at) => y[at] !== null && y[at] <= 0) : [];
    return marksBelow(base, color, places, "triangle-down", "low");
  }

  bandTraces() {
    this.chooseUnit(this.bands.map((one) => one.x));
    const traces = [];
    this.lines = [];
    this.spikes = [];
    // The first bands have the colours, and are drawn last: in front.
    for (const band of this.bands.toReversed()) {
      const isRun = state.band === "ranks" && band.members.length;
      const color = isRun ? colorOf(band.members[0].run, isDark()) : colorOfBand(band, isDark());
      if (!isRun) this.noteBand?.(band);
      const x = drawable(band.x.map((value) => this.toAxis(value)));
      const label = isRun ? runInfo(band.members[0].run).name : band.label;
      const [y, low, high] = edgesOf(band).map(drawable);
      const base = { mode: "lines", name: shorten(label, 60), meta: { band: band.label } };
      const isColoured = color !== contextColor(isDark());
      if (isColoured)
        traces.unshift({
          ...base,
          ...outline(x, low, high),
          fillcolor: faded(color, isDark() ? 0.24 : 0.18),
          meta: { ...base.meta, part: "range" },
        });
      // Dashed where fewer runs go on than the group has.
      const isWhole = band.count.map((count) => count === band.members.length);
      const smooth = smoothed(y, weightOf(state.smooth));
      const part = (wanted) =>
        smooth.map((one, at) => (isWhole[at] === wanted || isWhole[at - 1] === wanted ? one : null));
      for (const { values, dash } of [
        { values: part(true), dash: "solid" },
        { values: part(false), dash: "dash" },
      ])
        if (values.some((one) => one !== null))
          traces.push({
            ...base,
            x,
            y: values,
            line: { color, dash, width: isColoured ? 1.75 : 1 },
            meta: { ...base.meta, part: dash === "solid" || !isWhole.includes(true) ? "median" : "fewer" },
          });
      traces.push(...this.lowMarks(base, color, x, y));
      this.lines.unshift({
        label: isRun ? label : `${label} (${band.members.length})`,
        name: label,
        color,
        x,
        y: smooth,
        raw: y,
        straggler: band.straggler,
        low,
        high,
      });
    }
    return traces;
  }

  layout() {
    const isLogX = state.logx === "1" && state.x !== "time",
      isLogY = state.logy === "1";
    const [x0, x1, y0, y1] = this.zoom ?? [null, null, null, null];
    const pair = (low, high) => (low === null || high === null ? undefined : [low, high]);
    const xs = this.lines.flatMap(({ x }) => x.filter((value) => !isLogX || value > 0));
    const ends = xs.length
      ? [xs.reduce((a, b) => Math.min(a, b)), xs.reduce((a, b) => Math.max(a, b))]
      : [0, 1];
    const wide =
      x0 === null && x1 === null
        ? undefined
        : [x0 === null ? ends[0] : this.toAxis(x0), x1 === null ? ends[1] : this.toAxis(x1)];
    const edges = this.lines.flatMap(({ x, low, high }) =>
      low
        ? [
            { x, y: low },
            { x, y: high },
          ]
        : [],
    );
    const inside = wide
      ? (line) => ({
          ...line,
          y: line.y.map((value, at) => (line.x[at] >= wide[0] && line.x[at] <= wide[1] ? value : null)),
        })
      : (line) => line;
    const labels = this.bands && this.bands.length > 1 && this.plot.clientWidth > 300;
    return {
      x: {
        type: state.x === "time" ? "date" : isLogX ? "log" : "linear",
        range: wide,
        title: this.axisTitle,
      },
      y: {
        type: isLogY ? "log" : "linear",
        range:
          pair(y0, y1) ??
          (state.outliers
            ? undefined
            : (rangeOf([...this.lines, ...edges].map(inside), isLogY) ?? undefined)),
      },
      labels: labels
        ? this.lines
            .filter(({ x }) => x.at(-1) >= 0.9 * ends[1])
            .slice(0, MOST_LABELS)
            .map(({ name, color, y }) => ({
              text: tellingPart(name, this.bands),
              color,
              value: y.findLast((one) => one !== null),
            }))
        : [],
      spikes: this.spikes,
      onzoom: (ranges) => this.zoomed(ranges),
      onhover: (place) => this.hovered(place),
      onleave: () => this.left(),
    };
  }

  /** Takes the range that was dragged out, null for all: of x for all charts, of y for this one. */
  zoomed(ranges) {
    // Thirteen digits are milliseconds since 1970.
    const round = (value) => Number(Number(value).toPrecision(13));
    if (!ranges) {
      update({ zoom: [] });
      return;
    }
    // Another part has another height, unless that is dragged out too.
    keepNumbers("zoom", this.metric, ranges.y && [null, null, ...ranges.y.map(round)]);
    if (ranges.x)
      keepNumbers("zoom", ALL, [...ranges.x.map((value) => round(this.fromAxis(value))), null, null]);
  }

  /** Returns the lines at a place of the plot, the nearest first, each with its value there. */
  nearLines({ across, down }) {
    const { x: xAxis, y: yAxis } = this.plot.axes;
    const where = xAxis.valueAt(across);
    const found = [];
    for (const line of this.lines) {
      const index = nearest(line.x, where);
      if (index < 0 || line.raw[index] === null || line.raw[index] === undefined) continue;
      const to = line.x[index] < where ? index + 1 : index - 1;
      const [here, there] = [index, to].map((at) => ({
        across: xAxis.place(line.x[at]),
        down: yAxis.place(line.y[at]),
      }));
      const isBetween = to >= 0 && to < line.x.length && line.y[to] !== null && Number.isFinite(there.down);
      if (!isBetween && Math.abs(here.across - across) > BEYOND) continue;
      const share =
        isBetween && there.across !== here.across ? (across - here.across) / (there.across - here.across) : 0;
      const gap = Math.abs((isBetween ? here.down + share * (there.down - here.down) : here.down) - down);
      found.push({ ...line, index, value: line.raw[index], gap: Number.isFinite(gap) ? gap : Infinity });
    }
    return found.sort((one, other) => one.gap - other.gap);
  }

  hovered(place) {
    const found = this.nearLines(place);
    if (!found.length) {
      this.left();
      return;
    }
    const [near, ...others] = found;
    const x = near.x[near.index];
    const title =
      state.x === "time"
        ? formatTime(this.fromAxis(x))
        : state.x === "relative"
          ? formatDuration(x * this.unit)
          : `${this.axisTitle} ${formatNumber(state.x === "step" ? Math.round(x) : x)}`;
    const row = (one, text, isNear) =>
      el(
        "div",
        { class: isNear ? "near" : "" },
        el("i", { style: { background: one.color } }),
        el(
          "span",
          { dir: "auto" },
          shorten(one.label ?? runInfo(one.run).name, 34),
          one.isLeft ? " (left)" : "",
        ),
        el("b", {}, text),
        one.low && isNear && el("small", { class: "muted" }, edgesText(one)),
      );
    const signed = (value) => `${value > 0 ? "+" : ""}${formatNumber(Number(value.toPrecision(3)))}`;
    fill(
      this.box,
      el("header", {}, shorten(title, 60)),
      row(near, formatNumber(near.value), true),
      others.slice(0, MOST_NEIGHBOURS).map((one) => row(one, signed(one.value - near.value), false)),
      others.length > MOST_NEIGHBOURS &&
        el("div", { class: "more" }, `${others.length - MOST_NEIGHBOURS} further away`),
      this.furthest,
    );
    this.nameStraggler(near);
    this.box.hidden = false;
    const isRoom = place.across + 20 + this.box.offsetWidth < this.plot.clientWidth;
    const left = isRoom ? place.across + 16 : place.across - 16 - this.box.offsetWidth;
    this.box.style.left = `${Math.max(4 - this.plot.getBoundingClientRect().left, left)}px`;
    this.box.style.top = "4px";
    this.plot.classList.add("is-hovered");
    const at = this.fromAxis(x);
    for (const chart of shown) if (chart.isDrawn) chart.showCursor(at, near, chart === this);
  }

  /** Draws the cursor where it is in the chart under the mouse, on the same run. */
  showCursor(at, { run, name }, isHere) {
    const x = this.toAxis(at);
    const same = this.lines.filter((one) => (run ? one.run === run && !one.isLeft : one.name === name));
    const dots = same.flatMap((one) => {
      const index = nearest(one.x, x);
      return index < 0 || one.y[index] === null ? [] : [{ y: one.y[index], color: one.color }];
    });
    moveCursor(this.plot, x, dots, isHere ? same : []);
  }

  left() {
    this.box.hidden = true;
    this.plot.classList.remove("is-hovered");
    for (const chart of shown) moveCursor(chart.plot, null);
  }

  /** Says which member of a band is furthest from its middle. */
  nameStraggler({ straggler, name }) {
    this.furthest.hidden = !straggler;
    if (!straggler) return;
    fill(
      this.furthest,
      "Furthest from the median",
      this.bands.length > 1 && [" of ", el("b", { dir: "auto" }, shorten(name, 34))],
      ": ",
      el("b", { dir: "auto" }, nameOfStraggler(straggler)),
      `, by ${formatNumber(straggler.distance)} in the mean`,
    );
  }

  drawFoot() {
    const parts = [];
    const merged = Math.max(1, ...this.series.map((one) => one.merged ?? 1));
    const missing = this.series.reduce((sum, one) => sum + (one.nan?.length ?? 0), 0),
      infinite = this.series.reduce((sum, one) => sum + (one.inf?.length ?? 0), 0);
    if (missing) parts.push(`× NaN at ${missing} ${missing === 1 ? "place" : "places"}.`);
    if (infinite) parts.push(`▲ infinite at ${infinite} ${infinite === 1 ? "place" : "places"}.`);
    const [isLogX, isLogY] = [state.logx === "1" && state.x !== "time", state.logy === "1"];
    const countOf = (isOut) =>
      this.lines.reduce(
        (sum, { x, raw }) => sum + raw.filter((value, at) => value !== null && isOut(value, x[at])).length,
        0,
      );
    const low = isLogY ? countOf((value) => value <= 0) : 0;
    const early = isLogX ? countOf((_, x) => x <= 0) : 0;
    if (low)
      parts.push(
        `▾ ${low === 1 ? "1 value" : `${low} values`} ≤ 0: a log axis cannot show ${low === 1 ? "it" : "them"}.`,
      );
    if (early)
      parts.push(
        `${early === 1 ? "1 value is" : `${early} values are`} left of the log axis, at ${this.axisTitle} ≤ 0.`,
      );
    const [bottom, top] = this.plot.layout?.yaxis.range ?? [-Infinity, Infinity];
    const spikes = this.series.flatMap((one) =>
      one.low
        ? [
            one.high.filter((value) => value > top),
            one.low.filter((value) => value < bottom && (!isLogY || value > 0)),
          ]
        : [],
    );
    const [above, below] = [0, 1].map((side) =>
      spikes.filter((_, at) => at % 2 === side).reduce((sum, one) => sum + one.length, 0),
    );
    const beyond = [above && `▲ ${above} above`, below && `▼ ${below} below`].filter(Boolean).join(", ");
    if (beyond && !this.zoom) parts.push(`${beyond}.`);
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
            rows.push([one.label, one.label, name, x, ...edgesOf(one).map((values) => values[index])]);
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
    this.resized?.disconnect();
    shown.delete(this);
    this.element.remove();
  }
}

/** Returns the trace of marks in the strip above the x axis; none for no places. */
function marksBelow(base, color, places, symbol, part) {
  const marker = { symbol, size: 8, color, line: { color, width: symbol === "x-thin" ? 2 : 0 } };
  const y = places.map(() => null);
  const meta = { ...base.meta, part };
  return places.length
    ? [{ ...base, mode: "markers", isInStrip: true, x: drawable(places), y, marker, meta }]
    : [];
}

/** Returns middle, lower and upper edge of a band, as the view has it. */
function edgesOf(band) {
  if (!["std", "stderr"].includes(state.band)) return [band.median, band.low, band.high];
  const half = (at) =>
    state.band === "std" ? (band.std[at] ?? 0) : (band.std[at] ?? 0) / Math.sqrt(Math.max(1, band.count[at]));
  const edge = (sign) => band.mean.map((mean, at) => (mean === null ? null : mean + sign * half(at)));
  return [band.mean, edge(-1), edge(1)];
}

/** Returns how far a band reaches at a place of it. */
function edgesText({ low, high, value, index }) {
  return ["std", "stderr"].includes(state.band)
    ? `± ${formatNumber(Number((high[index] - value).toPrecision(2)))}`
    : `${formatNumber(low[index])} – ${formatNumber(high[index])}`;
}

/** Returns the part of a band's label that differs from the others and that its colour does not say. */
function tellingPart(label, bands) {
  const parts = (text) => text.split(/, | · /);
  const others = bands.map((one) => parts(one.label));
  const said = others[0].length > 1 ? state.group.indexOf(state.sc) : -1;
  const own = parts(label).filter((_, at) => at !== said && new Set(others.map((one) => one[at])).size > 1);
  return own.map((part) => part.replace(/^[^=]*=/, "")).join(" ") || label;
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
