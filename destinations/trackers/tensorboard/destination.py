"""`TensorBoard`: a run as event files, which `tensorboard --logdir` shows.

Its methods run in the training thread and hand over; a thread of its own encodes and writes.
"""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from destinations.background import WhenFull
from destinations.trackers.tracker import Sink, Tracker, require_package
from events import State, WriteRate, check_run_name, format_run_name

from .sink import TensorBoardSink

__all__ = ["TensorBoard"]

_log = logging.getLogger("destinations")

_UPLOAD_SECONDS = 30.0


class TensorBoard(Tracker):
    """Writes event files for TensorBoard, with neither TensorFlow nor `torch.utils.tensorboard`.

    ```python
    trainer = Trainer(model, train_dataloader, max_duration="5ep", loggers=[TensorBoard("runs/{run_name}")])
    ```

    **What is written.** Metrics as scalars, one event per call, as float32, which is what TensorBoard's scalars are. Images as
    PNG; under "name/mask" once more with each mask laid over, the labels in the description. Sounds as WAV, videos as GIF,
    histograms, point clouds. Texts, tables, and traces as Markdown. Hyperparameters for the HPARAMS tab, as they are at the
    first record; what is added later is a text. Steps and times are those of the call.

    **Names** are the tags. Where a name has been given to one kind of record, another kind adds its own: "loss/text".

    **Resume.** A folder that holds event files is continued in a new one. What training goes through again is marked as
    replaced, and TensorBoard does not show it; what was logged before the checkpoint stays, also of its step. No file is
    changed.

    **Files** are named so that no two writers meet and the newest is read last; what another writer has open is not taken
    for an earlier run. TensorBoard itself expects one writer of a folder at a time: it reads on in the newest file only.

    **Threading, bounds, failures, close, fork**: as every tracker; see `docs/trackers.md`. While the disk is full, records
    wait.

    Args:
        log_dir: the folder of the run; placeholders as in `events.format_run_name`. With `all_ranks` and no `{rank}` in it,
            ranks other than 0 have a folder "rank1" and so on inside.
        flush_seconds: how often what was logged is written to the file.
        remote_folder: what the folder is called where the file is uploaded to by `logger.upload_file`, at the end of `fit`
            and at `close`; None for no upload.
        all_ranks: whether ranks other than 0 write too.
        close_seconds: how long `close` may take for what is left.
        max_waiting_values: how many values of metrics may wait.
        max_waiting_bytes: how large media and all else may be that waits.
        when_full: what to do with metrics for which there is no room: "drop_oldest", "drop_newest" or "wait".
        wait_seconds: how long a call may wait for room.
        clock: the time in seconds since the epoch; called in the thread that logs.
        write_rate: how often metrics are taken; None for every time.

    Raises:
        ImportError: the package `tensorboard` is missing.
        NotADirectoryError: at `init`, there is a file where the folder should be.
        PermissionError: at `init`, nobody may write there.
        ValueError: an argument is out of its range.
    """

    sink_class = TensorBoardSink

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "runs/{run_name}/tensorboard",
        *,
        flush_seconds: float = 2.0,
        remote_folder: str | None = None,
        all_ranks: bool = False,
        close_seconds: float = 30.0,
        max_waiting_values: int = 1_000_000,
        max_waiting_bytes: int = 256 << 20,
        when_full: WhenFull = "drop_oldest",
        wait_seconds: float = 5.0,
        clock: Callable[[], float] = time.time,
        write_rate: WriteRate | None = None,
    ) -> None:
        super().__init__(
            flush_seconds=flush_seconds,
            all_ranks=all_ranks,
            close_seconds=close_seconds,
            max_waiting_values=max_waiting_values,
            max_waiting_bytes=max_waiting_bytes,
            when_full=when_full,
            wait_seconds=wait_seconds,
            clock=clock,
            write_rate=write_rate,
        )
        require_package("tensorboard", "tensorboard", "TensorBoard")
        self._template = os.fspath(log_dir)
        self._remote_folder = remote_folder

    @property
    def log_dir(self) -> Path | None:
        """The folder, absolute, while a run is open and this rank writes; else None."""
        return None if self._sink is None else self._sink.folder

    @property
    def path(self) -> Path | None:
        """The event file, absolute, while a run is open and once the thread has made it; else None."""
        return None if self._sink is None else self._sink.path

    def make_sink(self, state: State) -> Sink:
        """Returns the writer of a file in the run's folder, which is looked at here: what is wrong with it is known at once."""
        check_run_name(self._template, state)
        folder = Path(format_run_name(self._template, state)).absolute()
        if state.rank != 0 and "{rank" not in self._template:
            folder /= f"rank{state.rank}"
        _check_folder(folder)
        return TensorBoardSink(folder, self._clock())

    @property
    def _sink(self) -> TensorBoardSink | None:
        return None if self._feed is None else self._feed.sink  # type: ignore[return-value]

    def fit_end(self, state: State, logger: Any) -> None:
        """Uploads the file as it is by then."""
        self._upload(logger)

    def close(self, state: State, logger: Any) -> None:
        """Writes how the run ended, and uploads the file."""
        super().close(state, logger)
        self._upload(logger)

    def _upload(self, logger: Any) -> None:
        feed, sink = self._feed, self._sink
        if self._remote_folder is None or feed is None or sink is None:
            return

        def upload() -> None:
            if sink.path is not None:
                logger.upload_file(f"{self._remote_folder}/{sink.path.name}", sink.path, overwrite=True)

        # The copy that is taken there holds whole records.
        if not feed.while_paused(upload, min(_UPLOAD_SECONDS, self._close_seconds)):
            _log.warning("TensorBoard: %s was not uploaded, for it could not be written in time.", sink.path)

    def __repr__(self) -> str:
        return f"TensorBoard({self._template!r})"


def _check_folder(folder: Path) -> None:
    """Refuses a path that no folder can be at, without making one.

    Raises:
        NotADirectoryError: there is a file in its place or above.
        PermissionError: nothing can be made there.
    """
    for parent in (folder, *folder.parents):
        if parent.is_dir():
            if not os.access(parent, os.W_OK | os.X_OK):
                raise PermissionError(
                    f"log_dir must be one that can be written to, got {str(folder)!r}: no right to write to {parent}."
                )
            return
        if os.path.lexists(parent):
            raise NotADirectoryError(f"log_dir must be a folder, got {str(folder)!r}: {parent} is a file.")
