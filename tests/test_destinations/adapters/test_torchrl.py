"""Our logger in torchrl's place."""

import contextlib
import csv

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from destinations import InMemory, RunDirectory
from destinations.adapters.torchrl_logger import (
    HostMetrics,
    TorchRLLogger,
    from_torchrl,
    generate_exp_name,
    get_logger,
)
from events import BinnedValues, RecordError, Run, host_metrics

pytestmark = [
    pytest.mark.xdist_group("torchrl"),
    # torchrl warns about its own next versions.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def test_every_kind_of_record_arrives(tmp_path, listener, sidecar):
    """Scalars, a nested TensorDict, videos, histograms, texts and images arrive with their steps."""
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


def test_a_logger_continues_from_its_state(listener):
    """Records without a step continue the count, and the run keeps its position."""
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


def test_an_exception_in_the_block_fails_the_run(tmp_path, sidecar):
    """The exception propagates, and the folder has the status."""

    def fail(logger):
        raise ValueError(f"no: {logger.exp_name}")

    logger = TorchRLLogger(RunDirectory(tmp_path / "run"), raise_errors=True)
    logger.log_scalar("reward", 1.0)

    with pytest.raises(ValueError, match="no: run"), logger:
        fail(logger)

    assert sidecar(tmp_path / "run")["status"] == "failed"


def test_a_collector_and_a_recorder_log_through_it():
    """It logs a torchrl collector's data unchanged, and a recorder's frames."""
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


def test_arguments_of_their_csv_logger_are_accepted():
    """The video rate applies; the destination chooses the format."""
    memory = InMemory()
    logger = TorchRLLogger(memory, video_format="pt", video_fps=12, raise_errors=True)

    logger.log_video("clip", torch.zeros(1, 2, 3, 4, 4, dtype=torch.uint8))
    logger.log_video("clip", torch.zeros(1, 2, 3, 4, 4, dtype=torch.uint8), fps=6)

    assert [one.value["fps"] for one in memory.records] == [12, 6]


@pytest.mark.parametrize("by_position", [True, False])
def test_strings_create_a_folder(tmp_path, sidecar, by_position):
    """`Logger(exp_name, log_dir)` works as for torchrl's own loggers."""
    if by_position:
        logger = TorchRLLogger("cartpole", str(tmp_path))
    else:
        logger = TorchRLLogger(exp_name="cartpole", log_dir=str(tmp_path))

    logger.log_scalar("reward", 1.0)
    logger.close()

    assert (logger.exp_name, logger.log_dir) == ("cartpole", str(tmp_path))
    assert sidecar(tmp_path / "cartpole")["status"] == "completed"


def test_plain_dicts_may_be_nested_and_bad_values_are_dropped():
    """Names are joined; strings and arrays become records of their kinds."""
    memory = InMemory()
    logger = TorchRLLogger(memory, raise_errors=True)

    # A strict logger raises after writing the others.
    with contextlib.suppress(RecordError):
        logger.log_metrics(
            {"a": {"b": torch.tensor(1.0), "c": 2}, "bad": torch.tensor(1j), "z": 3.0, "last": "x"}, step=4
        )
    logger.log_metrics({"deep": {"x": 1.0}, "note": "blue", "v": np.arange(3)}, step=5, keys_sep=".")

    rows = [(one.value, one.step) for one in memory.records if one.kind == "metrics"]
    assert rows == [({"a/b": 1.0, "a/c": 2, "z": 3.0}, 4), ({"deep.x": 1.0}, 5)]
    assert [one.name for one in memory.records if one.kind == "text"] == ["last", "note"]
    assert [one.name for one in memory.records if one.kind == "histogram"] == ["v"]


def test_values_on_a_device_are_converted_when_read():
    """They aren't converted earlier, because reading waits for the device."""

    class OnDevice:
        shape = ()
        is_cpu = False
        reads = 0

        def item(self):
            self.reads += 1
            return 2.5

        tolist = item

    value = OnDevice()

    returned = HostMetrics({"a": value, "b": "x"})
    before = (list(returned), value.reads)

    assert before == (["a", "b"], 0)
    assert dict(returned) == {"a": 2.5, "b": "x"}
    assert value.reads == 1


def test_host_metrics_use_the_separator():
    """It joins the names of nested dicts and of TensorDicts."""
    nested = TensorDict({"n": {"b": torch.tensor(2.0)}}, [])

    assert host_metrics(nested, keys_sep=".") == ({"n.b": 2.0}, [])
    assert host_metrics({"a": {"b": {"c": 1}}}, keys_sep="_") == ({"a_b_c": 1}, [])
    assert host_metrics({"a": {"b": 1}}) == ({"a/b": 1}, [])


@pytest.mark.parametrize("kind", ["csv", "tensorboard", "wandb", "mlflow", "trackio", "InMemory", "", None])
def test_get_logger_accepts_their_types(tmp_path, kind, sidecar):
    """It takes their arguments; without a type it returns None, and an unknown name raises."""
    name = generate_exp_name("dqn", "pong")
    more = {"wandb_kwargs": {"offline": True, "project": "p"}, "mlflow_kwargs": {"tags": {"a": "b"}}}

    logger = get_logger(kind, str(tmp_path / "logs"), name, **more)
    if not kind:
        assert logger is None
        return

    assert name.startswith("dqn_pong_")
    assert logger.exp_name == name
    made = type(logger._session._destinations[0]).__name__
    expected = {"csv": "RunDirectory", "tensorboard": "TensorBoard", "wandb": "WandB", "mlflow": "MLflow"}
    assert made == {**expected, "trackio": "Trackio"}.get(kind, kind)
    if kind in {"csv", "tensorboard"}:
        logger.log_scalar("reward", 1.0, step=1)
        logger.close()
        assert (tmp_path / "logs" / name).is_dir()
    with pytest.raises(ValueError, match="unknown destination"):
        get_logger("tensorbored", str(tmp_path), name)


PROGRAM = """
import sys
from destinations.adapters.torchrl_logger import TorchRLLogger
if __name__ == "__main__":
    options = {"service_backend": "process"} if sys.argv[2] == "process" else {}
    logger = TorchRLLogger(exp_name="run", log_dir=sys.argv[1], **options)
    logger.log_scalar("reward", 1.0, step=0)
    logger.log_metrics({"a": {"b": 2.0}}, step=1)
    if sys.argv[2] == "process":
        logger.shutdown()
    elif sys.argv[2] == "raises":
        raise ValueError("diverged")
"""


@pytest.mark.parametrize(
    ("way", "status"), [("process", "completed"), ("forgets", "completed"), ("raises", "failed")]
)
def test_the_programs_end_determines_the_runs_status(
    tmp_path, environment, torch_server, sidecar, way, status
):
    """It runs in its own process and doesn't close the logger, as most programs."""
    done = torch_server.run(PROGRAM, tmp_path, way, env=environment, timeout_s=500)

    assert done.returncode == (way == "raises"), done.stderr
    assert sidecar(tmp_path / "run")["status"] == status
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert len(rows) == 3


def test_their_loggers_are_destinations(tmp_path, caplog):
    """Metrics, hyperparameters and videos arrive in torchrl's own files; unsupported records warn once."""
    from torchrl.record.loggers import CSVLogger

    theirs = CSVLogger("run", str(tmp_path))

    with Run(loggers=[from_torchrl(theirs)], run_name="mine") as run:
        run.logger.log_hyperparameters({"lr": 0.1})
        for step in range(2):
            run.logger.log_metrics({"loss": 0.5}, step)
            run.logger.log_histogram([1.0, 2.0], "h", step)
            run.logger.log_histogram(BinnedValues([1.0], [0.0, 1.0]), "h", step)
        run.logger.log_video(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), 5, "clip", 3)
    with pytest.raises(TypeError, match="CSVLogger"):
        from_torchrl(InMemory())

    with (tmp_path / "run" / "scalars" / "loss.csv").open() as file:
        assert list(csv.reader(file)) == [["0", "0.5"], ["1", "0.5"]]
    assert tuple(torch.load(tmp_path / "run" / "videos" / "clip_3.pt").shape) == (1, 2, 3, 4, 4)
    assert not theirs.is_alive
    assert caplog.text.count("CSVLogger has no log_histogram") == 1


def test_an_overridden_log_scalar_gets_each_value_of_log_metrics():
    """It also gets strings and lists, as in torchrl."""
    seen = []

    class Renaming(TorchRLLogger):
        def log_scalar(self, name, value, step=None, **kwargs):
            seen.append((name, value, step))
            if isinstance(value, float):
                super().log_scalar(f"mine/{name}", value, step)

    memory = InMemory()
    logger = Renaming(memory, raise_errors=True)

    returned = logger.log_metrics(
        {"loss": torch.tensor(0.5), "note": "blue", "all": torch.tensor([1.0, 2.0]), "none": None}, step=3
    )
    logger.close()

    values = {"loss": 0.5, "note": "blue", "all": [1.0, 2.0], "none": None}
    assert returned == values
    assert seen == [(name, value, 3) for name, value in values.items()]
    assert [(one.step, one.value) for one in memory.records if one.kind == "metrics"] == [
        (3, {"mine/loss": 0.5})
    ]


def test_text_in_a_tensordict_is_logged_as_text():
    """It is also returned as torchrl's own loggers return it."""
    memory = InMemory()
    metrics = TensorDict({"a": torch.tensor(1.0), "nested": {"s": NonTensorData("hello")}})
    with TorchRLLogger(memory, raise_errors=True) as logger:
        returned = logger.log_metrics(metrics, step=0)

    assert returned == {"a": 1.0, "nested/s": "hello"}
    assert [(one.kind, one.name) for one in memory.records] == [("metrics", ""), ("text", "nested/s")]
