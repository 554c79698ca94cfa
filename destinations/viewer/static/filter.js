/** The filter field: completes names of columns and shows errors. */

import { debounce, el, fill, icon, popover, shorten } from "./dom.js";
import { state, update } from "./state.js";

const SYNTAX = [
  ["val/acc > 0.8", "a metric's last value"],
  ["lr in (0.1, 0.01)", "a hyperparameter"],
  ['"baseline" in tags', "a tag"],
  ['status == "completed" and created_at > now-2d', "and, or, not, ( )"],
  ['name ~ "^resnet"', "a regular expression"],
  ["exists(summary.loss)", "runs that have it"],
  ['summary."odd name" < 1', "quotes for odd names"],
];
const MOST_HINTS = 8;
const WORD = /[\w./@:%+$#-]*$/;
const PLAIN = /^[\w./@:%+$#-]+$/;

/**
 * An input whose text is the filter of the view.
 *
 * `element` is the field, and `problem` the element for errors. The filter is applied after a pause, and at once on
 * Enter or when the field loses focus.
 */
export class FilterField {
  /** @param {() => {name: string, kind?: string}[]} fields returns the columns to complete. */
  constructor(fields) {
    this.fields = fields;
    this.problem = el("pre", { class: "filter-error", id: "filter-error", role: "alert", hidden: true });
    this.hints = el("div", { class: "hints", role: "listbox", "aria-label": "Names", hidden: true });
    this.input = el("input", {
      type: "text",
      class: "mono",
      id: "filter",
      placeholder: "Filter, as in  loss < 0.5 and lr >= 1e-3",
      "aria-label": "Filter runs",
      "aria-describedby": "filter-error",
      spellcheck: false,
      autocomplete: "off",
      value: state.where,
      onkeydown: (event) => this.pressed(event),
      onblur: () => (this.hints.hidden = true),
      onchange: () => this.apply(),
    });
    const applySoon = debounce(() => this.apply(), 300);
    this.input.addEventListener("input", () => {
      this.showHints();
      applySoon();
    });
    this.help = popover(["?"], { class: "button quiet", "aria-label": "Filter syntax" }, () =>
      el(
        "dl.syntax",
        SYNTAX.map(([example, meaning]) => [el("dt.mono", example), el("dd", meaning)]),
      ),
    );
    this.element = el("div.field.filter", icon("filter"), this.input, this.hints);
  }

  /** Shows the filter of the view, unless it is being typed, and an example with names that exist. */
  show() {
    const first = (kind) => this.fields().find((one) => one.name.startsWith(kind) && one.kind === "number");
    const [metric, setting] = ["summary.", "hparams."].map((kind) => first(kind)?.name.slice(kind.length));
    const parts = [metric && `${metric} < 0.5`, setting && `${setting} >= 1e-3`].filter(Boolean);
    this.input.placeholder = `Filter, as in  ${parts.join(" and ") || "loss < 0.5"}`;
    if (document.activeElement !== this.input) this.input.value = state.where;
  }

  /** Shows an error; null clears it. */
  complain(error) {
    this.problem.hidden = error === null;
    fill(this.problem, error?.message);
    if (error && state.where) this.input.setAttribute("aria-invalid", "true");
    else this.input.removeAttribute("aria-invalid");
  }

  apply() {
    update({ where: this.input.value.trim() });
  }

  showHints() {
    const word = this.input.value.slice(0, this.input.selectionStart).match(WORD)[0].toLowerCase();
    const names = word.length > 1 ? this.fields().map(({ name }) => name) : [];
    const found = names.filter((name) => name.toLowerCase().includes(word) && name.toLowerCase() !== word);
    this.hints.hidden = !found.length;
    fill(
      this.hints,
      found.slice(0, MOST_HINTS).map((name, index) => {
        const take = (event) => {
          event.preventDefault();
          this.take(name);
        };
        return el(
          "div",
          { role: "option", "data-name": name, onpointerdown: take, ...marked(index === 0) },
          shorten(name),
        );
      }),
    );
  }

  /** Replaces the word before the cursor by a name, quoted if necessary. */
  take(name) {
    const end = this.input.selectionStart;
    const begin = end - this.input.value.slice(0, end).match(WORD)[0].length;
    const quoted = PLAIN.test(name)
      ? name
      : name.replace(/^(\w+)\.(.*)$/s, (_, first, rest) => `${first}."${rest}"`);
    this.input.setRangeText(quoted, begin, end, "end");
    this.hints.hidden = true;
    this.input.focus();
    this.apply();
  }

  pressed(event) {
    const options = [...this.hints.children];
    const at = options.findIndex((node) => node.className === "on");
    if (event.key === "Enter" || event.key === "Escape") this.hints.hidden = true;
    if (event.key === "Enter") this.apply();
    if (this.hints.hidden) return;
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      const next = (at + (event.key === "ArrowDown" ? 1 : options.length - 1)) % options.length;
      options.forEach((node, index) => {
        node.className = marked(index === next).class;
        node.setAttribute("aria-selected", marked(index === next)["aria-selected"]);
      });
    } else if (event.key === "Tab") {
      event.preventDefault();
      this.take(options[at].dataset.name);
    }
  }
}

function marked(isOn) {
  return { class: isOn ? "on" : "", "aria-selected": String(isOn) };
}
