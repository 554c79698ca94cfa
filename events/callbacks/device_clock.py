"""`DeviceClock`: what the parts of batches take on a CUDA device."""

import functools
import itertools
from collections import deque
from collections.abc import Iterable
from typing import Any

# Batches that the device has not done; of more, the oldest are not measured.
_MAX_PENDING_BATCHES = 1000
_END = -1


class DeviceClock:
    """Measures the parts of batches on a device, by events that are queued between its kernels.

    Nothing waits for the device: a batch counts once its last event has passed.

    Args:
        parts: the buckets of a batch.
    """

    def __init__(self, parts: Iterable[int]) -> None:
        import torch

        self._make = functools.partial(torch.cuda.Event, enable_timing=True)
        self._marks: list[tuple[int, Any]] = []
        self._pending: deque[list[tuple[int, Any]]] = deque(maxlen=_MAX_PENDING_BATCHES)
        self.nanoseconds = dict.fromkeys(parts, 0.0)

    def mark(self, bucket: int) -> None:
        """Notes that kernels which are queued from here on are of a bucket."""
        event = self._make()
        event.record()
        self._marks.append((bucket, event))

    def end(self) -> None:
        """Ends a batch."""
        self.mark(_END)
        self._pending.append(self._marks)
        self._marks = []
        self.collect()

    def collect(self) -> None:
        """Adds up the batches that the device has done. Training thread, outside of a graph capture."""
        while self._pending and self._pending[0][-1][1].query():
            for (bucket, begin), (_, end) in itertools.pairwise(self._pending.popleft()):
                self.nanoseconds[bucket] += begin.elapsed_time(end) * 1e6
