"""Store in a folder: a local disk or a network mount."""

import contextlib
import errno
import os
import stat
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from uploads.disk import NO_LINKS, closing, crc32_of, link_open, rename_without_replacing, try_lock
from uploads.errors import (
    BytesCorruptError,
    RejectedByStoreError,
    RemoteExistsError,
    RemoteNotFoundError,
    StoreParkedError,
    TransientStoreError,
)
from uploads.names import PARTIAL_PREFIX, check_remote_name

from .store import Body, Digest, RemoteObject, check_version
from .uri import StoreLocation

__all__ = ["LocalStore", "folder_of", "open_at"]

_CHUNK_BYTES = 1 << 20
_CHECKED_WHILE_COPIED_BYTES = 8 << 20  # A smaller file is read once and copied from memory.
# Windows can import this module, but has neither these flags nor this store.
_FOLDER = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC"))
_YOUNG_SECONDS = 60.0  # A new file may not be locked yet, or is about to get its name.
_PARKED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}
_REJECTED = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EFBIG, errno.EINVAL}


class LocalStore:
    """Objects are files under a root, which is created by the first put.

    ```python
    store = LocalStore("store")
    print([found.name for found in store.list()])  # []
    ```

    A put writes beside its target, syncs, and renames the file, or links it if it is create-only. If the
    spool is on the store's file system, a file above 8 MiB that is no longer written isn't copied: the object
    is a hard link to it, and the file is read once for its CRC-32. Every folder on the way is opened without
    following links, so that nothing is read or written outside the root.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(os.path.expanduser(root)).absolute()  # noqa: PTH111  # Path raises without a home
        if self.root.is_file():
            raise ValueError(f"a store must be a folder, got the file {self.root}")
        self._swept: set[tuple[int, int]] = set()

    def put(self, name: str, body: Body, *, overwrite: bool, notes: Path | None = None) -> RemoteObject:
        with _translated(name), self._parent(name, create=True) as (folder, leaf):
            partial = PARTIAL_PREFIX + body.identifier
            self._sweep(folder)
            try:
                if not self._link_staged(folder, partial, body):
                    self._write(folder, partial, body)
                body.check()
                if overwrite:
                    os.replace(partial, leaf, src_dir_fd=folder, dst_dir_fd=folder)
                else:
                    self._create(folder, partial, leaf)
            except FileExistsError as error:
                raise RemoteExistsError(f"{self.uri(name)} exists") from error
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(partial, dir_fd=folder)
            os.fsync(folder)
        return RemoteObject(name, body.digest.size, body.identifier, body.digest.sha256)

    def head(self, name: str) -> RemoteObject | None:
        try:
            with _translated(name), self._parent(name) as (folder, leaf):
                found = os.stat(leaf, dir_fd=folder, follow_symlinks=False)
        except RemoteNotFoundError:
            return None
        return _describe(name, found) if stat.S_ISREG(found.st_mode) else None

    def checks_whole(self, size: int) -> bool:
        """Returns whether the CRC-32 of a file of this size is computed in the pass that copies it."""
        return size > _CHECKED_WHILE_COPIED_BYTES

    def head_with_checksum(self, name: str) -> RemoteObject | None:
        """As `head`: a folder keeps no checksums."""
        return self.head(name)

    def get(self, name: str, offset: int = 0, version: str | None = None) -> Iterator[bytes]:
        with _translated(name):
            with self._parent(name) as (folder, leaf):
                descriptor = os.open(
                    leaf, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder
                )
            with closing(descriptor):
                about = os.fstat(descriptor)
                if not stat.S_ISREG(about.st_mode):
                    raise RemoteNotFoundError(f"no object {name!r}")
                check_version(_describe(name, about).version, version, self.uri(name))
                os.lseek(descriptor, offset, os.SEEK_SET)
                while chunk := os.read(descriptor, _CHUNK_BYTES):
                    yield chunk

    def list(self, prefix: str = "") -> Iterator[RemoteObject]:
        found = []
        for parent, _, names in os.walk(self.root):
            for leaf in names:
                path = Path(parent) / leaf
                name = path.relative_to(self.root).as_posix()
                if not name.startswith(prefix) or leaf.startswith(PARTIAL_PREFIX):
                    continue
                with contextlib.suppress(FileNotFoundError):  # Deleted meanwhile.
                    about = path.lstat()
                    if stat.S_ISREG(about.st_mode):
                        found.append(_describe(name, about))
        yield from sorted(found, key=lambda item: item.name)

    def delete(self, name: str) -> None:
        with (
            contextlib.suppress(RemoteNotFoundError),
            _translated(name),
            self._parent(name) as (folder, leaf),
        ):
            os.unlink(leaf, dir_fd=folder)

    def uri(self, name: str = "") -> str:
        root = "file://" + quote(os.fsencode(self.root))
        return f"{root}/{quote(name)}" if name else root

    @contextlib.contextmanager
    def _parent(self, name: str, *, create: bool = False) -> Iterator[tuple[int, str]]:
        """Yields the name's folder as a descriptor, opened step by step from the root, and its last part."""
        *parents, leaf = check_remote_name(name).split("/")
        if create:
            self.root.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parents:
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=folder)
                inner = os.open(part, _FOLDER, dir_fd=folder)
                os.close(folder)
                folder = inner
            yield folder, leaf
        finally:
            os.close(folder)

    def _sweep(self, folder: int) -> None:
        """Removes partial files of killed writers that are a minute old and not locked, once per folder."""
        about = os.fstat(folder)
        place = (about.st_dev, about.st_ino)
        if place in self._swept:
            return
        self._swept.add(place)
        with contextlib.suppress(OSError), os.scandir(folder) as found:
            for partial in [item.name for item in found if item.name.startswith(PARTIAL_PREFIX)]:
                with contextlib.suppress(OSError):  # Locked by its writer, or gone.
                    _remove_unlocked(folder, partial)

    @staticmethod
    def _create(folder: int, partial: str, leaf: str) -> None:
        """Names the file atomically if the name is free: by a link, or on FAT by a rename."""
        try:
            os.link(partial, leaf, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            if error.errno not in NO_LINKS or not rename_without_replacing(partial, leaf, folder):
                raise

    def _write(self, folder: int, leaf: str, body: Body) -> None:
        with contextlib.suppress(FileNotFoundError):  # Left by an attempt that was killed.
            os.unlink(leaf, dir_fd=folder)
        # The source's permissions less the umask, as `cp` does.
        descriptor = os.open(
            leaf, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, body.mode, dir_fd=folder
        )
        size = crc32 = 0
        with os.fdopen(descriptor, "wb") as stream:
            with contextlib.suppress(OSError):  # Not every network file system has locks.
                try_lock(descriptor)
            for chunk in body.chunks(_CHUNK_BYTES):
                size += len(chunk)
                crc32 = zlib.crc32(chunk, crc32)
                stream.write(chunk)
            stream.flush()
            os.fsync(descriptor)
        _compare(body, Digest(size, None, crc32))

    def _link_staged(self, folder: int, leaf: str, body: Body) -> bool:
        """Gives a large final staged file a name here and reads it once; returns False if it can't."""
        if not body.is_final or not self.checks_whole(body.size):
            return False
        try:
            with contextlib.suppress(FileNotFoundError):  # Left by an attempt that was killed.
                os.unlink(leaf, dir_fd=folder)
            # The lock belongs to the file, whatever its name. Without it, another store might sweep it.
            if not try_lock(body.descriptor):
                return False
            link_open(body.descriptor, leaf, folder)
        except OSError:  # Another file system, or no links or locks; a copy reports anything else.
            return False
        _compare(body, Digest(os.fstat(body.descriptor).st_size, None, crc32_of(body.descriptor)))
        os.fsync(body.descriptor)
        return True


def _compare(body: Body, digest: Digest) -> None:
    """Compares the bytes that were read with the staged ones.

    Raises:
        BytesCorruptError: They differ.
    """
    if not body.is_measured:
        body.accept(digest)
    elif (digest.size, digest.crc32) != (body.digest.size, body.digest.crc32):
        raise BytesCorruptError(
            f"the spool's bytes of entry {body.identifier} are not those that were staged"
        )


def _remove_unlocked(folder: int, partial: str) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with closing(os.open(partial, flags, dir_fd=folder)) as descriptor:
        if try_lock(descriptor) and time.time() - os.fstat(descriptor).st_mtime > _YOUNG_SECONDS:
            os.unlink(partial, dir_fd=folder)


def _describe(name: str, found: os.stat_result) -> RemoteObject:
    return RemoteObject(name, found.st_size, version=f"{found.st_ino}-{found.st_mtime_ns}-{found.st_size}")


@contextlib.contextmanager
def _translated(name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise RemoteNotFoundError(f"no object {name!r}") from error
    except OSError as error:
        if error.errno in _REJECTED:
            raise RejectedByStoreError(f"{name!r} cannot be a file here: {error.strerror}") from error
        if error.errno in _PARKED:
            raise StoreParkedError(
                f"the store's folder must be writable, got {error.strerror}",
                may_be_the_entry=error.errno == errno.EACCES,
            ) from error
        raise TransientStoreError(f"{error.strerror}: {name!r}") from error


def open_at(location: StoreLocation, **options: Any) -> LocalStore:
    """Returns the folder of a `file://` URI.

    Raises:
        ValueError: It names another machine, or isn't absolute.
    """
    if location.authority not in {"", "localhost"} or not location.quoted_path:
        uri = f"file://{location.authority}{location.quoted_path}"
        raise ValueError(
            f"a file:// URI is absolute, as in file:///folder, got {uri!r}. Give a relative folder as a path."
        )
    return LocalStore(folder_of(location.quoted_path), **options)


def folder_of(quoted_path: str) -> str:
    """Returns the folder of a quoted path: as bytes, since not every path is UTF-8."""
    return os.fsdecode(unquote_to_bytes(os.fsencode(quoted_path)))
