"""`compact`: writes finished runs to the Delta tables of a dataset, in a folder or a bucket.

Only runs that are new or changed since the last compaction are read. They are written in groups: the rows of
a group are streamed to each table in one transaction, and replace the earlier rows of these runs. `tables.py`
explains what readers see meanwhile, and `writing.py` how concurrent changes are handled.
"""

import itertools
import math
import operator
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from destinations.runs.errors import DatasetError, RunsError
from destinations.runs.index.scan import ScanReport
from destinations.runs.run import RecordedRun
from uploads import Store, one_line, open_store

from .reading import DatasetRun
from .rows import Content, opened, record_rows, record_state, summary_of, summary_row, text_of, values_of
from .tables import (
    COLUMNS,
    PARTITIONS,
    Location,
    Placement,
    WideColumns,
    arrow_schema,
    delta_errors,
    json_of,
    load,
)
from .writing import DatasetWriter, condition, delete_runs, with_edits, writer_properties

__all__ = ["CompactReport", "compact"]

# Limits of one transaction: its predicate has the ids of all changed runs, and Delta's writer holds a row
# group of each part in memory.
_GROUP_RUNS = 4096
_GROUP_BYTES = 256 << 20
# Up to this many values of a part are sorted by metric; more are written in the order of rows.
_SORTED_VALUES = 1 << 22
_FILE_BYTES = 32 << 20
_SPILL_BYTES = 1 << 30
# The disk is the limit. The default of 100 GB is nearly used up by 10^9 values.
_NO_LIMIT = 1 << 60
# The columns by which `optimize` sorts each table.
_ORDERS = {
    "metrics": ["metric", "run_id"],
    "records": ["kind", "run_id"],
    "hparams": ["name"],
    "summary": ["metric"],
    "runs": ["run_id"],
}

Change = Literal["added", "changed", "updated"]


@attrs.frozen
class CompactReport:
    """The result of a compaction.

    ```python
    with open_runs("runs") as runs:
        report = compact(runs, "dataset")
    print(report.added, report.points)  # 1 4
    ```

    Attributes:
        uri: the URI of the dataset.
        version: the version of the dataset, for `open_runs(uri, version=…)`.
        runs: number of runs in the dataset.
        points: number of values in the dataset.
        size: bytes of the table `metrics`.
        added: number of new runs.
        changed: number of runs with replaced values and records.
        updated: number of runs with only replaced fields, such as notes.
        unchanged: number of runs that were not read.
        removed: number of runs removed because they are gone.
        alive: number of runs left out because they are still being written.
        empty: number of runs without metrics.
        damaged: path and problem of each run left out because it can't be read, and of each folder or store
            that can't be listed.
        duplicates: paths of runs left out because a newer run has the same id.
        deleted: number of runs left out because they were deleted from the dataset.
        without_column: hyperparameters and metrics without a column in `runs`, because there are too many or
            the name differs from another one only in case. The tables `hparams` and `summary` have them.
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
    deleted: int = 0
    without_column: tuple[str, ...] = ()
    seconds: float = 0.0


def compact(
    runs: Iterable[RecordedRun],
    dest: str | os.PathLike[str],
    *,
    store_options: dict[str, Any] | None = None,
    optimize: bool = False,
    vacuum_days: float | None = None,
    remove_gone: bool = False,
    include_deleted: bool = False,
    single_writer: bool = False,
) -> CompactReport:
    """Writes finished runs to a dataset, if they are new or have changed.

    ```python
    with open_runs("runs") as runs:
        compact(runs, "dataset", optimize=True)        # or "s3://bucket/dataset"
    ```

    A run is finished if it has ended or its heartbeat is old. Runs are identified by their ids. A run in a
    bucket is downloaded to a temporary folder while it is read, one run at a time; if the listing shows that
    it is unchanged, it isn't downloaded.

    Blocks until everything is in the store. Any number of compactions may run at once: if two commit at the
    same time, one of them starts over. Memory does not grow with the number of runs.

    Args:
        runs: the runs, as `open_runs` returns them.
        dest: a path, or `s3://bucket/dataset`, `gs://…`, `az://…` with the options of `uploads.open_store`.
        store_options: more options, such as credentials.
        optimize: whether to join the small files of earlier compactions afterwards, sorted by metric and run.
            Files that are already in order are kept.
        vacuum_days: deletes files that only versions older than this many days need; None deletes nothing. 0
            also deletes the files of a compaction that is running.
        remove_gone: whether to remove runs that the dataset has and `runs` lacks; earlier versions keep them.
            It is an error if `runs` is empty or may be incomplete, because a folder or store could not be
            listed (`ScanReport.unlisted`) or the id of a run could not be read.
        include_deleted: whether to add runs again that were deleted from the dataset (`Dataset.delete`).
        single_writer: whether this is the only process that ever writes to `dest`. Needed for servers without
            conditional puts.

    Raises:
        DatasetError: `dest` holds something else or can't be written, or other compactions kept committing
            first.
        ValueError: `vacuum_days` is negative or not finite.
        ImportError: deltalake is not installed.
    """
    started = time.perf_counter()
    if vacuum_days is not None and not 0 <= vacuum_days < math.inf:
        raise ValueError(f"vacuum_days must be 0 or more, got {vacuum_days!r}")
    location = Location.of(dest, store_options or {})
    report = getattr(runs, "report", None)
    unlisted = report.unlisted if isinstance(report, ScanReport) else ()
    if remove_gone and unlisted:
        raise DatasetError(
            f"remove_gone could remove runs that still exist: {unlisted[0][0]}: {unlisted[0][1]}. "
            "Fix this, or compact without it."
        )
    chosen = list(runs)
    if any(isinstance(run, DatasetRun) for run in chosen):
        raise DatasetError(
            "these runs belong to a dataset, which has no run folders. Compact folders of runs."
        )
    work = _Compaction(
        DatasetWriter(location),
        chosen,
        dict(unlisted),
        removes_gone=remove_gone,
        includes_deleted=include_deleted,
    )
    with delta_errors(location.uri):
        location.require_no_links()
        _create(location, open_store(str(dest), **store_options or {}), is_shared=not single_writer)
        work.writer.repeat(work.write_runs)
        if remove_gone:
            work.writer.repeat(work.remove_gone)
        if optimize:
            work.writer.repeat(work.optimize)
        if vacuum_days is not None:
            work.writer.repeat(lambda: work.vacuum(vacuum_days))
    return attrs.evolve(work.report(), seconds=time.perf_counter() - started)


def _create(location: Location, store: Store, *, is_shared: bool) -> None:
    """Creates the missing tables; `runs` comes last, because it makes the place a dataset.

    Args:
        location: the place of the dataset.
        store: the same place as a store.
        is_shared: whether there may be other writers.
    """
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError

    if is_shared and not getattr(store, "refuses_overwrite", lambda: True)():
        raise DatasetError(
            f"{store.uri()} ignores conditional puts, so two compactions at once would lose data. "
            "Pass single_writer=True if there is only one at a time."
        )
    missing = []
    for name in COLUMNS:
        # `is_deltatable` would hold the interpreter's lock while it waits for the store.
        try:
            location.open(name)
        except TableNotFoundError:
            missing.append(name)
    if missing and (foreign := list(itertools.islice(_foreign_names(location, store, missing), 3))):
        raise DatasetError(
            f"{location.uri} contains other files: {', '.join(map(one_line, foreign))}. "
            "Choose a new or empty folder."
        )
    for name in missing:
        if not location.is_remote:
            Path(location.table(name)).mkdir(parents=True, exist_ok=True)
        DeltaTable.create(
            location.table(name),
            arrow_schema(name),
            mode="ignore",
            partition_by=PARTITIONS.get(name),
            storage_options=location.options,
        )


def _foreign_names(location: Location, store: Store, missing: Sequence[str]) -> Iterator[str]:
    """Yields names that don't belong to a dataset: `vacuum` would delete files in the folder of a table."""
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
    """A run to write, with its row in the dataset."""

    run: RecordedRun
    content: Content
    place: str
    record_state: str
    before: Mapping[str, Any] | None
    change: Change = "added"
    part: int = 0
    shelf: int = 0

    @property
    def run_id(self) -> str:
        return self.run.run_id

    def places(self) -> Iterator[Mapping[str, Any]]:
        """Yields the new place of its rows, and the earlier one."""
        yield {"run_id": self.run_id, "part": self.part, "shelf": self.shelf}
        if self.before is not None:
            yield self.before


def _time_of(run: RecordedRun) -> float:
    return run.updated_at or 0.0


class _Compaction:
    """One compaction, over as many attempts as it takes."""

    def __init__(
        self,
        writer: DatasetWriter,
        runs: Sequence[RecordedRun],
        damaged: dict[Path, str],
        *,
        removes_gone: bool,
        includes_deleted: bool,
    ) -> None:
        self.writer = writer
        self._runs = runs
        # If the folder of a run is not among these, another run with its id may replace it.
        self._kept_paths = {text_of(run.place) for run in runs} if removes_gone else None
        self._includes_deleted = includes_deleted
        self._changes: dict[str, str] = {}
        self._damaged = damaged
        self._left_out: dict[str, Any] = {}
        # Set by each attempt.
        self._deleted: set[str] = set()
        self._wide: WideColumns

    def report(self) -> CompactReport:
        """Returns the result."""
        snapshot = load(self.writer.location)
        files = snapshot.tables["metrics"].get_add_actions()
        counts: dict[str, Any] = Counter(self._changes.values())
        return CompactReport(
            self.writer.location.uri,
            snapshot.version,
            snapshot.tables["runs"].count(),
            snapshot.tables["metrics"].count(),
            size=sum(files.column("size_bytes").to_pylist()),
            damaged=tuple(self._damaged.items()),
            without_column=tuple(sorted(self._wide.left_out)),
            **counts,
            **self._left_out,
        )

    # Runs.

    def write_runs(self) -> None:
        """Writes the new and changed runs, grouped by the kind of change."""
        deleted = self.writer.snapshot.arrow("deleted").to_table()
        self._deleted = set(deleted.column("run_id").to_pylist())
        self._wide = WideColumns(self.writer.snapshot.arrow("runs").schema)
        for change, items in itertools.groupby(self._choose(), operator.attrgetter("change")):
            for group in _groups(items):
                self._write_group(change, group)

    def remove_gone(self) -> None:
        """Removes runs from the dataset if their folders are gone."""
        there = {run.run_id for run in self._runs}
        # A damaged sidecar has no readable id, so such runs are found by path.
        damaged = {text_of(path) for path in self._damaged} | {
            text_of(run.place) for run in self._runs if run.record.path in self._damaged
        }
        known = self._known()
        paths = {row["path"] for row in known.values()}
        if known and not self._runs:
            raise DatasetError(
                f"no runs were found, so remove_gone would remove all {len(known)} runs of "
                f"{self.writer.location.uri}. Check the folder of the runs, or delete the dataset."
            )
        gone = [run_id for run_id, row in known.items() if run_id not in there and row["path"] not in damaged]
        for run in self._runs if gone else ():
            is_known = run.run_id in known or text_of(run.place) in paths
            if run.record.problem is not None and run.status == "unknown" and not is_known:
                raise DatasetError(
                    f"remove_gone cannot identify the run {run.place}: {run.record.problem}. "
                    "Fix this, or compact without it."
                )
        if gone:
            delete_runs(self.writer, [known[run_id] for run_id in gone], is_forever=False)
            self._changes |= dict.fromkeys(gone, "removed")

    def _known(self) -> dict[str, dict[str, Any]]:
        """Returns the columns to compare with, by run id."""
        columns = ["run_id", "path", "updated_at", "state", "stamp", "record_state", "edits", "points"]
        columns += ["size", "part", "shelf"]
        rows = self.writer.snapshot.arrow("runs").to_table(columns=columns).to_pylist()
        return {row["run_id"]: row for row in rows}

    def _ended(self) -> dict[str, RecordedRun]:
        """Returns the newest readable run of each id; counts the others."""
        newest: dict[str, RecordedRun] = {}
        counts, duplicates = Counter(alive=0, deleted=0, empty=0), []
        for run in sorted(self._runs, key=_time_of):
            path = run.record.path
            if run.record.problem is not None:
                self._damaged[path] = run.record.problem
            elif run.run_id in self._deleted and not self._includes_deleted:
                counts["deleted"] += 1
            elif path not in self._damaged:
                try:
                    counts["alive"] += (is_written := run.as_listed.is_written)
                except OSError as error:
                    self._damaged[path] = str(error)
                    continue
                if is_written:
                    continue
                if (older := newest.get(run.run_id)) is not None:
                    duplicates.append(older.record.path)
                newest[run.run_id] = run
        self._left_out = {**counts, "duplicates": duplicates}
        return newest

    def _choose(self) -> list[_Item]:
        """Returns the runs to write, sorted by change (new ones first) and part."""
        known, chosen = self._known(), []
        for run_id, run in self._ended().items():
            try:
                content = Content.of(run, known.get(run_id))
            except (OSError, RunsError) as error:
                self._damaged[run.record.path] = str(error)
                continue
            self._left_out["empty"] += not content.has_metrics
            item = _Item(run, content, text_of(run.place), record_state(run.record), known.get(run_id))
            if self._has_changed(item):
                chosen.append(item)
        places = Placement(known.values(), sum(item.content.size for item in chosen))
        for item in sorted(chosen, key=lambda item: item.content.size):
            item.part, item.shelf = places.place(item.content.size, item.before)
        return sorted(chosen, key=lambda item: (item.change, item.part))

    def _has_changed(self, item: _Item) -> bool:
        """Returns whether a run must be written, and sets the change of the item."""
        run, before, content = item.run, item.before, item.content
        if before is None:
            return True
        is_moved = before["path"] != item.place
        is_gone = self._kept_paths is not None and before["path"] not in self._kept_paths
        is_older = is_moved and (before["updated_at"] or 0.0) > _time_of(run)
        if is_older and not is_gone:
            self._left_out["duplicates"].append(run.record.path)
            return False
        if is_moved and not is_gone and Path(before["path"]).is_dir():
            # This run replaces another one with the same id.
            self._left_out["duplicates"].append(Path(before["path"]))
        if before["points"] and not content.has_metrics and not (is_older and is_gone):
            self._damaged[run.record.path] = "its metrics are gone. The dataset keeps its earlier values."
            return False
        if is_older or before["state"] != content.state:
            item.change = "changed"
        elif is_moved or before["record_state"] != item.record_state:
            item.change = "updated"
        else:
            self._changes.setdefault(run.run_id, "unchanged")
            return False
        return True

    def _write_group(self, change: Change, group: Sequence[_Item]) -> None:
        """Writes the readable runs in one transaction of each table."""
        import pyarrow as pa

        while items := [item for item in group if item.run.record.path not in self._damaged]:
            places = [place for item in items for place in item.places()]
            rows: dict[str, list[dict[str, Any]]] = {
                name: [] for name in COLUMNS if name not in {"metrics", "deleted"}
            }
            values, damaged = self._read(items, rows), len(self._damaged)
            replaced = {name: None if change == "added" else condition(name, places) for name in COLUMNS}
            try:
                self.writer.write("metrics", values, replaced["metrics"])
            except Exception:
                # Delta's writer hides the error of an unreadable run, which is then among the damaged ones.
                if len(self._damaged) == damaged:
                    raise
                continue
            if again := [place for place in places if place["run_id"] in self._deleted]:
                self.writer.write("deleted", (), condition("deleted", again))
            for name, found in rows.items():
                schema = self._wide.schema(found) if name == "runs" else arrow_schema(name)
                self.writer.write(name, pa.Table.from_pylist(found, schema), replaced[name])
            self._changes |= dict.fromkeys((item.run_id for item in items), change)
            return

    def _read(self, items: Sequence[_Item], rows: Mapping[str, list[dict[str, Any]]]) -> Iterator[Any]:
        """Yields the values of runs as record batches, and adds rows for the other tables to `rows`."""
        for _, of_part in itertools.groupby(items, operator.attrgetter("part")):
            yield from _in_order(batch for item in of_part for batch in self._read_one(item, rows))

    def _read_one(self, item: _Item, rows: Mapping[str, list[dict[str, Any]]]) -> Iterator[Any]:
        record, own = item.run.record, {"run_id": item.run_id, "part": item.part, "shelf": item.shelf}
        found: dict[str, Iterable[Mapping[str, Any]]] = {}
        try:
            with opened(item.run) as run:
                if problems := run.problems():
                    # A scan reads no rows, and downloads none.
                    raise RunsError("; ".join(problems))  # noqa: TRY301  # handled below like the others
                points = 0
                for batch in values_of(run, item.run_id, item.part):
                    points += len(batch)
                    yield batch
                summary = summary_of(run, record)
                found["records"] = list(record_rows(run, item.place))
                _check_unchanged(item)
            found["summary"] = ({"metric": name, **summary_row(one)} for name, one in summary.items())
            found["hparams"] = ({"name": name, **json_of(value)} for name, value in record.hparams.items())
            fields = attrs.asdict(record, recurse=False)
            fields = with_edits(fields, item.before["edits"] if item.before else None)
            content = {"state": item.content.state, "stamp": item.content.stamp, "size": item.content.size}
            about = {"path": item.place, "points": points, "record_state": item.record_state}
            found["runs"] = [{**fields, **content, **about, **self._wide.cells(record.hparams, summary)}]
            for name, every in found.items():
                rows[name].extend({**row, **own} for row in every)
        except Exception as error:  # An error of one run must not stop the others.
            self._damaged[record.path] = str(error)
            raise

    # Files.

    def optimize(self) -> None:
        """Joins and sorts the files of each part or shelf that is not in order."""
        is_any = False
        for name, order in _ORDERS.items():
            if name == "runs" and not is_any:
                return
            column = PARTITIONS[name]
            wanted = _unordered(self.writer.snapshot.tables[name], column, order[0])
            if name == "runs":
                # Delta's own optimize would commit even if another writer committed to `runs` first.
                self._join_runs(wanted)
            elif wanted:
                is_any = True
                self.writer.table(name).optimize.z_order(
                    order,
                    partition_filters=[(column, "in", wanted)],
                    max_concurrent_tasks=1,
                    max_spill_size=_SPILL_BYTES,
                    max_temp_directory_size=_NO_LIMIT,
                    writer_properties=writer_properties(name),
                    commit_properties=self.writer.commit_of(name),
                )

    def _join_runs(self, shelves: Sequence[str]) -> None:
        import pyarrow.compute as pc

        numbers = sorted(map(int, shelves))
        rows = self.writer.snapshot.arrow("runs").to_table(filter=pc.field("shelf").isin(numbers))
        replaced = f"shelf IN ({', '.join(map(str, numbers))})" if numbers else None
        self.writer.write("runs", rows if numbers else (), replaced)

    def vacuum(self, days: float) -> None:
        """Deletes the files that no version of the last days needs."""
        for name in COLUMNS:
            self.writer.table(name).vacuum(
                retention_hours=math.ceil(days * 24),
                dry_run=False,
                enforce_retention_duration=False,
                full=True,
                commit_properties=self.writer.commit_of(name),
            )
        self.writer.write("runs", ())


def _groups(items: Iterable[_Item]) -> Iterator[list[_Item]]:
    """Yields lists of runs, one for each transaction."""
    group: list[_Item] = []
    size = 0
    for item in items:
        size += item.content.size
        if group and (len(group) == _GROUP_RUNS or size > _GROUP_BYTES):
            yield group
            group, size = [], item.content.size
        group.append(item)
    if group:
        yield group


def _in_order(batches: Iterator[Any]) -> Iterator[Any]:
    """Yields the values of a part, sorted by metric if they fit in memory; each metric keeps its order."""
    import pyarrow as pa

    held, count = [], 0
    for batch in batches:
        held.append(batch)
        count += len(batch)
        if count > _SORTED_VALUES:
            yield from held
            yield from batches
            return
    if held:
        yield from pa.Table.from_batches(held).sort_by("metric").combine_chunks().to_batches()


def _unordered(table: Any, partition: str, column: str) -> list[str]:
    """Returns the partitions of a table whose files are small or overlap in a column."""
    import pyarrow as pa

    files = pa.table(table.get_add_actions(flatten=True))
    names = (f"partition.{partition}", f"min.{column}", f"max.{column}", "size_bytes")
    found: dict[Any, list[tuple[str, str, int]]] = {}
    for number, *file in zip(*(files.column(name).to_pylist() for name in names), strict=True):
        found.setdefault(number, []).append((file[0] or "", file[1] or "", file[2]))
    return [
        str(number)
        for number, ranges in found.items()
        if len(ranges) > 1
        and (
            sum(size for *_, size in ranges) < _FILE_BYTES // 2 * len(ranges)
            or any(end > start for (_, end, _), (start, *_) in itertools.pairwise(sorted(ranges)))
        )
    ]


def _check_unchanged(item: _Item) -> None:
    if item.run.copy is None:
        if not item.run.path.is_dir():
            raise RunsError("its folder is gone")
        if Content.of(item.run, {"stamp": item.content.stamp, "state": ""}).stamp != item.content.stamp:
            raise RunsError("it changed while it was read. Compact again.")
