"""Writes a run of a source as a run folder, once: a ledger in the folder says what was written of it."""

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from destinations.history.sessions import SESSIONS
from destinations.run_directory import RunDirectory
from destinations.run_directory.layout import ENVIRONMENT, SIDECAR, label_name, strict_json
from destinations.runs.content.sources import ReadPosition
from destinations.runs.send.ledger import BusyError, SendingError, SentLedger, read_ledger
from destinations.runs.send.replay import RecordClock, exception_of
from destinations.runs.send.targets import LEDGER, RunPlace, folder_place, has_content
from destinations.trackers.names import short_hash
from destinations.trackers.target import SentRun
from uploads.disk import read_json, replace_file

from .source import File, ImportReport, Item, Restart, SourceRun, Values, unique_id

__all__ = ["Writer"]

# Values of a step are one row, if they were logged within this time.
_ROW_SECONDS = 1.0
# A queue that is full would drop records.
_RECORDS_BETWEEN_FLUSHES = 50
# Of what an import makes of a run: runs that an earlier version wrote are written anew.
_VERSION = 2
# Another process that has the lock of a ledger says at once in it which run it writes.
_CLAIM_SECONDS = 10.0


class _Directory(RunDirectory):
    """A run folder that says nothing about this process, which did not train."""

    def _describe_environment(self, ranks: dict[str, int]) -> dict[str, Any]:
        return {}


class _Place(RunPlace):
    """The folder of an imported run: that of its ledger, else a new one with its name."""

    folders: dict[str, Path]

    def _find_folder(self, parent: Path) -> Path:
        identity = self.run.run_id
        plain = parent / self.run.path.name
        beside = parent / f"{plain.name}-{short_hash(identity, 8)}"
        # Another process may have begun the run since the folders were read.
        owners = {folder: read_ledger(folder / LEDGER).get("run_id") for folder in (plain, beside)}
        if identity in self.folders or identity in owners.values():
            return self.folders.get(identity) or next(one for one in owners if owners[one] == identity)
        return beside if owners[plain] is not None or has_content(plain) else plain


class Writer:
    """Writes runs into a folder of run folders.

    Args:
        root: the folder.
        source: the name of the source.
        report: what was written is added to it.
        on_items: called with a number of values and records that were written.
        is_dry: read the runs, and write nothing.
    """

    def __init__(
        self,
        root: Path,
        source: str,
        report: ImportReport,
        on_items: Callable[[int], object],
        *,
        is_dry: bool = False,
    ) -> None:
        self._is_dry = is_dry
        self._root = root
        self._source = source
        self._report = report
        self._on_items = on_items
        ledgers = ((read_ledger(path), path.parent) for path in root.glob(f"*/{LEDGER}"))
        self._folders = {str(ledger.get("run_id")): folder for ledger, folder in ledgers}
        # Ids, and which run has each.
        self._owners = {
            str(read_json(folder / SIDECAR).get("run_id")): identity
            for identity, folder in self._folders.items()
        }

    def write(self, run: SourceRun) -> None:
        """Writes a run, unless it is there and has not changed, or another process is writing it.

        Raises:
            SendingError: its folder holds something else, or was written to since.
        """
        stamp = {"stamp": run.stamp if isinstance(run.stamp, str) else run.stamp(), "version": _VERSION}
        folder = self._folders.get(run.identity, self._root)
        known = read_ledger(folder / LEDGER)
        facts = known.get("facts") or {}
        # A run that was continued here is not replaced for the sake of a new version.
        is_same = facts.get("stamp") == stamp["stamp"] and "failed" not in facts
        is_same = is_same and (folder / SESSIONS).exists()
        if known.get("state") == "done" and (facts == stamp or is_same):
            self._report.unchanged += 1
            return
        run.facts(run)
        if self._owners.setdefault(run.run_id, run.identity) != run.identity:
            run.run_id = unique_id(run.run_id, run.identity)
        if self._is_dry:
            for item in _rows_of(run.read(run)):
                self._on_items(self._report.count(item))
            self._tell(run)
            return
        # Braces would be placeholders.
        name = re.sub(r"[{}]", "_", label_name(run.name)[:200]) or "run"
        sent = SentRun(run.identity, name, Path(name))
        given = {"run_id": run.run_id, "tags": run.tags, "notes": run.notes}
        try:
            with self._claimed(sent, given) as (place, ledger):
                self._write(run, stamp, place, ledger)
        except BusyError:
            self._report.busy += 1

    @contextlib.contextmanager
    def _claimed(self, sent: SentRun, given: Mapping[str, Any]) -> Iterator[tuple[RunPlace, SentLedger]]:
        """Holds the ledger of a run's folder, so that no other process writes the run; yields both.

        Raises:
            BusyError: another process does.
            SendingError: its folder holds something else.
        """
        give_up_at = time.monotonic() + _CLAIM_SECONDS
        place_class = type("_PlaceHere", (_Place,), {"folders": self._folders})
        with contextlib.ExitStack() as held:
            while True:
                place = folder_place(place_class, _Directory, self._root, sent, given)
                place.check()
                try:
                    ledger = held.enter_context(SentLedger(place.ledger_path, sent.run_id, self._source))
                    break
                except SendingError as error:
                    # The folder was taken since it was looked at; who did that is about to say for which run.
                    owner = read_ledger(place.ledger_path).get("run_id")
                    is_unknown = owner is None and not isinstance(error, BusyError)
                    if owner == sent.run_id or is_unknown or time.monotonic() > give_up_at:
                        raise
                    time.sleep(0.02)
            yield place, ledger

    def _write(self, run: SourceRun, stamp: dict[str, Any], place: RunPlace, ledger: SentLedger) -> None:
        if ledger.state == "done" and ledger.facts == stamp:
            self._report.unchanged += 1
            return
        if ledger.state == "done" and (place.folder / SESSIONS).exists():
            raise SendingError(
                f"run folder {str(place.folder)!r} was written to after it was imported. Move it "
                "elsewhere to import the run anew."
            )
        place.check_restart()
        ledger.begin("")
        place.restart()
        clock = RecordClock()
        failures = self._report.failure_count
        _Sink(run, place.make(clock), clock, self._report, self._on_items).log_all()
        self._finish(run, place.folder)
        self._tell(run)
        # With these facts the run has changed: the next import tries again what could not be read or written.
        failed = self._report.failure_count - failures
        ledger.finish(ReadPosition(), {**stamp, "failed": failed} if failed else stamp)
        self._folders[run.identity] = place.folder

    def _tell(self, run: SourceRun) -> None:
        """Adds to the report what the source saw."""
        report = self._report
        report.runs += 1
        report.left_out += run.left_out
        report.seen.there += run.seen.there
        report.seen.read += run.seen.read
        for what, count in run.lost.items():
            report.fail(f"{run.run_id}: {count} {what}", count)
        if unread := run.seen.there - run.seen.read:
            of_all = f"{unread} of {run.seen.there} bytes"
            report.fail(f"{run.run_id}: {of_all} are damaged or cut off, and could not be read")

    def _finish(self, run: SourceRun, folder: Path) -> None:
        """Replaces what `RunDirectory` says about this process by what the source says about the run's."""
        from events import plain_config, redact

        about = {"source": self._source, "run_id": run.run_id, "name": run.name}
        environment = {"imported": about | redact(plain_config(run.environment))}
        text = strict_json(environment, indent=2)
        replace_file(folder / ENVIRONMENT, text.encode())
        (folder / SESSIONS).unlink(missing_ok=True)
        lost = read_json(folder / SIDECAR).get("lost") or {}
        for what, count in lost.items() if isinstance(lost, dict) else ():
            self._report.fail(f"{run.run_id}: {count} {what} could not be written", int(count))


class _Sink:
    """Logs the items of one run to its folder, from `init` to `post_close`."""

    def __init__(
        self,
        run: SourceRun,
        destination: Any,
        clock: RecordClock,
        report: ImportReport,
        on_items: Callable[[int], object],
    ) -> None:
        from events import Engine, Logger, State

        # Set explicitly: the environment of this process says nothing about the run.
        state = State(run.name, rank=0, local_rank=0, world_size=1, local_world_size=1, node_rank=0)
        self._run = run
        self._destination = destination
        self._clock = clock
        self._logger = Logger(state, [destination], raise_errors=True, strict=True)
        self._engine = Engine(state, self._logger)
        self._report = report
        self._on_items = on_items
        self._last_step: int | None = None
        self._unflushed = 0

    def log_all(self) -> None:
        """Reads the source to its end."""
        run, error = self._run, None
        self._clock.now = run.created_at
        self._engine.run_event("init")
        # A restart of the source then replaces rows of this training.
        self._engine.run_event("fit_start")
        try:
            for item in _rows_of(run.read(run)):
                self._log(item)
            if run.hyperparameters:
                self._attempt(
                    "hyperparameters", lambda: self._logger.log_hyperparameters(run.hyperparameters)
                )
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._close(error)

    def _close(self, error: BaseException | None) -> None:
        from events import RunStatus

        run, state = self._run, self._logger.state
        if run.ended_at is not None:
            self._clock.now = run.ended_at
        state.status = RunStatus(run.status or "preempted")
        if run.exception and run.status == "failed":
            state.exception = exception_of(run.exception)
        self._engine.close(error)

    def _log(self, item: Item) -> None:
        if isinstance(item, Restart):
            self._restart(item.step)
            return
        if item.time is not None and math.isfinite(item.time):
            self._clock.now = item.time
        if isinstance(item, Values):
            kind, call = "metrics", lambda: self._logger.log_metrics(item.metrics, item.step)
            self._prepare(item)
        elif isinstance(item, File):
            # Not through the logger, which fills in placeholders: somebody else chose these names.
            upload, state = self._destination.upload_file, self._logger.state
            kind, call = "artifact", lambda: upload(state, item.name, item.path, overwrite=True)
        else:
            method, about = getattr(self._logger, item.kind.method), {"name": item.name, "step": item.step}
            kind, call = item.kind.name, lambda: method(**about, **item.arguments)
        if self._attempt(kind, call):
            self._on_items(self._report.count(item))
        if not isinstance(item, Values):
            self._unflushed = (self._unflushed + 1) % _RECORDS_BETWEEN_FLUSHES
            if not self._unflushed:
                self._destination.flush()

    def _prepare(self, row: Values) -> None:
        from events import Time, Timestamp

        if row.epoch is not None and math.isfinite(row.epoch):
            self._logger.state.timestamp = Timestamp(epoch=Time(max(0, int(row.epoch)), "ep"))
        if row.step == self._last_step:
            # Keeps the rows apart; `RunDirectory` merges the calls of a step.
            self._destination.state_dict()
        self._last_step = row.step

    def _restart(self, step: int) -> None:
        from events import Time, Timestamp

        state = self._logger.state
        self._destination.before_load(state, self._logger)
        self._destination.load_state_dict({"time": 0.0})  # What was logged at that step goes too.
        self._destination.after_load(state, self._logger)
        state.timestamp = Timestamp(batch=Time(max(0, step), "ba"))
        self._destination.fit_start(state, self._logger)
        state.timestamp = Timestamp()
        self._last_step = None

    def _attempt(self, kind: str, call: Callable[[], object]) -> bool:
        try:
            call()
        except Exception as error:  # noqa: BLE001  # a rejected record must not cost the others
            self._report.fail(f"{self._run.run_id}: {kind}: {type(error).__name__}: {error}")
            return False
        return True


def _rows_of(items: Iterable[Item]) -> Iterator[Item]:
    """Joins consecutive values of a step to rows, with the time of the last one; leaves out empty ones."""
    row: Values | None = None
    began = 0.0
    for item in items:
        if not isinstance(item, Values):
            if row is not None and isinstance(item, Restart):
                yield row
                row = None
            yield item
            continue
        if not item.metrics:
            continue
        joins = (
            row is not None
            and (row.step, row.epoch) == (item.step, item.epoch)
            and row.metrics.keys().isdisjoint(item.metrics)
            and abs((item.time or began) - began) <= _ROW_SECONDS
        )
        if row is not None and joins:
            row = Values({**row.metrics, **item.metrics}, row.step, item.time or row.time, row.epoch)
            continue
        if row is not None:
            yield row
        row, began = item, item.time or 0.0
    if row is not None:
        yield row
