"""Where a command writes: how wide it is, whether it shows colours, and what it does with JSON.

Colours are for terminals alone, and for none where `NO_COLOR` is set (https://no-color.org).
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from typing import IO, Any

import attrs

from destinations._formatting import plain

__all__ = ["STYLES", "Screen", "Session"]

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
        stream: where text goes.
        width: how many cells a line has; None where lines may have any length, as in a file.
        has_colors: whether colours are shown.
        is_terminal: whether what was written can be overwritten.
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
        self.stream.write(f"{_encodable(text, self.stream)}\n")

    def lines(self, lines: Iterable[str]) -> None:
        """Writes several lines."""
        for text in lines:
            self.line(text)

    def json(self, value: Any) -> None:
        """Writes a value as strict JSON, indented; NaN and infinities as texts."""
        self.line(json.dumps(plain(value), ensure_ascii=False, indent=2, allow_nan=False))

    def json_line(self, value: Any) -> None:
        """Writes a value as one line of strict JSON."""
        self.line(json.dumps(plain(value), ensure_ascii=False, allow_nan=False, separators=(",", ":")))

    def styled(self, text: str, style: str | None) -> str:
        """Returns a text in a colour, where colours are shown."""
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if style and self.has_colors else text

    def clear(self) -> None:
        """Begins a new page: over the old one on a terminal, below it elsewhere."""
        self.stream.write("\x1b[H\x1b[J" if self.is_terminal else "\n")

    def flush(self) -> None:
        """Has everything shown."""
        self.stream.flush()


@attrs.frozen
class Session:
    """What a command needs of the world.

    Attributes:
        screen: where results go.
        errors: where messages go that are no result.
        clock: the time in seconds since 1970.
        wait: waits for some seconds.
        environment: the environment variables.
    """

    screen: Screen = attrs.field(factory=Screen.of)
    errors: IO[str] = attrs.field(factory=lambda: sys.stderr)
    clock: Callable[[], float] = time.time
    wait: Callable[[float], None] = time.sleep
    environment: "os._Environ[str] | dict[str, str]" = attrs.field(factory=lambda: os.environ)

    def note(self, text: str) -> None:
        """Writes a message beside the results."""
        self.errors.write(f"{_encodable(text, self.errors)}\n")


def _encodable(text: str, stream: IO[str]) -> str:
    """Returns what the stream can write: a name of a run may hold what the locale has no bytes for."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text
