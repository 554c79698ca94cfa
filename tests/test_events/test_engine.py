"""Tests who is called in which order, what an error does, and that close comes exactly once."""

import atexit
import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref

import pytest

from destinations import LoggerDestination
from events import (
    Callback,
    CallbackInUseError,
    Engine,
    EngineClosedError,
    Event,
    Logger,
    RunStatus,
    State,
    UnknownEventError,
)


class Listener(Callback):
    """Notes every event, close and post_close in a list that it may share."""

    def __init__(self, name="callback", calls=None):
        self.name = name
        self.calls = [] if calls is None else calls

    def run_event(self, event, state, logger):
        self.calls.append((self.name, event.value))

    def close(self, state, logger):
        self.calls.append((self.name, "close"))

    def post_close(self):
        self.calls.append((self.name, "post_close"))


class ListeningDestination(Listener, LoggerDestination):
    pass


class ListeningUploader(ListeningDestination):
    def can_upload_files(self):
        return True


class RaisesAt(Callback):
    """Raises at one hook or phase of close."""

    def __init__(self, where, error):
        self.error = error
        setattr(self, where, self._raise)

    def _raise(self, *arguments):
        raise self.error


class DestinationRaisesAt(RaisesAt, LoggerDestination):
    pass


def _engine(callbacks=(), destinations=(), **options):
    state = State("r")
    return Engine(state, Logger(state, list(destinations), **options), callbacks)


def _run_python(program):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


# Order --------------------------------------------------------------------------------------------


def _listeners(calls):
    first, second = Listener("first", calls), Listener("second", calls)
    uploader = ListeningUploader("uploader", calls)
    destination = ListeningDestination("destination", calls)
    return _engine([first, second], [uploader, destination])


def test_init_reaches_uploaders_then_destinations_then_callbacks():
    """Records logged in `init` arrive, whatever the order of the lists."""
    calls = []
    engine = _listeners(calls)

    engine.run_event(Event.INIT)

    assert [name for name, _ in calls] == ["uploader", "destination", "first", "second"]


def test_every_other_event_reaches_callbacks_then_destinations_then_uploaders():
    """What a callback logs is there when a destination flushes, and its file when an uploader waits."""
    calls = []
    engine = _listeners(calls)
    events = [event for event in Event if event is not Event.INIT]

    for event in events:
        engine.run_event(event)

    names = ("first", "second", "destination", "uploader")
    assert calls == [(name, event.value) for event in events for name in names]


def test_close_comes_for_all_in_that_order_and_then_post_close():
    """Two phases: what one needs during its close is still there."""
    calls = []

    _listeners(calls).close()

    order = ["first", "second", "destination", "uploader"]
    assert calls == [(name, "close") for name in order] + [(name, "post_close") for name in order]


# Dispatch -----------------------------------------------------------------------------------------


def test_a_callback_receives_each_event_once_by_enum_or_name_in_any_case():
    """The enum, its value and its name in capitals are one event."""
    callback = Listener()
    engine = _engine([callback])

    for event in Event:
        engine.run_event(event)
        engine.run_event(event.value)
        engine.run_event(event.name)

    assert callback.calls == [("callback", event.value) for event in Event for _ in range(3)]


def test_a_hook_may_be_inherited_from_a_mixin_or_set_on_the_object():
    """What counts is that it is not the hook of `Callback` itself."""
    calls = []

    class Mixin:
        def batch_end(self, state, logger):
            calls.append("mixin")

    class Mixed(Mixin, Callback):
        pass

    plain = Callback()
    plain.batch_end = lambda state, logger: calls.append("object")
    engine = _engine([Mixed(), plain])

    engine.run_event(Event.BATCH_END)

    assert calls == ["mixin", "object"]


def test_a_run_event_that_calls_super_runs_the_hooks():
    """Overriding `run_event` and calling the base is a filter."""
    calls = []

    class Filter(Callback):
        def run_event(self, event, state, logger):
            if event is Event.BATCH_END:
                super().run_event(event, state, logger)

        def batch_end(self, state, logger):
            calls.append("batch_end")

        def batch_start(self, state, logger):
            calls.append("batch_start")

    engine = _engine([Filter()])

    engine.run_event(Event.BATCH_START)
    engine.run_event(Event.BATCH_END)

    assert calls == ["batch_end"]


def test_hooks_are_found_once():
    """After an engine is made it does not look a hook up again: that is where its speed comes from."""
    looked_up = []

    class Counted(Callback):
        def __getattribute__(self, name):
            looked_up.append(name)
            return super().__getattribute__(name)

        def batch_end(self, state, logger):
            pass

    engine = _engine([Counted()])
    looked_up.clear()

    for _ in range(3):
        engine.run_event(Event.BATCH_END)

    assert looked_up == []


def test_callbacks_without_a_hook_are_not_called():
    """A callback without hooks costs nothing at an event; end events deliver pending records."""
    engine = _engine([Callback()], [LoggerDestination()])

    heard = {event for event, hooks in engine._hooks.items() if hooks}

    assert heard == {Event.EVAL_END, Event.EVAL_STANDALONE_END, Event.PREDICT_END, Event.FIT_END}


# Errors -------------------------------------------------------------------------------------------


def test_an_exception_of_a_callback_propagates():
    """Later callbacks are not called; earlier ones were."""
    calls = []
    engine = _engine(
        [Listener("before", calls), RaisesAt("batch_end", OSError("disk")), Listener("after", calls)]
    )

    with pytest.raises(OSError, match="disk"):
        engine.run_event(Event.BATCH_END)

    assert calls == [("before", "batch_end")]


@pytest.mark.parametrize("where", ["init", "batch_end", "run_event"])
@pytest.mark.parametrize("error", [OSError("disk"), EngineClosedError("x"), ValueError("x")], ids=type)
def test_an_exception_of_a_destination_hook_stops_no_other_callback(where, error):
    """It is counted, and all other callbacks are called."""
    calls = []
    engine = _engine(
        [Listener("callback", calls)],
        [DestinationRaisesAt(where, error), ListeningDestination("after", calls)],
    )
    event = Event.INIT if where == "init" else Event.BATCH_END

    engine.run_event(event)

    assert sorted(calls) == [("after", event.value), ("callback", event.value)]
    action = event.value
    assert engine._logger.faults.counts == {("DestinationRaisesAt", action, type(error).__name__): 1}
    engine.close()


def test_an_invalid_record_logged_in_a_destination_hook_stops_no_other_callback():
    """It is dropped there too."""

    class LogsNonsense(LoggerDestination):
        def batch_end(self, state, logger):
            logger.log_metrics({"a": "text"})

    engine = _engine([], [LogsNonsense()])

    engine.run_event(Event.BATCH_END)

    assert engine._logger.faults.counts == {}
    assert engine._logger.faults.value_counts == {("a", "RecordError"): 1}


def test_an_interrupt_in_a_destinations_hook_is_an_interrupt():
    """Ctrl-C is meant for the loop, wherever it arrives."""
    engine = _engine([], [DestinationRaisesAt("batch_end", KeyboardInterrupt())])

    with pytest.raises(KeyboardInterrupt):
        engine.run_event(Event.BATCH_END)


def test_raise_errors_lets_a_destinations_error_out():
    """Tests ask for it."""
    engine = _engine([], [DestinationRaisesAt("batch_end", OSError("disk"))], raise_errors=True)

    with pytest.raises(OSError, match="disk"):
        engine.run_event(Event.BATCH_END)
    engine.close()


# Making -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "callback", [Callback, object(), None, "console"], ids=["class", "object", "None", "str"]
)
def test_objects_that_are_not_callbacks_are_refused(callback):
    """For a class that was not called, the message says so."""
    with pytest.raises(TypeError, match="callback must be a Callback, got") as caught:
        _engine([callback])

    assert ("Write Callback(...)" in str(caught.value)) is (callback is Callback)


def test_a_destination_that_is_no_callback_is_refused_by_name():
    """Having `log_metrics` is not enough for an engine."""

    class OnlyLogs:
        def log_metrics(self, metrics, step=None):
            pass

    with pytest.raises(TypeError, match=r"callback must be a Callback, got .*OnlyLogs"):
        _engine([], [OnlyLogs()])


def test_the_same_callback_twice_is_refused():
    """It may be twice in one list, or a callback and a destination at once."""
    both = ListeningDestination()

    with pytest.raises(
        CallbackInUseError, match="must be given once, got the same ListeningDestination twice"
    ):
        _engine([both], [both])
    with pytest.raises(CallbackInUseError, match="must be given once, got the same Listener twice"):
        _engine([listener := Listener(), listener])


def test_a_callback_that_is_open_elsewhere_is_refused_with_the_way_out():
    """After close another engine may have it."""
    callback = Listener()
    first = _engine([callback])

    with pytest.raises(
        CallbackInUseError, match=r"got a Listener that is still open\. Call close\(\) on the Trainer or Run"
    ):
        _engine([callback])
    first.close()
    second = _engine([callback])
    second.run_event(Event.INIT)

    assert callback.calls == [("callback", "close"), ("callback", "post_close"), ("callback", "init")]


@pytest.mark.parametrize("reason", ["open", "twice", "type", "can_upload_files"])
def test_an_engine_that_could_not_be_made_has_claimed_nothing(reason):
    """All callbacks before and after the faulty one stay free, and the other engine keeps its own."""
    free, used = Listener(), Listener()
    owner = _engine([used])

    class CannotSay(LoggerDestination):
        def can_upload_files(self):
            raise OSError("no network")

    at_fault = {"open": [used], "twice": [free], "type": [object()], "can_upload_files": []}[reason]
    destinations = [CannotSay()] if reason == "can_upload_files" else []
    with pytest.raises((CallbackInUseError, TypeError, OSError)):
        _engine([free, *at_fault], destinations)
    gc.collect()

    _engine([free]).close()
    owner.run_event(Event.BATCH_END)
    assert used.calls == [("callback", "batch_end")]
    owner.close()


# Close --------------------------------------------------------------------------------------------


def test_a_closed_engine_refuses_events_and_says_what_to_do():
    """It refuses the enum and the name; a name that is no event is still told so."""
    engine = _engine([Listener()])
    before = engine.is_closed

    engine.close()

    assert (before, engine.is_closed) == (False, True)
    for event in (Event.BATCH_END, "BATCH_END"):
        with pytest.raises(EngineClosedError, match=r"'batch_end' must be run before close\. Make a new"):
            engine.run_event(event)
    with pytest.raises(UnknownEventError):
        engine.run_event("nothing")


def test_close_comes_once():
    """Calling it again, or forgetting the engine afterwards, does nothing more."""
    callback = Listener()
    engine = _engine([callback])

    engine.close()
    engine.close()
    del engine
    gc.collect()

    assert callback.calls == [("callback", "close"), ("callback", "post_close")]


def test_records_logged_in_close_arrive():
    """Destinations are closed after it; once all are closed, nothing is taken any more."""
    heard = []

    class LogsInClose(Callback):
        def close(self, state, logger):
            logger.log_metrics({"last": 1})

        def post_close(self):
            with pytest.raises(EngineClosedError, match="log_metrics was called after the run was closed"):
                logger.log_metrics({"too late": 1})

    class Hears(LoggerDestination):
        def log_metrics(self, metrics, step=None):
            heard.append(metrics)

    state = State("r")
    logger = Logger(state, Hears())
    engine = Engine(state, logger, [LogsInClose()])

    engine.close()

    assert heard == [{"last": 1}]


@pytest.mark.parametrize("phase", ["close", "post_close"])
def test_a_callback_that_raises_in_close_does_not_prevent_other_closes(phase, caplog):
    """The error is logged with its traceback and raised when all are closed; every `post_close` comes."""
    calls = []

    class Broken(Listener):
        def close(self, state, logger):
            super().close(state, logger)
            if phase == "close":
                raise OSError("disk")

        def post_close(self):
            super().post_close()
            if phase == "post_close":
                raise OSError("disk")

    engine = _engine(
        [Broken("broken", calls), Listener("after", calls)], [ListeningDestination("destination", calls)]
    )

    with pytest.raises(OSError, match="disk"):
        engine.close()

    assert calls == [
        *(("broken", "close"), ("after", "close"), ("destination", "close")),
        *(("broken", "post_close"), ("after", "post_close"), ("destination", "post_close")),
    ]
    assert f"Broken.{phase} failed" in caplog.text
    assert "OSError: disk" in caplog.text


def test_an_error_in_close_does_not_hide_the_first_exception(caplog):
    """It is reported; the first exception is raised."""
    engine = _engine([RaisesAt("close", OSError("disk"))])

    engine.close(RuntimeError("CUDA"))

    assert "OSError: disk" in caplog.text


def test_an_error_in_close_is_logged_without_its_secrets(caplog):
    """The log has its traceback; the exception that comes out is the one that was raised."""
    error = OSError("cannot reach https://me:hunter2@example.org")
    engine = _engine([RaisesAt("close", error)])

    with pytest.raises(OSError, match="hunter2"):
        engine.close()

    assert "Traceback" in caplog.text
    assert "hunter2" not in caplog.text


def test_an_error_in_a_destinations_close_is_counted_and_not_raised(caplog):
    """Its `post_close` releases what it holds, and the summary at the end has the error."""
    broken = DestinationRaisesAt("close", OSError("disk"))
    released = []
    broken.post_close = lambda: released.append(True)
    engine = _engine([], [broken])

    engine.close()

    assert released == [True]
    assert engine._logger.faults.counts == {("DestinationRaisesAt", "close", "OSError"): 1}
    assert "DestinationRaisesAt.close raised OSError 1 time." in caplog.text


def test_raise_errors_propagates_errors_of_a_destinations_close():
    """The error comes after all callbacks are closed."""
    after = ListeningDestination()
    engine = _engine([], [DestinationRaisesAt("close", OSError("disk")), after], raise_errors=True)

    with pytest.raises(OSError, match="disk"):
        engine.close()

    assert after.calls == [("callback", "close"), ("callback", "post_close")]


@pytest.mark.parametrize("kind", [RaisesAt, DestinationRaisesAt])
@pytest.mark.parametrize("exception", [None, RuntimeError("CUDA")])
def test_ctrl_c_during_close_ends_one_wait_and_comes_out_when_all_are_closed(kind, exception, caplog):
    """Interrupting one callback's wait doesn't lose the data of the others."""
    interrupted, after = kind("close", KeyboardInterrupt()), Listener()
    callbacks, destinations = ([], [interrupted]) if kind is DestinationRaisesAt else ([interrupted], [])
    engine = _engine([*callbacks, after, RaisesAt("close", OSError("disk"))], destinations)

    with pytest.raises(KeyboardInterrupt):
        engine.close(exception)

    assert after.calls == [("callback", "close"), ("callback", "post_close")]
    assert engine.is_closed


@pytest.mark.parametrize(
    ("exception", "status"),
    [
        (None, RunStatus.COMPLETED),
        (RuntimeError("x"), RunStatus.FAILED),
        (StopIteration(), RunStatus.FAILED),
        (GeneratorExit(), RunStatus.FAILED),
        (KeyboardInterrupt(), RunStatus.INTERRUPTED),
        (SystemExit(), RunStatus.COMPLETED),
        (SystemExit(0), RunStatus.COMPLETED),
        (SystemExit(1), RunStatus.FAILED),
        (SystemExit("no data"), RunStatus.FAILED),
        (SystemExit(128 + 2), RunStatus.INTERRUPTED),
        (SystemExit(128 + 15), RunStatus.PREEMPTED),
        (SystemExit(128 + 9), RunStatus.FAILED),
    ],
)
def test_callbacks_see_in_close_how_the_run_ended(exception, status):
    """`state.status` and `state.exception` are there for every kind of end."""
    seen = []

    class Sees(Callback):
        def close(self, state, logger):
            seen.append((state.status, state.exception))

    _engine([Sees()]).close(exception)

    assert seen == [(status, exception)]


def test_a_status_that_was_set_before_close_stays():
    """A status that was set explicitly is kept."""
    engine = _engine()
    engine._state.status = RunStatus.PREEMPTED

    engine.close(RuntimeError())

    assert engine._state.status is RunStatus.PREEMPTED


def test_close_goes_to_the_callbacks_the_engine_was_made_with():
    """Later changes to `state.callbacks` don't matter."""
    callback = Listener()
    engine = _engine([callback])
    engine._state.callbacks = ()

    engine.close()

    assert callback.calls == [("callback", "close"), ("callback", "post_close")]


# Engines that were not closed, and several at once ------------------------------------------------


def test_an_engine_that_is_forgotten_is_closed():
    """The garbage collector closes it; its callbacks may be used again."""
    callback = Listener()
    engine = _engine([callback])

    del engine
    gc.collect()

    assert callback.calls == [("callback", "close"), ("callback", "post_close")]
    _engine([callback]).close()


def test_an_engine_that_is_collected_in_a_thread_of_a_destination_is_closed_in_another(tmp_path):
    """The garbage collector runs in any thread, also in one that `close` waits for."""
    from destinations import RunDirectory
    from destinations.runs import Run as ReadRun
    from events import Run

    def forget_a_run():
        folder = RunDirectory(tmp_path / "run")
        run = Run(loggers=[folder], run_name="forgotten")
        run.log_metrics({"loss": 1.0}, step=1)
        run.itself = run  # only the collector finds it
        return folder._writer.timer, folder._run._lane

    gc.disable()
    try:
        timer, lane = forget_a_run()
        lane.put(gc.collect)
        lane.flush(60)
    finally:
        gc.enable()
    for thread in threading.enumerate():
        if thread.name == "close-forgotten":
            thread.join()

    assert (timer._thread.is_alive(), lane._thread.is_alive()) == (False, False)
    run = ReadRun.open(tmp_path / "run")
    assert (run.status, run.series("loss").value.tolist()) == ("completed", [1.0])


def test_several_engines_share_nothing():
    """Events, records and close of one do not reach the other."""
    one, other = ListeningDestination(), ListeningDestination()
    first, second = _engine([], [one]), _engine([], [other])

    first.run_event(Event.BATCH_END)
    first.close()
    second.run_event(Event.EPOCH_END)

    assert one.calls == [("callback", "batch_end"), ("callback", "close"), ("callback", "post_close")]
    assert other.calls == [("callback", "epoch_end")]
    second.close()


@pytest.mark.parametrize("how", ["close", "forget"])
def test_nothing_stays_referenced_after_close(how):
    """Neither the state with its model, nor the logger, nor a callback is kept."""

    class Model:
        pass

    callback, destination, state = Listener(), ListeningDestination(), State("r")
    state.model = Model()
    logger = Logger(state, destination)
    engine = Engine(state, logger, [callback])
    watched = [weakref.ref(one) for one in (callback, destination, state, state.model, logger, engine)]

    engine.run_event(Event.BATCH_END)
    if how == "close":
        engine.close()
    del callback, destination, state, logger, engine
    gc.collect()

    assert [ref() for ref in watched] == [None] * 6


def test_an_engine_leaves_nothing_behind_at_exit_once_it_is_closed():
    """No entry per engine stays with `atexit` or with the finalizers."""
    _engine([Listener()]).close()
    # Objects of earlier tests may be collected at any time, and other threads may add other finalizers.
    gc.collect()
    entries, finalizers = atexit._ncallbacks(), _engines_to_close()

    for _ in range(5):
        _engine([Listener()]).close()

    assert atexit._ncallbacks() == entries
    assert _engines_to_close() == finalizers
    engine = _engine([Listener()])
    assert _engines_to_close() == finalizers + 1
    engine.close()


def _engines_to_close():
    """Returns the number of finalizers that would close an open engine."""
    found = weakref.finalize._registry.copy().values()
    return sum(getattr(finalizer.func, "__name__", "") == "_close_unclosed" for finalizer in found)


PROGRAM = """
    import sys
    from events import Callback, Engine, Logger, State

    class Tells(Callback):
        def __init__(self, name):
            self.name = name
        def close(self, state, logger):
            print(self.name, "close", state.status, type(state.exception).__name__)
        def post_close(self):
            import colorsys  # an import that only this needs
            print(self.name, "post_close")

    def engine(name):
        state = State("r")
        return Engine(state, Logger(state), [Tells(name)])

    kept = engine("kept")
"""


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("", "completed NoneType"),
        ("raise RuntimeError('CUDA')", "failed RuntimeError"),
        ("raise KeyboardInterrupt", "interrupted KeyboardInterrupt"),
    ],
)
def test_an_engine_left_open_is_closed_when_the_interpreter_ends(ending, status):
    """With and without an uncaught exception, whose type decides the status."""
    result = _run_python(textwrap.dedent(PROGRAM) + ending)

    assert result.stdout == f"kept close {status}\nkept post_close\n"


def test_every_engine_left_open_is_closed_when_the_interpreter_ends():
    """Dropping or closing one before has no effect on the others, and nothing is closed twice."""
    result = _run_python(
        textwrap.dedent(PROGRAM)
        + textwrap.dedent("""
            dropped, closed, other = engine("dropped"), engine("closed"), engine("other")
            closed.close()
            del dropped
            print("end")
        """)
    )

    lines = result.stdout.splitlines()
    assert lines[:5] == [
        "closed close completed NoneType",
        "closed post_close",
        "dropped close completed NoneType",
        "dropped post_close",
        "end",
    ]
    assert sorted(lines[5:]) == [
        "kept close completed NoneType",
        "kept post_close",
        "other close completed NoneType",
        "other post_close",
    ]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize(
    "ending", ["", "kept.close()", "del kept; import gc; gc.collect()", "raise RuntimeError"]
)
def test_a_forked_child_closes_nothing(ending):
    """Its exit, a call and forgetting do nothing: the run is its parent's."""
    result = _run_python(
        textwrap.dedent(PROGRAM)
        + textwrap.dedent(f"""
            import os
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                {ending or "pass"}
                sys.exit()
            os.waitpid(child, 0)
            print("parent", kept.is_closed)
        """)
    )

    assert result.stdout == "parent False\nkept close completed NoneType\nkept post_close\n"


def test_an_engine_in_another_thread_works():
    """Nothing here needs the main thread: no signal handlers, at import or later."""
    result = _run_python("""
        import threading

        def work():
            from events import Engine, Event, Logger, State
            state = State("r")
            engine = Engine(state, Logger(state))
            engine.run_event(Event.INIT)
            engine.close()
            print("done")

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(30)
    """)

    assert (result.stdout, result.stderr) == ("done\n", "")


def test_a_callback_joins_a_run_under_way():
    """It receives every event from the next on, before the others, and is closed with them."""
    calls = []
    state = State("mine")
    logger = Logger(state)
    engine = Engine(state, logger, [Listener("old", calls)])
    engine.run_event(Event.FIT_START)

    logger.attach(Listener("new", calls))
    engine.run_event("batch_end")
    engine.close()

    assert calls == [
        ("old", "fit_start"),
        ("new", "batch_end"),
        ("old", "batch_end"),
        ("new", "close"),
        ("old", "close"),
        ("new", "post_close"),
        ("old", "post_close"),
    ]


def test_a_callback_leaves_a_run_under_way():
    """It receives no more events and is not closed; detaching one that was never attached is allowed."""
    state = State("mine")
    logger = Logger(state)
    engine = Engine(state, logger)
    joined, stranger = Listener(), Listener()
    logger.attach(joined)
    logger.attach(joined)

    engine.run_event(Event.BATCH_START)
    logger.detach(joined)
    logger.detach(stranger)
    engine.run_event(Event.BATCH_END)
    engine.close()

    assert joined.calls == [("callback", "batch_start")]


def test_a_closed_run_accepts_no_callback():
    """It would never be called."""
    state = State("mine")
    logger = Logger(state)
    Engine(state, logger).close()

    with pytest.raises(EngineClosedError):
        logger.attach(Listener())


def test_an_engine_takes_the_callbacks_of_the_state_as_composers_does():
    """It uses a list in `state.callbacks`; it calls destinations once, and an earlier engine's never."""
    heard = []

    class Named(Callback):
        def __init__(self, name, *args, **kwargs):
            super().__init__(name, *args, **kwargs)
            self.name = name

        def fit_start(self, state, logger):
            heard.append(self.name)

    class Destination(LoggerDestination):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

        def fit_start(self, state, logger):
            heard.append("destination")

    state, destination = State("mine"), Destination("ignored", key=1)
    state.callbacks = [Named("first", key=1), destination, Named("second")]
    logger = Logger(state, [destination])
    engine = Engine(state, logger)
    engine.run_event("fit_start")
    engine.close()

    assert heard == ["first", "second", "destination"]
    again = Engine(state, Logger(state))
    again.run_event("fit_start")
    again.close()
    assert len(heard) == 3


def test_a_hook_with_the_name_of_another_framework_is_reported(caplog):
    """The warning has the name that is called; there is none where both are there."""

    class Lost(Callback):
        def on_batch_end(self, state, logger):
            pass

    class Both(Callback):
        def on_train_batch_end(self):
            pass

        def batch_end(self, state, logger):
            pass

    _engine([Lost(), Both()], []).close()

    assert caplog.messages == ["Lost.on_batch_end is never called; did you mean batch_end?"]
