"""Logging and handling monitor events."""

import copy
import pickle
import threading
from datetime import UTC, datetime, timedelta, timezone

import numpy as np
import pytest
import torch

from events import MonitorEvent, monitor

NOW = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)


def an_event(name="test", **data):
    """Returns an event."""
    return MonitorEvent(name, NOW, data)


@pytest.fixture
def registered():
    """Registers handlers, and unregisters them in the end."""
    handles = []

    def register(handler):
        handles.append(monitor.register_event_handler(handler))
        return handles[-1]

    yield register
    for handle in handles:
        monitor.unregister_event_handler(handle)


def test_values_keep_their_types():
    """A boolean is no float, and an integer keeps all its digits."""
    event = an_event(flag=True, count=2**70, ratio=0.5, host="a")

    assert dict(event.data) == {"flag": True, "count": 2**70, "ratio": 0.5, "host": "a"}
    assert [type(value) for value in event.data.values()] == [bool, int, float, str]


def test_scalars_of_numpy_become_pythons():
    """Numpy's booleans, integers, floats and strings are read."""
    event = an_event(a=np.bool_(1), b=np.int64(3), c=np.float32(0.5), d=np.float64(0.1), e=np.str_("x"))

    assert [type(value) for value in event.data.values()] == [bool, int, float, float, str]
    assert list(event.data.values()) == [True, 3, 0.5, 0.1, "x"]


@pytest.mark.parametrize("value", [None, [1], {"a": 1}, b"x", 1j, torch.tensor(1.0), np.zeros(2), object()])
def test_other_values_are_refused(value):
    """The constructor names the invalid value and the valid types."""
    with pytest.raises(TypeError, match="event value 'x' must be a str, float, int or bool"):
        an_event(x=value)


@pytest.mark.parametrize(
    "arguments", [(1, NOW, {}), ("a", 1.0, {}), ("a", NOW, [("x", 1)]), ("a", NOW, {1: 2})]
)
def test_other_arguments_are_refused(arguments):
    """Names are strings, times are datetimes, data is a dict."""
    with pytest.raises(TypeError, match="must"):
        MonitorEvent(*arguments)


@pytest.mark.parametrize(
    "zone", [UTC, timezone(timedelta(hours=-5)), timezone(timedelta(hours=9, minutes=30))]
)
def test_a_time_with_a_zone_keeps_its_instant(zone, heard):
    """A handler sees the instant that was given, in any time zone of the machine."""
    moment = datetime(2026, 3, 1, 12, tzinfo=zone)

    monitor.log_event(MonitorEvent("a", moment, {}))

    assert heard[0].timestamp.timestamp() == moment.timestamp()


def test_data_is_a_read_only_copy():
    """Neither the caller's dict nor one handler changes what the next handler sees."""
    data = {"x": 1}
    event = MonitorEvent("a", NOW, data)
    data["x"] = 2

    with pytest.raises(TypeError):
        event.data["x"] = 3

    assert event.data["x"] == 1


def test_events_compare_copy_and_pickle():
    """Equal content is equal, and survives a trip to another process."""
    event = an_event(x=1, s="t")

    assert event == an_event(x=1, s="t") != an_event(x=2, s="t")
    assert pickle.loads(pickle.dumps(event)) == copy.deepcopy(event) == event  # noqa: S301  # our own


def test_handlers_are_called_in_the_order_of_registration(registered):
    """All of them, with the event that was logged."""
    calls = []
    for name in "abc":
        registered(lambda event, name=name: calls.append((name, event)))
    event = an_event(x=1)

    monitor.log_event(event)

    assert calls == [("a", event), ("b", event), ("c", event)]


def test_a_handler_that_raises_affects_no_other(registered, heard, caplog):
    """The caller continues, later handlers are called, and the failure is reported once."""

    def broken(event):
        raise ValueError("no disk")

    first = registered(broken)
    later = []
    registered(later.append)

    for _ in range(3):
        monitor.log_event(an_event())

    assert (len(heard), len(later)) == (3, 3)
    (line,) = [record.message.splitlines()[0] for record in caplog.records]
    assert "<locals>.broken failed; other handlers are still called" in line
    assert "ValueError: no disk" in caplog.text
    assert isinstance(first, monitor.EventHandlerHandle)


def test_a_handler_may_log(registered, heard):
    """What it logs goes to the other handlers, and not to itself."""
    registered(lambda event: monitor.log_event(an_event("answer")))

    monitor.log_event(an_event("question"))

    assert [event.name for event in heard] == ["question", "answer"]


def test_two_handlers_that_answer_each_other_come_to_an_end(registered):
    """Each receives the other's events, once."""
    first, second = [], []

    def left(event):
        first.append(event.name)
        monitor.log_event(an_event("left"))

    def right(event):
        second.append(event.name)
        monitor.log_event(an_event("right"))

    registered(left)
    registered(right)

    monitor.log_event(an_event("ball"))

    assert (first, second) == (["ball", "right"], ["left", "ball"])


def test_a_handler_may_unregister_itself_and_others(registered):
    """That holds from the next event on."""
    calls = []

    def once(event):
        calls.append("once")
        monitor.unregister_event_handler(handle)

    handle = registered(once)
    registered(lambda event: calls.append("always"))

    monitor.log_event(an_event())
    monitor.log_event(an_event())

    assert calls == ["once", "always", "always"]


def test_unregistering_twice_does_nothing(registered):
    """Others stay registered."""
    calls = []
    handle = registered(calls.append)
    other = []
    registered(other.append)

    monitor.unregister_event_handler(handle)
    monitor.unregister_event_handler(handle)
    monitor.log_event(an_event())

    assert (len(calls), len(other)) == (0, 1)


@pytest.mark.parametrize("handler", [None, 3, "print"])
def test_a_handler_that_is_not_callable_is_refused(handler, heard):
    """Registration raises, not the next event."""
    with pytest.raises(TypeError, match="must be a function"):
        monitor.register_event_handler(handler)

    monitor.log_event(an_event())

    assert len(heard) == 1


def test_arguments_that_are_not_a_handle_or_event_are_refused():
    """The message says what it must be."""
    with pytest.raises(TypeError, match="must be what register_event_handler returned"):
        monitor.unregister_event_handler(None)
    with pytest.raises(TypeError, match=r"must be an events\.MonitorEvent"):
        monitor.log_event({"x": 1})


def test_threads_that_wait_for_each_other_in_handlers(registered):
    """A handler may wait for an event that another thread logs: no lock is held."""
    other_has_logged = threading.Event()
    outcome = []

    def waits(event):
        if event.name == "first":
            outcome.append(other_has_logged.wait(60))
        else:
            other_has_logged.set()

    registered(waits)
    thread = threading.Thread(target=monitor.log_event, args=(an_event("first"),))
    thread.start()

    monitor.log_event(an_event("second"))
    thread.join(60)

    assert outcome == [True]
