/** The comparison of runs: what differs, and the step at which they part. */

import { compareRuns, loadInfos, runInfo } from "./data.js";
import { el, fill, formatNumber, icon, shorten } from "./dom.js";
import { ensureSelection, showBesideRuns, swatch } from "./sidebar.js";
import { linkTo, visibleRuns } from "./state.js";
import { plainTable } from "./table.js";
import { View } from "./view.js";

const MOST_RUNS_COMPARED = 20;
const PARTS = [
  ["hparams.", "Hyperparameters"],
  ["summary.", "Last values"],
  ["git.", "Code"],
  ["environment.", "Environment"],
  ["", "Everything else"],
];

/** Shows the comparison in an element until the returned function is called. */
export function showCompare(root) {
  const content = el("div", { style: { display: "contents" } });
  const view = new View("compare");
  view.until(showBesideRuns(root, content));
  let word = "";

  function load() {
    return view.ask(
      async (isOld) => {
        await ensureSelection(isOld);
        const ids = visibleRuns().slice(0, MOST_RUNS_COMPARED);
        await loadInfos(ids);
        return { ids, found: ids.length < 2 ? null : await compareRuns(ids) };
      },
      ({ ids, found }) => (found ? draw(ids, found) : drawTooFew()),
      (error) => fill(content, el("p", { class: "empty" }, error.message)),
    );
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
    const parting = parts.map(({ a, b, step, metric, metrics }) => {
      const same = Object.entries(metrics ?? {}).filter(([, one]) => one === null).length;
      return el(
        "p",
        { "data-step": step },
        named(a),
        " and ",
        named(b),
        step === null || step === undefined
          ? " agree in all steps that both have."
          : [
              " part at ",
              el("strong", {}, `step ${formatNumber(step)}`),
              `, in ${shorten(metric, 80)}`,
              same ? `; ${same} ${same === 1 ? "metric agrees" : "metrics agree"} throughout.` : ".",
            ],
      );
    });
    fill(
      content,
      el(
        "div",
        { class: "toolbar" },
        el("h1", {}, "What differs"),
        el("label", { class: "field search", style: { "margin-left": "auto" } }, icon("search"), find),
      ),
      visibleRuns().length > MOST_RUNS_COMPARED &&
        el("p", { class: "muted" }, `The first ${MOST_RUNS_COMPARED} runs.`),
      el(
        "section",
        { class: "panel", "data-panel": "Parting" },
        el("h2", {}, "Where they part"),
        el("div", { class: "parting" }, parting),
      ),
      tables,
    );
    drawTables();

    function drawTables() {
      const left = new Set(fields.filter(({ name }) => name.toLowerCase().includes(word.toLowerCase())));
      tables.replaceChildren();
      for (const [prefix, title] of PARTS) {
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
                own
                  .slice(0, 1000)
                  .map(({ name, values }) => [
                    el("th", { scope: "row", dir: "auto" }, shorten(name.slice(prefix.length), 120)),
                    ids.map((id) => cell(values[id], Object.values(values))),
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

  /** Returns a value; the greatest and the least of numbers are marked. */
  function cell(value, all) {
    if (value === undefined) return el("td", { class: "muted" }, "–");
    const numbers = all.filter((one) => typeof one === "number");
    const isMost =
      typeof value === "number" &&
      numbers.length === all.length &&
      numbers.length > 1 &&
      value === Math.max(...numbers) &&
      value !== Math.min(...numbers);
    const shown = Array.isArray(value) ? value.join(", ") : value;
    return el(
      "td",
      { class: isMost ? "differs" : "", dir: "auto", title: isMost ? "The greatest" : null },
      shorten(formatNumber(shown), 400),
    );
  }

  view.onState((changed) => {
    if (changed.has("run") || changed.has("off")) load();
  });
  view.onData((changed) => {
    if (changed.all && view.isFailed) load();
  });
  load();
  return () => view.leave();
}
