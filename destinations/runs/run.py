"""`RecordedRun`: reads one run, its record as of the last scan and everything else as of now.

Readers never write into a run, and keep no file open. Importing this module does not import numpy; reading
metrics does.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import attrs

from destinations.history.chain import Chain
from destinations.history.fork import Parent, find_parents, parents_of
from destinations.history.sessions import SESSIONS, read_lines, read_sessions, session_path
from destinations.kinds import RecordAccess
from destinations.run_directory.layout import (
    ENVIRONMENT,
    HEARTBEAT,
    HPARAMS,
    SIDECAR,
    TIME_FOLDER,
    column_of,
    is_shallow,
    journal_path,
    metrics_name,
    trusted_heartbeat,
)

from .errors import RunNotFoundError, RunsError
from .files import number_of, path_inside, read_object_file
from .record import RunKind, RunRecord, Scalar, is_alive, shown_status
from .streams import Stream, reported, streams_of, writers_of
from .summary import MetricSummary, computed_summary, summary_of

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection, Iterator, Mapping

    from destinations.history.rows import MetricRow
    from destinations.kinds.tables import Table
    from destinations.run_directory.blocks import Block

    from .content.flight import Flight
    from .content.follow import Point
    from .content.ledger import TimeReport
    from .content.ranks import RankMetric
    from .content.records import RecordCount, Records
    from .content.series import Series
    from .index.bucket import BucketCopy
    from .verify import Finding

__all__ = ["Branch", "MetricSummary", "RecordedRun", "Run"]


# No file of a run has this name.
_OF_PARENTS = "@parents/"


def _of_record(name: str, doc: str) -> Any:
    """Returns a property that is a field of the run's record."""
    return property(operator.attrgetter(f"_record.{name}"), doc=doc)


class _Recorded(RecordAccess):
    """The record of a run, as of the last scan."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record

    @property
    def record(self) -> RunRecord:
        """The record of the run."""
        return self._record

    @property
    def hparams(self) -> Mapping[str, Scalar]:
        """Hyperparameters by dotted name; `hyperparameters` has them nested, as logged."""
        return self.record.hparams

    run_id: str = _of_record("run_id", "The run's own id; for a folder without one, its path below the root.")
    kind: RunKind = _of_record("kind", "The writer: `RunDirectory`, stable-pretraining or Lightning.")
    name: str = _of_record("name", "The display name, or the name of the folder.")
    status: str = _of_record("status", 'The status as written; of a killed run, this is always "running".')
    tags: tuple[str, ...] = _of_record("tags", "The tags, in the order in which they were added.")
    notes: str = _of_record("notes", "The user's notes.")
    display_name: str | None = _of_record("display_name", "The name the user gave the run.")
    archived: bool = _of_record("archived", "Whether the user archived the run.")
    created_at: float | None = _of_record("created_at", "When the run began, in seconds since 1970.")
    ended_at: float | None = _of_record("ended_at", "When the run ended, in seconds since 1970.")
    updated_at: float | None = _of_record("updated_at", "When its metadata was last written.")
    checkpoint_path: str | None = _of_record("checkpoint_path", "The newest checkpoint, as the run wrote it.")


class RecordedRun(_Recorded):
    """A run to read from.

    ```python
    run = open_runs("runs")["digits"]  # or RecordedRun.open("runs/digits"), without any index
    run.series("loss").value
    ```

    **Threading.** Any thread may call any method. Methods block only to read files, except `follow`.

    **Freshness.** `record` and its properties (`status`, `tags`, `notes`, `hparams`, …) are from the last
    scan; `reload` reads them again. Everything else is read from the folder on each call.

    Args:
        record: the record of the run.
        clock: returns the time in seconds since 1970, for `alive`.
        copy: for a run in a store, downloads its files when they are read.
    """

    end: str | None = None
    """The id of the last session to read; None for the newest, see `branch`."""

    def __init__(
        self,
        record: RunRecord,
        *,
        clock: Callable[[], float] = time.time,
        copy: BucketCopy | None = None,
    ) -> None:
        super().__init__(record)
        self._clock = clock
        self._copy = copy

    @classmethod
    def open(cls, path: str | Path) -> RecordedRun:
        """Opens the run in a folder, without any index.

        Raises:
            RunNotFoundError: the folder is not a run.
        """
        from .index.scan import IndexState, Scanner

        folder = Path(path).absolute()
        if ".." in folder.parts:
            # The last component must be the folder's name.
            folder = folder.resolve()
        found = Scanner(str(folder.parent), IndexState()).read_run(folder.name)
        if found is None or found.fields is None:
            raise RunNotFoundError(str(path))
        fields = {**found.fields, "heartbeat_at": found.heartbeat_at, "problem": found.problem}
        return cls(RunRecord(path=folder, **fields))

    def reload(self) -> RecordedRun:
        """Returns the run with a record read from its folder now.

        Raises:
            RunNotFoundError: the folder is gone.
        """
        return RecordedRun(RecordedRun.open(self.path).record, clock=self._clock, copy=self._copy)

    def __repr__(self) -> str:
        return f"RecordedRun({self.run_id!r}, {self.shown_status}, {str(self.path)!r})"

    # Its files.

    @property
    def path(self) -> Path:
        """The folder of the run; for a run in a store, its local copy, brought up to date."""
        if self._copy is not None:
            self._copy.bring(self._record.path)
            for parent in find_parents(self._record.path):
                self._copy.bring(parent.path)
        return self._record.path

    @property
    def place(self) -> str:
        """The folder of the run, or its URI without options if it is in a store; for messages."""
        path = self._record.path
        return str(path) if self._copy is None else self._copy.uri_of(path)

    @property
    def copy(self) -> BucketCopy | None:
        """Downloads the files of a run in a store; None for a run in a folder."""
        return self._copy

    @property
    def as_listed(self) -> RecordedRun:
        """The run as its documents show it; nothing more is downloaded for a run in a store."""
        return self if self._copy is None else RecordedRun(self.record, clock=self._clock)

    def file(self, relative: str) -> Path:
        """Returns the path of a file of the run, which may not exist. A file in a store is downloaded.

        Args:
            relative: its path in the run's folder, or the result of `name_of`.

        Raises:
            ValueError: it leads out of the folder.
        """
        path = path_inside(*self.place_of(relative))
        if self._copy is not None:
            self._copy.bring_files([path])
        return path

    def place_of(self, name: str) -> tuple[Path, str]:
        """Returns the folder of the run, or of the parent that `name_of` named, and the path in it."""
        start, _, rest = name.removeprefix(_OF_PARENTS).partition("/")
        for parent in parents_of(self._record.path) if name.startswith(_OF_PARENTS) else ():
            if parent.run_id == start:
                return parent.path, rest
        return self._record.path, name

    def name_of(self, path: Path) -> str:
        """Returns a file's path in the run's folder; for a parent's file, a name that `file` accepts."""
        for parent in () if path.is_relative_to(self._record.path) else parents_of(self._record.path):
            if path.is_relative_to(parent.path):
                return f"{_OF_PARENTS}{parent.run_id}/{path.relative_to(parent.path).as_posix()}"
        return str(path.relative_to(self._record.path))

    # From the folder.

    @property
    def shown_status(self) -> str:
        """The status that tables, filters and pages show: "killed" if a running run has no heartbeat."""
        if self.end is not None:
            return self.status
        return shown_status(self.status, self._heartbeat_at(), self._clock())

    @property
    def alive(self) -> bool:
        """Whether the run is being written: it hasn't ended, and its heartbeat is fresh."""
        return self.end is None and is_alive(self.status, self._heartbeat_at(), self._clock())

    @property
    def is_written(self) -> bool:
        """Whether its trainer or one of its writers is alive."""
        return self.alive or any(one.alive for one in self.writer_runs())

    def writer_runs(self) -> list[RecordedRun]:
        """Returns a run for each of `writers`, except those that haven't written anything yet."""
        found = []
        for name in self.writers:
            with contextlib.suppress(RunsError):
                found.append(self.writer(name))
        return found

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The hyperparameters, nested as logged; by dotted name if `hparams.yaml` can't be read."""
        from destinations.run_directory.documents import read_hparams

        try:
            return read_hparams(self.path / HPARAMS)
        except (OSError, ValueError):
            return dict(self.hparams)

    @property
    def summary(self) -> dict[str, MetricSummary]:
        """The statistics of each metric: `summary.json`, and the rows logged after it was written.

        If several writers logged a metric, its last value is the one at the greatest step; min, max, mean and
        counts cover all writers.
        """
        return self.summary_of(0)

    def summary_of(self, rank: int, writer: str | None = None) -> dict[str, MetricSummary]:
        """Returns the `summary` of a rank, for all writers or for one; "" is the trainer."""
        if self.end is not None:
            return computed_summary(self.path, rank, self.end)
        return summary_of(self.path, rank, writer)

    @property
    def environment(self) -> dict[str, Any]:
        """The content of `environment.json`: host, code, packages, hardware, ranks; empty if missing.

        Raises:
            OSError: it is damaged, or cannot be read.
        """
        return read_object_file(self.path / ENVIRONMENT)

    @property
    def sessions(self) -> list[dict[str, Any]]:
        """One entry for each process that wrote to the run, oldest first.

        Raises:
            OSError: `sessions.jsonl` cannot be read.
        """
        return [line for line in read_sessions(self.path) if is_shallow(line)]

    def configuration(self, session: str | int) -> dict[str, Any]:
        """Returns the hyperparameters and environment of a session, even if it no longer belongs to the run.

        Args:
            session: its id, or its number.

        Returns:
            Its nested "hyperparameters" and its "environment"; empty if it had none.

        Raises:
            ValueError: the run has no such session, or an earlier version wrote it, which kept only the
                newest session's.
        """
        from destinations.run_directory.documents import session_hyperparameters

        line = self._session(session)
        return {
            "hyperparameters": session_hyperparameters(self.path, line),
            "environment": read_object_file(session_path(self.path, line, ENVIRONMENT)),
        }

    def _session(self, session: str | int) -> dict[str, Any]:
        lines = self.sessions
        wanted = [one for one in lines if str(session) in {one.get("session"), str(one.get("number"))}]
        if not wanted:
            known = ", ".join(f"{one.get('number', '?')} ({one.get('session')})" for one in lines)
            raise ValueError(f"session must be one of {known}, got {session!r}.")
        return wanted[-1]

    @property
    def parent(self) -> Parent | None:
        """The run that this one was forked from; its rows and records come first. None if there is none.

        If the parent can't be read, its `problem` says why.
        """
        return next(iter(find_parents(self.path, self.end)), None)

    # Branches.

    def branch(self, session: str | int) -> Branch:
        """Returns the run as one of its sessions left it: its own records and the records that it continued.

        ```python
        before = run.branch(1)
        print(before.hyperparameters["lr"], before.series("loss").value[-1])
        ```

        Args:
            session: its id, its number, or the name of the branch, "step4.1a2b3c4d5e6f".

        Raises:
            ValueError: the run has no such session.
        """
        return Branch(
            self, self._session(session.rpartition(".")[2] if isinstance(session, str) else session)
        )

    def branches(self) -> list[Branch]:
        """Returns what training left behind when it resumed from an earlier place, oldest first.

        Raises:
            OSError: the sessions or an index cannot be read.
        """
        from destinations.history.row_chain import RowChain
        from destinations.run_directory.documents import hyperparameter_files

        from .content.sources import own_folders

        path, lines = self.path, self.sessions
        if len(lines) == 1:
            return []
        chain = Chain(lines)
        left = {session for session, _ in RowChain.read(path / metrics_name(0)).left()} | self._records.left()
        left |= own_folders(path).keys()
        # The journal may still cut the rows of any session.
        is_drained = not journal_path(path, 0).exists()
        for start, files in hyperparameter_files(path).items():
            session = start.rpartition("-")[2]
            count = chain.records_of(session)
            left |= {session} if count is not None and max(files) >= count else set()
        cut = {str(line.get("session")) for line in lines if "follows" in line}
        left |= {one for one in cut if not is_drained and chain.records_of(one) is not None}
        return [Branch(self, line) for line in lines if line.get("session") in left]

    def problems(self) -> list[str]:
        """Returns the problems of the run: the scan's findings, and files that can't be read now.

        The list of sessions, the rows outside closed parts, and the last sixteen of these are compared with
        their checksums.

        Raises:
            OSError: these can't be read.
        """
        from destinations.history.snapshot import damage_of_rows

        found = [self.record.problem] if self.record.problem else []
        for stream in streams_of(self.path):
            prefix = f"writer {stream.writer}: " if stream.writer else ""
            damages = [prefix + one for one in damage_of_rows(stream.folder, is_whole=True)]
            if lines := len(read_lines(stream.folder)[1]):
                damages.append(f"{prefix}{SESSIONS} has {lines} damaged lines: what they say is not known")
            found += [one for one in damages if not any(one in known for known in found)]
        return found

    def verify(self) -> Iterator[Finding]:
        """Yields data that is damaged, missing, or not covered by a checksum; reads the whole run.

        ```python
        for found in run.verify():
            print(found.file, found.text)
        ```
        """
        from .verify import verify_run

        return verify_run(self.path, self, self.problems)

    @property
    def receipt(self) -> dict[str, Any]:
        """The cost of logging in the last session; empty if unknown.

        Raises:
            OSError: the sidecar is damaged, or cannot be read.
        """
        overhead = read_object_file(self.path / SIDECAR).get("overhead")
        return overhead if isinstance(overhead, dict) else {}

    # Writers.

    @property
    def writers(self) -> list[str]:
        """The sorted names of the processes that add to the run beside its trainer.

        Their rows and records belong to the run. The run's status, heartbeat, tags and hyperparameters are
        the trainer's; `writer` returns one with its own.
        """
        return writers_of(self.path)

    def writer(self, name: str) -> RecordedRun:
        """Returns what one writer wrote, as a run of its own.

        Raises:
            WriterNotFoundError: the run has no such writer.
            RunNotFoundError: the writer hasn't written anything yet.
        """
        (stream,) = streams_of(self.path, name)
        return RecordedRun(RecordedRun.open(stream.folder).record, clock=self._clock, copy=self._copy)

    # Metrics.

    @overload
    def ranks(self) -> list[int]: ...

    @overload
    def ranks(self, name: str) -> RankMetric: ...

    def ranks(self, name: str | None = None) -> list[int] | RankMetric:
        """Returns the trainer's ranks that have metrics, or a metric on all of them, merged by step.

        Args:
            name: the name of the metric.

        Raises:
            MetricNotFoundError: no rank has the metric; the message suggests the closest.
        """
        ranks = self._ranks_with_metrics()
        if name is None:
            return ranks
        from .content.ranks import read_ranks

        return read_ranks(name, ranks, lambda one, rank: self.series(one, rank, ""))

    def flights(self) -> list[Flight]:
        """Returns the flight records in the run's folder, one per rank, sorted by rank."""
        from .content.flight import FLIGHT_FOLDER, read_flights

        return read_flights(self.path / FLIGHT_FOLDER)

    def time_report(self) -> TimeReport | None:
        """Returns how all sessions spent their time, as `TimeLedger` wrote it; None without one."""
        folder = self.path / TIME_FOLDER
        if not folder.is_dir():
            return None
        from events import TimeLedger

        from .content.ledger import read_time

        return read_time(folder, self.sessions, TimeLedger.productive)

    def metric_names(self, rank: int = 0) -> list[str]:
        """Returns the names of a rank's metrics in order of first appearance, the trainer's first."""
        from destinations.history.snapshot import metric_columns, take_snapshot

        def names_in(stream: Stream) -> list[str]:
            with take_snapshot(stream.folder, rank, end=stream.row_end) as snapshot:
                return metric_columns(snapshot)

        names: list[str] = []
        for stream in streams_of(self.path, end=self.end):
            with reported(stream):
                names += names_in(stream)
        return list(dict.fromkeys(names))

    def series(self, name: str, rank: int = 0, writer: str | None = None) -> Series:
        """Returns all values of a metric as numpy arrays, including rows still in the journal.

        If several writers logged the metric, their values are merged by step, and `Series.writer` names the
        writer of each value.

        Args:
            name: the name of the metric; "epoch" is the epoch of each row.
            rank: ranks other than 0 have metrics only if the run was written with `all_ranks=True`.
            writer: return only the values of this writer; "" is the trainer.

        Raises:
            MetricNotFoundError: the run has no such metric; the message suggests the closest.
            WriterNotFoundError: the run has no such writer.
        """
        from .content.series import read_series

        return read_series(self.path, name, rank, writer, self.end)

    def blocks(self, rank: int = 0, writer: str | None = None) -> Iterator[Block]:
        """Returns all rows of a rank in blocks of arrays; memory doesn't grow with the run.

        Args:
            rank: the rank that logged the rows.
            writer: as for `series`. Default: the trainer's rows, then each writer's.
        """
        from .content.series import run_blocks

        return run_blocks(self.path, rank, writer, self.end)

    @overload
    def follow(
        self,
        name: str,
        *,
        rank: int = 0,
        poll_seconds: float = 1.0,
        stop: threading.Event | None = None,
        until_end: bool = False,
        last: int | None = None,
        only: Collection[str] = (),
    ) -> Iterator[Point]: ...

    @overload
    def follow(
        self,
        name: None = None,
        *,
        rank: int = 0,
        poll_seconds: float = 1.0,
        stop: threading.Event | None = None,
        until_end: bool = False,
        last: int | None = None,
        only: Collection[str] = (),
    ) -> Iterator[MetricRow]: ...

    def follow(
        self,
        name: str | None = None,
        *,
        rank: int = 0,
        poll_seconds: float = 1.0,
        stop: threading.Event | None = None,
        until_end: bool = False,
        last: int | None = None,
        only: Collection[str] = (),
    ) -> Iterator[Point] | Iterator[MetricRow]:
        """Returns existing rows, then each new row once, in the order of logging, for all writers.

        If training resumes from an earlier step, its rows follow with repeated steps; earlier rows aren't
        retracted. The calls of one step may be one row or several.

        **Blocking.** The iterator waits in the thread of its consumer.

        Args:
            name: a metric, which needn't exist yet, to yield `Point`s; None to yield `MetricRow`s of all
                metrics.
            rank: the rank that logged the rows.
            poll_seconds: time between two looks at the files.
            stop: ends the iterator at once when set.
            until_end: ends the iterator after the last row, once neither the run nor a writer is alive.
            last: yield only the last so many existing rows, read from the end of the file.
            only: columns; rows without any of them are skipped.
        """
        from .content.follow import follow_metric, follow_rows

        if self.end is not None:
            raise ValueError("a branch does not grow: read its series or blocks, or follow the run.")

        def is_over() -> bool:
            return until_end and not self._is_written_now()

        wanted = {*only} if name is None else {column_of(name), name, *only}
        rows = follow_rows(
            self.path, rank, is_over=is_over, poll_seconds=poll_seconds, stop=stop, last=last, wanted=wanted
        )
        return rows if name is None else follow_metric(rows, name)

    def to_dataframe(self, rank: int = 0) -> Any:
        """Returns all rows of a rank as a `pandas.DataFrame`: `step`, `time`, a column for each metric.

        If the run has several writers, the column `writer` after `time` has the name of each row's writer, ""
        for the trainer. A missing value is NaN, as is a logged NaN.

        Raises:
            ImportError: pandas is not installed.
        """
        from .content.series import dataframe_of

        return dataframe_of(
            self.blocks(rank), has_writers=bool(self.writers) or len(streams_of(self.path, end=self.end)) > 1
        )

    def plot(self, *names: str, x: str = "step", is_logarithmic: bool = False) -> Any:
        """Returns a matplotlib figure of metrics, which a notebook shows.

        Args:
            names: of the metrics.
            x: "step", or "time" for seconds since the start of the run.
            is_logarithmic: use a logarithmic y axis.

        Raises:
            MetricNotFoundError: the run has no such metric.
            ImportError: matplotlib is not installed.
        """
        from .notebook import plot_run

        return plot_run(self.record, self.series, names, x=x, is_logarithmic=is_logarithmic)

    def view(self, *, port: int | None = None) -> Any:
        """Serves the page of this run, and returns its `destinations.viewer.Viewer`; `close` stops it.

        Raises:
            ImportError: starlette or uvicorn is not installed.
        """
        # Imported by name, because the page imports this module.
        return importlib.import_module("destinations.viewer").view_run(self, port=port)

    def _repr_html_(self) -> str:
        from .notebook import run_html, sparks_of

        summary = self.summary
        sparks = sparks_of([stream.folder for stream in streams_of(self.path)], self.blocks(), summary)
        return run_html(self.record, self.shown_status, summary, sparks)

    # Records.

    def records(
        self, kind: str, name: str | None = None, step: int | None = None, *, with_files: bool = True
    ) -> list[Any]:
        """Returns the records of a kind; see `RecordAccess.records`.

        Args:
            kind: as for `RecordAccess.records`.
            name: as for `RecordAccess.records`.
            step: as for `RecordAccess.records`.
            with_files: whether to download the files of a run in a store.
        """
        found = self._records.of(kind, name, step)
        if self._copy is not None and with_files:
            masks = [mask for one in found for mask in getattr(one, "masks", {}).values()]
            files = (
                getattr(one, field.name) for one in (*found, *masks) for field in attrs.fields(type(one))
            )
            self._copy.bring_files(path for path in files if isinstance(path, Path))
        return found

    def table(self, name: str, step: int | None = None) -> Table:
        """Reads the table of a step, or the last one.

        Raises:
            MetricNotFoundError: there is no table of this name, or none at this step.
        """
        self.records("tables", name)
        return self._records.table(name, step)

    def table_part(
        self, name: str, step: int | None, offset: int, limit: int
    ) -> tuple[Table, dict[str, str], int]:
        """Reads some rows of a table; see `Records.table_part`."""
        self.records("tables", name)
        return self._records.table_part(name, step, offset, limit)

    def record_counts(self) -> dict[str, RecordCount]:
        """Returns the number of records by kind ("images", "tables", …), in constant memory."""
        return self._records.overview()

    def damaged_lines(self) -> dict[str, int]:
        """Returns the number of damaged lines by index file; other methods skip them."""
        return self._records.damaged_lines()

    # Internal.

    @property
    def _records(self) -> Records:
        from .content.records import Records

        return Records(self.path, self.end)

    def _ranks_with_metrics(self) -> list[int]:
        from .content.sources import ranks_of

        return ranks_of(self.path)

    def _is_written_now(self) -> bool:
        with contextlib.suppress(RunNotFoundError):
            return self.reload().is_written
        return False

    def _heartbeat_at(self) -> float | None:
        # Lightning's CSVLogger has no heartbeat; the time of its rows is used.
        path = self._record.path
        for name in (HEARTBEAT, metrics_name(0)):
            try:
                at = (path / name).stat().st_mtime
            except OSError:
                continue
            return trusted_heartbeat(path, at, self._clock())
        # Before its trainer begins, a run has its writers' heartbeats.
        beats = (one._heartbeat_at() for one in self.writer_runs())  # noqa: SLF001  # same class
        return max((at for at in beats if at is not None), default=None)


Run = RecordedRun
"""The former name of `RecordedRun`."""


class Branch(RecordedRun):
    """A run as one of its sessions left it; see `RecordedRun.branch`.

    It has the rows and records of that session and of the sessions that it continued, and what named writers
    logged until the next session began. Status, hyperparameters and environment are the session's.

    Args:
        run: the run.
        line: the session's line in `sessions.jsonl`.
    """

    def __init__(self, run: RecordedRun, line: Mapping[str, Any]) -> None:
        from .content.sources import own_folders

        super().__init__(run.record, clock=run._clock, copy=run.copy)  # noqa: SLF001  # same module
        self._run, self.session = run, str(line.get("session"))
        self.end = self.session
        self._record = attrs.evolve(
            run.record,
            path=own_folders(run.path).get(self.session, run.record.path),
            status=str(line.get("status")),
            created_at=number_of(line.get("start")),
            ended_at=number_of(line.get("end")),
            summary={},
        )

    session: str
    """The id of the session."""

    def __repr__(self) -> str:
        return f"Branch({self.session!r}, {self.status}, {str(self._record.path)!r})"

    def reload(self) -> Branch:
        return self._run.reload().branch(self.session)

    @functools.cached_property
    def record(self) -> RunRecord:
        from destinations.run_directory.documents import flat_hyperparameters

        return attrs.evolve(self._record, hparams=flat_hyperparameters(self.hyperparameters))

    @property
    def hyperparameters(self) -> dict[str, Any]:
        from destinations.run_directory.documents import hyperparameters_of

        lines = self.sessions
        found = hyperparameters_of(self.path, lines, Chain(lines, self.session))
        return self._run.hyperparameters if found is None else found

    @property
    def environment(self) -> dict[str, Any]:
        found: dict[str, Any] = self.configuration(self.session)["environment"]
        return found
