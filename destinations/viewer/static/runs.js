/** The table of runs: search, filter, columns, sort, groups, selection, tags and notes. Only rows in view exist. */

import { dataChanges, editRun, listFields, listGroups, listRuns } from "./data.js";
import {
  debounce,
  el,
  fill,
  formatAge,
  formatDuration,
  formatNumber,
  formatTime,
  icon,
  iconButton,
  inTurn,
  isDark,
  popover,
  shorten,
  tagsIn,
  toast,
} from "./dom.js";
import { FilterField } from "./filter.js";
import { linkTo, onChange, selectRuns, selectedRuns, state, styleOf, toggle, update } from "./state.js";

const BLOCK = 100;
const OVERSCAN = 8;
const MAX_AUTOMATIC = 4;
const MAX_CANDIDATES = 100;
const MOST_TITLE = 16;
const FIXED = {
  status: { title: "Status", width: "118px" },
  created_at: { title: "Started", width: "116px" },
  duration: { title: "Duration", width: "104px" },
  tags: { title: "Tags", width: "minmax(150px, 0.9fr)" },
  note: { title: "Note", width: "minmax(140px, 1fr)" },
};

/** Returns the words for how a run stands, and the class of its mark. */
function statusOf(row) {
  if (row.status === "killed" || (row.status === "running" && !row.alive)) return ["killed", "dead"];
  if (row.status === "running") return ["running", "running"];
  if (row.status === "completed" || row.status === "finished") return [row.status, "done"];
  if (row.status === "unknown") return [row.alive ? "running" : "unknown", row.alive ? "running" : "ended"];
  return [row.status, row.status.startsWith("fail") ? "failed" : "ended"];
}

/** Returns a mark and a word for how a run stands. */
export function statusMark(row) {
  const [word, kind] = statusOf(row);
  const title = kind === "dead" ? "It says that it is running, but its heartbeat has stopped." : null;
  return el("span", { class: `status ${kind}`, title }, el("i", {}), word);
}

/** Returns the heading of a column. */
function titleOf(name) {
  return FIXED[name]?.title ?? (name === "name" ? "Name" : name.replace(/^(summary|hparams)\./, ""));
}

/** Returns the end of a long name, which says more than its beginning. */
function tailOf(title) {
  if (title.length <= MOST_TITLE) return title;
  const parts = title.split(/(?<=[./])/);
  let tail = parts.pop();
  while (parts.length && parts.at(-1).length + tail.length < MOST_TITLE) tail = parts.pop() + tail;
  return tail.length < MOST_TITLE ? `…${tail}` : `…${tail.slice(1 - MOST_TITLE)}`;
}

/** Shows the table in an element until the returned function is called. */
export function showRuns(root) {
  let fields = [];
  let columns = [];
  let total = 0;
  /** @type {{value: any, total: number}[] | null} */
  let groups = null;
  let blocks = new Map();
  let generation = 0;
  /** @type {Promise<void> | null} */
  let loaded = null;
  let isFailed = false;
  let cursor = -1;
  let cursorRun = null;
  let lastPicked = -1;
  let isEditing = false;
  let layout = [];

  const search = el("input", {
    type: "search",
    placeholder: "Search names, tags and notes",
    "aria-label": "Search runs",
    id: "search",
    value: state.q,
  });
  const filter = new FilterField(() => fields);
  const count = el("span", { class: "muted count", "aria-live": "polite" });
  const actions = el("span", { class: "actions" });
  const head = el("div", { class: "grid-row grid-head", role: "row" });
  const body = el("div", { class: "grid-body", role: "rowgroup" });
  const grid = el(
    "div",
    { class: "grid", role: "grid", "aria-label": "Runs", "aria-multiselectable": "true", tabIndex: 0 },
    el("div", { role: "rowgroup", class: "grid-top" }, head),
    body,
  );
  const tools = el(
    "div",
    { class: "toolbar" },
    el("label", { class: "field search" }, icon("search"), search),
    filter.element,
    popover([icon("columns"), "Columns"], { class: "button" }, chooseColumns),
    popover([icon("chevron"), "Group"], { class: "button" }, chooseGroup),
    el(
      "label",
      { class: "check" },
      el("input", {
        type: "checkbox",
        id: "archived",
        checked: state.archived === "1",
        onchange: (event) => update({ archived: event.target.checked ? "1" : "" }),
      }),
      "Archived",
    ),
    count,
  );
  fill(root, el("section", { class: "page runs-page" }, tools, filter.problem, actions, grid));

  const rowHeight = () => (matchMedia("(pointer: coarse)").matches ? 46 : 36);

  // "change" comes when the field is left: what was typed last is then not waited for.
  search.addEventListener(
    "input",
    debounce(() => update({ q: search.value }), 150),
  );
  search.addEventListener("change", () => update({ q: search.value }));
  grid.addEventListener("scroll", () => draw(), { passive: true });
  grid.addEventListener("keydown", keys);
  const resized = new ResizeObserver(() => draw());
  resized.observe(grid);

  // --- data ---------------------------------------------------------------------------------------------------

  // Any number of these may be under way: an answer counts only if nothing was asked for since.

  /** Asks for everything; what is shown stays until it arrives. */
  function reload() {
    loaded = load();
    return loaded;
  }

  async function load() {
    generation += 1;
    const mine = generation;
    isFailed = false;
    try {
      const known = fields.length ? fields : (await listFields()).fields;
      if (mine !== generation) return;
      fields = known;
      const given = state.column.filter(isKnown);
      const names = given.length ? given : await automaticColumns();
      if (mine !== generation) return;
      const [found, first] = await Promise.all([askGroups(), askBlock(0, names)]);
      if (mine !== generation) return;
      columns = names;
      filter.complain(missing());
      drawHead();
      show(found, new Map([[0, first]]));
    } catch (error) {
      if (mine !== generation) return;
      isFailed = true;
      filter.complain(error);
    }
  }

  /** Asks again for the rows in view. */
  async function refresh() {
    /** @type {Promise<void> | null} */
    let awaited = null;
    while (awaited !== loaded) {
      awaited = loaded;
      await awaited;
    }
    if (isEditing) return;
    generation += 1;
    const mine = generation;
    const inView = [...body.querySelectorAll("[aria-rowindex]")].map((node) => node.ariaRowIndex - 1);
    const wanted = [...new Set((inView.length ? inView : [0]).map((index) => Math.floor(index / BLOCK)))];
    try {
      const [found, ...answers] = await Promise.all([
        askGroups(),
        ...wanted.map((number) => askBlock(number, columns)),
      ]);
      if (mine !== generation || isEditing) return;
      show(found, new Map(wanted.map((number, at) => [number, answers[at]])));
    } catch {
      // The rows that are shown stay.
    }
  }

  function show(found, answers) {
    groups = found;
    total = [...answers.values()][0].total;
    blocks = new Map([...answers].map(([number, { rows }]) => [number, rows]));
    // The cursor stays on its run where others have come before it.
    for (const [number, rows] of blocks) {
      const at = cursorRun ? rows.findIndex(({ id }) => id === cursorRun) : -1;
      if (at >= 0) cursor = number * BLOCK + at;
    }
    const text = total === 1 ? "1 run" : `${formatNumber(total)} runs`;
    if (count.textContent !== text) fill(count, text);
    lay();
    draw();
  }

  function isKnown(name) {
    return name in FIXED || fields.some((field) => field.name === name);
  }

  /** Returns what is wrong where a link names columns that these runs do not have: they are left out; null if none. */
  function missing() {
    const asked = [...state.column, state.sort.replace(/^-/, ""), state.group].filter(Boolean);
    const left = [...new Set(asked.filter((name) => !isKnown(name)))].map((name) => shorten(name, 60));
    return left.length
      ? new Error(
          `These runs have no ${left.join(", ")}: the table is shown without ${left.length > 1 ? "them" : "it"}.`,
        )
      : null;
  }

  function question() {
    const group = isKnown(state.group) ? state.group : "";
    const sort = isKnown(state.sort.replace(/^-/, "")) ? state.sort : "";
    return { q: state.q, where: state.where, sort: group || sort, group, archived: state.archived };
  }

  function askGroups() {
    return question().group ? listGroups(question()) : null;
  }

  function askBlock(number, names) {
    return listRuns({ ...question(), columns: names, offset: number * BLOCK, limit: BLOCK });
  }

  /** Returns a row, or undefined until its block has arrived. */
  function rowAt(index) {
    const number = Math.floor(index / BLOCK);
    if (!blocks.has(number)) fetchBlock(number);
    return blocks.get(number)[index % BLOCK];
  }

  async function fetchBlock(number) {
    const asked = blocks;
    asked.set(number, []);
    try {
      asked.set(number, (await askBlock(number, columns)).rows);
    } catch {
      asked.delete(number);
      return;
    }
    if (asked === blocks) draw();
  }

  /** Returns the usual columns: the metrics that say most, and the hyperparameters in which the first runs differ. */
  async function automaticColumns() {
    const weight = (name) =>
      [/(val|test|eval).*(acc|loss)/i, /acc|loss|reward|score|f1|bleu/i].findIndex((kind) =>
        kind.test(name),
      ) >>> 0;
    const metrics = fields
      .filter(({ name, kind }) => name.startsWith("summary.") && kind === "number")
      .map(({ name }) => name);
    const candidates = fields
      .map(({ name }) => name)
      .filter((name) => name.startsWith("hparams."))
      .slice(0, MAX_CANDIDATES);
    const { rows } = await listRuns({ columns: candidates, limit: BLOCK });
    const varied = candidates.filter(
      (name) => new Set(rows.map((row) => row.values[name]).filter((value) => value !== undefined)).size > 1,
    );
    return [
      "status",
      "created_at",
      "duration",
      "tags",
      ...metrics.sort((one, other) => weight(one) - weight(other)).slice(0, MAX_AUTOMATIC),
      ...varied.slice(0, MAX_AUTOMATIC),
      "note",
    ];
  }

  /** Places of headings and rows: one run of rows without groups, one for each open group with them. */
  function lay() {
    layout = [];
    if (!groups) {
      layout.push({ top: 0, rows: total, first: 0 });
      return;
    }
    let top = 0,
      first = 0;
    for (const group of groups) {
      const isFolded = state.fold.includes(String(group.value));
      layout.push({ top, heading: group, rows: 0, first });
      top += 1;
      if (!isFolded) layout.push({ top, rows: group.total, first });
      if (!isFolded) top += group.total;
      first += group.total;
    }
  }

  // --- drawing ------------------------------------------------------------------------------------------------

  function template() {
    const width = (name) => FIXED[name]?.width ?? "minmax(118px, 140px)";
    return `42px minmax(170px, 1.3fr) ${columns.map(width).join(" ")} 40px`;
  }

  function drawHead() {
    grid.style.setProperty("--columns", template());
    grid.style.setProperty("--least", `${260 + columns.length * 112}px`);
    const sorted = (name) =>
      state.sort === name ? "ascending" : state.sort === `-${name}` ? "descending" : "none";
    const heading = (name) => {
      const is = sorted(name);
      const by =
        name === "duration"
          ? null
          : () => update({ sort: is === "descending" ? name : is === "ascending" ? "" : `-${name}` });
      const isNumber = fields.find((field) => field.name === name)?.kind === "number" && !FIXED[name];
      return el(
        "div",
        { role: "columnheader", class: isNumber ? "number" : "", "aria-sort": is, title: name },
        by
          ? el(
              "button",
              { type: "button", onclick: by },
              tailOf(titleOf(name)),
              el(
                "i",
                { class: "sort", "aria-hidden": "true" },
                is === "ascending" ? "↑" : is === "descending" ? "↓" : "",
              ),
            )
          : titleOf(name),
      );
    };
    const all = el("input", {
      type: "checkbox",
      "aria-label": `Select the first ${BLOCK} runs`,
      title: `Select the first ${BLOCK} runs`,
      onclick: (event) => pickAll(event.target.checked),
    });
    fill(
      head,
      el("div", { role: "columnheader", class: "pick" }, all),
      heading("name"),
      columns.map(heading),
      el("div", { role: "columnheader", "aria-label": "Actions" }),
    );
    drawActions();
  }

  function drawActions() {
    const chosen = selectedRuns();
    fill(
      actions,
      chosen.length > 0 && [
        el("strong", {}, `${chosen.length} selected`),
        el("a", { class: "button primary", ...linkTo({ page: "charts" }) }, icon("chart"), "Charts"),
        chosen.length > 1 && el("a", { class: "button", ...linkTo({ page: "compare" }) }, "Compare"),
        el("a", { class: "button", ...linkTo({ page: "media" }) }, "Media"),
        el(
          "button",
          { type: "button", class: "button", onclick: archiveChosen },
          icon("archive"),
          state.archived ? "Take out of the archive" : "Archive",
        ),
        el(
          "button",
          { type: "button", class: "button quiet", onclick: () => update({ run: [], off: [] }) },
          "Clear",
        ),
      ],
    );
  }

  /** Draws the rows in view. A row that is as it was stays in the document, so that a click on it is not lost. */
  function draw() {
    if (isEditing) return;
    const height = rowHeight();
    const shown = layout.reduce((sum, part) => sum + (part.heading ? 1 : part.rows), 0);
    body.style.setProperty("height", `${Math.max(1, shown) * height}px`);
    body.style.setProperty("--row", `${height}px`);
    grid.setAttribute("aria-rowcount", String(total));
    const from = Math.max(0, Math.floor(grid.scrollTop / height) - OVERSCAN);
    const to = Math.min(shown, Math.ceil((grid.scrollTop + grid.clientHeight) / height) + OVERSCAN);
    const have = new Map([...body.children].map((node) => [Number(node.dataset.at), node]));
    const put = (at, content, make) => {
      const signature = JSON.stringify([content, height]);
      if (have.get(at)?.signature === signature) return;
      const node = Object.assign(make(), { signature });
      if (have.has(at)) have.get(at).replaceWith(node);
      else body.append(node);
    };
    for (const [at, node] of have) if (at < from || at >= to) node.remove();
    for (const part of layout) {
      if (part.heading) {
        const content = [part.heading, state.group, state.fold];
        if (part.top >= from && part.top < to) put(part.top, content, () => groupRow(part, height));
        continue;
      }
      for (let at = Math.max(from, part.top); at < Math.min(to, part.top + part.rows); at += 1) {
        const index = part.first + at - part.top;
        const row = rowAt(index);
        const look = row && [
          formatAge(row.created_at),
          state.run.includes(row.id) && styleOf(row.id, isDark()),
        ];
        put(at, [index, row ?? null, look, columns, index === cursor], () => drawRow(at, index, height));
      }
    }
    if (shown) return;
    const text = state.where || state.q ? "No run matches." : "There are no runs here yet.";
    body.append(el("p", { class: "empty", "data-at": -1 }, text));
  }

  function groupRow(part, height) {
    const { value, total: size } = part.heading;
    const key = String(value);
    const isFolded = state.fold.includes(key);
    return el(
      "div",
      {
        class: "grid-row group-row",
        role: "row",
        style: { transform: `translateY(${part.top * height}px)` },
        "data-at": part.top,
      },
      el(
        "button",
        {
          type: "button",
          role: "gridcell",
          "aria-expanded": String(!isFolded),
          onclick: () => toggle("fold", key),
        },
        icon("chevron"),
        el("span", { class: "muted" }, titleOf(state.group)),
        el("strong", {}, shorten(formatNumber(value), 60)),
        el("span", { class: "muted" }, String(size)),
      ),
    );
  }

  function drawRow(at, index, height) {
    const row = rowAt(index);
    const props = {
      class: "grid-row",
      role: "row",
      id: `row-${index}`,
      "data-at": at,
      "aria-rowindex": index + 1,
      style: { transform: `translateY(${at * height}px)` },
    };
    if (!row)
      return el("div", { ...props, class: "grid-row waiting" }, el("div", {}), el("div", { class: "blank" }));
    const isChosen = state.run.includes(row.id);
    const style = styleOf(row.id, isDark());
    const box = el("input", {
      type: "checkbox",
      checked: isChosen,
      "aria-label": `Select ${shorten(row.name, 60)}`,
      tabIndex: -1,
      onclick: (event) => pick(index, row, event),
    });
    const node = el(
      "div",
      {
        ...props,
        class: `grid-row${isChosen ? " chosen" : ""}${index === cursor ? " cursor" : ""}`,
        "aria-selected": String(isChosen),
        "data-run": row.id,
      },
      el("div", { role: "gridcell", class: "pick", style: isChosen ? { "--run": style.color } : {} }, box),
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
      ),
      columns.map((name) => cell(name, row)),
      el(
        "div",
        { role: "gridcell", class: "row-tools" },
        iconButton(
          "archive",
          row.archived ? "Take out of the archive" : "Archive",
          () => save(row, { archived: !row.archived }),
          { tabIndex: -1 },
        ),
      ),
    );
    return node;
  }

  function cell(name, row) {
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
            title: "Edit tags",
            ondblclick: (event) => editTags(event.currentTarget, row),
          },
          row.tags.slice(0, 12).map((tag) => el("span", { class: "tag", dir: "auto" }, shorten(tag, 40))),
          editButton("Edit tags", (node) => editTags(node, row)),
        );
      case "note":
        return of(
          {
            class: "note editable",
            title: shorten(row.note || "Edit the note", 500),
            ondblclick: (event) => editNote(event.currentTarget, row),
          },
          el("span", { dir: "auto" }, shorten(row.note || "", 160)),
          editButton("Edit the note", (node) => editNote(node, row)),
        );
      default: {
        const value = row.values[name];
        const isNumber = typeof value === "number";
        return of(
          {
            class: isNumber ? "number" : "",
            title: value === undefined ? null : shorten(String(value), 300),
          },
          value === undefined || value === null ? "" : shorten(formatNumber(value), 80),
        );
      }
    }
  }

  function editButton(label, edit) {
    return iconButton("edit", label, (event) => edit(event.currentTarget.parentElement), {
      tabIndex: -1,
      class: "icon-button edit",
    });
  }

  // --- edits --------------------------------------------------------------------------------------------------

  function editInPlace(node, label, value, finish) {
    if (isEditing) return;
    isEditing = true;
    const input = el("input", { type: "text", class: "in-place", value, "aria-label": label, dir: "auto" });
    let isDone = false;
    const end = (isKept) => {
      if (isDone) return;
      isDone = true;
      isEditing = false;
      node.closest(".grid-row").signature = "";
      if (isKept && input.value !== value) finish(input.value);
      else draw();
      // What came meanwhile was not shown.
      refresh();
      grid.focus();
    };
    input.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") end(false);
    });
    input.addEventListener("blur", () => end(true));
    fill(node, input);
    input.focus();
    input.select();
  }

  function editTags(node, row) {
    editInPlace(node, "Tags, separated by commas", row.tags.join(", "), (text) =>
      save(row, { tags: tagsIn(text) }),
    );
  }

  function editNote(node, row) {
    editInPlace(node, "Note", row.note || "", (text) => save(row, { note: text }));
  }

  async function save(row, patch) {
    try {
      await editRun(row.id, patch);
      Object.assign(row, patch);
      if ("archived" in patch) {
        toast(
          patch.archived
            ? `Archived ${shorten(row.name, 40)}`
            : `${shorten(row.name, 40)} is out of the archive`,
        );
        await reload();
      }
    } catch (error) {
      toast(error.message, "error");
    }
    draw();
  }

  async function archiveChosen() {
    const ids = selectedRuns();
    try {
      for (const id of ids) await editRun(id, { archived: !state.archived });
      toast(
        `${ids.length} ${ids.length === 1 ? "run" : "runs"} ${state.archived ? "taken out of the archive" : "archived"}`,
      );
    } catch (error) {
      toast(error.message, "error");
    }
    update({ run: [], off: [] });
    await reload();
  }

  function pick(index, row, event) {
    const isOn = event.target.checked;
    const ids = [row.id];
    if (event.shiftKey && lastPicked >= 0) {
      const [low, high] = [Math.min(index, lastPicked), Math.max(index, lastPicked)];
      for (let at = low; at <= high; at += 1) ids.push(rowAt(at)?.id);
    }
    lastPicked = index;
    moveTo(index);
    selectRuns([...new Set(ids.filter(Boolean))], isOn);
  }

  function moveTo(index) {
    cursor = index;
    cursorRun = rowAt(index)?.id ?? null;
  }

  function pickAll(isOn) {
    const rows = Array.from({ length: Math.min(total, BLOCK) }, (_, index) => rowAt(index)).filter(Boolean);
    selectRuns(
      rows.map(({ id }) => id),
      isOn,
    );
  }

  // --- choices ------------------------------------------------------------------------------------------------

  function chooseColumns() {
    const find = el("input", { type: "search", placeholder: "Find a column", "aria-label": "Find a column" });
    const list = el("div", { class: "choices" });
    const show = () => {
      const known = [
        ...Object.keys(FIXED),
        ...fields.map(({ name }) => name).filter((name) => /^(summary|hparams)\./.test(name)),
      ];
      const wanted = known.filter((name) => name.toLowerCase().includes(find.value.toLowerCase()));
      fill(
        list,
        wanted.slice(0, 300).map((name) =>
          el(
            "label",
            { class: "check" },
            el("input", {
              type: "checkbox",
              checked: columns.includes(name),
              onchange: (event) =>
                update({
                  column: event.target.checked ? [...columns, name] : columns.filter((one) => one !== name),
                }),
            }),
            el("span", { dir: "auto" }, shorten(name, 80)),
          ),
        ),
        wanted.length > 300 && el("p", { class: "muted" }, `${wanted.length - 300} more: search for them.`),
      );
    };
    find.addEventListener("input", show);
    show();
    return [
      find,
      list,
      el(
        "button",
        { type: "button", class: "button quiet", onclick: () => update({ column: [] }) },
        "Show the usual ones",
      ),
    ];
  }

  function chooseGroup(close) {
    const names = [
      "",
      "status",
      ...fields.map(({ name }) => name).filter((name) => name.startsWith("hparams.")),
    ];
    return el(
      "div",
      { class: "choices" },
      names.slice(0, 300).map((name) =>
        el(
          "button",
          {
            type: "button",
            class: `choice${state.group === name ? " on" : ""}`,
            onclick: () => {
              update({ group: name, fold: [] });
              close();
            },
          },
          name ? shorten(name, 80) : "No groups",
        ),
      ),
    );
  }

  function keys(event) {
    if (event.target.tagName === "INPUT" && event.target.type === "text") return;
    const step = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: 10, PageUp: -10 }[event.key];
    const row = cursor >= 0 ? rowAt(cursor) : undefined;
    if (step) {
      event.preventDefault();
      moveTo(Math.max(0, Math.min(total - 1, cursor + step)));
      const height = rowHeight();
      const part = layout.find((one) => !one.heading && cursor >= one.first && cursor < one.first + one.rows);
      const top = part ? (part.top + cursor - part.first) * height : 0;
      if (top < grid.scrollTop) grid.scrollTop = top;
      if (top + 2 * height > grid.scrollTop + grid.clientHeight)
        grid.scrollTop = top + 2 * height - grid.clientHeight;
      draw();
      grid.setAttribute("aria-activedescendant", `row-${cursor}`);
    } else if (row && (event.key === " " || event.key === "x")) {
      event.preventDefault();
      selectRuns([row.id], !state.run.includes(row.id));
    } else if (row && event.key === "Enter" && event.target === grid) {
      update({ page: "run", id: row.id });
    } else if (row && event.key === "e") {
      event.preventDefault();
      const note = body.querySelector(`#row-${cursor} [data-column="note"]`);
      if (note) editNote(note, row);
    }
  }

  const stop = onChange((changed) => {
    if (state.page !== "runs") return;
    if (["q", "where", "sort", "group", "archived", "column"].some((name) => changed.has(name))) {
      if (document.activeElement !== search) search.value = state.q;
      filter.show();
      reload();
    } else if (changed.has("fold")) {
      lay();
      draw();
    } else if (changed.has("run")) {
      draw();
      drawActions();
    }
  });
  const freshen = inTurn(async () => {
    const known = fields.length;
    fields = (await listFields().catch(() => ({ fields }))).fields;
    if (fields.length !== known || isFailed) await reload();
    else await refresh();
  });
  const stopData = dataChanges((changed) => {
    if (changed.table) freshen();
  });
  const themed = () => draw();
  document.addEventListener("themechange", themed);
  reload();
  return () => {
    stop();
    stopData();
    resized.disconnect();
    document.removeEventListener("themechange", themed);
  };
}
