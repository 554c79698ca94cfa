"""A small, complete training loop, with checkpoints and several ranks."""
