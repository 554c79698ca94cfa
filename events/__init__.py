"""What happened, when, to whom: the events of a training run, who listens, and where they log.

`import events` does nothing but define names; torch is imported with the first `Trainer`, `Run` or tensor.
"""

from .callback import Callback
from .config import plain_config
from .destination import Destination
from .engine import Engine
from .errors import (
    CallbackInUseError,
    CheckpointError,
    EngineClosedError,
    EventsError,
    RecordError,
    TimeStringError,
    TimeUnitError,
    UnknownEventError,
)
from .event import Event
from .interval import Interval
from .logger import Logger
from .names import format_name, format_run_name
from .redaction import redact, redact_arguments, redact_text
from .state import Phase, RunStatus, State
from .timestamp import Time, Timestamp, TimeUnit

__all__ = [
    "Callback",
    "CallbackInUseError",
    "CheckpointError",
    "Destination",
    "Engine",
    "EngineClosedError",
    "Event",
    "EventsError",
    "Interval",
    "Logger",
    "Phase",
    "RecordError",
    "RunStatus",
    "State",
    "Time",
    "TimeStringError",
    "TimeUnit",
    "TimeUnitError",
    "Timestamp",
    "UnknownEventError",
    "format_name",
    "format_run_name",
    "plain_config",
    "redact",
    "redact_arguments",
    "redact_text",
]

__project__ = "training-destinations"
