"""Tests checkpoints in shards, by one process: the files, reading them, and refusing bad ones."""

import io
import json
import pickle
import shutil
import zlib

import pytest
import torch
from torch import distributed
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from destinations import LoggerDestination
from events import (
    Callback,
    CheckpointError,
    CheckpointSaver,
    CheckpointWriting,
    Trainer,
    read_checkpoint,
)
from tests.waiting import until

FILES = [".metadata", "__0_0.distcp", "manifest.json", "rank-0.pt"]
NEWEST = "ep2-ba10"


@pytest.fixture
def saved(make_trainer, tmp_path):
    """A folder with three checkpoints of a run of ten batches."""
    with make_trainer(save_folder=tmp_path / "saved", save_interval="4ba", save_sharded=True) as trainer:
        trainer.fit()
    return tmp_path / "saved"


def names(folder):
    """Returns the names of all files in a folder."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def listing(*checkpoints):
    """Returns the names of the checkpoint files and of the pointer."""
    return sorted([f"{one}/{file}" for one in checkpoints for file in FILES] + ["latest.symlink"])


def replace(folder, name, content):
    """Replaces a file of a checkpoint, and what the manifest says of it."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"size": len(content), "crc32": zlib.crc32(content)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


class TestOnTheDisk:
    """The format."""

    def test_is_a_folder_that_its_manifest_describes(self, saved):
        """The manifest has size and CRC-32 of every other file, and the pointer names the manifest."""
        manifest = json.loads((saved / NEWEST / "manifest.json").read_text())
        summary = manifest.pop("summary")

        assert names(saved) == listing("ep0-ba4", "ep1-ba8", NEWEST)
        contents = {name: (saved / NEWEST / name).read_bytes() for name in FILES if name != "manifest.json"}
        assert manifest == {
            "version": 1,
            "name": NEWEST,
            "world_size": 1,
            "files": {
                name: {"size": len(content), "crc32": zlib.crc32(content)}
                for name, content in contents.items()
            },
        }
        assert (summary["run_name"], summary["batch"], summary["epoch"]) == ("test", 10, 2)
        assert (saved / "latest.symlink").read_text() == f"test/checkpoints/{NEWEST}/manifest.json"

    def test_shards_hold_the_content_of_a_file(self, saved, make_trainer, tmp_path):
        """Keys and tensors are the same to the last bit."""
        with make_trainer(save_folder=tmp_path / "whole", save_interval="4ba") as trainer:
            trainer.fit()

        whole, shards = read_checkpoint(tmp_path / "whole"), read_checkpoint(saved)

        assert whole.keys() == shards.keys()
        # `assert_close` compares no texts.
        assert whole["random"][0]["place"].pop("samplers") == shards["random"][0]["place"].pop("samplers")
        for part in ("model", "optimizers", "schedulers", "random"):
            torch.testing.assert_close(whole[part], shards[part], rtol=0, atol=0)
        assert whole["timestamp"]["batch"] == shards["timestamp"]["batch"]

    def test_torch_reads_the_tensors_without_this_package(self, saved, tmp_path):
        """Its own converter does, under the names that are documented."""
        dcp_to_torch_save(saved / NEWEST, tmp_path / "model.pt")

        found = torch.load(tmp_path / "model.pt", weights_only=True)
        checkpoint = read_checkpoint(saved)
        assert torch.equal(found["model.0.weight"], checkpoint["model"]["0.weight"])
        assert torch.equal(
            found["optimizers.0.state.0.exp_avg"], checkpoint["optimizers"][0]["state"][0]["exp_avg"]
        )

    def test_tied_weights_are_written_once(self, make_trainer, tmp_path):
        """They are in both places again."""
        trainer = make_trainer(save_folder=tmp_path / "saved", save_sharded=True, max_duration="1ba")
        layer = trainer.state.model[0]
        trainer.state.model.register_parameter("tied", layer.weight)
        trainer.fit()

        found = read_checkpoint(tmp_path / "saved")["model"]

        assert torch.equal(found["tied"], found["0.weight"])
        metadata = FileSystemReader(tmp_path / "saved/ep0-ba1").read_metadata()
        assert [key for key in metadata.state_dict_metadata if "tied" in key or key == "model.0.weight"] == [
            "model.tied"
        ]

    @pytest.mark.parametrize(
        "way",
        [
            {"writing": CheckpointWriting(process_bytes=0)},
            {"writing": CheckpointWriting(asynchronous=False)},
            {"weights_only": True},
        ],
        ids=["process", "training thread", "weights"],
    )
    def test_every_way_of_writing(self, make_trainer, saved, tmp_path, way):
        """A process writes, the training thread does, or the model is saved alone."""
        saver = CheckpointSaver(tmp_path / "other", save_interval="4ba", sharded=True, **way)
        with make_trainer(callbacks=saver) as trainer:
            trainer.fit()

        found, expected = read_checkpoint(tmp_path / "other"), read_checkpoint(saved)

        torch.testing.assert_close(found["model"], expected["model"], rtol=0, atol=0)
        assert ("optimizers" in found) is ("weights_only" not in way)
        assert saver.counts.saved == 3

    def test_old_ones_are_removed_with_their_folder(self, make_trainer, tmp_path):
        """The folder stays where something else is in it."""

        class Keeps(Callback):
            def batch_end(self, state, logger):
                if state.timestamp.batch == 6:
                    (tmp_path / "saved/ep0-ba4/notes.txt").write_text("mine")

        # Each is there when its batch has ended.
        saver = CheckpointSaver(
            tmp_path / "saved",
            save_interval="2ba",
            sharded=True,
            writing=CheckpointWriting(asynchronous=False),
            keep=1,
        )
        with make_trainer(callbacks=[Keeps(), saver]) as trainer:
            trainer.fit()

        # What is removed may take a moment longer.
        until(lambda: names(tmp_path / "saved") == sorted([*listing(NEWEST), "ep0-ba4/notes.txt"]))

    def test_old_ones_stay_until_the_manifest_of_the_newer_one_is_there(self, make_trainer, tmp_path):
        """One whose manifest cannot be written replaces nothing; the next one does."""
        folder, seen = tmp_path / "saved", []

        class BlocksAManifest(Callback):
            def batch_end(self, state, logger):
                if state.timestamp.batch == 3:
                    (folder / "ep0-ba4/manifest.json").mkdir(parents=True)
                elif state.timestamp.batch == 5:
                    seen.extend(names(folder))
                    (folder / "ep0-ba4/manifest.json").rmdir()

        saver = CheckpointSaver(
            folder, save_interval="2ba", sharded=True, writing=CheckpointWriting(asynchronous=False), keep=1
        )
        with make_trainer(callbacks=[BlocksAManifest(), saver], max_duration="6ba") as trainer:
            trainer.fit()

        assert saver.counts.failed == 1
        assert set(listing("ep0-ba2")) <= set(seen)
        assert names(folder) == listing("ep1-ba6")


class TestReading:
    """Resuming, and reading for other purposes."""

    def test_resumes_to_the_last_bit(self, make_trainer, saved, metric_list, tmp_path):
        """Training resumes from any of them, named by its folder or its manifest."""
        expected = read_checkpoint(saved)["model"]
        (saved / "first.symlink").write_text("ep0-ba4/manifest.json")
        for path in (saved / "ep0-ba4", saved / "ep0-ba4" / "manifest.json", saved / "first.symlink"):
            trainer = make_trainer(load_path=path)
            assert trainer.state.last_checkpoint == str(saved / "ep0-ba4")
            trainer.fit()

            torch.testing.assert_close(dict(trainer.state.model.state_dict()), dict(expected), rtol=0, atol=0)
            assert trainer.state.timestamp.batch == 10

    @pytest.mark.parametrize("name", ["latest", f"{NEWEST}/manifest.json", "ep0-ba4"])
    def test_is_read_from_a_store(self, saved, name):
        """It is named by a pointer, its folder or its manifest."""
        shutil.copytree(saved, saved.parent / "store")

        found = read_checkpoint(f"file://{saved.parent}/store/{name}")

        assert found["timestamp"]["batch"] == (4 if name == "ep0-ba4" else 10)
        assert isinstance(found["model"]["0.weight"], torch.Tensor)

    @pytest.mark.parametrize("name", [name for name in FILES if name != "manifest.json"])
    def test_every_file_is_verified(self, make_trainer, saved, caplog, name):
        """A flipped bit, a shorter file and a missing file each make the checkpoint invalid, with a warning."""
        path = saved / NEWEST / name
        content = path.read_bytes()
        middle = len(content) // 2
        for damage in (
            content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
            content[:-1],
            None,
        ):
            path.unlink()
            if damage is not None:
                path.write_bytes(damage)

            trainer = make_trainer(save_folder=saved, autoresume=True)

            assert trainer.state.timestamp.batch == 8
            with pytest.raises(CheckpointError, match="missing or damaged"):
                read_checkpoint(saved / NEWEST)
            path.write_bytes(content)
        assert caplog.text.count(f"{name}' must be as its manifest says, but is missing or damaged.") == 3

    def test_half_of_one_is_removed_at_the_next_start(self, make_trainer, saved):
        """Only this run's are removed, not torch.distributed.checkpoint's, another run's or the user's."""
        for name in ("ep9-ba9", "other-half", "of-dcp", "mixed"):
            shutil.copytree(saved / NEWEST, saved / name)
            (saved / name / "manifest.json").unlink()
        (saved / "of-dcp" / "rank-0.pt").unlink()
        (saved / "mixed" / "mine.txt").touch()
        (saved / "ep9-ba9" / ".__1_0.distcp.1-0.tmp").touch()

        with make_trainer(save_folder=saved, autoresume=True, max_duration="11ba") as trainer:
            trainer.fit()

        assert sorted(path.name for path in saved.iterdir()) == [
            "ep0-ba4",
            "ep1-ba8",
            "ep2-ba10",
            "ep2-ba11.pt",
            "latest.symlink",
            "mixed",
            "of-dcp",
            "other-half",
        ]


class RunsCode:
    """Pickled, it is a call."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


class TestHostileFiles:
    """What somebody else has put into a checkpoint."""

    def test_no_code_of_a_file_is_run(self, saved, tmp_path):
        """Neither of the pickle of DCP, nor of ours, nor of a value that DCP would unpickle."""
        folder, content = saved / NEWEST, (saved / NEWEST / ".metadata").read_bytes()
        metadata = FileSystemReader(folder).read_metadata()
        replace(folder, ".metadata", pickle.dumps(RunsCode(tmp_path / "ran")))
        with pytest.raises(CheckpointError, match="must hold metadata of tensors"):
            read_checkpoint(folder)

        key = "model.0.weight"
        data = io.BytesIO()
        torch.save(RunsCode(tmp_path / "ran"), data)
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        replace(folder, ".metadata", pickle.dumps(metadata))
        replace(folder, "__0_0.distcp", data.getvalue())
        with pytest.raises(CheckpointError, match="must have all parts"):
            read_checkpoint(folder)

        replace(folder, ".metadata", content)
        replace(folder, "rank-0.pt", data.getvalue())
        with pytest.raises(CheckpointError):
            read_checkpoint(folder)
        assert not (tmp_path / "ran").exists()

    def test_no_path_leads_out_of_the_folder(self, saved, tmp_path):
        """Nor to a file that the manifest does not have."""
        folder = saved / NEWEST
        shutil.copy(folder / "__0_0.distcp", tmp_path / "outside")
        metadata = FileSystemReader(folder).read_metadata()
        for place in metadata.storage_data.values():
            place.relative_path = "../../outside"
        replace(folder, ".metadata", pickle.dumps(metadata))

        with pytest.raises(CheckpointError, match="not in the manifest"):
            read_checkpoint(folder)

    def test_a_part_that_is_missing_is_not_made_up(self, saved):
        """Memory that nothing was read into would be a tensor of chance."""
        folder = saved / NEWEST
        metadata = FileSystemReader(folder).read_metadata()
        metadata.state_dict_metadata["model.0.weight"].chunks.clear()
        replace(folder, ".metadata", pickle.dumps(metadata))

        with pytest.raises(CheckpointError, match=r"must have all parts of the tensor 'model.0.weight'"):
            read_checkpoint(folder)

    @pytest.mark.parametrize(
        "change",
        [
            {"version": 2},
            {"world_size": 2},
            {"world_size": "1"},
            {"world_size": 10**9},
            {"name": "../out"},
            {"name": None},
            {"files": {"../x": {"size": 1, "crc32": 1}}},
            {"files": []},
        ],
        ids=str,
    )
    def test_a_manifest_is_checked(self, saved, change):
        """It is a file as any other."""
        path = saved / NEWEST / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))

        with pytest.raises(CheckpointError, match="must be the manifest of a checkpoint"):
            read_checkpoint(saved / NEWEST)


class Slow(LoggerDestination):
    """Takes files, and has them on request."""

    def __init__(self):
        super().__init__()
        self.names = []
        self.pointed = []
        self.deleted = []
        self.answer = False

    def can_upload_files(self):
        return True

    def upload_file(self, state, remote_file_name, file_path, *, overwrite, link=False, crc32=None):
        self.names.append(remote_file_name)
        if remote_file_name.endswith(".symlink"):
            self.pointed.append(file_path.read_text().split("/")[2])

    def delete_file(self, state, remote_file_name, *, after=(), then=()):
        assert all(name in self.names for name in (*after, remote_file_name, *then[:1]))
        self.deleted.append(remote_file_name.split("/")[2])

    def has_uploaded(self, remote_file_name):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class TestThePointerInAStore:
    """It is handed on when everything that it stands for is there."""

    def test_waits_for_the_files(self, make_trainer, tmp_path):
        """It waits for the newest checkpoint's files while training continues."""
        slow, seen, deleted = Slow(), [], []

        class Answers(Callback):
            def batch_end(self, state, logger):
                seen.append("test/checkpoints/latest.symlink" in slow.names)
                deleted.append(list(slow.deleted))
                slow.answer = state.timestamp.batch >= 8

        saver = CheckpointSaver(tmp_path / "saved", save_interval="4ba", sharded=True, keep_in_store=1)
        with make_trainer(callbacks=[Answers(), saver], loggers=slow) as trainer:
            trainer.fit()

        assert seen == [False] * 8 + [True] * 2
        assert deleted[:8] == [[]] * 8
        assert slow.deleted == ["ep0-ba4", "ep1-ba8"]
        # Not to the newer one, to which the pointer on the disk leads by then.
        assert slow.pointed == ["ep0-ba4", "ep1-ba8", NEWEST]
        assert slow.names[-1] == "test/checkpoints/latest.symlink"
        assert [name for name in slow.names if name.endswith("manifest.json")] == [
            f"test/checkpoints/{one}/manifest.json" for one in ("ep0-ba4", "ep1-ba8", NEWEST)
        ]

    @pytest.mark.parametrize("answer", [OSError("the store refused it"), ZeroDivisionError("a bug")], ids=str)
    def test_stays_if_a_file_will_never_arrive(self, make_trainer, tmp_path, caplog, answer):
        """A warning is logged, and training continues."""
        slow = Slow()
        slow.answer = answer

        saver = CheckpointSaver(tmp_path / "saved", save_interval="4ba", sharded=True, keep_in_store=1)
        with make_trainer(callbacks=saver, loggers=slow) as trainer:
            trainer.fit()

        assert "test/checkpoints/latest.symlink" not in slow.names
        assert slow.deleted == []
        assert caplog.text.count("is not uploaded, for lack of files of rank 0") == 3
        assert str(answer) in caplog.text

    def test_after_a_long_outage_what_was_there_before_is_deleted(self, make_trainer, tmp_path):
        """So is each checkpoint that was saved meanwhile, but for the newest."""
        slow = Slow()

        class Outage(Callback):
            def batch_end(self, state, logger):
                slow.answer = state.timestamp.batch <= 2 or state.timestamp.batch >= 38

        # Written at once: which ones wait when the outage begins must not depend on the speed of the disk.
        saver = CheckpointSaver(
            tmp_path,
            "{batch}.pt",
            save_interval="1ba",
            sharded=True,
            keep_in_store=1,
            writing=CheckpointWriting(asynchronous=False),
        )
        with make_trainer(callbacks=[Outage(), saver], loggers=slow, max_duration="40ba") as trainer:
            trainer.fit()

        assert slow.deleted == [str(batch) for batch in range(1, 40)]

    def test_nothing_is_deleted_under_a_name_that_a_refused_one_has_too(self, make_trainer, tmp_path):
        """The objects of that name may be of both, or of another run."""
        slow, refused = Slow(), range(4, 8)

        class Refuses(Callback):
            def batch_end(self, state, logger):
                slow.answer = OSError("refused") if int(state.timestamp.batch) in refused else True

        saver = CheckpointSaver(
            tmp_path,
            "{batch_in_epoch}.pt",
            save_interval="2ba",
            sharded=True,
            writing=CheckpointWriting(asynchronous=False),
            keep_in_store=1,
        )
        options = {"samples": 16, "max_duration": "9ba"}
        with make_trainer(callbacks=[Refuses(), saver], loggers=slow, **options) as trainer:
            trainer.fit()

        assert slow.pointed == ["2", "4", "1"]
        assert slow.deleted == ["4"]


@pytest.fixture
def one_rank():
    """A process group of one, for `fully_shard`."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_divided_model_is_saved_in_shards_unless_that_is_forbidden(tmp_path, monkeypatch):
    """Rank 0 has a part of it only: a whole checkpoint is refused before training begins."""
    model = torch.nn.Linear(3, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    data = [(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))]
    options = {
        "max_duration": "1ba",
        "loss_fn": torch.nn.functional.cross_entropy,
        "optimizers": torch.optim.Adam(model.parameters()),
        "run_name": "test",
        "device": "cpu",
    }
    with pytest.raises(ValueError, match="sharded must not be False"):
        Trainer(model, data, save_folder=tmp_path / "saved", save_sharded=False, **options)

    # The process group has one rank, whatever the environment says.
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Trainer(model, data, save_folder=tmp_path / "saved", **options) as trainer:
        trainer.fit()

    assert names(tmp_path / "saved") == listing("ep1-ba1")
    found = read_checkpoint(tmp_path / "saved")["model"]["weight"]
    assert torch.equal(found, model.weight.full_tensor())
