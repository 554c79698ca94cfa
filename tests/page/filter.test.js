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

test("names are offered by any part of them, in either case, once two letters are typed", () => {
  assert.deepEqual(typed("s"), []);
  assert.deepEqual(typed("status == 1 and SUM"), NAMES.slice(0, 3));
  assert.deepEqual(typed("acc"), ["summary.val/acc"]);
  assert.deepEqual(typed("hparams.lr"), []);
});

test("a name that is taken replaces the word before the cursor, in quotes where it needs them", () => {
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

test("what is wrong with the filter of the view is shown until it is mended", () => {
  update({ where: "loss <" });
  field.complain(new Error("a value is missing"));
  assert.deepEqual(
    [field.problem.textContent, field.problem.hidden, field.input.getAttribute("aria-invalid")],
    ["a value is missing", false, "true"],
  );

  field.complain(null);

  assert.deepEqual([field.problem.hidden, field.input.hasAttribute("aria-invalid")], [true, false]);
});

test("text that is being typed is not replaced by the filter of the view", () => {
  field.input.focus();
  field.input.value = "half a fil";

  update({ where: "other" });
  field.show();
  assert.equal(field.input.value, "half a fil");
  field.input.blur();
  field.show();

  assert.equal(field.input.value, "other");
});
