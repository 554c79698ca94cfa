"""One bounded queue and one thread, for what is too slow for the training thread.

`put` belongs to the training thread, the work to the lane's own. What the work raises is counted and reported once per
kind; it neither ends the lane nor reaches the training thread.
"""

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Literal

import attrs

from events import redact_text

__all__ = ["Lane", "LaneCounts", "WhenFull"]

_log = logging.getLogger("destinations")

WhenFull = Literal["wait", "drop_newest", "drop_oldest"]


@attrs.define
class LaneCounts:
    """What became of the items of a lane."""

    accepted: int = 0
    done: int = 0
    failed: int = 0
    dropped: int = 0
    errors: Counter[str] = attrs.field(factory=Counter)
    """How often what was raised, by kind of work and exception."""


@attrs.frozen
class _Item:
    work: Callable[[], object]
    size: int
    kind: str


class Lane:
    """A queue with one thread behind it, which starts with the first item.

    When the queue is full, by number or by bytes, `put` does what `when_full` says: "wait" waits up to `wait_seconds` and then
    drops the item, "drop_newest" drops it at once, "drop_oldest" makes room. Whatever is dropped is counted and reported.
    A single item that is larger than `limit_bytes` is taken when the queue is empty.

    After a fork the child has no thread: its `put` does nothing and returns False.

    Args:
        name: the name of the thread, and of the lane in messages.
        limit: how many items may wait.
        limit_bytes: how large they may be together.
        when_full: what to do with an item for which there is no room.
        wait_seconds: how long "wait" waits.
    """

    def __init__(
        self,
        name: str,
        *,
        limit: int = 1000,
        limit_bytes: int = 256 << 20,
        when_full: WhenFull = "wait",
        wait_seconds: float = 1.0,
    ) -> None:
        if limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}.")
        self._name = name
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._when_full = when_full
        self._wait_seconds = wait_seconds
        # Guards everything below; held for moments only, never while work is done.
        self._changed = threading.Condition()
        self._items: deque[_Item] = deque()
        self._bytes = 0
        self._is_busy = False
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self.counts = LaneCounts()

    def put(self, work: Callable[[], object], *, size: int = 0, kind: str = "work") -> bool:
        """Queues work.

        Args:
            work: what the thread is to do.
            size: how many bytes it holds on to.
            kind: what to call it in messages.

        Returns:
            Whether it will be done.
        """
        if os.getpid() != self._pid:
            return False
        with self._changed:
            dropped_before = self.counts.dropped
            is_taken = not self._is_stopping and self._make_room(size)
            if is_taken:
                self._items.append(_Item(work, size, kind))
                self._bytes += size
                self.counts.accepted += 1
                self._ensure_thread()
                self._changed.notify_all()
            else:
                self.counts.dropped += 1
            is_first = dropped_before == 0 and self.counts.dropped > 0
        if is_first:
            _log.warning(
                "%s: something was dropped at a %s, for the queue is full (%d items, %d MiB). "
                "What is dropped later is counted only.",
                self._name,
                kind,
                self._limit,
                self._limit_bytes >> 20,
            )
        return is_taken

    def flush(self, timeout_seconds: float) -> bool:
        """Waits until all that was queued is done; False where that takes longer than the timeout."""
        if os.getpid() != self._pid:
            return True
        with self._changed:
            if self._items:
                self._ensure_thread()
            return self._changed.wait_for(lambda: not self._items and not self._is_busy, timeout_seconds)

    def stop(self, timeout_seconds: float) -> bool:
        """Does what is queued, then ends the thread; False where that takes longer than the timeout."""
        is_done = self.flush(timeout_seconds)
        if os.getpid() != self._pid:
            return True
        with self._changed:
            self._is_stopping = True
            if not is_done:
                self.counts.dropped += len(self._items)
                self._items.clear()
                self._bytes = 0
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and is_done:
            thread.join(timeout_seconds)
        return is_done

    def _make_room(self, size: int) -> bool:
        if self._has_room(size):
            return True
        if self._when_full == "wait":
            self._ensure_thread()
            return self._changed.wait_for(lambda: self._has_room(size), self._wait_seconds)
        while self._when_full == "drop_oldest" and self._items and not self._has_room(size):
            self._bytes -= self._items.popleft().size
            self.counts.dropped += 1
        return self._has_room(size)

    def _has_room(self, size: int) -> bool:
        return len(self._items) < self._limit and (not self._items or self._bytes + size <= self._limit_bytes)

    def _ensure_thread(self) -> None:
        """Starts the thread, also in place of one that died."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._items or self._is_stopping)
                if not self._items:
                    return
                item = self._items.popleft()
                self._bytes -= item.size
                self._is_busy = True
            self._do(item)
            # Nothing of the item outlives its turn: the next wait may be long.
            del item
            time.sleep(0)

    def _do(self, item: _Item) -> None:
        try:
            item.work()
        except Exception as error:  # noqa: BLE001  # counted and reported
            self.counts.failed += 1
            kind = f"{item.kind}: {type(error).__name__}"
            self.counts.errors[kind] += 1
            if self.counts.errors[kind] == 1:
                _log.error(
                    "%s: a %s failed with %s: %s. Training goes on; more of the kind are counted only.",
                    self._name,
                    item.kind,
                    type(error).__name__,
                    redact_text(str(error)),
                )
        else:
            self.counts.done += 1
