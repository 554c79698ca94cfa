"""Shared by the tests of adapters: callbacks that record events, and the events that the docs list."""

import json
import os
import sys
import threading
from pathlib import Path

import pytest

from events import Callback, Event
from uploads import LocalStore

ROOT = Path(__file__).parents[3]


class Listener(Callback):
    """Records each event, with the batches and epochs completed."""

    def __init__(self):
        self.heard = []
        self.labels = []

    def run_event(self, event, state, logger):
        self.heard.append((event.value, int(state.timestamp.batch), int(state.timestamp.epoch)))
        if event is Event.EVAL_START:
            self.labels.append((state.dataloader_label, state.dataloader_len, state.phase.value))

    @property
    def names(self):
        return [name for name, *_ in self.heard]


class Raising(Callback):
    """Raises at an event."""

    def __init__(self, event, error):
        self.event = event
        self.error = error

    def run_event(self, event, state, logger):
        if event is self.event:
            raise self.error


class SlowStore(LocalStore):
    """A local store whose puts wait for an event."""

    def __init__(self, root):
        super().__init__(root)
        self.may_put = threading.Event()

    def put(self, name, body, **options):
        assert self.may_put.wait(300)
        return super().put(name, body, **options)


@pytest.fixture
def slow_store(tmp_path):
    """Returns a store whose puts wait, so that uploads stay in the spool."""
    store = SlowStore(tmp_path / "store")
    yield store
    store.may_put.set()


@pytest.fixture
def inodes():
    """Returns a function that gives the inodes of a folder's files: hard links share one."""
    return lambda folder: {path.stat().st_ino for path in Path(folder).rglob("*") if path.is_file()}


@pytest.fixture
def listener():
    """Returns a callback that receives every event."""
    return Listener()


@pytest.fixture(scope="module")
def listener_class():
    """Returns the class of the listener, for runs that several tests read."""
    return Listener


@pytest.fixture
def raising():
    """Returns the class of a callback that raises."""
    return Raising


@pytest.fixture(scope="session")
def sidecar():
    """Returns a function that reads a run's final status from its folder."""
    return lambda folder: json.loads((Path(folder) / "sidecar.json").read_text())


@pytest.fixture(scope="session")
def documented():
    """Returns a function that gives the events that docs/adapters.md lists for a trainer."""

    def events_of(trainer):
        page = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
        lines = page[page.index("## Which events there are") :].split("\n\n")[2].splitlines()
        header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
        column = header.index(trainer)
        named = {row[0].strip("`"): bool(row[column]) for row in rows}
        assert list(named) == [event.value for event in Event if event.value in named]
        return {name for name, is_there in named.items() if is_there}

    return events_of


@pytest.fixture(scope="session")
def environment():
    """Returns the environment of child processes: our sources, one thread, no settings of the machine."""
    return {
        "PYTHONPATH": str(ROOT),
        "PATH": str(Path(sys.executable).parent) + ":/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HOME": "/tmp",  # noqa: S108  # only so that there is one
        **{name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")},
    }
