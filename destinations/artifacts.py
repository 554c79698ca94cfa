"""Uploads the files of a run to a store in the background: `UploadQueue` as a destination.

`upload_file` copies a file into the queue's spool in the training thread; everything else runs elsewhere.
"""

import inspect
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from events import Interval, Logger, State, WriteRate, check_placeholders, format_run_name, format_store
from uploads import Backlog, Store, StoreFolder, UploadError, UploadQueue, open_store

from .base import LoggerDestination, closed_state

if TYPE_CHECKING:
    from events import Time

__all__ = ["Artifacts"]

_log = logging.getLogger("destinations")

_FILES_LISTED = 1000
_LOOK_SECONDS = 0.2
# If uploads are paused for this long, until somebody acts, the end stops waiting.
_PAUSED_SECONDS = 3.0
_SECONDS_BEFORE_A_BAR = 1.0
# Fewer files or bytes need no progress bar.
_FILES_OF_A_BAR = 3
_BYTES_OF_A_BAR = 1 << 20


class Artifacts(LoggerDestination):
    """Uploads every file passed to `upload_file` to a store.

    ```python
    Trainer(..., loggers=[Artifacts("s3://bucket/{run_name}")], save_folder="runs/{run_name}/checkpoints")
    ```

    **Durability.** When `upload_file` returns, the bytes are in the spool and survive `kill -9` of this
    process. They are uploaded through retries, rotated credentials and hours of outage. When the run is
    closed, the log names the remaining files, with the command that finishes them. The page "Uploads"
    describes the queue, its spool, and the costs of `isolation`.

    **Pointers.** A pointer is a file named "….symlink" that contains another file's name, as
    `CheckpointSaver` writes it. It never becomes visible before its target. `download_file` of its name
    without ".symlink" downloads the target.

    **Threading.** `upload_file` blocks for as long as the copy takes, never for the network. A file that may
    be linked, such as `CheckpointSaver`'s, is not copied if the spool is on its file system. `fit_end`
    waits for the network only with `wait="uploaded"`, and then up to `wait_seconds`.

    **Ranks.** Rank 0 opens its queue at `init`, another rank with its first file; each has a spool of its
    own. No rank waits for another.

    Args:
        store: a URI or path for `uploads.open_store`, with `{run_name}` and `{rank}` filled in, or a `Store`.
            Files go below the name of the run, like checkpoints, unless `{run_name}` is in the store or in
            `remote_file_name`.
        remote_file_name: the name in the store, around the given name: "checkpoints/{remote_file_name}".
        wait: whether the end of `fit` waits for files in the spool ("spooled") or in the store ("uploaded").
        wait_seconds: how long the end of `fit` waits for uploads.
        close_seconds: how long closing the run waits for uploads.
        progress_bar: whether to show the remaining files if the end waits for more than a second, for three
            files or more, of a MiB or more.
        log_interval: how often to log `uploads/files_waiting` and similar metrics, such as "100ba"; None for
            never.
        write_rate: how often metrics are written, as with every destination; it doesn't delay files.
        queue_options: for `uploads.UploadQueue`: `spool`, `workers`, `isolation`, `durability`,
            `spool_bytes`, …

    Raises:
        TypeError: an argument is unknown, or has a wrong type.
        ValueError: the store's URI is invalid, `remote_file_name` doesn't contain the name, or another
            argument has a wrong value.
    """

    # Whether files go below the name of their run, unless the store contains it.
    _is_below_run = True

    def __init__(
        self,
        store: Store | str | Path,
        *,
        remote_file_name: str = "{remote_file_name}",
        wait: Literal["spooled", "uploaded"] = "spooled",
        wait_seconds: float = 600.0,
        close_seconds: float = 30.0,
        progress_bar: bool = True,
        log_interval: "str | Time | None" = None,
        write_rate: WriteRate | None = None,
        **queue_options: Any,
    ) -> None:
        super().__init__(write_rate=write_rate)
        if wait not in {"spooled", "uploaded"}:
            raise ValueError(f"wait must be 'spooled' or 'uploaded', got {wait!r}.")
        if "{remote_file_name}" not in remote_file_name:
            raise ValueError(
                f"remote_file_name must contain {{remote_file_name}}, got {remote_file_name!r}: "
                "files would replace each other."
            )
        if isinstance(store, str | Path):
            check_placeholders(str(store))
            # Reports a mistake in the URI here, not with the first checkpoint.
            open_store(store, **(queue_options.get("store_options") or {}))
        given = inspect.signature(UploadQueue).bind(store, close_at_exit=False, **queue_options)
        given.apply_defaults()
        UploadQueue.check_arguments(given.arguments)
        self._store = store
        self._remote_file_name = remote_file_name
        self._wait = wait
        self._wait_seconds = wait_seconds
        self._close_seconds = close_seconds
        self._progress_bar = progress_bar
        self._interval = None if log_interval is None else Interval(log_interval)
        self._queue_options = queue_options
        self._forget()
        # The outcome of the last run's files.
        self._outcome, self._lost = "", 0

    def _forget(self) -> None:
        self._state: State | None = None
        self._begin_span: Callable[[str, str], Callable[[], None]] = _no_span
        self._folder: StoreFolder | None = None
        self._files = 0
        self._bytes = 0
        self._has_said_copy = False

    @property
    def queue(self) -> UploadQueue | None:
        """The queue, once it has begun and while the run is open."""
        return None if self._folder is None else self._folder.queue

    @property
    def lost_files(self) -> int:
        """The number of files in neither the store nor the spool, such as files that a full spool refused."""
        return self._lost if self.queue is None else self.queue.backlog().lost

    def place(self) -> str:
        """Returns the store and the number of files, while the run is open, and after it was closed."""
        return self._outcome if self.queue is None else _outcome(self.queue, self._files, ())

    def init(self, state: State, logger: Logger) -> None:
        self._state, self._outcome, self._lost = state, "", 0
        # Composer's has none.
        self._begin_span = getattr(logger, "begin_span", _no_span)
        if state.rank == 0:
            self._open()

    def can_upload_files(self) -> bool:
        return True

    def upload_file(
        self,
        state: State,
        remote_file_name: str,
        file_path: Path,
        *,
        overwrite: bool,
        link: bool = False,
        crc32: int | None = None,
    ) -> None:
        folder = self._open()
        size = file_path.stat().st_size
        link = link and self._is_beside_spool(file_path, folder.queue)
        end = self._begin_span(remote_file_name, "uploads")
        try:
            handle = folder.upload_file(
                remote_file_name, file_path, overwrite=overwrite, link=link, crc32=crc32
            )
        except BaseException:
            end()
            raise
        handle.add_done_callback(end)
        self._files += 1
        self._bytes += size

    def has_uploaded(self, remote_file_name: str) -> bool:
        return self._folder is None or self._folder.has_uploaded(remote_file_name)

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        queue = self._open().queue
        options = {"overwrite": overwrite, "progress_bar": progress_bar}
        name, as_given = self._name(remote_file_name), self._called(remote_file_name)
        try:
            try:
                queue.download_file(name, destination, **options)
            except FileNotFoundError:
                # The name may begin with the name of another run.
                if as_given == name:
                    raise
                queue.download_file(as_given, destination, **options)
        except UploadError as error:
            if isinstance(error, FileNotFoundError | FileExistsError):
                raise
            raise OSError(f"could not download {remote_file_name!r}: {error}") from error

    def may_drop_files(self, state: State, *remote_file_names: str) -> None:
        self._open().may_drop_files(*remote_file_names)

    def delete_file(
        self, state: State, remote_file_name: str, *, after: Sequence[str] = (), then: Sequence[str] = ()
    ) -> None:
        self._open().delete_file(remote_file_name, after=after, then=then)

    def list_files(self, prefix: str) -> Sequence[str]:
        end = self._remote_file_name.partition("{remote_file_name}")[2]
        for name in dict.fromkeys([self._name(prefix), self._called(prefix)]):
            there = name.removesuffix(end)
            try:
                names = self._open().queue.names(there, _FILES_LISTED)
            except UploadError as error:
                raise OSError(f"cannot list {self._open().queue.uri(there)}: {error}") from error
            if names:
                return [prefix + name.removeprefix(there).removesuffix(end) for name in names]
        return []

    def file_uri(self, remote_file_name: str) -> str | None:
        return self._open().file_uris(remote_file_name)[0]

    def fit_start(self, state: State, logger: Logger) -> None:
        if self._interval is not None:
            self._interval.start(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._interval is not None and self.queue is not None and self._interval.passed(state):
            logger.log_metrics(
                {
                    "uploads/files": self._files,
                    "uploads/bytes": self._bytes,
                    "uploads/files_waiting": self.queue.unsettled(),
                }
            )

    def epoch_end(self, state: State, logger: Logger) -> None:
        # Epochs count when they end, after their last batch.
        Artifacts.batch_end(self, state, logger)

    iteration_end = epoch_end

    def fit_end(self, state: State, logger: Logger) -> None:
        if self._wait == "uploaded" and self.queue is not None:
            self._wait_for_uploads(self.queue, self._wait_seconds)

    def post_close(self) -> None:
        queue = self.queue
        try:
            if queue is not None:
                self._wait_for_uploads(queue, self._close_seconds)
                # Pending files stay in the spool, and the queue logs how to finish them.
                backlog = queue.close(timeout_seconds=0.0)
                self._outcome, self._lost = _outcome(queue, self._files, (backlog,)), backlog.lost
        finally:
            self._forget()

    __getstate__ = closed_state

    def _open(self) -> StoreFolder:
        if self._folder is None:
            if self._state is None:
                raise RuntimeError("Artifacts is not open: it was called before init or after post_close")
            store = self._store
            if isinstance(store, str | Path):
                store = format_store(str(store), self._state)
            # The engine closes it at the interpreter's end, after the destinations that upload their files.
            self._folder = StoreFolder(store, name_of=self._name, **self._queue_options)
        return self._folder

    def _name(self, remote_file_name: str) -> str:
        """Returns the name in the store of a file of this run: once below the name of the run."""
        if self._state is None:
            return self._called(remote_file_name)
        own = f"{self._state.run_name}/"
        if any("{run_name}" in place for place in (str(self._store), self._remote_file_name)):
            return self._called(remote_file_name.removeprefix(own))
        # Other runs have files of the same names.
        return self._called(
            own + remote_file_name.removeprefix(own) if self._is_below_run else remote_file_name
        )

    def _called(self, remote_file_name: str) -> str:
        template = self._remote_file_name
        filled = template if self._state is None else format_run_name(template, self._state)
        return filled.replace("{remote_file_name}", remote_file_name)

    def _is_beside_spool(self, file_path: Path, queue: UploadQueue) -> bool:
        """Returns whether a file can be linked into the spool; otherwise logs the cost once."""
        if file_path.stat().st_dev == queue.spool.path.stat().st_dev:
            return True
        if not self._has_said_copy:
            self._has_said_copy = True
            _log.warning(
                "Training waits while %s is copied to the spool %s, which is on another file system. "
                "Artifacts(spool=...) on the same one takes it by a link.",
                file_path,
                queue.spool.path,
            )
        return False

    def _wait_for_uploads(self, queue: UploadQueue, seconds: float) -> None:
        """Waits until all files are uploaded, or the time is up; shows the remaining files after a second."""
        deadline = time.monotonic() + seconds
        is_empty = queue.drain(min(seconds, _SECONDS_BEFORE_A_BAR)).is_empty
        if not is_empty and queue.unsettled():
            self._show_uploads(queue, deadline)
        # Deletions too.
        if not queue.unsettled():
            queue.drain(max(0.0, deadline - time.monotonic()))

    def _show_uploads(self, queue: UploadQueue, deadline: float) -> None:
        from tqdm import tqdm

        total = queue.unsettled()
        is_shown = self._progress_bar and total >= _FILES_OF_A_BAR and self._bytes >= _BYTES_OF_A_BAR
        with tqdm(total=total, desc="Uploads", unit=" file", disable=not is_shown) as bar:
            paused_since = math.inf
            while (left := queue.unsettled()) and (remaining := deadline - time.monotonic()) > 0:
                queue.drain(min(_LOOK_SECONDS, remaining))
                bar.update(total - left - bar.n)
                # Someone has to renew the credentials; the log has reported the pause.
                paused_since = min(paused_since, time.monotonic()) if queue.paused_because else math.inf
                if time.monotonic() - paused_since > _PAUSED_SECONDS:
                    break
            bar.update(total - queue.unsettled() - bar.n)


def _no_span(_name: str, _track: str) -> Callable[[], None]:
    return lambda: None


def _outcome(queue: UploadQueue, files: int, backlogs: tuple[Backlog, ...]) -> str:
    """Returns the store, the number of files, and how many of them are not in it."""
    text = f"{queue.uri('').rstrip('/')}: {files} file{'' if files == 1 else 's'}"
    for backlog in backlogs:
        if backlog.failures:
            text += f", {len(backlog.failures)} failed"
        if backlog.lost:
            text += f", {backlog.lost} lost"
        if backlog.remaining:
            text += f", {len(backlog.remaining)} not uploaded yet; finish with: {backlog.resume_command}"
    return text
