"""Failures of destinations: caught, counted, reported once per kind.

A destination that keeps failing is parked.
"""

import pytest

from destinations import LoggerDestination
from events import Engine, Event, Logger, RecordError, State
from events.logger.faults import Faults
from tests.clock import Clock


class FailsWhileTold(LoggerDestination):
    """Raises at each metric while `fails` is true, and notes the others."""

    def __init__(self):
        self.fails = True
        self.attempts = 0
        self.received = []

    def log_metrics(self, metrics, step=None):
        self.attempts += 1
        if self.fails:
            raise OSError("disk full")
        self.received.append(step)


class Receives(LoggerDestination):
    def __init__(self):
        self.received = []

    def log_metrics(self, metrics, step=None):
        self.received.append(step)


class FailsAtEverything(LoggerDestination):
    def log_metrics(self, metrics, step=None):
        raise OSError("metrics")

    def log_text(self, text, name="Text", step=None):
        raise ValueError("text")

    def batch_end(self, state, logger):
        raise OSError("event")


def _logger(*destinations, clock=None):
    logger = Logger(State("r"), destinations)
    if clock is not None:
        logger.faults = Faults(raise_errors=False, clock=clock)
    return logger


def _log(logger, times, start=0):
    for step in range(start, start + times):
        logger.log_metrics({"a": 1.0}, step)


def test_failures_are_counted_by_destination_method_and_exception():
    """Each kind has its own count."""
    logger = _logger(FailsAtEverything(), FailsWhileTold())
    engine = Engine(logger._state, logger)

    _log(logger, 2)
    logger.log_text("x")
    engine.run_event(Event.BATCH_END)

    assert logger.faults.counts == {
        ("FailsAtEverything", "log_metrics", "OSError"): 2,
        ("FailsAtEverything", "log_text", "ValueError"): 1,
        ("FailsAtEverything", "batch_end", "OSError"): 1,
        ("FailsWhileTold", "log_metrics", "OSError"): 2,
    }


def test_the_first_failure_of_a_kind_is_reported_with_its_traceback_and_no_other(caplog):
    """A log that repeats itself is not read."""
    logger = _logger(FailsAtEverything())

    _log(logger, 5)
    logger.log_text("x")

    assert [(record.name, record.levelname) for record in caplog.records] == [("events", "ERROR")] * 2
    first, second = caplog.messages
    assert first.startswith("FailsAtEverything.log_metrics failed; training continues.\nTraceback")
    assert first.endswith("OSError: metrics")
    assert second.endswith("ValueError: text")


def test_secrets_in_errors_of_destinations_are_not_reported(caplog):
    """An error of a client library quotes the request, its headers too."""

    class QuotesItsRequest(LoggerDestination):
        def log_metrics(self, metrics, step=None):
            request = {"url": "https://jo:hunter2@host/x?token=abc123", "api_key": "xyz789"}
            raise OSError(f"failed: {request}")

    _log(_logger(QuotesItsRequest()), 1)

    assert "OSError: failed" in caplog.text
    assert not any(
        secret in caplog.text.split("OSError: failed")[1] for secret in ("hunter2", "abc123", "xyz789")
    )


def test_after_ten_failures_in_a_row_a_destination_is_parked():
    """It is not called for a minute, and then tried again."""
    clock, broken, well = Clock(), FailsWhileTold(), Receives()
    logger = _logger(broken, well, clock=clock)

    _log(logger, 15)
    during = broken.attempts
    clock.now += 59.9
    _log(logger, 1)
    before_the_minute = broken.attempts
    clock.now += 0.2
    _log(logger, 1)

    assert (during, before_the_minute, broken.attempts) == (10, 10, 11)
    assert len(well.received) == 17


def test_parking_is_reported_once(caplog):
    """The report says for how long and why."""
    clock = Clock()
    logger = _logger(FailsWhileTold(), clock=clock)

    _log(logger, 12)
    clock.now += 61
    _log(logger, 2)

    parked = [message for message in caplog.messages if "it is parked" in message]
    assert parked == [
        "FailsWhileTold failed 10 times in a row, last in log_metrics with OSError: it is parked for 60 s, then retried."
    ]


def test_each_failed_try_doubles_the_time_up_to_ten_minutes():
    """One call per try, however long the run."""
    clock, broken = Clock(), FailsWhileTold()
    logger = _logger(broken, clock=clock)
    _log(logger, 10)

    waits = []
    for _ in range(6):
        start, attempts = clock.now, broken.attempts
        while broken.attempts == attempts:
            clock.now += 10
            _log(logger, 1)
        waits.append(clock.now - start)

    assert waits == [60, 120, 240, 480, 600, 600]


def test_a_destination_that_works_again_is_called_again(caplog):
    """What it missed is counted and reported at the end."""
    clock, broken = Clock(), FailsWhileTold()
    logger = _logger(broken, clock=clock)
    _log(logger, 14)

    broken.fails = False
    clock.now += 60
    _log(logger, 3, start=100)
    logger.report_faults()

    assert broken.received == [100, 101, 102]
    assert caplog.messages[-3:] == [
        "FailsWhileTold works again.",
        "FailsWhileTold.log_metrics raised OSError 10 times.",
        "FailsWhileTold missed 4 calls while it was parked.",
    ]


def test_one_success_ends_a_row_of_failures():
    """Nine failures, a success, nine failures: no destination is parked."""
    broken = FailsWhileTold()
    logger = _logger(broken, clock=Clock())

    for _ in range(3):
        broken.fails = True
        _log(logger, 9)
        broken.fails = False
        _log(logger, 1)

    assert broken.attempts == 30
    assert logger.faults.failing == {}


def test_a_parked_destination_misses_events_too_and_is_closed_all_the_same():
    """Hooks count as calls; close is not one that may be left out."""
    calls = []

    class Parked(FailsWhileTold):
        def batch_end(self, state, logger):
            calls.append("batch_end")

        def close(self, state, logger):
            calls.append("close")

    logger = _logger(Parked(), clock=Clock())
    engine = Engine(logger._state, logger)
    _log(logger, 10)

    engine.run_event(Event.BATCH_END)
    engine.close()

    assert calls == ["close"]


def test_errors_are_summarized_at_close(caplog):
    """Each kind has a line, and so has each destination that missed something."""
    logger = _logger(FailsWhileTold(), FailsAtEverything(), clock=Clock())
    engine = Engine(logger._state, logger)
    _log(logger, 12)
    logger.log_text("x")
    caplog.clear()

    engine.close()

    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "FailsAtEverything.log_metrics raised OSError 10 times."),
        ("WARNING", "FailsWhileTold.log_metrics raised OSError 10 times."),
        ("WARNING", "FailsAtEverything missed 3 calls while it was parked."),
        ("WARNING", "FailsWhileTold missed 2 calls while it was parked."),
    ]


def test_raise_errors_counts_and_raises_the_error():
    """It is for tests; no destination is parked."""
    logger = Logger(State("r"), FailsWhileTold(), raise_errors=True)

    for _ in range(12):
        with pytest.raises(OSError, match="disk full"):
            logger.log_metrics({"a": 1.0})

    assert logger.faults.counts == {("FailsWhileTold", "log_metrics", "OSError"): 12}
    assert logger.faults.failing == {}


def test_a_refused_record_is_no_failure():
    """A destination that refuses a record is not parked."""

    class RefusesAll(LoggerDestination):
        def log_metrics(self, metrics, step=None):
            raise RecordError("metric 'a' must be positive, got -1.")

    logger = _logger(RefusesAll(), clock=Clock())

    for _ in range(12):
        logger.log_metrics({"a": -1.0})

    assert logger.faults.counts == {}
    assert logger.faults.value_counts == {("RefusesAll.log_metrics", "RecordError"): 12}
    assert logger.faults.failing == {}


def test_ctrl_c_in_a_destination_is_not_its_failure():
    """It propagates to the loop."""

    class Interrupted(LoggerDestination):
        def log_metrics(self, metrics, step=None):
            raise KeyboardInterrupt

    logger = _logger(Interrupted())

    with pytest.raises(KeyboardInterrupt):
        _log(logger, 1)

    assert logger.faults.counts == {}


def test_a_parked_destination_still_gets_files_and_hyperparameters(tmp_path):
    """Metrics are logged again, a file or hyperparameters are not."""

    class TakesFiles(FailsWhileTold):
        def can_upload_files(self):
            return True

        def upload_file(self, state, remote_file_name, file_path, *, overwrite):
            self.received.append(remote_file_name)

        def log_hyperparameters(self, hyperparameters):
            self.received.append(hyperparameters)

    destination = TakesFiles()
    logger = _logger(destination, clock=Clock())
    for _ in range(11):
        logger.log_metrics({"loss": 1.0})
    (tmp_path / "file").write_bytes(b"")
    logger.log_metrics({"loss": 1.0})

    logger.upload_file("name", tmp_path / "file")
    logger.log_hyperparameters({"lr": 0.1})

    assert destination.attempts == 10
    assert destination.received == ["name", {"lr": 0.1}]
