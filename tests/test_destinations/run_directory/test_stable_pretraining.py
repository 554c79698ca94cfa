"""stable-pretraining's own scanner, query and viewer read our folders.

Its wheel is installed beside the environment, without dependencies.
"""

import importlib
import logging
import sys
import types

import numpy as np
import pytest

from tests.peers import folder_of

THEIRS = folder_of("stable_pretraining")
pytestmark = pytest.mark.skipif(THEIRS is None, reason="stable-pretraining is not there (.ci/peers.txt)")


@pytest.fixture
def theirs(monkeypatch):
    """Imports modules of stable-pretraining without its package, which needs Lightning, loguru and more."""
    for name, path in (("", THEIRS), (".registry", f"{THEIRS}/registry"), (".web", f"{THEIRS}/web")):
        package = types.ModuleType(f"stable_pretraining{name}")
        package.__path__ = [path]
        monkeypatch.setitem(sys.modules, package.__name__, package)
    loguru = types.ModuleType("loguru")
    loguru.logger = logging.getLogger("loguru")
    monkeypatch.setitem(sys.modules, "loguru", loguru)
    names = ("registry._sidecar", "registry._store", "registry._scanner", "registry.query", "web.scan")
    yield {name: importlib.import_module(f"stable_pretraining.{name}") for name in names}
    for name in list(sys.modules):
        if name.startswith("stable_pretraining."):
            monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def cache(drive, tmp_path):
    """A cache folder with a finished run and a running one."""
    done = drive(tmp_path / "cache" / "runs" / "day" / "one", run_id="one", tags=["t"], notes="n").fit()
    done.logger.log_hyperparameters({"optim": {"lr": 0.1}})
    for step in range(20):
        done.log({"loss": 1.0 / (step + 1)} if step < 10 else {"loss": 1.0 / (step + 1), "acc": step}, step)
    done.logger.log_images(np.zeros((2, 4, 4, 3)), "val/images", channels_last=True, step=3)
    done.close()
    live = drive(tmp_path / "cache" / "runs" / "day" / "two", run_id="two").fit()
    live.log({"loss": float("nan")}, 0)
    live.stand_still()
    return tmp_path / "cache"


def test_its_registry_lists_our_runs(theirs, cache, tmp_path):
    """A scan takes both runs, with status, tags, hyperparameters and summary."""
    db = tmp_path / "registry.db"
    registry = theirs["registry.query"].open_registry(db, cache_dir=cache)
    records = {record.run_id: record for record in registry.query()}
    best = registry.query(sort_by="summary.loss", status="completed")
    registry.close()

    assert set(records) == {"one", "two"}
    one = records["one"]
    assert (one.status, one.alive, one.tags, one.notes) == ("completed", False, ["t"], "n")
    assert one.hparams == {"optim.lr": 0.1}
    assert one.summary == {"loss": 0.05, "acc": 19}
    assert one.run_dir == str(cache / "runs" / "day" / "one")
    assert (records["two"].status, records["two"].alive) == ("running", True)
    assert [record.run_id for record in best] == ["one"]


def test_its_viewer_reads_our_metrics_and_media(theirs, cache):
    """The scanner behind its web page finds the metrics, the media and their files."""
    scanner = theirs["web.scan"].RunScanner(cache)
    scanner._scan()
    (key,) = [run["run_id"] for run in scanner.runs_json() if run["run_dir"].endswith("one")]
    metrics = scanner.metrics_json(key)["metrics"]
    media = scanner.media_json(key)["events"]

    assert metrics["loss"]["y"] == [1.0 / (step + 1) for step in range(20)]
    assert metrics["acc"]["step"] == list(range(10, 20))
    assert [(event["tag"], event["type"], event["step"]) for event in media] == [
        ("val/images", "image", 3)
    ] * 2
    assert all(scanner.media_file_path(key, event["path"]).is_file() for event in media)
