"""Reading runs back: `open_runs` finds them, filters them, compares them, and opens each as a `Run`."""

from .errors import (
    AmbiguousRunError,
    DatasetError,
    EditError,
    FilterError,
    MetricNotFoundError,
    RootError,
    RunNotFoundError,
    RunsError,
)
from .findings import ScanReport
from .liveness import HEARTBEAT_SECONDS, is_alive
from .opening import open_runs
from .record import RunRecord
from .run import Run
from .runs import Runs

__all__ = [
    "HEARTBEAT_SECONDS",
    "AmbiguousRunError",
    "DatasetError",
    "EditError",
    "FilterError",
    "MetricNotFoundError",
    "RootError",
    "Run",
    "RunNotFoundError",
    "RunRecord",
    "Runs",
    "RunsError",
    "ScanReport",
    "is_alive",
    "open_runs",
]
