"""`MLflow`: a tracker for MLflow."""

from .destination import MLflow

__all__ = ["MLflow"]
