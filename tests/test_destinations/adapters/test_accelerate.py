"""Our tracker in a real `Accelerator`."""

import numpy as np
import pytest
from accelerate import Accelerator

from destinations import InMemory, RunDirectory
from destinations.adapters.accelerate_tracker import AccelerateTracker
from events import Logger

pytestmark = pytest.mark.xdist_group("transformers")


def test_an_accelerator_logs_to_our_destinations(tmp_path, listener, sidecar):
    """Configuration, numbers, strings, images and tables arrive with their steps.

    `end_training` completes the run.
    """
    memory = InMemory()
    tracker = AccelerateTracker(RunDirectory(tmp_path / "run"), memory, callbacks=listener, raise_errors=True)
    accelerator = Accelerator(log_with=tracker, cpu=True)

    accelerator.init_trackers("project", config={"lr": 0.1})
    accelerator.log({"loss": 0.5, "note": "fine", "pair": [1, 2]}, step=3)
    accelerator.log({"loss": np.float32(0.25)})
    accelerator.get_tracker("destinations").log_images({"view": np.zeros((2, 4, 4, 3))}, step=4)
    accelerator.get_tracker("destinations").log_table("t", columns=["a"], data=[[1]], step=5)
    unwrapped = accelerator.get_tracker("destinations", unwrap=True)
    accelerator.end_training()
    accelerator.end_training()

    assert isinstance(unwrapped, Logger)
    assert listener.names == ["init", "before_load", "after_load", "fit_start", "fit_end"]
    assert listener.heard[-1] == ("fit_end", 4, 0)
    assert [(record.kind, record.name, record.step) for record in memory.records] == [
        ("hyperparameters", "", 0),
        ("metrics", "", 3),
        ("text", "note", 3),
        ("traces", "", 0),
        ("metrics", "", 4),
        ("images", "view", 4),
        ("table", "t", 5),
    ]
    assert memory.hyperparameters == {"lr": 0.1}
    assert memory.records[1].value == {"loss": 0.5}
    assert sidecar(tmp_path / "run")["status"] == "completed"


def test_a_program_that_forgets_end_training_has_a_failed_run(tmp_path, sidecar):
    """Nobody knows whether it was done."""
    accelerator = Accelerator(log_with=AccelerateTracker(RunDirectory(tmp_path / "run")), cpu=True)
    accelerator.init_trackers("project")
    tracker = accelerator.get_tracker("destinations")

    tracker._session.close()

    assert sidecar(tmp_path / "run")["status"] == "failed"
