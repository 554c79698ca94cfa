"""Logs rows to a run in a bucket until it is killed, or told to end.

`python -m tests.crash.bucket_child URI MACHINE WRITER STEP NUMBER COUNT`: on a machine of its own, which is a folder,
as the trainer (WRITER is "-") or a named writer, from a step on. Each row has the number of its call; "logged N"
is printed when that has returned. After COUNT rows it ends as a run does. It retries a failed store within
two seconds instead of a minute.
"""

import functools
import os
import sys
import time


def main(uri, machine, writer, step, number, count):
    """Logs."""
    os.environ["XDG_STATE_HOME"] = machine
    os.environ["UPLOADS_HOME"] = f"{machine}/uploads"
    from destinations import RunDirectory
    from events import Run
    from uploads import RetryPolicy, UploadQueue

    policy = RetryPolicy(first_seconds=0.2, cap_seconds=0.4)
    UploadQueue.__init__ = functools.partialmethod(UploadQueue.__init__, policy=policy)
    directory = RunDirectory(
        uri,
        writer=None if writer == "-" else writer,
        mirror_seconds=0.5,
        flush_seconds=0.1,
        close_seconds=120.0,
        if_exists="resume",
    )
    with Run(loggers=[directory], run_name="killed") as run:
        run.fit_start(batch=step if writer == "-" else 0)
        for at in range(count):
            run.log_metrics({f"{writer}/number": float(number + at)}, step=step + at)
            print("logged", number + at, flush=True)
            time.sleep(0.02)
    print("ended", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
