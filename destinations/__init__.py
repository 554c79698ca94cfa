"""Destinations: where the metrics, media and files of a training run go.

| destination    | what it does                                                       |
|----------------|--------------------------------------------------------------------|
| `RunDirectory` | writes a run as a folder of plain files; survives `kill -9`         |
| `Artifacts`    | uploads files to a folder, S3, Google Cloud, Azure or SFTP          |
| `Console`      | prints metrics in short blocks, and a summary at the end            |
| `ProgressBar`  | shows the progress on a terminal, in a notebook, or as lines        |
| `TextFile`     | writes a log file: lines for people, or JSON                        |
| `InMemory`     | keeps all records in memory, for notebooks and tests                |
| `TensorBoard`  | writes TensorBoard's event files                                    |
| `WandB`        | logs to Weights & Biases                                            |
| `MLflow`       | logs to MLflow                                                      |
| `Comet`        | logs to Comet                                                       |
| `Trackio`      | logs to Trackio                                                     |
| `Slack`        | tells a Slack channel how a run ended                               |
| `Webhook`      | posts chosen events as JSON                                         |
| `Functions`    | calls your functions                                                |
| `Health`       | serves `/healthz` and Prometheus' `/metrics` beside the run         |

Subclass `LoggerDestination` to write your own. `create_destination` makes one by name, and
`register_destination` adds a name.

`import destinations` only defines names: a destination is imported when it is first used, as are torch,
numpy, tqdm and boto3.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .guard import require_all
from .registry import MODULES, create_destination, register_destination

require_all()

if TYPE_CHECKING:
    from .artifacts import Artifacts
    from .base import LoggerDestination
    from .functions import Functions
    from .health import Health
    from .in_memory import InMemory
    from .run_directory import RunDirectory
    from .text.console import Console
    from .text.progress_bar import ProgressBar
    from .text.text_file import TextFile
    from .trackers.comet import Comet
    from .trackers.mlflow import MLflow
    from .trackers.tensorboard import TensorBoard
    from .trackers.trackio import Trackio
    from .trackers.wandb import WandB
    from .trackers.webhook import Slack, Webhook

__all__ = [
    "Artifacts",
    "Comet",
    "Console",
    "Functions",
    "Health",
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
    from uploads import missing_name

    raise missing_name(__name__, name, __all__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
