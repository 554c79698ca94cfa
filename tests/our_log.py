"""What our own packages log: other packages, and threads that an earlier test has left behind, log when they like."""

import pytest

__all__ = ["caplog"]

OURS = {"destinations", "events", "uploads"}


@pytest.fixture
def caplog(caplog):
    """Pytest's own, for the records of our packages alone."""

    def is_ours(record):
        return record.name.partition(".")[0] in OURS

    caplog.handler.addFilter(is_ours)
    yield caplog
    caplog.handler.removeFilter(is_ours)
