/** The frame of the page: header, theme, keyboard, and the current view. */

import { showCharts } from "./charts.js";
import { showCompare } from "./compare.js";
import { firstView, follow, isExported, serverInfo, watchChanges } from "./data.js";
import { byId, el, fill, iconButton, isDark, remember, remembered, shorten, svg } from "./dom.js";
import { showExplore } from "./explore.js";
import { showMedia } from "./media.js";
import { showRun } from "./run.js";
import { showRuns } from "./runs.js";
import { isShown, linkTo, onChange, readUrl, state, update, visibleRuns } from "./state.js";
import { complain, problemOfView, showViewBar, showViewNow } from "./viewbar.js";

/** @type {Array<[string, string, (root: HTMLElement) => () => void]>} */
const PAGES = [
  ["runs", "Runs", showRuns],
  ["charts", "Charts", showCharts],
  ["media", "Media", showMedia],
  ["explore", "Explore", showExplore],
  ["compare", "Compare", showCompare],
];
const KEYS = [
  ["1 – 5", "Runs, Charts, Media, Explore, Compare"],
  ["/", "Search"],
  ["f", "Filter runs"],
  ["↑ ↓  j k", "Move in the table"],
  ["Space  x", "Select the run"],
  ["Enter", "Open the run"],
  ["e", "Edit its note"],
  ["← →", "Step through images"],
  ["t", "Light or dark"],
  ["?", "These keys"],
  ["Esc", "Close"],
];

const header = byId("header");
const main = byId("main");
let leave = () => {};
let problem = null;
let title = "";
let leftOut = [];

function wordmark() {
  const mark = svg(
    "svg",
    { viewBox: "0 0 32 32", class: "mark", "aria-hidden": "true" },
    svg("path", { d: "M4 7c4 0 5 15 11 15s6-6 12-6", class: "curve" }),
    svg("path", { d: "M4 14c4 0 6 8 11 8", class: "curve faint" }),
    svg("circle", { cx: 27, cy: 16, r: 3 }),
  );
  return el(
    "a",
    { class: "wordmark", ...linkTo({ page: "runs", id: "" }), "aria-label": "destinations: all runs" },
    mark,
    el("span", "destinations"),
  );
}

function titleOf(page) {
  return PAGES.find(([name]) => name === page)?.[1] ?? "Run";
}

function drawHeader() {
  const tabs = PAGES.map(([page, name]) =>
    el(
      "a",
      {
        ...linkTo({ page, id: "" }),
        "aria-current": state.page === page || (page === "runs" && state.page === "run") ? "page" : null,
      },
      name,
    ),
  );
  fill(
    header,
    wordmark(),
    el("span", { class: "place", title, dir: "auto" }, shorten(title, 60)),
    el("nav", { "aria-label": "Views" }, tabs),
    el(
      "span",
      {
        class: `live${problem ? " off" : ""}`,
        id: "live",
        title: isExported
          ? [
              "This is an exported site and doesn't change.",
              ...(leftOut.length ? [`Left out: ${shorten(leftOut.join("; "), 600)}.`] : []),
            ].join(" ")
          : (problem ?? "New rows appear automatically."),
      },
      el("i"),
      el("span", isExported ? "exported" : problem ? "offline" : "live"),
    ),
    iconButton(isDark() ? "sun" : "moon", isDark() ? "Light" : "Dark", switchTheme, { id: "theme" }),
    iconButton("help", "Keys", showKeys, { id: "help" }),
  );
  document.title = `${titleOf(state.page)}${title ? ` – ${shorten(title, 60)}` : ""}`;
}

function switchTheme() {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  remember("destinations-theme", theme);
  drawHeader();
  document.dispatchEvent(new Event("themechange"));
}

function showKeys() {
  const dialog = el(
    "dialog",
    { class: "keys", "aria-label": "Keys" },
    el("h2", "Keys"),
    el(
      "dl",
      KEYS.map(([key, act]) => [el("dt", key), el("dd", act)]),
    ),
    el("button", { type: "button", class: "button", onclick: () => dialog.close() }, "Close"),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

/** Subscribes to new rows of the runs on the page. */
function followShown() {
  follow(state.page === "run" ? [state.id] : visibleRuns());
}

function showPage() {
  const hadFocus = main.contains(document.activeElement);
  leave();
  complain(null);
  leave = () => {};
  main.replaceChildren();
  main.scrollTop = 0;
  scrollTo(0, 0);
  drawHeader();
  byId("view-bar").hidden = state.page === "run";
  followShown();
  const shown = state.page === "run" ? showRun : (PAGES.find(([page]) => page === state.page) ?? PAGES[0])[2];
  main.dataset.page = state.page;
  leave = shown(main);
  main.prepend(problemOfView());
  // Sighted readers have the tab; the page of a run has the run's name as its heading.
  if (state.page !== "run") main.prepend(el("h1.unseen", titleOf(state.page)));
  if (hadFocus && !main.contains(document.activeElement)) main.focus({ preventScroll: true });
}

function pressed(event) {
  const isTyping =
    event.target.matches("input:not([type=checkbox]):not([type=range]), textarea, select") ||
    event.target.closest("dialog");
  if (event.ctrlKey || event.metaKey || event.altKey || isTyping) {
    if (event.key === "Escape" && isTyping) event.target.blur();
    return;
  }
  if (event.key >= "1" && event.key <= String(PAGES.length))
    update({ page: PAGES[Number(event.key) - 1][0], id: "" });
  else if (event.key === "t") switchTheme();
  else if (event.key === "?") showKeys();
  else if (event.key === "/" || event.key === "f") {
    const field = document.getElementById(event.key === "f" ? "filter" : "search");
    if (!(field instanceof HTMLInputElement)) return;
    event.preventDefault();
    field.focus();
    field.select();
  }
}

function arrived() {
  // Browsers report one step in the history twice.
  if (isShown()) return;
  readUrl();
  showPage();
  showViewNow();
}

async function begin() {
  const theme = remembered("destinations-theme");
  if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
  if (!location.hash && firstView) history.replaceState(null, "", firstView);
  readUrl();
  onChange((changed) => {
    if (changed.has("page") || changed.has("id")) showPage();
    else {
      drawHeader();
      if (changed.has("run") || changed.has("off")) followShown();
    }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    drawHeader();
    document.dispatchEvent(new Event("themechange"));
  });
  // Paper is light.
  matchMedia("print").addEventListener("change", () => document.dispatchEvent(new Event("themechange")));
  document.addEventListener("keydown", pressed);
  // The page would take the fragment of this link for a view.
  document.querySelector(".skip")?.addEventListener("click", (event) => {
    event.preventDefault();
    main.focus();
  });
  addEventListener("hashchange", arrived);
  addEventListener("popstate", arrived);
  watchChanges((found) => {
    if (found === problem) return;
    problem = found;
    if (problem || title) drawHeader();
    else showTitle();
  });
  showViewBar(byId("view-bar"));
  showPage();
  await showTitle();
}

async function showTitle() {
  try {
    const info = await serverInfo();
    title = info.name;
    leftOut = info.bounds?.left_out ?? [];
  } catch {
    // The views show the error.
  }
  drawHeader();
}

begin();
