/** The comparison of runs: which fields differ, by how much, and at which step the runs diverge. */

import { Curves } from "./chart.js";
import {
  compareRuns,
  isExported,
  listFields,
  loadInfos,
  readSeries,
  rowsOf,
  runInfo,
  selectedRows,
} from "./data.js";
import {
  breakable,
  checkbox,
  debounce,
  el,
  fill,
  formatApart,
  formatNumber,
  menu,
  nothing,
  searchField,
  setMenu,
  shorten,
} from "./dom.js";
import { colorLegend } from "./legend.js";
import { chartRank, isTiming, runLabels } from "./names.js";
import { showBesideRuns, swatch } from "./sidebar.js";
import { linkTo, state, update, visibleRuns, whenViewed } from "./state.js";
import { alignedTexts, differencesOf } from "./ticks.js";
import { View } from "./view.js";
import { unfoldButton } from "./viewbar.js";

const MOST_RUNS_COMPARED = 20;
const MOST_CURVES = 3;
const PARTS = [
  ["summary.", "Metrics"],
  ["hparams.", "Hyperparameters"],
  ["git.", "Code"],
  ["environment.", "Environment"],
  ["", "Everything else"],
];

/** Which value of a metric to compare, with the words of the menu. */
const VALUES = [
  ["", "Last values"],
  ["best", "Best values"],
  ["min", "Smallest values"],
  ["max", "Largest values"],
  ["step", "Values at step"],
];
const MOST_METRICS = 300;
/** Each metric at a step takes a request. */
const MOST_METRICS_AT_STEP = 60;
const MOST_ROWS = 200;

/** Shows the comparison in an element until the returned function is called. */
export function showCompare(root) {
  const content = el("div", { style: { display: "contents" } });
  const view = new View("compare");
  const colors = colorLegend();
  view.until(showBesideRuns(root, colors, content));
  const curves = new Curves(view, visibleRuns);
  /** The better direction of each metric, "min" or "max". */
  let best = new Map();
  /** @type {any} The last answer. */
  let last = null;
  let word = "",
    withTimes = false,
    withSame = false;

  function load() {
    return view.ask(
      async () => {
        await whenViewed();
        const ids = visibleRuns().slice(0, MOST_RUNS_COMPARED);
        await loadInfos(ids);
        if (ids.length < 2) return null;
        const [{ fields, parts }, rows] = await Promise.all([compareRuns(ids), selectedRows(ids)]);
        return { ids, fields: await withValues(ids, fields), same: sameIn(rows, fields), parts };
      },
      (found) => {
        last = found;
        if (found) draw(found);
        else fill(content, nothing("Select two runs or more.", linkTo({ page: "runs" })));
      },
      (error) => fill(content, el("p.empty", error.message)),
    );
  }

  /** Returns the hyperparameters that are the same in all runs, as fields. */
  function sameIn(rows, fields) {
    const [first] = rows.filter(Boolean);
    const differing = new Set(fields.map(({ name }) => name));
    return Object.entries(first?.values ?? {})
      .filter(([name]) => name.startsWith("hparams.") && !differing.has(name))
      .map(([name, value]) => ({
        name,
        values: Object.fromEntries(rows.map((row) => [row?.id, value])),
      }));
  }

  /** Returns the fields with the chosen values of metrics, and updates `best`. */
  async function withValues(ids, fields) {
    const known = (await listFields()).fields;
    best = new Map(known.filter((one) => one.best).map((one) => [one.name, one.best]));
    if (state.goal) best.set(state.goal.replace(/^(min|max)/, "summary"), state.goal.slice(0, 3));
    const names = fields.map(({ name }) => name).filter((name) => name.startsWith("summary."));
    if (!state.of || !names.length) return fields;
    const valuesOf = await (state.of === "step" ? atStep(ids, names) : extremes(ids, names));
    return fields.map((field) =>
      names.includes(field.name) ? { ...field, values: valuesOf(field.name) } : field,
    );
  }

  /** Returns a function from a metric to its best, smallest or largest values by run. */
  async function extremes(ids, names) {
    const columnOf = (name) =>
      name.replace(/^summary/, state.of === "best" ? (best.get(name) ?? "summary") : state.of);
    const rows = await rowsOf(ids, names.slice(0, MOST_METRICS).map(columnOf));
    return (name) =>
      Object.fromEntries(
        rows.map((row) => [row.id, row.values[columnOf(name)]]).filter(([, value]) => value !== undefined),
      );
  }

  /** Returns a function from a metric to its values by run, at the chosen step or the last one before it. */
  async function atStep(ids, names) {
    const step = state.step === "" ? undefined : Number(state.step);
    // The server adds a value on each side of the range; the earlier one counts if the step itself has none.
    const from = isExported ? undefined : step;
    const found = new Map(
      await Promise.all(
        names.slice(0, MOST_METRICS_AT_STEP).map(async (name) => {
          const metric = name.slice("summary.".length);
          const series = await readSeries({ runs: ids, metrics: [metric], x: "step", from, to: step });
          const lastOf = ({ x, y }) => y[x.findLastIndex((one) => step === undefined || one <= step)];
          const values = series.map((one) => [one.run, lastOf(one)]).filter(([, value]) => value != null);
          return /** @type {[string, any]} */ ([name, Object.fromEntries(values.toReversed())]);
        }),
      ),
    );
    return (name) => found.get(name) ?? {};
  }

  /** Shows the curves of the goal, and of the first metrics that differ. */
  function showCurves(fields) {
    const metrics = fields
      .map(({ name }) => name)
      .filter((name) => name.startsWith("summary."))
      .map((name) => name.slice("summary.".length));
    const goal = state.goal.slice("min.".length);
    const rank = (name) => (name === goal ? -1 : chartRank(name));
    const order = metrics.sort((one, other) => rank(one) - rank(other));
    curves.show(order.slice(0, MOST_CURVES));
  }

  /** Says at which step two runs first differ in a metric; times and speeds count only if the reader asks for them. */
  function partingOf({ a, b, metrics, unread = 0 }, named) {
    const counted = Object.entries(metrics).filter(([name]) => withTimes || !isTiming(name));
    const apart = counted.filter(([, step]) => step !== null);
    const [metric, step] = apart.reduce(
      (first, one) => (one[1] < first[1] ? one : first),
      apart[0] ?? ["", null],
    );
    const same = counted.length - apart.length;
    const left = Object.keys(metrics).length - counted.length;
    return el(
      "p",
      { "data-step": step },
      named(a),
      " and ",
      named(b),
      !counted.length
        ? " have no metric in common"
        : step === null
          ? ` agree in ${same === 1 ? "the one metric" : `all ${same} metrics`} that both have, at all common steps`
          : [
              " diverge at ",
              el("strong", `step ${formatNumber(step)}`),
              `, in ${shorten(metric, 80)}`,
              same ? `; ${same} ${same === 1 ? "metric agrees" : "metrics agree"} throughout` : "",
            ],
      left ? el("span.muted", ` (times and speeds left out: ${left})`) : null,
      unread ? ` (${unread} ${unread === 1 ? "metric takes" : "metrics take"} too long to compare)` : null,
      ".",
    );
  }

  function draw({ ids, fields, same, parts }) {
    const labels = new Map(runLabels(ids.map(runInfo)).map((label, at) => [ids[at], label]));
    const named = (id) =>
      el(
        "span.named",
        swatch(id),
        el("bdi", { title: shorten(runInfo(id).name, 300) }, shorten(labels.get(id), 60)),
      );
    const find = searchField("Search fields", {
      id: "search",
      value: word,
      oninput: () => {
        word = find.input.value;
        drawTable();
      },
    });
    const parting = el("div.parting");
    const table = el("table.compared");
    const values = menu("compared", "Values of metrics", (of) => update({ of }));
    setMenu(values, VALUES, state.of);
    const step = el("input", {
      type: "number",
      class: "button",
      "aria-label": "Step",
      placeholder: "last",
      value: state.step,
      hidden: state.of !== "step",
      oninput: debounce(() => update({ step: step.value }), 200),
    });
    fill(
      content,
      el(
        "div.toolbar",
        values,
        step,
        checkbox("Same in all", withSame, (isOn) => {
          withSame = isOn;
          drawTable();
        }),
        checkbox("Times and speeds", withTimes, (isOn) => {
          withTimes = isOn;
          drawTable();
        }),
        find.field,
        colors,
        unfoldButton(),
      ),
      curves.element,
      visibleRuns().length > MOST_RUNS_COMPARED && el("p.muted", `The first ${MOST_RUNS_COMPARED} runs.`),
      el("div", { class: "panel scroll", tabIndex: 0 }, table),
      el("section", { class: "panel", "data-panel": "Parting" }, el("h2", "Where they diverge"), parting),
    );
    drawTable();
    showCurves(fields);

    function drawTable() {
      fill(
        parting,
        parts.map((part) => partingOf(part, named)),
      );
      const isShown = ({ name }) =>
        name.toLowerCase().includes(word.toLowerCase()) &&
        (withTimes || !name.startsWith("summary.") || !isTiming(name.slice("summary.".length)));
      const rank = ({ name }) => (name.startsWith("summary.") ? chartRank(name.slice("summary.".length)) : 0);
      const left = new Set(fields.filter(isShown).sort((one, other) => rank(one) - rank(other)));
      const bodies = PARTS.map(([prefix, title]) => {
        const own = [...left].filter(({ name }) => name.startsWith(prefix));
        for (const one of own) left.delete(one);
        return own.length ? bodyOf(title, `${own.length} differ`, own, prefix) : null;
      });
      const alike = same.filter(isShown);
      fill(
        table,
        el(
          "thead",
          el(
            "tr",
            el("th", { scope: "col" }, "Field"),
            ids.map((id, at) =>
              el(
                "th",
                { scope: "col", title: at ? null : "The other runs are compared with this one" },
                named(id),
              ),
            ),
          ),
        ),
        bodies,
        withSame && alike.length > 0 && bodyOf("Same in all", String(alike.length), alike, "hparams."),
        !fields.length && el("caption.empty", "Nothing differs but the name."),
      );
    }

    function bodyOf(title, count, own, prefix) {
      return el(
        "tbody",
        { "data-panel": title },
        el(
          "tr.section",
          el("th", { scope: "rowgroup", colSpan: ids.length + 1 }, title, " ", el("span.muted", count)),
        ),
        own.slice(0, MOST_ROWS).map((field) =>
          el(
            "tr",
            el("th", { scope: "row", dir: "auto" }, breakable(shorten(field.name.slice(prefix.length), 120))),
            cells(
              field.name,
              ids.map((id) => field.values[id]),
            ),
          ),
        ),
        own.length > MOST_ROWS &&
          el("tr", el("td", { colSpan: ids.length + 1 }, `${own.length - MOST_ROWS} more: search for them.`)),
      );
    }
  }

  function cells(name, values) {
    if (name.startsWith("summary.")) return metricCells(best.get(name), values);
    const shown = values.map((value) => (Array.isArray(value) ? value.join(", ") : value));
    return formatApart(shown).map((text, at) =>
      el(
        "td",
        { dir: "auto", class: values[at] === undefined || (at && values[at] === values[0]) ? "muted" : "" },
        shorten(text, 400),
      ),
    );
  }

  /** Returns the cells of a metric: aligned values, a mark at the best one, and each difference from the first. */
  function metricCells(direction, values) {
    const numbers = values.filter(Number.isFinite);
    const top = direction && numbers.length > 1 ? Math[direction](...numbers) : undefined;
    const texts = alignedTexts(values);
    const differences = differencesOf(values);
    return values.map((value, at) => {
      const isBetter = direction && (direction === "min" ? value < values[0] : value > values[0]);
      return el(
        "td",
        { class: "number", title: Number.isFinite(value) ? String(value) : null },
        el("span", { class: value === top ? "best-value" : "" }, texts.get(value) ?? formatNumber(value)),
        at > 0 && el("span", { class: `apart ${isBetter ? "good" : "muted"}` }, differences[at]),
      );
    });
  }

  view.onState((changed) => {
    const isOther = ["run", "off", "of", "goal"].some((name) => changed.has(name));
    if (isOther || (changed.has("step") && state.of === "step")) load();
    else if (changed.has("hues") && last) draw(last);
  });
  view.onData((changed) => {
    if (changed.all && view.isFailed) load();
  });
  load();
  return () => view.leave();
}
