"""Which entry is next, with a clock that moves only when told."""

import itertools
import threading

import pytest

from uploads.drain.schedule import DependencyState, History, Schedule
from uploads.spool.entry import Entry, identifier_of


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    """A clock that stands still."""
    return Clock()


@pytest.fixture
def schedule(clock):
    """An empty schedule."""
    return Schedule(clock)


def _folder(sequence, name):
    return Entry(f"{sequence:016x}", sequence, name, True, 0, None, "copied", "", (), "").folder  # noqa: FBT003  # overwrite


def test_entries_come_in_the_order_of_submission(schedule):
    """The counter gives the order; no clock is asked."""
    schedule.add([_folder(3, "c"), _folder(1, "a"), _folder(2, "b")])

    assert [schedule.next(0) for _ in range(4)] == [_folder(1, "a"), _folder(2, "b"), _folder(3, "c"), None]


def test_one_name_is_in_flight_once(schedule):
    """The second version waits until the first one has settled."""
    schedule.add([_folder(1, "a"), _folder(2, "a")])
    first = schedule.next(0)

    assert schedule.next(0) is None
    assert schedule.newer_than(first) == _folder(2, "a")

    schedule.settle(first)
    assert schedule.next(0) == _folder(2, "a")


def test_an_entry_announced_twice_is_processed_once(schedule):
    """An announcement and a rescan may both report it."""
    schedule.add([_folder(1, "a")])
    schedule.add([_folder(1, "a")])

    assert schedule.next(0) == _folder(1, "a")
    schedule.add([_folder(1, "a")])
    assert (schedule.next(0), schedule.counts()) == (None, (0, 1))


def test_an_outdated_listing_brings_nothing_back(schedule):
    """An entry delivered after the listing was made isn't taken for a new one."""
    schedule.add([_folder(1, "a")])
    schedule.settle(schedule.next(0))

    schedule.add([_folder(1, "a")], is_there=lambda folder: False)

    assert schedule.counts() == (0, 0)


def test_a_retry_waits_and_lets_others_pass(schedule, clock):
    """One entry's back-off doesn't delay the others."""
    schedule.add([_folder(1, "a"), _folder(2, "b")])
    schedule.retry(schedule.next(0), 10)

    assert schedule.next(0) == _folder(2, "b")
    assert schedule.next(0) is None
    clock.now += 10
    assert schedule.next(0) == _folder(1, "a")


def test_an_entry_waits_until_its_dependency_has_settled(schedule):
    """A pointer isn't handed out before its target is there."""
    schedule.add([_folder(1, "target"), _folder(2, "pointer")])
    target, pointer = schedule.next(0), schedule.next(0)

    assert schedule.check_dependencies(pointer, [identifier_of(target)]) is DependencyState.PENDING
    assert schedule.next(0) is None
    schedule.settle(target)
    assert schedule.next(0) == pointer
    assert schedule.check_dependencies(pointer, [identifier_of(target)]) is DependencyState.SATISFIED


def test_an_entry_after_a_failed_one_is_broken(schedule):
    """A pointer to something that never arrived isn't uploaded."""
    schedule.add([_folder(1, "target"), _folder(2, "pointer")])
    target, pointer = schedule.next(0), schedule.next(0)
    schedule.settle(target, failed=True)

    assert schedule.check_dependencies(pointer, [identifier_of(target)]) is DependencyState.FAILED


def test_an_entry_waits_for_the_newer_version_of_its_dependency(schedule):
    """If a newer version replaced the target, the pointer waits for that one."""
    schedule.add([_folder(1, "t"), _folder(2, "t"), _folder(3, "pointer")])
    old = schedule.next(0)
    schedule.settle(old, replaced_by=identifier_of(_folder(2, "t")))
    new, pointer = schedule.next(0), schedule.next(0)

    assert schedule.check_dependencies(pointer, [identifier_of(old)]) is DependencyState.PENDING
    schedule.settle(new)
    assert schedule.next(0) == pointer


def test_a_parked_store_is_probed_with_one_entry_at_a_time(schedule, clock):
    """A store that denies gets one entry, not all of them."""
    schedule.add([_folder(1, "a"), _folder(2, "b")])
    schedule.pause(5, probing_only=True)
    clock.now += 5

    assert schedule.next(0) == _folder(1, "a")
    assert schedule.next(0) is None
    schedule.resume()
    assert schedule.next(0) == _folder(2, "b")


def test_a_denied_name_makes_way_for_another_probe(schedule, clock):
    """The next probe is another due entry, because the denial may concern only the first name."""
    schedule.add([_folder(1, "denied"), _folder(2, "b")])
    for _ in range(2):
        denied = schedule.next(0)
        schedule.pause(5, probing_only=True)
        schedule.retry(denied, 5)
        clock.now += 5

    assert denied == _folder(2, "b")
    assert schedule.next(0) == _folder(1, "denied")


def test_a_denied_name_is_probed_if_there_is_no_other(schedule, clock):
    """A single entry is tried again."""
    schedule.add([_folder(1, "denied")])
    schedule.pause(5, probing_only=True)
    clock.now += 5
    schedule.retry(schedule.next(0), 5)
    clock.now += 5

    assert schedule.next(0) == _folder(1, "denied")


def test_a_pause_that_ends_by_itself_probes_nothing(schedule, clock):
    """A store that asked to slow down gets the full rate afterwards, not one entry at a time."""
    schedule.add([_folder(1, "a"), _folder(2, "b")])
    schedule.pause(5)
    clock.now += 5

    assert [schedule.next(0), schedule.next(0)] == [_folder(1, "a"), _folder(2, "b")]


class Waiting:
    """A thread that is waiting in its schedule's `next` once this is constructed."""

    def __init__(self, *folders, paused=()):
        is_waiting, self._found, questions = threading.Event(), [], itertools.count()

        def clock():
            # The thread reads the clock a second time under the lock that waiting releases.
            if threading.current_thread() is self._thread and next(questions) == 1:
                is_waiting.set()
            return 0.0

        self.schedule = Schedule(clock)
        self._thread = threading.Thread(
            target=lambda: self._found.append(self.schedule.next(600)), daemon=True
        )
        self.schedule.add(folders)
        self.taken = [self.schedule.next(0) for _ in folders]
        if paused:
            self.schedule.add(paused)
            self.schedule.pause(300)
        self._thread.start()
        assert is_waiting.wait(60)

    def found(self):
        self._thread.join(60)
        return self._found


def test_a_waiting_thread_gets_added_entries():
    """It's woken at once, before its timeout."""
    waiting = Waiting()

    waiting.schedule.add([_folder(1, "a")])

    assert waiting.found() == [_folder(1, "a")]


def test_a_waiting_thread_gets_the_next_version_once_the_previous_one_has_settled():
    """It's woken although nothing was added."""
    waiting = Waiting(_folder(1, "a"), _folder(2, "a"))

    waiting.schedule.settle(_folder(1, "a"))

    assert waiting.found() == [_folder(2, "a")]


@pytest.mark.parametrize("end", [Schedule.resume, Schedule.probe_now])
def test_a_waiting_thread_notices_the_end_of_a_pause(end):
    """A store that answers, or new credentials, end the pause early."""
    waiting = Waiting(paused=[_folder(1, "a")])

    end(waiting.schedule)

    assert waiting.found() == [_folder(1, "a")]


def test_a_success_ends_the_probing_after_new_credentials(schedule):
    """All entries are handed out again, not one at a time."""
    schedule.add([_folder(1, "a"), _folder(2, "b"), _folder(3, "c")])
    schedule.pause(300, probing_only=True)
    schedule.probe_now()
    schedule.settle(schedule.next(0))

    schedule.resume()

    assert [schedule.next(0), schedule.next(0)] == [_folder(2, "b"), _folder(3, "c")]


def test_a_recovered_store_gets_entries_in_order_of_submission(schedule, clock):
    """A name denied during the outage doesn't stay behind forever."""
    schedule.add([_folder(1, "denied"), _folder(2, "b")])
    schedule.pause(5, probing_only=True)
    clock.now += 5
    schedule.retry(schedule.next(0), 0)

    schedule.resume()

    assert [schedule.next(0), schedule.next(0)] == [_folder(1, "denied"), _folder(2, "b")]


def test_a_pause_is_only_extended(schedule, clock):
    """A second thread that reports the same trouble later doesn't shorten the first one's pause."""
    schedule.add([_folder(1, "a")])
    schedule.pause(10)
    schedule.pause(1)
    clock.now += 9

    assert schedule.next(0) is None
    clock.now += 1
    assert schedule.next(0) == _folder(1, "a")


def test_a_finished_probe_makes_room_for_the_next(schedule, clock):
    """Whether it's delivered or put back, one at a time is handed out until the store recovers."""
    schedule.add([_folder(1, "a"), _folder(2, "b"), _folder(3, "c")])
    schedule.pause(5, probing_only=True)
    clock.now += 5
    schedule.settle(schedule.next(0))

    assert schedule.next(0) == _folder(2, "b")
    assert schedule.next(0) is None
    schedule.retry(_folder(2, "b"), 0)
    assert schedule.next(0) == _folder(3, "c")


def test_a_retry_of_an_entry_not_in_flight_changes_nothing(schedule):
    """It was settled meanwhile, or another version of the name is in flight."""
    schedule.add([_folder(1, "a"), _folder(2, "a")])
    first = schedule.next(0)
    schedule.settle(first)
    schedule.retry(first, 300)

    assert schedule.next(0) == _folder(2, "a")
    assert schedule.counts() == (0, 1)


def test_a_delay_holds_back_the_whole_line(schedule, clock):
    """A newer version doesn't overtake one that waits for its retry."""
    schedule.add([_folder(1, "a")])
    schedule.retry(schedule.next(0), 10)
    schedule.add([_folder(2, "a")])

    assert schedule.next(0) is None
    clock.now += 10
    assert schedule.next(0) == _folder(1, "a")


def test_an_unknown_dependency_is_looked_up_in_the_store(schedule):
    """An entry that is neither waiting nor remembered may have been delivered long ago."""
    schedule.add([_folder(3, "pointer")])
    pointer = schedule.next(0)

    assert schedule.check_dependencies(pointer, ["f" * 16]) is DependencyState.UNKNOWN
    assert schedule.check_dependencies(pointer, []) is DependencyState.SATISFIED


def test_the_last_sixteen_thousand_deliveries_are_remembered():
    """Older ones are forgotten, so memory doesn't grow with the run."""
    history = History()
    for number in range(3 * 16_384):
        history.record(str(number))

    remembered = [number for number in range(3 * 16_384) if history.was_delivered(str(number))]
    assert remembered[-16_384:] == list(range(2 * 16_384, 3 * 16_384))
    assert len(remembered) <= 2 * 16_384
    history = History()
    for number in range(2 * 16_384 + 1):
        history.record(str(number))
    assert not history.was_delivered("0")


def test_new_credentials_end_a_pause_at_once(schedule):
    """Once the credentials file has changed, entries do not wait for a timer."""
    schedule.add([_folder(1, "a")])
    schedule.retry(schedule.next(0), 300)
    schedule.pause(300, probing_only=True)

    schedule.probe_now()

    assert schedule.next(0) == _folder(1, "a")


def test_stopping_ends_every_wait(schedule):
    """After stop nothing is handed out, even if it's ready."""
    schedule.add([_folder(1, "a")])
    schedule.stop()

    assert schedule.next(10) is None
