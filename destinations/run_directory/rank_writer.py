"""Writes the files of one rank: journal, CSV, and summary; on rank 0 also the documents of the run.

The training thread opens, closes, and logs to `journal`; `_tick` and its callees run in the writer thread.
"""

import contextlib
import functools
import logging
import math
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

from destinations.background import PeriodicThread
from destinations.history.aggregate import Aggregate
from events import redact_text
from uploads.disk import file_system_of, is_network_file_system

from .blocks import add_rows
from .document_writer import DocumentWriter
from .documents import Documents
from .drain import PART_BYTES, JournalDrain
from .environment import describe_environment
from .folder import HeldFolder, RunInUseError, RunPathError, WriterLock, remove_temporaries, with_user_paths
from .journal import Journal
from .journal_files import MakeSegment, make_journal, remove_journal, sync_journal
from .layout import (
    journal_path,
    metrics_name,
    segment_paths,
)
from .media_writer import FileKeeping
from .metrics_csv import MetricsCsv
from .segments import AppendedSegment, MappedSegment

if TYPE_CHECKING:
    from events import State

    from .mirror import Mirror

__all__ = ["JournalKind", "RankWriter", "RunOptions", "loss_text"]

_WORDS = {"early": "records logged before init", "media": "media and texts", "uploads": "uploads"}
_log = logging.getLogger("destinations")

_APPENDED = "run folder %s %s: rows are written by system calls, some microseconds slower each."

JournalKind = Literal["auto", "mapped", "appended"]

# Timing a sample sends a row through the slow path.
_SAMPLED_ROWS = 64
_FLUSH_SECONDS = 10.0


def loss_text(lost: Mapping[str, int]) -> str:
    """Returns the counts of lost records as text, such as "2 files, 5 rows", or "" if nothing was lost.

    Args:
        lost: counts by "rows", "media", "files", "uploads" and "early"; see `RankWriter.lost`.
    """
    return ", ".join(f"{count:,} {_WORDS.get(kind, kind)}" for kind, count in sorted(lost.items()) if count)


def _percentile(values: list[int], share: float) -> float | None:
    """Returns a percentile of nanoseconds by nearest rank, in microseconds; None without values."""
    if not values:
        return None
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] / 1000


def _statistics_of(csv: MetricsCsv, between: Callable[[], object], *, by_step: bool) -> Aggregate:
    """Returns the statistics of all rows that belong to the run; calls `between` after each part."""
    statistics = Aggregate(by_step=by_step)
    for part in csv.parts.present():
        try:
            with contextlib.closing(part.open()) as file:
                add_rows(file, statistics)
        except OSError as error:
            _log.warning("run folder %s: a part cannot be read: %s", csv.path.parent, error)
        between()
    add_rows(csv.snapshot(), statistics)
    return statistics


@attrs.frozen(kw_only=True)
class RunOptions:
    """How a run is written: the arguments of `RunDirectory`, and options that its subclasses override.

    Attributes:
        run_id: the id of a new run; None for a random one.
        tags: added to the run's tags.
        notes: the notes of the run, if it has none.
        is_trainer: whether it is the trainer's run; the steps of a named writer may come in any order.
        flush_seconds: the interval at which rows are drained to the CSV.
        mirror_seconds: the interval at which new data is uploaded to a store.
        journal: whether the journal is mapped.
        fork_from: the run that a new run continues, and where; see `forking.fork_place`.
        keeping: what to do with the files of a user.
        clock: the time of rows, in seconds since 1970.
        part_bytes: the size at which the CSV is closed as a part.
        make_segment: makes the segments of a mapped journal.
        describe: returns the content of `environment.json`, given the ranks.
    """

    run_id: str | None = None
    tags: tuple[str, ...] = ()
    notes: str = ""
    is_trainer: bool = True
    flush_seconds: float = 1.0
    mirror_seconds: float = 10.0
    journal: JournalKind = "auto"
    fork_from: str | None = None
    keeping: FileKeeping = "copy"
    clock: Callable[[], float] = time.time
    part_bytes: int = PART_BYTES
    make_segment: MakeSegment = MappedSegment
    describe: Callable[[dict[str, Any]], dict[str, Any]] = describe_environment


class WriteFailures:
    """Counts write errors and refused records; reports the first of each kind since the last recovery.

    **Threading.** Any thread may call any method; one lock guards all of the state.

    Args:
        run_dir: the folder of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self.errors: Counter[str] = Counter()
        """How many errors of each class there were."""
        self.last_error = ""
        """The last one, as text."""
        self.is_failing = False
        """Whether there was one since the last recovery."""
        self._reported: set[tuple[str, int | None]] = set()
        self._refusals: set[str] = set()

    def add(self, error: Exception) -> None:
        """Counts an error, and reports it if it is the first of its kind."""
        text = f"{type(error).__name__}: {redact_text(str(with_user_paths(error, self._run_dir)))}"
        kind = (type(error).__name__, getattr(error, "errno", None))
        with self._lock:
            self.errors[type(error).__name__] += 1
            self.last_error = text
            self.is_failing = True
            is_first = kind not in self._reported
            self._reported.add(kind)
        if is_first:
            _log.error(
                "run folder %s is not writable (%s). Training continues; rows are buffered meanwhile.",
                self._run_dir,
                text,
                exc_info=None if isinstance(error, OSError) else error,
            )

    def refuse(self, kind: str, message: str) -> None:
        """Reports the first refusal of each kind."""
        if kind not in self._refusals:
            self._refusals.add(kind)
            _log.warning("run folder %s: %s", self._run_dir, message)

    def recover(self, before: int) -> None:
        """Reports the recovery once everything pending is written.

        Args:
            before: the number of errors at the start of the turn that wrote it. An error of another thread
                since then may concern work that this turn had already done; the next turn decides.
        """
        with self._lock:
            if not self.is_failing or before != self.errors.total():
                return
            self.is_failing = False
            self._reported.clear()
        _log.warning("run folder %s is writable again.", self._run_dir)


@attrs.define(eq=False, slots=False, repr=False, kw_only=True)
class RankWriter:
    """The writer of one rank, from opening to closing.

    Args:
        run_dir: the folder of the run.
        state: the run.
        lock: the lock of the rank, already acquired.
        documents: the sidecar, hyperparameters and sessions; None on ranks other than 0.
        options: how the run is written.
        media_stats: returns the media counts for the sidecar.
        run_folder: the same folder, open.
        mirror: sends new data to a store; None for a run without a store.
    """

    _run_dir: Path
    _state: "State"
    _lock: WriterLock
    _documents: Documents | None
    _options: RunOptions
    _media_stats: Callable[[], dict[str, Any]]
    _run_folder: HeldFolder
    _mirror: "Mirror | None" = None

    def __attrs_post_init__(self) -> None:
        self._root = self._run_folder.path
        self._rank = self._state.rank
        self._lock.follow(self._root)
        self._folder = journal_path(self._root, self._rank)
        make_journal(self._folder)
        remove_temporaries(self._root, self._rank)
        self._failures = WriteFailures(self._run_dir)
        self._papers = DocumentWriter(
            root=self._root,
            state=self._state,
            documents=self._documents,
            describe=self._options.describe,
            on_error=self._failed,
            report=self._report,
            summary=self._summary,
        )
        first_part = 1 if self._mirror is None else self._mirror.first_part
        self._csv = MetricsCsv(self._root / metrics_name(self._rank), first_part=first_part)
        remove_temporaries(self._csv.parts.folder)
        self.had_rows = os.path.lexists(self._csv.path) or bool(segment_paths(self._folder))
        """Whether earlier sessions have left rows."""
        self.journal = self._open_journal()
        self.begin_session()
        self._drain = JournalDrain(
            self._root,
            self._folder,
            self._csv,
            self.journal,
            on_rollback=self._report_rollback,
            on_change=self._note_change,
            between=self._between_chunks,
            part_bytes=self._options.part_bytes,
        )
        self._drain.statistics = Aggregate(by_step=not self._options.is_trainer)
        self._is_open = False
        self._is_well = False
        self._sampled_at = 0
        # Whether the statistics have to be computed from the rows again.
        self._are_statistics_due = False
        self._deadline = math.inf
        # Accepted rows that aren't in the folder; set at the end.
        self._lost_rows = 0
        # Why writing has ended before the run.
        self._disowned = ""
        self.timer = PeriodicThread(
            self._tick,
            self._options.flush_seconds,
            self._failed,
            name=f"run-directory-{self._run_dir.name}-rank{self._rank}",
            on_end=self._end,
        )

    def start(self) -> None:
        """Writes the first documents and starts the writer thread."""
        self._papers.begin()
        self.timer.start()

    def begin_session(self) -> str:
        """Begins a session, and returns its id."""
        documents, new = self._documents, uuid.uuid4().hex[:12]
        self.session: str = new if documents is None else documents.sessions.current["session"]
        """The id of the session."""
        self.journal.begin_session(self.session)
        return self.session

    def changed(self) -> None:
        """Schedules the documents to be written."""
        self._papers.are_due = True

    def write_now(self, write: Callable[[], object]) -> None:
        """Writes a document in the calling thread, so that a kill right afterwards loses nothing."""
        try:
            write()
        except OSError as error:
            self._failed(error)
        self.changed()
        self.timer.wake()

    def flush(self) -> None:
        """Waits until the rows logged so far are in the CSV, for at most ten seconds."""
        self._papers.are_due = True
        self.timer.flush(_FLUSH_SECONDS)

    def close(self, timeout_seconds: float) -> None:
        """Drains everything and releases the run.

        Rows that aren't drained before the timeout stay in the journal for readers and the next session.
        """
        self._deadline = time.monotonic() + timeout_seconds
        self.journal.write_pending()
        self.journal.start_new_segment()
        if not self.timer.is_started:
            self._end()
        elif not self.timer.stop(timeout_seconds):
            _log.warning(
                "run folder %s: not all rows drained to metrics.csv after %.0f s; the rest stays in the "
                "journal.",
                self._run_dir,
                timeout_seconds,
            )

    def forget_in_child(self) -> None:
        """Ends writing in a forked child."""
        self.timer.forget_in_child()
        self.journal.abandon_in_child()
        self._lock.forget_in_child()

    # Opening.

    def _open_journal(self) -> Journal:
        make_segment: MakeSegment = AppendedSegment
        if self._options.journal != "appended":
            make_segment = self._options.make_segment
        file_system = file_system_of(self._folder) if self._options.journal == "auto" else ""
        if is_network_file_system(file_system):
            _log.warning(_APPENDED, self._run_dir, f"is on {file_system}")
            make_segment = AppendedSegment
        open_with = functools.partial(
            Journal,
            self._folder,
            self._state,
            on_full=self._on_disk_full,
            on_refused=self._refused,
            clock=self._options.clock,
        )
        try:
            return open_with(make_segment=make_segment)
        except OSError as error:
            if make_segment is AppendedSegment:
                raise
            _log.warning(_APPENDED, self._run_dir, f"cannot be mapped ({error})")
            return open_with(make_segment=AppendedSegment)

    def _open(self) -> None:
        """Opens the files of earlier sessions; in the writer thread, because it may read a lot."""
        sync_journal(self._folder, self._run_dir)
        self._papers.keep_reserve()
        self._drain.open()
        self._are_statistics_due |= self._csv.exists
        self._is_open = True

    def _report_rollback(self, rows: int) -> None:
        """Logs how many rows no longer belong to the run, and schedules new statistics."""
        if rows:
            _log.warning(
                "run folder %s: training continues from an earlier place; %d later rows stay on disk as a "
                "branch.",
                self._run_dir,
                rows,
            )
        self._are_statistics_due = True

    def _note_change(self) -> None:
        """Notes that another program has changed the CSV, and schedules new statistics."""
        self._failures.last_error = f"another program has changed {metrics_name(self._rank)}"
        self._are_statistics_due = self._papers.are_due = True

    # The writer thread.

    def _tick(self, is_last: bool) -> None:  # called by the timer
        failures = self._failures.errors.total()
        self._is_well, is_well = False, True
        if not self._disowned:
            self._papers.touch()
            try:
                self._drain_journal(is_last)
            except (RunInUseError, RunPathError) as error:
                self._disown(error)
            except Exception as error:  # noqa: BLE001  # even one of our own
                # The documents are still written, because they report the error.
                is_well = False
                self._failed(error)
        if is_last:
            self._report_loss()
        if self._disowned:
            return
        self._papers.write(is_last=is_last, is_urgent=is_well and self._failures.is_failing)
        self._is_well = is_well
        if is_well:
            if not self.journal.counts.pending:
                self._failures.recover(failures)
            if self._mirror is not None and not is_last:
                self._mirror.tick()

    def _drain_journal(self, is_last: bool) -> None:
        self._run_folder.hold(self._lock)
        if not self._is_open:
            self._open()
        drained = self._drain.run()
        if is_last and self.journal.counts.pending:
            # Draining may have freed disk space.
            self.journal.write_pending()
            drained += self._drain.run()
        if is_last:
            # Repairs what another program has changed since.
            drained += self._drain.run()
        if self._are_statistics_due:
            self._drain.statistics = _statistics_of(
                self._csv, self._between_chunks, by_step=not self._options.is_trainer
            )
            self._are_statistics_due = False
        self.journal.files.retire()
        if not is_last:
            self.journal.files.prepare()
        if drained:
            self._papers.are_due = True
            self.journal.request_sample()

    def _disown(self, error: Exception) -> None:
        """Stops writing, because the folder was deleted, or belongs to another process now."""
        self._disowned = str(error)
        self.journal.stop_accepting()
        _log.error("%s Writing has stopped; records logged since are lost, and counted at the end.", error)

    def _between_chunks(self) -> None:
        if not 0 <= self._csv.rows - self._sampled_at < _SAMPLED_ROWS:
            self._sampled_at = self._csv.rows
            self.journal.request_sample()
        if self._papers.touch(after_seconds=1.0):
            self.journal.files.retire()

    def _summary(self) -> tuple[Aggregate, dict[str, int]]:
        """Returns the statistics of the rows, and the mark of the CSV that they cover."""
        # A summary without a mark covers no rows; readers compute their own.
        csv, mark = self._csv, None
        if csv.exists and not self._are_statistics_due:
            mark = csv.snapshot().mark(csv.size, csv.parts.last)
        return self._drain.statistics, {} if mark is None else {**mark, "rows": csv.rows}

    def counts(self) -> dict[str, int]:
        """Returns counts of waiting rows, dropped rows, refused values, and the sum of all losses."""
        found = attrs.asdict(self.journal.counts)
        waiting = found.pop("pending")
        return {**found, "waiting_rows": waiting, "lost": sum(self.lost().values())}

    def lost(self) -> dict[str, int]:
        """Returns the counts of lost records by "rows", "media", "files", "uploads" and "early"."""
        lost = {
            "rows": self._lost_rows or self.journal.counts.dropped + self._drain.missing,
            **self._media_stats().get("lost", {}),
        }
        return {kind: count for kind, count in lost.items() if count}

    def _report_loss(self) -> None:
        """Compares accepted and written rows at the end, and reports a loss."""
        rows = self.journal.counts.dropped + self.journal.counts.pending + self._drain.lost_rows()
        reason = self._disowned or self._failures.last_error
        if rows:
            self._lost_rows = rows
            _log.error("run folder %s: %d rows of metrics are lost (%s).", self._run_dir, rows, reason)
        documents, lost = self._documents, self.lost()
        if documents is None or not lost:
            return
        session = documents.sessions.current
        if session["status"] in {"completed", "stopped"}:
            text = f"{rows} rows of metrics are lost ({reason})" if rows else f"lost {loss_text(lost)}"
            session.update(status="failed to write", exception=text)

    def _report(self) -> dict[str, Any]:
        """Returns the sidecar's fields for this session: `lost` and `overhead`.

        `calls` counts the calls of `log_metrics` whose rows are in the CSV. About one call in 64 is timed,
        inside this destination, mostly while the writer thread is at work.
        """
        samples, counts, drain = list(self.journal.samples_ns), self.journal.counts, self._drain
        overhead = {
            "calls": drain.rows,
            "samples": len(samples),
            "p50_us": _percentile(samples, 0.5),
            "p99_us": _percentile(samples, 0.99),
            "csv_bytes": self._csv.size + self._csv.parts.size,
            "csv_parts": self._csv.parts.last,
            "csv_rewrites": drain.file.rewrites,
            "waiting_rows": counts.pending,
            "dropped": counts.dropped,
            "refused": counts.refused,
            "damaged_bytes": drain.source.damaged_bytes,
            "safe_on_disk_to_step": drain.file.durable_step,
            "media": self._media_stats(),
            "errors": dict(self._failures.errors),
            "last_error": self._failures.last_error or None,
        }
        return {"overhead": overhead, "lost": self.lost()}

    def _end(self) -> None:
        """Removes a fully drained journal and releases the lock, at the end of the writer thread.

        Done here because the thread that closes the run may be interrupted while it waits.
        """
        try:
            self._papers.wait(self._deadline)
            self.journal.close()
            self._remove_journal()
            if self._mirror is not None:
                self._mirror.finish(max(0.0, self._deadline - time.monotonic()))
        finally:
            self._papers.free_reserve()
            self._csv.close()
            self._lock.release()

    def _remove_journal(self) -> None:
        for segment in list(self.journal.files.segments):
            segment.close()
        is_clean = self._is_open and self._is_well and not self.journal.counts.pending
        if is_clean and self._drain.source.is_drained():
            if self._csv.exists:
                self._csv.write_sums(is_last=True)
            remove_journal(self._folder)

    # Errors.

    def _failed(self, error: Exception) -> None:
        """Called in the training, writer and environment threads."""
        self._failures.add(error)
        self._papers.are_due = True

    def _on_disk_full(self, error: OSError) -> None:
        """Called in the training thread when no segment could be made."""
        self._failed(error)
        self.timer.wake()

    def _refused(self, kind: str, message: str) -> None:
        """Called in the logging thread."""
        self._failures.refuse(kind, message)
        self._papers.are_due = True
