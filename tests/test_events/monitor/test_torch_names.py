"""Code written for `torch.monitor`, with its import changed, or with some of it still from torch."""

from datetime import UTC, datetime, timedelta

import pytest

from events import Aggregation, MonitorEvent, Stat, monitor

HOUR = timedelta(hours=1)


class Writer:
    """Keeps what a `SummaryWriter` would write."""

    def __init__(self):
        self.scalars = []

    def add_scalar(self, tag, scalar_value, global_step=None, walltime=None):
        self.scalars.append((tag, scalar_value, global_step, walltime is not None))


@pytest.fixture
def events():
    """Gives the list of events that were logged."""
    seen = []
    handle = monitor.register_event_handler(seen.append)
    yield seen
    monitor.unregister_event_handler(handle)


def test_an_event_of_torch_is_passed_on_as_ours(events):
    """Name, instant and values are the same; anything else is still an error."""
    import torch.monitor

    at = datetime(2026, 1, 2, 3, 4, 5)  # noqa: DTZ001  # as torch takes it

    monitor.log_event(torch.monitor.Event("mine.loaded", at, {"count": 3, "note": "fine", "share": 0.5}))

    assert events == [MonitorEvent("mine.loaded", at, {"count": 3, "note": "fine", "share": 0.5})]
    with pytest.raises(TypeError, match="must be an events"):
        monitor.log_event("mine.loaded")


def test_aggregations_of_torch_are_matched_by_name(events):
    """All of them, `VALUE` included; `add` takes its argument by torch's name."""
    import torch.monitor

    theirs = torch.monitor.Aggregation
    members = [theirs.VALUE, theirs.MEAN, theirs.COUNT, theirs.SUM, theirs.MAX, theirs.MIN]

    stat = Stat("loss", members, HOUR, 2)
    stat.add(v=1.0)
    stat.add(v=3.0)

    (event,) = events
    assert dict(event.data) == {
        "loss.value": 3.0,
        "loss.mean": 2.0,
        "loss.count": 2,
        "loss.sum": 4.0,
        "loss.max": 3.0,
        "loss.min": 1.0,
    }


def test_the_tensorboard_handler_of_torch_receives_our_stats():
    """It is registered here, without a bridge."""
    import torch.monitor

    writer = Writer()
    handle = monitor.register_event_handler(torch.monitor.TensorboardEventHandler(writer))

    Stat("loss", [Aggregation.SUM], HOUR, 1).add(2.0)
    monitor.log_event(MonitorEvent("other", datetime.now(UTC), {"a": 1}))
    monitor.unregister_event_handler(handle)
    Stat("loss", [Aggregation.SUM], HOUR, 1).add(2.0)

    assert writer.scalars == [("loss.sum", 2.0, None, True)]


def test_our_tensorboard_handler_gives_steps():
    """One more with each window; other events are ignored."""
    writer = Writer()
    handle = monitor.register_event_handler(monitor.TensorboardEventHandler(writer))
    stat = Stat("loss", [Aggregation.MAX], HOUR)

    for value in (2.0, 5.0):
        stat.add(value)
        stat.flush()
    monitor.log_event(MonitorEvent("other", datetime.now(UTC), {"a": 1}))
    monitor.unregister_event_handler(handle)

    assert writer.scalars == [("loss.max", 2.0, 0, True), ("loss.max", 5.0, 1, True)]


def test_the_type_of_a_value_has_torchs_name():
    """Annotations of handlers use it."""
    assert set(monitor.data_value_t.__args__) == {str, float, int, bool}
