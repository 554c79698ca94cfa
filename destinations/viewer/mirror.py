"""Runs in a bucket: a local copy of their folders, which is kept up to date while the page is open.

What a sync program or a copy by hand put there: a folder with `sidecar.json` or `metrics.csv` is a run.
Checkpoints and artifacts are not copied. Names of objects are hostile: none leads out of the copy.
"""

import contextlib
import hashlib
import json
import logging
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, Self

import attrs

from destinations.run_directory.layout import ARTIFACTS_FOLDER, HEARTBEAT, SIDECAR, metrics_name
from destinations.runs.files import number_of, path_inside, read_object_file
from destinations.runs.index.index import cache_folder
from uploads import RemoteObject, Store, UploadError, download_file, open_store
from uploads.disk import replace_file

__all__ = ["Mirror", "mirror_folder"]

_log = logging.getLogger("destinations")

_MARKS = {SIDECAR, metrics_name(0)}
_NOT_COPIED = {ARTIFACTS_FOLDER, "checkpoints"}
_STATE = ".mirror.json"
_MAX_OBJECTS = 1_000_000
_MAX_BYTES = 4 << 30
_REFRESH_SECONDS = 30.0
_WORKERS = 8


def mirror_folder(uri: str) -> Path:
    """Returns the folder of the copy of a bucket, in the cache folder of the user."""
    return cache_folder().parent / "mirrors" / hashlib.sha256(uri.encode()).hexdigest()[:16]


@attrs.frozen
class _Copied:
    """The size and version of an object when it was copied."""

    size: int
    version: str | None


class Mirror:
    """A local copy of the runs in a store.

    **Threading.** `refresh` may be called from any thread; `start` starts a thread that calls it every thirty
    seconds, which `close` ends.

    Args:
        store: which has them, or its URI.
        folder: of the copy.
        max_bytes: the largest size of the copy; the largest files are left out first.
    """

    def __init__(self, store: Store | str, folder: Path, *, max_bytes: int = _MAX_BYTES) -> None:
        self._store = open_store(store) if isinstance(store, str) else store
        self.folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # Guards the copy.
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def refresh(self) -> list[str]:
        """Copies new and changed objects, and removes deleted ones; returns a message for each one left out.

        Raises:
            UploadError: the store cannot be listed.
        """
        with self._lock:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            known = self._known()
            wanted, left_out = self._wanted()
            changed = [
                one
                for one in wanted.values()
                if one.version is None or known.get(one.name) != _Copied(one.size, one.version)
            ]
            with ThreadPoolExecutor(_WORKERS, "viewer-mirror") as pool:
                failed = dict(found for found in pool.map(self._copy, changed) if found is not None)
            # Afterwards: a part in Parquet is there before its CSV is removed.
            for name in known.keys() - wanted.keys():
                self._remove(name)
            left_out += [f"{name}: {reason}" for name, reason in failed.items()]
            copied = {name: [one.size, one.version] for name, one in wanted.items() if name not in failed}
            replace_file(self.folder / _STATE, json.dumps(copied).encode())
            self._touch_heartbeats(wanted)
            return left_out

    def start(self) -> Self:
        """Keeps the copy up to date until `close`."""
        self._thread = threading.Thread(target=self._loop, name="viewer-mirror", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends the thread; a copy that is under way is finished first."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _loop(self) -> None:
        while not self._stop.wait(_REFRESH_SECONDS):
            try:
                self.refresh()
            except (UploadError, OSError) as error:
                _log.warning("could not look for new runs in %s: %s", self._store.uri(), error)

    def _known(self) -> dict[str, _Copied]:
        """Returns what was copied before; nothing if that is unknown."""
        known = {}
        for name, state in read_object_file(self.folder / _STATE).items():
            with contextlib.suppress(TypeError, ValueError):
                path = path_inside(self.folder, name)
                if path.is_file():
                    known[name] = _Copied(*state)
        return known

    def _wanted(self) -> tuple[dict[str, RemoteObject], list[str]]:
        """Returns the objects to copy, by name, and what is left out."""
        listed: list[RemoteObject] = []
        left_out: list[str] = []
        for one in self._store.list():
            if len(listed) >= _MAX_OBJECTS:
                left_out.append(f"all objects after the first {_MAX_OBJECTS}")
                break
            listed.append(one)
        runs = {str(path.parent) for one in listed if (path := PurePosixPath(one.name)).name in _MARKS}
        found = [one for one in listed if self._is_of_run(one.name, runs)]
        wanted, total = {}, 0
        for one in sorted(found, key=lambda one: one.size):
            if total + one.size > self._max_bytes:
                left_out.append(f"{one.name}: the copy has {self._max_bytes >> 20} MiB at most")
                continue
            total += one.size
            wanted[one.name] = one
        return wanted, left_out

    def _is_of_run(self, name: str, runs: Iterable[str]) -> bool:
        path = PurePosixPath(name)
        is_hidden = any(part.startswith(".") for part in path.parts)
        if is_hidden or _NOT_COPIED & set(path.parts[:-1]) or path.name == HEARTBEAT:
            return False
        try:
            path_inside(self.folder, name)
        except ValueError:
            return False
        return any(str(parent) in runs for parent in path.parents)

    def _copy(self, one: RemoteObject) -> tuple[str, str] | None:
        """Copies an object; returns its name and a reason if that fails."""
        try:
            target = path_inside(self.folder, one.name)
            download_file(one.name, target, store=self._store, overwrite=True, progress_bar=False)
        except (UploadError, OSError, ValueError) as error:
            return one.name, str(error)
        return None

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            path = path_inside(self.folder, name)
            path.unlink(missing_ok=True)
            if not any((path.parent / mark).exists() for mark in _MARKS):
                (path.parent / HEARTBEAT).unlink(missing_ok=True)
            for parent in path.parents:
                if parent == self.folder or any(parent.iterdir()):
                    break
                parent.rmdir()

    def _touch_heartbeats(self, wanted: Iterable[str]) -> None:
        """Sets the heartbeat of each run from its sidecar; the copied file has the time of copying."""
        for name in wanted:
            path = self.folder / name
            if path.name in _MARKS:
                at = _time_of(read_object_file(path.parent / SIDECAR).get("updated_at"))
                with contextlib.suppress(OSError):
                    (path.parent / HEARTBEAT).touch()
                    os.utime(path.parent / HEARTBEAT, (at, at))


def _time_of(value: Any) -> float:
    found = number_of(value)
    return found if found is not None and 0 <= found < 1e11 else 0.0  # noqa: PLR2004  # a file system's years
