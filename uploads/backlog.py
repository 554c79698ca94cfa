"""What a queue has not delivered, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from pathlib import Path

    from .outcome import Outcome

__all__ = ["Backlog"]

_NAMES_SHOWN = 20


@attrs.frozen
class Backlog:
    """What was not delivered when it was asked for.

    Attributes:
        spool: The folder that holds it.
        remaining: Names that are still on their way; `python -m uploads resume SPOOL` finishes them.
        failures: How the others ended that did not end well: in `failed/` of the spool, or never staged.
        left_behind: What earlier processes left in other default spools for the same store.
    """

    spool: Path
    remaining: tuple[str, ...]
    failures: tuple[Outcome, ...]
    left_behind: tuple[Backlog, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether everything was delivered."""
        return not (self.remaining or self.failures or self.left_behind)

    @property
    def resume_command(self) -> str:
        """What finishes the rest."""
        return f"python -m uploads resume {self.spool}"

    def __str__(self) -> str:
        lines = []
        if self.remaining:
            lines.append(
                f"{len(self.remaining)} of the submitted files are not uploaded yet: {_shorten(self.remaining)}"
            )
            lines.append(f"nothing is lost; finish with: {self.resume_command}")
        if self.failures:
            lines.append(
                f"{len(self.failures)} failed: {_shorten(tuple(f'{failure.remote_name} ({failure.state}: {failure.reason})' for failure in self.failures))}"
            )
            lines.append(f"look at them with: python -m uploads status {self.spool}")
        lines += [f"left by an earlier process: {backlog}" for backlog in self.left_behind]
        return "\n".join(lines) or "everything was uploaded"


def _shorten(names: tuple[str, ...]) -> str:
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
