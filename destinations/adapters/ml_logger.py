"""`MlLogger`: the calls of `ml.loggers` (ml-starter, mlfab) on our destinations.

Everything runs in the thread that trains. The package `ml` is not needed.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs

from events import Callback, Destination, Logger, Phase, State

from .session import Session, SessionMixin, as_tuple

__all__ = ["MlLogger"]

_CHANNELS = frozenset({1, 3})
_LONG_RUN_STEPS = 5000
_LONG_RUN_SECONDS = 10.0
_SHORT_RUN_SECONDS = 1.0
_FPS = 30
_SAMPLE_RATE = 44_100
_IMAGE_DIMENSIONS = 3
_CLOUD_DIMENSIONS = 3

Write = Callable[[Logger, Any, str, int], None]
"""Logs a value to a logger, under a name and with a step."""


@attrs.define
class _PendingWrite:
    """Records that wait for a write: scalars by name, and the last record of each kind and name."""

    scalars: dict[str, Any] = attrs.field(factory=dict)
    records: dict[tuple[str, str], tuple[Write, Any]] = attrs.field(factory=dict)


class _PendingPhases(Callback):
    """The records that wait for a write, by phase; the rest is written when the run is closed.

    Attributes:
        logged: what was logged since the last call of `MlLogger.write`.
        phases: the records that wait for the next write of each phase.
        last_step: the step of the last call of `MlLogger.write`.
    """

    def __init__(self) -> None:
        self.logged = _PendingWrite()
        self.phases: dict[str, _PendingWrite] = {}
        self.last_step = 0

    def collect(self, phase: str) -> bool:
        """Adds what was logged to a phase; returns whether the phase has pending records."""
        logged, self.logged = self.logged, _PendingWrite()
        waiting = self.phases.setdefault(phase, _PendingWrite())
        waiting.scalars.update(logged.scalars)
        waiting.records.update(logged.records)
        return bool(waiting.scalars or waiting.records)

    def write(self, phase: str, step: int, state: State, logger: Logger) -> None:
        """Writes the pending records of a phase."""
        waiting = self.phases.pop(phase)
        state.phase = Phase.TRAIN if phase == "train" else Phase.EVAL
        state.dataloader_label = phase
        try:
            if waiting.scalars:
                logger.log_metrics(waiting.scalars, step)
            for (_, name), (write, value) in waiting.records.items():
                write(logger, _result(value), name, step)
        finally:
            state.phase = Phase.TRAIN

    def close(self, state: State, logger: Logger) -> None:
        """Writes the rest."""
        self.collect("train")
        for phase in list(self.phases):
            self.write(phase, self.last_step, state, logger)


class MlLogger(SessionMixin):
    """A logger with the method names and argument order of the loggers of `ml`.

    ```python
    with MlLogger(RunDirectory("runs/digits"), num_steps=10_000) as logger:
        for step in range(10_000):
            logger.log_scalar("loss", lambda: loss.item())
            logger.write(step, "train")
    ```

    **Writes.** What is logged waits for `write`, once a step, and is written where the interval of the phase
    has passed; until then the last value of each name is kept. Every label, "train", "valid" or "test", has
    its own clock, and its first write is due at once. A value that is a function is called when it is
    written. `close` writes the rest.

    **Names** are `<namespace>/<key>`; inside `namespace_context("a")`, `<namespace>_a/<key>`.

    Args:
        destinations: destinations that receive the records.
        default_namespace: the namespace of calls without one.
        num_steps: length of the run: above 5000 steps the default interval is 10 s, else 1 s.
        write_every_n_seconds: the interval of all phases.
        write_train_every_n_seconds: that of "train".
        write_val_every_n_seconds: that of every other phase.
        callbacks: callbacks of this project.
        run_name: name of the run. Default: environment variable `RUN_NAME`, else the folder name of a
            `RunDirectory`, else a generated name.
        raise_errors: raise errors of destinations instead of reporting them; for tests.
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self,
        *destinations: Destination,
        default_namespace: str = "value",
        num_steps: int | None = None,
        write_every_n_seconds: float | None = None,
        write_train_every_n_seconds: float | None = None,
        write_val_every_n_seconds: float | None = None,
        callbacks: Callback | Iterable[Callback] = (),
        run_name: str | None = None,
        raise_errors: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pending_phases = _PendingPhases()
        self._session = Session(
            destinations,
            (*as_tuple(callbacks), self._pending_phases),
            run_name,
            raise_errors=raise_errors,
            is_end_reported=False,
        )
        self._default_namespace = default_namespace
        is_long = num_steps is not None and num_steps > _LONG_RUN_STEPS
        default = _LONG_RUN_SECONDS if is_long else _SHORT_RUN_SECONDS
        every = default if write_every_n_seconds is None else write_every_n_seconds
        self._train_seconds = every if write_train_every_n_seconds is None else write_train_every_n_seconds
        self._val_seconds = every if write_val_every_n_seconds is None else write_val_every_n_seconds
        self._clock = clock
        self._stack: tuple[str, ...] = ()
        self._last_writes: dict[str, float] = {}

    # Names.

    @contextlib.contextmanager
    def namespace_context(self, name: str | None) -> Iterator[None]:
        """Adds a name to the namespace in a `with` block; None leaves out the names of outer blocks."""
        before, self._stack = self._stack, () if name is None else (*self._stack, name)
        try:
            yield
        finally:
            self._stack = before

    namespace = namespace_context

    def _name(self, key: str, namespace: str | None) -> str:
        return f"{'_'.join([namespace or self._default_namespace, *self._stack])}/{key}"

    # Records.

    def log_scalar(self, key: str, value: Any, *, namespace: str | None = None) -> None:
        """Logs a number, a tensor of one element, or a function that returns one."""
        self._pending_phases.logged.scalars[self._name(key, namespace)] = value

    def log_string(self, key: str, value: Any, *, namespace: str | None = None) -> None:
        """Logs a text, or a function that returns one."""
        self._keep("text", key, namespace, value, Logger.log_text)

    def log_image(
        self, key: str, value: Any, *, namespace: str | None = None, keep_resolution: bool = False
    ) -> None:
        """Logs an image.

        Args:
            key: the name.
            value: `(C, H, W)`, `(H, W, C)` or `(H, W)`, with 1 or 3 channels; floats beyond [0, 1] are scaled
                into it. Or a function that returns one.
            namespace: the namespace.
            keep_resolution: ignored: the resolution is always kept.
        """

        def write(logger: Logger, image: Any, name: str, step: int) -> None:
            logger.log_images(_image(image), name, step=step)

        self._keep("image", key, namespace, value, write)

    def log_images(
        self,
        key: str,
        value: Any,
        *,
        namespace: str | None = None,
        keep_resolution: bool = False,
        max_images: int | None = None,
        sep: int = 0,
    ) -> None:
        """Logs images as one grid: `(B, C, H, W)`, `(B, H, W, C)` or `(B, H, W)`; see `log_image`.

        Args:
            key: the name.
            value: the images, or a function that returns them.
            namespace: the namespace.
            keep_resolution: ignored.
            max_images: the largest number of images; further ones are left out.
            sep: pixels between two images.
        """
        self._keep("image", key, namespace, value, _grid(max_images, sep))

    def log_labeled_image(
        self, key: str, value: Any, *, namespace: str | None = None, keep_resolution: bool = False, **_: Any
    ) -> None:
        """Logs `(image, label)`, with the label below the image."""
        write = _grid(None, 0, has_labels=True)

        def write_one(logger: Logger, labelled: tuple[Any, str], name: str, step: int) -> None:
            image, label = labelled
            write(logger, ([image], [label]), name, step)

        self._keep("image", key, namespace, value, write_one)

    def log_labeled_images(
        self,
        key: str,
        value: Any,
        *,
        namespace: str | None = None,
        keep_resolution: bool = False,
        max_images: int | None = None,
        sep: int = 0,
        **_: Any,
    ) -> None:
        """Logs `(images, labels)` as one grid, with the labels below the images."""
        self._keep("image", key, namespace, value, _grid(max_images, sep, has_labels=True))

    def log_audio(
        self,
        key: str,
        value: Any,
        *,
        namespace: str | None = None,
        sample_rate: int = _SAMPLE_RATE,
        **_: Any,
    ) -> None:
        """Logs audio.

        Args:
            key: the name.
            value: `(samples,)` or `(channels, samples)`; or a function that returns it, or it and its sample
                rate.
            namespace: the namespace.
            sample_rate: samples per second, where the function returns none.
        """

        def write(logger: Logger, audio: Any, name: str, step: int) -> None:
            sound, rate = audio if isinstance(audio, tuple) else (audio, sample_rate)
            logger.log_audio(sound, rate, name, step)

        self._keep("audio", key, namespace, value, write)

    def log_video(
        self, key: str, value: Any, *, namespace: str | None = None, fps: int | None = None, **_: Any
    ) -> None:
        """Logs a video `(T, C, H, W)`, `(T, H, W, C)` or `(T, H, W)`, or a function that returns one.

        `fps` defaults to 30.
        """

        def write(logger: Logger, video: Any, name: str, step: int) -> None:
            logger.log_video(_frames(video), fps or _FPS, name, step)

        self._keep("video", key, namespace, value, write)

    def log_histogram(self, key: str, value: Any, *, namespace: str | None = None) -> None:
        """Logs a histogram of values in any shape, or of what a function returns."""
        self._keep("histogram", key, namespace, value, Logger.log_histogram)

    def log_point_cloud(
        self, key: str, value: Any, *, namespace: str | None = None, max_points: int = 1000
    ) -> None:
        """Logs points `(N, 3)` or `(B, ..., 3)`, or what a function returns.

        Of more than `max_points` points, every k-th is kept.
        """

        def write(logger: Logger, points: Any, name: str, step: int) -> None:
            if len(points.shape) > _CLOUD_DIMENSIONS:
                points = points.reshape(points.shape[0], -1, 3)
            stride = -(-points.shape[-2] // max_points)
            logger.log_point_cloud(points[..., ::stride, :], name, step)

        self._keep("points", key, namespace, value, write)

    def log_config(self, config: Any, metrics: Mapping[str, Any] | None = None) -> None:
        """Logs hyperparameters at once, and metrics with them at step 0."""
        self.logger.log_hyperparameters(config)
        if metrics:
            self.logger.log_metrics(metrics, 0)

    def _keep(self, kind: str, key: str, namespace: str | None, value: Any, write: Write) -> None:
        self._pending_phases.logged.records[kind, self._name(key, namespace)] = write, value

    # Writing.

    def should_write(self, phase: str = "train") -> bool:
        """Returns whether the interval of a phase has passed since its last write; changes nothing."""
        last = self._last_writes.get(phase)
        seconds = self._train_seconds if phase == "train" else self._val_seconds
        return last is None or self._clock() - last >= seconds

    def write(self, step: Any, phase: str | None = None) -> None:
        """Writes what was logged since the last call, if the phase is due; else it waits.

        Args:
            step: the step; or a state of `ml`, which has `num_steps` and `phase`.
            phase: "train", or the label of another phase. Default: that of the state, else "train".
        """
        phase = phase or getattr(step, "phase", None) or "train"
        step = self._pending_phases.last_step = int(getattr(step, "num_steps", step))
        logger = self.logger
        if self._pending_phases.collect(phase) and self.should_write(phase):
            self._last_writes[phase] = self._clock()
            try:
                self._pending_phases.write(phase, step, self._session.state, logger)
            finally:
                self._session.advance_to(step)


def _grid(max_images: int | None, separator_pixels: int, *, has_labels: bool = False) -> Write:
    """Returns a function that logs images as one grid; with labels, the value is `(images, labels)`."""

    def write(logger: Logger, value: Any, name: str, step: int) -> None:
        from destinations.pictures import image_grid, with_captions

        images, labels = value if has_labels else (value, ())
        ready: Any = [_image(image) for image in images][:max_images]
        if has_labels:
            ready = with_captions(ready, list(labels)[:max_images])
        grid = image_grid(ready, separator_pixels=separator_pixels, channels_last=has_labels)
        logger.log_images(grid, name, channels_last=True, step=step)

    return write


def _result(value: Any) -> Any:
    return value() if callable(value) else value


def _image(image: Any) -> Any:
    """Returns an image with channels first, or without any; floats within [0, 1]."""
    if len(image.shape) == _IMAGE_DIMENSIONS and image.shape[0] not in _CHANNELS:
        image = image.permute(2, 0, 1) if hasattr(image, "permute") else image.transpose(2, 0, 1)
    return _unit(image)


def _frames(video: Any) -> Any:
    """Returns frames `(T, C, H, W)`, floats within [0, 1]."""
    if len(video.shape) == _IMAGE_DIMENSIONS:
        video = video[:, None]
    elif video.shape[1] not in _CHANNELS:
        video = video.permute(0, 3, 1, 2) if hasattr(video, "permute") else video.transpose(0, 3, 1, 2)
    return _unit(video)


def _unit(values: Any) -> Any:
    """Returns floats scaled into [0, 1] if they go beyond it; other values unchanged. Waits for no device."""
    if "float" not in str(values.dtype):
        return values
    low, high = values.min().clip(None, 0), values.max().clip(1, None)
    return (values - low) / (high - low)
