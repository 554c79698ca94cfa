"""`AccelerateTracker`: a tracker for `Accelerator(log_with=…)`.

Everything runs in the logging thread, on the main process.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from destinations.run_directory import RunDirectory
from events import Callback, Destination, Logger
from uploads import needs_package

from .media import log_images, log_table
from .session import Session, log_values, whole

with needs_package("this adapter", "accelerate"):
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker, on_main_process

__all__ = ["AccelerateTracker"]


@functools.cache
def _notice_loads() -> None:
    """Makes `Accelerator.load_state` notify its trackers; Accelerate has no hook for that."""
    load_state = Accelerator.load_state

    @functools.wraps(load_state)
    def load(accelerator: Any, *args: Any, **kwargs: Any) -> None:
        load_state(accelerator, *args, **kwargs)
        # Trackers in `log_with` are not in `trackers` before `init_trackers`.
        for tracker in (*accelerator.trackers, *accelerator.log_with):
            if isinstance(tracker, AccelerateTracker):
                tracker.note_load()

    Accelerator.load_state = load


class AccelerateTracker(GeneralTracker):
    """Logs the records of an `Accelerator` to destinations.

    ```python
    tracker = AccelerateTracker(RunDirectory("runs/digits"))
    accelerator = Accelerator(log_with=tracker)
    accelerator.init_trackers("digits", config={"lr": 0.1})
    accelerator.log({"loss": loss}, step=step)
    accelerator.end_training()
    ```

    Accelerate has no training loop: `init_trackers` fires `INIT` and `FIT_START`, `end_training` fires
    `FIT_END` and closes the run; its batch count is the largest step logged. For more events, use
    `events.Run`.

    **Steps.** Without a step, each call of `log` advances by one.

    **End of the run.** A program that ends without a call of `end_training` completes the run, unless an
    exception ended it. `sys.exit(1)` cannot be told from a regular end then.

    **Registered.** After `register_tracker_class(AccelerateTracker)`, `Accelerator(log_with="destinations")`
    makes one: `init_trackers("digits", init_kwargs={"destinations": {"destinations": [...]}})`.

    Args:
        given: destinations that receive the records; before them the name of the project, as Accelerate gives
            it. With nothing but a project, they are a `RunDirectory("runs/<project>")`.
        destinations: more of them, as a list.
        callbacks: callbacks of this project.
        run_name: name of the run. Default: environment variable `RUN_NAME`, else the folder name of a
            `RunDirectory`, else a generated name, the same on all ranks of a `torchrun`.
        raise_errors: raise errors of destinations instead of reporting them; for tests.
    """

    name = "destinations"
    requires_logging_directory = False
    main_process_only = True

    def __init__(
        self,
        *given: Destination | str,
        destinations: Sequence[Destination] = (),
        callbacks: Callback | Iterable[Callback] = (),
        run_name: str | None = None,
        raise_errors: bool = False,
    ) -> None:
        super().__init__()
        project = given[0] if given and isinstance(given[0], str) else None
        all_given: tuple[Any, ...] = (*(given if project is None else given[1:]), *destinations)
        if project is not None and not all_given:
            all_given = (RunDirectory(Path("runs") / project),)
        if project is not None and not any(isinstance(one, RunDirectory) for one in all_given):
            run_name = run_name or project
        self._session = Session(
            all_given, callbacks, run_name, raise_errors=raise_errors, is_end_reported=False
        )
        self._next_step = 0
        # Whether a state was loaded since the last record; the next record has the step.
        self._has_loaded = False
        _notice_loads()

    @property
    def tracker(self) -> Logger:
        """The `Logger` of the run: `accelerator.get_tracker("destinations", unwrap=True)`."""
        return self._session.logger

    @on_main_process
    def start(self) -> None:
        """Fires `INIT` and `FIT_START`."""
        if not self._session.is_fitting or not self._session.is_open:
            self._session.fit_start(self._session.state.timestamp)

    def note_load(self) -> None:
        """Continues the run in the folder, because `Accelerator.load_state` was called."""
        self._session.state.continues_run = self._has_loaded = True

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Logs hyperparameters."""
        self.tracker.log_hyperparameters(dict(values))

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs scalars as metrics, strings as texts, and other values as traces."""
        step = self._next_step if step is None else step
        number = whole(step, self._next_step)
        if self._has_loaded:
            self._has_loaded = False
            self._session.fit_start(self._session.state.timestamp.copy(batch=number))
        log_values(self.tracker, values, step)
        self._next_step = max(self._next_step, number + 1)
        self._session.advance_to(step)

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs lists or batches of images by name; arrays are channels-last, as elsewhere in Accelerate."""
        for name, images in values.items():
            log_images(self.tracker, name, images, step)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Logs a table: columns and rows, or a data frame."""
        log_table(self.tracker, table_name, columns, data, dataframe, step)

    @on_main_process
    def finish(self) -> None:
        """Fires `FIT_END`; closes the run as completed."""
        self._session.fit_end()
        self._session.close()
