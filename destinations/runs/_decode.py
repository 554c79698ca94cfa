"""The files of media as what was logged: arrays that, logged again, become the same files.

Pure functions of a line of an index and the folder of the run.
"""

import csv
import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from events import BinnedValues

from ._sources import path_inside

__all__ = ["cloud_of", "histogram_of", "image_of", "mask_of", "sound_of", "table_of"]

Array = np.ndarray[Any, Any]

_PLY_TYPES = {"float": "<f4", "double": "<f8", "uchar": "u1", "uint8": "u1", "float32": "<f4"}
_MOST_SHOWN_AS_NAN = 1000


def image_of(run_dir: Path, line: dict[str, Any]) -> Array:
    """Returns the pixels of an image, `(H, W)` or `(C, H, W)`: uint8, or floats in the range that they were stretched from."""
    with Image.open(path_inside(run_dir, line["path"])) as picture:
        pixels = np.asarray(picture if picture.mode in {"L", "RGB", "RGBA"} else picture.convert("RGBA"))
    if pixels.ndim == 3:  # noqa: PLR2004  # with channels
        pixels = np.moveaxis(pixels, -1, 0)
    elif len(line.get("shape") or ()) == 3:  # noqa: PLR2004  # one channel
        pixels = pixels[None]
    value_range = line.get("value_range")
    if value_range is None:
        return pixels
    low, high = map(float, value_range)
    values = low + pixels / 255.0 * (high - low)
    # Exactly, so that they are stretched to the same pixels again.
    values[pixels == 255] = high  # noqa: PLR2004  # the greatest byte
    return values


def mask_of(run_dir: Path, paths: dict[str, str]) -> Array:
    """Returns the class indices of a mask, `(H, W)`."""
    with Image.open(path_inside(run_dir, paths["path"])) as picture:
        return np.array(picture)


def sound_of(run_dir: Path, line: dict[str, Any]) -> "Array | bytes":
    """Returns a sound as int16 `(samples,)` or `(channels, samples)`, or the bytes of a file that has other samples."""
    data = path_inside(run_dir, line["path"]).read_bytes()
    shape = line.get("shape")
    if shape is None:
        return data
    with wave.open(io.BytesIO(data)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels()).T
    return samples[0] if len(shape) == 1 else samples


def cloud_of(run_dir: Path, line: dict[str, Any]) -> tuple[Array, Array | None]:
    """Returns points as float32 `(N, 3)`, and their colours as uint8 `(N, 3)` or `(N, 4)`, or None."""
    data = path_inside(run_dir, line["path"]).read_bytes()
    header, _, body = data.partition(b"end_header\n")
    words = [text.split() for text in header.decode("ascii", "replace").splitlines()]
    count = next(int(word[2]) for word in words if word[:2] == ["element", "vertex"])
    fields = [(word[2], _PLY_TYPES[word[1]]) for word in words if word[:1] == ["property"]]
    vertices = np.frombuffer(body, np.dtype(fields), count)
    points = np.stack([vertices[axis] for axis in "xyz"], axis=-1)
    shades = [name for name in ("red", "green", "blue", "alpha") if name in dict(fields)]
    return points, np.stack([vertices[name] for name in shades], axis=-1) if shades else None


def histogram_of(line: dict[str, Any]) -> Any:
    """Returns a histogram by its counts and edges; one without a finite value as NaN."""
    if not line.get("counts"):
        return np.full(min(int(line.get("non_finite") or line.get("count") or 0), _MOST_SHOWN_AS_NAN), np.nan)
    moments = {name: line.get(name) for name in ("min", "max", "mean", "std")}
    return BinnedValues(
        line["counts"],
        line["edges"],
        count=line.get("count"),
        non_finite=int(line.get("non_finite") or 0),
        **moments,
    )


def table_of(run_dir: Path, line: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Returns columns and rows of a table, each value of the type of its column."""
    text = path_inside(run_dir, line["path"]).read_text(encoding="utf-8", errors="replace")
    reader = csv.reader(io.StringIO(text, newline=""))
    columns = next(reader, [])
    types = [str(column.get("type")) for column in line.get("columns", ())]
    types += ["str"] * (len(columns) - len(types))
    rows = [
        # A line that is empty stands for a row of one empty value.
        [_value(cell, kind) for cell, kind in zip(cells or [""], types, strict=False)] if columns else []
        for cells in reader
    ]
    return columns, rows


def _value(cell: str, kind: str) -> Any:
    if kind == "str":
        return cell
    if cell == "" or kind == "empty":
        return None
    if cell in {"True", "False"}:
        return cell == "True"
    try:
        return int(cell) if kind == "int" or cell.lstrip("-").isdigit() else float(cell)
    except ValueError:
        return cell
