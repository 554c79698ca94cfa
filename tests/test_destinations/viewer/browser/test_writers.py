"""A run with several writers in a real browser: a line for each writer that grows, and their status."""

import json

import pytest

from destinations.runs import open_runs
from destinations.viewer.catalog import Catalog
from tests.test_destinations.runs.written import Written, write_shared
from tests.test_destinations.viewer.browser.opened import Opened

pytestmark = pytest.mark.xdist_group("browser")

LINES = """(metric) => {
    const card = [...document.querySelectorAll('.chart')].find((one) => one.dataset.metric === metric);
    const lines = card?.querySelector('.plot')?.data?.filter((one) => one.meta.part === 'line');
    return lines?.map(({ name, x, y, line }) => ({ name, x, y, color: line.color, dash: line.dash }));
}"""


def lines_of(opened, metric, count):
    """Waits for a number of lines of a metric; returns them by name."""
    opened.until(f"(metric) => ({LINES})(metric)?.length === {count}", metric)
    return {line.pop("name"): line for line in opened.page.evaluate(LINES, metric)}


def test_each_writer_has_a_line_that_grows(tmp_path, new_page):
    """A line has its run's colour, and the writer's name if needed; a new writer gets a line."""
    server = pytest.importorskip("destinations.viewer.server")
    root = tmp_path / "runs"
    with (
        Written(root / "digits") as trainer,
        Written(root / "digits", writer="eval") as late,
        open_runs(root, cache=tmp_path / "index") as runs,
    ):
        for step in range(10):
            trainer.log({"loss": float(step)}, step)
            late.log({"loss": step + 0.5, "acc": step / 10}, 9 - step)
        trainer.flush()
        late.flush()
        runs.scan()
        with server.Viewer(runs, port=0) as viewer:
            opened = Opened(new_page(), viewer)
            opened.go("charts")
            loss = lines_of(opened, "loss", 2)
            acc = lines_of(opened, "acc", 1)
            late.log({"loss": 100.0}, 20)
            late.flush()
            grown = f"(metric) => ({LINES})(metric)?.find((one) => one.name === 'digits · eval')?.y.at(-1) === 100"
            opened.until(grown, "loss")
            with Written(root / "digits", writer="probe") as probe:
                probe.log({"acc": 1.0}, 5)
            both = lines_of(opened, "acc", 2)
            opened.page.goto("about:blank")

    assert {name: line["y"][0] for name, line in loss.items()} == {"digits": 0.0, "digits · eval": 9.5}
    assert loss["digits · eval"]["x"] == list(range(10))
    assert loss["digits"]["color"] == loss["digits · eval"]["color"]
    assert loss["digits"]["dash"] != loss["digits · eval"]["dash"]
    assert list(acc) == ["digits"]
    assert {*both} == {"digits · eval", "digits · probe"}


def test_the_page_of_a_run_has_a_row_for_each_writer(tmp_path, open_root):
    """The row has the writer's status, its rows and its last sign of life."""
    root = tmp_path / "runs"
    write_shared(root / "digits")
    opened = open_root(root)
    opened.go(f"run/{opened.id_of('digits')}")
    rows = opened.page.locator('[data-panel="Writers"] tbody tr')
    rows.first.wait_for()
    texts = [row.inner_text().split("\t")[:3] for row in rows.all()]

    assert texts[-2:] == [["eval", "completed", "3"], ["probe", "completed", "2"]]


def test_an_exported_site_has_a_line_for_each_writer(tmp_path, new_page):
    """The site is opened from a file."""
    site = pytest.importorskip("destinations.viewer.site")
    root = tmp_path / "runs"
    write_shared(root / "digits")
    with open_runs(root, cache=tmp_path / "index") as runs:
        site.export_site(Catalog(runs), tmp_path / "site")
        digits = Catalog(runs).id_of(runs["digits"].record)

    page = new_page()
    page.goto(f"{(tmp_path / 'site' / 'index.html').as_uri()}#/charts?run={digits}")
    page.wait_for_function(f"(metric) => ({LINES})(metric)?.length === 3", arg="loss")
    lines = page.evaluate(LINES, "loss")
    page.goto("about:blank")

    assert {line["name"]: line["y"] for line in lines} == {
        "digits": [10, 20],
        "digits · eval": [0.5, 11],
        "digits · probe": [12],
    }, json.dumps(lines)
