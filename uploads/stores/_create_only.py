"""Whether a server keeps the promise of `If-None-Match: *`: tried once, since some accept the header and overwrite all the same."""

from __future__ import annotations

import logging
import threading
import uuid
from typing import TYPE_CHECKING, Literal

from uploads.errors import RejectedByStore, RemoteExists, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CreateOnly", "CreateOnlyPolicy"]

_log = logging.getLogger("uploads")

CreateOnlyPolicy = Literal["require", "head"]


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

    def may_be_asked(self, uri: str, put: Callable[[str], None], delete: Callable[[str], None]) -> bool:
        """Whether to put create-only; False where looking before putting has to do.

        Args:
            uri: The store's, for messages.
            put: Puts a small object of this name create-only; raises RemoteExists where there is one, NotImplementedError
                where the server refuses the very request.
            delete: Removes it.

        Raises:
            RejectedByStore: The server does not keep the promise, and the policy requires it.
        """
        with self._lock:
            if self._kept is None:
                self._kept = _is_kept(put, delete)
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


def _is_kept(put: Callable[[str], None], delete: Callable[[str], None]) -> bool:
    """Puts the same small object twice: the second must be refused."""
    name = f".uploads-probe-{uuid.uuid4().hex}"
    try:
        put(name)
        put(name)
    except RemoteExists:
        return True
    except NotImplementedError:
        return False
    finally:
        try:
            delete(name)
        except StoreError as error:
            _log.warning("the small object %s could not be removed: %s", name, error)
    return False
