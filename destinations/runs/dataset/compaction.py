"""`compact`: writes finished runs to the Delta tables of a dataset, in a folder or a bucket.

Reads the runs that are new or changed since the last compaction. They are written in groups; the rows of a
group are streamed to each table in one transaction, and replace what the table had of these runs. See
`tables.py` for what readers see meanwhile. Every commit names the same application: if another compaction
commits first, this one starts over with what is left to do.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import attrs
import numpy as np

from destinations.run_directory.blocks import MISSING_STEP, Block
from destinations.run_directory.layout import JOURNAL_FOLDER, PIECES_STATE
from destinations.run_directory.pieces import FolderState
from destinations.runs.content.series import run_blocks
from destinations.runs.content.sources import ranks_of
from destinations.runs.errors import DatasetError, RunsError
from destinations.runs.index.scan import ScanReport
from destinations.runs.record import RunRecord, is_terminal
from destinations.runs.run import MetricSummary, Run
from destinations.runs.streams import streams_of
from destinations.runs.summary import computed_summary
from uploads import Store, one_line, open_store
from uploads.disk import ABSENT, read_json, require_readable

from .reading import DatasetRun
from .tables import (
    APPLICATION,
    COLUMNS,
    WRITER,
    Location,
    TableVersions,
    arrow_schema,
    delta_errors,
    json_of,
    load,
)

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
Item = TypeVar("Item")


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
        damaged: path and problem of runs that cannot be read, which were left out, and of folders and stores
            that cannot be listed.
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
    duplicates: tuple[Path, ...] = attrs.field(default=(), converter=tuple)
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
            versions. Otherwise they stay. It is an error if `runs` has none at all, or may lack runs that are
            there: a folder or a store could not be listed (`ScanReport.unlisted`), or the id of a run could
            not be read.
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
    report = getattr(runs, "report", None)
    unlisted = report.unlisted if isinstance(report, ScanReport) else ()
    if remove_gone and unlisted:
        raise DatasetError(
            f"remove_gone would remove runs that may be there: {unlisted[0][0]}: {unlisted[0][1]}. "
            "Compact without it, or mend that."
        )
    chosen = list(runs)
    if any(isinstance(run, DatasetRun) for run in chosen):
        raise DatasetError(
            "these runs are of a dataset, which has no files to read. Compact folders of runs."
        )
    work = _Compaction(location, chosen, dict(unlisted), removes_gone=remove_gone)
    with delta_errors(location.uri):
        location.require_no_links()
        _create(location, open_store(str(dest), **store_options or {}), is_shared=not single_writer)
        work.repeat(work.write_runs)
        if remove_gone:
            work.repeat(work.remove_gone)
        if optimize:
            work.repeat(work.optimize)
        if vacuum_days is not None:
            work.repeat(lambda: work.vacuum(vacuum_days))
    return attrs.evolve(work.report(), seconds=clock() - started)


def _create(location: Location, store: Store, *, is_shared: bool) -> None:
    """Creates the tables that are missing; `runs` last, which makes it a dataset.

    Args:
        location: of the dataset.
        store: the same place.
        is_shared: whether there may be other writers.
    """
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError

    if is_shared and not getattr(store, "refuses_overwrite", lambda: True)():
        raise DatasetError(
            f"{store.uri()} overwrites what a put should only create, so that two compactions at once would "
            "lose data. Pass single_writer=True if there is only one at a time."
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
            f"{location.uri} has something else than a dataset: {', '.join(map(one_line, foreign))}. "
            "Choose a new or empty folder."
        )
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
        paths = (path for pattern in ("*", "*/*") for path in sorted(root.glob(pattern)))
        names = (path.relative_to(root).as_posix() for path in paths)
    for name in names:
        table, *rest = name.split("/")
        if table not in COLUMNS or (table in missing and rest and rest[0] != "_delta_log"):
            yield name


@attrs.define
class _Item:
    """A run to write."""

    run: Run
    change: Change
    metrics_state: str
    record_state: str
    points: int = 0


def _time_of(run: Run) -> float:
    return run.updated_at or 0.0


def _change_of(item: _Item) -> Change:
    return item.change


class _Compaction:
    """One compaction, over as many attempts as it takes."""

    def __init__(
        self, location: Location, runs: Sequence[Run], damaged: dict[Path, str], *, removes_gone: bool
    ) -> None:
        self._location = location
        self._runs = runs
        # Of a run of the dataset whose folder is none of these, another one with its id takes the place.
        self._kept_paths = {_text_of(run.record.path) for run in runs} if removes_gone else None
        # The dataset as this attempt found it, and the tables that it has written to since.
        self._snapshot: TableVersions
        self._written: dict[str, Any] = {}
        self._changes: dict[str, str] = {}
        self._damaged = damaged
        self._left_out: dict[str, Any] = {}

    def repeat(self, act: Callable[[], None]) -> None:
        """Acts on the newest version; starts over while others commit first."""
        from deltalake.exceptions import CommitFailedError

        for attempt in range(_TRIES):
            self._snapshot, self._written = load(self._location), {}
            try:
                return act()
            except CommitFailedError:
                time.sleep(random.uniform(0, min(0.1 * 2**attempt, 10.0)))  # noqa: S311  # only to spread
        raise DatasetError(
            f"other compactions of {self._location.uri} committed first {_TRIES} times. Run this one again."
        )

    def report(self) -> CompactReport:
        """Returns what was done."""
        snapshot = load(self._location)
        files = snapshot.tables["metrics"].get_add_actions()
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
        """Writes the runs that are new or changed, those of one kind of change after the other."""
        for change, items in itertools.groupby(self._choose(), _change_of):
            for group in _groups(items):
                self._write_group(change, group)

    def remove_gone(self) -> None:
        """Removes the runs that the dataset has, and the folders have not."""
        there = {run.run_id for run in self._runs}
        # A damaged sidecar does not tell the id.
        damaged = {_text_of(path) for path in self._damaged}
        known = self._known()
        paths = {row["path"] for row in known.values()}
        if known and not self._runs:
            raise DatasetError(
                f"there is no run, and remove_gone would remove all {len(known)} of {self._location.uri}. "
                "Check the folder of the runs, or delete the dataset."
            )
        gone = [run_id for run_id, row in known.items() if run_id not in there and row["path"] not in damaged]
        for run in self._runs if gone else ():
            is_known = run.run_id in known or _text_of(run.record.path) in paths
            if run.record.problem is not None and run.status == "unknown" and not is_known:
                raise DatasetError(
                    f"remove_gone cannot tell which run {run.place} is: {run.record.problem}. "
                    "Compact without it, or mend that."
                )
        for ids in _groups(gone):
            for name in COLUMNS:
                self._write(name, (), _are_of(ids))
            self._changes |= dict.fromkeys(ids, "removed")

    def _known(self) -> dict[str, dict[str, Any]]:
        """Returns what the dataset has of each run, by its id, to compare with."""
        columns = ["run_id", "path", "updated_at", "metrics_state", "record_state", "points"]
        rows = self._snapshot.arrow("runs").to_table(columns=columns).to_pylist()
        return {row["run_id"]: row for row in rows}

    def _ended(self) -> dict[str, Run]:
        """Returns the newest run of each id that can be read; notes the others."""
        newest: dict[str, Run] = {}
        alive, duplicates = 0, []
        for run in sorted(self._runs, key=_time_of):
            path = run.record.path
            if run.record.problem is not None:
                self._damaged[path] = run.record.problem
            elif path not in self._damaged:
                try:
                    alive += (is_written := run.is_written)
                except OSError as error:
                    self._damaged[path] = str(error)
                    continue
                if is_written:
                    continue
                if (older := newest.get(run.run_id)) is not None:
                    duplicates.append(older.record.path)
                newest[run.run_id] = run
        self._left_out = {"alive": alive, "empty": 0, "duplicates": duplicates}
        return newest

    def _choose(self) -> list[_Item]:
        """Returns the runs to write, sorted by change: new ones first."""
        known, chosen = self._known(), []
        for run_id, run in self._ended().items():
            try:
                item = _Item(run, "added", _metrics_state(run.path), _record_state(run.record))
                if run.copy is not None and (problem := run.reload().record.problem):
                    # It was found out when its rows were brought.
                    raise RunsError(problem)  # noqa: TRY301  # one place for all of them
            except (OSError, RunsError) as error:
                self._damaged[run.record.path] = str(error)
                continue
            self._left_out["empty"] += not item.metrics_state
            if (before := known.get(run_id)) is not None:
                is_moved = before["path"] != _text_of(run.record.path)
                is_gone = self._kept_paths is not None and before["path"] not in self._kept_paths
                is_older = is_moved and (before["updated_at"] or 0.0) > _time_of(run)
                if is_older and not is_gone:
                    self._left_out["duplicates"].append(run.record.path)
                    continue
                if is_moved and not is_gone and Path(before["path"]).is_dir():
                    # Another run of this id, whose place in the dataset this one takes.
                    self._left_out["duplicates"].append(Path(before["path"]))
                # Metrics that are gone stay, as runs do.
                if not (is_older and is_gone):
                    item.metrics_state = item.metrics_state or before["metrics_state"]
                if is_older or before["metrics_state"] != item.metrics_state:
                    item.change = "changed"
                elif before["record_state"] != item.record_state:
                    item.change, item.points = "updated", before["points"]
                else:
                    self._changes.setdefault(run_id, "unchanged")
                    continue
            chosen.append(item)
        return sorted(chosen, key=_change_of)

    def _write_group(self, change: Change, group: Sequence[_Item]) -> None:
        """Writes the runs that can be read, in one transaction of each table."""
        while items := [item for item in group if item.run.record.path not in self._damaged]:
            # The summary stays beside the values that it is of.
            left = {"metrics", "summary"} if change == "updated" else {"metrics"}
            rows: dict[str, list[Any]] = {name: [] for name in COLUMNS if name not in left}
            ids = [item.run.run_id for item in items]
            replaced = None if change == "added" else _are_of(ids)
            # Not while the table is written, when it cannot be asked.
            has_writer = WRITER in self._schema_of("metrics").names
            values, damaged = self._read(items, rows, has_writer=has_writer), len(self._damaged)
            try:
                if change == "updated":
                    list(values)  # There are none.
                else:
                    self._write("metrics", values, replaced)
            except Exception:
                # Delta's writer, which reads the values, raises another error than a run that cannot be read.
                if len(self._damaged) == damaged:
                    raise
                continue
            for name, batches in rows.items():
                self._write(name, batches, replaced)
            self._changes |= dict.fromkeys(ids, change)
            return

    def _read(
        self, items: Sequence[_Item], rows: Mapping[str, list[Any]], *, has_writer: bool
    ) -> Iterator[Any]:
        """Yields the values of runs as record batches, and adds their rows of the other tables to `rows`."""
        for item in items:
            try:
                if item.change != "updated":
                    item.points = 0
                    for batch in _values_of(item.run):
                        item.points += len(batch)
                        yield batch if has_writer else _without_writer(batch)
                for name, batch in _records_of(item).items():
                    if name in rows:
                        rows[name].append(batch)
                _check_unchanged(item)
            except Exception as error:  # Whatever is wrong with a run, the others count.
                self._damaged[item.run.record.path] = str(error)
                raise

    def _schema_of(self, name: str) -> Any:
        """Returns the columns of this version of the package, but for `WRITER` where the table lacks it."""
        import pyarrow as pa

        schema = arrow_schema(name)
        if name != "metrics" or WRITER in pa.schema(self._snapshot.tables[name].schema().to_arrow()).names:
            return schema
        return schema.remove(schema.get_field_index(WRITER))

    # Transactions.

    def _write(self, name: str, rows: Any, replaced: str | None = None) -> None:
        """Writes rows to a table in one transaction.

        Args:
            name: of the table.
            rows: a `pyarrow.Table`, or record batches of the columns of this version of the package.
            replaced: the condition of the rows to remove.
        """
        import pyarrow as pa
        from deltalake import write_deltalake

        mode: dict[str, Any] = {"mode": "append"}
        if replaced is not None:
            mode = {"mode": "overwrite", "predicate": replaced}
        write_deltalake(
            self._table(name),
            rows
            if isinstance(rows, pa.Table)
            else pa.RecordBatchReader.from_batches(self._schema_of(name), rows),
            # Another version of this package may have other columns.
            schema_mode="merge",
            commit_properties=self._commit_of(name),
            writer_properties=_writer_properties(name),
            **mode,
        )

    def optimize(self) -> None:
        """Sorts the values by metric and run, and makes few files of many."""
        for name, order in _ORDERS.items():
            self._table(name).optimize.z_order(
                order,
                max_concurrent_tasks=1,
                max_spill_size=_SPILL_BYTES,
                max_temp_directory_size=_NO_LIMIT,
                writer_properties=_writer_properties(name),
                commit_properties=self._commit_of(name),
            )
        # Not by the same way: Delta commits that also where another compaction has committed to `runs`.
        self._write("runs", self._snapshot.arrow("runs").to_table(), "true")

    def vacuum(self, days: float) -> None:
        """Removes the files that no version of the last days needs."""
        for name in COLUMNS:
            self._table(name).vacuum(
                retention_hours=math.ceil(days * 24),
                dry_run=False,
                enforce_retention_duration=False,
                full=True,
                commit_properties=self._commit_of(name),
            )
        self._write("runs", ())

    def _table(self, name: str) -> Any:
        """Returns a table to write to; undoes what a compaction that was killed, or has lost, left in it."""
        from deltalake.exceptions import CommitFailedError

        if name not in self._written:
            table, pinned = self._location.open(name), self._snapshot.tables[name].version()
            if table.version() != pinned:
                if self._location.open("runs").version() != self._snapshot.version:
                    raise CommitFailedError("another compaction committed first")
                table.restore(pinned, commit_properties=self._commit_of(name))
            self._written[name] = table
        return self._written[name]

    def _commit_of(self, name: str) -> Any:
        """Returns the properties of a commit: our application; for `runs`, the versions of the others."""
        from deltalake import CommitProperties, Transaction

        transactions = [Transaction(APPLICATION, time.time_ns())]
        if name == "runs":
            tables = {**self._snapshot.tables, **self._written}
            del tables["runs"]
            transactions += [
                Transaction(f"{APPLICATION}.{other}", table.version()) for other, table in tables.items()
            ]
        return CommitProperties(app_transactions=transactions)


def _groups(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Yields items in lists that one transaction takes."""
    rest = iter(items)
    while group := list(itertools.islice(rest, _GROUP_RUNS)):
        yield group


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


def _values_of(run: Run) -> Iterator[Any]:
    """Yields the values of a run as record batches, one for each block of rows of a rank of a writer."""
    for stream in streams_of(run.path):
        for rank in ranks_of(stream.folder) if stream.writer else run.ranks():
            first_row = 0
            for block in run_blocks(run.path, rank, stream.writer):
                yield _values_of_block(run.run_id, rank, block, first_row)
                first_row += len(block)


def _values_of_block(run_id: str, rank: int, block: Block, first_row: int) -> Any:
    """Returns the values of a block, one metric after the other, as a record batch."""
    import pyarrow as pa

    shape = len(block.columns), len(block)
    values = np.array([values for values, _ in block.columns.values()], np.float64).reshape(shape)
    present = np.array([there for _, there in block.columns.values()], np.bool_).reshape(shape)
    metrics, rows = np.nonzero(present)
    steps, times = block.step[rows], block.time[rows]
    fits = np.abs(times) < _MAX_TIME
    micros = np.rint(np.where(fits, times, 0.0) * 1e6).astype(np.int64)
    batch = pa.record_batch(
        [
            pa.array(block.columns, pa.string()).take(pa.array(metrics)),
            pa.repeat(run_id, len(rows)),
            pa.repeat(pa.scalar(rank, pa.int32()), len(rows)),
            pa.array(steps, pa.int64(), mask=steps == MISSING_STEP),
            pa.array(first_row + rows),
            pa.array(micros, pa.int64(), mask=~fits).cast(pa.timestamp("us", "UTC")),
            pa.array(values[present], from_pandas=False),
            pa.repeat(block.writer, len(rows)),
        ],
        schema=arrow_schema("metrics"),
    )
    # A copy: a thread of Delta's writer frees the batch, and that of numpy's memory needs the interpreter, so
    # that the process would abort if it was just then ending.
    return pa.concat_batches([batch, batch.slice(0, 0)])


def _without_writer(batch: Any) -> Any:
    """Returns values for a table without a column of writers, see `WRITER`.

    Raises:
        RunsError: they are not the trainer's.
    """
    if any(batch.column(WRITER).unique().to_pylist()):
        raise RunsError("this dataset has no column for the names of its writers. Make a new dataset for it")
    return batch.drop_columns([WRITER])


def _records_of(item: _Item) -> dict[str, Any]:
    """Returns the rows of a run in the other tables, each as a record batch."""
    import pyarrow as pa

    run_id, record = item.run.run_id, item.run.record
    # The file of a run that was killed is some seconds older than its rows.
    summary = item.run.summary if is_terminal(record.status) else computed_summary(item.run.path, 0)
    rows = {
        "hparams": [
            {"run_id": run_id, "name": name, **json_of(value)} for name, value in record.hparams.items()
        ],
        "summary": [
            {"run_id": run_id, "metric": name, **_summary_row(metric)} for name, metric in summary.items()
        ],
        "runs": [
            attrs.asdict(record, recurse=False)
            | {name: getattr(item, name) for name in ("points", "metrics_state", "record_state")}
            | {"path": _text_of(record.path)}
        ],
    }
    return {name: pa.RecordBatch.from_pylist(found, arrow_schema(name)) for name, found in rows.items()}


def _summary_row(metric: MetricSummary) -> dict[str, Any]:
    """Returns the columns of a metric; Arrow rounds no integer to the nearest float, as `values` are."""
    found = attrs.asdict(metric)
    numbers = {name: found[name] for name in ("last", "min", "max") if found[name] is not None}
    return found | {name: float(value) for name, value in numbers.items()}


def _check_unchanged(item: _Item) -> None:
    if not item.run.path.is_dir():
        raise RunsError("its folder is gone")
    if item.change != "updated" and _metrics_state(item.run.path) != item.metrics_state:
        raise RunsError("its metrics changed while they were read. Compact again.")


def _text_of(path: Path) -> str:
    return str(path).encode("utf-8", "backslashreplace").decode()


def _metrics_state(run_dir: Path) -> str:
    """Returns a text that changes when the metrics do; empty if there are none.

    Rows that were copied from a store are known by the place in their run, on every machine.

    Raises:
        OSError: a file that is there cannot be read.
    """
    stamps: list[object] = []
    for stream in streams_of(run_dir):
        folder, pieces = stream.folder, read_json(stream.folder / PIECES_STATE)
        for path in sorted([*folder.glob("metrics*.csv"), *(folder / JOURNAL_FOLDER).glob("*/*.journal")]):
            require_readable(path)
            with contextlib.suppress(*ABSENT):
                at, size = path.stat().st_mtime_ns, path.stat().st_size
                stamps.append((stream.prefix, path.relative_to(folder).as_posix(), size, not pieces and at))
        if stamps:
            states = ((name, FolderState.read(folder, name)) for name in sorted(pieces))
            stamps += [(stream.prefix, name, one.run, one.session, one.last) for name, one in states]
    return _digest(json.dumps(stamps)) if stamps else ""


def _record_state(record: RunRecord) -> str:
    """Returns a text that changes when the record does, but for what changes without the run."""
    values = attrs.asdict(record, recurse=False)
    del values["heartbeat_at"], values["problem"]
    return _digest(json.dumps(values, sort_keys=True, default=str))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]
