"""Bridges between monitor events, a run's destinations and `torch.monitor`.

`ForwardMonitor` logs our monitor events to the destinations of a run, and `FromTorchMonitor` the events of
`torch.monitor`; `ToTorchMonitor` passes our events to handlers registered with torch. Events may be logged in
any thread; each bridge queues them and delivers them in the training thread.

torch holds a lock while it calls its handlers, and a Python handler lets other threads run meanwhile, so two
threads that log deadlock. Therefore the handlers registered here are C functions. See
`torch/csrc/monitor/events.cpp` and https://docs.pytorch.org/docs/stable/monitor.html.
"""

from __future__ import annotations

import atexit
import bisect
import collections
import functools
import itertools
import logging
import math
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Self

from events.callback import Callback
from events.errors import EngineClosedError, RecordError
from events.redaction import error_trace

from . import stat
from .monitor_event import (
    STAT_EVENT,
    TORCH_STAT_EVENT,
    Event,
    EventHandlerHandle,
    register_reentrant_handler,
    unregister_event_handler,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch.monitor

    from events.logger.logger import Logger
    from events.state import State

__all__ = [
    "ForwardMonitor",
    "FromTorchMonitor",
    "QueuedCallback",
    "TensorboardEventHandler",
    "ToTorchMonitor",
    "forward_to",
    "from_torch",
    "to_torch",
]

_log = logging.getLogger("events")

_INT64 = range(-(2**63), 2**63)

# Events that ToTorchMonitor logged to torch: FromTorchMonitor must not log them again. torch passes on the
# same object.
_sent_to_torch: weakref.WeakSet[Any] = weakref.WeakSet()


class _AtomicCounter:
    """A counter whose `count` is a C callable: it is atomic, and ignores its argument."""

    def __init__(self) -> None:
        self._next = itertools.count()
        self._reads = 0
        self._lock = threading.Lock()
        self.count = functools.partial(next, self._next)

    def value(self) -> int:
        with self._lock:
            value = next(self._next) - self._reads
            self._reads += 1
            return value


class QueuedCallback(Callback):
    """A callback that accepts items from any thread and delivers them in the training thread.

    Subclasses implement `deliver`. The queue is drained at the end of each batch (of training, evaluation and
    prediction), epoch, evaluation and `fit`, and at close. Items put by the training thread itself (the
    thread that called `start`) are delivered immediately.

    The queue is bounded: when it is full, the oldest item is dropped and counted. A forked child delivers
    nothing.

    Args:
        max_pending: the size of the queue.
    """

    # Whether an item put by the training thread is delivered within `put`.
    delivers_immediately = True

    def __init__(self, max_pending: int = 10_000) -> None:
        if max_pending < 1:
            raise ValueError(f"max_pending must be at least 1, got {max_pending!r}.")
        self._pending: collections.deque[Any] = collections.deque(maxlen=max_pending)
        self._put = _AtomicCounter()
        self._taken = 0
        self._training_thread: int | None = None
        self._pid = os.getpid()
        self._is_draining = False
        self._has_warned = False
        self._undeliverable = 0
        self._logger: Logger | None = None
        self._state: State | None = None

    @property
    def dropped(self) -> int:
        """The number of items lost: dropped from a full queue, refused by the logger, or pending at close."""
        # Other threads may put meanwhile. An item is counted after it is queued, and counted as taken before
        # it leaves the queue: read in this order, an item in transit is never reported as lost.
        put, pending = self._put.value(), len(self._pending)
        return max(put - pending - self._taken, 0) + self._undeliverable

    def start(self, state: State | None, logger: Logger | None) -> None:
        """Makes the calling thread the training thread.

        Args:
            state: the run.
            logger: where to log.
        """
        self._state, self._logger = state, logger
        self._training_thread = threading.get_ident()
        self._pid = os.getpid()

    def attach_to(self, logger: Logger | None) -> Self:
        """Starts, and attaches to a run in progress, if any; returns the callback itself."""
        self.start(None if logger is None else logger.state, logger)
        if logger is not None:
            logger.attach(self)
        return self

    def stop(self) -> None:
        """Delivers pending items and detaches from the logger; a second call does nothing."""
        if self._logger is not None:
            self._logger.detach(self)

    def deliver(self, item: Any) -> None:
        """Processes one item, in the training thread."""
        raise NotImplementedError

    def put(self, item: Any) -> None:
        """Queues an item, from any thread; never blocks."""
        if os.getpid() != self._pid:
            return
        self._pending.append(item)
        self._put.count(item)
        if self.delivers_immediately and threading.get_ident() == self._training_thread:
            self.drain()

    def drain(self) -> None:
        """Delivers the pending items. Call it from the training thread; the events of the loop do."""
        # A destination may itself log an event while it takes one: that one stays in the queue.
        if self._is_draining or not self._pending or os.getpid() != self._pid:
            return
        self._is_draining = True
        try:
            for _ in range(len(self._pending)):
                self._taken += 1
                self._try_deliver(self._pending.popleft())
        finally:
            self._is_draining = False
        if not self._has_warned and self.dropped:
            self._warn_once("%s dropped %d items: drain it more often, or raise max_pending.", self.dropped)

    def _try_deliver(self, item: Any) -> None:
        try:
            self.deliver(item)
        except EngineClosedError:
            self._undeliverable += 1
            self._warn_once("%s had %d items pending when the run was closed.", 1 + len(self._pending))
        except RecordError as error:
            # A bad value from a library's event must not stop training.
            self._undeliverable += 1
            self._warn_once("%s could not log a value; further failures are not reported: %s", error)

    def _warn_once(self, message: str, detail: object) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(message, type(self).__name__, detail)

    def _drain_at_event(self, state: State, logger: Logger) -> None:
        self.drain()

    batch_end = epoch_end = fit_end = _drain_at_event
    eval_batch_end = eval_end = predict_batch_end = predict_end = _drain_at_event

    def init(self, state: State, logger: Logger) -> None:
        self.start(state, logger)

    def fit_start(self, state: State, logger: Logger) -> None:
        self._training_thread = threading.get_ident()
        self.drain()

    def close(self, state: State, logger: Logger) -> None:
        self.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def step(self) -> int | None:
        """Returns the number of batches completed; safe in any thread, as timestamps are frozen."""
        return None if self._state is None else int(self._state.timestamp.batch)


class _EventsCallback(QueuedCallback):
    """A queued callback that receives our monitor events from `start` to `stop`."""

    _handle: EventHandlerHandle | None = None

    def start(self, state: State | None, logger: Logger | None) -> None:
        """Registers the handler; the calling thread is the training thread."""
        super().start(state, logger)
        if self._handle is None:
            self._handle = register_reentrant_handler(self.receive)

    def receive(self, event: Event) -> None:
        """Queues an event; called in the thread that logs it."""
        self.put(event)

    def stop(self) -> None:
        """Delivers open windows and pending events, and unregisters; a second call does nothing."""
        super().stop()
        handle, self._handle = self._handle, None
        if handle is None:
            return
        stat.flush()
        unregister_event_handler(handle)
        # Explicitly: at interpreter exit this may run in another thread, where `put` does not drain.
        self.drain()


class ForwardMonitor(_EventsCallback):
    """Logs monitor events to the destinations of a run, as metrics.

    ```python
    Trainer(..., callbacks=[ForwardMonitor()])
    ```

    Windows of a `Stat` become metrics "name.aggregation"; the numbers of other events become metrics
    "event name/key", and their strings become texts. Their step is the number of batches completed when the
    event was logged.

    **Threading.** Events may be logged in any thread. They are queued and logged by the training thread at
    the end of a batch, epoch, evaluation or `fit`; events of the training thread itself are logged
    immediately.

    **Close.** All open windows of the process are closed and logged.

    Events belong to the process, not to a run: with two runs in one process, both receive all of them.

    Args:
        max_pending: how many events are queued; beyond that the oldest is dropped, and counted in `dropped`.
    """

    def receive(self, event: Event) -> None:
        """Queues an event with the step at which it is logged."""
        self.put((self.step(), event))

    def deliver(self, item: tuple[int | None, Event]) -> None:
        """Logs an event."""
        step, event = item
        if self._logger is not None:
            _log_event_data(self._logger, event.name, event.data, step, is_stat=event.name == STAT_EVENT)


class _StepHistory:
    """The recent steps with the time at which each began: torch's events carry a time, but no step."""

    def __init__(self, max_steps: int = 1024) -> None:
        self._begun: collections.deque[tuple[float, int]] = collections.deque(maxlen=max_steps)

    def add(self, step: int | None, now: float) -> None:
        if step is not None and (not self._begun or step != self._begun[-1][1]):
            self._begun.append((now, step))

    def step_at(self, seconds: float) -> int | None:
        if not self._begun:
            return None
        return self._begun[max(bisect.bisect_right(self._begun, (seconds, math.inf)) - 1, 0)][1]


class FromTorchMonitor(QueuedCallback):
    """Logs the events of `torch.monitor` to the destinations of a run, as metrics.

    ```python
    Trainer(..., callbacks=[FromTorchMonitor()])
    ```

    Windows of torch's Stats become metrics "name.aggregation", counts as integers; the numbers of other
    events become metrics "event name/key", and their strings become texts. Their step is the one at the
    event's time. Events that `ToTorchMonitor` sent are not logged again.

    **Threading.** The handlers registered with torch are C functions, which cannot deadlock as a Python
    function can. Events are queued and logged by the training thread at the end of a batch, epoch, evaluation
    or `fit`.

    **Close.** Unregisters the handlers, also at interpreter exit: torch crashes there if a handler is left.

    Args:
        max_pending: how many events are queued; beyond that the oldest is dropped, and counted in `dropped`.
    """

    def __init__(self, max_pending: int = 10_000) -> None:
        super().__init__(max_pending)
        self._handles: list[Any] = []
        self._steps = _StepHistory()

    def start(self, state: State | None, logger: Logger | None) -> None:
        """Registers with torch; the calling thread is the training thread."""
        from torch import monitor

        super().start(state, logger)
        self._steps.add(self.step(), time.time())
        if not self._handles:
            # The first queues, the second counts; neither runs Python code.
            self._handles = [
                monitor.register_event_handler(handler) for handler in (self._pending.append, self._put.count)
            ]
            atexit.register(self.stop)

    def drain(self) -> None:
        """Logs the pending events. Call it from the training thread; the events of the loop do."""
        super().drain()
        # Afterwards: events logged until now belong to earlier steps, except where their time says otherwise.
        self._steps.add(self.step(), time.time())

    def batch_end(self, state: State, logger: Logger) -> None:
        # Beforehand: the batch has just been counted, and events logged during it belong to the step before.
        self._steps.add(self.step(), time.time())
        self.drain()

    def deliver(self, item: torch.monitor.Event) -> None:
        """Logs an event of torch."""
        if item in _sent_to_torch or self._logger is None:
            return
        is_stat = item.name == TORCH_STAT_EVENT
        data = {
            key: int(value) if is_stat and key.endswith(".count") and type(value) is not str else value
            for key, value in item.data.items()
        }
        step = self._steps.step_at(item.timestamp.timestamp())
        _log_event_data(self._logger, item.name, data, step, is_stat=is_stat)

    def stop(self) -> None:
        """Unregisters, and logs pending events; a second call does nothing."""
        super().stop()
        # torch crashes if a handler is unregistered twice.
        handles, self._handles = self._handles, []
        if not handles:
            return
        from torch import monitor

        for handle in reversed(handles):
            monitor.unregister_event_handler(handle)
        atexit.unregister(self.stop)
        self.drain()


class ToTorchMonitor(_EventsCallback):
    """Passes our monitor events to the handlers of `torch.monitor`, such as `TensorboardEventHandler`.

    ```python
    Trainer(..., callbacks=[ToTorchMonitor()])
    ```

    Windows of Stats arrive as "torch.monitor.Stat", other events under their own names. Timestamps become
    local times without a zone, as torch has them; `True` becomes 1, and integers of more than 64 bits become
    floats.

    **Threading.** torch is called in the training thread alone, at the end of a batch, epoch, evaluation or
    `fit`. If you have registered a Python function with torch, log to torch from no other thread: it would
    deadlock.

    **Errors.** Exceptions of torch's handlers are counted in `failures`; the first is reported.

    Args:
        max_pending: how many events are queued; beyond that the oldest is dropped, and counted in `dropped`.
    """

    # One of torch's handlers may log one of our events while this thread holds torch's lock: it waits in the
    # queue.
    delivers_immediately = False

    def __init__(self, max_pending: int = 10_000) -> None:
        super().__init__(max_pending)
        self.failures = 0

    def start(self, state: State | None, logger: Logger | None) -> None:
        """Registers the handler; the calling thread is the training thread."""
        from torch import monitor  # noqa: F401  # here, not in the first batch

        super().start(state, logger)

    def deliver(self, item: Event) -> None:
        """Logs an event to torch."""
        from torch import monitor

        try:
            event = _torch_event(item)
            _sent_to_torch.add(event)
            monitor.log_event(event)
        except Exception as error:  # noqa: BLE001  # others' handlers must not stop training
            self.failures += 1
            if self.failures == 1:
                _log.error(
                    "event %r could not be passed to torch.monitor; further failures are not reported.\n%s",
                    item.name,
                    error_trace(error),
                )


def forward_to(logger: Logger) -> ForwardMonitor:
    """Logs monitor events to a running logger from now on.

    ```python
    with Run(loggers=[InMemory()]) as run:
        monitor.forward_to(run.logger)
        for batch in train_dataloader:
            ...
            run.batch_end()
    ```

    Events of the calling thread are logged immediately. Events of other threads, including windows that end
    on time, are logged at the end of a batch, epoch, evaluation or `fit`, as with a `ForwardMonitor`
    callback.

    Args:
        logger: the logger of a run, which also gives the steps.

    Returns:
        The active `ForwardMonitor`. It stops when the run is closed; call `stop`, or use it as a context
        manager, to end it earlier. If your loop runs no events, call `drain` regularly in this thread.
    """
    return ForwardMonitor().attach_to(logger)


def from_torch(logger: Logger) -> FromTorchMonitor:
    """Logs the events of `torch.monitor` to a running logger from now on.

    ```python
    with Run(loggers=[InMemory()]) as run:
        monitor.from_torch(run.logger)
    ```

    Args:
        logger: the logger of a run, which also gives the steps; pending events are logged at the run's
            events.

    Returns:
        The active `FromTorchMonitor`. It stops when the run is closed; call `stop`, or use it as a context
        manager, to end it earlier. If your loop runs no events, call `drain` regularly in this thread.
    """
    return FromTorchMonitor().attach_to(logger)


def to_torch(logger: Logger | None = None) -> ToTorchMonitor:
    """Passes our monitor events to `torch.monitor` from now on.

    ```python
    with Run(loggers=[InMemory()]) as run:
        monitor.to_torch(run.logger)
    ```

    Args:
        logger: the logger of a run; its events drive the delivery, and its close ends it.

    Returns:
        The active `ToTorchMonitor`. Without a logger, call `drain` regularly in this thread, and `stop` at
        the end (or use it as a context manager).
    """
    return ToTorchMonitor().attach_to(logger)


def _log_event_data(
    logger: Logger, name: str, data: Mapping[str, str | float], step: int | None, *, is_stat: bool
) -> None:
    """Logs the numbers of an event as metrics and its strings as texts; a Stat's keys need no prefix."""
    prefix = "" if is_stat else f"{name}/"
    # The values of an event are of these types exactly, not of subclasses: it has converted them.
    metrics = {prefix + key: value for key, value in data.items() if type(value) is not str}
    if metrics:
        logger.log_metrics(metrics, step)
    for key, value in data.items():
        if type(value) is str:
            logger.log_text(value, prefix + key, step)


def _torch_event(event: Event) -> torch.monitor.Event:
    from torch import monitor

    timestamp = event.timestamp
    if timestamp.tzinfo is not None:
        # torch ignores the zone.
        timestamp = timestamp.astimezone().replace(tzinfo=None)
    name = TORCH_STAT_EVENT if event.name == STAT_EVENT else event.name
    return monitor.Event(name, timestamp, {key: _torch_value(value) for key, value in event.data.items()})


def _torch_value(value: str | float) -> str | float:
    if type(value) is bool:
        return int(value)
    return float(value) if type(value) is int and value not in _INT64 else value


class TensorboardEventHandler:
    """Writes the windows of Stats to a `SummaryWriter`, as the class of this name in `torch.monitor`.

    ```python
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter("logs") as writer:
        handle = monitor.register_event_handler(monitor.TensorboardEventHandler(writer))
        ...
        monitor.unregister_event_handler(handle)
    ```

    The step of a scalar is the number of earlier windows that had it; torch's handler gives none, so that all
    windows are at step 0. Other events are ignored.

    Args:
        writer: has `add_scalar(tag, value, global_step=..., walltime=...)`.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._windows: collections.Counter[str] = collections.Counter()

    def __call__(self, event: Event) -> None:
        """Writes the scalars of a window."""
        if event.name not in {STAT_EVENT, TORCH_STAT_EVENT}:
            return
        for name, value in event.data.items():
            self._writer.add_scalar(
                name, value, global_step=self._windows[name], walltime=event.timestamp.timestamp()
            )
            self._windows[name] += 1
