r"""The rows of a `metrics.csv` as numpy columns, a hundred times faster than one row after the other.

A piece of the file is taken apart by the places of its separators, all at once, and the cells of a column become numbers in one
call: of orjson where most columns are wanted and it is installed, else of numpy. Whatever is not plain, such as
quotes, lines of another length, or cells that hold no number, takes the way of `run_directory.rows`, piece by piece; all give the
same.
"""

from collections.abc import Collection, Iterable, Iterator
from types import ModuleType
from typing import Any

import attrs
import numpy as np

from destinations.run_directory.csv_text import number, parse_header
from destinations.run_directory.rows import MetricRow, rows_of

from ._decimals import PLAIN_LETTERS, read_decimals

orjson: ModuleType | None
try:
    import orjson
except ImportError:
    orjson = None

__all__ = ["MISSING_STEP", "Block", "Floats", "Steps", "block_of_rows", "read_blocks"]

Floats = np.ndarray[Any, np.dtype[np.float64]]
Steps = np.ndarray[Any, np.dtype[np.int64]]
_Bools = np.ndarray[Any, np.dtype[np.bool_]]
_Places = np.ndarray[Any, np.dtype[np.int64]]
_Letters = np.ndarray[Any, np.dtype[np.uint8]]

MISSING_STEP = int(np.iinfo(np.int64).min)
"""The step of a row that has none, or one that 64 bits do not hold."""

_COMMA, _FEED, _PLUS, _MINUS = b",\n+-"
_LONGEST_CELL = 64
_EXACT_FLOAT = float(1 << 53)
_ARE_STRANGE = np.ones(256, np.bool_)
_ARE_STRANGE[list(PLAIN_LETTERS + b",\n")] = False


@attrs.frozen(eq=False)
class Block:
    """Some rows, oldest first.

    Attributes:
        step: int64 `(rows,)`; `MISSING_STEP` where there is none.
        time: float64 `(rows,)`, seconds since 1970; NaN where there is none.
        columns: by name, values as float64 `(rows,)` and which of them are there as bool `(rows,)`.
    """

    step: Steps
    time: Floats
    columns: dict[str, tuple[Floats, _Bools]]

    def __len__(self) -> int:
        return len(self.step)


def read_blocks(
    header: bytes,
    chunks: Iterable[bytes],
    wanted: Collection[str] | None = None,
    *,
    decoder: ModuleType | None = orjson,
) -> Iterator[Block]:
    """Returns the rows of a CSV in blocks.

    Args:
        header: the first line.
        chunks: the other lines, in pieces of whole lines.
        wanted: which columns; all metrics where None.
        decoder: orjson, or None to do without.
    """
    columns = parse_header(header)
    pieces = iter(chunks)
    for chunk in pieces:
        if b'"' in chunk:
            # A quoted cell may hold a line feed, so that pieces are no whole lines from here on.
            yield block_of_rows(rows_of(columns, b"".join([chunk, *pieces])), wanted)
            return
        block = _fast(columns, chunk, wanted, decoder)
        yield block_of_rows(rows_of(columns, chunk), wanted) if block is None else block


def block_of_rows(rows: Iterable[MetricRow], wanted: Collection[str] | None = None) -> Block:
    """Returns rows as a block."""
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row.metrics) if wanted is None else wanted
    step = np.fromiter((_step(row.step) for row in rows), np.int64, len(rows))
    time = np.fromiter(
        (np.nan if row.time is None else _float(row.time) for row in rows), np.float64, len(rows)
    )
    columns = {}
    for name in names:
        cells = [row.epoch if name == "epoch" else row.metrics.get(name) for row in rows]
        values = np.fromiter(
            (np.nan if cell is None else _float(cell) for cell in cells), np.float64, len(rows)
        )
        columns[name] = values, np.fromiter((cell is not None for cell in cells), np.bool_, len(rows))
    return Block(step, time, columns)


def _step(step: int | None) -> int:
    return step if step is not None and -MISSING_STEP > step > MISSING_STEP else MISSING_STEP


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # An integer beyond what a float holds.
        return float("inf") if value > 0 else float("-inf")


# --- the fast way ------------------------------------------------------------------------------------------------------


def _fast(
    columns: list[str], chunk: bytes, wanted: Collection[str] | None, decoder: ModuleType | None
) -> Block | None:
    """Returns the rows of a piece; None where it is not plain."""
    ends = _separators(chunk, len(columns))
    if ends is None:
        return None
    names = [name for name in columns if name not in {"step", "epoch", "time"}] if wanted is None else wanted
    places: dict[str, list[int]] = {name: [] for name in ("step", "time", *names)}
    for index, column in enumerate(columns):
        if column in places:
            places[column].append(index)
    needed = sorted({index for found in places.values() for index in found})
    cells = _cells_of(chunk, ends, needed, decoder)
    if cells is None:
        return None

    def column_named(name: str) -> tuple[Floats, _Bools]:
        values, present = np.full(len(ends), np.nan), np.zeros(len(ends), np.bool_)
        for place, index in enumerate(places[name]):
            if place == 0:
                values, present = cells[index]
            else:  # A name that occurs twice: the last cell that is there counts.
                later, there = cells[index]
                values, present = np.where(there, later, values), present | there
        return values, present

    steps, has_step = column_named("step")
    has_step = has_step & np.isfinite(steps)
    steps = np.where(has_step, steps, 0.0)
    if (np.abs(steps) >= _EXACT_FLOAT).any():
        return None
    step = np.where(has_step, steps.astype(np.int64), MISSING_STEP)
    return Block(step, column_named("time")[0], {name: column_named(name) for name in names})


def _separators(chunk: bytes, columns: int) -> _Places | None:
    """Returns where each cell ends, `(rows, columns)`; None where lines are not all of that many plain cells."""
    if not columns or b"\0" in chunk or not chunk.endswith(b"\n"):
        return None
    letters = np.frombuffer(chunk, np.uint8)
    # Of the characters of a number, only "+" sorts before "-", beside the separators themselves.
    ends = np.flatnonzero(letters < _MINUS)
    marks = letters[ends]
    feeds = marks == _FEED
    if np.count_nonzero(feeds) + np.count_nonzero(marks == _COMMA) != len(marks):
        keep = marks != _PLUS
        ends, marks, feeds = ends[keep], marks[keep], feeds[keep]
        if not (feeds | (marks == _COMMA)).all():
            return None
    rows = np.count_nonzero(feeds)
    if len(ends) != rows * columns or not feeds[columns - 1 :: columns].all():
        return None
    return ends.reshape(rows, columns)


def _cells_of(
    chunk: bytes, ends: _Places, indices: list[int], decoder: ModuleType | None
) -> dict[int, tuple[Floats, _Bools]] | None:
    """Returns the numbers of some columns, and which cells have one; None where a cell is not empty and no number."""
    columns = ends.shape[1]
    if decoder is not None and 2 * len(indices) > columns:
        table = _decoded(chunk, ends.shape, decoder)
        if table is not None:
            present = ~np.isnan(table)
            return {index: (table[:, index], present[:, index]) for index in indices}
    padded = chunk + bytes(_LONGEST_CELL)
    found = {}
    for index in indices:
        starts = (ends[:, index - 1] if index else np.concatenate([[-1], ends[:-1, -1]])) + 1
        cells = _numbers(padded, starts, ends[:, index] - starts)
        if cells is None:
            return None
        found[index] = cells
    return found


def _decoded(chunk: bytes, shape: tuple[int, int], decoder: ModuleType) -> Floats | None:
    """Returns all cells of a piece; NaN where they are empty, None where there are others than JSON's numbers."""
    if _is_more_than_numbers(chunk):
        return None
    text = b"," + chunk[:-1].replace(b"\n", b",") + b","
    if b",," in text:
        text = text.replace(b",,", b",null,").replace(b",,", b",null,")
    try:
        table = np.array(decoder.loads(b"[" + text[1:-1] + b"]"), np.float64)
    except (ValueError, OverflowError):
        return None
    return table.reshape(shape) if table.size == shape[0] * shape[1] else None


def _is_more_than_numbers(text: bytes) -> bool:
    """Says whether there may be null, true, false, or lists: what JSON has beside numbers."""
    return any(mark in text for mark in (b"u", b"f", b"[", b"{"))


def _numbers(padded: bytes, starts: _Places, lengths: _Places) -> tuple[Floats, _Bools] | None:
    present = lengths > 0
    values = np.full(len(starts), np.nan)
    if not present.any():
        return values, present
    is_full = bool(present.all())
    if not is_full:
        starts, lengths = starts[present], lengths[present]
    longest = int(lengths.max())
    if longest > _LONGEST_CELL:
        return None
    # Each cell with the separator behind it, and whatever follows, as one item of a fixed size: overlapping views.
    width = longest + 1
    items: Any = np.ndarray((len(padded) - longest,), f"V{width}", padded, strides=(1,))
    numbers = _parsed(items[starts].view(np.uint8).reshape(-1, width), lengths)
    if numbers is None:
        return None
    if is_full:
        return numbers, present
    values[present] = numbers
    return values, present


def _parsed(letters: _Letters, lengths: _Places) -> Floats | None:
    """Returns the numbers of cells, `(cells, letters)`, each with its separator behind it; None where one is no number."""
    # In bytes, as `letters` are: comparing takes an eighth of the memory, and of the time.
    places, last = np.arange(letters.shape[1], dtype=np.uint8), lengths.astype(np.uint8)[:, None]
    inside = places <= last
    text = letters[inside].tobytes().replace(b"\n", b",")
    plain: Any = slice(None)
    if text.translate(None, PLAIN_LETTERS + b","):  # Some are "nan", or no numbers.
        plain = ~(_ARE_STRANGE[letters] & inside).any(axis=1)
        text = letters[inside & plain[:, None]].tobytes().replace(b"\n", b",")
    values, is_sure = np.empty(len(letters)), np.zeros(len(letters), np.bool_)
    decimals = read_decimals(text)
    if decimals is not None:
        values[plain], is_sure[plain] = decimals
    if not is_sure.all():
        others = _read_by_python(letters[~is_sure], lengths[~is_sure])
        if others is None:
            return None
        values[~is_sure] = others
    return values


def _read_by_python(letters: _Letters, lengths: _Places) -> Floats | None:
    """Returns the numbers of cells, `(cells, letters)`, as Python's `float` reads them; None where one is no number."""
    width = letters.shape[1]
    letters[np.arange(width) >= lengths[:, None]] = 0
    try:
        values: Floats = letters.view(f"S{width}").ravel().astype(np.float64)
    except ValueError:
        return None
    for index in np.flatnonzero((values == 0) & np.signbit(values)):
        # An integer has no negative zero, and "-0" is one; "-0.0" is none.
        if isinstance(number(letters[index].tobytes().rstrip(b"\0").decode()), int):
            values[index] = 0.0
    return values
