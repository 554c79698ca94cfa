"""A run in a store: its content during training, at the end, and after another machine continued it."""

import itertools
import json
import logging
import os
import random
import shutil
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from destinations import RunDirectory
from destinations.history.snapshot import damage_of_rows, read_series
from destinations.run_directory import documents
from destinations.run_directory.claim import Claim
from destinations.run_directory.folder import RunExistsError, RunInUseError, RunPathError
from destinations.run_directory.layout import PARTS_OF_A_SESSION
from destinations.run_directory.mirror import Mirror
from destinations.run_directory.pieces import PieceError
from destinations.run_directory.place import local_folder
from destinations.run_directory.stored_run import StoredRun, session_text
from destinations.runs.content.sources import branches_of
from destinations.runs.index.bucket import BucketCopy
from events import Run
from tests.servers import s3_servers
from tests.test_destinations.run_directory.conftest import steps_left
from tests.test_destinations.runs.written import Written
from uploads import LocalStore, UploadQueue, open_store, put_new
from uploads.errors import InvalidSourceError, RejectedByStoreError

LIMIT_SECONDS = 60
OWN = {".mirror.json", ".pieces.json", "heartbeat"}


@pytest.fixture(autouse=True)
def _folders(tmp_path, monkeypatch):
    """Gives each test its own spool and local folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


class Patient(RunDirectory):
    """Waits for another machine's signs of life without letting time pass."""

    def _claim_of(self, uri, rank):
        return Claim(uri, rank, self._options.mirror_seconds, wait=self.wait)

    def wait(self, _seconds):
        pass


class Mirrored(Written):
    """A run in a local folder that uploads to a store at each flush."""

    kind = Patient

    def __init__(self, run_dir, store, **options):
        super().__init__(run_dir, mirror=str(store), mirror_seconds=10.0, **options)
        assert self.destination.run_dir is not None  # Decides between this run and one beside it.
        self.mirror = self.destination._writer._mirror
        self.queue = self.destination._run.files.store.queue

    def send(self):
        """Sends the changes as one piece, and waits for it to arrive."""
        self.flush()
        self.queue.drain(LIMIT_SECONDS)
        self.go_on()
        self.flush()
        self.queue.drain(LIMIT_SECONDS)

    def stop_sending(self):
        """Stops sending, as a dead machine would."""
        self.send()
        self.mirror._due_at = float("inf")

    def go_on(self):
        """Resumes sending."""
        self.mirror._due_at = 0.0


def files_of(folder):
    """Returns the contents of a run's files by path, leaving out the files about its location."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
        and path.name not in OWN
        and not path.relative_to(folder).as_posix().startswith("live/")
    }


def fetched(store, folder, stream="rank0"):
    """Returns the folder of a run as a reader copies it from the store."""
    run = StoredRun(open_store(str(store)), "", folder, stream)
    run.look()
    assert run.fetch() is not None
    return folder


def left_rows(store, folder, metric):
    """Returns the rows of each branch that a reader of the store finds."""
    copy = BucketCopy(open_store(str(store)), folder)
    copy.refresh()
    copy.bring(folder)
    return [
        [(row.step, row.metrics[metric]) for file in branch.files() for row in file.rows()]
        for branch in branches_of(folder)
    ]


def pieces_of(store):
    """Returns the names of the pieces in a store."""
    return sorted(path.relative_to(store).as_posix() for path in store.rglob("*.zip"))


def test_at_the_end_the_store_has_the_same_plain_files(tmp_path):
    """The store has every file, and a marker that says so."""
    with Mirrored(tmp_path / "run", tmp_path / "store") as run:
        run.logger.log_hyperparameters({"lr": 0.1})
        for step in range(20):
            run.log({"loss": 1 / (step + 1)}, step)
        run.logger.log_images(np.zeros((4, 4), np.uint8), "Inputs", step=3)
        run.logger.log_text("a word", "Words", step=4)
        run.flush()
        run.wait_for_environment()

    there, here = files_of(tmp_path / "store"), files_of(tmp_path / "run")
    assert sorted(there) == sorted(here)
    assert there == here
    assert len(pieces_of(tmp_path / "store")) == 1
    assert (
        files_of(fetched(tmp_path / "store", tmp_path / "copy")).items() <= files_of(tmp_path / "run").items()
    )
    assert read_series(tmp_path / "copy", "loss") == read_series(tmp_path / "run", "loss")


def test_the_configuration_of_a_session_is_sent_whatever_its_id(tmp_path, monkeypatch):
    """One id in about 300 has only digits, like the number of a rank."""
    digits = SimpleNamespace(hex="481205637754" * 3)
    monkeypatch.setattr(documents, "uuid", SimpleNamespace(uuid4=lambda: digits))
    with Mirrored(tmp_path / "run", tmp_path / "store") as run:
        run.logger.log_hyperparameters({"lr": 0.1})
        run.flush()
        run.wait_for_environment()

    sent = sorted(path.name for path in (tmp_path / "store" / "sessions").iterdir())
    assert sent == [f"0001-481205637754.{name}" for name in ("environment.json", "hparams.yaml")]


class Folder:
    """A run folder that a test changes, its mirror, and a clock that the test sets."""

    def __init__(self, tmp_path, wrapped=lambda store: store):
        self.path = tmp_path / "run"
        self.path.mkdir()
        self.store = tmp_path / "store"
        self.now = 0.0
        claim = Claim(str(self.store), 0, 10.0)
        claim.prepare(self.path, lambda: None)
        claim.take(self.path)
        self.queue = UploadQueue(wrapped(LocalStore(self.store)), isolation="threads")
        self.mirror = Mirror(claim, self.path, 0, 10.0, self.queue, clock=lambda: self.now)

    def append(self, name, text):
        with (self.path / name).open("a") as file:
            file.write(text)

    def send(self):
        self.now += 20.0
        self.mirror.tick()
        self.queue.drain(LIMIT_SECONDS)


def test_pieces_are_merged(tmp_path):
    """After 160 intervals there are at most 36, from which a reader restores the exact folder."""
    draw = random.Random(1)
    folder = Folder(tmp_path)
    most = 0
    for number in range(160):
        folder.append("metrics.csv", f"{number},0,1.5\n")
        if draw.random() < 0.3:
            folder.append("media.jsonl", '{"step": 1}\n' * draw.randint(1, 5))
        if draw.random() < 0.1:
            (folder.path / "summary.json.new").write_text(f'{{"number": {number}}}')
            (folder.path / "summary.json.new").replace(folder.path / "summary.json")
        if draw.random() < 0.02:
            (folder.path / "new.csv").write_text("step,epoch,time,more\n")
            (folder.path / "new.csv").replace(folder.path / "metrics.csv")
        if draw.random() < 0.05:
            (folder.path / "notes.txt").write_text(str(number))
        elif draw.random() < 0.05:
            (folder.path / "notes.txt").unlink(missing_ok=True)
        folder.send()
        most = max(most, len(pieces_of(folder.store)))
        if number % 37 == 0 or number == 159:
            shutil.rmtree(tmp_path / "copy", ignore_errors=True)
            assert files_of(fetched(folder.store, tmp_path / "copy")) == files_of(folder.path)
    folder.queue.close(LIMIT_SECONDS)

    # A piece is only deleted when the next ones are merged, because a reader may be using it.
    assert most <= 36


def test_a_polling_reader_has_the_folder_after_each_interval(tmp_path):
    """The reader requests the next piece by name, and lists nothing."""
    folder = Folder(tmp_path)
    store = CountingStore(open_store(str(folder.store)))
    folder.append("metrics.csv", "step,epoch,time,loss\n")
    folder.send()
    run = StoredRun(store, "", tmp_path / "copy")
    run.look()
    run.fetch()
    store.calls.clear()
    for number in range(30):
        folder.append("metrics.csv", f"{number},0,1.5,0.5\n")
        folder.send()

        assert run.poll() is not None
        assert files_of(tmp_path / "copy") == files_of(folder.path)
    assert run.poll() is None
    assert store.calls == ["get"] * 31
    folder.queue.close(LIMIT_SECONDS)


class CountingStore:
    """Notes which methods of a store are called."""

    def __init__(self, store):
        self.store = store
        self.calls = []

    def __getattr__(self, name):
        if name in {"get", "list", "head", "put", "delete"}:
            self.calls.append(name)
        return getattr(self.store, name)


def test_a_late_reader_finds_its_piece_merged(tmp_path):
    """The requested piece is gone; a listing finds the larger one."""
    folder = Folder(tmp_path)
    folder.append("metrics.csv", "step\n")
    folder.send()
    run = StoredRun(open_store(str(folder.store)), "", tmp_path / "copy")
    run.look()
    run.fetch()
    for number in range(40):
        folder.append("metrics.csv", f"{number}\n")
        folder.send()

    assert run.poll() is None
    run.fetch()
    assert files_of(tmp_path / "copy") == files_of(folder.path)
    folder.queue.close(LIMIT_SECONDS)


def test_a_half_written_line_is_not_sent(tmp_path):
    """A reader gets whole lines."""
    folder = Folder(tmp_path)
    folder.append("metrics.csv", "step\n1\n2")
    folder.send()

    assert (fetched(folder.store, tmp_path / "copy") / "metrics.csv").read_text() == "step\n1\n"
    folder.queue.close(LIMIT_SECONDS)


def test_a_file_that_was_cut_and_grew_again_is_sent_as_a_whole(tmp_path):
    """After a failing disk, a file may have the same inode, a greater length and other lines."""
    folder = Folder(tmp_path)
    folder.append("metrics.csv", "step\n" + "1\n" * 500)
    folder.send()
    os.truncate(folder.path / "metrics.csv", 5)
    folder.append("metrics.csv", "2\n" * 600)
    folder.send()

    assert files_of(fetched(folder.store, tmp_path / "copy")) == files_of(folder.path)
    folder.queue.close(LIMIT_SECONDS)


def test_the_store_keeps_a_run_whose_folder_was_deleted(tmp_path):
    """Its files aren't gone from the run, and the run isn't marked as ended."""
    with Mirrored(tmp_path / "run", tmp_path / "store") as run:
        for step in range(10):
            run.log({"loss": float(step)}, step)
        run.send()
        # Another thread may be writing a file there.
        while (tmp_path / "run").exists():
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
        run.go_on()
        run.mirror.tick()

    assert read_series(fetched(tmp_path / "store", tmp_path / "copy"), "loss") == [
        (step, float(step)) for step in range(10)
    ]
    assert not (tmp_path / "store" / "metrics.csv").exists()


def test_large_documents_are_not_sent_at_each_interval(tmp_path):
    """A summary of ten thousand metrics takes megabytes; the last version still arrives."""
    folder = Folder(tmp_path)
    sizes = []
    for number in range(12):
        (folder.path / "new").write_text(json.dumps({"number": number, "filling": os.urandom(200_000).hex()}))
        (folder.path / "new").replace(folder.path / "summary.json")
        folder.send()
        sizes.append(
            max(path.stat().st_size for path in folder.store.rglob(f"{number + 1:08}-{number + 1:08}.zip"))
        )

    assert sum(size > 100_000 for size in sizes) == 3
    assert files_of(fetched(folder.store, tmp_path / "copy")) == files_of(folder.path)
    folder.queue.close(LIMIT_SECONDS)


def test_a_missing_part_of_a_session_is_reported(tmp_path):
    """A gap between the numbers of two sessions is normal; within a session or at its end, it isn't."""
    for machine in range(3):
        with Mirrored(tmp_path / str(machine) / "run", tmp_path / "store", batch=100 * machine) as run:
            run.destination._writer._drain.file.part_bytes = 1000
            for step in range(100 * machine, 100 * machine + 100):
                run.log({"loss": float(step)}, step)
                if step % 25 == 20:
                    run.send()
            if machine < 2:
                run.stop_sending()
    copy = fetched(tmp_path / "store", tmp_path / "copy")
    parts = sorted((copy / "parts" / "metrics").glob("*.parquet"))
    numbers = [int(path.stem) for path in parts]

    assert {number // PARTS_OF_A_SESSION for number in numbers} == {1, 2, 3}
    assert damage_of_rows(copy, numbers[-1]) == []
    assert read_series(copy, "loss") == [(step, float(step)) for step in range(300)]
    for path in (parts[0], parts[-1]):
        path.unlink()
    first, last = damage_of_rows(copy, numbers[-1])
    assert f"{parts[0].name} is missing" in first
    assert parts[-1].name in last


def test_another_machine_continues_the_run(tmp_path):
    """It fetches the rows and documents; steps that are trained again become a branch."""
    lost = Mirrored(tmp_path / "one" / "run", tmp_path / "store")
    lost.logger.log_hyperparameters({"lr": 0.1})
    for step in range(10):
        lost.log({"loss": float(step)}, step)
        lost.logger.log_images(np.full((2, 2), step, np.uint8), "Inputs", step=step)
    lost.stop_sending()

    with Mirrored(tmp_path / "two" / "run", tmp_path / "store", batch=6) as successor:
        for step in range(6, 12):
            successor.log({"loss": step + 0.5}, step)
            successor.logger.log_images(np.full((2, 2), 100 + step, np.uint8), "Inputs", step=step)
    copy = fetched(tmp_path / "store", tmp_path / "copy")

    assert read_series(copy, "loss") == [(step, step + (0.5 if step > 5 else 0.0)) for step in range(12)]
    assert steps_left(copy) == [[6, 7, 8, 9]]
    assert json.loads((copy / "sidecar.json").read_text())["hparams"] == {"lr": 0.1}
    sessions = [json.loads(line) for line in (copy / "sessions.jsonl").read_text().splitlines()]
    assert [one["status"] for one in sessions] == ["killed", "completed"]
    # No picture took another one's name.
    assert len(list((tmp_path / "store" / "media" / "Inputs").iterdir())) == 16
    lost.close()


def test_a_branch_of_several_parts_is_whole(tmp_path):
    """The superseded machine closed parts before and after the takeover."""
    zombie = Mirrored(tmp_path / "one" / "run", tmp_path / "store")
    zombie.destination._writer._drain.file.part_bytes = 500
    for step in range(30):
        zombie.log({"loss": float(step)}, step)
    zombie.stop_sending()
    with Mirrored(tmp_path / "two" / "run", tmp_path / "store", batch=20) as successor:
        successor.log({"loss": 20.5}, 20)
    for step in range(30, 60):
        zombie.log({"loss": float(step)}, step)
        if step % 8 == 0:
            zombie.flush()
    zombie.close()

    branches = left_rows(tmp_path / "store", tmp_path / "cache", "loss")
    assert branches == [[(step, float(step)) for step in steps] for steps in (range(20, 30), range(30, 60))]
    expected = [*((step, float(step)) for step in range(20)), (20, 20.5)]
    assert read_series(tmp_path / "cache", "loss") == expected


def test_a_killed_session_is_not_a_branch_after_its_own_machine_continued(tmp_path):
    """Its pieces remain if the next session was killed before deleting them."""
    for step in range(2):
        killed = Mirrored(tmp_path / "one" / "run", tmp_path / "store", if_exists="resume")
        killed.queue.delete = lambda *_, **__: None
        killed.log({"loss": float(step)}, step)
        killed.send()
        killed.mirror.finish = lambda *_, queue=killed.queue: queue.close(0.0)
        killed.close()
    with Mirrored(tmp_path / "two" / "run", tmp_path / "store", if_exists="resume") as last:
        last.log({"loss": 2.0}, 2)
    run = StoredRun(open_store(str(tmp_path / "store")), "", tmp_path / "copy")
    run.look()
    run.fetch()

    assert sorted(number for number, one in run.sessions.items() if one.pieces) == [1, 2, 3]
    assert run.branches() == []
    assert read_series(tmp_path / "copy", "loss") == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_a_session_read_damaged_is_read_again(tmp_path, monkeypatch):
    """After one bad response, this process still knows its session, and later continues its folder."""
    original, count = StoredRun.about_session, itertools.count()
    monkeypatch.setattr("destinations.run_directory.claim._FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(
        StoredRun,
        "about_session",
        lambda run, number, name: original(run, number, name) if next(count) % 2 else {},
    )
    for step in range(2):
        run = Mirrored(tmp_path / "machine" / "run", tmp_path / "store", batch=step)
        run.log({"loss": float(step)}, step)
        run.close()

    assert next(count) >= 6
    assert [path.name for path in (tmp_path / "machine").iterdir()] == ["run"]
    assert read_series(tmp_path / "machine" / "run", "loss") == [(0, 0.0), (1, 1.0)]


def test_a_damaged_newest_piece_is_ignored(tmp_path, caplog):
    """Its machine died before a second upload, so another one continues with the earlier content."""
    lost = Mirrored(tmp_path / "one" / "run", tmp_path / "store")
    for step in range(4):
        lost.log({"loss": float(step)}, step)
        lost.send()
    lost.stop_sending()
    newest = tmp_path / "store" / pieces_of(tmp_path / "store")[-1]
    newest.write_bytes(newest.read_bytes()[:-30])

    copy = fetched(tmp_path / "store", tmp_path / "copy")
    rows = read_series(copy, "loss")
    with Mirrored(tmp_path / "two" / "run", tmp_path / "store", batch=len(rows)) as successor:
        successor.log({"loss": 9.0}, len(rows))

    assert rows == [(step, float(step)) for step in range(len(rows))]
    assert len(rows) >= 3
    assert "the newest piece is left out" in caplog.text
    assert read_series(tmp_path / "store", "loss") == [*rows, (len(rows), 9.0)]
    lost.close()


def test_a_damaged_earlier_piece_is_an_error(tmp_path):
    """It was whole once and covers a finished interval, so its rows aren't dropped silently."""
    run = Mirrored(tmp_path / "run", tmp_path / "store")
    for step in range(4):
        run.log({"loss": float(step)}, step)
        run.send()
    damaged = tmp_path / "store" / pieces_of(tmp_path / "store")[0]
    damaged.write_bytes(b"PK damaged")

    with pytest.raises(PieceError, match="damaged"):
        fetched(tmp_path / "store", tmp_path / "copy")
    run.close()


def test_a_damaged_session_number_belongs_to_nobody(tmp_path, monkeypatch):
    """The upload damaged its object, which keeps its number; the next number is free."""
    monkeypatch.setattr("destinations.run_directory.claim._FIRST_PAUSE_SECONDS", 0.0)
    original = put_new

    def damage_first(store, name, data, **options):
        return original(store, name, b"{damaged" if "/0001/" in name else data, **options)

    monkeypatch.setattr("destinations.run_directory.claim.put_new", damage_first)
    with Mirrored(tmp_path / "run", tmp_path / "store") as run:
        run.log({"loss": 1.0}, 0)

    assert read_series(tmp_path / "store", "loss") == [(0, 1.0)]
    assert json.loads((tmp_path / "run" / ".mirror.json").read_text())["session"] == 2


def test_a_late_claim_of_an_ended_process_belongs_to_nobody(tmp_path, monkeypatch):
    """It was still uploading when its process was killed, so the next process didn't find it in the list.

    The killed process had noted it in the folder before.
    """
    original = put_new

    def find_taken(store, name, data, **options):
        if "/0001/" in name:
            original(store, name, session_text({"nonce": "noted"}))
        return original(store, name, data, **options)

    monkeypatch.setattr("destinations.run_directory.claim.put_new", find_taken)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".mirror.json").write_text('{"next": "noted"}')
    with Mirrored(tmp_path / "run", tmp_path / "store") as run:
        run.log({"loss": 1.0}, 0)

    assert read_series(tmp_path / "store", "loss") == [(0, 1.0)]
    assert json.loads((tmp_path / "run" / ".mirror.json").read_text())["session"] == 2


@pytest.mark.parametrize("is_at_the_end", [False, True])
def test_a_claim_of_nobody_stops_no_session(tmp_path, caplog, is_at_the_end):
    """It was damaged on upload, or its process ended at once: uploads that it blocked are sent again."""
    run = Mirrored(tmp_path / "run", tmp_path / "store")
    run.log({"loss": 0.0}, 0)
    run.send()
    claim = tmp_path / "store" / "live" / "rank0" / "0002" / "session.json"
    claim.parent.mkdir()
    claim.write_bytes(b"{damaged")
    run.log({"loss": 1.0}, 1)
    if not is_at_the_end:
        run.send()
        run.send()
        assert read_series(fetched(tmp_path / "store", tmp_path / "copy"), "loss") == [(0, 0.0), (1, 1.0)]
    run.close()

    assert read_series(tmp_path / "store", "loss") == [(0, 0.0), (1, 1.0)]
    assert "was continued" not in caplog.text
    assert not (tmp_path / "store" / "abandoned").exists()


def test_a_process_killed_right_after_its_claim_keeps_the_folder(tmp_path, monkeypatch):
    """It noted the session before claiming it, so unsent rows stay in place."""
    first = Mirrored(tmp_path / "machine" / "run", tmp_path / "store")
    first.log({"loss": 0.0}, 0)
    first.send()
    first.stop_sending()
    first.log({"loss": 1.0}, 1)
    first.flush()
    first.destination._writer._lock.release()

    class KilledError(Exception):
        pass

    def killed(*_):
        raise KilledError

    claim = Claim(str(tmp_path / "store"), 0, 10.0)
    claim.prepare(tmp_path / "machine" / "run", lambda: pytest.fail("it was set aside"))
    claim._about = killed
    with pytest.raises(KilledError):
        claim.take(tmp_path / "machine" / "run")

    again = Claim(str(tmp_path / "store"), 0, 10.0)
    again.prepare(tmp_path / "machine" / "run", lambda: pytest.fail("it was set aside"))
    again.take(tmp_path / "machine" / "run")

    assert again.session == 3
    assert read_series(tmp_path / "machine" / "run", "loss") == [(0, 0.0), (1, 1.0)]
    first.close()


def test_one_of_two_machines_that_begin_at_once_writes(tmp_path):
    """A session number is taken by a conditional put, which only one machine can win."""
    claims = [Claim(str(tmp_path / "store"), 0, 10.0, wait=lambda _: None) for _ in range(8)]
    folders = [tmp_path / str(number) for number in range(8)]
    for claim, folder in zip(claims, folders, strict=True):
        folder.mkdir()
        claim.prepare(folder, lambda: None)
    outcomes = []
    start = threading.Barrier(8)

    def take(claim, folder):
        start.wait(LIMIT_SECONDS)
        try:
            claim.take(folder)
            outcomes.append(claim.session)
        except RunInUseError:
            outcomes.append(0)

    threads = [threading.Thread(target=take, args=pair) for pair in zip(claims, folders, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)

    assert sorted(outcomes) == [0] * 7 + [1]


def test_the_last_machine_of_a_run_continues_without_waiting(tmp_path):
    """Its folder is ahead of the store: nothing is fetched, and unsent data is sent."""
    first = Mirrored(tmp_path / "run", tmp_path / "store")
    first.log({"loss": 0.0}, 0)
    first.stop_sending()
    first.log({"loss": 1.0}, 1)
    first.logger.log_images(np.zeros((2, 2), np.uint8), "Inputs", step=1)
    first.flush()
    first.mirror.finish = lambda *_: first.queue.close(0.0)
    first.close()

    class Hasty(Patient):
        def wait(self, _seconds):
            raise AssertionError("it need not wait for anybody")

    with Mirrored(tmp_path / "run", tmp_path / "store", batch=2) as second:
        second.log({"loss": 2.0}, 2)

    assert read_series(tmp_path / "store", "loss") == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert len(list((tmp_path / "store" / "media" / "Inputs").iterdir())) == 1
    assert len(pieces_of(tmp_path / "store")) == 1


def test_a_machine_with_an_older_copy_sets_it_aside(tmp_path, caplog):
    """It had the run before another machine did; neither one's rows are lost."""
    first = Mirrored(tmp_path / "one" / "run", tmp_path / "store")
    first.log({"loss": 0.0}, 0)
    first.stop_sending()
    first.log({"loss": 0.5}, 1)
    first.mirror.finish = lambda *_: first.queue.close(0.0)
    first.close()
    with Mirrored(tmp_path / "two" / "run", tmp_path / "store", batch=1) as second:
        second.log({"loss": 1.0}, 1)

    with (
        caplog.at_level(logging.WARNING, "destinations"),
        Mirrored(tmp_path / "one" / "run", tmp_path / "store", batch=2) as third,
    ):
        third.log({"loss": 2.0}, 2)

    assert "is kept as" in caplog.text
    assert read_series(tmp_path / "one" / "run.aside-1", "loss") == [(0, 0.0), (1, 0.5)]
    assert read_series(tmp_path / "one" / "run", "loss") == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert read_series(tmp_path / "store", "loss") == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_a_completed_run_stays_as_it_is(tmp_path):
    """A script that runs again, here or elsewhere, takes a free name in both places."""
    for machine in ("one", "one", "two"):
        with Mirrored(tmp_path / machine / "run", tmp_path / "store" / "run") as run:
            run.log({"machine": 1.0}, 0)

    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["run", "run-2", "run-3"]
    with pytest.raises(RunExistsError):
        Mirrored(tmp_path / "three" / "run", tmp_path / "store" / "run", if_exists="error")


class Gated:
    """A store that accepts nothing before its gate opens, and refuses some names for good."""

    def __init__(self, store, gate, refused=()):
        self.store = store
        self.gate = gate
        self.refused = set(refused)

    def put(self, name, body, **options):
        self.gate.wait(LIMIT_SECONDS)
        if name.rpartition("/")[2] in self.refused:
            raise RejectedByStoreError("no")
        return self.store.put(name, body, **options)

    def __getattr__(self, name):
        return getattr(self.store, name)


def test_while_the_store_is_away_one_piece_waits_and_nothing_is_lost(tmp_path):
    """After an outage, one piece has everything since. Only one sign of life waits beside it."""
    gate = threading.Event()
    folder = Folder(tmp_path, lambda store: Gated(store, gate))
    folder.append("metrics.csv", "step\n")
    for number in range(50):
        folder.append("metrics.csv", f"{number}\n")
        folder.now += 20.0
        folder.mirror.tick()
    waiting = folder.queue.unsettled()
    gate.set()
    folder.queue.drain(LIMIT_SECONDS)
    folder.send()

    assert waiting == 2
    assert len(pieces_of(folder.store)) == 2
    assert files_of(fetched(folder.store, tmp_path / "copy")) == files_of(folder.path)
    folder.queue.close(LIMIT_SECONDS)


class OnAnotherDisk:
    """A queue whose spool is on another disk, so it can't link files of the run."""

    def __init__(self, queue):
        self.queue = queue

    def submit(self, *arguments, link=False, **options):
        if link:
            raise InvalidSourceError("a source to link must be on the spool's file system")
        return self.queue.submit(*arguments, **options)

    def __getattr__(self, name):
        return getattr(self.queue, name)


def test_a_folder_on_another_disk_than_the_spool_is_sent(tmp_path):
    """Its media are copied into the spool, and pieces arrive as usual."""
    folder = Folder(tmp_path)
    folder.mirror._queue = OnAnotherDisk(folder.queue)
    (folder.path / "media").mkdir()
    folder.append("media/one.png", "pixels")
    folder.append("metrics.csv", "step\n")
    folder.mirror.add("media/one.png")
    folder.send()

    assert (folder.store / "media" / "one.png").read_text() == "pixels"
    assert len(pieces_of(folder.store)) == 1
    folder.queue.close(LIMIT_SECONDS)


def test_the_next_piece_has_the_content_of_a_lost_one(tmp_path):
    """Later pieces would depend on it, so the next one contains everything."""
    gate = threading.Event()
    gate.set()
    folder = Folder(tmp_path, lambda store: Gated(store, gate, ["00000003-00000003.zip"]))
    for number in range(3):
        folder.append("metrics.csv", f"{number}\n")
        folder.send()
    folder.send()
    there = len(pieces_of(folder.store))
    for number in range(30):
        folder.append("metrics.csv", f"{number}\n")
        folder.now += 60.0
        folder.send()

        if number > 0:
            shutil.rmtree(tmp_path / "copy", ignore_errors=True)
            assert files_of(fetched(folder.store, tmp_path / "copy")) == files_of(folder.path)
    assert there == 3
    folder.queue.close(LIMIT_SECONDS)


def test_a_run_may_live_only_in_a_store(tmp_path):
    """Its local folder is below the user's state folder, and is named after the run."""
    uri = (tmp_path / "store").as_uri() + "/runs/{run_name}"
    with Run(loggers=[RunDirectory(uri, mirror_seconds=0.01)], run_name="digits") as run:
        run.log_metrics({"loss": 1.0}, step=3)
    place = local_folder((tmp_path / "store").as_uri() + "/runs/digits")

    assert place.is_relative_to(tmp_path / "state" / "destinations" / "runs")
    assert (
        read_series(tmp_path / "store" / "runs" / "digits", "loss")
        == [(3, 1.0)]
        == read_series(place, "loss")
    )


def test_files_go_to_the_store_and_come_back(tmp_path):
    """They are below `artifacts/`, as in a folder, and take no local disk space."""
    (tmp_path / "weights.pt").write_bytes(b"weights")
    with Mirrored(tmp_path / "one" / "run", tmp_path / "store") as run:
        run.logger.upload_file("test/checkpoints/ep1.pt", tmp_path / "weights.pt")
        run.queue.drain(LIMIT_SECONDS)
        uploaded = run.logger.has_uploaded("test/checkpoints/ep1.pt")
        names = run.logger.list_files("test/")
        run.logger.download_file("test/checkpoints/ep1.pt", tmp_path / "back.pt")
        (uri,) = run.logger.file_uris("test/checkpoints/ep1.pt")
        run.logger.upload_file("other.txt", tmp_path / "weights.pt")
        run.queue.drain(LIMIT_SECONDS)
        run.logger.delete_file("other.txt")

    assert (uploaded, names) == (True, ["test/checkpoints/ep1.pt"])
    assert (tmp_path / "back.pt").read_bytes() == b"weights"
    assert uri.endswith("/store/artifacts/test/checkpoints/ep1.pt")
    assert [path.name for path in (tmp_path / "store" / "artifacts").rglob("*.*")] == ["ep1.pt"]
    assert not (tmp_path / "one" / "run" / "artifacts").exists()


def test_each_rank_has_its_own_pieces(tmp_path):
    """Ranks run on several machines; a reader gets the files of all."""
    for rank in (0, 1):
        with Mirrored(tmp_path / str(rank) / "run", tmp_path / "store", rank=rank, all_ranks=True) as run:
            run.log({"loss": float(rank)}, 0)

    for stream in ("rank0", "rank1"):
        fetched(tmp_path / "store", tmp_path / "copy", stream)
    assert [read_series(tmp_path / "copy", "loss", rank) for rank in (0, 1)] == [[(0, 0.0)], [(0, 1.0)]]


@pytest.mark.parametrize(
    ("run_dir", "mirror", "error", "words"),
    [
        (
            "s3://bucket/runs/{run_name}",
            "gs://bucket/x",
            RunPathError,
            "run_dir must be a folder where mirror is given",
        ),
        ("runs/{run_name}", "s4://bucket/x", ValueError, "no store for 's4://bucket/x'; did you mean 's3'"),
        ("s3:/bucket/x", None, RunPathError, "'://' is missing in 's3:/bucket/x'"),
        ("runs", 3, TypeError, "mirror must be a path, got 3"),
    ],
)
def test_an_invalid_location_raises_at_once(tmp_path, monkeypatch, run_dir, mirror, error, words):
    """The constructor raises, before training."""
    monkeypatch.chdir(tmp_path)

    with pytest.raises(error, match=words):
        RunDirectory(run_dir, mirror=mirror)


def test_an_unreadable_store_raises_before_training(tmp_path, monkeypatch):
    """The store may already have a run that this one would hide."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with s3_servers.refusing_port() as port, pytest.raises(RunPathError, match="cannot be opened"):
        Mirrored(tmp_path / "run", f"s3://bucket/run?endpoint_url=http://127.0.0.1:{port}")
