"""Stats: windows, caps, threads, the end."""

import gc
import threading
from datetime import UTC, datetime, timedelta
from fractions import Fraction

import numpy as np
import pytest
import torch

from events import Aggregation, Stat, monitor
from events.monitor.stat import Summary, Window, WindowCloser
from tests.clock import Clock

HOUR = timedelta(hours=1)


class CloserWithoutThread(WindowCloser):
    """Leaves it to the test to look at the clock."""

    def open(self, window):
        return self._add(window)


def a_window(log, seconds=10.0, aggregations=(Aggregation.SUM,)):
    """Returns the window of a Stat."""
    return Window("x", aggregations, seconds, None, log)


def test_a_window_has_every_aggregation(heard):
    """Including VALUE; the count is an integer."""
    stat = Stat("loss", Aggregation, HOUR)
    for value in (1.0, 2.0, 6.0):
        stat.add(value)

    stat.flush()

    assert heard.data == [
        {
            "loss.value": 6.0,
            "loss.mean": 3.0,
            "loss.count": 3,
            "loss.sum": 9.0,
            "loss.max": 6.0,
            "loss.min": 1.0,
            "loss.std": pytest.approx(2.160246899469287),
            "loss.p50": 2.0,
            "loss.p90": pytest.approx(5.2),
            "loss.p95": pytest.approx(5.6),
            "loss.p99": pytest.approx(5.92),
        }
    ]
    assert type(heard[0].data["loss.count"]) is int
    assert heard[0].name == "events.monitor.Stat"
    assert abs((datetime.now(UTC) - heard[0].timestamp).total_seconds()) < 60


def test_count_and_get_describe_the_open_window(heard):
    """Zero before the first sample, and again when the window was logged."""
    stat = Stat("x", [Aggregation.SUM, Aggregation.COUNT], HOUR)
    seen = [(stat.count, stat.get())]

    stat.add(2)
    stat.add(3)
    seen.append((stat.count, stat.get()))
    stat.flush()
    seen.append((stat.count, stat.get()))

    zero = (0, {Aggregation.SUM: 0.0, Aggregation.COUNT: 0})
    assert seen == [zero, (2, {Aggregation.SUM: 5.0, Aggregation.COUNT: 2}), zero]
    assert (stat.name, repr(stat)) == ("x", "Stat('x', count=0)")


def test_a_window_without_samples_logs_nothing(heard):
    """It logs nothing however often it is flushed."""
    stat = Stat("x", [Aggregation.COUNT], HOUR)

    stat.flush()
    stat.add(1.0)
    stat.flush()
    stat.flush()

    assert heard.data == [{"x.count": 1}]


def test_a_window_that_reaches_its_cap_is_logged_at_once(heard):
    """Later samples are discarded and counted until the window's time is over; until then `get` has its values."""
    stat = Stat("x", [Aggregation.SUM, Aggregation.COUNT], HOUR, 3)
    for value in (1, 2):
        stat.add(value)
    before = (stat.count, list(heard))

    for value in (3, 4, 5):
        stat.add(value)

    assert before == (2, [])
    assert heard.data == [{"x.sum": 6.0, "x.count": 3}]
    assert (stat.count, stat.get()) == (0, {Aggregation.SUM: 6.0, Aggregation.COUNT: 3})
    stat.flush()
    assert stat.get()[Aggregation.COUNT] == 0
    stat.add(6)
    assert (stat.discarded, stat.count, len(heard)) == (2, 1, 1)


@pytest.mark.parametrize("cap", [1, 4095, 4096, 4097, 10_000])
def test_a_cap_of_any_size_is_exact(heard, cap):
    """It is exact where samples are folded in on the way there, too."""
    stat = Stat("x", [Aggregation.COUNT, Aggregation.SUM], HOUR, max_samples=cap)

    for _ in range(cap + 5):
        stat.add(1.0)

    assert heard.data == [{"x.count": cap, "x.sum": float(cap)}]
    assert stat.count == 0


@pytest.mark.parametrize("size", [timedelta(microseconds=1), timedelta(milliseconds=1), timedelta.max])
def test_windows_of_any_length(heard, size):
    """Torch ends the process for those below a millisecond."""
    stat = Stat("x", [Aggregation.SUM], size)

    stat.add(1.0)
    if size == timedelta.max:
        stat.flush()

    assert heard.wait_for(1)
    assert heard.data == [{"x.sum": 1.0}]


def test_a_window_that_ends_late_does_not_move_the_next():
    """Windows follow one another from the making of the Stat on."""
    clock, events = Clock(0.0), []
    closer = CloserWithoutThread(clock)
    window = a_window(events.append, seconds=10.0)
    closer.open(window)
    waits = []

    for now in (0.0, 9.9, 10.0, 27.0, 29.9, 30.0):
        clock.now = now
        window.samples.append(1.0)
        waits.append(round(closer.close_due(), 6))

    assert waits == [10.0, 0.1, 10.0, 3.0, 0.1, 10.0]
    assert [event.data["x.sum"] for event in events] == [3.0, 1.0, 2.0]


@pytest.fixture
def clock(monkeypatch):
    """Gives a clock that is set, also for `add`, which has no room for one of its own."""
    clock = Clock(0.0)
    monkeypatch.setattr("events.monitor.stat.monotonic", clock)
    return clock


@pytest.fixture
def closer(clock):
    """Gives what closes windows by that clock, when it is asked to."""
    return CloserWithoutThread(clock)


def a_stat(closer, log, max_samples=None):
    """Returns a Stat whose windows are of ten seconds, closed by the test."""
    stat = Stat("x", [Aggregation.SUM], HOUR)
    window = Window("x", (Aggregation.SUM,), 10.0, max_samples, log)
    closer.open(window)
    stat._window, stat._samples = window, window.samples
    return stat


def test_a_sample_belongs_to_the_window_of_its_time(clock, closer):
    """It does where nothing closes windows for long, and each window has the time of its end."""
    events = []
    stat = a_stat(closer, events.append)
    for clock.now, value in ((0.0, 1.0), (9.9, 2.0), (10.0, 4.0), (35.0, 8.0), (39.0, 16.0), (41.0, 32.0)):
        stat.add(value)
    before = list(events)

    closer.close_due()

    assert before == []
    assert [event.data["x.sum"] for event in events] == [3.0, 4.0, 24.0]
    now = datetime.now(UTC)
    # The second was found to be over 15 s after its end, the third one second after.
    assert [(now - event.timestamp).total_seconds() for event in events] == pytest.approx([0, 15, 1], abs=5)
    assert (stat.count, stat.get()) == (1, {Aggregation.SUM: 32.0})


def test_a_slow_handler_does_not_merge_the_windows_of_others(clock, closer):
    """Their windows are logged when it returns."""
    events = []

    def slow(_):
        for clock.now in (12.0, 22.0, 32.0):
            other.add(clock.now)

    stat = a_stat(closer, slow)
    other = a_stat(closer, events.append)
    stat.add(1.0)
    other.add(1.0)
    clock.now = 10.0

    closer.close_due()
    closer.close_due()

    assert [event.data["x.sum"] for event in events] == [1.0, 12.0, 22.0]


def test_windows_of_many_samples_are_apart_and_call_no_handler_in_add(clock, closer):
    """Samples are folded in on the way."""
    events = []
    stat = a_stat(closer, events.append)
    for clock.now in (1.0, 11.0, 21.0):
        for _ in range(5000):
            stat.add(clock.now)
    before = list(events)

    stat.flush()

    assert before == []
    assert [event.data["x.sum"] for event in events] == [5000.0, 55_000.0, 105_000.0]


def test_a_cap_is_of_each_window(clock, closer):
    """The `add` that reaches it logs earlier windows first."""
    events = []
    stat = a_stat(closer, events.append, max_samples=2)
    for clock.now in (1.0, 12.0, 13.0, 14.0, 25.0):
        stat.add(clock.now)

    assert [event.data["x.sum"] for event in events] == [1.0, 25.0]
    assert (stat.count, stat.discarded) == (1, 1)


def test_windows_that_nobody_logs_are_merged_in_the_end(clock, closer):
    """A handler that hangs costs bounded memory, and no sample."""
    events = []
    stat = a_stat(closer, events.append)
    for index in range(6000):
        clock.now = 10.0 * index
        stat.add(1.0)

    stat.flush()

    assert sum(event.data["x.sum"] for event in events) == 6000.0
    assert len(events) <= 1001


def test_many_windows_each_at_their_time():
    """The next look is when the first of them ends."""
    clock, events = Clock(0.0), []
    closer = CloserWithoutThread(clock)
    for seconds in (3.0, 5.0):
        window = a_window(events.append, seconds)
        window.samples.append(seconds)
        closer.open(window)

    assert closer.close_due() == 3.0
    clock.now = 4.0
    assert closer.close_due() == 1.0
    assert [event.data["x.sum"] for event in events] == [3.0]


def test_the_open_window_is_logged_when_a_stat_is_deleted(heard):
    """The thread that closes windows logs it, and not the garbage collector."""
    stat = Stat("x", [Aggregation.COUNT], HOUR)
    stat.add(1.0)

    del stat
    gc.collect()

    assert heard.wait_for(1)
    assert heard.data == [{"x.count": 1}]


def test_a_handler_that_raises_when_a_stat_is_deleted_does_not_abort(heard, caplog):
    """Nor does one that deletes the last reference to another Stat."""
    others = [Stat("y", [Aggregation.COUNT], HOUR)]
    others[0].add(1.0)

    def hostile(event):
        others.clear()
        raise ValueError("enough")

    handle = monitor.register_event_handler(hostile)
    stat = Stat("x", [Aggregation.COUNT], HOUR)
    stat.add(1.0)

    del stat

    assert heard.wait_for(2)
    monitor.unregister_event_handler(handle)
    assert heard.data == [{"x.count": 1}, {"y.count": 1}]
    assert "ValueError: enough" in caplog.text


def test_a_capped_stat_is_deleted_without_the_garbage_collector(heard):
    """There is no reference cycle."""
    stat = Stat("x", [Aggregation.COUNT], HOUR, 100)
    stat.add(1.0)
    gc.disable()

    del stat

    try:
        assert heard.wait_for(1)
    finally:
        gc.enable()


def test_flush_logs_all_open_windows(heard):
    """It logs the windows of the whole process."""
    stats = [Stat(name, [Aggregation.SUM], HOUR) for name in "ab"]
    for stat in stats:
        stat.add(1.0)

    monitor.flush()

    assert [data for data in heard.data if set(data) <= {"a.sum", "b.sum"}] == [
        {"a.sum": 1.0},
        {"b.sum": 1.0},
    ]


def test_many_threads_lose_nothing():
    """Adds from eight threads, folded in and flushed meanwhile, all count."""
    events = []
    stat = Stat("x", [Aggregation.COUNT, Aggregation.SUM], HOUR, log=events.append)
    barrier = threading.Barrier(9)

    def work():
        barrier.wait(60)
        for _ in range(20_000):
            stat.add(1.0)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    barrier.wait(60)
    for _ in range(200):
        stat.flush()
        stat.get()
    for thread in threads:
        thread.join(60)
    stat.flush()

    assert sum(event.data["x.count"] for event in events) == 160_000
    assert sum(event.data["x.sum"] for event in events) == 160_000.0


def test_many_threads_and_a_cap():
    """No window exceeds its cap, and the other samples are discarded and counted."""
    events = []
    stat = Stat("x", [Aggregation.COUNT], HOUR, 1000, log=events.append)

    def work():
        for _ in range(5000):
            stat.add(1.0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    stat.flush()

    assert [event.data["x.count"] for event in events] == [1000]
    assert stat.discarded == 19_000


def test_handlers_that_raise_log_and_flush_harm_no_stat(caplog):
    """It reaches neither the adding thread nor the window."""
    stat = Stat("x", [Aggregation.COUNT], HOUR, 2)
    inner = Stat("y", [Aggregation.COUNT], HOUR)
    events = []

    def hostile(event):
        events.append(dict(event.data))
        stat.add(1.0)
        stat.flush()
        inner.add(1.0)
        inner.flush()
        monitor.unregister_event_handler(handle)
        raise ValueError("enough")

    handle = monitor.register_event_handler(hostile)

    for _ in range(2):
        stat.add(1.0)

    assert events == [{"x.count": 2}]
    assert "ValueError: enough" in caplog.text


def test_a_custom_log_that_raises_is_reported_once(caplog):
    """It is reported once."""

    def broken(event):
        raise OSError("no disk")

    stat = Stat("x", [Aggregation.COUNT], HOUR, log=broken)

    for _ in range(3):
        stat.add(1.0)
        stat.flush()

    assert caplog.text.count("window of stat 'x' could not be logged") == 1


@pytest.mark.parametrize(
    "value",
    [2, True, np.float32(2), np.float64(2), np.int64(2), torch.tensor(2), torch.tensor([2.0]), Fraction(2)],
)
def test_numbers_of_all_kinds(value):
    """Numbers may be Python's, numpy's, and tensors of one element."""
    stat = Stat("x", [Aggregation.VALUE], HOUR)

    stat.add(value)

    assert stat.get() == {Aggregation.VALUE: 1.0 if value is True else 2.0}


@pytest.mark.parametrize("value", ["1", b"1", None, [1], torch.ones(2), 1j, object()])
def test_samples_that_are_not_numbers_are_refused(value):
    """At once, and the samples before it stay."""
    stat = Stat("x", [Aggregation.COUNT], HOUR)
    stat.add(1.0)

    with pytest.raises(TypeError, match="sample of stat 'x' must be a number"):
        stat.add(value)

    assert stat.count == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((1, [Aggregation.SUM], HOUR), TypeError, "name of a stat must be a string"),
        (("x", [], HOUR), ValueError, "must not be empty"),
        (("x", "sum", HOUR), TypeError, "must be a list"),
        (("x", Aggregation.SUM, HOUR), TypeError, "must be a list"),
        (("x", ["median"], HOUR), ValueError, "median"),
        (("x", [Aggregation.SUM], 60), TypeError, r"must be a timedelta.*timedelta\(seconds=60\)"),
        (("x", [Aggregation.SUM], timedelta(0)), ValueError, "must be positive"),
        (("x", [Aggregation.SUM], timedelta(-1)), ValueError, "must be positive"),
        (("x", [Aggregation.SUM], HOUR, 0), ValueError, "must be at least 1"),
        (("x", [Aggregation.SUM], HOUR, 2.5), TypeError, "must be an integer or None"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    """They would crash at the first add."""
    with pytest.raises(error, match=message):
        Stat(*arguments)


def test_a_window_that_is_never_closed_holds_bounded_memory():
    """An hour's window of many samples keeps a few thousand waiting."""
    stat = Stat("x", [Aggregation.COUNT], HOUR)

    for _ in range(50_000):
        stat.add(1.0)

    assert len(stat._samples) <= 4096
    assert stat.count == 50_000


def test_an_add_while_another_thread_folds_neither_waits_nor_loses():
    """The samples wait, and are folded in later."""
    stat = Stat("x", [Aggregation.COUNT], HOUR)
    is_held, is_done = threading.Event(), threading.Event()

    def fold_for_long():
        with stat._window._lock:
            is_held.set()
            is_done.wait(60)

    thread = threading.Thread(target=fold_for_long)
    thread.start()
    assert is_held.wait(60)
    for _ in range(6000):
        stat.add(1.0)
    waiting = len(stat._samples)
    is_done.set()
    thread.join(60)

    stat.add(1.0)

    assert waiting == 6000
    assert stat.get() == {Aggregation.COUNT: 6001}


def test_a_signal_handler_that_comes_while_a_window_is_folded_does_not_wait_for_itself():
    """It sees an empty window, and the sample it adds is in the next."""
    events = []
    stat = Stat("x", [Aggregation.SUM], HOUR, log=events.append)
    stat.add(1.0)
    seen = []

    class Interrupted(Summary):
        def fold(self, samples):
            stat.add(2.0)
            stat.flush()
            seen.append((stat.get(), list(events)))
            super().fold(samples)

    stat._window.summary = Interrupted([Aggregation.SUM])

    stat.flush()
    stat.flush()

    assert seen == [({Aggregation.SUM: 0.0}, [])]
    assert [event.data for event in events] == [{"x.sum": 1.0}, {"x.sum": 2.0}]


class LockThatIsAwaited:
    """A lock that tells when a thread waits for it."""

    def __init__(self):
        self._lock = threading.RLock()
        self.is_awaited = threading.Event()

    def acquire(self, timeout):
        if not self._lock.acquire(blocking=False):
            self.is_awaited.set()
            return self._lock.acquire(timeout=timeout)
        return True

    def release(self):
        self._lock.release()


@pytest.mark.parametrize("who", ["closer", "stat"])
def test_a_flush_waits_for_windows_that_another_thread_is_logging(monkeypatch, who):
    """Code that unregisters or reads right after it has every sample that was added before."""
    lock = LockThatIsAwaited()
    monkeypatch.setattr(Window, "delivering", lock)
    events, has_come = [], threading.Event()

    def log(event):
        has_come.set()
        lock.is_awaited.wait(60)
        events.append(dict(event.data))

    window = a_window(log)
    window.samples.append(1.0)
    closer = CloserWithoutThread()
    closer.open(window)
    stat = Stat("x", [Aggregation.SUM], HOUR)
    stat._window = window
    thread = threading.Thread(target=window.close)
    thread.start()
    assert has_come.wait(60)

    (closer if who == "closer" else stat).flush()

    assert events == [{"x.sum": 1.0}]
    thread.join(60)


def test_a_log_that_flushes_does_not_wait_for_itself():
    """It logs the windows of others, one handler at a time."""
    events = []

    def log(event):
        events.append(dict(event.data))
        closer.flush()

    closer = CloserWithoutThread()
    windows = [a_window(log) for _ in range(2)]
    for window in windows:
        window.samples.append(1.0)
        closer.open(window)

    windows[0].close()

    assert events == [{"x.sum": 1.0}] * 2


def test_flush_does_not_wait_for_windows_interrupted_by_ctrl_c():
    """Nobody is logging any more."""

    def interrupted(event):
        raise KeyboardInterrupt

    window = a_window(interrupted)
    window.samples.append(1.0)
    with pytest.raises(KeyboardInterrupt):
        window.close()

    in_thread = threading.Thread(target=window.close)
    in_thread.start()
    in_thread.join(5)
    assert not in_thread.is_alive()


def test_importing_starts_nothing(in_child):
    """No thread, no handler; neither torch nor psutil is loaded."""
    printed = in_child(
        """
        import sys, threading
        from events import monitor, MonitorEvent, Stat, Aggregation, Timer, SystemMonitor
        names = ("torch", "psutil", "pynvml", "numpy")
        print([name for name in names if name in sys.modules], threading.active_count())
        """
    )

    assert printed == "[] 1"


def test_the_interpreter_ends_well_with_handlers_and_open_windows(in_child):
    """The rest is logged to a handler that is still registered, and the process ends with 0."""
    printed = in_child(
        """
        from datetime import timedelta
        from events import Aggregation, Stat, monitor
        monitor.register_event_handler(lambda event: print(dict(event.data), flush=True))
        stat = Stat("x", [Aggregation.SUM], timedelta(hours=1))
        stat.add(1.0)
        stat.add(2.0)
        """
    )

    assert printed == "{'x.sum': 3.0}"


def test_a_forked_child_begins_empty_and_does_not_freeze(in_child):
    """The parent logs its samples once; the child logs its own, though the parent's thread held the lock."""
    printed = in_child(
        """
        import os, warnings
        from datetime import timedelta
        from events import Aggregation, Stat, monitor
        warnings.simplefilter("ignore", DeprecationWarning)

        def prints(event):
            # In one piece: two threads of the child may be at it.
            os.write(1, f"{os.getpid() == parent} {dict(event.data)}\\n".encode())

        monitor.register_event_handler(prints)
        parent = os.getpid()
        stat = Stat("x", [Aggregation.SUM], timedelta(hours=1))
        stat.add(1.0)
        stat._window._lock.acquire()
        child = os.fork()
        if child == 0:
            stat.add(10.0)
            timed = Stat("timed", [Aggregation.SUM], timedelta(milliseconds=20))
            timed.add(5.0)
            raise SystemExit
        stat._window._lock.release()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """
    )

    assert sorted(printed.splitlines()) == [
        "False {'timed.sum': 5.0}",
        "False {'x.sum': 10.0}",
        "True {'x.sum': 1.0}",
    ]
