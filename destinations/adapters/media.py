"""Logs images and videos in the form common among trackers: lists, with lists of captions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from events import Logger

__all__ = ["log_images", "log_videos"]

_CHANNELS = frozenset({1, 3, 4})
_IMAGE_DIMENSIONS = 3
_VIDEOS_DIMENSIONS = 5
# The default of wandb.Video.
_DEFAULT_FPS = 4


def log_images(
    logger: Logger,
    name: str,
    images: Any,
    step: int | None,
    captions: Sequence[str] | str | None = None,
    masks: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Logs images, each channels-first or -last, as one record, and captions as a text."""
    images = list(images) if isinstance(images, list | tuple) else [images]
    by_name: dict[str, list[Any]] = {}
    labels: dict[int, str] = {}
    for of_image in masks or ():
        for mask_name, mask in of_image.items():
            by_name.setdefault(mask_name, []).append(mask["mask_data"])
            labels.update(mask.get("class_labels") or {})
    logger.log_images(
        [_channels_first(image) for image in images],
        name=name,
        step=step,
        masks=by_name or None,
        mask_class_labels=labels or None,
    )
    _log_captions(logger, name, captions, step)


def log_videos(
    logger: Logger,
    name: str,
    videos: Any,
    step: int | None,
    captions: Sequence[str] | str | None = None,
    fps: float | Sequence[float] | None = None,
) -> None:
    """Logs each video as a separate record; `(N, T, C, H, W)` is N videos."""
    is_batch = len(getattr(videos, "shape", ())) == _VIDEOS_DIMENSIONS
    several = list(videos) if isinstance(videos, list | tuple) or is_batch else [videos]
    rates: list[Any] = list(fps) if isinstance(fps, list | tuple) else [fps] * len(several)
    for video, rate in zip(several, rates, strict=True):
        is_encoded = isinstance(video, str | bytes | Path)
        logger.log_video(video, rate if is_encoded or rate else _DEFAULT_FPS, name=name, step=step)
    _log_captions(logger, name, captions, step)


def _channels_first(image: Any) -> Any:
    """Returns an image with channels first.

    Ambiguous tensors count as channels-first; ambiguous arrays as channels-last, as in matplotlib, PIL and
    W&B.
    """
    shape = getattr(image, "shape", None)
    if shape is None or len(shape) != _IMAGE_DIMENSIONS or shape[2] not in _CHANNELS:
        return image
    if hasattr(image, "permute"):
        return image if shape[0] in _CHANNELS else image.permute(2, 0, 1)
    return image.transpose(2, 0, 1)


def _log_captions(logger: Logger, name: str, captions: Sequence[str] | str | None, step: int | None) -> None:
    if captions:
        lines = [captions] if isinstance(captions, str) else [str(caption) for caption in captions]
        logger.log_text("\n".join(lines), name=f"{name}/caption", step=step)
