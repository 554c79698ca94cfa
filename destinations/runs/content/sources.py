"""Finds the ranks of a run with metrics, and the branches that its sessions left behind; never writes."""

import contextlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from destinations.history.csv_file import CsvSnapshot, read_whole
from destinations.history.row_chain import Keep, RowChain, SealedPart
from destinations.history.sealed import Part
from destinations.run_directory.layout import (
    ABANDONED_FOLDER,
    JOURNAL_FOLDER,
    metrics_name,
    parts_path,
)
from destinations.run_directory.stored_run import LIVE_FOLDER, stream_of

_MAX_DIGITS = 10
_BRANCH = re.compile(r"metrics(?:\.rank(\d{1,9}))?\.step(-?\d{1,18})\.(\w+)\.csv", re.ASCII)


@attrs.frozen
class Branch:
    """Rows that a session left behind when training resumed from an earlier place; they never change.

    Attributes:
        name: the step of its first row and the id of its session, "step4.1a2b3c4d5e6f".
        rank: the rank that logged the rows.
        from_step: the step of its first row, or the step that training resumed from.
        path: the first file with its rows.
        open_rows: a CSV with more rows of the branch, and how many other rows the CSV begins with; or None.
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
            OSError: a file can't be read, or has more than `max_bytes`.
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


def branches_of(run_dir: Path) -> list[Branch]:
    """Returns the branches of a run by rank and step."""
    found = []
    # Format 2 kept them in a folder.
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

    In the copy of a run in a store, a session has its own folder if its machine went on writing after another
    machine had continued the run.
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
    """Returns the branch of a session: the rows that its parts don't keep; empty if there are none."""
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
    """Returns the branch of a session with its own folder, without rows that the run itself has."""
    own = RowChain.read(csv)
    before, left = chain.sealed_rows(own.newest), []
    for part in own.parts.get(own.newest, ()):
        left.append((part, Keep(min(before, part.rows))))
        before = max(0, before - part.rows)
    open_rows = (csv, (own.view or 0) + before) if csv.is_file() else None
    return _branch(own.newest, rank, csv, left, open_rows)
