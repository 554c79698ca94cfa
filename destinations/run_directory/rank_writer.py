"""Writes the files of one rank: journal, CSV and summary; on rank 0 also the documents of the run.

The training thread opens, closes and logs to `journal`; `_tick` and what it calls run in the writer thread.
"""

import contextlib
import logging
import math
import os
import socket
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
from destinations.history.sessions import session_path
from events import redact_text
from uploads.disk import file_system_of, is_network_file_system, read_json

from .blocks import blocks_of, read_blocks
from .documents import Documents, write_summary
from .drain import PART_BYTES, JournalDrain
from .environment import describe_environment, rank_layout, write_environment
from .folder import HeldFolder, RunInUseError, WriterLock, holds_run, remove_temporaries, with_user_paths
from .journal import Journal, MakeSegment, make_journal, remove_journal, sync_journal
from .layout import (
    ABANDONED_FOLDER,
    ENVIRONMENT,
    HEARTBEAT,
    MARKED_TAIL_BYTES,
    csv_mark,
    journal_path,
    metrics_name,
    parse_header,
    segment_paths,
    summary_name,
)
from .metrics_csv import MetricsCsv
from .parquet import indexed_columns
from .part_index import PartIndex
from .segments import AppendedSegment, MappedSegment, allocate

if TYPE_CHECKING:
    from events import State

    from .mirror import Mirror

__all__ = ["JournalKind", "RankWriter", "loss_text"]

_WORDS = {"early": "records logged before init", "files": "files", "media": "media and texts", "rows": "rows"}
_log = logging.getLogger("destinations")

_APPENDED = "run folder %s %s: rows are written by system calls, some microseconds slower each."

JournalKind = Literal["auto", "mapped", "appended"]

_DOCUMENT_SECONDS = 5.0
_LAST_TRIES = 5
# A sample takes a row through the slow path.
_SAMPLED_ROWS = 64
_FLUSH_SECONDS = 10.0
# Makes room for the final documents on a full disk.
_RESERVE_BYTES = 64 << 10


def loss_text(lost: Mapping[str, int]) -> str:
    """Returns the counts of lost records as text, such as "2 files, 5 rows"; empty if nothing was lost.

    Args:
        lost: counts by "rows", "media", "files" and "early"; see `RankWriter.lost`.
    """
    return ", ".join(f"{count:,} {_WORDS.get(kind, kind)}" for kind, count in sorted(lost.items()) if count)


def _percentile(values: list[int], share: float) -> float | None:
    """Returns a percentile of nanoseconds by nearest rank, in microseconds; None if there are no values."""
    if not values:
        return None
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] / 1000


@attrs.define(eq=False, slots=False, repr=False, kw_only=True)
class RankWriter:
    """The writer of one rank, from opening to closing.

    Args:
        run_dir: the folder of the run.
        state: the run.
        lock: the lock of the rank, already acquired.
        documents: the sidecar, hyperparameters and sessions; None on ranks other than 0.
        flush_seconds: the interval at which rows are drained to the CSV.
        journal_kind: whether the journal is mapped.
        media_stats: returns the media counts for the sidecar.
        run_folder: the same folder, open.
        make_segment: makes the segments of a mapped journal.
        clock: the time of rows, in seconds since 1970.
        describe: takes the ranks, and returns the content of `environment.json`.
        part_bytes: the size at which the CSV is closed as a part.
        mirror: sends what is new to a store; None where the run is here alone.
        by_step: whether rows may come in any order of their steps, see `Aggregate`.
    """

    _run_dir: Path
    _state: "State"
    _lock: WriterLock
    _documents: Documents | None
    _flush_seconds: float
    _journal_kind: JournalKind
    _media_stats: Callable[[], dict[str, Any]]
    _run_folder: HeldFolder
    _make_segment: MakeSegment = MappedSegment
    _clock: Callable[[], float] = time.time
    _describe: Callable[[dict[str, int]], dict[str, Any]] = describe_environment
    _part_bytes: int = PART_BYTES
    _mirror: "Mirror | None" = None
    _by_step: bool = False

    def __attrs_post_init__(self) -> None:
        self._root = self._run_folder.path
        self._rank = self._state.rank
        self._lock.follow(self._root)
        self._environment: threading.Thread | None = None
        self._folder = journal_path(self._root, self._rank)
        make_journal(self._folder)
        remove_temporaries(self._root, self._rank)
        self._reserve = self._root / f".reserve.{os.getpid()}-{self._rank}.tmp"
        # Guards the five attributes below: three threads report failures.
        self._failing = threading.Lock()
        self._failures = 0
        self._errors: Counter[str] = Counter()
        self._last_error = ""
        self._is_failing = False
        # The kinds of errors reported since the last recovery.
        self._reported: set[tuple[str, int | None]] = set()
        self._refusals: set[str] = set()
        first_part = 1 if self._mirror is None else self._mirror.first_part
        self._csv = MetricsCsv(self._root / metrics_name(self._rank), first_part=first_part)
        remove_temporaries(self._csv.folder)
        self.had_rows = self._csv.path.exists() or bool(segment_paths(self._folder))
        """Whether earlier sessions left rows."""
        self.journal = self._open_journal(self._make_segment if self._is_mapped() else AppendedSegment)
        self.session = ""
        """The id of the session."""
        self.begin_session()
        self._drain = JournalDrain(
            self._root,
            self._folder,
            self._csv,
            self.journal,
            on_rollback=self._report_rollback,
            on_change=self._report_change,
            between=self._between_chunks,
            part_bytes=self._part_bytes,
        )
        self._drain.statistics = Aggregate(by_step=self._by_step)
        self._is_open = False
        self._is_well = False
        self._environment_due = self._documents is not None
        self._heartbeat_at = 0.0
        self._sampled_at = 0
        self._documents_at = -math.inf
        self._are_documents_due = True
        # Whether rows are gone that the statistics have.
        self._are_statistics_due = False
        self._deadline = math.inf
        # Accepted rows that are not in the folder; set at the end.
        self._lost_rows = 0
        self._is_moved = False
        # Why writing has ended: another run has the folder.
        self._disowned = ""
        self.timer = PeriodicThread(
            self._tick,
            self._flush_seconds,
            self._failed,
            name=f"run-directory-{self._run_dir.name}-rank{self._rank}",
            on_end=self._end,
        )

    def start(self) -> None:
        """Writes the first documents and starts the writer thread."""
        self._touch()
        if self._documents is not None:
            # A new run has nothing to lose until the writer thread's first turn syncs it.
            self._write_documents(durable=not self._documents.is_new)
        self.timer.start()

    def begin_session(self) -> str:
        """Begins a session, and returns its id."""
        documents = self._documents
        own = uuid.uuid4().hex[:12] if documents is None else documents.sessions.current["session"]
        self.session = own
        self.journal.begin_session(own)
        return self.session

    def changed(self) -> None:
        """Schedules the documents to be written."""
        self._are_documents_due = True

    def write_now(self, write: Callable[[], object]) -> None:
        """Writes a document in the calling thread, so that a kill right after it takes nothing along."""
        try:
            write()
        except OSError as error:
            self._failed(error)
        self.changed()
        self.timer.wake()

    def flush(self) -> None:
        """Waits until the rows logged so far are in the CSV, at most ten seconds."""
        self._are_documents_due = True
        self.timer.flush(_FLUSH_SECONDS)

    def close(self, timeout_seconds: float) -> None:
        """Drains everything and releases the run.

        Rows that are not drained before the timeout stay in the journal, for readers and the next session.
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

    def _is_mapped(self) -> bool:
        if self._journal_kind != "auto":
            return self._journal_kind == "mapped"
        file_system = file_system_of(self._folder)
        if is_network_file_system(file_system):
            _log.warning(_APPENDED, self._run_dir, f"is on {file_system}")
            return False
        return True

    def _open_journal(self, make_segment: MakeSegment) -> Journal:
        try:
            return Journal(
                self._folder,
                self._state,
                make_segment=make_segment,
                on_full=self._on_disk_full,
                on_refused=self._refused,
                clock=self._clock,
            )
        except OSError as error:
            if make_segment is AppendedSegment:
                raise
            _log.warning(_APPENDED, self._run_dir, f"cannot be mapped ({error})")
            return self._open_journal(AppendedSegment)

    def _open(self) -> None:
        """Opens what earlier sessions left; in the writer thread, because it may read a lot."""
        sync_journal(self._folder, self._run_dir)
        self._keep_reserve()
        self._drain.open(is_new=not self.had_rows)
        if self._csv.exists:
            self._restore_statistics()
        self._is_open = True

    def _restore_statistics(self) -> None:
        summary = read_json(self._root / summary_name(self._rank))
        try:
            mark = {**summary["csv"]}
            mark.pop("rows", None)
            is_of_csv = mark == self._csv_mark(mark["bytes"])
            found = Aggregate.from_json(summary, by_step=self._by_step) if is_of_csv else None
        except (ValueError, TypeError, AttributeError, LookupError):
            found = None  # Damaged; the CSV has all that it said.
        if found is None:
            self._compute_statistics()
        else:
            self._drain.statistics = found
            self._add_rows_from(mark["bytes"], found)

    def _report_rollback(self, rows: int) -> None:
        """Says how many rows do not count any more; the statistics are to be those of the rest."""
        if rows:
            _log.warning(
                "run folder %s: training continues from an earlier place; %d rows beyond it stay on disk, "
                "and do not belong to the run any more.",
                self._run_dir,
                rows,
            )
        self._are_statistics_due = True

    def _report_change(self, restored: int, lost: int) -> None:
        """Reports that another program has changed the CSV, of which the statistics are to be."""
        self._last_error = f"another program has changed {metrics_name(self._rank)}"
        _log.log(
            logging.ERROR if lost else logging.WARNING,
            "run folder %s: %s: %d rows were restored from the journal, %d are lost. What it wrote is in %s.",
            self._run_dir,
            self._last_error,
            restored,
            lost,
            f"{ABANDONED_FOLDER}/",
        )
        self._are_statistics_due = True
        self._are_documents_due = True

    def _compute_statistics(self) -> int:
        """Recomputes the statistics from all rows, and returns the number of those of the CSV."""
        self._are_statistics_due = True
        statistics = Aggregate(by_step=self._by_step)
        for part in self._csv.parts():
            try:
                with contextlib.closing(part.open()) as file:
                    if self._by_step:
                        for block in blocks_of(file, indexed_columns(parse_header(file.header))):
                            block.add_to(statistics)
                    else:
                        PartIndex.read(file).add_to(statistics)
            except OSError as error:
                _log.warning("run folder %s: a part cannot be read: %s", self._run_dir, error)
            self._between_chunks()
        rows = self._add_rows_from(len(self._csv.header), statistics)
        self._drain.statistics = statistics
        self._are_statistics_due = False
        return rows

    def _add_rows_from(self, start: int, statistics: Aggregate) -> int:
        count = 0
        columns = indexed_columns(parse_header(self._csv.header))
        for lines in self._csv.blocks(start):
            count += lines.count(b"\n")
            for block in read_blocks(self._csv.header, [lines], columns):
                block.add_to(statistics)
            self._between_chunks()
        return count

    def _csv_mark(self, size: int) -> dict[str, int] | None:
        """Returns a fingerprint of the first `size` bytes of the CSV, to match a summary with it."""
        if not len(self._csv.header) <= size <= self._csv.size:
            return None
        tail = self._csv.read(max(0, size - MARKED_TAIL_BYTES), min(size, MARKED_TAIL_BYTES))
        return csv_mark(self._csv.header, tail, size, self._csv.closed)

    # The writer thread.

    def _tick(self, is_last: bool) -> None:  # called by the timer
        for tries_left in reversed(range(_LAST_TRIES if is_last else 1)):
            if self._disowned:
                if is_last:
                    self._report_loss()
                return
            # What is deleted or cut while the rest is written is restored, unless that goes on and on.
            try:
                self._write_all(is_last, is_final=not tries_left)
            except FileNotFoundError:
                if not tries_left:
                    raise
                continue
            if self._lock.is_in_place():
                return

    def _write_all(self, is_last: bool, *, is_final: bool) -> None:
        self._touch()
        failures = self._failures
        self._is_well, is_well = False, True
        try:
            self._drain_journal(is_last)
        except RunInUseError as error:
            self._disown(error)
            if is_last:
                self._report_loss()
            return
        except Exception as error:
            if is_last and not is_final and isinstance(error, FileNotFoundError):
                raise
            # The documents are still written: they report the error, also one of ours.
            is_well = False
            self._failed(error)
        self._write_environment(is_last)
        self._follow_state()
        if is_last:
            self._report_loss()
            self._write_last_documents()
        else:
            self._write_due_documents(is_well=is_well)
        self._is_well = is_well
        if is_well:
            self._recovered(failures)
            if self._mirror is not None and not is_last:
                self._mirror.tick()

    def _write_environment(self, is_last: bool) -> None:
        """Begins to write `environment.json`, once, and at the end if it was deleted."""
        if is_last and self._environment is not None and not self._environment.is_alive():
            self._environment_due |= not (self._root / ENVIRONMENT).exists()
        if self._environment_due:
            self._environment_due = False
            paths = [self._root / ENVIRONMENT]
            if self._documents is not None:
                paths.append(session_path(self._root, self._documents.sessions.current, ENVIRONMENT))
            self._environment = write_environment(
                paths, lambda: self._describe(rank_layout(self._state)), self._failed
            )

    def _follow_state(self) -> None:
        if self._documents is not None and self._documents.follow(self._state):
            self._are_documents_due, self._documents_at = True, -math.inf

    def _write_due_documents(self, *, is_well: bool) -> None:
        now = time.monotonic()
        is_time = now - self._documents_at >= _DOCUMENT_SECONDS or (is_well and self._is_failing)
        if self._are_documents_due and is_time:
            self._documents_at = now
            self._write_summary()
            self._write_documents()
            self._are_documents_due = False

    def _write_last_documents(self) -> None:
        """Writes the final documents; on a full disk, frees the reserve for them."""
        self._are_documents_due = False
        try:
            self._write_summary()
            self._write_documents()
        except OSError:
            with contextlib.suppress(OSError):
                self._reserve.unlink()
            self._write_documents()
            self._write_summary()

    def _keep_reserve(self) -> None:
        if self._documents is not None:
            fd = os.open(self._reserve, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                allocate(fd, _RESERVE_BYTES)
            finally:
                os.close(fd)

    def _drain_journal(self, is_last: bool) -> None:
        self._restore_if_deleted()
        if not self._is_open:
            self._open()
        drained = self._drain.run()
        if is_last and self.journal.counts.pending:
            # Draining may have freed space.
            self.journal.write_pending()
            drained += self._drain.run()
        if is_last and not self._drain.verify():
            drained += self._drain.run()
        if self._are_statistics_due:
            self._compute_statistics()
        self.journal.retire()
        if not is_last:
            self.journal.prepare()
        if drained:
            self._are_documents_due = True
            self.journal.request_sample()

    def _restore_if_deleted(self) -> None:
        """Follows a moved folder; recreates a deleted one, with all documents.

        Raises:
            RunInUseError: the folder was deleted, and another run has its path.
        """
        if self._lock.is_in_place():
            self._report_move()
            return
        if self._run_folder.is_deleted or not self._root.is_dir():
            if holds_run(self._run_dir, self._rank):
                raise RunInUseError(
                    f"run folder {str(self._run_dir)!r} was deleted, and another run has taken its place."
                )
            self._run_dir.mkdir(parents=True, exist_ok=True)
            self._run_folder.renew(self._lock.renew)
            _log.warning(
                "run folder %s was deleted; recreated with the metrics that this process still has. "
                "Media and other files are lost.",
                self._run_dir,
            )
        else:
            self._lock.renew()
        self._environment_due = self._documents is not None
        self._are_documents_due = True
        self._documents_at = -math.inf
        if self._documents is not None:
            self._documents.rewrite_files()

    def _report_move(self) -> None:
        if self._is_moved:
            return
        try:
            self._is_moved = not self._run_dir.samefile(self._root)
        except OSError:
            self._is_moved = True
        if self._is_moved:
            _log.warning(
                "run folder %s was moved to %s; continuing there.",
                self._run_dir,
                os.path.realpath(self._root),
            )

    def _disown(self, error: RunInUseError) -> None:
        """Ends all writing: the folder belongs to another run now."""
        self._disowned = str(error)
        self.journal.stop_accepting()
        _log.error("%s Writing has stopped; records logged since are lost, and counted at the end.", error)

    def _between_chunks(self) -> None:
        if not 0 <= self._csv.rows - self._sampled_at < _SAMPLED_ROWS:
            self._sampled_at = self._csv.rows
            self.journal.request_sample()
        if time.monotonic() - self._heartbeat_at > 1.0:
            self._touch()
            self.journal.retire()

    def _touch(self) -> None:
        self._heartbeat_at = time.monotonic()
        if self._documents is None:
            return
        path = self._root / HEARTBEAT
        try:
            os.utime(path)
        except FileNotFoundError:
            with contextlib.suppress(OSError):
                path.touch()
        except OSError:
            pass

    def _write_summary(self) -> None:
        run_id = self._documents.run_id if self._documents is not None else ""
        # Without a mark, the summary is that of no rows: readers compute their own.
        is_known = self._csv.exists and not self._are_statistics_due
        mark = (self._csv_mark(self._csv.size) if is_known else None) or {}
        if mark:
            mark["rows"] = self._csv.rows
        write_summary(self._root, self._rank, run_id, self._drain.statistics, mark)

    def _write_documents(self, *, durable: bool = True) -> None:
        if self._documents is None:
            return
        self._documents.sessions.write(self._documents.live_status, durable=durable)
        self._documents.write_hparams(durable=durable)
        more = {
            "session": self._documents.sessions.current["session"],
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "ranks": rank_layout(self._state),
            "overhead": self.overhead(),
            "lost": self.lost(),
        }
        self._documents.write_sidecar(self._drain.statistics, more, durable=durable)

    def lost(self) -> dict[str, int]:
        """Returns the counts of accepted records that are lost, by "rows", "media", "files" and "early"."""
        lost = {
            "rows": self._lost_rows or self.journal.counts.dropped + self._drain.missing,
            **self._media_stats().get("lost", {}),
        }
        return {kind: count for kind, count in lost.items() if count}

    def _report_loss(self) -> None:
        """Compares accepted with written rows at the end, and reports a loss."""
        rows = self.journal.counts.dropped + self.journal.counts.pending + self._drain.lost_rows()
        reason = self._disowned or self._last_error
        if rows:
            self._lost_rows = rows
            _log.error("run folder %s: %d rows of metrics are lost (%s).", self._run_dir, rows, reason)
        documents, lost = self._documents, self.lost()
        if documents is None or not lost:
            return
        if documents.status in {"completed", "stopped"}:
            documents.status = "failed to write"
            documents.exception = (
                f"{rows} rows of metrics are lost ({reason})" if rows else f"lost {loss_text(lost)}"
            )
        documents.sessions.current.update(status=documents.status, exception=documents.exception)

    def overhead(self) -> dict[str, Any]:
        """Returns the `overhead` field of the sidecar, for this session.

        `calls` counts the calls of `log_metrics` whose rows are in the CSV. About one call in 64 is timed,
        inside this destination, mostly while the writer thread is at work.
        """
        samples, counts, drain = list(self.journal.samples_ns), self.journal.counts, self._drain
        return {
            "calls": drain.rows,
            "samples": len(samples),
            "p50_us": _percentile(samples, 0.5),
            "p99_us": _percentile(samples, 0.99),
            "csv_bytes": self._csv.size + self._csv.part_bytes,
            "csv_parts": self._csv.closed,
            "csv_rewrites": drain.rewrites,
            "waiting_rows": counts.pending,
            "dropped": counts.dropped,
            "refused": counts.refused,
            "damaged_bytes": drain.damaged_bytes,
            "safe_on_disk_to_step": drain.durable_step,
            "media": self._media_stats(),
            "errors": dict(self._errors),
            "last_error": self._last_error or None,
        }

    def _end(self) -> None:
        """Removes a fully drained journal and releases the lock; the end of the writer thread.

        Done here because the thread that closes the run may be interrupted while it waits.
        """
        try:
            if self._environment is not None:
                self._environment.join(max(0.0, self._deadline - time.monotonic()))
            self.journal.close()
            self._remove_journal()
            if self._mirror is not None:
                self._mirror.finish(max(0.0, self._deadline - time.monotonic()))
        finally:
            with contextlib.suppress(OSError):
                self._reserve.unlink()
            self._csv.close()
            self._lock.release()

    @property
    def _status(self) -> str:
        documents = self._documents
        if documents is None:
            return "running"
        return documents.live_status[0] if documents.ended_at is None else documents.status

    def _remove_journal(self) -> None:
        for segment in list(self.journal.segments):
            segment.close()
        is_clean = self._is_open and self._is_well and not self.journal.counts.pending
        if is_clean and self._drain.is_fully_drained():
            if self._csv.exists:
                self._csv.write_sums(is_last=True)
            remove_journal(self._folder)

    # Errors.

    def _failed(self, error: Exception) -> None:
        """Counts an error, and reports the first of its kind since the last recovery.

        Called in the training, writer and environment threads.
        """
        text = f"{type(error).__name__}: {redact_text(str(with_user_paths(error, self._run_dir)))}"
        kind = (type(error).__name__, getattr(error, "errno", None))
        with self._failing:
            self._failures += 1
            self._errors[type(error).__name__] += 1
            self._last_error = text
            self._is_failing = True
            is_first = kind not in self._reported
            self._reported.add(kind)
        if is_first:
            _log.error(
                "run folder %s is not writable (%s). Training continues; rows are buffered meanwhile.",
                self._run_dir,
                text,
                exc_info=None if isinstance(error, OSError) else error,
            )
        self._are_documents_due = True

    def _on_disk_full(self, error: OSError) -> None:
        """Called in the training thread when no segment could be made."""
        self._failed(error)
        self.timer.wake()

    def _refused(self, kind: str, message: str) -> None:
        """Reports the first refusal of each kind; called in the logging thread."""
        if kind not in self._refusals:
            self._refusals.add(kind)
            _log.warning("run folder %s: %s", self._run_dir, message)
        self._are_documents_due = True

    def _recovered(self, failures: int) -> None:
        """Reports the recovery once everything pending has been written.

        Args:
            failures: the error count at the start of the turn. An error of another thread since then may
                concern work that this turn had already done; the next turn decides.
        """
        with self._failing:
            is_well = failures == self._failures and not self.journal.counts.pending
            if not (self._is_failing and is_well):
                return
            self._is_failing = False
            self._reported.clear()
        _log.warning("run folder %s is writable again.", self._run_dir)
