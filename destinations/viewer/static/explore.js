/** Hyperparameters against a metric, over all runs that match: a scatter plot and parallel coordinates. */

import { drawable, PLOT_CONFIG, plotLayout, plotText, plotlyReady, savePlot } from "./plot.js";
import { listFields, listRuns } from "./data.js";
import { debounce, download, el, fill, formatNumber, inTurn, isDark, shorten, svg, toCsv } from "./dom.js";
import { FilterField } from "./filter.js";
import { ramp } from "./points.js";
import { filterOf, keepNumbers, numbersOf, state, styleOf, update } from "./state.js";
import { View } from "./view.js";

const MOST_SHOWN = 1000;
const MOST_AXES_SHOWN = 12;
const HEIGHT = 340;
const MARGIN = { top: 46, bottom: 24, side: 60 };

const MOST_TICKS = 12;

/** Whether an axis is logarithmic: as chosen, "0" or "1", or else where its positive values span two decades. */
function isLog(chosen, values) {
  if (chosen !== "") return chosen === "1";
  const numbers = values.filter((value) => typeof value === "number");
  const least = Math.min(...numbers);
  return (
    numbers.length > 1 && numbers.length === values.length && least > 0 && Math.max(...numbers) / least >= 100
  );
}

/** Returns the ticks of an axis with few values: at these values. */
function ticksAt(values) {
  const found = [...new Set(values)].sort((one, other) => one - other);
  if (!found.length || found.length > MOST_TICKS) return {};
  return { tickmode: "array", tickvals: found, ticktext: found.map(formatNumber) };
}

/** Shows the plots in an element until the returned function is called. */
export function showExplore(root) {
  let fields = [];
  let rows = [];
  let total = 0;
  /** The values of columns of words, as the server sorts them. */
  const orders = new Map();
  const view = new View("explore");

  const filter = new FilterField(() => fields);
  const x = el("select", {
    id: "scatter-x",
    "aria-label": "Horizontal",
    onchange: () => update({ sx: x.value }),
  });
  const y = el("select", {
    id: "scatter-y",
    "aria-label": "Metric",
    onchange: () => update({ sy: y.value }),
  });
  const logX = el(
    "button",
    {
      type: "button",
      class: "button",
      onclick: () => update({ logx: logX.getAttribute("aria-pressed") === "true" ? "0" : "1" }),
    },
    "log x",
  );
  const logY = el(
    "button",
    { type: "button", class: "button", onclick: () => update({ logy: state.logy ? "" : "1" }) },
    "log y",
  );
  const count = el("span", { class: "muted count" });
  const plot = el("div", { class: "plot", id: "scatter", style: { height: "310px" } });
  const holder = el("div", { id: "parallel", style: { padding: "0 8px 10px" } });
  const title = el("h3", {});
  const saves = (kinds) =>
    kinds.map(([kind, act]) =>
      el(
        "button",
        {
          type: "button",
          class: "icon-button",
          style: { width: "auto", padding: "0 7px", "font-size": "11.5px" },
          "aria-label": `Save as ${kind}`,
          onclick: act,
        },
        kind,
      ),
    );
  fill(
    root,
    el(
      "section",
      { class: "page" },
      el(
        "div",
        { class: "toolbar" },
        filter.element,
        y,
        el("span", { class: "muted" }, "against"),
        x,
        logX,
        logY,
        count,
      ),
      filter.problem,
      el(
        "section",
        { class: "card wide" },
        el(
          "div",
          { class: "card-head" },
          title,
          saves([
            ["PNG", () => savePlot(plot, title.textContent, "png")],
            ["SVG", () => savePlot(plot, title.textContent, "svg")],
            ["CSV", saveCsv],
          ]),
        ),
        plot,
      ),
      el(
        "section",
        { class: "card wide" },
        el(
          "div",
          { class: "card-head" },
          el("h3", {}, "Parallel coordinates"),
          el("span", { class: "badge" }, "Drag along an axis to choose a range; click its name to leave it."),
          saves([
            ["SVG", saveParallel],
            ["CSV", saveCsv],
          ]),
        ),
        holder,
      ),
    ),
  );

  const resized = new ResizeObserver(
    debounce(() => {
      if (plot.data && plot.clientWidth) globalThis.Plotly.Plots.resize(plot);
      drawParallel();
    }, 80),
  );
  resized.observe(holder);
  view.until(() => resized.disconnect());

  function hparams() {
    return fields
      .filter(
        ({ name, kind }) =>
          name.startsWith("hparams.") && (kind === "number" || kind === "bool" || kind === "text"),
      )
      .map(({ name }) => name);
  }

  function metrics() {
    return fields
      .filter(({ name, kind }) => name.startsWith("summary.") && kind === "number")
      .map(({ name }) => name);
  }

  /** Returns the chosen column, or the one that says most: a hyperparameter that differs, a metric of evaluation. */
  function chosen() {
    const varied = hparams().filter((name) => new Set(rows.map((row) => row.values[name])).size > 1);
    const main = metrics().toSorted((one, other) => rank(one) - rank(other))[0];
    return {
      sx:
        state.sx ||
        varied.find((name) => /lr|learning/i.test(name)) ||
        varied[0] ||
        hparams()[0] ||
        "created_at",
      sy: state.sy || main || "",
      varied,
    };
  }

  function rank(name) {
    return (
      [/(val|test|eval).*acc/i, /acc/i, /(val|test|eval).*loss/i, /loss|reward|score/i].findIndex((kind) =>
        kind.test(name),
      ) >>> 0
    );
  }

  function load() {
    return view.ask(
      async () => {
        fields = (await listFields()).fields;
        const names = [...metrics(), ...hparams()].slice(0, 300);
        return listRuns({ where: filterOf(), columns: names, limit: MOST_SHOWN });
      },
      (answer) => {
        filter.complain(null);
        ({ rows, total } = answer);
        orders.clear();
        drawInOrder();
      },
      (error) => filter.complain(error),
    );
  }

  function isOfWords(name) {
    return rows.some((row) => valueIn(row, name) !== undefined && typeof valueIn(row, name) !== "number");
  }

  /** Asks in which order the words of an axis come, where that is not known yet, and draws. */
  async function drawInOrder() {
    const of = rows;
    const names = [...new Set([chosen().sx, ...axes()])].filter(
      (name) => isOfWords(name) && !orders.has(name),
    );
    const sorted = await Promise.all(
      names.map((name) =>
        listRuns({ where: filterOf(), columns: [name], sort: name, limit: MOST_SHOWN }).then(
          (answer) => answer.rows,
          // Without an order they come as the runs do.
          () => rows,
        ),
      ),
    );
    if (view.isGone || of !== rows) return;
    for (const [at, name] of names.entries())
      orders.set(name, [...new Set([...sorted[at], ...rows].map((row) => valueIn(row, name)))]);
    draw();
  }

  function draw() {
    const { sx, sy } = chosen();
    const option = (name) =>
      el("option", { value: name }, shorten(name.replace(/^(summary|hparams)\./, ""), 60));
    fill(
      x,
      el("optgroup", { label: "Hyperparameters" }, hparams().map(option)),
      el("optgroup", { label: "Metrics" }, metrics().map(option)),
      option("created_at"),
    );
    fill(y, metrics().map(option));
    x.value = sx;
    y.value = sy;
    logY.setAttribute("aria-pressed", String(state.logy === "1"));
    fill(
      count,
      total > rows.length
        ? `${rows.length} of ${formatNumber(total)} runs`
        : total === 1
          ? "1 run"
          : `${total} runs`,
    );
    fill(title, `${bare(sy)} against ${bare(sx)}`);
    drawScatter(sx, sy);
    drawParallel();
  }

  function bare(name) {
    return shorten(name.replace(/^(summary|hparams)\./, ""), 60);
  }

  function valueIn(row, name) {
    // What is none has no place on an axis.
    return (name === "created_at" ? row.created_at : row.values[name]) ?? undefined;
  }

  function isOut(row) {
    for (const name of axes()) {
      const [low, high] = numbersOf("brush", name) ?? [0, 1];
      if (low === 0 && high === 1) continue;
      const place = axisOf(name).place(valueIn(row, name));
      if (place === null || place < low || place > high) return true;
    }
    return false;
  }

  async function drawScatter(sx, sy) {
    const Plotly = await plotlyReady();
    if (view.isGone) return;
    // What is drawn last is in front: the selected runs.
    const shown = rows
      .filter((row) => valueIn(row, sx) !== undefined && typeof valueIn(row, sy) === "number")
      .sort((one, other) => Number(state.run.includes(one.id)) - Number(state.run.includes(other.id)));
    const isTime = sx === "created_at",
      isText = shown.some((row) => typeof valueIn(row, sx) !== "number");
    const xs = shown.map((row) =>
      isTime ? row.created_at * 1000 : isText ? word(valueIn(row, sx)) : valueIn(row, sx),
    );
    const trace = {
      type: "scatter",
      mode: "markers",
      x: drawable(xs),
      y: drawable(shown.map((row) => valueIn(row, sy))),
      hoverinfo: "text",
      customdata: shown.map(({ id }) => id),
      text: shown.map((row) =>
        plotText(`${shorten(row.name, 60)}\n${bare(sy)} ${formatNumber(valueIn(row, sy))}`).replace(
          "\n",
          "<br>",
        ),
      ),
      marker: {
        size: shown.map((row) => (state.run.includes(row.id) ? 14 : 10)),
        opacity: shown.map((row) => (isOut(row) ? 0.15 : 0.85)),
        color: shown.map((row) =>
          state.run.includes(row.id) ? styleOf(row.id, isDark()).color : isDark() ? "#8b93a5" : "#7b8496",
        ),
        line: { width: 1, color: isDark() ? "#17181b" : "#ffffff" },
      },
    };
    const isLogX = isLog(state.logx, xs);
    logX.setAttribute("aria-pressed", String(!isTime && !isText && isLogX));
    const isNew = !plot.data;
    await Plotly.react(
      plot,
      [trace],
      plotLayout({
        hovermode: "closest",
        hoverdistance: 12,
        margin: { l: 64, r: 18, t: 8, b: 44 },
        hoverlabel: {
          bgcolor: isDark() ? "#1e2024" : "#ffffff",
          bordercolor: isDark() ? "#3a3d44" : "#cfcfc8",
          font: { color: isDark() ? "#ececef" : "#1a1b1e", size: 12 },
        },
        xaxis: {
          type: isTime ? "date" : isText ? "category" : isLogX ? "log" : "linear",
          ...ticksAt(isTime || isText ? [] : xs),
          ...(isText && { categoryorder: "array", categoryarray: wordsOf(sx).map(word) }),
          title: { text: plotText(bare(sx)), standoff: 6 },
        },
        yaxis: { type: state.logy ? "log" : "linear", title: { text: plotText(bare(sy)), standoff: 6 } },
      }),
      PLOT_CONFIG,
    );
    if (isNew) plot.on("plotly_click", (event) => update({ page: "run", id: event.points[0].customdata }));
  }

  function word(value) {
    return plotText(shorten(value, 40));
  }

  /** Returns the different values of a column, in order. */
  function wordsOf(name) {
    const there = new Set(rows.map((row) => valueIn(row, name)));
    return (orders.get(name) ?? [...there]).filter((value) => value !== undefined && there.has(value));
  }

  /** Returns where values lie on an axis, from 0 to 1, and its ticks. Positive values over two decades are on a log scale. */
  function axisOf(name) {
    const values = rows
      .map((row) => valueIn(row, name))
      .filter((value) => value !== undefined && value !== null && !Number.isNaN(value));
    if (values.every((value) => typeof value === "number")) {
      const finite = values.filter(Number.isFinite);
      const low = finite.length ? Math.min(...finite) : 0,
        high = finite.length ? Math.max(...finite) : 0;
      const isLogAxis = isLog("", finite);
      // Halves: of two numbers at opposite ends of what a double holds, the distance is infinite.
      const to = isLogAxis ? Math.log10 : (value) => value;
      const from = isLogAxis ? (value) => 10 ** value : (value) => value;
      const share = (value) => (to(value) / 2 - to(low) / 2) / (to(high) / 2 - to(low) / 2);
      const place = (value) =>
        typeof value === "number" && Number.isFinite(value)
          ? high / 2 > low / 2
            ? share(value)
            : 0.5
          : null;
      // At the values themselves, unless they would lie on one another.
      const few = [...new Set(finite)].sort((one, other) => one - other);
      const isFew =
        few.length <= MOST_TICKS &&
        few.every((value, at) => !at || (place(value) ?? 0) - (place(few[at - 1]) ?? 0) > 0.04);
      return {
        place,
        ticks: isFew
          ? few.map((value) => [place(value), formatNumber(value)])
          : (high > low ? [0, 0.25, 0.5, 0.75, 1] : [0.5]).map((at) => [
              at,
              formatNumber(Number(from(to(low) * (1 - at) + to(high) * at).toPrecision(3))),
            ]),
      };
    }
    const words = wordsOf(name);
    const place = (value) => {
      const at = words.indexOf(value);
      return at < 0 ? null : words.length > 1 ? at / (words.length - 1) : 0.5;
    };
    return { place, ticks: words.slice(0, 20).map((value) => [place(value), shorten(value, 14)]) };
  }

  function axes() {
    const { sy, varied } = chosen();
    const left = state.hide.filter((name) => name.startsWith("hparams."));
    return [...varied.filter((name) => !left.includes(name)).slice(0, MOST_AXES_SHOWN - 1), sy].filter(
      Boolean,
    );
  }

  function drawParallel() {
    if (view.isGone) return;
    const names = axes();
    const width = Math.max(300, holder.clientWidth - 16);
    if (names.length < 2) {
      fill(holder, el("p", { class: "empty" }, "There is no hyperparameter in which these runs differ."));
      return;
    }
    const inner = HEIGHT - MARGIN.top - MARGIN.bottom;
    const left = (at) => MARGIN.side + (at / (names.length - 1)) * (width - 2 * MARGIN.side);
    const top = (place) => MARGIN.top + (1 - place) * inner;
    const scales = names.map(axisOf);
    const color = (row) => {
      const place = scales[names.length - 1].place(valueIn(row, names[names.length - 1]));
      return place === null ? "gray" : `rgb(${ramp(isDark() ? 0.2 + 0.8 * place : 0.88 * place)})`;
    };
    const said = el("p", { class: "muted", style: { padding: "0 10px", "min-height": "20px" } });
    const lines = rows
      .toSorted((one, other) => Number(isOut(other)) - Number(isOut(one)))
      .map((row) => {
        const points = names
          .map((name, at) => ({ across: left(at), place: scales[at].place(valueIn(row, name)) }))
          .filter(({ place }) => place !== null)
          .map(({ across, place }) => `${across.toFixed(1)},${top(place).toFixed(1)}`);
        const line = svg("polyline", {
          points: points.join(" "),
          stroke: color(row),
          class: isOut(row) ? "out" : "",
          "data-run": row.id,
          onpointerenter: () => {
            line.classList.add("over");
            said.textContent = `${shorten(row.name, 80)}: ${names.map((name) => `${bare(name)} ${shorten(formatNumber(valueIn(row, name)), 30)}`).join(", ")}`;
          },
          onpointerleave: () => {
            line.classList.remove("over");
            said.textContent = "";
          },
          onclick: () => update({ page: "run", id: row.id }),
        });
        return line;
      });
    const groups = names.map((name, at) => {
      const held = numbersOf("brush", name);
      const ground = svg("rect", {
        class: "brush-ground",
        x: left(at) - 14,
        y: MARGIN.top - 6,
        width: 28,
        height: inner + 12,
      });
      ground.addEventListener("pointerdown", (event) => startBrush(event, name, ground));
      return svg(
        "g",
        { "data-axis": name },
        svg("line", { class: "axis", x1: left(at), x2: left(at), y1: MARGIN.top, y2: MARGIN.top + inner }),
        svg(
          "text",
          {
            class: "axis-name",
            x: left(at),
            y: 20,
            "text-anchor": at === 0 ? "start" : at === names.length - 1 ? "end" : "middle",
            dx: at === 0 ? -30 : at === names.length - 1 ? 30 : 0,
            onclick: () => {
              if (at < names.length - 1) update({ hide: [...state.hide, name] });
            },
          },
          shorten(bare(name), 24),
        ),
        scales[at].ticks.map(([place, text]) =>
          svg(
            "text",
            {
              x: left(at) + (at === names.length - 1 ? 8 : -8),
              y: top(place) + 4,
              "text-anchor": at === names.length - 1 ? "start" : "end",
            },
            text,
          ),
        ),
        held
          ? svg("rect", {
              class: "brush",
              x: left(at) - 7,
              width: 14,
              y: top(held[1]),
              height: Math.max(2, (held[1] - held[0]) * inner),
              rx: 3,
            })
          : null,
        ground,
      );
    });
    fill(
      holder,
      svg(
        "svg",
        {
          class: "parallel",
          viewBox: `0 0 ${width} ${HEIGHT}`,
          height: HEIGHT,
          role: "img",
          "aria-label": "Parallel coordinates of hyperparameters and a metric",
        },
        lines,
        groups,
      ),
      said,
      state.hide.some((name) => name.startsWith("hparams.")) &&
        el(
          "button",
          {
            type: "button",
            class: "button quiet",
            onclick: () => update({ hide: state.hide.filter((name) => !name.startsWith("hparams.")) }),
          },
          "Show all axes",
        ),
    );
  }

  function startBrush(event, name, ground) {
    const box = ground.getBoundingClientRect();
    const placeAt = (clientY) => Math.max(0, Math.min(1, 1 - (clientY - box.top - 6) / (box.height - 12)));
    const from = placeAt(event.clientY);
    const move = (moved) => {
      const to = placeAt(moved.clientY);
      keepNumbers(
        "brush",
        name,
        Math.abs(to - from) < 0.015
          ? null
          : [Math.min(from, to), Math.max(from, to)].map((place) => Number(place.toFixed(3))),
      );
    };
    const end = (last) => {
      move(last);
      removeEventListener("pointermove", move);
    };
    addEventListener("pointermove", move);
    addEventListener("pointerup", end, { once: true });
  }

  function saveCsv() {
    const names = [...axes(), chosen().sx].filter((name, at, all) => all.indexOf(name) === at);
    download(
      "runs.csv",
      toCsv([
        ["run", "name", ...names.map(bare)],
        ...rows.map((row) => [row.id, row.name, ...names.map((name) => valueIn(row, name))]),
      ]),
      "text/csv",
    );
  }

  function saveParallel() {
    const drawn = holder.querySelector("svg").cloneNode(true);
    const style = document.createElementNS("http://www.w3.org/2000/svg", "style");
    style.textContent = `text{font:11.5px sans-serif;fill:${isDark() ? "#ddd" : "#444"}}.axis{stroke:#999}polyline{fill:none;stroke-width:1.6;stroke-opacity:.75}.out{stroke:#ccc}.brush-ground{fill:none}.brush{fill:#2456c9;fill-opacity:.16}`;
    drawn.prepend(style);
    download("parallel.svg", new XMLSerializer().serializeToString(drawn), "image/svg+xml");
  }

  view.onState((changed) => {
    if (changed.has("where") || changed.has("without")) load();
    else if (["sx", "sy", "logx", "logy", "hide", "run"].some((name) => changed.has(name))) drawInOrder();
    else if (changed.has("brush")) {
      const { sx, sy } = chosen();
      drawScatter(sx, sy);
      drawParallel();
    }
  });
  const refresh = inTurn(load);
  view.onData((changed) => {
    if (changed.table) refresh();
  });
  view.onTheme(draw);
  view.until(() => plot.data && globalThis.Plotly.purge(plot));
  load();
  return () => view.leave();
}
