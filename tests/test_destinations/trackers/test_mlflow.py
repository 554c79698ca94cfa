"""MLflow: what its client reads from a real server and from a SQLite store."""

import io
import itertools
import json
import math
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
import warnings
import wave

import numpy as np
import pytest
import yaml
from PIL import Image

from destinations import MLflow
from destinations.testing import DestinationContract, DryRun
from destinations.testing.samples import WEIRD_NAMES
from destinations.trackers.mlflow import artifact_key, batches, entity_key, is_transient
from destinations.trackers.names import Names
from events import Run

pytestmark = [
    # The tests of this module share the package, a store and a server.
    pytest.mark.xdist_group("mlflow"),
    # MLflow triggers a deprecation of SQLAlchemy 2.1.
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated:DeprecationWarning"),
]

PATIENCE_SECONDS = 60
# Time to start a server and to write a run to it on a busy machine.
SERVER_SECONDS = 300
# MLflow stores this number for infinity in SQL.
GREATEST = 1.7976931348623157e308


class Clock:
    """A clock that advances a millisecond per call, so that every row has its own time."""

    def __init__(self, start=1_000_000_000_000):
        self._milliseconds = itertools.count(start)

    def __call__(self):
        return next(self._milliseconds) / 1000


@pytest.fixture
def tmp_path(tmp_path):
    """A folder with a unique name: experiments are named after it in a store that all tests share."""
    folder = tmp_path / f"of-{uuid.uuid4().hex}"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def sqlite_uri(tmp_path_factory):
    """Returns the URI of a store with its tables, which take seconds to create."""
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/store.db"
    MlflowClient(uri).search_experiments()
    return uri


@pytest.fixture(scope="module")
def server_uri(sqlite_uri, tmp_path_factory):
    """Returns the URI of MLflow's server on loopback, in a thread: a process would import it all again."""
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(sqlite_uri.removeprefix("sqlite:///"), folder / "store.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("_MLFLOW_SERVER_FILE_STORE", f"sqlite:///{folder}/store.db")
        patch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", "mlflow-artifacts:/")
        patch.setenv("_MLFLOW_SERVER_SERVE_ARTIFACTS", "true")
        patch.setenv("_MLFLOW_SERVER_ARTIFACT_DESTINATION", str(folder / "artifacts"))
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import starlette.middleware.wsgi  # noqa: F401  # a request would import it, and warn
            from mlflow.server import app
        from werkzeug.serving import make_server

        server = make_server("127.0.0.1", 0, app, threaded=True)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(PATIENCE_SECONDS)


def client_of(uri):
    """Returns a client."""
    from mlflow.tracking import MlflowClient

    return MlflowClient(uri)


def make(uri, folder, **options):
    """Returns an MLflow destination with its own experiment, whose artifacts are in a folder."""
    options = {"artifact_location": str(folder / "artifacts"), "clock": Clock(), **options}
    return MLflow(
        uri, str(folder.name), close_seconds=2 * PATIENCE_SECONDS, wait_seconds=PATIENCE_SECONDS, **options
    )


def runs_of(uri, experiment):
    """Returns the runs of an experiment, oldest first."""
    client = client_of(uri)
    found = client.get_experiment_by_name(experiment)
    runs = [] if found is None else list(client.search_runs([found.experiment_id]))
    return sorted(runs, key=lambda run: run.info.start_time)


def rows_of(uri, run, keys=None):
    """Returns step and values of each call with the logged names; each call has its own time."""
    rows = {}
    for key in run.data.metrics if keys is None else keys:
        name = run.data.tags.get(entity_key(f"metric_name.{key}"), key)
        for metric in client_of(uri).get_metric_history(run.info.run_id, key):
            rows.setdefault(metric.timestamp, (metric.step, {}))[1][name] = metric.value
    return [rows[time] for time in sorted(rows)]


def artifacts_of(uri, run, path=None):
    """Returns the paths of all artifacts."""
    found = []
    for one in client_of(uri).list_artifacts(run.info.run_id, path):
        found += artifacts_of(uri, run, one.path) if one.is_dir else [one.path]
    return sorted(found)


def alike(values, except_names=frozenset()):
    """Returns metrics as MLflow keeps them: double precision, infinities as the largest numbers, sorted."""
    return sorted(
        (name.encode("utf-8", "backslashreplace"), repr(max(-GREATEST, min(GREATEST, float(value))) + 0.0))
        for name, value in values.items()
        if name not in except_names
    )


class TestMLflow(DestinationContract):
    @pytest.fixture
    def destination(self, sqlite_uri, tmp_path):
        """Returns a destination with a SQLite store."""
        self.uri, self.experiment = sqlite_uri, tmp_path.name
        return make(sqlite_uri, tmp_path)

    def read_metrics(self, destination):
        return [row for run in runs_of(self.uri, self.experiment) for row in rows_of(self.uri, run)]

    def _has_metrics(self, destination, recording, except_names=frozenset()):
        """Compares as MLflow keeps them; a tag can't hold a name that isn't UTF-8."""
        except_names = {
            *except_names,
            *(name.encode("utf-8", "backslashreplace").decode() for name in except_names),
        }
        expected = [(step, alike(values, except_names)) for step, values in recording.metrics]
        expected = [(step, values) for step, values in expected if values]
        found = [(step, alike(values, except_names)) for step, values in self.read_metrics(destination)]
        found = [(step, values) for step, values in found if values]
        assert found[len(found) - len(expected) :] == expected

    def read_output(self, destination):
        return [
            (run.to_dictionary(), artifacts_of(self.uri, run)) for run in runs_of(self.uri, self.experiment)
        ]


# Its content.


@pytest.fixture(scope="module")
def everything(server_uri, tmp_path_factory):
    """Returns a run with one of each kind of record, on a server."""
    folder = tmp_path_factory.mktemp("everything")
    pixels = np.arange(2 * 3 * 8 * 10, dtype="uint8").reshape(2, 3, 8, 10)
    mask = np.zeros((2, 8, 10), int)
    mask[:, 0, 0] = 1
    (folder / "file.txt").write_text("hello")
    destination = make(
        server_uri,
        folder,
        tags={"team": "vision", "bad@key": "x"},
        log_artifacts=True,
        artifact_location=None,
    )
    with Run([destination], run_name="named", raise_errors=True) as run:
        run.log_hyperparameters(
            {"lr": 0.1, "optimizer": {"name": "sgd", "betas": [0.9, 0.99]}, "@": 1, "long": "x" * 7000}
        )
        run.log_hyperparameters({"lr": 0.2, "bad\udc80": "\udc80"})
        run.log_metrics({"loss": 0.5, "acc@1": 1, "acc_1": 2, "": 9.0}, step=5)
        run.log_metrics({"loss": math.nan, "big": 2**60, "yes": True, "inf": -math.inf}, step=3)
        run.log_metrics({f"many/{index}": float(index) for index in range(1100)}, step=2**40)
        run.log_images(pixels, "pictures", step=4)
        run.log_images(pixels[0], "masked", masks={"truth": mask[0]}, mask_class_labels={1: "cat"}, step=6)
        run.log_table(["a", "b"], [[1, "x"], [math.nan, np.array([1, 2])], [None, "\udc80"]], "table", step=4)
        run.log_text("<b> \udc80", "te?xt", step=1)
        run.log_audio(np.zeros(100, "float32"), 8000, "sound")
        run.log_video(np.zeros((2, 3, 8, 8), "uint8"), 5, "video")
        run.log_histogram(np.array([0.0, 1.0, 1.0, math.nan]), "histogram", bins=2)
        run.log_point_cloud(np.zeros((4, 3)), "points")
        run.log_traces({"a": {"b": [1, None]}})
        run.upload_file("checkpoints/ep 1.pt", folder / "file.txt")
    (found,) = runs_of(server_uri, folder.name)
    return Everything(server_uri, found, destination)


class Everything:
    """A finished run, as its store has it."""

    def __init__(self, uri, run, destination):
        self.uri, self.run, self.destination = uri, run, destination
        self.artifacts = artifacts_of(uri, run)

    def artifact(self, pattern):
        """Returns the bytes of the only artifact that matches a regular expression."""
        (path,) = [one for one in self.artifacts if re.fullmatch(pattern, one)]
        with open(client_of(self.uri).download_artifacts(self.run.info.run_id, path), "rb") as file:  # noqa: PTH123
            return file.read()


def test_every_kind_of_record_is_accepted(everything):
    """Nothing failed."""
    counts = everything.destination.counts

    assert counts.errors == {}
    assert (counts.written_rows, counts.failed_rows, counts.dropped_records) == (3, 0, 0)


def test_the_run_has_the_given_name(everything):
    """It has its name, tags and status, and the clock's times."""
    run = everything.run

    assert (run.info.run_name, run.info.status) == ("named", "FINISHED")
    assert run.data.tags.items() >= {"team": "vision", "bad_key": "x"}.items()
    assert 1_000_000_000_000 <= run.info.start_time < run.info.end_time < 1_000_000_001_000


def test_metrics_keep_steps_times_and_values(everything):
    """A smaller step may follow a larger one, and values may be integers, booleans and NaN.

    One call has more metrics than a request may hold.
    """
    names = ("loss", "acc_1", "unnamed", "big", "yes", "inf", "many/0")
    run = everything.run
    rows = rows_of(everything.uri, run, [key for key in run.data.metrics if key.startswith(names)])

    assert [step for step, _ in rows] == [5, 3, 2**40]
    assert rows[0][1] == {"loss": 0.5, "acc@1": 1.0, "acc_1": 2.0, "": 9.0}
    assert math.isnan(rows[1][1]["loss"])
    assert {name: rows[1][1][name] for name in ("big", "yes")} == {"big": float(2**60), "yes": 1.0}
    assert rows[1][1]["inf"] in {-math.inf, -GREATEST}
    assert rows[2][1] == {"many/0": 0.0}
    many = {key: value for key, value in run.data.metrics.items() if key.startswith("many/")}
    assert many == {f"many/{index}": float(index) for index in range(1100)}


def test_changed_names_are_recorded(everything):
    """They're tags, and no two metrics are merged."""
    tags = everything.run.data.tags
    names = {key: tags[key] for key in tags if key.startswith("metric_name.")}

    assert names.pop("metric_name.acc_1") == "acc@1"
    assert names.pop("metric_name.unnamed") == ""
    (key,) = names
    assert re.fullmatch("metric_name.acc_1-[0-9a-f]{6}", key)


def test_hyperparameters_are_params_and_a_file(everything):
    """Params are flat; long values are cut, changed ones are tags, and the file has everything."""
    params, tags = everything.run.data.params, everything.run.data.tags
    whole = yaml.safe_load(everything.artifact("hparams.yaml"))

    assert {key: params[key] for key in params if key != "long"} == {
        "lr": "0.1",
        "optimizer.name": "sgd",
        "optimizer.betas.0": "0.9",
        "optimizer.betas.1": "0.99",
        "_": "1",
        "bad_": "\\udc80",
    }
    assert len(params["long"]) == 6000
    assert tags["changed_param.lr"] == "0.2"
    assert (whole["lr"], whole["optimizer"]["betas"], len(whole["long"])) == (0.2, [0.9, 0.99], 7000)


def test_images_have_keys_and_steps(everything):
    """MLflow's own page shows them, with unchanged pixels."""
    expected = np.arange(480, dtype="uint8").reshape(2, 3, 8, 10).transpose(0, 2, 3, 1)

    for index in range(2):
        data = everything.artifact(rf"images/pictures~{index}\+step\+4\+timestamp\+\d+\+[-0-9a-f]+\.png")
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(data))), expected[index])


def test_masks_are_images_with_their_numbers(everything):
    """People get an overlay; programs get class indices as PNG, and the labels."""
    assert everything.artifact(r"images/masked~truth\+step\+6\+.*\.png")
    indices = np.asarray(Image.open(io.BytesIO(everything.artifact(r"masks/masked/truth/00000006_.*\.png"))))
    labels = json.loads(everything.artifact(r"masks/masked/00000006_.*\.labels\.json"))

    assert (indices[0, 0], indices.sum()) == (1, 1)
    assert labels == {"1": "cat"}


def test_tables_can_be_read_by_mlflow(everything):
    """They have columns and rows, and are listed in the tag that MLflow searches."""
    table = json.loads(everything.artifact(r"tables/table/00000004_.*\.json"))
    listed = json.loads(everything.run.data.tags["mlflow.loggedArtifacts"])

    assert table == {"columns": ["a", "b"], "data": [[1, "x"], ["NaN", [1, 2]], [None, "\\udc80"]]}
    assert [entry["type"] for entry in listed] == ["table"]
    assert listed[0]["path"] in everything.artifacts


def test_other_records_are_artifacts(everything):
    """These are texts, sounds, videos, histograms, point clouds, traces and files."""
    assert everything.artifact(r"texts/te_xt/00000001_\d+_\d+\.txt").decode() == "<b> \\udc80"
    with wave.open(io.BytesIO(everything.artifact(r"audio/sound/00000001_.*\.wav"))) as sound:
        assert (sound.getframerate(), sound.getnframes()) == (8000, 100)
    assert everything.artifact(r"videos/video/.*\.mp4")[4:8] == b"ftyp"
    assert json.loads(everything.artifact(r"histograms/histogram/.*\.json"))["counts"] == [1, 2]
    assert everything.artifact(r"point_clouds/points/.*\.ply").startswith(b"ply\n")
    assert json.loads(everything.artifact(r"traces/traces/.*\.json")) == {"a": {"b": [1, None]}}
    assert everything.artifact(r"checkpoints/ep 1\.pt") == b"hello"


def test_an_unreachable_server_is_retried(tmp_path, monkeypatch, caplog):
    """Nothing is dropped before close, which then reports it."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    # Bound, so that no other process can take the port, but not listening.
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        destination = MLflow(uri, "e", close_seconds=0.05, flush_seconds=0.01)
        run = DryRun(destination)
        run.init()
        run.fit()
        thread = destination._feed._thread
        deadline = time.monotonic() + PATIENCE_SECONDS

        while not destination.counts.errors:
            assert time.monotonic() < deadline
            destination._feed.flush(0.1)
        run.close()
        thread.join(PATIENCE_SECONDS)

    assert not thread.is_alive()
    assert (destination.counts.written_rows, destination.counts.failed_rows) == (0, 0)
    assert "will be retried after" in caplog.text
    assert "rows of metrics" in caplog.text


def test_a_refused_row_does_not_affect_others(sqlite_uri, tmp_path, caplog):
    """Good rows of the same request arrive; the others are counted and reported once."""
    destination = make(sqlite_uri, tmp_path)
    run = DryRun(destination)
    run.init()

    for step in (0, 2**70, 1, 2**71):
        destination.log_metrics({"loss": 1.0}, step)
    run.close()

    (found,) = runs_of(sqlite_uri, tmp_path.name)
    assert [step for step, _ in rows_of(sqlite_uri, found)] == [0, 1]
    assert (destination.counts.written_rows, destination.counts.failed_rows) == (2, 2)


def test_close_waits_for_a_hanging_server_until_its_deadline(tmp_path, monkeypatch, caplog):
    """Training and close continue while a request has no response."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        destination = MLflow(f"http://127.0.0.1:{silent.getsockname()[1]}", "e", close_seconds=0.05)
        run = DryRun(destination)
        run.init()
        run.fire("fit_start")
        silent.settimeout(PATIENCE_SECONDS)
        connection = silent.accept()[0]
        run.fit()
        thread = destination._feed._thread

        run.close()
        is_closed_meanwhile = thread.is_alive()
        connection.close()

    thread.join(PATIENCE_SECONDS)
    assert is_closed_meanwhile
    assert not thread.is_alive()
    assert destination.counts.written_rows == 0


def test_files_can_be_downloaded(sqlite_uri, tmp_path):
    """Uploaded files come back while the run is open; others raise.

    Existing files are overwritten only on request.
    """
    (tmp_path / "file").write_text("hello")
    destination = make(sqlite_uri, tmp_path, log_artifacts=True)
    run = DryRun(destination)
    run.init()
    run.fire("fit_start")
    # The run exists; `download_file` waits for the file itself.
    assert destination._feed.flush(SERVER_SECONDS)
    run.logger.upload_file("a/b.pt", tmp_path / "file")

    run.logger.download_file("a/b.pt", tmp_path / "back")

    assert (tmp_path / "back").read_text() == "hello"
    with pytest.raises(FileExistsError):
        run.logger.download_file("a/b.pt", tmp_path / "back")
    with pytest.raises(FileNotFoundError):
        run.logger.download_file("a/c.pt", tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifacts", "back", "file"]
    run.close()


# Its end and continuation.


@pytest.mark.parametrize(
    ("exception", "status"),
    [
        (ValueError("password=hunter2"), "FAILED"),
        (KeyboardInterrupt(), "KILLED"),
        (SystemExit(143), "KILLED"),
    ],
)
def test_the_status_shows_how_the_run_ended(sqlite_uri, tmp_path, exception, status):
    """The exception is a tag, without secrets."""
    run = DryRun(make(sqlite_uri, tmp_path), max_duration="1ba")
    run.init()
    run.fit()

    run.close(exception)

    (found,) = runs_of(sqlite_uri, tmp_path.name)
    assert found.info.status == status
    assert found.data.tags["exception"].startswith(type(exception).__name__)
    assert "hunter2" not in str(found.data.tags)


def test_a_run_continues_with_its_id(sqlite_uri, tmp_path):
    """A checkpoint has the id; renamed metrics keep their keys, and changed params are tags."""
    destination = make(sqlite_uri, tmp_path)
    first = DryRun(destination, max_duration="1ba")
    first.init()
    first.logger.log_hyperparameters({"lr": 0.1})
    first.logger.log_metrics({"b_": 1.0, "b@": 2.0}, step=0)
    assert destination._feed.flush(SERVER_SECONDS)
    saved = destination.state_dict()
    first.close(SystemExit(143))
    second = DryRun(make(sqlite_uri, tmp_path, clock=Clock(1_000_000_100_000)), max_duration="2ba")
    second.fire("init", "before_load")

    second.logger.destinations[0].load_state_dict(saved)
    second.fire("after_load", "fit_start")
    second.logger.log_hyperparameters({"lr": 0.2})
    second.logger.log_metrics({"b@": 3.0, "b_": 4.0}, step=1)
    second.close()

    (run,) = runs_of(sqlite_uri, tmp_path.name)
    assert (run.info.run_id, run.info.status) == (saved["run_id"], "FINISHED")
    assert rows_of(sqlite_uri, run) == [(0, {"b_": 1.0, "b@": 2.0}), (1, {"b_": 4.0, "b@": 3.0})]
    assert (run.data.params["lr"], run.data.tags["changed_param.lr"]) == ("0.1", "0.2")


def test_a_run_continues_by_a_given_id(sqlite_uri, tmp_path):
    """Its argument selects the run; the id in another rank's checkpoint is ignored."""
    first = DryRun(make(sqlite_uri, tmp_path), max_duration="1ba")
    first.init()
    first.fit()
    first.close()
    (old,) = runs_of(sqlite_uri, tmp_path.name)
    second = DryRun(
        make(sqlite_uri, tmp_path, run_id=old.info.run_id, tags={"more": "1"}), max_duration="1ba"
    )
    third = DryRun(make(sqlite_uri, tmp_path), max_duration="1ba")

    second.init()
    second.fit()
    second.close()
    third.fire("init", "before_load")
    third.logger.destinations[0].load_state_dict({"time": 0.0, "run_id": old.info.run_id, "rank": 1})
    third.fit()
    third.close()

    found = {run.info.run_id: run for run in runs_of(sqlite_uri, tmp_path.name)}
    assert len(found) == 2
    assert found[old.info.run_id].data.tags["more"] == "1"


def test_each_rank_has_its_own_run(sqlite_uri, tmp_path):
    """With `all_ranks`, the run is named after the rank and has tags to find it."""
    run = DryRun(make(sqlite_uri, tmp_path, all_ranks=True), rank=1, max_duration="1ba")

    run.init()
    run.fit()
    run.close()

    (found,) = runs_of(sqlite_uri, tmp_path.name)
    assert found.info.run_name == "dry-run-rank1"
    assert (found.data.tags["run_group"], found.data.tags["rank"]) == ("dry-run", "1")


def test_the_system_monitor_runs_on_request(sqlite_uri, tmp_path, monkeypatch):
    """It's MLflow's own; its thread is gone after close."""
    # It ends when told to, and doesn't write to the store at the same time as we do: SQLite allows one
    # writer.
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", str(SERVER_SECONDS))
    destination = make(sqlite_uri, tmp_path, log_system_metrics=True)
    run = DryRun(destination)
    run.init()
    run.fit()

    has_started = destination._feed.flush(SERVER_SECONDS)
    monitors = [thread for thread in threading.enumerate() if thread.name == "SystemMetricsMonitor"]
    run.close()

    assert has_started
    assert len(monitors) == 1
    assert not monitors[0].is_alive()
    assert destination.counts.errors == {}


def test_other_uses_of_mlflow_are_unaffected(sqlite_uri, tmp_path):
    """There is no active run, and the tracking URI is unchanged."""
    import mlflow

    before = mlflow.get_tracking_uri()
    destination = make(sqlite_uri, tmp_path)
    run = DryRun(destination)
    run.init()
    run.fit()
    assert destination._feed.flush(SERVER_SECONDS)

    assert mlflow.active_run() is None
    assert mlflow.get_tracking_uri() == before

    run.close()


def test_a_deleted_experiment_raises(sqlite_uri, tmp_path, caplog):
    """MLflow keeps its name, and the error says so."""
    client = client_of(sqlite_uri)
    client.delete_experiment(client.create_experiment(tmp_path.name))
    destination = make(sqlite_uri, tmp_path)
    run = DryRun(destination, max_duration="1ba")

    run.init()
    run.fit()
    run.close()

    assert "is deleted. Restore it" in caplog.text
    assert destination.counts.failed_rows == 1


# Arguments, names and limits.


def test_an_empty_experiment_is_refused():
    """The constructor raises."""
    with pytest.raises(ValueError, match="experiment must not be empty"):
        MLflow("sqlite://", "")


def test_creating_one_imports_nothing():
    """MLflow takes seconds to import, so the lane imports it."""
    code = "import sys; from destinations import MLflow; MLflow('sqlite://', 'e'); print('mlflow' in sys.modules)"

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS
    )

    assert done.stdout == "False\n"


@pytest.mark.parametrize("name", [*WEIRD_NAMES, "a//b", "a/./b", "a/", ".", "..", "é" * 300, "a:b c-d.e_f/g"])
def test_any_name_becomes_one_that_mlflow_accepts(name):
    """MLflow's own checks accept it; good names are unchanged."""
    from mlflow.utils.validation import _validate_metric, _validate_param

    key = entity_key(name)

    _validate_metric(key, 1.0, 0, 0)
    _validate_param(key, "value")
    assert re.fullmatch(r"[a-zA-Z0-9_\-./ ]{1,80}", artifact_key(name))
    if name == "a:b c-d.e_f/g":
        assert key == name


def test_no_two_names_are_merged():
    """The later of two equal keys gets a hash; the same names in the same order get the same keys."""
    names = Names(entity_key)

    keys = [names.key(name) for name in ("a_", "a@", "a#", "x" * 250, "x" * 251, "x" * 252)]

    assert len(set(keys)) == 6
    assert keys[0] == "a_"
    assert [names.name(key) for key in keys] == ["a_", "a@", "a#", "x" * 250, "x" * 251, "x" * 252]


def test_requests_are_within_limits():
    """Number and bytes are bounded, and nothing is left out."""
    from mlflow.entities import Metric
    from mlflow.utils.proto_json_utils import message_to_json

    metrics = [Metric("é" * 250, 1 / 3, 2**40, 2**40) for _ in range(1500)] + [Metric("a", 1.0, 1, 1)] * 2500

    found = list(batches(metrics))

    assert [metric for batch in found for metric in batch] == metrics
    for batch in found:
        assert len(batch) <= 1000
        assert sum(len(message_to_json(metric.to_proto())) for metric in batch) <= 1_000_000


def test_transient_errors_differ_from_permanent_ones():
    """Unreachable and busy servers are transient; a refusal is final."""
    from mlflow.exceptions import MlflowException
    from mlflow.protos import databricks_pb2 as codes
    from requests.exceptions import ReadTimeout

    passing = [
        MlflowException("API request to http://a failed with exception b"),
        MlflowException("x", codes.TEMPORARILY_UNAVAILABLE),
        MlflowException("(sqlite3.OperationalError) database is locked"),
        ReadTimeout(),
        ConnectionRefusedError(),
    ]
    final = [MlflowException("no", codes.INVALID_PARAMETER_VALUE), MlflowException("odd"), ValueError("x")]

    assert [is_transient(error) for error in passing] == [True] * 5
    assert [is_transient(error) for error in final] == [False] * 3
