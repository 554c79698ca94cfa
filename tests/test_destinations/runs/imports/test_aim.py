"""Imports runs of Aim, if its package is installed, and compares them with Aim's own objects."""

import importlib
import os
import sys

import numpy as np
import pytest

from destinations.run_directory import read_rows
from destinations.runs import Run
from destinations.runs.imports import import_runs
from tests import peers

pytestmark = [
    pytest.mark.skipif(
        peers.spec_of("aim") is None,
        reason="aim is not there (.ci/peers.txt): it is built for Linux and Python up to 3.12",
    ),
    # Its modules warn when they are imported.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def aim():
    """The package, which is installed outside the environment."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "path", [*sys.path, str(peers.PEERS)])
        # Aim creates its database in a separate process.
        patched.setenv("PYTHONPATH", str(peers.PEERS), prepend=os.pathsep)
        yield importlib.import_module("aim")


@pytest.fixture(scope="module")
def repo(aim, tmp_path_factory):
    """A repository with one run, indexed as Aim's page indexes it, and the id of the run."""
    from aim.sdk.index_manager import RepoIndexManager

    folder = tmp_path_factory.mktemp("aim")
    run = aim.Run(
        repo=str(folder),
        experiment="digits",
        log_system_params=False,
        capture_terminal_logs=False,
        system_tracking_interval=None,
    )
    run.name, run.description = "The first", "a note"
    run.add_tag("good")
    run["hparams"] = {"lr": 0.1, "net": {"depth": 3}}
    for step in range(3):
        run.track(1 / (step + 1), name="loss", step=step, epoch=1, context={"subset": "train"})
        run.track(step / 7, name="loss", step=step, epoch=1, context={"subset": "val"})
    pixels = np.full((4, 5, 3), 9, np.uint8)
    run.track([aim.Image(pixels, caption="a nine"), aim.Image(pixels + 1)], name="images", step=2)
    run.track(aim.Text("hello"), name="text", step=2)
    run.track(aim.Distribution(np.arange(10.0), bin_count=5), name="weights", step=2)
    run.close()
    repo = aim.Repo.from_path(str(folder))
    assert RepoIndexManager.get_index_manager(repo).index(run.hash)
    return folder, run.hash


def test_imported_run_equals_the_run_of_the_repository(aim, repo, tmp_path):
    """It has the facts, metrics by context, images, texts and distributions."""
    report = import_runs(repo[0], tmp_path / "runs")
    again = import_runs(repo[0], tmp_path / "runs")

    run = Run.open(tmp_path / "runs/The first")
    theirs = next(aim.Repo.from_path(str(repo[0])).iter_runs())
    metrics = {one.context["subset"]: one.data.numpy() for one in theirs.metrics()}
    rows = list(read_rows(run.path))
    for name, (steps, (values, _, times)) in metrics.items():
        found = [(row.step, row.metrics[f"{name}/loss"]) for row in rows if f"{name}/loss" in row.metrics]
        assert found == list(zip(steps, values, strict=True))
        assert all(abs(row.time - time) < 1 for row, time in zip(rows, times, strict=False))
    assert (run.run_id, run.status, run.created_at) == (repo[1], "completed", theirs.creation_time)
    assert (run.record.tags, run.record.notes) == (("good",), "a note")
    assert run.hyperparameters == {"lr": 0.1, "net": {"depth": 3}}
    assert {row.epoch for row in rows} == {1}
    assert [image.caption for image in run.images("images")] == ["a nine", None]
    assert [int(image.array().max()) for image in run.images("images")] == [9, 10]
    (histogram,), (text,) = run.histograms("weights"), run.texts("text")
    assert (histogram.counts.tolist(), text.text) == ([2, 2, 2, 2, 2], "hello")
    assert (report.failures, dict(report.left_out), again.unchanged) == ([], {}, 1)
