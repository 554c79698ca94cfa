"""What happened, when, to whom: the events of a training run, who listens, and where they log.

`import events` does nothing but define names; torch is imported where `Trainer` or `CheckpointSaver` are asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import monitor
from ._device import DeviceCopies
from ._monitor_event import Event as MonitorEvent
from ._run_name import new_run_name
from ._stat import Stat
from ._summary import Aggregation
from .binned_values import BinnedValues
from .callback import Callback
from .code_snapshot import CodeSnapshot
from .config import plain_config, safe_text
from .destination import Destination, MetricsTaker
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
from .host_values import host_metrics
from .interval import Interval
from .logger import Logger
from .names import format_name, format_run_name
from .redaction import redact, redact_arguments, redact_text
from .run import Run
from .state import Phase, RunStatus, State
from .stats_monitor import StatsMonitor
from .system_monitor import SystemMonitor
from .throughput import Throughput
from .timer import Timer
from .timestamp import Time, Timestamp, TimeUnit
from .write_rate import WriteRate, is_due

if TYPE_CHECKING:
    from .checkpoint import CheckpointSaver, read_checkpoint
    from .trainer import Trainer

__all__ = [
    "Aggregation",
    "BinnedValues",
    "Callback",
    "CallbackInUseError",
    "CheckpointError",
    "CheckpointSaver",
    "CodeSnapshot",
    "Destination",
    "DeviceCopies",
    "Engine",
    "EngineClosedError",
    "Event",
    "EventsError",
    "Interval",
    "Logger",
    "MetricsTaker",
    "MonitorEvent",
    "Phase",
    "RecordError",
    "Run",
    "RunStatus",
    "Stat",
    "State",
    "StatsMonitor",
    "SystemMonitor",
    "Throughput",
    "Time",
    "TimeStringError",
    "TimeUnit",
    "TimeUnitError",
    "Timer",
    "Timestamp",
    "Trainer",
    "UnknownEventError",
    "WriteRate",
    "format_name",
    "format_run_name",
    "host_metrics",
    "is_due",
    "monitor",
    "new_run_name",
    "plain_config",
    "read_checkpoint",
    "redact",
    "redact_arguments",
    "redact_text",
    "safe_text",
]

__project__ = "training-destinations"

_NEED_TORCH = {"CheckpointSaver": ".checkpoint", "Trainer": ".trainer", "read_checkpoint": ".checkpoint"}


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        return getattr(importlib.import_module(_NEED_TORCH[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
