"""Which sessions' records belong to a run."""

import itertools
import random

import pytest

from destinations.history.chain import Chain, Follows


class Program:
    """Logs numbered records in sessions, continues from any checkpoint, and knows the expected history."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.ids = map(str, itertools.count())
        self.sessions, self.lines, self.history, self.checkpoints = [], [], [], []
        self.begin(None)

    def begin(self, follows):
        self.sessions.append({"session": next(self.ids), "follows": follows and follows.to_json()})

    @property
    def current(self):
        return self.sessions[-1]["session"]

    def count(self):
        return sum(line["session"] == self.current for line in self.lines)

    def step(self):
        chance = self.draw.random()
        if chance < 0.6:
            place = {"session": self.current, "record": self.count()}
            line = {"number": len(self.lines), "step": self.draw.randrange(5), "name": "a", **place}
            self.lines.append(line)
            self.history.append(line["number"])
        elif chance < 0.8 or not self.checkpoints:
            self.checkpoints.append((self.current, self.count(), [*self.history]))
        elif chance < 0.95:
            session, records, self.history = self.draw.choice(self.checkpoints)
            self.history = [*self.history]
            self.begin(Follows(session, records, 0))
        else:
            self.begin(Follows(self.current))

    def belonging(self, end=None):
        return [line["number"] for line in Chain(self.sessions, end).records(lambda: self.lines)]


def test_history_has_the_records_before_each_checkpoint():
    """The checkpoint may be from any session, even an abandoned one; steps don't matter."""
    for seed in range(200):
        program = Program(seed)
        for _ in range(program.draw.randrange(1, 60)):
            program.step()
            assert program.belonging() == program.history, seed


def test_a_branch_ends_where_its_session_ends():
    """A branch is selected by its session's id. It has what the session continued, then what it logged."""
    sessions = [
        {"session": "a", "follows": None},
        {"session": "b", "follows": Follows("a", 1, 5).to_json()},
        {"session": "c", "follows": Follows("a", 2, 6).to_json()},
    ]
    lines = [{"session": one, "record": number} for one in "abc" for number in range(3)]

    found = {end: [*Chain(sessions, end).records(lambda: lines)] for end in "abc"}

    assert found["a"] == lines[:3]
    assert found["b"] == [lines[0], *lines[3:6]]
    assert found["c"] == [*lines[:2], *lines[6:]]
    with pytest.raises(ValueError, match="session must be one of a, b, c, got 'd'"):
        Chain(sessions, "d")


def test_loop_that_names_a_batch_replaces_records_it_logs_again():
    """Earlier steps stay and later ones don't. At the same step, only other metric names stay."""
    sessions = [
        {"session": "a", "follows": None},
        {"session": "b", "follows": Follows("a", None, 2).to_json()},
    ]
    before = [{"session": "a", "step": step, "name": name} for step in range(4) for name in ("train", "eval")]
    after = [{"session": "b", "step": step, "name": "train"} for step in range(2, 4)]

    found = [*Chain(sessions).records(lambda: [*before, *after])]

    assert [(one["session"], one["step"], one["name"]) for one in found] == [
        ("a", 0, "train"),
        ("a", 0, "eval"),
        ("a", 1, "train"),
        ("a", 1, "eval"),
        ("a", 2, "eval"),
        ("b", 2, "train"),
        ("b", 3, "train"),
    ]


def test_deletion_counts_from_any_session():
    """A file stays deleted if an abandoned session deleted it."""
    sessions = [{"session": "a", "follows": None}, {"session": "b", "follows": Follows("a", 1, 5).to_json()}]
    lines = [{"session": "a", "record": number, "is_deleted": number == 2} for number in range(3)]

    assert [*Chain(sessions).records(lambda: lines)] == [lines[0], lines[2]]


def test_records_of_unknown_sessions_belong_to_the_run():
    """Records of a session without a line belong to the run, as do records of earlier versions.

    Damage is passed on.
    """
    sessions = [
        {"session": "old"},
        {"session": "older"},
        {"session": "a", "follows": Follows("older").to_json()},
    ]
    lines = [{"step": 1}, None, {"session": "gone", "record": 3, "step": 1}, {"session": "a", "record": 0}]

    assert [*Chain(sessions).records(lambda: lines)] == lines
    assert [*Chain(()).records(lambda: lines)] == lines


@pytest.mark.parametrize("follows", [7, {"session": "b"}, {"session": "a", "records": None, "step": None}])
def test_a_damaged_session_line_hides_none_of_its_records(follows):
    """This holds even if the sessions follow each other in a circle."""
    sessions = [{"session": "a", "follows": Follows("b").to_json()}, {"session": "b", "follows": follows}]
    lines = [{"session": "b", "record": 0}]

    assert [*Chain(sessions).records(lambda: lines)] == lines
