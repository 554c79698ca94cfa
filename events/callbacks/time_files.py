"""`TimeFiles`: the thread that writes the files of a `TimeLedger`, and detects when the process did not run.

The page "The format on disk" describes the files. The training thread never waits for this thread.
"""

import logging
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from events.redaction import error_text
from events.state import State

__all__ = ["TimeFiles"]

_log = logging.getLogger("events")

# The least duration of a row, its share of the session so far, and its longest duration.
_ROW_SECONDS = 0.5, 0.01, 60.0
_TICK_SECONDS = 0.02, 0.005, 1.0
# How often to check whether the process was stopped, and the shortest stop that is noticed.
_LOOK_SECONDS = 0.25
_STOPPED_SECONDS = 0.3
# A thread that waits for the interpreter's lock wakes every 5 ms, or later on a busy machine.
_WAKE_SECONDS = 0.1
# Spans that are open for this long are written before they end.
_OPEN_NANOSECONDS = 1_000_000_000
# All batches are traced up to the first size, and ever fewer up to the second.
_TRACE_BYTES = 3_000_000, 5_000_000
_MORE_TRACE_BYTES = 250_000
# The limit for all spans.
_MAX_SPAN_BYTES = 100_000_000
# A slow step takes this many times the usual duration, and at least this long.
_SLOW, _LEAST_SLOW = 2.0, 50_000_000
_USUAL_OF, _LEAST_KNOWN = 15, 3
_MAX_SLOW_STEPS = 1000
_JOIN_SECONDS = 5.0

# `clock` is empty; it keeps the columns of earlier files, which may be continued.
_HEAD = "session,begin,end,step,clock"


def _within(limits: tuple[float, float, float], age: float) -> float:
    least, share, most = limits
    return min(max(age * share, least), most)


def _asleep() -> int:
    """Returns how many nanoseconds the machine has slept since boot; a few less if this thread is delayed.

    Returns 0 if the system has no clock that continues during sleep.
    """
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0
    with_sleep = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return with_sleep - time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def _wakes() -> int | None:
    """Returns how often this thread has waited and was woken; None if the system does not count it."""
    try:
        import resource

        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    except (ImportError, AttributeError):
        return None


def _cell(text: str) -> str:
    """Returns a text as a cell of a CSV, in one line."""
    text = " ".join(text.split())[:200]
    return '"' + text.replace('"', '""') + '"' if '"' in text or "," in text else text


class GrowingCsv:
    """A CSV that grows by lines; its last line may be rewritten.

    Args:
        path: the file; created with its header if it is empty.
        header: its first line.
    """

    def __init__(self, path: Path, header: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        self._end = os.fstat(self._fd).st_size
        self._width = 0
        if not self._end:
            self.write(header, is_last=True)
        elif os.pread(self._fd, 1, self._end - 1) != b"\n":
            self.write("", is_last=True)

    def write(self, text: str, *, is_last: bool) -> None:
        """Writes a line over the last unfinished one; spaces cover the rest of a longer one.

        Args:
            text: the line.
            is_last: whether the line is finished.
        """
        data = text.encode("utf-8", "backslashreplace").ljust(self._width) + b"\n"
        view, at = memoryview(data), self._end
        while view:
            done = os.pwrite(self._fd, view, at)
            view, at = view[done:], at + done
        self._width = len(data) - 1
        if is_last:
            self._end, self._width = self._end + len(data), 0

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)


class TimeFiles:
    """Writes the totals, spans and slow steps of a ledger.

    **Stopped.** A thread that waits for the interpreter's lock wakes every 5 ms (`sys.getswitchinterval`). If
    this thread is late without having woken, and the training thread has not worked, the process was stopped.

    Args:
        ledger: the `TimeLedger`.
        folder: the folder of the files; created if missing.
        state: the run, for its step.
        asleep: returns for how many nanoseconds the machine has slept.
    """

    def __init__(
        self,
        ledger: Any,
        folder: Path,
        state: State,
        *,
        asleep: Callable[[], int] = _asleep,
    ) -> None:
        self._ledger: Any = ledger
        self._folder = folder
        self._state = state
        self._read_asleep = asleep
        self.stride = 1
        """Every n-th batch is traced; 0 for none."""
        # Wall time of nanosecond 0 of the ledger's clock.
        self._zero = time.time() - ledger.snapshot()[0] / 1e9
        self._session = self._zero + ledger.session / 1e9
        # The unfinished row: its begin by both clocks, and the totals before it.
        self._begin, self._wall_begin, self._written = ledger.session, self._session, ledger.earlier
        # Corrections for stops, per bucket, and the time of sleep, which the ledger's clock does not count.
        self._moved = [0] * len(self._written)
        self._slept_before, self._slept = asleep(), 0
        self._header = ",".join((_HEAD, *ledger.buckets))
        # The open files, by their kind.
        self._files: dict[str, GrowingCsv] = {}
        self._noted: set[Any] = set()
        self._batch_bytes = self._span_bytes = 0
        self._next_stride_at = _TRACE_BYTES[0]
        self._spans_taken = 0
        self._left_out = 0
        self._steps: deque[float] = deque(maxlen=_USUAL_OF)
        self._step_at: tuple[int, int] | None = None
        self._slow_count = 0
        self._has_failed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"time-ledger-{state.rank}", daemon=True)

    def start(self) -> None:
        """Begins to write."""
        self._thread.start()

    def traces(self, number: int) -> bool:
        """Returns whether to keep the spans of a batch with this number."""
        return self.stride > 0 and number % self.stride == 0

    def stop(self) -> None:
        """Writes the rest; waits up to five seconds."""
        self._stop.set()
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        ledger = self._ledger
        now, before = ledger.snapshot()
        written = now
        is_last = False
        while not is_last:
            seconds = _within(_TICK_SECONDS, (now - ledger.begin) / 1e9)
            is_last, late = self._wait(min(seconds, _LOOK_SECONDS))
            now, totals = ledger.snapshot()
            if late:
                self._move_to_stopped(late, totals, before, now)
            self._look()
            before = totals
            if is_last or now - written >= seconds * 1e9:
                written = now
                self._try(self._write, now, totals)
        for one in self._files.values():
            one.close()
        if self._left_out:
            _log.warning("time ledger: %d spans were dropped.", self._left_out)

    def _try(self, write: Callable[..., None], *arguments: Any) -> None:
        try:
            write(*arguments)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                _log.warning("time ledger: could not write to %s: %s", self._folder, error_text(error))

    # Stops.

    def _wait(self, seconds: float) -> tuple[bool, int]:
        """Waits; returns whether to end, and how many nanoseconds the process was stopped."""
        begin, woken, worked = time.monotonic(), _wakes(), self._ledger.worked()
        is_last = self._stop.wait(seconds)
        late = time.monotonic() - begin - seconds
        if woken is None or late < _STOPPED_SECONDS:
            return is_last, 0
        is_stopped = ((_wakes() or 0) - woken) * _WAKE_SECONDS < late
        # On a busy machine, this thread may have waited while the training thread worked.
        is_stopped &= self._ledger.worked() - worked <= seconds + late / 2
        return is_last, int(late * 1e9) if is_stopped else 0

    def _look(self) -> None:
        """Updates the time that the machine has slept; two readings differ by microseconds without sleep."""
        slept = self._read_asleep() - self._slept_before
        if slept - self._slept >= _STOPPED_SECONDS * 1e9:
            self._slept = slept

    def _move_to_stopped(self, nanoseconds: int, totals: list[int], before: list[int], now: int) -> None:
        """Moves time in which the process did not run from the interrupted bucket to `stopped`."""
        grown = [after - earlier for after, earlier in zip(totals, before, strict=True)]
        # The stop is in the bucket that grew the most since the last reading.
        most = max(range(len(grown)), key=grown.__getitem__)
        moved = min(nanoseconds, grown[most])
        if not moved:
            return
        self._moved[most] -= moved
        self._moved[self._ledger.buckets.index("stopped")] += moved
        self._ledger.spans.keep("stopped", now - moved, now, "stopped")

    # Files.

    def _file(self, kind: str, header: str) -> GrowingCsv:
        if kind not in self._files:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._files[kind] = GrowingCsv(self._folder / f"{kind}-{self._state.rank}.csv", header)
        return self._files[kind]

    def _wall(self, nanoseconds: int) -> float:
        return float(self._zero + (nanoseconds + self._slept) / 1e9)

    def _row(self, begin: float, end: float, step: int, nanoseconds: Sequence[float]) -> str:
        cells = [f"{self._session:.3f}", f"{begin:.3f}", f"{end:.3f}", str(step), ""]
        seconds = [one / 1e9 for one in nanoseconds]
        cells += [f"{one:.4f}".rstrip("0").rstrip(".") if round(one, 4) else "" for one in seconds]
        return ",".join(cells)

    def _write(self, now: int, totals: list[int]) -> None:
        ledger, step = self._ledger, int(self._state.timestamp.batch)
        is_first = "rank" not in self._files
        rows = self._file("rank", self._header)
        if is_first and ledger.begin < ledger.session:
            # In a separate row, because readers may know that the process was not started for this run.
            grown = ledger.divided(ledger.earlier, [0] * len(ledger.earlier))
            rows.write(self._row(self._wall(ledger.begin), self._session, 0, grown), is_last=True)
        charged = [total + moved for total, moved in zip(totals, self._moved, strict=True)]
        charged[ledger.buckets.index("stopped")] += self._slept
        grown = ledger.divided(charged, self._written)
        is_full = (now - self._begin) / 1e9 >= _within(_ROW_SECONDS, (now - ledger.begin) / 1e9)
        end = self._wall(now)
        rows.write(self._row(self._wall_begin, end, step, grown), is_last=is_full)
        if is_full:
            self._begin, self._wall_begin, self._written = now, end, charged
        self._write_spans(now)
        self._write_slow_steps(now, step)

    def _write_spans(self, now: int) -> None:
        ledger = self._ledger
        lines: list[str] = []
        # Only the current ones, because training adds more.
        for _ in range(len(ledger.spans.kept)):
            name, begin, end, track = ledger.spans.kept.popleft()
            self._spans_taken += 1
            self._add(lines, name, begin, (end - begin) // 1000, track)
        opened = {key: one for key, *one in ledger.open_now() if now - one[1] >= _OPEN_NANOSECONDS}
        for key, (name, begin, track) in opened.items():
            if key not in self._noted:
                self._add(lines, name, begin, "", track)
        self._noted = set(opened)
        self._left_out = max(self._left_out, ledger.spans.count - self._spans_taken - len(ledger.spans.kept))
        if lines:
            self._file("spans", "begin,microseconds,name,track").write("\n".join(lines), is_last=True)
            self._thin()

    def _add(
        self, lines: list[str], name: int | str, begin: int, microseconds: int | str, track: str
    ) -> None:
        if self._span_bytes > _MAX_SPAN_BYTES:
            self._left_out += 1
            return
        text = self._ledger.name_of(name) if isinstance(name, int) else _cell(name)
        line = f"{self._wall(begin):.6f},{microseconds},{text},{_cell(track)}"
        lines.append(line)
        self._span_bytes += len(line) + 1
        if track in {"time", "loop"}:
            self._batch_bytes += len(line) + 1

    def _thin(self) -> None:
        """Traces fewer batches the more was written."""
        if self._batch_bytes >= _TRACE_BYTES[1]:
            self.stride = 0
        elif self.stride and self._batch_bytes >= self._next_stride_at:
            self.stride *= 2
            self._next_stride_at = self._batch_bytes + _MORE_TRACE_BYTES

    def _write_slow_steps(self, now: int, step: int) -> None:
        ledger = self._ledger
        self._find_usual(now, step)
        for _ in range(len(ledger.slow_steps)):
            number, begin, end, before, after = ledger.slow_steps.popleft()
            row = self._row(self._wall(begin), self._wall(end), number, ledger.undivided(after, before))
            self._file("slow", self._header).write(row, is_last=True)
            self._slow_count += 1

    def _find_usual(self, now: int, step: int) -> None:
        """Sets the duration from which a step is slow, from the median between two readings."""
        before = self._step_at
        if before is not None and step == before[1]:
            return
        self._step_at = now, step
        if before is None or step < before[1]:
            return
        self._steps.append((now - before[0]) / (step - before[1]))
        if len(self._steps) >= _LEAST_KNOWN:
            usual = statistics.median(self._steps) * _SLOW * 2 ** (self._slow_count // _MAX_SLOW_STEPS)
            self._ledger.slow_nanoseconds = int(max(usual, _LEAST_SLOW))
