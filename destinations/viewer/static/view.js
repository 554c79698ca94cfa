/** What all views share: only the answer to the newest question counts, and a view that is left hears nothing more. */

import { dataChanges } from "./data.js";
import { onChange, state } from "./state.js";

/**
 * The life of a view, from `new View` until `leave`.
 *
 * A view asks when it begins and whenever what it shows may have changed. Any number of questions may be under way:
 * what is answered after a newer question, or after the view was left, is neither shown nor complained of.
 */
export class View {
  /** @param {string} page of the URL; changes of the URL are told of only while it has this page, "" for any. */
  constructor(page = "") {
    this.page = page;
    this.isGone = false;
    /** Whether the newest question failed: it is asked again when the server answers again. */
    this.isFailed = false;
    this.turn = 0;
    this.ends = [];
  }

  /**
   * Asks a question and shows its answer, unless it is too late for it.
   *
   * @template T
   * @param {(isOld: () => boolean) => T | Promise<T>} question gets a function that says whether it is too late.
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

  /** Calls a function when the view is left. */
  until(end) {
    this.ends.push(end);
  }

  /** Ends the view. */
  leave() {
    this.isGone = true;
    for (const end of this.ends.splice(0)) end();
  }
}

function raise(error) {
  throw error;
}
