/** The bar of the view that all pages share: saved views, search, filter, statuses, groups, colours and the goal. */

import { setBest } from "./colors.js";
import {
  dataChanges,
  isExported,
  listFields,
  listGroups,
  listRuns,
  readViews,
  rowsOf,
  saveView,
} from "./data.js";
import {
  button,
  checkbox,
  setMenu,
  debounce,
  el,
  fill,
  formatNumber,
  icon,
  iconButton,
  menu,
  popover,
  shorten,
  toast,
} from "./dom.js";
import { FilterField } from "./filter.js";
import { isColumn } from "./rows.js";
import {
  fieldsOfView,
  isSteady,
  onChange,
  selectedRuns,
  setViewed,
  state,
  toggle,
  update,
  VIEW,
  viewQuery,
} from "./state.js";

/** How many runs a page draws if none is chosen: one for each colour, or as many as bands average over. */
const MOST_VIEWED = 10;
const MOST_BANDED = 200;
const MOST_FIELDS = 100;
const OWN = ["q", "where", "without", "archived", "sort", "goal", "group", "sc"];

function bare(name) {
  return shorten(name.replace(/^(hparams|summary)\./, ""), 60);
}

/** Returns how many runs the page draws if none is chosen. */
function mostViewed() {
  return state.page === "charts" && state.band ? MOST_BANDED : MOST_VIEWED;
}

/** Returns the button that unfolds a toolbar on a phone. */
export function unfoldButton() {
  const button = iconButton("chevron", "More controls", () => {
    const isOpen = button.parentElement?.classList.toggle("open") ?? false;
    button.setAttribute("aria-expanded", String(isOpen));
  });
  button.classList.add("unfold");
  return button;
}

/** The bar itself; it stays while pages change. */
class ViewBar {
  constructor(root) {
    this.fields = [];
    this.asked = 0;
    this.most = 0;
    /** @type {Record<string, Error | null>} */
    this.problems = { view: null, page: null };
    this.search = el("input", {
      type: "search",
      id: "find-runs",
      placeholder: "Search runs",
      "aria-label": "Search runs",
      oninput: debounce(() => update({ q: this.search.value }), 150),
      // "change" fires when the field loses focus, so that nobody waits for the pause.
      onchange: () => update({ q: this.search.value }),
    });
    this.filter = new FilterField(() => this.fields);
    this.name = el("span");
    this.chips = el("span", { class: "chips", role: "group", "aria-label": "Statuses" });
    this.groupName = el("span");
    this.hue = menu("color", "Colour", (sc) => update({ sc }));
    this.goal = menu("goal", "Goal", (goal) => update({ goal }));
    this.count = el("span", { class: "muted count", "aria-live": "polite" });
    this.archived = checkbox("Archived", false, (isOn) => update({ archived: isOn ? "1" : "" }), {
      id: "archived",
    });
    fill(
      root,
      el(
        "div",
        { class: "toolbar view-bar", role: "group", "aria-label": "View of runs" },
        !isExported &&
          popover([this.name, icon("chevron")], { class: "button", id: "views" }, (close) =>
            this.chooseView(close),
          ),
        el("label.field.search", icon("search"), this.search),
        this.filter.element,
        this.filter.help,
        this.chips,
        popover([this.groupName, icon("chevron")], { class: "button", id: "group" }, () =>
          this.chooseGroups(),
        ),
        el("label.pair", "Colour", this.hue),
        el("label.pair", "Goal", this.goal),
        this.archived,
        this.count,
        unfoldButton(),
      ),
    );
    onChange((changed) => {
      if (["page", "column", "run", "off", ...OWN].some((name) => changed.has(name))) this.draw();
      if (mostViewed() !== this.most || OWN.some((name) => changed.has(name))) this.load();
      else if (changed.has("run")) this.rank();
    });
    dataChanges((changed) => {
      if (changed.table && (changed.order || !isSteady())) this.load();
    });
    this.draw();
    this.load();
  }

  /** Requests the number of runs of each status, and the runs that the view shows if none is chosen. */
  async load() {
    this.asked += 1;
    const mine = this.asked;
    this.most = mostViewed();
    try {
      const { fields } = await listFields();
      const query = viewQuery();
      // A link may name a column that these runs don't have.
      if (!isColumn(query.sort.replace(/^-/, ""), fields)) query.sort = "";
      const [groups, { total, rows }] = await Promise.all([
        listGroups({ ...query, without: [], group: ["status"] }),
        listRuns({ ...query, columns: [], limit: this.most }),
      ]);
      if (mine !== this.asked) return;
      this.fields = fields;
      this.complain("view", null);
      this.drawChips(groups);
      fill(this.count, total === 1 ? "1 run" : `${formatNumber(total)} runs`);
      this.draw();
      setViewed(rows.map(({ id }) => id));
      await this.rank();
    } catch (error) {
      if (mine !== this.asked) return;
      this.complain("view", error);
      setViewed([]);
    }
  }

  /** Orders the shown runs by the goal, which gives the best ones the first colours. */
  async rank() {
    const { goal } = state;
    const ids = selectedRuns();
    const rows = goal ? await rowsOf(ids, [goal]).catch(() => []) : [];
    if (goal !== state.goal || String(ids) !== String(selectedRuns())) return;
    const sign = goal.startsWith("max.") ? -1 : 1;
    const lossOf = ({ values }) => (Number.isFinite(values[goal]) ? sign * values[goal] : Infinity);
    const order = rows.toSorted((one, other) => lossOf(one) - lossOf(other) || 0);
    setBest(
      goal,
      order.map(({ id }) => id),
    );
  }

  /** Shows an error of the view or of a page's request; null clears it. */
  complain(part, error) {
    this.problems[part] = error;
    this.filter.complain(this.problems.view ?? this.problems.page);
  }

  /** Draws the current view. */
  draw() {
    fill(this.name, shorten(state.view || "All runs", 40));
    if (document.activeElement !== this.search) this.search.value = state.q;
    this.search.id = state.page === "runs" ? "search" : "find-runs";
    this.filter.show();
    this.archived.firstChild.checked = state.archived === "1";
    const groups = state.group.map(bare);
    fill(this.groupName, groups.length ? shorten(`Group ${groups.join(" × ")}`, 32) : "Group");
    const named = (kinds) => this.fields.filter(({ name }) => kinds.test(name)).map(({ name }) => name);
    const hues = [
      ...new Set([state.sc, ...named(/^hparams\./).slice(0, MOST_FIELDS), "status", "created_at"]),
    ];
    const metrics = named(/^summary\./).slice(0, MOST_FIELDS);
    const fields = [...hues, ...metrics.filter((name) => name !== state.sc)].filter(Boolean);
    setMenu(this.hue, [["", "each run"], ...fields.map((name) => [name, bare(name)])], state.sc);
    const goals = metrics.flatMap((name) =>
      ["min", "max"].map((kind) => [
        name.replace(/^summary/, kind),
        `${bare(name)} ${kind === "min" ? "↓" : "↑"}`,
      ]),
    );
    if (state.goal && !goals.some(([name]) => name === state.goal)) goals.push([state.goal, state.goal]);
    setMenu(this.goal, [["", "none"], ...goals], state.goal);
  }

  /** Draws a chip for each status, which leaves out its runs and brings them back. */
  drawChips(groups) {
    const there = new Map(groups.map(({ label, total }) => [label, total]));
    for (const label of state.without) if (!there.has(label)) there.set(label, 0);
    fill(
      this.chips,
      (there.size > 1 || state.without.length > 0) &&
        [...there].map(([label, total]) => {
          const isOut = state.without.includes(label);
          return button(`${shorten(label, 30)} ${total}`, () => toggle("without", label), {
            class: "chip",
            "aria-pressed": String(!isOut),
            title: isOut ? `Show runs that are ${label}` : `Leave out runs that are ${label}`,
          });
        }),
    );
  }

  chooseGroups() {
    const names = [
      "status",
      ...this.fields.map(({ name }) => name).filter((name) => name.startsWith("hparams.")),
    ];
    return el(
      "div.choices",
      names.slice(0, MOST_FIELDS).map((name) => {
        const turn = () => {
          toggle("group", name);
          update({ unfold: [] });
        };
        return checkbox(shorten(name, 80), state.group.includes(name), turn);
      }),
      button("No groups", () => update({ group: [], unfold: [] }), { class: "choice" }),
    );
  }

  /** Returns the list of saved views, which fills a moment later, and a field for the name of a new one. */
  chooseView(close) {
    const list = el("div.choices");
    const keep = async (name, view) => {
      try {
        draw(await saveView(name, view));
        update({ view: view ? name : "" });
        if (view) close();
      } catch (error) {
        toast(error.message, "error");
      }
    };
    const take = (name, view) => {
      update({ ...fieldsOfView(view), view: name, unfold: [] });
      close();
    };
    const draw = (views) =>
      fill(
        list,
        button("All runs", () => take("", {}), { class: "choice" }),
        Object.entries(views).map(([name, view]) =>
          el(
            "div.saved-view",
            button(shorten(name, 60), () => take(name, view), {
              class: `choice${state.view === name ? " on" : ""}`,
            }),
            iconButton("close", `Remove ${shorten(name, 40)}`, () => keep(name, null)),
          ),
        ),
      );
    const field = el("input", {
      type: "text",
      maxLength: 100,
      value: state.view,
      placeholder: "Name of this view",
      "aria-label": "Name of this view",
      onkeydown: (event) => event.key === "Enter" && save(),
    });
    const save = () => field.value.trim() && keep(field.value.trim(), viewNow());
    readViews().then(draw, (error) => fill(list, error.message));
    // Above the list, which grows when it arrives: a button must not move under a click.
    return [field, button("Save view", save), list];
  }
}

/** Returns the fields of the view that differ from the defaults. */
function viewNow() {
  const parts = VIEW.map((name) => [name, state[name]]).filter(([, value]) => value.length);
  return Object.fromEntries(
    parts.map(([name, value]) => [name, Array.isArray(value) ? value.filter(Boolean) : value]),
  );
}

/** @type {ViewBar | undefined} */
let bar;

/** Shows the bar in an element. */
export function showViewBar(root) {
  bar = new ViewBar(root);
}

/** Draws the bar again after the address changed. */
export function showViewNow() {
  bar?.draw();
  bar?.load();
}

/** Returns the element for errors of the view, which each page has at its top. */
export function problemOfView() {
  return bar?.filter.problem ?? "";
}

/** Shows an error of a page's request; null clears it. */
export function complain(error) {
  bar?.complain("page", error);
}
