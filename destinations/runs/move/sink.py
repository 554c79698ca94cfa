"""`DestinationSink`: logs the records of a run to destinations, with their steps, epochs and times."""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import attrs

from destinations.kinds import KINDS
from destinations.kinds.artifacts import ARTIFACT
from destinations.kinds.kind import Kind
from destinations.run_directory.layout import SIDECAR
from uploads.disk import read_json

from .stream import Logged, MoveReport, Record, Restart, SourceRun, Values

MakeDestination = Callable[[SourceRun, str, int], Any]
"""Makes the destination of a rank other than 0, or of a named writer. Takes the run or writer, the name of
the writer ("" for the trainer), and the rank."""

# Flushed regularly, because a destination drops media when its queue is full; a record counts as a fiftieth
# of the bytes at least.
_RECORDS_BETWEEN_FLUSHES = 50
_BYTES_BETWEEN_FLUSHES = 32 << 20


class RecordClock:
    """The clock of a destination during a replay: returns the original time of the current record.

    ```python
    clock = RecordClock()
    replay(run, TensorBoard("tb", clock=clock), clock=clock)
    ```

    A destination calls the clock in the thread that logs to it.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Returns seconds since 1970."""
        return self.now


class _Lane:
    """A destination with an engine of its own."""

    def __init__(self, about: SourceRun, rank: int, destination: Any) -> None:
        from events import Engine, Logger, State

        self.about, self.destination = about, destination
        # Set explicitly, because the environment of this process does not describe the run.
        size = rank + 1
        self.state = State(
            about.name, rank=rank, local_rank=rank, world_size=size, local_world_size=size, node_rank=0
        )
        self.logger = Logger(self.state, [destination], raise_errors=True, strict=True)
        self.engine = Engine(self.state, self.logger)
        self.step_and_epoch: tuple[int, int] | None = None
        self.hyperparameters: dict[str, Any] = {}


@attrs.define(eq=False, slots=False, repr=False)
class DestinationSink:
    """Logs a run to a destination, from `init` to `post_close`; a context manager that closes it.

    The report counts a failure for each record that the destination rejects, or accepts and can't deliver.
    Records of a kind that the destination ignores are counted as left out.

    If the run has several ranks or named writers, `make` gives each a destination of its own. Without it, the
    metrics of rank 1 are named `rank1/loss`, and the metrics and records of a writer `eval/loss`. If metrics
    of the trainer already begin like that, an underscore is added before the "/".

    Args:
        run: the run.
        destination: a destination that is new or closed.
        clock: the clock of the destinations.
        report: counts the records written.
        make: makes a destination for another rank or writer.
    """

    _run: SourceRun
    _destination: Any
    _clock: RecordClock
    _report: MoveReport
    _make: MakeDestination | None = None

    def __attrs_post_init__(self) -> None:
        destination = self._destination
        self._main = _Lane(self._run, 0, destination)
        self._lanes: dict[tuple[str, int], _Lane] = {}
        self._prefixes: dict[tuple[str, int], str] = {}
        self._last: dict[tuple[str, int], tuple[int | None, float | None]] = {}
        self._unflushed = 0
        self._supported = {kind.name for kind in KINDS if _supports(destination, kind.method)}
        self._supported -= set() if destination.can_upload_files() else {ARTIFACT.name}
        self._takes_metrics = _supports(destination, "log_metrics")

    def __enter__(self) -> Self:
        try:
            self._begin("", 0, self._main)
        except BaseException as error:
            self._fail(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._fail(error)
            return
        for lane in reversed(self._lanes.values()):
            self._end(lane)

    def start_training(self) -> None:
        """Tells the destination that training begins, so that a `Restart` replaces earlier rows."""
        self._main.engine.run_event("fit_start")

    def take(self, records: Iterable[Record]) -> None:
        """Logs records, then the hyperparameters of the run if they have changed."""
        for name in self._run.writers if self._make is not None else ():
            self._lane_of(name, 0)
        for record in records:
            self._take(record)
        for lane in self._lanes.values():
            found = lane.about.hyperparameters
            if lane.state.rank == 0 and found and found != lane.hyperparameters:
                lane.hyperparameters = found
                self._attempt("hyperparameters", functools.partial(lane.logger.log_hyperparameters, found))

    def flush(self) -> None:
        """Waits until the destinations have delivered everything."""
        for lane in self._lanes.values():
            lane.destination.flush()

    # Lanes.

    def _begin(self, writer: str, rank: int, lane: _Lane) -> _Lane:
        self._lanes[writer, rank] = lane
        self._clock.now = lane.about.created_at
        lane.engine.run_event("init")
        return lane

    def _end(self, lane: _Lane) -> None:
        from events import RunStatus

        about = lane.about
        if about.ended_at is not None:
            self._clock.now = about.ended_at
        lane.state.status = RunStatus(about.status or "preempted")
        if about.exception and about.status == "failed":
            lane.state.exception = exception_of(about.exception)
        run_dir = getattr(lane.destination, "run_dir", None)
        lane.engine.close()
        for what, count in _undelivered(lane.destination, run_dir).items():
            self._report.fail(f"{about.run_id}: {count} {what} could not be written", count)

    def _fail(self, error: BaseException) -> None:
        """Closes the destinations after an error, with the run marked as unfinished."""
        from events import RunStatus

        for lane in reversed(self._lanes.values()):
            lane.state.status = RunStatus.PREEMPTED
            with contextlib.suppress(Exception):
                lane.engine.close(error)

    def _lane_of(self, writer: str, rank: int) -> _Lane:
        """Returns the lane of a writer's rank; without `make`, always the main lane."""
        lane = self._lanes.get((writer, rank))
        if lane is None and self._make is not None:
            about = self._run.writers[writer] if writer else self._run
            lane = self._begin(writer, rank, _Lane(about, rank, self._make(about, writer, rank)))
        return lane or self._main

    def _prefix(self, lane: _Lane, writer: str, rank: int) -> str:
        """Returns the prefix for names; "" if the rank or writer has a lane of its own."""
        key = (writer, rank) if lane is self._main else ("", 0)
        if key not in self._prefixes:
            self._prefixes[key] = self._prefix_of(*key)
        return self._prefixes[key]

    def _prefix_of(self, writer: str, rank: int) -> str:
        parts = [writer] if writer else []
        parts += [f"rank{rank}"] if rank else []
        names = self._run.names() if parts else ()
        while parts and any(name.startswith(f"{parts[0]}/") for name in names):
            parts[0] += "_"
        return "".join(f"{part}/" for part in parts)

    # One record.

    def _take(self, record: Record) -> None:
        if isinstance(record, Restart):
            self._restart(record.step)
        elif isinstance(record, Values):
            self._log_values(record)
        elif record.kind.name not in self._supported:
            self._report.left_out[record.kind.name] += 1
        else:
            self._log(record)

    def _log_values(self, row: Values) -> None:
        if not self._takes_metrics:
            self._report.left_out["metrics"] += 1
            return
        lane = self._lane_of(row.writer, row.rank)
        prefix = self._prefix(lane, row.writer, row.rank)
        step, metrics = self._move_to(row, lane, row.epoch), row.metrics
        if row.epoch is not None and not float(row.epoch).is_integer():
            metrics = {**metrics, "epoch": row.epoch}
        if prefix:
            metrics = {f"{prefix}{name}": value for name, value in metrics.items()}
        key = row.writer, row.rank
        if self._last.get(key) == (row.step, row.epoch):
            # A second row of the same step. After state_dict(), a destination doesn't merge it into the
            # first.
            lane.destination.state_dict()
        self._last[key] = row.step, row.epoch

        def call() -> None:
            lane.logger.log_metrics(metrics, step)
            self._report.count(row)

        self._attempt("metrics", call)

    def _log(self, record: Logged) -> None:
        lane = self._lane_of(record.writer, 0)
        step = self._move_to(record, lane)
        name = f"{self._prefix(lane, record.writer, 0)}{record.name}" if record.name else ""

        def call() -> None:
            if (arguments := self._arguments_of(record)) is not None:
                _call(lane, record.kind, {**arguments, "name": name, "step": step})
                self._report.count(record)

        self._attempt(record.kind.name, call)
        self._unflushed += max(record.size, _BYTES_BETWEEN_FLUSHES // _RECORDS_BETWEEN_FLUSHES)
        if self._unflushed >= _BYTES_BETWEEN_FLUSHES:
            self._unflushed = 0
            lane.destination.flush()

    def _move_to(self, record: Values | Logged, lane: _Lane, epoch: float | None = None) -> int:
        """Sets the clock and the timestamp from the record; returns the step."""
        from events import Time, Timestamp

        if record.time is not None and math.isfinite(record.time):
            self._clock.now = record.time
        last_step, last_epoch = lane.step_and_epoch or (0, 0)
        step = last_step if record.step is None else record.step
        whole = last_epoch if epoch is None or not math.isfinite(epoch) else int(epoch)
        if (step, whole) != lane.step_and_epoch:
            lane.step_and_epoch = step, whole
            lane.state.timestamp = Timestamp(epoch=Time(max(whole, 0), "ep"), batch=Time(max(step, 0), "ba"))
        return step

    def _restart(self, step: int) -> None:
        from events import Time, Timestamp

        lane = self._main
        lane.destination.before_load(lane.state, lane.logger)
        lane.destination.load_state_dict({"time": 0.0})  # So that rows of that very step are replaced too.
        lane.destination.after_load(lane.state, lane.logger)
        lane.state.timestamp = Timestamp(batch=Time(max(0, step), "ba"))
        lane.destination.fit_start(lane.state, lane.logger)
        lane.step_and_epoch = None
        self._last.clear()

    def _arguments_of(self, record: Logged) -> Mapping[str, Any] | None:
        if not callable(record.arguments):
            return record.arguments
        try:
            return record.arguments()
        except FileNotFoundError as error:
            self._report.missing.append(str(error))
            return None

    def _attempt(self, kind: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  # a rejected record must not stop the others
            self._report.fail(f"{self._run.run_id}: {kind}: {type(error).__name__}: {error}")


def _call(lane: _Lane, kind: Kind, given: dict[str, Any]) -> None:
    from events import LiteralName

    if kind is ARTIFACT:
        # The name comes from the source, so braces in it are not placeholders.
        lane.logger.upload_file(LiteralName(given["name"]), given["file_path"], overwrite=True)
        return
    method = getattr(lane.logger, kind.method, None)
    if method is None:
        lane.logger.log_record(kind.method.removeprefix("log_"), given)
    else:
        known = inspect.signature(method).parameters
        method(**{key: value for key, value in given.items() if key in known})


def _supports(destination: Any, method: str) -> bool:
    """Returns whether a destination overrides a method; the base class marks its own with `is_default`."""
    own = type(destination)
    found = getattr(own, method, None) or getattr(own, "log_record", None)
    return found is not None and not getattr(found, "is_default", False)


def _undelivered(destination: Any, run_dir: Any) -> dict[str, int]:
    """Returns counts of accepted records that a destination could not deliver, by description."""
    counts = getattr(destination, "counts", None)
    whats = ("dropped_rows", "failed_rows", "dropped_records", "failed_records")
    found = {what.replace("_", " "): int(getattr(counts, what, 0) or 0) for what in whats}
    if errors := ", ".join(getattr(counts, "errors", {})):
        found = {f"{what} ({errors})": count for what, count in found.items()}
    lost = {} if run_dir is None else read_json(run_dir / SIDECAR).get("lost")
    found |= lost if isinstance(lost, dict) else {}
    return {what: count for what, count in found.items() if count}


def exception_of(text: str) -> BaseException:
    """Returns an exception that prints as `text`, "Type: message"."""
    name, separator, rest = text.partition(": ")
    if not separator or not name.isidentifier():
        name, rest = "Exception", text
    kind: type[Exception] = type(name, (Exception,), {})
    return kind(rest)
