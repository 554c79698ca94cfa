"""Folders that this package reads as they are: stable-pretraining's registry, and Lightning's `CSVLogger`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from destinations.runs.index.foreign import METRICS
from destinations.runs.open import open_runs
from destinations.runs.run import Run
from destinations.runs.send import send
from destinations.runs.send.ledger import BusyError, read_ledger
from destinations.runs.send.targets import LEDGER

from .source import ImportReport, Progress, Source, SourceError, unique_id
from .tables import TABLE

__all__ = ["LOGGERS"]


def _claims(place: str) -> bool:
    """Says whether a folder has such runs."""
    if not Path(place).is_dir():
        return False
    with open_runs(place) as runs:
        return any(run.record.kind != "run-directory" for run in runs.query(archived=None))


def _copy(place: str, root: Path, report: ImportReport, progress: Progress) -> None:
    """Copies the runs below a folder; repeated, it copies what is new.

    Raises:
        SourceError: the copies would be among the originals.
    """
    if root.resolve().is_relative_to(Path(place).resolve()):
        raise SourceError(f"{str(root)!r} is in {place!r}. Choose a folder beside it.")
    with open_runs(place) as runs:
        for path, problem in runs.report.problems:
            report.fail(f"{path}: {problem}")
        found = [run for run in runs.query(archived=None) if run.record.kind != "run-directory"]
    ledgers = [read_ledger(path) for path in root.glob(f"*/{LEDGER}")]
    for done, run in enumerate(found):
        progress(done, len(found), 0)
        try:
            record = attrs.evolve(run.record, run_id=_id_of(run, ledgers))
            sent = send(Run(record), f"run:{root}", abandoned=True)
        except BusyError:
            report.busy += 1
            continue
        except Exception as error:  # noqa: BLE001  # whatever is wrong with this run, the others are wanted
            report.fail(f"skipped run {run.run_id} in {run.path}: {error}")
            continue
        if sent.missing:
            report.left_out["files that are missing"] += len(sent.missing)
        for text in (*sent.failed, *_damage_in(run.path / METRICS)):
            report.fail(f"{run.run_id}: {text}")
        report.failure_count += sent.failures - len(sent.failed)
        is_new = bool(sent.rows or sent.records)
        report.runs += is_new
        report.unchanged += not is_new
        report.rows += sent.rows
        report.values += sent.values
        report.records += sent.records
        progress(done, len(found), sent.values + sent.records.total())
    progress(len(found), len(found), 0)


def _damage_in(path: Path) -> list[str]:
    """Returns what cannot be read in a file of metrics: readers of runs take what they can."""
    try:
        (table,) = TABLE.runs(str(path), {"step": "step"})
        for _ in table.read(table):
            pass
    except FileNotFoundError:
        return []
    except SourceError as error:
        return [str(error)]
    return [f"{count} {what}" for what, count in table.lost.items()]


def _id_of(run: Run, ledgers: Sequence[Mapping[str, Any]]) -> str:
    """Returns the id of a copy; see `unique_id`. A copy of an earlier version keeps its own."""
    if run.record.kind != "lightning-csv":
        return run.run_id
    about = (run.path / METRICS).stat()
    stamps = {METRICS: [about.st_size, about.st_mtime_ns]}
    if any(
        one.get("run_id") == run.run_id and (one.get("facts") or {}).get("files") == stamps for one in ledgers
    ):
        return run.run_id
    return unique_id(run.path.name, f"lightning-csv {run.path}")


LOGGERS = Source(
    "loggers", "a folder with runs of stable-pretraining or of Lightning's CSVLogger", _claims, copy=_copy
)
