"""Callbacks that come with the package: timers, monitors, stoppers, visualizers, exports.

Each module is imported when a name of it is first accessed. See docs/callbacks.md.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .code_snapshot import CodeSnapshot
    from .export import ExportForInferenceCallback
    from .flight_recorder import FlightRecorder
    from .health import HealthChecker, StragglerDetector
    from .learning_rate import LRMonitor
    from .memory import MemoryMonitor, MemorySnapshot, OOMObserver
    from .norms import ActivationMonitor, OptimizerMonitor
    from .speed import RuntimeEstimator, SpeedMonitor
    from .stats_monitor import StatsMonitor
    from .stopping import EarlyStopper, LossSpike, NaNMonitor, ThresholdStopper
    from .system_monitor import SystemMonitor
    from .throughput import Throughput
    from .timer import Timer
    from .visualizers import EvalOutputLogging, ImageVisualizer

__all__ = [
    "ActivationMonitor",
    "CodeSnapshot",
    "EarlyStopper",
    "EvalOutputLogging",
    "ExportForInferenceCallback",
    "FlightRecorder",
    "HealthChecker",
    "ImageVisualizer",
    "LRMonitor",
    "LossSpike",
    "MemoryMonitor",
    "MemorySnapshot",
    "NaNMonitor",
    "OOMObserver",
    "OptimizerMonitor",
    "RuntimeEstimator",
    "SpeedMonitor",
    "StatsMonitor",
    "StragglerDetector",
    "SystemMonitor",
    "ThresholdStopper",
    "Throughput",
    "Timer",
]

_MODULES = {
    "code_snapshot": ("CodeSnapshot",),
    "export": ("ExportForInferenceCallback",),
    "flight_recorder": ("FlightRecorder",),
    "health": ("HealthChecker", "StragglerDetector"),
    "learning_rate": ("LRMonitor",),
    "memory": ("MemoryMonitor", "MemorySnapshot", "OOMObserver"),
    "norms": ("ActivationMonitor", "OptimizerMonitor"),
    "speed": ("RuntimeEstimator", "SpeedMonitor"),
    "stats_monitor": ("StatsMonitor",),
    "stopping": ("EarlyStopper", "LossSpike", "NaNMonitor", "ThresholdStopper"),
    "system_monitor": ("SystemMonitor",),
    "throughput": ("Throughput",),
    "timer": ("Timer",),
    "visualizers": ("EvalOutputLogging", "ImageVisualizer"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
