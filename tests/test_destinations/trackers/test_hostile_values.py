"""Names, numbers and tables that no tracker accepts, and good records beside them."""

import itertools
import math

import numpy as np
import pytest

from destinations import MLflow, TensorBoard
from events import Run

# MLflow triggers a deprecation of SQLAlchemy 2.1.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated:DeprecationWarning"),
    pytest.mark.xdist_group("mlflow"),
]

NAMES = [
    "a\nb",
    "a\0b",
    "a\ud800b",
    "n" * 10_000,
    "../../x",
    "\x1b[31mred",
    "/",
    "  ",
    "{x}",
    "%s",
    "a=b",
    'a,"b"',
]


def log_everything(logger):
    """Logs each name as each kind of record, odd numbers and large tables, each beside a good metric."""
    for step, name in enumerate(NAMES):
        logger.log_metrics({name: 1.0, "good": float(step)}, step)
        logger.log_text(name, name=name, step=step)
        logger.log_table([name, "b"], [[name, math.nan], [None, 10**400]], name=name, step=step)
        logger.log_images(np.zeros((4, 4), np.uint8), name=name, step=step)
        logger.log_histogram(np.arange(10.0), name=name, step=step)
        logger.log_traces({name: {name: name}})
        logger.log_hyperparameters({name: name, "nested": {name: [name]}})
    for step, value in enumerate([math.nan, math.inf, 10**400, -(10**400), 2**64, True], len(NAMES)):
        logger.log_metrics({"odd": value, "good": float(step)}, step)
    logger.log_table([f"c{index}" for index in range(2_000)], [list(range(2_000))], name="wide")
    logger.log_table(["a"], [["x" * 20]] * 20_000, name="long")
    logger.log_text("y" * 2_000_000, name="large")


GOOD = [float(step) for step in range(len(NAMES) + 6)]


def test_tensorboard_keeps_records_beside_odd_names_and_numbers(tmp_path):
    """Each good value is there, and nothing failed."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    destination = TensorBoard(tmp_path)

    with Run(destination, run_name="mine") as run:
        log_everything(run.logger)

    accumulator = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [event.value for event in accumulator.Scalars("good")] == GOOD
    assert len(accumulator.Scalars("odd")) == 6


def test_mlflow_keeps_records_beside_odd_names_and_numbers(tmp_path, caplog):
    """An integer too large for a float becomes infinity, and its row is kept."""
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/store.db"
    destination = MLflow(uri, "mine", artifact_location=str(tmp_path / "artifacts"), close_seconds=300)

    with Run(destination, run_name="mine") as run:
        log_everything(run.logger)

    client = mlflow.MlflowClient(uri)
    (experiment,) = [one for one in client.search_experiments() if one.name == "mine"]
    (found,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "good")
    assert sorted(metric.value for metric in history) == GOOD
    assert "failed with" not in caplog.text
    steps = [metric.step for metric in client.get_metric_history(found.info.run_id, "odd")]
    assert sorted(steps) == list(itertools.islice(itertools.count(len(NAMES)), 6))
