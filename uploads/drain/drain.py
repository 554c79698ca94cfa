"""Uploads the entries of a spool: in threads of a queue, in its worker process, and in `uploads resume`.

    pending ──claim──▶ inflight ──delivered──▶ done (logged in delivered.jsonl, removed)
       ▲                  │ ├── corrupt, conflicting, rejected ──▶ failed/…
       └──── transient ───┘ └── a newer version waits ──▶ done (superseded)

A transient failure is retried after a delay; several in a row slow all threads down; a failure of the whole
store parks it until a probe succeeds; a failure of the entry alone fails that entry alone.
"""

import importlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs

from uploads.errors import (
    ManifestError,
    SpoolUnusableError,
    TransientStoreError,
    UploadError,
)
from uploads.handle import Outcome, UploadState
from uploads.messages import log_error, log_warning
from uploads.redaction import redact
from uploads.spool.entry import (
    Attempts,
    Entry,
    identifier_of,
    may_have_lost_bytes,
    note_attempts,
    note_interruption,
    read_attempts,
    utc_now,
)
from uploads.spool.ownership import OwnerLock
from uploads.spool.spool import Spool
from uploads.stores.store import Renewable, Store, abandon
from uploads.stores.uri import identity_of

from .delivery import CredentialWatch, deliver, outcome_of
from .retry import (
    FailureAction,
    FailureCounts,
    FailureDecision,
    RetryPolicy,
    StoreHealth,
    classify_failure,
)
from .schedule import DependencyState, Schedule

__all__ = ["Drain"]

_TICK_SECONDS = 1.0
_STATUS_SECONDS = 5.0
_RESCAN_SECONDS = 10.0
_ENDED_BY_QUEUE = {UploadState.WITHDRAWN, UploadState.SUPERSEDED}


@attrs.define(eq=False, slots=False, repr=False)
class Drain:
    """Uploads the entries of a spool in daemon threads, with one more thread for maintenance.

    It isn't an executor, because those refuse work at interpreter exit, when a backlog is finished. Upload
    errors become outcomes and are never raised.

    Args:
        spool: An existing one.
        store: Shared by all threads.
        workers: The number of concurrent uploads.
        policy: The delays between attempts.
        on_settled: Called with the folder and the outcome of each entry, from an uploading thread.
        on_idle: Called every ten seconds while no entry is left.
        clock: Monotonic seconds.
        role: Written into the lock file.
        any_store: Whether to upload entries for other stores too; by default they stay in the spool.
    """

    _spool: Spool
    _store: Store
    _workers: int = attrs.field(default=4, kw_only=True)
    _policy: RetryPolicy = attrs.field(factory=RetryPolicy, kw_only=True)
    _on_settled: Callable[[str, Outcome], None] = attrs.field(default=lambda *_: None, kw_only=True)
    _on_idle: Callable[[], None] = attrs.field(default=lambda: None, kw_only=True)
    _clock: Callable[[], float] = attrs.field(default=time.monotonic, kw_only=True)
    _role: str = attrs.field(default="queue", kw_only=True)
    _any_store: bool = attrs.field(default=False, kw_only=True)

    def __attrs_post_init__(self) -> None:
        self._identity = identity_of(self._store.uri())
        self._lock = OwnerLock(self._spool.drain_lock, self._role)
        self._schedule = Schedule(self._clock)
        self._scanning = threading.Lock()  # Held by the thread that lists the spool.
        self._health = StoreHealth(self._policy, self._clock)
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._counting = threading.Lock()  # Guards what follows.
        self._running = 0
        self._delivered = 0
        self._delivered_bytes = 0
        self._failures: dict[str, FailureCounts] = {}
        self._unrecorded: dict[str, Outcome] = {}
        self._logged: set[str] = set()
        self._logged_pauses: set[str] = set()

    def start(self) -> None:
        """Locks the spool, recovers what an earlier process left in flight, and starts the threads.

        Raises:
            SpoolOwnedError: Another process drains it.
            RuntimeError: No thread can be started.
        """
        self._lock.take()
        try:
            self._take_over()
            self._start_threads()
        except BaseException:
            self._lock.release()
            raise

    def _start_threads(self) -> None:
        """Starts the uploading threads and the maintenance thread, or raises."""
        # Clients import it at their first use. At interpreter exit it could no longer register its exit
        # function, and no client could be created.
        importlib.import_module("concurrent.futures.thread")
        targets = [*[self._upload_entries] * self._workers, self._maintain]
        self._running = len(targets)
        for number, target in enumerate(targets):
            name = "uploads-housekeeping" if target == self._maintain else f"uploads-{number}"
            thread = threading.Thread(target=self._run, args=(target,), name=name, daemon=True)
            try:
                thread.start()
            except BaseException:
                for _ in targets[number:]:
                    self._end_thread()
                self.stop()
                raise
            self._threads.append(thread)

    def _take_over(self) -> None:
        interrupted = self._spool.list_inflight()
        self._spool.recover()
        for folder in interrupted:  # One of these may have crashed the earlier process, so others go first.
            count = note_interruption(self._spool.pending / folder)
            self._schedule.delay(folder, self._policy.delay_seconds(count))
        for past in self._spool.superseded():
            self._schedule.restore(past.identifier, replaced_by=past.superseded_by)
        for folders in self._spool.list_failed().values():
            for folder in folders:
                self._schedule.restore(identifier_of(folder), failed=True)
        self._scan(lambda _: True)  # Nothing can be delivered meanwhile.

    def add(self, folders: Iterable[str]) -> None:
        """Adds newly pending entries; duplicates, and entries delivered already, are ignored."""
        self._schedule.add(folders, self._spool.is_pending)

    def rescan(self) -> None:
        """Finds entries that were not announced.

        Raises:
            OSError: The spool cannot be listed.
        """
        self._scan(self._spool.is_pending)

    def _scan(self, is_there: Callable[[str], bool]) -> None:
        with self._scanning:
            found = self._unknown_folders()
            while found:
                # A listing may show a new entry without its dependency, which appeared just before. The next
                # listing shows it, so list until nothing older than the newest entry is added.
                newest = max(found)
                more = {folder for folder in self._unknown_folders() if folder <= newest} - found
                if not more:
                    break
                found |= more
            self._schedule.add(sorted(found), is_there)

    def _unknown_folders(self) -> set[str]:
        return {folder for folder in self._spool.pending_folders() if not self._schedule.knows(folder)}

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Blocks until all entries have ended, or for the timeout; returns whether they have."""
        return self._schedule.wait_idle(timeout_seconds)

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """Starts no more uploads and waits for those in flight.

        The last thread to end releases the lock of the spool.
        """
        self._schedule.stop()
        self._stopping.set()
        deadline = self._clock() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock()))
        # A thread with an entry in flight releases the lock when the upload ends, or with the process; then
        # recover() returns the entry.

    def forget_after_fork(self) -> None:
        """Drops the lock in a forked child; lock and threads belong to the parent."""
        self._lock.forget_in_child()

    def status(self) -> dict[str, Any]:
        """Returns the contents of `status.json`."""
        waiting, inflight = self._schedule.counts()
        with self._counting:
            return {
                "at": utc_now(),
                "pid": os.getpid(),
                "store": self._store.uri(),
                "waiting": waiting,
                "inflight": inflight,
                "delivered": self._delivered,
                "delivered_bytes": self._delivered_bytes,
                "parked_because": self._health.parked_because,
                "last_error": self._health.last_error,
            }

    # Uploading threads.

    def _run(self, target: Callable[[], None]) -> None:
        try:
            target()
        finally:
            self._end_thread()

    def _end_thread(self) -> None:
        """Counts the end of a thread; the last one releases the lock."""
        with self._counting:
            self._running -= 1
            last = self._running == 0
        if last:
            try:
                self._retry_records()
                self._spool.remove_spares()
                self._spool.write_status(self.status())
            finally:
                self._lock.release()

    def _upload_entries(self) -> None:
        while not self._stopping.is_set():
            folder = self._schedule.next(timeout_seconds=_TICK_SECONDS)
            if folder is None:
                continue
            try:
                self._process(folder)
            except BaseException as error:  # noqa: BLE001  # from a full disk, or a callback
                self._schedule.retry(folder, self._policy.cap_seconds)
                log_error("cannot record the outcome of %s", folder, error=error)

    def _process(self, folder: str) -> None:
        try:
            outcome = self._attempt(folder)
        except BaseException as error:  # noqa: BLE001  # a store may raise anything
            self._handle_failure(folder, error)
        else:
            if outcome is not None:
                self._settle(folder, outcome)

    def _attempt(self, folder: str) -> Outcome | None:
        """Tries once; returns None if the entry waits for others or was superseded."""
        waiting = self._spool.pending / folder
        try:
            entry = Entry.read(waiting)
        except ManifestError:
            self._spool.claim(folder)
            raise
        if entry.store not in {"", self._identity} and not self._any_store:
            self._log_once(
                entry.store,
                f"ignoring entries for {entry.store} in the spool {self._spool.path}: "
                f"the store is {self._identity}",
            )
            self._schedule.settle(folder)  # Only in memory: on disk it stays pending for its own store.
            return None
        if self._superseded(folder, entry):
            return None
        dependencies = self._schedule.check_dependencies(folder, entry.after)
        if dependencies is DependencyState.PENDING:
            return None
        place = self._spool.claim(folder)
        if dependencies is DependencyState.UNKNOWN:
            dependencies = self._ask_store(entry)
        if dependencies is DependencyState.FAILED:
            reason = "an upload it depends on (after=) failed, or is unknown to this spool; submit both again"
            return outcome_of(entry, self._store, UploadState.REJECTED, reason)
        counts = self._counts_of(folder)
        noted = read_attempts(place)
        # Taken over, because the next failure of this process replaces the note.
        counts.is_answer_lost = counts.is_answer_lost or noted.is_answer_lost
        outcome = deliver(
            place,
            entry,
            self._store,
            retried=counts.count + noted.count > 0,
            is_answer_lost=counts.is_answer_lost,
            suspect=may_have_lost_bytes(place, entry, self._spool.boot),
        )
        if outcome.state is UploadState.DONE:
            self._health.record_success()
            self._schedule.resume()
        return outcome

    def _ask_store(self, entry: Entry) -> DependencyState:
        """Asks the store for the dependencies of an entry that the schedule no longer remembers."""
        is_there = all(self._store.head(name) for name in entry.after.values())
        return DependencyState.SATISFIED if is_there else DependencyState.FAILED

    def _superseded(self, folder: str, entry: Entry) -> bool:
        if not entry.overwrite:
            return False
        newest = self._newer_that_waits(folder, entry)
        if newest is None:
            return False
        self._abort_upload(self._spool.pending / folder, is_retried=True)
        self._settle(folder, outcome_of(entry, self._store, UploadState.SUPERSEDED, superseded_by=newest))
        return True

    def _newer_that_waits(self, folder: str, entry: Entry) -> str | None:
        """Returns the identifier of a waiting version that may replace this one."""
        newest = self._schedule.newer_than(folder)
        if newest is None:
            return None
        try:
            newer = Entry.read(self._spool.pending / newest)
        except (ManifestError, OSError):
            return None
        is_of_the_same = (newer.remote_name, newer.store) == (entry.remote_name, entry.store)
        return newer.identifier if newer.overwrite and is_of_the_same else None

    def _settle(self, folder: str, outcome: Outcome) -> None:
        # Even for a delivered entry: an earlier attempt may have begun a multipart upload.
        self._abort_upload(self._spool.inflight / folder)
        if outcome.state.is_failure:
            log_error("%s was not uploaded (%s): %s", outcome.remote_name, outcome.state, outcome.reason)
        elif outcome.reason:
            log_warning("%s was not uploaded under its name: %s", outcome.remote_name, outcome.reason)
        self._record(folder, outcome)
        with self._counting:
            self._failures.pop(folder, None)
            if outcome.state is UploadState.DONE:
                self._delivered += 1
                self._delivered_bytes += outcome.size
        self._schedule.settle(folder, failed=outcome.state.is_failure, replaced_by=outcome.superseded_by)
        self._on_settled(folder, outcome)

    def _abort_upload(self, place: Path, *, is_retried: bool = False) -> None:
        """Aborts a half-sent upload of an entry; logs an error, or raises one that is worth a retry."""
        try:
            abandon(self._store, place / "multipart.json")
        except Exception as error:
            if is_retried and isinstance(error, TransientStoreError):
                raise
            log_warning(
                "cannot abort the multipart upload of %s: %s; its parts stay in the store",
                place.name,
                redact(str(error)),
            )

    def _record(self, folder: str, outcome: Outcome) -> None:
        """Moves an ended entry out of the spool, or tries again at a later tick if the disk is full."""
        try:
            self._move_out(folder, outcome)
        except (OSError, SpoolUnusableError) as error:
            what = getattr(error, "strerror", None) or error
            self._log_once("unrecorded", f"cannot record deliveries in the spool ({what}); retrying")
            with self._counting:
                self._unrecorded[folder] = outcome

    def _move_out(self, folder: str, outcome: Outcome) -> None:
        try:
            self._spool.settle(folder, outcome)
        except FileNotFoundError:
            if (self._spool.inflight / folder).is_dir():  # A folder of the spool is missing.
                self._spool.create()
                self._spool.settle(folder, outcome)
            # Otherwise someone deleted the entry; the store has the bytes.

    def _retry_records(self) -> None:
        with self._counting:
            unrecorded, self._unrecorded = self._unrecorded, {}
        for folder, outcome in unrecorded.items():
            self._record(folder, outcome)

    # Failures.

    def _handle_failure(self, folder: str, error: BaseException) -> None:
        """Fails the entry, retries it, or parks the store."""
        if isinstance(error, FileNotFoundError):
            if self._spool.place_of(folder) is None:
                self._handle_lost(folder)
                return
            if not isinstance(error, UploadError):
                self._spool.create()  # A folder of the spool is missing, not the entry.
        counts = self._counts_of(folder)
        decision = classify_failure(error, counts, self._policy, self._health.successes)
        if decision.action is FailureAction.FAIL:
            self._fail(folder, decision)
        elif decision.action is FailureAction.PARK:
            if not self._health.parked_because:
                self._logged_pauses.clear()  # A pause logs each of its causes once.
            probe_seconds, is_new = self._health.park(decision.reason)
            if is_new and isinstance(self._store, Renewable):
                self._store.renew()
            # Probes may send different files and requests, so the cause is the text after the name.
            before, _, after = decision.reason.partition(self._spool.name_of(folder))
            cause = after or before
            self._log_once(
                cause,
                f"uploads to {self._store.uri()} are paused: {decision.reason.removesuffix('.')}. "
                "They resume when this is fixed; nothing is lost.",
                self._logged_pauses,
            )
            self._schedule.pause(probe_seconds, probing_only=True)
            self._return(folder, counts, decision, probe_seconds)
            self._spool.write_status(self.status())
        else:
            self._slow_down(decision)
            self._return(
                folder,
                counts,
                decision,
                self._policy.delay_seconds(counts.count, decision.retry_after_seconds),
            )

    def _slow_down(self, decision: FailureDecision) -> None:
        """Pauses all threads after more consecutive failures than there are threads."""
        consecutive = self._health.record_failure(decision.reason)
        if consecutive > self._workers or decision.retry_after_seconds is not None:
            self._schedule.pause(
                self._policy.delay_seconds(max(1, consecutive - self._workers), decision.retry_after_seconds)
            )
        if consecutive == self._workers + 1:
            log_warning("uploads to %s are failing; retrying: %s", self._store.uri(), decision.reason)

    def _return(
        self, folder: str, counts: FailureCounts, decision: FailureDecision, delay_seconds: float
    ) -> None:
        if (self._spool.inflight / folder).is_dir():
            note_attempts(
                self._spool.inflight / folder,
                Attempts(counts.count, decision.reason, counts.is_answer_lost),
            )
            self._spool.release(folder)
        self._schedule.retry(folder, delay_seconds)

    def _fail(self, folder: str, decision: FailureDecision) -> None:
        if (self._spool.pending / folder).is_dir():
            self._spool.claim(folder)
        name = self._spool.name_of(folder)
        self._settle(folder, Outcome(identifier_of(folder), name, decision.state, reason=decision.reason))

    def _handle_lost(self, folder: str) -> None:
        identifier = identifier_of(folder)
        for ended in self._spool.delivered({identifier}):
            if ended.identifier == identifier and ended.state in _ENDED_BY_QUEUE:
                is_gone = ended.state is UploadState.WITHDRAWN
                self._schedule.settle(folder, failed=is_gone, replaced_by=ended.superseded_by)
                self._on_settled(folder, ended)
                return
        reason = f"the folder {folder} was deleted from the spool {self._spool.path}"
        log_error("%s", reason)
        self._spool.create()
        self._schedule.settle(folder, failed=True)
        self._on_settled(folder, Outcome(identifier, folder, UploadState.LOST, reason=reason))

    def _counts_of(self, folder: str) -> FailureCounts:
        with self._counting:
            return self._failures.setdefault(folder, FailureCounts())

    def _log_once(self, cause: str, text: str, logged: set[str] | None = None) -> None:
        logged = self._logged if logged is None else logged
        with self._counting:  # Several threads may see the same failure at once.
            is_new = cause not in logged
            logged.add(cause)
        if is_new:
            log_warning("%s", text)

    # Housekeeping.

    def _maintain(self) -> None:
        credentials = CredentialWatch(self._store)
        last_status = last_scan = self._clock()
        while not self._stopping.wait(_TICK_SECONDS):
            now = self._clock()
            try:
                self._retry_records()
                if self._health.parked_because and credentials.renew():
                    self._schedule.probe_now()
                if now - last_status >= _STATUS_SECONDS:
                    self._spool.write_status(self.status())
                    last_status = now
                if now - last_scan >= _RESCAN_SECONDS:
                    self.rescan()
                    last_scan = now
                    if self._schedule.wait_idle(0):
                        self._on_idle()
            except OSError:
                pass  # Such as a full disk; retried at the next tick.
            except Exception as error:  # noqa: BLE001  # from a store or a callback
                self._log_once(repr(error), f"maintenance of the uploads failed: {redact(repr(error))}")
