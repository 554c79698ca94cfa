"""Videos as animated GIF, the one moving picture that TensorBoard shows."""

import io
from typing import Any

import numpy as np
from PIL import Image

from destinations.media import images_of, to_numpy
from events import RecordError

__all__ = ["gif_bytes"]

# Browsers take shorter times for a tenth of a second.
_LEAST_MILLISECONDS = 20


def gif_bytes(video: Any, fps: float | None) -> bytes:
    """Returns a video as GIF.

    Args:
        video: frames `(T, C, H, W)` with 1, 3 or 4 channels, pixels scaled by the range of the whole video; or the bytes of a
            file: GIF as it is, anything else decoded by PyAV.
        fps: frames per second, for frames.

    Raises:
        ImportError: the bytes are no GIF, and PyAV is missing.
        RecordError: it is no video.
    """
    if isinstance(video, bytes):
        if video.startswith(b"GIF8"):
            return video
        video, fps = _decoded(video)
    array = to_numpy(video)
    if array.ndim != 4 or 0 in array.shape:  # noqa: PLR2004  # time, channels, rows, columns
        raise RecordError(f"video must have shape (T, C, H, W), got {tuple(array.shape)}.")
    count, channels, height, width = array.shape
    # All frames as one tall image: they are scaled alike.
    tall = next(images_of(np.moveaxis(array, 1, 0).reshape(channels, count * height, width))).array
    frames = [Image.fromarray(frame) for frame in tall.reshape(count, height, *tall.shape[1:])]
    frames = [frame.convert("RGB") if frame.mode == "RGBA" else frame for frame in frames]
    buffer = io.BytesIO()
    duration = max(_LEAST_MILLISECONDS, round(1000 / (fps or 1.0)))
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=duration, loop=0)
    return buffer.getvalue()


def _decoded(data: bytes) -> tuple[Any, float]:
    """Returns the frames of an encoded video, and its rate."""
    try:
        import av
    except ImportError as error:
        raise ImportError(
            "video bytes must be GIF, or decoded by PyAV, got no package 'av'. "
            'Install it: pip install "training-destinations[video]".',
            name="av",
        ) from error
    try:
        with av.open(io.BytesIO(data), "r") as container:
            stream = container.streams.video[0]
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
            rate = float(stream.average_rate or 1)
    except (av.FFmpegError, IndexError) as error:
        raise RecordError(
            f"video must be a file that PyAV can read, got one that it cannot: {error}."
        ) from error
    return np.moveaxis(np.stack(frames), -1, 1), rate
