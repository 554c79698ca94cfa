"""`put_new`: if processes put one small object at once, exactly one wins, whatever the store supports."""

import contextlib
import heapq
import random
import threading

import pytest

from tests.servers.stores import MemoryStore
from tests.test_uploads.conftest import LIMIT_SECONDS
from uploads import LocalStore, open_store, put_new

PROCESSES = 4


class KilledError(BaseException):
    """The process ends between two requests."""


class Time:
    """Lets threads take turns in simulated time, which requests and pauses consume."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.turns = []
        self.running = threading.Semaphore(0)

    def spend(self, seconds):
        """Waits until the simulated time of this thread has come."""
        me = threading.Semaphore(0)
        heapq.heappush(self.turns, (self.now() + seconds, self.draw.random(), me))
        self.running.release()
        assert me.acquire(timeout=LIMIT_SECONDS)

    def now(self):
        return getattr(self, "_now", 0.0)

    def run(self, works):
        """Runs the threads to their end."""
        threads = [threading.Thread(target=self._begin, args=(work,), daemon=True) for work in works]
        for thread in threads:
            thread.start()
            assert self.running.acquire(timeout=LIMIT_SECONDS)
        left = len(threads)
        while left:
            self._now, _, turn = heapq.heappop(self.turns)
            turn.release()
            assert self.running.acquire(timeout=LIMIT_SECONDS)
            left -= self.has_ended
            self.has_ended = False
        for thread in threads:
            thread.join(LIMIT_SECONDS)

    has_ended = False

    def _begin(self, work):
        self.spend(self.draw.random() * 2)
        with contextlib.suppress(KilledError):
            work()
        self.has_ended = True
        self.running.release()


class Overwriting(MemoryStore):
    """Overwrites an existing object, and answers after some time; any request may kill its process."""

    def __init__(self, time, kills=0.0):
        super().__init__()
        self.time = time
        self.kills = kills

    def refuses_overwrite(self):
        return False

    def _answered(self, call, *arguments, **options):
        if self.time.draw.random() < self.kills:
            raise KilledError
        # Before and after: the server acts somewhere in between.
        self.time.spend(self.time.draw.uniform(0.001, 0.5))
        found = call(*arguments, **options)
        self.time.spend(self.time.draw.uniform(0.001, 0.5))
        return found

    def put(self, name, body, *, overwrite, notes=None):
        return self._answered(super().put, name, body, overwrite=True)

    def head(self, name):
        return self._answered(super().head, name)

    def list(self, prefix=""):
        return self._answered(super().list, prefix)

    def delete(self, name):
        return self._answered(super().delete, name)


@pytest.mark.parametrize("seed", range(40))
def test_exactly_one_wins_in_a_store_that_overwrites(seed):
    """Requests are answered in any order; the losers find the winner's bytes."""
    time = Time(seed)
    store = Overwriting(time)
    won = {}

    def work(number):
        won[number] = put_new(store, "claim", b"%d" % number, wait=time.spend)

    time.run([lambda number=number: work(number) for number in range(PROCESSES)])

    (winner,) = [number for number, has_won in won.items() if has_won]
    assert len(won) == PROCESSES
    assert store.objects == {"claim": b"%d" % winner}


@pytest.mark.parametrize("seed", range(20))
def test_marks_of_killed_processes_block_nobody_for_long(seed):
    """At most one living process wins, and the last one always gets an answer."""
    time = Time(seed)
    store = Overwriting(time, kills=0.15)
    won = {}

    def work(number):
        won[number] = put_new(store, "claim", b"%d" % number, wait=time.spend)

    time.run([lambda number=number: work(number) for number in range(PROCESSES)])
    store.kills = 0.0
    time.run([lambda: work(PROCESSES)])

    assert sum(won.values()) <= 1
    assert "claim" in store.objects


def test_a_store_that_refuses_is_asked_once(tmp_path):
    """There is no mark and no pause."""
    store = LocalStore(tmp_path / "store")

    def wait(_seconds):
        raise AssertionError("it need not wait")

    assert put_new(store, "claim", b"first", wait=wait)
    assert not put_new(store, "claim", b"second", wait=wait)
    assert {one.name: b"".join(store.get(one.name)) for one in store.list()} == {"claim": b"first"}


def test_one_process_wins_on_a_server_that_ignores_create_only(rclone, prefix):
    """A real server overwrites whatever it's asked to create."""
    start = threading.Barrier(PROCESSES)
    won = []

    def work(number):
        store = open_store(rclone.uri(prefix))
        start.wait(LIMIT_SECONDS)
        if put_new(store, "claim", b"%d" % number):
            won.append(b"%d" % number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(PROCESSES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)

    assert rclone.objects(prefix) == {"claim": won[0]}
    assert len(won) == 1
