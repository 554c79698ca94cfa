"""Downloads a file from a store: verified, named atomically, resumed after a broken connection."""

import hashlib
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .disk import crc32_of
from .drain.retry import RetryPolicy
from .errors import BytesCorruptError, InvalidRemoteNameError, RemoteNotFoundError, TransientStoreError
from .names import check_remote_name
from .stores.registry import open_object, open_store
from .stores.store import Checksumming, RemoteObject, Store

__all__ = ["POINTER_SUFFIX", "download_file", "read_pointer"]

POINTER_SUFFIX = ".symlink"

_MAX_POINTERS = 10
_MAX_FOLDERS = 16
_TRIES_WITHOUT_PROGRESS = 8
_MAX_POINTER_BYTES = 4096
# A smaller download is over before its bar is read.
_BYTES_OF_A_BAR = 1 << 20


def download_file(
    name: str,
    destination: str | Path,
    *,
    store: Store | str | Path | None = None,
    overwrite: bool = False,
    progress_bar: bool = True,
    policy: RetryPolicy | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Path:
    """Downloads an object to a file and returns the file's path. Blocks until it is complete.

    ```python
    with UploadQueue("store") as queue:     # or "s3://bucket/digits"
        queue.submit("notes.txt", "notes.txt").result(timeout_seconds=60)
    download_file("notes.txt", "copy.txt", store="store")
    ```

    An object comes as it was put. Where there is none of this name but `name.symlink` (a pointer: a text file
    with another name, as Composer writes it), that one is followed, and so are pointers that it leads to. The
    name in it may begin with folders that the store's own prefix has already.

    Args:
        name: In the store; without a store the URI that `UploadHandle.uri` says.
        destination: A path that is not a folder; its parents are made. Never seen half written.
        store: Where from: a store, or its URI or folder.
        overwrite: Whether an existing file may be replaced.
        progress_bar: Whether to show a tqdm bar of the bytes on stderr, for a MiB or more.
        policy: How long to wait between tries.
        sleep: Waits; injected by tests.

    Raises:
        FileExistsError: `overwrite=False` and the destination exists.
        RemoteNotFoundError: Neither the object nor a pointer of that name.
        BytesCorruptError: What arrived is not what was uploaded.
        TransientStoreError: Eight tries in a row brought not one byte.
        StoreError: Any other.
    """
    destination = Path(destination)
    if destination.exists() and not overwrite:
        raise FileExistsError(f"{destination} exists. Use overwrite=True to replace it.")
    if store is None:
        store, name = open_object(name)
    elif isinstance(store, str | Path):
        store = open_store(store)
    found = _resolve(store, name)
    if found.sha256 is None and isinstance(store, Checksumming):
        found = store.head_with_checksum(found.name) or found
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = destination.with_name(f".{destination.name[:100]}.{uuid.uuid4().hex}.partial")
    try:
        with _bar(found, shown=progress_bar) as bar:
            _fetch(store, found, partial, bar, policy or RetryPolicy(), sleep)
        _verify(found, partial)
        if overwrite:
            partial.replace(destination)
        else:
            os.link(partial, destination)  # Unlike a rename, fails if the file exists by now.
    finally:
        partial.unlink(missing_ok=True)
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
        )  # Whoever asks for it by name gets itself.
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
    """Returns the longest end of a pointer's name that is there; the store may begin inside its folder."""
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
    """Returns the name in a pointer; of one that is too long, a beginning that no store accepts as a name."""
    text = b""
    for chunk in store.get(pointer):
        text += chunk
        if len(text) > _MAX_POINTER_BYTES:
            break
    return text.decode(errors="replace").strip()


def _fetch(
    store: Store,
    found: RemoteObject,
    partial: Path,
    bar: Any,
    policy: RetryPolicy,
    sleep: Callable[[float], None],
) -> None:
    failures = 0
    with partial.open("wb") as stream:
        while True:
            before = stream.tell()
            try:
                for chunk in store.get(found.name, offset=before, version=found.version):
                    stream.write(chunk)
                    bar.update(len(chunk))
            except TransientStoreError as error:
                failures = failures + 1 if stream.tell() == before else 1
                if failures >= _TRIES_WITHOUT_PROGRESS:
                    raise
                sleep(policy.delay_seconds(failures, error.retry_after_seconds))
            else:
                if stream.tell() >= found.size or stream.tell() == before:
                    break  # Complete, or no progress: see _verify.
        stream.flush()
        os.fsync(stream.fileno())


def _verify(found: RemoteObject, partial: Path) -> None:
    size = partial.stat().st_size
    if size != found.size:
        raise BytesCorruptError(f"{found.name!r} has {size} bytes, expected {found.size}")
    with partial.open("rb") as stream:
        if found.sha256 is not None:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            if sha256 != found.sha256:
                raise BytesCorruptError(f"{found.name!r} has SHA-256 {sha256}, expected {found.sha256}")
        elif found.crc32 is not None:
            crc32 = crc32_of(stream.fileno())
            if crc32 != found.crc32:
                raise BytesCorruptError(f"{found.name!r} has CRC-32 {crc32:08x}, expected {found.crc32:08x}")


def _bar(found: RemoteObject, *, shown: bool) -> Any:
    from tqdm import tqdm

    is_shown = shown and found.size >= _BYTES_OF_A_BAR
    return tqdm(total=found.size, unit="B", unit_scale=True, desc=found.name, disable=not is_shown)
