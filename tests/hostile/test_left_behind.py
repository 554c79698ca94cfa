"""What dead processes left: half-staged files, spools that nobody opens again, bytes that count."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.stores import MemoryStore
from uploads.errors import TransientStoreError
from uploads.outcome import UploadState
from uploads.spool import Spool

LIMIT_SECONDS = 120

MOVE_AND_DIE = """
import os, signal, sys
from pathlib import Path
from uploads import UploadQueue

queue = UploadQueue(sys.argv[1], spool=sys.argv[2], free_bytes=0)

def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

queue.spool.publish = die
queue.submit(sys.argv[3], "moved", move=True)
"""


def _run(program, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.fixture
def as_other_host(monkeypatch):
    """The host is called something else from here on."""
    monkeypatch.setattr("socket.gethostname", lambda: "renamed")


def test_a_moved_file_is_adopted_though_the_host_was_renamed(tmp_path, make_file, make_queue, as_other_host):
    """A container has another name and the same process ids at every start; the kernel's lock tells who is dead."""
    source = make_file("moved", b"x" * 100)
    _run(MOVE_AND_DIE, tmp_path / "store", tmp_path / "spool", source)
    assert not source.exists()

    queue = make_queue(tmp_path / "store", spool=tmp_path / "spool")

    assert queue.drain(LIMIT_SECONDS).is_empty
    assert (tmp_path / "store/moved").read_bytes() == b"x" * 100
    assert [path for path in queue.spool.tmp.iterdir() if path.is_dir()] == []


def test_what_a_living_process_stages_is_left_alone(tmp_path):
    """Whoever sweeps, and also when that is the process itself."""
    spool = Spool(tmp_path)
    spool.create()
    staged = spool.new_folder()

    assert Spool(tmp_path).sweep_tmp() == 0
    assert spool.sweep_tmp() == 0

    assert staged.is_dir()
    del spool
    assert Spool(tmp_path).sweep_tmp() == 1
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_spool_that_was_deleted_and_made_again_protects_what_is_staged(tmp_path):
    """Its lock was deleted too, so another is taken."""
    spool = Spool(tmp_path / "spool")
    spool.create()
    spool.new_folder()
    shutil.rmtree(spool.path)
    spool.create()

    staged = spool.new_folder()

    assert Spool(spool.path).sweep_tmp() == 0
    assert staged.is_dir()


class Down(MemoryStore):
    """A store that nobody reaches."""

    def put(self, name, body, *, overwrite, notes=None):
        raise TransientStoreError("no route to host")


def test_the_limit_of_a_spool_is_held_over_restarts(make_queue, make_file):
    """What earlier processes left counts until it is delivered."""
    taken = []
    for number in range(5):
        queue = make_queue(Down(), spool_bytes=250)
        taken += [queue.submit(make_file(content=b"x" * 100), f"{number}-{turn}").state for turn in (0, 1)]
        queue.close(0)
    assert [state is UploadState.REFUSED for state in taken] == [False] * 2 + [True] * 8

    queue = make_queue(MemoryStore(), spool_bytes=250)
    assert queue.drain(LIMIT_SECONDS).is_empty

    assert queue.submit(make_file(content=b"x" * 250), "last").result(LIMIT_SECONDS)
