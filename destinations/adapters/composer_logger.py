"""Uses our destinations in Composer's `Trainer`, and Composer's destinations in ours.

Events, hooks and records have the same names on both sides; only the state and its times are converted.
Everything runs in the training thread.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from destinations.base import LoggerDestination
from events import Callback, Destination, Event, LiteralName, Phase, RunStatus, State, Time, Timestamp
from uploads import needs_package

from .session import Session, log_values

with needs_package("this adapter", "mosaicml", note=", in an environment of its own"):
    from composer.core import Time as TheirTime
    from composer.core import Timestamp as TheirTimestamp
    from composer.loggers import LoggerDestination as TheirDestination

__all__ = ["ComposerDestination", "FromComposer", "from_composer"]

# Composer writes files with these suffixes once.
_CHECKPOINT_SUFFIXES = frozenset({".pt", ".distcp"})
# State attributes for our callbacks that have the same type in Composer.
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


def _passed_on(name: str) -> Callable[..., None]:
    """Returns a method of Composer's destination that passes a record to our logger."""

    @functools.wraps(getattr(TheirDestination, name))
    def log(self: "ComposerDestination", *args: Any, **options: Any) -> None:
        if self._session is not None:
            getattr(self._logger_now(self._session), name)(*args, **options)

    return log


class ComposerDestination(TheirDestination):
    """Passes the records and events of Composer's `Trainer` to our destinations.

    ```python
    from composer import Trainer

    ours = ComposerDestination(RunDirectory("runs/resnet"), Artifacts("s3://bucket/resnet"))
    trainer = Trainer(model=model, train_dataloader=data, max_duration="2ep", loggers=[ours])
    trainer.fit()
    trainer.close()
    ```

    All 40 events are passed on, with the timestamps of Composer's state and Composer's run name.

    **End of the run.** Composer closes its callbacks with its trainer, or at interpreter exit, without
    passing an exception: a `fit` without `FIT_END` counts as failed, with the exception if the interpreter
    has it. Records and uploads of other callbacks during their `close` are still accepted: destinations are
    closed in `post_close`.

    Args:
        destinations: destinations that receive the records.
        callbacks: callbacks of this project.
        raise_errors: raise errors of destinations instead of reporting them; for tests.
    """

    def __init__(
        self,
        *destinations: Destination,
        callbacks: Callback | Iterable[Callback] = (),
        raise_errors: bool = False,
    ) -> None:
        self._destinations = destinations
        self._callbacks = callbacks
        self._raise_errors = raise_errors
        self._session: Session | None = None
        # Composer's state, which may be ahead of our last event, because its callbacks log before it.
        self._theirs: Any = None
        self._timestamps: dict[str, Any] = {}
        self._saved: Mapping[str, Any] | None = None
        self._exception: BaseException | None = None

    def run_event(self, event: Any, state: Any, logger: Any) -> None:
        """Synchronizes our state with Composer's, and fires the event of the same name."""
        ours = Event(event.value)
        if ours is Event.INIT:
            self._open(state)
            return
        session = self._session
        if session is None:
            return
        self._sync(state, ours)
        if ours is Event.AFTER_LOAD:
            self._own.continues_run = self._saved is not None or self._own.timestamp.batch > 0
            if self._saved is not None:
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
        self._theirs = state
        self._exception = getattr(sys, "last_value", None)
        self._sync(state, Event.INIT)
        _ = self._session.logger

    def _sync(self, state: Any, event: Event) -> None:
        own = self._own
        self._sync_timestamps(state)
        for name in _SHARED:
            setattr(own, name, getattr(state, name, None))
        length = state.dataloader_len
        own.dataloader_len = None if length is None else int(length)
        own.max_duration = (
            None if state.max_duration is None else Time.from_timestring(str(state.max_duration))
        )
        own.phase = Phase.EVAL if event.is_eval else Phase.PREDICT if event.is_predict else Phase.TRAIN

    def _sync_timestamps(self, state: Any) -> None:
        for name in ("timestamp", "eval_timestamp", "predict_timestamp"):
            theirs = getattr(state, name)
            # Immutable: replaced as training progresses.
            if self._timestamps.get(name) is not theirs:
                self._timestamps[name] = theirs
                setattr(self._own, name, Timestamp(**theirs.state_dict()))

    def _logger_now(self, session: Session) -> Any:
        """Returns our logger, with the timestamps that Composer has at this call."""
        self._sync_timestamps(self._theirs)
        return session.logger

    @property
    def _own(self) -> State:
        if self._session is None:
            raise RuntimeError("Composer's INIT event must fire first.")
        return self._session.state

    # Records.

    log_table = _passed_on("log_table")
    log_images = _passed_on("log_images")
    log_traces = _passed_on("log_traces")

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Adds hyperparameters; Composer calls this several times."""
        if self._session is not None:
            self._logger_now(self._session).log_hyperparameters(hyperparameters)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Logs scalars, also those on a device, as metrics, strings as texts, and other values as traces."""
        if self._session is not None:
            log_values(self._logger_now(self._session), metrics, step)

    def upload_file(self, state: Any, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Passes a file to destinations that accept files; they have their own copy when the call returns."""
        if self._session is not None:
            # Composer writes each checkpoint under a separate name, unless it may overwrite; other files may
            # grow.
            is_linked = Path(file_path).suffix in _CHECKPOINT_SUFFIXES and not overwrite
            self._logger_now(self._session).upload_file(
                LiteralName(remote_file_name), file_path, overwrite=overwrite, link=is_linked
            )

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        """Downloads a file from the first destination that has it."""
        if self._session is None:
            raise FileNotFoundError(f"cannot download {remote_file_name!r} before the INIT event.")
        self._session.logger.download_file(remote_file_name, destination, overwrite, progress_bar)

    def can_upload_files(self) -> bool:
        """Returns whether any destination accepts files."""
        return any(one.can_upload_files() for one in self._destinations)

    # The end.

    def state_dict(self) -> dict[str, Any]:
        """Returns the checkpoint state of our callbacks and destinations."""
        return {} if self._session is None else self._session.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stores the state for `AFTER_LOAD`, when Composer has loaded everything."""
        self._saved = state or None

    def close(self, state: Any, logger: Any) -> None:
        """Records how the run ended; Composer's second call, at interpreter exit, does nothing."""
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


# Composer's destinations in our Trainer.


def from_composer(destination: Any) -> "FromComposer":
    """Wraps a Composer destination for our trainer.

    ```python
    Trainer(..., loggers=[from_composer(FileLogger())])
    ```

    Args:
        destination: an instance of `composer.loggers.LoggerDestination`.

    Raises:
        TypeError: not an instance of that class.
    """
    if not isinstance(destination, TheirDestination):
        raise TypeError(
            f"destination must be a composer.loggers.LoggerDestination, got {destination!r}. "
            "Destinations of this project need no wrapping."
        )
    return FromComposer(destination)


class FromComposer(LoggerDestination):
    """Wraps a Composer destination for our `Trainer` or `Run`; made by `from_composer`.

    ```python
    Trainer(..., loggers=[FromComposer(FileLogger())])
    ```

    Passes on all events, and the records that Composer has: metrics, hyperparameters, tables, images, traces
    and files. The state that the destination sees has times of Composer's classes.

    Args:
        destination: the Composer destination.
    """

    def __init__(self, destination: Any) -> None:
        super().__init__()
        self.wrapped = destination

    def run_event(self, event: Event, state: State, logger: Any) -> None:
        getattr(self.wrapped, event.value)(_StateView(state), logger)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self.wrapped.log_hyperparameters(hyperparameters)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.wrapped.log_metrics(dict(metrics), step)

    def log_table(  # type: ignore[override]  # as above
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        self.wrapped.log_table(columns, rows, name, step)

    def log_images(  # type: ignore[override]  # Composer has no captions: the logger says so
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


_THEIRS: dict[type, Callable[[Any], Any]] = {
    Timestamp: lambda timestamp: TheirTimestamp(**timestamp.state_dict()),
    Time: lambda time: TheirTime.from_timestring(str(time)),
}


class _StateView:
    """View of our state with times of Composer's classes; assignments change our state."""

    def __init__(self, state: State) -> None:
        object.__setattr__(self, "_state", state)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._state, name)
        if name == "evaluators":
            return self._evaluators(value)
        return _THEIRS.get(type(value), lambda ours: ours)(value)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._state, name, value)

    def _evaluators(self, evaluators: tuple[Any, ...]) -> list[Any]:
        """Returns the evaluators, with one for the current label: a `Run` has none."""
        label, length = self._state.dataloader_label, self._state.dataloader_len
        if any(one.label == label for one in evaluators):
            return list(evaluators)
        batches = None if length is None else int(length)
        return [*evaluators, SimpleNamespace(label=label, subset_num_batches=batches)]
