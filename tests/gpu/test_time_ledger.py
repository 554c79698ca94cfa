"""Tests the ledger's clock on a real device: kernels count for the pass that queued them.

Skipped without CUDA.
"""

import pytest
import torch

from destinations import InMemory
from events import Callback, TimeLedger, Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SPIN_CYCLES = 50_000_000


class Spins(torch.nn.Module):
    """A model whose forward pass queues a long kernel, and returns at once."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Linear(4, 2)

    def forward(self, inputs):
        torch.cuda._sleep(SPIN_CYCLES)
        return self.layers(inputs)


class Waits(Callback):
    """Waits for the device after each batch, as printing the loss does."""

    def batch_end(self, state, logger):
        torch.cuda.synchronize()


def test_kernels_count_for_the_pass_that_queued_them():
    """Most of a batch is in the forward pass, although the host waits elsewhere.

    There are a hundred batches, so that what torch sets up in the first one matters little.
    """
    ledger = TimeLedger()
    data = [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(100)]
    model = Spins()
    with Trainer(
        model,
        data,
        max_duration="1ep",
        loss_fn=torch.nn.functional.cross_entropy,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[ledger, Waits()],
        loggers=[InMemory()],
        device="cuda",
    ) as trainer:
        trainer.fit()
        _, totals = ledger.snapshot()
        charged = ledger.divided(totals, [0] * len(totals))
    parts = dict(zip(ledger.productive, charged[3:7], strict=True))

    assert parts["forward"] > 0.8 * sum(parts.values())
