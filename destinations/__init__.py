"""Where what a training run says and makes goes.

`import destinations` defines names and does nothing else: torch, numpy, tqdm and boto3 are imported where they are used.
"""

from ._guard import require_own

require_own("events")
require_own("uploads")

# The guard above explains what these imports would not.
from .base import LoggerDestination  # noqa: E402
from .console import Console  # noqa: E402
from .in_memory import InMemory  # noqa: E402
from .progress_bar import ProgressBar  # noqa: E402
from .text_file import TextFile  # noqa: E402

__all__ = ["Console", "InMemory", "LoggerDestination", "ProgressBar", "TextFile"]
