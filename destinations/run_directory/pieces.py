"""Pieces: what is new in a run folder, as one immutable zip file, and how pieces become a folder again.

A run that lives in a store is kept there as pieces while it is written; docs/format.md describes them. The
writer and the reader of a piece are both here. Neither numpy nor torch is imported.
"""

import contextlib
import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

import attrs

from destinations.history.sums import is_of_sums
from destinations.kinds.line import path_inside
from uploads.disk import mark_unreadable, read_json, replace_json, replacement

from .layout import JOURNAL_FOLDER, PIECES_STATE, strict_json

__all__ = [
    "LINES",
    "Change",
    "FileState",
    "FolderState",
    "OpenPiece",
    "Piece",
    "PieceError",
    "apply_piece",
    "numbers_of",
    "open_piece",
    "piece_name",
    "place_inside",
    "write_piece",
]

_ABOUT = "piece.json"
_FORMAT = 1
_FILES = "files/"
LINES = (".csv", ".jsonl")
"""How the names of files end that grow by whole lines."""
# In the place of the number of skipped bytes: none are added any more.
_ENDED = -1
_READ_BYTES = 1 << 20
_MAX_MEMBERS = 10_000
_MAX_ABOUT_BYTES = 16 << 20
_MAX_PIECE_BYTES = 1 << 30
_MAX_CONTENT_BYTES = 4 << 30
# What is not encrypted may say that it is.
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)
_NAME = re.compile(r"(\d{8,})-(\d{8,})\.zip")


class PieceError(ValueError):
    """A piece is damaged, of a newer format, or does not continue what is there."""


@attrs.frozen(order=True)
class FileState:
    """A file at one moment.

    Attributes:
        version: counts how often the file was replaced, rather than appended to.
        size: in bytes.
    """

    version: int
    size: int


@attrs.frozen(kw_only=True)
class Piece:
    """What a piece says of itself.

    Attributes:
        session: its session, counted from 1.
        first: the number of the first interval that it covers.
        last: the number of the last one.
        needs: the file names of the earlier pieces that make the whole folder together with this one, in
            order; none where this one has everything.
        files: each file that pieces hold, at the end of `last`, by its path.
        parts: the paths of the closed parts, which are objects of their own, and there before the piece.
        plain: once the run has ended, the files that are objects of their own now: their CRC-32 by path.
        written_at: by the clock of the writer, in seconds since 1970.
        seconds: the interval at which pieces come.
        follows: the last interval that the run continues of each earlier session, by its number; for sessions
            of the same folder, a number beyond all intervals.
        run: what tells the run from others that are or were in the store under its name.
    """

    session: int
    first: int
    last: int
    needs: tuple[str, ...] = ()
    files: Mapping[str, FileState] = attrs.field(factory=dict)
    parts: tuple[str, ...] = ()
    plain: Mapping[str, int] | None = None
    written_at: float = 0.0
    seconds: float = 10.0
    follows: Mapping[str, int] = attrs.field(factory=dict)
    run: str = ""

    @property
    def name(self) -> str:
        """The name of the file of the piece."""
        return piece_name(self.first, self.last)

    @property
    def has_ended(self) -> bool:
        """Whether it is the last one of its session, which closed the run."""
        return self.plain is not None


def piece_name(first: int, last: int) -> str:
    """Returns the name of the file of a piece that covers some intervals."""
    return f"{first:08d}-{last:08d}.zip"


def numbers_of(name: str) -> tuple[int, int] | None:
    """Returns the first and last interval of a piece by the name of its file; None for other names."""
    found = _NAME.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2]))


# Writing.


@attrs.frozen
class Change:
    """The bytes of a file that a piece brings: those from `start` on, up to the size of `state`.

    Attributes:
        path: in the folder of the run.
        fd: the file, held open by the caller.
        start: 0 where the file is new or was replaced.
        state: the file at the end of the piece.
    """

    path: str
    fd: int
    start: int
    state: FileState


def write_piece(target: Path, piece: Piece, changes: Iterable[Change]) -> None:
    """Writes the file of a piece, which takes the name at the end; not synced.

    Raises:
        OSError: it could not be written, or a file is shorter than its state.
    """
    data: dict[str, list[int]] = {}
    with (
        replacement(target) as fd,
        os.fdopen(os.dup(fd), "wb") as raw,
        # Rows of numbers shrink to less than half at the cheapest level; a better one takes thrice as long.
        zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
    ):
        for change in changes:
            data[change.path] = [change.start, change.state.size]
            with archive.open(_FILES + change.path, "w", force_zip64=True) as member:
                _copy_range(change, member)
        archive.writestr(_ABOUT, _encoded(piece, data))


def _copy_range(change: Change, member: IO[bytes]) -> None:
    at, end = change.start, change.state.size
    while at < end:
        chunk = os.pread(change.fd, min(_READ_BYTES, end - at), at)
        if not chunk:
            raise OSError(f"{change.path} has {at} bytes, expected {end}: it was cut while it was sent")
        member.write(chunk)
        at += len(chunk)


def _encoded(piece: Piece, data: Mapping[str, list[int]]) -> str:
    fields = attrs.asdict(piece, recurse=False)
    fields["files"] = {path: [state.version, state.size] for path, state in piece.files.items()}
    return strict_json({"format": _FORMAT, **fields, "data": data})


# Reading.


@attrs.frozen
class OpenPiece:
    """A piece that was opened: what it says, and its bytes.

    Attributes:
        about: what it says of itself.
        data: start and end of the bytes that it brings, by path.
    """

    about: Piece
    data: Mapping[str, tuple[int, int]]
    _archive: zipfile.ZipFile

    def chunks(self, path: str, skip: int) -> Iterator[bytes]:
        """Yields the bytes of a file, without the first ones.

        Raises:
            PieceError: they are damaged, or not as many as the piece says.
        """
        start, end = self.data[path]
        left = end - start
        try:
            with self._archive.open(_FILES + path) as member:
                while left > 0 and (chunk := member.read(min(_READ_BYTES, left))):
                    left -= len(chunk)
                    if skip < len(chunk):
                        yield chunk[skip:]
                    skip = max(0, skip - len(chunk))
                # Reads the end too, where the checksum is compared.
                if left or member.read(1):
                    raise PieceError(f"{path} has another size than the piece says")
        except (KeyError, OSError, *_DAMAGED) as error:
            raise PieceError(f"the bytes of {path} are damaged: {error}") from error


@contextlib.contextmanager
def open_piece(name: str, raw: IO[bytes]) -> Iterator[OpenPiece]:
    """Opens a piece.

    Args:
        name: what it is called in messages.
        raw: its bytes; a file that can be sought in.

    Raises:
        PieceError: it is damaged, too large, or of a newer format.
    """
    if raw.seek(0, os.SEEK_END) > _MAX_PIECE_BYTES:
        raise PieceError(f"a piece has at most {_MAX_PIECE_BYTES >> 20} MiB")
    with contextlib.ExitStack() as opened:
        try:
            archive = opened.enter_context(zipfile.ZipFile(raw))
            found = OpenPiece(*_parsed(archive), archive)
        except (OSError, *_DAMAGED) as error:
            raise PieceError(f"{name} is damaged: {error}") from error
        yield found


def _parsed(archive: zipfile.ZipFile) -> tuple[Piece, dict[str, tuple[int, int]]]:
    members = archive.infolist()
    if len(members) > _MAX_MEMBERS or sum(one.file_size for one in members) > _MAX_CONTENT_BYTES:
        raise PieceError("a piece holds too much")
    try:
        about = archive.getinfo(_ABOUT)
        if about.file_size > _MAX_ABOUT_BYTES:
            raise PieceError("what a piece says of itself is too long")
        fields = json.loads(archive.read(about))
        if fields.pop("format") != _FORMAT:
            raise PieceError("a piece is of a newer format: read it with the release that wrote it")
        fields["follows"] = {str(one): int(last) for one, last in fields.get("follows", {}).items()}
        data = {str(path): (int(start), int(end)) for path, (start, end) in fields.pop("data").items()}
        fields["files"] = {str(path): FileState(*map(int, state)) for path, state in fields["files"].items()}
        for name in ("needs", "parts"):
            fields[name] = tuple(map(str, fields[name]))
        known = {field.name: fields[field.name] for field in attrs.fields(Piece) if field.name in fields}
        piece = Piece(**known)
        if not all(0 <= start <= end for start, end in data.values()) or piece.first > piece.last:
            raise PieceError("a piece says what cannot be")
        if piece.plain is not None:
            piece = attrs.evolve(piece, plain={str(path): int(crc) for path, crc in piece.plain.items()})
        if not all(numbers_of(name) for name in piece.needs):
            raise PieceError("a piece needs what is none")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise (
            error if isinstance(error, PieceError) else PieceError(f"a piece is not readable: {error}")
        ) from error
    return piece, data


@attrs.define
class FolderState:
    """What a folder has of the pieces of a session; saved in the folder, as `.pieces.json`.

    Attributes:
        session: 0 for none.
        last: the number of the last interval.
        has_ended: whether that closed the run.
        files: the files that pieces hold, by path.
        lost: the pieces and files that are lost or damaged in the store, each with the reason.
        skipped: how many bytes of lost pieces a file lacks, by path; `_ENDED` where it ends before them.
        run: as the pieces say.
        version: of the newest piece that a listing told of; empty where pieces came since.
    """

    session: int = 0
    last: int = 0
    has_ended: bool = False
    files: dict[str, FileState] = attrs.field(factory=dict)
    lost: dict[str, str] = attrs.field(factory=dict)
    skipped: dict[str, int] = attrs.field(factory=dict)
    run: str = ""
    version: str | None = ""

    @classmethod
    def read(cls, folder: Path, stream: str) -> "FolderState":
        """Returns what was saved for a stream; nothing if that is damaged."""
        try:
            found = read_json(folder / PIECES_STATE)[stream]
            files = {str(path): FileState(*map(int, state)) for path, state in found["files"].items()}
            lost = {str(name): str(reason) for name, reason in found.get("lost", {}).items()}
            skipped = {str(path): int(count) for path, count in found.get("skipped", {}).items()}
            has_ended, own = found["has_ended"] is True, (found.get("run", ""), found.get("version", ""))
            return cls(int(found["session"]), int(found["last"]), has_ended, files, lost, skipped, *own)
        except (KeyError, TypeError, ValueError, AttributeError):
            return cls()

    @classmethod
    def all_lost(cls, folder: str | Path) -> dict[str, str]:
        """Returns what is lost of all streams; nothing for a folder that is not made from pieces."""
        streams = read_json(f"{folder}/{PIECES_STATE}")
        return {name: why for stream in streams for name, why in cls.read(Path(folder), stream).lost.items()}

    def save(self, folder: Path, stream: str) -> None:
        """Saves it."""
        own = {
            "session": self.session,
            "last": self.last,
            "has_ended": self.has_ended,
            "files": {path: [state.version, state.size] for path, state in self.files.items()},
            "lost": self.lost,
            "skipped": self.skipped,
            "run": self.run,
            "version": self.version,
        }
        replace_json(folder / PIECES_STATE, {**read_json(folder / PIECES_STATE), stream: own})


def apply_piece(folder: Path, state: FolderState, piece: OpenPiece) -> None:
    """Brings a folder to the state of a piece; `state` is changed, and not saved.

    A piece that begins within what is there already continues it; applied again, it changes nothing. Files
    that are appended to keep their inode. Where earlier pieces are lost (`FolderState.lost`), rows end before
    them, an index lacks their lines, and a document that they brought is unreadable.

    Raises:
        PieceError: it does not continue what is there, or is damaged: begin again from nothing.
        OSError: the folder cannot be written.
    """
    about = piece.about
    if (about.session, about.run) != (state.session, state.run) or about.first > state.last + 1:
        raise PieceError(
            f"piece {about.name} does not continue interval {state.last} of session {state.session}"
        )
    for path in _in_order(folder, state, piece):
        start, end = piece.data[path]
        wanted = about.files.get(path)
        if wanted is None or wanted.size != end:
            raise PieceError(f"piece {about.name} brings bytes of {path} that its file has not")
        target, known = place_inside(folder, path), state.files.get(path)
        if known is None or known < wanted:
            _apply_file(target, state, wanted, start, piece.chunks, path)
            state.files[path] = wanted
    for path in [path for path in state.files if path not in about.files]:
        place_inside(folder, path).unlink(missing_ok=True)
        del state.files[path]
        state.skipped.pop(path, None)
    if about.last >= state.last and not about.has_ended and dict(about.files) != state.files:
        if not state.lost:
            raise PieceError(f"piece {about.name} lacks bytes of files that it names")
        for path, wanted in about.files.items():
            _skip(place_inside(folder, path), state, wanted, wanted.size, path)
    if about.last >= state.last:
        state.last, state.has_ended = about.last, about.has_ended


def _in_order(folder: Path, state: FolderState, piece: OpenPiece) -> list[str]:
    """Returns the files of a piece, checksums last; removes checksums that it replaces.

    So a reader of the folder never compares rows with the checksums of others.
    """
    paths = sorted(piece.data, key=is_of_sums)
    for path in filter(is_of_sums, paths):
        if piece.data[path][0] == 0 and state.files.get(path) != piece.about.files.get(path):
            place_inside(folder, path).unlink(missing_ok=True)
    return paths


def place_inside(folder: Path, path: str) -> Path:
    """Returns the place of a file that a piece names.

    Raises:
        PieceError: no file of a run is there: outside the folder, hidden, or in the journal.
    """
    if path.startswith(f"{JOURNAL_FOLDER}/") or any(part.startswith(".") for part in path.split("/")):
        raise PieceError(f"a piece names the file {path!r}, which is none of a run")
    try:
        return path_inside(folder, path)
    except ValueError as error:
        raise PieceError(f"a piece names the file {path!r}: {error}") from error


def _apply_file(
    target: Path,
    state: FolderState,
    wanted: FileState,
    start: int,
    chunks: Callable[[str, int], Iterator[bytes]],
    path: str,
) -> None:
    known = state.files.get(path)
    if start == 0 and (path in state.skipped or known is None or known.version != wanted.version):
        state.skipped.pop(path, None)
        with replacement(target) as fd, os.fdopen(os.dup(fd), "wb") as file:
            file.writelines(chunks(path, 0))
        return
    if state.lost:
        _skip(target, state, wanted, start, path)
    known = state.files.get(path)
    if known is None or known.version != wanted.version or start > known.size:
        raise PieceError(f"the beginning of {path} is missing")
    if (skipped := state.skipped.get(path, 0)) != _ENDED:
        _append(target, known.size - skipped, chunks(path, known.size - start))


def _skip(target: Path, state: FolderState, wanted: FileState, start: int, path: str) -> None:
    """Notes that the bytes of a file up to `start` are lost, as far as they are not there."""
    known = state.files.get(path)
    if known is not None and known.version == wanted.version:
        if start > known.size and state.skipped.get(path) != _ENDED:
            # Each line of an index stands by itself; rows after a hole would seem to follow those before it.
            is_index = path.endswith(".jsonl")
            state.skipped[path] = state.skipped.get(path, 0) + start - known.size if is_index else _ENDED
    else:
        state.skipped[path] = _ENDED
        # Lines stay as they were before they were written anew; a document is another one by now.
        if known is None or not path.endswith(LINES):
            mark_unreadable(target, f"it is lost: {next(iter(state.lost.values()))}")
    if known is None or known < FileState(wanted.version, start):
        state.files[path] = FileState(wanted.version, start)


def _append(target: Path, at: int, chunks: Iterable[bytes]) -> None:
    fd = os.open(target, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(fd, "r+b", buffering=0) as file:
        if os.fstat(fd).st_size < at:
            raise PieceError(f"{target.name} is shorter than it was")
        # A process that ended here may have written more than it noted.
        file.truncate(at)
        end = at
        try:
            for chunk in chunks:
                end += os.pwrite(fd, chunk, end)
        except PieceError:
            file.truncate(at)
            raise
