"""The contract of a destination."""

import functools
import inspect
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from events import Callback, Destination, State, WriteRate, WriteSchedule

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LoggerDestination", "RecordDestination", "check_folder", "closed_state"]

_log = logging.getLogger("destinations")

F = TypeVar("F", bound=Callable[..., Any])


def _default(method: F) -> F:
    """Marks a method that does nothing, so that a logger knows which kinds a destination accepts."""
    method.__dict__["is_default"] = True
    return method


def _passed_on(method: Any) -> Any:
    """Returns a method with the same arguments that passes them to `log_record`."""
    signature, kind = inspect.signature(method), method.__name__.removeprefix("log_")
    optional = {one.name for one in signature.parameters.values() if one.kind is one.KEYWORD_ONLY}

    @functools.wraps(method, updated=())  # without the mark of `_default`
    def log(self: Any, *args: Any, **options: Any) -> None:
        bound = signature.bind(self, *args, **options)
        bound.apply_defaults()
        _, *arguments = bound.arguments.items()
        self.log_record(
            kind,
            {
                name: value
                for name, value in arguments
                if name not in optional or options.get(name) is not None
            },
        )

    return log


def _report_unopened(what: str, kind: str, owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return
    _log.error(
        "%s was never opened: what was logged to it is lost. Pass it to a Run or Trainer, "
        "as in Run(loggers=[%s(...)]), and log to that.",
        what,
        kind,
    )


class LoggerDestination(Callback):
    """The base class of destinations: a callback that receives records and files.

    ```python
    class Printer(LoggerDestination):
        def log_metrics(self, metrics, step=None):
            print(step, metrics)

    Trainer(..., loggers=[Printer(write_rate=WriteRate(every_steps=100))])
    ```

    Subclass it and override the methods you need; other records are ignored. A method
    `log_record(kind, arguments)` gets all kinds of records that have no method of their own. Methods and
    arguments have the names of Composer's class, so a destination written for Composer works here: change the
    import.

    **Threading.** Every method is called in the training thread, one call at a time. Anything that takes
    longer than a few microseconds belongs in a background thread or process, behind a bounded queue.

    **Values.** Metrics are Python's `float`, `int` and `bool`. Tensors are detached and in host memory. Every
    record has a step. Hyperparameters contain no secrets.

    **Ownership.** Arguments belong to the caller, who may change them when the call returns: copy what you
    keep, and don't change them yourself. A file may be gone when `upload_file` returns.

    **Errors.** Exceptions are counted and reported, and don't stop training. After ten failures in a row, the
    destination is paused for a while. For an invalid argument, raise `events.RecordError`: the caller gets
    it, and if it comes from `init`, the run doesn't start. If `init` raises anything else, the destination
    isn't open: only `close` and `post_close` follow.

    **After close.** `close` is called once, and `post_close` after it, even if `close` raised. Records may
    come until then, even from the `close` of other callbacks, and none after. Then the object may serve
    another run, beginning with `init`.

    **Ranks.** Each rank has its own object, which gets the events and records of that rank only; see
    `state.rank`. Never wait for another rank, which may be gone.

    **Rates.** `write_rate` sets how often metrics are written; the logger holds back metrics in between. It
    is an attribute, so a subclass needs no code for it: set it on the object or on the class, before a logger
    gets the destination. `should_write` decides, and may be overridden.

    **Set-up.** If `init` raises, the error is reported when the run begins and again when it ends, and
    training continues without the destination. With the attribute `require`, the run ends before training.

    Args:
        write_rate: how often it is written to; None for every time.
        require: whether the run stops if the destination cannot be set up.
    """

    write_rate: WriteRate | None = None
    require: bool = False
    write_schedule: WriteSchedule | None = None
    """Set by the logger that writes to this destination."""

    keeps_files_here = False
    """Whether uploaded files stay in a folder of this machine, so that the rules for local files apply."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Passes each kind of record without a method to `log_record`, if the class has that."""
        super().__init_subclass__(**options)
        if hasattr(cls, "log_record"):
            for name in set(dir(cls)) - {"log_record", "log_metrics", "log_hyperparameters"}:
                method = getattr(cls, name) if name.startswith("log_") else None
                if getattr(method, "is_default", False):
                    setattr(cls, name, _passed_on(method))

    def __init__(
        self, *args: Any, write_rate: WriteRate | None = None, require: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if require:
            self.require = True
        if write_rate is not None and not isinstance(write_rate, WriteRate):
            raise TypeError(
                f"write_rate must be a WriteRate, got {write_rate!r}. Write WriteRate(train_seconds=10)."
            )
        if write_rate is not None:
            self.write_rate = write_rate

    _unopened: "weakref.finalize[..., LoggerDestination] | None" = None

    def _keeps_early_records(self, what: str = "") -> None:
        """Reports at garbage collection or exit that records were logged without a run, unless one begins.

        For subclasses that keep records from before `init`.
        """
        if self._unopened is None:
            kind = type(self).__name__
            self._unopened = weakref.finalize(self, _report_unopened, what or kind, kind, os.getpid())

    def _run_begins(self) -> None:
        """Cancels the report of `_keeps_early_records`."""
        if self._unopened is not None:
            self._unopened.detach()
            self._unopened = None

    @_default
    def should_write(self, state: State) -> bool:
        """Returns whether metrics are written now or wait; called at the first record of a step.

        Args:
            state: the run, with the phase and timestamp of the record.
        """
        return self.write_schedule is None or self.write_schedule.is_due(state)

    def place(self) -> str:
        """Returns the location of the open run's records or files: a folder, a URI, a URL; "" for none.

        `Console` and `ProgressBar` show it at the end of a run.
        """
        return ""

    @_default
    def log_hyperparameters(self, hyperparameters: "dict[str, Any]") -> None:
        """Logs hyperparameters; each call adds to the earlier ones.

        Args:
            hyperparameters: nested dictionaries of plain values.
        """

    @_default
    def log_metrics(self, metrics: "Mapping[str, float]", step: int | None = None) -> None:
        """Logs the scalars of one call.

        Args:
            metrics: Python numbers by name, in the caller's order, including NaN and infinities.
            step: the step that they belong to; steps may repeat and decrease.
        """

    @_default
    def log_table(
        self,
        columns: "list[str]",
        rows: "list[list[Any]]",
        name: str = "Table",
        step: int | None = None,
        *,
        caption: str | None = None,
    ) -> None:
        """Logs a table.

        Args:
            columns: the names of the columns.
            rows: for each row, a value for each column.
            name: the name of the table; it may be used again with another step.
            step: the step that it belongs to.
            caption: a text that belongs to it. Like `captions` and `format` below, it is passed only if there
                is one, and only to a method with this argument.
        """

    @_default
    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        masks: "dict[str, Any] | None" = None,
        mask_class_labels: "dict[int, str] | None" = None,
        use_table: bool = True,
        *,
        captions: "Sequence[str] | None" = None,
    ) -> None:
        """Logs images.

        Args:
            images: an array or tensor `(H, W)`, `(C, H, W)` or `(N, C, H, W)`, uint8 or float in [0, 1], or a
                list of arrays, PIL images or paths.
            name: the name of the images.
            channels_last: shapes are `(H, W, C)` and `(N, H, W, C)`.
            step: the step that they belong to.
            masks: class indices by name, `(H, W)` or `(N, H, W)`, or a list of these.
            mask_class_labels: the meaning of each class index.
            use_table: show the images in a table, if the destination can do either.
            captions: a text for each image, "" for none.
        """

    @_default
    def log_text(self, text: str, name: str = "Text", step: int | None = None) -> None:
        """Logs a text.

        Args:
            text: the text.
            name: its name.
            step: the step that it belongs to.
        """

    @_default
    def log_audio(
        self,
        audio: Any,
        sample_rate: int,
        name: str = "Audio",
        step: int | None = None,
        *,
        caption: str | None = None,
    ) -> None:
        """Logs audio.

        Args:
            audio: `(samples,)` or `(channels, samples)`, float in [-1, 1] or int16; or the path or bytes of a
                WAV file.
            sample_rate: samples per second.
            name: its name.
            step: the step that it belongs to.
            caption: a text that belongs to it.
        """

    @_default
    def log_video(
        self,
        video: Any,
        fps: float | None = None,
        name: str = "Video",
        step: int | None = None,
        *,
        caption: str | None = None,
        format: str = "mp4",
    ) -> None:
        """Logs a video.

        Args:
            video: frames `(T, C, H, W)`, uint8 or float in [0, 1]; or the path or bytes of a video file.
            fps: frames per second, for frames.
            name: its name.
            step: the step that it belongs to.
            caption: a text that belongs to it.
            format: how frames are encoded, "mp4" or "gif"; a video file keeps its own.
        """

    @_default
    def log_histogram(
        self,
        values: Any,
        name: str = "Histogram",
        step: int | None = None,
        bins: "int | Sequence[float]" = 64,
    ) -> None:
        """Logs a histogram.

        Args:
            values: numbers in any shape; or `BinnedValues`, which has the counts and edges of the histogram
                and may be treated as an array.
            name: the name of the histogram.
            step: the step that it belongs to.
            bins: a number of bins of equal width, or rising edges.
        """

    @_default
    def log_point_cloud(
        self,
        points: Any,
        name: str = "Points",
        step: int | None = None,
        colors: Any = None,
        *,
        caption: str | None = None,
    ) -> None:
        """Logs a point cloud, or several.

        Args:
            points: `(N, 3)`, or `(B, N, 3)` for several clouds.
            name: the name of the points.
            step: the step that they belong to.
            colors: `(N, 3)` or `(N, 4)`, with B if the points have it; uint8 or float in [0, 1].
            caption: a text that belongs to them.
        """

    @_default
    def log_traces(self, traces: "dict[str, Any]") -> None:
        """Logs debugging traces.

        Args:
            traces: values of any kind by name.
        """

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Stores a file; copies or queues it before returning.

        A destination passes its own files to `logger.upload_file`, and must not accept them here.

        Args:
            state: the run.
            remote_file_name: the file's name in the store.
            file_path: the local file.
            overwrite: whether it may replace an older file of that name.
        """

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        """Downloads a file.

        Args:
            remote_file_name: the name given to `upload_file`.
            destination: the local path to write.
            overwrite: whether a local file may be replaced.
            progress_bar: whether to show a progress bar.

        Raises:
            NotImplementedError: this destination keeps no files.
            FileNotFoundError: it does not have this file.
            FileExistsError: the local file already exists.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps no files to download.")

    def may_drop_files(self, state: State, *remote_file_names: str) -> None:
        """Lets files that are not uploaded yet make room for newer ones.

        Args:
            state: the run.
            remote_file_names: the names given to `upload_file`, of files that belong together.
        """

    def delete_file(
        self, state: State, remote_file_name: str, *, after: Sequence[str] = (), then: Sequence[str] = ()
    ) -> None:
        """Deletes a file that this run has uploaded, without waiting for it.

        Args:
            state: the run.
            remote_file_name: the name given to `upload_file`.
            after: names of uploaded files that must be safe before; if one of them fails, nothing is deleted.
            then: names of uploaded files to delete next, once this one is gone.
        """

    def file_uri(self, remote_file_name: str) -> str | None:
        """Returns the URI of a file in a store, uploaded or not; None if files don't go to a store.

        Args:
            remote_file_name: the name given to `upload_file`.
        """
        return None

    def list_files(self, prefix: str) -> Sequence[str]:
        """Returns up to a thousand names of files in its store, of this run or another.

        Args:
            prefix: the beginning of the names given to `upload_file`.

        Raises:
            OSError: the store cannot be asked.
        """
        return ()

    def has_uploaded(self, remote_file_name: str) -> bool:
        """Returns whether others can read a file by now; the pointer to a sharded checkpoint waits for that.

        Args:
            remote_file_name: the name given to `upload_file`.

        Raises:
            OSError: it never will be.
        """
        return True

    def can_upload_files(self) -> bool:
        """Returns whether `upload_file` does anything; called before `init` too; never changes."""
        return False

    @_default
    def flush(self) -> None:
        """Passes on buffered records, without waiting for anything remote."""


class RecordDestination(LoggerDestination):
    """A destination with one method for all tables, texts, traces and media; the base of most of ours."""

    def log_record(self, kind: str, arguments: "dict[str, Any]") -> None:
        """Logs a record.

        Args:
            kind: the method without its "log_": "table", "images", "text", …
            arguments: the method's arguments by name; keyword-only ones only if given.
        """
        raise NotImplementedError


def closed_state(destination: Any) -> "dict[str, Any]":
    """Returns the state to pickle: a copy of a destination is closed, and another process may open it.

    Args:
        destination: one with a method `_forget`, which resets it to the closed state.
    """
    closed = object.__new__(type(destination))
    closed.__dict__.update(destination.__dict__)
    closed._forget()  # of our own classes
    closed.__dict__.pop("_unopened", None)
    state: dict[str, Any] = closed.__dict__
    return state


def check_folder(path: Path) -> None:
    """Checks that a folder is writable or can be created, without creating it.

    Raises:
        NotADirectoryError: the path or a parent is a file.
        PermissionError: not writable.
    """
    for folder in (path, *path.parents):
        # Another rank may create it meanwhile: `lexists` comes first, and only its result counts.
        if not os.path.lexists(folder):
            continue
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is a file")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to write to {folder}")
        return


if TYPE_CHECKING:
    _: Destination = LoggerDestination()
