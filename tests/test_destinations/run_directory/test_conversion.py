"""A process turns closed parts into Parquet beside a run, gives way to all others, and ends with the run."""

import contextlib
import gc
import json
import logging
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from destinations import RunDirectory
from destinations.run_directory import RunInUseError, read_rows
from destinations.run_directory.conversion import PartConverter, convert_part, convert_parts
from destinations.run_directory.drain import JournalDrain
from destinations.run_directory.journal import Journal
from destinations.run_directory.layout import journal_path, part_numbers, parts_path
from destinations.run_directory.metrics_csv import MetricsCsv
from destinations.run_directory.reader import Part
from events import State
from tests.test_destinations.runs.written import Written
from tests.waiting import until
from uploads.disk import Disk

PART_BYTES = 20_000


class Converting(RunDirectory):
    """Closes parts of some kilobytes, which become Parquet."""

    _part_bytes = PART_BYTES
    _least_parquet_bytes = 1000


class WrittenAsParquet(Written):
    """A run whose parts become Parquet."""

    kind = Converting


class Closed:
    """A run with closed parts that nobody converts."""

    def __init__(self, run_dir, count=3):
        folder = journal_path(run_dir, 0)
        folder.mkdir(parents=True)
        self.journal = Journal(folder, State("x"), clock=lambda: 1.0)
        self.csv = MetricsCsv(run_dir / "metrics.csv")
        self.drain = JournalDrain(run_dir, folder, self.csv, self.journal, part_bytes=PART_BYTES)
        values = np.random.default_rng(0).normal(size=(1000, 4)).tolist()
        step = 0
        while self.csv.closed < count:
            self.journal.append(dict(zip("abcd", values[step % 1000], strict=True)), step)
            step += 1
            if step % 50 == 0:
                self.drain.run()
        self.rows = read_rows(run_dir)

    def close(self):
        self.journal.close()
        for segment in list(self.journal.segments):
            segment.close()
        self.csv.close()


@pytest.fixture
def closed(tmp_path):
    """Three parts and a file."""
    found = Closed(tmp_path / "run")
    yield found
    found.close()


def hurry(run):
    """Has the parts of a run converted at once, also where other programs are at work; returns the converter."""
    converter = run.destination._writer._converter
    converter._look_seconds, converter._nice = 0.0, 0
    return converter


def parts_of(run_dir, suffix):
    """Returns the numbers of the parts with a suffix."""
    return sorted(int(path.stem) for path in parts_path(run_dir / "metrics.csv").glob(f"[0-9]*{suffix}"))


def state_of(pid):
    """Returns the state of a process, such as "R" or "Z"; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def finish(converter):
    """Waits until the process has ended, and has the converter take what it has left; no other is started."""
    until(lambda: converter._job[0].poll() is not None)
    converter.turn(is_last=True)
    assert converter.pid is None


def test_parts_become_parquet_while_the_run_goes_on(tmp_path):
    """Closed parts are replaced one after the other, with the same rows, and the sidecar says how many."""
    source = np.random.default_rng(0).normal(size=(800, 5))
    with WrittenAsParquet(tmp_path / "run", flush_seconds=0.01) as run:
        hurry(run)
        for step, values in enumerate(source.tolist()):
            run.log(dict(zip("abcde", values, strict=True)), step)
            if step % 100 == 99:
                run.flush()
        closed = part_numbers(parts_path(tmp_path / "run/metrics.csv"))
        until(lambda: parts_of(tmp_path / "run", ".parquet") == closed)
        run.log({"a": 0.5}, 800)
        run.flush()

    assert len(closed) > 1
    assert parts_of(tmp_path / "run", ".csv") == []
    assert parts_of(tmp_path / "run", ".npy") == closed
    assert [list(row.metrics.values()) for row in read_rows(tmp_path / "run")] == [*source.tolist(), [0.5]]
    sidecar = json.loads((tmp_path / "run/sidecar.json").read_bytes())
    assert sidecar["overhead"]["parquet_parts"] == len(closed)
    assert (sidecar["status"], sidecar["lost"]) == ("completed", {})


@pytest.mark.parametrize("parts", ["csv", "auto"])
def test_parts_that_are_small_or_are_to_stay_csv_have_no_process(tmp_path, parts):
    """With `parts="csv"` there is no converter, and a part of less than a MiB starts none."""
    kind = type("Small", (Converting,), {"_least_parquet_bytes": 1 << 20 if parts == "auto" else 1000})
    written = type("WrittenSmall", (Written,), {"kind": kind})
    with written(tmp_path / "run", parts=parts) as run:
        for step in range(1000):
            run.log({"loss": step / 3}, step)
        run.flush()
        converter = run.destination._writer._converter
        assert converter is None if parts == "csv" else converter.pid is None

    assert parts_of(tmp_path / "run", ".csv") == [1]


def test_another_word_for_parts_is_refused(tmp_path):
    """The constructor names the choices."""
    with pytest.raises(ValueError, match="parts must be"):
        RunDirectory(tmp_path, parts="zip")


def test_the_process_gives_way_and_is_killed_with_the_run(closed):
    """It runs where nobody else wants to; `stop` does not wait for it, and leaves the part as it is."""
    failures = []
    converter = PartConverter(closed.csv, failures.append, least_bytes=1)
    converter.turn()
    pid = converter.pid
    until(lambda: os.sched_getscheduler(pid) == os.SCHED_IDLE)
    until(lambda: Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n")

    begun = time.monotonic()
    converter.stop()

    assert time.monotonic() - begun < 5.0
    # It may take a moment to die where others want the processor.
    until(lambda: state_of(pid) in {"", "Z"})
    folder = closed.csv.folder
    assert parts_of(folder.parent.parent, ".csv") == [1, 2, 3]
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
    assert failures == []


def test_a_process_that_fails_is_said_once_and_leaves_the_parts(tmp_path, monkeypatch, caplog):
    """Three failures end the attempts; rows, status and the rest of the run are as they would be without."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'no room for pyarrow' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with caplog.at_level(logging.WARNING), WrittenAsParquet(tmp_path / "run", flush_seconds=0.01) as run:
        converter = hurry(run)
        for step in range(4000):
            run.log({"loss": step / 3}, step)
            if step % 100 == 99:
                run.flush()
        until(lambda: converter.failed == 3)
        run.log({"loss": 0.5}, 4000)

    said = [record.message for record in caplog.records if "Parquet" in record.message]
    assert len(said) == 1
    assert "a part could not be converted to Parquet, and stays CSV (no room for pyarrow)" in said[0]
    assert len(parts_of(tmp_path / "run", ".csv")) > 3
    assert len(read_rows(tmp_path / "run")) == 4001
    sidecar = json.loads((tmp_path / "run/sidecar.json").read_bytes())
    assert (sidecar["status"], sidecar["overhead"]["errors"]) == ("completed", {"parquet": 3})


def test_a_python_that_cannot_be_started_is_a_failure(closed, monkeypatch):
    """Nothing is left behind where the process cannot even begin."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    failures = []
    converter = PartConverter(closed.csv, failures.append, nice=0, least_bytes=1, look_seconds=0.0)
    for _ in range(10):
        converter.turn()

    assert len(failures) == 3
    assert "No such file or directory: '/nowhere/python'" in failures[0]
    assert sorted(path.suffix for path in closed.csv.folder.iterdir()) == [".csv"] * 3 + [".npy"] * 3


def test_a_part_that_is_cut_meanwhile_is_not_replaced(closed, tmp_path):
    """Where a resume has taken the CSV away, or another part has its number, what was written is thrown away."""
    converter = PartConverter(closed.csv, pytest.fail, nice=0, least_bytes=1, look_seconds=1e9)
    converter.turn()
    part = Part(closed.csv.folder, 1)
    content = part.csv_path.read_bytes()
    part.csv_path.unlink()
    part.csv_path.write_bytes(content)

    finish(converter)

    assert converter.converted == 0
    assert parts_of(tmp_path / "run", ".parquet") == []
    assert part.csv_path.read_bytes() == content
    assert not list(closed.csv.folder.glob(".*"))


def test_a_forked_child_leaves_the_process_to_its_parent(closed):
    """A DataLoader's worker neither waits for the process nor ends it."""
    converter = PartConverter(closed.csv, pytest.fail, nice=0, least_bytes=1, look_seconds=1e9)
    converter.turn()
    pid = os.fork()
    if pid == 0:
        converter.forget_in_child()
        converter.stop()
        os._exit(0 if converter.pid is None else 1)

    assert os.waitpid(pid, 0)[1] == 0
    finish(converter)
    assert converter.converted == 1


def test_what_a_killed_session_left_is_removed_and_converted(closed, tmp_path):
    """A temporary file of a dead process does not stay, and its parts are converted by the next session."""
    left = closed.csv.folder / ".00000001.parquet.123-0.tmp"
    left.write_bytes(b"half")
    closed.close()

    with WrittenAsParquet(tmp_path / "run", batch=len(closed.rows)) as run:
        hurry(run)
        until(lambda: parts_of(tmp_path / "run", ".parquet") == [1, 2, 3])

    assert not left.exists()
    assert read_rows(tmp_path / "run") == closed.rows


class FullDisk(Disk):
    """Has no room for what is written."""

    def write(self, fd, data, offset):
        """Raises OSError."""
        raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_the_part(closed, tmp_path):
    """The part stays, and nothing beside it."""
    with pytest.raises(OSError, match="No space left"):
        convert_part(Part(closed.csv.folder, 1), disk=FullDisk())

    assert parts_of(tmp_path / "run", ".csv") == [1, 2, 3]
    assert sorted(path.suffix for path in closed.csv.folder.iterdir()) == [".csv"] * 3 + [".npy"] * 3


class FailingOnce(Disk):
    """Has no room for one write, and then has."""

    failed = False

    def write(self, fd, data, offset):
        """Raises OSError once."""
        if offset and not self.failed:
            self.failed = True
            raise OSError(28, "No space left on device")
        super().write(fd, data, offset)


def test_nothing_is_written_after_an_error_to_what_has_its_descriptor(closed, tmp_path):
    """What pyarrow still has to write when its writer is collected goes nowhere."""
    with pytest.raises(OSError, match="No space left") as raised:
        convert_part(Part(closed.csv.folder, 1), disk=FailingOnce())
    files = [(tmp_path / f"other{number}").open("w+b") for number in range(8)]
    del raised
    gc.collect()

    assert [os.fstat(file.fileno()).st_size for file in files] == [0] * 8
    for file in files:
        file.close()


def test_parts_of_a_run_that_has_ended_are_converted_here(closed, tmp_path):
    """All of them, with the times of the CSV; again, there is nothing to do."""
    closed.close()
    before = {number: Part.find(closed.csv.folder, number).identity[1] for number in (1, 2, 3)}

    found = [(part.number, reason) for part, reason in convert_parts(tmp_path / "run", 0)]

    assert found == [(1, ""), (2, ""), (3, "")]
    assert parts_of(tmp_path / "run", ".csv") == []
    assert {number: Part.find(closed.csv.folder, number).identity[1] for number in (1, 2, 3)} == before
    assert read_rows(tmp_path / "run") == closed.rows
    assert list(convert_parts(tmp_path / "run", 0)) == []
    assert not (tmp_path / "run/.lock").exists()


def test_parts_of_a_run_that_is_being_written_are_left_to_its_writer(tmp_path):
    """Who does not hold the lock replaces nothing."""
    with WrittenAsParquet(tmp_path / "run", parts="csv") as run:
        for step in range(2000):
            run.log({"loss": step / 3}, step)
        run.flush()
        with pytest.raises(RunInUseError):
            list(convert_parts(tmp_path / "run", 0))

    assert parts_of(tmp_path / "run", ".parquet") == []


def test_other_programs_may_hold_what_is_replaced(closed, tmp_path):
    """A program that reads the CSV while it is replaced reads it to its end."""
    closed.close()
    part = Part(closed.csv.folder, 1)
    content = part.csv_path.read_bytes()
    with part.csv_path.open("rb") as file:
        first = file.read(100)
        with contextlib.suppress(StopIteration):
            next(convert_parts(tmp_path / "run", 0))

        assert first + file.read() == content
    assert not part.csv_path.exists()
