"""Which checkpoints of a run are kept: the newest, the best by a metric, and every n-th for ever."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

__all__ = ["Kept", "Retention", "SavedCheckpoint"]

_REMEMBERED = 16
_is_a = attrs.validators.instance_of


@attrs.frozen
class SavedCheckpoint:
    """A checkpoint that was saved.

    Attributes:
        path: its local path.
        remote_name: its name in the destinations, or "" where it is not known.
        number: how many were saved before it, plus one.
        batch: the batches that were trained before it.
        metric: the value of the metric that decides which is best; None where its weights were not evaluated.
        shards: how many ranks have written it; 0 where it is a single file.
        identifier: what is in its summary, and in no other's; "" where it is not known.
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
        """The name in its folder of the file, or of the manifest of one in shards."""
        return "/".join(Path(self.path).parts[-2 if self.shards else -1 :])

    @classmethod
    def from_state(cls, state: Any) -> "SavedCheckpoint":
        """Returns what `attrs.asdict` made plain, or that of a bare path; unknown entries are ignored.

        Raises:
            TypeError: a value is of another type.
        """
        if not isinstance(state, Mapping):
            return cls(str(state))
        return cls(**{one.name: state[one.name] for one in attrs.fields(cls) if one.name in state})


@attrs.frozen
class Retention:
    """A rule; a checkpoint that any part of it wants stays.

    Args:
        newest: how many of the newest; None for all.
        best: how many of the best by `metric`.
        metric: the name of the metric or loss, such as "metrics/eval/accuracy"; None for none.
        mode: whether more of it is better ("max") or less ("min").
        every: each n-th stays for ever; None for none.
        suffix: the end of the arguments' names in messages.

    Raises:
        ValueError: a number is less than one, the mode is neither, or the metric is not one of an evaluation.
    """

    newest: int | None = None
    best: int = 1
    metric: str | None = None
    mode: Literal["max", "min"] = "max"
    every: int | None = None
    suffix: str = ""

    def __attrs_post_init__(self) -> None:
        for name, value in (
            ("keep", self.newest),
            ("keep_best" if self.suffix else "keep_best_count", self.best),
            ("keep_every", self.every),
        ):
            if value is not None and value < 1:
                hint = " Write None to keep all." if name == "keep" else ""
                raise ValueError(f"{name}{self.suffix} must be at least 1, got {value}.{hint}")
        if self.metric is not None and not re.fullmatch(r"(metrics|loss)/[^/]+/.+", self.metric):
            raise ValueError(
                f"keep_best must be a metric of an evaluation, got {self.metric!r}. "
                'Write "metrics/eval/accuracy".'
            )
        if self.mode not in {"max", "min"}:
            raise ValueError(f"keep_best_mode must be 'max' or 'min', got {self.mode!r}.")

    def surplus(self, saved: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
        """Returns those that no part of the rule wants, oldest first.

        Args:
            saved: oldest first.
        """
        if self.newest is None:
            return []
        kept = {one.path for one in saved[-self.newest :]}
        kept |= {one.path for one in self.ranked(saved)[: self.best]}
        if self.every is not None:
            kept |= {one.path for one in saved if one.number % self.every == 0}
        return [one for one in saved if one.path not in kept]

    def ranked(self, saved: Sequence[SavedCheckpoint]) -> list[SavedCheckpoint]:
        """Returns those that have the metric, the best first; of equal ones the older first, NaN nowhere."""
        if self.metric is None:
            return []
        sign = -1 if self.mode == "max" else 1
        known = [one for one in saved if one.metric is not None and not math.isnan(one.metric)]
        return sorted(known, key=lambda one: (sign * (one.metric or 0.0), one.number))


@attrs.frozen
class Kept:
    """The checkpoints of a run that are kept; each oldest first.

    Attributes:
        local: on this machine.
        stored: where they are uploaded; empty where nothing is ever deleted there.
        removed: those that were removed last from this machine. A process that is killed may not have done
            it: it is done again after the next save, or at the end of a session that saves nothing.
        deleted: those that were deleted last where they are uploaded; likewise.
    """

    local: tuple[SavedCheckpoint, ...] = ()
    stored: tuple[SavedCheckpoint, ...] = ()
    removed: tuple[SavedCheckpoint, ...] = ()
    deleted: tuple[SavedCheckpoint, ...] = ()

    def with_new(self, new: SavedCheckpoint, here: Retention, in_store: Retention) -> "Kept":
        """Returns what is kept with another checkpoint, by the rules for this machine and for the store."""
        local, removed = _apply(here, self.local, self.removed, new)
        stored, deleted = _apply(in_store, self.stored, self.deleted, new)
        return Kept(local, () if in_store.newest is None else stored, removed, deleted)

    def with_metric(self, path: str, metric: float) -> "Kept":
        """Returns what is kept with a checkpoint whose weights were evaluated after it was saved."""
        local, stored = (
            tuple(attrs.evolve(one, metric=metric) if one.path == path else one for one in part)
            for part in (self.local, self.stored)
        )
        return attrs.evolve(self, local=local, stored=stored)

    def trimmed(self) -> "Kept":
        """Returns what is kept with the last of what was removed and deleted: the others are gone."""
        return attrs.evolve(self, removed=self.removed[-_REMEMBERED:], deleted=self.deleted[-_REMEMBERED:])

    def without_stored(self, path: str) -> "Kept":
        """Returns what is kept without a checkpoint of which a part could not be uploaded."""
        stored, deleted = (
            tuple(one for one in part if one.path != path) for part in (self.stored, self.deleted)
        )
        return attrs.evolve(self, stored=stored, deleted=deleted)


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
