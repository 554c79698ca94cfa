"""`TensorBoard`: a tracker that writes event files."""

from .destination import TensorBoard

__all__ = ["TensorBoard"]
