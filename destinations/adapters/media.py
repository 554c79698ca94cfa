"""Logs media and tables in the form common among trackers: lists, with lists of captions."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from events import Logger

__all__ = ["WandbMedia", "log_images", "log_table", "log_videos"]

_CHANNELS = frozenset({1, 3, 4})
_IMAGE_DIMENSIONS = 3
_IMAGES_DIMENSIONS = 4
_VIDEOS_DIMENSIONS = 5
_SOUND_DIMENSIONS = 2
# The default of wandb.Video.
_DEFAULT_FPS = 4
# The default of wandb.Audio.
_DEFAULT_SAMPLE_RATE = 44_100


def log_images(
    logger: Logger,
    name: str,
    images: Any,
    step: int | None,
    captions: Sequence[str] | str | None = None,
    masks: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Logs images, each channels-first or -last, as one record with captions.

    ```python
    log_images(run.logger, "samples", [image], step=3, captions=["a cat"])
    ```

    A batch of four dimensions is N images.
    """
    by_name: dict[str, list[Any]] = {}
    labels: dict[int, str] = {}
    for of_image in masks or ():
        for mask_name, mask in of_image.items():
            by_name.setdefault(mask_name, []).append(mask["mask_data"])
            labels.update(mask.get("class_labels") or {})
    several = [_channels_first(image) for image in _several(images, _IMAGES_DIMENSIONS)]
    logger.log_images(
        several,
        name=name,
        step=step,
        masks=by_name or None,
        mask_class_labels=labels or None,
        captions=[one or "" for one in _one_each(captions, len(several))] if captions else None,
    )


def log_videos(
    logger: Logger,
    name: str,
    videos: Any,
    step: int | None,
    captions: Sequence[str] | str | None = None,
    fps: float | Sequence[float] | None = None,
) -> None:
    """Logs each video as a separate record; `(N, T, C, H, W)` is N videos.

    ```python
    log_videos(run.logger, "walk", [frames], step=3, fps=8)
    ```
    """
    several = _several(videos, _VIDEOS_DIMENSIONS)
    texts = _one_each(captions, len(several))
    for video, rate, caption in zip(several, _rates(fps, len(several)), texts, strict=True):
        # A file has its own rate.
        default = None if isinstance(video, str | bytes | Path) else _DEFAULT_FPS
        logger.log_video(video, rate or default, name=name, step=step, caption=caption)


def log_table(
    logger: Logger,
    name: str,
    columns: Sequence[str] | None,
    data: Sequence[Sequence[Any]] | None,
    dataframe: Any,
    step: int | None,
) -> None:
    """Logs a table: columns and rows, or a data frame.

    ```python
    log_table(run.logger, "labels", ["label", "count"], [["cat", 3]], None, step=3)
    ```
    """
    if dataframe is not None:
        logger.log_table(dataframe, None, name, step)
    else:
        logger.log_table(() if columns is None else columns, () if data is None else data, name, step)


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


def _several(values: Any, batch_dimensions: int | None = None) -> list[Any]:
    """Returns the values of a list, a tuple, or a batch of so many dimensions; any other value alone."""
    is_batch = batch_dimensions is not None and len(getattr(values, "shape", ())) == batch_dimensions
    return list(values) if is_batch or isinstance(values, list | tuple) else [values]


def _rates(given: Any, count: int) -> list[Any]:
    """Returns one rate for each of `count` records."""
    rates = _several(given)
    return rates * count if len(rates) == 1 else rates


def _one_each(captions: Sequence[str] | str | None, count: int) -> list[str | None]:
    """Returns a caption or None for each of `count` records; ones too many belong to the last."""
    given = [captions] if isinstance(captions, str) else [str(caption) for caption in captions or ()]
    if len(given) > count > 0:
        given = [*given[: count - 1], "\n".join(given[count - 1 :])]
    return [*given, *[None] * (count - len(given))]


class WandbMedia:
    """Mixin with the media calls of Lightning's `WandbLogger`, on which many callbacks rely.

    ```python
    logger = LightningLogger(RunDirectory("runs/digits"))
    logger.log_image("samples", [image], caption=["a cat"])
    ```
    """

    @property
    def experiment(self) -> Logger:
        """The `Logger` of the run."""
        raise NotImplementedError

    def log_text(
        self,
        key: str,
        columns: Sequence[str] | str | None = None,
        data: Sequence[Sequence[str]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Logs a table of texts, with the signature of `WandbLogger`.

        With a string in place of the columns, that is the text.
        """
        if isinstance(columns, str):
            self.experiment.log_text(columns, name=key, step=step)
        else:
            log_table(self.experiment, key, columns, data, dataframe, step)

    def log_audio(
        self,
        key: str,
        audios: Any,
        step: int | None = None,
        caption: Sequence[str] | str | None = None,
        sample_rate: int | Sequence[int | None] | None = None,
        **_: Any,
    ) -> None:
        """Logs audio, with the signature of `WandbLogger`.

        Args:
            key: the name.
            audios: a list of arrays `(samples,)`, `(samples, channels)` or `(channels, samples)`, float in
                [-1, 1] or int16; or of paths or bytes of WAV files.
            step: the step; default: the number of completed batches.
            caption: one per sound.
            sample_rate: samples per second, one for all or one per sound; default: 44,100, as in W&B.
        """
        several = _several(audios)
        rates, texts = _rates(sample_rate, len(several)), _one_each(caption, len(several))
        for audio, rate, text in zip(several, rates, texts, strict=True):
            shape: Any = getattr(audio, "shape", ())
            # The smaller dimension is the channels: W&B has `(samples, channels)`.
            is_turned = len(shape) == _SOUND_DIMENSIONS and shape[0] > shape[1]
            sound = audio.T if is_turned else audio
            self.experiment.log_audio(sound, rate or _DEFAULT_SAMPLE_RATE, name=key, step=step, caption=text)

    def log_image(
        self,
        key: str,
        images: Any,
        step: int | None = None,
        caption: Sequence[str] | str | None = None,
        masks: Sequence[Mapping[str, Any]] | None = None,
        **_: Any,
    ) -> None:
        """Logs images, with the signature of Lightning's `WandbLogger`.

        Args:
            key: the name.
            images: a list of arrays `(H, W, C)` or `(C, H, W)`, tensors `(C, H, W)`, PIL images, or paths.
            step: the step; default: the number of completed batches.
            caption: one per image.
            masks: per image, by name, `{"mask_data": (H, W), "class_labels": {index: label}}`.
        """
        log_images(self.experiment, key, images, step, caption, masks)

    def log_video(
        self,
        key: str,
        videos: Any,
        step: int | None = None,
        caption: Sequence[str] | str | None = None,
        fps: float | Sequence[float] | None = None,
        format: str | Sequence[str] | None = None,  # the name that callers use
        **_: Any,
    ) -> None:
        """Logs videos, with the signature of `WandbLogger`.

        Args:
            key: the name.
            videos: a list of frames `(T, C, H, W)`, paths, or bytes of video files.
            step: the step; default: the number of completed batches.
            caption: one per video.
            fps: frames per second, one for all or one per video; default for frames: 4, as in W&B.
            format: ignored; detected from the file.
        """
        log_videos(self.experiment, key, videos, step, caption, fps)

    def log_table(
        self,
        key: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Logs a table, columns and rows or a data frame, with the signature of `WandbLogger`."""
        log_table(self.experiment, key, columns, data, dataframe, step)
