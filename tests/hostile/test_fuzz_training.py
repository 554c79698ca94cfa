"""Damaged checkpoints, flight records and durations are read, or raise an error of their package."""

import contextlib
import json
import zlib

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from destinations.runs.content.checkpoints import list_checkpoints
from destinations.runs.content.flight import FLIGHT_FOLDER, describe_flights, read_flights
from events import (
    CheckpointError,
    FlightRecorder,
    Interval,
    Time,
    TimeStringError,
    Trainer,
    read_checkpoint,
)
from tests.hostile.fuzzing import changed, changed_text, damaged, fuzz, limit

__all__ = ["limit"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns a folder with a single-file checkpoint, a sharded one, and a flight record of an exception."""
    folder = tmp_path_factory.mktemp("trained")

    def loss_fn(outputs, targets):
        if trainer.state.timestamp.batch == 4:
            raise ValueError("no loss")
        return torch.nn.functional.mse_loss(outputs, targets)

    for name in ("whole", "sharded"):
        model = torch.nn.Linear(3, 1)
        trainer = Trainer(
            model,
            DataLoader(TensorDataset(torch.randn(12, 3), torch.randn(12, 1)), batch_size=2),
            max_duration="6ba",
            loss_fn=loss_fn,
            optimizers=torch.optim.Adam(model.parameters()),
            callbacks=[FlightRecorder(folder=folder / FLIGHT_FOLDER)],
            save_folder=folder / name,
            save_interval="2ba",
            save_sharded=name == "sharded",
            device="cpu",
        )
        with pytest.raises(ValueError, match="no loss"), trainer:
            trainer.fit()
    return folder


def read(path):
    """Reads a checkpoint with torch and without; the readers may refuse it."""
    with contextlib.suppress(CheckpointError, FileNotFoundError):
        assert read_checkpoint(path)["version"] == 1
    for one in list_checkpoints(
        str(path.parent.parent if path.name == "manifest.json" else path.parent), str
    ):
        assert "/" not in one.name


class Content:
    """Bytes that hypothesis prints abbreviated."""

    def __init__(self, content):
        self.content = content

    def __repr__(self):
        return f"Content of {len(self.content)} bytes"


@pytest.mark.parametrize("kind", ["manifest.json", ".metadata", "rank-0.pt", "__0_0.distcp", "whole"])
def test_a_damaged_checkpoint_is_read_or_refused(trained, kind):
    """The bytes of a file are damaged; a CRC-32 in the manifest is corrected to match."""
    if kind == "whole":
        (path,) = (trained / "whole").glob("*ba2.pt")
        manifest = path
    else:
        (manifest,) = (trained / "sharded").glob("*ba2/manifest.json")
        path = manifest.with_name(kind)
    content, description = path.read_bytes(), manifest.read_bytes()
    contents = damaged(content).map(Content)
    if kind == "manifest.json":
        contents |= changed_text(content).map(Content)

    @fuzz(60)
    @example(Content(content.replace(b'"size": ', b'"size": 1e999, "": ')))
    @given(contents)
    def check(data):
        path.write_bytes(data.content)
        if manifest != path:
            fitting = json.loads(description)
            fitting["files"][kind] = {"size": len(data.content), "crc32": zlib.crc32(data.content)}
            manifest.write_text(json.dumps(fitting))
        read(manifest)

    try:
        check()
    finally:
        path.write_bytes(content)
        manifest.write_bytes(description)


def test_a_damaged_flight_record_is_described_or_left_out(trained):
    """Its description is lines of text."""
    path = trained / FLIGHT_FOLDER / "rank-0.json"
    content = path.read_bytes()
    assert [one.reason for one in read_flights(path.parent)] == ["exception"]

    @fuzz(200)
    @given(damaged(content) | changed(json.loads(content)).map(lambda one: json.dumps(one).encode()))
    def check(data):
        path.write_bytes(data)
        flights = read_flights(path.parent)
        assert all(isinstance(step, dict) for one in flights for step in one.steps)
        assert all(isinstance(line, str) for line in describe_flights(flights))

    try:
        check()
    finally:
        path.write_bytes(content)


PARTS = st.sampled_from(
    [
        *("1", "0", "-", "+", ".", "e", "_", "9" * 400, "e9", "e999999999", "e-999", "inf", "nan", "٣", " "),
        *("ep", "ba", "sp", "tok", "dur", "sec", "iter", "s", "m", "h", "d", "EP", "\n"),
    ]
)


@fuzz(400)
@given(st.text(max_size=8) | st.lists(PARTS, max_size=6).map("".join))
@example("1e999999999ep")
@example("9" * 400 + "h")
def test_any_duration_is_parsed_or_raises(text):
    """A parsed time survives a round trip; other texts raise TimeStringError. Intervals do the same."""
    with contextlib.suppress(TimeStringError):
        time = Time.from_timestring(text)
        assert Time.from_timestring(str(time)) == time
    with contextlib.suppress(TimeStringError):
        assert Interval(text).time.value > 0
