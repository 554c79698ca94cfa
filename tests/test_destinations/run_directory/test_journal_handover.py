"""The journal changes segments despite the writer thread, signals, other threads, forks and other files.

After each interference the rows are read as another process would find them after SIGKILL, and once more
after the drain.
"""

import dis
import errno
import functools
import itertools
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Self

import pytest

from destinations.run_directory import journal as journal_module
from destinations.run_directory import read_rows
from destinations.run_directory import segments as segments_module
from destinations.run_directory.drain import JournalDrain
from destinations.run_directory.journal import Journal
from destinations.run_directory.layout import journal_path, segment_path
from destinations.run_directory.metrics_csv import MetricsCsv
from destinations.run_directory.segments import AppendedSegment, MappedSegment
from events import State
from uploads.disk import Disk

SEGMENT_BYTES = 2048
TRACED_FILES = {journal_module.__file__, segments_module.__file__}


class Written:
    """A journal with small segments, and the drain of its run."""

    def __init__(self, run_dir: Path, **options) -> None:
        self.run_dir = run_dir
        self.folder = journal_path(run_dir, 0)
        self.folder.mkdir(parents=True)
        self.journal = Journal(self.folder, State("x"), **{"segment_bytes": SEGMENT_BYTES, **options})
        self.drain = JournalDrain(run_dir, self.folder, MetricsCsv(run_dir / "metrics.csv"), self.journal)

    def log(self, steps) -> None:
        for step in steps:
            self.journal.append(row(step), step)

    def on_disk(self) -> list[tuple[int, dict[str, float]]]:
        """Returns what a reader would find after a kill."""
        return [(one.step, one.metrics) for one in read_rows(self.run_dir)]

    def close(self) -> list[tuple[int, dict[str, float]]]:
        """Drains and closes; returns what the CSV has."""
        self.journal.write_pending()
        self.journal.start_new_segment()
        self.drain.run()
        self.journal.close()
        return self.on_disk()


def row(step: int) -> dict[str, float]:
    """A row that is another at each step, with new names now and then."""
    metrics = {"a": step + 0.5, "b": float(step)}
    return {**metrics, f"c{step // 20}": step} if step % 20 == 7 else metrics


def rows(steps) -> list[tuple[int, dict[str, float]]]:
    """Steps with their rows."""
    return [(step, row(step)) for step in steps]


def test_a_file_in_the_way_of_the_next_segment_is_left_alone(tmp_path):
    """If a number is taken, the journal uses the next one, and readers see every row."""
    written = Written(tmp_path)
    in_the_way = segment_path(written.folder, written.journal.files.segments[-1].number + 1)
    in_the_way.write_bytes(b"somebody's")

    written.log(range(100))
    seen, content = written.on_disk(), in_the_way.read_bytes()

    assert content == b"somebody's"
    assert seen == rows(range(100))
    assert written.close() == rows(range(100))


def test_the_training_thread_uses_the_prepared_spare(tmp_path):
    """The spare becomes the next segment; a spare too small for a wide row is discarded."""
    made = []
    written = Written(tmp_path, make_segment=lambda *one: made.append(one) or MappedSegment(*one))
    written.journal.files.prepare()
    written.journal.files.prepare()
    assert len(made) == 2

    for step in itertools.count():
        written.log([step])
        if len(written.journal.files.segments) > 1:
            break
    assert len(made) == 2

    written.journal.files.prepare()
    written.journal.append({f"m{number}": float(number) for number in range(300)}, 1000)
    assert [size for _, _, size in made[:3]] == [SEGMENT_BYTES] * 3
    assert made[3][2] > SEGMENT_BYTES
    assert len(written.close()) == step + 2
    assert not list(written.folder.glob(".*"))


def test_only_the_newest_full_segments_stay_open(tmp_path):
    """Open segments survive a deleted folder; the number of descriptors is bounded."""
    written = Written(tmp_path)
    step = 0
    while len(written.journal.files.segments) < 25:
        written.log([step])
        step += 1

    written.journal.files.retire()
    written.journal.files.retire()

    is_open = [segment.fileno() >= 0 for segment in written.journal.files.segments]
    assert is_open == [False] * 8 + [True] * 17
    if Path("/proc/self/maps").exists():
        assert Path("/proc/self/maps").read_text().count(str(written.folder)) == 1
    assert written.close() == rows(range(step))


class LogsWhenMade(MappedSegment):
    """A signal handler logs a row while a segment is made."""

    handler = staticmethod(lambda: None)

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.handler()


def test_a_row_of_a_handler_is_on_disk_when_the_interrupted_call_returns(tmp_path):
    """It doesn't wait for the next row, because the process may be killed before that."""
    written = Written(tmp_path, make_segment=LogsWhenMade)
    interrupted = []

    def handler():
        interrupted.append(step)
        written.journal.append({"handler": 1.0}, 1000)

    LogsWhenMade.handler = staticmethod(handler)
    try:
        for step in range(100):
            written.log([step])
            if interrupted:
                break
        seen = written.on_disk()
    finally:
        LogsWhenMade.handler = staticmethod(lambda: None)

    assert interrupted == [step]
    assert seen == [*rows(range(step + 1)), (1000, {"handler": 1.0})]
    assert written.journal.counts.pending == 0


class InterruptedDisk(Disk):
    """Calls a function in the middle of the next write, as a signal does, or fails."""

    handler = staticmethod(lambda: None)
    failure = None

    def write(self, fd, data, offset):
        if self.failure is not None:
            raise self.failure
        super().write(fd, data[:5], offset)
        handler, self.handler = self.handler, lambda: None
        handler()
        super().write(fd, data[5:], offset + 5)


def appended_to(disk):
    """Returns what makes segments that are written with a disk."""
    return lambda path, number, size: AppendedSegment(path, number, size, disk)


def test_a_row_of_a_handler_during_a_write_is_held_until_the_next_call(tmp_path):
    """Neither row is lost, and the second counts as pending meanwhile, even in the lock-free fast path."""
    disk = InterruptedDisk()
    written = Written(tmp_path, make_segment=appended_to(disk))
    written.log(range(3))
    disk.handler = lambda: written.journal.append({"handler": 1.0}, 1000)

    written.log([3])
    held, before = written.journal.counts.pending, written.on_disk()
    written.journal.write_pending()

    assert (held, before) == (1, rows(range(4)))
    assert written.journal.counts.pending == 0
    assert written.on_disk() == [*rows(range(4)), (1000, {"handler": 1.0})]


@pytest.mark.parametrize(("failures", "retry_seconds"), [(1, 60.0), (3, 0.0)])
def test_a_row_does_not_overtake_one_that_a_failing_disk_refused(
    tmp_path, monkeypatch, failures, retry_seconds
):
    """This holds even if the disk works again in the meantime."""
    monkeypatch.setattr(journal_module, "_RETRY_SECONDS", retry_seconds)
    disk, reported = InterruptedDisk(), []

    def works_again(error):
        reported.append(error)
        if len(reported) == failures:
            disk.failure = None

    written = Written(tmp_path, make_segment=appended_to(disk), on_full=works_again)
    written.log(range(3))
    disk.failure = OSError(errno.EIO, "bad disk")

    written.log(range(3, 6))
    written.journal.write_pending()

    assert disk.failure is None
    assert written.on_disk() == rows(range(6))


class NoneOnFullDisk:
    """Makes segments until the disk is full, and again when it has room."""

    def __init__(self):
        self.is_full = False

    def __call__(self, *arguments):
        if self.is_full:
            raise OSError(errno.ENOSPC, "no space")
        return MappedSegment(*arguments)


def test_rows_refused_by_a_full_disk_are_held_counted_and_written_first(tmp_path):
    """They keep their order, and the writer thread writes them if nothing more is logged."""
    make, full = NoneOnFullDisk(), []
    written = Written(tmp_path, make_segment=make, on_full=full.append)
    make.is_full = True
    written.log(range(100))

    held = written.journal.counts.pending
    assert written.on_disk() == rows(range(100 - held))
    assert 0 < held < 100
    assert {error.errno for error in full} == {errno.ENOSPC}

    make.is_full = False
    written.journal.write_pending()
    assert written.journal.counts.pending == 0
    written.log([100])
    assert written.close() == rows(range(101))


def test_rows_that_do_not_fit_into_memory_are_dropped_and_counted(tmp_path, monkeypatch):
    """Held rows stay; once they are written, there is as much room as before."""
    monkeypatch.setattr(journal_module, "PENDING_BYTES", 10 * (100 + 32 * 2))
    make = NoneOnFullDisk()
    written = Written(tmp_path, make_segment=make)
    for first in (0, 1000):
        make.is_full = True
        written.log(range(first, first + 20))
        while written.journal.counts.pending < 10:
            written.log([first + 100])
        counts = written.journal.counts
        dropped = counts.dropped
        written.log([first + 200])
        assert (counts.pending, counts.dropped) == (10, dropped + 1)

        make.is_full = False
        written.journal.write_pending()
        assert counts.pending == 0
    written.close()


@functools.cache
def places_of_signals(code) -> frozenset[int]:
    """Returns the instructions where CPython checks signals: after calls, backward jumps, at the start."""
    instructions = list(dis.get_instructions(code))
    return frozenset(
        after.offset
        for before, after in itertools.pairwise(instructions)
        if before.opname.startswith(("CALL", "JUMP_BACKWARD", "RESUME"))
    )


class Interrupted:
    """Calls `interrupt` within the journal's own code, as a signal does: at the n-th place it reaches."""

    def __init__(self, when: int, interrupt) -> None:
        self._left = when
        self._interrupt = interrupt
        # It may measure coverage.
        self._before = sys.gettrace()

    @property
    def was_called(self) -> bool:
        return self._left <= 0

    def __enter__(self) -> Self:
        # CPython 3.12 reports instructions only to a trace function set after some frame requested them.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame, event, argument):
        if frame.f_code.co_filename not in TRACED_FILES:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame, event, argument):
        if event == "opcode" and frame.f_lasti in places_of_signals(frame.f_code):
            self._left -= 1
            if self._left == 0:
                sys.settrace(self._before)
                self._interrupt()
        return self._step


def interrupt_by_ctrl_c() -> None:
    """Does what Python does at SIGINT."""
    raise KeyboardInterrupt


KINDS = {"mapped": MappedSegment, "appended": AppendedSegment}


def at_the_end_of_a_segment(run_dir: Path, kind: str) -> tuple[Written, int]:
    """Returns a journal that has room for one row more in its segment, and the step of that row."""
    written = Written(run_dir, make_segment=KINDS[kind])
    written.journal.files.prepare()
    step = 0
    while SEGMENT_BYTES - written.journal.files.segments[-1].end() > 150:
        written.log([step])
        step += 1
    return written, step


@pytest.mark.parametrize("kind", KINDS)
def test_a_ctrl_c_anywhere_in_a_change_of_segments_loses_no_row(tmp_path, kind):
    """Wherever a Ctrl-C is caught, each row of a returned call is there once, and the journal works."""
    when, is_done = 1, False
    while not is_done:
        written, step = at_the_end_of_a_segment(tmp_path / str(when), kind)
        caught = []
        with Interrupted(when, interrupt_by_ctrl_c) as interrupted:
            for each in range(step, step + 5):
                try:
                    written.log([each])
                except KeyboardInterrupt:
                    caught.append(each)
        is_done = not interrupted.was_called
        written.log(range(step + 5, step + 45))
        seen = written.on_disk()

        expected = [one for one in rows(range(step + 45)) if one[0] not in caught or one in seen]
        assert len(written.journal.files.segments) > 2
        assert seen == expected, f"at place {when}"
        if is_done or when % 16 == 0:
            assert written.close() == expected, f"at place {when}"
        else:
            written.journal.close()
        when += 1
    assert when > 100


@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_that_logs_anywhere_in_a_change_of_segments_loses_no_row(tmp_path, kind):
    """A signal handler logs in the middle of a call; both rows are there, and nothing deadlocks."""
    when, is_done = 1, False
    while not is_done:
        written, step = at_the_end_of_a_segment(tmp_path / str(when), kind)
        of_handler = {"handler": float(when), "x": 1.0}
        with Interrupted(when, lambda: written.journal.append(of_handler, 1000)) as interrupted:  # noqa: B023
            written.log(range(step, step + 5))
        is_done = not interrupted.was_called
        written.log(range(step + 5, step + 45))
        seen = sorted(written.on_disk(), key=lambda one: one[0])

        expected = rows(range(step + 45)) + ([] if is_done else [(1000, of_handler)])
        assert seen == expected, f"at place {when}"
        if is_done or when % 16 == 0:
            assert len(written.close()) == len(expected), f"at place {when}"
        else:
            written.journal.close()
        when += 1
    assert when > 100


@pytest.mark.parametrize("kind", KINDS)
def test_threads_that_log_at_once_lose_nothing(tmp_path, kind):
    """Each row is there once with its values, while segments change and rows are drained."""
    written = Written(tmp_path, make_segment=KINDS[kind], segment_bytes=4096)
    begin = threading.Barrier(5)
    expected = []

    def metrics_of(thread: int, step: int) -> dict[str, float]:
        return {f"t{thread}/{name}": step + thread / 8 for name in "ab"[: 1 + (step + thread) % 2]} | {
            f"t{thread}/c": step
        }

    def log(thread: int) -> None:
        begin.wait(60)
        for step in range(300):
            written.journal.append(metrics_of(thread, step), 10 * step + thread)

    threads = [threading.Thread(target=log, args=(thread,)) for thread in range(4)]
    for thread in range(4):
        expected += [(10 * step + thread, metrics_of(thread, step)) for step in range(300)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        begin.wait(60)
        while any(thread.is_alive() for thread in threads):
            written.drain.run()
            written.journal.files.retire()
            written.journal.files.prepare()
            written.journal.request_sample()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)

    assert sorted(written.on_disk(), key=lambda one: one[0]) == sorted(expected, key=lambda one: one[0])
    assert sorted(written.close(), key=lambda one: one[0]) == sorted(expected, key=lambda one: one[0])
    assert written.journal.counts.dropped == 0


class ForksInBetween(MappedSegment):
    """Forks a child in the middle of a change of segments, as a signal handler may.

    The child continues to log, then ends.
    """

    fork = staticmethod(lambda: None)

    def move(self, path, number):
        self.fork()
        super().move(path, number)


@pytest.mark.filterwarnings("ignore:This process")
def test_a_fork_in_the_middle_of_a_change_writes_nothing(tmp_path):
    """A child that is forked inside a call writes nothing into its parent's journal.

    The parent loses nothing.
    """
    children = []
    written = Written(tmp_path, make_segment=ForksInBetween)
    is_child = []

    def fork() -> None:
        ForksInBetween.fork = staticmethod(lambda: None)
        pid = os.fork()
        if pid == 0:
            is_child.append(True)
            written.journal.abandon_in_child()
        else:
            children.append(os.waitpid(pid, 0)[1])

    ForksInBetween.fork = staticmethod(fork)
    try:
        written.log(range(50))
        if is_child:
            written.log(range(500, 600))
    finally:
        if is_child:
            os._exit(0)

    assert children == [0]
    assert written.on_disk() == rows(range(50))
    assert written.close() == rows(range(50))


def test_a_child_leaves_the_spare_of_its_parent(tmp_path):
    """This holds even if the child closes what it inherited."""
    written = Written(tmp_path)
    written.journal.files.prepare()
    (spare,) = written.folder.glob(".*")

    written.journal.abandon_in_child()
    written.journal.close()

    assert spare.exists()


@pytest.mark.filterwarnings("ignore:This process")
def test_a_child_does_not_wait_for_a_thread_of_its_parent(tmp_path):
    """A thread was in the middle of a call when the process forked; the parent loses nothing."""
    is_inside, may_leave = threading.Event(), threading.Event()
    may_leave.set()

    def make_segment(*arguments):
        is_inside.set()
        may_leave.wait(60)
        return MappedSegment(*arguments)

    written = Written(tmp_path, make_segment=make_segment)
    written.journal.start_new_segment()
    is_inside.clear()
    may_leave.clear()
    thread = threading.Thread(target=written.log, args=([0],))
    thread.start()
    is_inside.wait(60)

    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        code = 1
        try:
            written.journal.abandon_in_child()
            written.log(range(500, 503))
            written.journal.mark_boundary()
            written.journal.close()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    may_leave.set()
    thread.join(60)

    assert status == 0
    assert written.on_disk() == rows([0])
