"""`MlLogger`: the calls of `ml.loggers` (ml-starter) on our destinations; `FromMl`: the reverse.

Everything runs in the thread that trains. The package `ml` is not needed.
"""

import abc
import contextlib
import dataclasses
import functools
import inspect
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

import attrs

from destinations.base import LoggerDestination
from destinations.run_directory import RunDirectory
from events import Callback, Destination, Logger, Phase, State, Timestamp

from .session import Session, SessionMixin, as_tuple

__all__ = ["BaseLogger", "BaseLoggerConfig", "FromMl", "MlLogger"]

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
        logged: the records since the last call of `MlLogger.write`.
        phases: the records that wait for the next write of each phase.
        last_step: the step of the last call of `MlLogger.write`.
    """

    def __init__(self) -> None:
        self.logged = _PendingWrite()
        self.phases: dict[str, _PendingWrite] = {}
        self.last_step = 0

    def of(self, state: Any) -> _PendingWrite:
        """Returns where a record of a state of `ml` waits; without a state, `write` says its phase."""
        if state is None:
            return self.logged
        return self.phases.setdefault(str(state.phase), _PendingWrite())

    def collect(self, phase: str) -> bool:
        """Adds the logged records to a phase; returns whether the phase has pending records."""
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


@attrs.frozen(eq=False)
class _Shared:
    """The state that loggers on the same destinations share."""

    session: Session
    pending: _PendingPhases
    given: tuple[Any, ...]
    last_writes: dict[str, float] = attrs.field(factory=dict)


_in_use: "weakref.WeakSet[_Shared]" = weakref.WeakSet()


def _shared_by(given: tuple[Any, ...]) -> _Shared | None:
    """Returns the shared state of open loggers on these destinations, or None."""
    return next((one for one in _in_use if given and list(map(id, one.given)) == list(map(id, given))), None)


# What each method writes: a function that takes logger, value, name, step and the method's options. The
# method takes its docstring.


def _write_text(logger: Logger, text: Any, name: str, step: int) -> None:
    """Logs a text."""
    logger.log_text(text, name, step)


def _write_image(logger: Logger, image: Any, name: str, step: int, **_: Any) -> None:
    """Logs an image: `(C, H, W)`, `(H, W, C)` or `(H, W)`, with 1 or 3 channels.

    Floats beyond [0, 1] are scaled into it. `keep_resolution` is ignored: the resolution is always kept.
    """
    logger.log_images(_image(image), name, step=step)


def _write_images(
    logger: Logger, images: Any, name: str, step: int, max_images: int | None = None, sep: int = 0, **_: Any
) -> None:
    """Logs images as one grid: `(B, C, H, W)`, `(B, H, W, C)` or `(B, H, W)`; see `log_image`.

    Images beyond `max_images` are left out; `sep` is the number of pixels between two.
    """
    from destinations.pictures import image_grid

    grid = image_grid([_image(image) for image in images][:max_images], separator_pixels=sep)
    logger.log_images(grid, name, channels_last=True, step=step)


def _write_labeled_image(logger: Logger, labelled: tuple[Any, str], name: str, step: int, **_: Any) -> None:
    """Logs `(image, label)`, with the label below the image."""
    image, label = labelled
    _write_labeled_images(logger, ([image], [label]), name, step)


def _write_labeled_images(
    logger: Logger,
    labelled: tuple[Any, Any],
    name: str,
    step: int,
    max_images: int | None = None,
    sep: int = 0,
    **_: Any,
) -> None:
    """Logs `(images, labels)` as one grid, with the labels below the images; see `log_images`."""
    from destinations.pictures import image_grid, with_captions

    images, labels = labelled
    ready = with_captions([_image(image) for image in images][:max_images], list(labels)[:max_images])
    grid = image_grid(ready, separator_pixels=sep, channels_last=True)
    logger.log_images(grid, name, channels_last=True, step=step)


def _write_audio(
    logger: Logger, audio: Any, name: str, step: int, sample_rate: int = _SAMPLE_RATE, **_: Any
) -> None:
    """Logs audio `(samples,)` or `(channels, samples)`; or a pair of it and its sample rate."""
    sound, rate = audio if isinstance(audio, tuple) else (audio, sample_rate)
    logger.log_audio(sound, rate, name, step)


def _write_video(logger: Logger, video: Any, name: str, step: int, fps: int | None = None, **_: Any) -> None:
    """Logs a video `(T, C, H, W)`, `(T, H, W, C)` or `(T, H, W)`; `fps` defaults to 30."""
    logger.log_video(_frames(video), fps or _FPS, name, step)


def _write_histogram(logger: Logger, values: Any, name: str, step: int) -> None:
    """Logs a histogram of values in any shape."""
    logger.log_histogram(values, name, step)


def _write_point_cloud(logger: Logger, points: Any, name: str, step: int, max_points: int = 1000) -> None:
    """Logs points `(N, 3)` or `(B, ..., 3)`; of more than `max_points`, every k-th is kept."""
    if len(points.shape) > _CLOUD_DIMENSIONS:
        points = points.reshape(points.shape[0], -1, 3)
    stride = -(-points.shape[-2] // max_points)
    logger.log_point_cloud(points[..., ::stride, :], name, step)


def _method(kind: str, write: Callable[..., None]) -> Callable[..., None]:
    """Returns the method of `MlLogger` that keeps a value until it is written.

    It takes the key, the value or a function that returns it, a state of `ml`, a namespace, and by name the
    options of `write`.
    """
    signature = inspect.signature(write)

    def log(
        self: "MlLogger",
        key: str,
        value: Any,
        state: Any = None,
        namespace: str | None = None,
        **options: Any,
    ) -> None:
        signature.bind(None, value, key, 0, **options)  # raises here for an option that is unknown
        self._keep(kind, key, (functools.partial(write, **options), value), state, namespace)

    log.__doc__ = write.__doc__
    return log


class MlLogger(SessionMixin):
    """A logger with the method names and argument order of the loggers of `ml`.

    ```python
    with MlLogger(RunDirectory("runs/digits"), num_steps=10_000) as logger:
        for step in range(10_000):
            logger.log_scalar("loss", lambda: loss.item())
            logger.write(step, "train")
    ```

    **Writes.** Values wait for `write`, which you call once a step; it writes if the interval of the phase
    has passed, and otherwise keeps the last value of each name. Every label, "train", "valid" or "test", has
    its own clock, and its first write is due at once. A value that is a function is called when it is
    written. `close` writes the rest.

    **Names** are `<namespace>/<key>`; inside `namespace_context("a")`, `<namespace>_a/<key>`.

    **Several** loggers on the same destinations share one run: the first due call of `write` writes what all
    have logged, and the first call of `close` ends the run.

    **As a logger of `ml`** it has the calls of a `BaseLogger`: `log_scalar(key, value, state, namespace)`,
    `should_write(state)`, `write(state)`.

    Args:
        destinations: destinations that receive the records; loggers of `ml`, subclasses of its `BaseLogger`,
            become `FromMl`.
        default_namespace: the namespace of calls without one.
        num_steps: length of the run: above 5000 steps the default interval is 10 s, else 1 s.
        write_every_n_seconds: the interval of all phases.
        write_train_every_n_seconds: the interval for "train".
        write_val_every_n_seconds: the interval for every other phase.
        callbacks: callbacks of this project.
        run_name: name of the run. Default: environment variable `RUN_NAME`, else the folder name of a
            `RunDirectory`, else a generated name.
        raise_errors: raise errors of destinations instead of reporting them; for tests.
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self,
        *destinations: Any,
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
        shared = _shared_by(destinations)
        if shared is None:
            pending = _PendingPhases()
            session = Session(
                [_as_destination(one) for one in destinations],
                (*as_tuple(callbacks), pending),
                run_name,
                raise_errors=raise_errors,
                is_end_reported=False,
            )
            shared = _Shared(session, pending, destinations)
            _in_use.add(shared)
        self._shared, self._session = shared, shared.session
        self._default_namespace = default_namespace
        is_long = num_steps is not None and num_steps > _LONG_RUN_STEPS
        default = _LONG_RUN_SECONDS if is_long else _SHORT_RUN_SECONDS
        every = default if write_every_n_seconds is None else write_every_n_seconds
        self._train_seconds = every if write_train_every_n_seconds is None else write_train_every_n_seconds
        self._val_seconds = every if write_val_every_n_seconds is None else write_val_every_n_seconds
        self._clock = clock
        self._stack: tuple[str, ...] = ()

    def initialize(self, log_directory: Any) -> None:
        """Does nothing: `ml` calls it with the folder of the run, and destinations have their own."""

    def _end(self, exception: BaseException | None) -> None:
        _in_use.discard(self._shared)
        super()._end(exception)

    def close(self) -> None:
        """Ends the run, also for those that share it: writes the rest, and closes the destinations."""
        _in_use.discard(self._shared)
        super().close()

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

    def log_scalar(self, key: str, value: Any, state: Any = None, namespace: str | None = None) -> None:
        """Logs a number, a tensor of one element, or a function that returns one."""
        self._shared.pending.of(state).scalars[self._name(key, namespace)] = value

    log_string = _method("text", _write_text)
    log_image = _method("image", _write_image)
    log_images = _method("image", _write_images)
    log_labeled_image = _method("image", _write_labeled_image)
    log_labeled_images = _method("image", _write_labeled_images)
    log_audio = _method("audio", _write_audio)
    log_video = _method("video", _write_video)
    log_histogram = _method("histogram", _write_histogram)
    log_point_cloud = _method("points", _write_point_cloud)

    def log_config(self, config: Any, metrics: Mapping[str, Any] | None = None) -> None:
        """Logs hyperparameters at once, and metrics with them at step 0."""
        self.logger.log_hyperparameters(config)
        if metrics:
            self.logger.log_metrics(metrics, 0)

    def _keep(
        self, kind: str, key: str, record: tuple[Write, Any], state: Any, namespace: str | None
    ) -> None:
        self._shared.pending.of(state).records[kind, self._name(key, namespace)] = record

    # Writing.

    def should_write(self, phase: Any = "train") -> bool:
        """Returns whether the interval of a phase has passed since its last write; changes nothing.

        Args:
            phase: its label, or a state of `ml`.
        """
        phase = str(getattr(phase, "phase", phase))
        last = self._shared.last_writes.get(phase)
        seconds = self._train_seconds if phase == "train" else self._val_seconds
        return last is None or self._clock() - last >= seconds

    def write(self, step: Any, phase: str | None = None) -> None:
        """Writes the records since the last call if the phase is due; otherwise they wait.

        Args:
            step: the step; or a state of `ml`, which has `num_steps` and `phase`.
            phase: "train", or the label of another phase. Default: the state's phase, or "train".
        """
        phase = phase or getattr(step, "phase", None) or "train"
        pending, logger = self._shared.pending, self.logger
        step = pending.last_step = int(getattr(step, "num_steps", step))
        if pending.collect(phase) and self.should_write(phase):
            self._shared.last_writes[phase] = self._clock()
            try:
                pending.write(phase, step, self._session.state, logger)
            finally:
                self._session.advance_to(step)


def _as_destination(given: Any) -> Destination:
    """Returns a logger of `ml` as a destination, and other values unchanged."""
    is_theirs = all(callable(getattr(given, name, None)) for name in ("log_scalar", "should_write", "write"))
    return FromMl(given) if is_theirs and not isinstance(given, MlLogger) else given


@dataclasses.dataclass
class BaseLoggerConfig:
    """The configuration of a `BaseLogger`, with the fields of ml's; subclass it as a dataclass.

    ```python
    @dataclasses.dataclass
    class LinesConfig(BaseLoggerConfig):
        precision: int = 4
    ```

    Attributes:
        name: the name that the logger is registered under in `ml`.
        write_every_n_seconds: the interval for all phases. Default: the logger's interval.
        write_train_every_n_seconds: the interval for "train".
        write_val_every_n_seconds: the interval for every other phase.
    """

    name: str = ""
    write_every_n_seconds: float | None = None
    write_train_every_n_seconds: float | None = None
    write_val_every_n_seconds: float | None = None


Config = TypeVar("Config", bound=BaseLoggerConfig)


class BaseLogger(abc.ABC, Generic[Config]):
    r"""The base class of loggers that were written for `ml`; the package is not needed.

    ```python
    class Lines(BaseLogger[BaseLoggerConfig]):
        def write(self, state):
            (self.log_directory / "lines.txt").open("a").write(f"{state.num_steps}\n")

    Trainer(..., loggers=[FromMl(Lines(BaseLoggerConfig()))])
    ```

    Override the `log_*` methods that you need, with ml's arguments `(key, value, state, namespace)`, where
    `value` is a function. The others do nothing.

    Args:
        config: the configuration.
    """

    log_directory: Path
    """The folder for files; set by `initialize`, before the first record."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.start_time = datetime.now()  # noqa: DTZ005  # local time, as ml's
        self.last_write_time: dict[Any, datetime] = {}

    def initialize(self, log_directory: Path) -> None:
        """Sets the folder."""
        self.log_directory = log_directory

    def _ignore(self, *_: Any) -> None:
        """Does nothing."""

    log_scalar = log_string = log_image = log_audio = log_video = log_histogram = log_point_cloud = _ignore
    log_config = _ignore

    def default_write_every_n_seconds(self, state: Any) -> float:
        """Returns the interval if the configuration has none: a second, and ten in a long run."""
        return _LONG_RUN_SECONDS if state.num_steps > _LONG_RUN_STEPS else _SHORT_RUN_SECONDS

    def write_every_n_seconds(self, state: Any) -> float:
        """Returns the interval of a phase."""
        config = self.config
        is_train = state.phase == "train"
        own = config.write_train_every_n_seconds if is_train else config.write_val_every_n_seconds
        given = config.write_every_n_seconds if own is None else own
        return self.default_write_every_n_seconds(state) if given is None else given

    def should_write(self, state: Any) -> bool:
        """Returns whether the interval of the phase has passed; the first write of a phase is due at once."""
        now, last = datetime.now(), self.last_write_time.get(state.phase)  # noqa: DTZ005  # as above
        if last is not None and (now - last).total_seconds() < self.write_every_n_seconds(state):
            return False
        self.last_write_time[state.phase] = now
        return True

    @abc.abstractmethod
    def write(self, state: Any) -> None:
        """Writes the records."""

    def clear(self, state: Any) -> None:
        """Does nothing; loggers of older versions of `ml` discard written records here."""


@attrs.frozen(kw_only=True)
class _MlState:
    """The part of the state that loggers of `ml` use."""

    num_steps: int
    num_epochs: int
    num_epoch_steps: int
    num_samples: int
    num_epoch_samples: int
    num_valid_steps: int
    num_test_steps: int
    phase: str

    @property
    def raw_phase(self) -> str:
        return self.phase

    @property
    def training(self) -> bool:
        return self.phase == "train"

    def num_phase_steps(self, phase: str) -> int:
        return {"train": self.num_steps, "valid": self.num_valid_steps}.get(phase, self.num_test_steps)

    @classmethod
    def of(cls, state: State | None, step: int | None) -> "_MlState":
        """Returns the state of a record.

        Args:
            state: of the run; None before it has begun.
            step: the step of the record. Default: the run's step.
        """
        at = Timestamp() if state is None else state.timestamp
        evaluated = int((Timestamp() if state is None else state.eval_timestamp).batch)
        is_train = state is None or state.phase is Phase.TRAIN
        is_test = state is not None and (state.dataloader_label or "").startswith("test")
        return cls(
            num_steps=int(at.batch) if step is None else step,
            num_epochs=int(at.epoch),
            num_epoch_steps=int(at.batch_in_epoch),
            num_samples=int(at.sample),
            num_epoch_samples=int(at.sample_in_epoch),
            num_valid_steps=0 if is_test else evaluated,
            num_test_steps=evaluated if is_test else 0,
            phase="train" if is_train else "test" if is_test else "valid",
        )


class FromMl(LoggerDestination):
    """Wraps a logger of `ml`, a subclass of its `BaseLogger`, for our `Trainer`, `Run` or `MlLogger`.

    ```python
    Trainer(..., loggers=[FromMl(StdoutLogger(StdoutLoggerConfig()))])
    ```

    It gets the records of one step together, and writes them if `should_write` returns True. The rest waits
    for a later step, and is written at the end. A name is split at its first "/" into namespace and key. Its
    calls block the training thread.

    Args:
        logger: a logger of `ml`, or a `BaseLogger` of this module. One without a `log_directory` gets the
            folder `logs` of the run's `RunDirectory`; without a `RunDirectory`, `logs/<run name>`.
    """

    def __init__(self, logger: Any) -> None:
        super().__init__()
        self.wrapped = logger
        self._state: State | None = None
        self._pending: _MlState | None = None
        # The newest of each phase that is not written.
        self._waiting: dict[str, _MlState] = {}

    def init(self, state: State, logger: Any) -> None:
        self._state = state
        if hasattr(self.wrapped, "initialize") and not hasattr(self.wrapped, "log_directory"):
            directory = next((one for one in state.callbacks if isinstance(one, RunDirectory)), None)
            logs = Path("logs")
            folder = logs / state.run_name if directory is None else directory.folder_of(state) / logs
            folder.mkdir(parents=True, exist_ok=True)
            self.wrapped.initialize(folder)

    def _log(self, method: str, name: str, value: Any, step: int | None) -> None:
        """Passes a value on, as the function that loggers of `ml` expect."""
        state = _MlState.of(self._state, step)
        pending = self._pending
        if pending is not None and (pending.num_steps, pending.phase) != (state.num_steps, state.phase):
            self._write()
        self._pending = state
        namespace, _, key = name.partition("/") if "/" in name else ("value", "", name)
        getattr(self.wrapped, method)(key, lambda: value, state, namespace)

    def _write(self) -> None:
        state, self._pending = self._pending, None
        if state is not None:
            self._waiting[state.phase] = state
            if self.wrapped.should_write(state):
                self._write_waiting(state.phase)

    def _write_waiting(self, phase: str) -> None:
        state = self._waiting.pop(phase)
        self.wrapped.write(state)
        if hasattr(self.wrapped, "clear"):
            self.wrapped.clear(state)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self.wrapped.log_config(hyperparameters)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        for name, value in metrics.items():
            self._log("log_scalar", name, value, step)

    def log_text(self, text: str, name: str = "Text", step: int | None = None) -> None:
        self._log("log_string", name, text, step)

    def log_images(  # type: ignore[override]  # it takes no captions
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        masks: Any = None,
        mask_class_labels: Any = None,
        use_table: bool = True,
    ) -> None:
        import torch

        from destinations.media import iter_images

        for index, one in enumerate(iter_images(images, channels_last)):
            pixels = torch.as_tensor(one.array)
            pixels = pixels[None] if pixels.ndim == _IMAGE_DIMENSIONS - 1 else pixels.permute(2, 0, 1)
            self._log("log_image", f"{name}/{index}" if index else name, pixels / 255, step)

    def log_audio(  # type: ignore[override]  # it takes no caption
        self, audio: Any, sample_rate: int, name: str = "Audio", step: int | None = None
    ) -> None:
        self._log("log_audio", name, (_tensor(audio), sample_rate), step)

    def log_video(  # type: ignore[override]  # it takes no caption
        self, video: Any, fps: float | None = None, name: str = "Video", step: int | None = None
    ) -> None:
        if hasattr(video, "shape"):  # Encoded videos are for others.
            self._log("log_video", name, _tensor(video), step)

    def log_histogram(
        self, values: Any, name: str = "Histogram", step: int | None = None, bins: Any = 64
    ) -> None:
        self._log("log_histogram", name, _tensor(values), step)

    def log_point_cloud(  # type: ignore[override]  # it takes no caption
        self, points: Any, name: str = "Points", step: int | None = None, colors: Any = None
    ) -> None:
        cloud = _tensor(points)
        self._log("log_point_cloud", name, cloud if cloud.ndim == _CLOUD_DIMENSIONS else cloud[None], step)

    def batch_end(self, state: State, logger: Any) -> None:
        self._write()

    def flush(self) -> None:
        self._write()

    def post_close(self) -> None:
        self._write()
        for phase in list(self._waiting):
            self._write_waiting(phase)


def _tensor(value: Any) -> Any:
    import torch

    return torch.as_tensor(value).detach().cpu()


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
