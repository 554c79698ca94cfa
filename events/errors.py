"""The errors of this package.

```
EventsError
├── UnknownEventError      (ValueError)    an unknown event name
├── TimeStringError        (ValueError)    a duration without a unit, or with an unknown one
├── TimeUnitError          (TypeError)     incompatible units
├── EngineClosedError      (RuntimeError)  an event or a record after close
├── CallbackInUseError     (RuntimeError)  a callback that is still open in another engine
├── RecordError            (ValueError)    an invalid record
└── CheckpointError        (RuntimeError)  a checkpoint that is missing, corrupt or incompatible
```

Each is also a subclass of the built-in error beside it.
"""

from types import TracebackType
from typing import TypeVar

__all__ = [
    "CallbackInUseError",
    "CheckpointError",
    "EngineClosedError",
    "EventsError",
    "RecordError",
    "TimeStringError",
    "TimeUnitError",
    "UnknownEventError",
    "without_own_frames",
]

_PACKAGES = frozenset({"destinations", "events", "uploads"})


class EventsError(Exception):
    """The root of this package's errors."""


class UnknownEventError(EventsError, ValueError):
    """An event name is unknown."""


class TimeStringError(EventsError, ValueError):
    """Raised for a duration without a unit, with an unknown unit, or with a fraction of a whole unit."""


class TimeUnitError(EventsError, TypeError):
    """An operation mixes times of different units."""


class EngineClosedError(EventsError, RuntimeError):
    """An event was run, or a record logged, after close."""


class CallbackInUseError(EventsError, RuntimeError):
    """A callback is still open in another engine."""


class RecordError(EventsError, ValueError):
    """A record is invalid."""


class CheckpointError(EventsError, RuntimeError):
    """A checkpoint is missing, corrupt, or incompatible with the trainer that loads it."""


E = TypeVar("E", bound=BaseException)


def without_own_frames(error: E) -> E:
    """Returns an error without the frames of these packages in its traceback.

    For mistakes in a program, which the message explains: where inside of us it was noticed is of no help
    there. Frames of the user's own code stay.
    """
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        module = str(traceback.tb_frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _PACKAGES:
            frames.append(traceback)
        traceback = traceback.tb_next
    kept: TracebackType | None = None
    for one in reversed(frames):
        kept = TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return error.with_traceback(kept)
