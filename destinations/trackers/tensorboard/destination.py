"""`TensorBoard`: writes a run as event files for `tensorboard --logdir`.

Its methods run in the training thread and queue records; a background thread encodes and writes.
"""

import logging
import os
import re
from pathlib import Path
from typing import Any

from destinations.base import check_folder
from destinations.trackers.target import Target
from destinations.trackers.tracker import Sink, Tracker, require_package
from events import State, check_placeholders, check_run_name, format_run_name

from .sink import TensorBoardSink

__all__ = ["TensorBoard"]

_log = logging.getLogger("destinations")

_UPLOAD_SECONDS = 30.0


class _Folder(Target):
    """A folder with a subfolder of event files for each run."""

    places = ("FOLDER",)
    own_files = re.compile(r"events\.out\.tfevents\..*")


class TensorBoard(Tracker):
    """Writes event files for TensorBoard, with neither TensorFlow nor `torch.utils.tensorboard`.

    ```python
    trainer = Trainer(model, train_dataloader, max_duration="5ep", loggers=[TensorBoard("runs/{run_name}")])
    ```

    **Records.** Metrics become float32 scalars, one event per call. Images become PNG, and under "name/mask"
    once more with each mask as an overlay, with the labels in the description. Audio becomes WAV, video GIF;
    histograms and point clouds are supported. Texts, tables and traces become Markdown. Hyperparameters
    appear in the HPARAMS tab as of the first record; later ones become a text. Steps and times are those of
    the call.

    **Names** are the tags. If a name is already used for another kind of record, the kind is appended:
    "loss/text".

    **Resume.** In a folder with event files, a new file is added, and no file is changed. Records that
    training repeats are marked as replaced, and TensorBoard hides them; records from before the checkpoint
    stay, also those of its step.

    **Files** have unique names, and the newest is read last; files that another writer has open are not
    continued. TensorBoard itself expects one writer per folder: it follows only the newest file.

    Threading, bounds, failures, close and fork: see `Tracker`. While the disk is full, records wait.

    Args:
        log_dir: folder of the run; placeholders as in `events.format_run_name`. With `all_ranks` and no
            `{rank}`, other ranks use the subfolders "rank1" and so on.
        remote_folder: remote folder for uploads by `logger.upload_file`, at the end of `fit` and at `close`;
            None for no upload.
        options: arguments of `Tracker`.

    Raises:
        ImportError: the package `tensorboard` is not installed.
        NotADirectoryError: at `init`, the path or a parent is a file.
        PermissionError: at `init`, the folder is not writable.
        ValueError: an argument is out of its range.
    """

    sink_class = TensorBoardSink
    target = _Folder

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "runs/{run_name}/tensorboard",
        *,
        remote_folder: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        require_package("tensorboard", "tensorboard", "TensorBoard")
        self._template = os.path.expanduser(log_dir)  # noqa: PTH111  # Path raises without a home
        check_placeholders(self._template)
        self._remote_folder = remote_folder

    def place(self) -> str:
        return "" if self.log_dir is None else str(self.log_dir)

    @property
    def log_dir(self) -> Path | None:
        """Absolute path of the folder while a run is open on this rank; else None."""
        return None if self._sink is None else self._sink.folder

    @property
    def path(self) -> Path | None:
        """Absolute path of the event file, once the background thread has created it; else None."""
        return None if self._sink is None else self._sink.path

    def make_sink(self, state: State) -> Sink:
        """Returns the sink; checks the folder first, so that errors are raised at once."""
        check_run_name(self._template, state)
        folder = Path(format_run_name(self._template, state)).absolute()
        if state.rank != 0 and "{rank" not in self._template:
            folder /= f"rank{state.rank}"
        check_folder(folder)
        return TensorBoardSink(folder, self._clock())

    def fit_end(self, state: State, logger: Any) -> None:
        """Uploads the current file."""
        self._upload(logger)

    def close(self, state: State, logger: Any) -> None:
        """Queues the end of the run, and uploads the file."""
        super().close(state, logger)
        self._upload(logger)

    def _upload(self, logger: Any) -> None:
        feed, sink = self._feed, self._sink
        if self._remote_folder is None or feed is None or sink is None:
            return

        def upload() -> None:
            if sink.path is not None:
                logger.upload_file(f"{self._remote_folder}/{sink.path.name}", sink.path, overwrite=True)

        # Paused, so that the copy contains only whole records.
        if not feed.run_while_paused(upload, min(_UPLOAD_SECONDS, self._close_seconds)):
            _log.warning("TensorBoard: %s was not uploaded: it could not be flushed in time.", sink.path)

    def __repr__(self) -> str:
        return f"TensorBoard({self._template!r})"
