"""Pieces: the changes of a run folder as immutable zip files, and how pieces become a folder again.

While a run in a store is being written, the store has it as pieces; the page "The format on disk" describes
them. This module writes and reads them. It imports neither numpy nor torch.
"""

import contextlib
import functools
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
from uploads.disk import read_json, replace_json, replacement

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
"""The suffixes of files that grow by whole lines."""
_READ_BYTES = 1 << 20
_MAX_MEMBERS = 10_000
_MAX_ABOUT_BYTES = 16 << 20
_MAX_PIECE_BYTES = 1 << 30
_MAX_CONTENT_BYTES = 4 << 30
# A damaged file may claim to be encrypted, which is a RuntimeError.
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)
_NAME = re.compile(r"(\d{8,})-(\d{8,})\.zip")


class PieceError(ValueError):
    """A piece is damaged, has a newer format, or doesn't continue the folder."""


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
    """The description in a piece.

    Attributes:
        session: the number of its session, from 1.
        first: the number of the first interval that it covers.
        last: the number of the last interval.
        needs: the file names of the earlier pieces that make up the whole folder together with this one, in
            order; empty if this piece has everything.
        files: each file in the pieces, as it is at the end of `last`, by path.
        parts: the paths of the closed parts, which are objects of their own and were put before the piece.
        plain: once the run has ended, the CRC-32 by path of the files that are now objects of their own.
        written_at: the time by the writer's clock, in seconds since 1970.
        seconds: the interval between pieces.
        follows: the last interval of each earlier session that the run continues, by session number; for
            sessions of the same folder, a number beyond all intervals.
        run: distinguishes the run from others that are or were in the store under its name.
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
        """The file name of the piece."""
        return piece_name(self.first, self.last)

    @property
    def has_ended(self) -> bool:
        """Whether it is the last piece of its session, which closed the run."""
        return self.plain is not None


def piece_name(first: int, last: int) -> str:
    """Returns the file name of a piece that covers these intervals."""
    return f"{first:08d}-{last:08d}.zip"


def numbers_of(name: str) -> tuple[int, int] | None:
    """Returns the first and last interval of a piece by its file name; None for other names."""
    found = _NAME.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2]))


# Writing.


@attrs.frozen
class Change:
    """The bytes of a file that a piece contains, from `start` up to the size of `state`.

    Attributes:
        path: the path in the folder of the run.
        fd: the file, held open by the caller.
        start: 0 if the file is new or was replaced.
        state: the file at the end of the piece.
    """

    path: str
    fd: int
    start: int
    state: FileState


def write_piece(target: Path, piece: Piece, changes: Iterable[Change]) -> None:
    """Writes a piece to a file, which gets its name at the end; doesn't sync it.

    Raises:
        OSError: the piece can't be written, or a file is shorter than its state.
    """
    data: dict[str, list[int]] = {}
    with (
        replacement(target) as fd,
        os.fdopen(os.dup(fd), "wb") as raw,
        # The lowest level compresses rows to less than half; a better one takes three times as long.
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
    """An open piece.

    Attributes:
        about: its description.
        data: start and end of the bytes that it contains, by path.
    """

    about: Piece
    data: Mapping[str, tuple[int, int]]
    _archive: zipfile.ZipFile

    def chunks(self, path: str, skip: int) -> Iterator[bytes]:
        """Yields the bytes of a file, except the first `skip`.

        Raises:
            PieceError: they are damaged, or their number differs from the description.
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
                # Reading to the end compares the checksum.
                if left or member.read(1):
                    raise PieceError(f"{path} has another size than the piece says")
        except (KeyError, OSError, *_DAMAGED) as error:
            raise PieceError(f"the bytes of {path} are damaged: {error}") from error


@contextlib.contextmanager
def open_piece(name: str, raw: IO[bytes]) -> Iterator[OpenPiece]:
    """Opens a piece.

    Args:
        name: the name for messages.
        raw: its bytes, a seekable file.

    Raises:
        PieceError: the piece is damaged, too large, or has a newer format.
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
    """Which pieces of a session a folder contains; saved in the folder as `.pieces.json`.

    Attributes:
        session: the number of the session; 0 for none.
        last: the number of the last interval.
        has_ended: whether the last interval closed the run.
        files: the files from pieces, by path.
        lost: what is lost or damaged in the store, each with the reason: a piece, at which reading ended, or
            files.
        run: see `Piece`.
        version: the version of the newest piece in a listing; "" if pieces have arrived since.
    """

    session: int = 0
    last: int = 0
    has_ended: bool = False
    files: dict[str, FileState] = attrs.field(factory=dict)
    lost: dict[str, str] = attrs.field(factory=dict)
    run: str = ""
    version: str | None = ""

    @classmethod
    def read(cls, folder: Path, stream: str) -> "FolderState":
        """Returns the saved state of a stream, or an empty one if it is damaged."""
        try:
            found = read_json(folder / PIECES_STATE)[stream]
            files = {str(path): FileState(*map(int, state)) for path, state in found["files"].items()}
            lost = {str(name): str(reason) for name, reason in found.get("lost", {}).items()}
            has_ended, own = found["has_ended"] is True, (found.get("run", ""), found.get("version", ""))
            return cls(int(found["session"]), int(found["last"]), has_ended, files, lost, *own)
        except (KeyError, TypeError, ValueError, AttributeError):
            return cls()

    @classmethod
    def all_lost(cls, folder: str | Path) -> dict[str, str]:
        """Returns what all streams have lost; empty for a folder that isn't made from pieces."""
        streams = read_json(f"{folder}/{PIECES_STATE}")
        return {name: why for stream in streams for name, why in cls.read(Path(folder), stream).lost.items()}

    def save(self, folder: Path, stream: str) -> None:
        """Saves it."""
        files = {path: [state.version, state.size] for path, state in self.files.items()}
        own = {**attrs.asdict(self, recurse=False), "files": files}
        replace_json(folder / PIECES_STATE, {**read_json(folder / PIECES_STATE), stream: own})


def apply_piece(folder: Path, state: FolderState, piece: OpenPiece) -> None:
    """Brings a folder to the state of a piece; updates `state` without saving it.

    A piece may overlap with the folder; applying it again changes nothing. Files that are appended to keep
    their inode.

    Raises:
        PieceError: the piece is damaged, or doesn't continue the folder; start over with an empty state.
        OSError: the folder can't be written.
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
            _apply_file(target, known, wanted, start, functools.partial(piece.chunks, path))
            state.files[path] = wanted
    for path in [path for path in state.files if path not in about.files]:
        place_inside(folder, path).unlink(missing_ok=True)
        del state.files[path]
    if about.last >= state.last and not about.has_ended and dict(about.files) != state.files:
        raise PieceError(f"piece {about.name} lacks bytes of files that it names")
    if about.last >= state.last:
        state.last, state.has_ended = about.last, about.has_ended


def _in_order(folder: Path, state: FolderState, piece: OpenPiece) -> list[str]:
    """Returns the files of a piece, checksums last, and removes checksums that it replaces.

    So a reader of the folder never compares rows with checksums of other rows.
    """
    paths = sorted(piece.data, key=is_of_sums)
    for path in filter(is_of_sums, paths):
        if piece.data[path][0] == 0 and state.files.get(path) != piece.about.files.get(path):
            place_inside(folder, path).unlink(missing_ok=True)
    return paths


def place_inside(folder: Path, path: str) -> Path:
    """Returns the path of a file that a piece names.

    Raises:
        PieceError: the path is outside the folder, hidden, or in the journal.
    """
    if path.startswith(f"{JOURNAL_FOLDER}/") or any(part.startswith(".") for part in path.split("/")):
        raise PieceError(f"a piece names the file {path!r}, which is none of a run")
    try:
        return path_inside(folder, path)
    except ValueError as error:
        raise PieceError(f"a piece names the file {path!r}: {error}") from error


def _apply_file(
    target: Path,
    known: FileState | None,
    wanted: FileState,
    start: int,
    chunks: Callable[[int], Iterator[bytes]],
) -> None:
    if start == 0 and (known is None or known.version != wanted.version):
        with replacement(target) as fd, os.fdopen(os.dup(fd), "wb") as file:
            file.writelines(chunks(0))
        return
    if known is None or known.version != wanted.version or start > known.size:
        raise PieceError(f"the beginning of {target.name} is missing")
    _append(target, known.size, chunks(known.size - start))


def _append(target: Path, at: int, chunks: Iterable[bytes]) -> None:
    fd = os.open(target, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(fd, "r+b", buffering=0) as file:
        if os.fstat(fd).st_size < at:
            raise PieceError(f"{target.name} is shorter than it was")
        # A process that was killed here may have written more than it recorded.
        file.truncate(at)
        end = at
        try:
            for chunk in chunks:
                end += os.pwrite(fd, chunk, end)
        except PieceError:
            file.truncate(at)
            raise
