"""How a command runs: it gets its options, the runs it asks for and a screen; its errors become a message and an exit code."""

import argparse
import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from destinations.runs import (
    DatasetError,
    FilterError,
    RootError,
    Run,
    RunNotFoundError,
    Runs,
    RunsError,
    open_runs,
)

from .screen import NotesHandler, Session

__all__ = [
    "EXIT_FAILED",
    "EXIT_OK",
    "EXIT_TIMEOUT",
    "EXIT_USAGE",
    "Command",
    "UsageError",
    "find_runs",
    "left_out_if_damaged",
    "open_selected",
    "roots_of",
    "run_command",
]

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TIMEOUT = 124

_MOST_PROBLEMS = 5

Command = Callable[[argparse.Namespace, Session], int]


class UsageError(RunsError):
    """A command cannot be meant as it was written."""


def run_command(command: Command, options: argparse.Namespace, session: Session | None) -> int:
    """Runs a command; returns its exit code."""
    session = Session() if session is None else session
    log, handler = logging.getLogger("destinations"), NotesHandler(session)
    log.addHandler(handler)
    try:
        return command(options, session)
    except (UsageError, FilterError, RootError, DatasetError) as error:
        # The text is about what the user wrote, with the place below it.
        for line in str(error).split("\n"):
            session.note(line)
        return EXIT_FAILED if isinstance(error, DatasetError) else EXIT_USAGE
    except BrokenPipeError:
        raise
    except (RunsError, ImportError, OSError, ValueError) as error:
        session.note(str(error))
    finally:
        log.removeHandler(handler)
    return EXIT_FAILED


def roots_of(options: argparse.Namespace, session: Session) -> list[str]:
    """Returns the roots that were asked for, else those of `DESTINATIONS_ROOT`, else `runs`."""
    if options.root:
        return list(options.root)
    # A colon before two slashes is part of a URI.
    given = session.environment.get("DESTINATIONS_ROOT", "")
    named = [part for part in re.split(rf"{os.pathsep}(?!//)", given) if part]
    if named:
        return named
    if not Path("runs").is_dir():
        raise UsageError(
            "root must be a folder of runs, got no folder 'runs' here. Give --root FOLDER, or set DESTINATIONS_ROOT."
        )
    return ["runs"]


def open_selected(options: argparse.Namespace, session: Session) -> Runs:
    """Opens the runs below the roots; says beside the results what the scan could not read."""
    runs = open_runs(*roots_of(options, session), clock=session.clock)
    problems = runs.report.problems
    for path, problem in problems[:_MOST_PROBLEMS]:
        session.note(f"{path}: {problem}")
    if len(problems) > _MOST_PROBLEMS:
        session.note(f"and {len(problems) - _MOST_PROBLEMS} more: destinations runs scan lists them")
    return runs


@contextlib.contextmanager
def left_out_if_damaged(run: Run, session: Session) -> Iterator[None]:
    """Keeps one run that cannot be read from ending a command over many; says which, and why."""
    try:
        yield
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001  # the other runs are wanted, whatever is wrong with this one
        session.note(f"run {run.run_id} in {run.path} is left out: {error}")


def find_runs(names: Sequence[str], options: argparse.Namespace, session: Session) -> list[Run]:
    """Returns runs by what a user calls them; where all are paths of run folders, nothing else is looked at.

    Raises:
        RunNotFoundError: there is none of that name.
        AmbiguousRunError: there are several.
    """
    opened = [_at_path(name) for name in names]
    if all(run is not None for run in opened):
        return [run for run in opened if run is not None]
    with open_selected(options, session) as runs:
        return [runs[name] if run is None else run for name, run in zip(names, opened, strict=True)]


def _at_path(name: str) -> Run | None:
    if os.sep not in name:
        return None
    try:
        return Run.open(name)
    except RunNotFoundError:
        return None
