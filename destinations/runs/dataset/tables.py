"""The four Delta tables of a dataset: their columns, and the versions that belong together.

| table | a row is |
|---|---|
| metrics | a value: metric, run_id, rank, step, row, time, value, writer |
| runs | a run: the fields of `RunRecord`, and what a compaction compares |
| hparams | a hyperparameter of a run: type, as JSON, and as a number where it is one |
| summary | a metric of a run: last, min, max, mean, and how many values |

Delta Lake commits one table at a time. A compaction commits `runs` last, and each commit of `runs` names the
versions of the other three that belong to it, as application transactions (the `txn` action of the protocol,
which checkpoints keep). A reader opens these versions. So a compaction that is killed between two tables
changes nothing for readers, and the next one begins from the versions that `runs` names.
See https://github.com/delta-io/delta/blob/master/PROTOCOL.md#transaction-identifiers.
"""

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any, Self

import attrs

from destinations.runs.errors import DatasetError
from destinations.runs.record import FIELDS, FieldType, Scalar
from uploads import UploadError, object_store_location, one_line, redact_text

__all__ = [
    "APPLICATION",
    "COLUMNS",
    "WRITER",
    "Location",
    "TableVersions",
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
# Of `metrics`; a dataset that was made before runs had several writers lacks it, and gets no such run.
WRITER = "writer"
# Of `runs`; a dataset written by another version of this package may lack some.
_FIELDS = {
    name: _TYPES[field.type]
    for name, field in FIELDS.items()
    if field.is_recorded and name not in _NOT_STORED
}
_TABLES = {
    "metrics": "metric string, run_id string, rank int32, step int64, row int64, time timestamp, "
    "value double, writer string",
    "hparams": "run_id string, name string, type string, json string, number double",
    "summary": "run_id string, metric string, last double, min double, max double, min_step int64, "
    "max_step int64, count int64, non_finite int64, mean double",
    "runs": "run_id string, path string, "
    + "".join(f"{name} {kind}, " for name, kind in _FIELDS.items())
    + "points int64, metrics_state string, record_state string",
}
COLUMNS: Mapping[str, Mapping[str, str]] = {
    name: dict(column.split() for column in columns.split(", ")) for name, columns in _TABLES.items()
}
"""The columns of each table with their types, in the order in which a compaction commits the tables."""


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
            is_needed = wanted.name in found or (wanted.name not in _FIELDS and wanted.name != WRITER)
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
        raise ImportError(
            f'datasets need deltalake ({error}). Run: pip install "training-destinations[query]"'
        ) from error
    try:
        yield
    except TableNotFoundError as error:
        raise DatasetError(
            f"{uri} must hold a dataset, got none. Make one: destinations runs compact ROOT DATASET"
        ) from error
    except (DeltaError, OSError, UploadError) as error:
        text = one_line(" ".join(_COLOURS.sub("", redact_text(str(error))).split()))
        raise DatasetError(f"dataset {uri} cannot be read or written: {text[:600]}") from error


@attrs.frozen
class TableVersions:
    """The four tables at versions that belong together.

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
