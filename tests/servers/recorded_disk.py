"""A disk that records its operations in order, and can be rebuilt as a power loss would leave it.

It models a journaling file system (ext4, XFS, btrfs). Names change in the order of the requests: after a
power loss some of the last changes are missing, but never one from before an fsync. Bytes written to a file
since its last fsync may be there, gone, zeros, or there in part.
"""

import contextlib
import enum
import errno
import fcntl
import os
import threading
from pathlib import Path

import attrs


class Fate(enum.Enum):
    """The fate of bytes that no fsync made safe."""

    LOST = enum.auto()
    ZEROED = enum.auto()
    KEPT = enum.auto()
    HALVED = enum.auto()


_FATES = list(Fate)


@attrs.frozen
class Operation:
    """One step: `kind` with paths (relative to the root) and the number of the file that it is about."""

    kind: str
    path: str = ""
    other: str = ""
    number: int = 0
    offset: int = 0
    data: bytes = b""
    mark: object = None


class RecordedDisk:
    """Records the operations of this process under a folder that is empty at first.

    The lock makes the record's order the real one.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.operations: list[Operation] = []
        self._lock = threading.RLock()
        self._numbers: dict[int, int] = {}  # Of an inode, which may be used again for another file.
        self._count = 0

    def mark(self, what: object) -> None:
        """Adds a mark to the record: what the user saw at this moment."""
        with self._lock:
            self.operations.append(Operation("mark", mark=what))

    def sync_disk(self, path) -> None:
        """Stands for syncfs, which goes past Python."""
        with self._lock:
            self.operations.append(Operation("sync all"))

    @contextlib.contextmanager
    def recording(self, patch):
        """Records everything under the root within the block.

        Args:
            patch: pytest's monkeypatch.
        """
        for name in (
            "mkdir",
            "open",
            "write",
            "pwrite",
            "fsync",
            "rename",
            "replace",
            "unlink",
            "rmdir",
            "link",
        ):
            patch.setattr(os, name, self._recorded(getattr(os, name), getattr(self, f"_on_{name}")))
        patch.setattr(os, "copy_file_range", self._unsupported)
        patch.setattr(fcntl, "ioctl", self._unsupported)
        try:
            yield self
        finally:
            patch.undo()

    def rebuild(self, folder: Path, crash: int, *, last_name: int, turn: int) -> None:
        """Makes in `folder` what a power loss after `crash` operations would leave.

        Args:
            folder: Is made.
            crash: The number of operations that had been requested.
            last_name: How many of those still changed names; raised to what an fsync had made safe.
            turn: Varies the fate of each file's unsafe bytes.
        """
        happened = self.operations[:crash]
        safe = max(
            (index + 1 for index, one in enumerate(happened) if one.kind in {"fsync", "sync all"}), default=0
        )
        folder.mkdir()
        for number, paths in _names_after(happened[: max(last_name, safe)]).items():
            if number < 0:
                (folder / paths[0]).mkdir(parents=True, exist_ok=True)
        for number, paths in _names_after(happened[: max(last_name, safe)]).items():
            if number > 0:
                (folder / paths[0]).write_bytes(
                    _bytes_after(happened, number, _FATES[(number + turn) % len(_FATES)])
                )
                for other in paths[1:]:
                    os.link(folder / paths[0], folder / other)

    def _recorded(self, real, note):
        def call(*arguments, **options):
            with self._lock:
                return note(real, *arguments, **options)

        return call

    def _unsupported(self, *arguments):
        raise OSError(errno.EOPNOTSUPP, "not recorded")

    def _name(self, path, folder=None) -> str | None:
        """The path under the root; None outside."""
        path = Path(path)
        if folder is not None:
            path = Path(f"/proc/self/fd/{folder}").readlink() / path
        if path.is_relative_to("/proc/self/fd"):  # An open file that is linked.
            path = path.readlink()
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else None

    def _number_of(self, descriptor) -> int:
        return self._numbers.get(os.fstat(descriptor).st_ino, 0)

    def _new_number(self, inode, sign) -> int:
        self._count += 1
        self._numbers[inode] = sign * self._count
        return sign * self._count

    def _add(self, *arguments, **fields) -> None:
        self.operations.append(Operation(*arguments, **fields))

    def _on_mkdir(self, real, path, *arguments, **options):
        real(path, *arguments, **options)
        if (name := self._name(path)) is not None:
            self._add("mkdir", name, number=self._new_number(Path(path).stat().st_ino, -1))

    def _on_open(self, real, path, flags, *arguments, dir_fd=None, **options):
        is_new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
        descriptor = real(path, flags, *arguments, dir_fd=dir_fd, **options)
        if is_new and (name := self._name(path, dir_fd)) is not None:
            self._add("create", name, number=self._new_number(os.fstat(descriptor).st_ino, 1))
        return descriptor

    def _on_write(self, real, descriptor, data):
        number = self._number_of(descriptor)
        offset = os.fstat(descriptor).st_size  # All such writes append.
        count = real(descriptor, data)
        if number:
            self._add("data", number=number, offset=offset, data=bytes(data)[:count])
        return count

    def _on_pwrite(self, real, descriptor, data, offset):
        count = real(descriptor, data, offset)
        if number := self._number_of(descriptor):
            self._add("data", number=number, offset=offset, data=bytes(data)[:count])
        return count

    def _on_fsync(self, real, descriptor):
        if number := self._number_of(descriptor):
            self._add("fsync", number=number)

    def _on_rename(self, real, source, target, **options):
        real(source, target, **options)
        names = self._name(source), self._name(target)
        if None not in names:
            self._add("rename", *names)

    _on_replace = _on_rename

    def _on_unlink(self, real, path, *, dir_fd=None):
        name = self._name(path, dir_fd)
        real(path, dir_fd=dir_fd)
        if name is not None:
            self._add("remove", name)

    _on_rmdir = _on_unlink

    def _on_link(self, real, source, target, **options):
        real(source, target, **options)
        names = self._name(source), self._name(target)
        if None not in names:
            self._add("link", *names)


def _names_after(operations) -> dict[int, list[str]]:
    """The paths of each file (numbers above 0) and folder (below) after these changes of names, outer folders first."""
    numbers: dict[str, int] = {}
    for one in operations:
        if one.kind in {"mkdir", "create"}:
            numbers[one.path] = one.number
        elif one.kind == "remove":
            numbers.pop(one.path, None)
        elif one.kind == "link":
            numbers[one.other] = numbers[one.path]
        elif one.kind == "rename":
            moved = {
                path: number
                for path, number in numbers.items()
                if path == one.path or path.startswith(f"{one.path}/")
            }
            for path in moved:
                del numbers[path]
            numbers.update({one.other + path[len(one.path) :]: number for path, number in moved.items()})
    found: dict[int, list[str]] = {}
    for path in sorted(numbers):
        found.setdefault(numbers[path], []).append(path)
    return found


def _bytes_after(operations, number: int, fate: Fate) -> bytes:
    writes = [
        (index, one) for index, one in enumerate(operations) if one.kind == "data" and one.number == number
    ]
    safe = max(
        (
            index
            for index, one in enumerate(operations)
            if one.kind == "sync all" or (one.kind == "fsync" and one.number == number)
        ),
        default=-1,
    )
    data = bytearray()
    for index, one in writes:
        piece = one.data
        if index > safe:
            if fate is Fate.LOST:
                continue
            piece = {Fate.ZEROED: bytes(len(piece)), Fate.HALVED: piece[: len(piece) // 2], Fate.KEPT: piece}[
                fate
            ]
        data.extend(bytes(max(0, one.offset + len(piece) - len(data))))
        data[one.offset : one.offset + len(piece)] = piece
    return bytes(data)
