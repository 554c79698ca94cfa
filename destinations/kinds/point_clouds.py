"""Point clouds: PLY files below `media/`."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from destinations.run_directory.layout import MEDIA_FOLDER
from uploads.disk import read_regular

from .kind import Kind, RecordOutput, Work
from .line import Line
from .media import MAX_MEDIUM_BYTES, MEDIA_INDEX, Medium, copy_array, medium_fields

if TYPE_CHECKING:
    import numpy as np

__all__ = ["POINT_CLOUD", "PointCloud", "read_points"]

_PLY_TYPES = {"float": "<f4", "float32": "<f4", "double": "<f8", "uchar": "u1", "uint8": "u1"}


def read_points(
    path: Path,
) -> "tuple[np.ndarray[Any, np.dtype[np.float32]], np.ndarray[Any, np.dtype[np.uint8]] | None]":
    """Reads a binary PLY with vertices only (G. Turk, The PLY Polygon File Format, 1994).

    Returns:
        Points, float32 `(N, 3)`, and their colours, uint8 `(N, 3)` or `(N, 4)`, or None.

    Raises:
        ValueError: the file is not such a PLY; the message has its path.
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


@attrs.frozen
class PointCloud(Medium):
    """A point cloud."""

    def load(
        self,
    ) -> "tuple[np.ndarray[Any, np.dtype[np.float32]], np.ndarray[Any, np.dtype[np.uint8]] | None]":
        """Returns the points, float32 `(N, 3)`, and their colours, uint8 `(N, 3)` or `(N, 4)`, or None.

        Raises:
            ValueError: the file is not a PLY in the form that `RunDirectory` writes.
        """
        return read_points(self.path)


def _write(_name: str, *, points: Any, colors: Any, caption: str | None = None) -> tuple[int, Work]:
    from destinations.copies import size_in_bytes
    from destinations.media import iter_point_clouds, ply_bytes

    points, colors = copy_array(points), None if colors is None else copy_array(colors)

    def work(output: RecordOutput) -> None:
        for index, (cloud, shades) in enumerate(iter_point_clouds(points, colors)):
            more = {"caption": caption, "shape": list(cloud.shape), "has_colors": shades is not None}
            output.add_medium(".ply", ply_bytes(cloud, shades), index=index, **more)

    return size_in_bytes([points, colors]), work


def _parse(line: Line) -> PointCloud:
    return PointCloud(**medium_fields(line))


def _replay(lines: Sequence[Line]) -> dict[str, Any]:
    import numpy as np

    clouds = [read_points(line.file()) for line in lines]
    points, colors = clouds[0]
    if len(clouds) > 1:
        shades = [one for _, one in clouds if one is not None]
        points = np.stack([cloud for cloud, _ in clouds])
        colors = np.stack(shades) if len(shades) == len(clouds) else None
    return {"points": points, "colors": colors}


POINT_CLOUD = Kind(
    name="point_cloud",
    index=MEDIA_INDEX,
    write=_write,
    parse=_parse,
    replay=_replay,
    copies={"points": copy_array, "colors": copy_array},
    shows="points",
    folder=MEDIA_FOLDER,
    is_grouped=True,
)
