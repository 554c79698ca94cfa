"""Reads a run with several writers as one run."""

import itertools
import logging
import os
import threading

import numpy as np
import pytest

from destinations.runs import Run, WriterNotFoundError, open_runs
from destinations.runs.errors import RunsError
from destinations.runs.streams import by_time
from tests.test_destinations.runs.written import Written, write_csv, write_shared


@pytest.fixture
def times():
    """A clock that returns 1, then 2, and so on."""
    ticks = itertools.count(1)
    return lambda: float(next(ticks))


@pytest.fixture
def folder(tmp_path):
    """A run with three writers."""
    return write_shared(tmp_path / "runs" / "digits")


@pytest.fixture
def run(folder):
    """The opened run."""
    return Run.open(folder)


def rows_of(series):
    """Returns step, value and writer of each value."""
    writers = [None] * len(series) if series.writer is None else series.writer.tolist()
    return list(zip(series.step.tolist(), series.value.tolist(), writers, strict=True))


# Metrics.


def test_values_of_several_writers_are_merged_by_step(run):
    """At equal steps, the trainer's value precedes the writers' by name; each value has its writer."""
    assert run.writers == ["eval", "probe"]
    assert rows_of(run.series("loss")) == [
        (0, 0.5, "eval"),
        (1, 10.0, ""),
        (1, 11.0, "eval"),
        (1, 12.0, "probe"),
        (2, 20.0, ""),
    ]


def test_unknown_writer_raises_with_a_suggestion(run):
    """The error is one of the reader's errors, and a KeyError."""
    with pytest.raises(WriterNotFoundError, match=r"no writer 'evil'\. Did you mean 'eval'\?") as caught:
        run.series("loss", writer="evil")
    assert isinstance(caught.value, RunsError)
    assert isinstance(caught.value, KeyError)
    with pytest.raises(WriterNotFoundError):
        run.writer("evil")


def test_a_data_frame_has_a_column_of_writers_if_there_are_any(run, tmp_path):
    """A run without writers has no such column."""
    pytest.importorskip("pandas")
    with Written(tmp_path / "alone") as alone:
        alone.log({"loss": 1.0}, 0)

    frame = run.to_dataframe()

    assert list(frame.columns) == ["step", "time", "writer", "loss", "lr", "acc", "norm"]
    assert frame["writer"].tolist() == ["", "", "eval", "eval", "eval", "probe", "probe"]
    assert list(Run.open(tmp_path / "alone").to_dataframe().columns) == ["step", "time", "loss"]


def test_last_writer_wins_at_equal_steps(tmp_path):
    """The series does the same, and NaN counts like any value."""
    for writer, value in ((None, 1.0), ("b", np.nan), ("a", 3.0)):
        with Written(tmp_path / "run", writer=writer) as written:
            written.log({"loss": value}, 5)

    run = Run.open(tmp_path / "run")
    assert np.isnan(run.summary["loss"].last)
    assert np.isnan(run.series("loss").value[-1])
    assert (run.summary["loss"].count, run.summary["loss"].non_finite, run.summary["loss"].mean) == (
        3,
        1,
        2.0,
    )


def test_summary_includes_undrained_rows(tmp_path):
    """The writer may be alive or killed."""
    with (
        Written(tmp_path / "run") as trainer,
        Written(tmp_path / "run", writer="eval", flush_seconds=1e3) as late,
    ):
        trainer.log({"loss": 1.0}, 1)
        trainer.flush()
        late.log({"loss": 9.0}, 9)
        late.log({"loss": 4.0}, 4)

        loss = Run.open(tmp_path / "run").summary["loss"]

    assert (loss.last, loss.count, loss.max_step) == (9.0, 3, 9)


def test_best_value_may_come_from_a_writer(folder, tmp_path):
    """The index reads it again when a writer has a better one."""
    with open_runs(folder.parent, cache=tmp_path / "cache") as runs:
        first = runs.best("loss", is_max=True)[0]
        with Written(folder, writer="eval") as late:
            late.log({"loss": 99.0}, 7)
        runs.scan()
        second = runs.best("loss", is_max=True)[0]

        assert (first.value, first.step) == (20.0, 2)
        assert (second.value, second.step) == (99.0, 7)
        assert runs.query(sort_by="summary.acc")[0].record.summary == {
            "loss": 99.0,
            "lr": 0.1,
            "acc": 0.3,
            "norm": 4.0,
        }


def test_a_long_series_keeps_its_order(tmp_path):
    """Tens of thousands of values from two writers are merged as by a stable sort."""
    random = np.random.default_rng(0)
    steps = {writer: random.integers(0, 5000, 20_000) for writer in ("", "eval")}
    for writer, found in steps.items():
        with Written(tmp_path / "run", writer=writer or None) as written:
            for place, step in enumerate(found.tolist()):
                written.log({"loss": float(place)}, step)

    series = Run.open(tmp_path / "run").series("loss")

    rows = [(step, writer, place) for writer in steps for place, step in enumerate(steps[writer].tolist())]
    assert rows_of(series) == [(step, float(place), writer) for step, writer, place in sorted(rows)]


# Records.


def test_a_run_has_the_records_of_all_writers(tmp_path, times):
    """They are in the order of logging; their files are in the writer's folder."""
    folder = tmp_path / "run"
    with Written(folder, clock=times) as trainer, Written(folder, writer="eval", clock=times) as late:
        for step, one in enumerate((trainer, late, trainer, late)):
            one.logger.log_images(np.full((1, 4, 4), step * 10, np.uint8), "Inputs", step=step)
            one.logger.log_text(f"text {step}", "Notes", step=step)
            one.logger.log_table(["a"], [[step]], "Table", step=step)
    run = Run.open(folder)

    assert [one.text for one in run.texts("Notes")] == [f"text {step}" for step in range(4)]
    assert [one.array()[0, 0] for one in run.images("Inputs")] == [0, 10, 20, 30]
    assert [one.path.relative_to(folder).parts[:2] for one in run.images()] == [
        ("media", "Inputs"),
        ("writers", "eval"),
    ] * 2
    assert run.table("Table").rows == ((3,),)
    assert {kind: one.count for kind, one in run.record_counts().items()} == {
        "images": 4,
        "tables": 4,
        "texts": 4,
    }
    assert run.record_counts()["texts"].names == {"Notes": 4}


def test_file_deleted_by_one_writer_stays_for_another(tmp_path):
    """File names belong to one writer."""
    (tmp_path / "file").write_bytes(b"x")
    for writer in (None, "eval"):
        with Written(tmp_path / "run", writer=writer, keep_files="copy") as written:
            written.logger.upload_file("model.pt", tmp_path / "file")
            written.flush()
            if writer:
                written.logger.delete_file("model.pt", local=True)

    (found,) = Run.open(tmp_path / "run").artifacts()
    assert found.path == tmp_path / "run" / "artifacts" / "model.pt"


# Following.


def test_rows_of_all_writers_are_followed_in_the_order_of_logging(run):
    """Each has its writer; the last ones are the last of all writers."""
    rows = list(run.follow(until_end=True, poll_seconds=0))

    assert [(row.writer, row.step) for row in rows] == [
        ("", 1),
        ("eval", 1),
        ("", 2),
        ("probe", 1),
        ("eval", 3),
        ("eval", 0),
        ("probe", 2),
    ]
    last = run.follow(until_end=True, poll_seconds=0, last=2, only=["loss"])
    assert [(row.writer, row.metrics["loss"]) for row in last] == [("probe", 12.0), ("eval", 0.5)]
    points = run.follow("loss", until_end=True, poll_seconds=0)
    assert [(point.step, point.writer) for point in points][:2] == [(1, ""), (1, "eval")]


def test_follow_includes_writers_that_begin_later(tmp_path):
    """Such a writer's rows arrive once each, like the trainer's."""
    folder = tmp_path / "run"
    with Written(folder) as trainer:
        trainer.log({"loss": 1.0}, 1)
        stop = threading.Event()
        rows = Run.open(folder).follow(poll_seconds=0, stop=stop)
        found = [next(rows)]
        with Written(folder, writer="eval") as late:
            late.log({"acc": 0.5}, 1)
            found.append(next(rows))
            trainer.log({"loss": 2.0}, 2)
            found.append(next(rows))
            late.log({"acc": 0.6}, 0)
            found.append(next(rows))
        stop.set()

    assert [(row.writer, row.metrics) for row in found] == [
        ("", {"loss": 1.0}),
        ("eval", {"acc": 0.5}),
        ("", {"loss": 2.0}),
        ("eval", {"acc": 0.6}),
    ]


# Folders.


def test_writers_without_a_trainer_are_a_run(tmp_path):
    """Without a trainer, status, times, tags and hyperparameters come from the writers."""
    folder = tmp_path / "runs" / "digits"
    with Written(folder, writer="b", tags=["second"]) as b, Written(folder, writer="a", tags=["first"]) as a:
        b.logger.log_hyperparameters({"lr": 0.1, "only": 1})
        a.logger.log_hyperparameters({"lr": 0.2})
        a.log({"loss": 1.0}, 1)
        b.log({"loss": 2.0}, 0)
        a.flush()
        b.flush()
        live = Run.open(folder)
    run = Run.open(folder)

    assert (live.shown_status, live.alive) == ("running", True)
    assert (run.status, run.alive, run.name) == ("completed", False, "digits")
    assert run.run_id == run.writer("b").run_id
    assert (run.tags, run.hyperparameters) == (("first", "second"), {"lr": 0.2, "only": 1})
    assert (run.record.summary, run.record.problem) == ({"loss": 1.0}, None)
    assert rows_of(run.series("loss")) == [(0, 2.0, "b"), (1, 1.0, "a")]


def test_links_are_not_followed(folder, tmp_path):
    """Neither a writer nor the folder of writers may be a link."""
    write_csv(tmp_path / "elsewhere" / "other", ["step,loss", "1,1000.0"])
    (folder / "writers" / "other").symlink_to(tmp_path / "elsewhere" / "other")
    with Written(tmp_path / "second") as second:
        second.log({"loss": 1.0}, 1)
    (tmp_path / "second" / "writers").symlink_to(tmp_path / "elsewhere")

    assert Run.open(folder).writers == ["eval", "probe"]
    assert Run.open(tmp_path / "second").writers == []
    assert Run.open(tmp_path / "second").record.summary == {"loss": 1.0}


@pytest.mark.parametrize("breaks", ["fifo", "folder", "long"])
def test_a_broken_writer_hides_no_other(folder, breaks, caplog, tmp_path):
    """A warning and the run's `problem` name the error."""
    path = folder / "writers" / "eval" / "metrics.csv"
    path.unlink()
    if breaks == "fifo":
        os.mkfifo(path)
    elif breaks == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.write(b"step,loss\n")
            file.truncate(65 << 20)
    (folder / "writers" / "eval" / "summary.json").unlink()

    run = Run.open(folder)
    with caplog.at_level(logging.WARNING, "destinations"):
        series = run.series("loss")
        names = run.metric_names()
        blocks = [block.writer for block in run.blocks()]
        rows = list(run.follow(until_end=True, poll_seconds=0))

    assert series.value[series.writer == ""].tolist() == [10.0, 20.0]
    assert {"loss", "lr", "norm"} <= {*names}
    assert {"", "probe"} <= {*blocks}
    assert {"", "probe"} <= {row.writer for row in rows}
    if breaks != "long":
        assert "writer eval cannot be read" in (run.record.problem or "")
        assert "left out writer eval" in caplog.text
        with pytest.raises(OSError, match=r"directory|regular"):
            run.series("loss", writer="eval")
    assert run.record.summary["lr"] == 0.1


def test_errors_of_the_trainer_are_raised(folder):
    """This is the same as for any run."""
    (folder / "metrics.csv").unlink()
    (folder / "metrics.csv").mkdir()

    with pytest.raises(OSError, match=r"directory|regular"):
        Run.open(folder).series("loss")


def test_deleted_writers_are_gone(folder):
    """A file in place of their folder counts as none."""
    run = Run.open(folder)
    (folder / "writers").rename(folder.parent / "moved")
    (folder / "writers").write_text("not a folder")

    assert run.writers == []
    assert rows_of(run.series("loss")) == [(1, 10.0, None), (2, 20.0, None)]
    assert run.reload().record.summary == {"loss": 20.0, "lr": 0.1}


# Merging.


def test_items_are_merged_by_their_times():
    """Each source keeps its order; an item without a time follows the previous one."""
    sources = [[(3, "a"), (None, "b"), (1, "c"), (4, "d")], [(None, "e"), (3, "f"), (float("nan"), "g")]]

    assert "".join(name for _, name in by_time(sources, lambda item: item[0])) == "eabcfgd"
