"""Images, audio, videos and point clouds of a run: their metadata, and `load` for their content."""

import contextlib
import csv
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import attrs

from uploads.disk import open_regular, read_regular

if TYPE_CHECKING:
    import numpy as np
    import PIL.Image

__all__ = [
    "MAX_MEDIUM_BYTES",
    "Audio",
    "Image",
    "Mask",
    "Medium",
    "PointCloud",
    "Video",
    "open_image",
    "read_pixels",
    "read_points",
    "read_sound",
    "read_table",
]

MAX_MEDIUM_BYTES = 1 << 30
"""The largest file that is read whole."""
# Pillow starts external programs for some others.
_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_PLY_TYPES = {"float": "<f4", "float32": "<f4", "double": "<f8", "uchar": "u1", "uint8": "u1"}


@contextlib.contextmanager
def open_image(path: Path) -> "Iterator[PIL.Image.Image]":
    """Opens an image file for the duration of a `with` block.

    Raises:
        OSError: the file cannot be read, or is not an image.
        ValueError: it is damaged, or a decompression bomb; the message has its path.
    """
    import struct

    import PIL.Image

    try:
        with _opened(path) as file, PIL.Image.open(file, formats=_IMAGE_FORMATS) as image:
            yield image
    except (SyntaxError, EOFError, struct.error, PIL.Image.DecompressionBombError) as error:
        raise ValueError(f"could not decode image {path} ({error}).") from error


def _opened(path: Path) -> BinaryIO:
    return os.fdopen(open_regular(path), "rb")


def read_pixels(path: Path) -> "np.ndarray[Any, Any]":
    """Returns the pixels of an image file, `(H, W)` or `(H, W, C)`."""
    import numpy as np

    with open_image(path) as image:
        return np.array(image)


def read_sound(path: Path) -> "tuple[np.ndarray[Any, np.dtype[np.int16]], int]":
    """Returns the samples of a WAV file, int16 `(frames, channels)`, and its sample rate in Hz.

    Raises:
        ValueError: the file is not a WAV of 16 bits; the message has its path.
    """
    import wave

    import numpy as np

    try:
        with _opened(path) as raw, wave.open(raw) as file:
            channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            frames = min(file.getnframes(), MAX_MEDIUM_BYTES // max(1, channels * width))
            data = file.readframes(frames)
    except (wave.Error, EOFError, RuntimeError) as error:
        raise ValueError(f"audio {path} is not a WAV file ({error}). Open its path.") from error
    if width != 2:  # noqa: PLR2004  # bytes
        raise ValueError(f"audio {path} has {8 * width} bits, not 16. Open its path.")
    whole = len(data) - len(data) % (2 * channels)
    return np.frombuffer(data[:whole], "<i2").reshape(-1, channels), rate


def read_points(
    path: Path,
) -> "tuple[np.ndarray[Any, np.dtype[np.float32]], np.ndarray[Any, np.dtype[np.uint8]] | None]":
    """Reads binary PLY of vertices alone (G. Turk, The PLY Polygon File Format, 1994).

    Returns:
        Points, float32 `(N, 3)`, and their colours, uint8 `(N, 3)` or `(N, 4)`, or None.

    Raises:
        ValueError: the file is another kind of PLY; the message has its path.
    """
    import numpy as np

    head, mark, body = read_regular(path, MAX_MEDIUM_BYTES).partition(b"end_header\n")
    lines = [line.split() for line in io.StringIO(head.decode("ascii", "replace"))]
    if not mark or lines[:1] != [["ply"]] or ["format", "binary_little_endian", "1.0"] not in lines:
        raise ValueError(f"point cloud {path} is not a binary little-endian PLY. Open its path.")
    try:
        count = next(int(line[2]) for line in lines if line[:2] == ["element", "vertex"])
        fields = [(line[2], _PLY_TYPES[line[1]]) for line in lines if line[:1] == ["property"]]
        vertices = np.frombuffer(body, np.dtype(fields), count)
        points = np.stack([vertices[axis] for axis in "xyz"], axis=1).astype(np.float32)
    except (StopIteration, KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"point cloud {path} has no x, y and z ({error}).") from error
    shades = [name for name, _ in fields if name in {"red", "green", "blue", "alpha"}]
    if not shades:
        return points, None
    return points, np.stack([vertices[name] for name in shades], axis=1).astype(np.uint8)


def read_table(path: Path, types: Sequence[str]) -> tuple[list[str], list[list[Any]]]:
    """Reads the CSV of a table.

    Args:
        path: the file.
        types: of its columns, from the index of tables: "bool", "int", "float", "str", or "empty". Further
            columns are texts.

    Returns:
        The names of the columns, and the rows with typed cells; a cell that does not fit its type stays text.
        In a column of numbers an empty cell is None; in one of floats a number without a point is an int, as
        logged.

    Raises:
        ValueError: it is not a CSV; the message has its path.
    """
    text = read_regular(path, MAX_MEDIUM_BYTES).decode("utf-8-sig", "replace")
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        columns = next(reader, [])
        kinds = [*types, *["str"] * (len(columns) - len(types))]
        rows = [
            # An empty line is a row of one empty value.
            [_cell(cell, kind) for cell, kind in zip(cells or [""], kinds, strict=False)] if columns else []
            for cells in reader
        ]
    except csv.Error as error:
        raise ValueError(f"table {path} is not a CSV ({error}). Open its path.") from error
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


@attrs.frozen
class Medium:
    """A logged file.

    Attributes:
        name: as logged.
        step: of the call; None if unknown.
        index: position among the files of one call.
        time: of the call, in seconds since 1970; None if unknown.
        path: the file, absolute. `load` and `read_bytes` refuse a symbolic link.
        size: bytes; None if unknown.
        shape: of the logged array; None for a logged file.
        caption: None if there is none.
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
            OSError: it is missing, not a regular file, or larger than 1 GiB.
        """
        return read_regular(self.path, MAX_MEDIUM_BYTES)


@attrs.frozen
class Mask:
    """A segmentation mask of an image: pixels are the indices of classes.

    Attributes:
        path: PNG of the indices.
        overlay: PNG of the image with the coloured mask.
    """

    path: Path
    overlay: Path | None

    def load(self) -> "np.ndarray[Any, Any]":
        """Returns the indices, `(H, W)`."""
        return read_pixels(self.path)


@attrs.frozen
class Image(Medium):
    """An image.

    Attributes:
        masks: by name.
        class_labels: names of the class indices.
        value_range: min and max of the logged values, if the pixels were rescaled.
    """

    masks: Mapping[str, Mask] = attrs.field(factory=dict)
    class_labels: Mapping[int, str] = attrs.field(factory=dict)
    value_range: tuple[float, float] | None = None

    def load(self) -> "PIL.Image.Image":
        """Returns the decoded image."""
        with open_image(self.path) as image:
            image.load()
            return image

    def array(self) -> "np.ndarray[Any, Any]":
        """Returns the pixels, uint8 `(H, W)`, `(H, W, 3)` or `(H, W, 4)`."""
        return read_pixels(self.path)


@attrs.frozen
class Audio(Medium):
    """An audio clip.

    Attributes:
        sample_rate: in Hz; None if unknown.
    """

    sample_rate: int | None = None

    def load(self) -> "tuple[np.ndarray[Any, np.dtype[np.int16]], int]":
        """Returns the samples of a WAV file, int16 `(frames, channels)`, and its sample rate.

        Raises:
            ValueError: the file is not a WAV of 16 bits.
        """
        return read_sound(self.path)


@attrs.frozen
class Video(Medium):
    """A video; open `path` in a player.

    Attributes:
        fps: frames per second; None if unknown.
        format: the suffix of the file.
    """

    fps: float | None = None
    format: str | None = None


@attrs.frozen
class PointCloud(Medium):
    """A point cloud."""

    def load(
        self,
    ) -> "tuple[np.ndarray[Any, np.dtype[np.float32]], np.ndarray[Any, np.dtype[np.uint8]] | None]":
        """Returns the points, float32 `(N, 3)`, and their colours, uint8 `(N, 3)` or `(N, 4)`, or None.

        Raises:
            ValueError: the file is not a PLY as written by `RunDirectory`.
        """
        return read_points(self.path)
