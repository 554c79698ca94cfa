"""`CheckpointSaver`: decides when to save a checkpoint, and lets four parts do the rest.

`contents` collects the state, `writing` writes it, and the `Publisher` uploads it
and applies the rules of `retention`. A checkpoint is one file that `torch.load(weights_only=True)` reads:
tensors and plain values, no code. A pointer in the same folder names the newest: a text file with the upload
name of the checkpoint, as Composer writes it.
"""

import logging
import os
import re
import secrets
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs

from events.callback import Callback
from events.errors import CheckpointError
from events.interval import Interval
from events.logger.logger import Logger
from events.names import check_placeholders, check_run_name, format_run_name
from events.state import State
from events.timestamp import Time
from events.trainer import distributed

from .contents import checkpoint_of, summary_of
from .files import POINTER_SUFFIX
from .folder import CheckpointFolder, is_uri
from .parts import find_parts
from .publisher import CheckpointCounts, Publisher, Save, in_folder
from .retention import KeptCheckpoints, Retention, SavedCheckpoint, rules_of
from .schedule import AutoInterval, AutoSchedule
from .writing import CheckpointWriter, CheckpointWriting

__all__ = ["CheckpointCounts", "CheckpointSaver"]

_log = logging.getLogger("events")

_LOOK_SECONDS = 0.1
# Waits longer than this are logged.
_NOTICE_SECONDS = 10.0
_DESTINATION_SECONDS = 30.0
_NOT_THE_NAME = re.compile(r"\{(?!run_name\})[^{}]*\}")


class CheckpointSaver(Callback):
    """Saves checkpoints at an interval and when training ends, and uploads them through the destinations.

    ```python
    saver = CheckpointSaver("runs/mine/checkpoints", save_interval="500ba", keep=Retention(3, every=10))
    Trainer(..., callbacks=[saver])
    ```

    Training waits while the state is copied in memory, but not while the file is written. A separate process
    writes a state of 32 MiB or more, a thread a smaller one. Rank 0 writes, and all ranks contribute the
    states of their random number generators.

    **Shards.** If `fully_shard` has divided the model among ranks, or with `sharded=True`, a checkpoint is a
    folder. Each rank writes and uploads its part in the format of `torch.distributed.checkpoint`, and any
    number of ranks can load it. It is complete once every rank has written; the pointer in a store moves once
    every part is uploaded. All ranks must see `folder`, unless it is in a store.

    **Lock.** From `INIT` until close, no other saver, of any process, may save checkpoints of these names
    into the folder. Rank 0 holds the lock, `.FILENAME.lock`, which ends with its process. For a folder in a
    store, its local copy is locked.

    **Memory.** The copy takes as much memory as the state, from the first batch on. If that is not available,
    training waits for the file to be written; this is reported once.

    **Errors.** If the disk is full, this checkpoint fails and training continues: the error is reported,
    older checkpoints stay, and the next interval tries again. At the end of training the error is raised. If
    a disk or the writing process does not respond within `close_seconds`, the checkpoint fails with a
    `TimeoutError`.

    **Threading.** Hooks run in the training thread. `state.last_checkpoint` names a checkpoint once it is
    complete, and only then is it uploaded. `close` waits for a checkpoint that is being written.

    Args:
        folder: a local folder, or a URI such as "s3://bucket/{run_name}", whose files are uploaded by the
            saver's own queue and not passed to destinations. May contain placeholders such as `{run_name}`.
        filename: the name of a checkpoint in it; must be unique, for example by `{batch}`.
        save_interval: how often, such as "1ep", "500ba" or "30m"; "auto", or an `AutoInterval`, for as often
            as the cost and the store allow.
        latest_filename: the name of the pointer to the newest; may contain placeholders, and gets the suffix
            ".symlink" if it lacks it. None for no pointer.
        keep: what to keep locally, in `folder` and in a `RunDirectory`: how many of the newest, or a
            `Retention`. None keeps all; but one if `folder` is in a store, and two if `save_interval` is
            "auto" or an `AutoInterval`. While uploads to that store fail, checkpoints that are not kept are
            withdrawn instead of uploaded, unless `keep_in_store` keeps them.
        keep_in_store: what to keep where they are uploaded, in the same form; None, the default, deletes
            nothing there. Older ones that this run has uploaded are deleted once the newer one and its
            pointer are uploaded. The best are the same as for `keep`, and as many, unless a `Retention`
            sets them.
        remote_folder: the folder of the uploaded files.
        overwrite: whether a new run may save into a folder where another run has saved.
        weights_only: whether a checkpoint holds only the model; a run cannot be resumed from it.
        writing: how the file is written: in the background, by a process or a thread.
        sharded: whether each rank writes its part of a checkpoint, without the suffix ".pt" of `filename`.
            Default: if `fully_shard` has divided the model.
        close_seconds: how long `close` may wait for the file, and for uploads to a store. Training waits as
            long for a file, but at least five seconds. Slower checkpoints are given up and count as failed.

    Raises:
        ValueError: a number is less than one, the rules name different metrics, or the folder is a URI
            without a store.
        TimeStringError: the interval has no unit.
        FileExistsError: the folder, or a destination, holds checkpoints of another run under these names;
            raised when the trainer is made, for a local folder at `FIT_START`.
        CheckpointError: the state holds something that is neither a tensor nor a plain value; or, at `INIT`,
            another saver has the folder.

    Attributes:
        counts: what happened to its checkpoints.
        folder: the folder where it saves.
        weights_only: whether a checkpoint holds only the model.
    """

    time_bucket = "checkpoint"

    def __init__(
        self,
        folder: str | Path = "{run_name}/checkpoints",
        filename: str = "ep{epoch}-ba{batch}.pt",
        *,
        save_interval: str | int | Time | AutoInterval = "1ep",
        latest_filename: str | None = f"latest{POINTER_SUFFIX}",
        keep: int | Retention | None = None,
        keep_in_store: int | Retention | None = None,
        remote_folder: str = "{run_name}/checkpoints",
        overwrite: bool = False,
        weights_only: bool = False,
        writing: CheckpointWriting = CheckpointWriting(),  # noqa: B008  # frozen
        sharded: bool | None = None,
        close_seconds: float = 600.0,
    ) -> None:
        for template in (str(folder), filename, latest_filename or "", remote_folder):
            check_placeholders(template)
        if latest_filename is not None and not latest_filename.endswith(POINTER_SUFFIX):
            latest_filename += POINTER_SUFFIX
        folder = os.path.expanduser(str(folder))  # noqa: PTH111  # Path raises without a home
        if isinstance(save_interval, str) and save_interval == "auto":
            save_interval = AutoInterval()
        newest = None
        self._interval: Interval | AutoSchedule
        if isinstance(save_interval, AutoInterval):
            self._interval = AutoSchedule(save_interval)
            newest = 2  # All of them would fill the disk.
        else:
            self._interval = Interval(save_interval, default_unit="ep")
        if is_uri(folder):
            from uploads import open_store

            open_store(folder)  # Reports a mistake here, not with the first checkpoint.
            newest = 1
        self.counts = CheckpointCounts()
        self._close_seconds = close_seconds
        self.weights_only = weights_only
        self._sharded = sharded
        self._overwrite = overwrite
        self._how = writing
        self._kept = KeptCheckpoints(*rules_of(keep, keep_in_store, newest))
        self.folder = CheckpointFolder(folder, filename, latest_filename, remote_folder)
        self._arrange()

    def _arrange(self, rank: int = 0, local_rank: int = 0) -> None:
        """Makes publisher and writer; they open nothing before they are used."""
        self._publisher = Publisher(self.folder, self._kept, self.counts, overwrite=self._overwrite)
        self._rank = rank
        self._writing = CheckpointWriter(
            self._how,
            self._close_seconds,
            self._publisher,
            self.counts,
            is_sharded=self.folder.is_sharded,
            rank=rank,
            is_first_here=local_rank == 0,
        )

    @property
    def writer_pid(self) -> int | None:
        """The id of the process that writes, if there is one."""
        return self._writing.writer_pid

    @property
    def interval(self) -> Time | None:
        """How often it saves; None if that depends on the cost."""
        return self._interval.time if isinstance(self._interval, Interval) else None

    @property
    def _auto(self) -> AutoSchedule | None:
        return self._interval if isinstance(self._interval, AutoSchedule) else None

    def init(self, state: State, logger: Logger) -> None:
        """Locks the folder, and opens the queue to a store, which continues earlier uploads."""
        find_parts(state, logger)
        for folder in (self.folder.template, self.folder.remote_folder):
            check_run_name(_NOT_THE_NAME.sub("", folder), state)
        for name in (self.folder.filename, self.folder.pointer or ""):
            if "/" in (filled := format_run_name(name, state)):
                raise ValueError(f"filename must be a name without folders, got {filled!r}. Extend folder.")
        is_divided = state.model is not None and distributed.is_sharded(state.model)
        is_sharded = is_divided if self._sharded is None else self._sharded
        if is_divided and not is_sharded:
            raise ValueError(
                "sharded must not be False for a model that is divided among ranks: rank 0 has only a part. "
                "Leave it out, or pass sharded=True."
            )
        self.folder = attrs.evolve(self.folder, is_sharded=is_sharded)
        self._arrange(state.rank, state.local_rank)
        # All ranks raise, so that none waits for another.
        if problem := distributed.from_rank_zero(self.folder.lock(state) if state.rank == 0 else ""):
            raise CheckpointError(problem)
        is_checked = self.folder.is_in_store and not state.continues_run
        if is_checked and (problem := distributed.from_rank_zero(self._taken(state))):
            raise FileExistsError(problem)
        self._publisher.open(state)

    def _taken(self, state: State) -> str:
        """Returns an error message if the folder holds checkpoints of another run, else ""."""
        return "" if self._overwrite or state.rank != 0 else self.folder.taken(state)

    def before_load(self, state: State, logger: Logger) -> None:
        """Raises FileExistsError if destinations have checkpoints of another run under these names."""
        if state.continues_run or self._overwrite or self.folder.is_in_store:
            return
        problem = self.folder.taken_at_destinations(state, logger) if state.rank == 0 else ""
        # All ranks raise, so that none waits for another.
        if problem := distributed.from_rank_zero(problem):
            raise FileExistsError(problem)

    def after_load(self, state: State, logger: Logger) -> None:
        """Records that a checkpoint was loaded, which need not be saved again."""
        self._kept.is_resumed = state.last_checkpoint is not None
        if self._kept.is_resumed:
            self._kept.saved_at = state.timestamp

    def fit_start(self, state: State, logger: Logger) -> None:
        """Makes the folder, and removes half-written files from it.

        Raises:
            OSError: the folder cannot be made, or, as a FileExistsError, holds checkpoints of another run.
            ValueError: the run has no model.
        """
        if state.model is None:
            raise ValueError("CheckpointSaver needs a model. Set run.state.model before the first batch.")
        self._interval.start(state)
        error = self._open_folder(state) if state.rank == 0 else None
        # All ranks raise, so that none waits for another.
        if (error := distributed.from_rank_zero(error)) is not None:
            raise error

    def _open_folder(self, state: State) -> Exception | None:
        if (error := self.folder.open(state)) is not None:
            return error
        # A store was asked at `INIT`.
        is_checked = not self.folder.is_in_store or state.continues_run
        if self._kept.is_resumed or self._kept.now.local or not is_checked:
            return None
        problem = self._taken(state)
        return FileExistsError(problem) if problem else None

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Saves if the interval has passed, and hands on the previous checkpoint once it is complete."""
        interval = self._interval
        with nullcontext() if self._auto is None else self._auto.measured():
            self._writing.advance(state, logger)
            self._publisher.move_pointers(state)
            if interval.passed(state):
                self._save(state, logger)
            else:
                self._writing.prepare(state)

    def is_due(self) -> bool:
        """Returns on rank 0 whether to save at the next `BATCH_CHECKPOINT`.

        No collective; pass the result to `agree` on all ranks.
        """
        if self._auto is None or self._rank != 0:
            return False
        return self._auto.is_due(lambda: self._writing.pending is None and self._publisher.has_arrived())

    def agree(self, *, is_due: bool) -> None:
        """Takes the decision of rank 0."""
        if self._auto is not None:
            self._auto.is_agreed = is_due

    def eval_end(self, state: State, logger: Logger) -> None:
        """Records the metric of a checkpoint that was saved before its evaluation."""
        self._kept.evaluated(state)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Saves if the interval has passed; an iteration counts when it ends, after its last epoch."""
        if self._interval.passed(state):
            self._save(state, logger)

    iteration_checkpoint = epoch_checkpoint

    def fit_end(self, state: State, logger: Logger) -> None:
        """Saves the final state; raises errors, because no later checkpoint replaces this one."""
        self._save(state, logger, is_last=True)
        self._publisher.repeat(state, logger)
        self._kept.look_for_metric(state)
        # Destinations have a limit of their own for the end of a run.
        seconds = self._close_seconds
        if not self.folder.is_in_store:
            seconds = min(seconds, _DESTINATION_SECONDS)
        started = time.monotonic()
        is_said = False
        while self._publisher.is_waiting:
            time.sleep(_LOOK_SECONDS)
            waited = time.monotonic() - started
            if waited > _NOTICE_SECONDS and not is_said:
                is_said = True
                _log.warning(
                    "The end of training waits for shards to be uploaded, for up to %.0f s.", seconds
                )
            self._publisher.move_pointers(state, is_late=distributed.from_rank_zero(waited > seconds))

    def limit(self, seconds: float) -> None:
        """Limits the time for everything that is still to be written and uploaded."""
        self._close_seconds = min(self._close_seconds, seconds)
        self._writing.limit(self._close_seconds)

    def close(self, state: State, logger: Logger) -> None:
        """Waits for the checkpoint that is being written and hands it on; does not wait for shards."""
        self._writing.close(state, logger)

    @property
    def lost_files(self) -> int:
        """How many files can never be uploaded to a `save_folder` in a store; while the run is open."""
        return self._publisher.lost_files

    def post_close(self) -> None:
        """Ends the writing process, releases memory, and unlocks the folder."""
        try:
            self._writing.end()
            self._publisher.close(self._close_seconds)
        finally:
            self.folder.release()

    def state_dict(self) -> dict[str, Any]:
        """Returns the kept checkpoints, so that `keep` works across sessions."""
        return self._kept.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self._kept.load_state_dict(state)

    def _save(self, state: State, logger: Logger, *, is_last: bool = False) -> None:
        # Only rank 0 knows whether the last save succeeded, and all ranks must decide alike.
        if not distributed.from_rank_zero(self._is_to_save(state, logger, is_last=is_last)):
            return
        save = self._next(state, logger)
        checkpoint = checkpoint_of(
            state,
            logger,
            save.summary,
            weights_only=self.weights_only,
            is_of_rank=self.folder.is_sharded,
        )
        has_waited = self._writing.begin(checkpoint, save, state)
        self._kept.saved_at = state.timestamp
        if is_last or has_waited:
            self._writing.settle(state, logger, is_last=is_last)

    def _is_to_save(self, state: State, logger: Logger, *, is_last: bool) -> bool:
        """Returns whether to save now; first settles the previous checkpoint."""
        if self._writing.pending is not None:
            is_busy = not self._writing.is_done()
            if is_busy and self._how.when_busy == "skip" and not is_last:
                self.counts.skipped += 1
                self._writing.look_for_delay()
                return False
            if is_busy and self._kept.saved_at != state.timestamp:
                self.counts.waited += 1
            # At the end of training, a failed one is retried at once.
            self._writing.settle(state, logger)
        return self._kept.saved_at != state.timestamp

    def _next(self, state: State, logger: Logger) -> Save:
        """Returns the checkpoint to save now, after adding it to the kept ones."""
        folder, remote = self.folder.path(state), self.folder.remote(state)
        name, identifier = self.folder.name(state), secrets.token_hex(16)
        remote_name = f"{self.folder.destination_folder(state)}/{name}" if remote is None else name
        new = SavedCheckpoint(
            str(folder / name),
            remote_name if remote is None else remote.store.uri(name),
            shards=state.world_size if self.folder.is_sharded else 0,
            identifier=identifier,
        )
        self._kept.add(new, state)
        pointer = self.folder.pointer_name(state)
        return Save(
            path=folder / name,
            remote_name=remote_name,
            identifier=identifier,
            summary=summary_of(state, identifier, self._kept.here, weights_only=self.weights_only),
            pointer=None if pointer is None else (folder / pointer, remote_name),
            surplus=in_folder(self._kept.gone()[0], folder),
            end=logger.begin_span(name, "checkpoints") if self._writing.takes_part else lambda: None,
        )
