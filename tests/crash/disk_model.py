"""What a disk may hold after a crash, computed: every call that changes it is recorded, and then replayed up to any point.

After SIGKILL the disk has everything written before. After a power loss it has all that was synced, and what
the kernel happened to write: POSIX promises neither order nor whole writes.
Files and folders are apart: a file may exist without its content, and a name without the other names that
changed with it.
"""

import errno
import hashlib
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from uploads.disk import Disk

Change = tuple[Any, ...]

# What happens to unsynced writes to a file.
FILE_FATES = ("lost", "kept", "torn", "first zeroed", "all zeroed", "only last")
# What happens to unsynced names in a folder.
FOLDER_FATES = ("lost", "kept", "only last", "all but last")


class HastyDisk(Disk):
    """Never waits for the disk, for tests of the time after the crash."""

    def sync(self, fd: int) -> None:
        """Does nothing."""

    def sync_folder(self, path: Path) -> None:
        """Does nothing."""


class RecordingDisk(Disk):
    """Performs operations below a folder, and records every change."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.changes: list[Change] = []
        self._files: dict[int, int] = {}
        self._numbers = itertools.count()

    def note(self, *what: Any) -> None:
        """Records a note that a test reads later."""
        self.changes.append(("note", *what))

    def _name(self, path: Path | str) -> str:
        return str(Path(path).relative_to(self.root))

    def open(self, path: Path | str, flags: int, mode: int = 0o666) -> int:
        is_new = not Path(path).exists()
        fd = super().open(path, flags, mode)
        if is_new:
            number = self._files[os.fstat(fd).st_ino] = next(self._numbers)
            self.changes.append(("link", self._name(path), number))
        elif flags & os.O_TRUNC:
            self.changes.append(("truncate", self._number(fd), 0))
        return fd

    def _number(self, fd: int) -> int:
        return self._files[os.fstat(fd).st_ino]

    def write(self, fd: int, data: bytes, offset: int) -> None:
        if data:
            self.changes.append(("write", self._number(fd), bytes(data), offset))
        super().write(fd, data, offset)

    def truncate(self, fd: int, size: int) -> None:
        self.changes.append(("truncate", self._number(fd), size))
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        self.changes.append(("sync", self._number(fd)))

    def sync_folder(self, path: Path) -> None:
        if path.is_dir() and path.is_relative_to(self.root):
            self.changes.append(("sync folder", self._name(path)))

    def replace(self, source: Path | str, target: Path) -> None:
        super().replace(source, target)
        self.changes.append(("rename", self._name(source), self._name(target)))

    def unlink(self, path: Path | str) -> None:
        super().unlink(path)
        self.changes.append(("unlink", self._name(path)))

    def make_folder(self, path: Path) -> None:
        if not path.is_dir():
            super().make_folder(path)
            self.changes.append(("folder", self._name(path)))

    def remove_folder(self, path: Path) -> None:
        super().remove_folder(path)
        self.changes.append(("unlink", self._name(path)))


class DiskThatFailsOnce(RecordingDisk):
    """A disk on which one operation fails, counted while it `is_failing`.

    Args:
        root: as of `RecordingDisk`.
        number: which operation, from 0 on.
    """

    def __init__(self, root: Path, number: int) -> None:
        super().__init__(root)
        self.is_failing = False
        self.left = number
        """How many are left before that one; -1 once it has failed."""

    def _may_fail(self) -> None:
        if self.is_failing and self.left >= 0:
            self.left -= 1
            if self.left < 0:
                self.note("failed")
                raise OSError(errno.ENOSPC, "no space, once")

    def open(self, path: Path | str, flags: int, mode: int = 0o666) -> int:
        self._may_fail()
        return super().open(path, flags, mode)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        self._may_fail()
        super().write(fd, data, offset)

    def truncate(self, fd: int, size: int) -> None:
        self._may_fail()
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        self._may_fail()
        super().sync(fd)

    def sync_folder(self, path: Path) -> None:
        self._may_fail()
        super().sync_folder(path)

    def replace(self, source: Path | str, target: Path) -> None:
        self._may_fail()
        super().replace(source, target)

    def unlink(self, path: Path | str) -> None:
        self._may_fail()
        super().unlink(path)


class CrashedDisk:
    """A disk after some changes; what happened to the unsynced ones is still open."""

    def __init__(self) -> None:
        self._synced: dict[int, bytearray] = {}
        self._writes: dict[int, list[Change]] = {}
        self._names: dict[str, dict[str, Any]] = {".": {}}
        self._renames: dict[str, list[Change]] = {".": []}

    def apply(self, change: Change) -> None:
        """Applies the next change."""
        match change:
            case ("link", path, number):
                self._synced[number], self._writes[number] = bytearray(), []
                self._rename(path, ("set", number))
            case ("folder", path):
                self._names[path], self._renames[path] = {}, []
                self._rename(path, ("set", path))
            case ("write" | "truncate", number, *_):
                self._writes[number].append(change)
            case ("sync", number):
                _write(self._synced[number], self._writes[number])
                self._writes[number] = []
            case ("rename", source, target):
                self._renames[_folder(target)].append(("move", Path(source).name, Path(target).name))
            case ("unlink", path):
                self._rename(path, ("remove",))
            case ("sync folder", path):
                _rename_all(self._names[path], self._renames[path])
                self._renames[path] = []

    def _rename(self, path: str, what: tuple[Any, ...]) -> None:
        self._renames[_folder(path)].append((what[0], Path(path).name, *what[1:]))

    def after_kill(self, during: Change | None = None) -> dict[str, bytes | None]:
        """Returns the content by path if everything was kept.

        A write in progress is half done.
        """
        if during is None or during[0] != "write":
            return self.files({"": "kept"}, {"": "kept"})
        kind, number, data, offset = during
        self._writes[number].append((kind, number, data[: len(data) // 2], offset))
        try:
            return self.files({"": "kept"}, {"": "kept"})
        finally:
            self._writes[number].pop()

    def files(self, fates: dict[str, str], folder_fates: dict[str, str]) -> dict[str, bytes | None]:
        """Returns the content by path; None for a folder.

        Args:
            fates: by the suffix of the file, one of `FILE_FATES`.
            folder_fates: by the name of the folder, one of `FOLDER_FATES`.
        """
        found: dict[str, bytes | None] = {}
        self._collect(".", "", fates, folder_fates, found)
        return found

    def _collect(
        self, folder: str, at: str, fates: dict[str, str], folder_fates: dict[str, str], found: dict[str, Any]
    ) -> None:
        names = dict(self._names[folder])
        renames = self._renames[folder]
        fate = folder_fates.get(Path(folder).name, folder_fates[""])
        chosen = {"lost": [], "kept": renames, "only last": renames[-1:], "all but last": renames[:-1]}[fate]
        # All earlier moves, even lost ones, tell which file a move is about.
        _rename_some(names, renames, chosen)
        for name, entry in names.items():
            path = f"{at}{name}"
            if isinstance(entry, str):
                found[path] = None
                self._collect(entry, f"{path}/", fates, folder_fates, found)
            else:
                fate = fates.get(Path(name).suffix, fates[""])
                found[path] = _after(self._synced[entry], self._writes[entry], fate)


def _folder(path: str) -> str:
    return str(Path(path).parent)


def _write(content: bytearray, writes: list[Change]) -> None:
    for kind, _, *rest in writes:
        if kind == "truncate":
            del content[rest[0] :]
            content.extend(bytes(rest[0] - len(content)))
        else:
            data, offset = rest
            content.extend(bytes(max(0, offset - len(content))))
            content[offset : offset + len(data)] = data


def _after(synced: bytearray, writes: list[Change], fate: str) -> bytes:
    """Returns the content of a file whose last writes were not synced."""
    content = bytearray(synced)
    zeroed = [
        (*write[:2], bytes(len(write[2])), write[3]) if write[0] == "write" else write for write in writes
    ]
    if fate == "kept" or not writes:
        _write(content, writes)
    elif fate == "torn":
        last = writes[-1]
        if last[0] == "write":
            last = (*last[:2], last[2][: len(last[2]) // 2], last[3])
        _write(content, [*writes[:-1], last])
    elif fate == "first zeroed":
        _write(content, [*zeroed[:1], *writes[1:]])
    elif fate == "all zeroed":
        _write(content, zeroed)
    elif fate == "only last":
        _write(content, [*zeroed[:-1], writes[-1]])
    return bytes(content)


def _rename_all(names: dict[str, Any], renames: list[Change]) -> None:
    _rename_some(names, renames, renames)


def _rename_some(names: dict[str, Any], renames: list[Change], chosen: list[Change]) -> None:
    true_names = dict(names)
    for rename in renames:
        match rename:
            case ("set", name, entry):
                true_names[name] = entry
            case ("remove", name):
                entry = true_names.pop(name, None)
            case ("move", source, target):
                entry = true_names[target] = true_names.pop(source)
        if not any(rename is one for one in chosen):
            continue
        match rename:
            case ("set", name, entry):
                names[name] = entry
            case ("remove", name):
                names.pop(name, None)
            case ("move", source, target):
                names.pop(source, None)
                names[target] = entry


def fates_to_try(source: random.Random) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Returns fates of files and folders: each fate with all others lost, with all kept, and some mixes."""
    for rest, folder_rest in itertools.product(("lost", "kept"), ("lost", "kept")):
        for fate in FILE_FATES:
            yield {"": rest, ".csv": fate}, {"": folder_rest}
            yield {"": rest, ".journal": fate}, {"": folder_rest}
        if rest == folder_rest:
            for fate in FILE_FATES:
                yield {"": rest, ".tmp": fate, ".json": fate, ".parquet": fate}, {"": folder_rest}
            for folder_fate in FOLDER_FATES:
                yield {"": rest}, {"": folder_rest, "rank0": folder_fate}
                yield {"": rest}, {"": folder_rest, "run": folder_fate}
                yield {"": rest}, {"": folder_rest, "metrics": folder_fate}
    for _ in range(5):
        files = {suffix: source.choice(FILE_FATES) for suffix in ("", ".csv", ".journal", ".json", ".tmp")}
        yield (
            files,
            {name: source.choice(FOLDER_FATES) for name in ("", "rank0", "run", "abandoned", "metrics")},
        )


def put(files: dict[str, bytes | None], root: Path) -> None:
    """Writes what a disk holds."""
    root.mkdir(parents=True)
    for name, content in files.items():
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)


def digest(files: dict[str, bytes | None]) -> bytes:
    """Returns a digest that tells one disk from another."""
    found = hashlib.blake2b()
    for name, content in sorted(files.items()):
        found.update(f"{name} {-1 if content is None else len(content)} ".encode())
        found.update(content or b"")
    return found.digest()
