"""Gives DuckDB access to the files of a store: by path, else by ranged reads through fsspec.

DuckDB's own extension for buckets (httpfs) is downloaded at run time, which many clusters do not allow; this
one needs nothing but what uploads files too.
"""

import contextlib
import datetime as dt
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from destinations.runs.errors import DatasetError
from uploads import LocalStore, RetryPolicy, Store

__all__ = ["connect", "path_of"]

_PROTOCOL = "trainingdataset"
_BLOCK_BYTES = 1 << 20
_MOST_BLOCKS = 64
_TRIES = 6
_GLOB = frozenset("*?[")


def connect(store: Store, **settings: Any) -> Any:
    """Returns a DuckDB connection, in memory, that reads the files of a store.

    Args:
        store: whose files.
        settings: DuckDB's own.

    Raises:
        ImportError: DuckDB is not installed.
    """
    try:
        import duckdb
    except ImportError as error:
        raise ImportError(
            'datasets must have DuckDB, got none. Run: pip install "training-destinations[query]"'
        ) from error
    connection = duckdb.connect(config=settings)
    connection.register_filesystem(_file_system(store))
    # What DuckDB cannot do by itself is an error at once, and not a download.
    connection.execute("SET autoinstall_known_extensions = false")
    return connection


def path_of(store: Store, name: str) -> str:
    """Returns what DuckDB calls a file of a store."""
    if isinstance(store, LocalStore):
        path = str(store.root / name)
        if not _GLOB & set(path):
            return path
    return f"{_PROTOCOL}://{name}"


def _file_system(store: Store) -> Any:
    try:
        from fsspec import AbstractFileSystem
    except ImportError as error:
        raise ImportError(
            'datasets must have fsspec, got none. Run: pip install "training-destinations[query]"'
        ) from error

    class StoreFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
        """A store, as far as DuckDB asks."""

        protocol = _PROTOCOL
        cachable = False

        def open(self, path: str, mode: str = "rb", **_: Any) -> "StoreFile":
            if mode != "rb":
                raise OSError(f"a file of a dataset must be opened to read, got mode {mode!r}.")
            return StoreFile(store, _name(path))

        def info(self, path: str, **_: Any) -> dict[str, Any]:
            return {"name": path, "size": StoreFile(store, _name(path)).size, "type": "file"}

        def modified(self, path: str) -> dt.datetime:
            # A file of a dataset is never changed.
            return dt.datetime.fromtimestamp(0, dt.UTC)

        def exists(self, path: str, **_: Any) -> bool:
            return store.head(_name(path)) is not None

        isfile = exists

        def glob(self, path: str, **_: Any) -> list[str]:
            return [path]

    return StoreFileSystem()


def _name(path: str) -> str:
    return path.removeprefix(f"{_PROTOCOL}://")


class StoreFile:
    """A file of a store, read in blocks that are kept for a while.

    DuckDB seeks and reads in several threads at once, so each thread has a place of its own.

    Args:
        store: whose file.
        name: in the store.
        sleep: waits; injected by tests.
    """

    def __init__(self, store: Store, name: str, *, sleep: Callable[[float], object] = time.sleep) -> None:
        found = store.head(name)
        if found is None:
            raise FileNotFoundError(f"{store.uri(name)} must exist, got nothing. Open the dataset again.")
        self._store = store
        self._sleep = sleep
        self._found = found
        self.size = found.size
        self.closed = False
        self._local = threading.local()
        # Guards the blocks.
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, bytes] = OrderedDict()

    def seek(self, offset: int, whence: int = 0) -> int:
        """Moves this thread's place."""
        base = {0: 0, 1: self.tell(), 2: self.size}[whence]
        self._local.place = base + offset
        return base + offset

    def tell(self) -> int:
        """Returns this thread's place."""
        return int(getattr(self._local, "place", 0))

    def read(self, size: int = -1) -> bytes:
        """Returns bytes from this thread's place on."""
        start = self.tell()
        end = self.size if size < 0 else min(self.size, start + size)
        data = self._range(start, end) if end > start else b""
        self._local.place = start + len(data)
        return data

    def close(self) -> None:
        """Forgets the blocks."""
        self.closed = True
        with self._lock:
            self._blocks.clear()

    def _range(self, start: int, end: int) -> bytes:
        first, last = start // _BLOCK_BYTES, (end - 1) // _BLOCK_BYTES
        with self._lock:
            blocks = {
                number: self._blocks[number] for number in range(first, last + 1) if number in self._blocks
            }
        missing = [number for number in range(first, last + 1) if number not in blocks]
        if missing:
            begin = missing[0] * _BLOCK_BYTES
            data = self._fetch(begin, min(self.size, (missing[-1] + 1) * _BLOCK_BYTES))
            for number in range(missing[0], missing[-1] + 1):
                at = number * _BLOCK_BYTES - begin
                blocks[number] = data[at : at + _BLOCK_BYTES]
            with self._lock:
                self._blocks.update(blocks)
                while len(self._blocks) > _MOST_BLOCKS:
                    self._blocks.popitem(last=False)
        whole = b"".join(blocks[number] for number in range(first, last + 1))
        return whole[start - first * _BLOCK_BYTES : end - first * _BLOCK_BYTES]

    def _fetch(self, start: int, end: int) -> bytes:
        """Returns a range; goes on where it was when the store fails for a moment."""
        data, failures, policy = b"", 0, RetryPolicy()
        while len(data) < end - start:
            before = len(data)
            try:
                chunks = self._store.get(self._found.name, offset=start + before, version=self._found.version)
                with contextlib.closing(chunks):  # type: ignore[type-var]  # a generator
                    for chunk in chunks:
                        data += chunk
                        if len(data) >= end - start:
                            break
            except OSError:
                raise
            except Exception as error:
                failures = failures + 1 if len(data) == before else 1
                if failures >= _TRIES:
                    raise DatasetError(
                        f"{self._store.uri(self._found.name)} cannot be read: {error}."
                    ) from error
                self._sleep(policy.delay_seconds(failures, None))
            else:
                if len(data) == before:
                    raise DatasetError(
                        f"{self._store.uri(self._found.name)} must have {self.size} bytes, got fewer."
                    )
        return data[: end - start]
