"""`TimeLedger`: on what the time of a run is spent, second by second, and the spans of its trace.

The training thread charges each moment to one bucket. A thread of the ledger writes what has come together:
it also runs while training waits, and what it wrote is there after `kill -9`.
"""

import contextlib
import gc
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from events.callback import Callback
from events.event import Event
from events.logger.logger import Logger
from events.redaction import error_text
from events.state import State

from .device_clock import DeviceClock
from .folder import run_folder
from .growing_csv import GrowingCsv, cell_of

__all__ = ["TimeLedger"]

_log = logging.getLogger("events")

BUCKETS = (
    "start",
    "restore",
    "data",
    "batch",
    "forward",
    "backward",
    "optimizer",
    "evaluation",
    "checkpoint",
    "logging",
    "callbacks",
    "waiting",
    "garbage",
    "idle",
    "closing",
    "stopped",
)
_START, _RESTORE, _DATA, _BATCH, _FORWARD, _BACKWARD, _OPTIMIZER, _EVALUATION = range(8)
_CHECKPOINT, _LOGGING, _CALLBACKS, _WAITING, _GARBAGE, _IDLE, _CLOSING, _STOPPED = range(8, 16)

# A batch that is not divided, whose time is divided as that of the others.
_WHOLE = len(BUCKETS)
_PARTS = (_BATCH, _FORWARD, _BACKWARD, _OPTIMIZER)

# What training does from an event on, until the next.
_AFTER = {
    Event.BEFORE_LOAD: _RESTORE,
    Event.AFTER_LOAD: _START,
    Event.EPOCH_START: _DATA,
    Event.EPOCH_END: _DATA,
    Event.FIT_END: _IDLE,
}
# Within a batch.
_WITHIN = {
    Event.BEFORE_FORWARD: _FORWARD,
    Event.AFTER_LOSS: _BATCH,
    Event.BEFORE_BACKWARD: _BACKWARD,
    Event.AFTER_BACKWARD: _BATCH,
    Event.AFTER_TRAIN_BATCH: _OPTIMIZER,
}
_BEGIN_INSIDE = {Event.EVAL_BEFORE_ALL, Event.EVAL_START, Event.EVAL_STANDALONE_START, Event.PREDICT_START}
_END_INSIDE = {Event.EVAL_AFTER_ALL, Event.EVAL_END, Event.EVAL_STANDALONE_END, Event.PREDICT_END}

# A row is that long, or this share of the session so far, and is written so often while it grows.
_ROW_SECONDS = 0.5, 0.01, 60.0
_TICK_SECONDS = 0.02, 0.005, 1.0
# A tick that is late by this much, without the processor, is a process that was stopped.
_STOPPED_SECONDS = 0.3
_MAX_LOOKS = 100
# Of shorter batches, one is divided for so much time: what that costs, five microseconds, is 0.05 % of it.
_DIVIDED_NANOSECONDS = 10_000_000
_MAX_PENDING_SPANS = 100_000
# Spans of all batches until the first, then of ever fewer until the second.
_TRACE_BYTES = 3_000_000, 5_000_000
_MORE_TRACE_BYTES = 250_000
_MAX_SPAN_BYTES = 100_000_000
_JOIN_SECONDS = 5.0


def _within(limits: tuple[float, float, float], age: float) -> float:
    least, share, most = limits
    return min(max(age * share, least), most)


def _seconds_of_process() -> float:
    """Returns how long ago this process began; 0 where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        booted = float(Path("/proc/uptime").read_text().split()[0])
        return max(booted - int(fields[19]) / os.sysconf("SC_CLK_TCK"), 0.0)
    except (OSError, ValueError, IndexError):
        return 0.0


# Whether a ledger of this process has counted the time since the process began.
_has_counted_start = False


class TimeLedger(Callback):
    """Charges every moment of a session to one bucket, and keeps spans for a trace.

    ```python
    Trainer(..., callbacks=[TimeLedger()], loggers=[RunDirectory("runs/mine")])
    ```

    A `Trainer` has one unless `time_ledger=False` is given. `destinations runs time NAME` prints where the
    time of all sessions went, with goodput and what each fault cost; `destinations runs trace NAME` writes
    the spans for Perfetto.

    | bucket | the time |
    |---|---|
    | `start` | from the beginning of the process to the first batch, but for `restore` |
    | `restore` | loading a checkpoint, and going to its place in the data |
    | `data` | between two batches: reading, and moving it to the device |
    | `forward`, `backward`, `optimizer` | of a batch; `forward` has the loss |
    | `batch` | the rest of a batch; in a loop of your own without these events, all of it |
    | `evaluation` | evaluations and predictions |
    | `checkpoint` | the hooks of `CheckpointSaver` |
    | `logging` | calls of `log_metrics`, and the hooks of destinations |
    | `callbacks` | the hooks of all other callbacks |
    | `waiting` | collectives of the trainer, in which a rank waits for the others |
    | `garbage` | collections by Python's garbage collector |
    | `idle` | between `FIT_END` and the next event |
    | `closing` | from close to the end |
    | `stopped` | the process did not run: SIGSTOP, or a machine that slept |

    A nested bucket ends the outer one, so that they add up to the time of the session. With
    `DistributedDataParallel`, ranks wait for each other within `backward`.

    **Where.** `time/rank-N.csv` and `time/spans-N.csv` in the folder of the run; docs/format.md describes
    both. Without a `RunDirectory`, only the metrics are logged. A process that is killed loses at most 2 % of
    its session's last rows, and one second.

    **Metrics.** `time/data` and so on: the share of each bucket since the last time.

    **Short batches.** Of those of less than 10 ms, as few are divided into `forward`, `backward` and so on as
    keep the cost below 0.1 %; the time of the others is divided as theirs.

    **Devices.** The clock is the host's, which queues kernels and waits for them later. On CUDA the time of
    batches is divided into `batch`, `forward`, `backward` and `optimizer` as events on the device divide it,
    of which nothing waits; spans are those of the host.

    **Threading.** A daemon thread writes, from `INIT` to the end of the run.

    **Errors.** A file that cannot be written is reported once, and training continues.

    Args:
        metrics_seconds: how often the shares are logged; None for never.
        trace: whether spans of batches are kept, of all at first and of ever fewer in a long session, 5 MB
            at most. Those of `span` are kept in any case, up to 100 MB.
        clock: returns monotonic nanoseconds.

    Raises:
        ValueError: `metrics_seconds` is not positive.
    """

    folder_name = "time"
    """The folder in that of the run."""

    productive = ("batch", "forward", "backward", "optimizer")
    """The buckets in which a model is trained."""

    def __init__(
        self,
        metrics_seconds: float | None = 60.0,
        *,
        trace: bool = True,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        super().__init__()
        if metrics_seconds is not None and not metrics_seconds > 0:
            raise ValueError(f"metrics_seconds must be positive, or None for never, got {metrics_seconds!r}.")
        self._metrics_seconds = metrics_seconds
        self._keeps_trace = trace
        self._clock = clock
        self._writer: _Writer | None = None
        self._reset()

    def _reset(self) -> None:
        # `sum(totals) == since - begin`, but for the moment in which a bucket ends.
        self.totals = [0] * (len(BUCKETS) + 1)
        self.begin = self._since = self._clock()
        self._bucket = _START
        self._outer: list[int] = []
        self._thread_id = 0
        self._logged = list(self.totals)
        self._logged_at = self.begin
        self._has_batch_start = False
        self._is_traced = False
        self._batch_begin = 0
        # One batch in so many is divided.
        self._stride = 1
        self._is_divided = True
        self._device: DeviceClock | None = None
        self._hooks: dict[Any, tuple[Any, ...]] = {}
        self._hooks_within: dict[bool, dict[Any, tuple[Any, ...]]] = {True: {}, False: {}}
        # (bucket or name, begin, end), in nanoseconds.
        self.spans: deque[tuple[int | str, int, int]] = deque(maxlen=_MAX_PENDING_SPANS)
        self.spans_made = 0
        self._open_spans: list[str] = []

    # Buckets: training thread.

    def switch(self, bucket: int) -> int:
        """Ends the bucket that time is charged to, begins another, and returns the one that has ended."""
        now = self._clock()
        # In this order, for garbage may be collected within, which calls this again, and `snapshot` looks on.
        since, self._since = self._since, now
        before, self._bucket = self._bucket, bucket
        self.totals[before] += now - since
        if self._is_traced and before != bucket:
            self.spans.append((before, since, now))
            self.spans_made += 1
        return before

    def snapshot(self) -> tuple[int, list[int]]:
        """Returns now, and the nanoseconds of each bucket until now; any thread may call it."""
        for _ in range(_MAX_LOOKS):
            totals, since, bucket, now = list(self.totals), self._since, self._bucket, self._clock()
            # Otherwise the training thread is ending a bucket; or was interrupted there, once, by Ctrl-C.
            if sum(totals) == since - self.begin:
                break
        totals[bucket] += max(now - since, 0)
        return max(now, since), totals

    def divided(self, totals: list[int], before: list[int]) -> list[float]:
        """Returns by how much each bucket has grown; the time of whole batches is divided as that of others.

        Args:
            totals: of a snapshot.
            before: of an earlier one.
        """
        grown: list[float] = [after - earlier for after, earlier in zip(totals, before, strict=True)]
        whole = grown.pop()
        known = grown if any(grown[part] for part in _PARTS) else totals
        parts: dict[int, float] = {part: known[part] for part in _PARTS}
        if self._device is not None and any(self._device.nanoseconds.values()):
            # What the host waited for at one place, the device did at another.
            parts = self._device.nanoseconds.copy()
            whole += sum(grown[part] for part in _PARTS)
            for part in _PARTS:
                grown[part] = 0.0
        every = sum(parts.values())
        for part, nanoseconds in parts.items():
            grown[part] += whole * nanoseconds / every if every else whole * (part == _BATCH)
        return grown

    def timed(self, function: Callable[..., Any], bucket: str) -> Callable[..., Any]:
        """Returns a function that charges its time to a bucket."""
        index, switch = BUCKETS.index(bucket), self.switch

        def charge(*args: Any, **kwargs: Any) -> Any:
            before = switch(index)
            try:
                return function(*args, **kwargs)
            finally:
                switch(before)

        return charge

    def charge_hook(
        self, callback: Callback, hook: Callable[..., Any], *, is_destination: bool
    ) -> Callable[..., Any]:
        """Returns a hook that charges its time to the bucket of its callback; for the engine."""
        bucket = "logging" if is_destination else getattr(type(callback), "time_bucket", "callbacks")
        return self.timed(hook, bucket)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Keeps the time of a block for the trace; see `Logger.span`."""
        begin, name = self._clock(), str(name)
        self._open_spans.append(name)
        try:
            yield
        finally:
            self._open_spans.remove(name)
            self.spans.append((name, begin, self._clock()))
            self.spans_made += 1

    def doing(self) -> dict[str, Any]:
        """Returns the bucket that time is charged to now, since when in seconds, and the open spans."""
        name = "batch" if self._bucket == _WHOLE else BUCKETS[self._bucket]
        seconds = (self._clock() - self._since) / 1e9
        return {"bucket": name, "seconds": round(seconds, 3), "spans": list(self._open_spans)}

    def hook_of(self, event: Event) -> Callable[[State, Logger], None] | None:
        """Returns what an event does to the ledger, or None; for the engine."""
        if event in _BEGIN_INSIDE:
            return self._begin_inside
        if event in _END_INSIDE:
            return self._end_inside
        bucket = _WITHIN.get(event, _AFTER.get(event))
        if bucket is None:
            hook: Callable[[State, Logger], None] | None = getattr(self, f"_{event.value}", None)
            return hook
        switch = self.switch

        def begin(_state: State, _logger: Logger) -> None:
            switch(bucket)
            if self._device is not None and bucket in _PARTS:
                self._device.mark(bucket)

        return begin if bucket != _DATA else self._end_batch

    def follow(self, hooks: dict[Any, tuple[Any, ...]]) -> None:
        """Takes the hooks of an engine, to leave out its own within batches that are not divided."""
        self._hooks = hooks
        within = {event: hooks[event] for event in _WITHIN}
        self._hooks_within = {True: within, False: {event: own[1:] for event, own in within.items()}}

    def _init(self, state: State, logger: Logger) -> None:
        self._begin(state)
        if state.device is not None and state.device.type == "cuda":
            self._device = DeviceClock(_PARTS)

    def _fit_start(self, state: State, logger: Logger) -> None:
        self._outer.clear()
        self.switch(_RESTORE if state.timestamp.batch else _START)

    def _before_dataloader(self, state: State, logger: Logger) -> None:
        if self._bucket != _DATA:
            self.switch(_DATA)

    def _batch_start(self, state: State, logger: Logger) -> None:
        self._has_batch_start = True
        batch: Any = state.timestamp.batch.value
        is_divided = batch % self._stride == 0
        self.switch(_BATCH if is_divided else _WHOLE)
        self._batch_begin = self._since
        if self._device is not None and is_divided:
            self._device.mark(_BATCH)
        if is_divided != self._is_divided:
            self._is_divided = is_divided
            self._hooks.update(self._hooks_within[is_divided])
        writer = self._writer
        self._is_traced = is_divided and writer is not None and writer.traces(batch // self._stride)

    def _batch_end(self, state: State, logger: Logger) -> None:
        self._end_batch(state, logger)
        if self._is_divided and self._has_batch_start:
            if self._device is not None:
                self._device.end()
            self._stride = _DIVIDED_NANOSECONDS // max(self._since - self._batch_begin, 1) + 1
        if self._metrics_seconds is not None and self._since - self._logged_at >= self._metrics_seconds * 1e9:
            self._log(logger)

    def _end_batch(self, state: State, logger: Logger) -> None:
        # A loop of one's own may tell of the end of batches alone.
        self.switch(_DATA if self._has_batch_start else _BATCH)

    def _begin_inside(self, state: State, logger: Logger) -> None:
        self._is_traced = self._writer is not None and self._writer.traces(0)
        self._outer.append(self.switch(_EVALUATION))

    def _end_inside(self, state: State, logger: Logger) -> None:
        self.switch(self._outer.pop() if self._outer else _IDLE)

    def _begin(self, state: State) -> None:
        global _has_counted_start  # noqa: PLW0603  # of the process
        self._thread_id = threading.get_ident()
        if not _has_counted_start:
            _has_counted_start = True
            earlier = max(int(_seconds_of_process() * 1e9) - (self._clock() - self.begin), 0)
            self.begin -= earlier
            self.totals[_START] += earlier
        gc.callbacks.append(self._on_garbage)
        folder = run_folder(state)
        if folder is not None:
            self._writer = _Writer(self, folder / self.folder_name, state, keeps_trace=self._keeps_trace)
            self._writer.start()

    def _on_garbage(self, phase: str, info: dict[str, int]) -> None:
        # The youngest generation takes microseconds.
        if info["generation"] and threading.get_ident() == self._thread_id:
            if phase == "start":
                self._before_garbage = self.switch(_GARBAGE)
            else:
                self.switch(self._before_garbage)

    def _log(self, logger: Logger) -> None:
        now, totals = self.snapshot()
        length = now - self._logged_at
        grown = self.divided(totals, self._logged)
        shares = zip(BUCKETS, grown, totals, strict=False)
        logger.log_metrics({f"time/{name}": more / length for name, more, total in shares if more or total})
        self._logged, self._logged_at = totals, now

    # The end: training thread.

    def close(self, state: State, logger: Logger) -> None:
        """Charges what follows to `closing`."""
        self.switch(_CLOSING)

    def post_close(self) -> None:
        """Writes the rest."""
        if self._on_garbage in gc.callbacks:
            gc.callbacks.remove(self._on_garbage)
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.stop()
        self._reset()


class _Writer:
    """The thread that writes the files of a ledger.

    Args:
        ledger: whose time it writes.
        folder: of the files; created.
        state: the run, for its step.
        keeps_trace: whether spans of batches are kept.
    """

    def __init__(self, ledger: TimeLedger, folder: Path, state: State, *, keeps_trace: bool) -> None:
        self._ledger = ledger
        self._folder = folder
        self._state = state
        self.stride = 1 if keeps_trace else 0
        """One in so many batches is traced; 0 for none."""
        # Wall time of nanosecond 0 of the ledger's clock.
        self._zero = time.time() - ledger.snapshot()[0] / 1e9
        self._session = self._zero + ledger.begin / 1e9
        self._begin, self._written = ledger.begin, [0] * len(ledger.totals)
        # Nanoseconds that were charged to another bucket while the process was stopped.
        self._moved = [0] * len(ledger.totals)
        self._rows: GrowingCsv | None = None
        self._spans: GrowingCsv | None = None
        self._span_bytes = 0
        self._next_stride_at = _TRACE_BYTES[0]
        self._spans_taken = 0
        self._left_out = 0
        self._has_failed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"time-ledger-{state.rank}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def traces(self, number: int) -> bool:
        """Returns whether the spans of a batch of this number are kept."""
        return self.stride > 0 and number % self.stride == 0

    def stop(self) -> None:
        """Writes the rest; waits five seconds at most."""
        self._stop.set()
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        ledger = self._ledger
        now, before = ledger.snapshot()
        woken, worked = time.monotonic(), time.process_time()
        is_last = False
        while not is_last:
            seconds = _within(_TICK_SECONDS, (now - ledger.begin) / 1e9)
            is_last = self._stop.wait(seconds)
            now, totals = ledger.snapshot()
            late, woken = time.monotonic() - woken - seconds, time.monotonic()
            worked, own = time.process_time(), time.process_time() - worked
            if late > _STOPPED_SECONDS and own < late / 10:
                self._move_to_stopped(int(late * 1e9), totals, before)
            before = totals
            try:
                self._write(now, totals)
            except OSError as error:
                if not self._has_failed:
                    self._has_failed = True
                    _log.warning("time ledger: could not write to %s: %s", self._folder, error_text(error))
        for one in (self._rows, self._spans):
            if one is not None:
                one.close()
        if self._left_out:
            _log.warning("time ledger: %d spans were not kept.", self._left_out)

    def _move_to_stopped(self, nanoseconds: int, totals: list[int], before: list[int]) -> None:
        """Charges time in which the process did not run to what it is, not to what it interrupted."""
        grown = [after - earlier for after, earlier in zip(totals, before, strict=True)]
        most = max(range(len(grown)), key=grown.__getitem__)
        moved = min(nanoseconds, grown[most])
        self._moved[most] -= moved
        self._moved[_STOPPED] += moved

    def _write(self, now: int, totals: list[int]) -> None:
        if self._rows is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            rank = self._state.rank
            self._rows = GrowingCsv(
                self._folder / f"rank-{rank}.csv", ",".join(("session,begin,end,step", *BUCKETS))
            )
        charged = [total + moved for total, moved in zip(totals, self._moved, strict=True)]
        seconds = [one / 1e9 for one in self._ledger.divided(charged, self._written)]
        times = (self._session, self._zero + self._begin / 1e9, self._zero + now / 1e9)
        cells = [*(f"{one:.3f}" for one in times), str(self._state.timestamp.batch.value)]
        cells += [f"{one:.4f}".rstrip("0").rstrip(".") if one else "" for one in seconds]
        is_full = (now - self._begin) / 1e9 >= _within(_ROW_SECONDS, (now - self._ledger.begin) / 1e9)
        self._rows.write(",".join(cells), is_last=is_full)
        if is_full:
            self._begin, self._written = now, charged
        self._write_spans()

    def _write_spans(self) -> None:
        ledger = self._ledger
        lines: list[str] = []
        # As many as there are now: training adds to them.
        for _ in range(len(ledger.spans)):
            name, begin, end = ledger.spans.popleft()
            self._spans_taken += 1
            is_own = isinstance(name, str)
            if is_own and self._span_bytes > _MAX_SPAN_BYTES:
                self._left_out += 1
                continue
            text = cell_of(name) if isinstance(name, str) else BUCKETS[name]
            lines.append(f"{self._zero + begin / 1e9:.6f},{(end - begin) // 1000},{text},{int(is_own)}\n")
        self._left_out = max(self._left_out, ledger.spans_made - self._spans_taken - len(ledger.spans))
        if not lines:
            return
        if self._spans is None:
            path = self._folder / f"spans-{self._state.rank}.csv"
            self._spans = GrowingCsv(path, "begin,microseconds,name,is_own")
        text = "".join(lines)
        self._spans.write(text[:-1], is_last=True)
        self._span_bytes += len(text)
        if self._span_bytes >= _TRACE_BYTES[1]:
            self.stride = 0
        elif self.stride and self._span_bytes >= self._next_stride_at:
            self.stride *= 2
            self._next_stride_at = self._span_bytes + _MORE_TRACE_BYTES
