"""Which checkpoints of a run are kept: the newest, the best by a metric, and every n-th forever."""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

from events.state import State

if TYPE_CHECKING:
    from events.timestamp import Timestamp

__all__ = ["Kept", "KeptCheckpoints", "Retention", "SavedCheckpoint", "rules_of", "values_of_now"]

_log = logging.getLogger("events")

_REMEMBERED = 16
# The parts of `Kept` by their names in a checkpoint.
_PARTS = {"saved": "local", "stored": "stored", "removed": "removed", "deleted": "deleted"}
_is_a = attrs.validators.instance_of


@attrs.frozen
class SavedCheckpoint:
    """A checkpoint that was saved.

    Attributes:
        path: its local path.
        remote_name: its name in the destinations, or "" where it is not known.
        number: how many were saved before it, plus one.
        batch: the batches that were trained before it: an evaluation at that batch is one of its weights.
        metric: the value of the metric that decides which is best; None where its weights were not evaluated.
        shards: how many ranks have written it; 0 where it is a single file.
        identifier: the unique identifier in its summary; "" if unknown.
    """

    path: str = attrs.field(validator=_is_a(str))
    remote_name: str = attrs.field(default="", validator=_is_a(str))
    number: int = attrs.field(default=0, validator=_is_a(int))
    batch: int = attrs.field(default=0, validator=_is_a(int))
    metric: float | None = attrs.field(default=None, validator=attrs.validators.optional(_is_a((int, float))))
    shards: int = attrs.field(default=0, validator=_is_a(int))
    identifier: str = attrs.field(default="", validator=_is_a(str))

    @property
    def name(self) -> str:
        """Its name in the folder: the file, or the manifest."""
        return "/".join(Path(self.path).parts[-2 if self.shards else -1 :])

    @classmethod
    def from_state(cls, state: Any) -> "SavedCheckpoint":
        """Returns the checkpoint for the result of `attrs.asdict`; ignores unknown entries.

        Raises:
            TypeError: a value is of another type.
        """
        return cls(**{one.name: state[one.name] for one in attrs.fields(cls) if one.name in state})


@attrs.frozen
class Retention:
    """A rule that keeps checkpoints: one stays if any part of the rule keeps it.

    ```python
    saver = CheckpointSaver("checkpoints", keep=Retention(3, best="metrics/eval/accuracy", every=10))
    ```

    Args:
        newest: how many of the newest; None for all.
        best: the name of a metric or loss of the evaluation, such as "metrics/eval/accuracy" or
            "loss/eval/total", whose best checkpoints stay too; of equal ones the older. Only a checkpoint of
            the evaluated batch has a value, and NaN is never best.
        best_mode: whether the best has the largest value ("max") or the smallest ("min").
        best_count: how many of the best.
        every: every n-th stays forever; None for none.

    Raises:
        ValueError: a number is less than one, the mode is neither, or `best` is not of an evaluation.
    """

    newest: int | None = None
    best: str | None = attrs.field(default=None, kw_only=True)
    best_mode: Literal["max", "min"] = attrs.field(default="max", kw_only=True)
    best_count: int = attrs.field(default=1, kw_only=True)
    every: int | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        numbers = {"newest": self.newest, "best_count": self.best_count, "every": self.every}
        for name, value in numbers.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if self.best is not None and not re.fullmatch(r"(metrics|loss)/[^/]+/.+", self.best):
            raise ValueError(
                f'best must be a metric of an evaluation, got {self.best!r}. Write "metrics/eval/accuracy".'
            )
        if self.best_mode not in {"max", "min"}:
            raise ValueError(f"best_mode must be 'max' or 'min', got {self.best_mode!r}.")

    def surplus(self, saved: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
        """Returns the checkpoints that no part of the rule keeps, oldest first.

        Args:
            saved: the checkpoints, oldest first.
        """
        if self.newest is None:
            return []
        kept = {one.path for one in saved[-self.newest :]}
        kept |= {one.path for one in self.ranked(saved)[: self.best_count]}
        if self.every is not None:
            kept |= {one.path for one in saved if one.number % self.every == 0}
        return [one for one in saved if one.path not in kept]

    def ranked(self, saved: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
        """Returns the checkpoints with the metric, best first and equal ones older first, without NaN."""
        if self.best is None:
            return []
        sign = -1 if self.best_mode == "max" else 1
        known = [one for one in saved if one.metric is not None and not math.isnan(one.metric)]
        return sorted(known, key=lambda one: (sign * (one.metric or 0.0), one.number))


def _rule_of(name: str, given: int | Retention | None) -> Retention:
    if isinstance(given, Retention):
        return given
    if given is not None and given < 1:
        raise ValueError(f"{name} must be at least 1, got {given}. Write None to keep all.")
    return Retention(given)


def rules_of(
    here: int | Retention | None, in_store: int | Retention | None, newest: int | None
) -> tuple[Retention, Retention]:
    """Returns the rules for this machine and for the store.

    Args:
        here: the rule for this machine, or how many of the newest to keep.
        in_store: the same for the store; without a metric of its own, it uses the other rule's.
        newest: how many of the newest to keep on this machine by default.

    Raises:
        ValueError: a number is less than one, or the rules name different metrics.
    """
    local, stored = _rule_of("keep", here), _rule_of("keep_in_store", in_store)
    if local.newest is None:
        local = attrs.evolve(local, newest=newest)
    if stored.best is None:
        stored = attrs.evolve(stored, best=local.best, best_mode=local.best_mode, best_count=local.best_count)
    if stored.best != local.best:
        raise ValueError(
            f"keep_in_store must have the best of keep, {local.best!r}, or none, got {stored.best!r}."
        )
    return local, stored


@attrs.frozen
class Kept:
    """The kept checkpoints of a run, oldest first.

    Attributes:
        local: kept on this machine.
        stored: kept where they are uploaded; empty if nothing is ever deleted there.
        removed: the last ones that were removed from this machine. A killed process may not have finished,
            so removal is repeated after the next save, or at the end of a session that saves nothing.
        deleted: the last ones that were deleted where they are uploaded; repeated in the same way.
    """

    local: tuple[SavedCheckpoint, ...] = ()
    stored: tuple[SavedCheckpoint, ...] = ()
    removed: tuple[SavedCheckpoint, ...] = ()
    deleted: tuple[SavedCheckpoint, ...] = ()


def _apply(
    rule: Retention,
    kept: tuple[SavedCheckpoint, ...],
    gone: tuple[SavedCheckpoint, ...],
    new: SavedCheckpoint,
) -> tuple[tuple[SavedCheckpoint, ...], tuple[SavedCheckpoint, ...]]:
    everything = [*(one for one in kept if one.path != new.path), new]
    surplus = rule.surplus(everything)
    left = tuple(one for one in everything if one not in surplus)
    names = {one.remote_name for one in left} | {one.path for one in left}
    again = [one for one in gone if one.path not in names and one.remote_name not in names]
    return left, (*again, *surplus)


class KeptCheckpoints:
    """The checkpoints that a run keeps, by one rule for this machine and one for the store.

    Attributes:
        here: the rule for this machine.
        in_store: the rule for the store.
        now: the kept checkpoints, and the last removed ones.
        saved_at: when the newest was saved, even if it is still being written; None if it failed.
        is_resumed: whether the run resumed from a checkpoint.
        has_repeated: whether the unfinished work of a killed session has been repeated; this happens once.
    """

    def __init__(self, here: Retention, in_store: Retention) -> None:
        self.here = here
        self.in_store = in_store
        self.now = Kept()
        self.saved_at: Timestamp | None = None
        self.is_resumed = False
        self.has_repeated = False
        # The kept checkpoints before the newest was added.
        self._before = Kept()
        self._number = 0
        self._has_metric = False

    def add(self, new: SavedCheckpoint, state: State) -> None:
        """Adds a checkpoint saved now, and applies the rules.

        Args:
            new: the checkpoint, without its number, batch and metric.
            state: the run.
        """
        self._number += 1
        metric = values_of_now(state).get(self.here.best or "")
        new = attrs.evolve(new, number=self._number, batch=int(state.timestamp.batch), metric=metric)
        before = self._before = self.now
        local, removed = _apply(self.here, before.local, before.removed, new)
        stored, deleted = _apply(self.in_store, before.stored, before.deleted, new)
        self.now = Kept(local, () if self.in_store.newest is None else stored, removed, deleted)
        self._has_metric |= metric is not None
        if state.eval_values and self.here.best not in state.eval_values:
            self.look_for_metric(state)

    def drop(self) -> None:
        """Takes back the newest checkpoint, which could not be saved."""
        self.now = self._before
        self.saved_at = None

    def has_saved(self, path: Path) -> bool:
        """Returns whether the newest checkpoint replaces one of the same name."""
        return any(one.path == str(path) for one in self._before.local)

    def gone(self) -> tuple[list[SavedCheckpoint], list[SavedCheckpoint]]:
        """Returns what the newest save removes here and in the store; the first one includes leftovers."""
        before, now = self._before if self.has_repeated else Kept(), self.now
        return (
            [one for one in now.removed if one not in before.removed],
            [one for one in now.deleted if one not in before.deleted],
        )

    def outdated(self) -> list[SavedCheckpoint]:
        """Returns the checkpoints that, since the newest save, only a rule for the newest keeps.

        The first call also returns those from earlier saves.
        """
        rule, part = (self.here, "local") if self.in_store.newest is None else (self.in_store, "stored")
        rule = attrs.evolve(rule, newest=1)
        older = getattr(self._before, part)
        known = rule.surplus(older) if self.has_repeated else []
        return [one for one in rule.surplus((*older, *getattr(self.now, part)[-1:])) if one not in known]

    def trim(self) -> None:
        """Forgets removed checkpoints but the last; the leftovers of earlier sessions are removed by now."""
        now = self.now
        self.now = attrs.evolve(now, removed=now.removed[-_REMEMBERED:], deleted=now.deleted[-_REMEMBERED:])

    def forget_stored(self, path: str) -> None:
        """Forgets a checkpoint that is incomplete in the store, so that its files stay there."""
        stored, deleted = (
            tuple(one for one in part if one.path != path) for part in (self.now.stored, self.now.deleted)
        )
        self.now = attrs.evolve(self.now, stored=stored, deleted=deleted)

    def evaluated(self, state: State) -> None:
        """Records the metric of a checkpoint that was saved before its evaluation."""
        metric, batch = values_of_now(state).get(self.here.best or ""), int(state.timestamp.batch)
        if metric is not None:
            local, stored = (
                (*part[:-1], attrs.evolve(part[-1], metric=metric))
                if part and part[-1].batch == batch
                else part
                for part in (self.now.local, self.now.stored)
            )
            self.now = attrs.evolve(self.now, local=local, stored=stored)

    def look_for_metric(self, state: State) -> None:
        """Warns once if no checkpoint has the metric that selects the best."""
        best_by = self.here.best
        self._has_metric |= any(one.metric is not None for one in self.now.local)
        if best_by is not None and not self._has_metric and state.rank == 0:
            self._has_metric = True
            known = ", ".join(state.eval_values) or "none, because there was no evaluation"
            _log.warning("best=%r has no value. The last evaluation has %s.", best_by, known)

    def state_dict(self) -> dict[str, Any]:
        """Returns the kept checkpoints, so that the rules work across sessions."""
        parts = {saved: getattr(self.now, part) for saved, part in _PARTS.items()}
        return {
            **{saved: [attrs.asdict(one) for one in part] for saved, part in parts.items()},
            "number": self._number,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        parts = {
            part: tuple(map(SavedCheckpoint.from_state, state.get(saved, ())))
            for saved, part in _PARTS.items()
        }
        self.now = Kept(**parts)
        self._number = int(state.get("number", len(self.now.local)))


def values_of_now(state: State) -> dict[str, float]:
    """Returns the evaluation results of the current weights."""
    batch = int(state.timestamp.batch)
    return {name: value for name, value in state.eval_values.items() if state.eval_batches.get(name) == batch}
