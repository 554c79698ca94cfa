"""Writes everything except metrics: media, tables, texts, histograms, traces, and files, with index lines.

`log_record` copies in the training thread; a lane encodes and writes. See `destinations.kinds`.
"""

import contextlib
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import attrs

# Kinds import this module in the call that needs it. A signal handler that logs may interrupt that import and
# would see half of the module. Importing it here completes it before a run can be open.
import destinations.media  # noqa: F401
from destinations.background import Lane
from destinations.kinds.artifacts import ARTIFACTS_INDEX
from destinations.kinds.kind import Kind
from destinations.kinds.media import MEDIA_INDEX, check_name
from events import RecordError
from uploads.disk import open_temporary, replace_file

from .folder import HeldFolder, with_user_paths
from .layout import ARTIFACTS_FOLDER, append_record, label_name

__all__ = ["FileKeeping", "MediaWriter"]

FileKeeping = Literal["auto", "copy", "link", "off"]

_INDICES_KEPT = 1000


@attrs.frozen
class _Output:
    """The output of one call; a `RecordOutput`."""

    _writer: "MediaWriter"
    _kind: Kind
    name: str | None
    step: int
    _time: float
    _place: dict[str, Any]

    def add_file(self, suffix: str, data: bytes, *, name: str | None = None) -> str:
        return self._writer.write_free(self._kind.folder, name or self.name or "", self.step, suffix, data)

    def add_line(self, fields: dict[str, Any]) -> None:
        named = {} if self.name is None else {"name": self.name}
        line = {"step": self.step, **named, "time": self._time, **fields, **self._place}
        self._writer.add_line(self._kind.index, line)

    def add_medium(self, suffix: str, data: bytes, *, index: int = 0, **fields: Any) -> None:
        # The first fields match stable-pretraining's.
        line = {
            "step": self.step,
            "tag": self.name,
            "type": self._kind.name,
            "path": self.add_file(suffix, data),
            "name": self.name,
            "index": index,
            "time": self._time,
            "size": len(data),
        }
        self._writer.add_line(self._kind.index, {**line, **fields, **self._place})


@attrs.define(eq=False, slots=False, repr=False)
class MediaWriter:
    """The media writer of one run.

    Args:
        folder: the folder of the run.
        lane: the background thread.
        clock: the current time in seconds since 1970.
        taken: paths of the run's files that are only in its store.
    """

    _folder: HeldFolder
    _lane: Lane
    _clock: Callable[[], float]
    _taken: frozenset[str] = frozenset()

    def __attrs_post_init__(self) -> None:
        self._run_dir = self._folder.path
        self.on_file: Callable[[str], object] = lambda _path: None
        """Called with the path of each complete file, in the lane's thread."""
        self._accepted: Counter[str] = Counter()
        self._done: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        """Counts of accepted "media" and "files" that weren't written; complete after `count_losses`."""
        # The next index by folder, step, and suffix, newest last; a cache of the folder.
        self._next_indices: dict[tuple[Path, int, str], int] = {}
        self.bytes_written = 0
        self.files_written = 0
        self._session = ""
        self.record_count = 0
        """The number of records that this session has accepted."""
        self._checkpoint: dict[str, Any] | None = None

    def begin_session(self, session: str) -> None:
        """Begins a session with this id; in the training thread."""
        self._session, self.record_count, self._checkpoint = session, 0, None

    def next_place(self) -> dict[str, Any]:
        """Counts a record, and returns the fields that place its lines in the history of the run."""
        place = {"session": self._session, "record": self.record_count}
        self.record_count += 1
        return place

    def note_checkpoint(self) -> int:
        """Counts a checkpoint as a record, whose files come later; returns the number of records so far."""
        self._checkpoint = self.next_place()
        return self.record_count

    def _place_of_file(self, *, is_checkpoint: bool) -> dict[str, Any]:
        place = self._checkpoint if is_checkpoint else None
        return self.next_place() if place is None else place

    def log_record(self, kind: Kind, arguments: dict[str, Any], step: int) -> None:
        """Copies a record, and writes it in the background.

        Args:
            kind: the kind of the record.
            arguments: the arguments of the method by name, except the step.
            step: the step of the call.

        Raises:
            RecordError: the record can't be written.
        """
        name = arguments.pop("name", None)
        if kind.index == MEDIA_INDEX:
            check_name(name)
        if kind.write is None:
            raise RecordError(f"{kind.noun} must be given to {kind.method}.")
        size, work = kind.write(name, **arguments)
        output = _Output(self, kind, name, step, self._clock(), self.next_place())
        self._put(lambda: work(output), size, f"{kind.noun} {name!r}" if name is not None else kind.noun)

    def keep_file(
        self,
        source: Path,
        remote_name: str,
        *,
        overwrite: bool,
        keeping: FileKeeping,
        step: int,
        is_checkpoint: bool = False,
    ) -> None:
        """Copies or links a file into `artifacts/` before it returns; the lane hashes it later.

        Args:
            source: the file.
            remote_name: the name of the file in the run.
            overwrite: whether it may replace a file.
            keeping: whether to copy or link it.
            step: the step for the index.
            is_checkpoint: whether it is a file of the last checkpoint, and belongs to the run if that does.

        Raises:
            RecordError: the name leads out of the folder.
            FileExistsError: the file exists, and overwrite is False.
        """
        target = artifact_path(self._run_dir, remote_name)
        if target.exists() and not overwrite:
            raise FileExistsError(
                f"artifact {remote_name!r} exists already. Pass overwrite=True to replace it."
            )
        try:
            self._copy_file(source, target, keeping)
        except OSError as error:
            self.lost["files"] += 1
            self._accepted["files"] += 1
            with_user_paths(error, self._folder.where)
            raise

        place = self._place_of_file(is_checkpoint=is_checkpoint)

        def work(at: float = self._clock()) -> None:
            with target.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = target.stat().st_size
            self.bytes_written += size
            path = target.relative_to(self._run_dir).as_posix()
            about = {"step": step, "name": remote_name, "time": at, "path": path, "size": size}
            self.add_line(ARTIFACTS_INDEX, {**about, "sha256": digest, **place})

        self._put(work, 0, f"artifact {remote_name!r}", "files")

    def note_file(self, remote_name: str, size: int, *, step: int, is_checkpoint: bool = False) -> None:
        """Writes the index line of a file that went to the store of the run.

        Args:
            remote_name: the name of the file in the run.
            size: its size in bytes.
            step: the step for the index.
            is_checkpoint: see `keep_file`.
        """
        path = artifact_path(Path(), remote_name).as_posix()
        record = {"step": step, "name": remote_name, "time": self._clock(), "path": path, "size": size}
        record |= self._place_of_file(is_checkpoint=is_checkpoint)
        self._put(lambda: self.add_line(ARTIFACTS_INDEX, record), 0, f"artifact {remote_name!r}", "files")

    def delete_file(self, remote_name: str, *, step: int, with_folder: bool = False) -> None:
        """Removes a file from `artifacts/` in the lane, and records it in the index.

        Args:
            remote_name: the name of the file in the run.
            step: the step for the index.
            with_folder: whether to remove its folder too, if it is empty.

        Raises:
            RecordError: the name leads out of the folder.
        """
        target = artifact_path(self._run_dir, remote_name)
        path, place = target.relative_to(self._run_dir).as_posix(), self.next_place()

        def work(at: float = self._clock()) -> None:
            try:
                size = target.stat().st_size
                target.unlink()
            except FileNotFoundError:
                return
            record = {"step": step, "name": remote_name, "time": at, "path": path, "size": size}
            self.add_line(ARTIFACTS_INDEX, {**record, "is_deleted": True, **place})
            if with_folder:
                with contextlib.suppress(OSError):
                    target.parent.rmdir()

        self._put(work, 0, f"deletion of artifact {remote_name!r}", "files")

    def _copy_file(self, source: Path, target: Path, keeping: FileKeeping) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        fd, name = open_temporary(target)
        os.close(fd)
        temporary = Path(name)
        try:
            if keeping == "link":
                temporary.unlink()
                os.link(source, temporary)
            else:
                shutil.copyfile(source, temporary)
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def count_losses(self) -> None:
        """Counts everything that wasn't written as lost, after the lane has stopped."""
        self.lost.update(self._accepted - self._done - self.lost)

    # Files.

    def add_line(self, name: str, record: dict[str, Any]) -> None:
        """Appends a line to an index."""
        append_record(self._run_dir / name, record)

    def _put(self, work: Callable[[], object], size: int, kind: str, group: str = "media") -> None:
        def counted() -> None:
            try:
                work()
            except Exception as error:
                self.lost[group] += 1
                with_user_paths(error, self._folder.where)
                raise
            self._done[group] += 1

        self._accepted[group] += 1
        if not self._lane.put(counted, size=size, kind=kind):
            self.lost[group] += 1

    def write_free(self, folder: str, name: str, step: int, suffix: str, data: bytes) -> str:
        """Writes a file under the first free name; never overwrites a file."""
        path = self._free_path(folder, name, step, suffix)
        replace_file(path, data)
        self.bytes_written += len(data)
        self.files_written += 1
        name = path.relative_to(self._run_dir).as_posix()
        self.on_file(name)
        return name

    def _free_path(self, folder: str, name: str, step: int, suffix: str) -> Path:
        parent = self._run_dir / folder / label_name(name)
        key = (parent, step, suffix)
        index = self._next_indices.pop(key, 0)
        while self._is_taken(parent / f"{step:08d}_{index}{suffix}"):
            index += 1
        self._next_indices[key] = index + 1
        if len(self._next_indices) > _INDICES_KEPT:
            del self._next_indices[next(iter(self._next_indices))]
        return parent / f"{step:08d}_{index}{suffix}"

    def _is_taken(self, path: Path) -> bool:
        return os.path.lexists(path) or path.relative_to(self._run_dir).as_posix() in self._taken


def artifact_path(run_dir: Path, remote_name: str) -> Path:
    """Returns the path of an artifact.

    Raises:
        RecordError: the name leads out of the folder.
    """
    parts = remote_name.split("/")
    if (
        not remote_name
        or "\0" in remote_name
        or any(part in {"", ".", ".."} for part in parts)
        or "\\" in remote_name
    ):
        raise RecordError(f'artifact name must be a relative path without "..", got {remote_name!r}.')
    return run_dir.joinpath(ARTIFACTS_FOLDER, *parts)
