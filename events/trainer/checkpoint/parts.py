"""Finds what a checkpoint holds besides model, optimizers and data: other modules and generators.

Everything runs in the training thread.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch

from events.callback import Callback, state_keys
from events.errors import CheckpointError
from events.logger.logger import Logger
from events.state import State
from events.trainer.reachable import GENERATORS, Reached, reach
from events.trainer.weights import load_weights_into, plain_name, weights_of

__all__ = ["RunParts", "find_parts", "load_part"]

_log = logging.getLogger("events")

# Numbers per tensor of an untrained module that show whether it changes.
_SAMPLES = 8


def load_part(what: str, part: Any, saved: Any) -> None:
    """Gives a part of the run its state.

    Raises:
        CheckpointError: the part does not accept the state.
    """
    try:
        if isinstance(part, torch.nn.Module):
            load_weights_into(part, saved)
        else:
            part.load_state_dict(saved)
    except (AttributeError, KeyError, RuntimeError, ValueError, TypeError) as error:
        raise CheckpointError(f"checkpoint must fit the trainer's {what}, got: {error}") from error


def find_parts(state: State, logger: Logger) -> None:
    """Gives a run its parts, if no trainer has: a loop of one's own has an `Engine`, or a `Run`."""
    if state.parts is None:
        state.parts = RunParts(state, logger, {}, {})


class RunParts:
    """Modules, optimizers and generators that the run reaches from the trainer's arguments, by name.

    They are searched each time, in the model, declared objects, loss, metrics, schedulers and callbacks. A
    callback with a `state_dict` saves its own modules.

    A module that nothing trains, such as a teacher, is saved once it has changed since the trainer was made.
    Until then a checkpoint holds a few of its numbers for comparison.

    Attributes:
        late: optimizers, by identity, whose groups differ from the checkpoint's until `fit` begins.

    Args:
        state: the run.
        logger: its destinations are not searched.
        roots: further objects to search, by name.
        declared: objects with `state_dict` and `load_state_dict`, or generators, by name; None excludes the
            part that is found under that name.

    Raises:
        TypeError: a declared object has no state.
    """

    def __init__(
        self, state: State, logger: Logger, roots: Mapping[str, Any], declared: Mapping[str, Any]
    ) -> None:
        for name, one in declared.items():
            if one is not None and not isinstance(one, GENERATORS) and not _has_state(one):
                raise TypeError(
                    f"state must hold objects with state_dict and load_state_dict, or generators, got a "
                    f"{type(one).__name__} for {name!r}."
                )
        self._state = state
        self._logger = logger
        self._declared = dict(declared)
        self._given = dict(roots)
        # Names of untrained modules that have changed, now or when the checkpoint was saved.
        self._changed: set[str] = set()
        # Numbers of untrained modules when the trainer was made.
        self._samples: dict[str, torch.Tensor] = {}
        # Modes and gradients when `fit` began.
        self._switches: dict[str, dict[str, bool]] = {}
        self.late: set[int] = set()
        # Parts that were restored from the checkpoint.
        self._loaded: dict[str, Any] = {}

    def roots(self) -> dict[str, Any]:
        """Returns the objects to search, by name."""
        state = self._state
        destinations = {id(one) for one in self._logger.destinations}
        own = {
            f"callbacks.{key}": one
            for key, one in state_keys(state.callbacks).items()
            if id(one) not in destinations
            and not type(one).__module__.startswith(("events.", "destinations."))
        }
        return {
            "model": state.model,
            **{name: one for name, one in self._declared.items() if one is not None},
            **self._given,
            **{f"schedulers[{index}]": one for index, one in enumerate(state.schedulers)},
            # First those without `state_dict`: a part that they share with another callback is saved here.
            **dict(sorted(own.items(), key=lambda item: _says_itself(item[1]))),
        }

    def find(self) -> Reached:
        """Returns the parts that a checkpoint has, and generators; not the model."""
        state, roots = self._state, self.roots()
        loaders = (state.train_dataloader, *(one.dataloader for one in state.evaluators))
        seen = {id(one) for one in (*state.optimizers, *loaders)}
        found = Reached({}, {}, is_whole=True)
        known = {id(tensor) for tensor in _tensors(state.model)}
        # One after the other: each search has its own limit, and the first that finds a part names it.
        for name, root in roots.items():
            reached = reach({name: root}, seen)
            found.generators.update(reached.generators)
            found = attrs.evolve(found, is_whole=found.is_whole and reached.is_whole)
            if name in self._declared and not isinstance(root, (torch.nn.Module, *GENERATORS)):
                found.parts[name] = root
            elif name != "model" and not _says_itself(root):
                for place, part in reached.parts.items():
                    tensors = {id(tensor) for tensor in _tensors(part)}
                    if place in self._declared or not isinstance(part, torch.nn.Module) or tensors - known:
                        found.parts[place] = part
                        known |= tensors
        for name in (name for name, one in self._declared.items() if one is None):
            found.generators.pop(name, None)
            found.parts.pop(name, None)
        outside = _Outside(state.optimizers, known)
        return attrs.evolve(found, parts=found.parts | ({"optimizers": outside} if outside.places else {}))

    def parameters(self, found: Reached | None = None) -> dict[str, torch.nn.Parameter]:
        """Returns the parameters of model and parts by name, each once.

        Args:
            found: the result of `find`; None to search.
        """
        parts = self.find().parts if found is None else found.parts
        return {
            f"{name}.{plain_name(path)}": parameter
            for name, module in {"model": self._state.model, **parts}.items()
            if isinstance(module, torch.nn.Module)
            for path, parameter in module.named_parameters()
        }

    def trained(self) -> list[torch.nn.Parameter]:
        """Returns the parameters of the optimizers."""
        groups = [group for optimizer in self._state.optimizers for group in optimizer.param_groups]
        return [parameter for group in groups for parameter in group["params"]]

    def states(self, found: Reached) -> dict[str, Any]:
        """Returns the entries of a checkpoint: states by name, and switched modes and gradients."""
        parts, model = found.parts, self._state.model
        fixed = self._fixed(parts)
        return {
            "modules": {
                name: weights_of(one) if isinstance(one, torch.nn.Module) else one.state_dict()
                for name, one in parts.items()
                if name not in fixed
            },
            "fixed": fixed,
            "switches": {
                name: {
                    place: now for place, now in _switches(module).items() if before.get(place, now) != now
                }
                for name, before in self._switches.items()
                if (module := {**parts, "model": model}.get(name)) is not None
            },
        }

    def note(self) -> None:
        """Records numbers of untrained modules, before a checkpoint is loaded."""
        trained = set(map(id, self.trained()))
        self._samples = {
            name: _sample(one)
            for name, one in self.find().parts.items()
            if isinstance(one, torch.nn.Module) and not _is_trained(one, trained)
        }

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Restores parts that were not restored before; some exist only once `fit` begins.

        Raises:
            CheckpointError: a part does not accept its state.
        """
        parts = self.find().parts
        for name, saved in checkpoint["modules"].items():
            if name in parts and self._loaded.get(name) is not parts[name]:
                load_part(name, parts[name], saved)
                self._loaded[name] = parts[name]
                self._changed.add(name)

    def begin(self, checkpoint: Mapping[str, Any] | None, *, is_saved: bool) -> None:
        """Records the modes of parts as training begins, restores switched ones, and logs what is saved.

        Args:
            checkpoint: the checkpoint that the run resumes from, or None.
            is_saved: whether there will be checkpoints.
        """
        found = self.find()
        fixed = self._fixed(found.parts)
        modules = {name: one for name, one in found.parts.items() if isinstance(one, torch.nn.Module)}
        modules["model"] = self._state.model
        self._switches = {name: _switches(one) for name, one in modules.items()}
        if checkpoint is not None:
            for name, switches in checkpoint["switches"].items():
                if name in modules and switches:
                    _switch(modules[name], switches)
        if self._state.rank == 0 and checkpoint is not None:
            self._compare(checkpoint, found.parts, fixed)
        if self._state.rank == 0 and is_saved:
            self._tell(found, fixed)

    def _compare(
        self, checkpoint: Mapping[str, Any], parts: Mapping[str, Any], fixed: Mapping[str, torch.Tensor]
    ) -> None:
        """Warns of parts without a state in the checkpoint, and of states without a part."""
        saved, others = checkpoint["modules"], checkpoint["fixed"]
        for names, text in (
            (
                [name for name in parts if name not in saved and name not in fixed],
                "has no state of %s: they are as the script made them",
            ),
            (
                [
                    name
                    for name, one in fixed.items()
                    if name in others and not torch.equal(others[name], one)
                ],
                "was saved with a different %s, which it does not hold because nothing trains it",
            ),
            (
                [name for name in saved if name not in parts],
                "has the state of %s, which nothing takes; Trainer(state={name: object}) names a part",
            ),
        ):
            if names:
                _log.warning(f"The checkpoint {text}.", ", ".join(names))  # of the table

    def _tell(self, found: Reached, fixed: Mapping[str, torch.Tensor]) -> None:
        """Logs what checkpoints hold, and warns if the search was incomplete."""
        rows = [f"model: {type(self._state.model).__name__}"]
        rows += [
            f"{name}: {type(one).__name__}" + (", once it changes" if name in fixed else "")
            for name, one in (found.parts | found.generators).items()
        ]
        rows += [
            f"callbacks.{key}: identified by its order among others of its name; set state_key"
            for key in state_keys(self._state.callbacks)
            if "#" in key
        ]
        _log.info("Checkpoints hold, beside optimizers, schedulers and data:\n  %s", "\n  ".join(rows))
        if not found.is_whole:
            _log.warning(
                "Checkpoints may lack random number generators: model, loss or callbacks hold too many "
                "objects to look into all. Declare them: Trainer(state={'name': generator})."
            )

    def _fixed(self, parts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Returns the untrained and unchanged modules, with a few of their numbers."""
        trained, fixed = set(map(id, self.trained())), {}
        for name, before in self._samples.items():
            if name not in parts or name in self._declared or name in self._changed:
                continue
            now = _sample(parts[name])
            if _is_trained(parts[name], trained) or not torch.equal(before, now):
                self._changed.add(name)
            else:
                fixed[name] = now
        return fixed


class _Outside:
    """Trained parameters outside of any module, by their position in the optimizers."""

    def __init__(self, optimizers: tuple[torch.optim.Optimizer, ...], known: set[int]) -> None:
        self.places = {
            f"{number}.{index}.{place}": parameter
            for number, optimizer in enumerate(optimizers)
            for index, group in enumerate(optimizer.param_groups)
            for place, parameter in enumerate(group["params"])
            if id(parameter) not in known
        }

    def state_dict(self) -> dict[str, Any]:
        return {place: parameter.detach() for place, parameter in self.places.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for place, value in state.items():
                if place in self.places:
                    self.places[place].copy_(value)


def _has_state(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def _says_itself(value: Any) -> bool:
    """Returns whether a callback overrides `state_dict`."""
    return isinstance(value, Callback) and type(value).state_dict is not Callback.state_dict


def _tensors(part: Any) -> Iterator[torch.Tensor]:
    if isinstance(part, torch.nn.Module):
        for module in part.modules():
            for tensors in (module._parameters, module._buffers):  # noqa: SLF001  # twenty times as fast
                yield from (one for one in tensors.values() if one is not None)
    elif isinstance(part, _Outside):
        yield from part.places.values()


def _is_trained(module: Any, trained: set[int]) -> bool:
    """Returns whether a parameter of a module has a gradient, or is in an optimizer."""
    return any(one.requires_grad or id(one) in trained for one in module.parameters())


def _sample(module: torch.nn.Module) -> torch.Tensor:
    """Returns a few numbers of each tensor; averaging or copying weights changes all of them."""
    found = [getattr(one, "_local_tensor", one).detach() for one in _tensors(module)]
    parts = [one.reshape(-1)[:: max(1, one.numel() // _SAMPLES)].to(torch.float64) for one in found]
    return torch.cat([one.to(parts[0].device) for one in parts]).cpu() if parts else torch.empty(0)


def _switches(module: torch.nn.Module) -> dict[str, bool]:
    """Returns the training mode of modules and `requires_grad` of parameters, by name."""
    modes = {plain_name(name): one.training for name, one in module.named_modules()}
    return modes | {plain_name(name): one.requires_grad for name, one in module.named_parameters()}


def _switch(module: torch.nn.Module, switches: Mapping[str, bool]) -> None:
    for name, one in module.named_modules():
        one.training = switches.get(plain_name(name), one.training)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(switches.get(plain_name(name), parameter.requires_grad))
