"""An untrusted line of an index, with checked access to its fields."""

import errno
import math
import os
import stat
from pathlib import Path
from typing import Any

import attrs

from destinations.run_directory.layout import number_of_int, whole_number
from uploads.disk import ABSENT

__all__ = ["Line", "file_inside", "number_of", "path_inside", "whole_of"]

_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def number_of(value: Any) -> float | None:
    """Returns a number from strict JSON, where NaN and infinities are strings; None if it is not a number.

    An integer beyond 64 bits becomes the nearest float.
    """
    if isinstance(value, str):
        return _NUMBERS.get(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, float) else number_of_int(value)


def whole_of(value: Any) -> int | None:
    """Returns a number as an integer; None if it is not a number, not finite, or beyond 64 bits."""
    return whole_number(number_of(value))


def path_inside(run_dir: Path, relative: Any) -> Path:
    """Returns the path of a file that a record names; the file need not exist.

    Raises:
        ValueError: the path leads out of the run folder, possibly through a link, or is too long for the
            system.
    """
    text = str(relative)
    parts = [part for part in text.split("/") if part not in {"", "."}]
    if not parts or text.startswith("/") or ".." in parts or "\0" in text:
        raise ValueError(f"path {relative!r} of a record is outside the folder of its run.")
    folder = str(run_dir)
    # If the file itself is a link, opening it fails.
    for part in parts[:-1]:
        folder = f"{folder}/{part}"
        is_link = _is_link(folder)
        if is_link is None:
            # Nothing is there, but the whole path may still be too long.
            _is_link(str(run_dir.joinpath(*parts)))
            break
        if is_link:
            raise ValueError(f"path {relative!r} of a record passes through a link.")
    return run_dir.joinpath(*parts)


def _is_link(path: str) -> bool | None:
    """Returns whether a path is a link; None if nothing is there.

    Raises:
        ValueError: the path is too long for the system.
    """
    try:
        return stat.S_ISLNK(os.lstat(path).st_mode)
    except ABSENT:
        return None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise ValueError(f"path {path[:100]!r}… of a record is too long.") from error


def file_inside(run_dir: Path, relative: Any) -> Path:
    """Returns the path of a regular file that a record names.

    Raises:
        FileNotFoundError: the file is missing, a link, or outside the run folder.
    """
    try:
        path = path_inside(run_dir, relative)
        if not path.is_symlink() and path.is_file():
            return path
    except ValueError:
        pass
    raise FileNotFoundError(f"file {relative!r} of a record is not in the folder of its run.")


@attrs.frozen
class Line:
    """A line of an index.

    Attributes:
        run_dir: the run folder.
        fields: the JSON object.
    """

    run_dir: Path
    fields: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the record; "" if it has none."""
        return str(self.fields.get("name") or self.fields.get("tag") or "")

    @property
    def step(self) -> int | None:
        """The step of the call; None if unknown."""
        return self.whole("step")

    @property
    def time(self) -> float | None:
        """The time of the call, in seconds since 1970; None if unknown."""
        return self.number("time")

    def call(self) -> dict[str, Any]:
        """Returns name, step and time.

        Raises:
            KeyError: there is no name.
        """
        if "name" not in self.fields and "tag" not in self.fields:
            raise KeyError("name")
        return {"name": self.name, "step": self.step, "time": self.time}

    def whole(self, key: str) -> int | None:
        """Returns a field if it is an integer, else None."""
        value = self.fields.get(key)
        return whole_of(value) if isinstance(value, int) else None

    def number(self, key: str) -> float | None:
        """Returns a field if it is a number, else None."""
        return number_of(self.fields.get(key))

    def text(self, key: str) -> str | None:
        """Returns a field if it is a string, else None."""
        value = self.fields.get(key)
        return value if isinstance(value, str) else None

    def path(self, key: str = "path") -> Path:
        """Returns the path of a file, which need not exist.

        Raises:
            KeyError: there is no path.
            ValueError: the path leads out of the run folder.
        """
        return path_inside(self.run_dir, self.fields[key])

    def file(self, key: str = "path") -> Path:
        """Returns the path of a regular file.

        Raises:
            FileNotFoundError: the file is missing, a link, or outside the run folder.
        """
        return file_inside(self.run_dir, self.fields[key])
