"""Runs as Delta Lake tables in a folder or bucket: `compact` writes them, `open_dataset` and `sql` read them.

Needs deltalake and DuckDB: `pip install deltalake duckdb`. The page "Many runs" of the docs has queries in
other engines.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compaction import CompactReport, compact
    from .reading import Dataset, SqlResult, open_dataset, sql

__all__ = ["CompactReport", "Dataset", "SqlResult", "compact", "open_dataset", "sql"]

_MODULES = {"CompactReport": ".compaction", "compact": ".compaction"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(_MODULES.get(name, ".reading"), __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
