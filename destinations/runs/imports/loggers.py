"""Imports folders that this package reads directly: stable-pretraining's registry, Lightning's CSV logs."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from destinations.runs.index.foreign import METRICS
from destinations.runs.move.stored import StoredRun
from destinations.runs.move.stream import Record, SourceRun
from destinations.runs.open import open_runs
from destinations.runs.run import RecordedRun

from .source import Source, SourceError, unique_id, unreadable_run
from .tables import TABLE, stamp_of


def _claims(place: str) -> bool:
    """Returns whether a folder has such runs."""
    if not Path(place).is_dir():
        return False
    with open_runs(place) as runs:
        return any(run.record.kind != "run-directory" for run in runs.query(archived=None))


def _runs(place: str, _: Mapping[str, str]) -> list[SourceRun]:
    with open_runs(place) as runs:
        damaged = [unreadable_run(path, problem) for path, problem in runs.report.problems]
        found = [run for run in runs.query(archived=None) if run.record.kind != "run-directory"]
    return [*map(_run_of, found), *damaged]


def _run_of(run: RecordedRun) -> SourceRun:
    stored = StoredRun(run)
    stored.is_over = not run.is_written
    stored.refresh()
    made = stored.source
    made.stamp = stamp_of(run.path)
    if run.record.kind == "lightning-csv":
        # Every project has a `version_0`.
        made.run_id = unique_id(run.path.name, made.identity)
    read = made.read

    def read_all(about: SourceRun) -> Iterator[Record]:
        yield from read(about)
        _find_damage(run.path / METRICS, about)

    made.read = read_all
    return made


def _find_damage(path: Path, about: SourceRun) -> None:
    """Adds the damage in a metrics file, which readers of runs skip."""
    try:
        (table,) = TABLE.runs(str(path), {"step": "step"})
        for _ in table.read(table):
            pass
    except FileNotFoundError:
        return
    except SourceError as error:
        about.problems.append(str(error))
    else:
        about.lost += table.lost


LOGGERS = Source(
    "loggers", "a folder with runs of stable-pretraining or of Lightning's CSVLogger", _claims, _runs
)
