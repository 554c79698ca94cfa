"""The errors of this package.

```
EventsError
├── UnknownEventError      (ValueError)    a name that is none of the events
├── TimeStringError        (ValueError)    a duration without a unit, or with one that does not exist
├── TimeUnitError          (TypeError)     units that do not mix
├── EngineClosedError      (RuntimeError)  an event, or a record, after close
├── CallbackInUseError     (RuntimeError)  a callback that another engine still holds open
├── RecordError            (ValueError)    something logged that no destination could take
└── CheckpointError        (RuntimeError)  a checkpoint that is missing or does not fit the trainer
```

Each is also the built-in error named beside it, so that `except ValueError` goes on working.
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
    """A name is none of the events."""


class TimeStringError(EventsError, ValueError):
    """A duration has no unit, a unit that does not exist, or a fraction of something whole."""


class TimeUnitError(EventsError, TypeError):
    """Two times of different units met in one operation."""


class EngineClosedError(EventsError, RuntimeError):
    """An event was run, or something was logged, after close."""


class CallbackInUseError(EventsError, RuntimeError):
    """A callback is still open in another engine."""


class RecordError(EventsError, ValueError):
    """Something was logged that no destination could take."""


class CheckpointError(EventsError, RuntimeError):
    """A checkpoint is missing, damaged, or does not fit the trainer that loads it."""
