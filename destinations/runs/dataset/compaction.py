"""`compact`: writes finished runs to the Delta tables of a dataset, in a folder or a bucket.

Reads the runs that are new or changed since the last compaction. They are written in groups; the rows of a
group are streamed to each table in one transaction, and replace what the table had of these runs. See
`tables.py` for what readers see meanwhile. Every commit names the same application: if another compaction
commits first, this one starts over with what is left to do.
"""

import contextlib
import hashlib
import itertools
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np

from destinations.run_directory.layout import JOURNAL_FOLDER
from destinations.runs.content.series import MISSING_STEP, Block, run_blocks
from destinations.runs.errors import DatasetError, RunsError
from destinations.runs.record import RunRecord
from destinations.runs.run import Run
from uploads import Store, UploadError, open_store, redact

from .reading import DatasetRun
from .tables import APPLICATION, COLUMNS, Location, TableVersions, arrow_schema, delta_errors, json_of, load

__all__ = ["CompactReport", "compact"]

# In one transaction; the ids of runs that changed are in its predicate.
_GROUP_RUNS = 500
_TRIES = 20
_MAX_TIME = 1e12
_SPILL_BYTES = 1 << 30
# The disk is the limit; by default it would be 100 GB, which 10^9 values nearly take.
_NO_LIMIT = 1 << 60
# What `optimize` sorts tables by.
_ORDERS = {"metrics": ["metric", "run_id"], "hparams": ["name"], "summary": ["metric"]}

Change = Literal["added", "changed", "updated"]


@attrs.frozen
class CompactReport:
    """What a compaction did.

    ```python
    with open_runs("runs") as runs:
        report = compact(runs, "dataset")
    print(report.added, report.points)  # 1 4
    ```

    Attributes:
        uri: of the dataset.
        version: of the dataset, for `open_runs(uri, version=…)`.
        runs: how many runs the dataset has.
        points: how many values the dataset has.
        size: bytes of the table `metrics`.
        added: runs that were not in it before.
        changed: runs whose values were replaced.
        updated: runs of which only the record was replaced, such as notes.
        unchanged: runs that were not read.
        removed: runs that were removed from it, because they are gone.
        alive: runs that are being written, which were left out.
        empty: runs without metrics.
        damaged: path and problem of runs that cannot be read, which were left out.
        duplicates: paths left out, because another run has the same id and is newer.
        seconds: duration.
    """

    uri: str
    version: int
    runs: int
    points: int
    size: int
    added: int = 0
    changed: int = 0
    updated: int = 0
    unchanged: int = 0
    removed: int = 0
    alive: int = 0
    empty: int = 0
    damaged: tuple[tuple[Path, str], ...] = ()
    duplicates: tuple[Path, ...] = ()
    seconds: float = 0.0


def compact(
    runs: Iterable[Run],
    dest: str | os.PathLike[str],
    *,
    store_options: dict[str, Any] | None = None,
    optimize: bool = False,
    vacuum_days: float | None = None,
    remove_gone: bool = False,
    single_writer: bool = False,
    clock: Callable[[], float] = time.time,
) -> CompactReport:
    """Writes finished runs to a dataset: those that are new in it, or have changed.

    ```python
    with open_runs("runs") as runs:
        compact(runs, "dataset", optimize=True)        # or "s3://bucket/dataset"
    ```

    A run has ended, or its process has (its heartbeat is old). Run ids tell runs apart.

    Blocks until everything is in the store. Any number of compactions may run at once: of two that commit at
    the same time one starts over. Memory does not grow with the runs.

    Args:
        runs: what to write, as `open_runs` returns them.
        dest: a path, or `s3://bucket/dataset`, `gs://…`, `az://…` with options as `uploads.open_store`
            takes them.
        store_options: more options, also credentials.
        optimize: whether to sort the values by metric and run afterwards (Z-order), in files of about 100 MB.
        vacuum_days: removes what versions older than this many days need; None removes nothing. 0 also
            removes the files of a compaction that is running.
        remove_gone: whether to remove the runs that the dataset has and `runs` does not; they stay in earlier
            versions. Otherwise they stay.
        single_writer: whether no other compaction ever writes to `dest`; needed for a server that overwrites
            what a put should only create.
        clock: the time in seconds since 1970.

    Raises:
        DatasetError: `dest` has something else, cannot be written, or others committed first again and
            again.
        ValueError: `vacuum_days` is negative or not finite.
        ImportError: deltalake is not installed.
    """
    started = clock()
    if vacuum_days is not None and not 0 <= vacuum_days < math.inf:
        raise ValueError(f"vacuum_days must be 0 or more, got {vacuum_days!r}")
    location = Location.of(dest, store_options or {})
    chosen = list(runs)
    if any(isinstance(run, DatasetRun) for run in chosen):
        raise DatasetError(
            "these runs are of a dataset, which has no files to read. Compact folders of runs."
        )
    work = _Compaction(location, chosen)
    with delta_errors(location.uri):
        _create(location, dest, store_options or {}, is_shared=not single_writer)
        work.repeat(work.write_runs)
        if remove_gone:
            work.repeat(work.remove_gone)
        if optimize:
            work.repeat(work.optimize)
        if vacuum_days is not None:
            work.repeat(lambda: work.vacuum(vacuum_days))
    return attrs.evolve(work.report(), seconds=clock() - started)


def _create(
    location: Location, place: str | os.PathLike[str], options: dict[str, Any], *, is_shared: bool
) -> None:
    """Creates the tables that are missing; `runs` last, which makes it a dataset.

    Args:
        location: of the dataset.
        place: the same, as the store takes it.
        options: of the store.
        is_shared: whether there may be other writers.
    """
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError

    try:
        store = open_store(str(place), **options)
        if is_shared and not getattr(store, "refuses_overwrite", lambda: True)():
            raise DatasetError(
                f"{store.uri()} overwrites what a put should only create, so that two compactions at once "
                "would lose data. Pass single_writer=True if there is only one at a time."
            )
        missing = []
        for name in COLUMNS:
            # Not `is_deltatable`, which holds the interpreter's lock while it waits for the store.
            try:
                location.open(name)
            except TableNotFoundError:
                missing.append(name)
        if missing and (foreign := list(itertools.islice(_foreign_names(location, store, missing), 3))):
            raise DatasetError(
                f"{location.uri} has something else than a dataset: {', '.join(foreign)}. "
                "Choose a new or empty folder."
            )
    except UploadError as error:
        raise DatasetError(f"dataset {redact(str(place))} cannot be written: {error}") from error
    for name in missing:
        if not location.is_remote:
            Path(location.table(name)).mkdir(parents=True, exist_ok=True)
        DeltaTable.create(
            location.table(name), arrow_schema(name), mode="ignore", storage_options=location.options
        )


def _foreign_names(location: Location, store: Store, missing: Sequence[str]) -> Iterator[str]:
    """Yields the names of what is not of a dataset; `vacuum` removes what is in the folder of a table."""
    if location.is_remote:
        names = (found.name for found in store.list())
    else:
        root = Path(location.uri)
        found = sorted(root.glob("*")) + [path for name in missing for path in sorted(root.glob(f"{name}/*"))]
        names = (path.relative_to(root).as_posix() for path in found)
    for name in names:
        table, *rest = name.split("/")
        if table not in COLUMNS or (table in missing and rest and rest[0] != "_delta_log"):
            yield name


class _ConflictError(Exception):
    """Another compaction committed first."""


class _RunFailedError(Exception):
    """A run of the group cannot be read."""


@attrs.define
class _Item:
    """A run to write."""

    run: Run
    change: Change
    metrics_state: str
    record_state: str
    points: int = 0


class _Compaction:
    """One compaction, over as many attempts as it takes."""

    def __init__(self, location: Location, runs: Sequence[Run]) -> None:
        self._location = location
        self._runs = runs
        # The dataset as this attempt found it, and the tables that it has written to since.
        self._snapshot: TableVersions
        self._written: dict[str, Any] = {}
        self._changes: dict[str, str] = {}
        self._damaged: dict[Path, str] = {}
        self._left_out: dict[str, Any] = {}

    def repeat(self, act: Callable[[], None]) -> None:
        """Acts on the newest version; starts over while others commit first."""
        for attempt in range(_TRIES):
            self._snapshot, self._written = load(self._location), {}
            try:
                return act()
            except _ConflictError:
                time.sleep(random.uniform(0, min(0.1 * 2**attempt, 10.0)))  # noqa: S311  # only to spread
        raise DatasetError(
            f"other compactions of {self._location.uri} committed first {_TRIES} times. Run this one again."
        )

    def report(self) -> CompactReport:
        """Returns what was done."""
        snapshot = load(self._location)
        files = snapshot.tables["metrics"].get_add_actions(flatten=True)
        counts: dict[str, Any] = Counter(self._changes.values())
        return CompactReport(
            self._location.uri,
            snapshot.version,
            snapshot.tables["runs"].count(),
            snapshot.tables["metrics"].count(),
            size=sum(files.column("size_bytes").to_pylist()),
            damaged=tuple(self._damaged.items()),
            **counts,
            **self._left_out,
        )

    # Runs.

    def write_runs(self) -> None:
        """Writes the runs that are new or changed."""
        chosen = self._choose()
        for start in range(0, len(chosen), _GROUP_RUNS):
            group = chosen[start : start + _GROUP_RUNS]
            while items := [item for item in group if item.run.path not in self._damaged]:
                with contextlib.suppress(_RunFailedError):
                    self._write_group(items)
                    break

    def remove_gone(self) -> None:
        """Removes the runs that the dataset has, and the folders have not."""
        there = {run.run_id for run in self._runs}
        # A damaged sidecar does not tell the id.
        damaged = {_text_of(path) for path in self._damaged}
        gone = [
            run_id
            for run_id, row in self._known().items()
            if run_id not in there and row["path"] not in damaged
        ]
        for start in range(0, len(gone), _GROUP_RUNS):
            ids = gone[start : start + _GROUP_RUNS]
            for name in COLUMNS:
                self._write(name, (), _are_of(ids))
            self._changes |= dict.fromkeys(ids, "removed")

    def _known(self) -> dict[str, dict[str, Any]]:
        """Returns what the dataset has of each run, by its id, to compare with."""
        columns = ["run_id", "path", "metrics_state", "record_state", "points"]
        rows = self._snapshot.arrow("runs").to_table(columns=columns).to_pylist()
        return {row["run_id"]: row for row in rows}

    def _choose(self) -> list[_Item]:
        """Returns the runs to write: new ones, then changed ones."""
        newest: dict[str, Run] = {}
        alive, empty, duplicates = 0, 0, []
        for run in sorted(self._runs, key=lambda run: run.updated_at or 0.0):
            if run.record.problem is not None:
                self._damaged[run.path] = run.record.problem
            elif run.alive:
                alive += 1
            else:
                if (older := newest.get(run.run_id)) is not None:
                    duplicates.append(older.path)
                newest[run.run_id] = run
        known = self._known()
        chosen = []
        for run_id, run in newest.items():
            item = _Item(run, "added", _metrics_state(run.path), _record_state(run.record))
            empty += not item.metrics_state
            if (before := known.get(run_id)) is not None:
                # Metrics that are gone stay, as runs do.
                item.metrics_state = item.metrics_state or before["metrics_state"]
                if before["metrics_state"] != item.metrics_state:
                    item.change = "changed"
                elif before["record_state"] != item.record_state:
                    item.change, item.points = "updated", before["points"]
                else:
                    self._changes.setdefault(run_id, "unchanged")
                    continue
            chosen.append(item)
        self._left_out = {"alive": alive, "empty": empty, "duplicates": tuple(duplicates)}
        return sorted(chosen, key=lambda item: item.change)

    def _write_group(self, items: Sequence[_Item]) -> None:
        """Writes runs, in one transaction of each table."""
        import pyarrow as pa

        # Before the first transaction: a run that cannot be read leaves no rows in a table.
        rows: dict[str, list[Any]] = {"hparams": [], "summary": [], "runs": []}
        for item in items:
            with self._reading(item.run):
                for name, found in zip(rows, _rows_of(item), strict=True):
                    rows[name].append(pa.RecordBatch.from_pylist(found, arrow_schema(name)))
        is_new = all(item.change == "added" for item in items)
        if with_values := [item for item in items if item.change != "updated"]:
            replaced = None if is_new else _are_of(item.run.run_id for item in with_values)
            self._write("metrics", self._values(with_values), replaced)
        points = pa.array([item.points for item in items], pa.int64())
        runs = pa.Table.from_batches(rows["runs"])
        rows["runs"] = runs.set_column(runs.schema.get_field_index("points"), "points", points).to_batches()
        replaced = None if is_new else _are_of(item.run.run_id for item in items)
        for name, batches in rows.items():
            self._write(name, batches, replaced)
        self._changes |= {item.run.run_id: item.change for item in items}

    def _values(self, items: Sequence[_Item]) -> Iterator[Any]:
        """Yields the values of runs as record batches, and counts them."""
        for item in items:
            item.points = 0
            with self._reading(item.run):
                for rank in item.run.ranks():
                    first_row = 0
                    for block in run_blocks(item.run.path, rank):
                        batch = _values_of(item.run.run_id, rank, block, first_row)
                        first_row += len(block)
                        item.points += len(batch)
                        yield batch
                if _metrics_state(item.run.path) != item.metrics_state:
                    raise RunsError("its metrics changed while they were read. Compact again.")

    @contextlib.contextmanager
    def _reading(self, run: Run) -> Iterator[None]:
        """Notes which run an error is of: the writer of Delta, which reads the batches, raises another."""
        try:
            yield
            if not run.path.is_dir():
                raise FileNotFoundError("its folder is gone")
        except (OSError, ValueError, RunsError, LookupError, TypeError, ArithmeticError) as error:
            self._damaged[run.path] = str(error)
            raise _RunFailedError from error

    # Transactions.

    def _write(self, name: str, batches: Iterable[Any], replaced: str | None = None) -> None:
        """Writes rows to a table in one transaction, in place of those that a condition is true of."""
        import pyarrow as pa
        from deltalake import write_deltalake

        mode: dict[str, Any] = {"mode": "append"}
        if replaced is not None:
            mode = {"mode": "overwrite", "predicate": replaced}
        with self._transaction(name) as (table, commit):
            write_deltalake(
                table,
                pa.RecordBatchReader.from_batches(arrow_schema(name), batches),
                commit_properties=commit,
                writer_properties=_writer_properties(name),
                **mode,
            )

    def optimize(self) -> None:
        """Sorts the values by metric and run, and makes few files of many."""
        for name, order in _ORDERS.items():
            if self._snapshot.tables[name].file_uris():
                with self._transaction(name) as (table, commit):
                    table.optimize.z_order(
                        order,
                        max_concurrent_tasks=1,
                        max_spill_size=_SPILL_BYTES,
                        max_temp_directory_size=_NO_LIMIT,
                        writer_properties=_writer_properties(name),
                        commit_properties=commit,
                    )
        # Not by the same way: Delta commits that also where another compaction has committed to `runs`.
        self._write("runs", self._snapshot.arrow("runs").to_batches(), "true")

    def vacuum(self, days: float) -> None:
        """Removes the files that no version of the last days needs."""
        for name in COLUMNS:
            with self._transaction(name) as (table, commit):
                table.vacuum(
                    retention_hours=math.ceil(days * 24),
                    dry_run=False,
                    enforce_retention_duration=False,
                    full=True,
                    commit_properties=commit,
                )
                table.update_incremental()
        self._write("runs", ())

    @contextlib.contextmanager
    def _transaction(self, name: str) -> Iterator[tuple[Any, Any]]:
        """Yields a table, and the properties of one commit to it."""
        from deltalake.exceptions import CommitFailedError

        damaged = len(self._damaged)
        try:
            if name not in self._written:
                self._written[name] = self._table(name)
            yield self._written[name], self._commit_of(name)
        except CommitFailedError as error:
            raise _ConflictError from error
        except Exception as error:
            if len(self._damaged) > damaged:
                raise _RunFailedError from error
            raise

    def _table(self, name: str) -> Any:
        """Returns a table to write to; undoes what a compaction that was killed, or has lost, left in it."""
        pinned = self._snapshot.tables[name]
        table = self._location.open(name)
        if table.version() == pinned.version():
            return pinned
        if self._location.open("runs").version() != self._snapshot.version:
            raise _ConflictError
        table.restore(pinned.version(), commit_properties=self._commit_of(name))
        table.update_incremental()
        return table

    def _commit_of(self, name: str) -> Any:
        """Returns the properties of a commit: our application; for `runs`, the versions of the others."""
        from deltalake import CommitProperties, Transaction

        transactions = [Transaction(APPLICATION, time.time_ns())]
        if name == "runs":
            tables = {**self._snapshot.tables, **self._written}
            transactions += [
                Transaction(f"{APPLICATION}.{other}", tables[other].version())
                for other in COLUMNS
                if other != "runs"
            ]
        return CommitProperties(app_transactions=transactions)


def _are_of(run_ids: Iterable[str]) -> str:
    """Returns the condition that rows are of some runs."""
    texts = ["'" + run_id.replace("'", "''") + "'" for run_id in run_ids]
    return f"run_id IN ({', '.join(texts)})"


def _writer_properties(name: str) -> Any:
    from deltalake import ColumnProperties, WriterProperties

    columns = {}
    if name == "metrics":
        # These halve the size of steps, times and values.
        delta = ColumnProperties(dictionary_enabled=False, encoding="DELTA_BINARY_PACKED")
        columns = dict.fromkeys(("step", "row", "time"), delta)
        columns["value"] = ColumnProperties(dictionary_enabled=False, encoding="BYTE_STREAM_SPLIT")
    return WriterProperties(compression="ZSTD", column_properties=columns)


# Rows.


def _values_of(run_id: str, rank: int, block: Block, first_row: int) -> Any:
    """Returns the values of a block, one metric after the other, as a record batch."""
    import pyarrow as pa

    names = list(block.columns)
    at = [np.flatnonzero(there) for _, there in block.columns.values()]
    metrics = np.repeat(np.arange(len(names)), [len(one) for one in at])
    values = [values[there] for values, there in block.columns.values()]
    rows = np.concatenate([np.empty(0, np.int64), *at])
    steps, times = block.step[rows], block.time[rows]
    fits = np.abs(times) < _MAX_TIME
    micros = np.rint(np.where(fits, times, 0.0) * 1e6).astype(np.int64)
    batch = pa.record_batch(
        [
            pa.array(names, pa.string()).take(pa.array(metrics)),
            pa.repeat(run_id, len(rows)),
            pa.repeat(pa.scalar(rank, pa.int32()), len(rows)),
            pa.array(steps, pa.int64(), mask=steps == MISSING_STEP),
            pa.array(first_row + rows),
            pa.array(micros, pa.int64(), mask=~fits).cast(pa.timestamp("us", "UTC")),
            pa.array(np.concatenate([np.empty(0), *values]), from_pandas=False),
        ],
        schema=arrow_schema("metrics"),
    )
    # A copy: a thread of Delta's writer frees the batch, and that of numpy's memory needs the interpreter, so
    # that the process would abort if it was just then ending.
    return pa.concat_batches([batch, batch.slice(0, 0)])


def _rows_of(item: _Item) -> tuple[list[dict[str, Any]], ...]:
    """Returns the rows of a run in `hparams`, `summary` and `runs`."""
    run_id, record = item.run.run_id, item.run.record
    hparams = [{"run_id": run_id, "name": name, **json_of(value)} for name, value in record.hparams.items()]
    summary = [
        {"run_id": run_id, "metric": name, **attrs.asdict(metric)}
        for name, metric in item.run.summary.items()
    ]
    fields = attrs.asdict(record, recurse=False) | {
        "path": _text_of(record.path),
        "metrics_state": item.metrics_state,
        "record_state": item.record_state,
    }
    return hparams, summary, [fields]


def _text_of(path: Path) -> str:
    return str(path).encode("utf-8", "backslashreplace").decode()


def _metrics_state(run_dir: Path) -> str:
    """Returns a text that changes when the metrics do; empty if there are none."""
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
