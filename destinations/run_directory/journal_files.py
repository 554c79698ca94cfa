"""`JournalFiles`: the segments of a journal that is being written, and its folder.

The writer thread prepares the next segment in advance, so the training thread, which asks for it, rarely
opens a file.
"""

import contextlib
import itertools
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from uploads.disk import DISK, Disk

from .folder import remove_temporaries
from .frames import MAGIC, encode_frame
from .layout import POSITION, Position, segment_number, segment_path, segment_paths
from .segments import Segment, end_of_journal

__all__ = ["JournalFiles", "MakeSegment", "make_journal", "remove_journal", "sync_journal"]

MakeSegment = Callable[[Path, int, int], Segment]
"""Makes a segment from path, number, and size."""

_KEPT_OPEN = 16
_spare_numbers = itertools.count()


def make_journal(folder: Path, disk: Disk = DISK) -> None:
    """Creates the folder and its parents, unsynced, and removes temporary files of dead processes."""
    target, missing = folder, []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        disk.make_folder(path)
    remove_temporaries(target, disk=disk)


def sync_journal(folder: Path, run_dir: Path, disk: Disk = DISK) -> None:
    """Syncs the folder and its parents, up to the one that contains the run."""
    for path in (run_dir.parent, run_dir, folder.parent, folder):
        disk.sync_folder(path)


def remove_journal(folder: Path, disk: Disk = DISK) -> None:
    """Removes a fully drained journal, and its folders if they are empty."""
    for path in segment_paths(folder):
        disk.unlink(path)
    # Synced before the position is removed: without a position, segments that a power loss restores would
    # count as new.
    disk.sync_folder(folder)
    remove_temporaries(folder, disk=disk)
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileNotFoundError):
            disk.unlink(folder / POSITION)
        disk.remove_folder(folder)
        disk.remove_folder(folder.parent)


class JournalFiles:
    """The segments of one session.

    **Threading.** One thread at a time calls `following`; the writer thread calls `prepare` and `retire`. A
    signal handler that logs may interrupt `following` and call it again, so each of its steps finds what was
    done before.

    Args:
        folder: the folder of the journal; must exist.
        segment_bytes: the size of a segment.
        make_segment: makes a segment from path, number, and size.

    Attributes:
        segments: the segments that aren't drained yet; the last one is current.
    """

    def __init__(self, folder: Path, segment_bytes: int, make_segment: MakeSegment) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._make_segment = make_segment
        self.segments: deque[Segment] = deque()
        self._spares: deque[Segment] = deque(maxlen=1)
        # The next segment, from when it is chosen until it is current.
        self._next: Segment | None = None
        self._first_number = _last_number(folder) + 1
        self._first_follows = end_of_journal(folder)

    def following(self, before: Segment | None, least_bytes: int = 0) -> Segment:
        """Returns the segment that comes after another, under its name in the folder.

        It is the spare, or a new segment if the writer thread hasn't prepared one yet. The caller calls
        `is_current` once it writes to the segment.

        Raises:
            OSError: no segment can be made.
        """
        follows = self._first_follows
        least = self._first_number
        if before is not None:
            # Sealed first, so that a shorter row can't overtake the row that needs the next segment.
            end = before.seal()
            follows = None if before.is_abandoned else (before.number, end)
            least = before.number + 1
        needed = max(self._segment_bytes, least_bytes)
        following = self._next
        if following is None or following.size < needed:
            following = self._next = self._take_spare(needed)
        number = least
        while os.path.lexists(path := segment_path(self._folder, number)) and not following.is_at(path):
            number += 1
        try:
            # A file in the way belongs to an unknown chain, so this segment links to none.
            if follows is not None and number == least and following.end() == len(MAGIC):
                following.write(encode_frame(("follows", *follows)))
            following.move(path, number)
        except OSError:
            self._next = None
            following.discard()
            raise
        if following not in self.segments:
            self.segments.append(following)
        return following

    def is_current(self) -> None:
        """Notes that the segment that `following` returned is now current."""
        self._next = None

    def _take_spare(self, needed: int) -> Segment:
        """Returns an unnumbered segment of at least this size."""
        with contextlib.suppress(IndexError):
            spare = self._spares.popleft()
            # Otherwise it is too small, or its folder was deleted.
            if spare.size >= needed and spare.is_at(spare.path):
                return spare
            spare.discard()
        return self._make_segment(self._spare_path(), 0, needed)

    def _spare_path(self) -> Path:
        """Returns a unique path that `remove_temporaries` recognizes."""
        return self._folder / f".segment.{os.getpid()}-{next(_spare_numbers)}.tmp"

    def prepare(self) -> None:
        """Creates the next segment in advance.

        Raises:
            OSError: the disk is full.
        """
        if not self._spares:
            spare = self._make_segment(self._spare_path(), 0, self._segment_bytes)
            spare.populate()
            self._spares.append(spare)

    def retire(self) -> None:
        """Unmaps full segments, and closes the oldest files if there are many."""
        full = list(self.segments)[:-1]
        for index, segment in enumerate(full):
            segment.unmap()
            if len(full) - index > _KEPT_OPEN and segment.fileno() >= 0:
                segment.close()

    def close(self, *, in_child: bool = False) -> None:
        """Removes prepared segments. In a forked child, closes all segments, which belong to the parent."""
        unused = [*self._spares, *([self._next] if self._next is not None else [])]
        self._spares.clear()
        self._next = None
        for segment in list(self.segments) if in_child else unused:
            if in_child:
                segment.close()
            elif segment not in self.segments:
                segment.discard()


def _last_number(folder: Path) -> int:
    """Returns the highest segment number ever used; the position may name a segment that was removed."""
    position = Position.read(folder / POSITION)
    states = () if position is None else position.states
    return max((*map(segment_number, segment_paths(folder)), *(state.segment for state in states)), default=0)
