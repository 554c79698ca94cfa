"""A run as a folder of plain files: `RunDirectory` writes it, `read_rows` and `read_series` read its metrics.

Names are imported lazily, so readers can use `layout` without loading the writer.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from destinations.history.rows import MetricRow
    from destinations.history.snapshot import read_rows, read_series

    from .folder import RunDirectoryError, RunExistsError, RunInUseError, RunNotOpenError, RunPathError
    from .layout import NewerFormatError
    from .run_directory import RunDirectory

__all__ = [
    "MetricRow",
    "NewerFormatError",
    "RunDirectory",
    "RunDirectoryError",
    "RunExistsError",
    "RunInUseError",
    "RunNotOpenError",
    "RunPathError",
    "read_rows",
    "read_series",
]

_MODULES = {
    "MetricRow": "destinations.history.rows",
    "NewerFormatError": ".layout",
    "RunDirectory": ".run_directory",
    "read_rows": "destinations.history.snapshot",
    "read_series": "destinations.history.snapshot",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(_MODULES.get(name, ".folder"), __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
