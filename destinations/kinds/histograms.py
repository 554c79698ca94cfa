"""Histograms: counts and edges in `histograms.jsonl`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from .kind import Kind, RecordOutput, Work
from .line import Line, number_of
from .media import copy_array

if TYPE_CHECKING:
    import numpy as np

__all__ = ["HISTOGRAM", "Histogram"]

_MAX_NAN_VALUES = 1000
_MOMENTS = ("count", "non_finite", "min", "max", "mean", "std", "sum")


@attrs.frozen(eq=False)
class Histogram:
    """The distribution of values at a step.

    Attributes:
        name: the name as logged.
        step: the step of the call.
        time: the time of the call, in seconds since 1970.
        counts: int64 `(bins,)`.
        edges: float64 `(bins + 1,)`.
        moments: `count`, `non_finite`, and `min`, `max`, `mean`, `std`, `sum` of the finite values, as far as
            the run has them.
    """

    name: str
    step: int | None
    time: float | None
    counts: "np.ndarray[Any, np.dtype[np.int64]]"
    edges: "np.ndarray[Any, np.dtype[np.float64]]"
    moments: Mapping[str, float | None]


def _copied(values: Any) -> Any:
    """Returns a copy of values as an array; `BinnedValues` need no copy."""
    from events import BinnedValues

    return values if isinstance(values, BinnedValues) else copy_array(values)


def _write(name: str, *, values: Any, bins: "int | Sequence[float]") -> tuple[int, Work]:
    from destinations.media import histogram_record
    from events import RecordError

    values = _copied(values)
    if getattr(values, "dtype", None) is not None and values.dtype.kind not in "biuf":
        raise RecordError(f"histogram {name!r} needs numbers, got dtype {values.dtype}.")

    def work(output: RecordOutput) -> None:
        output.add_line(histogram_record(values, bins))

    return getattr(values, "nbytes", 0), work


def _parse(line: Line) -> Histogram:
    import numpy as np

    fields = line.fields
    return Histogram(
        **line.call(),
        counts=np.array(fields["counts"], np.int64).reshape(-1),
        edges=np.array([number_of(edge) for edge in fields["edges"]], np.float64).reshape(-1),
        moments={moment: number_of(fields[moment]) for moment in _MOMENTS if moment in fields},
    )


def _replay(lines: Sequence[Line]) -> dict[str, Any]:
    (line,) = lines
    return {"values": _values_of(line.fields)}


def _values_of(fields: dict[str, Any]) -> Any:
    """Returns a histogram as `BinnedValues`, or as an array of NaN if it has no finite values."""
    from events import BinnedValues

    if not fields.get("counts"):
        import numpy as np

        count = int(fields.get("non_finite") or fields.get("count") or 0)
        return np.full(min(count, _MAX_NAN_VALUES), np.nan)
    return BinnedValues(
        fields["counts"],
        fields["edges"],
        count=fields.get("count"),
        non_finite=int(fields.get("non_finite") or 0),
        **{name: fields.get(name) for name in ("min", "max", "mean", "std")},
    )


HISTOGRAM = Kind(
    name="histogram",
    index="histograms.jsonl",
    write=_write,
    parse=_parse,
    replay=_replay,
    copies={"values": _copied},
    shows="histogram",
)
