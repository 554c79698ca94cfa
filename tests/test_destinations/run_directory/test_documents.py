"""The files that describe a run, and how it ended."""

import importlib.metadata
import itertools
import json
import math
import os
import subprocess
import sys

import pytest

from destinations import LoggerDestination
from destinations.history.sessions import read_sessions
from destinations.run_directory import read_rows
from destinations.runs import open_runs


def strict(path):
    """Parses JSON that has no NaN in it."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_the_sidecar_has_the_fields_of_stable_pretraining_and_ours(drive, tmp_path):
    """It has schema version 1 with all fields, flat hyperparameters with dotted names, and `overhead`."""
    clock = map(float, itertools.count(1000))
    run = drive(tags=["t"], notes="n", clock=clock.__next__).fit()
    run.logger.log_hyperparameters(
        {"optim": {"lr": 0.1, "betas": [0.9, 0.99]}, "empty": {}, "api_key": "sk-1"}
    )
    run.log({"loss": 1.5, "bad": math.nan}, 3)
    run.close()

    data = strict(tmp_path / "run" / "sidecar.json")
    assert data["schema_version"] == 1
    assert data["run_dir"] == str(tmp_path / "run")
    assert (data["status"], data["tags"], data["notes"]) == ("completed", ["t"], "n")
    assert data["hparams"] == {
        "optim.lr": 0.1,
        "optim.betas.0": 0.9,
        "optim.betas.1": 0.99,
        "empty": "{}",
        "api_key": "[redacted]",
    }
    assert data["summary"] == {"loss": 1.5, "bad": None}
    assert data["created_at"] == 1000.0
    assert data["created_at"] < data["ended_at"] < data["updated_at"]
    receipt = data["overhead"]
    assert (receipt["calls"], receipt["dropped"], receipt["safe_on_disk_to_step"]) == (1, 0, 3)
    assert receipt["csv_bytes"] == (tmp_path / "run" / "metrics.csv").stat().st_size


@pytest.mark.parametrize(
    ("exception", "status", "text"),
    [
        (None, "completed", None),
        (ValueError("password=hunter2 is wrong"), "failed", "ValueError: password=[redacted] is wrong"),
        (KeyboardInterrupt(), "interrupted", None),
        (SystemExit(143), "preempted", None),
    ],
)
def test_the_status_says_how_the_run_ended(drive, tmp_path, exception, status, text):
    """Sidecar and sessions say completed, failed with the redacted exception, interrupted or preempted."""
    run = drive(clock=map(float, itertools.count(1000)).__next__).fit()

    run.close(exception)

    data = strict(tmp_path / "run" / "sidecar.json")
    (session,) = read_sessions(tmp_path / "run")
    assert (data["status"], data["exception"]) == (status, text)
    assert (session["status"], session["exception"]) == (status, text)
    assert 1000.0 <= session["start"] < session["end"] == data["ended_at"]


def test_the_environment_is_described_without_secrets(tmp_path):
    """Host, command line, packages, CPU and ranks are there, and the value of --api-key is not."""
    code = (
        "import sys\nfrom destinations import RunDirectory\nfrom events import Engine, Logger, State\n"
        "s = State('x'); l = Logger(s, [RunDirectory(sys.argv[1])]); e = Engine(s, l); e.run_event('init'); e.close()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run"), "--api-key", "abc123secret"]
    subprocess.run(command, check=True, env={**os.environ, "SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "70"})

    text = (tmp_path / "run" / "environment.json").read_text()
    data = json.loads(text)
    assert "abc123secret" not in text
    assert data["argv"][-2:] == ["--api-key", "[redacted]"]
    assert data["slurm"] == {"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "70"}
    assert data["ranks"] == {
        "rank": 0,
        "local_rank": 0,
        "world_size": 1,
        "local_world_size": 1,
        "node_rank": 0,
        "node_count": 1,
        "source": "no launcher",
    }
    assert json.loads((tmp_path / "run" / "sidecar.json").read_text())["ranks"] == data["ranks"]
    assert {"host", "pid", "user", "git", "python", "cpu", "gpus"} <= data.keys()
    assert data["packages"]["numpy"] == importlib.metadata.version("numpy")
    assert json.loads((tmp_path / "run" / "sidecar.json").read_text())["tags"] == ["sweep:70"]


def test_the_heartbeat_beats_while_nothing_is_logged(drive, tmp_path):
    """The timer touches the heartbeat of a run with slow steps."""
    timer = drive(flush_seconds=0.01).fit().destination._writer.timer
    path = tmp_path / "run" / "heartbeat"
    os.utime(path, (0, 0))

    with timer._turn:
        wanted = timer._begun + 1
        assert timer._turn.wait_for(lambda: timer._done >= wanted, 60)

    assert path.stat().st_mtime > 0
    assert path.stat().st_size == 0


def test_files_follow_the_umask(drive, tmp_path):
    """Temporary files don't leave files of a run private to their owner."""
    old = os.umask(0o022)
    try:
        run = drive().fit()
        run.log({"a": 1.0}, 0)
        run.close()
    finally:
        os.umask(old)

    modes = {
        path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "run").iterdir() if path.is_file()
    }
    assert set(modes.values()) == {0o644}


def test_the_folder_contains_nothing_unexpected(drive, tmp_path):
    """A run with metrics and hyperparameters has eight files and two per session, none hidden or partial."""
    run = drive().fit()
    run.logger.log_hyperparameters({"lr": 0.1})
    run.log({"a": 1.0}, 0)
    run.close()

    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "environment.json",
        "heartbeat",
        "hparams.yaml",
        "metrics.csv",
        "metrics.history.jsonl",
        "metrics.sums.jsonl",
        "sessions",
        "sessions.jsonl",
        "sidecar.json",
        "summary.json",
    ]
    assert [path.name.partition(".")[2] for path in sorted((tmp_path / "run/sessions").iterdir())] == [
        "environment.json",
        "hparams.yaml",
    ]


def test_other_ranks_write_nothing_by_default(drive, tmp_path):
    """Rank 1 creates no folder, and accepts records silently."""
    run = drive(rank=1).fit()

    run.log({"a": 1.0}, 0)
    run.logger.log_text("hello")
    run.logger.log_hyperparameters({"a": 1})
    run.close()

    assert not (tmp_path / "run").exists()


def test_metrics_that_only_another_rank_has_are_reported(drive, caplog):
    """A warning says how to keep a pipeline rank's loss; metrics that rank 0 logs too cause none."""
    first = drive().fit()
    alike, alone = drive(rank=1).fit(), drive(rank=2).fit()
    for step in range(3):
        for run in (first, alike):
            run.log({"lr": 0.1, "epoch": 0}, step)
        alone.log({"lr": 0.1, "loss": 0.5}, step)

    for run in (alike, alone, first):
        run.close()

    (line,) = [one.getMessage() for one in caplog.records if "rank" in one.getMessage()]
    assert line.startswith("rank 2 of ")
    assert "'loss' is only there if rank 0 logs it too" in line
    assert "all_ranks=True" in line


def test_each_rank_has_its_own_csv_with_all_ranks(drive, tmp_path):
    """With all_ranks, each rank writes only its own file."""
    first, second = drive(all_ranks=True).fit(), drive(rank=1, all_ranks=True).fit()

    first.log({"a": 1.0}, 0)
    second.log({"a": 2.0}, 0)
    second.logger.log_text("not mine")
    second.close()
    first.close()

    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert [name for name in names if name.startswith(("metrics", "summary"))] == [
        "metrics.csv",
        "metrics.history.jsonl",
        "metrics.rank1.csv",
        "metrics.rank1.history.jsonl",
        "metrics.rank1.sums.jsonl",
        "metrics.sums.jsonl",
        "summary.json",
        "summary.rank1.json",
    ]
    assert (tmp_path / "run" / "metrics.rank1.csv").read_text().splitlines()[1].endswith(",2.0")
    assert "journal" not in names
    assert "texts.jsonl" not in names


def test_a_rank_that_begins_after_rank_0_completed_writes_its_rows(drive, tmp_path):
    """Only rank 0 checks for a completed run, because other ranks may be slow ranks of that run."""
    first = drive(all_ranks=True, if_exists="auto").fit()
    first.log({"a": 1.0}, 0)
    first.close()

    second = drive(rank=1, all_ranks=True, if_exists="auto").fit()
    second.log({"a": 2.0}, 0)
    second.close()

    assert [[row.metrics for row in read_rows(tmp_path / "run", rank)] for rank in (0, 1)] == [
        [{"a": 1.0}],
        [{"a": 2.0}],
    ]


@pytest.mark.parametrize(
    "text", [f"a: 1{':1' * 5000}\n", f"a: {'[' * 5000}\n", "a: *b\n"], ids=["base 60", "nested", "alias"]
)
def test_unreadable_hyperparameters_are_replaced(drive, tmp_path, text):
    """A resumed run replaces a `hparams.yaml` that is damaged or would take minutes to read."""
    drive().fit().close()
    (tmp_path / "run" / "hparams.yaml").write_text(text)

    run = drive().fit()
    run.logger.log_hyperparameters({"lr": 0.1})
    run.close()

    assert (tmp_path / "run" / "hparams.yaml").read_text() == "lr: 0.1\n"


class TakesFiles(LoggerDestination):
    def can_upload_files(self):
        return True


def test_files_are_kept_with_size_and_hash(drive, tmp_path):
    """A file given to upload_file is copied before the call returns, and listed with its sha-256."""
    source = tmp_path / "model.pt"
    source.write_bytes(b"weights")
    run = drive().fit()

    run.logger.upload_file("ckpt/model.pt", source)
    source.unlink()
    run.logger.download_file("ckpt/model.pt", tmp_path / "back.pt")
    run.close()

    (line,) = [json.loads(line) for line in (tmp_path / "run" / "artifacts.jsonl").read_text().splitlines()]
    assert (line["name"], line["path"], line["size"]) == ("ckpt/model.pt", "artifacts/ckpt/model.pt", 7)
    assert line["sha256"] == "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c"
    assert (tmp_path / "back.pt").read_bytes() == b"weights"


def test_files_go_to_another_destination_that_takes_them(drive, tmp_path):
    """If another destination takes files, none is kept here unless requested."""
    source = tmp_path / "model.pt"
    source.write_bytes(b"weights")
    left = drive(others=[TakesFiles()]).fit()
    left.logger.upload_file("model.pt", source)
    left.close()
    asked = drive(tmp_path / "asked", others=[TakesFiles()], keep_files="link").fit()
    asked.logger.upload_file("model.pt", source)
    asked.close()

    assert not (tmp_path / "run" / "artifacts").exists()
    assert (tmp_path / "asked" / "artifacts" / "model.pt").samefile(source)


@pytest.mark.parametrize("name", ["../model.pt", "/etc/passwd", "a//b", "a/../../b", "", "a\\b", "a\0"])
def test_an_artifact_cannot_leave_the_folder(drive, tmp_path, name):
    """Names that would leave the run's folder are refused at the call."""
    source = tmp_path / "model.pt"
    source.write_bytes(b"weights")
    run = drive().fit()

    with pytest.raises(ValueError, match="artifact name must be a relative path"):
        run.logger.upload_file(name, source)


def test_a_stopped_run_has_a_stop_reason(drive, tmp_path):
    """The status is "stopped"; sidecar and session have the reason, without secrets."""
    run = drive().fit()
    run.state.stop_training("loss is below 0.1; password=hunter22")
    run.state.end_training()
    run.close()

    data = strict(tmp_path / "run" / "sidecar.json")
    session = json.loads((tmp_path / "run" / "sessions.jsonl").read_text().splitlines()[-1])
    assert (data["status"], data["exception"]) == ("stopped", None)
    assert data["stop_reason"] == session["stop_reason"] == "loss is below 0.1; password=[redacted]"
    with open_runs(tmp_path) as runs:
        (found,) = runs
    assert (found.status, found.alive) == ("stopped", False)
