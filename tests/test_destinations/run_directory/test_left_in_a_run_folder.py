"""Leftovers in a run folder: temporary files without an owner are removed, abandoned rows are reported."""

import logging

from tests.test_destinations.run_directory.conftest import steps_left

OF_RANK_0 = (".metrics.csv.7-0.tmp", ".sidecar.json.7-1.tmp", ".reserve.7-0.tmp")
OF_RANK_1 = (".metrics.rank1.csv.7-0.tmp", ".summary.rank1.json.7-1.tmp")
OF_EDITS = ".edits.json.7-0.tmp"


def test_a_rank_removes_its_own_temporary_files(drive, tmp_path):
    """A rank removes its own dead process's files, but none that another rank or `edit` may be writing."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (*OF_RANK_0, *OF_RANK_1, OF_EDITS):
        (folder / name).touch()

    drive(rank=1, all_ranks=True).close()
    after_rank_1 = {path.name for path in folder.glob(".*.tmp")}
    drive().close()
    after_rank_0 = {path.name for path in folder.glob(".*.tmp")}

    assert after_rank_1 == {*OF_RANK_0, OF_EDITS}
    assert after_rank_0 == {OF_EDITS}


def test_rows_that_no_longer_count_are_reported(drive, tmp_path, caplog):
    """If training continues at step 10 of 30, a warning counts the abandoned rows."""
    caplog.set_level(logging.WARNING)
    run = drive().fit()
    for step in range(30):
        run.log({"a": float(step)}, step)
    run.close()

    again = drive(batch=10).fit()
    again.log({"a": 10.0}, 10)
    again.close()

    assert steps_left(tmp_path / "run") == [[*range(10, 30)]]
    assert "training continues from an earlier place; 20 later rows stay on disk as a branch" in caplog.text
