"""`SummaryWriter`: the calls of PyTorch's writer for TensorBoard, into a run folder.

Its methods run in the thread that calls them, one at a time, and hand over to a `Run`.
"""

import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from destinations.run_directory import RunDirectory
from events import Destination, Event, Run

from .summary_calls import Seconds, Step, SummaryCalls

__all__ = ["SummaryWriter"]


class _Run(Run):
    warns_of_close = False


class _Folder(RunDirectory):
    _warns_of_repeats = False


class _Clock:
    """The `walltime` of the current call, if given; holds no reference to the writer."""

    walltime: Seconds = None

    def __call__(self) -> float:
        return time.time() if self.walltime is None else float(self.walltime)


class SummaryWriter(SummaryCalls):
    """Takes the calls of `torch.utils.tensorboard.SummaryWriter`, and writes a run folder.

    ```python
    from destinations.compat import SummaryWriter

    with SummaryWriter("runs/mnist") as writer:
        writer.add_scalar("loss/train", 0.5, global_step=1)
    print(open_runs("runs")["mnist"].series("loss/train").value)  # [0.5]
    ```

    **Tags** are the names of metrics and records. `add_scalars(main, {"a": 1})` logs "main/a".

    **Steps.** A call without `global_step` has step 0. Steps may go back or repeat: every value is a separate
    point. Only `purge_step` removes points.

    **Values.** A scalar may be a number, an array or a tensor of one element on any device, or a string that
    holds a number; it is kept in double precision. A value that cannot be logged is dropped and reported
    once; no call raises for it.

    **Hyperparameters.** The first `add_hparams` without a `run_name` belongs to the run itself. Every other
    call creates a separate run in a subfolder, named `run_name` or after the time.

    **Several ranks.** Only rank 0 writes.

    **Not kept**, with one warning each: graphs, embeddings, layouts of custom scalars, faces and
    configurations of meshes, domains of hyperparameters.

    **Threading.** Any thread may call it. **After close**, a call opens the run again.

    Args:
        log_dir: the folder of the run, which is continued if it is one. Default: `runs/` with the date, the
            host and `comment`.
        comment: the end of the default name.
        purge_step: rows of this step and later ones are moved out of the run that is continued.
        max_queue: ignored: a row is safe when its call returns.
        flush_secs: ignored, for the same reason.
        filename_suffix: ignored: the files of a run have fixed names.
        event_files: whether to write event files for TensorBoard into the folder too.

    Raises:
        ValueError: `log_dir` is a URL.
        RunPathError: the folder is not writable.
        RunInUseError: another process writes to it.
        ImportError: event files are asked for, and the package `tensorboard` is not installed.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        comment: str = "",
        purge_step: int | None = None,
        max_queue: int = 10,
        flush_secs: int = 120,
        filename_suffix: str = "",
        *,
        event_files: bool = False,
    ) -> None:
        if not log_dir:
            name = f"{time.strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}{comment}"
            log_dir = Path("runs") / name
        if "://" in os.fspath(log_dir):
            raise ValueError(
                f"log_dir must be a local folder, got {os.fspath(log_dir)!r}. "
                "For a bucket, use a Run with RunDirectory and Artifacts."
            )
        self.log_dir = os.fspath(log_dir)
        self.purge_step = purge_step
        self.max_queue = max_queue
        self.flush_secs = flush_secs
        self.filename_suffix = filename_suffix
        self._event_files = event_files
        # Guards all below: a call, and the opening and closing of the run.
        self._lock = threading.RLock()
        self._run: Run | None = None
        self._clock = _Clock()
        self._has_hparams = False
        self._opened()

    @property
    def file_writer(self) -> Self | None:
        """The writer itself, for `file_writer.get_logdir()`; None while it is closed, as there."""
        return self if self._run is not None else None

    def get_logdir(self) -> str:
        """Returns the folder of the run."""
        return self.log_dir

    def add_hparams(
        self,
        hparam_dict: Mapping[str, Any],
        metric_dict: Mapping[str, Any],
        hparam_domain_discrete: Mapping[str, Sequence[Any]] | None = None,
        run_name: str | None = None,
        global_step: Step = None,
    ) -> None:
        """Logs hyperparameters and their metrics; the class explains to which run.

        Raises:
            TypeError: one of the two is not a dict.
        """
        folder = Path(self.log_dir)
        below = folder / (run_name or str(time.time()))
        if below.resolve() == folder.resolve() or not (run_name or self._has_hparams):
            self._has_hparams = True
            super().add_hparams(hparam_dict, metric_dict, hparam_domain_discrete, global_step=global_step)
            return
        with SummaryWriter(below, event_files=self._event_files) as other:
            other.add_hparams(hparam_dict, metric_dict, hparam_domain_discrete, global_step=global_step)

    def flush(self) -> None:
        """Writes pending records; blocks. Rows of metrics are safe without it."""
        with self._lock:
            if self._run is not None:
                self._run.flush()

    def close(self) -> None:
        """Ends the run as completed; a second call does nothing, and a later record opens it again."""
        self._end(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the run as completed, or with the status that the exception implies."""
        self._end(exception)

    def _end(self, exception: BaseException | None) -> None:
        with self._lock:
            run, self._run = self._run, None
            if run is not None:
                run.__exit__(None if exception is None else type(exception), exception, None)

    def _opened(self) -> Run:
        """Returns the run; begins one at the first call, and at a call after `close`."""
        if self._run is not None:
            return self._run
        folder = _Folder(self.log_dir, if_exists="resume", clock=self._clock)
        loggers: list[Destination] = [folder]
        if self._event_files:
            from destinations.trackers.tensorboard import TensorBoard

            loggers.append(TensorBoard(self.log_dir, clock=self._clock))
        run = _Run(loggers, run_name=Path(self.log_dir).absolute().name)
        run.run_event(Event.INIT)
        if folder.run_dir not in {None, Path(self.log_dir).absolute()}:
            self.log_dir = str(
                folder.run_dir
            )  # the given one is written to by another writer of this process
        if self.purge_step is not None:
            run.state.timestamp = run.state.timestamp.copy(batch=int(self.purge_step))
            folder.load_state_dict({"time": 0.0})  # Drops the records of that step too.
            run.fit_start()
            self.purge_step = None
        self._run = run
        return run

    def put(self, method: str, value: Any, step: Step, walltime: Seconds, **others: Any) -> None:
        """Logs a record at a step; the logger calls functions and reports their errors."""
        at = 0 if step is None else int(step)
        if method != "log_hyperparameters":
            others["step"] = at
        with self._lock:
            self._clock.walltime = walltime
            try:
                getattr(self._opened(), method)(value, **others)
            finally:
                self._clock.walltime = None
            state = self._opened().state
            if at > state.timestamp.batch.value:
                state.timestamp = state.timestamp.copy(batch=at)
