"""Damaged files of a spool: each affects only itself, and the rest is delivered."""

import contextlib
import errno
import json
import os
import shutil
import signal

import pytest

from tests.servers.stores import MemoryStore
from tests.test_uploads.conftest import SOON
from uploads import UploadQueue, UploadState
from uploads import command_line as commands
from uploads.errors import SpoolUnusableError
from uploads.handle import Outcome
from uploads.spool.entry import Entry
from uploads.spool.spool import Spool

LIMIT_SECONDS = 600
HUGE_BYTES = 1 << 40
CONTENTS = {"victim": b"victim", "failed": b"failed", "later": b"later"}
PLACES = ["tmp", "pending", "inflight", "done", "failed", "failed/corrupt"]
FILES = [
    *PLACES[:1],
    *PLACES[2:],
    "spool.json",
    "status.json",
    "queue.lock",
    "drain.lock",
    "delivered.jsonl",
    "delivered.old.jsonl",
    "quarantine",
    "TMP",
    "pending/VICTIM",
    "inflight/VICTIM",
    "done/VICTIM",
    "failed/rejected/FAILED",
    "failed/rejected/FAILED/reason.json",
    "failed/rejected/FAILED/entry.json",
    "done/DONE/entry.json",
    *(
        f"pending/VICTIM/{name}"
        for name in (
            "entry.json",
            "data",
            "crc32.json",
            "attempts.json",
            "flushed",
            "multipart.json",
        )
    ),
]


@pytest.fixture(autouse=True)
def _limit():
    """Ends a test that waits for a FIFO."""

    def stop(*_):
        raise KeyboardInterrupt  # The code under test must not take it for an error of a file.

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _entry(number, name, size, **changes):
    return Entry(
        f"{number:016x}",
        number,
        name,
        overwrite=True,
        size=size,
        crc32=None,
        **{"staging": "linked", "source": "/a", "after": {}, "submitted_at": "now", **changes},
    )


def _publish(spool, number, name):
    entry = _entry(number, name, len(CONTENTS[name]))
    folder = spool.new_folder()
    (folder / "data").write_bytes(CONTENTS[name])
    spool.write_manifest(folder, entry)
    spool.publish(folder, entry, to_disk=False)
    return entry.folder


def _spool_with_everything(path):
    """A spool with each kind of file; returns it with the placeholders in file names."""
    spool = Spool(path)
    spool.create({"uri": "memory://store/"})
    (path / "quarantine").mkdir()
    names = {"VICTIM": _publish(spool, 1, "victim"), "FAILED": _publish(spool, 2, "failed")}
    spool.claim(names["FAILED"])
    spool.settle(names["FAILED"], Outcome(f"{2:016x}", "failed", UploadState.REJECTED, reason="no"))
    victim = spool.pending / names["VICTIM"]
    for name in ("crc32.json", "attempts.json", "flushed"):
        (victim / name).write_text("{}")
    names["DONE"] = _entry(3, "done", 4).folder
    (spool.done / names["DONE"]).mkdir()
    (spool.done / names["DONE"] / "entry.json").write_text(_entry(3, "done", 4).to_text())
    staged = spool.new_folder()
    names["TMP"] = str(staged.relative_to(path))
    lines = [json.dumps(Outcome(f"{9:016x}", "é", UploadState.DONE, size=1).to_json(), ensure_ascii=False)]
    for log in ("delivered.jsonl", "delivered.old.jsonl"):
        (path / log).write_text("\n".join(lines) + "\n")
    for lock in ("queue.lock", "drain.lock", "status.json"):
        (path / lock).touch()
    _publish(spool, 5, "later")
    return spool, names


def _remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


DAMAGES = {
    "empty": lambda path, outside: path.write_bytes(b""),
    "garbage": lambda path, outside: path.write_bytes(b'\xff\xfe{"a": \0\n[1e999]\n' * 5),
    "wrong": lambda path, outside: path.write_text(
        '{"version": 1, "store": 7, "crc32": Infinity, "size": "x"}'
    ),
    "deep": lambda path, outside: path.write_text("[" * 100_000),
    "folder": lambda path, outside: (path / "inner").mkdir(parents=True),
    "symlink": lambda path, outside: path.symlink_to(outside),
    "fifo": lambda path, outside: os.mkfifo(path),
    "huge": lambda path, outside: (path.touch(), os.truncate(path, HUGE_BYTES)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_affects_only_itself(tmp_path, damage):
    """With each file damaged in turn, the spool opens, doesn't hang, delivers the other entries, and deletes nothing."""
    outside = tmp_path / "outside"
    for number, file in enumerate(FILES):
        if damage == "symlink" and file in PLACES:
            continue  # Refused, see below.
        outside.write_bytes(b"not ours")
        spool, names = _spool_with_everything(tmp_path / f"spool-{number}")
        path = spool.path / file
        for word, name in names.items():
            path = type(path)(str(path).replace(word, name))
        _remove(path)
        DAMAGES[damage](path, outside)
        store = MemoryStore()

        with contextlib.suppress(SpoolUnusableError):  # It says that a folder is none.
            commands.status(spool.path)
        with UploadQueue(
            store, spool=spool.path, isolation="threads", policy=SOON, free_bytes=0, close_at_exit=False
        ) as queue:
            backlog = queue.drain(LIMIT_SECONDS)
        commands.status(spool.path)
        commands.verify(spool.path, store=store)

        about = (file, damage, backlog)
        assert backlog.remaining == (), about
        assert {name: CONTENTS[name] for name in store.objects} == store.objects, about
        hit = {"victim"} if "VICTIM" in file else set()
        assert {"later", "victim"} - hit <= set(store.objects), about
        assert outside.read_bytes() == b"not ours", about
        left = {
            one.read_bytes() for one in spool.path.rglob("data") if one.is_file() and one.stat().st_size < 100
        }
        if "victim" not in store.objects:
            assert CONTENTS["victim"] in left or path.name in {"data", names["VICTIM"]}, about


def test_a_second_folder_of_an_entry_is_quarantined(make_queue, tmp_path):
    """An entry that exists twice, as in a copied spool, is delivered once and doesn't stop the others."""
    spool, names = _spool_with_everything(tmp_path / "spool")
    shutil.copytree(spool.pending / names["VICTIM"], spool.inflight / names["VICTIM"])
    store = MemoryStore()

    make_queue(store).drain(LIMIT_SECONDS)

    assert store.objects["victim"] == b"victim"
    assert [name.partition(".")[0] for name in spool.list_quarantined()] == [names["VICTIM"]]


def test_the_last_number_is_refused_and_not_lost(make_queue, make_file, tmp_path):
    """An entry whose number is too large for the format would never be found, so it is refused."""
    spool = Spool(tmp_path / "spool")
    spool.create()
    last = _entry(10**12 - 1, "a", 1).folder
    (spool.failed / "rejected" / last).mkdir()

    handle = make_queue(MemoryStore()).submit(make_file(), "b")

    assert handle.state is UploadState.REFUSED


@pytest.mark.parametrize("staging", ["linked", "copied", "reflinked"])
def test_whole_files_of_another_boot_are_delivered(tmp_path, staging):
    """The machine restarted before anything confirmed that the bytes are on the disk; they are complete, and sent."""
    spool = Spool(tmp_path / "spool", boot="before")
    spool.create()
    contents = {f"n{number}": os.urandom(1_500_000 + number) for number in range(4)}
    for number, (name, content) in enumerate(contents.items()):
        entry = _entry(number + 1, name, len(content), staging=staging, boot="before")
        folder = spool.new_folder()
        (folder / "data").write_bytes(content)
        spool.write_manifest(folder, entry)
        spool.publish(folder, entry, to_disk=False)
    store = MemoryStore()

    code = commands.resume(spool.path, store=store)

    assert (code, store.objects) == (commands.EXIT_OK, contents)


def test_a_file_of_another_boot_with_a_hole_is_corrupt(tmp_path):
    """A power loss leaves zeros for missing bytes; without a checksum such a file isn't sent."""
    spool = Spool(tmp_path / "spool", boot="before")
    spool.create()
    content = os.urandom(8192) + bytes(4096) + os.urandom(8192)
    entry = _entry(1, "a", len(content), boot="before")
    folder = spool.new_folder()
    (folder / "data").write_bytes(content)
    spool.write_manifest(folder, entry)
    spool.publish(folder, entry, to_disk=False)

    code = commands.resume(spool.path, store=MemoryStore())

    assert code == commands.EXIT_FAILED
    assert spool.list_failed()[UploadState.CORRUPT] == [entry.folder]


def test_the_log_of_deliveries_is_bounded(tmp_path):
    """The log is cut at its limit and keeps the newest lines; opening a spool reads only what a schedule needs."""
    spool = Spool(tmp_path / "spool", log_bytes=20_000)
    spool.create()
    for number in range(1, 301):
        folder = _entry(number, f"n{number}", 1).folder
        (spool.done / folder).mkdir()
        spool.log_delivered(
            folder,
            Outcome(
                f"{number:016x}",
                f"n{number}",
                UploadState.SUPERSEDED if number == 299 else UploadState.DONE,
                superseded_by=f"{300:016x}" if number == 299 else None,
            ),
        )

    logs = sorted(path.name for path in spool.path.glob("delivered*"))
    kept = [outcome.remote_name for outcome in spool.delivered()]

    assert logs == ["delivered.jsonl", "delivered.old.jsonl"]
    assert sum((spool.path / log).stat().st_size for log in logs) <= 40_000
    assert len(kept) > 50
    assert kept == [f"n{number}" for number in range(301 - len(kept), 301)]
    assert [outcome.remote_name for outcome in spool.superseded()] == ["n299"]
    assert [outcome.remote_name for outcome in spool.delivered({f"{298:016x}"})] == ["n298"]


def test_a_delivery_frees_its_bytes_on_a_full_disk(tmp_path, monkeypatch):
    """The bytes are freed before anything is written, or a full spool could never be emptied."""
    spool = Spool(tmp_path / "spool")
    spool.create()
    folder = _publish(spool, 1, "victim")
    spool.claim(folder)
    outcome = Outcome(f"{1:016x}", "victim", UploadState.DONE, size=6)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            spool.settle(folder, outcome)
    assert [path.name for path in spool.path.rglob("data")] == []
    assert spool.list_done() == [folder]

    spool.settle(folder, outcome)

    assert (spool.list_done(), list(spool.delivered())) == ([], [outcome])


class SpoolThatTurns(Spool):
    """A spool whose entry goes from pending to in flight, or back, before each listing."""

    turns = 0

    def _turn(self):
        if self.turns > 0:
            self.turns -= 1
            for folder in super().list_pending():
                self.claim(folder)
                return
            for folder in super().list_inflight():
                self.release(folder)

    def pending_folders(self):
        self._turn()
        return super().pending_folders()

    def inflight_folders(self):
        self._turn()
        return super().inflight_folders()


@pytest.mark.parametrize("turns", range(5))
@pytest.mark.parametrize("start", ["pending", "inflight"])
def test_an_entry_that_changes_its_place_is_listed_once(tmp_path, turns, start):
    """Readers of the spool see an entry exactly once while it is tried and put back."""
    spool = SpoolThatTurns(tmp_path / "spool")
    spool.create()
    entry = _entry(1, "later", 5)
    staged = spool.new_folder()
    spool.write_manifest(staged, entry)
    spool.publish(staged, entry, to_disk=False)
    if start == "inflight":
        spool.claim(entry.folder)
    spool.turns = turns

    pending, inflight = spool.list_unfinished()

    assert [*pending, *inflight] == [entry.folder]


def test_a_file_that_cannot_be_quarantined_stays(tmp_path, caplog):
    """The log says so, nothing follows a link, and the file stays where it is."""
    spool = Spool(tmp_path / "spool")
    spool.create()
    (tmp_path / "outside").mkdir()
    (spool.path / "quarantine").symlink_to(tmp_path / "outside")
    (spool.path / "spool.json").write_text("{")

    spool.create()

    assert (spool.path / "spool.json").read_text() == "{"
    assert list((tmp_path / "outside").iterdir()) == []
    assert "Cannot move it to" in caplog.text
    assert "it is a symlink" in caplog.text


def test_an_entry_that_cannot_be_moved_does_not_keep_the_others(tmp_path, monkeypatch, caplog):
    """On a disk without room for a name, one entry stays in flight, is logged, and recovers once there is room."""
    spool = Spool(tmp_path / "spool")
    spool.create()
    stays, goes = (_publish(spool, number, name) for number, name in ((1, "victim"), (2, "later")))
    for folder in (stays, goes):
        spool.claim(folder)
    rename = os.rename

    def full(source, target, **options):
        if source == spool.inflight / stays:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rename(source, target, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        spool.recover()
    assert (spool.list_inflight(), spool.list_pending()) == ([stays], [goes])
    assert f"cannot move {spool.inflight / stays}" in caplog.text

    spool.recover()

    assert (spool.list_inflight(), spool.list_pending()) == ([], [stays, goes])


def test_a_delivery_that_cannot_be_logged_is_logged_later(tmp_path, monkeypatch, caplog):
    """A spool opens on a full disk, and keeps a delivered entry until its line is written."""
    spool = Spool(tmp_path / "spool")
    spool.create()
    folder = _publish(spool, 1, "victim")
    spool.claim(folder).rename(spool.done / folder)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        spool.recover()
    assert (spool.list_done(), list(spool.delivered())) == ([folder], [])
    assert f"cannot log the delivery of {folder}" in caplog.text

    spool.recover()

    assert (spool.list_done(), [one.remote_name for one in spool.delivered()]) == ([], ["victim"])


def test_a_line_with_a_bad_name_is_a_finding(tmp_path):
    """`verify` doesn't look up a name that leaves the store, and compares the others."""
    spool = Spool(tmp_path / "spool")
    spool.create({"uri": "memory://store/"})
    for number, name in enumerate(("../outside", "there", "missing"), 1):
        folder = _entry(number, name, 2).folder
        (spool.done / folder).mkdir()
        spool.log_delivered(folder, Outcome(f"{number:016x}", name, UploadState.DONE, size=2))
    store = MemoryStore()
    store.objects["there"] = b"ok"

    findings = commands.verify(spool.path, store=store)

    assert [finding.problem.partition(",")[0] for finding in findings] == [
        "a remote name must have no empty part",
        "missing",
    ]
