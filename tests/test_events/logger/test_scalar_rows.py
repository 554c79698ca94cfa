"""The memory that scalars pass through keeps every bit, and is read only once its event says so.

Here on the CPU.
"""

import pytest
import torch

from destinations import InMemory
from events import DeviceCopies, Logger, State
from events.logger.cuda import ScalarRows


class Event:
    """Is complete when the test sets it."""

    def __init__(self):
        self.recorded = []
        self.is_complete = False

    def record(self, stream):
        self.recorded.append(stream)

    def query(self):
        return self.is_complete


class Rows:
    """Rows in host memory, with events that are kept."""

    def __init__(self, rows=4, capacity=8):
        self.events = []
        on_device, on_host = (torch.zeros((rows, capacity), dtype=torch.int64) for _ in range(2))
        self.memory = ScalarRows(on_device, on_host, self._event, lambda: "the stream", lambda: 0)

    def _event(self):
        self.events.append(Event())
        return self.events[-1]

    def sent(self, *rows):
        """Takes a snapshot of each row, and returns the copy of all."""
        layouts = [self.memory.layout(scalars) for scalars in rows]
        for row, (layout, scalars) in enumerate(zip(layouts, rows, strict=True)):
            self.memory.make_cells(layout, row)
            layout.copy(layout.cells[row], scalars)
        return self.memory.send(0, layouts, "the stream")

    def read(self, *rows):
        """Returns what arrives of rows."""
        return [numbers[: len(row)] for numbers, row in zip(self.sent(*rows).read(), rows, strict=True)]


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
    [[number]] = Rows().read([torch.tensor(value, dtype=dtype)])

    assert (number, type(number)) == (value, type(value))


def test_kinds_mix_in_a_row_and_rows_are_used_again():
    """Rows of several lengths come in one copy; the second time, nothing of the first is left."""
    rows = Rows()

    first = rows.read(
        [torch.tensor(0.5), torch.tensor(3), torch.tensor([[True]]), torch.tensor(float("nan"))],
        [torch.tensor(2**62 + 1)],
    )
    second = rows.read([torch.tensor(7), torch.tensor(0.25)], [torch.tensor(0.5), torch.tensor(1.5)])

    assert str(first) == f"[[0.5, 3, True, nan], [{2**62 + 1}]]"
    assert second == [[7, 0.25], [0.5, 1.5]]
    assert len(rows.events) == 1


def test_a_row_takes_one_kernel_for_each_kind_of_number(monkeypatch):
    """Where tensors of several dtypes are given at once, torch would copy them one by one."""
    rows = Rows()
    copied, copy = [], torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda into, tensors: copied.append(len(tensors)) or copy(into, tensors)
    )

    found = rows.read([torch.tensor(0.5), torch.tensor(3), torch.tensor([0.25]), torch.tensor(1.0)])

    assert sorted(copied) == [1, 3]
    assert found == [[0.5, 3, 0.25, 1.0]]


def test_a_layout_is_made_once_for_scalars_of_the_same_kinds():
    """It keeps the views of memory, which take as long to make as a kernel to queue."""
    memory = Rows().memory
    first, again, of_integers, with_gradient = (
        memory.layout([one])
        for one in (
            torch.tensor(0.5),
            torch.tensor(1.5),
            torch.tensor(3),
            torch.tensor(0.5, requires_grad=True),
        )
    )

    assert first is again
    assert len({id(one) for one in (first, of_integers, with_gradient)}) == 3


def test_changes_after_the_snapshot_are_not_seen():
    """Nor is a gradient recorded for it."""
    rows = Rows()
    loss = torch.tensor(0.5, requires_grad=True)

    copy = rows.sent([loss])
    with torch.no_grad():
        loss.fill_(9)

    assert copy.read()[0][0] == 0.5
    assert torch.is_grad_enabled()


def test_the_event_is_recorded_behind_the_copy_on_the_stream_of_the_rows():
    """Only the event tells whether the copy is complete."""
    rows = Rows()

    copy = rows.sent([torch.tensor(0.5)])
    before = copy.is_done()
    [event] = rows.events
    event.is_complete = True

    assert event.recorded == ["the stream"]
    assert (before, copy.is_done()) == (False, True)


def test_rows_made_and_used_in_inference_mode_work_outside_of_it():
    """An evaluation may be the first to log."""
    rows = Rows()

    with torch.inference_mode():
        first = rows.read([torch.tensor(0.5)])
    second = rows.read([torch.tensor(0.25), torch.tensor(1)])

    assert (first, second) == ([[0.5]], [[0.25, 1]])


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
