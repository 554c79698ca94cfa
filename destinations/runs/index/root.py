"""One root and its index: writes what a scan finds to the index."""

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from .index import Index
from .scan import MAX_PROBLEMS, FileSystem, IndexState, Scanner, ScanReport

if TYPE_CHECKING:
    from .bucket import BucketCopy

__all__ = ["Root"]

_TRIES = 4


@attrs.define
class Root:
    """A folder of runs, and its index.

    Args:
        folder: absolute, without links.
        index: its index.
        disk: the file system.
        clock_ns: returns the time in nanoseconds, which modification times are compared with.
        copy: where the folder is a copy of a store: brings it up to date before each scan.
    """

    folder: str
    index: Index
    disk: FileSystem = attrs.field(factory=FileSystem)
    clock_ns: Callable[[], int] = time.time_ns
    copy: "BucketCopy | None" = None

    def bring(self, *, at_once: bool) -> None:
        """Downloads new data if the folder is a copy of a store; the next scan reports errors."""
        if self.copy is not None:
            self.copy.refresh(at_once=at_once)

    def scan(self, now: float, *, full: bool) -> ScanReport:
        """Scans; starts over if the index turns out to be unusable."""
        for attempt in range(_TRIES):
            try:
                return self._scan(now, full=full)
            except sqlite3.Error as error:
                if attempt == _TRIES - 1:
                    raise
                self.index.database.rescue(error)
        raise AssertionError

    def _scan(self, now: float, *, full: bool) -> ScanReport:
        started = time.perf_counter()
        self.index.database.reopen_if_deleted()
        known = self.index.state()
        scanner = self._scanner(known, full=full, now=now)
        added = changed = touched = 0
        added_ids: list[str] = []
        for found in scanner.found():
            if found.is_unchanged:
                touched += 1
            elif found.path in known.runs:
                changed += 1
            elif found.fields is not None:
                added += 1
                added_ids.append(found.fields["run_id"])
            self.index.add(found)
        gone = scanner.gone_runs()
        gone_ids = set(self.index.run_ids(gone))
        gone_folders = scanner.gone_folders()
        if self.index.has_changes or gone or gone_folders or scanner.folders:
            self.index.write(folders=scanner.folders, gone_runs=gone, gone_folders=gone_folders)
        self.index.make_indexes()
        runs, alive, damaged, orphans = self.index.counts(now)
        warnings, unlisted = tuple(self.index.database.warnings), tuple(scanner.problems)
        self.index.database.warnings.clear()
        problems = [*unlisted, *self.index.problems(MAX_PROBLEMS)]
        if self.copy is not None:
            there = {path for path, _ in problems}
            unreadable = ((Path(self.folder, name), why) for name, why in self.copy.unreadable.items())
            problems += [(path, why) for path, why in unreadable if there.isdisjoint((path, path.parent))]
            if self.copy.unlisted:
                warnings += (self.copy.unlisted,)
                unlisted += ((Path(self.folder), self.copy.unlisted),)
        return ScanReport(
            runs=runs,
            added=added,
            changed=changed,
            unchanged=scanner.unchanged + touched,
            moved=sum(run_id in gone_ids for run_id in added_ids) if gone_ids else 0,
            gone=len(gone),
            alive=alive,
            damaged=damaged,
            orphans=orphans,
            problems=tuple(problems[:MAX_PROBLEMS]),
            warnings=warnings,
            unlisted=unlisted,
            is_full=full,
            seconds=time.perf_counter() - started,
        )

    def refresh(self, path: str) -> None:
        """Reads one run again and updates the index."""
        found = self._scanner(IndexState()).read_run(path)
        if found is not None:
            self.index.write([found])

    def own_tags(self, path: str) -> tuple[str, ...]:
        """Returns the tags that a run gave itself."""
        return self._scanner(IndexState()).own_tags(path)

    def _scanner(self, known: IndexState, **options: Any) -> Scanner:
        if self.copy is not None:
            options["has_rows"] = self.copy.has_rows
        return Scanner(self.folder, known, disk=self.disk, clock_ns=self.clock_ns, **options)

    def below(self, folder: str) -> str | None:
        """Returns the path of a folder relative to this one; None if it is not inside."""
        if folder == self.folder:
            return ""
        base = self.folder if self.folder == "/" else f"{self.folder}/"
        return folder.removeprefix(base) if folder.startswith(base) else None
