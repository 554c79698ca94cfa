"""Numbers of entries, uploads that depend on others, callbacks that raise, and arguments of waits."""

import contextlib
import logging
import math
import shutil
import time

import pytest

from tests.servers.stores import MemoryStore, StoreThatRejects, StoreThatWaits
from tests.test_uploads.conftest import SOON
from uploads import Timeouts, UploadQueue, UploadState
from uploads.command_line import main
from uploads.drain.drain import Drain
from uploads.spool.ownership import owner_of
from uploads.spool.spool import Spool
from uploads.spool.staging import DiskQuota, Stager, Submission

LIMIT_SECONDS = 120


# Numbers.


def test_sequence_numbers_are_above_the_one_that_is_noted(make_queue, make_file, tmp_path):
    """An earlier process noted a number whose entries have left the spool."""
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool/sequence").write_bytes(b"000000005000")

    assert make_queue().submit(make_file(), "a").folder.startswith("000000005001-")
    assert (tmp_path / "spool/sequence").read_bytes() == b"000000005001"


@pytest.mark.parametrize("content", [b"", b"999999999999", b"\xff" * 40])
def test_a_damaged_counter_is_replaced(make_queue, make_file, tmp_path, content):
    """Numbers continue after the highest one in the spool."""
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool/sequence").write_bytes(content)
    queue = make_queue()

    handles = [queue.submit(make_file(), name) for name in ("a", "b")]

    assert [handle.result(LIMIT_SECONDS).state for handle in handles] == [UploadState.DONE] * 2
    assert handles[0].folder < handles[1].folder


# What comes after something.


def test_an_upload_that_depends_on_a_refused_one_is_refused(make_queue, make_file):
    """A pointer to a refused file would lead nowhere."""
    store = MemoryStore()
    queue = make_queue(store, spool_bytes=3)
    target = queue.submit(make_file(), "target")

    pointer = queue.submit_pointer("latest", target)
    file = queue.submit(make_file("small", b"s"), "small", after=[target])

    assert [one.state for one in (target, pointer, file)] == [UploadState.REFUSED] * 3
    assert "'target', failed" in str(pointer.exception(0))
    assert [failure.remote_name for failure in queue.close(LIMIT_SECONDS).failures] == [
        "target",
        "latest.symlink",
        "small",
    ]
    assert store.objects == {}


def test_an_upload_of_another_queue_must_be_waited_for_before_it_is_a_dependency(
    tmp_path, make_file, make_queue, gate
):
    """A pending handle of another queue is a bad argument, a delivered one is fine, and a failed one refuses the upload."""
    store = MemoryStore()
    other = UploadQueue(StoreThatWaits(gate), spool=tmp_path / "other", free_bytes=0)
    queue = make_queue(store)
    theirs = other.submit(make_file(), "target")
    try:
        with pytest.raises(ValueError, match="handles of this queue"):
            queue.submit_pointer("latest", theirs)
        with pytest.raises(ValueError, match="handles of this queue"):
            queue.submit(make_file(), "name", after=[theirs])

        gate.set()
        theirs.result(LIMIT_SECONDS)
        assert queue.submit_pointer("latest", theirs).result(LIMIT_SECONDS).state is UploadState.DONE
    finally:
        other.close(LIMIT_SECONDS)
    assert set(store.objects) == {"latest.symlink"}


def test_an_upload_that_depends_on_a_failed_one_of_another_queue_is_refused(tmp_path, make_file, make_queue):
    """It would wait for a file that this queue's store never gets."""
    other = UploadQueue(StoreThatRejects({"target"}), spool=tmp_path / "other", free_bytes=0)
    theirs = other.submit(make_file(), "target")
    assert theirs.exception(LIMIT_SECONDS)
    other.close(LIMIT_SECONDS)

    assert make_queue().submit_pointer("latest", theirs).state is UploadState.REFUSED


@pytest.fixture
def left(tmp_path, make_file):
    """A spool in which a pointer waits for a target that the spool has lost."""
    spool = Spool(tmp_path / "spool")
    spool.create()
    quota = DiskQuota(spool.path, spool_bytes=None, free_bytes=0, wait_seconds=0.0, clock=time.monotonic)
    stager = Stager(spool, quota)
    names = {}
    for name in ("target", "latest.symlink"):
        entry = stager.stage(
            f"{len(names) + 1:016x}",
            Submission(make_file(), name, overwrite=True, after=dict(names)),
            7,
            register=lambda _: None,
        )
        names[entry.identifier] = entry.remote_name
    shutil.rmtree(spool.pending / spool.list_pending()[0])
    return spool


def test_an_upload_that_depends_on_an_unknown_one_fails(left, make_queue):
    """The target was deleted unnoticed and isn't in the store, so the pointer is kept and not put."""
    store = MemoryStore()

    failures = make_queue(store).drain(LIMIT_SECONDS).failures

    assert [(failure.remote_name, failure.state) for failure in failures] == [("latest.symlink", "rejected")]
    assert len(left.list_failed()[UploadState.REJECTED]) == 1
    assert store.objects == {}


def test_an_upload_that_depends_on_an_object_in_the_store_is_put(left, make_queue):
    """The target's line in the log was lost, but the store has the object."""
    store = MemoryStore()
    store.objects["target"] = b"content"

    assert make_queue(store).drain(LIMIT_SECONDS).is_empty

    assert set(store.objects) == {"target", "latest.symlink"}


# Callbacks and handlers that raise.


class HandlerThatRaises(logging.Handler):
    """It stands for a handler that sends records to a service that is down."""

    def emit(self, record):
        raise ConnectionError("the service is down")


@contextlib.contextmanager
def _raising_log():
    handler = HandlerThatRaises()
    logging.getLogger("uploads").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("uploads").removeHandler(handler)


def test_a_log_handler_that_raises_keeps_no_upload_from_its_end(make_queue, make_file):
    """A raising log handler prevents no upload from ending, even if an entry fails."""
    store = StoreThatRejects({"bad"})
    queue = make_queue(store, workers=1)

    with _raising_log():
        bad = queue.submit(make_file(), "bad")
        good = queue.submit(make_file(), "good")

        assert bad.exception(LIMIT_SECONDS) is not None
        assert good.result(LIMIT_SECONDS).state is UploadState.DONE
    assert len(queue.spool.list_failed()[UploadState.REJECTED]) == 1


class Stop(BaseException):
    """A BaseException that is no Exception."""


@pytest.mark.parametrize("error", [ValueError, Stop, SystemExit])
def test_a_raising_callback_affects_only_itself(tmp_path, make_file, error):
    """The drain's threads survive exceptions of its callbacks."""
    spool = Spool(tmp_path / "spool")
    store = MemoryStore()
    with UploadQueue(store, spool=spool.path, free_bytes=0, close_at_exit=False) as queue:
        queue.drain(LIMIT_SECONDS)
    heard = []

    def raises(folder, outcome):
        heard.append(outcome.remote_name)
        raise error("callback")

    drain = Drain(spool, store, workers=1, policy=SOON, on_settled=raises)
    drain.start()
    quota = DiskQuota(spool.path, spool_bytes=None, free_bytes=0, wait_seconds=0.0, clock=time.monotonic)
    stager = Stager(spool, quota)
    for number in range(3):
        entry = stager.stage(
            f"{number + 1:016x}", Submission(make_file(), f"n{number}"), 7, register=lambda _: None
        )
        drain.add([entry.folder])

    assert drain.wait_idle(LIMIT_SECONDS)

    drain.stop(LIMIT_SECONDS)
    assert (heard, sorted(store.objects)) == (["n0", "n1", "n2"], ["n0", "n1", "n2"])
    assert owner_of(spool.drain_lock) is None


# Arguments.


def test_waits_may_be_infinite(make_queue, make_file):
    """`math.inf` works, although Python's waits don't accept it."""
    limits = Timeouts(exit_seconds=math.inf, give_back_seconds=math.inf, full_wait_seconds=math.inf)
    queue = make_queue(timeouts=limits)
    handle = queue.submit(make_file(), "a")

    assert handle.result(math.inf).state is UploadState.DONE
    assert queue.drain(math.inf).is_empty
    assert queue.close(math.inf).is_empty


@pytest.mark.parametrize(
    "name", ["exit_seconds", "give_back_seconds", "grace_seconds", "full_wait_seconds", "timeout_seconds"]
)
def test_negative_and_missing_durations_are_bad_arguments(make_queue, name):
    """They raise at once and name the argument; a `close` that raises has not closed."""
    act = make_queue().close if name == "timeout_seconds" else lambda value: Timeouts(**{name: value})

    for seconds in (-1.0, math.nan):
        with pytest.raises(ValueError, match=f"{name} must be a number of seconds"):
            act(seconds)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "0"], "workers must be at least 1, got 0"),
        (["--workers", "two"], "--workers"),
        (["--timeout", "-1"], "invalid duration '-1'"),
        (["--timeout", "nan"], "invalid duration 'nan'"),
    ],
)
def test_bad_options_of_resume_are_wrong_usage(tmp_path, capsys, arguments, said):
    """They end with exit code 2 and a message, and none waits forever."""
    with pytest.raises(SystemExit) as ended:
        main(["resume", str(tmp_path), *arguments])

    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_resume_may_take_for_ever(make_queue, tmp_path, make_file, capsys):
    """`--timeout inf` means no limit."""
    store = tmp_path / "store"
    with make_queue(str(store)) as queue:
        queue.submit(make_file(), "a").result(LIMIT_SECONDS)

    assert main(["resume", str(queue.spool.path), "--timeout", "inf"]) == 0


def test_a_delivered_entry_that_was_half_removed_is_removed(make_queue, make_file):
    """A process was killed while it removed a logged entry; nothing of it stays in `done/`."""
    queue = make_queue()
    folder = queue.submit(make_file(), "a").result(LIMIT_SECONDS) and queue.submit(make_file(), "b").folder
    assert queue.close(LIMIT_SECONDS).is_empty
    (queue.spool.done / folder).mkdir()

    assert make_queue().drain(LIMIT_SECONDS).is_empty

    assert queue.spool.list_done() == []
