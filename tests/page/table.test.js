import assert from "node:assert/strict";
import { test } from "node:test";
import { openWindow } from "./browser.js";

openWindow();
const { dataTable } = await import("../../destinations/viewer/static/table.js");

test("a table is sorted as the server has sorted it, in both directions, and filtered in this order", () => {
  const rows = [["b 10"], ["a 9"], ["b 1"]];
  const table = dataTable([{ name: "word" }], rows, [{ up: [1, 2, 0], down: [0, 2, 1] }]);
  const cells = () => [...table.querySelectorAll("td")].map((node) => node.textContent);
  const press = () => table.querySelector("th button").click();

  assert.deepEqual(cells(), ["b 10", "a 9", "b 1"]);
  press();
  assert.deepEqual(cells(), ["a 9", "b 1", "b 10"]);
  press();
  assert.deepEqual(cells(), ["b 10", "b 1", "a 9"]);
  const find = table.querySelector("input");
  find.value = "B";
  find.dispatchEvent(new Event("input"));

  assert.deepEqual(cells(), ["b 10", "b 1"]);
});
