"""`LoadCheckpoint`: loads the weights of a checkpoint when a run begins, as a callback."""

from collections.abc import Sequence
from pathlib import Path

from events.callback import Callback
from events.logger.logger import Logger
from events.state import State

from .contents import load_weights
from .parts import find_parts
from .reading import find_checkpoint

__all__ = ["LoadCheckpoint"]


class LoadCheckpoint(Callback):
    """Loads the weights of a checkpoint into the model, before the trainer loads its own checkpoint, if any.

    ```python
    body, head = LoadCheckpoint("body.pt", strict=False), LoadCheckpoint("head.pt", strict=False)
    Trainer(..., callbacks=[body, head])
    ```

    Use it to assemble a model from several checkpoints; for a single one, `Trainer(load_path=...,
    load_weights_only=True)` does the same. A resumed run ends up with the weights of its own checkpoint.
    Optimizers, the timestamp and the state of callbacks are not loaded.

    Args:
        load_path: a local path, a URI in a store, or a name that a destination can download; placeholders
            such as `{run_name}` are filled in.
        strict: whether the names of the weights must match the model's; otherwise missing and unexpected
            ones are logged.
        exclude: patterns, as of `fnmatch`, of weights that are not loaded.

    Raises:
        FileNotFoundError: when the trainer is made, if there is no such checkpoint.
        CheckpointError: when the trainer is made, if it is damaged or does not fit the model.
        ValueError: when the trainer is made, if a pattern matches no weight.
    """

    def __init__(self, load_path: str | Path, *, strict: bool = True, exclude: Sequence[str] = ()) -> None:
        super().__init__()
        if isinstance(exclude, str):
            raise TypeError(f"exclude must be a list of patterns, got {exclude!r}. Write [{exclude!r}].")
        self._load_path = load_path
        self._strict = strict
        self._exclude = tuple(exclude)

    def before_load(self, state: State, logger: Logger) -> None:
        """Loads the weights."""
        find_parts(state, logger)
        found = find_checkpoint(self._load_path, state, logger)
        if found is not None:
            load_weights(found[0]["model"], state, strict=self._strict, exclude=self._exclude)
