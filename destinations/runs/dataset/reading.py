"""Reading a dataset: its runs, their series, and SQL over all of it.

```python
with open_dataset("s3://bucket/dataset") as dataset:
    best = dataset.query(where="hparams.optim.lr >= 1e-3", sort_by="summary.val/acc", limit=3)
    best[0].series("loss").value
    dataset.sql("SELECT run_id, min(value) FROM metrics WHERE metric = 'loss' GROUP BY run_id").to_dicts()
```

A dataset that is open shows the state that it was opened in, and can be read until the second compaction after that.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Self

import attrs

from destinations.run_directory.layout import column_of
from destinations.runs.errors import (
    AmbiguousRunError,
    DatasetError,
    MetricNotFoundError,
    RunNotFoundError,
)
from destinations.runs.record import RunRecord, Scalar
from destinations.runs.run import MetricSummary
from uploads import Store, open_store

from ._store_files import connect, path_of
from ._tables import COLUMNS, METRIC_COLUMNS, quoted, scalar_of
from .manifest import Manifest, latest_manifest, manifests

__all__ = ["Dataset", "DatasetRun", "SqlResult", "is_dataset", "open_dataset", "sql"]

_MEMORY = "1GB"


@attrs.frozen
class SqlResult:
    """What a query returned.

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


class DatasetRun:
    """A run of a dataset: what `Run` has of records and metrics; there are no media.

    Attributes:
        record: what is known of it; its path is the one that it was read from.
    """

    def __init__(self, dataset: "Dataset", record: RunRecord) -> None:
        self._dataset = dataset
        self.record = record

    def __repr__(self) -> str:
        return f"DatasetRun({self.run_id!r}, {self.status})"

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self.record.run_id

    @property
    def status(self) -> str:
        """As it was when the run was compacted."""
        return self.record.status

    @property
    def alive(self) -> bool:
        """False: only runs that have ended are compacted."""
        return False

    @property
    def hparams(self) -> Mapping[str, Scalar]:
        """Hyperparameters by dotted name."""
        return self.record.hparams

    @property
    def summary(self) -> dict[str, MetricSummary]:
        """What is known of each metric, rank 0."""
        return self._dataset.summary(self.run_id)

    def ranks(self) -> list[int]:
        """Returns the ranks that have metrics."""
        found = self._dataset.sql(
            "SELECT DISTINCT rank FROM metrics WHERE run_id = ? ORDER BY rank", [self.run_id]
        )
        return [rank for (rank,) in found.rows]

    def metric_names(self, rank: int = 0) -> list[str]:
        """Returns the columns of all metrics of a rank, by name."""
        return self._dataset.metric_names(self.run_id, rank)

    def series(self, name: str, rank: int = 0) -> Any:
        """Returns all values of a metric, as `Run.series` does.

        Raises:
            MetricNotFoundError: the run has no such metric.
        """
        return self._dataset.series(self.run_id, name, rank)


def open_dataset(uri: str | PathLike[str], **options: Any) -> "Dataset":
    """Opens a dataset that `compact` has written.

    Args:
        uri: a path, or what `uploads.open_store` takes.
        options: for `uploads.open_store`.

    Raises:
        DatasetError: there is no dataset.
        ImportError: DuckDB is not installed.
    """
    store = open_store(str(uri), **options)
    manifest = latest_manifest(store)
    if manifest.generation == 0:
        raise DatasetError(
            f"{store.uri()} must hold a dataset, got none. Make one: destinations runs compact ROOT DEST"
        )
    return Dataset(store, manifest)


def is_dataset(uri: str | PathLike[str], **options: Any) -> bool:
    """Says whether there is a dataset; asks the store."""
    return bool(manifests(open_store(str(uri), **options)))


def sql(uri: str | PathLike[str], query: str, parameters: Sequence[Any] = (), **options: Any) -> SqlResult:
    """Opens a dataset for one query; see `Dataset.sql`."""
    with open_dataset(uri, **options) as dataset:
        return dataset.sql(query, parameters)


class Dataset:
    """A dataset that is open.

    **Threading.** One thread at a time.

    Args:
        store: which has the files.
        manifest: the state to show.
        memory_limit: of DuckDB.
        clock: the time in seconds since 1970, for filters.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        *,
        memory_limit: str = _MEMORY,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self.manifest = manifest
        self._clock = clock
        self._records: list[RunRecord] | None = None
        self._connection = connect(store, memory_limit=memory_limit)
        self._connection.execute("SET TimeZone = 'UTC'")
        for table in COLUMNS:
            path = quoted(path_of(store, manifest.tables[table]))
            self._connection.execute(f"CREATE VIEW {table} AS FROM read_parquet({path})")
        self._connection.execute(f"CREATE VIEW metrics AS {self._metrics()}")

    @property
    def uri(self) -> str:
        """Where it is."""
        return self._store.uri()

    def files(self, table: str = "metrics") -> list[str]:
        """Returns the files of a table, for another engine: paths of a local dataset, else URIs.

        Args:
            table: "metrics", "runs", "hparams" or "summary".
        """
        names = self.manifest.metric_files if table == "metrics" else (self.manifest.tables[table],)
        root = getattr(self._store, "root", None)
        return [str(root / name) if isinstance(root, Path) else self._store.uri(name) for name in names]

    def sql(self, query: str, parameters: Sequence[Any] = ()) -> SqlResult:
        """Runs a query over the tables `metrics`, `runs`, `hparams` and `summary`; whatever DuckDB can.

        Args:
            query: SQL; `?` stands for a parameter.
            parameters: its values.

        Raises:
            DatasetError: the query is wrong, or a file cannot be read.
        """
        import duckdb

        try:
            found = self._connection.execute(query, list(parameters) or None)
            columns = tuple(one[0] for one in found.description or ())
            return SqlResult(columns, tuple(found.fetchall()))
        except duckdb.Error as error:
            raise DatasetError(f"query must be one that DuckDB understands, got: {error}") from error

    def series(self, run_id: str, name: str, rank: int = 0) -> Any:
        """Returns all values of a metric of a run in the order of logging; a `Series`.

        Raises:
            MetricNotFoundError: the run has no such metric; the text names near ones.
        """
        import numpy as np

        from destinations.runs.series import MISSING_STEP, Series

        arrays = self._connection.execute(
            """SELECT coalesce(step, ?) AS step, coalesce(epoch_us(time), ?) AS time, value FROM metrics
               WHERE metric IN (?, ?) AND run_id = ? AND rank = ? ORDER BY row""",
            [MISSING_STEP, MISSING_STEP, column_of(name), name, run_id, rank],
        ).fetchnumpy()
        if not len(arrays["value"]):
            raise MetricNotFoundError(name, self.metric_names(run_id, rank))
        micros = np.asarray(arrays["time"], np.int64)
        times = np.where(micros == MISSING_STEP, np.nan, micros / 1e6)
        return Series(
            name, np.asarray(arrays["step"], np.int64), times, np.asarray(arrays["value"], np.float64)
        )

    def metric_names(self, run_id: str | None = None, rank: int | None = None) -> list[str]:
        """Returns the names of all metrics, or of those of a run or a rank, sorted."""
        found = self.sql(
            """SELECT DISTINCT metric FROM metrics
               WHERE (?::VARCHAR IS NULL OR run_id = ?) AND (?::INTEGER IS NULL OR rank = ?) ORDER BY metric""",
            [run_id, run_id, rank, rank],
        )
        return [name for (name,) in found.rows]

    def hparam_names(self) -> list[str]:
        """Returns the dotted names of all hyperparameters, sorted."""
        return [name for (name,) in self.sql("SELECT DISTINCT name FROM hparams ORDER BY name").rows]

    def summary(self, run_id: str) -> dict[str, MetricSummary]:
        """Returns what is known of each metric of a run, rank 0."""
        names = [field.name for field in attrs.fields(MetricSummary)]
        found = self.sql(f"SELECT metric, {', '.join(names)} FROM summary WHERE run_id = ?", [run_id])
        return {name: MetricSummary(*rest) for name, *rest in found.rows}

    def records(self, **query: Any) -> list[RunRecord]:
        """Returns what is known of the runs that fit; takes what `query` takes."""
        return [run.record for run in self.query(**query)]

    def query(
        self,
        *,
        where: str | None = None,
        tag: str | None = None,
        status: str | None = None,
        sort_by: str | None = None,
        descending: bool | None = None,
        archived: bool | None = False,
        limit: int | None = None,
    ) -> list[DatasetRun]:
        """Returns the runs that fit; as `Runs.query`, but that every run is looked at, which takes some µs each.

        Args:
            where: a filter, such as `hparams.optim.lr >= 1e-3 and summary.val/acc > 0.9`.
            tag: which a run must have.
            status: which a run must have.
            sort_by: a field; runs without it come last. Newest first where None.
            descending: largest first. Default: for numbers of a summary and times.
            archived: False leaves out those that were put away, True the others; None takes all.
            limit: how many at most.

        Raises:
            FilterError: the filter does not parse.
        """
        from destinations.runs.filters import matches, parse_filter

        now = self._clock()
        wanted = None if where is None else parse_filter(where, now)
        found = [
            record
            for record in self._all()
            if (archived is None or record.archived == archived)
            and (tag is None or tag in record.tags)
            and (status is None or record.status == status)
            and (wanted is None or matches(wanted, record, now))
        ]
        if sort_by is not None:
            is_descending = sort_by.startswith("summary.") if descending is None else descending
            found = _sorted(found, sort_by, descending=is_descending)
        elif descending is False:
            found.reverse()
        return [DatasetRun(self, record) for record in found[:limit]]

    def __getitem__(self, wanted: str) -> DatasetRun:
        """Returns the run of an id, the beginning of one, a display name, or the name of its folder.

        Raises:
            RunNotFoundError: there is none.
            AmbiguousRunError: there are several.
        """
        records = self._all()
        for test in (
            lambda one: one.run_id == wanted,
            lambda one: wanted in {one.display_name, one.path.name, str(one.path)},
            lambda one: one.run_id.startswith(wanted),
        ):
            found = [record for record in records if test(record)]
            if len(found) > 1:
                raise AmbiguousRunError(wanted, [record.run_id for record in found])
            if found:
                return DatasetRun(self, found[0])
        raise RunNotFoundError(wanted, [name for one in records for name in (one.run_id, one.name)])

    def __len__(self) -> int:
        return self.manifest.runs

    def __iter__(self) -> Iterator[DatasetRun]:
        return (DatasetRun(self, record) for record in self._all())

    def close(self) -> None:
        """Lets go of everything."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _metrics(self) -> str:
        files = [quoted(path_of(self._store, name)) for name in self.manifest.metric_files]
        if files:
            return f"FROM read_parquet([{', '.join(files)}])"
        columns = ", ".join(f"NULL::{kind} AS {name}" for name, kind in METRIC_COLUMNS.items())
        return f"SELECT {columns} WHERE false"

    def _all(self) -> list[RunRecord]:
        """Returns all records, newest first; read once."""
        if self._records is None:
            hparams: dict[str, dict[str, Scalar]] = {}
            for run_id, name, kind, value in self.sql("SELECT run_id, name, type, value FROM hparams").rows:
                hparams.setdefault(run_id, {})[name] = scalar_of(kind, value)
            summary: dict[str, dict[str, float]] = {}
            for run_id, name, last in self.sql(
                "SELECT run_id, metric, last FROM summary WHERE last IS NOT NULL"
            ).rows:
                summary.setdefault(run_id, {})[name] = last
            fields = (
                "kind",
                "status",
                "created_at",
                "ended_at",
                "updated_at",
                "tags",
                "notes",
                "display_name",
            )
            names = (*fields, "archived", "checkpoint_path")
            found = self.sql(
                f"SELECT run_id, path, {', '.join(names)} FROM runs ORDER BY created_at DESC NULLS LAST, run_id"
            )
            self._records = []
            for run_id, path, *rest in found.rows:
                values = dict(zip(names, rest, strict=True))
                values["tags"] = tuple(values["tags"] or ())
                record = RunRecord(
                    Path(path),
                    run_id,
                    hparams=hparams.get(run_id, {}),
                    summary=summary.get(run_id, {}),
                    **values,
                )
                self._records.append(record)
        return self._records


def _sorted(records: list[RunRecord], field: str, *, descending: bool) -> list[RunRecord]:
    """Returns records by a field: numbers, then texts, then those that have none, or NaN."""
    group, _, name = field.partition(".")

    def value_of(record: RunRecord) -> Any:
        if group in {"hparams", "summary"}:
            return getattr(record, group).get(name)
        return getattr(record, field, None)

    numbers, texts, others = [], [], []
    for record in records:
        value = value_of(record)
        if isinstance(value, int | float) and value == value:  # noqa: PLR0124  # not NaN
            numbers.append((value, record))
        elif isinstance(value, str):
            texts.append((value, record))
        else:
            others.append(record)
    ordered = [sorted(pairs, key=lambda pair: pair[0], reverse=descending) for pairs in (numbers, texts)]
    return [record for pairs in ordered for _, record in pairs] + others
