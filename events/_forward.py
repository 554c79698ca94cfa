"""Monitor events to destinations: the windows of Stats, and whatever else is logged as an event, become metrics."""

from collections.abc import Mapping

from . import _stat
from ._handover import Handover
from ._monitor_event import Event, EventHandlerHandle, register_queue, unregister_event_handler
from ._window import STAT_EVENT
from .logger import Logger
from .state import State

__all__ = ["ForwardMonitor", "forward_to", "log_data"]


class ForwardMonitor(Handover):
    """Hands monitor events to the destinations of a run, as metrics.

    ```python
    Trainer(..., callbacks=[ForwardMonitor()])
    ```

    The windows of a Stat come as "name.aggregation", the numbers of other events as "event name/name", and their strings as
    texts. Their step is the one at the time of the event: the number of batches completed.

    **Threading.** Events may be logged in any thread. They wait in a queue for the end of a batch, epoch, evaluation or
    `fit`, where the training thread hands them to the logger; what the training thread itself logs comes at once.

    **Close.** All open windows of the process are logged and handed on.

    Events are the process's, not the run's: with two runs in one process, both hear all of them.

    Args:
        max_waiting: how many events may wait; when there are more, the oldest goes, and is counted in `dropped`.
    """

    _handle: EventHandlerHandle | None = None

    def begin(self, state: State | None, logger: Logger | None) -> None:
        """Registers; the calling thread is the one that trains."""
        super().begin(state, logger)
        if self._handle is None:
            self._handle = register_queue(self._take)

    def _take(self, event: Event) -> None:
        self.put((self.step(), event))

    def deliver(self, item: tuple[int | None, Event]) -> None:
        """Logs an event."""
        step, event = item
        if self._logger is not None:
            log_data(self._logger, event.name, event.data, step, is_stat=event.name == STAT_EVENT)

    def stop(self) -> None:
        """Logs what is there, and hears of no more; a second time does nothing."""
        super().stop()
        handle, self._handle = self._handle, None
        if handle is None:
            return
        # Whoever calls this may be another thread than the one that began: close may come where the interpreter ends.
        _stat.flush()
        unregister_event_handler(handle)
        self.drain()


def forward_to(logger: Logger) -> ForwardMonitor:
    """Hands monitor events to a logger from now on, in a run that is under way.

    ```python
    with Run(loggers=[...]) as run:
        monitor.forward_to(run.logger)
        for batch in loader:
            ...
            run.batch_end()
    ```

    What the calling thread logs is handed on at once; what other threads log, the windows that end on time among it, waits
    for the end of a batch, epoch, evaluation or `fit`, as with `ForwardMonitor` among the callbacks.

    Args:
        logger: of a run; its steps are taken.

    Returns:
        A `ForwardMonitor` at work. It stops when the run is closed; `stop` it, or leave its block, to end it before.
        Where no events are run, `drain` it now and then, in this thread.
    """
    forwarding = ForwardMonitor()
    forwarding.begin(logger.state, logger)
    logger.attach(forwarding)
    return forwarding


def log_data(
    logger: Logger, name: str, data: Mapping[str, str | float], step: int | None, *, is_stat: bool
) -> None:
    """Logs what an event says: numbers as metrics, strings as texts.

    Args:
        logger: where to.
        name: of the event.
        data: its data.
        step: the step it belongs to.
        is_stat: whether the data's names already say what was measured.
    """
    prefix = "" if is_stat else f"{name}/"
    metrics = {prefix + key: value for key, value in data.items() if not isinstance(value, str)}
    if metrics:
        logger.log_metrics(metrics, step)
    for key, value in data.items():
        if isinstance(value, str):
            logger.log_text(value, prefix + key, step)
