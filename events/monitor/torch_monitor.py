"""`torch.monitor`, both ways: its events become metrics here, ours become events there.

torch calls handlers with a lock of its own held, and lets go of the interpreter's lock in between wherever Python code
runs: two threads that log, and one handler written in Python, stop the whole process. So the handlers registered here are
C functions, and everything else happens in the training thread.
See `torch/csrc/monitor/events.cpp` and https://docs.pytorch.org/docs/stable/monitor.html.
"""

import atexit
import bisect
import collections
import logging
import time
import traceback
from typing import TYPE_CHECKING, Any

from events.logger.logger import Logger
from events.redaction import redact_text
from events.state import State

from . import stat
from .forward import Handover, log_data
from .monitor_event import Event, EventHandlerHandle, register_queue, unregister_event_handler
from .stat import STAT_EVENT

if TYPE_CHECKING:
    import torch.monitor

__all__ = ["FromTorchMonitor", "ToTorchMonitor", "from_torch", "to_torch"]

_log = logging.getLogger("events")

TORCH_STAT_EVENT = "torch.monitor.Stat"

_INT64 = range(-(2**63), 2**63)

# Those that listen to torch, for those that speak to it: what comes from here must not come back.
_listening: "list[FromTorchMonitor]" = []


class _Steps:
    """Which step it was when: torch's events have a time only."""

    def __init__(self, remembered: int = 1024) -> None:
        self._times: collections.deque[float] = collections.deque(maxlen=remembered)
        self._steps: collections.deque[int] = collections.deque(maxlen=remembered)

    def note(self, step: int | None, now: float) -> None:
        if step is not None and (not self._steps or step != self._steps[-1]):
            self._times.append(now)
            self._steps.append(step)

    def at(self, moment: float) -> int | None:
        if not self._steps:
            return None
        return self._steps[max(bisect.bisect_right(self._times, moment) - 1, 0)]


class FromTorchMonitor(Handover):
    """Hands the events of `torch.monitor` to the destinations of a run, as metrics.

    ```python
    Trainer(..., callbacks=[FromTorchMonitor()])
    ```

    The windows of torch's Stats come as "name.aggregation", counts as integers; the numbers of other events as
    "event name/name", and their strings as texts. Their step is the one at their time. What `ToTorchMonitor` sent does not
    come back.

    **Threading.** What torch calls is a C function, in whatever thread logs; it cannot stop the process as a Python
    function can. Events wait for the end of a batch, epoch, evaluation or `fit`, where the training thread logs them.

    **Close.** Unregisters, also where the interpreter ends: torch crashes there when a handler is left.

    Args:
        max_waiting: how many events may wait; when there are more, the oldest goes, and is counted in `dropped`.
    """

    def __init__(self, max_waiting: int = 10_000) -> None:
        super().__init__(max_waiting)
        self._handles: list[Any] = []
        self._steps = _Steps()
        # Events that came from here, by identity: torch hands on the very object that it was given.
        self._ours: collections.OrderedDict[int, Any] = collections.OrderedDict()

    def begin(self, state: State | None, logger: Logger | None) -> None:
        """Registers with torch; the calling thread is the one that trains."""
        from torch import monitor

        super().begin(state, logger)
        self._steps.note(self.step(), time.time())
        if not self._handles:
            # The first keeps, the second counts. Neither runs Python code.
            self._handles = [
                monitor.register_event_handler(handler) for handler in (self._waiting.append, self._put.count)
            ]
            _listening.append(self)
            atexit.register(self.stop)

    def ignore(self, event: "torch.monitor.Event") -> None:
        """Takes note of an event that is not to be logged when it comes."""
        self._ours[id(event)] = event
        while len(self._ours) > (self._waiting.maxlen or 1):
            self._ours.popitem(last=False)

    def drain(self) -> None:
        """Logs what waits. Call it from the training thread; the events of the loop do."""
        super().drain()
        # After: what came until now belongs to the steps before this one, except where its time says otherwise.
        self._steps.note(self.step(), time.time())

    def batch_end(self, state: State, logger: Logger) -> None:
        # Before: the batch has just been counted, and what came while it was trained is of the step before.
        self._steps.note(self.step(), time.time())
        self.drain()

    def deliver(self, item: "torch.monitor.Event") -> None:
        """Logs an event of torch."""
        if self._ours.pop(id(item), None) is item or self._logger is None:
            return
        is_stat = item.name == TORCH_STAT_EVENT
        data = {
            key: int(value) if is_stat and key.endswith(".count") and not isinstance(value, str) else value
            for key, value in item.data.items()
        }
        log_data(self._logger, item.name, data, self._steps.at(item.timestamp.timestamp()), is_stat=is_stat)

    def stop(self) -> None:
        """Unregisters, and logs what is there; a second time does nothing."""
        # torch crashes when a handler is unregistered twice.
        super().stop()
        handles, self._handles = self._handles, []
        if not handles:
            return
        from torch import monitor

        for handle in reversed(handles):
            monitor.unregister_event_handler(handle)
        _listening.remove(self)
        atexit.unregister(self.stop)
        self.drain()


class ToTorchMonitor(Handover):
    """Hands our monitor events to `torch.monitor`, for handlers registered there, such as `TensorboardEventHandler`.

    Windows of Stats arrive there as "torch.monitor.Stat", other events under their names. Times become local times without
    a zone, which is what torch has; `True` becomes 1, and integers of more than 64 bits become floats.

    **Threading.** torch is called in the training thread alone, at the end of a batch, epoch, evaluation or `fit`. If you
    have registered a Python function with torch, log to torch from no other thread: that stops the process, here as there.

    **Errors.** What torch's handlers raise is counted in `failures` and reported once.

    Args:
        max_waiting: how many events may wait; when there are more, the oldest goes, and is counted in `dropped`.
    """

    # torch's lock may be held in this thread, where one of its handlers logs an event of ours: it waits for the loop.
    delivers_at_once = False

    def __init__(self, max_waiting: int = 10_000) -> None:
        super().__init__(max_waiting)
        self.failures = 0
        self._handle: EventHandlerHandle | None = None

    def begin(self, state: State | None, logger: Logger | None) -> None:
        """Registers; the calling thread is the one that trains."""
        from torch import monitor  # noqa: F401  # here, not in the first batch

        super().begin(state, logger)
        if self._handle is None:
            self._handle = register_queue(self.put)

    def deliver(self, item: Event) -> None:
        """Logs an event to torch."""
        from torch import monitor

        try:
            event = _torch_event(item)
            for listener in tuple(_listening):
                listener.ignore(event)
            monitor.log_event(event)
        except Exception as error:  # noqa: BLE001  # handlers of others must not stop training
            self.failures += 1
            if self.failures == 1:
                story = "".join(traceback.format_exception(error)).rstrip()
                _log.error(
                    "event %r could not be handed to torch.monitor; further failures are not reported.\n%s",
                    item.name,
                    redact_text(story),
                )

    def stop(self) -> None:
        """Hands on what is there, open windows included, and hears of no more; a second time does nothing."""
        super().stop()
        handle, self._handle = self._handle, None
        if handle is None:
            return
        stat.flush()
        unregister_event_handler(handle)
        self.drain()


def _torch_event(event: Event) -> "torch.monitor.Event":
    from torch import monitor

    timestamp = event.timestamp
    if timestamp.tzinfo is not None:
        # torch takes the digits and forgets the zone.
        timestamp = timestamp.astimezone().replace(tzinfo=None)
    name = TORCH_STAT_EVENT if event.name == STAT_EVENT else event.name
    return monitor.Event(name, timestamp, {key: _torch_value(value) for key, value in event.data.items()})


def _torch_value(value: str | float) -> str | float:
    if isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, int) and value not in _INT64 else value


def from_torch(logger: Logger) -> FromTorchMonitor:
    """Hands the events of `torch.monitor` to a logger from now on, in a run that is under way.

    Args:
        logger: of a run; its steps are taken, and at its events what waits is logged.

    Returns:
        A `FromTorchMonitor` at work. It stops when the run is closed; `stop` it, or leave its block, to end it before.
        Where no events are run, `drain` it now and then, in this thread.
    """
    bridge = FromTorchMonitor()
    bridge.begin(logger.state, logger)
    logger.attach(bridge)
    return bridge


def to_torch(logger: Logger | None = None) -> ToTorchMonitor:
    """Hands our monitor events to `torch.monitor` from now on.

    Args:
        logger: of a run, at whose events this happens, and with which it ends.

    Returns:
        A `ToTorchMonitor` at work. Without a logger, `drain` it in this thread now and then, and `stop` it, or leave its
        block, at the end.
    """
    bridge = ToTorchMonitor()
    bridge.begin(None if logger is None else logger.state, logger)
    if logger is not None:
        logger.attach(bridge)
    return bridge
