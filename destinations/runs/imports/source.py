"""What a source of runs declares, and what it hands over: values, records and files, with steps and times."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from destinations.kinds.kind import Kind
from destinations.runs.errors import RunsError
from destinations.trackers.names import short_hash

from .frames import Bytes

__all__ = [
    "ColumnsError",
    "File",
    "ImportReport",
    "Item",
    "Logged",
    "Progress",
    "Restart",
    "Source",
    "SourceError",
    "SourceRun",
    "UnreadableError",
    "Values",
    "unique_id",
    "unreadable_run",
]

_MAX_FAILURES = 100

Progress = Callable[[int, int, int], object]
"""Called with how many runs are done, how many there are, and how many values and records are new."""


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


@attrs.frozen
class Values:
    """Metrics that were logged at a step; a source may hand them over one by one."""

    metrics: Mapping[str, float]
    step: int
    time: float | None = None
    epoch: float | None = None


@attrs.frozen
class Logged:
    """A record of a kind.

    Attributes:
        kind: its declaration.
        name: of the record.
        step: of the call.
        time: in seconds since 1970.
        arguments: the others of `Kind.method`, by name.
    """

    kind: Kind
    name: str
    step: int
    time: float | None
    arguments: Mapping[str, Any]


@attrs.frozen
class File:
    """A file of the run, which is copied to its artifacts."""

    name: str
    path: Path
    time: float | None = None


@attrs.frozen
class Restart:
    """The run went back to a step: rows of this step and later ones that came before are abandoned."""

    step: int


Item = Values | Logged | File | Restart


@attrs.define
class SourceRun:
    """A run of a source.

    `read` may set what it learns on the way: how the run ended, and what follows after that.

    Attributes:
        run_id: its id; see `unique_id`.
        name: its name there, from which that of the folder is made.
        identity: tells it from every other run of any place, so that it is found again.
        stamp: another one whenever anything in the run has changed, such as the sizes of its files; or what
            returns it, where that takes long.
        read: returns what is in it, in the order of time within a step; takes this object.
        created_at: in seconds since 1970.
        ended_at: the same; None for the last time that was handed over.
        status: "completed", "failed", "interrupted" or "stopped"; "" where the source does not say how it
            ended.
        exception: what ended it, "Type: message".
        tags: its tags.
        notes: its notes.
        hyperparameters: as logged, nested.
        environment: host, program and the like, as the source has them.
        facts: takes this object, and sets what `read` need not go through everything for; called first, where
            the run is to be written.
        left_out: how much there is that a run folder does not hold, by what it is.
        lost: how much could not be read, by what it is ("unreadable images"): each is a failure.
        seen: how many bytes there are, and how many were read, where the source is made of files.
    """

    run_id: str
    name: str
    identity: str
    stamp: str | Callable[[], str]
    read: "Callable[[SourceRun], Iterator[Item]]" = attrs.field(repr=False)
    created_at: float = 0.0
    ended_at: float | None = None
    status: str = ""
    exception: str = ""
    tags: tuple[str, ...] = ()
    notes: str = ""
    hyperparameters: dict[str, Any] = attrs.field(factory=dict)
    environment: dict[str, Any] = attrs.field(factory=dict)
    facts: "Callable[[SourceRun], object]" = attrs.field(default=lambda _run: None, repr=False)
    left_out: Counter[str] = attrs.field(factory=Counter)
    lost: Counter[str] = attrs.field(factory=Counter)
    seen: Bytes = attrs.field(factory=Bytes)


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


@attrs.define
class ImportReport:
    r"""Result of an import.

    ```python
    from destinations.runs.imports import import_runs

    Path("history.csv").write_text("step,loss,word\n0,0.5,a\n1,0.25,b\n")
    report = import_runs("history.csv", "imported")
    print(report.rows, dict(report.left_out))  # 2 {'cells that are no numbers': 2}
    ```

    Attributes:
        runs: how many were written.
        unchanged: how many were there already, and have not changed.
        busy: how many another process was importing, to which they were left.
        rows: rows of metrics.
        values: values in these rows.
        records: other records and files, by kind.
        left_out: what a run folder does not hold, by what it is.
        seen: how many bytes the files of these runs have, and how many of them were read.
        failures: a message for each run or record that could not be read or written; at most 100.
        failure_count: how many there were.
    """

    runs: int = 0
    unchanged: int = 0
    busy: int = 0
    rows: int = 0
    values: int = 0
    records: Counter[str] = attrs.field(factory=Counter)
    left_out: Counter[str] = attrs.field(factory=Counter)
    seen: Bytes = attrs.field(factory=Bytes)
    failures: list[str] = attrs.field(factory=list)
    failure_count: int = 0

    def count(self, item: Item) -> int:
        """Adds an item that was written; returns how many values or records it is."""
        if isinstance(item, Values):
            self.rows += 1
            self.values += len(item.metrics)
            return len(item.metrics)
        if not isinstance(item, Restart):
            self.records["artifact" if isinstance(item, File) else item.kind.name] += 1
        return 1

    def fail(self, text: str, count: int = 1) -> None:
        """Adds a failure."""
        self.failure_count += count
        if len(self.failures) < _MAX_FAILURES:
            self.failures.append(text)


@attrs.frozen
class Source:
    """A kind of source. Its package is imported when runs are read.

    Attributes:
        name: of the source, for `--from`.
        place: what is given as SOURCE, for the help.
        claims: says whether something of this kind is at a place; imports nothing.
        runs: returns the runs at a place, given the names of columns by what they hold. Raises `SourceError`
            or `ImportError`.
        copy: copies the runs at a place into a root by itself, instead of `runs`.
    """

    name: str
    place: str
    claims: Callable[[str], bool]
    runs: Callable[[str, Mapping[str, str]], Sequence[SourceRun]] = lambda _place, _columns: ()
    copy: Callable[[str, Path, ImportReport, Progress], None] | None = None
