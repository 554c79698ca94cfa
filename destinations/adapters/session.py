"""One run of ours inside a trainer that is not ours: `State`, `Logger` and `Engine`, opened when they are first needed.

The adapters translate; this is what they translate to. Everything runs in the thread that trains.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from destinations.run_directory import RunDirectory
from events import (
    Callback,
    Destination,
    Engine,
    Event,
    Logger,
    Phase,
    RunStatus,
    State,
    Timestamp,
    format_run_name,
    new_run_name,
)

__all__ = ["Session", "SessionOwner", "length_of", "missing", "plain_values", "samples_in", "several"]


def missing(package: str, extra: str | None, error: ImportError) -> ImportError:
    """Returns an error that says what to install.

    Args:
        package: what could not be imported.
        extra: the extra of this project that brings it; None where it needs an environment of its own.
        error: what the import raised.
    """
    hint = (
        f"pip install 'training-destinations[{extra}]'"
        if extra
        else f"pip install {package}, in an environment of its own"
    )
    return ImportError(f"package {package!r} must be installed, got: {error}. {hint}", name=package)


def several(one_or_more: Any) -> tuple[Any, ...]:
    """Returns callbacks as a tuple, one or several as they were given."""
    return tuple(one_or_more) if isinstance(one_or_more, list | tuple | set) else (one_or_more,)


def length_of(dataloader: Any) -> int | None:
    """Returns the number of batches of a dataloader, or None where it has none, or none that is known."""
    try:
        return len(dataloader)
    except TypeError:
        return None


def samples_in(batch: Any) -> int:
    """Returns how many samples a batch has: the length of the first array in it, or 0 where there is none."""
    shape = getattr(batch, "shape", None)
    if shape is not None and not callable(shape):
        return int(shape[0]) if len(shape) else 0
    parts: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, list | tuple):
        parts = batch
    return next((count for count in map(samples_in, parts) if count), 0)


def plain_values(values: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the scalars of what a trainer logs, and everything else, which is no metric: strings, lists, None.

    Names that are no strings, which trainers let through, become strings.
    """
    metrics: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in values.items():
        (metrics if _is_scalar(value) else others)[str(name)] = value
    return metrics, others


def _is_scalar(value: Any) -> bool:
    if isinstance(value, bool | int | float):
        return True
    shape = getattr(value, "shape", None)
    return shape is not None and not isinstance(value, str) and all(size == 1 for size in shape)


class _Verdict(Callback):
    """Keeps a run from counting as completed that ended, nobody knows how, while it trained.

    A trainer that tells nobody of an exception leaves the close to the end of the interpreter, which knows of exceptions
    that nobody caught, but not of `sys.exit`, or of one that a notebook or a caller caught.
    """

    def __init__(self) -> None:
        self.is_fitting = False

    def close(self, state: State, logger: Logger) -> None:
        if self.is_fitting and state.status is RunStatus.COMPLETED:
            state.status = RunStatus.FAILED


class Session:
    """A run that opens when something happens in it, and may be opened again after it was closed.

    Trainers of others have no one moment at which a run ends: they fit, then test, then fit again. So a session that went
    well stays open, with its status set, until `close`, or the end of the interpreter; one that failed is closed at once.

    Args:
        destinations: where records go.
        callbacks: callbacks of ours that hear the events.
        run_name: the name of the run. Default: `RUN_NAME` of the environment, else the name of the folder of a
            `RunDirectory`, else a new one.
        raise_errors: lets what a destination raises come out, for tests.
    """

    def __init__(
        self,
        destinations: Iterable[Destination],
        callbacks: Iterable[Callback] = (),
        run_name: str | None = None,
        *,
        raise_errors: bool = False,
    ) -> None:
        self._destinations = tuple(destinations)
        self._callbacks = tuple(callbacks)
        self._raise_errors = raise_errors
        self._folder = next(
            (one.template for one in self._destinations if isinstance(one, RunDirectory)), None
        )
        given = run_name or os.environ.get("RUN_NAME") or self._name_of_folder()
        self._is_name_agreed = given is not None
        self._reset(given or new_run_name())

    def _name_of_folder(self) -> str | None:
        return None if self._folder is None or "{" in self._folder else Path(self._folder).name or None

    def _reset(self, run_name: str, timestamp: Timestamp | None = None) -> None:
        self.state = State(run_name, timestamp=timestamp or Timestamp())
        self._logger: Logger | None = None
        self._engine: Engine | None = None
        self._verdict = _Verdict()
        # The CHECKPOINT event that is due once evaluation and saving are over, which most trainers do not tell.
        self._due: Event | None = None
        # Whether the run was completed before what goes on now, and is again afterwards.
        self._was_completed = False
        self._mark = time.perf_counter()

    # --- life --------------------------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path | None:
        """The folder of the run, where a `RunDirectory` is among the destinations; asking does not make it."""
        return None if self._folder is None else Path(format_run_name(self._folder, self.state)).absolute()

    @property
    def is_open(self) -> bool:
        """Whether destinations are open."""
        return self._engine is not None and not self._engine.is_closed

    @property
    def is_fitting(self) -> bool:
        """Whether `FIT_START` came, and `FIT_END` did not yet."""
        return self._verdict.is_fitting

    @property
    def logger(self) -> Logger:
        """Where to log; opens the run."""
        if self._logger is None or not self.is_open:
            return self.open()
        return self._logger

    def open(self) -> Logger:
        """Opens the destinations, where they are not open, and runs `INIT`."""
        if self._logger is not None and self.is_open:
            return self._logger
        state = self.state
        _find_ranks(state)
        if state.world_size > 1 and not self._is_name_agreed:
            raise ValueError(
                f"run_name must be given where there are several ranks, got none for {state.world_size} ranks. "
                'Pass run_name="...", the same on each.'
            )
        state.status, state.exception = RunStatus.RUNNING, None
        self._verdict = _Verdict()
        self._logger = Logger(state, self._destinations, raise_errors=self._raise_errors)
        self._engine = Engine(state, self._logger, (*self._callbacks, self._verdict))
        with self._closing_on_error():
            self._engine.run_event(Event.INIT)
        return self._logger

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.close(error)
            raise

    def run_event(self, event: Event) -> None:
        """Runs an event, in a run that is opened for it if need be."""
        if self._engine is None or self._engine.is_closed:
            self.open()
        self._engine.run_event(event)  # type: ignore[union-attr]  # opened above

    def succeed(self) -> None:
        """Marks the run as completed and has everything written; it stays open for what may follow."""
        if self.is_open:
            self.state.status = RunStatus.COMPLETED
            self.logger.flush()

    def begin_stage(self) -> None:
        """Marks a run that was completed as running again; does nothing where it is not."""
        if self.is_open and self.state.status is RunStatus.COMPLETED:
            self.state.status, self._was_completed = RunStatus.RUNNING, True

    def _end_stage(self) -> None:
        if self._was_completed and self.state.status is RunStatus.RUNNING and not self.is_fitting:
            self.state.status = RunStatus.COMPLETED
        self._was_completed = False

    def close(self, exception: BaseException | None = None, status: RunStatus | None = None) -> None:
        """Closes the destinations; does nothing where they are closed, or were never opened.

        Args:
            exception: what ended the run, if something did.
            status: how it ended, where the exception does not say so by itself.
        """
        if self._engine is None or self._engine.is_closed:
            return
        if status is not None:
            self.state.status, self.state.exception = status, exception
        elif exception is not None:
            # An earlier `succeed` no longer holds.
            self.state.status = RunStatus.RUNNING
        self._engine.close(exception)
        self._due = None

    def __getstate__(self) -> dict[str, Any]:
        """Takes what the run is, and not what is open: a copy, in this process or another, opens by itself."""
        closed = Session.__new__(Session)
        closed.__dict__.update(self.__dict__)
        closed._reset(self.state.run_name, self.state.timestamp)  # noqa: SLF001  # of this class
        return closed.__dict__

    # --- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint must hold for the run to go on: plain values."""
        saved: dict[str, Any] = {}

        def keep(name: str, one: Any) -> None:
            if state := one.state_dict():
                saved[name] = state

        if self.is_open:
            self._each_stateful("state_dict", keep)
        return {"timestamp": self.state.timestamp.state_dict(), "callbacks": saved}

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned, and begins to train there."""
        self.fit_start(Timestamp.from_state_dict(saved["timestamp"]), saved)

    def load(self, saved: Mapping[str, Any]) -> None:
        """Gives callbacks and destinations what they keep in checkpoints."""
        states = saved["callbacks"]

        def give(name: str, one: Any) -> None:
            if name in states:
                one.load_state_dict(states[name])

        self._each_stateful("load_state_dict", give)

    def _each_stateful(self, action: str, call: Callable[[str, Any], None]) -> None:
        """Calls with each callback and destination, by names that are the same in the next session."""
        for callback in self._callbacks:
            call(_unique(type(callback).__name__, callback, self._callbacks), callback)
        for destination in self._destinations:
            name = _unique(type(destination).__name__, destination, self._destinations)
            self.logger.faults.guard(destination, action, call)(f"destination:{name}", destination)

    # --- events that move the timestamp ----------------------------------------------------------------------------------

    def fit_start(self, timestamp: Timestamp, saved: Mapping[str, Any] | None = None) -> None:
        """Begins to train: `BEFORE_LOAD`, `AFTER_LOAD`, `FIT_START`.

        Args:
            timestamp: where the trainer stands, which has loaded its checkpoint, if any, by now.
            saved: what `state_dict` returned for that checkpoint, if anything.
        """
        self.run_event(Event.BEFORE_LOAD)
        if saved is not None:
            self.load(saved)
        self.state.timestamp = timestamp
        self.run_event(Event.AFTER_LOAD)
        self.begin_fit()
        self.run_event(Event.FIT_START)
        self._mark = time.perf_counter()

    def begin_fit(self) -> None:
        """Marks the run as training."""
        self.state.begin_training()
        self._verdict.is_fitting = True

    def end_fit(self) -> None:
        """Marks training as ended as planned."""
        self._verdict.is_fitting = False

    def epoch_start(self, length: int | None = None) -> None:
        self.settle()
        self._read(Phase.TRAIN, "train", length)
        self.run_event(Event.EPOCH_START)

    def batch_start(self, batch: Any = None) -> None:
        self.settle()
        self.state.batch = batch
        self.run_event(Event.BATCH_START)
        self.run_event(Event.BEFORE_TRAIN_BATCH)

    def batch_end(self, samples: int = 0, tokens: int = 0, batch: int | None = None) -> None:
        """Counts a batch.

        Args:
            samples: how many samples it had, over all ranks.
            tokens: how many tokens it had, over all ranks.
            batch: how many batches the trainer says there were, where it counts them itself.
        """
        state = self.state
        timestamp = state.timestamp.to_next_batch(samples, tokens, self._lap())
        if batch is not None and timestamp.batch.value != batch:
            timestamp = timestamp.copy(batch=batch)
        state.timestamp = timestamp
        self.run_event(Event.BATCH_END)
        self._due = Event.BATCH_CHECKPOINT

    def epoch_end(self) -> None:
        self.settle()
        self.state.timestamp = self.state.timestamp.to_next_epoch(self._lap())
        self.run_event(Event.EPOCH_END)
        self._due = Event.EPOCH_CHECKPOINT

    def settle(self) -> None:
        """Runs the checkpoint event that is due, if one is."""
        due, self._due = self._due, None
        if due is not None:
            self.run_event(due)

    def fit_end(self) -> None:
        if not self.is_fitting:
            return
        self.settle()
        self.run_event(Event.FIT_END)
        self.end_fit()

    def eval_start(self, label: str = "eval", length: int | None = None) -> None:
        self.begin_stage()
        self.state.eval_timestamp = Timestamp()
        self._read(Phase.EVAL, label, length)
        self.run_event(Event.EVAL_START)

    def eval_batch_start(self, batch: Any = None) -> None:
        self.state.batch = batch
        self.run_event(Event.EVAL_BATCH_START)
        self.run_event(Event.EVAL_BEFORE_FORWARD)

    def eval_batch_end(self, samples: int = 0, outputs: Any = None) -> None:
        self.state.outputs = outputs
        self.run_event(Event.EVAL_AFTER_FORWARD)
        self.state.eval_timestamp = self.state.eval_timestamp.to_next_batch(samples)
        self.run_event(Event.EVAL_BATCH_END)

    def eval_end(self) -> None:
        self.run_event(Event.EVAL_END)
        self._read(Phase.TRAIN, "train", None)
        self._lap()  # The clock of the run counts training alone.
        self._end_stage()

    def predict_start(self, length: int | None = None) -> None:
        self.begin_stage()
        self.state.predict_timestamp = Timestamp()
        self._read(Phase.PREDICT, "predict", length)
        self.run_event(Event.PREDICT_START)

    def predict_batch_start(self, batch: Any = None) -> None:
        self.state.batch = batch
        self.run_event(Event.PREDICT_BATCH_START)
        self.run_event(Event.PREDICT_BEFORE_FORWARD)

    def predict_batch_end(self, samples: int = 0, outputs: Any = None) -> None:
        self.state.outputs = outputs
        self.run_event(Event.PREDICT_AFTER_FORWARD)
        self.state.predict_timestamp = self.state.predict_timestamp.to_next_batch(samples)
        self.run_event(Event.PREDICT_BATCH_END)

    def predict_end(self) -> None:
        self.run_event(Event.PREDICT_END)
        self._read(Phase.TRAIN, "train", None)
        self._lap()
        self._end_stage()

    def follow(self, step: int | None, epoch: float | None = None) -> None:
        """Moves the timestamp to what a record says, where no events come that would: the batches of a run only grow.

        Called after the record was logged: a destination that finds the first row of a resumed run beyond where the run
        stands knows by that that it was resumed.
        """
        timestamp = self.state.timestamp
        if step is not None and step > timestamp.batch.value:
            timestamp = timestamp.copy(batch=int(step))
        if epoch is not None and int(epoch) > timestamp.epoch.value:
            timestamp = timestamp.copy(epoch=int(epoch))
        self.state.timestamp = timestamp

    def _read(self, phase: Phase, label: str, length: int | None) -> None:
        state = self.state
        state.phase, state.dataloader_label, state.dataloader_len = phase, label, length

    def _lap(self) -> timedelta:
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        return timedelta(seconds=seconds)


class SessionOwner:
    """What a callback of a trainer that tells nobody of exceptions has for its user, who can."""

    _session: Session

    @property
    def logger(self) -> Logger:
        """Our own logger, with all that it can log."""
        return self._session.logger

    def close(self) -> None:
        """Ends the run: destinations write everything and close; the end of the program does it too."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._session.close(exception)


def _unique(name: str, one: object, others: Iterable[object]) -> str:
    """Returns a class name, with a number where an earlier object is of the same class."""
    alike = [other for other in others if type(other).__name__ == name]
    place = next(index for index, other in enumerate(alike) if other is one)
    return f"{name}#{place + 1}" if place else name


def _find_ranks(state: State) -> None:
    """Reads the ranks where the processes have found each other; launchers of frameworks may not tell the environment."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        state.rank, state.world_size = distributed.get_rank(), distributed.get_world_size()
