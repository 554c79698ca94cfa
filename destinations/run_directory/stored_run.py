"""`StoredRun`: a run in a store, as pieces and objects, and how they become a folder.

Below the name of a run, `live/rank0/0004/` has the session of its fourth writer: `session.json`, which is put
first and only once, and the pieces (`pieces`). All other objects are plain files of the run. Only the newest
session that has pieces is read, so a superseded writer can't change the run.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import attrs

from destinations.kinds import record_folders
from events import redact_text
from uploads import RemoteObject, Store, UploadError, download_file
from uploads.disk import closing, crc32_of, mark_unreadable, open_regular

from .layout import SIDECAR, SUMMARY, WRITERS_FOLDER, metrics_name, parts_path, strict_json
from .pieces import (
    FolderState,
    OpenPiece,
    Piece,
    PieceError,
    apply_piece,
    numbers_of,
    open_piece,
    piece_name,
    place_inside,
)

__all__ = [
    "LIVE_FOLDER",
    "SESSION_FILE",
    "SIGN_FILE",
    "SUCCESSOR_FILE",
    "StoredRun",
    "StoredSession",
    "live_place",
    "session_folder",
    "session_text",
    "stream_of",
]

_log = logging.getLogger("destinations")

LIVE_FOLDER = "live"
SESSION_FILE = "session.json"
SIGN_FILE = "sign.json"
SUCCESSOR_FILE = "successor.json"
_TRIES = 3
# These contain everything that a table of runs shows.
_LISTED = {SIDECAR, SUMMARY}
_MAX_SESSION_BYTES = 1 << 20
_IN_MEMORY_BYTES = 4 << 20
_LIVE = re.compile(rf"{LIVE_FOLDER}/([^/]+)/(\d{{4,}})/([^/]+)")


def stream_of(rank: int) -> str:
    """Returns the name of a rank's stream."""
    return f"rank{rank}"


def session_folder(stream: str, session: int) -> str:
    """Returns the folder of a session, below the name of its run."""
    return f"{LIVE_FOLDER}/{stream}/{session:04d}"


def live_place(name: str) -> str | None:
    """Returns the prefix of a run's names, given the name of a session's object; None for other objects."""
    found = re.search(rf"(^|/){_LIVE.pattern}$", name)
    return None if found is None else name[: found.start()] + found[1]


def session_text(about: Mapping[str, Any]) -> bytes:
    """Returns the content of a `session.json`, with a checksum, since a store may not compare any."""
    return strict_json({**about, "crc32": _crc32_of_about(about)}, indent=2).encode()


def _crc32_of_about(about: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(about, sort_keys=True, separators=(",", ":")).encode())


@attrs.define
class StoredSession:
    """A session, as its objects describe it.

    Attributes:
        number: its number, from 1.
        pieces: first and last interval of each piece, in order.
        is_over: whether it has its `successor.json`.
        moved: the names of files that it sent after its successor began, each a quoted path.
        versions: the version of each piece, by name.
    """

    number: int
    pieces: list[tuple[int, int]] = attrs.field(factory=list)
    is_over: bool = False
    moved: set[str] = attrs.field(factory=set)
    versions: dict[str, str | None] = attrs.field(factory=dict)

    @property
    def newest_piece(self) -> str:
        """The name of the newest piece: the one that covers the fewest intervals of those that end last."""
        last = self.last
        return piece_name(max(first for first, end in self.pieces if end == last), last)

    @property
    def last(self) -> int:
        """The last interval; 0 if there is none."""
        return max((last for _, last in self.pieces), default=0)


class _GoneError(Exception):
    """A piece no longer exists."""


class _LostBytesError(PieceError):
    """An earlier piece or a plain file, once complete, is lost or damaged."""


class StoredRun:
    """One stream of a run in a store, and the folder that is made from it.

    **Threading.** One thread at a time.

    **Blocking.** Every method asks the store, and raises `UploadError` if it doesn't respond.

    Args:
        store: the store that has the run.
        prefix: the prefix of its object names: empty, or ending with a slash.
        folder: the folder for its files.
        stream: the stream to read, see `stream_of`.
    """

    def __init__(self, store: Store, prefix: str, folder: Path, stream: str = stream_of(0)) -> None:
        self._store = store
        self.prefix = prefix
        self.folder = folder
        self.stream = stream
        self.sessions: dict[int, StoredSession] = {}
        self.newest: Piece | None = None
        """The description of the newest piece that was read; None before the first."""
        # Whether to go without objects that are lost, and whether this is the last try to read them.
        self._is_partial = self._is_last_try = False
        # The newest pieces that are damaged, with the reason.
        self._damaged: dict[str, str] = {}

    # What there is.

    def look(self, listed: Iterable[RemoteObject] | None = None) -> list[RemoteObject]:
        """Finds out which sessions and pieces there are.

        Args:
            listed: the objects of the run, if known.

        Returns:
            The objects that are plain files, with their names relative to the run.
        """
        listed = self._store.list(self.prefix) if listed is None else listed
        self.sessions, plain = {}, []
        for one in listed:
            name = one.name.removeprefix(self.prefix)
            found = _LIVE.fullmatch(name)
            if found is None:
                plain.append(attrs.evolve(one, name=name))
            elif found[1] == self.stream:
                session = self.sessions.setdefault(int(found[2]), StoredSession(int(found[2])))
                if numbers := numbers_of(found[3]):
                    session.pieces.append(numbers)
                    session.versions[found[3]] = one.version
                elif not found[3].endswith(".json"):
                    session.moved.add(found[3])
                session.is_over |= found[3] == SUCCESSOR_FILE
        return plain

    @property
    def newest_session(self) -> StoredSession | None:
        """The most recently claimed session."""
        return self.sessions[max(self.sessions)] if self.sessions else None

    @property
    def read_session(self) -> StoredSession | None:
        """The newest session that has pieces, which is the one to read."""
        return next(
            (self.sessions[one] for one in sorted(self.sessions, reverse=True) if self.sessions[one].pieces),
            None,
        )

    def branches(self) -> "list[StoredRun]":
        """Returns, as runs, the sessions that kept writing after another machine had continued the run.

        Their folders are below the run's folder, with the same names as in the store. Call `fetch` first.
        """
        found: list[StoredRun] = []
        if (newest := self.newest) is None:
            return found
        for number, session in self.sessions.items():
            is_left = session.is_over and number < newest.session
            if is_left and session.last > newest.follows.get(str(number), 0):
                folder = self.folder / session_folder(self.stream, number)
                branch = StoredRun(self._store, self.prefix, folder, self.stream)
                branch.sessions = {number: session}
                found.append(branch)
        return found

    @property
    def place(self) -> str:
        """The name of the run for messages."""
        return self.prefix.rstrip("/") or self._store.uri()

    def name_of(self, session: int, name: str) -> str:
        """Returns the name of a session's object, relative to the run."""
        return f"{session_folder(self.stream, session)}/{name}"

    def about_session(self, session: int, name: str = SESSION_FILE) -> dict[str, Any]:
        """Returns the content of a session's JSON object, or {} if it is missing or damaged."""
        with contextlib.suppress(FileNotFoundError, ValueError, RecursionError):
            found = json.loads(self._read(self.name_of(session, name), _MAX_SESSION_BYTES))
            if isinstance(found, dict) and found.pop("crc32", None) == _crc32_of_about(found):
                return found
        return {}

    def peek(self) -> Piece | None:
        """Returns the newest piece's description, or None if it is missing or damaged. Call `look` first."""
        session = self.read_session
        if session is None:
            return None
        with contextlib.suppress(PieceError), self._piece(session.number, session.newest_piece) as piece:
            return None if piece is None else piece.about
        return None

    # Reading.

    def fetch(self, *, with_plain: bool = True, is_partial: bool = False) -> Piece | None:
        """Brings the files from pieces, and the closed parts, to the newest state. Call `look` first.

        On its way to a store that compares no checksums, the newest piece may be damaged until it is put
        again. The result is then the state of the pieces before it.

        Args:
            with_plain: whether to fetch everything of a run that has ended, and not only what a table of runs
                shows.
            is_partial: whether to go without files, and without pieces from the first one on, that are still
                lost or damaged in the store after another try. `FolderState.lost` names them.

        Returns:
            The description of the newest piece, or None if there is none.

        Raises:
            UploadError: the store doesn't respond, or pieces kept vanishing.
            PieceError: pieces are damaged.
            OSError: the folder can't be written.
        """
        failure: Exception | None = None
        self._is_partial, self._damaged = is_partial, {}
        for attempt in range(_TRIES):
            session = self.read_session
            if session is None:
                break
            self._is_last_try = attempt == _TRIES - 1
            try:
                self.newest = self._fetch(session, with_plain=with_plain)
            except _GoneError:
                # A merged piece has replaced it since the look.
                failure = PieceError("pieces kept being replaced by others while they were read")
                self.look()
            except PieceError as error:
                if failure is not None:
                    # It wasn't just one bad response.
                    FolderState(session.number).save(self.folder, self.stream)
                    if not isinstance(error, _LostBytesError):
                        _log.warning("%s: the newest piece is left out: %s", redact_text(self.place), error)
                        self._damaged[self.name_of(session.number, session.newest_piece)] = str(error)
                        session.pieces = [one for one in session.pieces if one[1] < session.last]
                failure = error
            else:
                return self.newest
        if failure is not None:
            raise failure
        return None

    def poll(self) -> Piece | None:
        """Asks for the next piece and brings the folder to its state; returns None if it doesn't exist yet.

        Raises:
            UploadError: see `fetch`.
            PieceError: the piece is damaged.
        """
        state = FolderState.read(self.folder, self.stream)
        name = piece_name(state.last + 1, state.last + 1)
        with self._piece(state.session, name) as piece:
            if piece is None:
                return None
            state.version = ""
            self._apply(state, piece, with_plain=True)
            self.newest = piece.about
            return piece.about

    def _fetch(self, session: StoredSession, *, with_plain: bool) -> Piece:
        state = FolderState.read(self.folder, self.stream)
        before, known = dict(state.files), state.session
        with self._piece(session.number, session.newest_piece) as piece:
            if piece is None:
                raise _GoneError
            about = piece.about
            if state.session and state.run != about.run:
                self._forget(before)
                before.clear()
            if (state.session, state.run) != (session.number, about.run) or state.lost:
                # Lost objects may have been put again.
                state = FolderState(session.number, run=about.run)
            state.lost |= self._damaged
            state.version = session.versions.get(about.name)
            for name in about.needs:
                _, end = numbers_of(name) or (0, 0)
                if end <= state.last:
                    continue
                try:
                    self._apply_earlier(session.number, name, state)
                except (_GoneError, _LostBytesError) as error:
                    if not (self._is_partial and self._is_last_try):
                        raise
                    state.lost[self.name_of(session.number, name)] = str(error) or f"{name} is gone"
                    self._take_parts(state, about, with_plain=with_plain)
                    state.save(self.folder, self.stream)
                    break
                if state.session == known or not before:
                    # If interrupted, the next attempt resumes here.
                    state.save(self.folder, self.stream)
            else:
                self._apply(state, piece, with_plain=with_plain)
        self._remove(before.keys() - about.files.keys())
        return about

    def _remove(self, paths: Iterable[str]) -> None:
        for path in paths:
            with contextlib.suppress(PieceError):
                place_inside(self.folder, path).unlink(missing_ok=True)

    def _forget(self, files: Iterable[str]) -> None:
        """Removes these files, parts, and media of another run, which was deleted and begun anew."""
        self._remove(files)
        _, _, rank = self.stream.partition("rank")
        names = [parts_path(Path(metrics_name(int(rank))))]
        if self.stream == stream_of(0):
            names += [Path(name) for name in (*record_folders(), LIVE_FOLDER, WRITERS_FOLDER)]
        for name in names:
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def _apply_earlier(self, session: int, name: str, state: FolderState) -> None:
        try:
            with self._piece(session, name) as earlier:
                if earlier is None:
                    raise _GoneError
                apply_piece(self.folder, state, earlier)
        except PieceError as error:
            raise _LostBytesError(str(error)) from error

    def _apply(self, state: FolderState, piece: OpenPiece, *, with_plain: bool) -> None:
        """Fetches the parts that a piece names, then applies the piece."""
        about = piece.about
        self._take_parts(state, about, with_plain=with_plain)
        if about.has_ended and not about.needs:
            # It has everything, or names the objects that have it.
            state.last = max(state.last, about.first - 1)
        if about.has_ended and not with_plain:
            listed = {path: span for path, span in piece.data.items() if path in _LISTED}
            piece = attrs.evolve(piece, data=listed)
        # Fetched before the piece is applied, which may contain the checksums of these rows.
        for path, crc32 in (about.plain or {}).items():
            if state.files.get(path) == about.files.get(path):
                continue
            if with_plain:
                self._take(path, crc32, state)
                state.files[path] = about.files[path]
            else:
                # Earlier rows would be mistaken for all of them.
                state.files.pop(path, None)
                # Hardly ever there, and a check of each path takes a tenth of a cold listing.
                if os.path.lexists(f"{self.folder}/{path}"):
                    place_inside(self.folder, path).unlink(missing_ok=True)
        apply_piece(self.folder, state, piece)
        state.save(self.folder, self.stream)

    def _take_parts(self, state: FolderState, about: Piece, *, with_plain: bool) -> None:
        for path in about.parts if with_plain or not about.has_ended else ():
            if not place_inside(self.folder, path).exists():
                self._take(path, None, state)

    def _take(self, path: str, crc32: int | None, state: FolderState) -> None:
        """Downloads a file that is an object of its own, and compares its checksum with the last piece's."""
        target = place_inside(self.folder, path)
        try:
            self.download(path)
            with closing(open_regular(target)) as fd:
                if crc32 is not None and crc32_of(fd) != crc32:
                    raise _LostBytesError(f"{path} has other bytes than the last piece says")
        except (UploadError, PieceError) as error:
            is_tried = self._is_last_try or isinstance(error, UploadError)
            if not (self._is_partial and is_tried):
                raise
            state.lost[path] = redact_text(str(error))
            mark_unreadable(target, state.lost[path])

    def download(self, path: str) -> None:
        """Downloads a plain file of the run to its place in the folder."""
        target = place_inside(self.folder, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        name, session = path, self.read_session
        if session is not None and quote(path, safe="") in session.moved:
            name = self.name_of(session.number, quote(path, safe=""))
        download_file(self.prefix + name, target, store=self._store, overwrite=True, progress_bar=False)

    @contextlib.contextmanager
    def _piece(self, session: int, name: str) -> Iterator[OpenPiece | None]:
        """Downloads and opens a piece, using a temporary file if it is large; yields None if it is gone."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.SpooledTemporaryFile(
            max_size=_IN_MEMORY_BYTES, dir=str(self.folder), prefix=".piece.", suffix=".tmp"
        ) as file:
            try:
                for chunk in self._store.get(self.prefix + self.name_of(session, name)):
                    file.write(chunk)
            except FileNotFoundError:
                yield None
                return
            with open_piece(name, file) as piece:
                yield piece

    def _read(self, name: str, most: int) -> bytes:
        data = b""
        for chunk in self._store.get(self.prefix + name):
            data += chunk
            if len(data) > most:
                raise ValueError(f"{name} is too large")
        return data
