"""`run_folder`: where callbacks put files of their own, beside those of the run."""

from pathlib import Path

from events.names import format_run_name
from events.state import State

__all__ = ["run_folder"]


def run_folder(state: State) -> Path | None:
    """Returns the folder of the run's `RunDirectory`, from `INIT` on; None without one.

    ```python
    folder = run_folder(state)
    ```

    Also on a rank that does not write to it itself.

    Args:
        state: the run.
    """
    for one in state.callbacks:
        run_dir = getattr(one, "run_dir", None)
        if isinstance(run_dir, Path):
            return run_dir
        given = getattr(one, "template", None)
        if isinstance(given, str) and hasattr(one, "run_dir"):
            return Path(format_run_name(given, state)).absolute()
    return None
