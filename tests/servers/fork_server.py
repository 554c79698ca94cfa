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
import time
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
    """Runs programs, also several at once; a context manager. It belongs to one thread.

    Args:
        modules: imported before the first program. None of ours if the tests are about our imports.
    """

    def __init__(self, *modules):
        # Wait statuses of programs that have ended, by process id.
        self._ended = {}
        self._process = subprocess.Popen(
            [sys.executable, "-X", "utf8", __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Unbuffered: `select` sees only bytes that are still in the pipe.
            bufsize=0,
            # One thread: libraries that start more as they are imported would lose them in a fork.
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        # Sends a word besides closing the pipe: processes that tests have forked may hold the pipe too.
        self._process.stdin.write(b"\n")
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def start(self, program, *arguments, env, cwd=".", stdin="", is_merged=False, warning_filter=None):
        """Starts a program in a process of its own.

        Args:
            program: Python source, the main module.
            arguments: `sys.argv[1:]`.
            env: all environment variables that it sees.
            cwd: the folder where it runs.
            stdin: what it reads.
            is_merged: whether `stdout` has the output of both streams, in order.
            warning_filter: as `-W` of the interpreter: "error".

        Returns:
            A `Program`, which must be waited for.
        """
        # The program opens them by this process's descriptors, when it gets so far.
        files = given, said, errors = [tempfile.TemporaryFile() for _ in range(3)]  # noqa: SIM115  # `Program.wait` closes
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
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        while (pid := self._read()) is None:
            pass
        return Program(self, program, pid, files)

    def run(self, program, *arguments, timeout_s=300, **options):
        """Runs a program in a process of its own, and returns it as `subprocess.run` does.

        Args:
            program: as for `start`.
            arguments: likewise.
            timeout_s: after which it is killed.
            options: the other arguments of `start`.

        Returns:
            A `CompletedProcess`, with text.

        Raises:
            subprocess.TimeoutExpired: it was killed.
        """
        return self.start(program, *arguments, **options).wait(timeout_s)

    def _read(self):
        """Reads one line of the server; returns the id of a process that has begun, or None where one has ended."""
        word, pid, *status = self._process.stdout.readline().split()
        if word == b"began":
            return int(pid)
        self._ended[int(pid)] = int(*status)
        return None

    def _status_of(self, pid, timeout_s):
        """Waits for the end of a process, and returns its wait status; None after so long."""
        deadline = time.monotonic() + timeout_s
        # `select.select` takes no descriptor above 1,023, and a test process may have those.
        poller = select.poll()
        poller.register(self._process.stdout, select.POLLIN)
        while pid not in self._ended:
            if not poller.poll(1000 * max(0.0, deadline - time.monotonic())):
                return None
            self._read()
        return self._ended.pop(pid)

    def torchrun(self, ranks, program, *arguments, env, timeout_s=300):
        """Runs a file on several ranks, as `torchrun --standalone` does; returns the same as `run`.

        A rank ends with its main module: handlers of `atexit` are not called.
        """
        return self.run(_TORCHRUN, ranks, program, *arguments, env=env, is_merged=True, timeout_s=timeout_s)


class Program:
    """A program that a `ForkServer` has started, with its process id."""

    def __init__(self, server, source, pid, files):
        self.pid = pid
        self._server, self._source, self._files = server, source, files

    def wait(self, timeout_s=300):
        """Waits for its end, and returns the same as `subprocess.run`.

        Args:
            timeout_s: after which it is killed.

        Raises:
            subprocess.TimeoutExpired: it was killed.
        """
        status = self._server._status_of(self.pid, timeout_s)
        is_late = status is None
        if is_late:
            os.kill(self.pid, signal.SIGKILL)
            status = self._server._status_of(self.pid, 60)
        texts = []
        for file in self._files:
            with file:
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        del texts[0]  # What it was given.
        if is_late:
            raise subprocess.TimeoutExpired(self._source, timeout_s, *texts)
        return subprocess.CompletedProcess(self._source, os.waitstatus_to_exitcode(status), *texts)

    def kill(self):
        """Kills it, unless it has been waited for, and waits for its end."""
        if not self._files[0].closed:
            # It may have ended in this moment.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()


def _next_job():
    """Returns the job of the process that this is: a fork of the server. The server itself ends here."""
    poller = select.poll()
    poller.register(sys.stdin, select.POLLIN)
    children = {}
    while True:
        for ready, _ in poller.poll():
            if ready != sys.stdin.fileno():
                pid = children.pop(ready)
                poller.unregister(ready)
                os.close(ready)
                os.write(1, b"ended %d %d\n" % (pid, os.waitpid(pid, 0)[1]))
                continue
            # One at a time: who has sent it waits for its process id.
            line = sys.stdin.readline().strip()
            if not line:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                for one in children:
                    os.close(one)
                return json.loads(line)
            os.write(1, b"began %d\n" % pid)
            child = os.pidfd_open(pid)
            children[child] = pid
            poller.register(child, select.POLLIN)


def _become(job):
    """Turns this process into one that was started for the job."""
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
