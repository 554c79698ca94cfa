"""The streams of a run: the rows and records of its trainer, and those of each named writer.

A named writer has a run folder of its own, `writers/NAME` of the run. This is the one place that tells which
there are: who reads a run asks here, reads each stream by its folder, and joins what it found. A writer that
cannot be read is reported, and does not hide the others.

Never writes.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import math
import operator
import os
from typing import TYPE_CHECKING, TypeVar

import attrs

from destinations.history.fork import parents_of
from destinations.history.sessions import read_sessions
from destinations.run_directory.layout import WRITERS_FOLDER, is_writer_name, writer_path
from uploads.disk import ABSENT

from .errors import WriterNotFoundError
from .files import number_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

__all__ = [
    "MAX_WRITERS",
    "TRAINER",
    "Stream",
    "by_time",
    "reported",
    "streams_of",
    "writer_names",
    "writers_of",
]

_log = logging.getLogger("destinations")

MAX_WRITERS = 1000
"""Of more, the first by name are read: each costs every reader some files."""
TRAINER = ""
"""In the place of the name of a writer."""

Item = TypeVar("Item")


@attrs.frozen
class Stream:
    """What one process has written of a run.

    Attributes:
        run_dir: the folder of the run.
        writer: the name of the writer; "" for the trainer.
        end: the id of the session that it is read up to, with what that follows; None for the newest.
        until: a writer's rows and records count up to this time, in seconds since 1970; None for all.
    """

    run_dir: Path
    writer: str = TRAINER
    end: str | None = None
    until: float | None = None

    @property
    def folder(self) -> Path:
        """The folder of its files, with the layout of a run folder."""
        return writer_path(self.run_dir, self.writer)

    @property
    def row_end(self) -> tuple[str, None] | None:
        """Where its rows end, for `take_snapshot`."""
        return None if self.end is None else (self.end, None)

    @property
    def prefix(self) -> str:
        """What the paths of its files begin with, relative to the folder of the run."""
        return f"{WRITERS_FOLDER}/{self.writer}/" if self.writer else ""


def streams_of(run_dir: Path, writer: str | None = None, end: str | None = None) -> list[Stream]:
    """Returns the streams of a run: that of the trainer, also if it has written nothing, then the writers'.

    Args:
        run_dir: the folder of the run.
        writer: only that of this writer; "" for the trainer's.
        end: the trainer's up to this session. Writers follow no session: they count until the next one began.

    Raises:
        WriterNotFoundError: the run has no such writer.
    """
    if writer == TRAINER:
        return [Stream(run_dir, end=end)]
    folders = [run_dir, *(parent.path for parent in parents_of(run_dir, end))]
    names = sorted({name for folder in folders for name in writers_of(folder)})
    if writer is not None:
        if writer not in names:
            raise WriterNotFoundError(writer, names)
        names = [writer]
    until = None if end is None or not names else _left_at(run_dir, end)
    writers = [Stream(run_dir, name, until=until) for name in names]
    return writers if writer is not None else [Stream(run_dir, end=end), *writers]


def _left_at(run_dir: Path, session: str) -> float | None:
    """Returns when the session after this one began; None for the newest."""
    lines = iter(read_sessions(run_dir))
    if not any(line.get("session") == session for line in lines):
        return None
    return number_of(next(lines, {}).get("start"))


def writers_of(run_dir: str | Path) -> list[str]:
    """Returns the names of the writers of a run, sorted; costs one system call where there are none.

    Raises:
        OSError: they cannot be listed.
    """
    folder = f"{run_dir}/{WRITERS_FOLDER}"
    # Most runs have none, and an exception costs three times as much.
    if not os.access(folder, os.F_OK):
        return []
    try:
        with os.scandir(folder) as entries:
            names = writer_names((one.name, one.is_dir(follow_symlinks=False)) for one in entries)
    except ABSENT:
        return []
    if len(names) > MAX_WRITERS:
        _log.warning("run %s has %d writers: the first %d are read", run_dir, len(names), MAX_WRITERS)
    # A link is not followed.
    return [] if os.path.islink(folder) else names[:MAX_WRITERS]  # noqa: PTH114  # as for `os.scandir`


def writer_names(entries: Iterable[tuple[str, bool]]) -> list[str]:
    """Returns the names of writers, sorted, also where there are more than are read.

    Args:
        entries: what is in the folder of writers: each name, and whether it is a folder and no link.
    """
    return sorted(name for name, is_folder in entries if is_folder and is_writer_name(name))


@contextlib.contextmanager
def reported(stream: Stream, asked: str | None = None, problems: list[str] | None = None) -> Iterator[None]:
    """Reports that a writer cannot be read, which is then left out, for the duration of a `with` block.

    Args:
        stream: what is read.
        asked: the writer that was asked for by name: its error is raised, as that of the trainer is.
        problems: where what is wrong is added. Default: it is logged.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        if stream.writer in {TRAINER, asked}:
            raise
        if problems is None:
            _log.warning("left out writer %s of run %s: %s", stream.writer, stream.run_dir, error)
        else:
            problems.append(f"writer {stream.writer} cannot be read: {error}")


def by_time(streams: Iterable[Iterable[Item]], time_of: Callable[[Item], float | None]) -> Iterator[Item]:
    """Yields the items of several streams in the order of their times; those of each stay in their order.

    Args:
        streams: the items of each; of equal times, those of the first stream come first.
        time_of: returns the time of an item; one without a time follows the item before it.
    """
    timed = [_timed(stream, time_of) for stream in streams]
    for _, item in heapq.merge(*timed, key=operator.itemgetter(0)):
        yield item


def _timed(items: Iterable[Item], time_of: Callable[[Item], float | None]) -> Iterator[tuple[float, Item]]:
    """Adds a time to each item that does not decrease."""
    latest = -math.inf
    for item in items:
        at = time_of(item)
        # A NaN is not greater.
        if at is not None and at > latest:
            latest = at
        yield latest, item
