"""Tests training on a real device: exact resumes, callbacks that never wait, and failures of a GPU.

Skipped without CUDA.
"""

import json
import signal
import subprocess
import sys
import warnings

import pytest
import torch

from destinations import InMemory
from destinations.run_directory import read_rows
from events import (
    Callback,
    CheckpointSaver,
    LossSpike,
    LRMonitor,
    MemoryMonitor,
    NaNMonitor,
    OptimizerMonitor,
    Run,
    RuntimeEstimator,
    SpeedMonitor,
    SystemMonitor,
    Trainer,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = "cuda"
BATCHES = 8
LIMIT_SECONDS = 120


def make_model():
    """Returns a model that draws random numbers on its device."""
    torch.manual_seed(3)
    layers = torch.nn.Linear(16, 64), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(64, 4)
    return torch.nn.Sequential(*layers).to(DEVICE)


def make_data():
    """Returns batches on the device."""
    drawn = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(32, 16, generator=drawn).to(DEVICE),
            torch.randint(4, (32,), generator=drawn).to(DEVICE),
        )
        for _ in range(BATCHES)
    ]


def train(model, memory, *callbacks, batches=BATCHES, **options):
    """Trains up to a number of batches; returns the trainer."""
    with Trainer(
        model,
        make_data(),
        max_duration=f"{batches}ba",
        loss_fn=torch.nn.functional.cross_entropy,
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        callbacks=callbacks,
        loggers=memory,
        run_name="r",
        device=DEVICE,
        raise_errors=True,
        **options,
    ) as trainer:
        trainer.fit()
    return trainer


@pytest.mark.parametrize(("precision", "compiled"), [("fp16", False), ("bf16", False), ("bf16", True)])
@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning")
def test_a_resumed_run_equals_the_uninterrupted_run(tmp_path, precision, compiled):
    """Weights, moments, the gradient scale and every loss are the same to the last bit, with dropout."""

    def run(name, batches, memory, **options):
        model = torch.compile(make_model()) if compiled else make_model()
        saver = CheckpointSaver(tmp_path / name, save_interval="4ba")
        return train(model, memory, saver, batches=batches, precision=precision, **options).state

    def losses(memory):
        return {
            record.step: record.value["loss/train/total"]
            for record in memory.records
            if record.kind == "metrics" and "loss/train/total" in record.value
        }

    whole, resumed = InMemory(), InMemory()
    expected = run("whole", BATCHES, whole)
    run("resumed", BATCHES // 2, resumed)
    torch.rand(5, device=DEVICE)  # The checkpoint alone decides the next draw, not what happened since.
    found = run("resumed", BATCHES, resumed, load_path=tmp_path / "resumed")

    assert losses(resumed) == losses(whole)
    assert len(losses(whole)) == BATCHES
    for one, other in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert str(found.optimizers[0].state_dict()) == str(expected.optimizers[0].state_dict())


class SyncMode(Callback):
    """Makes every synchronization that torch knows of raise, or allows it again, at an event of a batch."""

    def __init__(self, event, batch, mode):
        super().__init__()
        self._at, self._mode = (event, batch), mode

    def run_event(self, event, state, logger):
        if (event.value, int(state.timestamp.batch)) == self._at:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that it does not know of all.
                torch.cuda.set_sync_debug_mode(self._mode)


def test_eight_callbacks_never_synchronize():
    """They watch loss, norms, memory, speed and the machine, and their metrics arrive."""
    memory = InMemory()
    watching = [
        LRMonitor(),
        LossSpike(),
        MemoryMonitor(),
        NaNMonitor(),
        OptimizerMonitor(batch_log_interval=1),
        RuntimeEstimator(),
        SpeedMonitor(window_size=2),
        SystemMonitor(),
    ]
    try:
        train(
            make_model(),
            memory,
            SyncMode("batch_start", 2, "error"),
            *watching,
            SyncMode("batch_end", BATCHES - 1, "default"),
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")

    names = {name for record in memory.records if record.kind == "metrics" for name in record.value}
    for part in ("loss/train/total", "lr/AdamW/group0", "memory/", "l2_norm/grad/global", "throughput/"):
        assert any(name.startswith(part) for name in names), (part, names)


def test_a_captured_step_is_logged_after_each_replay():
    """The graph writes each loss to the same memory, and each row has the loss of its own replay."""

    def step():
        optimizer.zero_grad(set_to_none=False)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs)
        loss.backward()
        optimizer.step()
        return loss

    rows = []
    for is_captured in (False, True):
        torch.manual_seed(3)
        model = torch.nn.Linear(16, 16).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.ones(4, 16, device=DEVICE)
        memory, graph = InMemory(), torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        if is_captured:
            with torch.cuda.graph(graph):
                loss = step()
        with Run(loggers=memory, run_name="r") as run:
            for _ in range(20):
                run.batch_start()
                if is_captured:
                    graph.replay()
                run.log_metrics({"loss": loss if is_captured else step()})
                run.batch_end()
        rows.append([record.value["loss"] for record in memory.records if record.kind == "metrics"])

    assert rows[1] == pytest.approx(rows[0])
    assert sorted(set(rows[1]), reverse=True) == rows[1]


FAILS = """
import sys
import torch
from destinations import RunDirectory
from events import Callback, Trainer

class Fails(torch.nn.Linear):
    def forward(self, inputs):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 6 and sys.argv[2] == "memory":
            torch.empty(1 << 50, dtype=torch.uint8, device=inputs.device)
        if self.calls == 6:
            inputs = inputs[torch.full((4,), 1000, device=inputs.device)]
        return super().forward(inputs)

class Flushes(Callback):
    def batch_end(self, state, logger):
        logger.flush()

model = Fails(4, 2).to(sys.argv[3])
data = [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(40)]
with Trainer(
    model, data, max_duration="1ep", loss_fn=torch.nn.functional.cross_entropy,
    optimizers=torch.optim.SGD(model.parameters(), lr=0.1), callbacks=Flushes(),
    loggers=RunDirectory(sys.argv[1]), run_name="r", device=sys.argv[3],
) as trainer:
    trainer.fit()
"""


@pytest.mark.parametrize(
    ("kind", "text"), [("memory", "Tried to allocate"), ("index", "device-side assert triggered")]
)
def test_a_run_that_dies_on_the_device_is_failed_and_keeps_its_rows(tmp_path, kind, text):
    """Out of memory and a failed assertion in a kernel, after which no call to the device returns, are both covered."""
    command = [sys.executable, "-c", FAILS, str(tmp_path / "run"), kind, DEVICE]
    outcome = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_SECONDS)

    # After an assertion in a kernel, torch aborts the interpreter while it ends: no call to the device returns.
    assert outcome.returncode in {1, -signal.SIGABRT}, outcome.stderr
    assert text in outcome.stderr
    sidecar = json.loads((tmp_path / "run/sidecar.json").read_text())
    rows = [one for one in read_rows(tmp_path / "run") if "loss/train/total" in one.metrics]
    assert sidecar["status"] == "failed"
    assert [one.step for one in rows][:5] == [0, 1, 2, 3, 4]


FORKS = """
import os
import sys
import torch
from events import CheckpointSaver, Trainer

torch.zeros(1, device=sys.argv[2])

def fit(device):
    model = torch.nn.Linear(4, 2)
    with Trainer(
        model, [(torch.randn(4, 4), torch.randint(2, (4,)))] * 2, max_duration="1ep",
        loss_fn=torch.nn.functional.cross_entropy, optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=CheckpointSaver(sys.argv[1], save_interval="1ba"), device=device,
    ) as trainer:
        trainer.fit()
    print("trained on", trainer.state.device)

for device in (None, "gpu", "cpu"):
    if not os.fork():
        try:
            fit(device)
        except RuntimeError as error:
            print(error)
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""


def test_a_forked_process_says_why_it_cannot_use_the_device(tmp_path):
    """The error comes before the first tensor; on the CPU, the process trains and saves."""
    command = [sys.executable, "-W", "ignore", "-c", FORKS, str(tmp_path / "saved"), DEVICE]
    outcome = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_SECONDS)

    *refusals, trained = outcome.stdout.splitlines()
    assert trained == "trained on cpu", outcome.stderr
    assert len(refusals) == 2
    assert all("it was forked after CUDA was used in its parent" in text for text in refusals)
