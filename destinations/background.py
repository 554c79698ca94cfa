"""Background threads: `Lane`, a bounded queue with one worker thread, and `PeriodicThread`, periodic work."""

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Literal

import attrs

from events import redact_text
from uploads.disk import Wakeup

__all__ = ["Item", "Lane", "LaneCounts", "PeriodicThread", "RetryLaterError", "WhenFull"]

_log = logging.getLogger("destinations")

WhenFull = Literal["wait", "drop_newest", "drop_oldest"]


class RetryLaterError(Exception):
    """Raised by work that should be retried later: the disk is full, or a server doesn't answer."""


@attrs.define
class LaneCounts:
    """Counts of the items of a lane."""

    accepted: int = 0
    done: int = 0
    failed: int = 0
    dropped: int = 0
    errors: Counter[str] = attrs.field(factory=Counter)
    """Errors, by kind of work and exception."""


@attrs.frozen
class Item:
    """Queued work, its size in bytes, and its name in messages."""

    work: Callable[[], object]
    size: int
    kind: str


@attrs.define(eq=False, slots=False, repr=False)
class Lane:
    """A bounded queue with one worker thread, which starts with the first item.

    When the queue is full, by number or by bytes, `put` follows `when_full`: "wait" waits up to
    `wait_seconds` and then drops the item, "drop_newest" drops it at once, "drop_oldest" drops queued items.
    Drops are counted and reported. An item larger than `limit_bytes` is accepted if the queue is empty. After
    a wait that timed out, later calls do not wait until an item has finished, so a hanging lane delays
    training only once.

    **Retries.** Work that raises `RetryLaterError` is done again after `retry_seconds`; everything behind it
    waits.

    **Fork.** In a forked child `put` does nothing and returns False.

    Args:
        name: the name of the thread, and of the lane in messages.
        limit: the maximum number of queued items.
        limit_bytes: the maximum size of queued items.
        when_full: the policy when the queue is full.
        wait_seconds: the timeout of "wait".
        retry_seconds: the pause before a retry.
    """

    _name: str
    _limit: int = 1000
    _limit_bytes: int = 256 << 20
    _when_full: WhenFull = "wait"
    _wait_seconds: float = 1.0
    _retry_seconds: float = 1.0

    def __attrs_post_init__(self) -> None:
        # Guards everything below; never held while work runs.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._items: deque[Any] = deque()
        self._bytes = 0
        self._is_busy = False
        self._is_stopping = False
        # When the first item is retried after RetryLaterError, as a monotonic time.
        self._paused_until = 0.0
        # The number of finished items, and what it was when the last wait timed out.
        self._settled = 0
        self._stuck_at: int | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self.counts = LaneCounts()

    def put(
        self, work: Callable[[], object], *, size: int = 0, kind: str = "work", is_kept: bool = False
    ) -> bool:
        """Queues work.

        Args:
            work: called in the thread.
            size: the bytes that it keeps in memory.
            kind: its name in messages.
            is_kept: accepts it even if the queue is full; for small, rare items.

        Returns:
            Whether it was accepted.
        """
        if os.getpid() != self._pid:
            return False
        with self._changed:
            dropped_before = self.counts.dropped
            is_taken = not self._is_stopping and (is_kept or self._make_room(size))
            if is_taken:
                self._items.append(Item(work, size, kind))
                self._bytes += size
                self.counts.accepted += 1
                self._ensure_thread()
                self._changed.notify_all()
            else:
                self.counts.dropped += 1
            is_first = dropped_before == 0 and self.counts.dropped > 0
        if is_first:
            _log.warning(
                "%s: queue full (%d items, %d MiB), dropped a %s. Further drops are only counted.",
                self._name,
                self._limit,
                self._limit_bytes >> 20,
                kind,
            )
        return is_taken

    def flush(self, timeout_seconds: float) -> bool:
        """Waits until all queued items are done; False on timeout."""
        if os.getpid() != self._pid:
            return True
        with self._changed:
            if self._items:
                self._ensure_thread()
            return self._changed.wait_for(lambda: not self._items and not self._is_busy, timeout_seconds)

    def stop(self, timeout_seconds: float) -> bool:
        """Finishes the queued items, then ends the thread; False on timeout, when the rest is dropped."""
        deadline = time.monotonic() + timeout_seconds
        is_done = self.flush(timeout_seconds)
        if os.getpid() != self._pid:
            return True
        with self._changed:
            self._is_stopping = True
            if not is_done:
                self._drop_all()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and is_done:
            thread.join(max(0.1, deadline - time.monotonic()))
        return is_done

    def _make_room(self, size: int) -> bool:
        def has_room() -> bool:
            is_small = not self._items or self._bytes + size <= self._limit_bytes
            return is_small and len(self._items) < self._limit

        if self._when_full == "wait":
            return has_room() or self._wait_for(has_room)
        while self._when_full == "drop_oldest" and self._items and not has_room():
            self._drop(self._items.popleft())
        return has_room()

    def _wait_for(self, has_room: Callable[[], bool]) -> bool:
        """Waits for room, unless an earlier wait timed out and nothing has finished since."""
        if self._settled == self._stuck_at:
            return False
        is_there = self._changed.wait_for(has_room, self._wait_seconds)
        self._stuck_at = None if is_there else self._settled
        return is_there

    def _drop(self, item: Any) -> None:
        self._bytes -= item.size
        self.counts.dropped += 1

    def _drop_all(self) -> None:
        while self._items:
            self._drop(self._items.popleft())

    def _ensure_thread(self) -> None:
        """Starts the thread, or replaces a dead one."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    # In the thread.

    def _run(self) -> None:
        try:
            while (item := self._next()) is not None:
                self._do(item)
                time.sleep(0)
        finally:
            self._attempt(self._end, "close")

    def _next(self) -> Any:
        """Waits for the next item and takes it; None if the thread should end."""
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            while (item := self._take()) is None:
                if self._is_stopping:
                    return None
                due_in = self._due_at() - time.monotonic() if self._items else None
                self._changed.wait(None if due_in is None else max(0.0, due_in))
            self._is_busy = True
            return item

    def _take(self) -> Any:
        """Removes and returns the first item; None if it is not due, or nothing is queued."""
        if not self._items or time.monotonic() < self._due_at():
            return None
        return self._pop()

    def _pop(self) -> Any:
        item = self._items.popleft()
        self._bytes -= item.size
        return item

    def _due_at(self) -> float:
        """Returns when the first item is due, as a monotonic time."""
        return self._paused_until

    def _do(self, item: Any) -> None:
        try:
            is_done = self._attempt(item.work, item.kind)
        except RetryLaterError:
            self._put_back(item)
            return
        self._settled += 1
        if is_done:
            self.counts.done += 1
        else:
            self.counts.failed += 1

    def _put_back(self, item: Any) -> None:
        """Queues an item first, to be retried after a pause."""
        with self._changed:
            self._bytes += item.size
            self._items.appendleft(item)
            self._pause()

    def _pause(self) -> None:
        self._paused_until = time.monotonic() + self._retry_seconds
        if self._is_stopping:
            self._drop_all()

    def _end(self) -> None:
        """Called last."""

    def _attempt(self, work: Callable[[], object], kind: str) -> bool:
        """Runs work and returns whether it succeeded.

        Raises:
            RetryLaterError: the work should be retried.
        """
        try:
            work()
        except RetryLaterError as error:
            self.record_error(kind, error.__cause__ or error, "will be retried after")
            raise
        except BaseException as error:  # noqa: BLE001  # counted and reported
            self.record_error(kind, error)
            return False
        return True

    def record_error(self, kind: str, error: BaseException, became: str = "failed with") -> None:
        """Counts an error and reports the first of its kind; for the lane's own thread."""
        name = f"{kind}: {type(error).__name__}"
        self.counts.errors[name] += 1
        if self.counts.errors[name] == 1:
            _log.error(
                "%s: %s %s %s: %s. Training continues; further errors of this kind are only counted.",
                self._name,
                kind,
                became,
                type(error).__name__,
                redact_text(str(error)),
            )


@attrs.define(eq=False, slots=False, repr=False)
class PeriodicThread:
    """Calls `work` every `seconds` in a thread, and once more when it is stopped.

    An exception of `work` is passed to `on_error` and does not end the timer. Call `forget_in_child` in a
    forked child.

    Args:
        work: called with True if this is the last call.
        seconds: the pause between two calls.
        on_error: called with an exception of `work`.
        name: the name of the thread.
        on_end: called in the thread when it ends.
    """

    _work: Callable[[bool], None]
    _seconds: float
    _on_error: Callable[[Exception], None]
    _name: str
    _on_end: Callable[[], None] = lambda: None

    def __attrs_post_init__(self) -> None:
        self._wake = Wakeup()
        # Guards the counters below, and wakes calls of `flush`.
        self._turn = threading.Condition()
        self._begun = 0
        self._done = 0
        self._is_stopping = False
        self._thread: threading.Thread | None = None

    @property
    def is_started(self) -> bool:
        """Whether the thread was started."""
        return self._thread is not None

    def start(self) -> None:
        """Starts the thread unless it runs."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Schedules a call soon; returns at once."""
        self._wake.set()

    def flush(self, timeout_seconds: float) -> bool:
        """Waits for a call of `work` that starts after this one; False on timeout."""
        if self._thread is None or threading.current_thread() is self._thread:
            return True
        self.start()
        with self._turn:
            wanted = self._begun + 1
            self._wake.set()
            return self._turn.wait_for(lambda: self._done >= wanted, timeout_seconds)

    def stop(self, timeout_seconds: float) -> bool:
        """Runs the last call and ends the thread; False on timeout."""
        thread = self._thread
        if thread is None:
            return True
        self._is_stopping = True
        self._wake.set()
        thread.join(timeout_seconds)
        return not thread.is_alive()

    def forget_in_child(self) -> None:
        """Drops the thread in a forked child: it belongs to the parent."""
        self._thread = None
        self._turn = threading.Condition()

    def _attempt(self, work: Callable[..., None], *args: bool) -> None:
        try:
            work(*args)
        except Exception as error:  # noqa: BLE001  # handed on
            self._on_error(error)

    def _run(self) -> None:
        while True:
            if not self._is_stopping:
                self._wake.wait(self._seconds)
            with self._turn:
                # Atomic: a call of `flush` waits for this turn or for the next, never for both.
                self._wake.clear()
                self._begun += 1
                turn = self._begun
            is_last = self._is_stopping
            self._attempt(self._work, is_last)
            with self._turn:
                self._done = turn
                self._turn.notify_all()
            if is_last:
                self._attempt(self._on_end)
                return
            time.sleep(0)
