"""Downloads a file from a store: verified, named atomically, resumed after a broken connection."""

import contextlib
import hashlib
import os
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from .disk import (
    IRREGULAR,
    NO_FLOCK,
    closing,
    crc32_of_both,
    is_open_file,
    open_regular,
    remove_if,
    rename_new,
    try_lock,
    write_at,
)
from .drain.retry import RetryPolicy
from .errors import BytesCorruptError, InvalidRemoteNameError, RemoteNotFoundError, TransientStoreError
from .names import check_remote_name
from .stores.registry import open_object, open_store
from .stores.store import Ranging, RemoteObject, Store, with_checksum

__all__ = ["POINTER_SUFFIX", "download_file", "read_pointer"]

POINTER_SUFFIX = ".symlink"

_PIECE_BYTES = 16 << 20
_CONNECTIONS = 4
_MAX_POINTERS = 10
_MAX_FOLDERS = 16
_TRIES_WITHOUT_PROGRESS = 8
_MAX_POINTER_BYTES = 4096
# A smaller download ends before anyone reads its bar.
_BYTES_OF_A_BAR = 1 << 20
_MAX_PARTIALS = 20
_LEAF_CHARACTERS = 50  # At most 200 of the 255 bytes of a name.
_MODE = 0o666  # Less the umask.


def download_file(
    name: str,
    destination: str | Path,
    *,
    store: Store | str | Path | None = None,
    overwrite: bool = False,
    progress_bar: bool = True,
    policy: RetryPolicy | None = None,
) -> Path:
    """Downloads an object to a file and returns the file's path. Blocks until it is complete.

    ```python
    with UploadQueue("store") as queue:     # or "s3://bucket/digits"
        queue.submit("notes.txt", "notes.txt").result(timeout_seconds=60)
    download_file("notes.txt", "copy.txt", store="store")
    ```

    If there is no object of this name but a `name.symlink` (a pointer: a text file with another name, as
    Composer writes it), the pointer is followed, and further pointers too. The name in a pointer may begin
    with folders that the store's prefix already has.

    Args:
        name: Name in the store; without a store, the URI from `UploadHandle.uri`.
        destination: A path that isn't a folder; its parents are created. It never appears half written.
        store: A store, or its URI or folder.
        overwrite: Whether an existing file may be replaced.
        progress_bar: Whether to show a tqdm bar of the bytes on stderr, for a MiB or more.
        policy: How long to wait between tries.

    Raises:
        FileExistsError: `overwrite=False` and the destination exists.
        RemoteNotFoundError: There is neither an object nor a pointer of that name.
        BytesCorruptError: Other bytes arrived than were uploaded.
        TransientStoreError: Eight tries in a row brought no byte.
        StoreError: Any other error of the store.
        OSError: The destination could not be written.
    """
    destination = Path(destination)
    if destination.exists() and not overwrite:
        raise _exists(destination)
    if store is None:
        store, name = open_object(name)
    elif isinstance(store, str | Path):
        store = open_store(store)
    found = _resolve(store, name)
    if found.sha256 is None and found.noted_crc32 is None:
        found = with_checksum(store, found)
    destination.parent.mkdir(parents=True, exist_ok=True)
    with _new_file(destination, overwrite=overwrite) as descriptor:
        with _bar(found, shown=progress_bar) as bar:
            crc32 = _Download(store, found, descriptor, bar, policy or RetryPolicy()).run()
        _verify(found, descriptor, crc32)
    return destination


def _resolve(store: Store, name: str) -> RemoteObject:
    seen: list[str] = []
    while len(seen) < _MAX_POINTERS:
        if name in seen:
            break
        seen.append(name)
        found = store.head(name)
        is_pointer = len(seen) > 1 and name.endswith(
            POINTER_SUFFIX
        )  # A pointer requested by its own name is an ordinary file.
        if found is not None and not is_pointer:
            return found
        pointer = name if found is not None else name + POINTER_SUFFIX
        if found is None and (name.endswith(POINTER_SUFFIX) or store.head(pointer) is None):
            raise RemoteNotFoundError(
                f"{store.uri(name)} must exist, got nothing there nor at {name}{POINTER_SUFFIX}"
            )
        name = _in_store(store, _target_of(store, pointer))
    raise RemoteNotFoundError(
        f"a pointer must lead to an object, got a circle or a chain of {len(seen)}: {' → '.join(seen)}"
    )


def _in_store(store: Store, name: str) -> str:
    """Returns the longest end of a pointer's name that exists; the store may begin inside its folder."""
    parts = name.split("/")
    for start in range(min(len(parts), _MAX_FOLDERS)):
        end = "/".join(parts[start:])
        if store.head(end) is not None or store.head(end + POINTER_SUFFIX) is not None:
            return end
    return name


def _target_of(store: Store, pointer: str) -> str:
    try:
        return check_remote_name(read_pointer(store, pointer))  # A pointer is untrusted input.
    except InvalidRemoteNameError as error:
        raise RemoteNotFoundError(
            f"the pointer {pointer!r} does not contain a valid name: {error}"
        ) from error


def read_pointer(store: Store, pointer: str) -> str:
    """Returns the name in a pointer; if it is too long, a beginning that no store accepts as a name."""
    text = b""
    for chunk in store.get(pointer):
        text += chunk
        if len(text) > _MAX_POINTER_BYTES:
            break
    return text.decode(errors="replace").strip()


@contextlib.contextmanager
def _new_file(destination: Path, *, overwrite: bool) -> Iterator[int]:
    """Yields the descriptor of a new file, which becomes the destination when the block ends.

    Until then it is called `.NAME.NUMBER.partial`. If the process is killed, the next download to the same
    destination reuses that file.
    """
    descriptor, partial = _partial_of(destination)
    with closing(descriptor):
        try:
            os.ftruncate(descriptor, 0)
            yield descriptor
            if overwrite:
                os.rename(partial, str(destination))
            else:
                rename_new(partial, str(destination))
        except BaseException as error:
            with contextlib.suppress(OSError):
                remove_if(partial, is_open_file(descriptor))
            if isinstance(error, FileExistsError):
                raise _exists(destination) from None
            raise


def _partial_of(destination: Path) -> tuple[int, str]:
    """Returns a locked partial file: the first that no other download is writing."""
    leaf = f".{destination.name[:_LEAF_CHARACTERS]}."
    for number in range(_MAX_PARTIALS):
        partial = str(destination.with_name(f"{leaf}{number}.partial"))
        with contextlib.suppress(PermissionError, *IRREGULAR), contextlib.ExitStack() as opened:
            descriptor = open_regular(partial, os.O_RDWR | os.O_CREAT, _MODE)
            opened.callback(os.close, descriptor)
            try:
                is_free = try_lock(descriptor)
            except OSError as error:
                if error.errno not in NO_FLOCK:
                    raise
                # Without locks, no download uses this name.
                with contextlib.suppress(OSError):
                    remove_if(partial, is_open_file(descriptor))
                break
            # Its download may have ended between the two calls and given it its name.
            if is_free and is_open_file(descriptor)(partial) and _is_private(descriptor):
                opened.pop_all()
                return descriptor, partial
    partial = str(destination.with_name(f"{leaf}{uuid.uuid4().hex}.partial"))
    return open_regular(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, _MODE), partial


def _is_private(descriptor: int) -> bool:
    """Returns whether the file belongs to the user and has one name, so that nobody shares its content."""
    state = os.fstat(descriptor)
    return state.st_uid == os.geteuid() and state.st_nlink == 1


def _exists(destination: Path) -> FileExistsError:
    return FileExistsError(f"{destination} exists. Use overwrite=True to replace it.")


@attrs.frozen
class _Download:
    """An object on its way into a file. The lock guards the bar; `stop` ends the threads early."""

    store: Store
    found: RemoteObject
    descriptor: int
    bar: Any
    policy: RetryPolicy
    lock: threading.Lock = attrs.field(factory=threading.Lock)
    stop: threading.Event = attrs.field(factory=threading.Event)

    def run(self) -> int:
        """Fetches the object, a large one over several connections; returns the CRC-32 of the bytes."""
        crc32 = None
        if isinstance(self.store, Ranging) and self.found.version and self.found.size > _PIECE_BYTES:
            with contextlib.suppress(NotImplementedError):
                crc32 = self._fetch_pieces(self.store, self.found.version)
        if crc32 is None:
            self.stop.clear()
            crc32 = self._fetch(0, self._get_from)
        os.fsync(self.descriptor)
        return crc32

    def _check_stopped(self) -> None:
        if self.stop.is_set():
            raise TransientStoreError("another piece failed")

    def _get_from(self, offset: int) -> Iterator[bytes]:
        return self.store.get(self.found.name, offset=offset, version=self.found.version)

    def _fetch_pieces(self, store: Ranging, version: str) -> int:
        def fetch(start: int) -> int:
            end = min(start + _PIECE_BYTES, self.found.size)
            return self._fetch(start, lambda at: store.get_range(self.found.name, at, end - at, version), end)

        starts = range(0, self.found.size, _PIECE_BYTES)
        with ThreadPoolExecutor(_CONNECTIONS, "uploads-download") as pool:
            try:
                try:
                    pieces = [pool.submit(fetch, start) for start in starts]
                except RuntimeError as error:  # Out of threads, or at interpreter exit.
                    raise NotImplementedError from error
                crc32s = [piece.result() for piece in pieces]
            except BaseException:
                self.stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        crc32 = 0
        for start, piece in zip(starts, crc32s, strict=True):
            crc32 = crc32_of_both(crc32, piece, min(_PIECE_BYTES, self.found.size - start))
        return crc32

    def _fetch(self, start: int, get: Callable[[int], Iterator[bytes]], end: int | None = None) -> int:
        """Writes the bytes from `start` to `end`, or to the end of the object; returns their CRC-32.

        A broken connection continues where it broke.
        """
        failures = crc32 = 0
        done = start
        limit = self.found.size if end is None else end
        while True:
            before = done
            try:
                for chunk in get(before):
                    self._check_stopped()
                    write_at(self.descriptor, chunk, done)
                    crc32 = zlib.crc32(chunk, crc32)
                    done += len(chunk)
                    with self.lock:
                        self.bar.update(len(chunk))
            except TransientStoreError as error:
                failures = failures + 1 if done == before else 1
                if failures >= _TRIES_WITHOUT_PROGRESS or self.stop.is_set():
                    raise
                time.sleep(self.policy.delay_seconds(failures, error.retry_after_seconds))
            else:
                if done >= limit or done == before:
                    break  # Complete, or no progress: see _verify.
        if end is not None and done != end:
            raise BytesCorruptError(
                f"{self.found.name!r} has {done - start} bytes at {start}, expected {end - start}"
            )
        return crc32


def _verify(found: RemoteObject, descriptor: int, crc32: int) -> None:
    size = os.fstat(descriptor).st_size
    if size != found.size:
        raise BytesCorruptError(f"{found.name!r} has {size} bytes, expected {found.size}")
    expected = found.noted_crc32 if found.crc32 is None else found.crc32
    if found.sha256 is not None:
        with open(descriptor, "rb", closefd=False) as stream:
            stream.seek(0)
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        if sha256 != found.sha256:
            raise BytesCorruptError(f"{found.name!r} has SHA-256 {sha256}, expected {found.sha256}")
    elif expected not in {None, crc32}:
        raise BytesCorruptError(f"{found.name!r} has CRC-32 {crc32:08x}, expected {expected:08x}")


def _bar(found: RemoteObject, *, shown: bool) -> Any:
    from tqdm import tqdm

    is_shown = shown and found.size >= _BYTES_OF_A_BAR
    return tqdm(total=found.size, unit="B", unit_scale=True, desc=found.name, disable=not is_shown)
