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
    columns: { "hparams.lr": { up: [3, 1, 2, 0], down: [1, 3, 2, 0], labels: ["nan", "2", '"1"', "1"] } },
    search: ["a", "b", "c", "b d"],
  },
};
globalThis.destinationsSite = { keys: { runs: "0.js", orders: "1.js" } };
const data = await import("../../destinations/viewer/static/data.js");
document.head.append = (script) => {
  const key = script.src.endsWith("0.js") ? "runs" : "orders";
  globalThis.destinationsSite.add(key, held[key]);
  script.onload();
};

const namesOf = async (query) => (await data.listRuns(query)).rows.map(({ name }) => name);

test("an exported site shows the orders that it carries, and compares no values", async () => {
  assert.deepEqual(await namesOf({}), ["a", "b", "c", "d"]);
  assert.deepEqual(await namesOf({ sort: "hparams.lr" }), ["d", "b", "c", "a"]);
  assert.deepEqual(await namesOf({ sort: "-hparams.lr" }), ["b", "d", "c", "a"]);
  assert.deepEqual(await namesOf({ sort: "-hparams.lr", offset: 1, limit: 2 }), ["d", "c"]);
  assert.deepEqual(await namesOf({ sort: "hparams.lr", q: "B" }), ["d", "b"]);
  await assert.rejects(data.listRuns({ sort: "other" }), /no order by this column/);
});

test("an exported site counts the groups that it carries, of the rows that match", async () => {
  const all = await data.listGroups({ group: "hparams.lr" });
  const some = await data.listGroups({ group: "hparams.lr", q: "b" });

  assert.deepEqual(all, [
    { label: "1", total: 1 },
    { label: "2", total: 1 },
    { label: '"1"', total: 1 },
    { label: "nan", total: 1 },
  ]);
  assert.deepEqual(some, [
    { label: "1", total: 1 },
    { label: "2", total: 1 },
  ]);
});
