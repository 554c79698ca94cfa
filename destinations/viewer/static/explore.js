/** Hyperparameters against a metric, over all runs that match: a scatter plot and parallel coordinates. */

import { bare, RunColumns, valueIn } from "./columns.js";
import { debounce, download, el, fill, formatNumber, inTurn, menu, toast, toCsv } from "./dom.js";
import { Importance } from "./importance.js";
import { colorLegend, drawLegend, legendTraces } from "./legend.js";
import { drawParallel, saveParallel } from "./parallel.js";
import { savePlot } from "./plot.js";
import { drawScatter } from "./scatter.js";
import { state, update, viewQuery } from "./state.js";
import { View } from "./view.js";
import { complain } from "./viewbar.js";

/** Makes the buttons that save a plot. */
function saves(kinds) {
  return kinds.map(([kind, act]) =>
    el(
      "button",
      {
        type: "button",
        class: "icon-button",
        style: { width: "auto", padding: "0 7px", "font-size": "11.5px" },
        "aria-label": `Save as ${kind}`,
        onclick: act,
      },
      kind,
    ),
  );
}

/** The plots, their controls, and the importance of hyperparameters. */
class Explore {
  /** @param {View} view of the page. */
  constructor(view) {
    this.columns = new RunColumns(view, {
      arrived: () => this.draw(),
      complain,
    });
    this.x = menu("scatter-x", "Horizontal", (sx) => update({ sx }));
    this.y = menu("scatter-y", "Metric", (sy) => update({ sy }));
    this.logX = el(
      "button",
      {
        type: "button",
        class: "button",
        onclick: () => update({ logx: this.logX.getAttribute("aria-pressed") === "true" ? "0" : "1" }),
      },
      "log x",
    );
    this.logY = el(
      "button",
      { type: "button", class: "button", onclick: () => update({ logy: state.logy ? "" : "1" }) },
      "log y",
    );
    this.count = el("span", { class: "muted count" });
    this.title = el("h2", {});
    this.axesSaid = el("span", { class: "badge" });
    this.legend = colorLegend();
    this.plot = el("div", { class: "plot", id: "scatter", style: { height: "310px" } });
    this.holder = el("div", { id: "parallel", style: { padding: "0 8px 10px" } });
    this.importance = new Importance((name) => update({ sx: name }));
    view.until(() => this.importance.view.leave());
    const resized = new ResizeObserver(
      debounce(() => {
        this.drawPlots();
      }, 80),
    );
    resized.observe(this.holder);
    view.until(() => resized.disconnect());
  }

  /** Returns the parts of the page, from top to bottom. */
  elements() {
    const saveCsv = () => this.saveCsv();
    return [
      el(
        "div",
        { class: "toolbar" },
        this.y,
        el("label", { class: "pair" }, "against", this.x),
        this.logX,
        this.logY,
        this.count,
      ),
      el(
        "div",
        { class: "explore-top" },
        el(
          "section",
          { class: "card" },
          el(
            "div",
            { class: "card-head" },
            this.title,
            saves([
              ["PNG", () => this.saveScatter("png")],
              ["SVG", () => this.saveScatter("svg")],
              ["CSV", saveCsv],
            ]),
          ),
          this.legend,
          this.plot,
        ),
        this.importance.element,
      ),
      el(
        "section",
        { class: "card wide" },
        el(
          "div",
          { class: "card-head" },
          el("h2", {}, "Parallel coordinates"),
          this.axesSaid,
          saves([
            ["SVG", () => saveParallel(this.holder)],
            ["CSV", saveCsv],
          ]),
        ),
        this.holder,
      ),
    ];
  }

  draw() {
    const { sx, sy } = this.columns.chosen();
    this.drawTools(sx, sy);
    const [axes, every] = [this.columns.axes().length, this.columns.everyAxis().length];
    fill(
      this.axesSaid,
      axes < every && `${axes} of ${every} axes; the others are left out. `,
      "Drag along an axis to select a range; click its name to remove it.",
    );
    fill(this.title, `${bare(sy)} against ${bare(sx)}`);
    drawLegend(this.legend, this.columns);
    this.drawPlots();
    if (sy) this.importance.follow(sy.replace(/^summary\./, ""), viewQuery(), this.columns.rows);
  }

  drawPlots() {
    drawScatter(this.plot, this.logX, this.columns);
    drawParallel(this.holder, this.columns);
  }

  drawTools(sx, sy) {
    const { hparams, metrics, rows, total } = this.columns;
    const option = (name) => el("option", { value: name }, bare(name));
    const groups = () => [
      el("optgroup", { label: "Hyperparameters" }, hparams.map(option)),
      el("optgroup", { label: "Metrics" }, metrics.map(option)),
    ];
    fill(this.x, groups(), option("created_at"));
    fill(this.y, metrics.map(option));
    this.x.value = sx;
    this.y.value = sy;
    this.logY.setAttribute("aria-pressed", String(state.logy === "1"));
    fill(
      this.count,
      total > rows.length
        ? `${rows.length} of ${formatNumber(total)} runs`
        : total === 1
          ? "1 run"
          : `${total} runs`,
    );
  }

  saveScatter(kind) {
    if (!this.plot.data?.some((trace) => trace.x.length)) {
      toast("Nothing is drawn.");
      return;
    }
    const traces = [...this.plot.data, ...legendTraces(this.columns)];
    savePlot(this.plot, this.title.textContent, kind, traces);
  }

  saveCsv() {
    const { columns } = this;
    const names = [...new Set([...columns.axes(), columns.chosen().sx, state.sc])].filter(Boolean);
    download(
      "runs.csv",
      toCsv([
        ["run", "name", ...names.map(bare)],
        ...columns.rows.map((row) => [row.run_id, row.name, ...names.map((name) => valueIn(row, name))]),
      ]),
      "text/csv",
    );
  }
}

/** Shows the plots in an element until the returned function is called. */
export function showExplore(root) {
  const view = new View("explore");
  const explore = new Explore(view);
  const { columns } = explore;
  fill(root, el("section", { class: "page" }, explore.elements()));
  view.onState((changed) => {
    const has = (...names) => names.some((name) => changed.has(name));
    if (has("q", "where", "without", "archived") || (has("sx", "sy", "sc") && !columns.hasAsked))
      columns.load();
    else if (has("sx", "sy", "sc", "logx", "logy", "hide", "run")) columns.sortWords();
    else if (has("brush")) explore.drawPlots();
  });
  const refresh = inTurn(() => columns.load());
  view.onData((changed) => {
    if (changed.table) refresh();
  });
  view.onTheme(() => explore.draw());
  columns.load();
  return () => view.leave();
}
