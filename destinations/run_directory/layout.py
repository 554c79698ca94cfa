"""The format of a run folder: file names, columns, the text of CSV and JSON, segments, `position.json`.

The writer and the readers share it. It imports neither torch nor numpy. The page "The format on disk"
describes every file.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import hashlib
import io
import json
import math
import os
import re
import zlib
from typing import TYPE_CHECKING, Any

import attrs
import orjson

from destinations.history.sums import Block
from uploads.disk import append_line, is_locked, look_twice, read_at, read_json, read_regular

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    import numpy as np

__all__ = [
    "ABANDONED_FOLDER",
    "ARTIFACTS_FOLDER",
    "EDITS",
    "ENVIRONMENT",
    "FORMAT_VERSION",
    "HEARTBEAT",
    "HEARTBEAT_SECONDS",
    "HPARAMS",
    "JOURNAL_FOLDER",
    "MARKED_TAIL_BYTES",
    "MAX_LINE_BYTES",
    "MEDIA_FOLDER",
    "OWN_COLUMNS",
    "PARTS_FOLDER",
    "PARTS_OF_A_SESSION",
    "PIECES_STATE",
    "PLAIN",
    "POSITION",
    "SEGMENT_SUFFIX",
    "SIDECAR",
    "SUMMARY",
    "TABLES_FOLDER",
    "TERMINAL_STATUSES",
    "TIME_FOLDER",
    "WRITERS_FOLDER",
    "WRITER_NAME",
    "CsvState",
    "NewerFormatError",
    "Position",
    "append_record",
    "check_format",
    "column_of",
    "csv_mark",
    "format_cell_rows",
    "format_cells",
    "header_end",
    "header_line",
    "is_shallow",
    "is_writer_name",
    "journal_path",
    "label_name",
    "lock_name",
    "metrics_name",
    "number_of_int",
    "parse_header",
    "parse_number",
    "part_numbers",
    "part_path",
    "parts_path",
    "problem_of_format",
    "read_header",
    "safe_name",
    "segment_number",
    "segment_path",
    "segment_paths",
    "strict_json",
    "summary_name",
    "trusted_heartbeat",
    "whole_number",
    "writer_of",
    "writer_path",
]

# 2: closed parts may precede a CSV. 3: a history says which rows count.
FORMAT_VERSION = 3

SIDECAR = "sidecar.json"
SUMMARY = "summary.json"
HEARTBEAT = "heartbeat"
HPARAMS = "hparams.yaml"
ENVIRONMENT = "environment.json"
# The user's changes after the run; its writer never touches them.
EDITS = "edits.json"
MEDIA_FOLDER = "media"
TABLES_FOLDER = "tables"
ARTIFACTS_FOLDER = "artifacts"
ABANDONED_FOLDER = "abandoned"
JOURNAL_FOLDER = "journal"
TIME_FOLDER = "time"
PIECES_STATE = ".pieces.json"
"""Which pieces of a run in a store a folder contains, see `pieces.FolderState`."""
PARTS_FOLDER = "parts"
PARTS_OF_A_SESSION = 100_000
"""In a store, the parts of session 4 are numbered from 400,001, so that sessions never share a name."""
WRITERS_FOLDER = "writers"
POSITION = "position.json"
SEGMENT_SUFFIX = ".journal"

WRITER_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
"""Names of writers, and of their folders in `WRITERS_FOLDER`."""

TERMINAL_STATUSES = frozenset(
    {"completed", "stopped", "failed", "failed to write", "interrupted", "preempted"}
)

# The columns of every row, which come first in our files.
OWN_COLUMNS = ("step", "epoch", "time")

MAX_LINE_BYTES = 64 << 20

HEARTBEAT_SECONDS = 180.0
"""A heartbeat older than this is stale.

`RunDirectory` touches the heartbeat every second. The scanner of stable-pretraining waits as long.
"""

MARKED_TAIL_BYTES = 256

PLAIN = b"0123456789+-.einfa,\n"
"""The characters of lines of numbers, including "nan" and "inf". `float` also takes "1_0" and " 1"."""

_HEADER_BYTES = 64 << 10
_MAX_NAME_BYTES = 120
_DEEPEST = 100
_BEYOND_INT = 1 << 63
_SEGMENT = re.compile(rf"[0-9]+{re.escape(SEGMENT_SUFFIX)}")
_PART = re.compile(r"([0-9]{8}|[1-9][0-9]{8,17})\.(?:csv|parquet)")
_FORMAT = re.compile(rb'"format_version":\s*(\d{1,9})')
_RELEASE = re.compile(r"[\w.+!-]{1,40}")
_UNSAFE = re.compile(r"[^\w .,=+@()\[\]-]")


class NewerFormatError(OSError):
    """A newer release wrote the run in a format unknown to this one; the text says which release to use."""


def check_format(run_dir: Path) -> None:
    """Raises NewerFormatError if a newer release wrote the folder of a run or of a writer."""
    try:
        raw = read_regular(run_dir / SIDECAR)
    except OSError:
        return
    # A cheap check that nearly always suffices. A hyperparameter may have that name too, so a hit is parsed.
    if any(int(found) > FORMAT_VERSION for found in _FORMAT.findall(raw)):
        problem = problem_of_format(run_dir, read_json(run_dir / SIDECAR))
        if problem is not None:
            raise NewerFormatError(f"run folder {str(run_dir)!r} cannot be used: {problem}")


def problem_of_format(run_dir: Path | str, sidecar: Mapping[str, Any]) -> str | None:
    """Returns which release a run needs, given its sidecar; None if this release knows its format."""
    version = sidecar.get("format_version")
    if type(version) is not int or version <= FORMAT_VERSION:
        return None
    packages = read_json(f"{run_dir}/{ENVIRONMENT}").get("packages")
    release = packages.get("training-destinations") if isinstance(packages, dict) else None
    is_known = isinstance(release, str) and _RELEASE.fullmatch(release)
    wanted = f"training-destinations {release} or newer" if is_known else "a newer training-destinations"
    return (
        f"a newer release wrote it, in format version {version}; this one knows versions up to "
        f"{FORMAT_VERSION}. Use {wanted}."
    )


def metrics_name(rank: int) -> str:
    """Returns the name of the CSV of a rank: `metrics.csv` for rank 0, `metrics.rank3.csv` for rank 3."""
    return "metrics.csv" if rank == 0 else f"metrics.rank{rank}.csv"


def parts_path(csv: Path) -> Path:
    """Returns the folder of the closed parts of a CSV: `parts/metrics` for `metrics.csv`."""
    return csv.parent / PARTS_FOLDER / csv.stem


def part_path(parts: Path, number: int, suffix: str = ".parquet") -> Path:
    """Returns the path of a closed part, numbered from 1, or of a file beside it."""
    return parts / f"{number:08d}{suffix}"


def part_numbers(parts: Path) -> list[int]:
    """Returns the numbers of the closed parts, ascending; ignores folders.

    Opening a part that isn't a regular file is an error, and so is reading the rows.
    """
    try:
        with look_twice(parts, lambda: os.scandir(parts)) as entries:
            found = [(match, entry) for entry in entries if (match := _PART.fullmatch(entry.name))]
            return sorted(
                {int(match[1]) for match, entry in found if not entry.is_dir(follow_symlinks=False)}
            )
    except (FileNotFoundError, NotADirectoryError):
        return []


def summary_name(rank: int) -> str:
    """Returns the name of a rank's summary."""
    return SUMMARY if rank == 0 else f"summary.rank{rank}.json"


def csv_mark(header: bytes, tail: bytes, size: int, closed: int) -> dict[str, int]:
    """Returns the mark in `summary.json` of the rows that it covers: the closed parts, then some of the CSV.

    Args:
        header: the first line of the CSV, with its line end.
        tail: the last covered bytes, at most `MARKED_TAIL_BYTES`.
        size: the number of covered bytes of the CSV.
        closed: the number of the last part.
    """
    mark = {"bytes": size, "tail_crc32": zlib.crc32(tail), "header_crc32": zlib.crc32(header)}
    return {**mark, "parts": closed} if closed else mark


def is_writer_name(name: str) -> bool:
    """Returns whether a name is valid for a writer: a path component that is the same on all systems."""
    return WRITER_NAME.fullmatch(name) is not None


def writer_path(run_dir: Path, writer: str) -> Path:
    """Returns the folder of a named writer, which is a run folder; for "", the trainer, the run's own."""
    return run_dir / WRITERS_FOLDER / writer if writer else run_dir


def writer_of(folder: Path) -> str:
    """Returns the name of the writer that a folder belongs to; "" for the folder of a run."""
    return folder.name if folder.parent.name == WRITERS_FOLDER else ""


def lock_name(rank: int) -> str:
    """Returns the name of a rank's lock file."""
    return ".lock" if rank == 0 else f".lock.rank{rank}"


def trusted_heartbeat(run_dir: str | Path, at: float, now: float) -> float | None:
    """Returns the time of a heartbeat if it proves that the run is being written.

    A clock that is ahead, or an edit, may set it to the future, where it would keep a killed run alive. If it
    is more than `HEARTBEAT_SECONDS` ahead of the reader's clock, it counts only while the lock of rank 0 is
    held, as the present time.

    Args:
        run_dir: the folder of the run.
        at: the modification time of the file, in seconds since 1970.
        now: the reader's time.

    Returns:
        The time, or None if it is in the future and nobody holds the lock.
    """
    if at <= now + HEARTBEAT_SECONDS:
        return at
    return now if is_locked(f"{run_dir}/{lock_name(0)}") else None


def journal_path(run_dir: Path, rank: int) -> Path:
    """Returns the journal folder of a rank."""
    return run_dir / JOURNAL_FOLDER / f"rank{rank}"


def segment_path(journal: Path, number: int) -> Path:
    """Returns the path of a segment, which is complete once there is one with a higher number."""
    return journal / f"{number:08d}{SEGMENT_SUFFIX}"


def segment_number(path: Path) -> int:
    """Returns the number of a segment."""
    return int(path.name.removesuffix(SEGMENT_SUFFIX))


def segment_paths(journal: Path) -> list[Path]:
    """Returns the existing segments, oldest first."""
    try:
        found = look_twice(journal, lambda: [*journal.iterdir()])
        paths = [path for path in found if _SEGMENT.fullmatch(path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(paths, key=segment_number)


def column_of(key: str) -> str:
    """Returns the column of a metric: its name, except for "step" and "time", which are columns of every row.

    A metric named "epoch" replaces the column of that name, as in Lightning. NUL and characters that UTF-8
    can't encode are escaped.
    """
    if key in {"step", "time"}:
        return f"metrics/{key}"
    return key.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\x00")


def safe_name(name: str) -> str:
    """Returns the name of a record as one path component; "/" becomes "__", as in stable-pretraining.

    Raises:
        ValueError: the name is empty, absolute, or has a component "..".
    """
    parts = re.split(r"[/\\]", name)
    if not name.strip() or ".." in parts or not parts[0] or re.match(r"[A-Za-z]:[/\\]", name) or "\0" in name:
        raise ValueError(
            f'name {name!r} leads out of the run folder. Remove "..", a leading "/", a drive and NUL.'
        )
    text = _UNSAFE.sub(lambda match: f"%{ord(match[0]):02X}", "__".join(parts))
    text = f"%2E{text[1:]}" if text.startswith(".") else text
    if len(text.encode()) > _MAX_NAME_BYTES:
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12]
        text = f"{text.encode()[: _MAX_NAME_BYTES - 13].decode(errors='ignore')}-{digest}"
    return text


def label_name(name: str) -> str:
    """Returns any label as one safe path component."""
    text = "/".join("%2E%2E" if part == ".." else part for part in re.split(r"[/\\]", name))
    text = text.replace("\0", "%00").replace(":", "%3A").lstrip("/")
    return safe_name(text).replace("%25", "%") if text.strip() else "_"


# The text of `metrics.csv`.


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


def read_header(fd: int, size: int) -> bytes:
    """Returns the header line of an open file; empty if there is none.

    Args:
        fd: the file.
        size: its size in bytes.

    Raises:
        OSError: the line has more than 64 MiB.
    """
    length = _HEADER_BYTES
    while True:
        data = read_at(fd, length, 0)
        if (end := header_end(data)) or length >= size:
            return data[:end]
        if length >= MAX_LINE_BYTES:
            raise OSError(errno.EFBIG, f"the header has more than {MAX_LINE_BYTES >> 20} MiB")
        length *= 4


def parse_header(line: bytes) -> list[str]:
    """Returns the columns of a header line, which may begin with a byte order mark, as Excel writes it.

    Raises:
        OSError: the name of a column is longer than the `csv` module reads, 128 KiB.
    """
    try:
        return next(csv.reader(io.StringIO(line.decode("utf-8-sig", "replace"), newline="")), [])
    except csv.Error as error:
        raise OSError(errno.EFBIG, f"the header of the CSV cannot be read: {error}") from error


def format_cells(values: Sequence[float]) -> str:
    """Returns the cells of values, joined by commas."""
    with contextlib.suppress(TypeError):  # An integer of more than 64 bits.
        data: bytes = orjson.dumps(values)
        if b"l" not in data and b"t" not in data:  # No null, false or true.
            return data[1:-1].decode()
    text = ",".join(map(repr, values))
    if "T" in text or "F" in text:
        text = text.replace("True", "1").replace("False", "0")
    return text


def format_cell_rows(values: np.ndarray[Any, np.dtype[np.float64]]) -> list[bytes]:
    """Returns the cells of each row of floats, joined by commas.

    Args:
        values: `(rows, metrics)`, both at least 1; C-contiguous.
    """
    text: bytes = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
    if b"n" not in text:  # null: a NaN or an infinity, which JSON does not have.
        return text[2:-2].split(b"],[")
    # One `repr` for all rows, "[[1.5, nan], [2.0, inf]]", is 1.5 times as fast as one for each row.
    return repr(values.tolist())[2:-2].replace(", ", ",").encode().split(b"],[")


def number_of_int(value: int) -> float:
    """Returns an integer as a metric value: beyond 64 bits, the nearest float, or infinity."""
    if -_BEYOND_INT <= value < _BEYOND_INT:
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def whole_number(value: float | None) -> int | None:
    """Returns a number as a step, an integer of 64 bits; None for NaN and larger numbers."""
    return int(value) if value is not None and abs(value) < _BEYOND_INT else None


def parse_number(cell: str) -> float | None:
    """Returns the number in a cell, an int if it looks like one, else a float; None for anything else."""
    try:
        # A failing `int` would take longer than everything else here.
        return float(cell) if "." in cell else number_of_int(int(cell))
    except ValueError:
        try:
            return float(cell)
        except ValueError:
            return None


# The text of documents and indices.


def strict_json(value: Any, indent: int | None = None) -> str:
    """Returns standard JSON: NaN and infinities become the strings "NaN", "Infinity" and "-Infinity".

    A value that JSON can't represent becomes its text.
    """
    try:
        return json.dumps(value, indent=indent, allow_nan=False, default=_text)
    except (ValueError, TypeError, RecursionError):
        pass
    try:
        return json.dumps(_finite(value), indent=indent, allow_nan=False, default=_text)
    except (ValueError, TypeError, RecursionError):
        # Imported here, because `events` takes 0.1 s, and readers of runs write JSON without it.
        from events import plain_config

        return json.dumps(_finite(plain_config({"": value})[""]), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
    return value


def _text(value: Any) -> str:
    from events import safe_text

    return safe_text(value)


def is_shallow(value: Any, most_values: float = math.inf) -> bool:
    """Returns whether a value is nested at most 100 levels deep, so that recursion is safe.

    Args:
        value: the value.
        most_values: how many values it may contain.
    """
    level, count = [value], 0
    for _ in range(_DEEPEST):
        level = [item for one in level for item in _items(one)]
        count += len(level)
        if not level:
            return True
        if count > most_values:
            return False
    return False


def _items(value: Any) -> Iterable[Any]:
    match value:
        case dict():
            return value.values()
        case list() | tuple() | set():
            return value
    return ()


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Appends a line of JSON to an index; creates the file and its folder if missing."""
    line = strict_json(record)
    try:
        append_line(path, line)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        append_line(path, line)


# The position.


@attrs.frozen
class CsvState:
    """The valid size of one version of a CSV and of its history, and where the journal continues.

    Bytes beyond `csv_bytes` and `history` were being written when the writer ended. In a folder of format 2,
    which has no history, `parts` is the number of the last closed part. The last block of the checksums ends
    at `summed`; `tail_rows` and `tail_crc32` describe the rows after it.
    """

    header_crc32: int
    csv_bytes: int
    segment: int
    offset: int
    parts: int = 0
    history: int = 0
    summed: int = 0
    tail_rows: int = 0
    tail_crc32: int = 0

    @property
    def tail(self) -> Block | None:
        """The rows after the last block of the checksums; None if there are no checksums."""
        if not self.summed:
            return None
        return Block(self.summed, self.csv_bytes, self.tail_rows, self.tail_crc32)

    def fits(self, header: bytes, size: int) -> bool:
        """Returns whether a file with this header line and size can be this version."""
        return self.header_crc32 == zlib.crc32(header) and size >= self.csv_bytes


@attrs.frozen
class Position:
    """The content of `position.json`: which rows the CSV has; all others are in the journal.

    While a CSV is being replaced, there are two states, the old and the new. They differ in the header, or
    the new one is shorter than the old one's `csv_bytes`. `generation` counts the replacements.
    """

    generation: int
    states: tuple[CsvState, ...]

    def state_of(self, header: bytes, size: int) -> CsvState | None:
        """Returns the state that matches a file with this header line and size, or None."""
        return next((state for state in self.states if state.fits(header, size)), None)

    def tail_of(self, header: bytes, size: int) -> Block | None:
        """Returns the rows after the last block of the checksums, even for a truncated file."""
        state = self.state_of(header, size) or self.states[-1]
        return state.tail if state.header_crc32 == zlib.crc32(header) else None

    def to_json(self) -> str:
        """Returns the content of the file."""
        return json.dumps({"format_version": FORMAT_VERSION, **attrs.asdict(self)})

    @classmethod
    def read(cls, path: Path) -> Position | None:
        """Reads the file; None if it is missing or invalid."""
        try:
            data: dict[str, Any] = json.loads(read_regular(path))
            states = tuple(CsvState(**state) for state in data["states"])
            numbers = [data["generation"], *(value for state in states for value in attrs.astuple(state))]
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, RecursionError):
            return None
        # Anything else is corrupt.
        is_sound = states and all(type(number) is int and 0 <= number < 1 << 63 for number in numbers)
        return cls(data["generation"], states) if is_sound else None
