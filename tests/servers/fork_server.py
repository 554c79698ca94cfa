"""A process that imports packages once and forks for each program, which then need not import them again.

`python fork_server.py MODULE ...` reads jobs as lines of JSON, and answers each with process id and wait status. A program runs as
`python -c PROGRAM ARGUMENTS` does, to the end of its interpreter; only what the server has imported is there already.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What torchrun does, which starts a new interpreter for each rank.
_TORCHRUN = """
import runpy, sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def run_rank(*arguments):
    sys.argv = list(arguments)
    runpy.run_path(arguments[0], run_name="__main__")

ranks, *arguments = sys.argv[1:]
config = LaunchConfig(
    1, 1, int(ranks), run_id="forked", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0,
    start_method="fork",
)
elastic_launch(config, run_rank)(*arguments)
"""


class ForkServer:
    """Runs programs one after the other; a context manager.

    Args:
        modules: what is imported before the first program. Of ours nothing, where the tests are about our imports.
    """

    def __init__(self, *modules):
        self._process = subprocess.Popen(
            [sys.executable, "-X", "utf8", __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # One thread, where a library would start some as it is imported: they do not survive a fork.
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        # A word, and not the end of the pipe alone: processes that tests have forked may hold it too.
        self._process.stdin.write("\n")
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def run(
        self, program, *arguments, env, cwd=".", stdin="", is_merged=False, warning_filter=None, timeout_s=300
    ):
        """Runs a program in a process of its own, and returns it as `subprocess.run` does.

        Args:
            program: Python source, the main module.
            arguments: `sys.argv[1:]`.
            env: all environment variables that it sees.
            cwd: the folder where it runs.
            stdin: what it reads.
            is_merged: what it writes to both streams is in `stdout`, in its order.
            warning_filter: as `-W` of the interpreter: "error".
            timeout_s: it is killed after so long.

        Returns:
            A `CompletedProcess`, with text.

        Raises:
            subprocess.TimeoutExpired: it was killed.
        """
        with contextlib.ExitStack() as files:
            given, said, errors = (files.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            given.write(stdin.encode())
            given.flush()
            job = {
                "program": program,
                "arguments": [str(one) for one in arguments],
                "env": env,
                "cwd": str(Path(cwd).resolve()),  # Of this process, not of the server.
                "warning_filter": warning_filter,
                "streams": [
                    f"/proc/{os.getpid()}/fd/{one.fileno()}"
                    for one in (given, said, said if is_merged else errors)
                ],
            }
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            pid = int(self._process.stdout.readline())
            # `select.select` takes no descriptor above 1,023, and a test process may have those.
            poller = select.poll()
            poller.register(self._process.stdout, select.POLLIN)
            is_late = not poller.poll(1000 * timeout_s)
            if is_late:
                os.kill(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(int(self._process.stdout.readline()))
            said.seek(0)
            errors.seek(0)
            texts = [one.read().decode(errors="replace") for one in (said, errors)]
        if is_late:
            raise subprocess.TimeoutExpired(program, timeout_s, *texts)
        return subprocess.CompletedProcess(program, code, *texts)

    def torchrun(self, ranks, program, *arguments, env, timeout_s=300):
        """Runs a file on several ranks, as `torchrun --standalone` does; returns what `run` does.

        A rank ends with its main module: handlers of `atexit` are not called.
        """
        return self.run(_TORCHRUN, ranks, program, *arguments, env=env, is_merged=True, timeout_s=timeout_s)


def _next_job():
    """Returns the job of the process that this is: a fork of the server. The server itself ends here."""
    while line := sys.stdin.readline().strip():
        pid = os.fork()
        if pid == 0:
            return json.loads(line)
        os.write(1, b"%d\n" % pid)
        os.write(1, b"%d\n" % os.waitpid(pid, 0)[1])
    os._exit(0)


def _become(job):
    """Makes this process as one that was started for the job."""
    for number, stream in enumerate(job["streams"]):
        descriptor = os.open(stream, os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    sys.argv = ["-c", *job["arguments"]]
    # As `python -c`: what is in the folder can be imported.
    sys.path[0] = ""
    if job["warning_filter"]:
        sys.warnoptions.append(job["warning_filter"])
        warnings.simplefilter(job["warning_filter"])
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    exec(compile(job["program"], "<string>", "exec"), module.__dict__)  # noqa: S102  # the programs of our tests


if __name__ == "__main__":
    for _name in sys.argv[1:]:
        importlib.import_module(_name)
    gc.freeze()  # No fork looks through what all of them have.
    _become(_next_job())
