"""Tests exporting the trained model in a form that needs none of its code."""

import logging

import pytest
import torch

from destinations.testing import RecordingDestination
from events import ExportForInferenceCallback


def test_a_model_is_exported_and_uploaded_when_training_ends(make_trainer, tmp_path):
    """It computes what the model computes, in evaluation mode."""
    store = RecordingDestination(stores_files=True)
    callback = ExportForInferenceCallback(save_path=f"{tmp_path}/{{run_name}}/model.pt2")
    trainer = make_trainer(callbacks=callback, loggers=store, max_duration="1ep")
    trainer.fit()

    path = tmp_path / "test/model.pt2"
    assert store.files[str(path).strip("/")] == path.read_bytes()
    model, points = trainer.state.model, torch.randn(4, 3)
    assert model.training
    loaded = torch.export.load(path).module()
    assert torch.allclose(loaded(points), model.eval()(points))


def test_a_model_that_cannot_be_exported_is_reported(make_trainer, tmp_path, caplog):
    """The run ends normally."""

    def refuse(model):
        raise TypeError("not this one")

    callback = ExportForInferenceCallback(save_path=str(tmp_path / "model.pt2"), transforms=[refuse])
    trainer = make_trainer(callbacks=callback, max_duration="1ba")
    trainer.fit()

    (error,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert error.getMessage() == "could not export the model: TypeError: not this one"
    assert trainer.state.status == "completed"
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_be_written_is_reported(make_trainer, tmp_path, caplog):
    """A folder that cannot be made does not end the run as failed."""
    (tmp_path / "file").write_text("")
    callback = ExportForInferenceCallback(save_path=str(tmp_path / "file/model.pt2"))
    trainer = make_trainer(callbacks=callback, max_duration="1ba")
    trainer.fit()

    (error,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert error.getMessage().startswith("could not export the model: ")
    assert trainer.state.status == "completed"


def test_an_export_replaces_an_older_one_in_one_step(make_trainer, tmp_path, monkeypatch):
    """While the new file is written, a reader still finds the old one, whole."""
    path = tmp_path / "model.pt2"
    path.write_bytes(b"the old one")
    save, seen = torch.export.save, []

    def watched(program, target):
        save(program, target)
        seen.append(path.read_bytes())

    monkeypatch.setattr(torch.export, "save", watched)
    trainer = make_trainer(callbacks=ExportForInferenceCallback(save_path=str(path)), max_duration="1ba")
    trainer.fit()

    assert seen == [b"the old one"]
    assert torch.export.load(path).module()(torch.randn(4, 3)).shape == (4, 2)
    assert list(tmp_path.iterdir()) == [path]


def test_other_formats_are_refused():
    """The error names the supported format."""
    with pytest.raises(
        ValueError, match=r"save_format must be 'torch\.export', got 'onnx'.*torch.onnx.export"
    ):
        ExportForInferenceCallback("onnx", "model.onnx")
