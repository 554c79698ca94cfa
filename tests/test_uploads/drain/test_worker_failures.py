"""Dead, stopped or unstartable workers, and such trainers: no file waits longer than necessary."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.servers.fault_proxy import Reset
from tests.servers.s3_servers import refusing_port
from tests.waiting import until
from uploads import LocalStore, RetryPolicy, UploadQueue, UploadState
from uploads.drain.drain import Drain
from uploads.drain.supervisor import WorkerConfig, WorkerSupervisor
from uploads.drain.worker import _Messenger
from uploads.spool.ownership import owner_of
from uploads.spool.spool import Spool

LIMIT_SECONDS = 120
SOON = RetryPolicy(first_seconds=0.01, cap_seconds=0.05)


@pytest.fixture
def make_worker_queue(tmp_path):
    """Makes queues with a worker process, and closes them."""
    queues = []

    def make(uri, **options):
        options = {"spool": tmp_path / "spool", "free_bytes": 0, "isolation": "process", **options}
        queues.append(UploadQueue(uri, **options))
        return queues[-1]

    yield make
    for queue in queues:
        queue.close(timeout_seconds=0)


def test_a_file_that_kills_the_worker_delays_no_other(make_worker_queue, make_file, moto, proxy, prefix):
    """The worker dies at each attempt with the first file; the twenty behind it are delivered."""
    queue = make_worker_queue(
        moto.at(proxy.url).uri(prefix), workers=1, policy=RetryPolicy(first_seconds=20.0)
    )

    def kill(request):
        if request.method != "PUT" or not request.path.partition("?")[0].endswith("/poison"):
            return None
        os.kill(queue._drainer._worker.process.pid, signal.SIGKILL)
        return Reset()

    proxy.plan = kill
    poison = queue.submit(make_file(content=b"poison"), "poison")
    good = [queue.submit(make_file(content=b"good"), f"n{number}") for number in range(20)]

    assert [handle.result(LIMIT_SECONDS).state for handle in good] == [UploadState.DONE] * 20
    assert not poison.done()


def test_printed_text_of_the_worker_is_not_an_answer(make_worker_queue, make_file, tmp_path, monkeypatch):
    """A `sitecustomize` that prints to both streams doesn't break the link; handles settle."""
    customs = tmp_path / "customs"
    customs.mkdir()
    (customs / "sitecustomize.py").write_text(
        "import sys\nprint('hello')\nprint('{\"settled\": 1}')\nprint('hello', file=sys.stderr)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(customs), os.environ.get("PYTHONPATH", "")]))
    queue = make_worker_queue(str(tmp_path / "store"))

    outcome = queue.submit(make_file(), "a").result(LIMIT_SECONDS)

    assert outcome.state is UploadState.DONE


LEAVES = """
import os, sys
from uploads import Timeouts, UploadQueue
queue = UploadQueue(sys.argv[1], spool=sys.argv[2], free_bytes=0, timeouts=Timeouts(grace_seconds=600))
queue.submit(sys.argv[3], "name")
print(queue._drainer._worker.process.pid, flush=True)
os._exit(0)
"""


def test_a_shell_that_waits_for_the_output_ends_with_the_trainer(tmp_path, make_file):
    """`python train.py 2>&1 | cat` ends with the trainer, although the worker continues."""
    with refusing_port() as port:
        uri = f"s3://bucket?endpoint_url=http://127.0.0.1:{port}"
        command = 'timeout 300 "$0" "$@" 2>&1 | cat'
        trainer = subprocess.run(
            ["sh", "-c", command, sys.executable, "-c", LEAVES, uri, tmp_path / "spool", make_file()],
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=True,
        )
        worker = int(trainer.stdout.split()[0])
        os.kill(worker, signal.SIGKILL)  # It was alive: else this raises.


STOPPED = """
import os, pathlib, signal, sys
from uploads import UploadQueue
folder = pathlib.Path(sys.argv[1])
queue = UploadQueue(str(folder / "store"), spool=folder / "spool", free_bytes=0, isolation="process", durability="process")
source = folder / "source"
source.write_bytes(b"content")
queue.submit(source, "first").result(120)
os.kill(queue._drainer._worker.process.pid, signal.SIGSTOP)
for number in range(600):
    queue.submit(source, f"n{number}")
print(queue._drainer._worker.process.pid, flush=True)
sys.stdin.readline()
backlog = queue.close(120)
print(backlog, flush=True)
"""


def test_a_trainer_that_is_stopped_does_not_stop_its_worker(tmp_path):
    """While the trainer is stopped with SIGSTOP, the worker delivers everything."""
    trainer = subprocess.Popen(
        [sys.executable, "-c", STOPPED, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        worker = int(trainer.stdout.readline())
        trainer.send_signal(signal.SIGSTOP)
        os.kill(worker, signal.SIGCONT)
        spool = Spool(tmp_path / "spool")

        until(lambda: not (spool.list_pending() or spool.list_inflight()))

        trainer.send_signal(signal.SIGCONT)
        output, _ = trainer.communicate("go\n", timeout=LIMIT_SECONDS)
        assert output.strip() == "everything was uploaded"
    finally:
        trainer.kill()
        trainer.wait()


def test_dropped_messages_are_looked_up_later():
    """Messages that didn't fit into the pipe are replaced by the advice to look into the spool."""
    reading, writing = os.pipe()
    voice = _Messenger(writing)

    for number in range(10_000):
        voice.send({"settled": number})
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        os.set_blocking(reading, False)
        text = b""
        while (chunk := pipe.read(1 << 16)) is not None:
            text += chunk
            voice.send()
        voice.send({"settled": "last"})
        text += pipe.read(1 << 16)
    os.close(writing)

    said = [json.loads(line) for line in text.splitlines()]
    assert said[-2:] == [{"idle": True}, {"settled": "last"}]
    assert said[:-2] == [{"settled": number} for number in range(len(said) - 2)]


def test_a_delivery_by_another_process_is_noticed(make_worker_queue, make_file, tmp_path):
    """`uploads resume --follow` runs beside training, and the worker waits for the spool."""
    spool = Spool(tmp_path / "spool")
    spool.create()
    resumed = Drain(spool, LocalStore(tmp_path / "store"), policy=SOON, role="resume")
    resumed.start()
    try:
        queue = make_worker_queue(str(tmp_path / "store"))
        handles = [queue.submit(make_file(), f"n{number}") for number in range(5)]
        resumed.rescan()

        assert [handle.result(LIMIT_SECONDS).state for handle in handles] == [UploadState.DONE] * 5
        assert owner_of(spool.drain_lock)["role"] == "resume"
        assert str(queue.close(LIMIT_SECONDS)) == "everything was uploaded"
    finally:
        resumed.stop(LIMIT_SECONDS)


def test_threads_upload_where_no_process_can_be_started(
    make_worker_queue, make_file, tmp_path, monkeypatch, caplog
):
    """In an embedding program no worker can start, so threads upload, with a warning."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))

    queue = make_worker_queue(str(tmp_path / "store"))

    assert queue.submit(make_file(), "a").result(LIMIT_SECONDS).state is UploadState.DONE
    assert "cannot start a worker process" in caplog.text


@pytest.mark.parametrize("isolation", ["threads", "process"])
def test_a_queue_that_cannot_start_leaves_the_spool_free(tmp_path, make_file, isolation):
    """If no thread can be started, the constructor raises and leaves no lock and no worker."""
    # More than an address space has: a system that overcommits memory gives one thread 64 TiB.
    usual = threading.stack_size(1 << 60)
    try:
        with pytest.raises(RuntimeError, match="thread"):
            UploadQueue(tmp_path / "store", spool=tmp_path / "spool", free_bytes=0, isolation=isolation)
    finally:
        threading.stack_size(usual)

    spool = Spool(tmp_path / "spool")
    assert owner_of(spool.queue_lock) is None
    until(lambda: owner_of(spool.drain_lock) is None)
    with UploadQueue(tmp_path / "store", spool=tmp_path / "spool", free_bytes=0) as queue:
        assert queue.submit(make_file(), "a").result(LIMIT_SECONDS).state is UploadState.DONE


def test_a_trainer_without_standard_streams_gets_its_worker(tmp_path, make_file):
    """A daemon closed its standard streams; the pipes to the worker don't take their numbers."""
    program = (
        "import os, sys; os.closerange(0, 3)\n"
        "from uploads import UploadQueue\n"
        "queue = UploadQueue(sys.argv[1], spool=sys.argv[2], free_bytes=0, isolation='process')\n"
        "state = queue.submit(sys.argv[3], 'a').result(120).state\n"
        "open(sys.argv[4], 'w').write(state)\n"
        "queue.close(120)\n"
    )

    subprocess.run(
        [
            sys.executable,
            "-c",
            program,
            tmp_path / "store",
            tmp_path / "spool",
            make_file(),
            tmp_path / "said",
        ],
        timeout=LIMIT_SECONDS,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )

    assert (tmp_path / "said").read_text() == "done"


class Programs:
    """Starts this program for a shell instead of a worker, and counts."""

    def __init__(self, program):
        self.program = program
        self.started = 0
        self.third = threading.Event()

    def __call__(self, command, **options):
        self.started += 1
        if self.started == 3:
            self.third.set()
        return subprocess.Popen(["sh", "-c", f"exec >/dev/fd/{command[-1]}; {self.program}"], **options)


@pytest.mark.parametrize("program", ["echo '{\"owner\": 1}'; kill -9 $$", "echo nonsense; exit 3"])
def test_a_worker_that_ends_at_once_is_started_ever_more_rarely(program, caplog):
    """The third worker starts a second after the second."""
    programs = Programs(program)
    link = WorkerSupervisor(
        WorkerConfig("spool", "s3://bucket", {}, 1),
        on_settled=lambda *_: None,
        look_up=lambda: None,
        popen=programs,
    )
    link.start()

    assert programs.third.wait(LIMIT_SECONDS)

    link.stop(LIMIT_SECONDS)
    assert "restarting in 0 s" in caplog.text
    assert "restarting in 1 s" in caplog.text
    code = {"echo nonsense; exit 3": 3}.get(program, -9)
    assert f"exit code {code}" in caplog.text
