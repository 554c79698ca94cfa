"""Artifacts: a run's files in a store, uploaded before their pointers, and downloaded again."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from destinations import Artifacts, LoggerDestination
from destinations.testing import DestinationContract, DryRun, RecordingDestination
from events import Logger, Run, State, Trainer, read_checkpoint
from uploads import LocalStore, Timeouts

pytestmark = pytest.mark.usefixtures("s3_credentials")


def files_in(folder):
    """Returns every file below a folder with its content."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def make_artifacts(tmp_path):
    """Creates destinations with a store and a spool in the test's folder."""

    def make(store=None, **options):
        defaults = {
            "spool": tmp_path / "spool",
            "progress_bar": False,
            "free_bytes": 0,
            # Even on a slow machine, pending uploads finish and stopped threads end.
            "close_seconds": 300.0,
            "timeouts": Timeouts(give_back_seconds=300.0),
        }
        return Artifacts(tmp_path / "store" if store is None else store, **(defaults | options))

    return make


class TestArtifacts(DestinationContract):
    @pytest.fixture
    def destination(self, make_artifacts):
        """Returns a destination with a local store."""
        return make_artifacts()


class Down(LocalStore):
    """An unreachable store."""

    def put(self, *arguments, **options):
        raise ConnectionError("no route to host")


def train(loggers, folder, **arguments):
    """Trains two epochs of two batches, with a checkpoint after each."""
    model = torch.nn.Linear(3, 2)
    data = [(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))] * 2
    trainer = Trainer(
        model,
        data,
        max_duration="2ep",
        loss_fn=torch.nn.functional.cross_entropy,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        loggers=loggers,
        run_name="digits",
        save_folder=folder,
        device="cpu",
        **arguments,
    )
    with trainer:
        trainer.fit()
    return trainer


def test_checkpoints_arrive_with_a_pointer_to_the_newest(make_artifacts, tmp_path):
    """The store has everything that a training run saved once it's closed, byte for byte."""
    train(make_artifacts(str(tmp_path / "store" / "{run_name}")), tmp_path / "saved")

    store = files_in(tmp_path / "store" / "digits")
    saved = files_in(tmp_path / "saved")
    prefix = "checkpoints/"
    assert sorted(store) == [f"{prefix}{name}" for name in ("ep1-ba2.pt", "ep2-ba4.pt", "latest.symlink")]
    assert store[f"{prefix}ep2-ba4.pt"] == saved["ep2-ba4.pt"]
    assert store[f"{prefix}latest.symlink"] == b"checkpoints/ep2-ba4.pt"
    newest = tmp_path / "store" / "digits" / "checkpoints" / "latest"
    assert read_checkpoint(newest.as_uri())["timestamp"]["batch"] == 4


def test_a_run_continues_from_the_store_alone(make_artifacts, tmp_path):
    """On an empty machine, autoresume follows the pointer in the store."""
    train(make_artifacts(), tmp_path / "old")
    records = RecordingDestination()

    trainer = train([make_artifacts(spool=tmp_path / "spool2"), records], tmp_path / "new", autoresume=True)

    assert trainer.state.timestamp.batch == 4
    assert [step for step, values in records.metrics if "loss/train/total" in values] == []


def test_remote_file_name_places_objects_elsewhere(make_artifacts, tmp_path):
    """`remote_file_name` applies to uploads, pointer targets and downloads."""
    artifacts = make_artifacts(remote_file_name="{run_name}-files/{remote_file_name}")
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "pointer").write_text("one.bin")
    run = DryRun(artifacts, run_name="mine")
    run.init()

    run.logger.upload_file("one.bin", tmp_path / "file")
    run.logger.upload_file("newest.symlink", tmp_path / "pointer")
    assert artifacts.queue.drain(timeout_seconds=300).is_empty
    run.logger.download_file("newest", tmp_path / "back", progress_bar=False)
    run.close()

    assert files_in(tmp_path / "store") == {
        "mine-files/newest.symlink": b"mine-files/one.bin",
        "mine-files/one.bin": b"content",
    }
    assert (tmp_path / "back").read_bytes() == b"content"


def test_fit_waits_for_uploads_on_request(make_artifacts, tmp_path):
    """With wait="uploaded" files are in the store when `fit` returns."""
    artifacts = make_artifacts(wait="uploaded")
    (tmp_path / "file").write_bytes(b"content")
    run = DryRun(artifacts, max_duration="1ep")
    run.init()
    run.logger.upload_file("one.bin", tmp_path / "file")

    run.fit()

    assert files_in(tmp_path / "store") == {"dry-run/one.bin": b"content"}
    run.close()


def test_unfinished_uploads_are_named_and_kept_at_close(make_artifacts, tmp_path, caplog):
    """The message has the names and the command that finishes them, and the command does."""
    store = Down(tmp_path / "store")
    (tmp_path / "file").write_bytes(b"content")
    run = DryRun(make_artifacts(store, close_seconds=0.1))
    run.init()
    run.logger.upload_file("one.bin", tmp_path / "file")

    run.close()

    assert "1 submitted files are not uploaded yet: dry-run/one.bin" in caplog.text
    assert f"destinations uploads resume {tmp_path / 'spool'}" in caplog.text
    again = DryRun(make_artifacts())
    again.init()
    again.close()
    assert files_in(tmp_path / "store") == {"dry-run/one.bin": b"content"}


def test_files_of_later_destinations_arrive(make_artifacts, tmp_path):
    """A file uploaded in the `close` of a destination listed later still arrives."""

    class UploadsAtClose(LoggerDestination):
        def close(self, state: State, logger: Logger) -> None:
            (tmp_path / "last.txt").write_text("the end")
            logger.upload_file("last.txt", tmp_path / "last.txt")

    run = DryRun(make_artifacts(), UploadsAtClose())
    run.init()

    run.close()

    assert files_in(tmp_path / "store") == {"dry-run/last.txt": b"the end"}


@pytest.mark.parametrize(("interval", "steps"), [("2ba", [2, 4]), ("1ep", [5])])
def test_counts_are_logged_on_request(make_artifacts, tmp_path, interval, steps):
    """Files, bytes and pending uploads are logged at an interval."""
    records = RecordingDestination()
    (tmp_path / "file").write_bytes(b"content")
    run = DryRun(make_artifacts(log_interval=interval), records, max_duration="1ep", batches_per_epoch=5)
    run.init()
    run.logger.upload_file("one.bin", tmp_path / "file")

    run.fit()
    run.close()

    counts = [(step, values) for step, values in records.metrics if "uploads/files" in values]
    assert [step for step, _ in counts] == steps
    assert {(values["uploads/files"], values["uploads/bytes"]) for _, values in counts} == {(1, 7)}


def test_another_rank_starts_a_queue_with_its_first_file(make_artifacts, tmp_path, monkeypatch):
    """A rank that uploads nothing starts nothing."""
    monkeypatch.setenv("RANK", "1")
    artifacts = make_artifacts()
    (tmp_path / "file").write_bytes(b"content")
    run = DryRun(artifacts, rank=1)
    run.init()
    assert artifacts.queue is None

    run.logger.upload_file("rank{rank}.bin", tmp_path / "file")
    run.close()

    assert files_in(tmp_path / "store") == {"dry-run/rank1.bin": b"content"}


@pytest.mark.parametrize(
    "name", ["sweep#1", "a?region=elsewhere", "50%2F", "a b+ü", "group/run", "{rank}&c=d"]
)
def test_any_run_name_is_part_of_the_prefix(moto, make_artifacts, tmp_path, name):
    """The URI keeps its options and still leads to its endpoint."""
    (tmp_path / "file").write_bytes(b"content")
    uri = (
        f"s3://bucket/names/{{run_name}}/{{rank:02d}}?endpoint_url={moto.endpoint_url}&addressing_style=path"
    )
    artifacts = make_artifacts(uri, isolation="threads")
    state = State(run_name=name)
    artifacts.init(state, Logger(state, []))

    artifacts.upload_file(state, "ep1.pt", tmp_path / "file", overwrite=False)
    artifacts.post_close()

    assert moto.objects(f"names/{name}/00") == {"ep1.pt": b"content"}


@pytest.mark.parametrize(
    "template", ["store/{run_name}", "s3://bucket/{run_name}", "file:///store/{run_name}"]
)
def test_a_run_name_that_leaves_its_folder_raises(make_artifacts, template, tmp_path, monkeypatch):
    """The error comes when the run begins, not with the first file."""
    monkeypatch.chdir(tmp_path)
    artifacts = make_artifacts(template)
    state = State(run_name="../../x")

    with pytest.raises(ValueError, match=r"must have no part '\.\.' or '\.'"):
        artifacts.init(state, Logger(state, []))


def test_files_arrive_at_an_s3_server(moto, make_artifacts, tmp_path):
    """They go through the worker process, the default for URIs of remote stores, and come back."""
    uri = moto.uri("artifacts")
    artifacts = make_artifacts(uri.replace("artifacts", "{run_name}"), isolation=None)
    (tmp_path / "file").write_bytes(b"content")
    run = DryRun(artifacts, run_name="artifacts")
    run.init()

    run.logger.upload_file("ep1.pt", tmp_path / "file")
    (tmp_path / "file").unlink()
    assert artifacts.queue.drain(timeout_seconds=300).is_empty
    run.logger.download_file("ep1.pt", tmp_path / "back", progress_bar=False)
    run.close()

    assert moto.objects("artifacts") == {"ep1.pt": b"content"}
    assert (tmp_path / "back").read_bytes() == b"content"


def test_a_script_without_close_delivers_its_files(tmp_path):
    """At interpreter exit the engine closes destinations first, then uploads."""
    code = f"""
from pathlib import Path
from destinations import Artifacts, TextFile
from destinations.testing import DryRun
run = DryRun(Artifacts({str(tmp_path / "store")!r}, spool={str(tmp_path / "spool")!r}, free_bytes=0),
             TextFile({str(tmp_path / "log.txt")!r}, remote_file_name="log.txt"))
run.init()
run.logger.log_metrics({{"loss": 0.5}})
"""
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=300, env=os.environ | {"PYTHONPATH": str(root)}
    )

    assert files_in(tmp_path / "store") == {"dry-run/log.txt": b"[metric][batch=0]: loss: 0.5\n"}


def test_a_file_without_a_destination_is_not_found(make_artifacts, tmp_path):
    """The error names the file."""
    run = DryRun(make_artifacts())
    run.init()

    with pytest.raises(FileNotFoundError, match=r"nothing\.bin"):
        run.logger.download_file("nothing.bin", tmp_path / "back", progress_bar=False)

    run.close()


@pytest.mark.parametrize(
    ("store", "options", "message"),
    [
        ("s4://host/x", {}, "no store for"),
        ("store", {"wait": "maybe"}, "wait must be 'spooled' or 'uploaded'"),
        ("store", {"remote_file_name": "fixed"}, "remote_file_name must contain"),
        ("store", {"log_interval": "10"}, "time must be a number with a unit"),
    ],
)
def test_mistakes_raise_in_the_constructor(make_artifacts, store, options, message):
    """The error doesn't wait for the first checkpoint."""
    with pytest.raises(ValueError, match=message):
        make_artifacts(store, **options)


@pytest.mark.parametrize(
    ("files", "size", "is_shown"), [(2, 1 << 20, False), (3, 7, False), (3, 1 << 20, True)]
)
def test_the_upload_bar_needs_many_files_or_bytes(tmp_path, capsys, monkeypatch, files, size, is_shown):
    """Two files, or seven bytes, show no bar, however long they take."""
    monkeypatch.setattr("destinations.artifacts._SECONDS_BEFORE_A_BAR", 0.0)
    unreachable = "s3://bucket/prefix?endpoint_url=http://127.0.0.1:9"
    queue = {"spool": tmp_path / "spool", "isolation": "threads", "timeouts": Timeouts(give_back_seconds=0.0)}
    run = DryRun(Artifacts(unreachable, close_seconds=0.1, **queue), max_duration="1ba")
    run.init()
    (tmp_path / "file").write_bytes(b"x" * size)
    for number in range(files):
        run.logger.upload_file(f"file{number}", tmp_path / "file")

    run.close()

    assert ("Uploads:" in capsys.readouterr().err) == is_shown


def test_runs_in_one_store_keep_their_files_apart(tmp_path):
    """Each run's files and checkpoints are below its name; one run reads another's by that name."""
    for name in ("first", "second"):
        (tmp_path / "ep1.pt").write_text(name)
        artifacts = Artifacts(tmp_path / "store", spool=tmp_path / "spool", wait="uploaded")
        with Run(loggers=[artifacts], run_name=name) as run:
            run.upload_file("checkpoints/ep1.pt", tmp_path / "ep1.pt")
            run.upload_file("{run_name}/own.pt", tmp_path / "ep1.pt")
            artifacts.queue.drain(60)
            run.download_file("checkpoints/ep1.pt", tmp_path / f"own of {name}")
            run.download_file("first/checkpoints/ep1.pt", tmp_path / f"first for {name}")
            listed = artifacts.list_files("checkpoints/"), artifacts.list_files("first/checkpoints/")

    assert files_in(tmp_path / "store") == {
        f"{name}/{file}": name.encode()
        for name in ("first", "second")
        for file in ("checkpoints/ep1.pt", "own.pt")
    }
    assert [(tmp_path / f"{what} second").read_text() for what in ("own of", "first for")] == [
        "second",
        "first",
    ]
    assert listed == (["checkpoints/ep1.pt"], ["first/checkpoints/ep1.pt"])


def test_a_store_without_credentials_is_not_waited_for(tmp_path, caplog, monkeypatch):
    """The reason is logged, the files stay in the spool, and close takes less than half a minute."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model.pt").write_bytes(b"weights")
    # Forever, if the run waited for it.
    artifacts = Artifacts(
        "s3://bucket/x", spool=tmp_path / "spool", isolation="threads", close_seconds=math.inf
    )

    with caplog.at_level("WARNING"), Run(loggers=[artifacts], run_name="mine") as run:
        run.upload_file("model.pt", tmp_path / "model.pt")

    assert "Unable to locate credentials" in caplog.text
    assert f"destinations uploads resume {tmp_path / 'spool'}" in caplog.text
