"""Makes the rows of a run for the tables of a dataset, and detects whether the run has changed."""

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from destinations.history.fork import lineage
from destinations.history.sessions import SESSIONS
from destinations.kinds import indexes, kind_of_line
from destinations.kinds.kind import Kind
from destinations.kinds.line import Line
from destinations.kinds.tables import TABLE
from destinations.kinds.texts import TEXT
from destinations.run_directory.blocks import MISSING_STEP, Block
from destinations.run_directory.layout import JOURNAL_FOLDER, PARTS_FOLDER, TABLES_FOLDER
from destinations.runs.content.series import run_blocks
from destinations.runs.content.sources import ranks_of
from destinations.runs.files import json_lines
from destinations.runs.record import RunRecord, is_terminal
from destinations.runs.run import MetricSummary, RecordedRun
from destinations.runs.streams import Stream, by_time, streams_of
from destinations.runs.summary import computed_summary
from uploads.disk import ABSENT, closing, open_regular, read_regular, require_readable

from .tables import arrow_schema

__all__ = [
    "Content",
    "opened",
    "record_rows",
    "record_state",
    "summary_of",
    "summary_row",
    "text_of",
    "values_of",
]

_MAX_TIME = 1e12
# Larger tables are stored as links only.
_MAX_CONTENT_BYTES = 16 << 20
_METRICS = ("metrics*.csv", f"{JOURNAL_FOLDER}/*/*.journal", f"{PARTS_FOLDER}/*/*.parquet")


@attrs.frozen
class Content:
    """The identity of the rows and records of a run.

    Attributes:
        state: changes only if their bytes change.
        stamp: changes if the files on this machine change; while it is the same, they need not be read.
        size: bytes of the files.
        has_metrics: whether there are metrics files.
    """

    state: str
    stamp: str
    size: int
    has_metrics: bool

    @classmethod
    def of(cls, run: RecordedRun, before: Mapping[str, Any] | None = None) -> "Content":
        """Returns the content of a run. For a run in a bucket, it comes from the listing, without reading.

        Args:
            run: the run.
            before: its row in the dataset.

        Raises:
            OSError: an existing file can't be read.
        """
        if run.copy is not None:
            return cls._listed(run, run.copy.versions_of(run.record.path))
        stamps: dict[str, tuple[int, ...]] = {}
        for name, path in _files_of(run.path):
            require_readable(path)
            with contextlib.suppress(*ABSENT):
                at = path.stat()
                stamps[name] = (at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino)
        stamp, size = _digest(stamps), sum(size for size, *_ in stamps.values())
        if before is not None and before["stamp"] == stamp:
            state = before["state"]
        else:
            state = _digest([(name, _checksum(path)) for name, path in _files_of(run.path)])
        size += sum(path.lstat().st_size for path in run.path.glob(f"{TABLES_FOLDER}/*/*"))
        return cls(state, stamp, size, any(map(_is_of_metrics, stamps)))

    @classmethod
    def _listed(cls, run: RecordedRun, listed: Sequence[tuple[str, int, str | None]]) -> "Content":
        if not listed or not all(version for *_, version in listed):
            # The store lists no versions, so the bytes must be compared.
            with opened(run) as brought:
                return attrs.evolve(cls.of(RecordedRun(brought.record)), stamp="")
        has_metrics = any(_is_of_metrics(name) for name, *_ in listed)
        return cls(_digest(listed), "", sum(size for _, size, _ in listed), has_metrics)


@contextlib.contextmanager
def opened(run: RecordedRun) -> Iterator[RecordedRun]:
    """Opens a run for reading; a run in a bucket is in a temporary folder meanwhile."""
    if run.copy is None:
        yield run
        return
    with run.copy.borrowed(run.record.path) as (folder, copy):
        yield RecordedRun(RecordedRun.open(folder).record, copy=copy)


def _is_of_metrics(name: str) -> bool:
    """Returns whether a file or object has rows of metrics."""
    folder, _, file = name.rpartition("/")
    return file.startswith("metrics") or f"/{JOURNAL_FOLDER}/" in f"/{folder}/" or file.endswith(".zip")


def _files_of(run_dir: Path) -> Iterator[tuple[str, Path]]:
    """Yields the files with the rows and records of a run, each with its name in the folder."""
    for stream in streams_of(run_dir):
        folder = stream.folder
        for pattern in (*_METRICS, SESSIONS, *indexes()):
            for path in sorted(folder.glob(pattern)):
                yield f"{stream.prefix}{path.relative_to(folder).as_posix()}", path


def _checksum(path: Path) -> str:
    with contextlib.suppress(*ABSENT), closing(open_regular(path)) as fd, os.fdopen(os.dup(fd), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
    return ""


def record_state(record: RunRecord) -> str:
    """Returns a text that changes with the record, except for fields that change without the run."""
    values = attrs.asdict(record, recurse=False)
    del values["heartbeat_at"], values["problem"], values["path"]
    return _digest(values)


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def text_of(path: Path | str) -> str:
    """Returns a path as a text that Arrow accepts."""
    return str(path).encode("utf-8", "backslashreplace").decode()


# Values.


def values_of(run: RecordedRun, run_id: str, part: int) -> Iterator[Any]:
    """Yields the values of a run as record batches, one for each block of rows."""
    for stream in streams_of(run.path):
        for rank in ranks_of(stream.folder) if stream.writer else run.ranks():
            first_row = 0
            for block in run_blocks(run.path, rank, stream.writer):
                yield _values_of_block(run_id, rank, block, first_row, part)
                first_row += len(block)


def _values_of_block(run_id: str, rank: int, block: Block, first_row: int, part: int) -> Any:
    """Returns the values of a block, one metric after the other, as a record batch."""
    import pyarrow as pa

    shape = len(block.columns), len(block)
    values = np.array([values for values, _ in block.columns.values()], np.float64).reshape(shape)
    present = np.array([there for _, there in block.columns.values()], np.bool_).reshape(shape)
    metrics, rows = np.nonzero(present)
    steps, times = block.step[rows], block.time[rows]
    fits = np.abs(times) < _MAX_TIME
    micros = np.rint(np.where(fits, times, 0.0) * 1e6).astype(np.int64)
    batch = pa.record_batch(
        [
            pa.array(block.columns, pa.string()).take(pa.array(metrics)),
            pa.repeat(run_id, len(rows)),
            pa.repeat(pa.scalar(rank, pa.int32()), len(rows)),
            pa.array(steps, pa.int64(), mask=steps == MISSING_STEP),
            pa.array(first_row + rows),
            pa.array(micros, pa.int64(), mask=~fits).cast(pa.timestamp("us", "UTC")),
            pa.array(values[present], from_pandas=False),
            pa.repeat(block.writer, len(rows)),
            pa.repeat(pa.scalar(part, pa.int32()), len(rows)),
        ],
        schema=arrow_schema("metrics"),
    )
    # Copied, because Delta's writer frees the batch in its own thread. Freeing numpy's memory there needs the
    # interpreter, and would abort a process that is exiting.
    return pa.concat_batches([batch, batch.slice(0, 0)])


# The other tables.


def summary_of(run: RecordedRun, record: RunRecord) -> dict[str, MetricSummary]:
    """Returns the statistics of each metric. For a killed run, they are computed from its rows.

    The summary file of a killed run is a few seconds older than its rows.
    """
    return run.summary if is_terminal(record.status) else computed_summary(run.path, 0)


def summary_row(metric: MetricSummary) -> dict[str, Any]:
    """Returns the columns of a metric, with integers as floats, because Arrow does not convert large ones."""
    found = attrs.asdict(metric)
    numbers = {name: found[name] for name in ("last", "min", "max") if found[name] is not None}
    return found | {name: float(value) for name, value in numbers.items()}


def record_rows(run: RecordedRun, place: str) -> Iterator[dict[str, Any]]:
    """Yields the texts and tables of a run, and links to its files, as rows of `records`.

    Damaged lines are left out, as in `RecordedRun.records`.

    Args:
        run: the run to read.
        place: the start of links into its folder.
    """
    for index in indexes():
        found = by_time((_lines(stream, index) for stream in streams_of(run.path)), lambda one: one[1].time)
        for row, (writer, line) in enumerate(found):
            if (kind := kind_of_line(index, line.fields)) is not None:
                yield {"kind": kind.name, "row": row, "writer": writer, **_record_row(run, line, kind, place)}


def _lines(stream: Stream, index: str) -> Iterator[tuple[str, Line]]:
    """Returns the lines of a stream that belong to the run, without files that were deleted later."""
    lines: list[Line] = []
    for folder, chain in lineage(stream.folder, stream.end):
        read = functools.partial(json_lines, folder / index, with_torn=True)
        lines += [Line(folder, fields) for fields in chain.records(read) if fields is not None]
    deleted = {line.name: at for at, line in enumerate(lines) if line.fields.get("is_deleted") is True}
    return ((stream.writer, line) for at, line in enumerate(lines) if at > deleted.get(line.name, -1))


def _record_row(run: RecordedRun, line: Line, kind: Kind, place: str) -> dict[str, Any]:
    fields, link = dict(line.fields), None
    content = str(fields.pop("text", "")) if kind is TEXT else None
    with contextlib.suppress(KeyError, ValueError):
        path = line.path()
        link = place
        for part in os.path.relpath(path, os.path.realpath(run.path)).split("/"):
            link = link.rpartition("/")[0] if part == ".." else f"{link}/{part}"
        if kind is TABLE:
            if run.copy is not None:
                run.copy.bring_files([path])
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_size <= _MAX_CONTENT_BYTES:
                    content = read_regular(path).decode("utf-8", "replace")
    return {
        "name": line.name,
        "step": line.step,
        "time": line.time,
        "path": link and text_of(link),
        "content": content,
        "fields": json.dumps(fields),
    }
