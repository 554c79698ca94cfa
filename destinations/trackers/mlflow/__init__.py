"""`MLflow`: the destination, and what its background thread does."""

from .destination import MLflow

__all__ = ["MLflow"]
