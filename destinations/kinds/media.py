"""The common parts of images, audio, videos and point clouds: a file, and a line in `media.jsonl`."""

import os
from pathlib import Path
from typing import Any, BinaryIO

import attrs

from destinations.run_directory.layout import safe_name
from uploads.disk import open_regular, read_regular

from .line import Line

__all__ = [
    "MAX_MEDIUM_BYTES",
    "MEDIA_INDEX",
    "Medium",
    "check_name",
    "copy_array",
    "copy_medium",
    "medium_fields",
    "open_file",
    "parse_medium",
]


def copy_medium(value: Any) -> Any:
    """Returns a copy of an array, a picture or a file's content, or of several in a list or dict."""
    from destinations.media import copy_value

    return (
        {name: copy_value(one) for name, one in value.items()}
        if isinstance(value, dict)
        else copy_value(value)
    )


def copy_array(value: Any) -> Any:
    """Returns a copy of numbers or of a list of numbers as an array."""
    from destinations.media import to_numpy

    return to_numpy(value).copy()


MEDIA_INDEX = "media.jsonl"
MAX_MEDIUM_BYTES = 1 << 30
"""The largest file that is read completely."""


@attrs.frozen
class Medium:
    """A logged file.

    Attributes:
        name: the name as logged.
        step: the step of the call; None if unknown.
        index: the position among the files of one call.
        time: the time of the call, in seconds since 1970; None if unknown.
        path: the absolute path of the file. `load` and `read_bytes` refuse a symbolic link.
        size: bytes; None if unknown.
        shape: the shape of the logged array; None for a logged file.
        caption: the caption; None if there is none.
    """

    name: str
    step: int | None
    index: int
    time: float | None
    path: Path
    size: int | None
    shape: tuple[int, ...] | None
    caption: str | None

    def read_bytes(self) -> bytes:
        """Returns the content of the file.

        Raises:
            OSError: the file is missing, not a regular file, or larger than 1 GiB.
        """
        return read_regular(self.path, MAX_MEDIUM_BYTES)


def medium_fields(line: Line) -> dict[str, Any]:
    """Returns the arguments of a `Medium`."""
    shape = line.fields.get("shape")
    return {
        **line.call(),
        "index": line.whole("index") or 0,
        "path": line.path(),
        "size": line.whole("size"),
        "shape": None if shape is None else tuple(int(side) for side in shape),
        "caption": line.text("caption"),
    }


def parse_medium(line: Line) -> Medium:
    """Returns a medium of an unknown type, written by a later version."""
    return Medium(**medium_fields(line))


def open_file(path: Path) -> BinaryIO:
    """Opens a regular file for reading."""
    return os.fdopen(open_regular(path), "rb")


def check_name(name: str) -> None:
    """Checks that a name stays inside the folder.

    Raises:
        RecordError: the name leads out of the folder.
    """
    from events import RecordError

    try:
        safe_name(name)
    except ValueError as error:
        raise RecordError(str(error)) from None
