"""Measures what people wait for in a browser: `python -m tests.benchmarks page`; needs Chromium and playwright.

A sweep of 200 runs of 2,000 steps and 8 metrics: bytes of a first visit and of an open page, the charts of 100 runs,
first and again, a run of 3,000 metrics, and the seconds of each task of `tests.ten_tasks`. Seconds are from the
first click until the result is on screen.
"""

import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from tests.benchmarks.timing import Row, print_table
from tests.benchmarks.viewer import Server
from tests.sweep import write_sweep
from tests.ten_tasks import TASKS, Hand, add_images
from tests.test_destinations.runs.written import Written
from tests.test_destinations.viewer.browser.opened import Opened, browser_path

CHARTED = 100
TASK_SECONDS = 1.5
WIDE = 3000
IDLE_SECONDS = 20.0
TASKS_NOTED = """() => { window.longest = 0; new PerformanceObserver((list) => list.getEntries()
    .forEach(({duration}) => { window.longest = Math.max(window.longest, duration); })).observe({type: 'longtask'}); }"""
IN_VIEW = """() => { const charts = [...document.querySelectorAll('.chart')]
    .filter((card) => card.getBoundingClientRect().top < innerHeight);
    return charts.length > 0 && charts.every((card) => card.querySelector('.plot').data); }"""
ANY = "() => [...document.querySelectorAll('.chart .plot')].some((plot) => plot.data)"


def main():
    """Measures, and prints a table; returns whether the budgets were kept."""
    from playwright.sync_api import sync_playwright

    if browser_path() is None:
        print("Chromium is not installed: the page is not measured.")
        return True
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as api:
        folder = Path(temporary)
        write_sweep(folder / "runs")
        add_images(lambda name: Written(folder / "runs" / name))
        browser = api.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        with Server(folder / "runs", folder / "cache") as server:
            page = browser.new_context(viewport={"width": 1360, "height": 860}).new_page()
            received = _bytes_received(page)
            viewer = SimpleNamespace(address=server.address, token=server.token, url=server.url)
            opened = Opened(page, viewer)
            page.wait_for_selector(".grid-row[data-run]")
            page.wait_for_load_state("load")
            first_visit = Row("bytes of a first visit", sum(received) / 1e3, 1000, unit="kB")
            rows = [first_visit, *_measure_charts(server, opened), *_measure_tasks(opened)]
            rows += _measure_wide(opened, folder / "runs")
            rows.append(_measure_idle(opened, received, folder / "runs"))
        browser.close()
        shutil.rmtree(folder / "runs")
    print_table(f"200 runs of 2,000 steps and 8 metrics, in Chromium; charts of {CHARTED}", rows)
    return all(row.is_within_budget for row in rows)


def _measure_charts(server, opened):
    ids = [
        row["id"] for row in server.get("/api/runs", limit=200)["rows"] if row["name"].startswith("resnet")
    ]
    fragment = "charts?" + "&".join(f"run={one}" for one in ids[:CHARTED])
    rows = []
    for name, budgets in (("the first time", (1.0, 2.0)), ("again", (0.3, 0.3))):
        started = time.perf_counter()
        opened.go(fragment)
        opened.until(ANY)
        first = time.perf_counter() - started
        opened.until(IN_VIEW)
        rows.append(Row(f"first chart, {name}", first, budgets[0], unit="s"))
        rows.append(Row(f"all charts in view, {name}", time.perf_counter() - started, budgets[1], unit="s"))
        opened.go("runs")
        opened.page.wait_for_selector(".grid-row[data-run]")
    return rows


def _bytes_received(page):
    """Returns a list that gets the size of each answer, as it comes through the wire."""
    received = []
    devtools = page.context.new_cdp_session(page)
    devtools.send("Network.enable")
    devtools.on("Network.loadingFinished", lambda event: received.append(event["encodedDataLength"]))
    return received


def _measure_wide(opened, root):
    with Written(root / "wide") as run:
        for step in range(5):
            run.log({f"layer{one // 60:02d}/m{one % 60:02d}": step / 7 for one in range(WIDE)}, step)
    while not (found := opened.answer("runs?q=wide")["rows"]):
        opened.page.wait_for_timeout(200)
    opened.page.evaluate(TASKS_NOTED)
    opened.go(f"charts?run={found[0]['id']}")
    opened.drawn("layer00/m00")
    opened.page.wait_for_timeout(1000)
    return [
        Row(
            f"elements, {WIDE} metrics",
            opened.page.evaluate("document.querySelectorAll('*').length"),
            4000,
            unit="elements",
        ),
        Row(f"longest task, {WIDE} metrics", opened.page.evaluate("window.longest"), 100, unit="ms"),
    ]


def _measure_idle(opened, received, root):
    """Measures the table of all runs while one of them logs."""
    is_done = threading.Event()

    def log():
        with Written(root / "live") as run:
            step = 0
            while not is_done.wait(0.5):
                run.log({"loss": 1 / (1 + step)}, step)
                step += 1

    training = threading.Thread(target=log)
    training.start()
    opened.go("runs")
    opened.page.wait_for_timeout(10_000)
    received.clear()
    opened.page.wait_for_timeout(IDLE_SECONDS * 1000)
    is_done.set()
    training.join()
    return Row("an open table with a live run", sum(received) / IDLE_SECONDS / 1e3, 1.0, unit="kB/s")


def _measure_tasks(opened):
    rows = []
    for task in TASKS:
        hand = Hand(opened)
        task.begin(hand)
        started = time.perf_counter()
        task.act(hand)
        clicks = f"{hand.clicks} click{'s' * (hand.clicks > 1)}"
        rows.append(Row(f"{task.name}, {clicks}", time.perf_counter() - started, TASK_SECONDS, unit="s"))
    return rows


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
