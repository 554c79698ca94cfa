"""What a source yields, what it says about its run, and the loop that takes runs to a sink."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import attrs

from destinations.kinds.artifacts import ARTIFACT
from destinations.kinds.kind import Kind

from .ledger import BusyError, ReadPosition, TargetError

_MAX_MESSAGES = 100

Progress = Callable[[int, int, int], object]
"""Called with how many runs are done, how many there are, and how many values and records are new."""

Moved = TypeVar("Moved")


@attrs.frozen
class Values:
    """Metrics that were logged at a step; a source of others may hand them over one by one.

    Attributes:
        metrics: by name.
        step: None where none is known: the step of the values before counts.
        time: in seconds since 1970.
        epoch: also a part of one.
        rank: whose they are.
        writer: the named writer whose they are; "" for the trainer.
        branch: the name of the branch that training has left, if they are of one.
    """

    metrics: Mapping[str, float]
    step: int | None
    time: float | None = None
    epoch: float | None = None
    rank: int = 0
    writer: str = ""
    branch: str = ""


@attrs.frozen
class Logged:
    """A record of a kind, or a file.

    Attributes:
        kind: its declaration.
        name: of the record; "" where the kind has none.
        step: as of `Values`.
        time: in seconds since 1970.
        arguments: the others of `Kind.method`, by name; or what reads them, where that takes long. It may
            raise `FileNotFoundError`.
        writer: as of `Values`.
        size: bytes that it takes in memory, as far as they are known.
    """

    kind: Kind
    name: str
    step: int | None
    time: float | None
    arguments: Mapping[str, Any] | Callable[[], Mapping[str, Any]]
    writer: str = ""
    size: int = 0

    @classmethod
    def file(cls, name: str, path: Path, time: float | None = None) -> Self:
        """Returns the record of a file, which is copied to the artifacts of the run."""
        return cls(ARTIFACT, name, None, time, {"file_path": path})


@attrs.frozen
class Restart:
    """The run went back to a step: rows of this step and later ones that came before are abandoned."""

    step: int


Record = Values | Logged | Restart


@attrs.define
class Bytes:
    """How much of a source was there, and how much of it was read."""

    there: int = 0
    read: int = 0


@attrs.define
class SourceRun:
    """A run of a source.

    `facts` and `read` set what they learn: how the run ended, what was left out.

    Attributes:
        run_id: its id.
        name: its name there.
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
        names: returns the metrics of the trainer.
        writers: what each named writer has added to the run, as a run of its own.
        left_out: how much there is that does not come along, by what it is.
        lost: how much could not be read, by what it is ("unreadable images"): each is a failure.
        problems: a message for whatever else cannot be read: each is a failure.
        seen: how many bytes there are, and how many were read, where the source counts them.
    """

    run_id: str
    name: str
    identity: str
    stamp: str | Callable[[], str]
    read: "Callable[[SourceRun], Iterator[Record]]" = attrs.field(repr=False)
    created_at: float = 0.0
    ended_at: float | None = None
    status: str = ""
    exception: str = ""
    tags: tuple[str, ...] = ()
    notes: str = ""
    hyperparameters: dict[str, Any] = attrs.field(factory=dict)
    environment: dict[str, Any] = attrs.field(factory=dict)
    facts: "Callable[[SourceRun], object]" = attrs.field(default=lambda _run: None, repr=False)
    names: Callable[[], Sequence[str]] = attrs.field(default=tuple, repr=False)
    writers: "dict[str, SourceRun]" = attrs.field(factory=dict)
    left_out: Counter[str] = attrs.field(factory=Counter)
    lost: Counter[str] = attrs.field(factory=Counter)
    problems: list[str] = attrs.field(factory=list)
    seen: Bytes = attrs.field(factory=Bytes)


@attrs.define
class MoveReport:
    r"""What an import, a replay or a `send` did.

    ```python
    from destinations.runs.imports import import_runs

    Path("history.csv").write_text("step,loss,word\n0,0.5,a\n1,0.25,b\n")
    report = import_runs("history.csv", "imported")
    print(report.rows, dict(report.left_out))  # 2 {'cells that are no numbers': 2}
    ```

    Attributes:
        runs: how many were written.
        unchanged: how many were there already, and have not changed.
        busy: how many another process was writing, to which they were left.
        rows: rows of metrics.
        values: values in these rows.
        records: other records and files, by kind.
        left_out: what the target does not hold, by what it is.
        missing: a message for each file of a record that the run has no more.
        seen: how many bytes the files of these runs have, and how many of them were read.
        failures: a message for each run or record that could not be read or written; at most 100.
        failure_count: how many there were.
        damaged: how many of these are damage that trying again does not mend.
        position: the position that was reached in a run folder.
        is_over: the run has ended, and was sent completely.
        was_interrupted: Ctrl-C ended `follow`; everything read until then was passed on.
        on_records: called with how many values and records were written.
    """

    runs: int = 0
    unchanged: int = 0
    busy: int = 0
    rows: int = 0
    values: int = 0
    records: Counter[str] = attrs.field(factory=Counter)
    left_out: Counter[str] = attrs.field(factory=Counter)
    missing: list[str] = attrs.field(factory=list)
    seen: Bytes = attrs.field(factory=Bytes)
    failures: list[str] = attrs.field(factory=list)
    failure_count: int = 0
    damaged: int = 0
    position: ReadPosition = attrs.field(factory=ReadPosition)
    is_over: bool = False
    was_interrupted: bool = False
    on_records: Callable[[int], object] = attrs.field(default=lambda _count: None, repr=False, eq=False)

    def count(self, record: Record) -> None:
        """Adds a record that was written."""
        if isinstance(record, Values):
            self.rows += 1
            self.values += len(record.metrics)
            self.on_records(len(record.metrics))
        elif isinstance(record, Logged):
            self.records[record.kind.name] += 1
            self.on_records(1)

    def fail(self, text: str, count: int = 1) -> None:
        """Adds a failure."""
        self.failure_count += count
        self.failures += [text] if len(self.failures) < _MAX_MESSAGES else []

    def add(self, run: SourceRun) -> None:
        """Adds what a source saw of a run that was read to its end."""
        self.left_out += run.left_out
        self.seen.there += run.seen.there
        self.seen.read += run.seen.read
        for what, count in (+run.lost).items():
            self.fail(f"{run.run_id}: {count} {what}", count)
            self.damaged += count
        for text in dict.fromkeys(run.problems):
            self.fail(f"{run.run_id}: {text}")
        if unread := run.seen.there - run.seen.read:
            of_all = f"{unread} of {run.seen.there} bytes"
            self.fail(f"{run.run_id}: {of_all} are damaged or cut off, and could not be read")

    def to_json(self) -> dict[str, Any]:
        """Returns the report as the commands print it."""
        return {
            "runs": self.runs,
            "unchanged": self.unchanged,
            "busy": self.busy,
            "rows": self.rows,
            "values": self.values,
            "records": dict(self.records),
            "left_out": dict(self.left_out),
            "missing": self.missing,
            "bytes_there": self.seen.there,
            "bytes_read": self.seen.read,
            "failures": self.failure_count,
            "failed": self.failures,
        }


def move(
    runs: Sequence[Moved],
    take: Callable[[Moved], object],
    report: MoveReport,
    progress: Progress = lambda _done, _runs, _records: None,
) -> None:
    """Takes each run to a sink. One that fails is a failure of the report, and the others follow.

    Args:
        runs: with an id each, `run_id`.
        take: writes one of them, and adds to the report what it wrote.
        report: what was moved.
        progress: called before and after each run, and while records are written.

    Raises:
        ImportError: a package is not installed.
        TargetError: there is no such target.
    """
    from events import safe_text

    for done, run in enumerate(runs):
        report.on_records = functools.partial(progress, done, len(runs))
        report.on_records(0)
        try:
            take(run)
        except BusyError:
            report.busy += 1
        except (ImportError, TargetError):
            # It would be the same for every run.
            raise
        except Exception as error:  # noqa: BLE001  # whatever is wrong with this run, the others are wanted
            report.fail(f"{getattr(run, 'run_id', run)}: {safe_text(error)}")
    progress(len(runs), len(runs), 0)
