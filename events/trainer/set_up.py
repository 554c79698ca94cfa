"""Checks and normalizes the arguments of the trainer."""

import contextlib
import importlib.metadata
import inspect
import subprocess
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from events.ranks import find_ranks
from events.state import Precision, State
from events.timestamp import Time, TimeUnit

from . import distributed

__all__ = [
    "AUTOCAST_DTYPES",
    "as_limit",
    "check_can_fit",
    "check_choices",
    "check_iterations",
    "check_progress",
    "closure_optimizer",
    "find_device",
    "learning_rates",
    "length_of",
    "move_optimizers",
    "parts_taken",
    "shorter",
    "step_schedulers_of_epoch",
    "versions",
    "weights_options",
    "without_gradient_sync",
]

AUTOCAST_DTYPES = {
    Precision.BF16: torch.bfloat16,
    Precision.AMP_BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
    Precision.AMP_FP16: torch.float16,
}

_COMMIT = ("git", "rev-parse", "HEAD")

_TARGETS = {"label", "labels", "target", "targets", "y"}


def check_choices(
    microbatch_size: int | str | None,
    run_name: str | None,
    *,
    saves: bool,
    autoresume: bool,
) -> None:
    """Raises ValueError for values out of range, or for `autoresume` without what it needs."""
    if isinstance(microbatch_size, str):
        if microbatch_size != "auto":
            raise ValueError(
                f"device_train_microbatch_size must be a number or 'auto', got {microbatch_size!r}."
            )
        if find_ranks().world_size > 1:
            raise ValueError(
                "device_train_microbatch_size='auto' needs a single rank: one that runs out of memory would "
                "leave the others waiting for its gradients. Pass a number."
            )
    elif microbatch_size is not None and microbatch_size < 1:
        raise ValueError(f"device_train_microbatch_size must be at least 1, got {microbatch_size}.")
    if autoresume and (not saves or run_name is None):
        missing = "run_name" if saves else "save_folder"
        raise ValueError(f"autoresume needs {missing} to find the run. Pass it to the Trainer.")


def weights_options(
    load_path: str | Path | None, exclude: Sequence[str], *, weights_only: bool, strict: bool
) -> dict[str, Any] | None:
    """Returns the arguments of `load_weights`, or None where a whole checkpoint is loaded.

    Raises:
        ValueError: there is nothing to load, or an option needs `load_weights_only`.
    """
    if isinstance(exclude, str):
        raise ValueError(  # noqa: TRY004  # a string is a sequence of strings
            f"load_exclude must be a list of patterns, got {exclude!r}. Write [{exclude!r}]."
        )
    if weights_only and load_path is None:
        raise ValueError("load_weights_only needs load_path.")
    if not weights_only and (exclude or not strict):
        name = "load_exclude" if exclude else "load_strict=False"
        raise ValueError(
            f"{name} needs load_weights_only=True: a run that is resumed in part would not be that run."
        )
    return {"strict": strict, "exclude": exclude} if weights_only else None


def check_can_fit(state: State) -> None:
    """Raises ValueError if the dataloader, the optimizers or the duration are missing or unusable."""
    for name, hint in (
        ("train_dataloader", "Pass a DataLoader."),
        ("optimizers", "For example, pass torch.optim.Adam(model.parameters())."),
        ("max_duration", 'Pass max_duration="5ep" to the Trainer, or duration="1ep" to fit.'),
    ):
        if getattr(state, name) in (None, ()):
            raise ValueError(f"{name} must be given to train. {hint}")
    if state.max_duration is not None and state.max_duration.unit is TimeUnit.DURATION:
        raise ValueError(
            f'max_duration must not be a share of the run, got {state.max_duration}. Write "5ep".'
        )
    distributed.check_sampler(state.train_dataloader)


def check_iterations(length: Time | None, *times: Any) -> None:
    """Raises ValueError for a length of iterations that is none, or a time in iterations without it."""
    if length is not None and (length.unit is not TimeUnit.EPOCH or length.value < 1):
        raise ValueError(f'iteration_length must be at least one epoch, got {length}. Write "3ep".')
    for time in times:
        if length is None and time is not None:
            parsed = Time.from_input(time, TimeUnit.EPOCH)
            if parsed.unit is TimeUnit.ITERATION:
                raise ValueError(
                    f"a time in iterations must have iteration_length, got {parsed}, which would never come. "
                    'Pass iteration_length="3ep" to the Trainer, or give the time in another unit.'
                )


def check_progress(state: State) -> None:
    """Raises ValueError where training never ends: its maximum is in tokens, and batches have none."""
    maximum = state.max_duration
    if maximum is not None and maximum.unit is TimeUnit.TOKEN and not state.timestamp.token_in_epoch:
        raise ValueError(
            f"max_duration must be a time that training reaches, got {maximum}, but "
            f"{state.timestamp.batch_in_epoch} of this epoch had no tokens. "
            'Override Trainer.tokens_in, or write "5ep" or "1000ba".'
        )


def as_limit(batches: Any, name: str) -> int | None:
    """Returns a number of batches, or None for all.

    Raises:
        ValueError: it is neither a whole number from 1, nor -1 or None.
    """
    if batches is None or batches == -1:
        return None
    if isinstance(batches, bool) or not isinstance(batches, Integral) or batches < 1:
        raise ValueError(
            f"{name} must be a whole number of batches, at least 1, or -1 or None for all, got {batches!r}."
        )
    return int(batches)


def find_device(device: Any) -> torch.device:
    """Returns the given device ("gpu": CUDA), else this rank's accelerator, else the CPU.

    Raises:
        RuntimeError: it is a GPU that this process cannot use.
    """
    found = _named_device(device)
    if found.type == "cuda" and _is_forked_from_cuda():
        raise RuntimeError(
            f"this process cannot train on {found}: it was forked after CUDA was used in its parent "
            "(torch.cuda.is_available() is enough). Start ranks with torchrun or by 'spawn', or fork before "
            'CUDA is used; device="cpu" trains without it.'
        )
    return found


def _is_forked_from_cuda() -> bool:
    return bool(getattr(torch.cuda, "_is_in_bad_fork", bool)())


def _named_device(device: Any) -> torch.device:
    # A task of `srun` may see its own device alone.
    local_rank = find_ranks().local_rank % max(1, torch.cuda.device_count())
    if device is not None and not isinstance(device, str | torch.device):
        # One of Composer's devices.
        device = str(getattr(device, "name", device))
    if device == "gpu":
        return torch.device("cuda", local_rank)
    if device is not None:
        return torch.device(device)
    # CUDA may say there that it is not available; NVML, which `device_count` asks, knows of the GPUs.
    if torch.cuda.is_available() or (_is_forked_from_cuda() and torch.cuda.device_count()):
        return torch.device("cuda", local_rank)
    # New in torch 2.6.
    accelerator = getattr(torch, "accelerator", None)
    found = (
        accelerator.current_accelerator() if accelerator is not None and accelerator.is_available() else None
    )
    return torch.device("cpu") if found is None else torch.device(found.type)


def versions(rank: int) -> dict[str, str | None]:
    """Returns the version of this package and, on rank 0, the commit of the code; None if unknown."""
    commit = version = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("training-destinations")
    if rank == 0:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            found = subprocess.check_output(_COMMIT, stderr=subprocess.DEVNULL, timeout=5)  # noqa: S603
            commit = found.decode().strip()
    return {"version": version, "commit": commit}


def length_of(dataloader: Any) -> int | None:
    """Returns the number of batches, or None if the dataloader has no length."""
    try:
        return len(dataloader)
    except TypeError:
        return None


def shorter(length: int | None, limit: int | None) -> int | None:
    """Returns the number of batches to read, given the length of a dataloader and a limit."""
    return limit if limit is not None and (length is None or length > limit) else length


def closure_optimizer(
    optimizers: tuple[torch.optim.Optimizer, ...], precision: Precision
) -> torch.optim.Optimizer | None:
    """Returns the optimizer that computes gradients itself, by a closure, as LBFGS does; None without one.

    Raises:
        ValueError: it is one of several, or gradients are scaled.
    """
    for optimizer in optimizers:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is None or closure.default is not inspect.Parameter.empty:
            continue
        if len(optimizers) > 1 or AUTOCAST_DTYPES.get(precision) is torch.float16:
            problem = f"{len(optimizers)} optimizers" if len(optimizers) > 1 else f"precision {precision!s}"
            raise ValueError(
                f"{type(optimizer).__name__} must be the only optimizer, without fp16: it computes gradients "
                f"several times in a batch, got {problem}."
            )
        return optimizer
    return None


def parts_taken(model: torch.nn.Module) -> int:
    """Returns how many parts of a batch a model takes that computes its own loss, targets included.

    It takes those that its `forward` requires by position, and one that is called as targets are.
    """
    parameters = inspect.signature(getattr(model, "_orig_mod", model).forward).parameters.values()
    by_position = [one for one in parameters if one.kind in {one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD}]
    taken = [one.default is one.empty or one.name in _TARGETS for one in by_position]
    return taken.index(False) if False in taken else len(taken)


def learning_rates(optimizers: tuple[torch.optim.Optimizer, ...]) -> dict[str, float]:
    """Returns learning rates by "lr/<optimizer>/group<i>"; further optimizers of a class are numbered."""
    rates: dict[str, float] = {}
    names: list[str] = []
    for optimizer in optimizers:
        base = type(optimizer).__name__
        names.append(base if base not in names else f"{base}{names.count(base) + 1}")
        for index, group in enumerate(optimizer.param_groups):
            rates[f"lr/{names[-1]}/group{index}"] = group["lr"]
    return rates


def step_schedulers_of_epoch(schedulers: tuple[Any, ...]) -> None:
    """Steps schedulers at the end of an epoch; a run that resumes there has not stepped its optimizer yet."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        for scheduler in schedulers:
            scheduler.step()


def move_optimizers(optimizers: tuple[torch.optim.Optimizer, ...], device: torch.device) -> None:
    """Moves existing optimizer state to the device of the parameters."""
    for optimizer in optimizers:
        for values in optimizer.state.values():
            for name, value in values.items():
                # Step counters stay on the CPU, where optimizers expect them.
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    values[name] = value.to(device)


def without_gradient_sync(module: torch.nn.Module) -> AbstractContextManager[None]:
    """Returns a context in which DistributedDataParallel does not synchronize gradients."""
    if isinstance(module, DistributedDataParallel):
        context: AbstractContextManager[None] = module.no_sync()
        return context
    return nullcontext()
