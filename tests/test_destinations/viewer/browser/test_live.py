"""A live run in a real browser: it grows without a reload by new rows, and a killed one shows as killed."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from destinations.runs import open_runs
from tests.test_destinations.runs.written import Written
from tests.test_destinations.viewer.browser.opened import Opened

pytestmark = pytest.mark.xdist_group("browser")

TRAINING = """
import sys
from tests.test_destinations.runs.written import Written
run = Written(sys.argv[1])
for step in range(20):
    run.log({"loss": float(step)}, step)
run.flush()
print("written", flush=True)
sys.stdin.read()
"""


def test_a_live_run_grows_by_its_new_rows(tmp_path, new_page):
    """Answers have only new rows; a new metric gets a chart, and a new image appears."""
    server = pytest.importorskip("destinations.viewer.server")
    root = tmp_path / "runs"
    with Written(root / "live") as run:
        for step in range(500):
            run.log({"loss": float(step)}, step)
        run.flush()
        with open_runs(root, cache=tmp_path / "index") as runs, server.Viewer(runs, port=0) as viewer:
            opened = Opened(new_page(), viewer)
            opened.go("charts")
            (line,) = opened.drawn("loss").values()
            assert line["y"] == [float(step) for step in range(500)]
            assert opened.page.locator(".legend .status").inner_text() == "running"
            opened.page.evaluate("globalThis.notReloaded = true")
            answers = []
            opened.page.on(
                "response",
                lambda response: answers.append(response) if "/api/series" in response.url else None,
            )
            for step in range(500, 520):
                run.log({"loss": float(step)}, step)
            run.flush()
            opened.until(
                "() => document.querySelector('.chart .plot').data.find((one) => one.meta.part === 'line').y.at(-1) === 519"
            )
            (line,) = opened.traces("loss").values()
            assert line["y"] == [float(step) for step in range(520)]
            assert opened.page.evaluate("globalThis.notReloaded")
            news = [series for response in answers for series in json.loads(response.body())["series"]]
            assert news
            assert all(series["append"] and len(series["x"]) <= 20 for series in news)
            # A metric that appears later gets its chart.
            run.log({"val/acc": 0.5}, 520)
            run.flush()
            opened.drawn("val/acc")
            # The page of the run grows too.
            opened.go(f"run/{opened.id_of('live')}")
            opened.drawn("loss")
            opened.drawn("val/acc")
            run.log({"loss": -1.0}, 521)
            run.flush()
            opened.until(
                "() => document.querySelector('.curves [data-metric=loss] .plot').data.find((one) => one.meta.part === 'line').y.at(-1) === -1"
            )
            run.logger.log_images(np.zeros((4, 4)), "Inputs", step=1)
            run.flush()
            opened.go("media")
            image = "document.querySelector('.images img')"
            opened.until(f"() => {image}?.naturalWidth === 4")
            before = opened.page.evaluate(f"{image}.src")
            run.logger.log_images(np.ones((4, 4)), "Inputs", step=2)
            run.flush()
            opened.until(f"(before) => {image}?.src !== before && {image}.naturalWidth === 4", before)
            assert "step 2" in opened.page.inner_text(".images output")
            assert opened.page.evaluate("globalThis.notReloaded")
            opened.page.goto("about:blank")


def test_a_killed_run_is_shown_as_killed(tmp_path, new_page):
    """A killed process leaves a run that says running; after the threshold, the page says killed."""
    server = pytest.importorskip("destinations.viewer.server")
    root = tmp_path / "runs"
    ahead = [0.0]
    training = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(root / "victim")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert training.stdin
    assert training.stdout
    with training.stdin, training.stdout:
        assert training.stdout.readline() == "written\n"

        def clock():
            return time.time() + ahead[0]

        with (
            open_runs(root, cache=tmp_path / "index", clock=clock) as runs,
            server.Viewer(runs, port=0, clock=clock) as viewer,
        ):
            opened = Opened(new_page(), viewer)
            opened.until("() => document.querySelector('.grid-row .status')?.innerText === 'running'")
            opened.page.evaluate("globalThis.notReloaded = true")
            os.kill(training.pid, signal.SIGKILL)
            training.wait()
            ahead[0] = 200.0
            opened.until("() => document.querySelector('.grid-row .status')?.innerText === 'killed'")
            assert opened.page.evaluate("globalThis.notReloaded")
            opened.page.goto("about:blank")


def test_the_page_reports_an_unreachable_server(tmp_path, new_page, console):
    """Without its server the page says offline, and keeps what it shows."""
    server = pytest.importorskip("destinations.viewer.server")
    with Written(tmp_path / "runs" / "one") as run:
        run.log({"loss": 1.0}, 0)
    with open_runs(tmp_path / "runs", cache=tmp_path / "index") as runs:
        with server.Viewer(runs, port=0) as viewer:
            opened = Opened(new_page(), viewer)
            opened.page.wait_for_selector(".grid-row[data-run]")
        opened.until("() => document.querySelector('#live').innerText === 'offline'")
        assert opened.page.locator(".grid-row[data-run]").count() == 1
        opened.page.goto("about:blank")
    assert all("ERR_" in said or "500" in said for said in console)
    console.clear()


def test_rows_left_by_a_resume_stay_while_the_run_grows(tmp_path, new_page):
    """The dotted line of an interrupted attempt stays after new rows."""
    server = pytest.importorskip("destinations.viewer.server")
    root = tmp_path / "runs"
    with Written(root / "resumed") as run:
        for step in range(20):
            run.log({"loss": float(step)}, step)
    with Written(root / "resumed", batch=10) as run:
        run.log({"loss": 0.0}, 10)
        run.flush()
        with open_runs(root, cache=tmp_path / "index") as runs, server.Viewer(runs, port=0) as viewer:
            opened = Opened(new_page(), viewer)
            opened.go("charts")
            assert opened.drawn("loss", 2)["left"]["y"][-1] == 19.0
            run.log({"loss": -1.0}, 11)
            run.flush()
            opened.until(
                "() => document.querySelector('.chart .plot').data.some((one) => one.y.at(-1) === -1)"
            )
            lines = opened.drawn("loss", 2)
            assert lines["left"]["y"][-1] == 19.0
            assert lines[opened.id_of("resumed")]["y"] == [*map(float, range(10)), 0.0, -1.0]
            opened.page.goto("about:blank")


@pytest.fixture
def live(tmp_path, new_page):
    """The page of a live run, and the run."""
    server = pytest.importorskip("destinations.viewer.server")
    root = tmp_path / "runs"
    with Written(root / "live", tags=["first"]) as run:
        run.logger.log_hyperparameters({"lr": 0.1})
        for step in range(5):
            run.log({"loss": float(step), "val/acc": 0.5}, step)
        run.logger.log_video(np.zeros((4, 3, 16, 16), np.uint8), fps=4, name="Clip", step=1)
        run.logger.log_text("it went well", "Notes", step=1)
        run.flush()
        with open_runs(root, cache=tmp_path / "index") as runs, server.Viewer(runs, port=0) as viewer:
            opened = Opened(new_page(), viewer)
            opened.root = root
            opened.page.wait_for_selector(".grid-row[data-run]")
            yield opened, run
            opened.page.goto("about:blank")


def test_the_page_of_a_live_run_keeps_typed_text(live):
    """The page of a live run shows new values, and keeps typed text, order and focus."""
    opened, run = live
    page = opened.page
    opened.go(f"run/{opened.id_of('live')}")
    page.wait_for_selector("[data-panel=Metrics] tbody tr")
    page.evaluate("document.querySelector('[data-panel=Hyperparameters]').isOld = true")
    find = page.get_by_label("Filter rows").first
    find.press_sequentially("lo")
    run.log({"loss": 77.0}, 5)
    run.flush()
    opened.until("() => document.querySelector('[data-panel=Metrics] tbody').innerText.includes('77')")
    page.keyboard.type("ss")
    assert find.input_value() == "loss"
    assert page.locator("[data-panel=Metrics] tbody tr").count() == 1
    assert page.evaluate("document.querySelector('[data-panel=Hyperparameters]').isOld")


def test_media_of_a_live_run_play_on(live):
    """A video stays in the document while its run logs, so that it doesn't stop."""
    opened, run = live
    page = opened.page
    opened.go(f"media?run={opened.id_of('live')}")
    page.wait_for_selector(".videos video")
    page.evaluate(
        """() => {
            globalThis.removed = 0;
            new MutationObserver((all) => { for (const one of all) removed += one.removedNodes.length; })
                .observe(document.querySelector('.cards').closest('section').parentElement, { childList: true });
        }"""
    )
    page.wait_for_selector(".text-record")
    run.logger.log_text("and on", "Notes", step=2)
    run.flush()
    opened.until("() => document.querySelector('.text-record').innerText === 'and on'")
    assert page.evaluate("removed") == 0


def test_the_cursor_stays_on_its_run(live, tmp_path):
    """A new run comes first in the table, and the cursor stays on its run."""
    opened, _ = live
    page = opened.page
    page.focus(".grid")
    page.keyboard.press("ArrowDown")
    with Written(opened.root / "newer") as run:
        run.log({"loss": 1.0}, 0)
        run.flush()
        opened.until("() => document.querySelector('#row-0 .name')?.innerText === 'newer'")
        page.keyboard.press("Enter")
        page.wait_for_selector(".run-page h1")
        assert page.inner_text(".run-page h1") == "live"
