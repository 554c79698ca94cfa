"""`CheckpointSaver`: decides when a checkpoint is saved, has it written, and hands it on.

A checkpoint is one file that `torch.load(weights_only=True)` reads: tensors and plain values, no code. A
pointer in the same folder names the newest: a text file with the name under which the checkpoint is uploaded,
as Composer writes it. The training thread copies the state; the file is written in the background
(`writer`); once it is complete the training thread hands it on, at the next batch. A model that is divided
among ranks is saved in shards (`sharded`): each rank writes and hands on its own.
"""

import concurrent.futures
import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

from events.callback import Callback
from events.errors import CheckpointError
from events.interval import Interval
from events.logger.logger import Logger
from events.names import check_placeholders, check_run_name, format_name, format_run_name
from events.state import State
from events.timestamp import Time, Timestamp
from events.trainer import distributed

from .contents import VERSION, checkpoint_of, weights_of
from .files import (
    MANIFEST,
    METADATA,
    POINTER_SUFFIX,
    Written,
    remove_checkpoint,
    sweep,
    tensors_of,
    values_of,
    write_checkpoint,
)
from .plain import plain_values
from .pointers import PendingPointers, Upload
from .reading import SavePlace, local_names
from .remote import RemoteFolder, UploadedFolder, is_uri
from .retention import Kept, Retention, SavedCheckpoint
from .sharded import (
    ShardedCheckpoint,
    ShardPlan,
    ShardRequest,
    WrittenShard,
    complete,
    files_of,
    write_shard,
)
from .snapshot import NotEnoughMemoryError, SnapshotBuffer, outline_of
from .writer import CheckpointWriter, Request

if TYPE_CHECKING:
    from uploads.disk import FileLock

__all__ = ["CheckpointCounts", "CheckpointSaver"]

_log = logging.getLogger("events")

_PROCESS_BYTES = 32 << 20
# Of the size: for what else is in a checkpoint, as states of callbacks and of random number generators.
_SPARE = 32
_LOOK_SECONDS = 0.1
# Of training for a file, whatever `close_seconds` is.
_LEAST_SECONDS = 5.0
# After which a wait is said.
_NOTICE_SECONDS = 10.0
# A process that is killed ends within it, unless it waits for a disk.
_KILLED_SECONDS = 2.0
_DESTINATION_SECONDS = 30.0
_ASK_SECONDS = 20.0
_MAX_LOCKED_BYTES = 200
_NOT_THE_NAME = re.compile(r"\{(?!run_name\})[^{}]*\}")
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@attrs.define
class CheckpointCounts:
    """How often something happened to the checkpoints of a run.

    Attributes:
        saved: they are complete on the disk.
        failed: they could not be written.
        waited: training waited for the one before.
        skipped: they were left out, since the one before was still being written.
        synchronous: they were written while training waited, for want of memory.
        withdrawn: they were no longer kept before the store of `folder` took them, and are not there.
    """

    saved: int = 0
    failed: int = 0
    waited: int = 0
    skipped: int = 0
    synchronous: int = 0
    withdrawn: int = 0


@attrs.frozen
class _PendingSave:
    """A checkpoint that is being written; one in shards, which has been, is then being completed."""

    future: "concurrent.futures.Future[Any]"
    path: Path
    remote_name: str
    # What was there before.
    kept: Kept
    # To be removed when it is complete, where that is not left to the writer; with their identifiers.
    surplus: tuple[tuple[Path, str], ...] = ()
    summary: str = ""
    # What this rank has written of one in shards; None meanwhile.
    shard: WrittenShard | None = None
    # Set once nobody waits for it any more: it must not appear later.
    given_up: threading.Event = attrs.field(factory=threading.Event)
    started: float = attrs.field(factory=time.monotonic)


class CheckpointSaver(Callback):
    """Saves a checkpoint at an interval and when training ends, and uploads it through the destinations.

    ```python
    saver = CheckpointSaver("runs/mine/checkpoints", save_interval="500ba", keep=3, keep_every=10)
    Trainer(..., callbacks=[saver])
    ```

    Training waits while the state is copied in memory, not while the file is written: a state of 32 MiB and
    more by a process of its own, a smaller one by a thread. Rank 0 writes; all ranks contribute the states of
    their random number generators.

    **Shards.** Where the model is divided among ranks by `fully_shard`, or with `sharded=True`, a checkpoint
    is a folder; each rank writes and uploads its part, in the format of `torch.distributed.checkpoint`, and
    any number of ranks loads it. It is complete once every rank has written; the pointer in a store moves
    once every rank's part is there. All ranks must see `folder`, unless it is in a store.

    **Lock.** From `INIT` until it is closed, no other saver, of any process, may save checkpoints of these
    names into the folder; rank 0 holds the lock, `.FILENAME.lock`, which ends with its process. Of a folder
    in a store, the one on this machine is locked.

    **Memory.** The copy takes as much memory as the state, and keeps it from the first batch on. Where that
    is not available, training waits for the file to be written; this is reported once.

    **Errors.** A full disk costs this one checkpoint, not the run: the error is reported, older checkpoints
    stay, and the next interval tries again. Where training ends it is raised. A disk that does not answer, or
    a process that is stopped, costs it after `close_seconds`, with a `TimeoutError`.

    **Threading.** Hooks run in the training thread. `state.last_checkpoint` names a checkpoint once it is
    complete, and only then is it uploaded. `close` waits for one that is being written.

    Args:
        folder: where to save: a local folder, or the URI of one in a store, such as
            "s3://bucket/{run_name}", to which an upload queue of its own brings them; destinations do not get
            those. May contain placeholders such as `{run_name}`.
        filename: the name of a checkpoint in it; must be unique, for example by `{batch}`.
        save_interval: how often, such as "1ep", "500ba" or "30m".
        latest_filename: the name of the pointer to the newest, which may contain placeholders, and gets the
            ending ".symlink" if it has another; None for no pointer.
        keep: how many of the newest to keep locally, in `folder` and in a `RunDirectory`; None for all, or
            for one where `folder` is in a store. While uploads to that store fail, one that is not kept is
            not uploaded, and counted as withdrawn, unless `keep_in_store` says so.
        keep_best: the name of a metric or loss of the evaluation, such as "metrics/eval/accuracy" or
            "loss/eval/total": the best checkpoints stay too, of equal ones the older. A value is that of the
            batch that was evaluated: a checkpoint of another batch has none, and NaN is never best.
        keep_best_mode: whether the best has the largest value ("max") or the smallest ("min").
        keep_best_count: how many of the best stay.
        keep_every: each n-th checkpoint stays for ever; None for none.
        keep_in_store: how many of the newest to keep where they are uploaded; None, the default, for all:
            nothing is deleted there. Older ones that this run has uploaded are deleted once the newer one and
            its pointer are there.
        keep_best_in_store: how many of the best stay there; default: as many as locally.
        keep_every_in_store: each n-th stays there for ever; None for none.
        remote_folder: the folder of the uploaded files.
        overwrite: whether a new run may save into a folder where another run has saved.
        weights_only: whether a checkpoint holds the model alone: a run cannot be resumed from it.
        asynchronous: whether the file is written in the background.
        sharded: whether each rank writes its part of a checkpoint; None where the model is divided by
            `fully_shard`. The ending ".pt" of `filename` is left out then.
        when_busy: what happens where the checkpoint before is still being written: training waits for it
            ("wait"), or this one is left out ("skip"); the one where training ends never is.
        process_bytes: the size from which on a process writes and not a thread; each tensor counts as 16 KiB
            more than it has.
        close_seconds: how long `close` may wait for the file, and for uploads to a store; training waits as
            long for a file to be written, at least five seconds. What takes longer is given up and counted
            as failed.

    Raises:
        ValueError: one of the numbers is less than one, a choice is none of those named, or the folder is a
            URI without a store.
        TimeStringError: the interval has no unit.
        FileExistsError: the folder holds checkpoints of another run, or a destination does under these
            names: when the trainer is made; at `FIT_START` where it is a local folder.
        CheckpointError: the state holds something that is neither a tensor nor a plain value; at `INIT`,
            where another saver has the folder.
    """

    def __init__(
        self,
        folder: str | Path = "{run_name}/checkpoints",
        filename: str = "ep{epoch}-ba{batch}.pt",
        *,
        save_interval: str | int | Time = "1ep",
        latest_filename: str | None = f"latest{POINTER_SUFFIX}",
        keep: int | None = None,
        keep_best: str | None = None,
        keep_best_mode: Literal["max", "min"] = "max",
        keep_best_count: int = 1,
        keep_every: int | None = None,
        keep_in_store: int | None = None,
        keep_best_in_store: int | None = None,
        keep_every_in_store: int | None = None,
        remote_folder: str = "{run_name}/checkpoints",
        overwrite: bool = False,
        weights_only: bool = False,
        asynchronous: bool = True,
        sharded: bool | None = None,
        when_busy: Literal["wait", "skip"] = "wait",
        process_bytes: int = _PROCESS_BYTES,
        close_seconds: float = 600.0,
    ) -> None:
        if when_busy not in {"wait", "skip"}:
            raise ValueError(f"when_busy must be 'wait' or 'skip', got {when_busy!r}.")
        for template in (str(folder), filename, latest_filename or "", remote_folder):
            check_placeholders(template)
        if latest_filename is not None and not latest_filename.endswith(POINTER_SUFFIX):
            latest_filename += POINTER_SUFFIX
        self._folder = os.path.expanduser(str(folder))  # noqa: PTH111  # Path raises without a home
        self._remote: RemoteFolder | None = None
        if is_uri(self._folder):
            from uploads import open_store

            open_store(self._folder)  # Reports a mistake here, not with the first checkpoint.
            keep = 1 if keep is None else keep
        self._filename = filename
        self._interval = Interval(save_interval, default_unit="ep")
        self._latest_filename = latest_filename
        self._retention = Retention(keep, keep_best_count, keep_best, keep_best_mode, keep_every)
        self._retention_in_store = Retention(
            keep_in_store,
            keep_best_count if keep_best_in_store is None else keep_best_in_store,
            keep_best,
            keep_best_mode,
            keep_every_in_store,
            suffix="_in_store",
        )
        self._remote_folder = remote_folder
        self._overwrite = overwrite
        self._weights_only = weights_only
        self._asynchronous = asynchronous
        self._sharded = sharded
        self._plan: ShardPlan | None = None
        self._pointers = PendingPointers()
        self._removal: concurrent.futures.Future[Any] | None = None
        self._when_busy = when_busy
        self._process_bytes = process_bytes
        self._close_seconds = close_seconds
        self._write_seconds = max(close_seconds, _LEAST_SECONDS)
        # What is kept, here and in the store, and what was removed last: a process that was killed may not
        # have done it.
        self._kept = Kept()
        self._has_repeated = False
        self._has_metric = False
        self._number = 0
        self._saved_at: Timestamp | None = None
        self._is_resumed = False
        self._pending: _PendingSave | None = None
        self._delayed: Path | None = None
        self._held: FileLock | None = None
        self._made: list[Path] = []
        # What was given up, and may still be read from the buffer by a thread that waits for its disk.
        self._stuck: concurrent.futures.Future[Any] | None = None
        self._writer: CheckpointWriter | None = None
        self._buffer: SnapshotBuffer | None = None
        self.counts = CheckpointCounts()

    @property
    def writer_pid(self) -> int | None:
        """The id of the process that writes, if there is one."""
        return None if self._writer is None else self._writer.pid

    @property
    def place(self) -> SavePlace:
        """Where it saves."""
        return SavePlace(
            self._folder,
            self._filename,
            self._latest_filename,
            self._remote_folder,
            is_sharded=self._plan is not None,
        )

    def init(self, state: State, logger: Logger) -> None:
        """Opens the queue to a store, which uploads what an earlier process left."""
        for folder in (self._folder, self._remote_folder):
            check_run_name(_NOT_THE_NAME.sub("", folder), state)
        for name in (self._filename, self._latest_filename or ""):
            if "/" in (filled := format_run_name(name, state)):
                raise ValueError(f"filename must be a name without folders, got {filled!r}. Extend folder.")
        is_divided = state.model is not None and distributed.is_sharded(state.model)
        if is_divided if self._sharded is None else self._sharded:
            distributed.check_rank(state.rank, state.world_size)
            self._plan = ShardPlan(state.rank)
        elif is_divided:
            raise ValueError(
                "sharded must not be False for a model that is divided among ranks: rank 0 has a part of it. "
                "Leave it out, or pass sharded=True."
            )
        if is_uri(self._folder) and (state.rank == 0 or self._plan is not None):
            self._remote = RemoteFolder(self._folder, state)
        # All ranks raise, so that none waits for another.
        if problem := distributed.from_rank_zero(self._lock_folder(state)):
            raise CheckpointError(problem)
        is_checked = is_uri(self._folder) and not state.continues_run
        if is_checked and (problem := distributed.from_rank_zero(self._taken(state))):
            raise FileExistsError(problem)
        if self._remote is not None:
            self._remote.open()

    def _lock_folder(self, state: State) -> str:
        """Locks the folder for checkpoints of these names; returns what is wrong where another has it, or "".

        A folder that cannot be made or written is left to `fit_start`, which says so.
        """
        from uploads.disk import NO_FLOCK, FileLock, call_in_forked_children

        if self._held is not None or state.rank != 0:
            return ""
        folder = self._local_folder(state)
        name = format_run_name(self._filename, state)
        if len(name.encode()) > _MAX_LOCKED_BYTES:
            name = hashlib.sha256(name.encode()).hexdigest()
        lock = FileLock(folder / f".{name}.lock")
        missing = [one for one in (folder, *folder.parents) if not one.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(run_name=state.run_name)
        except BlockingIOError:
            return _in_use(str(folder), lock.owner())
        except OSError as error:
            if error.errno not in NO_FLOCK:
                return ""
            _log.warning(
                "checkpoint folder %s cannot be locked (%s): take care that no other run saves there.",
                folder,
                error.strerror,
            )
        self._held, self._made = lock, missing
        call_in_forked_children(lock.forget_in_child)
        return ""

    def before_load(self, state: State, logger: Logger) -> None:
        """Raises FileExistsError where destinations have checkpoints of another run under these names."""
        if state.continues_run or self._overwrite or is_uri(self._folder):
            return
        folder = format_name(self._remote_folder, state).rstrip("/")
        problem = ""
        if state.rank == 0 and (
            name := self._name_in(_asked(logger.list_files, f"{folder}/"), folder, state)
        ):
            problem = _problem("a destination", name)
        # All ranks raise, so that none waits for another.
        if problem := distributed.from_rank_zero(problem):
            raise FileExistsError(problem)

    def _taken(self, state: State) -> str:
        """Returns what is wrong where the folder holds checkpoints of another run, else an empty text."""
        if self._overwrite or state.rank != 0:
            return ""
        folder = self._local_folder(state)
        latest = None if self._latest_filename is None else format_name(self._latest_filename, state)
        names = local_names(folder, latest, self.place.pattern(state))
        if not names and self._remote is not None:
            names = _asked(self._remote.first_names)
        name = names[0] if self._remote is None and names else self._name_in(names, "", state)
        return (
            _problem(str(folder) if self._remote is None else self._remote.store.uri(), name) if name else ""
        )

    def _name_in(self, names: Sequence[str], folder: str, state: State) -> str:
        """Returns the first of names that a checkpoint of this run, or the pointer, could have, or ""."""
        latest = None if self._latest_filename is None else format_name(self._latest_filename, state)
        pattern = self.place.pattern(state)
        for name in names:
            leaf = name.removeprefix(f"{folder}/") if folder else name
            if leaf == latest or pattern.fullmatch(leaf):
                return name
        return ""

    def _local_folder(self, state: State) -> Path:
        if is_uri(self._folder):
            if self._remote is None:
                self._remote = RemoteFolder(self._folder, state)
            return self._remote.local
        return Path(format_name(self._folder, state))

    def fit_start(self, state: State, logger: Logger) -> None:
        """Makes the folder, and removes half-written files from it.

        Raises:
            OSError: the folder cannot be made; FileExistsError where it holds checkpoints of another run.
        """
        self._interval.start(state)
        error = self._open_folder(state) if state.rank == 0 else None
        # All ranks raise, so that none waits for another.
        if (error := distributed.from_rank_zero(error)) is not None:
            raise error

    def _open_folder(self, state: State) -> Exception | None:
        folder = self._local_folder(state)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            if error.errno in _NO_ROOM:  # There may be some by the first checkpoint.
                problem = self._lock_folder(state)
                return CheckpointError(problem) if problem else None
            reason = f"checkpoint folder {str(folder)!r} must be one that can be written: {error.strerror}"
            return type(error)(error.errno, reason)
        if problem := self._lock_folder(state):
            return CheckpointError(problem)
        pattern = self.place.pattern(state)
        latest = None if self._latest_filename is None else format_name(self._latest_filename, state)
        for path in sweep(folder, lambda name: name == latest or pattern.fullmatch(name) is not None):
            _log.info("removed %s, which a process that was killed left half written", path)
        if self._is_resumed or self._kept.local or (self._remote is not None and not state.continues_run):
            return None
        problem = self._taken(state)
        return FileExistsError(problem) if problem else None

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Saves if the interval has passed, and hands on the checkpoint before once it is complete."""
        if self._pending is not None and self._is_done(self._pending):
            self._finish(state, logger)
        self._move_pointers(state)
        if self._interval.passed(state):
            self._save(state, logger)
        elif self._buffer is None and self._asynchronous and (state.rank == 0 or self._plan is not None):
            self._prepare(state)

    def eval_end(self, state: State, logger: Logger) -> None:
        """Notes the value of weights that were saved before they were evaluated."""
        metric = _values_of_now(state).get(self._retention.metric or "")
        if metric is None or self._saved_at is None or not self._kept.local:
            return
        if self._saved_at.batch == state.timestamp.batch:
            self._kept = self._kept.with_metric(self._kept.local[-1].path, metric)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Saves if the interval has passed."""
        if self._interval.passed(state):
            self._save(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Saves the final state; an error is raised here, as no later checkpoint replaces this one."""
        self._save(state, logger, is_last=True)
        self._repeat(state, logger)
        self._look_for_metric(state)
        # Destinations have a limit of their own for the end of a run.
        seconds = self._close_seconds if self._remote else min(self._close_seconds, _DESTINATION_SECONDS)
        started = time.monotonic()
        is_said = False
        while self._pointers:
            time.sleep(_LOOK_SECONDS)
            waited = time.monotonic() - started
            if waited > _NOTICE_SECONDS and not is_said:
                is_said = True
                _log.warning("The end of training waits for shards to be uploaded, up to %.0f s.", seconds)
            self._move_pointers(state, is_late=distributed.from_rank_zero(waited > seconds))

    def close(self, state: State, logger: Logger) -> None:
        """Waits for the checkpoint that is being written, and hands it on; not for one in shards.

        That would need the other ranks, and where training has ended as it should there is none.
        """
        if self._pending is not None and self._plan is not None:
            _log.error("Checkpoint %s was not complete on all ranks and is abandoned.", self._pending.path)
            self.counts.failed += 1
        elif self._pending is not None:
            if self._has_come(self._pending.future, str(self._pending.path), self._close_seconds):
                self._finish(state, logger)
            else:
                self._give_up(self._pending)
                _log.error(
                    "Checkpoint %s was not complete after %.0f s and is abandoned.",
                    self._pending.path,
                    self._close_seconds,
                )
                self.counts.failed += 1

    def post_close(self) -> None:
        """Ends the process that writes, gives its memory back, and unlocks the folder."""
        try:
            self._end()
        finally:
            held, self._held = self._held, None
            if held is not None:
                held.release()
            with contextlib.suppress(OSError):  # Of a run that has saved nothing.
                for folder in self._made:
                    folder.rmdir()

    def _end(self) -> None:
        if self._pending is not None and not self._pending.future.done():
            self._give_up(self._pending)
        self._pending = None
        self._pointers.clear()
        seconds = self._close_seconds
        if self._removal is not None and not self._has_come(self._removal, "old ones to be removed", seconds):
            _log.error("Old checkpoints were not removed within %.0f s.", seconds)
        writer, self._writer = self._writer, None
        buffer, self._buffer = self._buffer, None
        if writer is not None:
            writer.close()
        if buffer is not None:
            buffer.release()
        remote, self._remote = self._remote, None
        if remote is not None:
            remote.close(self._close_seconds)
        if self.counts.withdrawn:
            _log.warning("%d checkpoints were not uploaded before they were given up.", self.counts.withdrawn)

    def state_dict(self) -> dict[str, Any]:
        """Returns the checkpoints that are there, so that `keep` works across sessions."""
        return {
            "saved": [attrs.asdict(one) for one in self._kept.local],
            "stored": [attrs.asdict(one) for one in self._kept.stored],
            "removed": [attrs.asdict(one) for one in self._kept.removed],
            "deleted": [attrs.asdict(one) for one in self._kept.deleted],
            "number": self._number,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        local, stored, removed, deleted = (
            tuple(SavedCheckpoint.from_state(one) for one in state.get(name, ()))
            for name in ("saved", "stored", "removed", "deleted")
        )
        self._kept = Kept(local, stored, removed, deleted)
        self._number = int(state.get("number", len(local)))

    def after_load(self, state: State, logger: Logger) -> None:
        """Notes a loaded checkpoint: it need not be saved again."""
        self._is_resumed = state.last_checkpoint is not None
        if self._is_resumed:
            self._saved_at = state.timestamp

    def _save(self, state: State, logger: Logger, *, is_last: bool = False) -> None:
        # Only rank 0 knows whether the last save succeeded, and all ranks must decide alike.
        if not distributed.from_rank_zero(self._is_to_save(state, logger, is_last=is_last)):
            return
        folder = self._local_folder(state)
        name = self._name(state)
        remote_folder = format_name(self._remote_folder, state).rstrip("/")
        remote_name = name if self._remote is not None else f"{remote_folder}/{name}"
        before = self._kept
        stored_as = remote_name if self._remote is None else self._remote.store.uri(name)
        identifier = secrets.token_hex(16)
        self._note(str(folder / name), stored_as, identifier, state)
        surplus = _in_folder(self._gone(before)[0], folder)
        checkpoint = (
            weights_of(state)
            if self._weights_only
            else checkpoint_of(state, logger, is_of_rank=self._plan is not None)
        )
        # In front, so that it can be read without the rest.
        summary = self._summary(identifier, state)
        checkpoint = {"version": VERSION, "summary": summary, **checkpoint}
        given_up = threading.Event()
        if self._plan is not None:
            future = self._write_shard(self._plan, checkpoint, folder / name, state, given_up)
        elif state.rank == 0:
            pointer = self._pointer(folder, remote_name, state)
            future = self._write(checkpoint, folder / name, pointer, surplus, given_up)
        else:
            return
        self._pending = _PendingSave(
            future, folder / name, remote_name, before, surplus, summary, given_up=given_up
        )
        self._saved_at = state.timestamp
        if is_last or self._is_done(self._pending):
            self._settle(state, logger, is_last=is_last)

    def _name(self, state: State) -> str:
        """Returns the name of a checkpoint of now, or of its manifest, in the folder."""
        name = format_name(self._filename, state)
        return name if self._plan is None else f"{name.removesuffix('.pt')}/{MANIFEST}"

    def _pointer(self, folder: Path, remote_name: str, state: State) -> tuple[Path, str] | None:
        """Returns the path of the pointer to a checkpoint, and its text."""
        latest = self._latest_filename
        return None if latest is None else (folder / format_name(latest, state), remote_name)

    def _is_done(self, pending: _PendingSave) -> bool:
        """Returns whether a checkpoint is written; every rank of one in shards must call it."""
        is_done = pending.future.done()
        return is_done if self._plan is None else not distributed.any_rank(not is_done)

    def _note(self, path: str, remote_name: str, identifier: str, state: State) -> None:
        """Adds a checkpoint to those that are there, and finds those that are not kept."""
        self._number += 1
        metric = _values_of_now(state).get(self._retention.metric or "")
        shards = 0 if self._plan is None else state.world_size
        batch = int(state.timestamp.batch)
        new = SavedCheckpoint(path, remote_name, self._number, batch, metric, shards, identifier)
        self._kept = self._kept.with_new(new, self._retention, self._retention_in_store)
        self._has_metric |= metric is not None
        if state.eval_values and self._retention.metric not in state.eval_values:
            self._look_for_metric(state)

    def _look_for_metric(self, state: State) -> None:
        """Says once that no checkpoint has the metric by which the best is kept."""
        best_by = self._retention.metric
        self._has_metric |= any(one.metric is not None for one in self._kept.local)
        if best_by is not None and not self._has_metric and state.rank == 0:
            self._has_metric = True
            known = ", ".join(state.eval_values) or "none, for there was no evaluation"
            _log.warning("keep_best=%r has no value. Those of the last evaluation are %s.", best_by, known)

    def _gone(self, before: Kept) -> tuple[list[SavedCheckpoint], list[SavedCheckpoint]]:
        """Returns what is to be removed here and in the store; at first also what should be gone by now.

        The checkpoint that this run was resumed from may name files of another run, or of anything: only
        those in the folders of this run are removed.
        """
        if not self._has_repeated:
            before = Kept()
        return (
            [one for one in self._kept.removed if one not in before.removed],
            [one for one in self._kept.deleted if one not in before.deleted],
        )

    def _summary(self, identifier: str, state: State) -> str:
        """Returns what `destinations runs checkpoints` shows of a checkpoint, as JSON."""
        best = self._retention
        return json.dumps(
            {
                "id": identifier,  # First: see `has_identifier`.
                "run_name": state.run_name,
                "batch": int(state.timestamp.batch),
                "epoch": int(state.timestamp.epoch),
                "time": time.time(),
                "metrics": _values_of_now(state),
                "best_by": None if best.metric is None else {"metric": best.metric, "mode": best.mode},
                "weights_only": self._weights_only,
            }
        )

    def _is_to_save(self, state: State, logger: Logger, *, is_last: bool) -> bool:
        """Returns whether to save now; before that, ends the checkpoint that is being written."""
        if self._pending is not None:
            is_busy = not self._is_done(self._pending)
            if is_busy and self._when_busy == "skip" and not is_last:
                self.counts.skipped += 1
                self._look_for_delay(self._pending)
                return False
            if is_busy and self._saved_at != state.timestamp:
                self.counts.waited += 1
            # One that failed is tried again at once where training ends.
            self._settle(state, logger)
        return self._saved_at != state.timestamp

    def _look_for_delay(self, pending: _PendingSave) -> None:
        """Says once that the checkpoint for which others are left out takes longer than the limit."""
        seconds = time.monotonic() - pending.started
        if seconds > self._close_seconds and self._delayed != pending.path:
            self._delayed = pending.path
            _log.warning(
                "Checkpoint %s is not written after %.0f s; others are left out until it is.",
                pending.path,
                seconds,
            )

    def _prepare(self, state: State) -> None:
        """Makes memory for the copy, and starts the process that writes, before the first save needs them."""
        model: Any = state.model
        try:
            values: Any = {
                "model": model.state_dict(),
                "optimizers": [one.state_dict() for one in state.optimizers],
            }
            outline = outline_of(values if self._plan is None else self._plan.divide(values, model))
            buffer, writer = self._parts()
            buffer.reserve(outline.room + outline.room // _SPARE + _PROCESS_BYTES // _SPARE)
        except Exception as error:  # noqa: BLE001  # the save itself reports it
            _log.debug("nothing is prepared for checkpoints: %s", error)
            self._parts()
            return

        def prepare() -> None:
            writer.start(outline.effort)
            buffer.prepare()

        _in_thread("checkpoint-memory", prepare)

    def _parts(self) -> tuple[SnapshotBuffer, CheckpointWriter]:
        if self._buffer is None or self._writer is None:
            self._buffer, self._writer = SnapshotBuffer(), CheckpointWriter(self._process_bytes)
        return self._buffer, self._writer

    def _write(
        self,
        checkpoint: dict[str, Any],
        path: Path,
        pointer: tuple[Path, str] | None,
        surplus: tuple[tuple[Path, str], ...],
        given_up: threading.Event,
    ) -> "concurrent.futures.Future[Written]":
        if (failed := self._hindrance()) is not None:
            return failed
        if self._asynchronous:
            buffer, writer = self._parts()
            try:
                snapshot, wait = buffer.take(checkpoint)
            except NotEnoughMemoryError as error:
                self._note_synchronous(error)
            else:
                request = Request(snapshot, path, pointer, surplus)
                return writer.write(request, buffer, wait, lambda: not given_up.is_set())
        values = plain_values(checkpoint)
        return self._wait_for(
            lambda is_wanted: write_checkpoint(
                values, path, pointer=pointer, surplus=surplus, is_wanted=is_wanted
            ),
            path,
            given_up,
        )

    def _wait_for(
        self, write: Callable[[Callable[[], bool]], Written], path: Path, given_up: threading.Event
    ) -> "concurrent.futures.Future[Written]":
        """Writes while training waits, up to the limit; in a thread, which a dead disk may keep."""
        future = _in_thread("checkpoint-writer", lambda: write(lambda: not given_up.is_set()))
        try:
            if self._has_come(future, str(path), self._write_seconds):
                return future
        except BaseException:  # Ctrl-C.
            given_up.set()
            raise
        return self._give_up(_PendingSave(future, path, "", self._kept, given_up=given_up)).future

    def _hindrance(self) -> "concurrent.futures.Future[Written] | None":
        """Returns a failure where a checkpoint that was given up still has the buffer, and the disk."""
        if self._stuck is None or self._stuck.done():
            return None
        reason = "one that was given up before is still being written, to a disk that does not answer"
        return _failed(OSError(errno.EBUSY, reason))

    def _write_shard(
        self,
        plan: ShardPlan,
        checkpoint: dict[str, Any],
        manifest: Path,
        state: State,
        given_up: threading.Event,
    ) -> "concurrent.futures.Future[Written]":
        """Copies what this rank has to write, and has it written; every rank must call it."""
        if state.rank == 0:
            # An older one of this name ends here: its files are replaced one by one.
            with contextlib.suppress(OSError):
                manifest.unlink()
        values = plan.divide(checkpoint, state.model)
        if (failed := self._hindrance()) is not None:
            return failed
        if self._asynchronous:
            buffer, writer = self._parts()
            try:
                snapshot, wait = buffer.take(values)
            except NotEnoughMemoryError as error:
                self._note_synchronous(error)
            else:
                request = ShardRequest(snapshot, manifest, rank=state.rank)
                return writer.write(request, buffer, wait, lambda: not given_up.is_set())
        tensors = [tensor.cpu() for tensor in values["tensors"]]
        values = {"tensors": tensors, "rest": plain_values(values["rest"])}
        return self._wait_for(
            lambda is_wanted: write_shard(values, manifest.parent, state.rank, is_wanted), manifest, given_up
        )

    def _note_synchronous(self, error: NotEnoughMemoryError) -> None:
        self.counts.synchronous += 1
        if self.counts.synchronous == 1:
            _log.warning("Training waits while checkpoints are written: %s.", error)

    def _agree(self, pending: _PendingSave, state: State) -> tuple[BaseException | None, list[Any]]:
        """Returns why a step of a checkpoint in shards has failed, on any rank, and the results of all ranks.

        Every rank must call it; all get an error, or none.
        """
        error = pending.future.exception()
        told = f"rank {state.rank}: {type(error).__name__}: {error}"
        answers = distributed.gather(pending.future.result() if error is None else told)
        failures = [one for one in answers if isinstance(one, str)]
        if failures:
            error = error or CheckpointError("; ".join(failures))
        # All have ended: nothing is written there any more.
        own = next((one.identifier for one in self._kept.local if one.path == str(pending.path)), "")
        surplus = ((pending.path, own),) if failures else pending.surplus if pending.shard is not None else ()
        if state.local_rank == 0 and surplus:
            self._removal = _in_thread("checkpoint-removal", lambda: _remove(surplus))
        return error, answers

    def _complete(
        self, pending: _PendingSave, written: list[WrittenShard], state: State
    ) -> "concurrent.futures.Future[Any]":
        """Has rank 0 complete a checkpoint in shards, which all ranks have written."""
        plan = self._plan
        if state.rank != 0 or plan is None:
            future: concurrent.futures.Future[Any] = concurrent.futures.Future()
            future.set_result(None)
            return future
        pointer = self._pointer(self._local_folder(state), pending.remote_name, state)
        summary = json.loads(pending.summary)
        return _in_thread(
            "checkpoint-manifest",
            lambda: complete(
                pending.path.parent,
                plan,
                written,
                pointer,
                summary,
                is_wanted=lambda: not pending.given_up.is_set(),
            ),
        )

    def _settle(self, state: State, logger: Logger, *, is_last: bool = False) -> None:
        """Waits for the checkpoint that is being written, and finishes it."""
        while self._pending is not None:
            path = str(self._pending.path)
            if not self._has_come(self._pending.future, path, self._write_seconds):
                self._pending = self._give_up(self._pending)
            self._finish(state, logger, is_last=is_last)

    def _has_come(self, future: "concurrent.futures.Future[Any]", what: str, seconds: float) -> bool:
        """Waits so long, and says for what if that takes long; returns whether it is done."""
        notice = min(_NOTICE_SECONDS, seconds)
        concurrent.futures.wait([future], notice)
        if not future.done() and notice < seconds:
            pid = self.writer_pid
            _log.warning(
                "The training process waits for %s%s, for up to %.0f s.",
                what,
                "" if pid is None else f", which process {pid} writes",
                seconds,
            )
            concurrent.futures.wait([future], seconds - notice)
        return future.done()

    def _give_up(self, pending: _PendingSave) -> _PendingSave:
        """Ends a step of a checkpoint that takes too long, and kills the process that writes.

        Nothing of it appears later, and its buffer is used again once it has ended.
        """
        pending.given_up.set()
        self._stuck = pending.future
        pid = self.writer_pid
        if self._writer is not None:
            self._writer.give_up()
        concurrent.futures.wait([self._stuck], _KILLED_SECONDS)
        who = "" if pid is None else f" by process {pid}, which may be stopped"
        reason = f"not written within {self._write_seconds:g} s (close_seconds){who}; is the disk there?"
        return attrs.evolve(pending, future=_failed(TimeoutError(errno.ETIMEDOUT, reason)))

    def _finish(self, state: State, logger: Logger, *, is_last: bool = False) -> None:
        """Hands on a checkpoint that is complete, or reports that it could not be written."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if self._plan is None:
            error = pending.future.exception()
        else:
            error, answers = self._agree(pending, state)
            if error is None and pending.shard is None:
                future = self._complete(pending, answers, state)
                self._pending = attrs.evolve(pending, future=future, shard=pending.future.result())
                return
        if error is not None:
            self.counts.failed += 1
            self._saved_at = None
            self._kept = pending.kept
            if is_last or not isinstance(error, OSError | CheckpointError | MemoryError):
                raise error
            _log.error(
                "Checkpoint %s could not be saved (%s); training continues.",
                pending.path,
                getattr(error, "strerror", None) or str(error) or type(error).__name__,
                exc_info=error,
            )
            return
        self.counts.saved += 1
        self._hand_on(pending, state, logger)

    def _hand_on(self, pending: _PendingSave, state: State, logger: Logger) -> None:
        """Uploads a complete checkpoint and its pointer, and has those deleted that are not kept."""
        removed, deleted = self._gone(pending.kept)
        # What has this name may be of this session, where `filename` gives one more than once.
        is_own = any(one.path == str(pending.path) for one in pending.kept.local)
        overwrite = self._overwrite or self._is_resumed or is_own
        if pending.shard is None:
            files: dict[str, int | None] = {pending.path.name: pending.future.result().crc32}
        else:
            files = {name: one.crc32 for name, one in files_of(pending.shard, state.rank).items()}
            if state.rank == 0:
                files |= {METADATA: None, MANIFEST: None}
        target = self._target(pending.remote_name, logger)
        if state.rank == 0:
            target.delete_here(removed)
        self._upload(pending.path, files, deleted, target, state, overwrite=overwrite)
        self._withdraw(removed, deleted)
        # All that was left of earlier sessions has been removed by now.
        self._kept = self._kept.trimmed()

    def _withdraw(self, removed: Sequence[SavedCheckpoint], deleted: Sequence[SavedCheckpoint]) -> None:
        """Takes back what the store of the folder has not got yet of checkpoints that are not kept.

        The rule is that for the store. Where there is none, all go there; but while it is away they wait on
        this machine, whose rule then applies.
        """
        if self._remote is None:
            return
        is_ruled = self._retention_in_store.newest is not None
        count = self._remote.withdraw(deleted if is_ruled else removed, is_away=not is_ruled)
        if count and not self.counts.withdrawn:
            _log.warning(
                "Checkpoints that are not kept are not uploaded while uploads to %s fail; "
                "keep_in_store says how many wait for it.",
                self._remote.store.uri(),
            )
        self.counts.withdrawn += count

    def _target(self, remote_name: str, logger: Logger) -> RemoteFolder | UploadedFolder:
        """Returns where a checkpoint is uploaded, given its name there."""
        depth = 1 if self._plan is None else 2
        return self._remote or UploadedFolder(logger, remote_name.rsplit("/", depth)[0])

    def _upload(
        self,
        path: Path,
        files: Mapping[str, int | None],
        surplus: Sequence[SavedCheckpoint],
        target: RemoteFolder | UploadedFolder,
        state: State,
        *,
        overwrite: bool,
    ) -> None:
        """Submits a checkpoint, and its pointer and the deletions that follow it.

        Args:
            path: of the checkpoint, or of the manifest.
            files: those of this rank beside it, or itself, by name; with their CRC-32 where it is known.
            surplus: what is deleted after it.
            target: where it is uploaded.
            state: the run.
            overwrite: whether objects of these names may be replaced.
        """
        self._has_repeated = True
        start = "" if self._plan is None else f"{path.parent.name}/"
        for file, crc32 in files.items():
            target.submit(path.with_name(file), f"{start}{file}", crc32, overwrite=overwrite)
        called = start.rstrip("/") or path.name
        state.last_checkpoint_uris = target.uris(called)
        here = path if self._plan is None else path.parent
        state.last_checkpoint = str(here) if self._remote is None else state.last_checkpoint_uris[0]
        latest = None if self._latest_filename is None else format_name(self._latest_filename, state)
        names = tuple(f"{start}{file}" for file in files)
        upload = Upload(str(path), target, names, f"{start}{path.name}", latest, tuple(surplus))
        if self._plan is None:
            upload.finish(upload.surplus)
        else:
            self._forget(self._pointers.add(upload))
            self._move_pointers(state)

    def _repeat(self, state: State, logger: Logger) -> None:
        """Does what a killed session may have left undone, where this one had nothing to save.

        Removes what should be gone here. Where a store lacks a file of the checkpoint that was resumed, or
        still has one that it replaces, it is uploaded again: deletions wait for it and its pointer. Every
        rank must call it.
        """
        plan = self._plan
        if not self._is_resumed or self._has_repeated or (plan is None and state.rank != 0):
            return
        folder = self._local_folder(state)
        path = folder / self._name(state)
        saved = next((one for one in self._kept.local if one.path == str(path)), None)
        is_whole = saved is not None and saved.shards in {0, state.world_size} and path.exists()
        if plan is not None:
            is_whole = not distributed.any_rank(not is_whole)
        if saved is None or not is_whole:
            return
        files: dict[str, int | None] = {path.name: None}
        if plan is not None:
            files |= ShardedCheckpoint(path).checksums()
        removed, deleted = self._kept.removed, self._kept.deleted
        target = self._target(saved.remote_name, logger)
        is_done = False
        if state.local_rank == 0:
            _remove(_in_folder(removed, folder))
        if state.rank == 0:
            target.delete_here(removed)
            found = _asked(target.names_of, (saved, *deleted))
            start = saved.name.removesuffix(path.name)
            is_done = all(start + file in found for file in files)
            is_done &= not any(one.name in found for one in deleted)
        if plan is not None:
            is_done = distributed.from_rank_zero(is_done)
            of_all = {MANIFEST, METADATA} if state.rank == 0 else set()
            own = of_all | {values_of(state.rank), tensors_of(state.rank)}
            files = {file: crc32 for file, crc32 in files.items() if file in own}
        if not is_done:
            self._upload(path, files, deleted, target, state, overwrite=True)

    def _move_pointers(self, state: State, *, is_late: bool = False) -> None:
        """Submits the pointers to checkpoints in shards that are there by now; every rank must call it."""
        self._forget(self._pointers.move(state, is_late=is_late))

    def _forget(self, paths: Iterable[str]) -> None:
        """Notes checkpoints that are not whole in the store, so that nothing of them is deleted there."""
        for path in paths:
            self._kept = self._kept.without_stored(path)


def _values_of_now(state: State) -> dict[str, float]:
    """Returns the values of the evaluation of the weights that the model has now."""
    batch = int(state.timestamp.batch)
    return {name: value for name, value in state.eval_values.items() if state.eval_batches.get(name) == batch}


def _in_thread(name: str, call: Callable[[], object]) -> "concurrent.futures.Future[Any]":
    """Calls a function in a thread for which the end of the interpreter does not wait.

    Where there can be none, for want of memory, this thread calls it.
    """
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  # raised to who asks the future
            future.set_exception(error)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError:
        run()
    return future


def _failed(error: Exception) -> "concurrent.futures.Future[Any]":
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_exception(error)
    return future


def _remove(checkpoints: Iterable[tuple[Path, str]]) -> None:
    for path, identifier in checkpoints:
        remove_checkpoint(path, identifier)


def _in_folder(checkpoints: Iterable[SavedCheckpoint], folder: Path) -> tuple[tuple[Path, str], ...]:
    """Returns path and identifier of those that are in a folder."""
    return tuple((Path(one.path), one.identifier) for one in checkpoints if _is_below(one.path, folder))


def _is_below(path: str, folder: Path) -> bool:
    """Returns whether a checkpoint, or the manifest of one in shards, is directly in a folder."""
    parts = Path(path).parts
    return ".." not in parts and folder in {Path(path).parent, Path(path).parent.parent}


def _problem(place: str, name: str) -> str:
    return (
        f"checkpoint folder must be new for a new run, but {place} holds {name!r} of another run. "
        "Pass autoresume=True or load_path to resume that run, another run_name, or "
        "save_overwrite=True (CheckpointSaver: overwrite=True)."
    )


def _in_use(folder: str, owner: Mapping[str, Any]) -> str:
    since = owner.get("since")
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since)) if isinstance(since, float) else "?"
    return (
        f"checkpoint folder {folder!r} is in use: process {owner.get('pid', '?')} on "
        f"{owner.get('host', '?')} saves checkpoints of run {owner.get('run_name', '?')!r} there, "
        f"since {began}. Wait until it ends, close its Trainer, or choose another save_folder or run_name."
    )


def _asked(ask: Callable[..., Iterable[str]], *arguments: object) -> list[str]:
    """Returns the names that a store has; none, with a warning, where it does not answer in time."""
    try:
        return list(_in_thread("checkpoint-names", lambda: ask(*arguments)).result(_ASK_SECONDS))
    except Exception as error:  # noqa: BLE001  # a store that is away does not keep a run from starting
        reason = str(error) or f"no answer in {_ASK_SECONDS:.0f} s"
        _log.warning("cannot look for checkpoints in the store: %s", reason)
        return []
