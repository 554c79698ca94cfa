"""Empties a spool into a store: the same code in the queue's threads, in its worker process, and under `uploads resume`.

    pending ──claim──▶ inflight ──delivered──▶ done (filed in delivered.jsonl, gone)
       ▲                  │ ├── damaged, conflicting, rejected ──▶ failed/…
       └──── may pass ────┘ └── a newer version of the name waits ──▶ done (superseded)

A failure that may pass keeps the entry; several in a row slow everything down together; one that concerns the whole
store parks it until a probe gets through; one that concerns the entry alone fails that entry alone.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from uploads.errors import BytesCorruptError, ManifestError
from uploads.handle import Outcome, UploadState
from uploads.redaction import redact
from uploads.spool.entry import (
    Entry,
    attempts_of,
    has_attempts,
    identifier_of,
    may_have_lost_bytes,
    note_attempt,
    note_interruption,
    utc_now,
)
from uploads.spool.ownership import OwnerLock
from uploads.stores.store import Resuming
from uploads.stores.uri import identity_of

from .delivery import CredentialWatch, deliver
from .retry import Action, Attempts, Health, RetryPolicy, Verdict, judge
from .schedule import Counts, DependencyState, Schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from uploads.spool.spool import Spool
    from uploads.stores.store import Store

__all__ = ["Drain", "Filing"]

_log = logging.getLogger("uploads")


class Filing:
    """The last step of an entry's life. Every method may be called from any thread; the lock guards what is still to be noted."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._lock = threading.Lock()
        self._unfiled: dict[str, Outcome] = {}
        self._has_complained = False

    def settle(self, folder: str, outcome: Outcome) -> None:
        """`Spool.settle`, which may have to wait for better times.

        Raises:
            FileNotFoundError: The spool was deleted under us.
        """
        try:
            self._spool.settle(folder, outcome)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise
            with self._lock:
                self._unfiled[folder] = outcome
                has_complained, self._has_complained = self._has_complained, True
            if not has_complained:
                _log.warning(
                    "the spool could not note what was delivered (%s); it is tried again", error.strerror
                )

    def catch_up(self) -> None:
        """Notes what could not be noted before."""
        with self._lock:
            unfiled, self._unfiled = self._unfiled, {}
        done = set(self._spool.list_done()) if unfiled else set()
        for folder, outcome in unfiled.items():
            self._settle_late(folder, outcome, is_done=folder in done)

    def _settle_late(self, folder: str, outcome: Outcome, *, is_done: bool) -> None:
        try:
            if is_done:
                self._spool.file_away(folder, outcome)
            else:
                self._spool.settle(folder, outcome)
        except FileNotFoundError:
            pass  # Its folder was deleted.
        except OSError:
            with self._lock:
                self._unfiled[folder] = outcome


_TICK_SECONDS = 1.0
_FEWEST_THREADS = 2
_STATUS_SECONDS = 5.0
_RESCAN_SECONDS = 10.0
_ABANDON_FAILURES = 5  # Tidying up is tried as often as an upload is that failed so many times.


class Drain:
    """A crew of threads that uploads what is in the spool, and one more that keeps house.

    All threads are daemons started by `start`: an executor would refuse work at interpreter exit, which is when a backlog
    is finished. Nothing here raises into the caller; what happened is in the outcomes.

    Args:
        spool: Exists already.
        store: Shared by the threads.
        workers: Uploads at the same time.
        policy: How long to wait between attempts.
        on_settled: Called with the folder and the outcome of each entry, from an uploading thread.
        on_idle: Called every ten seconds while nothing is left.
        clock: Seconds, monotonic.
        role: What the lock says about this process.
        any_store: Whether to bring entries for other stores to this one too; by default they are left alone.
    """

    def __init__(
        self,
        spool: Spool,
        store: Store,
        *,
        workers: int = 4,
        policy: RetryPolicy | None = None,
        on_settled: Callable[[str, Outcome], None] = lambda *_: None,
        on_idle: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        role: str = "queue",
        any_store: bool = False,
    ) -> None:
        self._spool = spool
        self._store = store
        self._identity = identity_of(store.uri())
        self._any_store = any_store
        self._workers = workers
        self._policy = policy or RetryPolicy()
        self._on_settled = on_settled
        self._on_idle = on_idle
        self._clock = clock
        self._lock = OwnerLock(spool.drain_lock, role)
        self._schedule = Schedule(clock)
        self._scanning = threading.Lock()  # Held by the thread that lists the spool.
        self._health = Health(self._policy, clock)
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._leaving = threading.Lock()  # Guards the count below.
        self._running = 0
        self._delivered = 0
        self._delivered_bytes = 0
        self._counting = threading.Lock()  # Guards the two counts, _attempts and _said.
        self._attempts: dict[str, Attempts] = {}
        self._filing = Filing(spool)
        self._said: set[str] = set()
        self._abandoning = threading.Lock()  # Held by the thread that tidies up; guards the next.
        self._next_abandoning = float("-inf")

    def start(self) -> None:
        """Takes the spool over from whoever had it before and starts the threads.

        Raises:
            SpoolOwnedError: A live process drains it.
            RuntimeError: No thread can be started.
        """
        self._lock.acquire()
        try:
            self._take_over()
            self._start_threads()
        except BaseException:
            self._lock.release()
            raise

    def _start_threads(self) -> None:
        """Starts one thread that uploads and the one that keeps house, or raises; of the others as many as the system allows."""
        # Clients import it when they are first used, for us maybe at the interpreter's exit: then it can no longer register
        # what it wants called at that time, and no client can be made.
        importlib.import_module("concurrent.futures.thread")
        self._running = 1  # This thread: the spool is not given back before all have been started.
        try:
            for number in range(self._workers + 1):
                target, name = (
                    (self._keep_house, "housekeeping") if number == 1 else (self._serve, str(number))
                )
                self._threads.append(self._thread(target, f"uploads-{name}"))
        except RuntimeError as error:
            if len(self._threads) < _FEWEST_THREADS:
                self.stop()
                raise
            _log.warning(
                "only %d of %d uploads run at the same time: %s",
                len(self._threads) - 1,
                self._workers,
                error,
            )
        finally:
            self._leave()

    def _take_over(self) -> None:
        interrupted = self._spool.list_inflight()
        self._spool.recover()
        for folder in interrupted:  # It may be what ended the process before: others go first.
            count = note_interruption(self._spool.pending / folder)
            self._schedule.delay(folder, self._policy.delay_seconds(count))
        for past in self._spool.superseded():
            self._schedule.restore(past.identifier, replaced_by=past.superseded_by)
        for folders in self._spool.list_failed().values():
            for folder in folders:
                self._schedule.restore(identifier_of(folder), failed=True)
        self._scan(lambda _: True)  # Nothing can be delivered meanwhile.

    def add(self, folders: Iterable[str]) -> None:
        """Takes newly pending entries in. One that was found in a listing and delivered before it was announced is passed over."""
        self._schedule.add(folders, self._spool.is_pending)

    def rescan(self) -> None:
        """Finds entries that were not announced, such as those of a forked child.

        Raises:
            OSError: The spool cannot be listed.
        """
        self._scan(self._spool.is_pending)

    def _scan(self, is_there: Callable[[str], bool]) -> None:
        with self._scanning:
            found = self._unknown_folders()
            while found:
                # A listing made while both appear may show an entry and not the one it depends on. That one was there
                # before, so that the next listing shows it: up to the newest found, list until nothing is added.
                newest = max(found)
                more = {folder for folder in self._unknown_folders() if folder <= newest} - found
                if not more:
                    break
                found |= more
            self._schedule.add(sorted(found), is_there)

    def _unknown_folders(self) -> set[str]:
        return {folder for folder in self._spool.pending_folders() if not self._schedule.knows(folder)}

    def counts(self) -> Counts:
        """How many entries wait, and how many are in flight."""
        return self._schedule.counts()

    def parked_because(self) -> str:
        """Why nothing gets through until something outside changes; empty where that is not so."""
        return self._health.parked_because

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Whether everything has ended, well or not, within this time."""
        return self._schedule.wait_idle(timeout_seconds)

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """Gives nothing more out and lets what is in flight end within this time. The last thread to end gives the spool back."""
        self._schedule.stop()
        self._stopping.set()
        deadline = self._clock() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock()))
        # Where a thread still has an entry in flight it gives the spool back when that has ended, or with the process;
        # then recover() returns the entry.

    def forget_after_fork(self) -> None:
        """In a forked child: the threads are the parent's, and so is the lock."""
        self._lock.forget()

    def status(self) -> dict[str, Any]:
        """What `status.json` says."""
        counts = self._schedule.counts()
        with self._counting:
            return {
                "at": utc_now(),
                "pid": os.getpid(),
                "store": self._store.uri(),
                "waiting": counts.waiting,
                "inflight": counts.inflight,
                "delivered": self._delivered,
                "delivered_bytes": self._delivered_bytes,
                "parked_because": self._health.parked_because,
                "last_error": self._health.last_error,
            }

    # Uploading threads.

    def _thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=self._run, args=(target,), name=name, daemon=True)
        with self._leaving:
            self._running += 1
        try:
            thread.start()
        except BaseException:
            self._leave()
            raise
        return thread

    def _run(self, target: Callable[[], None]) -> None:
        try:
            target()
        finally:
            self._leave()

    def _leave(self) -> None:
        """The last to leave gives the spool back."""
        with self._leaving:
            self._running -= 1
            last = self._running == 0
        if last:
            try:
                self._filing.catch_up()
                self._spool.write_status(self.status())
            finally:
                self._lock.release()

    def _serve(self) -> None:
        while not self._stopping.is_set():
            folder = self._schedule.next(timeout_seconds=_TICK_SECONDS)
            if folder is None:
                self._abandon_rest()
                continue
            try:
                self._work_on(folder)
            except BaseException as error:  # noqa: BLE001  # a disk that fails even to rename, or a callback, must not end the thread
                self._schedule.retry(folder, self._policy.cap_seconds)
                _say(logging.ERROR, f"the spool could not note what became of {folder}", error)

    def _work_on(self, folder: str) -> None:
        try:
            outcome = self._attempt(folder)
        except BaseException as error:  # noqa: BLE001  # an uploading thread outlives whatever a store raises, SystemExit included
            self._mend(folder, error)
        else:
            if outcome is not None:
                self._settle(folder, outcome)

    def _attempt(self, folder: str) -> Outcome | None:
        """Tries once; None where the entry waits for others or made way for a newer one."""
        waiting = self._spool.pending / folder
        try:
            entry = Entry.read(waiting)
        except ManifestError:
            self._spool.claim(folder)
            raise
        if entry.store not in {"", self._identity} and not self._any_store:
            self._say_once(
                entry.store,
                f"entries for {entry.store} are in the spool {self._spool.path} and are left alone: this drain's store is {self._identity}",
            )
            self._schedule.settle(folder)  # Here alone: on the disk it waits for its own store.
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
            reason = "what it comes after failed, or was never submitted to this spool. Submit both again."
            return Outcome(
                entry.identifier,
                entry.remote_name,
                UploadState.REJECTED,
                self._store.uri(entry.remote_name),
                entry.size,
                reason=reason,
            )
        attempts = self._attempts_of(folder)
        noted = attempts_of(place) if has_attempts(place) else None
        outcome = deliver(
            place,
            entry,
            self._store,
            retried=attempts.count > 0 or noted is not None,
            is_answer_lost=attempts.is_answer_lost or bool(noted and noted.get("is_answer_lost")),
            suspect=may_have_lost_bytes(place, entry, self._spool.boot),
        )
        if outcome.state is UploadState.DONE:
            self._health.worked()
            self._schedule.resume()
            if entry.overwrite:
                self._schedule.note_delivered(folder)
        return outcome

    def _ask_store(self, entry: Entry) -> DependencyState:
        """Whether the store has what an entry comes after, where the spool does not know any more what became of it."""
        if len(entry.after_names) == len(entry.after):
            is_there = all(self._store.head(name) for name in entry.after_names)
        else:  # A manifest without the names, from before they were kept.
            past = self._spool.delivered(among=set(entry.after))
            there = {outcome.identifier for outcome in past if not outcome.state.is_failure}
            is_there = there >= set(entry.after)
        return DependencyState.SATISFIED if is_there else DependencyState.FAILED

    def _superseded(self, folder: str, entry: Entry) -> bool:
        if not entry.overwrite:
            return False
        newest = self._schedule.delivered_after(folder) or self._newer_that_waits(folder, entry)
        if newest is None:
            return False
        self._abandon(self._spool.pending / folder)
        outcome = Outcome(
            entry.identifier,
            entry.remote_name,
            UploadState.SUPERSEDED,
            self._store.uri(entry.remote_name),
            entry.size,
            superseded_by=newest,
        )
        self._settle(folder, outcome)
        return True

    def _newer_that_waits(self, folder: str, entry: Entry) -> str | None:
        """The identifier of a newer version that may replace this one."""
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
        # Also of what was delivered: an attempt before the one that succeeded may have begun an upload that is not needed.
        self._abandon(self._spool.inflight / folder)
        if outcome.state.is_failure:
            _say(logging.ERROR, f"{outcome.remote_name} was not uploaded ({outcome.state}): {outcome.reason}")
        with contextlib.suppress(
            FileNotFoundError
        ):  # The spool was deleted under us, but the bytes are where they belong.
            self._filing.settle(folder, outcome)
        with self._counting:
            self._attempts.pop(folder, None)
            if outcome.state is UploadState.DONE:
                self._delivered += 1
                self._delivered_bytes += outcome.size
        self._schedule.settle(folder, failed=outcome.state.is_failure, replaced_by=outcome.superseded_by)
        self._on_settled(folder, outcome)

    def _abandon(self, place: Path) -> None:
        notes = place / "multipart.json"
        if isinstance(self._store, Resuming) and notes.exists():
            try:
                self._store.abandon(notes)
            except Exception as error:  # noqa: BLE001  # tidying up must not undo a decision
                _log.warning(
                    "what was half sent of %s could not be removed yet: %s", place.name, redact(str(error))
                )
                with contextlib.suppress(OSError):
                    self._spool.keep_for_abort(notes, place.name)

    def _abandon_rest(self) -> None:
        """Has the store forget what it did not when it was asked. By one thread at a time, when there is nothing else to do."""
        if self._clock() < self._next_abandoning or not self._abandoning.acquire(blocking=False):
            return
        try:
            if isinstance(self._store, Resuming):
                for notes in self._spool.list_to_abort():
                    self._store.abandon(notes)
        except Exception as error:  # noqa: BLE001  # as above
            _log.debug("what was half sent could not be removed yet: %s", redact(str(error)))
        finally:
            self._next_abandoning = self._clock() + self._policy.delay_seconds(_ABANDON_FAILURES)
            self._abandoning.release()

    # Failures.

    def _mend(self, folder: str, error: BaseException) -> None:
        """Does with a failed attempt what the verdict on it says."""
        if isinstance(error, FileNotFoundError) and self._spool.place_of(folder) is None:
            self._lose(folder)
            return
        attempts = self._attempts_of(folder)
        verdict = judge(error, attempts, self._policy, self._health.successes)
        if isinstance(error, BytesCorruptError):  # Looked at again from the start, not trusted.
            (self._spool.inflight / folder / "digest.json").unlink(missing_ok=True)
        if verdict.action is Action.FAIL:
            self._fail(folder, verdict)
        elif verdict.action is Action.PARK:
            probe_seconds = self._health.parked(verdict.reason)
            self._say_once(
                verdict.reason,
                f"uploads to {self._store.uri()} wait: {verdict.reason}. They go on by themselves when this is mended; nothing is lost.",
            )
            self._schedule.pause(probe_seconds, probing_only=True)
            self._return(folder, attempts, verdict, probe_seconds)
        else:
            self._slow_down(verdict)
            self._return(
                folder,
                attempts,
                verdict,
                self._policy.delay_seconds(attempts.count, verdict.retry_after_seconds),
            )

    def _slow_down(self, verdict: Verdict) -> None:
        """When more attempts failed in a row than there are threads, it is not about single entries: all wait together."""
        in_a_row = self._health.failed(verdict.reason)
        if in_a_row > self._workers or verdict.retry_after_seconds is not None:
            self._schedule.pause(
                self._policy.delay_seconds(max(1, in_a_row - self._workers), verdict.retry_after_seconds)
            )
        if in_a_row == self._workers + 1:
            _log.warning(
                "uploads to %s are failing and are tried again: %s", self._store.uri(), verdict.reason
            )

    def _return(self, folder: str, attempts: Attempts, verdict: Verdict, delay_seconds: float) -> None:
        if (self._spool.inflight / folder).is_dir():
            note_attempt(
                self._spool.inflight / folder,
                attempts.count,
                verdict.reason,
                is_answer_lost=attempts.is_answer_lost,
            )
            self._spool.release(folder)
        self._schedule.retry(folder, delay_seconds)

    def _fail(self, folder: str, verdict: Verdict) -> None:
        name = folder
        if (self._spool.pending / folder).is_dir():
            self._spool.claim(folder)
        with contextlib.suppress(ManifestError, OSError):
            name = Entry.read(self._spool.inflight / folder).remote_name
        self._settle(folder, Outcome(identifier_of(folder), name, verdict.state, reason=verdict.reason))

    def _lose(self, folder: str) -> None:
        reason = f"{folder} must be in the spool {self._spool.path}, got nothing: its folder was deleted"
        _say(logging.ERROR, reason)
        self._spool.create()
        self._schedule.settle(folder, failed=True)
        self._on_settled(folder, Outcome(identifier_of(folder), folder, UploadState.LOST, reason=reason))

    def _attempts_of(self, folder: str) -> Attempts:
        with self._counting:
            return self._attempts.setdefault(folder, Attempts())

    def _say_once(self, cause: str, text: str) -> None:
        with self._counting:  # All threads may hear of the same trouble at once.
            is_new = cause not in self._said
            self._said.add(cause)
        if is_new:
            _say(logging.WARNING, text)

    # Housekeeping.

    def _keep_house(self) -> None:
        credentials = CredentialWatch(self._store)
        last_status = last_scan = self._clock()
        while not self._stopping.wait(_TICK_SECONDS):
            now = self._clock()
            try:
                self._filing.catch_up()
                # A parked store starts over when its credentials files change, and in any case before each probe.
                if self._health.parked_because and credentials.renew(anyway=self._health.wants_renewal()):
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
                pass  # A full disk, for instance; the next turn comes.
            except Exception as error:  # noqa: BLE001  # a store that cannot be asked, a callback
                self._say_once(repr(error), f"uploads are not looked after as they should be: {error!r}")


def _say(level: int, text: str, error: BaseException | None = None) -> None:
    """Logs; a handler that raises must not keep an entry from its end."""
    with contextlib.suppress(Exception):
        _log.log(level, "%s", text, exc_info=error)
