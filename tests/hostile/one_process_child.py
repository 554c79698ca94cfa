"""The program of test_one_process.py: `one_process_child.py FOLDER MODE [OPTION]`; prints JSON at its end."""

import faulthandler
import json
import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np

from destinations import Artifacts, Console, InMemory, ProgressBar, RunDirectory, TensorBoard, TextFile
from events import Run
from uploads import Timeouts

FOLDER, MODE, OPTIONS = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
LIMIT_SECONDS = 90
SIGNALS = 200


def signals(isolation):
    """Logs and uploads, in a signal handler too, until the handler has run often enough."""
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115  # until the process ends
    source = FOLDER / "source"
    source.write_bytes(b"bytes")
    counts = {"handler": 0, "loop": 0}
    run = Run(
        [
            RunDirectory(FOLDER / "run", flush_seconds=0.01),
            Artifacts(
                str(FOLDER / "store"),
                spool=FOLDER / "spool",
                free_bytes=0,
                isolation=isolation,
                close_seconds=LIMIT_SECONDS,
                **({"timeouts": Timeouts(grace_seconds=1)} if isolation == "process" else {}),
            ),
            TextFile(str(FOLDER / "log.jsonl"), format="jsonl", flush_interval=0.01),
            TensorBoard(FOLDER / "tensorboard", flush_seconds=0.01),
            InMemory(),
            Console("10ba", nowhere),
            ProgressBar(stream=nowhere),
        ],
        run_name="signals",
        raise_errors=True,
    )

    def log(name):
        step = counts[name]
        run.log_metrics({name: float(step)}, step)
        run.log_text(f"text of {name} {step}", name=f"text/{name}", step=step)
        run.log_images(np.zeros((4, 4, 3), np.uint8), f"image/{name}", channels_last=True, step=step)
        run.upload_file(f"{name}-{step}", source)
        if step % 5 == 0:
            run.flush()
        counts[name] += 1

    is_handled = []

    def handle(*_):
        if not is_handled:
            is_handled.append(True)
            log("handler")
            is_handled.clear()

    with run:
        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        while counts["handler"] < SIGNALS:
            log("loop")
            run.batch_end()
        signal.setitimer(signal.ITIMER_REAL, 0)
    return counts


def imported_by_calls():
    """Returns the modules that a run's calls import in the calling thread."""
    thread, seen = threading.get_ident(), []

    class Watching:
        def find_spec(self, name, *_):
            if threading.get_ident() == thread:
                seen.append(name)

    with Run(RunDirectory(FOLDER / "run"), run_name="mine", raise_errors=True) as run:
        sys.meta_path.insert(0, Watching())
        run.log_hyperparameters({"lr": 0.1})
        run.log_metrics({"loss": 0.5}, 0)
        run.log_text("text", name="text", step=0)
        run.log_table(["a"], [[1]], name="table", step=0)
        run.log_histogram(np.zeros(8), "histogram", step=0)
        run.log_images(
            np.zeros((4, 4, 3), np.uint8),
            "image",
            masks={"mask": np.zeros((4, 4), np.uint8)},
            channels_last=True,
        )
        run.log_audio(np.zeros(800, np.float32), 8000, "audio", step=0)
        run.log_video(np.zeros((4, 3, 16, 16), np.uint8), 2, "video", step=0)
        run.log_point_cloud(np.zeros((5, 3)), "points", step=0)
        run.batch_end()
        return list(seen)


def until_told():
    """Logs until standard input ends, and prints each row that was accepted."""
    with Run(RunDirectory(FOLDER / "run", flush_seconds=0.01), run_name="mine") as run:
        step = 0
        os.set_blocking(0, False)
        while _read() != b"":
            run.batch_start()
            run.log_metrics({"loss": 0.5}, step)
            os.write(1, b"%d\n" % step)
            run.batch_end()
            step += 1
    return step - 1


def _read():
    try:
        return os.read(0, 1)
    except BlockingIOError:
        return None


def notebook():
    """Runs the cells of a notebook and interrupts one with SIGINT, as a kernel's stop button does."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.user_ns |= {"FOLDER": FOLDER}
    shell.run_cell("import os, signal\nfrom destinations import RunDirectory\nfrom events import Run")
    shell.run_cell("run = Run(RunDirectory(FOLDER / 'run'), run_name='mine'); step = 0")
    interrupted = shell.run_cell(
        "while True:\n"
        "    run.log_metrics({'loss': 0.5}, step); step += 1; run.batch_end()\n"
        "    if step == 50: os.kill(os.getpid(), signal.SIGINT)"
    )
    shell.run_cell(
        "rows = step\nrun.log_metrics({'after': 1.0}, step); run.state.end_training(); run.close()"
    )
    shell.run_cell(
        "with Run(RunDirectory(FOLDER / 'block'), run_name='block') as block:\n"
        "    block.log_metrics({'loss': 0.5}, 0)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    while True: pass"
    )
    return {"interrupted": type(interrupted.error_in_exec).__name__, "rows": shell.user_ns["rows"]}


if __name__ == "__main__":
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    modes = [signals, imported_by_calls, until_told, notebook]
    print(json.dumps({mode.__name__.replace("_", " "): mode for mode in modes}[MODE](*OPTIONS)))
