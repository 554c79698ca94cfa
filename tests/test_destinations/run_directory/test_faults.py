"""Full disks, deleted folders and forks: training continues, one message is logged, and rows come back."""

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from destinations import RunDirectory
from destinations.run_directory import RunInUseError, read_rows, read_series
from destinations.run_directory.documents import Documents
from destinations.run_directory.drain import JournalDrain
from destinations.run_directory.folder import HeldFolder, WriterLock
from destinations.run_directory.journal import Journal
from destinations.run_directory.layout import journal_path, metrics_name, segment_paths, summary_name
from destinations.run_directory.metrics_csv import MetricsCsv
from destinations.run_directory.rank_writer import RankWriter, RunOptions
from destinations.runs import Run
from events import State
from tests.test_destinations.run_directory.conftest import lines_on_a_small_disk
from uploads.disk import Disk


def errors_of(caplog):
    """Returns the messages at level error."""
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


def put_folder(path):
    """Puts a folder in place of a file that another thread may write again meanwhile."""
    while not path.is_dir():
        path.unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir()


class HalfCsv(MetricsCsv):
    """A CSV on a disk that, once full, takes half of each write."""

    is_full = False

    def append(self, lines):
        if not self.is_full:
            super().append(lines)
            return
        super().append([b"".join(lines)[: len(b"".join(lines)) // 2]])
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_drain_that_fails_half_way_repeats_nothing(tmp_path):
    """If a CSV takes half of a block and then fails, it has each row once afterwards."""
    folder = journal_path(tmp_path, 0)
    folder.mkdir(parents=True)
    journal = Journal(folder, State("x"))
    csv = HalfCsv(tmp_path / "metrics.csv")
    drain = JournalDrain(tmp_path, folder, csv, journal)
    for step in range(500):
        journal.append({"a": float(step)}, step)
        if step == 100:
            drain.run()
    csv.is_full = True
    with pytest.raises(OSError, match="No space left"):
        drain.run()
    seen = read_series(tmp_path, "a")
    csv.is_full = False
    rows = drain.run()

    assert seen == read_series(tmp_path, "a") == [(step, float(step)) for step in range(500)]
    assert rows == 399
    assert drain.statistics.summaries()["a"].count == 500
    journal.close()


def test_a_folder_deleted_during_training_ends_writing(drive, tmp_path, caplog):
    """Training continues, the folder doesn't come back, and errors say that and how much is lost."""
    run = drive(flush_seconds=1000).fit()
    for step in range(100):
        run.log({"a": float(step)}, step)
    run.stand_still()

    shutil.rmtree(tmp_path / "run")
    for step in range(100, 200):
        run.log({"a": float(step)}, step)
    run.flush()
    run.log({"a": 200.0}, 200)
    run.logger.log_text("after")
    run.close()

    assert not (tmp_path / "run").exists()
    messages = errors_of(caplog)
    assert "was deleted. Writing has stopped" in messages[0]
    assert "201 rows of metrics are lost" in messages[-1]
    assert "lost 1 media and texts, 201 rows" in caplog.text


class FailingDisk(Disk):
    """Fails at one of its operations, and works again afterwards."""

    def __init__(self, number):
        self.number, self.count, self.at = number, 0, None

    def _step(self):
        self.count += 1
        if self.count == self.at:
            raise OSError(self.number, os.strerror(self.number))

    def open(self, *arguments):
        self._step()
        return super().open(*arguments)

    def write(self, *arguments):
        self._step()
        super().write(*arguments)

    def sync(self, fd):
        self._step()

    def replace(self, source, target):
        self._step()
        super().replace(source, target)


def rows_after_an_error(run_dir, number, at=None):
    """Drains twice; an operation of the second drain fails.

    Returns the rows read, the counts, and the number of operations.
    """
    disk = FailingDisk(number)
    folder = journal_path(run_dir, 0)
    folder.mkdir(parents=True)
    journal = Journal(folder, State("x"))
    drain = JournalDrain(run_dir, folder, MetricsCsv(run_dir / "metrics.csv", disk), journal, disk=disk)
    journal.append({"a": 0.0}, 0)
    drain.run()
    before = disk.count
    journal.append({"a": 1.0, "b": 1.0}, 1)
    disk.at = None if at is None else at + before
    for _ in range(3):
        with contextlib.suppress(OSError):
            drain.run()
    journal.close()
    return read_series(run_dir, "a"), drain.statistics.summaries()["a"].count, drain.rows, disk.count - before


@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT, errno.ENOSPC, errno.EROFS, errno.ESTALE])
def test_a_disk_that_fails_at_any_step_of_a_drain_loses_and_repeats_nothing(tmp_path, number):
    """After an exceeded quota, a bad sector or a server outage, the next drain repeats the step."""
    *expected, steps = rows_after_an_error(tmp_path / "kept", number)
    found = [list(rows_after_an_error(tmp_path / str(at), number, at)[:3]) for at in range(1, steps + 1)]

    assert expected == [[(0, 0.0), (1, 1.0)], 2, 2]
    assert steps > 10
    assert found == [expected] * steps


def cut(path):
    """Cuts a file within a line."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2 - 1)


def empty(path):
    """Truncates a file to nothing."""
    path.write_bytes(b"")


def append(path):
    """Adds lines to a file."""
    with path.open("a") as file:
        file.write("theirs\n" * 1000)


def replace(path):
    """Replaces a file with another one."""
    path.with_name("new").write_text("step,theirs\n1,2\n")
    path.with_name("new").rename(path)


def rewrite(path):
    """Writes other rows into the same file."""
    path.write_text("step,theirs\n" + "1,2\n" * 1000)


CUTS = {cut, empty, rewrite}


@pytest.mark.parametrize("change", [cut, empty, append, replace, rewrite, Path.unlink])
@pytest.mark.parametrize("when", ["before more rows", "at the end"])
@pytest.mark.parametrize("rank", [0, 1])
def test_changes_of_the_csv_by_other_programs_are_undone_or_counted(drive, tmp_path, change, when, rank):
    """The open file still has the rows of a removed one; cut or overwritten rows are counted as lost."""
    run = drive(flush_seconds=1000, rank=rank, all_ranks=True).fit()
    for step in range(100):
        run.log({"a": float(step)}, step)
    run.flush()
    path = tmp_path / "run" / metrics_name(rank)

    change(path)
    left = {cut: path.read_bytes().count(b"\n") - 1, empty: 0, rewrite: 0}[change] if change in CUTS else 100
    more = range(100, 200) if when == "before more rows" else ()
    for step in more:
        run.log({"a": float(step)}, step)
    run.close()

    steps = [*range(left), *more]
    assert read_series(tmp_path / "run", "a", rank) == [(step, float(step)) for step in steps]
    assert b"theirs" not in path.read_bytes()
    assert b"\0" not in path.read_bytes()
    kept = b"".join(one.read_bytes() for one in tmp_path.glob("run/abandoned/*.foreign*.csv"))
    assert (b"theirs" in kept) == (change in {append, replace, rewrite})
    summary = json.loads((tmp_path / "run" / summary_name(rank)).read_text())
    assert [one["count"] for one in summary["metrics"].values()] == ([len(steps)] if steps else [])
    if rank == 0:
        assert sidecar_of(tmp_path)["lost"] == ({"rows": 100 - left} if left < 100 else {})
        assert sidecar_of(tmp_path)["status"] == ("failed to write" if left < 100 else "completed")


def test_a_checkpoint_counts_the_rows_that_were_cut(drive, tmp_path):
    """A lost row keeps its number, so a later session continues where the checkpoint was."""
    first = drive(flush_seconds=1000).fit()
    for step in range(10):
        first.log({"a": float(step)}, step)
    first.flush()
    with (tmp_path / "run" / "metrics.csv").open("r+b") as file:
        file.truncate(len(b"".join(file.read().splitlines(keepends=True)[:6])))
    for step in range(10, 15):
        first.log({"a": float(step)}, step)
    saved = first.destination.state_dict()
    for step in range(15, 20):
        first.log({"a": float(step)}, step)
    first.close()

    second = drive(batch=15)
    second.engine.run_event("before_load")
    second.destination.load_state_dict(saved)
    second.engine.run_event("after_load")
    second.fit().log({"a": -1.0}, 15)
    second.close()

    assert [step for step, _ in read_series(tmp_path / "run", "a")] == [*range(5), *range(10, 16)]
    assert "5 rows of metrics.csv were damaged, and are lost" in Run.open(tmp_path / "run").problems()


def sidecar_of(tmp_path):
    """Returns the sidecar."""
    return json.loads((tmp_path / "run" / "sidecar.json").read_text())


@pytest.mark.parametrize("when", ["before more rows", "at the end"])
def test_rows_of_earlier_sessions_are_restored_from_their_parts(drive, tmp_path, caplog, when):
    """The file is only a view of them. If a row of its own is cut, it is lost."""
    first = drive().fit()
    for step in range(100):
        first.log({"a": float(step)}, step)
    first.close()
    second = drive(batch=100, flush_seconds=1000).fit()
    second.log({"a": 100.0}, 100)
    second.flush()
    caplog.clear()

    lines = (tmp_path / "run" / "metrics.csv").read_bytes().splitlines(keepends=True)
    with (tmp_path / "run" / "metrics.csv").open("r+b") as file:
        file.truncate(len(b"".join(lines[:41])) + 2)
    if when == "before more rows":
        second.log({"a": 101.0}, 101)
        second.flush()
    second.log({"a": 102.0}, 102)
    second.close()

    later = [101, 102] if when == "before more rows" else [102]
    assert [step for step, _ in read_series(tmp_path / "run", "a")] == [*range(100), *later]
    assert sidecar_of(tmp_path)["lost"] == {"rows": 1}
    assert "another program has changed metrics.csv" in caplog.text


def test_hyperparameters_deleted_during_training_are_restored(drive, tmp_path):
    """The writer replaces each document as a whole, so it writes a missing one again."""
    run = drive(flush_seconds=1000).fit()
    run.logger.log_hyperparameters({"lr": 0.1})
    run.stand_still()

    (tmp_path / "run" / "hparams.yaml").unlink()
    run.close()

    assert (tmp_path / "run" / "hparams.yaml").read_text() == "lr: 0.1\n"
    assert sidecar_of(tmp_path)["lost"] == {}


def test_a_folder_moved_while_it_is_written_keeps_its_rows(drive, tmp_path, caplog):
    """After a rename, everything is written to the moved folder, which stays locked.

    Its former path is free.
    """
    caplog.set_level(logging.WARNING)
    run = drive(flush_seconds=1000).fit()
    for step in range(100):
        run.log({"a": float(step)}, step)
    run.stand_still()

    (tmp_path / "run").rename(tmp_path / "moved")
    for step in range(100, 200):
        run.log({"a": float(step)}, step)
    run.flush()
    with pytest.raises(RunInUseError):
        WriterLock(tmp_path / "moved" / ".lock").acquire()
    for step in range(200, 300):
        run.log({"a": float(step)}, step)
    run.close()

    assert read_series(tmp_path / "moved", "a") == [(step, float(step)) for step in range(300)]
    assert json.loads((tmp_path / "moved" / "sidecar.json").read_text())["status"] == "completed"
    assert not (tmp_path / "moved" / ".lock").exists()
    assert not (tmp_path / "run").exists()
    assert ["was moved to" in one.getMessage() for one in caplog.records] == [True]


LOGGING = """
import json, logging, sys
from pathlib import Path
from destinations import RunDirectory
from destinations.run_directory import read_series
from events import Engine, Logger, State
logging.basicConfig(level=logging.ERROR, stream=sys.stdout, format="ERROR %(message)s")
disk = Path(sys.argv[1])
destination = RunDirectory(disk / "run", flush_seconds=0.05)
state = State("x"); logger = Logger(state, [destination], raise_errors=True); engine = Engine(state, logger)
engine.run_event("init"); engine.run_event("fit_start")
names = [f"metric/{i}" for i in range(10)]
def log(steps):
    for step in steps: logger.log_metrics({name: step + 0.1 for name in names}, step)
log(range(100)); logger.flush()
ballast = disk / "ballast"
with ballast.open("wb", buffering=0) as file:
    for size in (1 << 16, 1):
        try:
            while file.write(bytes(size)): pass
        except OSError: pass
"""


def test_a_full_file_system_stops_nothing(tmp_path):
    """On a disk that fills up and is freed, no call raises, one error is logged, and every row is kept."""
    code = """
log(range(100, 30_000)); logger.flush()
waiting = destination._writer.journal.counts.pending
ballast.unlink(); logger.flush()
log(range(30_000, 30_010)); logger.flush()
engine.close()
rows = read_series(disk / "run", "metric/9")
print("waiting", waiting > 0, "rows", rows == [(step, step + 0.1) for step in range(30_010)])
"""
    lines = lines_on_a_small_disk(tmp_path, LOGGING + code)

    assert lines[-1:] == ["waiting True rows True"], lines
    assert sum(line.startswith("ERROR") for line in lines) == 1
    assert "is not writable" in lines[0]


def test_a_disk_full_until_the_end_reports_lost_rows(tmp_path):
    """Rows in the folder and lost rows add up to the logged ones.

    The sidecar says `failed to write`.
    """
    code = """
log(range(100, 62_000))
engine.close()
sidecar = json.loads((disk / "run" / "sidecar.json").read_text())
found = len(read_series(disk / "run", "metric/9"))
print(sidecar["status"], sidecar["lost"]["rows"] + found, found < 62_000)
"""
    lines = lines_on_a_small_disk(tmp_path, LOGGING + code)

    assert lines[-1:] == ["failed to write 62000 True"], lines
    assert "rows of metrics are lost" in lines[-2]


def test_too_many_open_files_stop_nothing(tmp_path):
    """When no file can be opened, calls continue; when some can, rows are drained."""
    code = """
import logging, os, sys, time
from pathlib import Path
from destinations import RunDirectory
from destinations.run_directory import read_series
from events import Engine, Logger, State
class Reports(logging.Handler):
    texts = []
    def emit(self, record): self.texts.append(record.getMessage())
logging.getLogger("destinations").addHandler(Reports())
destination = RunDirectory(Path(sys.argv[1]), flush_seconds=0.02)
state = State("x"); logger = Logger(state, [destination], raise_errors=True); engine = Engine(state, logger)
engine.run_event("init"); engine.run_event("fit_start"); logger.flush()
destination._writer._papers.environment.join(60)  # It opens files too; those that it gives back would do to recover for a moment.
held, step, deadline = [], 0, time.monotonic() + 120
# Again and again: what a thread was just using comes free a moment later, and would be enough to write with.
while step < 20_000 or not Reports.texts and time.monotonic() < deadline:
    try: held.append(os.dup(1))
    except OSError: pass
    logger.log_metrics({"a": float(step), "b": 1.0}, step)
    step += 1
logger.flush()
for fd in held: os.close(fd)
logger.log_metrics({"a": float(step)}, step)
engine.close()
print(sum("is not writable" in text for text in Reports.texts))
print(read_series(Path(sys.argv[1]), "a") == [(one, float(one)) for one in range(step + 1)])
"""
    command = ["sh", "-c", f"ulimit -n 64; exec {sys.executable} -c '{code}' {tmp_path / 'run'}"]

    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)

    assert done.stdout.splitlines() == ["1", "True"], done.stdout + done.stderr


def test_an_error_of_the_writer_is_counted_reported_once_and_shown(drive, tmp_path, caplog):
    """A folder in place of the position causes one message, a count in the sidecar, and one at the end."""
    caplog.set_level(logging.WARNING)
    run = drive(flush_seconds=0.005).fit()
    run.log({"a": 1.0}, 0)
    run.stand_still()
    position = tmp_path / "run" / "journal" / "rank0" / "position.json"
    put_folder(position)

    for step in range(1, 20):
        run.log({"a": 1.0}, step)
        run.flush()
    position.rmdir()
    run.flush()
    run.flush()
    run.close()

    messages = [record.getMessage() for record in caplog.records if str(tmp_path) in record.getMessage()]
    data = json.loads((tmp_path / "run" / "sidecar.json").read_text())
    assert data["overhead"]["errors"]["IsADirectoryError"] >= 19
    assert data["overhead"]["last_error"].startswith("IsADirectoryError")
    assert sum("is not writable (IsADirectoryError" in message for message in messages) == 1
    assert sum("is writable again" in message for message in messages) == 1
    assert len(messages) == 2
    assert [row.step for row in read_rows(tmp_path / "run")] == list(range(20))


def test_an_error_during_a_turn_counts_after_the_turn(tmp_path, caplog):
    """Another thread fails while the writer checks the disk: one message, and a later turn repairs it."""
    caplog.set_level(logging.WARNING)
    failures = [OSError(errno.ENOSPC, "No space left on device")]
    tmp_path.joinpath("run").mkdir()

    def fails_once():
        while failures:
            writer._on_disk_full(failures.pop())
        return {}

    lock = WriterLock(tmp_path / "run" / ".lock")
    lock.acquire()
    writer = RankWriter(
        run_dir=tmp_path / "run",
        state=State("x"),
        lock=lock,
        documents=Documents(tmp_path / "run", "id", (), "", 0.0),
        options=RunOptions(flush_seconds=1000, journal="mapped"),
        media_stats=fails_once,
        run_folder=HeldFolder(tmp_path / "run"),
    )

    writer._tick(is_last=False)
    first = len(caplog.records)
    writer._tick(is_last=False)
    writer.close(60)

    messages = [record.getMessage() for record in caplog.records]
    assert first == 1
    assert "is not writable (OSError: [Errno 28]" in messages[0]
    assert [message.endswith("is writable again.") for message in messages] == [False, True]


def test_unwritable_documents_are_reported_once(drive, tmp_path, caplog):
    """Draining rows meanwhile doesn't repeat the message."""
    run = drive(flush_seconds=0.005).fit()
    run.log({"a": 1.0}, 0)
    run.stand_still()
    for name in ("summary.json", "environment.json", "sessions.jsonl"):
        put_folder(tmp_path / "run" / name)

    for step in range(1, 20):
        run.log({"a": 1.0}, step)
        run.flush()
    run.close()

    assert len(errors_of(caplog)) == 1
    assert [row.step for row in read_rows(tmp_path / "run")] == list(range(20))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed")
def test_revoked_permissions_stop_nothing(tmp_path):
    """A folder that becomes unwritable causes one message; rows arrive once it is writable again."""
    code = """
import logging, os, sys
from pathlib import Path
from destinations import RunDirectory
from destinations.run_directory import read_series
from events import Engine, Logger, State
assert os.geteuid() != 0
logging.basicConfig(level=logging.ERROR, stream=sys.stdout, format="ERROR %(message)s")
run = Path(sys.argv[1]) / "run"
destination = RunDirectory(run, flush_seconds=0.01)
state = State("x"); logger = Logger(state, [destination], raise_errors=True)
engine = Engine(state, logger); engine.run_event("init"); engine.run_event("fit_start")
folders = [run, run / "journal" / "rank0"]
def log(steps):
    for step in steps: logger.log_metrics({"a": float(step)}, step)
    logger.flush()
log(range(100))
destination._writer._papers.environment.join(60)  # What it cannot write is an error of its own, which passes by itself.
for folder in folders: folder.chmod(0o500)
for start in range(100, 40_000, 4000): log(range(start, min(40_000, start + 4000)))
for folder in folders: folder.chmod(0o700)
log(range(40_000, 40_010)); logger.flush(); engine.close()
print("rows", read_series(run, "a") == [(step, float(step)) for step in range(40_010)])
"""
    home = Path(tempfile.mkdtemp(dir="/tmp"))  # A place that another user can reach.
    os.chown(home, 65534, 65534)
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(home)}
    if subprocess.run(
        [*user, sys.executable, "-c", "import events"], check=False, env=environment
    ).returncode:
        pytest.skip("another user cannot run this Python")

    done = subprocess.run(
        [*user, sys.executable, "-c", code, str(home)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=environment,
    )
    shutil.rmtree(home)

    lines = done.stdout.splitlines()
    assert lines[-1:] == ["rows True"], done.stdout + done.stderr
    assert [line for line in lines if line.startswith("ERROR")] == lines[:1]
    assert "PermissionError" in lines[0]


class LogsInWorker:
    """A dataset whose workers carelessly log."""

    def __init__(self, run):
        self.run = run

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.run.destination.log_metrics({"worker": 1.0}, index)
        self.run.destination.log_text("worker")
        self.run.destination.flush()
        return index


class HoldsTheDestination:
    """A dataset that takes the destination along to its workers, and logs there."""

    def __init__(self, destination):
        self.destination = destination

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.destination.log_metrics({"worker": 1.0}, index)
        self.destination.flush()
        return int(self.destination.run_dir is not None)


@pytest.mark.filterwarnings("ignore:This process")
# If this process may use only one processor.
@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes:UserWarning")
def test_forked_workers_write_nothing_and_hang_nowhere(drive, tmp_path):
    """A DataLoader with workers forks while the threads run.

    Rows of a worker are left out, and the parent's rows are kept.
    """
    data = pytest.importorskip("torch.utils.data")
    run = drive(flush_seconds=0.001).fit()

    for round_ in range(3):
        loader = data.DataLoader(LogsInWorker(run), num_workers=2, multiprocessing_context="fork")
        for batch, _ in enumerate(loader):
            run.log({"a": 1.0}, round_ * 8 + batch)
    run.close()

    assert read_series(tmp_path / "run", "a") == [(step, 1.0) for step in range(24)]
    assert read_series(tmp_path / "run", "worker") == []
    assert not (tmp_path / "run" / "texts.jsonl").exists()


def test_the_first_forked_worker_that_logs_warns(tmp_path):
    """It warns once per run, because each epoch of a DataLoader forks its own workers."""
    pytest.importorskip("torch")
    code = """
import sys
from torch.utils.data import DataLoader, Dataset
from destinations import RunDirectory
from events import Run

class Logs(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        run.log_metrics({"worker": index})
        run.log_text("from a worker")
        return index

with Run([RunDirectory(sys.argv[1])], run_name="r") as run:
    for _ in range(3):
        for batch in DataLoader(Logs(), num_workers=2, multiprocessing_context="fork"):
            run.batch_start()
            run.log_metrics({"loss": float(batch)})
            run.batch_end()
"""
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)

    (line,) = done.stderr.splitlines()
    assert re.match(
        r"(metrics|text) is logged in a forked process, .* is not written: only the process", line
    )
    assert str(tmp_path / "run") in line
    assert len(read_series(tmp_path / "run", "loss")) == 24


def test_spawned_workers_write_nothing(drive, tmp_path):
    """A DataLoader sends closed copies to workers that it spawns.

    Logging there is refused, and harms nothing.
    """
    data = pytest.importorskip("torch.utils.data")
    run = drive(flush_seconds=0.001).fit()
    workers = {"num_workers": 1, "multiprocessing_context": "spawn"}
    loader = data.DataLoader(HoldsTheDestination(run.destination), **workers)

    for step, refusals in enumerate(loader):
        run.log({"a": 1.0}, step)
        assert refusals.item() == 0
    run.close()

    assert read_series(tmp_path / "run", "a") == [(step, 1.0) for step in range(4)]
    assert read_series(tmp_path / "run", "worker") == []


def test_a_child_that_outlives_its_parent_does_not_hold_the_lock(drive, tmp_path):
    """The run can be opened again while a forked child of its killed writer still lives."""
    code = """
import os, signal, sys
from destinations import RunDirectory
from events import Engine, Logger, State
state = State("x"); logger = Logger(state, [RunDirectory(sys.argv[1])]); engine = Engine(state, logger)
engine.run_event("init"); engine.run_event("fit_start"); logger.log_metrics({"a": 1.0}, 0)
if os.fork() == 0:
    print("child", flush=True); sys.stdin.read(); os._exit(0)
signal.pause()
"""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.wait(60)

    again = drive()
    again.close()
    process.stdin.close()
    process.stdout.close()

    assert read_series(tmp_path / "run", "a") == [(0, 1.0)]


class WithoutMappings(RunDirectory):
    """A run on a file system that maps no files."""

    def _make_segment(self, path, number, size):
        raise OSError(errno.ENODEV, "No such device")


def test_a_file_system_without_mappings_is_reported(drive, tmp_path, caplog):
    """If no file can be mapped, rows are appended over many segments, and one warning names the cost."""
    run = drive(kind=WithoutMappings, flush_seconds=1000).fit()
    for step in range(20_000):
        run.log({"a": float(step), "b": step}, step)
    before = read_series(tmp_path / "run", "a")
    segments = len(segment_paths(journal_path(tmp_path / "run", 0)))
    run.close()

    assert before == read_series(tmp_path / "run", "a") == [(step, float(step)) for step in range(20_000)]
    assert segments > 1
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert ["cannot be mapped ([Errno 19] No such device)" in one.getMessage() for one in warnings] == [True]
