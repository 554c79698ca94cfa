"""Where what a training run says and makes goes.

`import destinations` defines names and does nothing else: a destination is imported when it is asked for, and torch, numpy, tqdm
and boto3 where they are used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .guard import require_own

require_own("events")
require_own("uploads")

if TYPE_CHECKING:
    from .artifacts import Artifacts
    from .base import LoggerDestination
    from .functions import Functions
    from .in_memory import InMemory
    from .run_directory import RunDirectory
    from .text.console import Console
    from .text.progress_bar import ProgressBar
    from .text.text_file import TextFile
    from .trackers.mlflow.destination import MLflow
    from .trackers.tensorboard.destination import TensorBoard
    from .trackers.trackio import Trackio
    from .trackers.wandb.destination import WandB
    from .trackers.webhook import Slack, Webhook

__all__ = [
    "Artifacts",
    "Console",
    "Functions",
    "InMemory",
    "LoggerDestination",
    "MLflow",
    "ProgressBar",
    "RunDirectory",
    "Slack",
    "TensorBoard",
    "TextFile",
    "Trackio",
    "WandB",
    "Webhook",
]

# Imported when asked for: whoever wants one destination, or reads a run, does not pay for all.
_MODULES = {
    "Artifacts": ".artifacts",
    "Console": ".text.console",
    "Functions": ".functions",
    "InMemory": ".in_memory",
    "LoggerDestination": ".base",
    "MLflow": ".trackers.mlflow.destination",
    "ProgressBar": ".text.progress_bar",
    "RunDirectory": ".run_directory",
    "Slack": ".trackers.webhook",
    "TensorBoard": ".trackers.tensorboard.destination",
    "TextFile": ".text.text_file",
    "Trackio": ".trackers.trackio",
    "WandB": ".trackers.wandb.destination",
    "Webhook": ".trackers.webhook",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
