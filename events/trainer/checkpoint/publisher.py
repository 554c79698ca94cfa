"""Hands complete checkpoints to a store or to destinations, and applies the rules of retention.

Everything runs in the training thread; uploads and deletions happen in the background. With shards, the
pointer moves and older checkpoints are deleted once the files of all ranks are uploaded.
"""

import concurrent.futures
import contextlib
import logging
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from events.logger.logger import Logger
from events.names import LiteralName
from events.state import State
from events.trainer import distributed

from .files import MANIFEST, METADATA, files_beside_manifest, remove_checkpoints, tensors_of, values_of
from .folder import CheckpointFolder, asked
from .retention import KeptCheckpoints, SavedCheckpoint
from .sharded import ShardedCheckpoint, WrittenShard

if TYPE_CHECKING:
    from uploads import StoreFolder

__all__ = ["CheckpointCounts", "Publisher", "Save", "in_folder"]

_log = logging.getLogger("events")


@attrs.define
class CheckpointCounts:
    """What happened to the checkpoints of a run, as numbers of checkpoints.

    Attributes:
        saved: complete on the disk.
        failed: could not be written.
        waited: training waited for the previous checkpoint.
        skipped: left out because the previous checkpoint was still being written.
        synchronous: written while training waited, for lack of memory.
        withdrawn: never uploaded, because they were no longer kept when the store of `folder` came back.
    """

    saved: int = 0
    failed: int = 0
    waited: int = 0
    skipped: int = 0
    synchronous: int = 0
    withdrawn: int = 0


@attrs.define(eq=False, kw_only=True)
class Save:
    """A checkpoint that is being saved.

    Attributes:
        path: the path of the file, or of the manifest.
        remote_name: its name where it is uploaded.
        identifier: the checkpoint's identifier.
        summary: its description, as JSON.
        pointer: the path and the text of the pointer; or None.
        surplus: the paths and identifiers of checkpoints to remove once this one is complete.
        end: ends its span in the trace of the run.
        future: the future of its current step.
        shards: the files of all ranks while rank 0 completes a checkpoint in shards; empty before.
        given_up: set once nobody waits for it any more, so that it must not appear later.
        started: when writing began, on the monotonic clock.
        is_late: whether a warning was logged that it takes too long.
    """

    path: Path
    remote_name: str
    identifier: str
    summary: str
    pointer: tuple[Path, str] | None
    surplus: tuple[tuple[Path, str], ...]
    end: Callable[[], None]
    future: "concurrent.futures.Future[Any]" = attrs.field(factory=concurrent.futures.Future)
    shards: list[WrittenShard] = attrs.field(factory=list)
    given_up: threading.Event = attrs.field(factory=threading.Event)
    started: float = attrs.field(factory=time.monotonic)
    is_late: bool = False

    def is_wanted(self) -> bool:
        """Returns whether it may still appear; any thread."""
        return not self.given_up.is_set()


class _Target:
    """Where checkpoints are uploaded: the destinations, or the run's own folder in a store.

    Args:
        files: takes files by name: a `Logger`, or a `StoreFolder`.
        start: the prefix of the uploaded names.
    """

    def __init__(self, files: Any, start: str = "") -> None:
        self._files = files
        self._start = start

    def submit(self, path: Path, name: str, crc32: int | None, *, overwrite: bool) -> None:
        """Submits a finished file."""
        self._files.upload_file(self._name(name), path, overwrite=overwrite, link=True, crc32=crc32)

    def finish(self, name: str, pointer: str | None, surplus: Iterable[SavedCheckpoint]) -> None:
        """Submits the pointer to a file, if any, and then deletes checkpoints once both are uploaded."""
        after = [self._name(name)]
        if pointer is not None:
            after.append(self._name(pointer))
            # Not the pointer on disk, which may name a newer checkpoint by now.
            with tempfile.TemporaryDirectory(prefix="pointer-") as folder:
                (Path(folder) / pointer).write_text(after[0])
                self._files.upload_file(after[1], Path(folder) / pointer, overwrite=True)
        self._delete(surplus, after=after)

    def _delete(self, checkpoints: Iterable[SavedCheckpoint], **options: Any) -> None:
        """Deletes checkpoints of this folder; with shards, the manifest first."""
        for manifest, *others in self._names(checkpoints):
            with contextlib.suppress(ValueError):
                self._files.delete_file(manifest, then=others, **options)

    def _names(self, checkpoints: Iterable[SavedCheckpoint]) -> Iterator[list[LiteralName]]:
        """Yields the uploaded names of each checkpoint of this folder; with shards, the manifest first."""
        for one in checkpoints:
            # The resumed checkpoint may come from elsewhere, with a name that no store accepts.
            with contextlib.suppress(ValueError):
                if one.remote_name != self._called(one.name):
                    continue
                start = one.name.removesuffix(MANIFEST)
                beside = [start + file for file in files_beside_manifest(one.shards)]
                yield [self._name(name) for name in (one.name, *beside)]

    def _name(self, name: str) -> LiteralName:
        return LiteralName(self._start + name)

    def _called(self, name: str) -> str:
        """Returns the name of a checkpoint in the list of kept checkpoints."""
        return self._start + name

    def delete_here(self, removed: Iterable[SavedCheckpoint]) -> None:
        """Makes destinations that keep files on this machine delete checkpoints; called on rank 0."""
        self._delete((attrs.evolve(one, shards=min(1, one.shards)) for one in removed), local=True)

    def may_drop(self, checkpoints: Iterable[SavedCheckpoint]) -> None:
        """Lets older checkpoints give way to newer ones in a full spool."""
        for names in self._names(checkpoints):
            with contextlib.suppress(ValueError):
                self._files.may_drop_files(*names)

    def has_uploaded(self, names: Iterable[str]) -> bool:
        """Returns whether all these files are uploaded.

        Raises:
            OSError: one of them never will be.
        """
        return all(self._files.has_uploaded(self._start + name) for name in names)

    def has_withdrawn(self, names: Iterable[str]) -> bool:
        """Returns whether one of these files was withdrawn because its checkpoint is not kept."""
        return False

    def delete_uploaded(self, names: Iterable[str]) -> None:
        """Deletes the files among these that this rank uploads, once they are uploaded."""

    def names_of(self, checkpoints: Iterable[SavedCheckpoint]) -> list[str]:
        """Returns the uploaded file names of these checkpoints; waits for the stores.

        Raises:
            OSError: a store cannot be asked.
        """
        starts = [one.name.removesuffix(MANIFEST) if one.shards else one.name for one in checkpoints]
        found = [name for start in starts for name in self._files.list_files(self._start + start)]
        return [name.removeprefix(self._start) for name in found]

    def uris(self, name: str) -> tuple[str, ...]:
        """Returns the URIs of a checkpoint."""
        uris: tuple[str, ...] = self._files.file_uris(self._name(name))
        return uris


class _StoreTarget(_Target):
    """The run's own folder in a store."""

    def _called(self, name: str) -> str:
        uri: str = self._files.queue.uri(name)
        return uri

    def delete_here(self, removed: Iterable[SavedCheckpoint]) -> None:
        """Does nothing: the saver itself removes local files."""

    def has_withdrawn(self, names: Iterable[str]) -> bool:
        """Returns whether one of these files was withdrawn."""
        return any(map(self._files.has_withdrawn, names))

    def delete_uploaded(self, names: Iterable[str]) -> None:
        """Deletes the files among these that this rank uploads."""
        for name in names:
            with contextlib.suppress(ValueError):
                self._files.delete_file(name, after=[name])

    def withdraw(self, checkpoints: Iterable[SavedCheckpoint], *, is_away: bool) -> int:
        """Withdraws pending uploads of checkpoints; returns the number of withdrawn checkpoints.

        Args:
            checkpoints: checkpoints that are no longer kept.
            is_away: whether to withdraw only while uploads fail; the same for all calls of a run.
        """
        withdrawn: int = self._files.withdraw(list(self._names(checkpoints)), only_while_failing=is_away)
        return withdrawn


@attrs.frozen
class _Upload:
    """The upload of a checkpoint in shards by this rank.

    Attributes:
        path: the path of the manifest.
        target: where it is uploaded.
        files: the names of the files that this rank has submitted.
        name: the uploaded name of the manifest.
        latest: the name of the pointer, or None.
        surplus: checkpoints to delete there once the pointer has moved.
    """

    path: str
    target: _Target
    files: tuple[str, ...]
    name: str
    latest: str | None
    surplus: tuple[SavedCheckpoint, ...]


class Publisher:
    """Hands complete checkpoints on, and removes and deletes those that are not kept.

    Args:
        folder: the folder where the run saves.
        kept: the kept checkpoints.
        counts: counts what happens.
        overwrite: whether objects of another run may be replaced.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        kept: KeptCheckpoints,
        counts: CheckpointCounts,
        *,
        overwrite: bool,
    ) -> None:
        self._folder = folder
        self._kept = kept
        self._counts = counts
        self._overwrite = overwrite
        self._store: StoreFolder | None = None
        # Checkpoints in shards that wait for the files of all ranks, oldest first.
        self._uploads: deque[_Upload] = deque()
        # The target and names of the newest single-file checkpoint; None once it is uploaded.
        self._newest: tuple[_Target, list[str]] | None = None
        # Checkpoints to delete when the pointer moves next.
        self._surplus: tuple[SavedCheckpoint, ...] = ()

    @property
    def is_waiting(self) -> bool:
        """Whether checkpoints in shards wait for files to be uploaded."""
        return bool(self._uploads)

    @property
    def lost_files(self) -> int:
        """How many files can never be uploaded to the folder in a store, because the spool lost them."""
        return 0 if self._store is None else self._store.queue.backlog().lost

    def has_arrived(self) -> bool:
        """Returns whether the newest checkpoint is uploaded, or never will be."""
        if self._newest is not None:
            target, names = self._newest
            with contextlib.suppress(OSError):
                if not target.has_uploaded(names):
                    return False
            self._newest = None
        return not self._uploads

    def open(self, state: State) -> None:
        """Opens the queue to a store, which also uploads files left by an earlier process."""
        from uploads import StoreFolder

        remote = self._folder.remote(state)
        if remote is not None and (state.rank == 0 or self._folder.is_sharded):
            self._store = StoreFolder(remote.uri, free_bytes=0)

    def publish(self, save: Save, files: Mapping[str, int | None], state: State, logger: Logger) -> None:
        """Uploads a complete checkpoint and its pointer, and deletes those that are not kept.

        Args:
            save: the checkpoint.
            files: this rank's files by name, with their CRC-32 if known.
            state: the run.
            logger: its destinations.
        """
        removed, deleted = self._kept.gone()
        # `filename` may give the same name to several checkpoints of this session.
        overwrite = self._overwrite or self._kept.is_resumed or self._kept.has_saved(save.path)
        target = self._target(save.remote_name, logger)
        if state.rank == 0:
            target.delete_here(removed)
        target.may_drop(self._kept.outdated())
        self._upload(save.path, files, deleted, target, state, overwrite=overwrite)
        self._withdraw(removed, deleted)
        self._kept.trim()

    def drop(self) -> None:
        """Forgets the newest checkpoint, which could not be written."""
        self._kept.drop()

    def repeat(self, state: State, logger: Logger) -> None:
        """Finishes the work of a killed session, if this session had nothing to save.

        Removes local files that should be gone. If a store lacks a file of the resumed checkpoint, or still
        has one that it replaces, uploads the checkpoint again; deletions wait for it and its pointer. Every
        rank must call it.
        """
        is_sharded = self._folder.is_sharded
        if not self._kept.is_resumed or self._kept.has_repeated or not (is_sharded or state.rank == 0):
            return
        folder = self._folder.path(state)
        path = folder / self._folder.name(state)
        saved = next((one for one in self._kept.now.local if one.path == str(path)), None)
        is_whole = saved is not None and saved.shards in {0, state.world_size} and path.exists()
        if is_sharded:
            is_whole = not distributed.any_rank(not is_whole)
        if saved is None or not is_whole:
            return
        files: dict[str, int | None] = {path.name: None}
        if is_sharded:
            files |= ShardedCheckpoint(path).checksums()
        removed, deleted = self._kept.now.removed, self._kept.now.deleted
        target = self._target(saved.remote_name, logger)
        is_done = False
        if state.local_rank == 0:
            remove_checkpoints(in_folder(removed, folder))
        if state.rank == 0:
            target.delete_here(removed)
            found = asked(lambda: target.names_of((saved, *deleted)))
            start = saved.name.removesuffix(path.name)
            is_done = all(start + file in found for file in files)
            is_done &= not any(one.name in found for one in deleted)
        if is_sharded:
            is_done = distributed.from_rank_zero(is_done)
            of_all = {MANIFEST, METADATA} if state.rank == 0 else set()
            own = of_all | {values_of(state.rank), tensors_of(state.rank)}
            files = {file: crc32 for file, crc32 in files.items() if file in own}
        if not is_done:
            self._upload(path, files, deleted, target, state, overwrite=True)

    def move_pointers(self, state: State, *, is_late: bool = False) -> None:
        """Submits pointers to checkpoints that all ranks have uploaded, and deletes older ones.

        Every rank must call it. The oldest checkpoint comes first, so a deleted checkpoint was either
        uploaded completely, or has failed and is not ours. If one rank withdrew its files, all ranks delete
        theirs.

        Args:
            state: the run.
            is_late: whether to stop waiting for uploads.
        """
        while self._uploads:
            upload, failure = self._uploads[0], "not there in time" if is_late else ""
            try:
                is_there = upload.target.has_uploaded(upload.files)
            except OSError as error:
                is_there, failure = False, str(error)
            is_withdrawn = distributed.any_rank(upload.target.has_withdrawn(upload.files))
            if not is_withdrawn and distributed.any_rank(not is_there and not failure):
                break
            self._uploads.popleft()
            if is_withdrawn:
                upload.target.delete_uploaded(upload.files)
                self._give_up(upload, "")
            elif distributed.any_rank(not is_there):
                lack = f"for lack of files of rank {state.rank}: {failure}"
                self._give_up(upload, "" if is_there else lack)
            else:
                surplus, self._surplus = (*self._surplus, *upload.surplus), ()
                if state.rank == 0:
                    upload.target.finish(upload.name, upload.latest, surplus)

    def close(self, seconds: float) -> None:
        """Closes the queue, which uploads for up to `seconds`."""
        self._uploads.clear()
        store, self._store = self._store, None
        if store is not None:
            store.close(seconds)
        if self._counts.withdrawn:
            _log.warning(
                "%d checkpoints were not uploaded before they were given up.", self._counts.withdrawn
            )

    def _target(self, remote_name: str, logger: Logger) -> _Target:
        """Returns the target of a checkpoint, given its uploaded name."""
        if self._store is not None:
            return _StoreTarget(self._store)
        depth = 2 if self._folder.is_sharded else 1
        return _Target(logger, f"{remote_name.rsplit('/', depth)[0]}/")

    def _upload(
        self,
        path: Path,
        files: Mapping[str, int | None],
        surplus: Sequence[SavedCheckpoint],
        target: _Target,
        state: State,
        *,
        overwrite: bool,
    ) -> None:
        """Submits a checkpoint, and its pointer and the deletions that follow it.

        Args:
            path: the path of the checkpoint, or of the manifest.
            files: as for `publish`.
            surplus: checkpoints to delete after it.
            target: where to upload it.
            state: the run.
            overwrite: whether existing objects of these names may be replaced.
        """
        self._kept.has_repeated = True
        is_sharded = self._folder.is_sharded
        start = f"{path.parent.name}/" if is_sharded else ""
        for file, crc32 in files.items():
            target.submit(path.with_name(file), start + file, crc32, overwrite=overwrite)
        here = path.parent if is_sharded else path
        state.last_checkpoint_uris = target.uris(here.name)
        state.last_checkpoint = str(here) if self._store is None else state.last_checkpoint_uris[0]
        latest = self._folder.pointer_name(state)
        if not is_sharded:
            self._newest = target, list(files)
            target.finish(path.name, latest, surplus)
            return
        names = tuple(start + file for file in files)
        self._uploads.append(_Upload(str(path), target, names, start + path.name, latest, tuple(surplus)))
        self.move_pointers(state)

    def _withdraw(self, removed: Sequence[SavedCheckpoint], deleted: Sequence[SavedCheckpoint]) -> None:
        """Withdraws pending uploads of checkpoints that are not kept.

        The rule for the store decides. Without one, all checkpoints are uploaded; but while the store is
        unreachable they take space on this machine, so the local rule applies.
        """
        if self._store is None:
            return
        is_ruled = self._kept.in_store.newest is not None
        gone = deleted if is_ruled else removed
        count = _StoreTarget(self._store).withdraw(gone, is_away=not is_ruled)
        if count and not self._counts.withdrawn:
            _log.warning(
                "Checkpoints that are not kept are not uploaded while uploads to %s fail; "
                "set keep_in_store to let more of them wait.",
                self._store.queue.uri("").rstrip("/"),
            )
        self._counts.withdrawn += count

    def _give_up(self, upload: _Upload, reason: str) -> None:
        """Forgets a checkpoint that is incomplete in the store; none of its files are deleted there.

        Checkpoints that it should have replaced are deleted when the pointer moves next.
        """
        path = upload.path
        self._surplus = tuple(one for one in (*self._surplus, *upload.surplus) if one.path != path)
        for index, one in enumerate(self._uploads):
            left = tuple(each for each in one.surplus if each.path != path)
            self._uploads[index] = attrs.evolve(one, surplus=left)
        self._kept.forget_stored(path)
        if reason:
            _log.error("The pointer to %s is not uploaded, %s", path, reason)


def in_folder(checkpoints: Iterable[SavedCheckpoint], folder: Path) -> tuple[tuple[Path, str], ...]:
    """Returns paths and identifiers of the checkpoints that are directly in a folder.

    The state of a resumed checkpoint may name files of another run, or any other file.
    """
    return tuple(
        (Path(one.path), one.identifier)
        for one in checkpoints
        if ".." not in Path(one.path).parts
        and folder in {Path(one.path).parent, Path(one.path).parent.parent}
    )
