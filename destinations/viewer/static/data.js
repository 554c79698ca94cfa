/**
 * What the page knows about runs. This is the only module that fetches.
 *
 * With a server, answers come from its JSON API ("The viewer's API"). An exported site has no server, and a page opened
 * from a file can't fetch: there, scripts in `data/` provide the same answers through `destinationsSite.add`.
 */

const site = globalThis.destinationsSite;
const MAX_ANSWERS = 500;
/** Longer addresses are sent as a body, because servers limit their length. */
const MAX_ADDRESS = 6000;
const RETRY_MS = 3000;
const MOST_RETRY_MS = 60000;
/** The server answers a question for changes within 25 seconds. */
const MOST_POLL_MS = 60000;

const added = new Map();
const scripts = new Map();
const answers = new Map();
const infos = new Map();
const watchers = new Set();
const followed = new Set();
/** @type {AbortController | null} */
let polling = null;
const retry = { ms: RETRY_MS, timer: 0, failedAt: 0 };
let isBehind = false;
/** Identifies the set of columns. */
let fieldsNow = "";

/** Whether the page is an exported site, without a server. */
export const isExported = site !== undefined;

/** The fragment with the view that an exported site opens with; "" for none. */
export const firstView = site?.view ?? "";

if (isExported) site.add = (key, answer) => added.set(key, answer);

/** An error with a message for the reader, and the status of the answer if there was one. */
class DataError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Returns path and query; lists are repeated parameters, null and "" are left out. */
function pathOf(path, query = {}) {
  const given = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value])
      if (one !== null && one !== undefined && one !== "") given.append(name, one);
  }
  const text = given.toString();
  return text ? `${path}?${text}` : path;
}

async function ask(path, options = {}) {
  let response;
  try {
    if (path.length > MAX_ADDRESS) {
      const [address, ...query] = path.split("?");
      const headers = { "Content-Type": "application/x-www-form-urlencoded" };
      [path, options] = [address, { method: "POST", headers, body: query.join("?"), ...options }];
    }
    response = await fetch(path, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    askAgainLater();
    throw new DataError("The server doesn't answer. Is destinations view still running?");
  }
  if (response.ok) return response.json();
  if (response.status >= 500) askAgainLater();
  let text = `The server answered ${response.status}.`;
  try {
    text = (await response.json()).error || text;
  } catch {
    // The answer isn't JSON: the status has to do.
  }
  throw new DataError(
    response.status === 401 ? `${text} Open the link that destinations view printed.` : text,
    response.status,
  );
}

/** Makes the views ask again after a request that may succeed later, with growing pauses while requests fail. */
function askAgainLater() {
  const now = performance.now();
  if (now - retry.failedAt > 2 * MOST_RETRY_MS) retry.ms = RETRY_MS;
  retry.failedAt = now;
  if (retry.timer) return;
  retry.timer = setTimeout(() => {
    retry.timer = 0;
    isBehind = true;
    polling?.abort();
  }, retry.ms);
  retry.ms = Math.min(2 * retry.ms, MOST_RETRY_MS);
}

async function fromSite(key) {
  const file = Object.hasOwn(site.keys, key) ? site.keys[key] : null;
  if (!file) throw new DataError("This is not in the exported site.");
  if (!scripts.has(file)) {
    scripts.set(
      file,
      new Promise((/** @type {(value?: unknown) => void} */ resolve, reject) => {
        const script = document.createElement("script");
        script.src = `data/${file}`;
        script.onload = () => resolve();
        script.onerror = () => reject(new DataError(`data/${file} of the exported site is missing.`));
        document.head.append(script);
      }),
    );
  }
  await scripts.get(file);
  if (!added.has(key)) throw new DataError(`data/${file} of the exported site has no ${key}.`);
  return added.get(key);
}

/** Returns an answer, and keeps it until the run changes. `mark` is what `forget` finds it by. */
function kept(mark, path, key) {
  const name = isExported ? key : path;
  if (!answers.has(name)) {
    const answer = (isExported ? fromSite(key) : ask(path)).then(plain);
    answer.catch(() => {
      if (answers.get(name) === answer) answers.delete(name);
    });
    answers.set(name, Object.assign(answer, { mark }));
    if (answers.size > MAX_ANSWERS) answers.delete(answers.keys().next().value);
  }
  return answers.get(name);
}

function forget(mark) {
  for (const [name, answer] of answers)
    if (answer.mark === mark) {
      answer.isOld = true;
      answers.delete(name);
    }
}

const NOT_FINITE = { nan: NaN, inf: Infinity, "-inf": -Infinity };

/** Integers that a JavaScript number would round; they are shown by their digits. */
const DIGITS = /^-?\d{16,}$/;

/** Returns an answer with the numbers that JSON lacks, sent as `{"number": "nan"}`. */
function plain(value) {
  if (!value || typeof value !== "object") return value;
  if (Array.isArray(value)) return value.map(plain);
  const names = Object.keys(value);
  if (names.length === 1 && names[0] === "number") {
    if (Object.hasOwn(NOT_FINITE, value.number)) return NOT_FINITE[value.number];
    if (DIGITS.test(value.number)) return value.number;
  }
  return Object.fromEntries(names.map((name) => [name, plain(value[name])]));
}

function plainRow(row) {
  const whole = plain(row);
  infos.set(row.id, whole);
  return whole;
}

// --- runs -----------------------------------------------------------------------------------------------------

/** Returns name of the roots, version, and whether runs can be edited. */
export function serverInfo() {
  return isExported ? fromSite("info") : ask("api/info");
}

/** Returns the rows of some runs with some columns, without runs that are gone. */
export async function rowsOf(ids, columns) {
  if (isExported) return (await fromSite("runs")).rows.filter(({ id }) => ids.includes(id)).map(plainRow);
  const answer = await ask(pathOf("api/runs", { run: ids, columns, archived: "all", limit: ids.length }));
  return answer.rows.map(plainRow);
}

/**
 * Returns a window of the runs of a view: `{total, version, rows}`.
 *
 * @param {{q?: string, where?: string, without?: string[], sort?: string, group?: string[], archived?: string,
 *   columns?: string[], offset?: number, limit?: number}} query as of `/api/runs`.
 */
export async function listRuns({ offset = 0, limit = 100, ...view }) {
  if (isExported) return siteRuns({ ...view, offset, limit });
  const answer = await ask(pathOf("api/runs", { ...view, offset, limit }));
  return { ...answer, rows: answer.rows.map(plainRow) };
}

async function siteRuns({ offset, limit, ...view }) {
  const [answer, places] = await Promise.all([fromSite("runs"), sitePlaces(view)]);
  const rows = places.slice(offset, offset + limit).map((place) => plainRow(answer.rows[place]));
  return { total: places.length, version: answer.version, rows };
}

/**
 * Returns the places of the rows that match, in an order that was computed when the site was written.
 *
 * @param {Object<string, any>} view
 */
async function sitePlaces({ q, where, without = [], sort = "", group = [] }) {
  if (where) throw new DataError("Filters need the server: destinations view. Search and sorting work here.");
  const { rows } = await fromSite("runs");
  const word = (q || "").toLowerCase();
  const search = word ? (await fromSite("orders")).search : [];
  let places = [...rows.keys()];
  // The last order takes precedence.
  for (const name of [sort, ...group.toReversed()].filter(Boolean)) {
    const order = (await siteColumn(name.replace(/^-/, "")))[name.startsWith("-") ? "down" : "up"];
    const of = new Map(order.map((place, at) => [place, at]));
    const labels = name === sort ? null : (await siteColumn(name)).labels;
    const first = new Map();
    for (const place of order) if (labels && !first.has(labels[place])) first.set(labels[place], first.size);
    const rank = (place) => (labels ? first.get(labels[place]) : of.get(place)) ?? 0;
    places = places.toSorted((one, other) => rank(one) - rank(other));
  }
  return places.filter(
    (place) => !without.includes(rows[place].status) && (!word || search[place].includes(word)),
  );
}

/** Returns the orders of a column and the labels of its values, loaded when first needed. */
async function siteColumn(name) {
  const { columns } = await fromSite("orders");
  if (!Object.hasOwn(columns, name)) throw new DataError("The exported site can't sort by this column.");
  return (await fromSite(`orders/${columns[name]}`))[name];
}

/**
 * Returns the values of the columns to group by, in the order of the sorted table, each with its number of runs.
 *
 * @param {Object<string, any>} query as of `/api/groups`.
 */
export async function listGroups({ columns = [], sort, group, ...view }) {
  if (!isExported) return (await ask(pathOf("api/groups", { group, ...view, columns }))).groups;
  const places = await sitePlaces({ ...view, group });
  const { rows } = await fromSite("runs");
  const labels = (await Promise.all(group.map(siteColumn))).map((one) => one.labels);
  const groups = new Map();
  for (const place of places) {
    const label = labels.map((of) => of[place]).join(" · ");
    groups.set(label, [...(groups.get(label) ?? []), plain(rows[place]).values]);
  }
  return [...groups].map(([label, members]) => ({
    label,
    total: members.length,
    values: Object.fromEntries(columns.map((name) => [name, spreadOf(members.map((one) => one[name]))])),
  }));
}

/** Returns mean, standard deviation and number of the finite values, as `/api/groups` has them; undefined for none. */
function spreadOf(values) {
  const finite = values.filter((value) => Number.isFinite(value));
  const count = finite.length;
  if (!count) return undefined;
  const mean = finite.reduce((sum, value) => sum + value, 0) / count;
  const squares = finite.reduce((sum, value) => sum + (value - mean) ** 2, 0);
  return { mean, std: count > 1 ? Math.sqrt(squares / (count - 1)) : null, count };
}

/** Returns the saved views by name. */
export async function readViews() {
  return (await ask("api/views")).views;
}

/** Saves a view by its name, or removes it for null; returns all. */
export async function saveView(name, view) {
  return (await change("api/views", { [name]: view })).views;
}

function change(path, changes) {
  const headers = { "Content-Type": "application/json" };
  return ask(path, { method: "PATCH", headers, body: JSON.stringify(changes) });
}

/** Returns the columns that can be shown, sorted and filtered, and the names of all metrics. */
export function listFields() {
  return kept("fields", "api/fields", "fields");
}

/** Changes tags, note, name or archive of a run. */
export async function editRun(id, patch) {
  if (isExported) throw new DataError("An exported site can't be edited.");
  const row = await change(`api/runs/${id}`, patch);
  forget(id);
  return plainRow(row);
}

/** Returns name, status and liveness of a run, as last known. */
export function runInfo(id) {
  return infos.get(id) ?? { id, name: id, status: "unknown", alive: false, tags: [], values: {} };
}

/** The rows of `selectedRows`, until their runs change. */
const selected = new Map();

/**
 * Returns what legends and charts need, in one answer: rows with all hyperparameters, `metrics`, and `constant` (the
 * metrics that never change); null for a run that is gone.
 */
export async function selectedRows(ids) {
  if (!ids.length) return [];
  const missing = isExported ? [] : ids.filter((id) => !selected.has(id));
  const rows = new Map();
  if (isExported) for (const row of (await kept("runs", "", "runs")).rows) rows.set(row.id, row);
  else if (missing.length) {
    const answer = kept("selected", pathOf("api/selected", { run: missing }));
    for (const row of (await answer).runs) rows.set(row.id, row);
    // Else a run has changed since, and a newer answer may have come first.
    if (!answer.isOld) for (const id of missing) selected.set(id, rows.get(id) ?? null);
  }
  for (const id of ids) if (selected.get(id)) rows.set(id, selected.get(id));
  for (const id of ids) infos.set(id, rows.get(id) ?? { ...runInfo(id), status: "not found", alive: false });
  return ids.map((id) => rows.get(id) ?? null);
}

/** Loads name and status of runs that no table has brought yet. */
export async function loadInfos(ids) {
  const missing = ids.filter((id) => !infos.has(id));
  // The view shows the error when it asks itself.
  if (missing.length) await selectedRows(missing).catch(() => {});
}

/** Returns everything about a run except its rows. */
export async function runDetail(id) {
  const answer = kept(id, `api/runs/${encodeURIComponent(id)}`, `run/${id}`);
  try {
    const detail = await answer;
    // Else the run has changed since, and a newer answer may have come first.
    if (!answer.isOld || !infos.has(id)) infos.set(id, { values: {}, ...infos.get(id), ...detail });
    return detail;
  } catch (error) {
    if (error.status === 404) infos.set(id, { ...runInfo(id), status: "not found", alive: false });
    throw error;
  }
}

/** Returns a part of a log file of a run. */
export function readLog(id, file, offset) {
  return isExported ? fromSite(`log/${id}/${file}`) : ask(pathOf(`api/runs/${id}/log`, { file, offset }));
}

/** Returns the differences between runs, and where they part. */
export async function compareRuns(ids) {
  if (!isExported) return plain(await ask(pathOf("api/compare", { run: ids })));
  const pairs = plain(await Promise.all(ids.slice(1).map((id) => fromSite(`compare/${ids[0]}/${id}`))));
  const fields = new Map();
  for (const { name, values } of pairs.flatMap((pair) => pair.fields))
    fields.set(name, { name, values: { ...fields.get(name)?.values, ...values } });
  // A pair doesn't list fields that are equal.
  for (const [at, pair] of pairs.entries()) {
    const told = new Set(pair.fields.map(({ name }) => name));
    for (const { name, values } of fields.values())
      if (!told.has(name) && ids[0] in values) values[ids[at + 1]] = values[ids[0]];
  }
  return { runs: ids, fields: [...fields.values()], parts: pairs.flatMap((pair) => pair.parts) };
}

/** Returns the importance of hyperparameters for a metric. */
export async function readImportance(query) {
  if (isExported) throw new DataError("Which hyperparameter matters needs the server: destinations view.");
  return ask(pathOf("api/importance", query));
}

// --- media ----------------------------------------------------------------------------------------------------

/** Returns the records of one name, 1,000 at most. */
export function listMedia(id, kind, name) {
  return kept(id, pathOf(`api/runs/${id}/media`, { kind, name }), `media/${id}/${kind}/${name}`);
}

/** Returns the rows of a table, 1,000 at most. */
export function readTable(id, name, step) {
  return kept(id, pathOf(`api/runs/${id}/table`, { name, step }), `table/${id}/${name}/${step}`);
}

/** Returns coordinates and colours of a point cloud. */
export function readPoints(id, file) {
  return kept(id, pathOf(`api/runs/${id}/points`, { file }), `points/${id}/${file}`);
}

/** Returns the address of a file of a run. */
export function fileUrl(id, file) {
  const parts = file.split("/").map(encodeURIComponent).join("/");
  return isExported ? `files/${id}/${parts}` : `api/runs/${id}/files/${parts}`;
}

// --- curves ---------------------------------------------------------------------------------------------------

/**
 * Returns a series for each run and each writer that has the metric; with `known`, only new values (see `after` of the
 * API).
 *
 * @param {{runs: string[], metrics: string[], x: string, from?: number, to?: number, points?: number,
 *   branches?: boolean, known?: {cursor?: string}[]}} query as of `/api/series`.
 */
export async function readSeries({ runs, metrics, x, from, to, points, branches, known }) {
  if (isExported) {
    const ofRun = (id) => metrics.map((metric) => siteSeries(id, metric, x, from, to));
    return (await Promise.all(runs.flatMap(ofRun))).flat();
  }
  if (known) return newSeries({ runs, metric: metrics[0], x, points, known });
  const query = { run: runs, metric: metrics, x, from, to, points, branches: branches ? "1" : "" };
  return (await keptCurves(pathOf("api/series", query), runs)).series;
}

/** Requests for new values that are being collected, by what they share. */
const asking = new Map();
/** The most series of a request; the server accepts twice as many. */
const MOST_SERIES = 1000;

/** Returns new values; charts of the same runs share one request. */
function newSeries({ runs, metric, x, points, known }) {
  const key = JSON.stringify([runs, x, points]);
  let question = asking.get(key);
  if (!question || question.members.length * runs.length >= MOST_SERIES) {
    const members = [];
    question = { members, answer: Promise.resolve().then(() => askNew(key, question, { runs, x, points })) };
    asking.set(key, question);
  }
  question.members.push({ metric, known });
  return question.answer.then(({ series }) => series.filter((one) => one.metric === metric));
}

function askNew(key, question, { runs, x, points }) {
  const { members } = question;
  if (asking.get(key) === question) asking.delete(key);
  const cursors = members.flatMap(({ known }) => known.map(({ cursor }) => cursor ?? "")).filter(Boolean);
  const query = { run: runs, metric: members.map((one) => one.metric), x, points };
  const after = cursors.map((cursor) => `&after=${encodeURIComponent(cursor)}`).join("");
  return newestFirst(() => ask(pathOf("api/series", query) + after));
}

/** Answers with curves, by request; curves of ended runs are kept. */
const curves = new Map();
const MOST_CURVES = 256;

function keptCurves(path, runs) {
  const held = curves.get(path);
  curves.delete(path);
  if (held) {
    curves.set(path, held);
    return held.answer;
  }
  const answer = newestFirst(() => ask(path));
  const isLive = runs.some((id) => runInfo(id).alive || !infos.has(id));
  if (!isLive) {
    curves.set(path, { answer, runs: new Set(runs) });
    answer.then(
      ({ series }) => series?.some((one) => one.unread) && curves.delete(path),
      () => curves.delete(path),
    );
    if (curves.size > MOST_CURVES) curves.delete(curves.keys().next().value);
  }
  return answer;
}

function forgetCurves(id) {
  for (const [path, held] of curves) if (held.runs.has(id)) curves.delete(path);
}

/** Requests for curves at a time: a browser has six connections to a server, and one waits for changes. */
const MOST_ASKED = 3;
const waiting = [];
let asked = 0;

/** Queues a request, the newest first: it belongs to a chart that just came into view. */
function newestFirst(act) {
  return new Promise((resolve, reject) => {
    waiting.push({ act, resolve, reject });
    askNext();
  });
}

async function askNext() {
  if (asked >= MOST_ASKED) return;
  const next = waiting.pop();
  if (!next) return;
  asked += 1;
  try {
    next.resolve(await next.act());
  } catch (error) {
    next.reject(error);
  } finally {
    asked -= 1;
    askNext();
  }
}

async function siteSeries(id, metric, x, from, to) {
  try {
    const { further = [], ...first } = await fromSite(`series/${id}/${metric}`);
    return [first, ...further].map((held) => partOf(held, x, from, to));
  } catch (error) {
    return [withoutPoints({ run: id, metric }, error)];
  }
}

/** Returns the shown part of a series of an exported site. */
function partOf(held, x, from, to) {
  try {
    if (!held[x]) throw new DataError("This x axis needs the server: destinations view.");
    const low = from === undefined ? -Infinity : Number(from),
      high = to === undefined ? Infinity : Number(to);
    const inside = held[x]
      .map((value, index) => ({ value, index }))
      .filter(({ value }) => value >= low && value <= high)
      .map(({ index }) => index);
    const of = (list) => list && inside.map((index) => list[index]);
    return {
      ...held,
      x: of(held[x]),
      y: of(held.y),
      low: of(held.low),
      high: of(held.high),
      nan: x === "step" ? held.nan : [],
      inf: x === "step" ? held.inf : [],
      append: false,
    };
  } catch (error) {
    return withoutPoints(held, error);
  }
}

/** Returns an empty series with an error. */
function withoutPoints({ run, metric, writer = "" }, error) {
  return {
    run,
    metric,
    writer,
    x: [],
    y: [],
    low: null,
    high: null,
    nan: [],
    inf: [],
    merged: 1,
    rows: 0,
    error: error.message,
  };
}

/** Returns min, median and max over runs or ranks. */
export async function readBands(query) {
  if (isExported) throw new DataError("Bands need the server: destinations view.");
  const { runs, ...rest } = query;
  return (await keptCurves(pathOf("api/band", { run: runs, ...rest }), runs)).bands;
}

// --- live -----------------------------------------------------------------------------------------------------

/** Calls a function with `{all, table, order, runs}` whenever data changes, until the returned function is called. */
export function dataChanges(watcher) {
  watchers.add(watcher);
  return () => watchers.delete(watcher);
}

/** Sets the shown runs: the server reports new rows of these only. */
export function follow(ids) {
  if (ids.length === followed.size && ids.every((id) => followed.has(id))) return;
  followed.clear();
  for (const id of ids) followed.add(id);
  polling?.abort();
}

/** Asks for changes, over and over, except while the page is hidden. Calls `told` with an error, or null. */
export async function watchChanges(told) {
  if (isExported) return;
  // The version from before the first request, so that no change in between is missed.
  let since = await serverInfo().then(
    ({ version }) => version,
    () => "",
  );
  for (;;) {
    if (document.hidden)
      await new Promise((resolve) => {
        document.addEventListener("visibilitychange", resolve, { once: true });
      });
    const question = new AbortController();
    polling = question;
    // A connection that died with a sleep or a network isn't always reported.
    const late = setTimeout(() => question.abort(new DataError("late")), MOST_POLL_MS);
    try {
      // Without a version, the server reports everything as new.
      const query = { since: isBehind ? "" : since, run: [...followed] };
      const answer = await ask(pathOf("api/changes", query), { signal: question.signal });
      told(null);
      isBehind = false;
      since = answer.version;
      for (const [id, what] of Object.entries(answer.runs)) {
        if (what.record || what.gone) {
          forget(id);
          selected.delete(id);
        }
        forgetCurves(id);
      }
      if (answer.all) {
        curves.clear();
        selected.clear();
      }
      if (answer.table) forget("selected");
      if (answer.all) for (const mark of new Set([...answers.values()].map((one) => one.mark))) forget(mark);
      if (answer.fields !== fieldsNow) forget("fields");
      fieldsNow = answer.fields;
      const runs = Object.entries(answer.runs);
      const changed = {
        all: Boolean(answer.all),
        table: Boolean(answer.table || answer.all),
        // Whether other runs may match, or the order may change.
        order: Boolean(answer.all || runs.some(([, { gone, order }]) => gone || order)),
        runs: answer.runs,
      };
      if (changed.table || Object.keys(changed.runs).length)
        for (const watcher of [...watchers]) watcher(changed);
    } catch (error) {
      if (error.name === "AbortError") continue;
      told(error.message);
      await new Promise((resolve) => {
        setTimeout(resolve, RETRY_MS);
      });
    } finally {
      clearTimeout(late);
    }
  }
}
