"""A process that logs until it is killed: `python run_directory_child.py FOLDER [MODE]`; says after each call how many."""

import os
import sys
import time
from pathlib import Path

from destinations import RunDirectory
from events import Engine, Logger, State, Timestamp


def main(folder: str, mode: str) -> None:
    """Logs rows as fast as it can, or at a pace, with a new metric now and then."""
    first = int(os.environ.get("FIRST_STEP", "0"))
    destination = RunDirectory(Path(folder), flush_seconds=float(os.environ.get("FLUSH_SECONDS", "0.01")))
    state = State("crash", timestamp=Timestamp(batch=first))
    logger = Logger(state, [destination], raise_errors=True)
    engine = Engine(state, logger)
    engine.run_event("init")
    if mode != "no-fit":
        engine.run_event("fit_start")
    last = int(os.environ.get("LAST_STEP", "1000000000"))
    for step in range(first, last):
        metrics = {"a": step + 0.5, "b": float(step)}
        if step % 40 == 39:
            metrics[f"extra{step // 40}"] = step
        logger.log_metrics(metrics, step)
        os.write(1, b"%d\n" % step)
        if mode == "paced":
            time.sleep(0.0005)
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "fast")
