/** Names of metrics and runs: what a name says about a metric, the order of charts, and short labels. */

import { formatApart, formatTime } from "./dom.js";

const LEAST_CUT = 6;
const MOST_SETTINGS = 4;

/** Metrics about time and speed. Like metrics of the machine, they differ between any two runs. */
const TIMING =
  /(^|[/._-])(times?|secs?|seconds?|ms|duration|elapsed|eta|remaining\w*|wall\w*|speed|throughput|fps|it_?s|\w*per_(s|sec|second|minute|hour)|utili[sz]ation|mfu)($|[/._-])/i;
const MACHINE =
  /^(mem|memory|system|sys|gpu|cpu|host|disk|network|device|cuda)([/._-]|$)|(^|[/._-])(memory|mem|\w*_mem|vram|rss|temperature|power)($|[/._-](w|watts?|[gm]i?b|bytes|allocated|reserved|used|free|peak|max|percent)($|[/._-]))/i;
const EVALUATION = /^(val|valid|validation|eval|evaluation|test|dev)([/._-]|$)/i;
const TRAINING = /^(train|training|loss|acc\w*|reward|score)([/._-]|$)/i;

/** Whether a metric is a time, a speed, or a load of the machine. */
export function isTiming(name) {
  return TIMING.test(name) || MACHINE.test(name);
}

/**
 * Returns the rank of a name among charts: evaluation first, times and the machine late, and constant metrics last.
 *
 * @param {string} name
 * @param {Set<string>} [constants] the metrics that never change.
 */
export function chartRank(name, constants) {
  if (constants?.has(name)) return 5;
  if (MACHINE.test(name)) return 4;
  if (TIMING.test(name)) return 3;
  return EVALUATION.test(name) ? 0 : TRAINING.test(name) ? 1 : 2;
}

/** Returns the rank of a metric by what it tells of a run: accuracy and loss of evaluation come first. */
export function metricRank(name) {
  const kinds = [/(val|test|eval).*acc/i, /acc/i, /(val|test|eval).*loss/i, /loss|reward|score|f1|bleu/i];
  return kinds.findIndex((kind) => kind.test(name)) >>> 0;
}

/**
 * Returns names without their common beginning, cut at the end of a word: "…lr0.1-seed2".
 *
 * @param {string[]} names
 * @returns {string[]}
 */
function cutNames(names) {
  const [first = "", ...others] = [...new Set(names)];
  let shared = others.length ? first.length : 0;
  for (const name of others) {
    let at = 0;
    while (at < shared && name[at] === first[at]) at += 1;
    shared = at;
  }
  const cut = first.slice(0, shared).search(/[^-_/ :=]*$/);
  return cut < LEAST_CUT ? names : names.map((name) => `…${name.slice(cut)}`);
}

/**
 * Returns a label for each run: its short name, and its start time if another run has the same name.
 *
 * @param {{name: string, created_at?: number}[]} runs
 */
export function runLabels(runs) {
  const names = runs.map(({ name }) => name);
  const isAlone = (name) => names.indexOf(name) === names.lastIndexOf(name);
  const short = cutNames(names);
  return runs.map(({ name, created_at }, at) =>
    isAlone(name) ? short[at] : `${short[at]} · ${formatTime(created_at, true)}`,
  );
}

/**
 * Returns, by id, the hyperparameters in which runs differ, as "lr 0.1 · seed 2"; "" if all runs are alike.
 *
 * @param {{id: string, values: Object<string, any>}[]} rows with hyperparameters in `values`.
 */
export function differingSettings(rows) {
  const names = [...new Set(rows.flatMap(({ values }) => Object.keys(values)))].filter(
    (name) =>
      name.startsWith("hparams.") &&
      new Set(rows.map(({ values }) => values[name])).size > 1 &&
      rows.length > 1,
  );
  // First the ones that most runs have, then the learning rate, then short names: a legend is narrow.
  const weight = (name) => [
    -rows.filter(({ values }) => values[name] !== undefined).length,
    /(^|[._])(lr|learning_?rate)$/i.test(name) ? 0 : 1,
    name.length,
  ];
  const order = names.map((name) => ({ name, weight: weight(name) }));
  order.sort(
    ({ weight: one }, { weight: other }) => one[0] - other[0] || one[1] - other[1] || one[2] - other[2],
  );
  const shown = order.slice(0, MOST_SETTINGS).map(({ name }) => name);
  const texts = shown.map((name) => formatApart(rows.map(({ values }) => values[name])));
  const text = ({ values }, place) =>
    shown
      .map((name, column) => ({ name, value: texts[column][place] }))
      .filter(({ name }) => values[name] !== undefined)
      .map(
        ({ name, value }) =>
          `${name
            .replace(/^hparams\./, "")
            .split(".")
            .at(-1)} ${value}`,
      )
      .join(" · ");
  return new Map(rows.map((row, place) => [row.id, text(row, place)]));
}

const REGULAR = /\.[*+?]|[\\^$()|]/;

/**
 * Returns a function that says whether a name has all words of a text, in any order and case.
 *
 * A word may also be a glob (`layer07/*norm`) or a regular expression, with or without slashes around it.
 *
 * @param {string} text
 * @returns {(name: string) => boolean}
 */
export function matcherOf(text) {
  const tests = text.split(/\s+/).filter(Boolean).map(testOf);
  return (name) => tests.every((test) => test(name));
}

function testOf(word) {
  const slashed = /^\/(.+)\/$/.exec(word)?.[1];
  const glob = /[*?[]/.test(word) && word.replace(/[.+]/g, "\\$&").replaceAll("*", ".*").replaceAll("?", ".");
  const pattern = slashed ?? (REGULAR.test(word) ? word : glob);
  try {
    if (pattern) {
      const expression = new RegExp(pattern, "i");
      return (name) => expression.test(name);
    }
  } catch {
    // The expression is incomplete, or the reader means the characters themselves.
  }
  return (name) => name.toLowerCase().includes(word.toLowerCase());
}
