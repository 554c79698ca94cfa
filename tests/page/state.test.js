import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import { openWindow } from "./browser.js";

openWindow("http://127.0.0.1/#/charts?run=a&run=b&x=time&unknown=1");
const page = await import("../../destinations/viewer/static/state.js");
const colors = await import("../../destinations/viewer/static/colors.js");
const { state } = page;

beforeEach(() => {
  location.hash = "#/runs";
  page.readUrl();
});

test("the URL sets the state, and missing fields have their defaults", () => {
  location.hash = "#/charts?run=a&run=b&x=time&unknown=1";

  page.readUrl();

  assert.deepEqual([state.page, state.run, state.x, state.smooth], ["charts", ["a", "b"], "time", ""]);
  assert.ok(!("unknown" in state));
});

test("an unknown page and a run without an id show the table", () => {
  for (const hash of ["#/nonsense", "#/run", "#/run/"]) {
    location.hash = hash;
    page.readUrl();
    assert.equal(state.page, "runs", hash);
  }
});

test("an id with any characters survives the URL", () => {
  const id = "a/b?c=d&e#f%25 ü💥";

  page.update({ page: "run", id });
  page.readUrl();

  assert.deepEqual([state.page, state.id], ["run", id]);
});

test("names of object properties are not part of the state", () => {
  location.hash = "#/runs?__proto__=1&constructor=2";

  page.readUrl();

  assert.equal(Object.getPrototypeOf(state), Object.prototype);
  assert.equal(state.constructor, Object);
});

test("listeners hear only of changed fields", () => {
  const told = [];
  const stop = page.onChange((changed) => told.push([...changed]));

  page.update({ q: "digits", sort: "" });
  page.update({ q: "digits" });
  stop();
  page.update({ q: "letters" });

  assert.deepEqual(told, [["q"]]);
});

test("a removed run leaves the colours of others, and the next one takes its slot", () => {
  page.selectRuns(["a", "b", "c"], true);
  const colorOfC = colors.colorOf("c");

  page.selectRuns(["b"], false);
  const between = page.selectedRuns();
  page.selectRuns(["d"], true);

  assert.deepEqual(between, ["a", "c"]);
  assert.deepEqual(state.run, ["a", "d", "c"]);
  assert.deepEqual(colors.colorOf("c"), colorOfC);
});

test("ten runs have colours of their own, and further ones are grey", () => {
  page.selectRuns(
    Array.from({ length: 20 }, (_, number) => `run${number}`),
    true,
  );

  const found = state.run.map(colors.colorOf);

  assert.equal(new Set(found.slice(0, 10)).size, 10);
  assert.equal(new Set(found.slice(10)).size, 1);
});

test("the ten best runs have the colours, and one that stays among them keeps its own", () => {
  const ids = Array.from({ length: 12 }, (_, number) => `run${number}`);
  page.selectRuns(ids, true);

  colors.setBest("min.loss", ids.toReversed());
  const before = ids.map(colors.colorOf);
  colors.setBest("min.loss", ["run0", ...ids.toReversed()]);
  const after = ids.map(colors.colorOf);
  colors.setBest("", []);

  assert.equal(new Set(before).size, 11);
  assert.deepEqual([before[0], before[1]], [colors.contextColor(), colors.contextColor()]);
  assert.deepEqual(after.slice(3), before.slice(3));
  assert.deepEqual([after[0], after[2]], [before[2], colors.contextColor()]);
});

test("without a choice the first runs of the view are shown, and each keeps its colour", () => {
  const told = [];
  const stop = page.onChange((changed) => told.push([...changed]));

  page.setViewed(["b", "a"]);
  const color = colors.colorOf("a");
  page.setViewed(["c", "a"]);
  page.setViewed(["c", "a"]);
  stop();

  assert.deepEqual(page.visibleRuns(), ["c", "a"]);
  assert.equal(colors.colorOf("a"), color);
  assert.deepEqual(told, [["run"], ["run"]]);
  page.selectRuns(["a"], false);
  assert.deepEqual(page.visibleRuns(), ["c"]);
  page.selectRuns(["d"], true);
  assert.deepEqual(page.chosenRuns(), ["c", "d"]);
});

test("a saved view sets all fields of a view, and no field of a page", () => {
  page.update({ q: "old", group: ["hparams.lr"], zoom: ["1~2~~~loss"] });

  page.update(page.fieldsOfView({ where: "lr > 1", goal: "max.acc" }));

  assert.deepEqual([state.q, state.group, state.where], ["", [], "lr > 1"]);
  assert.deepEqual(state.zoom, ["1~2~~~loss"]);
  assert.equal(page.viewQuery().sort, "-max.acc");
});

test("each metric has its own zoom, whatever its name looks like", () => {
  for (const name of ["loss~1~2", "1~2~y", "~loss", "e~z", "50%/#?&=\n"]) {
    page.keepNumbers("zoom", name, [0, null, -1e-7, 1e9]);
    page.keepNumbers("zoom", "loss", [1, 2, 3, 4]);
    page.readUrl();

    assert.deepEqual(page.numbersOf("zoom", name), [0, null, -1e-7, 1e9]);
    assert.equal(page.numbersOf("zoom", "y"), null);
    page.keepNumbers("zoom", name, null);
    assert.equal(page.numbersOf("zoom", name), null);
    assert.deepEqual(page.numbersOf("zoom", "loss"), [1, 2, 3, 4]);
  }
});

test("a value is added to a list, and removed", () => {
  page.toggle("pin", "loss");
  page.toggle("pin", "accuracy");
  page.toggle("pin", "loss");

  assert.deepEqual(state.pin, ["accuracy"]);
});
