"""Measures the core destinations in the training thread: a call of `log_metrics`, and the end of a batch."""

import contextlib
import io
import tempfile
import timeit

from destinations import Console, InMemory, LoggerDestination, ProgressBar, TextFile
from destinations.testing import DryRun

from .timing import Row, print_table

_CALLS = 20_000
_REPEATS = 7
_METRICS = {f"loss/{index}": 0.1 * index for index in range(10)}


def _microseconds(act):
    """Returns the best mean of a call; the noise of a machine only adds."""
    return min(timeit.repeat(act, number=_CALLS, repeat=_REPEATS)) / _CALLS * 1e6


def _measure(destination):
    """Returns microseconds of log_metrics and of a batch's end, between two blocks or draws."""
    run = DryRun(destination, max_duration="1000000ba", run_name=type(destination).__name__)
    run.init()
    run.fire("fit_start", "epoch_start", "batch_start")
    call = _microseconds(lambda: destination.log_metrics(_METRICS, 3))
    step = _microseconds(lambda: run.engine.run_event("batch_end"))
    run.close()
    return call, step


def main():
    """Prints a row for each destination."""
    destinations = [
        LoggerDestination(),
        Console("1000000ba", io.StringIO()),
        InMemory(),
        ProgressBar(stream=io.StringIO()),
        TextFile("log.txt", max_pending_records=1_000_000),
    ]
    rows = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for destination in destinations:
            call, step = _measure(destination)
            name = type(destination).__name__
            rows += [Row(f"{name}, log_metrics", call), Row(f"{name}, batch_end", step)]
    print_table("In the training thread, ten metrics a call", rows)


if __name__ == "__main__":
    main()
