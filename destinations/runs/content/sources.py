"""Reads a run as a sequence of logging calls, in order of time, to replay them elsewhere.

Never writes. A `ReadPosition` says what was yielded before, so that a run being written can be read
repeatedly, and each call is yielded once.
"""

import contextlib
import functools
import itertools
import operator
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import attrs

from destinations.history.chain import Chain
from destinations.history.csv_file import CsvSnapshot, read_whole
from destinations.history.cursor import Cursor
from destinations.history.fork import lineage
from destinations.history.row_chain import Keep, RowChain, SealedPart
from destinations.history.sealed import Part
from destinations.kinds import KINDS, indexes, kind_of_line
from destinations.kinds.artifacts import ARTIFACTS_INDEX
from destinations.kinds.media import MEDIA_INDEX
from destinations.run_directory.layout import (
    ABANDONED_FOLDER,
    JOURNAL_FOLDER,
    metrics_name,
    parts_path,
)
from destinations.run_directory.stored_run import LIVE_FOLDER, stream_of
from destinations.runs.files import json_lines, number_of, whole_of
from destinations.runs.streams import Stream, by_time, reported, streams_of

from .rank_reader import RankReader

__all__ = [
    "Branch",
    "Item",
    "ReadPosition",
    "RewoundError",
    "branches_of",
    "items_of",
    "own_folders",
    "ranks_of",
]

# The lines of one call are written one by one; the last call of a live run may be incomplete.
_SETTLED_SECONDS = 5.0
_MAX_DIGITS = 10
_BRANCH = re.compile(r"metrics(?:\.rank(\d{1,9}))?\.step(-?\d{1,18})\.(\w+)\.csv", re.ASCII)


class RewoundError(Exception):
    """Rows yielded before are no longer in the run, because training resumed from a checkpoint."""


@attrs.define
class ReadPosition:
    """The position up to which a run was yielded.

    Attributes:
        rows: the `Cursor` of each rank, as JSON.
        lines: number of lines yielded, by index file and file of abandoned rows.
        writers: the same for named writers, by name.
    """

    rows: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    lines: dict[str, int] = attrs.field(factory=dict)
    writers: dict[str, dict[str, Any]] = attrs.field(factory=dict)


@attrs.frozen
class Branch:
    """Rows that a session left behind when training went on from an earlier place; they never change.

    Attributes:
        name: of the branch: the step of its first row and the id of its session, "step4.1a2b3c4d5e6f".
        rank: of the rows.
        from_step: the step of its first row, or the one that training continued from.
        path: the file that has its rows, or the first of them.
        open_rows: a CSV with rows of it after those of the parts, and how many others it begins with, if any.
    """

    name: str
    rank: int
    from_step: int
    path: Path
    _parts: tuple[Part, ...] = ()
    open_rows: tuple[Path, int] | None = None

    def files(self, max_bytes: int = 1 << 30) -> Iterator[CsvSnapshot]:
        """Yields its rows as CSVs in memory.

        Raises:
            OSError: a file cannot be read, or has more bytes than that.
        """
        if not self._parts and self.open_rows is None:
            yield read_whole(self.path, max_bytes)
        for part in self._parts:
            with contextlib.closing(part.open()) as file:
                file.packed.invert()
                content = b"".join([file.header, *file.chunks()])
                yield CsvSnapshot(-1, file.header, len(content), content)
        if self.open_rows is not None:
            whole = read_whole(self.open_rows[0], max_bytes)
            whole.begin = whole.offset_of(self.open_rows[1])
            yield whole


class Item(NamedTuple):
    """One logging call. A named tuple, because there is one per row.

    Attributes:
        kind: "metrics", or the name of a kind of `destinations.kinds`: "image", "audio", "table", …
        time: of the call, in seconds since 1970; None if unknown.
        step: None if it has none.
        epoch: None if unknown.
        metrics: the values, for metrics.
        lines: the lines of the index file, for everything else; one call may write several.
        rank: of the metrics.
        branch: the name of the abandoned branch of the metrics, if any.
        writer: whose call it is; "" for the trainer.
        parent: of the records that a fork has of its parent, the folder of that.
    """

    kind: str
    time: float | None
    step: int | None
    epoch: float | None
    metrics: dict[str, float]
    lines: tuple[dict[str, Any], ...]
    rank: int = 0
    branch: str = ""
    writer: str = ""
    parent: Path | None = None


def items_of(
    run_dir: Path,
    position: ReadPosition,
    settled_at: float | None = None,
    *,
    abandoned: bool = False,
    writer: str | None = None,
    problems: list[str] | None = None,
) -> Iterator[Item]:
    """Yields the calls of all writers after a position, oldest first, and updates the position.

    Args:
        run_dir: the folder of the run.
        position: updated when the iteration ends.
        settled_at: the current time for a live run: calls of the last seconds wait for their remaining lines.
        abandoned: whether to yield abandoned rows too.
        writer: only the calls of this writer, "" for the trainer's.
        problems: as of `streams.reported`.

    Raises:
        RewoundError: rows yielded before are gone.
    """
    sources: list[Iterator[Item]] = []
    positions: dict[str, ReadPosition] = {}
    for stream in streams_of(run_dir, writer):
        own = position
        if stream.writer:
            own = positions[stream.writer] = ReadPosition(**position.writers.get(stream.writer, {}))
        of_stream = _sources(stream.folder, own, settled_at, abandoned=abandoned)
        sources += [_of_writer(one, stream, problems) for one in of_stream] if stream.writer else of_stream
    yield from by_time(sources, operator.attrgetter("time"))
    if positions:
        position.writers |= {name: attrs.asdict(own) for name, own in positions.items()}


def _sources(
    folder: Path, position: ReadPosition, settled_at: float | None, *, abandoned: bool
) -> list[Iterator[Item]]:
    """Returns the calls of one writer, by where they are read."""
    sources: list[Iterator[Item]] = [
        _new_rows(folder, rank, position) for rank in dict.fromkeys([0, *ranks_of(folder)])
    ]
    if abandoned:
        sources += [_abandoned_rows(branch, position) for branch in branches_of(folder)]
    *parents, (_, chain) = lineage(folder)
    for path, of_parent in parents:
        lines = (_new_lines(path, name, of_parent, position, None, f"{path.name}/") for name in indexes())
        sources += [map(functools.partial(Item._replace, parent=path), items) for items in lines]
    return sources + [_new_lines(folder, name, chain, position, settled_at) for name in indexes()]


def _of_writer(items: Iterator[Item], stream: Stream, problems: list[str] | None) -> Iterator[Item]:
    with reported(stream, problems=problems):
        for item in items:
            yield item._replace(writer=stream.writer)


# Rows.


def ranks_of(run_dir: Path) -> list[int]:
    """Returns the ranks that have metrics."""
    found = {0} if (run_dir / metrics_name(0)).exists() else set()
    for pattern, before, after in (
        ("metrics.rank*.csv", "metrics.rank", ".csv"),
        (f"{JOURNAL_FOLDER}/rank*", "rank", ""),
    ):
        for path in run_dir.glob(pattern):
            number = path.name.removeprefix(before).removesuffix(after)
            if number.isascii() and number.isdecimal() and len(number) < _MAX_DIGITS:
                found.add(int(number))
    return sorted(found)


def _new_rows(folder: Path, rank: int, position: ReadPosition) -> Iterator[Item]:
    known = position.rows.get(str(rank))
    reader = RankReader(folder, rank, None if known is None else Cursor.from_json(known))
    with reader.look() as look:
        if look.taken_back:
            raise RewoundError
        for row in look.new_rows():
            if row.metrics:
                yield Item("metrics", row.time, row.step, row.epoch, row.metrics, (), rank)
        if look.taken_back:
            raise RewoundError
    position.rows = {**position.rows, str(rank): reader.cursor.to_json()}


def branches_of(run_dir: Path) -> list[Branch]:
    """Returns the branches of a run that were left, by rank and step."""
    found = []
    # As format 2 kept them.
    folder = run_dir / ABANDONED_FOLDER
    for path in sorted(folder.glob("*.csv")) if not folder.is_symlink() else ():
        if match := _BRANCH.fullmatch(path.name):
            of_rank, step, name = match.groups()
            found.append(Branch(f"step{step}.{name}", int(of_rank or 0), int(step), path))
    for rank in ranks_of(run_dir):
        csv = run_dir / metrics_name(rank)
        chain = RowChain.read(csv)
        for session, left in chain.left():
            found += _branch(session, rank, csv, left)
        for folder in own_folders(run_dir, rank).values():
            found += _branch_beside(folder / csv.name, rank, chain)
    return sorted(found, key=lambda one: (one.rank, one.from_step))


def own_folders(run_dir: Path, rank: int = 0) -> dict[str, Path]:
    """Returns the folder of each session that has one, by its id.

    In the copy of a run in a store, a machine has one that went on when another had continued the run.
    """
    folders = sorted((run_dir / LIVE_FOLDER / stream_of(rank)).glob("*"))
    found = {RowChain.read(folder / metrics_name(rank)).newest: folder for folder in folders}
    return {session: folder for session, folder in found.items() if session}


def _branch(
    session: str,
    rank: int,
    csv: Path,
    left: Iterable[tuple[SealedPart, Keep]],
    open_rows: tuple[Path, int] | None = None,
) -> list[Branch]:
    """Returns the branch of a session, of the rows that its parts do not keep; none if there are no rows."""
    parts = (Part.find(parts_path(csv), part.number, keep) for part, keep in left)
    there = tuple(part for part in parts if part is not None)
    if not there and open_rows is None:
        return []
    branch = Branch("", rank, 0, there[0].path if there else csv, there, open_rows)
    first = next((row for one in branch.files() for row in one.rows()), None)
    if first is None:
        return []
    return [attrs.evolve(branch, name=f"step{first.step or 0}.{session}", from_step=first.step or 0)]


def _branch_beside(csv: Path, rank: int, chain: RowChain) -> list[Branch]:
    """Returns the rows of a session with a folder of its own, without the rows that the run itself has."""
    own = RowChain.read(csv)
    before, left = chain.sealed_rows(own.newest), []
    for part in own.parts.get(own.newest, ()):
        left.append((part, Keep(min(before, part.rows))))
        before = max(0, before - part.rows)
    open_rows = (csv, (own.view or 0) + before) if csv.is_file() else None
    return _branch(own.newest, rank, csv, left, open_rows)


def _abandoned_rows(branch: Branch, position: ReadPosition) -> Iterator[Item]:
    key = f"{ABANDONED_FOLDER}/{branch.rank}.{branch.name}"
    if key in position.lines:
        return
    count = 0
    for row in itertools.chain.from_iterable(file.rows() for file in branch.files()):
        count += 1
        if row.metrics:
            yield Item("metrics", row.time, row.step, row.epoch, row.metrics, (), branch.rank, branch.name)
    position.lines[key] = count


# Indexes.


def _new_lines(
    folder: Path,
    name: str,
    chain: Chain,
    position: ReadPosition,
    settled_at: float | None,
    prefix: str = "",
) -> Iterator[Item]:
    path, key = folder / name, prefix + name
    lines = itertools.islice(json_lines(path), position.lines.get(key, 0), None)
    last = _last_of_each(path) if name == ARTIFACTS_INDEX else {}
    belongs = chain.belongs(lambda: json_lines(path))
    pending: list[dict[str, Any]] = []
    count = 0

    def item() -> Item:
        position.lines[key] = position.lines.get(key, 0) + count
        first = pending[0]
        kind = kind_of_line(name, first)
        named = str(first.get("type")) if kind is None else kind.name
        return Item(named, _time_of(first), whole_of(first.get("step")), None, {}, tuple(pending))

    for number, line in enumerate(lines, position.lines.get(key, 0)):
        if pending and not _is_of_same_call(pending[-1], line):
            yield item()
            pending, count = [], 0
        count += 1
        # An artifact that was overwritten or deleted is skipped, and so is what was left behind.
        is_last = line is not None and last.get(str(line.get("name")), number) == number
        if line is not None and is_last and line.get("is_deleted") is not True and belongs(line):
            pending.append(line)
    if pending:
        written_at = _time_of(pending[-1])
        is_settled = settled_at is None or written_at is None or settled_at - written_at >= _SETTLED_SECONDS
        if is_settled or name != MEDIA_INDEX:
            yield item()
    elif count:
        position.lines[key] = position.lines.get(key, 0) + count


def _last_of_each(path: Path) -> dict[str, int]:
    """Returns the index of the last line of each name."""
    return {str(line.get("name")): number for number, line in enumerate(json_lines(path)) if line is not None}


def _is_of_same_call(one: dict[str, Any], other: dict[str, Any] | None) -> bool:
    if other is None:
        return True
    return (
        any(kind.is_grouped and kind.name == other.get("type") for kind in KINDS)
        and all(one.get(key) == other.get(key) for key in ("type", "name", "tag", "step", "time"))
        and (index := whole_of(one.get("index"))) is not None
        and other.get("index") == index + 1
    )


def _time_of(line: dict[str, Any]) -> float | None:
    value = number_of(line.get("time"))
    return None if value is None else float(value)
