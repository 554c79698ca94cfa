"""Writes the runs of a source as run folders. A ledger in each folder records which state was written."""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from destinations.history.sessions import SESSIONS
from destinations.run_directory import RunDirectory
from destinations.run_directory.layout import ENVIRONMENT, SIDECAR, label_name, strict_json
from destinations.runs.files import folder_lock
from destinations.runs.move.ledger import ReadPosition, SendingError, SentLedger, read_ledger
from destinations.runs.move.sink import DestinationSink, RecordClock
from destinations.runs.move.stream import MoveReport, Record, Restart, SourceRun, Values
from destinations.runs.send.targets import LEDGER, has_content, run_place
from destinations.trackers.names import short_hash
from destinations.trackers.target import SentRun
from uploads.disk import read_json, replace_file

from .source import unique_id

# Values of a step share a row if they were logged within this time.
_ROW_SECONDS = 1.0


class _Directory(RunDirectory):
    """A run folder without the environment of this process, which did not train."""

    def _describe_environment(self, ranks: dict[str, int]) -> dict[str, Any]:
        return {}


class Writer:
    """Writes runs into a folder of run folders.

    Args:
        root: the folder.
        source: the name of the source.
        report: counts the runs and records written.
        is_dry: whether to read the runs without writing.
    """

    def __init__(self, root: Path, source: str, report: MoveReport, *, is_dry: bool = False) -> None:
        self._is_dry = is_dry
        self._root = root
        self._source = source
        self._report = report
        ledgers = ((read_ledger(path), path.parent) for path in root.glob(f"*/{LEDGER}"))
        self._folders = {str(ledger.get("run_id")): folder for ledger, folder in ledgers}
        # The identity of the run that owns each id.
        self._owners = {
            str(read_json(folder / SIDECAR).get("run_id")): identity
            for identity, folder in self._folders.items()
        }

    def write(self, run: SourceRun) -> None:
        """Writes a run, unless it is already there and has not changed.

        Raises:
            BusyError: another process is writing it.
            SendingError: its folder holds something else, or was written to after the import.
        """
        stamp = {"stamp": run.stamp if isinstance(run.stamp, str) else run.stamp()}
        known = read_ledger(self._folders.get(run.identity, self._root) / LEDGER)
        if known.get("state") == "done" and _is_current(known.get("facts") or {}, stamp):
            self._report.unchanged += 1
            return
        run.facts(run)
        if self._owners.setdefault(run.run_id, run.identity) != run.identity:
            run.run_id = unique_id(run.run_id, run.identity)
        if self._is_dry:
            for record in joined(run.read(run)):
                self._report.count(record)
            self._report.runs += 1
            self._report.add(run)
            return
        # Braces would be placeholders.
        name = re.sub(r"[{}]", "_", label_name(run.name)[:200]) or "run"
        self._write(run, stamp, SentRun(run.identity, name, Path(name)))

    def _folder_of(self, sent: SentRun) -> Path:
        """Returns the folder whose ledger names the run, or else a new one with the run's name."""
        if sent.run_id in self._folders:
            return self._folders[sent.run_id]
        plain = self._root / sent.path.name
        beside = plain.with_name(f"{plain.name}-{short_hash(sent.run_id, 8)}")
        # Another process may have started the run since the folders were read.
        owners = {folder: read_ledger(folder / LEDGER).get("run_id") for folder in (plain, beside)}
        if sent.run_id in owners.values():
            return next(folder for folder, owner in owners.items() if owner == sent.run_id)
        return beside if owners[plain] is not None or has_content(plain) else plain

    def _write(self, run: SourceRun, stamp: dict[str, Any], sent: SentRun) -> None:
        given = {"run_id": run.run_id, "tags": run.tags, "notes": run.notes}
        with contextlib.ExitStack() as held:
            # Until the ledger names the run, no other process may take the folder.
            with folder_lock(self._root):
                place = run_place(self._root, sent, given, tracker=_Directory, folder=self._folder_of(sent))
                place.check()
                ledger = held.enter_context(SentLedger(place.ledger_path, sent.run_id, self._source))
                if ledger.state == "done" and _is_current(ledger.facts, stamp):
                    self._report.unchanged += 1
                    return
                if ledger.state == "done" and (place.folder / SESSIONS).exists():
                    raise SendingError(
                        f"run folder {str(place.folder)!r} was written to after it was imported. Move it "
                        "elsewhere to import the run again."
                    )
                place.check_restart()
                ledger.begin("")
            place.restart()
            clock = RecordClock()
            failures = self._report.failure_count
            with DestinationSink(
                run, place.make(clock), clock, self._report, place.make_beside(clock)
            ) as sink:
                sink.start_training()
                sink.take(joined(run.read(run)))
            self._finish(run, place.folder)
            self._report.runs += 1
            self._report.add(run)
            # "failed" makes the next import try the run again.
            failed = self._report.failure_count - failures
            ledger.finish(ReadPosition(), {**stamp, "failed": failed} if failed else stamp)
            self._folders[run.identity] = place.folder

    def _finish(self, run: SourceRun, folder: Path) -> None:
        """Replaces the facts about this process with the source's facts about the run's process."""
        from events import plain_config, redact

        about = {"source": self._source, "run_id": run.run_id, "name": run.name}
        environment = {"imported": about | redact(plain_config(run.environment))}
        text = strict_json(environment, indent=2)
        replace_file(folder / ENVIRONMENT, text.encode())
        (folder / SESSIONS).unlink(missing_ok=True)


def _is_current(facts: Mapping[str, Any], stamp: Mapping[str, Any]) -> bool:
    """Returns whether this state of the source was imported completely, according to a ledger."""
    return facts.get("stamp") == stamp["stamp"] and "failed" not in facts


def joined(records: Iterable[Record]) -> Iterator[Record]:
    """Joins consecutive values of a step into rows, with the time of the last one; skips empty values."""
    row: Values | None = None
    began = 0.0
    for record in records:
        if not isinstance(record, Values):
            if row is not None and isinstance(record, Restart):
                yield row
                row = None
            yield record
            continue
        if not record.metrics:
            continue
        joins = (
            row is not None
            and _place_of(row) == _place_of(record)
            and row.metrics.keys().isdisjoint(record.metrics)
            and abs((record.time or began) - began) <= _ROW_SECONDS
        )
        if row is not None and joins:
            metrics = {**row.metrics, **record.metrics}
            row = attrs.evolve(row, metrics=metrics, time=record.time or row.time)
            continue
        if row is not None:
            yield row
        row, began = record, record.time or 0.0
    if row is not None:
        yield row


def _place_of(row: Values) -> tuple[Any, ...]:
    return row.step, row.epoch, row.rank, row.writer
