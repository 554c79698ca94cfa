"""Probes whether a server refuses to overwrite: some accept a create-only put, and overwrite all the same.

The probe is made once per store, in the thread of the first put with `overwrite=False`: two puts of one small
object, which is deleted again.
"""

import threading
import uuid
from typing import Literal, Protocol, get_args

from uploads.errors import RejectedByStoreError, RemoteExistsError, StoreError, StoreParkedError
from uploads.messages import log_warning

from .store import Store

__all__ = ["CreateOnlyPolicy", "CreateOnlySupport", "ProbeTarget"]

CreateOnlyPolicy = Literal["auto", "require", "head"]

_PREFIX = ".uploads-probe-"
_TRIES = 3


class ProbeTarget(Store, Protocol):
    """A store that can be probed."""

    def put_probe(self, name: str) -> None:
        """Creates a small object, create-only.

        Raises:
            RemoteExistsError: The name is taken.
            NotImplementedError: The server does not support create-only puts.
        """


class CreateOnlySupport:
    """Whether a store's server supports create-only puts. The lock guards the probe and its result.

    Args:
        policy: "auto" looks for the object before the put where the server does not support it, and warns
            once that of two writers at the same instant both may succeed; "require" refuses
            `overwrite=False` there. "head" is an earlier name of "auto".
        known: The answer, where no probe is needed.
        mechanism: What the server must honour, for messages.
    """

    def __init__(
        self, policy: CreateOnlyPolicy, *, known: bool | None, mechanism: str = "If-None-Match"
    ) -> None:
        if policy not in get_args(CreateOnlyPolicy):
            raise ValueError(f"create_only must be 'auto' or 'require', got {policy!r}")
        self._policy = policy
        self._is_supported = known
        self._mechanism = mechanism
        self._probe = f"{_PREFIX}{uuid.uuid4().hex}"  # One name: a probe that failed is found by the next.
        self._left: dict[str, int] = {}  # Probes that could not be removed, and the tries that are left.
        self._lock = threading.Lock()

    def check(self, store: ProbeTarget, name: str = "") -> bool:
        """Returns whether to put create-only. The first call probes.

        Where the server does not support it, and the policy allows that, looks whether the name is free.

        Args:
            store: Where to probe, beside the name.
            name: What is to be put; empty to ask only whether the server supports it.

        Raises:
            RejectedByStoreError: The server does not support it, and the policy requires it.
            RemoteExistsError: The server does not support it, and the name is taken.
        """
        with self._lock:
            if self._is_supported is None:
                folder = name[: name.rfind("/") + 1]
                self._is_supported = self._refuses_second(store, folder + self._probe)
                if not self._is_supported and self._policy != "require":
                    log_warning(
                        "%s ignores %s, so before each put with overwrite=False the name is looked up: "
                        "two writers at the same instant may overwrite each other",
                        store.uri(),
                        self._mechanism,
                    )
            self._remove_probes(store)
        if not self._is_supported and self._policy == "require":
            raise RejectedByStoreError(
                f"{store.uri()} ignores {self._mechanism}, so overwrite=False cannot be guaranteed. "
                "Use overwrite=True, or create_only=auto to check for the object before the put."
            )
        if not self._is_supported and name and store.head(name) is not None:
            raise RemoteExistsError(f"{store.uri(name)} exists")
        return self._is_supported

    def _refuses_second(self, store: ProbeTarget, name: str) -> bool:
        """Returns whether a second put of the same name is refused.

        Raises:
            StoreError: A put was not answered. The next probe finds what it may have left: its name is the
                same.
        """
        self._left[name] = _TRIES
        try:
            store.put_probe(name)
            store.put_probe(name)
        except RemoteExistsError:
            return True
        except NotImplementedError:
            del self._left[name]
        return False

    def _remove_probes(self, store: ProbeTarget) -> None:
        for name in list(self._left):
            try:
                store.delete(name)
            except StoreError as error:
                self._left[name] -= 1
                is_denied = isinstance(error, StoreParkedError) and error.may_be_the_entry
                if self._left[name] and not is_denied:
                    continue  # At the next put.
                log_warning("could not remove probe object %s: %s", store.uri(name), error)
            del self._left[name]
