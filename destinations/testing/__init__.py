"""For authors of destinations: a destination that records calls, a loop without a model, contract tests.

Nothing here imports pytest; torch and numpy are imported when the contract runs.
"""

from .contract import DestinationContract
from .dry_run import DryRun
from .recording import Call, RecordingDestination

__all__ = ["Call", "DestinationContract", "DryRun", "RecordingDestination"]
