"""`Claim`: which machine writes a run that lives in a store, and what a new one begins with.

Each process that writes takes a session number by putting `session.json`, which can be put only once, and
writes only below that number. Before it writes anything else, it puts `successor.json` beside the session
that it takes over from, which fences off everything that session still sends. So a claim decides which
session continues the run, but nothing is lost. A session counts as alive while its objects change; clocks,
hosts, and processes aren't consulted.
"""

import contextlib
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from destinations.kinds import indexes
from events import redact_text
from uploads import Fence, RemoteObject, Store, TransientStoreError, UploadError, open_store, put_new
from uploads.disk import read_json, replace_json

from .folder import RunInUseError, RunPathError, holds_run
from .layout import PARTS_FOLDER, writer_of
from .pieces import PieceError, piece_name
from .stored_run import (
    LIVE_FOLDER,
    SESSION_FILE,
    SUCCESSOR_FILE,
    StoredRun,
    StoredSession,
    session_folder,
    session_text,
    stream_of,
)

__all__ = ["Claim"]

_log = logging.getLogger("destinations")

_OWN = ".mirror.json"
_TRIES = 30
_FEW_TRIES = 8
# The pause between two tries doubles from the first of these up to the second.
_FIRST_PAUSE_SECONDS = 0.1
_PAUSE_SECONDS = 1.0
_ALL_INTERVALS = 1 << 53
_WATCHED_INTERVALS = 2.5
_SHORTEST_INTERVAL_SECONDS = 2.0
# A session that has sent nothing yet may still be starting its worker process.
_FIRST_SIGN_SECONDS = 10.0
# With a longer interval between pieces, a session sends a small sign in between.
_MOST_SILENT_SECONDS = 20.0


class Claim:
    """A process's claim on a run in a store.

    **Threading.** Only the thread that opens the run uses it.

    Args:
        uri: the URI of the run, without placeholders.
        rank: the rank that writes.
        seconds: the longest time between two pieces.
        wait: sleeps for a number of seconds.

    Attributes:
        session: the number of this session; 0 before `take`.
        there: by path, the sizes of the objects that were plain files of the run when it was opened.
        sign_seconds: the time within which a live session sends a sign.
        follows: see `Piece`.
        run: see `Piece`.
    """

    def __init__(
        self, uri: str, rank: int, seconds: float, wait: Callable[[float], object] = time.sleep
    ) -> None:
        self.uri = uri
        self.store: Store = open_store(uri)
        self.stream = stream_of(rank)
        self.session = 0
        self.there: dict[str, int] = {}
        self.sign_seconds = min(seconds, _MOST_SILENT_SECONDS)
        self._rank = rank
        self._seconds = seconds
        self._wait = wait
        self._run = StoredRun(self.store, "", Path(), self.stream)
        self._nonce = uuid.uuid4().hex
        self.follows: dict[str, int] = {}
        self.run = self._nonce
        # What the folder recorded about its last session; empty if the store has a newer one.
        self._own: dict[str, Any] = {}
        # The nonces of earlier sessions of this folder, whose processes have ended.
        self._nonces_here: set[object] = set()
        self._since = 0
        # The newest session and its objects, when it was found to have ended.
        self._before: tuple[int, set[tuple[object, ...]]] = 0, set()

    def prepare(self, run_dir: Path, empty: Callable[[], Path]) -> None:
        """Brings the folder to the state of the store, unless the newest session wrote that folder.

        Args:
            run_dir: the folder of the run, whose lock the caller holds.
            empty: called to set aside a folder with rows of an earlier session; returns its new path.

        Raises:
            RunInUseError: another machine is writing the run.
            RunPathError: the store can't be read.
        """
        run = self._run
        run.folder = run_dir
        plain = self._patiently(run.look)
        self.there = {one.name: one.size for one in plain}
        own = read_json(self._own_path(run_dir))
        if own.get("inode", run_dir.stat().st_ino) != run_dir.stat().st_ino:
            # This is a copy of the folder; another machine may be writing the original.
            own = {}
        self._nonces_here = {own.get("nonce"), own.get("next")} - {None}
        newest = run.newest_session
        if newest is None:
            is_of_another = self._is_of_writer and "session" in own
            if is_of_another and holds_run(run_dir, self._rank):
                _log.warning(
                    "run folder %s has rows of a run that is not in %s any more. It is kept as %s.",
                    run_dir,
                    redact_text(self.uri),
                    empty(),
                )
            elif self.there and not holds_run(run_dir, self._rank):
                self._patiently(lambda: self._take_plain(run))
            return
        about = self._about(newest.number)
        if about.get("nonce") in self._nonces_here and own.get("uri") == self.store.uri():
            # The caller holds the lock of the folder, so that session's process has ended.
            self._own = {**own, "nonce": about["nonce"]}
            # Everything that session has sent was in this folder, whatever its spool still sends.
            self.follows = {**own.get("follows", {}), str(newest.number): _ALL_INTERVALS}
            self.run = own.get("run", self.run)
            self._before = newest.number, set()
            return
        self._before = newest.number, self._signs(newest.number)
        last = self._patiently(run.peek) if newest.pieces else None
        if last is None or not last.has_ended:
            self._watch(newest, about)
            self._patiently(run.look)
        if holds_run(run_dir, self._rank):
            _log.warning(
                "run folder %s has rows of an earlier session; %s was continued elsewhere since. It is kept "
                "as %s, and what the store has is fetched.",
                run_dir,
                redact_text(self.uri),
                empty(),
            )
        self._patiently(run.fetch)
        if run.read_session is not None and run.newest is not None:
            self.follows = {str(run.read_session.number): run.newest.last, **run.newest.follows}
            self.run = run.newest.run or self.run

    def take(self, run_dir: Path) -> None:
        """Takes a number for this session, and fences off the sessions that it takes over from.

        Raises:
            RunInUseError: another process has taken the run since `prepare`, or shows that it is writing it.
            RunPathError: the store can't be written.
        """
        run = self._run
        self._patiently(lambda: run.look(self.store.list(f"{LIVE_FOLDER}/{self.stream}/")))
        before, signs = self._before
        newest = 0 if run.newest_session is None else run.newest_session.number
        if newest != before or (before and not self._own and self._signs(before) - signs):
            raise _in_use(self.uri, self._about(newest))
        # Consecutive sessions of this folder count as one writer, so that the uploads that the last one left
        # in the spool still arrive under their names.
        self._since = self._own.get("since", self._own.get("session", newest)) if self._own else newest + 1
        own = {"uri": self.store.uri(), "inode": run_dir.stat().st_ino, "since": self._since}
        own |= {"follows": self.follows, "run": self.run}
        # Recorded first, so that after a kill right after the put, the folder recognizes its own session.
        replace_json(self._own_path(run_dir), {**own, "nonce": self._own.get("nonce"), "next": self._nonce})
        about = self._take_number(newest + 1)
        for session in run.sessions.values():
            if session.number < self._since and not session.is_over:
                self._put_new(session.number, SUCCESSOR_FILE, about)
        self.session = about["session"]
        if not self._own:
            # Files that others have sent before the fence keep their names.
            self.there = {one.name: one.size for one in self._patiently(run.look)}
        replace_json(self._own_path(run_dir), {**own, "session": self.session, "nonce": self._nonce})

    def _take_number(self, first: int) -> dict[str, Any]:
        """Puts this session's description under the first free number, and returns it."""
        winner: dict[str, Any] = {}
        for number in range(first, first + _FEW_TRIES):
            about = {
                "session": number,
                "nonce": self._nonce,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "started_at": time.time(),
                "seconds": self._seconds,
                "sign_seconds": self.sign_seconds,
            }
            self._put_new(number, SESSION_FILE, about)
            # Read back, because the response to a winning put may be lost, or its object damaged.
            winner = self._about(number)
            if winner.get("nonce") == self._nonce:
                return about
            # A damaged object belongs to nobody, and so does a late one of a killed process of this folder.
            if winner and winner["nonce"] not in self._nonces_here:
                break
        raise _in_use(self.uri, winner)

    def _put_new(self, session: int, name: str, about: dict[str, Any]) -> None:
        path, text = self._run.name_of(session, name), session_text(about)
        self._patiently(lambda: put_new(self.store, path, text, wait=self._wait))

    @property
    def fence(self) -> Fence:
        """The fence of everything that this session sends."""
        return Fence(self.name_of(SUCCESSOR_FILE), f"{session_folder(self.stream, self.session)}/")

    def name_of(self, piece: str) -> str:
        """Returns the name of a piece of this session."""
        return self._run.name_of(self.session, piece)

    def about_successor(self) -> dict[str, Any]:
        """Returns the description of the session that took over, or {} if it can't be read.

        Raises:
            RunPathError: the store doesn't respond.
        """
        return self._about(self.session, SUCCESSOR_FILE)

    def earlier_pieces(self) -> list[str]:
        """Returns the names of the pieces of earlier sessions of this folder."""
        return [
            self._run.name_of(session.number, piece_name(*numbers))
            for session in self._run.sessions.values()
            for numbers in session.pieces
            if self._since <= session.number < self.session
        ]

    @property
    def _is_of_writer(self) -> bool:
        """Whether the rows are a named writer's, which belong to whatever run is at the parent place."""
        return bool(writer_of(Path(self.uri.partition("?")[0])))

    def _own_path(self, run_dir: Path) -> Path:
        return run_dir / (_OWN if self._rank == 0 else f".mirror.{self.stream}.json")

    def _take_plain(self, run: StoredRun) -> None:
        """Fetches a run that is in the store as plain files, except media and artifacts."""
        for path in self.there:
            is_wanted = "/" not in path or path.startswith(f"{PARTS_FOLDER}/") or path in indexes()
            if is_wanted and not path.startswith("."):
                with contextlib.suppress(ValueError):
                    run.download(path)

    def _signs(self, session: int) -> set[tuple[object, ...]]:
        """Returns a session's objects as the store lists them, which change with each sign of life."""

        def listed() -> Iterable[RemoteObject]:
            return list(self.store.list(f"{session_folder(self.stream, session)}/"))

        return {(one.name, one.size, one.version) for one in self._patiently(listed)}

    def _watch(self, session: StoredSession, about: dict[str, Any]) -> None:
        """Returns once a session has sent no sign for long enough; raises RunInUseError if it sends two.

        How long depends on the interval that the watched session has promised, not on this session's.
        One sign may be a request that was on its way when its process died: the wait begins again after it.
        """
        # Earlier releases only send pieces.
        promised = about.get("sign_seconds", about.get("seconds"))
        if not isinstance(promised, int | float):
            promised = _MOST_SILENT_SECONDS
        left = _WATCHED_INTERVALS * max(promised, _SHORTEST_INTERVAL_SECONDS)
        if not session.pieces:
            left = max(left, _FIRST_SIGN_SECONDS)
        seconds, has_changed = left, False
        _log.warning(
            "process %s on %s has not closed %s. Waiting %.0f s to see whether it is still writing.",
            about.get("pid", "?"),
            about.get("host", "?"),
            redact_text(self.uri),
            left,
        )
        while left > 0:
            self._wait(min(left, _PAUSE_SECONDS))
            left -= _PAUSE_SECONDS
            signs = self._signs(session.number)
            if signs - self._before[1]:
                if has_changed:
                    raise _in_use(self.uri, about)
                self._before = (self._before[0], signs)
                left, has_changed = seconds, True

    def _about(self, number: int, name: str = SESSION_FILE) -> dict[str, Any]:
        """Returns the description of a session, or {} if it is still damaged after several tries."""
        run = self._run
        for attempt in range(1, _FEW_TRIES + 1):
            about: dict[str, Any] = self._patiently(lambda: run.about_session(number, name))
            if "nonce" in about:
                return about
            self._wait(_pause_after(attempt))
        return {}

    def _patiently(self, ask: Callable[[], Any]) -> Any:
        """Asks the store, and retries for half a minute if it doesn't respond.

        Raises:
            RunPathError: the store doesn't respond, or refuses.
        """
        for attempt in range(1, _TRIES + 1):
            try:
                return ask()
            except (UploadError, PieceError) as error:
                if attempt >= _tries_after(error):
                    raise self._unreachable(error) from error
            self._wait(_pause_after(attempt))
        raise AssertionError("the last try returns or raises")

    def _unreachable(self, error: Exception) -> RunPathError:
        return RunPathError(
            f"the run in {redact_text(self.uri)!r} cannot be opened: {redact_text(str(error))}. "
            "Fix this, or write to a local folder."
        )


def _pause_after(attempt: int) -> float:
    return min(_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** (attempt - 1))


def _tries_after(error: Exception) -> int:
    """Returns the number of tries; a proxy may refuse once, or damage a response."""
    return _TRIES if isinstance(error, TransientStoreError) else _FEW_TRIES


def _in_use(uri: str, about: dict[str, Any]) -> RunInUseError:
    return RunInUseError(
        f"the run in {redact_text(uri)!r} is in use: process {about.get('pid', '?')} on "
        f"{about.get('host', '?')} writes to it. Wait until it ends, choose another name, or add to it with "
        'RunDirectory(..., writer="eval").'
    )
