"""Output of a command: screen width, colours, JSON, messages.

All output passes through here, including untrusted text from run files (names, tags, notes, paths): control
characters are shown as escapes, so that they cannot move the cursor, change the terminal or start a line.

Colours appear only on terminals, and never where `NO_COLOR` is set (https://no-color.org).
"""

import io
import json
import logging
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from typing import IO, Any, cast

import attrs

from destinations.text.formatting import plain
from uploads import encodable, one_line, one_line_json

__all__ = ["STYLES", "NotesHandler", "Screen", "Session"]

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
        """Returns what a stream can do; that of this process's output where none is given."""
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

    def json(self, value: Any) -> None:
        """Writes a value as indented strict JSON; NaN and infinities become strings."""
        text = json.dumps(plain(value), ensure_ascii=False, indent=2, allow_nan=False)
        self.lines(map(one_line_json, text.split("\n")))

    def json_line(self, value: Any) -> None:
        """Writes a value as one line of strict JSON."""
        text = json.dumps(plain(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        self.line(one_line_json(text))

    def styled(self, text: str, style: str | None) -> str:
        """Returns the text with a style applied, where colours are shown."""
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
class Session:
    """The environment of a command; tests inject their own.

    Attributes:
        screen: results.
        errors: messages (stderr).
        clock: returns the time in seconds since 1970.
        wait: sleeps for a number of seconds.
        ask: asks a question in a terminal and returns the answer; None where there is none.
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

    def __init__(self, session: Session) -> None:
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
