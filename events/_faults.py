"""Keeps the failures of destinations out of the training loop: caught, counted, reported once per kind, parked.

Runs in the training thread. Nothing here is called while all goes well.
"""

import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from typing import ParamSpec

import attrs

from .destination import Destination
from .errors import RecordError
from .redaction import redact_text

__all__ = ["Faults"]

P = ParamSpec("P")

_log = logging.getLogger("events")

FAILURES_BEFORE_PARKING = 10
FIRST_PARKING_SECONDS = 60.0
LONGEST_PARKING_SECONDS = 600.0
# A file and a setting come once; a metric comes again.
_NEVER_MISSED = frozenset({"log_hyperparameters", "upload_file"})


@attrs.define
class _Parking:
    """How long a destination is left alone, and what it missed meanwhile."""

    until: float
    seconds: float
    missed: int = 0


class Faults:
    """What the destinations of one logger did wrong.

    A destination that fails `FAILURES_BEFORE_PARKING` times without a success in between is parked: it is left alone
    for a minute, then tried again, then left alone twice as long, up to ten minutes. What it missed is counted. Files and
    hyperparameters are handed to it all the same.
    """

    def __init__(self, *, raise_errors: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._raise_errors = raise_errors
        self._clock = clock
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._missed: Counter[str] = Counter()
        self._values: Counter[tuple[str, str]] = Counter()
        self._parked: dict[int, _Parking] = {}
        # Failures in a row, by the identity of the destination. Public because the hot path looks whether it is empty.
        self.streaks: Counter[int] = Counter()

    @property
    def counts(self) -> dict[tuple[str, str, str], int]:
        """How often what went wrong: by destination, method and exception."""
        return dict(self._counts)

    @property
    def value_counts(self) -> dict[tuple[str, str], int]:
        """How often what was logged could not be had after all: by its name and exception."""
        return dict(self._values)

    @property
    def raise_errors(self) -> bool:
        """Whether what a destination raises comes out, for tests."""
        return self._raise_errors

    def guard(self, destination: Destination, action: str, hook: Callable[P, object]) -> Callable[P, None]:
        """Returns a hook of a destination with its failures kept here."""

        def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
            if self.streaks and not self.may_call(destination):
                return
            try:
                hook(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  # that is what this class is for
                self.failed(destination, action, error)
            else:
                if self.streaks:
                    self.succeeded(destination)

        return guarded

    def attempt(
        self, destination: Destination, action: str, call: Callable[[Destination], object]
    ) -> RecordError | None:
        """Calls a destination with a record; returns the error where it refused that: it is for the caller to know."""
        if self.streaks and action not in _NEVER_MISSED and not self.may_call(destination):
            return None
        try:
            call(destination)
        except RecordError as error:
            return error
        except Exception as error:  # noqa: BLE001  # as in guard
            self.failed(destination, action, error)
        else:
            if self.streaks:
                self.succeeded(destination)
        return None

    def failed(self, destination: Destination, action: str, error: Exception) -> None:
        """Takes note of a failure, and parks a destination that does nothing but fail.

        Raises:
            Exception: the error itself, where the logger was made with `raise_errors=True`.
        """
        self.note(destination, action, error)
        if self._raise_errors:
            raise error
        key = id(destination)
        self.streaks[key] += 1
        if self.streaks[key] >= FAILURES_BEFORE_PARKING:
            self._park(destination, action, error)

    def note(self, destination: Destination, action: str, error: Exception) -> None:
        """Counts a failure; the first of its kind is reported with its traceback."""
        kind = (type(destination).__name__, action, type(error).__name__)
        self._counts[kind] += 1
        if self._counts[kind] == 1:
            story = "".join(traceback.format_exception(error)).rstrip()
            _log.error("%s.%s failed; training goes on.\n%s", kind[0], action, redact_text(story))

    def succeeded(self, destination: Destination) -> None:
        """Ends a row of failures."""
        self.streaks.pop(id(destination), None)
        parking = self._parked.pop(id(destination), None)
        if parking is not None:
            self._settle(destination, parking)
            _log.warning("%s works again.", type(destination).__name__)

    def may_call(self, destination: Destination) -> bool:
        """Says whether a destination is to be called now; counts what a parked one misses."""
        parking = self._parked.get(id(destination))
        if parking is None or self._clock() >= parking.until:
            return True
        parking.missed += 1
        return False

    def is_parked(self, destination: Destination) -> bool:
        """Says whether a destination is left alone now; counts nothing."""
        parking = self._parked.get(id(destination))
        return parking is not None and self._clock() < parking.until

    def note_value(self, name: str, error: Exception) -> None:
        """Counts a value that could not be had: a function raised, or returned what cannot be logged."""
        kind = (name, type(error).__name__)
        self._values[kind] += 1
        if self._values[kind] == 1:
            story = "".join(traceback.format_exception(error)).rstrip()
            _log.error("value of %r could not be had; the others are logged.\n%s", name, redact_text(story))

    def summary(self, destinations: Iterable[Destination]) -> list[str]:
        """Returns a line per kind of failure, and per destination that missed something."""
        for destination in destinations:
            if parking := self._parked.pop(id(destination), None):
                self._settle(destination, parking)
        lines = [
            f"{name}.{action} raised {error} {count:,} time{'s' if count > 1 else ''}."
            for (name, action, error), count in sorted(self._counts.items())
        ]
        lines += [
            f"value of {name!r} could not be had {count:,} time{'s' if count > 1 else ''}: {error}."
            for (name, error), count in sorted(self._values.items())
        ]
        missed = [
            f"{name} missed {count:,} calls while it was parked."
            for name, count in sorted(self._missed.items())
        ]
        return lines + missed

    def _park(self, destination: Destination, action: str, error: Exception) -> None:
        before = self._parked.get(id(destination))
        seconds = min(before.seconds * 2, LONGEST_PARKING_SECONDS) if before else FIRST_PARKING_SECONDS
        missed = before.missed if before else 0
        self._parked[id(destination)] = _Parking(self._clock() + seconds, seconds, missed)
        if before is None:
            _log.error(
                "%s failed %d times in a row, last in %s with %s: it is left alone for %.0f s, then tried again.",
                type(destination).__name__,
                FAILURES_BEFORE_PARKING,
                action,
                type(error).__name__,
                seconds,
            )

    def _settle(self, destination: Destination, parking: _Parking) -> None:
        if parking.missed:
            self._missed[type(destination).__name__] += parking.missed
