"""Destinations: where the metrics, media and files of a training run go.

`import destinations` only defines names: a destination is imported when it is first used, and torch, numpy,
tqdm and boto3 where they are needed.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .guard import require_own
from .registry import MODULES, create_destination, register_destination

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
    from .trackers.comet import Comet
    from .trackers.mlflow.destination import MLflow
    from .trackers.tensorboard.destination import TensorBoard
    from .trackers.trackio import Trackio
    from .trackers.wandb.destination import WandB
    from .trackers.webhook import Slack, Webhook

__all__ = [
    "Artifacts",
    "Comet",
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
    "create_destination",
    "register_destination",
]


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return getattr(importlib.import_module(MODULES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
