"""Where a run takes place: host, code, packages, hardware, ranks. Secrets are taken out of the command line.

Runs in the writer thread: it starts programs (git, nvidia-smi) and waits for them, a few seconds at most.
"""

import getpass
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from events import redact_arguments, redact_text

if TYPE_CHECKING:
    from events import State

__all__ = ["describe_environment", "rank_layout"]

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


def rank_layout(state: "State") -> dict[str, int]:
    """Returns which rank this is, of how many."""
    names = ("rank", "local_rank", "world_size", "local_world_size", "node_rank")
    return {name: getattr(state, name) for name in names}


def describe_environment(ranks: dict[str, int]) -> dict[str, Any]:
    """Returns the content of `environment.json`; what cannot be found out is None or missing."""
    return {
        "time": time.time(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "user": _user(),
        "argv": redact_arguments(sys.argv),
        "executable": sys.executable,
        "working_directory": str(Path.cwd()),
        "git": _git(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _packages(),
        "cpu": _cpu(),
        "gpus": _gpus(),
        "slurm": {name: os.environ[name] for name in _SLURM if name in os.environ},
        "ranks": ranks,
    }


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return None


def _git() -> dict[str, Any] | None:
    commit = _output("git", "rev-parse", "HEAD")
    if commit is None:
        return None
    branch = _output("git", "rev-parse", "--abbrev-ref", "HEAD")
    diff = _output("git", "diff", "HEAD")
    return {
        "commit": commit.strip(),
        "branch": None if branch is None else branch.strip(),
        "diff_bytes": None if diff is None else len(diff.encode()),
    }


def _packages() -> dict[str, str]:
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.name
        if name:
            found.setdefault(name, distribution.version)
        time.sleep(0)  # There may be hundreds, and the training thread wants the interpreter.
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


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
    """Asks the driver's own program: to ask torch would make a context, after which a process cannot fork."""
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
