"""`TimeLedger`: charges every second of a run to a bucket, and keeps the spans of its trace.

The training thread charges each moment to one bucket. A background thread writes the totals (`time_files`);
it also runs while training waits, and its files survive `kill -9`.
"""

import contextlib
import functools
import gc
import itertools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from events.callback import Callback
from events.event import Event
from events.logger.logger import Logger
from events.state import Phase, State

from .folder import run_folder
from .time_files import TimeFiles

__all__ = ["TimeLedger", "seconds_of_process"]

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

# An undivided batch; its time is divided as in other batches.
_WHOLE = len(BUCKETS)
_PARTS = (_BATCH, _FORWARD, _BACKWARD, _OPTIMIZER)

# The bucket from an event on, until the next.
_AFTER = {
    Event.BEFORE_LOAD: _RESTORE,
    Event.AFTER_LOAD: _START,
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
# Events that begin a span in the trace.
_EVALUATES = {Event.EVAL_START, Event.PREDICT_START}

# Of shorter batches, one per interval is divided; its cost, some 4 µs, is 0.02 % of the interval.
_SHORT_NANOSECONDS, _DIVIDED_NANOSECONDS = 5_000_000, 25_000_000
_MAX_LOOKS = 100
_MAX_PENDING_SPANS = 100_000
_MAX_PENDING_STEPS = 1000
# Shorter spans are only kept in a traced batch.
_LONG, _RARE = 1_000_000_000, 1_000_000
_LONG_ENOUGH = [_LONG] * (_WHOLE + 1)
for _one in (_START, _RESTORE, _EVALUATION, _CHECKPOINT, _GARBAGE, _IDLE, _CLOSING):
    _LONG_ENOUGH[_one] = _RARE
_ANY = [0] * (_WHOLE + 1)
_NEVER = 1 << 62
# Batches that the device has not finished; beyond that, the oldest are not measured.
_MAX_PENDING_BATCHES = 1000
_END_OF_BATCH = -1
# The longest time before `INIT` that counts for the run, in seconds.
_MAX_START = 3600.0

_Hook = Callable[[State, Logger], None]
_Span = tuple[int | str, int, int, str]


def seconds_of_process(pid: int | str = "self") -> float:
    """Returns how long ago a process began; 0 if the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        booted = float(Path("/proc/uptime").read_text().split()[0])
        return max(booted - int(fields[19]) / os.sysconf("SC_CLK_TCK"), 0.0)
    except (OSError, ValueError, IndexError):
        return 0.0


# The process whose start a ledger has already counted.
_counted_process = 0


def _take_start() -> float:
    """Returns the time since the process began; 0 if it was not started for this run."""
    global _counted_process  # noqa: PLW0603  # of the process
    is_first = _counted_process != os.getpid()
    _counted_process = os.getpid()
    # Python sets `ps1` in a shell, and IPython in a notebook's kernel, which may be hours old.
    is_begun_for_it = is_first and not hasattr(sys, "ps1")
    return min(seconds_of_process(), _MAX_START) if is_begun_for_it else 0.0


class DeviceClock:
    """Measures the parts of batches on a device, by events that are queued between its kernels.

    Nothing waits for the device: a batch counts once its last event has passed.

    Args:
        parts: the buckets of a batch.
    """

    def __init__(self, parts: Iterable[int]) -> None:
        import torch

        self._make = functools.partial(torch.cuda.Event, enable_timing=True)
        self._marks: list[tuple[int, Any]] = []
        self._pending: deque[list[tuple[int, Any]]] = deque(maxlen=_MAX_PENDING_BATCHES)
        self.nanoseconds = dict.fromkeys(parts, 0.0)

    def mark(self, bucket: int) -> None:
        """Charges kernels that are queued from now on to a bucket."""
        event = self._make()
        event.record()
        self._marks.append((bucket, event))

    def end(self) -> None:
        """Ends a batch."""
        self.mark(_END_OF_BATCH)
        self._pending.append(self._marks)
        self._marks = []
        self.collect()

    def collect(self) -> None:
        """Adds up the batches that the device has finished. Training thread, outside of a graph capture."""
        while self._pending and self._pending[0][-1][1].query():
            for (bucket, begin), (_, end) in itertools.pairwise(self._pending.popleft()):
                self.nanoseconds[bucket] += begin.elapsed_time(end) * 1e6


class Spans:
    """The spans of a run that are not in its file yet, and those that are open; for any thread."""

    def __init__(self) -> None:
        # (bucket or name, begin, end, track), in nanoseconds.
        self.kept: deque[_Span] = deque(maxlen=_MAX_PENDING_SPANS)
        self.count = 0
        # Name, begin and track, by key.
        self.open: dict[Any, tuple[str, int, str]] = {}
        self._tracks: dict[int, str] = {}

    def keep(self, bucket: int | str, begin: int, end: int, track: str = "time") -> None:
        """Keeps a span for the file; the oldest gives way if too many wait."""
        self.kept.append((bucket, begin, end, track))
        self.count += 1

    def begin(self, key: object, name: str, begin: int, track: str) -> None:
        """Opens a span."""
        self.open[key] = (name, begin, track)

    def end(self, key: object, end: int) -> None:
        """Ends a span; does nothing if it is not open."""
        if (one := self.open.pop(key, None)) is not None:
            self.keep(one[0], one[1], end, one[2])

    def track_of_thread(self, training_thread: int) -> str:
        """Returns the unique track for the spans of this thread."""
        ident = threading.get_ident()
        if ident not in self._tracks:
            name = "spans" if ident == training_thread else f"spans of {threading.current_thread().name}"
            names = itertools.chain([name], (f"{name} ({number})" for number in itertools.count(2)))
            taken = set(self._tracks.values())
            self._tracks[ident] = next(one for one in names if one not in taken)
        return self._tracks[ident]


class TimeLedger(Callback):
    """Measures where the time of a session goes, in buckets that add up, and keeps spans for a trace.

    ```python
    Trainer(..., callbacks=[TimeLedger()], loggers=[RunDirectory("runs/mine")])
    ```

    A `Trainer` has one unless `time_ledger=False` is given. `destinations runs time NAME` prints where the
    time of all sessions went, with goodput and what each fault cost; `destinations runs trace NAME` writes
    the spans for Perfetto.

    | bucket | the time |
    |---|---|
    | `start` | before the first batch, except for `restore` |
    | `restore` | loading a checkpoint, and going to its position in the data |
    | `data` | between two batches: reading, and moving data to the device |
    | `forward`, `backward`, `optimizer` | the parts of a batch; `forward` includes the loss |
    | `batch` | the rest of a batch; in your own loop without these events, all of it |
    | `evaluation` | evaluations and predictions |
    | `checkpoint` | the hooks of `CheckpointSaver` |
    | `logging` | calls of `log_metrics` and the like, and the hooks of destinations |
    | `callbacks` | the hooks of all other callbacks |
    | `waiting` | a rank waits for the others, in the trainer: in collectives, and after its backward pass |
    | `garbage` | collections by Python's garbage collector |
    | `idle` | between `FIT_END` and the next event |
    | `closing` | from close to the end |
    | `stopped` | the process did not run: SIGSTOP, a frozen container, or a machine that slept |

    A nested bucket interrupts the outer one, so the buckets add up to the time of the session. The trainer
    separates waiting from `backward`. In your own loop with `DistributedDataParallel`, and with
    `fully_shard`, ranks wait for each other within `backward`.

    **Start.** A session lasts from `INIT` to the end. For the first run of a process, the time before `INIT`,
    up to an hour, counts as `start` too. This does not apply in a notebook or a shell, or if an earlier
    session of the run was still active when the process began, as with a standby process.

    **Files** are in `time/` in the folder of the run; the page "The format on disk" describes them. Without a
    `RunDirectory`, only the metrics are logged. If the process is killed, at most the last 2 % of the session
    and one second are lost; they count towards the time after it.

    **Spans** of batches are all kept at first, and ever fewer in a long session, up to 5 MB. Evaluations,
    checkpoints, uploads, epochs, garbage collections, other buckets of a millisecond or more, and spans of
    `span` are always kept, up to 100 MB.

    **Metrics** are `time/data` and so on: the share of each bucket since the last time, and at the end of a
    run that had some.

    **Short batches.** Few batches of less than 5 ms are divided into `forward`, `backward` and so on; the
    time of the others is divided proportionally.

    **Cost.** A batch of 1 ms with a call of `log_metrics` takes 0.8 µs more while the code is in the caches,
    and 3 to 4 µs between steps that use them: 0.1 to 0.4 % of the batch. For a batch of 10 ms, the share is a
    tenth. The thread takes 0.1 % of a core in the first seconds, and less than 0.01 % after some minutes.

    **Stopped** works on Linux; elsewhere, a stop is charged to the bucket that it interrupts. A stop counts
    from 0.3 s on, up to 0.25 s less than it took, unless it comes while the ledger's thread writes. During a
    stop that thread is not woken, whereas a thread that waits for the interpreter's lock wakes every 5 ms; so
    a library that holds the lock is charged to the current bucket. `CLOCK_BOOTTIME`, which continues during
    sleep, tells how long the machine slept.

    **Devices.** The host's clock sees kernels being queued, and waits for them later. On CUDA, events on the
    device divide the time of batches into `batch`, `forward`, `backward`, `optimizer` and `waiting`; nothing
    waits for them. Spans use the host's clock.

    **Ranks.** Each rank has its own files, with the times of its machine. A trace of several machines is as
    exact as their clocks agree, which NTP keeps within milliseconds.

    **Threading.** A daemon thread writes, from `INIT` to the end of the run. Only the training thread is
    charged; any thread may have spans.

    **Errors.** A file that cannot be written is reported once, and training continues.

    Args:
        metrics_seconds: how often the shares are logged; None for never.
        clock: returns monotonic nanoseconds.

    Raises:
        ValueError: `metrics_seconds` is not positive.
    """

    folder_name = "time"
    """The folder inside the run's folder."""

    buckets = BUCKETS
    """All buckets."""

    productive = ("batch", "forward", "backward", "optimizer")
    """The buckets in which a model is trained."""

    def __init__(
        self,
        metrics_seconds: float | None = 60.0,
        *,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        super().__init__()
        if metrics_seconds is not None and not metrics_seconds > 0:
            raise ValueError(f"metrics_seconds must be positive, or None for never, got {metrics_seconds!r}.")
        self._metrics_seconds = metrics_seconds
        self._clock = clock
        # Nanoseconds before `INIT` in which the rank waited for the others.
        self._waited_before = 0
        self._reset()

    def _reset(self) -> None:
        self._files: TimeFiles | None = None
        self._device: DeviceClock | None = None
        self._thread_id = 0
        self._cpu_clock: int | None = None
        self._has_ranks = False
        self._hooks: dict[str, tuple[_Hook, ...]] = {}
        self._hooks_within: dict[bool, dict[str, tuple[_Hook, ...]]] = {True: {}, False: {}}
        self.spans = Spans()
        # (step, begin, end, totals at its begin, totals at its end) of slow steps.
        self.slow_steps: deque[tuple[int, int, int, list[int], list[int]]] = deque(maxlen=_MAX_PENDING_STEPS)
        self.slow_nanoseconds = _NEVER
        """The duration from which a step is slow, in nanoseconds."""
        self._open_books()

    def _open_books(self) -> None:
        # `sum(totals) == since - begin`, except while a bucket is ending.
        self.totals = [0] * (_WHOLE + 1)
        self.begin = self.session = self._since = self._ended_at = self._clock()
        # Totals before `session`.
        self.earlier = self.totals.copy()
        self._bucket = _START
        self._outer: list[int] = []
        self._keep = _LONG_ENOUGH
        self._marks = self.totals.copy()
        self._logged, self._logged_at = self._marks, self.begin
        self._log_at = _NEVER
        self._has_batch_start = False
        self._after_batch = _BATCH
        self._is_traced = False
        self._batch_begin = 0
        # How many batches are left until one is divided, and how many were divided.
        self._left, self._divided_batches = 1, 0
        self._is_divided = True

    # Buckets: training thread. Methods that run in each batch inline `switch`, because a call would take half
    # as long again.

    def switch(self, bucket: int) -> int:
        """Ends the current bucket, begins another, and returns the ended one."""
        now = self._clock()
        # The order matters: `snapshot` reads concurrently, and garbage collection may call this again.
        taken = now - self._since
        self._since = now
        before = self._bucket
        self._bucket = bucket
        self.totals[before] += taken
        if taken >= self._keep[before] and before != bucket:
            self.spans.keep(before, now - taken, now)
        return before

    def snapshot(self) -> tuple[int, list[int]]:
        """Returns now, and the nanoseconds of each bucket until now; any thread may call it."""
        for _ in range(_MAX_LOOKS):
            totals, since, bucket, now = self.totals.copy(), self._since, self._bucket, self._clock()
            # Otherwise the training thread is just ending a bucket, or Ctrl-C interrupted it there.
            if sum(totals) == since - self.begin:
                break
        totals[bucket] += max(now - since, 0)
        return max(now, since), totals

    def divided(self, totals: Sequence[int], before: Sequence[int]) -> list[float]:
        """Returns the growth of each bucket; undivided batches are divided like the others.

        Args:
            totals: the totals of a snapshot.
            before: the totals of an earlier one.
        """
        grown: list[float] = [after - earlier for after, earlier in zip(totals, before, strict=True)]
        whole = grown.pop()
        known = grown if any(grown[part] for part in _PARTS) else totals
        parts: dict[int, float] = {part: known[part] for part in _PARTS}
        if self._device is not None and any(self._device.nanoseconds.values()):
            # The host may wait in one bucket for work of another.
            parts = self._device.nanoseconds.copy()
            whole += sum(grown[part] for part in _PARTS)
            for part in _PARTS:
                grown[part] = 0.0
        every = sum(parts.values())
        for part, nanoseconds in parts.items():
            grown[part] += whole * nanoseconds / every if every else whole * (part == _BATCH)
        return grown

    def undivided(self, totals: Sequence[int], before: Sequence[int]) -> list[float]:
        """Returns the growth of each bucket; undivided batches count as `batch`."""
        grown: list[float] = [after - earlier for after, earlier in zip(totals, before, strict=True)]
        grown[_BATCH] += grown.pop()
        return grown

    def charge_call(self, bucket: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function, and charges its time to a bucket, in the training thread."""
        if threading.get_ident() != self._thread_id:
            return function(*args, **kwargs)
        before = self.switch(BUCKETS.index(bucket))
        try:
            return function(*args, **kwargs)
        finally:
            self.switch(before)

    def charge_metrics(
        self, log_metrics: Callable[[Mapping[str, Any], int | None], None]
    ) -> Callable[..., None]:
        """Returns `Logger.log_metrics` with its time charged to `logging`, in the training thread."""
        get_ident, clock = threading.get_ident, self._clock

        def charge(metrics: Mapping[str, Any], step: int | None = None) -> None:
            if get_ident() != self._thread_id:
                log_metrics(metrics, step)
                return
            now = clock()
            taken = now - self._since
            self._since = now
            before = self._bucket
            self._bucket = _LOGGING
            self.totals[before] += taken
            if taken >= self._keep[before]:
                self.spans.keep(before, now - taken, now)
            try:
                log_metrics(metrics, step)
            finally:
                now = clock()
                taken = now - self._since
                self._since = now
                self._bucket = before
                self.totals[_LOGGING] += taken
                if taken >= self._keep[_LOGGING]:
                    self.spans.keep(_LOGGING, now - taken, now)

        return charge

    def _charge_hooks(self, bucket: int, hooks: Sequence[_Hook]) -> _Hook:
        """Returns a hook that calls several, and charges their time to one bucket."""
        switch = self.switch
        (first, *others) = hooks

        def charge(state: State, logger: Logger) -> None:
            before = switch(bucket)
            try:
                first(state, logger)
                for hook in others:
                    hook(state, logger)
            finally:
                switch(before)

        return charge

    def wait_after_backward(self, loss: Any) -> None:
        """Charges the time after a rank's own part of a backward pass to `waiting`.

        Autograd calls queued callbacks at the end of a pass, in order: this one before the callback of
        `DistributedDataParallel`, which waits for the gradients of the other ranks.

        Args:
            loss: the tensor whose backward pass comes next.
        """
        if not self._is_divided:
            return
        from torch.autograd import Variable

        engine: Any = getattr(Variable, "_execution_engine")  # noqa: B009  # as torch's own modules call it
        loss.register_hook(lambda _: engine.queue_callback(self._begin_waiting))

    def _begin_waiting(self) -> None:
        self.switch(_WAITING)
        if self._device is not None:
            self._device.mark(_WAITING)

    def add_waiting(self, nanoseconds: int) -> None:
        """Charges time before `INIT` in which the rank waited for others to `waiting`."""
        self._waited_before += nanoseconds

    # Spans: any thread.

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Keeps the time of a block for the trace; see `Logger.span`."""
        end = self.begin_span(str(name), self.spans.track_of_thread(self._thread_id))
        try:
            yield
        finally:
            end()

    def begin_span(self, name: str, track: str) -> Callable[[], None]:
        """Begins a span on a separate track; the returned function ends it, in any thread."""
        key = object()
        self.spans.begin(key, name, self._clock(), track)
        return lambda: self.spans.end(key, self._clock())

    def _take_thread(self) -> None:
        self._thread_id = threading.get_ident()
        if hasattr(time, "pthread_getcpuclockid"):
            self._cpu_clock = time.pthread_getcpuclockid(self._thread_id)

    def worked(self) -> float:
        """Returns the processor time of the training thread, in seconds; 0 if unknown, or if it has ended."""
        try:
            return 0.0 if self._cpu_clock is None else time.clock_gettime(self._cpu_clock)
        except OSError:
            return 0.0

    def doing(self) -> dict[str, Any]:
        """Returns the current bucket, for how many seconds it has lasted, and the open spans."""
        seconds = (self._clock() - self._since) / 1e9
        spans = [name for name, _, track in list(self.spans.open.values()) if track.startswith("spans")]
        return {"bucket": self.name_of(self._bucket), "seconds": round(seconds, 3), "spans": spans}

    @staticmethod
    def name_of(bucket: int) -> str:
        """Returns the name of a bucket."""
        return "batch" if bucket == _WHOLE else BUCKETS[bucket]

    def open_now(self) -> Iterable[tuple[Any, str, int, str]]:
        """Returns the open spans: key, name, begin and track; any thread may call it."""
        since, bucket = self._since, self._bucket
        yield since, self.name_of(bucket), since, "time"
        for key, one in list(self.spans.open.items()):
            yield key, *one

    # Events: training thread.

    def follow(
        self, hooks: Mapping[str, Sequence[tuple[Any, _Hook]]], destinations: Sequence[Any]
    ) -> dict[str, tuple[_Hook, ...]]:
        """Returns the hooks of an engine, charged to the buckets of their callbacks, with the ledger's own.

        Args:
            hooks: hooks by event, each with its callback; None for a hook of the engine, charged to
                `logging`.
            destinations: the callbacks whose hooks are charged to `logging`.
        """
        for event, of_event in hooks.items():
            by_bucket = itertools.groupby(of_event, lambda one: self._bucket_of(one[0], destinations))
            charged = [self._charge_hooks(bucket, [hook for _, hook in some]) for bucket, some in by_bucket]
            own = self._hook_of(Event(event))
            self._hooks[event] = (*(() if own is None else (own,)), *charged)
        # Files are opened where destinations have the folder of the run.
        self._hooks[Event.INIT] = (*self._hooks[Event.INIT], self._init)
        # Or here, if it was not known before whether an earlier run is continued.
        self._hooks[Event.FIT_START] = (*self._hooks[Event.FIT_START], self._open_files)
        within: dict[str, tuple[_Hook, ...]] = {event: self._hooks[event] for event in _WITHIN}
        self._hooks_within = {True: within, False: {event: own[1:] for event, own in within.items()}}
        return self._hooks

    def _bucket_of(self, callback: Any, destinations: Sequence[Any]) -> int:
        if callback is None or any(callback is one for one in destinations):
            return _LOGGING
        return BUCKETS.index(getattr(type(callback), "time_bucket", "callbacks"))

    def _hook_of(self, event: Event) -> _Hook | None:
        """Returns the ledger's own hook for an event, or None."""
        if event in _BEGIN_INSIDE:
            return self._begin_evaluation if event in _EVALUATES else self._begin_inside
        if event in _END_INSIDE:
            return self._end_inside
        bucket = _WITHIN.get(event, _AFTER.get(event))
        if bucket is None:
            hook: _Hook | None = getattr(self, f"_at_{event.value}", None)
            return hook
        switch = self.switch

        def begin(_state: State, _logger: Logger) -> None:
            switch(bucket)
            if self._device is not None and bucket in _PARTS:
                self._device.mark(bucket)

        return begin

    def _at_init(self, state: State, logger: Logger) -> None:
        self._open_books()
        self._take_thread()
        earlier = int(_take_start() * 1e9)
        self.begin -= earlier
        waited, self._waited_before = min(self._waited_before, earlier), 0
        self.totals[_START] += earlier - waited
        self.totals[_WAITING] += waited
        self._logged_at, self.earlier = self.begin, self.totals.copy()
        gc.callbacks.append(self._on_garbage)

    def _init(self, state: State, logger: Logger) -> None:
        self._has_ranks = state.world_size > 1
        if state.device is not None and state.device.type == "cuda":
            self._device = DeviceClock((*_PARTS, _WAITING))
        self._open_files(state, logger)

    def _open_files(self, state: State, logger: Logger) -> None:
        folder = None if self._files is not None else run_folder(state)
        if folder is not None:
            self._files = TimeFiles(self, folder / self.folder_name, state)
            self._files.start()

    def _at_fit_start(self, state: State, logger: Logger) -> None:
        # May differ from the thread of `INIT`.
        self._take_thread()
        self._outer.clear()
        self.switch(_RESTORE if state.timestamp.batch else _START)
        if self._metrics_seconds is not None:
            self._log_at = min(self._log_at, self.session + int(self._metrics_seconds * 1e9))
        self._ended_at, self._marks = self._since, self.totals.copy()

    def _at_epoch_start(self, state: State, logger: Logger) -> None:
        self.switch(self._after_batch)
        self.spans.begin("epoch", f"epoch {state.timestamp.epoch.value}", self._since, "loop")

    def _at_epoch_end(self, state: State, logger: Logger) -> None:
        self.switch(self._after_batch)
        self.spans.end("epoch", self._since)

    def _at_fit_end(self, state: State, logger: Logger) -> None:
        self.switch(_IDLE)
        # Training may have stopped within an epoch.
        self.spans.end("epoch", self._since)

    def _at_before_dataloader(self, state: State, logger: Logger) -> None:
        # Needed for the first batch of a resumed epoch; later, the end of a batch switches.
        if self._bucket != _DATA:
            self.switch(_DATA)

    def _at_batch_start(self, state: State, logger: Logger) -> None:
        now = self._clock()
        taken = now - self._since
        self._since = now
        before = self._bucket
        self.totals[before] += taken
        if taken >= self._keep[before]:
            self.spans.keep(before, now - taken, now)
        self._left -= 1
        if self._left:
            self._bucket, self._keep = _WHOLE, _LONG_ENOUGH
            return
        self._bucket = _BATCH
        self._begin_divided(now)

    def _begin_divided(self, now: int) -> None:
        if not self._has_batch_start:
            # A custom loop may only report the ends of batches.
            self._has_batch_start, self._after_batch = True, _DATA
        self._batch_begin = now
        if self._device is not None:
            self._device.mark(_BATCH)
        if not self._is_divided:
            self._is_divided = True
            self._hooks.update(self._hooks_within[True])
        files = self._files
        self._is_traced = files is not None and files.traces(self._divided_batches)
        self._divided_batches += 1
        self._keep = _ANY if self._is_traced else _LONG_ENOUGH

    def _at_batch_end(self, state: State, logger: Logger) -> None:
        now = self._clock()
        taken = now - self._since
        self._since = now
        before = self._bucket
        self._bucket = self._after_batch
        self.totals[before] += taken
        if taken >= self._keep[before]:
            self.spans.keep(before, now - taken, now)
        if self._has_ranks:
            self._find_slow(state, now)
        if self._is_divided:
            self._end_divided(state, logger, now)

    def _find_slow(self, state: State, now: int) -> None:
        """Keeps the totals around a slow step, including the time since the previous step."""
        began, marks = self._ended_at, self._marks
        self._ended_at, self._marks = now, self.totals.copy()
        if now - began > self.slow_nanoseconds:
            step: Any = state.timestamp.batch.value
            self.slow_steps.append((step - 1, began, now, marks, self._marks))

    def _end_divided(self, state: State, logger: Logger, now: int) -> None:
        if self._has_batch_start:
            step: Any = state.timestamp.batch.value
            if self._device is not None:
                self._device.end()
            if self._is_traced:
                self.spans.keep(f"batch {step - 1}", self._batch_begin, now, "loop")
                self._is_traced = False
            length = max(now - self._batch_begin, 1)
            self._left = 1 if length >= _SHORT_NANOSECONDS else _DIVIDED_NANOSECONDS // length + 1
            if self._left > 1:
                self._is_divided = False
                self._hooks.update(self._hooks_within[False])
        if now >= self._log_at:
            self._log(logger)

    def _begin_inside(self, state: State, logger: Logger) -> None:
        self._outer.append(self.switch(_EVALUATION))
        if self._files is not None and self._files.traces(0):
            self._keep = _ANY

    def _begin_evaluation(self, state: State, logger: Logger) -> None:
        self._begin_inside(state, logger)
        is_prediction = state.phase is Phase.PREDICT
        name = "prediction" if is_prediction else f"evaluation {state.dataloader_label}"
        self.spans.begin("evaluation", name, self._since, "loop")

    def _end_inside(self, state: State, logger: Logger) -> None:
        self.switch(self._outer.pop() if self._outer else _IDLE)
        self._keep = _LONG_ENOUGH
        self.spans.end("evaluation", self._since)

    def _on_garbage(self, phase: str, info: dict[str, int]) -> None:
        # The youngest generation takes microseconds.
        if info["generation"] and threading.get_ident() == self._thread_id:
            if phase == "start":
                self._before_garbage = self.switch(_GARBAGE)
            else:
                self.switch(self._before_garbage)

    def _log(self, logger: Logger) -> None:
        now, totals = self.snapshot()
        length = max(now - self._logged_at, 1)
        grown = self.divided(totals, self._logged)
        shares = zip(BUCKETS, grown, totals, strict=False)
        logger.log_metrics({f"time/{name}": more / length for name, more, total in shares if more or total})
        self._logged, self._logged_at = totals, now
        self._log_at = now + int((self._metrics_seconds or 0) * 1e9)

    # The end: training thread.

    def close(self, state: State, logger: Logger) -> None:
        """Logs the last shares, if any were logged before, and charges the rest to `closing`."""
        if self._device is not None:
            # The device may have finished batches since.
            self._device.collect()
        if self._logged_at > self.session and self._log_at != _NEVER:
            self._log(logger)
        self._open_files(state, logger)
        self._log_at = _NEVER
        self.switch(_CLOSING)
        for key in ("evaluation", "epoch"):
            self.spans.end(key, self._since)

    def post_close(self) -> None:
        """Writes the rest."""
        if self._on_garbage in gc.callbacks:
            gc.callbacks.remove(self._on_garbage)
        files, self._files = self._files, None
        if files is not None:
            files.stop()
        self._reset()
