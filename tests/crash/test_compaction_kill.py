"""Processes that compact runs are killed: a dataset is as before or after; the next compaction ends it."""

import pytest

pytest.importorskip("deltalake")

from destinations.runs import Run, open_runs
from destinations.runs.dataset import compact, open_dataset
from tests.effort import times
from tests.test_destinations.runs.written import write_csv

pytestmark = pytest.mark.xdist_group("duckdb")

KILLS = times(2, 20)
ROWS = 50

# Imports once. Each line that it reads is a moment, as a share of the first compaction's duration, at which a
# fork of it is killed.
SERVER = """
import os, signal, sys, time
from destinations.runs import open_runs
from destinations.runs.dataset import compact
import deltalake, duckdb, pyarrow.dataset
root, place = sys.argv[1:]
took = None
for line in sys.stdin:
    begun = time.monotonic()
    child = os.fork()
    if not child:
        try:
            with open_runs(root) as runs:
                compact(runs, place)
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


@pytest.fixture(params=["folder", "bucket"])
def place(request, tmp_path):
    """Where the dataset is: a folder, or a bucket of a server that supports conditional puts."""
    if request.param == "folder":
        return str(tmp_path / "data")
    request.getfixturevalue("s3_credentials")
    return request.getfixturevalue("moto").uri("data")


def write_run(root, number, shift=0):
    """Makes an ended run with some rows that no other run has; more of them with each shift."""
    rows = [f"{step},{number + shift + step / 1024},{number + shift}" for step in range(ROWS + shift)]
    write_csv(root / f"run{number}", ["step,loss,acc", *rows])


def values_in(place):
    """Returns the values of each run in the dataset by its id, and checks that the tables agree."""
    with open_dataset(place) as dataset:
        rows = dataset.sql("SELECT run_id, metric, step, value FROM metrics ORDER BY ALL").rows
        found = {}
        for run_id, metric, step, value in rows:
            found.setdefault(run_id, []).append((metric, step, value))
        ids = dataset.sql("SELECT DISTINCT run_id FROM runs ORDER BY 1").rows
        assert ids == dataset.sql("SELECT DISTINCT run_id FROM summary ORDER BY 1").rows
        assert {run_id for (run_id,) in ids} == set(found)
        assert dataset.sql("SELECT count(*) FROM runs").rows == ((len(found),),)
        assert dataset.sql("SELECT sum(points) FROM runs").rows == ((len(rows),),)
        return found


def expected_of(root):
    """Returns the values that a dataset of all runs has."""
    found = {}
    for run in map(Run.open, root.iterdir()):
        found[run.run_id] = sorted(
            (name, step, value)
            for name in ("acc", "loss")
            for step, value in zip(run.series(name).step, run.series(name).value, strict=True)
        )
    return found


def test_a_killed_compaction_neither_loses_nor_repeats_a_row(tmp_path, start, place):
    """SIGKILL at spread moments, with a new and a changed run: readers see all rows of before or after."""
    root = tmp_path / "runs"
    for number in range(4):
        write_run(root, number)
    server = start(SERVER, root, place, stdin=-1)

    def turn(share):
        server.stdin.write(f"{share}\n")
        server.stdin.flush()
        line = server.stdout.readline()
        assert line, server.stderr.read()
        return int(line)

    assert turn(2) == 0
    before, killed = values_in(place), 0
    for number in range(KILLS):
        write_run(root, 4 + number)
        write_run(root, 0, shift=number + 1)
        ended = turn(number / KILLS)
        assert ended in {0, 9}
        killed += ended == 9
        now = values_in(place)
        # New runs are written before changed ones, in a transaction of their own.
        wanted = expected_of(root)
        assert now in (before, {**wanted, "run0": before["run0"]}, wanted)
        before = now

    assert turn(2) == 0
    assert values_in(place) == expected_of(root)
    assert len(expected_of(root)) == 4 + KILLS
    assert killed > 0
    # Leftovers of killed ones are removed, and nothing that is needed.
    with open_runs(root) as runs:
        report = compact(runs, place, vacuum_days=0)
    assert report.unchanged == 4 + KILLS
    assert values_in(place) == expected_of(root)
