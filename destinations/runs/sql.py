"""What SQL for DuckDB is put together from."""

from pathlib import Path

__all__ = ["NOT_A_NUMBER", "PARQUET", "identifier", "quoted"]

# Delta encoding and byte stream split, which halve steps, times and values, come with the second version of Parquet's pages.
PARQUET = "(FORMAT parquet, COMPRESSION zstd, PARQUET_VERSION v2)"

# DuckDB takes a NaN of a numpy array for NULL.
NOT_A_NUMBER = "coalesce(value, 'nan'::DOUBLE)"


def quoted(text: str | Path) -> str:
    """Returns a text as SQL has it."""
    return "'" + str(text).replace("'", "''") + "'"


def identifier(name: str) -> str:
    """Returns the name of a column as SQL has it."""
    return '"' + name.replace('"', '""') + '"'
