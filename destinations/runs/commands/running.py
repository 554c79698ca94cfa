"""Runs a command: finds its runs, and turns errors into a message and an exit code."""

import argparse
import contextlib
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from destinations.runs import (
    DatasetError,
    FilterError,
    RecordedRun,
    RootError,
    RunNotFoundError,
    Runs,
    RunsError,
    open_runs,
)
from destinations.runs.errors import near_names, suggestion
from destinations.runs.views import RunView, read_views

from .screen import CommandContext, NotesHandler

__all__ = [
    "EXIT_FAILED",
    "EXIT_INCOMPLETE",
    "EXIT_OK",
    "EXIT_TIMEOUT",
    "EXIT_USAGE",
    "Command",
    "UsageError",
    "at_path",
    "find_runs",
    "given_roots",
    "open_selected",
    "roots_of",
    "run_command",
    "view_of",
]

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INCOMPLETE = 3
EXIT_TIMEOUT = 124

_MAX_PROBLEMS = 5

Command = Callable[[argparse.Namespace, CommandContext], int | None]
"""Returns an exit code; None for success."""


class UsageError(RunsError):
    """Invalid command-line arguments."""


def run_command(command: Command, options: argparse.Namespace, session: CommandContext | None) -> int:
    """Runs a command and returns its exit code; errors are written to `session.errors`."""
    session = CommandContext() if session is None else session
    log, handler = logging.getLogger("destinations"), NotesHandler(session)
    log.addHandler(handler)
    try:
        return command(options, session) or EXIT_OK
    except (UsageError, FilterError, RootError, DatasetError) as error:
        # The message quotes the input, with a marker in the line below.
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


def roots_of(options: argparse.Namespace, session: CommandContext) -> list[str]:
    """Returns the roots from `--root`, or else from `DESTINATIONS_ROOT`, or else `runs`."""
    if roots := given_roots(options, session):
        return roots
    if not Path("runs").is_dir():
        raise UsageError("no folder 'runs' here. Give --root FOLDER, or set DESTINATIONS_ROOT.")
    return ["runs"]


def given_roots(options: argparse.Namespace, session: CommandContext) -> list[str]:
    """Returns the roots from `--root`, or else from `DESTINATIONS_ROOT`."""
    # `--root` may stand before the command and after it.
    before, here = (getattr(options, name, None) or () for name in ("roots_before", "place"))
    if roots := [*before, *(options.root or ()), *here]:
        return roots
    # A colon before two slashes is part of a URI.
    given = session.environment.get("DESTINATIONS_ROOT", "")
    return [part for part in re.split(rf"{os.pathsep}(?!//)", given) if part]


def view_of(name: str, runs: Runs) -> dict[str, Any]:
    """Returns the fields of a saved view.

    Raises:
        UsageError: no root has such a view.
    """
    views = {key: fields for root in reversed(runs.roots) for key, fields in read_views(root).items()}
    if name not in views:
        offer = suggestion(near_names(name, views) or tuple(views)[:5])
        raise UsageError(f"no view is called {name!r}.{offer} Views are saved on the page of the runs.")
    return views[name]


def _take_view(options: argparse.Namespace, runs: Runs) -> None:
    """Adds a saved view to the options. Given options take precedence, and filters are combined."""
    view = RunView.parse(view_of(options.view, runs))
    options.where = view.filter(options.where or "")
    options.archived = options.archived or view.archived is not False
    # Only the page has columns of the smallest and the largest value.
    columns = [name for name in view.column if not name.startswith(("min.", "max."))]
    if getattr(options, "columns", "") is None and columns:
        options.columns = ",".join(columns)
    if getattr(options, "sort", "") is None and view.sort and not view.sort_by.startswith(("min.", "max.")):
        options.sort = view.sort_by
        options.descending = view.descending if options.descending is None else options.descending


def open_selected(options: argparse.Namespace, session: CommandContext) -> Runs:
    """Opens the runs below the roots, with a message for each folder that could not be read."""
    with contextlib.ExitStack() as opened:
        runs = opened.enter_context(open_runs(*roots_of(options, session), clock=session.clock))
        if getattr(options, "view", None) is not None:
            _take_view(options, runs)
        problems = list(dict.fromkeys((*runs.report.unlisted, *runs.report.problems)))
        for path, problem in problems[:_MAX_PROBLEMS]:
            session.note(f"{path}: {problem}")
        if len(problems) > _MAX_PROBLEMS:
            session.note(f"and {len(problems) - _MAX_PROBLEMS} more; list them with: destinations runs scan")
        opened.pop_all()
    return runs


def find_runs(
    names: Sequence[str], options: argparse.Namespace, session: CommandContext
) -> list[RecordedRun]:
    """Returns runs by id, id prefix, name or path; if all are paths of run folders, no root is scanned.

    With `--branch`, each is shown at the end of that session.

    Raises:
        RunNotFoundError: no run matches.
        AmbiguousRunError: several runs match.
    """
    opened = [at_path(name) for name in names]
    found = [run for run in opened if run is not None]
    if len(found) < len(names):
        with open_selected(options, session) as runs:
            found = [runs[name] if run is None else run for name, run in zip(names, opened, strict=True)]
    branch = getattr(options, "branch", None)
    return found if branch is None else [run.branch(branch) for run in found]


def at_path(name: str) -> RecordedRun | None:
    """Returns the run at a path with a "/", or at a URI, or None."""
    if "://" in name:
        with open_runs(name) as runs:
            found = runs.query(archived=None)
        return found[0] if len(found) == 1 else None
    if os.sep not in name:
        return None
    try:
        return RecordedRun.open(name)
    except RunNotFoundError:
        return None
