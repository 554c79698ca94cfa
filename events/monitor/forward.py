"""Monitor events to destinations: the windows of Stats, and whatever else is logged as an event, become metrics."""

import collections
import functools
import itertools
import logging
import os
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from events.callback import Callback
from events.errors import EngineClosedError, RecordError
from events.logger.logger import Logger
from events.state import State

from . import stat
from .monitor_event import Event, EventHandlerHandle, register_queue, unregister_event_handler
from .stat import STAT_EVENT

__all__ = ["ForwardMonitor", "Handover", "forward_to", "log_data"]

_log = logging.getLogger("events")


class _Tally:
    """A counter of which the counting is a call that no other thread can interrupt; it takes an argument and ignores it."""

    def __init__(self) -> None:
        self._next = itertools.count()
        self._reads = 0
        self._lock = threading.Lock()
        # A C callable: no Python code runs when it is called.
        self.count = functools.partial(next, self._next)

    def value(self) -> int:
        with self._lock:
            value = next(self._next) - self._reads
            self._reads += 1
            return value


class Handover(Callback):
    """A callback that takes things from any thread and delivers them in the training thread.

    Subclasses say in `deliver` what that means. Delivery happens at the end of each batch, of training, evaluation and
    prediction, of epochs, evaluations and `fit`, and at close; at once, where something is put by the training thread
    itself, which is the one that called `begin`.

    The queue is bounded: when it is full, the oldest goes, and is counted. A forked child delivers nothing.

    Args:
        max_waiting: how many may wait.
    """

    # Whether what the training thread puts is delivered in that very call.
    delivers_at_once = True

    def __init__(self, max_waiting: int = 10_000) -> None:
        if max_waiting < 1:
            raise ValueError(f"max_waiting must be at least 1, got {max_waiting!r}.")
        self._waiting: collections.deque[Any] = collections.deque(maxlen=max_waiting)
        self._put = _Tally()
        self._taken = 0
        self._training_thread: int | None = None
        self._pid = os.getpid()
        self._is_draining = False
        self._has_complained = False
        self._undeliverable = 0
        self._logger: Logger | None = None
        self._state: State | None = None

    @property
    def dropped(self) -> int:
        """How many were lost: pushed out of a full queue, refused by a destination, or waiting when the run was closed."""
        # Other threads go on meanwhile. An item is counted after it waits, and is taken before it leaves; read in this
        # order, one that is between two places is at most missing here, and never lost.
        put, waiting = self._put.value(), len(self._waiting)
        return max(put - waiting - self._taken, 0) + self._undeliverable

    def begin(self, state: State | None, logger: Logger | None) -> None:
        """Takes the calling thread as the one that trains.

        Args:
            state: the run.
            logger: where to log.
        """
        self._state, self._logger = state, logger
        self._training_thread = threading.get_ident()
        self._pid = os.getpid()

    def stop(self) -> None:
        """Delivers what is there, and takes no more; a second time does nothing."""
        if self._logger is not None:
            self._logger.detach(self)

    def deliver(self, item: Any) -> None:
        """Does with an item what it came for."""
        raise NotImplementedError

    def put(self, item: Any) -> None:
        """Takes an item, from any thread; never waits."""
        if os.getpid() != self._pid:
            return
        self._waiting.append(item)
        self._put.count(item)
        if self.delivers_at_once and threading.get_ident() == self._training_thread:
            self.drain()

    def drain(self) -> None:
        """Delivers what waits. Call it from the training thread; the events of the loop do."""
        # While something is delivered, more may come: of a destination that logs an event, for one. It waits.
        if self._is_draining or not self._waiting or os.getpid() != self._pid:
            return
        self._is_draining = True
        try:
            for _ in range(len(self._waiting)):
                self._taken += 1
                item = self._waiting.popleft()
                self._attempt(item)
        finally:
            self._is_draining = False
        if not self._has_complained and self.dropped:
            self._complain("%s lost %d: drain it more often, or raise max_waiting.", self.dropped)

    def _attempt(self, item: Any) -> None:
        try:
            self.deliver(item)
        except EngineClosedError:
            self._undeliverable += 1
            self._complain("%s had %d waiting when the run was closed.", 1 + len(self._waiting))
        except RecordError as error:
            # What somebody's handler or library made up must not stop training.
            self._undeliverable += 1
            self._complain("%s could not log a value, and will not report more of them: %s", error)

    def _complain(self, message: str, subject: object) -> None:
        if not self._has_complained:
            self._has_complained = True
            _log.warning(message, type(self).__name__, subject)

    def init(self, state: State, logger: Logger) -> None:
        self.begin(state, logger)

    def fit_start(self, state: State, logger: Logger) -> None:
        self._training_thread = threading.get_ident()
        self.drain()

    def batch_end(self, state: State, logger: Logger) -> None:
        self.drain()

    def epoch_end(self, state: State, logger: Logger) -> None:
        self.drain()

    def fit_end(self, state: State, logger: Logger) -> None:
        self.drain()

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        self.drain()

    def eval_end(self, state: State, logger: Logger) -> None:
        self.drain()

    def predict_batch_end(self, state: State, logger: Logger) -> None:
        self.drain()

    def predict_end(self, state: State, logger: Logger) -> None:
        self.drain()

    def close(self, state: State, logger: Logger) -> None:
        self.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def step(self) -> int | None:
        """Returns where the run stands: a single read of something frozen, in any thread."""
        return None if self._state is None else int(self._state.timestamp.batch)


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
        stat.flush()
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
