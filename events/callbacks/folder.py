"""`run_folder`: the folder where callbacks put their files."""

from pathlib import Path

from events.state import State

__all__ = ["run_folder"]


def run_folder(state: State) -> Path | None:
    """Returns the folder of the run's `RunDirectory`, from `INIT` on; None without one.

    Also None until it is known whether an earlier run in it is continued: until training begins, or something
    is logged.

    ```python
    folder = run_folder(state)
    ```

    Ranks that do not write to it get it too.

    Args:
        state: the run.
    """
    for one in state.callbacks:
        if getattr(one, "is_undecided", False):
            return None
        run_dir = getattr(one, "run_dir", None)
        if isinstance(run_dir, Path):
            return run_dir
        folder_of = getattr(one, "folder_of", None)
        if folder_of is not None:
            found: Path = folder_of(state)
            return found
    return None
