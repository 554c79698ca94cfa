"""`KerasCallback`: a callback for `model.fit(callbacks=[…])` of Keras 3, with any backend.

Everything runs in the training thread.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from events import Callback, Destination, Phase, RunStatus, Time, Timestamp, TimeUnit
from uploads import needs_package

from .session import Session, SessionMixin, log_values

with needs_package("this adapter", "keras"):
    import keras

__all__ = ["KerasCallback"]


class KerasCallback(SessionMixin, keras.callbacks.Callback):
    """Passes the metrics of Keras to destinations, and fires our events.

    ```python
    with KerasCallback(RunDirectory("runs/mnist"), ProgressBar()) as ours:
        model.fit(x, y, epochs=5, callbacks=[ours])
        model.evaluate(x, y, callbacks=[ours])
    ```

    **Names** are `train/loss` after each batch, `train_epoch/loss` after each epoch, `eval/loss` after each
    evaluation. The values that Keras reports after a batch are means since the start of the epoch.

    **End of the run.** A successful `fit` marks the run as completed, but leaves it open for further calls.
    Keras does not report exceptions to callbacks, so the `with` block records them; without it, the
    interpreter's exit does.

    Args:
        destinations: destinations that receive the records.
        callbacks: callbacks of this project.
        run_name: name of the run. Default: environment variable `RUN_NAME`, else the folder name of a
            `RunDirectory`, else a generated name, the same on all ranks of a `torchrun`.
        raise_errors: raise errors of destinations instead of reporting them; for tests.
    """

    def __init__(
        self,
        *destinations: Destination,
        callbacks: Callback | Iterable[Callback] = (),
        run_name: str | None = None,
        raise_errors: bool = False,
    ) -> None:
        super().__init__()
        self._session = Session(destinations, callbacks, run_name, raise_errors=raise_errors)
        self._epoch_began_at = 0
        self._has_begun = False

    # Training.

    def on_train_begin(self, logs: Any = None) -> None:
        """Fires `INIT` unless open; logs hyperparameters."""
        self._has_begun = False
        state, params = self._session.state, self.params or {}
        state.model = self.model
        epochs = params.get("epochs")
        state.max_duration = Time(int(epochs), TimeUnit.EPOCH) if epochs else None
        optimizer = getattr(self.model, "optimizer", None)
        described: dict[str, Any] = {
            "fit": {key: params[key] for key in ("epochs", "steps") if key in params}
        }
        if optimizer is not None:
            described["optimizer"] = {
                key: value if isinstance(value, str | int | float | bool | type(None)) else str(value)
                for key, value in optimizer.get_config().items()
            }
        self._session.logger.log_hyperparameters(described)

    def _begin(self, epoch: int) -> None:
        """Begins training at an epoch; an epoch other than 0 continues an earlier run."""
        state, steps = self._session.state, (self.params or {}).get("steps")
        if epoch and not state.timestamp.batch:
            batch = epoch * steps if steps else int(self.model.optimizer.iterations)
            state.timestamp = Timestamp.from_state_dict({"epoch": epoch, "batch": batch})
        state.continues_run = bool(epoch or state.timestamp.batch)
        self._session.fit_start(state.timestamp)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Fires `EPOCH_START`; first of all `BEFORE_LOAD`, `AFTER_LOAD`, `FIT_START`."""
        if not self._has_begun:
            self._has_begun = True
            self._begin(epoch)
        session = self._session
        timestamp = session.state.timestamp
        if timestamp.epoch.value != epoch:  # `fit(initial_epoch=…)`
            session.state.timestamp = timestamp = timestamp.copy(epoch=epoch, batch_in_epoch=0)
        self._epoch_began_at = int(timestamp.batch)
        session.epoch_start((self.params or {}).get("steps"))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Fires `BATCH_START`, `BEFORE_TRAIN_BATCH`."""
        self._session.batch_start()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Logs metrics and fires `BATCH_END`; with `steps_per_execution`, once for several batches."""
        count = self._epoch_began_at + int(batch) + 1
        self._log("train", logs, count - 1)
        self._session.batch_end(batch=count)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Logs metrics and fires `EPOCH_END`."""
        own = {name: value for name, value in (logs or {}).items() if not str(name).startswith("val_")}
        self._log("train_epoch", own, max(0, int(self._session.state.timestamp.batch) - 1))
        self._session.epoch_end()

    def on_train_end(self, logs: Any = None) -> None:
        """Fires `FIT_END`; marks the run as completed, but leaves it open."""
        self._session.fit_end()
        self._session.succeed()

    def _log(self, phase: str, logs: Mapping[str, Any] | None, step: int) -> None:
        values = {f"{phase}/{name}": value for name, value in (logs or {}).items()}
        log_values(self._session.logger, values, step)

    # Evaluation and prediction.

    def on_test_begin(self, logs: Any = None) -> None:
        """Fires `EVAL_BEFORE_ALL` inside `fit`, else `EVAL_STANDALONE_START`; `EVAL_START`."""
        self._session.evaluation_start()
        self._session.stage_start(Phase.EVAL, "eval")

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Fires `EVAL_BATCH_START` and `EVAL_BEFORE_FORWARD`; while predicting, the events of `PREDICT`."""
        self._session.stage_batch_start()

    def on_test_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Fires `EVAL_AFTER_FORWARD` and `EVAL_BATCH_END`; while predicting, the events of `PREDICT`."""
        self._session.stage_batch_end(outputs=(logs or {}).get("outputs"))

    def on_test_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Logs metrics; fires `EVAL_END`, then `EVAL_AFTER_ALL` in `fit`, else `EVAL_STANDALONE_END`."""
        session = self._session
        count = int(session.state.timestamp.batch)
        self._log("eval", logs, max(0, count - 1) if session.is_fitting else count)
        session.stage_end()
        session.evaluation_end()
        self._succeed_outside_of_fit()

    def on_predict_begin(self, logs: Any = None) -> None:
        """Fires `PREDICT_START`."""
        self._session.stage_start(Phase.PREDICT, "predict")

    on_predict_batch_begin = on_test_batch_begin
    on_predict_batch_end = on_test_batch_end

    def on_predict_end(self, logs: Any = None) -> None:
        """Fires `PREDICT_END`."""
        self._session.stage_end()
        self._succeed_outside_of_fit()

    def _succeed_outside_of_fit(self) -> None:
        if not self._session.is_fitting and self._session.state.status is RunStatus.RUNNING:
            self._session.succeed()
