"""Describes the environment of a run: host, code, packages, hardware, ranks. Redacts secrets.

Runs in a separate thread, because it may wait seconds for programs (git, nvidia-smi) while rows must be
drained.
"""

import getpass
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from events import redact_arguments, redact_text
from uploads.disk import replace_file

from .layout import strict_json

if TYPE_CHECKING:
    from events import State

__all__ = ["describe_environment", "rank_layout", "write_environment"]

_PROGRAM_SECONDS = 5.0
_SLURM = (
    "SLURM_JOB_ID",
    "SLURM_JOB_NAME",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_RESTART_COUNT",
    "SLURM_NODEID",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_PARTITION",
    "SLURM_CLUSTER_NAME",
)


_INSTALLED = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(-py[\d.]+)?\.(dist|egg)-info")
"""The metadata folder of an installed package.

https://packaging.python.org/specifications/recording-installed-packages/
"""


def write_environment(
    paths: Sequence[Path], describe: Callable[[], dict[str, Any]], on_error: Callable[[Exception], None]
) -> threading.Thread | None:
    """Writes `environment.json` in a thread, which it starts and returns.

    While the interpreter exits, Python 3.12 starts no threads. Then this call writes the file and returns
    None.

    Args:
        paths: where to write it; missing folders are created.
        describe: returns its content; called in the thread.
        on_error: called with an exception in the thread.
    """

    def write() -> None:
        try:
            content = strict_json(describe(), indent=2)
            for path in paths:
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, content.encode(), durable=True)
        except Exception as error:  # noqa: BLE001  # passed on
            on_error(error)

    thread = threading.Thread(target=write, name="run-directory-environment", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        write()
        return None
    return thread


def rank_layout(state: "State") -> dict[str, Any]:
    """Returns the ranks and world sizes of this process, and where they come from."""
    names = ("rank", "local_rank", "world_size", "local_world_size", "node_rank")
    found = state.found_ranks
    return {
        **{name: getattr(state, name) for name in names},
        "node_count": found.node_count,
        "source": found.source,
    }


def describe_environment(ranks: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of `environment.json`; unknown values are None or missing."""
    return {
        "time": time.time(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "user": _user(),
        "argv": redact_arguments(sys.argv),
        "executable": sys.executable,
        "working_directory": _working_directory(),
        "git": _git(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _packages(),
        "cpu": _cpu(),
        "gpus": _gpus(),
        "slurm": {name: redact_text(os.environ[name]) for name in _SLURM if name in os.environ},
        "ranks": ranks,
    }


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return None


def _working_directory() -> str | None:
    try:
        return str(Path.cwd())
    except OSError:  # It was deleted.
        return None


def _git() -> dict[str, Any] | None:
    commit = _output("git", "rev-parse", "HEAD")
    if commit is None:
        return None
    branch = _output("git", "rev-parse", "--abbrev-ref", "HEAD")
    return {
        "commit": commit.strip(),
        "branch": None if branch is None else branch.strip(),
        "diff_bytes": _output_bytes(
            "git", "--no-optional-locks", "diff", "--no-ext-diff", "--no-textconv", "HEAD"
        ),
    }


def _packages() -> dict[str, str]:
    """Returns versions by normalised name; the first one on the path counts.

    Reads them from folder names, because `importlib.metadata` parses a file for each package, which holds the
    interpreter lock for half a second with hundreds of packages.
    """
    found: dict[str, str] = {}
    for entry in sys.path:
        try:
            names = os.listdir(entry or ".")  # noqa: PTH208  # hundreds of names, without their paths
        except OSError:
            continue
        for match in filter(None, map(_INSTALLED.fullmatch, names)):
            name = re.sub(r"[-_.]+", "-", match["name"]).lower()
            found.setdefault(name, match["version"])
    return dict(sorted(found.items()))


def _cpu() -> dict[str, Any]:
    model = platform.processor() or None
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"model": model, "count": os.cpu_count(), "usable": usable}


def _gpus() -> list[dict[str, Any]]:
    """Asks nvidia-smi, because torch would create a CUDA context, after which the process can't fork."""
    text = _output(
        "nvidia-smi", "--query-gpu=name,memory.total,driver_version,uuid", "--format=csv,noheader,nounits"
    )
    gpus = []
    for line in (text or "").splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4:  # noqa: PLR2004  # as asked for
            name, memory, driver, uuid = fields
            gpus.append({"name": name, "memory_mib": memory, "driver": driver, "uuid": uuid})
    return gpus


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(  # noqa: S603  # fixed commands
            command, capture_output=True, timeout=_PROGRAM_SECONDS, check=True, text=True, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return redact_text(done.stdout)


def _output_bytes(*command: str) -> int | None:
    """Returns the size of a program's output without keeping it; it may be huge or contain secrets."""
    try:
        with tempfile.TemporaryFile() as file:
            subprocess.run(  # noqa: S603  # fixed commands
                command, stdout=file, stderr=subprocess.DEVNULL, timeout=_PROGRAM_SECONDS, check=True
            )
            return os.fstat(file.fileno()).st_size
    except (OSError, subprocess.SubprocessError):
        return None
