"""`FlightRecorder`: the last steps of a rank and the stacks of its threads, written when training goes wrong.

The training thread keeps steps in memory; one daemon thread waits for a hang or a signal and writes the file.
Each rank writes its own file without waiting for others; `destinations.runs.content.flight` merges them.
"""

import contextlib
import fnmatch
import itertools
import json
import linecache
import logging
import math
import os
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from events.callback import Callback
from events.engine import ExitCode
from events.logger.converters import safe_text
from events.logger.logger import Logger
from events.names import check_run_name, format_run_name
from events.redaction import error_text, redact_text
from events.state import RunStatus, State, read_part

from .collectives import OF_COLLECTIVE, fresh_dump, read_dump
from .folder import run_folder
from .time_ledger import TimeLedger, seconds_of_process

__all__ = ["FlightRecorder", "StallClock"]

_log = logging.getLogger("events")

_FORMAT_VERSION = 1
_MAX_COLLECTIVES = 16
_MAX_NAMES = 10_000
_MAX_IDS = 64
_MAX_TEXT = 200
_MAX_THREADS = 64
_MAX_FRAMES = 64
_MAX_REASONS = 16
_LEAST_BYTES = 64 << 10
_SECONDS_TO_WRITE = 5.0
_SECONDS_TO_DIE = 2.0
_TICKS_PER_HANG = 10
_LONGEST_TICK = 1.0
# Bytes sent to the thread; a signal sends its own number.
_STOP, _WRITE = b"\0", b"\xff"


# Recorders with a signal handler, which a forked child must not inherit.
_with_handler: "weakref.WeakSet[FlightRecorder]" = weakref.WeakSet()
_forking = threading.local()
_is_fork_registered: list[bool] = []


def _restore_in_forked_children(recorder: "FlightRecorder") -> None:
    """Makes forked children handle SIGTERM as they would without the recorder."""
    if not _is_fork_registered and hasattr(os, "register_at_fork"):
        _is_fork_registered.append(True)
        os.register_at_fork(
            before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
        )
    _with_handler.add(recorder)


def _before_fork() -> None:
    # Otherwise a child that is signalled before it removes the handler would wake its parent's thread.
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) if _with_handler else None


def _after_fork() -> None:
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _after_fork_in_child() -> None:
    for recorder in list(_with_handler):
        recorder.forget_in_child()
    _after_fork()


class StallClock:
    """Counts the seconds without progress in which the counting thread itself was awake.

    A process that was stopped (SIGSTOP) or suspended did not hang, so at most two ticks of a gap between two
    checks count.

    Args:
        hang_seconds: how long without progress is a hang.
        tick_seconds: the usual time between two checks.
        clock: returns monotonic seconds.
    """

    def __init__(self, hang_seconds: float, tick_seconds: float, clock: Callable[[], float]) -> None:
        self._hang_seconds = hang_seconds
        self._tick_seconds = tick_seconds
        self._clock = clock
        self._looked_at = clock()
        self._progress: int | None = None
        self._is_reported = False
        self.waited_seconds = 0.0

    def look(self, progress: int | None) -> bool:
        """Returns whether training hangs, once per hang.

        Args:
            progress: a number that changes with each step; None where no step is expected.
        """
        now = self._clock()
        gap, self._looked_at = now - self._looked_at, now
        if progress is None or progress != self._progress:
            self._progress, self.waited_seconds, self._is_reported = progress, 0.0, False
            return False
        self.waited_seconds += min(gap, 2 * self._tick_seconds)
        if self._is_reported or self.waited_seconds < self._hang_seconds:
            return False
        self._is_reported = True
        return True


class _MetricsTap:
    """The destination through which a recorder gets metrics, as numbers on the host."""

    def __init__(self, log_metrics: Callable[[Mapping[str, float], int], None]) -> None:
        self.log_metrics = log_metrics

    def can_upload_files(self) -> bool:
        return False

    def upload_file(self, *args: Any, **kwargs: Any) -> None:
        pass

    def flush(self) -> None:
        pass


class FlightRecorder(Callback):
    """Keeps the last steps, and writes them with the stacks of all threads when training goes wrong.

    ```python
    Trainer(..., callbacks=[FlightRecorder(hang_seconds=300)], loggers=[RunDirectory("runs/mine")])
    ```

    **When.** It writes when a metric that matches `nan_metrics` is NaN (once per run), when the run fails
    with an exception, on SIGTERM, and when no step ended for `hang_seconds` within `fit`, an evaluation or a
    prediction. The end of a batch and each call of `log_metrics` count as progress. Time in which the process
    was stopped or suspended does not count.

    **File.** `flight/rank-N.json`, one file per rank, replaced atomically; see the page "Many ranks".
    `destinations runs show NAME --flight` merges the files: "rank 1 waits in all_reduce at train.py:42".
    Values on a device are included once they have been copied; nothing waits for that.

    **NCCL.** The dump of its watchdog (`TORCH_FR_DUMP_TEMP_FILE`, `TORCH_NCCL_DEBUG_INFO_TEMP_FILE`, or
    `/tmp/nccl_trace_rank_N`), written before it ends the process, is read within a second, or by the next
    process that torchrun starts. Its collectives are added to the file, with the reason "nccl".

    **Uploads.** Destinations that upload files, such as `Artifacts`, get the file and NCCL's dump too.

    **Threading.** A daemon thread waits, from `INIT` to close. It needs the GIL, so it can't write anything
    if a thread hangs while holding the GIL.

    **SIGTERM.** A handler is installed if the run begins in the main thread. The file is written even while
    that thread waits in a collective. An existing handler is called; without one, the process ends as usual.
    Other signals are not handled.

    **Ranks.** Each rank writes its own file without waiting for others, and enters no collective.

    **Errors.** A file that cannot be written is reported, and training continues.

    Args:
        steps: how many steps are kept.
        hang_seconds: how long without a step is a hang; None for never.
        folder: where the files go; may contain `{run_name}`. Default: the folder `flight` in the folder of
            the run's `RunDirectory`.
        nan_metrics: a pattern of names, such as "*loss*", case-insensitive; "" for none.
        batch_ids: a key of the batch, or a function that returns identifiers of its samples: numbers, texts,
            an array or a tensor on the host; the first 64 are kept.
        max_bytes: the greatest size of a file; the oldest steps are left out.
        clock: returns monotonic seconds.

    Raises:
        ValueError: a number is too small; at `INIT`, there is neither a folder nor a `RunDirectory`.
    """

    def __init__(
        self,
        steps: int = 100,
        hang_seconds: float | None = 300.0,
        *,
        folder: str | Path | None = None,
        nan_metrics: str = "*loss*",
        batch_ids: str | Callable[[Any], Any] | None = None,
        max_bytes: int = 4 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps!r}.")
        if hang_seconds is not None and not hang_seconds > 0:
            raise ValueError(f"hang_seconds must be positive, or None for never, got {hang_seconds!r}.")
        if max_bytes < _LEAST_BYTES:
            raise ValueError(f"max_bytes must be at least {_LEAST_BYTES}, got {max_bytes!r}.")
        self._given_folder = folder
        self._hang_seconds = hang_seconds
        self._nan_pattern = nan_metrics.lower()
        self._batch_ids = batch_ids
        self._max_bytes = max_bytes
        self._clock = clock
        # As in the file, but for the numbers that JSON lacks.
        self._steps: deque[dict[str, Any]] = deque(maxlen=steps)
        self._reset()

    def _reset(self) -> None:
        self._steps.clear()
        self._state: State | None = None
        self._path: Path | None = None
        self._progress = 0
        self._is_armed = False
        self._has_seen_nan = False
        self._has_ids = False
        self._has_failed = False
        self._reasons: list[dict[str, Any]] = []
        self._pending: deque[tuple[str, str]] = deque()
        self._pid = os.getpid()
        # Held while a file is written: by the thread, or by close.
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._main_thread_id = threading.main_thread().ident
        self._earlier: Any = None
        self._handler: Any = None
        self._has_wakeup = False
        self._wrote_on_sigterm = threading.Event()
        # The time since which a dump of NCCL's watchdog belongs to this job, and its collectives.
        self._dumps_since = math.inf
        self._dumped: list[dict[str, Any]] = []

    @property
    def path(self) -> Path | None:
        """The file of this rank, while the run is open; it exists once something went wrong."""
        return self._path

    # Hooks.

    def init(self, state: State, logger: Logger) -> None:
        """Finds the folder, and starts the thread and the signal handler."""
        self._reset()
        self._path = self._find_path(state)
        self._state = state
        # The watchdog ends the process, so the next process that torchrun starts finds its dump.
        is_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0
        self._dumps_since = time.time() - (seconds_of_process(os.getppid()) if is_restart else 0.0)
        logger.add_destination(_MetricsTap(self._keep_metrics))  # type: ignore[arg-type]  # metrics alone
        self._sockets = socket.socketpair()
        # A signal handler writes to it.
        self._sockets[1].settimeout(0)
        self._thread = threading.Thread(
            target=self._watch, args=(self._sockets[0],), name="events-flight-recorder", daemon=True
        )
        self._thread.start()
        self._install_handler()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Expects steps from now on."""
        self._progress += 1
        self._is_armed = True

    eval_standalone_start = predict_start = fit_start

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Keeps the identifiers of the batch, which is still on the host."""
        self._keep_ids(state)

    def batch_start(self, state: State, logger: Logger) -> None:
        """Keeps the identifiers of the batch, in a loop without `after_dataloader`."""
        if not self._has_ids:
            self._keep_ids(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Counts a step."""
        self._progress += 1
        self._has_ids = False

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Counts a step."""
        self._progress += 1

    predict_batch_end = eval_batch_end

    def fit_end(self, state: State, logger: Logger) -> None:
        """Expects no more steps."""
        self._is_armed = False

    eval_standalone_end = predict_end = fit_end

    def close(self, state: State, logger: Logger) -> None:
        """Writes the file if the run failed; ends the thread and removes the handler."""
        self._is_armed = False
        if self._sockets is None or os.getpid() != self._pid:
            return
        self._remove_handler()
        self._send(_STOP)
        if self._thread is not None:
            self._thread.join(_SECONDS_TO_WRITE)
        self._look_for_dump()
        if state.status is RunStatus.FAILED:
            error = state.exception
            detail = "" if error is None else f"{type(error).__name__}: {error}"
            self._write("exception", detail, error)
        elif state.status is RunStatus.PREEMPTED and not self._wrote_on_sigterm.is_set():
            self._write("sigterm", "")
        for one in self._sockets:
            one.close()
        self._sockets = self._thread = None
        self._steps.clear()
        self._state = None

    # What is kept: training thread.

    def _step(self, step: int) -> dict[str, Any]:
        if not self._steps or self._steps[-1]["step"] != step:
            self._steps.append({"step": step, "time": time.time(), "metrics": {}})
        return self._steps[-1]

    def _keep_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._progress += 1
        found = self._step(step)
        if len(found["metrics"]) + len(metrics) > _MAX_NAMES:
            found["left_out"] = found.get("left_out", 0) + len(metrics)
        else:
            found["metrics"].update(metrics)
        if self._nan_pattern and not self._has_seen_nan:
            try:
                # One pass in C over all values; NaN if any of them is.
                is_finite = math.isfinite(sum(metrics.values()))
            except OverflowError:
                is_finite = False
            if not is_finite:
                self._find_nan(metrics, step)

    def _find_nan(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            is_nan = value != value  # noqa: PLR0124
            if is_nan and fnmatch.fnmatchcase(name.lower(), self._nan_pattern):
                self._has_seen_nan = True
                self._pending.append(("nan", f"{name} is NaN at step {step}"))
                self._send(_WRITE)
                return

    def _keep_ids(self, state: State) -> None:
        if self._batch_ids is None:
            return
        self._has_ids = True
        try:
            ids = read_part(state.batch, self._batch_ids)
            found: Any = _plain_ids(ids)
        except Exception as error:  # noqa: BLE001  # a batch of another shape must not stop training
            found = f"unreadable: {type(error).__name__}: {error}"[:_MAX_TEXT]
        self._step(int(state.timestamp.batch))["batch_ids"] = found

    # The thread.

    def _watch(self, receiver: socket.socket) -> None:
        hang_seconds = self._hang_seconds
        tick = None
        # Not `select`, which takes no descriptor above 1,023, and a job may have many files.
        if hang_seconds is not None:
            tick = min(hang_seconds / _TICKS_PER_HANG, _LONGEST_TICK)
            stall = StallClock(hang_seconds, tick, self._clock)
        receiver.settimeout(tick)
        while True:
            received = b""
            with contextlib.suppress(TimeoutError):
                received = receiver.recv(1024)
            self._look_for_dump()
            while self._pending:
                self._write(*self._pending.popleft())
            if signal.SIGTERM in received:
                self._write_on_sigterm()
            if _STOP in received:
                return
            if hang_seconds is not None and stall.look(self._progress if self._is_armed else None):
                waited = f"no step ended for {stall.waited_seconds:.3g} s"
                if self._write("hang", waited):
                    _log.warning("%s: the stacks of this rank are in %s.", waited, self._path)

    def _write_on_sigterm(self) -> None:
        self._write("sigterm", "")
        self._wrote_on_sigterm.set()
        if self._earlier is not signal.SIG_DFL or signal.getsignal(signal.SIGTERM) != self._handler:
            return
        # The handler ends the process in the main thread, unless that thread waits in a library.
        time.sleep(_SECONDS_TO_DIE)
        if signal.getsignal(signal.SIGTERM) == self._handler:
            os._exit(ExitCode.SIGTERM)

    # Signals: main thread.

    def _install_handler(self) -> None:
        earlier = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread() or earlier is None:
            # Python installs handlers only in its main thread, and cannot call C handlers.
            return
        _restore_in_forked_children(self)
        self._earlier, self._handler = earlier, self._on_sigterm
        signal.signal(signal.SIGTERM, self._handler)
        if self._sockets is not None:
            # Python's handlers wait until the main thread returns from C; this wakes our thread at once.
            taken = signal.set_wakeup_fd(self._sockets[1].fileno(), warn_on_full_buffer=False)
            self._has_wakeup = taken == -1
            if not self._has_wakeup:
                signal.set_wakeup_fd(taken)

    def _remove_handler(self) -> None:
        if self._handler is None or threading.current_thread() is not threading.main_thread():
            return
        if self._has_wakeup and self._sockets is not None:
            current = signal.set_wakeup_fd(-1)
            if current not in {-1, self._sockets[1].fileno()}:
                signal.set_wakeup_fd(current)
        self._has_wakeup = False
        if signal.getsignal(signal.SIGTERM) == self._handler:
            signal.signal(signal.SIGTERM, self._earlier)
        _with_handler.discard(self)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self._has_wakeup:
            self._wrote_on_sigterm.wait(_SECONDS_TO_WRITE)
        elif self._sockets is not None:
            self._write("sigterm", "")
            self._wrote_on_sigterm.set()
        if callable(self._earlier):
            self._earlier(number, frame)
        # If another handler was installed since and calls this one, it decides.
        elif self._earlier is signal.SIG_DFL and signal.getsignal(signal.SIGTERM) == self._handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def forget_in_child(self) -> None:
        """Restores signal handling in a forked child, which has no thread."""
        if self._sockets is None:
            return
        self._lock = threading.Lock()
        self._remove_handler()
        for one in self._sockets:
            one.close()
        self._sockets = self._thread = None

    def _send(self, what: bytes) -> None:
        if self._sockets is not None:
            with contextlib.suppress(OSError):  # A full socket will wake the thread anyway.
                self._sockets[1].send(what)

    # The file: the thread, or close.

    def _find_path(self, state: State) -> Path | None:
        """Returns the path of the file; None while the folder of the run is not known."""
        name = f"rank-{state.rank}.json"
        if self._given_folder is not None:
            template = os.fspath(self._given_folder)
            check_run_name(template, state)
            return Path(format_run_name(template, state)).absolute() / name
        if (folder := run_folder(state)) is not None:
            return folder / "flight" / name
        if any(getattr(one, "is_undecided", False) for one in state.callbacks):
            return None
        raise ValueError(
            'FlightRecorder needs a folder. Pass folder="...", or add a RunDirectory to loggers.'
        )

    def _write(self, reason: str, detail: str, error: BaseException | None = None) -> bool:
        """Writes the file; returns whether it did."""
        from uploads.disk import replace_file

        state = self._state
        if state is not None and self._path is None:
            self._path = self._find_path(state)
        path = self._path
        if state is None or path is None or not self._lock.acquire(timeout=_SECONDS_TO_WRITE):
            return False
        try:
            self._reasons.append(
                {"reason": reason, "detail": redact_text(detail)[:1000], "time": time.time()}
            )
            del self._reasons[:-_MAX_REASONS]
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, self._document(state, error))
            self._upload(state, path)
        except Exception as failure:  # noqa: BLE001  # a full disk must not stop training
            if not self._has_failed:
                self._has_failed = True
                _log.warning("flight recorder: could not write %s: %s", path, error_text(failure))
            return False
        else:
            return True
        finally:
            self._lock.release()

    def _look_for_dump(self) -> None:
        """Reads the dump that NCCL's watchdog writes about this rank before it ends the process."""
        state = self._state
        path = None if state is None else fresh_dump(state.rank, self._dumps_since)
        if state is None or path is None:
            return
        # Don't read the same dump again.
        self._dumps_since = math.nextafter(path.stat().st_mtime, math.inf)
        self._dumped = read_dump(path, _MAX_COLLECTIVES)
        if self._dumped and self._write("nccl", f"NCCL's watchdog wrote {path}"):
            _log.warning("NCCL's watchdog wrote %s: its collectives are in %s.", path, self._path)
        self._upload(state, path)

    def _upload(self, state: State, path: Path) -> None:
        """Passes a file to destinations that upload files, because the machine may be lost with the run."""
        name = f"{state.run_name}/flight/{path.name}"
        for one in state.callbacks:
            takes_files = getattr(one, "can_upload_files", None)
            if takes_files is None or not takes_files() or getattr(one, "keeps_files_here", False):
                continue
            try:
                one.upload_file(state, name, path, overwrite=True)
            except Exception as failure:  # noqa: BLE001  # a destination must not stop training
                _log.warning("flight recorder: could not upload %s: %s", path, error_text(failure))

    def _document(self, state: State, error: BaseException | None) -> bytes:
        timestamp = state.timestamp
        head: dict[str, Any] = {
            "format_version": _FORMAT_VERSION,
            "run_name": state.run_name,
            "rank": state.rank,
            "local_rank": state.local_rank,
            "node_rank": state.node_rank,
            "world_size": state.world_size,
            "restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            **self._reasons[-1],
            "written_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "reasons": self._reasons,
            "position": {
                "phase": str(state.phase),
                **{name: getattr(timestamp, name).value for name in ("epoch", "batch", "sample", "token")},
            },
            "threads": self._threads(),
            "doing": next((one.doing() for one in state.callbacks if isinstance(one, TimeLedger)), None),
            "collectives": self._dumped or _collectives(),
        }
        if error is not None:
            frames = _frames_of(traceback.walk_tb(error.__traceback__))
            head["exception"] = {
                "type": type(error).__qualname__,
                "message": redact_text(safe_text(error))[:1000],
                "frames": frames[-_MAX_FRAMES:],
            }
        room = self._max_bytes - len(_encoded(head)) - 100
        kept: list[str] = []
        steps = self._steps.copy()
        for one in reversed(steps):
            # Copied at once: the training thread may add metrics meanwhile.
            metrics = {name: _number(value) for name, value in one["metrics"].copy().items()}
            text = json.dumps(one | {"metrics": metrics}, ensure_ascii=True, allow_nan=False)
            room -= len(text) + 2
            if room < 0:
                break
            kept.append(text)
        kept.reverse()
        left_out = len(steps) - len(kept)
        # One step per line, for people.
        body = ",\n".join(kept)
        return _encoded(head)[:-1] + f', "dropped_steps": {left_out},\n"steps": [\n{body}\n]}}\n'.encode()

    def _threads(self) -> list[dict[str, Any]]:
        """Returns the stacks of all threads but the recorder's own, the main thread first."""
        names = {one.ident: one.name for one in threading.enumerate()}
        own = None if self._thread is None else self._thread.ident
        frames = sys._current_frames()  # noqa: SLF001  # the documented way to the stacks of other threads
        idents = sorted(frames, key=lambda one: (one != self._main_thread_id, one))
        return [
            {
                "name": names.get(ident, f"thread {ident}"),
                "is_main": ident == self._main_thread_id,
                "frames": _frames_of(itertools.islice(traceback.walk_stack(frames[ident]), _MAX_FRAMES))[
                    ::-1
                ],
            }
            for ident in idents[:_MAX_THREADS]
            if ident != own
        ]


def _collectives() -> list[dict[str, Any]]:
    """Returns the last collectives of this rank, oldest first, from torch's own recorder."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return []
    try:
        # Not public; "Flight Recorder" in torch's documentation.
        from torch._C import _distributed_c10d as c10d

        dump = getattr(c10d, "_dump_fr_trace_json")  # noqa: B009  # torch does not list it
        entries = json.loads(dump())["entries"][-_MAX_COLLECTIVES:]
        return [{name: one.get(name) for name in OF_COLLECTIVE} for one in entries]
    except (ImportError, RuntimeError, ValueError, LookupError, TypeError, AttributeError):
        return []  # Another version of torch.


def _encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=True, allow_nan=False).encode()


def _number(value: float) -> float | str:
    """Returns a number of strict JSON, or the name of one that JSON lacks."""
    if value != value:  # noqa: PLR0124  # NaN
        return "NaN"
    # An integer may be too large for `math.isfinite`.
    return {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, value)


def _plain_ids(ids: Any) -> Any:
    """Returns identifiers as numbers and texts; does not read a tensor on a device, to avoid waiting."""
    device = getattr(getattr(ids, "device", None), "type", "cpu")
    if device != "cpu":
        return f"on {device}: not read"
    if hasattr(ids, "tolist"):
        ids = ids.reshape(-1)[:_MAX_IDS].tolist()
    if hasattr(ids, "__iter__") and not isinstance(ids, str | bytes):
        return [_plain_id(one) for one in itertools.islice(ids, _MAX_IDS)]
    return _plain_id(ids)


def _plain_id(one: Any) -> Any:
    match one:
        case bool() | int():
            return one
        case float():
            return _number(one)
    return redact_text(str(one))[:_MAX_TEXT]


def _frames_of(walk: Iterable[tuple[FrameType, int]]) -> list[dict[str, Any]]:
    return [
        {
            "file": frame.f_code.co_filename,
            "line": line,
            "function": frame.f_code.co_qualname,
            "code": redact_text(
                linecache.getline(frame.f_code.co_filename, line or 0, frame.f_globals).strip()[:_MAX_TEXT]
            ),
            "is_library": _is_library(frame.f_code.co_filename),
        }
        for frame, line in walk
    ]


def _is_library(file: str) -> bool:
    """Returns whether code belongs to Python, an installed package or this project, not to the user."""
    if file.startswith("<frozen") or "site-packages" in file or "dist-packages" in file:
        return True
    own = Path(__file__).parents[2]
    folders = [
        sysconfig.get_path("stdlib"),
        *(str(own / one) for one in ("events", "destinations", "uploads")),
    ]
    return any(file.startswith(f"{folder}{os.sep}") for folder in folders)
