"""What a scan knows of a run: plain values, nothing that is still open."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import attrs

__all__ = ["RunKind", "RunRecord", "Scalar"]

Scalar = bool | int | float | str | None

RunKind = Literal["run-directory", "stable-pretraining", "lightning-csv"]


@attrs.frozen
class RunRecord:
    """A run as it stood when its folder was last read; what the user edited is applied already.

    Times are seconds since 1970. A run of which something could not be read has a `problem` that says what, and what could be
    read; its status is "unknown" where that is not known.

    Args:
        path: the folder, absolute.
        run_id: the id that the run gave itself; of a folder without one, its path below the root.
        kind: who wrote it: `RunDirectory`, stable-pretraining's `RegistryLogger`, Lightning's `CSVLogger`.
        status: as written; a run that was killed says "running" for ever, see `liveness.is_alive`.
        created_at: when the run began.
        ended_at: when it ended.
        updated_at: when what is told here was written.
        tags: in the order in which they were given.
        notes: of the user.
        display_name: what the user calls the run.
        archived: whether the user put it away.
        hparams: hyperparameters by dotted name.
        summary: the last value of each metric; not all are finite.
        checkpoint_path: the newest checkpoint, as the run wrote it.
        heartbeat_at: the last sign of life.
        problem: what is wrong with the folder.
    """

    path: Path
    run_id: str
    kind: RunKind
    status: str
    created_at: float | None = None
    ended_at: float | None = None
    updated_at: float | None = None
    tags: tuple[str, ...] = ()
    notes: str = ""
    display_name: str | None = None
    archived: bool = False
    hparams: Mapping[str, Scalar] = attrs.field(factory=dict)
    summary: Mapping[str, float] = attrs.field(factory=dict)
    checkpoint_path: str | None = None
    heartbeat_at: float | None = None
    problem: str | None = None

    @property
    def name(self) -> str:
        """What to call the run: its display name, else the name of its folder."""
        return self.display_name or self.path.name
