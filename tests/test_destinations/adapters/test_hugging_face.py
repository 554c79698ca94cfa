"""Our callback in a real Hugging Face trainer, on a tiny model with random weights."""

import json
import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from destinations import Artifacts, InMemory, RunDirectory
from events import Event

pytestmark = [
    pytest.mark.xdist_group("transformers"),
    # torch's own loader warns on a machine without an accelerator.
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
]
SAMPLES = [{"input_ids": torch.arange(4) + index, "labels": torch.tensor(index % 2)} for index in range(8)]


# Imported in functions: each process that runs tests imports all of these files.


def make_callback(*destinations, **options):
    """Returns our callback."""
    from destinations.adapters.hugging_face import TransformersCallback

    return TransformersCallback(*destinations, **options)


def make_model():
    """Returns a randomly initialized model of a few hundred weights; nothing is downloaded."""
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=20,
            hidden_size=4,
            num_hidden_layers=1,
            num_attention_heads=1,
            intermediate_size=4,
            max_position_embeddings=8,
        )
    )


def make_trainer(callback, folder, **arguments):
    """Returns a trainer of two steps per epoch, which logs each step."""
    from transformers import Trainer, TrainingArguments

    return Trainer(
        make_model(),
        TrainingArguments(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=2,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            logging_steps=1,
            dataloader_pin_memory=False,
            **{
                "num_train_epochs": 1,
                "gradient_accumulation_steps": 2,
                "save_strategy": "no",
                **arguments,
            },
        ),
        train_dataset=SAMPLES,
        eval_dataset=SAMPLES,
        callbacks=[callback],
        compute_metrics=lambda _: {"accuracy": 0.5, "confusion": [[1, 2], [3, 4]]},
    )


STEP = [
    ("batch_start", 0),
    ("before_train_batch", 0),
    ("after_backward", 0),
    ("after_backward", 0),
    ("after_train_batch", 0),
    ("batch_end", 1),
    ("batch_checkpoint", 1),
]


def test_train_evaluate_and_predict(tmp_path, listener, sidecar, documented):
    """Events come in order, records have Hugging Face's names and steps, and the evaluation is in the run."""
    memory = InMemory()
    with make_callback(RunDirectory(tmp_path / "run"), memory, callbacks=listener, raise_errors=True) as ours:
        trainer = make_trainer(ours, tmp_path, eval_strategy="epoch", save_strategy="epoch")
        trainer.train()
        after_train, status = list(listener.heard), ours.logger.destinations[0].run_dir
        listener.heard.clear()
        trainer.evaluate()
        trainer.predict(SAMPLES)

    assert status == tmp_path / "run"
    assert after_train == [
        *[(name, 0, 0) for name in ("init", "before_load", "after_load", "fit_start", "epoch_start")],
        *[(name, batch, 0) for name, batch in STEP],
        *[(name, batch + 1, 0) for name, batch in STEP],
        ("epoch_end", 2, 1),
        *[
            (name, 2, 1)
            for name in ("eval_before_all", "eval_start", "eval_batch_end", "eval_end", "eval_after_all")
        ],
        ("epoch_checkpoint", 2, 1),
        ("fit_end", 2, 1),
    ]
    assert listener.names == [
        "eval_standalone_start",
        "eval_start",
        "eval_end",
        "eval_standalone_end",
        "predict_start",
        "predict_end",
    ]
    assert {name for name, *_ in after_train} | set(listener.names) == documented("Hugging Face")
    metrics = [record for record in memory.records if record.kind == "metrics"]
    assert [(record.step, max(record.value)) for record in metrics[:2]] == [
        (1, "train/loss"),
        (2, "train/loss"),
    ]
    assert [record.step for record in metrics if "eval/loss" in record.value] == [2, 2]
    assert [record.step for record in metrics if "test/loss" in record.value] == [2]
    assert metrics[0].value["epoch"] == 0.5
    traces = [record.value for record in memory.records if record.kind == "traces"]
    assert traces[0] == {"eval/confusion": [[1, 2], [3, 4]]}
    assert memory.hyperparameters["args"]["gradient_accumulation_steps"] == 2
    assert memory.hyperparameters["model"]["hidden_size"] == 4
    assert memory.records[-1].timestamp.sample.value == 8
    written = sidecar(tmp_path / "run")
    assert written["status"] == "completed"
    assert written["checkpoint_path"] == str(tmp_path / "out" / "checkpoint-2")


def test_an_exception_in_train_fails_the_run(tmp_path, raising, sidecar):
    """Hugging Face has no hook for it, so the `with` block reports it."""
    callbacks = [raising(Event.BATCH_END, ValueError("diverged"))]
    ours = make_callback(RunDirectory(tmp_path / "run"), callbacks=callbacks)
    trainer = make_trainer(ours, tmp_path)

    with pytest.raises(ValueError, match="diverged"), ours:
        trainer.train()

    written = sidecar(tmp_path / "run")
    assert (written["status"], written["exception"]) == ("failed", "ValueError: diverged")


def test_resume_continues_at_the_checkpoint(tmp_path, listener):
    """Batch and epoch continue from the checkpoint.

    Later rows leave the CSV; rows of its own step stay.
    """
    folder = tmp_path / "run"
    options = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1}
    with make_callback(RunDirectory(folder), raise_errors=True) as ours:
        make_trainer(ours, tmp_path, **options).train()

    with make_callback(RunDirectory(folder), callbacks=listener, raise_errors=True) as ours:
        make_trainer(ours, tmp_path, **options).train(
            resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1")
        )

    assert ("fit_start", 1, 0) in listener.heard
    # The run resumes inside the first epoch, so that epoch doesn't start again.
    assert [one for one in listener.heard if one[0] == "epoch_start"] == [("epoch_start", 2, 1)]
    assert listener.heard[-1] == ("fit_end", 4, 2)
    rows = (folder / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("train/loss")
    assert [line.split(",")[0] for line in rows[1:] if line.split(",")[column]] == ["1", "2", "3", "4"]
    saved = json.loads((tmp_path / "out" / "checkpoint-1" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["TransformersCallback"]["args"] == {}


def steps_and_losses(folder):
    """Returns the steps of the rows with a training loss."""
    header, *rows = (folder / "metrics.csv").read_text().splitlines()
    column = header.split(",").index("train/loss")
    return [line.split(",")[0] for line in rows if line.split(",")[column]]


def test_a_second_train_is_its_own_run(tmp_path, sidecar, caplog):
    """It's written next to the completed first run, which keeps its rows; a message names its folder."""
    with make_callback(RunDirectory(tmp_path / "run"), raise_errors=True) as ours:
        make_trainer(ours, tmp_path).train()
        make_trainer(ours, tmp_path).train()

    assert f"it is the run 'run-2' in {tmp_path / 'run-2'}" in caplog.text
    for name in ("run", "run-2"):
        assert steps_and_losses(tmp_path / name) == ["1", "2"]
        assert sidecar(tmp_path / name)["status"] == "completed"
        assert not (tmp_path / name / "abandoned").exists()


def test_a_second_train_may_continue_the_first(tmp_path, sidecar, listener):
    """Its steps follow the first one's, and no row of the first is abandoned."""
    with make_callback(
        RunDirectory(tmp_path / "run"), callbacks=listener, second_train="continue", raise_errors=True
    ) as ours:
        make_trainer(ours, tmp_path).train()
        make_trainer(ours, tmp_path).train()
    with pytest.raises(ValueError, match='"new" or "continue"'):
        make_callback(second_train="again")

    assert steps_and_losses(tmp_path / "run") == ["1", "2", "3", "4"]
    assert [batch for name, batch, _ in listener.heard if name == "fit_start"] == [0, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    assert not list((tmp_path / "run").glob("abandoned/*"))


def test_each_trial_of_a_search_is_a_run(tmp_path, sidecar):
    """Three trials are three runs of one group, each with its parameters; a second search adds more."""
    pytest.importorskip("optuna", reason="the search of Hugging Face needs a backend")
    ours = make_callback(RunDirectory(tmp_path / "search"), raise_errors=True)
    trainer = make_trainer(ours, tmp_path)
    trainer.model_init = make_model

    trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2)},
        compute_objective=lambda metrics: metrics["eval_loss"],
        n_trials=3,
        backend="optuna",
    )
    ours.close()

    runs = sorted(path for path in tmp_path.iterdir() if path.name != "out")
    assert [path.name for path in runs] == ["search-trial-0", "search-trial-1", "search-trial-2"]
    written = [sidecar(path) for path in runs]
    assert [(one["status"], one["tags"]) for one in written] == [("completed", ["sweep:search"])] * 3
    rates = {one["hparams"]["trial.learning_rate"] for one in written}
    assert len(rates) == 3
    assert [steps_and_losses(path) for path in runs] == [["1", "2"]] * 3


def test_checkpoints_are_uploaded_without_a_second_copy(tmp_path, slow_store, inodes):
    """Each file is uploaded from a link, with trainer_state.json last; rotated checkpoints arrive whole."""
    artifacts = Artifacts(slow_store, spool=tmp_path / "spool", free_bytes=0, progress_bar=False)
    with make_callback(artifacts, upload_checkpoints=True, raise_errors=True, run_name="mine") as callback:
        settings = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "max_steps": 2}
        make_trainer(callback, tmp_path, **settings).train()

        assert inodes(tmp_path / "out/checkpoint-2") <= inodes(tmp_path / "spool")
        assert not (tmp_path / "out/checkpoint-1").exists()
        slow_store.may_put.set()

    names = [one.name for one in slow_store.list("")]
    saved = sorted(path.name for path in (tmp_path / "out/checkpoint-2").iterdir())
    assert names == [f"mine/checkpoints/checkpoint-{step}/{name}" for step in (1, 2) for name in saved]
    for step in (1, 2):
        folder = slow_store.root / f"mine/checkpoints/checkpoint-{step}"
        assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == step
