"""A window on the spool: what is in memory of a long backlog, and that nothing else changes for it."""

import threading
import time
import tracemalloc

import pytest

from tests.servers.stores import MemoryStore
from uploads import UploadState
from uploads.drain.drain import Drain
from uploads.drain.schedule import Counts, Past, Reader, Reading, Schedule, Standing
from uploads.drain.worker_link import WorkerLink, WorkerOrder
from uploads.handle import UploadHandle
from uploads.ledger import Ledger
from uploads.spool.entry import Entry, folder_of, identifier_of
from uploads.spool.spool import Spool

LIMIT_SECONDS = 60
WINDOW = 8


class SpoolThatCountsListings(Spool):
    """Knows how often its waiting entries were listed."""

    listings = 0

    def pending_folders(self):
        self.listings += 1
        return super().pending_folders()


@pytest.fixture
def spool(tmp_path):
    """An empty spool."""
    spool = SpoolThatCountsListings(tmp_path / "spool")
    spool.create()
    return spool


@pytest.fixture
def publish(spool):
    """Puts entries into the spool behind the drain's back: name after name, with what each comes after."""
    numbers = iter(range(1, 10_000))

    def publish(name, after=()):
        number = next(numbers)
        entry = Entry(f"{number:016x}", number, name, True, 1, None, "copied", "", tuple(after), "")  # noqa: FBT003  # overwrite
        staged = spool.new_folder()
        (staged / "data").write_bytes(b"x")
        spool.write_manifest(staged, entry)
        spool.publish(staged, entry, to_disk=False)
        return entry.identifier

    return publish


@pytest.fixture
def run_drain(spool):
    """Drains the spool with a small window; returns how each entry ended, in order."""
    drains = []

    def run(store, workers=1):
        outcomes = []
        drain = Drain(
            spool,
            store,
            workers=workers,
            on_settled=lambda folder, outcome: outcomes.append(outcome),
            window=WINDOW,
        )
        drains.append(drain)
        drain.start()
        assert drain.wait_idle(LIMIT_SECONDS)
        drain.stop(LIMIT_SECONDS)
        return outcomes

    yield run
    for drain in drains:
        drain.stop(LIMIT_SECONDS)


class StoreThatLooksAtTheSchedule(MemoryStore):
    """Notes at each put how many entries the schedule has in memory."""

    schedule = None

    def __init__(self):
        super().__init__()
        self.known = []

    def put(self, name, body, *, overwrite, notes=None):
        super().put(name, body, overwrite=overwrite, notes=notes)
        self.known.append(len(self.schedule._known))


def test_a_long_backlog_is_read_window_by_window(spool, publish):
    """Two hundred entries arrive in order; never more than a window of them is in memory, and the spool is listed a few times per window."""
    names = [f"n{number:03d}" for number in range(200)]
    for name in names:
        publish(name)
    store = StoreThatLooksAtTheSchedule()
    drain = Drain(spool, store, workers=1, window=WINDOW)
    store.schedule = drain._schedule

    drain.start()
    assert drain.wait_idle(LIMIT_SECONDS)
    drain.stop(LIMIT_SECONDS)

    assert store.order == names
    assert max(store.known) <= WINDOW
    assert spool.listings <= 2 * (200 // (WINDOW - WINDOW // 4 - 1) + 5)


def test_a_newer_version_replaces_an_older_one_from_beyond_the_window(publish, run_drain):
    """However much lies between them, the older is not sent."""
    publish("a")
    for number in range(5 * WINDOW):
        publish(f"n{number}")
    newest = publish("a")
    store = MemoryStore()

    outcomes = run_drain(store)

    assert (outcomes[0].state, outcomes[0].superseded_by) == (UploadState.SUPERSEDED, newest)
    assert (store.puts["a"], store.order[-1]) == (1, "a")


def test_a_pointer_waits_for_what_took_its_targets_place_beyond_the_window(publish, run_drain):
    """The newer version is far away and not in memory; the pointer is not visible before it."""
    target = publish("target")
    publish("pointer", after=[target])
    for number in range(5 * WINDOW):
        publish(f"n{number}")
    publish("target")
    store = MemoryStore()

    run_drain(store, workers=4)

    assert store.order.index("pointer") > store.order.index("target")
    assert len(store.order) == 5 * WINDOW + 2


def test_a_window_full_of_what_waits_for_what_is_beyond_is_read_on(publish, run_drain):
    """More pointers than the window's limit, each to an older version of one name: they wait for the newest, which is read in the end."""
    for number in range(5 * WINDOW):
        publish(f"pointer{number}", after=[publish("target")])
    store = MemoryStore()

    run_drain(store)

    assert store.puts["target"] == 1
    assert store.order[0] == "target"
    assert len(store.order) == 5 * WINDOW + 1


def test_what_took_ones_place_and_was_deleted_is_not_waited_for():
    """When the whole rest of the spool has been read and it is not there, the store is asked."""
    schedule = Schedule(time.monotonic, window=2)
    target, pointer, other = (
        Entry(f"{number:016x}", number, name, True, 0, None, "copied", "", (), "").folder  # noqa: FBT003  # overwrite
        for number, name in enumerate(("target", "pointer", "other"), start=1)
    )
    schedule.add([target, pointer, other])
    schedule.settle(schedule.next(0), replaced_by="00000000000000ff")
    assert schedule.hold(schedule.next(0), [identifier_of(target)]) is Standing.HELD
    assert schedule.next(0) is None

    schedule.begin_reading()
    schedule.take_in(Reading(set(), {}, 0), lambda folder: True)

    assert schedule.next(0) == pointer
    assert schedule.hold(pointer, [identifier_of(target)]) is Standing.UNKNOWN


class SpoolWithAnOldListing(Spool):
    """Its first listing shows an entry and not what was there before it, as a folder may that changes while it is listed."""

    hidden = ""

    def pending_folders(self):
        hidden, self.hidden = self.hidden, ""
        return (folder for folder in super().pending_folders() if folder != hidden)


def test_what_a_pointer_comes_after_is_found_with_it(spool, publish):
    """A listing made while both appear may show the pointer alone; it is made again before anything is believed."""
    target = publish("target")
    publish("pointer", after=[target])
    odd, schedule = SpoolWithAnOldListing(spool.path), Schedule(time.monotonic)
    odd.hidden = spool.list_pending()[0]

    Reader(odd, schedule).read()

    assert [schedule.next(0), schedule.next(0)] == spool.list_pending()


def test_entries_that_are_announced_while_the_window_is_full_are_counted_only(spool, publish):
    """They are found when their turn comes; nothing is taken for empty before."""
    schedule = Schedule(time.monotonic, window=2)
    reader = Reader(spool, schedule)
    for number in range(10):
        publish(f"n{number}")
    schedule.add(spool.list_pending())
    given = [schedule.next(0), schedule.next(0)]

    assert (len(schedule._known), schedule.counts()) == (2, Counts(8, 2))
    assert schedule.next(0) is None
    assert not schedule.wait_idle(0)

    reader.read_if_low()
    given += [schedule.next(0), schedule.next(0)]
    assert given == spool.list_pending()[:4]
    assert schedule.counts() == Counts(6, 4)


def test_what_waits_takes_nothing_of_the_drain_and_fifty_bytes_of_the_queue(spool):
    """Fault 40: of twenty thousand entries beyond the window the drain keeps nothing, and the queue its names, packed; both measured, at a benchmark of a hundred thousand too."""
    schedule, ledger = Schedule(time.monotonic, window=256), Ledger(spool, lambda size: None)
    folders = (folder_of(number, f"{number * 7919:016x}", f"{number:016x}") for number in range(1, 21_001))

    def submit(count, take):
        for _, folder in zip(range(count), folders, strict=False):
            take(folder)

    submit(500, lambda folder: schedule.add([folder]))
    tracemalloc.start()
    try:
        start = tracemalloc.get_traced_memory()[0]
        submit(10_000, lambda folder: schedule.add([folder]))
        scheduled = tracemalloc.get_traced_memory()[0]
        submit(10_000, lambda folder: ledger.open(folder, _handle(folder)))
        opened = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

    assert (len(schedule._known), schedule.counts().waiting) == (256, 10_500)
    assert ledger.count() == 10_000
    assert len(ledger._handles) == 0
    assert (scheduled - start) / 10_000 < 1
    assert (
        opened - scheduled
    ) / 10_000 < 75  # 24 for the folder and 32 for the name at most, and room to grow.


def _handle(folder):
    return UploadHandle(identifier_of(folder), "name", str, lambda folder: None)


def test_what_was_deleted_beyond_the_window_is_missed_in_the_end(spool, publish):
    """Nobody tells of an entry that was never in memory; whoever submitted it finds that it is gone, and leaves alone one that is just coming."""
    ledger = Ledger(spool, lambda size: None)
    publish("gone")
    publish("coming")
    gone, coming = spool.list_pending()
    handles = [UploadHandle(identifier_of(folder), "name", str, ledger.state_of) for folder in (gone, coming)]
    ledger.open(gone, handles[0])
    ledger.confirm(gone)
    ledger.open(coming, handles[1])
    for folder in (gone, coming):
        (spool.pending / folder).rename(spool.tmp / folder)

    ledger.look_up()
    assert not handles[0].done()
    ledger.look_up()

    assert handles[0].state is UploadState.LOST
    assert [handle.done() for handle in handles] == [True, False]


class ClockThatRuns:
    """Ten seconds pass between any two looks at it."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 10.0
        return self.now


def test_a_drain_with_nothing_left_says_so(spool):
    """So that who submitted can look for what was lost."""
    idle = threading.Event()
    drain = Drain(spool, MemoryStore(), on_idle=idle.set, clock=ClockThatRuns())

    drain.start()

    assert idle.wait(LIMIT_SECONDS)
    drain.stop(LIMIT_SECONDS)


def test_the_queue_looks_when_its_drain_is_idle(make_queue):
    """Twice in vain is enough: the entry was deleted."""
    queue = make_queue(MemoryStore())
    folder = folder_of(1, "0" * 16, "1" * 16)
    handle = UploadHandle("1" * 16, "name", str, queue._ledger.state_of)
    queue._ledger.open(folder, handle)
    queue._ledger.confirm(folder)

    queue._drainer._on_idle()
    queue._drainer._on_idle()

    assert [failure.remote_name for failure in queue.drain(LIMIT_SECONDS).failures] == ["name"]
    assert handle.state is UploadState.LOST


def test_the_queue_looks_when_its_worker_is_idle():
    """The worker's word has the same effect, and is no claim to the spool."""
    looks = []
    order = WorkerOrder("spool", "/store", {}, 1, 0.0)
    link = WorkerLink(order, on_settled=lambda *_: None, look_up=lambda: looks.append("look"))

    settled = [link._hear(b'{"idle": true}'), link._hear(b'{"owner": 1}')]

    assert (settled, looks) == ([False, False], ["look", "look"])


def test_the_past_is_forgotten_when_it_no_longer_matters():
    """Of a thousand versions that one replaced nothing is kept once that one is there; where it failed they count as failed."""
    past = Past()
    for older in range(1, 1001):
        past.settle(older, replaced_by=5000)
    assert (past.newest(7), len(past)) == (5000, 1000)

    past.settle(5000, replaced_by=6000)
    assert (past.newest(7), len(past)) == (6000, 1001)
    past.settle(6000)
    assert (past.newest(7), len(past)) == (7, 0)

    past.settle(1, replaced_by=2)
    past.settle(2, failed=True)
    assert past.has_failed(past.newest(1))
