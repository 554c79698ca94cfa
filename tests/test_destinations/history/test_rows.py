"""One rule decides which calls share a row, in the journal and in the file it is drained to."""

import itertools
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from destinations.run_directory import read_rows
from destinations.run_directory.drain import JournalDrain
from destinations.run_directory.journal import Journal
from destinations.run_directory.layout import journal_path, metrics_name
from destinations.run_directory.metrics_csv import MetricsCsv
from events import State
from tests.effort import times

NAMES = ["epoch", "step", "time", "loss", "acc", "a,b", "metrics/step"]
values = st.one_of(
    st.sampled_from([0, 1, 2, True, False, 0.0, 1.0, float("nan"), float("inf"), 2**70, 2**53 + 1]),
    st.floats(width=32),
    st.integers(),
)
calls = st.tuples(
    st.just("log"), st.dictionaries(st.sampled_from(NAMES), values, min_size=1, max_size=3), st.integers(0, 2)
)
# The reader takes many rows of floats at once as a block.
blocks = st.tuples(st.just("logs"), st.sets(st.sampled_from(NAMES), min_size=1), st.integers(4, 12))
others = st.tuples(st.sampled_from(["epoch", "boundary", "read", "drain"]))


def _as_float(value):
    return None if value is None else float(value)


def _as_floats(item):
    return item[0], float(item[1])


class Run:
    """The journal and the file of a rank, with segments of a few rows, and a clock of whole seconds."""

    def __init__(self, run_dir):
        self.run_dir = run_dir
        folder = journal_path(run_dir, 0)
        folder.mkdir(parents=True)
        self.state = State("run")
        clock = itertools.count(1000.0).__next__
        self.journal = Journal(folder, self.state, segment_bytes=4096, clock=clock)
        csv = MetricsCsv(run_dir / metrics_name(0))
        self.drain = JournalDrain(run_dir, folder, csv, self.journal, part_bytes=1500)

    def rows(self):
        """Returns the rows as text, because NaN then equals itself.

        A part has integers beside floats as floats.
        """
        return [
            repr((row.step, _as_float(row.epoch), row.time, sorted(map(_as_floats, row.metrics.items()))))
            for row in read_rows(self.run_dir)
        ]

    def act(self, what, *arguments):
        """Does one of the things that happen."""
        match what, *arguments:
            case "log", metrics, step:
                self.journal.append(metrics, step)
            case "logs", names, count:
                for step in range(count):
                    self.journal.append(dict.fromkeys(sorted(names), step / 8), step // 2)
            case ["epoch"]:
                self.state.timestamp = self.state.timestamp.to_next_epoch()
            case ["boundary"]:
                self.journal.mark_boundary()
            case _:
                before = self.rows()
                if what == "drain":
                    self.drain.run()
                assert self.rows() == before


@given(st.lists(st.one_of(calls, calls, calls, blocks, others), max_size=40))
@settings(
    deadline=None,
    max_examples=times(30, 2000),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_rows_are_the_same_before_and_after_they_are_drained(steps):
    """This holds for any calls, late names, any file, and any end of a segment."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder) / "run")
        for one in [*steps, ("drain",)]:
            run.act(*one)


def test_a_metric_named_epoch_has_its_own_row(tmp_path):
    """This holds even if it equals the epoch of the calls around it."""
    run = Run(tmp_path / "run")
    for metrics in ({"epoch": 0, "loss": 1.0}, {"acc": 2.0}, {"lr": 3.0}):
        run.journal.append(metrics, 5)

    seen = [read_rows(run.run_dir), run.drain.run() and read_rows(run.run_dir)]

    for rows in seen:
        assert [(row.epoch, row.metrics) for row in rows] == [
            (0, {"loss": 1.0}),
            (0, {"acc": 2.0, "lr": 3.0}),
        ]


def test_late_name_shares_the_row_of_its_step(tmp_path):
    """The file gets a column while the row of the step is still open."""
    run = Run(tmp_path / "run")
    run.journal.append({"loss": 1.0}, 0)
    run.drain.run()
    run.journal.append({"loss": 2.0}, 1)
    run.journal.append({"late": 3.0}, 1)

    run.drain.run()

    assert [row.metrics for row in read_rows(run.run_dir)] == [{"loss": 1.0}, {"loss": 2.0, "late": 3.0}]
    assert run.drain.statistics.summaries()["late"].count == 1
