"""Writes checkpoints: one file on rank 0, or a folder with a part of each rank.

The state is copied in the training thread and written in the background (`writer`). At the next batch after
it is complete on the disks of all ranks, the `Publisher` gets it. One checkpoint is written at a time.
"""

import concurrent.futures
import contextlib
import errno
import functools
import json
import logging
import time
from typing import Any, Literal

import attrs

from events.errors import CheckpointError
from events.logger.logger import Logger
from events.state import State
from events.trainer import distributed
from events.trainer.weights import weights_of

from .files import MANIFEST, METADATA, remove_checkpoints
from .plain import plain_values
from .publisher import CheckpointCounts, Publisher, Save
from .sharded import ShardPlan, ShardRequest, complete, files_of
from .snapshot import NotEnoughMemoryError, SnapshotBuffer, outline_of
from .writer import BackgroundWriter, Request, in_thread

__all__ = ["CheckpointWriter", "CheckpointWriting"]

_log = logging.getLogger("events")

# Extra room, as a share of the size and in bytes, for states of callbacks and generators.
_SPARE, _SPARE_BYTES = 32, 1 << 20
# Training waits at least this long for a file, whatever `close_seconds` is.
_LEAST_SECONDS = 5.0
# Waits longer than this are logged.
_NOTICE_SECONDS = 10.0
# A killed process ends within this time, unless it waits for a disk.
_KILLED_SECONDS = 2.0


@attrs.frozen(kw_only=True)
class CheckpointWriting:
    """Options for writing the file of a checkpoint.

    ```python
    saver = CheckpointSaver("checkpoints", writing=CheckpointWriting(when_busy="skip"))
    ```

    Args:
        asynchronous: whether it is written in the background.
        when_busy: what to do if the previous checkpoint is still being written. "wait" waits for it; "skip"
            leaves the new checkpoint out, except for the one at the end of training.
        process_bytes: the size from which a process writes, and not a thread; each tensor counts as 16 KiB
            more than its size.

    Raises:
        ValueError: `when_busy` is unknown.
    """

    asynchronous: bool = True
    when_busy: Literal["wait", "skip"] = "wait"
    process_bytes: int = 32 << 20

    def __attrs_post_init__(self) -> None:
        if self.when_busy not in {"wait", "skip"}:
            raise ValueError(f"when_busy must be 'wait' or 'skip', got {self.when_busy!r}.")


class CheckpointWriter:
    """Copies the state, has it written, limits the time, and handles errors.

    A single file is written on rank 0. With shards, each rank writes its own, and then rank 0 the manifest.

    Attributes:
        pending: the checkpoint that is being written, or None.
        seconds: how long training waits for a file.
        takes_part: whether this rank writes.

    Args:
        how: the options of the user.
        close_seconds: how long `close` may wait.
        publisher: takes each complete checkpoint.
        counts: counts what happens.
        is_sharded: whether each rank writes its part.
        rank: this rank.
        is_first_here: whether it is the first rank of its machine.
    """

    def __init__(
        self,
        how: CheckpointWriting,
        close_seconds: float,
        publisher: Publisher,
        counts: CheckpointCounts,
        *,
        is_sharded: bool = False,
        rank: int = 0,
        is_first_here: bool = True,
    ) -> None:
        self.pending: Save | None = None
        self.seconds = max(close_seconds, _LEAST_SECONDS)
        self.takes_part = is_sharded or rank == 0
        self._how = how
        self._close_seconds = close_seconds
        self._plan = ShardPlan(rank) if is_sharded else None
        self._rank = rank
        self._is_first_here = is_first_here
        self._publisher = publisher
        self._counts = counts
        self._is_prepared = False
        # A given-up write whose thread may still read the buffer while it waits for its disk.
        self._stuck: concurrent.futures.Future[Any] | None = None
        self._removal: concurrent.futures.Future[Any] | None = None

    # Made where they are used, so that a saver can be pickled before.
    @functools.cached_property
    def _buffer(self) -> SnapshotBuffer:
        return SnapshotBuffer()

    @functools.cached_property
    def _writer(self) -> BackgroundWriter:
        return BackgroundWriter(self._how.process_bytes)

    @property
    def writer_pid(self) -> int | None:
        """The id of the process that writes, if there is one."""
        return self._writer.pid

    def limit(self, seconds: float) -> None:
        """Limits the time of everything from now on."""
        self.seconds = self._close_seconds = seconds

    def prepare(self, state: State) -> None:
        """Allocates the copy and starts the writing process before the first save needs them."""
        if self._is_prepared or not self._how.asynchronous or not self.takes_part:
            return
        self._is_prepared = True
        try:
            values: Any = {
                "model": weights_of(state.model),
                **state.parts.states(state.parts.find()),
                "optimizers": [one.state_dict() for one in state.optimizers],
            }
            outline = outline_of(self._own_part(values, state))
            self._buffer.reserve(outline.room + outline.room // _SPARE + _SPARE_BYTES)
        except Exception as error:  # noqa: BLE001  # the save itself reports it
            _log.debug("nothing is prepared for checkpoints: %s", error)
            return

        def prepare() -> None:
            self._writer.start(outline.effort)
            self._buffer.prepare()

        in_thread("checkpoint-memory", prepare)

    def begin(self, checkpoint: dict[str, Any], save: Save, state: State) -> bool:
        """Copies a checkpoint and begins to write it; every rank must call it, a collective with shards.

        Args:
            checkpoint: the result of `checkpoint_of`.
            save: its paths and names.
            state: the run.

        Returns:
            Whether training waited for the file, on all ranks that write, so that it is done.
        """
        if not self.takes_part:
            return False
        if self._plan is not None and self._rank == 0:
            # Invalidates an older checkpoint of this name, whose files are replaced one by one.
            with contextlib.suppress(OSError):
                save.path.unlink()
        is_copied = self._start(self._own_part(checkpoint, state), save)
        self.pending = save
        return not (is_copied if self._plan is None else distributed.any_rank(is_copied))

    def is_done(self) -> bool:
        """Returns whether the pending step is done; every rank must call it, a collective with shards."""
        is_done = self.pending is None or self.pending.future.done()
        return is_done if self._plan is None else not distributed.any_rank(not is_done)

    def advance(self, state: State, logger: Logger) -> None:
        """Hands on the pending checkpoint, or reports its error, if it is done."""
        if self.pending is not None and self.is_done():
            self._finish(state, logger)

    def settle(self, state: State, logger: Logger, *, is_last: bool = False) -> None:
        """Waits for the pending checkpoint, and hands it on or reports its error.

        Args:
            state: the run.
            logger: its destinations.
            is_last: whether to raise an error, because no later checkpoint replaces this one.
        """
        while self.pending is not None:
            if not self._has_come(self.pending.future, str(self.pending.path), self.seconds):
                self._give_up(self.pending)
            self._finish(state, logger, is_last=is_last)

    def close(self, state: State, logger: Logger) -> None:
        """Waits for the file, up to `close_seconds`, and hands it on, when training has ended.

        Shards are abandoned, because completing them would need the other ranks.
        """
        pending, seconds = self.pending, self._close_seconds
        if pending is None:
            return
        if self._plan is not None:
            _log.error("Checkpoint %s was not complete on all ranks and is abandoned.", pending.path)
        elif self._has_come(pending.future, str(pending.path), seconds):
            self._finish(state, logger)
            return
        else:
            self._give_up(pending)
            _log.error("Checkpoint %s was not complete after %.0f s and is abandoned.", pending.path, seconds)
        self._counts.failed += 1

    def end(self) -> None:
        """Ends the writing process and releases memory."""
        if self.pending is not None and not self.pending.future.done():
            self._give_up(self.pending)
        self.pending = None
        seconds = self._close_seconds
        if self._removal is not None and not self._has_come(self._removal, "old ones to be removed", seconds):
            _log.error("Old checkpoints were not removed within %.0f s.", seconds)
        self._writer.close()
        self._buffer.release()

    def look_for_delay(self) -> None:
        """Warns once if checkpoints are skipped because the pending one takes longer than the limit."""
        pending = self.pending
        if pending is None or pending.is_late:
            return
        seconds = time.monotonic() - pending.started
        pending.is_late = seconds > self._close_seconds
        if pending.is_late:
            _log.warning(
                "Checkpoint %s is not written after %.0f s; others are left out until it is.",
                pending.path,
                seconds,
            )

    def _own_part(self, checkpoint: Any, state: State) -> Any:
        """Returns this rank's part of a checkpoint."""
        model: Any = state.model
        return checkpoint if self._plan is None else self._plan.divide(checkpoint, model)

    def _start(self, values: Any, save: Save) -> bool:
        """Begins to write; returns whether from a copy, so that training goes on."""
        if self._stuck is not None and not self._stuck.done():
            reason = (
                "an earlier one that was given up is still being written, to a disk that does not respond"
            )
            save.future.set_exception(OSError(errno.EBUSY, reason))
            return False
        request = (
            Request(save.path, save.pointer, save.surplus)
            if self._plan is None
            else ShardRequest(save.path, rank=self._rank)
        )
        if self._how.asynchronous:
            try:
                snapshot, wait = self._buffer.take(values)
            except NotEnoughMemoryError as error:
                self._counts.synchronous += 1
                if self._counts.synchronous == 1:
                    _log.warning("Training waits while checkpoints are written: %s.", error)
            else:
                save.future = self._writer.write(request, snapshot, self._buffer, wait, save.is_wanted)
                return True
        # Training waits up to the limit, because a dead disk may block the thread.
        plain = plain_values(values)
        save.future = in_thread("checkpoint-writer", lambda: request.write(plain, save.is_wanted))
        try:
            has_come = self._has_come(save.future, str(save.path), self.seconds)
        except BaseException:  # Ctrl-C.
            save.given_up.set()
            raise
        if not has_come:
            self._give_up(save)
        return False

    def _has_come(self, future: "concurrent.futures.Future[Any]", what: str, seconds: float) -> bool:
        """Waits for a future, and logs a long wait; returns whether it is done."""
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

    def _give_up(self, pending: Save) -> None:
        """Gives up a step that takes too long, and kills the writing process.

        No file of the checkpoint appears later, and its buffer is reused once the step has ended.
        """
        pending.given_up.set()
        self._stuck = pending.future
        pid = self.writer_pid
        self._writer.give_up()
        concurrent.futures.wait([self._stuck], _KILLED_SECONDS)
        who = "" if pid is None else f" by process {pid}, which may be stopped"
        reason = f"not written within {self.seconds:g} s (close_seconds){who}; is the disk there?"
        pending.future = concurrent.futures.Future()
        pending.future.set_exception(TimeoutError(errno.ETIMEDOUT, reason))

    def _finish(self, state: State, logger: Logger, *, is_last: bool = False) -> None:
        """Handles a finished step: begins the next, or hands the checkpoint on, or reports the error."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        error, is_complete = self._step_ended(pending)
        if error is None and not is_complete:
            self.pending = pending
            return
        pending.end()
        if error is None:
            self._counts.saved += 1
            self._publisher.publish(pending, self._files(pending), state, logger)
            return
        self._counts.failed += 1
        self._publisher.drop()
        if is_last or not isinstance(error, OSError | CheckpointError | MemoryError):
            raise error
        _log.error(
            "Checkpoint %s could not be saved (%s); training continues.",
            pending.path,
            getattr(error, "strerror", None) or str(error) or type(error).__name__,
            exc_info=error,
        )

    def _step_ended(self, pending: Save) -> tuple[BaseException | None, bool]:
        """Returns the error of a step on any rank, and whether it was the last step; begins the next one."""
        error = pending.future.exception()
        if self._plan is None:
            return error, True
        # Either every rank gets an error, or none does.
        told = f"rank {self._rank}: {type(error).__name__}: {error}"
        answers = distributed.gather(pending.future.result() if error is None else told)
        failures = [one for one in answers if isinstance(one, str)]
        if failures:
            error = error or CheckpointError("; ".join(failures))
        # All ranks have finished writing.
        own = ((pending.path, pending.identifier),)
        surplus = own if failures else pending.surplus if pending.shards else ()
        if self._is_first_here and surplus:
            self._removal = in_thread("checkpoint-removal", lambda: remove_checkpoints(surplus))
        if failures or pending.shards:
            return error, True
        pending.shards = answers
        pending.future = in_thread("checkpoint-manifest", lambda: self._complete(pending))
        return None, False

    def _complete(self, pending: Save) -> None:
        """Writes the manifest and the pointer, on rank 0."""
        if self._plan is not None and self._rank == 0:
            complete(
                pending.path.parent,
                self._plan,
                pending.shards,
                pending.pointer,
                json.loads(pending.summary),
                is_wanted=pending.is_wanted,
            )

    def _files(self, pending: Save) -> dict[str, int | None]:
        """Returns the files of this rank by name, with their CRC-32 if known."""
        if self._plan is None:
            return {pending.path.name: pending.future.result().crc32}
        own = files_of(pending.shards[self._rank], self._rank)
        of_all = {METADATA: None, MANIFEST: None} if self._rank == 0 else {}
        return {name: one.crc32 for name, one in own.items()} | of_all
