/**
 * Elements, icons and formats that every view uses.
 *
 * Texts of a run become text nodes. No module parses a string as HTML.
 */

const SVG = "http://www.w3.org/2000/svg";

const ICONS = {
  archive: "M3 5h14v3H3zM4.5 8v8h11V8M8 11h4",
  chart: "M3 3v14h14M6 13l3.5-4 3 2.5L17 6",
  check: "M4 10.5l4 4 8-9",
  chevron: "M7 5l5 5-5 5",
  close: "M5 5l10 10M15 5L5 15",
  columns: "M3 4h14v12H3zM8 4v12M12.5 4v12",
  download: "M10 3v9M6 9l4 4 4-4M4 16.5h12",
  edit: "M4 16l1-4 8-8 3 3-8 8zM11.5 5.5l3 3",
  expand: "M3 8V3h5M17 12v5h-5M3 3l5.5 5.5M17 17l-5.5-5.5",
  eye: "M2 10s3-5 8-5 8 5 8 5-3 5-8 5-8-5-8-5zM10 12.2a2.2 2.2 0 100-4.4 2.2 2.2 0 000 4.4z",
  eyeOff:
    "M3 3l14 14M8 5.3A8.600 8.600 0 0110 5c5 0 8 5 8 5a13 13 0 01-2.600 3M12 14.700a8 8 0 01-2 .3c-5 0-8-5-8-5a13 13 0 013.400-3.500",
  filter: "M3 4h14l-5.500 6.500V16l-3-1.500v-4z",
  help: "M7.500 7.500a2.500 2.500 0 113.700 2.200c-.8.4-1.200.9-1.200 1.800M10 14.500v.1",
  link: "M8 12l4-4M9 6l1.500-1.500a3.500 3.500 0 015 5L14 11M11 14l-1.500 1.500a3.500 3.500 0 01-5-5L6 9",
  moon: "M16 11.500A6.500 6.500 0 018.500 4a6.500 6.500 0 107.500 7.500z",
  pin: "M10 12.500V18M6 12.500h8l-1.500-3V4.500h-5v5z",
  search: "M9 14.500a5.500 5.500 0 100-11 5.500 5.500 0 000 11zM13 13l4 4",
  star: "M10 2.800l2.200 4.600 5 .7-3.600 3.500.9 5L10 14.200l-4.500 2.400.9-5L2.800 8.100l5-.7z",
  sun: "M10 13.500a3.500 3.500 0 100-7 3.500 3.500 0 000 7zM10 2v1.500M10 16.500V18M2 10h1.500M16.500 10H18M4.300 4.300l1.100 1.100M14.600 14.600l1.100 1.100M4.300 15.700l1.100-1.100M14.600 5.400l1.100-1.100",
};

/**
 * Makes an element: `el("p.muted", { title }, "text")`.
 *
 * @param {string} tag its name, and classes after dots.
 * @param {...any} content first, if it has any, the properties: `class`, `style`, `on…` listeners, properties of the
 *   element, and attributes; those that are null, undefined or false are skipped. Then its children; strings become
 *   text nodes.
 * @returns {any}
 */
export function el(tag, ...content) {
  const [kind, ...classes] = tag.split(".");
  const node = document.createElement(kind);
  if (classes.length) node.className = classes.join(" ");
  const props = content[0]?.constructor === Object ? content.shift() : {};
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name === "style")
      for (const [rule, set] of Object.entries(value)) node.style.setProperty(rule, set);
    else if (name in node && !name.includes("-") && name !== "list" && name !== "form") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  add(node, content);
  return node;
}

/** Appends children as `el` does. */
function add(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

/** Replaces the children of an element; the focus stays on its control, or goes to the control in its place. */
export function fill(node, ...children) {
  const held = document.activeElement;
  const place = held !== node && node.contains(held) ? controlsOf(node).indexOf(held) : -1;
  node.replaceChildren();
  add(node, children);
  if (place >= 0) (node.contains(held) ? held : controlsOf(node)[place])?.focus({ preventScroll: true });
  return node;
}

function controlsOf(node) {
  return [...node.querySelectorAll("a[href], button, input, select, textarea, [tabindex]")];
}

/** Makes an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, String(value));
  }
  return add(node, children);
}

/** Draws an icon. Screen readers skip it, because the control around it has the label. */
export function icon(name) {
  return svg(
    "svg",
    { class: "icon", viewBox: "0 0 20 20", "aria-hidden": "true" },
    svg("path", { d: ICONS[name] }),
  );
}

/** Returns an element of `index.html`. */
export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`index.html has no element ${id}.`);
  return found;
}

/** Makes a button with an icon; the label is its tooltip and its name for screen readers. */
export function iconButton(name, label, onclick, props = {}) {
  return el(
    "button",
    { type: "button", class: "icon-button", title: label, "aria-label": label, onclick, ...props },
    icon(name),
  );
}

/** Makes a button with a text. */
export function button(label, onclick, props = {}) {
  return el("button", { type: "button", class: "button", onclick, ...props }, label);
}

/** Makes a checkbox with a label, which passes each change to `turned`. */
export function checkbox(label, checked, turned, props = {}) {
  const box = el("input", { type: "checkbox", checked, onchange: () => turned(box.checked), ...props });
  return el("label.check", box, label);
}

/** Makes an empty menu that passes each choice to `chosen`; `setMenu` gives it its options. */
export function menu(id, label, chosen) {
  const node = el("select", { id, "aria-label": label, onchange: () => chosen(node.value) });
  return node;
}

/** Sets the options of a menu, pairs of value and text, under headings if there are groups, and the chosen value. */
export function setMenu(node, options, value, groups = {}) {
  const made = (pairs) => pairs.map(([value, text]) => el("option", { value }, text));
  const parts = Object.entries(groups).map(([label, pairs]) => el("optgroup", { label }, made(pairs)));
  fill(node, parts, made(options));
  node.value = value;
}

/**
 * Returns what a page says if it has nothing to show.
 *
 * @param {string} text
 * @param {Object<string, any>} [link] the properties of a link to the table, where the reader can choose runs.
 */
export function nothing(text, link) {
  const help = link && [el("br"), el("a", { class: "button", ...link }, "Choose runs")];
  return el("div.empty", text, help);
}

/**
 * Makes a button that opens a panel below it. A click elsewhere, Escape, or leaving with Tab closes the panel.
 *
 * @param {Array<any>} label of the button.
 * @param {Object<string, any>} props of the button.
 * @param {(close: () => void) => any} content returns what the panel shows, each time it opens.
 */
export function popover(label, props, content) {
  const panel = el("div", { class: "popover", hidden: true });
  const button = el(
    "button",
    { type: "button", "aria-expanded": "false", ...props, onclick: () => (panel.hidden ? open() : close()) },
    label,
  );
  const box = el("span.popover-box", button, panel);
  const outside = (event) => {
    if (!box.contains(event.target)) close();
  };
  const closeByKey = (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      close();
      button.focus();
    }
  };
  function open() {
    fill(panel, content(close));
    panel.hidden = false;
    button.setAttribute("aria-expanded", "true");
    const edge = panel.getBoundingClientRect();
    panel.classList.toggle("from-right", edge.right > document.documentElement.clientWidth - 8);
    document.addEventListener("pointerdown", outside);
    panel.querySelector("input, button, select, a")?.focus();
  }
  function close() {
    if (panel.contains(document.activeElement)) button.focus();
    panel.hidden = true;
    button.setAttribute("aria-expanded", "false");
    document.removeEventListener("pointerdown", outside);
  }
  box.addEventListener("keydown", closeByKey);
  box.addEventListener("focusout", (event) => {
    if (!panel.hidden && event.relatedTarget && !box.contains(event.relatedTarget)) close();
  });
  return box;
}

/** Shows a message for some seconds. */
export function toast(message, kind = "info") {
  const node = el("div", { class: `toast ${kind}` }, message);
  byId("toasts").append(node);
  setTimeout(() => node.remove(), kind === "error" ? 8000 : 3500);
}

/** Acts, and shows a message if that fails. */
export async function attempt(act) {
  try {
    await act();
  } catch (error) {
    toast(error.message, "error");
  }
}

/** Returns a search field and its input. */
export function searchField(label, props) {
  const input = el("input", { type: "search", placeholder: label, "aria-label": label, ...props });
  return { input, field: el("label.field.search", icon("search"), input) };
}

/** Stores a text in this browser under a name. */
export function remember(name, text) {
  try {
    localStorage.setItem(name, text);
  } catch {
    // Browsers may refuse to store anything for a file.
  }
}

/** Returns the text that this browser has stored under a name, or null. */
export function remembered(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

/** Returns a function that calls `act` once nobody has called it for `ms`. */
export function debounce(act, ms) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => act(...given), ms);
  };
}

/** Returns a function that runs `act` one at a time; calls during a run cause one more run after it. */
export function inTurn(act) {
  let isBusy = false,
    isBehind = false;
  return async () => {
    isBehind = true;
    if (isBusy) return;
    isBusy = true;
    try {
      while (isBehind) {
        isBehind = false;
        await act();
      }
    } finally {
      isBusy = false;
    }
  };
}

/** Saves text or a data URL as a file. */
export function download(name, content, type) {
  const href = content.startsWith("data:") ? content : URL.createObjectURL(new Blob([content], { type }));
  el("a", { href, download: name.replace(/[^\w.-]+/g, "_").slice(0, 100) }).click();
  if (href.startsWith("blob:")) setTimeout(() => URL.revokeObjectURL(href), 10000);
}

/** Returns rows as CSV (RFC 4180). */
export function toCsv(rows) {
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return `${rows.map((row) => row.map(cell).join(",")).join("\n")}\n`;
}

/** Returns an integer in full, another number with five significant digits, and other values as text. */
export function formatNumber(value) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value !== "number") return typeof value === "object" ? JSON.stringify(value) : String(value);
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (Number.isSafeInteger(value))
    return value.toLocaleString("en-US").replaceAll(",", "\u202f").replace("-", "−");
  if (size >= 1e6 || (size < 1e-3 && size > 0))
    return value
      .toExponential(3)
      .replace(/\.?0+e/, "e")
      .replace("e+", "e")
      .replaceAll("-", "−");
  return String(Number(value.toPrecision(5))).replace("-", "−");
}

/** Returns texts for values side by side, in full where different values would otherwise read the same. */
export function formatApart(values) {
  const texts = values.map((value) => (value === null ? "none" : formatNumber(value)));
  const alike = (place) => new Set(values.filter((_, other) => texts[other] === texts[place]));
  return texts.map((text, place) => {
    const value = values[place];
    if (alike(place).size < 2) return text;
    if (typeof value === "string") return JSON.stringify(value);
    return typeof value === "number" ? String(value).replaceAll("-", "−") : text;
  });
}

/** Returns a size in bytes with a unit. */
export function formatBytes(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = bytes,
    unit = 0;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit && size < 100 ? size.toFixed(1) : Math.round(size)} ${units[unit]}`;
}

/** Returns a duration in seconds as its two largest units. */
export function formatDuration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const whole = Math.max(0, Math.round(seconds));
  /** @type {Array<[string, number]>} */
  const parts = [
    ["d", 86400],
    ["h", 3600],
    ["min", 60],
    ["s", 1],
  ];
  const first = parts.findIndex(([, size]) => whole >= size);
  if (first < 0) return seconds > 0 ? `${seconds.toPrecision(2)} s` : "0 s";
  let rest = whole;
  const texts = [];
  for (const [unit, size] of parts.slice(first, first + 2)) {
    const count = Math.floor(rest / size);
    rest -= count * size;
    if (count) texts.push(`${count} ${unit}`);
  }
  return texts.join(" ");
}

/** Returns a Unix time as date and time in this machine's zone. */
export function formatTime(time, withSeconds = false) {
  if (!time) return "–";
  const date = new Date(time * 1000);
  const two = (part) => String(part).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}${withSeconds ? `:${two(date.getSeconds())}` : ""}`;
}

/** Returns how long ago a Unix time was. */
export function formatAge(time) {
  if (!time) return "–";
  const seconds = Date.now() / 1000 - time;
  if (seconds < 60) return "just now";
  if (seconds > 30 * 86400) return formatTime(time).slice(0, 10);
  return `${formatDuration(seconds).split(" ").slice(0, 2).join(" ")} ago`;
}

/**
 * Returns the tags in a comma-separated text, without repeats.
 * @param {string} text
 * @param {string[]} [known] tags of the run; they stay whole even if they contain commas.
 */
export function tagsIn(text, known = []) {
  const shown = new Map(known.map((tag) => [tag.replace(/[\r\n]/g, "").trim(), tag]));
  const longest = [...shown.keys()].filter(Boolean).toSorted((one, other) => other.length - one.length);
  const found = new Set();
  for (let rest = text.trim(); rest; ) {
    const isNext = (tag) => rest.startsWith(tag) && /^\s*(,|$)/.test(rest.slice(tag.length));
    const tag = longest.find(isNext) ?? rest.split(",", 1)[0];
    if (tag.trim()) found.add(shown.get(tag.trim()) ?? tag.trim());
    rest = rest.slice(tag.length).replace(/^\s*,?\s*/, "");
  }
  return [...found];
}

/**
 * Returns a text field. Enter or leaving the field calls `end` once with the new text, or with null if it's unchanged;
 * Escape calls it with null. In a long field, Shift+Enter starts a new line.
 */
export function fieldFor(value, { label, isLong = false, end, ...props }) {
  const field = el(isLong ? "textarea" : "input", {
    class: "in-place",
    "aria-label": label,
    dir: "auto",
    value,
    ...props,
  });
  // A field of one line drops line feeds, so compare with what the browser shows.
  const before = field.value;
  let isDone = false;
  const finish = (isKept) => {
    if (isDone) return;
    isDone = true;
    end(isKept && field.value !== before ? field.value : null);
  };
  field.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Escape") finish(false);
    if (event.key !== "Enter" || (isLong && event.shiftKey)) return;
    event.preventDefault();
    finish(true);
  });
  field.addEventListener("blur", () => finish(true));
  return field;
}

/** Returns a text, cut to a length with an ellipsis. */
export function shorten(text, length = 80) {
  const whole = String(text);
  return whole.length > length ? `${whole.slice(0, length - 1)}…` : whole;
}

/** Returns a name with line breaks allowed after its separators. */
export function breakable(name) {
  return name.split(/(?<=[._/-])/).flatMap((part, at) => (at ? [el("wbr"), part] : part));
}

/** Whether the page is as narrow as a phone. */
export function isNarrow() {
  return matchMedia("(max-width: 760px)").matches;
}

/** Whether the page is dark now. */
export function isDark() {
  if (matchMedia("print").matches) return false;
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}
