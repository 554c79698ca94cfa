/** Logged tables, which the reader sorts by a column and filters by a word. */

import { breakable, button, el, fill, formatNumber, searchField, shorten } from "./dom.js";

const MOST_ROWS = 200;

/**
 * Makes a table. Its `show` replaces the rows and keeps filter and order.
 *
 * @param {{name: string, type?: string}[]} columns
 * @param {any[][]} rows
 * @param {{up: number[], down: number[]}[]} orders for each column, the places of the rows in sorted order, from the server.
 * @param {{name?: string, total?: number}} [about] what it is called when saved, and how many rows there are in all.
 */
export function dataTable(columns, rows, orders, about = {}) {
  let sorted = -1,
    isDown = false,
    most = MOST_ROWS;
  const find = searchField("Filter rows", { oninput: () => draw() });
  const count = el("span.muted");
  const head = el("thead"),
    body = el("tbody");
  const showMore = () => {
    most += MOST_ROWS;
    draw();
  };
  const more = button("", showMore, { class: "button quiet" });

  function sortBy(index) {
    if (sorted === index && isDown) [sorted, isDown] = [-1, false];
    else [sorted, isDown] = [index, sorted === index];
    draw();
  }

  /** Makes the heading of a column, which sorts by it: descending first, then ascending, then not at all. */
  function heading(name, index) {
    const isOn = sorted === index;
    return el(
      "th",
      {
        scope: "col",
        class: isNumeric(rows, index) ? "number" : "",
        "aria-sort": isOn ? (isDown ? "descending" : "ascending") : "none",
      },
      button([shorten(name, 80), isOn && (isDown ? " ↓" : " ↑")], () => sortBy(index), {
        class: "",
        dir: "auto",
      }),
    );
  }

  function draw() {
    const word = find.input.value.toLowerCase();
    const isFound = (value) =>
      String(value ?? "")
        .toLowerCase()
        .includes(word);
    const order = orders[sorted]?.[isDown ? "down" : "up"];
    const inOrder = order?.map((/** @type {number} */ place) => rows[place]) ?? rows;
    const found = inOrder.filter((values) => !word || values.some(isFound));
    const [shown, all] = word ? [found.length, rows.length] : [rows.length, about.total ?? rows.length];
    fill(count, shown < all ? `${shown} of ${all} rows` : shown === 1 ? "1 row" : `${shown} rows`);
    more.hidden = found.length <= most;
    fill(more, `Show ${Math.min(MOST_ROWS, found.length - most)} more`);
    fill(head, row(columns.map(({ name }, index) => heading(name, index))));
    fill(
      body,
      found.slice(0, most).map((values) => row(columns.map((_, index) => valueCell(values[index])))),
    );
  }

  draw();
  const table = el(
    "div.logged-table",
    el("div.table-tools", find.field, count),
    el(
      "div",
      {
        class: "data-table",
        tabIndex: 0,
        role: "group",
        "aria-label": about.name ? `Table ${shorten(about.name, 80)}` : "Table",
      },
      el("table", head, body),
    ),
    more,
  );
  table.show = (others, otherOrders) => {
    [rows, orders] = [others, otherOrders];
    draw();
  };
  return table;
}

/** Returns a table of names and values. */
export function pairTable(pairs) {
  return plainTable(
    pairs.map(([name, value]) => [
      el("th", { scope: "row", dir: "auto" }, breakable(shorten(name, 120))),
      el(
        "td",
        { dir: "auto", title: typeof value === "number" ? String(value) : null },
        value instanceof Node
          ? value
          : breakable(shorten(typeof value === "number" ? formatNumber(value) : cellText(value), 3000)),
      ),
    ]),
  );
}

/**
 * Returns a table of the given cells.
 *
 * @param {any[][]} rows the cells of each row: `td` and `th` elements, or their contents.
 * @param {string[]} [head] the titles of columns.
 */
export function plainTable(rows, head = []) {
  const isCell = (content) => content instanceof HTMLTableCellElement;
  const cell = (content) => (isCell(content) ? content : el("td", { dir: "auto" }, content));
  return el(
    "table",
    head.length > 0 && el("thead", row(head.map((title) => el("th", title)))),
    el(
      "tbody",
      rows.map((cells) => row(cells.map(cell))),
    ),
  );
}

/** Returns the cell of a value of a logged table. */
function valueCell(value) {
  if (typeof value === "number") return el("td.number", { title: String(value) }, formatNumber(value));
  return el(
    "td",
    { dir: "auto" },
    value === null || value === undefined ? "" : shorten(cellText(value), 2000),
  );
}

function row(cells) {
  return el("tr", cells);
}

/** Returns a cell of a class, such as "number". */
export function cell(kind, ...content) {
  return el("td", { class: kind, dir: "auto" }, content);
}

/** Returns the leaves of a nested mapping with dotted names, up to 5,000. */
export function flatten(value, prefix = "", found = []) {
  if (found.length >= 5000) return found;
  const isBranch = value && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length;
  if (!isBranch) found.push([prefix, value]);
  else
    for (const [name, one] of Object.entries(value)) flatten(one, prefix ? `${prefix}.${name}` : name, found);
  return found;
}

function cellText(cell) {
  if (cell === null || cell === undefined) return "–";
  // JSON would turn NaN into null.
  const shown = (_, value) => (typeof value === "number" && !Number.isFinite(value) ? String(value) : value);
  return typeof cell === "object" ? JSON.stringify(cell, shown) : String(cell);
}

function isNumeric(rows, index) {
  return (
    rows.length > 0 &&
    rows.slice(0, 50).every((row) => typeof row[index] === "number" || row[index] === null) &&
    rows.slice(0, 50).some((row) => row[index] !== null)
  );
}
