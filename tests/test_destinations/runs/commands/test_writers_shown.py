"""The commands' output for a run with several writers."""

import json
import os

import pytest

from destinations.runs import Run
from destinations.runs.content.writers import writer_states
from tests.test_destinations.runs.foreign_runs import command
from tests.test_destinations.runs.written import Written, write_shared

NOW = 1_700_000_000.0


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder with a run by a trainer and two writers, and a run by a trainer alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_shared(tmp_path / "runs" / "digits")
    with Written(tmp_path / "runs" / "alone") as alone:
        alone.log({"loss": 1.0}, 1)
    return tmp_path / "runs"


def run_command(root, *arguments):
    """Runs a command on the runs; returns its output."""
    code, output, errors = command(*arguments, "--root", root)
    assert (code, errors) == (0, "")
    return output


def test_show_has_a_line_for_each_writer(root):
    """A line has the writer's status, rows and last sign of life; JSON has the same."""
    text = run_command(root, "show", "digits")
    found = json.loads(run_command(root, "show", "digits", "--json"))

    lines = text.splitlines()
    place = lines.index("writers")
    assert lines[place + 1].startswith("  eval   completed, 3 rows, last sign of life ")
    assert lines[place + 2].startswith("  probe  completed, 2 rows, last sign of life ")
    assert [(one["name"], one["status"], one["is_alive"], one["rows"]) for one in found["writers"]] == [
        ("eval", "completed", False, 3),
        ("probe", "completed", False, 2),
    ]
    assert {name: one["count"] for name, one in found["metrics"].items()} == {
        "loss": 5,
        "lr": 1,
        "acc": 2,
        "norm": 1,
    }


def test_statuses_of_live_killed_and_starting_writers(tmp_path):
    """Each writer has its own status, whatever the trainer's is."""
    folder = tmp_path / "run"
    # Neither writes a heartbeat by itself meanwhile.
    with (
        Written(folder, writer="live", flush_seconds=300) as live,
        Written(folder, writer="killed", flush_seconds=300) as killed,
    ):
        live.log({"loss": 1.0}, 1)
        live.flush()
        killed.flush()
        os.utime(folder / "writers" / "killed" / "heartbeat", (NOW - 1000, NOW - 1000))
        os.utime(folder / "writers" / "live" / "heartbeat", (NOW - 10, NOW - 10))
        (folder / "writers" / "new").mkdir()
        states = writer_states(Run.open(folder), NOW)

    assert [(one.name, one.status, one.is_alive, one.rows) for one in states] == [
        ("killed", "killed", False, 0),
        ("live", "running", True, 1),
        ("new", "unknown", False, 0),
    ]


def test_an_unreadable_writer_is_shown(root):
    """Its run is shown too."""
    (root / "digits" / "writers" / "eval" / "metrics.csv").unlink()
    (root / "digits" / "writers" / "eval" / "metrics.csv").mkdir()

    code, output, _ = command("show", "digits", "--root", root)

    assert code == 0
    assert "eval   completed, rows cannot be read" in output
    assert "probe  completed, 2 rows" in output


def test_tail_names_the_writer_of_a_row(root):
    """Rows of the trainer have no name."""
    text = run_command(root, "tail", "digits", "--no-follow", "--lines", "4")
    lines = run_command(root, "tail", "digits", "--no-follow", "--json", "--metric", "loss")

    assert text.splitlines() == [
        "step 1 · probe  loss 12.0",
        "step 3 · eval  acc 0.3",
        "step 0 · eval  loss 0.5  acc 0.1",
        "step 2 · probe  norm 4.0",
    ]
    rows = [json.loads(line) for line in lines.splitlines()]
    assert [(row.get("writer"), row["metrics"]["loss"]) for row in rows] == [
        (None, 10.0),
        ("eval", 11.0),
        (None, 20.0),
        ("probe", 12.0),
        ("eval", 0.5),
    ]


def test_series_names_the_writer_of_a_value(root):
    """Values are in the order of steps. If only one writer has the metric, no name is shown."""
    text = run_command(root, "series", "digits", "loss")
    found = json.loads(run_command(root, "series", "digits", "loss", "--json", "--limit", "2"))

    assert text.splitlines()[2:] == ["step 1 · eval  11.0", "step 1 · probe  12.0", "step 2  20.0"]
    assert [(row["step"], row["writer"]) for row in found["values"]] == [(0, "eval"), (1, "")]
    assert run_command(root, "series", "digits", "acc").splitlines() == ["step 0  0.1", "step 3  0.3"]
    assert "writer" not in json.loads(run_command(root, "series", "digits", "lr", "--json"))["values"][0]


def test_ls_best_and_diff_have_the_values_of_writers(root):
    """They are shown like any other metric of the run."""
    listed = json.loads(run_command(root, "ls", "--json", "--where", "exists(summary.acc)"))
    best = json.loads(run_command(root, "best", "loss", "--min", "--json"))
    differences = json.loads(run_command(root, "diff", "digits", "alone", "--json"))["differences"]

    assert [one["name"] for one in listed] == ["digits"]
    assert [(one["value"], one["step"]) for one in best] == [(0.5, 0), (1.0, 1)]
    assert differences["summary.acc"] == [0.3, None]


def test_wait_waits_for_a_writer_after_the_trainer_has_ended(tmp_path):
    """A condition on a running evaluation doesn't fail before that ends."""
    folder = tmp_path / "runs" / "digits"
    late = Written(folder, writer="eval")
    with Written(folder) as trainer:
        trainer.log({"loss": 1.0}, 1)
    late.flush()

    timed_out, _, _ = command("wait", "summary.acc > 0.5", folder, "--timeout", "0")
    late.log({"acc": 0.75}, 1)
    late.close()
    holds, _, _ = command("wait", "summary.acc > 0.5", folder)
    ended, _, _ = command("wait", "summary.acc > 0.9", folder)

    assert (timed_out, holds, ended) == (124, 0, 1)


def test_a_figure_has_a_line_for_each_writer(root):
    """The writer's name follows the run's name."""
    pytest.importorskip("matplotlib")
    run = Run.open(root / "digits")

    (axes,) = run.plot("loss").axes
    (both,) = run.plot("loss", "acc").axes[:1]

    labels = [line.get_label().partition(" · ") for line in axes.lines]
    assert [writer for _, _, writer in labels] == ["", "eval", "probe"]
    assert {name for name, _, _ in labels} == {f"digits ({run.run_id})"}
    assert [line.get_label() for line in both.lines] == [
        "loss",
        "loss · eval",
        "loss · probe",
        "acc",
    ]
    assert [line.get_ydata().tolist() for line in axes.lines] == [[10.0, 20.0], [0.5, 11.0], [12.0]]


def test_a_notebook_shows_the_metrics_of_writers(root):
    """They come with sparklines, even without a trainer."""
    with Written(root / "late", writer="eval") as late:
        late.log({"acc": 0.5}, 1)
        late.log({"acc": 0.6}, 2)

    shown = Run.open(root / "digits")._repr_html_(), Run.open(root / "late")._repr_html_()

    assert all("<svg" in html and "acc" in html for html in shown)
