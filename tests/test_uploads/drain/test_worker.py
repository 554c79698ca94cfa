"""The worker process: started at once, supervised, informed of everything, and ended in time."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest

import uploads
from uploads import Timeouts, UploadQueue, UploadState
from uploads.drain.supervisor import WorkerConfig, WorkerSupervisor
from uploads.drain.worker import _run_commands
from uploads.spool.ownership import owner_of

LIMIT_SECONDS = 180


@pytest.fixture
def make_worker_queue(tmp_path, moto, prefix):
    """Creates queues with a worker process, and closes them."""
    queues = []

    def make(uri=None, **options):
        queues.append(
            UploadQueue(
                uri or moto.uri(prefix),
                **{
                    "spool": tmp_path / "spool",
                    "free_bytes": 0,
                    "timeouts": Timeouts(give_back_seconds=LIMIT_SECONDS),
                    **options,
                },
            )
        )
        return queues[-1]

    yield make
    for queue in queues:
        queue.close(timeout_seconds=0)


def test_remote_stores_get_their_own_worker(make_worker_queue, make_file, moto, prefix):
    """Another process serves a URI that leads over a network, and handles settle."""
    queue = make_worker_queue()

    outcome = queue.submit(make_file(), "a").result(LIMIT_SECONDS)

    assert outcome.state is UploadState.DONE
    assert moto.objects(prefix) == {"a": b"content"}
    assert owner_of(queue.spool.drain_lock)["pid"] == queue._drainer._worker.process.pid != os.getpid()


def test_closing_ends_the_worker_and_frees_the_spool(make_worker_queue, make_file):
    """Nothing outlives a queue that closed normally."""
    queue = make_worker_queue()
    queue.submit(make_file(), "a").result(LIMIT_SECONDS)

    backlog = queue.close(LIMIT_SECONDS)

    assert backlog.is_empty
    assert queue._drainer._worker.process.returncode == 0
    assert owner_of(queue.spool.drain_lock) is None


def test_failures_arrive_with_their_reason(make_worker_queue, make_file, moto, prefix, caplog):
    """The worker's logs and findings appear in this process."""
    queue = make_worker_queue()
    queue.submit(make_file(content=b"1"), "a").result(LIMIT_SECONDS)

    error = queue.submit(make_file(content=b"2"), "a").exception(LIMIT_SECONDS)

    assert "overwrite=False" in str(error)
    assert "a was not uploaded (conflict)" in caplog.text


def test_a_stopped_worker_never_blocks_training(make_worker_queue, make_file, moto, prefix):
    """With the worker frozen and the pipe full, submit continues; afterwards everything arrives."""
    queue = make_worker_queue(workers=8)
    queue.submit(make_file(), "first").result(LIMIT_SECONDS)
    pid = queue._drainer._worker.process.pid
    source = make_file("small")
    fcntl.fcntl(queue._drainer._worker.commands, fcntl.F_SETPIPE_SZ, 4096)  # Full after sixty messages.
    os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(300):
            queue.submit(source, "same", overwrite=True)
        queue.submit(source, "last")
        missed = queue._drainer._has_missed
    finally:
        os.kill(pid, signal.SIGCONT)

    queue.submit(source, "after")

    assert missed
    assert queue.drain(LIMIT_SECONDS).is_empty
    assert set(moto.objects(prefix)) == {"first", "same", "last", "after"}


def test_a_worker_needs_a_uri(tmp_path):
    """A store object can't be sent to another process; a path can."""
    from uploads import LocalStore

    with pytest.raises(ValueError, match="needs a store given by URI"):
        UploadQueue(LocalStore(tmp_path), isolation="process", spool=tmp_path / "spool")


def upload_with(package_home, source, uri, folder, **options):
    """Uploads a file with a program in a folder, using the package in `package_home`."""
    program = (
        f"import sys; sys.path[0] = {str(package_home)!r}\n"
        "from uploads import UploadQueue\n"
        f"queue = UploadQueue({uri!r}, spool={str(folder / 'spool')!r}, free_bytes=0)\n"
        f"print(queue.submit({str(source)!r}, 'a').result({LIMIT_SECONDS}).state)"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_SECONDS,
        check=False,
        **options,
    )


def test_a_folder_called_uploads_in_the_working_directory_is_not_run(make_file, moto, prefix, tmp_path):
    """The worker runs this package, wherever training started."""
    (tmp_path / "uploads").mkdir()
    (tmp_path / "uploads/__init__.py").write_text("raise SystemExit('hijacked')")
    done = upload_with(Path(uploads.__file__).parents[1], make_file(), moto.uri(prefix), tmp_path)

    assert done.stdout.strip() == "done", done.stderr


def test_the_worker_runs_the_package_that_training_imported(make_file, moto, prefix, tmp_path):
    """A copy on `sys.path`, neither installed nor in the working directory, runs in both processes."""
    copy = shutil.copytree(Path(uploads.__file__).parent, tmp_path / "code" / "uploads")
    pids = tmp_path / "pids"
    with (copy / "drain" / "__init__.py").open("a", encoding="utf-8") as file:
        file.write(f"import os\nopen({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = upload_with(copy.parent, make_file(), moto.uri(prefix), tmp_path, env=environment)

    assert done.stdout.strip() == "done", done.stderr
    assert len(set(pids.read_text(encoding="utf-8").split())) == 2


OBEDIENT = """read order; echo '{"owner": 1}'; while read line; do case "$line" in *stop*) exit 0;; esac; done; exit 1"""
TORN = """read order; printf '{"settled": {"identi'"""


class Programs:
    """Starts these programs for a shell in place of workers, one after the other; None can't be started."""

    def __init__(self, *programs, before_each=lambda number: None):
        self.programs = list(programs)
        self.started = []
        self.before_each = before_each

    def __call__(self, command, **options):
        self.before_each(len(self.started))
        program = self.programs.pop(0)
        if program is None:
            raise OSError(11, "Resource temporarily unavailable")
        answering = f"exec >/dev/fd/{command[-1]}; {program}"
        self.started.append(subprocess.Popen(["sh", "-c", answering], **options))
        return self.started[-1]


def _link(programs, taken, **options):
    return WorkerSupervisor(
        WorkerConfig("spool", "s3://bucket", {}, 1),
        on_settled=lambda folder, outcome: None,
        look_up=taken.set,
        popen=programs,
        **options,
    )


@pytest.mark.parametrize(("own", "expected"), [(None, "1"), ("3", "3")])
def test_a_worker_keeps_the_size_of_its_files_once(monkeypatch, own, expected):
    """All of its threads share one arena of the allocator, unless the environment says otherwise."""
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    if own is not None:
        monkeypatch.setenv("MALLOC_ARENA_MAX", own)
    programs = Programs(f'[ "$MALLOC_ARENA_MAX" = {expected} ] && {OBEDIENT}')
    taken = threading.Event()
    link = _link(programs, taken)

    link.start()

    assert taken.wait(LIMIT_SECONDS)
    link.stop(LIMIT_SECONDS)


class DrainThatNotes:
    """Records what it is told."""

    def __init__(self):
        self.calls = []

    def add(self, folders):
        self.calls.append(folders)

    def rescan(self):
        self.calls.append("rescan")

    def stop(self, timeout_seconds):
        self.calls.append(timeout_seconds)


def test_gathered_announcements_are_added_at_once():
    """A burst of entries takes the schedule's lock once, and commands keep their order."""
    commands, drain = SimpleQueue(), DrainThatNotes()
    for command in (*({"add": name} for name in "abc"), {"rescan": True}, {"add": "d"}, {"stop": 1.0}):
        commands.put(command)

    _run_commands(drain, commands, messenger=None, grace_seconds=0.0)

    assert drain.calls == [["a", "b", "c"], "rescan", ["d"], 1.0]


def test_a_worker_killed_in_the_middle_of_a_line_is_replaced(caplog):
    """Neither a torn line nor a successor that fails to start at first ends the supervision."""
    taken = threading.Event()
    link = _link(Programs(TORN, None, OBEDIENT), taken)

    link.start()

    assert taken.wait(LIMIT_SECONDS)
    link.stop(LIMIT_SECONDS)
    assert "cannot start the upload worker" in caplog.text
    assert link._worker.process.returncode == 0


def test_a_worker_that_starts_while_the_queue_closes_ends(caplog):
    """The stop command goes to the dead worker.

    Its successor still gets it, and ends.
    """
    starting = threading.Event()

    def wait_for_the_stop(number):
        if number == 1:
            starting.set()
            link._stopping.wait(LIMIT_SECONDS)

    programs = Programs("exit 0", OBEDIENT, before_each=wait_for_the_stop)
    link = _link(programs, threading.Event())
    link.start()
    assert starting.wait(LIMIT_SECONDS)

    link.stop(LIMIT_SECONDS)

    assert [process.returncode for process in programs.started] == [0, 0]
    assert not link._thread.is_alive()


def test_a_hanging_worker_is_killed_and_replaced(caplog):
    """A stopped worker sends no heartbeats: the log says so, and its replacement takes the spool."""
    taken = threading.Event()
    programs = Programs("kill -STOP $$", OBEDIENT)
    link = _link(programs, taken, silence_seconds=0.2)

    link.start()

    assert taken.wait(LIMIT_SECONDS)
    link._silence_seconds = LIMIT_SECONDS
    link.stop(LIMIT_SECONDS)
    assert "has not responded" in caplog.text
    assert programs.started[0].returncode == -signal.SIGKILL
