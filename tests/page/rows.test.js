import assert from "node:assert/strict";
import { after, test } from "node:test";
import { openWindow, serve } from "./browser.js";

openWindow();
const { RunRows } = await import("../../destinations/viewer/static/rows.js");
const { update } = await import("../../destinations/viewer/static/state.js");
const { View } = await import("../../destinations/viewer/static/view.js");

const fields = ["ended_at", "duration", "hparams.lr"].map((name) => ({ name, kind: "number" }));
const { requests, close } = await serve((url) => {
  if (url.startsWith("/api/fields")) return { body: { fields, metrics: [] } };
  if (url.startsWith("/api/groups")) return { body: { groups: [{ label: "1", total: 3 }] } };
  return { body: { total: 3, version: "1", rows: [] } };
});
after(close);

function rowsOf(view) {
  const said = [];
  const told = {
    arrived: () => {},
    complain: (error) => said.push(error?.message ?? null),
    isHeld: () => false,
  };
  return { rows: new RunRows(view, told), said };
}

test("a column of the run itself, whose name has no dot, is asked for, sorted by, and shown", async () => {
  const view = new View();
  const { rows, said } = rowsOf(view);
  update({ column: ["ended_at", "duration"], sort: "-ended_at", group: [] });

  await rows.reload();

  assert.deepEqual(rows.columns, ["ended_at", "duration"]);
  assert.deepEqual(said, [null]);
  const asked = new URL(requests.at(-1), "http://a/").searchParams;
  assert.deepEqual([asked.getAll("columns"), asked.get("sort")], [["ended_at", "duration"], "-ended_at"]);
  assert.ok(rows.choices.includes("ended_at"));
  view.leave();
});

test("a column that these runs do not have is left out, and is said to be", async () => {
  const view = new View();
  const { rows, said } = rowsOf(view);
  update({ column: ["ended_at", "hparams.gone"], sort: "", group: [] });

  await rows.reload();

  assert.deepEqual(rows.columns, ["ended_at"]);
  assert.match(said[0], /These runs have no hparams\.gone/);
  view.leave();
});

test("groups are those of the server, and one that is not opened takes one line", async () => {
  const view = new View();
  const { rows } = rowsOf(view);
  update({ column: ["ended_at"], sort: "-ended_at", group: ["hparams.lr"], unfold: [] });

  await rows.reload();
  const folded = rows.height;
  update({ unfold: ["1"] });
  rows.lay();

  assert.deepEqual([folded, rows.height], [1, 4]);
  view.leave();
});
