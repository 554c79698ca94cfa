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

__all__ = [
    "CallbackInUseError",
    "CheckpointError",
    "EngineClosedError",
    "EventsError",
    "RecordError",
    "TimeStringError",
    "TimeUnitError",
    "UnknownEventError",
]


class EventsError(Exception):
    """The root of this package's errors."""


class UnknownEventError(EventsError, ValueError):
    """An event name is unknown."""


class TimeStringError(EventsError, ValueError):
    """A duration has no unit, an unknown unit, or a fraction of a whole unit."""


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
