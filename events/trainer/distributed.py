"""The collectives that the trainer uses, over ranks started by `torchrun` or by the user.

With a single rank, every function returns its argument. All ranks must call each of them.
"""

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from events.ranks import find_ranks

__all__ = [
    "any_rank",
    "average_as_made",
    "charge_waiting",
    "check_sampler",
    "from_first",
    "from_rank_zero",
    "gather",
    "gather_parts",
    "is_alone",
    "is_dtensor",
    "is_sharded",
    "join",
    "least",
    "leave",
    "mean_gradient",
    "ranks",
    "sum_numbers",
    "sum_tensor",
    "union",
    "wrap",
]

_Collective = TypeVar("_Collective", bound=Callable[..., Any])
_LEAVE_SECONDS = 0.1

# The `TimeLedger` that charges the time of collectives: of the newest trainer.
_ledger: Any = None
# How long this rank has waited for the others to create the process group, until a ledger knows of it.
_joining_nanoseconds = 0


def charge_waiting(ledger: Any) -> None:
    """Lets a `TimeLedger` charge the time of collectives, and of `join`, from here on; None ends it."""
    global _ledger, _joining_nanoseconds  # noqa: PLW0603  # a process has one process group
    _ledger = ledger
    if ledger is not None:
        ledger.add_waiting(_joining_nanoseconds)
        _joining_nanoseconds = 0


def _meets(collective: _Collective) -> _Collective:
    """Marks a function in which a rank waits for the others."""

    @functools.wraps(collective)
    def meet(*args: Any, **kwargs: Any) -> Any:
        if _ledger is None or is_alone():
            return collective(*args, **kwargs)
        return _ledger.charge_call("waiting", collective, *args, **kwargs)

    return meet  # type: ignore[return-value]  # with the signature of the collective


def join(device: torch.device) -> bool:
    """Creates the process group that the environment describes; returns whether it did.

    With an accelerator, host tensors still go over gloo: the collectives of each batch must not wait for the
    device.
    """
    found = find_ranks()
    if distributed.is_initialized() or found.world_size == 1:
        return False
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise ValueError(
            f"{' and '.join(missing)} must be set for {found.world_size} ranks ({found.source}) to meet. "
            "Start them by torchrun, or call torch.distributed.init_process_group before. To train alone in "
            "each of these processes, set RANK=0 and WORLD_SIZE=1."
        )
    global _joining_nanoseconds  # noqa: PLW0603  # a process has one process group
    began = time.perf_counter_ns()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if restart and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun keeps its store when it restarts ranks: with torch 2.13 these find the addresses of those
        # that are gone, and cannot connect.
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        prefix = f"training-destinations/restart-{restart}"
        # torch does not list these two among its exports.
        kept = distributed.TCPStore(*address, is_master=False)  # type: ignore[attr-defined]
        store = distributed.PrefixStore(prefix, kept)  # type: ignore[attr-defined]
        distributed.init_process_group(backend, store=store, rank=found.rank, world_size=found.world_size)
    else:
        distributed.init_process_group(backend, rank=found.rank, world_size=found.world_size)
    _joining_nanoseconds = time.perf_counter_ns() - began
    return True


def leave() -> None:
    """Destroys the process group that `join` created.

    Destroying a gloo group waits for its threads while it holds the GIL, which these need to release the
    tensors of the last collective: a process that exits right after one could hang. A barrier does not help,
    as other ranks may have exited. With torch 2.13 the pause was not needed (3,400 groups of two ranks, each
    destroyed right after three collectives: none hung); it is kept for older versions.
    """
    time.sleep(_LEAVE_SECONDS)
    distributed.destroy_process_group()


def is_alone() -> bool:
    """Returns whether there is a single rank."""
    return ranks() == 1


def ranks() -> int:
    """Returns the number of ranks of the process group, 1 without one."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def wrap(model: torch.nn.Module, device: torch.device, *, is_called: bool = True) -> torch.nn.Module:
    """Returns the model, wrapped to average gradients over ranks; a sharded model needs no wrapping.

    A model that is not called as a whole is not wrapped; each of its gradients is averaged once computed.
    """
    if is_alone() or isinstance(model, DistributedDataParallel) or is_sharded(model):
        return model
    if not is_called:
        for tensor in (*model.parameters(), *model.buffers()):
            average_as_made(tensor)
        return model
    wrapped = _SettledBuckets(model, device_ids=None if device.type == "cpu" else [device])
    wrapped.settle()
    return wrapped


def average_as_made(tensor: torch.Tensor) -> None:
    """Gives a tensor the values of rank 0, and averages its gradient after each backward pass.

    Accumulated gradients stay correct, because earlier averages are the same on all ranks.
    """
    from_first(tensor.detach())
    if tensor.requires_grad:
        tensor.register_post_accumulate_grad_hook(_average)  # type: ignore[no-untyped-call]


def _average(parameter: torch.nn.Parameter) -> None:
    mean_gradient(parameter)


class _SettledBuckets(DistributedDataParallel):
    """Sums gradients in the same buckets from the first batch of a process on.

    torch's class sums the first batch in one bucket, and then rebuilds its buckets in the order in which the
    gradients arrived. A ring of three or more ranks adds numbers in an order that depends on their position
    in the bucket, so the first batch of a resumed run would differ in the last bit from an uninterrupted run.
    """

    def _build_params_for_reducer(self) -> tuple[list[Any], list[bool]]:
        # The last layer's gradients come first, so buckets in this order are summed during the backward pass.
        parameters, are_sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return list(parameters)[::-1], list(are_sparse)[::-1]

    def settle(self) -> None:
        """Rebuilds the buckets now, which torch does only once; all ranks must call it."""
        self.reducer._push_all_rebuilt_params()  # noqa: SLF001
        self.reducer._rebuild_buckets()  # noqa: SLF001


def is_dtensor(value: Any) -> bool:
    """Returns whether a value is a tensor divided among ranks, as by `fully_shard`."""
    # Avoids importing `torch.distributed.tensor`, which is slow.
    return isinstance(value, torch.Tensor) and hasattr(value, "device_mesh")


def is_sharded(model: torch.nn.Module) -> bool:
    """Returns whether parameters of a model are divided among ranks."""
    return any(is_dtensor(parameter) for parameter in model.parameters())


def check_sampler(dataloader: Any) -> None:
    """Checks that a dataloader does not give every rank the same samples.

    Raises:
        ValueError: its sampler is one of torch's that ignore ranks.
    """
    if is_alone() or not isinstance(dataloader, DataLoader):
        return
    # The one that chooses: of torchvision's references, that inside a batch sampler.
    sampler: Any = dataloader.sampler if dataloader.batch_sampler is None else dataloader.batch_sampler
    while hasattr(sampler, "sampler"):
        sampler = sampler.sampler
    if isinstance(sampler, RandomSampler | SequentialSampler):
        raise ValueError(  # noqa: TRY004  # its type is right, its sampler is not
            f"train_dataloader must give each of {distributed.get_world_size()} ranks its own samples, "
            f"got a {type(sampler).__name__}. "
            "Pass sampler=torch.utils.data.DistributedSampler(dataset) to the DataLoader, after "
            "torch.distributed.init_process_group()."
        )


@_meets
def from_rank_zero(value: Any) -> Any:
    """Returns the value of rank 0."""
    if is_alone():
        return value
    box = [value]
    distributed.broadcast_object_list(box, src=0)
    return box[0]


@_meets
def gather(value: Any) -> list[Any]:
    """Returns the values of all ranks, in their order."""
    if is_alone():
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


@_meets
def gather_parts(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Returns the tensors of all ranks, of any shapes and types; of those without elements at most one.

    torchmetrics calls it for each of the sums and lists of a metric.
    """
    parts: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(parts, tensor.cpu(), group=group)
    parts = [one for one in parts if one.numel()] or parts[:1]
    return [one.to(tensor.device) for one in parts]


def sum_numbers(*numbers: float) -> list[float]:
    """Returns the sum of each number, bitwise equal on every rank; one collective, in host memory."""
    return _reduced(numbers, distributed.ReduceOp.SUM)


def least(*numbers: float) -> list[float]:
    """Returns the smallest of each number over ranks."""
    return _reduced(numbers, distributed.ReduceOp.MIN)


@_meets
def _reduced(numbers: Sequence[float], how: Any) -> list[float]:
    if is_alone():
        return list(numbers)
    reduced = torch.tensor(numbers, dtype=torch.float64)
    distributed.all_reduce(reduced, how)
    return reduced.tolist()


@_meets
def sum_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Adds up a tensor over ranks, in place, on its device; it must have the same shape on all."""
    if not is_alone():
        distributed.all_reduce(tensor)
    return tensor


@_meets
def from_first(tensor: torch.Tensor) -> None:
    """Gives a tensor the values of rank 0, in place."""
    distributed.broadcast(tensor, 0)


@_meets
def mean_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Returns the gradient of a parameter, averaged over ranks; one without counts as zeros."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    distributed.all_reduce(gradient)
    return gradient.div_(ranks())


def any_rank(claim: bool) -> bool:
    """Returns whether the claim is true on any rank."""
    return sum_numbers(claim)[0] > 0


def union(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names that any rank has, in the same order on all."""
    return tuple(dict.fromkeys(name for of_rank in gather(tuple(names)) for name in of_rank))
