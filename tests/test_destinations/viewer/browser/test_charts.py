"""Charts in a real browser: drawing, hovering, zooming and memory."""

import csv
import io
import itertools
import re
import xml.etree.ElementTree as ET

import pytest

from tests.test_destinations.runs.written import Written
from tests.test_destinations.viewer.browser.browser_runs import LONG, SPIKE_AT

pytestmark = pytest.mark.xdist_group("browser")


def card(opened, metric):
    """Returns the card of a metric."""
    return opened.page.locator(f'.chart[data-metric="{metric}"]')


def show(opened, *names, more=""):
    """Shows the charts of some runs; returns their ids."""
    ids = [opened.id_of(name) for name in names]
    opened.go("charts?" + "&".join(f"run={one}" for one in ids) + more)
    return ids


def axis_range(opened, metric):
    """Returns the visible range of the x axis."""
    return opened.page.evaluate(
        "(metric) => [...document.querySelectorAll('.chart')].find((card) => card.dataset.metric === metric).querySelector('.plot').layout.xaxis.range",
        metric,
    )


def test_two_chosen_runs_are_two_lines(opened):
    """Two runs chosen in the table are two lines of the logged values, each in its colour."""
    page = opened.page
    ids = [opened.id_of("alpha"), opened.id_of("beta")]
    for one in ids:
        page.locator(f'.grid-row[data-run="{one}"] .pick input').check()
    page.get_by_role("link", name="Charts").first.click()
    lines = opened.drawn("loss", 2)
    assert set(lines) == set(ids)
    assert lines[ids[0]]["x"] == list(range(200))
    assert lines[ids[0]]["y"] == [1 / (1 + step) for step in range(200)]
    assert lines[ids[1]]["y"][10] == 2 / 11
    assert lines[ids[0]]["color"] != lines[ids[1]]["color"]
    assert (
        page.locator(f'.legend [data-run="{ids[0]}"] .swatch path').get_attribute("stroke")
        == lines[ids[0]]["color"]
    )
    sections = page.locator("[data-section] .section-head button").all_inner_texts()
    assert sections == ["val", "Metrics"], "grouped by prefix, what evaluates the model first"


def test_nan_is_marked(opened):
    """A NaN is a mark at its step, not a value of the line."""
    _, beta = show(opened, "alpha", "beta")
    opened.drawn("loss", 2)
    assert opened.traces("loss", "NaN")[beta]["x"] == [50]
    assert "NaN at 1 place" in card(opened, "loss").locator(".card-foot").inner_text()


def test_merged_points_keep_spikes_and_zoom_loads_every_value(opened):
    """A long run is drawn as merged points that keep a spike; a zoom loads every value, and is in the URL."""
    page = opened.page
    (long,) = show(opened, "long", more="&open=loss")
    before = opened.drawn("loss")[long]
    assert len(before["x"]) <= 1000 < LONG
    assert max(opened.traces("loss", "range")[long]["y"]) == 1000.0
    assert "mean of up to" in card(opened, "loss").locator(".means").get_attribute("title")
    box = opened.box(card(opened, "loss").locator(".nsewdrag"))
    left = box["x"] + box["width"] * (SPIKE_AT - 200) / LONG
    page.mouse.move(left, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(left + box["width"] * 400 / LONG, box["y"] + 62, steps=4)
    page.mouse.up()
    opened.until(
        """(step) => { const line = document.querySelector('.chart[data-metric=loss] .plot').data?.find((one) => one.meta.part === 'line');
            return line && line.x.includes(step) && line.y[line.x.indexOf(step)] === 1000; }""",
        SPIKE_AT,
    )
    after = opened.drawn("loss")[long]
    assert after["x"] == list(range(round(after["x"][0]), round(after["x"][-1]) + 1)), "each step is a point"
    assert opened.traces("loss", "range") == {}
    zoom = axis_range(opened, "loss")
    assert "zoom=" in page.url
    page.reload()
    assert opened.drawn("loss")[long]["x"] == after["x"]
    assert axis_range(opened, "loss") == pytest.approx(zoom)
    page.get_by_role("button", name="Reset zoom").click()
    opened.until(
        "() => document.querySelector('.chart[data-metric=loss] .plot').data?.find((one) => one.meta.part === 'line').x[0] === 0"
    )


def test_zoom_on_wall_time_has_milliseconds(opened):
    """The ends of a zoom are not rounded to seconds."""
    show(opened, "alpha", more="&x=time")
    opened.drawn("loss")
    opened.page.evaluate(
        "() => document.querySelector('.chart[data-metric=loss] .plot')"
        ".layout.onzoom({x: [1767323045.125, 1767323045.625], y: null})"
    )
    zoom = opened.until("() => decodeURIComponent(location.hash).match(/zoom=([^~]+)~([^~]+)/)?.slice(1)")
    assert [float(end) % 1 for end in zoom] == pytest.approx([0.125, 0.625])


def test_smoothing_keeps_the_raw_line_behind(opened):
    """Smoothing draws the corrected moving average in front of the raw values."""
    (alpha,) = show(opened, "alpha")
    raw = opened.drawn("loss")[alpha]["y"]
    opened.page.fill("#smooth", "0.9")
    opened.until(
        "() => document.querySelector('.chart[data-metric=loss] .plot').data?.some((one) => one.meta.part === 'raw')"
    )
    assert opened.traces("loss", "raw")[alpha]["y"] == raw
    last, expected = 0.0, []
    for count, value in enumerate(raw, 1):
        last = 0.9 * last + 0.1 * value
        expected.append(last / (1 - 0.9**count))
    assert opened.traces("loss")[alpha]["y"] == pytest.approx(expected)


def test_x_axes_and_log_scales(opened):
    """The x axis is relative time, wall time or another metric; both axes can be logarithmic."""
    page = opened.page
    (alpha,) = show(opened, "alpha")
    opened.drawn("loss")
    page.select_option("#x-axis", "metric:val/acc")
    opened.until(
        "() => Math.abs(document.querySelector('.chart[data-metric=loss] .plot').data?.find((one) => one.meta.part === 'line').x[0] - 0.5) < 1e-9"
    )
    assert opened.traces("loss")[alpha]["x"] == pytest.approx([1 - 1 / (2 + step) for step in range(200)])
    for axis in ("time", "relative"):
        page.select_option("#x-axis", axis)
        opened.until(
            "(name) => document.querySelector('.chart[data-metric=loss] .plot').layout?.xaxis.type === name",
            "date" if axis == "time" else "linear",
        )
        x = opened.traces("loss")[alpha]["x"]
        assert x == sorted(x)
    page.select_option("#x-axis", "step")
    page.click("#log-y")
    page.click("#log-x")
    opened.until(
        "() => ['xaxis', 'yaxis'].every((axis) => document.querySelector('.chart[data-metric=loss] .plot').layout?.[axis].type === 'log')"
    )


def test_hovering_names_the_nearest_run_first(opened):
    """Hovering shows the nearest run at the step, then the others with their differences."""
    show(opened, "alpha", "beta")
    opened.drawn("loss", 2)
    text = opened.hovered("loss")
    step = int(re.search(r"step (\d+)", text)[1])
    assert 95 <= step <= 105
    shown = [float(value) for value in re.findall(r"0\.\d+", text)]
    assert shown == pytest.approx([2 / (1 + step), 1 / (1 + step)], rel=1e-3)
    assert text.index("beta") < text.index("alpha")


def test_runs_that_differ_only_in_the_seed_are_a_band(opened):
    """Their band has min, median and max, and names the straggler."""
    show(opened, "alpha", "seed2", "seed3")
    opened.drawn("loss", 3)
    opened.page.select_option("#band", "range")
    opened.until(
        "() => document.querySelector('.chart[data-metric=loss] .plot').data?.some((one) => one.meta.part === 'median')"
    )
    (median,) = opened.traces("loss", "median").values()
    (band,) = opened.traces("loss", "range").values()
    assert median["y"] == pytest.approx([2 / (1 + step) for step in range(200)])
    assert band["y"][:200] == pytest.approx([3 / (1 + step) for step in range(200)])
    assert band["y"][:-201:-1] == pytest.approx([1 / (1 + step) for step in range(200)])
    assert "Furthest from the median: " in opened.hovered("loss", "Furthest")
    assert opened.page.locator(".band-legend li").all_inner_texts() == ["all\n3 runs"]


@pytest.mark.parametrize(("first", "last"), [("loss", "acc"), ("acc", "loss")])
def test_the_colour_of_a_band_is_the_same_in_all_charts(tmp_path, open_root, first, last):
    """Colours and legend follow the values, whichever chart comes first and whichever runs it shows."""
    for lr in (2, 10):
        with Written(tmp_path / "runs" / f"lr{lr}") as run:
            run.logger.log_hyperparameters({"lr": lr})
            for step in range(3):
                run.log({"loss": float(lr)} if lr == 2 else {"loss": 1.0, "acc": 1.0}, step)
    opened = open_root()
    # The last request is answered after the first chart is drawn.
    opened.page.route(
        re.compile(f"api/band.*metric={last}"),
        lambda route: (opened.drawn(first), route.continue_()),
    )
    query = "&".join(f"run={row['id']}" for row in opened.answer("runs")["rows"])
    opened.go(f"charts?{query}&band=range&group=hparams.lr")
    opened.drawn(last)
    found = {}
    for metric in ("loss", "acc"):
        found[metric] = {name: line["color"] for name, line in opened.traces(metric, "median").items()}
    legend = opened.page.locator(".band-legend li").all_inner_texts()
    strokes = [path.get_attribute("stroke") for path in opened.page.locator(".band-legend path").all()]
    assert legend == ["2\n1 run", "10\n1 run"]
    assert found == {"loss": dict(zip(["2", "10"], strokes, strict=True)), "acc": {"10": strokes[1]}}
    assert len(set(strokes)) == 2


def test_hovering_names_the_straggler_of_the_nearest_band(tmp_path, open_root):
    """Only the straggler of the band at the mouse is named, below the values."""
    for lr, seed in itertools.product((1, 2), range(4)):
        with Written(tmp_path / "runs" / f"lr{lr}-seed{seed}") as run:
            run.logger.log_hyperparameters({"lr": lr, "seed": seed})
            for step in range(20):
                run.log({"loss": lr * 10 + (seed == lr)}, step)
    opened = open_root()
    query = "&".join(f"run={row['id']}" for row in opened.answer("runs")["rows"])
    opened.go(f"charts?{query}&band=range&group=hparams.lr")
    opened.drawn("loss", 2)
    said = [
        opened.hovered("loss", f"of {lr}:", height).splitlines()[-1] for lr, height in ((2, 0.1), (1, 0.9))
    ]
    assert opened.page.locator(".hover-box:visible div").count() == 2
    assert card(opened, "loss").locator(".card-foot").inner_text() == ""
    assert said == [
        "Furthest from the median of 2: lr2-seed2, by 1 in the mean",
        "Furthest from the median of 1: lr1-seed1, by 1 in the mean",
    ]


def test_a_band_over_ranks_names_the_straggler(tmp_path, open_root):
    """The ranks of a run become a band, and the rank furthest from the others is named."""
    for rank in (0, 1, 2):
        with Written(tmp_path / "runs" / "ranks", rank=rank, all_ranks=True) as run:
            for step in range(20):
                run.log({"seconds": 1.0 if rank < 2 else 5.0}, step)
    opened = open_root()
    opened.go("charts?band=ranks")
    opened.drawn("seconds")
    (band,) = opened.traces("seconds", "range").values()
    assert (max(band["y"]), min(band["y"])) == (5.0, 1.0)
    assert "Furthest from the median: rank 2" in opened.hovered("seconds", "Furthest")


def test_charts_of_ended_runs_are_requested_once(opened):
    """They are drawn again from memory after another page was shown."""
    asked = []
    opened.page.on("request", lambda request: asked.append(request.url))
    show(opened, "alpha", "beta", "seed2")
    before = opened.drawn("loss", 3)
    opened.page.keyboard.press("1")
    opened.page.wait_for_selector(".grid-row[data-run]")
    asked.clear()
    opened.page.keyboard.press("2")
    assert opened.drawn("loss", 3) == before
    assert [url for url in asked if "/api/series" in url or "/api/selected" in url] == []


def test_a_noisy_line_is_smoothed_and_hovering_shows_its_values(tmp_path, open_root):
    """By default, a noisy line is smoothed gently in front of its values; "off" is a choice."""
    with Written(tmp_path / "runs" / "noisy") as run:
        for step in range(300):
            run.log({"noise": float(step * 7919 % 101), "slope": float(step)}, step)
    opened = open_root()
    opened.go("charts")
    opened.drawn("noise")
    opened.drawn("slope")
    (raw,) = opened.traces("noise", "raw").values()
    assert raw["y"] == [float(step * 7919 % 101) for step in range(300)]
    assert opened.traces("slope", "raw") == {}
    text = opened.hovered("noise")
    step, value = int(re.search(r"step (\d+)", text)[1]), float(re.search(r"(\d+)\s*$", text)[1])
    assert value == step * 7919 % 101
    opened.go("charts?smooth=0")
    opened.until("() => document.querySelector('.slider output').innerText === 'off'")
    opened.until(
        "() => { const data = document.querySelector('[data-metric=noise] .plot').data; return data && !data.some((one) => one.meta.part === 'raw'); }"
    )


def test_a_stretch_of_nan_is_marked_at_its_ends(tmp_path, open_root):
    """Many NaN in a row have two marks, and the card counts them."""
    with Written(tmp_path / "runs" / "diverged") as run:
        for step in range(100):
            run.log({"loss": float("nan") if step == 10 or step >= 60 else 1.0 + step}, step)
    opened = open_root()
    opened.go("charts")
    opened.drawn("loss")
    (marks,) = opened.traces("loss", "NaN").values()
    assert marks["x"] == [10, 60, 99]
    assert "NaN at 41 places" in card(opened, "loss").locator(".card-foot").inner_text()


def test_charts_are_pinned_hidden_and_found(opened):
    """A pinned chart comes first, a hidden one disappears, a search filters; the URL has all three."""
    page = opened.page
    show(opened, "alpha")
    opened.drawn("loss")
    card(opened, "val/acc").hover()
    card(opened, "val/acc").get_by_label("Pin").click()
    assert page.locator("[data-section] .section-head button").all_inner_texts() == ["Pinned", "Metrics"]
    card(opened, "loss").hover()
    card(opened, "loss").get_by_label("Hide this chart").click()
    assert card(opened, "loss").count() == 0
    page.get_by_role("button", name="Show 1 hidden").click()
    page.fill("#search", "acc")
    opened.until("() => document.querySelectorAll('.chart').length === 1")
    page.reload()
    opened.until(
        "() => document.querySelectorAll('.chart').length === 1 && document.querySelector('[data-section] button').innerText === 'Pinned'"
    )


def test_a_chart_is_saved_as_csv_svg_and_png(opened):
    """The CSV has the points drawn, and the pictures a legend."""
    alpha, _ = show(opened, "alpha", "beta")
    opened.drawn("loss", 2)
    found = {}
    for kind in ("CSV of the points drawn", "SVG", "PNG"):
        card(opened, "loss").hover()
        card(opened, "loss").get_by_label("Save loss").click()
        with opened.page.expect_download() as download:
            opened.page.get_by_role("button", name=kind, exact=True).click()
        found[kind] = download.value.path().read_bytes()
    rows = list(csv.DictReader(io.StringIO(found["CSV of the points drawn"].decode())))
    run_id = next(row["run_id"] for row in opened.answer("runs")["rows"] if row["id"] == alpha)
    assert [float(row["value"]) for row in rows if row["name"] == "alpha" and row["run"] == run_id] == [
        1 / (1 + step) for step in range(200)
    ]
    assert ET.fromstring(found["SVG"]).tag == "{http://www.w3.org/2000/svg}svg"  # noqa: S314  # our own
    assert b"alpha" in found["SVG"]
    assert found["PNG"].startswith(b"\x89PNG")


def test_only_charts_in_view_are_drawn(tmp_path, open_root):
    """Of sixty charts only those on screen request data and are drawn; the others follow when you scroll."""
    with Written(tmp_path / "runs" / "many") as run:
        run.log({f"layer/{index:02}": float(index) for index in range(60)}, 0)
    opened = open_root()
    asked = []
    opened.page.on("request", lambda request: asked.append(request.url))
    opened.go("charts")
    opened.drawn("layer/00")
    assert opened.page.locator(".chart").count() == 60
    assert (
        opened.page.evaluate(
            "[...document.querySelectorAll('.chart .plot')].filter((plot) => plot.data).length"
        )
        < 20
    )
    assert len([url for url in asked if "/api/series" in url]) < 20
    opened.page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    opened.drawn("layer/59")
    opened.until("() => !document.querySelector('.chart[data-metric=\"layer/00\"] .plot').data", None)


def test_rows_left_by_a_resume_are_dotted(tmp_path, open_root):
    """The rows that a resumed run left behind are drawn as a dotted line."""
    with Written(tmp_path / "runs" / "resumed") as run:
        for step in range(100):
            run.log({"loss": float(step)}, step)
    with Written(tmp_path / "runs" / "resumed", batch=50) as run:
        for step in range(50, 100):
            run.log({"loss": 0.0}, step)
    opened = open_root()
    opened.go("charts")
    lines = opened.drawn("loss", 2)
    assert lines["left"]["y"][-1] == 99.0
    assert lines["left"]["dash"] == "dot"


def test_explore_has_a_log_axis_for_rates_and_ticks_at_their_values(opened):
    """Positive values over two decades have a log axis by default; chosen runs are in front."""
    page = opened.page
    alpha = opened.id_of("alpha")
    opened.go(f"explore?sx=hparams.lr&sy=summary.loss&run={alpha}")
    opened.until("() => document.querySelector('#scatter').data?.[0].x.length === 4")
    axis = "document.querySelector('#scatter').layout.xaxis"
    assert page.evaluate(f"[{axis}.type, {axis}.ticks.map(([value]) => value)]") == ["linear", [0.01, 0.1]]
    assert page.evaluate("document.querySelector('#scatter').data[0].customdata.at(-1)") == alpha
    opened.go("explore?sx=summary.loss&sy=summary.loss")
    opened.until(f"() => {axis}.type === 'log'")
    page.get_by_role("button", name="log x").click()
    opened.until(f"() => {axis}.type === 'linear'")


def test_explore_draws_hyperparameters_against_a_metric(opened):
    """Matching runs are in a scatter plot and parallel coordinates; a range on an axis fades the others."""
    page = opened.page
    opened.go("explore?sx=hparams.lr&sy=summary.loss")
    opened.until("() => document.querySelector('#scatter').data?.[0].x.length === 4")
    points = page.evaluate(
        "(() => { const {x, y} = document.querySelector('#scatter').data[0]; return x.map((value, at) => [value, y[at]]); })()"
    )
    assert sorted(points) == [[0.01, 0.01], [0.1, 0.005], [0.1, 0.01], [0.1, 0.015]]
    assert page.locator("#parallel polyline").count() >= 4
    # At once: after a redraw, an element found earlier is no longer there.
    box = page.wait_for_function(
        """() => {
            const box = document.querySelector('[data-axis="hparams.seed"] .brush-ground')?.getBoundingClientRect();
            return box?.height ? box.toJSON() : null;
        }"""
    ).json_value()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60, steps=3)
    page.mouse.up()
    opened.until(
        "(id) => String([...document.querySelectorAll('#parallel polyline:not(.out)')].map((line) => line.dataset.run)) === id",
        opened.id_of("seed3"),
    )
    assert "brush=" in page.url
    page.reload()
    opened.until(
        "() => document.querySelectorAll('#parallel polyline:not(.out)').length === 1 && document.querySelectorAll('#parallel polyline.out').length >= 3"
    )
    page.fill("#filter", "hparams.lr == 0.01")
    opened.until("() => document.querySelector('#scatter').data[0].x.length === 1")
