"""The events of a training run, the callbacks that react to them, and the logger they log to.

`import events` only defines names; torch is imported when `Trainer` or `CheckpointSaver` is first
accessed, and callbacks when they are.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import monitor
from .callback import Callback, state_keys
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
from .logger.converters import as_picture, as_table, plain_config, safe_text
from .logger.destination import Destination, WriteRate, WriteSchedule
from .logger.device import DeviceCopies
from .logger.logger import Logger
from .logger.values import BinnedValues, host_metrics
from .monitor.monitor_event import Event as MonitorEvent
from .monitor.stat import Aggregation, Stat
from .names import (
    LiteralName,
    check_placeholders,
    check_run_name,
    check_unknown,
    format_name,
    format_run_name,
    format_store,
)
from .ranks import Ranks, find_ranks
from .redaction import redact, redact_arguments, redact_text
from .run import Run, agree_on_name, agreed_run_name, is_restarted_job, new_run_name
from .state import Phase, Precision, RunStatus, State
from .timestamp import Time, Timestamp, TimeUnit

if TYPE_CHECKING:
    from . import callbacks
    from .callbacks import (
        ActivationMonitor,
        CodeSnapshot,
        EarlyStopper,
        EvalOutputLogging,
        ExportForInferenceCallback,
        FlightRecorder,
        HealthChecker,
        ImageVisualizer,
        LossSpike,
        LRMonitor,
        MemoryMonitor,
        MemorySnapshot,
        NaNMonitor,
        OOMObserver,
        OptimizerMonitor,
        RuntimeEstimator,
        SpeedMonitor,
        StatsMonitor,
        SystemMonitor,
        ThresholdStopper,
        TimeLedger,
        Timer,
    )
    from .trainer.checkpoint.export import export_weights
    from .trainer.checkpoint.load_callback import LoadCheckpoint
    from .trainer.checkpoint.reading import read_checkpoint
    from .trainer.checkpoint.retention import Retention
    from .trainer.checkpoint.saver import CheckpointSaver
    from .trainer.checkpoint.schedule import AutoInterval
    from .trainer.checkpoint.writing import CheckpointWriting
    from .trainer.evaluator import Evaluator
    from .trainer.preemption import Preemption
    from .trainer.schedulers import (
        ConstantScheduler,
        ConstantWithWarmupScheduler,
        CosineAnnealingScheduler,
        CosineAnnealingWithWarmupScheduler,
        LinearScheduler,
        LinearWithWarmupScheduler,
        PlateauScheduler,
    )
    from .trainer.trainer import Trainer

__all__ = [
    "ActivationMonitor",
    "Aggregation",
    "AutoInterval",
    "BinnedValues",
    "Callback",
    "CallbackInUseError",
    "CheckpointError",
    "CheckpointSaver",
    "CheckpointWriting",
    "CodeSnapshot",
    "ConstantScheduler",
    "ConstantWithWarmupScheduler",
    "CosineAnnealingScheduler",
    "CosineAnnealingWithWarmupScheduler",
    "Destination",
    "DeviceCopies",
    "EarlyStopper",
    "Engine",
    "EngineClosedError",
    "EvalOutputLogging",
    "Evaluator",
    "Event",
    "EventsError",
    "ExportForInferenceCallback",
    "FlightRecorder",
    "HealthChecker",
    "ImageVisualizer",
    "Interval",
    "LRMonitor",
    "LinearScheduler",
    "LinearWithWarmupScheduler",
    "LiteralName",
    "LoadCheckpoint",
    "Logger",
    "LossSpike",
    "MemoryMonitor",
    "MemorySnapshot",
    "MonitorEvent",
    "NaNMonitor",
    "OOMObserver",
    "OptimizerMonitor",
    "Phase",
    "PlateauScheduler",
    "Precision",
    "Preemption",
    "Ranks",
    "RecordError",
    "Retention",
    "Run",
    "RunStatus",
    "RuntimeEstimator",
    "SpeedMonitor",
    "Stat",
    "State",
    "StatsMonitor",
    "SystemMonitor",
    "ThresholdStopper",
    "Time",
    "TimeLedger",
    "TimeStringError",
    "TimeUnit",
    "TimeUnitError",
    "Timer",
    "Timestamp",
    "Trainer",
    "UnknownEventError",
    "WriteRate",
    "WriteSchedule",
    "agree_on_name",
    "agreed_run_name",
    "as_picture",
    "as_table",
    "callbacks",
    "check_placeholders",
    "check_run_name",
    "check_unknown",
    "export_weights",
    "find_ranks",
    "format_name",
    "format_run_name",
    "format_store",
    "host_metrics",
    "is_restarted_job",
    "monitor",
    "new_run_name",
    "plain_config",
    "read_checkpoint",
    "redact",
    "redact_arguments",
    "redact_text",
    "safe_text",
    "state_keys",
]

__project__ = "training-destinations"

_TORCH_EXPORTS = {
    ".trainer.trainer": ("Trainer",),
    ".trainer.evaluator": ("Evaluator",),
    ".trainer.preemption": ("Preemption",),
    ".trainer.checkpoint.retention": ("Retention",),
    ".trainer.checkpoint.saver": ("CheckpointSaver",),
    ".trainer.checkpoint.schedule": ("AutoInterval",),
    ".trainer.checkpoint.writing": ("CheckpointWriting",),
    ".trainer.checkpoint.load_callback": ("LoadCheckpoint",),
    ".trainer.checkpoint.export": ("export_weights",),
    ".trainer.checkpoint.reading": ("read_checkpoint",),
    ".trainer.schedulers": tuple(name for name in __all__ if name.endswith("Scheduler")),
}


def __getattr__(name: str) -> Any:
    for module, names in _TORCH_EXPORTS.items():
        if name in names:
            return getattr(importlib.import_module(module, __name__), name)
    found = importlib.import_module(".callbacks", __name__)
    if name in found.__all__:
        return getattr(found, name)
    if name == "callbacks":
        return found
    from uploads import missing_name

    raise missing_name(__name__, name, __all__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
