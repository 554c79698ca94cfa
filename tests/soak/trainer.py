"""A trainer for the soak: logs rows and submits files until it is killed.

Says after each call what was accepted.

`python -m tests.soak.trainer FOLDER URI FIRST`: the run and the spool are in the folder, steps begin at
FIRST.
"""

import os
import sys
import time
from pathlib import Path

from destinations import RunDirectory
from events import Engine, Logger, State, Timestamp
from uploads import UploadQueue

STEPS_PER_FILE = 10
PACE_SECONDS = 0.001


def content(step: int) -> bytes:
    """What is in the file of a step."""
    return b"%d " % step * 2000


def train(folder: Path, uri: str, first: int) -> None:
    """Works until it is killed."""
    queue = UploadQueue(uri, spool=folder / "spool", free_bytes=0, isolation="process", grace_seconds=3)
    destination = RunDirectory(folder / "run", flush_seconds=0.01, if_exists="resume")
    state = State("soak", timestamp=Timestamp(batch=first))
    logger = Logger(state, [destination], raise_errors=True)
    engine = Engine(state, logger)
    engine.run_event("init")
    engine.run_event("fit_start")
    step = first
    while True:
        logger.log_metrics({"a": step + 0.5}, step)
        os.write(1, b"row %d\n" % step)
        if step % STEPS_PER_FILE == 0:
            source = folder / f"source-{step}"
            source.write_bytes(content(step))
            queue.submit(source, f"n{step}", overwrite=True, move=True)
            os.write(1, b"file %d\n" % step)
        step += 1
        time.sleep(PACE_SECONDS)


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
