"""Machines write one run in a bucket and are lost, again and again, while the store fails in every way."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import attrs
import pytest

from destinations.history.snapshot import read_rows
from destinations.run_directory.stored_run import StoredRun
from destinations.runs.content.sources import branches_of
from tests.crash.machines import lose, send_signal
from tests.effort import times
from tests.servers import s3_servers
from tests.servers.fault_proxy import PAGE, Answer, Corrupt, Dribble, Late, Reset, Truncate
from uploads import TransientStoreError, UploadError, open_store

KILLS = times(2, 200)
WRITERS = ("-", *(f"eval{number}" for number in range(times(2, 8))))
LIMIT_SECONDS = 240
BATCHES = 200
ROOT = Path(__file__).parents[2]
# Thirteen ways in which a store fails now and then.
FAULTS = [
    Answer(500, "InternalError"),
    Answer(503, "SlowDown", headers=(("Retry-After", "0"),)),
    Answer(503, "SlowDown", after_forwarding=True),
    Answer(429),
    Answer(409, "OperationAborted"),
    Answer(403, page=PAGE),
    Answer(502, page=PAGE),
    Answer(500, "InternalError", after_forwarding=True),
    Reset(),
    Corrupt(),
    Dribble(3, 0.01),
    Truncate(10),
    Late(),
]


pytestmark = pytest.mark.usefixtures("s3_credentials")


@attrs.define
class Machine:
    """Writes as the trainer or as one named writer, on one machine after another."""

    writer: str
    folder: Path
    moves: int = 0
    step: int = 0
    number: int = 0
    first_numbers: list = attrs.field(factory=list)
    logged: list = attrs.field(factory=list)
    child: object = None
    reader: object = None

    @property
    def errors(self):
        """The standard error of the present session."""
        return self.folder.with_suffix(".errors")

    def begin(self, uri, count=100_000):
        """Starts a session."""
        self.first_numbers.append(self.number)
        command = [
            sys.executable,
            "-m",
            "tests.crash.bucket_child",
            uri,
            f"{self.folder}/{self.moves}",
            self.writer,
        ]
        with self.errors.open("w") as errors:
            self.child = subprocess.Popen(
                [*command, str(self.step), str(self.number), str(count)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env={**os.environ, **s3_servers.ENVIRONMENT},
                start_new_session=True,
            )
        self.logged = []
        self.reader = threading.Thread(target=self._read, args=(self.child.stdout,), daemon=True)
        self.reader.start()

    def _read(self, output):
        with output:
            for line in output:
                word, _, number = line.partition(" ")
                # The last line may be torn.
                if word == "logged" and number.endswith("\n"):
                    self.logged.append(int(number))

    def kill(self, *, lost):
        """Kills it but not its worker; if the machine is lost, everything on it goes too."""
        os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()
        self.reader.join(LIMIT_SECONDS)
        if lost:
            lose(f"{self.folder}/{self.moves}")
            self.moves += 1
        if self.logged:
            self.number = self.logged[-1] + 1000
            self.step += len(self.logged)


def rows_in(server, writer, folder):
    """The numbers of a writer's rows that a reader of the store has, and the numbers in branches.

    moto sometimes answers 500 while nine processes change what it lists.
    """
    for _ in range(4):
        with contextlib.suppress(TransientStoreError):
            return _rows_in(server, writer, folder)
    return _rows_in(server, writer, folder)


def _rows_in(server, writer, folder):
    shutil.rmtree(folder, ignore_errors=True)
    prefix = "" if writer == "-" else f"writers/{writer}/"
    run = StoredRun(open_store(server), prefix, folder)
    run.look()
    if run.fetch() is None:
        return [], []
    for branch in run.branches():
        branch.fetch()
    left = (row for branch in branches_of(folder) for file in branch.files() for row in file.rows())
    return [[int(row.metrics[f"{writer}/number"]) for row in rows] for rows in (read_rows(folder), left)]


def faulty(seed):
    """A plan for the proxy: one request in twelve fails, in one of the ways."""
    draw = random.Random(seed)
    lock = threading.Lock()

    def plan(_request):
        with lock:
            return draw.choice(FAULTS) if draw.random() < 1 / 12 else None

    return plan


def test_a_lost_machine_loses_no_row_of_a_finished_interval(moto, proxy, prefix, tmp_path):
    """Rows that a reader saw stay: none is doubled or overwritten, and none of another writer is missing."""
    draw = random.Random(int(os.environ.get("SEED", "0")))
    direct = moto.uri(f"{prefix}/killed")
    # Waits less than usual for an answer that does not come.
    uri = f"{moto.at(proxy.url).uri(f'{prefix}/killed')}&read_timeout_seconds=3"
    proxy.plan = faulty(draw.random())
    machines = {name: Machine(name, tmp_path / name) for name in WRITERS}
    seen = {name: set() for name in WRITERS}
    for machine in machines.values():
        machine.begin(uri)
    for _ in range(KILLS):
        machine = machines[draw.choice(WRITERS)]
        deadline = time.monotonic() + LIMIT_SECONDS
        wanted = draw.randint(1, 150)
        while len(machine.logged) < wanted and machine.child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert machine.logged, machine.errors.read_text()
        machine.kill(lost=draw.random() < 0.6)
        rows, left = rows_in(direct, machine.writer, tmp_path / "copy")
        assert seen[machine.writer] <= {*rows, *left}
        seen[machine.writer] |= {*rows, *left}
        if machine.writer == "-":
            machine.step = max(0, machine.step - draw.randint(0, 30))
        machine.begin(uri)
    proxy.plan = lambda _request: None
    for machine in machines.values():
        machine.kill(lost=False)
        machine.begin(uri, 20)
        assert machine.child.wait(LIMIT_SECONDS) == 0
        machine.reader.join(LIMIT_SECONDS)
    for name, machine in machines.items():
        rows, left = rows_in(direct, name, tmp_path / "copy")
        everything = Counter([*rows, *left])

        assert seen[name] <= everything.keys()
        assert {*machine.logged} <= set(rows)
        assert [number for number, count in Counter(rows).items() if count > 1] == []


def test_a_machine_stopped_for_long_changes_nothing_of_its_successor(moto, prefix, tmp_path):
    """After SIGSTOP, another machine continues; after SIGCONT, the first one's rows become a branch."""
    uri = moto.uri(f"{prefix}/killed")
    first, second = Machine("-", tmp_path / "one"), Machine("-", tmp_path / "two")
    first.begin(uri)
    _wait_for(lambda: len(first.logged) > 60 and rows_in(uri, "-", tmp_path / "copy")[0])
    send_signal(tmp_path / "one", signal.SIGSTOP)
    time.sleep(1.0)
    before, _ = rows_in(uri, "-", tmp_path / "copy")
    second.step, second.number = len(before), 50_000
    second.begin(uri, 150)
    _wait_for(lambda: len(second.logged) > 30)
    send_signal(tmp_path / "one", signal.SIGCONT)
    assert second.child.wait(LIMIT_SECONDS) == 0
    second.reader.join(LIMIT_SECONDS)
    after, _ = rows_in(uri, "-", tmp_path / "copy")
    _wait_for(lambda: any(number > max(before) for number in rows_in(uri, "-", tmp_path / "copy")[1]), 90)
    first.kill(lost=True)
    rows, left = rows_in(uri, "-", tmp_path / "copy")

    assert after == [*before, *range(50_000, 50_150)]
    assert rows == after
    assert left
    assert all(max(before) < number < 50_000 for number in left)


def test_training_resumes_on_an_empty_machine(moto, prefix, tmp_path, torch_python):
    """A URI and `autoresume=True` suffice: checkpoint, rows and time come from the store."""
    uri = moto.uri(f"{prefix}/trained")
    first = _train(torch_python, uri, tmp_path / "one", dies=True)
    assert first.returncode == -signal.SIGKILL, first.stderr
    lose(tmp_path / "one")

    second = _train(torch_python, uri, tmp_path / "two")
    run = StoredRun(open_store(uri), "", tmp_path / "copy")
    run.look()
    run.fetch()
    for name in ("sidecar.json", "sessions.jsonl"):
        run.download(name)
    rows = [row.step for row in read_rows(tmp_path / "copy") if "loss/train/total" in row.metrics]

    assert second.returncode == 0, second.stderr
    began = int(second.stdout.split("\n")[0].removeprefix("began "))
    assert began >= 12
    assert began % 4 == 0
    assert rows == list(range(BATCHES))
    sessions = [json.loads(line) for line in (tmp_path / "copy" / "sessions.jsonl").read_text().splitlines()]
    assert [one["status"] for one in sessions] == ["killed", "completed"]


def _train(python, uri, machine, *, dies=False):
    return subprocess.run(
        [
            python,
            "-m",
            "tests.crash.bucket_trainer_child",
            uri,
            machine,
            str(BATCHES),
            str(int(dies)),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **s3_servers.ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        timeout=LIMIT_SECONDS,
        check=False,
    )


def _wait_for(is_so, seconds=LIMIT_SECONDS):
    deadline = time.monotonic() + seconds
    while True:
        try:
            if is_so():
                return
        except UploadError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.05)
