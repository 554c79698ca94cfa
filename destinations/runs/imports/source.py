"""The declaration of a source, its errors, and the ids of its runs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs

from destinations.runs.errors import RunsError
from destinations.runs.move.stream import SourceRun
from destinations.trackers.names import short_hash


class SourceError(RunsError):
    """No runs can be read from the given place."""


class UnreadableError(SourceError):
    """The source is damaged."""


class ColumnsError(SourceError):
    """A table has no step column that is recognised, so the user must name one.

    Args:
        place: the table.
        columns: its columns.
    """

    def __init__(self, place: str, columns: Sequence[str]) -> None:
        self.columns = tuple(columns)
        names = ", ".join(map(repr, columns[:20])) + ("" if len(columns) <= 20 else ", …")  # noqa: PLR2004
        super().__init__(
            f"{place} has no column 'step'. Name the step column with --column step=NAME, or count the rows "
            f"with --column step=. Columns: {names}."
        )


def unique_id(name: str, identity: str) -> str:
    """Returns a unique id for a run whose source gives it none.

    The id of an imported run is:

    1. the id from its source: W&B, MLflow, Trackio, Comet, Aim, Neptune, stable-pretraining;
    2. otherwise, as here, its name and a hash of its identity: the name of its first event file, which has
       the time, host and process (TensorBoard), or its path (tables, charts, Lightning's `CSVLogger`).

    If another run of the root already has the id, as a W&B run of another project may, the hash is added in
    the same way.
    """
    return f"{name}-{short_hash(identity, 8)}"


def unreadable_run(path: Path, error: object) -> SourceRun:
    """Returns a placeholder for a run that is too damaged to identify; importing it fails."""

    def fail(_run: SourceRun) -> None:
        raise UnreadableError(str(error))

    return SourceRun(path.name, path.name, f"unreadable {path}", "", lambda _run: iter(()), facts=fail)


@attrs.frozen
class Source:
    """A source of runs. Its package is imported only when runs are read.

    Attributes:
        name: its name, for `--from`.
        place: describes SOURCE in the help.
        claims: returns whether a place has runs of this source; imports nothing.
        runs: takes a place and the names of columns by what they hold; returns the runs. Raises `SourceError`
            or `ImportError`.
        package: the package that reads the runs; "" if none is needed.
    """

    name: str
    place: str
    claims: Callable[[str], bool]
    runs: Callable[[str, Mapping[str, str]], Sequence[SourceRun]]
    package: str = ""
