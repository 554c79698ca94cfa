import assert from "node:assert/strict";
import { after, beforeEach, test } from "node:test";
import { openWindow, serve } from "./browser.js";

openWindow();
const data = await import("../../destinations/viewer/static/data.js");

let answers = {};
const { requests, close } = await serve((url) => {
  const [path] = url.split("?");
  return answers[url] ?? answers[path] ?? { status: 404, body: { error: `nothing at ${path}` } };
});
after(close);

beforeEach(() => {
  answers = {};
  requests.length = 0;
});

const row = (id, values = {}) => ({ id, name: id, run_id: id, status: "completed", tags: [], values });

test("lists are repeated parameters, and empty values are left out", async () => {
  answers["/api/runs"] = { body: { total: 0, version: "1", rows: [] } };

  await data.listRuns({ q: "a b&c", where: "", sort: undefined, columns: ["status", "summary.loss"] });

  assert.deepEqual(requests, ["/api/runs?q=a+b%26c&columns=status&columns=summary.loss&offset=0&limit=100"]);
});

test("numbers that JSON lacks arrive as numbers", async () => {
  const values = { nan: { number: "nan" }, low: { number: "-inf" }, high: { number: "inf" }, text: "nan" };
  answers["/api/runs"] = { body: { total: 1, version: "1", rows: [row("a", values)] } };

  const { rows } = await data.listRuns({});

  assert.deepEqual(rows[0].values, { nan: NaN, low: -Infinity, high: Infinity, text: "nan" });
});

test("numbers that JSON lacks arrive as numbers at any depth", async () => {
  const low = { number: "-inf" };
  answers["/api/runs/n"] = { body: { ...row("n"), hyperparameters: { lr: low, list: [low, "nan"] } } };
  answers["/api/runs/n/table"] = { body: { rows: [[{ number: "nan" }, { number: "other" }]] } };

  assert.deepEqual((await data.runDetail("n")).hyperparameters, { lr: -Infinity, list: [-Infinity, "nan"] });
  assert.deepEqual((await data.readTable("n", "t", 1)).rows, [[NaN, { number: "other" }]]);
});

test("an integer that a number would round arrives as digits", async () => {
  const values = { seed: { number: "-4611686018427387905" }, other: { number: "12" } };
  answers["/api/runs"] = { body: { total: 1, version: "1", rows: [row("a", values)] } };

  const { rows } = await data.listRuns({});

  assert.deepEqual(rows[0].values, { seed: "-4611686018427387905", other: { number: "12" } });
});

test("groups come from the server", async () => {
  const groups = [
    { label: "1", total: 2 },
    { label: '"1"', total: 1 },
  ];
  answers["/api/groups"] = { body: { groups } };

  assert.deepEqual(await data.listGroups({ group: "hparams.lr", q: "a", where: "" }), groups);
  assert.deepEqual(requests, ["/api/groups?group=hparams.lr&q=a"]);
});

test("an error has the message of the server", async () => {
  answers["/api/runs"] = { status: 400, body: { error: "a value is missing" } };
  await assert.rejects(data.listRuns({ where: "loss <" }), /^Error: a value is missing$/);

  answers["/api/runs"] = { status: 401, body: { error: "no token." } };
  await assert.rejects(data.listRuns({}), /no token\. Open the link that destinations view printed\./);

  answers["/api/runs"] = { status: 400, body: "<html>" };
  await assert.rejects(data.listRuns({}), /The server answered 400\./);
});

test("an answer is requested once until the run changes, and again after a failure", async () => {
  await assert.rejects(data.runDetail("a"), { status: 404 });
  assert.equal(data.runInfo("a").status, "not found");
  answers["/api/runs/a"] = { body: row("a") };

  await data.runDetail("a");
  await Promise.all([data.runDetail("a"), data.runDetail("a")]);
  assert.equal(requests.length, 2);
  answers["/api/runs/a"] = { body: { ...row("a"), note: "new" } };
  await data.editRun("a", { note: "new" });

  assert.equal((await data.runDetail("a")).note, "new");
});

test("new values are requested with the cursor of each series", async () => {
  answers["/api/series"] = { body: { series: [] } };

  const known = [{ run: "a", cursor: "1&2" }, { run: "b" }];
  await data.readSeries({ runs: ["a", "b"], metrics: ["loss"], x: "step", known });

  assert.deepEqual(requests, ["/api/series?run=a&run=b&metric=loss&x=step&after=1%262"]);
});

test("charts of the same runs share one request for new values", async () => {
  const series = ["loss", "acc"].map((metric) => ({ run: "a", metric }));
  answers["/api/series"] = { body: { series } };

  const found = await Promise.all(
    series.map(({ metric }) =>
      data.readSeries({
        runs: ["a"],
        metrics: [metric],
        x: "step",
        known: [{ run: "a", cursor: metric[0] }],
      }),
    ),
  );

  assert.deepEqual(found, [[series[0]], [series[1]]]);
  assert.deepEqual(requests, ["/api/series?run=a&metric=loss&metric=acc&x=step&after=l&after=a"]);
});

test("the address of a file escapes every character", () => {
  assert.equal(data.fileUrl("a", "media/ü #1/?.png"), "api/runs/a/files/media/%C3%BC%20%231/%3F.png");
});
