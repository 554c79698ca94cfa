"""Traces, in `traces.jsonl`: values of any kind, as JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from .kind import Kind, Work
from .line import Line

__all__ = ["TRACES", "Trace"]


@attrs.frozen
class Trace:
    """The traces of one call of `log_traces`."""

    step: int | None
    time: float | None
    traces: Mapping[str, Any]


def _write(_name: None, *, traces: Mapping[str, Any]) -> tuple[int, Work]:
    copied = dict(traces)
    return 0, lambda output: output.add_line({"traces": copied})


def _parse(line: Line) -> Trace:
    return Trace(line.step, line.time, dict(line.fields["traces"]))


def _replay(lines: Sequence[Line]) -> dict[str, Any]:
    (line,) = lines
    return {"traces": dict(line.fields.get("traces") or {})}


TRACES = Kind(
    name="traces",
    index="traces.jsonl",
    write=_write,
    parse=_parse,
    replay=_replay,
    plural="traces",
    noun="trace",
    shows="pairs",
    is_single=True,
)
