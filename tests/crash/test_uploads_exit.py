"""How a training process may end, and what its queue does then."""

import os
import random
import shutil
import signal
import subprocess
import time

import pytest

from uploads.spool.spool import Spool

LIMIT_SECONDS = 240

SLOW = """
import os, signal, sys, threading
from uploads import Timeouts, UploadQueue, exit_on_sigterm
from tests.servers.stores import MemoryStore
class Slow(MemoryStore):
    def put(self, name, body, *, overwrite, notes=None):
        threading.Event().wait(float(sys.argv[3]))
        return super().put(name, body, overwrite=overwrite, notes=notes)
queue = UploadQueue(Slow(), spool=sys.argv[1], free_bytes=0, workers=2, timeouts=Timeouts(exit_seconds=float(sys.argv[4]), give_back_seconds=0.1))
for number in range(4):
    open(sys.argv[2], "w").write(str(number))
    queue.submit(sys.argv[2], f"n{number}")
"""
ENDINGS = {
    "falls off the end": "",
    "sys.exit": "sys.exit(7)",
    "exception": "raise ValueError('training failed')",
    "os._exit": "os._exit(7)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM); threading.Event().wait(600)",
    "SIGTERM, installed": "exit_on_sigterm(); os.kill(os.getpid(), signal.SIGTERM); threading.Event().wait(600)",
    "Ctrl-C": "os.kill(os.getpid(), signal.SIGINT); threading.Event().wait(600)",
}


def _left(tmp_path):
    spool = Spool(tmp_path / "spool")
    return len(spool.list_pending()) + len(spool.list_inflight())


@pytest.mark.parametrize(
    "ending", ["falls off the end", "sys.exit", "exception", "SIGTERM, installed", "Ctrl-C"]
)
def test_an_orderly_end_drains(start, tmp_path, ending):
    """However the interpreter exits in an orderly way, it uploads the submitted files first."""
    process = start(
        SLOW + ENDINGS[ending], tmp_path / "spool", tmp_path / "file", 0.05, LIMIT_SECONDS, cwd=os.curdir
    )

    _, errors = process.communicate(timeout=LIMIT_SECONDS)

    assert _left(tmp_path) == 0, errors
    assert [
        outcome.remote_name
        for outcome in sorted(Spool(tmp_path / "spool").delivered(), key=lambda one: one.remote_name)
    ] == ["n0", "n1", "n2", "n3"]
    expected = {
        "falls off the end": 0,
        "sys.exit": 7,
        "exception": 1,
        "SIGTERM, installed": 143,
        "Ctrl-C": -signal.SIGINT,
    }
    assert process.returncode == expected[ending]


@pytest.mark.parametrize("ending", ["os._exit", "SIGTERM"])
def test_a_sudden_end_keeps_everything_in_the_spool(start, tmp_path, ending):
    """Without a handler SIGTERM is as sudden as os._exit; nothing is lost."""
    process = start(
        SLOW + ENDINGS[ending], tmp_path / "spool", tmp_path / "file", 3600, LIMIT_SECONDS, cwd=os.curdir
    )

    process.communicate(timeout=LIMIT_SECONDS)

    assert _left(tmp_path) == 4


@pytest.mark.parametrize("ending", ["falls off the end", "SIGTERM, installed"])
def test_the_exit_has_a_deadline_and_names_what_is_left(start, tmp_path, ending):
    """With a slow store the process ends at its deadline, names the rest and the command that finishes it."""
    process = start(SLOW + ENDINGS[ending], tmp_path / "spool", tmp_path / "file", 3600, 0.5, cwd=os.curdir)

    _, errors = process.communicate(timeout=LIMIT_SECONDS)

    assert _left(tmp_path) == 4
    assert "n0, n1, n2, n3" in errors
    assert f"destinations uploads resume {tmp_path / 'spool'}" in errors


@pytest.mark.parametrize("turn", range(2))
def test_a_second_ctrl_c_ends_at_once(start, tmp_path, turn):
    """The first starts the drain, the second ends it, at whatever moment it comes.

    The spool is intact and the command is printed.
    """
    chance = random.Random(turn)
    process = start(SLOW + ENDINGS["Ctrl-C"], tmp_path / "spool", tmp_path / "file", 3600, 600, cwd=os.curdir)
    assert any("finishing" in line for line in process.stderr)
    time.sleep(chance.random() * 0.1)

    process.send_signal(signal.SIGINT)

    errors = process.stderr.read()
    assert process.wait(LIMIT_SECONDS) == -signal.SIGINT
    assert "destinations uploads resume" in errors
    assert _left(tmp_path) == 4


def test_ctrl_c_in_the_terminal_does_not_reach_the_worker(start, tmp_path):
    """The whole foreground group gets SIGINT; the worker is in a session of its own."""
    program = """
import os, sys
from uploads import UploadQueue
queue = UploadQueue(sys.argv[1], spool=sys.argv[2], isolation="process", free_bytes=0)
print(os.getpgid(0) == os.getpgid(queue._drainer._worker.process.pid), os.getsid(0) == os.getsid(queue._drainer._worker.process.pid))
queue.close(120)
"""

    output, _ = start(program, tmp_path / "store", tmp_path / "spool").communicate(timeout=LIMIT_SECONDS)

    assert output.split() == ["False", "False"]


TINY_DISK = """
import os, pathlib, sys
from uploads import UploadQueue
from tests.servers.stores import MemoryStore
folder = pathlib.Path(sys.argv[1])
store = MemoryStore()
queue = UploadQueue(store, spool=folder / "spool", free_bytes=0)
small, large = pathlib.Path(sys.argv[2]) / "small", pathlib.Path(sys.argv[2]) / "large"
small.write_bytes(b"x" * 1000)
large.write_bytes(b"x" * 1_000_000)
free = os.statvfs
os.statvfs = lambda path: free("/")  # As on a disk that somebody else fills between our look and our write.
print(queue.submit(small, "first").result(120).state)
refused = queue.submit(large, "large")
print(refused.state, "No room" in str(refused.exception(0)) or "no room" in str(refused.exception(0)), str(folder) in str(refused.exception(0)))
print(queue.submit(small, "second").result(120).state)
print(sorted(path.name for path in (folder / "spool/tmp").iterdir() if path.suffix != ".lock"))
"""


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "-Urm", "true"], check=False, capture_output=True).returncode != 0,
    reason="user namespaces are not allowed here",
)
@pytest.mark.parametrize("options", ["size=256k", "size=10m,nr_inodes=24"])
def test_a_full_disk_refuses_and_recovers(start, tmp_path, options):
    """The disk runs out of bytes, or of inodes.

    The file is refused with path and size, no half-staged file stays, and later files arrive.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o {options} none {disk} && exec "$0" "$@"'
    program = TINY_DISK
    if "inodes" in options:
        program = program.replace(
            "refused = queue",
            'import itertools\nfor n in itertools.count():\n    try:\n        (folder / f"filler{n}").touch()\n    except OSError:\n        break\nrefused = queue',
        ).replace(
            'print(queue.submit(small, "second")',
            '(folder / "filler0").unlink(); [(folder / f"filler{k}").unlink() for k in range(1, n)]\nprint(queue.submit(small, "second")',
        )

    output, errors = start(
        program, disk, tmp_path, before=["unshare", "-Urm", "sh", "-c", mount], cwd=os.curdir
    ).communicate(timeout=LIMIT_SECONDS)

    assert output.splitlines() == ["done", "refused True True", "done", "[]"], errors


def test_too_many_open_files_is_not_taken_for_damage(start, tmp_path):
    """EMFILE while an entry is read delays it; it is neither corrupt nor rejected."""
    program = SLOW.replace("range(4)", "range(1)") + "print(queue.drain(120).is_empty)"
    program = program.replace("give_back_seconds=0.1", "give_back_seconds=120")  # For what is noted late.
    limited = program.replace(
        "from uploads import Timeouts", "import resource\nfrom uploads import Timeouts"
    ).replace(
        "print(queue",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 4096))\nthreading.Event().wait(0.3)\nresource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))\nprint(queue",
    )

    output, errors = start(
        limited, tmp_path / "spool", tmp_path / "file", 0.01, LIMIT_SECONDS, cwd=os.curdir
    ).communicate(timeout=LIMIT_SECONDS)

    assert output.split() == ["True"], errors
    assert [outcome.state for outcome in Spool(tmp_path / "spool").delivered()] == ["done"]
