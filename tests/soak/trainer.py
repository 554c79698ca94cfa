"""A trainer for the soak: logs rows and submits files to all destinations, and prints what was accepted.

`python -m tests.soak.trainer FOLDER URI FIRST DESTINATIONS` writes everything into the folder. Steps begin at FIRST,
and DESTINATIONS is "core" or "all", which adds the trackers. It works until it is killed, or until its standard input
ends: then it closes the run and prints, as JSON, what became of the trackers' rows.
"""

import importlib.util
import json
import os
import select
import sys
import time
from pathlib import Path

STEPS_PER_FILE = 20
PACE_SECONDS = 0.002
NAMES = 100
LARGE_BYTES = 6 << 20


def content(step: int) -> bytes:
    """Returns the content of a step's file: 14 to 200 kB, and now and then enough for an upload in parts."""
    text = b"%d " % step
    return text * (LARGE_BYTES // len(text) if step % 1000 == 980 else 7000)


def difference(found: bytes | None, step: int) -> str:
    """Returns what is wrong with the object of a step, or ""."""
    if found is None:
        return "is missing"
    wanted = content(step)
    if found == wanted:
        return ""
    place = next((at for at, (one, other) in enumerate(zip(found, wanted, strict=False)) if one != other), 0)
    return f"has {len(found)} bytes of {len(wanted)} and differs from byte {place}: {found[place : place + 20]!r}"


def values(step: int) -> dict[str, float]:
    """Returns the values of a step's row."""
    return {"a": step + 0.5, "b/c": -1.0 * step}


def core(folder: Path, uri: str):
    """Returns the destinations that take every row; each continues the run of an earlier trainer."""
    from destinations import Artifacts, Console, InMemory, ProgressBar, RunDirectory, TensorBoard, TextFile
    from uploads import Timeouts

    nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  # until the process ends
    return [
        RunDirectory(folder / "run", flush_seconds=0.05, if_exists="resume"),
        Artifacts(
            uri,
            spool=folder / "spool",
            free_bytes=0,
            isolation="process",
            timeouts=Timeouts(grace_seconds=3),
            close_seconds=300,
        ),
        TextFile(str(folder / "log.jsonl"), format="jsonl", append=True, flush_interval=0.1),
        TensorBoard(folder / "tensorboard"),
        InMemory(max_records=1000),
        Console("1000ba", nowhere),
        ProgressBar(stream=nowhere),
    ]


def trackers(folder: Path):
    """Returns the trackers whose packages are installed, at a rate that they keep up with.

    Trackers without their package are left out.
    """
    from destinations import Comet, MLflow, Trackio, WandB
    from events import WriteRate

    os.environ["TRACKIO_DIR"] = str(folder / "trackio")
    options = {"write_rate": WriteRate(every_seconds=0.25), "close_seconds": 120.0}
    settings = {"settings": {"x_disable_stats": True}}
    made = {
        "wandb": lambda: WandB("soak", mode="offline", dir=folder, init_kwargs=settings, **options),
        "mlflow": lambda: MLflow(
            f"sqlite:///{folder}/mlflow.db", "soak", artifact_location=str(folder), **options
        ),
        "trackio": lambda: Trackio("soak", **options),
        "comet_ml": lambda: Comet("soak", offline_dir=folder / "comet", **options),
    }
    return [make() for package, make in made.items() if importlib.util.find_spec(package)]


def say(what: str, rest: object) -> None:
    """Prints a line with one system call, so that a kill never leaves half of it."""
    os.write(ANSWERS, f"{what} {rest}\n".encode())


def train(folder: Path, uri: str, first: int, which: str) -> None:
    """Trains until it is killed, or its input ends."""
    from events import Run, Timestamp

    lives_on = which == "all"
    several = trackers(folder) if lives_on else []
    run = Run([*core(folder, uri), *several], run_name="soak", raise_errors=True)
    run.state.timestamp = Timestamp(batch=first)
    with run:
        say("begun", first)
        step = first
        while step % STEPS_PER_FILE or not select.select([0], [], [], 0)[0]:
            run.log_metrics(values(step), step)
            say("row", step)
            if step % STEPS_PER_FILE == 0:
                source = folder / "source"
                source.write_bytes(content(step))
                # The long run replaces its files; a trainer that will be killed gives each file a name.
                run.upload_file(
                    f"n{step // STEPS_PER_FILE % NAMES if lives_on else step}", source, overwrite=True
                )
                say("file", step)
            run.batch_end()
            step += 1
            time.sleep(PACE_SECONDS)
    counts = {type(one).__name__: one.counts for one in several}
    report = {
        name: {
            "rows": found.rows,
            "written": found.written_rows,
            "counted as lost": found.dropped_rows + found.failed_rows,
            "errors": found.errors,
        }
        for name, found in counts.items()
    }
    say("end", json.dumps(report))


if __name__ == "__main__":
    # Trackers print to standard output; their lines go to standard error instead.
    ANSWERS = os.dup(1)
    os.dup2(2, 1)
    train(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
