"""A process that imports packages once and forks for each program, which then need not import them again.

`python fork_server.py NAME PID MODULE ...` listens at an abstract Unix socket until process PID ends; if another server
has that name, it ends at once. A connection brings one job and its standard streams, and is told the process id and the
wait status. If the other side goes away, the program is killed.

A program runs as `python -c PROGRAM ARGUMENTS` does, including its exit handlers; only what the server has imported is
there already, and is not taken down at the end, which would copy most of the server's memory. `ForkServer.write_commands` writes `python`, `destinations` and `torchrun` for programs that others start.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import uuid
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 60
# What torchrun does, which starts a new interpreter for each rank.
_TORCHRUN = """
import runpy, sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def run_rank(*arguments):
    sys.argv = list(arguments)
    runpy.run_path(arguments[0], run_name="__main__")

ranks, restarts, *arguments = sys.argv[1:]
config = LaunchConfig(
    1, 1, int(ranks), run_id="forked", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=int(restarts),
    start_method="fork",
)
elastic_launch(config, run_rank)(*arguments)
"""


class ForkServer:
    """Runs programs, also several at once; a context manager.

    Args:
        modules: imported before the first program. None of ours if the tests are about our imports.
        name: of the server, which all that give this name share; by default it has one user.
        until: the id of the process with which the server ends, besides the end of its context.
    """

    def __init__(self, *modules, name=None, until=None):
        self._name = name or uuid.uuid4().hex
        # Returns when somebody listens at that name.
        subprocess.run(
            [sys.executable, "-X", "utf8", __file__, self._name, str(until or os.getpid()), *modules],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # One thread: libraries that start more as they are imported would lose them in a fork.
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            check=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        with _Job(self._name, None, ()):
            pass

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
        # Whatever reads them does not move the place where the program writes.
        files = given, said, errors = [tempfile.TemporaryFile("ab+") for _ in range(3)]  # noqa: SIM115  # `Program.wait` closes
        given.write(stdin.encode())
        given.seek(0)
        job = {
            "program": program,
            "arguments": ["-c", *map(str, arguments)],
            "env": env,
            "cwd": str(Path(cwd).resolve()),  # Of this process, not of the server.
            "warning_filter": warning_filter,
        }
        return Program(_Job(self._name, job, (given, said, said if is_merged else errors)), program, files)

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

    def torchrun(self, ranks, program, *arguments, restarts=0, **options):
        """Runs a file on several ranks, as `torchrun --standalone` does; takes the options of `run`.

        A rank ends with its main module: handlers of `atexit` are not called.
        """
        return self.run(_TORCHRUN, ranks, restarts, program, *arguments, is_merged=True, **options)

    def write_commands(self, folder):
        """Writes programs whose processes are forks of the server: `python`, `destinations`, `torchrun`.

        `python` takes a file, `-c` or `-m`, and `torchrun` takes `--nproc-per-node N FILE`. They pass SIGINT,
        SIGTERM, SIGUSR1 and their own end on.
        """
        commands = {"python": "python", "destinations": "python -m destinations.cli", "torchrun": "torchrun"}
        for command, words in commands.items():
            path = folder / command
            path.write_text(
                f'#!/bin/sh\nexec {sys.executable} -IS {__file__} --client {self._name} {words} "$@"\n'
            )
            path.chmod(0o755)


class Program:
    """A program that a `ForkServer` has started, with its process id."""

    def __init__(self, job, source, files):
        self.pid = job.pid
        self._job, self._source, self._files = job, source, files

    def wait(self, timeout_s=300):
        """Waits for its end, and returns the same as `subprocess.run`.

        Args:
            timeout_s: after which it is killed.

        Raises:
            subprocess.TimeoutExpired: it was killed.
        """
        status = self._job.wait(timeout_s)
        is_late = status is None
        if is_late:
            os.kill(self.pid, signal.SIGKILL)
            status = self._job.wait(LIMIT_SECONDS)
        self._job.__exit__()
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


class _Job:
    """A connection to the server, which runs one program for it; without a job the server ends."""

    def __init__(self, name, job, streams):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(f"\0{name}")
        text = json.dumps(job).encode()
        socket.send_fds(self._socket, [b"%016d" % len(text)], [stream.fileno() for stream in streams])
        self._socket.sendall(text)
        self._answers = self._socket.makefile("rb", buffering=0)
        line = self._answers.readline()
        self.pid = int(line) if line else None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._answers.close()
        self._socket.close()

    def wait(self, timeout_s=None):
        """Returns the wait status, or None after so long."""
        # `select.select` takes no descriptor above 1,023, and a test process may have those.
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        if not poller.poll(None if timeout_s is None else 1000 * timeout_s):
            return None
        return int(self._answers.readline())


def _run_as(command, name, arguments):
    """Runs `python` or `torchrun` in a fork of the server, and ends as it does."""
    job = {"program": None, "env": dict(os.environ), "cwd": str(Path.cwd()), "warning_filter": None}
    if command == "torchrun":
        option, ranks, *arguments = arguments
        assert option == "--nproc-per-node"
        job["program"] = _TORCHRUN
        arguments = ["-c", ranks, "0", *arguments]
    elif arguments[0] == "-c":
        job["program"] = arguments.pop(1)
    job["arguments"] = arguments
    with _Job(name, job, (sys.stdin, sys.stdout, sys.stderr)) as running:
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(one, lambda number, _: os.kill(running.pid, number))
        status = running.wait()
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:  # Which has no other handler, and refuses one.
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    sys.exit(os.WEXITSTATUS(status))


def _accept(listener):
    """Returns the descriptor of a new connection, its job, and the descriptors of its streams."""
    connection, _ = listener.accept()
    length, streams, _, _ = socket.recv_fds(connection, 16, 3)
    with connection.makefile("rb") as file:
        job = json.loads(file.read(int(length)))
    # A descriptor: a socket that a fork forgets would close the number once more, which then has another owner.
    return connection.detach(), job, streams


def _next_job(listener, until):
    """Returns the job and streams of the process that this is: a fork of the server. The server itself ends here."""
    poller = select.poll()
    poller.register(listener, select.POLLIN)
    poller.register(until, select.POLLIN)
    # Maps the descriptor of a program to the descriptor of its connection, and back.
    connections, programs = {}, {}
    while True:
        for ready, _ in poller.poll():
            if ready == until:
                os._exit(0)
            elif ready in connections:
                poller.unregister(ready)
                _answer_end(ready, connections.pop(ready), poller, programs)
            elif ready in programs:
                # Who wanted it has gone.
                poller.unregister(ready)
                signal.pidfd_send_signal(programs.pop(ready), signal.SIGKILL)
            else:
                connection, job, streams = _accept(listener)
                if job is None:
                    os._exit(0)
                pid = os.fork()
                if pid == 0:
                    listener.close()
                    for one in {until, connection, *connections, *connections.values()}:
                        os.close(one)
                    return job, streams
                for one in streams:
                    os.close(one)
                os.write(connection, b"%d\n" % pid)
                program = os.pidfd_open(pid)
                connections[program], programs[connection] = connection, program
                poller.register(program, select.POLLIN)
                poller.register(connection, select.POLLIN)


def _answer_end(program, connection, poller, programs):
    """Sends the wait status of a program that has ended, unless nobody wants it."""
    status = os.waitid(os.P_PIDFD, program, os.WEXITED)
    code = status.si_status << 8 if status.si_code == os.CLD_EXITED else status.si_status
    if programs.pop(connection, None) is not None:
        poller.unregister(connection)
        with contextlib.suppress(OSError):
            os.write(connection, b"%d\n" % code)
    os.close(connection)
    os.close(program)


def _become(job, streams):
    """Turns this process into one that was started for the job."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    sys.argv = job["arguments"]
    # As `python -c`: what is in the folder can be imported.
    sys.path[0] = ""
    if job["warning_filter"]:
        sys.warnoptions.append(job["warning_filter"])
        warnings.simplefilter(job["warning_filter"])
    if job["program"] is None and sys.argv[0] == "-m":
        runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
        return
    if job["program"] is None:
        sys.path[0] = str(Path(sys.argv[0]).absolute().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    exec(compile(job["program"], "<string>", "exec"), module.__dict__)  # noqa: S102  # the programs of our tests


def _serve(name, until, modules):
    """Listens in a process of its own; returns in each program's process."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
    except OSError:  # Another server has the name.
        os._exit(0)
    listener.listen(100)
    if os.fork():
        os._exit(0)
    ends = os.pidfd_open(until)
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # No fork looks through what all of them have.
    job, streams = _next_job(listener, ends)
    try:
        _become(job, streams)
    except BaseException as error:  # noqa: BLE001  # ends as the interpreter would
        _end(error)
    _end()


def _end(error=None):
    """Ends the process as the interpreter does, but for the modules, which stay as they are."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
            code = 1
    elif error is not None:
        sys.last_type, sys.last_value, sys.last_traceback = found = type(error), error, error.__traceback__
        sys.excepthook(*found)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # It may be closed, or None.
            stream.flush()
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    if sys.argv[1] == "--client":
        _run_as(sys.argv[3], sys.argv[2], sys.argv[4:])
    else:
        _serve(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
