"""A run that can be read: what a scan knows of it, and everything that its folder holds.

Readers never write into a run. Nothing is kept open, and nothing of the folder is held: what a run that is being written has to say
is read when it is asked for. Importing this module does not import numpy; reading metrics does.
"""

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import attrs

from destinations.run_directory.layout import (
    ENVIRONMENT,
    HEARTBEAT,
    HPARAMS,
    SIDECAR,
    column_of,
    metrics_name,
    summary_name,
)

from .errors import RunNotFoundError
from .files import is_shallow, number_of, read_object_file, whole_of
from .media import Audio, Image, PointCloud, Video
from .record import RunKind, RunRecord, Scalar, is_alive
from .records import Artifact, Histogram, RecordCount, Records, Table, TableEntry, Text, Trace
from .sources import ranks_of

if TYPE_CHECKING:
    import threading

    from destinations.run_directory.reader import MetricRow

    from .follow import Point
    from .series import Block, Series

__all__ = ["MetricSummary", "Run"]


@attrs.frozen
class MetricSummary:
    """What is known of one metric without reading its rows; least, greatest and mean are those of its finite values.

    Attributes:
        last: the last value.
        min: the least; None where no value is finite.
        max: the greatest.
        min_step: at which step the least was first reached; None where the run does not say.
        max_step: at which step the greatest was.
        count: how many values.
        non_finite: how many of them are NaN or infinite.
        mean: of the finite values; None where the run does not say.
    """

    last: float | None
    min: float | None
    max: float | None
    min_step: int | None
    max_step: int | None
    count: int
    non_finite: int
    mean: float | None


class Run:
    """A run that can be read.

    ```python
    run = open_runs("runs")["digits"]  # or Run.open("runs/digits"), without any index
    run.series("loss").value
    ```

    **Threading.** Every method may be called from any thread; none blocks but for reading files, `follow` excepted.

    **Being written.** What a scan knows (`record` and what is read off it: `status`, `tags`, `notes`, `hparams`, …) is as it was then;
    `reload` reads it again. All else is read when it is asked for.

    Args:
        record: what the scan knows of it.
        clock: the time in seconds since 1970, for `alive`.
    """

    def __init__(self, record: RunRecord, *, clock: Callable[[], float] = time.time) -> None:
        self.record = record
        self._clock = clock
        self._records = Records(record.path)

    @classmethod
    def open(cls, path: "str | Path") -> "Run":
        """Opens the run in a folder, without any index.

        Raises:
            RunNotFoundError: there is no run in the folder.
        """
        from .scan import IndexState, Scanner

        folder = Path(path).absolute()
        if ".." in folder.parts:
            # Its last part is to be the name of the folder.
            folder = folder.resolve()
        found = Scanner(str(folder.parent), IndexState()).read_run(folder.name)
        if found is None or found.record is None:
            raise RunNotFoundError(str(path))
        record = attrs.evolve(found.record, heartbeat_at=found.heartbeat_at, problem=found.problem)
        return cls(record)

    def reload(self) -> "Run":
        """Returns the run as its folder says now.

        Raises:
            RunNotFoundError: the folder is gone.
        """
        return Run(Run.open(self.path).record, clock=self._clock)

    def __repr__(self) -> str:
        return f"Run({self.run_id!r}, {self.status}, {str(self.path)!r})"

    # --- what a scan knows -----------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The folder of the run."""
        return self.record.path

    @property
    def run_id(self) -> str:
        """The id that the run gave itself; of a folder without one, its path below the root."""
        return self.record.run_id

    @property
    def kind(self) -> RunKind:
        """Who wrote it."""
        return self.record.kind

    @property
    def name(self) -> str:
        """What to call the run: its display name, else the name of its folder."""
        return self.record.name

    @property
    def status(self) -> str:
        """As written; a run that was killed says "running" for ever, see `alive`."""
        return self.record.status

    @property
    def tags(self) -> tuple[str, ...]:
        """In the order in which they were given."""
        return self.record.tags

    @property
    def notes(self) -> str:
        """Of the user."""
        return self.record.notes

    @property
    def display_name(self) -> str | None:
        """What the user calls the run."""
        return self.record.display_name

    @property
    def archived(self) -> bool:
        """Whether the user put the run away."""
        return self.record.archived

    @property
    def created_at(self) -> float | None:
        """When the run began, in seconds since 1970."""
        return self.record.created_at

    @property
    def ended_at(self) -> float | None:
        """When the run ended, in seconds since 1970."""
        return self.record.ended_at

    @property
    def updated_at(self) -> float | None:
        """When what `record` says was written, in seconds since 1970."""
        return self.record.updated_at

    @property
    def checkpoint_path(self) -> str | None:
        """The newest checkpoint, as the run wrote it."""
        return self.record.checkpoint_path

    @property
    def hparams(self) -> Mapping[str, Scalar]:
        """Hyperparameters by dotted name, as filters and tables have them; see `hyperparameters` for them as they were logged."""
        return self.record.hparams

    # --- what the folder says now ----------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the run is being written: it has not ended, and its heartbeat is fresh now."""
        return is_alive(self.status, self._heartbeat_at(), self._clock())

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Hyperparameters nested as they were logged; flat where only that is known, empty where there are none."""
        from .foreign import read_hparams

        try:
            found = read_hparams(self.path / HPARAMS)
        except (OSError, ValueError):
            found = {}
        return found or dict(self.hparams)

    @property
    def summary(self) -> dict[str, MetricSummary]:
        """What `summary.json` says of each metric; computed from the rows where there is none.

        While a run is written, the file is some seconds behind.
        """
        return self.summary_of(0)

    def summary_of(self, rank: int) -> dict[str, MetricSummary]:
        """Returns `summary` of a rank."""
        metrics = read_object_file(self.path / summary_name(rank)).get("metrics")
        if not isinstance(metrics, dict) or not metrics:
            return _computed_summary(self.path, rank)
        return {str(name): _metric_summary(one) for name, one in metrics.items() if isinstance(one, dict)}

    @property
    def environment(self) -> dict[str, Any]:
        """The content of `environment.json`: host, code, packages, hardware, ranks. Empty where there is none."""
        return read_object_file(self.path / ENVIRONMENT)

    @property
    def sessions(self) -> list[dict[str, Any]]:
        """One entry per process that opened the run, oldest first."""
        from destinations.run_directory.documents import SessionLog

        try:
            return [line for line in SessionLog.read(self.path) if is_shallow(line)]
        except OSError:
            return []

    @property
    def receipt(self) -> dict[str, Any]:
        """What logging cost in the last session; empty where the run does not say."""
        overhead = read_object_file(self.path / SIDECAR).get("overhead")
        return overhead if isinstance(overhead, dict) else {}

    # --- metrics ---------------------------------------------------------------------------------------------------

    def ranks(self) -> list[int]:
        """Returns the ranks that have metrics."""
        return ranks_of(self.path)

    def metric_names(self, rank: int = 0) -> list[str]:
        """Returns the columns of all metrics of a rank, in the order of their first appearance."""
        from destinations.run_directory.reader import metric_columns, take_snapshot

        with take_snapshot(self.path, rank) as snapshot:
            return metric_columns(snapshot)

    def series(self, name: str, rank: int = 0) -> "Series":
        """Returns all values of a metric as numpy arrays; rows that are still in the journal are among them.

        Args:
            name: of the metric; "epoch" is the epoch of each row.
            rank: whose; others than rank 0 have some only where the run was made with `all_ranks=True`.

        Raises:
            MetricNotFoundError: the run has no such metric; the text names near ones.
        """
        from .series import read_series

        return read_series(self.path, name, rank)

    def blocks(self, rank: int = 0) -> "Iterator[Block]":
        """Returns all rows of a rank in blocks of arrays, for whoever wants all metrics of a large run in little memory."""
        from .series import run_blocks

        return run_blocks(self.path, rank)

    @overload
    def follow(
        self,
        name: str,
        *,
        rank: int = 0,
        poll_seconds: float = 1.0,
        stop: "threading.Event | None" = None,
        until_end: bool = False,
        last: int | None = None,
        only: Collection[str] = (),
    ) -> "Iterator[Point]": ...

    @overload
    def follow(
        self,
        name: None = None,
        *,
        rank: int = 0,
        poll_seconds: float = 1.0,
        stop: "threading.Event | None" = None,
        until_end: bool = False,
        last: int | None = None,
        only: Collection[str] = (),
    ) -> "Iterator[MetricRow]": ...

    def follow(
        self,
        name: str | None = None,
        *,
        rank: int = 0,
        poll_seconds: float = 1.0,
        stop: "threading.Event | None" = None,
        until_end: bool = False,
        last: int | None = None,
        only: Collection[str] = (),
    ) -> "Iterator[Point] | Iterator[MetricRow]":
        """Returns rows as they come: first those that there are, then each new one once, in the order of logging.

        Where training goes back to an earlier step, the rows of the new branch follow, with steps that were seen before; the
        rows of the branch that was left are not taken back. Calls of one step come as one row, or as several.

        **Blocking.** The iterator waits in its consumer's thread.

        Args:
            name: of a metric, also of one that does not exist yet: `Point`s of its values. All metrics where None: `MetricRow`s.
            rank: whose.
            poll_seconds: how long to wait after each look at the files.
            stop: ends the iterator when it is set, at once.
            until_end: ends the iterator when the run has ended or is not alive any more, and all its rows were handed out.
            last: of the rows that there are, only so many, the last ones, which are read from the end of the file.
            only: columns; rows that have none of them are left out.
        """
        from .follow import follow_metric, follow_rows

        def is_over() -> bool:
            return until_end and not self._is_alive_now()

        wanted = {*only} if name is None else {column_of(name), name, *only}
        rows = follow_rows(
            self.path, rank, is_over=is_over, poll_seconds=poll_seconds, stop=stop, last=last, wanted=wanted
        )
        return rows if name is None else follow_metric(rows, name)

    # --- records ---------------------------------------------------------------------------------------------------

    def images(self, name: str | None = None, step: int | None = None) -> list[Image]:
        """Returns images in the order in which they were logged; of all names and steps where None.

        Raises:
            MetricNotFoundError: nothing has this name.
        """
        return self._records.images(name, step)

    def audio(self, name: str | None = None, step: int | None = None) -> list[Audio]:
        """Returns sounds; as `images`."""
        return self._records.audio(name, step)

    def videos(self, name: str | None = None, step: int | None = None) -> list[Video]:
        """Returns videos; as `images`."""
        return self._records.videos(name, step)

    def point_clouds(self, name: str | None = None, step: int | None = None) -> list[PointCloud]:
        """Returns point clouds; as `images`."""
        return self._records.point_clouds(name, step)

    def tables(self, name: str | None = None) -> list[TableEntry]:
        """Returns what is known of the tables, in the order in which they were logged; as `images`."""
        return self._records.tables(name)

    def table(self, name: str, step: int | None = None) -> Table:
        """Reads a table; of a step, or the last one that was logged.

        Raises:
            MetricNotFoundError: no table has this name, or none has it at this step.
        """
        return self._records.table(name, step)

    def histograms(self, name: str | None = None) -> list[Histogram]:
        """Returns histograms in the order in which they were logged; as `images`."""
        return self._records.histograms(name)

    def texts(self, name: str | None = None) -> list[Text]:
        """Returns texts in the order in which they were logged; as `images`."""
        return self._records.texts(name)

    def traces(self) -> list[Trace]:
        """Returns traces in the order in which they were logged."""
        return self._records.traces()

    def artifacts(self, name: str | None = None) -> list[Artifact]:
        """Returns files that were kept in the run; as `images`."""
        return self._records.artifacts(name)

    def record_counts(self) -> "dict[str, RecordCount]":
        """Returns how many records there are of each kind, "images", "tables" and so on, without holding them in memory."""
        return self._records.overview()

    def damaged_lines(self) -> dict[str, int]:
        """Returns how many lines of each index cannot be understood; they are left out of all else."""
        return self._records.damaged_lines()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _is_alive_now(self) -> bool:
        try:
            return self.reload().alive
        except RunNotFoundError:
            return False

    def _heartbeat_at(self) -> float | None:
        # Lightning's CSVLogger has no heartbeat but its rows.
        for name in (HEARTBEAT, metrics_name(0)):
            try:
                return (self.path / name).stat().st_mtime
            except OSError:
                continue
        return None


def _metric_summary(record: Mapping[str, Any]) -> MetricSummary:
    """Returns what `summary.json` says of a metric; stable-pretraining knows no steps and no mean."""
    numbers = {name: number_of(record.get(name)) for name in ("last", "min", "max", "mean")}
    # stable-pretraining keeps a NaN that came first as least and greatest.
    bounds = {
        name: value if value is not None and math.isfinite(value) else None for name, value in numbers.items()
    }
    return MetricSummary(
        last=numbers["last"],
        min=bounds["min"],
        max=bounds["max"],
        min_step=whole_of(record.get("min_step")),
        max_step=whole_of(record.get("max_step")),
        count=whole_of(record.get("count")) or 0,
        non_finite=whole_of(record.get("non_finite")) or 0,
        mean=numbers["mean"],
    )


def _computed_summary(run_dir: Path, rank: int) -> dict[str, MetricSummary]:
    """Returns the summary of a run that did not write one."""
    import numpy as np

    from .series import MISSING_STEP, run_blocks

    parts: dict[str, list[tuple[Any, Any]]] = {}
    for block in run_blocks(run_dir, rank):
        for name, (values, present) in block.columns.items():
            if present.any():
                parts.setdefault(name, []).append((values[present], block.step[present]))
    found = {}
    for name, pieces in parts.items():
        value, step = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
        places = np.flatnonzero(np.isfinite(value))
        finite = value[places]
        extremes = [int(places[index]) for index in (finite.argmin(), finite.argmax())] if len(finite) else []
        at = [None if step[place] == MISSING_STEP else int(step[place]) for place in extremes]
        with np.errstate(over="ignore"):
            mean = float(finite.mean()) if len(finite) else None
        found[name] = MetricSummary(
            last=float(value[-1]),
            min=float(value[extremes[0]]) if extremes else None,
            max=float(value[extremes[1]]) if extremes else None,
            min_step=at[0] if at else None,
            max_step=at[1] if at else None,
            count=len(value),
            non_finite=len(value) - len(finite),
            mean=mean,
        )
    return found
