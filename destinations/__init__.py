"""Where what a training run says and makes goes."""

from ._guard import require_own

require_own("events")
require_own("uploads")

from .base import LoggerDestination  # noqa: E402  # the guard explains what this import would not

__all__ = ["LoggerDestination"]
