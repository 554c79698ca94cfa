"""`WriterState`: the state of each named writer of a run. Importing this module imports numpy."""

import attrs

from destinations.runs.errors import RunsError
from destinations.runs.record import is_alive, status_of
from destinations.runs.run import RecordedRun
from destinations.runs.streams import Stream, reported

from .series import count_rows

__all__ = ["WriterState", "writer_states"]


@attrs.frozen
class WriterState:
    """The state of a named writer of a run.

    Attributes:
        name: the name of the writer.
        status: the status as shown; "unknown" if it hasn't written anything yet.
        is_alive: whether it hasn't ended and its heartbeat is fresh.
        rows: the number of rows of its rank 0; None if they can't be read.
        seen_at: its last sign of life, in seconds since 1970; None if unknown.
    """

    name: str
    status: str = "unknown"
    is_alive: bool = False
    rows: int | None = None
    seen_at: float | None = None


def writer_states(run: RecordedRun, now: float) -> list[WriterState]:
    """Returns the state of each writer of a run, by name.

    Args:
        run: the run.
        now: seconds since 1970.
    """
    return [_state_of(run, Stream(run.path, name), now) for name in run.writers]


def _state_of(run: RecordedRun, stream: Stream, now: float) -> WriterState:
    state = WriterState(stream.writer)
    with reported(stream):
        state = attrs.evolve(state, rows=count_rows(stream.folder))
    try:
        record = run.writer(stream.writer).record
    except RunsError:
        return state
    alive = is_alive(record.status, record.heartbeat_at, now)
    return attrs.evolve(state, status=status_of(record, now), is_alive=alive, seen_at=record.heartbeat_at)
