"""A live run in a real browser: it grows without a reload, only what is new travels, and a killed one dies."""

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
from tests.test_destinations.viewer.conftest import Opened

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


def test_a_live_run_grows_by_what_is_new(tmp_path, new_page):
    """Rows that are logged appear in the chart, and answers have only new rows; a later metric gets its chart, a later image is shown."""
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
            # A metric that comes later gets its chart.
            run.log({"val/acc": 0.5}, 520)
            run.flush()
            opened.drawn("val/acc")
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
            opened.page.close()


def test_a_killed_run_is_shown_as_killed(tmp_path, new_page):
    """A process that is killed leaves a run that says running; after its threshold the page says killed."""
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
            opened.page.close()


def test_the_page_says_when_the_server_is_gone(tmp_path, new_page, console):
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
        opened.page.close()
    assert all("ERR_" in said or "500" in said for said in console)
    console.clear()
