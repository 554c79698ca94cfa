"""`Chain`: the sessions of a run, and which of their records belong to it.

A session is one process that opened the run, described by a line of `sessions.jsonl`. The line says what it
`follows`: an earlier session, and how far. A session's records never change. When training goes back to a
checkpoint, later records aren't removed; they just no longer belong to the run.

All records of the newest session belong. The session that it follows keeps the records logged before its
checkpoint was saved (`records`), whatever their steps. If a loop only names a batch (`step`), it keeps the
records of earlier steps, and records of the same step that the loop doesn't log again. The same rule applies
to each session before.
"""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import attrs

from .sessions import SESSIONS, read_sessions

__all__ = ["Chain", "Follows", "chain_of"]

_log = logging.getLogger("destinations")


@attrs.frozen
class Follows:
    """What a session continues.

    Attributes:
        session: the id of the session before it.
        records: how many records of that session count; None if `step` decides, or all count.
        step: the step from which training resumes; None if unknown.
        run: for a fork, the parent's folder, relative to this run's folder.
        run_id: for a fork, the parent's id.
        mark: for a fork, the number of the session's checkpoint; None without a checkpoint.
        time: for a fork, when the checkpoint was saved, in seconds since 1970.
        before: for a fork at a step, records of this step and later ones don't count.
    """

    session: str
    records: int | None = None
    step: int | None = None
    run: str | None = None
    run_id: str | None = None
    mark: int | None = None
    time: float | None = None
    before: int | None = None

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Self | None:
        """Returns what a line's session continues; None for the first session or a damaged line."""
        match line.get("follows"):
            case {
                "session": str(session),
                "records": int() | None as records,
                "step": int() | None as step,
                **more,
            }:
                match more:
                    case {"run": str(run), "run_id": str(run_id)}:
                        mark, before = (
                            found if isinstance(found, int) else None
                            for found in (more.get("mark"), more.get("before"))
                        )
                        time = more.get("time")
                        time = float(time) if isinstance(time, int | float) else None
                        return cls(session, records, step, run, run_id, mark, time, before)
                return cls(session, records, step)
        return None

    def to_json(self) -> dict[str, Any]:
        """Returns the field `follows` for a line."""
        own = attrs.fields(Follows)[:3]
        return attrs.asdict(self, filter=lambda field, value: field in own or value is not None)


@attrs.define
class _Kept:
    """How much of a session belongs, after the cuts of all later sessions."""

    records: int | None = None
    # The smallest step of sessions that only named a batch, and how many sessions began from the last of
    # these on.
    step: int | None = None
    newer: int = 0
    # For a fork at a step: records of that step and later ones don't belong.
    before: int | None = None

    @property
    def is_whole(self) -> bool:
        return self.records is None and self.step is None and self.before is None


class Chain:
    """The sessions that lead to one of them.

    Args:
        lines: the lines of `sessions.jsonl`, oldest first.
        end: the id of the last session, or where a fork follows it. Default: the newest session.

    Raises:
        ValueError: there is no such session.
    """

    def __init__(self, lines: Sequence[Mapping[str, Any]], end: str | Follows | None = None) -> None:
        known = {_id_of(line): line for line in lines}
        kept = _Kept()
        if isinstance(end, Follows):
            kept = _Kept(end.records, before=end.before)
            end = end.session
        if end is not None and end not in known:
            raise ValueError(f"session must be one of {', '.join(known)}, got {end!r}.")
        # In format 2, sessions share one history, and records name no session.
        self._known = {_owner(line) for line in known.values()}
        self.sessions: list[str] = []
        """The ids of the sessions, newest first."""
        self.origin: Follows | None = None
        """Where the first session follows another run."""
        # Keyed by the session id in records; and how many sessions are newer.
        self._kept: dict[str, _Kept] = {}
        self._places: dict[str, int] = {}
        session = end if end is not None else next(reversed(known), None)
        seen: set[str] = set()
        earlier = dict(itertools.pairwise(reversed(known)))
        while session is not None and session not in seen and (line := known.get(session)):
            self._places.setdefault(_owner(line), len(self.sessions))
            self.sessions.append(session)
            seen.add(session)
            self._kept.setdefault(_owner(line), kept)
            follows = Follows.of(line)
            if follows is None:
                session = earlier.get(session) if "follows" not in line else None
                continue
            if follows.run is not None:
                named = None if kept.step is None else kept.step + 1
                self.origin = attrs.evolve(follows, before=_least(follows.before, kept.before, named))
                break
            kept = attrs.evolve(kept, records=follows.records)
            names_batch = follows.records is None and follows.step is not None
            if names_batch and follows.step == _least(follows.step, kept.step):
                kept.step, kept.newer = follows.step, len(self.sessions)
            session = follows.session

    @property
    def is_whole(self) -> bool:
        """Whether all records belong."""
        return self._kept.keys() >= self._known and all(kept.is_whole for kept in self._kept.values())

    def records_of(self, session: str) -> int | None:
        """Returns how many records of a session belong; 0 if it was left, None for all."""
        kept = self._kept.get(session)
        return 0 if kept is None else kept.records

    def records(self, read: Callable[[], Iterable[dict[str, Any] | None]]) -> Iterator[dict[str, Any] | None]:
        """Yields the lines of an index that belong, and None for each damaged line; see `belongs`."""
        belongs = self.belongs(read)
        return (one for one in read() if one is None or belongs(one))

    def belongs(
        self, read: Callable[[], Iterable[Mapping[str, Any] | None]]
    ) -> Callable[[Mapping[str, Any]], bool]:
        """Returns a function that tells whether a line of an index belongs.

        Args:
            read: reads the index from its beginning; called if a session only named a batch.
        """
        if self.is_whole:
            return lambda _: True
        # How many sessions are newer than the newest one that logged the record.
        again: dict[tuple[str, str, Any], int] = {}
        if steps := {kept.step for kept in self._kept.values()} - {None}:
            for one in read():
                if one is not None and one.get("step") in steps and (place := self._place(one)) is not None:
                    again[_what(one)] = min(place, again.get(_what(one), place))
        return lambda line: self._belongs(line, again)

    def _place(self, line: Mapping[str, Any]) -> int | None:
        return self._places.get(_id_of(line))

    def _belongs(self, line: Mapping[str, Any], again: Mapping[tuple[str, str, Any], int]) -> bool:
        if line.get("is_deleted") is True:
            # The file is gone, no matter which session deleted it.
            return True
        owner, number, step = _id_of(line), line.get("record"), line.get("step")
        kept = self._kept.get(owner)
        if kept is None:
            # A session whose line was lost isn't a branch.
            return owner not in self._known
        if not isinstance(step, int):
            step = None
        if kept.records is not None and isinstance(number, int) and number >= kept.records:
            return False
        if kept.before is not None and step is not None and step >= kept.before:
            return False
        if step is None or kept.step is None or step < kept.step:
            return True
        return step == kept.step and again.get(_what(line), kept.newer) >= kept.newer


def chain_of(run_dir: Path, end: str | None = None) -> Chain:
    """Returns the sessions of a run up to `end`. If their list can't be read, all records belong."""
    try:
        return Chain(read_sessions(run_dir), end)
    except OSError as error:
        _log.warning("%s cannot be read: what was left is shown too (%s)", run_dir / SESSIONS, error)
        return Chain(())


def _id_of(line: Mapping[str, Any]) -> str:
    return str(line.get("session", ""))


def _owner(line: Mapping[str, Any]) -> str:
    """Returns the session id that the session's records have; empty in format 2."""
    return _id_of(line) if "follows" in line else ""


def _least(*steps: int | None) -> int | None:
    return min((step for step in steps if step is not None), default=None)


def _what(line: Mapping[str, Any]) -> tuple[str, str, Any]:
    """Returns the key by which a record counts as logged again."""
    return str(line.get("type")), str(line.get("name")), line.get("step")
