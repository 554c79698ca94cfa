"""`read_time`: on what the time of a run was spent, over all of its sessions; and its trace.

docs/format.md describes the files of `TimeLedger`. They are foreign text until checked: a line that is not as
described is left out. Importing this module imports neither torch nor numpy.
"""

import csv
import itertools
import json
import os
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import attrs

from destinations.runs.budget import spend
from destinations.runs.files import number_of
from uploads.disk import open_regular

__all__ = ["Fault", "SessionTime", "TimeReport", "read_time", "write_trace"]

_FILE = re.compile(r"(rank|spans)-(\d{1,6})\.csv", re.ASCII)
_MAX_ROWS = 1_000_000
# A rank is said to be slow if others would have saved this share of the time of the run.
_SLOW = 0.03
_HEAD = ("session", "begin", "end", "step")
# What ranks do together: there a fast one waits for a slow one.
_TOGETHER = ("waiting", "backward")
_BY_CHOICE = ("completed", "stopped")


@attrs.frozen
class _Row:
    session: float
    begin: float
    end: float
    step: int
    seconds: dict[str, float]


@attrs.frozen
class SessionTime:
    """The time of one session of a rank.

    Attributes:
        begin: when its process began, in seconds since 1970.
        end: its last sign of life, likewise.
        step: the last one.
        status: how it ended: that of its line in `sessions.jsonl`; "" if unknown.
        seconds: by bucket; `repeated` is the training of steps that an earlier session had reached.
    """

    begin: float
    end: float
    step: int
    status: str
    seconds: dict[str, float]


@attrs.frozen
class Fault:
    """What it cost that a session ended before training did, in seconds.

    Attributes:
        status: how the session ended: "killed", "failed", "preempted", "interrupted"; "" if unknown.
        at: when, in seconds since 1970.
        step: the last one of the session.
        gone: until the next process began.
        start: until that trained, without `restore`.
        restore: loading the checkpoint, and going to its place in the data.
        repeated: training steps again.
    """

    status: str
    at: float
    step: int
    gone: float
    start: float
    restore: float
    repeated: float

    @property
    def cost(self) -> float:
        """All of it."""
        return self.gone + self.start + self.restore + self.repeated


@attrs.frozen
class TimeReport:
    """On what the time of a run was spent.

    Attributes:
        wall: seconds from the first to the last moment of all sessions, without pauses after a session that
            completed.
        seconds: of each bucket, the largest first; they add up to `wall`. Buckets are those of `TimeLedger`,
            `repeated`, and `gone`: between a session that did not complete and the next. Of the first rank.
        productive: seconds of training that was not repeated.
        sessions: oldest first, of the first rank.
        faults: likewise.
        ranks: seconds by bucket of each rank.
        slow_rank: the rank that the others waited for, with its bucket and how many seconds it took more
            than the median of the others; None if there is none, or a single rank.
    """

    wall: float
    seconds: dict[str, float]
    productive: float
    sessions: tuple[SessionTime, ...]
    faults: tuple[Fault, ...]
    ranks: dict[int, dict[str, float]]
    slow_rank: tuple[int, str, float] | None

    @property
    def goodput(self) -> float | None:
        """The share of the time in which the model was trained; None for a run without time."""
        return self.productive / self.wall if self.wall > 0 else None

    @property
    def slow_text(self) -> str:
        """Which rank the others waited for, in words; "" if none."""
        if self.slow_rank is None:
            return ""
        rank, bucket, seconds = self.slow_rank
        return f"the other ranks waited for rank {rank}: it took {seconds:.3g} s more than they for {bucket}"

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON's values."""
        slow = self.slow_rank
        return {
            "wall": self.wall,
            "goodput": self.goodput,
            "productive": self.productive,
            "seconds": self.seconds,
            "sessions": [attrs.asdict(one) for one in self.sessions],
            "faults": [attrs.asdict(one) | {"cost": one.cost} for one in self.faults],
            "ranks": {str(rank): seconds for rank, seconds in self.ranks.items()},
            "slow_rank": None
            if slow is None
            else dict(zip(("rank", "bucket", "seconds"), slow, strict=True)),
        }


def read_time(
    folder: str | os.PathLike[str], sessions: Sequence[Mapping[str, Any]], productive: Sequence[str]
) -> TimeReport | None:
    """Reads what the ledgers of all ranks wrote; None if there is nothing.

    Args:
        folder: the folder `time` of a run.
        sessions: the lines of its `sessions.jsonl`, for how sessions ended and where they resumed.
        productive: the buckets in which a model is trained.
    """
    of_rank: dict[int, tuple[SessionTime, ...]] = {}
    for rank, path in _files(Path(folder), "rank"):
        found = _sessions_of(_rows(path), sessions, productive)
        if found:
            of_rank[rank] = found
    if not of_rank:
        return None
    first = of_rank[min(of_rank)]
    faults, gone = [], 0.0
    for one, after in itertools.pairwise(first):
        if one.status in _BY_CHOICE:
            continue
        pause = max(after.begin - one.end, 0.0)
        gone += pause
        cost = (after.seconds.get(name, 0.0) for name in ("start", "restore", "repeated"))
        faults.append(Fault(one.status, one.end, one.step, pause, *cost))
    ranks = {rank: _added(one.seconds for one in found) for rank, found in of_rank.items()}
    seconds = ranks[min(ranks)] | ({"gone": gone} if gone else {})
    return TimeReport(
        wall=sum(seconds.values()),
        seconds=dict(sorted(seconds.items(), key=lambda item: -item[1])),
        productive=sum(seconds.get(name, 0.0) for name in productive),
        sessions=first,
        faults=tuple(faults),
        ranks=ranks,
        slow_rank=_slow_rank(ranks),
    )


def _files(folder: Path, kind: str) -> list[tuple[int, Path]]:
    try:
        found = [_FILE.fullmatch(one.name) for one in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((int(one[2]), folder / one[0]) for one in found if one is not None and one[1] == kind)


def _lines(path: Path) -> Iterator[dict[str, str]]:
    """Yields the lines of a CSV as texts by column; of a file that is none, nothing."""
    try:
        with os.fdopen(open_regular(path), encoding="utf-8", errors="replace", newline="") as file:
            for row in csv.DictReader(file):
                if None not in row and None not in row.values():
                    yield row
    except (OSError, csv.Error):
        return


def _rows(path: Path) -> Iterator[_Row]:
    for count, line in enumerate(_lines(path)):
        if count >= _MAX_ROWS:
            return
        spend()
        try:
            session, begin, end, step = (float(line.pop(name)) for name in _HEAD)
            seconds = {name: float(text) for name, text in line.items() if text.strip()}
            row = _Row(session, begin, end, int(step), seconds)
        except (ValueError, KeyError, OverflowError):
            continue
        if number_of(begin) is not None and end >= begin:
            yield row


def _sessions_of(
    rows: Iterator[_Row], known: Sequence[Mapping[str, Any]], productive: Sequence[str]
) -> tuple[SessionTime, ...]:
    found: list[SessionTime] = []
    by_session: dict[float, list[_Row]] = {}
    for row in rows:
        by_session.setdefault(row.session, []).append(row)
    reached = 0
    for begin, own in sorted(by_session.items()):
        end = own[-1].end
        about: Mapping[str, Any] = next(
            (one for one in known if begin <= (number_of(one.get("start")) or 0.0) <= end), {}
        )
        seconds: dict[str, float] = {}
        resumed = number_of(about.get("resume_step"))
        before = own[0].step if resumed is None else int(resumed)
        for row in own:
            again = _share_repeated(before, row.step, reached) if found else 0.0
            for name, value in row.seconds.items():
                repeated = value * again if name in productive else 0.0
                seconds[name] = seconds.get(name, 0.0) + value - repeated
                if repeated:
                    seconds["repeated"] = seconds.get("repeated", 0.0) + repeated
            before = row.step
        reached = max(reached, *(row.step for row in own))
        found.append(SessionTime(begin, end, own[-1].step, str(about.get("status") or ""), seconds))
    return tuple(found)


def _share_repeated(before: int, after: int, reached: int) -> float:
    """Returns which part of the steps from one to another had been reached by an earlier session."""
    if after <= before:
        return float(after < reached)
    return min(max(reached - before, 0) / (after - before), 1.0)


def _added(several: Iterator[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for one in several:
        for name, value in one.items():
            total[name] = total.get(name, 0.0) + value
    return total


def _slow_rank(ranks: Mapping[int, Mapping[str, float]]) -> tuple[int, str, float] | None:
    """Returns the rank whose own work takes longest, if the others wait for it."""
    if len(ranks) == 1:
        return None
    own = {
        rank: sum(value for name, value in seconds.items() if name not in _TOGETHER)
        for rank, seconds in ranks.items()
    }
    slow = max(own, key=own.__getitem__)
    others = [seconds for rank, seconds in ranks.items() if rank != slow]
    more = {
        name: value - statistics.median(one.get(name, 0.0) for one in others)
        for name, value in ranks[slow].items()
        if name not in _TOGETHER
    }
    name = max(more, key=more.__getitem__)
    return (slow, name, more[name]) if more[name] > _SLOW * sum(ranks[slow].values()) else None


# The trace.


def write_trace(
    folder: str | os.PathLike[str], file: IO[str], *, name: str, uploads: Mapping[str, float]
) -> int:
    """Writes the spans of all ranks in Chrome's trace format, which Perfetto opens; returns how many.

    A process for each rank, in it a thread for the buckets of `TimeLedger` and one for the spans of the user.
    The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.

    Args:
        folder: the folder `time` of a run.
        file: where to write.
        name: of the run.
        uploads: when files were given to the run, in seconds since 1970, by name.
    """
    count = 0
    file.write('{"displayTimeUnit": "ms", "traceEvents": [')

    def write(**event: Any) -> None:
        nonlocal count
        file.write(",\n" if count else "\n")
        file.write(json.dumps(event, separators=(",", ":")))
        count += 1

    for rank, path in _files(Path(folder), "spans"):
        write(name="process_name", ph="M", pid=rank, args={"name": f"{name}, rank {rank}"})
        write(name="thread_name", ph="M", pid=rank, tid=0, args={"name": "time"})
        write(name="thread_name", ph="M", pid=rank, tid=1, args={"name": "spans"})
        for line in _lines(path):
            try:
                begin, length = int(float(line["begin"]) * 1e6), int(line["microseconds"])
                is_own = int(line["is_own"].strip())
            except (ValueError, KeyError, OverflowError):
                continue
            write(name=line["name"], ph="X", ts=begin, dur=length, pid=rank, tid=is_own)
    for of, at in uploads.items():
        write(name=of, ph="i", ts=int(at * 1e6), pid=0, tid=1, s="p", cat="file")
    file.write("\n]}\n")
    return count
