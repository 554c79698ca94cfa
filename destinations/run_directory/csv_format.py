"""The text of `metrics.csv`: its header and its numbers, written and read.

Shared by the writer and the readers; imports no numpy.
"""

from __future__ import annotations

import contextlib
import csv
import errno
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

# The extra `fast`: formats floats about twenty times faster than Python, in their shortest form too.
orjson: ModuleType | None
try:
    import orjson
except ImportError:
    orjson = None


def header_line(columns: Iterable[str]) -> bytes:
    """Returns the header line of columns."""
    return (",".join(map(_quoted, columns)) + "\n").encode()


def _quoted(name: str) -> str:
    if name and name.strip() == name and not any(mark in name for mark in ',"\n\r'):
        return name
    return '"' + name.replace('"', '""') + '"'


def header_end(data: bytes) -> int:
    """Returns the offset after the header: after the first line feed outside quotes; 0 if there is none."""
    start = quotes = 0
    while (end := data.find(b"\n", start) + 1) > 0:
        quotes += data.count(b'"', start, end)
        if quotes % 2 == 0:
            return end
        start = end
    return 0


def parse_header(line: bytes) -> list[str]:
    """Returns the columns of a header line.

    Raises:
        OSError: the name of a column is longer than the `csv` module reads, 128 KiB.
    """
    try:
        return next(csv.reader(io.StringIO(line.decode("utf-8", "replace"), newline="")), [])
    except csv.Error as error:
        raise OSError(errno.EFBIG, f"the header of the CSV cannot be read: {error}") from error


def format_cells(values: Sequence[float], encoder: ModuleType | None = orjson) -> str:
    """Returns the cells of values, joined by commas; formatted by Python if there is no encoder."""
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
    """Returns the cells of each row of floats, joined by commas; formatted by Python if there is no encoder.

    Args:
        values: `(rows, metrics)`, both at least 1; C-contiguous.
        encoder: the module `orjson`, or None.
    """
    if encoder is not None:
        text: bytes = encoder.dumps(values, option=encoder.OPT_SERIALIZE_NUMPY)
        if b"n" not in text:  # null: a NaN or an infinity, which JSON does not have.
            return text[2:-2].split(b"],[")
    # One call for all rows is 1.5 times as fast as one each; `repr` of lists is "[[1.5, nan], [2.0, inf]]".
    return repr(values.tolist())[2:-2].replace(", ", ",").encode().split(b"],[")


def parse_number(cell: str) -> float | None:
    """Returns the number in a cell, an int if it looks like one, else a float; None if it is not a number."""
    try:
        return int(cell)
    except ValueError:
        try:
            return float(cell)
        except ValueError:
            return None
