"""`destinations runs checkpoints`: a real Trainer's checkpoints, here and in a real store."""

import json
import shutil
import zipfile

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from destinations import Artifacts, RunDirectory, cli
from destinations.runs.commands.screen import NOTHING
from events import Callback, CheckpointSaver, Retention, Trainer, read_checkpoint
from tests.servers import s3_servers
from uploads import open_store

# The evaluation after each epoch of five batches; the second is the best.
ACCURACY = {5: 0.25, 10: 0.75, 15: 0.5}


class Accuracy(Callback):
    """Sets the result of the evaluation."""

    def eval_start(self, state, logger):
        value = ACCURACY[int(state.timestamp.batch)]
        state.eval_metrics["eval"]["accuracy"].compute = lambda: value


def train(root, *loggers, saver=None, **arguments):
    """Trains three epochs; returns the trainer, closed."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    points = torch.randn(20, 3)
    data = TensorDataset(points, (points.sum(1) > 0).long())
    savers = [] if saver is None else [saver]
    with Trainer(
        model,
        DataLoader(data, batch_size=4),
        DataLoader(data, batch_size=10),
        max_duration="3ep",
        loss_fn=torch.nn.functional.cross_entropy,
        optimizers=torch.optim.Adam(model.parameters()),
        metrics={"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).float().mean()},
        callbacks=[Accuracy(), *savers],
        loggers=[RunDirectory(root / "digits"), *loggers],
        run_name="digits",
        device="cpu",
        **arguments,
    ) as trainer:
        trainer.fit()
    return trainer


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder of runs that the commands find by themselves."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("UPLOADS_HOME", str(tmp_path / "machine"))
    for name in ("DESTINATIONS_ROOT", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.fixture
def command(root, capsys):
    """Runs `checkpoints`; returns exit code, output and messages."""

    def run(*arguments):
        capsys.readouterr()
        code = cli.main(["runs", "checkpoints", *map(str, arguments)])
        found = capsys.readouterr()
        return code, found.out.replace(NOTHING, "-"), found.err

    return run


def flip_a_bit(path):
    """Damages the largest part of a checkpoint, because the gaps between parts don't matter."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        part = archive.read(max(archive.infolist(), key=lambda one: one.file_size))
    content[content.index(part) + len(part) // 2] ^= 1
    path.write_bytes(content)


def test_run_lists_its_checkpoints_with_their_metrics(root, command):
    """The list has batches, epochs, evaluation results, sizes, locations, and whether they are complete."""
    train(root, save_folder=root / "digits/checkpoints")

    code, out, errors = command("digits")

    assert (code, errors) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == [
        *("checkpoint", "step", "epoch", "loss/eval/total", "metrics/eval/accuracy"),
        *("size", "age", "where", "whole"),
    ]
    assert [line[:3] for line in lines[1:]] == [
        ["ep3-ba15.pt", "15", "3"],
        ["ep2-ba10.pt", "10", "2"],
        ["ep1-ba5.pt", "5", "1"],
    ]
    assert [line[4] for line in lines[1:]] == ["0.5", "0.75", "0.25"]
    assert [line[-2:] for line in lines[1:]] == [["local", "yes"]] * 3


def test_best_of_equal_checkpoints_is_the_kept_one(root, command, monkeypatch):
    """The older one is kept: `get best` copies the same file as a retention rule by the best."""
    monkeypatch.setitem(ACCURACY, 15, ACCURACY[10])
    saver = CheckpointSaver(root / "digits/checkpoints", keep=Retention(best="metrics/eval/accuracy"))
    train(root, saver=saver)

    code, out, errors = command("get", "digits", "best", "--to", "here.pt")

    assert (code, errors) == (0, "")
    assert "ep2-ba10.pt" in out


def test_json_has_every_field(root, command):
    """Programs read it."""
    saver = CheckpointSaver(root / "digits/checkpoints", keep=Retention(best="metrics/eval/accuracy"))
    train(root, saver=saver)

    code, out, _ = command("digits", "--json")
    first = json.loads(out)[0]

    path = root / "digits/checkpoints/ep3-ba15.pt"
    assert code == 0
    assert first.pop("time") == pytest.approx(path.stat().st_mtime, abs=60)
    assert first.pop("metrics").keys() == {"loss/eval/total", "metrics/eval/accuracy"}
    assert first == {
        "name": "ep3-ba15.pt",
        "place": "local",
        "path": str(path),
        "size": path.stat().st_size,
        "step": 15,
        "epoch": 3,
        "best_by": {"metric": "metrics/eval/accuracy", "mode": "max"},
        "problem": None,
        "is_latest": True,
        "shards": {},
        "is_whole": True,
    }


@pytest.mark.parametrize(
    ("which", "name"),
    [
        (["best"], "ep2-ba10.pt"),
        (["best", "--by", "metrics/eval/accuracy", "--mode", "min"], "ep1-ba5.pt"),
        (["latest"], "ep3-ba15.pt"),
        (["ep1-ba5.pt"], "ep1-ba5.pt"),
    ],
)
def test_get_copies_the_chosen_checkpoint(root, command, which, name):
    """It is the best by the run's retention metric or another one; the copy is identical."""
    saver = CheckpointSaver(root / "digits/checkpoints", keep=Retention(best="metrics/eval/accuracy"))
    train(root, saver=saver)

    code, _, errors = command("get", "digits", *which, "--to", "model.pt")

    assert (code, errors) == (0, "")
    copy, original = root.parent / "model.pt", root / "digits/checkpoints" / name
    assert copy.read_bytes() == original.read_bytes()
    assert sorted(path.name for path in root.parent.iterdir()) == ["cache", "model.pt", "runs"]
    assert command("get", "digits", *which, "--to", "model.pt")[0] == 1
    assert command("get", "digits", *which, "--to", "model.pt", "--overwrite")[0] == 0


def test_cut_or_foreign_file_is_not_a_checkpoint(root, command):
    """The list shows the problem; `get` names it, and writes nothing."""
    train(root, save_folder=root / "digits/checkpoints")
    folder = root / "digits/checkpoints"
    cut = folder / "ep3-ba15.pt"
    cut.write_bytes(cut.read_bytes()[:-100])
    flip_a_bit(folder / "ep2-ba10.pt")
    (folder / "other.pt").write_bytes(b"no zip file")

    code, out, _ = command("digits", "--json")
    problems = {one["name"]: one["problem"] for one in json.loads(out)}

    assert code == 0
    assert problems["ep1-ba5.pt"] is None
    assert "zip" in problems["ep3-ba15.pt"]
    assert "zip" in problems["other.pt"]
    # Only reading the whole file detects a bit in the middle.
    for name in ("ep2-ba10.pt", "ep3-ba15.pt"):
        code, _, errors = command("get", "digits", name, "--to", "model.pt")
        assert code == 1
        assert f"no copy of '{name}' is whole" in errors
    assert not (root.parent / "model.pt").exists()


def test_uploaded_checkpoint_is_listed_and_replaces_a_missing_file(root, command, tmp_path):
    """The run's record has its URI; the store's file replaces a damaged local one."""
    train(root, Artifacts(tmp_path / "store"), save_folder=root / "digits/checkpoints")
    local = root / "digits/checkpoints/ep3-ba15.pt"
    whole = local.read_bytes()
    flip_a_bit(local)

    _, out, _ = command("digits", "--json")
    places = [(one["name"], one["place"]) for one in json.loads(out)]
    code, said, errors = command("get", "digits", "latest", "--to", "model.pt")

    assert places == [
        (name, place) for name in ("ep3-ba15.pt", "ep2-ba10.pt", "ep1-ba5.pt") for place in ("local", "store")
    ]
    assert code == 0
    assert "ep3-ba15.pt is not whole" in errors
    assert "file://" in said
    assert (root.parent / "model.pt").read_bytes() == whole


def test_checkpoints_in_s3_are_found_by_name_and_uri(root, command, tmp_path, monkeypatch):
    """This works on a machine without any of the run; only the ends of an object are read."""
    for name, value in s3_servers.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with s3_servers.moto() as moto:
        uri = moto.uri("saved/digits")
        train(root, save_folder=uri)
        shutil.rmtree(tmp_path / "machine")

        _, by_name, _ = command("digits", "--json")
        _, by_uri, _ = command(uri, "--json")
        code, _, errors = command("get", uri, "latest", "--to", "model.pt")

    assert json.loads(by_name) == json.loads(by_uri)
    assert [(one["name"], one["step"], one["place"], one["is_whole"]) for one in json.loads(by_uri)] == [
        (f"ep{epoch}-ba{5 * epoch}.pt", 5 * epoch, "store", True) for epoch in (3, 2, 1)
    ]
    assert (code, errors) == (0, "")
    assert read_checkpoint(root.parent / "model.pt")["timestamp"]["batch"] == 15


def test_checkpoints_in_shards_are_listed_and_copied_as_folders(root, command, tmp_path):
    """Here and in a store, the list has size, values and completeness; a damaged file prevents the copy."""
    saver = CheckpointSaver(
        root / "digits/checkpoints", sharded=True, keep=Retention(best="metrics/eval/accuracy")
    )
    train(root, Artifacts(tmp_path / "store", spool=tmp_path / "spool", free_bytes=0), saver=saver)
    newest = root / "digits/checkpoints/ep3-ba15"
    sizes = {path.name: path.stat().st_size for path in newest.iterdir()}

    _, listed, errors = command("digits", "--json")
    first = json.loads(listed)
    copied = command("get", "digits", "best", "--to", "best")
    again = command("get", "digits", "best", "--to", "best", "--overwrite")
    flip_a_bit(newest / "__0_0.distcp")
    here = command("get", "digits", "latest", "--to", "latest")
    (newest / "__0_0.distcp").unlink()
    _, listed, _ = command("digits", "--json")
    later = json.loads(listed)

    assert errors == ""
    assert {(one["name"], one["step"], one["place"], one["is_whole"]) for one in first} == {
        (f"ep{epoch}-ba{5 * epoch}", 5 * epoch, place, True)
        for epoch in (3, 2, 1)
        for place in ("local", "store")
    }
    assert [one["metrics"]["metrics/eval/accuracy"] for one in first[::2]] == [0.5, 0.75, 0.25]
    assert (first[0]["size"], first[0]["is_latest"], first[2]["is_latest"]) == (
        sum(sizes.values()),
        True,
        False,
    )
    assert set(first[0]["shards"]) == set(sizes) - {"manifest.json"}
    assert copied[0] == 0
    assert read_checkpoint(root.parent / "best/manifest.json")["timestamp"]["batch"] == 10
    assert again[0] != 0
    assert "is a folder" in again[2]
    assert here[0] == 0
    assert "__0_0.distcp has CRC-32" in here[2]
    assert read_checkpoint(root.parent / "latest/manifest.json")["timestamp"]["batch"] == 15
    assert later[0]["problem"] == "__0_0.distcp is missing or cut short"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"files": {}}',
        '{"files": {"../../etc/passwd": {"size": 1, "crc32": 1}}}',
        '{"files": {"rank-0.pt": {"size": "x", "crc32": 1}}}',
        '{"files": 3}',
    ],
)
def test_hostile_manifest_is_not_a_checkpoint(root, command, content):
    """It is listed with its problem, and nothing outside its folder is read."""
    train(root)
    folder = root / "digits/checkpoints/ep1-ba5"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(content)

    code, listed, _ = command("digits", "--json")
    got = command("get", "digits", "ep1-ba5", "--to", "copy")

    (one,) = json.loads(listed)
    assert (code, one["is_whole"], one["shards"]) == (0, False, {})
    assert one["problem"].startswith("not a manifest of shards")
    assert got[0] != 0
    assert not (root.parent / "copy").exists()


def test_no_code_in_a_hostile_checkpoint_runs_and_no_control_character_reaches_the_screen(root, command):
    """Its pickle is inspected but never loaded; its texts are shown escaped."""
    train(root, save_folder=root / "digits/checkpoints")

    class Evil:
        def __reduce__(self):
            return (open, (str(root / "pwned"), "w"))

    summary = json.dumps(
        {"batch": "\x1b[2J", "epoch": 10**40, "metrics": {"\x1b]0;evil\x07": 1.5}, "best_by": 3}
    )
    torch.save({"version": 1, "summary": summary, "evil": Evil()}, root / "digits/checkpoints/evil.pt")
    with zipfile.ZipFile(root / "digits/checkpoints/bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("archive/data.pkl", b"\0" * (1 << 20))
    (root / "digits/checkpoints/link.pt").symlink_to("/etc/passwd")

    code, out, _ = command("digits")
    _, _, refused = command("get", "digits", "bomb.pt", "--to", "model.pt")

    assert code == 0
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "compressed" in refused
    assert "link.pt" not in out
    assert not (root / "pwned").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["get", "digits", "best"], 2, "keeps no best checkpoint. Name a metric with --by"),
        (["get", "digits", "best", "--by", "loss/eval/total"], 2, "Add --mode max or --mode min"),
        (
            ["get", "digits", "best", "--by", "x", "--mode", "max"],
            1,
            "They have loss/eval/total, metrics/eval",
        ),
        (["get", "digits", "ep9.pt"], 1, "there is no checkpoint 'ep9.pt'. There are ep3-ba15.pt"),
        (["get", "digits", "latest", "--by", "x"], 2, "--by and --mode choose the best"),
        (["get", "digits"], 2, "expected RUN, or get RUN best|latest|NAME"),
        (["digits", "--to", "x.pt"], 2, "need get"),
        (["other"], 1, "no run has the id, name or path 'other'"),
    ],
)
def test_impossible_requests_print_a_message(root, command, arguments, code, message):
    """The message says what to write instead."""
    train(root, save_folder=root / "digits/checkpoints")

    found, _, errors = command(*arguments)

    assert (found, message in errors) == (code, True), errors


def test_an_unreachable_store_only_hides_its_own_rows(root, command, tmp_path):
    """The local files are listed, and a message names the store."""
    train(root, Artifacts(tmp_path / "store"), save_folder=root / "digits/checkpoints")
    assert open_store(tmp_path / "store").head("digits/checkpoints/latest.symlink") is not None
    sidecar = json.loads((root / "digits/sidecar.json").read_bytes())
    sidecar["checkpoint_uris"] = ["gopher://host/x.pt"]
    (root / "digits/sidecar.json").write_text(json.dumps(sidecar))

    code, out, errors = command("digits")

    assert (code, out.count("local")) == (0, 3)
    assert "cannot list the checkpoints in gopher://host" in errors
