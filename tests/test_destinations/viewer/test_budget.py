"""Limits of an answer: seconds, memory and points, even if the client is gone."""

import asyncio
import contextlib
import functools
import itertools
import json
import threading
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from destinations.runs import BudgetError, open_runs
from destinations.runs.budget import Budget, Limits, points_each, spend
from destinations.viewer import details
from destinations.viewer.app import App
from destinations.viewer.charts import Axis, ChartReader
from destinations.viewer.columns import ColumnCache
from tests.test_destinations.runs.folders import write_run
from tests.test_destinations.viewer.served import served, write_demo


def test_a_budget_belongs_to_its_context():
    """Without one, nothing is limited; all costs add up."""
    spend(1 << 40)

    with Budget(Limits(nbytes=1000)):
        spend(400)
        spend(400)
        with pytest.raises(BudgetError, match="more than 0 MiB of memory"):
            spend(400)

    spend(1 << 40)


def test_the_points_of_all_curves_add_up():
    """A request with many curves gets fewer points for each, but at least one."""
    with Budget(Limits(points=1000)):
        assert [points_each(curves, 500) for curves in (1, 4, 5000)] == [500, 250, 1]

    assert points_each(5000, 500) == 500


class NeverDone:
    """A catalog whose fields take until the budget ends."""

    def __init__(self):
        self.is_reading = threading.Event()
        self.has_ended = threading.Event()

    def fields(self):
        self.is_reading.set()
        try:
            while True:
                spend()
        finally:
            self.has_ended.set()


def asked(app, path, received):
    """Sends a request to an application as a server does; returns its messages."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}
    asyncio.run(app.asgi(scope, received, send))
    return sent


def test_reading_stops_once_the_client_is_gone():
    """The thread stops reading long before its time is over."""
    catalog = NeverDone()
    messages = iter([{"type": "http.request"}, {"type": "http.disconnect"}])

    async def receive():
        await asyncio.to_thread(catalog.is_reading.wait, 60)
        return next(messages)

    asked(App(catalog, None, None, Limits(seconds=600)), "/api/fields", receive)

    assert catalog.has_ended.is_set()


def test_a_slow_answer_is_refused():
    """The client gets the limit in a message, and the thread is free."""

    async def receive():
        await asyncio.Event().wait()

    start, body = asked(App(NeverDone(), None, None, Limits(seconds=0.05)), "/api/fields", receive)

    assert start["status"] == 413
    assert "takes longer than 0.05 s" in json.loads(body["body"])["error"]


def write_table(folder, rows):
    """Writes a run with a two-column table."""
    write_run(folder)
    (folder / "tables").mkdir()
    text = "".join(f"{row},text {row}\n" for row in range(rows))
    (folder / "tables" / "t.csv").write_text(f"number,text\n{text}")
    columns = [{"name": "number", "type": "int"}, {"name": "text", "type": "str"}]
    line = {"name": "t", "step": 1, "time": 1.0, "path": "tables/t.csv", "columns": columns}
    (folder / "tables.jsonl").write_text(json.dumps(line) + "\n")


def test_ten_rows_of_a_large_table_take_memory_for_ten_rows(tmp_path):
    """It has a hundred thousand rows; all of them as cells would take fifteen megabytes."""
    write_table(tmp_path / "runs" / "one", rows=100_000)
    with open_runs(tmp_path / "runs", cache=tmp_path / "cache") as runs:
        tracemalloc.start()
        try:
            found = details.table(runs["one"], "t", offset=99_990, limit=20)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    assert (found["total"], len(found["rows"])) == (100_000, 10)
    assert found["rows"][-1] == [99_999, "text 99999"]
    assert most < 2_000_000


def test_the_columns_of_a_table_count(tmp_path):
    """A header of a million names takes about a megabyte in a file, and a gigabyte in an answer."""
    write_table(tmp_path / "runs" / "one", rows=0)
    (tmp_path / "runs" / "one" / "tables" / "t.csv").write_text("a" + ",a" * 5000 + "\n1\n")
    with (
        open_runs(tmp_path / "runs", cache=tmp_path / "cache") as runs,
        Budget(Limits(nbytes=4 << 20)),
        pytest.raises(BudgetError, match="more than 4 MiB"),
    ):
        details.table(runs["one"], "t")


def test_a_row_shorter_than_the_header_is_shown(tmp_path):
    """It comes last if the table is sorted by a column that it lacks."""
    write_table(tmp_path / "runs" / "one", rows=0)
    (tmp_path / "runs" / "one" / "tables" / "t.csv").write_text("number,text\n3\n2,b\n1,c\n")
    with open_runs(tmp_path / "runs", cache=tmp_path / "cache") as runs:
        found = details.table(runs["one"], "t")

    assert found["rows"] == [[3], [2, "b"], [1, "c"]]
    assert found["orders"] == [{"up": [2, 1, 0], "down": [0, 1, 2]}, {"up": [1, 2, 0], "down": [2, 1, 0]}]


def test_a_page_holds_its_answers_to_limits(tmp_path):
    """The server sets the memory and points of a request."""
    write_table(tmp_path / "runs" / "one", rows=1000)
    write_demo(tmp_path / "runs")
    with served(tmp_path / "runs", limits=Limits(nbytes=6000, points=100)) as page:
        table = page.get(f"/api/runs/{page.run_id('one')}/table", {"name": "t"}, status=413)
        query = {"run": page.run_id("digits"), "metric": ["loss", "train/acc"], "points": 500}
        read = page.get("/api/series", query, status=413)
    with served(tmp_path / "runs", limits=Limits(points=100)) as page:
        few = page.get("/api/series", query | {"run": page.run_id("digits")})["series"]

    assert "more than 0 MiB of memory" in table["error"]
    assert "more than 0 MiB of memory" in read["error"]
    assert [len(one["x"]) <= 50 for one in few] == [True, True]
    assert [one["rows"] for one in few] == [300, 300]


class Blocked:
    """Curves that block until `is_free`, and fields that don't."""

    def __init__(self):
        self.is_free = threading.Event()

    def series(self, *_, **__):
        assert self.is_free.wait(60)
        return []

    def fields(self):
        return {"fields": []}

    def runs_of(self, run_ids):
        return [(run_id, SimpleNamespace(id=run_id, writers=())) for run_id in run_ids]


def test_the_table_does_not_wait_for_charts():
    """Quick answers come at once, however many charts are being read."""
    blocked = Blocked()
    app = App(blocked, blocked, None)
    order = []

    async def ask(path, query=b""):
        async def receive():
            await asyncio.Event().wait()

        async def send(message):
            if message["type"] == "http.response.start":
                order.append((path, message["status"]))

        scope = {"type": "http", "method": "GET", "path": path, "query_string": query, "headers": []}
        await app.asgi(scope, receive, send)

    async def main():
        charts = [asyncio.create_task(ask("/api/series", b"run=a&metric=loss")) for _ in range(30)]
        await asyncio.sleep(0)
        await ask("/api/fields")
        blocked.is_free.set()
        await asyncio.gather(*charts)

    asyncio.run(main())

    assert order == [("/api/fields", 200), *[("/api/series", 200)] * 30]


def test_a_chart_of_one_run_is_read_between_many_others():
    """Answers take turns in the reading threads, run by run."""
    order = []
    with contextlib.closing(ChartReader()) as reader:
        many = reader._map(order.append, range(1000))
        next(many)
        list(reader._map(order.append, ["one"]))
        at = order.index("one")
        list(many)

    assert at < 50
    assert len(order) == 1001


def test_series_read_in_time_are_answered(tmp_path):
    """The other runs have an error and are marked; if nothing was read, the answer is the error."""
    for name in "abc":
        (write_run(tmp_path / "runs" / name) / "metrics.csv").write_text("step,loss\n0,1.0\n")
    with (
        open_runs(tmp_path / "runs", cache=tmp_path / "cache") as runs,
        contextlib.closing(ChartReader(threads=1)) as reader,
    ):
        asked = [(run.run_id, run) for run in runs.query(sort_by="name")]
        reader.series(asked[:1], ["loss"], Axis(), points=10)
        with Budget(Limits(nbytes=10)):
            found = reader.series(asked, ["loss"], Axis(), points=10)
        with Budget(Limits(nbytes=10)), pytest.raises(BudgetError, match="0 MiB of memory"):
            reader.series(asked[1:], ["loss"], Axis(), points=10)

    assert [len(one["x"]) for one in found] == [1, 0, 0]
    assert [one.get("unread", False) for one in found] == [False, True, True]
    assert "0 MiB of memory" in found[1]["error"]


def test_rows_that_took_too_long_are_not_read_again(tmp_path):
    """A retry needs a longer limit or a changed file, because each one takes a CPU for that long."""
    run = tmp_path / "run"
    run.mkdir()
    rows = "".join(f"{step},1.0,{step / 2}\n" for step in range(200_000))
    (run / "metrics.csv").write_text(f'step,time,loss\n0,1.0,"\n{rows}')
    cache, seconds_on_clock = ColumnCache(), itertools.count()

    def read(seconds):
        before = next(seconds_on_clock)
        clock = functools.partial(next, seconds_on_clock)
        with Budget(Limits(seconds=seconds), clock=clock), pytest.raises(BudgetError) as raised:
            cache.read(run, 0, ["loss"])
        return next(seconds_on_clock) - before, str(raised.value)

    assert read(20)[1] == "this answer takes longer than 20 s. Ask for less of it."
    spent, text = read(20)
    assert spent < 5
    assert text.endswith("They are not read again until they change.")
    (run / "metrics.csv").write_text(f'step,time,loss\n0,1.0,"\n{rows}0,0,0\n')
    assert read(20)[0] > 20
    with Budget(Limits(seconds=1e9)):
        assert len(cache.read(run, 0, ["loss"]).block) > 100_000


def test_a_csv_with_an_open_quote_is_read_in_pieces(tmp_path):
    """The rest of the file is parsed as far as the budget allows, and later reads start over."""
    run = tmp_path / "run"
    run.mkdir()
    rows = "".join(f"{step},1.0,{step / 2}\n" for step in range(200_000))
    (run / "metrics.csv").write_text(f'step,time,loss\n0,1.0,"\n{rows}')
    times = itertools.count()
    cache = ColumnCache()

    with Budget(Limits(seconds=2), clock=lambda: next(times)), pytest.raises(BudgetError, match="2 s"):
        cache.read(run, 0, ["loss"])
    whole = cache.read(run, 0, ["loss"]).block

    assert whole.step[-1] == 199_999
    assert len(np.unique(whole.step)) == len(whole)
