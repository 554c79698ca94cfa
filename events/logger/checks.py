"""Checks records other than metrics in the call that logs them, before any destination gets them.

The checks look at types and shapes, never at the values of arrays. A check takes microseconds and doesn't
wait for a device. It reads the first bytes of an image file. Each check raises `RecordError`; `valid_images`
and `valid_table` leave out invalid items.
"""

import itertools
import math
import stat
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path, PurePath
from typing import Any

from events.errors import RecordError
from events.redaction import redact_text

from .converters import as_picture, safe_text
from .values import BinnedValues, map_nested, short_repr

__all__ = [
    "check_audio",
    "check_file",
    "check_histogram",
    "check_point_cloud",
    "check_text",
    "check_traces",
    "check_video",
    "unreadable",
    "valid_caption",
    "valid_images",
    "valid_table",
]

Refuse = Callable[[str, Exception], None]
"""Takes the name and the error of a value that is left out."""

_CHANNELS = (1, 3, 4)
_MAX_AUDIO_CHANNELS = 64
_MAX_BINS = 100_000


def valid_table(columns: Any, rows: Any, name: str, refuse: Refuse) -> tuple[list[str], list[Any]]:
    """Returns columns, and the rows that have a value for each; other rows are refused one by one.

    A column name that isn't a string becomes its text.
    """
    if not _is_list(columns):
        raise RecordError(
            f"table {name!r} must have a list of strings as its columns, got {short_repr(columns, 80)}."
        )
    columns = list(columns)
    if not all(isinstance(column, str) for column in columns):
        text = f"table {name!r} must have strings as its columns, got {short_repr(columns, 80)}."
        refuse(name, RecordError(text))
        columns = [column if isinstance(column, str) else safe_text(column) for column in columns]
    if not _is_list(rows):
        # The check would consume a generator.
        raise RecordError(
            f"table {name!r} must have a list of rows, got {type(rows).__name__}. Write list(...)."
        )
    valid = []
    for index, row in enumerate(rows):
        if not _is_list(row):
            text = f"table {name!r} must have a list for each row, got {short_repr(row, 80)} as row {index}."
        elif len(row) != len(columns):
            text = (
                f"table {name!r} must have {len(columns)} values in each row, got {len(row)} in row {index}. "
                f"The columns are {', '.join(columns)}."
            )
        else:
            valid.append(row)
            continue
        refuse(name, RecordError(text))
    if len(rows) and not valid:
        raise RecordError(f"table {name!r} must have a valid row, got {len(rows)} invalid ones.")
    return columns, valid


def valid_images(
    images: Any, name: str, channels_last: bool, masks: Any, captions: Any, refuse: Refuse
) -> tuple[Any, dict[str, Any] | None, list[str] | None]:
    """Returns the valid images of a list, their masks, and their captions.

    Other images and masks are refused one by one; captions together.
    """
    what = f"images {name!r}"
    is_list = isinstance(images, list | tuple) and bool(images)
    valid: list[Any] = []
    # Of each image; None for one that is left out.
    sizes: list[tuple[int, int] | None] = []
    for index, given in enumerate(images if is_list else [images]):
        try:
            image = map_nested(as_picture, given)  # the picture of a figure
            of = f"image {index} of {what}" if is_list else what
            sizes += _image_sizes(image, of, channels_last=channels_last)
        except RecordError as error:
            if not is_list or len(images) == 1:
                raise
            refuse(name, error)
            sizes.append(None)
        else:
            valid.append(image)
    if not valid:
        raise RecordError(f"{what} must have at least one valid image, got {len(images)} invalid ones.")
    captions = _valid_captions(captions, name, sizes, refuse)
    return valid if is_list else valid[0], _valid_masks(masks, name, sizes, refuse), captions


def _valid_captions(
    captions: Any, name: str, sizes: Sequence[tuple[int, int] | None], refuse: Refuse
) -> list[str] | None:
    """Returns a caption for each image that is not left out; "" for none."""
    if captions is None:
        return None
    given = [captions] if isinstance(captions, str) else captions
    if not _is_list(given) or len(given) != len(sizes):
        got = f"{len(given)}" if _is_list(given) else short_repr(captions, 80)
        text = f"images {name!r} must have a list of {len(sizes)} captions, one for each image, got {got}."
        refuse(name, RecordError(text))
        return None
    kept = [valid_caption(one, name, refuse) for one, size in zip(given, sizes, strict=True) if size]
    return [one or "" for one in kept] if any(kept) else None


def valid_caption(caption: Any, name: str, refuse: Refuse) -> str | None:
    """Returns a caption without its secrets, and None for one that is not a string, which is refused."""
    if caption is None or isinstance(caption, str):
        return caption and redact_text(caption)
    refuse(name, RecordError(f"caption of {name!r} must be a string, got {short_repr(caption, 80)}."))
    return None


def _valid_masks(
    masks: Any, name: str, sizes: Sequence[tuple[int, int] | None], refuse: Refuse
) -> dict[str, Any] | None:
    """Returns the masks that fit, for the images that are not left out."""
    if masks is None:
        return None
    if not isinstance(masks, Mapping):
        text = f"masks of {name!r} must be a dict from mask name to mask, got {type(masks).__name__}."
        refuse(name, RecordError(text))
        return None
    valid = {}
    for mask_name, given in masks.items():
        try:
            mask = _without_channel(given)
            _check_mask(mask, f"mask {mask_name!r} of {name!r}", sizes)
            are_all = None not in sizes
            valid[mask_name] = (
                mask if are_all else [one for one, size in zip(mask, sizes, strict=True) if size]
            )
        except RecordError as error:
            refuse(name, error)
        except Exception as error:  # noqa: BLE001  # methods of a value that only looks like an array
            text = f"mask {safe_text(mask_name)!r} of {name!r} cannot be read: {error!r:.200}."
            refuse(name, RecordError(text))
    return valid or None


def _without_channel(mask: Any) -> Any:
    """Returns masks `(N, 1, H, W)` as `(N, H, W)`; others as they are."""
    shape = None if isinstance(mask, list | tuple) else _shape(mask)
    return mask[:, 0] if shape is not None and len(shape) == 4 and shape[1] == 1 else mask  # noqa: PLR2004


def _image_sizes(images: Any, what: str, *, channels_last: bool) -> list[tuple[int, int]]:
    """Returns height and width of each image."""
    if isinstance(images, list | tuple):
        if not images:
            raise RecordError(f"{what} must have at least one image, got an empty {type(images).__name__}.")
        return [
            size
            for index, image in enumerate(images)
            for size in _image_sizes(image, f"image {index} of {what}", channels_last=channels_last)
        ]
    if isinstance(images, str | PurePath):
        return [_size_of_file(images, what)]
    shape = _shape(images)
    if shape is None:
        if hasattr(images, "getbands"):  # PIL has (width, height).
            return [(images.size[1], images.size[0])]
        raise RecordError(
            f"{what} must be arrays, tensors, PIL images or paths, got {type(images).__name__}. "
            "Of figures, only matplotlib's are drawn; log others as arrays of their pixels."
        )
    return _array_sizes(shape, what, channels_last=channels_last)


def _size_of_file(path: Any, what: str) -> tuple[int, int]:
    """Returns height and width of an image file; reads only its first bytes."""
    import PIL.Image

    check_file(path, what)
    try:
        with PIL.Image.open(path) as image:
            return image.height, image.width
    except Exception as error:  # what a decoder makes of foreign bytes
        reason = str(error) or type(error).__name__
        raise RecordError(f"{what} must be a file that Pillow can read: {reason}.") from error


def _array_sizes(shape: tuple[int, ...], what: str, *, channels_last: bool) -> list[tuple[int, int]]:
    layout = "(N, H, W, C)" if channels_last else "(N, C, H, W)"
    if len(shape) not in {2, 3, 4} or 0 in shape:
        raise RecordError(
            f"{what} must have shape (H, W), {layout[:1]}{layout[4:]} or {layout}, got {shape}."
        )
    if len(shape) == 2:  # noqa: PLR2004  # rows and columns
        return [(shape[0], shape[1])]
    *batch, first, second, third = shape
    channels, height, width = (third, first, second) if channels_last else (first, second, third)
    if channels not in _CHANNELS:
        other = first if channels_last else third
        hint = (
            f"Pass channels_last={not channels_last}."
            if other in _CHANNELS
            else "Give a batch of grey images a channel of size 1."
        )
        raise RecordError(
            f"{what} must have 1, 3 or 4 channels in {layout}, got {channels} in shape {shape}. {hint}"
        )
    return [(height, width)] * math.prod(batch)


def _check_mask(mask: Any, what: str, sizes: Sequence[tuple[int, int] | None]) -> None:
    masks = list(mask) if isinstance(mask, list | tuple) else [mask]
    shapes: list[tuple[int, ...]] = []
    for one in masks:
        shape = _require_shape(one, f"{what} must have shape (H, W) or (N, H, W)", {2, 3})
        shapes += [shape] if len(shape) == 2 else [shape[1:]] * shape[0]  # noqa: PLR2004  # rows and columns
    if len(shapes) != len(sizes):
        raise RecordError(f"{what} must have one mask for each of {len(sizes)} images, got {len(shapes)}.")
    for index, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
        if size is not None and shape != size:
            raise RecordError(
                f"{what} must have the size of its image {size}, got {shape} for image {index}."
            )
    if any(map(_has_fractions, masks)):
        raise RecordError(
            f"{what} must hold class indices, got fractions. Write mask.argmax(...) or mask > 0.5."
        )


def _has_fractions(mask: Any) -> bool:
    """Returns whether a mask in host memory has values that are no integers; one on a device is not read."""
    if not getattr(mask, "is_cpu", True):
        return False
    is_float = getattr(mask, "is_floating_point", None)
    if is_float() if callable(is_float) else getattr(getattr(mask, "dtype", None), "kind", "") == "f":
        # Of NaN and infinities too.
        return bool((mask % 1 != 0).any())
    return False


def check_text(text: Any, name: str) -> None:
    """Checks that a text is a string."""
    if not isinstance(text, str):
        raise RecordError(f"text {name!r} must be a string, got {type(text).__name__}. Write str(...).")


def check_audio(audio: Any, sample_rate: Any, name: str) -> None:
    """Checks that audio has shape (samples,) or (channels, samples), with few channels, and a sample rate."""
    if not _is_number(sample_rate, Integral) or sample_rate <= 0:
        raise RecordError(
            f"audio {name!r} must have a sample rate of at least 1 Hz, got {short_repr(sample_rate)}."
        )
    if _is_encoded(audio, f"audio {name!r}"):
        return
    needed = (
        f"audio {name!r} must have shape (samples,) or (channels, samples), with up to {_MAX_AUDIO_CHANNELS} "
        "channels"
    )
    _require_shape(audio, needed, {1, 2}, lambda shape: len(shape) == 1 or shape[0] <= _MAX_AUDIO_CHANNELS)


def _is_encoded(value: Any, what: str) -> bool:
    """Returns whether a value is a path or bytes, and no array; refuses paths as `check_file` does."""
    if isinstance(value, str | PurePath):
        check_file(value, what)
    return isinstance(value, str | bytes | PurePath)


def check_video(video: Any, fps: Any, name: str, video_format: Any = "mp4") -> None:
    """Checks that frames have shape (T, C, H, W), a frame rate, and a format to encode them in."""
    if video_format not in {"mp4", "gif"}:
        raise RecordError(
            f'video {name!r} must have the format "mp4" or "gif", got {short_repr(video_format)}.'
        )
    if _is_encoded(video, f"video {name!r}"):
        return
    needed = f"video {name!r} must be frames (T, C, H, W) with 1, 3 or 4 channels, encoded bytes or a path"
    _require_shape(video, needed, {4}, lambda shape: shape[1] in _CHANNELS)
    if not _is_number(fps, Real) or not 0 < fps < math.inf:
        raise RecordError(
            f"video {name!r} must have frames per second, got fps={short_repr(fps)}. Write fps=30."
        )


def check_histogram(values: Any, bins: Any, name: str) -> None:
    """Checks that there are values, and that bins are a number or increasing edges."""
    if isinstance(values, BinnedValues):
        return
    shape = _shape(values)
    if shape is None and not isinstance(values, list | tuple):
        got = type(values).__name__
        raise RecordError(f"histogram {name!r} must have an array or list of numbers, got {got}.")
    if not values if shape is None else 0 in shape:
        got = "an empty list" if shape is None else f"shape {shape}"
        raise RecordError(f"histogram {name!r} must have at least one value, got {got}.")
    if isinstance(bins, str) and bins == "auto":
        return
    is_count = _is_number(bins, Integral)
    if (bins < 1) if is_count else not _are_edges(bins):
        raise RecordError(
            f"histogram {name!r} must have at least one bin, or increasing edges, "
            f"got bins={short_repr(bins, 80)}."
        )
    if (bins if is_count else len(bins) - 1) > _MAX_BINS:
        got = short_repr(bins) if is_count else f"{len(bins):,} edges"
        raise RecordError(f"histogram {name!r} must have at most {_MAX_BINS:,} bins, got {got}.")


def _are_edges(bins: Any) -> bool:
    edges = bins.tolist() if hasattr(bins, "tolist") else bins
    # Written so that NaN, which compares false with everything, is refused.
    return (
        isinstance(edges, list | tuple)
        and len(edges) >= 2  # noqa: PLR2004  # one bin
        and all(_is_number(edge, Real) for edge in edges)
        and all(left < right for left, right in itertools.pairwise(edges))
    )


def check_point_cloud(points: Any, colors: Any, name: str) -> None:
    """Checks that points have shape (N, 3) or (B, N, 3), and as many colours."""
    what = f"point cloud {name!r} must have"
    needed = f"{what} shape (N, 3) or (B, N, 3)"
    shape = _require_shape(points, needed, {2, 3}, lambda shape: shape[-1] == 3)  # noqa: PLR2004  # x, y, z
    if colors is not None:
        allowed = {(*shape[:-1], 3), (*shape[:-1], 4)}
        needed = f"{what} colours of shape {(*shape[:-1], 3)}"
        _require_shape(colors, needed, {len(shape)}, allowed.__contains__)


def check_traces(traces: Any) -> None:
    """Checks that traces are a mapping with strings as names."""
    if not isinstance(traces, Mapping) or not all(isinstance(name, str) for name in traces):
        raise RecordError(f"traces must be a dict from name to value, got {short_repr(traces, 80)}.")


def unreadable(action: str, name: str, error: Exception) -> RecordError:
    """Returns the error for a value whose own methods raise, as one that only looks like an array or dict."""
    what = f"{action}({name!r})" if name else action
    return RecordError(
        f"{what} must get values that can be read, got {type(error).__name__}: {safe_text(error)}"
    )


def _is_list(value: Any) -> bool:
    """Returns whether a value has a length and can be iterated twice: lists, tuples, arrays, `d.values()`."""
    return (
        not isinstance(value, str | bytes | Mapping)
        and hasattr(value, "__len__")
        and hasattr(value, "__iter__")
    )


def _is_number(value: Any, kind: type) -> bool:
    """Returns whether a value is a number of this kind, Python's or numpy's, and not a bool."""
    return isinstance(value, kind) and not isinstance(value, bool)


def check_file(path: Any, what: str) -> None:
    """Refuses a pipe, a device or a folder: reading one might never end.

    A missing file is left to the reader.
    """
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):
        return
    if not stat.S_ISREG(mode):
        raise RecordError(f"{what} must be a regular file, got {short_repr(str(path), 200)}.")


def _shape(value: Any) -> tuple[int, ...] | None:
    if getattr(value, "is_nested", False):
        raise RecordError("tensor must have one shape, got a nested one. Log its parts, or a padded tensor.")
    if getattr(value, "is_meta", False):
        raise RecordError("tensor must have values, got one on the meta device.")
    shape = getattr(value, "shape", None)
    return None if shape is None else tuple(int(size) for size in shape)


def _require_shape(
    value: Any,
    needed: str,
    dimensions: set[int],
    fits: Callable[[tuple[int, ...]], bool] = lambda _: True,
) -> tuple[int, ...]:
    """Returns the shape of an array that is not empty, or raises `RecordError` with what is needed."""
    shape = _shape(value)
    if shape is None or len(shape) not in dimensions or 0 in shape or not fits(shape):
        raise RecordError(f"{needed}, got {shape or type(value).__name__}.")
    return shape
