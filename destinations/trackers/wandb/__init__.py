"""`WandB`: the destination, and what its background thread does."""

from .destination import WandB

__all__ = ["WandB"]
