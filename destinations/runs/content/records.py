"""Records of a run other than metrics: tables, media, histograms, texts, traces and artifacts.

Each call reads the index file (such as `media.jsonl`) again, so a live run shows new records. A record has
the metadata of a file; `load` reads the file. A torn last line is ignored. `Records.damaged_lines` counts
damaged lines and lines above 32 MiB. An unreadable index raises `OSError`. Importing this module imports
neither numpy nor Pillow.
"""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs

from destinations.history.chain import chain_of
from destinations.history.fork import lineage
from destinations.kinds import KINDS, indexes, kind_of, kind_of_line
from destinations.kinds.artifacts import Deletion
from destinations.kinds.kind import Kind
from destinations.kinds.line import Line
from destinations.kinds.media import parse_medium
from destinations.kinds.tables import Table, TableEntry, read_table, table_rows
from destinations.run_directory.layout import check_format
from destinations.runs.budget import spend
from destinations.runs.errors import MetricNotFoundError
from destinations.runs.files import json_lines
from destinations.runs.streams import Stream, by_time, reported, streams_of

__all__ = ["RecordCount", "Records", "chosen", "count_records"]

_MAX_NAMES = 1000
# The memory of a cell with its text.
_CELL_BYTES = 100


@attrs.define
class RecordCount:
    """The number and size of the records of one kind.

    Attributes:
        count: number of records.
        size: bytes of their files.
        names: number of records by name, for the first thousand names.
    """

    count: int = 0
    size: int = 0
    names: Counter[str] = attrs.field(factory=Counter)


class Records:
    """The records of all writers of a run; paths lead into the writer's folder.

    Args:
        run_dir: the folder of the run.
        end: as for `streams_of`.
    """

    def __init__(self, run_dir: Path, end: str | None = None) -> None:
        self._run_dir = run_dir
        self._end = end

    def of(self, plural: str, name: str | None = None, step: int | None = None) -> list[Any]:
        """Returns the records of a kind in the order of logging; see `RecordAccess.records`."""
        wanted = kind_of(plural=plural)
        found: list[list[Any]] = []
        for stream in streams_of(self._run_dir, end=self._end):
            with reported(stream):
                parsed = self._parsed(stream, wanted.index)
                found.append(_without_deleted([record for kind, record in parsed if kind is wanted]))
        return chosen(by_time(found, lambda record: getattr(record, "time", None)), name, step)

    def table(self, name: str, step: int | None = None) -> Table:
        """Reads a table.

        Args:
            name: as logged.
            step: None for the last one.

        Raises:
            MetricNotFoundError: no table has this name, or none has it at this step.
            FileNotFoundError: its file is missing.
        """
        entry = self._table(name, step)
        columns, rows = read_table(entry.path, [kind for _, kind in entry.columns])
        return _table_of(entry, columns, rows)

    def table_part(
        self, name: str, step: int | None, offset: int, limit: int
    ) -> tuple[Table, dict[str, str], int]:
        """Reads some rows of a table into memory; also returns the columns' types and the number of rows.

        Raises:
            MetricNotFoundError: no table has this name, or none has it at this step.
            FileNotFoundError: its file is missing.
        """
        entry = self._table(name, step)
        every = table_rows(entry.path, [kind for _, kind in entry.columns], offset, offset + limit)
        columns, rows, total = next(every, []), [], 0
        for total, row in enumerate(every, 1):
            spend(_CELL_BYTES * len(row))
            if offset < total <= offset + limit:
                rows.append(row)
        return _table_of(entry, columns, rows), dict(entry.columns), total

    def _table(self, name: str, step: int | None) -> TableEntry:
        entries: list[TableEntry] = self.of("tables", name)
        found = [entry for entry in entries if step is None or entry.step == step]
        if not found:
            raise MetricNotFoundError(
                f"{name} at step {step}", [f"{name} at step {entry.step}" for entry in entries]
            )
        return found[-1]

    def damaged_lines(self) -> dict[str, int]:
        """Returns the number of damaged lines of each index that has any."""
        counts = {}
        for stream in streams_of(self._run_dir, end=self._end):
            for index in indexes():
                with reported(stream):
                    parsed = self._parsed(stream, index)
                    counts[stream.prefix + index] = sum(record is None for _, record in parsed)
        return {index: count for index, count in counts.items() if count}

    def left(self) -> set[str]:
        """Returns the ids of the sessions with records that don't belong to the run."""
        chain, found = chain_of(self._run_dir), set()
        for index in () if chain.is_whole else indexes():
            read = functools.partial(json_lines, self._run_dir / index)
            belongs = chain.belongs(read)
            found |= {str(line.get("session")) for line in read() if line is not None and not belongs(line)}
        return found

    def overview(self) -> "dict[str, RecordCount]":
        """Returns the number of records by kind ("images", "audio", …), in constant memory."""
        found: dict[str, RecordCount] = {}
        for stream in streams_of(self._run_dir, end=self._end):
            for index in indexes():
                with reported(stream):
                    count_records(self._parsed(stream, index), found)
        return {kind.plural: found[kind.plural] for kind in KINDS if kind.plural in found}

    def _parsed(self, stream: Stream, index: str) -> Iterator[tuple[Kind | None, Any]]:
        """Yields the kind and the record of each line of an index; the record is None for a damaged line."""
        check_format(stream.folder)
        for folder, chain in lineage(stream.folder, stream.end):
            lines = functools.partial(json_lines, folder / index, with_torn=True)
            for fields in chain.records(lines):
                kind = found = None
                if fields is not None:
                    try:
                        kind = kind_of_line(index, fields)
                        parse = parse_medium if kind is None else kind.parse
                        found = parse(Line(folder, fields))
                    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
                        found = None
                if stream.until is None or (getattr(found, "time", None) or 0.0) <= stream.until:
                    yield kind, found


def count_records(records: Iterable[tuple[Kind | None, Any]], found: dict[str, RecordCount]) -> None:
    """Adds records to the counts by kind."""
    for kind, record in records:
        if kind is None or record is None:
            continue
        size, name = getattr(record, "size", None) or 0, getattr(record, "name", "")
        if isinstance(record, Deletion):
            if one := found.get(kind.plural):
                one.count = max(0, one.count - 1)
                one.size = max(0, one.size - max(0, size))
                one.names -= Counter([name])
            continue
        one = found.setdefault(kind.plural, RecordCount())
        one.count += 1
        one.size += max(0, size)
        if name in one.names or len(one.names) < _MAX_NAMES:
            one.names[name] += 1


def _table_of(entry: TableEntry, columns: list[str], rows: list[list[Any]]) -> Table:
    names = tuple(columns) or tuple(name for name, _ in entry.columns)
    return Table(entry.name, entry.step, names, tuple(map(tuple, rows)))


def _without_deleted(records: list[Any]) -> list[Any]:
    """Returns the valid records, without files deleted later."""
    deleted = {one.name: place for place, one in enumerate(records) if isinstance(one, Deletion)}
    return [
        one
        for place, one in enumerate(records)
        if one is not None and (not deleted or place > deleted.get(one.name, -1))
    ]


def chosen(records: Iterable[Any], name: str | None, step: int | None) -> list[Any]:
    """Returns the records of a name and a step; see `RecordAccess.records`."""
    found: list[Any] = []
    others: dict[str, None] = {}
    is_known = name is None
    for record in records:
        # A trace has no name.
        if name is not None and (own := getattr(record, "name", "")) != name:
            if len(others) < _MAX_NAMES:
                others[own] = None
            continue
        is_known = True
        if step is None or record.step == step:
            found.append(record)
    if name is not None and not is_known:
        raise MetricNotFoundError(name, others)
    return found
