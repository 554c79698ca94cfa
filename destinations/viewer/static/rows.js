/** The rows of the table of runs: those in view, their columns and groups; asked for a hundred at a time. */

import { listFields, listGroups, listRuns, rowsOf } from "./data.js";
import { isNarrow, shorten } from "./dom.js";
import { isSteady, state, viewQuery } from "./state.js";
import { alignedTexts } from "./ticks.js";

const BLOCK = 100;
/** The columns that every run has, with their headings and widths. */
export const FIXED = {
  status: { title: "Status", width: "106px" },
  created_at: { title: "Started", width: "100px" },
  duration: { title: "Duration", width: "88px" },
  tags: { title: "Tags", width: "minmax(130px, 0.9fr)" },
  note: { title: "Note", width: "minmax(140px, 1fr)" },
};
/** Fields of the first column, and of the one of notes. */
const SHOWN_ALWAYS = ["run", "name", "notes"];
const MAX_AUTOMATIC = 4;
const MAX_CANDIDATES = 100;

/** What a column can show of a metric: its last value, the smallest, the largest. */
const SHOWN_OF_METRIC = { summary: "last", min: "min", max: "max" };

/** Returns what a column shows of a metric, "last", "min" or "max"; "" for other columns. */
export function shownOfMetric(name) {
  const group = name.split(".", 1)[0];
  return name.includes(".") && Object.hasOwn(SHOWN_OF_METRIC, group) ? SHOWN_OF_METRIC[group] : "";
}

/** Returns the column that shows the next thing of the same metric. */
export function nextOfMetric(name) {
  const groups = Object.keys(SHOWN_OF_METRIC);
  const [group] = name.split(".", 1);
  return groups[(groups.indexOf(group) + 1) % groups.length] + name.slice(group.length);
}

/** Returns the field that `/api/fields` has for a column. */
function fieldOf(name) {
  return shownOfMetric(name) ? name.replace(/^(min|max)\./, "summary.") : name;
}

/** Whether some fields of runs have a column. */
export function isColumn(name, fields) {
  return name in FIXED || fields.some((field) => field.name === fieldOf(name));
}

/** What the table knows. It asks through its view, and tells by `drawn` that there is something new to draw. */
export class RunRows {
  /**
   * @param {{ask: Function, isFailed: boolean, isGone: boolean}} view that the rows belong to: a `View`.
   * @param {{arrived: (isHead: boolean) => void, complain: (error: Error | null) => void, isHeld: () => boolean}} told
   *   what has come, the columns too or rows alone; what is wrong with what was asked, null for nothing; and whether
   *   what is shown must stay as it is.
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
    /** @type {Promise<boolean> | null} */
    this.loaded = null;
    /** Headings and rows from top to bottom: one part without groups, and one for each open group with them. */
    this.layout = [];
  }

  /** Returns the texts of a column of numbers by value: one notation for all rows that have arrived. */
  textsOf(name) {
    const rows = [...this.blocks.values()].flat();
    return alignedTexts(
      rows.map((row) => row.values[name]),
      false,
    );
  }

  /** Asks for everything; what is shown stays until it arrives. */
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

  /** Asks again for the blocks with some of the rows; what is shown stays where the server does not answer. */
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
   * Asks for what has changed: rows of single runs, where they stay in their places; else the blocks with some of the
   * rows; and everything where columns have come, or what was asked last failed.
   */
  async freshen(indexes, changed) {
    const known = this.fields.length;
    this.fields = (await listFields().catch(() => this)).fields;
    if (this.fields.length !== known || this.view.isFailed) await this.reload();
    else if (!changed.order && isSteady()) await this.renew(Object.keys(changed.runs));
    else await this.refresh(indexes);
  }

  /** Asks again for rows that have arrived. */
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
    this.total = [...answers.values()][0].total;
    this.blocks = new Map([...answers].map(([number, { rows }]) => [number, rows]));
    this.lay();
  }

  /** Returns a row, or undefined until its block has arrived. */
  at(index) {
    const number = Math.floor(index / BLOCK);
    if (!this.blocks.has(number)) this.fetchBlock(number);
    return this.blocks.get(number)[index % BLOCK];
  }

  /** Returns where a run is among the rows that have arrived, or -1. */
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

  /** Returns the kind of the values of a column, as `/api/fields` has it; "" for those of every run. */
  kindOf(name) {
    return name in FIXED ? "" : (this.fields.find((field) => field.name === fieldOf(name))?.kind ?? "");
  }

  /** Returns the names of all columns that can be chosen. */
  get choices() {
    const others = this.fields.map(({ name }) => name).filter((name) => !(name in FIXED));
    return [...Object.keys(FIXED), ...others.filter((name) => !SHOWN_ALWAYS.includes(name))];
  }

  /** Returns what is wrong where a link names columns that these runs do not have: they are left out; null if none. */
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
    const columns = names.filter((name) => this.kindOf(name) === "number");
    return this.question().group.length ? listGroups({ ...this.question(), columns }) : null;
  }

  askBlock(number, names) {
    return listRuns({ ...this.question(), columns: names, offset: number * BLOCK, limit: BLOCK });
  }

  /** Returns rows of the table, without values of columns; 1,000 at most. */
  async ask(first, limit) {
    return (await listRuns({ ...this.question(), columns: [], offset: first, limit })).rows;
  }

  /**
   * Returns the usual columns: the goal, the metrics that say most, and the hyperparameters in which the first runs
   * differ; on a phone the status and the first of these metrics.
   */
  async automaticColumns() {
    const weight = (name) =>
      [/(val|test|eval).*(acc|loss)/i, /acc|loss|reward|score|f1|bleu/i].findIndex((kind) =>
        kind.test(name),
      ) >>> 0;
    const metrics = this.fields
      .filter(({ name, kind }) => name.startsWith("summary.") && kind === "number")
      .map(({ name }) => name)
      .sort((one, other) => weight(one) - weight(other));
    if (this.isKnown(state.goal)) metrics.unshift(state.goal);
    if (isNarrow()) return ["status", ...metrics.slice(0, 1)];
    const candidates = this.fields
      .map(({ name }) => name)
      .filter((name) => name.startsWith("hparams."))
      .slice(0, MAX_CANDIDATES);
    const { rows } = await listRuns({ columns: candidates, limit: BLOCK });
    const varied = candidates.filter(
      (name) => new Set(rows.map((row) => row.values[name]).filter((value) => value !== undefined)).size > 1,
    );
    return [
      "status",
      "created_at",
      "duration",
      "tags",
      ...metrics.slice(0, MAX_AUTOMATIC),
      ...varied.slice(0, MAX_AUTOMATIC),
      "note",
    ];
  }

  lay() {
    if (!this.groups) {
      this.layout = [{ top: 0, rows: this.total, first: 0 }];
      return;
    }
    this.layout = [];
    let top = 0,
      first = 0;
    for (const group of this.groups) {
      const isFolded = !state.unfold.includes(group.label);
      this.layout.push({ top, heading: group, rows: 0, first });
      top += 1;
      if (!isFolded) this.layout.push({ top, rows: group.total, first });
      if (!isFolded) top += group.total;
      first += group.total;
    }
  }

  /** The number of headings and rows that are open. */
  get height() {
    return this.layout.reduce((sum, part) => sum + (part.heading ? 1 : part.rows), 0);
  }

  /** Returns the place of a row from the top, 0 where its group is folded. */
  placeOf(index) {
    const part = this.layout.find(
      (one) => !one.heading && index >= one.first && index < one.first + one.rows,
    );
    return part ? part.top + index - part.first : 0;
  }
}
