"""Callbacks that come with the package: timers, monitors, stoppers, visualizers, exports.

Nothing here imports torch before a callback is used.
"""

from .code_snapshot import CodeSnapshot
from .export import ExportForInferenceCallback
from .flight_recorder import FlightRecorder
from .health import HealthChecker
from .learning_rate import LRMonitor
from .memory import MemoryMonitor, MemorySnapshot, OOMObserver
from .norms import ActivationMonitor, OptimizerMonitor
from .speed import RuntimeEstimator, SpeedMonitor
from .stats_monitor import StatsMonitor
from .stopping import EarlyStopper, LossSpike, NaNMonitor, ThresholdStopper
from .system_monitor import SystemMonitor
from .time_ledger import TimeLedger
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
    "SystemMonitor",
    "ThresholdStopper",
    "TimeLedger",
    "Timer",
]
