"""A run as a folder of plain files: `RunDirectory` writes it, `read_rows` and `read_series` read its metrics."""

from .errors import RunDirectoryError, RunExistsError, RunInUseError, RunNotOpenError, RunPathError
from .rows import MetricRow, read_rows, read_series
from .run_directory import RunDirectory

__all__ = [
    "MetricRow",
    "RunDirectory",
    "RunDirectoryError",
    "RunExistsError",
    "RunInUseError",
    "RunNotOpenError",
    "RunPathError",
    "read_rows",
    "read_series",
]
