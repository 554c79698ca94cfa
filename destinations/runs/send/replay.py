"""`replay`: logs the content of a run folder to a destination again.

Metrics, hyperparameters, tables, images with masks, audio, video, histograms, texts, traces, point clouds and
files are passed to the methods of the destination in order of time, with their original steps. A
`RecordClock` gives the destination the original times.

Runs in the calling thread, and blocks until everything has been passed on.
"""

import contextlib
import inspect
import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from destinations.base import LoggerDestination
from destinations.history.snapshot import metric_columns, take_snapshot
from destinations.kinds import KINDS, kind_of
from destinations.kinds.artifacts import ARTIFACT
from destinations.kinds.line import Line
from destinations.run_directory.layout import SIDECAR, column_of, label_name, writer_path
from destinations.runs.content.sources import Item, ReadPosition, RewoundError, items_of, ranks_of
from destinations.runs.errors import RunNotFoundError
from destinations.runs.files import read_object_file, whole_of
from destinations.runs.record import is_alive
from destinations.runs.run import Run
from destinations.runs.streams import TRAINER, Stream, reported

__all__ = [
    "ReadPosition",
    "RecordClock",
    "ReplayReport",
    "RewoundError",
    "WriterFactory",
    "exception_of",
    "replay",
]

WriterFactory = Callable[[Run, int], Any]
"""Makes the destination of a rank of a named writer, which is given as a run of its own."""

_MAX_PROBLEMS = 100
# Metrics that are stored in a column of another name.
_NAMES = {column_of(name): name for name in ("step", "time")}
# Between two readings while following; longer if reading takes long.
_INTERVAL_SECONDS = 1.0
# Largest share of the time spent reading while following.
_SHARE_OF_READING = 0.1
# Flushed regularly, because a destination drops media when its queue is full.
_RECORDS_BETWEEN_FLUSHES = 100
_BYTES_BETWEEN_FLUSHES = 32 << 20


class RecordClock:
    """Clock of a destination during a replay: returns the original time of the current record.

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
    """Result of a replay.

    Attributes:
        rows: calls of `log_metrics`.
        values: values in these calls.
        records: number of other calls, by kind.
        unsupported: number of records skipped because the destination ignores their kind, by kind.
        missing: one message for each missing file of a record.
        failed: one message for each failure, at most 100.
        failures: number of failures.
        position: position reached in the run.
        is_over: the run has ended and was replayed completely.
        was_interrupted: Ctrl-C ended `follow`; everything read until then was passed on.
    """

    rows: int = 0
    values: int = 0
    records: Counter[str] = attrs.field(factory=Counter)
    unsupported: Counter[str] = attrs.field(factory=Counter)
    missing: list[str] = attrs.field(factory=list)
    failed: list[str] = attrs.field(factory=list)
    failures: int = 0
    position: ReadPosition = attrs.field(factory=ReadPosition)
    is_over: bool = False
    was_interrupted: bool = False


def replay(
    run: Run,
    destination: Any,
    *,
    clock: RecordClock | None = None,
    position: ReadPosition | None = None,
    follow: bool = False,
    abandoned: bool = False,
    make_rank_destination: Callable[[int], Any] | None = None,
    make_writer_destination: WriterFactory | None = None,
    wait: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> ReplayReport:
    """Logs the content of a run to a destination, from `init` to `post_close`.

    The destination must be new or closed. To give it the original times, pass it a `RecordClock`, and the
    same one here.

    A live run that is not followed ends as "preempted"; a run that was killed ends as "failed".

    Metrics of ranks other than 0 are named `rank1/loss`, metrics and records of named writers `eval/loss`,
    and abandoned rows `abandoned/step4.1a2b3c4d/loss` after their file; if metrics of rank 0 already begin
    like that, an underscore is added before the "/".

    Args:
        run: the run to replay.
        destination: the destination to log to.
        clock: the clock of the destination.
        position: position to start from, updated in place. Default: the beginning.
        follow: keep replaying until the run ends.
        abandoned: include rows abandoned when training resumed from an earlier step.
        make_rank_destination: makes a destination for a rank other than 0, which gets the metrics of that
            rank under their own names.
        make_writer_destination: makes a destination for a named writer, which gets all that the writer has
            logged under its own names, from `init` to `post_close`.
        wait: sleeps for a number of seconds.
        now: returns the time in seconds since 1970.

    Returns:
        What was passed on.

    Raises:
        RewoundError: with a position or `follow`: training resumed from an earlier step, so that rows passed
            on are no longer part of the run.
        BaseException: raised by `init` or `close` of the destination, or Ctrl-C, after the destination was
            closed.
    """
    report = ReplayReport(position=ReadPosition() if position is None else position)
    return _Replay(
        run,
        destination,
        clock or RecordClock(),
        report,
        report.position,
        now,
        abandoned=abandoned,
        make_rank_destination=make_rank_destination,
        make_writer_destination=make_writer_destination,
    ).run_all(follow=follow, wait=wait)


class _RankReplay:
    """The destination of one rank, with an engine of its own."""

    def __init__(self, name: str, rank: int, destination: Any) -> None:
        from events import Engine, Logger, State

        # Set explicitly: the environment of this process says nothing about the replayed run.
        size = rank + 1
        self.state = State(
            name, rank=rank, local_rank=rank, world_size=size, local_world_size=size, node_rank=0
        )
        self.destination = destination
        self.engine = Engine(self.state, Logger(self.state, [destination], raise_errors=True))
        self.step_and_epoch: tuple[int, int] | None = None


class _Replay:
    """State of one replay, of a run or of what one writer has written."""

    def __init__(
        self,
        run: Run,
        destination: Any,
        clock: RecordClock,
        report: ReplayReport,
        position: ReadPosition,
        now: Callable[[], float],
        *,
        abandoned: bool,
        make_rank_destination: Callable[[int], Any] | None,
        make_writer_destination: WriterFactory | None = None,
    ) -> None:
        self._path = run.record.path
        self._destination = destination
        self._clock = clock
        self._report = report
        self.position = position
        self._now = now
        self._about = _Facts.read(run)
        self._abandoned = abandoned
        self._of_rank = make_rank_destination
        self._of_writer = make_writer_destination
        # Those that have a destination of their own.
        self._writers: dict[str, _Replay] = {}
        self._main = _RankReplay(_name_inside(run.record.name), 0, destination)
        self._state = self._main.state
        self._ranks = {0: self._main}
        self._prefixes: dict[tuple[str, int, str], str] = {}
        self._last: dict[tuple[str, int, str], tuple[int | None, float | None]] = {}
        self._unflushed_records = self._unflushed_bytes = 0
        self._hyperparameters: dict[str, Any] = {}
        self._supports = {kind.name: _supports(destination, kind.method) for kind in KINDS}
        self._supports |= {
            "metrics": _supports(destination, "log_metrics"),
            ARTIFACT.name: bool(destination.can_upload_files()),
        }

    def run_all(self, *, follow: bool, wait: Callable[[float], None]) -> ReplayReport:
        try:
            self.begin()
            self._read_all(follow=follow, wait=wait)
        except BaseException as error:
            self.fail(error)
            raise
        self.end(is_over=self._report.is_over)
        return self._report

    def begin(self) -> None:
        self._clock.now = self._about.began_at
        self._main.engine.run_event("init")

    def fail(self, error: BaseException) -> None:
        """Closes the destinations, for which the run is unfinished; the error is raised to the caller."""
        for writer in self._writers.values():
            writer.fail(error)
        self._set_status(is_over=False)
        for one in reversed(self._ranks.values()):
            with contextlib.suppress(Exception):
                one.engine.close(error)

    def end(self, *, is_over: bool) -> None:
        """Closes the destinations."""
        for writer in self._writers.values():
            writer.end(is_over=is_over)
        self._set_status(is_over=is_over)
        for one in reversed(self._ranks.values()):
            one.state.status, one.state.exception = self._state.status, self._state.exception
            one.engine.close()

    def _read_all(self, *, follow: bool, wait: Callable[[float], None]) -> None:
        while True:
            started_at = self._now()
            # Determined before reading, so that the last records of a run that just ended are read.
            alive = _is_written(self._about.run, started_at)
            self.read(started_at if alive and follow else None)
            if not alive or not follow:
                self._report.is_over = not alive
                return
            self.flush()
            try:
                wait(max(_INTERVAL_SECONDS, (self._now() - started_at) / _SHARE_OF_READING))
            except KeyboardInterrupt:
                self._report.was_interrupted = True
                return
            self.renew(self._about.run)

    def read(self, settled_at: float | None) -> None:
        """Passes on what is new."""
        self._send_hyperparameters()
        problems: list[str] = []
        items = items_of(
            self._path,
            self.position,
            settled_at,
            abandoned=self._abandoned,
            writer=None if self._of_writer is None else TRAINER,
            problems=problems,
        )
        for item in items:
            self._send(item)
        if self._of_writer is not None:
            for run in self._about.run.writer_runs():
                self._read_writer(run, self._of_writer, settled_at, problems)
        for problem in problems:
            self._fail_with(problem)

    def _read_writer(
        self, run: Run, make: WriterFactory, settled_at: float | None, problems: list[str]
    ) -> None:
        """Passes on what is new of a named writer, to a destination of its own."""
        name = run.path.name
        writer = self._writers.get(name)
        if writer is None:
            writer = self._writers[name] = _Replay(
                run,
                make(run, 0),
                self._clock,
                self._report,
                ReadPosition(**self.position.writers.get(name, {})),
                self._now,
                abandoned=self._abandoned,
                make_rank_destination=lambda rank: make(run, rank),
            )
            writer.begin()
        writer.renew(run)
        with reported(Stream(self._path, name), problems=problems):
            writer.read(settled_at)
            self.position.writers[name] = attrs.asdict(writer.position)

    def renew(self, run: Run) -> None:
        """Takes the state that a run has now."""
        self._about = _Facts.read(run)

    def flush(self) -> None:
        """Waits until the destinations have delivered what they were given."""
        for one in self._ranks.values():
            one.destination.flush()
        for writer in self._writers.values():
            writer.flush()

    def _send_hyperparameters(self) -> None:
        found = self._about.run.hyperparameters
        if found and found != self._hyperparameters:
            self._hyperparameters = found
            self._attempt("hyperparameters", lambda: self._destination.log_hyperparameters(found))

    # One item.

    def _send(self, item: Item) -> None:
        if not self._supports.get(item.kind, False):
            self._report.unsupported[item.kind] += 1
            return
        if item.kind == "metrics":
            self._send_metrics(item)
            return
        step = self._move_to(item, self._main)
        folder = item.parent or writer_path(self._path, item.writer)
        prefix = self._prefix_of_writer(item)
        try:
            call = _call(folder, item, step, self._destination, self._state, prefix)
        except FileNotFoundError as error:
            self._report.missing.append(str(error))
            return
        except Exception as error:  # noqa: BLE001  # a corrupt record must not block the others
            self._note(item.kind, error)
            return
        if self._attempt(item.kind, call):
            self._report.records[item.kind] += 1
        self._unflushed_records += 1
        self._unflushed_bytes += sum(max(0, whole_of(line.get("size")) or 0) for line in item.lines)
        if (
            self._unflushed_records >= _RECORDS_BETWEEN_FLUSHES
            or self._unflushed_bytes >= _BYTES_BETWEEN_FLUSHES
        ):
            self._unflushed_records = self._unflushed_bytes = 0
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
        key = item.writer, item.rank, item.branch
        if self._last.get(key, ()) == (item.step, item.epoch):
            # A second row of the same step: state_dict() keeps a destination that merges the calls of a step
            # from merging them.
            one.destination.state_dict()
        self._last[key] = item.step, item.epoch
        if self._attempt("metrics", lambda: one.destination.log_metrics(metrics, step)):
            self._report.rows += 1
            self._report.values += len(item.metrics)

    def _rank_of(self, item: Item) -> tuple[_RankReplay, str]:
        """Returns the destination for the metrics of an item, and the prefix of their names."""
        one = None if item.writer else self._ranks.get(item.rank)
        if one is None and self._of_rank is not None and not item.writer:
            one = self._ranks[item.rank] = _RankReplay(
                self._state.run_name, item.rank, self._of_rank(item.rank)
            )
            one.engine.run_event("init")
        return one or self._main, self._prefix(item.writer, item.rank if one is None else 0, item.branch)

    def _prefix_of_writer(self, item: Item) -> str:
        return self._prefix(item.writer, 0, "")

    def _prefix(self, *key: Any) -> str:
        if key not in self._prefixes:
            self._prefixes[key] = self._prefix_of(*key)
        return self._prefixes[key]

    def _prefix_of(self, writer: str, rank: int, branch: str) -> str:
        parts = [writer] if writer else []
        parts += [f"rank{rank}"] if rank else []
        parts += ["abandoned", branch] if branch else []
        taken = _names_of_trainer(self._path) if parts else []
        while parts and any(name.startswith(f"{parts[0]}/") for name in taken):
            parts[0] += "_"
        return "".join(f"{part}/" for part in parts)

    def _move_to(self, item: Item, one: _RankReplay) -> int:
        """Sets clock and timestamp to those of the item; returns the step."""
        from events import Time, Timestamp

        if item.time is not None and math.isfinite(item.time):
            self._clock.now = item.time
        at = one.step_and_epoch or (0, 0)
        step = at[0] if item.step is None else item.step
        epoch = at[1] if item.epoch is None or not math.isfinite(item.epoch) else int(item.epoch)
        if (step, epoch) != one.step_and_epoch:
            one.step_and_epoch = step, epoch
            one.state.timestamp = Timestamp(epoch=Time(max(epoch, 0), "ep"), batch=Time(max(step, 0), "ba"))
        return step

    def _attempt(self, kind: str, call: Callable[[], object]) -> bool:
        try:
            call()
        except Exception as error:  # noqa: BLE001  # a rejected record must not block the others
            self._note(kind, error)
            return False
        return True

    def _note(self, kind: str, error: Exception) -> None:
        self._fail_with(f"{kind}: {type(error).__name__}: {error}")

    def _fail_with(self, text: str) -> None:
        self._report.failures += 1
        if len(self._report.failed) < _MAX_PROBLEMS:
            self._report.failed.append(text)

    # The end.

    def _set_status(self, *, is_over: bool) -> None:
        from events import RunStatus

        about = _Facts.read(self._about.run)
        if not is_over:
            self._state.status = RunStatus.PREEMPTED
            return
        if about.ended_at is not None:
            self._clock.now = about.ended_at
        status = about.run.status
        if status in {"interrupted", "preempted", "stopped"}:
            self._state.status = RunStatus(status)
        elif status in {"failed", "killed", "orphaned"} or (
            status == "running" and about.run.record.heartbeat_at
        ):
            self._state.status = RunStatus.FAILED
            self._state.exception = exception_of(about.exception or "Killed: the heartbeat stopped")
        else:
            self._state.status = RunStatus.COMPLETED


def _is_written(run: Run, now: float) -> bool:
    """Returns whether the trainer of a run, or one of its writers, is alive."""
    records = (one.record for one in (run, *run.writer_runs()))
    return any(is_alive(record.status, record.heartbeat_at, now) for record in records)


def _names_of_trainer(run_dir: Path) -> list[str]:
    if 0 not in ranks_of(run_dir):
        return []
    with take_snapshot(run_dir, 0) as snapshot:
        return metric_columns(snapshot)


def _name_inside(name: str) -> str:
    """Returns the name of a run, sanitized so that as part of a path it stays inside a folder."""
    parts = name.split("/")
    return label_name(name) if {"..", "."} & {*parts} or not parts[0] or "\0" in name else name


def _supports(destination: Any, method: str) -> bool:
    """Returns whether a destination has a method; those of the base class are marked `is_default`."""
    own = type(destination)
    found = getattr(own, method, None) or getattr(own, "log_record", None)
    return found is not None and not getattr(found, "is_default", False)


def exception_of(text: str) -> BaseException:
    """Returns an exception that prints as `text`, "Type: message"."""
    name, separator, rest = text.partition(": ")
    if not separator or not name.isidentifier():
        name, rest = "Exception", text
    kind: type[Exception] = type(name, (Exception,), {})
    return kind(rest)


# Records as calls.


def _call(
    run_dir: Path, item: Item, step: int, destination: Any, state: Any, prefix: str
) -> Callable[[], object]:
    """Returns the call that logs the records of an item; `prefix` is put before its name, if it has one."""
    kind = kind_of(name=item.kind)
    lines = [Line(run_dir, fields) for fields in item.lines]
    arguments = kind.replay(lines)
    name = f"{prefix}{lines[0].name}" if lines[0].name else ""
    if kind is ARTIFACT:
        return lambda: destination.upload_file(state, name, **arguments, overwrite=True)
    arguments |= {"name": name, "step": step, "caption": lines[0].text("caption")}
    arguments = {name: value for name, value in arguments.items() if "caption" not in name or value}
    method = getattr(destination, kind.method, None)
    if method is None:
        return lambda: destination.log_record(kind.method.removeprefix("log_"), arguments)
    taken = inspect.signature(method).parameters
    signature = inspect.signature(getattr(LoggerDestination, kind.method))
    known = {
        name: arguments[name]
        for name, one in signature.parameters.items()
        if name in arguments and (name in taken or one.kind is not one.KEYWORD_ONLY)
    }
    # By position as far as they go: a method may have other names for its arguments.
    bound = signature.bind(destination, **known)
    return lambda: method(*bound.args[1:], **bound.kwargs)


# State of the run.


@attrs.frozen
class _Facts:
    """Current state of a run, reloaded from its folder."""

    run: Run
    exception: str | None

    @classmethod
    def read(cls, run: Run) -> "_Facts":
        try:
            run = run.reload()
        except RunNotFoundError:
            # Deleted or moved meanwhile: keep the last known state.
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
