"""`TransformersCallback`: a callback for the Hugging Face `Trainer(callbacks=[…])`.

Everything runs in the training thread.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from events import Callback, Destination, Event, Phase, RunStatus, Time, Timestamp, TimeUnit
from uploads import needs_package

from .session import Session, SessionMixin, length_of, log_values

with needs_package("this adapter", "transformers"):
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState

__all__ = ["TransformersCallback"]

_log = logging.getLogger("destinations")


class TransformersCallback(SessionMixin, TrainerCallback, ExportableState):
    """Passes the records of a Hugging Face `Trainer` to destinations, and fires our events.

    ```python
    with TransformersCallback(RunDirectory("runs/bert"), ProgressBar()) as ours:
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[ours])
        trainer.train()
        trainer.evaluate()
    ```

    **Names** are the same as in Hugging Face's own integrations: `train/loss`, `eval/loss`, `test/loss`; the
    epoch stays `epoch`. Strings are logged as texts, other values that are not scalars as traces.

    **End of the run.** A successful `train` marks the run as completed, but leaves it open for further calls.
    Hugging Face does not report exceptions to callbacks, so the `with` block records them; without it, the
    interpreter's exit does.

    **Several runs.** Each trial of `hyperparameter_search` is a separate run, named `<run>-<trial>`, in a
    folder next to the given one, with the tag `sweep:<run>` and its parameters under `trial`. A second call
    of `train` that does not resume from a checkpoint is a separate run too, `<run>-2`; with
    `second_train="continue"` it adds to the first, and steps count on.

    **NaN.** With `logging_nan_inf_filter=True`, the default, Hugging Face excludes NaN losses from the logged
    mean; `grad_norm` shows them.

    Args:
        destinations: destinations that receive the records.
        callbacks: callbacks of this project.
        run_name: name of the run. Default: environment variable `RUN_NAME`, else the folder name of a
            `RunDirectory`, else a generated name, the same on all ranks of a `torchrun`.
        upload_checkpoints: pass each checkpoint to destinations that accept files, as
            `checkpoints/checkpoint-<step>/…`, by hard links where they can; `trainer_state.json` goes last.
        second_train: "new" makes a second `train` a new run, "continue" adds it to the first one.
        raise_errors: raise errors of destinations instead of reporting them; for tests.

    Raises:
        ValueError: `second_train` is neither of the two.
    """

    def __init__(
        self,
        *destinations: Destination,
        callbacks: Callback | Iterable[Callback] = (),
        run_name: str | None = None,
        upload_checkpoints: bool = False,
        second_train: Literal["new", "continue"] = "new",
        raise_errors: bool = False,
    ) -> None:
        if second_train not in {"new", "continue"}:
            raise ValueError(f'second_train must be "new" or "continue", got {second_train!r}.')
        self._second_train = second_train
        self._upload_checkpoints = upload_checkpoints
        self._trainings = 0
        self._trials = 0
        # The steps of earlier trainings that this one continues.
        self._first_step = 0
        self._session = Session(destinations, callbacks, run_name, raise_errors=raise_errors)
        self._tokens = 0
        # Steps of an evaluation or prediction outside of `fit`; only its end shows which of the two it was.
        self._steps_outside_fit = 0
        self._is_evaluating = False

    def state(self) -> dict[str, Any]:
        """Returns the checkpoint state in the format of `ExportableState`."""
        return {"args": {}, "attributes": {"saved": self._session.state_dict()}}

    # Training.

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fires `INIT` unless open, `BEFORE_LOAD`, `AFTER_LOAD`, `FIT_START`; logs hyperparameters."""
        self._begin_run(state)
        run = self._session.state
        run.continues_run = state.global_step > 0 or self._first_step > 0
        run.model = kwargs.get("model")
        optimizer = kwargs.get("optimizer")
        run.optimizers = () if optimizer is None else (optimizer,)
        run.train_dataloader = kwargs.get("train_dataloader")
        run.max_duration = Time(int(state.max_steps), TimeUnit.BATCH) if state.max_steps > 0 else None
        self._log_hyperparameters(args, run.model, state.trial_params)
        self._tokens = int(state.num_input_tokens_seen)
        if self._first_step:
            # The run resumes at its current step, so that no row of the earlier training is abandoned.
            self._session.resume(self._session.state_dict())
        else:
            self._session.fit_start(_timestamp(state), self._saved(state))

    def _begin_run(self, state: Any) -> None:
        """Begins a new run for a trial of a search, and for a second training that does not resume."""
        session, is_first = self._session, not self._trainings
        self._trainings += 1
        if state.is_hyper_param_search:
            self._first_step = 0
            sweep = f"sweep:{session.first_name}"
            session.begin_new_run(str(state.trial_name or f"trial-{self._trials}"), [sweep])
            self._trials += 1
        elif is_first or state.global_step > 0:
            self._first_step = 0
        elif self._second_train == "continue":
            self._first_step = int(session.state.timestamp.batch)
        else:
            session.begin_new_run(str(self._trainings))
            _log.warning(
                "train() was called again without resuming: it is the run %r%s. "
                'To add it to the first one, pass second_train="continue".',
                session.state.run_name,
                f" in {session.folder}" if session.folder else "",
            )

    def _log_hyperparameters(self, args: Any, model: Any, trial: Mapping[str, Any] | None) -> None:
        config: Any = getattr(model, "config", None)
        described = {"args": args.to_dict()}
        if hasattr(config, "to_dict"):
            described["model"] = config.to_dict()
        if trial:
            described["trial"] = dict(trial)
        self._session.logger.log_hyperparameters(described)

    def _saved(self, state: Any) -> Mapping[str, Any] | None:
        """Returns the saved state of this callback from the trainer state of a loaded checkpoint."""
        ours = state.stateful_callbacks.get(type(self).__name__)
        ours = ours[0] if isinstance(ours, list) and ours else ours
        saved = ours.get("attributes", {}).get("saved") if isinstance(ours, dict) else None
        return saved if state.global_step > 0 else None

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fires `EPOCH_START`, except when a run resumes inside an epoch."""
        if self._session.state.timestamp.batch_in_epoch.value == 0:
            batches = length_of(kwargs.get("train_dataloader")) or 0
            self._session.epoch_start(-(-batches // args.gradient_accumulation_steps) or None)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fires `BATCH_START`, `BEFORE_TRAIN_BATCH`."""
        self._session.batch_start()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fires `AFTER_BACKWARD`, of all but the last microbatch."""
        self._session.run_event(Event.AFTER_BACKWARD)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fires `AFTER_BACKWARD` of the last microbatch, and `AFTER_TRAIN_BATCH` with clipped gradients."""
        self._session.run_event(Event.AFTER_BACKWARD)
        self._session.run_event(Event.AFTER_TRAIN_BATCH)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fires `BATCH_END`."""
        tokens, self._tokens = (
            int(state.num_input_tokens_seen) - self._tokens,
            int(state.num_input_tokens_seen),
        )
        samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self._session.batch_end(int(samples), max(0, tokens), batch=self._step(state))

    def _step(self, state: Any) -> int:
        return self._first_step + int(state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fires `EPOCH_END`, even if training ends inside the epoch."""
        self._session.epoch_end()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Records the newest checkpoint, and uploads it with `upload_checkpoints`."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self._session.state.last_checkpoint = str(folder)
        if self._upload_checkpoints and state.is_world_process_zero and folder.is_dir():
            self._session.upload_checkpoint(folder, folder.parent, last="trainer_state.json")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fires `FIT_END`; marks the run as completed, but leaves it open."""
        if not control.should_training_stop and state.global_step < state.max_steps:
            # A trial of optuna's that is pruned: the exception comes after this.
            self._session.state.stop_training("pruned")
        self._session.fit_end()
        self._session.succeed()

    # Records.

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Logs scalars as metrics, strings as texts, and other values as traces."""
        values = {_name(str(key)): value for key, value in (logs or {}).items()}
        log_values(self._session.logger, values, self._step(state))

    # Evaluation and prediction.

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fires `EVAL_BATCH_END` inside `fit`, with `EVAL_BEFORE_ALL` and `EVAL_START` before the first."""
        session = self._session
        if not session.is_fitting:
            self._steps_outside_fit += 1
            return
        if not self._is_evaluating:
            self._is_evaluating = True
            session.evaluation_start()
            session.stage_start(Phase.EVAL, "eval", length_of(kwargs.get("eval_dataloader")))
        session.state.eval_timestamp = session.state.eval_timestamp.to_next_batch()
        session.run_event(Event.EVAL_BATCH_END)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fires `EVAL_END`, `EVAL_AFTER_ALL`; outside of `fit`, all events of the evaluation."""
        session, has_begun, self._is_evaluating = self._session, self._is_evaluating, False
        if not has_begun:
            session.evaluation_start()
            session.stage_start(Phase.EVAL, "eval")
            session.state.eval_timestamp = Timestamp.from_state_dict({"batch": self._steps_outside_fit})
            self._steps_outside_fit = 0
        session.stage_end()
        session.evaluation_end()
        if not session.is_fitting:
            session.succeed()

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Fires `PREDICT_START`, `PREDICT_END`; logs the metrics, which Hugging Face does not."""
        session = self._session
        session.stage_start(Phase.PREDICT, "predict")
        session.state.predict_timestamp = Timestamp.from_state_dict({"batch": self._steps_outside_fit})
        self._steps_outside_fit = 0
        if metrics:
            self.on_log(args, state, control, metrics)
        session.stage_end()
        if session.state.status is RunStatus.RUNNING and not session.is_fitting:
            session.succeed()


def _timestamp(state: Any) -> Timestamp:
    """Returns the timestamp of a trainer state, whose fractional `epoch` includes the current one."""
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
    """Returns the metric name used by Hugging Face's own integrations."""
    if key == "epoch":
        return key
    for phase in ("eval", "test"):
        if key.startswith(f"{phase}_"):
            return f"{phase}/{key.removeprefix(f'{phase}_')}"
    return f"train/{key}"
