"""A small, complete trainer with checkpoints, on one device or several ranks."""
