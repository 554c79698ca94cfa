"""`send`: copies a run to a tracker or to another folder, incrementally and without duplicates.

```python
send(open_runs("runs")["digits"], "tensorboard:tb")
```

A ledger records the sent records, so repeating `send` sends only new ones. After an interrupted attempt, the
partial copy is removed and everything is sent again. Runs in the calling thread and blocks.
"""

import json
import os
import time
import uuid
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from destinations.runs.errors import RunNotFoundError
from destinations.runs.index.index import cache_folder
from destinations.runs.move.ledger import ReadPosition, SendingError, SentLedger, TargetError
from destinations.runs.move.sink import RecordClock
from destinations.runs.move.stored import RewoundError, StoredRun
from destinations.runs.move.stream import MoveReport
from destinations.runs.run import RecordedRun
from destinations.text.formatting import plain

from .replay import replay
from .targets import place_of

__all__ = ["SendingError", "TargetError", "send"]


def send(
    run: RecordedRun,
    target: str,
    *,
    follow: bool = False,
    again: bool = False,
    options: Mapping[str, Any] | None = None,
    cache: str | os.PathLike[str] | None = None,
    wait: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> MoveReport:
    """Sends the new records of a run to a target.

    ```python
    with open_runs("runs") as runs:
        report = send(runs["digits"], "tensorboard:logs")
    ```

    Args:
        run: the run to send.
        target: "run:FOLDER", or "NAME:PLACE" for a tracker, such as "tensorboard:FOLDER" or
            "wandb:ENTITY/PROJECT". The name is the one that `create_destination` takes, in lower case. In a
            FOLDER, the run gets a subfolder with its name.
        follow: keep sending until the run ends, or until Ctrl-C.
        again: replace the earlier copy with a complete new one.
        options: further arguments of the tracker's constructor.
        cache: folder for the ledgers of targets that are not folders. Default: the user's cache folder.
        wait: sleeps for a number of seconds.
        now: returns the time in seconds since 1970.

    Returns:
        The report of this call.

    Raises:
        TargetError: invalid target or option.
        SendingError: the target contains other files, or another process is sending this run to it.
        ImportError: the tracker's package is not installed.
    """
    cache = Path(cache) if cache is not None else cache_folder().parent
    place = place_of(target, run.record, cache, options or {})
    place.check()

    def attempt(ledger: SentLedger, *, starts_over: bool) -> MoveReport:
        position = ReadPosition() if starts_over else ledger.position
        facts = _facts_of(run)
        may_be_current = not starts_over and not follow
        if may_be_current and _is_current(run, position, facts, ledger.facts):
            return MoveReport(unchanged=1, position=position, is_over=not facts["is_alive"])
        clock = RecordClock()
        place.target.starts_over, place.target.earlier_id = starts_over, ledger.copy_id
        place.target.copy_id = uuid.uuid4().hex if starts_over else ledger.copy_id
        destination: Any = place.make(clock)
        if starts_over:
            place.check_restart()
            # The ledger names the earlier copy until it has been removed.
            ledger.begin(ledger.copy_id)
            place.restart()
        ledger.begin(place.target.copy_id)
        report = replay(
            run,
            destination,
            clock=clock,
            position=position,
            follow=follow,
            make=place.make_beside(clock),
            wait=wait,
            now=now,
        )
        if report.failure_count == report.damaged:
            place.finish(run)
            # For a live run, store the earlier facts, so that later changes are sent next time.
            ledger.finish(report.position, _facts_of(run) if follow and report.is_over else facts)
        return report

    with SentLedger(place.ledger_path, run.record.run_id, place.name) as ledger:
        starts_over = again or ledger.state != "done" or place.is_gone()
        while True:
            try:
                return attempt(ledger, starts_over=starts_over)
            except RewoundError:
                # Training resumed from an earlier step, so rows of the abandoned branch must be removed.
                if starts_over and not follow:
                    raise
                starts_over = True


def _facts_of(run: RecordedRun) -> dict[str, Any]:
    """Returns a fingerprint of everything sent, except for rows and records."""
    try:
        now = run.reload()
    except RunNotFoundError:
        now = run
    given = json.dumps(plain(now.hyperparameters), sort_keys=True)
    return {
        "status": now.status,
        "is_alive": now.is_written,
        "hyperparameters": zlib.crc32(given.encode()),
    }


def _is_current(
    run: RecordedRun, position: ReadPosition, facts: dict[str, Any], known: dict[str, Any]
) -> bool:
    """Returns whether the target has all rows, records and facts."""
    if facts != {name: known.get(name) for name in facts}:
        return False
    about = StoredRun(run, ReadPosition(**attrs.asdict(position))).source
    return next(about.read(about), None) is None and not (about.problems or +about.lost)
