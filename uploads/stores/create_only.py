"""Create-only puts: checks whether a server refuses to overwrite, and `put_new`, for agreement of processes.

Some servers accept a create-only put and overwrite anyway. So the first put with `overwrite=False` probes the
store with two puts of one small object, and deletes it again.
"""

import contextlib
import hashlib
import itertools
import random
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from typing import Literal, Protocol, get_args

from uploads.errors import RejectedByStoreError, RemoteExistsError, StoreError
from uploads.messages import log_warning

from .store import Body, Store

__all__ = ["CreateOnlyPolicy", "CreateOnlySupport", "ProbeTarget", "put_new"]

CreateOnlyPolicy = Literal["auto", "require"]

_PREFIX = ".uploads-probe-"
# Pauses between turns, see `put_new`: random, so that two processes do not meet again and again.
_FIRST_TURN_SECONDS = 0.2
_TURN_SECONDS = 5.0
_DEAD_SECONDS = 60.0


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
        policy: If the server doesn't support it, "auto" looks for the object before the put, and warns once
            that two writers at the same instant may both succeed; "require" refuses `overwrite=False`.
        known: The answer, if no probe is needed.
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
        self._probe = f"{_PREFIX}{uuid.uuid4().hex}"  # Kept, so that a probe finds a failed one before it.
        self._lock = threading.Lock()

    def check(self, store: ProbeTarget, name: str = "") -> bool:
        """Returns whether to put create-only. The first call probes.

        If the server doesn't support it and the policy allows that, this checks that the name is free.

        Args:
            store: Where to probe, beside the name.
            name: The name to put; empty to ask only whether the server supports it.

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
        if not self._is_supported and self._policy == "require":
            raise RejectedByStoreError(
                f"{store.uri()} ignores {self._mechanism}, so overwrite=False cannot be guaranteed. "
                "Use overwrite=True, or create_only=auto to check for the object before the put."
            )
        if not self._is_supported and name and store.head(name) is not None:
            raise RemoteExistsError(f"{store.uri(name)} exists")
        return self._is_supported

    def is_supported(self, store: ProbeTarget) -> bool:
        """Returns whether the server supports it, whatever the policy is; the first call probes."""
        try:
            return self.check(store)
        except RejectedByStoreError:
            return False

    def _refuses_second(self, store: ProbeTarget, name: str) -> bool:
        """Returns whether a second put of the same name is refused.

        Raises:
            StoreError: A put was not answered. The next probe has the same name, and so finds a leftover.
        """
        try:
            store.put_probe(name)
            store.put_probe(name)
            is_refused = False
        except RemoteExistsError:
            is_refused = True
        except NotImplementedError:
            return False
        try:
            store.delete(name)
        except StoreError as error:
            log_warning("could not remove probe object %s: %s", store.uri(name), error)
        return is_refused


def put_new(store: Store, name: str, data: bytes, *, wait: Callable[[float], object] = time.sleep) -> bool:
    """Puts bytes under a name unless it is taken; returns whether it did.

    ```python
    store = open_store("store")
    print(put_new(store, "claims/1", b"mine"), put_new(store, "claims/1", b"other"))
    ```

    Processes use it to agree with small objects: if two put at once, one wins, even in a store that
    overwrites. There each process first puts a mark beside the name, and then looks. A process that sees
    another mark removes its own and tries again after a random pause. The mark of a killed process is ignored
    after a minute.

    It doesn't retry if the store fails; for files, use an `UploadQueue`.

    Args:
        store: Where.
        name: The name.
        data: The bytes.
        wait: Sleeps for some seconds.

    Raises:
        StoreError: The store doesn't answer, or refuses.
    """
    if getattr(store, "refuses_overwrite", lambda: True)():
        try:
            _put(store, name, data, overwrite=False)
        except RemoteExistsError:
            return False
        return True
    waited = 0.0
    seen: dict[str, float] = {}
    for turn in itertools.count():
        if store.head(name) is not None:
            return False
        mark = f"{name}.{uuid.uuid4().hex}"
        _put(store, mark, data, overwrite=True)
        others = {one.name for one in store.list(f"{name}.")} - {mark}
        seen = {other: seen.get(other, waited) for other in others}
        is_alone = all(waited - since >= _DEAD_SECONDS for since in seen.values())
        # The other process may have had its turn and removed its mark before this one looked for marks.
        if is_alone := is_alone and store.head(name) is None:
            # If the answer is lost, the mark stays: the server may still execute the put.
            _put(store, name, data, overwrite=True)
        with contextlib.suppress(StoreError):
            store.delete(mark)
        if is_alone:
            break
        pause = random.uniform(0.1, min(_TURN_SECONDS, _FIRST_TURN_SECONDS * 2.0**turn))  # noqa: S311
        wait(pause)
        waited += pause
    return True


def _put(store: Store, name: str, data: bytes, *, overwrite: bool) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with Body(file.name, hashlib.sha256(data).hexdigest()[:16]) as body:
            store.put(name, body, overwrite=overwrite)
