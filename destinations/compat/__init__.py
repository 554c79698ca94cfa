"""Classes of other loggers, with their own names and calls, that write a run folder.

| name            | takes the place of                     |
|-----------------|----------------------------------------|
| `SummaryWriter` | `torch.utils.tensorboard.SummaryWriter` |

A program changes one import: `from destinations.compat import SummaryWriter`. Nothing is patched.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .summary_writer import SummaryWriter

__all__ = ["SummaryWriter"]


def __getattr__(name: str) -> Any:
    if name == "SummaryWriter":
        from .summary_writer import SummaryWriter

        return SummaryWriter
    from uploads import missing_name

    raise missing_name(__name__, name, __all__)
