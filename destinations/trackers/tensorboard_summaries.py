"""Converts records to lists of `Summary.Value`, as read by TensorBoard's plugins.

Needs the package `tensorboard`, but neither TensorFlow nor torch.
"""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image
from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.plugins.hparams import plugin_data_pb2 as hparams_pb2
from tensorboard.plugins.image import metadata as image_metadata
from tensorboard.plugins.mesh import metadata as mesh_metadata
from tensorboard.plugins.mesh import plugin_data_pb2 as mesh_pb2
from tensorboard.plugins.text import metadata as text_metadata

from destinations.media import (
    class_color,
    gif_bytes,
    histogram_record,
    iter_point_clouds,
    png_bytes,
    wav_bytes,
)
from destinations.text.formatting import describe, flattened, short
from destinations.trackers.names import as_text, without_surrogates
from destinations.trackers.tracker import Images, number
from events import BinnedValues, RecordError

__all__ = [
    "audio_values",
    "histogram_values",
    "hyperparameter_value",
    "image_values",
    "number",
    "point_cloud_values",
    "session_end_value",
    "session_start_value",
    "table_value",
    "text_value",
    "trace_value",
    "video_value",
]

Values = list[Any]

MAX_TABLE_ROWS = 1000
_DATA_TYPES = {"f": types_pb2.DT_FLOAT, "u": types_pb2.DT_UINT8}


# Images and video.


def image_values(tag: str, images: Images) -> Values:
    """Returns the images under a tag, and under "tag/mask" the images with each mask as an overlay."""
    pixels = images.pixels()
    values = _images(tag, [(one.shape, png_bytes(one)) for one in pixels], "")
    for mask_name, overlays in images.overlays(pixels).items():
        shaped = [(one.shape, overlay) for one, overlay in zip(pixels, overlays, strict=True)]
        name = f"{tag}/{without_surrogates(mask_name)}"
        values += _images(name, shaped, _legend(images.mask_class_labels))
    return values


def _legend(labels: Mapping[int, str] | None) -> str:
    """Returns the classes with labels and colours as a Markdown table."""
    rows = [
        f"| {index} | {_cell(label)} | `{class_color(int(index))}` |"
        for index, label in (labels or {}).items()
    ]
    return "\n".join(["| class | label | colour |", "|---|---|---|", *rows]) if rows else ""


def _images(tag: str, encoded: Sequence[tuple[tuple[int, ...], bytes]], description: str) -> Values:
    """Returns one value: a plain image, widely supported, or a tensor for several or with a description."""
    if not encoded:
        return []
    (height, width), first = encoded[0][0][:2], encoded[0][1]
    if len(encoded) == 1 and not description:
        image = summary_pb2.Summary.Image(height=height, width=width, encoded_image_string=first)
        return [summary_pb2.Summary.Value(tag=tag, image=image)]
    metadata = image_metadata.create_summary_metadata(None, without_surrogates(description))
    strings = [str(width).encode(), str(height).encode(), *(data for _, data in encoded)]
    return [summary_pb2.Summary.Value(tag=tag, metadata=metadata, tensor=_strings(strings))]


def video_value(tag: str, video: Any, fps: float | None) -> Values:
    """Returns a video as an animated GIF, the only format of TensorBoard."""
    data = gif_bytes(video, fps)
    with Image.open(io.BytesIO(data)) as image:
        width, height = image.size
    return _images(tag, [((height, width), data)], "")


# Sound, numbers, points.


def audio_values(tag: str, audio: Any, sample_rate: int) -> Values:
    """Returns audio as WAV."""
    shape: tuple[int, ...] = getattr(audio, "shape", ())  # the bytes of a file have none
    sound = summary_pb2.Summary.Audio(
        sample_rate=sample_rate,
        num_channels=shape[0] if len(shape) > 1 else 1,
        length_frames=shape[-1] if shape else 0,
        encoded_audio_string=wav_bytes(audio, sample_rate),
        content_type="audio/wav",
    )
    return [summary_pb2.Summary.Value(tag=tag, audio=sound)]


def histogram_values(tag: str, values: Any, bins: int | Sequence[float]) -> Values:
    """Returns a histogram of the finite values."""
    if not isinstance(values, BinnedValues) and values.dtype.kind not in "biuf":
        raise RecordError(f"histogram {tag!r} must be numeric, got dtype {values.dtype}.")
    record = histogram_record(values, bins)
    finite = record["count"] - record["non_finite"]
    mean, std = record["mean"] or 0.0, record["std"] or 0.0
    histogram = summary_pb2.HistogramProto(
        min=record["min"] or 0.0,
        max=record["max"] or 0.0,
        num=finite,
        sum=record["sum"] or 0.0,
        sum_squares=finite * (std * std + mean * mean),
        bucket_limit=record["edges"][1:],
        bucket=record["counts"],
    )
    return [summary_pb2.Summary.Value(tag=tag, histo=histogram)]


def point_cloud_values(tag: str, points: Any, colors: Any) -> Values:
    """Returns point clouds for the mesh plugin; several clouds become one batch."""
    clouds = list(iter_point_clouds(points, colors))
    if not clouds:
        return []
    types = mesh_pb2.MeshPluginData
    parts = [(types.VERTEX, np.stack([cloud for cloud, _ in clouds]).astype(np.float32))]
    shades = [shade for _, shade in clouds if shade is not None]
    if shades:
        parts.append((types.COLOR, np.ascontiguousarray(np.stack(shades)[..., :3])))
    components = mesh_metadata.get_components_bitmask([kind for kind, _ in parts])
    return [
        summary_pb2.Summary.Value(
            tag=mesh_metadata.get_instance_name(tag, kind),
            metadata=mesh_metadata.create_summary_metadata(
                tag, None, kind, components, list(array.shape), json_config="{}"
            ),
            tensor=_array(array),
        )
        for kind, array in parts
    ]


# Text.


def text_value(tag: str, text: str) -> Values:
    """Returns a text, which TensorBoard shows as Markdown."""
    metadata = text_metadata.create_summary_metadata(None, None)
    # A scalar: a list of one text would be shown as a table with one cell.
    tensor = tensor_pb2.TensorProto(
        dtype=types_pb2.DT_STRING, tensor_shape=_shape(()), string_val=[without_surrogates(text).encode()]
    )
    return [summary_pb2.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)]


def table_value(tag: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Values:
    """Returns a table as Markdown with at most `MAX_TABLE_ROWS` rows; a last line counts the omitted ones."""
    lines = [[_cell(column) for column in columns], ["---"] * len(columns)]
    lines += [[_cell(value) for value in row] for row in rows[:MAX_TABLE_ROWS]]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    left_out = len(rows) - MAX_TABLE_ROWS
    return text_value(tag, f"{text}\n\n({left_out:,} more rows)" if left_out > 0 else text)


def _cell(value: Any) -> str:
    text = short(describe(value))
    return text.replace("\\", "\\\\").replace("|", "\\|")


def trace_value(tag: str, value: Any) -> Values:
    """Returns a trace as a block of JSON, with values that JSON lacks as text."""
    lines = as_text(value, indent=1).splitlines()
    return text_value(tag, "".join(f"    {line}\n" for line in lines))


# Hyperparameters.


def session_start_value(hyperparameters: Mapping[str, Any], seconds: float) -> Any:
    """Returns the start of a session for the hparams plugin, with nested names joined by ".".

    It has no `Experiment`, because the plugin applies the first one it finds to all runs, and would hide
    other columns. Without one, the plugin collects the hyperparameters and metrics of all runs itself.
    """
    info = hparams_pb2.SessionStartInfo(start_time_secs=seconds)
    for name, value in flattened(hyperparameters).items():
        field = info.hparams[without_surrogates(name)]
        if isinstance(value, bool):
            field.bool_value = value
        elif isinstance(value, int | float) and math.isfinite(number(value)):
            field.number_value = number(value)
        else:
            field.string_value = without_surrogates(as_text(value))
    return _hparams(hparams_metadata.SESSION_START_INFO_TAG, session_start_info=info)


def session_end_value(status: str, seconds: float) -> Any:
    """Returns the end of a session for the hparams plugin."""
    number_of = {
        "completed": "STATUS_SUCCESS",
        "stopped": "STATUS_SUCCESS",
        "failed": "STATUS_FAILURE",
        "interrupted": "STATUS_FAILURE",
    }
    from tensorboard.plugins.hparams import api_pb2

    info = hparams_pb2.SessionEndInfo(
        status=api_pb2.Status.Value(number_of.get(status, "STATUS_UNKNOWN")), end_time_secs=seconds
    )
    return _hparams(hparams_metadata.SESSION_END_INFO_TAG, session_end_info=info)


def hyperparameter_value(tag: str, hyperparameters: Mapping[str, Any]) -> Values:
    """Returns hyperparameters as a table."""
    return table_value(tag, ["name", "value"], [list(item) for item in flattened(hyperparameters).items()])


def _hparams(tag: str, **content: Any) -> Any:
    metadata = hparams_metadata.create_summary_metadata(hparams_pb2.HParamsPluginData(**content))
    return summary_pb2.Summary.Value(tag=tag, metadata=metadata, tensor=hparams_metadata.NULL_TENSOR)


# Tensors.


def _strings(strings: Sequence[bytes]) -> Any:
    return tensor_pb2.TensorProto(
        dtype=types_pb2.DT_STRING, tensor_shape=_shape((len(strings),)), string_val=strings
    )


def _array(array: Any) -> Any:
    return tensor_pb2.TensorProto(
        dtype=_DATA_TYPES[array.dtype.kind],
        tensor_shape=_shape(array.shape),
        tensor_content=array.tobytes(),
    )


def _shape(sizes: Sequence[int]) -> Any:
    dims = [tensor_shape_pb2.TensorShapeProto.Dim(size=size) for size in sizes]
    return tensor_shape_pb2.TensorShapeProto(dim=dims)
