/** How a run spent its time: a band of parts, and the cost of each fault. */

import { el, formatDuration, formatNumber, formatTime } from "./dom.js";
import { cell, plainTable } from "./table.js";

/** The buckets of each part of the band; further buckets are "other". */
const PARTS = {
  training: ["batch", "forward", "backward", "optimizer"],
  data: ["data"],
  evaluation: ["evaluation"],
  checkpoints: ["checkpoint"],
  waiting: ["waiting"],
  starting: ["start", "restore"],
  repeated: ["repeated"],
  gone: ["gone", "stopped"],
};
/** Smaller parts are left out of the band. */
const LEAST_SHARE = 0.002;

/** Returns the seconds of each part of the band, in order, without parts that took next to no time. */
export function partsOf(time) {
  const left = { ...time.seconds };
  const parts = Object.entries(PARTS).map(([part, buckets]) => {
    const seconds = buckets.reduce((sum, name) => sum + (left[name] ?? 0), 0);
    for (const name of buckets) delete left[name];
    return { part, seconds };
  });
  const other = Object.values(left).reduce((sum, seconds) => sum + seconds, 0);
  return [...parts, { part: "other", seconds: other }].filter(
    ({ seconds }) => seconds >= time.wall * LEAST_SHARE && seconds > 0,
  );
}

/** Returns the band with goodput, and a note on who made others wait. */
export function timeBand(time) {
  const parts = partsOf(time);
  const text = ({ part, seconds }) =>
    `${part} ${((100 * seconds) / time.wall).toFixed(1)} %, ${formatDuration(seconds)}`;
  const buckets = Object.entries(time.seconds)
    .filter(([, seconds]) => seconds > 0)
    .map(([name, seconds]) => `${name} ${formatDuration(seconds)}`);
  return el(
    "div",
    { class: "time", "data-panel": "Time" },
    el(
      "p",
      { title: buckets.join("\n") },
      "Goodput ",
      el("b", `${(100 * time.goodput).toFixed(1)} %`),
      ` of ${formatDuration(time.wall)}`,
    ),
    el(
      "div",
      { class: "time-band", role: "img", "aria-label": parts.map(text).join("; ") },
      parts.map((one) =>
        el("span", {
          class: `time-${one.part}`,
          style: { "flex-grow": String(one.seconds) },
          title: text(one),
        }),
      ),
    ),
    el(
      "ul.time-legend",
      parts.map((one) => el("li", el("i", { class: `time-${one.part}` }), text(one))),
    ),
    time.slow && el("p.bad", time.slow),
  );
}

/** Returns the table of faults with their costs. */
export function faultTable(faults) {
  const costs = ["cost", "gone", "start", "restore", "repeated"];
  const rows = faults.map((one) => [
    one.status || "ended",
    formatTime(one.at),
    cell("number", formatNumber(one.step)),
    ...costs.map((name) => cell("number", formatDuration(one[name]))),
  ]);
  const head = ["Ended", "When", "At step", "Lost", "Gone", "Start", "Restore", "Repeated"];
  return el("div", { class: "scroll", tabIndex: 0 }, plainTable(rows, head));
}
