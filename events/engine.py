"""Calls every callback at every event, in order, and closes them all, once, whatever happened.

Everything here runs in the thread that calls it, which is the training thread; only the close of an engine that nobody
closed runs where the interpreter ends, or where the engine was forgotten.
"""

import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from .callback import Callback
from .errors import CallbackInUseError, EngineClosedError
from .event import Event
from .state import RunStatus, State

if TYPE_CHECKING:
    from .logger.logger import Logger

__all__ = ["Engine"]

_log = logging.getLogger("events")

Hook = Callable[[State, "Logger"], None]

# Every callback that an engine of this process holds open, by identity. An entry lives from the making of an engine to
# its close; it is what allows to say "still open", which neither engine could know alone.
_open_callbacks: dict[int, Callback] = {}

# What a shell reports for a program that a signal ended, and what programs exit with that caught the signal.
_SIGINT_EXIT_CODE = 128 + 2
_SIGTERM_EXIT_CODE = 128 + 15


class Engine:
    """Runs the events of one run.

    **Order.** `INIT` reaches destinations first, then callbacks: who logs in `init` is heard. Every other event reaches
    callbacks first, then destinations: what a callback logs is there when a destination flushes. Among destinations,
    those that upload files come first at `INIT` and last otherwise. Within these groups the order is that of the lists.

    **Errors.** What a callback raises goes to the caller, and later callbacks do not hear of the event. What a
    destination raises is kept by the logger, and everybody else hears of the event. Two things come out of a destination:
    a `RecordError` of `init`, and Ctrl-C or what a signal handler raised.

    **Close.** Each `close`, callbacks first, then destinations, those that upload last; then each `post_close` in the
    same order. Both come once, also where something raised, and `post_close` also where `close` raised. An engine that nobody closed is closed when nobody holds
    it any more, or when the interpreter ends. A forked child closes nothing.

    Args:
        state: the run.
        logger: where callbacks log; its destinations are callbacks of this engine too.
        callbacks: the callbacks that are no destinations.

    Raises:
        CallbackInUseError: a callback is given twice, or another engine has not closed it yet.
        TypeError: something given is no callback.
    """

    def __init__(self, state: State, logger: "Logger", callbacks: Iterable[Callback] = ()) -> None:
        callbacks = tuple(callbacks)
        for callback in (*callbacks, *logger.destinations):
            _require_callback(callback)
        uploaders = tuple(
            destination for destination in logger.destinations if destination.can_upload_files()
        )
        others = tuple(
            destination for destination in logger.destinations if not _holds(uploaders, destination)
        )
        ordered: tuple[Any, ...] = (*callbacks, *others, *uploaders)
        at_init = (*uploaders, *others, *callbacks)
        self._state = state
        self._logger = logger
        self._hooks: dict[str, tuple[Hook, ...]] = {
            event: (
                _hooks_of(event, logger, at_init)
                if event is Event.INIT
                else (
                    *_hooks_of(event, logger, callbacks),
                    *_SETTLE.get(event, ()),
                    *_hooks_of(event, logger, (*others, *uploaders)),
                )
            )
            for event in Event
        }
        # Last of what may fail: who could not make an engine has claimed nothing.
        _claim(ordered)
        state.callbacks = ordered
        # Holds what closing needs, and not the engine: this is the one thing outside that refers to the run, whether it
        # ends by `close`, by being forgotten, or with the interpreter.
        self._finalizer = weakref.finalize(
            self, _close_forgotten, state, logger, ordered, os.getpid(), id(_uncaught_exception())
        )

    @property
    def is_closed(self) -> bool:
        """Whether the engine refuses events."""
        return not self._finalizer.alive

    def run_event(self, event: Event | str) -> None:
        """Calls the callbacks that listen to an event.

        Args:
            event: an event, or its name.

        Raises:
            UnknownEventError: there is no event of that name.
            EngineClosedError: the engine was closed.
        """
        # An Event is a str of its value, and hashes like one, so that both find their hooks here.
        hooks = self._hooks.get(event)
        if hooks is None:
            hooks = self._hooks_of_name(event)
        if self._logger.is_busy:
            self._logger.poll()
        for callback in self._logger.attached:
            callback.run_event(event if isinstance(event, Event) else Event(event), self._state, self._logger)
        for hook in hooks:
            hook(self._state, self._logger)

    def _hooks_of_name(self, event: str) -> tuple[Hook, ...]:
        resolved = Event(event)
        if self.is_closed:
            raise EngineClosedError(
                f"event {resolved.value!r} must be run before close, got it after. "
                "Make a new Trainer or Run; its callbacks may be these ones again."
            )
        return self._hooks[resolved]

    def close(self, exception: BaseException | None = None) -> None:
        """Closes every callback, once; further calls do nothing, and neither does one in a forked child.

        A callback whose `close` raises does not keep the others from closing, and its `post_close` comes all the same: it
        is what releases files and threads.

        Args:
            exception: what ended the run, if something did: it decides the status that callbacks see.

        Raises:
            Exception: the first that a callback raised, or, where the logger has `raise_errors=True`, a destination,
                after all are closed; where `exception` is given, it is only reported, so as not to hide what came first.
            BaseException: a Ctrl-C that came during close, after all are closed.
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


def _land(_: State, logger: "Logger") -> None:
    logger.land()


def _settle(_: State, logger: "Logger") -> None:
    logger.settle()


# What destinations show at these events has to be there: it comes between the callbacks, who log it, and them.
_SETTLE: dict[Event, tuple[Hook, ...]] = {
    Event.EVAL_END: (_land,),
    Event.EVAL_STANDALONE_END: (_land,),
    Event.PREDICT_END: (_land,),
    Event.FIT_END: (_settle,),
}


def _require_callback(callback: Any) -> None:
    if not isinstance(callback, Callback):
        hint = f" Write {callback.__name__}(...)." if isinstance(callback, type) else ""
        raise TypeError(f"callback must be a Callback, got {callback!r}.{hint}")


def _claim(callbacks: tuple[Any, ...]) -> None:
    """Marks callbacks as open; all of them, or, where one cannot be had, none."""
    for index, callback in enumerate(callbacks):
        name = type(callback).__name__
        if _holds(callbacks[:index], callback):
            raise CallbackInUseError(
                f"callback must be given once, got the same {name} twice. Take one of them out."
            )
        if id(callback) in _open_callbacks:
            raise CallbackInUseError(
                f"callback must be closed before another engine takes it, got a {name} that is still open. "
                "Call close() on the Trainer or Run that has it, or make a new one."
            )
    _open_callbacks.update((id(callback), callback) for callback in callbacks)


def _holds(callbacks: Iterable[object], callback: object) -> bool:
    """Whether this very object is among them; `in` would ask its `__eq__`."""
    return any(callback is one for one in callbacks)


def _hooks_of(event: Event, logger: "Logger", callbacks: tuple[Any, ...]) -> tuple[Hook, ...]:
    hooks = []
    for callback in callbacks:
        hook = _overridden(callback, event)
        if hook is not None:
            guarded = _holds(logger.destinations, callback)
            hooks.append(logger.faults.guard(callback, event.value, hook) if guarded else hook)
    return tuple(hooks)


def _overridden(callback: Callback, event: Event) -> Hook | None:
    """Returns what a callback does at an event, or None where it does nothing."""
    if getattr(callback.run_event, "__func__", None) is not Callback.run_event:
        return functools.partial(callback.run_event, event)
    hook: Hook = getattr(callback, event.value)
    return None if getattr(hook, "__func__", None) is getattr(Callback, event.value) else hook


def _status_after(exception: BaseException | None) -> RunStatus:
    """Returns how a run ended that this exception, or none, ended."""
    if isinstance(exception, KeyboardInterrupt):
        return RunStatus.INTERRUPTED
    if isinstance(exception, SystemExit):
        if exception.code == _SIGTERM_EXIT_CODE:
            return RunStatus.PREEMPTED
        if exception.code == _SIGINT_EXIT_CODE:
            return RunStatus.INTERRUPTED
        return RunStatus.FAILED if exception.code else RunStatus.COMPLETED
    return RunStatus.COMPLETED if exception is None else RunStatus.FAILED


def _set_status(state: State, exception: BaseException | None) -> None:
    if state.status is RunStatus.RUNNING:
        state.status = _status_after(exception)
        state.exception = exception


def _close_all(state: State, logger: "Logger", callbacks: tuple[Any, ...]) -> BaseException | None:
    """Closes callbacks in two phases; returns what is to be raised once that is done."""
    raised: list[BaseException] = []
    destinations = [callback for callback in callbacks if _holds(logger.destinations, callback)]
    others = [callback for callback in callbacks if not _holds(logger.destinations, callback)]
    attached, logger.attached = logger.attached, ()
    ordered = [*attached, *others, *destinations]

    def attempt(callback: Any, action: str, *arguments: Any) -> None:
        try:
            getattr(callback, action)(*arguments)
        except BaseException as error:  # one callback must not keep the others from closing
            if _holds(destinations, callback):
                logger.faults.note(callback, action, error)
                if logger.faults.raise_errors:
                    raise
                return
            if isinstance(error, Exception):
                _log.error(
                    "%s.%s failed: the others are closed all the same.",
                    type(callback).__name__,
                    action,
                    exc_info=error,
                )
            raise

    settle = functools.partial(logger.settle, is_last=True)
    steps: list[Callable[[], object]] = [
        *(functools.partial(attempt, callback, "close", state, logger) for callback in (*attached, *others)),
        # What callbacks logged at last is on its way, and what waited for a destination to be due waits no longer.
        settle,
        *(functools.partial(attempt, callback, "close", state, logger) for callback in destinations),
        settle,
        logger.stop,
        *(functools.partial(attempt, callback, "post_close") for callback in ordered),
        *(functools.partial(_open_callbacks.pop, id(callback), None) for callback in callbacks),
        logger.report_faults,
    ]
    # Ctrl-C ends one step, and the next ones follow, wherever it comes.
    while steps:
        try:
            while steps:
                steps.pop(0)()
        except BaseException as error:  # noqa: BLE001  # raised once all is closed
            raised.append(error)
    interrupts = [error for error in raised if not isinstance(error, Exception)]
    return next(iter(interrupts or raised), None)


def _uncaught_exception() -> BaseException | None:
    """Returns what the interpreter keeps where an exception that nobody caught ended the program, or a cell."""
    return getattr(sys, "last_value", None)


def _close_forgotten(
    state: State, logger: "Logger", callbacks: tuple[Any, ...], owner_pid: int, uncaught_before: int
) -> None:
    """Closes what no `close` reached: the engine was forgotten, or the interpreter ends."""
    if os.getpid() != owner_pid:
        return
    uncaught = _uncaught_exception()
    _set_status(state, None if id(uncaught) == uncaught_before else uncaught)
    _close_all(state, logger, callbacks)
