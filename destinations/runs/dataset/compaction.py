"""`compact`: writes finished runs to the Delta tables of a dataset, in a folder or a bucket.

Reads the runs that are new or changed since the last compaction. They are written in groups; the rows of a
group are streamed to each table in one transaction, and replace what the table had of these runs. See
`tables.py` for what readers see meanwhile. Every commit names the same application: if another compaction
commits first, this one starts over with what is left to do.
"""

import contextlib
import hashlib
import itertools
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np

from destinations.run_directory.layout import JOURNAL_FOLDER
from destinations.runs.errors import DatasetError, RunsError
from destinations.runs.record import RunRecord
from destinations.runs.run import Run
from destinations.runs.series import MISSING_STEP, Block, run_blocks
from uploads import UploadError, open_store, redact

from .tables import APPLICATION, COLUMNS, Location, Snapshot, delta_errors, json_of, load

__all__ = ["CompactReport", "compact"]

# In one transaction; the ids of runs that changed are in its predicate.
_GROUP_RUNS = 500
_BATCH_POINTS = 200_000
_BATCH_ROWS = 10_000
_TRIES = 20
_MAX_TIME = 1e12
_SPILL_BYTES = 1 << 30

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
    single_writer: bool = False,
    clock: Callable[[], float] = time.time,
) -> CompactReport:
    """Writes finished runs to a dataset: those that are new in it, or have changed.

    ```python
    with open_runs("runs") as runs:
        compact(runs, "dataset", optimize=True)        # or "s3://bucket/dataset"
    ```

    A run has ended, or its process has (its heartbeat is old). What the dataset has of runs that are gone
    from `runs` stays. Run ids tell runs apart.

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
        single_writer: whether no other compaction ever writes to `dest`; needed for a server that overwrites
            what a put should only create.
        clock: the time in seconds since 1970.

    Raises:
        DatasetError: `dest` has something else, cannot be written, or others committed first again and
            again.
        ImportError: deltalake is not installed.
    """
    started = clock()
    location = Location.of(dest, store_options or {})
    work = _Compaction(location, list(runs))
    if not single_writer:
        _check_store(dest, store_options or {})
    with delta_errors(location.uri):
        _create(location)
        work.repeat(work.write_runs)
        if optimize:
            work.repeat(work.optimize)
        if vacuum_days is not None:
            work.repeat(lambda: work.vacuum(vacuum_days))
    return attrs.evolve(work.report(), seconds=clock() - started)


def _create(location: Location) -> None:
    """Creates the tables that are missing; `runs` last, which makes it a dataset."""
    import pyarrow as pa
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError

    missing = []
    for name in COLUMNS:
        # Not `is_deltatable`, which holds the interpreter's lock while it waits for the store.
        try:
            DeltaTable(location.table(name), storage_options=location.options)
        except TableNotFoundError:
            missing.append(name)
    if not missing:
        return
    _check_folder(location)
    for name in missing:
        if "://" not in location.uri:
            Path(location.table(name)).mkdir(parents=True, exist_ok=True)
        DeltaTable.create(
            location.table(name),
            pa.schema(_arrow_fields(name)),
            mode="ignore",
            storage_options=location.options,
        )


def _check_folder(location: Location) -> None:
    """Refuses a folder that has something else."""
    if "://" in location.uri:
        return
    try:
        others = sorted({entry.name for entry in Path(location.uri).iterdir()} - set(COLUMNS))
    except FileNotFoundError:
        return
    if others:
        raise DatasetError(
            f"{location.uri} has something else than a dataset: {', '.join(others[:3])}. "
            "Choose a new or empty folder."
        )


def _check_store(place: str | os.PathLike[str], options: dict[str, Any]) -> None:
    """Refuses a server that overwrites what a put should only create."""
    try:
        store = open_store(str(place), **options)
        if getattr(store, "refuses_overwrite", lambda: True)():
            return
    except UploadError as error:
        raise DatasetError(f"dataset {redact(str(place))} cannot be written: {error}") from error
    raise DatasetError(
        f"{store.uri()} overwrites what a put should only create, so that two compactions at once would lose "
        "data. Pass single_writer=True if there is only one at a time."
    )


def _arrow_fields(name: str) -> list[tuple[str, Any]]:
    import pyarrow as pa

    types = {
        "string": pa.string(),
        "int32": pa.int32(),
        "int64": pa.int64(),
        "double": pa.float64(),
        "bool": pa.bool_(),
        "list": pa.list_(pa.string()),
        "timestamp": pa.timestamp("us", "UTC"),
    }
    return [(column, types[kind]) for column, kind in COLUMNS[name].items()]


class _ConflictError(Exception):
    """Another compaction committed first."""


class _RunFailedError(Exception):
    """A run of the group cannot be read."""


@attrs.define
class _Item:
    """A run to write."""

    run: Run
    metrics_state: str
    record_state: str
    points: int = 0


class _Compaction:
    """One compaction, over as many attempts as it takes."""

    def __init__(self, location: Location, runs: Sequence[Run]) -> None:
        self._location = location
        self._runs = runs
        self._snapshot: Snapshot
        self._done: dict[str, str] = {}
        self._counts = dict.fromkeys(("alive", "empty"), 0)
        self._duplicates: tuple[Path, ...] = ()
        self._damaged: dict[str, tuple[Path, str]] = {}
        self._failed: list[tuple[Run, Exception]] = []

    def repeat(self, act: Callable[[], None]) -> None:
        """Acts on the newest version; starts over while others commit first."""
        for attempt in range(_TRIES):
            self._snapshot = load(self._location)
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
        points = snapshot.arrow("runs").to_table(columns=["points"])["points"].to_numpy()
        files = snapshot.tables["metrics"].get_add_actions(flatten=True)
        size = sum(files.column("size_bytes").to_pylist())
        done = list(self._done.values())
        counts = {name: done.count(name) for name in ("added", "changed", "updated", "unchanged")}
        return CompactReport(
            self._location.uri,
            snapshot.version,
            len(points),
            int(points.sum()),
            size,
            damaged=tuple(self._damaged.values()),
            duplicates=self._duplicates,
            **counts,
            **self._counts,
        )

    # Runs.

    def write_runs(self) -> None:
        """Writes the runs that are new or changed."""
        for change, items in self._choose().items():
            for start in range(0, len(items), _GROUP_RUNS):
                left: Sequence[_Item] = items[start : start + _GROUP_RUNS]
                while left:
                    try:
                        self._write_group(left, change)
                        break
                    except _RunFailedError:
                        left = [item for item in left if item.run.run_id not in self._damaged]

    def _choose(self) -> dict[Change, list[_Item]]:
        """Returns the runs to write."""
        table = self._snapshot.arrow("runs").to_table(
            columns=["run_id", "metrics_state", "record_state", "points"]
        )
        known = {run_id: rest for run_id, *rest in zip(*table.to_pydict().values(), strict=True)}
        newest: dict[str, Run] = {}
        duplicates = []
        self._counts = dict.fromkeys(self._counts, 0)
        for run in self._runs:
            if run.record.problem is not None:
                self._damaged[str(run.path)] = run.path, run.record.problem
            elif run.alive:
                self._counts["alive"] += 1
            else:
                other = newest.get(run.run_id)
                if other is None:
                    newest[run.run_id] = run
                else:
                    older, newer = sorted((other, run), key=lambda one: one.updated_at or 0.0)
                    duplicates.append(older.path)
                    newest[run.run_id] = newer
        self._duplicates = tuple(duplicates)
        chosen: dict[Change, list[_Item]] = {"added": [], "changed": [], "updated": []}
        for run_id, run in newest.items():
            states = _metrics_state(run.path), _record_state(run.record)
            before = known.get(run_id)
            self._counts["empty"] += not states[0]
            if run_id in self._damaged:
                continue
            if before is None:
                chosen["added"].append(_Item(run, *states))
            elif before[0] != states[0]:
                chosen["changed"].append(_Item(run, *states))
            elif before[1] != states[1]:
                chosen["updated"].append(_Item(run, *states, points=before[2]))
            else:
                self._done.setdefault(run_id, "unchanged")
        return chosen

    def _write_group(self, items: Sequence[_Item], change: Change) -> None:
        replaced = [] if change == "added" else [item.run.run_id for item in items]
        if change != "updated":
            self._write("metrics", self._metric_batches(items), replaced)
        self._write("hparams", self._row_batches("hparams", items, _hparam_rows), replaced)
        self._write("summary", self._row_batches("summary", items, _summary_rows), replaced)
        self._write("runs", self._row_batches("runs", items, _run_rows), replaced)
        self._done |= {item.run.run_id: change for item in items}

    def _metric_batches(self, items: Sequence[_Item]) -> Iterator[Any]:
        """Yields the values of runs as record batches."""
        import pyarrow as pa

        schema = pa.schema(_arrow_fields("metrics"))
        pending: list[Any] = []
        count = 0
        for item in items:
            item.points = 0
            with self._naming(item.run):
                for batch in _batches_of_run(item.run, schema):
                    pending.append(batch)
                    item.points += len(batch)
                    count += len(batch)
                    if count >= _BATCH_POINTS:
                        yield pa.concat_batches(pending)
                        pending, count = [], 0
        if pending:
            yield pa.concat_batches(pending)

    def _row_batches(
        self, name: str, items: Iterable[_Item], rows_of: Callable[[_Item], Iterable[dict[str, Any]]]
    ) -> Iterator[Any]:
        """Yields the rows of runs in a table as record batches."""
        import pyarrow as pa

        schema = pa.schema(_arrow_fields(name))

        def rows() -> Iterator[dict[str, Any]]:
            for item in items:
                with self._naming(item.run):
                    yield from rows_of(item)

        pending = rows()
        while chunk := list(itertools.islice(pending, _BATCH_ROWS)):
            yield pa.RecordBatch.from_pylist(chunk, schema)

    @contextlib.contextmanager
    def _naming(self, run: Run) -> Iterator[None]:
        """Notes which run an error is of: the writer of Delta, which runs the iterator, raises another."""
        try:
            yield
        except (OSError, ValueError, RunsError, LookupError, TypeError, ArithmeticError) as error:
            self._failed.append((run, error))
            raise

    # Transactions.

    def _write(self, name: str, batches: Iterator[Any], replaced: Sequence[str]) -> None:
        """Writes rows to a table in one transaction, in place of those of some runs."""
        import pyarrow as pa
        from deltalake import write_deltalake
        from deltalake.exceptions import CommitFailedError

        self._return_to_pinned(name)
        ids = ", ".join("'" + run_id.replace("'", "''") + "'" for run_id in replaced)
        mode: dict[str, Any] = (
            {"mode": "overwrite", "predicate": f"run_id IN ({ids})"} if ids else {"mode": "append"}
        )
        self._failed.clear()
        try:
            write_deltalake(
                self._snapshot.tables[name],
                pa.RecordBatchReader.from_batches(pa.schema(_arrow_fields(name)), batches),
                commit_properties=self._commit_of(name),
                writer_properties=_writer_properties(name),
                **mode,
            )
        except CommitFailedError as error:
            raise _ConflictError from error
        except Exception as error:
            if not self._failed:
                raise
            run, cause = self._failed[0]
            self._damaged[run.run_id] = run.path, str(cause)
            raise _RunFailedError from error
        self._snapshot.heads[name] = self._snapshot.tables[name].version()

    def _return_to_pinned(self, name: str) -> None:
        """Undoes what a compaction that was killed, or has lost, left in a table."""
        from deltalake import DeltaTable
        from deltalake.exceptions import CommitFailedError

        table = self._snapshot.tables[name]
        pinned = table.version()
        if self._snapshot.heads[name] == pinned:
            return
        head = DeltaTable(self._location.table(name), storage_options=self._location.options)
        try:
            head.restore(pinned, commit_properties=self._commit_of(name))
        except CommitFailedError as error:
            raise _ConflictError from error
        head.update_incremental()
        self._snapshot.tables[name] = head
        self._snapshot.heads[name] = head.version()

    def _commit_of(self, name: str) -> Any:
        """Returns the properties of a commit: our application; for `runs`, the versions of the others."""
        from deltalake import CommitProperties, Transaction

        transactions = [Transaction(APPLICATION, time.time_ns())]
        if name == "runs":
            transactions += [
                Transaction(f"{APPLICATION}.{other}", self._snapshot.tables[other].version())
                for other in COLUMNS
                if other != "runs"
            ]
        return CommitProperties(app_transactions=transactions)

    def optimize(self) -> None:
        """Sorts the values by metric and run, and makes few files of many."""
        from deltalake.exceptions import CommitFailedError

        orders = {"metrics": ["metric", "run_id"], "hparams": ["name"], "summary": ["metric"]}
        try:
            for name, order in orders.items():
                self._return_to_pinned(name)
                table = self._snapshot.tables[name]
                if table.file_uris():
                    table.optimize.z_order(
                        order,
                        max_concurrent_tasks=1,
                        max_spill_size=_SPILL_BYTES,
                        writer_properties=_writer_properties(name),
                        commit_properties=self._commit_of(name),
                    )
                    self._snapshot.heads[name] = table.version()
        except CommitFailedError as error:
            raise _ConflictError from error
        self._write("runs", iter(()), ())

    def vacuum(self, days: float) -> None:
        """Removes the files that no version of the last days needs."""
        for name in COLUMNS:
            self._return_to_pinned(name)
            table = self._snapshot.tables[name]
            table.vacuum(
                retention_hours=int(days * 24),
                dry_run=False,
                enforce_retention_duration=False,
                full=True,
                commit_properties=self._commit_of("metrics"),
            )
            table.update_incremental()
            self._snapshot.heads[name] = table.version()
        self._write("runs", iter(()), ())


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


def _batches_of_run(run: Run, schema: Any) -> Iterator[Any]:
    """Yields the values of a run, one record batch for each block of rows and metric."""
    for rank in run.ranks():
        first_row = 0
        for block in run_blocks(run.path, rank):
            yield from _batches_of_block(run.run_id, rank, block, first_row, schema)
            first_row += len(block)


def _batches_of_block(run_id: str, rank: int, block: Block, first_row: int, schema: Any) -> Iterator[Any]:
    import pyarrow as pa

    fits = np.abs(block.time) < _MAX_TIME
    micros = np.rint(np.where(fits, block.time, 0.0) * 1e6).astype(np.int64)
    times = pa.array(micros, pa.int64(), mask=~fits).cast(pa.timestamp("us", "UTC"))
    steps = pa.array(block.step, pa.int64(), mask=block.step == MISSING_STEP)
    rows = pa.array(np.arange(first_row, first_row + len(block)), pa.int64())
    for name, (values, present) in block.columns.items():
        count = int(np.count_nonzero(present))
        if not count:
            continue
        columns = [steps, rows, times, pa.array(values, pa.float64(), from_pandas=False)]
        if count < len(block):
            mask = pa.array(present)
            columns = [column.filter(mask) for column in columns]
        names = [
            pa.repeat(name, count),
            pa.repeat(run_id, count),
            pa.repeat(pa.scalar(rank, pa.int32()), count),
        ]
        yield pa.record_batch([*names, *columns], schema=schema)


def _run_rows(item: _Item) -> Iterator[dict[str, Any]]:
    record = item.run.record
    yield attrs.asdict(record, recurse=False) | {
        "path": str(record.path).encode("utf-8", "backslashreplace").decode(),
        "points": item.points,
        "metrics_state": item.metrics_state,
        "record_state": item.record_state,
    }


def _hparam_rows(item: _Item) -> Iterator[dict[str, Any]]:
    for name, value in item.run.record.hparams.items():
        yield {"run_id": item.run.run_id, "name": name} | json_of(value)


def _summary_rows(item: _Item) -> Iterator[dict[str, Any]]:
    for name, metric in item.run.summary.items():
        yield {"run_id": item.run.run_id, "metric": name} | attrs.asdict(metric)


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
