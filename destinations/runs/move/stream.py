"""The records of a source, the facts that it knows about a run, and the loop that moves runs to a sink."""

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
"""Called with the number of runs done, the number of runs, and the number of new values and records."""

Moved = TypeVar("Moved")


@attrs.frozen
class Values:
    """Metrics that were logged at a step; a source may yield them one by one.

    Attributes:
        metrics: by name.
        step: None if unknown; the sink then uses the previous step.
        time: in seconds since 1970.
        epoch: possibly fractional.
        rank: the rank that logged them.
        writer: the named writer that logged them; "" for the trainer.
    """

    metrics: Mapping[str, float]
    step: int | None
    time: float | None = None
    epoch: float | None = None
    rank: int = 0
    writer: str = ""


@attrs.frozen
class Logged:
    """A record of a kind, or a file.

    Attributes:
        kind: its declaration.
        name: of the record; "" if the kind has no names.
        step: as in `Values`.
        time: in seconds since 1970.
        arguments: the other arguments of `Kind.method` by name, or a function that reads them, if that takes
            long. The function may raise `FileNotFoundError`.
        writer: as in `Values`.
        size: bytes it takes in memory; 0 if unknown.
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
        """Returns the record of a file, which the sink copies to the artifacts of the run."""
        return cls(ARTIFACT, name, None, time, {"file_path": path})


@attrs.frozen
class Restart:
    """The run went back to a step: earlier rows of this and later steps are abandoned."""

    step: int


Record = Values | Logged | Restart


@attrs.define
class Bytes:
    """The size of a source in bytes, and how many of them were read."""

    there: int = 0
    read: int = 0


@attrs.define
class SourceRun:
    """A run of a source.

    `facts` and `read` fill in the fields, such as how the run ended and which records were left out.

    Attributes:
        run_id: its id.
        name: its name in the source.
        identity: a text that no other run of any source has; a later import finds the run by it.
        stamp: changes whenever anything in the run changes, for example the sizes of its files; or a function
            that returns it, if that takes long.
        read: takes this object and returns the records, ordered by time within a step.
        created_at: in seconds since 1970.
        ended_at: in seconds since 1970; None for the time of the last record.
        status: "completed", "failed", "interrupted" or "stopped"; "" if the source does not know.
        exception: the error that ended it, "Type: message".
        tags: its tags.
        notes: its notes.
        hyperparameters: as logged, nested.
        environment: host, program and the like, as the source has them.
        facts: takes this object and sets the attributes that don't need a pass over all records; called
            before `read`.
        names: returns the metric names of the trainer.
        writers: the contribution of each named writer, as a run of its own.
        left_out: counts of records that the target can't hold, by description.
        lost: counts of unreadable records, by description ("unreadable images"); each is a failure.
        problems: messages about anything else that could not be read; each is a failure.
        seen: bytes there and bytes read, if the source counts them.
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
    r"""The result of an import, a replay or a `send`.

    ```python
    from destinations.runs.imports import import_runs

    Path("history.csv").write_text("step,loss,word\n0,0.5,a\n1,0.25,b\n")
    report = import_runs("history.csv", "imported")
    print(report.rows, dict(report.left_out))  # 2 {'cells that are no numbers': 2}
    ```

    Attributes:
        runs: number of runs written.
        unchanged: number of runs that were already there and have not changed.
        busy: number of runs skipped because another process was writing them.
        rows: rows of metrics.
        values: values in these rows.
        records: other records and files, by kind.
        left_out: counts of what the target can't hold, by description.
        missing: a message for each record whose file is no longer in the run.
        seen: bytes in the files of these runs, and bytes read.
        failures: a message for each run or record that could not be read or written; at most 100.
        failure_count: the number of failures.
        damaged: the number of failures that trying again would not fix.
        position: the position reached in a run folder.
        is_over: the run has ended, and all of it was sent.
        was_interrupted: Ctrl-C ended `follow`; everything read until then was sent.
        on_records: called with the number of values and records written.
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
        """Counts a record that was written."""
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
        """Adds the counts of a run that was read to its end."""
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
    """Moves one run after the other. If one fails, the report gets a failure and the next run follows.

    Args:
        runs: objects with a `run_id`.
        take: writes one run and adds it to the report.
        report: counts the moved records.
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
            # Every other run would fail in the same way.
            raise
        except Exception as error:  # noqa: BLE001  # any error of one run must not stop the others
            report.fail(f"{getattr(run, 'run_id', run)}: {safe_text(error)}")
    progress(len(runs), len(runs), 0)
