"""Reads media as W&B and Trackio describe them: a mapping with a type, and a path or the values."""

import io
import json
import wave
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from destinations.kinds.audio import AUDIO
from destinations.kinds.histograms import HISTOGRAM
from destinations.kinds.images import IMAGE
from destinations.kinds.kind import Kind
from destinations.kinds.point_clouds import POINT_CLOUD
from destinations.kinds.tables import TABLE
from destinations.kinds.videos import VIDEO

UNREADABLE = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, EOFError, RuntimeError),
    *(wave.Error, zipfile.BadZipFile, zlib.error),
)
"""The errors that a reader raises if a record is damaged or its file is missing."""

_XYZ, _XYZ_RGB = 3, 6


def _caption(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"caption": fields["caption"]} if fields.get("caption") else {}


_Path = Callable[[Any], Path]
ReadArguments = Callable[[_Path, Mapping[str, Any]], dict[str, Any]]
"""Takes a function from path to file, and the fields; returns the arguments of the kind's log method."""


def _image(path: _Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    captions = {"captions": [fields["caption"]]} if fields.get("caption") else {}
    return {"images": [path(fields["path"])], **captions}


def sound_arguments(data: bytes) -> dict[str, Any]:
    """Returns the arguments that log the bytes of a WAV file."""
    with wave.open(io.BytesIO(data)) as sound:
        return {"audio": data, "sample_rate": sound.getframerate()}


def _sound(path: _Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {**sound_arguments(path(fields["path"]).read_bytes()), **_caption(fields)}


def _video(path: _Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"video": str(path(fields["path"])), **_caption(fields)}


def _histogram(_: _Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    from events import BinnedValues

    if "packedBins" in fields:
        raise ValueError
    return {"values": BinnedValues(fields["values"], fields["bins"])}


def _table(path: _Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    table = json.loads(path(fields["path"]).read_text(encoding="utf-8"))
    return {"columns": [str(name) for name in table["columns"]], "rows": table["data"]}


def _points(path: _Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    import numpy as np

    points = np.array(json.loads(path(fields["path"]).read_text(encoding="utf-8")), float)
    if points.ndim != 2 or points.shape[1] < _XYZ:  # noqa: PLR2004  # rows and columns
        raise ValueError
    colors = {"colors": points[:, _XYZ:].astype(np.uint8)} if points.shape[1] == _XYZ_RGB else {}
    return {"points": points[:, :_XYZ], **colors, **_caption(fields)}


READERS: Mapping[str, tuple[Kind, ReadArguments]] = {
    "image-file": (IMAGE, _image),
    "audio-file": (AUDIO, _sound),
    "video-file": (VIDEO, _video),
    "histogram": (HISTOGRAM, _histogram),
    "table-file": (TABLE, _table),
    "object3D-file": (POINT_CLOUD, _points),
}
"""The kind and the reader of each W&B type."""
