"""`Engine`: calls the callbacks at each event, in order, and closes each of them exactly once.

Everything runs in the calling thread, which is the training thread. An engine that was not closed is closed
when it is garbage-collected or at interpreter exit.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from .callback import Callback
from .errors import CallbackInUseError, EngineClosedError
from .event import Event
from .redaction import error_trace
from .state import RunStatus, State

if TYPE_CHECKING:
    from .logger.logger import Logger

__all__ = ["Engine", "ExitCode"]

_log = logging.getLogger("events")

Hook = Callable[[State, "Logger"], None]

# The callbacks of all open engines of this process, by identity: a callback belongs to one engine at a time.
_open_callbacks: dict[int, Callback] = {}


class ExitCode(IntEnum):
    """The exit codes of processes that a signal ended."""

    SIGINT = 128 + 2
    SIGTERM = 128 + 15


class Engine:
    """Runs the events of one run.

    ```python
    state = State(run_name="mine")
    logger = Logger(state, destinations=[InMemory()])
    engine = Engine(state, logger)
    engine.run_event(Event.INIT)
    logger.log_metrics({"loss": 0.5})
    engine.close()
    ```

    **Order.** At `INIT`, destinations come before callbacks, so that records from a callback's `init` arrive.
    At every other event, callbacks come before destinations, so that their records are there when a
    destination flushes. Among destinations, those that upload files come first at `INIT` and last otherwise.
    Each group keeps the order of its list.

    **Errors.** An exception of a callback propagates, and later callbacks are not called. Exceptions of
    destinations are recorded by the logger, and all other callbacks are called. Two kinds propagate from a
    destination: a `RecordError` of `init`, and Ctrl-C or an exception from a signal handler.

    **Close.** Calls each `close`, callbacks first, then destinations, uploaders last; then each `post_close`
    in the same order. Each is called once, even after errors, and `post_close` even if `close` raised. An
    engine that was not closed is closed when it is garbage-collected, or at interpreter exit. A forked child
    closes nothing.

    Args:
        state: the state of the run.
        logger: where callbacks log; its destinations are callbacks of this engine too.
        callbacks: the callbacks that are not destinations. Default: those in a list `state.callbacks`,
            where code for Composer's engine puts them.

    Raises:
        CallbackInUseError: a callback is given twice, or belongs to another open engine.
        TypeError: an argument is not a callback.
    """

    def __init__(self, state: State, logger: Logger, callbacks: Iterable[Callback] | None = None) -> None:
        if callbacks is None:
            # A tuple is what an earlier engine of this state left there.
            given = state.callbacks if isinstance(state.callbacks, list) else ()
            callbacks = [one for one in given if not _holds(logger.destinations, one)]
        callbacks = tuple(callbacks)
        for callback in (*callbacks, *logger.destinations):
            _require_callback(callback)
        ledger = _ledger_of(callbacks)
        uploads = [(one, one.can_upload_files()) for one in logger.destinations]
        uploaders = tuple(one for one, does_upload in uploads if does_upload)
        others = tuple(one for one, does_upload in uploads if not does_upload)
        ordered: tuple[Any, ...] = (*callbacks, *others, *uploaders)
        at_init = (*uploaders, *others, *callbacks)
        self._state = state
        self._logger = logger
        hooks = {
            event: (
                _hooks_of(event, logger, at_init)
                if event is Event.INIT
                else (
                    *_hooks_of(event, logger, callbacks),
                    *((None, hook) for hook in _DELIVERIES.get(event, ())),
                    *_hooks_of(event, logger, (*others, *uploaders)),
                )
            )
            for event in Event
        }
        self._hooks: dict[str, tuple[Hook, ...]]
        if ledger is None:
            self._hooks = {event: tuple(hook for _, hook in found) for event, found in hooks.items()}
        else:
            self._hooks = ledger.follow(hooks, logger.destinations)
        # The last step that may fail: a failed constructor must claim nothing.
        _claim(ordered)
        state.callbacks = ordered
        if ledger is not None:
            logger.charge_time(ledger)
        # Refers to what closing needs, not to the engine itself, which can therefore be garbage-collected.
        self._finalizer = weakref.finalize(
            self, _close_unclosed, state, logger, ordered, os.getpid(), id(_uncaught_exception())
        )

    @property
    def is_closed(self) -> bool:
        """Whether the engine was closed."""
        return not self._finalizer.alive

    def run_event(self, event: Event | str) -> None:
        """Calls the callbacks that override the hook of an event.

        Args:
            event: an event, or its name.

        Raises:
            UnknownEventError: there is no event of that name.
            EngineClosedError: the engine was closed.
        """
        # An Event equals and hashes like the str of its value.
        hooks = self._hooks.get(event)
        if hooks is None:
            hooks = self._hooks_of_name(event)
        if self._logger.is_busy:
            self._logger.poll()
        for callback in self._logger.attached:
            callback.run_event(Event(event), self._state, self._logger)
        for hook in hooks:
            hook(self._state, self._logger)

    def _hooks_of_name(self, event: str) -> tuple[Hook, ...]:
        resolved = Event(event)
        if self.is_closed:
            raise EngineClosedError(
                f"event {resolved.value!r} must be run before close. "
                "Make a new Trainer or Run; it may take the same callbacks."
            )
        return self._hooks[resolved]

    def close(self, exception: BaseException | None = None) -> None:
        """Closes every callback; a second call, or a call in a forked child, does nothing.

        If a callback's `close` raises, the others are still closed, and every `post_close` is called to
        release files and threads.

        Args:
            exception: the exception that ended the run, if any; it determines the status that callbacks see.

        Raises:
            Exception: the first exception of a callback (with the logger's `raise_errors=True`, also of a
                destination), after all are closed; if `exception` is given, it is only reported, so as not to
                hide that one.
            BaseException: a Ctrl-C during close, after all are closed.
        """
        pending = self._finalizer.detach()
        if pending is None:
            return
        self._hooks = {}
        _, _, (state, logger, callbacks, owner_pid, _), _ = pending
        if os.getpid() != owner_pid:
            return
        _set_status(state, exception)
        raised = _close_all(state, logger, callbacks)
        if raised is not None and (exception is None or not isinstance(raised, Exception)):
            raise raised


# Pending records are delivered at these events, after the callbacks that log them and before the
# destinations.
_DELIVERIES: dict[Event, tuple[Hook, ...]] = dict.fromkeys(
    (Event.EVAL_END, Event.EVAL_STANDALONE_END, Event.PREDICT_END),
    (lambda _, logger: logger.wait_for_copies(),),
) | {Event.FIT_END: (lambda _, logger: logger.deliver_pending(),)}


def _require_callback(callback: Any) -> None:
    if not isinstance(callback, Callback):
        hint = f" Write {callback.__name__}(...)." if isinstance(callback, type) else ""
        raise TypeError(f"callback must be a Callback, got {callback!r}.{hint}")
    for event in Event:
        # The names of other frameworks: a hook that is never called is easily taken for one that is.
        for name in (f"on_{event.value}", f"on_train_{event.value}"):
            if hasattr(callback, name) and _overridden_hook(callback, event) is None:
                _log.warning(
                    "%s.%s is never called; did you mean %s?", type(callback).__name__, name, event.value
                )


def _claim(callbacks: tuple[Any, ...]) -> None:
    """Marks all callbacks as open, or none if one is in use."""
    for index, callback in enumerate(callbacks):
        name = type(callback).__name__
        if _holds(callbacks[:index], callback):
            raise CallbackInUseError(
                f"callback must be given once, got the same {name} twice. Remove one of them."
            )
        if id(callback) in _open_callbacks:
            raise CallbackInUseError(
                f"callback must be closed before another engine takes it, got a {name} that is still open. "
                "Call close() on the Trainer or Run that has it, or make a new one."
            )
    _open_callbacks.update((id(callback), callback) for callback in callbacks)


def _holds(callbacks: Iterable[object], callback: object) -> bool:
    """Returns whether the object itself is among the callbacks; `in` would call its `__eq__`."""
    return any(callback is one for one in callbacks)


def _ledger_of(callbacks: Iterable[Any]) -> Any:
    """Returns the callback that charges time to buckets, `TimeLedger`, or None."""
    return next((one for one in callbacks if hasattr(one, "charge_metrics")), None)


def _hooks_of(event: Event, logger: Logger, callbacks: tuple[Any, ...]) -> list[tuple[Any, Hook]]:
    """Returns the callbacks that override the hook of an event, each with the hook."""
    hooks = []
    for callback in callbacks:
        hook = _overridden_hook(callback, event)
        if hook is not None:
            if _holds(logger.destinations, callback):
                hook = logger.faults.guard(callback, event.value, hook)
            hooks.append((callback, hook))
    return hooks


def _overridden_hook(callback: Callback, event: Event) -> Hook | None:
    """Returns the hook of an event, or None if the callback does not override it."""
    if getattr(callback.run_event, "__func__", None) is not Callback.run_event:
        return functools.partial(callback.run_event, event)
    hook: Hook = getattr(callback, event.value)
    return None if getattr(hook, "__func__", None) is getattr(Callback, event.value) else hook


def _status_after(exception: BaseException | None) -> RunStatus:
    """Returns the status of a run that ended with this exception, or without one."""
    match exception:
        case None | SystemExit(code=None | 0):
            return RunStatus.COMPLETED
        case KeyboardInterrupt() | SystemExit(code=ExitCode.SIGINT):
            return RunStatus.INTERRUPTED
        case SystemExit(code=ExitCode.SIGTERM):
            return RunStatus.PREEMPTED
    # Of optuna, which need not be installed.
    is_pruned = any(kind.__name__ == "TrialPruned" for kind in type(exception).__mro__)
    return RunStatus.STOPPED if is_pruned else RunStatus.FAILED


def _set_status(state: State, exception: BaseException | None) -> None:
    if state.status is RunStatus.RUNNING:
        state.status = _status_after(exception)
        state.exception = exception
        if state.status is RunStatus.STOPPED and state.stop_reason is None:
            state.stop_reason = f"pruned: {exception}"


def _close_all(state: State, logger: Logger, callbacks: tuple[Any, ...]) -> BaseException | None:
    """Closes the callbacks in two phases; returns the exception to raise afterwards."""
    raised: list[BaseException] = []
    destinations = [callback for callback in callbacks if _holds(logger.destinations, callback)]
    others = [callback for callback in callbacks if not _holds(logger.destinations, callback)]
    attached, logger.attached = logger.attached, ()
    # Those that print a summary of the run do so when the others have finished; a ledger counts all of it.
    ledger = _ledger_of(others)
    ordered = sorted(
        (*attached, *others, *destinations),
        key=lambda callback: (
            callback is ledger,
            getattr(type(callback), "summary_priority", None) is not None,
        ),
    )

    def attempt(callback: Any, action: str, *arguments: Any) -> None:
        try:
            getattr(callback, action)(*arguments)
        except BaseException as error:  # the others must still be closed
            if _holds(destinations, callback):
                logger.faults.note(callback, action, error)
                if logger.faults.raise_errors:
                    raise
                return
            if isinstance(error, Exception):
                _log.error(
                    "%s.%s failed; the other callbacks are closed all the same.\n%s",
                    type(callback).__name__,
                    action,
                    error_trace(error),
                )
            raise

    deliver_pending = functools.partial(logger.deliver_pending, is_last=True)
    steps: list[Callable[[], object]] = [
        *(functools.partial(attempt, callback, "close", state, logger) for callback in (*attached, *others)),
        # What callbacks logged last, and what waits for a write rate.
        deliver_pending,
        *(functools.partial(attempt, callback, "close", state, logger) for callback in destinations),
        deliver_pending,
        logger.stop,
        *(functools.partial(attempt, callback, "post_close") for callback in ordered),
        *(functools.partial(_open_callbacks.pop, id(callback), None) for callback in callbacks),
        logger.report_faults,
    ]
    # Ctrl-C interrupts one step; the next ones still run.
    while steps:
        try:
            while steps:
                steps.pop(0)()
        except BaseException as error:  # noqa: BLE001  # raised after all are closed
            raised.append(error)
    interrupts = [error for error in raised if not isinstance(error, Exception)]
    return next(iter(interrupts or raised), None)


def _uncaught_exception() -> BaseException | None:
    """Returns the uncaught exception that ended the program or an interactive cell, if any."""
    return getattr(sys, "last_value", None)


def _close_unclosed(
    state: State, logger: Logger, callbacks: tuple[Any, ...], owner_pid: int, uncaught_before: int
) -> None:
    """Closes an engine that was garbage-collected, or is still open at interpreter exit."""
    if os.getpid() != owner_pid:
        return
    uncaught = _uncaught_exception()
    _set_status(state, None if id(uncaught) == uncaught_before else uncaught)
    if threading.current_thread().daemon:
        # The garbage collector runs in any thread: this one may be a destination's, which close waits for.
        closing = functools.partial(_close_all, state, logger, callbacks)
        threading.Thread(target=closing, name=f"close-{state.run_name}", daemon=False).start()
        return
    _close_all(state, logger, callbacks)
