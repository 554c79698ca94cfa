"""Writes to the user's streams, and wraps `sys.stdout` and `sys.stderr` to capture their output.

Wrappers are installed as by `contextlib.redirect_stdout`, but may be removed in any order.
"""

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TextIO

from uploads import encodable

__all__ = [
    "Redirection",
    "StreamWrapper",
    "columns_of",
    "default_stream",
    "has_colors",
    "is_kernel",
    "is_terminal",
    "write_text",
]

_DEFAULT_COLUMNS, _MIN_COLUMNS, _MAX_COLUMNS = 80, 40, 120


def default_stream() -> Any:
    """Returns the stream for text: `sys.stderr`; in a notebook `sys.stdout`, since stderr is shown in red."""
    return sys.stdout if is_kernel() else sys.stderr


def is_kernel() -> bool:
    """Returns whether this process is the kernel of a notebook; does not import IPython."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and "IPKernelApp" in getattr(ipython.get_ipython(), "config", {})


def write_text(stream: TextIO | None, text: str) -> None:
    """Writes whole lines in one call and flushes; `None` is `default_stream()`, if there is one.

    Characters that the encoding of the stream lacks are escaped. If the stream has been wrapped since it was
    passed in, the text goes through the wrapper, so that it is captured. tqdm bars on the stream,
    even from other code, stay below the text.
    """
    target: Any = default_stream() if stream is None else stream
    for current in (sys.stderr, sys.stdout):
        if isinstance(current, StreamWrapper) and current == target:
            target = current
    if target is None:
        return
    with nullcontext() if getattr(target, "keeps_bars", False) else _bars_cleared(target):
        target.write(encodable(text, target))
    if hasattr(target, "flush"):
        target.flush()


def _bars_cleared(stream: Any) -> AbstractContextManager[Any]:
    """Returns a context in which no bar of tqdm is on the stream."""
    tqdm = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    if tqdm is None or not getattr(tqdm, "_instances", None):
        return nullcontext()
    context: AbstractContextManager[Any] = tqdm.external_write_mode(file=stream)
    return context


def has_colors(stream: Any) -> bool:
    """Returns whether a stream (None: `default_stream()`) shows styles: see https://no-color.org."""
    is_wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return is_wanted and is_terminal(default_stream() if stream is None else stream)


def columns_of(stream: Any) -> int:
    """Returns the width of a terminal in cells, from 40 to 120; 80 for another stream."""
    stream = default_stream() if stream is None else stream
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (AttributeError, OSError, ValueError):
        return _DEFAULT_COLUMNS
    return min(max(columns, _MIN_COLUMNS), _MAX_COLUMNS) if columns else _DEFAULT_COLUMNS


def is_terminal(stream: Any) -> bool:
    """Returns whether a stream is a terminal; False if it cannot tell."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


class StreamWrapper:
    """Wraps a stream; subclasses override `write`, everything else is delegated.

    A wrapper with another wrapper on top cannot be removed: `deactivate` turns it into a pass-through. In a
    forked child it is a pass-through from the start.
    """

    keeps_bars = False
    """Whether it keeps the output apart from the bars of tqdm."""

    def __init__(self, stream: Any) -> None:
        # tqdm looks for this attribute to recognize the wrapped stream.
        self._wrapped = stream
        self._is_active = True
        self._owner_pid = os.getpid()

    @property
    def wrapped(self) -> Any:
        """The wrapped stream."""
        return self._wrapped

    @property
    def is_active(self) -> bool:
        """Whether `write` should do more than pass through."""
        return self._is_active and os.getpid() == self._owner_pid

    def write(self, text: str) -> int:
        """Writes to the stream."""
        written: int = self._wrapped.write(text)
        return written

    def writelines(self, lines: Any) -> None:
        """Writes each line."""
        for line in lines:
            self.write(line)

    def deactivate(self) -> None:
        """Turns the wrapper into a pass-through."""
        self._is_active = False

    def finish(self) -> None:
        """Writes the output that was held back; called once all wrappers are removed."""

    def __getattr__(self, name: str) -> Any:
        if name == "_wrapped":
            # Looked up on an uninitialized instance, as by `copy`; delegating would recurse.
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    # Like the wrappers of tqdm: a bar on the stream and a bar on its wrapper share a place on the screen.
    def __eq__(self, other: object) -> bool:
        return self is other or self._wrapped == getattr(other, "_wrapped", other)

    def __hash__(self) -> int:
        return hash(self._wrapped)


class Redirection:
    """Installs wrappers around standard streams; `undo` removes them.

    Args:
        make: returns the wrapper of a stream; called with its name ("stdout" or "stderr") and the stream.
        names: the streams to wrap.
    """

    def __init__(self, make: Callable[[str, Any], StreamWrapper], names: Iterable[str]) -> None:
        self.wrappers: dict[str, StreamWrapper] = {}
        """The wrappers, by the name of the stream."""
        for name in names:
            stream = getattr(sys, name)
            if stream is not None:
                self.wrappers[name] = make(name, stream)
                setattr(sys, name, self.wrappers[name])

    def undo(self) -> None:
        """Restores the streams; a wrapper below another one only becomes a pass-through. Idempotent."""
        wrappers, self.wrappers = self.wrappers, {}
        for name, wrapper in wrappers.items():
            wrapper.deactivate()
            if getattr(sys, name) is wrapper:
                setattr(sys, name, _beneath(wrapper))
        for wrapper in wrappers.values():
            wrapper.finish()


def _beneath(wrapper: StreamWrapper) -> Any:
    """Returns the first stream below that is not a deactivated wrapper."""
    stream: Any = wrapper
    while isinstance(stream, StreamWrapper) and not stream._is_active:  # noqa: SLF001  # same class
        stream = stream._wrapped  # noqa: SLF001  # as above
    return stream
