"""What a source of runs declares, and the ids of its runs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs

from destinations.runs.errors import RunsError
from destinations.runs.move.stream import SourceRun
from destinations.trackers.names import short_hash


class SourceError(RunsError):
    """No runs can be read from this place."""


class UnreadableError(SourceError):
    """What is there is damaged."""


class ColumnsError(SourceError):
    """It must be said which column of a table holds the step.

    Args:
        place: the table.
        columns: those that it has.
    """

    def __init__(self, place: str, columns: Sequence[str]) -> None:
        self.columns = tuple(columns)
        names = ", ".join(map(repr, columns[:20])) + ("" if len(columns) <= 20 else ", …")  # noqa: PLR2004
        super().__init__(
            f"{place} has no column 'step'. Say which one it is: --column step=NAME, or --column step= to "
            f"count the rows. It has {names}."
        )


def unique_id(name: str, identity: str) -> str:
    """Returns the id of a run whose source has none for it that no other run has.

    The id of an imported run is, in this order:

    1. the one that its source made for it: W&B, MLflow, Trackio, Comet, Aim, Neptune, stable-pretraining;
    2. else, as here, its name and a hash of what tells it from the runs of other folders: its first event
       file, which is named after the time, host and process (TensorBoard), or the path (tables, charts,
       Lightning's `CSVLogger`).

    Where another run of the root has the id already, as a W&B run of another project may, the hash is added
    by the same rule.
    """
    return f"{name}-{short_hash(identity, 8)}"


def unreadable_run(path: Path, error: object) -> SourceRun:
    """Returns what stands for a run that is too damaged to be told from others: importing it fails."""

    def fail(_run: SourceRun) -> None:
        raise UnreadableError(str(error))

    return SourceRun(path.name, path.name, f"unreadable {path}", "", lambda _run: iter(()), facts=fail)


@attrs.frozen
class Source:
    """A kind of source. Its package is imported when runs are read.

    Attributes:
        name: of the source, for `--from`.
        place: what is given as SOURCE, for the help.
        claims: says whether something of this kind is at a place; imports nothing.
        runs: returns the runs at a place, given the names of columns by what they hold. Raises `SourceError`
            or `ImportError`.
        package: reads the runs; "" where none is needed.
    """

    name: str
    place: str
    claims: Callable[[str], bool]
    runs: Callable[[str, Mapping[str, str]], Sequence[SourceRun]]
    package: str = ""
