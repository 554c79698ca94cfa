/** What all views share: only the answer to the newest request counts, and a closed view gets no more events. */

import { dataChanges } from "./data.js";
import { onChange, state } from "./state.js";

/**
 * The life of a view, from `new View` until `leave`.
 *
 * A view asks when it opens and whenever its data may have changed. Several requests may be pending at once: an
 * answer, or an error, that arrives after a newer request or after the view was closed is ignored.
 */
export class View {
  /** @param {string} page of the URL: the view hears of changes only while this page is open; "" for any page. */
  constructor(page = "") {
    this.page = page;
    this.isGone = false;
    /** Whether the newest request failed; it is repeated once the server answers again. */
    this.isFailed = false;
    this.turn = 0;
    this.ends = [];
  }

  /**
   * Makes a request and shows its answer, unless the answer is outdated.
   *
   * @template T
   * @param {(isOld: () => boolean) => T | Promise<T>} question makes the request; it gets a function that tells whether the answer is outdated.
   * @param {(answer: Awaited<T>) => void} show draws the answer.
   * @param {(error: Error) => void} complain shows what is wrong; without it, the error is thrown.
   * @returns {Promise<boolean>} whether the answer was shown.
   */
  async ask(question, show, complain = raise) {
    this.turn += 1;
    const mine = this.turn;
    const isOld = () => this.isGone || mine !== this.turn;
    this.isFailed = false;
    try {
      const answer = await question(isOld);
      if (isOld()) return false;
      show(answer);
      return true;
    } catch (error) {
      if (isOld()) return false;
      this.isFailed = true;
      complain(error);
      return false;
    }
  }

  /** Calls a function with the names of what changed in the URL. */
  onState(act) {
    this.until(onChange((changed) => (this.page === "" || state.page === this.page) && act(changed)));
  }

  /** Calls a function with what is new in the data; see `dataChanges`. */
  onData(act) {
    this.until(dataChanges(act));
  }

  /** Calls a function when colours change: the theme, or paper. */
  onTheme(act) {
    this.onDocument("themechange", () => act());
  }

  /** Calls a function for an event of the document. */
  onDocument(kind, act) {
    document.addEventListener(kind, act);
    this.until(() => document.removeEventListener(kind, act));
  }

  /** Calls a function when the view closes. */
  until(end) {
    this.ends.push(end);
  }

  /** Closes the view. */
  leave() {
    this.isGone = true;
    for (const end of this.ends.splice(0)) end();
  }
}

function raise(error) {
  throw error;
}
