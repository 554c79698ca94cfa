"""Reads runs back: `open_runs` finds, filters and compares them, and opens each as a `RecordedRun`."""

from .errors import (
    AmbiguousRunError,
    BudgetError,
    DatasetError,
    EditError,
    FilterError,
    MetricNotFoundError,
    RootError,
    RunNotFoundError,
    RunsError,
    WriterNotFoundError,
)
from .index.scan import ScanReport
from .open import open_runs
from .record import HEARTBEAT_SECONDS, RunRecord, is_alive
from .run import RecordedRun, Run
from .runs import BestRun, Runs

__all__ = [
    "HEARTBEAT_SECONDS",
    "AmbiguousRunError",
    "BestRun",
    "BudgetError",
    "DatasetError",
    "EditError",
    "FilterError",
    "MetricNotFoundError",
    "RecordedRun",
    "RootError",
    "Run",
    "RunNotFoundError",
    "RunRecord",
    "Runs",
    "RunsError",
    "ScanReport",
    "WriterNotFoundError",
    "is_alive",
    "open_runs",
]
