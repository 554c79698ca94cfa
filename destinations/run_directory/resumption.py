"""Decides which earlier rows a continuing session replaces: those that training logs again, and no others.

A checkpoint that contains the state of the destinations says when it was saved; everything logged before
belongs to it. A loop of your own says at most after which batch it continues. At the next step, some metrics
were logged before that batch, such as an evaluation after an epoch, and some in it. So the metrics that
training logs again at that step are replaced once the step is past, and the others stay.

The methods run in the threads that log.
"""

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from destinations.history.chain import Follows
from destinations.history.csv_file import CsvSnapshot
from destinations.history.rows import MetricRow, keeps, parse_rows
from destinations.history.sealed import ParquetSnapshot
from destinations.history.snapshot import last_rows, take_snapshot

from .blocks import indexed_files
from .journal import Journal
from .layout import column_of, parse_header
from .open_run import OpenRun

__all__ = ["Continuation", "Resumption", "rows_of_step"]

_log = logging.getLogger("destinations")

_MAX_ROWS = 1000
# How many rows to compare with earlier sessions. Each comparison reads the earlier rows.
_MAX_LOOKS = 20


class Resumption:
    """Watches a session's rows until it is clear which earlier rows they replace, then marks those.

    **Threading.** Any thread may call any method; one lock guards all of the state.

    Args:
        run_dir: the folder of the run.
        rank: the rank that logs the rows.
        journal: the journal to which they are written.
        batches_done: returns the trainer's count of batches.
        on_step: called with the step from which training continues, once it is known.
        began_at: when the session began, in seconds since 1970; rows of earlier sessions have earlier times.
        warns: whether to report rows that repeat earlier ones if nothing says where training begins.
    """

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        journal: Journal,
        *,
        batches_done: Callable[[], int],
        on_step: Callable[[int], None],
        began_at: float,
        warns: bool = False,
    ) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._journal = journal
        self._batches_done = batches_done
        self._on_step = on_step
        self._began_at = began_at
        self._looks_left = _MAX_LOOKS if warns else 0
        # The last step of earlier sessions, once read.
        self._last_step: int | None = None
        # Reentrant: a signal handler may log.
        self._lock = threading.RLock()
        # The rows of this session so far.
        self._rows: deque[tuple[dict[str, float], int]] = deque(maxlen=_MAX_ROWS)
        self.has_begun = False
        """Whether training has begun."""
        self._step: int | None = None
        # The rows of earlier sessions at that step, once read.
        self._earlier: list[MetricRow] | None = None
        self.is_done = False
        """Whether later rows no longer matter."""

    @property
    def is_decided(self) -> bool:
        """Whether it is known which place this session follows."""
        return self.is_done or (self.has_begun and self._step is None)

    def begin(self, checkpoint: Follows | None) -> None:
        """Handles training that continues from the trainer's count of batches, or from a checkpoint."""
        with self._lock:
            self.has_begun = True
            step = self._step = self._batches_done()
            self._on_step(step)
            if checkpoint is not None:
                self.is_done = True
                place = checkpoint.session, checkpoint.mark or 0
                self._journal.rewind(*place, step, checkpoint.time)
            else:
                self._replace_if_clear(step)

    def follow_end(self) -> None:
        """Handles training that doesn't say where it continues; it appends to the run."""
        with self._lock:
            self.has_begun = True
            self.is_done = not self._looks_left

    def before(self, row: Mapping[str, float], step: int) -> None:
        """Notes a row before it is written."""
        with self._lock:
            if self._step is None and self._looks_left:
                with contextlib.suppress(OSError):
                    self._notice_repeat(row, step)
            if self._step is None:
                self.is_done = self.has_begun and not self._looks_left
            elif not self.is_done and (step > self._step or len(self._rows) == _MAX_ROWS):
                self._replace(self._step)
            if not self.is_done:
                self._rows.append((dict(row), step))
                if self._step is not None:
                    self._replace_if_clear(self._step)

    def _notice_repeat(self, row: Mapping[str, float], step: int) -> None:
        """Warns once if an earlier session has logged the same metric and step."""
        if self._last_step is None:
            rows = last_rows(self._run_dir, 1, self._rank)
            self._last_step = -1 if not rows or rows[0].step is None else rows[0].step
        if step > self._last_step:
            # Once training has begun, it continues after all existing rows.
            self._looks_left = 0 if self.has_begun else self._looks_left
            return
        self._looks_left -= 1
        earlier = rows_of_step(self._run_dir, self._rank, step)
        known = {name for one in earlier if (one.time or 0) < self._began_at for name in one.metrics}
        if again := known & set(map(column_of, row)):
            self._looks_left = 0
            _log.warning(
                "run folder %s: %r at step %d was logged by an earlier session too, which went on to step "
                "%d. Both are kept. To replace the earlier rows, call run.fit_start(batch=%d) before the "
                "first one.",
                self._run_dir,
                min(again),
                step,
                self._last_step,
                step,
            )

    def end(self) -> None:
        """Decides now, because no more rows will come."""
        with self._lock:
            if self._step is not None and not self.is_done:
                self._replace(self._step)

    def _replace_if_clear(self, step: int) -> None:
        """Replaces at once if every metric of the step was logged again, or there was none."""
        again = self._again(step)
        if all(name in again for row in self._of_step(step) for name in row.metrics):
            self._replace(step)

    def _replace(self, step: int) -> None:
        """Marks the rows of later steps, and the metrics of this step that were logged again."""
        self.is_done = True
        again, earlier = self._again(step), self._of_step(step)
        if again.isdisjoint(name for row in earlier for name in row.metrics):
            # All earlier rows of the step itself stay.
            self._journal.mark_resume(step, float("inf"))
        else:
            self._journal.mark_resume(step, None)
            for row in earlier:
                kept = {name: value for name, value in row.metrics.items() if name not in again}
                if kept:
                    self._journal.append_again(attrs.evolve(row, metrics=kept))

    def _again(self, step: int) -> set[str]:
        """Returns the metrics that this session has logged at a step."""
        return {column_of(name) for row, at in self._rows if at == step for name in row}

    def _of_step(self, step: int) -> list[MetricRow]:
        """Returns the rows of earlier sessions at a step; none if they can't be read, so that they stay."""
        if self._earlier is None:
            found: list[MetricRow] = []
            with contextlib.suppress(OSError):
                found = rows_of_step(self._run_dir, self._rank, step)
            self._earlier = [row for row in found if row.time is None or row.time < self._began_at]
        return self._earlier


class Continuation:
    """Tracks what the sessions of a run follow: its end, a loaded checkpoint, or a batch that a loop names.

    It receives the events of training, and writes what it learns to the journal, documents, and media.

    Args:
        clock: the current time in seconds since 1970.
        is_trainer: whether it is the trainer's run; a named writer's steps don't say where it continues.
        warns: whether to report rows that repeat earlier ones if nothing says where training begins.
    """

    def __init__(self, clock: Callable[[], float], *, is_trainer: bool, warns: bool) -> None:
        self._clock = clock
        self._is_trainer = is_trainer
        self._warns = warns
        # Where the run stood when the most recently loaded checkpoint was saved.
        self._checkpoint: Follows | None = None
        # Whether training has begun, and whether a checkpoint is loaded by a session that has trained.
        self._has_trained = self._goes_back = False
        self.leave()

    def leave(self) -> None:
        """Forgets the folder, because the run was closed or moves to another folder."""
        self._run: OpenRun | None = None
        # None if this session continues nothing, or has marked what it replaces.
        self._resumption: Resumption | None = None

    def enter(self, run: OpenRun) -> None:
        """Sets the run that is written from now on."""
        self._run = run
        if run.writer.had_rows and self._is_trainer:
            self._watch()

    @property
    def is_watching(self) -> bool:
        """Whether `before` must be called with each row."""
        return self._resumption is not None

    def before(self, row: Mapping[str, float], step: int | None) -> None:
        """Notes a row before it is written."""
        if self._resumption is not None and step is not None:
            self._resumption.before(row, step)
            self._forget_if_done()

    def before_load(self) -> None:
        """Handles the event before a load; later rows belong to the training that begins."""
        self._checkpoint = None
        # Otherwise it isn't known yet what the session follows, and its own rows stay.
        self._goes_back = self._has_trained and (self._resumption is None or self._resumption.is_decided)
        if self._has_trained:
            self._watch()

    def load(self, state: Mapping[str, Any]) -> None:
        """Loads what `checkpoint` has returned."""
        match state:
            case {"session": str(session), "mark": int(mark), "time": int() | float() as time, **more}:
                records = more.get("records")
                records = records if isinstance(records, int) else None
                self._checkpoint = Follows(session, records, mark=mark, time=float(time))
            case _:
                self._checkpoint = None

    def after_load(self, batch: int) -> None:
        """Handles a loaded checkpoint, which may be older than the rows logged so far."""
        run, saved = self._run, self._checkpoint
        if run is None:
            return
        is_own = saved is not None and saved.session == run.writer.session
        if self._goes_back or is_own:
            run.begin_session(self._clock())
        if self._has_trained or is_own or run.writer.had_rows:
            self._watch()
        if batch > 0 or saved is not None:
            self._continue_from(batch)

    def fit_start(self, *, continues: bool) -> None:
        """Handles the start of training: decides what it follows, or waits for the rows of its first step.

        Args:
            continues: whether the trainer has said that the run continues.
        """
        is_first, self._has_trained = not self._has_trained, True
        if self._run is None:
            return
        state, documents = self._run.state, self._run.documents
        is_named = self._checkpoint is not None or state.timestamp.batch > 0
        # An epoch alone names no step.
        is_named |= continues and self._is_trainer and state.timestamp.epoch == 0
        if self._resumption is not None:
            if is_named:
                self._resumption.begin(self._checkpoint)
            else:
                self._resumption.follow_end()
            self._forget_if_done()
        elif (
            is_named and is_first and self._is_trainer and documents is not None and documents.sessions.before
        ):
            # The run has no rows, but may have other records.
            self._continue_from(int(state.timestamp.batch))

    def checkpoint(self) -> dict[str, Any]:
        """Returns the place of a checkpoint: everything this session has logged so far belongs to it."""
        return {} if self._run is None else self._run.place_of_checkpoint(self._clock())

    def end(self) -> None:
        """Decides now, because no more rows will come."""
        if self._resumption is not None:
            self._resumption.end()
            self._forget_if_done()

    def _watch(self) -> None:
        run, resumption = self._run, self._resumption
        if run is None:
            return
        state = run.state
        if resumption is not None:
            if not resumption.has_begun:
                return
            resumption.end()
        self._resumption = Resumption(
            run.run_dir,
            state.rank,
            run.writer.journal,
            batches_done=lambda: int(state.timestamp.batch),
            on_step=self._continue_from,
            began_at=self._clock(),
            warns=self._warns and state.continues_run is None,
        )

    def _continue_from(self, step: int) -> None:
        run, saved = self._run, self._checkpoint
        if run is None or run.documents is None or (saved is not None and not saved.session):
            return
        documents = run.documents
        follows = None if saved is None else attrs.evolve(saved, step=step)
        if documents.continue_from(step, follows) and saved is not None:
            # None of this run's rows belong.
            self._checkpoint = attrs.evolve(saved, session="", mark=0)
        run.writer.write_now(lambda: documents.write_history(durable=False))

    def _forget_if_done(self) -> None:
        if self._resumption is not None and self._resumption.is_done:
            self._resumption = None


def rows_of_step(run_dir: Path, rank: int, step: int) -> list[MetricRow]:
    """Returns the rows of a step, without parsing the cells of other rows."""
    found: list[MetricRow] = []
    with take_snapshot(run_dir, rank) as snapshot:
        for file, index in indexed_files(snapshot, ()):
            if isinstance(file, ParquetSnapshot) and index is not None:
                may = (index.of_rows("min_step") <= step) & (step <= index.of_rows("max_step"))
                found += itertools.chain.from_iterable(file.rows(*span) for span in index.spans(may))
            else:
                rows = _lines_of(file, step) if file.is_own else file.rows()
                found += (row for row in rows if keeps(file.limit, row))
        found += snapshot.journal_rows()
    return [row for row in found if row.step == step]


def _lines_of(file: CsvSnapshot, step: int) -> Iterator[MetricRow]:
    """Yields the rows of a step in a file by our writer, whose lines begin with the step."""
    mark = b"\n%d," % step
    for chunk in file.chunks():
        text, at = b"\n" + chunk, 0
        while (at := text.find(mark, at)) >= 0:
            end = text.find(b"\n", at + 1)
            yield from parse_rows(parse_header(file.header), [text[at + 1 : end + 1 or None]])
            at += 1
