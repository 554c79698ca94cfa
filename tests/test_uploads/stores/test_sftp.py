"""SFTP: one of two create-only writers wins, and killed writers leave nothing."""

import os
import threading
import time

import pytest

from tests.servers.careless_sftp import careless_sftp
from tests.servers.sshd import over_ssh
from uploads.errors import RejectedByStoreError, RemoteExistsError
from uploads.stores import Body

WRITERS = 4
HOUR_AGO = 2 * 3600
LIMIT_SECONDS = 120


@pytest.fixture
def connect(tmp_path):
    """Creates stores of one folder, and closes their connections."""
    stores = []

    def make(login, **options):
        stores.append(over_ssh(tmp_path / "there", **login, **options))
        return stores[-1]

    yield make
    for store in stores:
        store.renew()


def test_one_of_two_create_only_writers_wins(sshd_login, connect, make_file, tmp_path):
    """Exactly one of the racing writers succeeds, and only its bytes are there."""
    outcomes = {}
    barrier = threading.Barrier(WRITERS)

    def write(number):
        with Body(make_file(f"from-{number}", b"bytes of %d" % number), f"entry-{number}") as body:
            store = connect(sshd_login)
            barrier.wait(LIMIT_SECONDS)
            try:
                store.put("folder/name", body, overwrite=False)
                outcomes[number] = "done"
            except RemoteExistsError:
                outcomes[number] = "exists"

    writers = [threading.Thread(target=write, args=(number,)) for number in range(WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(LIMIT_SECONDS)

    assert sorted(outcomes.values()) == ["done"] + ["exists"] * (WRITERS - 1)
    winner = next(number for number, outcome in outcomes.items() if outcome == "done")
    assert (tmp_path / "there/folder/name").read_bytes() == b"bytes of %d" % winner
    assert sorted(path.name for path in (tmp_path / "there").rglob("*")) == ["folder", "name"]


def test_a_taken_name_is_refused(sshd_login, connect, make_file, tmp_path):
    """The object stays unchanged."""
    store = connect(sshd_login)
    with Body(make_file("one", b"1"), "a") as one, Body(make_file("two", b"2"), "b") as two:
        store.put("name", one, overwrite=False)
        with pytest.raises(RemoteExistsError):
            store.put("name", two, overwrite=False)

    assert (tmp_path / "there/name").read_bytes() == b"1"


def test_a_server_whose_rename_replaces_is_detected(tmp_path, connect, make_file):
    """Nothing is put create-only, and no probe stays behind."""
    with careless_sftp(tmp_path) as login:
        store = connect(login, create_only="require")
        with Body(make_file(), "id") as body:
            with pytest.raises(RejectedByStoreError, match=r"ignores no-replace renames.*create_only=auto"):
                store.put("name", body, overwrite=False)
            store.put("name", body, overwrite=True)

    assert [path.name for path in (tmp_path / "there").iterdir()] == ["name"]


def test_a_server_without_create_only_is_asked_for_the_name(tmp_path, connect, make_file, caplog):
    """The target is looked up, and the log explains the risk."""
    with careless_sftp(tmp_path) as login:
        store = connect(login)
        with Body(make_file(), "id") as body:
            store.put("name", body, overwrite=False)
            with pytest.raises(RemoteExistsError):
                store.put("name", body, overwrite=False)

    assert caplog.text.count("may overwrite each other") == 1


def test_leftovers_of_killed_writers_are_swept(sshd_login, connect, make_file, tmp_path):
    """Partial files that are an hour old are removed, newer ones stay, and none is listed."""
    folder = tmp_path / "there"
    folder.mkdir()
    past = time.time() - HOUR_AGO
    old = [".uploads-partial-dead"]
    new = [".uploads-partial-live"]
    for name in (*old, *new):
        (folder / name).write_bytes(b"half")
    for name in old:
        os.utime(folder / name, (past, past))
    store = connect(sshd_login)

    with Body(make_file(), "id") as body:
        store.put("name", body, overwrite=True)

    assert sorted(path.name for path in folder.iterdir()) == sorted([*new, "name"])
    assert [found.name for found in store.list()] == ["name"]
