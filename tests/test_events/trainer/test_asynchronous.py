"""Tests checkpoints written while training continues, by a thread or by a process that may die."""

import concurrent.futures
import contextlib
import gc
import logging
import os
import signal
import subprocess
import tempfile
import threading
import zlib
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from destinations import Artifacts, LoggerDestination
from events import Callback, CheckpointError, CheckpointSaver, CheckpointWriting, read_checkpoint
from events.trainer.checkpoint.files import AbandonedError, sweep
from events.trainer.checkpoint.snapshot import SnapshotBuffer
from events.trainer.checkpoint.writer import BackgroundWriter, Request
from tests.effort import times
from tests.test_events.trainer.conftest import dataset
from tests.waiting import open_files, until

WAIT_SECONDS = 120.0


def stopped(pid):
    """Returns whether a process is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def listing(folder):
    """Returns the names of all files in a folder, also hidden ones, except the lock of the run."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


class At(Callback):
    """Calls functions once so many batches are trained, after the saver."""

    def __init__(self, **calls):
        self.calls = {int(name.removeprefix("ba")): call for name, call in calls.items()}

    def before_dataloader(self, state, logger):
        if call := self.calls.pop(int(state.timestamp.batch), None):
            call()


@pytest.fixture
def make_run(make_trainer, tmp_path):
    """Makes a trainer with a saver; a process writes its checkpoints with `process_bytes=0`, else a thread."""

    def make(
        *callbacks, trainer=None, process_bytes=1 << 30, asynchronous=True, when_busy="wait", **arguments
    ):
        writing = CheckpointWriting(
            asynchronous=asynchronous, when_busy=when_busy, process_bytes=process_bytes
        )
        settings = {"save_interval": "3ba", "writing": writing} | arguments
        saver = CheckpointSaver(tmp_path / "saved", **settings)
        return saver, make_trainer(callbacks=[*callbacks, saver], **(trainer or {}))

    return make


@pytest.fixture
def make_stopped(make_run):
    """Makes a run whose writing process is stopped (SIGSTOP) from its start until `SIGCONT`."""
    pids = []

    def make(**arguments):
        def stop():
            until(lambda: saver.writer_pid is not None)
            pids.append(saver.writer_pid)
            os.kill(saver.writer_pid, signal.SIGSTOP)
            until(lambda: stopped(saver.writer_pid))

        calls = {"ba2": stop, **arguments.pop("calls", {})}
        saver, trainer = make_run(At(**calls), process_bytes=0, **arguments)
        return saver, trainer

    yield make
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class HeldWriter(BackgroundWriter):
    """Writes in a thread, which waits while its gate is shut."""

    def __init__(self):
        super().__init__(1 << 30)
        self.gate = threading.Event()

    def write(self, request, snapshot, buffer, wait, is_wanted=lambda: True):
        return super().write(
            request, snapshot, buffer, lambda: (self.gate.wait(WAIT_SECONDS), wait()), is_wanted
        )


@pytest.fixture
def make_held(make_run):
    """Makes a run whose checkpoints wait, in a thread, until a gate is opened."""
    gates = []

    def make(**arguments):
        saver, trainer = make_run(At(**arguments.pop("calls", {})), **arguments)
        saver._writing._buffer, saver._writing._writer = SnapshotBuffer(), HeldWriter()
        gates.append(saver._writing._writer.gate)
        return saver, trainer, gates[-1]

    yield make
    for gate in gates:
        gate.set()


class TestWhileItIsWritten:
    """Training continues, and no partial file is visible."""

    def test_training_continues_while_the_process_writes(self, make_stopped, make_trainer, tmp_path):
        """Two batches after the save there is no file; once training ends, it holds the state of its moment."""
        seen = []

        def look():
            seen.append(
                (listing(tmp_path / "saved") if (tmp_path / "saved").exists() else [], saver.counts.saved)
            )
            os.kill(saver.writer_pid, signal.SIGCONT)

        saver, trainer = make_stopped(
            save_interval="3ba", calls={"ba5": look}, trainer={"max_duration": "8ba"}
        )
        trainer.fit()

        assert seen == [([], 0)]
        assert listing(tmp_path / "saved") == ["ep0-ba3.pt", "ep1-ba6.pt", "ep1-ba8.pt", "latest.symlink"]
        assert saver.counts.saved == 3
        at_once = CheckpointSaver(
            tmp_path / "at_once", save_interval="3ba", writing=CheckpointWriting(asynchronous=False)
        )
        make_trainer(callbacks=[At(ba99=None), at_once], max_duration="3ba").fit()
        later, reference = (read_checkpoint(tmp_path / name / "ep0-ba3.pt") for name in ("saved", "at_once"))
        # `assert_close` compares no texts.
        assert later["random"][0]["place"].pop("samplers") == reference["random"][0]["place"].pop("samplers")
        for part in ("model", "optimizers", "random"):
            torch.testing.assert_close(later[part], reference[part], rtol=0, atol=0)

    def test_a_save_during_another_is_skipped(self, make_held, tmp_path):
        """This needs when_busy="skip"; the checkpoint at the end of training is still saved."""

        def go_on():
            gate.set()

        saver, trainer, gate = make_held(
            when_busy="skip", calls={"ba7": go_on}, trainer={"max_duration": "8ba"}
        )

        trainer.fit()

        assert listing(tmp_path / "saved") == ["ep0-ba3.pt", "ep1-ba8.pt", "latest.symlink"]
        assert (saver.counts.saved, saver.counts.skipped) == (2, 1)

    def test_a_save_waits_for_the_one_before(self, make_held, tmp_path):
        """Both are written, each with the state of its batch."""

        def go_on():
            threading.Thread(target=lambda: (until(lambda: saver.counts.waited), gate.set())).start()

        saver, trainer, gate = make_held(calls={"ba5": go_on}, trainer={"max_duration": "6ba"})

        trainer.fit()

        assert (saver.counts.saved, saver.counts.waited) == (2, 1)
        found = [read_checkpoint(path)["timestamp"]["batch"] for path in (tmp_path / "saved").glob("*ba*.pt")]
        assert sorted(found) == [3, 6]

    def test_a_file_is_handed_on_when_it_is_complete(self, make_trainer, tmp_path):
        """A destination gets whole files, before the pointer to them, and one may still be linked by then."""

        class Links(LoggerDestination):
            def __init__(self):
                self.files = []

            def can_upload_files(self):
                return True

            def upload_file(self, state, remote_file_name, file_path, *, overwrite, link=False, crc32=None):
                is_pointer = file_path.suffix != ".pt"
                assert overwrite is is_pointer
                assert is_pointer or (link and crc32 == zlib.crc32(file_path.read_bytes()))
                self.files.append(file_path.read_text() if is_pointer else remote_file_name)

        links = Links()

        make_trainer(save_folder=tmp_path, save_interval="4ba", loggers=links).fit()

        names = [f"test/checkpoints/{name}.pt" for name in ("ep0-ba4", "ep1-ba8", "ep2-ba10")]
        assert links.files == [name for name in names for _ in ("file", "pointer")]


class TestTheProcessThatWrites:
    """It may die at any moment, and is replaced."""

    def test_killed_while_writing_a_checkpoint(self, make_stopped, tmp_path, caplog):
        """A thread writes it, and removes the leftovers of the process."""

        def kill():
            until(lambda: saver._writing._writer._sent_buffer and not saver._writing._writer._lock.locked())
            for name in ("ep0-ba3.pt", "latest.symlink"):
                (tmp_path / "saved" / f".{name}.{saver.writer_pid}-9.tmp").write_bytes(b"half")
            os.kill(saver.writer_pid, signal.SIGKILL)

        saver, trainer = make_stopped(calls={"ba4": kill}, trainer={"max_duration": "5ba"})

        trainer.fit()

        assert listing(tmp_path / "saved") == ["ep0-ba3.pt", "ep1-ba5.pt", "latest.symlink"]
        assert read_checkpoint(tmp_path / "saved" / "ep0-ba3.pt")["timestamp"]["batch"] == 3
        assert "ended with exit code -9; a thread writes the checkpoint again" in caplog.text

    def test_killed_between_two_saves(self, make_run, tmp_path):
        """The next save starts another."""
        pids = []

        def kill():
            until(lambda: saver.counts.saved or saver._writing.pending.future.done())
            pids.append(saver.writer_pid)
            os.kill(saver.writer_pid, signal.SIGKILL)

        def look():
            until(lambda: saver._writing.pending is None or saver._writing.pending.future.done())
            pids.append(saver.writer_pid)

        saver, trainer = make_run(At(ba4=kill, ba7=look), process_bytes=0, trainer={"max_duration": "8ba"})

        trainer.fit()

        assert listing(tmp_path / "saved") == ["ep0-ba3.pt", "ep1-ba6.pt", "ep1-ba8.pt", "latest.symlink"]
        assert pids[0] != pids[1]
        assert saver.counts.failed == 0

    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_without_threads_training_writes(self, make_run, tmp_path, monkeypatch, asynchronous):
        """There may be too little memory for its stack: no checkpoint is lost, and training goes on."""
        start = threading.Thread.start

        def refuse(thread):
            if thread.name.startswith("checkpoint"):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)
        saver, trainer = make_run(asynchronous=asynchronous)

        trainer.fit()

        assert saver.counts.saved == 4
        assert read_checkpoint(tmp_path / "saved" / "latest.symlink")["timestamp"]["batch"] == 10

    @pytest.mark.parametrize("lacks", ["interpreter", "memory files"])
    def test_where_there_can_be_none_a_thread_writes(self, make_run, tmp_path, monkeypatch, lacks):
        """A missing interpreter costs no checkpoint, nor does a system without memory files."""
        if lacks == "interpreter":
            monkeypatch.setattr("sys.executable", str(tmp_path / "gone"))
        else:
            monkeypatch.delattr("os.memfd_create")
        saver, trainer = make_run(process_bytes=0)

        trainer.fit()

        assert saver.counts.saved == 4
        assert read_checkpoint(tmp_path / "saved" / "latest.symlink")["timestamp"]["batch"] == 10

    def test_it_gives_way_to_training_and_ends_with_the_run(self, make_run):
        """It has a lower priority once it writes, and leaves neither process nor memory behind."""

        def look():
            until(lambda: saver.counts.saved or saver._writing.pending.future.done())
            group = Path(f"/proc/{saver.writer_pid}/autogroup")
            group_nice = int(group.read_text().split()[-1]) if group.exists() else 10
            found.append((saver.writer_pid, os.getpriority(os.PRIO_PROCESS, saver.writer_pid), group_nice))

        gc.collect()  # What earlier tests left.
        before, found = open_files(), []
        saver, trainer = make_run(At(ba4=look), process_bytes=0, trainer={"max_duration": "5ba"})

        trainer.fit()
        trainer.close()

        ((pid, *nice),) = found
        assert nice == [min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19), 10]
        assert not Path(f"/proc/{pid}").exists()
        # A thread of an earlier test may have a file open for a moment.
        until(lambda: open_files() <= before)

    def test_workers_of_dataloaders_do_not_disturb_it(self, make_run, tmp_path):
        """They live across saves, and hold neither its socket nor its memory."""
        loader = DataLoader(
            dataset(20), batch_size=4, num_workers=1, multiprocessing_context="fork", persistent_workers=True
        )
        saver, trainer = make_run(
            process_bytes=0, trainer={"train_dataloader": loader, "max_duration": "8ba"}
        )

        trainer.fit()
        trainer.close()

        assert saver.counts.saved == 3
        assert listing(tmp_path / "saved") == ["ep0-ba3.pt", "ep1-ba6.pt", "ep1-ba8.pt", "latest.symlink"]


def limit_the_first(saver, trainer):
    """Gives the first checkpoint little time, and those after it enough."""

    def without_limit(*_):
        if saver.counts.failed:
            saver._writing.seconds = WAIT_SECONDS

    saver._writing.seconds = 0.3
    trainer.state.model.register_state_dict_post_hook(without_limit)


class TestAWriterThatHangs:
    """The saver waits up to `close_seconds` for it, and loses its checkpoint."""

    def test_training_goes_on_without_it(self, make_stopped, tmp_path, caplog):
        """A process that is stopped is killed at the limit; the next checkpoint is written."""
        saver, trainer = make_stopped(trainer={"max_duration": "6ba"})
        limit_the_first(saver, trainer)

        trainer.fit()

        assert listing(tmp_path / "saved") == ["ep1-ba6.pt", "latest.symlink"]
        assert (saver.counts.saved, saver.counts.failed) == (1, 1)
        assert (
            "ep0-ba3.pt could not be saved (not written within 0.3 s (close_seconds) by process"
            in caplog.text
        )

    def test_the_last_checkpoint_is_tried_again(self, make_stopped, tmp_path):
        """A thread tries it, for which nothing has to start."""
        saver, trainer = make_stopped(trainer={"max_duration": "3ba"})
        limit_the_first(saver, trainer)

        trainer.fit()

        assert (saver.counts.saved, saver.counts.failed) == (1, 1)
        assert read_checkpoint(tmp_path / "saved" / "latest.symlink")["timestamp"]["batch"] == 3

    def test_one_that_cannot_be_written_in_the_end_is_an_error(self, make_run, tmp_path):
        """This holds for every reason, and a folder made for nothing is removed."""
        saver, trainer = make_run(
            At(ba2=lambda: setattr(saver._writing, "_stuck", concurrent.futures.Future())),
            trainer={"max_duration": "3ba"},
        )

        with pytest.raises(OSError, match="still being written, to a disk that does not respond"):
            trainer.fit()

        assert saver.counts.failed == 2
        assert not (tmp_path / "saved").exists()

    def test_close_ends_too(self, make_stopped):
        """An error in training comes while the writer has a checkpoint in its hands."""

        def fail():
            until(lambda: saver._writing._writer._sent_buffer)
            pids.append(saver.writer_pid)
            raise RuntimeError("mine")

        pids = []
        saver, trainer = make_stopped(close_seconds=0.3, calls={"ba4": fail})

        with pytest.raises(RuntimeError, match="mine"):
            trainer.fit()

        assert saver.counts.failed == 1
        assert not Path(f"/proc/{pids[0]}").exists()

    def test_one_in_a_thread_is_the_last_until_it_has_ended(self, make_run, tmp_path, caplog):
        """A thread can't be killed: its buffer, and so the next checkpoints, wait for it."""
        hangs = concurrent.futures.Future()
        saver, trainer = make_run(
            At(ba2=lambda: setattr(saver._writing, "_stuck", hangs), ba5=lambda: hangs.set_result(None))
        )

        trainer.fit()

        assert listing(tmp_path / "saved") == ["ep1-ba6.pt", "ep1-ba9.pt", "ep2-ba10.pt", "latest.symlink"]
        assert saver.counts.failed == 1
        assert "to a disk that does not respond); training continues" in caplog.text

    def test_an_abandoned_checkpoint_never_appears(self, tmp_path):
        """It doesn't appear even if its thread continues later."""
        buffer, writer = SnapshotBuffer(), BackgroundWriter(1 << 30)
        snapshot, _ = buffer.take({"weight": torch.ones(3)})
        goes_on, given_up = threading.Event(), threading.Event()

        future = writer.write(
            Request(tmp_path / "a.pt"), snapshot, buffer, goes_on.wait, lambda: not given_up.is_set()
        )
        given_up.set()
        goes_on.set()

        assert isinstance(future.exception(WAIT_SECONDS), AbandonedError)
        assert listing(tmp_path) == []


@pytest.fixture
def in_memory(tmp_path):
    """Puts the folder of the checkpoints where nothing waits for a disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # what it is for
        (tmp_path / "saved").symlink_to(folder)
        yield


class TestMemory:
    """It is bounded, and flat."""

    def test_where_there_is_none_training_waits_and_says_so_once(self, make_run, tmp_path, caplog):
        """Every checkpoint is still written."""
        saver, trainer = make_run()
        saver._writing._buffer = SnapshotBuffer(available=lambda: 0)

        trainer.fit()

        assert saver.counts.synchronous == saver.counts.saved == 4
        assert caplog.text.count("Training waits while checkpoints are written") == 1
        assert read_checkpoint(tmp_path / "saved" / "latest.symlink")["timestamp"]["batch"] == 10

    @pytest.mark.parametrize(
        "process_bytes", times([0], [0, 1 << 30]), ids=times(["process"], ["process", "thread"])
    )
    def test_it_is_the_same_after_many_saves(self, make_run, in_memory, process_bytes):
        """Descriptors, memory maps, threads and processes after half of the saves are those after the last.

        So is the memory of the process, but for what Python keeps. CHECKPOINT_SAVES=1000 makes it a thousand.
        """
        many = int(os.environ.get("CHECKPOINT_SAVES", "40"))
        seen, opened, resident = [], [], []

        def count():
            until(lambda: saver._writing.pending is None or saver._writing.pending.future.done())
            gc.collect()  # What earlier tests left.
            mapped = Path("/proc/self/maps").read_text().count("memfd:checkpoint")
            opened.append(len(list(Path("/proc/self/fd").iterdir())))
            seen.append(
                (
                    mapped,
                    saver._writing._buffer.identifier,
                    saver.writer_pid,
                    [one.name for one in threading.enumerate() if one.name.startswith("checkpoint")],
                    [
                        path.read_text()
                        for path in Path("/proc/self/task").glob("*/children")
                        if path.read_text().strip()
                    ],
                )
            )
            lines = Path("/proc/self/status").read_text().splitlines()
            resident.append(next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")))

        saver, trainer = make_run(
            At(**{f"ba{many // 2}": count, f"ba{many}": count}),
            save_interval="1ba",
            keep=1,
            process_bytes=process_bytes,
            trainer={"max_duration": f"{many + 1}ba"},
        )

        trainer.fit()

        assert seen[0] == seen[1]
        assert seen[0][0] == 1
        # One that stayed with each save would be twenty; a thread of an earlier test may have some for a moment.
        assert opened[1] - opened[0] < 10
        assert resident[1] - resident[0] < 32 << 10  # KiB
        assert saver.counts.saved == many + 1


class TestWhatCannotBeSaved:
    """It is dropped, and training continues."""

    def test_a_state_dict_that_raises_leaves_the_saver_as_it_was(self, make_run, tmp_path):
        """The error is the caller's; a later save is whole."""
        saver, trainer = make_run(save_interval="5ba")
        fails = [True]

        def hook(module, state, prefix, metadata):
            if fails and int(trainer.state.timestamp.batch) == 5:
                raise RuntimeError("not now")

        trainer.state.model.register_state_dict_post_hook(hook)
        trainer.engine.run_event("fit_start")
        for _ in range(5):
            trainer.state.timestamp = trainer.state.timestamp.to_next_batch(4, 0)
        with pytest.raises(RuntimeError, match="not now"):
            trainer.engine.run_event("batch_checkpoint")
        fails.clear()

        trainer.engine.run_event("fit_end")

        assert listing(tmp_path / "saved") == ["ep0-ba5.pt", "latest.symlink"]
        assert saver.counts.saved == 1

    def test_an_unsaveable_object_in_a_callbacks_state_is_named(self, make_run):
        """The error comes before an unreadable file is written."""

        class Keeps(Callback):
            def state_dict(self):
                return {"thing": object()}

        _, trainer = make_run(Keeps())

        with pytest.raises(CheckpointError, match="got a object at callbacks/Keeps/thing"):
            trainer.fit()

    @pytest.mark.parametrize("process_bytes", [0, 1 << 30], ids=["process", "thread"])
    def test_a_full_disk_costs_the_checkpoint(self, make_run, tmp_path, caplog, process_bytes):
        """RLIMIT_FSIZE is a disk that is full after so many bytes: no part of a file is left."""
        import resource

        before = resource.getrlimit(resource.RLIMIT_FSIZE)

        def limit():
            if process_bytes == 0:  # The process is started in the background.
                until(lambda: saver.writer_pid is not None)
            resource.prlimit(saver.writer_pid or os.getpid(), resource.RLIMIT_FSIZE, (1000, before[1]))

        def lift():
            until(lambda: saver.counts.failed or saver._writing.pending.future.done())
            resource.prlimit(saver.writer_pid or os.getpid(), resource.RLIMIT_FSIZE, before)

        saver, trainer = make_run(
            At(ba2=limit, ba4=lift), process_bytes=process_bytes, trainer={"max_duration": "6ba"}
        )
        try:
            trainer.fit()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

        assert listing(tmp_path / "saved") == ["ep1-ba6.pt", "latest.symlink"]
        assert "ep0-ba3.pt could not be saved (File too large); training continues" in caplog.text
        assert saver.counts.failed == 1


class TestHalfWritten:
    """A killed writer leaves these files."""

    def test_leftovers_are_swept_and_active_files_stay(self, tmp_path):
        """A lock tells the two apart, for a pointer the process; other files aren't touched."""
        from uploads.disk import try_lock

        ended = subprocess.Popen(["true"])
        ended.wait()
        for name in (
            ".ep1.pt.77-0.tmp",
            ".ep2.pt.78-1.tmp",
            f".latest.symlink.{os.getpid()}-2.tmp",
            f".latest.symlink.{ended.pid}-3.tmp",
            ".mine.tmp",
            "ep0.pt",
        ):
            (tmp_path / name).write_bytes(b"half")
        (tmp_path / ".dir.1-1.tmp").mkdir()
        with (tmp_path / ".ep2.pt.78-1.tmp").open() as file:
            try_lock(file.fileno())

            removed = sweep(tmp_path)

        assert removed == [tmp_path / ".ep1.pt.77-0.tmp", tmp_path / f".latest.symlink.{ended.pid}-3.tmp"]
        assert len(listing(tmp_path)) == 5


def test_the_checkpoint_is_the_staged_file(make_run, tmp_path, caplog):
    """If the store is away, the spool has a hard link to it: its bytes are on the disk once."""
    caplog.set_level(logging.CRITICAL)
    artifacts = Artifacts(
        "s3://bucket/x?endpoint_url=http://127.0.0.1:9&aws_access_key_id=a&aws_secret_access_key=b",
        spool=tmp_path / "spool",
        isolation="threads",
        close_seconds=0.0,
        free_bytes=0,
    )
    saver, trainer = make_run(trainer={"loggers": artifacts, "max_duration": "3ba"})

    trainer.fit()
    trainer.close()

    staged = {path.stat().st_ino for path in (tmp_path / "spool").rglob("data")}
    assert (tmp_path / "saved" / "ep0-ba3.pt").stat().st_ino in staged
    assert saver.counts.saved == 1
