"""`MemoryMonitor`, `MemorySnapshot` and `OOMObserver`: what the allocator of the GPU holds.

All read torch's caching allocator on the host, without waiting for the device. Without a GPU they warn once,
and do nothing.
"""

import contextlib
import logging
import math
import os
import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from events.callback import Callback
from events.interval import Interval
from events.logger.logger import Logger
from events.names import LiteralName, format_name
from events.redaction import error_text
from events.state import State
from events.timestamp import Time

__all__ = ["Allocator", "MemoryMonitor", "MemorySnapshot", "OOMObserver"]

_log = logging.getLogger("events")

_BYTES_PER_GIGABYTE = 1e9
_SIGNIFICANT_DIGITS = 5

# Names of `torch.cuda.memory_stats` and what they are logged as; bytes are logged in gigabytes.
_STATISTICS = {
    "allocated_bytes.all.current": "current_allocated_mem",
    "active_bytes.all.current": "current_active_mem",
    "inactive_split_bytes.all.current": "current_inactive_mem",
    "reserved_bytes.all.current": "current_reserved_mem",
    "allocated_bytes.all.peak": "peak_allocated_mem",
    "active_bytes.all.peak": "peak_active_mem",
    "inactive_split_bytes.all.peak": "peak_inactive_mem",
    "reserved_bytes.all.peak": "peak_reserved_mem",
    "num_alloc_retries": "alloc_retries",
}


def _has_gpu(callback: Callback, state: State) -> bool:
    """Returns whether the model is on a CUDA device; warns otherwise."""
    parameters: Any = iter(()) if state.model is None else state.model.parameters()
    device = next(parameters, None)
    kind = "cpu" if device is None else device.device.type
    if kind in {"cuda", "meta"}:
        return True
    what = "The memory monitor" if isinstance(callback, MemoryMonitor) else type(callback).__name__
    warnings.warn(
        f"{what} only works on CUDA devices, but the model is on {kind}; it does nothing.", stacklevel=2
    )
    return False


class MemoryMonitor(Callback):
    """Logs the statistics of the GPU's allocator with each batch, as `memory/<statistic>`.

    ```python
    Trainer(..., callbacks=[MemoryMonitor({"allocated_bytes.all.peak": "peak_bytes"})])
    ```

    `current_allocated_mem`, `current_active_mem`, `current_inactive_mem`, `current_reserved_mem`, the same
    with `peak_` (all in gigabytes, 10⁹ bytes), and `alloc_retries`, the number of allocations that
    succeeded only after the cache was emptied: a sign that memory is nearly full.

    Args:
        memory_keys: which statistics of `torch.cuda.memory_stats`, and what they are logged as. Default:
            those above.
        dist_aggregate_batch_interval: how often, in batches, to log `<statistic>_avg`, `_min` and `_max` over
            ranks too, which costs one collective; None for never.
        read: returns the statistics. Default: `torch.cuda.memory_stats`.

    Raises:
        ValueError: the interval is not positive.
    """

    def __init__(
        self,
        memory_keys: Mapping[str, str] | None = None,
        dist_aggregate_batch_interval: int | None = None,
        *,
        read: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        super().__init__()
        if dist_aggregate_batch_interval is not None and dist_aggregate_batch_interval < 1:
            raise ValueError(
                f"dist_aggregate_batch_interval must be at least 1, got {dist_aggregate_batch_interval}."
            )
        self._keys = dict(memory_keys or _STATISTICS)
        self._aggregate_interval = dist_aggregate_batch_interval
        self._read = read

    def init(self, state: State, logger: Logger) -> None:
        """Looks for a GPU."""
        if self._read is None and _has_gpu(self, state):
            import torch

            self._read = torch.cuda.memory_stats

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Logs the statistics at the peak of the batch: gradients are there, and the optimizer's state."""
        if self._read is None:
            return
        statistics = self._read()
        report = {
            name: _gigabytes(statistics[key]) if "bytes" in key else statistics[key]
            for key, name in self._keys.items()
            if key in statistics
        }
        every = self._aggregate_interval
        if every is not None and state.timestamp.batch.value % every == 0:
            from events.trainer import distributed

            ranks = distributed.gather(report)
            for name in list(report):
                values = [rank[name] for rank in ranks if name in rank]
                report[f"{name}_avg"] = math.fsum(values) / len(values)
                report[f"{name}_min"], report[f"{name}_max"] = min(values), max(values)
        logger.log_metrics({f"memory/{name}": value for name, value in report.items()})


def _gigabytes(count: float) -> float:
    return float(f"{count / _BYTES_PER_GIGABYTE:.{_SIGNIFICANT_DIGITS}g}")


class Allocator:
    """Records the history of torch's caching allocator.

    It uses the private interface behind https://pytorch.org/memory_viz.
    """

    def start(self, max_entries: int) -> None:
        """Begins to record allocations, the last `max_entries` of them."""
        import torch

        torch.cuda.memory._record_memory_history("all", max_entries=max_entries)  # noqa: SLF001

    def snapshot(self) -> Any:
        """Returns what was recorded; can be pickled."""
        import torch

        return torch.cuda.memory._snapshot()  # noqa: SLF001

    def stop(self) -> None:
        """Ends the recording."""
        import torch

        torch.cuda.memory._record_memory_history(None)  # noqa: SLF001

    def on_out_of_memory(self, observer: Callable[..., None]) -> None:
        """Calls a function whenever the allocator is about to raise for lack of memory."""
        import torch

        attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer")  # noqa: B009, SLF001
        attach(observer)

    def plots(self, snapshot: Any) -> dict[str, str]:
        """Returns pages and pictures of a snapshot, by the end of their file's name."""
        from torch.cuda import _memory_viz

        draw: Any = _memory_viz
        return {
            "_trace_plot.html": draw.trace_plot(snapshot),
            "_segment_plot.html": draw.segment_plot(snapshot),
        }


class _Recorder(Callback):
    """Records allocations; writes snapshots of them into a folder, and uploads the files."""

    def __init__(
        self,
        max_entries: int,
        folder: str,
        filename: str,
        remote_file_name: str | None,
        overwrite: bool,
        allocator: Allocator | None,
    ) -> None:
        super().__init__()
        self._max_entries = max_entries
        self._folder = folder
        self._filename = filename
        self._remote_file_name = remote_file_name
        self._overwrite = overwrite
        self._allocator = allocator

    def init(self, state: State, logger: Logger) -> None:
        """Looks for a GPU."""
        if self._allocator is None and _has_gpu(self, state):
            self._allocator = Allocator()

    def _write(self, allocator: Allocator, state: State) -> list[Path] | None:
        """Returns the files written, none if nothing was recorded; reports a failure and returns None."""
        try:
            snapshot = allocator.snapshot()
            if not any(snapshot.get("device_traces", ())):
                return []
            folder = Path(format_name(self._folder, state))
            folder.mkdir(parents=True, exist_ok=True)
            start = folder / format_name(self._filename, state)
            written = [self._write_one(f"{start}_snapshot.pickle", pickle.dumps(snapshot))]
            for end, text in allocator.plots(snapshot).items():
                written.append(self._write_one(f"{start}{end}", text.encode()))
        except Exception as error:  # noqa: BLE001  # a full disk, or a private interface that has changed
            _log.error("%s could not write its snapshot: %s", type(self).__name__, error_text(error))
            return None
        return written

    def _write_one(self, path: str, content: bytes) -> Path:
        with (found := Path(path)).open("wb" if self._overwrite else "xb") as file:
            file.write(content)
        return found

    def _upload(self, paths: Iterable[Path], state: State, logger: Logger) -> None:
        """Uploads files that were written; a failure is reported."""
        if self._remote_file_name is None:
            return
        try:
            folder = format_name(self._remote_file_name, state).strip("/")
            for path in paths:
                logger.upload_file(LiteralName(f"{folder}/{path.name}"), path, overwrite=self._overwrite)
        except Exception as error:  # noqa: BLE001  # a file that is gone must not stop training
            _log.error("%s could not upload its snapshot: %s", type(self).__name__, error_text(error))


class MemorySnapshot(_Recorder):
    """Records the GPU's allocations over a few batches, and writes a snapshot with a picture of it.

    ```python
    Trainer(..., callbacks=[MemorySnapshot(skip_batches=10, interval="2ba")])
    ```

    `<filename>_snapshot.pickle`, for https://pytorch.org/memory_viz, and pages to open:
    `…_trace_plot.html`, `…_segment_plot.html`. They are uploaded too. A failure to write them is
    reported, and training continues.

    Args:
        skip_batches: how many batches to skip first.
        interval: for how long to record; a bare number counts batches.
        max_entries: how many allocations at most, the last ones.
        folder: where to write; placeholders as in `Logger.upload_file`.
        filename: the beginning of the names.
        remote_file_name: the folder they are uploaded to; None for no upload.
        overwrite: whether existing files are replaced.
        allocator: what to record. Default: torch's, on CUDA.
    """

    def __init__(
        self,
        skip_batches: int = 1,
        interval: Time | str | int = "3ba",
        max_entries: int = 100_000,
        folder: str = "{run_name}/torch_traces",
        filename: str = "rank{rank}.{batch}.memory_snapshot",
        remote_file_name: str | None = "{run_name}/torch_memory_traces",
        overwrite: bool = False,
        *,
        allocator: Allocator | None = None,
    ) -> None:
        super().__init__(max_entries, folder, filename, remote_file_name, overwrite, allocator)
        self._skip = skip_batches
        self._length = Interval(interval, "ba").time
        self._end: Time | None = None
        self._is_recording = False

    def batch_start(self, state: State, logger: Logger) -> None:
        """Begins to record."""
        if self._allocator is None or self._end is not None or self._skip > 0:
            return
        self._end = state.timestamp.get(self._length.unit) + self._length
        self._allocator.start(self._max_entries)
        self._is_recording = True

    def batch_end(self, state: State, logger: Logger) -> None:
        """Writes the snapshot, if it is complete."""
        self._skip -= 1
        if self._is_recording and self._end is not None and state.timestamp >= self._end:
            self._finish(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Writes the snapshot early if training ends."""
        if self._is_recording:
            self._finish(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        """Ends the recording."""
        if self._is_recording and self._allocator is not None:
            self._is_recording = False
            self._allocator.stop()

    def _finish(self, state: State, logger: Logger) -> None:
        if self._allocator is None:
            return
        written = self._write(self._allocator, state)
        self.close(state, logger)
        self._upload(written or (), state, logger)


class OOMObserver(_Recorder):
    """Writes a snapshot of the GPU's allocations when it runs out of memory.

    ```python
    Trainer(..., callbacks=[OOMObserver(filename="rank{rank}_out_of_memory")])
    ```

    It writes the same files as `MemorySnapshot`, before the exception is raised, and uploads them when the
    run is closed. Recording costs a few microseconds per allocation, throughout training.

    Args:
        max_entries: how many allocations are recorded, the last ones.
        folder: where to write; placeholders as in `Logger.upload_file`.
        filename: the beginning of the names.
        remote_file_name: the folder they are uploaded to; None for no upload.
        overwrite: whether existing files are replaced.
        allocator: what to record. Default: torch's, on CUDA.
    """

    def __init__(
        self,
        max_entries: int = 100_000,
        folder: str = "{run_name}/torch_traces",
        filename: str = "rank{rank}_oom",
        remote_file_name: str | None = "{run_name}/oom_traces",
        overwrite: bool = False,
        *,
        allocator: Allocator | None = None,
    ) -> None:
        super().__init__(max_entries, folder, filename, remote_file_name, overwrite, allocator)
        self._written: list[Path] = []
        # None before and after the run: an observer cannot be removed from torch's allocator.
        self._state: State | None = None
        self._pid = 0

    def init(self, state: State, logger: Logger) -> None:
        """Begins to record and to observe."""
        super().init(state, logger)
        if self._allocator is not None:
            self._state, self._pid = state, os.getpid()
            self._allocator.start(self._max_entries)
            self._allocator.on_out_of_memory(self._observe)

    def close(self, state: State, logger: Logger) -> None:
        """Ends the recording, and uploads what was written."""
        if self._state is None or self._allocator is None:
            return
        self._state = None
        with contextlib.suppress(RuntimeError):
            # The device may have failed.
            self._allocator.stop()
        self._upload(self._written, state, logger)

    def _observe(self, _device: int, wanted: int, total: int, free: int) -> None:
        state, allocator = self._state, self._allocator
        if state is None or allocator is None or self._written or os.getpid() != self._pid:
            return
        # Torch's allocator calls this, in any thread.
        written = self._write(allocator, state)
        if written is None:
            return
        self._written = written
        where = written[0].parent if written else "nowhere: nothing was recorded"
        _log.error(
            "out of memory: %.2f GB wanted, %.2f of %.2f GB free. The allocations are in %s.",
            wanted / _BYTES_PER_GIGABYTE,
            free / _BYTES_PER_GIGABYTE,
            total / _BYTES_PER_GIGABYTE,
            where,
        )
