"""Bytes to a store, surviving the process."""

__all__: list[str] = []

__project__ = "training-destinations"
