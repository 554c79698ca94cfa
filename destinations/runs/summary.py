"""Returns the statistics of a run's metrics: `summary.json`, and the rows logged after it.

Never writes into the run.
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from destinations.history.metric_summary import MetricSummary, metric_of
from destinations.run_directory.layout import JOURNAL_FOLDER, check_format, metrics_name, summary_name
from uploads.disk import read_regular

from .files import read_object, whole_of
from .streams import reported, streams_of, writers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .record import Extremes
    from .streams import Stream

    _Records = Mapping[str, Any]

__all__ = ["MetricSummary", "computed_summary", "last_values", "read_extremes", "summary_of"]


def summary_of(run_dir: Path, rank: int, writer: str | None = None) -> dict[str, MetricSummary]:
    """Returns the statistics of each metric of a rank, covering all of its rows; see `_joined`.

    Args:
        run_dir: the folder of the run.
        rank: the rank that logged the rows.
        writer: cover only this writer; "" for the trainer.

    Raises:
        WriterNotFoundError: the run has no such writer.
    """
    return _summaries(_joined(_of_streams(run_dir, rank, _records_of, writer), rank))


def computed_summary(run_dir: Path, rank: int, end: str | None = None) -> dict[str, MetricSummary]:
    """Computes the summary of a rank from its rows, up to the session `end` if it is given."""
    return _summaries(_joined(_of_streams(run_dir, rank, _computed_records, end=end), rank))


def _summaries(records: _Records) -> dict[str, MetricSummary]:
    return {name: MetricSummary.from_json(one) for name, one in records.items() if isinstance(one, dict)}


def read_extremes(run_dir: str, metric: str) -> Extremes:
    """Returns a metric's min and max, each with its step, as `RecordedRun.summary` has them."""
    if writers_of(run_dir):
        found = summary_of(Path(run_dir), 0).get(metric)
    elif metrics := _summary_document(run_dir, 0):
        one = metrics.get(metric)
        found = MetricSummary.from_json(one) if isinstance(one, dict) else None
    else:
        found = computed_summary(Path(run_dir), 0).get(metric)
    return (None,) * 4 if found is None else (found.min, found.min_step, found.max, found.max_step)


# Of several writers.


def _of_streams(
    run_dir: Path,
    rank: int,
    read: Callable[[Stream, int], _Records],
    writer: str | None = None,
    problems: list[str] | None = None,
    end: str | None = None,
) -> list[tuple[Stream, _Records]]:
    found = []
    for stream in streams_of(run_dir, writer, end):
        with reported(stream, writer, problems):
            check_format(stream.folder)
            found.append((stream, read(stream, rank)))
    return found


def _joined(found: Sequence[tuple[Stream, _Records]], rank: int) -> _Records:
    """Joins the statistics of a run's streams.

    If several streams have a metric, its last value is the one at the greatest step, min and max cover all
    streams (the first of equal values), and counts are added.
    """
    if len(found) <= 1:
        return found[0][1] if found else {}
    from destinations.history.aggregate import Aggregate

    times = Counter(name for _, records in found for name in records)
    joined = Aggregate(by_step=True)
    for stream, records in found:
        known = {
            name: {**record, "last_step": _step_of_last(stream, record, name, rank)}
            if times[name] > 1
            else record
            for name, record in records.items()
            if isinstance(record, dict)
        }
        try:
            later = Aggregate.from_json({"metrics": known})
        except ValueError:
            # The summary is damaged; the rows have the same information.
            later = Aggregate.from_json({"metrics": _computed_records(stream, rank)})
        joined.merge(later)
    return joined.to_json()


def _step_of_last(stream: Stream, record: Mapping[str, Any], name: str, rank: int) -> int | None:
    """Returns the step of a metric's last value, from its row if the statistics lack it."""
    if (known := whole_of(record.get("last_step"))) is not None:
        return known
    from destinations.history.snapshot import last_rows

    return next((row.step for row in last_rows(stream.folder, 1, rank, {name})), None)


# Of one.


def _records_of(stream: Stream, rank: int) -> _Records:
    """Returns the statistics of each metric of a stream in the form of `summary.json`."""
    found = _summary_document(stream.folder, rank, by_step=bool(stream.writer))
    return found or _computed_records(stream, rank)


def _summary_document(run_dir: str | Path, rank: int, *, by_step: bool = False) -> dict[str, Any]:
    """Returns the `metrics` of `summary.json`, updated with the rows logged after it was written.

    For an ended run, the file is returned unchanged: it covers the whole CSV, and there is no journal. The
    result is empty if the file is missing, damaged, or doesn't match the rows.
    """
    try:
        # A string, because making and joining a Path takes as long as reading the file.
        document = read_object(read_regular(f"{run_dir}/{summary_name(rank)}"))
    except (OSError, ValueError):
        return {}
    metrics, mark = document.get("metrics"), document.get("csv")
    if not isinstance(metrics, dict):
        return {}
    if not isinstance(mark, dict) or _is_all(run_dir, rank, mark):
        return metrics
    try:
        return _with_later_rows(Path(run_dir), rank, document, mark, by_step=by_step)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, csv.Error):
        return {}  # The summary is damaged; the rows have the same information.


def _is_all(run_dir: str | Path, rank: int, mark: Mapping[str, Any]) -> bool:
    """Returns whether a summary with this mark covers all rows, judging by the file sizes."""
    if os.path.exists(f"{run_dir}/{JOURNAL_FOLDER}"):  # noqa: PTH110  # as above
        return False
    rows = f"{run_dir}/{metrics_name(rank)}"
    try:
        return os.stat(rows).st_size == mark.get("bytes")  # noqa: PTH116  # as above
    except OSError:
        return True


def _with_later_rows(
    run_dir: Path, rank: int, document: Mapping[str, Any], mark: Mapping[str, Any], *, by_step: bool
) -> dict[str, Any]:
    from destinations.history.aggregate import Aggregate
    from destinations.history.snapshot import take_snapshot
    from destinations.run_directory.blocks import block_of_rows, blocks_of

    with take_snapshot(run_dir, rank, with_parents=False) as snapshot:
        csv = snapshot.csv
        now = None if csv.begin or csv.limit else csv.mark(mark["bytes"], snapshot.closed)
        if now is None or any(mark[name] != now[name] for name in now):
            return {}
        statistics = Aggregate.from_json(document, by_step=by_step)
        for block in blocks_of(csv, start=mark["bytes"]):
            block.add_to(statistics)
        block_of_rows(snapshot.journal_rows()).add_to(statistics)
    return statistics.to_json()


def last_values(run_dir: Path, problems: list[str] | None = None) -> dict[str, float]:
    """Returns the last value of each metric of rank 0, including rows in the journal.

    Args:
        run_dir: the folder of the run.
        problems: as for `reported`.

    Raises:
        OSError: the rows can't be read.
    """
    records = _joined(_of_streams(run_dir, 0, _records_of, problems=problems), 0)
    lasts = {name: metric_of(one.get("last")) for name, one in records.items() if isinstance(one, dict)}
    return {name: last for name, last in lasts.items() if last is not None}


def _computed_records(stream: Stream, rank: int) -> _Records:
    """Computes the statistics of each metric of a stream from its rows."""
    from destinations.history.aggregate import Aggregate
    from destinations.history.snapshot import take_snapshot
    from destinations.run_directory.blocks import add_rows, block_of_rows

    statistics = Aggregate(by_step=bool(stream.writer))
    with take_snapshot(stream.folder, rank, end=stream.row_end, with_parents=False) as snapshot:
        for file in snapshot.files():
            add_rows(file, statistics, stream.until)
        block_of_rows(snapshot.journal_rows()).until(stream.until).add_to(statistics)
    return statistics.to_json()
