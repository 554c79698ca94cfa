"""What scans have found, in SQLite: a cache, one file for each root and machine, which may be deleted at any time.

It lies in the cache folder of the user, never in the folder of the runs, which may be shared and on a file system where SQLite
does not work. A file that is damaged or of another version is deleted and made anew; where there can be no file, the index is in
memory, and gone with the process. `warnings` says so.

Hyperparameters and last values are in `cells`, the file is the matter of `database`.

**Threads and processes.** An index belongs to one thread at a time; `Runs` sees to that. Any number of processes may scan at once: the
last one to have read a run is right, or the next scan corrects it.
"""

# ruff: noqa: S608  # All that is put into a statement is names of tables and columns that are made here, numbers and question marks.

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ._json import written_texts
from .cells import CELL_TABLES, Cells
from .database import Database, cache_folder, index_name
from .filter_sql import Query
from .findings import RUNNING, Found, Known
from .reading import Reading
from .record import RunRecord, Scalar

__all__ = ["VERSION", "Index", "cache_folder"]

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
