"""Whether a server keeps the promise of `If-None-Match: *`: tried once, since some accept the header and overwrite all the same."""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import uuid
from typing import TYPE_CHECKING, Literal, Protocol

from uploads.errors import RejectedByStore, RemoteExists, StoreError
from uploads.spool.spool import is_alive

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .store import RemoteObject

__all__ = ["CreateOnly", "CreateOnlyPolicy"]

_log = logging.getLogger("uploads")

CreateOnlyPolicy = Literal["require", "head"]

_PROBE = ".uploads-probe-"
_TRIALS = 3


class CreateOnly:
    """What a store knows of its server's create-only puts. The lock guards the one trial.

    Args:
        policy: "require" refuses `overwrite=False` where the server does not keep the promise; "head" looks before it puts, says so once,
            and accepts that two ranks at the same instant may both succeed.
        known: Whether the server keeps it, where that need not be tried.
    """

    def __init__(self, policy: CreateOnlyPolicy, *, known: bool | None) -> None:
        if policy not in {"require", "head"}:
            raise ValueError(f"create_only must be 'require' or 'head', got {policy!r}")
        self._policy = policy
        self._kept = known
        self._lock = threading.Lock()

    def may_be_asked(self, uri: str, store: Probes) -> bool:
        """Whether to put create-only; False where looking before putting has to do.

        Args:
            uri: The store's, for messages.
            store: Where to try it.

        Raises:
            RejectedByStore: The server does not keep the promise, and the policy requires it.
        """
        with self._lock:
            if self._kept is None:
                self._kept = _is_kept(store)
                if not self._kept and self._policy == "head":
                    _log.warning(
                        "%s ignores If-None-Match: with overwrite=False two ranks at the same instant may overwrite each other",
                        uri,
                    )
            if not self._kept and self._policy == "require":
                raise RejectedByStore(
                    f"{uri} must honour If-None-Match for overwrite=False, got an answer as if it did not. "
                    "Use overwrite=True, or allow looking before putting with create_only=head."
                )
            return self._kept


class Probes(Protocol):
    """What a trial asks of a store."""

    def put_probe(self, name: str) -> None:
        """Puts a small object of this name create-only.

        Raises:
            RemoteExists: There is one.
            NotImplementedError: The server refuses the very request.
        """

    def delete(self, name: str) -> None:
        """Removes an object."""

    def list(self, prefix: str) -> Iterable[RemoteObject]:
        """What there is."""


def _is_kept(store: Probes) -> bool:
    """Puts the same small object twice: the second must be refused.

    A "no" is asked for again: where machines share a name but not their processes, another's sweep may have come between.
    """
    mine = f"{_PROBE}{_host()}-{os.getpid()}-"
    try:
        return any(_is_refused_twice(store, f"{mine}{uuid.uuid4().hex}") for _ in range(_TRIALS))
    finally:
        _sweep(store)


def _is_refused_twice(store: Probes, name: str) -> bool:
    try:
        store.put_probe(name)
        store.put_probe(name)
    except RemoteExists:
        return True
    except NotImplementedError:
        return False
    finally:
        _remove(store, name)
    return False


def _sweep(store: Probes) -> None:
    """Removes what trials left that were killed half-way: those of processes of this host that are gone."""
    start = f"{_PROBE}{_host()}-"
    try:
        names = [found.name for found in store.list(start)]
    except StoreError:  # To list may be forbidden; then a small object stays.
        return
    for name in names:
        pid = name.removeprefix(start).partition("-")[0]
        if pid.isdigit() and not is_alive(int(pid)):
            _remove(store, name)


def _remove(store: Probes, name: str) -> None:
    try:
        store.delete(name)
    except StoreError as error:
        _log.warning("the small object %s could not be removed: %s", name, error)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]+", ".", socket.gethostname())
