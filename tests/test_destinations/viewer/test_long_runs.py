"""The page draws charts of a run in parts from their indexes, correctly at every zoom."""

import contextlib
import itertools
import shutil

import numpy as np
import pytest

from destinations.run_directory.conversion import convert_parts
from destinations.run_directory.drain import JournalDrain
from destinations.run_directory.journal import Journal
from destinations.run_directory.layout import journal_path, part_numbers, parts_path
from destinations.run_directory.metrics_csv import MetricsCsv
from destinations.runs import open_runs
from destinations.runs.budget import Budget, Limits
from destinations.viewer import charts, columns, details
from destinations.viewer.charts import Axis, ChartReader
from destinations.viewer.columns import ColumnCache
from events import State
from tests.test_destinations.run_directory.test_parts import as_csv

ROWS = 30_000
SPIKE = 12_345
NAMES = ["loss", "acc", "rare", "of_epoch", "late"]


def write(run_dir, steps, odd=SPIKE, **options):
    """Writes rows with a spike, another odd value, a metric in every tenth row and one that appears late."""
    folder = journal_path(run_dir, 0)
    folder.mkdir(parents=True, exist_ok=True)
    times = itertools.count(1000 + steps.start)
    journal = Journal(folder, State("x"), clock=lambda: float(next(times)))
    drain = JournalDrain(run_dir, folder, MetricsCsv(run_dir / "metrics.csv"), journal, **options)
    for step in steps:
        row = {"loss": 1e6 if step == SPIKE else -1.0 if step == odd else step % 97 / 7}
        if step % 10 == 0:
            row["acc"] = float("nan") if step == 20_000 else step / 3
        if step >= 25_000:
            row["late"] = -step / 3
        if step % 2500 == 1234:
            row["rare"] = float(step)
        journal.append(row, step)
        if step % 5000 == 4321:
            journal.append({"of_epoch": step / 2}, step // 5000)
        if step % 500 == 499:
            drain.run()
    drain.run()
    journal.close()
    for segment in list(journal.files.segments):
        segment.close()
    drain._csv.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The same rows, in parts of 100 kB, in parts of an earlier version, and in one file."""
    folder = tmp_path_factory.mktemp("runs")
    write(folder / "parts", range(ROWS), part_bytes=100_000)
    write(folder / "whole", range(ROWS))
    assert len(part_numbers(parts_path(folder / "parts" / "metrics.csv"))) > 5
    shutil.copytree(folder / "parts", folder / "csv")
    as_csv(folder / "csv")
    return folder


@pytest.fixture(params=["parts", "csv"])
def name(request):
    """A run in parts, and one in parts of an earlier version."""
    return request.param


@pytest.fixture
def small_limit(monkeypatch):
    """Rows of closed parts count as many from 200 kB on."""
    for module in (charts, columns):
        monkeypatch.setattr(module, "MAX_HELD_BYTES", 200_000)


def answer(folder, name, metric, axis, points=50, **options):
    """Returns the series of a metric as the page gets it."""
    with open_runs(folder / name, cache=folder / f"cache-{name}") as runs:
        reader = ChartReader()
        try:
            (run,) = runs.query()
            (found,) = reader.series([("x", run)], [metric], axis, points=points, **options)
        finally:
            reader.close()
    return found


@pytest.mark.usefixtures("small_limit")
@pytest.mark.parametrize(
    ("metric", "kind"),
    [("loss", "step"), ("acc", "time"), ("late", "relative"), ("loss", "epoch"), ("late", "metric:loss")],
)
def test_a_chart_of_everything_has_the_extremes_and_the_number_of_values(written, name, metric, kind):
    """Minimum, maximum and count are equal to the rows'; means depend on the grouping."""
    axis = Axis.parse(kind)
    of_rows, of_indexes = (answer(written, one, metric, axis) for one in ("whole", name))

    assert of_indexes["error"] is None
    assert of_indexes["rows"] == of_rows["rows"]
    assert 0 < len(of_indexes["x"]) <= 50
    assert np.nanmin(of_indexes["low"]) == np.nanmin(of_rows["low"])
    assert np.nanmax(of_indexes["high"]) == np.nanmax(of_rows["high"])
    assert len(of_indexes["nan"]) == len(of_rows["nan"])


@pytest.mark.usefixtures("small_limit")
def test_a_zoom_shows_the_logged_values(written, name):
    """A part of the axis with few rows is read from the rows, with one neighbour on each side."""
    for start, end in [(SPIKE - 20, SPIKE + 20), (0, 3), (29_990, 40_000), (9_990, 10_010)]:
        axis = Axis("step", "", start, end)
        of_rows, of_indexes = (answer(written, one, "loss", axis, points=100) for one in ("whole", name))
        for field in ("x", "y", "rows"):
            np.testing.assert_array_equal(of_indexes[field], of_rows[field])


@pytest.mark.usefixtures("small_limit")
def test_a_spike_is_there_at_every_zoom(written, name):
    """One of thirty thousand values is the maximum of its point, at any zoom."""
    for half in (10, 1000, 5000, 30_000):
        found = answer(written, name, "loss", Axis("step", "", SPIKE - half, SPIKE + half))
        assert np.nanmax(found["y"] if found["high"] is None else found["high"]) == 1e6


@pytest.mark.usefixtures("small_limit")
def test_a_band_has_the_extremes_of_a_long_run(written, name):
    """The band over a run in parts has its spike too."""
    with open_runs(written / name, cache=written / f"cache-band-{name}") as runs:
        reader = ChartReader()
        (run,) = runs.query()
        (band,) = reader.bands([("one", [("x", run, 0)])], "loss", Axis(), points=30)
        reader.close()

    assert np.nanmax(band["high"]) == 1e6


@pytest.mark.usefixtures("small_limit")
@pytest.mark.parametrize("half", [10, 400])
def test_a_zoomed_band_shows_the_logged_values(written, name, half):
    """Only rows of visible index entries are read."""
    with open_runs(written / name, cache=written / f"cache-zoom-{name}") as runs:
        reader = ChartReader()
        (run,) = runs.query()
        axis = Axis("step", "", SPIKE - half, SPIKE + half)
        (band,) = reader.bands([("one", [("x", run, 0)])], "loss", axis, points=1000)
        reader.close()

    assert list(band["x"]) == list(range(SPIKE - half, SPIKE + half + 1))
    assert band["high"][half] == band["median"][half] == 1e6


@pytest.mark.usefixtures("small_limit")
def test_a_long_run_is_compared_by_its_values(written, name, tmp_path):
    """The first different step is named, even within a thousand rows, for any division into parts."""
    write(tmp_path / "other", range(ROWS), part_bytes=70_000, odd=17_003)
    roots = [written / name, written / "whole", tmp_path / "other"]
    with contextlib.ExitStack() as opened:
        runs = [opened.enter_context(open_runs(root, cache=tmp_path / root.name)) for root in roots]
        found = details.compare(
            [(str(place), run.query()[0]) for place, run in enumerate(runs)], ColumnCache()
        )

    same = dict.fromkeys(NAMES)
    assert [part["metrics"] for part in found["parts"]] == [same, same | {"loss": 17_003}]
    assert [part["unread"] for part in found["parts"]] == [0, 0]


@pytest.mark.usefixtures("small_limit")
def test_runs_too_long_to_compare_are_reported(written, name):
    """The others are compared as far as the budget allows."""
    ticks = itertools.count()
    with (
        open_runs(written / name, cache=written / f"cache-long-{name}") as runs,
        Budget(Limits(seconds=60), clock=lambda: float(next(ticks))),
    ):
        (run,) = runs.query()
        (part,) = details.compare([("a", run), ("b", run)], ColumnCache())["parts"]

    assert part["unread"] > 0
    assert part["metrics"] == dict.fromkeys(NAMES[: len(NAMES) - part["unread"]])


@pytest.mark.usefixtures("small_limit")
def test_only_rows_of_the_last_file_are_held(written, name):
    """A run in parts only takes memory for its last file, and all its metrics are known."""
    parts, whole = ColumnCache(), ColumnCache()
    frame = parts.read(written / name, 0, ["loss"])
    whole.read(written / "whole", 0, ["loss"])

    assert frame.known == NAMES
    assert parts.nbytes < whole.nbytes / 4


@pytest.mark.usefixtures("small_limit")
def test_a_chart_keeps_working_while_parts_are_converted(tmp_path):
    """The answer is the same before, in between and afterwards."""
    write(tmp_path / "run", range(20_000), part_bytes=100_000)
    as_csv(tmp_path / "run")
    reader = ChartReader()
    with open_runs(tmp_path / "run", cache=tmp_path / "cache") as runs:
        (run,) = runs.query()
        conversions = convert_parts(tmp_path / "run", 0)
        found = []
        for _ in range(3):
            found += reader.series([("x", run)], ["loss"], Axis("step", "", 500, 900), points=60)
            found += reader.series([("x", run)], ["loss"], Axis(), points=60)
            next(conversions)
        list(conversions)
        found += reader.series([("x", run)], ["loss"], Axis("step", "", 500, 900), points=60)
        found += reader.series([("x", run)], ["loss"], Axis(), points=60)
    reader.close()

    for number, one in enumerate(found):
        del one["cursor"]
        np.testing.assert_equal(one, found[number % 2])


@pytest.mark.usefixtures("small_limit")
def test_appended_values_follow_after_a_part_was_closed(tmp_path):
    """An earlier cursor brings only new values; if they are in a closed part, all values come again."""
    write(tmp_path / "run", range(20_000), part_bytes=100_000)
    reader = ChartReader()
    with open_runs(tmp_path / "run", cache=tmp_path / "cache") as runs:
        (run,) = runs.query()

        def ask(cursor):
            (found,) = reader.series([("x", run)], ["loss"], Axis(), points=60, cursors=[cursor])
            return found

        first = ask("")
        write(tmp_path / "run", range(20_000, 20_030), part_bytes=1 << 20)
        second = ask(first["cursor"])
        write(tmp_path / "run", range(20_030, 23_000), part_bytes=100_000)
        third = ask(second["cursor"])
    reader.close()

    assert (first["append"], second["append"], third["append"]) == (False, True, False)
    assert list(second["x"]) == list(range(20_000, 20_030))
    assert (first["rows"], third["rows"]) == (20_000, 23_000)
