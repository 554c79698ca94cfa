"""Measures metrics calls with more than plain numbers: tensors, TensorDicts, functions, rates, namespaces.

torchrl's conversion, `_make_metrics_safe`, runs beside ours if torchrl is installed. With CUDA, the calls are also
timed behind queued kernels, as in a training loop.
"""

import importlib
import statistics
import sys
import time

import torch

from destinations import LoggerDestination
from events import Logger, State, WriteRate

from .timing import Row, best_microseconds, print_table

__all__ = ["main"]

METRICS = 10
FUNCTIONS = 20
QUEUED_CYCLES = 100_000_000
CALLS = 20


class TakesNothing(LoggerDestination):
    """A destination that does nothing, so that only the call costs."""

    def log_metrics(self, metrics, step=None):
        pass


def _microseconds(metrics, statement="logger.log_metrics(metrics)", destination=None):
    logger = Logger(State("benchmark"), destination or TakesNothing(), raise_errors=True)
    logger.log_metrics({"first": 1.0}, -1)
    names = {"logger": logger, "metrics": metrics}
    return best_microseconds(statement, names, number=500, repeats=200)


def _torchrl():
    """Returns torchrl's conversion, or None."""
    try:
        module = importlib.import_module("torchrl.record.loggers.common")
    except ImportError:
        return None
    return getattr(module, "_make_metrics_safe", None)


def _torchrl_microseconds(metrics):
    convert = _torchrl()
    if convert is None:
        return None
    names = {"convert": convert, "metrics": metrics}
    try:
        convert(metrics)
    except TypeError:
        names["convert"] = lambda metrics: convert(metrics, keys_sep="/")
    return best_microseconds("convert(metrics)", names, number=500, repeats=50)


def _tensordict(metrics):
    try:
        from tensordict import TensorDict
    except ImportError:
        return None
    return TensorDict(dict(metrics), [])


class _Never:
    """A function that must be called only for the first record, which is due."""

    calls = 0

    def __call__(self):
        _Never.calls += 1
        return 1.0


def _lazy_row():
    never = _Never()

    def function():
        return never()

    functions = {f"f{index}": function for index in range(FUNCTIONS)}
    destination = TakesNothing()
    destination.write_rate = WriteRate(every_seconds=1e9)
    taken = _microseconds(functions, destination=destination)
    if _Never.calls > FUNCTIONS:
        raise AssertionError(f"functions must be called once, got {_Never.calls} calls.")
    return Row("twenty functions, no destination due", taken, 2.0)


def _behind_kernels(call):
    """Returns the median time of a call in microseconds, while kernels are queued."""
    timings = []
    for _ in range(CALLS):
        torch.cuda.synchronize()
        torch.cuda._sleep(QUEUED_CYCLES)
        start = time.perf_counter()
        call()
        timings.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(timings) * 1e6


def _cuda_rows():
    if not torch.cuda.is_available():
        return []
    metrics = {f"loss/{index}": torch.tensor(0.1 * index, device="cuda") for index in range(METRICS)}
    logger = Logger(State("benchmark"), TakesNothing(), raise_errors=True)
    logger.log_metrics(metrics)
    logger.flush()
    convert = _torchrl()
    rows = [
        Row(
            "ten CUDA scalars behind queued kernels",
            _behind_kernels(lambda: logger.log_metrics(metrics)),
            200.0,
            None if convert is None else _behind_kernels(lambda: convert(metrics)),
        ),
        Row("the same, ten .item()", _behind_kernels(lambda: [one.item() for one in metrics.values()])),
    ]
    logger.flush()
    return rows


def main():
    """Prints the table; returns whether every budget was kept."""
    tensors = {f"loss/train/{index}": torch.tensor(0.1 * index) for index in range(METRICS)}
    floats = {name: value.item() for name, value in tensors.items()}
    mapping = _tensordict(tensors)
    paced = TakesNothing()
    paced.write_rate = WriteRate(every_seconds=1e9)
    rows = [
        Row(
            "ten .item() alone",
            best_microseconds(
                "[one.item() for one in metrics.values()]", {"metrics": tensors}, number=500, repeats=200
            ),
        ),
        Row("ten CPU tensors", _microseconds(tensors), 5.0, _torchrl_microseconds(tensors)),
        Row("ten CPU tensors and two numbers", _microseconds({**tensors, "lr": 0.1, "epoch": 1})),
    ]
    if mapping is not None:
        rows.append(Row("TensorDict of ten", _microseconds(mapping), 15.0, _torchrl_microseconds(mapping)))
    rows += [
        Row("ten floats", _microseconds(floats), 1.0),
        Row("ten floats, no destination due", _microseconds(floats, destination=paced)),
        _lazy_row(),
        *_cuda_rows(),
    ]
    print_table("host values", rows, peer="torchrl")
    return all(row.is_within_budget for row in rows)


if __name__ == "__main__":
    sys.exit(not main())
