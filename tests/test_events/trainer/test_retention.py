"""Which checkpoints stay: the newest, the best, every n-th."""

import json
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from destinations import Artifacts, RunDirectory
from destinations.runs import Run
from events import Callback, CheckpointSaver, CheckpointWriting, Evaluator, Retention, read_checkpoint
from events.trainer.checkpoint.retention import SavedCheckpoint
from tests.waiting import until
from uploads import open_store


class Accuracy(Callback):
    """Sets what the evaluation says after so many batches: the best is the second."""

    def __init__(self, values=None):
        super().__init__()
        self._values = values or {5: 0.1, 10: 0.9, 15: 0.2, 20: 0.3, 25: 0.4, 30: 0.5}

    def eval_start(self, state, logger):
        metric = state.eval_metrics["eval"]["accuracy"]
        metric.compute = lambda: self._values[int(state.timestamp.batch)]


def saved(*metrics):
    """Returns checkpoints with these values of the metric."""
    return [
        SavedCheckpoint(f"{number}", number=number, batch=number, metric=metric)
        for number, metric in enumerate(metrics, 1)
    ]


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ({"newest": None}, "123456"),
        ({"newest": 2}, "56"),
        ({"newest": 1, "every": 2}, "246"),
        ({"newest": 1, "best": "metrics/eval/a"}, "36"),
        ({"newest": 1, "best": "metrics/eval/a", "best_mode": "min"}, "16"),
        ({"newest": 1, "best": "metrics/eval/a", "best_count": 2}, "346"),
        ({"newest": 2, "best": "metrics/eval/a", "every": 5}, "356"),
    ],
)
def test_a_checkpoint_stays_if_any_part_of_the_rule_keeps_it(rule, kept):
    """There are six; the second has no value, the fifth is NaN, of the equal third and fourth the older is better."""
    six = saved(0.0, None, 0.9, 0.9, float("nan"), 0.5)

    gone = Retention(**rule).surplus(six)

    assert "".join(one.path for one in six if one not in gone) == kept


@given(
    metrics=st.lists(st.none() | st.floats(), min_size=1),
    newest=st.integers(1, 5),
    count=st.integers(1, 3),
    every=st.none() | st.integers(1, 4),
)
def test_the_newest_always_stays_and_removed_ones_stay_removed(metrics, newest, count, every):
    """Applied after each checkpoint, the rule leaves those that it leaves where it is applied once at the end."""
    rule = Retention(newest, best="metrics/eval/a", best_count=count, every=every)
    everything = saved(*metrics)

    left = []
    for one in everything:
        left = [*left, one]
        gone = rule.surplus(left)
        assert one not in gone
        left = [each for each in left if each not in gone]

    gone = rule.surplus(everything)
    assert [one.number for one in left] == [one.number for one in everything if one not in gone]
    assert left[-newest:] == everything[-newest:]
    assert rule.surplus(left) == []


def test_the_best_and_every_third_stay_on_the_disk(make_trainer, make_dataloader, tmp_path):
    """The metric has the name under which it is logged, and the rule holds across two sessions."""

    def run(duration):
        rule = Retention(1, best="metrics/eval/accuracy", every=3)
        saver = CheckpointSaver(tmp_path / "saved", keep=rule, filename="{batch}.pt")
        with make_trainer(
            callbacks=[Accuracy(), saver],
            eval_dataloader=make_dataloader(),
            max_duration=duration,
            autoresume=True,
        ) as trainer:
            trainer.fit()

    run("2ep")
    run("5ep")

    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "10.pt",
        "15.pt",
        "25.pt",
        "latest.symlink",
    ]


def test_a_metric_belongs_to_the_evaluated_batch(make_trainer, make_dataloader, tmp_path):
    """Checkpoints between two evaluations have none; of equal ones the older is best, and NaN never."""
    values = {4: 0.9, 8: 0.1, 12: 0.1, 16: float("nan")}
    saver = CheckpointSaver(
        tmp_path / "saved",
        filename="{batch}.pt",
        save_interval="1ba",
        keep=Retention(1, best="metrics/eval/accuracy", best_mode="min"),
    )

    with make_trainer(
        callbacks=[Accuracy(values), saver],
        eval_dataloader=make_dataloader(),
        eval_interval="4ba",
        max_duration="16ba",
        autoresume=True,
    ) as trainer:
        trainer.fit()

    assert sorted(path.name for path in (tmp_path / "saved").glob("*.pt")) == ["16.pt", "8.pt"]
    assert read_checkpoint(tmp_path / "saved" / "8.pt")["summary"].count("metrics/eval/accuracy") == 2
    known = [(one.batch, one.metric) for one in saver._kept.now.local]
    assert known == [(8, values[8]), (16, pytest.approx(values[16], nan_ok=True))]


def test_evaluators_of_other_intervals_give_values_of_their_own_batches(
    make_trainer, make_dataloader, tmp_path
):
    """At batch 6, the value of the one that was last evaluated at batch 4 is not one of these weights."""
    saver = CheckpointSaver(tmp_path / "saved", filename="{batch}.pt", save_interval="2ba")
    evaluators = [
        Evaluator(label="often", dataloader=make_dataloader(), eval_interval="3ba"),
        Evaluator(label="seldom", dataloader=make_dataloader(), eval_interval="4ba"),
    ]

    with make_trainer(callbacks=saver, eval_dataloader=evaluators, max_duration="6ba") as trainer:
        trainer.fit()

    found = {
        path.stem: {name.split("/")[1] for name in json.loads(read_checkpoint(path)["summary"])["metrics"]}
        for path in (tmp_path / "saved").glob("*.pt")
    }
    assert found == {"2": set(), "4": {"seldom"}, "6": {"often"}}


def test_an_evaluation_after_the_save_is_of_the_same_weights(make_trainer, make_dataloader, tmp_path):
    """One at the end of an epoch comes after the save at its last batch, which has no value without it."""
    saver = CheckpointSaver(
        tmp_path / "saved",
        filename="{batch}.pt",
        save_interval="5ba",
        keep=Retention(1, best="metrics/eval/accuracy"),
    )

    with make_trainer(
        callbacks=[Accuracy(), saver], eval_dataloader=make_dataloader(), max_duration="4ep"
    ) as trainer:
        trainer.fit()

    assert sorted(path.name for path in (tmp_path / "saved").glob("*.pt")) == ["10.pt", "20.pt"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CheckpointSaver(keep=0), "keep must be at least 1, got 0. Write None to keep all"),
        (
            lambda: CheckpointSaver(keep_in_store=0),
            "keep_in_store must be at least 1, got 0. Write None to keep all",
        ),
        (lambda: Retention(0), "newest must be at least 1, got 0"),
        (lambda: Retention(every=0), "every must be at least 1, got 0"),
        (lambda: Retention(best_count=0), "best_count must be at least 1, got 0"),
        (
            lambda: Retention(best="accuracy"),
            "best must be a metric of an evaluation, got 'accuracy'. Write \"metrics",
        ),
        (lambda: Retention(best_mode="most"), "best_mode must be 'max' or 'min', got 'most'"),
        (
            lambda: CheckpointSaver(keep_in_store=Retention(2, best="loss/eval/total")),
            "keep_in_store must have the best of keep, None, or none, got 'loss/eval/total'",
        ),
        (lambda: CheckpointWriting(when_busy="stop"), "when_busy must be 'wait' or 'skip', got 'stop'"),
    ],
)
def test_an_invalid_rule_raises(make, message):
    """The constructor raises, and says what to write."""
    with pytest.raises(ValueError, match=message):
        make()


def stored(folder):
    """Returns the names of the checkpoints and pointers in a store."""
    return sorted(one.name.rpartition("/")[2] for one in open_store(folder).list(""))


KEPT_IN_STORE = ["10.pt", "15.pt", "25.pt", "30.pt", "latest.symlink"]


@pytest.fixture
def in_epochs(make_trainer, make_dataloader, tmp_path):
    """Trains for some epochs of five batches, with the best in the second, and resumes."""

    def run(*loggers, folder=tmp_path / "saved", duration="6ep", **rules):
        saver = CheckpointSaver(folder, filename="{batch}.pt", **rules)
        with make_trainer(
            callbacks=[Accuracy(), saver],
            eval_dataloader=make_dataloader(),
            loggers=loggers,
            max_duration=duration,
            autoresume=True,
        ) as trainer:
            trainer.fit()
        return trainer

    return run


RULES = {"keep": Retention(1, best="metrics/eval/accuracy"), "keep_in_store": Retention(2, every=3)}


def test_the_store_has_a_rule_of_its_own(in_epochs, tmp_path):
    """It keeps two newest, the best and every third; here one newest and the best stay, over two sessions."""
    for duration in ("3ep", "6ep"):
        artifacts = Artifacts(tmp_path / "store", spool=tmp_path / "spool", free_bytes=0)
        in_epochs(artifacts, duration=duration, **RULES)

    assert stored(tmp_path / "store") == KEPT_IN_STORE
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "10.pt",
        "30.pt",
        "latest.symlink",
    ]


def test_in_a_store_of_its_own_too_and_nothing_is_deleted_unasked(in_epochs, monkeypatch, tmp_path):
    """The queue of a folder in a store deletes; what is not a checkpoint of this run stays."""
    monkeypatch.setenv("UPLOADS_HOME", str(tmp_path / "machine"))
    ruled, everything = (f"file://{tmp_path}/{name}" for name in ("ruled", "all"))
    in_epochs(folder=ruled, duration="3ep", **RULES)
    # By default, one is kept here.
    in_epochs(folder=ruled, **RULES | {"keep": Retention(best="metrics/eval/accuracy")})
    in_epochs(folder=everything, keep=1)

    assert stored(ruled) == KEPT_IN_STORE
    assert stored(everything) == sorted([*(f"{batch}.pt" for batch in range(5, 31, 5)), "latest.symlink"])


def test_a_checkpoint_to_which_another_pointer_leads_stays(in_epochs, tmp_path, caplog):
    """The pointer counts whoever wrote it; the log reports it."""
    folder = tmp_path / "store" / "test/checkpoints"
    folder.mkdir(parents=True)
    (folder / "mine.symlink").write_text("test/checkpoints/10.pt")

    in_epochs(Artifacts(tmp_path / "store", spool=tmp_path / "spool", free_bytes=0), keep_in_store=1)

    assert stored(tmp_path / "store") == ["10.pt", "30.pt", "latest.symlink", "mine.symlink"]
    assert "test/checkpoints/10.pt is not deleted: test/checkpoints/mine.symlink leads to it" in caplog.text


def test_an_object_of_another_run_is_not_deleted(in_epochs, tmp_path):
    """Its name was taken, and the upload of ours refused."""
    folder = tmp_path / "store" / "test/checkpoints"
    folder.mkdir(parents=True)
    (folder / "10.pt").write_bytes(b"of another run")

    in_epochs(Artifacts(tmp_path / "store", spool=tmp_path / "spool", free_bytes=0), keep_in_store=1)

    # What it should have replaced stays too.
    assert stored(tmp_path / "store") == ["10.pt", "30.pt", "5.pt", "latest.symlink"]
    assert (folder / "10.pt").read_bytes() == b"of another run"


SHARDS = ["", ".metadata", "__0_0.distcp", "manifest.json", "rank-0.pt"]


def folders_of(*batches):
    """Returns the names of all files of checkpoints in shards, and of the pointer."""
    return sorted(["latest.symlink", *(f"{batch}/{name}" for batch in batches for name in SHARDS[1:])])


def whole_names(uri, prefix=""):
    """Returns the names of all objects in a store, without a prefix."""
    return sorted(one.name.removeprefix(prefix) for one in open_store(uri).list(""))


def names_in(folder):
    """Returns the names of all files and folders in a folder."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_shards_follow_the_rules_too(in_epochs, tmp_path):
    """Whole folders go, here and by a destination, across two sessions."""
    for duration in ("3ep", "6ep"):
        artifacts = Artifacts(tmp_path / "store", spool=tmp_path / "spool", free_bytes=0)
        in_epochs(artifacts, duration=duration, sharded=True, **RULES)

    assert whole_names(tmp_path / "store", "test/checkpoints/") == folders_of(10, 15, 25, 30)
    assert names_in(tmp_path / "saved") == sorted([*folders_of(10, 30), "10", "30"])


def test_a_run_directory_follows_the_rules_with_shards_too(in_epochs, tmp_path):
    """No file of those that are removed stays as a hard link, and no empty folder."""
    in_epochs(RunDirectory(tmp_path / "run"), keep=1, sharded=True)

    assert names_in(tmp_path / "saved") == sorted([*folders_of(30), "30"])
    assert names_in(tmp_path / "run/artifacts/test/checkpoints") == sorted([*folders_of(30), "30"])


def test_shards_of_which_a_part_is_of_another_run_are_not_deleted(in_epochs, tmp_path, caplog):
    """The name was taken: the checkpoint is not whole there, and none of its objects is known to be ours."""
    folder = tmp_path / "store" / "test/checkpoints" / "10"
    folder.mkdir(parents=True)
    (folder / "rank-0.pt").write_bytes(b"of another run")

    artifacts = Artifacts(tmp_path / "store", spool=tmp_path / "spool", free_bytes=0)
    in_epochs(artifacts, keep_in_store=1, sharded=True)

    assert (folder / "rank-0.pt").read_bytes() == b"of another run"
    assert whole_names(tmp_path / "store", "test/checkpoints/") == folders_of(10, 30)
    assert "The pointer to" in caplog.text


def copy_missing(source, target):
    """Copies the files that are in one folder and not in the other."""
    for path in source.rglob("*"):
        if path.is_file() and not (copy := target / path.relative_to(source)).exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)


@pytest.mark.parametrize(
    ("sharded", "lost", "is_uri"),
    [
        (False, (), False),
        (False, (), True),
        (False, ("30.pt", "latest.symlink"), False),
        (True, ("30/rank-0.pt", "latest.symlink"), False),
    ],
    ids=["deletions", "deletions-in-its-store", "upload", "shards"],
)
def test_a_session_with_nothing_to_train_finishes_the_work_of_a_killed_one(
    in_epochs, monkeypatch, tmp_path, sharded, lost, is_uri
):
    """Removes and deletes; first uploads the checkpoint and its pointer where they have not arrived."""
    monkeypatch.setenv("UPLOADS_HOME", str(tmp_path / "machine"))

    def run(duration):
        rules = {"duration": duration, "keep": 1, "keep_in_store": 1, "sharded": sharded}
        if is_uri:
            in_epochs(folder=f"file://{tmp_path}/store/test/checkpoints", **rules)
        else:
            in_epochs(Artifacts(tmp_path / "store", spool=tmp_path / "spool", free_bytes=0), **rules)

    run("5ep")
    saved = next((tmp_path / "machine").glob("*.checkpoints")) if is_uri else tmp_path / "saved"
    folders = tmp_path / "store", saved
    for folder in folders:
        shutil.copytree(folder, tmp_path / "before" / folder.name)
    run("6ep")
    for folder in folders:
        copy_missing(tmp_path / "before" / folder.name, folder)
    for name in lost:
        (tmp_path / "store/test/checkpoints" / name).unlink(missing_ok=True)
    if lost:
        shutil.copy2(
            tmp_path / "before/store/test/checkpoints/latest.symlink", tmp_path / "store/test/checkpoints"
        )

    run("6ep")

    left = folders_of(30) if sharded else ["30.pt", "latest.symlink"]
    assert whole_names(tmp_path / "store", "test/checkpoints/") == left
    assert [name for name in names_in(saved) if name != "30"] == left
    newest = (tmp_path / "store/test/checkpoints/latest.symlink").read_text().rpartition("checkpoints/")[2]
    assert newest == ("30/manifest.json" if sharded else "30.pt")
    read_checkpoint(tmp_path / "store/test/checkpoints" / newest)


def test_a_session_with_nothing_to_train_uploads_nothing_that_is_there(in_epochs, tmp_path):
    """The files in the store still belong to the previous session."""

    def run():
        artifacts = Artifacts(tmp_path / "store", spool=tmp_path / "spool", free_bytes=0)
        in_epochs(artifacts, keep=1, keep_in_store=1)
        return {path: path.stat().st_ino for path in (tmp_path / "store").rglob("*")}

    assert run() == run()


def test_a_run_directory_alone_follows_the_rules_without_a_second_copy(in_epochs, tmp_path):
    """It has hard links to the saver's files, which are removed together and listed in its record."""
    in_epochs(RunDirectory(tmp_path / "run"), keep=Retention(1, best="metrics/eval/accuracy"))

    kept = tmp_path / "run/artifacts/test/checkpoints"
    assert sorted(path.name for path in kept.iterdir()) == ["10.pt", "30.pt", "latest.symlink"]
    for name in ("10.pt", "30.pt"):
        assert (kept / name).stat().st_ino == (tmp_path / "saved" / name).stat().st_ino
    run = Run.open(tmp_path / "run")
    assert {one.name.rpartition("/")[2] for one in run.artifacts()} == {"10.pt", "30.pt", "latest.symlink"}
    assert run.record_counts()["artifacts"].names["test/checkpoints/5.pt"] == 0


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_name_that_is_used_again_is_not_removed_for_the_one_that_had_it(make_trainer, tmp_path, is_moved):
    """They go here and in the store, after a resume, which does again what a killed session may not have done."""

    def run(folder, duration):
        artifacts = Artifacts(tmp_path / "store", spool=tmp_path / "spool", free_bytes=0)
        saver = CheckpointSaver(
            folder,
            "{batch_in_epoch}.pt",
            save_interval="2ba",
            latest_filename=None,
            keep=1,
            keep_in_store=1,
        )
        options = {"max_duration": duration, "autoresume": True, "samples": 16}
        with make_trainer(callbacks=saver, loggers=artifacts, **options) as trainer:
            trainer.fit()
        return names_in(folder), stored(tmp_path / "store")

    run(tmp_path / "saved", "4ba")
    folder = (tmp_path / "saved").rename(tmp_path / "moved") if is_moved else tmp_path / "saved"
    # What a folder has been moved with is not known there any more, and stays.
    left = ["0.pt", "2.pt"] if is_moved else ["2.pt"]

    assert run(folder, "6ba") == (left, ["2.pt"])
    assert run(folder, "6ba") == (left, ["2.pt"])


@pytest.mark.parametrize(
    "value", [{"path": 1}, {"path": "x", "shards": "9"}, {"path": "x", "metric": "1"}, {}], ids=str
)
def test_checkpoints_are_checked_when_they_are_read(value):
    """It comes from a file; entries of a later version are ignored."""
    with pytest.raises(TypeError):
        SavedCheckpoint.from_state(value)
    assert SavedCheckpoint.from_state({"path": "x", "later": 1}) == SavedCheckpoint("x")


def test_paths_in_a_checkpoint_that_lead_elsewhere_are_not_removed(in_epochs, tmp_path):
    """One that was made by someone else may name any file."""
    (tmp_path / "precious.pt").write_bytes(b"mine")
    in_epochs(duration="2ep", keep=1)
    newest = tmp_path / "saved" / "10.pt"
    checkpoint = torch.load(newest, weights_only=True)
    for part in ("saved", "removed", "stored", "deleted"):
        checkpoint["callbacks"]["CheckpointSaver"][part] = [
            {
                "path": f"{tmp_path}/{name}",
                "remote_name": "../precious.pt",
                "number": 0,
                "batch": 0,
                "metric": None,
                "shards": shards,
            }
            for name in ("precious.pt", "saved/../precious.pt")
            for shards in (0, 10**12)
        ]
    torch.save(checkpoint, newest)

    in_epochs(duration="4ep", keep=1, keep_in_store=1)

    assert (tmp_path / "precious.pt").read_bytes() == b"mine"
    assert (tmp_path / "saved" / "20.pt").exists()


@pytest.mark.parametrize("is_uri", [False, True], ids=["destination", "store"])
def test_names_that_no_store_allows_do_not_end_training(in_epochs, monkeypatch, tmp_path, is_uri):
    """They are left alone, and what this run has saved is deleted as it should be."""
    monkeypatch.setenv("UPLOADS_HOME", str(tmp_path / "machine"))
    prefix = "" if is_uri else "test/checkpoints/"
    uri = f"file://{tmp_path}/store/test/checkpoints"

    def run(duration):
        artifacts = Artifacts(tmp_path / "store", spool=tmp_path / "spool", free_bytes=0)
        loggers, folder = ((), uri) if is_uri else ((artifacts,), tmp_path / "saved")
        in_epochs(*loggers, folder=folder, duration=duration, keep=1, keep_in_store=1)

    run("2ep")
    newest = next((tmp_path / "machine").glob("*.checkpoints/10.pt")) if is_uri else tmp_path / "saved/10.pt"
    checkpoint = torch.load(newest, weights_only=True)
    names = ["", "..", "{what}", "a\nb.pt"]
    remote_names = [open_store(uri).uri(name) if is_uri else f"{prefix}{name}" for name in names]
    state = checkpoint["callbacks"]["CheckpointSaver"]
    for part in ("stored", "removed", "deleted"):
        state[part] = [
            *state[part],
            {"path": "bare"},
            *({"path": path, "remote_name": name} for path, name in zip(names, remote_names, strict=True)),
        ]
    torch.save(checkpoint, newest)
    if is_uri:
        shutil.copy2(newest, tmp_path / "store/test/checkpoints")

    run("3ep")

    assert stored(tmp_path / "store") == ["15.pt", "latest.symlink"]


def staged(machine):
    """Returns the bytes of checkpoints that wait on a machine, each once, and how many entries wait."""
    files = {path.stat().st_ino: path.stat().st_size for path in machine.rglob("*") if path.is_file()}
    return sum(files.values()), len(list(machine.glob("*/*/pending/*")))


class UntilItIsAway(Callback):
    """Holds training after four batches, when two checkpoints have been handed on, until an upload has failed three times."""

    def batch_end(self, state, logger):
        if state.timestamp.batch == 4:
            (saver,) = (one for one in state.callbacks if isinstance(one, CheckpointSaver))
            until(lambda: saver._publisher._store.queue.is_retrying(3))


@pytest.mark.parametrize(
    ("rules", "sharded"),
    [({"keep": 1}, True), ({"keep_in_store": 1}, False)],
    ids=["shards", "store"],
)
def test_surplus_checkpoints_do_not_wait_for_an_unreachable_store(
    make_trainer, monkeypatch, tmp_path, caplog, rules, sharded
):
    """The newest is uploaded, and so are uploads in progress; the others are counted and reported."""
    monkeypatch.setenv("UPLOADS_HOME", str(tmp_path / "machine"))
    away = "s3://bucket/x?endpoint_url=http://127.0.0.1:9&aws_access_key_id=a&aws_secret_access_key=b"
    saver = CheckpointSaver(
        away, "{batch}.pt", save_interval="1ba", close_seconds=0.0, sharded=sharded, **rules
    )
    with make_trainer(callbacks=[UntilItIsAway(), saver], max_duration="14ba") as trainer:
        trainer.fit()

    size, entries = staged(tmp_path / "machine")
    one = 4 if sharded else 1
    assert entries <= 5 * one + 1
    assert size < 10 * 20_000
    assert saver.counts.saved == 14
    # At most four are being sent.
    assert 9 <= saver.counts.withdrawn <= 13
    assert caplog.text.count("are not uploaded while uploads to") == 1
    assert f"{saver.counts.withdrawn} checkpoints were not uploaded" in caplog.text


def test_a_stricter_rule_is_applied_to_all_that_is_there(make_trainer, tmp_path):
    """It removes as many at once as it must; the session after one that was killed before it did so removes them too."""

    def run(duration, **rules):
        saver = CheckpointSaver(tmp_path / "saved", "{batch}.pt", save_interval="1ba", **rules)
        with make_trainer(callbacks=saver, max_duration=duration, autoresume=True) as trainer:
            trainer.fit()

    run("40ba")
    shutil.copytree(tmp_path / "saved", tmp_path / "copy")

    run("41ba", keep=2)

    assert names_in(tmp_path / "saved") == ["40.pt", "41.pt", "latest.symlink"]
    for path in (tmp_path / "copy").glob("*.pt"):
        if path.name != "40.pt":
            path.rename(tmp_path / "saved" / path.name)
    run("42ba", keep=2)
    assert names_in(tmp_path / "saved") == ["41.pt", "42.pt", "latest.symlink"]
