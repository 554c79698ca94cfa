"""An SQLite file that may be deleted at any time: rebuilt if corrupt, in memory if it cannot be a file."""

import contextlib
import logging
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

from destinations.runs.budget import seconds_left

from .filter_sql import FUNCTIONS

__all__ = ["CorruptIndexError", "Database"]

_log = logging.getLogger("destinations")

# "runs": no database of another program is mistaken for an index and deleted.
_APPLICATION_ID = 0x72756E73
_BUSY_SECONDS = 10.0
# Of the virtual machine of SQLite, between two looks at the budget: half a millisecond.
_STEPS = 10_000


class Database:
    """An SQLite database, in a file or in memory.

    Args:
        path: the file; None for memory.
        tables: creates the tables in an open database.
        version: of the tables.
        busy_seconds: how long to wait for a lock of another process before the index is kept in memory.
    """

    def __init__(
        self,
        path: Path | None,
        tables: Callable[[sqlite3.Connection], None],
        version: int,
        busy_seconds: float = _BUSY_SECONDS,
    ) -> None:
        self.warnings: list[str] = []
        self._path = path
        self._tables = tables
        self._version = version
        self._busy_seconds = busy_seconds
        self._db = self._open()
        self._inode = self._file_inode()
        self.execute = self._db.execute
        self.executemany = self._db.executemany

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Runs the block in one transaction."""
        with _transaction(self._db):
            yield

    def reopen_if_deleted(self) -> None:
        """Creates the file again if it was deleted."""
        if self._path is not None and self._file_inode() != self._inode:
            self._reopen()

    @property
    def has_file(self) -> bool:
        """Whether the database is in a file, and not in memory."""
        return self._path is not None

    def is_sound(self) -> bool:
        """Returns whether the whole database can be read; may take seconds."""
        try:
            return [row[0] for row in self._db.execute("PRAGMA quick_check(1)")] == ["ok"]
        except sqlite3.Error:
            return False

    def rescue(self, error: sqlite3.Error) -> None:
        """Recovers from an error: in a new file if the old one is corrupt or gone, else in memory."""
        if self._path is None:
            raise error
        if _is_damage(error):
            self._rebuild(error)
        elif self._file_inode() == self._inode:
            self._warn(f"index {self._path} cannot be used ({error}); using one in memory.")
            self._path = None
        self._reopen()

    def _open(self) -> sqlite3.Connection:
        for attempt in (1, 2):
            if self._path is None:
                break
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                return self._open_file(self._path)
            except (OSError, sqlite3.Error) as error:
                if attempt == 1 and isinstance(error, sqlite3.Error) and _is_damage(error):
                    self._rebuild(error)
                    continue
                self._warn(f"index {self._path} cannot be used ({error}); using one in memory.")
                self._path = None
        return self._open_file(None)

    def _rebuild(self, error: sqlite3.Error) -> None:
        """Deletes the file, which is then created again."""
        problem = error if isinstance(error, _OtherVersionError) else f"is corrupt ({error})"
        self._warn(f"index {self._path} {problem}; rebuilding.")
        for suffix in ("", "-journal", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                Path(f"{self._path}{suffix}").unlink()

    def _open_file(self, path: Path | None) -> sqlite3.Connection:
        db = sqlite3.connect(
            ":memory:" if path is None else str(path),
            timeout=self._busy_seconds,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            # Half of a run's row is one long text, and a page of 4 KB holds two or three of these.
            db.execute("PRAGMA page_size = 16384")
            # Not WAL: it leaves files behind, and does not work on every file system.
            db.execute("PRAGMA journal_mode = TRUNCATE")
            db.execute("PRAGMA synchronous = OFF")
            db.execute("PRAGMA cache_size = -65536")
            db.execute("PRAGMA temp_store = MEMORY")
            # Within a budget, see `destinations.runs.budget`: all filters and scans of one request together.
            db.set_progress_handler(_is_over, _STEPS)
            for name, (count, function) in FUNCTIONS.items():
                db.create_function(name, count, function, deterministic=True)
            with _transaction(db):
                self._check_tables(db)
        except BaseException:
            db.close()
            raise
        return db

    def _check_tables(self, db: sqlite3.Connection) -> None:
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if application == _APPLICATION_ID and version == self._version:
            return
        if application == _APPLICATION_ID:
            age = "a newer" if version > self._version else "an older"
            raise _OtherVersionError(f"is of {age} version ({version}, this is {self._version})")
        if db.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
            raise _OtherVersionError("is of another program")
        self._tables(db)
        db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {self._version}")

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        _log.warning("%s", text)

    def _file_inode(self) -> int | None:
        try:
            return None if self._path is None else self._path.stat().st_ino
        except OSError:
            return None

    def _reopen(self) -> None:
        self._db.close()
        self._db = self._open()
        self._inode = self._file_inode()
        self.execute = self._db.execute
        self.executemany = self._db.executemany


class CorruptIndexError(sqlite3.DatabaseError):
    """The index has content that this package did not write."""


class _OtherVersionError(CorruptIndexError):
    """A file is an index of another version, or of another program."""


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    # Lock at once: a transaction that begins by reading cannot wait for the lock later.
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def _is_damage(error: sqlite3.Error) -> bool:
    """Returns whether the content of the file caused an error, and not the access to it."""
    if isinstance(error, CorruptIndexError):
        return True
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return False
    if code & 0xFF in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}:
        return True
    # A table or a column is missing.
    return code & 0xFF == sqlite3.SQLITE_ERROR and "no such" in str(error)


def _is_over() -> bool:
    """Returns whether SQLite is to stop, as the budget of the context is used up."""
    return seconds_left() < 0
