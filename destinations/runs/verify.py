"""`verify_run`: reads everything of a run, and reports damaged or missing data.

It reads each byte that has a checksum: blocks of `metrics.csv`, closed parts, lines of the history and of
the sessions, files with a SHA-256. Other files are compared by size. Importing this module imports
neither numpy nor pyarrow; reading the rows does.
"""

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

from destinations.history.row_chain import RowChain, SealedPart, history_path
from destinations.history.sessions import SESSIONS, read_lines
from destinations.history.sums import read_sums, sums_path
from destinations.kinds import KINDS, RecordAccess
from destinations.run_directory.layout import (
    EDITS,
    ENVIRONMENT,
    HPARAMS,
    POSITION,
    SIDECAR,
    Position,
    journal_path,
    metrics_name,
    parts_path,
    summary_name,
)
from uploads.disk import closing, crc32_of, open_regular

from .content.records import Records
from .content.sources import ranks_of
from .files import read_object_file
from .streams import streams_of

__all__ = ["Finding", "verify_run"]


@attrs.frozen
class Finding:
    """What is wrong with a file of a run.

    Attributes:
        file: its path in the folder of the run.
        text: the damage or the missing data, its location, and the loss.
        is_damage: False where only a checksum is missing, so that damage would not be found.
    """

    file: str
    text: str
    is_damage: bool = True


def verify_run(run_dir: Path, access: RecordAccess, problems: Callable[[], list[str]]) -> Iterator[Finding]:
    """Yields the problems of a run; reads all of it.

    Args:
        run_dir: the folder of the run.
        access: returns its records, and downloads their files if they are in a store.
        problems: returns what else is known to be wrong; called if nothing was found.
    """
    is_whole = True
    for stream in streams_of(run_dir):
        for ask in (_documents, _sessions, _rows):
            # An unreadable history is found twice.
            for found in dict.fromkeys(_found(stream.folder, functools.partial(ask, stream.folder))):
                is_whole &= not found.is_damage
                yield attrs.evolve(found, file=stream.prefix + found.file)
    for found in _found(run_dir, functools.partial(_records, run_dir, access)):
        is_whole = False
        yield found
    if is_whole:
        # Such as rows that are missing altogether, and objects that a store lost.
        yield from (Finding("", problem) for problem in problems())


def _found(folder: Path, ask: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yields findings, including a file that can't be read."""
    try:
        yield from ask()
    except (OSError, ValueError) as error:
        path = Path(getattr(error, "filename", None) or folder)
        name = str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
        yield Finding(name, f"cannot be read: {getattr(error, 'strerror', None) or error}")


def _documents(folder: Path) -> Iterator[Finding]:
    from destinations.run_directory.documents import read_hparams

    documents: list[tuple[str, Callable[[Path], Any]]] = [
        *((name, read_object_file) for name in (SIDECAR, summary_name(0), ENVIRONMENT, EDITS)),
        (HPARAMS, read_hparams),
    ]
    for name, read in documents:
        try:
            with contextlib.suppress(FileNotFoundError):
                read(folder / name)
        except (OSError, ValueError) as error:
            yield Finding(name, f"cannot be read: {getattr(error, 'strerror', None) or error}")


def _sessions(folder: Path) -> Iterator[Finding]:
    for line in read_lines(folder)[1]:
        yield Finding(SESSIONS, f"a line is damaged, and what it says is not known: {line[:60]!r}…")


def _rows(folder: Path) -> Iterator[Finding]:
    for rank in ranks_of(folder):
        csv = folder / metrics_name(rank)
        position = journal_path(folder, rank) / POSITION
        if os.path.lexists(position) and Position.read(position) is None:
            yield Finding(
                str(position.relative_to(folder)), "is damaged: where the journal continues is not known"
            )
        yield from _found(folder, functools.partial(_parts, csv))
        yield from _found(folder, functools.partial(_csv, csv, rank))


def _parts(csv: Path) -> Iterator[Finding]:
    """Compares closed parts with the history, including parts that no longer belong to the run."""
    from destinations.history.sealed import Part

    for sealed in (one for parts in RowChain.read(csv).parts.values() for one in parts):
        part = Part.find(parts_path(csv), sealed.number) or Part(parts_path(csv), sealed.number)
        if (text := _damage_of(part, sealed)) is not None:
            yield Finding(part.path.relative_to(csv.parent).as_posix(), text)


def _damage_of(part: Any, sealed: SealedPart) -> str | None:
    """Returns how a closed part differs from its line in the history; None if they agree."""
    if not os.path.lexists(part.path):
        return f"is missing: its {sealed.rows:,} rows are lost"
    with closing(open_regular(part.path)) as fd:
        size, crc32 = os.fstat(fd).st_size, crc32_of(fd) if sealed.crc32 else 0
    if part.path.suffix == ".csv" or (crc32 == sealed.crc32 and size == (sealed.size or size)):
        return None
    with contextlib.closing(part.open()) as file:
        lost = sealed.rows if file.is_damaged else file.packed.verify() + sealed.rows - file.packed.count
    return f"has other bytes than were written: {max(0, lost):,} of its {sealed.rows:,} rows are lost"


def _csv(csv: Path, rank: int) -> Iterator[Finding]:
    from destinations.history.snapshot import take_snapshot

    with take_snapshot(csv.parent, rank, with_records=False) as snapshot:
        checks = snapshot.csv.checks
        texts = snapshot.damage_of_csv()
        if checks is not None and checks.damaged:
            texts.remove(str(checks.damage()))
            texts += [
                f"bytes {one.start:,} to {one.end:,} are damaged: {one.rows:,} rows are lost"
                for one in checks.damaged.values()
            ]
        yield from (Finding(csv.name, text.removeprefix(f"{csv.name} ")) for text in texts)
        summed = sum(block.end - block.start for block in (checks.blocks if checks is not None else ()))
        unsummed = snapshot.csv.end - len(snapshot.csv.header) - summed
        if unsummed > 0 and history_path(csv).exists() and not (checks and checks.problem):
            damaged = read_sums(csv).damaged_lines
            text = f" ({damaged} lines are damaged)" if damaged else ""
            yield Finding(
                sums_path(csv).name, f"lacks checksums of {unsummed:,} bytes of rows{text}", is_damage=False
            )


def _records(run_dir: Path, access: RecordAccess) -> Iterator[Finding]:
    for index, count in Records(run_dir).damaged_lines().items():
        yield Finding(index, f"{count} lines are damaged: their records are lost")
    for kind in KINDS:
        newest = {record.path: record for record in access.records(kind.plural) if kind.folder}
        for path, record in newest.items():
            if (text := _damage_of_file(path, record)) is not None:
                yield Finding(str(path.relative_to(run_dir)), text)


def _damage_of_file(path: Path, record: Any) -> str | None:
    try:
        with closing(open_regular(path)) as fd, os.fdopen(os.dup(fd), "rb") as file:
            size = os.fstat(fd).st_size
            if record.size is not None and record.size != size:
                return f"has {size:,} of {record.size:,} bytes"
            sha256 = getattr(record, "sha256", None)
            if sha256 and hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                return "has other bytes than were written"
    except FileNotFoundError:
        return "is missing"
    return None
