"""Monitor events on their way to destinations."""

import collections
import gc
import threading
import weakref
from datetime import UTC, datetime, timedelta

import pytest

from destinations import LoggerDestination
from events import Aggregation, Callback, MonitorEvent, RecordError, Run, Stat, monitor

HOUR = timedelta(hours=1)


def log(name="test", **data):
    """Logs an event."""
    monitor.log_event(MonitorEvent(name, datetime.now(UTC), data))


def in_another_thread(function, *arguments, **keywords):
    """Runs something in a thread, to its end."""
    thread = threading.Thread(target=function, args=arguments, kwargs=keywords)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_windows_become_metrics_with_the_step_of_their_end(metric_list):
    """In the thread that trains, at the end of the batch, with the step at which they ended."""
    stat = Stat("x", [Aggregation.SUM, Aggregation.COUNT], HOUR)
    with Run(metric_list, monitor.ForwardMonitor(), "mine") as run:
        for value in (1.0, 2.0):
            run.batch_start()
            stat.add(value)
            in_another_thread(stat.flush)
            seen = list(metric_list.metrics)
            run.batch_end()
            assert len(metric_list.metrics) == len(seen) + 1

    assert metric_list.metrics == [(0, {"x.sum": 1.0, "x.count": 1}), (1, {"x.sum": 2.0, "x.count": 1})]
    assert metric_list.threads == {threading.get_ident()}


def test_pending_events_are_logged_at_close(metric_list):
    """It delivers open windows, and events that waited."""
    stat = Stat("x", [Aggregation.COUNT], HOUR)
    with Run(metric_list, monitor.ForwardMonitor(), "mine") as run:
        run.batch_end()
        stat.add(1.0)
        in_another_thread(log, "late", value=3)

    assert metric_list.metrics == [(1, {"late/value": 3}), (1, {"x.count": 1})]


def test_pending_events_are_logged_when_the_run_fails(metric_list):
    """A failed run is closed too."""
    stat = Stat("x", [Aggregation.COUNT], HOUR)

    def body():
        with Run(metric_list, monitor.ForwardMonitor(), "mine"):
            stat.add(1.0)
            raise ValueError("bad data")

    with pytest.raises(ValueError, match="bad data"):
        body()

    assert metric_list.metrics == [(0, {"x.count": 1})]


def test_other_events_become_metrics_and_texts(metric_list):
    """Numbers under the name of the event, as what they are; strings as texts."""
    with Run(metric_list, monitor.ForwardMonitor(), "mine"):
        log("my_project.loaded", rows=2**60, ok=True, share=0.5, host="a")

    prefix = "my_project.loaded"
    assert metric_list.metrics == [
        (0, {f"{prefix}/rows": 2**60, f"{prefix}/ok": True, f"{prefix}/share": 0.5})
    ]
    assert type(metric_list.metrics[0][1][f"{prefix}/ok"]) is bool
    assert metric_list.texts == [(0, f"{prefix}/host", "a")]


def test_events_of_the_training_thread_are_logged_at_once(metric_list):
    """A custom loop needn't drain it."""
    with Run(metric_list, run_name="mine") as run, monitor.forward_to(run.logger):
        run.batch_end()
        log("a", x=1)
        seen = list(metric_list.metrics)

    assert seen == [(1, {"a/x": 1})]


def test_events_of_other_threads_are_logged_at_the_next_event(metric_list):
    """They come in order, with its step; a loop without events calls `drain`."""
    with Run(metric_list, run_name="mine") as run:
        forwarding = monitor.forward_to(run.logger)
        in_another_thread(log, "a", x=1)
        run.batch_end()
        after_the_event = list(metric_list.metrics)
        in_another_thread(log, "b", x=2)
        before_draining = list(metric_list.metrics)

        forwarding.drain()

        assert after_the_event == before_draining == [(0, {"a/x": 1})]
        assert metric_list.metrics == [(0, {"a/x": 1}), (1, {"b/x": 2})]


def test_after_the_block_nothing_is_forwarded(metric_list):
    """A second stop does nothing, and the run continues."""
    with Run(metric_list, run_name="mine") as run:
        with monitor.forward_to(run.logger) as forwarding:
            log("a", x=1)
        forwarding.stop()
        log("b", x=2)
        run.batch_end()

    assert metric_list.metrics == [(0, {"a/x": 1})]


def test_a_destination_that_logs_events_does_not_loop():
    """What it logs is forwarded once the first is done."""

    class Chatty(LoggerDestination):
        def __init__(self):
            self.seen = []

        def log_metrics(self, metrics, step=None):
            self.seen.append(dict(metrics))
            if len(self.seen) < 5:
                log("echo", number=len(self.seen))

    chatty = Chatty()
    with Run(chatty, monitor.ForwardMonitor(), "mine") as run:
        log("start", x=0)
        for _ in range(6):
            run.batch_end()

    assert chatty.seen == [{"start/x": 0}, *({"echo/number": number} for number in (1, 2, 3, 4))]


def test_a_full_queue_drops_the_oldest_and_counts(metric_list, caplog):
    """It is reported once."""
    forwarding = monitor.ForwardMonitor(max_pending=2)
    with Run(metric_list, forwarding, "mine") as run:
        for number in range(5):
            in_another_thread(log, "a", x=number)
        run.batch_end()
        assert forwarding.dropped == 3
        for number in range(5, 8):
            in_another_thread(log, "a", x=number)

    assert [metrics["a/x"] for _, metrics in metric_list.metrics] == [3, 4, 6, 7]
    assert forwarding.dropped == 4
    assert caplog.text.count("ForwardMonitor dropped") == 1


def test_items_in_transit_are_not_lost(metric_list, caplog):
    """Another thread may at any time have put an item that is not counted yet, or be delivering it."""
    forwarding = monitor.ForwardMonitor()
    seen = []

    class Looks(collections.deque):
        def append(self, item):
            super().append(item)
            seen.append(forwarding.dropped)

        def popleft(self):
            seen.append(forwarding.dropped)
            item = super().popleft()
            seen.append(forwarding.dropped)
            return item

    count = forwarding._put.count
    forwarding._pending = Looks(maxlen=10)
    forwarding._put.count = lambda item: (count(item), seen.append(forwarding.dropped))

    with Run(metric_list, forwarding, "mine"):
        in_another_thread(log, "a", x=1)
        in_another_thread(log, "b", x=2)

    assert metric_list.metrics == [(0, {"a/x": 1}), (0, {"b/x": 2})]
    assert seen == [0] * 8
    assert caplog.records == []


def test_stopping_after_close_reports_lost_items(metric_list, caplog):
    """It raises no error."""
    with Run(metric_list, run_name="mine") as run:
        forwarding = monitor.ForwardMonitor()
        forwarding.start(run.logger.state, run.logger)
        for number in range(2):
            in_another_thread(log, "a", x=number)

    forwarding.stop()

    assert metric_list.metrics == []
    assert forwarding.dropped == 2
    assert "ForwardMonitor had 2 items pending when the run was closed" in caplog.text


def test_a_value_that_a_destination_refuses_does_not_stop_training(caplog):
    """It is counted, reported once, and the rest is logged."""

    class Picky(LoggerDestination):
        def __init__(self):
            self.seen = []

        def log_metrics(self, metrics, step=None):
            if "bad/x" in metrics:
                raise RecordError("metric 'bad/x' must have another name.")
            self.seen.append(dict(metrics))

    picky = Picky()
    forwarding = monitor.ForwardMonitor()
    with Run(picky, forwarding, "mine") as run:
        for name in ("bad", "good", "bad"):
            in_another_thread(log, name, x=1)
        run.batch_end()

    assert picky.seen == [{"good/x": 1}]
    assert run.logger.faults.value_counts == {("Picky.log_metrics", "RecordError"): 2}
    assert caplog.text.count("must have another name") == 1


def test_the_callback_may_serve_one_run_after_another(metric_list):
    """Each receives what was logged while it ran."""
    forwarding = monitor.ForwardMonitor()
    for number in range(2):
        with Run(metric_list, forwarding, "mine"):
            log("a", x=number)
        log("between", x=0)

    assert metric_list.metrics == [(0, {"a/x": 0}), (0, {"a/x": 1})]


def test_close_without_init(metric_list):
    """A callback that fails before it does not matter."""

    class FailsToStart(Callback):
        def init(self, state, logger):
            raise RuntimeError("no licence")

    with (
        pytest.raises(RuntimeError, match="no licence"),
        Run(metric_list, [FailsToStart(), monitor.ForwardMonitor()], "mine"),
    ):
        pass

    assert metric_list.metrics == []


def test_a_forwarder_that_was_stopped_is_forgotten(metric_list):
    """Nothing keeps it."""
    forwarding = monitor.ForwardMonitor()
    with Run(metric_list, forwarding, "mine") as run:
        pass
    reference = weakref.ref(forwarding)

    del forwarding, run
    gc.collect()

    assert reference() is None


def test_a_queue_of_nothing_is_refused():
    """It must hold one event at least."""
    with pytest.raises(ValueError, match="max_pending must be at least 1"):
        monitor.ForwardMonitor(0)


def test_a_windows_event_arrives_in_a_trainer(metric_list):
    """Windows of a Stat that is updated during training reach the destinations, on time or at close."""
    import torch

    from events import Event, Trainer

    stat = Stat("batch.rows", [Aggregation.SUM], timedelta(milliseconds=1))

    class Feeds(Callback):
        def run_event(self, event, state, logger):
            if event is Event.BATCH_START:
                stat.add(len(state.batch[0]))

    model = torch.nn.Linear(3, 2)
    trainer = Trainer(
        model,
        [(torch.randn(4, 3), torch.randint(2, (4,))) for _ in range(8)],
        max_duration="1ep",
        loss_fn=torch.nn.functional.cross_entropy,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[Feeds(), monitor.ForwardMonitor()],
        loggers=metric_list,
        device="cpu",
    )
    trainer.fit()
    trainer.close()

    rows = [
        (step, metrics["batch.rows.sum"])
        for step, metrics in metric_list.metrics
        if "batch.rows.sum" in metrics
    ]
    assert sum(value for _, value in rows) == 32.0
    assert all(0 <= step <= 8 for step, _ in rows)


def test_a_forked_child_forwards_nothing(in_child):
    """A worker process that logs events does not write to the parent's destinations."""
    printed = in_child(
        """
        import os, warnings
        from datetime import UTC, datetime
        from destinations import LoggerDestination
        from events import MonitorEvent, Run, monitor
        warnings.simplefilter("ignore", DeprecationWarning)

        class Prints(LoggerDestination):
            def log_metrics(self, metrics, step=None):
                print(os.getpid() == parent, dict(metrics), flush=True)

        parent = os.getpid()
        with Run(Prints(), monitor.ForwardMonitor(), "mine") as run:
            child = os.fork()
            monitor.log_event(MonitorEvent("a", datetime.now(UTC), {"in_child": child == 0}))
            if child == 0:
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """
    )

    assert printed == "True {'a/in_child': False}"
