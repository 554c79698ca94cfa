/**
 * The state of the page as the URL holds it: page, runs, axes. A link shows someone else the same.
 *
 * It is in the fragment (`#/charts?run=a&run=b&x=time`), so that it works from a file too.
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
  "join",
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
  join: [],
  zoom: [],
  band: "",
  outliers: "",
  ranks: "",
  step: "",
  opacity: "0.5",
  class: [],
  kind: "",
  of: "",
  sx: "",
  sy: "",
  sc: "",
  brush: [],
};

/** The fields of a view of runs, as it is saved; the other fields belong to single pages. */
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

/** Safari refuses more than a hundred changes of the URL in ten seconds. */
const NOTES_AT_ONCE = 50;
const WINDOW_MS = 10000;
const NOTE_MS = 300;

const listeners = new Set();
const noted = { hash: "", since: -Infinity, count: 0, timer: 0 };

/** @type {{page: string, id: string} & Object<string, any>} */
export const state = { page: "runs", id: "", ...structuredClone(DEFAULTS) };

/** Reads the state from the URL. */
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

/** Returns the fragment of the state with some fields changed. */
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
 * Returns the properties of a link to the state with some fields changed. The link uses the state at the time of the
 * click, not at the time it was drawn.
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

/** Changes the state and the URL, and tells listeners which fields changed. */
export function update(patch, push = false) {
  const changed = Object.keys(patch).filter(
    (name) => JSON.stringify(patch[name]) !== JSON.stringify(state[name]),
  );
  if (!changed.length) return;
  const isNewPage = push || changed.includes("page") || changed.includes("id");
  // The history entry that we leave gets its final state.
  if (isNewPage && noted.timer) note();
  Object.assign(state, patch);
  if (isNewPage) {
    history.pushState(null, "", link());
    noted.hash = location.hash;
  } else noteSoon();
  tell(new Set(changed));
}

/** Tells listeners which fields changed. */
export function tell(changed) {
  for (const listener of [...listeners]) listener(changed);
}

/** Writes the state to the URL: at once, or a little later while a slider or a brush changes it many times. */
function noteSoon() {
  const isMany = noted.count >= NOTES_AT_ONCE && performance.now() - noted.since < WINDOW_MS;
  if (isMany) noted.timer ||= setTimeout(note, NOTE_MS);
  else note();
}

function note() {
  clearTimeout(noted.timer);
  noted.timer = 0;
  // Otherwise the reader is already on the way to another page.
  if (!isShown()) return;
  const now = performance.now();
  if (now - noted.since >= WINDOW_MS) Object.assign(noted, { since: now, count: 0 });
  noted.count += 1;
  history.replaceState(null, "", link());
  noted.hash = location.hash;
}

addEventListener("pagehide", () => noted.timer && note());

/** Whether the page shows the state of the URL. */
export function isShown() {
  return location.hash === noted.hash;
}

/** Calls a function with the names of changed fields, until the returned function is called. */
export function onChange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Returns the view as parameters of a request. */
export function viewQuery() {
  const { q, where, without, archived, sort, goal } = state;
  // Without another order, the best run comes first.
  return { q, where, without, archived, sort: sort || (goal.startsWith("max.") ? `-${goal}` : goal) };
}

/** Whether new rows can't move a run: no filter, order or group depends on values that change. */
export function isSteady() {
  const { q, where, sort } = viewQuery();
  const isFixed = (name) => /^-?(hparams\.|name$|created_at$|$)/.test(name);
  return !q && !where && [sort, ...state.group].every(isFixed);
}

/** Returns all fields of a saved view; missing ones have their defaults. */
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

/** Waits until the runs of the view are known. */
export function whenViewed() {
  return state.run.some(Boolean) ? Promise.resolve() : firstViewed;
}

/** Returns the shown runs by colour: the chosen ones, or else the first of the view. */
export function slotsNow() {
  return state.run.some(Boolean) ? state.run : viewed.slots;
}

/** Sets the first runs of the view, and tells listeners if the shown runs changed. */
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

/** Returns the ids of the chosen runs. */
export function chosenRuns() {
  return state.run.filter(Boolean);
}

/** Returns the ids of the runs in charts, including hidden ones. */
export function selectedRuns() {
  return slotsNow().filter(Boolean);
}

/** Returns the ids of the runs in charts that are not hidden. */
export function visibleRuns() {
  return selectedRuns().filter((id) => !state.off.includes(id));
}

/** Returns the slots with ids added in the first free ones. */
export function placed(slots, ids) {
  const found = [...slots];
  for (const id of ids) {
    const hole = found.indexOf("");
    if (hole < 0) found.push(id);
    else found[hole] = id;
  }
  while (found.length && !found.at(-1)) found.pop();
  return found;
}

/** Chooses runs, or removes them; the others keep their colours. */
export function selectRuns(ids, isOn) {
  // If none was chosen, the runs of the view are shown: removing one chooses the others.
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

/** How many numbers precede a name in each list: the name itself may look like numbers. */
const NUMBERS = { zoom: 4, brush: 2 };

function nameIn(list, text) {
  return text.split("~").slice(NUMBERS[list]).join("~");
}

/** Returns the numbers that a list holds for a name, as in `1~2~name`; null for none. */
export function numbersOf(list, name) {
  const found = state[list].find((one) => nameIn(list, one) === name);
  if (found === undefined) return null;
  return found
    .split("~")
    .slice(0, NUMBERS[list])
    .map((part) => (part === "" || !Number.isFinite(Number(part)) ? null : Number(part)));
}

/** Sets the numbers of a name in a list; null removes them. */
export function keepNumbers(list, name, numbers) {
  const others = state[list].filter((one) => nameIn(list, one) !== name);
  update({ [list]: numbers ? [...others, [...numbers.map((part) => part ?? ""), name].join("~")] : others });
}

/** Adds a value to a list, or removes it. */
export function toggle(name, value) {
  const list = state[name];
  update({ [name]: list.includes(value) ? list.filter((one) => one !== value) : [...list, value] });
}
