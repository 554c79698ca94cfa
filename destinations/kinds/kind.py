"""What a kind of record declares, and what its writer and its reader get."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs

from .line import Line

__all__ = ["FileOf", "Kind", "RecordOutput", "Work"]


class RecordOutput(Protocol):
    """Where one call of a `log_*` method is written; in a background thread."""

    def add_file(self, suffix: str, data: bytes, *, name: str | None = None) -> str:
        """Writes a new file into the folder of the kind, and returns its path inside that of the run.

        Args:
            suffix: of the file.
            data: its content.
            name: of the record. Default: that of the call.
        """

    def add_line(self, fields: dict[str, Any]) -> None:
        """Appends a line to the index of the kind, with `step`, `name` and `time` of the call."""

    def add_medium(self, suffix: str, data: bytes, *, index: int = 0, **fields: Any) -> None:
        """Writes a file below `media/`, and its line in `media.jsonl`.

        Args:
            suffix: of the file.
            data: its content.
            index: its place among the files of the call.
            fields: more of its line.
        """


Work = Callable[[RecordOutput], object]
"""What a background thread does with what `Kind.write` has copied."""

FileOf = Callable[[Path], str]
"""Returns the path of a file as the page asks for it."""


def _unchanged(_record: Any, fields: dict[str, Any], _file_of: FileOf) -> dict[str, Any]:
    return fields


@attrs.frozen(kw_only=True)
class Kind:
    """A kind of record: what writes, reads, sends and shows it is derived from this.

    Attributes:
        name: in the index, and in what `send` reports: "point_cloud".
        index: the file in the folder of a run that has a line for each record; the kinds of media share one.
        write: takes the name of a record, None where the kind has none, and the other arguments of the call
            by name, but for its step. Copies them, and returns how many bytes they take and the work that is
            left to the background thread. Raises `RecordError` for what it cannot take. None for files,
            which `RunDirectory.upload_file` takes.
        parse: returns the record of a line. Raises `KeyError`, `TypeError` or `ValueError` for a damaged one.
        replay: takes the lines of one call, and returns the arguments of the method by name, but for name,
            step and caption. Raises `FileNotFoundError` where a file is missing.
        method: of a destination. Default: "log_" and the name.
        copies: how a tracker copies arguments, by name, for its background thread; others are copied as plain
            values.
        plural: the method of `Run`, and the name in the API. Default: the name and "s".
        noun: in messages. Default: the name in words.
        shows: how the page shows it, by the renderers of `static/media.js`: "image", "video", "audio",
            "points", "histogram", "table", "text" or "pairs"; "" where the page does not show it.
        folder: of the files that its lines name, in the folder of the run; "" where they name none.
        is_grouped: whether one call may write several lines.
        is_single: whether it has one argument besides name and step, by which `InMemory` and `TextFile` keep
            it; else they keep a dict.
        samples: the arguments of calls, by name, that `DestinationContract` makes to each destination.
        page_fields: takes a record, its fields, and what names a file; returns the fields as the page has
            them.
    """

    name: str
    index: str
    parse: Callable[[Line], Any]
    replay: Callable[[Sequence[Line]], dict[str, Any]]
    write: Callable[..., tuple[int, Work]] | None = None
    method: str = attrs.Factory(lambda self: f"log_{self.name}", takes_self=True)
    copies: Mapping[str, Callable[[Any], Any]] = attrs.Factory(dict)
    plural: str = attrs.Factory(lambda self: f"{self.name}s", takes_self=True)
    noun: str = attrs.Factory(lambda self: self.name.replace("_", " "), takes_self=True)
    shows: str = ""
    folder: str = ""
    is_grouped: bool = False
    is_single: bool = False
    samples: tuple[dict[str, Any], ...] = ()
    page_fields: Callable[[Any, dict[str, Any], FileOf], dict[str, Any]] = _unchanged
