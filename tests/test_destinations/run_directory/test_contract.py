"""RunDirectory keeps to what every destination must keep to."""

import pytest

from destinations import RunDirectory
from destinations.testing import DestinationContract


class TestRunDirectory(DestinationContract):
    """`test_metrics.py` reads metrics back: calls of one step share a row here, so records merge."""

    @pytest.fixture
    def destination(self, tmp_path):
        return RunDirectory(tmp_path / "run", flush_seconds=0.05)
