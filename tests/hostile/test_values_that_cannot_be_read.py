"""Values that raise, never end or contain themselves raise at the call, or are replaced by a text.

Their siblings are kept.
"""

import contextlib
import json
import math
import os

import numpy as np
import pytest
import torch
import yaml

from destinations import InMemory, RunDirectory
from destinations.run_directory import read_series
from events import RecordError, Run, plain_config


@pytest.fixture(autouse=True)
def _outside_of_any_repository(tmp_path, monkeypatch):
    """Spares each run the three programs that describe its environment."""
    monkeypatch.chdir(tmp_path)


class Bad:
    """An object that raises whenever it's converted to a text."""

    def __repr__(self):
        raise ValueError("no repr")

    __str__ = __len__ = __iter__ = __float__ = __index__ = __repr__


class BadAttributes:
    """An object whose attributes raise something other than AttributeError."""

    def __getattr__(self, name):
        raise ValueError(f"no {name}")


class BadMapping(dict):
    """A dict that can't be iterated over."""

    def items(self):
        raise OSError("no items")

    keys = values = __iter__ = items


def _cyclic():
    cyclic = {"a": 1}
    cyclic["again"] = cyclic
    return cyclic


def _deep():
    deep = {}
    for _ in range(5000):
        deep = {"a": deep}
    return deep


NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
META = torch.empty(3, 4, 4, device="meta")
UNREADABLE = {
    "bad texts": Bad(),
    "bad attributes": BadAttributes(),
    "nested tensor": NESTED,
    "meta tensor": META,
    "bad mapping": BadMapping(a=1),
    "cyclic": _cyclic(),
    "deep": _deep(),
    "complex": np.complex64(1j),
    "object array": np.array([object()]),
}
CALLS = {
    "log_images": lambda run, value: run.log_images(value),
    "log_images masks": lambda run, value: run.log_images(np.zeros((4, 4)), masks={"m": value}),
    "log_images labels": lambda run, value: run.log_images(np.zeros((4, 4)), mask_class_labels=value),
    "log_audio": lambda run, value: run.log_audio(value, 16000),
    "log_audio rate": lambda run, value: run.log_audio(np.zeros(4), value),
    "log_video": lambda run, value: run.log_video(value, 30),
    "log_video fps": lambda run, value: run.log_video(np.zeros((2, 3, 4, 4)), value),
    "log_histogram": lambda run, value: run.log_histogram(value),
    "log_histogram bins": lambda run, value: run.log_histogram([1.0], bins=value),
    "log_point_cloud": lambda run, value: run.log_point_cloud(value),
    "log_point_cloud colors": lambda run, value: run.log_point_cloud(np.zeros((2, 3)), colors=value),
    "log_table rows": lambda run, value: run.log_table(["a"], value),
    "log_table columns": lambda run, value: run.log_table(value, [[1]]),
    "log_text": lambda run, value: run.log_text(value),
    "log_text name": lambda run, value: run.log_text("x", name=value),
    "log_text step": lambda run, value: run.log_text("x", step=value),
    "log_scalar": lambda run, value: run.log_scalar("x", value),
    "log_scalar name": lambda run, value: run.log_scalar(value, 1.0),
    "log_scalar step": lambda run, value: run.log_scalar("x", 1.0, step=value),
    "namespace": lambda run, value: run.namespace(value).__enter__(),
}


@pytest.mark.parametrize("value", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_unreadable_value_raises_at_the_call_only(call, value):
    """The loop continues, `strict` raises RecordError, and the next record is accepted."""
    for strict in (False, True):
        memory = InMemory()

        with Run(memory, run_name="r", strict=strict) as run:
            with contextlib.suppress(*([RecordError] if strict or call is CALLS["namespace"] else [])):
                call(run, value)
            run.log_metrics({"loss": 1.0}, 0)

        assert memory.get_timeseries("loss")["loss"].tolist() == [1.0]
        assert run.logger.faults.counts == {}


@pytest.mark.parametrize("value", UNREADABLE.values(), ids=UNREADABLE)
def test_an_unreadable_metric_affects_only_itself(value, tmp_path):
    """The other metrics of the call are logged."""
    with Run(RunDirectory(tmp_path / "run"), run_name="r", strict=True) as run:
        run.batch_start()
        with pytest.raises(RecordError):
            run.log_metrics({"before": 1.0, "bad": value, "after": 2.0}, 0)

    assert read_series(tmp_path / "run", "before") == [(0, 1.0)]
    assert read_series(tmp_path / "run", "after") == [(0, 2.0)]


@pytest.mark.parametrize("bins", [10**9, 10**30, np.arange(200_000)], ids=["1e9", "1e30", "edges"])
def test_a_histogram_of_too_many_bins_raises(bins):
    """Its counts alone would fill memory and disk."""
    with (
        Run(InMemory(), run_name="r", strict=True) as run,
        pytest.raises(RecordError, match="at most 100,000 bins"),
    ):
        run.log_histogram([1.0, 2.0], bins=bins)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_an_endless_file_raises(kind, tmp_path):
    """A pipe without a writer would block the loop forever, and /dev/zero would fill memory."""
    path = {"pipe": tmp_path / "pipe", "device": "/dev/zero", "folder": tmp_path}[kind]
    if kind == "pipe":
        os.mkfifo(path)

    with Run(RunDirectory(tmp_path / "run"), run_name="r", strict=True) as run:
        for call in (
            lambda: run.log_audio(path, 16000),
            lambda: run.log_video(path),
            lambda: run.log_images([path]),
            lambda: run.upload_file("name", path),
        ):
            with pytest.raises(
                (RecordError, IsADirectoryError), match=r"regular file|must be a file|is a directory"
            ):
                call()


NO_FILES = [
    (None, "f"),
    (Bad(), "f"),
    (b"n", "f"),
    (3, "f"),
    ("n", None),
    ("n", Bad()),
    ("n", 3),
    ("n", "f\0"),
]


@pytest.mark.parametrize(("name", "path"), [*NO_FILES, ("n", "x" * 5000)], ids=lambda _: "")
def test_a_file_without_a_name_or_a_path_raises_at_the_call(name, path, tmp_path):
    """Uploads and downloads refuse it; the next file is accepted."""
    (tmp_path / "f").write_text("x")

    with Run(RunDirectory(tmp_path / "run"), run_name="r", strict=True) as run:
        with pytest.raises(RecordError):
            run.upload_file(name, path)
        run.upload_file("good", tmp_path / "f")
        with pytest.raises((RecordError, FileNotFoundError)):
            run.download_file(name, path)

    assert [path.name for path in (tmp_path / "run" / "artifacts").iterdir()] == ["good"]
    assert run.logger.faults.counts == {}


HYPERPARAMETERS = {
    **UNREADABLE,
    "complex array": np.array([1j, 2.0]),
    "complex tensor": torch.tensor([1j]),
    "function": os.path.join,
    "lambda": lambda: None,
    "device": torch.device("cpu"),
    "dtype": torch.float32,
    "huge integer": 10**5000,
    "surrogates": "\udc80\ud800",
    "NUL": "a\0b",
    "nan": math.nan,
    "bytes": b"\xff",
    "date": np.datetime64("2026-01-01"),
    "set": {1, "a", None},
    "keys": {(1, 2): 1, None: 2, 1.5: 3, Bad(): 4},
    "class": int,
    "module": os,
}


@pytest.mark.parametrize("value", HYPERPARAMETERS.values(), ids=HYPERPARAMETERS)
def test_hyperparameters_of_any_kind_are_written_with_their_siblings(value, tmp_path, caplog):
    """`hparams.yaml` and the sidecar have the other hyperparameters, and the run is completed."""
    with Run(RunDirectory(tmp_path / "run"), run_name="r", strict=True) as run:
        run.log_hyperparameters({"before": 1, "odd": value, "lists": [value], "after": {"lr": 0.1}})
        run.log_metrics({"loss": 1.0})

    written = yaml.safe_load((tmp_path / "run" / "hparams.yaml").read_text("utf-8"))
    sidecar = json.loads((tmp_path / "run" / "sidecar.json").read_text("utf-8"))
    assert (written["before"], written["after"]) == (1, {"lr": 0.1})
    assert (sidecar["hparams"]["before"], sidecar["hparams"]["after.lr"]) == (1, 0.1)
    assert sidecar["status"] == "completed"
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_hyperparameters_that_contain_themselves_are_marked():
    """The others are unchanged."""
    assert plain_config(_cyclic()) == {"a": 1, "again": "<dict that contains itself>"}


def test_hyperparameters_given_to_the_destination_itself_are_made_plain(tmp_path):
    """Composer's logger passes them that way."""
    destination = RunDirectory(tmp_path / "run")
    with Run(destination, run_name="r", strict=True):
        destination.log_hyperparameters({"odd": np.complex64(1j), "lr": 0.1})

    sidecar = json.loads((tmp_path / "run" / "sidecar.json").read_text("utf-8"))
    assert (sidecar["status"], sidecar["hparams"]) == ("completed", {"odd": "1j", "lr": 0.1})
