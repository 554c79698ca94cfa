"""`destinations runs …` as a user runs it, mostly in this process and sometimes in a separate one."""

import functools
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import ANY

import attrs
import pytest

from destinations import RunDirectory, cli
from destinations.run_directory import read_rows
from destinations.runs import Run, open_runs
from destinations.runs.commands.screen import NOTHING, CommandContext, Screen
from events import Run as WritingRun
from tests.test_destinations.runs.folders import write_lightning
from tests.test_destinations.runs.folders import write_run as write_folder

ROOT = Path(__file__).parents[4]
LIMIT_SECONDS = 300
NOW = 1_700_000_000.0


class Clock:
    """A clock that only moves when a test sets it."""

    def __init__(self, now):
        self.now = now

    def __call__(self):
        return self.now


def write_run(folder, *, lr=0.25, began=NOW, steps=5, error=None, tags=(), run_id=None, records=False):
    """Writes a run that took one second per step."""
    clock = Clock(began)
    destination = RunDirectory(
        folder,
        run_id=run_id or f"id-{folder.name}",
        tags=tags,
        clock=clock,
        keep_files="copy",
        flush_seconds=5.0,
    )
    run = WritingRun(loggers=[destination], run_name=folder.name, raise_errors=True).__enter__()
    run.log_hyperparameters({"optim": {"lr": lr, "name": "adam"}})
    for step in range(steps):
        clock.now += 1
        run.log_metrics({"loss": 2.0**-step + lr, "val/acc": step / 4 - lr}, step=step)
    if records:
        run.log_text("words", "note", step=3)
        run.log_table(["a"], [[1]], "table", step=3)
        (folder / "weights.bin").write_bytes(b"0" * 2048)
        run.upload_file("weights.bin", folder / "weights.bin", overwrite=True)
    writer = destination._writer
    run.__exit__(type(error), error, None) if error else run.__exit__(None, None, None)
    # A close waits ten seconds for it; a busy machine may take longer.
    writer._papers.environment.join(300)
    return Run.open(folder)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Four runs: one completed with records, one completed, one failed, and one failed without records."""
    root = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patch:
        # Outside of any repository: git's answer may change between runs, or take more than five seconds.
        patch.chdir(root)
        _write_all(root)
    return root


def _write_all(root):
    write_run(root / "alpha", lr=0.25, began=NOW, tags=["sweep:7", "good"], records=True)
    write_run(root / "beta", lr=0.5, began=NOW + 100, tags=["sweep:7"])
    write_run(root / "group/gamma", lr=0.75, began=NOW + 200, error=ValueError("out of luck"))
    write_run(root / "empty", lr=1.0, began=NOW + 300, steps=0, error=ValueError("at once"))


@pytest.fixture
def root(written, tmp_path, monkeypatch):
    """A copy of these runs, in a folder that the commands find by themselves."""
    shutil.copytree(written, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("DESTINATIONS_ROOT", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "runs"


@pytest.fixture
def runs(root, capsys):
    """Runs a command; returns exit code, output and messages."""

    def run(*arguments):
        try:
            code = cli.main(["runs", *map(str, arguments)])
        except SystemExit as ended:
            code = ended.code
        found = capsys.readouterr()
        return code, found.out, found.err

    return run


def session_of(now=NOW + 1000, wait=None, width=None):
    """Returns a session with readable output and messages."""

    def never(seconds):
        raise AssertionError("nothing to wait for")

    stream = io.StringIO()
    return CommandContext(
        Screen(stream, width), io.StringIO(), clock=now if callable(now) else Clock(now), wait=wait or never
    )


@functools.cache
def parser():
    """Returns the parser, which takes as long to build as most commands take to run."""
    return cli.build_parser(["runs"])


def run_in(session, *arguments):
    """Runs a command in a session; returns the exit code."""
    options = parser().parse_args(["runs", *map(str, arguments)])
    return options.run(options, session)


# Ls.


def test_ls_lists_the_newest_first(root):
    """A line has name, status, age, duration, tags, varying hyperparameters, and the main metrics."""
    session = session_of(NOW + 3660)

    assert run_in(session, "ls") == 0

    assert session.screen.stream.getvalue().replace(NOTHING, "-") == (
        "run    status     age  duration  tags           optim.lr    loss  val/acc\n"
        "empty  failed     56m        0s  -                   1.0       -        -\n"
        "gamma  failed     57m        5s  -                  0.75  0.8125     0.25\n"
        "beta   completed  59m        5s  sweep:7             0.5  0.5625      0.5\n"
        "alpha  completed   1h        5s  sweep:7, good      0.25  0.3125     0.75\n"
    )


def test_ls_shows_the_requested_columns(runs):
    """The command also filters, sorts and limits the rows."""
    code, out, _ = runs(
        "ls", "-c", "hparams.optim.lr,summary.loss", "--where", "hparams.optim.lr < 0.8", "--sort", "summary.loss",
        "--ascending", "-n", "2",
    )  # fmt: skip

    assert code == 0
    assert out == "run    optim.lr    loss\nalpha      0.25  0.3125\nbeta        0.5  0.5625\n"


def test_ls_as_json(runs):
    """The list has every field of each run, or the id and the requested columns."""
    for arguments, names in (
        (("--tag", "good"), ["alpha"]),
        (("--status", "failed"), ["empty", "gamma"]),
        (("--where", "summary.loss > 0.5 and not status == 'failed'"), ["beta"]),
        (("--sort", "hparams.optim.lr"), ["alpha", "beta", "gamma", "empty"]),
        (("--sort", "hparams.optim.lr", "--descending"), ["empty", "gamma", "beta", "alpha"]),
    ):
        code, out, _ = runs("ls", "--json", *arguments)
        found = json.loads(out)
        assert (code, [run["run_id"] for run in found]) == (0, [f"id-{name}" for name in names])
        fields = {"path", "status", "alive", "tags", "hparams", "summary", "created_at", "notes"}
        assert found[0].keys() >= fields
    _, out, _ = runs("ls", "--json", "-c", "hparams.optim.lr,duration", "--tag", "good")

    assert json.loads(out) == [{"run_id": "id-alpha", "hparams.optim.lr": 0.25, "duration": 5.0}]


def test_ls_without_runs_prints_a_message(runs, tmp_path):
    """Programs get empty output; people get a word beside it."""
    (tmp_path / "none").mkdir()

    assert runs("ls", "--root", tmp_path / "none") == (0, "", "no runs\n")
    assert runs("ls", "--root", tmp_path / "none", "--json") == (0, "[]\n", "")
    assert runs("ls", "--tag", "nobody's") == (0, "", "none of 4 runs match\n")


def test_ls_again_and_again(root):
    """With watching, it scans and prints the list again until Ctrl-C; as JSON, one line each time."""
    waited = []

    def wait(seconds):
        waited.append(seconds)
        if len(waited) == 2:
            raise KeyboardInterrupt
        shutil.rmtree(root / "beta")

    session = session_of(wait=wait)
    with pytest.raises(KeyboardInterrupt):
        run_in(session, "ls", "--watch", "5s", "--json")

    lists = [json.loads(line) for line in session.screen.stream.getvalue().splitlines()]
    assert [len(one) for one in lists] == [4, 3]
    assert waited == [5.0, 5.0]


# Show, best, diff.


def test_show_prints_everything_known_about_a_run(root):
    """It has hyperparameters, final and best values, records, environment, and the cost of logging."""
    session = session_of(NOW + 3600)

    assert run_in(session, "show", "alpha") == 0

    out = session.screen.stream.getvalue()
    lines = out.splitlines()
    assert lines[:4] == [
        "alpha  id-alpha  completed",
        str(root / "alpha"),
        "started 1h ago, took 5s",
        "tags: sweep:7, good",
    ]
    assert "  optim.lr    0.25" in lines
    assert "loss     0.3125  0.3125        4  1.25        0       5  █▄▂▁▁" in lines
    assert "  artifacts  1, 2.0 KiB: weights.bin" in lines
    assert "  texts      1: note" in lines
    for title in ("hyperparameters", "records", "environment", "logging overhead"):
        assert title in lines
    assert "  rows      5" in lines
    assert re.fullmatch(r"  time +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", lines[lines.index("environment") + 1])


def test_show_lists_sessions_and_reads_branches(tmp_path, runs):
    """A run that went back has one line per session; `--branch` shows, prints and exports one of them."""
    place, saved = tmp_path / "mine", None
    for lr in (0.125, 0.25):
        ours = RunDirectory(place)
        with WritingRun(loggers=[ours], run_name="mine") as run:
            if saved is not None:
                run.state.continues_run = True
                ours.load_state_dict(saved)
                run.run_event("after_load")
            run.log_hyperparameters({"lr": lr, "width": 8})
            run.fit_start()
            saved = ours.state_dict()
            run.log_metrics({"loss": lr}, step=0)
    session = Run.open(place).sessions[0]["session"]

    def output(*arguments):
        code, out, _ = runs(*arguments)
        assert code == 0
        return out

    assert f"  1  {session}  completed, left a branch; lr=0.125\n" in output("show", place)
    assert "  lr     0.125\n" in output("show", place, "--branch", "1")
    assert json.loads(output("show", place, "--json"))["branches"] == [session]
    assert output("series", place, "loss") == "step 0  0.25\n"
    assert output("series", place, "loss", "--branch", session) == "step 0  0.125\n"
    rows = output("export", place, "--rows", "--branch", "1").splitlines()
    assert [row.rpartition(",")[2] for row in rows] == ["loss", "0.125"]
    assert runs("show", place, "--branch", "3")[0] == 1


def test_show_as_json(runs):
    """The document has everything, without rounding."""
    _, out, _ = runs("show", "id-alpha", "--json")

    found = json.loads(out)
    assert found["metrics"]["loss"] | {"mean": 0} == {
        "last": 0.3125, "min": 0.3125, "max": 1.25, "min_step": 4, "max_step": 0, "count": 5, "non_finite": 0, "mean": 0,
    }  # fmt: skip
    assert found["hyperparameters"] == {"optim": {"lr": 0.25, "name": "adam"}}
    assert found["records"] == {"tables": 1, "texts": 1, "artifacts": 1}
    assert found["sessions"][0]["status"] == "completed"
    assert found["receipt"]["calls"] == 5


@pytest.mark.parametrize(
    ("direction", "ranks"),
    [
        ("--min", [("id-alpha", 0.3125, 4), ("id-beta", 0.5625, 4), ("id-gamma", 0.8125, 4)]),
        ("--max", [("id-gamma", 1.75, 0), ("id-beta", 1.5, 0), ("id-alpha", 1.25, 0)]),
    ],
)
def test_best_ranks_by_the_best_value_ever(runs, direction, ranks):
    """The step is shown; a run without the metric has no rank."""
    _, out, _ = runs("best", "loss", direction, "--json")
    code, table, _ = runs("best", "loss", direction, "-n", "1")

    found = json.loads(out)
    assert [(one["run_id"], one["value"], one["step"]) for one in found] == ranks
    assert [one["rank"] for one in found] == [1, 2, 3]
    assert code == 0
    assert len(table.splitlines()) == 2
    assert table.splitlines()[0].split()[1:3] == ["min" if direction == "--min" else "max", "loss"]


def test_diff_shows_only_differences(runs):
    """The comparison covers hyperparameters, environment and metrics, and is available as JSON."""
    code, out, _ = runs("diff", "alpha", "beta", "gamma")
    _, as_json, _ = runs("diff", "alpha", "beta", "--json")

    names = [line.split()[0] for line in out.splitlines()[1:]]
    assert code == 0
    assert names == ["status", "tags", "hparams.optim.lr", "summary.loss", "summary.val/acc"]
    found = json.loads(as_json)
    assert found["runs"] == ["id-alpha", "id-beta"]
    assert found["differences"]["hparams.optim.lr"] == [0.25, 0.5]


def test_different_values_never_look_equal(root, runs):
    """`diff` and `ls` distinguish values that would round to the same digits, and types that look alike."""
    values = {
        "one": {"lr": 0.1000001, "seed": 1, "note": None, "deep": True},
        "two": {"lr": 0.1000002, "seed": "1", "deep": "True"},
    }
    for name, hparams in values.items():
        with WritingRun(loggers=[RunDirectory(root / name)], run_name=name) as run:
            run.log_hyperparameters(hparams)
            run.log_metrics({"loss": 0.5})

    _, out, _ = runs("diff", "one", "two")
    _, listed, _ = runs("ls", "--where", "name in ('one', 'two')", "--columns", "hparams.lr,hparams.seed")

    rows = {name: cells for name, *cells in map(str.split, out.splitlines()[1:])}
    assert {name.removeprefix("hparams."): cells for name, cells in rows.items() if "hparams" in name} == {
        "lr": ["0.1000001", "0.1000002"],
        "seed": ["1", '"1"'],
        "note": ["none", NOTHING],
        "deep": ["true", "True"],
    }
    assert sorted(map(str.split, listed.splitlines()[1:])) == [
        ["one", "0.1000001", "1"],
        ["two", "0.1000002", '"1"'],
    ]


# Plot.


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_plot_draws_a_picture(runs, tmp_path, name, start):
    """The picture has several runs; a run without the metric is named and left out."""
    code, out, err = runs(
        "plot", "loss", "alpha", "beta", "empty", "-o", tmp_path / name, "--log", "--x", "time"
    )

    assert (code, out) == (0, f"{tmp_path / name}\n")
    assert err == "run id-empty has no metric 'loss'\n"
    assert (tmp_path / name).read_bytes().startswith(start)


def test_plot_draws_the_points_of_the_run(root):
    """Lines have the steps or seconds and the values of the series."""
    run = Run.open(root / "alpha")
    series = run.series("loss")

    (axes,) = run.plot("loss").axes

    (line,) = axes.lines
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == (
        series.step.tolist(),
        series.value.tolist(),
    )
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_legend().texts[0].get_text()) == (
        "step",
        "loss",
        "alpha (id-alpha)",
    )


# Series, tail and wait.


def test_series_prints_the_values_of_a_metric(runs):
    """They are printed exactly, with their steps."""
    _, every, _ = runs("series", "alpha", "loss")
    _, document, _ = runs("series", "alpha", "loss", "--limit", "1", "--json")
    _, _, unknown = runs("series", "alpha", "los")

    assert every.splitlines()[-2:] == ["step 3  0.375", "step 4  0.3125"]
    assert json.loads(document) == {
        "run_id": "id-alpha",
        "metric": "loss",
        "values": [{"step": 0, "time": NOW + 1, "value": 1.25}],
    }
    assert "did you mean 'loss'?" in unknown


def test_tail_of_an_ended_run(runs):
    """The command prints the requested number of last rows, and ends."""
    _, rows, _ = runs("tail", "alpha", "-n", "2", "-m", "loss")
    _, lines, _ = runs("tail", "alpha", "-n", "1", "--json")

    assert rows == "step 3  loss 0.375\nstep 4  loss 0.3125\n"
    assert json.loads(lines) == {
        "step": 4,
        "epoch": 0,
        "time": NOW + 5,
        "metrics": {"loss": 0.3125, "val/acc": 0.75},
    }


def test_tail_follows_a_run_until_it_ends(runs, root):
    """Rows that arrive meanwhile are printed once each."""
    destination = RunDirectory(root / "live", run_id="live", flush_seconds=0.05)
    with WritingRun(loggers=[destination], run_name="live", raise_errors=True) as run:
        run.log_metrics({"a": 1.0}, step=0)
        run.log_metrics({"a": 2.0}, step=1)
        command = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "destinations.cli",
                "runs",
                "tail",
                root / "live",
                "-n1",
                "--json",
                "--interval",
                "0.05",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        first = command.stdout.readline()
        run.log_metrics({"a": 3.0}, step=2)
        second = command.stdout.readline()
        run.log_metrics({"b": 4.0}, step=3)
    rest, messages = command.communicate(timeout=LIMIT_SECONDS)

    steps = [json.loads(line)["step"] for line in (first, second, *rest.splitlines())]
    assert (steps, messages, command.returncode) == ([1, 2, 3], "run live: completed\n", 0)


def test_wait_names_a_metric_that_the_run_lacks(runs):
    """The metric may come later, or be a typo, and then the wait would never end."""
    _, _, err = runs("wait", "summary.los < 1", "alpha")

    assert err.startswith("run id-alpha has no 'summary.los' yet; did you mean 'summary.loss'?\n")


def test_wait_gives_up_in_time(root):
    """The exit code is the same as for `timeout`."""
    destination = RunDirectory(root / "live", run_id="live", flush_seconds=0.05)
    with WritingRun(loggers=[destination], run_name="live", raise_errors=True):
        clock = Clock(time.time())

        def wait(seconds):
            clock.now += seconds

        session = session_of(clock, wait)

        code = run_in(session, "wait", "not alive", "live", "--timeout", "5s", "--interval", "2s")

    assert code == 124
    assert "the condition did not hold before the timeout" in session.errors.getvalue()


# Export, compact, sql.


def test_export_of_the_rows_of_a_run(runs, tmp_path):
    """Each metric has a column, as in `metrics.csv`; the command takes one run."""
    code, said, _ = runs("export", "alpha", "--rows", "-o", tmp_path / "alpha.csv")
    _, out, _ = runs("export", "alpha", "--rows")

    assert (code, said) == (0, f"wrote 5 rows of 1 runs to {tmp_path / 'alpha.csv'}\n")
    assert out == (tmp_path / "alpha.csv").read_text() == (tmp_path / "runs/alpha/metrics.csv").read_text()
    assert runs("export", "alpha", "beta", "--rows") == (
        2,
        "",
        "--rows exports one run, got 2. Give its name.\n",
    )


def test_pack_converts_parts_of_earlier_versions(runs, tmp_path):
    """Each CSV becomes Parquet, once; a damaged part stays and is reported."""
    # As in a run of format 2.
    for name in ("metrics.history.jsonl", "sessions.jsonl"):
        (tmp_path / "runs/alpha" / name).unlink(missing_ok=True)
    parts = tmp_path / "runs/alpha/parts/metrics"
    parts.mkdir(parents=True)
    lines = "".join(f"{step},0,{step / 8},{step % 7}\n" for step in range(3000))
    (parts / "00000001.csv").write_text(f"step,epoch,time,loss\n{lines}")
    (parts / "00000002.parquet").write_bytes(b"")

    first, again = runs("pack", "alpha"), runs("pack", "alpha", "--json")

    assert first[:2] == (0, "alpha: 1 parts were converted\n")
    assert first[2].startswith("alpha: part 2 of rank 0 stays as it is: ")
    assert sorted(path.name for path in parts.iterdir()) == ["00000001.parquet", "00000002.parquet"]
    (packed,) = json.loads(again[1])
    assert (packed["run_id"], packed["parts"], packed["left"][0]["part"]) == ("id-alpha", 0, 2)
    assert len(runs("export", "alpha", "--rows")[1].splitlines()) == 3000 + 5 + 1


def test_compact_and_sql(runs, tmp_path):
    """You can query the compacted runs; compacting again changes nothing, and gone runs go on request."""
    pytest.importorskip("deltalake")
    _, first, _ = runs("compact", tmp_path / "runs", tmp_path / "dataset")
    _, second, _ = runs("compact", tmp_path / "runs", tmp_path / "dataset", "--json")
    query = (
        "SELECT run_id, min(value) AS least FROM metrics WHERE metric = 'loss' GROUP BY run_id ORDER BY least"
    )

    _, table, _ = runs("sql", query, "--dataset", tmp_path / "dataset")
    _, rows, _ = runs("sql", query, "--root", tmp_path / "dataset", "--json")
    _, third, _ = runs(
        "compact", tmp_path / "runs", tmp_path / "dataset", "--optimize", "--vacuum", "0", "--json"
    )
    wrong = runs("sql", "SELEC", "--dataset", tmp_path / "dataset")
    nowhere = runs("sql", query, "--dataset", tmp_path)
    files = len(list((tmp_path / "dataset" / "metrics").rglob("*.parquet")))
    shutil.rmtree(tmp_path / "runs/alpha")
    code, removed, _ = runs("compact", tmp_path / "runs", tmp_path / "dataset", "--remove-gone")

    assert code == 0
    assert "4 new" in first
    assert "1 removed" in removed
    assert json.loads(second)["added"] == json.loads(second)["changed"] == 0
    assert json.loads(third)["version"] > json.loads(second)["version"]
    assert files == 1
    assert table.splitlines()[:2] == ["run_id     least", "id-alpha  0.3125"]
    assert [row["run_id"] for row in json.loads(rows)] == ["id-alpha", "id-beta", "id-gamma"]
    assert wrong[0] == nowhere[0] == 1
    assert wrong[2].startswith("query must be one that DuckDB understands")
    assert "must hold a dataset, got none" in nowhere[2]


def test_compact_reports_runs_that_it_leaves_out(runs, root, tmp_path):
    """If two projects have the same id, the older run is named, and the exit code is 3."""
    pytest.importorskip("deltalake")
    for number, name in enumerate(("one", "two")):
        times = {"created_at": NOW, "updated_at": NOW + number}
        folder = write_folder(tmp_path / name / "run", "same", **times)
        (folder / "metrics.csv").write_text("step,epoch,time,loss\n0,0,1,0.5\n")
        first = runs("compact", tmp_path / name, tmp_path / "one-by-one")
    at_once = runs("compact", tmp_path, tmp_path / "at-once", "--json")

    assert first[0] == at_once[0] == 3
    assert first[2] == f"left out {tmp_path / 'one/run'}: a newer run has the same id\n"
    assert json.loads(at_once[1])["duplicates"] == [str(tmp_path / "one/run")]


def test_runs_of_a_dataset_are_tagged_and_noted(runs, root, tmp_path):
    """This includes a run with a deleted folder; no folder changes."""
    pytest.importorskip("deltalake")
    dataset = tmp_path / "dataset"
    runs("compact", root, dataset)
    shutil.rmtree(root / "beta")

    tagged = [runs("tag", name, "+kept", "--root", dataset)[:2] for name in ("alpha", "beta")]
    noted = runs("note", "beta", "worth it", "--root", dataset)[0]

    assert tagged == [(0, "sweep:7\ngood\nkept\n"), tagged[1]]
    assert tagged[1][1].splitlines()[-1] == "kept"
    assert noted == 0
    assert runs("note", "beta", "--root", dataset)[1] == "worth it\n"
    assert not (root / "alpha/edits.json").exists()


# Editing.


def test_tags_are_added_and_removed(runs, root):
    """The trainer's tags stay; a change may begin with a dash, even if it looks like an option."""
    before = (root / "alpha/sidecar.json").read_bytes()

    code, out, _ = runs("tag", "alpha", "+new", "-good", "+-dash", "-hello", "-1", "+größe")
    _, tags, _ = runs("tag", "alpha", "--json")

    assert (code, out) == (0, "sweep:7\nnew\n-dash\ngröße\n")
    assert json.loads(tags) == {"run_id": "id-alpha", "tags": ["sweep:7", "new", "-dash", "größe"]}
    assert json.loads(runs("ls", "--tag", "new", "--json")[1])[0]["run_id"] == "id-alpha"
    assert (root / "alpha/sidecar.json").read_bytes() == before


def test_contradictory_changes_are_refused(runs):
    """Nothing changes."""
    for changes, message in (
        (("plain",), "expected +TAG or -TAG, got 'plain'. Write +plain.\n"),
        (("+",), "expected +TAG or -TAG, got '+'"),
        (("--unknown",), "expected +TAG or -TAG, got '--unknown'"),
        (("+a", "-a"), "cannot both add and remove tag 'a'."),
    ):
        code, _, err = runs("tag", "alpha", *changes)
        assert code == 2
        assert err.startswith(message)
    assert json.loads(runs("tag", "alpha", "--json")[1])["tags"] == ["sweep:7", "good"]


def test_a_run_is_renamed(runs):
    """The new name finds it."""
    assert runs("rename", "alpha", "The First")[0] == 0

    assert runs("show", "The First")[1].splitlines()[0] == "The First  id-alpha  completed"
    assert json.loads(runs("rename", "alpha", "", "--json")[1])["name"] == "alpha"


def test_archived_runs_are_hidden_from_the_list(runs):
    """It stays hidden until you restore it or ask for it. One wrong name among several changes nothing."""
    wrong = runs("archive", "alpha", "nobody")
    still = json.loads(runs("ls", "--json")[1])
    code, _, _ = runs("archive", "alpha", "beta")
    left = [run["run_id"] for run in json.loads(runs("ls", "--json")[1])]
    all_ = json.loads(runs("ls", "--json", "--archived")[1])
    runs("unarchive", "alpha")

    assert (wrong[0], len(still), code) == (1, 4, 0)
    assert left == ["id-empty", "id-gamma"]
    assert sorted(run["run_id"] for run in all_ if run["archived"]) == ["id-alpha", "id-beta"]
    assert "alpha" in runs("ls")[1]


# Gc.


def test_gc_lists_deletable_runs_and_deletes_nothing(runs, root):
    """These are archived runs, and empty runs that ended without success."""
    runs("archive", "beta")

    code, out, err = runs("gc", "--older-than", "0s")

    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["id-empty", "id-beta"]
    assert "ended without success, empty" in out
    assert err.endswith("not deleted; add --delete to delete them permanently\n")
    assert (root / "empty").is_dir()
    assert (root / "beta").is_dir()


def test_gc_keeps_a_failed_run_with_content(runs, root):
    """This may be a row, a record, a file or a checkpoint."""
    for name in (
        "metrics.csv",
        "texts.jsonl",
        "media.jsonl",
        "artifacts.jsonl",
        "checkpoints/last.ckpt",
        "metrics.rank1.csv",
    ):
        path = root / "empty" / name
        before = path.read_bytes() if path.exists() else None
        path.parent.mkdir(exist_ok=True)
        path.write_text("step\n1\n")

        assert runs("gc", "--older-than", "0s") == (0, "", "nothing to delete\n"), name
        path.unlink()
        if before is not None:
            path.write_bytes(before)


def test_gc_keeps_young_and_live_runs(runs, root):
    """The default age is a month; a live run is never touched, archived or not."""
    runs("archive", "beta")
    sidecar = json.loads((root / "beta/sidecar.json").read_text())
    assert runs("gc") == (0, "", "nothing to delete\n")
    (root / "beta/sidecar.json").write_text(json.dumps(sidecar | {"status": "running"}))
    os.utime(root / "beta/heartbeat")
    shutil.rmtree(root / "empty")

    assert runs("gc", "--older-than", "0s", "--delete") == (0, "", "nothing to delete\n")
    assert (root / "beta").is_dir()


# Scan.


# Errors.


BAD_INPUT = [
        (("show", "alfa"), 1, "no run has the id, name or path 'alfa'. Did you mean 'alpha'"),
        (("show", "id-"), 1, "run 'id-' is ambiguous: "),
        (("best", "los", "--min"), 1, "unknown metric 'los'; did you mean 'loss'?"),
        (("plot", "los", "alpha"), 1, "unknown metric 'los'; did you mean 'loss'?"),
        (("tail", "alpha", "-m", "los"), 1, "unknown metric 'los'; did you mean 'loss'?"),
        (("ls", "--sort", "summary.los"), 1, "unknown metric 'summary.los'; did you mean 'summary.loss'"),
        (("ls", "-c", "lr"), 2, "unknown column 'lr'. Did you mean 'hparams.optim.lr'?"),
        (("ls", "--root", "nowhere"), 2, "root 'nowhere' does not exist."),
        (("wait", "loss <", "alpha"), 2, ""),
        (("gc", "--older-than", "5y"), 2, "argument --older-than: invalid duration '5y'"),
        (("ls", "-n", "-1"), 2, "argument --limit/-n: expected a whole number"),
        (("ls", "--statsu", "x"), 2, "unknown argument '--statsu'; did you mean '--status'?"),
        (("lss",), 2, "unknown command 'lss'; did you mean 'ls'?"),
        (("ls", "--where", "summary.los < 1"), 1, "unknown metric 'summary.los'; did you mean 'summary.loss'"),
        (("best", "acc", "--max"), 1, "unknown metric 'acc'; did you mean 'val/acc'?"),
        (("send", "alpha", "--to", "neptune:x"), 2, "unknown target 'neptune:x'"),
        (("export", "-o", "a.xlsx"), 2, "output must end with .csv, .parquet, .jsonl, got 'a.xlsx'."),
        (("export", "alpha", "--tag", "x"), 2, "give either run names or --where"),
        (("plot", "loss", "alpha", "-o", "a.txt"), 2, "output must end with .png, .svg, .pdf, got 'a.txt'.\n"),
]  # fmt: skip


def test_bad_input_is_a_message_and_an_exit_code(runs):
    """Exit code 1 means that something is missing, 2 wrong usage. A caret shows a mistake in a filter."""
    for arguments, code, message in BAD_INPUT:
        found, out, err = runs(*arguments)
        assert (found, out) == (code, ""), arguments
        assert err.startswith(message)
        assert "Traceback" not in err
    code, _, err = runs("ls", "--where", "hparams.optim.lr > > 2")

    assert code == 2
    assert err.splitlines()[1:] == ["  hparams.optim.lr > > 2", "                     ^"]


def test_a_missing_root_prints_what_to_do(runs, tmp_path, monkeypatch):
    """There is neither a folder `runs` nor a variable."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    assert runs("ls") == (
        2,
        "",
        "no folder 'runs' here. Give --root FOLDER, or set DESTINATIONS_ROOT.\n",
    )


@pytest.mark.parametrize(
    ("module", "arguments", "advice"),
    [
        ("matplotlib", ("plot", "loss", "alpha", "-o", "a.png"), "pip install matplotlib"),
        ("deltalake", ("compact", "runs", "dataset"), "pip install deltalake"),
        ("tensorboard", ("send", "alpha", "--to", "tensorboard:tb"), "pip install tensorboard"),
        ("wandb", ("send", "alpha", "--to", "wandb:p"), "pip install wandb"),
        ("mlflow", ("send", "alpha", "--to", "mlflow:sqlite:///a.db"), "pip install mlflow"),
    ],
)
def test_a_missing_package_is_named_with_how_to_install_it(runs, monkeypatch, module, arguments, advice):
    """The exit code is 1, and the command leaves no files behind."""
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)

    code, out, err = runs(*arguments)

    assert (code, out) == (1, "")
    assert advice in err
    assert (
        sorted(path.name for path in Path.cwd().iterdir()) == ["cache", "runs"]
        or not Path("a.parquet").exists()
    )


def in_a_process(root, *arguments, **options):
    """Starts the command line in a separate process."""
    return subprocess.Popen(
        [sys.executable, "-m", "destinations.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT), "DESTINATIONS_ROOT": str(root)},
        **options,
    )


def test_a_closed_pipe_causes_no_traceback(root):
    """As with `| head`, the exit code is 141 and stderr is empty."""
    command = in_a_process(root, "runs", "export", *["alpha"] * 800, "--metrics")
    command.stdout.readline()
    command.stdout.close()

    messages = command.stderr.read()

    assert (command.wait(LIMIT_SECONDS), messages) == (141, b"")
    command.stderr.close()


class ClosedAfterLines(io.StringIO):
    """A pipe whose reader ends after six lines."""

    def write(self, text):
        if self.getvalue().count("\n") == 6:
            raise BrokenPipeError
        return super().write(text)


def test_a_closed_pipe_is_no_damaged_run(root, monkeypatch, capsys):
    """`show` says nothing of the sections that it could not print."""
    monkeypatch.setattr(sys, "stdout", ClosedAfterLines())

    assert cli.main(["runs", "show", str(root / "alpha")]) == 141

    assert capsys.readouterr().err == ""


def test_ctrl_c_is_exit_code_130(root):
    """It comes without a traceback, whatever the command was doing."""
    command = in_a_process(root, "runs", "ls", "--watch", "1h", "--json")
    command.stdout.readline()
    command.send_signal(signal.SIGINT)

    _, messages = command.communicate(timeout=LIMIT_SECONDS)

    assert (command.returncode, messages) == (130, b"")


def test_ctrl_c_while_the_commands_are_imported_is_exit_code_130(root):
    """The user may interrupt early, or the disk may be slow."""
    code = (
        "import sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'destinations.runs.commands': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from destinations import cli\n"
        "sys.exit(cli.main(['runs', 'ls']))"
    )

    finished = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=False,
        timeout=LIMIT_SECONDS,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )

    assert (finished.returncode, finished.stdout, finished.stderr) == (130, b"", b"")


def test_listing_loads_nothing_heavy(root):
    """It imports neither torch, numpy, nor the packages that write runs and upload files."""
    heavy = (
        "torch",
        "numpy",
        "pandas",
        "boto3",
        "matplotlib",
        "duckdb",
        "yaml",
        "events",
        "PIL",
        "uploads.errors",
    )
    code = (
        "import sys; from destinations import cli; code = cli.main(['runs', 'ls', '--json'])\n"
        f"print(code, [name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )

    finished = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )

    assert finished.stderr == "0 []\n"
    assert len(json.loads(finished.stdout)) == 4


# Send.


def test_send_takes_several_runs(runs, root, tmp_path):
    """They are selected by name, by a filter, or all; if one can't be sent, the others still are."""
    to = ("--to", f"run:{tmp_path / 'to'}")
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "alpha").write_text("is no folder")
    named = runs("send", "alpha", "beta", *to)
    filtered = runs("send", "--where", 'name == "beta"', *to, "--json")
    neither = runs("send", *to)
    both = runs("send", "alpha", "--all", *to)
    every = runs("send", "--all", "--to", f"run:{tmp_path / 'all'}")

    assert (named[0], "id-beta to" in named[1], named[2].startswith("id-alpha: ")) == (3, True, True)
    assert [one["run_id"] for one in json.loads(filtered[1])] == ["id-beta"]
    assert (neither[0], both[0]) == (2, 2)
    assert neither[2] == "give run names, or --where, --tag and --status, or --all.\n"
    assert {path.name for path in (tmp_path / "all").iterdir()} >= {"alpha", "beta"}
    assert len(every[1].splitlines()) == len(runs("ls")[1].splitlines()) - 1


def test_send_reports_missing_files_and_rejected_records(runs, root, tmp_path):
    """A deleted file causes a message, a rejected record exit code 3."""
    (root / "alpha/artifacts/weights.bin").unlink()
    gone = runs("send", "alpha", "--to", f"run:{tmp_path / 'to'}")
    (root / "beta/media.jsonl").write_text(
        '{"step": 1, "name": "/up", "tag": "/up", "type": "audio", "path": "metrics.csv", "index": 0, "time": 1.0}\n'
    )

    refused = runs("send", "beta", "--to", f"run:{tmp_path / 'to'}")

    assert gone[0] == 0
    assert gone[2] == "file 'artifacts/weights.bin' of a record is not in the folder of its run.\n"
    assert refused[0] == 3
    assert refused[2].startswith("id-beta: audio: RecordError: name '")


# Import.


def test_import_copies_the_runs_of_other_loggers(runs, tmp_path):
    """It copies rows, times and hyperparameters. A second import writes only changes; originals stay."""
    theirs = tmp_path / "theirs"
    lightning = write_lightning(
        theirs / "version_0", csv="loss,step\r\n0.5,1\r\n0.25,2\r\n", hparams="lr: 0.125\n"
    )
    spt = write_folder(theirs / "spt", "of-spt", format_version=None, created_at=NOW, tags=["good"])
    (spt / "metrics.csv").write_text("step,loss\n3,0.75\n")
    before = {path: path.read_bytes() for path in theirs.rglob("*") if path.is_file()}

    first = runs("import", theirs, "--root", tmp_path / "ours")
    again = runs("import", theirs, "--root", tmp_path / "ours", "--json")
    with (lightning / "metrics.csv").open("a") as file:
        file.write("0.125,3\r\n")
    more = runs("import", theirs, "--root", tmp_path / "ours")

    said = f"imported 2 runs into {tmp_path / 'ours'}: 3 rows, 3 values; 0 were there already\n"
    assert first == (0, said, "")
    assert json.loads(again[1]) == {
        "runs": 0,
        "unchanged": 2,
        "busy": 0,
        "rows": 0,
        "values": 0,
        "records": {},
        "left_out": {},
        "missing": [],
        "bytes_there": 0,
        "bytes_read": 0,
        "failures": 0,
        "failed": [],
        "root": str(tmp_path / "ours"),
    }
    assert more[1].startswith("imported 1 runs into ")
    assert {path: path.read_bytes() for path in before} == before | {
        lightning / "metrics.csv": b"loss,step\r\n0.5,1\r\n0.25,2\r\n0.125,3\r\n"
    }
    found = {run.run_id: run for run in map(Run.open, (tmp_path / "ours").iterdir())}
    assert found["of-spt"].record.tags == ("good",)
    assert [(row.step, row.metrics["loss"]) for row in read_rows(found["of-spt"].path)] == [(3, 0.75)]
    (copied,) = (run for run_id, run in found.items() if run_id != "of-spt")
    assert copied.run_id.startswith("version_0-")
    assert copied.record.hparams == {"lr": 0.125}
    assert copied.record.status == "preempted"
    assert [row.step for row in read_rows(copied.path)] == [1, 2, 3]


def test_folders_of_one_name_are_imported_as_runs_of_their_own(runs, tmp_path):
    """Lightning calls each project's first run `version_0`."""
    for name, loss in (("one", 0.5), ("two", 0.25)):
        write_lightning(tmp_path / name / "lightning_logs/version_0", f"loss,step\r\n{loss},1\r\n")

    places = [tmp_path / name / "lightning_logs" for name in ("one", "two", "one")]
    said = [runs("import", place, "--root", tmp_path / "ours")[1].split(" into ")[0] for place in places]

    assert [text.split()[1] for text in said] == ["1", "1", "0"]
    with open_runs(tmp_path / "ours") as found:
        losses = {run.run_id: run.series("loss").value.tolist() for run in found}
        assert sorted(losses.values()) == [[0.25], [0.5]]
        assert found["version_0"].series("loss").value.tolist() == [0.5]


def test_a_run_that_cannot_be_imported_stops_no_others(runs, tmp_path):
    """The others are copied, and the exit code is an error."""
    theirs = tmp_path / "theirs"
    for name in ("good", "taken"):
        folder = write_folder(theirs / name, name, format_version=None, created_at=NOW)
        (folder / "metrics.csv").write_text("step,loss\n3,0.75\n")
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours/taken").write_text("a file in its place")

    code, out, err = runs("import", theirs, "--root", tmp_path / "ours")

    assert code == 3
    assert out.startswith(f"imported 1 runs into {tmp_path / 'ours'}: 1 rows, ")
    assert err.startswith("taken: [Errno 17] File exists: ")
    assert (tmp_path / "ours/taken").read_text() == "a file in its place"


def test_import_reports_omissions_and_the_column_it_needs(runs, tmp_path):
    """Each causes a message; without a terminal to ask in, the exit code is 2."""
    (tmp_path / "history.csv").write_text("iteration,loss\n0,0.5\n10,none\n")

    asked = runs("import", tmp_path / "history.csv", "--root", tmp_path / "ours")
    done = runs("import", tmp_path / "history.csv", "--root", tmp_path / "ours", "--column", "step=iteration")

    assert asked[0] == 2
    assert "has no column 'step'. Name the step column" in asked[2]
    assert done == (
        0,
        f"imported 1 runs into {tmp_path / 'ours'}: 1 rows, 1 values; 0 were there already\n",
        "left out: 1 cells that are no numbers\n",
    )


def test_import_asks_for_the_step_in_a_terminal(tmp_path):
    """The columns are shown before the question."""
    (tmp_path / "history.csv").write_text("iteration,loss\n0,0.5\n10,0.25\n")
    session = attrs.evolve(session_of(), ask=lambda question: " iteration ")
    options = cli.build_parser().parse_args(
        ["runs", "import", str(tmp_path / "history.csv"), "--root", str(tmp_path / "ours")]
    )

    code = options.run(options, session)

    assert (code, session.errors.getvalue()) == (0, "columns: iteration, loss\n")
    assert [row.step for row in read_rows(tmp_path / "ours/history")] == [0, 10]


def test_import_shows_a_bar_in_a_terminal(terminal, tmp_path):
    """The error stream shows the number of finished runs and of values, in one line that fits."""
    (tmp_path / "history.csv").write_text("step,loss,acc\n0,0.5,1\n10,0.25,1\n")
    arguments = ["runs", "import", str(tmp_path / "history.csv"), "--root", str(tmp_path / "ours")]

    program = (
        f"import io, sys; sys.stdout = io.StringIO(); from destinations.cli import main; main({arguments})"
    )
    bar, *rest = terminal(program)

    assert "1/1" in bar
    assert "4 values" in bar
    assert rest == [""]


def test_import_needs_a_place_with_runs(runs, tmp_path):
    """Errors: nothing there, nothing recognised, several folders to write to, or no such column."""
    write_lightning(tmp_path / "theirs/version_0")
    for arguments, message in (
        (["nowhere"], "nothing exists at 'nowhere'"),
        (["runs"], "no runs were recognised"),
        (["theirs", "--root", "s3://bucket/runs"], "runs are imported into one folder"),
        (["theirs", "--root", "ours", "--root", "theirs"], "runs are imported into one folder"),
        (["history.csv", "--column", "step"], "--column must be ROLE=NAME"),
    ):
        code, _, err = runs("import", *arguments)
        assert code == 2
        assert message in err


# Completion.


def test_words_are_completed_by_the_parser(capsys):
    """This covers commands, options and choices; words of the user's own get no completion."""
    for words, expected in (
        ([""], ["completion", "demo", "doctor", "runs", "uploads", "view"]),
        (["runs", "una"], ["unarchive"]),
        (["runs", "gc", "--old"], ["--older-than"]),
        (["completion", ""], ["bash", "fish", "zsh"]),
        (["runs", "show", ""], []),
        (["nonsense", "x"], []),
    ):
        assert cli.main(["completion", "bash", "--", *words]) == 0
        assert capsys.readouterr().out.split() == expected


@pytest.mark.parametrize(
    ("shell", "press_tab"),
    [
        ("bash", "COMP_WORDS=(destinations runs una); COMP_CWORD=2; _destinations; echo ${COMPREPLY[@]}"),
        ("fish", "complete -C 'destinations runs una' | cut -f 1"),
        (
            "zsh",
            "words=(destinations runs una); CURRENT=3; compadd() { echo ${(P)@[-1]} }; _destinations",
        ),
    ],
)
def test_a_shell_completes_by_its_script(shell, press_tab, tmp_path):
    """A real shell reads the script, and calls the program at each Tab."""
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    program = tmp_path / "destinations"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m destinations.cli "$@"\n')
    program.chmod(0o755)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    before = "compdef() { }; " if shell == "zsh" else ""

    outcome = subprocess.run(
        [shell, "-c", f'{before}eval "$(destinations completion {shell})"\n{press_tab}']
        if shell != "fish"
        else [shell, "-c", f"destinations completion fish | source; {press_tab}"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )

    assert outcome.stdout.split() == ["unarchive"], outcome.stderr


# The terminal, mistakes, deletion.


def test_without_a_command_there_is_help(capsys):
    """The exit code is 0. `destinations ls` and `destinations uploads ls` tell you what to type."""
    for arguments in ([], ["runs"], ["uploads"]):
        assert cli.main(arguments) == 0
        assert capsys.readouterr().out.startswith(f"usage: {' '.join(['destinations', *arguments])} ")
    for group in ([], ["uploads"]):
        with pytest.raises(SystemExit):
            cli.main([*group, "ls"])
        assert "did you mean 'destinations runs ls'?" in capsys.readouterr().err


def test_roots_may_stand_before_the_command_and_after_it(runs, root, tmp_path):
    """The command searches both; `list` is `ls`."""
    (tmp_path / "more").mkdir()
    write_run(tmp_path / "more/delta")

    before = runs("--root", root, "list", "-c", "run")
    both = runs("--root", root, "ls", "-c", "run", "--root", tmp_path / "more")

    assert before[1].split()[1:] == ["empty", "gamma", "beta", "alpha"]
    assert "delta" in both[1]
    assert "alpha" in both[1]


def test_a_long_name_is_cut_in_the_middle_and_the_status_is_whole(root, monkeypatch):
    """This is on a narrow terminal."""
    write_run(root / f"{'x' * 60}-the-end")
    session = session_of(width=50)

    run_in(session, "ls")

    lines = session.screen.stream.getvalue().splitlines()
    assert any("…" in line and "nd " in line for line in lines)
    assert all(status in session.screen.stream.getvalue() for status in ("completed", "failed"))
    assert max(map(len, lines)) <= 50


def test_plot_draws_all_runs_in_the_terminal(root):
    """Metrics given by name or pattern are drawn below each other, with ranges and a legend."""
    session = session_of(width=60)

    assert run_in(session, "plot", "loss", "val/*") == 0

    lines = session.screen.stream.getvalue().splitlines()
    assert [line for line in lines if line in {"loss", "val/acc"}] == ["loss", "val/acc"]
    assert sum("━━" in line for line in lines) == 6
    assert any("alpha (id-alpha)  last 0.3125" in line for line in lines)
    assert max(map(len, lines)) <= 60


@pytest.mark.parametrize("values", [[], [math.nan], [1.0], [2.0, 2.0], [-1e308, 1e308], [0.0, math.inf]])
def test_a_chart_of_odd_values(values):
    """No value, one value, equal values and the largest numbers raise no exception."""
    from destinations.runs.commands.plot import chart_lines

    for is_logarithmic in (False, True):
        lines = chart_lines(
            [("a", list(range(len(values))), values)],
            "loss",
            Screen(io.StringIO(), 60),
            is_logarithmic=is_logarithmic,
        )
        assert lines[0] == "loss"


def answering(text):
    """Returns a session with a terminal in which these answers are typed."""
    return attrs.evolve(session_of(), ask=lambda _question: text)


def test_rm_asks_and_deletes(root):
    """A yes deletes the whole folder; any other answer deletes nothing."""
    (root / "alpha/weights.pt").write_bytes(b"w")

    kept = run_in(answering(""), "rm", "alpha", "beta")
    both_there = (root / "alpha").exists() and (root / "beta").exists()
    session = answering("y")
    code = run_in(session, "rm", "alpha", "beta")

    assert (kept, both_there, code) == (1, True, 0)
    assert not (root / "alpha").exists()
    assert not (root / "beta").exists()
    assert (root / "group/gamma").exists()
    assert "alpha: " in session.errors.getvalue()


def test_rm_without_a_terminal_needs_yes(runs, root, monkeypatch):
    """It doesn't wait for an answer that can't come."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    assert runs("rm", "alpha") == (2, "", ANY)
    assert (root / "alpha").exists()
    assert runs("rm", "alpha", "--yes")[0] == 0
    assert not (root / "alpha").exists()


def test_rm_refuses_a_live_run(runs, root):
    """Nothing is deleted, even if the other named runs could be."""
    live = WritingRun(loggers=RunDirectory(root / "live"), run_name="live")
    with live:
        code, _, err = runs("rm", "alpha", "live", "--yes")

    assert code == 2
    assert "is running, and was not deleted" in err
    assert (root / "alpha").exists()
    assert (root / "live").exists()


def test_rm_refuses_a_folder_with_another_run(runs, root):
    """A run may have been started inside another run's folder."""
    write_run(root / "alpha/nested")

    code, _, err = runs("rm", root / "alpha", "--yes")

    assert code == 2
    assert "another run is in" in err
    assert (root / "alpha").exists()


PAGE = (ROOT / "docs/command-line.md").read_text(encoding="utf-8")


def documented(command):
    """Returns the names that the page lists for a command's document, outermost level only."""
    (row,) = [line for line in PAGE.split("\n## JSON\n")[1].splitlines() if line.startswith(f"| `{command}`")]
    cell = re.sub(r"\([^()]*\)", "", row.split("|")[2])
    return set(re.findall(r"`(\w+)`", cell))


DOCUMENTED = [
    ("ls", (), True),
    ("best", ("loss", "--min"), True),
    ("show", ("alpha",), True),
    ("diff", ("alpha", "beta"), False),
    ("plot", ("loss", "alpha"), False),
    ("wait", ("not alive", "alpha"), False),
    ("tag", ("alpha",), False),
    ("note", ("alpha",), False),
    ("rename", ("alpha", "alpha"), False),
    ("gc", ("--older-than", "0s"), False),
    ("scan", (), False),
    ("export", ("-o", "a.csv"), False),
    ("send", ("alpha", "--to", "run:elsewhere"), False),
    ("archive", ("alpha",), True),
    ("rm", ("alpha", "--yes"), False),
]


def test_the_json_of_a_command_is_documented(runs):
    """The page and the document have the same names."""
    fields = set(re.findall(r"`(\w+)`", PAGE.split("\nA run has ")[1].split("\n")[0]))
    for command, arguments, has_run in DOCUMENTED:
        code, out, err = runs(command, *arguments, "--json")
        assert code == 0, err
        found = json.loads(out)
        found = found[0] if isinstance(found, list) else found
        assert set(found) == documented(command) | (fields if has_run else set()), command
