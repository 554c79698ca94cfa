"""The declaration of a kind of record, and the interfaces of its writer and reader."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs

from .line import Line

__all__ = ["FileOf", "Kind", "RecordOutput", "Work"]


class RecordOutput(Protocol):
    """The output of one call of a `log_*` method; used in a background thread."""

    def add_file(self, suffix: str, data: bytes, *, name: str | None = None) -> str:
        """Writes a new file into the folder of the kind, and returns its path relative to the run folder.

        Args:
            suffix: the suffix of the file.
            data: the content.
            name: the name of the record. Default: the name given in the call.
        """

    def add_line(self, fields: dict[str, Any]) -> None:
        """Appends a line to the index of the kind, with `step`, `name` and `time` of the call."""

    def add_medium(self, suffix: str, data: bytes, *, index: int = 0, **fields: Any) -> None:
        """Writes a file below `media/`, and its line in `media.jsonl`.

        Args:
            suffix: the suffix of the file.
            data: the content.
            index: the position of the file in the call.
            fields: more fields of the line.
        """


Work = Callable[[RecordOutput], object]
"""The part of a call that a background thread does, with the values that `Kind.write` has copied."""

FileOf = Callable[[Path], str]
"""Returns the path under which the page requests a file."""


def _unchanged(_record: Any, fields: dict[str, Any], _file_of: FileOf) -> dict[str, Any]:
    return fields


@attrs.frozen(kw_only=True)
class Kind:
    """A kind of record. Everything that writes, reads, sends and shows it is derived from this.

    Attributes:
        name: its name in the index and in reports of `send`, such as "point_cloud".
        index: the file of a run folder with a line for each record; all kinds of media share one.
        write: takes the name of a record (None if the kind has no names) and the other arguments of the call
            by name, without the step. Copies them, and returns their size in bytes and the work for the
            background thread. Raises `RecordError` for invalid arguments. None for files, which
            `RunDirectory.upload_file` handles.
        parse: returns the record of a line. Raises `KeyError`, `TypeError` or `ValueError` if it is damaged.
        replay: takes the lines of one call, and returns the arguments of the method by name, without name,
            step and caption. Raises `FileNotFoundError` if a file is missing.
        method: the method of a destination. Default: "log_" and the name.
        copies: functions that copy arguments, by name, for a tracker's background thread. Other arguments are
            copied as plain values.
        plural: the method of `Run`, and the name in the API. Default: the name and "s".
        noun: the name in messages. Default: the name in words.
        shows: the renderer in `static/media.js` that shows it: "image", "video", "audio", "points",
            "histogram", "table", "text" or "pairs"; "" if the page does not show it.
        folder: the folder with the files that its lines name, inside the run folder; "" if they name none.
        is_grouped: whether one call may write several lines.
        is_single: whether it has a single argument besides name and step. `InMemory` and `TextFile` then keep
            that argument instead of a dict.
        samples: arguments of the calls that `DestinationContract` makes to each destination.
        page_fields: takes a record, its fields, and a `FileOf`; returns the fields for the page.
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
