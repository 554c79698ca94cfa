"""Runs that pages of the docs read: their hidden blocks write them."""

import numpy as np

from destinations import RunDirectory
from events import Run


def write_runs(*names: str) -> None:
    """Writes finished runs to the folder `runs`, each with a larger learning rate than the one before."""
    for number, name in enumerate(names, 1):
        with Run(loggers=[RunDirectory(f"runs/{name}", tags=["sweep:7"])], run_name=name) as run:
            run.log_hyperparameters({"optim": {"lr": number / 10}})
            for step in range(20):
                run.batch_start()
                run.log_metrics({"loss": 1 / (step + 1), "val/loss": 1 / (step + 1), "val/acc": step / 20})
                run.batch_end()
            run.log_table(["image", "guess"], [[12, "dog"]], "Misclassified")
            run.log_images(np.zeros((1, 8, 8)), "Inputs", step=100, masks={"truth": np.zeros((8, 8), int)})
            run.log_histogram([1.0, 2.0], "weights")
            run.log_text("begun", "Notes")
            run.log_traces({"note": "begun"})
