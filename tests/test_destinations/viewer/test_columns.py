"""Columns of runs in memory have the reader's rows, whatever was read before."""

import os
import threading

import numpy as np
import pytest

from destinations.runs import Run
from destinations.viewer.columns import ColumnCache
from tests.test_destinations.runs.written import Written, write_csv


def values_of(cache, folder, name, rank=0):
    """Returns the values of a metric."""
    frame = cache.read(folder, rank, [name])
    values, present = frame.block.columns[frame.column(name)]
    return values[present].tolist()


class Reads:
    """Counts the bytes that are read from files."""

    def __init__(self, monkeypatch):
        self.bytes = 0
        original = os.pread

        def pread(fd, length, offset):
            data = original(fd, length, offset)
            self.bytes += len(data)
            return data

        monkeypatch.setattr(os, "pread", pread)


@pytest.fixture
def large(tmp_path):
    """A finished run of more than a megabyte."""
    lines = [f"{step},0,{1.7e9 + step},{step}.5,{step * 2},{step % 7}" for step in range(40_000)]
    write_csv(tmp_path / "one", ["step,epoch,time,a,b,c", *lines])
    return tmp_path / "one"


def test_a_second_look_reads_only_new_rows(large, monkeypatch):
    """If the file has changed, this is the header, the last line, and the appended rows."""
    cache = ColumnCache()
    first = values_of(cache, large, "a")
    reads = Reads(monkeypatch)
    again = values_of(cache, large, "a")
    unchanged = reads.bytes
    with (large / "metrics.csv").open("a") as file:
        file.write("40000,0,1700040000,7.0,8,9\n")
    grown = values_of(cache, large, "a")

    assert again == first == [step + 0.5 for step in range(40_000)]
    assert grown == [*first, 7.0]
    # The first 64 KiB contain the header, the last 64 KiB the end of the last line.
    assert unchanged == 0
    assert reads.bytes <= 200_000


def test_announced_metrics_are_read_in_one_pass(large, monkeypatch):
    """Metrics of waiting charts are read with the first one."""
    cache = ColumnCache()
    cache.announce(large, 0, ["a", "b", "c", "unknown"])
    reads = Reads(monkeypatch)
    values_of(cache, large, "a")
    one_pass = reads.bytes
    found = values_of(cache, large, "c")

    assert found == [step % 7 for step in range(40_000)]
    assert reads.bytes < 1.5 * one_pass


def test_a_file_with_checksums_is_read_once(tmp_path, monkeypatch):
    """Comparing blocks and counting rows reads no byte again."""
    with Written(tmp_path / "run") as run:
        for step in range(30_000):
            run.log({"loss": step / 7, "accuracy": step / 3}, step)
    size = (tmp_path / "run" / "metrics.csv").stat().st_size
    assert size > 1 << 20
    reads = Reads(monkeypatch)

    assert len(values_of(ColumnCache(), tmp_path / "run", "loss")) == 30_000

    # Beside the rows: the header, the last line, and the bytes that mark how far the file was read.
    assert reads.bytes < size + 200_000


def test_memory_is_bounded(tmp_path):
    """The least recently used columns go first; a single run beyond the limit keeps the requested columns."""
    folders = [tmp_path / f"run{number}" for number in range(5)]
    for folder in folders:
        write_csv(folder, ["step,a,b", *(f"{step},{step}.5,1" for step in range(10_000))])
    cache = ColumnCache(limit_bytes=1_000_000)

    for folder in folders * 2:
        assert len(values_of(cache, folder, "a")) == 10_000
        assert cache.nbytes <= 1_000_000
    small = ColumnCache(limit_bytes=1000)
    for name in ("a", "b"):
        assert len(values_of(small, folders[0], name)) == 10_000

    assert list(small._ranks[folders[0], "", 0]._columns) == ["b"]


def test_rows_equal_the_readers_at_any_moment(tmp_path):
    """The run logs, drains, gets new columns and goes back to an earlier step meanwhile."""
    cache = ColumnCache()
    folder = tmp_path / "one"
    rng = np.random.default_rng(1)
    step = 0
    for session in range(3):
        with Written(folder, batch=step, flush_seconds=300) as run:
            for _ in range(60):
                metrics = {"loss": float(rng.normal())}
                if rng.random() < 0.2:
                    metrics[f"extra{rng.integers(0, 2 + session)}"] = float("nan")
                run.log(metrics, step)
                step += 1
                if rng.random() < 0.2:
                    run.flush()
                if rng.random() < 0.3:
                    for name in ("loss", "extra0"):
                        if name in Run.open(folder).metric_names():
                            expected = Run.open(folder).series(name)
                            frame = cache.read(folder, 0, [name, "loss"])
                            values, present = frame.block.columns[name]
                            np.testing.assert_array_equal(values[present], expected.value)
                            np.testing.assert_array_equal(frame.block.step[present], expected.step)
        step -= 20


def test_a_folder_replaced_by_another_run_has_its_rows(tmp_path):
    """The other run has the same name, and is at least as long."""
    cache = ColumnCache()
    folder = tmp_path / "one"
    write_csv(folder, ["step,epoch,time,a", *(f"{step},,,1.0" for step in range(10))])
    before = cache.read(folder, 0, ["a"])
    (folder / "metrics.csv").rename(tmp_path / "old.csv")
    write_csv(folder, ["step,epoch,time,a", *(f"{step},,,2.0" for step in range(20))])
    after = cache.read(folder, 0, ["a"])

    assert after.block.columns["a"][0].tolist() == [2.0] * 20
    assert after.token != before.token


def test_a_rewritten_csv_of_lightning_is_read_again(tmp_path):
    """Lightning rewrites it in place, with another header."""
    cache = ColumnCache()
    folder = tmp_path / "version_0"
    write_csv(folder, ["epoch,loss,step", "0,1.0,0", "0,2.0,1"])
    first = values_of(cache, folder, "loss")
    (folder / "metrics.csv").write_text("acc,epoch,loss,step\n,0,5.0,0\n,0,6.0,1\n0.5,0,7.0,2\n")

    assert first == [1.0, 2.0]
    assert values_of(cache, folder, "loss") == [5.0, 6.0, 7.0]
    assert values_of(cache, folder, "acc") == [0.5]


def test_many_threads_read_the_same(large):
    """They read different columns of one run at once."""
    cache = ColumnCache(limit_bytes=700_000)
    found = {}

    def read(name):
        for _ in range(5):
            found[name] = values_of(cache, large, name)

    threads = [threading.Thread(target=read, args=(name,)) for name in "abc" * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found["a"] == [step + 0.5 for step in range(40_000)]
    assert found["b"] == [step * 2.0 for step in range(40_000)]
    assert found["c"] == [step % 7 for step in range(40_000)]
