"""A fork: a run that begins with what another run, its parent, had logged up to a place.

The fork's first session `follows` a session of the parent; nothing is copied. Readers of rows or records get
a run's parents here, and read what each parent's chain allows.

A fork stores the relative path and the id of its parent. If the parent was moved, deleted or replaced by
another run, readers report it and show only the fork's own rows and records.
"""

import contextlib
import logging
import os
from pathlib import Path

import attrs

from destinations.run_directory.layout import SIDECAR, NewerFormatError, check_format, writer_of, writer_path
from uploads.disk import read_json, read_regular

from .chain import Chain, Follows, chain_of
from .sessions import SESSIONS, read_sessions

__all__ = ["Parent", "find_parents", "forks_of", "lineage", "parents_of"]

_log = logging.getLogger("destinations")

_MOST = 100
# Each problem is logged once.
_said: set[str] = set()


@attrs.frozen
class Parent:
    """A run that another one was forked from.

    Attributes:
        path: the folder of the parent.
        follows: where the fork continues it.
        chain: the parent's sessions up to there.
        problem: why the parent can't be read, or "".
    """

    path: Path
    follows: Follows
    chain: Chain = attrs.field(repr=False, eq=False)
    problem: str = ""

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.path.name

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self.follows.run_id or ""

    def __str__(self) -> str:
        step = self.follows.step
        place = f"{self.name} at {'its end' if step is None else f'ba{step}'}"
        return f"{place}, which cannot be read: {self.problem}" if self.problem else place


def find_parents(run_dir: Path, end: str | None = None, *, of: Chain | None = None) -> list[Parent]:
    """Returns the parent of a run, its grandparent, and so on; the last one may be unreadable.

    Args:
        run_dir: the folder of the run.
        end: the id of the last session to read. Default: the newest.
        of: the run's sessions, if they are known.

    Raises:
        OSError: the run's sessions can't be read.
    """
    try:
        # Few runs are forks, and this runs at each look at rows.
        if of is None and b'"run_id"' not in read_regular(run_dir / SESSIONS):
            return []
        follows = (Chain(read_sessions(run_dir), end) if of is None else of).origin
    except (FileNotFoundError, NotADirectoryError):
        return []
    found: list[Parent] = []
    folder = run_dir
    while follows is not None and not (found and found[-1].problem):
        # The path is relative to the folder itself, not to a link to it.
        found.append(_read(Path(os.path.realpath(folder), follows.run or ""), follows, len(found)))
        folder, follows = found[-1].path, found[-1].chain.origin
    return found


def _read(folder: Path, follows: Follows, depth: int) -> Parent:
    try:
        folder = folder.resolve()
        problem = _problem(folder, follows) if depth < _MOST else f"it has more than {_MOST} parents"
        if not problem:
            return Parent(folder, follows, Chain(read_sessions(folder), follows))
    except (OSError, ValueError, NewerFormatError) as error:
        problem = str(error)
    return Parent(folder, follows, Chain(()), problem)


def _problem(folder: Path, follows: Follows) -> str:
    run_id = read_json(folder / SIDECAR).get("run_id")
    if run_id is None:
        return f"it is not at {folder} any more"
    if run_id != follows.run_id:
        return f"another run is at {folder}"
    check_format(folder)
    if all(line.get("session") != follows.session for line in read_sessions(folder)):
        return f"{folder} has no session {follows.session}"
    return ""


def parents_of(run_dir: Path, end: str | None = None) -> list[Parent]:
    """Returns the readable parents of a run, see `find_parents`; logs an unreadable one once.

    A fork's named writer follows the writer of that name in each parent, by steps, as it has no checkpoints.
    """
    problem = ""
    try:
        found = find_parents(run_dir, end)
        if not found and (writer := writer_of(run_dir)):
            return [_of_writer(parent, writer) for parent in parents_of(run_dir.parents[1])]
    except OSError as error:
        found, problem = [], f"sessions of run {run_dir} cannot be read: {error}"
    if found and found[-1].problem:
        problem = f"run {run_dir} was forked from {found.pop()}. Its rows and records are left out"
    if problem and problem not in _said:
        _said.add(problem)
        _log.warning("%s.", problem)
    return found


def _of_writer(parent: Parent, writer: str) -> Parent:
    folder, step = writer_path(parent.path, writer), parent.follows.step
    lines = read_sessions(folder)
    ends = (parent.follows.before, None if step is None else step + 1)
    before = min((one for one in ends if one is not None), default=None)
    end = Follows(str(lines[-1].get("session")), before=before) if lines else None
    return attrs.evolve(parent, path=folder, chain=Chain(lines, end))


def forks_of(run_dir: Path, run_id: str) -> list[str]:
    """Returns the names of neighboring runs that were forked from a run."""
    found = []
    for path in sorted(run_dir.parent.glob(f"*/{SESSIONS}")):
        with contextlib.suppress(OSError):
            if run_id.encode() in read_regular(path):
                parents = find_parents(path.parent)[:1]
                found += [path.parent.name for one in parents if one.run_id == run_id and not one.problem]
    return found


def lineage(run_dir: Path, end: str | None = None) -> list[tuple[Path, Chain]]:
    """Returns the folders with records of a run, oldest first, each with the sessions that count."""
    parents = [(one.path, one.chain) for one in reversed(parents_of(run_dir, end))]
    return [*parents, (run_dir, chain_of(run_dir, end))]
