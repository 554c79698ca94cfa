"""Keeps the failures of destinations out of the training loop: caught, counted, reported once per kind, parked.

Runs in the training thread. Nothing here is called while all goes well.
"""

import functools
import logging
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from typing import ParamSpec

import attrs

from events.errors import RecordError
from events.redaction import redact_text

from .destination import Destination

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


def _is_of_program(error: BaseException) -> bool:
    """Says whether an exception is the program's, and only happened to be raised inside a destination.

    That is Ctrl-C, and whatever a signal handler raised, such as the `SystemExit` of `uploads.exit_on_sigterm`.
    """
    if isinstance(error, KeyboardInterrupt):
        return True
    frames = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    handlers = map(signal.getsignal, signal.valid_signals())
    return any(_code_of(handler) in frames for handler in handlers if callable(handler))


def _code_of(handler: Callable[..., object]) -> object:
    """Returns the code of a signal handler; None of one that is not written in Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    code = getattr(handler, "__code__", None)
    return code or getattr(type(handler).__call__, "__code__", None)


class Faults:
    """What the destinations of one logger did wrong.

    Every exception of a destination is kept here, `SystemExit` and other `BaseException`s too. Ctrl-C and what a signal
    handler raises are not a destination's, and reach the caller.

    A destination that fails `FAILURES_BEFORE_PARKING` times without a success in between is parked: it is left alone
    for a minute, then tried again, then left alone twice as long, up to ten minutes. What it missed is counted. Files and
    hyperparameters are handed to it all the same.

    A destination whose `init` failed is not open: nothing but `close` and `post_close` is called any more, and what it
    missed is counted.
    """

    def __init__(self, *, raise_errors: bool, clock: Callable[[], float] = time.monotonic) -> None:
        redact_text("")  # Imports what it needs now, and not in the middle of a failure that may forbid it.
        self._raise_errors = raise_errors
        self._clock = clock
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._missed: Counter[str] = Counter()
        self._values: Counter[tuple[str, str]] = Counter()
        self._parked: dict[int, _Parking] = {}
        self._unopened: Counter[int] = Counter()
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
        """Returns a hook of a destination with its failures kept here.

        A `RecordError` of `init` comes out of the hook: it says what is wrong with how the destination was set up.
        """

        def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
            if self.streaks and not self.may_call(destination):
                return
            try:
                hook(*args, **kwargs)
            except BaseException as error:  # that is what this class is for
                if action == "init" and isinstance(error, RecordError):
                    raise
                self.failed(destination, action, error)
            else:
                if self.streaks:
                    self.succeeded(destination)

        return guarded

    def attempt(
        self, destination: Destination, action: str, call: Callable[[Destination], object]
    ) -> RecordError | None:
        """Calls a destination with a record; returns the error where it refused that: it is for the caller to know."""
        if self.streaks and not self.may_call(destination, action):
            return None
        try:
            call(destination)
        except RecordError as error:
            return error
        except BaseException as error:  # noqa: BLE001  # as in guard
            self.failed(destination, action, error)
        else:
            if self.streaks:
                self.succeeded(destination)
        return None

    def failed(self, destination: Destination, action: str, error: BaseException) -> None:
        """Takes note of a failure, and parks a destination that does nothing but fail.

        Raises:
            BaseException: the error itself, where it is not the destination's, or the logger was made with
                `raise_errors=True`.
        """
        self.note(destination, action, error)
        if self._raise_errors:
            raise error
        key = id(destination)
        self.streaks[key] += 1
        if action == "init":
            self._unopened[key] += 0
            _log.error(
                "%s is not open: what is logged is not written to it, and counted.",
                type(destination).__name__,
            )
        elif self.streaks[key] >= FAILURES_BEFORE_PARKING:
            self._park(destination, action, error)

    def note(self, destination: Destination, action: str, error: BaseException) -> None:
        """Counts a failure; the first of its kind is reported with its traceback.

        Raises:
            BaseException: the error itself, where it is not the destination's.
        """
        self.let_out(error)
        kind = (type(destination).__name__, action, type(error).__name__)
        self._counts[kind] += 1
        if self._counts[kind] == 1:
            story = "".join(traceback.format_exception(error)).rstrip()
            _log.error("%s.%s failed; training goes on.\n%s", kind[0], action, redact_text(story))

    def let_out(self, error: BaseException) -> None:
        """Raises an error that is the program's, and not that of the destination it was raised in."""
        if _is_of_program(error):
            raise error

    def succeeded(self, destination: Destination) -> None:
        """Ends a row of failures."""
        self.streaks.pop(id(destination), None)
        parking = self._parked.pop(id(destination), None)
        if parking is not None:
            self._settle(destination, parking)
            _log.warning("%s works again.", type(destination).__name__)

    def may_call(self, destination: Destination, action: str = "") -> bool:
        """Says whether a destination is to be called now; counts what one misses that is parked, or not open."""
        key = id(destination)
        if key in self._unopened:
            # Events hold nothing that could be lost.
            self._unopened[key] += bool(action)
            return False
        parking = self._parked.get(key)
        if parking is None or action in _NEVER_MISSED or self._clock() >= parking.until:
            return True
        parking.missed += 1
        return False

    def is_parked(self, destination: Destination) -> bool:
        """Says whether a destination is left alone now; counts nothing."""
        if id(destination) in self._unopened:
            return True
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
        unopened = []
        for destination in destinations:
            if count := self._unopened.pop(id(destination), 0):
                unopened.append(
                    f"{type(destination).__name__} lost {count:,} records: it was not open, for init failed."
                )
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
        return [*lines, *missed, *unopened]

    def _park(self, destination: Destination, action: str, error: BaseException) -> None:
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
