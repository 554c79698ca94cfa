"""The interpreter's exit, on each Python that is found: submitted files are delivered, although no thread can start any more."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import boto3
import pytest

from tests.effort import times
from uploads.spool.spool import Spool

LIMIT_SECONDS = 120
HOME = Path(__file__).parents[2]

EXITS = """
import atexit, pathlib, sys
from uploads import Timeouts, UploadQueue
uri, isolation, folder = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
queue = UploadQueue(uri, spool=folder / "spool", free_bytes=0, isolation=isolation, workers=2, timeouts=Timeouts(exit_seconds=60, give_back_seconds=60))
for name, size in (("small", 7), ("parts", 11 << 20)):
    (folder / name).write_bytes(b"x" * size)

@atexit.register  # Called before what was registered earlier, such as the queue's own end.
def submit():
    for name in ("small", "parts"):
        queue.submit(folder / name, name)
"""


def _interpreter(version):
    """Returns the path of this Python: a command, or one of pyenv's."""
    found = shutil.which(f"python{version}")
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    others = sorted(home.glob(f"versions/{version}*/bin/python"))
    for program in [found, *map(str, others)]:
        if program and subprocess.run([program, "-V"], capture_output=True, check=False).returncode == 0:
            return program
    return None


@pytest.fixture(params=["this", "3.12", *times([], ["3.13", "3.14"])])
def python(request, tmp_path):
    """An interpreter, and the environment in which it finds this package and what it needs, all of which is pure Python."""
    program = sys.executable if request.param == "this" else _interpreter(request.param)
    if program is None:
        pytest.skip(f"no Python {request.param} was found")
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in (
        "attr",
        "attrs",
        "boto3",
        "botocore",
        "s3transfer",
        "jmespath",
        "dateutil",
        "urllib3",
        "six.py",
    ):
        (packages / name).symlink_to(Path(boto3.__file__).parents[1] / name)
    return program, {**os.environ, "PYTHONPATH": os.pathsep.join([str(HOME), str(packages)])}


@pytest.mark.parametrize("isolation", ["threads", "process"])
def test_files_submitted_while_the_interpreter_exits_are_delivered(python, tmp_path, moto, prefix, isolation):
    """Threads and a worker process deliver them, whole and in parts, although Python 3.12 starts no thread at exit."""
    program, environment = python
    uri = moto.uri(prefix) + f"&part_bytes={5 << 20}"

    done = subprocess.run(
        [program, "-c", EXITS, uri, isolation, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )

    assert {name: len(content) for name, content in moto.objects(prefix).items()} == {
        "small": 7,
        "parts": 11 << 20,
    }, done.stderr
    spool = Spool(tmp_path / "spool")
    assert [outcome.state for outcome in spool.delivered()] == ["done", "done"]
    assert "Traceback" not in done.stderr


TERMINATED = """
import os, signal, sys, threading
from uploads import Timeouts, UploadQueue, exit_on_sigterm
from tests.servers.stores import StoreThatWaits
exit_on_sigterm()
queue = UploadQueue(StoreThatWaits(threading.Event()), spool=sys.argv[1], free_bytes=0, timeouts=Timeouts(exit_seconds=600, give_back_seconds=600))
queue.submit(sys.argv[2], "name")
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_second_sigterm_ends_the_drain_at_once(tmp_path, make_file):
    """The remaining files are named, without a traceback, and the exit code is that for SIGTERM."""
    process = subprocess.Popen(
        [sys.executable, "-c", TERMINATED, tmp_path / "spool", make_file()],
        env={**os.environ, "PYTHONPATH": str(HOME)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert any("finishing" in line for line in process.stderr)

        process.terminate()

        _, errors = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        process.kill()
        process.wait()
    assert "destinations uploads resume" in errors
    assert "Traceback" not in errors
    assert process.returncode == 143
    # The upload may not have begun on a busy machine.
    spool = Spool(tmp_path / "spool")
    assert len(spool.list_pending()) + len(spool.list_inflight()) == 1
