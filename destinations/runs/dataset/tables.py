"""The Delta tables of a dataset: their columns, and the versions that belong together.

| table | a row is | partition |
|---|---|---|
| metrics | a value: metric, run_id, rank, step, row, time, value, writer | part |
| records | a text, a table, or a link to a medium or file: the text, the CSV, or the path | part |
| hparams | a hyperparameter of a run: type, as JSON, and as a number where it is one | shelf |
| summary | a metric of a run: last, min, max, mean, and how many values | shelf |
| deleted | the id of a run that was deleted from the dataset | |
| runs | a run: the fields of `RunRecord`, and `WideColumns`: its hyperparameters and metrics | shelf |

`Placement` chooses the part and the shelf of a run, so that writing a run anew rewrites one small file of a
table.

Delta Lake commits one table at a time. A compaction commits `runs` last, and each commit of `runs` names the
versions of the other tables that belong to it, as application transactions (the `txn` action of the protocol,
which checkpoints keep). A reader opens these versions. So a compaction that is killed between two tables
changes nothing for readers, and the next one begins from the versions that `runs` names.
See https://github.com/delta-io/delta/blob/master/PROTOCOL.md#transaction-identifiers.
"""

import contextlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from typing import Any, Self

import attrs

from destinations.runs.errors import DatasetError, RunsError
from destinations.runs.record import FIELDS, FieldType, Scalar
from destinations.runs.run import MetricSummary
from uploads import UploadError, object_store_location, one_line, redact_text

__all__ = [
    "APPLICATION",
    "COLUMNS",
    "PARTITIONS",
    "Location",
    "Placement",
    "TableVersions",
    "WideColumns",
    "arrow_schema",
    "delta_errors",
    "json_of",
    "load",
    "scalar_of",
]

APPLICATION = "training-destinations"
"""The application id of our commits: of two at once, one fails."""

_TYPES: Mapping[FieldType, str] = {"text": "string", "texts": "texts", "time": "double", "bool": "bool"}
_NOT_STORED = {"name", "path", "problem", "run_id"}
# Of `runs`; a dataset written by another version of this package may lack some.
_FIELDS = {
    name: _TYPES[field.type]
    for name, field in FIELDS.items()
    if field.is_recorded and name not in _NOT_STORED
}
_TABLES = {
    "metrics": "metric string, run_id string, rank int32, step int64, row int64, time timestamp, "
    "value double, writer string, part int32",
    "records": "run_id string, kind string, name string, step int64, row int64, time double, writer string, "
    "path string, content string, fields string, part int32",
    "hparams": "run_id string, name string, type string, json string, number double, shelf int32",
    "summary": "run_id string, metric string, last double, min double, max double, min_step int64, "
    "max_step int64, count int64, non_finite int64, mean double, shelf int32",
    "deleted": "run_id string",
    "runs": "run_id string, path string, "
    + "".join(f"{name} {kind}, " for name, kind in _FIELDS.items())
    + "points int64, size int64, state string, stamp string, record_state string, edits string, "
    "part int32, shelf int32",
}
COLUMNS: Mapping[str, Mapping[str, str]] = {
    name: dict(column.split() for column in columns.split(", ")) for name, columns in _TABLES.items()
}
"""The columns of each table with their types, in the order in which a compaction commits the tables."""
PARTITIONS: Mapping[str, str] = {
    "metrics": "part",
    "records": "part",
    "hparams": "shelf",
    "summary": "shelf",
    "runs": "shelf",
}
"""The column by which a table is split into folders."""


def arrow_schema(name: str) -> Any:
    """Returns the columns of a table as a `pyarrow.Schema`."""
    import pyarrow as pa

    others = {"texts": pa.list_(pa.string()), "timestamp": pa.timestamp("us", "UTC")}
    return pa.schema([(column, others.get(kind, kind)) for column, kind in COLUMNS[name].items()])


# The writer of delta-rs takes a path for the name of a host, where these are not allowed. It drops what
# follows a "#" in a URI, and takes "%41" for an "A".
_REFUSED = r"\[\]^|\\\x00-\x1f"
_QUOTED = r"%[0-9A-Fa-f]{2}"
# A file of a table: below its folder, in letters that mean themselves in a path and in a URI.
_FILE = re.compile(r"(?:(?!\.{1,2}/)[^/%:\\\x00-\x1f]+/)*(?!\.{1,2}$)[^/%:\\\x00-\x1f]+")
# A part of the smallest runs has 64 KiB of their files at least, see `Placement`.
_SMALL_BYTES = 16 << 10
_LEAST_BYTES = 1 << 10
_SHELF_RUNS = 4096
# Spark and Arrow read thousands; a run that makes names up has them in the long tables.
_MAX_COLUMNS = 4000
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@attrs.frozen
class Location:
    """Where a dataset is.

    Attributes:
        uri: a path, or a URI without options.
        options: for delta-rs.
    """

    uri: str
    options: dict[str, str] = attrs.field(repr=False)

    @classmethod
    def of(cls, place: str | PathLike[str], options: Mapping[str, Any]) -> Self:
        """Returns the location of a path or URI.

        Raises:
            DatasetError: Delta tables cannot be there.
        """
        try:
            uri, found = object_store_location(str(place), **options)
        except (ValueError, UploadError) as error:
            reason = str(error).removesuffix(".")
            raise DatasetError(f"a dataset cannot be in {redact_text(str(place))!r}: {reason}.") from error
        refused_characters = f"[{_REFUSED}#]" if "://" in uri else f"[{_REFUSED}]"
        if refused := re.search(f"{refused_characters}|{_QUOTED}", uri):
            raise DatasetError(
                f"the path of a dataset cannot contain {refused[0]!r}, which Delta Lake takes for something "
                f"else, got {uri!r}. Choose another one."
            )
        return cls(uri, found)

    @property
    def is_remote(self) -> bool:
        """Whether it is not a folder."""
        return "://" in self.uri

    def table(self, name: str) -> str:
        """Returns the URI of a table."""
        return f"{self.uri}/{name}"

    def require_no_links(self) -> None:
        """Checks that the folders of the tables have files and folders only: Delta Lake follows links.

        Raises:
            DatasetError: there is a link, or a pipe or device, which it would wait for.
            OSError: a folder cannot be read.
        """
        waiting = [] if self.is_remote else [self.table(name) for name in COLUMNS]
        for path in waiting:
            if os.path.islink(path):  # noqa: PTH114  # as for `os.scandir`
                raise DatasetError(f"{path} is a link, which is not followed. Put the table itself there.")
        while waiting:
            with (
                contextlib.suppress(FileNotFoundError, NotADirectoryError),
                os.scandir(waiting.pop()) as found,
            ):
                for one in found:
                    if one.is_dir(follow_symlinks=False):
                        waiting.append(one.path)
                    elif not one.is_file(follow_symlinks=False):
                        kind = "a link" if one.is_symlink() else "no regular file"
                        raise DatasetError(f"{one.path} is {kind}, which is not read. Remove it.")

    def open(self, name: str, version: int | None = None) -> Any:
        """Returns a table as a `deltalake.DeltaTable`.

        Raises:
            DatasetError: the table is of somebody else, has no such version, or names a file outside of it.
            deltalake.exceptions.DeltaError: there is none, or it cannot be read.
        """
        import pyarrow as pa
        from deltalake import DeltaTable

        table = DeltaTable(self.table(name), storage_options=self.options)
        newest = table.version()
        if version is not None and version != newest:
            # For one that is not there, delta-rs would look for all up to it.
            if not 0 <= version <= newest:
                raise DatasetError(
                    f"table {self.table(name)} has no version {version}: the newest is {newest}."
                )
            table = DeltaTable(self.table(name), version=version, storage_options=self.options)
        for path in table.get_add_actions().column("path").to_pylist():
            if not _FILE.fullmatch(path):
                raise DatasetError(
                    f"table {self.table(name)} names a file {path!r}, which may be outside of it."
                )
        found = {field.name: field.type for field in pa.schema(table.schema().to_arrow())}
        for wanted in arrow_schema(name):
            is_needed = wanted.name in found or wanted.name not in _FIELDS
            if is_needed and (kind := found.get(wanted.name)) != wanted.type:
                raise DatasetError(
                    f"table {self.table(name)} is not one of this package: expected a column {wanted.name} "
                    f"of {wanted.type}, got {kind or one_line(', '.join(found))}. Choose another place."
                )
        return table


@contextlib.contextmanager
def delta_errors(uri: str) -> Iterator[None]:
    """Turns the errors of delta-rs and of stores into ours.

    Raises:
        DatasetError: there is no dataset, or it cannot be read or written.
        ImportError: deltalake is not installed.
    """
    try:
        from deltalake.exceptions import DeltaError, TableNotFoundError
    except ImportError as error:
        raise ImportError(f"datasets need deltalake ({error}). Run: pip install deltalake") from error
    try:
        yield
    except TableNotFoundError as error:
        raise DatasetError(
            f"{uri} must hold a dataset, got none. Make one: destinations runs compact ROOT DATASET"
        ) from error
    except RunsError:
        raise
    except (DeltaError, OSError, UploadError) as error:
        text = one_line(" ".join(_COLOURS.sub("", redact_text(str(error))).split()))
        raise DatasetError(f"dataset {uri} cannot be read or written: {text[:600]}") from error


@attrs.frozen
class TableVersions:
    """The tables at versions that belong together.

    Attributes:
        location: of the dataset.
        tables: `deltalake.DeltaTable`, by name.
    """

    location: Location
    tables: dict[str, Any]

    @property
    def version(self) -> int:
        """The version of the dataset, which is that of its table `runs`."""
        return int(self.tables["runs"].version())

    def arrow(self, name: str) -> Any:
        """Returns a table as a `pyarrow.dataset.Dataset`."""
        from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

        filesystem = None
        if not self.location.is_remote:
            # That of Delta calls Python from pyarrow's threads, which is slower, and aborts a process that
            # ends while one of them still closes a file.
            filesystem = SubTreeFileSystem(self.location.table(name), LocalFileSystem())
        return self.tables[name].to_pyarrow_dataset(filesystem=filesystem)


def load(location: Location, version: int | None = None) -> TableVersions:
    """Opens the tables.

    Args:
        location: of the dataset.
        version: of the dataset; None for the newest.

    Raises:
        DatasetError: there is no dataset, or no such version.
        ImportError: deltalake is not installed.
    """
    with delta_errors(location.uri):
        location.require_no_links()
        runs = location.open("runs", version)
        versions = {name: runs.transaction_version(f"{APPLICATION}.{name}") or 0 for name in COLUMNS}
        tables = {name: location.open(name, versions[name]) for name in COLUMNS if name != "runs"}
        return TableVersions(location, {**tables, "runs": runs})


class Placement:
    """Chooses in which files a run is: the `part` of its values and records, the `shelf` of all else.

    A part has runs of about one size: a small multiple of the largest of them, or a thousandth of the dataset
    where that is more. So a run that changes rewrites little, and a large dataset has few files.

    Args:
        known: the columns `part`, `shelf` and `size` of the runs that are there.
        coming: the size of the runs that will be placed, as far as it is known.
    """

    def __init__(self, known: Iterable[Mapping[str, Any]], coming: int = 0) -> None:
        self._total = coming
        self._bytes: Counter[int] = Counter()
        self._runs: Counter[int] = Counter()
        self._classes: dict[int, int] = {}
        for row in known:
            self._add(row["part"] or 0, row["shelf"] or 0, row["size"] or 0)
            self._total += row["size"] or 0
        # The emptiest part of each class.
        self._open = {self._classes[part]: part for part, _ in self._bytes.most_common()}

    def place(self, size: int, before: Mapping[str, Any] | None = None) -> tuple[int, int]:
        """Returns part and shelf of a run.

        Args:
            size: of its files, in bytes.
            before: where it is; it stays there while its size is about the same.
        """
        wanted = _class_of(size)
        if before is not None:
            part, shelf = before["part"] or 0, before["shelf"] or 0
            if self._classes[part] == wanted:
                return part, shelf
        else:
            shelf = max(self._runs, default=0)
            shelf += self._runs[shelf] >= _SHELF_RUNS
        part = self._open.get(wanted, -1)
        room = max(4 * (_SMALL_BYTES << 2 * wanted), self._total >> 10)
        if part < 0 or self._bytes[part] + size > room:
            part = self._open[wanted] = max(self._bytes, default=-1) + 1
        self._add(part, shelf, size)
        return part, shelf

    def _add(self, part: int, shelf: int, size: int) -> None:
        self._classes[part] = max(self._classes.get(part, 0), _class_of(size))
        self._bytes[part] += max(size, _LEAST_BYTES)
        self._runs[shelf] += 1


def _class_of(size: int) -> int:
    return ((size // _SMALL_BYTES).bit_length() + 1) // 2


class WideColumns:
    """The columns of `runs` for hyperparameters and metrics: a new name is a new column.

    They are `hparams.NAME`, and `summary.NAME` (the last value), `min.NAME`, `max.NAME` and `mean.NAME`. A
    column has the type of its first value; values of another type are in `hparams.NAME:TYPE`.

    Args:
        schema: of the table as it is.
    """

    def __init__(self, schema: Any) -> None:
        self._types = {field.name: str(field.type) for field in schema}
        self._folded = {name.casefold() for name in self._types}
        self.left_out: set[str] = set()
        """The columns that were not made: there are too many, or another differs only in upper case."""

    def cells(
        self, hparams: Mapping[str, Scalar], summary: Mapping[str, MetricSummary]
    ) -> dict[str, bool | float | str]:
        """Returns the values of a run by column."""
        found: dict[str, Any] = {f"hparams.{name}": value for name, value in hparams.items()}
        for name, metric in summary.items():
            values = {"summary": metric.last, "min": metric.min, "max": metric.max, "mean": metric.mean}
            found |= {f"{key}.{name}": float(one) for key, one in values.items() if one is not None}
        cells = {}
        for name, value in found.items():
            kind = _kind_of(value)
            if value is not None and (column := self._column(name, kind)):
                cells[column] = {"string": str, "double": float}.get(kind, bool)(value)
        return cells

    def _column(self, name: str, kind: str) -> str:
        """Returns the column of values of a type; "" if there is none."""
        if self._types.get(name, kind) != kind:
            name = f"{name}:{kind}"
        if name not in self._types:
            if len(self._types) >= _MAX_COLUMNS or name.casefold() in self._folded:
                self.left_out.add(name)
                return ""
            self._types[name] = kind
            self._folded.add(name.casefold())
        return name

    def schema(self, rows: Iterable[Mapping[str, Any]]) -> Any:
        """Returns the schema of rows: the columns that every run has, and those that occur in them."""
        import pyarrow as pa

        schema = arrow_schema("runs")
        names = dict.fromkeys(name for row in rows for name in row if "." in name)
        return pa.schema([*schema, *(pa.field(name, pa.type_for_alias(self._types[name])) for name in names)])


def _kind_of(value: Scalar) -> str:
    """Returns the type of a column: an integer that no float has exactly is a text."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "double" if abs(value) < 1 << 1000 and int(float(value)) == value else "string"
    return "double" if isinstance(value, float) else "string"


def json_of(value: Scalar) -> dict[str, Any]:
    """Returns the columns `type`, `json` and `number` of a hyperparameter."""
    kind = "null" if value is None else type(value).__name__
    number = float(value) if isinstance(value, int | float) else None
    # As a text where JSON has no number: "NaN", "Infinity".
    is_finite = number is None or math.isfinite(number)
    return {"type": kind, "json": json.dumps(value if is_finite else json.dumps(value)), "number": number}


def scalar_of(kind: str, value: str) -> Scalar:
    """Returns what `json_of` took; the text itself where somebody else wrote something that it cannot be."""
    try:
        found = json.loads(value)
        if isinstance(found, dict | list):
            return value
        return float(found) if kind == "float" and found is not None else found
    except (TypeError, ValueError, OverflowError, RecursionError):
        return value
