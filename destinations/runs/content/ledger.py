"""`read_time`: reads how all sessions of a run spent their time; `write_trace`: writes its trace.

The page "The format on disk" describes the files of `TimeLedger`. They are untrusted: a line that isn't as
described is left out. Importing this module imports neither torch nor numpy.
"""

import csv
import gzip
import itertools
import json
import os
import re
import statistics
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import attrs

from destinations.runs.budget import spend
from destinations.runs.files import number_of
from uploads.disk import open_regular

__all__ = [
    "Fault",
    "SessionTime",
    "SlowStep",
    "TimeReport",
    "is_profile",
    "read_profile",
    "read_time",
    "write_trace",
]

_FILE = re.compile(r"(rank|spans|slow)-(\d{1,6})\.csv", re.ASCII)
_PROFILE = re.compile(r"(^|/)traces/.*\.json(\.gz)?\Z", re.DOTALL)
_MAX_ROWS = 1_000_000
# A rank is reported as slow if others would have saved this share of their training, and so many seconds.
_SLOW = 0.03
_LEAST_SECONDS = 0.2
_HEAD = ("session", "begin", "end", "step")
# Ranks do these together, so a fast rank waits for a slow one. The trainer takes waiting out of `backward`.
_TOGETHER = ("waiting", "backward")
# A session begins at most this long before or after its line in `sessions.jsonl`.
_SESSION_SECONDS = 60.0
# The others waited for this share of the extra time that a rank took.
_OF_WAIT = 0.5
# A rank made a step slow if it took this much longer.
_OF_STEP = 0.25
_STEPS_NAMED = 3
_MAX_SLOW_STEPS = 1000
_MAX_NAME = 100
_MAX_PROFILE_BYTES = 1 << 30
_FIRST_PROFILE, _PIDS_OF_PROFILE = 1_000_000, 1000
# Before and after training. A rank that is late there is named if none is late in training.
_ONCE = ("start", "restore", "idle", "closing", "joining")
_BY_CHOICE = ("completed", "stopped")


@attrs.frozen
class _Row:
    session: float
    begin: float
    end: float
    step: int
    seconds: dict[str, float]


@attrs.frozen
class _Span:
    """A line of `spans-N.csv`; without seconds, the beginning of a span that may never have ended."""

    begin: float
    seconds: float | None
    name: str
    track: str


@attrs.frozen
class SessionTime:
    """The time of one session of a rank.

    Attributes:
        begin: when its process began, in seconds since 1970; its `INIT` if the process existed before.
        end: its last sign of life, in seconds since 1970.
        step: its last step.
        status: how it ended, from its line in `sessions.jsonl`; "" if unknown.
        seconds: by bucket; `repeated` is the training of steps that an earlier session had reached.
        joining: the seconds of `waiting` before `INIT`, until the others joined the process group.
    """

    begin: float
    end: float
    step: int
    status: str
    seconds: dict[str, float]
    joining: float = 0.0


@attrs.frozen
class SlowStep:
    """A step for which one rank took longer than the others, which waited for it.

    Attributes:
        step: its number.
        rank: the rank.
        bucket: the bucket in which it took longer.
        seconds: how much longer it took.
        spans: the user's spans that were open on this rank, longest first.
    """

    step: int
    rank: int
    bucket: str
    seconds: float
    spans: tuple[str, ...]


@attrs.frozen
class Fault:
    """The cost of a session that ended before training did, in seconds.

    Attributes:
        status: how the session ended: "killed", "failed", "preempted", "interrupted"; "" if unknown.
        at: when, in seconds since 1970.
        step: the session's last step.
        gone: until the next process began.
        start: until the next process trained, without `restore`.
        restore: to load the checkpoint and find its place in the data.
        repeated: to train steps again.
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
        """The total cost."""
        return self.gone + self.start + self.restore + self.repeated


@attrs.frozen
class TimeReport:
    """How a run spent its time.

    Attributes:
        wall: seconds from the first to the last moment of all sessions, without pauses after a session that
            completed.
        seconds: the first rank's seconds in each bucket, largest first; they add up to `wall`. The buckets
            are `TimeLedger`'s, `repeated`, and `gone`: between an incomplete session and the next.
        productive: seconds of training, without repeated steps.
        sessions: the first rank's sessions, oldest first.
        faults: the first rank's faults, oldest first.
        ranks: seconds by bucket of each rank.
        slow_rank: the rank that the others waited for, its bucket, and how many seconds longer than the
            others' median it took; None if there is none, or only one rank.
        slow_steps: the steps that took at least twice as long as usual because one rank was late.
    """

    wall: float
    seconds: dict[str, float]
    productive: float
    sessions: tuple[SessionTime, ...]
    faults: tuple[Fault, ...]
    ranks: dict[int, dict[str, float]]
    slow_rank: tuple[int, str, float] | None
    slow_steps: tuple[SlowStep, ...] = ()

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

    @property
    def slow_steps_text(self) -> str:
        """Which rank made others wait longest at single steps, these steps, and its spans; "" if none."""
        groups: dict[tuple[int, str], list[SlowStep]] = {}
        for one in self.slow_steps:
            groups.setdefault((one.rank, one.bucket), []).append(one)
        if not groups:
            return ""
        (rank, bucket), steps = max(groups.items(), key=lambda item: sum(one.seconds for one in item[1]))
        longest = sorted(steps, key=lambda one: -one.seconds)[:_STEPS_NAMED]
        more = len(steps) - len(longest)
        which = ", ".join(f"{one.step:,}" for one in sorted(longest, key=lambda one: one.step))
        which += f" and {more:,} more" if more else ""
        spans = list(dict.fromkeys(name for one in longest for name in one.spans[:1]))
        return (
            f"rank {rank} made the others wait {sum(one.seconds for one in steps):.3g} s at "
            f"step{'s' if len(steps) > 1 else ''} {which}, for {bucket}"
            + (f", in {', '.join(map(repr, spans))}" if spans else "")
        )

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
            "slow_steps": [attrs.asdict(one) for one in self.slow_steps],
        }


def read_time(
    folder: str | os.PathLike[str], sessions: Sequence[Mapping[str, Any]], productive: Sequence[str]
) -> TimeReport | None:
    """Reads the time ledgers of all ranks; None if there is none.

    Args:
        folder: the folder `time` of a run.
        sessions: the lines of its `sessions.jsonl`, for how sessions ended and where they resumed.
        productive: the buckets in which a model is trained.
    """
    of_rank = _sessions_by_rank(Path(folder), sessions, productive)
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
        slow_rank=_slow_rank({rank: _with_joining(ranks[rank], of_rank[rank]) for rank in ranks}),
        slow_steps=_slow_steps(Path(folder)) if len(ranks) > 1 else (),
    )


def _sessions_by_rank(
    folder: Path, sessions: Sequence[Mapping[str, Any]], productive: Sequence[str]
) -> dict[int, tuple[SessionTime, ...]]:
    found = {rank: _sessions_of(_rows(path), sessions, productive) for rank, path in _files(folder, "rank")}
    return {rank: several for rank, several in found.items() if several}


def _files(folder: Path, kind: str) -> list[tuple[int, Path]]:
    try:
        found = [_FILE.fullmatch(one.name) for one in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((int(one[2]), folder / one[0]) for one in found if one is not None and one[1] == kind)


def _lines(path: Path) -> Iterator[dict[str, str]]:
    """Yields the lines of a CSV as texts by column; nothing if the file isn't one."""
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
            seconds = {name: float(text) for name, text in line.items() if text.strip() and name != "clock"}
            row = _Row(session, begin, end, int(step), seconds)
        except (ValueError, KeyError, OverflowError):
            continue
        if all(number_of(one) is not None for one in (begin, session)) and end >= begin:
            yield row


def _sessions_of(
    rows: Iterator[_Row], known: Sequence[Mapping[str, Any]], productive: Sequence[str]
) -> tuple[SessionTime, ...]:
    found: list[SessionTime] = []
    by_session: dict[float, list[_Row]] = {}
    for row in rows:
        by_session.setdefault(row.session, []).append(row)
    reached = 0
    # In the order in which the sessions began: a process may have begun long before its own.
    for init, every in sorted(by_session.items()):
        first, end = every[0].begin, every[-1].end
        # A process that existed during the previous session was not started for this one.
        is_older = found and found[-1].end > first and every[0].end <= init
        own = every[1:] if is_older and len(every) > 1 else every
        about = _about(known, init, first, end)
        seconds: dict[str, float] = {}
        # Rows from before the checkpoint is loaded have no step yet.
        resumed = int(number_of(about.get("resume_step")) or 0)
        before = max(every[0].step, resumed)
        for row in own:
            again = _share_repeated(before, row.step, reached) if found else 0.0
            for name, value in row.seconds.items():
                repeated = value * again if name in productive else 0.0
                seconds[name] = seconds.get(name, 0.0) + value - repeated
                if repeated:
                    seconds["repeated"] = seconds.get("repeated", 0.0) + repeated
            before = max(row.step, resumed)
        reached = max(reached, *(row.step for row in own))
        status = str(about.get("status") or "")
        joining = own[0].seconds.get("waiting", 0.0) if own[0].end <= init else 0.0
        found.append(SessionTime(own[0].begin, end, own[-1].step, status, seconds, joining))
    return tuple(found)


def _about(known: Sequence[Mapping[str, Any]], init: float, first: float, end: float) -> Mapping[str, Any]:
    """Returns a session's line of `sessions.jsonl`: the one that begins closest to its `INIT`."""
    starts = [
        (abs(start - init), place)
        for place, one in enumerate(known)
        if (start := number_of(one.get("start"))) is not None
        and min(first, init - _SESSION_SECONDS) <= start <= max(end, init + _SESSION_SECONDS)
    ]
    return known[min(starts)[1]] if starts else {}


def _share_repeated(before: int, after: int, reached: int) -> float:
    """Returns the share of a range of steps that an earlier session had reached."""
    if after <= before:
        return float(after < reached)
    return min(max(reached - before, 0) / (after - before), 1.0)


def _added(several: Iterator[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for one in several:
        for name, value in one.items():
            total[name] = total.get(name, 0.0) + value
    return total


def _with_joining(seconds: dict[str, float], sessions: Sequence[SessionTime]) -> dict[str, float]:
    """Returns the seconds of a rank, with `joining` taken out of `waiting`."""
    joining = sum(one.joining for one in sessions)
    return seconds | {"waiting": seconds.get("waiting", 0.0) - joining, "joining": joining}


def _slow_rank(
    ranks: Mapping[int, Mapping[str, float]], least: float = _LEAST_SECONDS
) -> tuple[int, str, float] | None:
    """Returns the rank with the longest work of its own, if the others wait for it."""
    if len(ranks) == 1:
        return None
    found: list[tuple[float, tuple[int, str, float]]] = []
    # Only the trainer charges waiting, and takes it out of the backward pass; the rest is a rank's own time.
    is_known = all(one.get("waiting") for one in ranks.values())
    ways = ((*_TOGETHER, *_ONCE), ("waiting", *_ONCE), ("waiting", "joining"))
    for left_out in ways[: 3 if is_known else 1]:
        slow, name, more = _longest(ranks, left_out)
        where = left_out[1] if left_out is ways[2] else "waiting"
        others = [one.get(where, 0.0) for rank, one in ranks.items() if rank != slow]
        waited = statistics.median(others) - ranks[slow].get(where, 0.0)
        training = sum(value for of, value in ranks[slow].items() if of not in _ONCE or of == name)
        if (
            more >= least
            and more > _SLOW * training
            and ("backward" in left_out or waited >= _OF_WAIT * more)
        ):
            found.append((more / training, (slow, name, more)))
    return max(found)[1] if found else None


def _longest(ranks: Mapping[int, Mapping[str, float]], together: Sequence[str]) -> tuple[int, str, float]:
    """Returns the rank with the most work of its own, the bucket with the largest excess, and the excess."""
    own = {
        rank: sum(value for name, value in seconds.items() if name not in together)
        for rank, seconds in ranks.items()
    }
    slow = max(own, key=own.__getitem__)
    others = [seconds for rank, seconds in ranks.items() if rank != slow]
    more = {
        name: value - statistics.median(one.get(name, 0.0) for one in others)
        for name, value in ranks[slow].items()
        if name not in together
    }
    if not more:
        return slow, "", 0.0
    name = max(more, key=more.__getitem__)
    return slow, name, more[name]


def _slow_steps(folder: Path) -> tuple[SlowStep, ...]:
    """Returns the steps that one rank made slow for the others."""
    by_step: dict[tuple[int, int], dict[int, _Row]] = {}
    for rank, path in _files(folder, "slow"):
        sessions: dict[float, int] = {}
        for row in itertools.islice(_rows(path), _MAX_SLOW_STEPS):
            # The n-th session of each rank is the same one.
            session = sessions.setdefault(row.session, len(sessions))
            by_step.setdefault((session, row.step), {})[rank] = row
    found: list[SlowStep] = []
    for (_, step), rows in sorted(by_step.items()):
        # If the other ranks did not find a step slow, none of them waited for its end.
        if len(rows) > 1:
            seconds = {rank: row.seconds for rank, row in rows.items()}
            slow = _slow_rank(seconds, 0.0)
            if slow is not None and slow[2] >= _OF_STEP * (rows[slow[0]].end - rows[slow[0]].begin):
                found.append(SlowStep(step, *slow, spans=()))
    spans: dict[int, list[_Span]] = {
        rank: [one for one in _spans(path) if one.track.startswith("spans")]
        for rank, path in _files(folder, "spans")
        if any(one.rank == rank for one in found)
    }
    rows_of = {(step, rank): row for (_, step), rows in by_step.items() for rank, row in rows.items()}
    return tuple(
        attrs.evolve(one, spans=_spans_within(spans.get(one.rank, []), rows_of[one.step, one.rank]))
        for one in found
    )


def _spans_within(spans: Iterable[_Span], row: _Row) -> tuple[str, ...]:
    """Returns the names of spans that were open during a step, the longest part first."""
    parts: dict[str, float] = {}
    for one in spans:
        end = row.end if one.seconds is None else one.begin + one.seconds
        part = min(end, row.end) - max(one.begin, row.begin)
        if part > 0:
            parts[one.name] = parts.get(one.name, 0.0) + part
    return tuple(name[:_MAX_NAME] for name, _ in sorted(parts.items(), key=lambda item: -item[1]))


# The trace.


def _spans(path: Path) -> Iterator[_Span]:
    for line in _lines(path):
        try:
            length = line["microseconds"].strip()
            seconds = int(length) / 1e6 if length else None
            span = _Span(float(line["begin"]), seconds, line["name"], line["track"].strip())
        except (ValueError, KeyError, OverflowError):
            continue
        if number_of(span.begin) is not None and (seconds or 0.0) >= 0:
            yield span


def write_trace(
    folder: str | os.PathLike[str],
    file: IO[str],
    *,
    name: str,
    uploads: Mapping[str, float],
    profiles: Iterable[Path] = (),
) -> int:
    """Writes the spans of all ranks in Chrome's trace format, which Perfetto opens; returns how many events.

    Each rank is a process with a thread for each track: the buckets of `TimeLedger`; the loop with its
    epochs, batches and evaluations; checkpoints; and the spans of each of the user's threads. Uploads
    overlap, so they are asynchronous events.
    The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.

    Args:
        folder: the folder `time` of a run.
        file: where to write.
        name: the name of the run.
        uploads: when files were given to the run, in seconds since 1970, by name.
        profiles: traces of `torch.profiler` to include, each as separate processes.
    """
    place = Path(folder)
    count = 0
    file.write('{"displayTimeUnit": "ms", "traceEvents": [')

    def write(**event: Any) -> None:
        nonlocal count
        file.write(",\n" if count else "\n")
        file.write(json.dumps(event, separators=(",", ":")))
        count += 1

    def name_it(kind: str, of: str, pid: int, tid: int = 0) -> None:
        write(name=f"{kind}_name", ph="M", pid=pid, tid=tid, args={"name": of})

    of_rank = _sessions_by_rank(place, (), ())
    for rank, path in _files(place, "spans"):
        sessions = of_rank.get(rank, ())
        name_it("process", f"{name}, rank {rank}", rank)
        tracks: dict[str, int] = {}
        for number, span in enumerate(_closed(_spans(path), sessions)):
            at, length = round(span.begin * 1e6), span.seconds or 0.0
            if span.track == "uploads":
                common = {"name": span.name, "cat": "upload", "id": f"{rank}.{number}", "pid": rank, "tid": 0}
                write(ph="b", ts=at, **common)
                write(ph="e", ts=at + round(length * 1e6), **common)
                continue
            if span.track not in tracks:
                tracks[span.track] = len(tracks)
                name_it("thread", span.track, rank, tracks[span.track])
            write(name=span.name, ph="X", ts=at, dur=round(length * 1e6), pid=rank, tid=tracks[span.track])
    for of, when in uploads.items():
        write(name=of, ph="i", ts=round(when * 1e6), pid=0, tid=0, s="p", cat="file")
    for number, profile in enumerate(profiles):
        for event in read_profile(profile, _FIRST_PROFILE + number * _PIDS_OF_PROFILE):
            write(**event)
    file.write("\n]}\n")
    return count


def _closed(spans: Iterator[_Span], sessions: Sequence[SessionTime]) -> Iterator[_Span]:
    """Yields spans; unfinished ones end with their session and are marked."""
    opened: dict[tuple[float, str, str], _Span] = {}
    for span in spans:
        key = span.begin, span.name, span.track
        if span.seconds is None:
            opened[key] = span
        else:
            opened.pop(key, None)
            yield span
    for span in opened.values():
        end = next((one.end for one in sessions if one.begin <= span.begin <= one.end), span.begin)
        yield attrs.evolve(span, seconds=end - span.begin, name=f"{span.name} (did not end)")


def is_profile(name: str) -> bool:
    """Returns whether a file has the name of a trace given to `log_traces`."""
    return _PROFILE.search(name) is not None


def read_profile(path: Path, first_pid: int) -> Iterator[dict[str, Any]]:
    """Yields the events of a trace by `torch.profiler`; nothing if the file isn't one.

    Args:
        path: a ".json" or ".json.gz" file.
        first_pid: the number of its first process.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            content: Any = gzip.GzipFile(fileobj=file) if path.name.endswith(".gz") else file
            data = content.read(_MAX_PROFILE_BYTES + 1)
        document = json.loads(data) if len(data) <= _MAX_PROFILE_BYTES else None
    except (OSError, EOFError, ValueError, RecursionError, zlib.error):
        return
    found: dict[str, Any] = document if isinstance(document, dict) else {"traceEvents": document}
    events = found.get("traceEvents")
    if not isinstance(events, list):
        return
    # Since torch 2.3, times are relative to it.
    base = (number_of(found.get("baseTimeNanoseconds")) or 0.0) / 1e3
    pids: dict[str, int] = {}
    for event in events:
        if not isinstance(event, dict) or not isinstance(event.get("ph"), str):
            continue
        spend()
        moved = dict(event)
        pid = str(event.get("pid"))
        moved["pid"] = pids.setdefault(pid, first_pid + min(len(pids), _PIDS_OF_PROFILE - 1))
        at = number_of(event.get("ts"))
        if at is not None:
            moved["ts"] = at + base
        yield moved
