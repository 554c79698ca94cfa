import assert from "node:assert/strict";
import { test } from "node:test";
import { openWindow } from "./browser.js";

openWindow();
const names = await import("../../destinations/viewer/static/names.js");

test("times, speeds and loads of the machine are told from metrics of the model", () => {
  for (const name of [
    "time/samples_per_s",
    "time/train",
    "step_time",
    "mem/peak_gib",
    "gpu/0/power_w",
    "tokens_per_sec",
  ])
    assert.ok(names.isTiming(name), name);
  for (const name of ["loss", "val/acc", "train/memory_loss_x", "val/timestep_error", "centimes"])
    assert.ok(!names.isTiming(name), name);
});

test("charts of what evaluates the model come first, those of the machine last", () => {
  const found = ["mem/peak", "time/train", "grad_norm", "loss", "val/acc"];

  found.sort((one, other) => names.chartRank(one) - names.chartRank(other));

  assert.deepEqual(found, ["val/acc", "loss", "grad_norm", "time/train", "mem/peak"]);
});

test("labels of runs leave out what all names share, and say when runs of one name started", () => {
  const labels = (...all) => names.runLabels(all.map((name, at) => ({ name, created_at: 1e9 + at })));

  assert.deepEqual(labels("resnet50-base-lr0.1-s1", "resnet50-base-lr0.01-s2"), ["…lr0.1-s1", "…lr0.01-s2"]);
  assert.deepEqual(labels("run-1", "run-2"), ["run-1", "run-2"]);
  assert.deepEqual(labels("alone-with-a-long-name"), ["alone-with-a-long-name"]);
  const [one, other] = labels("the-same-name", "the-same-name");
  assert.match(one, /^the-same-name · 2001-09-0\d \d\d:\d\d:\d\d$/);
  assert.notEqual(one, other);
});

test("what is said of runs are the hyperparameters in which they differ", () => {
  const row = (id, lr, seed) => ({
    id,
    values: { "hparams.optim.lr": lr, "hparams.seed": seed, "hparams.model": "a" },
  });

  const found = names.differingSettings([row("a", 0.1, 1), row("b", 0.1, 2), row("c", 0.01, 3)]);

  assert.deepEqual(
    [...found],
    [
      ["a", "lr 0.1 · seed 1"],
      ["b", "lr 0.1 · seed 2"],
      ["c", "lr 0.01 · seed 3"],
    ],
  );
  assert.deepEqual([...names.differingSettings([row("a", 0.1, 1)])], [["a", ""]]);
});

test("hyperparameters that differ never read the same", () => {
  const row = (id, lr, seed) => ({ id, values: { "hparams.lr": lr, "hparams.seed": seed } });

  const found = names.differingSettings([
    row("a", 0.1000001, 1234567890),
    row("b", 0.1000002, "1234567890"),
    row("c", 0.1000001, null),
  ]);

  assert.deepEqual(
    [...found],
    [
      ["a", "lr 0.1000001 · seed 1\u202f234\u202f567\u202f890"],
      ["b", "lr 0.1000002 · seed 1234567890"],
      ["c", "lr 0.1000001 · seed none"],
    ],
  );
});

test("tags of a run that have commas stay whole, and no tag is there twice", async () => {
  const { tagsIn } = await import("../../destinations/viewer/static/dom.js");

  assert.deepEqual(tagsIn(" a, b,,a ,c"), ["a", "b", "c"]);
  assert.deepEqual(tagsIn("size:1,2, new", ["size:1,2"]), ["size:1,2", "new"]);
  assert.deepEqual(tagsIn("x,y,z, size:1,23", ["x,y", "x,y,z", "size:1,2"]), ["x,y,z", "size:1", "23"]);
  assert.deepEqual(tagsIn("", ["a,b"]), []);
});
