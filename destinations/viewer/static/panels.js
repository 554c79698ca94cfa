/** The panels of a run's page: settings, results and costs. */

import { fileUrl, isExported } from "./data.js";
import { el, formatAge, formatBytes, formatDuration, formatNumber, formatTime, shorten } from "./dom.js";
import { cell, flatten, pairTable, plainTable } from "./table.js";
import { faultTable } from "./time.js";

const WRAPPED = { "white-space": "pre-wrap", "overflow-wrap": "anywhere" };

/**
 * Returns the panels of a run, from top to bottom: title, content, and optionally a class.
 *
 * @param {string} id
 * @param {Object<string, any>} detail
 * @param {HTMLElement | null} metrics the content of the panel of metrics; null for no such panel.
 */
export function panelsOf(id, detail, metrics) {
  const { problem, errors, flight, time, writers, sessions, branches, checkpoints, artifacts } = detail;
  const hyperparameters = flatten(detail.hyperparameters ?? {}).filter(([name]) => name);
  const environment = environmentOf(detail.environment ?? {});
  const packages = Object.entries(detail.environment?.packages ?? {});
  const damaged = Object.entries(detail.damaged_lines ?? {}).filter(([, count]) => count);
  return [
    ["Something could not be read", problem && el("p.bad", shorten(problem, 2000))],
    ["Errors", errors?.length && el("div.body", errors.map(errorText)), "wide"],
    ["Flight recording", flight?.summary.length && flightOf(flight), "wide"],
    ["Faults", time?.faults.length && faultTable(time.faults), "wide"],
    ["Metrics", metrics, "wide"],
    ["Writers", writers?.length && writersOf(writers)],
    [
      "Hyperparameters",
      hyperparameters.length ? scroll(pairTable(hyperparameters)) : el("p", "None were logged."),
    ],
    ["What logging cost", costOf(detail)],
    ["Sessions", sessions?.length && sessionsOf(sessions)],
    ["Left by a resume", branches?.length && branchesOf(branches)],
    ["Checkpoints", checkpoints?.length && checkpointsOf(id, checkpoints)],
    ["Artifacts", artifacts?.length && artifactsOf(id, artifacts)],
    ["Code", Object.keys(detail.git ?? {}).length && scroll(pairTable(flatten(detail.git)))],
    ["Environment", environment.length > 1 && scroll(pairTable(environment))],
    [`Packages (${packages.length})`, packages.length && scroll(pairTable(packages))],
    ["Damaged lines", damaged.length && scroll(pairTable(damaged))],
  ].filter(([, content]) => content);
}

function scroll(content) {
  return el("div", { class: "scroll", tabIndex: 0 }, content);
}

function errorText({ kind, count, text }) {
  const times = count > 1 ? ` (${count} times)` : "";
  return el("pre", { class: "bad", style: WRAPPED }, `${kind}${times}: ${shorten(text, 4000)}`);
}

function flightOf({ summary, ranks }) {
  const lineOf = (frame) => `${frame.place} in ${frame.function}${frame.code ? `\n    ${frame.code}` : ""}`;
  return el(
    "div.body",
    summary.map((line) => el("p.bad", shorten(line, 2000))),
    ranks.map((one) =>
      el(
        "details",
        el("summary", `Rank ${one.rank}, ${formatTime(one.time)}: where it was`),
        el("pre", { style: WRAPPED }, one.stack.map(lineOf).join("\n")),
      ),
    ),
  );
}

function writersOf(writers) {
  const seen = (time) => (time ? `${formatTime(time)} (${formatAge(time)})` : "–");
  const rows = writers.map((one) => [
    shorten(one.name, 100),
    one.status,
    one.rows === null ? cell("bad", "cannot be read") : cell("number", one.rows),
    cell("time", seen(one.seen_at)),
  ]);
  return scroll(plainTable(rows, ["Writer", "Status", "Rows", "Last sign of life"]));
}

function costOf(detail) {
  const cost = detail.overhead ?? {};
  const micros = (value) => (value == null ? null : `${formatNumber(value)} µs`);
  const pairs = [
    ["Calls", cost.calls],
    ["A call, median", micros(cost.p50_us)],
    ["A call, 99th percentile", micros(cost.p99_us)],
    ["In all, about", cost.calls && cost.p50_us ? formatDuration((cost.calls * cost.p50_us) / 1e6) : null],
    ["Metrics on disk", cost.csv_bytes !== undefined ? formatBytes(cost.csv_bytes) : null],
    ["Safe on disk to step", cost.safe_on_disk_to_step],
    ["Media files", cost.media?.files],
    ["Rows waiting", cost.waiting_rows || null],
    ["Refused", cost.refused || null],
    ["Damaged bytes", cost.damaged_bytes || null],
  ].filter(([, value]) => value != null);
  const lost = Object.entries(detail.lost ?? {}).filter(([, count]) => count);
  if (!pairs.length && !lost.length) return el("p", "Not measured for this kind of run.");
  const text = lost.length
    ? `Lost: ${lost.map(([kind, count]) => `${count} ${kind}`).join(", ")}.`
    : "Nothing was lost.";
  return [scroll(pairTable(pairs)), el("p", { class: lost.length ? "bad" : "" }, text)];
}

function sessionsOf(sessions) {
  const rows = sessions.map((one) => [
    cell("time", formatTime(one.start)),
    one.end ? formatDuration(one.end - one.start) : "–",
    el("td", { title: shorten(one.exception ?? "", 500) }, one.status ?? "–"),
    one.resume_step ?? "the start",
    shorten(one.host ?? "–", 60),
  ]);
  return scroll(plainTable(rows, ["Started", "Duration", "Status", "From step", "Host"]));
}

function branchesOf(branches) {
  const texts = branches.map(
    (one) => `After step ${formatNumber(one.from_step)}: ${one.file}${one.rank ? ` (rank ${one.rank})` : ""}`,
  );
  return el("p", texts.join("; "), ". Charts show these rows as dotted lines.");
}

function checkpointsOf(id, checkpoints) {
  const rows = checkpoints.map((one) => [
    el("td", { dir: "auto", title: shorten(one.path, 500) }, linked(id, one)),
    cell("number", formatBytes(one.size)),
    cell("muted time", formatTime(one.time)),
    one.exists ? cell("good", "there") : cell("bad", "missing"),
  ]);
  return scroll(plainTable(rows));
}

/** Returns the name of a file, as a link if the server has the file. */
function linked(id, { file, name }) {
  const text = shorten(name, 120);
  return file && !isExported ? el("a", { class: "link", href: fileUrl(id, file), download: "" }, text) : text;
}

function artifactsOf(id, artifacts) {
  const arrival = (arrived) =>
    arrived
      ? cell("good", "arrived")
      : arrived === false
        ? cell("bad", "not arrived")
        : cell("muted", "unknown");
  const rows = artifacts.map((one) => [
    [linked(id, one), one.uri && el("div.muted.mono", shorten(one.uri, 200))],
    cell("number", formatBytes(one.size)),
    arrival(one.arrived),
  ]);
  return scroll(plainTable(rows));
}

/** Returns what is known about host and process, without what other panels show; the time comes first. */
function environmentOf({ packages, git, time, ...others }) {
  const pairs = flatten(others);
  if (time) pairs.unshift(["time", formatTime(time)]);
  return pairs;
}
