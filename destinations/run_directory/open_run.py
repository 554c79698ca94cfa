"""`OpenRun`: a run that is being written, from when its folder is locked until it is released."""

import contextlib
import logging
import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from destinations.background import Lane
from destinations.kinds import kind_of
from events import RecordError, State
from uploads import UploadError

from .documents import Documents
from .folder import HeldFolder, holds_run
from .forking import fork_place
from .layout import ARTIFACTS_FOLDER
from .media_writer import FileKeeping, MediaWriter, artifact_path
from .opening import EarlyRecords, TakenPlace, not_writable, note_session
from .rank_writer import RankWriter, RunOptions

if TYPE_CHECKING:
    from uploads import StoreFolder

    from .claim import Claim
    from .mirror import Mirror

__all__ = ["OpenRun", "RunFiles"]

_log = logging.getLogger("destinations")

_FILES_LISTED = 1000


@attrs.frozen
class RunFiles:
    """The files of an open run.

    Attributes:
        run_dir: the folder of the run.
        keeping: what to do with a file: "copy", "link" or "off".
        media: writes the index, and the files of a run without a store; None on ranks other than 0.
        store: takes the files of a run in a store; None without a store.
    """

    run_dir: Path
    keeping: FileKeeping
    media: MediaWriter | None
    store: "StoreFolder | None"

    def upload(self, name: str, path: Path, *, overwrite: bool, link: bool, step: int) -> None:
        """Copies, links, or uploads a file.

        A file that may be linked, or a pointer, belongs to the checkpoint that was saved last.
        """
        is_checkpoint = link or name.endswith(".symlink")
        if self.store is not None:
            artifact_path(Path(), name)
            size = path.stat().st_size
            self.store.upload_file(name, path, overwrite=overwrite, link=link)
            if self.media is not None:
                self.media.note_file(name, size, step=step, is_checkpoint=is_checkpoint)
        elif self.media is not None:
            keeping = self.keeping
            if link and keeping == "copy" and path.stat().st_dev == self.run_dir.stat().st_dev:
                keeping = "link"
            self.media.keep_file(
                path, name, overwrite=overwrite, keeping=keeping, step=step, is_checkpoint=is_checkpoint
            )

    def delete(self, name: str, *, after: Sequence[str], then: Sequence[str], step: int) -> None:
        """Removes files in the background."""
        if self.store is not None:
            self.store.delete_file(name, after=after, then=then)
        if self.media is not None:
            for one in (name, *then):
                self.media.delete_file(one, step=step, with_folder=bool(then))

    def download(self, name: str, destination: str, *, overwrite: bool, progress_bar: bool) -> None:
        """Copies a file to a path."""
        if self.store is not None:
            # A pointer in the store contains names as they are in the store.
            path = f"{ARTIFACTS_FOLDER}/{name.removeprefix(f'{ARTIFACTS_FOLDER}/')}"
            try:
                self.store.queue.download_file(
                    path, destination, overwrite=overwrite, progress_bar=progress_bar
                )
            except UploadError as error:
                if isinstance(error, FileNotFoundError | FileExistsError):
                    raise
                raise OSError(f"could not download {name!r}: {error}") from error
            return
        source = artifact_path(self.run_dir, name)
        if not source.is_file():
            raise FileNotFoundError(f"no artifact {name!r} in {self.run_dir / ARTIFACTS_FOLDER}")
        if Path(destination).exists() and not overwrite:
            raise FileExistsError(
                f"local file {destination!r} exists already. Pass overwrite=True to replace it."
            )
        Path(destination).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, destination)

    # For a run in a store. Files of other runs are found in the folder.

    def names(self, prefix: str) -> Sequence[str]:
        """Returns the names of the files in the store that begin with a prefix."""
        if self.store is None or self.keeping == "off":
            return ()
        start = f"{ARTIFACTS_FOLDER}/"
        try:
            names = self.store.queue.names(start + prefix, _FILES_LISTED)
        except UploadError as error:
            raise OSError(f"cannot list {self.store.queue.uri(start)}: {error}") from error
        return [name.removeprefix(start) for name in names]

    def has_uploaded(self, name: str) -> bool:
        """Returns whether the store has a file; True if it needn't have it."""
        return self.store is None or self.keeping == "off" or self.store.has_uploaded(name)

    def uri(self, name: str) -> str | None:
        """Returns the URI of a file in the store; None without a store."""
        return None if self.store is None or self.keeping == "off" else self.store.file_uris(name)[0]


class OpenRun:
    """The documents, media, files, and rows of one run, with their writers.

    Rank 0 writes all of them. Other ranks write their rows, and the files that go to a store.

    Args:
        taken: the place of the run; released with it.
        state: the state of the run.
        options: how the run is written.
        early: records that wait for a run to open; this run counts those that are lost.

    Raises:
        RunPathError: the place isn't writable.
        RunInUseError: another machine has taken the run in the store.
    """

    def __init__(self, taken: TakenPlace, state: State, options: RunOptions, early: EarlyRecords) -> None:
        self.place = taken.place
        self.run_dir = taken.place.folder
        self.state = state
        self._early = early
        self.documents: Documents | None = None
        self.media: MediaWriter | None = None
        self._lane: Lane | None = None
        # All or nothing: a half-opened folder would accept records and lose them.
        with contextlib.ExitStack() as undo:
            undo.callback(taken.lock.release)
            try:
                self._open(taken, options, undo)
            except OSError as error:
                if isinstance(error, RecordError):
                    raise
                raise not_writable(taken.place, error) from error
            undo.pop_all()

    def _open(self, taken: TakenPlace, options: RunOptions, undo: contextlib.ExitStack) -> None:
        folder, claim = HeldFolder(self.run_dir), taken.claim
        store, mirror = (None, None) if claim is None else self._send(claim, folder, options, undo)
        if self.state.rank == 0:
            fork = None
            if options.fork_from is not None and not holds_run(self.run_dir, 0):
                fork = fork_place(options.fork_from, self.run_dir, loads=bool(self.state.continues_run))
            array_job = os.environ.get("SLURM_ARRAY_JOB_ID")
            self.documents = documents = Documents(
                folder.path,
                options.run_id or uuid.uuid4().hex[:12],
                (*options.tags, *([f"sweep:{array_job}"] if array_job else ())),
                options.notes,
                options.clock(),
                "" if options.is_trainer else self.run_dir.name,
                fork=fork,
            )
            session = documents.sessions.current["session"]
            note_session(session)
            self._lane = Lane(f"run-directory-{self.run_dir.name}-media")
            there = frozenset() if claim is None else frozenset(claim.there)
            self.media = MediaWriter(folder, self._lane, options.clock, there)
            self.media.begin_session(session)
            if mirror is not None:
                self.media.on_file = mirror.add
        self.files = RunFiles(self.run_dir, options.keeping, self.media, store)
        self.writer = RankWriter(
            run_dir=self.run_dir,
            state=self.state,
            lock=taken.lock,
            documents=self.documents,
            options=options,
            media_stats=self._media_stats,
            run_folder=folder,
            mirror=mirror,
        )
        undo.callback(self.writer.close, 0.0)
        self.writer.start()

    def _send(
        self, claim: "Claim", folder: HeldFolder, options: RunOptions, undo: contextlib.ExitStack
    ) -> "tuple[StoreFolder, Mirror]":
        """Claims the run in the store for this session."""
        from uploads import StoreFolder

        from .mirror import Mirror

        claim.take(folder.where)
        store = StoreFolder(claim.uri, name_of=lambda name: f"{ARTIFACTS_FOLDER}/{name}", fence=claim.fence)
        undo.callback(store.queue.close, 0.0)
        mirror = Mirror(claim, folder.path, self.state.rank, options.mirror_seconds, store.queue)
        return store, mirror

    # Sessions.

    def begin_session(self, now: float) -> None:
        """Begins another session in this process, which goes back to an earlier place."""
        if self.documents is not None:
            self.documents.begin_session(now)
        session = self.writer.begin_session()
        if self.media is not None:
            self.media.begin_session(session)

    def place_of_checkpoint(self, now: float) -> dict[str, Any]:
        """Returns the place of a checkpoint: everything this session has logged so far belongs to it."""
        place = {"time": now, "session": self.writer.session, "mark": self.writer.journal.mark_boundary()}
        if self.media is not None:
            place["records"] = self.media.note_checkpoint()
        if (documents := self.documents) is not None:
            self.writer.write_now(lambda: documents.note_checkpoint({"step": self.step, **place}))
        return place

    # Records.

    @property
    def step(self) -> int:
        """The step of a record that is logged without one."""
        return int(self.state.timestamp.batch)

    def add_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Adds hyperparameters to `hparams.yaml` and the sidecar."""
        documents, media = self.documents, self.media
        if documents is not None and media is not None:
            documents.add_hyperparameters(hyperparameters, media.next_place()["record"])
            self.writer.write_now(lambda: documents.write_hparams(durable=False))

    def log_record(self, kind: str, arguments: dict[str, Any]) -> None:
        """Writes a record in the background; see `MediaWriter`."""
        step = arguments.pop("step", None)
        if self.media is not None:
            self.media.log_record(
                kind_of(method=f"log_{kind}"), arguments, self.step if step is None else step
            )
            self.writer.changed()

    # The end.

    def end(self, state: State, now: float) -> None:
        """Records how the run ended, and how many files other destinations have lost."""
        files = sum(getattr(one, "lost_files", 0) for one in state.callbacks)
        if files and self.media is not None:
            self.media.lost["uploads"] = files
        if self.documents is not None:
            self.documents.end(state, now)

    def flush(self) -> None:
        """Waits until everything logged is written, at most ten seconds each for media and for metrics."""
        if self._lane is not None:
            self._lane.flush(10.0)
        self.writer.flush()

    def stop(self, seconds: float) -> None:
        """Stops the lane, then the writer, each with this timeout; at once if interrupted."""
        try:
            self._stop(seconds)
        except BaseException:
            self._stop(0.0)
            raise

    def _stop(self, seconds: float) -> None:
        if self._lane is not None and self.media is not None:
            is_done = self._lane.stop(seconds)
            self.media.count_losses()
            if not is_done:
                _log.warning("run folder %s: media were dropped after %.0f s.", self.run_dir, seconds)
        self.writer.close(seconds)

    def discard(self, now: float, seconds: float) -> None:
        """Closes the run and removes its folder; its records go to another folder."""
        if self.documents is not None:
            self.documents.close("completed", None, None, now)
        self.stop(seconds)
        if self.place.uri is None:
            shutil.rmtree(self.run_dir, ignore_errors=True)

    def _media_stats(self) -> dict[str, Any]:
        if self._lane is None or self.media is None:
            return {}
        counts, early = self._lane.counts, self._early.lost
        return {
            "accepted": counts.accepted,
            "done": counts.done,
            "failed": counts.failed,
            "dropped": counts.dropped,
            "errors": dict(counts.errors),
            "files": self.media.files_written,
            "bytes": self.media.bytes_written,
            "lost": dict(self.media.lost) | ({"early": early} if early else {}),
        }
