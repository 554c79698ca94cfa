"""`Run`: state, logger and engine as one context manager, for a training loop of your own."""

import difflib
import functools
import inspect
import itertools
import logging
import os
import secrets
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Never, Self

from .callback import Callback
from .engine import Engine
from .errors import RecordError, without_own_frames
from .event import Event
from .logger.destination import Destination
from .logger.device import DeviceCopies
from .logger.logger import Logger
from .logger.records import RecordMethods
from .names import check_unknown
from .state import Phase, State
from .timestamp import Time, Timestamp

__all__ = ["Run", "agreed_run_name", "is_restarted_job", "new_run_name"]

_log = logging.getLogger("events")


def new_run_name() -> str:
    """Returns `$RUN_NAME`, or a new name that sorts by time, such as "20260314-092653-3f9a01c2".

    ```python
    folder = Path("runs") / new_run_name()
    ```

    A thousand runs started within one second collide with a probability of 1 in 9,000.
    """
    return os.environ.get("RUN_NAME") or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


# After this many calls with the same first name at one step, a run warns that its step doesn't move.
_CALLS_AT_ONE_STEP = 100
_MAX_NAMES_AT_ONE_STEP = 1000

# Runs of this process without a given name: the n-th of each rank is the same run, also after a restart.
_unnamed_runs = itertools.count()
_AGREE_SECONDS = 60.0


def agreed_run_name(timeout_s: float = _AGREE_SECONDS) -> str | None:
    """Returns a run name that is the same on all ranks; None if the ranks have no way to agree on one.

    ```python
    run_name = agreed_run_name() or new_run_name()     # the same on all ranks of a torchrun
    ```

    It is `$RUN_NAME`, or else what the first rank proposes in the store of torchrun's agent, or of the
    process group. The agent's outlives ranks that are restarted, which therefore continue the same run. No
    collective is entered; each rank asks once for each run.

    Args:
        timeout_s: how long the store may take.

    Raises:
        TimeoutError: the store did not answer.
    """
    if name := os.environ.get("RUN_NAME"):
        return name
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and port.isdecimal()
    distributed: Any = sys.modules.get("torch.distributed")
    if not has_agent and not getattr(distributed, "is_initialized", bool)():
        return None
    try:
        if has_agent:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it

            wait = timedelta(seconds=timeout_s)
            store: Any = TCPStore(host, int(port), is_master=False, timeout=wait)
        else:
            store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001  # there is no other
        if store is None:  # MPI's backend has none
            return None
        key = f"training-destinations/run-name/{next(_unnamed_runs)}"
        # Sets the name if there is none, and returns the one that is set.
        return bytes(store.compare_set(key, "", new_run_name())).decode()
    except RuntimeError as error:
        raise TimeoutError(
            f"ranks could not agree on a run name through the store at {host}:{port} within {timeout_s:g} s. "
            'Pass run_name="...", or set RUN_NAME, the same on each rank.'
        ) from error


def is_restarted_job() -> bool:
    """Returns whether a scheduler has restarted this job.

    Slurm sets `SLURM_RESTART_COUNT` for a requeued job, and `torchrun` sets `TORCHELASTIC_RESTART_COUNT` for
    restarted workers.

    ```python
    if is_restarted_job():
        print("the last checkpoint of this job is loaded")
    ```
    """
    counts = (os.environ.get(f"{name}_RESTART_COUNT", "") for name in ("SLURM", "TORCHELASTIC"))
    return any(count.isdecimal() and int(count) for count in counts)


def agree_on_name(state: State) -> None:
    """Gives an unnamed run the same name on all ranks.

    ```python
    agree_on_name(State(new_run_name()))            # nothing to agree on: there is one rank
    ```

    Raises:
        ValueError: the ranks have no way to agree.
        TimeoutError: as `agreed_run_name`.
    """
    if state.world_size > 1:
        if (name := agreed_run_name()) is None:
            raise ValueError(
                f"run_name must be given with several ranks ({state.world_size}, "
                f'{state.found_ranks.source}). Pass run_name="...", the same on each, set RUN_NAME, or start '
                "them with torchrun."
            )
        state.run_name = name


# The other methods of records call `log_record`.
_LOGGER_METHODS = (
    "log_metrics",
    "log_scalar",
    "log_hyperparameters",
    "log_record",
    "upload_file",
    "download_file",
    "flush",
    "namespace",
)


# What other loggers call it.
_OTHER_NAMES = {
    "add_audio": "log_audio",
    "add_histogram": "log_histogram",
    "add_image": "log_images",
    "add_scalar": "log_scalar",
    "add_scalars": "log_metrics",
    "add_text": "log_text",
    "config": "log_hyperparameters",
    "finish": "close",
    "log": "log_metrics",
    "log_artifact": "upload_file",
    "log_dict": "log_metrics",
    "log_image": "log_images",
    "log_metric": "log_scalar",
    "log_param": "log_hyperparameters",
    "log_params": "log_hyperparameters",
    "save": "upload_file",
    "stop": "state.stop_training",
}
_OF_FOLDER = "It is an argument of RunDirectory: loggers=[RunDirectory(..., {})]."
_OTHER_ARGUMENTS = {
    "config": "Call run.log_hyperparameters({...}).",
    "name": "Did you mean 'run_name'?",
    "note": _OF_FOLDER.format('notes="..."'),
    "notes": _OF_FOLDER.format('notes="..."'),
    "tag": _OF_FOLDER.format("tags=[...]"),
    "tags": _OF_FOLDER.format("tags=[...]"),
}


def _warn_unclosed(state: State, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        _log.warning(
            "run %r was not closed: it is closed now. Write `with Run(...) as run:`, or call run.close().",
            state.run_name,
        )


class Run(RecordMethods):
    """A run in a training loop of your own.

    ```python
    with Run(loggers=[InMemory()], run_name="mine") as run:
        run.log_hyperparameters({"lr": 0.1})
        for batch in train_dataloader:
            run.batch_start(batch)
            ...
            run.log_metrics({"loss": 0.5})
            run.batch_end()
    ```

    Without a `with` block, the run begins at its first use, and is closed by `close`, or when the object is
    garbage-collected or the program exits, with a warning.

    `INIT` runs when the block is entered, `FIT_START` when training begins: at `fit_start`, or the first
    `epoch_start`, `batch_start` or `batch_end`. A run that is reopened for an evaluation has no `FIT_START`,
    and keeps its training records. `FIT_END` runs when the block ends without an exception after training has
    begun. The run is closed in any case; then `run.state.status` is completed, stopped, failed,
    interrupted (Ctrl-C) or preempted.

    All `log_*` methods, `upload_file`, `download_file`, `flush` and `namespace` are the same as in `Logger`.
    The methods below update the timestamp and run the matching events; run any other event with `run_event`.

    **Threading.** Use it in the thread that trains; see `Logger`.

    Args:
        loggers: the destinations.
        callbacks: the other callbacks.
        run_name: the name of the run. Default: the environment variable `RUN_NAME`, else a new one. Ranks of
            a `torchrun` or of a process group agree on it, see `agreed_run_name`; other ranks need one of the
            two. `find_ranks` finds the ranks when the run begins.
        max_duration: when training ends, for progress displays; `run.state.is_done` tells whether it has.
        train_dataloader: the dataloader of your loop, for progress displays.
        model: the model, for callbacks that use it.
        optimizers: the optimizers, for callbacks that use them.
        raise_errors: raises the exceptions of destinations, for tests.
        strict: raises `RecordError` for values that cannot be logged, for tests and notebooks.
        namespace: prefixes the names of all metrics and records; see `Logger`.
        device_copies: how values are copied from a device.
        unknown: must be empty; an unknown argument raises a `TypeError` that suggests the nearest one.

    Raises:
        ValueError: there are several ranks without a `run_name` and without a way to agree on one.
        TimeoutError: the store of torchrun did not answer within a minute.
    """

    # Whether to warn if it is not closed; programs written for other loggers may never close one.
    warns_of_close: ClassVar[bool] = True

    def __init__(
        self,
        loggers: Destination | Iterable[Destination] | None = None,
        callbacks: Callback | Iterable[Callback] = (),
        run_name: str | None = None,
        *,
        max_duration: str | int | Time | None = None,
        train_dataloader: Any = None,
        model: Any = None,
        optimizers: Any = (),
        raise_errors: bool = False,
        strict: bool = False,
        namespace: str = "",
        device_copies: DeviceCopies = DeviceCopies(),  # noqa: B008  # frozen
        **unknown: Any,
    ) -> None:
        check_unknown("Run", unknown, inspect.signature(type(self)).parameters, _OTHER_ARGUMENTS)
        name_given = run_name or agreed_run_name()
        self.state = State(
            name_given or new_run_name(),
            None if max_duration is None else Time.from_input(max_duration, "ep"),
            train_dataloader=train_dataloader,
            model=model,
            optimizers=optimizers,
        )
        self._has_name = name_given is not None
        if not self._has_name:
            agree_on_name(self.state)
        self.logger = Logger(
            self.state,
            loggers,
            raise_errors=raise_errors,
            strict=strict,
            namespace=namespace,
            device_copies=device_copies,
        )
        several = (callbacks,) if isinstance(callbacks, Callback) else tuple(callbacks)
        self.engine = Engine(self.state, self.logger, several)
        self._lap_start = time.perf_counter()
        self._is_open = False
        self._has_begun = False
        # The logger's own methods, not wrappers, which would make each call slower.
        self.log_hyperparameters = self.logger.log_hyperparameters
        self.log_metrics = self.logger.log_metrics
        self.log_scalar = self.logger.log_scalar
        self.log_record = self.logger.log_record  # type: ignore[method-assign]  # as the others
        self.upload_file = self.logger.upload_file
        self.download_file = self.logger.download_file
        self.flush = self.logger.flush
        self.namespace = self.logger.namespace
        # Until then, each of them begins the run.
        for method in _LOGGER_METHODS:
            setattr(self, method, functools.partial(self._begin_with, method))
        self._unclosed: weakref.finalize[..., Run] | None = None
        # How often each name was logged while no batch has ended and no step was given; None afterwards.
        self._first_step: Counter[str] | None = Counter()

    def span(self, name: str) -> AbstractContextManager[None]:
        """Keeps the time of a block for the trace of the run; see `Logger.span`."""
        return self.logger.span(name)

    def run_event(self, event: Event | str) -> None:
        """Runs any event; see `Engine.run_event`."""
        self._begin()
        if event != Event.INIT:
            self.engine.run_event(event)

    def fit_start(self, *, epoch: int | None = None, batch: int | None = None) -> None:
        """Begins training; a second call does nothing. `epoch_start`, `batch_start` and `batch_end` call it.

        Call it in a loop that calls none of these, and in one that resumes from a checkpoint: the run in the
        folder is continued, and its records of this batch and later ones become a branch.

        ```python
        with Run(loggers=[RunDirectory("runs/mine")], run_name="mine", max_duration="5ep") as run:
            run.fit_start(epoch=saved["epoch"], batch=saved["batch"])
            for epoch in range(saved["epoch"], 5):
                run.epoch_start()
        ```

        Without a number, training begins at 0, and an earlier run is not continued. With `batch=0` it begins
        at 0 too, as the run did that did not complete: that one is continued, and what it logged becomes a
        branch. A completed run is left alone then.

        Args:
            epoch: how many epochs are done.
            batch: how many batches are done, in all epochs: the step of the next record.

        Raises:
            ValueError: training has begun already, or a count is negative.
        """
        is_named = epoch is not None or batch is not None
        epoch, batch = epoch or 0, batch or 0
        if min(epoch, batch) < 0:
            raise ValueError(f"epoch and batch must be 0 or more, got epoch={epoch}, batch={batch}.")
        if self._has_begun and (epoch or batch):
            raise ValueError(
                "training has begun: call fit_start(epoch=..., batch=...) before its first batch."
            )
        self._begin()
        if not self._has_begun:
            if epoch or batch:
                self.state.timestamp = Timestamp.from_state_dict({"epoch": epoch, "batch": batch})
                self.state.continues_run = True
            elif is_named:
                self.state.continues_run = self.state.continues_run or "unless completed"
            else:
                self.state.continues_run = bool(self.state.continues_run)
            self._has_begun = True
            self.engine.run_event(Event.FIT_START)
            self._lap()

    def epoch_start(self, length: int | None = None) -> None:
        """Begins an epoch.

        Args:
            length: its number of batches. Default: the length of the dataloader, if it has one.
        """
        self._set_dataloader(self.state.train_dataloader, Phase.TRAIN, "train", length)
        self.fit_start()
        self.engine.run_event(Event.EPOCH_START)

    def batch_start(self, batch: Any = None) -> None:
        """Begins a training batch.

        Args:
            batch: the batch, for callbacks that use it.
        """
        self.fit_start()
        self.state.batch = batch
        self.engine.run_event(Event.BATCH_START)

    def batch_end(self, samples: int = 0, tokens: int = 0) -> None:
        """Counts a training batch as completed.

        Args:
            samples: its number of samples, over all ranks.
            tokens: its number of tokens, over all ranks.
        """
        self.fit_start()
        if self._first_step is not None:
            self._end_step_check()
        self.state.timestamp = self.state.timestamp.to_next_batch(samples, tokens, self._lap())
        self.engine.run_event(Event.BATCH_END)
        self.engine.run_event(Event.BATCH_CHECKPOINT)

    def epoch_end(self) -> None:
        """Counts an epoch as completed."""
        self.state.timestamp = self.state.timestamp.to_next_epoch(self._lap())
        self.engine.run_event(Event.EPOCH_END)
        self.engine.run_event(Event.EPOCH_CHECKPOINT)

    def eval_start(self, label: str = "eval", length: int | None = None) -> None:
        """Begins an evaluation.

        Args:
            label: the label of the evaluation data.
            length: its number of batches, if known.
        """
        self._begin()
        self.state.eval_timestamp = Timestamp()
        self._set_dataloader(None, Phase.EVAL, label, length)
        self.engine.run_event(Event.EVAL_START)

    def eval_batch_start(self, batch: Any = None) -> None:
        """Begins an evaluation batch.

        Args:
            batch: the batch, for callbacks that use it.
        """
        self.state.batch = batch
        self.engine.run_event(Event.EVAL_BATCH_START)

    def eval_batch_end(self, samples: int = 0) -> None:
        """Counts an evaluation batch as completed.

        Args:
            samples: its number of samples, over all ranks.
        """
        self.state.eval_timestamp = self.state.eval_timestamp.to_next_batch(samples)
        self.engine.run_event(Event.EVAL_BATCH_END)

    def eval_end(self) -> None:
        """Ends an evaluation; log its metrics before this call."""
        self.engine.run_event(Event.EVAL_END)
        self._set_dataloader(self.state.train_dataloader, Phase.TRAIN, "train", None)
        self._lap()  # Evaluation does not count as training time.

    def close(self, exception: BaseException | None = None) -> None:
        """Closes callbacks and destinations, as the end of a `with` block does; a second call does nothing.

        Args:
            exception: what ended the run, if anything.

        Raises:
            Exception: the first that a callback raised in its `close`.
        """
        if self._unclosed is not None:
            self._unclosed.detach()
        self._bind_logger()
        self.engine.close(exception)

    def __reduce__(self) -> Never:
        """Raises TypeError: another process needs a run of its own."""
        self.logger.__reduce__()

    if not TYPE_CHECKING:  # which would then take any name

        def __getattr__(self, name: str) -> Any:
            """Suggests the method for the name that another logger uses."""
            known = [one for one in dir(type(self)) if not one.startswith("_")] + [*_LOGGER_METHODS]
            near = _OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(name, known, 1, 0.7)), "")
            hint = f" Did you mean run.{near}?" if near and not name.startswith("_") else ""
            raise AttributeError(f"a Run has no {name!r}.{hint}", name=name, obj=self)

    def _begin(self) -> None:
        """Runs `INIT`, once."""
        if self._is_open:
            return
        self.state.read_ranks()
        if not self._has_name:
            agree_on_name(self.state)
        self._is_open = True
        if self.warns_of_close:
            self._unclosed = weakref.finalize(self, _warn_unclosed, self.state, os.getpid())
        self._bind_logger()
        try:
            self._set_dataloader(self.state.train_dataloader, Phase.TRAIN, "train", None)
            self.engine.run_event(Event.INIT)
        except BaseException as error:
            self.close(error)
            if isinstance(error, RecordError):
                raise without_own_frames(error) from None
            raise
        self._lap()

    def _begin_with(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Begins the run, and calls a method of the logger."""
        if not self.engine.is_closed:
            self._begin()
        return getattr(self.logger, method)(*args, **kwargs)

    def _bind_logger(self) -> None:
        for method in _LOGGER_METHODS:
            setattr(self, method, getattr(self.logger, method))
        if self._first_step is not None and not self.engine.is_closed:
            self.log_metrics = self._log_first_metrics

    def _log_first_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Logs metrics until the step first moves; warns once if it never does."""
        self.logger.log_metrics(metrics, step)
        names = self._first_step
        if names is None:
            return
        first = next(iter(metrics), None) if isinstance(metrics, Mapping) else None
        if step is not None or len(names) >= _MAX_NAMES_AT_ONE_STEP or int(self.state.timestamp.batch):
            self._end_step_check()
        elif isinstance(first, str) and self.state.phase is Phase.TRAIN:
            names[first] += 1
            if names[first] == _CALLS_AT_ONE_STEP:
                self._end_step_check()
                _log.warning(
                    "metric %r was logged %d times at step 0: the step moves only with run.batch_end(). "
                    "Call it after each batch, or pass the step: log_metrics({...}, step=...).",
                    first,
                    _CALLS_AT_ONE_STEP,
                )

    def _end_step_check(self) -> None:
        """Binds the logger's own method, which is faster."""
        self._first_step = None
        self.log_metrics = self.logger.log_metrics

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exception is not None or self.engine.is_closed:
            self.close(exception)
            return
        try:
            if self._has_begun:
                self.engine.run_event(Event.FIT_END)
        except BaseException as error:
            self.close(error)
            raise
        self.state.end_training()
        self.close()

    def _set_dataloader(self, dataloader: Any, phase: Phase, label: str, length: int | None) -> None:
        if length is None and hasattr(dataloader, "__len__"):
            length = len(dataloader)
        state = self.state
        state.dataloader, state.dataloader_label, state.dataloader_len = dataloader, label, length
        state.phase = phase

    def _lap(self) -> timedelta:
        now = time.perf_counter()
        seconds, self._lap_start = now - self._lap_start, now
        return timedelta(seconds=seconds)
