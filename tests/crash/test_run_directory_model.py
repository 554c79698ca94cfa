"""Drain, column change, abandoned rows, Parquet and end: SIGKILL and power loss at every change of the disk.

Everything happens in this process, on a disk that records its operations; see `disk_model.py`.
"""

import contextlib
import functools
import importlib.util
import itertools
import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest

from destinations.history.aggregate import Aggregate
from destinations.history.sealed import Part
from destinations.run_directory import read_rows
from destinations.run_directory.documents import Documents, write_summary
from destinations.run_directory.drain import PART_BYTES, JournalDrain
from destinations.run_directory.journal import Journal
from destinations.run_directory.journal_files import make_journal, remove_journal, sync_journal
from destinations.run_directory.layout import journal_path, part_numbers, parts_path
from destinations.run_directory.metrics_csv import MetricsCsv
from destinations.run_directory.segments import AppendedSegment
from destinations.runs.content.sources import branches_of
from events import State
from tests.effort import times

# This folder is no package: a helper beside the tests is loaded by its path.
_spec = importlib.util.spec_from_file_location("disk_model", Path(__file__).with_name("disk_model.py"))
model = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(model)

SEGMENT_BYTES = 2048


@pytest.fixture
def quick_path(tmp_path):
    """A folder in memory if there is one: the tests make thousands, and compute what a disk would lose."""
    memory = Path("/dev/shm")  # noqa: S108  # Linux has it; what is made there is our own.
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


IDS = itertools.count(1)


class Session:
    """A process that writes to a run: rows, drains, an end."""

    def __init__(
        self, run_dir, disk=None, clock=lambda: 0.0, segment_bytes=SEGMENT_BYTES, part_bytes=PART_BYTES
    ):
        options = {"disk": disk or model.HastyDisk()}
        self.disk = disk
        self.folder = journal_path(run_dir, 0)
        make_journal(self.folder, **options)
        self.journal = Journal(
            self.folder,
            State("x"),
            segment_bytes=segment_bytes,
            make_segment=functools.partial(AppendedSegment, **options),
            clock=lambda: 1.0,
        )
        self.journal.begin_session(f"{next(IDS):012d}")
        sync_journal(self.folder, run_dir, **options)
        csv = MetricsCsv(run_dir / "metrics.csv", **options)
        self.drain_ = JournalDrain(
            run_dir, self.folder, csv, self.journal, clock=clock, part_bytes=part_bytes, **options
        )
        self._options = options

    def note(self, *what):
        if self.disk is not None:
            self.disk.note(*what)

    def log(self, metrics, step):
        self.note("begun", step, metrics)
        self.journal.append(metrics, step)
        self.note("returned")

    def resume(self, step):
        self.note("begun", step, None)
        self.journal.mark_resume(step, None)
        self.note("returned")

    def drain(self):
        if isinstance(self.disk, model.DiskThatFailsOnce):
            self.disk.is_failing = True
            with contextlib.suppress(OSError):
                self.drain_.run()
            self.disk.is_failing = False
        self.drain_.run()
        self.journal.files.retire()
        self.note("safe")

    def die(self):
        """Ends abruptly: the next session finds the journal as it is."""
        for segment in list(self.journal.files.segments):
            segment.close()
        self.drain_._csv.close()

    def close(self):
        self.journal.start_new_segment()
        self.drain()
        self.journal.close()
        for segment in list(self.journal.files.segments):
            segment.close()
        if self.drain_.source.is_drained():
            remove_journal(self.folder, **self._options)
        self.drain_._csv.close()


def row(step, attempt=0):
    """Returns the metrics of a step, with a new name now and then."""
    metrics = {"a": step + attempt / 8, "b": float(attempt)}
    if step % 9 == 8:
        metrics[f"extra{step // 9}"] = step / 7
    return metrics


def check_parts(disk, run_dir, expected):
    """Checks which parts were closed; after an error they may differ."""
    found = part_numbers(parts_path(run_dir / "metrics.csv"))
    assert found == expected or isinstance(disk, model.DiskThatFailsOnce)


def steps_with_columns(disk, run_dir):
    """Two sessions; columns appear, segments fill up, and the journal is taken away at the end of each."""
    for first in (0, 20):
        session = Session(run_dir, disk)
        for step in range(first, first + 20):
            session.log(row(step), step)
            if step % 6 == 5:
                session.drain()
                session.journal.files.prepare()
        session.close()


def steps_with_new_names(disk, run_dir):
    """Each row brings a new metric, for which the file is rewritten."""
    session = Session(run_dir, disk, segment_bytes=1 << 16)
    for step in range(100):
        session.log({f"new{step}": step / 3, "a": 1.5}, step)
        if step in {5, 6, 80, 81}:
            session.drain()
    session.close()
    check_parts(disk, run_dir, [])


def steps_in_parts(disk, run_dir):
    """The first of two sessions is killed; each drain closes the file as a part."""
    for first in (0, 8):
        session = Session(run_dir, disk, part_bytes=60)
        for step in range(first, first + 8):
            session.log(row(step), step)
            if step % 4 == 3:
                session.drain()
        if first:
            session.close()
        else:
            session.die()
    check_parts(disk, run_dir, [1, 2, 3, 4])


def steps_in_abandoned_parts(disk, run_dir):
    """Training goes back behind parts that were closed, to the middle of one, twice."""
    for attempt, (first, last) in enumerate([(0, 12), (6, 12), (2, 8)]):
        session = Session(run_dir, disk, part_bytes=60)
        if attempt:
            session.resume(first)
        for step in range(first, last):
            session.log(row(step, attempt), step)
            if step % 4 == 3:
                session.drain()
        session.close()
    check_parts(disk, run_dir, [1, 2, 3, 4, 5])


def steps_in_abandoned_rows_of_a_first_part(disk, run_dir):
    """One row of the first part has a late step: it no longer counts, but the later parts do."""
    for attempt, (first, last) in enumerate([(0, 16), (15, 18)]):
        session = Session(run_dir, disk, part_bytes=60)
        if attempt:
            session.resume(first)
        else:
            session.log(row(100), 100)
        for step in range(first, last):
            session.log(row(step, attempt), step)
            if step % 4 == 3:
                session.drain()
        session.close()
    check_parts(disk, run_dir, [1, 2, 3, 4, 5])
    steps = [[row.step for row in rows_of_part(run_dir, number)] for number in (1, 2)]
    assert steps == [[100, 0, 1, 2, 3], [4, 5, 6, 7]] or isinstance(disk, model.DiskThatFailsOnce)


def rows_of_part(run_dir, number):
    """Returns the rows of a part."""
    with contextlib.closing(Part(parts_path(run_dir / "metrics.csv"), number).open()) as file:
        return list(file.rows())


def steps_that_are_abandoned(disk, run_dir):
    """Training goes back twice, over rows that are in the CSV and rows that are not."""
    for attempt, (first, last) in enumerate([(0, 16), (9, 20), (4, 12)]):
        session = Session(run_dir, disk)
        if attempt:
            session.resume(first)
            session.drain()
        for step in range(first, last):
            session.log(row(step, attempt), step)
            if step % 7 == 6:
                session.drain()
        if attempt < 2:
            session.die()
        else:
            session.close()


def steps_that_fill_segments(disk, run_dir):
    """Between two drains rows fill several segments, also across a session that is killed."""
    for first in (0, 5):
        session = Session(run_dir, disk, segment_bytes=1200)
        for step in range(first, first + 5):
            # So long that three rows fill a segment.
            session.log({f"a{number}": float(step) for number in range(40)}, step)
            if step == first:
                session.drain()
                session.journal.files.prepare()
        assert len(session.journal.files.segments) > 1
        if first:
            session.close()
        else:
            session.die()


SCENARIOS = [
    steps_with_columns,
    steps_with_new_names,
    steps_that_are_abandoned,
    steps_that_fill_segments,
    steps_in_parts,
    steps_in_abandoned_parts,
    steps_in_abandoned_rows_of_a_first_part,
]


def rows_after(events):
    """Returns the rows that still count after some events, in order."""
    rows = []
    for step, metrics in events:
        if metrics is None:
            rows = [one for one in rows if one[0] < step]
        else:
            rows.append((step, metrics))
    return rows


def rows_in(run_dir):
    """Returns step and metrics of each row that a reader sees."""
    return [(one.step, one.metrics) for one in read_rows(run_dir)]


def check_left(run_dir, events):
    """Checks that leftovers are whole logged rows."""
    logged = {(step, metrics["a"]) for step, metrics in events if metrics is not None and "a" in metrics}
    for branch in branches_of(run_dir):
        for file in branch.files():
            assert {(row.step, row.metrics["a"]) for row in file.rows() if "a" in row.metrics} <= logged


def go_on(run_dir):
    """Opens the run again, logs three rows, closes it; returns what a reader sees then."""
    session = Session(run_dir)
    for step in (1000, 1001, 1002):
        session.log({"a": step / 2}, step)
    session.close()
    assert not (run_dir / "journal").exists()
    return rows_in(run_dir)


def recorded(scenario, quick_path, make_disk=model.RecordingDisk):
    """Runs a scenario to its end; returns the changes."""
    live = quick_path / "live"
    live.mkdir()
    disk = make_disk(live)
    disk.make_folder(live / "run")
    disk.sync_folder(live)
    scenario(disk, live / "run")
    assert len(disk.changes) > 100
    return disk.changes


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_kill_at_every_change_loses_no_row(quick_path, scenario):
    """SIGKILL before each change and in each write: every returned row is there, and a session continues."""
    changes = recorded(scenario, quick_path)
    disk, begun, returned, seen = model.CrashedDisk(), [], 0, set()
    for change in changes:
        if change[0] == "note":
            match change[1:]:
                case ("begun", step, metrics):
                    begun.append((step, metrics))
                case ("returned",):
                    returned = len(begun)
            continue
        for files in (disk.after_kill(), disk.after_kill(during=change)):
            key = model.digest(files), returned, len(begun)
            if key in seen:
                continue
            seen.add(key)
            # Each drain repeats each kind of change.
            if len(seen) % times(16, 1):
                continue
            root = quick_path / "at"
            model.put(files, root)

            rows = rows_in(root / "run") if (root / "run").exists() else []
            assert rows in (rows_after(begun[:returned]), rows_after(begun))
            later = [(step, {"a": step / 2}) for step in (1000, 1001, 1002)]
            assert go_on(root / "run") == [*rows, *later]
            check_left(root / "run", begun)
            shutil.rmtree(root)
        disk.apply(change)
    assert len(seen) > 100


def kill_after_an_error(scenario, number, quick_path):
    """Fails one operation of the drains, and checks a kill at each later change; False if there are fewer.

    A kill before the failure leaves the same as without one.
    """
    live, root = quick_path / "live", quick_path / "at"
    live.mkdir()
    recording = model.DiskThatFailsOnce(live, number)
    recording.make_folder(live / "run")
    scenario(recording, live / "run")
    disk, begun, returned, seen, has_failed = model.CrashedDisk(), [], 0, set(), False
    for change in recording.changes:
        match change:
            case ("note", "begun", step, metrics):
                begun.append((step, metrics))
            case ("note", "returned"):
                returned = len(begun)
            case ("note", "failed"):
                has_failed = True
        if change[0] == "note":
            continue
        disk.apply(change)
        if not has_failed:
            continue
        files = disk.after_kill()
        key = model.digest(files), returned, len(begun)
        is_new = key not in seen
        seen.add(key)
        if is_new and len(seen) % times(16, 1) == 0:
            model.put(files, root)
            rows = rows_in(root / "run") if (root / "run").exists() else []
            assert rows in (rows_after(begun[:returned]), rows_after(begun)), (number, change[:2])
            assert go_on(root / "run")[: len(rows)] == rows, (number, change[:2])
            shutil.rmtree(root)
    shutil.rmtree(live)
    return recording.left < 0


@pytest.mark.parametrize(
    "scenario",
    [
        steps_with_columns,
        steps_in_parts,
        steps_in_abandoned_parts,
        steps_in_abandoned_rows_of_a_first_part,
    ],
)
def test_a_disk_error_followed_by_a_kill_loses_no_row(quick_path, scenario):
    """Whichever operation of a drain fails, the next drain continues, and a kill leaves each row once."""
    number = random.Random(scenario.__name__).randrange(times(180, 1))
    while kill_after_an_error(scenario, number, quick_path):
        number += times(180, 1)
    assert number > 50


@pytest.mark.parametrize("scenario", [one for one in SCENARIOS if one is not steps_with_new_names])
def test_a_power_loss_at_any_change_loses_at_most_the_last_second(quick_path, scenario):
    """Whichever unsynced writes survive, the last drain's rows are there, and the first of the later ones."""
    changes = recorded(scenario, quick_path)
    source = random.Random(scenario.__name__)
    disk, begun, safe, seen = model.CrashedDisk(), [], 0, set()
    for change in changes:
        if change[0] == "note":
            match change[1:]:
                case ("begun", step, metrics):
                    begun.append((step, metrics))
                case ("safe",):
                    safe = len(begun)
            continue
        disk.apply(change)
        for fates, folder_fates in model.fates_to_try(source):
            # A thousand changes, ninety fates each.
            if source.randrange(times(80, 1)):
                continue
            files = disk.files(fates, folder_fates)
            key = model.digest(files), safe, len(begun)
            if key in seen:
                continue
            seen.add(key)
            root = quick_path / "at"
            model.put(files, root)

            rows = rows_in(root / "run") if (root / "run").exists() else []
            told = f"{change[:2]} files {fates} folders {folder_fates}"
            # The state at some later moment: no row in between is missing.
            assert rows in [rows_after(begun[:count]) for count in range(safe, len(begun) + 1)], told
            if len(seen) % 5 == 0:
                assert go_on(root / "run")[: len(rows)] == rows, told
                check_left(root / "run", begun)
            shutil.rmtree(root)
    assert len(seen) > times(50, 300)


def write_documents(disk, run_dir):
    """Writes the documents of two sessions several times each, as the writer does.

    A note records the content of each document and whether it is durable.
    """
    names = ("sidecar.json", "summary.json", "hparams.yaml", "sessions.jsonl")
    for _ in range(2):
        documents = Documents(run_dir, "id", ("tag",), "", 1.0, disk=disk)
        sessions = documents.sessions
        for turn in range(4):
            durable = turn > 0 or not documents.is_new
            documents.add_hyperparameters({"lr": turn // 2})
            sessions.write(durable=durable)
            documents.write_hparams(durable=durable)
            documents.write_sidecar(Aggregate(), {}, durable=durable)
            if turn:
                write_summary(run_dir, 0, "id", Aggregate(), {}, disk)
            disk.note(
                {name: (run_dir / name).read_bytes() for name in names if turn or name != names[1]}, durable
            )


def test_a_power_loss_leaves_each_document_whole(tmp_path):
    """Each document is from some moment, and none that a durable turn has written is lost."""
    live = tmp_path / "live"
    live.mkdir()
    recording = model.RecordingDisk(live)
    recording.make_folder(live / "run")
    recording.sync_folder(live)
    write_documents(recording, live / "run")
    disk, written, safe, checked = model.CrashedDisk(), {}, {}, set()
    source = random.Random("documents")
    notes = [change for change in recording.changes if change[0] == "note"]

    for change in recording.changes:
        if change[0] == "note":
            notes.pop(0)
            for name, content in change[1].items():
                written.setdefault(name, []).append(content)
                if change[2]:
                    safe[name] = len(written[name]) - 1
            continue
        disk.apply(change)
        for fates, folder_fates in model.fates_to_try(source):
            files = disk.files(fates, folder_fates)
            for name, first in safe.items():
                next_one = [notes[0][1][name]] if notes and name in notes[0][1] else []
                assert files[f"run/{name}"] in written[name][first:] + next_one, (
                    change[:3],
                    fates,
                    folder_fates,
                )
                checked.add((name, files[f"run/{name}"]))

    assert {name for name, _ in checked} == {"sidecar.json", "summary.json", "hparams.yaml", "sessions.jsonl"}
    assert len(checked) > 15
