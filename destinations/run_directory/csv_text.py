r"""The text of `metrics.csv`: header and numbers, both ways.

RFC 4180 with "\n" at the end of lines, UTF-8. Numbers are written as Python writes them, so that they come back exactly;
booleans as 1 and 0; NaN and infinities as nan, inf and -inf; what a row does not have is empty.
"""

import csv
import io
from collections.abc import Iterable, Sequence

__all__ = ["header_end", "header_line", "number", "parse_header", "texts"]


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


def texts(values: Sequence[float]) -> str:
    """Returns the cells of values, joined by commas."""
    text = ",".join(map(repr, values))
    if "T" in text or "F" in text:
        text = text.replace("True", "1").replace("False", "0")
    return text


def number(cell: str) -> float | None:
    """Returns what a cell holds: an integer where it looks like one, else a float; None for what is no number."""
    try:
        return int(cell)
    except ValueError:
        try:
            return float(cell)
        except ValueError:
            return None
