"""Tests values on a device: they arrive in order and unchanged without a wait, or are counted as lost."""

import importlib.util
import pathlib
import sys

import pytest
import torch

from destinations import InMemory, LoggerDestination, RunDirectory
from events import (
    Callback,
    DeviceCopies,
    Engine,
    Event,
    Logger,
    Phase,
    RecordError,
    State,
    Trainer,
    WriteRate,
)

_spec = importlib.util.spec_from_file_location("event_fakes", pathlib.Path(__file__).with_name("fakes.py"))
fakes = sys.modules.setdefault(_spec.name, importlib.util.module_from_spec(_spec))
_spec.loader.exec_module(fakes)
Clock, FakeDevice, OnDevice = fakes.Clock, fakes.FakeDevice, fakes.OnDevice


class Received(LoggerDestination):
    """Notes what arrives, with where the run stood."""

    def __init__(self, state):
        self.state = state
        self.calls = []

    def _note(self, *what):
        self.calls.append((*what, int(self.state.timestamp.batch)))

    def log_metrics(self, metrics, step=None):
        self._note("metrics", metrics, step)

    def log_text(self, text, name="Text", step=None):
        self._note("text", text, step)

    def log_hyperparameters(self, hyperparameters):
        self._note("hyperparameters", hyperparameters)

    def log_images(self, images, name="Images", channels_last=False, step=None, *rest):
        self._note("images", images, step)

    def log_histogram(self, values, name="Histogram", step=None, bins=64):
        self._note("histogram", values, step)

    def upload_file(self, state, remote_file_name, file_path, *, overwrite):
        self._note("file", remote_file_name)

    def can_upload_files(self):
        return True

    def fit_end(self, state, logger):
        self._note("fit_end")

    def eval_end(self, state, logger):
        self._note("eval_end")


class Setup:
    """A run on a fake device."""

    def __init__(self, device=None, *, destination=None, **policy):
        self.device = device or FakeDevice()
        self.clock = policy.pop("clock", Clock())
        self.state = State("r")
        self.received = Received(self.state)
        policy.setdefault("open_device", lambda _: self.device)
        policy.setdefault("gather_seconds", 0)
        self.logger = Logger(
            self.state,
            destination or self.received,
            raise_errors=True,
            strict=True,
            device_copies=DeviceCopies(clock=self.clock, sleep=self.clock.sleep, **policy),
        )

    def next_batch(self):
        self.state.timestamp = self.state.timestamp.to_next_batch()


def test_records_logged_meanwhile_keep_their_order_step_and_timestamp(tmp_path):
    """Numbers, texts and hyperparameters wait behind it.

    Destinations read the run's position at the call from the state.
    """
    run = Setup()

    run.logger.log_metrics({"loss": OnDevice(0.5)})
    run.next_batch()
    run.logger.log_metrics({"lr": 0.1})
    run.logger.log_text("hello")
    run.next_batch()
    run.logger.log_hyperparameters({"a": 1})
    run.logger.log_metrics({"loss": OnDevice(0.25)}, 77)
    run.next_batch()
    run.device.land()
    run.logger.poll()

    assert run.received.calls == [
        ("metrics", {"loss": 0.5}, 0, 0),
        ("metrics", {"lr": 0.1}, 1, 1),
        ("text", "hello", 1, 1),
        ("hyperparameters", {"a": 1}, 2),
        ("metrics", {"loss": 0.25}, 77, 2),
    ]
    assert int(run.state.timestamp.batch) == 3


def test_a_file_is_staged_at_once(tmp_path):
    """The file may be gone after the call returns, so it can't wait."""
    run = Setup()
    file = tmp_path / "a"
    file.write_text("x")

    run.logger.log_metrics({"loss": OnDevice(0.5)})
    run.logger.upload_file("a", file)

    assert run.received.calls == [("file", "a", 0)]


def test_a_record_has_the_phase_of_its_call():
    """An evaluation's metric that lands later still belongs to the evaluation."""
    phases = []

    class SeesPhase(LoggerDestination):
        def log_metrics(self, metrics, step=None):
            phases.append(state.phase)

    device, state = FakeDevice(), State("r", phase=Phase.EVAL)
    logger = Logger(
        state, SeesPhase(), device_copies=DeviceCopies(open_device=lambda _: device, gather_seconds=0)
    )

    logger.log_metrics({"a": OnDevice(1.0)})
    state.phase = Phase.TRAIN
    device.land()
    logger.poll()

    assert phases == [Phase.EVAL]
    assert state.phase is Phase.TRAIN


def test_changes_by_the_caller_do_not_affect_pending_copies():
    """Dicts, lists and arrays in host memory are the caller's again when the call returns."""
    run = Setup()
    metrics, image = {"a": 1.0}, torch.zeros(3, 2, 2)

    run.logger.log_metrics({"loss": OnDevice(0.5)})
    run.logger.log_metrics(metrics)
    run.logger.log_images([image])
    metrics["a"] = 2.0
    image.fill_(7)
    run.device.land()
    run.logger.poll()

    assert run.received.calls[1][1] == {"a": 1.0}
    assert run.received.calls[2][1][0].sum() == 0


def test_an_event_delivers_completed_copies():
    """A loop that logs rarely needn't wait for its next record."""
    run = Setup()
    engine = Engine(run.state, run.logger)

    run.logger.log_metrics({"loss": OnDevice(0.5)})
    run.device.land()
    engine.run_event(Event.BATCH_START)

    assert run.received.calls == [("metrics", {"loss": 0.5}, 0, 0)]


def test_a_device_without_pending_copies_is_not_queried():
    """A loop of plain numbers costs no query."""
    run = Setup()
    engine = Engine(run.state, run.logger)
    run.logger.log_metrics({"loss": OnDevice(0.5)})
    run.device.land()
    run.logger.poll()
    asked = run.device.queries

    for _ in range(5):
        run.logger.log_metrics({"a": 1.0})
        engine.run_event(Event.BATCH_END)

    assert run.device.queries == asked


@pytest.mark.parametrize(
    "event", [Event.FIT_END, Event.EVAL_END, Event.EVAL_STANDALONE_END, Event.PREDICT_END]
)
def test_the_end_of_a_phase_waits_for_pending_copies(event):
    """It is there before the destination receives the event, even if a callback logged it at that event."""
    device = FakeDevice()
    run = Setup(device, clock=Clock(on_sleep=device.land))
    heard = []
    run.received.run_event = lambda event, state, logger: heard.append((event, len(run.received.calls)))
    engine = Engine(run.state, run.logger)

    run.logger.log_metrics({"loss": OnDevice(0.5)})
    engine.run_event(event)

    assert heard == [(event, 1)]


@pytest.mark.parametrize("end", ["flush", "close"])
def test_flush_and_close_wait_for_pending_copies(end):
    """Nothing accepted is lost if the device continues."""
    device = FakeDevice()
    run = Setup(device, clock=Clock(on_sleep=device.land))
    engine = Engine(run.state, run.logger)
    run.logger.log_metrics({"loss": OnDevice(0.5)})

    (run.logger.flush if end == "flush" else engine.close)()

    assert run.received.calls == [("metrics", {"loss": 0.5}, 0, 0)]
    assert run.logger.lost_values == 0


def test_a_checkpoint_waits_for_pending_copies(tmp_path):
    """Records logged before it belong to it, and arrive before a destination gives its state."""
    device, memory, had = FakeDevice(), InMemory(), []
    memory.state_dict = lambda: had.append(sum("loss" in record.value for record in memory.records))

    class LogsLoss(Callback):
        def after_loss(self, state, logger):
            logger.log_metrics({"loss": OnDevice(0.5)})

    clock, model = Clock(on_sleep=device.land), torch.nn.Linear(1, 1)
    with Trainer(
        model,
        [(torch.ones(2, 1), torch.ones(2, 1))] * 3,
        max_duration="1ep",
        loss_fn=torch.nn.functional.mse_loss,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=LogsLoss(),
        loggers=memory,
        device="cpu",
        save_folder=tmp_path,
        save_interval="1ba",
        device_copies=DeviceCopies(
            open_device=lambda _: device, gather_seconds=60, clock=clock, sleep=clock.sleep
        ),
    ) as trainer:
        trainer.fit()

    assert had == [1, 2, 3, 3]


def test_flush_gives_up_at_its_deadline_and_the_values_come_later(caplog):
    """A device that hangs does not block beyond the deadline."""
    run = Setup(wait_seconds=2.0)
    run.logger.log_metrics({"loss": OnDevice(0.5)})

    run.logger.flush()
    waited = run.clock.now - 1000
    run.device.land()
    run.logger.poll()

    assert 2.0 <= waited < 2.1
    assert (
        "copies from a device were not complete at the deadline; their values are delivered later"
        in caplog.text
    )
    assert run.received.calls == [("metrics", {"loss": 0.5}, 0, 0)]


def test_close_gives_up_at_its_deadline_and_counts(caplog):
    """The numbers of the same call, and later records, still arrive."""
    run = Setup(wait_seconds=2.0)
    engine = Engine(run.state, run.logger)
    run.logger.log_metrics({"loss": OnDevice(0.5), "lr": 0.1})
    run.logger.log_metrics({"gone": OnDevice(0.5)})
    run.logger.log_text("after")

    engine.close()

    assert [call[:2] for call in run.received.calls] == [("metrics", {"lr": 0.1}), ("text", "after")]
    assert run.logger.lost_values == 2
    assert "2 values on a device were lost." in caplog.text


class WithRate(Setup):
    """A run whose destination has a write rate that aggregates."""

    def __init__(self, aggregate, **policy):
        self.memory = InMemory(write_rate=WriteRate(every_steps=3, aggregate=aggregate))
        super().__init__(destination=self.memory, **policy)

    def log(self, *values):
        for value in values:
            self.logger.log_metrics({"loss": value})
            self.next_batch()

    @property
    def written(self):
        return [(one.step, one.value) for one in self.memory.records]


@pytest.mark.parametrize(
    ("aggregate", "expected"), [("mean", 3.0), ("sum", 9.0), ("min", 2.0), ("first", 4.0), ("count", 3)]
)
def test_an_aggregate_of_values_on_a_device_is_written_when_all_have_landed(aggregate, expected):
    """Some values are on the device, some aren't; every value counts once, whenever it lands."""
    run = WithRate(aggregate)

    run.log(OnDevice(100.0))
    run.device.land()
    run.log(OnDevice(4.0), 3.0, OnDevice(2.0))
    first = run.written
    run.device.land(1)
    run.logger.poll()
    between = run.written
    run.device.land()
    run.logger.poll()

    assert [step for step, _ in first] == [0]
    assert between == first
    assert run.written == [*first, (3, {"loss": expected})]


def test_an_aggregate_leaves_out_values_that_were_lost():
    """They are counted as lost; if none is left, nothing is written."""
    run = WithRate("sum", slots=1, when_full="drop")

    run.log(OnDevice(100.0))
    run.device.land()
    run.log(OnDevice(4.0), OnDevice(3.0), 2.0)
    run.device.land()
    run.logger.log_metrics({"other": OnDevice(1.0)})
    run.log(OnDevice(7.0))
    run.device.land()
    run.logger.flush()

    assert run.written == [(0, {"loss": 100.0}), (3, {"loss": 6.0}), (4, {"other": 1.0})]
    assert run.logger.lost_values == 2


def test_slots_are_made_once_and_used_again():
    """The length of the run does not matter."""
    run = Setup(slots=2)

    for step in range(10):
        run.logger.log_metrics({"loss": OnDevice(float(step))}, step)
        run.device.land()
    run.logger.poll()

    assert run.device.rows_made == 2
    assert [call[1]["loss"] for call in run.received.calls] == [float(step) for step in range(10)]


def test_more_values_than_a_slot_holds_take_several():
    """They arrive as one record."""
    run = Setup()

    run.logger.log_metrics({str(index): OnDevice(index) for index in range(150)})
    run.device.land()
    run.logger.poll()

    assert run.received.calls == [("metrics", {str(index): index for index in range(150)}, 0, 0)]


def test_a_call_queues_one_snapshot_and_calls_share_copies_and_events():
    """Ten values of a step of one millisecond: a kernel each step, a copy and an event for fifty of them."""
    run = Setup(gather_seconds=0.05)
    engine = Engine(run.state, run.logger)

    for step in range(500):
        run.logger.log_metrics({f"m{index}": OnDevice(float(step + index)) for index in range(10)}, step)
        engine.run_event(Event.BATCH_END)
        run.clock.now += 0.001
        run.device.land(len(run.device.flights) - 1)

    queued = [kind.split()[0] for kind in run.device.queued]
    assert queued.count("snapshot") == 500
    assert queued.count("copy") == queued.count("event") == 10
    assert run.device.queries < 100
    assert run.clock.slept == 0


def test_rows_arrive_with_a_later_call_or_event_within_the_time_to_gather_and_look():
    """They arrive in order, each with the step and the timestamp of its call."""
    run = Setup(gather_seconds=0.05)
    engine = Engine(run.state, run.logger)
    waited = []

    for step in range(200):
        run.logger.log_metrics({"a": OnDevice(float(step)), "lr": 0.1, "n": OnDevice(step)}, step)
        run.next_batch()
        run.device.land()
        engine.run_event(Event.BATCH_END)
        waited.append(step + 1 - len(run.received.calls))
        run.clock.now += 0.001

    arrived = len(run.received.calls)
    assert run.received.calls == [
        ("metrics", {"a": float(step), "lr": 0.1, "n": step}, step, step) for step in range(arrived)
    ]
    assert 50 < max(waited) <= 101
    assert int(run.state.timestamp.batch) == 200


def test_a_call_after_a_pause_is_not_kept_for_later_ones():
    """A loop of long steps has each value at the event after its copy."""
    run = Setup(gather_seconds=0.05)
    engine = Engine(run.state, run.logger)

    for step in range(5):
        run.logger.log_metrics({"a": OnDevice(float(step))}, step)
        run.device.land()
        run.clock.now += 0.06
        engine.run_event(Event.BATCH_END)

    assert [call[2] for call in run.received.calls] == [0, 1, 2, 3, 4]


def test_numbers_of_the_host_keep_their_place_between_rows_on_their_way():
    """They wait for the copy of the row before them, and need no copy of their own."""
    run = Setup(gather_seconds=0.05)

    for step in range(3):
        run.logger.log_metrics({"a": OnDevice(float(step))}, step)
        run.logger.log_metrics({"b": step, "c": torch.tensor(0.5)}, step)
    early = list(run.received.calls)
    run.clock.on_sleep = run.device.land
    run.logger.flush()

    assert early == []
    assert [call[1] for call in run.received.calls] == [
        values for step in range(3) for values in ({"a": float(step)}, {"b": step, "c": 0.5})
    ]


def test_a_change_of_streams_ends_the_rows_of_a_copy():
    """Each copy is queued behind the snapshots that it reads."""
    run = Setup(gather_seconds=0.05)
    streams = [0, 0, 7, 0]
    run.logger.log_metrics({"a": OnDevice(0.0)})
    run.device.queued.clear()

    for stream in streams:
        run.device.current_stream = stream
        run.logger.log_metrics({"a": OnDevice(0.0)})
    run.clock.on_sleep = run.device.land
    run.logger.flush()

    assert [kind for kind in run.device.queued if kind.startswith("copy")] == [
        "copy of 2 on 0",
        "copy of 1 on 7",
        "copy of 1 on 0",
    ]
    assert len(run.received.calls) == 5


def test_one_name_may_be_of_other_dtypes_at_each_call():
    """An integer stays an integer, even if the same name had a float before."""
    run = Setup(gather_seconds=0.05)

    for value, dtype in (
        (0.5, torch.float32),
        (2**62 + 1, torch.int64),
        (1.5, torch.float32),
        (True, torch.bool),
    ):
        run.logger.log_metrics({"a": OnDevice(value, dtype)})
    run.clock.on_sleep = run.device.land
    run.logger.flush()

    assert [str(call[1]["a"]) for call in run.received.calls] == ["0.5", str(2**62 + 1), "1.5", "True"]


def test_lost_rows_cost_only_their_own_values():
    """The numbers beside them arrive, in a namespace too; the device isn't asked again."""
    run = Setup(gather_seconds=0.05)

    with run.logger.namespace("train"):
        for step in range(3):
            run.logger.log_metrics({"a": OnDevice(1.0), "lr": 0.1, "b": OnDevice(2.0)}, step)
            run.logger.log_metrics({"alone": OnDevice(1.0)}, step)
    run.device.failure = RuntimeError("an illegal memory access was encountered")
    run.logger.flush()

    assert [call[1:3] for call in run.received.calls] == [({"train/lr": 0.1}, step) for step in range(3)]
    assert run.logger.lost_values == 9


def test_rows_after_a_deadline_are_not_mixed_with_those_that_were_dropped():
    """Each combination of names gets new memory."""
    run = Setup(gather_seconds=60, wait_seconds=1.0)
    run.logger.log_metrics({"a": OnDevice(1.0)}, 0)
    run.logger.log_metrics({"b": OnDevice(2.0)}, 0)
    run.logger.deliver_pending(is_last=True)
    run.clock.on_sleep = run.device.land

    for step in range(1, 4):
        run.logger.log_metrics({"a": OnDevice(1.0 + step)}, step)
        run.logger.log_metrics({"b": OnDevice(2.0 + step)}, step)
    run.logger.flush()

    assert [call[1:3] for call in run.received.calls] == [
        values for step in range(1, 4) for values in (({"a": 1.0 + step}, step), ({"b": 2.0 + step}, step))
    ]
    assert run.logger.lost_values == 2


def test_a_ring_that_is_full_of_gathered_rows_sends_them():
    """Gathered rows that wait for later calls are sent before anything is lost or waited for."""
    run = Setup(gather_seconds=60, slots=8)
    run.clock.on_sleep = run.device.land

    for step in range(100):
        run.logger.log_metrics({"a": OnDevice(float(step))}, step)
    run.logger.flush()

    assert [call[2] for call in run.received.calls] == [*range(100)]
    assert run.logger.lost_values == 0


def test_a_full_ring_waits_for_a_slot():
    """It waits for one slot only."""
    device = FakeDevice()
    run = Setup(device, slots=2, clock=Clock(on_sleep=lambda: device.land(1)))

    for step in range(3):
        run.logger.log_metrics({"loss": OnDevice(float(step))}, step)

    assert run.clock.slept == 1
    assert len(device.flights) == 2
    assert run.logger.lost_values == 0


def test_a_full_ring_that_stays_full_loses_the_value_at_the_deadline():
    """It is counted, and its siblings arrive."""
    run = Setup(slots=1, wait_seconds=1.0)
    run.logger.log_metrics({"loss": OnDevice(1.0)}, 0)

    run.logger.log_metrics({"loss": OnDevice(2.0), "lr": 0.1}, 1)
    run.device.land()
    run.logger.poll()

    assert [call[1:3] for call in run.received.calls] == [({"loss": 1.0}, 0), ({"lr": 0.1}, 1)]
    assert run.logger.lost_values == 1


def test_a_full_ring_drops_where_the_policy_says_so():
    """Nothing waits."""
    run = Setup(slots=1, when_full="drop")
    run.logger.log_metrics({"loss": OnDevice(1.0)}, 0)

    run.logger.log_metrics({"loss": OnDevice(2.0), "lr": 0.1}, 1)
    run.logger.log_images(OnDevice(torch.zeros(3, 2, 2)))
    run.device.land()
    run.logger.poll()

    assert [call[1:3] for call in run.received.calls] == [({"loss": 1.0}, 0), ({"lr": 0.1}, 1)]
    assert (run.clock.slept, run.logger.lost_values) == (0, 2)


def test_a_device_that_fails_is_asked_no_more(caplog):
    """A CUDA error is permanent: it is reported once, pending values are lost, everything else arrives."""
    run = Setup()
    run.logger.log_metrics({"loss": OnDevice(1.0), "lr": 0.1})
    run.device.failure = RuntimeError("an illegal memory access was encountered")

    run.logger.poll()
    asked = run.device.queries
    run.logger.log_metrics({"loss": OnDevice(2.0), "lr": 0.2})
    run.logger.flush()

    assert [call[1] for call in run.received.calls] == [{"lr": 0.1}, {"lr": 0.2}]
    assert run.device.queries == asked
    assert run.logger.lost_values == 2
    assert caplog.text.count("the device failed") == 1


def test_a_snapshot_that_fails_costs_its_value_and_not_the_slot(caplog):
    """If it can't be read in the ordinary way either, it is counted, and each reason is reported once.

    The other values arrive, and the slot is free.
    """
    run = Setup(slots=1)
    run.device.refuses = RuntimeError("no kernel for this dtype")

    for _ in range(2):
        run.logger.log_metrics({"loss": OnDevice(1.0), "lr": 0.1})
    run.device.refuses = None
    run.logger.log_metrics({"loss": OnDevice(2.0)})
    run.device.land()
    run.logger.poll()

    assert [call[1] for call in run.received.calls] == [{"lr": 0.1}, {"lr": 0.1}, {"loss": 2.0}]
    assert run.logger.lost_values == 2
    assert caplog.text.count("could not copy a value from its device") == 2
    assert caplog.text.count("no kernel for this dtype") >= 1


def test_a_snapshot_that_fails_is_read_by_waiting(caplog):
    """A device that can't copy in the background costs time, but no value."""

    class Readable(OnDevice):
        def item(self):
            return self.value

    run = Setup(slots=1)
    run.device.refuses = RuntimeError("no kernel for this dtype")

    run.logger.log_metrics({"loss": Readable(1.0), "lr": 0.1})
    run.logger.poll()

    assert [call[1] for call in run.received.calls] == [{"loss": 1.0, "lr": 0.1}]
    assert run.logger.lost_values == 0
    assert caplog.text.count("could not copy a value from its device") == 1


def test_a_copy_that_cannot_be_read_is_a_failure_of_the_device():
    """Later records are not delayed beyond it."""
    run = Setup()
    run.logger.log_metrics({"loss": OnDevice(1.0)})
    run.logger.log_metrics({"lr": 0.1})
    run.device.flights[0].read = lambda: 1 / 0
    run.device.land()

    run.logger.poll()

    assert [call[1] for call in run.received.calls] == [{"lr": 0.1}]
    assert run.logger.lost_values == 1


def test_while_a_graph_is_captured_values_on_a_device_are_refused():
    """The message has the reason.

    The numbers beside them arrive, and the device is asked nothing, which would break the capture.
    """
    run = Setup()
    run.logger.log_metrics({"loss": OnDevice(1.0)})
    run.device.captures = True
    asked = run.device.queries

    with pytest.raises(
        RecordError, match=r"outside of a graph capture.*Log the graph's output tensors after replay"
    ):
        run.logger.log_metrics({"loss": OnDevice(2.0), "lr": 0.1}, 5)
    with pytest.raises(RecordError, match="outside of a graph capture"):
        run.logger.log_images(OnDevice(torch.zeros(3, 2, 2)))
    during = run.device.queries
    run.device.captures = False
    run.device.land()
    run.logger.poll()

    assert during == asked
    assert [call[1:3] for call in run.received.calls] == [({"loss": 1.0}, 0), ({"lr": 0.1}, 5)]


def test_two_devices_have_a_ring_each():
    """A record of both arrives when both have landed."""
    devices = {"fake:0": FakeDevice(), "fake:1": FakeDevice()}
    run = Setup(open_device=lambda tensor: devices[tensor.device])

    run.logger.log_metrics({"a": OnDevice(1.0), "b": OnDevice(2.0, device="fake:1")})
    devices["fake:1"].land()
    run.logger.poll()
    early = list(run.received.calls)
    devices["fake:0"].land()
    run.logger.poll()

    assert early == []
    assert run.received.calls[0][1] == {"a": 1.0, "b": 2.0}


def test_a_device_without_asynchronous_copies_is_waited_for():
    """The value is there at once."""

    class Waits(OnDevice):
        def item(self):
            return self.value

    run = Setup(open_device=lambda _: None)

    run.logger.log_metrics({"a": Waits(1.0)})

    assert run.received.calls == [("metrics", {"a": 1.0}, 0, 0)]


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (OnDevice(torch.zeros(8)), r"metric 'bad' must be a scalar, got shape \(8,\)\. Log a mean"),
        (
            OnDevice(1j, torch.complex64),
            r"metric 'bad' must be a scalar, got a value of dtype torch\.complex64",
        ),
    ],
)
def test_values_that_are_no_scalars_are_found_without_reading_them(value, complaint):
    """The call reports an error for that key."""
    run = Setup()

    with pytest.raises(RecordError, match=complaint):
        run.logger.log_metrics({"bad": value, "good": OnDevice(1.0)})
    run.device.land()
    run.logger.poll()

    assert run.received.calls[0][1] == {"good": 1.0}


def test_media_on_a_device_are_snapshotted_too():
    """Images, masks and histograms arrive as host tensors, as they were at the call."""
    memory, device = InMemory(), FakeDevice()
    logger = Logger(
        State("r"),
        memory,
        raise_errors=True,
        strict=True,
        device_copies=DeviceCopies(open_device=lambda _: device, gather_seconds=0),
    )
    array = torch.zeros(3, 2, 2)

    logger.log_images([OnDevice(array), torch.ones(3, 2, 2)], masks={"m": OnDevice(torch.zeros(2, 2, 2))})
    logger.log_audio(OnDevice(torch.zeros(10)), 8000)
    logger.log_video(OnDevice(torch.zeros(2, 3, 4, 5)), 30)
    logger.log_histogram(OnDevice(array))
    logger.log_point_cloud(OnDevice(torch.zeros(5, 3)), colors=OnDevice(torch.zeros(5, 3)))
    array.fill_(9)
    before = len(memory.records)
    device.land()
    logger.poll()

    assert before == 0
    assert [record.kind for record in memory.records] == [
        "images",
        "audio",
        "video",
        "histogram",
        "point_cloud",
    ]
    assert memory.records[0].value["images"][0].sum() == 0
    assert memory.records[3].value["values"].sum() == 0
    assert memory.records[4].value["colors"].shape == (5, 3)


@pytest.mark.parametrize("copies", [True, False], ids=["in the background", "by waiting"])
def test_cells_of_a_table_on_a_device_are_those_of_the_call(copies, tmp_path):
    """Numbers as from host memory, alone and nested, and a text for one that is too large, which is not copied."""
    memory, device = InMemory(), FakeDevice()
    logger = Logger(
        State("r"),
        [memory, RunDirectory(tmp_path / "run")],
        raise_errors=True,
        strict=True,
        device_copies=DeviceCopies(open_device=lambda _: device if copies else None),
    )
    engine = Engine(logger.state, logger)
    engine.run_event("init")
    scalar, array = OnDevice(torch.tensor(0.5)), OnDevice(torch.tensor([1, 2]))
    large = OnDevice(torch.zeros(3, 64, 64))
    if not copies:
        for tensor in (scalar, array):
            tensor.cpu = lambda tensor=tensor: tensor.value.clone()

    logger.log_table([*"abcd"], [["x", scalar, [array, {"k": scalar}], large]])
    scalar.value.fill_(9)
    array.value.fill_(9)
    before = len(memory.records)
    device.land()
    engine.close()

    assert before == (0 if copies else 1)
    assert memory.tables["Table"][0].rows == [
        ["x", 0.5, [[1, 2], {"k": 0.5}], "<OnDevice of torch.float32, shape (3, 64, 64)>"]
    ]
    (path,) = (tmp_path / "run" / "tables").rglob("*.csv")
    assert path.read_text().splitlines()[1].startswith("x,0.5,")


def test_a_late_refusal_is_reported():
    """Its caller is long gone."""

    class RefusesLate(LoggerDestination):
        def log_metrics(self, metrics, step=None):
            raise RecordError("metric must be positive, got -1.")

    device = FakeDevice()
    logger = Logger(
        State("r"), RefusesLate(), device_copies=DeviceCopies(open_device=lambda _: device, gather_seconds=0)
    )

    logger.log_metrics({"a": OnDevice(-1.0)})
    device.land()
    logger.poll()

    assert logger.faults.value_counts == {("RefusesLate.log_metrics", "RecordError"): 1}


def test_a_forked_child_touches_no_device(monkeypatch):
    """Pending copies belong to the parent."""
    run = Setup()
    run.logger.log_metrics({"loss": OnDevice(1.0)})
    asked = run.device.queries
    monkeypatch.setattr("os.getpid", lambda: -1)

    run.logger.poll()

    assert run.device.queries == asked
    assert run.received.calls == []


@pytest.mark.parametrize("bad", [{"slots": 0}, {"when_full": "merge"}, {"wait_seconds": -1}])
def test_a_policy_that_makes_no_sense_is_refused(bad):
    """The error comes when it is made."""
    with pytest.raises(ValueError):  # noqa: PT011  # attrs' own texts
        DeviceCopies(**bad)
