"""`Preemption`: how training ends when a scheduler takes the machine back.

Signals arrive in the main thread, between two instructions of Python: a handler only notes them. The trainer
looks at the note where ranks agree on stopping anyway, at the end of each batch.
"""

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import attrs

__all__ = ["Preemption", "SignalWatch"]

_log = logging.getLogger("events")

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# A scheduler and torchrun may send the same signal at once.
_SAME_SECONDS = 0.5
_REQUEUE_SECONDS = 10.0


@attrs.frozen(kw_only=True)
class Preemption:
    """Options for ending training on SIGTERM or SIGUSR1, after the current batch and with a checkpoint.

    ```python
    Trainer(..., save_folder="runs/mine/checkpoints", preemption=Preemption(save_seconds=80))
    ```

    A signal to any rank ends all of them: they save, run `FIT_END`, close with the status "preempted" and, in
    `state.stop_reason`, the signal and its ranks; then `fit` raises `SystemExit` with 128 plus the number of
    the signal. An evaluation is given up, and made by the run that resumes. A second signal, half a second
    later or more, ends the process at once.

    While `fit` runs in the main thread, these signals are its own; it calls the handler that was there
    before, and raises what that raises, once the checkpoint is saved. A signal that is ignored is left alone,
    and so is SIGUSR1 where the program handles it.

    Args:
        save_seconds: how long after the signal checkpoint and uploads may take: less than the scheduler
            waits, which is 30 s with Kubernetes and 90 s with Slurm's `--signal=USR1@90`.
        requeue: whether rank 0 then calls `scontrol requeue` for the job of Slurm that it runs in.

    Raises:
        ValueError: the time is not positive.
    """

    save_seconds: float = attrs.field(default=25.0, validator=attrs.validators.gt(0))
    requeue: bool = False


class SignalWatch:
    """Notes the signals of a `fit`.

    Args:
        preemption: what to do; None to watch for nothing.

    Attributes:
        number: the signal that this rank got, or None.
        is_watching: whether `fit` runs.
    """

    def __init__(self, preemption: Preemption | None) -> None:
        self.preemption = preemption
        self.number: int | None = None
        self.is_watching = False
        self._came_at = 0.0
        self._raised: BaseException | None = None
        self._earlier: dict[int, Any] = {}
        self._pid = os.getpid()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notes signals from here on, in the main thread."""
        self.number, self._raised, self._pid, self.is_watching = None, None, os.getpid(), True
        is_main = threading.current_thread() is threading.main_thread()
        for number in _SIGNALS if self.preemption is not None and is_main else ():
            earlier = signal.getsignal(number)
            is_unhandled = earlier is signal.SIG_DFL and not _is_handled_in_c(number)
            if is_unhandled or (callable(earlier) and number == signal.SIGTERM):
                self._earlier[number] = earlier
                signal.signal(number, self._note)
        try:
            yield
        finally:
            self.is_watching = False
            for taken, earlier in self._earlier.items():
                # Another handler may have been installed since, and calls this one.
                if signal.getsignal(taken) == self._note:
                    signal.signal(taken, earlier)

    @property
    def seconds_left(self) -> float:
        """How long a checkpoint may still take; where another rank got the signal, all of the time."""
        spent = 0.0 if self.number is None else time.monotonic() - self._came_at
        return max(1.0, 0.0 if self.preemption is None else self.preemption.save_seconds - spent)

    def end(self, number: int) -> BaseException:
        """Returns what ends the process: what an earlier handler has raised, or an exit by the signal."""
        return self._raised or SystemExit(128 + number)

    def requeue(self) -> None:
        """Asks Slurm to start this job again, where that is wanted."""
        job = os.environ.get("SLURM_JOB_ID")
        if self.preemption is None or not self.preemption.requeue:
            return
        if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
            job = f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
        if job is None:
            _log.error("The run is not queued again: SLURM_JOB_ID is not set.")
            return
        try:
            command = ["scontrol", "requeue", job]
            subprocess.run(command, check=True, capture_output=True, timeout=_REQUEUE_SECONDS)  # noqa: S603
        except (OSError, subprocess.SubprocessError) as error:
            _log.error("The run is not queued again: scontrol requeue %s failed: %s", job, error)

    def _note(self, number: int, frame: FrameType | None) -> None:
        earlier = self._earlier.get(number)
        if os.getpid() != self._pid:
            # A forked child: it ends as without a trainer. SIGUSR1 to all processes of a job is not for it.
            if callable(earlier):
                earlier(number, frame)
            elif number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if self.number is not None:
            if time.monotonic() - self._came_at > _SAME_SECONDS:
                raise self.end(number)
            return
        self.number, self._came_at = number, time.monotonic()
        if callable(earlier):
            try:
                earlier(number, frame)
            except BaseException as error:  # noqa: BLE001  # raised once the checkpoint is saved
                self._raised = error


def _is_handled_in_c(number: int) -> bool:
    """Returns whether code that is not Python's handles a signal, such as `faulthandler.register`."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return False
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)
