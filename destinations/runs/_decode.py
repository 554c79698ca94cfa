"""The files of media as what was logged: arrays that, logged again, become the same files.

Pure functions of a line of an index and the folder of the run.
"""

from pathlib import Path
from typing import Any

import numpy as np

from destinations.run_directory.files import read_regular
from events import BinnedValues

from ._files import MOST_MEDIUM_BYTES, open_image, read_pixels, read_points, read_sound, read_table
from ._lines import file_inside

__all__ = ["cloud_of", "histogram_of", "image_of", "mask_of", "sound_of", "table_of"]

Array = np.ndarray[Any, Any]

_MOST_SHOWN_AS_NAN = 1000


def image_of(run_dir: Path, line: dict[str, Any]) -> Array:
    """Returns the pixels of an image, `(H, W)` or `(C, H, W)`: uint8, or floats in the range that they were stretched from."""
    with open_image(file_inside(run_dir, line["path"])) as picture:
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
    return read_pixels(file_inside(run_dir, paths["path"]))


def sound_of(run_dir: Path, line: dict[str, Any]) -> "Array | bytes":
    """Returns a sound as int16 `(samples,)` or `(channels, samples)`, or the bytes of a file that has other samples."""
    path, shape = file_inside(run_dir, line["path"]), line.get("shape")
    if shape is None:
        return read_regular(path, MOST_MEDIUM_BYTES)
    samples, _ = read_sound(path)
    return samples[:, 0] if len(shape) == 1 else samples.T


def cloud_of(run_dir: Path, line: dict[str, Any]) -> tuple[Array, Array | None]:
    """Returns points as float32 `(N, 3)`, and their colours as uint8 `(N, 3)` or `(N, 4)`, or None."""
    return read_points(file_inside(run_dir, line["path"]))


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
    types = [str(column.get("type")) for column in line.get("columns", ())]
    return read_table(file_inside(run_dir, line["path"]), types)
