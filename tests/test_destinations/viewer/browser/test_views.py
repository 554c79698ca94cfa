"""The view of runs in a real browser: charts, the shell and a link show a saved view."""

import json

import pytest

from destinations.cli import main
from tests.test_destinations.runs.written import Written

pytestmark = pytest.mark.xdist_group("browser")

# Marks above and below the axis of a chart, and the text of its card.
SHOWN = """() => { const plot = document.querySelector('.chart[data-metric=loss] .plot');
    return plot.data && {range: plot.layout.yaxis.range, foot: plot.nextElementSibling.innerText,
        labels: [...plot.querySelectorAll('.spike-labels text')].map((text) => text.textContent)}; }"""
LINES = """() => (document.querySelector('.chart[data-metric="norm/*"] .plot').data ?? [])
    .filter((trace) => trace.meta.part === 'line').length === COUNT"""
DOTS = """() => [...document.querySelectorAll('.chart')]
    .filter((card) => card.querySelector('.cursor circle')).map((card) => card.dataset.metric)"""


@pytest.fixture
def grid(tmp_path, open_root):
    """The page of twelve runs: two models, three rates and two seeds; one run has a spike."""
    for number in range(12):
        model, rate, seed = "ab"[number % 2], 10 ** -(number // 2 % 3), number // 6
        with Written(tmp_path / "runs" / f"{model}-lr{rate:g}-seed{seed}") as run:
            run.logger.log_hyperparameters({"model": model, "lr": rate, "seed": seed})
            for step in range(40):
                loss = 50.0 if (number, step) == (0, 20) else number - 2 + 1 / (1 + step)
                run.log({"loss": loss, "acc": number + step / 40}, step)
    return open_root()


def test_bands_average_all_runs_of_the_view_by_several_fields(grid):
    """Six groups of two runs each are at the side; labels don't repeat what the colours show."""
    grid.go("charts?band=std&group=hparams.model&group=hparams.lr&sc=hparams.model")
    legend = grid.until(
        """() => { const found = [...document.querySelectorAll('.band-legend li')];
            return found.length === 6 && found.every((one) => one.innerText.includes('2 runs'))
                && found.map((one) => [one.children[1].innerText, one.querySelector('path').getAttribute('stroke')]); }"""
    )
    assert [label for label, _ in legend] == [
        f"{model} · {rate}" for model in "ab" for rate in (0.01, 0.1, 1)
    ]
    assert len({color for _, color in legend[:3]}) == 1
    assert len({color for _, color in legend}) == 2
    labels = grid.until(
        """() => { const found = [...document.querySelectorAll('[data-metric=acc] .line-labels text')];
            return found.length === 6 && found.map((one) => one.textContent); }"""
    )
    assert sorted(labels) == ["0.01", "0.01", "0.1", "0.1", "1", "1"]


def test_the_best_groups_come_first(grid):
    """The goal orders the groups and their colours, and the legend of the colour field is above the charts."""
    grid.go("charts?band=std&group=hparams.model&group=hparams.lr&goal=max.acc&sc=hparams.model")
    order = grid.until(
        """() => { const found = [...document.querySelectorAll('.band-legend li')];
            return found.length === 6 && found.map((one) => one.children[1].innerText); }"""
    )
    assert order == ["b · 0.01", "a · 0.01", "b · 0.1", "a · 0.1", "b · 1", "a · 1"]
    legend = grid.page.locator(".toolbar > .color-legend")
    legend.locator("li").first.wait_for()
    assert legend.inner_text().split() == ["model", "a", "b"]
    assert grid.box(legend)["height"] <= 24
    grid.go("runs?group=hparams.model&group=hparams.lr&goal=max.acc")
    grid.page.locator(".group-row").first.wait_for()
    assert [row.get_attribute("data-group") for row in grid.page.locator(".group-row").all()] == order
    assert grid.page.locator(".group-row .best-value").count() == 1


def test_chosen_and_hidden_runs_of_a_view_are_saved(grid, tmp_path, capsys):
    """The file names them by `run_id`; the page opens the view with them, and the shell takes them."""
    chosen = [grid.id_of(f"a-lr{rate}-seed0") for rate in ("0.1", "1")]
    grid.go("charts?" + "&".join(f"run={one}" for one in chosen) + f"&off={chosen[0]}")
    grid.drawn("loss")
    grid.page.click("#views")
    grid.page.get_by_label("Name of this view").fill("pair")
    grid.page.get_by_role("button", name="Save view").click()
    grid.until("() => document.querySelector('#views').innerText === 'pair'")
    saved = json.loads((tmp_path / "runs" / "views.json").read_text())["views"]["pair"]
    assert [len(saved["run"]), len(saved["off"])] == [2, 1]
    assert not set(chosen) & set(saved["run"])
    grid.go("charts")
    grid.page.click("#views")
    grid.page.get_by_role("button", name="pair", exact=True).click()
    grid.until("(id) => location.hash.includes(`off=${id}`)", chosen[0])
    grid.until(
        """(id) => { const lines = document.querySelector('.chart[data-metric=loss] .plot').data
            .filter((trace) => trace.meta.part === 'line'); return String(lines.map((one) => one.meta.run)) === id; }""",
        chosen[1],
    )
    assert main(["runs", "ls", "--root", str(tmp_path / "runs"), "--view", "pair", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["a-lr1-seed0"]


def test_the_outliers_switch_shows_a_spike_that_leaves_the_chart(grid):
    """Without outliers, a triangle at the edge has the value; with them, the axis covers it."""
    grid.go(f"charts?run={grid.id_of('a-lr1-seed0')}&smooth=0")
    grid.drawn("loss")
    shown = grid.until(SHOWN)
    assert shown["range"][1] < 50
    assert (shown["foot"], shown["labels"]) == ("▲ 1 above.", ["50.0"])
    grid.page.click("#outliers")
    grid.until("() => document.querySelector('.chart[data-metric=loss] .plot').layout.yaxis.range[1] >= 50")
    assert "outliers=1" in grid.page.url


def test_a_log_axis_marks_and_counts_values_it_cannot_show(grid):
    """Each value at or below zero is a mark at the bottom; the card counts them."""
    grid.go(f"charts?run={grid.id_of('a-lr1-seed0')}&logy=1&smooth=0")
    grid.drawn("loss")
    assert len(next(iter(grid.traces("loss", "low").values()))["x"]) == 39
    assert "▾ 39 values ≤ 0" in grid.until(SHOWN)["foot"]


def test_all_charts_share_a_cursor_and_a_range(grid):
    """Hovering over a chart marks the same run in the others; a zoom applies to all."""
    grid.go("charts")
    grid.drawn("loss", 10)
    grid.drawn("acc", 10)
    grid.hovered("loss")
    assert sorted(
        grid.until(f"() => {{ const found = ({DOTS})(); return found.length === 2 && found; }}")
    ) == [
        "acc",
        "loss",
    ]
    grid.page.evaluate(
        "() => document.querySelector('.chart[data-metric=loss] .plot').layout.onzoom({x: [10, 20], y: null})"
    )
    for metric in ("loss", "acc"):
        grid.until(
            f"() => String(document.querySelector('.chart[data-metric={metric}] .plot').layout.xaxis.range) === '10,20'"
        )


def test_a_saved_view_is_the_same_in_the_table_the_charts_and_the_shell(grid, tmp_path, capsys):
    """A filter and an order are saved by name; the shell lists the same runs in the same order."""
    page = grid.page
    grid.go("runs?where=hparams.model+%3D%3D+%22a%22&sort=-summary.acc")
    grid.until("() => document.querySelectorAll('.grid-row[data-run]').length === 6")
    page.click("#views")
    page.get_by_label("Name of this view").fill("only a")
    page.get_by_role("button", name="Save view").click()
    grid.until("() => document.querySelector('#views').innerText === 'only a'")
    saved = json.loads((tmp_path / "runs" / "views.json").read_text())["views"]
    assert saved == {"only a": {"where": 'hparams.model == "a"', "sort": "-summary.acc"}}
    page.reload()
    names = grid.until(
        """() => { const found = [...document.querySelectorAll('.grid-row[data-run] .name a')];
            return found.length === 6 && found.map((one) => one.innerText); }"""
    )
    page.keyboard.press("2")
    assert set(grid.drawn("loss", 6)) == {grid.id_of(name) for name in names}
    assert main(["runs", "ls", "--root", str(tmp_path / "runs"), "--view", "only a", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == names


def test_the_metrics_of_a_prefix_are_one_chart(tmp_path, open_root):
    """A section becomes one chart with a line for each metric, and keeps the ones that a search finds."""
    with Written(tmp_path / "runs" / "layers") as run:
        for step in range(5):
            run.log({f"norm/layer{layer}": float(layer + step) for layer in range(12)}, step)
    opened = open_root()
    opened.go("charts")
    opened.drawn("norm/layer0")
    opened.page.get_by_role("button", name="as one chart").click()
    opened.until(LINES.replace("COUNT", "12"))
    assert opened.page.locator(".chart").count() == 1
    assert "join=" in opened.page.url
    opened.page.fill("#search", "layer1*")
    opened.until(LINES.replace("COUNT", "3"))
    assert "layer10" in opened.hovered("norm/*", "layer10", 0.5)
