"""The results and the cost of a scan."""

import collections
import functools
import importlib.util
import json
import math
import os
import shutil
from pathlib import Path

import pytest

from destinations.runs import RootError, open_runs
from destinations.runs.index.scan import FileSystem
from tests.peers import folder_of
from tests.test_destinations.runs.folders import HOUR, NOW, age, write_lightning, write_run
from uploads.disk import try_lock


class CountingDisk(FileSystem):
    """Counts calls of the file system by kind and name."""

    def __init__(self):
        self.calls = []

    def stat(self, path):
        self.calls.append(("stat", path))
        return FileSystem.stat(path)

    def exists(self, path):
        self.calls.append(("exists", path))
        return super().exists(path)

    def list(self, path):
        self.calls.append(("list", path))
        return super().list(path)

    def read(self, path):
        self.calls.append(("read", path))
        return super().read(path)


def counts(report):
    """Returns the nonzero counts of a report."""
    names = ("runs", "added", "changed", "unchanged", "moved", "gone", "alive", "damaged", "orphans")
    return {name: getattr(report, name) for name in names if getattr(report, name)}


def ids(runs, **query):
    """Returns the ids of matching runs."""
    return sorted(run.record.run_id for run in runs.query(**query))


def test_a_scan_finds_runs_at_any_depth(opened, root):
    """Users put run folders anywhere."""
    write_run(root / "a")
    write_run(root / "20260101" / "120000" / "b")

    report = opened.scan()

    assert counts(report) == {"runs": 2, "added": 2}
    assert ids(opened) == ["a", "b"]
    assert opened["b"].record.path == root / "20260101" / "120000" / "b"


def test_every_field_of_a_sidecar_is_indexed(opened, root):
    """The record has the sidecar's fields with the expected types."""
    write_run(
        root / "a",
        run_id="id",
        status="failed",
        ended_at=NOW,
        updated_at=NOW + 1,
        tags=["x", "y", "x"],
        notes="n",
        hparams={"optim.lr": 0.1, "n": 3, "name": "adam", "flag": True, "none": None, "list": "[1, 2]"},
        summary={"val/acc": 0.5, "count": 7},
        checkpoint_path="ep1.pt",
    )

    opened.scan()

    record = opened["id"].record
    assert (record.status, record.kind, record.problem) == ("failed", "run-directory", None)
    assert (record.created_at, record.ended_at, record.updated_at) == (NOW - HOUR, NOW, NOW + 1)
    assert (record.tags, record.notes, record.checkpoint_path) == (("x", "y"), "n", "ep1.pt")
    assert record.hparams == {
        "optim.lr": 0.1,
        "n": 3,
        "name": "adam",
        "flag": True,
        "none": None,
        "list": "[1, 2]",
    }
    assert record.hparams["flag"] is True
    assert record.summary == {"val/acc": 0.5, "count": 7}


def test_unchanged_finished_run_costs_one_stat(root, with_disk):
    """The folder around it costs no more."""
    for name in "abc":
        write_run(root / "group" / name)
    age(root / "group", root)
    disk = CountingDisk()
    runs = with_disk(disk)
    runs.scan()
    disk.calls.clear()

    report = runs.scan()

    assert counts(report) == {"runs": 3, "unchanged": 3}
    paths = [str(root), f"{root}/", f"{root}/group", *(f"{root}/group/{name}" for name in "abc")]
    assert sorted(disk.calls) == [("stat", path) for path in paths]


def test_a_new_run_costs_six_system_calls(root, opened, monkeypatch):
    """The scan lists the folder; opens, stats, reads and closes the sidecar; and looks for edits."""
    for name in "abc":
        write_run(root / name)
    calls = []

    def counted(name, call, *args, **options):
        calls.append((name, str(args[0])))
        return call(*args, **options)

    for name in ("stat", "open", "fstat", "read", "close", "access", "lstat", "scandir"):
        monkeypatch.setattr(os, name, functools.partial(counted, name, getattr(os, name)))
    monkeypatch.setattr(FileSystem, "stat", staticmethod(os.stat))

    report = opened.scan()

    assert counts(report) == {"runs": 3, "added": 3}
    sidecar = str(root / "a" / "sidecar.json")
    begin = calls.index(("stat", str(root / "a")))
    assert [name for name, _ in calls[begin : begin + 6]] == [
        "stat",
        "open",
        "fstat",
        "read",
        "close",
        "access",
    ]
    assert calls[begin + 1] == ("open", sidecar)
    assert [name for name, _ in calls].count("fstat") == 3


def test_a_running_run_costs_two_stats(root, with_disk):
    """They are for its folder and its heartbeat."""
    write_run(root / "a", status="running", beat=NOW)
    age(root)
    disk = CountingDisk()
    runs = with_disk(disk)
    runs.scan()
    disk.calls.clear()

    runs.scan()

    asked = [call for call in disk.calls if str(root / "a") in call[1]]
    assert asked == [("stat", str(root / "a")), ("stat", str(root / "a" / "heartbeat"))]


def test_only_changed_runs_are_read_again(root, with_disk):
    """If one run logs, only its sidecar is opened."""
    write_run(root / "a")
    write_run(root / "b", summary={"loss": 1.0})
    age(root)
    disk = CountingDisk()
    runs = with_disk(disk)
    runs.scan()
    disk.calls.clear()
    write_run(root / "b", summary={"loss": 0.5})

    report = runs.scan()

    assert counts(report) == {"runs": 2, "changed": 1, "unchanged": 1}
    assert [call for call in disk.calls if call[0] == "read"] == [("read", str(root / "b" / "sidecar.json"))]
    assert runs["b"].record.summary == {"loss": 0.5}


def test_recently_overwritten_sidecar_is_read_again(root, with_disk):
    """Two unknown times count as different, even if file and size are the same."""
    moment = (NOW, NOW)
    sidecar = write_run(root / "a", notes="1") / "sidecar.json"
    os.utime(root / "a", moment)
    os.utime(sidecar, moment)
    runs = with_disk(FileSystem(), clock_ns=lambda: int(NOW * 1e9) + 1000)
    runs.scan()
    text = sidecar.read_text()
    with sidecar.open("r+") as stream:
        stream.write(text.replace('"notes": "1"', '"notes": "2"'))
    os.utime(sidecar, moment)

    report = runs.scan()

    assert counts(report) == {"runs": 1, "changed": 1}
    assert runs["a"].record.notes == "2"


@pytest.mark.parametrize("folder", ["media", "checkpoints", "artifacts", "journal"])
def test_a_scan_never_goes_into_folders_of_many_files(folder, root, with_disk):
    """It enters none in a run and none beside one."""
    write_run(root / "a")
    write_run(root / "a" / folder / "inner")
    write_run(root / folder / "other")
    disk = CountingDisk()
    runs = with_disk(disk)

    report = runs.scan()

    assert counts(report) == {"runs": 1, "added": 1}
    assert not [path for _, path in disk.calls if f"/{folder}" in path]


def test_hidden_folders_and_links_are_left_out(opened, root, tmp_path):
    """A link to a folder could make a cycle."""
    write_run(root / ".git" / "a")
    write_run(tmp_path / "elsewhere" / "b")
    (root / "link").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (root / "round").symlink_to(root, target_is_directory=True)

    report = opened.scan()

    assert counts(report) == {}


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_root_must_be_a_folder(name, tmp_path):
    """The error names the path's type."""
    (tmp_path / "file").touch()
    expected = "does not exist" if name == "missing" else "is not a folder"

    with pytest.raises(RootError, match=expected):
        open_runs(tmp_path / name, cache=tmp_path / "cache")


def test_no_root_raises(tmp_path):
    """An empty list of roots is a mistake."""
    with pytest.raises(RootError, match="at least one folder"):
        open_runs(cache=tmp_path)


def test_missing_root_keeps_its_runs(opened, root):
    """The file system may just not be mounted."""
    write_run(root / "a")
    opened.scan()
    root.rename(root.with_name("away"))

    report = opened.scan()

    assert counts(report) == {"runs": 1}
    assert report.problems == ((root, "root cannot be read: No such file or directory"),)


def test_nested_roots_are_scanned_once(root, tmp_path):
    """Each run is listed once, and the report gives the reason."""
    write_run(root / "inner" / "a")

    with open_runs(root, root / "inner", root, cache=tmp_path / "cache") as runs:
        assert len(runs) == 1
        assert runs.report.warnings == (
            f"root {root / 'inner'} is inside root {root}, and is scanned with it.",
        )


# New, moved and deleted runs.


def test_deleted_run_is_gone(opened, root):
    """The scan counts it and forgets all of it."""
    write_run(root / "a", tags=["t"], hparams={"x": 1})
    write_run(root / "b", hparams={"x": 2})
    opened.scan()
    shutil.rmtree(root / "a")

    report = opened.scan()

    assert counts(report) == {"runs": 1, "gone": 1, "unchanged": 1}
    assert ids(opened, where="exists(hparams.x)") == ["b"]
    assert opened.query(tag="t") == []


def test_moved_run_keeps_its_identity(opened, root):
    """It is neither orphaned nor listed twice."""
    write_run(root / "a", run_id="id")
    opened.scan()
    (root / "a").rename(root / "b")

    report = opened.scan()

    assert counts(report) == {"runs": 1, "added": 1, "gone": 1, "moved": 1}
    assert opened["id"].record.path == root / "b"


def test_duplicate_id_is_reported_with_its_paths(opened, root):
    """A copied folder is a second run with the same id; both are listed."""
    write_run(root / "a", run_id="id")
    write_run(root / "b", run_id="id")
    write_run(root / "c")

    report = opened.scan()

    assert report.duplicates == {"id": (root / "a", root / "b")}
    assert ids(opened) == ["c", "id", "id"]


class DiskThatDoesSomethingOnce(FileSystem):
    """Does something once, before it reads a certain file."""

    def __init__(self, name, act):
        self.name = name
        self.act = act

    def read(self, path):
        if path.endswith(self.name) and self.act is not None:
            act, self.act = self.act, None
            act()
        return super().read(path)


def test_run_deleted_during_the_scan_is_left_out(root, with_disk):
    """It disappears between the scan of the folder and the read of the file."""
    write_run(root / "a")
    write_run(root / "b")
    runs = with_disk(DiskThatDoesSomethingOnce("a/sidecar.json", lambda: shutil.rmtree(root / "a")))

    report = runs.scan()

    assert counts(report) == {"runs": 1, "added": 1}


# Damage.

SIDECAR = json.dumps({"run_id": "a", "status": "completed", "notes": "né", "hparams": {"x": 1}}).encode()
DAMAGE = {
    "empty": b"",
    "no JSON": b"hello",
    "a list": b"[]",
    "no id": b'{"status": "completed"}',
    "an id that is no text": b'{"run_id": 3}',
    "no UTF-8": b'{"run_id": "\xff"}',
    "nothing but NUL": b"\0" * 100,
    "nested too deeply": b"[" * 100_000,
}


@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_sidecar_is_a_run_with_a_problem(content, opened, root):
    """It is counted, and the scan continues; once repaired, it is a normal run."""
    write_run(root / "fine")
    write_run(root / "a")
    (root / "a" / "sidecar.json").write_bytes(content)

    damaged = opened.scan()
    again = opened.scan()

    assert counts(damaged) == {"runs": 2, "added": 2, "damaged": 1}
    assert counts(again) == {"runs": 2, "unchanged": 2, "damaged": 1}
    assert opened["a"].record.problem.startswith("sidecar.json is damaged: ")
    assert (opened["a"].record.status, damaged.problems[0][0]) == ("unknown", root / "a")
    # In place, which doesn't change the folder's time.
    (root / "a" / "sidecar.json").write_bytes(SIDECAR)
    assert counts(opened.scan()) == {"runs": 2, "changed": 1, "unchanged": 1}
    assert (opened["a"].record.problem, opened["a"].record.hparams) == (None, {"x": 1})


def test_sidecar_cut_anywhere_never_raises(opened, root):
    """A truncated file is damaged, wherever it ends; earlier data about the run is kept."""
    write_run(root / "a", notes="before")
    opened.scan()
    problems = collections.Counter()

    for size in range(len(SIDECAR)):
        (root / "a" / "sidecar.json").write_bytes(SIDECAR[:size])
        os.utime(root / "a", (size, size))
        report = opened.scan()
        problems[report.damaged] += 1
        assert opened["a"].record.notes == "before"
        assert opened["a"].record.status == "completed"

    assert problems == {1: len(SIDECAR)}


def test_a_sidecar_with_wrong_types_is_read_in_part(opened, root):
    """A field of the wrong type counts as missing."""
    write_run(
        root / "a",
        status=7,
        created_at="yesterday",
        ended_at=True,
        updated_at=1e300,
        tags="t",
        notes=["n"],
        hparams=[1],
        summary={"loss": "low", "acc": True, "list": [1], "big": 10**400, "x": 2**63},
        checkpoint_path=3,
    )

    opened.scan()

    record = opened["a"].record
    assert (record.status, record.created_at, record.ended_at, record.updated_at) == (
        "unknown",
        None,
        None,
        None,
    )
    assert (record.tags, record.notes, record.hparams, record.checkpoint_path) == ((), "", {}, None)
    assert record.summary == {"acc": 1.0, "big": float("inf"), "x": 2.0**63}


def test_a_run_folder_without_a_sidecar_is_an_orphan(opened, root):
    """The sidecar was deleted or is about to be written; afterwards the folder isn't an orphan any more."""
    (root / "a").mkdir()
    (root / "a" / "heartbeat").touch()
    os.utime(root / "a" / "heartbeat", (0, 0))

    first = opened.scan()

    assert counts(first) == {"runs": 1, "added": 1, "damaged": 1, "orphans": 1}
    assert first.problems == ((root / "a", "sidecar.json is missing"),)
    write_run(root / "a")
    assert counts(opened.scan()) == {"runs": 1, "changed": 1}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_rights_is_a_problem_and_its_runs_stay(opened, root):
    """The runs still exist; the scan just can't read them now."""
    write_run(root / "group" / "a")
    opened.scan()
    (root / "group").chmod(0)

    try:
        report = opened.scan()
    finally:
        (root / "group").chmod(0o755)

    assert report.runs == 1
    assert report.problems[0][1] == "folder cannot be read: Permission denied"
    assert opened.scan().problems == ()


class DiskWithoutRights(FileSystem):
    """Denies access to one folder."""

    def __init__(self, folder):
        self.folder = str(folder)

    def stat(self, path):
        if path.startswith(self.folder):
            raise PermissionError(13, "Permission denied")
        return FileSystem.stat(path)


def test_unreadable_folder_is_checked_again(root, with_disk):
    """The parent folder doesn't change when access is granted."""
    write_run(root / "group" / "a")
    age(root)
    disk = DiskWithoutRights(root / "group")
    runs = with_disk(disk)
    first = runs.scan()
    disk.folder = "nothing"

    second = runs.scan()

    assert (first.runs, first.problems) == (
        0,
        ((root / "group", "folder cannot be read: Permission denied"),),
    )
    assert (second.runs, second.problems) == (1, ())


def test_non_utf8_names_are_found(opened, root):
    """A folder's name may be invalid UTF-8, and a sidecar may contain half a character."""
    name = os.fsdecode(b"caf\xe9")
    write_run(root / name, run_id="a", notes="\ud800", hparams={"\udfff": "x"})
    age(root / name)

    opened.scan()

    assert opened["a"].record.path == root / name
    assert (opened["a"].record.notes, opened["a"].record.hparams) == ("\\ud800", {"\\udfff": "x"})
    assert counts(opened.scan()) == {"runs": 1, "unchanged": 1}


# Values.


def test_non_finite_values_come_back(opened, root):
    """Hyperparameters have the strings of strict JSON.

    The summary has null, which `summary.json` explains.
    """
    write_run(
        root / "a",
        hparams={"limit": "Infinity", "low": "-Infinity", "nan": "NaN", "text": "nan"},
        summary={"loss": None, "gain": None, "other": None, "acc": 0.5},
    )
    metrics = {"loss": {"last": "NaN"}, "gain": {"last": "-Infinity"}}
    (root / "a" / "summary.json").write_text(json.dumps({"metrics": metrics}))

    opened.scan()

    record = opened["a"].record
    assert repr(dict(record.hparams)) == "{'limit': inf, 'low': -inf, 'nan': nan, 'text': 'nan'}"
    assert repr(dict(record.summary)) == "{'loss': nan, 'gain': -inf, 'other': nan, 'acc': 0.5}"


def test_a_run_of_very_many_names_keeps_them_all(opened, root):
    """Names beyond the limit of columns share a table; queries still find and sort them."""
    write_run(root / "a", hparams={f"layers.{index}": index for index in range(2500)})
    write_run(root / "b", hparams={"layers.2400": 1, "layers.7": 3})

    opened.scan()

    assert opened["a"].record.hparams == {f"layers.{index}": index for index in range(2500)}
    assert opened["b"].record.hparams == {"layers.2400": 1, "layers.7": 3}
    assert ids(opened, where="hparams.layers.2400 == 1") == ["b"]
    assert [run.record.run_id for run in opened.query(sort_by="hparams.layers.2400")] == ["b", "a"]


# Liveness.


def test_a_heartbeat_in_the_future_counts_while_the_lock_is_held(opened, root):
    """A file server's clock may be hours ahead; after a kill, such a heartbeat keeps no run alive."""
    write_run(root / "a", status="running", beat=NOW + HOUR)
    with (root / "a" / ".lock").open("w") as lock:
        assert try_lock(lock.fileno())
        held = opened.scan()

    killed = opened.scan()

    assert (held.alive, killed.alive) == (1, 0)
    assert opened.query(where="alive") == []


# Runs of other tools.


def test_folders_of_lightning_are_runs(opened, root):
    """`hparams.yaml` has the hyperparameters, and `metrics.csv` each column's last value."""
    write_lightning(
        root / "lightning_logs" / "version_0",
        "epoch,train_loss,step,val_acc\r\n0,0.5,10,\r\n0,,10,0.9\r\n1,nan,20,\r\n1,0.",
        "optim:\n  lr: 0.1\nlayers: [1, 2]\nmodel: !!python/object:models.Net {width: 3}\nlow: -.inf\n",
    )

    opened.scan()

    record = opened["lightning_logs/version_0"].record
    assert (record.kind, record.status, record.name, record.problem) == (
        "lightning-csv",
        "unknown",
        "version_0",
        None,
    )
    assert repr(dict(record.summary)) == "{'train_loss': nan, 'val_acc': 0.9}"
    assert record.hparams == {
        "optim.lr": 0.1,
        "layers.0": 1,
        "layers.1": 2,
        "model.width": 3,
        "low": float("-inf"),
    }


@pytest.mark.parametrize(
    ("csv", "expected"),
    [
        ("", {}),
        ("loss,step", {}),
        ("loss,step\r\n", {}),
        ("loss,step\r\n0.5,1", {}),
        ("loss,step\r\nlow,1\r\n", {}),
        ("loss,step\r\n0.5\r\n,2\r\n", {"loss": 0.5}),
        ("loss,step\r\n0.5,1,7\r\n", {"loss": 0.5}),
        ("\ufeffloss,step\r\n0.5,1\r\n", {"loss": 0.5}),
        ('"a,b",step\r\n0.5,1\r\n', {"a,b": 0.5}),
    ],
)
def test_any_csv_is_read_as_far_as_possible(csv, expected, opened, root):
    """Rows may be cut off, short, long or not numeric."""
    write_lightning(root / "version_0", csv)

    opened.scan()

    assert opened["version_0"].record.summary == expected


def test_runs_of_stable_pretraining_are_runs(opened, root):
    """Its sidecar has no format version, bare NaN, Lightning's statuses, and fields of its viewer."""
    write_run(
        root / "20260101" / "120000" / "abc",
        format_version=None,
        schema_version=1,
        status="finished",
        hparams={"optim.lr": 0.1},
        summary={"loss": float("nan"), "gain": float("inf")},
        display_name="best",
        archived=True,
    )

    opened.scan()

    record = opened["best"].record
    assert (record.kind, record.status, record.archived) == ("stable-pretraining", "finished", True)
    assert repr(dict(record.summary)) == "{'loss': nan, 'gain': inf}"


def test_files_of_stable_pretraining_are_read(opened, root):
    """Its own functions write the files, with NaN."""
    package = folder_of("stable_pretraining")
    if package is None:
        pytest.skip("stable-pretraining is not there (.ci/peers.txt)")
    # Only the module: its package needs Lightning, loguru and more.
    path = Path(package, "registry", "_sidecar.py")
    spec = importlib.util.spec_from_file_location("theirs", path)
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    folder = root / "20260101" / "120000" / "abc123"
    folder.mkdir(parents=True)
    fields = {
        "hparams": {"optim.lr": 0.1, "layers.0": 3},
        "summary": {"loss": math.nan, "acc": 0.5},
        "tags": ["sweep:7"],
    }
    theirs.write_sidecar(
        folder, theirs.make_sidecar(run_id="abc123", run_dir=str(folder), notes="n", **fields)
    )
    theirs.touch_heartbeat(folder)
    os.utime(folder / "heartbeat", (NOW, NOW))

    report = opened.scan()

    record = opened["abc"].record
    assert counts(report) == {"runs": 1, "added": 1, "alive": 1}
    assert (record.kind, record.status, record.tags, record.notes) == (
        "stable-pretraining",
        "running",
        ("sweep:7",),
        "n",
    )
    assert (record.hparams, repr(record.summary["loss"])) == ({"optim.lr": 0.1, "layers.0": 3}, "nan")
