"""Reads the metrics of a live or finished run: closed parts, the CSV, and rows still in the journal.

Never writes. Returns each row once, including every row whose call returned before reading began, whatever
the writer does meanwhile and however it ended.
"""

import contextlib
import functools
import itertools
import logging
import os
import re
from collections.abc import Collection, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Self

import attrs

from destinations.run_directory.frames import MAGIC
from destinations.run_directory.layout import (
    OWN_COLUMNS,
    PARTS_FOLDER,
    POSITION,
    SIDECAR,
    TERMINAL_STATUSES,
    CsvState,
    Position,
    check_format,
    column_of,
    format_cells,
    header_end,
    header_line,
    journal_path,
    metrics_name,
    parse_header,
    part_numbers,
    parts_path,
    read_header,
    summary_name,
    writer_of,
)
from destinations.run_directory.segments import JournalRecord, journal_records
from uploads.disk import end_of_last_line, read_at, read_json

from .csv_file import CsvSnapshot, last_rows_of_file, open_existing
from .fork import parents_of
from .row_chain import Keep, Kept, Limit, RowChain, RowPlace, history_path, read_history, tighter
from .rows import MetricRow, has_any_metric, is_sound, keeps, merge_journal
from .sealed import HeldPart, Part
from .settled import End, Settled, settled
from .sums import CheckedBlocks, Sums, read_sums

__all__ = [
    "MetricsSnapshot",
    "damage_of_rows",
    "last_rows",
    "last_rows_of",
    "metric_columns",
    "read_rows",
    "read_series",
    "take_snapshot",
]

_TRIES = 100
_MOST_MISSING = 100
_MAX_CACHED_BYTES = 64 << 20
# So many of the last parts are read to find damage; `verify` reads all.
_MOST_VERIFIED = 16
_RANK = re.compile(r"metrics(?:\.rank([0-9]{1,9}))?")
_log = logging.getLogger("destinations")


@attrs.frozen(eq=False, repr=False)
class MetricsSnapshot(Settled):
    """The metrics of a rank at one moment: the closed parts, then the CSV, then the journal.

    Attributes:
        parts: the closed parts before the CSV, oldest first; none where it begins with their rows.
        place: segment and offset at which the journal continues; None without a position.
        closed: the number of the last part before the CSV; 0 if there is none.
        missing: the first hundred parts that should exist but don't.
        history: all sessions and closed parts.
        path: the path of the CSV.
        inherited: for a fork, the rows of its parents, which come before the parts.
    """

    parts: tuple[Part, ...]
    place: tuple[int, int] | None
    closed: int
    missing: tuple[Part, ...]
    history: RowChain
    path: Path
    inherited: tuple[Part, ...] = ()

    def sealed(self, place: RowPlace, start: int) -> Iterator[tuple[Part, int]]:
        """Yields the closed parts of a session, and the number of the first row of each.

        Args:
            place: the session, and how many of its rows count.
            start: the number of the first row needed.
        """
        first = 0
        for sealed, keep in self.history.parts_of([(place, None)]):
            end = first + sealed.rows
            if end > start:
                part = Part.find(parts_path(self.path), sealed.number, keep)
                if part is None:
                    part = Part(parts_path(self.path), sealed.number, keep=keep)
                    part.warn(part.absence)
                else:
                    yield part, first
            first = end

    def files(self, wanted: Collection[str] | None = None) -> "Iterator[CsvSnapshot]":
        """Yields the parts, each open until the next one, then the CSV. Logs missing or cut files.

        Args:
            wanted: columns; parts without any of them are skipped. None for all.
        """
        for part in self.missing:
            part.warn(part.absence)
        columns = frozenset(wanted or ())
        has_any = functools.cache(lambda header: not columns.isdisjoint(parse_header(header)))
        for part in (*self.inherited, *self.parts):
            if wanted is None or has_any(part.about()[0]):
                with part.opened() as file:
                    yield file
        for problem in self._problems():
            _log.warning("%s: %s.", self.path, problem)
        yield self.csv

    def _problems(self) -> list[str]:
        """Returns the damage that shows without reading rows: in the CSV, or from a history that was cut."""
        checks, lost = self.csv.checks, self.history.lost
        found = [f"{lost:,} rows of {self.path.name} were damaged, and are lost"] if lost else []
        if self.place is None and self.history.size:
            # A killed writer may leave a part that doesn't count, but it also leaves its position.
            listed = max((part.number for parts in self.history.parts.values() for part in parts), default=0)
            folder, name = parts_path(self.path), history_path(self.path).name
            found += [
                f"{PARTS_FOLDER}/{folder.name}/{number:08d} is in no line of {name}: its rows are left out"
                for number in part_numbers(folder)
                if number > listed
            ]
        return found + ([checks.problem] if checks is not None and checks.problem else [])

    def _rows_of_summary(self) -> list[str]:
        """Returns how many rows the CSV of an ended run lacks that its summary covers."""
        folder, rank = self.path.parent, int(self.path.stem.partition(".rank")[2] or 0)
        if self.place is not None or read_json(folder / SIDECAR).get("status") not in TERMINAL_STATUSES:
            return []
        match read_json(folder / summary_name(rank)).get("csv"):
            case {"bytes": int(size), "rows": int(rows), **more} if size > self.csv.end:
                there = self.csv.count(len(self.csv.header))
                if more.get("parts", 0) == self.closed and there < rows:
                    lost = f"{self.path.name} has {rows - there:,} rows less than {summary_name(rank)} covers"
                    return [f"{lost}: they are lost, unless you have removed them"]
        return []

    def damage_of_csv(self) -> list[str]:
        """Returns which rows of the CSV are missing; reads the whole file."""
        checks, damage = self.csv.checks, None
        if checks is not None:
            checks.verify(self.csv.raw)
            damage = checks.damage()
        found = list(dict.fromkeys([*self._problems(), *([] if damage is None else [damage])]))
        return found or self._rows_of_summary()

    def damage(self, *, is_whole: bool) -> list[str]:
        """Returns which rows are missing; if `is_whole`, reads the CSV and the last sixteen parts."""
        found = [part.absence for part in self.missing]
        read = frozenset(self.parts[-_MOST_VERIFIED:] if is_whole else ())
        damages = [part.check(is_whole=part in read) for part in self.parts]
        found += [damage for damage in damages if damage is not None]
        return found + (self.damage_of_csv() if is_whole else self._problems())

    def rows(self) -> "Iterator[MetricRow]":
        """Yields all rows outside damaged blocks; holds no file open."""
        for file in self.files():
            yield from filter(is_sound, file.rows())
        yield from self.journal_rows()

    def journal_rows(self) -> "list[MetricRow]":
        """Returns the rows in the journal."""
        return [row for _, rows in self.journal_by_session() for row in rows]

    def journal_by_session(self) -> "Iterator[tuple[str, list[MetricRow]]]":
        """Yields each session with rows in the journal, and these rows."""
        for session, limit, records in self.journal:
            yield session, self.rows_of(limit, records)

    @staticmethod
    def rows_of(limit: Limit | None, records: Sequence[JournalRecord]) -> "list[MetricRow]":
        """Returns the rows of some records of a session."""
        return [row for row in merge_journal(records) if keeps(limit, row)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.csv.close()


def damage_of_rows(run_dir: Path, parts: int = 0, *, is_whole: bool = False) -> list[str]:
    """Returns the damage of the rows of all ranks, file by file.

    Args:
        run_dir: the folder of the run.
        parts: how many closed parts rank 0 had when it ended; if not 0, their folder must exist.
        is_whole: whether to compare checksums, see `MetricsSnapshot.damage`.

    Raises:
        OSError: as for `take_snapshot`, or there are no parts although rank 0 had some.
    """
    folder = run_dir / PARTS_FOLDER
    names = [path.stem for path in run_dir.glob("metrics*.csv")]
    names += [path.name for path in folder.iterdir()] if parts or folder.is_dir() else []
    ranks = {int(match[1] or 0) for name in names if (match := _RANK.fullmatch(name))}
    found = []
    for rank in sorted(ranks | {0} if parts else ranks):
        with take_snapshot(run_dir, rank, with_records=False, with_parents=False) as snapshot:
            found += snapshot.damage(is_whole=is_whole)
    return found


def metric_columns(snapshot: MetricsSnapshot) -> list[str]:
    """Returns the columns of all metrics, in the order of first appearance."""
    parts = (part.about()[0] for part in (*snapshot.inherited, *snapshot.parts))
    headers = dict.fromkeys([*parts, snapshot.csv.header])
    names = [name for header in headers for name in parse_header(header) if name not in OWN_COLUMNS]
    before = None
    for record in itertools.chain.from_iterable(records for _, _, records in snapshot.journal):
        match record:
            case (logged, *_) if logged is not before:
                before = logged
                names += [column for column in map(column_of, logged) if column != "epoch"]
    return list(dict.fromkeys(names))


def take_snapshot(
    run_dir: Path,
    rank: int,
    *,
    with_records: bool = True,
    end: End | None = None,
    with_parents: bool = True,
) -> MetricsSnapshot:
    """Returns a consistent snapshot of a rank's metrics, a context manager.

    Args:
        run_dir: the folder of the run.
        rank: the rank that logged the rows.
        with_records: whether to read the journal as well.
        end: where the rows end. Default: with the newest session.
        with_parents: whether to include the rows of a fork's parents.

    Raises:
        NewerFormatError: a newer release wrote the run.
        OSError: a file is unreadable, isn't a regular file, or was replaced during each of a hundred
            attempts.
    """
    check_format(run_dir)
    for _ in range(_TRIES):
        with contextlib.ExitStack() as opened:
            snapshot = _try(run_dir, rank, end, opened, with_records=with_records)
            if snapshot is not None:
                if with_parents:
                    inherited = _inherited(run_dir, rank, end, snapshot.chain)
                    snapshot = attrs.evolve(snapshot, inherited=inherited)
                opened.pop_all()
                return snapshot
    raise OSError(f"metrics in {run_dir} changed during each of {_TRIES} attempts to read them. Try again.")


def _inherited(run_dir: Path, rank: int, end: End | None, chain: Sequence[Kept]) -> tuple[Part, ...]:
    """Returns the rows of a fork's parents, within the limit of the fork's oldest session."""
    own = chain[0][1] if chain else None
    goes_by_step = bool(rank or writer_of(run_dir))
    found: list[Part] = []
    for parent in reversed(parents_of(run_dir, None if end is None else end[0])):
        follows = parent.follows
        limit = own if follows.before is None else tighter(own, (follows.before, None))
        if goes_by_step and follows.step is not None:
            # Other ranks and writers have sessions of their own, so their rows are compared by step.
            limit = tighter(limit, (follows.step, follows.time))
        to = None if goes_by_step else (follows.session, follows.mark)
        with take_snapshot(parent.path, rank, end=to, with_parents=False) as snapshot:
            for part in snapshot.missing:
                part.warn(part.absence)
            parts = [*snapshot.parts, *_held_parts(snapshot, parts_path(parent.path / metrics_name(rank)))]
            for part in parts:
                keep = attrs.evolve(part.keep, limit=tighter(part.keep.limit, limit))
                found.append(attrs.evolve(part, keep=keep))
    return tuple(found)


def _held_parts(snapshot: MetricsSnapshot, folder: Path) -> Iterator[HeldPart]:
    """Yields the rows of a snapshot outside closed parts."""
    csv, number = snapshot.csv, snapshot.closed + 1
    if csv.size:
        state = os.fstat(csv.fileno()) if csv.fileno() >= 0 else None
        known = None if state is None else (state.st_ino, state.st_mtime_ns, state.st_size)
        content = _packed((folder, known, csv.first, csv.end), csv)
        yield HeldPart(folder, number, keep=Keep(limit=csv.limit), content=content)
        number += 1
    if rows := snapshot.journal_rows():
        names = list(dict.fromkeys(name for row in rows for name in row.metrics))
        header = header_line([*OWN_COLUMNS, *names])
        cells = ([row.step, row.epoch, row.time, *map(row.metrics.get, names)] for row in rows)
        lines = (",".join("" if cell is None else format_cells([cell]) for cell in one) for one in cells)
        text = header + "".join(f"{line}\n" for line in lines).encode()
        yield HeldPart(folder, number, content=CsvSnapshot(-1, header, len(text), text).to_parquet())


_MOST_HELD = 16
# The files packed last; files of ended runs don't change.
_held: dict[Hashable, bytes] = {}


def _packed(key: Hashable, csv: CsvSnapshot) -> bytes:
    content = _held.pop(key, None)
    if content is None:
        content = csv.to_parquet()
    _held[key] = content
    while len(_held) > _MOST_HELD:
        _held.pop(next(iter(_held)), None)
    return content


def _try(  # noqa: C901  # one look, step by step
    run_dir: Path, rank: int, to: End | None, opened: contextlib.ExitStack, *, with_records: bool
) -> MetricsSnapshot | None:
    """Reads everything once; None if the writer replaced or removed a file meanwhile.

    `opened` closes the CSV if the snapshot isn't used.
    """
    folder = journal_path(run_dir, rank)
    path = run_dir / metrics_name(rank)
    position, sums = Position.read(folder / POSITION), read_sums(path)
    fd = open_existing(path)
    if fd >= 0:
        opened.callback(os.close, fd)
    size = 0 if fd < 0 else os.fstat(fd).st_size
    header = b"" if fd < 0 else read_header(fd, size)
    held: bytes | None = None
    end = size
    start = 0, len(MAGIC)
    state = known = None
    if position is not None:
        state = position.state_of(header, size)
        if state is None and size and Position.read(folder / POSITION) != position:
            return None
        known = state or position.states[-1]
        start = known.segment, known.offset
        if state is not None:
            end = state.csv_bytes
    chain = _chain(path, known)
    if state is None and (CsvSnapshot(fd, header, size).is_own or size > _MAX_CACHED_BYTES):
        # The run is finished, or its position was lost: our writer only appends to or replaces the file.
        # Another program's file is read at once unless it is too large; reading ends if it gets truncated.
        end = end_of_last_line(fd, size)
    elif state is None:
        held = b"" if fd < 0 else read_at(fd, size, 0)
        size, header = len(held), held[: header_end(held)]
        end = held.rfind(b"\n") + 1
    records: list[JournalRecord] = []
    last, is_whole = start[0], True
    if with_records:
        records, (last, _), is_whole = journal_records(folder, start)
    after = Position.read(folder / POSITION)
    csv = CsvSnapshot(fd, header, end, held)
    if sums != Sums():
        tail = None if position is None else position.tail_of(header, size)
        csv.checks = CheckedBlocks(path, sums, header, size, end, csv.raw, tail)
    if after is None and position is None:
        # A new CSV, or another program's. Unless a whole session took place meanwhile, or a copying program
        # brought other rows with other checksums.
        if _size(path) != size or _chain(path, None) != chain or read_sums(path) != sums:
            return None
        return _snapshot(path, chain, csv, records, None, to)
    if after is None or position is None or after.generation != position.generation:
        return None
    if not is_whole and after != position:
        return None  # A segment was drained and removed before it was read.
    drained_beyond = with_records and any(state.segment > last for state in after.states)
    return None if drained_beyond else _snapshot(path, chain, csv, records, start, to)


def _chain(path: Path, state: CsvState | None) -> RowChain:
    """Returns the history of a CSV; for format 2, the existing parts."""
    if data := read_history(path, None if state is None else state.history):
        return _parsed(data, path)
    chain, folder = RowChain(), parts_path(path)
    numbers = [one for one in part_numbers(folder) if state is None or one <= state.parts]
    chain.add_format2(path, numbers, functools.partial(_rows_in, folder))
    return chain


# A follower reads the same history again and again. Nobody changes the result.
_parsed = functools.lru_cache(maxsize=64)(RowChain.parse)


def _rows_in(folder: Path, number: int) -> int:
    """Returns the number of rows of a part of format 2; 0 if it is damaged."""
    part = Part.find(folder, number)
    try:
        return 0 if part is None else part.about()[1]
    except OSError:
        return 0


def _snapshot(
    path: Path,
    history: RowChain,
    csv: CsvSnapshot,
    records: list[JournalRecord],
    place: tuple[int, int] | None,
    to: End | None,
) -> MetricsSnapshot:
    """Returns the snapshot, with the journal's sessions applied as the writer will apply them."""
    found = settled(history, csv, records, to)
    folder = parts_path(path)
    sealed = [] if found.has_view else [*history.parts_of(found.chain)]
    there = {*part_numbers(folder)} if sealed else set()
    parts = [Part(folder, one.number, keep, one) for one, keep in sealed]
    return MetricsSnapshot(
        found.chain,
        found.csv,
        found.has_view,
        found.journal,
        tuple(part for part in parts if part.number in there),
        place,
        max((part.number for part in parts), default=0),
        tuple(part for part in parts if part.number not in there)[:_MOST_MISSING],
        history,
        path,
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0


def read_rows(run_dir: Path | str, rank: int = 0) -> list[MetricRow]:
    """Returns all rows of a rank, oldest first, with metrics by column.

    ```python
    for row in read_rows("runs/digits"):
        print(row.step, row.metrics)
    ```

    Args:
        run_dir: the folder of the run.
        rank: the rank that logged the rows. Ranks above 0 have rows only with `all_ranks=True`.
    """
    with take_snapshot(Path(run_dir), rank) as snapshot:
        return list(snapshot.rows())


def read_series(run_dir: Path | str, name: str, rank: int = 0) -> list[tuple[int | None, float]]:
    """Returns the step and value of every row that has the metric.

    ```python
    print(read_series("runs/digits", "loss")[0])  # (0, 1.0)
    ```
    """
    column = column_of(name)
    return [(row.step, row.metrics[column]) for row in read_rows(run_dir, rank) if column in row.metrics]


def last_rows(
    run_dir: Path | str, count: int, rank: int = 0, wanted: Collection[str] = ()
) -> list[MetricRow]:
    """Returns the last rows of a rank, oldest first, reading the CSV from its end; see `read_rows`.

    Another program may rename columns in the middle of a file, so its file is read from the beginning, in
    little memory.

    Args:
        run_dir: the folder of the run.
        count: the maximum number of rows.
        rank: the rank that logged the rows.
        wanted: columns; rows with none of them are skipped. If empty, all rows count.
    """
    with take_snapshot(Path(run_dir), rank) as snapshot:
        return last_rows_of(snapshot, count, wanted)


def last_rows_of(snapshot: MetricsSnapshot, count: int, wanted: Collection[str] = ()) -> list[MetricRow]:
    """Returns the last rows of a snapshot, oldest first; see `last_rows`."""
    found = [row for row in snapshot.journal_rows() if has_any_metric(row, wanted)]
    found = found[max(0, len(found) - count) :]
    found = [*last_rows_of_file(snapshot.csv, count - len(found), wanted), *found]
    for part in reversed((*snapshot.inherited, *snapshot.parts)):
        if len(found) >= count:
            break
        with contextlib.closing(part.open()) as piece:
            if not wanted or not frozenset(wanted).isdisjoint(parse_header(piece.header)):
                found = [*last_rows_of_file(piece, count - len(found), wanted), *found]
    return found
