"""`find_ranks`: finds which process of a job this one is."""

import os
import re
import sys
from collections import ChainMap
from collections.abc import Iterator
from typing import Any

import attrs

__all__ = ["Ranks", "find_ranks"]

# What tells the fields of `Ranks`, in their order; "-" where nothing does, and "|" between two names for one.
_VARIABLES = {
    "torchrun": "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK|GROUP_RANK GROUP_WORLD_SIZE",
    "Open MPI": "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK "
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI": "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS",
    "Slurm": "SLURM_PROCID SLURM_STEP_NUM_TASKS|SLURM_NTASKS SLURM_LOCALID - SLURM_NODEID "
    "SLURM_STEP_NUM_NODES|SLURM_NNODES",
    "PMIx": "PMIX_RANK",
}
# Jobs of salloc and `srun --pty bash`: programs in their shell inherit a task's variables but are no tasks.
_INTERACTIVE = frozenset({"bash", "interactive"})


@attrs.frozen
class Ranks:
    """The rank of this process in its job, and the world size.

    ```python
    print(find_ranks().source)      # no launcher
    ```

    Attributes:
        rank: the global rank.
        world_size: the number of ranks.
        local_rank: the rank on this node.
        local_world_size: the number of ranks on this node; 1 if nothing tells it.
        node_rank: the index of this node.
        node_count: the number of nodes; 1 if nothing tells it.
        source: where the rank was found: "process group", a launcher with its variable, such as
            "Slurm (SLURM_PROCID)", or "no launcher".
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    node_count: int = 1
    source: str = "no launcher"


_FIELDS = [field.name for field in attrs.fields(Ranks)]


def find_ranks() -> Ranks:
    """Returns the ranks of this process, from the first source below that has them.

    ```python
    ranks = find_ranks()
    print(ranks.rank, ranks.world_size, ranks.source)  # 0 1 no launcher
    ```

    1. The process group of torch, if there is one.
    2. The variables of torchrun, which many launchers set: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
       `LOCAL_WORLD_SIZE`, and `NODE_RANK` or `GROUP_RANK`.
    3. Open MPI's, `OMPI_COMM_WORLD_RANK` and so on.
    4. MPICH's and Intel MPI's: `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID` and `MPI_LOCALNRANKS`.
    5. Slurm's, in a task of `srun`: `SLURM_PROCID`, `SLURM_NTASKS`, `SLURM_LOCALID` and `SLURM_NODEID`.
    6. `PMIX_RANK`, which comes without a world size.
    7. Accelerate, or Lightning, if the program uses it.

    Otherwise this is rank 0, of 1 or of `WORLD_SIZE`. MPI precedes Slurm because `mpirun` starts its daemons
    by `srun`. If a source lacks a value, such as the local rank, it comes from the next one with the same
    rank and world size.

    Set `RANK=0` and `WORLD_SIZE=1` to make each task of `srun` or `mpirun` a separate run.

    Raises:
        ValueError: a variable is not a whole number.
    """
    places = [one for one in _places() if "rank" in one] or [{"source": Ranks().source}]
    first = places[0]
    same = [one for one in places if all(one.get(name) == first.get(name) for name in _FIELDS[:2])]
    found: dict[str, Any] = dict(ChainMap(*same, _told("torchrun")))
    rank, local = found.get("rank", 0), found.get("local_world_size")
    found["world_size"] = world = max(found.get("world_size", 1), rank + 1)
    found.setdefault("node_count", -(-world // local) if local else 1)
    return Ranks(**found)


def _places() -> Iterator[dict[str, Any]]:
    distributed: Any = sys.modules.get("torch.distributed")
    # While another thread imports it, attributes are missing.
    if getattr(distributed, "is_initialized", bool)():
        ranks = {"rank": distributed.get_rank(), "world_size": distributed.get_world_size()}
        yield {"source": "process group", **ranks}
    for launcher in _VARIABLES:
        if launcher != "Slurm" or _is_task_of_srun():
            yield _told(launcher)
    accelerate: Any = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    if shared := getattr(accelerate, "_shared_state", None):
        names = ("process_index", "num_processes", "local_process_index")
        told = zip(_FIELDS, map(shared.get, names), strict=False)
        yield {"source": "Accelerate", **{name: value for name, value in told if value is not None}}
    # Lightning's own launcher sets no `RANK`.
    rank_zero: Any = getattr(sys.modules.get("lightning_utilities.core.rank_zero"), "rank_zero_only", None)
    if rank := getattr(rank_zero, "rank", None):
        yield {"source": "Lightning", "rank": rank}


def _told(launcher: str) -> dict[str, Any]:
    """Returns what the variables of a launcher say."""
    variables = _VARIABLES[launcher].split()
    told: dict[str, Any] = {"source": f"{launcher} ({variables[0]})"}
    for field, names in zip(_FIELDS, variables, strict=False):
        name = next((one for one in names.split("|") if os.environ.get(one)), None)
        if name is not None:
            try:
                told[field] = int(os.environ[name])
            except ValueError:
                raise ValueError(
                    f"environment variable {name} must be a whole number, got {os.environ[name]!r}. Unset it."
                ) from None
    if launcher == "Slurm":
        # The tasks of each node, such as "4(x2),3".
        text = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE", "")
        parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
        tasks = [int(count) for count, times in parts for _ in range(int(times or 1))]
        told |= {"local_world_size": tasks[node]} if (node := told.get("node_rank", 0)) < len(tasks) else {}
    return told


def _is_task_of_srun() -> bool:
    """Returns whether Slurm started this process as a task: the shell of a job has the variables of one too.

    Only a first task is in doubt. A batch script has the number of its job, and none of a step.
    """
    if os.environ.get("SLURM_PROCID", "0") != "0":
        return True
    is_batch_script = "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" not in os.environ
    return not is_batch_script and os.environ.get("SLURM_JOB_NAME") not in _INTERACTIVE
