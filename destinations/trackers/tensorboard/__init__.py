"""`TensorBoard`: the destination, and what its background thread does."""

from .destination import TensorBoard

__all__ = ["TensorBoard"]
