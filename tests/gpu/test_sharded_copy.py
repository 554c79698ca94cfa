"""Tests shards of a model on real devices: over NCCL on two if there are two, else on one.

Skipped without CUDA.
"""

import os

import pytest
import torch
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from events import CheckpointSaver, CheckpointWriting, Trainer, read_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = "cuda"
BACKEND = "cpu:gloo,cuda:nccl"


def train(rank, ranks, folder, load_path, batches, process_bytes):
    """Trains on one rank, and saves the weights."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        BACKEND, init_method=f"file://{folder}/rendezvous{batches}", rank=rank, world_size=ranks
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 301), torch.nn.Linear(301, 64)).to(DEVICE)
    fully_shard(model, mesh=init_device_mesh(DEVICE, (ranks,)))
    data = torch.randn(8, 64, generator=torch.Generator().manual_seed(7))
    with Trainer(
        model,
        [(data, data)] * 6,
        max_duration=f"{batches}ba",
        loss_fn=torch.nn.functional.mse_loss,
        optimizers=torch.optim.Adam(model.parameters()),
        callbacks=CheckpointSaver(
            f"{folder}/saved",
            save_interval="3ba",
            writing=CheckpointWriting(process_bytes=process_bytes),
            overwrite=True,
        ),
        run_name="r",
        device=DEVICE,
        load_path=load_path,
    ) as trainer:
        trainer.fit()
    weights = {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}
    torch.save(weights, f"{folder}/weights.{rank}")
    distributed.destroy_process_group()


@pytest.mark.parametrize("process_bytes", [0, 1 << 40], ids=["process", "thread"])
def test_shards_are_saved_from_devices_and_loaded_back(tmp_path, process_bytes):
    """Six batches at once, and three plus three from a checkpoint, end with the same weights."""
    ranks = min(2, torch.cuda.device_count() or 2)
    multiprocessing.spawn(train, (ranks, tmp_path, None, 6, process_bytes), nprocs=ranks)
    expected = torch.load(tmp_path / "weights.0")

    saved = read_checkpoint(tmp_path / "saved")["model"]
    multiprocessing.spawn(
        train, (ranks, tmp_path, tmp_path / "saved/ep0-ba3", 7, process_bytes), nprocs=ranks
    )

    assert all(torch.equal(saved[name], value) for name, value in expected.items())
    resumed = read_checkpoint(tmp_path / "saved/ep0-ba6")["model"]
    torch.testing.assert_close(dict(resumed), expected)
