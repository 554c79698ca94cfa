"""Warnings and errors of a run are logged to it."""

import logging
import threading

import pytest

from destinations import InMemory, LoggerDestination
from destinations.adapters.logging_handler import LoggingHandler, LogMessages
from events import Run


@pytest.fixture
def library():
    """Returns a library's logger, and restores it afterwards."""
    logger = logging.getLogger("some.library")
    yield logger
    logger.handlers.clear()


def is_ours(text):
    """Returns whether a text is from the library: a root handler also receives records of other threads."""
    return text.startswith("some.library: ")


def texts(memory):
    """Returns the name and text of each of the library's texts, in order."""
    return [
        (record.name, record.value)
        for record in memory.records
        if record.kind == "text" and is_ours(record.value)
    ]


def in_thread(call):
    """Runs a call in another thread and joins it."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_warnings_and_errors_become_texts(library):
    """A text has the logger's name, the traceback and the run's step, without secrets.

    Lower levels are ignored.
    """
    memory = InMemory()

    with Run(loggers=[memory], callbacks=[LogMessages()], run_name="mine", raise_errors=True) as run:
        run.batch_start()
        run.batch_end()
        library.info("too little")
        library.warning("disk is %d%% full, api_key=%s", 90, "sk-abcdefghijklmnopqrstuvwxyz123456")
        library.error("failed", exc_info=ValueError("no"))
    library.warning("after the run")

    (first, warning), (second, error) = texts(memory)
    assert (first, second) == ("log/warning", "log/error")
    assert warning.startswith("some.library: disk is 90% full, api_key=")
    assert "sk-abcdef" not in warning
    assert error == "some.library: failed\nValueError: no"
    assert [record.step for record in memory.records if record.kind == "text" and is_ours(record.value)] == [
        1,
        1,
    ]


def test_the_root_logger_is_restored(library):
    """The handler is removed at the end of the run, even if the run failed."""
    before = list(logging.getLogger().handlers)

    with (
        pytest.raises(KeyError),
        Run(loggers=[InMemory()], callbacks=[LogMessages()], run_name="mine") as run,
    ):
        run.run_event({}["no such thing"])

    assert logging.getLogger().handlers == before


def test_messages_of_other_threads_wait_for_the_training_thread(library):
    """The training thread calls the destinations at its next event, in order."""
    callers = []

    class Sink(LoggerDestination):
        def log_text(self, text, name="Text", step=None):
            if is_ours(text):
                callers.append((threading.current_thread(), text))

    with Run(loggers=[Sink()], callbacks=[LogMessages()], run_name="mine", raise_errors=True) as run:
        in_thread(lambda: library.warning("one"))
        in_thread(lambda: library.warning("two"))
        assert callers == []
        run.batch_start()
        library.warning("three")

    here = threading.current_thread()
    assert callers == [(here, f"some.library: {name}") for name in ("one", "two", "three")]


def test_many_threads_lose_nothing_within_the_bound(library):
    """Records beyond it are counted."""
    memory = InMemory()
    with Run(loggers=[memory], run_name="mine", raise_errors=True) as run:
        handler = LoggingHandler(run.logger)
        library.addHandler(handler)
        threads = [
            threading.Thread(target=lambda: [library.warning("x") for _ in range(100)]) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        handler.flush()
        within = len(texts(memory))
        in_thread(lambda: [library.warning("y") for _ in range(1200)])
        handler.flush()

    assert within == 800
    assert len(texts(memory)) == 1800
    assert handler.dropped_records == 200


def test_a_destination_that_logs_or_fails_causes_no_recursion(library):
    """The handler ignores records that a destination logs while it handles one, and this project's own."""
    taken = []

    class Chatty(LoggerDestination):
        def log_text(self, text, name="Text", step=None):
            if not is_ours(text):
                return
            taken.append(text)
            library.warning("I got %s", text)
            raise OSError("disk full")

    with Run(loggers=[Chatty()], callbacks=[LogMessages()], run_name="mine"):
        library.warning("one")
        library.warning("two")

    assert taken == ["some.library: one", "some.library: two"]


def test_a_handler_that_outlives_its_run_is_silent(library, capsys):
    """It has no destination any more, and raises and prints nothing."""
    memory = InMemory()
    with Run(loggers=[memory], run_name="mine") as run:
        handler = LoggingHandler(run.logger, logging.INFO)
        library.addHandler(handler)
    library.propagate = False

    library.warning("late")
    library.propagate = True

    assert texts(memory) == []
    assert capsys.readouterr().err == ""


def test_a_record_that_cannot_be_formatted_does_not_stop_training(library, capsys):
    """It is reported as by every handler of the standard library."""
    memory = InMemory()

    with Run(loggers=[memory], run_name="mine", raise_errors=True) as run:
        handler = LoggingHandler(run.logger)
        handler.handle(logging.LogRecord("x", logging.ERROR, "", 0, "%d", ("no number",), None))

    assert memory.records == []
    assert "--- Logging error ---" in capsys.readouterr().err
