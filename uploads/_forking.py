"""After a fork the child owns no thread, no lock and no worker of its parent's queues; it may only stage files."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["forget_in_child"]


class _Forkable(Protocol):
    def _forget_after_fork(self) -> None: ...


_queues: weakref.WeakSet[_Forkable] = weakref.WeakSet()
_registered: list[bool] = []


def forget_in_child(queue: _Forkable) -> None:
    """Has `queue._forget_after_fork()` called in every child that is forked from here on, as long as the queue lives."""
    if not _registered:
        _registered.append(True)
        os.register_at_fork(after_in_child=_forget_all)
    _queues.add(queue)


def _forget_all() -> None:
    for queue in list(_queues):
        queue._forget_after_fork()  # noqa: SLF001  # the protocol above
