"""Logs the runs of `runs.json` to five trackers, offline, and writes the ids that the trackers give them."""

import contextlib
import json
import sys
from pathlib import Path

import numpy as np

from destinations import Comet, MLflow, TensorBoard, Trackio, WandB
from events import Run, RunStatus

SECONDS = 600.0


def log(folder, one):
    """Logs a run; returns its ids by tracker."""
    name, about = one["name"], {"name": one["name"], "close_seconds": SECONDS}
    tags = one["tags"]
    settings = {"x_disable_stats": True}
    wandb = WandB(
        "p", mode="offline", dir=folder / "wandb", tags=tags, init_kwargs={"settings": settings}, **about
    )
    mlflow = MLflow(
        f"sqlite:///{folder}/mlflow.db",
        "p",
        run_name=name,
        tags={f"tag.{tag}": tag for tag in tags},
        artifact_location=(folder / "artifacts").as_uri(),
        close_seconds=SECONDS,
    )
    comet = Comet("p", offline_dir=folder / "comet", tags=tags, **about)
    trackers = [TensorBoard(folder / "tensorboard" / name), wandb, mlflow, Trackio("p", **about), comet]
    run = Run(trackers, run_name=name)
    error = {"failed": ValueError("diverged"), "interrupted": KeyboardInterrupt()}.get(one["status"])
    if one["hyperparameters"]:
        run.log_hyperparameters(one["hyperparameters"])
    for step, metrics in one["rows"]:
        run.log_metrics(metrics, step=step)
    for step, name, text in one["texts"]:
        run.log_text(text, name, step=step)
    for step, name, pixels in one["pictures"]:
        run.log_images(np.array(pixels, np.uint8), name, channels_last=True, step=step)
    if one["status"] == "stopped":
        run.state.status = RunStatus.STOPPED
    assert all(tracker._feed.flush(SECONDS) for tracker in trackers)
    ids = {"wandb": wandb.run.id, "mlflow": mlflow.run_id, "comet": comet.experiment.id}
    with contextlib.suppress(ValueError, KeyboardInterrupt):
        run.close(error)
    for tracker in trackers:
        assert tracker.counts.written_rows == len(one["rows"]), (tracker, tracker.counts)
        assert tracker.counts.written_records == tracker.counts.records, (tracker, tracker.counts)
    return ids


folder = Path(sys.argv[1])
ids = [log(folder, one) for one in json.loads((folder / "runs.json").read_text())]
(folder / "ids.json").write_text(json.dumps(ids))
