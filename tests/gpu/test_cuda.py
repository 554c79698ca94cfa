"""Tests logging from a real device: no call waits for it, and values arrive as they were at the call.

Skipped without CUDA. Times are compared with 50 ms of queued kernels, not with absolute bounds.
"""

import gc
import itertools
import time
import warnings

import pytest
import torch

from destinations import InMemory
from events import DeviceCopies, Engine, Event, Logger, RecordError, State

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

QUEUED_SECONDS = 0.05
CALL_SECONDS = 0.0002
DEVICES = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)


@pytest.fixture
def memory():
    """The destination that receives the records."""
    return InMemory()


@pytest.fixture
def logger(memory):
    """A logger with the default policy."""
    return Logger(State("r"), memory, raise_errors=True)


@pytest.fixture
def cycles():
    """The number of cycles for which a spinning kernel takes the queued time on this device."""
    torch.cuda._sleep(1_000_000)
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(100_000_000)
    end.record()
    end.synchronize()
    return int(100_000_000 * QUEUED_SECONDS * 1000 / start.elapsed_time(end))


@pytest.fixture
def errors_on_sync():
    """Makes every synchronization that torch knows of raise."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # torch warns that it doesn't know of all.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def _values(memory):
    return [record.value for record in memory.records]


def _seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@pytest.mark.parametrize("index", DEVICES)
def test_a_value_overwritten_right_after_the_call_arrives_unchanged(index, memory, logger, cycles):
    """The old value arrives, although the device reaches the copy much later."""
    loss = torch.tensor(0.5, device=f"cuda:{index}")
    # The first call allocates and loads kernels, and may wait for the device.
    logger.log_metrics({"loss": loss})
    logger.flush()
    memory.clear()
    with torch.cuda.device(index):
        torch.cuda._sleep(cycles)

        for step in range(5):
            logger.log_metrics({"loss": loss}, step)
            loss.fill_(step + 1.0)
        early = len(memory.records)
    logger.flush()

    assert early == 0
    assert _values(memory) == [{"loss": value} for value in (0.5, 1.0, 2.0, 3.0, 4.0)]


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float64, 0.1),
        (torch.float32, 0.5),
        (torch.float16, 0.5),
        (torch.bfloat16, 0.5),
        (torch.bool, True),
        (torch.int64, 2**63 - 1),
        (torch.int32, -3),
        (torch.uint8, 255),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_every_dtype_keeps_its_value_and_its_kind(dtype, value, shape, memory, logger):
    """Integers keep all bits, because they aren't converted to floats on the way."""
    tensor = torch.full(shape, value, dtype=dtype, device="cuda")

    logger.log_metrics({"a": tensor})
    logger.flush()

    (metrics,) = _values(memory)
    assert (metrics["a"], type(metrics["a"])) == (value, type(value))


def test_the_call_does_not_wait_for_queued_kernels(memory, logger, cycles, capsys):
    """It returns at once; `.item()`, and a copy with an event's synchronize as in torchrl, wait for all kernels."""
    metrics = {f"m{index}": torch.tensor(float(index), device="cuda") for index in range(10)}
    for _ in range(10):
        logger.log_metrics(metrics)
    logger.flush()

    def with_kernels(call, calls=1):
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        taken = [_seconds(call) for _ in range(calls)]
        torch.cuda.synchronize()
        logger.flush()
        return taken

    def copy_and_wait():
        copies = [value.to("cpu", non_blocking=True) for value in metrics.values()]
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
        return [copy.item() for copy in copies]

    # The first call of each turn has cold caches, because this thread waited for 50 ms before it.
    turns = [with_kernels(lambda: logger.log_metrics(metrics), calls=5) for _ in range(20)]
    firsts, ours = sorted(turn[0] for turn in turns), sorted(itertools.chain(*turns))
    [items] = with_kernels(lambda: [value.item() for value in metrics.values()])
    [waits] = with_kernels(copy_and_wait)

    with capsys.disabled():
        print(
            f"\nten CUDA scalars behind {QUEUED_SECONDS * 1e3:.0f} ms of kernels: log_metrics median "
            f"{ours[50] * 1e6:.0f} us (after a wait {firsts[10] * 1e6:.0f}, most {ours[-1] * 1e6:.0f}), "
            f".item() {items * 1e3:.1f} ms, copy and wait {waits * 1e3:.1f} ms"
        )
    assert items > QUEUED_SECONDS / 2
    assert waits > QUEUED_SECONDS / 2
    assert ours[50] < CALL_SECONDS
    assert ours[-1] < QUEUED_SECONDS / 2


@pytest.mark.usefixtures("errors_on_sync")
def test_a_thousand_calls_never_synchronize(memory, logger):
    """Events between them don't either, and everything arrives in order."""
    engine = Engine(State("r"), logger)
    loss = torch.zeros((), device="cuda")

    for step in range(1000):
        logger.log_metrics({"loss": loss, "step": step, "count": loss.long()}, step)
        engine.run_event(Event.BATCH_END)
        loss += 1
    torch.cuda.set_sync_debug_mode("default")
    logger.flush()

    assert _values(memory) == [{"loss": float(step), "step": step, "count": step} for step in range(1000)]
    assert logger.lost_values == 0


@pytest.mark.usefixtures("errors_on_sync")
def test_media_never_synchronize_and_arrive_unchanged(memory, logger):
    """Snapshots of any size and layout are taken in the order of the stream."""
    image = torch.rand(3, 64, 64, device="cuda")
    expected = image.clone()

    logger.log_images(image)
    logger.log_histogram(image.permute(2, 0, 1))
    image.zero_()
    torch.cuda.set_sync_debug_mode("default")
    logger.flush()

    images, values = (record.value for record in memory.records)
    assert torch.equal(images["images"], expected.cpu())
    assert torch.equal(values["values"], expected.permute(2, 0, 1).cpu())


def test_many_images_in_flight_do_not_mix(memory, logger, cycles):
    """Two snapshots never share memory."""
    torch.cuda.synchronize()
    torch.cuda._sleep(cycles)

    for value in range(20):
        logger.log_images(torch.full((3, 128, 128), value / 20, device="cuda"))
    logger.flush()

    assert [record.value["images"].unique().tolist() for record in memory.records] == [
        [pytest.approx(value / 20)] for value in range(20)
    ]


def test_a_small_ring_waits_and_loses_nothing(memory, cycles):
    """Fifty records are logged through two slots behind a busy device."""
    logger = Logger(State("r"), memory, raise_errors=True, device_copies=DeviceCopies(slots=2))
    torch.cuda._sleep(cycles)

    for step in range(50):
        logger.log_metrics({"a": torch.tensor(step, device="cuda")}, step)
    logger.flush()

    assert _values(memory) == [{"a": step} for step in range(50)]


def test_a_ring_that_drops_never_waits(memory, cycles):
    """Values without a free slot are counted."""
    policy = DeviceCopies(slots=2, when_full="drop")
    logger = Logger(State("r"), memory, raise_errors=True, device_copies=policy)
    value = torch.tensor(1.0, device="cuda")
    logger.log_metrics({"a": value}, 0)
    logger.flush()
    torch.cuda._sleep(cycles)

    for step in range(1, 11):
        logger.log_metrics({"a": value}, step)
    logger.flush()

    assert [record.step for record in memory.records] == [0, 1, 2]
    assert logger.lost_values == 8


def test_logging_during_graph_capture_is_refused_and_the_capture_succeeds(memory):
    """It is refused even if an earlier record is pending; the graph replays, and its output can be logged."""
    logger = Logger(State("r"), memory, raise_errors=True, strict=True)
    x = torch.ones((), device="cuda")
    logger.log_metrics({"before": x})
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph):
        y = x * 3
        with pytest.raises(RecordError, match="while a CUDA graph is being captured"):
            logger.log_metrics({"y": y})
        logger.log_metrics({"plain": 1.0})
    for value in range(3):
        x.fill_(value)
        graph.replay()
        logger.log_metrics({"y": y}, value)
    logger.flush()

    assert _values(memory) == [{"before": 1.0}, {"plain": 1.0}, *({"y": 3.0 * value} for value in range(3))]


def test_values_from_a_custom_stream_are_in_order(memory, logger, cycles):
    """The snapshot is taken on the stream that is current at the call."""
    side = torch.cuda.Stream()

    with torch.cuda.stream(side):
        torch.cuda._sleep(cycles)
        loss = torch.ones((), device="cuda") * 5
        logger.log_metrics({"loss": loss})
    logger.log_metrics({"other": torch.tensor(7, device="cuda")})
    logger.flush()

    assert _values(memory) == [{"loss": 5.0}, {"other": 7}]


def test_rows_from_two_streams_keep_their_values_and_order(memory, logger, cycles):
    """Values are overwritten in place right after each call, on the busy stream that made them."""
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    values = []
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles // 2)
            values.append(torch.zeros((), device="cuda"))

    for step in range(100):
        with torch.cuda.stream(streams[step // 3 % 2]):
            loss = values[step // 3 % 2]
            loss.fill_(step)
            logger.log_metrics({"loss": loss, "count": loss.long(), "lr": 0.1, "half": loss.bfloat16()}, step)
            loss.fill_(-1)
    logger.flush()

    assert _values(memory) == [
        {"loss": float(step), "count": step, "lr": 0.1, "half": float(step)} for step in range(100)
    ]


def test_a_metric_may_change_between_host_device_and_dtype(memory, logger):
    """Each value keeps its type."""
    made = [
        torch.tensor(0.5, device="cuda"),
        torch.tensor(2**62 + 1, device="cuda"),
        torch.tensor(0.25),
        torch.tensor([3], device="cuda"),
        7,
        torch.nn.Parameter(torch.tensor(1.5, device="cuda")),
        torch.tensor(data=True, device="cuda"),
    ]

    for other in (torch.tensor(1.0, device="cuda"), torch.tensor(1.0), 1.0):
        for step, value in enumerate(made):
            logger.log_metrics({"a": value, "b": other}, step)
    logger.flush()

    assert [str(one["a"]) for one in _values(memory)] == [
        "0.5",
        str(2**62 + 1),
        "0.25",
        "3",
        "7",
        "1.5",
        "True",
    ] * 3
    assert {one["b"] for one in _values(memory)} == {1.0}


def test_memory_does_not_grow_with_the_calls(logger):
    """Slots are allocated once; a call allocates neither device nor pinned memory."""
    loss = torch.zeros((), device="cuda")
    for _ in range(300):
        logger.log_metrics({"loss": loss})
    logger.flush()
    # Frees the memory of earlier tests.
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()

    for _ in range(1000):
        logger.log_metrics({"loss": loss})
    logger.flush()

    assert torch.cuda.memory_allocated() == before


@pytest.mark.skipif(len(DEVICES) < 2, reason="needs two CUDA devices")
def test_values_of_two_devices_in_one_call_arrive_together(memory, logger, cycles):
    """They arrive although one device is busy and not current."""
    torch.cuda.set_device(0)
    with torch.cuda.device(1):
        torch.cuda._sleep(cycles)
        late = torch.ones((), device="cuda:1") * 2

    logger.log_metrics({"a": torch.tensor(1.0, device="cuda:0"), "b": late})
    late.fill_(99)
    logger.flush()

    assert _values(memory) == [{"a": 1.0, "b": 2.0}]


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_the_first_call_works_in_any_mode(mode, memory, logger):
    """Memory allocated in inference mode serves training too."""
    with getattr(torch, mode)():
        logger.log_metrics({"a": torch.tensor(1.0, device="cuda")})
        logger.log_images(torch.zeros(3, 4, 4, device="cuda"))
    logger.log_metrics({"a": torch.tensor(2.0, device="cuda", requires_grad=True) * 2})
    logger.flush()

    assert [record.value for record in memory.records if record.kind == "metrics"] == [{"a": 1.0}, {"a": 4.0}]


def test_a_compiled_region_that_logs_continues(memory, logger, recwarn):
    """The call breaks the graph, and some versions of torch warn about it."""
    warnings.simplefilter("always")

    def step(x):
        y = (x * 2).sum()
        logger.log_metrics({"y": y.detach()})
        return y + 1

    compiled = torch.compile(step, backend="eager")

    results = [compiled(torch.full((3,), float(value), device="cuda")).item() for value in range(3)]
    logger.flush()

    assert all("Dynamo" in str(one.message) for one in recwarn)
    assert results == [1.0, 7.0, 13.0]
    assert _values(memory) == [{"y": 6.0 * value} for value in range(3)]
