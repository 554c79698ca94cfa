"""Tests checkpoints on a real device: the training thread does not wait, and the copy is exact.

Skipped without CUDA.
"""

import pytest
import torch

from events import CheckpointSaver, CheckpointWriting, Engine, Logger, State, read_checkpoint
from events.trainer.checkpoint.snapshot import SnapshotBuffer, rebuild

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SPIN_CYCLES = 500_000_000


def test_a_copy_is_queued_between_two_steps():
    """The call returns while kernels are queued, and later changes are not in the copy."""
    weight = torch.zeros(1 << 22, device="cuda")
    buffer = SnapshotBuffer()
    buffer.reserve(weight.nbytes)
    buffer.prepare()
    done = torch.cuda.Event()
    torch.cuda._sleep(SPIN_CYCLES)
    weight.fill_(1.0)

    snapshot, wait = buffer.take({"a": weight})
    weight.fill_(2.0)
    done.record()
    was_done = done.query()
    wait()

    assert not was_done
    assert buffer._is_pinned
    assert torch.equal(rebuild(snapshot, buffer.memory)["a"], torch.ones(1 << 22))
    buffer.release()


@pytest.mark.parametrize("process_bytes", [0, 1 << 40], ids=["process", "thread"])
def test_a_checkpoint_from_a_device_is_read_on_the_host(tmp_path, process_bytes):
    """Weights and moments are as they were at the save."""
    model = torch.nn.Linear(1000, 1000, device="cuda")
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 1000, device="cuda")).sum().backward()
    optimizer.step()
    saver = CheckpointSaver(
        tmp_path, save_interval="2ba", writing=CheckpointWriting(process_bytes=process_bytes)
    )
    state = State("r", model=model, optimizers=(optimizer,))
    engine = Engine(state, Logger(state), [saver])
    engine.run_event("init")
    engine.run_event("fit_start")
    expected = {name: value.cpu() for name, value in model.state_dict().items()}

    for _ in range(2):
        state.timestamp = state.timestamp.to_next_batch(8)
        engine.run_event("batch_checkpoint")
    with torch.no_grad():
        model.weight.zero_()
    engine.close()

    loaded = read_checkpoint(tmp_path / "latest.symlink")
    assert all(torch.equal(loaded["model"][name], value) for name, value in expected.items())
    assert loaded["optimizers"][0]["state"][0]["exp_avg"].device.type == "cpu"
