"""`Callback`: the base class of everything that reacts to events.

Hooks run in the training thread, one after another.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .event import Event
    from .logger.logger import Logger
    from .state import State

__all__ = ["Callback", "state_keys"]


class Callback:
    """The base of callbacks: one hook per event, named as the event's value.

    ```python
    class GradientNorm(Callback):
        def after_train_batch(self, state, logger):
            logger.log_metrics({"grad_norm": total_norm(state.model)})
    ```

    **Threading.** Hooks are called one after another in the training thread, which waits for each.

    **Errors.** An exception of a hook ends the run: the run is closed, then the exception propagates to the
    caller. Exceptions of destinations are counted and reported instead, and training continues.

    **Lifetime.** A callback belongs to one engine until that is closed; then another may take it. `close` and
    `post_close` are called once each, also after an error, and also if `init` was never called. An engine
    looks up the overridden hooks once, when it is created.

    **State.** A checkpoint has what `state_dict` returns under `state_key`, else under the name of the class;
    further callbacks with the same key are numbered in their order. Set `state_key`, on the class or the
    object, so that a renamed class, or another order, finds its state again.
    """

    state_key: str | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes no notice of arguments, so that subclasses may pass theirs on, as in Composer."""
        super().__init__()

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Calls the hook of an event; override it to handle every event in one place.

        Args:
            event: the event.
            state: the state of the run.
            logger: where to log.
        """
        getattr(self, event.value)(state, logger)

    def init(self, state: State, logger: Logger) -> None:
        """The run is set up; destinations come first here. Start work that needs the run's name."""

    def before_load(self, state: State, logger: Logger) -> None:
        """A checkpoint, if any, is about to be loaded."""

    def after_load(self, state: State, logger: Logger) -> None:
        """The checkpoint, if any, has been loaded: the timestamp is where training resumes."""

    def fit_start(self, state: State, logger: Logger) -> None:
        """Training begins, once per `fit`."""

    def iteration_start(self, state: State, logger: Logger) -> None:
        """An iteration (a number of epochs chosen by the user) begins."""

    def epoch_start(self, state: State, logger: Logger) -> None:
        """An epoch begins; not called when a run resumes inside one."""

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """The next training batch is about to be read."""

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """The training batch has been read and is in `state.batch`, still on the host."""

    def batch_start(self, state: State, logger: Logger) -> None:
        """A training batch begins; `state.batch` is on the device."""

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """The passes over the microbatches are about to begin."""

    def before_forward(self, state: State, logger: Logger) -> None:
        """A microbatch is about to go through the model."""

    def after_forward(self, state: State, logger: Logger) -> None:
        """A microbatch has gone through the model; the result is in `state.outputs`."""

    def before_loss(self, state: State, logger: Logger) -> None:
        """The loss of a microbatch is about to be computed."""

    def after_loss(self, state: State, logger: Logger) -> None:
        """The loss of a microbatch is in `state.loss`."""

    def before_backward(self, state: State, logger: Logger) -> None:
        """Gradients of a microbatch are about to be computed."""

    def after_backward(self, state: State, logger: Logger) -> None:
        """Gradients of a microbatch have been accumulated."""

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Gradients are complete and unscaled; the optimizer has not stepped yet."""

    def batch_end(self, state: State, logger: Logger) -> None:
        """A training batch is completed and counted in `state.timestamp`."""

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Evaluation due after this batch is done: the place to save."""

    def epoch_end(self, state: State, logger: Logger) -> None:
        """An epoch is completed and counted in `state.timestamp`; not called when the run stops inside it."""

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Evaluation due after this epoch is done: the place to save."""

    def iteration_end(self, state: State, logger: Logger) -> None:
        """An iteration is completed and counted."""

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        """The place to save after an iteration."""

    def fit_end(self, state: State, logger: Logger) -> None:
        """Training has completed, once per `fit`; not called if it raised."""

    def eval_before_all(self, state: State, logger: Logger) -> None:
        """Evaluation inside `fit` is about to go through its dataloaders."""

    def eval_start(self, state: State, logger: Logger) -> None:
        """Evaluation of one dataloader, `state.dataloader_label`, begins."""

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        """An evaluation batch begins; it is in `state.batch`."""

    def eval_before_forward(self, state: State, logger: Logger) -> None:
        """An evaluation batch is about to go through the model."""

    def eval_after_forward(self, state: State, logger: Logger) -> None:
        """An evaluation batch has gone through the model; the result is in `state.outputs`."""

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """An evaluation batch is completed and counted in `state.eval_timestamp`."""

    def eval_end(self, state: State, logger: Logger) -> None:
        """Evaluation of one dataloader is completed and its metrics are logged."""

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Evaluation inside `fit` has gone through its dataloaders."""

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        """`Trainer.eval` begins."""

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        """`Trainer.eval` has ended."""

    def predict_start(self, state: State, logger: Logger) -> None:
        """`Trainer.predict` begins."""

    def predict_batch_start(self, state: State, logger: Logger) -> None:
        """A batch to predict begins; it is in `state.batch`."""

    def predict_before_forward(self, state: State, logger: Logger) -> None:
        """A batch to predict is about to go through the model."""

    def predict_after_forward(self, state: State, logger: Logger) -> None:
        """A batch to predict has gone through the model; the result is in `state.outputs`."""

    def predict_batch_end(self, state: State, logger: Logger) -> None:
        """A batch to predict is completed and counted in `state.predict_timestamp`."""

    def predict_end(self, state: State, logger: Logger) -> None:
        """`Trainer.predict` has ended."""

    def close(self, state: State, logger: Logger) -> None:
        """The run ends; `state.status` and `state.exception` tell how.

        Logging still works: destinations are closed after all other callbacks.
        """

    def post_close(self) -> None:
        """Releases resources that other callbacks may have needed during `close`."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint must hold for this callback to resume: plain values and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned in an earlier session.

        Args:
            state: the saved dictionary.
        """


def state_keys(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Returns callbacks by the keys of their states: `state_key`, or the class; equal keys are numbered.

    ```python
    print(list(state_keys([Timer(), Timer()])))  # ['Timer', 'Timer#2']
    ```
    """
    keyed: dict[str, Any] = {}
    counts: Counter[str] = Counter()
    for callback in callbacks:
        base = getattr(callback, "state_key", None) or type(callback).__name__
        counts[base] += 1
        keyed[base if counts[base] == 1 else f"{base}#{counts[base]}"] = callback
    return keyed
