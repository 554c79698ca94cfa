"""What the allocator of a GPU reports reaches the run; without a GPU nothing happens, and that is said."""

import logging
import pickle

import pytest

from destinations import InMemory
from destinations.testing import RecordingDestination
from events import MemoryMonitor, MemorySnapshot, OOMObserver, Run

STATISTICS = {
    "allocated_bytes.all.current": 1_234_567_890,
    "allocated_bytes.all.peak": 0,
    "num_alloc_retries": 3,
    "segment.all.peak": 7,
}


class FakeAllocator:
    """Records what a GPU's allocator would; torch's needs a GPU."""

    def __init__(self, traces=((1,),)):
        self.done = []
        self.traces = traces
        self.observer = None

    def start(self, max_entries):
        self.done.append(("start", max_entries))

    def snapshot(self):
        return {"device_traces": self.traces}

    def stop(self):
        self.done.append("stop")

    def on_out_of_memory(self, observer):
        self.observer = observer

    def plots(self, snapshot):
        return {"_trace_plot.html": "<html>"}


def test_allocator_statistics_are_logged_in_gigabytes():
    """Five significant digits; counts as they are; what the allocator does not have is left out."""
    memory = InMemory()
    monitor = MemoryMonitor(dist_aggregate_batch_interval=2, read=lambda: STATISTICS)
    with Run(memory, monitor, "r") as run:
        for _ in range(2):
            run.batch_start()
            run.run_event("after_train_batch")
            run.batch_end()

    assert {name: len(series) for name, series in memory.data.items()} == {
        **dict.fromkeys(
            ("memory/current_allocated_mem", "memory/peak_allocated_mem", "memory/alloc_retries"), 2
        ),
        **{
            f"memory/{name}_{kind}": 1
            for name in ("current_allocated_mem", "peak_allocated_mem", "alloc_retries")
            for kind in ("avg", "min", "max")
        },
    }
    assert memory.most_recent_values["memory/current_allocated_mem"] == 1.2346
    assert memory.most_recent_values["memory/alloc_retries_avg"] == 3

    memory = InMemory()
    with Run(memory, MemoryMonitor({"segment.all.peak": "segments"}, read=lambda: STATISTICS), "r") as run:
        run.run_event("after_train_batch")
    assert memory.most_recent_values == {"memory/segments": 7}


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (MemoryMonitor, "The memory monitor only works on CUDA devices, but the model is on cpu"),
        (MemorySnapshot, "MemorySnapshot only works on CUDA devices"),
        (OOMObserver, "OOMObserver only works on CUDA devices"),
    ],
)
def test_without_a_gpu_each_says_so_and_training_continues(make_trainer, callback, message):
    """A warning when the run begins, and nothing logged."""
    memory = InMemory()
    with pytest.warns(UserWarning, match=message):
        trainer = make_trainer(callbacks=callback(), loggers=memory, max_duration="2ba")
    trainer.fit()

    assert not any(name.startswith("memory/") for name in memory.data)
    assert trainer.state.status == "completed"


def test_a_snapshot_covers_its_batches_and_is_uploaded(tmp_path, monkeypatch):
    """Recorded after the batches to skip; the files are here and with the destination."""
    monkeypatch.chdir(tmp_path)
    store, allocator = RecordingDestination(stores_files=True), FakeAllocator()
    snapshot = MemorySnapshot(skip_batches=1, interval="2ba", max_entries=5, allocator=allocator)
    with Run(store, snapshot, "mine") as run:
        for batch in range(5):
            run.batch_start()
            assert (
                allocator.done == [[], [("start", 5)], [("start", 5)], [("start", 5), "stop"]][min(batch, 3)]
            )
            run.batch_end()

    names = ["rank0.3.memory_snapshot_snapshot.pickle", "rank0.3.memory_snapshot_trace_plot.html"]
    assert sorted(path.name for path in (tmp_path / "mine/torch_traces").iterdir()) == names
    assert sorted(store.files) == [f"mine/torch_memory_traces/{name}" for name in names]
    assert pickle.loads(store.files[f"mine/torch_memory_traces/{names[0]}"]) == {"device_traces": ((1,),)}  # noqa: S301
    assert allocator.done == [("start", 5), "stop"]


def test_a_snapshot_that_cannot_be_written_is_reported(tmp_path, monkeypatch, caplog):
    """An existing file is not replaced; training continues, and the recording ends."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine/torch_traces").mkdir(parents=True)
    (tmp_path / "mine/torch_traces/rank0.1.memory_snapshot_snapshot.pickle").write_text("mine")
    allocator = FakeAllocator()
    with Run(None, MemorySnapshot(0, "1ba", allocator=allocator), "mine") as run:
        run.batch_start()
        run.batch_end()

    assert "MemorySnapshot could not write its snapshot" in caplog.text
    assert allocator.done[-1] == "stop"
    assert (tmp_path / "mine/torch_traces/rank0.1.memory_snapshot_snapshot.pickle").read_text() == "mine"


def test_running_out_of_memory_leaves_a_snapshot(tmp_path, monkeypatch, caplog):
    """Written at once, uploaded at close; one that is nothing, or comes after the run, is ignored."""
    monkeypatch.chdir(tmp_path)
    store, allocator = RecordingDestination(stores_files=True), FakeAllocator()
    run = Run(store, OOMObserver(allocator=allocator), "mine")
    run.run_event("init")
    allocator.observer(0, 2_000_000_000, 8_000_000_000, 1_000_000_000)
    allocator.observer(0, 2_000_000_000, 8_000_000_000, 1_000_000_000)
    run.close(MemoryError())

    assert sorted(store.files) == [
        "mine/oom_traces/rank0_oom_snapshot.pickle",
        "mine/oom_traces/rank0_oom_trace_plot.html",
    ]
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in errors] == [
        "out of memory: 2.00 GB wanted, 1.00 of 8.00 GB free. The allocations are in mine/torch_traces."
    ]
    allocator.observer(0, 1, 1, 1)
    assert len(store.files) == 2
