"""Announces changes as they happen: runs that start, log, die and disappear."""

import asyncio
import contextlib
import http.client
import os
import shutil
import threading

import pytest

from destinations.runs import open_runs
from destinations.viewer.catalog import Catalog
from destinations.viewer.changes import Changes
from destinations.viewer.columns import ColumnCache
from tests.test_destinations.runs.folders import HOUR, NOW, write_run
from tests.test_destinations.runs.written import Written
from tests.test_destinations.viewer.served import served


class Clock:
    """A clock that a test sets."""

    def __init__(self, now=NOW):
        self.now = now

    def __call__(self):
        return self.now


@pytest.fixture
def root(tmp_path):
    """A folder with one finished run."""
    write_run(tmp_path / "runs" / "old")
    return tmp_path / "runs"


class Looker:
    """Looks for changes when a test asks for it."""

    def __init__(self, root, cache):
        self.clock = Clock()
        self.ticks = Clock(0.0)
        self.runs = open_runs(root, cache=cache, clock=self.clock)
        self.catalog = Catalog(self.runs, clock=self.clock)
        self.columns = ColumnCache()
        self.changes = Changes(self.catalog, self.columns, clock=self.ticks)
        self.changes.look()
        self.version = self.changes.version

    def news(self, version=None):
        """Returns the changes that a look a minute later finds."""
        self.ticks.now += 60
        self.changes.look()
        return self.changes.since(version or self.version)

    def id_of(self, path):
        return self.catalog.id_at(path.resolve())


@pytest.fixture
def looker(root, tmp_path):
    """A looker that has looked once."""
    found = Looker(root, tmp_path / "cache")
    yield found
    found.changes.close()
    found.runs.close()


def test_new_changed_and_deleted_runs_are_reported(looker, root):
    """Each report has the run's id, and says that the table changed."""
    run = write_run(root / "new")
    came = looker.news()
    write_run(root / "new", status="failed", old=False)
    changed = looker.news(came["version"])
    shutil.rmtree(run)
    gone = looker.news(changed["version"])

    run_id = looker.id_of(run)
    assert (came["table"], came["runs"]) == (True, {run_id: {"record": True, "order": True}})
    assert (changed["table"], changed["runs"]) == (True, {run_id: {"record": True, "order": True}})
    assert (gone["table"], gone["runs"]) == (True, {run_id: {"gone": True}})


def test_a_killed_run_is_reported_dead_after_the_threshold(looker, root):
    """Nothing in its folder changes; only the clock moves."""
    looker.clock.now = NOW
    run = write_run(root / "killed", status="running", beat=NOW)
    alive = looker.news()
    looker.clock.now = NOW + 179
    before = looker.news(alive["version"])
    looker.clock.now = NOW + 181
    after = looker.news(alive["version"])
    (row,) = [row for row in looker.catalog.page()["rows"] if row["name"] == "killed"]

    assert before is None
    assert after["runs"] == {looker.id_of(run): {"record": True, "order": True}}
    assert (row["status"], row["alive"]) == ("killed", False)


def test_an_edit_by_another_program_is_reported(looker, root):
    """This includes `destinations runs tag`, even if that program has updated the same index."""
    with open_runs(root, cache=looker.runs._roots[0].index.database._path.parent) as others:
        others.edit("old", tags=["new"])
        os.utime(root / "old", (NOW - HOUR, NOW - HOUR))

    assert looker.news()["runs"] == {looker.id_of(root / "old"): {"record": True, "order": True}}


def test_a_version_of_another_server_is_answered_with_everything(looker):
    """A page that stays open recovers after a restart."""
    for version in ("", "other-3", f"{looker.version}9", "x", f"{looker.version.split('-')[0]}-{'9' * 400}"):
        assert looker.changes.since(version) == {
            "version": looker.version,
            "table": True,
            "all": True,
            "runs": {},
            "fields": "",
        }


def test_new_rows_of_a_shown_run_wake_waiting_requests(tmp_path):
    """Its rows are in the journal, long before anything else in its folder changes."""
    root = tmp_path / "runs"
    with Written(root / "one", flush_seconds=300) as run, served(root) as page:
        run.log({"loss": 0.0}, 0)
        page.viewer.runs.scan()
        run_id = page.run_id("one")
        asked = {"run": run_id, "metric": "loss"}
        (series,) = page.get("/api/series", asked)["series"]
        version = page.get("/api/info")["version"]
        seen, steps = list(series["y"]), 1
        has_waited = threading.Event()
        while len(seen) < 4:
            run.log({"loss": float(steps)}, steps)
            steps += 1
            change = page.get("/api/changes", {"since": version, "run": run_id})
            version = change["version"]
            if "rows" in change["runs"].get(run_id, {}):
                has_waited.set()
                (series,) = page.get("/api/series", asked | {"after": series["cursor"]})["series"]
                assert series["append"]
                seen += series["y"]

    assert has_waited.is_set()
    assert seen == [float(step) for step in range(len(seen))]


def test_an_edit_on_the_page_wakes_other_pages(root):
    """They don't wait for the next scan."""
    with served(root) as page:
        run_id = page.run_id("old")
        version = page.get("/api/changes", {"since": ""})["version"]
        version = (
            page.get("/api/changes", {"since": version})["version"] if version.endswith("-0") else version
        )
        found = []
        waiting = threading.Thread(target=lambda: found.append(page.get("/api/changes", {"since": version})))
        waiting.start()
        page.request("PATCH", f"/api/runs/{run_id}", body={"note": "new"})
        waiting.join(60)

    assert found[0]["runs"] == {run_id: {"record": True, "order": True}}


def test_the_thread_ends_with_the_viewer(root):
    """It also releases waiting requests."""
    with served(root) as page:
        version = page.get("/api/changes", {"since": ""})["version"]

        def ask():
            # The server may end before it gets the request.
            with contextlib.suppress(OSError, http.client.HTTPException):
                page.request("GET", "/api/changes", {"since": version})

        waiting = threading.Thread(target=ask, daemon=True)
        waiting.start()

    waiting.join(60)
    assert not waiting.is_alive()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("viewer")]


def test_a_page_that_asks_while_the_server_ends_is_answered_at_once(looker):
    """A waiting request would be cancelled halfway, and log a traceback."""
    looker.changes.close()

    answer = asyncio.run(asyncio.wait_for(looker.changes.wait(looker.version, (), 3600), 60))

    assert answer == {"version": looker.version, "table": False, "runs": {}, "fields": ""}


def test_only_live_runs_are_looked_into(looker, root, monkeypatch):
    """A hundred finished runs on a chart cost nothing while nothing changes."""
    live = write_run(root / "live", status="running", beat=NOW)
    done = write_run(root / "done")
    for run in (live, done):
        (run / "metrics.csv").write_text("step,epoch,time,loss\n0,0,1.0,1.0\n")
        looker.columns.read(run.resolve(), 0, ["loss"])
    looker.news()
    looker.changes._watched = {looker.id_of(run): 1e9 for run in (live, done)}
    looker.news()
    looked = []
    original = looker.columns.rows
    monkeypatch.setattr(looker.columns, "rows", lambda folder: looked.append(folder.name) or original(folder))
    looker.news()
    quiet = list(looked)
    with (live / "metrics.csv").open("a") as file:
        file.write("1,0,2.0,2.0\n")
    version = looker.changes.version
    found = looker.news(version)

    assert quiet == ["live"]
    assert found["runs"][looker.id_of(live)]["rows"]
