"""Our destinations in Composer's `Trainer`, and Composer's destinations in ours.

Events, hooks and records have the same names on both sides; what is translated are the state and its times. Everything
runs in the training thread.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from destinations.base import LoggerDestination
from events import Callback, Destination, Event, Phase, RunStatus, State, Time, Timestamp

from .session import Session, missing, plain_values, several

try:
    from composer.core import Time as TheirTime
    from composer.core import Timestamp as TheirTimestamp
    from composer.core import TimeUnit as TheirTimeUnit
    from composer.loggers import LoggerDestination as TheirDestination
    from composer.utils import dist
except ImportError as error:
    raise missing("mosaicml", None, error) from error

__all__ = ["ComposerDestination", "FromComposer", "from_composer"]

# What callbacks of ours may look at, and is of the same kind there.
_SHARED = (
    "model",
    "optimizers",
    "schedulers",
    "batch",
    "outputs",
    "loss",
    "train_dataloader",
    "dataloader",
    "dataloader_label",
)


class ComposerDestination(TheirDestination):
    """Gives what Composer's `Trainer` logs to destinations of ours, and passes its events on.

    ```python
    from composer import Trainer

    ours = ComposerDestination(RunDirectory("runs/resnet"), Artifacts("s3://bucket/resnet"))
    trainer = Trainer(model=model, train_dataloader=data, max_duration="2ep", loggers=[ours])
    trainer.fit()
    trainer.close()
    ```

    All 40 events arrive, with the timestamps of Composer's state. The name of the run is Composer's.

    **The end.** Composer closes its callbacks when its trainer is closed, or the program ends, and does not say what ended the
    run: a `fit` that did not reach its end is a failed run, with the exception where the interpreter knows it. What other
    callbacks log and upload in their `close` still arrives: destinations are closed in `post_close`.

    Args:
        destinations: where records go.
        callbacks: callbacks of ours that hear the events.
        raise_errors: lets what a destination raises come out, for tests.
    """

    def __init__(
        self,
        *destinations: Destination,
        callbacks: Callback | Iterable[Callback] = (),
        raise_errors: bool = False,
    ) -> None:
        self._destinations = destinations
        self._callbacks = several(callbacks)
        self._raise_errors = raise_errors
        self._session: Session | None = None
        self._timestamps: dict[str, Any] = {}
        self._saved: Mapping[str, Any] | None = None
        self._exception: BaseException | None = None

    def run_event(self, event: Any, state: Any, logger: Any) -> None:
        """Moves our state to where Composer's is, and runs the event of the same name."""
        ours = Event(event.value)
        if ours is Event.INIT:
            self._open(state)
            return
        session = self._session
        if session is None:
            return
        self._follow(state, ours)
        if ours is Event.AFTER_LOAD and self._saved is not None:
            session.load(self._saved)
            self._saved = None
        if ours is Event.FIT_START:
            session.begin_fit()
        session.run_event(ours)
        if ours is Event.FIT_END:
            session.end_fit()

    def _open(self, state: Any) -> None:
        self._session = Session(
            self._destinations, self._callbacks, state.run_name, raise_errors=self._raise_errors
        )
        self._exception = getattr(sys, "last_value", None)
        own = self._session.state
        own.rank, own.local_rank = dist.get_global_rank(), dist.get_local_rank()
        own.world_size, own.local_world_size = dist.get_world_size(), dist.get_local_world_size()
        own.node_rank = dist.get_node_rank()
        self._follow(state, Event.INIT)
        _ = self._session.logger

    def _follow(self, state: Any, event: Event) -> None:
        own = self._own
        for name in ("timestamp", "eval_timestamp", "predict_timestamp"):
            theirs = getattr(state, name)
            # They are replaced, and not changed, as training goes on.
            if self._timestamps.get(name) is not theirs:
                self._timestamps[name] = theirs
                setattr(own, name, Timestamp(**theirs.state_dict()))
        for name in _SHARED:
            setattr(own, name, getattr(state, name, None))
        length = state.dataloader_len
        own.dataloader_len = None if length is None else int(length)
        own.max_duration = (
            None if state.max_duration is None else Time.from_timestring(str(state.max_duration))
        )
        own.phase = Phase.EVAL if event.is_eval else Phase.PREDICT if event.is_predict else Phase.TRAIN

    @property
    def _own(self) -> State:
        if self._session is None:
            raise RuntimeError("run must be opened by Composer's INIT, got something before it.")
        return self._session.state

    # --- records -----------------------------------------------------------------------------------------------------

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Adds hyperparameters; Composer calls it several times."""
        if self._session is not None:
            self._session.logger.log_hyperparameters(hyperparameters)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Logs scalars, also those on a device; what is none is logged as a trace."""
        if self._session is not None:
            scalars, others = plain_values(metrics)
            self._session.logger.log_metrics(scalars, step)
            if others:
                self._session.logger.log_traces(others)

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Logs a table."""
        if self._session is not None:
            self._session.logger.log_table(columns, rows, name, step)

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        masks: dict[str, Any] | None = None,
        mask_class_labels: dict[int, str] | None = None,
        use_table: bool = True,
    ) -> None:
        """Logs images."""
        if self._session is not None:
            self._session.logger.log_images(
                images, name, channels_last, step, masks, mask_class_labels, use_table
            )

    def log_traces(self, traces: dict[str, Any]) -> None:
        """Logs traces."""
        if self._session is not None:
            self._session.logger.log_traces(traces)

    def upload_file(self, state: Any, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Gives a file to destinations that take files; the copy is theirs when the call returns."""
        if self._session is not None:
            self._session.logger.upload_file(remote_file_name, file_path, overwrite=overwrite)

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        """Brings a file back from the first destination that has it."""
        if self._session is None:
            raise FileNotFoundError(
                f"file {remote_file_name!r} must be asked for after INIT, got asked before."
            )
        self._session.logger.download_file(remote_file_name, destination, overwrite, progress_bar)

    def can_upload_files(self) -> bool:
        """Says whether a destination takes files."""
        return any(one.can_upload_files() for one in self._destinations)

    # --- the end -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns what our callbacks and destinations keep in checkpoints."""
        return {} if self._session is None else self._session.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` returned, when Composer has loaded everything."""
        self._saved = state or None

    def close(self, state: Any, logger: Any) -> None:
        """Takes note of how the run ended; the second call, which Composer makes at the end of the program, does nothing."""
        session = self._session
        if session is None or not session.is_open:
            return
        uncaught = sys.exc_info()[1] or getattr(sys, "last_value", None)
        if not session.is_fitting:
            session.state.status = RunStatus.COMPLETED
        elif uncaught is not None and uncaught is not self._exception:
            self._exception = uncaught
        else:
            self._exception = None

    def post_close(self) -> None:
        """Closes the destinations."""
        session, self._session = self._session, None
        if session is not None:
            session.close(self._exception if session.is_fitting else None)


# --- the other way -----------------------------------------------------------------------------------------------------


def from_composer(destination: Any) -> "FromComposer":
    """Makes a destination of Composer's one of ours: `Trainer(..., loggers=[from_composer(FileLogger())])`.

    Args:
        destination: an instance of `composer.loggers.LoggerDestination`.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(destination, TheirDestination):
        raise TypeError(
            f"destination must be a LoggerDestination of Composer's, got {destination!r}. Ours need no wrapping."
        )
    return FromComposer(destination)


class FromComposer(LoggerDestination):
    """A destination of Composer's, in a `Trainer` or `Run` of ours; made by `from_composer`.

    It hears every event and gets the records that Composer knows: metrics, hyperparameters, tables, images, traces and files.
    Where it reads the state, times are Composer's.

    Args:
        destination: theirs.
    """

    def __init__(self, destination: Any) -> None:
        super().__init__()
        self.wrapped = destination

    def run_event(self, event: Event, state: State, logger: Any) -> None:
        getattr(self.wrapped, event.value)(_StateView(state), logger)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self.wrapped.log_hyperparameters(hyperparameters)

    def log_metrics(self, metrics: "Mapping[str, float]", step: int | None = None) -> None:
        self.wrapped.log_metrics(dict(metrics), step)

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        self.wrapped.log_table(columns, rows, name, step)

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        masks: dict[str, Any] | None = None,
        mask_class_labels: dict[int, str] | None = None,
        use_table: bool = True,
    ) -> None:
        self.wrapped.log_images(images, name, channels_last, step, masks, mask_class_labels, use_table)

    def log_traces(self, traces: dict[str, Any]) -> None:
        self.wrapped.log_traces(traces)

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        self.wrapped.upload_file(_StateView(state), remote_file_name, file_path, overwrite=overwrite)

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        self.wrapped.download_file(remote_file_name, destination, overwrite, progress_bar)

    def can_upload_files(self) -> bool:
        return bool(self.wrapped.can_upload_files())

    def close(self, state: State, logger: Any) -> None:
        self.wrapped.close(_StateView(state), logger)

    def post_close(self) -> None:
        self.wrapped.post_close()

    def state_dict(self) -> dict[str, Any]:
        saved: dict[str, Any] = self.wrapped.state_dict()
        return saved

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wrapped.load_state_dict(state)


class _StateView:
    """Our state, with its times in Composer's classes; what is set goes to ours."""

    def __init__(self, state: State) -> None:
        object.__setattr__(self, "_state", state)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._state, name)
        if isinstance(value, Timestamp):
            return TheirTimestamp(**_fields(value))
        if isinstance(value, Time):
            return TheirTime.from_timestring(str(value))
        if name == "dataloader_len" and value is not None:
            return TheirTime(value, TheirTimeUnit.BATCH)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._state, name, value)


def _fields(timestamp: Timestamp) -> dict[str, Any]:
    durations = ("total_wct", "iteration_wct", "epoch_wct", "batch_wct")
    return {
        name: getattr(timestamp, name) if name in durations else value
        for name, value in timestamp.state_dict().items()
    }
