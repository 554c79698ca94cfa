"""Sends runs to trackers and reads them back with the trackers' own readers."""

import attrs
import pytest

from destinations import RunDirectory
from destinations.run_directory import read_rows
from destinations.runs import Run
from destinations.runs.send import send
from destinations.runs.send.targets import place_of
from destinations.testing.samples import every_kind_of_record
from events import Run as WritingRun

pytestmark = [
    # The packages are imported once.
    pytest.mark.xdist_group("mlflow"),
    # MLflow's own use of SQLAlchemy 2.1.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated:DeprecationWarning"),
]

BEGAN = 1_700_000_000.0


class Clock:
    """A clock that advances by an eighth of a second per reading, which MLflow's milliseconds can show."""

    def __init__(self, now):
        self.now = now

    def __call__(self):
        self.now += 0.125
        return self.now


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An old run with every kind of record."""
    folder = tmp_path_factory.mktemp("run")
    destination = RunDirectory(
        folder / "old", run_id="abc123", tags=["one"], notes="a note", keep_files="copy", clock=Clock(BEGAN)
    )
    with WritingRun(loggers=[destination], run_name="old", raise_errors=True) as writing:
        writing.log_hyperparameters({"optim": {"lr": 0.5}})
        for step in range(10):
            writing.log_metrics({"loss": 2.0**-step, "acc": step / 16}, step=step)
        for call in every_kind_of_record(folder):
            call(writing.logger)
        (folder / "weights.bin").write_bytes(b"weights")
        writing.upload_file("weights.bin", folder / "weights.bin", overwrite=True)
    return Run.open(folder / "old")


def test_tensorboard_has_steps_times_and_values_of_the_run(run, tmp_path):
    """TensorBoard's own reader sees each value once, however often the run is sent."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    first = send(run, f"tensorboard:{tmp_path}", cache=tmp_path / "cache")
    second = send(run, f"tensorboard:{tmp_path}", cache=tmp_path / "cache")
    third = send(run, f"tensorboard:{tmp_path}", cache=tmp_path / "cache", again=True)

    assert (first.failures, first.rows, second.rows, third.rows) == ([], 10, 0, 10)
    assert dict(first.left_out) == {"artifact": 1}
    found = accumulator.EventAccumulator(str(tmp_path / "old"), size_guidance={"scalars": 0, "images": 0})
    found.Reload()
    rows = read_rows(run.path)
    assert [(event.step, event.wall_time, event.value) for event in found.Scalars("loss")] == [
        (row.step, row.time, row.metrics["loss"]) for row in rows
    ]
    assert {"masked", "masked/truth", "table", "text", "clouds_VERTEX"} <= set(found.Tags()["tensors"])
    assert found.Tags()["audio"] == ["audio", "told/audio"]
    histograms = [event.histogram_value for event in found.Histograms("edges")]
    assert [(one.num, one.min, one.max) for one in histograms] == [(8, 0, 7)]


def test_mlflow_has_steps_times_and_values_of_the_run(run, tmp_path):
    """Each value is there once. If the run is sent with `again`, the earlier MLflow run is deleted."""
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'store.db'}"
    client = mlflow.MlflowClient(uri)
    client.create_experiment("old ones", artifact_location=str(tmp_path / "artifacts"))
    target = f"mlflow:{uri}#old ones"

    reports = [
        send(run, target, cache=tmp_path / "cache"),
        send(run, target, cache=tmp_path / "cache"),
        send(run, target, cache=tmp_path / "cache", again=True),
    ]

    assert [(one.failures, one.rows) for one in reports] == [([], 10), ([], 0), ([], 10)]
    experiment = client.get_experiment_by_name("old ones").experiment_id
    (found,) = client.search_runs([experiment])
    rows = read_rows(run.path)
    assert (found.info.run_name, found.info.status) == ("old", "FINISHED")
    assert found.info.start_time == round(1000 * run.created_at)
    assert found.data.params == {"optim.lr": "0.5"}
    assert found.data.tags["tag.one"] == "one"
    assert sorted(
        (metric.step, metric.timestamp, metric.value)
        for metric in client.get_metric_history(found.info.run_id, "loss")
    ) == [(row.step, round(1000 * row.time), row.metrics["loss"]) for row in rows]


def test_run_keeps_one_id_at_wandb(run, tmp_path):
    """The id is made from the run's id with characters that W&B allows. W&B replaces the earlier run."""
    pytest.importorskip("wandb")
    place = place_of("wandb:team/project", run.record, tmp_path, {})
    odd = attrs.evolve(run.record, run_id="größe/1 2?", display_name="a {b}")
    weird = place_of("wandb:project", odd, tmp_path, {}).target
    target = place.target

    anew = place.make(lambda: 0.0)
    target.starts_over = False
    further = place.make(lambda: 0.0)

    assert target.remote_id.startswith("abc123-")
    assert weird.remote_id.replace("-", "").isalnum()
    assert weird.remote_id.isascii()
    assert weird.name == "a _b_"
    same = place_of("wandb:team/project", run.record, tmp_path, {}).target
    assert target.remote_id == same.remote_id != weird.remote_id
    assert (anew._init_kwargs, further._init_kwargs) == ({"resume": None}, {})
    assert (anew._run_id, anew._options["entity"], anew._project) == (target.remote_id, "team", "project")
