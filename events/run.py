"""A run for a loop of your own: `State`, `Logger` and `Engine` as one context manager."""

import os
import secrets
import time
from collections.abc import Iterable
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from .callback import Callback
from .engine import Engine
from .event import Event
from .logger.destination import Destination
from .logger.device import DeviceCopies
from .logger.logger import Logger
from .state import Phase, RunStatus, State
from .timestamp import Time, Timestamp

__all__ = ["Run", "new_run_name"]


def new_run_name() -> str:
    """Returns `RUN_NAME` of the environment, or a new name that sorts by time: "20260314-092653-3f9a01c2".

    Of a thousand runs that begin in one second, two share a name once in nine thousand such seconds.
    """
    return os.environ.get("RUN_NAME") or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


class Run:
    """What a loop of your own needs to be heard.

    ```python
    with Run(loggers=[InMemory()], run_name="mine") as run:
        run.log_hyperparameters({"lr": 0.1})
        for batch in loader:
            run.batch_start(batch)
            ...
            run.log_metrics({"loss": loss})
            run.batch_end()
    ```

    `INIT` comes where the block is entered, `FIT_START` where training begins: at the first `epoch_start`, `batch_start` or
    `batch_end`, or at `fit_start`. A run that is opened again for an evaluation alone has none, and keeps what training
    logged. `FIT_END` comes where the block is left without an exception and training has begun, close in any case; then
    `run.state.status` says how the run ended: completed, failed, interrupted by Ctrl-C, or preempted.

    All `log_*` methods, `upload_file`, `download_file`, `flush` and `namespace` are those of `Logger`. The methods below move the
    timestamp and run the events that belong to it; whatever other event your loop has, run it with `run_event`.

    **Threading.** Use it from one thread.

    Args:
        loggers: the destinations.
        callbacks: who else reacts to events.
        run_name: the name of the run. Default: `RUN_NAME` of the environment, else a new one. With several ranks it must
            be given, for they cannot agree on a new one without waiting for each other.
        max_duration: when training ends, for whoever shows progress; `run.state.is_done` says whether it has.
        train_dataloader: what your loop reads, for whoever shows progress.
        model: the model, for callbacks that look at it.
        optimizers: the optimizers, likewise.
        raise_errors: lets what a destination raises come out, for tests.
        name: stands before the name of each metric and record; see `Logger`.
        device_copies: how values come from a device.

    Raises:
        ValueError: there are several ranks and no name.
    """

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
        name: str = "",
        device_copies: DeviceCopies = DeviceCopies(),  # noqa: B008  # frozen
    ) -> None:
        self.state = State(
            run_name or new_run_name(),
            None if max_duration is None else Time.from_input(max_duration, "ep"),
            train_dataloader=train_dataloader,
            model=model,
            optimizers=tuple(optimizers) if isinstance(optimizers, list | tuple) else (optimizers,),
        )
        if self.state.world_size > 1 and run_name is None:
            raise ValueError(
                f"run_name must be given where there are several ranks, got none for {self.state.world_size} ranks. "
                'Pass run_name="...", the same on each.'
            )
        self.logger = Logger(
            self.state, loggers, raise_errors=raise_errors, name=name, device_copies=device_copies
        )
        several = (callbacks,) if isinstance(callbacks, Callback) else tuple(callbacks)
        self.engine = Engine(self.state, self.logger, several)
        self._mark = time.perf_counter()
        self._has_begun = False
        # The logger's own methods, not wrappers: a metrics call costs the same here as there.
        self.log_hyperparameters = self.logger.log_hyperparameters
        self.log_metrics = self.logger.log_metrics
        self.log_scalar = self.logger.log_scalar
        self.log_table = self.logger.log_table
        self.log_images = self.logger.log_images
        self.log_text = self.logger.log_text
        self.log_audio = self.logger.log_audio
        self.log_video = self.logger.log_video
        self.log_histogram = self.logger.log_histogram
        self.log_point_cloud = self.logger.log_point_cloud
        self.log_traces = self.logger.log_traces
        self.upload_file = self.logger.upload_file
        self.download_file = self.logger.download_file
        self.flush = self.logger.flush
        self.namespace = self.logger.namespace

    def run_event(self, event: Event | str) -> None:
        """Runs any event; see `Engine.run_event`."""
        self.engine.run_event(event)

    def fit_start(self) -> None:
        """Begins training, once; the first `epoch_start`, `batch_start` or `batch_end` does so too.

        Only a loop that logs and calls none of these needs it: destinations that continue a run take what training will
        go through again out of it here.
        """
        if not self._has_begun:
            self._has_begun = True
            self.engine.run_event(Event.FIT_START)
            self._lap()

    def epoch_start(self, length: int | None = None) -> None:
        """Begins an epoch.

        Args:
            length: how many batches it has; default: what the dataloader says, if anything.
        """
        self._read(self.state.train_dataloader, Phase.TRAIN, "train", length)
        self.fit_start()
        self.engine.run_event(Event.EPOCH_START)

    def batch_start(self, batch: Any = None) -> None:
        """Begins a training batch.

        Args:
            batch: what is trained on, for callbacks that look at it.
        """
        self.fit_start()
        self.state.batch = batch
        self.engine.run_event(Event.BATCH_START)

    def batch_end(self, samples: int = 0, tokens: int = 0) -> None:
        """Counts a training batch as completed.

        Args:
            samples: how many samples it had, over all ranks.
            tokens: how many tokens it had, over all ranks.
        """
        self.fit_start()
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
            label: what is evaluated on.
            length: how many batches it has, if that is known.
        """
        self.state.eval_timestamp = Timestamp()
        self._read(None, Phase.EVAL, label, length)
        self.engine.run_event(Event.EVAL_START)

    def eval_batch_start(self, batch: Any = None) -> None:
        """Begins an evaluation batch.

        Args:
            batch: what is evaluated, for callbacks that look at it.
        """
        self.state.batch = batch
        self.engine.run_event(Event.EVAL_BATCH_START)

    def eval_batch_end(self, samples: int = 0) -> None:
        """Counts an evaluation batch as completed.

        Args:
            samples: how many samples it had, over all ranks.
        """
        self.state.eval_timestamp = self.state.eval_timestamp.to_next_batch(samples)
        self.engine.run_event(Event.EVAL_BATCH_END)

    def eval_end(self) -> None:
        """Ends an evaluation; log its metrics before."""
        self.engine.run_event(Event.EVAL_END)
        self._read(self.state.train_dataloader, Phase.TRAIN, "train", None)
        self._lap()  # The clock of the run counts training alone.

    def close(self, exception: BaseException | None = None) -> None:
        """Closes callbacks and destinations, once; what the end of a `with` block does.

        Args:
            exception: what ended the run, if something did.

        Raises:
            Exception: the first that a callback raised in its `close`.
        """
        self.engine.close(exception)

    def __enter__(self) -> Self:
        try:
            self._read(self.state.train_dataloader, Phase.TRAIN, "train", None)
            self.engine.run_event(Event.INIT)
        except BaseException as error:
            self.close(error)
            raise
        self._lap()
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
        self.state.status = RunStatus.COMPLETED
        self.close()

    def _read(self, dataloader: Any, phase: Phase, label: str, length: int | None) -> None:
        if length is None and hasattr(dataloader, "__len__"):
            length = len(dataloader)
        state = self.state
        state.dataloader, state.phase, state.dataloader_label, state.dataloader_len = (
            dataloader,
            phase,
            label,
            length,
        )

    def _lap(self) -> timedelta:
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        return timedelta(seconds=seconds)
