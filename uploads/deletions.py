"""Deletes objects from a store in the background, once their replacements are there.

Deletions are not on disk: a killed process leaves objects that should have been deleted, but never deletes
too many. You may request a deletion again, because an object that is gone is no error.
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence

import attrs

from .download import POINTER_SUFFIX, read_pointer
from .drain.retry import RetryPolicy
from .errors import TransientStoreError
from .handle import FolderHandle, UploadHandle, UploadState
from .messages import log_warning
from .redaction import redact
from .stores import Store

__all__ = ["Deletions"]

_MAX_WAITING = 1000
_MAX_LISTED = 100_000
_MAX_POINTERS = 100
_LOOK_SECONDS = 0.2
_TRIES = 6


@attrs.define(eq=False)
class _Request:
    """An object to delete, objects to delete after it, and uploads that must be delivered before."""

    name: str
    after: tuple[UploadHandle | FolderHandle, ...]
    then: tuple[str, ...] = ()
    may_have_pointer: bool = True
    deleted: int = 0
    failures: int = 0
    not_before: float = 0.0


@attrs.define(eq=False, slots=False, repr=False)
class Deletions:
    """Deletes objects one after the other in a thread, which starts with the first request.

    The condition guards the requests. An object stays if a pointer beside it leads to it, or if an upload
    that it waits for fails; the log says so.

    Args:
        store: Where.
        is_pending: Returns whether an upload of a name has not ended and would come after the deletion.
        withdraw: Withdraws uploads of a name that haven't begun.
        policy: The delays between tries.
        unless: The name of an object that stops all deletions once it exists. Empty for none.
    """

    _store: Store
    _is_pending: Callable[[str], bool]
    _withdraw: Callable[[str], int]
    _policy: RetryPolicy
    _unless: str = ""

    def __attrs_post_init__(self) -> None:
        self._changed = threading.Condition()
        self._requests: list[_Request] = []
        self._thread: threading.Thread | None = None
        self._has_ended = False

    def add(
        self,
        name: str,
        after: Sequence[UploadHandle | FolderHandle],
        then: Sequence[str] = (),
        *,
        may_have_pointer: bool = True,
    ) -> None:
        """Adds an object, and objects to delete after it; returns at once. Any thread.

        Deletions that wait for an upload of this object wait for its dependencies instead, because the upload
        may be withdrawn.
        """
        given = tuple(after)
        replaced = {name, *then, *(one.remote_name for one in given)}
        with self._changed:
            for one in self._requests:
                left = tuple(
                    each
                    for each in one.after
                    if each.remote_name not in replaced or each.state is UploadState.DONE
                )
                if len(left) < len(one.after):
                    one.after = tuple(dict.fromkeys((*left, *given)))
            if self._has_ended or any(one.name == name for one in self._requests):
                return
            if len(self._requests) >= _MAX_WAITING:
                log_warning("%s is not deleted: too many deletions wait", name)
                return
            self._requests.append(_Request(name, given, tuple(then), may_have_pointer))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="uploads-deletions", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, timeout_seconds: float) -> bool:
        """Blocks until nothing is left to delete, or for the timeout; returns whether all is deleted."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._requests, timeout_seconds)

    def stop(self, timeout_seconds: float) -> None:
        """Ends the thread; the remaining objects are not deleted."""
        with self._changed:
            self._has_ended = True
            left = len(self._requests)
            self._changed.notify_all()
        if left:
            log_warning("%d objects that were to be deleted stay in %s", left, self._store.uri())
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_ended or self._requests)
                requests = list(self._requests)
            for request in requests:
                if self._has_ended:
                    return
                for name in filter(self._is_pending, (request.name, *request.then)):
                    self._withdraw(name)
                if self._is_settled(request):
                    with self._changed:
                        self._requests.remove(request)
                        self._changed.notify_all()
            with self._changed:
                # Nobody tells this thread when an upload ends.
                self._changed.wait_for(lambda: self._has_ended, _LOOK_SECONDS if self._requests else 0.0)
                if self._has_ended:
                    return

    def _is_settled(self, request: _Request) -> bool:
        """Deletes an object if it is due; returns whether the request is done."""
        after = [one for given in request.after for one in given.handles]
        if time.monotonic() < request.not_before or not all(one.done() for one in after):
            return False
        waited_for = (request.name, *request.then, *(one.remote_name for one in after))
        if any(self._is_pending(name) for name in waited_for):
            return False
        if failed := next((one for one in after if _is_missing(one)), None):
            _report_missing(request, failed)
            return True
        try:
            may_stay = request.may_have_pointer and not request.deleted
            if may_stay and (pointer := self._pointer_to(request)):
                log_warning("%s is not deleted: %s leads to it", request.name, pointer)
                return True
            return self._has_deleted(request)
        except TransientStoreError as error:
            request.failures += 1
            if request.failures < _TRIES:
                delay = self._policy.delay_seconds(request.failures, error.retry_after_seconds)
                request.not_before = time.monotonic() + delay
                return False
            self._report(request, error)
        except Exception as error:  # noqa: BLE001  # one object that stays; the others are deleted
            self._report(request, error)
        return True

    def _has_deleted(self, request: _Request) -> bool:
        """Deletes the remaining objects of a request, unless a successor came; False if the queue ends."""
        for name in (request.name, *request.then)[request.deleted :]:
            if self._has_ended:
                return False
            if self._unless and self._store.head(self._unless) is not None:
                log_warning("%s is not deleted: a successor put %s", name, self._store.uri(self._unless))
                return True
            self._store.delete(name)
            request.deleted += 1
            request.failures = 0
        return True

    def _report(self, request: _Request, error: Exception) -> None:
        uri = self._store.uri((request.name, *request.then)[request.deleted])
        log_warning("cannot delete %s: %s", uri, redact(str(error)))

    def _pointer_to(self, request: _Request) -> str | None:
        """Returns a pointer beside an object that contains the last part of its name, or None.

        An object that stands for others is in a folder; a pointer beside that folder names both.
        """
        folder, slash, leaf = request.name.rpartition("/")
        if request.then and slash:
            folder, slash, inner = folder.rpartition("/")
            leaf = f"{inner}/{leaf}"
        listed = itertools.islice(self._store.list(folder + slash), _MAX_LISTED)
        pointers = [one.name for one in listed if one.name.endswith(POINTER_SUFFIX)]
        for pointer in pointers[:_MAX_POINTERS]:
            if f"/{read_pointer(self._store, pointer)}".endswith(f"/{leaf}"):
                return pointer
        return None


def _report_missing(request: _Request, upload: UploadHandle | FolderHandle) -> None:
    """Logs that an object stays, unless its own upload is missing, which was logged before."""
    if upload.remote_name != request.name:
        log_warning("%s is not deleted: %s is not in the store", request.name, upload.remote_name)


def _is_missing(upload: UploadHandle | FolderHandle) -> bool:
    return upload.state.is_failure or upload.state is UploadState.WITHDRAWN
