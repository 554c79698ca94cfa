"""The index: the results of scans in SQLite, one file per root and machine, which may be deleted at any time.

The file is in the user's cache folder, never among the runs, whose folder may be shared or on a file system
that SQLite does not support. A corrupt file, or one of another version, is deleted and rebuilt. If no file
can be written, the index is in memory and ends with the process; `Database.warnings` has a warning.

**Threads and processes.** An index belongs to one thread at a time; `Runs` holds a lock. Any number of
processes may scan at once. The last one to read a run wins, and the next scan corrects it.
"""

# ruff: noqa: S608  # Statements are built from names of our own columns, numbers and question marks only.

import functools
import hashlib
import json
import math
import operator
import os
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from destinations.runs.files import write_json
from destinations.runs.record import Extremes, FieldType, RunRecord, Scalar, stored_fields

from .database import CorruptIndexError, Database
from .filter_sql import ESCAPE, Order, Query, compile_query, escape_nul, unescape_nul, with_found
from .filters import Field, Node, fields_of
from .scan import IndexState, ScanChange

__all__ = ["VERSION", "Index", "cache_folder", "index_name"]

VERSION = 6
"""The version of the tables; increase it when a field is added to `RunRecord`."""

_CHUNK = 500
_BATCH = 1000

# The names of the hyperparameters and of the metrics of a run.
_Layout = tuple[tuple[str, ...], tuple[str, ...]]

_SQL_TYPES: Mapping[FieldType, str] = {"text": "TEXT", "texts": "TEXT", "time": "REAL", "bool": "INTEGER"}
# Columns that a scan fills without reading the sidecar.
_FROM_SCAN = ("name", "heartbeat_at", "problem")
_FROM_RECORD = [field for field in stored_fields() if field.name not in _FROM_SCAN]
_RECORD_COLUMNS = [field for field in stored_fields() if field.name != "name"]
_TYPED_COLUMNS = ", ".join(f"{field.name} {_SQL_TYPES[field.type]}" for field in _FROM_RECORD)
_TABLES = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value);
CREATE TABLE folders (path PRIMARY KEY, parent, mtime_ns INTEGER, inode INTEGER) WITHOUT ROWID;
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, path UNIQUE, parent, mtime_ns INTEGER, inode INTEGER, flags INTEGER, files TEXT,
    is_orphan INTEGER, name TEXT, heartbeat_at REAL, problem TEXT, {_TYPED_COLUMNS}
);
CREATE TABLE names (id INTEGER PRIMARY KEY, grp TEXT, name TEXT, UNIQUE (grp, name));
CREATE TABLE layouts (id INTEGER PRIMARY KEY, names TEXT UNIQUE);
CREATE TABLE places (name INTEGER, layout INTEGER, path TEXT, PRIMARY KEY (name, layout)) WITHOUT ROWID;
CREATE TABLE cells (run INTEGER PRIMARY KEY, layout INTEGER, cells TEXT);
CREATE TABLE extremes (
    metric TEXT, run INTEGER, mtime_ns INTEGER, files TEXT, heartbeat_at REAL,
    min, min_step INTEGER, max, max_step INTEGER, PRIMARY KEY (metric, run)
) WITHOUT ROWID
"""
_INDEXES = (
    "runs_by_id ON runs (run_id)",
    "runs_by_creation ON runs (created_at)",
    "runs_open ON runs (flags, heartbeat_at) WHERE flags != 0",
    "runs_with_problems ON runs (path, problem) WHERE problem IS NOT NULL",
)
_UPSERT = f"INSERT OR REPLACE INTO runs VALUES ({', '.join('?' * (11 + len(_FROM_RECORD)))})"
_ARE_STATE_TYPES = (
    "typeof(mtime_ns) = 'integer' AND typeof(inode) = 'integer' AND typeof(flags) = 'integer' "
    "AND typeof(files) = 'text' AND typeof(heartbeat_at) IN ('real', 'null') AND typeof(run_id) = 'text'"
)


def cache_folder() -> Path:
    """Returns the folder of indexes: in `$XDG_CACHE_HOME`, or the cache folder of the platform.

    Raises:
        RuntimeError: the user has no home directory.
    """
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(chosen):  # noqa: PTH117  # the specification ignores a relative one
        base = Path(chosen)
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path.home() / ".cache"
    return base / "training-destinations" / "runs"


def index_name(root: str) -> str:
    """Returns the name of the index file of a root on this machine."""
    # Several machines may share a home directory.
    digest = hashlib.sha256(os.fsencode(f"{os.uname().nodename}\0{root}")).hexdigest()[:16]
    name = "".join(char if char.isascii() and char.isalnum() else "-" for char in Path(root).name)[:40]
    return f"{name or 'root'}-{digest}.sqlite"


class Index:
    """The index of one root: runs in the table `runs`, their hyperparameters and metrics in `cells`.

    A run's values are one JSON array. Their names are a row of `layouts`, which runs with the same names
    share: without the names, a run is written and read in half the time. `places` has the JSON path of each
    name in a layout.

    `extremes` has the smallest and largest value of each requested metric, from `summary.json`. A row is
    valid as long as the folder, the files and the heartbeat of its run don't change.

    Args:
        root: the folder, absolute and without links.
        folder: the folder of the file; None for an index in memory.
        options: arguments of `Database`.
    """

    def __init__(self, root: str, folder: Path | None, **options: Any) -> None:
        self.root = root
        # Additions since the last transaction: columns, place of the layout in `_layouts`, and values, by
        # path; layouts, each with its place; and runs that were not read.
        self._read: dict[str, tuple[tuple[Any, ...], int, str]] = {}
        self._layouts: dict[_Layout, int] = {}
        self._last_layout: tuple[_Layout | None, int] = None, 0
        self._touched: list[ScanChange] = []
        path = None if folder is None else folder / index_name(root)
        self.database = self._db = Database(path, self._make_tables, VERSION, **options)

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    def _make_tables(self, db: sqlite3.Connection) -> None:
        for statement in _TABLES.split(";"):
            db.execute(statement)
        db.execute("INSERT INTO meta VALUES ('root', ?)", (_storable(self.root),))

    # For the scan.

    def state(self) -> IndexState:
        """Returns the state that a scan compares folders with.

        Raises:
            CorruptIndexError: a column has values of a wrong type.
        """
        if self._db.execute(f"SELECT 1 FROM runs WHERE NOT ({_ARE_STATE_TYPES}) LIMIT 1").fetchone():
            raise CorruptIndexError("a column has values of a wrong type")
        self._forget()
        state = IndexState()
        children = state.children
        rows = self._db.execute(
            "SELECT path, parent, id, mtime_ns, inode, flags, files, heartbeat_at FROM runs"
        )
        for stored, parent, *row in rows:
            path = _path(stored)
            state.runs[path] = tuple(row)
            if parent is not None:
                children.setdefault(_path(parent), []).append(path)
        for stored, parent, mtime_ns, inode in self._db.execute(
            "SELECT path, parent, mtime_ns, inode FROM folders"
        ):
            path = _path(stored)
            state.folders[path] = (mtime_ns, inode)
            if parent is not None:
                children.setdefault(_path(parent), []).append(path)
        return state

    def add(self, change: ScanChange) -> None:
        """Adds a scan's change to the next transaction, which every thousandth change starts.

        It converts the record to rows at once: keeping a thousand records until then takes a fifth more time.
        """
        fields = change.fields
        if fields is None:
            self._touched.append(change)
        else:
            hparams, summary = fields.get("hparams", _NO_VALUES), fields.get("summary", _NO_VALUES)
            layout = tuple(hparams), tuple(summary)
            # Most runs have the layout of the previous run, and comparing is cheaper than hashing.
            if layout != self._last_layout[0]:
                self._last_layout = layout, self._layouts.setdefault(layout, len(self._layouts))
            cells = encode_cells([*hparams.values(), *summary.values()])
            self._read[change.path] = self._columns(change, fields), self._last_layout[1], cells
        if len(self._read) + len(self._touched) >= _BATCH:
            self.write()

    @property
    def has_changes(self) -> bool:
        """Whether there are changes that are not written yet."""
        return bool(self._read or self._touched)

    def write(
        self,
        changes: Iterable[ScanChange] = (),
        *,
        folders: Mapping[str, tuple[int, int]] | None = None,
        gone_runs: Iterable[str] = (),
        gone_folders: Iterable[str] = (),
    ) -> None:
        """Writes these changes and all added ones in one transaction."""
        for change in changes:
            self.add(change)
        with self._db.transaction():
            ids = [(number,) for number in self._ids(list(gone_runs)).values()]
            for table, column in (("cells", "run"), ("runs", "id")):
                self._db.executemany(f"DELETE FROM {table} WHERE {column} = ?", ids)
            if ids:
                self._db.execute("DELETE FROM extremes WHERE run NOT IN (SELECT id FROM runs)")
            self._db.executemany(
                "DELETE FROM folders WHERE path = ?", ((_storable(path),) for path in gone_folders)
            )
            self._db.executemany(
                "INSERT OR REPLACE INTO folders VALUES (?, ?, ?, ?)",
                ((_storable(path), _parent(path), *state) for path, state in (folders or {}).items()),
            )
            self._write_runs()
        self._forget()

    def _forget(self) -> None:
        self._read, self._layouts, self._last_layout, self._touched = {}, {}, (None, 0), []

    def _write_runs(self) -> None:
        (largest,) = self._db.execute("SELECT coalesce(max(id), 0) FROM runs").fetchone()
        ids = self._ids(list(self._read)) if largest else {}
        numbers = [self._number_of(layout) for layout in self._layouts]
        rows, cells = [], []
        for path, (columns, place, text) in self._read.items():
            number = ids.get(path)
            if number is None:
                largest += 1
                number = largest
            rows.append((number, *columns))
            cells.append((number, numbers[place], text))
        self._db.executemany(_UPSERT, rows)
        self._db.executemany("INSERT OR REPLACE INTO cells VALUES (?, ?, ?)", cells)
        self._touch(self._touched)

    def _number_of(self, layout: _Layout) -> int:
        """Returns the number of a layout. A new one gets the next number, and each of its names a place."""
        text = json.dumps(layout)
        if row := self._db.execute("SELECT id FROM layouts WHERE names = ?", (text,)).fetchone():
            return int(row[0])
        statement = "INSERT INTO layouts (names) VALUES (?) RETURNING id"
        ((number,),) = self._db.execute(statement, (text,)).fetchall()
        names = [("hparams", name) for name in layout[0]] + [("summary", name) for name in layout[1]]
        self._db.executemany("INSERT OR IGNORE INTO names (grp, name) VALUES (?, ?)", names)
        self._db.executemany(
            "INSERT INTO places SELECT id, ?, ? FROM names WHERE grp = ? AND name = ?",
            ((number, f"$[{place}]", *name) for place, name in enumerate(names)),
        )
        return int(number)

    def _columns(self, change: ScanChange, fields: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns the columns of a run except its number."""
        path = _storable(change.path)
        folder = change.path.rpartition("/")[2] or os.path.basename(self.root)  # noqa: PTH119  # of a text
        row: list[Any] = [
            path,
            _parent(change.path),
            change.folder_mtime_ns,
            change.folder_inode,
            change.flags,
            change.files,
            1 if change.is_orphan else 0,
            fields.get("display_name") or (folder if path is change.path else _shown(folder)),
            change.heartbeat_at,
            change.problem,
        ]
        values = [*_values_of({**_DEFAULTS, **fields})]
        for place, encode in _ENCODERS:
            values[place] = encode(values[place])
        return (*row, *values)

    def _touch(self, changes: Sequence[ScanChange]) -> None:
        """Updates known runs with a sidecar that can't be read, and keeps their records."""
        self._db.executemany(
            "UPDATE runs SET mtime_ns = ?, inode = ?, flags = ?, files = ?, heartbeat_at = ?, problem = ?, "
            "is_orphan = ? WHERE path = ?",
            (
                (
                    change.folder_mtime_ns,
                    change.folder_inode,
                    change.flags,
                    change.files,
                    change.heartbeat_at,
                    change.problem,
                    change.is_orphan,
                    _storable(change.path),
                )
                for change in changes
            ),
        )

    def _ids(self, paths: Sequence[str]) -> dict[str, int]:
        rows = self._rows_in("SELECT path, id FROM runs WHERE path IN", [_storable(path) for path in paths])
        return {_path(path): number for path, number in rows}

    def _rows_in(self, statement: str, values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """Yields the rows of a statement that ends with `IN`."""
        for start in range(0, len(values), _CHUNK):
            chunk = values[start : start + _CHUNK]
            yield from self._db.execute(f"{statement} ({', '.join('?' * len(chunk))})", chunk)

    def make_indexes(self) -> None:
        """Creates missing SQL indexes; call it after a scan.

        A first scan without them writes half as many bytes. With them, each transaction would change pages
        all over the indexes, and write these to the journal.
        """
        for index in _INDEXES:
            self._db.execute(f"CREATE INDEX IF NOT EXISTS {index}")

    # For the report.

    def counts(self, now: float) -> tuple[int, int, int, int]:
        """Returns the number of all runs, live ones, ones with a problem, and ones without a sidecar."""
        (runs,) = self._db.execute("SELECT count(*) FROM runs").fetchone()
        (alive,) = self._db.execute(
            # The condition on flags uses the index `runs_open`; few runs are open.
            "SELECT count(*) FROM runs WHERE flags != 0 AND run_alive(status, heartbeat_at, ?)",
            (now,),
        ).fetchone()
        damaged, orphans = self._db.execute(
            "SELECT count(*), coalesce(sum(is_orphan), 0) FROM runs WHERE problem IS NOT NULL"
        ).fetchone()
        return runs, alive, damaged, orphans

    def problems(self, limit: int) -> list[tuple[Path, str]]:
        """Returns folders with a problem, each with its problem."""
        rows = self._db.execute("SELECT path, problem FROM runs WHERE problem IS NOT NULL LIMIT ?", (limit,))
        return [(self.full_path(path), problem) for path, problem in rows]

    def run_ids(self, paths: Iterable[str]) -> list[str]:
        """Returns the ids of the runs with these paths."""
        rows = self._rows_in("SELECT run_id FROM runs WHERE path IN", [_storable(path) for path in paths])
        return [run_id for (run_id,) in rows]

    # For queries.

    def full_path(self, stored: Any) -> Path:
        """Returns the folder of a run."""
        path = _path(stored)
        return Path(self.root, path) if path else Path(self.root)

    def names(self, group: str) -> list[str]:
        """Returns the names of hyperparameters or metrics that any run has, or had."""
        rows = self._db.execute("SELECT name FROM names WHERE grp = ? ORDER BY id", (group,))
        return [name for (name,) in rows]

    def numbers(self, fields: Iterable[Field]) -> dict[Field, int]:
        """Returns the numbers of hyperparameters and metrics, leaving out names that no run has."""
        found: dict[Field, int] = {}
        for field in fields:
            if field.group != "run":
                statement = "SELECT id FROM names WHERE grp = ? AND name = ?"
                row = self._db.execute(statement, (field.group, field.name)).fetchone()
                if row is not None:
                    found[field] = int(row[0])
        return found

    def select(self, query: Query, limit: int | None) -> list[tuple[Any, float | None, int]]:
        """Returns runs in order: value to sort by, creation time, id; the newest first among equal values."""
        most = limit if limit is not None and query.order.is_newest_first else -1
        return query.rows(self._db.execute(f"{query.statement} LIMIT ?", (*query.values, most)))[:limit]

    def compile(self, node: Node | None, order: Order, *, now: float, archived: bool | None) -> Query:
        """Returns the query of a filter, after searching the texts of its regular expressions.

        Raises:
            BudgetError: an expression takes too long.
        """
        fields = {order.field, *(() if node is None else fields_of(node))}
        compiled = functools.partial(
            compile_query, cells=self.numbers(fields), root=self.root, now=now, archived=archived
        )

        def texts_of(field: Field) -> list[tuple[str, int]]:
            query = compiled(None, Order(field, descending=True))
            return query.texts(self._db.execute(query.statement, query.values))

        return compiled(None if node is None else with_found(node, texts_of), order)

    def best(
        self, metric: str, query: Query, read: Callable[[str], Extremes | None], *, is_max: bool
    ) -> list[tuple[float, int | None, float | None, int]]:
        """Returns the best value of a metric, its step, creation time and id for each run that has a value.

        Reads values that are unknown or out of date. The runs are in no particular order.

        Args:
            metric: the name of the metric.
            query: selects the runs.
            read: returns the extremes of the run in a folder; None if the run is unreadable.
            is_max: whether the largest value is the best one.
        """
        column = "max" if is_max else "min"
        # A folder time of 0 cannot be trusted.
        rows = self._db.execute(
            f"SELECT e.{column}, e.{column}_step, r.created_at, r.id, e.run IS NULL "
            f"FROM ({query.statement}) q JOIN runs r ON r.id = q.id LEFT JOIN extremes e ON e.metric = ? "
            "AND e.run = r.id AND r.mtime_ns = e.mtime_ns AND r.mtime_ns != 0 AND r.files = e.files "
            "AND r.heartbeat_at IS e.heartbeat_at",
            (*query.values, metric),
        ).fetchall()
        found = [row[:4] for row in rows if row[0] is not None]
        unread = self._rows_in(
            "SELECT created_at, id, path, mtime_ns, files, heartbeat_at FROM runs WHERE id IN",
            [row[3] for row in rows if row[4]],
        )
        new = []
        # Fetch all rows first, so that nothing is locked while files are read.
        for created_at, number, path, *state in list(unread):
            values = read(os.path.join(self.root, _path(path)))  # noqa: PTH118  # Path is slower
            if values is not None:
                value, step = values[2:] if is_max else values[:2]
                if value is not None:
                    found.append((value, step, created_at, number))
                new.append((metric, number, *state, *values))
        if new:
            with self._db.transaction():
                marks = ", ".join("?" * 9)
                self._db.executemany(f"INSERT OR REPLACE INTO extremes VALUES ({marks})", new)
        return found

    def count(self) -> int:
        """Returns the number of runs."""
        (count,) = self._db.execute("SELECT count(*) FROM runs").fetchone()
        return int(count)

    def ids_where(self, condition: str, values: Sequence[Any]) -> list[int]:
        """Returns the ids of runs that meet a condition, which must come from this package."""
        rows = self._db.execute(f"SELECT id FROM runs r WHERE {condition} ORDER BY path", values)
        return [number for (number,) in rows]

    def names_of_runs(self) -> Iterator[str]:
        """Yields the id and the name of up to ten thousand runs, newest first."""
        for run_id, name in self._db.execute(
            "SELECT run_id, name FROM runs ORDER BY created_at DESC LIMIT 10000"
        ):
            yield run_id
            yield name

    def ids_at(self, paths: Sequence[str]) -> list[int]:
        """Returns the ids of the runs at some paths."""
        return list(self._ids(paths).values())

    def ids_of_runs(self) -> list[str]:
        """Returns the id of each run, as its files have it."""
        return [run_id for (run_id,) in self._db.execute("SELECT run_id FROM runs")]

    def paths_of(self, run_id: str) -> list[Path]:
        """Returns the folders of the runs with an id."""
        rows = self._db.execute("SELECT path FROM runs WHERE run_id = ? ORDER BY path", (run_id,))
        return [self.full_path(path) for (path,) in rows]

    def records(self, ids: Sequence[int]) -> list[tuple[int, RunRecord]]:
        """Returns runs with their ids, leaving out runs that were removed meanwhile.

        Raises:
            CorruptIndexError: a column has values of a wrong type.
        """
        layouts: dict[int | None, tuple[list[str], list[str]]] = {None: ([], [])}
        columns = ", ".join(field.name for field in _RECORD_COLUMNS)
        source = "runs LEFT JOIN cells ON run = id"
        statement = f"SELECT id, path, layout, cells, {columns} FROM {source} WHERE id IN"
        rows = list(self._rows_in(statement, ids))
        wanted = list({row[2] for row in rows} - layouts.keys())
        try:
            for number, names in self._rows_in("SELECT id, names FROM layouts WHERE id IN", wanted):
                hparams, summary = json.loads(names)
                layouts[number] = hparams, summary
            return [(row[0], self._record(row, layouts[row[2]])) for row in rows]
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise CorruptIndexError(f"a row cannot be read: {error}") from error

    def _record(self, row: tuple[Any, ...], names: tuple[list[str], list[str]]) -> RunRecord:
        _, path, _, cells, *columns = row
        fields: dict[str, Any] = {}
        for field, stored in zip(_RECORD_COLUMNS, columns, strict=True):
            fields[field.name] = None if stored is None else _DECODERS[field.type](stored)
        values = decode_cells(cells or "[]")
        hparams, summary = names
        if len(values) != len(hparams) + len(summary):
            raise ValueError(f"{len(values)} values of {len(hparams) + len(summary)} names")
        fields["hparams"] = dict(zip(hparams, values, strict=False))
        fields["summary"] = dict(zip(summary, values[len(hparams) :], strict=True))
        return RunRecord(path=self.full_path(path), **fields)


def encode_cells(values: Sequence[Scalar]) -> str:
    """Returns values as JSON that SQLite reads: NaN is `[]`, infinities are 9e999."""
    text = write_json(values)
    # Few texts have a backslash, "NaN", "Infinity" or "null", and searching for one letter is fast.
    if "\\" in text or ESCAPE in text or "N" in text or "I" in text or ("n" in text and "null" in text):
        finite = all(math.isfinite(value) for value in values if isinstance(value, float))
        if not finite or "\\u0000" in text or ESCAPE in text:
            return f"[{','.join(map(_encode_cell, values))}]"
    return text


def _encode_cell(value: Scalar) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "[]" if math.isnan(value) else "9e999" if value > 0 else "-9e999"
    return json.dumps(escape_nul(value) if isinstance(value, str) else value, ensure_ascii=False)


def decode_cells(text: str) -> list[Scalar]:
    """Reverses `encode_cells`."""
    values: list[Any] = json.loads(text)
    if "[]" in text or ESCAPE in text:
        return [
            math.nan if value == [] else unescape_nul(value) if isinstance(value, str) else value
            for value in values
        ]
    return values


def _encode_texts(texts: Sequence[str]) -> str:
    return write_json([escape_nul(text) for text in texts]) if texts else "[]"


def _decode_texts(stored: str) -> tuple[str, ...]:
    return tuple(unescape_nul(_text(text)) for text in json.loads(stored))


def _text(stored: Any) -> str:
    if not isinstance(stored, str):
        raise TypeError(f"expected text, got {type(stored).__name__}")
    return stored


_ENCODE_OF: Mapping[FieldType, Callable[[Any], Any]] = {"texts": _encode_texts, "bool": int}
_DECODERS: Mapping[FieldType, Callable[[Any], Any]] = {
    "text": _text,
    "texts": _decode_texts,
    "time": float,
    "bool": bool,
}
_ENCODERS = [
    (place, _ENCODE_OF[field.type]) for place, field in enumerate(_FROM_RECORD) if field.type in _ENCODE_OF
]
_values_of = operator.itemgetter(*(field.name for field in _FROM_RECORD))
_DEFAULTS = {field.name: field.default for field in _FROM_RECORD}
_NO_VALUES: Mapping[str, Any] = {}


def _storable(path: str) -> Any:
    """Returns a path as SQLite accepts it: as bytes if it is not UTF-8."""
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
