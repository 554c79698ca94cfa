"""The scanner: finds the runs below a root that changed since the last scan.

A scan is an iteration in the caller's thread. It never writes. Because runs may be written, moved and deleted
meanwhile, it yields problems instead of raising them.

An unchanged folder or finished run costs one `stat`. A live run costs a second one for its heartbeat, and a
run with named writers a listing and two for each writer. Replacing a file by renaming changes the folder's
modification time; only a full scan finds a file that was rewritten in place. A modification time within the
resolution of file systems (2 s) isn't trusted.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from destinations.history.sessions import SESSIONS
from destinations.kinds import record_folders
from destinations.run_directory.layout import (
    ABANDONED_FOLDER,
    ARTIFACTS_FOLDER,
    EDITS,
    ENVIRONMENT,
    HEARTBEAT,
    JOURNAL_FOLDER,
    MEDIA_FOLDER,
    PARTS_FOLDER,
    SIDECAR,
    SUMMARY,
    TERMINAL_STATUSES,
    WRITERS_FOLDER,
    problem_of_format,
    trusted_heartbeat,
)
from destinations.runs.files import clean_text, read_object
from destinations.runs.record import UNREADABLE, is_alive, is_terminal, read_sidecar
from destinations.runs.streams import MAX_WRITERS, writer_names
from uploads.disk import ABSENT, read_with_status, require_readable

from .edits import apply_edits
from .foreign import METRICS, read_lightning

__all__ = [
    "DAMAGED",
    "MAX_PROBLEMS",
    "RUNNING",
    "FileSystem",
    "IndexState",
    "KnownRun",
    "ScanChange",
    "ScanReport",
    "Scanner",
]

MAX_PROBLEMS = 100


@attrs.frozen
class ScanReport:
    """The result of a scan.

    ```python
    with open_runs("runs") as runs:
        report = runs.scan()
    print(report.runs, report.damaged)  # 1 0
    ```

    Args:
        runs: number of runs.
        added: new runs.
        changed: known runs that have changed, or were read again by a full scan.
        unchanged: known runs with the same files.
        moved: new runs whose id was at another path, which is gone.
        gone: known runs whose folder is gone, including moved ones.
        alive: runs that are being written.
        damaged: runs that could not be read completely; each has a `problem`.
        orphans: damaged runs without a sidecar.
        duplicates: the paths of each run id that occurs more than once.
        problems: path and description of the first hundred problems.
        warnings: about the index and the roots.
        unlisted: folders and stores that couldn't be listed completely, and the reasons. They may have more
            runs, so `compact(remove_gone=True)` fails.
        is_full: whether everything was read again.
        seconds: duration.
    """

    runs: int = 0
    added: int = 0
    changed: int = 0
    unchanged: int = 0
    moved: int = 0
    gone: int = 0
    alive: int = 0
    damaged: int = 0
    orphans: int = 0
    duplicates: Mapping[str, tuple[Path, ...]] = attrs.field(factory=dict)
    problems: tuple[tuple[Path, str], ...] = ()
    warnings: tuple[str, ...] = ()
    unlisted: tuple[tuple[Path, str], ...] = ()
    is_full: bool = False
    seconds: float = 0.0

    @classmethod
    def total(cls, reports: "Sequence[ScanReport]") -> "ScanReport":
        """Returns the sums of the reports of several roots."""
        empty = cls()
        names = set(attrs.fields_dict(cls)) - {"duplicates", "is_full"}
        total = {name: sum((getattr(one, name) for one in reports), getattr(empty, name)) for name in names}
        return cls(**total | {"problems": total["problems"][:MAX_PROBLEMS]})


# Id, modification time (ns) and inode of the folder, flags (`RUNNING`, `DAMAGED`, `SHARED`), state of the
# files, last heartbeat. A tuple, because there may be a hundred thousand.
KnownRun = tuple[int, int, int, int, str, float | None]
RUNNING, DAMAGED, SHARED = 1, 2, 4


@attrs.frozen
class IndexState:
    """The state of a root in the index, which a scan compares folders with.

    Args:
        runs: by path, see `KnownRun`.
        folders: modification time (ns) and inode of folders that are not runs, by path.
        children: paths of runs and folders, by the path of their parent.
    """

    runs: dict[str, KnownRun] = attrs.field(factory=dict)
    folders: dict[str, tuple[int, int]] = attrs.field(factory=dict)
    children: dict[str, list[str]] = attrs.field(factory=dict)


@attrs.define
class ScanChange:
    """A run that is new or changed.

    Args:
        path: below the root; "" is the root itself.
        fields: arguments of `RunRecord` read from its files, without the path; None if the sidecar of a known
            run can't be read.
        problem: what couldn't be read.
        heartbeat_at: the last heartbeat.
        folder_mtime_ns: the folder's modification time; 0 if it can't be trusted.
        folder_inode: the folder's inode.
        files: a fingerprint of its files.
        flags: why the next scan must look at the files of an unchanged folder: `RUNNING`, `DAMAGED`,
            `SHARED` (named writers add to the run), several of them, or 0.
        is_orphan: whether the sidecar is missing.
        is_unchanged: whether a known run was read again, but its files are the same.
    """

    path: str
    fields: Mapping[str, Any] | None
    problem: str | None
    heartbeat_at: float | None
    folder_mtime_ns: int
    folder_inode: int
    files: str
    flags: int
    is_orphan: bool = False
    is_unchanged: bool = False


# Folders without runs, possibly with very many files.
_NEVER = frozenset({MEDIA_FOLDER, "checkpoints", ARTIFACTS_FOLDER, JOURNAL_FOLDER})
_NEVER_IN_RUN = _NEVER | {*record_folders(), ABANDONED_FOLDER, WRITERS_FOLDER}
# A folder with one of these is a run directory.
_MARKS = frozenset({SESSIONS, ENVIRONMENT, HEARTBEAT})
# The resolution of FAT, the coarsest file system.
_COARSE_NS = 2_000_000_000
_NO_SUBFOLDERS = 2
# In a fingerprint: unknown, so the run is read again.
_UNKNOWN = "?"
# At its end: the rows were read after the heartbeat became stale, so they are final.
_SETTLED = " settled"
_MOST_DAMAGES = 3
# The writer sets these statuses together with the summary of all rows.
_SUMMARIZED = TERMINAL_STATUSES - {"failed to write"}


class FileSystem:
    """The file system as a scan uses it; tests replace it."""

    stat = staticmethod(os.stat)
    read = staticmethod(read_with_status)
    is_link = staticmethod(os.path.islink)

    def exists(self, path: str) -> bool:
        """Returns whether a file exists."""
        return os.access(path, os.F_OK)

    def list(self, path: str) -> list[tuple[str, bool]]:
        """Returns the names in a folder, each with whether it is a folder (not a link to one)."""
        with os.scandir(path) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]


class Scanner:
    """One scan of one root.

    Args:
        root: the folder, absolute.
        known: the state before; not modified.
        full: whether to read every run again.
        disk: the file system.
        clock_ns: returns the time in nanoseconds.
        now: the time that heartbeats are compared with. Default: the time of `clock_ns`.
        has_rows: for the copy of a store: returns whether a run's rows were downloaded. Default: the root is
            no copy.
    """

    def __init__(
        self,
        root: str,
        known: IndexState,
        *,
        full: bool = False,
        disk: FileSystem | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
        now: float | None = None,
        has_rows: Callable[[str], bool] | None = None,
    ) -> None:
        self._root = root
        self._has_rows = has_rows
        self._may_have_lost = has_rows is not None
        self._prefix = "/" if root == "/" else f"{root}/"
        self._known = known
        self._full = full
        self._disk = disk or FileSystem()
        self._clock_ns = clock_ns
        self._now = clock_ns() / 1e9 if now is None else now
        self._pending: list[str] = []
        self._seen_runs: set[str] = set()
        self._seen_folders: set[str] = set()
        # Folders whose state in the index must be updated.
        self.folders: dict[str, tuple[int, int]] = {}
        self.problems: list[tuple[Path, str]] = []
        self.unchanged = 0

    def found(self) -> Iterator[ScanChange]:
        """Yields the runs that are new or changed; must be iterated to its end."""
        known, stat, waiting = self._known.runs, self._disk.stat, self._pending
        children, prefix, seen = self._known.children, self._prefix, self._seen_runs
        is_full = self._full
        try:
            stat(self._root)
        except OSError as error:
            # The file system may be mounted again later, so its runs are kept.
            self.problems.append((Path(self._root), f"root cannot be read: {error.strerror}"))
            self._keep_below("")
            return
        waiting.append("")
        while waiting:
            path = waiting.pop()
            run = known.get(path)
            if run is None:
                found = self._check_folder(path)
            else:
                try:
                    state = stat(prefix + path)
                except OSError as error:
                    self._unreadable(path, error)
                    continue
                if state.st_mtime_ns == run[1] and state.st_ino == run[2] and not run[3] and not is_full:
                    seen.add(path)
                    self.unchanged += 1
                    if path in children:
                        waiting.extend(children[path])
                    continue
                found = self._check_run(path, run, state)
            if found is not None:
                yield found

    def gone_runs(self) -> list[str]:
        """Returns the paths of known runs that no longer exist; call it after the iteration."""
        if len(self._seen_runs) == len(self._known.runs):
            return []
        return [path for path in self._known.runs if path not in self._seen_runs]

    def gone_folders(self) -> list[str]:
        """Returns the paths of known folders that no longer exist, or became runs."""
        return [path for path in self._known.folders if path not in self._seen_folders]

    def read_run(self, path: str) -> ScanChange | None:
        """Reads one run, changed or not; returns None if there is none.

        Raises:
            OSError: its folder cannot be read.
        """
        # Its folder may be in the copy of a store.
        self._may_have_lost = True
        try:
            state = self._disk.stat(self._prefix + path)
        except ABSENT:
            return None
        return self._read(path, state) or self._classify(path, state)

    def own_tags(self, path: str) -> tuple[str, ...]:
        """Returns the run's own tags; none if its sidecar is damaged.

        Raises:
            OSError: it cannot be read.
        """
        base = self._base(path)
        try:
            raw, _ = self._disk.read(base + SIDECAR)
            fields: Mapping[str, Any] = read_sidecar(read_object(raw), dict)
        except ABSENT:
            if self._writers(base) is None:
                raise
            fields = self._fields_of_writers(base) or {}
        except ValueError:
            return ()
        return tuple(fields.get("tags", ()))

    # Folders.

    def _check_folder(self, path: str) -> ScanChange | None:
        """Classifies a folder; if it is not a run, adds its children to the pending paths."""
        try:
            state = self._disk.stat(self._prefix + path)
        except OSError as error:
            self._unreadable(path, error)
            return None
        was = self._known.folders.get(path)
        if was is not None and was == (state.st_mtime_ns, state.st_ino) and not self._full:
            self._seen_folders.add(path)
            self._pending.extend(self._known.children.get(path, ()))
            return None
        # Most folders are runs: opening the file is cheaper than listing the folder.
        found = None
        if was is None and path:
            found = self._read(path, state)
        return found or self._classify(path, state)

    def _classify(self, path: str, state: os.stat_result) -> ScanChange | None:
        """Classifies a folder without a sidecar by its content."""
        try:
            entries = self._disk.list(self._prefix + path)
        except OSError as error:
            self._unreadable(path, error)
            return None
        names = {name for name, _ in entries}
        if SIDECAR in names and (found := self._read(path, state)) is not None:
            return found
        found, has_writers = None, (WRITERS_FOLDER, True) in entries
        if not names.isdisjoint(_MARKS) or {METRICS, JOURNAL_FOLDER} <= names:
            found = self._orphan(path, state)
            found = self._with_writers(found) if has_writers else found
        elif METRICS in names:
            found = self._lightning(path, state, has_writers=has_writers)
        elif has_writers:
            found = self._of_writers(path, state)
        self._add_below(path, entries, _NEVER if found is None else _NEVER_IN_RUN)
        if found is None:
            self._seen_folders.add(path)
            # A writer may begin in the folder of writers without a change of this folder.
            trusted = 0 if has_writers else self._trusted_ns(state)
            if self._known.folders.get(path) != (trusted, state.st_ino):
                self.folders[path] = (trusted, state.st_ino)
        return found

    def _add_nested(self, path: str, state: os.stat_result) -> bool:
        """Adds runs inside a run to the pending paths; returns whether it has a folder of writers."""
        # Most file systems count subfolders in the number of links; others report one.
        if state.st_nlink == _NO_SUBFOLDERS:
            return False
        try:
            entries = self._disk.list(self._prefix + path)
        except OSError as error:
            self._unreadable(path, error, is_kept=False)
            return False
        self._add_below(path, entries, _NEVER_IN_RUN)
        return (WRITERS_FOLDER, True) in entries

    def _add_below(self, path: str, entries: list[tuple[str, bool]], never: frozenset[str]) -> None:
        base = f"{path}/" if path else ""
        self._pending.extend(
            base + name for name, is_folder in entries if is_folder and name not in never and name[0] != "."
        )

    def _unreadable(self, path: str, error: OSError, *, is_kept: bool = True) -> None:
        """Records that a folder can't be read; a deleted folder isn't a problem."""
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return
        self.problems.append((Path(self._prefix + path), f"folder cannot be read: {error.strerror}"))
        if is_kept:
            self._keep_below(path)
            if path not in self._known.runs and path not in self._known.folders:
                # The parent may never change again: the index must know this path.
                self.folders[path] = (0, 0)

    def _keep_below(self, path: str) -> None:
        """Marks everything known below a folder as seen, because it may still exist."""
        waiting = [path]
        while waiting:
            one = waiting.pop()
            if one in self._known.runs:
                self._seen_runs.add(one)
            if one in self._known.folders:
                self._seen_folders.add(one)
            waiting.extend(self._known.children.get(one, ()))

    # Runs.

    def _base(self, path: str) -> str:
        """Returns the path of a folder, with a slash at its end."""
        folder = self._prefix + path
        return folder if folder.endswith("/") else f"{folder}/"

    def _check_run(self, path: str, run: KnownRun, state: os.stat_result) -> ScanChange | None:
        """Reads a known run again if it has changed."""
        if not self._full and (state.st_mtime_ns, state.st_ino) == run[1:3]:
            files, heartbeat_at = self._files(path, run)
            if (files, heartbeat_at) == run[4:] and _UNKNOWN not in files:
                self._seen_runs.add(path)
                self.unchanged += 1
                self._pending.extend(self._known.children.get(path, ()))
                return None
        found = self._read(path, state) or self._classify(path, state)
        if found is not None:
            self._seen_runs.add(path)
            same = (found.flags, found.files, found.heartbeat_at) == run[3:] and _UNKNOWN not in found.files
            found.is_unchanged = found.fields is None or (same and not self._full)
        return found

    def _read(self, path: str, state: os.stat_result) -> ScanChange | None:
        """Reads a folder with a sidecar, and adds runs inside it to the pending paths.

        Args:
            path: its path below the root.
            state: its `stat`.

        Returns:
            The change; None if the folder has no sidecar.
        """
        base = self._base(path)
        try:
            raw, file_state = self._disk.read(base + SIDECAR)
        except ABSENT:
            return None
        except OSError as error:
            unreadable = f"{SIDECAR} cannot be read: {error.strerror}"
            found = self._damaged(path, state, _UNKNOWN, unreadable)
            return self._with_writers(found) if self._add_nested(path, state) else found
        is_shared, files = self._add_nested(path, state), self._fingerprint(file_state)
        try:
            sidecar = read_object(raw)
            fields = read_sidecar(sidecar, lambda: self._summary(base))
        except ValueError as error:
            damage = f"{SIDECAR} is damaged: {error}"
            found = self._damaged(path, state, f"{files} {self._edits(base)}", damage)
            return self._with_writers(found) if is_shared else found
        fields, edits, problem = self._with_edits(base, fields)
        files = f"{files} {edits}"
        status = fields.get("status", "")
        if is_terminal(status):
            heartbeat_at, flags = fields.get("ended_at") or fields.get("updated_at"), 0
        else:
            heartbeat_at, flags = self._heartbeat(base), RUNNING
            files += self._settled(heartbeat_at)
        if status == UNREADABLE:
            # Read again at the next scan, maybe by a release that knows the format.
            files, is_shared = f"{files}{_UNKNOWN}", False
            problem = problem_of_format(base, sidecar) or problem
        elif not is_shared and fields["kind"] == "run-directory" and status not in _SUMMARIZED:
            try:
                # A folder that lost its rows has only the sidecar's summary.
                fields["summary"] = _last_values(base) or fields.get("summary", {})
            except (OSError, ValueError) as error:
                problem = problem or f"{METRICS} cannot be read: {error}"
        problem = problem or self._damage_of_rows(base, sidecar)
        if problem is not None:
            flags |= DAMAGED
        trusted = self._trusted_ns(state)
        found = ScanChange(path, fields, problem, heartbeat_at, trusted, state.st_ino, files, flags)
        return self._with_writers(found) if is_shared else found

    def _damage_of_rows(self, base: str, sidecar: Mapping[str, Any]) -> str | None:
        """Returns which rows are missing according to a sidecar; None if none are. Reads no rows."""
        if self._may_have_lost and (lost := _lost_pieces(base)):
            return "; ".join(lost[:_MOST_DAMAGES])
        receipt = sidecar.get("overhead")
        if not isinstance(receipt, dict) or (self._has_rows is not None and not self._has_rows(base)):
            return None
        if _count(receipt.get("csv_bytes")) and not self._disk.exists(base + METRICS):
            try:
                require_readable(base + METRICS)
            except OSError as error:
                return f"{METRICS} cannot be read: {error.strerror}"
            return f"{METRICS} is missing: its rows are lost"
        parts = _count(receipt.get("csv_parts"))
        return _damage_of_rows(base, parts) if parts else None

    # Writers.

    def _writers(self, base: str) -> list[str] | None:
        """Returns the names of the writers of a run; None if they can't be listed."""
        folder = base + WRITERS_FOLDER
        try:
            return [] if self._disk.is_link(folder) else writer_names(self._disk.list(folder))
        except ABSENT:
            return []
        except OSError:
            return None

    def _writers_state(self, base: str) -> str:
        """Returns a text that changes when a writer of the run writes."""
        names = self._writers(base)
        if names is None:
            return f" writers {_UNKNOWN}"
        states = (self._writer_state(base, name) for name in names[:MAX_WRITERS])
        return " ".join([f" writers {len(names)}", *states])

    def _writer_state(self, base: str, name: str) -> str:
        folder = f"{base}{WRITERS_FOLDER}/{name}"
        try:
            state = self._fingerprint(self._disk.stat(folder))
        except OSError:
            return f"{name}:{_UNKNOWN}"
        try:
            heartbeat = self._disk.stat(f"{folder}/{HEARTBEAT}").st_mtime_ns
        except OSError:
            return f"{name}:{state}"
        # Rows of a live writer, or one that just ended, may be newer than its heartbeat.
        is_fresh = is_alive("running", heartbeat / 1e9, self._now)
        return f"{name}:{state}:{heartbeat}{_UNKNOWN if is_fresh else ''}"

    def _with_writers(self, found: ScanChange) -> ScanChange:
        """Adds what named writers wrote to the change of a run."""
        base = self._base(found.path)
        state = self._writers_state(base)
        settled = _SETTLED if found.files.endswith(_SETTLED) else ""
        found.files = found.files.removesuffix(_SETTLED) + state + settled
        found.flags |= SHARED
        count = state.split()[1]
        problems = self._damage_of_writers(base)
        if count == _UNKNOWN:
            problems.append(f"{WRITERS_FOLDER} cannot be listed")
        elif int(count) > MAX_WRITERS:
            problems.append(f"it has {count} writers, of which the first {MAX_WRITERS} are read")
        if found.fields is not None and not found.is_orphan:
            fields = dict(found.fields)
            try:
                fields["summary"] = _last_values(base, problems) or fields.get("summary", {})
            except (OSError, ValueError) as error:
                problems.insert(0, f"{METRICS} cannot be read: {error}")
            found.fields = fields
        if problems:
            found.problem = found.problem or problems[0]
            found.flags |= DAMAGED
        return found

    def _damage_of_writers(self, base: str) -> list[str]:
        """Returns which rows of writers are missing; unreadable files are reported when they are read."""
        found = []
        for name in (self._writers(base) or ())[:MAX_WRITERS]:
            folder = f"{base}{WRITERS_FOLDER}/{name}/"
            with contextlib.suppress(OSError, ValueError):
                sidecar = read_object(self._disk.read(folder + SIDECAR)[0])
                problem = self._damage_of_rows(folder, sidecar)
                found += [] if problem is None else [f"writer {name}: {problem}"]
        return found

    def _of_writers(self, path: str, state: os.stat_result) -> ScanChange | None:
        """Returns the change of a run whose trainer hasn't written yet; None if it isn't a run."""
        base = self._base(path)
        fields = self._fields_of_writers(base)
        if fields is None:
            return None
        heartbeat_at = fields.pop("heartbeat_at")
        fields, edits, problem = self._with_edits(base, fields)
        flags, trusted = 0 if problem is None else DAMAGED, self._trusted_ns(state)
        return self._with_writers(
            ScanChange(path, fields, problem, heartbeat_at, trusted, state.st_ino, f"- {edits}", flags)
        )

    def _fields_of_writers(self, base: str) -> dict[str, Any] | None:
        """Returns the fields of a run from its writers, with the last heartbeat; None without writers.

        Any folder may be called `writers`. A writer's sidecar names the writer.
        """
        names = self._writers(base)
        if names is None:
            self.problems.append((Path(base + WRITERS_FOLDER), "folder cannot be listed"))
        every = [one for name in (names or ())[:MAX_WRITERS] if (one := self._writer_fields(base, name))]
        if not every:
            return None
        first = min(every, key=lambda fields: fields.get("created_at") or math.inf)
        newest = max(every, key=lambda fields: fields.get("updated_at") or 0.0)
        has_ended = all(is_terminal(fields.get("status", "")) for fields in every)
        heartbeats = [fields["heartbeat_at"] for fields in every if fields["heartbeat_at"] is not None]
        hparams = [fields.get("hparams", {}) for fields in reversed(every)]
        return {
            "run_id": first["run_id"],
            "kind": "run-directory",
            "status": newest["status"] if has_ended else "running",
            "created_at": first.get("created_at"),
            "updated_at": newest.get("updated_at"),
            "ended_at": newest.get("ended_at") if has_ended else None,
            "tags": tuple(dict.fromkeys(tag for fields in every for tag in fields.get("tags", ()))),
            "hparams": {name: value for one in hparams for name, value in one.items()},
            "heartbeat_at": max(heartbeats, default=None),
        }

    def _writer_fields(self, base: str, name: str) -> dict[str, Any] | None:
        """Returns the fields of a writer's sidecar, with its heartbeat; None if it isn't a writer."""
        folder = f"{base}{WRITERS_FOLDER}/{name}/"
        try:
            raw, _ = self._disk.read(folder + SIDECAR)
            sidecar = read_object(raw)
            if sidecar.get("writer") != name:
                return None
            fields = read_sidecar(sidecar, dict)
        except ABSENT:
            return None
        except (OSError, ValueError) as error:
            self.problems.append((Path(folder), f"{SIDECAR} cannot be read: {error}"))
            return None
        return {**fields, "heartbeat_at": self._heartbeat(folder)}

    def _with_edits(self, base: str, fields: dict[str, Any]) -> tuple[dict[str, Any], str, str | None]:
        """Returns the fields with the user's edits applied, the state of the edits' file, and its problem."""
        # Most runs have none, and an exception costs as much as everything else here.
        if not self._disk.exists(base + EDITS):
            return fields, "-", None
        try:
            raw, state = self._disk.read(base + EDITS)
        except FileNotFoundError:
            return fields, "-", None
        except OSError as error:
            return fields, _UNKNOWN, f"{EDITS} cannot be read: {error.strerror}"
        try:
            return apply_edits(fields, raw), self._fingerprint(state), None
        except ValueError as error:
            return fields, self._fingerprint(state), f"{EDITS} is damaged: {error}"

    def _damaged(
        self, path: str, state: os.stat_result, files: str, problem: str, **more: bool
    ) -> ScanChange:
        """Returns the change of a run with a damaged sidecar; the record of a known run is kept."""
        known = None if self._full else self._known.runs.get(path)
        fields, running, heartbeat_at = None, RUNNING, None
        if known is None:
            name = path.rpartition("/")[2] or Path(self._root).name
            fields = {"run_id": clean_text(name), "kind": "run-directory"}
        else:
            running, heartbeat_at = known[3] & RUNNING, known[5]
        if running:
            heartbeat_at = self._heartbeat(self._base(path))
            files += self._settled(heartbeat_at)
        trusted, flags = self._trusted_ns(state), running | DAMAGED
        return ScanChange(path, fields, problem, heartbeat_at, trusted, state.st_ino, files, flags, **more)

    def _orphan(self, path: str, state: os.stat_result) -> ScanChange:
        """Returns the change of a run folder whose sidecar was lost or isn't written yet."""
        return self._damaged(path, state, _UNKNOWN, f"{SIDECAR} is missing", is_orphan=True)

    def _lightning(self, path: str, state: os.stat_result, *, has_writers: bool) -> ScanChange | None:
        folder = Path(self._prefix + path)
        try:
            files = f"csv {self._fingerprint(self._disk.stat(str(folder / METRICS)))}"
            fields = read_lightning(folder, path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            problem = f"{METRICS} cannot be read: {error.strerror}"
            return self._damaged(path, state, f"csv {_UNKNOWN}", problem)
        base, problem = self._base(path), fields["problem"]
        heartbeat_at = trusted_heartbeat(base, fields["updated_at"], self._now)
        flags, trusted = RUNNING if problem is None else RUNNING | DAMAGED, self._trusted_ns(state)
        found = ScanChange(path, fields, problem, heartbeat_at, trusted, state.st_ino, files, flags)
        return self._with_writers(found) if has_writers else found

    def _files(self, path: str, run: KnownRun) -> tuple[str, float | None]:
        """Returns the fingerprint of the files of a run that hasn't ended, and its heartbeat."""
        base, stat, heartbeat_at, settled = self._base(path), self._disk.stat, run[5], ""
        try:
            if run[3] == RUNNING and not run[4].startswith("csv "):
                # A file that was replaced would have changed the folder.
                files = run[4].removesuffix(_SETTLED)
            else:
                files = f"{self._fingerprint(stat(base + SIDECAR))} {self._edits(base)}"
        except OSError:
            try:
                files = f"csv {self._fingerprint(stat(base + METRICS))}"
            except OSError:
                files = f"- {self._edits(base)}"
        else:
            if run[3] & RUNNING:
                heartbeat_at = self._heartbeat(base)
                settled = self._settled(heartbeat_at)
        return files + (self._writers_state(base) if run[3] & SHARED else "") + settled, heartbeat_at

    def _edits(self, base: str) -> str:
        try:
            return self._fingerprint(self._disk.stat(base + EDITS))
        except OSError:
            return "-"

    def _summary(self, base: str) -> Mapping[str, Any]:
        """Returns the metrics of `summary.json`; empty if it cannot be read."""
        try:
            metrics = read_object(self._disk.read(base + SUMMARY)[0]).get("metrics")
        except (OSError, ValueError):
            return {}
        return metrics if isinstance(metrics, dict) else {}

    def _heartbeat(self, base: str) -> float | None:
        try:
            at = self._disk.stat(base + HEARTBEAT).st_mtime
        except OSError:
            return None
        return trusted_heartbeat(base, at, self._now)

    def _settled(self, heartbeat_at: float | None) -> str:
        return "" if is_alive("running", heartbeat_at, self._now) else _SETTLED

    def _trusted_ns(self, state: os.stat_result) -> int:
        """Returns the modification time; 0 if it is too recent to be trusted."""
        is_trusted = abs(self._clock_ns() - state.st_mtime_ns) > _COARSE_NS
        return state.st_mtime_ns if is_trusted else 0

    def _fingerprint(self, state: os.stat_result) -> str:
        return f"{self._trusted_ns(state) or _UNKNOWN}-{state.st_size}-{state.st_ino}"


def _count(number: Any) -> int:
    return number if type(number) is int and number > 0 else 0


def _lost_pieces(run_dir: str) -> list[str]:
    from destinations.run_directory.pieces import FolderState

    return [f"{name} is lost: {reason}" for name, reason in FolderState.all_lost(run_dir).items()]


def _damage_of_rows(run_dir: str, parts: int) -> str | None:
    from destinations.history.snapshot import damage_of_rows

    try:
        return "; ".join(damage_of_rows(Path(run_dir), parts)[:_MOST_DAMAGES]) or None
    except (OSError, ValueError) as error:
        return f"{PARTS_FOLDER} cannot be read: {error}"


def _last_values(run_dir: str, problems: list[str] | None = None) -> dict[str, float]:
    # Imported here because it reads rows, which isn't needed to find ended runs.
    from destinations.runs.summary import last_values

    return last_values(Path(run_dir), problems)
