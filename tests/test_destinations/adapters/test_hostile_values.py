"""Bad names and values that some trainer logs anyway."""

import contextlib
import math
import types

import numpy as np
import pytest

from destinations import InMemory
from events import RecordError


class WithoutRepr:
    def __repr__(self):
        raise RuntimeError("no repr")


ENDLESS = {}
ENDLESS["again"] = ENDLESS

NAMES = {
    "line break": "a\nb",
    "nul": "a\0b",
    "surrogate": "a\ud800b",
    "long": "n" * 10_000,
    "path": "../../x",
    "escape": "\x1b[31mred",
    "placeholder": "{x}",
    "empty": "",
    "number": 5,
    "none": None,
    "tuple": ("a", 1),
}
VALUES = {
    "nan": math.nan,
    "infinity": -math.inf,
    "huge": 10**400,
    "nested": {"a": {"b": 1}},
    "none": None,
    "text": "x",
    "complex": 1j,
    "list": [1, 2],
    "no repr": WithoutRepr(),
    "object": object(),
    "array": np.arange(5),
    "empty array": np.zeros(0),
    "endless": ENDLESS,
    "bytes": b"\xff",
    "set": {1},
    "raises": lambda: 1 / 0,
    "surrogate": "\ud800",
    "half": np.float16(2),
}


def hugging_face(destination):
    """Returns the callback's function that logs a dictionary."""
    pytest.importorskip("transformers")
    from destinations.adapters.hugging_face import TransformersCallback

    callback = TransformersCallback(destination)
    arguments = types.SimpleNamespace(process_index=0, world_size=1, local_process_index=0)
    state = types.SimpleNamespace(global_step=1)
    return lambda values, _step=1: callback.on_log(arguments, state, None, logs=values)


def accelerate(destination):
    """Returns the tracker's function that logs a dictionary."""
    pytest.importorskip("accelerate")
    from destinations.adapters.accelerate_tracker import AccelerateTracker

    tracker = AccelerateTracker(destination, run_name="mine")
    return lambda values, step=1: tracker.log(values, step=step)


def torchrl(destination):
    """Returns the logger's function that logs a dictionary."""
    pytest.importorskip("torchrl")
    from destinations.adapters.torchrl_logger import TorchRLLogger

    logger = TorchRLLogger(destination, exp_name="mine")
    return lambda values, step=1: logger.log_metrics(values, step)


def lightning(destination):
    """Returns the logger's function that logs a dictionary."""
    pytest.importorskip("lightning")
    from destinations.adapters.lightning_logger import LightningLogger

    logger = LightningLogger(destination)

    def log(values, step=1):
        with contextlib.suppress(RecordError):  # A bad value is the caller's error, as with `Logger`.
            logger.log_metrics(values, step)

    return log


def good_of(destination):
    """Returns the good metrics that arrived."""
    rows = [record.value for record in destination.records if record.kind == "metrics"]
    return [value for row in rows for name, value in row.items() if name.endswith("good")]


GROUPS = {
    hugging_face: "transformers",
    accelerate: "transformers",
    torchrl: "torchrl",
    lightning: "lightning",
}


@pytest.mark.parametrize(
    "adapter", [pytest.param(one, marks=pytest.mark.xdist_group(group)) for one, group in GROUPS.items()]
)
def test_bad_metrics_do_not_affect_good_ones(adapter):
    """Every good value beside a bad one arrives, and only documented errors are raised."""
    destination = InMemory()
    log = adapter(destination)

    for value in VALUES.values():
        log({"bad": value, "epoch": value, "good": 1.0}, value)
    for name in NAMES.values():
        log({name: 2.0, "good": 3.0})

    assert good_of(destination) == [1.0] * len(VALUES) + [3.0] * len(NAMES)
