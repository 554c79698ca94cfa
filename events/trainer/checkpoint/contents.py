"""What a checkpoint holds: collected from a run, and restored into one.

Everything runs in the training thread.
"""

import fnmatch
import itertools
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from events.callback import Callback, state_keys
from events.errors import CheckpointError
from events.logger.logger import Logger
from events.state import State
from events.timestamp import Timestamp
from events.trainer import distributed
from events.trainer.metrics import StatefulMetric, states_of
from events.trainer.reachable import Reached
from events.trainer.train_data import data_state
from events.trainer.weights import load_weights_into, plain_name, weights_of

from .parts import load_part
from .plain import plain_values
from .retention import Retention, values_of_now

__all__ = ["VERSION", "checkpoint_of", "load_checkpoint", "load_optimizers", "load_weights", "summary_of"]

_log = logging.getLogger("events")

VERSION = 1
"""The version of the format."""


def checkpoint_of(
    state: State, logger: Logger, summary: str, *, weights_only: bool, is_of_rank: bool
) -> dict[str, Any]:
    """Returns everything that `load_checkpoint` and the trainer restore; every rank must call it.

    Its tensors are the run's own, not copies.

    Args:
        state: the run.
        logger: its destinations have a state too.
        summary: a description as JSON; it comes first, so that it can be read without the rest.
        weights_only: whether to include only the model: for `load_weights_only`, not for resuming.
        is_of_rank: whether to include the random numbers of this rank only.
    """
    checkpoint = {
        "version": VERSION,
        "summary": summary,
        "run_name": state.run_name,
        "timestamp": state.timestamp.to_numbers(),
        "model": weights_of(state.model),
    }
    if weights_only:
        return checkpoint

    def of_ranks(value: Any) -> list[Any]:
        return [value] if is_of_rank else distributed.gather(value)

    found = state.parts.find()
    return {
        **checkpoint,
        **state.parts.states(found),
        "structure": _structure(state, found),
        "optimizers": [optimizer.state_dict() for optimizer in state.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in state.schedulers],
        "scaler": None if state.scaler is None else state.scaler.state_dict(),
        # One per rank: the batches of each are its own.
        "train_metrics": of_ranks(states_of(state.train_metrics)),
        "evaluation": {"values": dict(state.eval_values), "batches": dict(state.eval_batches)},
        "callbacks": _callback_states(state, logger),
        # One per rank.
        "random": of_ranks(plain_values(data_state(state, found.generators), "random")),
        "random_at_epoch_start": of_ranks(plain_values(state.random_at_epoch_start, "random_at_epoch_start")),
    }


def summary_of(state: State, identifier: str, best: Retention, *, weights_only: bool) -> str:
    """Returns the description that `destinations runs checkpoints` shows, as JSON.

    Args:
        state: the run.
        identifier: of the checkpoint.
        best: the rule that selects the best checkpoint.
        weights_only: whether it holds only the model.
    """
    return json.dumps(
        {
            "id": identifier,  # First: see `has_identifier`.
            "run_name": state.run_name,
            "batch": int(state.timestamp.batch),
            "epoch": int(state.timestamp.epoch),
            "time": time.time(),
            "metrics": values_of_now(state),
            "best_by": None if best.best is None else {"metric": best.best, "mode": best.best_mode},
            "weights_only": weights_only,
        }
    )


def load_weights(
    weights: Mapping[str, Any], state: State, *, strict: bool = True, exclude: Sequence[str] = ()
) -> None:
    """Loads the weights of a checkpoint into the model of a run that starts from the beginning.

    Args:
        weights: the part "model" of a checkpoint.
        state: the run.
        strict: whether the names must match the model's; otherwise missing and unexpected ones are logged.
        exclude: patterns, as of `fnmatch`, of names that are not loaded.

    Raises:
        CheckpointError: the weights do not match the model.
        ValueError: a pattern matches no name.
    """
    kept = dict(weights)
    for pattern in exclude:
        matching = fnmatch.filter(weights, pattern)
        if not matching:
            raise ValueError(
                f"load_exclude must match names in the checkpoint, {pattern!r} matches none. "
                f"There are {', '.join(itertools.islice(weights, 5))} and so on."
            )
        for name in matching:
            kept.pop(name, None)
    excluded = weights.keys() - kept.keys()
    try:
        missing, unexpected = load_weights_into(state.model, kept, strict=False)
    except (KeyError, RuntimeError, ValueError, TypeError) as error:
        raise CheckpointError(f"checkpoint must fit the trainer's model, got: {error}") from error
    problems = [f"no {name!r}" for name in map(plain_name, missing) if name not in excluded]
    problems += [f"{name!r}, which the model has not" for name in unexpected]
    if problems and strict:
        raise CheckpointError(
            f"checkpoint must fit the trainer's model, got {'; '.join(problems)}. "
            "load_strict=False loads the rest, load_exclude leaves names out."
        )
    if problems:
        _log.warning("The loaded weights have %s.", "; ".join(problems))


def load_checkpoint(checkpoint: Mapping[str, Any], state: State, logger: Logger) -> None:
    """Restores a run from a checkpoint, except the random state, which is restored when training starts.

    Raises:
        CheckpointError: it holds weights alone, or the model, optimizers or schedulers do not match those
            of the run.
    """
    if "optimizers" not in checkpoint:
        raise CheckpointError(
            "checkpoint to resume from must hold the whole run, got the weights alone. "
            "Pass load_weights_only=True to begin a new run with them."
        )
    load_part("model", state.model, checkpoint["model"])
    state.parts.load(checkpoint)
    # They may add the parameter groups that an optimizer had.
    _load_callbacks(checkpoint["callbacks"], state, logger)
    for kind in ("optimizers", "schedulers"):
        current, saved = getattr(state, kind), checkpoint[kind]
        if len(current) != len(saved):
            raise CheckpointError(
                f"checkpoint must fit the trainer's {len(current)} {kind}, got {len(saved)}."
            )
        for one, name in zip(current, checkpoint["structure"][kind], strict=True):
            if _kind(one) != name:
                raise CheckpointError(
                    f"checkpoint must fit the trainer's {kind}, got {name} for {_kind(one)}. "
                    "load_weights_only=True begins a new run with its weights; if you renamed a class, "
                    "set its attribute state_key to the old name."
                )
    load_optimizers(checkpoint, state)
    for one, saved in zip(state.schedulers, checkpoint["schedulers"], strict=True):
        load_part("schedulers", one, saved)
    if state.scaler is not None and checkpoint["scaler"] is not None:
        load_part("scaler", state.scaler, checkpoint["scaler"])
    for what, metric, saved in _metric_parts(checkpoint["train_metrics"], state):
        load_part(what, metric, saved)
    state.timestamp = Timestamp.from_state_dict(checkpoint["timestamp"])
    evaluation = checkpoint["evaluation"]
    state.eval_values, state.eval_batches = dict(evaluation["values"]), dict(evaluation["batches"])
    at_epoch_start = checkpoint["random_at_epoch_start"]
    state.random_at_epoch_start = at_epoch_start[state.rank] if state.rank < len(at_epoch_start) else None


def _metric_parts(saved: Sequence[Mapping[str, Any]], state: State) -> list[tuple[str, Any, Any]]:
    """Returns the metrics of this rank with their states; none if the number of ranks has changed."""
    is_same = len(saved) == state.world_size
    states = saved[state.rank] if is_same else {}
    if not is_same and state.rank == 0 and any(saved):
        _log.warning(
            "The checkpoint was saved by %d ranks and is loaded on %d: metrics of this epoch start over.",
            len(saved),
            state.world_size,
        )
    return [
        (f"metric {name!r}", StatefulMetric(metric), states[name])
        for name, metric in state.train_metrics.items()
        if name in states
    ]


def _kind(one: Any) -> str:
    """Returns the name that identifies an optimizer or scheduler in a checkpoint."""
    return getattr(one, "state_key", None) or type(one).__name__


def _structure(state: State, found: Reached) -> dict[str, Any]:
    """Returns the kinds of optimizers and schedulers, and the names of the parameters in each group."""
    names = {id(one): name for name, one in state.parts.parameters(found).items()}
    return {
        "optimizers": [_kind(one) for one in state.optimizers],
        "schedulers": [_kind(one) for one in state.schedulers],
        "groups": [_groups(one, names) for one in state.optimizers],
    }


def _groups(optimizer: Any, names: Mapping[int, str]) -> list[list[str]]:
    return [[names.get(id(one), "") for one in group["params"]] for group in optimizer.param_groups]


def load_optimizers(checkpoint: Mapping[str, Any], state: State, *, is_late: bool = False) -> None:
    """Restores optimizers; one with groups that training added is restored only after `fit` has begun.

    By then a callback may have added the groups again; missing ones are added here.

    Raises:
        CheckpointError: an optimizer has other parameters, or in another order.
    """
    parameters = state.parts.parameters()
    names = {id(one): name for name, one in parameters.items()}
    saved_groups = checkpoint["structure"]["groups"]
    for optimizer, saved, groups in zip(
        state.optimizers, checkpoint["optimizers"], saved_groups, strict=True
    ):
        if is_late and id(optimizer) not in state.parts.late:
            continue
        now = _groups(optimizer, names)
        pairs = [pair for both in zip(groups, now, strict=False) for pair in zip(*both, strict=False)]
        moved = [pair for pair in pairs if pair[0] != pair[1] and all(map(_is_of_model, pair))]
        added = groups[len(now) :]
        gone = [name for group in added for name in group if name not in parameters]
        if moved or gone:
            problem = (
                f"{moved[0][0]!r} in the place of {moved[0][1]!r}" if moved else f"a group with {gone[0]!r}"
            )
            raise CheckpointError(
                f"checkpoint must fit the parameters of the trainer's {_kind(optimizer)}, got {problem}."
            )
        if added and not is_late:
            state.parts.late.add(id(optimizer))
            continue
        for group in added:
            optimizer.add_param_group({"params": [parameters[name] for name in group]})
        load_part("optimizers", optimizer, saved)


def _is_of_model(name: str) -> bool:
    return name.startswith("model.")


def _load_callbacks(saved: Mapping[str, Any], state: State, logger: Logger) -> None:
    """Restores callbacks and destinations, and warns of states that none of them takes."""
    callbacks = state_keys(state.callbacks)
    for name, callback in callbacks.items():
        if name not in saved:
            continue
        if _is_destination(callback, logger):
            logger.faults.guard(callback, "load_state_dict", callback.load_state_dict)(saved[name])
        else:
            load_part(f"callback {name!r}", callback, saved[name])
    unwanted = [name for name in saved if name not in callbacks]
    if unwanted and state.rank == 0:
        _log.warning(
            "The checkpoint has the state of %s, which no callback or destination takes. If you renamed "
            "a class, set its state_key = %r.",
            ", ".join(unwanted),
            unwanted[0],
        )


def _callback_states(state: State, logger: Logger) -> dict[str, Any]:
    """Returns the states of callbacks and destinations; those that can't be saved are left out."""
    # Records from before the checkpoint belong to it, even if their values are still on a device.
    logger.wait_for_copies()
    states: dict[str, Any] = {}

    def save(name: str, callback: Callback) -> None:
        if saved := callback.state_dict():
            states[name] = plain_values(saved, f"callbacks/{name}")

    for name, callback in state_keys(state.callbacks).items():
        take = (
            logger.faults.guard(callback, "state_dict", save) if _is_destination(callback, logger) else save
        )
        take(name, callback)
    return states


def _is_destination(callback: object, logger: Logger) -> bool:
    return any(callback is destination for destination in logger.destinations)
