"""Several ranks under torchrun, over gloo: one shared run, killed ranks, and hanging ranks.

`SOAK_RANKS="8"` adds so many ranks to the first test, as `make soak` does.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from destinations.runs import Run
from destinations.runs.content.flight import describe_flights
from tests.effort import times

PROGRAM = Path(__file__).with_name("rank_child.py")
LIMIT_SECONDS = 150
# Gloo would look up the name of the machine.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": os.pathsep.join(sys.path),
}


def environment(**variables):
    """Returns the environment of ranks."""
    return {name: value for name, value in os.environ.items() if name != "RUN_NAME"} | ENVIRONMENT | variables


@pytest.fixture
def torchrun():
    """Starts the program on several ranks, and ends all of them with the test."""
    started = []

    def start(mode, folder, ranks):
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]
        log = (folder / "log.txt").open("ab")
        started.append(
            subprocess.Popen(
                [*launcher, str(PROGRAM), mode, str(folder)],
                env=environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        )
        log.close()
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            # The launcher ends its ranks.
            process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def text_of(folder):
    """Returns what all ranks printed."""
    return (folder / "log.txt").read_text(errors="replace")


@pytest.mark.parametrize(
    "ranks", [2, *times([], [1, 4]), *map(int, os.environ.get("SOAK_RANKS", "").split())]
)
def test_ranks_write_one_run_without_a_collective_of_a_destination(torch_server, tmp_path, ranks):
    """They agree on a name; each has its metrics and its spool, one prints, and all files arrive."""
    done = torch_server.torchrun(
        ranks, PROGRAM, "train", tmp_path, env=environment(), timeout_s=LIMIT_SECONDS
    )

    assert done.returncode == 0, done.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    seen = [(tmp_path / f"seen{rank}").read_text() for rank in range(ranks)]
    assert seen == [f"{folder.name} {ranks > 1} []"] * ranks
    run = Run.open(folder)
    assert (run.status, run.ranks()) == ("completed", list(range(ranks)))
    own = run.ranks("own")
    assert own.table[:, 0].tolist() == [float(rank) for rank in range(ranks)]
    batches = 2 * 32 // 4 // ranks
    assert len(run.ranks("loss/train/total").step) == batches
    stored = {
        # Below the name of the run, on which the ranks agreed.
        f"{path.relative_to(tmp_path / 'store').parts[0]}/{path.name}": path.read_text()
        for path in (tmp_path / "store").rglob("note*.txt")
    }
    assert stored == {f"rank{rank}/note-{rank}.txt": f"of rank {rank}" for rank in range(ranks)}
    assert sorted(path.name for path in (tmp_path / "spools").iterdir()) == [
        str(rank) for rank in range(ranks)
    ]
    assert not (folder / "flight").exists()
    assert done.stdout.count(f"destinations runs show {folder.name}") <= 1


def test_a_killed_rank_restarts_and_continues_the_same_run(torch_server, tmp_path):
    """It continues as a new session; no row of either session is lost, on any rank."""
    done = torch_server.torchrun(
        2, PROGRAM, "elastic", tmp_path, restarts=2, env=environment(), timeout_s=LIMIT_SECONDS
    )

    assert done.returncode == 0, done.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    run = Run.open(folder)
    assert run.status == "completed"
    assert len(run.sessions) == 2
    for rank in (0, 1):
        series = run.series("loss", rank)
        assert series.step.tolist() == list(range(10))
        assert series.value.tolist() == [float(rank + step) for step in range(10)]
        assert run.series("session", rank).value.tolist() == [0.0] * 5 + [1.0] * 5


def test_a_run_continues_with_another_number_of_ranks(torch_server, tmp_path):
    """One of two ranks is killed; then one rank continues under the same name, from the environment."""
    first, second = (
        torch_server.torchrun(
            ranks, PROGRAM, "elastic", tmp_path, env=environment(RUN_NAME="mine"), timeout_s=LIMIT_SECONDS
        )
        for ranks in (2, 1)
    )

    assert first.returncode != 0
    # Written right before the kill: torchrun may name the other rank, whose collective failed because of it.
    assert (tmp_path / "begun").exists()
    assert second.returncode == 0, second.stdout
    run = Run.open(tmp_path / "runs/mine")
    assert (run.status, len(run.sessions), run.ranks()) == ("completed", 2, [0, 1])
    assert [len(run.series("loss", rank)) for rank in range(2)] == [10, 5]
    assert run.ranks("loss").band.count.tolist() == [2] * 5 + [1] * 5


def test_a_rank_that_never_enters_a_collective_is_named_by_the_flight_recorders(torchrun, tmp_path):
    """Each rank writes where it waits; the rank that is elsewhere comes first. SIGTERM then ends them all."""
    process = torchrun("hang", tmp_path, 2)
    files = [tmp_path / f"run/flight/rank-{rank}.json" for rank in range(2)]
    deadline = time.monotonic() + LIMIT_SECONDS
    while not all(file.exists() for file in files) and time.monotonic() < deadline:
        assert process.poll() is None, text_of(tmp_path)
        time.sleep(0.1)

    lines = describe_flights(Run.open(tmp_path / "run").flights())
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.wait(60)

    source = PROGRAM.read_text().splitlines()
    sleeps = next(number for number, line in enumerate(source, 1) if "time.sleep(3600)" in line)
    waits = next(
        number for number, line in enumerate(source, 1) if "distributed.all_reduce(torch.ones(1))" in line
    )
    late = "rank 1 has not entered gloo:all_reduce (number 3), where rank 0 waits: it is at "
    assert lines == [
        f"{late}rank_child.py:{sleeps} (batch, in 'tokenize')",
        f"rank 0: hang, waits in all_reduce at rank_child.py:{waits}",
        f"rank 1: hang, waits at rank_child.py:{sleeps}",
    ]
    # The launcher would kill them after 30 s.
    assert time.monotonic() - began < 25
    reasons = [[one["reason"] for one in json.loads(file.read_bytes())["reasons"]] for file in files]
    assert reasons == [["hang", "sigterm"]] * 2
