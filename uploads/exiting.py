"""Turns SIGTERM, which schedulers send before they kill, into an orderly exit. Only where asked for."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["exit_on_sigterm"]


def exit_on_sigterm() -> None:
    """Makes SIGTERM raise SystemExit(143) in the main thread, so that `finally` blocks run and queues drain up to their `exit_seconds`.

    A handler that was installed before is called first. Call it from the main thread.

    Raises:
        ValueError: Called from another thread.
    """
    earlier: Any = signal.getsignal(signal.SIGTERM)

    def end(number: int, frame: FrameType | None) -> None:
        if callable(earlier):
            earlier(number, frame)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
