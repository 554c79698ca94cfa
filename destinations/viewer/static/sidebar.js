/** The list of selected runs beside charts and media: colour, status, visibility. */

import { colorOf, setHues } from "./colors.js";
import { inOrderOf, RunColumns } from "./columns.js";
import { rowsOf, runDetail, runInfo, selectedRows } from "./data.js";
import { el, fill, iconButton, inTurn, remember, remembered, shorten, svg } from "./dom.js";
import { drawLegend, huesOf } from "./legend.js";
import { differingSettings, runLabels } from "./names.js";
import { statusMark } from "./runs.js";
import { selectRuns, selectedRuns, state, linkTo, toggle, update, viewQuery, visibleRuns } from "./state.js";
import { View } from "./view.js";

/** Statuses that the list leaves out where it shows hyperparameters. */
const QUIET = ["completed", "finished"];

/** Draws a short piece of a run's line. */
export function swatch(id) {
  return pieceOf(colorOf(id));
}

/** Draws a piece of a line of a colour. */
export function pieceOf(color) {
  return svg(
    "svg",
    { class: "swatch", viewBox: "0 0 18 10", width: 18, height: 10, "aria-hidden": "true" },
    svg("path", {
      d: "M1 5h16",
      stroke: color,
      "stroke-width": 3,
      "stroke-linecap": "round",
    }),
  );
}

/** Returns what a function finds for the visible runs, for the ones that are visible when it has found it. */
async function ofVisible(ask) {
  for (;;) {
    const ids = visibleRuns();
    const found = await ask(ids);
    // Otherwise the caller would see old runs after new ones.
    if (String(ids) === String(visibleRuns())) return found;
  }
}

/** Returns the ids of the visible runs, the details of each or null, and an error text if all of them failed. */
export function visibleDetails() {
  return ofVisible(async (ids) => {
    const found = await Promise.allSettled(ids.map(runDetail));
    const details = found.map((one) => (one.status === "fulfilled" ? one.value : null));
    const reasons = found.map((one) => (one.status === "rejected" ? one.reason.message : ""));
    return [ids, details, details.some(Boolean) ? "" : (reasons[0] ?? "")];
  });
}

/** Returns the rows of the visible runs, as `selectedRows` does. */
export function visibleRows() {
  return ofVisible(selectedRows);
}

const WIDTH = "destinations-sidebar";
const LEAST_WIDTH = 180;

/**
 * Shows the selected runs beside the content of a view, until the returned function is called.
 *
 * @param {HTMLElement} root
 * @param {HTMLElement} legend gets the legend of the colours.
 * @param {...any} content
 */
export function showBesideRuns(root, legend, ...content) {
  const aside = el("aside", { class: "sidebar", "aria-label": "Selected runs" });
  const edge = edgeOf(aside);
  fill(root, el("div.split", aside, edge, el("section.page", content)));
  return showSidebar(aside, legend);
}

/** The field of the colours for all runs of a view, so that a value has one colour on every page. */
class ColourField {
  constructor(view) {
    this.columns = new RunColumns(view);
    this.asked = "";
  }

  /** Returns the columns, which have at least the given runs. */
  async with(ids) {
    const asked = JSON.stringify([state.sc, viewQuery()]);
    const isHeld = ids.every((id) => this.columns.rows.some((row) => row.id === id));
    if (state.sc && (asked !== this.asked || !isHeld)) {
      const [all, shown] = await Promise.all([inOrderOf(state.sc), rowsOf(ids, [state.sc])]);
      this.columns.rows = [...new Map([...all, ...shown].map((row) => [row.id, row])).values()];
      this.columns.setOrder(state.sc, all);
      this.asked = asked;
    }
    return this.columns;
  }
}

/** Makes the edge of the list, which moves by a drag or the arrow keys; the browser remembers the width. */
function edgeOf(aside) {
  const edge = el("div", {
    class: "edge",
    role: "separator",
    "aria-orientation": "vertical",
    "aria-label": "Width of the list of runs",
    "aria-valuemin": LEAST_WIDTH,
    tabIndex: 0,
    onpointerdown: (event) => edge.setPointerCapture(event.pointerId),
    onpointermove: (event) => edge.hasPointerCapture(event.pointerId) && widen(event.clientX),
    onkeydown: (event) => {
      const by = { ArrowLeft: -20, ArrowRight: 20 }[event.key];
      if (by) widen(aside.clientWidth + by);
    },
  });
  const widen = (wanted) => {
    const width = Math.round(Math.max(LEAST_WIDTH, Math.min(wanted, innerWidth / 2)));
    aside.style.setProperty("--sidebar", `${width}px`);
    edge.setAttribute("aria-valuenow", String(width));
    remember(WIDTH, String(width));
  };
  widen(Number(remembered(WIDTH)) || 252);
  return edge;
}

function showSidebar(root, legend) {
  const list = el("ul", { class: "legend", "aria-label": "Selected runs" });
  fill(
    root,
    el("h2", "Runs", el("a", { class: "button quiet", ...linkTo({ page: "runs", id: "" }) }, "Choose")),
    list,
  );
  const view = new View();
  const field = new ColourField(view);

  async function draw() {
    const shown = selectedRuns();
    const [rows, columns] = await Promise.all([
      selectedRows(shown).catch(() => []),
      field.with(shown).catch(() => new RunColumns(view)),
    ]);
    if (view.isGone) return;
    // The selection may have changed meanwhile.
    const ids = selectedRuns();
    const names = runLabels(ids.map(runInfo));
    const settings = differingSettings(rows.filter(Boolean));
    drawLegend(legend, columns);
    setHues(huesOf(columns));
    fill(
      list,
      ids.map((id, at) => {
        const info = runInfo(id);
        const isOff = state.off.includes(id);
        const name = shorten(info.name, 120);
        const setting = settings.get(id);
        const hide = () => toggle("off", id);
        const takeOut = () => {
          selectRuns([id], false);
          if (isOff) update({ off: state.off.filter((one) => one !== id) });
        };
        const keys = { x: hide, Delete: takeOut };
        return el(
          "li",
          {
            class: isOff ? "off" : "",
            "data-run": id,
            onkeydown: (event) => Object.hasOwn(keys, event.key) && keys[event.key](),
          },
          swatch(id),
          el(
            "div.who",
            el(
              "a",
              { ...linkTo({ page: "run", id }), title: shorten(info.name, 300), dir: "auto" },
              shorten(names[at], 120),
            ),
            setting
              ? el(
                  "span",
                  { class: "setting", title: shorten(setting, 500), dir: "auto" },
                  shorten(setting, 200),
                )
              : null,
            QUIET.includes(info.status) && setting ? null : statusMark(info),
          ),
          el(
            "span.tools",
            iconButton(
              isOff ? "eyeOff" : "eye",
              `${isOff ? "Show" : "Hide"} ${shorten(name, 40)} (x)`,
              hide,
              {
                "aria-pressed": String(isOff),
                tabIndex: -1,
              },
            ),
            iconButton("close", `Take ${shorten(name, 40)} out (Delete)`, takeOut, { tabIndex: -1 }),
          ),
        );
      }),
      !ids.length && el("li.muted", "None."),
    );
  }

  view.onState((changed) => {
    if (["run", "off", "sc", "hues"].some((name) => changed.has(name))) draw();
  });
  const refresh = inTurn(draw);
  view.onData((changed) => {
    if (changed.table || Object.values(changed.runs).some(({ record }) => record)) refresh();
  });
  view.onTheme(draw);
  draw();
  return () => view.leave();
}
