"""`replay`: logs the content of a run folder to a destination again.

Everything is logged in order of time with its original steps: metrics, hyperparameters, tables, images with
masks, audio, video, histograms, texts, traces, point clouds and files. A `RecordClock` gives the destination
the original times.

Runs in the calling thread and blocks until everything is logged.
"""

import time
from collections.abc import Callable
from typing import Any

from destinations.runs.move.ledger import ReadPosition
from destinations.runs.move.sink import DestinationSink, MakeDestination, RecordClock
from destinations.runs.move.stored import RewoundError, StoredRun
from destinations.runs.move.stream import MoveReport
from destinations.runs.record import is_alive
from destinations.runs.run import RecordedRun

__all__ = ["RecordClock", "RewoundError", "replay"]

# Between two readings while following; longer if reading takes long.
_INTERVAL_SECONDS = 1.0
# Largest share of the time spent reading while following.
_SHARE_OF_READING = 0.1


def replay(
    run: RecordedRun,
    destination: Any,
    *,
    clock: RecordClock | None = None,
    position: ReadPosition | None = None,
    follow: bool = False,
    make: MakeDestination | None = None,
    wait: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> MoveReport:
    """Logs the content of a run to a destination, from `init` to `post_close`.

    The destination must be new or closed. To give it the original times, pass it a `RecordClock`, and the
    same one here.

    A live run that is not followed ends as "preempted"; a killed run ends as "failed". `DestinationSink`
    explains how metrics of other ranks and named writers are named.

    Args:
        run: the run to replay.
        destination: the destination to log to.
        clock: the clock of the destination.
        position: where to start, updated in place. Default: the beginning.
        follow: keep replaying until the run ends.
        make: makes a destination for another rank or a named writer, which then keeps its own names.
        wait: sleeps for a number of seconds.
        now: returns the time in seconds since 1970.

    Returns:
        The report.

    Raises:
        RewoundError: training resumed from an earlier step, so some rows that were already logged are no
            longer part of the run. Only with a position or `follow`.
        BaseException: `init` or `close` of the destination raised it, or Ctrl-C was pressed. The destination
            is closed.
    """
    report = MoveReport(runs=1, position=ReadPosition() if position is None else position)
    stored = StoredRun(run, report.position)
    with DestinationSink(stored.source, destination, clock or RecordClock(), report, make) as sink:
        while True:
            started_at = now()
            # Checked before reading, so that the last records of a run that just ended are read.
            alive = _is_written(stored.run, started_at)
            stored.settled_at = started_at if alive and follow else None
            sink.take(stored.source.read(stored.source))
            if not alive or not follow:
                report.is_over = not alive
                break
            sink.flush()
            try:
                wait(max(_INTERVAL_SECONDS, (now() - started_at) / _SHARE_OF_READING))
            except KeyboardInterrupt:
                report.was_interrupted = True
                break
            stored.refresh()
        stored.is_over = report.is_over
        stored.refresh()
        report.add(stored.source)
    return report


def _is_written(run: RecordedRun, now: float) -> bool:
    """Returns whether the trainer of a run, or one of its writers, is alive."""
    records = (one.record for one in (run, *run.writer_runs()))
    return any(is_alive(record.status, record.heartbeat_at, now) for record in records)
