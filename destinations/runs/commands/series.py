"""`series`: the values of a metric, all or those that a condition chooses."""

import argparse
import itertools
import math
from collections.abc import Iterator

from .running import EXIT_OK, find_runs
from .screen import CommandContext, value_text

__all__ = ["series"]


def series(options: argparse.Namespace, session: CommandContext) -> int:
    """Prints the values of a metric of a run, oldest first."""
    from destinations.run_directory.blocks import MISSING_STEP
    from destinations.runs.content.where import Where, values_where

    (run,) = find_runs([options.run_name], options, session)
    where = Where.parse(options.where) if options.where else Where()

    def found() -> Iterator[tuple[int | None, float | None, float]]:
        for one in values_where(run.path, options.metric, where, options.rank):
            rows = zip(one.step.tolist(), one.time.tolist(), one.value.tolist(), strict=True)
            for step, time, value in rows:
                yield None if step == MISSING_STEP else step, None if math.isnan(time) else time, value

    values = itertools.islice(found(), options.limit)
    if options.json:
        rows = [{"step": step, "time": time, "value": value} for step, time, value in values]
        session.screen.json({"run_id": run.run_id, "metric": options.metric, "values": rows})
        return EXIT_OK
    for step, _, value in values:
        session.screen.line(f"{session.screen.styled(f'step {value_text(step)}', 'dim')}  {value!r}")
    return EXIT_OK
