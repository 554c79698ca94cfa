/** The table of runs: columns, sort, groups, selection, tags and notes. Only the rows in view exist. */

import { colorOf } from "./colors.js";
import { editRun, isExported } from "./data.js";
import {
  attempt,
  button,
  checkbox,
  el,
  fieldFor,
  fill,
  formatAge,
  formatDuration,
  formatNumber,
  formatTime,
  icon,
  iconButton,
  inTurn,
  isNarrow,
  popover,
  shorten,
  tagsIn,
  toast,
} from "./dom.js";
import { FIXED, nextOfMetric, RunRows, shownOfMetric } from "./rows.js";
import { chosenRuns, linkTo, selectRuns, state, toggle, update } from "./state.js";
import { View } from "./view.js";
import { complain } from "./viewbar.js";

const OVERSCAN = 8;
const MOST_TITLE = 16;
/** A link can't hold more. */
const MOST_SELECTED = 1000;

/** The class of each status' mark. */
const STATUS_MARKS = { running: "running", killed: "dead", completed: "done", finished: "done" };

/** Returns the status of a run as a mark and a word. */
export function statusMark({ status }) {
  const kind = STATUS_MARKS[status] ?? (status.startsWith("fail") ? "failed" : "ended");
  const title = kind === "dead" ? "The run says that it's running, but its heartbeat has stopped." : null;
  return el("span", { class: `status ${kind}`, title }, el("i"), status);
}

const FAVOURITE = "favourite";
const ARROWS = { ascending: "↑", descending: "↓", none: "" };

/** Makes the star of a run, which adds or removes a tag, so that filters and the shell find favourites too. */
export function favouriteButton({ tags }, save, props = {}) {
  const isOn = tags.includes(FAVOURITE);
  const change = () =>
    save({ tags: isOn ? tags.filter((tag) => tag !== FAVOURITE) : [...tags, FAVOURITE], was: { tags } });
  return iconButton("star", isOn ? "Remove from favourites" : "Favourite", change, {
    class: "icon-button star",
    "aria-pressed": String(isOn),
    ...props,
  });
}

/** Returns the heading of a column. */
function titleOf(name) {
  return FIXED[name]?.title ?? (name === "name" ? "Name" : name.replace(/^(summary|min|max|hparams)\./, ""));
}

/** Returns the names of the columns that group the rows. */
function groupTitle() {
  return state.group.map(titleOf).join(" · ");
}

/** Returns the end of a long name, which is more telling than its beginning. */
function tailOf(title) {
  if (title.length <= MOST_TITLE) return title;
  const parts = title.split(/(?<=[./])/);
  let tail = parts.pop();
  while (parts.length && parts.at(-1).length + tail.length < MOST_TITLE) tail = parts.pop() + tail;
  return tail.length < MOST_TITLE ? `…${tail}` : `…${tail.slice(1 - MOST_TITLE)}`;
}

function rowHeight() {
  return matchMedia("(pointer: coarse)").matches ? 44 : 28;
}

/** Draws the mean ± standard deviation of a group, with the digits that all groups of the column have. */
function groupCell(name, found, { digits = -1, best = undefined } = {}) {
  const of = (value) =>
    digits < 0 || digits > 12 ? formatNumber(value) : value.toFixed(digits).replace("-", "−");
  const text = found ? of(found.mean) : "";
  const spread = found?.std ? ` ± ${of(found.std)}` : "";
  const title = found
    ? `${text}${spread}: mean and standard deviation of ${found.count} ${found.count === 1 ? "run" : "runs"}`
    : null;
  return el(
    "div",
    { role: "gridcell", class: "number", "data-column": name, title },
    el("span", { class: found && found.mean === best ? "best-value" : "" }, text),
    el("span.muted", spread),
  );
}

/** The table: a grid of the rows in view, with a cursor, a selection, and edits in place. */
class RunTable {
  /** @param {View} view */
  constructor(view) {
    this.cursor = -1;
    this.cursorRun = null;
    this.lastPicked = -1;
    this.isEditing = false;
    /** @type {Map<string, Map<number, string>>} The texts of metrics, by column and value. */
    this.texts = new Map();
    /** The best value of the goal. */
    this.best = undefined;
    this.actions = el("span.actions");
    this.head = el("div", { class: "grid-row grid-head", role: "row" });
    this.body = el("div", { class: "grid-body", role: "rowgroup" });
    this.grid = el(
      "div",
      { class: "grid", role: "grid", "aria-label": "Runs", "aria-multiselectable": "true", tabIndex: 0 },
      el("div", { role: "rowgroup", class: "grid-top" }, this.head),
      this.body,
    );
    this.rows = new RunRows(view, {
      arrived: (isHead) => this.arrived(isHead),
      complain,
      isHeld: () => this.isEditing,
    });
    this.grid.addEventListener("scroll", () => this.draw(), { passive: true });
    // Keys work before the table is clicked, too.
    view.onDocument("keydown", (event) => {
      const isElsewhere = event.target !== document.body && event.target.id !== "main";
      if (
        !event.ctrlKey &&
        !event.metaKey &&
        !event.altKey &&
        (this.grid.contains(event.target) || !isElsewhere)
      )
        this.keys(event);
    });
    const resized = new ResizeObserver(() => this.draw());
    resized.observe(this.grid);
    view.until(() => resized.disconnect());
  }

  /** Returns the parts of the view, from top to bottom. */
  elements() {
    const columns = popover([icon("columns"), "Columns"], { class: "button" }, () => this.chooseColumns());
    return [el("div.toolbar", columns, this.actions), this.grid];
  }

  /** Draws new rows. */
  arrived(isHead) {
    // The cursor stays on its run if new runs appear above it.
    const at = this.cursorRun ? this.rows.indexOf(this.cursorRun) : -1;
    if (at >= 0) this.cursor = at;
    if (isHead) this.drawHead();
    this.best = this.rows.bestOfGoal();
    this.texts = new Map(
      this.rows.columns.filter(shownOfMetric).map((name) => [name, this.rows.textsOf(name)]),
    );
    this.draw();
  }

  /** Returns the places of the rows in the document; none during an edit. */
  shown() {
    if (this.isEditing) return [];
    const found = [...this.body.querySelectorAll("[aria-rowindex]")].map((node) => node.ariaRowIndex - 1);
    return found.length ? found : [0];
  }

  refresh() {
    return this.rows.refresh(() => this.shown());
  }

  /** Returns the widths of all columns. */
  widths() {
    // The heading of a metric also says which value it shows.
    const width = (name) =>
      FIXED[name]?.width ??
      (isNarrow()
        ? "minmax(78px, auto)"
        : shownOfMetric(name)
          ? "minmax(132px, 150px)"
          : "minmax(100px, 120px)");
    const least = isNarrow() ? 110 : state.group.length ? 280 : 230;
    return [isNarrow() ? "28px" : "38px", `minmax(${least}px, 1.6fr)`, ...this.rows.columns.map(width)];
  }

  drawHead() {
    const widths = this.widths();
    const least = widths.reduce((sum, width) => sum + Number.parseInt(width.replace("minmax(", ""), 10), 0);
    this.grid.style.setProperty("--columns", widths.join(" "));
    this.grid.style.setProperty("--least", `${least}px`);
    const sorted = (name) =>
      state.sort === name ? "ascending" : state.sort === `-${name}` ? "descending" : "none";
    const heading = (name) => {
      const is = sorted(name);
      const by =
        name === "tags"
          ? null
          : () => update({ sort: is === "descending" ? name : is === "ascending" ? "" : `-${name}` });
      const isNumber = this.rows.kindOf(name) === "number";
      return el(
        "div",
        { role: "columnheader", class: isNumber ? "number" : "", "aria-sort": is, title: name },
        by
          ? button(
              [
                el("span", tailOf(titleOf(name))),
                el("i", { class: "sort", "aria-hidden": "true" }, ARROWS[is]),
              ],
              by,
              { class: "" },
            )
          : titleOf(name),
        this.shownButton(name),
      );
    };
    const all = el("input", {
      type: "checkbox",
      "aria-label": "Select all runs",
      title: "Select all runs that match",
      onclick: (event) => this.pickRange(0, this.rows.total, event.target.checked),
    });
    fill(
      this.head,
      el("div", { role: "columnheader", class: "pick" }, all),
      heading("name"),
      this.rows.columns.map(heading),
    );
    this.drawActions();
  }

  /** Makes the button in a metric's heading that says which value the column shows, and switches to the next. */
  shownButton(name) {
    const shown = shownOfMetric(name);
    if (!shown) return null;
    const next = nextOfMetric(name);
    const change = () =>
      update({
        column: this.rows.columns.map((one) => (one === name ? next : one)),
        sort: state.sort.replace(/^-/, "") === name ? state.sort.replace(name, () => next) : state.sort,
      });
    const title = `Shows the ${shown} value; click for the ${shownOfMetric(next)}`;
    return button(shown, change, { class: "shown", title, "aria-label": `${titleOf(name)}: ${title}` });
  }

  drawActions() {
    const chosen = chosenRuns();
    fill(
      this.actions,
      chosen.length > 0 && [
        el("strong", `${chosen.length} selected`),
        el("a", { class: "button primary", ...linkTo({ page: "charts" }) }, icon("chart"), "Charts"),
        chosen.length > 1 && el("a", { class: "button", ...linkTo({ page: "compare" }) }, "Compare"),
        el("a", { class: "button", ...linkTo({ page: "media" }) }, "Media"),
        button([icon("archive"), state.archived ? "Take out of the archive" : "Archive"], () =>
          this.archiveChosen(),
        ),
        button("Clear", () => update({ run: [], off: [] }), { class: "button quiet" }),
      ],
    );
  }

  /** Draws the rows in view. An unchanged row stays in the document, so that a click on it isn't lost. */
  draw() {
    if (this.isEditing) return;
    const height = rowHeight();
    const shown = this.rows.height;
    this.body.style.setProperty("height", `${Math.max(1, shown) * height}px`);
    this.body.style.setProperty("--row", `${height}px`);
    this.grid.setAttribute("aria-rowcount", String(this.rows.total));
    const from = Math.max(0, Math.floor(this.grid.scrollTop / height) - OVERSCAN);
    const to = Math.min(shown, Math.ceil((this.grid.scrollTop + this.grid.clientHeight) / height) + OVERSCAN);
    const have = new Map([...this.body.children].map((node) => [Number(node.dataset.at), node]));
    const put = (at, content, make) => {
      const signature = JSON.stringify([content, height]);
      if (have.get(at)?.signature === signature) return;
      const node = Object.assign(make(), { signature });
      if (have.has(at)) have.get(at).replaceWith(node);
      else this.body.append(node);
    };
    for (const [at, node] of have) if (at < from || at >= to) node.remove();
    for (const part of this.rows.layout) {
      if (part.heading) {
        const looks = [...this.rows.looks];
        const content = [part.heading, part.first, state.group, state.unfold, this.rows.columns, looks];
        if (part.top >= from && part.top < to) put(part.top, content, () => this.groupRow(part, height));
        continue;
      }
      for (let at = Math.max(from, part.top); at < Math.min(to, part.top + part.rows); at += 1) {
        const index = part.first + at - part.top;
        const row = this.rows.at(index);
        const look = row && [
          formatAge(row.created_at),
          state.run.includes(row.id) && colorOf(row.id),
          this.best,
          this.rows.columns.map((name) => this.texts.get(name)?.get(row.values[name])),
        ];
        put(at, [index, row ?? null, look, this.rows.columns, index === this.cursor], () =>
          this.drawRow(at, index, height),
        );
      }
    }
    if (shown) return;
    const text = state.where || state.q || state.without.length ? "No runs match." : "No runs here yet.";
    this.body.append(el("p", { class: "empty", "data-at": -1 }, text));
  }

  /** Draws the heading of a group: a box for all of its runs, their number, and the mean of each column. */
  groupRow(part, height) {
    const { label, total, values = {} } = part.heading;
    const isOpen = state.unfold.includes(label);
    const box = el("input", {
      type: "checkbox",
      "aria-label": `Select the ${total} runs of ${groupTitle()} ${shorten(label, 60)}`,
      title: "Select the runs of this group",
      tabIndex: -1,
      onclick: (event) => this.pickRange(part.first, total, event.target.checked),
    });
    return el(
      "div",
      {
        class: "grid-row group-row",
        role: "row",
        style: { transform: `translateY(${part.top * height}px)` },
        "data-at": part.top,
        "data-group": label,
      },
      el("div", { role: "gridcell", class: "pick" }, box),
      el(
        "div",
        { role: "gridcell", class: "name" },
        button(
          [
            icon("chevron"),
            el("span.muted", state.group.length > 1 ? "" : groupTitle().split(".").at(-1)),
            el("strong", shorten(label, 60)),
            el("span.muted", total === 1 ? "1 run" : `${total} runs`),
          ],
          () => toggle("unfold", label),
          { class: "", "aria-expanded": String(isOpen), title: shorten(`${groupTitle()} ${label}`, 300) },
        ),
      ),
      this.rows.columns.map((name) => groupCell(name, values[name], this.rows.looks.get(name))),
    );
  }

  drawRow(at, index, height) {
    const row = this.rows.at(index);
    const props = {
      class: "grid-row",
      role: "row",
      id: `row-${index}`,
      "data-at": at,
      "aria-rowindex": index + 1,
      style: { transform: `translateY(${at * height}px)` },
    };
    if (!row) return el("div", { ...props, class: "grid-row waiting" }, el("div"), el("div.blank"));
    const isChosen = state.run.includes(row.id);
    const color = colorOf(row.id);
    const box = el("input", {
      type: "checkbox",
      checked: isChosen,
      "aria-label": `Select ${shorten(row.name, 60)}`,
      tabIndex: -1,
      onclick: (event) => this.pick(index, row, event),
    });
    const node = el(
      "div",
      {
        ...props,
        class: `grid-row${isChosen ? " chosen" : ""}${index === this.cursor ? " cursor" : ""}`,
        "aria-selected": String(isChosen),
        "data-run": row.id,
      },
      el("div", { role: "gridcell", class: "pick", style: isChosen ? { "--run": color } : {} }, box),
      el(
        "div",
        { role: "gridcell", class: "name" },
        el(
          "a",
          {
            ...linkTo({ page: "run", id: row.id }),
            title: shorten(row.name, 300),
            dir: "auto",
            tabIndex: -1,
          },
          shorten(row.name, 200),
        ),
        !isExported && favouriteButton(row, (patch) => this.save(row, patch), { tabIndex: -1 }),
      ),
      this.rows.columns.map((name) => this.cell(name, row)),
    );
    return node;
  }

  cell(name, row) {
    const of = (props, ...content) =>
      el("div", { role: "gridcell", "data-column": name, ...props }, ...content);
    switch (name) {
      case "status":
        return of({}, statusMark(row));
      case "created_at":
        return of({ class: "muted", title: formatTime(row.created_at) }, formatAge(row.created_at));
      case "duration":
        return of({ class: "muted number-like" }, formatDuration(row.duration));
      case "tags":
        return of(
          {
            class: "tags editable",
            title: shorten(row.tags.join(", ") || "Edit tags", 500),
            ondblclick: (event) => this.editTags(event.currentTarget, row),
          },
          el(
            "span.fading",
            row.tags.slice(0, 12).map((tag) => el("span", { class: "tag", dir: "auto" }, shorten(tag, 40))),
          ),
          this.editButton("Edit tags", (node) => this.editTags(node, row)),
        );
      case "note":
        return of(
          {
            class: "note editable",
            title: shorten(row.note || "Edit the note", 500),
            ondblclick: (event) => this.editNote(event.currentTarget, row),
          },
          el("span", { dir: "auto" }, shorten(row.note || "", 160)),
          this.editButton("Edit the note", (node) => this.editNote(node, row)),
        );
      default: {
        const value = row.values[name];
        return of(
          {
            class: typeof value === "number" ? "number" : "",
            title: value === undefined ? null : shorten(String(value), 300),
          },
          name === state.goal && value === this.best && el("span.best-value"),
          shorten(this.texts.get(name)?.get(value) ?? this.textOf(value, this.rows.kindOf(name)), 80),
        );
      }
    }
  }

  textOf(value, kind) {
    if (value === undefined) return "";
    if (value === null) return "none";
    if (kind === "time") return formatTime(value);
    return kind === "duration" ? formatDuration(value) : formatNumber(value);
  }

  editButton(label, edit) {
    return iconButton("edit", label, (event) => edit(event.currentTarget.parentElement), {
      tabIndex: -1,
      class: "icon-button edit",
    });
  }

  editInPlace(node, label, value, keep, isLong = false) {
    if (this.isEditing) return;
    this.isEditing = true;
    const end = (text) => {
      this.isEditing = false;
      node.closest(".grid-row").signature = "";
      if (text !== null) keep(text);
      else this.draw();
      // New rows were held back during the edit.
      this.refresh();
      this.grid.focus();
    };
    const field = fieldFor(value, { label, isLong, end });
    fill(node, field);
    field.focus();
    field.select();
  }

  editTags(node, row) {
    this.editInPlace(node, "Tags, separated by commas", row.tags.join(", "), (text) =>
      this.save(row, { tags: tagsIn(text, row.tags), was: { tags: row.tags } }),
    );
  }

  editNote(node, row) {
    const keep = (text) => this.save(row, { note: text, was: { note: row.note || "" } });
    this.editInPlace(node, "Note", row.note || "", keep, true);
  }

  async save(row, patch) {
    await attempt(async () => Object.assign(row, await editRun(row.id, patch), { values: row.values }));
    this.draw();
  }

  async archiveChosen() {
    const ids = chosenRuns();
    await attempt(async () => {
      for (const id of ids) await editRun(id, { archived: !state.archived });
      toast(
        `${ids.length} ${ids.length === 1 ? "run" : "runs"} ${state.archived ? "taken out of the archive" : "archived"}`,
      );
    });
    update({ run: [], off: [] });
    await this.rows.reload();
  }

  pick(index, row, event) {
    const isOn = event.target.checked;
    const ids = [row.id];
    if (event.shiftKey && this.lastPicked >= 0) {
      const [low, high] = [Math.min(index, this.lastPicked), Math.max(index, this.lastPicked)];
      for (let at = low; at <= high; at += 1) ids.push(this.rows.at(at)?.id);
    }
    this.lastPicked = index;
    this.moveTo(index);
    selectRuns([...new Set(ids.filter(Boolean))], isOn);
  }

  moveTo(index) {
    this.cursor = index;
    this.cursorRun = this.rows.at(index)?.id ?? null;
  }

  /** Selects the runs of a part of the table or takes them out, up to `MOST_SELECTED`. */
  async pickRange(first, total, isOn) {
    await attempt(async () => {
      const rows = await this.rows.ask(first, Math.min(total, MOST_SELECTED));
      selectRuns(
        rows.map(({ id }) => id),
        isOn,
      );
      if (total > rows.length) toast(`Selected ${rows.length} of ${formatNumber(total)} runs.`);
    });
  }

  chooseColumns() {
    const find = el("input", { type: "search", placeholder: "Find a column", "aria-label": "Find a column" });
    const list = el("div.choices");
    const show = () => {
      const wanted = this.rows.choices.filter((name) =>
        name.toLowerCase().includes(find.value.toLowerCase()),
      );
      fill(
        list,
        wanted.slice(0, 300).map((name) => {
          const { columns } = this.rows;
          const turn = (isOn) =>
            update({ column: isOn ? [...columns, name] : columns.filter((one) => one !== name) });
          return checkbox(el("span", { dir: "auto" }, shorten(name, 80)), columns.includes(name), turn);
        }),
        wanted.length > 300 && el("p.muted", `${wanted.length - 300} more: search for them.`),
      );
    };
    find.addEventListener("input", show);
    show();
    return [find, list, button("Reset", () => update({ column: [] }), { class: "button quiet" })];
  }

  keys(event) {
    if (event.target.tagName === "INPUT" && event.target.type === "text") return;
    const step = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: 10, PageUp: -10 }[event.key];
    const row = this.cursor >= 0 ? this.rows.at(this.cursor) : undefined;
    if (step) {
      event.preventDefault();
      this.moveTo(Math.max(0, Math.min(this.rows.total - 1, this.cursor + step)));
      const height = rowHeight();
      const top = this.rows.placeOf(this.cursor) * height;
      if (top < this.grid.scrollTop) this.grid.scrollTop = top;
      if (top + 2 * height > this.grid.scrollTop + this.grid.clientHeight)
        this.grid.scrollTop = top + 2 * height - this.grid.clientHeight;
      this.draw();
      this.grid.setAttribute("aria-activedescendant", `row-${this.cursor}`);
    } else if (row && (event.key === " " || event.key === "x")) {
      event.preventDefault();
      selectRuns([row.id], !state.run.includes(row.id));
    } else if (row && event.key === "Enter" && !event.target.closest("a, button, input")) {
      update({ page: "run", id: row.id });
    } else if (row && event.key === "e") {
      event.preventDefault();
      const note = this.body.querySelector(`#row-${this.cursor} [data-column="note"]`);
      if (note) this.editNote(note, row);
    }
  }
}

/** Shows the table in an element until the returned function is called. */
export function showRuns(root) {
  const view = new View("runs");
  const table = new RunTable(view);
  fill(root, el("section.page.runs-page", table.elements()));
  view.onState((changed) => {
    if (
      ["q", "where", "without", "sort", "goal", "group", "archived", "column"].some((name) =>
        changed.has(name),
      )
    ) {
      table.rows.reload();
    } else if (changed.has("unfold")) {
      table.rows.lay();
      table.draw();
    } else if (changed.has("run")) {
      table.draw();
      table.drawActions();
    }
  });
  /** What has changed since the last request for rows. */
  let news = { order: false, runs: {} };
  const freshen = inTurn(() => {
    const changed = news;
    news = { order: false, runs: {} };
    return table.rows.freshen(() => table.shown(), changed);
  });
  view.onData(({ table: isOfTable, order, runs }) => {
    if (!isOfTable) return;
    news = { order: news.order || order, runs: { ...news.runs, ...runs } };
    freshen();
  });
  view.onTheme(() => table.draw());
  table.rows.reload();
  return () => view.leave();
}
