"""`DryRun`: a training run without a model, with the events of the loop and your records."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from destinations.base import LoggerDestination
from events import Callback, Engine, Logger, Phase, State

__all__ = ["DryRun"]


class DryRun:
    """A training run without a model: fires every event, advances the timestamp, and logs your metrics.

    ```python
    run = DryRun(destination, max_duration="2ep", batches_per_epoch=3)
    run.init()
    run.fit()
    run.close()
    ```

    Args:
        destinations: the destinations.
        run_name: the name of the run.
        max_duration: the duration of `fit`; a time string.
        batches_per_epoch: the number of batches of the training data.
        eval_batches: the number of batches of an evaluation inside `fit`.
        samples_per_batch: the number of samples in a batch.
        seconds_per_batch: the duration of a batch; nothing waits for it.
        knows_length: whether the dataloaders have a length.
        rank: the simulated rank; a rank other than 0 is one of two.
        callbacks: further callbacks.
        raise_errors: whether to raise the errors of destinations.
        train_metrics: returns the metrics to log for each training batch.
        eval_metrics: returns the metrics to log for each evaluation.
    """

    def __init__(
        self,
        *destinations: LoggerDestination,
        run_name: str = "dry-run",
        max_duration: str | None = "2ep",
        batches_per_epoch: int = 3,
        eval_batches: int = 2,
        samples_per_batch: int = 4,
        seconds_per_batch: float = 1.0,
        knows_length: bool = True,
        rank: int = 0,
        callbacks: Sequence[Callback] = (),
        raise_errors: bool = True,
        train_metrics: "Callable[[State], Mapping[str, Any]] | None" = None,
        eval_metrics: "Callable[[State], Mapping[str, Any]] | None" = None,
    ) -> None:
        self.state = State(
            run_name, max_duration, rank=rank, local_rank=rank, world_size=2 if rank else 1, node_rank=0
        )
        self.logger = Logger(self.state, destinations, raise_errors=raise_errors)
        self.engine = Engine(self.state, self.logger, callbacks)
        self._batches_per_epoch = batches_per_epoch
        self._eval_batches = eval_batches
        self._samples_per_batch = samples_per_batch
        self._seconds_per_batch = seconds_per_batch
        self._knows_length = knows_length
        self._train_metrics = train_metrics or (
            lambda state: {"loss/train": 1 / (1 + int(state.timestamp.batch))}
        )
        self._eval_metrics = eval_metrics or (lambda _: {"metrics/eval/accuracy": 0.5})

    def fire(self, *events: str) -> None:
        """Runs events."""
        for event in events:
            self.engine.run_event(event)

    def init(self) -> None:
        """Plays the events before `fit`."""
        self.fire("init", "before_load", "after_load")

    def fit(self, eval_every: int | None = None) -> None:
        """Plays `Trainer.fit`, until `max_duration`.

        Args:
            eval_every: how many batches between evaluations; None for no evaluation.
        """
        self._read("train", self._batches_per_epoch)
        self.fire("fit_start")
        state = self.state
        while not state.is_done:
            if not int(state.timestamp.batch_in_epoch):
                self.fire("epoch_start")
            self._epoch(eval_every)
        self.fire("fit_end")

    def _epoch(self, eval_every: int | None) -> None:
        state = self.state
        while not state.is_done:
            if int(state.timestamp.batch_in_epoch) == self._batches_per_epoch:
                break
            self.train_batch()
            if eval_every and int(state.timestamp.batch) % eval_every == 0:
                self.evaluate()
            self.fire("batch_checkpoint")
        is_complete = int(state.timestamp.batch_in_epoch) == self._batches_per_epoch
        if is_complete:
            state.timestamp = state.timestamp.to_next_epoch()
            self.fire("epoch_end", "epoch_checkpoint")

    def train_batch(self) -> None:
        """Plays one training batch, from `BEFORE_DATALOADER` to `BATCH_END`."""
        self.fire("before_dataloader", "after_dataloader", "batch_start", "before_train_batch")
        self.fire("before_forward", "after_forward", "before_loss", "after_loss")
        self.fire("before_backward", "after_backward", "after_train_batch")
        self.logger.log_metrics(self._train_metrics(self.state))
        seconds = timedelta(seconds=self._seconds_per_batch)
        self.state.timestamp = self.state.timestamp.to_next_batch(self._samples_per_batch, 0, seconds)
        self.fire("batch_end")

    def evaluate(self, batches: int | None = None, label: str = "eval") -> None:
        """Plays an evaluation inside `fit`, of `eval_batches` unless given otherwise."""
        with _restored(self.state, Phase.EVAL):
            self.fire("eval_before_all")
            self._evaluate_one(self._eval_batches if batches is None else batches, label)
            self.fire("eval_after_all")

    def evaluate_standalone(self, batches: int = 2, label: str = "eval") -> None:
        """Plays `Trainer.eval`."""
        with _restored(self.state, Phase.EVAL):
            self.fire("eval_standalone_start")
            self._evaluate_one(batches, label)
            self.fire("eval_standalone_end")

    def predict(self, batches: int = 2) -> None:
        """Plays `Trainer.predict`."""
        state = self.state
        with _restored(state, Phase.PREDICT):
            self._read("predict", batches)
            state.predict_timestamp = type(state.timestamp)()
            self.fire("predict_start")
            for _ in range(batches):
                self.fire("predict_batch_start", "predict_before_forward", "predict_after_forward")
                state.predict_timestamp = state.predict_timestamp.to_next_batch(self._samples_per_batch)
                self.fire("predict_batch_end")
            self.fire("predict_end")

    def close(self, exception: BaseException | None = None) -> None:
        """Closes the run, as after an exception."""
        self.engine.close(exception)

    def _evaluate_one(self, batches: int, label: str) -> None:
        state = self.state
        self._read(label, batches)
        state.eval_timestamp = type(state.timestamp)()
        self.fire("eval_start")
        for _ in range(batches):
            self.fire("eval_batch_start", "eval_before_forward", "eval_after_forward")
            state.eval_timestamp = state.eval_timestamp.to_next_batch(self._samples_per_batch)
            self.fire("eval_batch_end")
        self.logger.log_metrics(self._eval_metrics(state))
        self.fire("eval_end")

    def _read(self, label: str, batches: int) -> None:
        self.state.dataloader_label = label
        self.state.dataloader_len = batches if self._knows_length else None


@contextlib.contextmanager
def _restored(state: State, phase: Phase) -> Iterator[None]:
    """Sets the phase, and puts phase, label and length back when an evaluation or prediction is over."""
    before = (state.phase, state.dataloader_label, state.dataloader_len)
    state.phase = phase
    try:
        yield
    finally:
        state.phase, state.dataloader_label, state.dataloader_len = before
