"""Scanned runs: a root, and its index."""

import contextlib
import os

import pytest

from destinations.runs import open_runs
from destinations.runs.index.index import Index
from destinations.runs.index.root import Root
from destinations.runs.runs import Runs
from tests.test_destinations.runs.folders import NOW, clock


@pytest.fixture
def root(tmp_path):
    """A folder for runs."""
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture
def opened(root, tmp_path):
    """The runs below the root, not scanned yet."""
    with open_runs(root, cache=tmp_path / "cache", scan=False, clock=clock) as runs:
        yield runs


@pytest.fixture
def with_disk(root, tmp_path):
    """Opens runs through a test's file system."""
    with contextlib.ExitStack() as opened:

        def make(disk, now=NOW, **options):
            index = Index(os.path.realpath(root), tmp_path / "disk-cache")
            runs = Runs([Root(os.path.realpath(root), index, disk, **options)], clock=lambda: now)
            return opened.enter_context(runs)

        yield make
