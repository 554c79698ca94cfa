import assert from "node:assert/strict";
import { test } from "node:test";
import { openWindow } from "./browser.js";

openWindow();
const row = (id, lr) => ({
  id,
  name: id,
  run_id: id,
  status: "completed",
  tags: [],
  values: { "hparams.lr": lr },
});
const held = {
  runs: { version: "0", rows: [row("a", { number: "nan" }), row("b", 2), row("c", "1"), row("d", 1)] },
  orders: {
    columns: { "hparams.lr": 0, status: 0 },
    search: ["a", "b", "c", "b d"],
  },
  "orders/0": {
    status: { up: [0, 1, 2, 3], down: [0, 1, 2, 3], labels: Array(4).fill("completed") },
    "hparams.lr": { up: [3, 1, 2, 0], down: [1, 3, 2, 0], labels: ["nan", "2", '"1"', "1"] },
  },
};
const fields = (name, values) => [{ name, values }];
const pair = (first, second, fields, step) => ({
  runs: [first, second],
  fields,
  parts: [{ a: first, b: second, metrics: { loss: step } }],
});
held["compare/a/b"] = pair("a", "b", fields("hparams.seed", { a: 1, b: 2 }), 3);
held["compare/a/c"] = pair("a", "c", fields("hparams.lr", { a: 0.1, c: 0.2 }), null);
held["compare/a/d"] = pair("a", "d", fields("hparams.new", { d: 7 }), 1);
const keys = Object.keys(held);
globalThis.destinationsSite = { keys: Object.fromEntries(keys.map((key, at) => [key, `${at}.js`])) };
const data = await import("../../destinations/viewer/static/data.js");
document.head.append = (script) => {
  const key = keys[Number.parseInt(script.src.split("/").at(-1), 10)];
  globalThis.destinationsSite.add(key, held[key]);
  script.onload();
};

const namesOf = async (query) => (await data.listRuns(query)).rows.map(({ name }) => name);

test("an exported site sorts by the orders in its files", async () => {
  assert.deepEqual(await namesOf({}), ["a", "b", "c", "d"]);
  assert.deepEqual(await namesOf({ sort: "hparams.lr" }), ["d", "b", "c", "a"]);
  assert.deepEqual(await namesOf({ sort: "-hparams.lr" }), ["b", "d", "c", "a"]);
  assert.deepEqual(await namesOf({ sort: "-hparams.lr", offset: 1, limit: 2 }), ["d", "c"]);
  assert.deepEqual(await namesOf({ sort: "hparams.lr", q: "B" }), ["d", "b"]);
  await assert.rejects(data.listRuns({ sort: "other" }), /sort by this column/);
});

test("an exported site counts the matching rows of its groups", async () => {
  const all = await data.listGroups({ group: ["hparams.lr"] });
  const some = await data.listGroups({ group: ["hparams.lr"], q: "b" });

  assert.deepEqual(all, [
    { label: "1", total: 1, values: {} },
    { label: "2", total: 1, values: {} },
    { label: '"1"', total: 1, values: {} },
    { label: "nan", total: 1, values: {} },
  ]);
  assert.deepEqual(some, [
    { label: "1", total: 1, values: {} },
    { label: "2", total: 1, values: {} },
  ]);
});

test("an exported site compares three runs as the server does", async () => {
  const { fields: found, parts } = await data.compareRuns(["a", "b", "c", "d"]);

  assert.deepEqual(found, [
    { name: "hparams.seed", values: { a: 1, b: 2, c: 1, d: 1 } },
    { name: "hparams.lr", values: { a: 0.1, b: 0.1, c: 0.2, d: 0.1 } },
    { name: "hparams.new", values: { d: 7 } },
  ]);
  assert.deepEqual(
    parts.map(({ b, metrics }) => [b, metrics.loss]),
    [
      ["b", 3],
      ["c", null],
      ["d", 1],
    ],
  );
});

test("an exported site shows mean and deviation of a group, and leaves out statuses", async () => {
  const [group] = await data.listGroups({ group: ["status"], columns: ["hparams.lr"] });

  assert.deepEqual(group.values["hparams.lr"], { mean: 1.5, std: Math.SQRT1_2, count: 2 });
  assert.deepEqual(await namesOf({ without: ["completed"] }), []);
});
