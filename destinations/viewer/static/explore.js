/** Hyperparameters against a metric, over all runs that match: a scatter plot and parallel coordinates. */

import { bare, RunColumns } from "./columns.js";
import { button, debounce, el, fill, formatNumber, inTurn, menu, setMenu } from "./dom.js";
import { Importance } from "./importance.js";
import { colorLegend, drawLegend } from "./legend.js";
import { drawParallel } from "./parallel.js";
import { drawScatter } from "./scatter.js";
import { state, update, viewQuery } from "./state.js";
import { View } from "./view.js";
import { complain } from "./viewbar.js";

const MOST_OPTIONS = 300;

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
    const isLog = () => this.logX.getAttribute("aria-pressed") === "true";
    this.logX = button("log x", () => update({ logx: isLog() ? "0" : "1" }));
    this.logY = button("log y", () => update({ logy: state.logy ? "" : "1" }));
    this.count = el("span.muted.count");
    this.title = el("h2");
    this.axesSaid = el("span.badge");
    this.legend = colorLegend();
    this.plot = el("div", { class: "plot", id: "scatter", style: { height: "310px" } });
    this.foot = el("p.card-foot");
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
    return [
      el("div.toolbar", this.y, el("label.pair", "against", this.x), this.logX, this.logY, this.count),
      el(
        "div.explore-top",
        el("section.card", el("div.card-head", this.title), this.legend, this.plot, this.foot),
        this.importance.element,
      ),
      el(
        "section.card.wide",
        el("div.card-head", el("h2", "Parallel coordinates"), this.axesSaid),
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
    fill(this.foot, drawScatter(this.plot, this.logX, this.columns));
    drawParallel(this.holder, this.columns);
  }

  drawTools(sx, sy) {
    const { hparams, metrics, rows, total } = this.columns;
    const options = (names) =>
      [...new Set([...[sx, sy].filter((name) => names.includes(name)), ...names])]
        .slice(0, MOST_OPTIONS)
        .map((name) => [name, bare(name)]);
    setMenu(this.x, options(["created_at"]), sx, {
      Hyperparameters: options(hparams),
      Metrics: options(metrics),
    });
    setMenu(this.y, options(metrics), sy);
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
}

/** Shows the plots in an element until the returned function is called. */
export function showExplore(root) {
  const view = new View("explore");
  const explore = new Explore(view);
  const { columns } = explore;
  fill(root, el("section.page", explore.elements()));
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
