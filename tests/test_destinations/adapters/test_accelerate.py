"""Our tracker in a real `Accelerator`."""

import numpy as np
import pytest
from accelerate import Accelerator, tracking
from accelerate import accelerator as accelerator_module

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


PROGRAM = """
import sys
from accelerate import Accelerator
from destinations import RunDirectory
from destinations.adapters.accelerate_tracker import AccelerateTracker
accelerator = Accelerator(log_with=AccelerateTracker(RunDirectory(sys.argv[1])), cpu=True)
accelerator.init_trackers("project")
accelerator.log({"loss": 0.5}, step=0)
if sys.argv[2] == "raises":
    raise ValueError("diverged")
"""


@pytest.mark.parametrize(("ending", "status"), [("ends", "completed"), ("raises", "failed")])
def test_a_program_without_end_training_ends_its_run(
    tmp_path, environment, sidecar, torch_server, ending, status
):
    """The run is completed if the program ends normally, and failed if an exception ends it."""
    done = torch_server.run(PROGRAM, tmp_path / "run", ending, env=environment, timeout_s=500)

    assert done.returncode == (ending == "raises"), done.stderr
    assert sidecar(tmp_path / "run")["status"] == status
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 2


def test_a_registered_class_is_created_with_destinations(tmp_path, monkeypatch, sidecar):
    """It uses the destinations in `init_kwargs`, or a folder named after the project."""
    monkeypatch.setattr(tracking, "LOGGER_TYPE_TO_CLASS", dict(tracking.LOGGER_TYPE_TO_CLASS))
    monkeypatch.setattr(accelerator_module, "LOGGER_TYPE_TO_CLASS", tracking.LOGGER_TYPE_TO_CLASS)
    monkeypatch.chdir(tmp_path)
    tracking.register_tracker_class(AccelerateTracker)
    memory = InMemory()

    given = Accelerator(log_with="destinations", cpu=True)
    given.init_trackers("digits", init_kwargs={"destinations": {"destinations": [memory]}})
    given.log({"loss": 0.5}, step=1)
    given.end_training()
    default = Accelerator(log_with="destinations", cpu=True)
    default.init_trackers("digits")
    default.log({"loss": 0.5}, step=1)
    default.end_training()

    assert [(one.value, one.step) for one in memory.records] == [({"loss": 0.5}, 1)]
    assert sidecar(tmp_path / "runs" / "digits")["status"] == "completed"


def test_a_batch_of_images_is_logged():
    """The shape is `(N, H, W, C)`, as Accelerate documents."""
    memory = InMemory()
    tracker = AccelerateTracker(memory, raise_errors=True)
    tracker.start()

    tracker.log_images({"view": np.zeros((5, 4, 6, 3), np.uint8)}, step=1)

    (record,) = memory.records
    assert [tuple(image.shape) for image in record.value["images"]] == [(3, 4, 6)] * 5
