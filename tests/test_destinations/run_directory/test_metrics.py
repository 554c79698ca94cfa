"""Metrics on their way from a call to `metrics.csv`."""

import csv
import math
import pickle
import random
from collections import defaultdict
from types import MappingProxyType

import pandas as pd
import pytest

from destinations import RunDirectory
from destinations.run_directory import RunNotOpenError, read_rows, read_series
from destinations.run_directory.drain import JournalDrain
from destinations.run_directory.journal import Journal
from destinations.run_directory.layout import journal_path, part_numbers, parts_path
from destinations.run_directory.metrics_csv import MetricsCsv
from events import RecordError, State, WriteRate
from tests.crash.disk_model import HastyDisk


def table(path):
    """Returns the rows of a CSV as texts."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_leaves_one_row_per_call(drive, tmp_path):
    """The CSV has a row per call with step, epoch and time, and the journal is gone."""
    run = drive().fit()

    for step in range(200):
        run.log({"loss": 1 / (step + 1), "count": step}, step)
    run.close()

    rows = table(tmp_path / "run" / "metrics.csv")
    assert [(row["step"], row["epoch"], row["loss"], row["count"]) for row in rows] == [
        (str(step), "0", repr(1 / (step + 1)), str(step)) for step in range(200)
    ]
    assert not (tmp_path / "run" / "journal").exists()
    assert [row.metrics for row in read_rows(tmp_path / "run")] == [
        {"loss": 1 / (step + 1), "count": step} for step in range(200)
    ]


@pytest.mark.parametrize(
    "value",
    [
        0.1,
        -0.0,
        1e-308,
        5e-324,
        1.7976931348623157e308,
        2**53 + 1,
        2**63 - 1,
        -(2**63),
        math.inf,
        -math.inf,
        3,
        True,
    ],
)
def test_numbers_come_back_exactly(drive, tmp_path, value):
    """Floats, integers of 64 bits and infinities come back as they were; a bool as 1 or 0."""
    run = drive().fit()

    run.log({"first": 0.5, "value": value}, 0)
    run.log({"first": 1, "value": value}, 1)
    before = read_series(tmp_path / "run", "value")
    run.close()
    after = read_series(tmp_path / "run", "value")

    assert before == after == [(0, value), (1, value)]
    assert [type(number) for _, number in after] == [int if value is True else type(value)] * 2


def test_nan_is_written_and_is_not_missing(drive, tmp_path):
    """A NaN is text in the CSV, and a missing value is an empty cell."""
    run = drive().fit()

    run.log({"a": math.nan}, 0)
    run.log({"b": 1.0}, 1)
    run.close()

    assert [(row["a"], row["b"]) for row in table(tmp_path / "run" / "metrics.csv")] == [
        ("nan", ""),
        ("", "1.0"),
    ]


NAMES = [
    "a,b",
    'quo"te',
    "line\nfeed",
    "car\rriage",
    "../../etc",
    "ünï/cödé",
    "x" * 100,
    " space ",
    "",
    "nul\0",
    "'",
    "[x]",
]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_makes_a_column(drive, tmp_path, name):
    """Names with commas, quotes, line feeds, dots and unicode come back from pandas and the csv module."""
    run = drive().fit()

    run.log({"loss": 1.0, name: 2.5}, 3)
    run.close()

    column = name.replace("\0", "\\x00")
    frame = pd.read_csv(tmp_path / "run" / "metrics.csv")
    assert table(tmp_path / "run" / "metrics.csv")[0][column] == "2.5"
    assert frame.iloc[0, -1] == 2.5
    if name:
        assert frame.columns[-1] == column.replace("\r", "\n") or frame.columns[-1] == column
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_metrics_named_like_our_columns(drive, tmp_path):
    """A metric "epoch" replaces our column; "step" and "time" get columns beside ours."""
    run = drive().fit()

    run.log({"epoch": 0.25, "step": 7, "time": 8.5}, 3)
    run.close()

    (row,) = table(tmp_path / "run" / "metrics.csv")
    assert (row["step"], row["epoch"], row["metrics/step"], row["metrics/time"]) == ("3", "0.25", "7", "8.5")


def test_pandas_reads_the_logged_values(drive, tmp_path):
    """`pandas.read_csv` returns the very numbers, as it does for Lightning's CSV."""
    source = random.Random(1)
    logged = [{f"m{index}": source.gauss(0, 1) for index in range(10)} for _ in range(300)]
    run = drive().fit()

    for step, metrics in enumerate(logged):
        run.log(metrics, step)
    run.close()

    # 3.1 reads numbers exactly, and deprecates the argument that earlier versions need for it.
    exact = (
        {} if tuple(map(int, pd.__version__.split(".")[:2])) >= (3, 1) else {"float_precision": "round_trip"}
    )
    frame = pd.read_csv(tmp_path / "run" / "metrics.csv", **exact)
    assert frame.drop(columns=["step", "epoch", "time"]).to_dict("records") == logged
    assert frame["step"].tolist() == list(range(300))


def test_calls_of_one_step_share_a_row(drive, tmp_path):
    """Different metrics of one step that are drained together make one row.

    The same metric twice makes two.
    """
    run = drive(flush_seconds=1000).fit()

    run.log({"loss": 1.0}, 0)
    run.log({"lr": 0.1}, 0)
    run.log({"loss": 0.5}, 1)
    run.log({"loss": 0.4}, 1)
    undrained = [(row.step, row.metrics) for row in read_rows(tmp_path / "run")]
    run.close()
    drained = [(row.step, row.metrics) for row in read_rows(tmp_path / "run")]

    assert undrained == drained == [(0, {"loss": 1.0, "lr": 0.1}), (1, {"loss": 0.5}), (1, {"loss": 0.4})]


def test_a_new_metric_later_leaves_earlier_rows_as_they_are(drive, tmp_path):
    """A late column is empty in earlier rows, and the file stays rectangular."""
    run = drive().fit()

    for step in range(100):
        run.log({"loss": step * 0.1}, step)
    run.flush()
    run.log({"loss": 10.0, "late": 1}, 100)
    run.close()

    lines = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert lines[0] == "step,epoch,time,loss,late"
    assert {line.count(",") for line in lines} == {4}
    assert read_series(tmp_path / "run", "late") == [(100, 1)]
    assert len(lines) == 102


def test_a_defaultdict_is_not_asked_for_missing_names(drive, tmp_path):
    """A defaultdict isn't asked for another call's names; other mappings work too."""
    metrics = defaultdict(float, {"a": 1.0, "c": 2.0})
    run = drive().fit()

    run.log({"a": 0.0, "b": 0.5}, 0)
    run.destination.log_metrics(metrics, 1)
    run.destination.log_metrics(MappingProxyType({"a": 3.0, "b": 4.0}), 2)
    run.close()

    assert dict(metrics) == {"a": 1.0, "c": 2.0}
    assert read_rows(tmp_path / "run")[1].metrics == {"a": 1.0, "c": 2.0}
    assert read_rows(tmp_path / "run")[2].metrics == {"a": 3.0, "b": 4.0}


def test_rows_wider_than_a_segment_are_accepted(drive, tmp_path):
    """A call with twenty thousand metrics with long names is a row like any other."""
    metrics = {f"layer.{'x' * 60}.{index}": index * 0.5 for index in range(20_000)}
    run = drive().fit()

    run.log(metrics, 0)
    run.log(metrics, 1)
    run.close()

    assert [row.metrics for row in read_rows(tmp_path / "run")] == [metrics, metrics]


def test_appended_journals_hold_the_same(drive, tmp_path):
    """Rows are the same without mapped files."""
    run = drive(journal="appended", flush_seconds=1000).fit()

    for step in range(20_000):
        run.log({f"m{index}": step + 0.5 for index in range(10)}, step)
    undrained = read_series(tmp_path / "run", "m0")
    run.close()

    assert undrained == read_series(tmp_path / "run", "m0") == [(step, step + 0.5) for step in range(20_000)]


def test_a_non_numeric_value_raises_at_the_call(drive, tmp_path):
    """A value that isn't a number raises, and the next row is written."""
    run = drive().fit()

    with pytest.raises(RecordError, match="metric 'a' must be a number, got 'x'"):
        run.destination.log_metrics({"a": "x"}, 0)
    with pytest.raises(RecordError, match="metrics must have strings as names"):
        run.destination.log_metrics({3: 1.0}, 0)
    run.log({"a": 1.0}, 1)
    run.close()

    assert read_series(tmp_path / "run", "a") == [(1, 1.0)]


def test_logging_after_close_is_refused(drive):
    """A closed destination raises until it is opened again."""
    run = drive()
    run.close()

    with pytest.raises(RunNotOpenError, match="between init and post_close"):
        run.destination.log_metrics({"a": 1.0}, 0)


def test_a_destination_can_be_pickled(drive, tmp_path):
    """A copy of an open destination is closed, has the constructor's arguments, and serves another run."""
    run = drive(tags=["one"]).fit()
    run.log({"a": 1.0}, 0)

    copy = pickle.loads(pickle.dumps(run.destination))  # noqa: S301
    run.close()
    again = drive(tmp_path / "elsewhere").fit()
    again.close()

    assert repr(copy) == repr(run.destination)
    assert copy.run_dir is None


def test_one_new_metric_per_step_does_not_rewrite_the_file_each_time(tmp_path):
    """Two thousand metrics that each appear at a step of their own cost a bounded number of rewrites.

    The clock stands still.
    """
    folder = journal_path(tmp_path, 0)
    folder.mkdir(parents=True)
    journal = Journal(folder, State("x"))
    csv = MetricsCsv(tmp_path / "metrics.csv", HastyDisk())
    drain = JournalDrain(tmp_path, folder, csv, journal, clock=lambda: 0.0, disk=HastyDisk())

    for step in range(2000):
        journal.append({f"key{step}": float(step)}, step)
        if step % 10 == 0:
            drain.run()
    drain.run()
    journal.close()

    # A part has about 64 names.
    assert len(part_numbers(parts_path(tmp_path / "metrics.csv"))) < 2000 / 60
    assert drain.file.rewrites < 2000 / 9
    assert [row.metrics for row in read_rows(tmp_path)] == [
        {f"key{step}": float(step)} for step in range(2000)
    ]


def test_a_write_rate_thins_the_rows(drive, tmp_path):
    """With a rate, the row of a step represents all steps since the previous row.

    Pending rows are written at the end.
    """
    run = drive(write_rate=WriteRate(every_steps=4, aggregate="mean")).fit()
    for step in range(10):
        run.log({"a": float(step)}, step)
        run.state.timestamp = run.state.timestamp.to_next_batch()
    run.close()

    assert read_series(tmp_path / "run", "a") == [(0, 0.0), (4, 2.5), (8, 6.5), (9, 9.0)]


class Doubled(RunDirectory):
    """A run directory that changes its arguments."""

    def log_metrics(self, metrics, step=None):
        super().log_metrics({name: 2 * value for name, value in metrics.items()}, step)


def test_a_subclass_sees_every_call(drive, tmp_path):
    """If a subclass overrides `log_metrics`, the logger calls it, with or without tensors."""
    torch = pytest.importorskip("torch")
    run = drive(kind=Doubled).fit()
    for step in range(3):
        run.log({"a": 1.5}, step)
        run.log({"b": torch.tensor(2)}, step)
    run.close()

    assert [row.metrics for row in read_rows(tmp_path / "run")] == [{"a": 3.0, "b": 4}] * 3


def test_values_of_any_type_may_follow_each_other(drive, tmp_path):
    """Floats, integers, booleans, tensors, text and many elements may follow each other under one name."""
    torch = pytest.importorskip("torch")
    numbers = [1.5, 7, True, 2**62, torch.tensor(2.5), torch.tensor(3), torch.tensor(False), float("inf")]  # noqa: FBT003
    bad = ["four", torch.tensor([1.0, 2.0]), None, torch.tensor(1j), 1j]
    source = random.Random(3)
    expected, refused = [], 0
    run = drive().fit()

    for step in range(300):
        values = source.choices(numbers, k=2) if source.random() < 0.5 else [source.choice(numbers)] * 2
        metrics = {"a": values[0], "b": values[1]}
        if source.random() < 0.2:
            metrics["b"] = source.choice(bad)
        try:
            run.log(metrics, step)
        except RecordError:
            refused += 1
        good = {name: value for name, value in metrics.items() if not any(value is one for one in bad)}
        expected.append(
            {name: getattr(value, "item", lambda value=value: value)() for name, value in good.items()}
        )
    run.close()

    found = [row.metrics for row in read_rows(tmp_path / "run")]
    assert found == expected
    assert [[type(value) for value in row.values()] for row in found] == [
        [int if type(value) is bool else type(value) for value in row.values()] for row in expected
    ]
    assert refused > 10
