"""Whether a folder can hold a run, asked before anything is made."""

import os
from pathlib import Path

from .errors import RunExistsError, RunPathError
from .rank_writer import existing_run

__all__ = ["check_new", "check_path"]


def check_new(run_dir: Path, rank: int) -> None:
    """Refuses a folder that holds a run."""
    if existing_run(run_dir, rank):
        raise RunExistsError(
            f'run folder {str(run_dir)!r} must be new with resume="never", got one that holds a run. '
            "Choose another folder, or leave resume out to continue the run."
        )


def check_path(path: Path) -> None:
    """Refuses a path that no folder can be at, without making one."""
    for folder in (path, *path.absolute().parents):
        if folder.is_dir():
            if not os.access(folder, os.W_OK | os.X_OK):
                raise RunPathError(
                    f"run folder must be one that can be written to, got {str(path)!r}: no right to write to {folder}."
                )
            return
        if os.path.lexists(folder):
            raise RunPathError(f"run folder must be a folder, got {str(path)!r}: {folder} is a file.")
