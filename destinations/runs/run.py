"""A run that can be read."""

from .record import RunRecord

__all__ = ["Run"]


class Run:
    """A run that a scan has found.

    Args:
        record: what the scan knows of it.
    """

    def __init__(self, record: RunRecord) -> None:
        self.record = record
