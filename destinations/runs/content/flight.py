"""`read_flights`: reads the files of all ranks' flight recorders, and finds where each rank waits.

The page "Many ranks" describes the files. They are untrusted: content that isn't as described is left out.
Importing this module imports neither torch nor numpy.
"""

import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

import attrs

from destinations.runs.files import number_of, read_object_file, whole_of

__all__ = ["FLIGHT_FOLDER", "Flight", "Frame", "describe_flights", "read_flights"]

_log = logging.getLogger("destinations")

FLIGHT_FOLDER = "flight"

_FILE = re.compile(r"rank-(\d{1,6})\.json", re.ASCII)
_MAX_FILES = 10_000
_MAX_RANKS_NAMED = 16
_MAX_NAME = 100
_MAX_WITH_STEPS = 64


@attrs.frozen
class Frame:
    """A line of a stack.

    Attributes:
        file: its path.
        line: its number.
        function: the qualified name of its function.
        code: its text; "" if unknown.
        is_library: whether it belongs to Python, an installed package, or this project.
    """

    file: str
    line: int
    function: str
    code: str
    is_library: bool

    @property
    def place(self) -> str:
        """The name of the file and the line: "train.py:42"."""
        return f"{PurePath(self.file).name}:{self.line}"


@attrs.frozen
class Flight:
    """What one rank wrote when training went wrong.

    Attributes:
        rank: the rank.
        world_size: the number of ranks; None if unknown.
        reason: the last reason to write: "hang", "nan", "exception" or "sigterm".
        detail: more about the reason.
        time: when it was written, in seconds since 1970; None if unknown.
        stack: the stack of the exception, or else of the main thread, outermost frame first.
        document: the whole file.
    """

    rank: int
    world_size: int | None
    reason: str
    detail: str
    time: float | None
    stack: list[Frame]
    document: dict[str, Any]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The last steps, oldest first: `step`, `time`, `metrics`, and what else was kept."""
        return _objects(self.document.get("steps"))

    @property
    def doing(self) -> str:
        """The time ledger's current bucket and the user's innermost span: "data, in 'tokenize'"."""
        doing = self.document.get("doing")
        if not isinstance(doing, Mapping):
            return ""
        spans = doing.get("spans")
        inside = f", in {str(spans[-1])[:_MAX_NAME]!r}" if isinstance(spans, list) and spans else ""
        return str(doing.get("bucket") or "")[:_MAX_NAME] + inside

    @property
    def last_collectives(self) -> dict[str, tuple[int, str]]:
        """The number and the name of the last collective of each process group that the rank entered."""
        last: dict[str, tuple[int, str]] = {}
        for one in _objects(self.document.get("collectives")):
            number = whole_of(one.get("collective_seq_id"))
            if number is not None:
                group = str(one.get("process_group"))
                found = number, str(one.get("profiling_name") or "a collective")[:_MAX_NAME]
                last[group] = max(last.get(group, found), found)
        return last

    @property
    def waits_at(self) -> str:
        """Where the main thread waits: "in all_reduce at train.py:42", or "at train.py:42"; "" if unknown.

        The line is the innermost one outside libraries; the function is the innermost of all.
        """
        if not self.stack:
            return ""
        last = self.stack[-1]
        own = next((frame for frame in reversed(self.stack) if not frame.is_library), last)
        name = last.function.rpartition(".")[2]
        return f"at {own.place}" if own is last else f"in {name} at {own.place}"


def read_flights(folder: str | os.PathLike[str]) -> list[Flight]:
    """Reads the files of a folder, by rank; damaged files are left out.

    If there are more than 64 files, the others are read without their steps.

    Args:
        folder: the folder `flight` of a run, or the one that the recorder was given.
    """
    path = Path(folder)
    try:
        names = sorted(one.name for one in path.iterdir() if _FILE.fullmatch(one.name))[:_MAX_FILES]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found: list[Flight] = []
    for name in names:
        try:
            one = _flight_of(read_object_file(path / name))
        except OSError as error:
            _log.warning("left out %s of the flight recorder: %s", name, error)
            continue
        if one is not None:
            if len(found) >= _MAX_WITH_STEPS:
                one.document.pop("steps", None)
            found.append(one)
    return sorted(found, key=lambda one: one.rank)


def describe_flights(flights: Iterable[Flight]) -> list[str]:
    """Returns a line for each group of ranks that wrote for the same reason at the same place.

    If torch's own recorder knows, the first lines tell which ranks haven't entered a collective in which
    others wait: "rank 1 has not entered gloo:all_reduce (number 41), where ranks 0, 2, 3 wait: it is at
    train.py:40 (data, in 'tokenize')".
    The smallest group comes first: "rank 1: hang, waits at train.py:40", then "ranks 0, 2, 3: hang, wait in
    all_reduce at train.py:42". Ranks that wrote nothing come last.
    """
    flights = list(flights)
    lines = _late(flights)
    groups: dict[tuple[str, str, str], list[Flight]] = {}
    for one in flights:
        detail = "" if one.reason in {"hang", "sigterm"} else one.detail
        groups.setdefault((one.reason, one.waits_at, detail), []).append(one)
    for (reason, place, detail), members in sorted(groups.items(), key=lambda item: len(item[1])):
        verb = "" if reason == "exception" else "waits " if len(members) == 1 else "wait "
        parts = [reason, f"{verb}{place}" if place else "", detail]
        lines.append(f"{_ranks([one.rank for one in members])}: {', '.join(part for part in parts if part)}")
    known = {one.rank for one in flights}
    world_size = min(max((one.world_size or 0 for one in flights), default=0), _MAX_FILES)
    if silent := [rank for rank in range(world_size) if rank not in known]:
        lines.append(f"{_ranks(silent)}: wrote nothing")
    return lines


def _late(flights: list[Flight]) -> list[str]:
    """Returns a line for each process group in which ranks haven't entered the last collective."""
    lines = []
    for group in sorted({group for one in flights for group in one.last_collectives}):
        members = [one for one in flights if group in one.last_collectives]
        number, name = max(one.last_collectives[group] for one in members)
        late = [one for one in members if one.last_collectives[group][0] < number]
        if late:
            waiting = [one.rank for one in members if one not in late]
            places = dict.fromkeys(f"{one.waits_at} ({one.doing})" for one in late if one.waits_at)
            verb, they = ("has", "it is") if len(late) == 1 else ("have", "they are")
            wait = "waits" if len(waiting) == 1 else "wait"
            lines.append(
                f"{_ranks([one.rank for one in late])} {verb} not entered {name} (number {number}), where "
                f"{_ranks(waiting)} {wait}"
                + (f": {they} {'; '.join(places)}".replace(" ()", "") if places else "")
            )
    return lines


def _ranks(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:_MAX_RANKS_NAMED]))
    more = f" and {len(ranks) - _MAX_RANKS_NAMED} more" if len(ranks) > _MAX_RANKS_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"


def _flight_of(document: dict[str, Any]) -> Flight | None:
    rank, reason = whole_of(document.get("rank")), document.get("reason")
    if rank is None or rank < 0 or not isinstance(reason, str):
        return None
    exception = document.get("exception")
    threads = _objects(document.get("threads"))
    main = next((one for one in threads if one.get("is_main") is True), {})
    frames = exception.get("frames") if isinstance(exception, Mapping) else main.get("frames")
    return Flight(
        rank=rank,
        world_size=whole_of(document.get("world_size")),
        reason=reason,
        detail=str(document.get("detail") or ""),
        time=number_of(document.get("time")),
        stack=[
            Frame(
                file=str(one.get("file") or "?"),
                line=whole_of(one.get("line")) or 0,
                function=str(one.get("function") or "?"),
                code=str(one.get("code") or ""),
                is_library=one.get("is_library") is True,
            )
            for one in _objects(frames)
        ],
        document=document,
    )


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
