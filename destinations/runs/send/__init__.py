"""`send`: a run goes to a tracker or into another folder, completely, and once however often it is sent.

```python
send(open_runs("runs")["digits"], "tensorboard:tb")
```

What was sent is remembered, so that a second sending hands on what is new alone. One that was killed half-way is done again from the
beginning: first what it left is taken back. Runs in the calling thread, and blocks.
"""

import contextlib
import json
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from destinations.run_directory.layout import JOURNAL_FOLDER, metrics_name
from destinations.runs.errors import RunNotFoundError
from destinations.runs.index import cache_folder
from destinations.runs.run import Run
from destinations.runs.sources import INDEXES, Position, items_of, ranks_of
from destinations.text.formatting import plain

from .ledger import Ledger, SendingError
from .replay import RecordClock, ReplayReport, RewoundError, replay
from .targets import Target, TargetError, target_of

__all__ = ["SendingError", "TargetError", "send"]


def send(
    run: Run,
    target: str,
    *,
    follow: bool = False,
    again: bool = False,
    abandoned: bool = False,
    cache: str | os.PathLike[str] | None = None,
    wait: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> ReplayReport:
    """Sends a run.

    Args:
        run: what was written.
        target: "tensorboard:FOLDER", "run:FOLDER", "wandb:PROJECT", "wandb:ENTITY/PROJECT", "mlflow:URI",
            "mlflow:URI#EXPERIMENT" or "trackio:PROJECT". In a folder, the run gets a folder of its name.
        follow: go on until the run ends, or until Ctrl-C.
        again: everything anew, in the place of what was sent.
        abandoned: rows, too, that training left when it went back to a checkpoint; see `replay`.
        cache: where to remember what was sent to targets that are no folders; the user's cache folder where None.
        wait: waits for some seconds.
        now: the time in seconds since 1970.

    Returns:
        What was sent this time.

    Raises:
        TargetError: the target is none.
        SendingError: the target holds something else, or another process sends this run to it.
        ImportError: the package of the tracker is missing.
    """
    place = target_of(target, run.record, Path(cache) if cache is not None else cache_folder().parent)
    place.check()
    with Ledger(place.ledger_path, run.record.run_id, place.name) as ledger:
        is_anew = again or ledger.state != "done" or place.is_gone()
        while True:
            try:
                return _send_once(
                    run,
                    place,
                    ledger,
                    is_anew=is_anew,
                    follow=follow,
                    abandoned=abandoned,
                    wait=wait,
                    now=now,
                )
            except RewoundError:
                # Training went back to a checkpoint: what was sent of the branch that it left has to go.
                if is_anew and not follow:
                    raise
                is_anew = True


def _send_once(
    run: Run,
    place: Target,
    ledger: Ledger,
    *,
    is_anew: bool,
    follow: bool,
    abandoned: bool,
    wait: Callable[[float], None],
    now: Callable[[], float],
) -> ReplayReport:
    position = Position() if is_anew else ledger.position
    facts = _facts_of(run, abandoned)
    place.with_abandoned = abandoned
    is_file_missing = abandoned and place.copies_abandoned and not ledger.facts.get("abandoned")
    abandoned = abandoned and not place.copies_abandoned
    may_be_known = not is_anew and not follow and not is_file_missing
    if may_be_known and _is_known(run, position, facts, ledger.facts, abandoned):
        return ReplayReport(position=position, is_over=not facts["is_alive"])
    clock = RecordClock()
    place.is_anew = is_anew
    destination: Any = place.make(clock)
    ledger.begin()
    if is_anew:
        place.restart()
    report = replay(
        run,
        destination,
        clock=clock,
        position=position,
        follow=follow,
        abandoned=abandoned,
        of_rank=place.maker_of_ranks(clock),
        wait=wait,
        now=now,
    )
    _count_undelivered(destination, report)
    if not report.failures:
        place.finish(run)
        # Of a run that was alive, what it said before; what it says since is for the next time.
        ledger.finish(
            report.position, _facts_of(run, place.with_abandoned) if follow and report.is_over else facts
        )
    return report


def _facts_of(run: Run, abandoned: bool) -> dict[str, Any]:
    """Returns what is sent beside rows and records, in short."""
    try:
        now = run.reload()
    except RunNotFoundError:
        now = run
    given = json.dumps(plain(now.hyperparameters), sort_keys=True)
    return {
        "status": now.status,
        "is_alive": now.alive,
        "hyperparameters": zlib.crc32(given.encode()),
        "files": _stamps_of(run.path),
        "abandoned": abandoned,
    }


def _stamps_of(run_dir: Path) -> dict[str, list[int]] | None:
    """Returns size and time of what holds rows and records; None where rows may come without a file showing it."""
    if (run_dir / JOURNAL_FOLDER).exists():
        return None
    stamps = {}
    for name in (*map(metrics_name, ranks_of(run_dir)), *INDEXES):
        with contextlib.suppress(OSError):
            about = (run_dir / name).stat()
            stamps[name] = [about.st_size, about.st_mtime_ns]
    return stamps


def _is_known(
    run: Run, position: Position, facts: dict[str, Any], known: dict[str, Any], abandoned: bool
) -> bool:
    """Says whether nothing was logged since, and how the run stands was sent too."""
    if not facts["abandoned"]:
        known = {**known, "abandoned": False}
    if facts == known and facts["files"] is not None:
        return True
    if any(facts[name] != known.get(name) for name in ("status", "is_alive", "hyperparameters")):
        return False
    looked_at = Position(**attrs.asdict(position))
    return next(items_of(run.path, looked_at, abandoned=abandoned), None) is None


def _count_undelivered(destination: Any, report: ReplayReport) -> None:
    """Adds what a destination took, and could not deliver."""
    counts = getattr(destination, "counts", None)
    for what in ("dropped_rows", "failed_rows", "dropped_records", "failed_records"):
        count = int(getattr(counts, what, 0) or 0)
        if count:
            report.failures += count
            errors = ", ".join(getattr(counts, "errors", {}))
            report.failed.append(f"{count} {what.replace('_', ' ')}{f': {errors}' if errors else ''}")
