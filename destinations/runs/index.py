"""What scans have found, in SQLite: a cache, one file for each root and machine, which may be deleted at any time.

It lies in the cache folder of the user, never in the folder of the runs, which may be shared and on a file system where SQLite
does not work. A file that is damaged or of another version is deleted and made anew; where there can be no file, the index is in
memory, and gone with the process. `warnings` says so.

Hyperparameters and last values are in `cells`, the file is the matter of `database`.

**Threads and processes.** An index belongs to one thread at a time; `Runs` sees to that. Any number of processes may scan at once: the
last one to have read a run is right, or the next scan corrects it.
"""

# ruff: noqa: S608  # All that is put into a statement is names of tables and columns that are made here, numbers and question marks.

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from .files import written_texts
from .filter_sql import Query, Source
from .filters import Field
from .record import Reading, RunRecord, Scalar
from .scan import RUNNING, Found, Known

__all__ = ["CELL_TABLES", "VERSION", "Cells", "Database", "Index", "cache_folder", "index_name"]

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


CELL_TABLES = """
CREATE TABLE names (id INTEGER PRIMARY KEY, grp TEXT, name TEXT, UNIQUE (grp, name));
CREATE TABLE more_cells (run INTEGER, name INTEGER, value, PRIMARY KEY (run, name)) WITHOUT ROWID;
CREATE INDEX more_cells_by_value ON more_cells (name, value);
"""

_PAGE_COLUMNS = 100
_MOST_PAGES = 20
_PAGED_NAMES = _PAGE_COLUMNS * _MOST_PAGES
_MOST_SHAPES = 1000
_LARGEST_INT = (1 << 63) - 1
_ADD_OTHERS = "INSERT OR REPLACE INTO more_cells VALUES (?, ?, ?)"

_VALUE_OF_BLOB: dict[bytes, Scalar] = {b"nan": math.nan, b"true": True, b"false": False, b"none": None}
# `sqlite3` looks for an adapter of each value whose type is not exactly int, float, str or bytearray; it takes its time.
_TRUE, _FALSE, _NONE, _NAN = (bytearray(text) for text in (b"true", b"false", b"none", b"nan"))


class Cells:
    """The values of all runs of an index.

    Args:
        database: where they are.
    """

    def __init__(self, database: Database) -> None:
        self._db = database
        self._names: dict[tuple[str, str], int] = {}
        self._indexed: set[int] = set()
        # The names and types that a run has, and how to make rows of its values: most runs of a sweep have the same.
        self._shapes: dict[tuple[tuple[str, ...], tuple[str, ...], tuple[type, ...]], _Shape] = {}

    # --- writing ---------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Forgets which names there are: another process may have changed that, or the file is another."""
        self._names.clear()
        self._shapes.clear()
        self._indexed.clear()

    def begin(self) -> None:
        """Learns which names there are; at the beginning of a transaction that writes."""
        self.forget()
        for number, group, name in self._db.execute("SELECT id, grp, name FROM names"):
            self._names[group, name] = number

    def tables(self) -> list[str]:
        """Returns the tables that may have rows of a run."""
        pages = -(-min(len(self._names), _PAGED_NAMES) // _PAGE_COLUMNS)
        return ["more_cells", *(f"cells_{page}" for page in range(pages))]

    def add(self, rows: dict[str, list[Any]], number: int, reading: Reading) -> None:
        """Adds the values of a run to the rows for each statement."""
        hparams, summary = reading.hparams, reading.summary
        values = [*hparams.values(), *summary.values()]
        if reading.may_have_nan:
            values = [_cell(value) for value in values]
        key = (tuple(hparams), tuple(summary), tuple(map(type, values)))
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            shape = self._shapes[key] = self._shape(*key)
        for place in shape.odd:
            values[place] = _cell(values[place])
        values.append(number)
        for statement, row in shape.statements:
            rows.setdefault(statement, []).append(row(values))
        if shape.others:
            others = [(number, name, values[place]) for name, place in shape.others]
            rows.setdefault(_ADD_OTHERS, []).extend(others)

    def write(self, rows: Mapping[str, Sequence[Any]]) -> None:
        """Writes the rows that `add` made."""
        for statement, values in rows.items():
            try:
                self._db.executemany(statement, values)
            except OverflowError:
                self._db.executemany(statement, [tuple(map(_small, row)) for row in values])

    def _number(self, group: str, name: str) -> int:
        """Returns the number of a name, which is its column; a new one gets the next, and its table where that is full."""
        number = self._names.get((group, name))
        if number is None:
            number = len(self._names)
            self._db.execute("INSERT INTO names VALUES (?, ?, ?)", (number, group, name))
            self._names[group, name] = number
            if number < _PAGED_NAMES and number % _PAGE_COLUMNS == 0:
                columns = ", ".join(f"c{column}" for column in range(_PAGE_COLUMNS))
                self._db.execute(
                    f"CREATE TABLE cells_{number // _PAGE_COLUMNS} (run INTEGER PRIMARY KEY, {columns})"
                )
        return number

    def _shape(self, hparams: Sequence[str], summary: Sequence[str], types: Sequence[type]) -> "_Shape":
        numbers = [self._number("hparams", name) for name in hparams]
        numbers += [self._number("summary", name) for name in summary]
        pages: dict[int, list[tuple[int, int]]] = {}
        others = []
        for place, number in enumerate(numbers):
            if number >= _PAGED_NAMES:
                others.append((number, place))
            else:
                pages.setdefault(number // _PAGE_COLUMNS, []).append((number % _PAGE_COLUMNS, place))
        statements = []
        for page, cells in pages.items():
            # Only the columns that there are: SQLite is quick about those that are not, and Python slow about each None.
            columns = ", ".join(f"c{column}" for column, _ in cells)
            marks = ", ".join("?" * len(cells))
            statements.append(
                (
                    f"INSERT OR REPLACE INTO cells_{page} (run, {columns}) VALUES (?, {marks})",
                    itemgetter(len(numbers), *(place for _, place in cells)),
                )
            )
        return _Shape(
            statements, others, [place for place, kind in enumerate(types) if kind in {bool, type(None)}]
        )

    # --- reading ---------------------------------------------------------------------------------------------------

    def names(self, group: str) -> list[str]:
        """Returns the names of all hyperparameters or metrics that a run has or had."""
        rows = self._db.execute("SELECT name FROM names WHERE grp = ? ORDER BY id", (group,))
        return [name for (name,) in rows]

    def sources(self, fields: Iterable[Field]) -> dict[Field, Source]:
        """Returns where the cells of some fields are, each with an SQL index; those of names that no run has are left out."""
        found: dict[Field, Source] = {}
        for field in fields:
            row = self._db.execute(
                "SELECT id FROM names WHERE grp = ? AND name = ?", (field.group, field.name)
            ).fetchone()
            if row is None:
                continue
            number = int(row[0])
            if number >= _PAGED_NAMES:
                found[field] = Source("more_cells", "value", number)
                continue
            page, column = f"cells_{number // _PAGE_COLUMNS}", f"c{number % _PAGE_COLUMNS}"
            if number not in self._indexed:
                # Where another process writes, this one does without: the answer is the same, and later.
                with contextlib.suppress(sqlite3.OperationalError):
                    self._db.execute(
                        f"CREATE INDEX IF NOT EXISTS {page}_{column} ON {page} ({column}) WHERE {column} IS NOT NULL"
                    )
                    self._indexed.add(number)
            found[field] = Source(page, column, None)
        return found

    def of_runs(self, ids: Sequence[int]) -> dict[int, tuple[dict[str, Scalar], dict[str, Any]]]:
        """Returns hyperparameters and last values of each run."""
        found: dict[int, tuple[dict[str, Scalar], dict[str, Any]]] = {number: ({}, {}) for number in ids}
        names = [(group, name) for group, name in self._db.execute("SELECT grp, name FROM names ORDER BY id")]
        marks = ", ".join("?" * len(ids))

        def add(run: int, name: int, value: Any) -> None:
            group, text = names[name]
            cells = found[run][0 if group == "hparams" else 1]
            cells[text] = _VALUE_OF_BLOB[value] if isinstance(value, bytes) else value

        for first in range(0, min(len(names), _PAGED_NAMES), _PAGE_COLUMNS):
            table = f"cells_{first // _PAGE_COLUMNS}"
            for run, *values in self._db.execute(f"SELECT * FROM {table} WHERE run IN ({marks})", ids):
                for offset, value in enumerate(values):
                    if value is not None:
                        add(run, first + offset, value)
        if len(names) > _PAGED_NAMES:
            for row in self._db.execute(
                f"SELECT run, name, value FROM more_cells WHERE run IN ({marks})", ids
            ):
                add(*row)
        return found


class _Shape:
    """How the values of a run with certain names and types become rows.

    Args:
        statements: with what takes the row of each out of all values and the number of the run behind them.
        others: number and place of names that have no column.
        odd: places of values that SQLite has no type for.
    """

    def __init__(
        self,
        statements: Sequence[tuple[str, Callable[[Any], Any]]],
        others: list[tuple[int, int]],
        odd: list[int],
    ) -> None:
        self.statements = statements
        self.others = others
        self.odd = odd


def _cell(value: Scalar) -> Any:
    if value is True or value is False:
        return _TRUE if value else _FALSE
    if value is None:
        return _NONE
    return _NAN if value != value else value  # noqa: PLR0124  # NaN


def _small(value: Any) -> Any:
    """Returns a value that fits; an integer beyond 64 bits as the float next to it."""
    if not isinstance(value, int) or -_LARGEST_INT <= value <= _LARGEST_INT:
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


VERSION = 1
_CHUNK = 500
_FEW = 2000

_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value);
CREATE TABLE folders (path PRIMARY KEY, parent, mtime_ns INTEGER, inode INTEGER) WITHOUT ROWID;
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, path UNIQUE, parent, mtime_ns INTEGER, inode INTEGER, open INTEGER, files TEXT, heartbeat_at,
    run_id TEXT, name TEXT, kind TEXT, status TEXT, created_at, ended_at, updated_at, tags TEXT, notes TEXT, display_name TEXT,
    archived INTEGER, checkpoint_path TEXT, problem TEXT, is_orphan INTEGER
);
CREATE INDEX runs_by_id ON runs (run_id);
CREATE INDEX runs_by_creation ON runs (created_at);
CREATE INDEX runs_open ON runs (open, heartbeat_at) WHERE open != 0;
CREATE INDEX runs_with_problems ON runs (path, problem) WHERE problem IS NOT NULL;
CREATE TABLE tags (run INTEGER, tag TEXT, PRIMARY KEY (run, tag)) WITHOUT ROWID;
CREATE INDEX runs_by_tag ON tags (tag);
"""

_RECORD_COLUMNS = (
    "id, path, run_id, kind, status, created_at, ended_at, updated_at, tags, notes, display_name, archived, "
    "checkpoint_path, heartbeat_at, problem"
)
_UPSERT = (
    "INSERT OR REPLACE INTO runs VALUES "
    "(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, nullif(?, ''), ?, nullif(?, ''), nullif(?, ''), ?)"
)

Result = TypeVar("Result")


class Index:
    """The index of one root.

    Args:
        root: the folder, absolute and without links.
        folder: where the file goes; None for an index in memory.
        options: those of `Database`.
    """

    def __init__(self, root: str, folder: Path | None, **options: Any) -> None:
        self.root = root
        path = None if folder is None else folder / index_name(root)
        self.database = self._db = Database(path, self._make_tables, VERSION, self._forget, **options)
        self._cells = Cells(self._db)

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    def _make_tables(self, db: Any) -> None:
        for statement in f"{_TABLES}{CELL_TABLES}".split(";"):
            db.execute(statement)
        db.execute("INSERT INTO meta VALUES ('root', ?)", (_storable(self.root),))

    def _forget(self) -> None:
        self._cells.forget()

    # --- for the scan ----------------------------------------------------------------------------------------------

    def known(self) -> Known:
        """Returns what the scan compares with."""
        known = Known()
        children = known.children
        rows = self._db.execute(
            "SELECT path, parent, id, mtime_ns, inode, open, files, heartbeat_at FROM runs"
        )
        for stored, parent, *row in rows:
            path = _path(stored)
            known.runs[path] = tuple(row)
            if parent is not None:
                children.setdefault(_path(parent), []).append(path)
        for stored, parent, mtime_ns, inode in self._db.execute(
            "SELECT path, parent, mtime_ns, inode FROM folders"
        ):
            path = _path(stored)
            known.folders[path] = (mtime_ns, inode)
            if parent is not None:
                children.setdefault(_path(parent), []).append(path)
        return known

    def write(
        self,
        found: Sequence[Found],
        *,
        folders: Mapping[str, tuple[int, int]] | None = None,
        gone_runs: Iterable[str] = (),
        gone_folders: Iterable[str] = (),
    ) -> None:
        """Takes over what a scan found, in one transaction."""
        with self._db.transaction():
            self._cells.begin()
            self._delete_runs(gone_runs)
            self._db.executemany(
                "DELETE FROM folders WHERE path = ?", ((_storable(path),) for path in gone_folders)
            )
            self._db.executemany(
                "INSERT OR REPLACE INTO folders VALUES (?, ?, ?, ?)",
                ((_storable(path), _parent(path), *state) for path, state in (folders or {}).items()),
            )
            self._write_runs(found)

    def _write_runs(self, found: Sequence[Found]) -> None:
        (largest,) = self._db.execute("SELECT coalesce(max(id), 0) FROM runs").fetchone()
        ids = self._ids([one.path for one in found]) if largest else {}
        self._clear([ids[one.path] for one in found if one.reading is not None and one.path in ids])
        touched, rows, tags = [], [], []
        cells: dict[str, list[Any]] = {}
        for one in found:
            if one.reading is None:
                touched.append(one)
                continue
            number = ids.get(one.path)
            if number is None:
                largest += 1
                number = ids[one.path] = largest
            rows.append(self._row(number, one, one.reading))
            tags += [(number, tag) for tag in one.reading.tags]
            self._cells.add(cells, number, one.reading)
        self._db.executemany(_UPSERT, rows)
        self._db.executemany("INSERT OR IGNORE INTO tags VALUES (?, ?)", tags)
        self._cells.write(cells)
        self._touch(touched)

    def _row(self, number: int, one: Found, reading: Reading) -> tuple[Any, ...]:
        path = _storable(one.path)
        folder = one.path.rpartition("/")[2] or os.path.basename(self.root)  # noqa: PTH119  # of a text, many times
        return (
            number,
            path,
            _parent(one.path),
            one.folder_mtime_ns,
            one.folder_inode,
            one.open,
            one.files,
            one.heartbeat_at,
            reading.run_id,
            reading.display_name or (folder if path is one.path else _shown(folder)),
            reading.kind,
            reading.status,
            reading.created_at,
            reading.ended_at,
            reading.updated_at,
            written_texts(reading.tags),
            reading.notes,
            # Python is slow about None and bool: see `_cell`.
            reading.display_name or "",
            1 if reading.archived else 0,
            reading.checkpoint_path or "",
            one.problem or "",
            1 if one.is_orphan else 0,
        )

    def _touch(self, found: Sequence[Found]) -> None:
        """Takes over what may change without anything being read."""
        self._db.executemany(
            "UPDATE runs SET mtime_ns = ?, inode = ?, open = ?, files = ?, heartbeat_at = ? WHERE path = ?",
            (
                (
                    one.folder_mtime_ns,
                    one.folder_inode,
                    one.open,
                    one.files,
                    one.heartbeat_at,
                    _storable(one.path),
                )
                for one in found
            ),
        )
        self._db.executemany(
            "UPDATE runs SET problem = ?, is_orphan = ? WHERE path = ?",
            ((one.problem, one.is_orphan, _storable(one.path)) for one in found if one.problem is not None),
        )

    def _ids(self, paths: Sequence[str]) -> dict[str, int]:
        ids: dict[str, int] = {}
        for chunk in _chunks([_storable(path) for path in paths]):
            marks = ", ".join("?" * len(chunk))
            for path, number in self._db.execute(f"SELECT path, id FROM runs WHERE path IN ({marks})", chunk):
                ids[_path(path)] = number
        return ids

    def _delete_runs(self, paths: Iterable[str]) -> None:
        ids = list(self._ids(list(paths)).values())
        self._clear(ids)
        self._db.executemany("DELETE FROM runs WHERE id = ?", ((number,) for number in ids))

    def _clear(self, ids: Sequence[int]) -> None:
        if ids:
            for table in ("tags", *self._cells.tables()):
                self._db.executemany(f"DELETE FROM {table} WHERE run = ?", ((number,) for number in ids))

    # --- for the report --------------------------------------------------------------------------------------------

    def counts(self, alive_since: float) -> tuple[int, int, int, int]:
        """Returns how many runs there are, are alive, have a problem, have no sidecar."""
        (runs,) = self._db.execute("SELECT count(*) FROM runs").fetchone()
        (alive,) = self._db.execute(
            f"SELECT count(*) FROM runs WHERE open & {RUNNING} AND open != 0 AND heartbeat_at >= ?",
            (alive_since,),
        ).fetchone()
        damaged, orphans = self._db.execute(
            "SELECT count(*), coalesce(sum(is_orphan), 0) FROM runs WHERE problem IS NOT NULL"
        ).fetchone()
        return runs, alive, damaged, orphans

    def problems(self, most: int) -> list[tuple[Path, str]]:
        """Returns where something is wrong, and what."""
        rows = self._db.execute("SELECT path, problem FROM runs WHERE problem IS NOT NULL LIMIT ?", (most,))
        return [(self.full_path(path), problem) for path, problem in rows]

    def duplicates(self) -> dict[str, tuple[Path, ...]]:
        """Returns the paths of run ids that occur more than once."""
        found: dict[str, list[Path]] = {}
        rows = self._db.execute(
            "SELECT run_id, path FROM runs WHERE run_id IN "
            "(SELECT run_id FROM runs GROUP BY run_id HAVING count(*) > 1) ORDER BY path"
        )
        for run_id, path in rows:
            found.setdefault(run_id, []).append(self.full_path(path))
        return {run_id: tuple(paths) for run_id, paths in found.items()}

    def run_ids(self, paths: Iterable[str]) -> list[str]:
        """Returns the ids of runs."""
        ids: list[str] = []
        for chunk in _chunks([_storable(path) for path in paths]):
            marks = ", ".join("?" * len(chunk))
            rows = self._db.execute(f"SELECT run_id FROM runs WHERE path IN ({marks})", chunk)
            ids += [run_id for (run_id,) in rows]
        return ids

    # --- for queries -----------------------------------------------------------------------------------------------

    def full_path(self, stored: Any) -> Path:
        """Returns the folder of a run."""
        path = _path(stored)
        return Path(self.root, path) if path else Path(self.root)

    @property
    def cells(self) -> Cells:
        """Hyperparameters and last values."""
        return self._cells

    def is_rare(self, statement: str, values: Sequence[Any]) -> bool:
        """Says whether a statement selects few rows only."""
        rows = self._db.execute(f"SELECT count(*) FROM ({statement} LIMIT ?)", (*values, _FEW + 1))
        (count,) = rows.fetchone()
        return bool(count <= _FEW)

    def select(self, query: Query, limit: int | None) -> list[tuple[int, Any, float | None, int]]:
        """Returns runs in order: the part of the order they are in, the value they are ordered by, creation, id."""
        found: list[tuple[int, Any, float | None, int]] = []
        for part, (statement, values) in enumerate(query.statements):
            wanted = -1 if limit is None else limit - len(found)
            if wanted == 0:
                break
            found += [(part, *row) for row in self._db.execute(f"{statement} LIMIT ?", (*values, wanted))]
        return found

    def count(self) -> int:
        """Returns how many runs there are."""
        (count,) = self._db.execute("SELECT count(*) FROM runs").fetchone()
        return int(count)

    def ids_where(self, condition: str, values: Sequence[Any]) -> list[int]:
        """Returns the runs that fit a condition of ours."""
        rows = self._db.execute(f"SELECT id FROM runs r WHERE {condition} ORDER BY path", values)
        return [number for (number,) in rows]

    def names_like(self) -> Iterator[str]:
        """Yields what runs can be called, newest first, ten thousand at most."""
        for run_id, name in self._db.execute(
            "SELECT run_id, name FROM runs ORDER BY created_at DESC LIMIT 10000"
        ):
            yield run_id
            yield name

    def ids_at(self, path: str) -> list[int]:
        """Returns the run of a path, or nothing."""
        return list(self._ids([path]).values())

    def all_ids(self) -> Iterator[tuple[str, Path]]:
        """Yields the id and the path of each run."""
        for run_id, path in self._db.execute("SELECT run_id, path FROM runs"):
            yield run_id, self.full_path(path)

    def records(self, ids: Sequence[int]) -> list[tuple[int, RunRecord]]:
        """Returns runs with their ids; one that is gone meanwhile is left out."""
        records: list[tuple[int, RunRecord]] = []
        for chunk in _chunks(ids):
            cells = self._cells.of_runs(chunk)
            marks = ", ".join("?" * len(chunk))
            rows = self._db.execute(f"SELECT {_RECORD_COLUMNS} FROM runs WHERE id IN ({marks})", chunk)
            records += [(row[0], self._record(row, *cells[row[0]])) for row in rows]
        return records

    def _record(self, row: tuple[Any, ...], hparams: dict[str, Scalar], summary: dict[str, Any]) -> RunRecord:
        (
            path,
            run_id,
            kind,
            status,
            created,
            ended,
            updated,
            tags,
            notes,
            shown,
            archived,
            checkpoint,
            beat,
            problem,
        ) = row[1:]
        return RunRecord(
            path=self.full_path(path),
            run_id=run_id,
            kind=kind,
            status=status,
            created_at=created,
            ended_at=ended,
            updated_at=updated,
            tags=tuple(json.loads(tags)),
            notes=notes,
            display_name=shown,
            archived=bool(archived),
            hparams=hparams,
            summary=summary,
            checkpoint_path=checkpoint,
            heartbeat_at=beat,
            problem=problem,
        )


def _storable(path: str) -> Any:
    """Returns a path as SQLite takes it: a name that is no UTF-8 as its bytes."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return os.fsencode(path)
    return path


def _path(stored: Any) -> str:
    return os.fsdecode(stored) if isinstance(stored, bytes) else stored


def _shown(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()


def _parent(path: str) -> Any:
    return _storable(path.rpartition("/")[0]) if path else None


def _chunks(values: Sequence[Result]) -> Iterator[Sequence[Result]]:
    for start in range(0, len(values), _CHUNK):
        yield values[start : start + _CHUNK]
