"""A child process without the functions that macOS and Windows lack imports everything and runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}

WITHOUT_PROC = """
import mmap, os, sys

for name in ("fdatasync", "copy_file_range", "posix_fallocate", "posix_fadvise", "sched_getaffinity"):
    delattr(os, name)
for name in ("MAP_POPULATE", "MAP_NORESERVE", "MAP_STACK", "MADV_DONTFORK"):
    if hasattr(mmap, name):
        delattr(mmap, name)
stat = os.stat

def hides(path):
    return isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith("/proc")

def without_proc(path, *arguments, **named):
    if hides(path):
        raise FileNotFoundError(2, "no /proc", path)
    return stat(path, *arguments, **named)

def refuse(event, arguments):
    if event == "open" and hides(arguments[0]):
        raise FileNotFoundError(2, "no /proc", arguments[0])

os.stat = without_proc
sys.addaudithook(refuse)
"""

WITHOUT_FCNTL = """
import sys

sys.modules["fcntl"] = None
"""

RUN = """
from destinations import RunDirectory
from events import Run

with Run(RunDirectory(sys.argv[1], if_exists="resume"), run_name="mine", raise_errors=True) as run:
    for step in range(3):
        run.logger.log_metrics({"loss": 1.0}, step)
"""

UPLOAD = """
from uploads import UploadQueue

source = sys.argv[1] + ".txt"
open(source, "wb").write(b"x" * (3 << 20))
with UploadQueue(sys.argv[1] + "-store", spool=sys.argv[1] + "-spool") as queue:
    queue.submit(source, "big.txt").result(60)
"""

AS_ON_WINDOWS = """
# What a Python for Windows has of its own comes first: it must not miss what is taken away below.
import asyncio, concurrent.futures, mmap, multiprocessing, os, shutil, subprocess, sys, tempfile
import numpy, torch

missing = ["copy_file_range", "fchmod", "fdatasync", "fork", "geteuid", "getuid", "mkfifo", "posix_fadvise",
           "posix_fallocate", "pread", "preadv", "pwrite", "pwritev", "register_at_fork", "sched_getaffinity",
           "sync", "uname", "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_PATH"]
for name in missing:
    delattr(os, name)
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None

import importlib, pkgutil
import destinations, events, uploads

for package in (uploads, events, destinations):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__") and ".adapters." not in module.name:
            importlib.import_module(module.name)
"""


def run_python(code, *arguments):
    """Runs a program, and returns its exit code and output."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def rows(folder):
    """Returns the steps of a run's rows."""
    return [line.split(",")[0] for line in (folder / "metrics.csv").read_text().splitlines()[1:]]


@pytest.mark.parametrize("missing", [WITHOUT_PROC, WITHOUT_FCNTL], ids=["proc", "fcntl"])
def test_a_run_works_without_linux_only_functions(tmp_path, missing):
    """Every row is written without /proc, fdatasync, fallocate and mmap flags; a warning says if locks are missing."""
    code, said = run_python(missing + RUN, tmp_path / "run")

    assert code == 0, said
    assert ("without locks: let only one process write to it" in said) == (missing == WITHOUT_FCNTL)
    assert rows(tmp_path / "run") == ["0", "1", "2"]
    assert not (tmp_path / "run" / ".lock").exists()


def test_an_upload_works_without_linux_only_functions(tmp_path):
    """A file larger than one buffer is copied, checked and uploaded."""
    code, said = run_python(WITHOUT_PROC + UPLOAD, tmp_path / "x")

    assert code == 0, said
    assert (tmp_path / "x-store" / "big.txt").stat().st_size == 3 << 20


def test_uploads_without_file_locks_raise(tmp_path):
    """The queue's constructor refuses them, before anything is lost."""
    code, said = run_python(WITHOUT_FCNTL + UPLOAD, tmp_path / "x")

    assert code == 1
    assert "no module fcntl, and therefore no file locks, which uploads need" in said


def test_every_module_can_be_imported_without_posix():
    """Python for Windows can import every module; adapters need their frameworks."""
    code, said = run_python(AS_ON_WINDOWS)

    assert code == 0, said
