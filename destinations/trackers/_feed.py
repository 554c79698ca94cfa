"""From the training thread to a sink: rows of metrics in a queue of their own, everything else through a lane.

`add` and `put` belong to the training thread. A row costs it about a microsecond: no lock, no system call.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs

from destinations._lane import Lane, TryLater, WhenFull

from ._sink import Row, RowsRefused, Sink

__all__ = ["Feed", "FeedCounts"]

ROWS_AT_ONCE = 64
ROWS_TO_WAKE = 1024
MOST_MEDIA = 1000


@attrs.frozen
class FeedCounts:
    """What became of what was logged to one run.

    Attributes:
        rows: calls of `log_metrics`.
        written_rows: those that were written.
        dropped_rows: those that were dropped, for the queue was full or the deadline passed.
        failed_rows: those that the tracker refused.
        records: everything else that was taken, what the tracker itself needs included: opening, flushing, the end.
        written_records: that was written.
        dropped_records: for which there was no room, or no time at the end.
        failed_records: that the tracker refused.
        errors: how often what was raised, by kind of record and exception.
    """

    rows: int = 0
    written_rows: int = 0
    dropped_rows: int = 0
    failed_rows: int = 0
    records: int = 0
    written_records: int = 0
    dropped_records: int = 0
    failed_records: int = 0
    errors: dict[str, int] = attrs.field(factory=dict)


class Feed:
    """The queues and the thread of one run.

    Order is kept: a record that is no metric waits for the rows before it, and the rows after it wait for it.

    Args:
        name: of the thread, and of the tracker in messages.
        sink: where to.
        flush_seconds: how often rows are written, and the sink flushed.
        most_values: how many values of metrics may wait.
        most_bytes: how large all else may be that waits.
        when_full: what to do with a row for which there is no room.
        wait_seconds: how long a call may wait for room, for what waits.
    """

    def __init__(
        self,
        name: str,
        sink: Sink,
        *,
        flush_seconds: float,
        most_values: int,
        most_bytes: int,
        when_full: WhenFull,
        wait_seconds: float,
    ) -> None:
        self.sink = sink
        self._when_full = when_full
        self._most_values = most_values
        self._wait_seconds = wait_seconds
        self._lane = Lane(
            name,
            limit=MOST_MEDIA,
            limit_bytes=most_bytes,
            when_full="wait",
            wait_seconds=wait_seconds,
            tick=self._on_tick,
            tick_seconds=flush_seconds,
            on_exit=sink.close,
        )
        self.rows: deque[Row] = deque()
        # Counted by the training thread alone.
        self._added_rows = 0
        self._added_values = 0
        self._refused_rows = 0
        self._notice_at = ROWS_TO_WAKE
        self._is_woken = False
        # Guards taking rows away, and the counts of it.
        self._taking = threading.Condition()
        self._taken_rows = 0
        self._taken_values = 0
        self._written_rows = 0
        self._dropped_rows = 0
        self._failed_rows = 0
        self._is_stuck = False
        self._is_stopped = False
        self._is_opened = False

    @property
    def counts(self) -> FeedCounts:
        """What became of what was logged until now."""
        lane = self._lane.counts
        return FeedCounts(
            self._added_rows + self._refused_rows,
            self._written_rows,
            self._dropped_rows + self._refused_rows,
            self._failed_rows,
            lane.accepted,
            lane.done,
            lane.dropped,
            lane.failed,
            dict(lane.errors),
        )

    # --- in the training thread ------------------------------------------------------------------------------------

    def open(self) -> None:
        """Starts the thread, which opens the sink before all else."""
        self._lane.put(self._open, kind="open", is_kept=True)

    def add(self, row: Row) -> None:
        """Queues the metrics of one call."""
        rows = self.rows
        rows.append(row)
        self._added_rows += 1
        self._added_values += 1 + len(row[0])
        if self._added_values - self._taken_values > self._most_values:
            self._make_room()
        elif len(rows) >= self._notice_at:
            # Not again for each row, while the lane is busy.
            self._notice_at = 2 * len(rows)
            self._lane.wake()

    def put(
        self, kind: str, size: int, work: Callable[..., object], *args: Any, is_kept: bool = False
    ) -> bool:
        """Queues something else; says whether it will be done."""
        mark = self._added_rows

        def work_in_order() -> None:
            self._write_until(mark)
            work(*args)

        return self._lane.put(work_in_order, size=size, kind=kind, is_kept=is_kept)

    def flush(self, timeout_seconds: float) -> bool:
        """Waits until what was logged has gone through the sink; False where that takes longer than the timeout."""
        self.put("flush", 0, self.sink.flush, is_kept=True)
        return self._lane.flush(timeout_seconds)

    def while_paused(self, call: Callable[[], object], timeout_seconds: float) -> bool:
        """Calls something in this thread while the sink rests, with all that was logged before written and flushed.

        Returns:
            Whether it was called: the sink did not come to rest in time otherwise.
        """
        rests, goes_on = threading.Event(), threading.Event()

        def rest() -> None:
            self.sink.flush()
            rests.set()
            goes_on.wait(timeout_seconds)

        self.put("pause", 0, rest, is_kept=True)
        try:
            if not rests.wait(timeout_seconds):
                return False
            call()
        finally:
            goes_on.set()
        return True

    def stop(self, timeout_seconds: float) -> bool:
        """Writes what is there, and ends the thread; False where that takes longer: what is left then is dropped."""
        self.put("flush", 0, self.sink.flush, is_kept=True)
        is_done = self._lane.stop(timeout_seconds)
        with self._taking:
            self._is_stopped = True
            self._drop(len(self.rows))
        return is_done

    def wait_for_end(self, timeout_seconds: float) -> None:
        """Waits for the thread that `stop` gave up, where what it hung on has been taken away since."""
        self._lane.stop(timeout_seconds)

    def _make_room(self) -> None:
        """Does what the policy says: called with one row too many."""
        if not self._is_woken:
            self._is_woken = True
            self._lane.wake()
        with self._taking:
            if self._when_full == "wait" and not self._is_stuck:
                has_room = self._taking.wait_for(lambda: not self._is_over(), self._wait_seconds)
                self._is_stuck = not has_room
            if self._when_full == "drop_oldest":
                while self._is_over() and len(self.rows) > 1:
                    self._drop(1)
            elif self._is_over() and len(self.rows) > 1:
                self._added_rows -= 1
                self._added_values -= _weight([self.rows.pop()])
                self._refused_rows += 1

    def _is_over(self) -> bool:
        return self._added_values - self._taken_values > self._most_values

    def _drop(self, count: int) -> None:
        for _ in range(count):
            self._dropped_rows += 1
            self._taken_rows += 1
            self._taken_values += _weight([self.rows.popleft()])

    # --- in the thread of the lane ---------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            self.sink.open()
        except TryLater:
            raise
        except BaseException:
            # What comes is for the sink to refuse.
            self._is_opened = True
            raise
        self._is_opened = True

    def _on_tick(self) -> None:
        if not self._is_opened:
            return
        mark = self._added_rows
        # What is queued writes the rows before it; those after it must wait.
        if self._lane.is_idle:
            self._write_until(mark)
        self.sink.flush()

    def _write_until(self, mark: int) -> None:
        """Writes the rows before a mark, in chunks: between two of them, training has the interpreter."""
        while rows := self._take(mark):
            try:
                self.sink.log_metrics(rows)
            except TryLater:
                self._put_back(rows)
                raise
            except RowsRefused as error:
                self._lane.note("metrics", error.__cause__ or error)
                self._failed_rows += error.count
                self._written_rows += len(rows) - error.count
            except Exception as error:  # noqa: BLE001  # counted and reported
                self._lane.note("metrics", error)
                self._failed_rows += len(rows)
            else:
                self._written_rows += len(rows)
            time.sleep(0)

    def _take(self, mark: int) -> list[Row]:
        with self._taking:
            count = min(ROWS_AT_ONCE, mark - self._taken_rows, len(self.rows))
            rows = [self.rows.popleft() for _ in range(count)]
            self._taken_rows += len(rows)
            self._taken_values += _weight(rows)
            self._notice_at = ROWS_TO_WAKE
            self._is_woken = False
            self._is_stuck = False
            self._taking.notify_all()
        return rows

    def _put_back(self, rows: list[Row]) -> None:
        with self._taking:
            self.rows.extendleft(reversed(rows))
            self._taken_rows -= len(rows)
            self._taken_values -= _weight(rows)
            if self._is_stopped:
                self._drop(len(self.rows))


def _weight(rows: list[Row]) -> int:
    """Returns how many values rows count for; a row without any takes room too."""
    return len(rows) + sum(len(row[0]) for row in rows)
