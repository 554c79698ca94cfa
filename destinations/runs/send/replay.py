"""`replay`: a run that was written is logged again, to any destination.

Everything that the folder of a run holds goes to the methods of the destination as it went there first: metrics, hyperparameters,
tables, images with their masks, sounds, videos, histograms, texts, traces, point clouds and files, in the order of their times,
with the steps that they had. A `RecordClock` is what tells a destination when that was.

Runs in the calling thread, and blocks until everything is handed on.
"""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from destinations.run_directory.layout import SIDECAR, column_of, label_name
from destinations.runs.errors import RunNotFoundError
from destinations.runs.files import file_inside, read_object_file, whole_of
from destinations.runs.media import (
    MOST_MEDIUM_BYTES,
    open_image,
    read_pixels,
    read_points,
    read_sound,
    read_table,
)
from destinations.runs.record import is_alive
from destinations.runs.run import Run
from destinations.runs.sources import Item, Position, RewoundError, items_of, ranks_of
from events import BinnedValues
from uploads.disk import read_regular

__all__ = [
    "Position",
    "RecordClock",
    "ReplayReport",
    "RewoundError",
    "cloud_of",
    "histogram_of",
    "image_of",
    "mask_of",
    "replay",
    "sound_of",
    "table_of",
]

Array = np.ndarray[Any, Any]

_MOST_SHOWN_AS_NAN = 1000


def image_of(run_dir: Path, line: dict[str, Any]) -> Array:
    """Returns the pixels of an image, `(H, W)` or `(C, H, W)`: uint8, or floats in the range that they were stretched from."""
    with open_image(file_inside(run_dir, line["path"])) as picture:
        pixels = np.asarray(picture if picture.mode in {"L", "RGB", "RGBA"} else picture.convert("RGBA"))
    if pixels.ndim == 3:  # noqa: PLR2004  # with channels
        pixels = np.moveaxis(pixels, -1, 0)
    elif len(line.get("shape") or ()) == 3:  # noqa: PLR2004  # one channel
        pixels = pixels[None]
    value_range = line.get("value_range")
    if value_range is None:
        return pixels
    low, high = map(float, value_range)
    values = low + pixels / 255.0 * (high - low)
    # Exactly, so that they are stretched to the same pixels again.
    values[pixels == 255] = high  # noqa: PLR2004  # the greatest byte
    return values


def mask_of(run_dir: Path, paths: dict[str, str]) -> Array:
    """Returns the class indices of a mask, `(H, W)`."""
    return read_pixels(file_inside(run_dir, paths["path"]))


def sound_of(run_dir: Path, line: dict[str, Any]) -> "Array | bytes":
    """Returns a sound as int16 `(samples,)` or `(channels, samples)`, or the bytes of a file that has other samples."""
    path, shape = file_inside(run_dir, line["path"]), line.get("shape")
    if shape is None:
        return read_regular(path, MOST_MEDIUM_BYTES)
    samples, _ = read_sound(path)
    return samples[:, 0] if len(shape) == 1 else samples.T


def cloud_of(run_dir: Path, line: dict[str, Any]) -> tuple[Array, Array | None]:
    """Returns points as float32 `(N, 3)`, and their colours as uint8 `(N, 3)` or `(N, 4)`, or None."""
    return read_points(file_inside(run_dir, line["path"]))


def histogram_of(line: dict[str, Any]) -> Any:
    """Returns a histogram by its counts and edges; one without a finite value as NaN."""
    if not line.get("counts"):
        return np.full(min(int(line.get("non_finite") or line.get("count") or 0), _MOST_SHOWN_AS_NAN), np.nan)
    moments = {name: line.get(name) for name in ("min", "max", "mean", "std")}
    return BinnedValues(
        line["counts"],
        line["edges"],
        count=line.get("count"),
        non_finite=int(line.get("non_finite") or 0),
        **moments,
    )


def table_of(run_dir: Path, line: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Returns columns and rows of a table, each value of the type of its column."""
    types = [str(column.get("type")) for column in line.get("columns", ())]
    return read_table(file_inside(run_dir, line["path"]), types)


_METHODS = {
    "metrics": "log_metrics",
    "image": "log_images",
    "audio": "log_audio",
    "video": "log_video",
    "point_cloud": "log_point_cloud",
    "table": "log_table",
    "histogram": "log_histogram",
    "text": "log_text",
    "traces": "log_traces",
}
_MOST_PROBLEMS = 100
# What a metric was called that has another name as a column.
_NAMES = {column_of(name): name for name in ("step", "time")}
# A pass over the files may take this share of the time.
_SHARE_OF_READING = 0.1
# A destination that drops media when it is far behind gets time to catch up.
_RECORDS_BETWEEN_FLUSHES = 100
_BYTES_BETWEEN_FLUSHES = 32 << 20


class RecordClock:
    """The time at which the record at hand was logged first: what a destination that is replayed to takes for the time.

    ```python
    clock = RecordClock()
    replay(run, TensorBoard("tb", clock=clock), clock=clock)
    ```

    A destination calls its clock in the thread that logs to it.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Returns seconds since 1970."""
        return self.now


@attrs.define
class ReplayReport:
    """What was handed on.

    Attributes:
        rows: calls of `log_metrics`.
        values: the values in them.
        records: how many calls for everything else, by kind.
        not_taken: of what the destination takes no notice, by kind.
        missing: files of records that are not there any more.
        failed: what the destination refused, and why; the first hundred.
        failures: how many there were.
        position: up to where the run was handed on.
        is_over: whether the run has ended, and everything of it was handed on.
        was_interrupted: whether Ctrl-C ended the following; everything until then was handed on.
    """

    rows: int = 0
    values: int = 0
    records: Counter[str] = attrs.field(factory=Counter)
    not_taken: Counter[str] = attrs.field(factory=Counter)
    missing: list[str] = attrs.field(factory=list)
    failed: list[str] = attrs.field(factory=list)
    failures: int = 0
    position: Position = attrs.field(factory=Position)
    is_over: bool = False
    was_interrupted: bool = False


def replay(
    run: Run,
    destination: Any,
    *,
    clock: RecordClock | None = None,
    position: Position | None = None,
    follow: bool = False,
    abandoned: bool = False,
    of_rank: Callable[[int], Any] | None = None,
    interval_seconds: float = 1.0,
    wait: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> ReplayReport:
    """Logs everything that a run holds to a destination, from its `init` to its `post_close`.

    The destination must be one that is closed. What it makes of the time is its own; give it a `RecordClock`, and the same one
    here, and it gets the original times.

    A run that is alive, and is not followed, ends as "preempted", which means that it will be continued. Of one that was killed,
    the end is a failure.

    Metrics of other ranks than 0 are called `rank1/loss`, and those that training left `abandoned/step4.1a2b3c4d/loss`, after
    the file that has them; where a metric of rank 0 begins like that, an underscore comes before the "/".

    Args:
        run: what was written.
        destination: where it goes.
        clock: the clock of the destination.
        position: what it has already; changed to what it has then. Default: nothing.
        follow: go on until the run ends.
        abandoned: whether rows go there, too, that training left when it went back to a checkpoint.
        of_rank: makes a destination for a rank other than 0, which then gets the metrics of that rank under their own names.
        interval_seconds: how long to wait before looking again; longer where looking takes long.
        wait: waits for some seconds.
        now: the time in seconds since 1970.

    Returns:
        What was handed on.

    Raises:
        RewoundError: with a position, or following: training went back to a checkpoint, and what was handed on is no more.
        BaseException: what `init` or `close` of the destination raised; or Ctrl-C, after the destination is closed.
    """
    report = ReplayReport(position=Position() if position is None else position)
    return _Replay(
        run, destination, clock or RecordClock(), report, now, abandoned=abandoned, of_rank=of_rank
    ).run_all(follow=follow, interval_seconds=interval_seconds, wait=wait)


class _Rank:
    """A destination that is handed the metrics of a rank, in a run of its own."""

    def __init__(self, name: str, rank: int, destination: Any) -> None:
        from events import Engine, Logger, State

        # Not what the environment says: this process is no rank of anything.
        size = rank + 1
        self.state = State(
            name, rank=rank, local_rank=rank, world_size=size, local_world_size=size, node_rank=0
        )
        self.destination = destination
        self.engine = Engine(self.state, Logger(self.state, [destination], raise_errors=True))
        self.place: tuple[int, int] | None = None


class _Replay:
    """One replay."""

    def __init__(
        self,
        run: Run,
        destination: Any,
        clock: RecordClock,
        report: ReplayReport,
        now: Callable[[], float],
        *,
        abandoned: bool,
        of_rank: Callable[[int], Any] | None,
    ) -> None:
        self._path = run.record.path
        self._destination = destination
        self._clock = clock
        self._report = report
        self._now = now
        self._about = _Facts.read(run)
        self._abandoned = abandoned
        self._of_rank = of_rank
        self._main = _Rank(_name_inside(run.record.name), 0, destination)
        self._state = self._main.state
        self._ranks = {0: self._main}
        self._prefixes: dict[tuple[int, str], str] = {}
        self._last: dict[tuple[int, str], tuple[int | None, float | None]] = {}
        self._waiting_records = self._waiting_bytes = 0
        self._hyperparameters: dict[str, Any] = {}
        self._takes = {kind: _takes(destination, method) for kind, method in _METHODS.items()}
        self._takes["artifact"] = bool(destination.can_upload_files())

    def run_all(
        self, *, follow: bool, interval_seconds: float, wait: Callable[[float], None]
    ) -> ReplayReport:
        self._clock.now = self._about.began_at
        try:
            self._main.engine.run_event("init")
            self._pass_on(follow=follow, interval_seconds=interval_seconds, wait=wait)
        except BaseException as error:
            # The destination hears that its run has not ended; what failed here is told the caller.
            self._set_status(is_over=False)
            for one in reversed(self._ranks.values()):
                with contextlib.suppress(Exception):
                    one.engine.close(error)
            raise
        self._set_status(is_over=self._report.is_over)
        for one in reversed(self._ranks.values()):
            one.state.status, one.state.exception = self._state.status, self._state.exception
            one.engine.close()
        return self._report

    def _pass_on(self, *, follow: bool, interval_seconds: float, wait: Callable[[float], None]) -> None:
        while True:
            started_at = self._now()
            # Asked before reading: what is written until a run has ended is read then.
            alive = is_alive(self._about.run.status, self._about.run.record.heartbeat_at, started_at)
            self._send_hyperparameters()
            settled_at = started_at if alive and follow else None
            for item in items_of(self._path, self._report.position, settled_at, abandoned=self._abandoned):
                self._send(item)
            if not alive or not follow:
                self._report.is_over = not alive
                return
            for one in self._ranks.values():
                one.destination.flush()
            try:
                wait(max(interval_seconds, (self._now() - started_at) / _SHARE_OF_READING))
            except KeyboardInterrupt:
                self._report.was_interrupted = True
                return
            self._about = _Facts.read(self._about.run)

    def _send_hyperparameters(self) -> None:
        found = self._about.run.hyperparameters
        if found and found != self._hyperparameters:
            self._hyperparameters = found
            self._attempt("hyperparameters", lambda: self._destination.log_hyperparameters(found))

    # --- one item --------------------------------------------------------------------------------------------------

    def _send(self, item: Item) -> None:
        if not self._takes.get(item.kind, False):
            self._report.not_taken[item.kind] += 1
            return
        if item.kind == "metrics":
            self._send_metrics(item)
            return
        step = self._move_to(item, self._main)
        try:
            calls = list(_calls(self._path, item, step, self._destination, self._state))
        except FileNotFoundError as error:
            self._report.missing.append(str(error))
            return
        except Exception as error:  # noqa: BLE001  # a damaged record does not keep the others back
            self._note(item.kind, error)
            return
        for call in calls:
            if self._attempt(item.kind, call):
                self._report.records[item.kind] += 1
        self._waiting_records += 1
        self._waiting_bytes += sum(max(0, whole_of(line.get("size")) or 0) for line in item.lines)
        if self._waiting_records >= _RECORDS_BETWEEN_FLUSHES or self._waiting_bytes >= _BYTES_BETWEEN_FLUSHES:
            self._waiting_records = self._waiting_bytes = 0
            self._destination.flush()

    def _send_metrics(self, item: Item) -> None:
        one, prefix = self._rank_of(item)
        step = self._move_to(item, one)
        metrics = item.metrics
        if not _NAMES.keys().isdisjoint(metrics):
            metrics = {_NAMES.get(name, name): value for name, value in metrics.items()}
        if item.epoch is not None and not float(item.epoch).is_integer():
            metrics = {**metrics, "epoch": item.epoch}
        if prefix:
            metrics = {f"{prefix}{name}": value for name, value in metrics.items()}
        key = item.rank, item.branch
        if self._last.get(key, ()) == (item.step, item.epoch):
            # Two rows of one step: a destination that joins calls of a step keeps apart what is before and after a checkpoint.
            one.destination.state_dict()
        self._last[key] = item.step, item.epoch
        if self._attempt("metrics", lambda: one.destination.log_metrics(metrics, step)):
            self._report.rows += 1
            self._report.values += len(item.metrics)

    def _rank_of(self, item: Item) -> tuple[_Rank, str]:
        """Returns who takes the metrics of an item, and what comes before their names."""
        one = self._ranks.get(item.rank)
        if one is None and self._of_rank is not None:
            one = self._ranks[item.rank] = _Rank(self._state.run_name, item.rank, self._of_rank(item.rank))
            one.engine.run_event("init")
        key = item.rank if one is None else 0, item.branch
        if key not in self._prefixes:
            self._prefixes[key] = self._prefix_of(*key)
        return one or self._main, self._prefixes[key]

    def _prefix_of(self, rank: int, branch: str) -> str:
        parts = [f"rank{rank}"] if rank else []
        parts += ["abandoned", branch] if branch else []
        taken = self._about.run.metric_names(0) if parts and 0 in ranks_of(self._path) else []
        while parts and any(name.startswith(f"{parts[0]}/") for name in taken):
            parts[0] += "_"
        return "".join(f"{part}/" for part in parts)

    def _move_to(self, item: Item, one: _Rank) -> int:
        """Moves clock and timestamp to where the run was."""
        from events import Time, Timestamp

        if item.time is not None and math.isfinite(item.time):
            self._clock.now = item.time
        at = one.place or (0, 0)
        step = at[0] if item.step is None else item.step
        epoch = at[1] if item.epoch is None or not math.isfinite(item.epoch) else int(item.epoch)
        if (step, epoch) != one.place:
            one.place = step, epoch
            one.state.timestamp = Timestamp(epoch=Time(max(epoch, 0), "ep"), batch=Time(max(step, 0), "ba"))
        return step

    def _attempt(self, kind: str, call: Callable[[], object]) -> bool:
        try:
            call()
        except Exception as error:  # noqa: BLE001  # one record that is refused does not keep the others back
            self._note(kind, error)
            return False
        return True

    def _note(self, kind: str, error: Exception) -> None:
        self._report.failures += 1
        if len(self._report.failed) < _MOST_PROBLEMS:
            self._report.failed.append(f"{kind}: {type(error).__name__}: {error}")

    # --- the end ---------------------------------------------------------------------------------------------------

    def _set_status(self, *, is_over: bool) -> None:
        from events import RunStatus

        about = _Facts.read(self._about.run)
        if not is_over:
            self._state.status = RunStatus.PREEMPTED
            return
        if about.ended_at is not None:
            self._clock.now = about.ended_at
        status = about.run.status
        if status in {"interrupted", "preempted"}:
            self._state.status = RunStatus(status)
        elif status in {"failed", "killed", "orphaned"} or (
            status == "running" and about.run.record.heartbeat_at
        ):
            self._state.status = RunStatus.FAILED
            self._state.exception = _exception_of(
                about.exception or "Killed: the run gave no more sign of life"
            )
        else:
            self._state.status = RunStatus.COMPLETED


def _name_inside(name: str) -> str:
    """Returns a name of a run that leads out of no folder that it is filled into."""
    parts = name.split("/")
    return label_name(name) if {"..", "."} & {*parts} or not parts[0] or "\0" in name else name


def _takes(destination: Any, method: str) -> bool:
    """Says whether a destination does anything with such records: what it leaves as it is in the base class is marked."""
    return not getattr(getattr(type(destination), method, None), "is_default", False)


def _exception_of(text: str) -> BaseException:
    """Returns an exception that is told as the one that ended the run."""
    name, separator, rest = text.partition(": ")
    if not separator or not name.isidentifier():
        name, rest = "Exception", text
    kind: type[Exception] = type(name, (Exception,), {})
    return kind(rest)


# --- records as calls ----------------------------------------------------------------------------------------------


def _calls(
    run_dir: Path, item: Item, step: int, destination: Any, state: Any
) -> Iterator[Callable[[], object]]:
    """Yields the calls that log a record again."""
    line = item.lines[0]
    name = str(line.get("name") or line.get("tag") or "")
    if item.kind == "image":
        yield _images_call(run_dir, item, name, step, destination)
    elif item.kind == "point_cloud":
        yield _points_call(run_dir, item, name, step, destination)
    elif item.kind == "audio":
        sound, rate = sound_of(run_dir, line), whole_of(line.get("sample_rate")) or 44100
        yield lambda: destination.log_audio(sound, rate, name, step)
    elif item.kind == "video":
        path = file_inside(run_dir, line["path"])
        yield lambda: destination.log_video(path, line.get("fps"), name, step)
    elif item.kind == "table":
        columns, rows = table_of(run_dir, line)
        yield lambda: destination.log_table(columns, rows, name, step)
    elif item.kind == "histogram":
        values = histogram_of(line)
        yield lambda: destination.log_histogram(values, name, step)
    elif item.kind == "text":
        yield lambda: destination.log_text(str(line.get("text", "")), name, step)
    elif item.kind == "traces":
        yield lambda: destination.log_traces(dict(line.get("traces") or {}))
    elif item.kind == "artifact":
        path = file_inside(run_dir, line["path"])
        yield lambda: destination.upload_file(state, name, path, overwrite=True)


def _images_call(run_dir: Path, item: Item, name: str, step: int, destination: Any) -> Callable[[], object]:

    images: Any = [image_of(run_dir, line) for line in item.lines]
    # Channels go back to where they were.
    is_last = [
        image.ndim == 3 and list(line.get("shape") or ()) == [*image.shape[1:], image.shape[0]]  # noqa: PLR2004
        for line, image in zip(item.lines, images, strict=True)
    ]
    channels_last = all(is_last)
    images = [
        _channels_last(image, as_array=channels_last) if last else image
        for last, image in zip(is_last, images, strict=True)
    ]
    mask_names = list(item.lines[0].get("masks") or {})
    masks = {
        mask: [mask_of(run_dir, line["masks"][mask]) for line in item.lines] for mask in mask_names
    } or None
    labels = item.lines[0].get("mask_class_labels")
    labels = None if labels is None else {int(index): label for index, label in labels.items()}
    return lambda: destination.log_images(
        images, name, channels_last, step, masks=masks, mask_class_labels=labels
    )


def _channels_last(image: Any, *, as_array: bool) -> Any:
    """Returns `(C, H, W)` as `(H, W, C)`; beside images that have their channels first, as one that says so itself."""
    import numpy as np

    moved = np.ascontiguousarray(np.moveaxis(image, 0, -1))
    if as_array or moved.dtype != np.uint8:
        return moved
    import PIL.Image

    return PIL.Image.fromarray(moved)


def _points_call(run_dir: Path, item: Item, name: str, step: int, destination: Any) -> Callable[[], object]:

    clouds = [cloud_of(run_dir, line) for line in item.lines]
    if len(clouds) == 1:
        points, colors = clouds[0]
    else:
        import numpy as np

        shades = [one for _, one in clouds if one is not None]
        points = np.stack([cloud for cloud, _ in clouds])
        colors = np.stack(shades) if len(shades) == len(clouds) else None
    return lambda: destination.log_point_cloud(points, name, step, colors)


# --- what the run says of itself -----------------------------------------------------------------------------------


@attrs.frozen
class _Facts:
    """How a run stands, read anew from its folder."""

    run: Run
    exception: str | None

    @classmethod
    def read(cls, run: Run) -> "_Facts":
        try:
            run = run.reload()
        except RunNotFoundError:
            # Deleted or moved meanwhile: what was known of it stays.
            return cls(run, None)
        exception = read_object_file(run.path / SIDECAR).get("exception")
        return cls(run, None if exception is None else str(exception))

    @property
    def began_at(self) -> float:
        return self.run.created_at or 0.0

    @property
    def ended_at(self) -> float | None:
        record = self.run.record
        return record.ended_at or record.heartbeat_at or record.updated_at
