"""Writes runs for tests with the real `RunDirectory`."""

import itertools
import json
import os
import shutil

from destinations import RunDirectory
from events import Engine, Logger, State, Timestamp


class Written:
    """A run with `log`, `flush` and `close`; with a `batch`, it resumes at that step."""

    kind = RunDirectory

    def __init__(self, run_dir, *, rank=0, batch=0, **options):
        if_exists = "resume" if batch else "auto"
        options = {"flush_seconds": 0.05, "if_exists": if_exists, **options}
        self.destination = self.kind(run_dir, **options)
        self.state = State("test", rank=rank, world_size=rank + 1, timestamp=Timestamp(batch=batch))
        self.logger = Logger(self.state, [self.destination], raise_errors=True)
        self.engine = Engine(self.state, self.logger)
        self.engine.run_event("init")
        self.engine.run_event("fit_start")

    def log(self, metrics, step=None):
        self.logger.log_metrics(metrics, step)

    def flush(self):
        self.logger.flush()

    def wait_for_environment(self):
        """Flushes, then waits for the file that a separate thread writes."""
        self.destination._writer._papers.environment.join(300)

    def close(self):
        writer = self.destination._writer
        self.engine.close(None)
        if writer is not None and writer._papers.environment is not None:
            # A close waits ten seconds for git and others to describe the environment; a busy machine may
            # take longer.
            writer._papers.environment.join(300)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def write_shared(run_dir):
    """Writes a run by a trainer and two writers that log in turns; all of them log `loss`."""
    ticks = itertools.count(1)
    options = {"clock": lambda: float(next(ticks))}
    with (
        Written(run_dir, **options) as trainer,
        Written(run_dir, writer="eval", **options) as late,
        Written(run_dir, writer="probe", **options) as probe,
    ):
        trainer.log({"loss": 10.0, "lr": 0.1}, 1)
        late.log({"loss": 11.0}, 1)
        trainer.log({"loss": 20.0}, 2)
        probe.log({"loss": 12.0}, 1)
        late.log({"acc": 0.3}, 3)
        late.log({"acc": 0.1, "loss": 0.5}, 0)
        probe.log({"norm": 4.0}, 2)
    return run_dir


def copy_as(source, target, run_id):
    """Copies a run as a separate run; returns its folder."""
    shutil.copytree(source, target)
    change_sidecar(target, run_id=run_id)
    return target


def change_sidecar(run_dir, **changes):
    """Writes fields of the sidecar."""
    path = run_dir / "sidecar.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))


def write_stable_pretraining(run_dir, rows, **fields):
    """Writes a folder like stable-pretraining's `RegistryLogger`: no times, NaN as minimum, no journal."""
    write_csv(run_dir, rows)
    sidecar = {
        "schema_version": 1,
        "run_id": run_dir.name,
        "status": "completed",
        "hparams": {"optim.lr": 0.1},
    }
    sidecar |= {"created_at": 1.7e9, "updated_at": 1.7e9, "tags": [], "notes": "", "summary": {}}
    (run_dir / "sidecar.json").write_text(json.dumps({**sidecar, **fields}))


def write_csv(run_dir, rows):
    """Writes a folder with only a `metrics.csv`, long ago."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "metrics.csv"
    path.write_text("".join(f"{row}\n" for row in rows))
    os.utime(path, (1.7e9, 1.7e9))
    os.utime(run_dir, (1.7e9, 1.7e9))
