"""The Delta tables of a dataset: their columns, and the versions that belong together.

| table | a row is | partition |
|---|---|---|
| metrics | a value: metric, run_id, rank, step, row, time, value, writer | part |
| records | a text, a table, or a link to a medium or file: the text, the CSV, or the path | part |
| hparams | a hyperparameter of a run: its type, its JSON, and its number if it has one | shelf |
| summary | a metric of a run: last, min, max, mean, and the number of values | shelf |
| deleted | the id of a run that was deleted from the dataset | |
| runs | a run: the fields of `RunRecord`, and `WideColumns`: its hyperparameters and metrics | shelf |

`Placement` chooses the part and the shelf of a run, so that a changed run rewrites one small file of each
table.

Delta Lake commits one table at a time. A compaction commits `runs` last, and each commit of `runs` names the
matching versions of the other tables, as application transactions (the `txn` action of the protocol, which
checkpoints keep). Readers open these versions. So if a compaction is killed between two tables, readers see
no change, and the next compaction begins from the versions that `runs` names. See
https://github.com/delta-io/delta/blob/master/PROTOCOL.md#transaction-identifiers.
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
from uploads import UploadError, needs_package, object_store_location, one_line, redact_text

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
"""The application id of our commits; if two commit at once, Delta lets one fail."""

_TYPES: Mapping[FieldType, str] = {"text": "string", "texts": "texts", "time": "double", "bool": "bool"}
_NOT_STORED = {"name", "path", "problem", "run_id"}
# Columns of `runs`. A dataset from another version of this package may lack some.
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
"""The columns of each table and their types, in the order in which the tables are committed."""
PARTITIONS: Mapping[str, str] = {
    "metrics": "part",
    "records": "part",
    "hparams": "shelf",
    "summary": "shelf",
    "runs": "shelf",
}
"""The column by which each table is split into folders."""


def arrow_schema(name: str) -> Any:
    """Returns the columns of a table as a `pyarrow.Schema`."""
    import pyarrow as pa

    others = {"texts": pa.list_(pa.string()), "timestamp": pa.timestamp("us", "UTC")}
    return pa.schema([(column, others.get(kind, kind)) for column, kind in COLUMNS[name].items()])


# delta-rs parses a path like a host name, where these are not allowed. In a URI, it drops everything after a
# "#", and decodes "%41" to "A".
_REFUSED = r"\[\]^|\\\x00-\x1f"
_QUOTED = r"%[0-9A-Fa-f]{2}"
# A file of a table: below its folder, with characters that are the same in a path and in a URI.
_FILE = re.compile(r"(?:(?!\.{1,2}/)[^/%:\\\x00-\x1f]+/)*(?!\.{1,2}$)[^/%:\\\x00-\x1f]+")
# A part of the smallest runs holds at least 64 KiB of their files; see `Placement`.
_SMALL_BYTES = 16 << 10
_LEAST_BYTES = 1 << 10
_SHELF_RUNS = 4096
# Spark and Arrow can read thousands of columns. Further names are only in the long tables.
_MAX_COLUMNS = 4000
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@attrs.frozen
class Location:
    """The place of a dataset.

    Attributes:
        uri: a path, or a URI without options.
        options: the options for delta-rs.
    """

    uri: str
    options: dict[str, str] = attrs.field(repr=False)

    @classmethod
    def of(cls, place: str | PathLike[str], options: Mapping[str, Any]) -> Self:
        """Returns the location of a path or URI.

        Raises:
            DatasetError: Delta tables can't be stored there.
        """
        try:
            uri, found = object_store_location(str(place), **options)
        except (ValueError, UploadError) as error:
            reason = str(error).removesuffix(".")
            raise DatasetError(f"a dataset cannot be in {redact_text(str(place))!r}: {reason}.") from error
        refused_characters = f"[{_REFUSED}#]" if "://" in uri else f"[{_REFUSED}]"
        if refused := re.search(f"{refused_characters}|{_QUOTED}", uri):
            raise DatasetError(
                f"the path of a dataset cannot contain {refused[0]!r}, which Delta Lake misreads, "
                f"got {uri!r}. Choose another path."
            )
        return cls(uri, found)

    @property
    def is_remote(self) -> bool:
        """Whether it is in a store rather than a folder."""
        return "://" in self.uri

    def table(self, name: str) -> str:
        """Returns the URI of a table."""
        return f"{self.uri}/{name}"

    def require_no_links(self) -> None:
        """Checks that the folders of the tables contain only files and folders, because Delta follows links.

        Raises:
            DatasetError: there is a link, or a pipe or device, on which Delta would block.
            OSError: a folder can't be read.
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
            DatasetError: the table was made by another tool, lacks the version, or names a file outside its
                folder.
            deltalake.exceptions.DeltaError: there is no table, or it can't be read.
        """
        import pyarrow as pa
        from deltalake import DeltaTable

        table = DeltaTable(self.table(name), storage_options=self.options)
        newest = table.version()
        if version is not None and version != newest:
            # For a missing version, delta-rs would look for every version up to it.
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
                    f"of {wanted.type}, got {kind or one_line(', '.join(found))}. If an earlier version "
                    "wrote it, compact the runs into a new place."
                )
        return table


@contextlib.contextmanager
def delta_errors(uri: str) -> Iterator[None]:
    """Converts errors of delta-rs and of stores to `DatasetError`.

    Raises:
        DatasetError: there is no dataset, or it can't be read or written.
        ImportError: deltalake is not installed.
    """
    with needs_package("a dataset", "deltalake"):
        from deltalake.exceptions import DeltaError, TableNotFoundError
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
    """The tables, at matching versions.

    Attributes:
        location: the place of the dataset.
        tables: each `deltalake.DeltaTable`, by name.
    """

    location: Location
    tables: dict[str, Any]

    @property
    def version(self) -> int:
        """The version of the dataset, which is the version of its table `runs`."""
        return int(self.tables["runs"].version())

    def arrow(self, name: str) -> Any:
        """Returns a table as a `pyarrow.dataset.Dataset`."""
        from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

        filesystem = None
        if not self.location.is_remote:
            # Delta's own file system calls Python from pyarrow's threads. That is slower, and it aborts a
            # process that exits while one of them closes a file.
            filesystem = SubTreeFileSystem(self.location.table(name), LocalFileSystem())
        return self.tables[name].to_pyarrow_dataset(filesystem=filesystem)


def load(location: Location, version: int | None = None) -> TableVersions:
    """Opens the tables.

    Args:
        location: the place of the dataset.
        version: the version of the dataset; None for the newest.

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
    """Chooses the files of a run: the `part` of its values and records, and the `shelf` of everything else.

    A part holds runs of a similar size. It grows to a small multiple of the largest of them, or to a
    thousandth of the dataset if that is more. So a changed run rewrites little, and a large dataset has few
    files.

    Args:
        known: the columns `part`, `shelf` and `size` of the runs in the dataset.
        coming: the total size of the runs that will be placed.
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
        """Returns the part and the shelf of a run.

        Args:
            size: bytes of its files.
            before: its earlier place, which it keeps while its size is similar.
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
    """The columns of `runs` for hyperparameters and metrics; each new name is a new column.

    They are `hparams.NAME`, `summary.NAME` (the last value), `min.NAME`, `max.NAME` and `mean.NAME`. A column
    has the type of its first value; values of another type are in `hparams.NAME:TYPE`.

    Args:
        schema: the present schema of the table.
    """

    def __init__(self, schema: Any) -> None:
        self._types = {field.name: str(field.type) for field in schema}
        self._folded = {name.casefold() for name in self._types}
        self.left_out: set[str] = set()
        """Names without a column: there are too many, or another name differs only in case."""

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
        """Returns the schema of rows: the fixed columns, and the wide columns that occur in them."""
        import pyarrow as pa

        schema = arrow_schema("runs")
        names = dict.fromkeys(name for row in rows for name in row if "." in name)
        return pa.schema([*schema, *(pa.field(name, pa.type_for_alias(self._types[name])) for name in names)])


def _kind_of(value: Scalar) -> str:
    """Returns the column type for a value: an integer that no float represents exactly is a text."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "double" if abs(value) < 1 << 1000 and int(float(value)) == value else "string"
    return "double" if isinstance(value, float) else "string"


def json_of(value: Scalar) -> dict[str, Any]:
    """Returns the columns `type`, `json` and `number` of a hyperparameter."""
    kind = "null" if value is None else type(value).__name__
    number = float(value) if isinstance(value, int | float) else None
    # JSON has no NaN or infinity, so these become strings: "NaN", "Infinity".
    is_finite = number is None or math.isfinite(number)
    return {"type": kind, "json": json.dumps(value if is_finite else json.dumps(value)), "number": number}


def scalar_of(kind: str, value: str) -> Scalar:
    """Returns the value that `json_of` was given; the text itself if it is malformed."""
    try:
        found = json.loads(value)
        if isinstance(found, dict | list):
            return value
        return float(found) if kind == "float" and found is not None else found
    except (TypeError, ValueError, OverflowError, RecursionError):
        return value
