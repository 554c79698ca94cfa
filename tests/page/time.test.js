import assert from "node:assert/strict";
import { test } from "node:test";
import { openWindow } from "./browser.js";

openWindow();
const { partsOf } = await import("../../destinations/viewer/static/time.js");

test("every second is in one part of the band, even from an unknown bucket", () => {
  const seconds = { forward: 4, backward: 3, data: 2, later: 1, idle: 0 };

  assert.deepEqual(partsOf({ wall: 10, seconds }), [
    { part: "training", seconds: 7 },
    { part: "data", seconds: 2 },
    { part: "other", seconds: 1 },
  ]);
});
