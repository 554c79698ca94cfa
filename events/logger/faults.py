"""Isolates failures of destinations from the training loop: caught, counted, reported once per kind.

Training thread only. Costs nothing while no destination fails.
"""

import functools
import logging
import math
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from typing import ParamSpec

import attrs

from events.errors import RecordError
from events.redaction import error_text, error_trace, redact_text

from .converters import safe_text
from .destination import Destination
from .records import RECORD_KINDS

__all__ = ["Faults", "caller"]

P = ParamSpec("P")

_log = logging.getLogger("events")

FAILURES_BEFORE_PARKING = 10
FIRST_PARKING_SECONDS = 60.0
MAX_PARKING_SECONDS = 600.0
# More kinds of invalid values than this are counted together: names may contain the step.
_MAX_VALUE_KINDS = 1000
_OWN_PACKAGES = {"events", "destinations", "torch"}
_REACHES_PARKED = frozenset(action for action, kind in RECORD_KINDS.items() if kind.reaches_parked)


@attrs.define
class _Failing:
    """A destination whose last call failed."""

    in_a_row: int = 0
    # Not called before; 0 seconds: it was never parked.
    parked_until: float = -math.inf
    parked_seconds: float = 0.0
    # Why it is not open; None if it is.
    open_error: str | None = None
    lost_records: int = 0

    def is_called_at(self, now: float) -> bool:
        """Returns whether the destination is open, and not parked."""
        return self.open_error is None and now >= self.parked_until


def _is_from_program(error: BaseException) -> bool:
    """Returns whether an exception was raised in a destination, but not by it.

    That is Ctrl-C, and what a signal handler raised, such as the `SystemExit` of `uploads.exit_on_sigterm`.
    """
    if isinstance(error, KeyboardInterrupt):
        return True
    frames = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    handlers = map(signal.getsignal, signal.valid_signals())
    return any(_code_of(handler) in frames for handler in handlers if callable(handler))


def _explains_itself(error: BaseException) -> bool:
    """Returns whether the message says all: which file or store cannot be used, and why."""
    from uploads import UploadError

    return isinstance(error, OSError | UploadError)


def _code_of(handler: Callable[..., object]) -> object:
    """Returns the code object of a signal handler; None if it is not written in Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    code = getattr(handler, "__code__", None)
    return code or getattr(type(handler).__call__, "__code__", None)


def caller() -> str:
    """Returns file and line of the code that called this project, such as "train.py:12"."""
    frame = sys._getframe(1)  # noqa: SLF001  # `inspect.stack` reads the source of every frame
    while (
        frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _OWN_PACKAGES
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Faults:
    """Catches and counts the failures of one logger's destinations, and the values that cannot be logged.

    An invalid value is dropped: it is counted and reported once with the line that logged it, and the rest of
    its call reaches the destinations. With `strict` it is also raised, at the end of the call.

    Every exception of a destination is caught, including `SystemExit` and other `BaseException`s. Ctrl-C and
    exceptions from signal handlers propagate.

    A destination that fails `FAILURES_BEFORE_PARKING` times in a row is parked: it is not called for a
    minute, then retried, then parked twice as long, up to ten minutes. Missed calls are counted. Files
    and hyperparameters are still delivered.

    A destination whose `init` failed is not open: only `close` and `post_close` are called, and missed
    records are counted. The same applies if it sets `cannot_open` before it raises from a later hook.
    """

    def __init__(
        self, *, raise_errors: bool, strict: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        redact_text("")  # Imports `uploads` now: during a failure it may be impossible.
        self._raise_errors = raise_errors
        self._strict = strict
        self._refused: list[Exception] = []
        self._clock = clock
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._missed: Counter[str] = Counter()
        self._values: Counter[tuple[str, str]] = Counter()
        # By the identity of the destination. Public because the hot path checks whether it is empty.
        self.failing: dict[int, _Failing] = {}

    @property
    def counts(self) -> dict[tuple[str, str, str], int]:
        """The number of failures by destination, method and exception."""
        return dict(self._counts)

    @property
    def value_counts(self) -> dict[tuple[str, str], int]:
        """The number of values that could not be logged, by name and exception."""
        return dict(self._values)

    @property
    def raise_errors(self) -> bool:
        """Whether exceptions of destinations propagate, for tests."""
        return self._raise_errors

    def guard(self, destination: Destination, action: str, hook: Callable[P, object]) -> Callable[P, None]:
        """Returns a hook of a destination with its failures caught.

        An exception of `init` propagates if it is a `RecordError`, because the destination was set up
        wrongly, or if the run requires the destination. So does a `RecordError` of a later hook that fails to
        open it.
        """

        def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
            if self.failing and not self.may_call(destination):
                return
            try:
                hook(*args, **kwargs)
            except BaseException as error:  # the purpose of this class
                is_required = getattr(destination, "require", False)
                is_set_up_wrongly = isinstance(error, RecordError) and (
                    action == "init" or getattr(destination, "cannot_open", False)
                )
                if is_set_up_wrongly or (action == "init" and is_required):
                    raise
                self.failed(destination, action, error)
            else:
                self.succeeded(destination)

        return guarded

    def attempt(self, destination: Destination, action: str, call: Callable[[Destination], object]) -> None:
        """Calls a destination with a record; a `RecordError` is an invalid value, and no failure."""
        if self.failing and not self.may_call(destination, action):
            return
        try:
            call(destination)
        except RecordError as error:
            self.refuse(f"{type(destination).__name__}.{action}", error, raises=self._raise_errors)
        except BaseException as error:  # noqa: BLE001  # as in guard
            self.failed(destination, action, error)
        else:
            self.succeeded(destination)

    def failed(self, destination: Destination, action: str, error: BaseException) -> None:
        """Counts a failure, and parks a destination that keeps failing.

        Raises:
            BaseException: the error itself, if it is not the destination's or with `raise_errors=True`.
        """
        is_not_open = action == "init" or getattr(destination, "cannot_open", False)
        self.note(destination, action, error, is_reported=not (is_not_open and _explains_itself(error)))
        if self._raise_errors:
            raise error
        failing = self.failing.setdefault(id(destination), _Failing())
        failing.in_a_row += 1
        name = type(destination).__name__
        if is_not_open:
            failing.open_error = error_text(error)
            if action != "init":
                # What it had accepted until it was to be opened.
                failing.lost_records += getattr(destination, "dropped_records", 0)
            _log.error(
                "%s is not open: records for it are lost, and counted (%s). "
                "Set require=True to stop instead.",
                name,
                failing.open_error,
            )
        elif failing.in_a_row >= FAILURES_BEFORE_PARKING:
            if not failing.parked_seconds:
                _log.error(
                    "%s failed %d times in a row, last in %s with %s: it is parked for %.0f s, then retried.",
                    name,
                    FAILURES_BEFORE_PARKING,
                    action,
                    type(error).__name__,
                    FIRST_PARKING_SECONDS,
                )
            doubled = failing.parked_seconds * 2 or FIRST_PARKING_SECONDS
            failing.parked_seconds = min(doubled, MAX_PARKING_SECONDS)
            failing.parked_until = self._clock() + failing.parked_seconds

    def note(
        self, destination: Destination, action: str, error: BaseException, *, is_reported: bool = True
    ) -> None:
        """Counts a failure; the first of its kind is reported with its traceback, if `is_reported`.

        Without one where a file or store fails at the end: the message says all there is to know.

        Raises:
            BaseException: the error itself, if it is not the destination's.
        """
        self.raise_if_foreign(error)
        kind = (type(destination).__name__, action, type(error).__name__)
        self._counts[kind] += 1
        if self._counts[kind] == 1 and is_reported:
            is_brief = action in {"close", "post_close"} and _explains_itself(error)
            text = error_text(error) if is_brief else error_trace(error)
            _log.error("%s.%s failed; training continues.\n%s", kind[0], action, text)

    def raise_if_foreign(self, error: BaseException) -> None:
        """Raises an error that is not the destination's: Ctrl-C, or one of a signal handler."""
        if _is_from_program(error):
            raise error

    def succeeded(self, destination: Destination) -> None:
        """Resets the count of consecutive failures."""
        failing = self.failing.pop(id(destination), None)
        if failing is not None and failing.parked_seconds:
            _log.warning("%s works again.", type(destination).__name__)

    def may_call(self, destination: Destination, action: str = "") -> bool:
        """Returns whether a destination may be called now; if not, counts the missed call."""
        failing = self.failing.get(id(destination))
        if failing is None or failing.is_called_at(self._clock()):
            return True
        if failing.open_error is not None:
            # Events carry no data that could be lost.
            failing.lost_records += bool(action)
            return False
        if action in _REACHES_PARKED:
            return True
        self._missed[type(destination).__name__] += 1
        return False

    def is_parked(self, destination: Destination) -> bool:
        """Returns whether a destination is parked or not open; counts nothing."""
        failing = self.failing.get(id(destination))
        return failing is not None and not failing.is_called_at(self._clock())

    def refuse(
        self, name: str, error: Exception, *, raises: bool = False, outcome: str = "It is not logged"
    ) -> None:
        """Counts an invalid value of the call in progress; the first of a name is reported with its line.

        Args:
            name: the name of the value.
            error: what is wrong with it.
            raises: whether `raise_refused` raises it also without `strict`.
            outcome: what became of it, for the report.
        """
        if self._strict or raises:
            self._refused.append(error)
        if self._is_first(name, error):
            _log.error(
                "%s: %s %s; training continues. More of the same are only counted.",
                caller(),
                redact_text(safe_text(error)),
                outcome,
            )

    def raise_refused(self) -> None:
        """Raises what was refused since the last call, with `strict`; does nothing otherwise."""
        if self._refused:
            errors, self._refused = self._refused, []
            raise errors[0] if len(errors) == 1 else RecordError(" ".join(map(safe_text, errors)))

    def count_bad_value(self, name: str, error: Exception) -> None:
        """Counts a function whose value could not be logged: it raised, or returned no valid value."""
        if self._strict:
            self._refused.append(error)
        if self._is_first(name, error):
            _log.error("could not evaluate %r; the other values are logged.\n%s", name, error_trace(error))

    def _is_first(self, name: str, error: Exception) -> bool:
        kind = (name, type(error).__name__)
        if kind not in self._values and len(self._values) >= _MAX_VALUE_KINDS:
            kind = ("other names", "errors")
        self._values[kind] += 1
        return self._values[kind] == 1

    def summary(self, destinations: Iterable[Destination]) -> list[str]:
        """Returns a line per kind of failure, and per destination that missed records."""
        lines = [
            f"{name}.{action} raised {error} {count:,} time{'s' if count > 1 else ''}."
            for (name, action, error), count in sorted(self._counts.items())
        ]
        lines += [
            f"{name!r} could not be logged {count:,} time{'s' if count > 1 else ''}: {error}."
            for (name, error), count in sorted(self._values.items())
        ]
        missed = [
            f"{name} missed {count:,} calls while it was parked."
            for name, count in sorted(self._missed.items())
        ]
        unopened = [
            f"{type(one).__name__} lost {failing.lost_records:,} record{'s' * (failing.lost_records != 1)}: "
            f"it was not open, {failing.open_error}"
            for one in destinations
            if (failing := self.failing.get(id(one))) is not None and failing.open_error is not None
        ]
        return [*lines, *missed, *unopened]
