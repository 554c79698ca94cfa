"""A session of a run in a process of its own, which a test controls call by call and may kill at any time.

`Processes` starts them from a fork server that has imported what they need. What a session does is what a user's
program does: it opens a `Run` with a `RunDirectory`, logs, saves a checkpoint as a trainer does, and loads one.
"""

import contextlib
import logging
import os
import signal
import sys
import tempfile
from multiprocessing.connection import Client, Listener
from pathlib import Path

import numpy as np

from destinations import RunDirectory
from events import Run, Timestamp

__all__ = ["Processes", "Session", "SessionError"]

_PROGRAM = "import sys; from tests.model.session import serve; serve(sys.argv[1])"
_LIMIT_SECONDS = 120
_OF_JOBS = ("SLURM_", "TORCHELASTIC_", "RUN_NAME", "RANK", "WORLD_SIZE")


class _SmallParts(RunDirectory):
    """Closes parts after a few rows instead of 64 MiB."""

    _part_bytes = 300
    _least_parquet_bytes = 0


class Session:
    """Runs in the process; each public method is a call that the test makes."""

    def begin(
        self, place, proof, *, saved=None, early=(), trains=True, small_parts=False, is_strict=True, **options
    ):
        """Opens the run; `proof` says how the session shows that it continues the run there.

        Args:
            place: the folder or URI.
            proof: "checkpoint" loads `saved` as a trainer does, "batch" names its batch as a custom loop
                does, "resume" is an argument of the destination, and "none" shows nothing.
            saved: what `checkpoint` returned.
            early: arguments of `log`, for records before the proof.
            trains: whether training begins without a checkpoint.
            small_parts: whether parts are closed early.
            is_strict: whether errors of the destination are raised.
            options: of `RunDirectory`.

        Returns:
            The folder or URI that the run is written to.
        """
        kind = _SmallParts if small_parts else RunDirectory
        options["if_exists"] = "resume" if proof == "resume" else options.get("if_exists", "auto")
        self.directory = kind(place, **options)
        self.run = Run(loggers=[self.directory], run_name="run", raise_errors=is_strict, strict=is_strict)
        if proof == "checkpoint":
            self.run.state.continues_run = True
        self.run.run_event("init")
        for one in early:
            self.log(*one)
        if proof == "checkpoint":
            self.load(saved)
        elif proof == "batch":
            self.run.fit_start(batch=saved["batch"])
        elif trains:
            self.run.fit_start()
        assert self.directory.run_dir is not None  # which decides between the run there and one beside it
        return self.directory.place()

    def load(self, saved):
        """Loads a checkpoint, in the order of `Trainer`, and trains from there."""
        self.run.run_event("before_load")
        self.run.state.timestamp = Timestamp.from_state_dict({"epoch": 0, "batch": saved["batch"]})
        self.directory.load_state_dict(saved["state"])
        self.run.run_event("after_load")
        self.run.fit_start()

    def load_again(self, saved):
        """Loads a checkpoint in a session that has trained, as a second `fit` does."""
        self.load(saved)
        self.run.run_event("fit_start")

    def log(self, kind, name, number, step):
        """Logs one record, identified by its number."""
        match kind:
            case "metrics":
                self.run.log_metrics({one: float(number) for one in name.split("+")}, step)
            case "texts":
                self.run.log_text(f"text {number}", name, step)
            case "images":
                pixel = np.array([number >> 16, number >> 8 & 255, number & 255], np.uint8)
                self.run.log_images(pixel.reshape(1, 1, 3), name, channels_last=True, step=step)
            case "tables":
                self.run.log_table(["number"], [[number]], name, step)
            case "histograms":
                self.run.log_histogram([float(number)], name, step)
            case "traces":
                self.run.log_traces({name: number})
            case "files":
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder) / "file"
                    path.write_text(str(number))
                    self.run.upload_file(name, path, overwrite=True)
            case "hyperparameters":
                self.run.log_hyperparameters({"newest": f"config {number}", f"only_{number}": number})
            case _:
                raise ValueError(kind)
        return int(self.run.state.timestamp.batch) if step is None else step

    def batch(self):
        """Trains a batch."""
        self.run.batch_start()
        self.run.batch_end()
        return int(self.run.state.timestamp.batch)

    def checkpoint(self):
        """Returns the state that a trainer stores in a checkpoint."""
        return {"state": self.directory.state_dict(), "batch": int(self.run.state.timestamp.batch)}

    def flush(self):
        """Waits until everything is written."""
        self.run.flush()

    def close(self):
        """Ends the run like a program that has completed."""
        self.run.close()


class _Messages(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.found = []

    def emit(self, record):
        self.found.append(record.getMessage())


def serve(address):
    """Executes the calls of the test until the other end is gone."""
    messages = _Messages()
    logging.getLogger().addHandler(messages)
    session = Session()
    with Client(address, "AF_UNIX") as test, contextlib.suppress(EOFError):
        while True:
            method, arguments, options = test.recv()
            try:
                answer = getattr(session, method)(*arguments, **options), None
            except Exception as error:  # noqa: BLE001  # the test gets it
                answer = None, f"{type(error).__name__}: {error}"
            test.send((*answer, messages.found))
            messages.found = []
    os._exit(0)


class SessionError(Exception):
    """A call of a session raised; the text begins with the class of the error."""


class Processes:
    """Starts sessions on machines; each machine is a folder.

    Args:
        server: a `ForkServer` that has imported this module.
        folder: for sockets.
    """

    def __init__(self, server, folder):
        self._server = server
        self._folder = Path(folder)
        self._started = []

    def start(self, machine):
        """Starts a process on a machine."""
        machine.mkdir(parents=True, exist_ok=True)
        address = str(self._folder / f"socket-{os.urandom(4).hex()}")
        env = {name: value for name, value in os.environ.items() if not name.startswith(_OF_JOBS)}
        env |= {"XDG_STATE_HOME": str(machine), "UPLOADS_HOME": str(machine / "uploads")}
        env |= {"PYTHONPATH": os.pathsep.join(sys.path)}
        with Listener(address, "AF_UNIX") as listener:
            listener._listener._socket.settimeout(_LIMIT_SECONDS)
            program = self._server.start(_PROGRAM, address, env=env, cwd=machine)
            process = Process(program, listener.accept())
        self._started.append(process)
        return process

    def kill(self):
        """Kills all processes that have not ended."""
        for process in self._started:
            process.kill()


class Process:
    """A process with a session, as the test sees it; its calls are the session's.

    Attributes:
        said: the warnings that it has logged.
    """

    def __init__(self, program, connection):
        self._program, self._connection = program, connection
        self.said = []

    def call(self, method, *arguments, **options):
        """Calls a method of the session, waits for it, and returns its result."""
        self._connection.send((method, arguments, options))
        if not self._connection.poll(_LIMIT_SECONDS):
            self.kill()
            raise TimeoutError(f"{method} took more than {_LIMIT_SECONDS} s")
        found, error, said = self._connection.recv()
        self.said += said
        if error is not None:
            raise SessionError(error)
        return found

    def stop(self):
        """Lets the process hang: nothing in it runs until `wake`."""
        os.kill(self._program.pid, signal.SIGSTOP)

    def wake(self):
        """Lets it go on."""
        os.kill(self._program.pid, signal.SIGCONT)

    def kill(self):
        """Ends the process by SIGKILL, and waits for its end."""
        self._connection.close()
        self._program.kill()

    def end(self):
        """Waits for the end of a process whose run was closed."""
        self._connection.close()
        self._program.wait(_LIMIT_SECONDS)
