"""Every tracker is a target of `send`: ours, registered ones, and trackers of installed packages."""

import importlib.metadata
import json
import re
from pathlib import Path

import pytest

from destinations import RunDirectory, cli, register_destination, registry
from destinations.runs import Run
from destinations.runs.send import SendingError, TargetError, send
from destinations.trackers.target import Target
from destinations.trackers.tracker import Sink, Tracker
from events import Run as WritingRun


class _Lines(Sink):
    """Appends each row to a file."""

    def __init__(self, path, greeting):
        self.path, self.greeting = path, greeting

    def log_metrics(self, rows):
        with self.path.open("a") as file:
            file.writelines(
                f"{self.greeting} {step} {json.dumps(values)} {time}\n" for values, step, time in rows
            )


class Mine(Tracker):
    """A tracker that another package registers."""

    sink_class = _Lines

    def __init__(self, path, *, greeting="row", **options):
        if not greeting:
            raise ValueError("greeting must not be empty.")
        super().__init__(**options)
        self.path, self.greeting = path, greeting

    def make_sink(self, state):
        return _Lines(Path(self.path), self.greeting)


class Everywhere(Tracker):
    """A tracker without a place."""

    sink_class = _Lines


class _Folder(Target):
    """A folder of lines."""

    places = ("FOLDER",)
    own_files = re.compile(r"lines\.txt")

    def make(self, tracker, shared):
        Path(self.place).mkdir(parents=True, exist_ok=True)
        return tracker(f"{self.place}/lines.txt", **{**shared, **self.options})


class InFolder(Mine):
    """A tracker that writes files into a folder for each run."""

    target = _Folder


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Registers the trackers of this module for a test."""
    monkeypatch.setattr(registry, "_factories", {})
    for tracker in (Mine, Everywhere, InFolder):
        register_destination(tracker.__name__, tracker)


@pytest.fixture
def run(tmp_path):
    """A run with three rows."""
    with WritingRun(loggers=[RunDirectory(tmp_path / "runs/digits", clock=lambda: 1e9)]) as writing:
        for step in range(3):
            writing.log_metrics({"loss": step / 2}, step=step)
    return Run.open(tmp_path / "runs/digits")


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Returns a function that runs `destinations runs send` and returns exit code, output and messages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def send_command(*arguments):
        try:
            code = cli.main(["runs", "send", *arguments])
        except SystemExit as ended:
            code = ended.code
        found = capsys.readouterr()
        return code, found.out, found.err

    return send_command


def test_registered_tracker_is_a_target_with_its_options(run, command, tmp_path):
    """`send` logs the run to it with the original times, and later only new rows."""
    first = command("digits", "--to", "mine:lines.txt", "--option", "greeting=hello")
    second = command("digits", "--to", "mine:lines.txt", "--option", "greeting=hello")

    assert first == (0, f"sent 3 rows of {run.run_id} to mine:lines.txt\n", "")
    assert second == (0, f"sent 0 rows of {run.run_id} to mine:lines.txt\n", "")
    assert (tmp_path / "lines.txt").read_text().splitlines() == [
        f'hello {step} {{"loss": {step / 2}}} 1000000000.0' for step in range(3)
    ]


def test_help_lists_every_tracker_with_its_options(command):
    """Names come from the registry; places and options come from the constructors."""
    code, out, _ = command("--help")

    lines = out[out.index("targets, and the options of each:") : out.index("\nexamples:")].splitlines()
    assert code == 0
    assert lines[1:] == [
        "  run:FOLDER",
        "      run_id, tags, notes, flush_seconds, if_exists, fork_from, writer, all_ranks,",
        "      keep_files, journal, close_seconds, mirror, mirror_seconds, write_rate, clock",
        "  comet:PROJECT or comet:WORKSPACE/PROJECT",
        "      workspace, name, tags, api_key, offline_dir, experiment_key, resume, log_artifacts",
        "  everywhere",
        "      flush_seconds, all_ranks, close_seconds, max_waiting_values, max_waiting_bytes,",
        "      when_full, wait_seconds, clock, write_rate, require",
        "  infolder:FOLDER",
        "      greeting",
        "  mine:PATH",
        "      greeting",
        "  mlflow:URI or mlflow:URI#EXPERIMENT",
        "      run_name, run_id, tags, artifact_location, log_artifacts, log_system_metrics",
        "  tensorboard:FOLDER",
        "      remote_folder",
        "  trackio:PROJECT",
        "      name, group, resume, space_id, server_url",
        "  wandb:PROJECT or wandb:ENTITY/PROJECT",
        "      entity, name, group, tags, notes, mode, run_id, resume, dir, log_artifacts,",
        "      step_metric, init_kwargs",
    ]


@pytest.mark.parametrize(
    ("target", "option", "message"),
    [
        ("mine:a", "greetin=x", "cannot send to 'mine:a': "),
        ("mine:a", "greeting=", "cannot send to 'mine:a': greeting must not be empty. Options: greeting."),
        ("mine:a", "greeting", "--option must be NAME=VALUE, got 'greeting'."),
        ("mine", "greeting=x", "unknown target 'mine'; expected run:FOLDER, comet:PROJECT, everywhere, "),
        ("everywhere:here", "require=true", "unknown target 'everywhere:here'; expected run:FOLDER, "),
    ],
)
def test_wrong_target_or_option_prints_a_message(run, command, tmp_path, target, option, message):
    """The exit code is 2, and nothing is written."""
    code, out, err = command("digits", "--to", target, "--option", option)

    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert not (tmp_path / "a").exists()


def test_tracker_that_cannot_remove_reports_the_earlier_copy(run, tmp_path, caplog):
    """With `again`, everything is sent once more."""
    target = f"mine:{tmp_path / 'lines.txt'}"
    send(run, target, cache=tmp_path)

    report = send(run, target, cache=tmp_path, again=True)

    assert report.rows == 3
    assert "what was sent before stays there, too." in caplog.text
    assert len((tmp_path / "lines.txt").read_text().splitlines()) == 6


def test_tracker_with_files_gets_a_folder_for_each_run(run, tmp_path):
    """To start over, `send` empties the folder, but removes only files that the tracker wrote."""
    target = f"infolder:{tmp_path / 'to'}"
    first = send(run, target, cache=tmp_path)
    again = send(run, target, cache=tmp_path, again=True)
    (tmp_path / "to/digits/mine.txt").write_text("mine")

    with pytest.raises(SendingError, match=r"contains 'mine\.txt', which was not sent"):
        send(run, target, cache=tmp_path, again=True)

    assert (first.rows, again.rows) == (3, 3)
    assert len((tmp_path / "to/digits/lines.txt").read_text().splitlines()) == 3


def test_broken_package_disables_only_its_own_target(run, tmp_path, monkeypatch, caplog):
    """The other targets work, and a warning names the package."""
    broken = importlib.metadata.EntryPoint("Broken", "no_such_module:Broken", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: importlib.metadata.EntryPoints([broken])
    )

    report = send(run, f"mine:{tmp_path / 'lines.txt'}", cache=tmp_path)

    assert report.rows == 3
    assert "destination 'Broken' cannot be imported: No module named 'no_such_module'" in caplog.text
    with pytest.raises(TargetError, match="unknown target 'broken:x'"):
        send(run, "broken:x", cache=tmp_path)
