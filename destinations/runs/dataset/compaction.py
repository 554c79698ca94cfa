"""`compact`: finished runs become a Parquet dataset, in a folder or a bucket.

What is new or changed since the last time is read, and nothing else. The files of a compaction are put first,
then the manifest that names them: whoever reads sees the state before or the one after, whatever happens in
between, and a compaction that was killed is simply done again. See `manifest.py`.
"""

import hashlib
import logging
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import attrs

from destinations.run_directory.layout import JOURNAL_FOLDER
from destinations.runs.errors import DatasetError
from destinations.runs.record import RunRecord
from destinations.runs.run import Run
from destinations.runs.series import run_blocks
from destinations.runs.sql import PARQUET, quoted
from uploads import RemoteConflictError, Store, UploadQueue, open_store

from .manifest import (
    TABLES,
    DataFile,
    Manifest,
    Part,
    all_names,
    latest_manifest,
    manifest_name,
    manifests,
    read_manifest,
)
from .staging import Staging
from .store_files import connect, path_of
from .tables import RunRow, write_batch, write_rows, write_table

__all__ = ["CompactReport", "compact"]

_log = logging.getLogger("destinations")

_FILE_POINTS = 4_000_000
_PART_POINTS = 50_000_000
_PART_RUNS = 5_000
_SMALL_PART_POINTS = 1_000_000
_MOST_SMALL_PARTS = 16
_UPLOAD_SECONDS = 24 * 3600.0
_MEMORY = "1GB"
_ORDER = "metric, run_id, rank, step NULLS FIRST, row"


@attrs.frozen
class CompactReport:
    """What a compaction did.

    Attributes:
        uri: of the dataset.
        generation: of the state that it has now.
        runs: how many runs it has now.
        points: how many points it has now.
        size: bytes of the points.
        added: runs that were not in it before.
        changed: runs whose points were replaced.
        updated: runs of which only what is said about them was replaced, such as notes.
        unchanged: runs that cost a look.
        alive: runs that are being written; left out, with what the dataset has of them.
        empty: runs without metrics.
        duplicates: paths left out, for another run has the same id and is newer.
        seconds: how long it took.
    """

    uri: str
    generation: int
    runs: int
    points: int
    size: int
    added: int = 0
    changed: int = 0
    updated: int = 0
    unchanged: int = 0
    alive: int = 0
    empty: int = 0
    duplicates: tuple[Path, ...] = ()
    seconds: float = 0.0


def compact(
    runs: "Iterable[Run]",
    dest: "str | PathLike[str] | Store",
    *,
    store_options: dict[str, Any] | None = None,
    scratch: "str | PathLike[str] | None" = None,
    memory_limit: str = _MEMORY,
    file_points: int = _FILE_POINTS,
    small_parts: int = _MOST_SMALL_PARTS,
    clock: Callable[[], float] = time.time,
) -> CompactReport:
    """Brings finished runs into a dataset: those that are new in it, or have changed.

    A run has ended, or its process has (its heartbeat is old). What the dataset has of runs that are gone
    from `runs` stays. Run ids tell runs apart.

    Blocks until everything is in the store; one compaction of a dataset at a time, a second one fails at its
    end.

    Args:
        runs: what to put into it, as `open_runs` returns them.
        dest: a path, or what `uploads.open_store` takes: `s3://bucket/dataset`; or a store.
        store_options: for `uploads.open_store`.
        scratch: where to keep files while they are made, about 40 bytes a point of a part of at most 50
            million points.
        memory_limit: of DuckDB; about 200 bytes a point of `file_points` come on top.
        file_points: about how many points a file has.
        small_parts: how many parts of less than a million points there may be, before they are made one.
        clock: the time in seconds since 1970.

    Raises:
        DatasetError: `dest` holds something else, or another compaction was faster.
        ImportError: DuckDB is not installed.
        uploads.UploadError: the store refuses.
    """
    started = clock()
    store = open_store(str(dest), **(store_options or {})) if isinstance(dest, str | PathLike) else dest
    before = latest_manifest(store)
    with tempfile.TemporaryDirectory(prefix="compact-", dir=scratch) as name:
        connection = connect(store, memory_limit=memory_limit, temp_directory=f"{name}/spill")
        try:
            work = _Compaction(
                store, connection, Path(name), before, file_points=file_points, small_parts=small_parts
            )
            after = work.run(runs, clock)
        finally:
            connection.close()
    _remove_old(store, after.generation)
    return attrs.evolve(
        work.report,
        generation=after.generation,
        runs=after.runs,
        points=after.points,
        size=sum(file.size for part in after.parts for file in part.files),
        seconds=clock() - started,
    )


@attrs.frozen
class _Known:
    part: str
    metrics_state: str
    record_state: str
    points: int


class _Compaction:
    """One compaction, from what was found to the next manifest."""

    def __init__(
        self,
        store: Store,
        connection: Any,
        folder: Path,
        before: Manifest,
        *,
        file_points: int,
        small_parts: int,
    ) -> None:
        self._store = store
        self._connection = connection
        self._folder = folder
        self._before = before
        self._file_points = file_points
        self._small_parts = small_parts
        self._generation = before.generation + 1
        self._token = uuid.uuid4().hex[:8]
        self._made = 0
        self._new_files: dict[str, Path] = {}
        self._renamed: dict[str, str] = {}
        self.report = CompactReport(store.uri(), before.generation, before.runs, before.points, 0)

    def run(self, runs: Iterable[Run], clock: Callable[[], float]) -> Manifest:
        """Does everything; returns the state that the dataset has afterwards."""
        known = self._known()
        new, told = self._choose(runs, known)
        if not new and not told:
            return self._before
        replaced = [run.run_id for run, _, _ in new if run.run_id in known]
        affected = {known[run_id].part for run_id in replaced}
        parts = [part for part in self._before.parts if part.id not in affected]
        kept = [self._without(part, replaced) for part in self._before.parts if part.id in affected]
        parts += [part for part in kept if part.files]
        rows: list[RunRow] = []
        for group in _groups(new):
            part, found = self._part(group)
            rows += found
            parts += [part] if part.files else []
        parts = self._merged(parts)
        rows += [
            RunRow.of(run, known[run.run_id].points, known[run.run_id].part, states[0], states[1])
            for run, *states in told
        ]
        rows = [attrs.evolve(row, part=self._renamed.get(row.part, row.part)) for row in rows]
        tables = self._tables(rows)
        counted = len(known.keys() | {row.record.run_id for row in rows})
        after = Manifest(self._generation, clock(), counted, tuple(parts), tables)
        self._commit(after)
        return after

    # --- what there is
    # ---------------------------------------------------------------------------------------------

    def _known(self) -> dict[str, _Known]:
        if not self._before.tables:
            return {}
        path = path_of(self._store, self._before.tables["runs"])
        found = self._connection.execute(
            f"SELECT run_id, part, metrics_state, record_state, points FROM read_parquet({quoted(path)})"
        ).fetchall()
        return {run_id: _Known(*rest) for run_id, *rest in found}

    def _choose(
        self, runs: Iterable[Run], known: dict[str, _Known]
    ) -> tuple[list[tuple[Run, str, str]], list[tuple[Run, str, str]]]:
        """Returns the runs whose points are to be read, and those of which only the record is another."""
        newest: dict[str, Run] = {}
        duplicates = []
        counts = dict.fromkeys(("added", "changed", "updated", "unchanged", "alive", "empty"), 0)
        for run in runs:
            if run.alive:
                counts["alive"] += 1
                continue
            other = newest.get(run.run_id)
            if other is not None:
                older, run = sorted((other, run), key=lambda one: one.updated_at or 0.0)  # noqa: PLW2901
                duplicates.append(older.path)
            newest[run.run_id] = run
        new, told = [], []
        for run_id, run in newest.items():
            states = _metrics_state(run.path), _record_state(run.record)
            before = known.get(run_id)
            if before is None or before.metrics_state != states[0]:
                counts["added" if before is None else "changed"] += 1
                new.append((run, *states))
            elif before.record_state != states[1]:
                counts["updated"] += 1
                told.append((run, *states))
            else:
                counts["unchanged"] += 1
            counts["empty"] += not states[0]
        changed: dict[str, Any] = {"duplicates": tuple(duplicates), **counts}
        self.report = attrs.evolve(self.report, **changed)
        return new, told

    # --- points
    # ----------------------------------------------------------------------------------------------------

    def _part(self, group: Sequence[tuple[Run, str, str]]) -> tuple[Part, list[RunRow]]:
        """Writes the points of some runs."""
        identifier = f"{self._generation:08d}-{self._token}-{self._next()}"
        rows, files = [], []
        with Staging(self._folder / "points.bin") as staging:
            for run, metrics_state, record_state in group:
                points = _stage(staging, run)
                rows.append(RunRow.of(run, points, identifier, metrics_state, record_state))
            for batch in staging.batches(self._file_points):
                name, path = self._new_file("metrics")
                write_batch(self._connection, batch, path)
                files.append(DataFile(name, len(batch), path.stat().st_size))
        return Part(identifier, tuple(files)), rows

    def _without(self, part: Part, run_ids: Sequence[str]) -> Part:
        """Writes the files of a part again, without some runs."""
        files = []
        for file in part.files:
            name, path = self._new_file("metrics")
            source = f"read_parquet({quoted(path_of(self._store, file.name))})"
            condition = "run_id NOT IN (SELECT unnest($runs::VARCHAR[]))"
            files += self._copied(
                f"SELECT * FROM {source} WHERE {condition} ORDER BY {_ORDER}", name, path, run_ids
            )
        return Part(part.id, tuple(files))

    def _merged(self, parts: list[Part]) -> list[Part]:
        """Makes one part of many small ones, which many small compactions have left."""
        small = [part for part in parts if part.points < _SMALL_PART_POINTS]
        if len(small) <= self._small_parts:
            return parts
        name, path = self._new_file("metrics")
        sources = ", ".join(quoted(self._path_of(file.name)) for part in small for file in part.files)
        files = self._copied(f"SELECT * FROM read_parquet([{sources}]) ORDER BY {_ORDER}", name, path, None)
        identifier = f"{self._generation:08d}-{self._token}-{self._next()}"
        self._renamed = {part.id: identifier for part in small}
        for part in small:
            for file in part.files:
                self._new_files.pop(file.name, None)
        return [part for part in parts if part not in small] + [Part(identifier, tuple(files))]

    def _copied(self, query: str, name: str, path: Path, run_ids: Sequence[str] | None) -> list[DataFile]:
        parameters = None if run_ids is None else {"runs": list(run_ids)}
        self._connection.execute(f"COPY ({query}) TO {quoted(path)} {PARQUET}", parameters)
        # All is fetched: DuckDB refuses other work while there may be more.
        ((points,),) = self._connection.execute(
            f"SELECT count(*) FROM read_parquet({quoted(path)})"
        ).fetchall()
        if not points:
            del self._new_files[name]
            return []
        return [DataFile(name, points, path.stat().st_size)]

    # --- tables
    # ----------------------------------------------------------------------------------------------------

    def _tables(self, rows: Sequence[RunRow]) -> dict[str, str]:
        lines = write_rows(rows, self._folder)
        self._connection.execute(
            "CREATE TEMP TABLE replaced AS SELECT unnest($runs::VARCHAR[]) AS run_id",
            {"runs": [row.record.run_id for row in rows]},
        )
        tables = {}
        for table in TABLES:
            name, path = self._new_file("tables")
            old = self._before.tables.get(table)
            old_path = None if old is None else path_of(self._store, old)
            write_table(self._connection, table, lines[table], old_path, self._renamed, path)
            tables[table] = name
        return tables

    # --- files
    # -----------------------------------------------------------------------------------------------------

    def _next(self) -> int:
        self._made += 1
        return self._made

    def _new_file(self, folder: str) -> tuple[str, Path]:
        name = f"{folder}/{self._generation:08d}-{self._token}-{self._next():05d}.parquet"
        path = self._folder / name.replace("/", "-")
        self._new_files[name] = path
        return name, path

    def _path_of(self, name: str) -> str:
        path = self._new_files.get(name)
        return path_of(self._store, name) if path is None else str(path)

    def _commit(self, manifest: Manifest) -> None:
        """Puts everything, then the manifest."""
        name = manifest_name(manifest.generation)
        text = self._folder / "manifest.json"
        text.write_text(manifest.to_json(), encoding="utf-8")
        wanted = manifest.names()
        queue = UploadQueue(
            self._store, spool=self._folder / "spool", isolation="threads", free_bytes=0, close_at_exit=False
        )
        try:
            handles = [
                queue.submit(path, remote, move=True)
                for remote, path in self._new_files.items()
                if remote in wanted
            ]
            for handle in handles:
                handle.result(_UPLOAD_SECONDS)
            queue.submit(text, name).result(_UPLOAD_SECONDS)
        except RemoteConflictError as error:
            raise DatasetError(
                f"another compaction of {self._store.uri()} finished first. Run this one again."
            ) from error
        finally:
            queue.close(timeout_seconds=0)


def _stage(staging: Staging, run: Run) -> int:
    points = 0
    for rank in run.ranks():
        first_row = 0
        for block in run_blocks(run.path, rank):
            if len(block):
                points += staging.add(run.run_id, rank, block, first_row)
                first_row += len(block)
    return points


def _groups(found: Sequence[tuple[Run, str, str]]) -> Iterator[list[tuple[Run, str, str]]]:
    """Returns runs in groups that make a part each.

    How many points a run has is guessed by the size of its files.
    """
    group: list[tuple[Run, str, str]] = []
    points = 0
    for one in found:
        guess = sum(path.stat().st_size for path in one[0].path.glob("metrics*.csv")) // 10
        if group and (points + guess > _PART_POINTS or len(group) >= _PART_RUNS):
            yield group
            group, points = [], 0
        group.append(one)
        points += guess
    if group:
        yield group


def _metrics_state(run_dir: Path) -> str:
    """Returns a text that is another when the metrics are; empty where there are none."""
    found = []
    for path in sorted([*run_dir.glob("metrics*.csv"), *(run_dir / JOURNAL_FOLDER).glob("*/*.journal")]):
        try:
            stat = path.stat()
        except OSError:
            continue
        found.append(f"{path.relative_to(run_dir)}:{stat.st_size}:{stat.st_mtime_ns}")
    return (
        hashlib.sha256("\n".join(found).encode("utf-8", "surrogateescape")).hexdigest()[:16] if found else ""
    )


def _record_state(record: RunRecord) -> str:
    values = [
        value if not hasattr(value, "items") else sorted(value.items(), key=str)
        for name, value in attrs.asdict(record, recurse=False).items()
        if name not in {"heartbeat_at", "problem"}
    ]
    return hashlib.sha256(repr(values).encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _remove_old(store: Store, generation: int) -> None:
    """Removes files that neither this state nor the one before it names.

    Those of a later number belong to a compaction that is at work; those of this number or an earlier one to
    states that are gone, or to a compaction that was killed or has lost.
    """
    if generation == 0:
        return
    wanted: set[str] = set()
    for number in manifests(store)[-2:]:
        wanted |= read_manifest(store, number).names()
    for name in all_names(store):
        digits = name.rpartition("/")[2][:8]
        if name not in wanted and digits.isdecimal() and int(digits) <= generation:
            store.delete(name)
