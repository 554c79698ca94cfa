"""`series`: the values of a metric, or only values that meet a condition."""

import argparse
import itertools
import math
from collections.abc import Iterator
from typing import Any

from .running import find_runs
from .screen import CommandContext, value_text

__all__ = ["series"]


def series(options: argparse.Namespace, session: CommandContext) -> None:
    """Prints the values of a metric of a run, oldest first."""
    from destinations.run_directory.blocks import MISSING_STEP
    from destinations.runs.content.where import Where, values_where

    (run,) = find_runs([options.run_name], options, session)
    where = Where.parse(options.where) if options.where else Where()

    def found() -> Iterator[dict[str, Any]]:
        for one in values_where(run.path, options.metric, where, options.rank, run.end):
            writers = [None] * len(one) if one.writer is None else one.writer.tolist()
            rows = zip(one.step.tolist(), one.time.tolist(), one.value.tolist(), writers, strict=True)
            for step, time, value, writer in rows:
                row = {
                    "step": None if step == MISSING_STEP else step,
                    "time": None if math.isnan(time) else time,
                    "value": value,
                }
                yield row if writer is None else {**row, "writer": writer}

    values = itertools.islice(found(), options.limit)
    if options.json:
        session.screen.json({"run_id": run.run_id, "metric": options.metric, "values": list(values)})
        return
    for row in values:
        whose = f" · {row['writer']}" if row.get("writer") else ""
        step = session.screen.styled(f"step {value_text(row['step'])}{whose}", "dim")
        session.screen.line(f"{step}  {row['value']!r}")
