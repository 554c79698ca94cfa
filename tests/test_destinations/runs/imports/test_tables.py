"""Imports CSV and Parquet files whose columns the user names."""

import pandas as pd
import pytest

from destinations.run_directory import read_rows
from destinations.runs import Run
from destinations.runs.imports import ColumnsError, SourceError, import_runs

HISTORY = "iteration,loss,acc,when,who\n0,0.5,,2024-01-01T00:00:00+00:00,a\n10,0.25,1,2024-01-01T00:01:00,a\n"
COLUMNS = {"step": "iteration", "time": "when", "run": "who"}


@pytest.fixture(params=["csv", "tsv", "parquet"])
def table(request, tmp_path):
    """The same table in each format."""
    path = tmp_path / f"history.{request.param}"
    (tmp_path / "source").write_text(HISTORY)
    frame = pd.read_csv(tmp_path / "source")
    if request.param == "parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False, sep="," if request.param == "csv" else "\t")
    return path


def test_user_names_the_columns(table, tmp_path):
    """Steps and times come from them, each name is a run, and an empty cell is no value."""
    report = import_runs(table, tmp_path / "runs", columns=COLUMNS)

    rows = [(row.step, row.time, dict(row.metrics)) for row in read_rows(tmp_path / "runs/a")]
    assert rows == [(0, 1704067200.0, {"loss": 0.5}), (10, 1704067260.0, {"loss": 0.25, "acc": 1.0})]
    assert Run.open(tmp_path / "runs/a").run_id.startswith("a-")
    assert (report.runs, report.rows, dict(report.left_out)) == (1, 2, {})


def test_table_without_a_step_column_raises(table, tmp_path):
    """An empty name counts the rows. Cells that are not numbers are counted."""
    with pytest.raises(ColumnsError, match="Name the step column with --column step=NAME") as asked:
        import_runs(table, tmp_path / "runs")
    report = import_runs(table, tmp_path / "runs", columns={"step": ""})

    assert asked.value.columns == ("iteration", "loss", "acc", "when", "who")
    assert [row.step for row in read_rows(tmp_path / "runs/history")] == [0, 1]
    assert dict(report.left_out) == {"cells that are no numbers": 4}


def test_steps_of_a_trainer_take_precedence_over_wandb_steps(tmp_path):
    """A row that the trainer did not log has the previous step."""
    pd.DataFrame(
        {
            "_step": [0, 1, 2],
            "trainer/global_step": [49, None, 99],
            "loss": [0.5, None, 0.25],
            "gpu": [1, 2, 3],
        }
    ).to_parquet(tmp_path / "history.parquet")

    import_runs(tmp_path / "history.parquet", tmp_path / "runs")

    rows = [(row.step, dict(row.metrics)) for row in read_rows(tmp_path / "runs/history")]
    assert rows == [(49, {"loss": 0.5, "gpu": 1}), (49, {"gpu": 2}), (99, {"loss": 0.25, "gpu": 3})]


def test_columns_of_a_wandb_history_are_recognised(tmp_path):
    """W&B's `download_history_exports` writes them."""
    pd.DataFrame({"_step": [0, 5], "_timestamp": [1000.0, 1001.0], "loss": [0.5, None]}).to_parquet(
        tmp_path / "history.parquet"
    )

    import_runs(tmp_path / "history.parquet", tmp_path / "runs")

    rows = [(row.step, row.time, dict(row.metrics)) for row in read_rows(tmp_path / "runs/history")]
    assert rows[0] == (0, 1000.0, {"loss": 0.5})
    assert Run.open(tmp_path / "runs/history").created_at == 1000.0


def test_unreadable_cells_are_failures(tmp_path):
    """Short rows keep their cells. A text among numbers is damage; a column of texts is left out."""
    (tmp_path / "history.csv").write_text(
        "step,loss,acc,name,time\n0.5,1,1,a,\n,1,1,a,\n1,0.x5,n/a,a,soon\n2,3\n3,4,5,a,,more\n4,5,6,a,0"
    )

    report = import_runs(tmp_path / "history.csv", tmp_path / "runs")

    assert [(row.step, dict(row.metrics)) for row in read_rows(tmp_path / "runs/history")] == [
        (2, {"loss": 3}),
        (3, {"loss": 4, "acc": 5}),
        (4, {"loss": 5, "acc": 6}),
    ]
    assert dict(report.left_out) == {"cells that are no numbers": 4}
    assert [text.partition(": ")[2] for text in report.failures] == [
        "1 last rows without a line end, which may be cut off",
        "2 rows without a whole step",
        "1 unreadable times",
        "2 rows with other cells than the first line",
        "1 cells that are no numbers",
    ]


def test_columns_with_the_same_name_are_both_imported(tmp_path):
    """They are named as in pandas. Integers are exact."""
    (tmp_path / "history.csv").write_text(f"step,loss,loss,loss.1,,\n{2**53 + 1},1,2,{2**53 + 3},4,5\n")

    report = import_runs(tmp_path / "history.csv", tmp_path / "runs")

    (row,) = read_rows(tmp_path / "runs/history")
    assert (row.step, dict(row.metrics)) == (
        2**53 + 1,
        {"loss": 1, "loss.2": 2, "loss.1": 2**53 + 3},
    )
    assert (report.failures, dict(report.left_out)) == ([], {"cells of a column without a name": 2})


@pytest.mark.parametrize(
    ("name", "content", "columns", "message"),
    [
        ("a.csv", b"step,loss\n0,1\n", {"stp": "step"}, "a column holds one of step, time, epoch, run"),
        ("a.csv", b"step,loss\n0,1\n", {"step": "stp"}, "has no column 'stp'"),
        ("a.csv", b"step,\xff\n0,1\n", {}, "is not a table"),
        ("a.parquet", b"not so", {}, "is not a Parquet file"),
    ],
)
def test_unusable_table_raises(tmp_path, name, content, columns, message):
    """The message names the file and the problem."""
    (tmp_path / name).write_bytes(content)

    with pytest.raises(SourceError, match=message):
        import_runs(tmp_path / name, tmp_path / "runs", columns=columns)
