"""Three processes write one run and are killed again and again: the run loses nothing.

A trainer logs the steps from 0 on, and goes back by some steps when it is restarted. Two named writers log
rows whose steps are late and mixed. Each row has the number of its call, and processes print which calls have
returned.
"""

import contextlib
import itertools
import json
import random
from collections import Counter

import attrs
import pytest

from destinations.run_directory import read_rows
from destinations.runs import Run, open_runs
from destinations.runs.export import export_metrics
from destinations.runs.send import send
from tests.crash.run_directory_child import late_step
from tests.crash.test_run_directory_kill import acknowledged, child_server
from tests.effort import times
from tests.test_destinations.runs.foreign_runs import command
from tests.test_destinations.viewer.served import Client

KILLS = times(5, 12)
WRITERS = ("", "eval", "probe")
# Numbers of a named writer's session, so that an unreturned call belongs to no other session.
SESSION = 100_000


@attrs.define
class Process:
    """A trainer or a writer, across its killed sessions.

    Args:
        start: starts a process that logs.
        folder: of the run.
        writer: its name; "" for the trainer.
        sessions: how many have begun.
        first: the number of the first call of the session.
        last: the number of the last call that has returned.
        returned: the numbers of all returned calls, except those that the trainer has gone back behind.
    """

    start: object
    folder: object
    writer: str
    sessions: int = 0
    first: int = 0
    last: int = -1
    returned: set = attrs.field(factory=set)
    child: object = None

    def begin(self, back=0):
        """Starts it; the trainer goes back by that many steps."""
        self.first = self.sessions * SESSION if self.writer else max(0, self.last + 1 - back)
        self.sessions += 1
        self.child = self.start(self.folder, mode="slow", first=self.first, writer=self.writer or None).go()

    def kill_after(self, calls):
        """Kills it once that many calls of this session have returned."""
        output = self.child.output_until(self.first + calls - 1)
        self.child.kill()
        output += self.child.rest()
        self.last = acknowledged(output)
        if self.writer:
            self.returned |= set(range(self.first, self.last + 1))
        else:
            self.returned = set(range(self.last + 1))


def rows_of_calls(found, processes):
    """Checks rows, each as writer, step and number: all returned calls are there, and none twice."""
    counts = Counter(found)
    assert not [row for row, count in counts.items() if count > 1]
    by_writer = {process.writer: {} for process in processes}
    for writer, step, number in found:
        by_writer[writer][number] = step
    for process in processes:
        there = by_writer[process.writer]
        assert process.returned - there.keys() == set(), f"rows of {process.writer or 'the trainer'} are lost"
        # One call of each session may not have returned.
        assert len(there) <= len(process.returned) + process.sessions
        if process.writer:
            assert all(step == late_step(number) for number, step in there.items())
        else:
            assert list(there.items()) == [(step, step) for step in range(len(there))]
    return found


def seen(run, viewer, folder, numbers):
    """Returns the rows that each reader has, by the reader's name."""
    every = {}
    series = [(writer, run.series("b", writer=writer)) for writer in WRITERS]
    every["series"] = [
        (writer, step, int(number))
        for writer, one in series
        for step, number in sorted(
            zip(one.step.tolist(), one.value.tolist(), strict=True), key=lambda pair: pair[writer != ""]
        )
    ]
    merged = run.series("b")
    assert merged.step.tolist() == sorted(merged.step.tolist())
    every["merged"] = sorted(
        zip(merged.writer.tolist(), merged.step.tolist(), map(int, merged.value.tolist()), strict=True),
        key=lambda row: (row[0], row[2]),
    )
    code, lines, _ = command(
        "tail", run.path, "--no-follow", "--json", "--lines", str(10**6), "--metric", "b"
    )
    assert code == 0
    every["tail"] = [
        (row.get("writer", ""), row["step"], int(row["metrics"]["b"]))
        for row in map(json.loads, lines.splitlines())
    ]
    path = folder / f"{next(numbers)}.jsonl"
    export_metrics([run], path, metrics=["b"])
    every["export"] = [
        (row["writer"], row["step"], int(row["value"]))
        for row in map(json.loads, path.read_text().splitlines())
    ]
    answer = viewer.get("/api/series", {"run": viewer.run_id(run.name), "metric": "b", "points": 10_000})
    assert all(one["merged"] == 1 and one["error"] is None for one in answer["series"])
    every["page"] = sorted(
        (
            (one["writer"], step, int(number))
            for one in answer["series"]
            for step, number in zip(one["x"], one["y"], strict=True)
        ),
        key=lambda row: (row[0], row[2]),
    )
    return every


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    """Starts processes by the name of their writer, at once."""
    with contextlib.ExitStack() as servers:
        yield {
            writer: servers.enter_context(child_server(tmp_path_factory.mktemp("server")))
            for writer in WRITERS
        }


@pytest.mark.parametrize("block", range(times(1, 5)))
def test_a_run_of_three_killed_processes_loses_no_row(tmp_path, monkeypatch, starts, block):
    """Each acknowledged row is there once in series, tail, export, page and copy, whatever was killed."""
    from destinations.viewer import Viewer

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Outside any repository, which spares each run three programs.
    monkeypatch.chdir(tmp_path)
    source, numbers = random.Random(block), itertools.count()
    folder, target = tmp_path / "runs" / "digits", f"run:{tmp_path / 'copies'}"
    processes = [Process(starts[writer], folder, writer) for writer in WRITERS]
    for process in processes:
        process.begin()

    for kill in range(KILLS):
        process = source.choice(processes)
        process.kill_after(source.randrange(1, 100))
        if kill == KILLS // 2:
            # Sends the part of the unfinished run that is written by now.
            send(Run.open(folder), target, cache=tmp_path)
        process.begin(back=source.choice((0, 0, 30)))
    for process in processes:
        process.kill_after(source.randrange(1, 60))

    with (
        open_runs(tmp_path / "runs", cache=tmp_path / "index") as runs,
        Viewer(runs, port=0) as viewer,
    ):
        client = Client(viewer)
        before = seen(Run.open(folder), client, tmp_path, numbers)
        for reader, rows in before.items():
            rows_of_calls(rows, processes)
            assert sorted(rows) == sorted(before["series"]), reader
        send(Run.open(folder), target, cache=tmp_path)
        copy = Run.open(tmp_path / "copies" / "digits")
        # A session of each process that logs nothing drains the rest.
        for process in processes:
            child = process.start(
                folder,
                mode="slow",
                first=process.last + 10**6,
                last=process.last + 10**6,
                writer=process.writer or None,
            ).go()
            child.rest()
        runs.scan()
        after = seen(Run.open(folder), client, tmp_path, numbers)

    copied = [
        (writer, row.step, int(row.metrics["b"]))
        for writer in WRITERS
        for row in read_rows(copy.path / "writers" / writer if writer else copy.path)
    ]
    assert sorted(copied) == sorted(before["series"])
    assert {reader: sorted(rows) for reader, rows in after.items()} == {
        reader: sorted(rows) for reader, rows in before.items()
    }
    assert not list(folder.rglob("journal"))
    summary = Run.open(folder).summary["b"]
    assert (summary.count, summary.non_finite) == (len(before["series"]), 0)
    assert summary.last == Run.open(folder).series("b").value[-1]
