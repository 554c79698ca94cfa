"""How a notebook shows runs, a run and a series: HTML and figures."""

import html
import re
import subprocess
import sys
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from destinations import RunDirectory
from destinations.runs import Run, open_runs
from destinations.runs.notebook import sparkline_svg
from events import Run as WritingRun
from tests.test_destinations.runs.folders import HOUR, NOW, clock, write_run

HOSTILE = "<script>alert('x')</script>\n\x1b[31m"


def write(folder, steps=5, **hparams):
    """Writes a run with a falling loss and a metric with a hostile name."""
    with WritingRun(loggers=[RunDirectory(folder)], run_name=folder.name, raise_errors=True) as run:
        run.log_hyperparameters(hparams)
        for step in range(steps):
            run.log_metrics({"loss": 2.0**-step, "<b>odd</b>": float(step)}, step=step)
    return folder


def cells(shown):
    """Returns the rows of all tables, head and body, as texts; fails if the HTML isn't well-formed."""
    tree = ET.fromstring(f"<div>{shown}</div>")  # noqa: S314  # our own
    return [["".join(cell.itertext()) for cell in row] for row in tree.iter("tr")]


def test_a_run_shows_its_hyperparameters_and_metrics(tmp_path):
    """It shows each metric's last, smallest and largest value, count and sparkline, and how to view it."""
    shown = Run.open(write(tmp_path / "mine", lr=0.25))._repr_html_()

    assert cells(shown) == [
        ["hyperparameter", "value"],
        ["lr", "0.25"],
        ["metric", "last", "min", "max", "values", ""],
        ["loss", "0.0625", "0.0625", "1.0", "5", ""],
        ["<b>odd</b>", "4.0", "0.0", "4.0", "5", ""],
    ]
    assert shown.count("<polyline") == 2
    assert "<b>mine</b> completed" in shown
    assert f"<code>destinations view {tmp_path / 'mine'}</code>" in shown


def test_text_from_a_run_is_escaped(tmp_path):
    """Names, values and tags add no elements or control characters to the notebook."""
    run = write(tmp_path / "mine", **{HOSTILE: HOSTILE})
    write_run(tmp_path / "runs/other", name=HOSTILE, tags=[HOSTILE], summary={HOSTILE: 1.0})

    with open_runs(tmp_path / "runs", clock=clock) as runs:
        for shown in (Run.open(run)._repr_html_(), runs._repr_html_()):
            assert "<script" not in shown
            assert "<b>odd" not in shown
            assert "\x1b" not in shown
            assert any("<script>" in cell for row in cells(shown) for cell in row)


def test_runs_show_the_newest_twenty_and_say_how_many_are_left(tmp_path):
    """Each has status, age, duration, tags and metrics."""
    for number in range(22):
        write_run(
            tmp_path / f"run{number:02}",
            created_at=NOW - HOUR + number,
            ended_at=NOW - HOUR + number + 60,
            tags=["good"] if number == 21 else None,
        )

    with open_runs(tmp_path, clock=clock) as runs:
        shown = runs._repr_html_()

    head, *rows = cells(re.sub(r"<p>.*?</p>", "", shown))
    assert head[:5] == ["run", "status", "started", "took", "tags"]
    assert [row[0] for row in rows] == [f"run{number:02}" for number in range(21, 1, -1)]
    assert rows[0][1:5] == ["completed", "59m ago", "1m00s", "good"]
    assert "and 2 more" in shown
    assert f"destinations view {tmp_path}" in html.unescape(shown)


def test_a_list_of_runs_is_shown_in_its_order_and_is_a_list(tmp_path):
    """A query's result is a table in the order of the list; printed, runs show their folders."""
    for number in range(3):
        write_run(tmp_path / f"run{number}", summary={"loss": float(number)})

    with open_runs(tmp_path, clock=clock) as runs:
        found = runs.query(where="summary.loss > 0", sort_by="summary.loss")
        shown = found._repr_html_()

        assert repr(runs) == f"Runs({str(tmp_path)!r})"
    _, *rows = cells(re.sub(r"<p>.*?</p>", "", shown))
    assert [row[0] for row in rows] == [run.path.name for run in found] == ["run2", "run1"]
    assert isinstance(found, list)


def test_a_run_with_too_many_rows_has_no_sparklines(tmp_path, monkeypatch):
    """They would need all rows; the numbers are there."""
    folder = write(tmp_path / "mine")
    monkeypatch.setattr("destinations.runs.notebook._MAX_SPARK_BYTES", 10)

    shown = Run.open(folder)._repr_html_()

    assert "<polyline" not in shown
    assert ["loss", "0.0625", "0.0625", "1.0", "5", ""] in cells(shown)


def test_a_series_is_a_sparkline(tmp_path):
    """It has its name, last value and number of values, even without any values."""
    run = Run.open(write(tmp_path / "mine"))

    shown = run.series("<b>odd</b>")._repr_html_()

    assert "<b>&lt;b&gt;odd&lt;/b&gt;</b>" in shown
    assert "4.0" in shown
    assert "<small>5 values</small>" in shown
    assert shown.count("<polyline") == 1


def points(svg):
    """Returns the points of the line."""
    (line,) = re.findall(r'points="([^"]*)"', svg)
    return [tuple(map(float, point.split(","))) for point in line.split()]


@pytest.mark.parametrize("values", [[], [np.nan], [np.inf, -np.inf]], ids=str)
def test_no_line_is_drawn_without_finite_values(values):
    """Numpy doesn't warn either."""
    assert sparkline_svg(np.array(values)) == ""


def test_a_figure_is_shown_in_a_notebook_without_importing_pyplot(tmp_path):
    """Otherwise an import of pyplot sets up how a notebook shows figures."""
    pytest.importorskip("IPython")
    code = (
        "import sys\n"
        "from IPython.core.formatters import DisplayFormatter\n"
        "from destinations.runs.notebook import draw\n"
        "figure = draw({'loss': [('digits', [0, 1], [1.0, 0.5])]})\n"
        "shown, _ = DisplayFormatter().format(figure)\n"
        "print(shown['image/png'][:4], 'matplotlib.pyplot' in sys.modules)\n"
    )

    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert finished.stdout == "b'\\x89PNG' False\n"
