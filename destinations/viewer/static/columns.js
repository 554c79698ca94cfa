/** The runs of Explore and their columns: values, the order of words, and places on axes. */

import { listFields, listRuns } from "./data.js";
import { formatApart, formatNumber, formatTime, shorten } from "./dom.js";
import { metricRank } from "./names.js";
import { numbersOf, state, viewQuery } from "./state.js";
import { ticksOf } from "./ticks.js";
import { View } from "./view.js";

const MOST_SHOWN = 1000;
const MOST_AXES_SHOWN = 12;
const MOST_COLUMNS = 300;
export const MOST_TICKS = 12;

/** Whether an axis is logarithmic: as chosen ("0" or "1"), or else if positive values span two decades. */
export function isLog(chosen, values) {
  if (chosen !== "") return chosen === "1";
  const numbers = values.filter((value) => typeof value === "number");
  const least = Math.min(...numbers);
  return (
    numbers.length > 1 && numbers.length === values.length && least > 0 && Math.max(...numbers) / least >= 100
  );
}

/** Returns a distinct text for each value. */
export function labelsOf(values) {
  const texts = formatApart(values);
  return new Map(values.map((value, at) => [value, texts[at]]));
}

/** Returns the name of a column without its group. */
export function bare(name) {
  return shorten(name.replace(/^(summary|hparams)\./, ""), 60);
}

export function valueIn(row, name) {
  // None has no place on an axis.
  return (name === "created_at" || name === "status" ? row[name] : row.values[name]) ?? undefined;
}

/** Returns a value of a column as a text. */
export function textIn(row, name) {
  const value = valueIn(row, name);
  return name === "created_at" ? formatTime(value) : shorten(formatNumber(value), 40);
}

/** Returns the columns named in the link. */
function asked() {
  return [state.sx, state.sy, state.sc].filter((name) => /^(hparams|summary)\./.test(name));
}

/** Returns the axis of numbers, as `axisOf` does. Positive values over two decades are on a log scale. */
function axisOfNumbers(values, isTime) {
  const low = values.length ? Math.min(...values) : 0,
    high = values.length ? Math.max(...values) : 0;
  const isLogAxis = isLog("", values);
  const to = isLogAxis ? Math.log10 : (value) => value;
  // Halves, because the distance of two huge numbers of opposite sign is infinite.
  const share = (value) => (to(value) / 2 - to(low) / 2) / (to(high) / 2 - to(low) / 2);
  const place = (value) =>
    typeof value === "number" && Number.isFinite(value) ? (high / 2 > low / 2 ? share(value) : 0.5) : null;
  // Ticks at the values themselves, unless they would overlap.
  const few = [...new Set(values)].sort((one, other) => one - other);
  const isFew =
    few.length <= MOST_TICKS &&
    few.every((value, at) => !at || (place(value) ?? 0) - (place(few[at - 1]) ?? 0) > 0.04);
  if (isFew)
    return { place, ticks: few.map((value) => [place(value), (isTime ? formatTime : formatNumber)(value)]) };
  const ticks = ticksOf(isTime ? "date" : isLogAxis ? "log" : "linear", [low, high], 5);
  return { place, ticks: ticks.map(([value, text]) => [place(value), text]) };
}

/** Returns the axis of words, as `axisOf` does. */
function axisOfWords(words) {
  const place = (value) => {
    const at = words.indexOf(value);
    return at < 0 ? null : words.length > 1 ? at / (words.length - 1) : 0.5;
  };
  const labels = labelsOf(words);
  return { place, ticks: words.slice(0, 20).map((word) => [place(word), shorten(labels.get(word), 14)]) };
}

/** Returns the runs of the view with one column, in its order. */
export async function inOrderOf(name) {
  return (await listRuns({ ...viewQuery(), columns: [name], sort: name, limit: MOST_SHOWN })).rows;
}

/** The data of the plots. Requests go through the view; `told` hears of new data. */
export class RunColumns {
  /**
   * @param {View} view of the page.
   * @param {{arrived: () => void, complain: (error: Error | null) => void}} [told] `arrived` is called when
   *   runs have come, `complain` with an error, or null.
   */
  constructor(view, told = { arrived: () => {}, complain: () => {} }) {
    this.view = view;
    this.told = told;
    this.fields = [];
    this.rows = [];
    this.total = 0;
    /** The columns of the loaded rows. */
    this.loaded = new Set();
    /** The values of columns of words, in the server's order. */
    this.orders = new Map();
  }

  /** Requests the columns and the runs that match. */
  load() {
    return this.view.ask(
      async (isOld) => {
        const { fields } = await listFields();
        if (!isOld()) this.fields = fields;
        // If there are too many columns, show the link's own and some of both kinds.
        const known = [...this.hparams.slice(0, MOST_COLUMNS / 2), ...this.metrics, ...this.hparams];
        const names = [...new Set([...asked().filter((name) => known.includes(name)), ...known])];
        const columns = names.slice(0, MOST_COLUMNS);
        return { ...(await listRuns({ ...viewQuery(), columns, limit: MOST_SHOWN })), columns };
      },
      ({ columns, rows, total }) => {
        this.told.complain(null);
        this.loaded = new Set(columns);
        [this.rows, this.total] = [rows, total];
        this.orders.clear();
        this.sortWords();
      },
      this.told.complain,
    );
  }

  /** Requests the order of words on axes if it isn't known yet. */
  async sortWords() {
    const { rows } = this;
    const names = [...new Set([this.chosen().sx, state.sc, ...this.axes()])].filter(
      (name) => this.isOfWords(name) && !this.orders.has(name),
    );
    // If that fails, words come in the order of the runs.
    const sorted = await Promise.all(names.map((name) => inOrderOf(name).catch(() => rows)));
    if (this.view.isGone || rows !== this.rows) return;
    for (const [at, name] of names.entries()) this.setOrder(name, sorted[at]);
    this.told.arrived();
  }

  /** Sets the order of the words of a column, from rows in that order. */
  setOrder(name, sorted) {
    this.orders.set(name, [...new Set([...sorted, ...this.rows].map((row) => valueIn(row, name)))]);
  }

  /** Whether the rows have the columns of the link. */
  get hasAsked() {
    return asked().every((name) => this.loaded.has(name));
  }

  get hparams() {
    return this.named("hparams.", ["number", "bool", "text"]);
  }

  get metrics() {
    return this.named("summary.", ["number"]);
  }

  named(group, kinds) {
    const found = this.fields.filter(({ name, kind }) => name.startsWith(group) && kinds.includes(kind));
    return found.map(({ name }) => name);
  }

  /** Returns the chosen columns; by default a hyperparameter that differs and a metric of evaluation. */
  chosen() {
    const { hparams } = this;
    const varied = hparams.filter((name) => new Set(this.rows.map((row) => row.values[name])).size > 1);
    const main = this.metrics.toSorted((one, other) => metricRank(one) - metricRank(other))[0];
    const rate = varied.find((name) => /lr|learning/i.test(name));
    return {
      sx: state.sx || rate || varied[0] || hparams[0] || "created_at",
      sy: state.sy || main || "",
      varied,
    };
  }

  /** Returns the axes of the parallel coordinates. */
  axes() {
    const every = this.everyAxis();
    return [...every.slice(0, Math.min(MOST_AXES_SHOWN, every.length) - 1), every.at(-1)].filter(Boolean);
  }

  /** Returns all possible axes: the x axis of the plot comes first, the metric last. */
  everyAxis() {
    const { sx, sy, varied } = this.chosen();
    const first = varied.includes(sx) ? [sx] : [];
    const shown = [...new Set([...first, ...varied])].filter((name) => !state.hide.includes(name));
    return [...shown, sy].filter(Boolean);
  }

  isOfWords(name) {
    return this.rows.some(
      (row) => valueIn(row, name) !== undefined && typeof valueIn(row, name) !== "number",
    );
  }

  /** Returns the different values of a column, in order. */
  wordsOf(name) {
    const there = new Set(this.rows.map((row) => valueIn(row, name)));
    return (this.orders.get(name) ?? [...there]).filter((value) => value !== undefined && there.has(value));
  }

  /** Returns an axis: `place` from values to 0 to 1 (null for none), and `ticks` as places and texts. */
  axisOf(name) {
    const values = this.rows
      .map((row) => valueIn(row, name))
      .filter((value) => value !== undefined && value !== null && !Number.isNaN(value));
    return values.every((value) => typeof value === "number")
      ? axisOfNumbers(values.filter(Number.isFinite), name === "created_at")
      : axisOfWords(this.wordsOf(name));
  }

  /** Returns a function that tells whether a run is outside the ranges on the axes. */
  outside() {
    const ranges = this.axes()
      .map((name) => ({ name, range: numbersOf("brush", name) ?? [0, 1] }))
      .filter(({ range: [low, high] }) => low !== 0 || high !== 1)
      .map((one) => ({ ...one, place: this.axisOf(one.name).place }));
    return (row) =>
      ranges.some(({ name, range: [low, high], place }) => {
        const at = place(valueIn(row, name));
        return at === null || at < low || at > high;
      });
  }
}
