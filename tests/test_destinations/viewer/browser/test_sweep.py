"""Common tasks with a sweep of two hundred runs, in a real browser: each takes a few clicks."""

import pytest

from destinations.runs import open_runs
from destinations.viewer.catalog import Catalog
from destinations.viewer.site import export_site
from tests.sweep import write_sweep
from tests.ten_tasks import TASKS, Hand, add_images
from tests.test_destinations.runs.written import Written
from tests.test_destinations.viewer.browser.opened import Opened

pytestmark = pytest.mark.xdist_group("browser")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """The server of two hundred runs of 2,000 steps and 8 metrics, and of two with images."""
    server = pytest.importorskip("destinations.viewer.server")
    root = tmp_path_factory.mktemp("sweep") / "runs"
    write_sweep(root)
    add_images(lambda name: Written(root / name))
    with (
        open_runs(root, cache=tmp_path_factory.mktemp("index")) as runs,
        server.Viewer(runs, port=0) as viewer,
    ):
        yield viewer


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_task_takes_few_clicks(task, sweep, new_page):
    """Each task is done within its number of clicks, choices, drags and keys."""
    hand = Hand(Opened(new_page(), sweep))
    task.begin(hand)
    task.act(hand)
    assert hand.clicks == task.most


def test_the_first_curves_appear_while_others_load(sweep, new_page):
    """A chart of more than a hundred runs asks for them in parts."""
    opened = Opened(new_page(), sweep)
    ids = [row["id"] for row in opened.answer("runs?limit=150")["rows"]]
    said = []

    def answer(route):
        if f"run={ids[-1]}" in route.request.url and "metric=loss" in route.request.url:
            opened.drawn("loss", 100)
            said.append(opened.page.locator('[data-metric="loss"] .card-foot').inner_text())
        route.continue_()

    opened.page.route("**/api/series?*", answer)
    opened.go("charts?" + "&".join(f"run={one}" for one in ids))
    opened.drawn("loss", len(ids))
    assert said[0].startswith(f"Loading 100 of {len(ids)} runs.")


def test_a_hundred_runs_have_a_curve_each(sweep, new_page):
    """Their lines have fewer points than a few runs' and no ranges."""
    opened = Opened(new_page(), sweep)
    rows = opened.answer("runs?limit=102")["rows"]
    ids = [row["id"] for row in rows if row["name"].startswith("resnet")]

    opened.go("charts?" + "&".join(f"run={one}" for one in ids))
    opened.drawn("loss", 100)
    traces = opened.traces("loss")
    assert sorted(traces) == sorted(ids)
    assert len(ids) == 100
    assert all(150 <= len(trace["x"]) <= 251 for trace in traces.values())
    assert opened.traces("loss", "range") == {}
    assert (
        opened.page.locator(".legend li").first.locator(".setting").inner_text().startswith("lr 0.3 · seed ")
    )


def test_one_command_writes_a_site_of_the_sweep(sweep, tmp_path):
    """This is the tenth task, and takes no click."""
    report = export_site(Catalog(sweep.runs), tmp_path / "site", limit=20)
    assert report.runs == 20
    assert (tmp_path / "site" / "index.html").is_file()
