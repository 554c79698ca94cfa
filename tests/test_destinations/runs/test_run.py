"""Opens a run from its folder."""

import math

import pytest

from destinations.runs import Run, RunNotFoundError, RunRecord
from destinations.runs.run import MetricSummary
from tests.test_destinations.runs.written import Written, write_csv, write_stable_pretraining


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of our own."""
    run_dir = tmp_path_factory.mktemp("runs") / "digits"
    with Written(run_dir, tags=["demo"], notes="first") as written:
        written.logger.log_hyperparameters({"optim": {"lr": 0.1, "betas": [0.9, 0.99]}})
        for step in range(10):
            written.log({"loss": 1 / (step + 1)}, step)
        written.log({"loss": math.nan, "val/acc": 0.5}, 10)
    return run_dir


def test_a_finished_run_has_all_its_data(finished):
    """The folder has fields, both forms of hyperparameters, statistics, environment, sessions and receipt."""
    run = Run.open(finished)

    assert (run.path, run.name, run.kind, run.status) == (finished, "digits", "run-directory", "completed")
    assert (run.tags, run.notes, run.display_name, run.archived) == (("demo",), "first", None, False)
    assert run.created_at <= run.ended_at <= run.updated_at
    assert run.checkpoint_path is None
    assert not run.alive
    assert run.hparams == {"optim.lr": 0.1, "optim.betas.0": 0.9, "optim.betas.1": 0.99}
    assert run.hyperparameters == {"optim": {"lr": 0.1, "betas": [0.9, 0.99]}}
    summary = run.summary["loss"]
    assert (summary.min, summary.min_step, summary.max, summary.max_step) == (0.1, 9, 1.0, 0)
    assert (summary.count, summary.non_finite, math.isnan(summary.last)) == (11, 1, True)
    assert summary.mean == pytest.approx(sum(1 / (step + 1) for step in range(10)) / 10)
    assert run.metric_names() == ["loss", "val/acc"]
    assert run.ranks() == [0]
    assert run.environment["python"]
    assert [session["status"] for session in run.sessions] == ["completed"]
    assert run.receipt["calls"] == 11
    assert len(run.run_id) == 12
    assert run.run_id in repr(run)


def test_a_missing_summary_is_computed(finished, tmp_path):
    """Without `summary.json`, the rows give the same statistics."""
    written = Run.open(finished).summary
    target = tmp_path / "copy"
    target.mkdir()
    for name in ("metrics.csv", "sidecar.json"):
        (target / name).write_bytes((finished / name).read_bytes())

    computed = Run.open(target).summary

    assert computed["val/acc"] == written["val/acc"] == MetricSummary(0.5, 0.5, 0.5, 10, 10, 1, 0, 0.5)
    assert computed["loss"].mean == pytest.approx(written["loss"].mean)
    assert (computed["loss"].min_step, computed["loss"].max_step, computed["loss"].count) == (9, 0, 11)


def test_a_run_of_stable_pretraining_is_read(tmp_path):
    """Its rows have no times, its summary no steps, and NaN came first."""
    write_stable_pretraining(tmp_path / "run", ["epoch,loss,step", "0,nan,0", "0,0.5,1"])
    (tmp_path / "run" / "summary.json").write_text(
        '{"metrics": {"loss": {"last": 0.5, "min": NaN, "max": NaN, "count": 2}}}'
    )

    run = Run.open(tmp_path / "run")

    assert (run.kind, run.status, run.hyperparameters) == (
        "stable-pretraining",
        "completed",
        {"optim.lr": 0.1},
    )
    assert run.series("loss").step.tolist() == [0, 1]
    assert run.summary["loss"] == MetricSummary(0.5, None, None, None, None, 2, 0, None)
    assert (run.environment, run.sessions, run.receipt, run.images()) == ({}, [], {}, [])


def test_a_folder_of_lightning_is_read(tmp_path):
    """`metrics.csv` and `hparams.yaml` alone make a run."""
    write_csv(tmp_path / "version_0", ["epoch,step,loss", "0,1,0.5", "0,2,0.25"])
    (tmp_path / "version_0" / "hparams.yaml").write_text("optim:\n  lr: 0.1\n")

    run = Run.open(tmp_path / "version_0")

    assert (run.kind, run.hparams, run.hyperparameters) == (
        "lightning-csv",
        {"optim.lr": 0.1},
        {"optim": {"lr": 0.1}},
    )
    assert run.summary["loss"].min == 0.25
    assert not run.alive


def test_a_deleted_run_still_has_its_record(tmp_path):
    """A run with a deleted folder still has its record, and nothing else."""
    run = Run(
        RunRecord(
            path=tmp_path / "gone",
            run_id="id",
            kind="run-directory",
            status="completed",
            hparams={"lr": 0.1},
        )
    )

    assert (run.hparams, run.hyperparameters) == ({"lr": 0.1}, {"lr": 0.1})
    assert (run.summary, run.environment, run.sessions, run.ranks(), run.metric_names()) == (
        {},
        {},
        [],
        [],
        [],
    )
    with pytest.raises(RunNotFoundError):
        run.reload()
