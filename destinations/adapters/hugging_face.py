"""Our destinations in a Hugging Face `Trainer`: a callback for `callbacks=[…]`.

Everything runs in the training thread.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from events import Callback, Destination, Event, Phase, RunStatus, Time, Timestamp, TimeUnit

from .session import Session, SessionOwner, length_of, missing, plain_values, several

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise missing("transformers", "transformers", error) from error

__all__ = ["TransformersCallback"]


class TransformersCallback(SessionOwner, TrainerCallback, ExportableState):
    """Logs what a Hugging Face `Trainer` logs to destinations of ours, and fires our events.

    ```python
    with TransformersCallback(RunDirectory("runs/bert"), ProgressBar()) as ours:
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[ours])
        trainer.train()
        trainer.evaluate()
    ```

    **Names** are those of Hugging Face's own integrations: `train/loss`, `eval/loss`, `test/loss`; the epoch stays `epoch`.
    What is no scalar is logged as a trace.

    **The end.** `train` that went well marks the run as completed; it stays open for what may follow. Hugging Face tells
    nobody of an exception: the `with` block does, or, without it, the end of the program.

    **NaN.** With `logging_nan_inf_filter=True`, the default, Hugging Face leaves a loss that is NaN out of the mean that it
    logs. `grad_norm` shows it.

    Args:
        destinations: where records go.
        callbacks: callbacks of ours that hear the events.
        run_name: the name of the run. Default: `RUN_NAME` of the environment, else the name of the folder of a
            `RunDirectory`, else a new one; with several ranks there must be one of the first three.
        raise_errors: lets what a destination raises come out, for tests.
    """

    def __init__(
        self,
        *destinations: Destination,
        callbacks: Callback | Iterable[Callback] = (),
        run_name: str | None = None,
        raise_errors: bool = False,
    ) -> None:
        self._session = Session(destinations, several(callbacks), run_name, raise_errors=raise_errors)
        self._tokens = 0
        # Outside of `fit`, the steps of what is an evaluation or a prediction: only its end says which.
        self._steps_unknown = 0
        self._is_evaluating = False

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint must hold, in the form of Hugging Face's."""
        return {"args": {}, "attributes": {"saved": self._session.state_dict()}}

    # --- training ----------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """`INIT`, unless the run is open, `BEFORE_LOAD`, `AFTER_LOAD`, `FIT_START`; hyperparameters."""
        self._know(args, state)
        run = self._session.state
        run.model = kwargs.get("model")
        optimizer = kwargs.get("optimizer")
        run.optimizers = () if optimizer is None else (optimizer,)
        run.train_dataloader = kwargs.get("train_dataloader")
        run.max_duration = Time(int(state.max_steps), TimeUnit.BATCH) if state.max_steps > 0 else None
        self._log_hyperparameters(args, run.model)
        self._tokens = int(state.num_input_tokens_seen)
        self._session.fit_start(_timestamp(state), self._saved(state))

    def _know(self, args: Any, state: Any) -> None:
        """Takes the ranks, as long as the run is not open."""
        if not self._session.is_open:
            run = self._session.state
            run.rank, run.world_size = int(args.process_index), int(args.world_size)
            run.local_rank = int(args.local_process_index)

    def _log_hyperparameters(self, args: Any, model: Any) -> None:
        config: Any = getattr(model, "config", None)
        described = {"args": args.to_dict()}
        if hasattr(config, "to_dict"):
            described["model"] = config.to_dict()
        self._session.logger.log_hyperparameters(described)

    def _saved(self, state: Any) -> Mapping[str, Any] | None:
        """Returns what `state` returned for the checkpoint that was loaded, which its trainer state holds."""
        ours = state.stateful_callbacks.get(type(self).__name__)
        ours = ours[0] if isinstance(ours, list) and ours else ours
        saved = ours.get("attributes", {}).get("saved") if isinstance(ours, dict) else None
        return saved if state.global_step > 0 else None

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """`EPOCH_START`, but not where a run resumes inside an epoch."""
        if self._session.state.timestamp.batch_in_epoch.value == 0:
            batches = length_of(kwargs.get("train_dataloader")) or 0
            self._session.epoch_start(-(-batches // args.gradient_accumulation_steps) or None)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """`BATCH_START`, `BEFORE_TRAIN_BATCH`."""
        self._session.batch_start()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """`AFTER_BACKWARD`, of all but the last microbatch."""
        self._session.run_event(Event.AFTER_BACKWARD)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """`AFTER_BACKWARD` of the last microbatch, `AFTER_TRAIN_BATCH`; gradients are clipped by now."""
        self._session.run_event(Event.AFTER_BACKWARD)
        self._session.run_event(Event.AFTER_TRAIN_BATCH)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """`BATCH_END`."""
        tokens, self._tokens = (
            int(state.num_input_tokens_seen) - self._tokens,
            int(state.num_input_tokens_seen),
        )
        samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self._session.batch_end(int(samples), max(0, tokens), batch=int(state.global_step))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """`EPOCH_END`; also where training ends inside the epoch."""
        self._session.epoch_end()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Notes the newest checkpoint."""
        self._session.state.last_checkpoint = str(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """`FIT_END`; the run counts as completed, and stays open."""
        self._session.fit_end()
        self._session.succeed()

    # --- records -----------------------------------------------------------------------------------------------------

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Logs."""
        self._know(args, state)
        metrics, others = plain_values({_name(str(key)): value for key, value in (logs or {}).items()})
        logger = self._session.logger
        if metrics:
            logger.log_metrics(metrics, int(state.global_step))
        if others:
            logger.log_traces(others)

    # --- evaluation and prediction -----------------------------------------------------------------------------------

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """`EVAL_BATCH_END` inside `fit`, with `EVAL_BEFORE_ALL` and `EVAL_START` before the first."""
        session = self._session
        if not session.is_fitting:
            self._steps_unknown += 1
            return
        if not self._is_evaluating:
            self._is_evaluating = True
            session.run_event(Event.EVAL_BEFORE_ALL)
            session.eval_start("eval", length_of(kwargs.get("eval_dataloader")))
        session.state.eval_timestamp = session.state.eval_timestamp.to_next_batch()
        session.run_event(Event.EVAL_BATCH_END)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """`EVAL_END`, `EVAL_AFTER_ALL`; outside of `fit` the whole evaluation, of which nothing was known before."""
        session, self._is_evaluating = self._session, False
        if session.is_fitting:
            session.eval_end()
            session.run_event(Event.EVAL_AFTER_ALL)
            return
        session.run_event(Event.EVAL_STANDALONE_START)
        session.eval_start("eval")
        session.state.eval_timestamp = Timestamp.from_state_dict({"batch": self._steps_unknown})
        self._steps_unknown = 0
        session.eval_end()
        session.run_event(Event.EVAL_STANDALONE_END)
        session.succeed()

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """`PREDICT_START`, `PREDICT_END`; the metrics of a prediction, which Hugging Face does not log."""
        session = self._session
        self._know(args, state)
        session.predict_start()
        session.state.predict_timestamp = Timestamp.from_state_dict({"batch": self._steps_unknown})
        self._steps_unknown = 0
        if metrics:
            self.on_log(args, state, control, metrics)
        session.predict_end()
        session.state.phase = Phase.TRAIN
        if session.state.status is RunStatus.RUNNING and not session.is_fitting:
            session.succeed()


def _timestamp(state: Any) -> Timestamp:
    """Returns where a trainer state stands; its epoch is a fraction of which the whole part is completed."""
    batch, epoch = int(state.global_step), float(state.epoch or 0)
    per_epoch = batch / epoch if epoch else 0
    inside = round((epoch - int(epoch)) * per_epoch)
    return Timestamp.from_state_dict(
        {
            "batch": batch,
            "epoch": int(epoch),
            "batch_in_epoch": inside,
            "token": int(state.num_input_tokens_seen),
        }
    )


def _name(key: str) -> str:
    """Returns the name that Hugging Face's own integrations give a value."""
    if key == "epoch":
        return key
    for phase in ("eval", "test"):
        if key.startswith(f"{phase}_"):
            return f"{phase}/{key.removeprefix(f'{phase}_')}"
    return f"train/{key}"
