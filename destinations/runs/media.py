"""The kinds of files that a run has beside metrics, as a reader sees them: what is known of each at once, and `load` for what it holds."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from destinations.run_directory.files import read_regular

from ._files import MOST_MEDIUM_BYTES, open_image, read_pixels, read_points, read_sound

if TYPE_CHECKING:
    import numpy as np
    import PIL.Image

__all__ = ["Audio", "Image", "Mask", "Medium", "PointCloud", "Video"]


@attrs.frozen
class Medium:
    """A file that was logged.

    Attributes:
        name: as it was logged.
        step: of the call; None where the run does not say.
        index: which of those of one call.
        time: of the call, in seconds since 1970; None where the run does not say.
        path: the file, absolute; of a run that others wrote it may be a link, which `load` and `read_bytes` refuse.
        size: bytes; None where the run does not say.
        shape: of the array that was logged; None where it was a file.
        caption: where there is one.
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
            OSError: it is missing, a symbolic link, no regular file, or larger than a gibibyte.
        """
        return read_regular(self.path, MOST_MEDIUM_BYTES)


@attrs.frozen
class Mask:
    """A segmentation mask of an image: pixels are the indices of classes.

    Attributes:
        path: PNG of the indices.
        overlay: PNG of the image with the mask in colours.
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
        class_labels: what the indices in masks mean.
        value_range: the least and greatest value that was logged, where the pixels were stretched.
    """

    masks: Mapping[str, Mask] = attrs.field(factory=dict)
    class_labels: Mapping[int, str] = attrs.field(factory=dict)
    value_range: tuple[float, float] | None = None

    def load(self) -> "PIL.Image.Image":
        """Returns the image, read whole."""
        with open_image(self.path) as image:
            image.load()
            return image

    def array(self) -> "np.ndarray[Any, Any]":
        """Returns the pixels, uint8 `(H, W)`, `(H, W, 3)` or `(H, W, 4)`."""
        return read_pixels(self.path)


@attrs.frozen
class Audio(Medium):
    """A sound.

    Attributes:
        sample_rate: in Hz, where the run says so.
    """

    sample_rate: int | None = None

    def load(self) -> "tuple[np.ndarray[Any, np.dtype[np.int16]], int]":
        """Returns the samples of a WAV file, int16 `(frames, channels)`, and its sample rate.

        Raises:
            ValueError: the file is another format, or has other than 16 bits; `path` names it.
        """
        return read_sound(self.path)


@attrs.frozen
class Video(Medium):
    """A video; `path` is for a player.

    Attributes:
        fps: frames per second, where they were given.
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
            ValueError: the file is not such a PLY as `RunDirectory` writes.
        """
        return read_points(self.path)
