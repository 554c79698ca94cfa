"""Explore in a real browser: places and colours follow the values, and importance comes with reasons."""

import pytest

from tests.sweep import write_sweep
from tests.test_destinations.runs.written import Written

pytestmark = pytest.mark.xdist_group("browser")

POINTS = """() => { const { customdata, x, y, marker } = document.querySelector('#scatter').data[0];
    return customdata.map((run, at) => ({ run, x: x[at], y: y[at], color: marker.color[at], size: marker.size[at] })); }"""


@pytest.fixture
def kinds(tmp_path, open_root):
    """A page of runs whose sizes are numbers, similar texts and long texts; one run has no size."""
    root = tmp_path / "runs"
    sizes = [10, "auto", 1, "1", True, "true", "x" * 60 + "a", "x" * 60 + "b", None, 1.0]
    for place, size in enumerate(sizes):
        with Written(root / f"run-{place}") as run:
            run.logger.log_hyperparameters({"size": size, "width": 10.0**place})
            run.log({"loss": float(place)}, 0)
    return open_root(root)


def points(opened, count):
    """Returns the points of the scatter plot by run name, once there are this many."""
    opened.until(f"() => document.querySelector('#scatter').data?.[0].x.length === {count}")
    names = {row["id"]: row["name"] for row in opened.answer("runs?limit=1000")["rows"]}
    return {names[point["run"]]: point for point in opened.page.evaluate(POINTS)}


def test_values_that_look_alike_stay_apart(kinds):
    """A number, its text, and texts with equal beginnings differ; equal numbers are one value."""
    kinds.go("explore?sx=hparams.size&sy=summary.loss")
    points(kinds, 9)
    # At once: the plot may be redrawn with the values in another order.
    shown, axis = kinds.page.evaluate(
        f"() => [({POINTS})(), document.querySelector('#scatter').layout.x.ticks]"
    )
    names = {row["id"]: row["name"] for row in kinds.answer("runs?limit=1000")["rows"]}
    found = {names[point["run"]]: point for point in shown}

    assert found["run-2"]["x"] == found["run-9"]["x"]
    assert len({point["x"] for point in found.values()}) == 8
    assert [place for place, _ in axis] == list(range(8))
    texts = [text for _, text in axis]
    assert [texts[found[f"run-{place}"]["x"]] for place in (0, 1, 2, 3, 4, 5)] == [
        "10", "auto", "1", '"1"', "true", '"true"',
    ]  # fmt: skip
    parallel = kinds.page.locator("[data-axis='hparams.size'] text:not(.axis-name)").all_text_contents()
    assert {'"1"', "1", "true", '"true"'} <= set(parallel)


def test_runs_are_coloured_by_a_number(kinds):
    """A scale with a legend, logarithmic if the values are, colours both plots and is in the link."""
    page = kinds.page
    kinds.go(f"explore?sx=hparams.size&sy=summary.loss&run={kinds.id_of('run-3')}")
    points(kinds, 9)
    page.get_by_role("combobox", name="Colour").select_option("hparams.width")
    page.wait_for_selector("#colors .ramp")
    found = points(kinds, 9)
    assert "sc=hparams.width" in page.url
    assert len({point["color"] for point in found.values()}) == 9
    ends = page.locator("#colors > span").all_inner_texts()
    assert [text.replace("\u202f", "") for text in ends] == ["1", "1000000000"]
    assert [name for name, point in found.items() if point["size"] == 14] == ["run-3"]
    lines = page.evaluate(
        "[...document.querySelectorAll('#parallel polyline')].map((line) => [line.dataset.run, line.getAttribute('stroke')])"
    )
    assert dict(lines).items() >= {(point["run"], point["color"]) for point in found.values()}
    page.reload()
    assert points(kinds, 9) == found


def test_runs_are_coloured_by_words(kinds):
    """Up to eight values have a colour each, in the table's order; runs without one are grey and counted."""
    page = kinds.page
    kinds.go("explore?sx=hparams.width&sy=summary.loss&sc=hparams.size")
    page.wait_for_selector("#colors li")
    found = points(kinds, 10)
    legend = [text.strip() for text in page.locator("#colors li").all_inner_texts()]
    assert legend[:3] == ["1", "10", '"1"']
    assert legend[-1] == "no value: 1 run"
    assert len(legend) == 9
    assert found["run-2"]["color"] == found["run-9"]["color"]
    assert len({point["color"] for point in found.values()}) == 9
    kinds.go("explore?sx=hparams.width&sy=summary.loss&sc=status")
    kinds.until("() => document.querySelector('#colors').innerText.includes('completed')")


def test_ten_runs_are_too_few_for_importance(kinds):
    """The page says how many runs it takes to tell which hyperparameter matters."""
    kinds.go("explore?sx=hparams.width&sy=summary.loss")
    kinds.page.wait_for_selector(".importance :text('It takes 20')")


def test_which_hyperparameter_matters_is_shown(tmp_path, open_root):
    """Bars by importance, the number of runs and the score; a click shows the hyperparameter in the plot."""
    pytest.importorskip("sklearn")
    root = tmp_path / "runs"
    write_sweep(root, runs=80, steps=20)
    opened = open_root(root)
    page = opened.page
    opened.go("explore?sx=hparams.seed&sy=summary.val%2Facc")
    page.wait_for_selector(".importance li")
    names = page.locator(".importance li button").all_inner_texts()
    text = page.inner_text(".importance .card-foot")
    answer = opened.answer("importance?metric=val%2Facc")
    page.locator(".importance li button").first.click()
    opened.until("() => location.hash.includes('sx=hparams.lr')")
    page.fill("#filter", "lr == 0.01")
    opened.until(
        "() => document.querySelector('.importance').innerText.includes('10 runs that have ended have')"
    )

    assert names[0] == "lr"
    assert set(names) == {"lr", "seed", "weight_decay"}
    assert "80 ended runs" in text
    assert f"R\N{SUPERSCRIPT TWO} {answer['score']:.3g};" in text
