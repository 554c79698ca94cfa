/** The page of one run: facts, curves, panels and the log. */

import { Curves } from "./chart.js";
import { editRun, isExported, readLog, runDetail, selectedRows } from "./data.js";
import {
  attempt,
  breakable,
  button,
  el,
  fieldFor,
  fill,
  formatAge,
  formatDuration,
  formatTime,
  icon,
  iconButton,
  inTurn,
  menu,
  setMenu,
  shorten,
  tagsIn,
} from "./dom.js";
import { chartRank } from "./names.js";
import { panelsOf } from "./panels.js";
import { favouriteButton, statusMark } from "./runs.js";
import { linkTo, selectRuns, selectedRuns, state } from "./state.js";
import { dataTable } from "./table.js";
import { timeBand } from "./time.js";
import { View } from "./view.js";

/** The columns of the metrics' statistics, with headings. */
const SUMMARY_COLUMNS = {
  metric: "metric",
  last: "last",
  min: "min",
  min_step: "at step",
  max: "max",
  max_step: "at step",
  mean: "mean",
  count: "values",
  non_finite: "not finite",
};
const MOST_CURVES = 6;
const LOG_TAIL = 65536;
const MOST_CHARACTERS_OF_LOG = 1 << 20;

function fact(name, value) {
  return value ? el("span", `${name} `, el("b", { dir: "auto" }, breakable(shorten(value, 200)))) : null;
}

function factsOf(detail) {
  return el(
    "div.run-facts",
    fact("Started", `${formatTime(detail.created_at)} (${formatAge(detail.created_at)})`),
    fact("Duration", formatDuration(detail.duration)),
    fact("Id", detail.run_id),
    fact("Folder", detail.path),
    fact("Forked from", detail.parent),
    fact("Host", detail.environment?.host ?? detail.environment?.hostname),
    fact("Commit", shorten(detail.git?.commit ?? detail.git?.sha ?? "", 12)),
  );
}

/** The panels above the curves, which say why a run failed. */
const ALARMS = ["Something could not be read", "Errors"];

/** The page itself. An unchanged panel stays in the document, and so keeps its scroll position. */
class RunPage {
  /**
   * @param {View} view
   * @param {string} id of the run.
   */
  constructor(view, id) {
    this.view = view;
    this.id = id;
    this.isDrawn = false;
    this.element = el("section.page.run-page", el("p.empty", "Loading…"));
    this.top = el("div", { style: { display: "contents" } });
    this.curves = new Curves(view, () => [id]);
    this.time = el("div", { style: { display: "contents" } });
    this.alarms = el("div.panels");
    this.panels = el("div.panels");
    this.side = el("div.run-side");
    /** The drawn panels, by title. */
    this.shown = new Map();
    /** @type {ReturnType<typeof dataTable> | null} */
    this.metrics = null;
    this.metricsBody = el("div.body");
    /** @type {LogTail | null} */
    this.log = null;
    this.load = inTurn(() => this.ask());
  }

  ask() {
    const { id, element } = this;
    return this.view.ask(
      async () => {
        const [detail, [row]] = await Promise.all([runDetail(id), selectedRows([id])]);
        return { ...detail, constant: row?.constant ?? [] };
      },
      (detail) => {
        if (element.querySelector(".in-place")) return;
        this.draw(detail);
        this.isDrawn = true;
      },
      (error) => {
        // If the server just doesn't answer, the page stays.
        if (this.isDrawn && /** @type {any} */ (error).status !== 404) return;
        fill(
          element,
          el(
            "p.empty",
            error.message,
            el("br"),
            el("a", { class: "button", ...linkTo({ page: "runs", id: "" }) }, "All runs"),
          ),
        );
      },
    );
  }

  draw(detail) {
    const { element, top, alarms, curves, time, panels, side } = this;
    if (!element.contains(panels)) {
      const parts = el("div.run-parts", curves.element, time, panels);
      fill(element, top, alarms, el("div.run-body", parts, side));
    }
    fill(
      top,
      this.head(detail),
      factsOf(detail),
      el(
        "div.run-facts",
        this.editable("Tags", detail.tags.join(", "), "none", (text) => ({
          tags: tagsIn(text, detail.tags),
          was: { tags: detail.tags },
        })),
        this.editable("Note", detail.note ?? "", "none", (text) => ({
          note: text,
          was: { note: detail.note ?? "" },
        })),
      ),
    );
    this.drawCurves(detail);
    fill(time, detail.time?.wall ? timeBand(detail.time) : false);
    this.drawPanels(detail);
  }

  head(detail) {
    const isChosen = state.run.includes(this.id);
    const choose = () => {
      selectRuns([this.id], !isChosen);
      this.draw(detail);
    };
    return el(
      "div.run-head",
      this.heading(detail.name),
      !isExported && favouriteButton(detail, (patch) => this.save(patch)),
      statusMark(detail),
      el(
        "span.actions",
        button([icon("check"), isChosen ? "Selected" : "Select"], choose, {
          "aria-pressed": String(isChosen),
        }),
        el("a", { class: "button primary", ...this.linkToRuns("charts") }, icon("chart"), "Charts"),
        el("a", { class: "button", ...this.linkToRuns("media") }, "Media"),
      ),
    );
  }

  /** Returns the name; a double click or the pencil edits it. */
  heading(name) {
    const node = el("h1", { dir: "auto" }, breakable(shorten(name, 300)));
    if (isExported) return node;
    const edit = () => this.edit(node, "Name", name, (text) => ({ name: text, was: { name } }));
    node.append(iconButton("edit", "Edit name", edit));
    node.addEventListener("dblclick", edit);
    return node;
  }

  /** Returns the properties of a link to a view of the selected runs, or of this run if it isn't selected. */
  linkToRuns(target) {
    return linkTo(() => ({
      page: target,
      run: selectedRuns().includes(this.id) ? state.run : [this.id],
      id: "",
    }));
  }

  editable(name, value, nothing, patchOf) {
    const node = el("span", `${name} `, el("b", { dir: "auto" }, shorten(value || nothing, 1000)), " ");
    const label = `Edit ${name.toLowerCase()}`;
    const edit = () => this.edit(node, name, value, patchOf);
    if (!isExported) node.append(iconButton("edit", label, edit));
    return node;
  }

  /** Puts a field in the place of a value; Enter or leaving the field saves it. */
  edit(node, name, value, patchOf) {
    const end = (text) => {
      field.remove();
      return text === null ? this.load() : this.save(patchOf(text));
    };
    const field = fieldFor(value, { label: name, isLong: name === "Note", end, style: { width: "340px" } });
    fill(node, name === "Name" ? "" : `${name} `, field);
    field.focus();
  }

  async save(patch) {
    await attempt(() => editRun(this.id, patch));
    await this.load();
  }

  /** Draws the most telling curves, in the order of the charts. */
  drawCurves({ metrics, constant }) {
    const constants = new Set(constant);
    const rankOf = (name) => chartRank(name, constants);
    const order = metrics.toSorted((one, other) => rankOf(one) - rankOf(other) || one.localeCompare(other));
    const all = el(
      "a",
      { class: "button quiet", ...this.linkToRuns("charts") },
      `All ${order.length} charts`,
    );
    this.curves.show(order.slice(0, MOST_CURVES), ...(order.length > MOST_CURVES ? [all] : []));
  }

  drawPanels(detail) {
    const panels = panelsOf(this.id, detail, this.metricsOf(detail));
    const nodes = panels.map(([title, content, more]) => this.panel(title, content, more));
    if (detail.logs?.length) {
      this.log ??= new LogTail(this.id, detail.logs);
      if (!this.side.hasChildNodes()) this.side.append(this.log.element);
      this.log.more();
    }
    const isAlarm = (node) => ALARMS.includes(node.dataset.panel);
    for (const [place, wanted] of [
      [this.alarms, nodes.filter(isAlarm)],
      [this.panels, nodes.filter((node) => !isAlarm(node))],
    ]) {
      const { children } = place;
      if (wanted.length !== children.length || wanted.some((node, at) => node !== children[at]))
        fill(place, wanted);
    }
  }

  /** Returns a panel, the existing one if it says the same. */
  panel(title, content, more = "") {
    const old = this.shown.get(title);
    if (old && content === this.metricsBody) return old.node;
    const node = el("section", { class: `panel ${more}`, "data-panel": title }, el("h2", title), content);
    const text = node.outerHTML;
    if (old?.text === text) return old.node;
    this.shown.set(title, { node, text });
    return node;
  }

  /** Returns the table of metrics. It is always the same element, so that it keeps its order and its filter. */
  metricsOf({ summary, summary_orders }) {
    const fields = Object.keys(SUMMARY_COLUMNS);
    const rows = Object.entries(summary ?? {}).map(([metric, one]) =>
      fields.map((name) => ({ metric, ...one })[name]),
    );
    if (!rows.length) return null;
    const orders = fields.map((name) => summary_orders[name]);
    if (this.metrics) this.metrics.show(rows, orders);
    else {
      const columns = fields.map((name) => ({ name: SUMMARY_COLUMNS[name] }));
      this.metrics = dataTable(columns, rows, orders, { name: "metrics" });
      fill(this.metricsBody, this.metrics);
    }
    return this.metricsBody;
  }
}

/** Shows a run in an element until the returned function is called. */
export function showRun(root) {
  const { id } = state;
  const view = new View();
  const page = new RunPage(view, id);
  fill(root, page.element);
  view.onData((changed) => {
    if (changed.all || changed.runs[id]?.record || changed.runs[id]?.gone) page.load();
  });
  page.load();
  return () => view.leave();
}

/** Shows the end of a log file, and follows it. */
class LogTail {
  constructor(id, files) {
    this.id = id;
    this.file = files[0];
    this.next = null;
    this.more = inTurn(() => this.ask());
    this.text = el("pre", { class: "log", tabIndex: 0, role: "log", "aria-label": "Log" });
    const choice = menu("log-file", "Log file", (file) => {
      this.file = file;
      this.next = null;
      this.text.textContent = "";
      this.more();
    });
    setMenu(
      choice,
      files.map((file) => [file, file]),
      this.file,
    );
    choice.disabled = files.length < 2;
    this.element = el(
      "section",
      { class: "panel", "data-panel": "Log" },
      el("h2", "Log ", choice),
      this.text,
    );
  }

  async ask() {
    const { file } = this;
    try {
      const { text, next } = await readLog(this.id, file, this.next ?? -LOG_TAIL);
      // Otherwise the reader has chosen another file meanwhile.
      if (file === this.file) this.append(text, next);
    } catch (error) {
      // The text so far stays.
      if (file === this.file && this.next === null) this.text.textContent = error.message;
    }
  }

  append(text, next) {
    const isAtEnd = this.text.scrollTop + this.text.clientHeight >= this.text.scrollHeight - 30;
    if (this.next === null) this.text.textContent = "";
    if (this.next !== next) this.text.append(document.createTextNode(text));
    this.next = next;
    if (this.text.textContent.length > MOST_CHARACTERS_OF_LOG)
      this.text.textContent = this.text.textContent.slice(-MOST_CHARACTERS_OF_LOG / 2);
    if (isAtEnd) this.text.scrollTop = this.text.scrollHeight;
  }
}
