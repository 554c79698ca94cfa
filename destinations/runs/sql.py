"""Helpers to build SQL for DuckDB."""

from pathlib import Path

__all__ = ["NOT_A_NUMBER", "PARQUET", "identifier", "quoted"]

# Version 2 has delta encoding and byte stream split, which halve the size of steps, times and values.
PARQUET = "(FORMAT parquet, COMPRESSION zstd, PARQUET_VERSION v2)"

# DuckDB reads a NaN in a numpy array as NULL.
NOT_A_NUMBER = "coalesce(value, 'nan'::DOUBLE)"


def quoted(text: str | Path) -> str:
    """Returns a text as an SQL literal."""
    return "'" + str(text).replace("'", "''") + "'"


def identifier(name: str) -> str:
    """Returns the name of a column as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'
