"""`BucketCopy`: a local copy of the runs in a store, which downloads new and requested objects.

A listing tells which objects exist, apart from what was read. `unreadable` has the objects that couldn't be
read, with the reason. The reason also takes the place of the file (`uploads.disk.mark_unreadable`), so that
readers of the folder raise it instead of seeing an empty file. Every listed run has a folder.

A run in a store has one of two forms. Runs kept there by `RunDirectory` are made from their pieces
(`run_directory.stored_run`); while such a run is live, its next piece is requested when it is due. Other runs
are plain files, uploaded by a sync program or by hand: a folder with `sidecar.json` or `metrics.csv` is a
run. One listing finds them all. Documents are downloaded at once, rows when a run is read, and media and
tables when they are read. Checkpoints and artifacts are never downloaded. Names of objects are untrusted:
none leads out of the copy.
"""

import contextlib
import errno
import hashlib
import json
import logging
import operator
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import attrs

from destinations.history.fork import find_parents
from destinations.history.sessions import SESSIONS
from destinations.kinds import indexes, record_folders
from destinations.run_directory.layout import (
    ARTIFACTS_FOLDER,
    HEARTBEAT,
    PARTS_FOLDER,
    PIECES_STATE,
    SIDECAR,
    WRITERS_FOLDER,
    is_writer_name,
    metrics_name,
)
from destinations.run_directory.pieces import FolderState, PieceError
from destinations.run_directory.stored_run import StoredRun, live_place, session_folder, stream_of
from destinations.runs.files import number_of, path_inside
from uploads import (
    RemoteObject,
    Store,
    UploadError,
    download_file,
    one_line,
    open_store,
    redact_text,
)
from uploads.disk import UnreadableError, lock, mark_unreadable, read_json, replace_file, unlock

from .index import cache_folder

__all__ = ["BucketCopy", "bucket_folder", "has_dataset"]

_log = logging.getLogger("destinations")

_MARKS = {SIDECAR, metrics_name(0)}
_NOT_COPIED = {ARTIFACTS_FOLDER, "checkpoints"}
_STATE = ".mirror.json"
_LOCK = ".lock"
_MAX_OBJECTS = 1_000_000
# The largest files are left out first.
_MAX_BYTES = 4 << 30
_LIST_SECONDS = 60.0
# A missing piece is requested again after this time, at first.
_LATE_SECONDS = 1.5
# A piece may have been there for long, so the next one is requested earlier by at least this.
_EARLIER_SECONDS = 0.1
# After so many misses, the writer seems to be gone; the next listing tells.
_MOST_LATE = 6
_DOCUMENT_SUFFIXES = (".json", ".yaml", ".jsonl")
_WORKERS = 16


def bucket_folder(uri: str) -> Path:
    """Returns the folder for the copy of a store, in the user's cache folder.

    The folder is named like the last part of the URI, which may be the name of a run.
    """
    name = re.sub(r"[^\w.+=-]+", "-", unquote(uri.partition("?")[0].rstrip("/").rpartition("/")[2]))
    digest = hashlib.sha256(uri.encode()).hexdigest()[:16]
    return cache_folder().parent / "mirrors" / digest / (name.strip(".")[:100] or "runs")


def has_dataset(store: Store) -> bool:
    """Returns whether a store holds a dataset of `compact`, with one request.

    Raises:
        UploadError: the store doesn't answer.
    """
    return next(iter(store.list("runs/_delta_log/")), None) is not None


@attrs.define
class _Live:
    """A stream of a run that its writer keeps in the store.

    Attributes:
        run: makes the files.
        is_written: whether its next piece is expected.
        is_whole: whether its rows were downloaded, and not only its documents.
        due_at: when to request the next piece.
        late: how often the next piece was missing.
        earlier: by how much to request the next piece earlier, at most half of the last delay. The time in a
            piece doesn't help, because clocks of machines differ.
        asked_at: when the next piece was last requested in vain.
    """

    run: StoredRun
    is_written: bool = False
    is_whole: bool = False
    due_at: float = 0.0
    late: int = 0
    earlier: float | None = None
    asked_at: float = 0.0


@attrs.define
class _Copied:
    """A run, or one of its named writers, which has a folder of its own.

    Attributes:
        prefix: the prefix of its objects' names.
        plain: its objects that are plain files, by path.
        live: its streams by name.
        writers: its named writers.
        is_whole: whether its plain files other than media were downloaded.
    """

    prefix: str
    plain: dict[str, RemoteObject] = attrs.field(factory=dict)
    live: dict[str, _Live] = attrs.field(factory=dict)
    writers: list["_Copied"] = attrs.field(factory=list)
    is_whole: bool = False


class BucketCopy:
    """A local copy of the runs in a store.

    **Threading.** Any thread may call any method; a lock serializes them, and another keeps other processes
    out.

    **Blocking.** Calls make few requests: at most one listing a minute, and one request per interval of a
    live run.

    Args:
        store: the store, or its URI.
        folder: the folder of the copy.
    """

    def __init__(self, store: Store | str, folder: Path) -> None:
        self._store = open_store(store) if isinstance(store, str) else store
        self.folder = folder
        self.uri = self._store.uri()
        self._clock = time.monotonic
        self._lock = threading.RLock()  # Guards the copy.
        self._list_at = float("-inf")
        self._runs: dict[str, _Copied] = {}
        self.unreadable: dict[str, str] = {}
        """Why an object, piece or run couldn't be read since the last listing, by name."""
        self.unlisted = ""
        """Why not all runs are known; empty if all are."""

    def refresh(self, *, at_once: bool = False) -> None:
        """Downloads new objects: lists the store if a minute has passed, or else requests due pieces.

        Args:
            at_once: whether to list in any case.

        Doesn't raise if the store or the disk fails; see `unlisted`.
        """
        with self._lock:
            now = self._clock()
            if at_once or now >= self._list_at:
                try:
                    with self._alone():
                        self._list()
                except (UploadError, OSError) as error:
                    self.unlisted = f"{self.uri} cannot be listed: {error}"
                    return
                self._list_at = self._clock() + _LIST_SECONDS
            else:
                due = [
                    one for run in self._runs.values() for one in run.live.values() if self._is_due(one, now)
                ]
                if due:
                    with self._alone(), ThreadPoolExecutor(_WORKERS, "bucket") as pool:
                        list(pool.map(self._poll, due))

    def uri_of(self, path: Path) -> str:
        """Returns the URI, without options, of a file or folder of the copy."""
        below = path.relative_to(self.folder).as_posix()
        root = self.uri.partition("?")[0].rstrip("/")
        return root if below == "." else f"{root}/{below}"

    def bring(self, run_dir: Path) -> None:
        """Downloads the rows of a run, and new pieces of a live one.

        Args:
            run_dir: its folder in the copy.

        Raises:
            UnreadableError: the store doesn't answer, or refuses.
        """
        with self._lock:
            run = self._run_at(run_dir)
            if run is None:
                return
            for one in (run, *run.writers):
                if one.prefix not in self.unreadable:
                    self._bring_one(one)
                if (reason := self.unreadable.get(one.prefix)) is not None:
                    raise UnreadableError(errno.EIO, reason, self.uri_of(self.folder / one.prefix))

    def _bring_one(self, run: _Copied) -> None:
        now = self._clock()
        due = [one for one in run.live.values() if self._is_due(one, now)]
        if due or not run.is_whole or not all(one.is_whole for one in run.live.values()):
            with self._alone():
                for one in due:
                    self._poll(one)
                self._bring_rows(run)

    def versions_of(self, run_dir: Path) -> list[tuple[str, int, str | None]]:
        """Returns a state from the listing that changes with the rows or records of a run.

        Returns:
            The name, size and version of each object; of the pieces, only the newest. Versions are None if
            the store has none.
        """
        with self._lock:
            run = self._run_at(run_dir)
            found: list[tuple[str, int, str | None]] = []
            for one in () if run is None else (run, *run.writers):
                for path, listed in one.plain.items():
                    if not _is_document(path) or path == SESSIONS:
                        found.append((one.prefix + path, listed.size, listed.version))
                for live in one.live.values():
                    if (session := live.run.read_session) is not None:
                        piece = session.newest_piece
                        name = live.run.name_of(session.number, piece)
                        found.append((one.prefix + name, 0, session.versions[piece]))
            return sorted(found, key=operator.itemgetter(0))

    @contextlib.contextmanager
    def borrowed(self, run_dir: Path) -> "Iterator[tuple[Path, BucketCopy]]":
        """Downloads a run to a temporary folder for the duration of a `with` block; this copy isn't changed.

        Args:
            run_dir: its folder in the copy.

        Returns:
            Its temporary folder, and the copy that has it.

        Raises:
            UnreadableError: the store doesn't answer, or refuses.
        """
        with tempfile.TemporaryDirectory(prefix="runs-") as name:
            other = BucketCopy(self._store, Path(name).resolve())
            waiting = [other.folder / run_dir.relative_to(self.folder)]
            first = waiting[0]
            while waiting:
                folder = waiting.pop()
                with self._lock:
                    run = self._run_at(self.folder / folder.relative_to(other.folder))
                    if run is None or run.prefix in other._runs:
                        continue
                    other._take(self, run)
                other.bring(folder)
                waiting += [parent.path for parent in find_parents(folder)]
            yield first, other

    def _take(self, other: "BucketCopy", run: _Copied) -> _Copied:
        """Takes a run from the listing of another copy; nothing of it was downloaded yet."""
        live = {}
        for stream, known in run.live.items():
            stored = StoredRun(self._store, run.prefix, self.folder / run.prefix, stream)
            stored.sessions = known.run.sessions
            live[stream] = _Live(stored)
        writers = [self._take(other, writer) for writer in run.writers]
        self._runs[run.prefix] = found = _Copied(run.prefix, run.plain, live, writers)
        if (reason := other.unreadable.get(run.prefix)) is not None:
            self.unreadable[run.prefix] = reason
        return found

    def has_rows(self, run_dir: str) -> bool:
        """Returns whether the rows of a run that are in the store were downloaded."""
        run = self._run_at(Path(run_dir))
        if run is None:
            return False
        is_whole = run.is_whole and all(one.is_whole for one in run.live.values())
        return is_whole or not (run.live or metrics_name(0) in run.plain)

    def bring_files(self, paths: Iterable[Path]) -> None:
        """Downloads files of records that the copy lacks.

        If a file can't be downloaded, opening it raises the reason.
        """
        with self._lock:
            wanted = []
            for path in paths:
                run = self._run_at(path.parent)
                if run is None or path.exists():
                    continue
                relative = path.relative_to(self.folder / run.prefix).as_posix()
                wanted.append((run.prefix, relative))
            if wanted:
                with self._alone(), ThreadPoolExecutor(_WORKERS, "bucket") as pool:
                    list(pool.map(lambda one: self._copy(*one), wanted))

    # Listing.

    def _list(self) -> None:
        runs = self._found()
        if self.unlisted:
            # Runs that weren't listed may still exist.
            runs = self._runs | runs
        else:
            for prefix in self._runs.keys() - runs.keys():
                self._remove(prefix)
        known = self._known()
        if not self.unlisted and self._remove_unlisted(known, runs):
            known = self._known()
        self._runs = runs
        documents = [
            (run.prefix, path, one)
            for run in runs.values()
            if not run.live
            for path, one in run.plain.items()
            if _is_document(path)
        ]
        changed = [one for one in documents if self._has_changed(known, *one)]
        writers = {id(writer) for run in runs.values() for writer in run.writers}
        with ThreadPoolExecutor(_WORKERS, "bucket") as pool:
            list(pool.map(lambda one: self._copy(one[0], one[1]), changed))
            # A run that was restarted drops the copy of its writers.
            for is_writer in (False, True):
                found = [run for run in runs.values() if (id(run) in writers) is is_writer]
                list(pool.map(self._fetch, (one for run in found for one in run.live.values())))
        for run in runs.values():
            if not run.live:
                # Files that changed are downloaded again.
                kept = {path for path in run.plain if os.path.lexists(self.folder / run.prefix / path)}
                for path in kept:
                    if not _is_document(path) and self._has_changed(known, run.prefix, path, run.plain[path]):
                        self._copy(run.prefix, path)
                self._set_heartbeat(run)
        self._save()

    def _found(self) -> dict[str, _Copied]:
        """Returns the runs that are listed, with their objects."""
        plain: list[RemoteObject] = []
        live: dict[str, list[RemoteObject]] = {}
        count, cut_at, unlisted = 0, "", ""
        for one in self._store.list():
            folders = one.name.split("/")
            # No name leads out of the copy; links are found when a file is written.
            if not all(folders) or any(name[0] == "." or "\0" in name for name in folders):
                continue
            if not _NOT_COPIED.isdisjoint(folders[:-1]):
                continue
            count += 1
            if count > _MAX_OBJECTS:
                cut_at = one.name
                unlisted = (
                    f"{self.uri} has more than {_MAX_OBJECTS:,} objects: none is read from {cut_at!r} on"
                )
                break
            place = live_place(one.name)
            if place is None:
                plain.append(one)
            else:
                live.setdefault(place, []).append(one)
        self.unreadable, self.unlisted = {}, unlisted
        named = (one.name.rpartition("/") for one in plain)
        places = [*live, *(f"{folder}{slash}" for folder, slash, name in named if name in _MARKS)]
        runs = {place: _Copied(place) for place in places}
        # If the limit cuts a run, its rows may be among the unlisted objects.
        self.unreadable |= {place: unlisted for place in runs if cut_at.startswith(place) and unlisted}
        self._take_plain(runs, plain)
        for place, objects in live.items():
            if place in runs:
                self._take_streams(runs[place], objects)
        for place, run in list(runs.items()):
            folder, _, name = place.rstrip("/").rpartition("/")
            above, _, kind = folder.rpartition("/")
            if kind == WRITERS_FOLDER and is_writer_name(name):
                # The trainer may not have begun yet.
                prefix = f"{above}/" if above else ""
                runs.setdefault(prefix, _Copied(prefix)).writers.append(run)
        return runs

    def _take_plain(self, runs: dict[str, _Copied], listed: list[RemoteObject]) -> None:
        """Gives each run its plain objects, which are downloaded when needed."""
        total = 0
        for one in sorted(listed, key=lambda one: one.size):
            run = _run_of(one.name, runs)
            if run is None or one.name.rpartition("/")[2] == HEARTBEAT:
                continue
            total += one.size
            if total > _MAX_BYTES:
                self.unreadable[one.name] = f"the copy has {_MAX_BYTES >> 20} MiB at most"
            run.plain[one.name.removeprefix(run.prefix)] = one

    def _take_streams(self, run: _Copied, objects: list[RemoteObject]) -> None:
        before = self._runs.get(run.prefix, run)
        for stream in sorted({one.name.removeprefix(run.prefix).split("/")[1] for one in objects}):
            found = before.live.get(stream)
            if found is None:
                found = _Live(StoredRun(self._store, run.prefix, self.folder / run.prefix, stream))
            found.run.look(objects)
            if found.run.read_session is not None:
                # Without pieces, there are only plain files.
                run.live[stream] = found

    def _fetch(self, live: _Live) -> None:
        """Downloads new pieces of a stream, or the documents of an ended run."""
        session = live.run.read_session
        if session is None:
            return
        here = FolderState.read(live.run.folder, live.run.stream)
        is_here = (here.session, here.last) == (session.number, session.last)
        is_same = here.version == session.versions[session.newest_piece]
        is_known = live.run.newest is not None or (here.has_ended and not here.lost)
        # While a run is being written, each piece names its run.
        if is_here and ((is_same and is_known) or live.is_written):
            self._note_lost(live, here)
        elif self._fetched(live, with_plain=False):
            self._note_piece(live, is_whole=False)

    def _fetched(self, live: _Live, *, with_plain: bool) -> bool:
        """Downloads a stream; if it fails, marks the run unreadable and returns False."""
        try:
            live.run.fetch(with_plain=with_plain, is_partial=True)
        except (PieceError, UploadError, OSError) as error:
            self._mark(live.run.prefix, "", str(error))
            return False
        self._note_lost(live, FolderState.read(live.run.folder, live.run.stream))
        return True

    def _note_lost(self, live: _Live, here: FolderState) -> None:
        self.unreadable |= {live.run.prefix + name: reason for name, reason in here.lost.items()}
        if here.lost and not (live.run.folder / SIDECAR).exists():
            # Nothing could be read.
            self._mark(live.run.prefix, "", "; ".join(here.lost.values()))

    def _note_piece(self, live: _Live, *, is_whole: bool) -> None:
        newest = live.run.newest
        if newest is None:
            return
        now = self._clock()
        # A reader that looks every two seconds asks late.
        is_on_time = not live.late and now - live.due_at < newest.seconds
        if live.earlier is None:
            live.earlier = newest.seconds
        elif live.late:
            live.earlier = now - live.asked_at
        live.earlier = max(_EARLIER_SECONDS, min(live.earlier, newest.seconds) / 2)
        live.late = 0
        live.is_written = not newest.has_ended
        live.is_whole = is_whole or live.is_written
        live.due_at = (live.due_at if is_on_time else now) + newest.seconds - live.earlier
        if live.run.stream == stream_of(0):
            path = live.run.folder / HEARTBEAT
            at = min(newest.written_at, time.time())
            with contextlib.suppress(OSError):
                path.touch()
                os.utime(path, (at, at))

    def _is_due(self, live: _Live, now: float) -> bool:
        return live.is_written and now >= live.due_at

    def _poll(self, live: _Live) -> None:
        """Requests the next piece, and further ones if several were missed."""
        try:
            while live.run.poll() is not None:
                self._note_piece(live, is_whole=True)
                if not live.is_written:
                    return
        except (PieceError, UploadError, OSError):
            # Start over with the next listing.
            live.run.newest = None
            self._list_at = min(self._list_at, self._clock() + _LATE_SECONDS)
            return
        if live.due_at > self._clock():
            # At least one piece arrived.
            return
        live.late += 1
        live.asked_at = self._clock()
        live.is_written = live.late < _MOST_LATE
        live.due_at = self._clock() + _LATE_SECONDS * live.late

    def _bring_rows(self, run: _Copied) -> None:
        for live in run.live.values():
            if not live.is_whole:
                if not self._fetched(live, with_plain=True):
                    return
                live.is_whole = True
            self._bring_branches(live.run)
        folders = {*record_folders()} - {ARTIFACTS_FOLDER}
        wanted = [
            path
            for path in run.plain
            if (path.partition("/")[0] not in folders or path in indexes())
            and not (self.folder / run.prefix / path).exists()
        ]
        with ThreadPoolExecutor(_WORKERS, "bucket") as pool:
            list(pool.map(lambda path: self._copy(run.prefix, path), wanted))
        if not run.live:
            folder = self.folder / run.prefix
            # Last, so that a part in Parquet exists before its CSV is removed.
            for path in folder.glob(f"{PARTS_FOLDER}/*/*"):
                if path.relative_to(folder).as_posix() not in run.plain:
                    path.unlink(missing_ok=True)
        run.is_whole = True

    def _bring_branches(self, run: StoredRun) -> None:
        """Downloads what sessions logged after another machine had continued the run."""
        for branch in run.branches():
            session = branch.sessions[max(branch.sessions)]
            here = FolderState.read(branch.folder, run.stream)
            if (here.session, here.last) == (session.number, session.last):
                continue
            try:
                branch.fetch(is_partial=True)
            except (PieceError, UploadError, OSError) as error:
                self._mark(run.prefix, f"{session_folder(run.stream, session.number)}/{SIDECAR}", str(error))

    # The copy.

    def _run_at(self, folder: Path) -> _Copied | None:
        """Returns the run that a folder belongs to."""
        with contextlib.suppress(ValueError):
            return _run_of(f"{folder.relative_to(self.folder).as_posix()}/x".removeprefix("./"), self._runs)
        return None

    def _copy(self, prefix: str, path: str) -> None:
        name = prefix + path
        try:
            target = path_inside(self.folder, name)
            if name not in self.unreadable:
                download_file(name, target, store=self._store, overwrite=True, progress_bar=False)
                return
            reason = self.unreadable[name]
        except (UploadError, OSError, ValueError) as error:
            run = self._runs.get(prefix)
            if isinstance(error, FileNotFoundError) and (run is None or path not in run.plain):
                return  # The file was never listed.
            reason = str(error)
        self._mark(prefix, path, reason)

    def _mark(self, prefix: str, path: str, reason: str) -> None:
        """Records why a file, or a run for an empty path, can't be read, and writes that in its place."""
        self.unreadable[prefix + path] = reason = one_line(redact_text(reason))
        target = self.folder / prefix / (path or SIDECAR)
        # A known sidecar is kept.
        if path or not target.exists():
            with contextlib.suppress(OSError):
                mark_unreadable(target, reason)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Locks the copy against other processes of this user."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(self.folder / _LOCK, "wb") as file:  # noqa: PTH123  # for its descriptor
            lock(file.fileno())
            try:
                yield
            finally:
                unlock(file.fileno())

    def _known(self) -> dict[str, tuple[int, str | None]]:
        """Returns size and version of the files copied before; no version for unreadable ones."""
        known = {}
        for name, state in read_json(self.folder / _STATE).items():
            with contextlib.suppress(TypeError, ValueError):
                size, version = state
                path = path_inside(self.folder, name)
                if os.path.lexists(path):
                    known[name] = size, None if path.is_symlink() else version
        return known

    def _has_changed(
        self, known: dict[str, tuple[int, str | None]], prefix: str, path: str, one: RemoteObject
    ) -> bool:
        return one.version is None or known.get(prefix + path) != (one.size, one.version)

    def _save(self) -> None:
        folder = f"{self.folder}/"
        copied = {
            run.prefix + path: [one.size, one.version]
            for run in self._runs.values()
            for path, one in run.plain.items()
            if os.path.lexists(folder + run.prefix + path)
        }
        copied |= {run.prefix + PIECES_STATE: [0, None] for run in self._runs.values() if run.live}
        replace_file(self.folder / _STATE, json.dumps(copied).encode())

    def _remove_unlisted(self, known: Iterable[str], runs: dict[str, _Copied]) -> bool:
        """Removes copied files that are gone from the store; returns whether it removed whole runs."""
        listed = {run.prefix + path for run in runs.values() for path in run.plain}
        has_removed_run = False
        for name in set(known) - listed:
            run = _run_of(name, runs)
            if run is not None and run.live:
                continue
            if name.rpartition("/")[2] == PIECES_STATE:
                # Its pieces are gone, so it isn't known which files they brought.
                self._remove(name.removesuffix(PIECES_STATE))
                has_removed_run = True
            with contextlib.suppress(OSError, ValueError):
                path = path_inside(self.folder, name)
                path.unlink(missing_ok=True)
                if not any((path.parent / mark).exists() for mark in _MARKS):
                    (path.parent / HEARTBEAT).unlink(missing_ok=True)
                for parent in path.parents:
                    if parent == self.folder or any(parent.iterdir()):
                        break
                    parent.rmdir()
        return has_removed_run

    def _remove(self, prefix: str) -> None:
        """Removes the copy of a run; other runs below it are downloaded again."""
        with contextlib.suppress(OSError, ValueError):
            folder = path_inside(self.folder, prefix.rstrip("/")) if prefix else self.folder
            for path in folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif prefix or path.name not in {_LOCK, _STATE}:
                    path.unlink()
            if prefix:
                folder.rmdir()

    def _set_heartbeat(self, run: _Copied) -> None:
        """Sets the heartbeat of a run from its sidecar, since the file has the time of the download."""
        folder = self.folder / run.prefix
        at = _time_of(read_json(folder / SIDECAR).get("updated_at"))
        with contextlib.suppress(OSError):
            (folder / HEARTBEAT).touch()
            os.utime(folder / HEARTBEAT, (at, at))


def _run_of(name: str, runs: dict[str, _Copied]) -> _Copied | None:
    """Returns the innermost run that an object belongs to."""
    parts = name.split("/")[:-1]
    for count in range(len(parts), -1, -1):
        prefix = "".join(f"{part}/" for part in parts[:count])
        if prefix in runs:
            return runs[prefix]
    return None


def _is_document(path: str) -> bool:
    """Returns whether a file has fields that tables of runs show."""
    return "/" not in path and path.endswith(_DOCUMENT_SUFFIXES) and path not in indexes()


def _time_of(value: Any) -> float:
    found = number_of(value)
    return found if found is not None and 0 <= found < 1e11 else 0.0  # noqa: PLR2004  # a file system's years
