"""The statistics of each metric of a run: those of `summary.json`, and of the rows after it.

Never writes into the run.
"""

from __future__ import annotations

import csv
import itertools
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from destinations.run_directory.layout import JOURNAL_FOLDER, check_format, metrics_name, summary_name
from uploads.disk import read_regular

from .files import metric_of, read_object, whole_of
from .streams import reported, streams_of, writers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .record import Extremes
    from .streams import Stream

    _Records = Mapping[str, Any]

__all__ = ["MetricSummary", "computed_summary", "last_values", "read_extremes", "summary_of"]


@attrs.frozen
class MetricSummary:
    """The statistics of a metric. Min, max and mean are those of the finite values.

    Attributes:
        last: the last value.
        min: None if no value is finite.
        max: None if no value is finite.
        min_step: the step of the first minimum; None if unknown.
        max_step: the step of the first maximum; None if unknown.
        count: number of values.
        non_finite: number of values that are NaN or infinite.
        mean: None if unknown.
    """

    last: float | None
    min: float | None
    max: float | None
    min_step: int | None
    max_step: int | None
    count: int
    non_finite: int
    mean: float | None


def summary_of(
    run_dir: Path, rank: int, writer: str | None = None, problems: list[str] | None = None
) -> dict[str, MetricSummary]:
    """Returns the statistics of each metric of a rank, as its rows have them; see `_joined`.

    Args:
        run_dir: the folder of the run.
        rank: of the rows.
        writer: only those of this writer; "" for the trainer's.
        problems: as of `reported`.

    Raises:
        WriterNotFoundError: the run has no such writer.
    """
    return _joined(_of_streams(run_dir, rank, _records_of, writer, problems), rank)


def computed_summary(run_dir: Path, rank: int) -> dict[str, MetricSummary]:
    """Computes the summary of a rank from its rows."""
    return _joined(_of_streams(run_dir, rank, _computed_records), rank)


def read_extremes(run_dir: str, metric: str) -> Extremes:
    """Returns the smallest and largest value of a metric of a run, each with its step; as `Run.summary`."""
    if writers_of(run_dir):
        found = summary_of(Path(run_dir), 0).get(metric)
    elif metrics := _summary_document(run_dir, 0):
        one = metrics.get(metric)
        found = _metric_summary(one) if isinstance(one, dict) else None
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
) -> list[tuple[Stream, _Records]]:
    found = []
    for stream in streams_of(run_dir, writer):
        with reported(stream, writer, problems):
            check_format(stream.folder)
            found.append((stream, read(stream, rank)))
    return found


def _joined(found: Sequence[tuple[Stream, _Records]], rank: int) -> dict[str, MetricSummary]:
    """Returns the statistics of a run from those of its streams.

    Of a metric that several have, the last value is that of the greatest step, min and max are those of all,
    and of equal ones the first; counts are sums.
    """
    joined: dict[str, MetricSummary] = {}
    lasts: dict[str, tuple[Stream, Mapping[str, Any]]] = {}
    for stream, records in found:
        for name, record in records.items():
            if not isinstance(record, dict):
                continue
            one, before = _metric_summary(record), joined.get(str(name))
            if before is None:
                joined[str(name)], lasts[str(name)] = one, (stream, record)
                continue
            is_later = _is_later(
                _step_of_last(*lasts[name], name, rank), _step_of_last(stream, record, name, rank)
            )
            joined[name] = _both(before, one, is_later=is_later)
            if is_later:
                lasts[name] = stream, record
    return joined


def _step_of_last(stream: Stream, record: Mapping[str, Any], name: str, rank: int) -> int | None:
    """Returns the step of the last value of a metric; named writers note it, a trainer's row tells it."""
    if "last_step" in record:
        return whole_of(record["last_step"])
    from destinations.run_directory.reader import last_rows

    return next((row.step for row in last_rows(stream.folder, 1, rank, {name})), None)


def _is_later(one: int | None, other: int | None) -> bool:
    return one is None or (other is not None and other >= one)


def _both(one: MetricSummary, other: MetricSummary, *, is_later: bool) -> MetricSummary:
    """Returns the statistics of the values of two; `is_later` says that the other has the last one."""
    low = other if one.min is None or (other.min is not None and other.min < one.min) else one
    high = other if one.max is None or (other.max is not None and other.max > one.max) else one
    known = [(each.mean, each.count - each.non_finite) for each in (one, other) if each.mean is not None]
    finite = sum(count for _, count in known)
    return MetricSummary(
        last=other.last if is_later else one.last,
        min=low.min,
        min_step=low.min_step,
        max=high.max,
        max_step=high.max_step,
        count=one.count + other.count,
        non_finite=one.non_finite + other.non_finite,
        mean=sum(mean * (count / finite) for mean, count in known) if finite else None,
    )


# Of one.


def _records_of(stream: Stream, rank: int) -> _Records:
    """Returns what is known of each metric of a stream, as `summary.json` has it."""
    found = _summary_document(stream.folder, rank, by_step=bool(stream.writer))
    return found or _computed_records(stream, rank)


def _summary_document(run_dir: str | Path, rank: int, *, by_step: bool = False) -> dict[str, Any]:
    """Returns the `metrics` of `summary.json`, with the rows that were logged after it was written.

    The file of a run that ended is returned as it is: it covers the whole CSV, and there is no journal.
    Empty if it is missing or damaged, or of other rows than there are.
    """
    try:
        # A text: to make and join a Path takes as long as to read the file.
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
        return {}  # Damaged; the rows have all that it said.


def _is_all(run_dir: str | Path, rank: int, mark: Mapping[str, Any]) -> bool:
    """Returns whether a summary with this mark covers all rows, for all that their files' sizes tell."""
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
    from destinations.run_directory.reader import merge_journal
    from destinations.run_directory.statistics import Statistics

    from .content.rank_reader import RankReader

    with RankReader(run_dir, rank).look() as look:
        snapshot = look.snapshot
        now = snapshot.csv.mark(mark["bytes"], snapshot.closed)
        if snapshot.resumes or now is None or any(mark[name] != now[name] for name in now):
            return {}
        statistics = Statistics.from_summary(document, by_step=by_step)
        later = itertools.chain(snapshot.csv.rows(mark["bytes"]), merge_journal([], snapshot.records))
        statistics.add_mixed((row.step, row.epoch, row.metrics) for row in later)
    return {name: metric.to_json() for name, metric in statistics.metrics.items()}


def last_values(run_dir: Path, problems: list[str] | None = None) -> dict[str, float]:
    """Returns the last value of each metric of rank 0 as its rows have it, in the journal too.

    Args:
        run_dir: the folder of the run.
        problems: as of `reported`.

    Raises:
        OSError: the rows cannot be read.
    """
    lasts = {name: one.last for name, one in summary_of(run_dir, 0, problems=problems).items()}
    return {name: last for name, last in lasts.items() if last is not None}


def _metric_summary(record: Mapping[str, Any]) -> MetricSummary:
    """Returns an entry of `summary.json`; those of stable-pretraining lack steps and mean."""
    # A metric of bools is 0 and 1 to the reader, as in `metrics.csv`.
    numbers = {name: metric_of(record.get(name)) for name in ("last", "min", "max", "mean")}
    # stable-pretraining keeps a NaN that was logged first as min and max.
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


def _computed_records(stream: Stream, rank: int) -> _Records:
    """Computes what is known of each metric of a stream from its rows."""
    from destinations.run_directory.reader import retried

    return retried(lambda: _read_records(stream, rank))


def _read_records(stream: Stream, rank: int) -> _Records:
    from destinations.run_directory.blocks import blocks_of, without_abandoned
    from destinations.run_directory.part_index import PartIndex, indexed_files, is_cut
    from destinations.run_directory.reader import merge_journal, take_snapshot
    from destinations.run_directory.statistics import Statistics

    statistics = Statistics(by_step=bool(stream.writer))
    with take_snapshot(stream.folder, rank) as snapshot:
        if stream.writer:
            statistics.add_mixed((row.step, row.epoch, row.metrics) for row in snapshot.rows())
            return {name: metric.to_json() for name, metric in statistics.metrics.items()}
        resumes = snapshot.resumes
        for file, index in indexed_files(snapshot):
            if index is not None and not any(is_cut(index, resume) for resume in resumes):
                statistics.add_index(index)
                continue
            for block in blocks_of(file):
                statistics.add_index(PartIndex.of_block(without_abandoned(block, resumes)))
        later = merge_journal([], snapshot.records)
        statistics.add_mixed((row.step, row.epoch, row.metrics) for row in later)
    return {name: metric.to_json() for name, metric in statistics.metrics.items()}
