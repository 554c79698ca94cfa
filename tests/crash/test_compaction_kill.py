"""Processes that compact runs are killed: a dataset is as before or as after, and the next compaction does the rest."""

import json

import pytest

pytest.importorskip("duckdb")

from destinations.runs import Run, open_runs
from destinations.runs.dataset import compact, open_dataset
from destinations.runs.dataset.manifest import all_names
from tests.test_destinations.runs.written import write_csv
from uploads import LocalStore

pytestmark = pytest.mark.xdist_group("duckdb")

KILLS = 8
ROWS = 200

# Imports once; each line that it reads is a moment, as a share of what the first compaction took, at which a
# fork of it is killed.
SERVER = """
import os, signal, sys, time
from destinations.runs import open_runs
from destinations.runs.dataset import compact
import duckdb
root, place, scratch = sys.argv[1:]
took = None
for line in sys.stdin:
    begun = time.monotonic()
    child = os.fork()
    if not child:
        try:
            with open_runs(root) as runs:
                compact(runs, place, scratch=scratch)
            os._exit(0)
        finally:
            os._exit(3)
    if took is None or float(line) > 1:
        _, status = os.waitpid(child, 0)
        took = took or time.monotonic() - begun
    else:
        time.sleep(float(line) * took)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    print(os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status), flush=True)
"""


def write_run(root, number):
    """Makes a run that has ended, of some hundred rows that no other run has."""
    rows = [f"{step},{number + step / 1024},{number}" for step in range(ROWS)]
    write_csv(root / f"run{number}", ["step,loss,acc", *rows])


def points_in(place):
    """Returns the values of each run in the dataset, by its id; and looks at each of them."""
    with open_dataset(place) as dataset:
        found = {}
        for run in dataset.query():
            series = run.series("loss")
            assert list(series.step) == list(range(ROWS))
            found[run.run_id] = list(series.value)
            assert list(run.series("acc").value) == [series.value[0]] * ROWS
        return found


def expected_of(root):
    """Returns what a dataset of all runs has."""
    return {run.run_id: list(run.series("loss").value) for run in map(Run.open, sorted(root.iterdir()))}


def test_a_compaction_that_is_killed_loses_no_row_and_has_none_twice(tmp_path, start):
    """SIGKILL at spread moments: readers see all rows of the state before or after.

    In the end each row is there once, and no rest.
    """
    root, place = tmp_path / "runs", tmp_path / "data"
    for number in range(4):
        write_run(root, number)
    server = start(SERVER, root, place, tmp_path, stdin=-1)

    def turn(share):
        server.stdin.write(f"{share}\n")
        server.stdin.flush()
        line = server.stdout.readline()
        assert line, server.stderr.read()
        return int(line)

    assert turn(2) == 0
    before, killed = points_in(place), 0
    for number in range(KILLS):
        write_run(root, 4 + number)
        ended = turn(number / KILLS)
        assert ended in {0, 9}
        killed += ended == 9
        now = points_in(place)
        assert now in (before, expected_of(root))
        before = now

    assert turn(2) == 0
    assert points_in(place) == expected_of(root)
    assert len(expected_of(root)) == 4 + KILLS
    assert killed > 0
    # A last one puts away what killed ones have left.
    with open_runs(root) as runs:
        report = compact(runs, str(place))
    assert report.unchanged == 4 + KILLS
    check_names(place)


def check_names(place):
    """Checks that the dataset holds what its states name, and nothing else."""
    manifests = {path: json.loads(path.read_bytes()) for path in (place / "manifests").glob("*.json")}
    named = {path.relative_to(place).as_posix() for path in manifests}
    for one in manifests.values():
        named |= {file["name"] for part in one["parts"] for file in part["files"]}
        named |= set(one["tables"].values())
    assert set(all_names(LocalStore(place))) == named
