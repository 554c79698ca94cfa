"""Checkpoints that are being uploaded: once all of one is there, the pointer moves and older ones go."""

import logging
from collections import deque

import attrs

from events.state import State
from events.trainer import distributed

from .remote import RemoteFolder, UploadedFolder
from .retention import SavedCheckpoint

__all__ = ["PendingPointers", "Upload"]

_log = logging.getLogger("events")

_MAX_UPLOADS = 32


@attrs.frozen
class Upload:
    """What a rank has submitted of a checkpoint.

    Attributes:
        path: of the checkpoint, or of the manifest.
        target: where it is uploaded.
        files: the names of the files that this rank has submitted.
        name: of the checkpoint or manifest there.
        latest: the name of the pointer, or None.
        surplus: what is to be deleted there, once the pointer has moved.
    """

    path: str
    target: RemoteFolder | UploadedFolder
    files: tuple[str, ...]
    name: str
    latest: str | None
    surplus: tuple[SavedCheckpoint, ...]

    def finish(self, surplus: tuple[SavedCheckpoint, ...]) -> None:
        """Moves the pointer to it, and has those deleted that it replaces."""
        self.target.move_pointer(self.latest, self.name)
        for one in surplus:
            self.target.delete(one)


class PendingPointers:
    """The pointers to checkpoints in shards, each of which waits for the files of all ranks, oldest first."""

    def __init__(self) -> None:
        self._uploads: deque[Upload] = deque()
        # What is deleted when the pointer moves next.
        self._surplus: tuple[SavedCheckpoint, ...] = ()

    def __len__(self) -> int:
        return len(self._uploads)

    def clear(self) -> None:
        """Forgets all of them."""
        self._uploads.clear()

    def add(self, upload: Upload) -> list[str]:
        """Adds a checkpoint.

        Returns:
            The path of one that is given up, since too many newer ones wait.
        """
        self._uploads.append(upload)
        if len(self._uploads) <= _MAX_UPLOADS:
            return []
        oldest = self._uploads.popleft()
        self._give_up(oldest, "for too many newer ones wait for their files")
        return [oldest.path]

    def move(self, state: State, *, is_late: bool = False) -> list[str]:
        """Submits pointers to checkpoints whose files are there on all ranks, and has others deleted then.

        Every rank must call it. Of several checkpoints the oldest comes first: what is deleted has either
        been there whole, or has failed and is not ours. Of one that was withdrawn on a rank, each deletes
        what it has uploaded.

        Args:
            state: the run.
            is_late: whether they are not waited for any longer.

        Returns:
            The paths of checkpoints that are not whole in the store, and never will be.
        """
        given_up = []
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
                given_up.append(upload.path)
            elif distributed.any_rank(not is_there):
                self._give_up(
                    upload, "" if is_there else f"for lack of files of rank {state.rank}: {failure}"
                )
                given_up.append(upload.path)
            else:
                surplus, self._surplus = (*self._surplus, *upload.surplus), ()
                if state.rank == 0:
                    upload.finish(surplus)
        return given_up

    def _give_up(self, upload: Upload, reason: str) -> None:
        """Forgets a checkpoint that is not whole in the store: nothing of it is deleted there.

        What it should have replaced is deleted when the pointer moves next.
        """
        path = upload.path
        self._surplus = tuple(one for one in (*self._surplus, *upload.surplus) if one.path != path)
        for index, one in enumerate(self._uploads):
            left = tuple(each for each in one.surplus if each.path != path)
            self._uploads[index] = attrs.evolve(one, surplus=left)
        if reason:
            _log.error("The pointer to %s is not uploaded, %s", path, reason)
