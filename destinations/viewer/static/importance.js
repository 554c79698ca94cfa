/** Which hyperparameter matters for a metric: bars of the permutation importance that the server computes. */

import { readImportance } from "./data.js";
import { el, fill, formatNumber, shorten } from "./dom.js";
import { View } from "./view.js";

/** The bars, as a card. */
export class Importance {
  /** @param {(column: string) => void} chosen is told of the hyperparameter that is clicked. */
  constructor(chosen) {
    this.chosen = chosen;
    this.asked = "";
    this.view = new View();
    this.content = el("div", {});
    this.element = el(
      "section",
      { class: "card importance", "aria-label": "Which hyperparameter matters" },
      el("div", { class: "card-head" }, el("h2", {}, "Which hyperparameter matters")),
      this.content,
    );
  }

  /** Asks, where the runs that have ended, the metric or the filter are others than before. */
  follow(metric, view, rows) {
    const ended = rows.filter((row) => !row.alive).map((row) => row.id);
    const asked = JSON.stringify([metric, view, ended]);
    if (asked === this.asked) return;
    if (!this.asked) this.say("Computing…");
    this.asked = asked;
    this.view.ask(
      () => readImportance({ metric, ...view }),
      (answer) => this.draw(metric, answer),
      (error) => {
        this.asked = "";
        this.say(error.message);
      },
    );
  }

  say(text) {
    fill(this.content, el("p", { class: "card-foot" }, text));
  }

  draw(metric, { runs, score, fields, problem }) {
    if (problem) {
      this.say(problem);
      return;
    }
    const most = Math.max(...fields.map(({ mean }) => mean));
    fill(
      this.content,
      el(
        "ol",
        {},
        fields.map(({ names, mean, std }) => {
          const text = names.map((name) => name.replace(/^hparams\./, "")).join(" = ");
          // Without a zero that is negative.
          const value = formatNumber(Number(mean.toFixed(2)) + 0);
          return el(
            "li",
            { "data-name": names[0] },
            el(
              "button",
              {
                type: "button",
                title: shorten(
                  `${text}: ${value} ± ${formatNumber(Number(std.toPrecision(2)))}. Shows it in the plot.`,
                  500,
                ),
                dir: "auto",
                onclick: () => this.chosen(names[0]),
              },
              shorten(text, 80),
            ),
            el("i", { style: { width: `${(100 * Math.max(0, mean)) / most}%` } }),
            el("b", {}, value),
          );
        }),
      ),
      el(
        "p",
        { class: "card-foot" },
        `Permutation importance: a small forest (scikit-learn) learns the order of ${formatNumber(runs)} runs that have ended by ${shorten(metric, 60)}, and tells that of runs which it has not seen with R² ${formatNumber(Number(score.toPrecision(3)))}. A bar is what of R² is lost when the values of one are shuffled.`,
      ),
    );
  }
}
