"""Runs that begin or end badly: nothing of an earlier session is put aside, nothing is held after the end."""

import pytest

from destinations import RunDirectory
from destinations.run_directory import read_series
from events import Run


@pytest.fixture(autouse=True)
def _outside_of_any_repository(tmp_path, monkeypatch):
    """Spares each run, which describes where it takes place, three programs."""
    monkeypatch.chdir(tmp_path)


def _train(path, steps):
    with Run(RunDirectory(path), run_name="r") as run:
        for step in range(steps):
            run.batch_start()
            run.log_metrics({"loss": float(step)})
            run.batch_end()


def test_a_run_opened_again_for_an_evaluation_keeps_what_training_logged(tmp_path):
    """Rows are put aside where training begins again, and nowhere else."""
    _train(tmp_path / "run", 10)

    with Run(RunDirectory(tmp_path / "run"), run_name="r") as run:
        run.eval_start("test")
        run.eval_batch_start()
        run.eval_batch_end()
        run.log_metrics({"test/accuracy": 0.75})
        run.eval_end()
    with Run(RunDirectory(tmp_path / "run"), run_name="r") as run:
        run.log_metrics({"note": 1.0})

    assert read_series(tmp_path / "run", "loss") == [(step, float(step)) for step in range(10)]
    assert read_series(tmp_path / "run", "test/accuracy") == [(0, 0.75)]
    assert not (tmp_path / "run" / "abandoned").exists()


def test_a_run_that_trains_again_from_the_beginning_puts_the_old_rows_aside(tmp_path):
    """As before: each step is seen once."""
    _train(tmp_path / "run", 10)
    _train(tmp_path / "run", 3)

    assert read_series(tmp_path / "run", "loss") == [(step, float(step)) for step in range(3)]
    assert len(list((tmp_path / "run" / "abandoned").iterdir())) == 1
