"""Converts images, figures and curves as PyTorch's writer does before it writes them."""

from typing import Any

import numpy as np

from destinations.media import to_numpy
from events import RecordError

__all__ = ["as_bytes", "curve_rows", "grid_of", "pixels_of", "videos_side_by_side"]

Array = np.ndarray[Any, Any]

_GRID_COLUMNS = 8
_COLORS = 3


def as_bytes(pixels: Array) -> Array:
    """Returns pixels as uint8; other types are taken to be in [0, 1], and clipped."""
    if pixels.dtype == np.uint8:
        return pixels
    return (pixels.astype(np.float32) * 255).clip(0, 255).astype(np.uint8)


def pixels_of(image: Any, dataformats: str) -> Array:
    """Returns an image as `(H, W, C)` uint8, several as a grid; C is 3 or 4."""
    array, letters = to_numpy(image), dataformats.upper()
    if (
        len(letters) != array.ndim
        or len(set(letters)) != len(letters)
        or not {*"HW"} <= {*letters} <= {*"NCHW"}
    ):
        raise RecordError(
            f"dataformats must have one letter of N, C, H and W for each dimension, got {dataformats!r} for "
            f"shape {array.shape}."
        )
    if "C" not in letters:
        array, letters = array[..., None], f"{letters}C"
    array = array.transpose([letters.index(one) for one in "NHWC" if one in letters])
    pixels = as_bytes(array)
    if pixels.shape[-1] == 1:
        pixels = np.repeat(pixels, _COLORS, axis=-1)
    return grid_of(pixels) if "N" in letters else pixels


def grid_of(images: Array) -> Array:
    """Returns images `(N, H, W, C)` as one, eight in a row, without gaps."""
    count, height, width, channels = images.shape
    columns = min(count, _GRID_COLUMNS)
    rows = -(-count // columns)
    padded = np.zeros((rows * columns, height, width, channels), images.dtype)
    padded[:count] = images
    tiles = padded.reshape(rows, columns, height, width, channels).swapaxes(1, 2)
    return tiles.reshape(rows * height, columns * width, channels)


def videos_side_by_side(videos: Array) -> Array:
    """Returns videos `(N, T, C, H, W)` as one `(T, C, H, W)`, each frame a grid."""
    grids = [grid_of(np.moveaxis(frame, 1, -1)) for frame in np.moveaxis(videos, 1, 0)]
    return np.moveaxis(np.stack(grids), -1, 1)


def curve_rows(*columns: Array) -> list[list[float]]:
    """Returns a row for each threshold, from the columns behind it."""
    table = np.stack([np.asarray(column, np.float64).ravel() for column in columns], axis=1)
    return [
        [float(threshold), *row]
        for threshold, row in zip(np.linspace(0, 1, len(table)), table.tolist(), strict=True)
    ]
