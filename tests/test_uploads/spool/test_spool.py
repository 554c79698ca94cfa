"""The folder of entries: crashes, damage, ownership."""

import contextlib
import errno
import fcntl
import json
import os
import stat
import threading
import time

import pytest

from tests.servers.recorded_disk import RecordedDisk
from uploads.disk import append_line
from uploads.errors import ManifestError, SpoolUnusableError
from uploads.handle import Outcome, UploadState
from uploads.spool.entry import (
    Attempts,
    Entry,
    may_have_lost_bytes,
    note_attempts,
    note_flushed,
    note_interruption,
    read_attempts,
    read_reason,
)
from uploads.spool.flush import Flusher
from uploads.spool.ownership import OwnerLock, owner_of
from uploads.spool.spool import Spool, fsync_entry


def _entry(sequence=1, name="a", **changes):
    values = {
        "overwrite": True,
        "size": 1,
        "crc32": None,
        "staging": "copied",
        "source": "/a",
        "after": {},
        "submitted_at": "now",
        **changes,
    }
    return Entry(f"{sequence:016x}", sequence, name, **values)


@pytest.fixture
def spool(tmp_path):
    """An empty spool."""
    spool = Spool(tmp_path / "spool")
    spool.create({"uri": "file:///store"})
    return spool


def _publish(spool, one):
    folder = spool.new_folder()
    (folder / "data").write_bytes(b"x")
    spool.write_manifest(folder, one)
    spool.publish(folder, one, to_disk=True)
    return one.folder


def _deliver(spool, one):
    spool.claim(one.folder)
    spool.settle(one.folder, Outcome(one.identifier, one.remote_name, UploadState.DONE))


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def _spares(spool):
    return _names(spool.path / "spare")


@pytest.mark.parametrize("is_other", [False, True], ids=["in threads", "by another process"])
def test_the_next_entry_reuses_the_folder_of_a_delivered_one(spool, monkeypatch, is_other):
    """Staging creates no folder if one is left, and finds nothing of the earlier entry in it."""
    made, mkdir = [], os.mkdir
    monkeypatch.setattr(os, "mkdir", lambda *arguments: made.append(arguments) or mkdir(*arguments))
    _publish(spool, _entry(1))
    _deliver(Spool(spool.path) if is_other else spool, _entry(1))
    assert (len(made), _spares(spool)) == (1, [_entry(1).folder])

    folder = _publish(spool, _entry(2))

    assert (len(made), _spares(spool)) == (1, [])
    assert _names(spool.pending / folder) == ["data", "entry.json"]


def test_a_folder_taken_by_another_process_is_replaced(spool):
    """If two processes find one folder, one takes it, and the other creates a new one."""
    _publish(spool, _entry(1))
    _deliver(spool, _entry(1))
    assert Spool(spool.path).new_folder().is_dir()

    assert _publish(spool, _entry(2)) in spool.list_pending()


def test_a_folder_with_notes_is_not_reused(spool):
    """The next entry must not inherit attempts of a delivered one."""
    folder = _publish(spool, _entry(1))
    note_attempts(spool.pending / folder, Attempts(3, "away"))

    _deliver(spool, _entry(1))

    assert (_spares(spool), _names(spool.done)) == ([], [])


def test_few_folders_of_delivered_entries_are_kept(spool, monkeypatch):
    """The oldest go first; at the end, and before a queue starts, all but one in use go."""
    monkeypatch.setattr("uploads.spool.spool._MAX_SPARES", 2)
    entries = [_entry(number) for number in range(1, 6)]
    for one in entries:
        _publish(spool, one)
    for one in entries:
        _deliver(spool, one)
    assert _spares(spool) == [one.folder for one in entries[-2:]]
    (spool.path / "spare" / entries[-1].folder / "data").write_bytes(b"staged just now")

    Spool(spool.path).sweep_tmp()

    assert _spares(spool) == [entries[-1].folder]
    assert (spool.path / "spare" / entries[-1].folder / "data").read_bytes() == b"staged just now"


class SpoolThatMoves(Spool):
    """A spool whose entry moves to in flight between a lookup and the read."""

    def place_of(self, folder):
        place = super().place_of(folder)
        if place is not None and place.parent == self.pending:
            self.claim(folder)
        return place


def test_an_entry_is_found_while_it_moves(spool):
    """Reading an entry during a rename returns the entry, not None."""
    folder = _publish(spool, _entry(name="a"))

    entry = SpoolThatMoves(spool.path).entry_of(folder)

    assert entry is not None
    assert entry.remote_name == "a"
    assert spool.list_inflight() == [folder]


def test_the_search_for_an_entry_without_a_manifest_ends(spool):
    """What cannot be found ends the search."""
    folder = _publish(spool, _entry(name="a"))
    (spool.pending / folder / "entry.json").unlink()

    assert spool.entry_of(folder) is None
    assert spool.entry_of("000000000009-0000000000000000-0000000000000000") is None


@pytest.mark.parametrize("is_claimed", [True, False])
def test_an_entry_whose_name_cannot_be_synced_is_refused_unless_in_flight(
    spool, monkeypatch, caplog, is_claimed
):
    """With durability="power" `submit` raises, or logs that the entry can no longer be refused."""
    entry, staged = _entry(), spool.new_folder()
    (staged / "data").write_bytes(b"x")
    spool.write_manifest(staged, entry)
    fsync = os.fsync

    def failing(descriptor):
        if not os.path.sameopenfile(descriptor, pending):
            return fsync(descriptor)
        if is_claimed:
            spool.claim(entry.folder)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", failing)
    pending = os.open(spool.pending, os.O_RDONLY)
    try:
        with contextlib.nullcontext() if is_claimed else pytest.raises(OSError, match="Input/output error"):
            spool.publish(staged, entry, to_disk=True)
    finally:
        os.close(pending)

    assert spool.list_unfinished() == ([], [entry.folder] if is_claimed else [])
    assert ("cannot sync the name of" in caplog.text) is is_claimed
    assert staged.exists() is not is_claimed


def test_a_failed_entry_keeps_its_bytes_and_its_reason(spool):
    """failed/ is a quarantine, and deletes nothing."""
    folder = _publish(spool, _entry())
    spool.claim(folder)

    spool.settle(folder, Outcome("0000000000000001", "a", UploadState.CONFLICT, reason="taken"))

    place = spool.failed / "conflict" / folder
    assert sorted(path.name for path in place.iterdir()) == ["data", "entry.json", "reason.json"]
    assert read_reason(place).reason == "taken"


def test_a_retried_failed_entry_is_not_logged_as_failed(spool, monkeypatch):
    """The process may be killed during the retry, and the next one after the upload, before its log line."""
    folder = _publish(spool, _entry())
    spool.claim(folder)
    spool.settle(folder, Outcome("0000000000000001", "a", UploadState.CONFLICT, reason="taken"))
    rename = os.rename

    def rename_and_die(source, target):
        rename(source, target)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename_and_die)
        with pytest.raises(KeyboardInterrupt):
            spool.requeue(UploadState.CONFLICT, folder)
    spool.claim(folder).rename(spool.done / folder)
    spool.recover()

    assert [outcome.state for outcome in spool.delivered()] == [UploadState.DONE]


def test_recovering_requeues_interrupted_uploads_and_logs_delivered_ones(spool):
    """Both happen after a crash."""
    flying, landed = _publish(spool, _entry(1, "a")), _publish(spool, _entry(2, "b"))
    spool.claim(flying)
    spool.claim(landed)
    (spool.inflight / landed).rename(spool.done / landed)

    spool.recover()

    assert spool.list_pending() == [flying]
    assert [outcome.remote_name for outcome in spool.delivered()] == ["b"]
    assert not any(spool.done.iterdir())


class SpoolThatDies(Spool):
    """A spool whose process is killed before it logs an ended entry."""

    def log_delivered(self, folder, outcome):
        raise KeyboardInterrupt


def test_a_superseded_entry_is_not_logged_as_delivered_after_a_crash(spool):
    """A retry, or `verify`, would otherwise expect the old version in the store."""
    folder = _publish(spool, _entry())
    superseded = Outcome("0000000000000001", "a", UploadState.SUPERSEDED, superseded_by="2" * 16)
    with pytest.raises(KeyboardInterrupt):
        SpoolThatDies(spool.path).settle(folder, superseded)

    spool.recover()

    assert list(spool.delivered()) == list(spool.superseded()) == [superseded]


def test_a_manifest_of_another_entry_is_refused(spool):
    """An entry with a swapped manifest isn't uploaded under the wrong name."""
    folder = _publish(spool, _entry(1, "a"))
    (spool.pending / folder / "entry.json").write_text(_entry(2, "b").to_text())

    with pytest.raises(ManifestError, match="another entry"):
        Entry.read(spool.pending / folder)


def test_a_torn_line_is_skipped_and_repaired(tmp_path, spool):
    """A crash in the middle of a line loses only that line."""
    log = spool.path / "delivered.jsonl"
    log.write_text('{"identifier": "1", "remote_name": "a", "st')

    append_line(log, json.dumps(Outcome("2", "b", UploadState.DONE).to_json()))

    assert [outcome.remote_name for outcome in spool.delivered()] == ["b"]


def test_a_spool_of_a_newer_format_is_refused(tmp_path):
    """Nothing in it changes."""
    (tmp_path / "spool.json").write_text('{"version": 99}')

    with pytest.raises(SpoolUnusableError, match="version 1"):
        Spool(tmp_path).create()


def test_a_spool_that_cannot_be_created_is_unusable(tmp_path):
    """The queue's constructor refuses a spool that can't be written."""
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(SpoolUnusableError, match="must be a writable folder"):
        Spool(tmp_path / "file").create()


def test_a_spool_is_private_to_this_user(spool):
    """Folders are 0700 and files 0600, whatever the umask."""
    folder = _publish(spool, _entry())

    assert spool.path.stat().st_mode & 0o777 == 0o700
    assert (spool.pending / folder / "entry.json").stat().st_mode & 0o777 == 0o600


def test_a_file_in_place_of_a_folder_is_replaced_by_a_private_folder(spool):
    """The file is quarantined; nobody else may read the new folder."""
    (spool.path / "tmp").rmdir()
    (spool.path / "tmp").write_text("in the way")

    spool.create()

    assert stat.S_IMODE((spool.path / "tmp").stat().st_mode) == 0o700
    assert len(spool.list_quarantined()) == 1


class SpoolThatIsRepairedByTwo(Spool):
    """A spool that another process repairs at the same time."""

    def quarantine(self, path, problem):
        super().quarantine(path, problem)
        path.mkdir(mode=0o700)


def test_two_processes_may_repair_a_spool_at_once(spool):
    """The second finds the folder that the first created."""
    spool.pending.rmdir()
    spool.pending.write_text("in the way")

    SpoolThatIsRepairedByTwo(spool.path).create()

    assert spool.list_pending() == []
    assert len(spool.list_quarantined()) == 1


def test_a_link_in_place_of_data_is_not_synced(spool, tmp_path):
    """Its target isn't a file of the spool."""
    folder = _publish(spool, _entry())
    (spool.pending / folder / "data").unlink()
    (tmp_path / "elsewhere").write_text("x")
    (spool.pending / folder / "data").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(OSError, match="symbolic links"):
        fsync_entry(spool.pending / folder)


def test_attempts_that_ended_with_their_process_are_counted(tmp_path):
    """Their answer may be lost; the answer to a failed attempt is lost only if it says so."""
    assert [note_interruption(tmp_path), note_interruption(tmp_path)] == [1, 2]
    note_attempts(tmp_path, Attempts(4, "503"))
    assert read_attempts(tmp_path) == Attempts(4, "503", is_answer_lost=False)

    assert [note_interruption(tmp_path), note_interruption(tmp_path)] == [5, 6]
    assert read_attempts(tmp_path).is_answer_lost is True


def test_a_reboot_is_suspect_only_before_bytes_are_synced(tmp_path):
    """Bytes are safe in the same boot, once they're on the disk, and if they were synced at once."""
    lost = [
        may_have_lost_bytes(tmp_path, _entry(boot=boot), now)
        for boot, now in (("a", "b"), ("a", "a"), ("", "b"))
    ]
    assert lost == [True, False, False]

    note_flushed(tmp_path)
    assert not may_have_lost_bytes(tmp_path, _entry(boot="a"), "b")


def test_a_manifest_of_another_version_is_refused():
    """Its fields may have another meaning."""
    text = _entry().to_text()
    assert Entry.parse(text.encode()) == _entry()

    with pytest.raises(ManifestError, match="must have version 1, got 2"):
        Entry.parse(text.replace('"version": 1', '"version": 2').encode())


def test_a_lock_names_its_owner_over_any_earlier_text(tmp_path):
    """A longer text of an earlier owner leaves nothing behind."""
    (tmp_path / "lock").write_text("x" * 2000)
    lock = OwnerLock(tmp_path / "lock", "queue")
    lock.take()

    assert owner_of(tmp_path / "lock")["pid"] == os.getpid()
    lock.release()
    assert not (tmp_path / "lock").exists()


def test_a_released_lock_is_free_while_a_child_has_its_file_open(tmp_path):
    """A process forked meanwhile shares the file, and may live long."""
    first, second = OwnerLock(tmp_path / "lock", "queue"), OwnerLock(tmp_path / "lock", "resume")
    first.take()
    shared = os.dup(first._fd)
    try:
        first.release()
        second.take()
        second.release()
    finally:
        os.close(shared)


def test_reading_a_spool_does_not_lock_it(tmp_path, monkeypatch):
    """`status` holds the lock for an instant; a process that wants the spool at that instant waits."""
    path = tmp_path / "lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            os.close(descriptor)

    monkeypatch.setattr(time, "sleep", sleep)
    lock = OwnerLock(path, "queue")

    lock.take()

    assert owner_of(path)["pid"] == os.getpid()
    assert len(waits) == 3
    lock.release()


def test_an_entry_that_moves_during_its_sync_reaches_the_disk(spool):
    """An entry that moves to in flight between the lookup and the fsync is still synced."""
    folder = _publish(spool, _entry())
    places = []

    def fsync(place):
        places.append(place.parent.name)
        if len(places) == 1:
            spool.claim(folder)
        fsync_entry(place)

    flusher = Flusher(spool, delay_seconds=0.0, fsync=fsync)
    flusher.add(folder)
    flusher.stop(60)

    assert places == ["pending", "inflight"]
    assert flusher.suspect == 0


def test_a_large_file_taken_during_its_sync_is_known_to_be_on_the_disk(spool):
    """This is noted at the entry's new place."""
    entry = _entry(boot="before")
    folder = _publish(spool, entry)

    def fsync(place):
        fsync_entry(place)
        if spool.is_pending(folder):
            spool.claim(folder)

    flusher = Flusher(spool, delay_seconds=0.0, fsync=fsync)
    flusher.add(folder, unchecked=True)
    flusher.stop(60)

    assert not may_have_lost_bytes(spool.inflight / folder, entry, "after")
    assert flusher.suspect == 0


def test_a_burst_that_the_disk_refused_is_counted_and_logged(spool, caplog):
    """None of its entries is noted as being on the disk."""
    entries = [_entry(number, f"n{number}", boot="before") for number in range(1, 11)]

    def sync_disk(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    flusher = Flusher(spool, delay_seconds=60.0, sync_disk=sync_disk)
    for entry in entries:
        flusher.add(_publish(spool, entry), unchecked=True)
    flusher.stop(60)

    assert flusher.suspect == 10
    assert "Input/output error" in caplog.text
    assert all(may_have_lost_bytes(spool.pending / entry.folder, entry, "after") for entry in entries)


def test_a_burst_of_large_files_is_known_to_be_on_the_disk(tmp_path):
    """They're synced in one pass; after a power loss their zeros aren't suspect."""
    spool = Spool(tmp_path / "spool", boot="before")
    spool.create()
    entries = [_entry(number, f"n{number}", boot="before") for number in range(1, 11)]
    passes = []
    flusher = Flusher(spool, delay_seconds=60.0, sync_disk=passes.append)

    for entry in entries:
        flusher.add(_publish(spool, entry), unchecked=True)
    flusher.stop(60)

    assert passes == [spool.pending]
    assert [
        entry.sequence
        for entry in entries
        if may_have_lost_bytes(spool.pending / entry.folder, entry, "after")
    ] == []


@pytest.mark.parametrize("is_tried_again", [True, False])
def test_entries_are_synced_even_if_a_thread_could_not_start(spool, monkeypatch, caplog, is_tried_again):
    """The next entry's thread syncs them, or the end of the spool does. Submitting doesn't fail."""
    synced, folders = [], [_entry(1).folder, _entry(2).folder]
    flusher = Flusher(spool, delay_seconds=0.0, fsync=lambda place: synced.append(place.name))

    def start(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        flusher.add(folders[0])
    assert "cannot start the thread that syncs staged files: can't start new thread" in caplog.text
    if is_tried_again:
        flusher.add(folders[1])
    flusher.stop(60)

    assert synced == folders[: 1 + is_tried_again]


def test_an_idle_spool_is_not_synced(spool, monkeypatch):
    """The thread waits for the next entry, and doesn't touch the disk until then."""
    synced, again, calls = threading.Event(), threading.Event(), []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) > 1:  # One is of the folder `pending/`.
            again.set()

    monkeypatch.setattr(os, "fsync", fsync)
    flusher = Flusher(spool, delay_seconds=0.0, fsync=lambda place: synced.set())

    flusher.add(_entry().folder)

    assert synced.wait(60)
    assert not again.wait(0.2)
    flusher.stop(60)


def test_a_recreated_spool_is_complete_before_it_can_be_used(tmp_path, monkeypatch):
    """Two threads may find it deleted at once.

    A process that sees `tmp/`, created by the other, finds everything that an entry needs.
    """
    disk = RecordedDisk(tmp_path / "disk")
    disk.root.mkdir()

    with disk.recording(monkeypatch):
        Spool(disk.root / "spool").create()

    made = [one.path for one in disk.operations if one.kind == "mkdir"]
    assert made[-1] == "spool/tmp"
    assert {"spool/pending", "spool/inflight", "spool/done", "spool/failed/rejected"} < set(made)
