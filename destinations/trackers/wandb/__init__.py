"""`WandB`: a tracker for Weights & Biases."""

from .destination import WandB

__all__ = ["WandB"]
