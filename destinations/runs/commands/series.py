"""`series`: the values of a metric."""

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

    (run,) = find_runs([options.run_name], options, session)
    found = run.series(options.metric, options.rank)

    def rows() -> Iterator[dict[str, Any]]:
        writers = itertools.repeat(None) if found.writer is None else found.writer.tolist()
        for step, time, value, writer in zip(
            found.step.tolist(), found.time.tolist(), found.value.tolist(), writers, strict=False
        ):
            row = {
                "step": None if step == MISSING_STEP else step,
                "time": None if math.isnan(time) else time,
                "value": value,
            }
            yield row if writer is None else {**row, "writer": writer}

    values = itertools.islice(rows(), options.limit)
    if options.json:
        session.screen.json({"run_id": run.run_id, "metric": options.metric, "values": list(values)})
        return
    for row in values:
        whose = f" · {row['writer']}" if row.get("writer") else ""
        step = session.screen.styled(f"step {value_text(row['step'])}{whose}", "dim")
        session.screen.line(f"{step}  {row['value']!r}")
