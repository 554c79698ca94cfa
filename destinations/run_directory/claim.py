"""`Claim`: which machine writes a run that lives in a store, and what a new one begins with.

Each process that writes numbers its session by an object that can be put once, `session.json`, and writes
below that number alone: nothing that an earlier one still sends can change what is read. So a claim decides
who goes on, and never what is lost. A session counts as alive while pieces come: that is watched for a few
intervals, since clocks of machines differ.
"""

import contextlib
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from destinations.kinds import indexes
from events import redact_text
from uploads import Store, TransientStoreError, UploadError, open_store, put_new
from uploads.disk import boot_id, has_process_ended, process_identity, read_json, replace_json

from .folder import RunInUseError, RunPathError, holds_run
from .layout import HEARTBEAT_SECONDS, PARTS_FOLDER
from .pieces import Piece, PieceError, piece_name
from .stored_run import SESSION_FILE, StoredRun, StoredSession, session_text, stream_of

__all__ = ["Claim"]

_log = logging.getLogger("destinations")

_OWN = ".mirror.json"
_TRIES = 30
_FEW_TRIES = 8
# Between two tries: from the first one on twice as long, up to the other.
_FIRST_PAUSE_SECONDS = 0.1
_PAUSE_SECONDS = 1.0
_UNCONDITIONAL_SECONDS = 2.0
_WATCHED_INTERVALS = 2.5


class Claim:
    """A run in a store, before and while this process writes it.

    **Threading.** The thread that opens the run.

    Args:
        uri: of the run, without placeholders.
        rank: that writes.
        seconds: the interval of its pieces.
        wait: sleeps for some seconds.

    Attributes:
        session: the number of this session; 0 before `take`.
        there: the sizes of the objects that are plain files of the run, by path, when it was opened.
    """

    def __init__(
        self, uri: str, rank: int, seconds: float, wait: Callable[[float], object] = time.sleep
    ) -> None:
        self.uri = uri
        self.store: Store = open_store(uri)
        self.stream = stream_of(rank)
        self.session = 0
        self.there: dict[str, int] = {}
        self._rank = rank
        self._seconds = seconds
        self._wait = wait
        self._run: StoredRun | None = None
        self._nonce = uuid.uuid4().hex
        # What this session continues: number, and time of the last row that was fetched; None for all of it.
        self._follows: dict[str, Any] | None = None
        self._last_of_nobody = 0

    def prepare(self, run_dir: Path, empty: Callable[[], Path]) -> None:
        """Makes the folder what the store has, unless it is what the newest session left.

        Args:
            run_dir: the folder of the run, of which the caller holds the lock.
            empty: called to set a folder with rows of an earlier session aside; returns where it is.

        Raises:
            RunInUseError: another machine writes the run.
            RunPathError: the store cannot be read.
        """
        run = self._run = StoredRun(self.store, "", run_dir, self.stream)
        plain = self._patiently(run.look)
        self.there = {one.name: one.size for one in plain}
        session, about = self._newest_with_writer(run)
        if session is None:
            if self.there and not holds_run(run_dir, self._rank):
                self._patiently(lambda: self._take_plain(run))
            return
        own = read_json(run_dir / _OWN)
        if own.get("nonce") == about.get("nonce") and own.get("uri") == self.store.uri():
            return
        newest = self._patiently(run.peek)
        if newest is None or not newest.has_ended:
            self._wait_until_it_ended(run, session, about, newest)
        if holds_run(run_dir, self._rank):
            _log.warning(
                "run folder %s has rows of an earlier session; %s was continued elsewhere since. It is kept "
                "as %s, and what the store has is fetched.",
                run_dir,
                redact_text(self.uri),
                empty(),
            )
        self._patiently(run.fetch)
        self._follows = {"session": session.number, "rows_until": _last_time(run_dir, self._rank)}

    def take(self, run_dir: Path) -> None:
        """Numbers this session.

        Raises:
            RunInUseError: another process has just taken the number.
            RunPathError: the store cannot be written.
        """
        assert self._run is not None  # noqa: S101  # prepare() comes first
        before = self._run.newest_session
        first = 1 if before is None else before.number + 1
        for number in range(first, first + _FEW_TRIES):
            winner = self._put(number)
            if winner.get("nonce") == self._nonce:
                self.session = number
                own = {"uri": self.store.uri(), "session": number, "nonce": self._nonce}
                replace_json(run_dir / _OWN, own)
                return
            self._patiently(self._run.look)
            if not _is_nobodys(self._run.sessions.get(number, StoredSession(number)), winner):
                break
        raise _in_use(self.uri, winner)

    def _newest_with_writer(self, run: StoredRun) -> tuple[StoredSession | None, dict[str, Any]]:
        """Returns the newest session that is not nobody's, and what it says of itself."""
        for session in sorted(run.sessions.values(), key=lambda one: -one.number):
            about = self._about(run, session.number)
            if not _is_nobodys(session, about):
                return session, about
        return None, {}

    def _put(self, number: int) -> dict[str, Any]:
        """Puts what this session says of itself, unless a number is taken; returns what is there then."""
        assert self._run is not None  # noqa: S101  # prepare() comes first
        about = {
            "session": number,
            "nonce": self._nonce,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process": process_identity(os.getpid()),
            "started_at": time.time(),
            "seconds": self._seconds,
            "follows": self._follows,
        }
        name, text = self._run.name_of(number, SESSION_FILE), session_text(about)
        self._patiently(lambda: put_new(self.store, name, text))
        # Read back: of two that put at once, one has won, also where the store replaces what is there.
        if not getattr(self.store, "refuses_overwrite", lambda: True)():
            # Which of two is last is then told by time alone; the store has said so.
            self._wait(_UNCONDITIONAL_SECONDS)
        return self._about(self._run, number)

    @property
    def successor(self) -> str:
        """The name of the object that begins the next session, after those that are nobody's."""
        assert self._run is not None  # noqa: S101  # prepare() comes first
        return self._run.name_of(max(self.session, self._last_of_nobody) + 1, SESSION_FILE)

    def name_of(self, piece: str) -> str:
        """Returns the name of a piece of this session."""
        assert self._run is not None  # noqa: S101  # prepare() comes first
        return self._run.name_of(self.session, piece)

    def find_successor(self) -> dict[str, Any] | None:
        """Returns what the session says of itself that has taken over; None if there is none.

        Raises:
            UploadError: the store does not answer.
        """
        assert self._run is not None  # noqa: S101  # prepare() comes first
        self._run.look()
        for number in sorted(one for one in self._run.sessions if one > self.session):
            about = self._run.about_session(number)
            if not _is_nobodys(self._run.sessions[number], about):
                return about
            self._last_of_nobody = number
        return None

    def earlier_pieces(self) -> list[str]:
        """Returns the names of the pieces that were there when this session began."""
        assert self._run is not None  # noqa: S101  # prepare() comes first
        return [
            self._run.name_of(session.number, piece_name(*numbers))
            for session in self._run.sessions.values()
            for numbers in session.pieces
        ]

    def pieces_there(self) -> list[str]:
        """Returns the names of all pieces that are in the store now.

        Raises:
            UploadError: it cannot be listed.
        """
        assert self._run is not None  # noqa: S101  # prepare() comes first
        self._run.look()
        return self.earlier_pieces()

    def _take_plain(self, run: StoredRun) -> None:
        """Fetches a run that was put into the store as plain files: all but media and artifacts."""
        for path in self.there:
            is_wanted = "/" not in path or path.startswith(f"{PARTS_FOLDER}/") or path in indexes()
            if is_wanted and not path.startswith("."):
                with contextlib.suppress(ValueError):
                    run.download(path)

    def _wait_until_it_ended(
        self, run: StoredRun, session: StoredSession, about: dict[str, Any], newest: Piece | None
    ) -> None:
        """Returns once a session shows no sign of life; raises RunInUseError if it does."""
        at = newest.written_at if newest is not None else about.get("started_at")
        age = time.time() - at if isinstance(at, int | float) else HEARTBEAT_SECONDS
        if _has_ended_here(about) or age > HEARTBEAT_SECONDS:
            return
        seconds = newest.seconds if newest is not None else self._seconds
        left = _WATCHED_INTERVALS * min(max(seconds, 1.0), HEARTBEAT_SECONDS)
        _log.warning(
            "%s was written by process %s on %s %.0f s ago. Waiting %.0f s for a sign that it still is.",
            redact_text(self.uri),
            about.get("pid", "?"),
            about.get("host", "?"),
            max(age, 0.0),
            left,
        )
        last = session.last
        while left > 0:
            self._wait(min(left, _PAUSE_SECONDS))
            left -= _PAUSE_SECONDS
            if self._patiently(lambda: run.has_after(session.number, last)):
                raise _in_use(self.uri, about)
        self._patiently(run.look)

    def _about(self, run: StoredRun, number: int) -> dict[str, Any]:
        """Returns what a session says of itself; nothing where that stays damaged, as one answer may be."""
        for attempt in range(1, _FEW_TRIES + 1):
            about: dict[str, Any] = self._patiently(lambda: run.about_session(number))
            if "nonce" in about:
                return about
            self._wait(_pause_after(attempt))
        return {}

    def _patiently(self, ask: Callable[[], Any]) -> Any:
        """Asks the store, for half a minute where it does not answer.

        Raises:
            RunPathError: it does not answer, or refuses.
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
            "Mend that, or write to a local folder."
        )


def _pause_after(attempt: int) -> float:
    return min(_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** (attempt - 1))


def _tries_after(error: Exception) -> int:
    """Returns how often is asked in all; a proxy may have refused once, or damaged what came."""
    return _TRIES if isinstance(error, TransientStoreError) else _FEW_TRIES


def _in_use(uri: str, about: dict[str, Any]) -> RunInUseError:
    return RunInUseError(
        f"the run in {redact_text(uri)!r} is in use: process {about.get('pid', '?')} on "
        f"{about.get('host', '?')} writes to it. Wait until it ends, choose another name, or add to it with "
        'RunDirectory(..., writer="eval").'
    )


def _is_nobodys(session: StoredSession, about: dict[str, Any]) -> bool:
    """Returns whether a session has no writer, and nothing to be fetched.

    What it says was damaged on its way to a store that compares no sum; or its process ended before its first
    piece, perhaps while the claim was on its way.
    """
    return not session.pieces and (not about or _has_ended_here(about))


def _has_ended_here(about: dict[str, Any]) -> bool:
    """Returns whether a session was of a process of this machine, and that has ended."""
    pid, process = about.get("pid"), about.get("process")
    if about.get("host") != socket.gethostname() or not isinstance(pid, int) or not isinstance(process, str):
        return False
    # Containers may share the name of a host, but not its boot and processes.
    if not process or not boot_id() or not process.startswith(boot_id()):
        return False
    return has_process_ended(pid) is True or process_identity(pid) != process


def _last_time(run_dir: Path, rank: int) -> float | None:
    from .reader import last_rows

    times = [row.time for row in last_rows(run_dir, 1, rank) if row.time is not None]
    return times[0] if times else None
