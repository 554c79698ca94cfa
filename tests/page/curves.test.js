import assert from "node:assert/strict";
import { test } from "node:test";

const curves = await import("../../destinations/viewer/static/curves.js");

test("a moving average begins at the first value, and leaves out what is missing", () => {
  const found = curves.smoothed([2, null, 2, 4], 0.5);

  assert.deepEqual(
    found.map((value) => value && Math.round(value * 1000) / 1000),
    [2, null, 2, 3.143],
  );
});

test("a line of noise is smoothed gently unless something is chosen or there are many", () => {
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

test("a coarse range covers every value of the fine one, also between its places", () => {
  const x = Array.from({ length: 23 }, (_, at) => at);
  const high = x.map((at) => (at % 7 === 3 ? 100 + at : at));
  const low = high.map((value) => -value);

  const [places, lows, highs] = curves.coarse(x, low, high);

  assert.ok(places.length < 8);
  assert.equal(places.at(-1), 22);
  for (const at of x) {
    const after = places.findIndex((place) => place >= at);
    const share = after ? (at - places[after - 1]) / (places[after] - places[after - 1]) : 0;
    const between = (list) => (after ? list[after - 1] * (1 - share) + list[after] * share : list[0]);
    assert.ok(between(highs) >= high[at] && between(lows) <= low[at], String(at));
  }
});

test("lines that look alike are one trace with gaps, and others stay apart", () => {
  const trace = (run, color) => ({
    mode: "lines",
    line: { color },
    x: [0, 1],
    y: [run, run],
    meta: { run, part: "line" },
  });

  const found = curves.joinedTraces([trace(1, "red"), trace(2, "blue"), trace(3, "red")]);

  assert.deepEqual(
    found.map(({ x, y, meta }) => [x, y, meta.runs]),
    [
      [
        [0, 1, null, 0, 1],
        [1, 1, null, 3, 3],
        [1, 3],
      ],
      [[0, 1], [2, 2], [2]],
    ],
  );
});
