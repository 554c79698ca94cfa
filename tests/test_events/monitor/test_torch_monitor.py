"""`torch.monitor`, both ways: in processes of their own, for torch may freeze or crash the one it is in."""

PRELUDE = """
import atexit, queue, sys, threading, time
from datetime import UTC, datetime, timedelta
import torch.monitor
from destinations import LoggerDestination
from events import Aggregation, MonitorEvent, Run, Stat, monitor

class MetricList(LoggerDestination):
    def __init__(self):
        self.metrics, self.texts = [], []
    def log_metrics(self, metrics, step=None):
        self.metrics.append((step, dict(metrics)))
    def log_text(self, text, name="Text", step=None):
        self.texts.append((step, name, text))

T = torch.monitor.Aggregation
HOUR = timedelta(hours=1)
rows = MetricList()

def torch_event(name, **data):
    torch.monitor.log_event(torch.monitor.Event(name, datetime.now(), data))
"""


def with_prelude(code):
    """Returns the code after what all of them need."""
    import textwrap

    return PRELUDE + textwrap.dedent(code)


def test_stats_and_events_of_torch_become_metrics(in_torch_child):
    """They have the step of their time; counts are integers, strings texts; the process ends with 0."""
    in_torch_child(
        with_prelude(
            """
            with Run(rows, monitor.FromTorchMonitor(), "mine") as run:
                run.batch_end()
                stat = torch.monitor.Stat("loss", [T.MEAN, T.COUNT], HOUR, 2)
                stat.add(1.0)
                stat.add(2.0)
                torch_event("other", x=3, ratio=0.5, host="a")
                assert rows.metrics == []
                run.batch_end()
                assert rows.metrics == [
                    (1, {"loss.mean": 1.5, "loss.count": 2}), (1, {"other/x": 3, "other/ratio": 0.5})
                ], rows.metrics
                assert type(rows.metrics[0][1]["loss.count"]) is int
                assert rows.texts == [(1, "other/host", "a")]
                torch_event("late", x=1)
            assert rows.metrics[2:] == [(2, {"late/x": 1})], rows.metrics
            torch_event("after", x=1)
            assert len(rows.metrics) == 3
            """
        )
    )


def test_the_events_of_a_run_do_the_draining(in_torch_child):
    """A running run receives torch's events, and torch receives the run's, until the run is closed."""
    in_torch_child(
        with_prelude(
            """
            heard = queue.SimpleQueue()
            handle = torch.monitor.register_event_handler(heard.put)
            with Run(rows, run_name="mine") as run:
                coming, going = monitor.from_torch(run.logger), monitor.to_torch(run.logger)
                torch_event("from_torch", x=1)
                monitor.log_event(MonitorEvent("to_torch", datetime.now(UTC), {"x": 2}))
                run.batch_end()
                assert rows.metrics == [(0, {"from_torch/x": 1.0})], rows.metrics
                assert [heard.get_nowait().name for _ in range(2)] == ["from_torch", "to_torch"]
            torch_event("from_torch", x=3)
            torch.monitor.unregister_event_handler(handle)
            assert (coming._handles, going._handle) == ([], None)
            assert len(rows.metrics) == 1
            """
        )
    )


def test_many_threads_log_to_torch_and_nothing_stops(in_torch_child):
    """Two threads of events, one of Stats that close, while the training thread drains: all arrive."""
    in_torch_child(
        with_prelude(
            """
            def log():
                for _ in range(20_000):
                    torch_event("a", x=1)

            def close_stats():
                for _ in range(2000):
                    stat = torch.monitor.Stat("s", [T.SUM], HOUR, 1)
                    stat.add(1.0)

            sys.setswitchinterval(1e-5)
            with Run(rows, run_name="mine") as run, monitor.from_torch(run.logger) as bridge:
                threads = [threading.Thread(target=work) for work in (log, log, close_stats)]
                for thread in threads:
                    thread.start()
                while any(thread.is_alive() for thread in threads):
                    bridge.drain()
                bridge.drain()
                assert bridge.dropped + len(rows.metrics) == 42_000, (bridge.dropped, len(rows.metrics))
                # Those of before may all have been dropped, where this thread seldom had its turn.
                last = threading.Thread(target=close_stats)
                last.start()
                last.join()
                bridge.drain()
                assert bridge.dropped + len(rows.metrics) == 44_000, (bridge.dropped, len(rows.metrics))
                assert sum("s.sum" in metrics for _, metrics in rows.metrics[-2000:]) == 2000
            """
        )
    )


def test_items_beyond_the_queue_are_dropped_and_counted(in_torch_child):
    """The count is exact."""
    in_torch_child(
        with_prelude(
            """
            bridge = monitor.FromTorchMonitor(max_pending=10)
            with Run(rows, bridge, "mine") as run:
                for number in range(25):
                    torch_event("a", x=number)
                assert bridge.dropped == 15
                run.batch_end()
            assert [metrics["a/x"] for _, metrics in rows.metrics] == list(range(15, 25))
            assert bridge.dropped == 15
            """
        )
    )


def test_the_process_exits_cleanly_with_a_running_bridge(in_torch_child):
    """Torch crashes at interpreter exit if a handler is left; none is, and pending events are logged."""
    printed = in_torch_child(
        with_prelude(
            """
            class Prints(LoggerDestination):
                def log_metrics(self, metrics, step=None):
                    print(dict(metrics), flush=True)

            run = Run(Prints(), monitor.FromTorchMonitor(), "mine").__enter__()
            torch_event("a", x=1)
            """
        )
    )

    assert printed == "{'a/x': 1}"


def test_a_bridge_without_a_run_ends_well_too(in_torch_child):
    """It ends well even if the logger was closed before, and if stop is called twice."""
    in_torch_child(
        with_prelude(
            """
            with Run(rows, run_name="mine") as run:
                first, second = monitor.from_torch(run.logger), monitor.from_torch(run.logger)
                torch_event("a", x=1)
                first.stop()
                first.stop()
            """
        )
    )


def test_our_events_reach_handlers_of_torch(in_torch_child):
    """Stats as torch's own; booleans and large integers as what torch can hold; instants kept."""
    in_torch_child(
        with_prelude(
            """
            import os
            os.environ["TZ"] = "America/New_York"
            time.tzset()
            heard = []
            handle = torch.monitor.register_event_handler(
                lambda event: heard.append(
                    (event.name, event.timestamp, dict(event.data), threading.get_ident())
                )
            )
            moment = datetime(2026, 3, 1, 12, tzinfo=UTC)
            with Run(rows, monitor.ToTorchMonitor(), "mine") as run:
                stat = Stat("x", [Aggregation.SUM, Aggregation.COUNT], HOUR, 2)
                thread = threading.Thread(target=lambda: (stat.add(1.0), stat.add(2.0)))
                thread.start()
                thread.join()
                monitor.log_event(MonitorEvent("a", moment, {"flag": True, "big": 2**70, "host": "b"}))
                assert heard == []
                run.batch_end()
                stat.flush()
                stat.add(5.0)
            torch.monitor.unregister_event_handler(handle)
            assert [(name, data) for name, _, data, _ in heard] == [
                ("torch.monitor.Stat", {"x.sum": 3.0, "x.count": 2}),
                ("a", {"flag": 1, "big": float(2**70), "host": "b"}),
                ("torch.monitor.Stat", {"x.sum": 5.0, "x.count": 1}),
            ], heard
            assert heard[1][1].timestamp() == moment.timestamp()
            assert {thread for *_, thread in heard} == {threading.get_ident()}
            """
        )
    )


def test_events_do_not_loop(in_torch_child):
    """With everything attached, one event of ours, and one of torch's, is logged once."""
    in_torch_child(
        with_prelude(
            """
            callbacks = [monitor.ForwardMonitor(), monitor.ToTorchMonitor(), monitor.FromTorchMonitor()]
            with Run(rows, callbacks, "mine") as run:
                monitor.log_event(MonitorEvent("ours", datetime.now(UTC), {"x": 1}))
                torch_event("torchs", x=2)
                stat = Stat("s", [Aggregation.SUM], HOUR)
                stat.add(1.0)
                for _ in range(3):
                    run.batch_end()
            names = sorted(name for _, metrics in rows.metrics for name in metrics)
            assert names == ["ours/x", "s.sum", "torchs/x"]
            """
        )
    )


def test_a_handler_of_torch_that_raises_does_not_stop_training(in_torch_child):
    """It is counted and reported once; the others of our events arrive."""
    in_torch_child(
        with_prelude(
            """
            heard = []
            def broken(event):
                heard.append(event.name)
                raise ValueError("no disk")
            handle = torch.monitor.register_event_handler(broken)
            with monitor.to_torch() as bridge:
                for name in "abc":
                    monitor.log_event(MonitorEvent(name, datetime.now(UTC), {}))
                bridge.drain()
                assert (heard, bridge.failures) == (["a", "b", "c"], 3)
            torch.monitor.unregister_event_handler(handle)
            """
        )
    )


def test_a_handler_of_torch_may_log_an_event_of_ours(in_torch_child):
    """Torch holds its lock meanwhile, so the event is passed to torch later, without a deadlock."""
    in_torch_child(
        with_prelude(
            """
            heard = []
            def answers(event):
                heard.append(event.name)
                if event.name == "question":
                    monitor.log_event(MonitorEvent("answer", datetime.now(UTC), {}))
            handle = torch.monitor.register_event_handler(answers)
            with monitor.to_torch() as bridge:
                torch_event("question")
                assert heard == ["question"]
                bridge.drain()
            torch.monitor.unregister_event_handler(handle)
            assert heard == ["question", "answer"]
            """
        )
    )


def test_windows_and_values_equal_torchs(in_torch_child):
    """Samples of different times are in different windows, one time is one window, and a cap discards the rest."""
    in_torch_child(
        with_prelude(
            """
            NAMES = ("MEAN", "COUNT", "SUM", "MAX", "MIN")
            events = []
            theirs = torch.monitor.register_event_handler(events.append)
            ours = monitor.register_event_handler(events.append)

            def windows(make, aggregation, *arguments, gap_seconds=0.0):
                events.clear()
                stat = make("x", [getattr(aggregation, name) for name in NAMES], *arguments)
                for sample in (3.0, -1.0, 4.0, 1.0, 5.0, 9.0, -2.0):
                    stat.add(sample)
                    end = time.monotonic() + gap_seconds
                    while time.monotonic() < end:
                        pass
                if isinstance(stat, Stat):
                    stat.flush()
                del stat
                return [dict(event.data) for event in events]

            for arguments, gap_seconds in (
                ((timedelta(milliseconds=1),), 0.003), ((timedelta(days=36500),), 0.0), ((HOUR, 3), 0.0)
            ):
                expected = windows(torch.monitor.Stat, T, *arguments, gap_seconds=gap_seconds)
                found = windows(Stat, Aggregation, *arguments, gap_seconds=gap_seconds)
                assert found == expected, (found, expected)
                assert len(found) == (7 if gap_seconds else 1), found
            torch.monitor.unregister_event_handler(theirs)
            monitor.unregister_event_handler(ours)
            """
        )
    )
