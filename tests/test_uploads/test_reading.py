"""A long backlog is read from the spool at once, and unannounced entries are found."""

import time
import tracemalloc

import pytest

from tests.servers.stores import MemoryStore
from uploads import UploadState
from uploads.drain.drain import Drain
from uploads.drain.schedule import History, Schedule
from uploads.drain.supervisor import WorkerConfig, WorkerSupervisor
from uploads.handle import UploadHandle
from uploads.ledger import Ledger
from uploads.spool.entry import Entry, folder_name, identifier_of
from uploads.spool.spool import Spool

LIMIT_SECONDS = 60
BACKLOG = 40


@pytest.fixture
def spool(tmp_path):
    """An empty spool."""
    spool = Spool(tmp_path / "spool")
    spool.create()
    return spool


@pytest.fixture
def publish(spool):
    """Puts entries into the spool without telling the drain: each name, with the entries that it depends on."""
    numbers = iter(range(1, 10_000))

    def publish(name, after=()):
        number = next(numbers)
        entry = Entry(
            f"{number:016x}",
            number,
            name,
            True,  # noqa: FBT003  # overwrite
            1,
            None,
            "copied",
            "",
            dict.fromkeys(after, "target"),
            "",
        )
        staged = spool.new_folder()
        (staged / "data").write_bytes(b"x")
        spool.write_manifest(staged, entry)
        spool.publish(staged, entry, to_disk=False)
        return entry.identifier

    return publish


@pytest.fixture
def run_drain(spool):
    """Drains the spool; returns how each entry ended, in order."""
    drains = []

    def run(store, workers=1):
        outcomes = []
        drain = Drain(
            spool,
            store,
            workers=workers,
            on_settled=lambda folder, outcome: outcomes.append(outcome),
        )
        drains.append(drain)
        drain.start()
        assert drain.wait_idle(LIMIT_SECONDS)
        drain.stop(LIMIT_SECONDS)
        return outcomes

    yield run
    for drain in drains:
        drain.stop(LIMIT_SECONDS)


def test_a_newer_version_replaces_an_older_one_at_the_other_end_of_the_backlog(publish, run_drain):
    """The older one is not sent, however many entries lie between them."""
    publish("a")
    for number in range(BACKLOG):
        publish(f"n{number}")
    newest = publish("a")
    store = MemoryStore()

    outcomes = run_drain(store)

    assert (outcomes[0].state, outcomes[0].superseded_by) == (UploadState.SUPERSEDED, newest)
    assert (store.puts["a"], store.order[-1]) == (1, "a")


def test_many_pointers_wait_for_one_target(publish, run_drain):
    """Each points to an older version of one name; all wait for the newest."""
    for number in range(BACKLOG):
        publish(f"pointer{number}", after=[publish("target")])
    store = MemoryStore()

    run_drain(store)

    assert store.puts["target"] == 1
    assert store.order[0] == "target"
    assert len(store.order) == BACKLOG + 1


class SpoolWithAnOldListing(Spool):
    """Its first listing shows an entry without an earlier one, as may happen in a folder that changes meanwhile."""

    hidden = ""

    def pending_folders(self):
        hidden, self.hidden = self.hidden, ""
        return (folder for folder in super().pending_folders() if folder != hidden)


def test_a_pointer_and_its_target_are_found_together(spool, publish):
    """A listing made while both appear may show the pointer alone.

    It is created again before anything is trusted.
    """
    target = publish("target")
    publish("pointer", after=[target])
    odd = SpoolWithAnOldListing(spool.path)
    odd.hidden = spool.list_pending()[0]
    drain = Drain(odd, MemoryStore())

    drain.rescan()

    assert [drain._schedule.next(0), drain._schedule.next(0)] == spool.list_pending()


def test_memory_per_waiting_entry(spool):
    """Ten thousand waiting entries take at most 600 bytes each: their folder names, the schedule and the ledger."""
    schedule, ledger = Schedule(time.monotonic), Ledger(spool, lambda size: None)
    count = 10_000
    tracemalloc.start()
    try:
        start = tracemalloc.get_traced_memory()[0]
        for number in range(count):
            folder = folder_name(number, f"{number * 7919:016x}", f"{number:016x}")
            ledger.add(folder, _handle(folder))
            schedule.add([folder])
        grown = tracemalloc.get_traced_memory()[0] - start
    finally:
        tracemalloc.stop()

    assert (schedule.counts()[0], ledger.count()) == (count, count)
    assert len(ledger._handles) == 0
    assert grown / count <= 600


def _handle(folder):
    return UploadHandle(identifier_of(folder), "name", str, lambda folder: None)


def test_an_entry_that_was_deleted_before_the_drain_saw_it_is_reported_lost(spool, publish):
    """The queue finds that it is gone at the second look, and does not take one that is being submitted for lost."""
    ledger = Ledger(spool, lambda size: None)
    publish("gone")
    publish("coming")
    gone, coming = spool.list_pending()
    handles = [UploadHandle(identifier_of(folder), "name", str, ledger.state_of) for folder in (gone, coming)]
    ledger.add(gone, handles[0])
    ledger.confirm(gone)
    ledger.add(coming, handles[1])
    for folder in (gone, coming):
        (spool.pending / folder).rename(spool.tmp / folder)

    ledger.reconcile()
    assert not handles[0].done()
    ledger.reconcile()

    assert handles[0].state is UploadState.LOST
    assert [handle.done() for handle in handles] == [True, False]


def test_the_queue_looks_when_its_drain_is_idle(make_queue):
    """An entry that is missing at two looks was deleted."""
    queue = make_queue(MemoryStore())
    folder = folder_name(1, "0" * 16, "1" * 16)
    handle = UploadHandle("1" * 16, "name", str, queue._ledger.state_of)
    queue._ledger.add(folder, handle)
    queue._ledger.confirm(folder)

    queue._drainer._on_idle()
    queue._drainer._on_idle()

    assert [failure.remote_name for failure in queue.drain(LIMIT_SECONDS).failures] == ["name"]
    assert handle.state is UploadState.LOST


def test_the_queue_looks_when_its_worker_is_idle():
    """A worker's message has the same effect, and doesn't lock the spool."""
    looks = []
    order = WorkerConfig("spool", "/store", {}, 1)
    link = WorkerSupervisor(order, on_settled=lambda *_: None, look_up=lambda: looks.append("look"))

    settled = [link._handle(b'{"idle": true}'), link._handle(b'{"owner": 1}')]

    assert (settled, looks) == ([False, False], ["look", "look"])


def test_the_history_of_replaced_entries_is_dropped_when_the_replacement_settles():
    """Once the last of a thousand versions is delivered, nothing is kept about the others.

    If it failed, they count as failed.
    """
    history = History()
    for older in range(1, 1001):
        history.record(str(older), replaced_by="5000")
    assert (history.current("7"), len(history)) == ("5000", 1000)

    history.record("5000", replaced_by="6000")
    assert (history.current("7"), len(history)) == ("6000", 1001)
    history.record("6000")
    assert (history.current("7"), len(history)) == ("7", 0)

    history.record("1", replaced_by="2")
    history.record("2", failed=True)
    assert history.has_failed(history.current("1"))
