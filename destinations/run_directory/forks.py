"""Keeps forked children from writing into the files of their parent."""

import os
import weakref
from typing import Protocol

__all__ = ["discard", "forget_in_children"]


class Forgetful(Protocol):
    """What has a thread, a lock and files that are not a forked child's."""

    def forget_in_child(self) -> None:
        """Lets go of them, in the child."""


_open: "weakref.WeakSet[Forgetful]" = weakref.WeakSet()
_is_guarded: list[bool] = []


def forget_in_children(one: Forgetful) -> None:
    """Has `forget_in_child` called in each child that is forked from now on, until `discard`."""
    if not _is_guarded:
        os.register_at_fork(after_in_child=_forget_all)
        _is_guarded.append(True)
    _open.add(one)


def discard(one: Forgetful) -> None:
    """Takes it back."""
    _open.discard(one)


def _forget_all() -> None:
    for one in list(_open):
        one.forget_in_child()
    _open.clear()
