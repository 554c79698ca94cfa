"""Decides where a run is written: at the given place or, if another run is there, at one beside it.

A place that holds a run is opened only with proof that this is the same run, see `RunDirectory`.
"""

import contextlib
import logging
import mmap
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs

from events import RecordError, State, is_restarted_job, redact_text, safe_text
from uploads.disk import read_json

from .folder import (
    RunInUseError,
    RunPathError,
    WriterLock,
    check_known,
    holds_run,
    run_exists_error,
    set_aside,
)
from .layout import SIDECAR, lock_name
from .place import Place

if TYPE_CHECKING:
    from .claim import Claim

__all__ = [
    "EarlyRecords",
    "IfExists",
    "Opening",
    "Silence",
    "TakenPlace",
    "check_ranks",
    "not_writable",
    "note_session",
]

_log = logging.getLogger("destinations")

IfExists = Literal["auto", "resume", "error", "new"]

_MAX_NAMES_BESIDE = 10_000
_MAX_EARLY_RECORDS = 1000
# How a run ended; follows "a run that".
_ENDED = {
    "completed": "was completed",
    "stopped": "was stopped",
    "failed": "failed",
    "interrupted": "was interrupted",
    "preempted": "was preempted",
}
_TO_CONTINUE = (
    ' To continue the earlier run, pass if_exists="resume", call run.fit_start(batch=...), or load its '
    "checkpoint in the trainer (ckpt_path, resume_from_checkpoint, autoresume)."
)

# The sessions that this process has begun. A restarted job doesn't continue these.
_sessions_here: set[str] = set()


def note_session(session: str) -> None:
    """Notes that this process has begun a session."""
    _sessions_here.add(session)


@attrs.frozen
class TakenPlace:
    """A locked place, to which nothing is written yet."""

    place: Place
    lock: WriterLock
    claim: "Claim | None"

    @property
    def is_completed(self) -> bool:
        """Whether it holds a completed run."""
        return self._status == "completed"

    @property
    def what_it_holds(self) -> str:
        """Its content, for messages."""
        return f"holds a run that {_ENDED.get(self._status, 'did not end')}"

    @property
    def _status(self) -> str:
        return str(read_json(self.place.folder / SIDECAR).get("status"))

    def continues(self, proof: bool | str | None) -> bool | None:
        """Returns whether its run is continued, given `State.continues_run`; None if that isn't known yet."""
        if proof == "unless completed":
            return not self.is_completed
        return None if proof is None else bool(proof)


class EarlyRecords:
    """Records that were logged before their run is open, or while it may still move to another folder.

    Args:
        where: the run, for messages.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._calls: list[Callable[[], None]] = []
        self._files: tempfile.TemporaryDirectory[str] | None = None
        self.lost = 0
        """How many records were dropped because there were too many, or couldn't be written."""

    def __len__(self) -> int:
        return len(self._calls)

    def keep(self, call: Callable[[], None]) -> bool:
        """Keeps a call; returns False, without keeping it, if there are too many."""
        has_room = len(self._calls) < _MAX_EARLY_RECORDS
        if has_room:
            self._calls.append(call)
        return has_room

    def drop(self) -> None:
        """Counts a dropped record, and logs the first one."""
        if not self.lost:
            _log.error(
                "run folder %s is not open: %d records are buffered for init; further ones are dropped.",
                self._where,
                _MAX_EARLY_RECORDS,
            )
        self.lost += 1

    def copy_of(self, path: Path) -> Path:
        """Copies a file, because the caller may change or delete it."""
        if self._files is None:
            self._files = tempfile.TemporaryDirectory(prefix="early-files-")
        copy = Path(self._files.name) / uuid.uuid4().hex
        shutil.copyfile(path, copy)
        return copy

    def log(self) -> None:
        """Makes the calls in order."""
        calls, self._calls = self._calls, []
        for call in calls:
            try:
                call()
            except Exception as error:  # noqa: BLE001  # a bad record must not cost the run
                self.lost += 1
                _log.error(
                    "run folder %s: could not write a record that was logged before init (%s: %s).",
                    self._where,
                    type(error).__name__,
                    redact_text(safe_text(error)),
                )

    def clear(self) -> None:
        """Forgets the calls."""
        self._calls = []

    def close(self) -> None:
        """Removes the copies of files."""
        if self._files is not None:
            self._files.cleanup()


class Silence:
    """A process that writes nothing: a rank without files, or a forked child of the writing process.

    It is created before the fork, so that only one of the children warns.
    """

    def __init__(self) -> None:
        # One byte that forked children share: whether one of them has warned.
        self._told = mmap.mmap(-1, 1)
        self.is_child = False
        """Whether it is a forked child."""
        self.names: set[str] = set()
        """The metrics that a rank without files was given."""

    def note(self, metrics: Iterable[str]) -> None:
        """Notes metrics that aren't written."""
        self.names.update(metrics)

    def tell(self, what: str, where: object) -> None:
        """Warns once that a child logs something."""
        if self.is_child and not self._told[0]:
            self._told[0] = 1
            _log.warning(
                "%s is logged in a forked process, such as a worker of a DataLoader, and is not written: "
                "only the process that began the run writes to %s. Return it from the worker, and log it "
                "there. Reported once.",
                what,
                where,
            )


@attrs.define(kw_only=True)
class Opening:
    """Opens a run in its own folder or, if another run is there, in a folder beside it.

    If the place holds a run and it isn't known yet whether this one continues it, nothing is written there.
    The first record opens a folder beside it, and records are also kept as calls. If proof arrives later,
    such as a checkpoint that is loaded after an evaluation, these records move to the earlier run.

    Args:
        place: where the run should be.
        state: the state of the run.
        if_exists: what to do if another run is there.
        run_id: the requested id of the run, or None.
        is_trainer: whether it is the trainer's run, and not a named writer's.
        is_shared: whether several ranks write it, which can't agree on another place.
        claim_of: creates a rank's claim on a run in a store, given its URI.
        start: starts writing to a place.
        leave: closes and removes the folder that is being written.
        early: the waiting records.

    Attributes:
        earlier: the locked place, while it isn't known whether its run is continued.
        is_reopened: whether the run was completed before.
    """

    place: Place
    state: State
    if_exists: IfExists
    run_id: str | None
    is_trainer: bool
    is_shared: bool
    claim_of: "Callable[[str, int], Claim]"
    start: Callable[[TakenPlace], None]
    leave: Callable[[], None]
    early: EarlyRecords
    earlier: TakenPlace | None = attrs.field(default=None, init=False)
    is_reopened: bool = attrs.field(default=False, init=False)

    def begin(self) -> None:
        """Opens the place or one beside it, or neither if only a later event can decide."""
        try:
            taken = self._take(self.place)
        except RunInUseError as error:
            is_again = error.is_same_process and self.if_exists != "error" and not self.is_shared
            if self.if_exists != "new" and not is_again:
                raise
            self._open_beside()
            return
        with contextlib.ExitStack() as undo:
            undo.callback(taken.lock.release)
            continues = self._continues(taken)
            if continues is None:
                self.earlier = taken
            elif continues:
                self._reopen(taken)
                self.start(taken)
            else:
                self._open_beside("" if self.if_exists == "new" else taken.what_it_holds)
                return
            undo.pop_all()

    def choose(self, *, is_written: bool, for_good: bool = False) -> None:
        """Opens the earlier run if there is proof by now that this one continues it, else one beside it.

        Args:
            is_written: whether the folder beside it is already open.
            for_good: whether to ignore any later proof.
        """
        earlier, proof = self.earlier, self.state.continues_run
        if earlier is None:
            return
        if earlier.continues(proof):
            if is_written:
                self.leave()
            self.earlier = None
            self.start(earlier)
            self.early.log()
            return
        if not is_written:
            self._open_beside(earlier.what_it_holds)
            self.early.log()
        if for_good or proof is not None:
            self.settle()

    def train(self) -> None:
        """Writes the records that waited until a completed run is trained further."""
        if self.is_reopened:
            self.is_reopened = False
            self.early.log()

    def end(self) -> None:
        """Leaves a completed run unchanged if it wasn't trained further."""
        if self.is_reopened and self.early:
            where = self.place.folder
            _log.warning("run folder %s: no batch was trained; its hyperparameters stay.", where)
            self.early.clear()

    def settle(self) -> None:
        """Stays beside the earlier run for good."""
        earlier, self.earlier = self.earlier, None
        if earlier is not None:
            earlier.lock.release()
            self.early.clear()

    def _take(self, place: Place) -> TakenPlace:
        """Locks the folder of a place, and fetches the run from the store.

        Raises:
            RunInUseError: another process writes there.
            RunPathError: the place isn't writable, or a newer release wrote the run.
        """
        run_dir = place.folder
        # Also checked before locking, so that nothing in the folder changes.
        check_known(run_dir)
        lock = WriterLock(
            run_dir / lock_name(self.state.rank), writer="" if self.is_trainer else run_dir.name
        )
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            lock.acquire()
            claim = None if place.uri is None else self.claim_of(place.uri, self.state.rank)
            if claim is not None:
                claim.prepare(run_dir, lambda: set_aside(run_dir, lock))
                check_known(run_dir)
        except BaseException as error:
            lock.release()
            if isinstance(error, OSError) and not isinstance(error, RecordError):
                raise not_writable(place, error) from error
            raise
        return TakenPlace(place, lock, claim)

    def _continues(self, taken: TakenPlace) -> bool | None:
        """Returns whether to write at the place, which may be empty; None if that isn't known yet.

        Raises:
            RunExistsError: the place holds a run that `if_exists` refuses, or that several ranks would not
                continue.
        """
        run_dir = taken.place.folder
        if not holds_run(run_dir, self.state.rank):
            return True
        if self.if_exists == "error":
            raise run_exists_error(run_dir, "a run already")
        if self.if_exists == "new":
            return False
        if self.if_exists == "resume" or not self.is_trainer:
            return True
        sidecar = read_json(run_dir / SIDECAR)
        has_id = self.run_id is not None and sidecar.get("run_id") == self.run_id
        is_restarted = is_restarted_job() and sidecar.get("session") not in _sessions_here
        if has_id or (is_restarted and not taken.is_completed):
            return True
        continues = taken.continues(self.state.continues_run)
        if not continues and self.is_shared:
            raise run_exists_error(run_dir, "a run, and several ranks cannot agree on a name beside it")
        return continues

    def _reopen(self, taken: TakenPlace) -> None:
        """Notes that the continued run was completed; logs it unless the caller asked to resume."""
        self.is_reopened = self.if_exists == "auto" and self.is_trainer and taken.is_completed
        if self.is_reopened:
            _log.warning(
                "run folder %s holds a run that was completed: it is continued. Pass "
                'if_exists="new" for a folder beside it, or "error" to refuse it.',
                taken.place.folder,
            )

    def _open_beside(self, why: str = "") -> None:
        """Starts at a place with a free name beside the run, such as `digits-2`.

        Args:
            why: why the requested place isn't used. If given, the log line also says how to continue the
                earlier run.
        """
        taken: RecordError = run_exists_error(self.place.folder, "a run already")
        for number in range(2, _MAX_NAMES_BESIDE):
            beside = self.place.beside(number)
            try:
                free = self._take(beside)
                if holds_run(beside.folder, self.state.rank):
                    free.lock.release()
                    continue
                self.start(free)
            except RunInUseError as error:
                taken = error
                continue
            _log.warning(
                "run folder %s %s: this run is written to %s.%s",
                self.place,
                why or "is taken",
                beside,
                _TO_CONTINUE if why else "",
            )
            return
        raise taken


def check_ranks(if_exists: str, *, all_ranks: bool) -> None:
    """Raises ValueError if several ranks would have to agree on a place."""
    if if_exists == "new" and all_ranks:
        raise ValueError('if_exists must not be "new" with all_ranks=True: ranks cannot agree on a name.')


def not_writable(place: Place, error: OSError) -> RunPathError:
    """Returns the error for a place that isn't writable."""
    return RunPathError(f"run folder {str(place.folder)!r} must be writable: {error}.")
