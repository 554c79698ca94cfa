"""Makes images to log: grids, captions and spectrograms.

Pure functions. Log the result with `log_images(..., channels_last=True)`. To compute it only if it will be
written, pass a function: `logger.log_images(lambda: image_grid(images), channels_last=True)`.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from events import RecordError

from .media import iter_images, rgb_of, to_numpy

__all__ = ["image_grid", "spectrogram", "with_captions"]

Array = np.ndarray[Any, Any]

_WINDOW_SECONDS = 0.032
_FLOOR_DECIBELS = -80.0
_PADDING = 2


def image_grid(
    images: Any,
    *,
    columns: int | None = None,
    max_images: int | None = None,
    tile_size: tuple[int, int] | None = None,
    separator_pixels: int = 2,
    channels_last: bool = False,
) -> Array:
    """Returns images arranged in a grid, as one image.

    ```python
    images = torch.rand(10, 3, 28, 28)
    print(image_grid(images, columns=5).shape)  # (58, 148, 3)
    ```

    Args:
        images: images as for `log_images`: `(N, C, H, W)`, a list, paths, …
        columns: images per row. Default: as square a grid as possible.
        max_images: the maximum number of images; further ones are left out.
        tile_size: height and width of each tile. Images are scaled to fit and padded with black. Default: the
            maximum height and width, without scaling.
        separator_pixels: the width of the black lines between tiles.
        channels_last: as for `log_images`.

    Returns:
        `(H, W, 3)` uint8.

    Raises:
        RecordError: there are no images, a value is not an image, or a number is too small.
    """
    if min(columns or 1, max_images or 1, *(tile_size or (1, 1))) < 1 or separator_pixels < 0:
        raise RecordError(
            "columns, max_images and tile_size must be at least 1, separator_pixels at least 0."
        )
    pixels = [rgb_of(one.array) for one in iter_images(images, channels_last)][:max_images]
    if not pixels:
        raise RecordError("a grid needs at least one image, got none.")
    if tile_size is not None:
        pixels = [_scaled(one, tile_size) for one in pixels]
    height, width = tile_size or (max(one.shape[0] for one in pixels), max(one.shape[1] for one in pixels))
    columns = min(columns or _squarest(len(pixels), height, width), len(pixels))
    rows = math.ceil(len(pixels) / columns)
    gap = separator_pixels
    grid = np.zeros((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), np.uint8)
    for index, one in enumerate(pixels):
        top, left = index // columns * (height + gap), index % columns * (width + gap)
        top, left = top + (height - one.shape[0]) // 2, left + (width - one.shape[1]) // 2
        grid[top : top + one.shape[0], left : left + one.shape[1]] = one
    return grid


def with_captions(
    images: Any, captions: Sequence[str], *, font_pixels: int = 12, channels_last: bool = False
) -> list[Array]:
    """Returns images with a caption below each, white on black, wrapped to the width of the image.

    ```python
    captions = ["a cat", "a dog"]
    logger.log_images(with_captions(torch.rand(2, 3, 64, 64), captions), name="pets", channels_last=True)
    ```

    Args:
        images: images as for `log_images`.
        captions: one per image; an empty caption leaves its image unchanged.
        font_pixels: the font size.
        channels_last: as for `log_images`.

    Returns:
        A list of `(H, W, 3)` uint8, one for each image.

    Raises:
        RecordError: the number of captions differs, or a value is not an image.
    """
    pixels = [rgb_of(one.array) for one in iter_images(images, channels_last)]
    if isinstance(captions, str) or len(captions) != len(pixels):
        raise RecordError(f"{len(pixels)} images need a list of as many captions, got {captions!r:.80}.")
    font = ImageFont.load_default(font_pixels)
    return [_captioned(one, str(text), font) for one, text in zip(pixels, captions, strict=True)]


def spectrogram(audio: Any, sample_rate: int, *, window_seconds: float = _WINDOW_SECONDS) -> Array:
    """Returns the spectrogram of audio as a grey image: time to the right, high frequencies on top.

    ```python
    logger.log_images(spectrogram(torch.randn(16_000), sample_rate=16_000), name="voice", channels_last=True)
    ```

    Shows the power of a short-time Fourier transform with a Hann window and 50 % overlap, in decibels
    relative to the maximum; -80 dB and less is black. J. O. Smith, Spectral Audio Signal Processing, 2011.

    Args:
        audio: `(samples,)` or `(channels, samples)`; channels are averaged.
        sample_rate: samples per second.
        window_seconds: the length of the window, rounded up to a power of two of samples.

    Returns:
        `(frequencies, times)` uint8.

    Raises:
        RecordError: there are no samples, or rate or window is not positive.
    """
    samples = np.nan_to_num(to_numpy(audio).astype(np.float64), posinf=0.0, neginf=0.0)
    if samples.ndim == 2:  # noqa: PLR2004  # channels and samples
        samples = samples.mean(axis=0)
    if samples.ndim != 1 or not samples.size:
        raise RecordError(
            f"audio must have shape (samples,) or (channels, samples), got {tuple(samples.shape)}."
        )
    if sample_rate <= 0 or not window_seconds > 0:
        raise RecordError(
            f"sample rate and window must be positive, got {sample_rate} per second and {window_seconds} s."
        )
    size = max(2 ** math.ceil(math.log2(max(sample_rate * window_seconds, 2))), 2)
    samples = np.pad(samples, (0, max(size - samples.size, 0)))
    frames = np.lib.stride_tricks.sliding_window_view(samples, size)[:: size // 2]
    power = np.abs(np.fft.rfft(frames * np.hanning(size), axis=1)) ** 2
    loudest = power.max()
    if not loudest:
        return np.zeros(power.T.shape, np.uint8)
    decibels = 10 * np.log10(np.maximum(power / loudest, 10 ** (_FLOOR_DECIBELS / 10)))
    grey = np.round((1 - decibels / _FLOOR_DECIBELS) * 255).astype(np.uint8)
    return np.ascontiguousarray(grey.T[::-1])


def _scaled(pixels: Array, size: tuple[int, int]) -> Array:
    scale = min(size[0] / pixels.shape[0], size[1] / pixels.shape[1])
    height, width = (max(round(side * scale), 1) for side in pixels.shape[:2])
    image = Image.fromarray(np.ascontiguousarray(pixels))
    return np.asarray(
        image.resize((width, height), Image.Resampling.BOX if scale < 1 else Image.Resampling.BILINEAR)
    )


def _squarest(count: int, height: int, width: int) -> int:
    """Returns the number of columns that minimises the longer side of the grid."""
    return min(
        range(1, count + 1), key=lambda columns: max(math.ceil(count / columns) * height, columns * width)
    )


def _captioned(pixels: Array, text: str, font: Any) -> Array:
    if not text:
        return pixels
    width = pixels.shape[1]
    lines = [
        line for paragraph in text.splitlines() for line in _wrapped(paragraph, font, width - 2 * _PADDING)
    ]
    block = "\n".join(lines)
    image = Image.new("RGB", (width, 1))
    _, top, _, bottom = ImageDraw.Draw(image).multiline_textbbox((0, 0), block, font=font)
    strip = Image.new("RGB", (width, math.ceil(bottom - min(top, 0)) + 2 * _PADDING))
    ImageDraw.Draw(strip).multiline_text(
        (width / 2, _PADDING), block, fill=(255, 255, 255), font=font, anchor="ma", align="center"
    )
    return np.concatenate([pixels, np.asarray(strip)])


def _wrapped(text: str, font: Any, width: float) -> list[str]:
    """Wraps text to a width, between words, or within words that are too long."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if font.getlength(longer) <= width:
            lines[-1] = longer
            continue
        if lines[-1]:
            lines.append("")
        for letter in word:
            if lines[-1] and font.getlength(lines[-1] + letter) > width:
                lines.append("")
            lines[-1] += letter
    return lines
