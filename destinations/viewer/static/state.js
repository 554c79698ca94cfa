/**
 * The view as it is in the URL: which page, which runs, which axes. A link shows the same to someone else.
 *
 * The fragment is used (`#/charts?run=a&run=b&x=time`), so that it works from a file as well.
 */

const LISTS = [
  "run",
  "without",
  "column",
  "unfold",
  "pin",
  "hide",
  "off",
  "zoom",
  "class",
  "open",
  "fold",
  "at",
  "brush",
];

const DEFAULTS = {
  q: "",
  where: "",
  without: [],
  sort: "",
  group: "",
  archived: "",
  column: [],
  fold: [],
  unfold: [],
  run: [],
  off: [],
  x: "step",
  logx: "",
  logy: "",
  smooth: "",
  find: "",
  pin: [],
  hide: [],
  open: [],
  zoom: [],
  band: "",
  ranks: "",
  step: "",
  linked: "1",
  at: [],
  opacity: "0.5",
  class: [],
  kind: "",
  sx: "",
  sy: "",
  sc: "",
  brush: [],
};

/** Colours that the common kinds of colour blindness keep apart, for light and for dark ground. */
const PALETTE_LIGHT = [
  "#2563c9",
  "#d1500f",
  "#0b8a6a",
  "#a83c8f",
  "#b07d00",
  "#3a9bd6",
  "#6b4bc4",
  "#8c564b",
  "#5b6470",
];
const PALETTE_DARK = [
  "#6ea2ff",
  "#ff8a4c",
  "#3ccfa6",
  "#e685cf",
  "#eab93c",
  "#7fd0ff",
  "#a990ff",
  "#d0a08e",
  "#a7b0bd",
];
const DASHES = ["solid", "dash", "dot"];

/** Browsers refuse to note a view in the URL more often than a hundred times in ten seconds (Safari). */
const NOTES_AT_ONCE = 50;
const WINDOW_MS = 10000;
const NOTE_MS = 300;

const listeners = new Set();
const noted = { hash: "", since: -Infinity, count: 0, timer: 0 };

/** @type {{page: string, id: string} & Object<string, any>} */
export const state = { page: "runs", id: "", ...structuredClone(DEFAULTS) };

/** Reads the view from the URL. */
export function readUrl() {
  clearTimeout(noted.timer);
  Object.assign(noted, { timer: 0, hash: location.hash });
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const [page, ...rest] = path.split("/");
  const given = new URLSearchParams(query);
  Object.assign(state, structuredClone(DEFAULTS));
  state.page = ["runs", "charts", "media", "explore", "compare", "run"].includes(page) ? page : "runs";
  state.id = decode(rest.join("/"));
  if (state.page === "run" && !state.id) state.page = "runs";
  for (const name of new Set(given.keys())) {
    if (!Object.hasOwn(DEFAULTS, name)) continue;
    state[name] = LISTS.includes(name) ? given.getAll(name) : given.get(name);
  }
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Returns the fragment that shows the view with some things changed. */
function link(patch = {}) {
  const view = { ...state, ...patch };
  const query = new URLSearchParams();
  for (const [name, normal] of Object.entries(DEFAULTS)) {
    if (LISTS.includes(name)) for (const one of view[name]) query.append(name, one);
    else if (view[name] !== normal) query.set(name, view[name]);
  }
  const path = view.page === "run" ? `run/${encodeURIComponent(view.id)}` : view.page;
  const text = query.toString();
  return `#/${path}${text ? `?${text}` : ""}`;
}

/**
 * Returns the properties of a link to the view with some things changed: those of the moment at which it is used, not
 * of that at which it was drawn.
 *
 * @param {Object<string, any> | (() => Object<string, any>)} patch what changes.
 */
export function linkTo(patch) {
  const href = () => link(typeof patch === "function" ? patch() : patch);
  const renew = (event) => {
    event.currentTarget.href = href();
  };
  return { href: href(), onpointerenter: renew, onfocus: renew, onclick: renew };
}

/** Changes the view, in the URL too, and tells those who listen which parts changed. */
export function update(patch, push = false) {
  const changed = Object.keys(patch).filter(
    (name) => JSON.stringify(patch[name]) !== JSON.stringify(state[name]),
  );
  if (!changed.length) return;
  const isNewPage = push || changed.includes("page") || changed.includes("id");
  // The step in the history that is left has its last view.
  if (isNewPage && noted.timer) note();
  Object.assign(state, patch);
  if (isNewPage) {
    history.pushState(null, "", link());
    noted.hash = location.hash;
  } else noteSoon();
  for (const listener of [...listeners]) listener(new Set(changed));
}

/** Notes the view in the URL: at once, or a little later where a slider or a brush has changed it many times. */
function noteSoon() {
  const isMany = noted.count >= NOTES_AT_ONCE && performance.now() - noted.since < WINDOW_MS;
  if (isMany) noted.timer ||= setTimeout(note, NOTE_MS);
  else note();
}

function note() {
  clearTimeout(noted.timer);
  noted.timer = 0;
  // Else the reader is on the way to another view.
  if (!isShown()) return;
  const now = performance.now();
  if (now - noted.since >= WINDOW_MS) Object.assign(noted, { since: now, count: 0 });
  noted.count += 1;
  history.replaceState(null, "", link());
  noted.hash = location.hash;
}

addEventListener("pagehide", () => noted.timer && note());

/** Whether the view of the URL is the one that is shown. */
export function isShown() {
  return location.hash === noted.hash;
}

/** Calls a function with the names of what changed, until the returned function is called. */
export function onChange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Returns the filter of the view, with the statuses that are left out. */
export function filterOf() {
  const left = state.without.map((status) => JSON.stringify(status)).join(", ");
  const parts = [state.where && left ? `(${state.where})` : state.where, left && `status not in (${left})`];
  return parts.filter(Boolean).join(" and ");
}

/** Returns the ids of the selected runs. Their place among `state.run` decides their colour. */
export function selectedRuns() {
  return state.run.filter(Boolean);
}

/** Returns the ids of the selected runs that are not switched off. */
export function visibleRuns() {
  return selectedRuns().filter((id) => !state.off.includes(id));
}

/** Selects runs, or takes them out; the others keep their colours. */
export function selectRuns(ids, isOn) {
  const slots = [...state.run];
  for (const id of ids) {
    const at = slots.indexOf(id);
    if (isOn && at < 0) {
      const hole = slots.indexOf("");
      if (hole < 0) slots.push(id);
      else slots[hole] = id;
    } else if (!isOn && at >= 0) {
      slots[at] = "";
    }
  }
  while (slots.length && !slots.at(-1)) slots.pop();
  update({ run: slots });
}

/** Returns colour and dash of a run, the same in every view. Runs beyond the palette repeat it with dashes. */
export function styleOf(id, isDarkNow) {
  return styleOfSlot(Math.max(0, state.run.indexOf(id)), isDarkNow);
}

/** Returns colour and dash of the line of a number. */
export function styleOfSlot(slot, isDarkNow) {
  const palette = isDarkNow ? PALETTE_DARK : PALETTE_LIGHT;
  return {
    color: palette[slot % palette.length],
    dash: DASHES[Math.floor(slot / palette.length) % DASHES.length],
  };
}

/** How many numbers a list holds for a name: the name itself may look like more of them. */
const NUMBERS = { zoom: 4, at: 1, brush: 2 };

function nameIn(list, text) {
  return text.split("~").slice(NUMBERS[list]).join("~");
}

/** Returns the numbers that a list of the view holds for a name, as `1~2~name`; null if it holds none. */
export function numbersOf(list, name) {
  const found = state[list].find((one) => nameIn(list, one) === name);
  if (found === undefined) return null;
  return found
    .split("~")
    .slice(0, NUMBERS[list])
    .map((part) => (part === "" || !Number.isFinite(Number(part)) ? null : Number(part)));
}

/** Keeps numbers for a name in a list of the view; null takes them out. */
export function keepNumbers(list, name, numbers) {
  const others = state[list].filter((one) => nameIn(list, one) !== name);
  update({ [list]: numbers ? [...others, [...numbers.map((part) => part ?? ""), name].join("~")] : others });
}

/** Adds a value to a list of the view, or takes it out. */
export function toggle(name, value) {
  const list = state[name];
  update({ [name]: list.includes(value) ? list.filter((one) => one !== value) : [...list, value] });
}
