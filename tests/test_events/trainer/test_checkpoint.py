"""Tests checkpoints on disk and as uploads, and that a resumed run equals an uninterrupted one."""

import errno
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from destinations import Artifacts, LoggerDestination
from events import (
    Callback,
    CheckpointError,
    CheckpointSaver,
    Engine,
    Event,
    Logger,
    RecordError,
    Retention,
    Run,
    State,
    Trainer,
    read_checkpoint,
)


def listing(folder):
    """Returns the names of all files in a folder, also hidden ones, except the lock of the run."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


class Uploads(LoggerDestination):
    """Takes files, and remembers in which order and what was in them."""

    def __init__(self):
        self.files = []

    def can_upload_files(self):
        return True

    def upload_file(self, state, remote_file_name, file_path, *, overwrite):
        self.files.append((remote_file_name, file_path.read_bytes(), overwrite))

    def download_file(self, remote_file_name, destination, overwrite=False, progress_bar=True):
        found = [content for name, content, _ in self.files if name == remote_file_name]
        if not found:
            raise FileNotFoundError(remote_file_name)
        with open(destination, "wb") as file:  # noqa: PTH123  # the contract says a string
            file.write(found[-1])


class TestSaving:
    """What CheckpointSaver writes."""

    def test_each_epoch_by_default_and_where_training_ends(self, make_trainer, tmp_path):
        """Checkpoints are named by epoch and batch, the pointer names the newest, nothing else is left."""
        trainer = make_trainer(max_duration="12ba", save_folder=tmp_path)

        trainer.fit()

        assert trainer.state.last_checkpoint == str(tmp_path / "ep2-ba12.pt")
        assert listing(tmp_path) == ["ep1-ba5.pt", "ep2-ba10.pt", "ep2-ba12.pt", "latest.symlink"]
        assert (tmp_path / "latest.symlink").read_text() == "test/checkpoints/ep2-ba12.pt"

    def test_an_iteration_is_saved_where_it_ends(self, make_trainer, tmp_path):
        """The checkpoint is from the end of its last epoch, not one batch later."""
        make_trainer(
            max_duration="4ep", iteration_length="2ep", save_interval="1iter", save_folder=tmp_path
        ).fit()

        assert listing(tmp_path) == ["ep2-ba10.pt", "ep4-ba20.pt", "latest.symlink"]

    def test_arguments_of_the_trainer_are_short_cuts_to_a_saver(self, make_trainer, tmp_path):
        """What it saves, and what a later trainer resumes from, are the same."""
        make_trainer(saver=CheckpointSaver(tmp_path, save_interval="2ba", keep=2), max_duration="9ba").fit()

        trainer = make_trainer(save_folder=tmp_path, autoresume=True)

        assert listing(tmp_path) == ["ep1-ba8.pt", "ep1-ba9.pt", "latest.symlink"]
        assert trainer.state.timestamp.batch == 9

    def test_a_new_run_does_not_save_over_another(self, make_trainer, tmp_path):
        """The folder of another run is refused, and its checkpoints stay."""
        make_trainer(save_folder=tmp_path).fit()
        before = listing(tmp_path)

        with pytest.raises(FileExistsError, match=r"must be new for a new run.* save_overwrite=True"):
            make_trainer(save_folder=tmp_path).fit()

        assert listing(tmp_path) == before

    def test_the_checkpoint_after_a_failed_one_replaces_those_before(self, make_trainer, tmp_path):
        """A disk error costs a checkpoint and not the run; older ones stay until then, and not longer."""
        (tmp_path / "ep0-ba4.pt").mkdir()
        seen = []

        class Looks(Callback):
            def batch_end(self, state, logger):
                if state.timestamp.batch == 5:
                    seen.extend(listing(tmp_path))

        make_trainer(
            save_folder=tmp_path,
            save_interval="2ba",
            max_duration="6ba",
            save_num_checkpoints_to_keep=1,
            callbacks=Looks(),
        ).fit()

        assert "ep0-ba2.pt" in seen
        (tmp_path / "ep0-ba4.pt").rmdir()
        assert listing(tmp_path) == ["ep1-ba6.pt", "latest.symlink"]
        assert (tmp_path / "latest.symlink").read_text() == "test/checkpoints/ep1-ba6.pt"

    def test_a_failed_save_where_training_ends_is_an_error(self, make_trainer, tmp_path):
        """No later checkpoint would make up for the last."""
        (tmp_path / "ep0-ba1.pt").mkdir()

        with pytest.raises(OSError, match="ep0-ba1") as raised:
            make_trainer(save_folder=tmp_path, save_interval="100ba", max_duration="1ba").fit()

        assert raised.value.errno in {errno.EISDIR, errno.ENOTEMPTY}

    def test_a_destination_whose_state_raises_is_omitted(self, make_trainer, tmp_path):
        """The checkpoint is saved without it."""

        class Forgetful(LoggerDestination):
            def state_dict(self):
                raise RuntimeError("what was it?")

        trainer = make_trainer(save_folder=tmp_path, loggers=Forgetful())

        trainer.fit()

        assert trainer.logger.faults.counts[("Forgetful", "state_dict", "RuntimeError")] == 2
        assert read_checkpoint(tmp_path / "latest.symlink")["callbacks"].keys() == {"CheckpointSaver"}


class RandomDataset(Dataset):
    """Draws from every generator that users draw from."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        noise = random.random() + np.random.rand() + torch.rand(1).item()  # noqa: NPY002  # as users do
        return torch.tensor([index, noise, 1.0]) / 10, index % 2


class TestResuming:
    """A resumed run equals one that was never interrupted, to the last bit."""

    def test_checkpoint_with_braces_in_its_path_is_loaded(self, make_trainer, tmp_path):
        """A path of an existing file is no template."""
        make_trainer(max_duration="1ep", save_folder=tmp_path / "a").fit()
        path = next((tmp_path / "a").glob("ep1*.pt")).rename(tmp_path / "{run_name}.pt")

        assert make_trainer(max_duration="2ep", load_path=path).state.timestamp.epoch == 1

    @pytest.mark.parametrize(
        ("at", "interval"),
        [("ep0-ba2", "1ba"), ("ep0-ba5", "1ba"), ("ep1-ba5", "1ep"), ("ep1-ba7", "1ba"), ("ep2-ba10", "1ep")],
    )
    def test_the_same_losses(self, make_trainer, metric_list, tmp_path, at, interval):
        """This holds if it stopped within an epoch, after its last batch, or after its end."""
        whole = type(metric_list)()
        make_trainer(
            max_duration="3ep", save_folder=tmp_path / "a", save_interval=interval, loggers=whole
        ).fit()
        # Another seed, so that unrestored state can't be the same by chance.
        resumed = make_trainer(
            max_duration="3ep", load_path=tmp_path / "a" / f"{at}.pt", seed=99, loggers=metric_list
        )

        resumed.fit()

        batch = int(at.rpartition("ba")[2])
        assert metric_list.series("loss/train/total") == whole.series("loss/train/total")[batch:]
        assert (
            metric_list.series("metrics/train_epoch/accuracy")[-1]
            == whole.series("metrics/train_epoch/accuracy")[-1]
        )

    # Where this process may use one processor only.
    @pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes:UserWarning")
    @pytest.mark.parametrize("settings", ["plain", "generator", "workers"])
    def test_the_same_data_and_weights(self, make_trainer, tmp_path, settings):
        """Augmentation may be in this process, use the dataloader's own generator, or be in workers."""

        def dataloader():
            generator = torch.Generator().manual_seed(5) if settings == "generator" else None
            workers = {"num_workers": 2, "multiprocessing_context": "fork"} if settings == "workers" else {}
            return DataLoader(RandomDataset(), batch_size=4, shuffle=True, generator=generator, **workers)

        common = {"max_duration": "2ep", "metrics": None}
        whole = make_trainer(
            train_dataloader=dataloader(), save_folder=tmp_path, save_interval="3ba", **common
        )
        whole.fit()
        resumed = make_trainer(
            train_dataloader=dataloader(), load_path=tmp_path / "ep0-ba3.pt", seed=99, **common
        )

        resumed.fit()

        for name, weight in whole.state.model.state_dict().items():
            assert torch.equal(weight, resumed.state.model.state_dict()[name]), name

    def test_autoresume_begins_where_there_is_nothing_and_continues_where_there_is(
        self, make_trainer, metric_list, tmp_path
    ):
        """The same command, started again, finishes the run."""
        settings = {"save_folder": tmp_path / "{run_name}", "save_interval": "3ba", "autoresume": True}

        class Dies(Callback):
            def batch_end(self, state, logger):
                if state.timestamp.batch == 5:
                    raise OSError("node failure")

        with pytest.raises(OSError, match="node failure"):
            make_trainer(callbacks=Dies(), **settings).fit()
        trainer = make_trainer(loggers=metric_list, **settings)
        trainer.fit()

        assert [step for step, _ in metric_list.series("loss/train/total")] == list(range(3, 10))
        assert trainer.state.timestamp.batch == 10

    def test_autoresume_of_a_finished_run_does_nothing(self, make_trainer, metric_list, tmp_path):
        """No batch is trained, nothing is saved again, the run completes."""
        settings = {"save_folder": tmp_path, "autoresume": True}
        with make_trainer(**settings) as trainer:
            trainer.fit()
        before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}

        with make_trainer(loggers=metric_list, **settings) as trainer:
            trainer.fit()

        assert metric_list.series("loss/train/total") == []
        assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before

    def test_autoresume_from_a_destination(self, make_trainer, metric_list, tmp_path):
        """On a new machine the pointer and its checkpoint are downloaded."""
        uploads = Uploads()
        with make_trainer(save_folder=tmp_path / "old", max_duration="1ep", loggers=uploads) as trainer:
            trainer.fit()

        make_trainer(save_folder=tmp_path / "new", autoresume=True, loggers=[uploads, metric_list]).fit()

        assert [step for step, _ in metric_list.series("loss/train/total")] == list(range(5, 10))
        assert listing(tmp_path / "new") == ["ep1-ba5.pt", "ep2-ba10.pt", "latest.symlink"]

    def test_callbacks_get_their_own_states_back(self, make_trainer, tmp_path):
        """Two callbacks of one class are told apart by their order."""

        class Counts(Callback):
            def __init__(self, by):
                self.by, self.count = by, 0

            def batch_end(self, state, logger):
                self.count += self.by

            def state_dict(self):
                return {"count": self.count}

            def load_state_dict(self, state):
                self.count = state["count"]

        make_trainer(save_folder=tmp_path, callbacks=[Counts(1), Counts(10)]).fit()
        one, ten = Counts(1), Counts(10)

        make_trainer(load_path=tmp_path / "latest.symlink", callbacks=[one, ten], max_duration="12ba").fit()

        assert (one.count, ten.count) == (12, 120)


class TestBadCheckpoints:
    """What cannot be loaded is refused before anything is changed by training."""

    def test_damaged(self, make_trainer, tmp_path):
        """Half a file says that it is no checkpoint."""
        make_trainer(save_folder=tmp_path).fit()
        whole = (tmp_path / "ep2-ba10.pt").read_bytes()
        (tmp_path / "half.pt").write_bytes(whole[: len(whole) // 2])

        with pytest.raises(CheckpointError, match=r"half\.pt' must be readable"):
            make_trainer(load_path=tmp_path / "half.pt")

    def test_foreign(self, make_trainer, tmp_path):
        """Bare weights belong into the model."""
        torch.save({"weight": torch.ones(1)}, tmp_path / "weights.pt")

        with pytest.raises(CheckpointError, match="must be of version 1, got None"):
            make_trainer(load_path=tmp_path / "weights.pt")

    def test_another_model(self, make_trainer, tmp_path):
        """The message names what does not fit."""
        make_trainer(save_folder=tmp_path).fit()
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)

        with pytest.raises(CheckpointError, match="must fit the trainer's model"):
            Trainer(
                model,
                optimizers=optimizer,
                schedulers=scheduler,
                load_path=tmp_path / "ep2-ba10.pt",
                device="cpu",
            )

    def test_another_number_of_optimizers(self, make_trainer, tmp_path):
        """The message counts."""
        make_trainer(save_folder=tmp_path).fit()

        with pytest.raises(CheckpointError, match="must fit the trainer's 0 optimizers, got 1"):
            make_trainer(load_path=tmp_path / "ep2-ba10.pt", optimizers=(), schedulers=())

    def test_code_in_a_checkpoint_is_not_run(self, make_trainer, tmp_path):
        """A pickle that would run something is refused."""
        torch.save({"version": 1, "callback": CheckpointSaver()}, tmp_path / "code.pt")

        with pytest.raises(CheckpointError, match=r"must be readable by torch\.load\(weights_only=True\)"):
            make_trainer(load_path=tmp_path / "code.pt")


def flip_a_bit(path):
    """Damages a file in its middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_loop_of_ones_own_saves_and_continues(tmp_path):
    """An `Engine` and a `CheckpointSaver` need no `Trainer`; the checkpoint is whole, and loads into one."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    state = State("mine", model=model, optimizers=optimizer)
    engine = Engine(state, Logger(state, []), [CheckpointSaver(tmp_path, save_interval="1ba", keep=1)])
    for event in (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START):
        engine.run_event(event)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        state.timestamp = state.timestamp.to_next_batch(1)
        engine.run_event(Event.BATCH_END)
        engine.run_event(Event.BATCH_CHECKPOINT)
    engine.run_event(Event.FIT_END)
    engine.close()

    assert listing(tmp_path) == ["ep0-ba2.pt", "latest.symlink"]
    again = torch.nn.Linear(3, 2)
    resumed = Trainer(
        again, optimizers=torch.optim.Adam(again.parameters()), load_path=tmp_path, device="cpu"
    )
    resumed.close()
    assert resumed.state.timestamp == state.timestamp
    assert again.weight.tolist() == model.weight.tolist()
    with (
        pytest.raises(ValueError, match="needs a model"),
        Run(callbacks=[CheckpointSaver(tmp_path / "b")]) as run,
    ):
        run.batch_start()


class TestNames:
    """Names of checkpoints, pointers and folders: which are accepted, and which refused."""

    @pytest.mark.parametrize("is_uri", [False, True], ids=["folder", "store"])
    def test_a_pointer_by_composers_name_is_a_pointer(self, make_trainer, tmp_path, monkeypatch, is_uri):
        """It gets the usual ending; a file that ends in ".pt" isn't a pointer."""
        monkeypatch.setenv("UPLOADS_HOME", str(tmp_path / "machine"))
        folder = tmp_path / "saved"
        arguments = {
            "save_folder": f"file://{folder}" if is_uri else folder,
            "save_latest_filename": "latest-rank{rank}.pt",
        }
        with make_trainer(**arguments) as trainer:
            trainer.fit()

        names = sorted(path.name for path in folder.iterdir())
        assert names == ["ep1-ba5.pt", "ep2-ba10.pt", "latest-rank0.pt.symlink"]
        assert make_trainer(autoresume=True, **arguments).state.timestamp.batch == 10

    @pytest.mark.parametrize("latest", [None, "newest.symlink"])
    def test_a_folder_without_the_usual_pointer_has_a_newest_too(self, make_trainer, tmp_path, latest):
        """The numbers in the names decide."""
        make_trainer(save_folder=tmp_path, save_latest_filename=latest).fit()

        assert read_checkpoint(tmp_path)["timestamp"]["batch"] == 10
        resumed = make_trainer(save_folder=tmp_path, save_latest_filename=latest, autoresume=True)
        assert resumed.state.timestamp.batch == 10
        with pytest.raises(FileExistsError, match="must be new for a new run"):
            make_trainer(save_folder=tmp_path, save_latest_filename=latest).fit()

    def test_two_runs_in_a_folder_each_resume_their_own(self, make_trainer, tmp_path, caplog):
        """This holds even if the newest is damaged."""

        def make(run_name, **arguments):
            return make_trainer(
                run_name=run_name,
                save_folder=tmp_path,
                save_filename="{run_name}-{batch}.pt",
                save_latest_filename="{run_name}.symlink",
                **arguments,
            )

        make("a").fit()
        make("a-b").fit()
        flip_a_bit(tmp_path / "a-10.pt")

        trainer = make("a", autoresume=True)

        assert trainer.state.last_checkpoint == str(tmp_path / "a-5.pt")
        assert "bad CRC-32" in caplog.text

    @pytest.mark.parametrize("content", ["", "../../elsewhere.pt", "test/checkpoints/gone.pt"])
    def test_a_damaged_pointer_costs_no_checkpoint(self, make_trainer, tmp_path, caplog, content):
        """The newest one by number is used, with a warning."""
        make_trainer(save_folder=tmp_path).fit()
        (tmp_path / "latest.symlink").write_text(content)

        assert make_trainer(save_folder=tmp_path, autoresume=True).state.timestamp.batch == 10
        assert "latest.symlink" in caplog.text or "gone.pt" in caplog.text

    @pytest.mark.parametrize("is_uri", [False, True], ids=["destination", "store"])
    def test_a_constant_name_replaces_the_uploads_of_this_run(
        self, make_trainer, tmp_path, monkeypatch, is_uri
    ):
        """The store has the newest; it had the first before, and refused the others."""
        monkeypatch.setenv("UPLOADS_HOME", str(tmp_path / "machine"))
        artifacts = Artifacts(tmp_path / "store", spool=tmp_path / "spool", free_bytes=0)
        folder = f"file://{tmp_path}/store/test/checkpoints" if is_uri else tmp_path / "saved"
        loggers = () if is_uri else artifacts

        with make_trainer(save_folder=folder, save_filename="model.pt", loggers=loggers) as trainer:
            trainer.fit()

        assert read_checkpoint(tmp_path / "store/test/checkpoints/model.pt")["timestamp"]["batch"] == 10

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"save_folder": "{runname}"}, ValueError, "did you mean {run_name}"),
            ({"save_filename": "b{bach}.pt"}, ValueError, "did you mean {batch}"),
            ({"save_filename": "e{epoch}/b.pt"}, ValueError, "filename must be a name without folders"),
            ({"save_filename": "{run_name}.pt", "run_name": "a/b"}, ValueError, "must be a name without"),
            ({"run_name": ".."}, RecordError, "leads out of the folder"),
            ({"save_folder": Path("s3://bucket/x")}, ValueError, "must be given as a text, not as a Path"),
            ({"load_path": Path("s3://bucket/x")}, ValueError, "must be given as a text, not as a Path"),
        ],
    )
    def test_names_that_lead_elsewhere_raise_when_the_trainer_is_made(
        self, make_trainer, tmp_path, monkeypatch, arguments, error, message
    ):
        """Nothing is written."""
        monkeypatch.chdir(tmp_path)

        with pytest.raises(error, match=message):
            make_trainer(**{"save_folder": "saved/{run_name}", **arguments})

        assert list(tmp_path.iterdir()) == []

    def test_a_folder_that_cannot_be_written_is_an_error_before_training(self, make_trainer, tmp_path):
        """The error doesn't wait for the first checkpoint, hours later."""
        (tmp_path / "file").touch()
        trainer = make_trainer(save_folder=tmp_path / "file" / "saved")

        with pytest.raises(NotADirectoryError, match="must be one that can be written: Not a directory"):
            trainer.fit()

        assert trainer.state.timestamp.batch == 0

    def test_an_empty_folder_says_so(self, make_trainer, tmp_path):
        """It does so wherever the folder is given."""
        with pytest.raises(FileNotFoundError, match="must hold a checkpoint"):
            make_trainer(load_path=tmp_path)

    def test_an_unknown_metric_is_reported(self, make_trainer, make_dataloader, tmp_path, caplog):
        """The warning comes once, and lists the metrics that exist; it also comes without an evaluation."""
        saver = CheckpointSaver(tmp_path / "one", keep=Retention(1, best="metrics/eval/acuracy"))
        make_trainer(callbacks=saver, eval_dataloader=make_dataloader()).fit()
        saver = CheckpointSaver(tmp_path / "two", keep=Retention(1, best="loss/eval/total"))
        make_trainer(callbacks=saver).fit()

        assert caplog.text.count("best='metrics/eval/acuracy' has no value. The last evaluation") == 1
        assert "metrics/eval/accuracy" in caplog.text
        assert caplog.text.count("best='loss/eval/total' has no value. The last evaluation") == 1
