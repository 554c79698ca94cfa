"""Checkpoints of weights alone, and a new run that begins with the weights of another."""

import pytest
import safetensors.torch
import torch

from events import CheckpointError, LoadCheckpoint, export_weights


@pytest.fixture
def saved(make_trainer, tmp_path):
    """A whole checkpoint after ten batches."""
    make_trainer(save_folder=tmp_path / "old").fit()
    return tmp_path / "old" / "ep2-ba10.pt"


def weights(trainer):
    """Returns copies of the weights of the model."""
    return {name: value.clone() for name, value in trainer.state.model.state_dict().items()}


def test_a_new_run_begins_with_the_weights(make_trainer, saved, tmp_path):
    """At batch 0, with an optimizer that has seen nothing, and may save where it likes."""
    trainer = make_trainer(load_path=saved, load_weights_only=True, save_folder=tmp_path / "new")

    loaded = weights(trainer)

    reference = torch.load(saved, weights_only=True)["model"]
    assert all(torch.equal(loaded[name], value) for name, value in reference.items())
    assert trainer.state.timestamp.batch == 0
    assert not trainer.state.optimizers[0].state
    trainer.fit()
    assert trainer.state.timestamp.batch == 10


def test_excluded_weights_stay_as_they_were(make_trainer, saved):
    """A new head is put on an old body."""
    fresh = weights(make_trainer())

    trainer = make_trainer(load_path=saved, load_weights_only=True, load_exclude=["2.*"])

    loaded = weights(trainer)
    assert torch.equal(loaded["2.weight"], fresh["2.weight"])
    assert not torch.equal(loaded["0.weight"], fresh["0.weight"])


def test_a_pattern_that_matches_nothing_is_refused(make_trainer, saved):
    """It is a typo that would go unnoticed."""
    with pytest.raises(ValueError, match=r"'head' matches none\. There are 0\.weight, 0\.bias"):
        make_trainer(load_path=saved, load_weights_only=True, load_exclude=["head"])


def test_mismatched_names_raise_or_are_reported(make_trainer, saved, tmp_path, caplog):
    """With load_strict=False the rest is loaded."""
    checkpoint = torch.load(saved, weights_only=True)
    checkpoint["model"]["3.weight"] = checkpoint["model"].pop("2.weight")
    torch.save(checkpoint, tmp_path / "other.pt")

    with pytest.raises(CheckpointError, match=r"no '2\.weight'; '3\.weight', which the model has not"):
        make_trainer(load_path=tmp_path / "other.pt", load_weights_only=True)
    make_trainer(load_path=tmp_path / "other.pt", load_weights_only=True, load_strict=False)

    assert "no '2.weight'; '3.weight', which the model has not" in caplog.text


def test_weights_alone_are_saved_and_loaded_but_not_resumed_from(make_trainer, saved, tmp_path):
    """The file holds the model; resuming from it raises with advice."""
    make_trainer(save_folder=tmp_path / "new", save_weights_only=True).fit()
    path = tmp_path / "new" / "ep2-ba10.pt"

    assert path.stat().st_size < saved.stat().st_size / 2
    assert make_trainer(load_path=path, load_weights_only=True).state.timestamp.batch == 0
    with pytest.raises(CheckpointError, match=r"got the weights alone\. Pass load_weights_only=True"):
        make_trainer(load_path=path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"load_strict": False}, "load_strict=False needs load_weights_only=True"),
        ({"load_exclude": ["x"]}, "load_exclude needs load_weights_only=True"),
        ({"load_exclude": "x"}, r"load_exclude must be a list of patterns, got 'x'. Write \['x'\]"),
        ({"load_weights_only": True}, "load_weights_only needs load_path"),
        ({"save_weights_only": True, "autoresume": True, "save_folder": "x"}, "autoresume needs whole"),
    ],
)
def test_incompatible_arguments_are_refused_by_name(make_trainer, arguments, message):
    """The error comes before anything is set up."""
    with pytest.raises(ValueError, match=message):
        make_trainer(**arguments)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_weights_are_exported_for_other_programs(saved, tmp_path, name):
    """The model alone, by the names of its state; nothing else is left in the folder."""
    path = export_weights(saved.parent, tmp_path / "out" / name)

    load = safetensors.torch.load_file if name.endswith("safetensors") else torch.load
    reference = torch.load(saved, weights_only=True)["model"]
    loaded = load(path)
    assert loaded.keys() == reference.keys()
    assert all(torch.equal(loaded[name], value) for name, value in reference.items())
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]


def test_an_export_to_another_kind_of_file_is_refused(saved, tmp_path):
    """The error names the supported kinds."""
    with pytest.raises(ValueError, match=r"to a \.safetensors, \.pt or \.pth file, got 'model\.onnx'"):
        export_weights(saved, tmp_path / "model.onnx")


def test_a_callback_loads_weights_before_the_run_loads_its_own(make_trainer, saved, tmp_path):
    """Parts of several checkpoints make one model; a run that is resumed keeps what it has learned."""
    fresh, reference = weights(make_trainer()), torch.load(saved, weights_only=True)["model"]
    callback = LoadCheckpoint(saved, exclude=["2.*"])

    trainer = make_trainer(callbacks=[callback], save_folder=tmp_path / "new")
    loaded = weights(trainer)
    trainer.fit()
    trainer.close()
    learned = weights(trainer)
    again = make_trainer(
        callbacks=[LoadCheckpoint(saved)], save_folder=tmp_path / "new", autoresume=True, run_name="mine"
    )

    assert torch.equal(loaded["0.weight"], reference["0.weight"])
    assert torch.equal(loaded["2.weight"], fresh["2.weight"])
    assert all(torch.equal(value, learned[name]) for name, value in weights(again).items())


def test_a_callback_that_finds_no_checkpoint_stops_the_set_up(make_trainer, tmp_path):
    """The error has the name; patterns are a list."""
    with pytest.raises(FileNotFoundError, match=r"none\.pt"):
        make_trainer(callbacks=[LoadCheckpoint(tmp_path / "none.pt")])
    with pytest.raises(TypeError, match=r"must be a list of patterns, got '2\.\*'"):
        LoadCheckpoint("some.pt", exclude="2.*")


@pytest.mark.parametrize(
    "make", [lambda: torch.eye(2).to_sparse(), lambda: torch.zeros(2, dtype=torch.complex32)]
)
@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
def test_tensors_that_safetensors_has_not_are_refused_by_name(tmp_path, make):
    """Any other error would not say what to do."""
    torch.save({"version": 1, "model": {"a": make()}}, tmp_path / "a.pt")

    with pytest.raises(CheckpointError, match=r"a \.safetensors file .* Export to a \.pt file"):
        export_weights(tmp_path / "a.pt", tmp_path / "a.safetensors")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt"]
