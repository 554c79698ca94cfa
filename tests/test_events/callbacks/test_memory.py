"""Allocator statistics of a GPU reach the run; without a GPU a warning is logged."""

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


def test_a_snapshot_that_cannot_be_drawn_is_reported(tmp_path, monkeypatch, caplog):
    """What torch's private interface raises does not end training, and shows no secret."""
    monkeypatch.chdir(tmp_path)

    class ChangedAllocator(FakeAllocator):
        def plots(self, snapshot):
            raise AttributeError("trace_plot with token=ghp_0123456789abcdefghijklmnopqrstuvwxyz")

    allocator = ChangedAllocator()
    with Run(None, MemorySnapshot(0, "1ba", allocator=allocator), "mine") as run:
        run.batch_start()
        run.batch_end()

    assert "MemorySnapshot could not write its snapshot: AttributeError: trace_plot" in caplog.text
    assert "ghp_" not in caplog.text
    assert allocator.done[-1] == "stop"
    assert len(list((tmp_path / "mine/torch_traces").iterdir())) == 1


def test_a_snapshot_that_is_gone_before_its_upload_is_reported(tmp_path, caplog):
    """The end of the run is as it would be."""
    allocator = FakeAllocator()
    observer = OOMObserver(folder=str(tmp_path), allocator=allocator)
    with Run(RecordingDestination(stores_files=True), observer, "mine") as run:
        allocator.observer(0, 2_000_000_000, 8_000_000_000, 1_000_000_000)
        for path in tmp_path.iterdir():
            path.unlink()

    assert "OOMObserver could not upload its snapshot: FileNotFoundError: " in caplog.text
    assert run.state.status == "completed"


def test_an_interval_of_ranks_must_be_positive():
    """The error comes from the constructor, not from the first batch."""
    with pytest.raises(ValueError, match="dist_aggregate_batch_interval must be at least 1, got 0"):
        MemoryMonitor(dist_aggregate_batch_interval=0)


def test_an_observer_made_before_a_fork_observes_in_the_child(tmp_path, in_child):
    """It belongs to the process in which its run begins."""
    found = in_child(f"""
        import os
        from events import OOMObserver, Run
        from tests.test_events.callbacks.test_memory import FakeAllocator
        os.chdir({str(tmp_path)!r})
        allocator = FakeAllocator()
        observer = OOMObserver(allocator=allocator, folder="traces")
        child = os.fork()
        if child == 0:
            run = Run(None, observer, "mine")
            run.run_event("init")
            allocator.observer(0, 1, 1, 1)
            os._exit(0)
        os.waitpid(child, 0)
        print(len(os.listdir("traces")))
    """)

    assert found == "2"


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
