/** The comparison of runs: what differs, and the step at which they part. */

import { compareRuns, listFields, loadInfos, rowsOf, runInfo } from "./data.js";
import { breakable, el, fill, formatApart, formatNumber, icon, menu, shorten } from "./dom.js";
import { isTiming } from "./names.js";
import { showBesideRuns, swatch } from "./sidebar.js";
import { linkTo, state, update, visibleRuns, whenViewed } from "./state.js";
import { plainTable } from "./table.js";
import { View } from "./view.js";

const MOST_RUNS_COMPARED = 20;
const PARTS = [
  ["hparams.", "Hyperparameters"],
  ["summary.", ""],
  ["git.", "Code"],
  ["environment.", "Environment"],
  ["", "Everything else"],
];

/** Which value of a metric is compared: the words of the menu. */
const VALUES = [
  ["", "Last values"],
  ["best", "Best values"],
  ["min", "Smallest values"],
  ["max", "Largest values"],
];
const MOST_METRICS = 300;

/** Shows the comparison in an element until the returned function is called. */
export function showCompare(root) {
  const content = el("div", { style: { display: "contents" } });
  const view = new View("compare");
  view.until(showBesideRuns(root, content));
  /** Which direction of a metric is better, "min" or "max". */
  let best = new Map();
  let word = "",
    withTimes = false;

  function load() {
    return view.ask(
      async () => {
        await whenViewed();
        const ids = visibleRuns().slice(0, MOST_RUNS_COMPARED);
        await loadInfos(ids);
        const found = ids.length < 2 ? null : await compareRuns(ids);
        return { ids, found: found && (await withValues(ids, found)) };
      },
      ({ ids, found }) => (found ? draw(ids, found) : drawTooFew()),
      (error) => fill(content, el("p", { class: "empty" }, error.message)),
    );
  }

  /** Returns a comparison with the chosen values of metrics, and the better direction of each, where it is known. */
  async function withValues(ids, found) {
    const { fields } = await listFields();
    best = new Map(fields.filter((one) => one.best).map((one) => [one.name, one.best]));
    if (state.goal) best.set(state.goal.replace(/^(min|max)/, "summary"), state.goal.slice(0, 3));
    if (!state.of) return found;
    const columnOf = (name) =>
      name.replace(/^summary/, state.of === "best" ? (best.get(name) ?? "summary") : state.of);
    const names = found.fields.map(({ name }) => name).filter((name) => name.startsWith("summary."));
    const rows = await rowsOf(ids, names.slice(0, MOST_METRICS).map(columnOf));
    const valuesOf = (name) =>
      Object.fromEntries(
        rows.map((row) => [row.id, row.values[columnOf(name)]]).filter(([, value]) => value !== undefined),
      );
    return {
      ...found,
      fields: found.fields.map((field) =>
        names.includes(field.name) ? { ...field, values: valuesOf(field.name) } : field,
      ),
    };
  }

  function drawTooFew() {
    fill(
      content,
      el(
        "div",
        { class: "empty" },
        "Select two runs or more.",
        el("br", {}),
        el("a", { class: "button", ...linkTo({ page: "runs" }) }, "Choose runs"),
      ),
    );
  }

  function named(id) {
    return el(
      "span",
      { style: { display: "inline-flex", "align-items": "center", gap: "6px" } },
      swatch(id),
      el("bdi", { title: shorten(runInfo(id).name, 300) }, shorten(runInfo(id).name, 40)),
    );
  }

  /** Says at which step the first metric of two runs differs, among those that are no times and speeds unless asked. */
  function partingOf({ a, b, metrics, unread = 0 }) {
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
              " part at ",
              el("strong", {}, `step ${formatNumber(step)}`),
              `, in ${shorten(metric, 80)}`,
              same ? `; ${same} ${same === 1 ? "metric agrees" : "metrics agree"} throughout` : "",
            ],
      left ? el("span", { class: "muted" }, ` (times and speeds left out: ${left})`) : null,
      unread ? ` (${unread} ${unread === 1 ? "metric takes" : "metrics take"} too long to compare)` : null,
      ".",
    );
  }

  function draw(ids, { fields, parts }) {
    const tables = el("div", { class: "panels", style: { "grid-template-columns": "minmax(0, 1fr)" } });
    const find = el("input", {
      type: "search",
      id: "search",
      placeholder: "Search fields",
      "aria-label": "Search fields",
      value: word,
      oninput: () => {
        word = find.value;
        drawTables();
      },
    });
    const parting = el("div", { class: "parting" });
    const values = menu("compared", "Values of metrics", (of) => update({ of }));
    fill(
      values,
      VALUES.map(([value, text]) => el("option", { value }, text)),
    );
    values.value = state.of;
    const timed = el("input", {
      type: "checkbox",
      id: "timed",
      checked: withTimes,
      onchange: () => {
        withTimes = timed.checked;
        drawParting();
      },
    });
    fill(
      content,
      el(
        "div",
        { class: "toolbar" },
        el("h1", {}, "What differs"),
        el(
          "label",
          { class: "check", style: { "margin-left": "auto" }, title: "They differ between any two runs." },
          timed,
          "Times and speeds too",
        ),
        values,
        el("label", { class: "field search" }, icon("search"), find),
      ),
      visibleRuns().length > MOST_RUNS_COMPARED &&
        el("p", { class: "muted" }, `The first ${MOST_RUNS_COMPARED} runs.`),
      el("section", { class: "panel", "data-panel": "Parting" }, el("h2", {}, "Where they part"), parting),
      tables,
    );
    drawParting();

    function drawParting() {
      fill(parting, parts.map(partingOf));
      drawTables();
    }

    function drawTables() {
      const left = new Set(
        fields.filter(
          ({ name }) =>
            name.toLowerCase().includes(word.toLowerCase()) &&
            (withTimes || !name.startsWith("summary.") || !isTiming(name.slice("summary.".length))),
        ),
      );
      tables.replaceChildren();
      const compared = VALUES.find(([value]) => value === state.of) ?? VALUES[0];
      for (const [prefix, name] of PARTS) {
        const title = name || compared[1];
        const own = [...left].filter(({ name }) => name.startsWith(prefix));
        for (const one of own) left.delete(one);
        if (!own.length) continue;
        tables.append(
          el(
            "section",
            { class: "panel", "data-panel": title },
            el("h2", {}, title),
            el(
              "div",
              { class: "scroll", style: { "max-height": "none" }, tabIndex: 0 },
              plainTable(
                own.slice(0, 1000).map(({ name, values }) => [
                  el("th", { scope: "row", dir: "auto" }, breakable(shorten(name.slice(prefix.length), 120))),
                  cells(
                    name,
                    ids.map((id) => values[id]),
                  ),
                ]),
                ["Field", ...ids.map((id) => el("th", { scope: "col" }, named(id)))],
              ),
            ),
          ),
        );
      }
      if (!fields.length) tables.append(el("p", { class: "empty" }, "Nothing differs but the name."));
    }
  }

  function cells(name, values) {
    const numbers = values.filter((value) => typeof value === "number" && Number.isFinite(value));
    const top = best.get(name) && numbers.length > 1 ? Math[best.get(name)](...numbers) : undefined;
    const shown = values.map((value) => (Array.isArray(value) ? value.join(", ") : value));
    return formatApart(shown).map((text, place) =>
      el(
        "td",
        {
          dir: "auto",
          class: [
            values[place] === undefined ? "muted" : typeof values[place] === "number" ? "number" : "",
            values[place] === top && top !== undefined ? "best-value" : "",
          ].join(" "),
        },
        shorten(text, 400),
      ),
    );
  }

  view.onState((changed) => {
    if (["run", "off", "of", "goal"].some((name) => changed.has(name))) load();
  });
  view.onData((changed) => {
    if (changed.all && view.isFailed) load();
  });
  load();
  return () => view.leave();
}
