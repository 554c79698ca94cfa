"""The progress bar of `import` and `send`, and the report at their end."""

import contextlib
from collections.abc import Iterator

from destinations.runs.move.stream import MoveReport, Progress

from .running import EXIT_INCOMPLETE, EXIT_OK
from .screen import CommandContext


@contextlib.contextmanager
def progress_bar(session: CommandContext) -> Iterator[Progress]:
    """Yields a function that shows the number of runs, values and records in a terminal."""
    from tqdm import tqdm

    # `miniters=0` refreshes the bar even if no run was completed in between.
    is_hidden = not session.errors.isatty()
    with tqdm(unit=" runs", miniters=0, file=session.errors, disable=is_hidden) as bar:
        values = 0

        def progress(done: int, runs: int, more: int) -> None:
            nonlocal values
            values += more
            bar.total = runs
            bar.set_postfix_str(f"{values:,} values", refresh=False)
            bar.update(done - bar.n)

        yield progress


def records_text(report: MoveReport) -> str:
    """Returns the counts of records by kind, as the rest of a sentence."""
    return "".join(f", {_counted(kind, count)}" for kind, count in sorted(report.records.items()))


def say_what_is_wrong(report: MoveReport, session: CommandContext) -> int:
    """Prints omissions and failures; returns the exit code."""
    if report.busy:
        session.note(f"skipped {report.busy} runs that another process was writing")
    if report.left_out:
        what = ", ".join(_counted(kind, count) for kind, count in sorted(report.left_out.items()))
        session.note(f"left out: {what}")
    for text in (*report.missing, *report.failures):
        session.note(text)
    return EXIT_INCOMPLETE if report.failure_count else EXIT_OK


def _counted(kind: str, count: int) -> str:
    return f"{count} {kind.replace('_', ' ')}"
