"""The file of an index: opened, checked, made anew where it cannot be used, or replaced by one in memory.

Nothing is synced: a power loss may damage the file, which is then made anew. Writing transactions begin with the write lock, so any
number of processes may write in turns.
"""

import contextlib
import hashlib
import logging
import os
import re
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["Database", "cache_folder", "index_name"]

_log = logging.getLogger("destinations")

# "runs", so that no other program's database is taken for an index, and deleted.
_APPLICATION_ID = 0x72756E73
_BUSY_SECONDS = 10.0


def cache_folder() -> Path:
    """Returns the folder for indexes: in `$XDG_CACHE_HOME`, or where caches are on this platform.

    Raises:
        RuntimeError: the user has no home.
    """
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(chosen):  # noqa: PTH117  # a relative one does not count, says the specification
        base = Path(chosen)
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path.home() / ".cache"
    return base / "training-destinations" / "runs"


def index_name(root: str) -> str:
    """Returns the name of the file for a root, on this machine."""
    # The home of a user, and the cache folder in it, may be on a file system that several machines share.
    digest = hashlib.sha256(os.fsencode(f"{os.uname().nodename}\0{root}")).hexdigest()[:16]
    name = "".join(char if char.isascii() and char.isalnum() else "-" for char in Path(root).name)[:40]
    return f"{name or 'root'}-{digest}.sqlite"


class Database:
    """An SQLite database, in a file or in memory.

    Args:
        path: the file; None for memory.
        tables: makes the tables; takes the open database.
        version: of the tables.
        on_new: called when another file, or another version of it, takes the place of the one before.
        busy_seconds: how long to wait for another process that holds the file locked; then the index is in memory.
    """

    def __init__(
        self,
        path: Path | None,
        tables: Callable[[sqlite3.Connection], None],
        version: int,
        on_new: Callable[[], None],
        busy_seconds: float = _BUSY_SECONDS,
    ) -> None:
        self.warnings: list[str] = []
        self._path = path
        self._tables = tables
        self._version = version
        self._on_new = on_new
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
        """Does what is inside as one, or not at all."""
        with _transaction(self._db):
            yield

    def reopen_if_deleted(self) -> None:
        """Makes a new file where somebody deleted it."""
        if self._path is not None and self._file_inode() != self._inode:
            self._reopen()

    @property
    def has_file(self) -> bool:
        """Whether the database is in a file, and not in memory."""
        return self._path is not None

    def is_sound(self) -> bool:
        """Says whether the whole database can be read; may take a while."""
        try:
            return [row[0] for row in self._db.execute("PRAGMA quick_check(1)")] == ["ok"]
        except sqlite3.Error:
            return False

    def rescue(self, error: sqlite3.Error) -> None:
        """Begins anew after an error: in a new file where the old one is damaged or gone, else in memory."""
        if self._path is None:
            raise error
        if _is_damage(error):
            self._warn(f"index {self._path} is damaged ({error}); it is made anew.")
            self._delete()
        elif self._file_inode() == self._inode:
            self._warn(f"index {self._path} cannot be used ({error}); it is kept in memory.")
            self._path = None
        self._reopen()

    def _open(self) -> sqlite3.Connection:
        for attempt in (1, 2):
            if self._path is None:
                break
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                return self._open_file(self._path)
            except _Unusable as error:
                self._warn(f"index {self._path} {error}; it is made anew.")
                self._delete()
            except (OSError, sqlite3.Error) as error:
                if attempt == 1 and isinstance(error, sqlite3.DatabaseError) and _is_damage(error):
                    self._warn(f"index {self._path} is damaged ({error}); it is made anew.")
                    self._delete()
                    continue
                self._warn(f"index {self._path} cannot be used ({error}); it is kept in memory.")
                self._path = None
        self._path = None
        return self._open_file(None)

    def _open_file(self, path: Path | None) -> sqlite3.Connection:
        db = sqlite3.connect(
            ":memory:" if path is None else str(path),
            timeout=self._busy_seconds,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            # No file may be left behind where one is deleted, and a journal of its own is what every file system takes.
            db.execute("PRAGMA journal_mode = TRUNCATE")
            db.execute("PRAGMA synchronous = OFF")
            db.execute("PRAGMA cache_size = -65536")
            db.execute("PRAGMA temp_store = MEMORY")
            db.create_function("matches_pattern", 2, _matches_pattern, deterministic=True)
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
            raise _Unusable(f"is of {age} version ({version}, this is {self._version})")
        if db.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
            raise _Unusable("is of another program")
        self._tables(db)
        db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {self._version}")

    def _delete(self) -> None:
        for suffix in ("", "-journal", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                Path(f"{self._path}{suffix}").unlink()

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
        self._on_new()


class _Unusable(Exception):
    """A file is no index of this version."""


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    # The lock first: a transaction that begins by reading cannot wait for it later.
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def _is_damage(error: sqlite3.Error) -> bool:
    """Says whether an error is of the content of the file, not of getting at it."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return False
    if code & 0xFF in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}:
        return True
    # A table that was there when the file was opened, or a column of it, is not.
    return code & 0xFF == sqlite3.SQLITE_ERROR and "no such" in str(error)


def _matches_pattern(pattern: str, value: Any) -> bool:
    return isinstance(value, str) and re.search(pattern, value) is not None
