"""Detects changes: a thread scans the runs while pages are open, and wakes waiting requests."""

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Hashable
from pathlib import Path
from typing import Any

from destinations.background import PeriodicThread

from .catalog import Catalog
from .columns import ColumnCache

__all__ = ["Changes"]

_log = logging.getLogger("destinations")

_LOOK_SECONDS = 1.0
_STOP_SECONDS = 10.0
_ASKED_SECONDS = 60.0
# Scans use at most a twentieth of one processor, however many runs there are.
_SCAN_SECONDS = 2.0
_SCAN_SHARE = 20
_MAX_WATCHED = 1000
_MAX_DIGITS = 18


class Changes:
    """Numbered versions of the data that pages show, and the changes between them.

    **Threading.** Any thread may call any method; `wait` belongs to an event loop. The scanning thread starts
    with the first call of `wait`, does nothing while no page asks, and ends with `close`.

    Args:
        catalog: the runs.
        cache: the columns that pages show.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, catalog: Catalog, cache: ColumnCache, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._catalog = catalog
        self._cache = cache
        self._clock = clock
        # Distinguishes this server's versions from an earlier server's.
        self._name = secrets.token_hex(4)
        self._lock = threading.Lock()  # Guards everything down to `_waiters`.
        self._version = 0
        # The last version in which the table changed, and of each kind of change of each run.
        self._table = 0
        self._runs: dict[str, dict[str, int]] = {}
        self._watched: dict[str, float] = {}
        self._asked_at = float("-inf")
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        # Serializes calls of `look`, which alone writes the attributes down to `_rows`.
        self._looking = threading.Lock()
        self._known: dict[Path, Hashable] = {}
        self._alive: set[Path] = set()
        self._fields = ""
        self._standing: dict[Path, Hashable] = {}
        self._rows: dict[str, Hashable] = {}
        self._next_scan = float("-inf")
        self._thread = PeriodicThread(self._look_if_asked, _LOOK_SECONDS, _report, "viewer-changes")
        self._is_closed = False

    @property
    def version(self) -> str:
        """The present version."""
        with self._lock:
            return self._shown(self._version)

    def _shown(self, version: int) -> str:
        return f"{self._name}-{version}"

    def since(self, version: str) -> dict[str, Any] | None:
        """Returns what changed after a version; None if nothing did."""
        with self._lock:
            now = self._shown(self._version)
            name, _, number = version.rpartition("-")
            is_ours = name == self._name and number.isdecimal() and len(number) < _MAX_DIGITS
            known = int(number) if is_ours else -1
            if known == self._version:
                return None
            answer = {"version": now, "table": True, "runs": {}, "fields": self._fields}
            if not 0 <= known < self._version:
                return answer | {"all": True}
            later = {
                run_id: {what: True for what, at in kinds.items() if at > known}
                for run_id, kinds in self._runs.items()
                if max(kinds.values()) > known
            }
            return answer | {"table": self._table > known, "runs": later}

    async def wait(self, version: str, run_ids: Collection[str], seconds: float) -> dict[str, Any]:
        """Waits for a change after a version, and returns it; after the timeout, returns no change.

        Args:
            version: the version that the page has.
            run_ids: the runs whose rows it shows.
            seconds: the timeout.
        """
        event = asyncio.Event()
        waiter = asyncio.get_running_loop(), event
        with self._lock:
            self._asked_at = self._clock()
            for run_id in run_ids:
                self._watched[run_id] = self._asked_at
            self._waiters.append(waiter)
        try:
            if not self._is_closed:
                self._thread.start()
                self._thread.wake()
            if (found := self.since(version)) is not None:
                return found
            # During shutdown, answer at once: the server would cancel a waiting request midway.
            if not self._is_closed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), seconds)
            nothing = {"version": self.version, "table": False, "runs": {}, "fields": self._fields}
            return self.since(version) or nothing
        finally:
            with self._lock:
                self._waiters.remove(waiter)
                self._asked_at = self._clock()

    def look(self) -> None:
        """Checks for changes once, and publishes them."""
        with self._looking:
            runs, table = self._changed_records()
            for run_id in self._changed_rows(runs):
                runs.setdefault(run_id, {})["rows"] = True
        if runs or table:
            self._publish(runs, table=table)

    def wake(self) -> None:
        """Makes the thread scan and check at once."""
        self._next_scan = float("-inf")
        self._thread.wake()

    def close(self) -> None:
        """Stops the thread, and releases waiting requests."""
        self._is_closed = True
        self._notify()
        self._thread.stop(_STOP_SECONDS)

    # The thread.

    def _look_if_asked(self, is_last: bool) -> None:
        with self._lock:
            is_asked = bool(self._waiters) or self._clock() - self._asked_at < _ASKED_SECONDS
        if is_asked and not is_last:
            self.look()

    def _changed_records(self) -> tuple[dict[str, dict[str, bool]], bool]:
        catalog, now = self._catalog, self._clock()
        is_first = not self._known and self._version == 0
        known = self._known
        if now >= self._next_scan and catalog.runs.roots:
            # `seconds` excludes the time a store takes to answer, which costs no processor time here.
            took = catalog.runs.scan().seconds
            known = catalog.runs.fingerprints()
            self._next_scan = now + max(_SCAN_SECONDS, _SCAN_SHARE * took)
        alive = {record.path for record in catalog.runs.records(where="alive", archived=None)}
        previous, self._known = self._known, known
        was_alive, self._alive = self._alive, alive
        if is_first and not previous:
            # The first answers already show the runs found by the first look.
            return {}, bool(known)
        changed = {path for path, state in known.items() if previous.get(path) != state}
        changed |= alive ^ was_alive
        gone = previous.keys() - known.keys()
        for path in gone:
            self._cache.forget(path)
            self._standing.pop(path, None)
        runs = {catalog.id_at(path): self._what(path) for path in changed & known.keys()}
        if changed or not self._fields:
            self._fields = catalog.fields_digest()
        runs |= {catalog.id_at(path): {"gone": True} for path in gone}
        return runs, bool(changed or gone)

    def _what(self, path: Path) -> dict[str, bool]:
        """Returns what changed in a run; "order" if its place in a view may have changed."""
        record = self._catalog.record_at(path)
        standing = None if record is None else (record["status"], record["archived"], record["name"])
        is_known = standing is not None and self._standing.get(path) == standing
        self._standing[path] = standing
        return {"record": True} if is_known else {"record": True, "order": True}

    def _changed_rows(self, changed_runs: Collection[str]) -> list[str]:
        """Returns the shown runs with new or changed rows; checks only live and changed runs."""
        with self._lock:
            horizon = self._clock() - _ASKED_SECONDS
            self._watched = {
                run_id: at
                for run_id, at in sorted(self._watched.items(), key=lambda item: -item[1])[:_MAX_WATCHED]
                if at >= horizon
            }
            watched = list(self._watched)
        changed = []
        for run_id in watched:
            folder = self._catalog.folder(run_id)
            if folder is None or (
                run_id in self._rows and folder not in self._alive and run_id not in changed_runs
            ):
                continue
            try:
                rows = self._cache.rows(folder)
            except OSError:
                continue
            if rows is not None and self._rows.get(run_id, rows) != rows:
                changed.append(run_id)
            if rows is not None:
                self._rows[run_id] = rows
        for run_id in self._rows.keys() - set(watched):
            del self._rows[run_id]
        return changed

    def _publish(self, runs: dict[str, dict[str, bool]], *, table: bool) -> None:
        with self._lock:
            self._version += 1
            self._table = self._version if table else self._table
            for run_id, kinds in runs.items():
                self._runs.setdefault(run_id, {}).update(dict.fromkeys(kinds, self._version))
        self._notify()

    def _notify(self) -> None:
        with self._lock:
            waiters = list(self._waiters)
        for loop, event in waiters:
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(event.set)


def _report(error: Exception) -> None:
    _log.warning("viewer could not check for changes: %s", error)
