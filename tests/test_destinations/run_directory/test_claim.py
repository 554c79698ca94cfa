"""Claims a run in a store: signs of life, takeovers, and superseded sessions."""

import json
import logging
import shutil

import pytest

from destinations.history.snapshot import read_series
from destinations.run_directory import mirror as mirror_module
from destinations.run_directory.claim import Claim
from destinations.run_directory.folder import RunInUseError
from destinations.run_directory.stored_run import session_text
from events import Run
from tests.test_destinations.run_directory.test_mirror import (
    LIMIT_SECONDS,
    Folder,
    Mirrored,
    Patient,
    fetched,
    files_of,
    pieces_of,
)
from uploads import LocalStore, UploadQueue

HOURS = 3600.0


@pytest.fixture(autouse=True)
def _folders(tmp_path, monkeypatch):
    """Gives each test its own spool and local folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


class Watched:
    """A claim that counts its pauses, and lets a test act at a given moment."""

    def __init__(self, tmp_path, name="two", seconds=10.0, rank=0):
        self.folder = tmp_path / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.waited = 0.0
        self.events = []
        self.claim = Claim(str(tmp_path / "store"), rank, seconds, wait=self._wait)

    def at(self, seconds, act):
        """Acts once this much time was waited."""
        self.events.append((seconds, act))

    def _wait(self, seconds):
        self.waited += seconds
        due = [one for one in self.events if one[0] <= self.waited]
        self.events = [one for one in self.events if one not in due]
        for _, act in due:
            act()

    def begin(self):
        """Claims the run."""
        self.claim.prepare(self.folder, lambda: pytest.fail("it was set aside"))
        self.claim.take(self.folder)
        return self.claim.session


def put_session(store, number=1, **fields):
    """Uploads the object with which a session begins."""
    about = {"session": number, "nonce": f"nonce{number}", "host": "other", "pid": 1, **fields}
    path = store / "live" / "rank0" / f"{number:04}" / "session.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(session_text(about))
    return path.parent


def test_a_session_without_uploads_is_watched(tmp_path):
    """It may have started just now, after a closed session: signs of it refuse the next claim."""
    with Mirrored(tmp_path / "one" / "run", tmp_path / "store") as first:
        first.log({"loss": 1.0}, 0)
    session = put_session(tmp_path / "store", 2, seconds=10.0, sign_seconds=10.0)
    second = Watched(tmp_path)
    second.at(9.0, lambda: (session / "sign.json").write_text("1"))
    second.at(19.0, lambda: (session / "sign.json").write_text("22"))

    with pytest.raises(RunInUseError, match="process 1 on other writes to it"):
        second.begin()
    assert not (tmp_path / "store" / "live" / "rank0" / "0003").exists()


def test_a_late_request_of_a_dead_session_refuses_nobody(tmp_path):
    """It was on its way when the process died; the wait begins again, once."""
    session = put_session(tmp_path / "store", seconds=10.0, sign_seconds=10.0)
    second = Watched(tmp_path)
    second.at(2.0, lambda: (session / "sign.json").write_text("1"))

    assert second.begin() == 2
    assert 27.0 <= second.waited < 29.0


@pytest.mark.parametrize("shift", [-10 * HOURS, 0.0, 10 * HOURS])
@pytest.mark.parametrize("is_alive", [False, True])
def test_the_clocks_of_machines_are_not_compared(tmp_path, shift, is_alive, monkeypatch):
    """A session is alive while its objects change, whatever its timestamps say."""
    original = mirror_module.time.time
    with monkeypatch.context() as patch:
        patch.setattr(mirror_module.time, "time", lambda: original() + shift)
        first = Mirrored(tmp_path / "one" / "run", tmp_path / "store")
        first.log({"loss": 1.0}, 0)
        first.stop_sending()
    second = Watched(tmp_path)
    if is_alive:
        second.at(20.0, lambda: (first.go_on(), first.send()))
        second.at(30.0, lambda: (first.log({"loss": 2.0}, 1), first.send()))

    if is_alive:
        with pytest.raises(RunInUseError):
            second.begin()
    else:
        assert second.begin() == 2
        assert 25.0 <= second.waited < 27.0
    first.close()


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"seconds": 0.5, "sign_seconds": 0.5}, 10.0),
        ({"seconds": 3600.0, "sign_seconds": 20.0}, 50.0),
        # Earlier releases upload pieces only.
        ({"seconds": 60.0}, 150.0),
        ({}, 50.0),
    ],
)
@pytest.mark.parametrize("own_seconds", [0.1, 1000.0])
def test_a_session_is_watched_for_its_own_interval(tmp_path, fields, seconds, own_seconds):
    """A challenger with shorter intervals waits as long, and one with longer intervals waits no longer."""
    put_session(tmp_path / "store", **fields)
    second = Watched(tmp_path, seconds=own_seconds)

    assert second.begin() == 2
    assert seconds <= second.waited < seconds + 1.0


def test_a_session_that_wakes_while_its_rows_are_fetched_keeps_the_run(tmp_path):
    """Minutes may pass between the watch and the claim."""
    session = put_session(tmp_path / "store", seconds=1.0, sign_seconds=1.0)
    second = Watched(tmp_path)
    second.claim.prepare(second.folder, lambda: None)
    (session / "sign.json").write_text("1")

    with pytest.raises(RunInUseError):
        second.claim.take(second.folder)


def test_one_of_two_simultaneous_claims_is_refused(tmp_path):
    """A run that waits for a proof claims its store late, and then reports that another process has it."""
    with Mirrored(tmp_path / "one" / "run", tmp_path / "store") as first:
        first.log({"loss": 1.0}, 0)
    runs = [
        Run(loggers=[Patient(tmp_path / name / "run", mirror=tmp_path / "store")], run_name="test")
        for name in ("two", "three")
    ]
    for run in runs:
        run.__enter__()

    runs[0].fit_start(batch=1)
    with pytest.raises(RunInUseError, match="is in use"):
        runs[1].fit_start(batch=1)

    for run in runs:
        run.log_metrics({"loss": 2.0}, step=1)
        run.close()
    assert read_series(fetched(tmp_path / "store", tmp_path / "copy"), "loss") == [(0, 1.0), (1, 2.0)]
    assert len(list((tmp_path / "store" / "live" / "rank0").iterdir())) == 2


def test_a_copy_of_a_folder_takes_over_like_any_other_machine(tmp_path):
    """The original may still be in use elsewhere, so it is watched and fenced."""
    Watched(tmp_path, "one").begin()
    shutil.copytree(tmp_path / "one", tmp_path / "copy")

    copy = Watched(tmp_path, "copy")

    assert copy.begin() == 2
    assert copy.waited >= 25.0
    assert (tmp_path / "store" / "live" / "rank0" / "0001" / "successor.json").exists()


def test_an_object_that_arrives_during_a_takeover_keeps_its_name(tmp_path):
    """It arrived after the first look, before the fence was up."""
    put_session(tmp_path / "store", sign_seconds=1.0)
    second = Watched(tmp_path)
    second.claim.prepare(second.folder, lambda: None)
    (tmp_path / "store" / "media").mkdir()
    (tmp_path / "store" / "media" / "late.png").write_bytes(b"late")

    second.claim.take(second.folder)

    assert second.claim.there == {"media/late.png": 4}


def test_each_superseded_session_has_its_fence(tmp_path):
    """Even if its own successor died before raising one; sessions of the same folder need none."""
    for _ in range(2):
        Watched(tmp_path, "one").begin()
    put_session(tmp_path / "store", 3, sign_seconds=1.0)
    streams = tmp_path / "store" / "live" / "rank0"
    assert list(streams.glob("*/successor.json")) == []

    session = Watched(tmp_path, "two").begin()

    assert session == 4
    assert sorted(path.parent.name for path in streams.glob("*/successor.json")) == ["0001", "0002", "0003"]
    assert json.loads((streams / "0001" / "successor.json").read_text())["session"] == 4


def test_a_superseded_session_touches_no_file_of_its_successor(tmp_path, caplog):
    """Neither checkpoints, pointers nor pieces; its files go below its own name, with a warning."""
    file = tmp_path / "weights.pt"
    zombie = Mirrored(tmp_path / "one" / "run", tmp_path / "store")
    zombie.log({"loss": 0.0}, 0)
    file.write_bytes(b"old")
    zombie.logger.upload_file("ep1.pt", file)
    zombie.logger.upload_file("last.pt", file, overwrite=True)
    zombie.stop_sending()
    with Mirrored(tmp_path / "two" / "run", tmp_path / "store", batch=1) as successor:
        successor.log({"loss": 1.0}, 1)
        file.write_bytes(b"new")
        for name in ("ep1.pt", "last.pt"):
            successor.logger.upload_file(name, file, overwrite=True)
        file.write_text("last.pt")
        successor.logger.upload_file("latest.symlink", file, overwrite=True)
        successor.send()
    names = {path.relative_to(tmp_path / "store") for path in (tmp_path / "store").rglob("*")}
    before = files_of(tmp_path / "store")

    with caplog.at_level(logging.ERROR, "destinations"):
        zombie.go_on()
        file.write_bytes(b"zombie")
        zombie.logger.upload_file("last.pt", file, overwrite=True)
        zombie.logger.upload_file("ep2.pt", file)
        zombie.logger.delete_file("ep1.pt")
        file.write_text("ep2.pt")
        zombie.logger.upload_file("latest.symlink", file, overwrite=True)
        zombie.log({"loss": 0.5}, 1)
        zombie.close()

    after = files_of(tmp_path / "store")
    own = tmp_path / "store" / "live" / "rank0" / "0001"
    assert names <= {path.relative_to(tmp_path / "store") for path in (tmp_path / "store").rglob("*")}
    assert after == before
    assert (own / "artifacts%2Flast.pt").read_bytes() == b"zombie"
    assert (own / "artifacts%2Fep2.pt").read_bytes() == b"zombie"
    assert "was continued by process" in caplog.text
    assert "in live/rank0/0001/ there" in caplog.text


def test_uploads_of_a_killed_process_arrive_when_its_folder_continues(tmp_path):
    """An accepted checkpoint keeps its name, because no other machine has taken the run."""
    first = Mirrored(tmp_path / "run", tmp_path / "store")
    first.log({"loss": 0.0}, 0)
    first.stop_sending()
    (tmp_path / "weights.pt").write_bytes(b"weights")
    first.queue._drainer.stop(LIMIT_SECONDS)
    first.logger.upload_file("ep1.pt", tmp_path / "weights.pt")
    first.mirror.finish = lambda *_: first.queue.close(0.0)
    first.close()

    with Mirrored(tmp_path / "run", tmp_path / "store", batch=1) as second:
        second.log({"loss": 1.0}, 1)

    assert (tmp_path / "store" / "artifacts" / "ep1.pt").read_bytes() == b"weights"


def test_pieces_of_another_machine_are_never_deleted(tmp_path):
    """It may only seem dead. Pieces that the folder itself left are replaced by its own."""
    lost = Mirrored(tmp_path / "one" / "run", tmp_path / "store")
    lost.log({"loss": 0.0}, 0)
    lost.stop_sending()
    left = pieces_of(tmp_path / "store")
    for step in (1, 2):
        run = Mirrored(tmp_path / "two" / "run", tmp_path / "store", batch=step)
        run.log({"loss": float(step)}, step)
        run.send()
        run.close()

    assert [name for name in pieces_of(tmp_path / "store") if "/0001/" in name] == left
    assert [name.split("/")[2] for name in pieces_of(tmp_path / "store") if name not in left] == ["0003"]
    lost.close()


def test_a_sign_is_sent_if_no_piece_is(tmp_path):
    """This holds with an interval of an hour and during an upload; punctual pieces need no sign."""
    folder = Folder(tmp_path)
    folder.append("metrics.csv", "step\n")
    sign = folder.store / "live" / "rank0" / "0001" / "sign.json"
    for _ in range(5):
        folder.now += 10.0
        folder.mirror.tick()
        folder.queue.drain(LIMIT_SECONDS)
    assert not sign.exists()

    folder.mirror._due_at = folder.now + 3600.0
    seen = []
    for _ in range(10):
        folder.now += 10.0
        folder.mirror.tick()
        folder.queue.drain(LIMIT_SECONDS)
        seen.append(sign.read_text() if sign.exists() else "")
    folder.queue.close(LIMIT_SECONDS)

    assert len({*seen} - {""}) == 5


def test_the_next_piece_has_the_content_of_a_failed_one(tmp_path, monkeypatch):
    """Everything in the failed piece counts as unsent, so the next piece contains it."""
    folder = Folder(tmp_path)
    folder.append("metrics.csv", "step\n")
    folder.send()
    original, failures = mirror_module.write_piece, [OSError("no room")]

    def fail_once(*arguments):
        if failures:
            raise failures.pop()
        original(*arguments)

    monkeypatch.setattr(mirror_module, "write_piece", fail_once)
    for number in range(3):
        folder.append("metrics.csv", f"{number}\n")
        folder.send()
    folder.queue.close(LIMIT_SECONDS)

    assert files_of(fetched(folder.store, tmp_path / "copy")) == files_of(folder.path)


def test_a_file_that_does_not_fit_into_the_spool_is_sent_later(tmp_path):
    """It leaves the list once it is accepted, not before."""
    folder = Folder(tmp_path)
    (folder.path / "media").mkdir()
    (folder.path / "media" / "a.png").write_bytes(b"a")
    original = folder.queue.submit
    full = UploadQueue(LocalStore(tmp_path / "none"), spool=tmp_path / "full", spool_bytes=0)
    folder.mirror.add("media/a.png")
    folder.queue.submit = full.submit
    folder.send()
    folder.queue.submit = original
    folder.send()
    folder.send()
    folder.queue.close(LIMIT_SECONDS)
    full.close(0.0)

    assert (folder.store / "media" / "a.png").read_bytes() == b"a"
