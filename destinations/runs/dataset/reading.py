"""Reads a dataset: its runs, their series, and SQL over all of it.

```python
with open_dataset("s3://bucket/dataset") as dataset:
    best = dataset.query(where="hparams.optim.lr >= 1e-3", sort_by="summary.val/acc", limit=3)
    best[0].series("loss").value
    dataset.sql("SELECT run_id, min(value) FROM metrics WHERE metric = 'loss' GROUP BY run_id").to_dicts()
```

An open dataset shows the version at which it was opened, until a compaction with `vacuum_days` deletes it.
DuckDB reads the files of a folder directly and a bucket through Arrow, so it downloads no extension and uses
the same options as `uploads`. A query can only read, and only the dataset.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import re
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from destinations.kinds import KINDS, kind_of
from destinations.kinds.line import Line
from destinations.kinds.tables import TableEntry
from destinations.kinds.texts import TEXT
from destinations.run_directory.layout import column_of
from destinations.runs.content.records import RecordCount, Records, chosen, count_records
from destinations.runs.errors import (
    DatasetError,
    MetricNotFoundError,
    RunNotFoundError,
    RunsError,
    WriterNotFoundError,
)
from destinations.runs.index.index import Index
from destinations.runs.index.root import Root
from destinations.runs.index.scan import ScanChange, ScanReport
from destinations.runs.record import Extremes, RunRecord, Scalar, sound_value
from destinations.runs.run import MetricSummary, RecordedRun
from destinations.runs.runs import Result, RunLike, Runs
from uploads import needs_package

from .tables import COLUMNS, PARTITIONS, Location, TableVersions, delta_errors, load, scalar_of
from .writing import DatasetWriter, condition, delete_runs, edited_row

if TYPE_CHECKING:
    from destinations.run_directory.blocks import Block
    from destinations.runs.content.series import Series

__all__ = ["Dataset", "DatasetRun", "SqlResult", "open_dataset", "sql"]

_log = logging.getLogger("destinations")

Parameters = Sequence[Any] | Mapping[str, Any]

_MEMORY = "1GB"
_INDEX_ROOT = "/dataset"
_BY_ARROW = "_read_by_arrow"
_READING = frozenset({"SELECT", "EXPLAIN", "MULTI"})
# EXPLAIN, and the statements into which DuckDB splits PIVOT, hide the statement that they run.
_HIDING = frozenset({"EXPLAIN", "MULTI"})
_HIDDEN = re.compile(r"\b(?:analy[sz]e|copy|create|delete|insert|merge|update)\b", re.IGNORECASE)
# The errors that a malformed record may raise.
_DAMAGED = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, IndexError)
_RECORD_FIELDS = frozenset(field.name for field in attrs.fields(RunRecord)) - {"run_id", "path"}


@attrs.frozen
class SqlResult:
    """The result of a query.

    ```python
    with open_runs("runs") as runs:
        compact(runs, "dataset")
    result = sql("dataset", "SELECT count(*) AS points FROM metrics")
    print(result.columns, result.rows)  # ('points',) ((4,),)
    ```

    Attributes:
        columns: the names of the columns.
        rows: the cells as Python values.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Returns each row as a dict."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def to_dataframe(self) -> Any:
        """Returns a pandas DataFrame.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas as pd

        return pd.DataFrame(list(self.rows), columns=list(self.columns))


class DatasetRun(RecordedRun):
    """A run of a dataset: its record, metrics, texts and tables, and links to its other records.

    Its path is the folder it was read from. That folder and its media may be gone.
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
        """None, so that no run counts as alive: only finished runs are compacted."""

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Hyperparameters by dotted name; a dataset does not store them nested."""
        return dict(self.hparams)

    @property
    def writers(self) -> list[str]:
        """The sorted names of the writers that have metrics."""
        if not self._dataset.has_writers:
            return []
        query = "SELECT DISTINCT writer FROM metrics WHERE run_id = ? AND writer != '' ORDER BY 1"
        return [name for (name,) in self._dataset.sql(query, [self.run_id]).rows]

    def writer(self, name: str) -> RecordedRun:
        """Raises `RunNotFoundError`: a dataset has no records of writers."""
        raise RunNotFoundError(f"{self.run_id}/{name}")

    def writer_runs(self) -> list[RecordedRun]:
        """Returns an empty list; see `writer`."""
        return []

    @property
    def is_written(self) -> bool:
        """False: only finished runs are compacted."""
        return False

    def summary_of(self, rank: int, writer: str | None = None) -> dict[str, MetricSummary]:
        """Returns the summary of each metric of rank 0 over all writers; otherwise empty."""
        if writer is not None and (writer or self.writers):
            return {}
        names = [field.name for field in attrs.fields(MetricSummary)]
        found = self._dataset.sql(
            f"SELECT metric, {', '.join(names)} FROM summary WHERE run_id = ? AND ? = 0", [self.run_id, rank]
        )
        return {name: MetricSummary(*rest) for name, *rest in found.rows}

    def _ranks_with_metrics(self) -> list[int]:
        """Returns the ranks that have metrics."""
        query = "SELECT DISTINCT rank FROM metrics WHERE run_id = ? AND writer = '' ORDER BY rank"
        return [rank for (rank,) in self._dataset.sql(query, [self.run_id]).rows]

    def metric_names(self, rank: int = 0) -> list[str]:
        """Returns the sorted names of all metrics of a rank."""
        query = "SELECT DISTINCT metric FROM metrics WHERE run_id = ? AND rank = ? ORDER BY metric"
        return [name for (name,) in self._dataset.sql(query, [self.run_id, rank]).rows]

    def series(self, name: str, rank: int = 0, writer: str | None = None) -> "Series":
        """Returns all values of a metric, like `RecordedRun.series` but without epochs."""
        if writer is not None and writer not in (writers := ["", *self.writers]):
            raise WriterNotFoundError(writer, writers[1:])
        found = self._dataset.series(name, [self], rank, writer)
        if not found:
            raise MetricNotFoundError(name, self.metric_names(rank))
        return found[self.run_id]

    def blocks(self, rank: int = 0, writer: str | None = None) -> "Iterator[Block]":
        """Yields the values of each metric of each writer, one after the other."""
        import numpy as np

        from destinations.run_directory.blocks import Block

        for one in ["", *self.writers] if writer is None else [writer]:
            for name in self.metric_names(rank):
                for found in self._dataset.series(name, [self], rank, one).values():
                    columns = {name: (found.value, np.ones(len(found), np.bool_))}
                    yield Block(found.step, found.time, columns, one)

    @property
    def _records(self) -> Records:
        return _DatasetRecords(self._dataset, self)


class _DatasetRecords(Records):
    """The records of a run of a dataset."""

    def __init__(self, dataset: "Dataset", run: DatasetRun) -> None:
        super().__init__(run.path)
        self._dataset = dataset
        self._run_id = run.run_id

    def of(self, plural: str, name: str | None = None, step: int | None = None) -> list[Any]:
        """Returns the records of a kind; their paths are the original ones."""
        return chosen((record for record, _ in self._with_content(plural)), name, step)

    def _with_content(self, plural: str) -> Iterator[tuple[Any, str | None]]:
        """Yields each record of a kind with its text or CSV; damaged records are left out."""
        kind = kind_of(plural=plural)
        query = "SELECT path, content, fields FROM records WHERE run_id = ? AND kind = ? ORDER BY row"
        for link, content, text in self._dataset.sql(query, [self._run_id, kind.name]).rows:
            with contextlib.suppress(*_DAMAGED):
                fields = json.loads(text)
                folder = self._run_dir
                if link:
                    parts = [part for part in str(fields.get("path")).split("/") if part not in {"", "."}]
                    folder = Path(link).parents[len(parts) - 1]
                given = {"text": content} if kind is TEXT else {}
                yield kind.parse(Line(folder, fields | given)), content

    def _table(self, name: str, step: int | None) -> TableEntry:
        """Returns a table; its path is a temporary file with the content from the dataset."""
        entry = super()._table(name, step)
        for one, content in self._with_content("tables"):
            if one == entry and content is not None:
                return attrs.evolve(entry, path=self._dataset.file_of(content))
        return entry

    def overview(self) -> dict[str, RecordCount]:
        """Returns the number of records by kind."""
        found: dict[str, RecordCount] = {}
        for kind in KINDS:
            count_records(((kind, record) for record in self.of(kind.plural)), found)
        return found

    def damaged_lines(self) -> dict[str, int]:
        """Returns an empty dict: `compact` leaves damaged lines out."""
        return {}


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
        version: an earlier version, as in `CompactReport.version`; None for the newest.
        options: more of these options, such as credentials.

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
    """Returns a text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


class Dataset(Runs):
    """An open dataset. Its runs are queried like runs in folders.

    ```python
    with open_runs("runs") as runs:
        compact(runs, "dataset")
    with open_dataset("dataset") as dataset:
        print(dataset["digits"].series("loss").value)
    ```

    It shows the version at which it was opened. The first query for runs loads all records into an index in
    memory, at about 100 µs each; `sql`, `files` and `arrow` don't need it.

    Args:
        snapshot: the tables.
    """

    def __init__(self, snapshot: TableVersions) -> None:
        super().__init__([])
        # Temporary files of tables.
        self._files = tempfile.TemporaryDirectory(prefix="dataset-")
        self._show(snapshot)

    def _show(self, snapshot: TableVersions) -> None:
        """Opens a version of the tables."""
        with needs_package("a dataset", "duckdb"):
            import duckdb
        # By default, DuckDB spills to the current folder.
        spill = Path(tempfile.gettempdir(), f"duckdb-{uuid.uuid4().hex}")
        self._connection = duckdb.connect(config={"memory_limit": _MEMORY, "temp_directory": str(spill)})
        self._index = Index(_INDEX_ROOT, None)
        self._roots = (Root(_INDEX_ROOT, self._index),)
        # The original folder and the id, by the folder in the index.
        self._folders: dict[Path, tuple[Path, str]] = {}
        self._snapshot = snapshot
        self._paths: list[str] = []
        vars(self).pop("has_writers", None)
        try:
            self._make_views()
        except BaseException:
            self.close()
            raise

    def _make_views(self) -> None:
        # A missing extension is an error instead of a download.
        self._connection.execute("SET autoinstall_known_extensions = false")
        self._connection.execute("SET autoload_known_extensions = false")
        self._connection.execute("SET TimeZone = 'UTC'")
        sources = {name: self._source(name) for name in COLUMNS}
        self._paths = [path for _, files, _ in sources.values() for path in files]
        self._connection.execute(f"SET allowed_paths = [{', '.join(map(_quoted, self._paths))}]")
        self._connection.execute("SET python_enable_replacements = false")
        self._connection.execute("SET enable_external_access = false")
        for name, (source, _, names) in sources.items():
            columns = f"* EXCLUDE ({hidden})" if (hidden := PARTITIONS.get(name)) in names else "*"
            # Python reads a timestamp without a zone without another package.
            columns += " REPLACE (CAST(time AS TIMESTAMP) AS time)" if name == "metrics" else ""
            with self._query_errors():
                self._connection.execute(f"CREATE VIEW {name} AS SELECT {columns} FROM {source}")
        self._connection.execute("SET lock_configuration = true")
        ((count,),) = self.sql("SELECT count(*) FROM runs").rows
        self.report = ScanReport(runs=count)

    @property
    def uri(self) -> str:
        """The URI of the dataset."""
        return self._snapshot.location.uri

    @property
    def version(self) -> int:
        """The version of the dataset."""
        return self._snapshot.version

    @property
    def versions(self) -> dict[str, int]:
        """The version of each table, for another engine; the version of `runs` is the dataset's."""
        return {name: table.version() for name, table in self._snapshot.tables.items()}

    @functools.cached_property
    def has_writers(self) -> bool:
        """Whether any run has several writers."""
        return bool(self.sql("SELECT 1 FROM metrics WHERE writer != '' LIMIT 1").rows)

    @property
    def roots(self) -> tuple[Path, ...]:
        """Empty: a dataset has no root folders."""
        return ()

    def files(self, table: str = "metrics") -> list[str]:
        """Returns the Parquet files of a table, for engines without Delta Lake.

        Args:
            table: "metrics", "records", "hparams", "summary", "deleted" or "runs".
        """
        # `file_uris` would percent-encode the path of a folder.
        paths = self._snapshot.tables[table].get_add_actions().column("path").to_pylist()
        return [f"{self._snapshot.location.table(table)}/{path}" for path in paths]

    def arrow(self, table: str = "metrics") -> Any:
        """Returns a table as a `pyarrow.dataset.Dataset`."""
        return self._snapshot.arrow(table)

    def sql(self, query: str, parameters: Sequence[Any] = ()) -> SqlResult:
        """Runs a query over the tables `metrics`, `records`, `hparams`, `summary` and `runs`.

        All statements of DuckDB that read are allowed: `SELECT`, `WITH`, `FROM`, `PIVOT`, `DESCRIBE`,
        `SUMMARIZE`, `EXPLAIN`. A query can read only the files of the dataset. It can't connect, load
        extensions or change settings. Convert the result with `to_dataframe`, or get the tables with `arrow`.

        Args:
            query: SQL, with `?` for parameters.
            parameters: the values of the parameters.

        Raises:
            DatasetError: the query is invalid or doesn't only read the dataset, or a file can't be read.
        """

        def fetch(found: Any) -> SqlResult:
            return SqlResult(tuple(one[0] for one in found.description or ()), tuple(found.fetchall()))

        return self._execute(query, parameters, fetch)

    def arrays(self, query: str, parameters: Parameters = ()) -> dict[str, Any]:
        """Runs a query like `sql`, and returns each column as a numpy array."""
        return self._execute(query, parameters, lambda found: found.fetchnumpy())

    def scan(self, *, full: bool = False) -> ScanReport:
        """Does nothing, because an open dataset does not change. Open it again to see new runs."""
        return self.report

    def series(
        self, name: str, runs: Iterable[RunLike] | None = None, rank: int = 0, writer: str | None = None
    ) -> "dict[str, Series]":
        """Returns a metric of many runs with one query; see `Runs.series`."""
        import numpy as np

        from destinations.run_directory.blocks import MISSING_STEP
        from destinations.runs.content.series import Series, merged_by_step

        chosen = None if runs is None else [self._find(run).run_id for run in runs]
        found = self.arrays(
            """SELECT run_id, writer, coalesce(step, $missing) AS step,
                      coalesce(epoch_us(time) / 1e6, 'NaN') AS time, value
               FROM metrics WHERE metric = $metric AND rank = $rank AND writer = coalesce($writer, writer)
                 AND ($runs IS NULL OR list_contains($runs, run_id)) ORDER BY run_id, writer, row""",
            {
                "missing": MISSING_STEP,
                "metric": column_of(name),
                "rank": rank,
                "writer": writer,
                "runs": chosen,
            },
        )
        ids, writers = (np.asarray(found.pop(key), object) for key in ("run_id", "writer"))
        starts = np.flatnonzero((ids[1:] != ids[:-1]) | (writers[1:] != writers[:-1])) + 1
        pieces: dict[str, list[tuple[str, Series]]] = {}
        for start, end in itertools.pairwise([0, *starts, len(ids)] if len(ids) else []):
            one = Series(name, **{key: values[start:end] for key, values in found.items()})
            pieces.setdefault(ids[start], []).append((writers[start], one))
        return {run_id: merged_by_step(every) for run_id, every in pieces.items()}

    def edit(self, run: RunLike, *, based_on: Mapping[str, Any] | None = None, **changes: Any) -> RecordedRun:
        """Edits a run in the dataset, and returns it; see `Runs.edit`.

        The folder of the run is not changed, and may be gone. Added and removed tags survive later
        compactions; a text is kept until the run itself changes it. Afterwards, the dataset shows the newest
        version.

        Args:
            run: the run.
            based_on: as in `Runs.edit`.
            changes: `tags`, `notes`, `display_name` and `archived`, as in `Runs.edit`.

        Raises:
            EditError: a text was changed meanwhile.
            DatasetError: the dataset can't be written.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        if isinstance(changes.get("tags"), str):
            raise TypeError(f"tags must be a list of strings, got {changes['tags']!r}.")
        run_id = self._find(run).run_id

        def write(writer: DatasetWriter) -> None:
            table = writer.snapshot.arrow("runs").to_table(filter=pc.field("run_id") == run_id)
            if not table:
                raise RunNotFoundError(run_id)
            (row,) = table.to_pylist()
            edits = edited_row(row, based_on=based_on, **changes)
            for name, value in edits.items():
                field = table.schema.field(name)
                table = table.set_column(
                    table.schema.get_field_index(name), field, pa.array([value], field.type)
                )
            writer.write("runs", table, condition("runs", [row]))

        self._change(write)
        return self[run_id]

    def delete(self, runs: Iterable[RunLike]) -> None:
        """Deletes runs from the dataset; their folders are kept.

        Later compactions don't add them again, unless you pass `include_deleted`. Earlier versions keep them
        until they are vacuumed. Afterwards, the dataset shows the newest version.

        Args:
            runs: the runs.

        Raises:
            RunNotFoundError: no run matches.
            DatasetError: the dataset can't be written.
        """
        import pyarrow.compute as pc

        ids = [self._find(run).run_id for run in runs]

        def write(writer: DatasetWriter) -> None:
            table = writer.snapshot.arrow("runs")
            found = table.to_table(["run_id", "part", "shelf"], filter=pc.field("run_id").isin(ids))
            if found:
                delete_runs(writer, found.to_pylist(), is_forever=True)

        self._change(write)

    def _change(self, write: Callable[[DatasetWriter], None]) -> None:
        """Changes the newest version, and then shows the result."""
        with self._lock:
            if self._is_closed:
                raise RunsError("this dataset is closed. Open it again with open_dataset(...).")
            writer = DatasetWriter(self._snapshot.location)
            with delta_errors(self.uri):
                writer.repeat(lambda: write(writer))
                snapshot = load(self._snapshot.location)
            self._connection.close()
            self._index.close()
            self._show(snapshot)

    def file_of(self, content: str) -> Path:
        """Returns a temporary file with some content, which exists until the dataset is closed."""
        path = Path(self._files.name, hashlib.sha256(content.encode()).hexdigest())
        path.write_text(content, newline="")
        return path

    def close(self) -> None:
        """Closes the tables."""
        super().close()
        self._connection.close()
        self._files.cleanup()

    def _source(self, name: str) -> tuple[str, list[str], list[str]]:
        """Returns the SQL source of a table, the files that DuckDB itself reads, and the columns."""
        with delta_errors(self.uri):
            table, files = self.arrow(name), self.files(name)
        names = table.schema.names
        # DuckDB assumes that all files have the columns of the first one, and takes names for patterns.
        are_same = name != "runs" and names == list(COLUMNS[name])
        is_pattern = any(char in self.uri for char in "*?")
        if self._snapshot.location.is_remote or not files or not are_same or is_pattern:
            self._connection.register(name + _BY_ARROW, table)
            return name + _BY_ARROW, [], names
        # Five times as fast as through Arrow.
        return f"read_parquet([{', '.join(map(_quoted, files))}], hive_partitioning = false)", files, []

    def _execute(self, query: str, parameters: Parameters, fetch: Callable[[Any], Result]) -> Result:
        with self._query_errors(), self._lock:
            query.encode()  # DuckDB raises a RuntimeError for texts that are not valid UTF-8.
            if self._is_closed:
                raise RunsError("this dataset is closed. Open it again with open_dataset(...).")
            for statement in self._connection.extract_statements(query):
                kind = statement.type.name
                if kind not in _READING:
                    raise DatasetError(f"query must only read the dataset, got {kind}.")
                if kind in _HIDING and (hidden := _HIDDEN.search(query)):
                    raise DatasetError(f"query must only read the dataset, got {kind} {hidden[0].upper()}.")
            if (result := self._connection.execute(query, parameters or None)) is not None:
                return fetch(result)
        raise DatasetError("query must be one that DuckDB understands, got nothing.")

    @contextlib.contextmanager
    def _query_errors(self) -> Iterator[None]:
        import duckdb

        try:
            yield
        except (duckdb.Error, UnicodeEncodeError) as error:
            # DuckDB reports a file that Arrow can't read as an error of the query; 1.2 does not name the
            # view.
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
                    # Two runs may have used the same folder, one after the other.
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
            # A dataset from another version may lack it.
            values.setdefault("kind", "run-directory")
            groups: dict[str, Any] = {"hparams": hparams.get(run_id, {}), "summary": summary.get(run_id, {})}
            yield RunRecord(path=Path(path), run_id=run_id, **groups, **values)

    def _find(self, wanted: Any) -> RunRecord:
        if isinstance(wanted, RecordedRun | RunRecord):
            wanted = wanted.run_id
        return super()._find(str(wanted))

    def many(self, wanted: Iterable[Path | str]) -> dict[Path | str, RecordedRun]:
        """Returns runs by their ids, without ids that are no runs."""
        return {one: run for one in wanted if (run := self.get(one)) is not None}

    def _run(self, record: RunRecord) -> DatasetRun:
        return DatasetRun(self, record)

    def _fetch(self, found: Any) -> list[RunRecord | None]:
        records = super()._fetch(found)
        return [record and attrs.evolve(record, path=self._folders[record.path][0]) for record in records]

    def _reader_of_extremes(self, metric: str) -> Callable[[str], Extremes | None]:
        query = "SELECT run_id, min, min_step, max, max_step FROM summary WHERE metric = ?"
        found = {run_id: tuple(values) for run_id, *values in self.sql(query, [metric]).rows}
        return lambda folder: found.get(self._folders[Path(folder)][1])
