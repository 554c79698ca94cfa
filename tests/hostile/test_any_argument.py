"""Every record with any arguments: training sees only documented errors, and good records are kept."""

import functools
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from destinations import Console, InMemory, ProgressBar, RunDirectory, TextFile
from destinations.run_directory import read_series
from events import Engine, Logger, State, WriteRate


class Bad:
    """An object that raises whenever it's converted to a text or a number."""

    def __repr__(self):
        raise ValueError("no repr")

    __str__ = __len__ = __iter__ = __float__ = __index__ = __bool__ = __call__ = __eq__ = __repr__
    __hash__ = object.__hash__


def _cyclic():
    cyclic = [1]
    cyclic.append({"again": cyclic})
    return cyclic


class Pick:
    """One of `VALUES`; hypothesis needs a text to print it."""

    def __init__(self, index):
        self.index = index

    def __repr__(self):
        return f"Pick({self.index})"


def _resolved(value):
    if isinstance(value, Pick):
        found = VALUES[value.index]
        return found() if found is _jagged else found
    if isinstance(value, list | tuple):
        return type(value)(map(_resolved, value))
    if isinstance(value, dict):
        return {key: _resolved(item) for key, item in value.items()}
    return value


@functools.cache
def _jagged():
    """Returns a tensor of rows of different lengths; on demand, because torch imports its compiler for it."""
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


VALUES = [
    *(None, True, 0, -1, 10**400, 10**5000, -(2**63), 2**64, 1.5, math.nan, math.inf, 1j),
    *("", "a", "../up", "/root", "a/b", "x" * 5000, "\0", "\udc80", "\n\x1b[31m", b"", b"RIFF"),
    *([], [1, "a"], [[1], [1, 2]], (), {}, {"a": 1}, {1: {2: 3}}, {("a",): None}, {"a": 1}.values()),
    *(Bad(), Bad, object(), len, lambda: 1 / 0, _cyclic(), range(3), iter([1]), io.StringIO(), Path("a")),
    *(np.zeros((4, 4)), np.zeros((3, 4, 4)), np.zeros((0,)), np.zeros((2, 3, 4, 4)), np.array("a")),
    *(np.array([object()]), np.float16(1.5), np.complex64(1j), np.datetime64("2026-01-01"), np.arange(6)),
    *(torch.zeros(3), torch.zeros(2, 3, 4, 4), torch.empty(2, device="meta"), torch.tensor(1j)),
    *(torch.eye(3).to_sparse(), torch.zeros(3, requires_grad=True), torch.tensor(1.0)),
    *(_jagged, torch.float32),
]
ODD = st.integers(0, len(VALUES) - 1).map(Pick)
NAMES = st.one_of(st.text(max_size=8), st.sampled_from(["\0", "\udc80", "step", "time", "a/../b", "=1+1"]))
NAMED = st.dictionaries(NAMES, ODD, max_size=3)
ANY = st.one_of(ODD, NAMED, st.lists(ODD, max_size=3))
RECORDS = {
    "log_hyperparameters": st.tuples(ANY),
    "log_metrics": st.tuples(ANY, ANY),
    "log_scalar": st.tuples(ANY, ANY, ANY),
    "log_table": st.tuples(ANY, ANY, ANY, ANY),
    "log_images": st.tuples(ANY, ANY, ANY, ANY, ANY, ANY, ANY),
    "log_text": st.tuples(ANY, ANY, ANY),
    "log_audio": st.tuples(ANY, ANY, ANY, ANY),
    "log_video": st.tuples(ANY, ANY, ANY, ANY),
    "log_histogram": st.tuples(ANY, ANY, ANY, ANY),
    "log_point_cloud": st.tuples(ANY, ANY, ANY, ANY),
    "log_traces": st.tuples(ANY),
}
# The errors that the logger's docs name; TypeError is for hyperparameters that aren't a config.
CALLS = st.one_of(
    *(st.tuples(st.just(name), arguments) for name, arguments in RECORDS.items()),
)


@pytest.fixture(autouse=True)
def _outside_of_any_repository(tmp_path_factory, monkeypatch):
    """Spares each run the three programs that describe its environment."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
@given(calls=st.lists(CALLS, min_size=1, max_size=12), is_paced=st.booleans())
def test_bad_arguments_drop_only_their_own_record(calls, is_paced, tmp_path_factory):
    """Good metrics, texts and hyperparameters around it reach every destination."""
    folder = tmp_path_factory.mktemp("run")
    memory = InMemory()
    rate = WriteRate(every_steps=2) if is_paced else None
    destinations = [
        RunDirectory(folder / "run", flush_seconds=1000, write_rate=rate),
        memory,
        TextFile(str(folder / "log.jsonl"), format="jsonl"),
        Console("1ba", stream=io.StringIO()),
        ProgressBar(stream=io.StringIO()),
    ]
    state = State("r")
    logger = Logger(state, destinations)
    engine = Engine(state, logger)
    engine.run_event("init")
    engine.run_event("fit_start")

    for number, (name, arguments) in enumerate(calls):
        logger.log_metrics({"good": float(number)}, number)
        getattr(logger, name)(*_resolved(arguments))
        logger.log_text(f"text {number}", "good")
        engine.run_event("batch_end")
    logger.log_hyperparameters({"good": 1})
    engine.close()

    steps = list(range(len(calls)))
    assert logger.faults.counts == {}
    assert state.status == "completed"
    kept = [step for step, _ in read_series(folder / "run", "good") if step in steps]
    assert kept == steps or is_paced
    assert memory.hyperparameters["good"] == 1
    texts = [json.loads(line) for line in (folder / "run" / "texts.jsonl").read_text("utf-8").splitlines()]
    assert [line["text"] for line in texts if line["name"] == "good"] == [f"text {step}" for step in steps]
    sidecar = json.loads((folder / "run" / "sidecar.json").read_text("utf-8"))
    assert (sidecar["status"], sidecar["hparams"]["good"]) == ("completed", 1)
