"""`Mirror`: uploads a run to a store while it is being written, as pieces.

At an interval, the writer thread looks at the files of the run, which are few, and passes new data to an
upload queue: one piece (`pieces`), the closed parts, and the files that the media writer has named. A worker
process uploads them. While a piece waits, no other is made, so after an outage a single piece catches up.

Pieces are merged like the digits of a counter: twelve pieces of one interval become one of twelve, and twelve
of those one of 144. So there are about fifty at most, and each byte is sent a few times, at a third of its
size.
"""

import contextlib
import errno
import functools
import logging
import os
import re
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from destinations.history.sealed import Part
from destinations.history.sessions import SESSIONS_FOLDER
from destinations.kinds import indexes, record_folders
from events import redact_text
from uploads import UploadError, UploadQueue, UploadState
from uploads.disk import end_of_last_line, open_regular, replace_json

from .claim import Claim
from .folder import RunPathError
from .layout import (
    HEARTBEAT,
    PARTS_OF_A_SESSION,
    TIME_FOLDER,
    metrics_name,
    part_numbers,
    parts_path,
)
from .pieces import LINES, Change, FileState, Piece, piece_name, write_piece
from .stored_run import SIGN_FILE

if TYPE_CHECKING:
    from uploads import UploadHandle

__all__ = ["Mirror"]

_log = logging.getLogger("destinations")

_FAN_OUT = 12
_TAIL_BYTES = 256
_COPY_BYTES = 1 << 20
# A larger document, which is replaced as a whole, isn't sent at each interval.
_LARGE_DOCUMENT = 64 << 10
_INTERVALS_OF_A_LARGE_ONE = 6
# Larger files are uploaded only at the end.
_MOST_BYTES = 512 << 20
_BRANCH_SECONDS = 60.0
_FAILED_SECONDS = 60.0
# A sign is sent if nothing else was sent for a little longer than promised; pieces come about as often.
_SIGN_IS_DUE = 1.25
_FLIGHT_FOLDER = "flight"
_OF_RANK = re.compile(r"\.rank(\d+)\.")
_OF_RANK_BELOW = re.compile(r"-(\d+)\.")


@attrs.define
class _Sent:
    """The state of a file when it was last sent.

    Attributes:
        identity: its device and inode.
        changed: its modification time, in nanoseconds.
        state: its state for readers.
        tail: the checksum of its last bytes.
        interval: the interval in which it was sent.
    """

    identity: tuple[int, int]
    changed: int
    state: FileState
    tail: int
    interval: int


class Mirror:
    """Uploads the changes of a run.

    **Threading.** Any thread may call `add`; everything else belongs to the writer thread.

    Args:
        claim: the claim of this session, already taken.
        folder: the folder of the run, a path that stays valid if the folder is moved.
        rank: the rank whose files are sent; rank 0 also sends all files that belong to no rank.
        seconds: the interval.
        queue: the upload queue; closed by `finish`.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        claim: Claim,
        folder: Path,
        rank: int,
        seconds: float,
        queue: UploadQueue,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._claim = claim
        self._folder = folder
        self._rank = rank
        self._seconds = seconds
        self._queue = queue
        self._clock = clock
        self._csv = metrics_name(rank)
        self._due_at = clock()
        self._interval = 0
        self._sent: dict[str, _Sent] = {}
        self._parts: dict[int, str] = {}
        self._waiting: list[UploadHandle] = []
        # The pieces that make up the whole folder, in order.
        self._pieces: list[tuple[int, int]] = []
        # The state of readers at the start of each group of intervals, by the size of the group.
        self._starts: dict[int, tuple[int, dict[str, FileState]]] = dict.fromkeys(_group_sizes(0), (1, {}))
        # Names of pieces of this folder that are no longer needed; deleted with the next ones.
        self._unneeded = claim.earlier_pieces()
        self._new: deque[str] = deque()
        # The description of the session that has taken over; this one is then a branch.
        self._successor: dict[str, Any] | None = None
        self._signs = 0
        self._sign: UploadHandle | None = None
        self._sent_at = clock()
        self._has_failed = False
        # Whether the next piece must contain everything, so that no other is needed.
        self._is_whole_due = True

    @property
    def first_part(self) -> int:
        """The lowest number of a part that this session closes."""
        return self._claim.session * PARTS_OF_A_SESSION + 1

    def add(self, path: str) -> None:
        """Adds a complete file of a record that won't change, by its path in the folder of the run."""
        self._new.append(path)

    # In the writer thread.

    def tick(self) -> None:
        """Sends new data if it is due and nothing waits; reports an error once."""
        if self._clock() >= self._due_at:
            self._due_at = max(self._due_at + self._seconds, self._clock() + self._seconds / 2)
            self._safely(self._send)
        if self._clock() - self._sent_at >= self._claim.sign_seconds * _SIGN_IS_DUE:
            self._safely(self._send_sign)

    def finish(self, seconds: float) -> None:
        """Uploads all files of the folder as they are, then closes the queue.

        Args:
            seconds: the timeout. The rest stays in the spool, and the log says how to finish it.
        """
        deadline = time.monotonic() + seconds
        try:
            self._note_settled()
            if self._successor is None:
                self._safely(self._end)
                self._queue.drain(max(0.0, deadline - time.monotonic()))
                self._note_settled()
            if self._successor is not None:
                self._safely(self._send_new)
        finally:
            self._queue.close(max(0.0, deadline - time.monotonic()))

    def _safely(self, work: Callable[[], object]) -> None:
        try:
            work()
        except (OSError, UploadError, ValueError) as error:
            # Changes that were seen may not have been sent, so the next piece contains everything.
            self._is_whole_due = True
            if not self._has_failed:
                self._has_failed = True
                _log.error(
                    "cannot upload the run to %s (%s: %s). It is written here, and uploaded once this works.",
                    redact_text(self._claim.uri),
                    type(error).__name__,
                    redact_text(str(error)),
                )

    def _send(self) -> None:
        self._note_settled()
        if not self._waiting:
            self._send_new()
            self._has_failed = False

    def _send_new(self) -> None:
        self._send_objects()
        with _Opened() as opened:
            self._send_piece(opened, self._send_parts())

    def _note_settled(self) -> None:
        """Forgets settled uploads, and finds out which failed and whether another session took over."""
        ended = [one for one in self._waiting if one.done()]
        self._waiting = [one for one in self._waiting if one not in ended]
        failed = {one.remote_name for one in ended if one.state.is_failure}
        if failed:
            # Later pieces would need it, so the next one contains everything.
            self._parts = {number: path for number, path in self._parts.items() if path not in failed}
            self._is_whole_due = True
            self._due_at = max(self._due_at, self._clock() + _FAILED_SECONDS)
        if self._sign is not None:
            ended.append(self._sign)
        if self._successor is None and any(_is_forbidden(one) for one in ended):
            self._successor, self._is_whole_due = {}, True
            # The fence keeps a branch's pieces for good, so there should be few.
            self._seconds = max(self._seconds, _BRANCH_SECONDS)
            with contextlib.suppress(RunPathError):
                self._successor = self._claim.about_successor()
            _log.error(
                "the run in %s was continued by process %s on %s, since this machine seemed to be gone. What "
                "is logged here from then on is a branch: it is kept in this folder and, with the files that "
                "are uploaded, in %s there.",
                redact_text(self._claim.uri),
                self._successor.get("pid", "?"),
                self._successor.get("host", "?"),
                self._claim.fence.prefix,
            )

    def _send_sign(self) -> None:
        """Shows that this session is alive while no piece is sent because none is due or one waits."""
        self._note_settled()
        if self._successor is not None or (self._sign is not None and not self._sign.done()):
            return
        path = self._folder / f".sign.{self._rank}.tmp"
        self._signs += 1
        replace_json(path, {"signs": self._signs})
        name = self._claim.name_of(SIGN_FILE)
        sign = self._queue.submit(path, name, overwrite=True, move=True)
        self._sign = sign  # type: ignore[assignment]  # it is no folder
        self._sent_at = self._clock()

    # Files that are separate objects.

    def _add_existing(self) -> None:
        """Adds the files of records that earlier sessions haven't sent."""
        for name in record_folders() if self._rank == 0 else ():
            for path in _files_below(self._folder, name):
                size = (self._folder / path).stat().st_size
                if path not in indexes() and self._claim.there.get(path) != size:
                    self.add(path)

    def _send_objects(self) -> None:
        if not self._interval:
            self._add_existing()
        while self._new:
            with contextlib.suppress(FileNotFoundError):
                if self._submit(self._new[0]).state is UploadState.REFUSED:
                    # The spool is full. Try again at the next interval.
                    break
            self._new.popleft()

    def _send_parts(self) -> "list[UploadHandle]":
        """Sends newly closed parts, whose names no other session uses."""
        folder = parts_path(self._folder / self._csv)
        handles = []
        for number in part_numbers(folder):
            if number in self._parts:
                continue
            part = Part.find(folder, number)
            if part is None:
                continue
            path = part.path.relative_to(self._folder).as_posix()
            if path not in self._claim.there:
                handles.append(self._submit(path))
            self._parts[number] = path
        return handles

    def _submit(self, path: str) -> "UploadHandle":
        """Submits a file under its path, without copying it if the spool is on the same disk."""
        submit = functools.partial(self._queue.submit, self._folder / path, path, overwrite=True)
        try:
            return submit(link=True)  # type: ignore[return-value]  # it is no folder
        except ValueError:
            # The spool is on another disk.
            return submit()  # type: ignore[return-value]  # as above

    # Pieces.

    def _send_piece(self, opened: "_Opened", parts: "list[UploadHandle]") -> None:
        """Sends the piece of this interval, and a merged one if it completes a group."""
        states = self._states()
        for size in _group_sizes(self._interval):
            self._starts[size] = self._interval + 1, states
        self._interval += 1
        group = max(_group_sizes(self._interval), default=0)
        if self._is_whole_due:
            self._starts = dict.fromkeys(self._starts, (1, {}))
            begins: list[tuple[int, dict[str, FileState]]] = [(1, {})]
        else:
            begins = [(self._interval, states), *([self._starts[group]] if group else [])]
        self._look(opened, with_all=group > 0 or self._is_whole_due)
        now = self._states()
        self._waiting = [*parts]
        covered: list[tuple[int, int]] = []
        for first, start in begins:
            piece = self._piece(first, now)
            self._waiting.append(self._put(piece, opened.changes(start, now), parts))
            covered = [one for one in self._pieces if one[0] >= first]
            self._pieces = [one for one in self._pieces if one[0] < first] + [(first, self._interval)]
        if group or self._is_whole_due:
            self._delete([self._claim.name_of(piece_name(*one)) for one in covered], self._waiting[-1])
        self._is_whole_due = False

    def _piece(self, first: int, files: dict[str, FileState]) -> Piece:
        return Piece(
            session=self._claim.session,
            first=first,
            last=self._interval,
            needs=tuple(piece_name(*one) for one in self._pieces if one[1] < first),
            files=files,
            parts=tuple(self._parts.values()),
            written_at=time.time(),
            seconds=self._seconds,
            follows=self._claim.follows,
            run=self._claim.run,
        )

    def _put(
        self, piece: Piece, changes: Iterable[Change], after: "Iterable[UploadHandle]"
    ) -> "UploadHandle":
        path = self._folder / f".piece.{self._rank}.{piece.first}-{piece.last}.tmp"
        try:
            write_piece(path, piece, changes)
            handle = self._queue.submit(
                path,
                self._claim.name_of(piece.name),
                overwrite=True,
                move=True,
                after=list(after),
                # The fence tells this session that another one took over; the name belongs to this session.
                unless=None if self._successor is None else "",
            )
            self._sent_at = self._clock()
        finally:
            path.unlink(missing_ok=True)
        return handle  # type: ignore[return-value]  # it is no folder

    def _delete(self, names: list[str], after: "UploadHandle") -> None:
        """Deletes the names of the previous call; a reader may still be using this call's names."""
        unneeded, self._unneeded = self._unneeded, names
        if unneeded and self._successor is None:
            first, *others = unneeded
            self._queue.delete(first, after=[after], then=others, may_have_pointer=False)

    # What has changed.

    def _states(self) -> dict[str, FileState]:
        return {path: sent.state for path, sent in self._sent.items()}

    def _look(self, opened: "_Opened", *, with_all: bool) -> None:
        """Updates the states of all files, which `opened` holds from now on.

        Args:
            opened: holds the files open.
            with_all: whether to include large documents that were sent recently.
        """
        # A CSV comes before its checksums, so that readers never have checksums of rows that they lack.
        there = sorted(self._paths())
        if self._sent and not there:
            # Otherwise the store would drop its files too.
            raise FileNotFoundError(errno.ENOENT, "the run folder was deleted")
        for path in self._sent.keys() - set(there):
            del self._sent[path]
        for path in there:
            with contextlib.suppress(FileNotFoundError):
                self._note(path, opened.open(path, self._folder), with_all=with_all)

    def _paths(self) -> Iterator[str]:
        """Yields the paths of the files for pieces: rows, documents, and indexes of this rank."""
        for folder in ("", TIME_FOLDER, _FLIGHT_FOLDER, SESSIONS_FOLDER):
            for path in _files_in(self._folder, folder):
                if _rank_of(path) == self._rank and path != HEARTBEAT:
                    yield path
        if self._rank == 0:
            for path in indexes():
                if "/" in path and (self._folder / path).is_file():
                    yield path

    def _note(self, path: str, fd: int, *, with_all: bool) -> None:
        about, known = os.fstat(fd), self._sent.get(path)
        identity, has_lines = (about.st_dev, about.st_ino), path.endswith(LINES)
        size = end_of_last_line(fd, about.st_size) if has_lines else about.st_size
        if size > _MOST_BYTES:
            return
        version = 0
        if known is not None:
            is_same = known.identity == identity
            if is_same and (known.changed, known.state.size) == (about.st_mtime_ns, size):
                return
            is_longer = is_same and has_lines and size >= known.state.size
            is_appended = is_longer and _tail(fd, known.state.size) == known.tail
            is_early = self._interval < known.interval + _INTERVALS_OF_A_LARGE_ONE
            if not (is_appended or with_all or has_lines) and size > _LARGE_DOCUMENT and is_early:
                return
            version = known.state.version + (not is_appended)
        state = FileState(version, size)
        self._sent[path] = _Sent(identity, about.st_mtime_ns, state, _tail(fd, size), self._interval)

    # The end.

    def _end(self) -> None:
        """Uploads every file under its own path, then a last piece that says so and needs no other."""
        self._send_objects()
        handles = self._send_parts()
        with _Opened() as opened:
            self._interval += 1
            self._look(opened, with_all=True)
            now = self._states()
            # Sends the open files up to the size that was seen, because the time ledger is still being
            # written.
            copies = [self._submit_copy(path, opened.fds[path], state.size) for path, state in now.items()]
            handles += [handle for handle, _ in copies]
            # With the documents in the piece, a reader of many runs needs one request per run.
            documents = [
                Change(path, opened.fds[path], 0, state)
                for path, state in now.items()
                if state.size <= _LARGE_DOCUMENT and not path.endswith(".csv")
            ]
            earlier, self._pieces = self._pieces, []
            plain = {path: crc32 for path, (_, crc32) in zip(now, copies, strict=True)}
            piece = attrs.evolve(self._piece(self._interval, now), plain=plain)
            last = self._put(piece, documents, handles)
        self._waiting = [*self._waiting, last]
        self._unneeded += [self._claim.name_of(piece_name(*one)) for one in earlier]
        self._delete([], last)

    def _submit_copy(self, path: str, fd: int, size: int) -> "tuple[UploadHandle, int]":
        """Submits the first `size` bytes of an open file under its path; also returns their checksum."""
        copy = self._folder / f".last.{self._rank}.tmp"
        crc32 = at = 0
        with copy.open("wb") as file:
            while chunk := os.pread(fd, min(_COPY_BYTES, size - at), at):
                file.write(chunk)
                crc32 = zlib.crc32(chunk, crc32)
                at += len(chunk)
        handle = self._queue.submit(copy, path, overwrite=True, move=True)
        return handle, crc32  # type: ignore[return-value]  # it is no folder


class _Opened(contextlib.ExitStack):
    """The files of one look, held open so that the measured bytes are sent."""

    def __init__(self) -> None:
        super().__init__()
        self.fds: dict[str, int] = {}

    def open(self, path: str, folder: Path) -> int:
        """Opens a file, and holds it."""
        fd = self.fds[path] = open_regular(folder / path)
        self.callback(os.close, fd)
        return fd

    def changes(self, before: dict[str, FileState], now: dict[str, FileState]) -> Iterator[Change]:
        """Yields the changes between two states of the folder."""
        for path, state in now.items():
            known = before.get(path)
            if known != state:
                is_appended = known is not None and known.version == state.version
                yield Change(path, self.fds[path], known.size if known and is_appended else 0, state)


def _is_forbidden(handle: "UploadHandle") -> bool:
    """Returns whether an upload wasn't sent because another session took over, not because of newer bytes."""
    return handle.state is UploadState.SUPERSEDED and handle.result(timeout_seconds=0).superseded_by is None


def _group_sizes(interval: int) -> list[int]:
    """Returns the sizes of the groups that end with an interval; all sizes for interval 0."""
    return [size for size in (_FAN_OUT**power for power in range(1, 9)) if interval % size == 0]


def _rank_of(path: str) -> int:
    """Returns the rank that writes a file; rank 0 for a file without a number."""
    if path.startswith(f"{SESSIONS_FOLDER}/"):
        # Named by ids, which may consist of digits only.
        return 0
    found = (_OF_RANK_BELOW if "/" in path else _OF_RANK).search(path)
    return int(found[1]) if found else 0


def _files_in(folder: Path, name: str) -> Iterator[str]:
    """Yields the paths of the regular, visible files in a folder."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder / name) as found:
        for one in found:
            if not one.name.startswith(".") and one.is_file(follow_symlinks=False):
                yield f"{name}/{one.name}" if name else one.name


def _files_below(folder: Path, name: str) -> Iterator[str]:
    """Yields the paths of the regular, visible files in a folder and its subfolders."""
    for parent, folders, names in os.walk(folder / name):
        folders[:] = [one for one in folders if not one.startswith(".")]
        for leaf in names:
            path = Path(parent, leaf)
            if not leaf.startswith(".") and not path.is_symlink():
                yield path.relative_to(folder).as_posix()


def _tail(fd: int, end: int) -> int:
    """Returns the checksum of the bytes before an offset, to detect changes."""
    start = max(0, end - _TAIL_BYTES)
    return zlib.crc32(os.pread(fd, end - start, start))
