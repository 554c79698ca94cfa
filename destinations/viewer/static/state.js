/**
 * The view as it is in the URL: which page, which runs, which axes. A link shows the same to someone else.
 *
 * The fragment is used (`#/charts?run=a&run=b&x=time`), so that it works from a file as well.
 */

const LISTS = [
  "run",
  "without",
  "group",
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
  goal: "",
  view: "",
  group: [],
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
  outliers: "",
  ranks: "",
  step: "",
  linked: "1",
  at: [],
  opacity: "0.5",
  class: [],
  kind: "",
  of: "",
  sx: "",
  sy: "",
  sc: "",
  brush: [],
};

/** What a view of runs is, and is saved by: the rest of the address says how one page shows it. */
export const VIEW = [
  "q",
  "where",
  "without",
  "archived",
  "sort",
  "goal",
  "group",
  "column",
  "sc",
  "run",
  "off",
];

/** Colours that the common kinds of colour blindness keep apart, for light and for dark ground. */
const PALETTE_LIGHT = [
  "#2e69e1",
  "#ec5f07",
  "#a33993",
  "#2a5417",
  "#036476",
  "#8e8f4b",
  "#1da080",
  "#633283",
  "#961f49",
  "#717172",
];
const PALETTE_DARK = [
  "#4884fc",
  "#ef661e",
  "#ee96dd",
  "#8bda6c",
  "#81e5fe",
  "#ebec83",
  "#5fc0a2",
  "#b189d0",
  "#d2326a",
  "#c8c8c8",
];
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
  // Links of earlier versions say by what runs are grouped with the band.
  const [kind, field] = state.band.split(/:(.*)/s);
  if (field !== undefined) state.band = "range";
  if (kind === "group" && field) state.group = [field];
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
  tell(new Set(changed));
}

function tell(changed) {
  for (const listener of [...listeners]) listener(changed);
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

/** Returns the parameters by which the server knows the runs of the view. */
export function viewQuery() {
  const { q, where, without, archived, sort, goal } = state;
  // Without another order, the best run is the first.
  return { q, where, without, archived, sort: sort || (goal.startsWith("max.") ? `-${goal}` : goal) };
}

/** Whether a run that logs stays where it is in the view: no filter, order or group looks at what changes. */
export function isSteady() {
  const { q, where, sort } = viewQuery();
  const isFixed = (name) => /^-?(hparams\.|name$|created_at$|$)/.test(name);
  return !q && !where && [sort, ...state.group].every(isFixed);
}

/** Returns all parts of a saved view, each with its usual value where it has none. */
export function fieldsOfView(saved) {
  return Object.fromEntries(VIEW.map((name) => [name, saved[name] ?? structuredClone(DEFAULTS[name])]));
}

/** @type {{slots: string[]}} */
const viewed = { slots: [] };
/** @type {(value?: unknown) => void} */
let haveViewed = () => {};
const firstViewed = new Promise((resolve) => {
  haveViewed = resolve;
});

/** Waits until it is known which runs are shown. */
export function whenViewed() {
  return state.run.some(Boolean) ? Promise.resolve() : firstViewed;
}

/** Returns the places of the runs that are shown, which decide their colours: the chosen ones, or else the view's. */
function slotsNow() {
  return state.run.some(Boolean) ? state.run : viewed.slots;
}

/** Takes the first runs of the view, and tells those who listen where these are shown. */
export function setViewed(ids) {
  const before = selectedRuns();
  const kept = viewed.slots.map((id) => (ids.includes(id) ? id : ""));
  viewed.slots = placed(
    kept,
    ids.filter((id) => !kept.includes(id)),
  );
  haveViewed();
  if (String(before) !== String(selectedRuns())) tell(new Set(["run"]));
}

/** Returns the ids of the runs that were chosen one by one. */
export function chosenRuns() {
  return state.run.filter(Boolean);
}

/** Returns the ids of the runs that charts show, also those that are switched off. */
export function selectedRuns() {
  return slotsNow().filter(Boolean);
}

/** Returns the ids of the selected runs that are not switched off. */
export function visibleRuns() {
  return selectedRuns().filter((id) => !state.off.includes(id));
}

/** Returns places in which ids have taken the first free ones. */
function placed(slots, ids) {
  const found = [...slots];
  for (const id of ids) {
    const hole = found.indexOf("");
    if (hole < 0) found.push(id);
    else found[hole] = id;
  }
  while (found.length && !found.at(-1)) found.pop();
  return found;
}

/** Selects runs, or takes them out; the others keep their colours. */
export function selectRuns(ids, isOn) {
  // Where none was chosen, all of the view were shown: what is taken out is left out of these.
  const slots = isOn ? [...state.run] : [...slotsNow()];
  const run = isOn
    ? placed(
        slots,
        ids.filter((id) => !slots.includes(id)),
      )
    : placed(
        slots.map((id) => (ids.includes(id) ? "" : id)),
        [],
      );
  update({ run });
}

/** The colours of runs by a field of theirs, while one is chosen. */
const hues = new Map();

/** Takes the colours of runs by a field; without one, each run has its own. */
export function setHues(found) {
  if (JSON.stringify([...found]) === JSON.stringify([...hues])) return;
  hues.clear();
  for (const [id, color] of found) hues.set(id, color);
  tell(new Set(["hues"]));
}

/** Returns the colour of a run, the same in every view: of its field, or its own. */
export function colorOf(id, isDarkNow) {
  return hues.get(id) ?? colorOfSlot(Math.max(0, slotsNow().indexOf(id)), isDarkNow);
}

/** Returns the colour of a band: of the field if its runs share one, or of its number. */
export function colorOfBand({ number, members }, isDarkNow) {
  const found = new Set(members.map(({ run }) => hues.get(run)));
  return (found.size === 1 && [...found][0]) || colorOfSlot(number, isDarkNow);
}

/** Returns the colour of the line of a number; those beyond the palette are grey. */
export function colorOfSlot(slot, isDarkNow) {
  return (isDarkNow ? PALETTE_DARK : PALETTE_LIGHT)[slot] ?? contextColor(isDarkNow);
}

/** Returns the colour of lines beyond the palette: they are there, and do not compete with the others. */
export function contextColor(isDarkNow) {
  return isDarkNow ? "#4d5058" : "#b4b4ae";
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
