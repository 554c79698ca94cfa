"""Monitor events: a program says that something happened, and whoever registered hears of it.

Any thread may log, register and unregister. Handlers run in the thread that logs; no lock is held while they do.
"""

import itertools
import logging
import threading
import traceback
from collections.abc import Callable, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any

import attrs

from events.redaction import redact_text

__all__ = [
    "Event",
    "EventHandlerHandle",
    "log_event",
    "register_event_handler",
    "register_queue",
    "unregister_event_handler",
]

_log = logging.getLogger("events")

Value = str | float | int | bool

_PLAIN_TYPES = frozenset({str, float, int, bool})


def _plain_data(data: Mapping[str, Any]) -> Mapping[str, Value]:
    """Returns a copy that nobody can change: one handler must not change what the next one sees."""
    if not isinstance(data, Mapping):
        raise TypeError(f"event data must be a dict from name to value, got {type(data).__name__}.")
    return MappingProxyType({_key(key): _plain(key, value) for key, value in data.items()})


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"event data must have strings as its names, got {key!r} ({type(key).__name__}).")
    return key


def _plain(key: str, value: Any) -> Value:
    if type(value) in _PLAIN_TYPES:
        plain: Value = value
        return plain
    # numpy's scalars: some are Python's floats and strings, others only look like numbers.
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    hint = " Write value.item()." if hasattr(value, "item") else ""
    raise TypeError(
        f"event value {key!r} must be a str, float, int or bool, got {type(value).__name__}.{hint}"
    )


def _restored(name: str, timestamp: datetime, data: dict[str, Value]) -> "Event":
    return Event(name, timestamp, data)


@attrs.frozen(hash=False)
class Event:
    """Something that happened.

    Values stay what they are: `True` is no `1.0`, and an integer of any size keeps its last digit. Two events of equal
    content are equal; an event can be copied and pickled.

    Attributes:
        name: what happened; dots separate its parts, as in "my_project.data_loaded".
        timestamp: when; a datetime without a zone is local time, one with a zone keeps its instant.
        data: more about it: str, float, int or bool by name, numpy's scalars included; a copy, read-only.

    Raises:
        TypeError: something given is of another type.
    """

    name: str = attrs.field(validator=attrs.validators.instance_of(str))
    timestamp: datetime = attrs.field(validator=attrs.validators.instance_of(datetime))
    data: Mapping[str, Value] = attrs.field(converter=_plain_data)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.name, self.timestamp, dict(self.data))


class EventHandlerHandle:
    """What `register_event_handler` returns, and `unregister_event_handler` takes.

    Attributes:
        handler: the function.
        is_reentrant: whether it is called also with what is logged while it runs, in the same thread.
    """

    __slots__ = ("_failures", "handler", "is_reentrant")

    def __init__(self, handler: Callable[[Event], object], *, is_reentrant: bool = False) -> None:
        self.handler = handler
        self.is_reentrant = is_reentrant
        self._failures = itertools.count()

    def failed(self, error: Exception) -> None:
        """Takes note of what a handler raised; the first time it is reported."""
        if next(self._failures) == 0:
            name = getattr(self.handler, "__qualname__", repr(self.handler))
            story = "".join(traceback.format_exception(error)).rstrip()
            _log.error(
                "monitor event handler %s failed; the others go on, and further failures of it are not reported.\n%s",
                name,
                redact_text(story),
            )


class _Handlers:
    """Who is registered; the lock guards the replacing of the tuple, which is read without it."""

    def __init__(self) -> None:
        self.all: tuple[EventHandlerHandle, ...] = ()
        self._lock = threading.Lock()
        # The handlers that run in this thread right now.
        self.at_work = threading.local()

    def add(self, handle: EventHandlerHandle) -> None:
        with self._lock:
            self.all = (*self.all, handle)

    def remove(self, handle: EventHandlerHandle) -> None:
        with self._lock:
            self.all = tuple(one for one in self.all if one is not handle)


_handlers = _Handlers()


def register_event_handler(handler: Callable[[Event], object]) -> EventHandlerHandle:
    """Registers a function to be called with each event logged from now on, in any thread of this process.

    Handlers are called one after another, in the order of their registration, in the thread that logs; the windows of
    a `Stat` are logged in a thread of their own. What takes long belongs in a queue.

    Args:
        handler: takes the event. What it raises is counted and reported, and reaches nobody. It may log events, which
            go to all handlers but those at work, and may register and unregister, itself included.

    Returns:
        What `unregister_event_handler` takes; letting go of it does not unregister.

    Raises:
        TypeError: the handler cannot be called.
    """
    if not callable(handler):
        raise TypeError(f"event handler must be a function that takes an event, got {handler!r}.")
    handle = EventHandlerHandle(handler)
    _handlers.add(handle)
    return handle


def register_queue(put: Callable[[Event], object]) -> EventHandlerHandle:
    """Registers a function that keeps events for later, and therefore may be called while it runs."""
    handle = EventHandlerHandle(put, is_reentrant=True)
    _handlers.add(handle)
    return handle


def unregister_event_handler(handle: EventHandlerHandle) -> None:
    """Makes sure that a handler hears of no later event; a second time does nothing.

    An event that another thread is logging right now may still reach it.

    Raises:
        TypeError: it is no handle.
    """
    if not isinstance(handle, EventHandlerHandle):
        raise TypeError(f"handle must be what register_event_handler returned, got {handle!r}.")
    _handlers.remove(handle)


def log_event(event: Event) -> None:
    """Calls every registered handler with an event, in this thread; returns when all have returned.

    Raises:
        TypeError: it is no event.
    """
    if not isinstance(event, Event):
        raise TypeError(
            f"event must be an events.MonitorEvent, got {type(event).__name__}. "
            "Write MonitorEvent(name, timestamp, data)."
        )
    handles = _handlers.all
    if not handles:
        return
    before: tuple[EventHandlerHandle, ...] = getattr(_handlers.at_work, "handles", ())
    for handle in handles:
        # A handler that logs would otherwise be called with what it logged, for ever.
        if handle in before and not handle.is_reentrant:
            continue
        _handlers.at_work.handles = (*before, handle)
        try:
            handle.handler(event)
        except Exception as error:  # noqa: BLE001  # a handler must harm neither who logs nor who listens
            handle.failed(error)
        finally:
            _handlers.at_work.handles = before
