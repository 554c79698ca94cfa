"""The records that are no metrics: hyperparameters, tables, texts, media, traces.

Runs in the training thread, as all of a logger does.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex

from . import checks
from ._delivery import Delivery
from .config import plain_config, safe_text
from .errors import EngineClosedError, RecordError
from .host_values import short
from .redaction import redact, redact_table, redact_text
from .state import State

__all__ = ["RecordLogger", "whole_step"]


class RecordLogger:
    """What a `Logger` has for records that are no metrics; each is checked at the call, before any destination sees it."""

    _state: State
    _delivery: Delivery
    _prefix: str
    _is_stopped: bool
    _has_detour: bool
    _may_put_off: bool
    is_busy: bool

    def log_hyperparameters(self, parameters: Any) -> None:
        """Logs hyperparameters: a dict, attrs class, dataclass, Namespace, pydantic model or OmegaConf, nested as it is.

        Secrets are taken out by name and by look. A later call adds to an earlier one.

        Raises:
            TypeError: the value is no such thing.
            EngineClosedError: the run is closed.
        """
        self._record(
            "log_hyperparameters",
            "",
            (parameters,),
            lambda given: (redact(plain_config(given)),),
            may_wait=False,
        )

    def log_table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        name: str = "Table",
        step: int | None = None,
    ) -> None:
        """Logs a table; secrets are taken out of its cells, and of a column that is named like one.

        Args:
            columns: the names of the columns.
            rows: for each row, a value for each column.
            name: the name of the table.
            step: as for `log_metrics`.

        Raises:
            RecordError: a row has another length than the header.
            EngineClosedError: the run is closed.
        """
        name, step = self._name(name), self._step(step)

        def prepare(columns: Any, rows: Any) -> tuple[Any, ...]:
            checks.check_table(columns, rows, name)
            host_rows = [[self._delivery.to_host(value) for value in row] for row in rows]
            return *redact_table(list(columns), host_rows), name, step

        self._record("log_table", name, (columns, rows), prepare)

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        masks: Mapping[str, Any] | None = None,
        mask_class_labels: Mapping[int, str] | None = None,
        use_table: bool = True,
    ) -> None:
        """Logs images.

        Args:
            images: one array or tensor, `(H, W)`, `(C, H, W)` or `(N, C, H, W)`, uint8 or float in [0, 1], with 1, 3 or 4
                channels; or a list of them, of PIL images, or of paths.
            name: the name of the images.
            channels_last: the shapes are `(H, W, C)` and `(N, H, W, C)`.
            step: as for `log_metrics`.
            masks: by name, an integer array `(H, W)` or `(N, H, W)` of class indices for the images, or a list of them.
            mask_class_labels: what each class index means.
            use_table: for destinations that can show images either way, to show them in a table.

        Raises:
            RecordError: something is no image, or a mask has another size than its image.
            EngineClosedError: the run is closed.
        """
        name, step = self._name(name), self._step(step)
        to_host = self._delivery.to_host
        given: Any = mask_class_labels

        def prepare(images: Any, masks: Any) -> tuple[Any, ...]:
            labels = given and redact(
                {
                    index: label if isinstance(label, str | int | float) else safe_text(label)
                    for index, label in given.items()
                }
            )
            checks.check_images(images, name, channels_last, masks)
            masks = None if masks is None else {key: to_host(mask) for key, mask in masks.items()}
            return to_host(images), name, channels_last, step, masks, labels, use_table

        self._record("log_images", name, (images, masks), prepare)

    def log_text(self, text: str, name: str = "Text", step: int | None = None) -> None:
        """Logs a text; secrets are taken out of it.

        Raises:
            RecordError: it is no string.
            EngineClosedError: the run is closed.
        """
        name, step = self._name(name), self._step(step)

        def prepare(text: Any) -> tuple[Any, ...]:
            checks.check_text(text, name)
            return redact_text(text), name, step

        self._record("log_text", name, (text,), prepare)

    def log_audio(self, audio: Any, sample_rate: int, name: str = "Audio", step: int | None = None) -> None:
        """Logs a sound.

        Args:
            audio: `(samples,)` or `(channels, samples)`, float in [-1, 1] or int16; or the path or bytes of a WAV file.
            sample_rate: samples per second.
            name: the name of the sound.
            step: as for `log_metrics`.

        Raises:
            RecordError: the shape or the sample rate is none.
            EngineClosedError: the run is closed.
        """
        name, step = self._name(name), self._step(step)

        def prepare(audio: Any) -> tuple[Any, ...]:
            checks.check_audio(audio, sample_rate, name)
            return self._delivery.to_host(audio), int(sample_rate), name, step

        self._record("log_audio", name, (audio,), prepare)

    def log_video(
        self, video: Any, fps: float | None = None, name: str = "Video", step: int | None = None
    ) -> None:
        """Logs a video.

        Args:
            video: frames `(T, C, H, W)`, uint8 or float in [0, 1]; or the path or bytes of a video file.
            fps: frames per second; needed for frames.
            name: the name of the video.
            step: as for `log_metrics`.

        Raises:
            RecordError: the frames have another shape, or no rate.
            EngineClosedError: the run is closed.
        """
        name, step = self._name(name), self._step(step)

        def prepare(video: Any) -> tuple[Any, ...]:
            checks.check_video(video, fps, name)
            return self._delivery.to_host(video), fps, name, step

        self._record("log_video", name, (video,), prepare)

    def log_histogram(
        self, values: Any, name: str = "Histogram", step: int | None = None, bins: int | Sequence[float] = 64
    ) -> None:
        """Logs how values are distributed.

        Args:
            values: numbers in any shape; or `BinnedValues`, where only counts and edges are known.
            name: the name of the histogram.
            step: as for `log_metrics`.
            bins: how many bins of equal width, or their rising edges; nothing to `BinnedValues`, which have theirs.

        Raises:
            RecordError: there are no values, or the bins are none.
            EngineClosedError: the run is closed.
        """
        name, step = self._name(name), self._step(step)
        to_host = self._delivery.to_host

        def prepare(values: Any) -> tuple[Any, ...]:
            checks.check_histogram(values, bins, name)
            return to_host(values), name, step, to_host(bins)

        self._record("log_histogram", name, (values,), prepare)

    def log_point_cloud(
        self, points: Any, name: str = "Points", step: int | None = None, colors: Any = None
    ) -> None:
        """Logs points in space.

        Args:
            points: `(N, 3)`, or `(B, N, 3)` for several clouds; x, y, z.
            name: the name of the points.
            step: as for `log_metrics`.
            colors: `(N, 3)` or `(N, 4)`, with B where the points have it; uint8 or float in [0, 1]; red, green, blue
                and opacity.

        Raises:
            RecordError: a shape is another, or colours and points differ in number.
            EngineClosedError: the run is closed.
        """
        name, step = self._name(name), self._step(step)
        to_host = self._delivery.to_host

        def prepare(points: Any, colors: Any) -> tuple[Any, ...]:
            checks.check_point_cloud(points, colors, name)
            return to_host(points), name, step, to_host(colors)

        self._record("log_point_cloud", name, (points, colors), prepare)

    def log_traces(self, traces: Mapping[str, Any]) -> None:
        """Logs debugging traces: values of any kind by name; secrets are taken out of mappings, lists and strings.

        Raises:
            RecordError: they have no names.
            EngineClosedError: the run is closed.
        """
        prefix = self._prefix

        def prepare(traces: Any) -> tuple[Any, ...]:
            checks.check_traces(traces)
            return ({prefix + key: value for key, value in redact(traces).items()},)

        self._record("log_traces", "", (traces,), prepare, may_wait=False)

    def poll(self) -> None:
        """Delivers what has come from a device, without waiting; an engine calls it at each event."""
        if self.is_busy:
            try:
                self._delivery.poll()
            finally:
                self._refresh()

    def _record(
        self,
        action: str,
        name: str,
        given: tuple[Any, ...],
        prepare: Callable[..., tuple[Any, ...]],
        *,
        may_wait: bool = True,
    ) -> None:
        self._require_open(action)
        self.poll()

        def checked(*given: Any) -> tuple[Any, ...]:
            try:
                return prepare(*given)
            except (RecordError, TypeError) as error:
                if isinstance(error, RecordError) or action == "log_hyperparameters":
                    raise
                raise _unreadable(action, name, error) from error
            except Exception as error:  # the methods of a value that is no proper array, list or dict
                raise _unreadable(action, name, error) from error

        try:
            self._delivery.log_record(action, name, given, checked, may_wait=may_wait)
        finally:
            self._refresh()

    def _refresh(self) -> None:
        self.is_busy = self._delivery.is_busy
        is_hindered = bool(self._prefix or self._is_stopped or self.is_busy)
        self._has_detour = is_hindered or self._delivery.is_paced
        self._may_put_off = self._delivery.is_paced and not is_hindered

    def _name(self, name: Any) -> str:
        if not isinstance(name, str):
            raise RecordError(f"name must be a string, got {short(name)} ({type(name).__name__}).")
        return self._prefix + name

    def _step(self, step: int | None) -> int:
        return int(self._state.timestamp.batch) if step is None else whole_step(step)

    def _require_open(self, action: str) -> None:
        if self._is_stopped:
            raise EngineClosedError(
                f"{action} must be called before the run is closed, got called after. Make a new Trainer or Run."
            )


def whole_step(step: SupportsIndex) -> int:
    """Returns a step as Python's own integer."""
    if type(step) is int:
        return step
    try:
        return operator.index(step)
    except Exception:  # noqa: BLE001  # a value's own methods
        raise RecordError(
            f"step must be a whole number, got {short(step)} ({type(step).__name__})."
        ) from None


def _unreadable(action: str, name: str, error: Exception) -> RecordError:
    what = f"{action}({name!r})" if name else action
    return RecordError(
        f"{what} must get values that can be read, got {type(error).__name__}: {safe_text(error)}"
    )
