"""Finds the place that `RunDirectory(..., fork_from="digits@ba120")` names.

If the parent saved a checkpoint at this step, the place is exact: a number of rows and records of a session,
whatever their steps. Otherwise the place is the step, and everything logged before it belongs to the fork.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from destinations.history.chain import Chain, Follows
from destinations.history.fork import parents_of
from destinations.history.sessions import CHECKPOINTS, read_lines, read_sessions, session_path
from uploads.disk import is_locked, read_json

from .folder import RunPathError
from .layout import SIDECAR, lock_name

__all__ = ["fork_place"]

_PLACE = re.compile(r"(?:ep\d+-)?(?:ba)?(\d{1,15})(?:\.\w+)?", re.ASCII)


def fork_place(given: str, run_dir: Path, *, loads: bool) -> Follows:
    """Returns where a new run follows another one.

    Args:
        given: the run, a path or the name of a folder beside the new one; then "@" and a step, "ba" and a
            step, or the name of a checkpoint that has one. Default: its end.
        run_dir: the folder of the new run.
        loads: whether a checkpoint will be loaded, which determines the place if none is given.

    Raises:
        RunPathError: the run doesn't exist, or it is being written and no place is given.
    """
    name, step = _split(given)
    beside = run_dir.parent / name
    folder = next((one for one in (beside, Path(name).expanduser()) if (one / SIDECAR).is_file()), None)
    if folder is None:
        raise RunPathError(f"fork_from={given!r} names no run: there is none at {str(beside)!r}.")
    found = _Parent(folder)
    if step is None:
        if not loads and is_locked(folder / lock_name(0)):
            raise RunPathError(
                f"run {folder} is being written: say where it is forked, as in fork_from='{name}@ba120'. "
                f"It has checkpoints at {found.steps() or 'no step'}."
            )
        return found.place(run_dir, {})
    for parent in (found, *(map(_Parent, (one.path for one in parents_of(folder))))):
        for checkpoint in parent.checkpoints():
            if checkpoint.get("step") == step:
                return parent.place(run_dir, checkpoint)
    return found.place(run_dir, {"step": step, "before": step})


def _split(given: str) -> tuple[str, int | None]:
    name, _, at = given.rpartition("@")
    match = _PLACE.fullmatch(at)
    return (name, int(match[1])) if name and match else (given, None)


class _Parent:
    """The parent of a fork.

    Args:
        folder: the folder of the run.

    Raises:
        RunPathError: the run can't be forked.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        run_id = read_json(folder / SIDECAR).get("run_id")
        lines = read_sessions(folder)
        if not run_id or not lines or "follows" not in lines[-1]:
            raise RunPathError(
                f"run {folder} cannot be forked: an earlier version wrote it. Continue it first."
            )
        self._run_id = str(run_id)
        self._lines = {str(line.get("session")): line for line in lines}
        self._chain = Chain(lines)

    def checkpoints(self) -> list[Mapping[str, Any]]:
        """Returns the checkpoints, newest first; the run's own precede checkpoints of its branches."""
        own: list[Mapping[str, Any]] = []
        left: list[Mapping[str, Any]] = []
        others = [one for one in reversed(self._lines) if one not in self._chain.sessions]
        for session in [*self._chain.sessions, *others]:
            count = self._chain.records_of(session)
            try:
                path = session_path(self._folder, self._lines[session], CHECKPOINTS)
                found = read_lines(path.parent, path.name)[0]
            except (OSError, ValueError):
                continue
            for line in reversed(found):
                belongs = count is None or int(line.get("records") or 0) <= count
                (own if belongs else left).append({**line, "session": session})
        return own + left

    def steps(self) -> str:
        """Returns the steps of the checkpoints, for messages."""
        steps = sorted({str(one["step"]) for one in self.checkpoints() if "step" in one}, key=int)
        return ", ".join(f"ba{step}" for step in steps)

    def place(self, run_dir: Path, at: Mapping[str, Any]) -> Follows:
        """Returns where a fork in a folder follows this run."""
        return Follows(
            at.get("session", self._chain.sessions[0]),
            at.get("records"),
            at.get("step"),
            os.path.relpath(os.path.realpath(self._folder), os.path.realpath(run_dir)),
            self._run_id,
            at.get("mark"),
            at.get("time"),
            at.get("before"),
        )
