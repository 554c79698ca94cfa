"""Compacts runs to Delta tables, in a folder and in a bucket, and reads them back."""

import os
import shutil
import sqlite3
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("deltalake")

from destinations.runs import (
    DatasetError,
    FilterError,
    MetricNotFoundError,
    RootError,
    Run,
    RunsError,
    WriterNotFoundError,
    open_runs,
)
from destinations.runs.dataset import compact, open_dataset, reading, sql, writing
from destinations.runs.dataset.tables import APPLICATION
from destinations.runs.record import status_of, value_of
from tests.servers import s3_servers
from tests.test_destinations.runs.written import (
    Written,
    change_sidecar,
    copy_as,
    write_csv,
    write_shared,
    write_stable_pretraining,
)

pytestmark = pytest.mark.xdist_group("duckdb")


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A finished run with two ranks, a metric that goes back in steps, and one with NaN and infinities."""
    run_dir = tmp_path_factory.mktemp("template") / "run"
    with (
        Written(run_dir, tags=["sweep:7"], notes="notes") as zero,
        Written(run_dir, rank=1, all_ranks=True) as one,
    ):
        zero.logger.log_hyperparameters(
            {"optim": {"lr": 0.1, "name": "adam", "warmup": None, "nesterov": True}}
        )
        for step in range(50):
            zero.log({"loss": 1 / (step + 1)}, step)
            one.log({"loss": 2 / (step + 1)}, step)
            if step % 10 == 9:
                zero.log({"val/acc": step / 50}, step // 10)
        zero.log({"odd": float("nan")}, 50)
        zero.log({"odd": float("-inf")}, None)
    return run_dir


@pytest.fixture
def root(template, tmp_path):
    """Three finished runs, and one of stable-pretraining."""
    root = tmp_path / "runs"
    for index, name in enumerate("abc"):
        copy_as(template, root / name, f"id-{name}")
        change_sidecar(
            root / name, hparams={"optim.lr": 10.0**-index, "optim.name": "adam"}, created_at=1.7e9 + index
        )
    write_stable_pretraining(
        root / "spt", ["epoch,loss,step", "0,0.5,0", "0,0.25,1"], hparams={"optim.lr": 0.2}
    )
    return root


def runs_of(root):
    """Returns all runs below a folder."""
    return [Run.open(path) for path in sorted(root.iterdir())]


def assert_same_metrics(dataset, runs):
    """Asserts that the dataset has every series of every run, exactly and in order."""
    for run in runs:
        there = dataset[run.run_id]
        assert there.ranks() == run.ranks()
        for rank in run.ranks():
            assert there.metric_names(rank) == sorted(run.metric_names(rank))
            for name in run.metric_names(rank):
                found, wanted = there.series(name, rank), run.series(name, rank)
                assert np.array_equal(found.step, wanted.step)
                assert np.array_equal(found.time, wanted.time, equal_nan=True)
                assert np.array_equal(found.value, wanted.value, equal_nan=True)


def files(place):
    """Returns every file below a folder."""
    return sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())


def test_dataset_has_the_content_of_the_runs(root, tmp_path):
    """Series, typed hyperparameters, summaries and fields are equal."""
    runs = runs_of(root)

    report = compact(runs, str(tmp_path / "data #1's"))

    assert (report.version, report.runs, report.added, report.alive) == (1, 4, 4, 0)
    assert report.points == 3 * (50 + 50 + 5 + 2) + 2
    with open_dataset(tmp_path / "data #1's") as dataset:
        assert dataset.report.runs == 4
        assert_same_metrics(dataset, runs)
        run = dataset["id-b"]
        assert run.hparams == {"optim.lr": 0.1, "optim.name": "adam"}
        assert run.summary["loss"] == Run.open(root / "b").summary["loss"]
        assert (run.record.tags, run.record.notes, run.path) == (("sweep:7",), "notes", root / "b")
        assert not run.alive
        assert dataset.sql("SELECT count(*) AS n FROM runs").to_dicts() == [{"n": 4}]


def test_dataset_is_queried_like_folders(root, tmp_path):
    """Filters, sorting, names and errors are the same as with `open_runs` on the folders."""
    compact(runs_of(root), str(tmp_path / "data"))

    with open_runs(tmp_path / "data") as dataset, open_runs(root, cache=tmp_path / "cache") as folders:
        for query in (
            {"where": "hparams.optim.lr >= 0.05", "sort_by": "hparams.optim.lr"},
            {"where": "tags == 'sweep:7' and summary.loss < 1", "sort_by": "created_at", "limit": 2},
            {"status": "completed", "sort_by": "hparams.optim.lr", "descending": True},
            {"tag": "nobody has it"},
        ):
            found = [run.run_id for run in dataset.query(**query)]
            assert found == [run.run_id for run in folders.query(**query)]
        for is_max in (False, True):
            ranks = [
                [(one.run.run_id, one.value, one.step) for one in found.best("loss", is_max=is_max)]
                for found in (dataset, folders)
            ]
            assert ranks[0] == ranks[1]
            assert len(ranks[0]) == 4
        assert len(dataset) == len(folders) == 4
        assert sorted(dataset.metric_names()) == sorted(folders.metric_names())
        assert dataset["b"].run_id == "id-b"
        assert dataset.compare(["id-a", "id-b"]) == {"hparams.optim.lr": {"id-a": 1.0, "id-b": 0.1}}
        with pytest.raises(FilterError):
            dataset.query(where="hparams.lr >=")
        with pytest.raises(MetricNotFoundError, match=r"'los'.*'loss'"):
            dataset["id-a"].series("los")


def test_sql_over_all_points(root, tmp_path):
    """Any query of DuckDB runs over the tables; an invalid one raises a helpful error."""
    compact(runs_of(root), str(tmp_path / "data"))

    found = sql(
        tmp_path / "data",
        """SELECT number AS lr, min(value) AS best FROM metrics JOIN hparams USING (run_id)
           WHERE metric = ? AND name = 'optim.lr' AND rank = 0 GROUP BY ALL ORDER BY lr""",
        ["loss"],
    )

    assert found.columns == ("lr", "best")
    assert found.rows == ((0.01, 0.02), (0.1, 0.02), (0.2, 0.25), (1.0, 0.02))
    for wrong, problem in (
        ("SELECT * FROM nothing", "got: Catalog Error.*nothing"),
        ("-- nothing", "got nothing"),
        ("SELECT '\ud800'", "got: .*surrogates"),
        ("SELECT nothing FROM metrics", "got: Binder Error"),
    ):
        with pytest.raises(DatasetError, match=f"query must be one that DuckDB understands, {problem}"):
            sql(tmp_path / "data", wrong)


def test_other_engines_read_the_files(root, tmp_path):
    """Pyarrow reads the same points from the named files, and Polars the Delta tables at the same version."""
    arrow = pytest.importorskip("pyarrow.dataset")
    compute = pytest.importorskip("pyarrow.compute")
    fs = pytest.importorskip("pyarrow.fs")
    polars = pytest.importorskip("polars")
    place = tmp_path / "data 1 #2 ü"
    compact(runs_of(root), str(place))

    with open_dataset(place) as dataset:
        table = arrow.dataset(dataset.files()).to_table(
            columns=["run_id", "value"],
            filter=(compute.field("metric") == "loss") & (compute.field("rank") == 0),
        )
        wanted = dataset.sql(
            "SELECT run_id, min(value) FROM metrics WHERE metric = 'loss' AND rank = 0 GROUP BY ALL"
        ).rows
        version = dataset.versions["metrics"]
        tables = [dataset.arrow(name) for name in ("metrics", "runs", "hparams", "summary")]

    found = table.group_by("run_id").aggregate([("value", "min")]).to_pydict()
    assert set(zip(found["run_id"], found["value_min"], strict=True)) == set(wanted)
    # If a pyarrow thread closes a file through Python at exit, the process aborts.
    assert not any(isinstance(one.filesystem, fs.PyFileSystem) for one in tables)
    assert [one.count_rows() for one in tables[:2]] == [3 * 107 + 2, 4]
    # Polars finds no file below a folder with blanks.
    place.rename(tmp_path / "data")
    by_polars = (
        polars.scan_delta(str(tmp_path / "data" / "metrics"), version=version)
        .filter((polars.col("metric") == "loss") & (polars.col("rank") == 0))
        .group_by("run_id")
        .agg(polars.col("value").min())
        .collect()
    )
    assert set(by_polars.rows()) == set(wanted)


@pytest.mark.parametrize("name", ["it's 100% ü {a,b} #1", "a*b", "a?b", "a=b"])
def test_folder_with_any_name_is_queried(root, tmp_path, name):
    """DuckDB takes file names for patterns, so such a folder is read through Arrow."""
    compact([Run.open(root / "a")], str(tmp_path / name))
    if "*" in name or "?" in name:
        compact([Run.open(root / "b")], str(tmp_path / "a-b"))

    with open_dataset(tmp_path / name) as dataset:
        assert_same_metrics(dataset, [Run.open(root / "a")])
        assert ("id-a",) in dataset.sql("SELECT DISTINCT run_id FROM metrics").rows


def test_second_compaction_writes_nothing(root, tmp_path):
    """Compacting the same runs again changes no file. Runs of a dataset have no files to read."""
    compact(runs_of(root), str(tmp_path / "data"))
    before = files(tmp_path / "data")

    report = compact(runs_of(root), str(tmp_path / "data"))
    with open_runs(tmp_path / "data") as runs, pytest.raises(DatasetError, match="Compact folders of runs"):
        compact(runs, str(tmp_path / "copy"))

    assert (report.version, report.unchanged, report.added, report.changed) == (1, 4, 0, 0)
    assert files(tmp_path / "data") == before
    assert not (tmp_path / "copy").exists()


def test_only_changed_runs_are_read_again(root, template, tmp_path):
    """New runs are added, changed ones replaced, notes updated without reading values, and gone runs kept."""
    compact(runs_of(root), str(tmp_path / "data"))
    with (root / "a" / "metrics.csv").open("a") as file:
        file.write(
            "60,,,0.125"
            + "," * ((root / "a" / "metrics.csv").read_text().splitlines()[0].count(",") - 3)
            + "\n"
        )
    change_sidecar(root / "b", notes="other notes")
    copy_as(template, root / "d", "id-d")
    gone = Run.open(root / "c")
    kept = {name: gone.series(name) for name in gone.metric_names()}
    runs = [run for run in runs_of(root) if run.run_id != "id-c"]

    report = compact(runs, str(tmp_path / "data"))

    assert report.runs == 5
    assert (report.added, report.changed, report.updated, report.unchanged) == (1, 1, 1, 1)
    with open_dataset(tmp_path / "data") as dataset:
        assert_same_metrics(dataset, runs)
        assert dataset["id-a"].series("loss").value[-1] == 0.125
        assert dataset["id-b"].record.notes == "other notes"
        for name, series in kept.items():
            assert np.array_equal(dataset["id-c"].series(name).value, series.value, equal_nan=True)
        assert dataset.sql("SELECT count(*), count(DISTINCT run_id) FROM runs").rows == ((5, 5),)
        rows = dataset.sql("SELECT DISTINCT run_id FROM metrics ORDER BY ALL").rows
        assert [run_id for (run_id,) in rows] == ["id-a", "id-b", "id-c", "id-d", "spt"]


def test_open_dataset_and_earlier_versions_stay_readable(root, tmp_path):
    """A reader keeps its version while others compact, and `open_runs` opens earlier versions."""
    place = tmp_path / "data"
    first = compact([Run.open(root / "a")], str(place))
    with open_dataset(place) as dataset:
        change_sidecar(root / "a", notes="later")
        second = compact(runs_of(root), str(place))
        assert [run.run_id for run in dataset.query()] == ["id-a"]
        assert len(dataset["id-a"].series("loss")) == 50

    with open_runs(place, version=first.version) as old, open_runs(place) as new:
        assert [run.run_id for run in old.query()] == ["id-a"]
        assert (old["id-a"].record.notes, new["id-a"].record.notes) == ("notes", "later")
        assert old.sql("SELECT count(DISTINCT run_id) FROM metrics").rows == ((1,),)
        assert (old.version, new.version) == (first.version, second.version)
    for missing in (second.version + 1, -1, 10**30):
        with pytest.raises(DatasetError, match=f"has no version {missing}: the newest is {second.version}"):
            open_runs(place, version=missing)
    with pytest.raises(RootError, match="only a dataset has versions"):
        open_runs(root, version=1)


def test_vacuumed_version_raises(root, tmp_path):
    """The error tells a reader that still has it open."""
    place = str(tmp_path / "data")
    compact([Run.open(root / "a")], place)
    with open_dataset(place) as dataset:
        run = dataset["id-a"]
        compact([Run.open(root / "b")], place, optimize=True, vacuum_days=0)

        for read in (lambda: run.series("loss"), lambda: dataset.sql("SELECT * FROM runs")):
            with pytest.raises(DatasetError, match=r"cannot be read.*version 1 may have been vacuumed"):
                read()
    with pytest.raises(DatasetError, match=r"cannot be read.*version 1 may have been vacuumed"):
        open_runs(place, version=1)


def test_failed_open_leaves_nothing_open(root, tmp_path, monkeypatch):
    """The index in memory and DuckDB's connection are closed."""
    import duckdb

    place = tmp_path / "data"
    compact([Run.open(root / "a")], str(place))
    for file in (place / "runs").rglob("*.parquet"):
        file.unlink()
    opened = []

    class Opened(reading.Index):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            opened.append(self)

    monkeypatch.setattr(reading, "Index", Opened)
    connect = duckdb.connect
    monkeypatch.setattr(duckdb, "connect", lambda **options: opened.append(connect(**options)) or opened[-1])

    with pytest.raises(DatasetError, match="cannot be read"):
        open_dataset(place)

    connection, index = opened
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        index.counts(0.0)
    with pytest.raises(duckdb.ConnectionException, match="closed"):
        connection.execute("SELECT 1")


def test_live_runs_are_left_out(root, tmp_path):
    """A run is compacted after its end; a killed run has ended."""
    with Written(root / "live") as written:
        written.log({"loss": 1.0}, 0)
        written.flush()
        change_sidecar(root / "a", status="running")

        report = compact([*runs_of(root)[:1], Run.open(root / "live")], str(tmp_path / "data"))

        assert (report.runs, report.alive) == (0, 2)
    after = compact(
        [Run(Run.open(root / "a").record, clock=lambda: 4e9), Run.open(root / "live")], str(tmp_path / "data")
    )
    assert (after.runs, after.alive) == (2, 0)


def test_newer_run_of_an_id_is_compacted(root, template, tmp_path):
    """The older one is named."""
    copy_as(template, root / "copy", "id-a")
    change_sidecar(root / "copy", updated_at=5e9, notes="newer")

    report = compact(runs_of(root), str(tmp_path / "data"))

    assert report.duplicates == (root / "a",)
    with open_dataset(tmp_path / "data") as dataset:
        assert dataset["id-a"].record.notes == "newer"


def test_older_run_in_another_folder_replaces_nothing(root, template, tmp_path):
    """Two roots that are compacted one after the other have a run with the same id."""
    place = str(tmp_path / "data")
    copy_as(template, root / "copy", "id-a")
    change_sidecar(root / "copy", updated_at=5e9, notes="newer")
    compact([Run.open(root / "copy")], place)

    older = compact([Run.open(root / "a")], place)
    change_sidecar(root / "a", updated_at=6e9, notes="newest")
    newer = compact([Run.open(root / "a")], place)

    assert (older.changed, older.duplicates) == (0, (root / "a",))
    assert (newer.updated, newer.duplicates) == (1, (root / "copy",))
    with open_dataset(place) as dataset:
        assert (dataset["id-a"].record.notes, dataset["id-a"].path) == ("newest", root / "a")


def test_older_run_replaces_a_deleted_one_with_its_id(root, template, tmp_path):
    """With `remove_gone`, the remaining run is kept with its own values."""
    place = str(tmp_path / "data")
    copy_as(template, root / "copy", "id-a")
    change_sidecar(root / "copy", updated_at=5e9, notes="newer")
    with (root / "copy" / "metrics.csv").open("a") as file:
        file.write("60" + "," * (root / "copy" / "metrics.csv").read_text().split("\n")[0].count(",") + "\n")
    compact(runs_of(root), place)
    shutil.rmtree(root / "copy")

    kept = compact(runs_of(root), place)
    report = compact(runs_of(root), place, remove_gone=True)
    again = compact(runs_of(root), place, remove_gone=True)

    assert (kept.duplicates, kept.changed) == ((root / "a",), 0)
    assert (report.duplicates, report.changed, report.removed) == ((), 1, 0)
    assert (again.unchanged, again.changed, again.removed) == (4, 0, 0)
    with open_dataset(place) as dataset:
        assert dataset["id-a"].record.notes == "notes"
        assert dataset["id-a"].path == root / "a"
        assert_same_metrics(dataset, runs_of(root))


def test_rows_added_during_a_metadata_update_are_not_compacted(root, tmp_path):
    """A tag was edited and the run resumed meanwhile, so the summary still matches the values."""
    place = str(tmp_path / "data")
    compact([Run.open(root / "a")], place)
    change_sidecar(root / "a", tags=["edited"])

    class ResumedRun(Run):
        """A row is added after its values were read."""

        @property
        def summary(self):
            with (self.path / "metrics.csv").open("a") as file:
                file.write(
                    "60" + "," * (self.path / "metrics.csv").read_text().split("\n")[0].count(",") + "\n"
                )
            return super().summary

    report = compact([ResumedRun(Run.open(root / "a").record)], place)

    assert (report.updated, [path.name for path, _ in report.damaged]) == (0, ["a"])
    with open_dataset(place) as dataset:
        assert dataset["id-a"].tags == ("sweep:7",)
        assert dataset["id-a"].summary["loss"].last == dataset["id-a"].series("loss").value[-1]


def test_summary_of_a_killed_run_matches_its_values(root, tmp_path):
    """Its summary file is older than its last rows."""
    place = str(tmp_path / "data")
    columns = (root / "a" / "metrics.csv").read_text().split("\n")[0].split(",")
    with (root / "a" / "metrics.csv").open("a") as file:
        file.write(",".join({"step": "60", "loss": "-7.0"}.get(name, "") for name in columns) + "\n")
    change_sidecar(root / "a", status="running")

    compact([Run(Run.open(root / "a").record, clock=lambda: 4e9)], place)

    with open_dataset(place) as dataset:
        summary = dataset["id-a"].summary["loss"]
        assert (summary.last, summary.min, summary.min_step, summary.count) == (-7.0, -7.0, 60, 51)


def test_killed_run_has_the_same_duration_in_a_dataset(root, tmp_path):
    """It lasts until the last heartbeat, which is later than its sidecar says."""
    change_sidecar(root / "a", status="running", created_at=1e9, ended_at=None, updated_at=1e9 + 5)
    os.utime(root / "a" / "heartbeat", (1e9 + 9, 1e9 + 9))

    with open_runs(root, cache=tmp_path / "cache") as runs:
        shown = value_of(runs["id-a"].record, "duration", 4e9)
        compact([runs["id-a"]], tmp_path / "data")

    with open_dataset(tmp_path / "data") as dataset:
        record = dataset["id-a"].record
    assert (shown, value_of(record, "duration", 4e9), status_of(record, 4e9)) == (9.0, 9.0, "killed")


def test_integers_beyond_53_bits_become_the_nearest_floats(tmp_path):
    """This affects values and statistics of metrics such as byte counts."""
    with Written(tmp_path / "runs" / "a", run_id="a") as written:
        for step in range(3):
            written.log({"count": (1 << 60) + 1 - step}, step)

    report = compact(runs_of(tmp_path / "runs"), str(tmp_path / "data"))

    assert report.damaged == ()
    with open_dataset(tmp_path / "data") as dataset:
        summary = dataset["a"].summary["count"]
        assert (summary.last, summary.min, summary.max) == (2.0**60, 2.0**60, 2.0**60)
        assert dataset["a"].record.summary == {"count": 2.0**60}


def test_names_and_ids_with_any_character(tmp_path):
    """Metrics, runs and hyperparameters may have quotes, line feeds, patterns and any alphabet."""
    names = ["it's", 'q"x', "ü/é", "a,b", "new\nline", "a\\b", "*?[", " lead", "\U0001f600", "--"]
    ids = ["id'; DROP TABLE runs --\n\"x\\", "id\\' OR 1=1 --"]
    for folder, run_id in zip(('it\'s a "run"\nü', "two"), ids, strict=True):
        with Written(tmp_path / "runs" / folder) as written:
            written.logger.log_hyperparameters(dict.fromkeys(names, "it's\n\\ü"))
            written.log(dict.fromkeys(names, 1.5), 0)
        change_sidecar(tmp_path / "runs" / folder, run_id=run_id)
    compact(runs_of(tmp_path / "runs"), str(tmp_path / "data"))
    changed = next(run for run in runs_of(tmp_path / "runs") if run.run_id == ids[0])
    with (changed.path / "metrics.csv").open("a") as file:
        file.write("1" + "," * (changed.path / "metrics.csv").read_text().count(",", 0, 60) + "\n")

    report = compact(runs_of(tmp_path / "runs"), str(tmp_path / "data"))

    assert (report.changed, report.unchanged, report.damaged) == (1, 1, ())
    with open_dataset(tmp_path / "data") as dataset:
        assert_same_metrics(dataset, runs_of(tmp_path / "runs"))
        assert [dataset[run_id].hparams for run_id in ids] == [dict.fromkeys(names, "it's\n\\ü")] * 2
        assert dataset.sql("SELECT count(*) FROM metrics").rows == ((2 * len(names),),)


def test_run_without_metrics_is_compacted(tmp_path):
    """The dataset has the run and no points."""
    with Written(tmp_path / "run"):
        pass

    report = compact([Run.open(tmp_path / "run")], str(tmp_path / "data"))

    assert (report.runs, report.points, report.empty) == (1, 0, 1)
    with open_dataset(tmp_path / "data") as dataset:
        assert dataset.sql("SELECT * FROM metrics").rows == ()
        assert [run.status for run in dataset.query()] == ["completed"]


def test_damaged_or_closed_dataset_raises(root, tmp_path):
    """A file is cut off, or a query comes after the end."""
    compact(runs_of(root)[:2], str(tmp_path / "data"))
    compact(runs_of(root), str(tmp_path / "data"))
    with open_dataset(tmp_path / "data") as dataset:
        file = Path(dataset.files()[0])
    content = file.read_bytes()

    file.write_bytes(content[:100])

    with pytest.raises(DatasetError, match=r"data cannot be read.*or a file is damaged"):
        open_dataset(tmp_path / "data")
    with pytest.raises(DatasetError, match="data cannot be read or written"):
        compact(runs_of(root), str(tmp_path / "data"), optimize=True)
    file.write_bytes(content)
    with open_dataset(tmp_path / "data") as again:
        assert_same_metrics(again, runs_of(root))
    for closed in (dataset, again):
        with pytest.raises(RunsError, match="closed"):
            closed.sql("SELECT 1")


def test_optimize_joins_small_files(tmp_path):
    """After many small compactions, one file is left, and `vacuum_days` deletes the others."""
    runs = []
    for index in range(6):
        folder = tmp_path / "many" / f"r{index}"
        write_csv(folder, ["step,loss,acc", *(f"{step},{index}.5,{step}" for step in range(5))])
        runs.append(Run.open(folder))
        compact([runs[-1]], str(tmp_path / "data"))
    assert len(list((tmp_path / "data" / "metrics").rglob("*.parquet"))) == 6

    report = compact(runs, str(tmp_path / "data"), optimize=True, vacuum_days=0)

    assert (report.unchanged, report.points) == (6, 60)
    for name in ("metrics", "summary", "runs"):
        assert len(list((tmp_path / "data" / name).rglob("*.parquet"))) == 1
    with open_dataset(tmp_path / "data") as dataset:
        assert len(dataset.files()) == 1
        assert_same_metrics(dataset, runs)
        assert dataset.sql("SELECT count(*), count(DISTINCT run_id) FROM metrics").rows == ((60, 6),)
    again = compact(runs, str(tmp_path / "data"))
    assert (again.version, again.unchanged) == (report.version, 6)


def test_concurrent_compactions_write_each_run_once(root, template, tmp_path):
    """While one reads its runs, another writes the same ones and more; the first starts over."""
    place = tmp_path / "data"
    copy_as(template, root / "d", "id-d")

    class RunWithARival(Run):
        """Another compaction begins and ends while this run is read."""

        is_first = True

        def ranks(self):
            if RunWithARival.is_first:
                RunWithARival.is_first = False
                rival = threading.Thread(
                    target=compact, args=([Run.open(root / name) for name in "abd"], str(place))
                )
                rival.start()
                rival.join()
            return super().ranks()

    report = compact([RunWithARival(Run.open(root / name).record) for name in "abc"], str(place))

    assert (report.runs, report.points) == (4, 4 * 107)
    with open_dataset(place) as dataset:
        assert_same_metrics(dataset, [Run.open(root / name) for name in "abcd"])
        assert dataset.sql("SELECT count(*) FROM metrics").rows == ((4 * 107,),)
        assert dataset.sql("SELECT count(*) FROM runs").rows == ((4,),)


def test_compaction_during_optimize_loses_nothing(root, tmp_path, monkeypatch):
    """It begins and ends before the last commit of the sorting, which starts over."""
    place = str(tmp_path / "data")
    compact([Run.open(root / "a")], place)
    compact([Run.open(root / "c")], place)
    write, rivals = writing.DatasetWriter.write, [Run.open(root / "b")]

    def write_after_a_rival(self, *arguments):
        if rivals:
            compact([rivals.pop()], place)
        write(self, *arguments)

    monkeypatch.setattr(writing.DatasetWriter, "write", write_after_a_rival)
    report = compact([Run.open(root / "a")], place, optimize=True)

    assert (report.runs, report.points) == (3, 3 * 107)
    with open_dataset(place) as dataset:
        assert_same_metrics(dataset, [Run.open(root / name) for name in "abc"])
        assert dataset.sql("SELECT count(*) FROM metrics").rows == ((3 * 107,),)
        assert [len(dataset.files(name)) for name in ("metrics", "runs")] == [1, 1]


@pytest.mark.parametrize("table", ["metrics", "hparams", "summary"])
def test_compaction_killed_between_two_tables_changes_nothing(root, tmp_path, monkeypatch, table):
    """Its remains are invisible, even if its runs are gone when the next one begins."""
    place = tmp_path / "data"
    compact([Run.open(root / "a")], str(place))
    write = writing.DatasetWriter.write

    def write_and_end(self, name, *more):
        write(self, name, *more)
        if name == table:
            raise KeyboardInterrupt

    monkeypatch.setattr(writing.DatasetWriter, "write", write_and_end)
    with pytest.raises(KeyboardInterrupt):
        compact([Run.open(root / "b")], str(place))
    monkeypatch.undo()

    with open_dataset(place) as dataset:
        assert_same_metrics(dataset, [Run.open(root / "a")])
        assert dataset.sql("SELECT DISTINCT run_id FROM metrics").rows == (("id-a",),)
    report = compact([Run.open(root / "c")], str(place))
    assert (report.runs, report.added) == (2, 1)
    with open_dataset(place) as dataset:
        assert_same_metrics(dataset, [Run.open(root / "a"), Run.open(root / "c")])
        for name in ("metrics", "hparams", "summary", "runs"):
            rows = dataset.sql(f"SELECT DISTINCT run_id FROM {name} ORDER BY 1").rows  # noqa: S608  # the names above
            assert rows == (("id-a",), ("id-c",))


def test_damaged_runs_do_not_stop_the_others(root, tmp_path):
    """The report names runs with an unreadable sidecar or metrics file, or rows with another checksum."""
    (root / "a" / "sidecar.json").write_text("{")
    (root / "b" / "metrics.csv").unlink()
    (root / "b" / "metrics.csv").mkdir()
    with Written(root / "flipped") as run:
        run.log({"loss": 1.0}, 0)
    path = root / "flipped" / "metrics.csv"
    path.write_bytes(path.read_bytes().replace(b"1.0", b"9.0"))

    with open_runs(root, cache=tmp_path / "cache") as runs:
        report = compact(runs, str(tmp_path / "data"))

    assert {path.name for path, _ in report.damaged} == {"a", "b", "flipped"}
    assert (report.runs, report.added) == (2, 2)
    with open_dataset(tmp_path / "data") as dataset:
        assert_same_metrics(dataset, [Run.open(root / "c"), Run.open(root / "spt")])


def test_run_deleted_during_compaction_keeps_its_earlier_values(root, tmp_path):
    """It is reported. A new run that is deleted meanwhile is not added."""
    place = str(tmp_path / "data")
    compact([Run.open(root / "a"), Run.open(root / "b")], place)
    for name in "ab":
        with (root / name / "metrics.csv").open("a") as file:
            file.write(
                "60" + "," * (root / name / "metrics.csv").read_text().split("\n")[0].count(",") + "\n"
            )

    class DeletedRun(Run):
        """Its folder is deleted while its metrics are read."""

        def ranks(self):
            found = super().ranks()
            shutil.rmtree(self.path)
            return found

    runs = [DeletedRun(Run.open(root / "a").record), Run.open(root / "b"), Run.open(root / "c")]
    runs += [DeletedRun(Run.open(root / "spt").record)]
    shutil.rmtree(root / "b")
    shutil.rmtree(root / "c")

    report = compact(runs, place)

    assert {path.name for path, _ in report.damaged} == {"a", "b", "c", "spt"}
    assert (report.runs, report.points, report.unchanged) == (2, 2 * 107, 0)
    with open_dataset(place) as dataset:
        assert [run.run_id for run in dataset.query(sort_by="run_id", descending=False)] == ["id-a", "id-b"]
        assert dataset.sql("SELECT count(*) FROM metrics").rows == ((2 * 107,),)


def test_run_written_during_compaction_keeps_its_earlier_values(root, tmp_path):
    """It is reported, and compacted the next time."""
    place = str(tmp_path / "data")

    class WrittenRun(Run):
        """Another row is written while its metrics are read."""

        def ranks(self):
            found = super().ranks()
            with (self.path / "metrics.csv").open("a") as file:
                file.write(
                    "60" + "," * (self.path / "metrics.csv").read_text().split("\n")[0].count(",") + "\n"
                )
            return found

    report = compact([WrittenRun(Run.open(root / "a").record), Run.open(root / "b")], place)
    again = compact([Run.open(root / "a"), Run.open(root / "b")], place)

    assert [(path.name, "changed while" in problem) for path, problem in report.damaged] == [("a", True)]
    assert (report.runs, report.points, again.added, again.damaged) == (1, 107, 1, ())
    with open_dataset(place) as dataset:
        assert_same_metrics(dataset, [Run.open(root / "a"), Run.open(root / "b")])


def commit_as_compact(place):
    """Commits to `runs` that the newest version of `metrics` belongs to it."""
    from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

    runs, version = DeltaTable(place / "runs"), DeltaTable(place / "metrics").version()
    transactions = [Transaction(f"{APPLICATION}.metrics", version)]
    write_deltalake(
        runs,
        runs.to_pyarrow_table().slice(0, 0),
        mode="append",
        commit_properties=CommitProperties(app_transactions=transactions),
    )


def test_dataset_of_another_version_of_the_package(root, tmp_path):
    """A missing field has its default until its run changes; extra columns are kept."""
    from deltalake import DeltaTable, Field, write_deltalake

    place = tmp_path / "data"
    change_sidecar(root / "a", display_name="first")
    compact([Run.open(root / "a"), Run.open(root / "b")], str(place))
    rows = DeltaTable(place / "runs").to_pyarrow_table().drop_columns(["display_name"])
    write_deltalake(place / "runs", rows, mode="overwrite", schema_mode="overwrite")
    for name in ("metrics", "runs"):
        DeltaTable(place / name).alter.add_columns([Field("more", "string")])
    commit_as_compact(place)

    with open_dataset(place) as dataset:
        assert (dataset["id-a"].display_name, dataset["id-a"].notes) == (None, "notes")
    change_sidecar(root / "a", notes="changed")
    report = compact(runs_of(root), str(place), optimize=True)

    assert (report.added, report.updated, report.unchanged) == (2, 1, 1)
    with open_dataset(place) as dataset:
        assert_same_metrics(dataset, runs_of(root))
        assert [run.display_name for run in dataset.query(sort_by="run_id")] == ["first", None, None, None]
        for name in ("metrics", "runs"):
            assert dataset.sql(f"SELECT DISTINCT more FROM {name}").rows == ((None,),)  # noqa: S608  # the names above


def test_rows_of_all_writers_are_in_the_dataset(root, tmp_path):
    """They are merged by step, with the name of each writer, and a run changes if a writer adds rows."""
    run = Run.open(write_shared(root / "shared"))
    place = str(tmp_path / "data")
    compact([run, Run.open(root / "a")], place)

    with open_dataset(place) as dataset:
        there = dataset[run.run_id]
        assert_same_metrics(dataset, [run, Run.open(root / "a")])
        assert there.writers == run.writers == ["eval", "probe"]
        assert there.series("loss").writer.tolist() == run.series("loss").writer.tolist()
        assert there.series("loss", writer="eval").value.tolist() == [0.5, 11.0]
        assert there.summary == run.summary
        assert {one.writer for one in there.blocks()} == {"", "eval", "probe"}
        assert [one.writer for one in there.blocks(writer="probe")] == ["probe"] * 2
        assert (dataset["id-a"].writers, dataset["id-a"].series("loss").writer) == ([], None)
        assert dataset.sql(
            "SELECT writer, count(*) FROM metrics WHERE run_id = ? GROUP BY ALL ORDER BY 1", [run.run_id]
        ).rows == (("", 3), ("eval", 4), ("probe", 2))
        assert not there.is_written
        with pytest.raises(WriterNotFoundError):
            there.series("loss", writer="none")
        with pytest.raises(MetricNotFoundError):
            there.series("acc", writer="probe")

    with Written(root / "shared", writer="eval") as late:
        late.log({"acc": 0.5}, 9)
    report = compact([run.reload(), Run.open(root / "a")], place)
    assert (report.changed, report.unchanged) == (1, 1)
    with open_dataset(place) as dataset:
        assert_same_metrics(dataset, [run])


def test_run_with_a_live_writer_is_left_out(root, tmp_path):
    """It is compacted once the writer has ended."""
    with Written(root / "a", writer="eval") as late:
        late.log({"acc": 0.5}, 9)
        late.flush()
        report = compact([Run.open(root / "a")], str(tmp_path / "data"))
    again = compact([Run.open(root / "a")], str(tmp_path / "data"))

    assert (report.alive, report.runs) == (1, 0)
    assert (again.alive, again.runs) == (0, 1)


def test_table_with_an_unsupported_feature_is_refused(root, tmp_path):
    """Otherwise values that another engine marked as deleted would be read."""
    from deltalake import DeltaTable, TableFeatures

    place = tmp_path / "data"
    compact(runs_of(root), str(place))
    DeltaTable(place / "metrics").alter.add_feature(
        TableFeatures.DeletionVectors, allow_protocol_versions_increase=True
    )

    commit_as_compact(place)
    with pytest.raises(DatasetError, match="deletionVectors"):
        open_dataset(place)


def test_threads_read_a_dataset_concurrently(root, tmp_path):
    """This includes the first query for runs, which fills the index. Queries spill to the temporary folder."""
    compact(runs_of(root), str(tmp_path / "data"))

    with open_dataset(tmp_path / "data") as dataset, ThreadPoolExecutor(8) as pool:
        start = threading.Barrier(8)

        def read(number):
            start.wait(timeout=60)
            run = dataset["id-" + "abc"[number % 3]]
            return len(dataset), len(run.series("loss")), dataset.sql("SELECT ?", [number]).rows

        found = list(pool.map(read, range(8)))
        # By default, DuckDB would use the current folder.
        ((folder,),) = dataset.sql("SELECT current_setting('temp_directory')").rows

    assert Path(folder).is_relative_to(tempfile.gettempdir())
    assert not Path(folder).exists()
    assert found == [(4, 50, ((number,),)) for number in range(8)]


def test_other_places_are_refused(root, tmp_path):
    """These are a folder without a dataset, other files, other tables, and a path that Delta can't write."""
    import pyarrow as pa
    from deltalake import write_deltalake

    with pytest.raises(DatasetError, match="destinations runs compact"):
        open_dataset(tmp_path / "none")
    with pytest.raises(DatasetError, match="contains other files: a, b, c"):
        compact(runs_of(root), str(root))
    assert not (root / "metrics").exists()
    for name in ("metrics", "hparams", "summary", "runs"):
        write_deltalake(str(tmp_path / "other" / name), pa.table({"x": [1]}))
    with pytest.raises(DatasetError, match=r"not one of this package.*got x"):
        compact(runs_of(root), str(tmp_path / "other"))
    for name in ("metrics", "hparams", "summary", "runs"):
        shutil.rmtree(tmp_path / "other" / name)
        write_deltalake(str(tmp_path / "other" / name), pa.table({"run_id": [1], "metric": ["loss"]}))
    with pytest.raises(DatasetError, match=r"expected a column run_id of string, got int64"):
        compact(runs_of(root), str(tmp_path / "other"))
    for place in (str(tmp_path / "a[1]"), "s3://bucket/a[1]"):
        with pytest.raises(DatasetError, match="cannot contain '\\['"):
            compact(runs_of(root), place)
    with pytest.raises(DatasetError, match="cannot contain '#'"):
        compact(runs_of(root), "s3://bucket/a#1")
    with pytest.raises(DatasetError, match="sftp"):
        compact(runs_of(root), "sftp://host/folder")
    with pytest.raises(DatasetError, match=r"s3://bucket\?profile=absent.*absent.*could not be found"):
        open_dataset("s3://bucket?profile=absent")


def test_folder_with_the_users_files_is_refused(root, tmp_path):
    """A table in `runs/` beside run folders would have them vacuumed. Nothing is written or removed."""
    before = files(tmp_path)

    with pytest.raises(DatasetError, match="contains other files: runs/a, runs/b, runs/c"):
        compact(runs_of(root), str(tmp_path), vacuum_days=0)

    assert files(tmp_path) == before


def test_negative_vacuum_days_raise(root, tmp_path):
    """The error comes before anything is written."""
    for days in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="vacuum_days must be 0 or more"):
            compact(runs_of(root), str(tmp_path / "data"), vacuum_days=days)

    assert not (tmp_path / "data").exists()


def test_gone_runs_are_removed_on_request(root, tmp_path):
    """Damaged and live runs are not gone; an earlier version still has removed ones."""
    place = str(tmp_path / "data")
    before = compact(runs_of(root), place)
    # An empty folder may just not be mounted.
    with pytest.raises(DatasetError, match="remove_gone would remove all 4"):
        compact([], place, remove_gone=True, vacuum_days=0)
    shutil.rmtree(root / "b")
    shutil.rmtree(root / "spt")
    (root / "c" / "sidecar.json").write_text("{")

    with open_runs(root, cache=tmp_path / "cache") as runs:
        kept = compact(runs, place)
        report = compact(runs, place, remove_gone=True)

    assert (kept.runs, kept.removed) == (4, 0)
    assert (report.runs, report.removed, report.unchanged) == (2, 2, 1)
    with open_dataset(place) as dataset:
        assert_same_metrics(dataset, [Run.open(root / "a")])
        for name in ("metrics", "hparams", "summary", "runs"):
            rows = dataset.sql(f"SELECT DISTINCT run_id FROM {name} ORDER BY 1").rows  # noqa: S608  # the names above
            assert rows == (("id-a",), ("id-c",))
    with open_dataset(place, version=before.version) as dataset:
        assert len(dataset) == 4
        assert len(dataset["id-b"].series("loss")) == 50


@pytest.fixture(scope="module")
def _credentials():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_servers.ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def moto(_credentials):
    """A server with conditional puts."""
    with s3_servers.moto() as server:
        yield server


@pytest.fixture(scope="module")
def rclone(_credentials, tmp_path_factory):
    """A server that ignores If-None-Match."""
    with s3_servers.rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


def test_dataset_in_a_bucket(moto, root):
    """Compaction, a second one, queries, series and SQL work over S3, with the options of the URI."""
    uri = moto.uri("datasets/ü 100%")
    runs = runs_of(root)

    first = compact(runs[:3], uri)
    with open_dataset(uri) as dataset:
        second = compact(runs, uri, optimize=True, vacuum_days=0)
        with pytest.raises(DatasetError, match=r"cannot be read.*version 1 may have been vacuumed"):
            dataset.sql("SELECT * FROM metrics")

    assert (first.runs, second.runs, second.added, second.unchanged) == (3, 4, 1, 3)
    with open_runs(uri) as dataset:
        assert_same_metrics(dataset, runs)
        best = dataset.query(where="hparams.optim.lr >= 0.05", sort_by="hparams.optim.lr")
        assert [run.hparams["optim.lr"] for run in best] == [0.1, 0.2, 1.0]
        assert dataset.files()[0].startswith("s3://bucket/datasets/ü 100%/metrics/")
    assert sql(uri, "SELECT count(*) FROM metrics").rows == ((second.points,),)


def test_missing_bucket_is_named(moto, root):
    """The error names the bucket and shows no credentials."""
    uri = moto.uri("data").replace("//bucket", "//nowhere")

    with pytest.raises(DatasetError, match=r"s3://nowhere/data.*does not exist") as caught:
        compact(
            runs_of(root),
            uri,
            store_options={"aws_access_key_id": "key", "aws_secret_access_key": "topsecret0123456789"},
        )

    assert "topsecret" not in str(caught.value)
    with pytest.raises(RootError, match="does not exist"):
        open_runs(uri)
    with open_runs(moto.uri("nothing-here")) as runs:
        assert len(runs) == 0


def test_server_without_conditional_puts_is_refused(rclone, root):
    """Two compactions would lose data there, so nothing is written."""
    with pytest.raises(DatasetError, match="single_writer=True"):
        compact(runs_of(root), rclone.uri("careless"))

    assert rclone.objects("careless") == {}


def test_single_writer_needs_no_conditional_puts(moto, root):
    """A lone writer works without them."""
    report = compact([Run.open(root / "a")], moto.uri("alone"), single_writer=True)

    assert report.runs == 1
    with open_dataset(moto.uri("alone")) as dataset:
        assert_same_metrics(dataset, [Run.open(root / "a")])
