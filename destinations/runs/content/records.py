"""Records of a run other than metrics: tables, media, histograms, texts, traces and artifacts.

Each call reads the index file (such as `media.jsonl`) again, so a run that is being written shows new
records. A record has the metadata of a file; `load` reads the file. A torn last line is ignored; damaged
lines and those longer than 32 MiB are counted by `Records.damaged_lines`; an unreadable index raises
`OSError`. Importing this module imports neither numpy nor Pillow.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import attrs

from destinations.run_directory.layout import (
    ARTIFACTS_INDEX,
    HISTOGRAMS_INDEX,
    MEDIA_INDEX,
    TABLES_INDEX,
    TEXTS_INDEX,
    TRACES_INDEX,
)
from destinations.runs.errors import MetricNotFoundError
from destinations.runs.files import json_lines, number_of, path_inside, whole_of

from .media import Audio, Image, Mask, Medium, PointCloud, Video, read_table

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Artifact", "Histogram", "RecordCount", "Records", "Table", "TableEntry", "Text", "Trace"]


@attrs.frozen
class TableEntry:
    """The metadata of a table.

    Attributes:
        name: as logged.
        step: of the call.
        time: of the call, in seconds since 1970.
        path: the CSV, absolute.
        size: bytes.
        row_count: number of rows, without the header.
        columns: name and type of each: "bool", "int", "float", "str", or "empty".
    """

    name: str
    step: int | None
    time: float | None
    path: Path
    size: int | None
    row_count: int
    columns: tuple[tuple[str, str], ...]


@attrs.frozen
class Table:
    """A table.

    Attributes:
        name: as logged.
        step: of the call.
        columns: their names.
        rows: typed cells. None in a column of numbers was logged as None; in a column of texts, None and ""
            are the same.
    """

    name: str
    step: int | None
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Returns each row as a dict; of columns with the same name, the last one counts."""
        return [dict(zip(self.columns, row, strict=False)) for row in self.rows]


@attrs.frozen(eq=False)
class Histogram:
    """The distribution of values at a step.

    Attributes:
        name: as logged.
        step: of the call.
        time: of the call, in seconds since 1970.
        counts: int64 `(bins,)`.
        edges: float64 `(bins + 1,)`.
        moments: those of `count`, `non_finite`, `min`, `max`, `mean`, `std`, `sum` (of the finite values)
            that the run has.
    """

    name: str
    step: int | None
    time: float | None
    counts: "np.ndarray[Any, np.dtype[np.int64]]"
    edges: "np.ndarray[Any, np.dtype[np.float64]]"
    moments: Mapping[str, float | None]


@attrs.frozen
class Text:
    """A text."""

    name: str
    step: int | None
    time: float | None
    text: str


@attrs.frozen
class Trace:
    """The traces of one call of `log_traces`."""

    step: int | None
    time: float | None
    traces: Mapping[str, Any]


@attrs.frozen
class Artifact:
    """A file passed to `upload_file` and kept in the run.

    Attributes:
        name: the remote name.
        step: of the call.
        time: of the call, in seconds since 1970.
        path: the file, absolute; a later artifact of the same name replaces it.
        size: bytes.
        sha256: hexadecimal.
    """

    name: str
    step: int | None
    time: float | None
    path: Path
    size: int | None
    sha256: str | None


@attrs.frozen
class _Deletion:
    """The deletion of the file of an artifact: its name, and the bytes."""

    name: str
    size: int | None


@attrs.define
class RecordCount:
    """The number and size of the records of one kind.

    Attributes:
        count: number of records.
        size: bytes of their files.
        names: number of records by name, of the first thousand names.
    """

    count: int = 0
    size: int = 0
    names: Counter[str] = attrs.field(factory=Counter)


_MAX_NAMES = 1000
_KINDS: dict[type, str] = {
    Image: "images",
    Audio: "audio",
    Video: "videos",
    PointCloud: "point_clouds",
    TableEntry: "tables",
    Histogram: "histograms",
    Text: "texts",
    Trace: "traces",
    Artifact: "artifacts",
}


class _Named(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def step(self) -> int | None: ...


_Record = TypeVar("_Record")
_NamedRecord = TypeVar("_NamedRecord", bound=_Named)
_AnyMedium = TypeVar("_AnyMedium", bound=Medium)


class Records:
    """The records of one run.

    Args:
        run_dir: its folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def images(self, name: str | None = None, step: int | None = None) -> list[Image]:
        """Returns images in the order of logging.

        Args:
            name: None for all names.
            step: None for all steps.

        Raises:
            MetricNotFoundError: nothing has this name.
        """
        return _chosen(self._media(Image), name, step)

    def audio(self, name: str | None = None, step: int | None = None) -> list[Audio]:
        """Returns audio clips; see `images`."""
        return _chosen(self._media(Audio), name, step)

    def videos(self, name: str | None = None, step: int | None = None) -> list[Video]:
        """Returns videos; see `images`."""
        return _chosen(self._media(Video), name, step)

    def point_clouds(self, name: str | None = None, step: int | None = None) -> list[PointCloud]:
        """Returns point clouds; see `images`."""
        return _chosen(self._media(PointCloud), name, step)

    def tables(self, name: str | None = None) -> list[TableEntry]:
        """Returns the metadata of tables in the order of logging.

        Raises:
            MetricNotFoundError: no table has this name.
        """
        return _chosen(self._valid(TABLES_INDEX, self._table_entry), name, None)

    def table(self, name: str, step: int | None = None) -> Table:
        """Reads a table.

        Args:
            name: as logged.
            step: None for the last one.

        Raises:
            MetricNotFoundError: no table has this name, or none has it at this step.
            FileNotFoundError: its file is missing.
        """
        entries = self.tables(name)
        found = [entry for entry in entries if step is None or entry.step == step]
        if not found:
            raise MetricNotFoundError(
                f"{name} at step {step}", [f"{name} at step {entry.step}" for entry in entries]
            )
        entry = found[-1]
        columns, rows = read_table(entry.path, [kind for _, kind in entry.columns])
        names = tuple(columns) or tuple(name for name, _ in entry.columns)
        return Table(entry.name, entry.step, names, tuple(map(tuple, rows)))

    def histograms(self, name: str | None = None) -> list[Histogram]:
        """Returns histograms in the order of logging; of all names if None.

        Raises:
            MetricNotFoundError: nothing has this name.
        """
        return _chosen(self._valid(HISTOGRAMS_INDEX, _histogram), name, None)

    def texts(self, name: str | None = None) -> list[Text]:
        """Returns texts in the order of logging; of all names if None.

        Raises:
            MetricNotFoundError: nothing has this name.
        """
        return _chosen(self._valid(TEXTS_INDEX, _text_record), name, None)

    def traces(self) -> list[Trace]:
        """Returns traces in the order of logging."""
        return list(self._valid(TRACES_INDEX, _trace))

    def artifacts(self, name: str | None = None) -> list[Artifact]:
        """Returns artifacts in the order of logging; of all names if None. Deleted ones are left out.

        Raises:
            MetricNotFoundError: nothing has this name.
        """
        records = list(self._valid(ARTIFACTS_INDEX, self._artifact))
        deleted = {one.name: index for index, one in enumerate(records) if isinstance(one, _Deletion)}
        kept = [
            one
            for index, one in enumerate(records)
            if isinstance(one, Artifact) and index > deleted.get(one.name, -1)
        ]
        return _chosen(kept, name, None)

    def damaged_lines(self) -> dict[str, int]:
        """Returns the number of damaged lines of each index that has any."""
        counts = {
            index: sum(one is None for one in self._parsed(index, parse)) for index, parse in self._parsers()
        }
        return {index: count for index, count in counts.items() if count}

    def overview(self) -> "dict[str, RecordCount]":
        """Returns the number of records by kind ("images", "audio", …), in constant memory."""
        found: dict[str, RecordCount] = {}
        for index, parse in self._parsers():
            for record in self._parsed(index, parse):
                if isinstance(record, _Deletion) and (all_files := found.get("artifacts")):
                    all_files.count = max(0, all_files.count - 1)
                    all_files.size = max(0, all_files.size - max(0, record.size or 0))
                    all_files.names -= Counter([record.name])
                if record is not None and (kind := _KINDS.get(type(record))):
                    one = found.setdefault(kind, RecordCount())
                    one.count += 1
                    one.size += max(0, getattr(record, "size", None) or 0)
                    name = getattr(record, "name", "")
                    if name in one.names or len(one.names) < _MAX_NAMES:
                        one.names[name] += 1
        return {kind: found[kind] for kind in _KINDS.values() if kind in found}

    # Inside.

    def _valid(self, index: str, parse: Callable[[dict[str, Any]], _Record]) -> Iterator[_Record]:
        """Returns the valid records of an index."""
        return (found for found in self._parsed(index, parse) if found is not None)

    def _parsed(self, index: str, parse: Callable[[dict[str, Any]], _Record]) -> Iterator[_Record | None]:
        """Yields the record of each line; None for a damaged line."""
        for record in json_lines(self._run_dir / index, with_torn=True):
            try:
                found = None if record is None else parse(record)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
                found = None
            yield found

    def _parsers(self) -> list[tuple[str, Callable[[dict[str, Any]], object]]]:
        return [
            (MEDIA_INDEX, self._medium),
            (TABLES_INDEX, self._table_entry),
            (HISTOGRAMS_INDEX, _histogram),
            (TEXTS_INDEX, _text_record),
            (TRACES_INDEX, _trace),
            (ARTIFACTS_INDEX, self._artifact),
        ]

    def _media(self, kind: type[_AnyMedium]) -> Iterator[_AnyMedium]:
        return (medium for medium in self._valid(MEDIA_INDEX, self._medium) if isinstance(medium, kind))

    def _medium(self, record: dict[str, Any]) -> Medium:
        shape = record.get("shape")
        fields: dict[str, Any] = {
            "name": str(record.get("name") or record["tag"]),
            "step": _whole(record.get("step")),
            "index": _whole(record.get("index")) or 0,
            "time": number_of(record.get("time")),
            "path": self._inside(record["path"]),
            "size": _whole(record.get("size")),
            "shape": None if shape is None else tuple(int(side) for side in shape),
            "caption": _text(record.get("caption")),
        }
        match record["type"]:
            case "image":
                return Image(**fields, **self._image_fields(record))
            case "audio":
                return Audio(**fields, sample_rate=_whole(record.get("sample_rate")))
            case "video":
                return Video(**fields, fps=number_of(record.get("fps")), format=_text(record.get("format")))
            case "point_cloud":
                return PointCloud(**fields)
        return Medium(**fields)  # Of a later version.

    def _image_fields(self, record: dict[str, Any]) -> dict[str, Any]:
        masks = {
            str(name): Mask(
                self._inside(mask["path"]),
                self._inside(mask["overlay"]) if mask.get("overlay") else None,
            )
            for name, mask in (record.get("masks") or {}).items()
        }
        labels = {int(key): str(label) for key, label in (record.get("mask_class_labels") or {}).items()}
        bounds = [number_of(bound) for bound in record.get("value_range") or ()]
        return {
            "masks": masks,
            "class_labels": labels,
            "value_range": (bounds[0], bounds[1]) if len(bounds) == 2 else None,  # noqa: PLR2004  # min, max
        }

    def _table_entry(self, record: dict[str, Any]) -> TableEntry:
        return TableEntry(
            **_call_of(record),
            path=self._inside(record["path"]),
            size=_whole(record.get("size")),
            row_count=whole_of(record.get("rows")) or 0,
            columns=tuple((str(one["name"]), str(one.get("type", "str"))) for one in record["columns"]),
        )

    def _artifact(self, record: dict[str, Any]) -> Artifact | _Deletion:
        if record.get("is_deleted") is True:
            return _Deletion(str(record["name"]), _whole(record.get("size")))
        return Artifact(
            **_call_of(record),
            path=self._inside(record["path"]),
            size=_whole(record.get("size")),
            sha256=_text(record.get("sha256")),
        )

    def _inside(self, path: Any) -> Path:
        return path_inside(self._run_dir, path)


def _call_of(record: dict[str, Any]) -> dict[str, Any]:
    """Returns name, step and time of the call that logged a record."""
    return {
        "name": str(record["name"]),
        "step": _whole(record.get("step")),
        "time": number_of(record.get("time")),
    }


def _histogram(record: dict[str, Any]) -> Histogram:
    import numpy as np

    moments = ("count", "non_finite", "min", "max", "mean", "std", "sum")
    return Histogram(
        **_call_of(record),
        counts=np.array(record["counts"], np.int64).reshape(-1),
        edges=np.array([number_of(edge) for edge in record["edges"]], np.float64).reshape(-1),
        moments={moment: number_of(record[moment]) for moment in moments if moment in record},
    )


def _text_record(record: dict[str, Any]) -> Text:
    return Text(**_call_of(record), text=str(record["text"]))


def _trace(record: dict[str, Any]) -> Trace:
    return Trace(_whole(record.get("step")), number_of(record.get("time")), dict(record["traces"]))


def _chosen(records: Iterable[_NamedRecord], name: str | None, step: int | None) -> list[_NamedRecord]:
    found: list[_NamedRecord] = []
    others: dict[str, None] = {}
    is_known = name is None
    for record in records:
        if name is not None and record.name != name:
            if len(others) < _MAX_NAMES:
                others[record.name] = None
            continue
        is_known = True
        if step is None or record.step == step:
            found.append(record)
    if name is not None and not is_known:
        raise MetricNotFoundError(name, others)
    return found


def _whole(value: Any) -> int | None:
    return whole_of(value) if isinstance(value, int) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
