"""Where what a training run says and makes goes.

`import destinations` defines names and does nothing else: a destination is imported when it is asked for, and torch, numpy, tqdm
and boto3 where they are used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ._guard import require_own

require_own("events")
require_own("uploads")

if TYPE_CHECKING:
    from .artifacts import Artifacts
    from .base import LoggerDestination
    from .console import Console
    from .functions import Functions
    from .in_memory import InMemory
    from .progress_bar import ProgressBar
    from .run_directory import RunDirectory
    from .text_file import TextFile
    from .trackers.mlflow import MLflow
    from .trackers.slack import Slack
    from .trackers.tensorboard import TensorBoard
    from .trackers.trackio import Trackio
    from .trackers.wandb import WandB
    from .trackers.webhook import Webhook

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
    "Console": ".console",
    "Functions": ".functions",
    "InMemory": ".in_memory",
    "LoggerDestination": ".base",
    "MLflow": ".trackers.mlflow",
    "ProgressBar": ".progress_bar",
    "RunDirectory": ".run_directory",
    "Slack": ".trackers.slack",
    "TensorBoard": ".trackers.tensorboard",
    "TextFile": ".text_file",
    "Trackio": ".trackers.trackio",
    "WandB": ".trackers.wandb",
    "Webhook": ".trackers.webhook",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
