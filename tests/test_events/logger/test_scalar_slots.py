"""The memory that scalars pass through keeps every bit, and is read only once its event says so.

Here on the CPU.
"""

import pytest
import torch

from destinations import InMemory
from events import DeviceCopies, Logger, State
from events.logger.cuda import ScalarSlot


class Event:
    """Is complete when the test sets it."""

    def __init__(self):
        self.recorded = []
        self.is_complete = False

    def record(self, stream):
        self.recorded.append(stream)

    def query(self):
        return self.is_complete


def _slot(capacity=8):
    event = Event()
    staging, landed = (torch.zeros(capacity, dtype=torch.int64) for _ in range(2))
    return ScalarSlot(staging, landed, event, lambda: "the stream"), event


VALUES = [
    (torch.float64, 0.1),
    (torch.float32, 0.5),
    (torch.float16, 0.5),
    (torch.bfloat16, -0.5),
    (torch.float8_e4m3fn, 0.5),
    (torch.bool, True),
    (torch.bool, False),
    (torch.int64, 2**63 - 1),
    (torch.int64, -(2**63)),
    (torch.uint64, 2**64 - 1),
    (torch.uint8, 255),
    (torch.int32, -3),
]


@pytest.mark.parametrize(("dtype", "value"), VALUES, ids=str)
def test_every_dtype_keeps_its_value_and_its_kind(dtype, value):
    """A float in between would lose the last bits of an integer."""
    slot, _ = _slot()

    slot.start([torch.tensor(value, dtype=dtype)])

    (number,) = slot.read()
    assert (number, type(number)) == (value, type(value))


def test_kinds_mix_in_one_call_and_a_slot_is_used_again():
    """The second time has fewer values: nothing of the first is left."""
    slot, _ = _slot()

    slot.start([torch.tensor(0.5), torch.tensor(3), torch.tensor([[True]]), torch.tensor(float("nan"))])
    first = slot.read()
    slot.start([torch.tensor(7), torch.tensor(0.25)])

    assert str(first) == "[0.5, 3, True, nan]"
    assert slot.read() == [7, 0.25]


def test_a_call_takes_one_kernel_for_each_kind_of_number(monkeypatch):
    """Where tensors of several dtypes are given at once, torch would copy them one by one."""
    slot, _ = _slot()
    copied, copy = [], torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda into, tensors: copied.append(len(tensors)) or copy(into, tensors)
    )

    slot.start([torch.tensor(0.5), torch.tensor(3), torch.tensor([0.25]), torch.tensor(1.0)])

    assert sorted(copied) == [1, 3]
    assert slot.read() == [0.5, 3, 0.25, 1.0]


def test_what_changes_after_the_start_is_not_seen():
    """Nor is a gradient recorded for it."""
    slot, _ = _slot()
    loss = torch.tensor(0.5, requires_grad=True)

    slot.start([loss])
    with torch.no_grad():
        loss.fill_(9)

    assert slot.read() == [0.5]


def test_the_event_is_recorded_behind_the_copy_on_the_current_stream():
    """Only the event tells whether the copy is complete."""
    slot, event = _slot()

    slot.start([torch.tensor(0.5)])
    before = slot.is_done()
    event.is_complete = True

    assert event.recorded == ["the stream"]
    assert (before, slot.is_done()) == (False, True)


def test_slots_made_and_used_in_inference_mode_work_outside_of_it():
    """An evaluation may be the first to log."""
    slot, _ = _slot()

    with torch.inference_mode():
        slot.start([torch.tensor(0.5)])
        first = slot.read()
    slot.start([torch.tensor(0.25), torch.tensor(1)])

    assert (first, slot.read()) == ([0.5], [0.25, 1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_region_that_logs_continues(recwarn):
    """It is left for the call, and the compiled function computes and logs what the plain one does."""
    memory = InMemory()
    logger = Logger(State("r"), memory, raise_errors=True, device_copies=DeviceCopies())

    def step(x):
        y = (x * 2).sum()
        logger.log_metrics({"y": y.detach(), "lr": lambda: 0.1})
        logger.log_histogram(x)
        return y + 1

    compiled = torch.compile(step, backend="eager")

    results = [compiled(torch.full((3,), float(value))).item() for value in range(3)]

    assert results == [1.0, 7.0, 13.0]
    metrics = [record.value for record in memory.records if record.kind == "metrics"]
    assert metrics == [{"y": 6.0 * value, "lr": 0.1} for value in range(3)]
    assert len(memory.records) == 6
