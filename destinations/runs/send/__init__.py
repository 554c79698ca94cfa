"""`send`: copies a run to a tracker or to another folder, incrementally and without duplicates.

```python
send(open_runs("runs")["digits"], "tensorboard:tb")
```

A ledger records what was sent, so that repeating `send` sends only new records. After an interrupted attempt
the partial copy is removed and everything is sent again. Runs in the calling thread, and blocks.
"""

import contextlib
import json
import os
import time
import uuid
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from destinations.kinds import indexes
from destinations.run_directory.layout import JOURNAL_FOLDER, metrics_name
from destinations.runs.content.sources import ReadPosition, items_of, ranks_of
from destinations.runs.errors import RunNotFoundError
from destinations.runs.index.index import cache_folder
from destinations.runs.run import Run
from destinations.runs.streams import streams_of
from destinations.text.formatting import plain

from .ledger import SendingError, SentLedger
from .replay import RecordClock, ReplayReport, RewoundError, replay
from .targets import TargetError, place_of

__all__ = ["SendingError", "TargetError", "send"]


def send(
    run: Run,
    target: str,
    *,
    follow: bool = False,
    again: bool = False,
    abandoned: bool = False,
    options: Mapping[str, Any] | None = None,
    cache: str | os.PathLike[str] | None = None,
    wait: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> ReplayReport:
    """Sends the new records of a run to a target.

    ```python
    with open_runs("runs") as runs:
        report = send(runs["digits"], "tensorboard:logs")
    ```

    Args:
        run: the run to send.
        target: "run:FOLDER", or "NAME:PLACE" of a tracker, such as "tensorboard:FOLDER" or
            "wandb:ENTITY/PROJECT"; the name is that of `create_destination` in lower case. In a FOLDER, the
            run gets a subfolder of its name.
        follow: keep sending until the run ends, or until Ctrl-C.
        again: replace what was sent before by a complete copy.
        abandoned: include rows abandoned when training resumed from an earlier step; see `replay`.
        options: further arguments of the tracker's constructor.
        cache: folder for the ledgers of targets that are not folders; default: the user's cache folder.
        wait: sleeps for a number of seconds.
        now: returns the time in seconds since 1970.

    Returns:
        What this call sent.

    Raises:
        TargetError: invalid target or option.
        SendingError: the target contains something else, or another process is sending this run to it.
        ImportError: the tracker's package is not installed.
    """
    cache = Path(cache) if cache is not None else cache_folder().parent
    place = place_of(target, run.record, cache, options or {})
    place.check()
    place.with_abandoned = abandoned
    replays_abandoned = abandoned and not place.copies_abandoned

    def attempt(ledger: SentLedger, *, starts_over: bool) -> ReplayReport:
        position = ReadPosition() if starts_over else ledger.position
        facts = _facts_of(run, abandoned)
        is_file_missing = abandoned and place.copies_abandoned and not ledger.facts.get("abandoned")
        may_be_current = not starts_over and not follow and not is_file_missing
        if may_be_current and _is_up_to_date(run, position, facts, ledger.facts, replays_abandoned):
            return ReplayReport(position=position, is_over=not facts["is_alive"])
        clock = RecordClock()
        place.target.starts_over, place.target.earlier_id = starts_over, ledger.copy_id
        place.target.copy_id = uuid.uuid4().hex if starts_over else ledger.copy_id
        destination: Any = place.make(clock)
        if starts_over:
            place.check_restart()
            # The ledger names the earlier copy until that is removed.
            ledger.begin(ledger.copy_id)
            place.restart()
        ledger.begin(place.target.copy_id)
        report = replay(
            run,
            destination,
            clock=clock,
            position=position,
            follow=follow,
            abandoned=replays_abandoned,
            make_rank_destination=place.rank_factory(clock),
            make_writer_destination=place.writer_factory(clock),
            wait=wait,
            now=now,
        )
        _count_undelivered(destination, report)
        if not report.failures:
            place.finish(run)
            # For a live run the earlier facts, so that changes since then are sent next time.
            ledger.finish(report.position, _facts_of(run, abandoned) if follow and report.is_over else facts)
        return report

    with SentLedger(place.ledger_path, run.record.run_id, place.name) as ledger:
        starts_over = again or ledger.state != "done" or place.is_gone()
        while True:
            try:
                return attempt(ledger, starts_over=starts_over)
            except RewoundError:
                # Training resumed from an earlier step: rows of the abandoned branch were sent and must be
                # removed.
                if starts_over and not follow:
                    raise
                starts_over = True


def _facts_of(run: Run, abandoned: bool) -> dict[str, Any]:
    """Returns a fingerprint of everything sent besides rows and records."""
    try:
        now = run.reload()
    except RunNotFoundError:
        now = run
    given = json.dumps(plain(now.hyperparameters), sort_keys=True)
    return {
        "status": now.status,
        "is_alive": now.is_written,
        "hyperparameters": zlib.crc32(given.encode()),
        "files": _stamps_of(run.path),
        "abandoned": abandoned,
    }


def _stamps_of(run_dir: Path) -> dict[str, list[int]] | None:
    """Returns size and mtime of each file with rows or records; None if a journal may hold newer rows."""
    stamps = {}
    for stream in streams_of(run_dir):
        if (stream.folder / JOURNAL_FOLDER).exists():
            return None
        for name in (*map(metrics_name, ranks_of(stream.folder)), *indexes()):
            with contextlib.suppress(OSError):
                about = (stream.folder / name).stat()
                stamps[stream.prefix + name] = [about.st_size, about.st_mtime_ns]
    return stamps


def _is_up_to_date(
    run: Run, position: ReadPosition, facts: dict[str, Any], known: dict[str, Any], abandoned: bool
) -> bool:
    """Returns whether the target is up to date: no new rows or records, and the same status."""
    if not facts["abandoned"]:
        known = {**known, "abandoned": False}
    if facts == known and facts["files"] is not None:
        return True
    if any(facts[name] != known.get(name) for name in ("status", "is_alive", "hyperparameters")):
        return False
    looked_at = ReadPosition(**attrs.asdict(position))
    return next(items_of(run.path, looked_at, abandoned=abandoned), None) is None


def _count_undelivered(destination: Any, report: ReplayReport) -> None:
    """Adds what the destination accepted but could not deliver to the failures."""
    counts = getattr(destination, "counts", None)
    for what in ("dropped_rows", "failed_rows", "dropped_records", "failed_records"):
        count = int(getattr(counts, what, 0) or 0)
        if count:
            report.failures += count
            errors = ", ".join(getattr(counts, "errors", {}))
            report.failed.append(f"{count} {what.replace('_', ' ')}{f': {errors}' if errors else ''}")
