"""Writing to the user's streams, and standing in for them: `sys.stdout` and `sys.stderr` with somebody listening.

A stand-in is set where `contextlib.redirect_stdout` would set it, and taken away in whatever order its neighbours go.
"""

import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

__all__ = ["Redirection", "StandIn", "encodable", "is_terminal", "write_text"]


def write_text(stream: TextIO | None, text: str) -> None:
    """Writes whole lines at once and flushes; `None` is the `sys.stderr` of this moment, if there is one.

    What the stream's encoding cannot express is written as an escape. Where somebody listens to the stream, or keeps bars
    on it, they are not gone around: a stream that was given long ago may have got a stand-in since.
    """
    target: Any = sys.stderr if stream is None else stream
    for current in (sys.stderr, sys.stdout):
        if isinstance(current, StandIn) and current == target:
            target = current
    if target is None:
        return
    target.write(encodable(target, text))
    if hasattr(target, "flush"):
        target.flush()


def encodable(stream: Any, text: str) -> str:
    """Returns the text with escapes for what the stream's encoding cannot express."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def is_terminal(stream: Any) -> bool:
    """Says whether a stream is a terminal; one that cannot tell is none."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


class StandIn:
    """Stands in for a stream: everything but `write` is the stream's own.

    When it is let go while somebody else has put a stand-in on top of it, it cannot be taken away; then it goes on as a
    mere passage. In a forked child it is one from the start.
    """

    def __init__(self, stream: Any) -> None:
        # The name is tqdm's: bars that write to the stream know it again behind a wrapper with this attribute.
        self._wrapped = stream
        self._is_active = True
        self._owner_pid = os.getpid()

    @property
    def is_listening(self) -> bool:
        """Whether `write` is to do anything but pass on."""
        return self._is_active and os.getpid() == self._owner_pid

    def write(self, text: str) -> int:
        """Writes to the stream."""
        written: int = self._wrapped.write(text)
        return written

    def writelines(self, lines: Any) -> None:
        """Writes each of them."""
        for line in lines:
            self.write(line)

    def let_go(self) -> None:
        """Becomes a mere passage."""
        self._is_active = False

    def __getattr__(self, name: str) -> Any:
        if name == "_wrapped":
            # Asked for before there is one, as by `copy`: there is nothing to look it up in.
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    # As tqdm's own wrappers: a bar on the stream, and one on its stand-in, are bars in the same place.
    def __eq__(self, other: object) -> bool:
        return self is other or self._wrapped == getattr(other, "_wrapped", other)

    def __hash__(self) -> int:
        return hash(self._wrapped)


class Redirection:
    """Puts stand-ins for standard streams, and takes them away again.

    Args:
        make: returns the stand-in for a stream, given the stream's name ("stdout" or "stderr") and the stream.
        names: which streams.
    """

    def __init__(self, make: Callable[[str, Any], StandIn], names: tuple[str, ...]) -> None:
        self._stand_ins: dict[str, StandIn] = {}
        for name in names:
            stream = getattr(sys, name)
            if stream is not None:
                self._stand_ins[name] = make(name, stream)
                setattr(sys, name, self._stand_ins[name])

    def undo(self) -> None:
        """Puts back what was there, where nobody else has put something on top; once."""
        for name, stand_in in self._stand_ins.items():
            stand_in.let_go()
            if getattr(sys, name) is stand_in:
                setattr(sys, name, _beneath(stand_in))
        self._stand_ins.clear()


def _beneath(stand_in: StandIn) -> Any:
    """Returns the first stream below that is no stand-in whose time is over."""
    stream: Any = stand_in
    while isinstance(stream, StandIn) and not stream._is_active:  # noqa: SLF001  # of its own kind
        stream = stream._wrapped  # noqa: SLF001  # as above
    return stream
