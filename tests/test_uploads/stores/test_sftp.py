"""SFTP: one winner of two create-only writers, and nothing left of writers that were killed."""

import os
import threading
import time

import pytest

from tests.servers.careless_sftp import IgnoresExclusiveFlag, RenameReplaces, careless_sftp
from uploads.errors import RejectedByStoreError, RemoteExistsError, TransientStoreError
from uploads.names import name_key
from uploads.stores import Body
from uploads.stores.sftp import SftpStore

WRITERS = 4
HOUR_AGO = 2 * 3600
LIMIT_SECONDS = 120


@pytest.fixture(params=["openssh", "rename replaces"])
def login(request, tmp_path):
    """A real sshd, and a server whose RENAME replaces the target."""
    if request.param == "openssh":
        yield request.getfixturevalue("sshd_login")
        return
    with careless_sftp(tmp_path, RenameReplaces) as login:
        yield login


@pytest.fixture
def connect(tmp_path):
    """Makes stores of one folder; closes their connections."""
    stores = []

    def make(login, **options):
        stores.append(SftpStore(root=str(tmp_path / "there"), **login, **options))
        return stores[-1]

    yield make
    for store in stores:
        store.renew()


def _claim(folder, name):
    return folder / f".uploads-claim-{name_key(name)}"


def test_of_two_create_only_writers_one_wins(login, connect, make_file, tmp_path):
    """Of writers that race for a name exactly one is done, its bytes are there, and no claim stays."""
    outcomes = {}
    barrier = threading.Barrier(WRITERS)

    def write(number):
        with Body(make_file(f"from-{number}", b"bytes of %d" % number), f"entry-{number}") as body:
            store = connect(login)
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


def test_a_taken_name_is_refused(login, connect, make_file, tmp_path):
    """RENAME alone would replace it."""
    store = connect(login)
    with Body(make_file("one", b"1"), "a") as one, Body(make_file("two", b"2"), "b") as two:
        store.put("name", one, overwrite=False)
        with pytest.raises(RemoteExistsError):
            store.put("name", two, overwrite=False)

    assert (tmp_path / "there/name").read_bytes() == b"1"


def test_a_server_that_ignores_the_exclusive_flag_is_detected(tmp_path, connect, make_file):
    """Nothing is put there create-only, and no probe stays behind."""
    with careless_sftp(tmp_path, IgnoresExclusiveFlag) as login:
        store = connect(login, create_only="require")
        with Body(make_file(), "id") as body:
            with pytest.raises(
                RejectedByStoreError, match=r"ignores SFTP's exclusive flag.*create_only=auto"
            ):
                store.put("name", body, overwrite=False)
            store.put("name", body, overwrite=True)

    assert [path.name for path in (tmp_path / "there").iterdir()] == ["name"]


@pytest.mark.parametrize("policy", [{}, {"create_only": "head"}], ids=["default", "head"])
def test_such_a_server_is_asked_for_the_name(tmp_path, connect, make_file, caplog, policy):
    """By default, and by the earlier name, the target is checked for, and the log says what may happen."""
    with careless_sftp(tmp_path, IgnoresExclusiveFlag) as login:
        store = connect(login, **policy)
        with Body(make_file(), "id") as body:
            store.put("name", body, overwrite=False)
            with pytest.raises(RemoteExistsError):
                store.put("name", body, overwrite=False)

    assert caplog.text.count("may overwrite each other") == 1
    assert ("create_only=head" in store.uri()) is bool(policy)


def test_the_claim_of_a_live_writer_is_respected(sshd_login, connect, make_file, tmp_path):
    """The upload is tried again later."""
    folder = tmp_path / "there"
    folder.mkdir()
    _claim(folder, "name").write_text("another entry")

    with Body(make_file(), "id") as body, pytest.raises(TransientStoreError, match="claim"):
        connect(sshd_login).put("name", body, overwrite=False)

    assert [path.name for path in folder.iterdir()] == [_claim(folder, "name").name]


@pytest.mark.parametrize("owner", ["this entry", "another entry"])
def test_the_claim_of_a_killed_writer_does_not_block_for_ever(
    sshd_login, connect, make_file, tmp_path, owner
):
    """The same entry takes it over at once; another one removes it when it is an hour old."""
    folder = tmp_path / "there"
    folder.mkdir()
    _claim(folder, "name").write_text(owner)
    if owner == "another entry":
        past = time.time() - HOUR_AGO
        os.utime(_claim(folder, "name"), (past, past))

    with Body(make_file(), "this entry") as body:
        connect(sshd_login).put("name", body, overwrite=False)

    assert [path.name for path in folder.iterdir()] == ["name"]


def test_what_killed_writers_left_is_swept(sshd_login, connect, make_file, tmp_path):
    """Partial files and claims that are an hour old; newer ones stay. None of them is listed."""
    folder = tmp_path / "there"
    folder.mkdir()
    past = time.time() - HOUR_AGO
    old = [".uploads-partial-dead", _claim(folder, "dead").name]
    new = [".uploads-partial-live", _claim(folder, "live").name]
    for name in (*old, *new):
        (folder / name).write_bytes(b"half")
    for name in old:
        os.utime(folder / name, (past, past))
    store = connect(sshd_login)

    with Body(make_file(), "id") as body:
        store.put("name", body, overwrite=True)

    assert sorted(path.name for path in folder.iterdir()) == sorted([*new, "name"])
    assert [found.name for found in store.list()] == ["name"]
