"""Output of a command: screen width, colours, values as text, tables, JSON, messages.

All output passes through here, including untrusted text from run files (names, tags, notes, paths). Control
characters are escaped, so that they can't move the cursor, change the terminal or start a line.

Colours appear only on terminals, and never if `NO_COLOR` is set (https://no-color.org).
"""

import io
import json
import logging
import math
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any, cast

import attrs

from destinations.text.formatting import ELLIPSIS, cut, pad, plain, short, shortened, width_of
from uploads import encodable, one_line, one_line_json

__all__ = [
    "NOTHING",
    "STYLES",
    "Cell",
    "Column",
    "CommandContext",
    "NotesHandler",
    "Screen",
    "age_text",
    "bytes_text",
    "duration_text",
    "numbers",
    "sparkline",
    "table_lines",
    "value_text",
]

# Marks the start and end of a style in a line; random, so that no text from a run file can contain it.
_MARK = f"<{secrets.token_hex(8)}:"
_STYLE_MARK = re.compile(rf"{_MARK}(\d+);")

STYLES = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "magenta": "35",
    "cyan": "36",
}


@attrs.frozen
class Screen:
    """The standard output of a command.

    Attributes:
        stream: the output stream.
        width: line width in cells; None for unlimited, as in a file.
        has_colors: colours are shown.
        is_terminal: earlier output can be overwritten.
    """

    stream: IO[str]
    width: int | None = None
    has_colors: bool = False
    is_terminal: bool = False

    @classmethod
    def of(cls, stream: IO[str] | None = None) -> "Screen":
        """Returns the screen of a stream; by default, of this process's standard output."""
        stream = sys.stdout if stream is None else stream
        is_terminal = stream.isatty()
        has_colors = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        is_bounded = is_terminal or os.environ.get("COLUMNS", "").isdigit()
        width = shutil.get_terminal_size().columns if is_bounded else None
        return cls(stream, width, has_colors, is_terminal)

    def line(self, text: str = "") -> None:
        """Writes a line."""
        shown = _STYLE_MARK.sub("\x1b[\\1m", one_line(text))
        self.stream.write(f"{encodable(shown, self.stream)}\n")

    def lines(self, lines: Iterable[str]) -> None:
        """Writes several lines."""
        for text in lines:
            self.line(text)

    def table(self, columns: "Sequence[Column | str]", rows: Iterable[Sequence[Any]]) -> None:
        """Writes a table; see `table_lines`."""
        self.lines(table_lines(columns, rows, self))

    def json(self, value: Any) -> None:
        """Writes a value as indented strict JSON; NaN and infinities become strings."""
        text = json.dumps(plain(value), ensure_ascii=False, indent=2, allow_nan=False)
        self.lines(map(one_line_json, text.split("\n")))

    def json_line(self, value: Any) -> None:
        """Writes a value as one line of strict JSON."""
        text = json.dumps(plain(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        self.line(one_line_json(text))

    def styled(self, text: str, style: str | None) -> str:
        """Returns the text with a style applied, if colours are shown."""
        if not style or not self.has_colors:
            return text
        return f"{_MARK}{STYLES[style]};{text}{_MARK}0;"

    def data_stream(self) -> IO[str]:
        """Returns the stream for raw data; on a terminal, control characters are escaped."""
        return cast("IO[str]", _EscapingStream(self.stream)) if self.is_terminal else self.stream

    def clear(self) -> None:
        """Clears a terminal; writes an empty line elsewhere."""
        self.stream.write("\x1b[H\x1b[J" if self.is_terminal else "\n")

    def flush(self) -> None:
        """Flushes the stream."""
        self.stream.flush()


@attrs.frozen
class CommandContext:
    """The environment of a command; tests inject their own.

    Attributes:
        screen: results.
        errors: messages (stderr).
        clock: returns the time in seconds since 1970.
        wait: sleeps for a number of seconds.
        ask: asks a question in a terminal and returns the answer; None without a terminal.
        environment: environment variables.
    """

    screen: Screen = attrs.field(factory=Screen.of)
    errors: IO[str] = attrs.field(factory=lambda: sys.stderr)
    clock: Callable[[], float] = time.time
    wait: Callable[[float], None] = time.sleep
    ask: Callable[[str], str] | None = attrs.field(factory=lambda: input if _is_interactive() else None)
    environment: "os._Environ[str] | dict[str, str]" = attrs.field(factory=lambda: os.environ)

    def note(self, text: str) -> None:
        """Writes a one-line message to `errors`."""
        self.errors.write(f"{encodable(one_line(text), self.errors)}\n")


def _is_interactive() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


class NotesHandler(logging.Handler):
    """Logging handler that writes warnings of this package as messages of the session."""

    def __init__(self, session: CommandContext) -> None:
        super().__init__(logging.WARNING)
        self._session = session

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the message of a log record."""
        self._session.note(record.getMessage())


class _EscapingStream(io.TextIOBase):
    """Text stream that escapes control characters like `Screen.line`."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        lines = text.split("\n")
        self._stream.write(encodable("\n".join(map(one_line, lines)), self._stream))
        return len(text)


# Tables: columns are as wide as their content, or truncated if the screen is too narrow.

_GAP = "  "
_NARROWEST = 5


@attrs.frozen
class Column:
    """A column of a table.

    Attributes:
        title: the header.
        is_right: right-aligned.
        is_whole: truncated only after all other columns, and in the middle, because both ends of a name
            matter.
        narrowest: never narrower than this, unless its content is.
    """

    title: str
    is_right: bool = False
    is_whole: bool = False
    narrowest: int = _NARROWEST


@attrs.frozen
class Cell:
    """A text with a colour."""

    text: str
    style: str | None = None


def numbers(*titles: str) -> list[Column]:
    """Returns right-aligned columns."""
    return [Column(title, is_right=True) for title in titles]


def _cell(value: Any) -> Cell:
    # Escaped before measuring: an escape is wider than the character it replaces.
    if isinstance(value, Cell):
        return Cell(one_line(value.text), value.style)
    return Cell(one_line(value) if isinstance(value, str) else value_text(value))


def table_lines(columns: Sequence[Column | str], rows: Iterable[Sequence[Any]], screen: Screen) -> list[str]:
    """Returns the lines of a table, header first. A cell that is no `Cell` or text is shown by `value_text`.

    On a narrow screen, the widest columns are truncated with "…". If that isn't enough, the last columns are
    omitted, and the header ends with "…".
    """
    table = [list(map(_cell, row)) for row in rows]
    given = [Column(one) if isinstance(one, str) else one for one in columns]
    whole = [attrs.evolve(column, title=one_line(column.title)) for column in given]
    widths = [
        max([width_of(column.title), *(width_of(row[index].text) for row in table)])
        for index, column in enumerate(whole)
    ]
    shown = len(whole)
    if screen.width is not None:
        shown = _fitting(widths, whole, screen.width)
    head = [Cell(column.title, "bold") for column in whole]
    lines = [_line(row[:shown], whole, widths, screen) for row in (head, *table)]
    if shown < len(whole):
        lines[0] += f"{_GAP}{ELLIPSIS}"
    return lines


def _fitting(widths: list[int], columns: Sequence[Column], room: int) -> int:
    """Narrows `widths` in place until the table fits `room` cells; returns the number of columns shown."""

    # The "…" for omitted columns needs space too.
    def room_between(shown: int) -> int:
        return len(_GAP) * (shown - 1) + (0 if shown == len(columns) else len(_GAP) + len(ELLIPSIS))

    widths[:] = (min(width, room) for width in widths)
    least = [min(width, column.narrowest) for width, column in zip(widths, columns, strict=True)]
    shown = len(columns)
    while shown > 1 and sum(least[:shown]) + room_between(shown) > room:
        shown -= 1
    free = room - room_between(shown)
    for may_cut_whole in (False, True):
        while sum(widths[:shown]) > free:
            candidates = [
                index
                for index in range(shown)
                if widths[index] > least[index] and (may_cut_whole or not columns[index].is_whole)
            ]
            if not candidates:
                break
            widths[max(candidates, key=widths.__getitem__)] -= 1
    return shown


def _line(row: Sequence[Cell], columns: Sequence[Column], widths: Sequence[int], screen: Screen) -> str:
    cells = []
    for index, cell in enumerate(row):
        text = (shortened if columns[index].is_whole else cut)(cell.text, widths[index])
        is_last = index == len(row) - 1
        padded = (
            text
            if is_last and not columns[index].is_right
            else pad(text, widths[index], right=columns[index].is_right)
        )
        cells.append(screen.styled(padded, cell.style))
    return _GAP.join(cells).rstrip() if not screen.has_colors else _GAP.join(cells)


# Values as text.

NOTHING = "–"  # noqa: RUF001  # an en dash, unlike the minus sign of a number

_BARS = "▁▂▃▄▅▆▇█"
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_KIB = 1024.0


def age_text(seconds: float | None) -> str:
    """Returns an age in its largest unit: "12s", "5m", "3h", "4d"."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    seconds = max(0.0, seconds)
    for unit, size in (("d", _DAY), ("h", _HOUR), ("m", _MINUTE)):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"


def duration_text(seconds: float | None) -> str:
    """Returns a duration in two units: "12s", "5m03s", "3h20m", "4d01h"."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    whole = int(max(0.0, seconds))
    if whole >= _DAY:
        return f"{whole // _DAY}d{whole % _DAY // _HOUR:02d}h"
    if whole >= _HOUR:
        return f"{whole // _HOUR}h{whole % _HOUR // _MINUTE:02d}m"
    if whole >= _MINUTE:
        return f"{whole // _MINUTE}m{whole % _MINUTE:02d}s"
    return f"{whole}s"


def bytes_text(size: float) -> str:
    """Returns a size in binary units: "812 B", "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < _KIB:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= _KIB
    return f"{size:.1f} TiB"


def value_text(value: Any) -> str:
    """Returns any value on one line: floats rounded, None as a dash."""
    if value is None:
        return NOTHING
    if isinstance(value, float):
        return short(value)
    if isinstance(value, dict | list | tuple):
        import json

        return one_line(json.dumps(plain(value), ensure_ascii=False))
    return one_line(str(value))


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Returns a bar chart of a series in one line; each character is the mean of an equal part of the series.

    Non-finite values are skipped; a part without finite values is a space.
    """
    count = len(values)
    width = min(width, count)
    means = []
    for index in range(width):
        part = values[index * count // width : (index + 1) * count // width]
        finite = [float(value) for value in part if math.isfinite(value)]
        # Divided first: the sum may overflow.
        means.append(math.fsum(value / len(finite) for value in finite) if finite else math.nan)
    known = [mean for mean in means if math.isfinite(mean)]
    if not known:
        return ""
    low, high = min(known), max(known)
    # Halved, for the same reason.
    span = high / 2 - low / 2
    return "".join(
        " "
        if not math.isfinite(mean)
        else _BARS[round((mean / 2 - low / 2) / (span or 1) * (len(_BARS) - 1))]
        for mean in means
    )
