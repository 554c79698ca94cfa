/** The view of media: records of all kinds that the server knows, drawn by `RENDERERS`. */

import { shade } from "./colors.js";
import { drawPlot, talking } from "./plot.js";
import { fileUrl, listMedia, readTable, runDetail, runInfo, serverInfo } from "./data.js";
import {
  button,
  debounce,
  el,
  fill,
  nothing,
  formatNumber,
  iconButton,
  inTurn,
  isDark,
  searchField,
  shorten,
} from "./dom.js";
import { colorLegend } from "./legend.js";
import { runLabels } from "./names.js";
import { CLASSES, picture } from "./pictures.js";
import { pointCloud } from "./points.js";
import { showBesideRuns, swatch, visibleDetails } from "./sidebar.js";
import { dataTable, flatten, pairTable } from "./table.js";
import { linkTo, state, toggle, update, visibleRuns, whenViewed } from "./state.js";
import { View } from "./view.js";
import { unfoldButton } from "./viewbar.js";

const MOST_PICTURES = 64;
const MOST_RIDGES = 40;
const FEW = 6;
const WIDE = { style: { flex: "1 1 260px" } };

/** Shows the media in an element until the returned function is called. */
export function showMedia(root) {
  const panels = new Map();
  const view = new View("media");
  let isBegun = false;
  let problem = "";
  /** The names of visible runs without media. */
  let without = [];
  let order = "";
  let index = [];
  /** The server's kinds of records, `{name, title, shows}`, in the order of `RENDERERS`. */
  let known = [];

  const list = el("div");
  const none = el("p.muted");
  const find = searchField("Search media", {
    id: "search",
    value: state.find,
    oninput: debounce(() => update({ find: find.input.value }), 120),
    onchange: () => update({ find: find.input.value }),
  });
  const kinds = el("span", { class: "actions", role: "group", "aria-label": "Kinds" });
  const master = el("input", {
    type: "range",
    id: "step",
    "aria-label": "Step of all media",
    min: 0,
    step: 1,
  });
  const said = el("output");
  const bar = el("label.slider.button", "Step", master, said);
  const colors = colorLegend();
  const leaveSidebar = showBesideRuns(
    root,
    colors,
    el("div.toolbar", find.field, unfoldButton(), kinds, bar, colors),
    none,
    list,
  );
  const inView = new IntersectionObserver(
    (entries) => {
      for (const entry of entries)
        panels.get(entry.target.getAttribute("data-key"))?.setVisible(entry.isIntersecting);
    },
    { rootMargin: "240px" },
  );

  /** Returns the steps of all panels with a slider, in order. */
  function allSteps() {
    const stepwise = index.filter(({ shows }) => !RENDERERS[shows].isOverTime);
    return [...new Set(stepwise.flatMap(({ steps }) => steps))].sort((one, other) => one - other);
  }

  function drawTools() {
    const there = known.filter(({ name }) => index.some(({ kind }) => kind === name));
    fill(
      kinds,
      there.length > 1 &&
        [{ name: "", title: "All" }, ...there].map(({ name, title }) =>
          button(title, () => update({ kind: name }), { "aria-pressed": String(state.kind === name) }),
        ),
    );
    const steps = allSteps();
    bar.hidden = steps.length < 2;
    master.max = String(Math.max(0, steps.length - 1));
    const at = state.step === "" ? steps.length - 1 : placeOf(steps, Number(state.step));
    master.value = String(at);
    master.setAttribute("aria-valuetext", `step ${steps[at]}`);
    fill(said, formatNumber(steps[at]));
    master.oninput = () => chooseStep(steps, Number(master.value));
  }

  /** Loads the list of media of the visible runs. */
  function loadIndex() {
    return view.ask(visibleDetails, ([ids, details, wrong]) => {
      problem = wrong;
      // If no run answers, the page stays.
      if (problem && index.length) return;
      index = indexOf(ids, details);
      const have = new Set(index.flatMap(({ runs }) => runs));
      without = ids.filter((id, at) => details[at] && !have.has(id)).map((id) => runInfo(id).name);
    });
  }

  function indexOf(ids, details) {
    const found = new Map();
    details.forEach((detail, at) => {
      for (const [kind, names] of Object.entries(detail?.media ?? {})) {
        const shows = known.find((one) => one.name === kind)?.shows;
        if (!shows) continue;
        for (const [name, steps] of Object.entries(names)) {
          const key = `${kind}/${name}`;
          if (!found.has(key)) found.set(key, { key, kind, shows, name, runs: [], steps: [] });
          found.get(key).runs.push(ids[at]);
          found.get(key).steps.push(...steps);
        }
      }
    });
    const media = [...found.values()].map((one) => ({
      ...one,
      steps: [...new Set(one.steps)].filter((step) => step !== null).sort((a, b) => a - b),
    }));
    const placeOfKind = ({ kind }) => known.findIndex(({ name }) => name === kind);
    return media.sort(
      (one, other) => placeOfKind(one) - placeOfKind(other) || one.name.localeCompare(other.name),
    );
  }

  function arrange() {
    none.hidden = !index.length || !without.length;
    fill(
      none,
      `No media were logged by ${shorten(without.map((name) => shorten(name, 60)).join(", "), 300)}.`,
    );
    const word = state.find.toLowerCase();
    const shown = index.filter(
      ({ kind, name }) => (!state.kind || kind === state.kind) && name.toLowerCase().includes(word),
    );
    const kept = new Set(shown.map(({ key }) => key));
    const isAsBefore = shown.length > 0 && order === JSON.stringify([...kept]);
    order = JSON.stringify([...kept]);
    if (isAsBefore) {
      // Moving nodes would stop sounds and videos, and take the focus from controls.
      for (const one of shown) panels.get(one.key).change(one);
      return;
    }
    for (const [key, panel] of panels)
      if (!kept.has(key)) {
        inView.unobserve(panel.element);
        panels.delete(key);
      }
    const nodes = [];
    for (const { name: kind, title } of known) {
      const of = shown.filter((one) => one.kind === kind);
      if (!of.length) continue;
      nodes.push(
        el(
          "section",
          { "data-section": kind },
          el("div.section-head", el("h2", title), el("span.muted", String(of.length))),
          el(
            "div.cards",
            of.map((one) => {
              if (!panels.has(one.key)) panels.set(one.key, new Panel(one));
              else panels.get(one.key).change(one);
              return panels.get(one.key).element;
            }),
          ),
        ),
      );
    }
    fill(list, nodes.length ? nodes : whyNothing());
    for (const panel of panels.values()) inView.observe(panel.element);
  }

  function whyNothing() {
    const count = visibleRuns().length;
    if (!count) return nothing("No run is selected.", linkTo({ page: "runs" }));
    if (index.length) return nothing("No media have this name.");
    return nothing(problem || `No media were logged by ${count === 1 ? "this run" : "these runs"}.`);
  }

  async function begin() {
    try {
      await whenViewed();
      if (!known.length) known = shownKinds((await serverInfo()).kinds);
      await loadIndex();
    } catch (error) {
      fill(list, el("p.empty", error.message));
      return;
    }
    if (view.isGone) return;
    isBegun = true;
    drawTools();
    arrange();
  }

  view.onState(async (changed) => {
    if (changed.has("run") || changed.has("off")) await loadIndex();
    if (view.isGone) return;
    if (["run", "off", "kind", "find"].some((name) => changed.has(name))) arrange();
    if (["step", "class", "opacity"].some((name) => changed.has(name)))
      for (const panel of panels.values()) panel.follow(changed);
    drawTools();
  });
  const refresh = inTurn(async () => {
    if (!isBegun) {
      await begin();
      return;
    }
    await loadIndex();
    if (view.isGone) return;
    drawTools();
    arrange();
  });
  view.onData((changed) => {
    const isShown = ([id, { record, gone }]) => (record || gone) && visibleRuns().includes(id);
    if (changed.all || Object.entries(changed.runs).some(isShown)) refresh();
  });
  view.onDocument("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || event.target.closest("input, select, textarea, canvas, video, audio, dialog") || bar.hidden)
      return;
    master.value = String(Number(master.value) + by);
    master.oninput();
  });
  view.onTheme(() => {
    for (const panel of panels.values()) panel.show(true);
  });
  view.until(leaveSidebar);
  view.until(() => inView.disconnect());
  begin();
  return () => view.leave();
}

/** Returns the kinds with a renderer and their titles, in the order of the renderers. */
function shownKinds(kinds) {
  const order = Object.keys(RENDERERS);
  return kinds
    .filter(({ shows }) => order.includes(shows))
    .map(({ name, shows }) => ({
      name,
      shows,
      title: `${name[0].toUpperCase()}${name.slice(1).replaceAll("_", " ")}`,
    }))
    .sort((one, other) => order.indexOf(one.shows) - order.indexOf(other.shows));
}

/** Returns the place of the last step up to the given one; 0 if there is none. */
function placeOf(steps, step) {
  let place = 0;
  steps.forEach((one, at) => {
    if (one <= step) place = at;
  });
  return place;
}

/** Shows a step in all panels; at the last step they follow the newest one. */
function chooseStep(steps, place) {
  update({ step: place >= steps.length - 1 ? "" : String(steps[Math.max(0, place)]) });
}

/** The records of one name, of all selected runs. */
class Panel {
  constructor(about) {
    this.about = about;
    this.isVisible = false;
    this.shown = "";
    this.turn = 0;
    /** The largest number of pictures that a run has at the step. */
    this.most = 0;
    /** @type {number | null} The place of the enlarged picture of each run. */
    this.place = null;
    this.content = el("div.media-grid");
    this.classes = el("div", { class: "classes", hidden: true });
    this.slider = el("input", {
      type: "range",
      min: 0,
      step: 1,
      "aria-label": `Step of ${shorten(about.name, 60)}`,
      oninput: () => chooseStep(this.about.steps, Number(this.slider.value)),
    });
    this.said = el("output");
    this.bar = el("div.step-bar", this.slider, this.said);
    this.element = el(
      "section",
      {
        class: `card wide media ${about.kind} shows-${about.shows}`,
        "data-key": about.key,
        "aria-label": shorten(about.name, 100),
      },
      el(
        "div.card-head",
        el("h3", { dir: "auto", title: shorten(about.name, 300) }, shorten(about.name || "Traces", 120)),
      ),
      this.bar,
      this.classes,
      this.content,
    );
  }

  change(about) {
    if (this.shown && JSON.stringify(about) === JSON.stringify(this.about)) return;
    this.about = about;
    this.show();
  }

  setVisible(isVisible) {
    this.isVisible = isVisible;
    if (isVisible) this.show();
  }

  /** Returns the step to show: the chosen one or the last one before it; the last one by default. */
  step() {
    const { steps } = this.about;
    return state.step === "" ? steps.at(-1) : steps[placeOf(steps, Number(state.step))];
  }

  /** Shows one picture of each run side by side in a dialog. */
  enlarge(place) {
    this.place = place;
    const parts = [this.bar, this.classes, this.content];
    const close = iconButton("close", "Close (Esc)", () => dialog.close());
    const dialog = el(
      "dialog",
      { class: "enlarged", "aria-label": shorten(this.about.name, 100) },
      close,
      el("h2", shorten(this.about.name, 120)),
      parts,
    );
    dialog.addEventListener("keydown", (event) => {
      const { steps } = this.about;
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const next = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (!by && !next) return;
      event.preventDefault();
      if (by) {
        chooseStep(steps, Number(this.slider.value) + by);
      } else {
        this.place = Math.max(0, Math.min(this.most - 1, (this.place ?? 0) + (next ?? 0)));
        this.show(true);
      }
    });
    dialog.addEventListener("close", () => {
      this.place = null;
      this.element.append(...parts);
      this.element.style.minHeight = "";
      dialog.remove();
      this.show(true);
    });
    // Without a height the card would collapse, and the page would scroll.
    this.element.style.minHeight = `${this.element.offsetHeight}px`;
    document.body.append(dialog);
    dialog.showModal();
    close.focus();
    this.show(true);
  }

  follow(changed) {
    if (changed.has("class") || changed.has("opacity")) {
      this.drawClasses();
      for (const canvas of this.content.querySelectorAll("canvas.mask")) canvas.paint();
    }
    if (changed.has("step")) this.show();
  }

  async show(isForced = false) {
    if (!this.isVisible && this.place === null) {
      if (isForced) this.shown = "";
      return;
    }
    const { shows, runs, steps } = this.about;
    const step = this.step();
    const { isOverTime } = RENDERERS[shows];
    this.bar.hidden = isOverTime || steps.length < 2;
    this.slider.max = String(Math.max(0, steps.length - 1));
    this.slider.value = String(Math.max(0, steps.indexOf(step)));
    this.slider.setAttribute("aria-valuetext", `step ${step}`);
    fill(this.said, `step ${formatNumber(step)} · ${steps.indexOf(step) + 1} of ${steps.length}`);
    const wanted = JSON.stringify([runs, isOverTime ? steps.length : step]);
    if (wanted === this.shown && !isForced) return;
    this.shown = wanted;
    this.turn += 1;
    const mine = this.turn;
    this.most = 0;
    const parts = await Promise.all(
      runs.map(async (id) => {
        try {
          return await this.ofRun(id, step);
        } catch (error) {
          // The next change asks again.
          if (mine === this.turn) this.shown = "";
          return el("p.muted", error.message);
        }
      }),
    );
    if (mine !== this.turn) return;
    const labels = runLabels(runs.map(runInfo));
    const nodes = parts.map((part, at) => {
      const id = runs[at];
      return el(
        "div",
        { class: "of-run", "data-run": id },
        el(
          "h4",
          swatch(id),
          el("span", { dir: "auto", title: shorten(runInfo(id).name, 300) }, shorten(labels[at], 80)),
          part?.dataset?.step && part.dataset.step !== String(step)
            ? el("span.muted", `step ${part.dataset.step}`)
            : null,
        ),
        part,
      );
    });
    fill(this.content, nodes);
    this.drawClasses();
    for (const plot of this.content.querySelectorAll(".ridges")) plot.start();
  }

  /** Returns the records of a run at the step, or at the last one before it. */
  async ofRun(id, step) {
    const { kind, shows, name } = this.about;
    const renderer = RENDERERS[shows];
    if (renderer.ofRun) return renderer.ofRun(id, this.about, step);
    const { items, total } = await listMedia(id, kind, name);
    if (renderer.isOverTime) return renderer.overTime(id, items);
    const steps = [...new Set(items.map((item) => item.step))].sort((a, b) => a - b);
    const own = steps[placeOf(steps, step)];
    const now = items.filter((item) => item.step === own);
    const node = el("div.pictures");
    node.dataset.step = String(own);
    if (total > items.length && steps.length > 1)
      node.title = `${items.length} of ${total} records, taken evenly.`;
    this.labels = Object.assign(
      this.labels ?? {},
      ...now.map((item) =>
        Object.fromEntries(Object.keys(item.masks ?? {}).map((mask) => [mask, item.labels ?? {}])),
      ),
    );
    this.most = Math.max(this.most, now.length);
    const first = this.place === null ? 0 : Math.min(this.place, now.length - 1);
    const side = this.place === null ? (now.length > FEW ? 64 : 96) : Infinity;
    const shown = now.slice(first, this.place === null ? MOST_PICTURES : first + 1);
    for (const [at, item] of shown.entries())
      node.append(renderer.figure(id, item, side, () => this.place === null && this.enlarge(at)));
    if (this.place === null && now.length > MOST_PICTURES)
      node.append(el("p.muted", `and ${now.length - MOST_PICTURES} more`));
    return node;
  }

  drawClasses() {
    const masks = Object.entries(this.labels ?? {});
    this.classes.hidden = !masks.length;
    if (!masks.length) return;
    const switchOf = (key, ...label) =>
      button(label, () => toggle("class", key), {
        class: "class-button",
        "aria-pressed": String(!state.class.includes(key)),
      });
    const buttons = masks.flatMap(([mask, labels]) => {
      const classes = Object.entries(labels).filter(([at]) => Number(at) > 0);
      return [
        el("span.muted", shorten(mask, 40)),
        ...classes.slice(0, 64).map(([at, label]) => {
          const color = `rgb(${CLASSES[Number(at) % 256]})`;
          return switchOf(`${mask}/${at}`, el("i", { style: { background: color } }), shorten(label, 40));
        }),
        !Object.keys(labels).length && switchOf(mask, "all classes"),
      ];
    });
    // A slider that is being moved stays.
    if (this.classes.contains(document.activeElement) && document.activeElement?.matches("[type=range]"))
      return;
    fill(
      this.classes,
      buttons,
      el(
        "label.slider",
        "Opacity",
        el("input", {
          type: "range",
          min: 0,
          max: 1,
          step: 0.05,
          value: state.opacity,
          "aria-label": "Opacity of masks",
          oninput: (event) => update({ opacity: event.target.value }),
        }),
      ),
    );
  }
}

/**
 * How the page shows records, in the order of its sections. The server names a renderer for each kind.
 *
 * `figure` shows one record, `overTime` shows all records of a run at once, and `ofRun` loads its records itself.
 */
const RENDERERS = {
  image: {
    figure: (id, item, side, enlarge) => el("figure", picture(id, item, side, enlarge), captionOf(item)),
  },
  video: {
    // Browsers play a GIF as an image.
    figure: (id, item, side, enlarge) =>
      /\.gif$/i.test(item.file)
        ? el("figure", picture(id, item, side, enlarge), captionOf(item))
        : el("figure", WIDE, video(id, item), captionOf(item)),
  },
  audio: {
    figure: (id, item) => el("figure", WIDE, sound(id, item), captionOf(item)),
  },
  points: {
    figure: (id, item) => el("div", WIDE, pointCloud(id, item.file), captionOf(item)),
  },
  histogram: { isOverTime: true, overTime: ridges },
  table: {
    ofRun: async (id, { kind, name }, step) => {
      const steps = (await runDetail(id)).media[kind][name];
      const own = steps[placeOf(steps, step)];
      const table = await readTable(id, name, own);
      const node = dataTable(table.columns, table.rows, table.orders, { name, total: table.total });
      node.dataset.step = String(own);
      return node;
    },
  },
  text: {
    figure: (_, item) =>
      el(
        "div",
        {
          class: "text-record",
          dir: "auto",
          tabIndex: 0,
          role: "group",
          "aria-label": "Text",
          style: { flex: "1 1 100%" },
        },
        shorten(item.text, 200000),
      ),
  },
  pairs: {
    figure: (_, item) =>
      el(
        "div",
        { class: "data-table", tabIndex: 0, role: "group", "aria-label": "Traces" },
        pairTable(flatten(item.traces)),
      ),
  },
};

function video(id, item) {
  return el("video", {
    controls: true,
    loop: true,
    muted: true,
    preload: "metadata",
    playsInline: true,
    src: fileUrl(id, item.file),
    "aria-label": item.caption ? shorten(item.caption, 100) : "Video",
  });
}

function sound(id, item) {
  return el("audio", { controls: true, preload: "metadata", src: fileUrl(id, item.file) });
}

function captionOf(item) {
  return item.caption ? el("figcaption", { dir: "auto" }, shorten(item.caption, 500)) : null;
}

/** Returns histograms over time: a ridge for each step, the newest in front. */
function ridges(id, items) {
  const holder = el("div", { class: "plot ridges", style: { height: "300px" } });
  const drawn = items.filter((item) => item.counts.length);
  const every = Math.max(1, Math.ceil(drawn.length / MOST_RIDGES));
  const kept = drawn.filter((_, at) => (drawn.length - 1 - at) % every === 0);
  holder.dataset.ridges = String(kept.length);
  holder.start = () => {
    if (!holder.isConnected || !kept.length) {
      if (!kept.length) fill(holder, el("div.note", "No finite values."));
      return;
    }
    const densities = kept.map(({ counts, edges }) => {
      const sum = counts.reduce((a, b) => a + b, 0) || 1;
      return counts.map((count, at) => count / sum / Math.max(1e-12, edges[at + 1] - edges[at]));
    });
    const top = Math.max(...densities.flat()) || 1;
    const height = Math.max(3, kept.length * 0.3);
    const ground = isDark() ? "#17181b" : "#ffffff";
    const traces = kept.map((item, at) => {
      const base = kept.length - 1 - at;
      const x = [item.edges[0]],
        y = [base];
      densities[at].forEach((density, bin) => {
        x.push((item.edges[bin] + item.edges[bin + 1]) / 2);
        y.push(base + (density / top) * height);
      });
      x.push(item.edges.at(-1));
      y.push(base);
      return {
        mode: "lines",
        x,
        y,
        fillcolor: ground,
        line: { color: shade(at / Math.max(1, kept.length - 1)), width: 1.3 },
        text: x.map((value) => `step ${item.step}: ${formatNumber(value)}`),
        meta: { run: id, step: item.step },
      };
    });
    const ticks = kept
      .map((item, at) => [kept.length - 1 - at, item.step])
      .filter((_, at) => at % Math.ceil(kept.length / 8) === 0);
    drawPlot(holder, traces, {
      margin: { l: 52, r: 12, t: 18, b: 30 },
      x: {},
      y: { ticks: ticks.map(([place, step]) => [place, String(step)]), isBare: true, title: "step" },
      ...talking(holder),
    });
  };
  return holder;
}
