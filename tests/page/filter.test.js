import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import { openWindow } from "./browser.js";

openWindow();
const { FilterField } = await import("../../destinations/viewer/static/filter.js");
const { state, update } = await import("../../destinations/viewer/static/state.js");

const NAMES = ["summary.loss", "summary.val/acc", "summary.two words", "hparams.lr"];
let field;

beforeEach(() => {
  update({ where: "" });
  field = new FilterField(() => NAMES.map((name) => ({ name })));
  document.body.replaceChildren(field.element, field.problem);
  field.input.value = "";
});

function typed(text) {
  field.input.value = text;
  field.input.setSelectionRange(text.length, text.length);
  field.showHints();
  return [...field.hints.children].map((node) => node.dataset.name);
}

test("two typed letters offer names that contain them, in either case", () => {
  assert.deepEqual(typed("s"), []);
  assert.deepEqual(typed("status == 1 and SUM"), NAMES.slice(0, 3));
  assert.deepEqual(typed("acc"), ["summary.val/acc"]);
  assert.deepEqual(typed("hparams.lr"), []);
});

test("a completed name replaces the word before the cursor, quoted if necessary", () => {
  typed("hparams.lr > 1 and two");
  field.take("summary.two words");

  assert.equal(state.where, 'hparams.lr > 1 and summary."two words"');
});

test("Enter applies the filter, and the arrow keys and Tab choose a name", () => {
  const press = (key) =>
    field.input.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  typed("summary");
  press("ArrowDown");
  press("Tab");
  assert.equal(state.where, "summary.val/acc");

  field.input.value += " > 0.8";
  press("Enter");

  assert.equal(state.where, "summary.val/acc > 0.8");
});

test("an error of the filter is shown until it is fixed", () => {
  update({ where: "loss <" });
  field.complain(new Error("a value is missing"));
  assert.deepEqual(
    [field.problem.textContent, field.problem.hidden, field.input.getAttribute("aria-invalid")],
    ["a value is missing", false, "true"],
  );

  field.complain(null);

  assert.deepEqual([field.problem.hidden, field.input.hasAttribute("aria-invalid")], [true, false]);
});

test("the filter of the view doesn't replace text that is being typed", () => {
  field.input.focus();
  field.input.value = "half a fil";

  update({ where: "other" });
  field.show();
  assert.equal(field.input.value, "half a fil");
  field.input.blur();
  field.show();

  assert.equal(field.input.value, "other");
});
