"""A run folder that is moved, deleted or replaced during training keeps its own rows, or reports a loss."""

import json
import logging
import shutil
import subprocess
import sys

from destinations.run_directory import read_series

OTHER_RUN = """
import sys
from destinations import RunDirectory
from events import Engine, Logger, State
state = State("other"); logger = Logger(state, [RunDirectory(sys.argv[1])], raise_errors=True); engine = Engine(state, logger)
engine.run_event("init"); engine.run_event("fit_start")
for step in range(50): logger.log_metrics({"other": float(step)}, step)
print("logged", flush=True); sys.stdin.readline(); engine.close()
"""


class OtherProcess:
    """A second process with a run at a path; `end` asks it to end."""

    def __init__(self, path):
        self._process = subprocess.Popen(
            [sys.executable, "-c", OTHER_RUN, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout.readline() == "logged\n"

    def end(self):
        self._process.communicate("end\n", timeout=120)
        assert self._process.returncode == 0


def expected(last):
    """Steps with their values."""
    return [(step, float(step)) for step in range(last)]


def log(run, steps):
    """Logs rows, over several segments."""
    for step in steps:
        run.log({"a": float(step), **{f"wide{index}": 1.0 for index in range(200)}}, step)


def test_a_moved_folder_keeps_its_rows_and_another_run_its_own(drive, tmp_path, caplog):
    """A second process starts at the path of a moved folder: each run has all of its own rows only."""
    caplog.set_level(logging.WARNING)
    run = drive(flush_seconds=1000).fit()
    log(run, range(100))
    run.stand_still()

    (tmp_path / "run").rename(tmp_path / "moved")
    other = OtherProcess(tmp_path / "run")
    log(run, range(100, 2000))
    run.flush()
    log(run, range(2000, 2100))
    run.close()
    other.end()

    assert read_series(tmp_path / "moved", "a") == expected(2100)
    assert read_series(tmp_path / "moved", "other") == []
    assert read_series(tmp_path / "run", "other") == expected(50)
    assert read_series(tmp_path / "run", "a") == []
    assert "was moved to" in caplog.text
    for name in ("run", "moved"):
        sidecar = json.loads((tmp_path / name / "sidecar.json").read_text())
        assert (sidecar["status"], sidecar["run_dir"]) == ("completed", str(tmp_path / name))


def test_a_deleted_folder_whose_path_is_taken_reports_its_lost_rows(drive, tmp_path, caplog):
    """A second process starts at the path of a deleted folder: its run stays whole; the loss is reported."""
    run = drive(flush_seconds=1000).fit()
    log(run, range(100))
    run.stand_still()

    shutil.rmtree(tmp_path / "run")
    other = OtherProcess(tmp_path / "run")
    log(run, range(100, 2000))
    run.flush()
    log(run, range(2000, 2100))
    run.close()
    locked = (tmp_path / "run" / ".lock").exists()
    other.end()

    assert locked
    assert read_series(tmp_path / "run", "other") == expected(50)
    assert read_series(tmp_path / "run", "a") == []
    messages = [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]
    assert "was deleted. Writing has stopped" in " ".join(messages)
    assert "2100 rows of metrics are lost" in messages[-1]
