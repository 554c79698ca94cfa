"""What reacts to events: subclass `Callback`, override the hooks that you want."""

from typing import TYPE_CHECKING, Any

from .event import Event

if TYPE_CHECKING:
    from .logger.logger import Logger
    from .state import State

__all__ = ["Callback"]


class Callback:
    """Something that reacts to the events of a run: one hook per event, named as the event's value.

    ```python
    class GradientNorm(Callback):
        def after_train_batch(self, state, logger):
            logger.log_metrics({"grad_norm": total_norm(state.model)})
    ```

    **Threading.** Hooks are called one after another in the training thread: what a hook takes, training waits for.

    **Errors.** What a hook raises ends the run, which is closed before the error goes on to the caller.
    Destinations are the exception: what they raise is counted and reported, and training goes on.

    **Lifetime.** A callback belongs to one engine from its making to its close; then another may have it. `close` and
    `post_close` come once each, also after an error, and also when `init` never came. An engine looks up which hooks a
    callback overrides once, when it is made.
    """

    def run_event(self, event: Event, state: "State", logger: "Logger") -> None:
        """Calls the hook of an event; override it to take every event in one place.

        Args:
            event: what happened.
            state: the run.
            logger: where to log.
        """
        getattr(self, event.value)(state, logger)

    def init(self, state: "State", logger: "Logger") -> None:
        """The run is set up; destinations come before other callbacks here. Start what needs the run's name."""

    def before_load(self, state: "State", logger: "Logger") -> None:
        """A checkpoint, if there is one, is about to be loaded."""

    def after_load(self, state: "State", logger: "Logger") -> None:
        """The checkpoint, if there is one, has been loaded: the timestamp is where training goes on."""

    def fit_start(self, state: "State", logger: "Logger") -> None:
        """Training begins, once per `fit`."""

    def iteration_start(self, state: "State", logger: "Logger") -> None:
        """An iteration (a number of epochs or tokens that the user named) begins."""

    def epoch_start(self, state: "State", logger: "Logger") -> None:
        """An epoch begins; not when a run resumes inside one."""

    def before_dataloader(self, state: "State", logger: "Logger") -> None:
        """The next training batch is about to be read."""

    def after_dataloader(self, state: "State", logger: "Logger") -> None:
        """The training batch has been read and is in `state.batch`, still on the host."""

    def batch_start(self, state: "State", logger: "Logger") -> None:
        """A training batch begins; `state.batch` is on the device."""

    def before_train_batch(self, state: "State", logger: "Logger") -> None:
        """The passes over the microbatches are about to begin."""

    def before_forward(self, state: "State", logger: "Logger") -> None:
        """A microbatch is about to go through the model."""

    def after_forward(self, state: "State", logger: "Logger") -> None:
        """A microbatch went through the model; the result is in `state.outputs`."""

    def before_loss(self, state: "State", logger: "Logger") -> None:
        """The loss of a microbatch is about to be computed."""

    def after_loss(self, state: "State", logger: "Logger") -> None:
        """The loss of a microbatch is in `state.loss`."""

    def before_backward(self, state: "State", logger: "Logger") -> None:
        """Gradients of a microbatch are about to be computed."""

    def after_backward(self, state: "State", logger: "Logger") -> None:
        """Gradients of a microbatch were added up."""

    def after_train_batch(self, state: "State", logger: "Logger") -> None:
        """Gradients are complete and unscaled; the optimizer has not moved yet."""

    def batch_end(self, state: "State", logger: "Logger") -> None:
        """A training batch is completed and counted in `state.timestamp`."""

    def batch_checkpoint(self, state: "State", logger: "Logger") -> None:
        """Evaluation due after this batch is done: the place to save."""

    def epoch_end(self, state: "State", logger: "Logger") -> None:
        """An epoch is completed and counted in `state.timestamp`; not when the run stops inside it."""

    def epoch_checkpoint(self, state: "State", logger: "Logger") -> None:
        """Evaluation due after this epoch is done: the place to save."""

    def iteration_end(self, state: "State", logger: "Logger") -> None:
        """An iteration is completed and counted."""

    def iteration_checkpoint(self, state: "State", logger: "Logger") -> None:
        """The place to save after an iteration."""

    def fit_end(self, state: "State", logger: "Logger") -> None:
        """Training has ended as planned, once per `fit`; not when it raised."""

    def eval_before_all(self, state: "State", logger: "Logger") -> None:
        """Evaluation inside `fit` is about to go through its dataloaders."""

    def eval_start(self, state: "State", logger: "Logger") -> None:
        """Evaluation of one dataloader, `state.dataloader_label`, begins."""

    def eval_batch_start(self, state: "State", logger: "Logger") -> None:
        """An evaluation batch begins; it is in `state.batch`."""

    def eval_before_forward(self, state: "State", logger: "Logger") -> None:
        """An evaluation batch is about to go through the model."""

    def eval_after_forward(self, state: "State", logger: "Logger") -> None:
        """An evaluation batch went through the model; the result is in `state.outputs`."""

    def eval_batch_end(self, state: "State", logger: "Logger") -> None:
        """An evaluation batch is completed and counted in `state.eval_timestamp`."""

    def eval_end(self, state: "State", logger: "Logger") -> None:
        """Evaluation of one dataloader is completed and its metrics are logged."""

    def eval_after_all(self, state: "State", logger: "Logger") -> None:
        """Evaluation inside `fit` has gone through its dataloaders."""

    def eval_standalone_start(self, state: "State", logger: "Logger") -> None:
        """`Trainer.eval` begins."""

    def eval_standalone_end(self, state: "State", logger: "Logger") -> None:
        """`Trainer.eval` has ended."""

    def predict_start(self, state: "State", logger: "Logger") -> None:
        """`Trainer.predict` begins."""

    def predict_batch_start(self, state: "State", logger: "Logger") -> None:
        """A batch to predict begins; it is in `state.batch`."""

    def predict_before_forward(self, state: "State", logger: "Logger") -> None:
        """A batch to predict is about to go through the model."""

    def predict_after_forward(self, state: "State", logger: "Logger") -> None:
        """A batch to predict went through the model; the result is in `state.outputs`."""

    def predict_batch_end(self, state: "State", logger: "Logger") -> None:
        """A batch to predict is completed and counted in `state.predict_timestamp`."""

    def predict_end(self, state: "State", logger: "Logger") -> None:
        """`Trainer.predict` has ended."""

    def close(self, state: "State", logger: "Logger") -> None:
        """Ends the work of this callback; `state.status` and `state.exception` say how the run ended.

        Logging still works: destinations are closed after all other callbacks.
        """

    def post_close(self) -> None:
        """Lets go of what others may have needed during `close`; not called where `close` raised."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint must hold for this callback to go on: plain values and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` returned in an earlier session.

        Args:
            state: the dictionary that was saved.
        """
