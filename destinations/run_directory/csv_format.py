"""The text of `metrics.csv`: its header and its numbers, written and read.

Shared by the writer and the readers; imports no numpy.
"""

from __future__ import annotations

import contextlib
import csv
import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import ModuleType

    import numpy as np

__all__ = [
    "format_cell_rows",
    "format_cells",
    "header_end",
    "header_line",
    "orjson",
    "parse_header",
    "parse_number",
]

# An extra, `fast`: it writes floats as text some twenty times faster than Python does, in their shortest form too.
orjson: ModuleType | None
try:
    import orjson
except ImportError:
    orjson = None


def header_line(columns: Iterable[str]) -> bytes:
    """Returns the first line."""
    return (",".join(map(_quoted, columns)) + "\n").encode()


def _quoted(name: str) -> str:
    if name and name.strip() == name and not any(mark in name for mark in ',"\n\r'):
        return name
    return '"' + name.replace('"', '""') + '"'


def header_end(data: bytes) -> int:
    """Returns where the header ends: after the first line feed outside quotes; 0 where it does not."""
    end = 0
    while (end := data.find(b"\n", end) + 1) > 0:
        if data.count(b'"', 0, end) % 2 == 0:
            return end
    return 0


def parse_header(line: bytes) -> list[str]:
    """Returns the columns."""
    return next(csv.reader(io.StringIO(line.decode("utf-8", "replace"), newline="")), [])


def format_cells(values: Sequence[float], encoder: ModuleType | None = orjson) -> str:
    """Returns the cells of values, joined by commas; without an encoder, by Python's own means."""
    if encoder is not None:
        with contextlib.suppress(TypeError):  # An integer of more than 64 bits.
            data: bytes = encoder.dumps(values)
            if b"l" not in data and b"t" not in data:  # No null, false or true.
                return data[1:-1].decode()
    text = ",".join(map(repr, values))
    if "T" in text or "F" in text:
        text = text.replace("True", "1").replace("False", "0")
    return text


def format_cell_rows(
    values: np.ndarray[Any, np.dtype[np.float64]], encoder: ModuleType | None = orjson
) -> list[bytes]:
    """Returns the cells of each row of floats, joined by commas; without an encoder, by Python's own means.

    Args:
        values: `(rows, metrics)`, both at least 1; in rows and columns one after the other.
        encoder: the module `orjson`, or None.
    """
    if encoder is not None:
        text: bytes = encoder.dumps(values, option=encoder.OPT_SERIALIZE_NUMPY)
        if b"n" not in text:  # null: a NaN or an infinity, which JSON does not have.
            return text[2:-2].split(b"],[")
    # One call writes them all, half as fast again as one for each; what it writes for lists is "[[1.5, nan], [2.0, inf]]".
    return repr(values.tolist())[2:-2].replace(", ", ",").encode().split(b"],[")


def parse_number(cell: str) -> float | None:
    """Returns what a cell holds: an integer where it looks like one, else a float; None for what is no number."""
    try:
        return int(cell)
    except ValueError:
        try:
            return float(cell)
        except ValueError:
            return None
