"""Our logger where torchrl calls one."""

import pytest
import torch
from tensordict import TensorDict

from destinations import InMemory, RunDirectory
from destinations.adapters.torchrl_logger import TorchRLLogger

pytestmark = [
    pytest.mark.xdist_group("torchrl"),
    # torchrl speaks of its own next versions.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def test_every_kind_of_record_arrives(tmp_path, listener, sidecar):
    """Scalars, a nested TensorDict, videos, hyperparameters, histograms, texts and images, with their steps."""
    memory = InMemory()
    logger = TorchRLLogger(RunDirectory(tmp_path / "run"), memory, callbacks=listener, raise_errors=True)
    nested = TensorDict({"a": torch.tensor(1.0), "n": {"b": torch.tensor([2.0]), "c": torch.ones(3)}}, [])
    frames = torch.zeros(2, 5, 3, 8, 8, dtype=torch.uint8)

    logger.log_scalar("reward", 1.0)
    logger.log_scalar("reward", torch.tensor(2.0))
    returned = logger.log_metrics(nested, step=7, keys_sep=".")
    logger.log_video("clip", frames, step=8, fps=6)
    logger.log_hparams({"lr": 0.1})
    logger.log_histogram("h", [1.0, 2.0], step=9, bins=4)
    logger.log_str("note", "fine", step=9)
    logger.log_image("view", torch.zeros(3, 4, 4), step=9)
    logger.close()
    logger.close()

    assert returned == {"a": 1.0, "n.b": 2.0, "n.c": [1.0, 1.0, 1.0]}
    assert [(record.kind, record.name, record.step) for record in memory.records] == [
        ("metrics", "", 0),
        ("metrics", "", 1),
        ("metrics", "", 7),
        ("histogram", "n.c", 7),
        ("video", "clip", 8),
        ("video", "clip", 8),
        ("hyperparameters", "", 7),
        ("histogram", "h", 9),
        ("text", "note", 9),
        ("images", "view", 9),
    ]
    assert memory.records[2].value == {"a": 1.0, "n.b": 2.0}
    assert memory.records[4].value["fps"] == 6
    assert tuple(memory.records[4].value["video"].shape) == (5, 3, 8, 8)
    assert listener.names == ["init", "before_load", "after_load", "fit_start", "fit_end"]
    assert (logger.log_dir, logger.exp_name) == (str(tmp_path / "run"), "run")
    assert not logger.is_alive
    assert sidecar(tmp_path / "run")["status"] == "completed"


def test_a_logger_that_goes_on_from_its_state(listener):
    """Steps without a number are counted on, and the run stands where it stood."""
    first = TorchRLLogger(exp_name="rl", raise_errors=True)
    first.log_scalar("reward", 1.0)
    first.log_scalar("loss", 1.0, step=5)
    saved = first.state_dict()
    memory = InMemory()
    second = TorchRLLogger(memory, exp_name="rl", callbacks=listener, raise_errors=True)

    second.load_state_dict(saved)
    second.log_scalar("reward", 2.0)

    assert ("fit_start", 5, 0) in listener.heard
    assert [record.step for record in memory.records] == [1]


def test_an_exception_in_the_block_is_a_failed_run(tmp_path, sidecar):
    """The exception goes on, and the folder says so."""

    def fail(logger):
        raise ValueError(f"no: {logger.exp_name}")

    logger = TorchRLLogger(RunDirectory(tmp_path / "run"), raise_errors=True)
    logger.log_scalar("reward", 1.0)

    with pytest.raises(ValueError, match="no: run"), logger:
        fail(logger)

    assert sidecar(tmp_path / "run")["status"] == "failed"


def test_a_collector_and_a_recorder_log_through_it():
    """What a collector of torchrl's yields is logged as it is, and its recorder hands over its frames."""
    from torchrl.collectors import Collector
    from torchrl.envs import PendulumEnv, TransformedEnv
    from torchrl.record import VideoRecorder

    memory = InMemory()
    logger = TorchRLLogger(memory, exp_name="pendulum", raise_errors=True)
    collector = Collector(PendulumEnv(), None, frames_per_batch=4, total_frames=8)

    frames = 0
    for batch in collector:
        frames += batch.numel()
        logger.log_metrics({"reward": batch["next", "reward"].mean(), "frames": frames}, step=frames)
    collector.shutdown()
    recorder = TransformedEnv(PendulumEnv(), VideoRecorder(logger, tag="view", in_keys=["pixels"]))
    recorder.transform.obs = [torch.zeros(3, 8, 8, dtype=torch.uint8)] * 3
    recorder.transform.dump()
    logger.close()

    rows = [record for record in memory.records if record.kind == "metrics"]
    assert [(record.step, record.value["frames"]) for record in rows] == [(4, 4), (8, 8)]
    (video,) = (record for record in memory.records if record.kind == "video")
    assert (video.name, tuple(video.value["video"].shape)) == ("view", (3, 3, 8, 8))
