import assert from "node:assert/strict";
import { test } from "node:test";

const { alignedTexts, differencesOf, sameNotation, ticksOf } = await import(
  "../../destinations/viewer/static/ticks.js"
);

const textsOf = (...given) => ticksOf(...given).map(([, text]) => text);

test("ticks of one axis have one notation, and as many decimals as tell them apart", () => {
  assert.deepEqual(textsOf("linear", [0, 1e6], 5), ["0", "200k", "400k", "600k", "800k", "1000k"]);
  assert.deepEqual(textsOf("linear", [497601, 497712], 5), [
    "497.62k",
    "497.64k",
    "497.66k",
    "497.68k",
    "497.70k",
  ]);
  assert.deepEqual(textsOf("linear", [-0.2, 0.2], 4), ["−0.2", "−0.1", "0", "0.1", "0.2"]);
  assert.deepEqual(sameNotation([0.00012, 0.0003], 1e-5), ["1.2e−4", "3.0e−4"]);
});

test("a log axis has ticks at decades, and between them if they are few", () => {
  assert.deepEqual(textsOf("log", [1e-4, 1e5], 5), ["1e−4", "0.01", "1", "100", "10k"]);
  assert.deepEqual(textsOf("log", [1, 20], 5), ["1", "2", "5", "10", "20"]);
});

test("an axis of one value has one tick, and an axis of all doubles has several", () => {
  assert.deepEqual(textsOf("linear", [3, 3], 5), ["3"]);
  assert.ok(ticksOf("linear", [-1e300, 1e300], 5).length > 1);
});

test("numbers side by side have one notation, and differences their sign", () => {
  assert.deepEqual([...alignedTexts([0.5, 0.25, NaN, undefined]).values()], ["0.50000", "0.25000"]);
  assert.deepEqual([...alignedTexts([12500, 12501]).values()], ["12.500k", "12.501k"]);
  assert.deepEqual([...alignedTexts([128, 256]).values()], ["128", "256"]);
  assert.deepEqual(
    [...alignedTexts([0.1, 0.1 + 1e-9], false).values()],
    ["0.10000", "0.10000"],
    "a column does not grow for the last digit",
  );
  assert.equal(new Set(alignedTexts([0.1, 0.1 + 1e-9]).values()).size, 2);
  assert.deepEqual(differencesOf([0.5, 0.75, undefined, 0.25]), ["0", "+0.25000", "", "−0.25000"]);
});
