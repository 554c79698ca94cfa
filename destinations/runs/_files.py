"""The files of media and tables, read back: PNG, WAV, PLY and CSV as `RunDirectory` writes them.

Pure functions of a path. Importing this module imports neither numpy nor Pillow.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

__all__ = ["read_pixels", "read_points", "read_sound", "read_table"]

_PLY_TYPES = {"float": "<f4", "float32": "<f4", "double": "<f8", "uchar": "u1", "uint8": "u1"}


def read_pixels(path: Path) -> "np.ndarray[Any, Any]":
    """Returns the pixels of an image file as it has them: `(H, W)`, or `(H, W, C)`."""
    import numpy as np
    import PIL.Image

    with PIL.Image.open(path) as image:
        return np.array(image)


def read_sound(path: Path) -> "tuple[np.ndarray[Any, np.dtype[np.int16]], int]":
    """Returns the samples of a WAV file, int16 `(frames, channels)`, and its sample rate in Hz.

    Raises:
        ValueError: the file is another format, or has other than 16 bits; the text names its path.
    """
    import wave

    import numpy as np

    try:
        with wave.open(str(path), "rb") as file:
            channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            data = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise ValueError(f"sound must be a WAV file, got {path} ({error}). Open its path.") from error
    if width != 2:  # noqa: PLR2004  # bytes
        raise ValueError(f"sound must have 16 bits, got {8 * width} in {path}. Open its path.")
    return np.frombuffer(data, "<i2").reshape(-1, channels), rate


def read_points(
    path: Path,
) -> "tuple[np.ndarray[Any, np.dtype[np.float32]], np.ndarray[Any, np.dtype[np.uint8]] | None]":
    """Reads binary PLY of vertices alone (G. Turk, The PLY Polygon File Format, 1994).

    Returns:
        Points, float32 `(N, 3)`, and their colours, uint8 `(N, 3)` or `(N, 4)`, or None.

    Raises:
        ValueError: the file is not such a PLY; the text names its path.
    """
    import numpy as np

    head, mark, body = path.read_bytes().partition(b"end_header\n")
    lines = [line.split() for line in io.StringIO(head.decode("ascii", "replace"))]
    if not mark or lines[:1] != [["ply"]] or ["format", "binary_little_endian", "1.0"] not in lines:
        raise ValueError(f"point cloud must be a binary little-endian PLY, got {path}. Open its path.")
    try:
        count = next(int(line[2]) for line in lines if line[:2] == ["element", "vertex"])
        fields = [(line[2], _PLY_TYPES[line[1]]) for line in lines if line[:1] == ["property"]]
        vertices = np.frombuffer(body, np.dtype(fields), count)
        points = np.stack([vertices[axis] for axis in "xyz"], axis=1).astype(np.float32)
    except (StopIteration, KeyError, IndexError, ValueError) as error:
        raise ValueError(f"point cloud must have x, y and z, got {path} ({error}).") from error
    shades = [name for name, _ in fields if name in {"red", "green", "blue", "alpha"}]
    if not shades:
        return points, None
    return points, np.stack([vertices[name] for name in shades], axis=1).astype(np.uint8)


def read_table(path: Path, types: Sequence[str]) -> tuple[list[str], list[list[Any]]]:
    """Reads the CSV of a table.

    Args:
        path: the file.
        types: of its columns, as the index of tables has them: "bool", "int", "float", "str", or "empty". A column beyond them
            is one of texts.

    Returns:
        The names of the columns, and the rows, each cell with its type; the text itself where it does not fit. In a column of
        numbers an empty cell is None; in one of floats a number without a point is an int, as it was logged.
    """
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.reader(file)
        columns = next(reader, [])
        kinds = [*types, *["str"] * (len(columns) - len(types))]
        rows = [
            # A line that is empty stands for a row of one empty value.
            [_cell(cell, kind) for cell, kind in zip(cells or [""], kinds, strict=False)] if columns else []
            for cells in reader
        ]
    return columns, rows


def _cell(text: str, kind: str) -> Any:
    if kind == "str":
        return text
    if text == "" or kind == "empty":
        return None
    if text in {"True", "False"}:
        return text == "True"
    try:
        return int(text) if kind == "int" or text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return text
