"""The streams of a run: what its trainer and each of its named writers wrote.

A named writer has a run folder of its own, `writers/NAME` in the run's folder. Readers ask this module for
the streams, read each by its folder, and join the results. If a writer can't be read, that is reported and
the others are still read.

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
"""If there are more, only the first by name are read: each costs every reader some files."""
TRAINER = ""
"""Stands for the trainer where a writer is named."""

Item = TypeVar("Item")


@attrs.frozen
class Stream:
    """What one process wrote of a run.

    Attributes:
        run_dir: the folder of the run.
        writer: the name of the writer; "" for the trainer.
        end: the id of the last session to read, with the sessions that it follows; None for the newest.
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
        """Where its rows end, as `take_snapshot` takes it."""
        return None if self.end is None else (self.end, None)

    @property
    def prefix(self) -> str:
        """The prefix of its files' paths, relative to the run's folder."""
        return f"{WRITERS_FOLDER}/{self.writer}/" if self.writer else ""


def streams_of(run_dir: Path, writer: str | None = None, end: str | None = None) -> list[Stream]:
    """Returns the streams of a run: the trainer's, even if it is empty, then the writers'.

    Args:
        run_dir: the folder of the run.
        writer: return only this writer's stream; "" for the trainer's.
        end: the trainer's last session. Writers follow no session: they count until the next one began.

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
    """Returns when the session after this one began; None if there is none."""
    lines = iter(read_sessions(run_dir))
    if not any(line.get("session") == session for line in lines):
        return None
    return number_of(next(lines, {}).get("start"))


def writers_of(run_dir: str | Path) -> list[str]:
    """Returns the sorted names of a run's writers; costs one system call if there are none.

    Raises:
        OSError: they can't be listed.
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
    """Returns the sorted names of writers, including those beyond `MAX_WRITERS`.

    Args:
        entries: each name in the folder of writers, and whether it is a folder and not a link.
    """
    return sorted(name for name, is_folder in entries if is_folder and is_writer_name(name))


@contextlib.contextmanager
def reported(stream: Stream, asked: str | None = None, problems: list[str] | None = None) -> Iterator[None]:
    """Within a `with` block, reports the error of a writer that can't be read, and leaves the writer out.

    Args:
        stream: the stream that is read.
        asked: a writer that was asked for by name. Its errors are raised, like the trainer's.
        problems: takes the problem. Default: it is logged.
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
    """Yields the items of several streams by time, and keeps the order within each stream.

    Args:
        streams: the items of each stream. At equal times, the first stream's items come first.
        time_of: returns the time of an item; an item without a time follows the one before it.
    """
    timed = [_timed(stream, time_of) for stream in streams]
    for _, item in heapq.merge(*timed, key=operator.itemgetter(0)):
        yield item


def _timed(items: Iterable[Item], time_of: Callable[[Item], float | None]) -> Iterator[tuple[float, Item]]:
    """Adds a non-decreasing time to each item."""
    latest = -math.inf
    for item in items:
        at = time_of(item)
        # A NaN is not greater.
        if at is not None and at > latest:
            latest = at
        yield latest, item
