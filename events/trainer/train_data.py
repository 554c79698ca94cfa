"""Reads the training data, and resumes reading at the position of a checkpoint, in the same order.

For each rank, a checkpoint holds the states of all generators, global and in the dataloader
(`random_state`), and the states of loader, samplers and dataset if they have a `state_dict`, both when it was
saved and when the epoch began. Everything runs in the training thread.
"""

import copy
import functools
import itertools
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)

from events.engine import Engine
from events.errors import CheckpointError
from events.event import Event
from events.state import State

from .random_state import (
    generator_states,
    generators_in,
    parts_of,
    random_state_of,
    restore_generators,
    restore_random_state,
)
from .reachable import reach
from .set_up import length_of

__all__ = ["SkipBy", "TrainData", "data_state", "random_numbers", "samplers_of"]

_log = logging.getLogger("events")

SkipBy = Literal["auto", "index", "reading"]

# How many samplers, or datasets, may wrap each other.
_NESTED = 8
_OBJECTS = 1000
_NO_BATCH = object()


def data_state(state: State, held: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the current random state of this rank and the positions of its dataloaders.

    Args:
        state: the run.
        held: the generators in other parts of the run, by name; None to search for them.
    """
    place = {"parts": _part_states(state.train_dataloader), "place": _place(state)}
    return {**random_numbers(state, held), **place, **state.interrupted_evaluation}


def random_numbers(state: State, held: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the current random state of this rank; see `data_state`."""
    held = state.parts.find().generators if held is None else held
    return {
        **random_state_of(state.train_dataloader),
        "evaluators": {
            one.label: {
                "generators": generator_states(generators_in(one.dataloader)),
                "has_workers": _has_workers(one.dataloader),
            }
            for one in state.evaluators
        },
        "held": generator_states(held),
    }


def _place(state: State) -> dict[str, Any]:
    """Returns the position of this rank in its epoch, in samples, with what it depends on.

    A resumed epoch begins at the sample "base", possibly with another batch size.
    """
    loader = state.train_dataloader
    size, length = _batch_size(loader), _samples_in(loader)
    batches, samples = (state.random_at_epoch_start or {}).get("base", (0, 0))
    done = None if size is None else samples + (int(state.timestamp.batch_in_epoch) - batches) * size
    return {
        "batch_size": size,
        # The last batch may be smaller; a sampler that is asked for more samples ends, as it did then.
        "samples": done,
        "is_end": None not in {done, length} and done >= length,  # type: ignore[operator]  # no None
        "is_distributed": _is_distributed(loader),
        **_order(loader),
    }


def _order(loader: Any) -> dict[str, Any]:
    """Returns what else tells that a loader reads other samples, or in another order."""
    samplers = ", ".join(type(one).__name__ for one in samplers_of(loader).values())
    return {"length": length_of(loader), "samplers": samplers or type(loader).__name__}


def _is_distributed(loader: Any) -> bool:
    """Returns whether the order of samples is the same for any number of ranks."""
    return type(getattr(loader, "sampler", None)) is DistributedSampler


def _batch_size(loader: Any) -> int | None:
    """Returns the batch size, or None if the loader does not tell."""
    size = getattr(loader, "batch_size", None)
    size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None) if size is None else size
    return size if isinstance(size, int) else None


def _samples_in(loader: Any) -> int | None:
    """Returns the number of samples in this rank's epoch, or None if only reading tells."""
    if not _is_data_loader(loader) or isinstance(loader.dataset, IterableDataset):
        return None
    sampler = (
        loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)
    )
    return length_of(sampler)


def samplers_of(dataloader: Any) -> dict[str, Any]:
    """Returns the samplers of a dataloader and the samplers inside them, by name, each once."""
    found: dict[str, Any] = {}
    for name in ("sampler", "batch_sampler"):
        place, sampler = name, getattr(dataloader, name, None)
        while (
            sampler is not None and len(found) < _NESTED and all(sampler is not one for one in found.values())
        ):
            found[place] = sampler
            place, sampler = f"{place}.sampler", getattr(sampler, "sampler", None)
    return found


class TrainData:
    """The training data of a run: batches in an order that a resumed run repeats.

    Args:
        state: the run.
        engine: runs the events around reading.
        skip_by: how to skip batches that were already trained on; see `Trainer`.
        is_saved: whether there are checkpoints, which need positions and warnings.
        is_limited: whether epochs may end before the end of the data.

    Raises:
        ValueError: `skip_by` is unknown.
    """

    def __init__(
        self, state: State, engine: Engine, *, skip_by: SkipBy, is_saved: bool, is_limited: bool
    ) -> None:
        if skip_by not in get_args(SkipBy):
            raise ValueError(f"skip_by must be one of {', '.join(get_args(SkipBy))}, got {skip_by!r}.")
        self._state = state
        self._engine = engine
        self._skip_by = skip_by
        self._is_saved = is_saved
        self._is_limited = is_limited
        self._is_announced = False
        # The iterator that this process has read from; all epochs share it.
        self._begun: Any = None
        # The iterator of an epoch that was resumed in its middle.
        self._iterator: Iterator[Any] | None = None
        # Whether the loaded position may be the end of its epoch.
        self._may_be_at_end = False
        # The sampler of workers that were started before this epoch.
        self._indices: _Indices | None = None
        # Whether this epoch continues with other batches than it began with.
        self._is_shifted = False

    def _announce(self) -> None:
        """Warns once of anything that a resumed run may not repeat."""
        if self._is_announced or not self._is_saved:
            return
        self._is_announced = True
        reasons = _not_promised(self._state.train_dataloader, self._skip_by, is_limited=self._is_limited)
        if reasons and self._state.rank == 0:
            _log.warning(
                "A resumed run may not read the same samples as an uninterrupted one: %s. "
                'The page "Checkpoints" lists what is promised.',
                "; ".join(reasons),
            )

    @property
    def length(self) -> int | None:
        """The number of batches in this epoch, including those before a resume; None if unknown."""
        loader = self._state.train_dataloader
        length, base = length_of(loader), (self._state.random_at_epoch_start or {}).get("base")
        if length is None or base is None or self._state.timestamp.batch_in_epoch == 0:
            return length
        batches, samples = base
        size, total = _batch_size(loader) or 1, _samples_in(loader)
        if total is None:
            return int(batches) + length - int(samples) // size
        rest = max(0, total - int(samples))
        return int(batches) + (rest // size if loader.drop_last else -(-rest // size))

    def begin(self, of_ranks: Sequence[Mapping[str, Any] | None]) -> None:
        """Goes to the position of training, and restores the random state of a checkpoint.

        Args:
            of_ranks: the results of `data_state` on each rank; empty if training begins, or continues in this
                process.

        Raises:
            CheckpointError: the epoch cannot continue at its sample.
        """
        state, loader = self._state, self._state.train_dataloader
        done = int(state.timestamp.batch_in_epoch)
        self._iterator = None
        self._announce()
        saved = of_ranks[state.rank] if state.rank < len(of_ranks) else None
        if not of_ranks and done == 0:
            return
        held = state.parts.find().generators
        now = data_state(state, held) if saved is None else saved
        self._is_shifted = False
        skip: tuple[int, int | None] = (0, None)
        if done > 0:
            skip = self._find_place(done, of_ranks)
        start = state.random_at_epoch_start
        self._begin_workers(start or {}, now)
        if done > 0:
            self._iterator = self._reopened(skip, start, now)
        elif not self._is_at_iterator():
            self._load_at_end_of_epoch(start or {}, now)
        missing = restore_random_state(now, loader)
        for evaluator in state.evaluators:
            own = now["evaluators"].get(evaluator.label, {}).get("generators", {})
            missing += restore_generators(own, generators_in(evaluator.dataloader))
        missing += restore_generators(now["held"], held)
        if missing:
            _log.warning(
                "The checkpoint has states of random number generators that no longer exist: %s. "
                "Their random numbers differ from the uninterrupted run.",
                ", ".join(missing),
            )
        if done > 0 and _is_data_loader(loader) and not _is_at_dataset(loader):
            _load_parts(loader, now, only="dataset")

    def _find_place(self, done: int, of_ranks: Sequence[Mapping[str, Any] | None]) -> tuple[int, int | None]:
        """Returns how many batches, and samples if known, this rank skips.

        With another batch size, or another number of ranks, the epoch continues at the same sample of the
        global order.

        Raises:
            CheckpointError: no batch begins at that sample.
        """
        state, loader = self._state, self._state.train_dataloader
        saved = next((one for one in (*of_ranks[state.rank : state.rank + 1], *of_ranks) if one), {})
        place = saved["place"] if of_ranks else _place(state)
        size, ranks, start = (
            _batch_size(loader),
            len(of_ranks) or state.world_size,
            state.random_at_epoch_start,
        )
        before, samples = place["batch_size"], place["samples"]
        is_same = before == size and ranks == state.world_size
        if is_same and "base" not in (start or {}):
            now = _order(loader)
            if (was := {name: place.get(name, value) for name, value in now.items()}) != now:
                _log.warning(
                    "train_dataloader had %s batches in an epoch (%s) when the checkpoint was saved, and now "
                    "has %s (%s): this epoch may repeat or omit samples.",
                    *was.values(),
                    *now.values(),
                )
            return done, samples
        if ranks != state.world_size:
            if not (place["is_distributed"] and _is_distributed(loader)):
                _log.warning(
                    "Each rank reads other samples for the rest of this epoch: only a DistributedSampler "
                    "has the same order for any number of ranks.",
                )
                return done, None
            samples = samples if place["is_end"] else samples * ranks / state.world_size
            samples = _samples_in(loader) if place["is_end"] else samples
        if size is None or samples is None or samples != int(samples) or not self._can_begin_at(int(samples)):
            raise CheckpointError(
                f"train_dataloader must begin at the sample where the checkpoint is, after {done} batches of "
                f"{before} on each of {ranks} ranks; it cannot with batches of {size} on {state.world_size}. "
                "Use the same batch size and number of ranks until the epoch ends, or a size that divides."
            )
        start = start or {**random_state_of(loader), "parts": {}, "workers": None, "is_exhausted": False}
        state.random_at_epoch_start = {**start, "base": [done, int(samples)]}
        self._is_shifted = True
        return int(samples) // size, int(samples)

    def _can_begin_at(self, samples: int) -> bool:
        """Returns whether the loader can begin after this number of samples."""
        loader = self._state.train_dataloader
        if _can_skip_by_index(loader):
            return type(loader.batch_sampler) is BatchSampler
        if _is_at_dataset(loader) and _is_stateful(loader.dataset) and self._skip_by != "reading":
            return True
        is_by_workers = getattr(loader, "num_workers", 0) > 0
        return samples % loader.batch_size == 0 and not (_is_stateful(loader) or is_by_workers)

    def epoch(self) -> Iterator[Any]:
        """Yields the remaining batches of an epoch, with the events around reading."""
        state = self._state
        # If the resumed epoch was at its end, this is the next one.
        iterator = None if state.timestamp.batch_in_epoch == 0 else self._iterator
        self._iterator = None
        may_be_at_end = iterator is None and self._may_be_at_end
        is_at_dataset = _is_at_dataset(state.train_dataloader)
        while True:
            self._engine.run_event(Event.BEFORE_DATALOADER)
            if iterator is None:
                iterator = self._started()
            batch = next(iterator, _NO_BATCH)
            if batch is _NO_BATCH and may_be_at_end and state.random_at_epoch_start is not None:
                # The loaded state was the end of an epoch.
                restore_random_state(state.random_at_epoch_start, state.train_dataloader)
                iterator = iter(state.train_dataloader)
                batch = next(iterator, _NO_BATCH)
            may_be_at_end = self._may_be_at_end = False
            if batch is _NO_BATCH:
                if state.random_at_epoch_start is not None:
                    state.random_at_epoch_start["is_exhausted"] = True
                return
            state.batch = batch
            if is_at_dataset and state.random_at_epoch_start is not None and _has_read_all(iterator):
                # This is the last batch, and the dataset may already be at its next epoch.
                state.random_at_epoch_start["is_exhausted"] = True
            self._engine.run_event(Event.AFTER_DATALOADER)
            yield state.batch

    def _started(self) -> Iterator[Any]:
        """Begins an epoch, after recording its random state."""
        state, loader = self._state, self._state.train_dataloader
        self._begun = loader
        _set_epoch(loader, int(state.timestamp.epoch))
        workers = (state.random_at_epoch_start or {}).get("workers")
        start = random_state_of(loader)
        if workers is None and _has_persistent_workers(loader):
            workers = (
                {"epoch": -1, "random": None}
                if _has_workers(loader)
                else {"epoch": state.timestamp.epoch.value, "random": start}
            )
        state.random_at_epoch_start = {
            **start,
            # A stateful loader only gives its current state.
            "parts": _part_states(loader) if self._is_saved and not _is_stateful(loader) else {},
            "workers": workers,
            "is_exhausted": False,
        }
        return iter(loader)

    def _begin_workers(self, start: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Starts persistent workers, so that the resumed epoch does not draw their seed."""
        state, loader = self._state, self._state.train_dataloader
        for evaluator in state.evaluators:
            had = saved["evaluators"].get(evaluator.label, {}).get("has_workers")
            one = evaluator.dataloader
            if had and _has_persistent_workers(one) and not _has_workers(one):
                iter(one)
        self._indices = None
        if not _has_persistent_workers(loader):
            return
        # Their seed is drawn again if a script has already read a batch.
        loader._iterator = None  # noqa: SLF001
        begun = start.get("workers") or {"epoch": 0, "random": None}
        epoch, done = state.timestamp.epoch.value, int(state.timestamp.batch_in_epoch)
        if begun["epoch"] < epoch or (done == 0 and epoch > 0):
            if begun["random"] is not None:
                restore_random_state(begun["random"], loader)
            self._indices = _Indices(loader)
            self._indices.iterate(0)

    def _is_at_iterator(self) -> bool:
        """Skips everything that was read from an iterator; returns False for a loader that can start over."""
        loader = self._state.train_dataloader
        if not hasattr(loader, "__next__") or _is_stateful(loader):
            return False
        if self._begun is not loader:
            self._begun = loader
            _pass_over(loader, int(self._state.timestamp.batch))
        return True

    def _load_at_end_of_epoch(self, start: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        loader = self._state.train_dataloader
        self._may_be_at_end = _load_parts(loader, now)
        if self._may_be_at_end and _is_stateful(loader):
            # torchdata's loader seeks here; its random numbers do not count.
            loader.state_dict()
            if not start.get("is_exhausted", True):
                iter(loader)

    def _reopened(
        self, skip: tuple[int, int | None], start: Mapping[str, Any] | None, now: Mapping[str, Any]
    ) -> Iterator[Any]:
        """Returns an iterator over the epoch that has skipped the batches already trained on."""
        state, loader = self._state, self._state.train_dataloader
        done = skip[0]
        if self._is_at_iterator():
            return iter(loader)
        _set_epoch(loader, int(state.timestamp.epoch))
        has_now = bool(now.get("parts"))
        if _is_stateful(loader) and has_now:
            self._restore_start(start)
            _load_parts(loader, now)
            loader.state_dict()
            iterator: Iterator[Any] = iter(loader)
            length = (
                None if isinstance(getattr(loader, "dataset", None), IterableDataset) else length_of(loader)
            )
            if length is not None and done >= length and _pass_over(iterator, 1):
                # This epoch was at its end, and the loader has begun the next.
                _load_parts(loader, now)
                return iter(())
            return iterator
        _load_parts(loader, start or {})
        if _is_at_dataset(loader) and "dataset" in now.get("parts", {}) and self._skip_by != "reading":
            _load_parts(loader, now, only="dataset")
            self._restore_start(start)
            return iter(()) if (start or {}).get("is_exhausted") else iter(loader)
        self._restore_start(start)
        iterator, found = self._skipped(*skip)
        if found == 0:
            # The sampler's loaded state was the end of an epoch.
            self._restore_start(start)
            iterator, found = self._skipped(*skip)
        if found < done:
            _log.warning(
                "train_dataloader has %d batches in this epoch, but the checkpoint had already seen %d.",
                found,
                done,
            )
        return iterator

    def _restore_start(self, start: Mapping[str, Any] | None) -> None:
        if start is not None:
            restore_random_state(start, self._state.train_dataloader)

    def _skipped(self, done: int, samples: int | None) -> tuple[Iterator[Any], int]:
        """Returns an iterator after the skipped batches, and their number."""
        loader = self._state.train_dataloader
        if _can_skip_by_index(loader) and (
            self._skip_by == "index"
            or self._is_shifted
            or (self._skip_by == "auto" and (self._indices is not None or _draws_alike(loader)))
        ):
            return (_Indices(loader) if self._indices is None else self._indices).iterate(done, samples)
        if _can_skip_by_index(loader) and self._skip_by == "auto" and self._state.rank == 0:
            _log.warning(
                "%d batches of this epoch are read again and thrown away, because random numbers may be "
                "drawn for their samples. skip_by='index' skips them without reading.",
                done,
            )
        iterator: Iterator[Any] = iter(loader)
        return iterator, _pass_over(iterator, done)


class _Indices:
    """Replaces the index sampler of a `DataLoader` in the iterators that `iterate` makes.

    Args:
        loader: the loader, which keeps its own sampler.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._sampler = getattr(loader, self._name)
        self._skip: tuple[int, int | None] = (0, None)
        self._latest: _LaterIndices | None = None

    def iterate(self, skip: int, samples: int | None = None) -> tuple[Iterator[Any], int]:
        """Returns an iterator positioned after `skip` batches without reading them, and the number skipped.

        Persistent workers have used this sampler since they were started.

        Args:
            skip: how many batches to skip.
            samples: the number of samples in them, if known.
        """
        attributes = vars(self._loader)
        attributes[self._name], self._skip = self, (skip, samples)
        try:
            iterator: Iterator[Any] = iter(self._loader)
        finally:
            attributes[self._name], self._skip = self._sampler, (0, None)
        latest, self._latest = self._latest, None
        if latest is None:
            return iterator, 0
        _ = latest.rest  # Skips now, if no batch was requested yet.
        return iterator, latest.found

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        if not any(self._skip):
            return iter(self._sampler)
        self._latest = _LaterIndices(self._sampler, *self._skip)
        return self._latest


class _LaterIndices:
    """Iterates over a sampler, after skipping batches; `found` is how many there were."""

    def __init__(self, sampler: Any, skip: int, samples: int | None) -> None:
        self._sampler = sampler
        self._skip = skip
        self._samples = samples
        self.found = 0
        # torch's is a generator, which makes the iterator of its sampler at the first request.
        self._iterator: Iterator[Any] | None = None if type(sampler) is BatchSampler else iter(sampler)

    @functools.cached_property
    def rest(self) -> Iterator[Any]:
        """What comes after; first used when a batch is requested: a loader draws a seed before that."""
        if self._iterator is not None:
            self.found = _pass_over(self._iterator, self._skip)
            return self._iterator
        # Skipping samples is twice as fast as skipping batches.
        samples, size = iter(self._sampler.sampler), self._sampler.batch_size
        count = self._skip * size if self._samples is None else self._samples
        passed = _pass_over(samples, count)
        self.found = self._skip if passed == count else -(-passed // size)
        return iter(BatchSampler(samples, size, self._sampler.drop_last))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.rest)


def _pass_over(iterator: Iterator[Any], count: int) -> int:
    """Takes up to `count` items from an iterator; returns their number."""
    counter = itertools.count()
    deque(zip(itertools.islice(iterator, count), counter, strict=False), maxlen=0)
    return next(counter)


def _is_data_loader(loader: Any) -> bool:
    """Returns whether a loader is read like torch's `DataLoader`, which has no state."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not _is_stateful(loader)
    )


def _is_stateful(value: Any) -> bool:
    # Accelerate's loaders have both methods, but the loader inside may not.
    inside = getattr(value, "base_dataloader", value)
    return all(callable(getattr(inside, name, None)) for name in ("state_dict", "load_state_dict"))


def _is_at_dataset(loader: Any) -> bool:
    """Returns whether the position is in the dataset, in this process."""
    return _is_data_loader(loader) and isinstance(loader.dataset, IterableDataset) and loader.num_workers == 0


def _has_read_all(iterator: Any) -> bool:
    """Returns whether an iterator of a `DataLoader` has reached the end of an iterable dataset."""
    # Only a smaller last batch shows that; torchdata checks the same.
    return bool(getattr(getattr(iterator, "_dataset_fetcher", None), "ended", False))


def _has_persistent_workers(loader: Any) -> bool:
    return _is_data_loader(loader) and loader.persistent_workers and loader.num_workers > 0


def _has_workers(loader: Any) -> bool:
    return _has_persistent_workers(loader) and loader._iterator is not None  # noqa: SLF001


def _set_epoch(loader: Any, epoch: int) -> None:
    """Calls `set_epoch` on samplers, dataset and loader, if they have it."""
    for one in (*samplers_of(loader).values(), getattr(loader, "dataset", None), loader):
        if callable(getattr(one, "set_epoch", None)):
            one.set_epoch(epoch)


def _stateful_parts(loader: Any) -> dict[str, Any]:
    if _is_stateful(loader):
        return {"loader": loader}
    parts = {**samplers_of(loader), "dataset": getattr(loader, "dataset", None)}
    return {name: one for name, one in parts.items() if _is_stateful(one)}


def _part_states(loader: Any) -> dict[str, Any]:
    # They change as it is read.
    return {name: copy.deepcopy(one.state_dict()) for name, one in _stateful_parts(loader).items()}


def _load_parts(loader: Any, saved: Mapping[str, Any], *, only: str | None = None) -> bool:
    """Loads the result of `_part_states`; returns whether there was anything to load.

    Raises:
        CheckpointError: a part does not accept its state.
    """
    states = saved.get("parts", {})
    found = {
        name: one
        for name, one in _stateful_parts(loader).items()
        if name in states and (only is None or name == only)
    }
    for name, one in found.items():
        try:
            one.load_state_dict(states[name])
        except (AttributeError, KeyError, RuntimeError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"checkpoint must fit the {name} of train_dataloader, got: {error}"
            ) from error
    return bool(found)


def _can_skip_by_index(loader: Any) -> bool:
    return (
        _is_data_loader(loader)
        and not isinstance(loader.dataset, IterableDataset)
        and {"sampler", "batch_sampler"} <= vars(loader).keys()
    )


def _draws_alike(loader: Any) -> bool:
    """Returns whether skipping batches leaves all generators in the same state as reading them.

    In this process, generators are restored after skipping, so only a generator that sampler and dataset
    share would differ while the sampler is skipped. Generators in worker processes are invisible, so their
    code must be known.
    """
    if loader.num_workers > 0:
        return _draws_nothing(loader)
    dataset = reach({"dataset": loader.dataset, "collate_fn": loader.collate_fn}).generators
    order = reach(samplers_of(loader), {id(loader.dataset)}).generators
    return not {id(one) for one in dataset.values()} & {id(one) for one in order.values()}


def _draws_nothing(loader: Any) -> bool:
    """Returns whether dataset and collate function are torch's own, which draw no random numbers."""
    waiting, seen = [loader.dataset], 0
    while waiting:
        dataset = waiting.pop()
        seen += 1
        kind = type(dataset)
        if kind is Subset:
            waiting.append(dataset.dataset)
        elif kind is ConcatDataset:
            waiting.extend(dataset.datasets)
        elif kind is StackDataset:
            waiting.extend(
                dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
            )
        elif kind not in {TensorDataset, torch.Tensor, np.ndarray, range, list, tuple} or seen > _OBJECTS:
            return False
    return loader.collate_fn in {default_collate, default_convert}


def _not_promised(loader: Any, skip_by: SkipBy, *, is_limited: bool) -> list[str]:
    """Returns the reasons why a resumed run may read other samples."""
    name = type(loader).__name__
    reasons: list[str] = []
    if is_limited and (parts := [one for one in _stateful_parts(loader) if one != "loader"]):
        reasons.append(
            f"train_subset_num_batches ends an epoch where the {' and '.join(parts)} may want to continue"
        )
    if isinstance(loader, list | tuple):
        return reasons
    if _is_stateful(loader):
        if length_of(loader) is None:
            reasons.append(f"the {name} has no length, and may start over after the last batch of an epoch")
        return reasons
    if not _is_data_loader(loader):
        what = "is an iterator" if hasattr(loader, "__next__") else "has no state_dict"
        return [*reasons, f"the {name} {what}, and is read again from its beginning"]
    dataset = type(loader.dataset).__name__
    if isinstance(loader.dataset, IterableDataset) and not (
        _is_at_dataset(loader) and _is_stateful(loader.dataset)
    ):
        why = "is iterated by workers" if loader.num_workers > 0 else "has no state_dict"
        reasons.append(f"the IterableDataset {dataset} {why}, and is read again from its beginning")
    reasons += [
        f"the {place} {type(one).__name__} has neither state_dict nor set_epoch, so only its "
        "generators are saved"
        for place, one in samplers_of(loader).items()
        if not _is_known_sampler(one)
    ]
    if loader.num_workers > 0:
        reasons += _not_promised_of_workers(loader, skip_by)
    if not reach(parts_of(loader)).is_whole:
        reasons.append("the loader holds too many objects to search all for random number generators")
    return reasons


def _is_known_sampler(sampler: Any) -> bool:
    kind = type(sampler)
    return (
        kind.__module__.startswith("torch.")
        or _is_stateful(sampler)
        or callable(getattr(sampler, "set_epoch", None))
    )


def _not_promised_of_workers(loader: Any, skip_by: SkipBy) -> list[str]:
    """Returns the reasons that lie in worker processes."""
    drawn = f"random numbers that workers draw for {type(loader.dataset).__name__}"
    reasons: list[str] = []
    if not getattr(loader, "in_order", True):
        reasons.append("in_order=False gives batches in the order in which workers read them")
    if loader.persistent_workers and not _draws_nothing(loader):
        reasons.append(f"persistent_workers=True: {drawn} from the second epoch on")
    if skip_by == "index" and not _draws_nothing(loader):
        reasons.append(f"skip_by='index': {drawn}")
    return reasons
