"""SFTP: one of two create-only writers wins, and killed writers leave nothing."""

import os
import time

import pytest

from tests.servers.careless_sftp import careless_sftp
from tests.servers.sshd import over_ssh
from uploads.errors import RejectedByStoreError, RemoteExistsError
from uploads.stores import Body

HOUR_AGO = 2 * 3600


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
