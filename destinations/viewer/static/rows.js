/** Rows of the table of runs, with their columns and groups; asks for a hundred rows at a time. */

import { listFields, listGroups, listRuns, rowsOf } from "./data.js";
import { isNarrow, shorten } from "./dom.js";
import { metricRank } from "./names.js";
import { isSteady, state, viewQuery } from "./state.js";
import { alignedTexts } from "./ticks.js";

const BLOCK = 100;
/** Columns that every run has, with headings and widths. */
export const FIXED = {
  status: { title: "Status", width: "106px" },
  created_at: { title: "Started", width: "100px" },
  duration: { title: "Duration", width: "88px" },
  tags: { title: "Tags", width: "minmax(110px, 0.9fr)" },
  note: { title: "Note", width: "minmax(110px, 1fr)" },
};
/** Fields that the columns of names and notes already show. */
const SHOWN_ALWAYS = ["run", "name", "notes"];
const MAX_AUTOMATIC = 4;
/** Pixels of the columns that every run has, and of another one: by default, the table has no more than fit. */
const WIDTH_OF_OTHERS = 800;
const WIDTH_OF_GROUPS = 520;
const WIDTH_OF_A_VALUE = 126;
/** A narrower window has no columns of dates and notes by default. */
const WIDTH_OF_ALL = 1200;
const MAX_CANDIDATES = 100;

/** Which value of a metric a column shows, by the group of its name. */
const SHOWN_OF_METRIC = { summary: "last", min: "min", max: "max" };

/** Returns "last", "min" or "max" for the column of a metric, and "" for other columns. */
export function shownOfMetric(name) {
  const group = name.split(".", 1)[0];
  return name.includes(".") && Object.hasOwn(SHOWN_OF_METRIC, group) ? SHOWN_OF_METRIC[group] : "";
}

/** Returns the column that shows the next of these values of the same metric. */
export function nextOfMetric(name) {
  const groups = Object.keys(SHOWN_OF_METRIC);
  const [group] = name.split(".", 1);
  return groups[(groups.indexOf(group) + 1) % groups.length] + name.slice(group.length);
}

/** Returns the field that `/api/fields` has for a column. */
function fieldOf(name) {
  return shownOfMetric(name) ? name.replace(/^(min|max)\./, "summary.") : name;
}

/** Whether a column of this name exists. */
export function isColumn(name, fields) {
  return name in FIXED || fields.some((field) => field.name === fieldOf(name));
}

/** Loads the rows of the table through its view, and reports what has arrived. */
export class RunRows {
  /**
   * @param {{ask: Function, isFailed: boolean, isGone: boolean}} view a `View`.
   * @param {{arrived: (isHead: boolean) => void, complain: (error: Error | null) => void, isHeld: () => boolean}} told
   *   `arrived` draws new rows, and the headings too if `isHead`; `complain` shows an error, or clears it for null;
   *   `isHeld` says whether the rows on the page must stay.
   */
  constructor(view, told) {
    this.view = view;
    this.told = told;
    this.fields = [];
    this.columns = [];
    this.total = 0;
    /** @type {{label: string, total: number, values?: Object<string, any>}[] | null} */
    this.groups = null;
    this.blocks = new Map();
    /** How the columns of groups look: `digits` after the point, and the `best` mean of the goal. */
    this.looks = new Map();
    /** @type {Promise<boolean> | null} */
    this.loaded = null;
    /** Headings and rows from top to bottom. Without groups it has one part; each open group adds one. */
    this.layout = [];
  }

  /** Returns the texts of a column of numbers, by value, in one notation for all loaded rows. */
  textsOf(name) {
    const rows = [...this.blocks.values()].flat();
    return alignedTexts(
      rows.map((row) => row.values[name]),
      false,
    );
  }

  /** Loads everything again; the old rows stay until the answer arrives. */
  reload() {
    this.loaded = this.view.ask(
      async (isOld) => {
        const { fields } = this.fields.length ? this : await listFields();
        if (!isOld()) this.fields = fields;
        const given = state.column.filter((name) => this.isKnown(name));
        const names = given.length ? given : await this.automaticColumns();
        const [groups, first] = await Promise.all([this.askGroups(names), this.askBlock(0, names)]);
        return { names, groups, first };
      },
      ({ names, groups, first }) => {
        this.columns = names;
        this.told.complain(this.missing());
        this.take(groups, new Map([[0, first]]));
        this.told.arrived(true);
      },
      this.told.complain,
    );
    return this.loaded;
  }

  /** Loads the blocks of some rows again; the old rows stay if the server doesn't answer. */
  async refresh(indexes) {
    /** @type {Promise<boolean> | null} */
    let awaited = null;
    while (awaited !== this.loaded) {
      awaited = this.loaded;
      await awaited;
    }
    const numbers = [...new Set(indexes().map((index) => Math.floor(index / BLOCK)))];
    if (!numbers.length) return;
    await this.view.ask(
      () =>
        Promise.all([
          this.askGroups(this.columns),
          ...numbers.map((number) => this.askBlock(number, this.columns)),
        ]),
      ([groups, ...answers]) => {
        if (this.told.isHeld()) return;
        this.take(groups, new Map(numbers.map((number, at) => [number, answers[at]])));
        this.told.arrived(false);
      },
      () => {},
    );
  }

  /**
   * Loads what has changed: single rows if they stay in their places, otherwise the blocks of the rows in view, and
   * everything if there are new columns or the last request failed.
   */
  async freshen(indexes, changed) {
    const known = this.fields.length;
    this.fields = (await listFields().catch(() => this)).fields;
    if (this.fields.length !== known || this.view.isFailed) await this.reload();
    else if (!changed.order && isSteady()) await this.renew(Object.keys(changed.runs));
    else await this.refresh(indexes);
  }

  /** Loads some of the loaded rows again. */
  async renew(ids) {
    const there = ids.filter((id) => this.indexOf(id) >= 0);
    if (!there.length) return;
    const rows = await rowsOf(there, this.columns).catch(() => []);
    if (this.view.isGone || this.told.isHeld()) return;
    for (const row of rows) {
      const at = this.indexOf(row.id);
      if (at >= 0) this.blocks.get(Math.floor(at / BLOCK))[at % BLOCK] = row;
    }
    this.told.arrived(false);
  }

  take(groups, answers) {
    this.groups = groups;
    this.looks = new Map(this.columns.map((name) => [name, this.lookOf(name)]));
    this.total = [...answers.values()][0].total;
    this.blocks = new Map([...answers].map(([number, { rows }]) => [number, rows]));
    this.lay();
  }

  /** Returns how a column of groups looks: two digits of the median deviation, and the best mean of the goal. */
  lookOf(name) {
    const found = (this.groups ?? []).map(({ values }) => values?.[name]).filter(Boolean);
    const deviations = found
      .map(({ std }) => std)
      .filter(Boolean)
      .sort((one, other) => one - other);
    const usual = deviations[deviations.length >> 1];
    const means = found.map(({ mean }) => mean);
    return {
      digits: usual ? Math.max(0, 1 - Math.floor(Math.log10(usual))) : -1,
      best: name === state.goal && means.length ? Math[state.goal.slice(0, 3)](...means) : undefined,
    };
  }

  /** Returns the best value of the goal among the loaded rows, if the table shows the goal. */
  bestOfGoal() {
    if (!this.columns.includes(state.goal)) return undefined;
    const rows = [...this.blocks.values()].flat();
    const values = rows.map((row) => row.values[state.goal]).filter(Number.isFinite);
    const isMax = state.goal.startsWith("max.");
    return values.reduce((best, one) => (isMax === one > best ? one : best), values[0]);
  }

  /** Returns a row; undefined until its block has arrived. */
  at(index) {
    const number = Math.floor(index / BLOCK);
    if (!this.blocks.has(number)) this.fetchBlock(number);
    return this.blocks.get(number)[index % BLOCK];
  }

  /** Returns the place of a run among the loaded rows, or -1. */
  indexOf(id) {
    for (const [number, rows] of this.blocks) {
      const at = rows.findIndex((row) => row.id === id);
      if (at >= 0) return number * BLOCK + at;
    }
    return -1;
  }

  async fetchBlock(number) {
    const asked = this.blocks;
    asked.set(number, []);
    try {
      asked.set(number, (await this.askBlock(number, this.columns)).rows);
    } catch {
      asked.delete(number);
      return;
    }
    if (asked === this.blocks) this.told.arrived(false);
  }

  isKnown(name) {
    return isColumn(name, this.fields);
  }

  /** Returns the kind of a column's values, as in `/api/fields`; "" for the columns of `FIXED`. */
  kindOf(name) {
    return name in FIXED ? "" : (this.fields.find((field) => field.name === fieldOf(name))?.kind ?? "");
  }

  /** Returns the names of all columns that the reader can choose. */
  get choices() {
    const others = this.fields.map(({ name }) => name).filter((name) => !(name in FIXED));
    return [...Object.keys(FIXED), ...others.filter((name) => !SHOWN_ALWAYS.includes(name))];
  }

  /** Returns an error that names the columns of a link that these runs don't have, or null. */
  missing() {
    const asked = [...state.column, state.sort.replace(/^-/, ""), ...state.group].filter(Boolean);
    const left = [...new Set(asked.filter((name) => !this.isKnown(name)))].map((name) => shorten(name, 60));
    return left.length
      ? new Error(
          `These runs have no ${left.join(", ")}: the table is shown without ${left.length > 1 ? "them" : "it"}.`,
        )
      : null;
  }

  question() {
    const view = viewQuery();
    const sort = this.isKnown(view.sort.replace(/^-/, "")) ? view.sort : "";
    return { ...view, sort, group: state.group.filter((name) => this.isKnown(name)) };
  }

  askGroups(names) {
    const shown = names.filter((name) => this.kindOf(name) === "number");
    const goal = this.isKnown(state.goal) ? state.goal : "";
    const columns = [...new Set([...shown, goal].filter(Boolean))];
    return this.question().group.length ? listGroups({ ...this.question(), columns }) : null;
  }

  askBlock(number, names) {
    return listRuns({ ...this.question(), columns: names, offset: number * BLOCK, limit: BLOCK });
  }

  /** Returns up to 1,000 rows without values of columns. */
  async ask(first, limit) {
    return (await listRuns({ ...this.question(), columns: [], offset: first, limit })).rows;
  }

  /**
   * Returns the default columns: the goal, the most telling metrics, and the hyperparameters in which the first runs
   * differ. On a phone, these are the status and one metric.
   */
  async automaticColumns() {
    const metrics = this.fields
      .filter(({ name, kind }) => name.startsWith("summary.") && kind === "number")
      .map(({ name }) => name)
      .sort((one, other) => metricRank(one) - metricRank(other));
    if (this.isKnown(state.goal)) metrics.unshift(state.goal);
    if (isNarrow()) return [...(state.group.length ? [] : ["status"]), ...metrics.slice(0, 1)];
    const candidates = this.fields
      .map(({ name }) => name)
      .filter((name) => name.startsWith("hparams.") && !state.group.includes(name))
      .slice(0, MAX_CANDIDATES);
    const { rows } = await listRuns({ columns: candidates, limit: BLOCK });
    const varied = candidates.filter(
      (name) => new Set(rows.map((row) => row.values[name]).filter((value) => value !== undefined)).size > 1,
    );
    const isGrouped = state.group.length > 0;
    const others = isGrouped ? WIDTH_OF_GROUPS : WIDTH_OF_OTHERS;
    const isSlim = innerWidth < WIDTH_OF_ALL;
    const room = Math.max(2, Math.floor((innerWidth - others) / WIDTH_OF_A_VALUE));
    const count = Math.min(MAX_AUTOMATIC, Math.max(Math.ceil(room / 2), room - varied.length));
    const values = [...metrics.slice(0, count), ...varied.slice(0, Math.min(MAX_AUTOMATIC, room - count))];
    // A group has no date, tags and note.
    if (isGrouped) return ["status", "duration", ...values];
    return [
      "status",
      ...(isSlim ? [] : ["created_at"]),
      "duration",
      "tags",
      ...values,
      ...(isSlim ? [] : ["note"]),
    ];
  }

  lay() {
    if (!this.groups) {
      this.layout = [{ top: 0, rows: this.total, first: 0 }];
      return;
    }
    this.layout = [];
    let top = 0,
      next = 0;
    const placed = this.groups.map((group) => {
      const first = next;
      next += group.total;
      return { group, first };
    });
    for (const { group, first } of placed.sort(
      (one, other) => this.distance(one) - this.distance(other) || 0,
    )) {
      const isFolded = !state.unfold.includes(group.label);
      this.layout.push({ top, heading: group, rows: 0, first });
      top += 1;
      if (!isFolded) this.layout.push({ top, rows: group.total, first });
      if (!isFolded) top += group.total;
    }
  }

  /** Returns the mean of the goal in a group, negated if the largest is best: the best group comes first. */
  distance({ group }) {
    if (!state.goal || state.sort) return 0;
    const mean = group.values?.[state.goal]?.mean ?? Infinity;
    return state.goal.startsWith("max.") && mean !== Infinity ? -mean : mean;
  }

  /** The number of visible headings and rows. */
  get height() {
    return this.layout.reduce((sum, part) => sum + (part.heading ? 1 : part.rows), 0);
  }

  /** Returns the place of a row from the top; 0 if its group is folded. */
  placeOf(index) {
    const part = this.layout.find(
      (one) => !one.heading && index >= one.first && index < one.first + one.rows,
    );
    return part ? part.top + index - part.first : 0;
  }
}
