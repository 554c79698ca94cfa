"""A destination that records every call."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from destinations.base import RecordDestination
from destinations.copies import own_copy
from events import Event, Logger, State

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Call", "RecordingDestination"]


@attrs.frozen
class Call:
    """One call of a method of a destination: its name, and its arguments by name, copied.

    ```python
    destination = RecordingDestination()
    with Run(loggers=[destination]) as run:
        run.log_metrics({"loss": 0.5}, step=3)
    print([call.arguments for call in destination.calls if call.method == "log_metrics"])
    ```
    """

    method: str
    arguments: dict[str, Any]


class RecordingDestination(RecordDestination):
    """Records every call that a destination gets, in order, with copies of its arguments.

    ```python
    destination = RecordingDestination()
    Trainer(..., loggers=[destination]).fit()
    print(destination.calls[0].method)
    ```

    Args:
        stores_files: whether it accepts files, which it keeps in `files`.
    """

    def __init__(self, stores_files: bool = False) -> None:
        self.calls: list[Call] = []
        self.files: dict[str, bytes] = {}
        self._stores_files = stores_files

    @property
    def events(self) -> list[Event]:
        """The events, in order."""
        return [Event(call.arguments["event"]) for call in self.of("run_event")]

    @property
    def metrics(self) -> list[tuple[int | None, dict[str, float]]]:
        """Step and values of each call of `log_metrics`."""
        return [(call.arguments["step"], call.arguments["metrics"]) for call in self.of("log_metrics")]

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """All hyperparameters, later ones over earlier ones."""
        merged: dict[str, Any] = {}
        for call in self.of("log_hyperparameters"):
            merged.update(call.arguments["hyperparameters"])
        return merged

    def of(self, method: str) -> list[Call]:
        """Returns the calls of one method."""
        return [call for call in self.calls if call.method == method]

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        self._note("run_event", event=event)

    def close(self, state: State, logger: Logger) -> None:
        self._note("close")

    def post_close(self) -> None:
        self._note("post_close")

    def flush(self) -> None:
        self._note("flush")

    def log_hyperparameters(self, hyperparameters: "dict[str, Any]") -> None:
        self._note("log_hyperparameters", hyperparameters=hyperparameters)

    def log_metrics(self, metrics: "Mapping[str, float]", step: int | None = None) -> None:
        self._note("log_metrics", metrics=dict(metrics), step=step)

    def log_record(self, kind: str, arguments: "dict[str, Any]") -> None:
        self._note(f"log_{kind}", **arguments)

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        self._note("upload_file", remote_file_name=remote_file_name, file_path=file_path, overwrite=overwrite)
        if self._stores_files:
            self.files[remote_file_name] = Path(file_path).read_bytes()

    def can_upload_files(self) -> bool:
        return self._stores_files

    def _note(self, method: str, **arguments: Any) -> None:
        self.calls.append(Call(method, {name: own_copy(value) for name, value in arguments.items()}))
