"""`Series`: a metric of a run as numpy arrays; or all metrics in blocks, including rows in the journal.

Never writes; may read a run that is being written, see `run_directory.reader`. Importing this module imports
numpy.

Numbers are parsed by numpy here, which lets other threads run. Measured on 200,000 rows of ten metrics
(processor time): one column in 0.09 s, where `numpy.fromstring` takes 0.13 s, and all columns in 0.31 s. The
first chart of a page reads twenty such columns within its second.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from destinations.run_directory.frames import Resume
from destinations.run_directory.layout import column_of, parse_header, parse_number
from destinations.run_directory.reader import (
    MetricRow,
    MetricsSnapshot,
    merge_journal,
    metric_columns,
    parse_rows,
    take_snapshot,
)
from destinations.runs.errors import MetricNotFoundError

__all__ = [
    "MISSING_STEP",
    "PLAIN_LETTERS",
    "Block",
    "Floats",
    "Series",
    "Steps",
    "block_of_rows",
    "read_blocks",
    "read_decimals",
    "read_series",
    "run_blocks",
    "without_abandoned",
]

Floats = np.ndarray[Any, np.dtype[np.float64]]
_Bools = np.ndarray[Any, np.dtype[np.bool_]]
_Integers = np.ndarray[Any, np.dtype[np.int64]]

PLAIN_LETTERS = b"0123456789-.e"
_COMMA, _MINUS, _POINT, _E, _ZERO = b",-.e0"
# Numpy returns the largest integer for one beyond 64 bits.
_LIMIT = 9_000_000_000_000_000_000
_MAX_PLACES = 60
# T. J. Dekker, A floating-point technique for extending the available precision (1971): this factor cuts 53
# bits into halves whose products are exact.
_CUT = float((1 << 27) + 1)


def _halves(values: Floats) -> tuple[Floats, Floats]:
    scaled = values * _CUT
    high = scaled - (scaled - values)
    return high, values - high


# A power of ten, and what is missing to it: nothing up to 10**22, a float thereafter.
_POWERS = np.array([float(10**places) for places in range(_MAX_PLACES + 1)])
_POWERS_REST = np.array([float(10**places - int(power)) for places, power in enumerate(_POWERS)])
_POWERS_HIGH, _POWERS_LOW = _halves(_POWERS)


def read_decimals(text: bytes) -> tuple[Floats, _Bools] | None:
    """Parses decimal numbers; returns them and which are exact, or None if a cell is not a number.

    Args:
        text: the cells, each followed by a comma; only characters of `PLAIN_LETTERS`.
    """
    found = _integers_and_places(text)
    if found is None:
        return None
    integers, places = found
    is_sure = (integers < _LIMIT) & (integers > -_LIMIT)
    if b"-" in text:  # "-0.0" is another number than "0.0", but no other integer.
        is_sure &= integers != 0
    if not places.any():
        return integers.astype(np.float64), is_sure
    is_sure &= (places >= 0) & (places <= _MAX_PLACES)
    if not is_sure.all():
        integers, places = np.where(is_sure, integers, 0), np.where(is_sure, places, 0)
    values, is_rounded = _quotients(integers, places)
    return values, is_sure & is_rounded


def _integers_and_places(text: bytes) -> tuple[_Integers, _Integers] | None:
    """Returns the digits of each cell as an integer, and the power of ten to divide it by."""
    digits = text.replace(b".", b"").replace(b"e", b",")
    is_signed = b"-" in text
    # Numpy goes no further than to a cell without digits, and takes "1-2" for two numbers.
    if is_signed and (
        b"-," in digits or text.count(b"-") != text.count(b",-") + text.count(b"e-") + text.startswith(b"-")
    ):
        return None
    letters = np.frombuffer(text, np.uint8)
    marks = np.flatnonzero(letters - np.uint8(_ZERO) > 9)  # noqa: PLR2004  # wraps below "0"
    if is_signed:
        marks = marks[letters[marks] != _MINUS]
    # As if a cell had ended before the first.
    kinds = np.concatenate([[_COMMA], letters[marks]])
    marks = np.concatenate([[-1], marks])
    ends = np.flatnonzero(kinds != _POINT)
    if (np.diff(ends) > 2).any():  # noqa: PLR2004  # two points
        return None
    ends = ends[1:]
    places = marks[ends] - marks[ends - 1] - 1
    if not places.all():  # A number without digits, or none behind its point.
        return None
    places *= kinds[ends - 1] == _POINT
    integers: _Integers = np.fromstring(digits, np.int64, sep=",")
    return _without_exponents(integers, places, kinds[ends]) if b"e" in text else (integers, places)


def _without_exponents(
    integers: _Integers, places: _Integers, ends: Any
) -> tuple[_Integers, _Integers] | None:
    """Removes exponents from the integers, and subtracts them from the places of their mantissas."""
    is_before_exponent = ends == _E
    are_exponents = np.concatenate([[False], is_before_exponent[:-1]])
    if (are_exponents & (is_before_exponent | (places != 0))).any():
        return None
    are_numbers = ~are_exponents
    places = places[are_numbers]
    places[is_before_exponent[are_numbers]] -= integers[are_exponents]
    return integers[are_numbers], places


def _quotients(integers: _Integers, places: _Integers) -> tuple[Floats, _Bools]:
    """Returns integers divided by 10**places, and which of them are certainly correctly rounded."""
    high = integers.astype(np.float64)
    low = (integers - high.astype(np.int64)).astype(np.float64)
    powers, powers_high, powers_low = _POWERS[places], _POWERS_HIGH[places], _POWERS_LOW[places]
    quotients = high / powers
    first, second = _halves(quotients)
    products = quotients * powers
    errors = (
        (first * powers_high - products) + first * powers_low + second * powers_high
    ) + second * powers_low
    # The first two differences are exact: what the product of quotient and power, as a float, leaves over.
    corrections = ((high - products) - errors + (low - quotients * _POWERS_REST[places])) / powers
    values = quotients + corrections
    rests = (quotients - values) + corrections
    # A. Ziv, Fast evaluation of elementary mathematical functions with correctly rounded last bit (1991):
    # where a rest that is larger by more than its error does not change the last bit, the true one does not
    # either.
    return values, values + rests * (1 + 2.0**-20) == values


Steps = np.ndarray[Any, np.dtype[np.int64]]
_Places = np.ndarray[Any, np.dtype[np.int64]]
_Letters = np.ndarray[Any, np.dtype[np.uint8]]

MISSING_STEP = int(np.iinfo(np.int64).min)
"""The step of a row without one, or with one beyond 64 bits."""

_COMMA, _FEED, _PLUS, _MINUS = b",\n+-"
_LONGEST_CELL = 64
_EXACT_FLOAT = float(1 << 53)
_ARE_STRANGE = np.ones(256, np.bool_)
_ARE_STRANGE[list(PLAIN_LETTERS + b",\n")] = False


@attrs.frozen(eq=False)
class Block:
    """Consecutive rows of metrics.

    Attributes:
        step: int64 `(rows,)`; `MISSING_STEP` if missing.
        time: float64 `(rows,)`, seconds since 1970; NaN if missing.
        columns: by name, values as float64 `(rows,)` and a mask of present values, bool `(rows,)`.
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
    with_time: bool = True,
) -> Iterator[Block]:
    """Yields the rows of a CSV in blocks.

    Args:
        header: the first line.
        chunks: the other lines, in pieces of whole lines.
        wanted: columns; None for all metrics.
        with_time: whether the times are needed; otherwise they may be NaN, which takes a fifth less time.
    """
    columns = parse_header(header)
    pieces = iter(chunks)
    for chunk in pieces:
        if b'"' in chunk:
            # A quoted cell may contain a line feed: chunks are no longer whole lines.
            yield block_of_rows(parse_rows(columns, b"".join([chunk, *pieces])), wanted)
            return
        block = _fast(columns, chunk, wanted, with_time=with_time)
        yield block_of_rows(parse_rows(columns, chunk), wanted) if block is None else block


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


# Fast path.


def _fast(
    columns: list[str],
    chunk: bytes,
    wanted: Collection[str] | None,
    *,
    with_time: bool,
) -> Block | None:
    """Returns the rows of a chunk of plain numbers; None if it has anything else."""
    ends = _separators(chunk, len(columns))
    if ends is None:
        return None
    names = [name for name in columns if name not in {"step", "epoch", "time"}] if wanted is None else wanted
    places: dict[str, list[int]] = {name: [] for name in ("step", "time", *names)}
    for index, column in enumerate(columns):
        if column in places and (with_time or column != "time"):
            places[column].append(index)
    needed = sorted({index for found in places.values() for index in found})
    cells = _cells_of(chunk, ends, needed)
    if cells is None:
        return None

    def column_named(name: str) -> tuple[Floats, _Bools]:
        values, present = np.full(len(ends), np.nan), np.zeros(len(ends), np.bool_)
        for place, index in enumerate(places[name]):
            if place == 0:
                values, present = cells[index]
            else:  # A duplicate column: the last present cell counts.
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
    """Returns the ends of the cells, `(rows, columns)`; None if a line has another number of cells."""
    if not columns or b"\0" in chunk or not chunk.endswith(b"\n"):
        return None
    letters = np.frombuffer(chunk, np.uint8)
    # Of the characters of a number, only "+" and the separators sort before "-".
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


def _cells_of(chunk: bytes, ends: _Places, indices: list[int]) -> dict[int, tuple[Floats, _Bools]] | None:
    """Returns numbers and present cells of columns; None if a cell is neither empty nor a number."""
    padded = b""
    found = {}
    for index in indices:
        starts = (ends[:, index - 1] if index else np.concatenate([[-1], ends[:-1, -1]])) + 1
        text = chunk
        if starts[-1] + _LONGEST_CELL >= len(chunk):
            # A copy of the chunk, which most columns do without.
            text = padded = padded or chunk + bytes(_LONGEST_CELL + 1)
        cells = _numbers(text, starts, ends[:, index] - starts)
        if cells is None:
            return None
        found[index] = cells
    return found


def _numbers(text: bytes, starts: _Places, lengths: _Places) -> tuple[Floats, _Bools] | None:
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
    # Each cell and what follows it as an item of fixed size, in overlapping views.
    width = longest + 1
    items: Any = np.ndarray((len(text) - longest,), f"V{width}", text, strides=(1,))
    numbers = _parsed(items[starts].view(np.uint8).reshape(-1, width), lengths)
    if numbers is None:
        return None
    if is_full:
        return numbers, present
    values[present] = numbers
    return values, present


def _parsed(letters: _Letters, lengths: _Places) -> Floats | None:
    """Returns the numbers of cells `(cells, letters)`, or None; each cell ends with a separator."""
    # As uint8: an eighth of the memory and of the time.
    places, last = np.arange(letters.shape[1], dtype=np.uint8), lengths.astype(np.uint8)[:, None]
    inside = places <= last
    text = letters[inside].tobytes().replace(b"\n", b",")
    plain: Any = slice(None)
    if text.translate(None, PLAIN_LETTERS + b","):  # Some are "nan", or not numbers.
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
    """Returns the numbers of cells `(cells, letters)` by Python's `float`; None if one is not a number."""
    width = letters.shape[1]
    letters[np.arange(width) >= lengths[:, None]] = 0
    try:
        values: Floats = letters.view(f"S{width}").ravel().astype(np.float64)
    except ValueError:
        return None
    for index in np.flatnonzero((values == 0) & np.signbit(values)):
        # "-0" is an integer, which has no negative zero; "-0.0" is a float.
        if isinstance(parse_number(letters[index].tobytes().rstrip(b"\0").decode()), int):
            values[index] = 0.0
    return values


@attrs.frozen(eq=False, repr=False)
class Series:
    """The values of one metric, in the order of logging.

    Attributes:
        name: of the metric.
        step: int64 `(n,)`; `MISSING_STEP`, the min of int64, if missing.
        time: float64 `(n,)`, seconds since 1970; NaN if unknown.
        value: float64 `(n,)`; NaN and infinities were logged as such. An integer becomes the nearest float.
    """

    name: str
    step: Steps
    time: Floats
    value: Floats

    def __len__(self) -> int:
        return len(self.value)

    def __repr__(self) -> str:
        return f"Series({self.name!r}, {len(self)} values)"

    def _repr_html_(self) -> str:
        from destinations.runs.notebook import series_html

        return series_html(self.name, self.value)

    @property
    def has_step(self) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        """A mask of the values that have a step, bool `(n,)`."""
        return np.not_equal(self.step, MISSING_STEP)


def _no_rows_of(rank: int) -> str:
    return f"Rank {rank} has no rows here. Write them with RunDirectory(..., all_ranks=True)."


def read_series(run_dir: Path, name: str, rank: int = 0) -> Series:
    """Returns the values of a metric; see `Series`.

    Args:
        run_dir: the folder of the run.
        name: of the metric, as logged or as in the CSV; "epoch" is the epoch of each row.
        rank: of the rows.

    Raises:
        MetricNotFoundError: the run has no such metric; the message suggests the closest.
    """
    with take_snapshot(run_dir, rank) as snapshot:
        known = metric_columns(snapshot)
        column = next((one for one in (column_of(name), name) if one in known or one == "epoch"), None)
        if column is None:
            raise MetricNotFoundError(name, known, "" if known or not rank else _no_rows_of(rank))
        pieces: list[tuple[Steps, Floats, Floats]] = []
        for block in _blocks(snapshot, [column]):
            values, present = block.columns[column]
            if present.all():
                pieces.append((block.step, block.time, values))
            elif present.any():
                pieces.append((block.step[present], block.time[present], values[present]))
    if not pieces:
        return Series(name, np.empty(0, np.int64), np.empty(0), np.empty(0))
    step, time, value = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
    return Series(name, step, time, value)


def run_blocks(run_dir: Path, rank: int = 0) -> Iterator[Block]:
    """Yields all rows of a rank in blocks; a block has only the metrics that occur in it."""
    with take_snapshot(run_dir, rank) as snapshot:
        yield from _blocks(snapshot, None)


def _blocks(snapshot: MetricsSnapshot, wanted: Sequence[str] | None) -> Iterator[Block]:
    resumes = [record for record in snapshot.records if isinstance(record, Resume)]
    for block in read_blocks(snapshot.csv.header, snapshot.csv.chunks(), wanted):
        yield without_abandoned(block, resumes)
    rows = merge_journal([], snapshot.records)
    if rows:
        yield block_of_rows(rows, wanted)


def without_abandoned(block: Block, resumes: Sequence[Resume]) -> Block:
    """Drops the rows that a resume abandoned, which the CSV still has."""
    for resume in resumes:
        at = resume.time
        is_later = np.True_ if at is None else ~(block.time <= at)
        drops = (block.step > resume.step) | ((block.step == resume.step) & is_later)
        drops &= block.step != MISSING_STEP
        if drops.any():
            keep = ~drops
            columns = {name: (values[keep], there[keep]) for name, (values, there) in block.columns.items()}
            block = Block(block.step[keep], block.time[keep], columns)
    return block
