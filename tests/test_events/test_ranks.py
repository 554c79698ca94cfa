"""Tests `find_ranks`: this process's rank according to its launcher or process group."""

import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from events import Ranks, Run, State, Trainer, find_ranks

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NNODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),4",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}
# What the shell of a batch script has, and a program that it starts without srun.
BATCH_SCRIPT = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
FIRST_TASK = SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Sets these variables of launchers, and no others."""
    for name in os.environ:
        if name.startswith(("SLURM_", "OMPI_", "PMI", "MPI_")) or "RANK" in name or "WORLD_SIZE" in name:
            monkeypatch.delenv(name)
    monkeypatch.delenv("RUN_NAME", raising=False)
    # Accelerate remembers what other tests of this process did.
    monkeypatch.setitem(sys.modules, "accelerate.state", None)
    monkeypatch.setitem(sys.modules, "lightning_utilities.core.rank_zero", None)

    def setenv(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return setenv


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Ranks()),
        (TORCHRUN, Ranks(5, 8, 1, 4, 1, 2, "torchrun (RANK)")),
        (OPEN_MPI, Ranks(5, 8, 1, 4, 0, 2, "Open MPI (OMPI_COMM_WORLD_RANK)")),
        (HYDRA, Ranks(5, 8, 1, 4, 0, 2, "PMI (PMI_RANK)")),
        (SLURM, Ranks(5, 8, 1, 4, 2, 3, "Slurm (SLURM_PROCID)")),
        (FIRST_TASK, Ranks(0, 8, 0, 2, 0, 3, "Slurm (SLURM_PROCID)")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, Ranks(0, 2, source="Slurm (SLURM_PROCID)")),
        ({"PMIX_RANK": "1"}, Ranks(1, 2, source="PMIx (PMIX_RANK)")),
        # One process, in a job that has room for more.
        (BATCH_SCRIPT, Ranks()),
        ({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8"}, Ranks()),
        (FIRST_TASK | {"SLURM_JOB_NAME": "bash"}, Ranks()),
        # Launchers that start each other.
        (TORCHRUN | FIRST_TASK | HYDRA | {"PMI_RANK": "0"}, Ranks(5, 8, 1, 4, 1, 2, "torchrun (RANK)")),
        (BATCH_SCRIPT | OPEN_MPI, Ranks(5, 8, 1, 4, 0, 2, "Open MPI (OMPI_COMM_WORLD_RANK)")),
        (FIRST_TASK | OPEN_MPI, Ranks(5, 8, 1, 4, 0, 2, "Open MPI (OMPI_COMM_WORLD_RANK)")),
        (SLURM | {"PMI_RANK": "5", "PMI_SIZE": "8"}, Ranks(5, 8, 1, 4, 2, 3, "PMI (PMI_RANK)")),
        (SLURM | {"RANK": "0", "WORLD_SIZE": "1"}, Ranks(source="torchrun (RANK)")),
    ],
)
def test_launchers_are_recognized_by_their_variables(environment, variables, expected):
    """Each names its processes in its own way, and some set the variables of another as well."""
    environment(variables)

    assert find_ranks() == expected
    state = State("mine")
    assert (state.rank, state.world_size, state.local_rank) == expected_of(expected)


def expected_of(ranks):
    """Returns what a state has of these ranks."""
    return ranks.rank, ranks.world_size, ranks.local_rank


def test_accelerate_is_asked_once_it_is_used(monkeypatch):
    """It knows of devices for which torch makes no process group."""
    shared = {"process_index": 1, "num_processes": 4, "local_process_index": 1}
    module = SimpleNamespace(PartialState=SimpleNamespace(_shared_state=shared))
    monkeypatch.setitem(sys.modules, "accelerate.state", module)

    assert find_ranks() == Ranks(1, 4, 1, source="Accelerate")


def test_lightning_is_asked_for_a_rank_that_its_launcher_did_not_set(monkeypatch):
    """Its own launcher sets `WORLD_SIZE` and `LOCAL_RANK`, and no `RANK`."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    module = SimpleNamespace(rank_zero_only=SimpleNamespace(rank=1))
    monkeypatch.setitem(sys.modules, "lightning_utilities.core.rank_zero", module)

    found = find_ranks()

    assert (found.rank, found.world_size, found.local_rank) == (1, 2, 1)
    assert found.source == "Lightning"


def test_process_group_decides_whatever_the_environment_says(environment):
    """Ranks meet in the process group; an environment that names other ranks belongs to something else."""
    environment(TORCHRUN)
    run = Run(run_name="mine")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        run.log_metrics({"loss": 1.0})
        assert (run.state.rank, run.state.world_size) == (0, 1)
        assert run.state.found_ranks.source == "process group"
    finally:
        torch.distributed.destroy_process_group()
        run.close()


def test_rank_that_was_given_stays():
    """Reading the ranks again changes a state where there is something new."""
    state = State("mine", rank=3)

    state.read_ranks()

    assert state.rank == 3


def test_trainer_names_the_missing_addresses_of_ranks(environment):
    """Tasks of srun know their ranks, but not the addresses of others."""
    environment(SLURM)

    with pytest.raises(ValueError, match=r"MASTER_ADDR and MASTER_PORT must be set for 8 ranks \(Slurm"):
        Trainer(torch.nn.Linear(1, 1), run_name="mine", device="cpu")


PROGRAM = """
import sys, torch
from destinations import RunDirectory
from events import Run
rank, port = sys.argv[1:]
run = Run(loggers=[RunDirectory("runs/{run_name}")])
address = f"tcp://127.0.0.1:{port}"
torch.distributed.init_process_group("gloo", init_method=address, rank=int(rank), world_size=2)
run.log_metrics({"loss": 1.0})
print(run.state.rank, run.state.world_size, run.state.run_name)
run.close()
torch.distributed.barrier()
"""


def test_ranks_of_a_loop_agree_when_the_run_begins(tmp_path):
    """A process group that is made after the run and before its first record tells ranks and name."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "text": True}
    options["env"] = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

    ranks = [subprocess.Popen([sys.executable, "-c", PROGRAM, rank, port], **options) for rank in "01"]
    said = [rank.communicate(timeout=120)[0].split() for rank in ranks]

    (name,) = {words[2] for words in said}
    assert said == [["0", "2", name], ["1", "2", name]]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [name]
