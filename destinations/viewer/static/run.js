/** The page of one run: its curves, what it was, what it left, what it cost, and its log. */

import { MetricChart } from "./chart.js";
import { editRun, fileUrl, isExported, readLog, runDetail, selectedRows } from "./data.js";
import {
  breakable,
  el,
  fill,
  formatAge,
  formatBytes,
  formatDuration,
  formatNumber,
  formatTime,
  icon,
  inTurn,
  shorten,
  tagsIn,
  toast,
} from "./dom.js";
import { chartRank } from "./names.js";
import { statusMark } from "./runs.js";
import { linkTo, selectRuns, selectedRuns, state } from "./state.js";
import { dataTable, flatten, pairTable, plainTable } from "./table.js";
import { faultTable, timeBand } from "./time.js";
import { View } from "./view.js";

/** The columns of the statistics of metrics, with their headings. */
const SUMMARY_COLUMNS = {
  metric: "metric",
  last: "last",
  min: "min",
  min_step: "at step",
  max: "max",
  max_step: "at step",
  mean: "mean",
  count: "values",
  non_finite: "not finite",
};
const MOST_CURVES = 6;
const LOG_TAIL = 65536;
const MOST_ROWS_OF_LOG = 1 << 20;

/** Shows the run of the view in an element until the returned function is called. */
export function showRun(root) {
  const id = state.id;
  const page = el("section", { class: "page run-page" }, el("p", { class: "empty" }, "Loading…"));
  fill(root, page);
  const view = new View();
  let isDrawn = false;
  /** @type {LogTail | null} */
  let log = null;
  /** @type {ReturnType<typeof dataTable> | null} */
  let metrics = null;
  const top = el("div", { style: { display: "contents" } });
  const time = el("div", { style: { display: "contents" } });
  /** @type {Map<string, MetricChart>} */
  const charts = new Map();
  const curves = el("section", { class: "cards run-curves", "aria-label": "Curves" });
  const panels = el("div", { class: "panels" });
  const shown = new Map();

  const load = inTurn(() =>
    view.ask(
      async () => {
        const [detail, [row]] = await Promise.all([runDetail(id), selectedRows([id])]);
        return { ...detail, constant: row?.constant ?? [] };
      },
      (detail) => {
        if (page.querySelector(".in-place")) return;
        draw(detail);
        isDrawn = true;
      },
      (error) => {
        // What is shown stays where the server only does not answer.
        if (isDrawn && /** @type {any} */ (error).status !== 404) return;
        fill(
          page,
          el(
            "p",
            { class: "empty" },
            error.message,
            el("br", {}),
            el("a", { class: "button", ...linkTo({ page: "runs", id: "" }) }, "All runs"),
          ),
        );
      },
    ),
  );

  /** Returns the properties of a link to a view of the selected runs if this is one of them, else of this one. */
  function linkToRuns(target) {
    return linkTo(() => ({
      page: target,
      run: selectedRuns().includes(id) ? state.run : [id],
      id: "",
    }));
  }

  /** Draws the curves that say most, in the order of the charts; those that are there stay. */
  function drawCurves({ metrics, constant }) {
    const constants = new Set(constant);
    const rankOf = (name) => chartRank(name, constants);
    const order = metrics.toSorted((one, other) => rankOf(one) - rankOf(other) || one.localeCompare(other));
    const shown = order.slice(0, MOST_CURVES);
    const content = JSON.stringify([shown, order.length]);
    if (curves.dataset.content === content) return;
    curves.dataset.content = content;
    for (const [name, chart] of charts)
      if (!shown.includes(name)) {
        chart.remove();
        charts.delete(name);
      }
    for (const name of shown)
      if (!charts.has(name)) charts.set(name, new MetricChart(name, { runs: () => [id] }));
    const more =
      order.length > shown.length &&
      el("a", { class: "button quiet", ...linkToRuns("charts") }, `All ${order.length} charts`);
    fill(
      curves,
      shown.map((name) => charts.get(name)?.element),
      more,
    );
    for (const chart of charts.values()) chart.setVisible(true);
  }

  /** Draws what is known of the run. A panel that says the same as before stays, with what is scrolled or open in it. */
  function draw(detail) {
    const isChosen = state.run.includes(id);
    const nodes = [];
    const head = el(
      "div",
      { class: "run-head" },
      el("h1", { dir: "auto" }, breakable(shorten(detail.name, 300))),
      statusMark(detail),
      el(
        "span",
        { class: "actions" },
        el(
          "button",
          {
            type: "button",
            class: "button",
            "aria-pressed": String(isChosen),
            onclick: () => {
              selectRuns([id], !isChosen);
              draw(detail);
            },
          },
          icon("check"),
          isChosen ? "Selected" : "Select",
        ),
        el("a", { class: "button primary", ...linkToRuns("charts") }, icon("chart"), "Charts"),
        el("a", { class: "button", ...linkToRuns("media") }, "Media"),
      ),
    );
    const facts = el(
      "div",
      { class: "run-facts" },
      fact("Started", `${formatTime(detail.created_at)} (${formatAge(detail.created_at)})`),
      fact("Duration", formatDuration(detail.duration)),
      fact("Id", detail.run_id),
      fact("Folder", detail.path),
      fact("Host", detail.environment?.host ?? detail.environment?.hostname),
      fact("Commit", shorten(detail.git?.commit ?? detail.git?.sha ?? "", 12)),
    );
    if (!page.contains(panels)) fill(page, top, curves, time, panels);
    fill(
      top,
      head,
      facts,
      el(
        "div",
        { class: "run-facts" },
        editable("Tags", detail.tags.join(", "), "none", (text) => ({
          tags: tagsIn(text),
          was: { tags: detail.tags },
        })),
        editable("Note", detail.note ?? "", "none", (text) => ({
          note: text,
          was: { note: detail.note ?? "" },
        })),
      ),
    );
    drawCurves(detail);
    fill(time, detail.time?.wall ? timeBand(detail.time) : false);

    if (detail.problem)
      panel("Something could not be read", el("p", { class: "bad" }, shorten(detail.problem, 2000)));
    if (detail.errors?.length)
      panel(
        "Errors",
        el(
          "div",
          { class: "body" },
          detail.errors.map((error) =>
            el(
              "pre",
              { class: "bad", style: { "white-space": "pre-wrap", "overflow-wrap": "anywhere" } },
              `${error.kind}${error.count > 1 ? ` (${error.count} times)` : ""}: ${shorten(error.text, 4000)}`,
            ),
          ),
        ),
        "wide",
      );
    if (detail.flight?.summary.length)
      panel(
        "Flight recording",
        el(
          "div",
          { class: "body" },
          detail.flight.summary.map((line) => el("p", { class: "bad" }, shorten(line, 2000))),
          detail.flight.ranks.map((one) =>
            el(
              "details",
              {},
              el("summary", {}, `Rank ${one.rank}, ${formatTime(one.time)}: where it was`),
              el(
                "pre",
                { style: { "white-space": "pre-wrap", "overflow-wrap": "anywhere" } },
                one.stack
                  .map(
                    (frame) =>
                      `${frame.place} in ${frame.function}${frame.code ? `\n    ${frame.code}` : ""}`,
                  )
                  .join("\n"),
              ),
            ),
          ),
        ),
        "wide",
      );
    if (detail.time?.faults.length) panel("Faults", faultTable(detail.time.faults), "wide");
    const fields = Object.keys(SUMMARY_COLUMNS);
    const summary = Object.entries(detail.summary ?? {}).map(([metric, one]) =>
      fields.map((name) => ({ metric, ...one })[name]),
    );
    if (summary.length) {
      const orders = fields.map((name) => detail.summary_orders[name]);
      // The same table again: it has been sorted, and its filter is being typed.
      if (metrics) metrics.show(summary, orders);
      else {
        const columns = fields.map((name) => ({ name: SUMMARY_COLUMNS[name] }));
        metrics = dataTable(columns, summary, orders, { name: "metrics" });
      }
      if (!shown.has("Metrics")) panel("Metrics", el("div", { class: "body" }, metrics), "wide");
      else nodes.push(shown.get("Metrics").node);
    }
    if (detail.writers?.length)
      panel(
        "Writers",
        scroll(
          plainTable(
            detail.writers.map((one) => [
              el("td", { dir: "auto" }, shorten(one.name, 100)),
              el("td", {}, one.status),
              el("td", { class: one.rows === null ? "bad" : "number" }, one.rows ?? "cannot be read"),
              el(
                "td",
                { class: "time" },
                one.seen_at ? `${formatTime(one.seen_at)} (${formatAge(one.seen_at)})` : "–",
              ),
            ]),
            ["Writer", "Status", "Rows", "Last sign of life"],
          ),
        ),
      );
    const hyperparameters = flatten(detail.hyperparameters ?? {}).filter(([name]) => name);
    panel(
      "Hyperparameters",
      hyperparameters.length ? scroll(pairTable(hyperparameters)) : el("p", {}, "None were logged."),
    );
    panel("What logging cost", costOf(detail));
    if (detail.sessions?.length) {
      panel(
        "Sessions",
        scroll(
          plainTable(
            detail.sessions.map((one) => [
              el("td", { class: "time" }, formatTime(one.start)),
              el("td", {}, one.end ? formatDuration(one.end - one.start) : "–"),
              el("td", { title: shorten(one.exception ?? "", 500) }, one.status ?? "–"),
              el("td", {}, one.resume_step ?? "the start"),
              el("td", {}, shorten(one.host ?? "–", 60)),
            ]),
            ["Started", "Duration", "Status", "From step", "Host"],
          ),
        ),
      );
    }
    if (detail.branches?.length)
      panel(
        "Left by a resume",
        el(
          "p",
          {},
          detail.branches
            .map(
              (one) =>
                `After step ${formatNumber(one.from_step)}: ${one.file}${one.rank ? ` (rank ${one.rank})` : ""}`,
            )
            .join("; "),
          ". Charts show these rows as dotted lines.",
        ),
      );
    if (detail.checkpoints?.length)
      panel(
        "Checkpoints",
        scroll(
          plainTable(
            detail.checkpoints.map((one) => [
              el("td", { dir: "auto", title: shorten(one.path, 500) }, shorten(one.name, 120)),
              el("td", { class: "number" }, formatBytes(one.size)),
              el("td", { class: "muted time" }, formatTime(one.time)),
              el("td", { class: one.exists ? "good" : "bad" }, one.exists ? "there" : "missing"),
            ]),
          ),
        ),
      );
    if (detail.artifacts?.length)
      panel(
        "Artifacts",
        scroll(
          plainTable(
            detail.artifacts.map((one) => [
              el(
                "td",
                { dir: "auto" },
                one.file
                  ? el("a", { href: fileUrl(id, one.file), download: "" }, shorten(one.name, 120))
                  : shorten(one.name, 120),
                one.uri && el("div", { class: "muted mono" }, shorten(one.uri, 200)),
              ),
              el("td", { class: "number" }, formatBytes(one.size)),
              el(
                "td",
                { class: one.arrived === false ? "bad" : one.arrived ? "good" : "muted" },
                one.arrived ? "arrived" : one.arrived === false ? "not arrived" : "unknown",
              ),
            ]),
          ),
        ),
      );
    const git = detail.git ?? {};
    const startTime = detail.environment?.time;
    const environment = flatten(
      Object.fromEntries(
        Object.entries(detail.environment ?? {}).filter(
          ([name]) => !["packages", "git", "time"].includes(name),
        ),
      ),
    );
    if (startTime) environment.unshift(["time", formatTime(startTime)]);
    if (Object.keys(git).length) panel("Code", scroll(pairTable(flatten(git))));
    if (environment.length > 1) panel("Environment", scroll(pairTable(environment)));
    const packages = Object.entries(detail.environment?.packages ?? {});
    if (packages.length) panel(`Packages (${packages.length})`, scroll(pairTable(packages)));
    const damaged = Object.entries(detail.damaged_lines ?? {}).filter(([, count]) => count);
    if (damaged.length) panel("Damaged lines", scroll(pairTable(damaged)));
    if (detail.logs?.length) {
      log = log ?? new LogTail(id, detail.logs);
      nodes.push(log.element);
      log.more();
    }
    if (nodes.length !== panels.children.length || nodes.some((node, at) => node !== panels.children[at]))
      fill(panels, nodes);

    function panel(title, content, more = "") {
      const node = el(
        "section",
        { class: `panel ${more}`, "data-panel": title },
        el("h2", {}, title),
        content,
      );
      const text = node.outerHTML;
      if (shown.get(title)?.text !== text) shown.set(title, { node, text });
      nodes.push(shown.get(title).node);
    }
  }

  function fact(name, value) {
    return value
      ? el("span", {}, `${name} `, el("b", { dir: "auto" }, breakable(shorten(value, 200))))
      : null;
  }

  function editable(name, value, nothing, patchOf) {
    const node = el("span", {}, `${name} `, el("b", { dir: "auto" }, shorten(value || nothing, 1000)), " ");
    if (isExported) return node;
    node.append(
      el(
        "button",
        {
          type: "button",
          class: "icon-button",
          "aria-label": `Edit ${name.toLowerCase()}`,
          title: `Edit ${name.toLowerCase()}`,
          onclick: edit,
        },
        icon("edit"),
      ),
    );
    function edit() {
      const input = el("input", {
        class: "in-place",
        style: { width: "340px" },
        value,
        "aria-label": name,
        dir: "auto",
      });
      let isDone = false;
      const end = async (isKept) => {
        if (isDone) return;
        isDone = true;
        input.remove();
        if (isKept && input.value !== value) {
          try {
            await editRun(id, patchOf(input.value));
          } catch (error) {
            toast(error.message, "error");
          }
        }
        await load();
      };
      input.addEventListener("keydown", (event) => {
        if (event.key === "Enter") end(true);
        if (event.key === "Escape") end(false);
      });
      input.addEventListener("blur", () => end(true));
      fill(node, `${name} `, input);
      input.focus();
    }
    return node;
  }

  view.onState((changed) => {
    for (const chart of charts.values()) {
      if (changed.has("zoom")) chart.followZoom();
      if (changed.has("open")) chart.mark();
    }
  });
  view.onTheme(() => {
    for (const chart of charts.values()) chart.draw();
  });
  view.onData((changed) => {
    if (changed.all || changed.runs[id]?.record || changed.runs[id]?.gone) load();
    if (changed.all || changed.runs[id]) for (const chart of charts.values()) chart.grow([id]);
  });
  view.until(() => {
    for (const chart of charts.values()) chart.remove();
  });
  load();
  return () => view.leave();
}

function scroll(content) {
  return el("div", { class: "scroll", tabIndex: 0 }, content);
}

function costOf(detail) {
  const cost = detail.overhead ?? {};
  const pairs = [
    ["Calls", cost.calls],
    [
      "A call, median",
      cost.p50_us !== undefined && cost.p50_us !== null ? `${formatNumber(cost.p50_us)} µs` : null,
    ],
    [
      "A call, 99th percentile",
      cost.p99_us !== undefined && cost.p99_us !== null ? `${formatNumber(cost.p99_us)} µs` : null,
    ],
    ["In all, about", cost.calls && cost.p50_us ? formatDuration((cost.calls * cost.p50_us) / 1e6) : null],
    ["Metrics on disk", cost.csv_bytes !== undefined ? formatBytes(cost.csv_bytes) : null],
    ["Safe on disk to step", cost.safe_on_disk_to_step],
    ["Media files", cost.media?.files],
    ["Rows waiting", cost.waiting_rows || null],
    ["Refused", cost.refused || null],
    ["Damaged bytes", cost.damaged_bytes || null],
  ].filter(([, value]) => value !== null && value !== undefined);
  const lost = Object.entries(detail.lost ?? {}).filter(([, count]) => count);
  if (!pairs.length && !lost.length) return el("p", {}, "Not measured for this kind of run.");
  return [
    scroll(pairTable(pairs)),
    el(
      "p",
      { class: lost.length ? "bad" : "", style: { "padding-top": "10px" } },
      lost.length
        ? `Lost: ${lost.map(([kind, count]) => `${count} ${kind}`).join(", ")}.`
        : "Nothing was lost.",
    ),
  ];
}

/** The end of a log file, which grows with it. */
class LogTail {
  constructor(id, files) {
    this.id = id;
    this.file = files[0];
    this.next = null;
    this.isAsking = false;
    this.text = el("pre", { class: "log", tabIndex: 0, role: "log", "aria-label": "Log" });
    const choice =
      files.length > 1
        ? el(
            "select",
            {
              "aria-label": "Log file",
              onchange: () => {
                this.file = choice.value;
                this.next = null;
                this.text.textContent = "";
                this.more();
              },
            },
            files.map((file) => el("option", { value: file }, file)),
          )
        : el("span", { class: "muted" }, this.file);
    this.element = el(
      "section",
      { class: "panel wide", "data-panel": "Log" },
      el("h2", {}, "Log ", choice),
      this.text,
    );
  }

  async more() {
    if (this.isAsking) {
      this.isBehind = true;
      return;
    }
    this.isAsking = true;
    this.isBehind = false;
    const { file } = this;
    try {
      const { text, next } = await readLog(this.id, file, this.next ?? -LOG_TAIL);
      // Else another one was chosen meanwhile.
      if (file === this.file) this.append(text, next);
    } catch (error) {
      // What was read stays.
      if (file === this.file && this.next === null) this.text.textContent = error.message;
    } finally {
      this.isAsking = false;
      if (this.isBehind) this.more();
    }
  }

  append(text, next) {
    const isAtEnd = this.text.scrollTop + this.text.clientHeight >= this.text.scrollHeight - 30;
    if (this.next === null) this.text.textContent = "";
    if (this.next !== next) this.text.append(document.createTextNode(text));
    this.next = next;
    if (this.text.textContent.length > MOST_ROWS_OF_LOG)
      this.text.textContent = this.text.textContent.slice(-MOST_ROWS_OF_LOG / 2);
    if (isAtEnd) this.text.scrollTop = this.text.scrollHeight;
  }
}
