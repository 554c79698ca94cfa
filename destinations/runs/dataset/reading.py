"""Reads a dataset: its runs, their series, and SQL over all of it.

```python
with open_dataset("s3://bucket/dataset") as dataset:
    best = dataset.query(where="hparams.optim.lr >= 1e-3", sort_by="summary.val/acc", limit=3)
    best[0].series("loss").value
    dataset.sql("SELECT run_id, min(value) FROM metrics WHERE metric = 'loss' GROUP BY run_id").to_dicts()
```

An open dataset shows the version that it was opened at, until a compaction with `vacuum_days` removes it.
DuckDB reads the files of a folder itself, and those in a bucket through Arrow: it downloads no extension, and
a bucket is read with the same options as by `uploads`. A query only reads, and reads nothing else.
"""

import contextlib
import functools
import logging
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from destinations.run_directory.layout import column_of
from destinations.runs.errors import (
    DatasetError,
    EditError,
    MetricNotFoundError,
    RunNotFoundError,
    RunsError,
    WriterNotFoundError,
)
from destinations.runs.index.index import Index
from destinations.runs.index.root import Root
from destinations.runs.index.scan import ScanChange, ScanReport
from destinations.runs.record import Extremes, RunRecord, Scalar, sound_value
from destinations.runs.run import MetricSummary, Run
from destinations.runs.runs import Result, Runs

from .tables import COLUMNS, WRITER, Location, TableVersions, delta_errors, load, scalar_of

if TYPE_CHECKING:
    from destinations.run_directory.blocks import Block
    from destinations.runs.content.series import Series

__all__ = ["Dataset", "DatasetRun", "SqlResult", "open_dataset", "sql"]

_log = logging.getLogger("destinations")

_MEMORY = "1GB"
_INDEX_ROOT = "/dataset"
_BY_ARROW = "_read_by_arrow"
_READING = frozenset({"SELECT", "EXPLAIN", "MULTI"})
# An EXPLAIN, and what DuckDB makes of a PIVOT, hide the statement that they run.
_HIDING = frozenset({"EXPLAIN", "MULTI"})
_HIDDEN = re.compile(r"\b(?:analy[sz]e|copy|create|delete|insert|merge|update)\b", re.IGNORECASE)
_RECORD_FIELDS = frozenset(field.name for field in attrs.fields(RunRecord)) - {"run_id", "path"}


@attrs.frozen
class SqlResult:
    """What a query returned.

    ```python
    with open_runs("runs") as runs:
        compact(runs, "dataset")
    result = sql("dataset", "SELECT count(*) AS points FROM metrics")
    print(result.columns, result.rows)  # ('points',) ((4,),)
    ```

    Attributes:
        columns: their names.
        rows: their cells, as DuckDB makes Python values of them.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Returns each row by column."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def to_dataframe(self) -> Any:
        """Returns a pandas DataFrame.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas as pd

        return pd.DataFrame(list(self.rows), columns=list(self.columns))


class DatasetRun(Run):
    """A run of a dataset: its record and its metrics.

    Its path is the folder that it was read from. Media and all other records are still there, or nowhere.
    """

    def __init__(self, dataset: "Dataset", record: RunRecord) -> None:
        super().__init__(record)
        self._dataset = dataset

    def __repr__(self) -> str:
        return f"DatasetRun({self.run_id!r}, {self.shown_status})"

    def reload(self) -> "DatasetRun":
        """Returns the run itself: an open dataset does not change."""
        return self

    def _heartbeat_at(self) -> None:
        """None, so that no run is alive: only runs that have ended are compacted."""

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Hyperparameters by dotted name: a dataset does not have them nested."""
        return dict(self.hparams)

    @property
    def writers(self) -> list[str]:
        """The names of its writers that have metrics, sorted."""
        if not self._dataset.has_writers:
            return []
        query = f"SELECT DISTINCT {WRITER} FROM metrics WHERE run_id = ? AND {WRITER} != '' ORDER BY 1"
        return [name for (name,) in self._dataset.sql(query, [self.run_id]).rows]

    def writer(self, name: str) -> Run:
        """Raises `RunNotFoundError`: a dataset has the record of the run, and not those of its writers."""
        raise RunNotFoundError(f"{self.run_id}/{name}")

    def writer_runs(self) -> list[Run]:
        """Returns none; see `writer`."""
        return []

    @property
    def is_written(self) -> bool:
        """False: only runs that have ended are compacted."""
        return False

    def summary_of(self, rank: int, writer: str | None = None) -> dict[str, MetricSummary]:
        """Returns the summary of each metric of rank 0, of all writers; empty for other ranks and for one."""
        if writer is not None and (writer or self.writers):
            return {}
        names = [field.name for field in attrs.fields(MetricSummary)]
        found = self._dataset.sql(
            f"SELECT metric, {', '.join(names)} FROM summary WHERE run_id = ? AND ? = 0", [self.run_id, rank]
        )
        return {name: MetricSummary(*rest) for name, *rest in found.rows}

    def _ranks_with_metrics(self) -> list[int]:
        """Returns the ranks that have metrics."""
        query = f"SELECT DISTINCT rank FROM metrics WHERE run_id = ? AND {WRITER} = '' ORDER BY rank"
        return [rank for (rank,) in self._dataset.sql(query, [self.run_id]).rows]

    def metric_names(self, rank: int = 0) -> list[str]:
        """Returns the columns of all metrics of a rank, by name."""
        query = "SELECT DISTINCT metric FROM metrics WHERE run_id = ? AND rank = ? ORDER BY metric"
        return [name for (name,) in self._dataset.sql(query, [self.run_id, rank]).rows]

    def series(self, name: str, rank: int = 0, writer: str | None = None) -> "Series":
        """Returns all values of a metric; as `Run.series`, but for the epoch."""
        from destinations.runs.content.series import merged_by_step

        writers = ["", *self.writers]
        if writer is not None and writer not in writers:
            raise WriterNotFoundError(writer, writers[1:])
        every = [(one, self._series_of(one, name, rank)) for one in writers if writer in {None, one}]
        found = [(one, series) for one, series in every if len(series)]
        if not found:
            raise MetricNotFoundError(name, self.metric_names(rank))
        return merged_by_step(found)

    def _series_of(self, writer: str, name: str, rank: int) -> "Series":
        """Returns the values of one writer in the order of logging; none where it has none."""
        from destinations.run_directory.blocks import MISSING_STEP
        from destinations.runs.content.series import Series

        arrays = self._dataset.arrays(
            f"""SELECT coalesce(step, ?) AS step, coalesce(epoch_us(time) / 1e6, 'NaN') AS time, value
                FROM metrics WHERE metric = ? AND run_id = ? AND rank = ? AND {WRITER} = ? ORDER BY row""",
            [MISSING_STEP, column_of(name), self.run_id, rank, writer],
        )
        return Series(name, **arrays)

    def blocks(self, rank: int = 0, writer: str | None = None) -> "Iterator[Block]":
        """Returns the rows of each metric, one metric after the other, of one writer after the other."""
        import numpy as np

        from destinations.run_directory.blocks import Block

        for one in ["", *self.writers]:
            for name in self.metric_names(rank) if writer in {None, one} else ():
                found = self._series_of(one, name, rank)
                columns = {name: (found.value, np.ones(len(found), np.bool_))}
                if len(found):
                    yield Block(found.step, found.time, columns, one)


def open_dataset(uri: str | PathLike[str], *, version: int | None = None, **options: Any) -> "Dataset":
    """Opens a dataset that `compact` has written.

    ```python
    with open_runs("runs") as runs:
        compact(runs, "dataset")
    with open_dataset("dataset") as dataset:
        print(len(dataset.query(where="summary.loss < 1")))  # 1
    ```

    Args:
        uri: a path, `s3://`, `gs://` or `az://`, with options as `uploads.open_store` takes them.
        version: an earlier one, as in `CompactReport.version`; None for the newest.
        options: more of these options, also credentials.

    Raises:
        DatasetError: there is no dataset, or no such version.
        ImportError: deltalake or DuckDB is not installed.
    """
    return Dataset(load(Location.of(uri, options), version))


def sql(uri: str | PathLike[str], query: str, parameters: Sequence[Any] = (), **options: Any) -> SqlResult:
    """Opens a dataset for one query; see `Dataset.sql`.

    ```python
    with open_runs("runs") as runs:
        compact(runs, "dataset")
    print(sql("dataset", "SELECT max(value) FROM metrics WHERE metric = ?", ["loss"]).rows)  # ((1.0,),)
    ```
    """
    with open_dataset(uri, **options) as dataset:
        return dataset.sql(query, parameters)


def _quoted(text: str) -> str:
    """Returns a text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


class Dataset(Runs):
    """A dataset that is open: its runs are queried as those of folders are, and have their series.

    ```python
    with open_runs("runs") as runs:
        compact(runs, "dataset")
    with open_dataset("dataset") as dataset:
        print(dataset["digits"].series("loss").value)
    ```

    It shows the version that it was opened at. The first query of its runs reads the records of all into an
    index in memory, some 100 µs for each; `sql`, `files` and `arrow` do without.

    Args:
        snapshot: its tables.
        clock: the time in seconds since 1970, for filters.
    """

    def __init__(self, snapshot: TableVersions, *, clock: Callable[[], float] = time.time) -> None:
        try:
            import duckdb
        except ImportError as error:
            raise ImportError(
                f'datasets need DuckDB ({error}). Run: pip install "training-destinations[query]"'
            ) from error
        # By default DuckDB would write what exceeds its memory to the current folder.
        spill = Path(tempfile.gettempdir(), f"duckdb-{uuid.uuid4().hex}")
        self._connection = duckdb.connect(config={"memory_limit": _MEMORY, "temp_directory": str(spill)})
        self._index = Index(_INDEX_ROOT, None)
        super().__init__([Root(_INDEX_ROOT, self._index)], clock=clock)
        # By the folder in the index: the one that the run was read from, and the id.
        self._folders: dict[Path, tuple[Path, str]] = {}
        self._snapshot = snapshot
        self._paths: list[str] = []
        try:
            self._make_views()
        except BaseException:
            self.close()
            raise

    def _make_views(self) -> None:
        # What DuckDB cannot do by itself is an error at once, and not a download.
        self._connection.execute("SET autoinstall_known_extensions = false")
        self._connection.execute("SET autoload_known_extensions = false")
        self._connection.execute("SET TimeZone = 'UTC'")
        sources = {name: self._source(name) for name in COLUMNS}
        self._paths = [path for _, files, _ in sources.values() for path in files]
        self._connection.execute(f"SET allowed_paths = [{', '.join(map(_quoted, self._paths))}]")
        self._connection.execute("SET python_enable_replacements = false")
        self._connection.execute("SET enable_external_access = false")
        for name, (source, _, names) in sources.items():
            # As a timestamp without a zone, which Python reads without another package.
            columns = "* REPLACE (CAST(time AS TIMESTAMP) AS time)" if name == "metrics" else "*"
            columns += f", '' AS {WRITER}" if name == "metrics" and WRITER not in names else ""
            with self._query_errors():
                self._connection.execute(f"CREATE VIEW {name} AS SELECT {columns} FROM {source}")
        self._connection.execute("SET lock_configuration = true")
        ((count,),) = self.sql("SELECT count(*) FROM runs").rows
        self.report = ScanReport(runs=count)

    @property
    def uri(self) -> str:
        """Where it is."""
        return self._snapshot.location.uri

    @property
    def version(self) -> int:
        """The version that it shows."""
        return self._snapshot.version

    @property
    def versions(self) -> dict[str, int]:
        """The version of each table, for another engine; that of `runs` is the version of the dataset."""
        return {name: table.version() for name, table in self._snapshot.tables.items()}

    @functools.cached_property
    def has_writers(self) -> bool:
        """Whether several writers have added to any of its runs."""
        return bool(self.sql(f"SELECT 1 FROM metrics WHERE {WRITER} != '' LIMIT 1").rows)

    @property
    def roots(self) -> tuple[Path, ...]:
        """No folders."""
        return ()

    def files(self, table: str = "metrics") -> list[str]:
        """Returns the Parquet files of a table, for an engine that does not know Delta Lake.

        Args:
            table: "metrics", "runs", "hparams" or "summary".
        """
        # Not `file_uris`, which quotes blanks and the like in the path of a folder.
        paths = self._snapshot.tables[table].get_add_actions().column("path").to_pylist()
        return [f"{self._snapshot.location.table(table)}/{path}" for path in paths]

    def arrow(self, table: str = "metrics") -> Any:
        """Returns a table as a `pyarrow.dataset.Dataset`."""
        return self._snapshot.arrow(table)

    def sql(self, query: str, parameters: Sequence[Any] = ()) -> SqlResult:
        """Runs a query over the tables `metrics`, `runs`, `hparams` and `summary`.

        A query that reads, in all of DuckDB's SQL: `SELECT`, `WITH`, `FROM`, `PIVOT`, `DESCRIBE`,
        `SUMMARIZE`, `EXPLAIN`. It reads the files of the dataset and no others, makes no connection, loads no
        extension, and changes no setting. Write a result with `to_dataframe`, or take the tables with
        `arrow`.

        Args:
            query: SQL; `?` stands for a parameter.
            parameters: its values.

        Raises:
            DatasetError: the query is wrong, does something else than read the dataset, or a file cannot be
                read.
        """

        def fetch(found: Any) -> SqlResult:
            return SqlResult(tuple(one[0] for one in found.description or ()), tuple(found.fetchall()))

        return self._execute(query, parameters, fetch)

    def arrays(self, query: str, parameters: Sequence[Any] = ()) -> dict[str, Any]:
        """Runs a query as `sql` does; returns each column as a numpy array."""
        return self._execute(query, parameters, lambda found: found.fetchnumpy())

    def scan(self, *, full: bool = False) -> ScanReport:
        """Does nothing: an open dataset does not change; open it again to see what was compacted since."""
        return self.report

    def edit(self, run: Any, **changes: Any) -> Run:
        """Raises `EditError`: edits are written to the folder of a run, and compacted with it."""
        raise EditError(
            f"runs of the dataset {self.uri} are read-only. Edit the run in its folder, then compact again."
        )

    def close(self) -> None:
        """Closes the tables."""
        super().close()
        self._connection.close()

    def _source(self, name: str) -> tuple[str, list[str], list[str]]:
        """Returns what DuckDB reads a table from, these files, and its columns; Arrow where it cannot."""
        with delta_errors(self.uri):
            table, files = self.arrow(name), self.files(name)
        names = table.schema.names
        # DuckDB takes the columns of the first file for those of all, and a name for a pattern.
        wanted = [column for column in COLUMNS[name] if column != WRITER or column in names]
        are_same = name != "runs" and names == wanted
        if (
            self._snapshot.location.is_remote
            or not files
            or not are_same
            or any(char in self.uri for char in "*?")
        ):
            self._connection.register(name + _BY_ARROW, table)
            return name + _BY_ARROW, [], names
        # A fifth of the time that it takes through Arrow.
        return f"read_parquet([{', '.join(map(_quoted, files))}], hive_partitioning = false)", files, names

    def _execute(self, query: str, parameters: Sequence[Any], fetch: Callable[[Any], Result]) -> Result:
        with self._query_errors(), self._lock:
            query.encode()  # Of what has no UTF-8, DuckDB raises a RuntimeError.
            if self._is_closed:
                raise RunsError("this dataset is closed. Open it again with open_dataset(...).")
            for statement in self._connection.extract_statements(query):
                kind = statement.type.name
                if kind not in _READING:
                    raise DatasetError(f"query must only read the dataset, got {kind}.")
                if kind in _HIDING and (hidden := _HIDDEN.search(query)):
                    raise DatasetError(f"query must only read the dataset, got {kind} {hidden[0].upper()}.")
            if (result := self._connection.execute(query, list(parameters) or None)) is not None:
                return fetch(result)
        raise DatasetError("query must be one that DuckDB understands, got nothing.")

    @contextlib.contextmanager
    def _query_errors(self) -> Iterator[None]:
        import duckdb

        try:
            yield
        except (duckdb.Error, UnicodeEncodeError) as error:
            # What Arrow cannot read, or is damaged, is an error of the query for DuckDB.
            # DuckDB 1.2 does not name the view.
            text = str(error)
            is_refused = isinstance(error, duckdb.PermissionException)
            if is_refused and not any(path in text for path in self._paths):
                raise DatasetError(f"query must only read the dataset, got: {text}") from error
            signs = (_BY_ARROW, "arrow_scan", self.uri)
            if is_refused or isinstance(error, duckdb.IOException) or any(sign in text for sign in signs):
                raise DatasetError(
                    f"dataset {self.uri} cannot be read: {text.splitlines()[0]}. "
                    f"Open it again: its version {self.version} may have been vacuumed, or a file is damaged."
                ) from error
            raise DatasetError(f"query must be one that DuckDB understands, got: {text}") from error

    def _with_retry(self, ask: Callable[[], Result]) -> Result:
        with self._lock:
            if not self._folders and not self._is_closed:
                for number, record in enumerate(self._read_records()):
                    # Two runs may have been in the same folder, one after the other.
                    place = f"{number}/{record.path.name}"
                    self._folders[Path(_INDEX_ROOT, place)] = record.path, record.run_id
                    fields = attrs.asdict(record, recurse=False)
                    self._index.add(ScanChange(place, fields, None, record.heartbeat_at, 0, 0, "", 0))
                self._index.write()
                self._index.make_indexes()
            return super()._with_retry(ask)

    def _read_records(self) -> Iterator[RunRecord]:
        hparams: dict[str, dict[str, Scalar]] = {}
        query = "SELECT run_id, name, type, json FROM hparams WHERE run_id IS NOT NULL AND name IS NOT NULL"
        for run_id, name, kind, value in self.sql(query).rows:
            hparams.setdefault(run_id, {})[name] = scalar_of(kind, value)
        summary: dict[str, dict[str, float]] = {}
        query = "SELECT run_id, metric, last FROM summary WHERE last IS NOT NULL AND metric IS NOT NULL"
        for run_id, name, last in self.sql(query).rows:
            summary.setdefault(run_id, {})[name] = last
        names = [name for name in self.arrow("runs").schema.names if name in _RECORD_FIELDS]
        for run_id, path, *rest in self.sql(f"SELECT run_id, path, {', '.join(names)} FROM runs").rows:
            if not run_id or not path or "\0" in path:
                _log.warning("left out a row of %s: run %r in %r", self.uri, run_id, path)
                continue
            found = zip(names, rest, strict=True)
            values = {name: sound_value(name, one) for name, one in found if one is not None}
            # A dataset of another version may lack it.
            values.setdefault("kind", "run-directory")
            groups: dict[str, Any] = {"hparams": hparams.get(run_id, {}), "summary": summary.get(run_id, {})}
            yield RunRecord(path=Path(path), run_id=run_id, **groups, **values)

    def _find(self, wanted: Any) -> RunRecord:
        if isinstance(wanted, Run | RunRecord):
            wanted = wanted.run_id
        return super()._find(str(wanted))

    def _run(self, record: RunRecord) -> DatasetRun:
        return DatasetRun(self, record)

    def _fetch(self, found: Any) -> list[RunRecord | None]:
        records = super()._fetch(found)
        return [record and attrs.evolve(record, path=self._folders[record.path][0]) for record in records]

    def _reader_of_extremes(self, metric: str) -> Callable[[str], Extremes | None]:
        query = "SELECT run_id, min, min_step, max, max_step FROM summary WHERE metric = ?"
        found = {run_id: tuple(values) for run_id, *values in self.sql(query, [metric]).rows}
        return lambda folder: found.get(self._folders[Path(folder)][1])
