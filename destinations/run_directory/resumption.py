"""What a session that continues a run takes back: the rows that training logs again, and no others.

A checkpoint that has the state of the destinations says when it was saved: what was logged before is part of
it. A loop of one's own says at most after which batch it continues. Of the step that comes next, some was
logged before that batch, such as an evaluation after an epoch, and some in it. So the metrics that training
logs again at that step are taken back, once it is past; the others stay.

Its methods run in the threads that log.
"""

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import attrs

from .journal import Journal
from .layout import column_of, parse_header
from .part_index import indexed_files
from .reader import (
    CsvSnapshot,
    MetricRow,
    ParquetSnapshot,
    keeps,
    last_rows,
    parse_rows,
    take_snapshot,
)

__all__ = ["Checkpoint", "Resumption", "rows_of_step"]

_log = logging.getLogger("destinations")

_MAX_ROWS = 1000
# How many rows are compared with earlier sessions. Each comparison reads the earlier rows.
_MAX_LOOKS = 20


@attrs.frozen
class Checkpoint:
    """Where the run stood when the checkpoint was saved that was loaded last.

    Attributes:
        time: in seconds since 1970; None where that is unknown.
        session: the id of the session that saved it.
        mark: of the boundary between the rows of that session.
        records: how many other records that session had.
    """

    time: float | None = None
    session: str | None = None
    mark: int | None = None
    records: int | None = None

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Self:
        """Returns what a state says, as far as it does."""
        at, session, mark, records = (state.get(name) for name in ("time", "session", "mark", "records"))
        return cls(
            float(at) if isinstance(at, int | float) else None,
            session if isinstance(session, str) else None,
            mark if isinstance(mark, int) else None,
            records if isinstance(records, int) else None,
        )


class Resumption:
    """Takes note of a session's rows until it is clear which earlier ones they replace; then marks these.

    **Threading.** Any thread may call any method; one lock guards all of the state.

    Args:
        run_dir: the folder of the run.
        rank: whose rows.
        journal: to which they are written.
        batches_done: returns the trainer's own count.
        on_step: called with the step from which training continues, once it is known.
        began_at: the time, in seconds since 1970: rows of earlier sessions have earlier times.
        warns: whether rows that repeat earlier ones are reported, where training has not begun.
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
        # The last step of earlier sessions, once it was read.
        self._last_step: int | None = None
        # Reentrant: a signal handler may log.
        self._lock = threading.RLock()
        # The rows of this session so far.
        self._rows: deque[tuple[dict[str, float], int]] = deque(maxlen=_MAX_ROWS)
        self.has_begun = False
        """Whether training has begun."""
        self._step: int | None = None
        # The rows of the step from earlier sessions, once they were read.
        self._earlier: list[MetricRow] | None = None
        self.is_done = False
        """Whether the rows that come are of no interest any more."""

    @property
    def is_decided(self) -> bool:
        """Whether it is known what this session follows."""
        return self.is_done or (self.has_begun and self._step is None)

    def begin(self, checkpoint: Checkpoint) -> None:
        """Training continues from the trainer's own count of batches, or where a checkpoint was saved."""
        with self._lock:
            self.has_begun = True
            step = self._step = self._batches_done()
            self._on_step(step)
            if checkpoint.session is not None and checkpoint.mark is not None:
                self.is_done = True
                place = checkpoint.session, checkpoint.mark
                self._journal.rewind(*place, step, checkpoint.time, self._began_at)
            elif checkpoint.time is not None:
                self.is_done = True
                self._journal.mark_resume(step, checkpoint.time, self._began_at)
            else:
                self._replace_if_clear(step)

    def follow_end(self) -> None:
        """Training begins, and does not say where it continues: it adds to what is there."""
        with self._lock:
            self.has_begun = True
            self.is_done = not self._looks_left

    def before(self, row: Mapping[str, float], step: int) -> None:
        """Takes note of a row that will be written next."""
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
        """Says once that an earlier session logged the same, if the loop has not said where it begins."""
        if self._last_step is None:
            rows = last_rows(self._run_dir, 1, self._rank)
            self._last_step = -1 if not rows or rows[0].step is None else rows[0].step
        if step > self._last_step:
            # Where training has begun, it goes on behind all that is there.
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
        """Decides now: no more rows will come."""
        with self._lock:
            if self._step is not None and not self.is_done:
                self._replace(self._step)

    def _replace_if_clear(self, step: int) -> None:
        """Replaces at once where every metric of the step was logged again, or there was none."""
        again = self._again(step)
        if all(name in again for row in self._of_step(step) for name in row.metrics):
            self._replace(step)

    def _replace(self, step: int) -> None:
        """Marks the rows of later steps, and of this one the metrics that were logged again."""
        self.is_done = True
        again, earlier = self._again(step), self._of_step(step)
        if again.isdisjoint(name for row in earlier for name in row.metrics):
            # Of the step itself, none was logged later.
            self._journal.mark_resume(step, float("inf"), self._began_at)
        else:
            self._journal.mark_resume(step, None, self._began_at)
            for row in earlier:
                kept = {name: value for name, value in row.metrics.items() if name not in again}
                if kept:
                    self._journal.append_again(attrs.evolve(row, metrics=kept))

    def _again(self, step: int) -> set[str]:
        """Returns the metrics that this session has logged at a step."""
        return {column_of(name) for row, at in self._rows if at == step for name in row}

    def _of_step(self, step: int) -> list[MetricRow]:
        """Returns the rows of a step from earlier sessions; none where they cannot be read: they stay."""
        if self._earlier is None:
            found: list[MetricRow] = []
            with contextlib.suppress(OSError):
                found = rows_of_step(self._run_dir, self._rank, step)
            self._earlier = [row for row in found if row.time is None or row.time < self._began_at]
        return self._earlier


def rows_of_step(run_dir: Path, rank: int, step: int) -> list[MetricRow]:
    """Returns the rows of a step; of other rows no cell is parsed."""
    found: list[MetricRow] = []
    with take_snapshot(run_dir, rank) as snapshot:
        for file, index in indexed_files(snapshot, ()):
            if isinstance(file, ParquetSnapshot) and index is not None:
                may = (index.of_rows("min_step") <= step) & (step <= index.of_rows("max_step"))
                found += itertools.chain.from_iterable(file.rows(*span) for span in index.spans(may))
            else:
                rows = _lines_of(file, step) if file.is_own else file.rows()
                found += (row for row in rows if keeps(file.limits, row))
        found += snapshot.journal_rows()
    return [row for row in found if row.step == step]


def _lines_of(file: CsvSnapshot, step: int) -> Iterator[MetricRow]:
    """Yields the rows of a step of a file that our writer made: its lines begin with the step."""
    mark = b"\n%d," % step
    for chunk in file.chunks():
        text, at = b"\n" + chunk, 0
        while (at := text.find(mark, at)) >= 0:
            end = text.find(b"\n", at + 1)
            yield from parse_rows(parse_header(file.header), [text[at + 1 : end + 1 or None]])
            at += 1
