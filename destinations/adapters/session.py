"""`Session`: a run inside the trainer of another framework, with its `State`, `Logger` and `Engine`.

Adapters translate the hooks of a framework into calls of a session. Everything runs in the training thread.
"""

import itertools
import logging
import os
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from destinations.run_directory import RunDirectory
from destinations.run_directory.place import extended
from destinations.text.formatting import flattened
from events import (
    Callback,
    Destination,
    Engine,
    Event,
    LiteralName,
    Logger,
    Phase,
    RecordError,
    RunStatus,
    State,
    Timestamp,
    agree_on_name,
    agreed_run_name,
    new_run_name,
    state_keys,
)

__all__ = [
    "Session",
    "SessionContext",
    "SessionMixin",
    "as_tuple",
    "length_of",
    "log_values",
    "samples_in",
    "whole",
]


_log = logging.getLogger("destinations")

_NUMBERS = frozenset({bool, int, float})

# The sessions that have been opened, and not collected since.
_opened: "weakref.WeakSet[Session]" = weakref.WeakSet()


def as_tuple(one_or_more: Any) -> tuple[Any, ...]:
    """Returns one callback or a collection of callbacks as a tuple."""
    return tuple(one_or_more) if isinstance(one_or_more, list | tuple | set) else (one_or_more,)


def length_of(dataloader: Any) -> int | None:
    """Returns the number of batches of a dataloader, or None if unknown."""
    try:
        return len(dataloader)
    except TypeError:
        return None


def samples_in(batch: Any) -> int:
    """Returns the batch size: the length of the first array in a batch, or 0 if there is none."""
    shape = getattr(batch, "shape", None)
    if shape is not None and not callable(shape):
        return int(shape[0]) if len(shape) else 0
    parts: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, list | tuple):
        parts = batch
    return next((count for count in map(samples_in, parts) if count), 0)


def _is_scalar(value: Any) -> bool:
    if isinstance(value, bool | int | float):
        return True
    shape = getattr(value, "shape", None)
    return shape is not None and not isinstance(value, str) and all(size == 1 for size in shape)


def log_values(
    logger: Logger, values: Mapping[Any, Any], step: int | None, *, are_histograms: bool = False
) -> None:
    """Logs scalars as one record of metrics, strings as texts, and all other values as traces.

    Args:
        logger: of the run.
        values: by name; nested mappings are flattened.
        step: as for `Logger.log_metrics`.
        are_histograms: arrays and tensors of several values are histograms instead of traces.

    Raises:
        RecordError: a value cannot be logged, and the logger is strict; the others are logged.
    """
    if _NUMBERS.issuperset(map(type, values.values())):
        logger.log_metrics(values, step)
        return
    flat = flattened(values, "/", keeps_empty=False)
    metrics = {name: value for name, value in flat.items() if _is_scalar(value)}
    refusals: list[RecordError] = []

    def attempt(call: Callable[..., None], *arguments: Any, **named: Any) -> None:
        try:
            call(*arguments, **named)
        except RecordError as error:  # raised once the others are logged
            refusals.append(error)

    if metrics:
        attempt(logger.log_metrics, metrics, step)
    for name, value in flat.items():
        if name in metrics:
            continue
        if isinstance(value, str):
            attempt(logger.log_text, value, name=name, step=step)
        elif are_histograms and _is_array(value):
            attempt(logger.log_histogram, value, name=name, step=step)
        else:
            attempt(logger.log_traces, {name: value})
    if refusals:
        raise refusals[0]


def _is_array(value: Any) -> bool:
    shape = getattr(value, "shape", None)
    return shape is not None and bool(shape) and all(shape)


class _FitGuard(Callback):
    """Marks a run as failed that is closed during `fit` without a known exception.

    If a trainer does not report exceptions, the run is closed at interpreter exit, where only uncaught
    exceptions are known: not `sys.exit`, nor exceptions caught by a notebook or a caller.
    """

    def __init__(self, *, is_end_reported: bool) -> None:
        self.is_fitting = False
        self._is_end_reported = is_end_reported

    def close(self, state: State, logger: Logger) -> None:
        if self.is_fitting and self._is_end_reported and state.status is RunStatus.COMPLETED:
            state.status = RunStatus.FAILED


class Session:
    """A run that opens with the first event or record, and can be reopened after it was closed.

    Other trainers have no single end of a run: they fit, then test, then fit again. So after success a
    session stays open, with its status set, until `close` or interpreter exit; after a failure it is closed
    at once.

    **An earlier run** in the folder is continued if the other trainer resumed it: the adapter sets
    `state.continues_run` as soon as it knows, see `State`. Until then hyperparameters open no folder, and
    records go to a new run next to the earlier one. A session that was open before continues its own run.

    Args:
        destinations: destinations that receive the records.
        callbacks: one callback of this project, or several.
        run_name: name of the run. Default: environment variable `RUN_NAME`, else the folder name of a
            `RunDirectory`, else a generated name, on which the ranks of a `torchrun` agree; see
            `events.agreed_run_name`.
        raise_errors: raise errors of destinations instead of reporting them; for tests.
        is_end_reported: whether the trainer reports the end of training. If it does, a run that is closed
            before counts as failed; else only an exception counts as a failure.
        logger_type: the class of the run's logger.
    """

    def __init__(
        self,
        destinations: Iterable[Destination],
        callbacks: Callback | Iterable[Callback] = (),
        run_name: str | None = None,
        *,
        raise_errors: bool = False,
        is_end_reported: bool = True,
        logger_type: type[Logger] = Logger,
    ) -> None:
        self._logger_type = logger_type
        self._destinations = tuple(destinations)
        # Raises for an object that isn't a destination, here and not when training begins.
        Logger(State(""), self._destinations)
        self._callbacks = as_tuple(callbacks)
        self._raise_errors = raise_errors
        self._is_end_reported = is_end_reported
        self._directory = next((one for one in self._destinations if isinstance(one, RunDirectory)), None)
        self._folder = None if self._directory is None else self._directory.template
        # The folder of the first run, before `begin_new_run`.
        self._first_folder = self._folder
        given = run_name or os.environ.get("RUN_NAME") or self._name_of_folder() or agreed_run_name()
        self._is_name_agreed = given is not None
        self._first_name = given or new_run_name()
        self._reset(self._first_name)

    def _name_of_folder(self) -> str | None:
        if self._directory is None or self._folder is None or "{" in self._folder:
            return None
        folder = Path(self._folder.partition("?")[0] if "://" in self._folder else self._folder)
        # The folder of a named writer is in `writers/` of the run's folder.
        return (folder.parent.parent if self._directory.writer else folder).name or None

    def _reset(self, run_name: str, timestamp: Timestamp | None = None) -> None:
        self.state = State(run_name, timestamp=timestamp or Timestamp())
        self._was_open = False
        # The folder of the run when it was last read.
        self._last_folder: Path | None = None
        self._logger: Logger | None = None
        self._engine: Engine | None = None
        self._fit_guard = _FitGuard(is_end_reported=self._is_end_reported)
        # The checkpoint event to fire after evaluation and saving; most trainers have no hook for that.
        self._pending_checkpoint: Event | None = None
        # The files of checkpoints, by the names they were uploaded with, and names of those that are gone.
        self._uploaded: dict[str, Path] = {}
        self._gone: set[str] = set()
        # The run was completed before the current stage, and will be again after it.
        self._was_completed = False
        self._lap_started_at = time.perf_counter()
        # The thread that opened it, and the `id` of the last uncaught exception by then.
        self._thread = 0
        self._uncaught_before = 0

    # Lifecycle.

    answers_later = False
    """Whether the adapter decides for each stage whether it continues the run, even an open one."""

    @property
    def folder(self) -> Path | None:
        """The folder of the `RunDirectory` among the destinations, or None; does not create it."""
        directory = self._directory
        if directory is not None and self.is_open and not directory.is_undecided:
            self._last_folder = directory.run_dir
        return self.given_folder if self._last_folder is None else self._last_folder

    @property
    def given_folder(self) -> Path | None:
        """The folder given to the `RunDirectory`; a run beside an earlier one has a different folder."""
        return None if self._directory is None else self._directory.folder_of(self.state, self._folder)

    def choose_folder(self) -> None:
        """Opens the folder, if it is known by now whether an earlier run in it is continued."""
        if self._directory is not None and self.state.continues_run is not None:
            _ = self._directory.run_dir

    @property
    def is_in_store(self) -> bool:
        """Whether the run lives in a store."""
        return self._directory is not None and not self._directory.keeps_files_here

    @property
    def first_name(self) -> str:
        """The name of the first run; `begin_new_run` derives further names from it."""
        return self._first_name

    @property
    def is_open(self) -> bool:
        """Whether the destinations are open."""
        return self._engine is not None and not self._engine.is_closed

    @property
    def has_begun(self) -> bool:
        """Whether the destinations have been opened."""
        return self._engine is not None

    @property
    def is_fitting(self) -> bool:
        """Whether `FIT_START` has fired, but not yet `FIT_END`."""
        return self._fit_guard.is_fitting

    @property
    def logger(self) -> Logger:
        """The logger of the run; opens the run if needed."""
        if self._logger is None or not self.is_open:
            return self.open()
        return self._logger

    def open(self) -> Logger:
        """Opens the destinations and fires `INIT`; does nothing if they are open."""
        if self._logger is not None and self.is_open:
            return self._logger
        state = self.state
        self._close_predecessors()
        state.read_ranks()
        if not self._is_name_agreed:
            agree_on_name(state)
        if self._was_open:
            state.continues_run = None if self.answers_later else True
        self._was_open = True
        state.status, state.exception = RunStatus.RUNNING, None
        self._fit_guard = _FitGuard(is_end_reported=self._is_end_reported)
        if not self._destinations:
            _log.warning(
                "run %r has no destinations: nothing is logged. Give some where the logger or callback of "
                'your trainer is made, such as RunDirectory("runs/{run_name}").',
                state.run_name,
            )
        self._logger = self._logger_type(state, self._destinations, raise_errors=self._raise_errors)
        self._engine = Engine(state, self._logger, (*self._callbacks, self._fit_guard))
        self._thread, self._uncaught_before = threading.get_ident(), id(getattr(sys, "last_value", None))
        _opened.add(self)
        try:
            self._engine.run_event(Event.INIT)
        except BaseException as error:
            self.close(error)
            raise
        return self._logger

    def _close_predecessors(self) -> None:
        """Closes sessions that this thread left open on the same folder: a notebook cell was run again.

        A trainer whose `fit` has not returned cannot be running in this thread either.
        """
        folder = self.given_folder
        others = [one for one in _opened if one is not self and one.is_open and one.given_folder == folder]
        for other in others:
            if folder is None or other._thread != threading.get_ident():  # noqa: SLF001
                continue
            uncaught, place = getattr(sys, "last_value", None), other.folder
            is_new = other.is_fitting and id(uncaught) != other._uncaught_before  # noqa: SLF001
            other.close(uncaught if is_new else None)
            _log.warning(
                "the run in %s was still open, and is closed (%s): another logger of this process has begun "
                "a run in the same folder.",
                place,
                other.state.status,
            )

    def run_event(self, event: Event) -> None:
        """Fires an event; opens the run if needed."""
        if self._engine is None or self._engine.is_closed:
            self.open()
        self._engine.run_event(event)  # type: ignore[union-attr]  # opened above

    def succeed(self) -> None:
        """Marks the run as completed, or stopped for a reason, and flushes it, but leaves it open."""
        if self.is_open:
            self.state.end_training()
            self.logger.flush()

    def begin_new_run(self, suffix: str, tags: Iterable[str] = ()) -> None:
        """Closes the run; the next record or event opens another one, in a separate folder.

        Its name is the first run's with the suffix, which is also added to a folder without `{run_name}`. If
        that folder exists, a number is added.

        Args:
            suffix: distinguishes the run from the first one.
            tags: tags for a `RunDirectory`.
        """
        self.close()
        name, tries = f"{self._first_name}-{suffix}", 1
        while True:
            self._reset(name)
            if self._first_folder is not None and "{run_name}" not in self._first_folder:
                self._folder = extended(self._first_folder, name.removeprefix(self._first_name))
            # Several ranks must agree on the name, without asking each other.
            folder = self.given_folder
            if folder is None or not folder.exists() or self.state.world_size > 1:
                break
            tries += 1
            name = f"{self._first_name}-{suffix}-{tries}"
        if self._directory is not None and self._folder is not None:
            self._directory.move_to(self._folder, tags=tuple(tags))

    def begin_again(self) -> None:
        """Closes the run; the next record or event opens another one of this name, beside it."""
        self.close()
        self._reset(self.state.run_name)

    def begin_stage(self) -> None:
        """Marks a completed run as running again."""
        if self.is_open and self.state.status is RunStatus.COMPLETED:
            self.state.status, self._was_completed = RunStatus.RUNNING, True

    def close(self, exception: BaseException | None = None, status: RunStatus | str | None = None) -> None:
        """Closes the destinations; does nothing if they are not open.

        Args:
            exception: the exception that ended the run, if any.
            status: the final status, if the exception does not determine it.
        """
        if self._engine is None or self._engine.is_closed:
            return
        if self._directory is not None:
            self._last_folder = self._directory.run_dir
        if status is not None:
            self.state.status, self.state.exception = status, exception
        elif exception is not None:
            # An earlier `succeed` no longer holds.
            self.state.status = RunStatus.RUNNING
        self._engine.close(exception)
        self._pending_checkpoint = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state of a closed session: a copy, in this process or another, opens its own run."""
        closed = Session.__new__(Session)
        closed.__dict__.update(self.__dict__)
        closed._reset(self.state.run_name, self.state.timestamp)  # noqa: SLF001  # same class
        closed.state.continues_run = self._was_open or None
        return closed.__dict__

    # Checkpoints.

    def upload_checkpoint(
        self, path: Path, folder: Path, *, last: str = "", pointer: Path | None = None, link: bool = True
    ) -> None:
        """Passes a checkpoint, a file or a folder of files, to the destinations that take files.

        Uses hard links if possible, so that the bytes are on the disk once. So the other trainer must write
        each checkpoint to a new path, or replace it by renaming; a path that occurs again is copied. Files
        that the other trainer has deleted since are deleted in a `RunDirectory` too.

        Args:
            path: the checkpoint.
            folder: the folder that the other trainer saves to; a file goes to "checkpoints/", with its path
                below this folder.
            last: the name of the file that is uploaded last, and so marks a complete checkpoint.
            pointer: the path of a pointer to a single-file checkpoint, such as "last.ckpt", or None.
            link: whether it may be linked.
        """
        logger = self.open()
        for name, known in list(self._uploaded.items()):
            if name not in self._gone and not known.is_file():
                self._gone.add(name)
                logger.delete_file(LiteralName(name), local=True)
                logger.may_drop_files(LiteralName(name))
        inner = sorted(path.rglob("*"), key=lambda one: (one.name == last, one)) if path.is_dir() else [path]
        name = ""
        for one in inner:
            if one.is_symlink() or not one.is_file():
                continue
            name = self._checkpoint_name(one, folder)
            link = link and name not in self._uploaded
            logger.upload_file(LiteralName(name), one, overwrite=True, link=link)
            self._uploaded[name] = one
            self._gone.discard(name)
        if pointer and name:
            with tempfile.TemporaryDirectory(prefix="pointer-") as made:
                file = Path(made) / "pointer"
                file.write_text(name, encoding="utf-8")
                pointer_name = f"{self._checkpoint_name(pointer, folder)}.symlink"
                logger.upload_file(LiteralName(pointer_name), file, overwrite=True)

    def _checkpoint_name(self, path: Path, folder: Path) -> str:
        """Returns the name of a file of the other trainer: its path below the folder that it saves to.

        A file from another folder gets just its name. If another file has had that name, a number is added.
        """
        below = path.relative_to(folder) if path.is_relative_to(folder) else Path(path.name)
        name = first = Path("checkpoints", below)
        for number in itertools.count(2):
            if self._uploaded.get(name.as_posix(), path) == path:
                break
            name = first.with_stem(f"{first.stem}-{number}")
        return name.as_posix()

    def state_dict(self) -> dict[str, Any]:
        """Returns the checkpoint state: timestamp, callbacks and destinations, as plain values."""
        saved: dict[str, Any] = {}

        def keep(name: str, one: Any) -> None:
            if state := one.state_dict():
                saved[name] = state

        if self.is_open:
            self._for_each_stateful("state_dict", keep)
        return {"timestamp": self.state.timestamp.to_numbers(), "callbacks": saved}

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Resumes training from the result of `state_dict`."""
        self.fit_start(Timestamp.from_state_dict(saved["timestamp"]), saved)

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restores callbacks and destinations from the result of `state_dict`."""
        states = saved["callbacks"]

        def give(name: str, one: Any) -> None:
            if name in states:
                one.load_state_dict(states[name])

        self._for_each_stateful("load_state_dict", give)

    def _for_each_stateful(self, action: str, call: Callable[[str, Any], None]) -> None:
        """Calls `call` with each callback and destination, and a name that is stable across sessions."""
        for name, callback in state_keys(self._callbacks).items():
            call(name, callback)
        for name, destination in state_keys(self._destinations).items():
            self.logger.faults.guard(destination, action, call)(f"destination:{name}", destination)

    # Events that move the timestamp.

    def fit_start(
        self,
        timestamp: Timestamp,
        saved: Mapping[str, Any] | None = None,
        *,
        is_before_load_due: bool = True,
    ) -> None:
        """Starts training: fires `BEFORE_LOAD`, `AFTER_LOAD`, `FIT_START`.

        Args:
            timestamp: position of the trainer, after it has loaded its checkpoint, if any.
            saved: result of `state_dict` from that checkpoint, if any.
            is_before_load_due: whether `BEFORE_LOAD` has not fired yet.
        """
        if saved is not None or timestamp.batch > 0:
            self.state.continues_run = True
        if is_before_load_due:
            self.run_event(Event.BEFORE_LOAD)
        if saved is not None:
            self.load(saved)
        self.state.timestamp = timestamp
        self.run_event(Event.AFTER_LOAD)
        self.begin_fit()
        self.run_event(Event.FIT_START)
        self._lap_started_at = time.perf_counter()

    def begin_fit(self) -> None:
        """Marks the run as training."""
        self.state.begin_training()
        self._fit_guard.is_fitting = True

    def end_fit(self) -> None:
        """Marks training as ended regularly."""
        self._fit_guard.is_fitting = False

    def epoch_start(self, length: int | None = None) -> None:
        self.fire_pending_checkpoint()
        self._set_phase(Phase.TRAIN, "train", length)
        self.run_event(Event.EPOCH_START)

    def batch_start(self, batch: Any = None) -> None:
        self.fire_pending_checkpoint()
        self.state.batch = batch
        self.run_event(Event.BATCH_START)
        self.run_event(Event.BEFORE_TRAIN_BATCH)

    def batch_end(self, samples: int = 0, tokens: int = 0, batch: int | None = None) -> None:
        """Counts a batch.

        Args:
            samples: number of samples, over all ranks.
            tokens: number of tokens, over all ranks.
            batch: number of batches so far, if the trainer counts them itself.
        """
        state = self.state
        timestamp = state.timestamp.to_next_batch(samples, tokens, self._lap())
        if batch is not None and timestamp.batch.value != batch:
            timestamp = timestamp.copy(batch=batch)
        state.timestamp = timestamp
        self.run_event(Event.BATCH_END)
        self._pending_checkpoint = Event.BATCH_CHECKPOINT

    def epoch_end(self) -> None:
        self.fire_pending_checkpoint()
        self.state.timestamp = self.state.timestamp.to_next_epoch(self._lap())
        self.run_event(Event.EPOCH_END)
        self._pending_checkpoint = Event.EPOCH_CHECKPOINT

    def add_callback(self, callback: Callback) -> None:
        """Adds a callback to this run, open or not, and to those that are opened later."""
        self._callbacks = (*self._callbacks, callback)
        if self.is_open:
            self.logger.attach(callback)

    def fire_pending_checkpoint(self) -> None:
        """Fires the pending checkpoint event, if any."""
        due, self._pending_checkpoint = self._pending_checkpoint, None
        if due is not None:
            self.run_event(due)

    def fit_end(self) -> None:
        if not self.is_fitting:
            return
        self.fire_pending_checkpoint()
        self.run_event(Event.FIT_END)
        self.end_fit()

    def evaluation_start(self) -> None:
        """Fires the event before the first dataloader of an evaluation, inside of `fit` or on its own."""
        self.run_event(Event.EVAL_BEFORE_ALL if self.is_fitting else Event.EVAL_STANDALONE_START)

    def evaluation_end(self) -> None:
        """Fires the event after the last dataloader of an evaluation."""
        self.run_event(Event.EVAL_AFTER_ALL if self.is_fitting else Event.EVAL_STANDALONE_END)

    def stage_start(self, phase: Phase, label: str, length: int | None = None) -> None:
        """Starts an evaluation of one dataloader, or a prediction.

        Args:
            phase: which of the two it is; the three methods below take it from the state.
            label: label of the dataloader.
            length: its number of batches, if known.
        """
        self.begin_stage()
        setattr(self.state, f"{phase}_timestamp", Timestamp())
        self._set_phase(phase, label, length)
        self.run_event(Event(f"{phase}_start"))

    def stage_batch_start(self, batch: Any = None) -> None:
        self.state.batch = batch
        self.run_event(Event(f"{self.state.phase}_batch_start"))
        self.run_event(Event(f"{self.state.phase}_before_forward"))

    def stage_batch_end(self, samples: int = 0, outputs: Any = None) -> None:
        """Counts a batch of the stage; `samples` is the total over all ranks."""
        state, clock = self.state, f"{self.state.phase}_timestamp"
        state.outputs = outputs
        self.run_event(Event(f"{state.phase}_after_forward"))
        setattr(state, clock, getattr(state, clock).to_next_batch(samples))
        self.run_event(Event(f"{state.phase}_batch_end"))

    def stage_end(self) -> None:
        """Ends an evaluation or prediction, and goes back to training."""
        self.run_event(Event(f"{self.state.phase}_end"))
        self._set_phase(Phase.TRAIN, "train", None)
        self._lap()  # Wall-clock times of the run count only training.
        if self._was_completed and self.state.status is RunStatus.RUNNING and not self.is_fitting:
            self.state.status = RunStatus.COMPLETED
        self._was_completed = False

    def advance_to(self, step: Any, epoch: Any = None) -> None:
        """Advances the timestamp to a record's, for trainers without loop events; never goes back.

        Values that are no numbers are ignored: the logger reports them.
        """
        timestamp = self.state.timestamp
        self.state.timestamp = timestamp.copy(
            batch=max(timestamp.batch.value, whole(step, 0)),
            epoch=max(timestamp.epoch.value, whole(epoch, 0)),
        )

    def _set_phase(self, phase: Phase, label: str, length: int | None) -> None:
        state = self.state
        state.phase, state.dataloader_label, state.dataloader_len = phase, label, length

    def _lap(self) -> timedelta:
        now = time.perf_counter()
        seconds, self._lap_started_at = now - self._lap_started_at, now
        return timedelta(seconds=seconds)


class SessionContext:
    """Mixin with the `with` statement, which ends the run."""

    _session: Session

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end(exception)

    def _end(self, exception: BaseException | None) -> None:
        self._session.close(exception)


class SessionMixin(SessionContext):
    """Mixin with `logger` and `close` too, for trainers that do not report exceptions."""

    @property
    def logger(self) -> Logger:
        """The `Logger` of the run, with all its methods."""
        return self._session.logger

    def close(self) -> None:
        """Ends the run: flushes and closes the destinations. Also done at interpreter exit."""
        self._session.close()


def whole(value: Any, default: int) -> int:
    """Returns a step or an epoch as a number; the default for anything else, which the logger reports."""
    try:
        return int(value)
    except (OverflowError, RuntimeError, TypeError, ValueError):
        return default
