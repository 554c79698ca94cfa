"""How a checkpoint is written: `FileWriter`, one file by rank 0; `ShardWriter`, a part by each rank.

Both copy the state in the training thread and have it written in the background (`writer`). Once it is
complete on the disk, on all ranks, they hand it to the `Publisher`, at the next batch. One is written at a
time. Where a save of one file had to wait for the file before, a second copy is made room for: from then on
one checkpoint may wait in memory while another is written.
"""

import concurrent.futures
import contextlib
import errno
import json
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import attrs

from events.errors import CheckpointError
from events.logger.logger import Logger
from events.state import State
from events.trainer import distributed
from events.trainer.weights import weights_of

from .files import MANIFEST, METADATA, Written, remove_checkpoints, write_checkpoint
from .plain import plain_values
from .publisher import CheckpointCounts, Publisher, Save
from .sharded import ShardPlan, ShardRequest, WrittenShard, complete, files_of, write_shard
from .snapshot import NotEnoughMemoryError, SnapshotBuffer, StateSnapshot, outline_of
from .writer import BackgroundWriter, Request, in_thread

__all__ = ["CheckpointWriting", "FileWriter", "ShardWriter"]

_log = logging.getLogger("events")

# Of the size: for what else is in a checkpoint, as states of callbacks and of random number generators.
_SPARE, _SPARE_BYTES = 32, 1 << 20
# Of training for a file, whatever `close_seconds` is.
_LEAST_SECONDS = 5.0
# After which a wait is said.
_NOTICE_SECONDS = 10.0
# A process that is killed ends within it, unless it waits for a disk.
_KILLED_SECONDS = 2.0


@attrs.frozen(kw_only=True)
class CheckpointWriting:
    """How the file of a checkpoint is written.

    ```python
    saver = CheckpointSaver("checkpoints", writing=CheckpointWriting(when_busy="skip"))
    ```

    Args:
        asynchronous: whether it is written in the background.
        when_busy: what happens where the checkpoint before is still being written: training waits for it
            the first time, and from then on copies this one to a second memory, where it waits for its turn
            ("wait"); or this one is left out ("skip"), but never the one where training ends.
        process_bytes: the size from which on a process writes and not a thread; each tensor counts as 16 KiB
            more than it has.

    Raises:
        ValueError: `when_busy` is neither.
    """

    asynchronous: bool = True
    when_busy: Literal["wait", "skip"] = "wait"
    process_bytes: int = 32 << 20

    def __attrs_post_init__(self) -> None:
        if self.when_busy not in {"wait", "skip"}:
            raise ValueError(f"when_busy must be 'wait' or 'skip', got {self.when_busy!r}.")


@attrs.define(eq=False)
class _Pending:
    """A checkpoint that is being written.

    Attributes:
        save: the checkpoint.
        future: of the step that it is in.
        shards: what all ranks have written of one in shards, while rank 0 completes it; empty before.
        given_up: set once nobody waits for it any more: it must not appear later.
        started: when.
        is_late: whether it was said that it takes longer than it should.
        start: begins to write it, where it waits for the one before.
    """

    save: Save
    future: "concurrent.futures.Future[Any]" = attrs.field(factory=concurrent.futures.Future)
    shards: list[WrittenShard] = attrs.field(factory=list)
    given_up: threading.Event = attrs.field(factory=threading.Event)
    started: float = attrs.field(factory=time.monotonic)
    is_late: bool = False
    start: Callable[[], None] = lambda: None

    def is_wanted(self) -> bool:
        """Returns whether it may still appear; any thread."""
        return not self.given_up.is_set()


class _StateWriter(ABC):
    """What both ways have in common: the copy, the limit of time, and what becomes of an error.

    Attributes:
        pending: the checkpoint that is being written, or None.
        waiting: the one after it, which is copied and not written yet, or None.
        seconds: how long training waits for a file.

    Args:
        how: the options of the user.
        close_seconds: how long `close` may wait.
        publisher: takes each complete checkpoint.
        counts: counts what happens.
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
        rank: int = 0,
        is_first_here: bool = True,
    ) -> None:
        self.pending: _Pending | None = None
        self.waiting: _Pending | None = None
        self.seconds = max(close_seconds, _LEAST_SECONDS)
        self._how = how
        self._close_seconds = close_seconds
        self._rank = rank
        self._is_first_here = is_first_here
        self._publisher = publisher
        self._counts = counts
        self._buffer: SnapshotBuffer | None = None
        # For the one that waits, once a save had to wait; it and the other change places.
        self._spare: SnapshotBuffer | None = None
        self._spare_ready: concurrent.futures.Future[Any] | None = None
        self._writer: BackgroundWriter | None = None
        # What was given up, and may still be read from the buffer by a thread that waits for its disk.
        self._stuck: concurrent.futures.Future[Any] | None = None
        self._removal: concurrent.futures.Future[Any] | None = None

    @property
    def writer_pid(self) -> int | None:
        """The id of the process that writes, if there is one."""
        return None if self._writer is None else self._writer.pid

    def limit(self, seconds: float) -> None:
        """Lets everything from here on take so long at most."""
        self.seconds = self._close_seconds = seconds

    @property
    @abstractmethod
    def takes_part(self) -> bool:
        """Whether this rank writes."""

    def prepare(self, state: State) -> None:
        """Makes memory for the copy, and starts the process that writes, before the first save needs them."""
        if self._buffer is not None or not self._how.asynchronous or not self.takes_part:
            return
        try:
            values: Any = {
                "model": weights_of(state.model),
                **state.parts.states(state.parts.find()),
                "optimizers": [one.state_dict() for one in state.optimizers],
            }
            outline = outline_of(self._own_part(values, state))
            buffer, writer = self._parts()
            buffer.reserve(outline.room + outline.room // _SPARE + _SPARE_BYTES)
        except Exception as error:  # noqa: BLE001  # the save itself reports it
            _log.debug("nothing is prepared for checkpoints: %s", error)
            self._parts()
            return

        def prepare() -> None:
            writer.start(outline.effort)
            buffer.prepare()

        in_thread("checkpoint-memory", prepare)

    def has_room(self) -> bool:
        """Returns whether a checkpoint can be copied while another is written."""
        return False

    def begin(self, checkpoint: dict[str, Any], save: Save, state: State, logger: Logger) -> None:
        """Copies a checkpoint and begins to write it, after the one before; every rank must call it.

        Args:
            checkpoint: what `checkpoint_of` returned.
            save: where.
            state: the run.
            logger: its destinations.
        """
        if not self.takes_part:
            return
        pending, values = _Pending(save), self._own_part(checkpoint, state)
        if self.pending is None or self._spare is None:
            self._start(values, pending)
            self.pending = pending
            return
        try:
            snapshot, wait = self._spare.take(values)
        except NotEnoughMemoryError:  # The state has grown.
            pending.start = lambda: self._start(values, pending)
            self.waiting = pending
            self._counts.waited += 1
            self.settle(state, logger)
        else:
            pending.start = lambda: self._start_copied(snapshot, wait, pending)
            self.waiting = pending

    def advance(self, state: State, logger: Logger) -> None:
        """Hands the checkpoint that is being written on, or reports it, if it is done."""
        if self.pending is not None and self.is_done():
            self._finish(state, logger)

    def settle(self, state: State, logger: Logger, *, is_last: bool = False, is_all: bool = False) -> None:
        """Waits for the checkpoint that is being written, and hands it on or reports it.

        Args:
            state: the run.
            logger: its destinations.
            is_last: whether an error is raised, as no later checkpoint replaces this one.
            is_all: whether it waits for the one after it, too.
        """
        first = self.pending
        while self.pending is not None and (is_all or self.pending is first):
            if not self._has_come(self.pending.future, str(self.pending.save.path), self.seconds):
                self._give_up(self.pending)
            self._finish(state, logger, is_last=is_last)

    def end(self) -> None:
        """Ends the process that writes, and gives its memory back."""
        if self.pending is not None and not self.pending.future.done():
            self._give_up(self.pending)
        self.pending = self.waiting = None
        seconds = self._close_seconds
        if self._removal is not None and not self._has_come(self._removal, "old ones to be removed", seconds):
            _log.error("Old checkpoints were not removed within %.0f s.", seconds)
        writer, self._writer = self._writer, None
        buffers = self._buffer, self._spare
        self._buffer = self._spare = None
        if writer is not None:
            writer.close()
        for buffer in buffers:
            if buffer is not None:
                buffer.release()

    def look_for_delay(self) -> None:
        """Says once that the checkpoint for which others are left out takes longer than the limit."""
        pending = self.pending
        if pending is None or pending.is_late:
            return
        seconds = time.monotonic() - pending.started
        pending.is_late = seconds > self._close_seconds
        if pending.is_late:
            _log.warning(
                "Checkpoint %s is not written after %.0f s; others are left out until it is.",
                pending.save.path,
                seconds,
            )

    @abstractmethod
    def is_done(self) -> bool:
        """Returns whether what is being written is; every rank that takes part must call it."""

    @abstractmethod
    def close(self, state: State, logger: Logger) -> None:
        """Ends the checkpoint that is being written, where training has ended."""

    @abstractmethod
    def _own_part(self, checkpoint: Any, state: State) -> Any:
        """Returns what this rank writes of a checkpoint."""

    @abstractmethod
    def _request(self, snapshot: StateSnapshot, save: Save) -> Request:
        """Returns what is written in the background."""

    @abstractmethod
    def _write_here(self, values: Any, pending: _Pending) -> Callable[[], Written]:
        """Returns what writes values without a copy."""

    @abstractmethod
    def _step_ended(self, pending: _Pending) -> tuple[BaseException | None, bool]:
        """Returns why a step has failed, on any rank, and whether it was the last; else begins the next."""

    @abstractmethod
    def _files(self, pending: _Pending) -> dict[str, int | None]:
        """Returns the files of this rank by name, with their CRC-32 where it is known."""

    def _refuse_if_stuck(self, pending: _Pending) -> bool:
        """Fails a checkpoint, and returns True, while a thread still reads what was given up."""
        if self._stuck is None or self._stuck.done():
            return False
        reason = "one that was given up before is still being written, to a disk that does not answer"
        pending.future.set_exception(OSError(errno.EBUSY, reason))
        return True

    def _start_copied(self, snapshot: StateSnapshot, wait: Callable[[], None], pending: _Pending) -> None:
        """Begins to write what was copied to the second buffer."""
        buffer, writer = self._parts()
        if self._spare is not None and not self._refuse_if_stuck(pending):
            self._buffer, self._spare = self._spare, buffer
            request = self._request(snapshot, pending.save)
            pending.future = writer.write(request, self._buffer, wait, pending.is_wanted)

    def _start(self, values: Any, pending: _Pending) -> None:
        if self._refuse_if_stuck(pending):
            return
        if self._how.asynchronous:
            buffer, writer = self._parts()
            try:
                snapshot, wait = buffer.take(values)
            except NotEnoughMemoryError as error:
                self._counts.synchronous += 1
                if self._counts.synchronous == 1:
                    _log.warning("Training waits while checkpoints are written: %s.", error)
            else:
                request = self._request(snapshot, pending.save)
                pending.future = writer.write(request, buffer, wait, pending.is_wanted)
                return
        # Training waits, up to the limit: a dead disk may keep the thread.
        pending.future = in_thread("checkpoint-writer", self._write_here(values, pending))
        try:
            has_come = self._has_come(pending.future, str(pending.save.path), self.seconds)
        except BaseException:  # Ctrl-C.
            pending.given_up.set()
            raise
        if not has_come:
            self._give_up(pending)

    def _parts(self) -> tuple[SnapshotBuffer, BackgroundWriter]:
        if self._buffer is None or self._writer is None:
            self._buffer, self._writer = SnapshotBuffer(), BackgroundWriter(self._how.process_bytes)
        return self._buffer, self._writer

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

    def _give_up(self, pending: _Pending) -> None:
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
        reason = f"not written within {self.seconds:g} s (close_seconds){who}; is the disk there?"
        pending.future = concurrent.futures.Future()
        pending.future.set_exception(TimeoutError(errno.ETIMEDOUT, reason))

    def _finish(self, state: State, logger: Logger, *, is_last: bool = False) -> None:
        """Takes a step that is done: to the next, to the publisher, or to the log where it has failed."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        try:
            self._hand_on(pending, state, logger, is_last=is_last)
        finally:
            waiting, self.waiting = self.waiting, None
            if waiting is not None:
                waiting.start()
                self.pending = waiting

    def _hand_on(self, pending: _Pending, state: State, logger: Logger, *, is_last: bool) -> None:
        error, is_complete = self._step_ended(pending)
        if error is not None or is_complete:
            pending.save.end()
        if error is None and not is_complete:
            self.pending = pending
        elif error is None:
            self._counts.saved += 1
            self._publisher.publish(pending.save, self._files(pending), state, logger)
        else:
            self._counts.failed += 1
            newer = self._publisher.drop(pending.save, None if self.waiting is None else self.waiting.save)
            if self.waiting is not None and newer is not None:
                self.waiting.save = newer
            if is_last or not isinstance(error, OSError | CheckpointError | MemoryError):
                raise error
            _log.error(
                "Checkpoint %s could not be saved (%s); training continues.",
                pending.save.path,
                getattr(error, "strerror", None) or str(error) or type(error).__name__,
                exc_info=error,
            )


class FileWriter(_StateWriter):
    """Writes a checkpoint as one file, which has what is of all ranks; rank 0 does."""

    @property
    def takes_part(self) -> bool:
        """Whether this is rank 0."""
        return self._rank == 0

    def has_room(self) -> bool:
        """Returns whether a checkpoint can be copied while another is written.

        The first call makes the memory for it, in the background; where there is none, it says so.
        """
        if self._spare is None and self._buffer is not None:
            self._spare = SnapshotBuffer(self._buffer.available)
            try:
                self._spare.reserve(len(self._buffer.memory))
                self._spare_ready = in_thread("checkpoint-memory", self._spare.prepare)
            except NotEnoughMemoryError as error:
                _log.warning("Training waits for a checkpoint whenever the next is due: %s.", error)
            return False
        ready = self._spare_ready
        return self.waiting is None and ready is not None and ready.done()

    def is_done(self) -> bool:
        """Returns whether the file is written."""
        return self.pending is None or self.pending.future.done()

    def close(self, state: State, logger: Logger) -> None:
        """Waits for the file and for the one after it, up to `close_seconds`, and hands them on."""
        seconds = self._close_seconds
        end = time.monotonic() + seconds
        while (pending := self.pending) is not None:
            if self._has_come(pending.future, str(pending.save.path), max(0.0, end - time.monotonic())):
                self._finish(state, logger)
                continue
            self._give_up(pending)
            for one in filter(None, (pending, self.waiting)):
                text = "Checkpoint %s was not complete after %.0f s and is abandoned."
                _log.error(text, one.save.path, seconds)
                self._counts.failed += 1
            self.waiting = None
            return

    def _own_part(self, checkpoint: Any, state: State) -> Any:
        return checkpoint

    def _request(self, snapshot: StateSnapshot, save: Save) -> Request:
        return Request(snapshot, save.path, save.pointer, save.surplus)

    def _write_here(self, values: Any, pending: _Pending) -> Callable[[], Written]:
        plain, save = plain_values(values), pending.save
        return lambda: write_checkpoint(
            plain, save.path, pointer=save.pointer, surplus=save.surplus, is_wanted=pending.is_wanted
        )

    def _step_ended(self, pending: _Pending) -> tuple[BaseException | None, bool]:
        return pending.future.exception(), True

    def _files(self, pending: _Pending) -> dict[str, int | None]:
        return {pending.save.path.name: pending.future.result().crc32}


class ShardWriter(_StateWriter):
    """Writes a checkpoint as a folder of shards: each rank its own, then rank 0 the manifest."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._plan = ShardPlan(self._rank)

    @property
    def takes_part(self) -> bool:
        """True: each rank has a part."""
        return True

    def begin(self, checkpoint: dict[str, Any], save: Save, state: State, logger: Logger) -> None:
        """Copies the part of this rank and begins to write it."""
        # An older one of this name ends here: its files are replaced one by one.
        if self._rank == 0:
            with contextlib.suppress(OSError):
                save.path.unlink()
        super().begin(checkpoint, save, state, logger)

    def is_done(self) -> bool:
        """Returns whether the step is done on all ranks; a collective."""
        return not distributed.any_rank(self.pending is not None and not self.pending.future.done())

    def close(self, state: State, logger: Logger) -> None:
        """Abandons what is being written, if anything: to complete it would need the other ranks."""
        if self.pending is not None:
            _log.error(
                "Checkpoint %s was not complete on all ranks and is abandoned.", self.pending.save.path
            )
            self._counts.failed += 1

    def _own_part(self, checkpoint: Any, state: State) -> Any:
        model: Any = state.model
        return self._plan.divide(checkpoint, model)

    def _request(self, snapshot: StateSnapshot, save: Save) -> Request:
        return ShardRequest(snapshot, save.path, rank=self._rank)

    def _write_here(self, values: Any, pending: _Pending) -> Callable[[], Written]:
        tensors = [tensor.cpu() for tensor in values["tensors"]]
        plain = {"tensors": tensors, "rest": plain_values(values["rest"])}
        folder = pending.save.path.parent
        return lambda: write_shard(plain, folder, self._rank, pending.is_wanted)

    def _step_ended(self, pending: _Pending) -> tuple[BaseException | None, bool]:
        # Every rank gets an error, or none.
        save, error = pending.save, pending.future.exception()
        told = f"rank {self._rank}: {type(error).__name__}: {error}"
        answers = distributed.gather(pending.future.result() if error is None else told)
        failures = [one for one in answers if isinstance(one, str)]
        if failures:
            error = error or CheckpointError("; ".join(failures))
        # All have ended: nothing is written there any more.
        surplus = ((save.path, save.identifier),) if failures else save.surplus if pending.shards else ()
        if self._is_first_here and surplus:
            self._removal = in_thread("checkpoint-removal", lambda: remove_checkpoints(surplus))
        if failures or pending.shards:
            return error, True
        pending.shards = answers
        pending.future = in_thread("checkpoint-manifest", lambda: self._complete(pending))
        return None, False

    def _complete(self, pending: _Pending) -> None:
        if self._rank == 0:
            save = pending.save
            complete(
                save.path.parent,
                self._plan,
                pending.shards,
                save.pointer,
                json.loads(save.summary),
                is_wanted=pending.is_wanted,
            )

    def _files(self, pending: _Pending) -> dict[str, int | None]:
        own = files_of(pending.shards[self._rank], self._rank)
        of_all = {METADATA: None, MANIFEST: None} if self._rank == 0 else {}
        return {name: one.crc32 for name, one in own.items()} | of_all
