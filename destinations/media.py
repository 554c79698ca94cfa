"""Encodes arrays as PNG, WAV, MP4, GIF and PLY, and computes histograms.

Pure functions over numpy arrays. They also accept tensors of any library with `detach().cpu().numpy()`,
including bfloat16, without importing torch. Arguments are neither kept nor changed.

**Scaling of pixels**, for each image on its own:

| values | result |
|---|---|
| uint8 | unchanged |
| bool | 0 and 255 |
| float | clipped to [0, 1] with a warning once per process, times 255, rounded; NaN becomes 0 |
| integers in [0, 255] | unchanged |
| other integers | scaled linearly from min and max to 0 and 255; see `Pixels.value_range` |
"""

import io
import logging
import threading
import wave
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

import attrs
import numpy as np
from PIL import Image

from events import BinnedValues, RecordError
from uploads import needs_package

__all__ = [
    "Pixels",
    "class_color",
    "copy_value",
    "gif_bytes",
    "histogram_record",
    "iter_images",
    "iter_masks",
    "iter_point_clouds",
    "mask_png",
    "mp4_bytes",
    "overlay_png",
    "picture_array",
    "ply_bytes",
    "png_bytes",
    "rgb_of",
    "to_numpy",
    "video_file",
    "wav_bytes",
]

Array = np.ndarray[Any, Any]
_log = logging.getLogger("destinations")

# Whether this process has warned that floats are clipped.
_has_said_clipping = threading.Event()
# Whether it has warned that four grey pictures without a channel axis are read as one RGBA picture.
_has_said_opacity = threading.Event()

_CHANNELS = (1, 3, 4)
# Browsers replace shorter durations by 100 ms.
_MIN_MILLISECONDS = 20
_INT16_MAX = 32767
_UINT16_MAX = 65535
_OVERLAY_SHARE = 0.5
_VIDEO_SUFFIXES = {b"\x1aE\xdf\xa3": ".webm", b"GIF8": ".gif", b"OggS": ".ogg", b"RIFF": ".avi"}


@attrs.frozen(eq=False)
class Pixels:
    """An image as uint8 `(H, W)`, `(H, W, 3)` or `(H, W, 4)`.

    Attributes:
        array: the pixels.
        shape: the original shape of the image.
        value_range: the values mapped to 0 and 255, if integers were scaled.
    """

    array: Array
    shape: tuple[int, ...]
    value_range: tuple[float, float] | None = None


def to_numpy(value: Any) -> Array:
    """Returns an array or tensor as a numpy array, without a copy if possible; bfloat16 as float32."""
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        value = value.detach().cpu()
        if str(value.dtype).startswith(("torch.bfloat16", "torch.float8")):
            value = value.float()
        if getattr(value, "is_sparse", False):
            value = value.to_dense()
        return np.asarray(value.resolve_conj().resolve_neg().numpy())
    array = np.asarray(value)
    # jax has 8-bit and 16-bit float types that numpy lacks.
    return array.astype(np.float32) if array.dtype.kind == "V" and array.dtype.names is None else array


def copy_value(value: Any) -> Any:
    """Returns an independent copy: numpy for arrays and tensors, the content for paths.

    Raises:
        RecordError: the file does not exist, or the value is not an array, image or file.
    """
    try:
        return _copied(value)
    except FileNotFoundError as error:
        raise RecordError(f"media file {error.filename!r} does not exist.") from error
    except (TypeError, ValueError) as error:
        raise RecordError(f"media must be an array, an image or a file: {error}.") from error


def _copied(value: Any) -> Any:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str | PurePath):
        return Path(value).read_bytes()
    if isinstance(value, list | tuple):
        return [_copied(item) for item in value]
    if isinstance(value, Image.Image):
        return value.copy()
    return np.array(to_numpy(value), copy=True)


# Images.


def iter_images(images: Any, channels_last: bool = False) -> Iterator[Pixels]:
    """Yields each image of a logged value.

    Args:
        images: `(H, W)`, `(C, H, W)` or `(N, C, H, W)`, or with `channels_last` `(H, W, C)` or `(N, H, W,
            C)`; PIL images; the bytes of image files; or a list of any of these.
        channels_last: whether the channels are the last axis.

    Raises:
        RecordError: a value is not an image.
    """
    if isinstance(images, list | tuple):
        for image in images:
            yield from iter_images(image, channels_last)
        return
    if isinstance(images, bytes | str | PurePath):
        yield _decoded(images)
        return
    if isinstance(images, Image.Image):
        yield _pixels(picture_array(images), channels_last=True)
        return
    array = to_numpy(images)
    if array.ndim == 4:  # noqa: PLR2004  # a batch
        for one in array:
            yield _pixels(one, channels_last)
    else:
        yield _pixels(array, channels_last)


def picture_array(picture: Image.Image) -> Array:
    """Returns the values of a Pillow image, `(H, W)` or `(H, W, C)` with 3 or 4 channels.

    Grey values keep the type of their mode: bool, uint8, or 16-bit or 32-bit numbers. Palettes, opacity and
    other colour spaces become RGBA.

    Raises:
        RecordError: the image is damaged, or Pillow can't convert its colours.
    """
    is_grey = picture.mode in {"1", "I", "F"} or picture.mode.startswith("I;16")
    is_plain = picture.mode in {"L", "RGB"} and not picture.has_transparency_data
    try:
        return np.asarray(picture if is_grey or is_plain else picture.convert("RGBA"))
    except (OSError, ValueError) as error:
        raise RecordError(f"image must be readable by Pillow: {error}.") from error


def _decoded(source: bytes | str | PurePath) -> Pixels:
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            return _pixels(picture_array(image), channels_last=True)
    except OSError as error:
        raise RecordError(f"image must be readable by Pillow: {error}.") from error


def _pixels(array: Array, channels_last: bool) -> Pixels:
    shape = tuple(array.shape)
    if array.ndim == 3:  # noqa: PLR2004  # one image with channels
        array = array if channels_last else np.moveaxis(array, 0, -1)
        if not channels_last and array.shape[-1] == 4 and not _has_said_opacity.is_set():  # noqa: PLR2004
            _has_said_opacity.set()
            _log.warning(
                "an image of shape %s is one picture with opacity (RGBA). Four grey pictures have the shape "
                "(4, 1, %d, %d). Said once.",
                shape,
                *shape[1:],
            )
        if array.shape[-1] == 1:
            array = array[..., 0]
    has_channels = array.ndim == 3  # noqa: PLR2004  # rows, columns, channels
    if array.ndim not in {2, 3} or 0 in array.shape or (has_channels and array.shape[-1] not in _CHANNELS):
        raise RecordError(f"image must have shape (H, W) or 1, 3 or 4 channels, got {shape}.")
    pixels, value_range = _to_uint8(array)
    return Pixels(pixels, shape, value_range)


def _to_uint8(array: Array) -> tuple[Array, tuple[float, float] | None]:
    if array.dtype == np.uint8:
        return array, None
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255, None
    if array.dtype.kind not in "iuf":
        raise RecordError(f"image must hold numbers, got dtype {array.dtype}.")
    if array.dtype.kind == "f":
        # Comparisons with NaN are False.
        if not _has_said_clipping.is_set() and ((array < 0) | (array > 1)).any():
            _has_said_clipping.set()
            _log.warning(
                "pixels must be floats in [0, 1], got some from %.4g to %.4g: they are clipped. Scale them "
                "first, or log uint8. Said once.",
                np.nanmin(array),
                np.nanmax(array),
            )
        unit = np.clip(np.nan_to_num(array.astype(np.float64), nan=0.0), 0.0, 1.0)
        return np.round(unit * 255.0).astype(np.uint8), None
    low, high = int(array.min()), int(array.max())
    if low >= 0 and high <= 255:  # noqa: PLR2004  # the range of uint8
        return array.astype(np.uint8), None
    scaled = (array.astype(np.float64) - low) / max(1, high - low)
    return np.round(np.clip(scaled, 0.0, 1.0) * 255.0).astype(np.uint8), (float(low), float(high))


def rgb_of(pixels: Array) -> Array:
    """Returns the pixels of an image as `(H, W, 3)`, without opacity."""
    return np.repeat(pixels[..., None], 3, axis=-1) if pixels.ndim == 2 else pixels[..., :3]  # noqa: PLR2004


def png_bytes(pixels: Array) -> bytes:
    """Returns uint8 `(H, W)`, `(H, W, 3)` or `(H, W, 4)` as PNG."""
    return _png(Image.fromarray(np.ascontiguousarray(pixels)))


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=3)
    return buffer.getvalue()


# Masks.


# A type of its own, because a mask of int8 can't hold 255.
_IGNORED = np.int32(255)


def iter_masks(masks: Any) -> Iterator[Array]:
    """Yields each mask as uint16 `(H, W)`.

    Args:
        masks: class indices `(H, W)` or `(N, H, W)`, or a list of these; integers, bools or integral floats.
            Some libraries mark ignored pixels with -1, others with 255; -1 becomes 255.

    Raises:
        RecordError: the values are not class indices.
    """
    if isinstance(masks, list | tuple):
        for mask in masks:
            yield from iter_masks(mask)
        return
    array = to_numpy(masks)
    if array.dtype.kind == "f" and not (np.isfinite(array).all() and (array == np.round(array)).all()):
        raise RecordError(
            "mask must hold class indices, got fractions. Write mask.argmax(...) or mask > 0.5."
        )
    if array.dtype.kind in "if" and array.size and array.min() == -1:
        array = np.where(array == -1, _IGNORED, array)
    if array.dtype.kind not in "biuf" or (array.size and not 0 <= array.min() <= array.max() <= _UINT16_MAX):
        raise RecordError(f"mask must hold class indices from 0 to 65535, got dtype {array.dtype} or others.")
    whole = array.astype(np.uint16)
    yield from [whole] if whole.ndim == 2 else whole  # noqa: PLR2004  # rows and columns


def _palette() -> Array:
    """Returns 256 colours; consecutive ones differ strongly, and 0 is black."""
    hues = (np.arange(256) * 0.618033988749895) % 1.0
    sectors = np.array([0.0, 4.0, 2.0]) / 6.0
    colors = np.clip(np.abs(((hues[:, None] + sectors) % 1.0) * 6.0 - 3.0) - 1.0, 0.0, 1.0)
    palette = np.round(colors * 255).astype(np.uint8)
    palette[0] = 0
    return palette


def class_color(index: int) -> str:
    """Returns the colour of a class in masks and overlays, such as "#00ff9f"."""
    red, green, blue = _palette()[index % 256]
    return f"#{red:02x}{green:02x}{blue:02x}"


def mask_png(mask: Array) -> bytes:
    """Returns a mask as a PNG of class indices: with a palette up to 255, or else 16-bit grey."""
    if mask.size and int(mask.max()) > 255:  # noqa: PLR2004  # indices of a palette are bytes
        return _png(Image.fromarray(mask.astype(np.uint16)))
    height, width = mask.shape
    indexed = Image.frombytes("P", (width, height), mask.astype(np.uint8).tobytes())
    indexed.putpalette(_palette().tobytes())
    return _png(indexed)


def overlay_png(pixels: Array, mask: Array) -> bytes:
    """Returns an image blended with the colours of a mask, half and half; class 0 is transparent."""
    rgb = rgb_of(pixels)
    colors = _palette()[mask % 256]
    mixed = np.round(rgb * (1 - _OVERLAY_SHARE) + colors * _OVERLAY_SHARE).astype(np.uint8)
    return png_bytes(np.where((mask > 0)[..., None], mixed, rgb))


# Sound and video.


def wav_bytes(audio: Any, sample_rate: int) -> bytes:
    """Returns audio as WAV with 16-bit samples.

    Args:
        audio: `(samples,)` or `(channels, samples)`: float in [-1, 1] (clipped; NaN is silence), int16, or
            int32, uint8 and bool, scaled from their full range. The bytes of a file are returned unchanged.
        sample_rate: samples per second.

    Raises:
        RecordError: unsupported type.
    """
    if isinstance(audio, bytes):
        return audio
    array = to_numpy(audio)
    array = array[None] if array.ndim == 1 else array
    kind = array.dtype
    if kind == np.int16:
        samples = array
    elif kind == np.int32:
        samples = (array >> 16).astype(np.int16)
    elif kind == np.uint8:
        samples = (array.astype(np.int16) - 128) << 8
    elif kind.kind == "f" or kind == np.bool_:
        unit = np.clip(np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=1.0, neginf=-1.0), -1.0, 1.0)
        samples = np.round(unit * _INT16_MAX).astype(np.int16)
    else:
        raise RecordError(f"audio must be float in [-1, 1], int16, int32 or uint8, got dtype {kind}.")
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(samples.shape[0])
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes(np.ascontiguousarray(samples.T).astype("<i2").tobytes())
    return buffer.getvalue()


def video_file(video: Any, fps: float | None, video_format: str = "mp4") -> tuple[bytes, str]:
    """Returns a video as the bytes of a file, and the suffix of the file, such as ".mp4".

    Args:
        video: frames `(T, C, H, W)`, or the bytes of a file, which are returned unchanged.
        fps: frames per second, for frames. Default: 1.
        video_format: the format for frames, "mp4" or "gif".

    Raises:
        ImportError: PyAV is needed but not installed.
    """
    if isinstance(video, bytes):
        return video, _VIDEO_SUFFIXES.get(video[:4], ".mp4")
    encode = gif_bytes if video_format == "gif" else mp4_bytes
    return encode(video, fps or 1.0), f".{video_format}"


def mp4_bytes(frames: Any, fps: float) -> bytes:
    """Encodes frames as MP4 (H.264, 4:2:0); odd sizes are padded with the last row or column.

    Args:
        frames: `(T, C, H, W)` with 1, 3 or 4 channels, scaled like one image.
        fps: frames per second.

    Raises:
        ImportError: PyAV is missing.
    """
    from fractions import Fraction

    with needs_package("encoding video frames", "av", note=". Encoded bytes and paths need no package"):
        import av
    pixels = _frames(frames)
    pixels = np.repeat(pixels, 3, axis=-1) if pixels.shape[-1] == 1 else pixels
    height, width = pixels.shape[1:3]
    pixels = np.pad(pixels, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
        stream: Any = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
        stream.width, stream.height, stream.pix_fmt = pixels.shape[2], pixels.shape[1], "yuv420p"
        for frame in pixels:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return buffer.getvalue()


def gif_bytes(video: Any, fps: float | None) -> bytes:
    """Encodes a video as GIF.

    Args:
        video: frames `(T, C, H, W)` with 1, 3 or 4 channels, scaled like one image; or the bytes of a file.
            A GIF is returned unchanged; PyAV decodes other formats.
        fps: frames per second, for frames.

    Raises:
        ImportError: PyAV is needed but not installed.
        RecordError: invalid video.
    """
    if isinstance(video, bytes):
        if video.startswith(b"GIF8"):
            return video
        video, fps = _decoded_video(video)
    pixels = _frames(video)
    pixels = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
    frames = [Image.fromarray(np.ascontiguousarray(frame)) for frame in pixels]
    buffer = io.BytesIO()
    duration = max(_MIN_MILLISECONDS, round(1000 / (fps or 1.0)))
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=duration, loop=0)
    return buffer.getvalue()


def _frames(video: Any) -> Array:
    """Returns frames `(T, C, H, W)` as uint8 `(T, H, W, C)` with 1 or 3 channels, all scaled alike."""
    return np.moveaxis(_to_uint8(to_numpy(video))[0], 1, -1)[..., :3]


def _decoded_video(data: bytes) -> tuple[Any, float]:
    """Decodes a video; returns its frames and frame rate."""
    with needs_package("encoded video other than GIF", "av"):
        import av
    try:
        with av.open(io.BytesIO(data), "r") as container:
            stream = container.streams.video[0]
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
            rate = float(stream.average_rate or 1)
    except (av.FFmpegError, IndexError) as error:
        raise RecordError(f"PyAV cannot read the video: {error}.") from error
    return np.moveaxis(np.stack(frames), -1, 1), rate


# Numbers and points.


def histogram_record(values: Any, bins: "int | Sequence[float]" = 64) -> dict[str, Any]:
    """Returns counts, edges and moments of the finite values; non-finite values are only counted.

    Args:
        values: numbers of any shape, or `BinnedValues`, whose record is returned unchanged.
        bins: the number of equally wide bins between min and max, or increasing edges. The last bin includes
            its right edge.
    """
    if isinstance(values, BinnedValues):
        return values.record()
    flat = to_numpy(values).reshape(-1)
    is_wide_float = flat.dtype.kind == "f" and flat.dtype.itemsize >= 4  # noqa: PLR2004  # float32 or more
    flat = flat if is_wide_float else flat.astype(np.float64)
    finite = flat[np.isfinite(flat)]
    record: dict[str, Any] = {"count": int(flat.size), "non_finite": int(flat.size - finite.size)}
    if not finite.size:
        return record | {"counts": [], "edges": []} | dict.fromkeys(("min", "max", "mean", "std", "sum"))
    counts, edges = np.histogram(finite, bins=bins if isinstance(bins, int) else np.asarray(bins, np.float64))
    return {
        **record,
        "counts": counts.tolist(),
        "edges": edges.astype(np.float64).tolist(),
        "min": float(finite.min()),
        "max": float(finite.max()),
        "mean": float(finite.mean(dtype=np.float64)),
        "std": float(finite.std(dtype=np.float64)),
        "sum": float(finite.sum(dtype=np.float64)),
    }


def iter_point_clouds(points: Any, colors: Any = None) -> Iterator[tuple[Array, Array | None]]:
    """Yields each point cloud of `(N, 3)` or `(B, N, 3)` with its colours, as uint8, or None."""
    positions = to_numpy(points)
    shades = None if colors is None else _to_uint8(to_numpy(colors))[0]
    if positions.ndim == 2:  # noqa: PLR2004  # one cloud
        yield positions, shades
        return
    for index, cloud in enumerate(positions):
        yield cloud, None if shades is None else shades[index]


def ply_bytes(points: Array, colors: Array | None = None) -> bytes:
    """Returns points as a binary PLY with float32 x, y, z and uint8 colours.

    G. Turk, The PLY Polygon File Format, 1994.

    Args:
        points: `(N, 3)`.
        colors: `(N, 3)` or `(N, 4)` uint8: red, green, blue and opacity.
    """
    names = ("red", "green", "blue", "alpha")[: 0 if colors is None else colors.shape[1]]
    fields = [(axis, "<f4") for axis in "xyz"] + [(name, "u1") for name in names]
    vertices = np.empty(len(points), dtype=fields)
    for index, axis in enumerate("xyz"):
        vertices[axis] = points[:, index]
    for index, name in enumerate(names):
        vertices[name] = colors[:, index] if colors is not None else 0
    header = ["ply", "format binary_little_endian 1.0", f"element vertex {len(points)}"]
    header += [f"property float {axis}" for axis in "xyz"] + [f"property uchar {name}" for name in names]
    return ("\n".join([*header, "end_header"]) + "\n").encode() + vertices.tobytes()
