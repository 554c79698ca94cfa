"""Refused, truncated and missing objects of a bucket: readers return the data or report the loss.

Each object of a bucket with several kinds of runs is refused, truncated and deleted in turn. A reader must
return correct data, raise, or name the problem in the scan's report; it must not treat anything as empty.
"""

import contextlib
import shutil
import time

import numpy as np
import pytest

from destinations import RunDirectory, cli
from destinations.runs import RunsError, open_runs
from destinations.runs.content.checkpoints import list_checkpoints
from destinations.runs.dataset import compact, open_dataset
from destinations.runs.errors import DatasetError
from destinations.runs.index import bucket as bucket_module
from destinations.viewer import Viewer
from tests.test_destinations.runs.written import Written
from tests.test_destinations.viewer.served import Client
from tests.test_destinations.viewer.test_bucket import send
from uploads import LocalStore, register_store
from uploads.errors import RejectedByStoreError, RemoteNotFoundError

NAMES = ("ended", "killed", "plain")
# A dataset without these objects would have a run without rows, or none.
_ROWS = (".zip", ".csv", ".parquet", "sidecar.json")
LAST_PIECE = "live/rank0/0001/00000005-00000005.zip"


class SmallParts(RunDirectory):
    """Closes a part after a few dozen rows."""

    _part_bytes = 500


class WithParts(Written):
    """A run with closed parts."""

    kind = SmallParts


class Unreliable(LocalStore):
    """A folder as a store that answers wrongly for one object, and counts its answers."""

    folder = None
    fault = None
    name = None
    asked = 0

    def __init__(self, location):
        super().__init__(self.folder)

    def uri(self, name=""):
        return f"unreliable://runs/{name}".rstrip("/")

    def list(self, prefix=""):
        for one in super().list(prefix):
            if not (self.fault == "lost" and one.name == self.name):
                yield one

    def head(self, name):
        self._answer(name)
        return None if self.fault == "gone" and name == self.name else super().head(name)

    def get(self, name, offset=0, version=None):
        self._answer(name)
        content = b"".join(super().get(name, offset, version))
        yield content[: len(content) // 2] if self.fault == "cut" and name == self.name else content

    def _answer(self, name):
        type(self).asked += 1
        if name == self.name and self.fault == "refused":
            raise RejectedByStoreError(f"403 AccessDenied {name}")
        if name == self.name and self.fault in {"gone", "lost"}:
            raise RemoteNotFoundError(f"404 {name}")


def log_some(run, first=0, count=60):
    """Logs some rows of a counting metric, and an image."""
    for step in range(first, first + count):
        run.log({"loss": float(step)}, step)
    run.logger.log_images(np.full((2, 2), first, np.uint8), "Inputs", step=first)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    """A store's folder with a completed run, a killed one, and one that was copied there."""
    folder = tmp_path_factory.mktemp("unreadable")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        with WithParts(folder / "runs" / "plain") as run:
            run.logger.log_hyperparameters({"lr": {"first": 0.1}})
            log_some(run)
            with Written(folder / "runs" / "plain", writer="eval") as late:
                late.log({"acc": 0.5}, 3)
        with WithParts(f"file://{folder}/runs/ended", mirror_seconds=10.0) as run:
            run.logger.log_hyperparameters({"lr": {"first": 0.1}})
            log_some(run)
        with WithParts(f"file://{folder}/open/killed", mirror_seconds=10.0) as run:
            run.logger.log_hyperparameters({"lr": {"first": 0.1}})
            for first in range(0, 60, 15):
                log_some(run, first, 15)
                send(run)
            shutil.copytree(folder / "open" / "killed", folder / "runs" / "killed")
    for path in (folder / "runs").rglob(".*"):
        if path.is_file():
            path.unlink()
    return folder / "runs"


def objects_of(bucket, name=""):
    """Returns the names of a run's objects, or of all, without heartbeats, which nobody reads in a bucket."""
    found = (path.relative_to(bucket).as_posix() for path in (bucket / name).rglob("*") if path.is_file())
    return sorted(one for one in found if not one.endswith("heartbeat"))


@pytest.fixture
def reading(bucket, tmp_path, monkeypatch):
    """Opens the bucket without an earlier copy."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(Unreliable, "folder", bucket)
    register_store("unreliable", Unreliable)

    def opened(name=None, fault=None):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        Unreliable.name, Unreliable.fault = name, fault
        # Every heartbeat is old by then, because `follow` waits for a live run.
        return open_runs("unreliable://runs", clock=lambda: time.time() + 10_000)

    yield opened
    Unreliable.name = Unreliable.fault = None


READERS = {
    "hparams": lambda run: dict(run.hparams),
    "hyperparameters": lambda run: run.hyperparameters,
    "status": lambda run: run.status,
    "environment": lambda run: sorted(run.environment),
    "sessions": lambda run: [one["session"] for one in run.sessions],
    "receipt": lambda run: sorted(run.receipt),
    "writers": lambda run: run.writers,
    "loss": lambda run: run.series("loss").value.tolist(),
    "blocks": lambda run: sum(len(block) for block in run.blocks()),
    "follow": lambda run: [row.metrics for row in run.follow(until_end=True)],
    "summary": lambda run: {name: one.last for name, one in run.summary.items()},
    "images": lambda run: [np.asarray(one.load()).tolist() for one in run.images()],
    "counts": lambda run: {name: one.count for name, one in run.record_counts().items()},
}


def answers_of(run):
    """Returns each reader's result for a run, or the exception that it raised."""
    found = {}
    for what, read in READERS.items():
        try:
            found[what] = read(run)
        except (OSError, RunsError) as error:
            found[what] = error
    return found


def is_said(runs, name, caplog):
    """Returns whether the report, the run or the log names a problem of a run."""
    report = runs.scan()
    texts = [f"{path}: {text}" for path, text in (*report.problems, *report.unlisted)]
    texts += [str(runs[name].record.problem or ""), *(one.getMessage() for one in caplog.records)]
    return any(name in text or "lost" in text for text in texts)


def is_absent(name, fault, one, what):
    """Returns whether nothing shows that the object existed: a document, or a killed run's last piece."""
    if fault != "lost":
        return False
    return one == f"{name}/{LAST_PIECE}" or (name == "plain" and what not in {"loss", "blocks", "follow"})


@pytest.mark.parametrize("fault", ["refused", "cut", "gone", "lost"])
@pytest.mark.parametrize("name", NAMES)
def test_readers_show_all_rows_or_report_the_loss(bucket, reading, caplog, name, fault):
    """For any unreadable object, the run is listed, and no reader silently returns other values."""
    with reading() as runs:
        truth = answers_of(runs[name])
    assert truth["loss"] == [float(step) for step in range(60)]
    wrong = []
    for one in objects_of(bucket, name):
        caplog.clear()
        with reading(one, fault) as runs:
            assert sorted(run.name for run in runs) == sorted(NAMES), one
            for other in {*NAMES} - {name}:
                assert READERS["loss"](runs[other]) == truth["loss"], (one, other)
            for what, value in answers_of(runs[name]).items():
                if (
                    value != truth[what]
                    and not isinstance(value, OSError)
                    and not is_absent(name, fault, one, what)
                    and not is_said(runs, name, caplog)
                ):
                    wrong.append((one, what, str(value)[:200]))

    assert wrong == []


def rows_of(dataset):
    """Returns each run of a dataset with its status and its number of values."""
    with open_dataset(dataset) as opened:
        found = opened.sql(
            "select r.run_id, r.status, count(m.value) from runs r left join metrics m using (run_id) group by all"
        )
    return {run_id: rest for run_id, *rest in found.rows}


@pytest.mark.parametrize("fault", ["refused", "lost"])
def test_dataset_takes_whole_runs_and_keeps_its_content(bucket, reading, tmp_path, fault):
    """An unreadable run is reported. The dataset gets no part of it, and keeps all that it has."""
    pytest.importorskip("deltalake")
    with reading() as runs:
        compact(runs, tmp_path / "dataset")
    truth = rows_of(tmp_path / "dataset")
    assert len(truth) == len(NAMES)
    for number, one in enumerate(objects_of(bucket)):
        if not one.endswith(_ROWS) or (fault == "lost" and one.endswith(LAST_PIECE)):
            continue
        new = tmp_path / f"new{number}"
        with reading(one, fault) as runs:
            report = compact([runs[one.partition("/")[0]]], new)
            # It may refuse to remove deleted runs.
            with contextlib.suppress(DatasetError):
                assert compact(runs, tmp_path / "dataset", remove_gone=True).removed == 0

        assert report.runs + len(report.damaged) == 1, one
        if report.runs:
            found = rows_of(new)
            assert found == {run_id: truth[run_id] for run_id in found}, one
    assert rows_of(tmp_path / "dataset") == truth


def test_cut_listing_removes_nothing(bucket, reading, tmp_path, monkeypatch):
    """Runs beyond the limit aren't gone: the scan warns, and `compact` neither removes nor hides them."""
    pytest.importorskip("deltalake")
    with reading() as runs:
        compact(runs, tmp_path / "dataset")
    truth = rows_of(tmp_path / "dataset")
    monkeypatch.setattr(bucket_module, "_MAX_OBJECTS", 12)

    with reading() as runs:
        report = compact(runs.query(archived=None), tmp_path / "dataset")
        with pytest.raises(DatasetError, match="has more than 12 objects"):
            compact(runs.query(archived=None), tmp_path / "dataset", remove_gone=True)

        assert len(runs) < len(NAMES)
        assert any("has more than 12 objects" in warning for warning in runs.report.warnings)
    assert any("has more than 12 objects" in problem for _, problem in report.damaged)
    assert rows_of(tmp_path / "dataset") == truth


def test_unlistable_store_removes_nothing(bucket, reading, tmp_path, monkeypatch):
    """Known runs stay, and the report says why there is nothing newer."""
    pytest.importorskip("deltalake")

    def refuse(self, prefix=""):
        raise RejectedByStoreError("403 AccessDenied")

    with reading() as runs:
        monkeypatch.setattr(Unreliable, "list", refuse)
        report = runs.scan(full=True)

        assert sorted(run.name for run in runs) == sorted(NAMES)
        assert [text for _, text in report.unlisted] == list(report.warnings)
        assert "cannot be listed: 403 AccessDenied" in report.warnings[0]
        with pytest.raises(DatasetError, match="cannot be listed"):
            compact(runs, tmp_path / "dataset", remove_gone=True)


@pytest.mark.parametrize(
    ("file", "ask"),
    [
        ("environment.json", lambda run: run.environment),
        ("sidecar.json", lambda run: run.receipt),
        ("sessions.jsonl", lambda run: run.sessions),
        ("media.jsonl", lambda run: run.images()),
        ("metrics.csv", lambda run: run.series("loss")),
    ],
)
def test_unreadable_file_in_a_folder_raises(tmp_path, capsys, file, ask):
    """Reading the file raises; `show` and the page have the rest of the run."""
    with Written(tmp_path / "runs" / "one") as run:
        log_some(run, count=3)
    place = tmp_path / "runs" / "one" / file
    place.unlink()
    place.mkdir()

    with open_runs(tmp_path / "runs", cache=tmp_path / "cache") as runs:
        (found,) = runs.query()
        with pytest.raises(OSError, match=r"Is a directory"):
            ask(found)
        with Viewer(runs, port=0) as viewer:
            page = Client(viewer)
            answer = page.get(f"/api/runs/{page.run_id(found.name)}")
    code = cli.main(["runs", "show", str(tmp_path / "runs" / "one")])

    said = capsys.readouterr()
    assert "one" in said.out
    assert any("Is a directory" in error["text"] for error in answer["errors"])
    assert "Is a directory" in said.err
    assert code == 1


def test_unreadable_checkpoint_hides_no_other(tmp_path, monkeypatch):
    """A refused pointer causes a warning, a refused manifest a problem of its checkpoint."""
    (tmp_path / "store" / "ep2").mkdir(parents=True)
    (tmp_path / "store" / "ep1.pt").write_bytes(b"no checkpoint")
    (tmp_path / "store" / "latest.symlink").write_text("ep1.pt")
    (tmp_path / "store" / "ep2" / "manifest.json").write_text("{}")
    monkeypatch.setattr(Unreliable, "folder", tmp_path / "store")
    monkeypatch.setattr(Unreliable, "fault", "refused")
    register_store("unreliable", Unreliable)

    found = {}
    for refused in ("latest.symlink", "ep2/manifest.json"):
        monkeypatch.setattr(Unreliable, "name", refused)
        warnings = []
        checkpoints = list_checkpoints("unreliable://runs", warnings.append)
        found[refused] = {one.name: one.problem for one in checkpoints}, warnings

    refusal = "403 AccessDenied ep2/manifest.json"
    assert found["ep2/manifest.json"] == ({"ep2": refusal, "ep1.pt": "not a zip file, or cut short"}, [])
    names, warnings = found["latest.symlink"]
    assert set(names) == {"ep1.pt", "ep2"}
    assert warnings == ["cannot read the pointer latest.symlink: 403 AccessDenied latest.symlink"]
