/** Which hyperparameter matters for a metric: bars of the permutation importance that the server computes. */

import { readImportance } from "./data.js";
import { el, fill, formatNumber, shorten } from "./dom.js";
import { View } from "./view.js";

/** The card with the bars. */
export class Importance {
  /** @param {(column: string) => void} chosen gets the hyperparameter that is clicked. */
  constructor(chosen) {
    this.chosen = chosen;
    this.asked = "";
    this.view = new View();
    this.content = el("div");
    this.element = el(
      "section",
      { class: "card importance", "aria-label": "Which hyperparameter matters" },
      el("div.card-head", el("h2", "Which hyperparameter matters")),
      this.content,
    );
  }

  /** Requests the importance if the ended runs, the metric or the filter changed. */
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
    fill(this.content, el("p.card-foot", text));
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
        fields.map(({ names, mean, std }) => {
          const text = names.map((name) => name.replace(/^hparams\./, "")).join(" = ");
          // Avoids a negative zero.
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
            el("b", value),
          );
        }),
      ),
      el(
        "p.card-foot",
        `Permutation importance: a small random forest learns how ${formatNumber(runs)} ended runs rank by ${shorten(metric, 60)}. It predicts unseen runs with R² ${formatNumber(Number(score.toPrecision(3)))}; a bar is the drop of R² when one hyperparameter is shuffled.`,
      ),
    );
  }
}
