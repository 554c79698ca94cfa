"""A reader gets what is new since its last look, whatever happens between two looks."""

import itertools
import json
import random

import attrs
import pytest

from destinations.history.cursor import Cursor
from destinations.run_directory import read_rows
from destinations.run_directory.drain import JournalDrain
from destinations.run_directory.journal import Journal
from destinations.run_directory.layout import journal_path
from destinations.run_directory.metrics_csv import MetricsCsv
from destinations.runs.content.follow import Follower
from destinations.runs.content.rank_reader import RankReader
from destinations.runs.move.ledger import ReadPosition
from destinations.runs.move.stored import RewoundError, records_of
from destinations.viewer.columns import ColumnCache
from events import State
from tests.crash.disk_model import HastyDisk
from tests.effort import times


class Program:
    """Logs each number once, continues from any checkpoint, and knows the expected history."""

    def __init__(self, run_dir, seed):
        self.run_dir = run_dir
        self.draw = random.Random(seed)
        self.ids = (f"session{number:05d}" for number in itertools.count())
        self.numbers, self.clock = itertools.count(1), itertools.count(1000)
        # Step and value, by value.
        self.history, self.checkpoints = [], []
        self.step = 0
        self.open()

    def open(self):
        """Begins a process."""
        folder = journal_path(self.run_dir, 0)
        folder.mkdir(parents=True, exist_ok=True)
        disk = HastyDisk()
        self.journal = Journal(folder, State("x"), segment_bytes=4096, clock=lambda: float(next(self.clock)))
        csv = MetricsCsv(self.run_dir / "metrics.csv", disk)
        self.drain = JournalDrain(self.run_dir, folder, csv, self.journal, part_bytes=400, disk=disk)
        self.begin()

    def begin(self):
        """Begins a session."""
        self.session = next(self.ids)
        self.journal.begin_session(self.session)

    def kill(self):
        """Ends the process without closing."""
        self.journal.close()
        for segment in list(self.journal.files.segments):
            segment.close()
        self.drain._csv.close()

    def log(self):
        """Logs one or two metrics, often at the step of the last call."""
        self.step += self.draw.random() < 0.6
        names = self.draw.choice([["a"], ["b"], ["a", "b"]])
        row = {name: next(self.numbers) for name in names}
        self.journal.append(row, self.step)
        self.history += [(self.step, number) for number in row.values()]

    def act(self):
        """Does something that a training run may do."""
        chance = self.draw.random()
        if chance < 0.55:
            self.log()
        elif chance < 0.65:
            self.drain.run()
        elif chance < 0.75:
            mark = self.journal.mark_boundary()
            self.checkpoints.append((self.session, mark, self.step, [*self.history]))
        elif chance < 0.85 and self.checkpoints:
            session, mark, self.step, history = self.draw.choice(self.checkpoints)
            self.history = [*history]
            self.begin()
            self.journal.rewind(session, mark, self.step, None)
        elif chance < 0.9:
            self.step = self.draw.randint(0, self.step)
            self.history = [one for one in self.history if one[0] < self.step]
            self.begin()
            self.journal.mark_resume(self.step, None)
        elif chance < 0.95:
            self.begin()
        else:
            self.kill()
            self.open()


class Sender:
    """Reads as `send` does: keeps its position as JSON, and starts over if rows were taken back."""

    def __init__(self, run_dir):
        self.run_dir = run_dir
        self.begin()

    def begin(self):
        """Forgets everything."""
        self.position, self.given = "{}", []

    def look(self):
        """Takes new rows. Returns whether the rows taken before still belong to the run."""
        position = ReadPosition(**json.loads(self.position))
        try:
            new = [value for item in records_of(self.run_dir, position) for value in item.metrics.values()]
        except RewoundError:
            self.begin()
            return False
        self.given += new
        self.position = json.dumps(attrs.asdict(position))
        return True


@pytest.mark.parametrize("seed", range(times(10, 2000)))
def test_each_value_is_new_once(tmp_path, seed):
    """This holds across drains, closes, resumes and abandoned rows, however calls were joined into rows."""
    program = Program(tmp_path, seed)
    sender, cache, followed = Sender(tmp_path), ColumnCache(), []
    with Follower(tmp_path) as follower:
        for _ in range(program.draw.randrange(10, 80)):
            program.act()
            if program.draw.random() < 0.7:
                continue
            history = [number for _, number in program.history]
            rows = [int(value) for row in read_rows(tmp_path) for value in row.metrics.values()]
            new = [int(value) for row in follower.poll() for value in row.metrics.values()]
            gone = set(sender.given) - set(history)
            is_continued = sender.look()
            block = cache.read(tmp_path, 0, ["a", "b"]).block
            shown = [int(value) for values, there in block.columns.values() for value in values[there]]

            assert sorted(rows) == sorted(history)
            assert sorted(new) == sorted(set(history) - set(followed))
            assert is_continued or gone
            assert not is_continued or sorted(sender.given) == sorted(history)
            assert sorted(shown) == sorted(history)
            followed += new
    program.kill()


def test_a_cursor_is_the_same_after_json(tmp_path):
    """It continues in another process, even from within the journal or next to a limit."""
    program = Program(tmp_path, 0)
    for _ in range(3):
        program.log()
    program.drain.run()
    program.log()
    program.begin()
    program.journal.mark_resume(1, None)
    program.log()
    reader = RankReader(tmp_path, 0)
    with reader.look() as look:
        list(look.new_rows())

    again = Cursor.from_json(json.loads(json.dumps(reader.cursor.to_json())))
    with RankReader(tmp_path, 0, again).look() as look:
        new = list(look.new_rows())
    program.kill()

    assert again.limits == reader.cursor.limits
    assert any(again.limits.values())
    assert new == []


def test_an_idle_run_is_not_read(tmp_path, monkeypatch):
    """A follower that has every row opens no file of rows."""
    program = Program(tmp_path, 0)
    program.log()
    program.drain.run()
    program.log()
    with Follower(tmp_path) as follower:
        follower.poll()
        looks = []
        monkeypatch.setattr(RankReader, "look", lambda *_: looks.append(1))

        assert follower.poll() == []
    program.kill()

    assert looks == []
