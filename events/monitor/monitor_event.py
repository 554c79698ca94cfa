"""Monitor events: `log_event` passes an event to every registered handler.

Any thread may log, register and unregister. Handlers run in the thread that logs; no lock is held while they
run.
"""

import itertools
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any

import attrs

from events.logger.values import PLAIN_TYPES
from events.redaction import error_trace

__all__ = [
    "Event",
    "EventHandlerHandle",
    "data_value_t",
    "log_event",
    "register_event_handler",
    "register_reentrant_handler",
    "unregister_event_handler",
]

_log = logging.getLogger("events")

Value = str | float | int | bool
data_value_t = Value
"""The type of a value in an event's data, under the name that it has in `torch.monitor`."""

STAT_EVENT = "events.monitor.Stat"
TORCH_STAT_EVENT = "torch.monitor.Stat"
_PLAIN_TYPES = PLAIN_TYPES | {str}


def _plain_data(data: Mapping[str, Any]) -> Mapping[str, Value]:
    """Returns a read-only copy: one handler must not change what the next one sees."""
    if not isinstance(data, Mapping):
        raise TypeError(f"event data must be a dict from name to value, got {type(data).__name__}.")
    return MappingProxyType({_key(key): _plain(key, value) for key, value in data.items()})


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"keys of event data must be strings, got {key!r} ({type(key).__name__}).")
    return key


def _plain(key: str, value: Any) -> Value:
    if type(value) in _PLAIN_TYPES:
        plain: Value = value
        return plain
    # numpy scalars: some are Python floats and strings, others only behave like numbers.
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    hint = " Write value.item()." if hasattr(value, "item") else ""
    raise TypeError(
        f"event value {key!r} must be a str, float, int or bool, got {type(value).__name__}.{hint}"
    )


@attrs.frozen(hash=False)
class Event:
    """A monitor event: a name, a time and data.

    ```python
    event = monitor.Event("data_loader", datetime.now(UTC), {"wait_seconds": 0.25, "shard": 7})
    monitor.log_event(event)
    ```

    Values keep their types: `True` is not `1.0`, and an integer of any size keeps its last digit. Two events
    of equal content are equal; an event can be copied and pickled.

    Attributes:
        name: the name; dots separate its parts, as in "my_project.data_loaded".
        timestamp: when it happened; a datetime without a zone is local time, one with a zone keeps its
            instant.
        data: str, float, int or bool by name, numpy's scalars included; a read-only copy.

    Raises:
        TypeError: an argument is of another type.
    """

    name: str = attrs.field(validator=attrs.validators.instance_of(str))
    timestamp: datetime = attrs.field(validator=attrs.validators.instance_of(datetime))
    data: Mapping[str, Value] = attrs.field(converter=_plain_data)

    def __reduce__(self) -> tuple[Any, ...]:
        # `mappingproxy` cannot be pickled.
        return Event, (self.name, self.timestamp, dict(self.data))


@attrs.define(eq=False)
class EventHandlerHandle:
    """A registration: returned by `register_event_handler`, taken by `unregister_event_handler`.

    ```python
    handle = monitor.register_event_handler(print)
    monitor.unregister_event_handler(handle)
    ```

    Attributes:
        handler: the function.
        is_reentrant: whether it also receives events that are logged while it runs, in the same thread.
    """

    handler: Callable[[Event], object]
    is_reentrant: bool = attrs.field(default=False, kw_only=True)
    _failures: "itertools.count[int]" = attrs.field(factory=itertools.count, init=False)

    def record_failure(self, error: Exception) -> None:
        """Reports the first exception of the handler, and ignores later ones."""
        if next(self._failures) == 0:
            name = getattr(self.handler, "__qualname__", repr(self.handler))
            _log.error(
                "monitor event handler %s failed; other handlers are still called, and further failures "
                "of it are not reported.\n%s",
                name,
                error_trace(error),
            )


class _Handlers:
    """The registered handlers; the lock guards replacing the tuple, which is read without it."""

    def __init__(self) -> None:
        self.all: tuple[EventHandlerHandle, ...] = ()
        self._lock = threading.Lock()
        # The handlers that are running in this thread.
        self.running = threading.local()

    def add(self, handle: EventHandlerHandle) -> EventHandlerHandle:
        with self._lock:
            self.all = (*self.all, handle)
        return handle

    def remove(self, handle: EventHandlerHandle) -> None:
        with self._lock:
            self.all = tuple(one for one in self.all if one is not handle)


_handlers = _Handlers()


def register_event_handler(handler: Callable[[Event], object]) -> EventHandlerHandle:
    """Registers a function to be called with each event logged from now on, in any thread of this process.

    ```python
    seen = []
    handle = monitor.register_event_handler(seen.append)
    monitor.log_event(monitor.Event("worker.restart", datetime.now(UTC), {"worker": 3}))
    print(seen[0].data)  # {'worker': 3}
    ```

    Handlers are called one after another, in the order of registration, in the thread that logs; windows of a
    `Stat` are logged in a background thread. Do slow work elsewhere, behind a queue.

    Args:
        handler: takes the event; `torch.monitor.TensorboardEventHandler` works too. Its exceptions are
            counted and reported, and never reach the caller of `log_event`. It may log events, which go to
            all handlers but the running ones, and may register and unregister, itself included.

    Returns:
        The handle for `unregister_event_handler`; deleting it does not unregister.

    Raises:
        TypeError: the handler cannot be called.
    """
    if not callable(handler):
        raise TypeError(f"event handler must be a function that takes an event, got {handler!r}.")
    return _handlers.add(EventHandlerHandle(_for_torch_handler(handler)))


def _for_torch_handler(handler: Callable[[Event], object]) -> Callable[[Event], object]:
    """Returns a handler; wraps torch's own, so that windows have the name that torch gives them."""
    # Not imported here: without torch's monitor, the handler cannot be one of its handlers.
    torch_monitor = sys.modules.get("torch.monitor")
    if torch_monitor is None or not isinstance(handler, torch_monitor.TensorboardEventHandler):
        return handler

    def renaming(event: Event) -> None:
        handler(attrs.evolve(event, name=TORCH_STAT_EVENT) if event.name == STAT_EVENT else event)

    return renaming


def register_reentrant_handler(handler: Callable[[Event], object]) -> EventHandlerHandle:
    """Registers a function that only queues events, and may therefore be called while it runs."""
    return _handlers.add(EventHandlerHandle(handler, is_reentrant=True))


def unregister_event_handler(handle: EventHandlerHandle) -> None:
    """Unregisters a handler; a second call does nothing.

    ```python
    handle = monitor.register_event_handler(print)
    monitor.unregister_event_handler(handle)
    ```

    An event that another thread is logging right now may still reach it.

    Raises:
        TypeError: the argument is not a handle.
    """
    if not isinstance(handle, EventHandlerHandle):
        raise TypeError(f"handle must be what register_event_handler returned, got {handle!r}.")
    _handlers.remove(handle)


def log_event(event: Any) -> None:
    """Calls every registered handler with an event, in this thread; returns when all have returned.

    ```python
    monitor.log_event(monitor.Event("worker.restart", datetime.now(UTC), {"worker": 3}))
    ```

    Args:
        event: ours; an event of `torch.monitor` is passed on as one of ours.

    Raises:
        TypeError: the argument is not an event.
    """
    if type(event).__module__ == "torch._C._monitor":
        event = Event(event.name, event.timestamp, dict(event.data))
    if not isinstance(event, Event):
        raise TypeError(
            f"event must be an events.MonitorEvent, got {type(event).__name__}. "
            "Write MonitorEvent(name, timestamp, data)."
        )
    handles = _handlers.all
    if not handles:
        return
    outer: tuple[EventHandlerHandle, ...] = getattr(_handlers.running, "handles", ())
    for handle in handles:
        # Otherwise a handler that logs would be called with its own events without end.
        if handle in outer and not handle.is_reentrant:
            continue
        _handlers.running.handles = (*outer, handle)
        try:
            handle.handler(event)
        except Exception as error:  # noqa: BLE001  # neither the caller nor other handlers may suffer
            handle.record_failure(error)
        finally:
            _handlers.running.handles = outer
