"""Our destinations in `accelerate`: a tracker for `Accelerator(log_with=…)`.

Everything runs in the thread that logs, on the main process.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from events import Callback, Destination, Logger

from .media import log_images
from .session import Session, missing, plain_values, several

try:
    from accelerate.tracking import GeneralTracker, on_main_process
except ImportError as error:
    raise missing("accelerate", "accelerate", error) from error

__all__ = ["AccelerateTracker"]


class AccelerateTracker(GeneralTracker):
    """Logs what an `Accelerator` logs to destinations of ours.

    ```python
    tracker = AccelerateTracker(RunDirectory("runs/digits"))
    accelerator = Accelerator(log_with=tracker)
    accelerator.init_trackers("digits", config={"lr": 0.1})
    accelerator.log({"loss": loss}, step=step)
    accelerator.end_training()
    ```

    Accelerate has no loop of its own: `INIT` and `FIT_START` come with `init_trackers`, `FIT_END` and close with
    `end_training`; the batch count of the run is the largest step logged. For more events, take `events.Run`.

    **Steps.** Without a step, each call of `log` is the next one.

    **The end.** A program that ends with an exception before `end_training` is a failed run; one that leaves it out is
    too, since nobody knows.

    Args:
        destinations: where records go.
        callbacks: callbacks of ours that hear the events.
        run_name: the name of the run. Default: `RUN_NAME` of the environment, else the name of the folder of a
            `RunDirectory`, else a new one; with several ranks there must be one of the first three.
        raise_errors: lets what a destination raises come out, for tests.
    """

    name = "destinations"
    requires_logging_directory = False
    main_process_only = True

    def __init__(
        self,
        *destinations: Destination,
        callbacks: Callback | Iterable[Callback] = (),
        run_name: str | None = None,
        raise_errors: bool = False,
    ) -> None:
        super().__init__()
        self._session = Session(destinations, several(callbacks), run_name, raise_errors=raise_errors)
        self._next_step = 0

    @property
    def tracker(self) -> Logger:
        """Our own logger, with all that it can log: `accelerator.get_tracker("destinations", unwrap=True)`."""
        return self._session.logger

    @on_main_process
    def start(self) -> None:
        """`INIT`, `FIT_START`."""
        if not self._session.is_fitting or not self._session.is_open:
            self._session.fit_start(self._session.state.timestamp)

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Logs hyperparameters."""
        self.tracker.log_hyperparameters(dict(values))

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs scalars as metrics, strings as texts, and anything else as a trace."""
        step = self._next_step if step is None else int(step)
        metrics, others = plain_values(values)
        logger = self.tracker
        if metrics:
            logger.log_metrics(metrics, step)
        for name, value in others.items():
            if isinstance(value, str):
                logger.log_text(value, name=name, step=step)
            else:
                logger.log_traces({name: value})
        self._next_step = max(self._next_step, step + 1)
        self._session.follow(step)

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs lists or batches of images by name; arrays have their channels last, as elsewhere in Accelerate."""
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
        if dataframe is not None:
            columns, data = [str(name) for name in dataframe.columns], dataframe.to_numpy().tolist()
        self.tracker.log_table(list(columns or ()), list(data or ()), name=table_name, step=step)

    @on_main_process
    def finish(self) -> None:
        """`FIT_END`; closes the run as completed."""
        self._session.fit_end()
        self._session.close()
