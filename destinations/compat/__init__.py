"""Calls of other loggers, with their own names, that write a run folder.

| name            | takes the place of                     |
|-----------------|----------------------------------------|
| `SummaryWriter` | `torch.utils.tensorboard.SummaryWriter` |
| `wandb`         | the package `wandb`                    |

A program changes one import: `from destinations.compat import SummaryWriter`, or `wandb`. Nothing is patched.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import wandb
    from .summary_writer import SummaryWriter

__all__ = ["SummaryWriter", "wandb"]


def __getattr__(name: str) -> Any:
    if name == "SummaryWriter":
        from .summary_writer import SummaryWriter

        return SummaryWriter
    if name == "wandb":
        return importlib.import_module(".wandb", __name__)
    from uploads import missing_name

    raise missing_name(__name__, name, __all__)
