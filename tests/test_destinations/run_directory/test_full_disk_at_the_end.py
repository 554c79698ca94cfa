"""If the disk is full until the run is closed, the log and the sidecar count what was lost."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, logging, os, sys
from pathlib import Path
from destinations import RunDirectory
from destinations.run_directory import read_series
from events import Engine, Logger, State
logging.basicConfig(level=logging.ERROR, stream=sys.stdout, format="ERROR %(message)s")
disk = Path(sys.argv[1])
destination = RunDirectory(disk / "run", flush_seconds=0.05)
state = State("x"); logger = Logger(state, [destination], raise_errors=True); engine = Engine(state, logger)
engine.run_event("init"); engine.run_event("fit_start")
names = [f"metric/{i}" for i in range(10)]
def log(steps):
    for step in steps: logger.log_metrics({name: step + 0.1 for name in names}, step)
log(range(100)); logger.flush()
with (disk / "ballast").open("wb", buffering=0) as file:
    for size in (1 << 16, 1):
        try:
            while file.write(bytes(size)): pass
        except OSError: pass
log(range(100, 62_000))
engine.close()
sidecar = json.loads((disk / "run" / "sidecar.json").read_text())
found = len(read_series(disk / "run", "metric/9"))
print(sidecar["status"], sidecar["lost"]["rows"] + found, found < 62_000)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system in a namespace of its own")
def test_a_disk_full_until_the_end_reports_lost_rows(tmp_path):
    """Rows in the folder and lost rows add up to the logged ones.

    The sidecar says `failed to write`.
    """
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("unshare is not allowed here")
    script = f"mount -t tmpfs -o size=24m tmpfs {tmp_path} && exec {sys.executable} -c '{PROGRAM}' {tmp_path}"

    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, check=False, timeout=300
    )

    lines = done.stdout.splitlines()
    assert lines[-1:] == ["failed to write 62000 True"], done.stdout + done.stderr
    assert "rows of metrics are lost" in lines[-2]
