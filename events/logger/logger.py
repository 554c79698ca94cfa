"""Where training code logs: one call here reaches every destination.

Runs in the training thread. `log_metrics` is the hot path: about a microsecond for ten numbers, plus what each
destination takes; everything else on this page may cost more.
"""

import logging
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from events.errors import EngineClosedError, RecordError
from events.names import format_name
from events.redaction import redact, redact_table, redact_text
from events.state import State

from . import checks
from .checks import check_file
from .delivery import Delivery
from .destination import Destination
from .device import DeviceCopies
from .faults import Faults
from .values import ARE_PLAIN, is_plain, plain_config, quick_host_metrics, safe_text, short

if TYPE_CHECKING:
    from events.callback import Callback

__all__ = ["Logger", "RecordLogger", "whole_step"]


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


_log = logging.getLogger("events")


class Logger(RecordLogger):
    """Hands what is logged to every destination.

    **Steps.** Where no `step` is given, it is the number of batches completed: a loss logged while batch 0 is trained has
    step 0; what a callback logs on `BATCH_END` after it has step 1.

    **Values.** Any value may be a function without arguments. It is called in this thread, at most once, and only where a
    destination is going to write what it returns. One that raises, or returns what cannot be logged, costs its own value;
    it is counted in `faults.value_counts`, and reported once. Values on a device are copied without waiting for it; they
    arrive once they have landed, in order, while the state says where the run stood at the call.

    **Rates.** A destination with a `write_rate` gets metrics when it is due; see `WriteRate`.

    **Errors.** A bad argument raises `RecordError` here, at the call; of several metrics, the good ones are logged all the
    same. A destination may raise it too, for what it cannot take, which the other destinations get all the same.
    Everything else that a destination raises does not come out: it is counted in `faults`, reported once per kind, and
    summed up at close.

    **Threading.** Call it from one thread, the one that trains. No call waits for a disk or a network, other than
    `upload_file`, which takes a copy, and `download_file`. No call waits for a device, other than `flush`, and one that
    finds too many copies on their way; see `DeviceCopies`.

    **Ownership.** What is given stays the caller's, who may change it as soon as the call returns.

    Args:
        state: the run; its timestamp gives the steps.
        destinations: one, or several.
        raise_errors: lets what a destination raises come out, for tests.
        name: stands before the name of each metric and record, with "/" between them.
        device_copies: how values come from a device.
    """

    def __init__(
        self,
        state: State,
        destinations: Destination | Iterable[Destination] | None = None,
        raise_errors: bool = False,
        *,
        name: str = "",
        device_copies: DeviceCopies = DeviceCopies(),  # noqa: B008  # frozen
    ) -> None:
        self._state = state
        self._destinations = _several(destinations)
        self._is_stopped = False
        self._prefix = _prefix("", name) if name else ""
        self.faults = Faults(raise_errors=raise_errors)
        self._delivery = Delivery(state, self._destinations, lambda: self.faults, device_copies)
        # Whether anything is on its way from a device; an attribute, because the engine looks at each event.
        self.is_busy = False
        # Callbacks that joined a run under way; an attribute, because the engine looks at each event.
        self.attached: tuple[Callback, ...] = ()
        # Whether `log_metrics` has more to do than to hand on numbers.
        self._has_detour = False
        # Whether a rate may hold numbers back, and nothing else has to be done.
        self._may_put_off = False
        self._refresh()

    @property
    def destinations(self) -> tuple[Destination, ...]:
        """Who is logged to."""
        return self._destinations

    @property
    def state(self) -> State:
        """The run that is logged."""
        return self._state

    def attach(self, callback: "Callback") -> None:
        """Lets a callback join a run under way: from the next event on it hears of all, before the others do.

        It is closed with the run, before the others, where nobody has detached it. What it raises goes to the caller of
        the event. A second time does nothing.

        Raises:
            EngineClosedError: the run is closed.
        """
        self._require_open("attach")
        self.detach(callback)
        self.attached = (*self.attached, callback)

    def detach(self, callback: "Callback") -> None:
        """Lets a callback leave that joined by `attach`; one that did not does nothing."""
        self.attached = tuple(one for one in self.attached if one is not callback)

    def log_metrics(  # noqa: C901  # the hot path: a function more would cost a tenth of it
        self, metrics: Mapping[str, Any], step: int | None = None
    ) -> None:
        """Logs scalars.

        Args:
            metrics: numbers by name: Python's, numpy's, tensors of one element on any device, or functions that return
                one. Nested mappings and TensorDicts are flattened, their names joined with "/".
            step: the step they belong to; the number of completed batches where none is given.

        Raises:
            RecordError: a value is no scalar; the others are logged.
            EngineClosedError: the run is closed.
        """
        if step is None:
            step = self._state.timestamp.batch.value  # type: ignore[assignment]
        elif type(step) is not int:
            step = whole_step(step)
        if self._has_detour or self.faults.streaks:
            self._take_detour(metrics, step)  # type: ignore[arg-type]
            return
        # All of this runs in C: a third of a microsecond for ten numbers. A function of its own would be half as much again.
        values: Mapping[str, Any] | None = metrics
        try:
            if ARE_PLAIN(map(type, metrics.values())):
                "".join(metrics)
            else:
                values = quick_host_metrics(metrics)
        except Exception:  # noqa: BLE001  # no mapping, a name that is no string: the long way says it better
            values = None
        if values is None:
            self._log_metrics_carefully(metrics, step)  # type: ignore[arg-type]
            return
        refusal = None
        for destination in self._destinations:
            try:
                destination.log_metrics(values, step)
            except RecordError as error:
                refusal = error
            except BaseException as error:  # noqa: BLE001  # a destination must not stop training
                self.faults.failed(destination, "log_metrics", error)
        if refusal is not None:
            raise refusal

    def _take_detour(self, metrics: Mapping[str, Any], step: int) -> None:
        """Looks for the shortest way beside the hot path: numbers in a namespace, or for which nobody is due."""
        if self.faults.streaks:
            pass
        elif self._may_put_off:
            if self._delivery.put_off(metrics, step):
                return
        elif not (self.is_busy or self._is_stopped or self._delivery.is_paced):
            values = metrics if is_plain(metrics) else quick_host_metrics(metrics)
            if values is not None:
                named = {self._prefix + name: value for name, value in values.items()}
                self._each("log_metrics", lambda destination: destination.log_metrics(named, step))
                return
        self._log_metrics_carefully(metrics, step)

    def _log_metrics_carefully(self, metrics: Mapping[str, Any], step: int) -> None:
        """Does what the hot path leaves out: devices, functions, rates, and destinations that have begun to fail."""
        self._require_open("log_metrics")
        if not isinstance(metrics, Mapping):
            raise RecordError(
                f"metrics must be a dict from name to number, got {short(metrics, 80)} ({type(metrics).__name__})."
            )
        self.poll()
        try:
            errors = self._delivery.log_metrics(metrics, self._prefix, step)
        finally:
            self._refresh()
        if errors:
            raise RecordError(" ".join(errors))

    def log_scalar(self, name: str, value: Any, step: int | None = None) -> None:
        """Logs one scalar; see `log_metrics`."""
        if not isinstance(name, str):
            raise RecordError(f"metric must have a string as its name, got {short(name)}.")
        self.log_metrics({name: value}, step)

    def upload_file(self, remote_file_name: str, file_path: Path | str, *, overwrite: bool = False) -> None:
        """Hands a file to every destination that takes files; their copy is theirs when the call returns.

        Both names may hold placeholders such as `{run_name}`, `{rank}`, `{epoch}` and `{batch}`; see `format_name`.

        Args:
            remote_file_name: what the file is called where it goes.
            file_path: where it is.
            overwrite: whether it may take the place of an older file of that name.

        Raises:
            FileNotFoundError: there is no such file, and a destination would have taken it.
            IsADirectoryError: it is a directory.
            RecordError: it is a pipe or a device, or a name is none.
            EngineClosedError: the run is closed.
        """
        name, path = self._file_names(remote_file_name, file_path)
        if self.has_file_upload_destination():
            try:
                is_folder, is_there = path.is_dir(), path.exists()
            except (OSError, ValueError) as error:
                raise RecordError(
                    f"file to upload as {name!r} must be one that can be read, got {str(path)!r:.200}: {error}."
                ) from error
            if is_folder:
                raise IsADirectoryError(
                    f"file to upload as {name!r} must be a file, got the directory {str(path)!r}. "
                    "Upload its files one by one, or an archive of it."
                )
            if not is_there:
                raise FileNotFoundError(f"file to upload as {name!r} must exist, got {str(path)!r}.")
            check_file(path, f"file to upload as {name!r}")
        self._each(
            "upload_file",
            lambda destination: destination.upload_file(self._state, name, path, overwrite=overwrite),
        )

    def download_file(
        self,
        remote_file_name: str,
        destination: str | Path,
        overwrite: bool = False,
        progress_bar: bool = True,
    ) -> None:
        """Brings a file back from the first destination that has it.

        Args:
            remote_file_name: what it is called there; placeholders as in `upload_file`.
            destination: the local path to write.
            overwrite: whether a file that is there already may be replaced.
            progress_bar: whether to show how far the download is.

        Raises:
            FileNotFoundError: no destination has it.
            FileExistsError: there is a local file already.
            RecordError: a name is none.
            EngineClosedError: the run is closed.
        """
        self._require_open("download_file")
        name, local = self._file_names(remote_file_name, destination)
        path = str(local)
        asked = [one for one in self._destinations if self._takes_files(one)]
        for one in asked:
            try:
                one.download_file(name, path, overwrite, progress_bar)
            except (NotImplementedError, FileNotFoundError):
                continue
            return
        names = ", ".join(type(one).__name__ for one in asked) or "none: no destination stores files"
        raise FileNotFoundError(f"file {name!r} must be in a destination, got asked for in {names}.")

    def _file_names(self, remote: Any, local: Any) -> tuple[str, Path]:
        """Returns the name of a file where it goes, and its path here, without placeholders."""
        if not isinstance(remote, str):
            raise RecordError(f"file must have a string as its name, got {short(remote)}.")
        try:
            text = os.fsdecode(local)
        except Exception:  # noqa: BLE001  # a value's own methods
            raise RecordError(f"file {remote!r:.200} must have a path, got {short(local)}.") from None
        if "\0" in text:
            raise RecordError(f"file {remote!r:.200} must have a path without NUL, got {text!r:.200}.")
        return format_name(remote, self._state), Path(format_name(text, self._state))

    def has_file_upload_destination(self) -> bool:
        """Says whether `upload_file` reaches anybody."""
        return any(self._takes_files(destination) for destination in self._destinations)

    def _takes_files(self, destination: Destination) -> bool:
        try:
            return destination.can_upload_files()
        except BaseException as error:  # noqa: BLE001  # a destination must not stop training
            self.faults.failed(destination, "can_upload_files", error)
            return False

    def flush(self) -> None:
        """Makes every destination hand on what it holds back.

        What waits for a destination to be due is written before, and what is on its way from a device is waited for, until
        the deadline of `device_copies`.
        """
        self._require_open("flush")
        self.settle()
        self._each("flush", lambda destination: destination.flush())

    @contextmanager
    def namespace(self, name: str) -> Iterator[None]:
        """Puts a name before the names of all metrics and records that are logged in a `with` block.

        Blocks may be nested: inside `namespace("eval")` and `namespace("clean")`, "loss" is "eval/clean/loss".
        Hyperparameters and files keep their names.

        Raises:
            RecordError: the name is no string, or empty.
        """
        before = self._prefix
        self._prefix = _prefix(before, name)
        self._refresh()
        try:
            yield
        finally:
            self._prefix = before
            self._refresh()

    def land(self) -> None:
        """Waits for what is on its way from a device, and delivers it; until the deadline of `device_copies`."""
        if self.is_busy:
            try:
                self._delivery.land()
            finally:
                self._refresh()

    def settle(self, *, is_last: bool = False) -> None:
        """Writes what waits for a destination to be due, and waits for what is on its way from a device.

        Args:
            is_last: nothing comes later: what is not there at the deadline is given up, and counted.
        """
        try:
            self._delivery.write_all()
            self._delivery.land(is_last=is_last)
        finally:
            self._refresh()

    def stop(self) -> None:
        """Refuses whatever is logged from now on; an engine calls it when its destinations are closed."""
        self._is_stopped = True
        self._refresh()

    def report_faults(self) -> None:
        """Says, once the run is over, what the destinations did wrong, if anything."""
        for line in self.faults.summary(self._destinations):
            _log.warning("%s", line)
        if lost := self._delivery.lost_values:
            _log.warning("%s values were lost on their way from a device.", f"{lost:,}")

    @property
    def lost_values(self) -> int:
        """How many values never came from their device: its ring was full, it failed, or the deadline passed."""
        return self._delivery.lost_values

    def _each(self, action: str, call: Callable[[Destination], None]) -> None:
        self._require_open(action)
        refusals = [self.faults.attempt(destination, action, call) for destination in self._destinations]
        for refusal in refusals:
            if refusal is not None:
                raise refusal


def _prefix(before: str, name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise RecordError(f'namespace must be a name, got {short(name)}. Write namespace("train").')
    return f"{before}{name}/"


def _several(destinations: Any) -> tuple[Destination, ...]:
    """Returns the destinations as a tuple, and refuses what is none."""
    if destinations is None:
        return ()
    several = tuple(destinations) if isinstance(destinations, list | tuple | set) else (destinations,)
    for destination in several:
        if isinstance(destination, type) or not hasattr(destination, "log_metrics"):
            hint = (
                f"Write {destination.__name__}(...)."
                if isinstance(destination, type)
                else "See LoggerDestination."
            )
            raise TypeError(f"logger destination must be a LoggerDestination, got {destination!r}. {hint}")
    return several
