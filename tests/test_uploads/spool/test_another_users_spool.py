"""Spools that another user owns, and what they could do with another user's rights."""

import json
import os
import sys

import pytest

from tests.servers.stores import MemoryStore
from uploads import UploadQueue
from uploads.command_line import EXIT_FAILED, EXIT_OK, gc, main, resume, status, verify
from uploads.errors import SpoolUnusableError
from uploads.spool.spool import Spool

ANOTHER_USER = 12345

by_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@pytest.fixture
def theirs(make_queue, make_file, tmp_path):
    """A spool of another user, which asks to have a file written outside."""
    queue = make_queue(tmp_path / "store")
    queue.close(0)
    for path in (queue.spool.path, *queue.spool.path.rglob("*")):
        os.chown(path, ANOTHER_USER, ANOTHER_USER)
    return queue.spool


@by_root
@pytest.mark.parametrize("command", [resume, gc, verify])
def test_a_command_refuses_another_users_spool_without_trust(theirs, command):
    """The owner of a spool decides where files are written with your rights."""
    with pytest.raises(SpoolUnusableError, match="--trust"):
        command(theirs.path)

    command(theirs.path, trust=True)


@by_root
def test_trust_is_an_option_of_the_command_line(theirs, capsys):
    """`status` only reads, so it doesn't need it."""
    assert main(["resume", str(theirs.path)]) == EXIT_FAILED
    assert f"got user {ANOTHER_USER}" in capsys.readouterr().err
    assert main(["status", str(theirs.path)]) == EXIT_OK
    assert main(["resume", str(theirs.path), "--trust"]) == EXIT_OK


@by_root
def test_a_queue_refuses_another_users_spool(theirs, tmp_path):
    """Its files would go to this user's store."""
    with pytest.raises(SpoolUnusableError, match="must belong to user 0"):
        UploadQueue(tmp_path / "store", spool=theirs.path)


@by_root
def test_a_foreign_description_is_not_trusted(tmp_path):
    """The owner of the spool's folder can replace the file that names the store."""
    spool = Spool(tmp_path / "spool")
    spool.create({"uri": (tmp_path / "store").as_uri()})
    (spool.path / "spool.json").unlink()
    (spool.path / "spool.json").write_text(json.dumps({"version": 1, "store": {"uri": "file:///etc"}}))
    os.chown(spool.path / "spool.json", ANOTHER_USER, ANOTHER_USER)

    with pytest.raises(SpoolUnusableError, match=f"got user {ANOTHER_USER}"):
        resume(spool.path)


@pytest.mark.parametrize("name", ["pending", "inflight", "done", "failed", "failed/corrupt", "tmp"])
def test_a_folder_of_the_spool_that_is_a_link_is_refused_even_when_trusted(tmp_path, name):
    """Files behind the link don't belong to the spool."""
    spool = Spool(tmp_path / "spool")
    spool.create()
    (tmp_path / "outside").mkdir()
    (spool.path / name).rename(tmp_path / "was")
    (spool.path / name).symlink_to(tmp_path / "outside")

    for command in (resume, gc, verify):
        with pytest.raises(SpoolUnusableError, match="got a symlink"):
            command(spool.path, store=MemoryStore(), trust=True)
    with pytest.raises(SpoolUnusableError, match="got a symlink"):
        UploadQueue(tmp_path / "store", spool=spool.path)


def test_texts_of_a_spool_are_shown_escaped(tmp_path, capsys):
    """A name or reason can't clear the screen or overwrite a line."""
    spool = Spool(tmp_path / "spool")
    spool.create()
    failed = spool.failed / "rejected" / f"{1:012d}-{'0' * 16}-{'1' * 16}"
    failed.mkdir()
    (failed / "reason.json").write_text(
        json.dumps(
            {
                "identifier": "1" * 16,
                "remote_name": "a\x1b[2J\rb\u202ec",
                "state": "rejected",
                "reason": "\x9b31m" + os.fsdecode(b"caf\xe9"),
            }
        )
    )

    main(["status", str(spool.path)])

    shown = capsys.readouterr().out
    assert r"rejected a\x1b[2J\rb\u202ec: \x9b31mcaf\udce9" in shown
    assert shown.isascii() or sys.stdout.encoding.lower() == "utf-8"
    assert status(spool.path)["failures"][0]["remote_name"].startswith("a\x1b")
