"""Notes on disk what became of entries; what could not be noted, for want of disk or descriptors, is noted later."""

from __future__ import annotations

import errno
import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .outcome import Outcome
    from .spool import Spool

__all__ = ["Filing"]

_log = logging.getLogger("uploads")


class Filing:
    """The last step of an entry's life. Every method may be called from any thread; the lock guards what is still to be noted."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._lock = threading.Lock()
        self._unfiled: dict[str, Outcome] = {}
        self._has_complained = False

    def settle(self, folder: str, outcome: Outcome) -> None:
        """`Spool.settle`, which may have to wait for better times.

        Raises:
            FileNotFoundError: The spool was deleted under us.
        """
        try:
            self._spool.settle(folder, outcome)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise
            with self._lock:
                self._unfiled[folder] = outcome
                has_complained, self._has_complained = self._has_complained, True
            if not has_complained:
                _log.warning(
                    "the spool could not note what was delivered (%s); it is tried again", error.strerror
                )

    def catch_up(self) -> None:
        """Notes what could not be noted before."""
        with self._lock:
            unfiled, self._unfiled = self._unfiled, {}
        done = set(self._spool.list_done()) if unfiled else set()
        for folder, outcome in unfiled.items():
            self._settle_late(folder, outcome, is_done=folder in done)

    def _settle_late(self, folder: str, outcome: Outcome, *, is_done: bool) -> None:
        try:
            if is_done:
                self._spool.file_away(folder, outcome)
            else:
                self._spool.settle(folder, outcome)
        except FileNotFoundError:
            pass  # Its folder was deleted.
        except OSError:
            with self._lock:
                self._unfiled[folder] = outcome
