import assert from "node:assert/strict";
import { after, test } from "node:test";
import { openWindow, serve } from "./browser.js";

openWindow();
const { RunColumns } = await import("../../destinations/viewer/static/columns.js");
const { drawParallel } = await import("../../destinations/viewer/static/parallel.js");
const { state, update } = await import("../../destinations/viewer/static/state.js");
const { View } = await import("../../destinations/viewer/static/view.js");

const fields = ["hparams.lr", "hparams.seed", "summary.loss"].map((name) => ({ name, kind: "number" }));
const rows = Array.from({ length: 30 }, (_, at) => ({
  id: `run-${at}`,
  name: `run-${at}`,
  values: { "hparams.lr": at, "hparams.seed": 29 - at, "summary.loss": at },
}));
let isWrong = false;
const { close } = await serve((url) => {
  if (url.startsWith("/api/fields")) return { body: { fields, metrics: [] } };
  if (isWrong) return { status: 400, body: { error: "the filter does not parse" } };
  const columns = new URL(url, "http://a/").searchParams.getAll("columns");
  return { body: { total: rows.length, columns: columns.map((name) => ({ name, kind: "number" })), rows } };
});
after(close);

function columnsOf(view) {
  const said = [];
  const told = { arrived: () => {}, complain: (error) => error && said.push(error.message) };
  return { columns: new RunColumns(view, told), said };
}

test("a late answer changes nothing", async () => {
  const view = new View();
  const { columns } = columnsOf(view);

  const asked = columns.load();
  view.leave();
  await asked;

  assert.deepEqual([columns.fields, [...columns.loaded], columns.rows], [[], [], []]);
});

test("columns come from the newest answer, and their names are known even if it fails", async () => {
  const { columns, said } = columnsOf(new View());

  isWrong = true;
  await columns.load();
  assert.deepEqual([columns.fields, [...columns.loaded]], [fields, []]);
  isWrong = false;
  await columns.load();

  assert.deepEqual(said, ["the filter does not parse"]);
  assert.deepEqual([...columns.loaded], ["hparams.lr", "hparams.seed", "summary.loss"]);
  assert.deepEqual(columns.rows, rows);
});

test("axes are computed once per drawing, not once per run", async () => {
  const { columns } = columnsOf(new View());
  await columns.load();
  update({ brush: ["0.5~1~hparams.lr"] });
  const holder = document.createElement("div");
  let count = 0;
  columns.axes = () => {
    count += 1;
    return RunColumns.prototype.axes.call(columns);
  };

  drawParallel(holder, columns);

  assert.equal(holder.querySelectorAll("polyline").length, 30);
  assert.equal(holder.querySelectorAll("polyline.out").length, 15);
  assert.ok(count <= 2, String(count));
});

for (const [end, last] of [
  ["pointerup", ["0.25~0.9~hparams.lr"]],
  ["pointercancel", ["0.5~0.9~hparams.lr"]],
])
  test(`a range follows the pointer until ${end}`, async () => {
    const { columns } = columnsOf(new View());
    await columns.load();
    update({ brush: [] });
    const holder = document.createElement("div");
    drawParallel(holder, columns);
    const ground = holder.querySelector("[data-axis='hparams.lr'] .brush-ground");
    ground.getBoundingClientRect = () => new DOMRect(0, 0, 28, 112);
    const point = (target, kind, clientY) => target.dispatchEvent(new MouseEvent(kind, { clientY }));

    point(ground, "pointerdown", 16);
    point(window, "pointermove", 56);
    point(window, end, 81);
    point(window, "pointermove", 100);

    assert.deepEqual(state.brush, last);
  });
