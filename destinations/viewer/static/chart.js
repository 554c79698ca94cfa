/** A chart of one metric: the lines or bands of runs, zoom, hovering, saving. */

import { colorOf, colorOfBand, colorOfSlot, contextColor, faded, slotOf } from "./colors.js";
import {
  nearest,
  outliersOf,
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
  button,
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
import { clearPlot, drawPlot, moveCursor, putBeside, savePlot, turnToDraw } from "./plot.js";
import { keepNumbers, numbersOf, state, toggle, update, visibleRuns } from "./state.js";
import { View } from "./view.js";

const POINTS = 1000;
/** Points of all lines of a chart together: finer detail can't be seen and takes a second to draw. */
const MOST_POINTS = 20000;
const LEAST_POINTS = 200;
/** Runs of one request, so that a chart of more shows its first curves early; each request costs a drawing. */
const RUNS_TOGETHER = 100;
/** Charts of more lines leave out ranges and smoothing; spikes remain. */
const MOST_RANGES = 10;
const SAVED_AS = { png: "PNG", svg: "SVG", csv: "CSV of the points drawn" };
const GROW_MS = 900;
const MOST_NEIGHBOURS = 4;
const MOST_LABELS = 10;
/** If more values leave the chart, they are noise: they are counted, and not labelled. */
const MOST_OUTLIERS = 10;
/** Hovering ignores a line that ends further than this many pixels from the mouse. */
const BEYOND = 12;
const MOST_RUNS = 200;
/** The most lines of a chart of several metrics. */
const MOST_LINES = 400;

/** The charts on screen, which share the cursor. */
const shown = new Set();

function nameOfStraggler({ run, rank }) {
  return state.band === "ranks" ? `rank ${rank}` : shorten(runInfo(run).name, 100);
}

/** The name under which the URL keeps the range of x of all charts. */
const ALL = "";

/** Returns the zoom of a metric, `[x0, x1, y0, y1]`, where null means no limit; null for no zoom. */
function zoomOf(metric) {
  const [all, own] = [ALL, metric].map((name) => numbersOf("zoom", name) ?? []);
  const zoom = [0, 1, 2, 3].map((at) => own[at] ?? all[at] ?? null);
  return zoom.some((one) => one !== null) ? zoom : null;
}

/** A chart of one metric, as a card. It requests data when it comes into view, and is removed when it leaves. */
export class MetricChart {
  /**
   * @param {string} metric
   * @param {{noteBand?: (band: {label: string, number: number, members: any[]}) => void, runs?: () => string[],
   *   metrics?: string[]}} about
   *   `noteBand` gets each band that is drawn; without it the chart has no bands, and can't be pinned or hidden.
   *   `runs` returns the ids of its runs. `metrics` are the metrics of a chart of several, by default its only one.
   */
  constructor(metric, { noteBand, runs = visibleRuns, metrics = [metric] }) {
    this.metric = metric;
    this.metrics = metrics;
    this.noteBand = noteBand;
    this.runs = runs;
    this.series = [];
    this.bands = null;
    /** @type {any[]} The lines, in the units of the axes. */
    this.lines = [];
    /** @type {any[]} Values that leave the chart. */
    this.outliers = [];
    /** @type {any[]} Values that stand out from their neighbours. */
    this.spikes = [];
    this.isVisible = false;
    this.isDrawn = false;
    this.isStale = true;
    this.isLoading = false;
    this.isBehind = false;
    /** @type {Promise<void> | null} The pending draw. */
    this.drawing = null;
    this.question = 0;
    this.unit = 1;
    /** What the card says while only some curves are there. */
    this.progress = "";
    /** @type {any} The element of the plot, once the card has been in view. */
    this.plot = null;
    this.element = el("section", {
      class: "card chart",
      "data-metric": metric,
      "aria-label": `Chart of ${shorten(metric, 100)}`,
    });
    this.mark();
  }

  /** Fills the card when it first comes into view: most of thousands never do. */
  build() {
    const { metric } = this;
    this.plot = el("div.plot");
    this.note = el("div.note", "Loading…");
    this.box = el("div", { class: "hover-box", hidden: true });
    this.furthest = el("p", { hidden: true });
    this.foot = el("p.card-foot");
    this.badge = el("span.badge");
    this.pinButton = iconButton("pin", "Pin", () => toggle("pin", metric));
    this.wideButton = iconButton("expand", "Enlarge", () => toggle("open", metric));
    const save = popover(
      [icon("download")],
      { class: "icon-button", title: "Save", "aria-label": `Save ${shorten(metric, 60)}` },
      (close) =>
        Object.entries(SAVED_AS).map(([kind, name]) => {
          const save = () => {
            close();
            this.save(kind);
          };
          return button(name, save, { class: "choice" });
        }),
    );
    fill(
      this.element,
      el(
        "div.card-head",
        el(
          "h3",
          { title: shorten(metric, 300), dir: "auto" },
          el("span.prefix", shorten(metric.slice(0, metric.indexOf("/") + 1), 60)),
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

  /** Requests the data again if the zoom in the URL changed. */
  followZoom() {
    if (JSON.stringify(zoomOf(this.metric)) !== JSON.stringify(this.zoom ?? null)) this.invalidate();
  }

  /** Sets the metrics of a chart of several. */
  setMetrics(metrics) {
    if (String(metrics) === String(this.metrics)) return;
    this.metrics = metrics;
    this.invalidate();
  }

  /** Returns the name of a line in a chart of several metrics. */
  labelOfMetric({ metric, run }) {
    const name = metric.slice(metric.indexOf("/") + 1);
    return this.runs().length > 1 ? `${name} · ${runInfo(run).name}` : name;
  }

  /** Marks the data as outdated. */
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
          goal: state.goal,
          ...(kind === "ranks" ? { ranks: 1 } : state.group.length ? { group: state.group } : { split: 1 }),
        });
      } else {
        const parts = inParts(runs);
        // The newest request is sent first.
        const answers = parts.toReversed().map((some) =>
          readSeries({
            runs: some,
            metrics: this.metrics.slice(0, Math.max(1, Math.floor(MOST_LINES / runs.length))),
            x: state.x,
            ...part,
            points: pointsFor(runs.length * this.metrics.length),
            branches: this.metrics.length === 1,
          }),
        );
        answers.reverse();
        // The first curves of a new chart are drawn while others still load.
        const isNew = !this.isDrawn;
        // Awaited below, one by one.
        for (const answer of answers) answer.catch(() => {});
        for (const [at, answer] of answers.entries()) {
          found.push(...(await answer));
          if (mine !== this.question) return;
          if (isNew && at < parts.length - 1) this.drawPart(found, (at + 1) * RUNS_TOGETHER, runs.length);
        }
      }
      if (mine !== this.question) return;
      this.progress = "";
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

  /** Draws the curves that have arrived, and says how many runs they are. */
  drawPart(series, count, total) {
    this.series = [...series];
    this.bands = null;
    this.progress = `Loading ${count} of ${total} runs.`;
    if (this.isVisible) this.draw();
  }

  /** Requests the rows that were announced during another request. */
  catchUp() {
    if (!this.isBehind || this.isLoading || this.isGrowing) return;
    this.isBehind = false;
    this.grow(this.runs());
  }

  /** Requests new rows of runs, and appends them to the lines. */
  async grow(ids) {
    if (!ids.some((id) => this.runs().includes(id))) return;
    if (!this.isVisible) {
      this.isStale = true;
      return;
    }
    if (this.isGrowing || this.isLoading) {
      // The pending answer may lack them.
      this.isBehind = true;
      return;
    }
    const held = this.series.length > 0 && this.series.every((one) => one.cursor !== undefined);
    if (!held || this.bands || this.zoom || this.metrics.length > 1) {
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
        metrics: this.metrics,
        x: state.x,
        points,
        known: this.series.filter((one) => !isBranch(one)),
      });
      if (mine !== this.question) return;
      // If rows are gone, a resume may have left a branch that isn't here yet.
      const hadRows = new Set(this.series.filter((one) => one.x.length).map(keyOf));
      const held = new Set(this.series.filter((one) => !isBranch(one)).map(keyOf));
      // A new writer, or one that is gone, changes the set of lines.
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
      // The chart stays; new rows come with the next change, or once the server answers again.
    } finally {
      setTimeout(() => {
        this.isGrowing = false;
        if (this.isStale) this.invalidate();
        else this.catchUp();
      }, GROW_MS);
    }
  }

  /** Converts x from the unit of the API to the axis'. */
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

  /** Draws the chart when its turn comes; several calls until then are one draw. */
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

  lineTraces() {
    this.chooseUnit(this.series.map((one) => one.x));
    const dark = isDark();
    const behind = [],
      lines = [];
    const isMany = this.series.length > MOST_RANGES;
    const writersOf = writersByRun(this.series);
    this.lines = [];
    this.spikes = [];
    // The first runs have the colours, and are drawn last: in front.
    const order = this.series.toReversed().sort((one, other) => slotOf(other.run) - slotOf(one.run));
    for (const one of order) {
      const color =
        this.metrics.length > 1 ? colorOfSlot(this.metrics.indexOf(one.metric)) : colorOf(one.run);
      const isLeft = isBranch(one);
      const x = one.x.map((value) => this.toAxis(value));
      const writers = writersOf.get(one.run) ?? [];
      const dash = writers.length > 1 && one.writer ? "longdash" : "solid";
      const label = this.metrics.length > 1 ? this.labelOfMetric(one) : labelOf(one, writers);
      const base = {
        mode: "lines",
        name: shorten(label, 60),
        meta: { run: one.run, writer: one.writer ?? "", branch: one.branch ?? null },
      };
      if (one.low && !isMany)
        behind.push({
          ...base,
          ...outline(x, one.low, one.high),
          line: { width: 0, color },
          fillcolor: faded(color, dark ? 0.2 : 0.16),
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
          y: one.y,
          line: { ...line, width: 1.1 },
          opacity: 0.3,
          meta: { ...base.meta, part: "raw" },
        });
      const y = isSmooth ? smoothed(one.y, weight) : one.y;
      const isPoint = one.y.filter((value) => value !== null).length === 1;
      lines.push({
        ...base,
        x,
        y,
        line,
        opacity: isLeft || count > 30 ? 0.6 : 1,
        mode: isPoint ? "markers" : "lines",
        marker: { color, size: 7 },
        meta: { ...base.meta, part: "line" },
      });
      this.lines.push({
        run: one.run,
        metric: one.metric,
        label,
        isLeft,
        color,
        x,
        y,
        raw: one.y,
        least: one.low,
        most: one.high,
      });
      const spikes = one.low ? spikesOf({ ...one, x }) : [];
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
      const red = dark ? "#ff8a80" : "#b3261e";
      lines.push(
        ...marksBelow(base, red, ends(one.nan), "x-thin", "NaN"),
        ...marksBelow(base, color, ends(one.inf), "triangle-up", "infinite"),
        ...this.lowMarks(base, color, x, one.y),
      );
    }
    return [...behind, ...lines];
  }

  /** Returns the marks of values that a log axis can't show. */
  lowMarks(base, color, x, y) {
    const places = state.logy === "1" ? x.filter((_, at) => y[at] !== null && y[at] <= 0) : [];
    return marksBelow(base, color, places, "triangle-down", "low");
  }

  bandTraces() {
    this.chooseUnit(this.bands.map((one) => one.x));
    const dark = isDark();
    const traces = [];
    this.lines = [];
    this.spikes = [];
    // The first bands have the colours, and are drawn last: in front.
    for (const band of this.bands.toReversed()) {
      const isRun = state.band === "ranks" && band.members.length;
      const color = isRun ? colorOf(band.members[0].run) : colorOfBand(band);
      if (!isRun) this.noteBand?.(band);
      const x = band.x.map((value) => this.toAxis(value));
      const label = isRun ? runInfo(band.members[0].run).name : band.label;
      const [y, low, high] = edgesOf(band);
      const base = { mode: "lines", name: shorten(label, 60), meta: { band: band.label } };
      const isColoured = color !== contextColor();
      if (isColoured)
        traces.unshift({
          ...base,
          ...outline(x, low, high),
          fillcolor: faded(color, dark ? 0.24 : 0.18),
          meta: { ...base.meta, part: "range" },
        });
      // Dashed where some runs of the group have ended.
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
    /** @returns {[number, number] | undefined} */
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
    /** @type {[number, number] | undefined} */
    const range =
      pair(y0, y1) ??
      (state.outliers ? undefined : (rangeOf([...this.lines, ...edges].map(inside), isLogY) ?? undefined));
    this.outliers = range && !this.zoom && !this.bands ? this.outside(range) : [];
    return {
      x: {
        type: state.x === "time" ? "date" : isLogX ? "log" : "linear",
        range: wide,
        title: this.axisTitle,
      },
      y: {
        type: isLogY ? "log" : "linear",
        range,
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
      spikes:
        this.outliers.length > MOST_OUTLIERS
          ? []
          : [
              ...this.outliers,
              ...this.spikes.filter(({ to }) => !range || (to >= range[0] && to <= range[1])),
            ],
      onzoom: (ranges) => this.zoomed(ranges),
      onhover: (place) => this.hovered(place),
      onleave: () => this.left(),
    };
  }

  /** Returns the values outside a range of y, except at the start of a line. */
  outside(range) {
    return this.lines.flatMap(({ x, raw, least, most, color }) =>
      outliersOf({ x, y: raw, low: least, high: most }, range)
        .filter(({ to }) => state.logy !== "1" || to > 0)
        .map((one) => ({ ...one, color })),
    );
  }

  /** Zooms to a range: of x in all charts, of y in this one; null resets all. */
  zoomed(ranges) {
    // Thirteen digits are milliseconds since 1970.
    const round = (value) => Number(Number(value).toPrecision(13));
    if (!ranges) {
      update({ zoom: [] });
      return;
    }
    // Another range of x resets y, unless y is dragged too.
    keepNumbers("zoom", this.metric, ranges.y && [null, null, ...ranges.y.map(round)]);
    if (ranges.x)
      keepNumbers("zoom", ALL, [...ranges.x.map((value) => round(this.fromAxis(value))), null, null]);
  }

  /** Returns the lines at a place of the plot with their values there, the nearest first. */
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
        el("b", text),
        one.low && isNear && el("small.muted", edgesText(one)),
      );
    const signed = (value) => `${value > 0 ? "+" : ""}${formatNumber(Number(value.toPrecision(3)))}`;
    fill(
      this.box,
      el("header", shorten(title, 60)),
      row(near, formatNumber(near.value), true),
      others.slice(0, MOST_NEIGHBOURS).map((one) => row(one, signed(one.value - near.value), false)),
      others.length > MOST_NEIGHBOURS && el("div.more", `${others.length - MOST_NEIGHBOURS} further away`),
      this.furthest,
    );
    this.nameStraggler(near);
    this.box.hidden = false;
    putBeside(this.box, this.plot, place.across);
    this.box.style.top = "4px";
    this.plot.classList.add("is-hovered");
    const at = this.fromAxis(x);
    for (const chart of shown) if (chart.isDrawn) chart.showCursor(at, near, chart === this);
  }

  /** Draws the cursor where the chart under the mouse has it, on the same run. */
  showCursor(at, { run, name, metric }, isHere) {
    const x = this.toAxis(at);
    const isSame = (one) =>
      run
        ? one.run === run && !one.isLeft && (this.metrics.length < 2 || one.metric === metric)
        : one.name === name;
    const same = this.lines.filter(isSame);
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

  /** Shows which run or rank is furthest from the median of a band. */
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
    const parts = this.progress ? [this.progress] : [];
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
        `▾ ${low === 1 ? "1 value" : `${low} values`} ≤ 0: a log axis can't show ${low === 1 ? "it" : "them"}.`,
      );
    if (early)
      parts.push(
        `${early === 1 ? "1 value is" : `${early} values are`} left of the log axis, at ${this.axisTitle} ≤ 0.`,
      );
    const above = this.outliers.filter(({ from, to }) => to > from).length;
    const below = this.outliers.length - above;
    const beyond = [above && `▲ ${above} above`, below && `▼ ${below} below`].filter(Boolean).join(", ");
    if (beyond) parts.push(`${beyond}.`);
    if (this.series.some((one) => isBranch(one) && one.x.length)) parts.push("Dotted: left by a resume.");
    const unread = this.series.filter((one) => one.unread);
    if (unread.length) parts.push(`Without ${unread.length} of the runs: ${unread[0].error}`);
    if (this.metrics.length > 1 && this.metrics.length * this.runs().length > MOST_LINES)
      parts.push(`The first ${MOST_LINES} lines.`);
    if (this.runs().length > MOST_RUNS) parts.push(`The first ${MOST_RUNS} runs.`);
    fill(this.foot, parts.join(" "));
    const about = `A point is the mean of up to ${formatNumber(merged)} values; the pale area shows their min and max. Zoom in to see all.`;
    fill(
      this.badge,
      merged > 1 && el("span", { class: "means", title: about, role: "img", "aria-label": about }, "≈"),
    );
  }

  async save(kind) {
    const name = this.metric;
    try {
      if (kind === "csv") {
        // The ids that the shell uses.
        const idOf = (run) => runInfo(run).run_id ?? run;
        const rows = [["run", "name", "metric", state.x, "value", "min", "max"]];
        const writersOf = writersByRun(this.series);
        for (const one of this.series)
          for (const [index, x] of one.x.entries())
            rows.push([
              idOf(one.run),
              labelOf(one, writersOf.get(one.run) ?? []),
              one.metric,
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
      await savePlot(this.plot, name, kind);
    } catch (error) {
      toast(`The chart couldn't be saved: ${error.message ?? error}`, "error");
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

/** A few charts of some runs beside other content, which stay when it is drawn again. */
export class Curves {
  /**
   * @param {View} view
   * @param {() => string[]} runs returns the ids of the runs.
   */
  constructor(view, runs) {
    this.runs = runs;
    /** @type {Map<string, MetricChart>} */
    this.charts = new Map();
    this.element = el("section", { class: "cards curves", "aria-label": "Curves" });
    view.onState((changed) => {
      const has = (...names) => names.some((name) => changed.has(name));
      for (const chart of this.charts.values()) {
        if (has("zoom")) chart.followZoom();
        if (has("open")) chart.mark();
        if (has("run", "off")) chart.invalidate();
        if (has("hues")) chart.draw();
      }
    });
    view.onTheme(() => {
      for (const chart of this.charts.values()) chart.draw();
    });
    view.onData(({ all, runs: changed }) => {
      for (const chart of this.charts.values()) chart.grow(all ? this.runs() : Object.keys(changed));
    });
    view.until(() => this.show([]));
  }

  /** Shows the charts of some metrics; `more` stands below them. */
  show(metrics, ...more) {
    const content = JSON.stringify([metrics, more.length]);
    if (this.element.dataset.content === content) return;
    this.element.dataset.content = content;
    for (const [metric, chart] of this.charts)
      if (!metrics.includes(metric)) {
        chart.remove();
        this.charts.delete(metric);
      }
    for (const metric of metrics)
      if (!this.charts.has(metric)) this.charts.set(metric, new MetricChart(metric, { runs: this.runs }));
    fill(
      this.element,
      el("h2.unseen", "Curves"),
      metrics.map((metric) => this.charts.get(metric)?.element),
      more,
    );
    for (const chart of this.charts.values()) chart.setVisible(true);
  }
}

/** Returns a trace of marks just above the x axis, in a list; an empty list for no places. */
function marksBelow(base, color, places, symbol, part) {
  const marker = { symbol, size: 8, color, line: { color, width: symbol === "x-thin" ? 2 : 0 } };
  const y = places.map(() => null);
  const meta = { ...base.meta, part };
  return places.length ? [{ ...base, mode: "markers", isInStrip: true, x: places, y, marker, meta }] : [];
}

/** Returns the middle, lower and upper edge of a band, as chosen. */
function edgesOf(band) {
  if (!["std", "stderr"].includes(state.band)) return [band.median, band.low, band.high];
  const half = (at) =>
    state.band === "std" ? (band.std[at] ?? 0) : (band.std[at] ?? 0) / Math.sqrt(Math.max(1, band.count[at]));
  const edge = (sign) => band.mean.map((mean, at) => (mean === null ? null : mean + sign * half(at)));
  return [band.mean, edge(-1), edge(1)];
}

/** Returns the extent of a band at a point. */
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

/** Returns the number of points of each line. */
function pointsFor(count) {
  return Math.max(LEAST_POINTS, Math.min(POINTS, Math.round(MOST_POINTS / Math.max(1, count))));
}

/** Returns runs in parts, each for one request. */
function inParts(runs) {
  const count = Math.ceil(runs.length / RUNS_TOGETHER);
  return Array.from({ length: count }, (_, at) => runs.slice(at * RUNS_TOGETHER, (at + 1) * RUNS_TOGETHER));
}

/** Whether a series holds rows that a resume left behind, which never change. */
function isBranch(series) {
  return series.branch !== null && series.branch !== undefined;
}

/** Returns a key for each series of a chart; branches share their run's. */
function keyOf(series) {
  return `${series.run} ${series.writer ?? ""}`;
}

/** Returns the writers of each run that have a series; the trainer is "". */
function writersByRun(series) {
  const found = new Map();
  for (const one of series) {
    if (isBranch(one)) continue;
    if (!found.has(one.run)) found.set(one.run, []);
    found.get(one.run).push(one.writer ?? "");
  }
  return found;
}

/** Returns the name of a line: its run's, with the writer's if several have the metric. */
function labelOf({ run, writer }, writers) {
  const { name } = runInfo(run);
  return writers.length > 1 && writer ? `${name} · ${writer}` : name;
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
