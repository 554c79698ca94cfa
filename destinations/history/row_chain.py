"""`RowChain`: which session wrote the rows of a rank, in which parts, and which rows belong to the run.

It is read from `metrics.history.jsonl`, which only grows. A line records that a session began and what it
follows, that a part was closed, or how many rows a session had at a checkpoint. The rows of a session are
numbered in the order in which it wrote them; a place is a number of rows.
"""

import errno
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import attrs

from uploads.disk import read_regular

from .sessions import read_sessions
from .sums import parse_line, summed_line

__all__ = [
    "ALL",
    "Keep",
    "Kept",
    "Limit",
    "RowChain",
    "RowPlace",
    "SealedPart",
    "drops",
    "history_path",
    "read_history",
    "tighter",
]

_MAX_BYTES = 256 << 20


def history_path(csv: Path) -> Path:
    """Returns the path of the history of a CSV: `metrics.history.jsonl` for `metrics.csv`."""
    return csv.with_suffix(".history.jsonl")


def read_history(csv: Path, limit: int | None = None) -> bytes:
    """Returns the complete lines of a history file; see `RowChain.read`."""
    path = history_path(csv)
    try:
        data = read_regular(path, _MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        data = b""
    if len(data) < (limit or 0):
        text = f"{len(data)} of {limit} bytes are there, so that nothing says which rows belong"
        raise OSError(errno.EIO, text, str(path))
    data = data[:limit]
    return data[: data.rfind(b"\n") + 1]


Limit = tuple[int, float | None]
"""A step, and a time in seconds since 1970: see `Keep`."""


def drops(limit: Limit, step: Any, time: Any) -> Any:
    """Returns whether a row lies beyond a limit and doesn't count; for arrays, a mask.

    Args:
        limit: the limit.
        step: the step of the row; NaN or the lowest integer if it has none.
        time: the time of the row; NaN if it has none.
    """
    last, at = limit
    # Not `>`: a row without a time is late.
    is_late = True if at is None else (time <= at) ^ True
    return (step > last) | ((step == last) & is_late)


def tighter(*limits: Limit | None) -> Limit | None:
    """Returns the limit that drops every row dropped by any of these; None if all are None."""
    found = (one for one in limits if one is not None)
    return min(found, key=lambda one: (one[0], -math.inf if one[1] is None else one[1]), default=None)


@attrs.frozen
class Keep:
    """Which rows of a closed part count.

    Attributes:
        rows: how many rows count, from the first on; None for all.
        limit: rows of later steps don't count. Rows of the step itself count if they were logged by the time;
            none of them count if the time is None.
    """

    rows: int | None = None
    limit: Limit | None = None


ALL = Keep()


@attrs.frozen
class RowPlace:
    """A number of rows of a session, after the rows of the sessions before it.

    Attributes:
        session: the session's id; "" for rows written before format 3.
        rows: how many rows count; None for all.
        limit: rows beyond it don't count either; set if a loop named its batch.
    """

    session: str
    rows: int | None = None
    limit: Limit | None = None


Kept = tuple[RowPlace, Limit | None]
"""How many rows of a session count, and the limit of their steps."""


@attrs.frozen
class SealedPart:
    """A closed part: it never changes.

    Attributes:
        number: the number in its file name.
        session: the id of the session that wrote its rows.
        rows: how many rows it has.
        size: the size of the file in bytes.
        crc32: the checksum of the file; 0 in format 2.
        csv_bytes: the size of its rows as CSV.
    """

    number: int
    session: str
    rows: int
    size: int
    crc32: int
    csv_bytes: int


@attrs.define
class RowChain:
    """The content of a history file.

    Attributes:
        content: the bytes of the file, up to the last complete line that counts.
        newest: the id of the newest session; "" before the first.
        parts: the closed parts of each session, in the order of their rows.
        lost: how many rows of the CSV sessions found damaged and left blank.
    """

    content: bytearray = attrs.field(factory=bytearray)
    newest: str = ""
    parts: dict[str, list[SealedPart]] = attrs.field(factory=dict)
    lost: int = 0
    _follows: dict[str, RowPlace | None] = attrs.field(factory=lambda: {"": None})
    _view: dict[str, int | None] = attrs.field(factory=lambda: {"": 0})
    _marks: dict[tuple[str, int], int] = attrs.field(factory=dict)

    @classmethod
    def read(cls, csv: Path, limit: int | None = None) -> Self:
        """Reads the history of a CSV; empty if there is none.

        Args:
            csv: its path.
            limit: how many bytes count. Default: all complete lines.

        Raises:
            OSError: the file can't be read, has fewer bytes than `limit`, or has a damaged line, so it isn't
                known which rows belong.
        """
        return cls.parse(read_history(csv, limit), csv)

    @classmethod
    def parse(cls, data: bytes, csv: Path) -> Self:
        """Returns the history of a CSV from the content of its file; see `read`."""
        found = cls()
        for line in data.splitlines(keepends=True):
            try:
                found.add(line)
            except ValueError as error:
                raise OSError(errno.EIO, f"a line is damaged: {error}", str(history_path(csv))) from error
        return found

    def add(self, line: bytes) -> None:
        """Adds a line; lines of unknown kinds are ignored.

        Raises:
            ValueError: the line isn't JSON, or its checksum differs.
        """
        self.content += line
        match parse_line(line):
            case {"part": int(number), "session": str(session), "rows": int(rows), **more}:
                places = [more.get(name) for name in ("bytes", "crc32", "csv_bytes")]
                size, crc32, csv_bytes = (one if isinstance(one, int) else 0 for one in places)
                part = SealedPart(number, session, rows, size, crc32, csv_bytes)
                self.parts.setdefault(session, []).append(part)
            case {"mark": int(mark), "session": str(session), "rows": int(rows)}:
                self._marks[session, mark] = rows
            case {"lost": int(rows)}:
                self.lost += rows
            case {"session": str(session), "follows": follows, "view": int() | None as view}:
                self.newest = session
                self._view[session] = view
                self._follows[session] = _place_of(follows)

    @property
    def size(self) -> int:
        """The number of bytes that count."""
        return len(self.content)

    def add_format2(
        self, csv: Path, numbers: Iterable[int], rows_in: Callable[[int], int] = lambda _: 0
    ) -> None:
        """Adds the parts of a folder of format 2, which has no history: all parts belong.

        Raises:
            OSError: the run began in format 3 and has several sessions, so its history was lost.
        """
        if parts := [SealedPart(number, "", rows_in(number), 0, 0, 0) for number in numbers]:
            # Sessions of format 2 don't record what they follow. A single session keeps all rows.
            first, *later = read_sessions(csv.parent) or [{}]
            if later and "follows" in first:
                text = "it is missing, so that nothing says which rows belong"
                raise OSError(errno.ENODATA, text, str(history_path(csv)))
            self.parts[""] = parts

    # Lines.

    def part(self, part: SealedPart) -> bytes:
        """Returns the line for a closed part."""
        fields = {"session": part.session, "rows": part.rows, "bytes": part.size, "crc32": part.crc32}
        return _line({"part": part.number, **fields, "csv_bytes": part.csv_bytes})

    def mark(self, mark: int, rows: int) -> bytes:
        """Returns the line for a checkpoint that the newest session saved after so many rows."""
        return _line({"mark": mark, "session": self.newest, "rows": rows})

    def loss(self, rows: int) -> bytes:
        """Returns the line for rows of the CSV that the newest session found damaged."""
        return _line({"lost": rows, "session": self.newest})

    def session(self, session: str, follows: RowPlace | None, view: int | None) -> bytes:
        """Returns the line for a session.

        Args:
            session: the session's id. A session that turns out to follow something else gets another line.
            follows: what it continues.
            view: how many rows of earlier sessions the CSV begins with, if those are all that count; None if
                they are only in closed parts.
        """
        place = None if follows is None else attrs.asdict(follows, filter=lambda _, value: value is not None)
        return _line({"session": session, "follows": place, "view": view})

    # What belongs.

    @property
    def view(self) -> int | None:
        """How many rows of earlier sessions the CSV begins with; None if closed parts precede it."""
        return None if self.parts.get(self.newest) else self._view.get(self.newest)

    def knows(self, session: str) -> bool:
        """Returns whether a session has written here."""
        return session in self._follows

    def place(self, session: str, mark: int) -> RowPlace:
        """Returns the place of a session at a checkpoint; its end if the mark is lost."""
        return RowPlace(session, self._marks.get((session, mark)))

    def sealed_rows(self, session: str) -> int:
        """Returns how many rows of a session are in closed parts."""
        return sum(part.rows for part in self.parts.get(session, ()))

    def chain(self, end: RowPlace | None, limit: Limit | None = None) -> "list[Kept]":
        """Returns the sessions that lead to a place, oldest first, each with the limit on its rows."""
        found: list[Kept] = []
        seen: set[str] = set()
        while end is not None and end.session not in seen:
            seen.add(end.session)
            limit = tighter(limit, end.limit)
            found.append((end, limit))
            end = self._follows.get(end.session)
        return found[::-1]

    @property
    def before(self) -> RowPlace | None:
        """What the newest session continues."""
        return self._follows.get(self.newest)

    def kept(self, end: RowPlace | None) -> Iterator[tuple[SealedPart, Keep]]:
        """Yields the closed parts up to a place, oldest first, and which of their rows count."""
        return self.parts_of(self.chain(end))

    def parts_of(self, chain: "Iterable[Kept]") -> Iterator[tuple[SealedPart, Keep]]:
        """Yields the closed parts of sessions, and which of their rows count."""
        for place, limit in chain:
            left = place.rows
            for part in self.parts.get(place.session, ()):
                if left is not None and left <= 0:
                    break
                yield part, Keep(left if left is not None and left < part.rows else None, limit)
                left = None if left is None else left - part.rows

    def preceding(self) -> Iterator[tuple[SealedPart, Keep]]:
        """Yields the closed parts before the CSV, and which of their rows count."""
        if self.view is None:
            yield from self.kept(self.before)
            for part in self.parts.get(self.newest, ()):
                yield part, ALL

    def left(self) -> Iterator[tuple[str, list[tuple[SealedPart, Keep]]]]:
        """Yields each session with rows that don't belong, and its parts with the rows that do."""
        kept = {part.number: keep for part, keep in self.kept(self.before)}
        for session, parts in self.parts.items():
            found = [(part, kept.get(part.number, Keep(0))) for part in parts]
            found = [(part, keep) for part, keep in found if keep != ALL]
            if found and session != self.newest:
                yield session, found


def _place_of(follows: Any) -> RowPlace | None:
    match follows:
        case {"session": str(session), **more}:
            rows = more.get("rows")
            limit: Limit | None = None
            match more.get("limit"):
                case [int(step), float() | int() | None as time]:
                    limit = step, time
            return RowPlace(session, rows if isinstance(rows, int) else None, limit)
    return None


def _line(fields: dict[str, Any]) -> bytes:
    return summed_line(json.dumps(fields))
