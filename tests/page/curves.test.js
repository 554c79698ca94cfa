import assert from "node:assert/strict";
import { test } from "node:test";

const curves = await import("../../destinations/viewer/static/curves.js");

test("a moving average begins at the first value and skips missing ones", () => {
  const found = curves.smoothed([2, null, 2, 4], 0.5);

  assert.deepEqual(
    found.map((value) => value && Math.round(value * 1000) / 1000),
    [2, null, 2, 3.143],
  );
});

test("a noisy line is smoothed gently unless the user chose a weight or there are many lines", () => {
  const noise = Array.from({ length: 200 }, (_, at) => Math.sin(at * at));
  const trend = Array.from({ length: 200 }, (_, at) => at);

  assert.ok(curves.weightFor(noise, "", false) > 0);
  assert.equal(curves.weightFor(trend, "", false), 0);
  assert.equal(curves.weightFor(noise, "", true), 0);
  assert.equal(curves.weightFor(noise, "0", false), 0);
  assert.equal(curves.weightFor(trend, "0.5", true), 0.5);
});

test("a stretch of NaN is marked at its ends", () => {
  const line = { x: [0, 1, 5, 6], y: [1, 1, 1, 1] };

  assert.deepEqual(curves.stretchEnds([2, 3, 4, 7, 8, 9], line), [2, 4, 7, 9]);
});
