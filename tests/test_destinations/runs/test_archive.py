"""Uses a dataset as the archive of runs: wide rows, records, edits, deletions, and small rewrites."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("deltalake")

from destinations.runs import EditError, MetricNotFoundError, Run, RunNotFoundError, open_runs
from destinations.runs.dataset import compact, open_dataset, sql
from destinations.runs.dataset.tables import Placement, WideColumns, arrow_schema
from tests.servers import s3_servers
from tests.test_destinations.runs.written import (
    Written,
    change_sidecar,
    write_csv,
    write_shared,
    write_stable_pretraining,
)

pytestmark = pytest.mark.xdist_group("duckdb")


def write_run(root, name, steps=5, **hparams):
    """Writes a finished run with metrics, a text, a table and a picture."""
    with Written(root / name, tags=["own"]) as run:
        run.logger.log_hyperparameters({"lr": 0.1, **hparams})
        for step in range(steps):
            run.log({"loss": 1 / (step + 1), "acc": step / steps}, step)
        run.logger.log_text(f"about {name}", "note", step=1)
        run.logger.log_table(["image", "guess"], [[12, "dög"], [13, "a,b"]], "wrong", step=2)
        run.logger.log_images(np.zeros((1, 4, 4)), "inputs", step=3)
    change_sidecar(root / name, run_id=name)
    return Run.open(root / name)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """Three runs; only the last one has a certain hyperparameter."""
    root = tmp_path_factory.mktemp("template")
    for name in ("a", "b"):
        write_run(root, name)
    write_run(root, "c", optim="adam", seed=(1 << 60) + 1)
    return root


@pytest.fixture
def root(template, tmp_path):
    """A copy of the runs."""
    return shutil.copytree(template, tmp_path / "runs")


def runs_of(root):
    """Returns all runs below a folder."""
    return [Run.open(path) for path in sorted(root.iterdir())]


def files_of(place):
    """Returns the files of each table of the newest version, with their sizes."""
    with open_dataset(place) as dataset:
        names = dataset.versions
        return {name: {one: Path(one).stat().st_size for one in dataset.files(name)} for name in names}


# One row for each run.


def test_runs_have_hyperparameters_and_metrics_as_columns(root, tmp_path):
    """A new name is a new column, which is empty for earlier runs."""
    compact(runs_of(root)[:2], tmp_path / "data")
    compact(runs_of(root), tmp_path / "data")

    query = """SELECT run_id, "hparams.lr", "hparams.optim", "hparams.seed", "summary.loss", "min.loss",
                      "max.acc", "mean.acc" FROM runs ORDER BY run_id"""
    rest = (0.2, 0.2, 0.8, pytest.approx(0.4))
    assert sql(tmp_path / "data", query).rows == (
        ("a", 0.1, None, None, *rest),
        ("b", 0.1, None, None, *rest),
        ("c", 0.1, "adam", str((1 << 60) + 1), *rest),
    )


def test_values_of_another_type_get_another_column():
    """No value is dropped or converted; an integer that no float represents is a text."""
    wide = WideColumns(arrow_schema("runs"))

    first = wide.cells({"a": 1, "b": "x", "c": True, "d": None, "e": float("nan")}, {})
    second = wide.cells({"a": "auto", "b": 2, "c": 0.5, "d": 10**400}, {})

    assert {name: value for name, value in first.items() if name != "hparams.e"} == {
        "hparams.a": 1.0,
        "hparams.b": "x",
        "hparams.c": True,
    }
    assert np.isnan(first["hparams.e"])
    assert second == {
        "hparams.a:string": "auto",
        "hparams.b:double": 2.0,
        "hparams.c:double": 0.5,
        "hparams.d": str(10**400),
    }
    assert wide.left_out == set()


def test_names_unusable_as_columns_are_reported(tmp_path):
    """Engines don't tell `LR` from `lr`, so the second one is only in the long table and in the report."""
    with Written(tmp_path / "runs" / "one") as run:
        run.logger.log_hyperparameters({"lr": 0.1, "LR": 0.2})

    report = compact(runs_of(tmp_path / "runs"), tmp_path / "data")

    assert report.without_column == ("hparams.LR",)
    assert sql(tmp_path / "data", "SELECT name, number FROM hparams ORDER BY name").rows == (
        ("LR", 0.2),
        ("lr", 0.1),
    )
    assert sql(tmp_path / "data", 'SELECT "hparams.lr" FROM runs').rows == ((0.1,),)


# Records.


def test_texts_tables_and_links_survive_the_folder(root, tmp_path):
    """A run whose folder is gone has its texts and tables, and the former paths of its media."""
    runs = runs_of(root)
    wanted = [
        (run.texts(), run.table("wrong"), run.images(), run.record_counts(), run.tables()) for run in runs
    ]
    compact(runs, tmp_path / "data")
    shutil.rmtree(root)

    with open_dataset(tmp_path / "data") as dataset:
        found = [dataset[run.run_id] for run in runs]
        assert [
            (run.texts(), run.table("wrong"), run.images(), run.record_counts(), run.tables())
            for run in found
        ] == wanted
        part, types, count = found[0].table_part("wrong", 2, 1, 1)
        assert (part.rows, types, count) == (((13, "a,b"),), {"image": "int", "guess": "str"}, 2)
        with pytest.raises(MetricNotFoundError):
            found[0].texts("none")
        rows = dataset.sql("SELECT kind, path, content FROM records WHERE run_id = 'a' ORDER BY kind").rows
    (image,) = wanted[0][2]
    table = wanted[0][4][0].path
    assert rows == (
        ("image", str(image.path), None),
        ("table", str(table), 'image,guess\n12,dög\n13,"a,b"\n'),
        ("text", None, "about a"),
    )


def test_records_of_named_writers_and_deleted_files(tmp_path):
    """Records are in the order of logging; a file that was deleted later is not among them."""
    run = Run.open(write_shared(tmp_path / "shared"))
    compact([run], tmp_path / "data")

    with open_dataset(tmp_path / "data") as dataset:
        assert dataset[run.run_id].texts() == run.texts()
        assert dataset[run.run_id].artifacts() == run.artifacts()


# Edits and deletions.


def test_run_is_edited_in_the_dataset(root, tmp_path):
    """Its folder is not changed and may be gone; the next compaction keeps the edit."""
    compact(runs_of(root), tmp_path / "data")
    shutil.rmtree(root / "c")
    before = (root / "a" / "sidecar.json").read_bytes()

    with open_dataset(tmp_path / "data") as dataset:
        for name in ("a", "c"):
            run = dataset.edit(name, tags=["mine"], notes="good", archived=True)
            assert (run.tags, run.notes, run.archived) == (("mine",), "good", True)
        dataset.edit("a", notes="better")
        assert [
            run.run_id for run in dataset.query(tag="mine", archived=None, where="notes == 'better'")
        ] == ["a"]
    change_sidecar(root / "a", tags=["own", "late"])
    report = compact(runs_of(root), tmp_path / "data")

    assert (report.updated, report.unchanged) == (1, 1)
    assert not (root / "a" / "edits.json").exists()
    assert before != (root / "a" / "sidecar.json").read_bytes()
    query = "SELECT run_id, tags, notes, archived FROM runs ORDER BY run_id"
    assert sql(tmp_path / "data", query).rows == (
        ("a", ["late", "mine"], "better", True),
        ("b", ["own"], "", False),
        ("c", ["mine"], "good", True),
    )


def test_later_text_of_the_run_replaces_an_edit(root, tmp_path):
    """The newer one counts, without comparing clocks."""
    compact(runs_of(root), tmp_path / "data")
    with open_dataset(tmp_path / "data") as dataset:
        dataset.edit("a", notes="of the dataset", display_name="nice")
        with pytest.raises(EditError, match="changed meanwhile"):
            dataset.edit("a", notes="other", based_on={"notes": ""})
    change_sidecar(root / "a", notes="of the run")

    compact(runs_of(root), tmp_path / "data")

    query = "SELECT notes, display_name FROM runs WHERE run_id = 'a'"
    assert sql(tmp_path / "data", query).rows == (("of the run", "nice"),)


def test_deleted_run_stays_deleted(root, tmp_path):
    """It is in no table, its folder is kept, and a compaction adds it again only on request."""
    place = tmp_path / "data"
    compact(runs_of(root), place)
    with open_dataset(place) as dataset:
        version = dataset.version
        dataset.delete(["a"])
        with pytest.raises(RunNotFoundError):
            dataset["a"]
        assert [run.run_id for run in dataset.query(sort_by="run_id", descending=False)] == ["b", "c"]

    report = compact(runs_of(root), place)

    assert (report.runs, report.deleted, report.unchanged) == (2, 1, 2)
    assert (root / "a" / "metrics.csv").exists()
    for table in ("metrics", "records", "hparams", "summary", "runs"):
        rows = sql(place, f"SELECT DISTINCT run_id FROM {table} ORDER BY 1").rows  # noqa: S608  # the names above
        assert rows == (("b",), ("c",))
    with open_dataset(place, version=version) as old:
        assert len(old) == 3
    again = compact(runs_of(root), place, include_deleted=True)
    assert (again.added, again.deleted, again.runs) == (1, 0, 3)
    assert compact(runs_of(root), place).unchanged == 3


# Files rewritten by a change.


def test_changed_run_rewrites_one_small_file_per_table(tmp_path):
    """Runs of a similar size share a file; a long run has its own."""
    root, place = tmp_path / "runs", tmp_path / "data"
    for number in range(40):
        rows = 20_000 if number < 2 else 400
        write_csv(
            root / f"run{number:02}",
            ["step,loss,acc", *(f"{step},{number}.5,0.{step}" for step in range(rows))],
        )
    compact(runs_of(root), place, optimize=True)
    before = files_of(place)
    with (root / "run30" / "metrics.csv").open("a") as file:
        file.write("400,1.5,0.5\n")
    os.utime(root / "run30" / "metrics.csv", (1.7e9, 1.7e9))

    report = compact(runs_of(root), place)

    after = files_of(place)
    assert (report.changed, report.unchanged) == (1, 39)
    for name, files in before.items():
        gone = {one: size for one, size in files.items() if one not in after[name]}
        assert len(gone) <= 1
        assert len(after[name].keys() - files.keys()) <= 1
    total = sum(before["metrics"].values())
    assert sum(size for one, size in before["metrics"].items() if one not in after["metrics"]) < total / 10
    with open_dataset(place) as dataset:
        assert len(dataset["run30"].series("loss")) == 401
        assert dataset.sql("SELECT count(*) FROM metrics").rows == ((2 * (2 * 20_000 + 38 * 400 + 1),),)


def test_files_are_sorted_by_metric(root, tmp_path):
    """This holds before `optimize` too. Values of a run and metric keep the order of logging."""
    import pyarrow.parquet as pq

    compact(runs_of(root), tmp_path / "data")

    (file,) = files_of(tmp_path / "data")["metrics"]
    rows = pq.read_table(file, columns=["metric", "run_id", "row"], partitioning=None).to_pylist()
    keys = [(row["metric"], row["run_id"], row["row"]) for row in rows]
    assert keys == sorted(keys)


def test_placement_of_runs():
    """Runs of one size share a part up to a limit; a run that grows leaves it; a shelf holds thousands."""
    places = Placement([])
    small = [places.place(1000) for _ in range(200)]
    large = places.place(1 << 30)
    known = [{"part": part, "shelf": shelf, "size": 1000} for part, shelf in small]

    assert len({part for part, _ in small}) == 4
    assert large[0] not in {part for part, _ in small}
    again = Placement(known)
    assert again.place(2000, known[0]) == (known[0]["part"], 0)
    assert again.place(1 << 20, known[0])[0] == 4
    assert again.place(1000)[0] < 4
    many = Placement({"part": 0, "shelf": 0, "size": 1000} for _ in range(5000))
    assert many.place(1000)[1] == 1


# Changes.


def test_content_of_the_same_size_and_time_is_compared(tmp_path):
    """No clock of a machine is trusted."""
    write_csv(tmp_path / "runs" / "one", ["step,loss", "0,0.5"])
    path = tmp_path / "runs" / "one" / "metrics.csv"
    compact(runs_of(tmp_path / "runs"), tmp_path / "data")
    at = path.stat()
    path.write_text("step,loss\n0,0.7\n")
    os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))

    report = compact(runs_of(tmp_path / "runs"), tmp_path / "data")

    assert path.stat().st_size == at.st_size
    assert report.changed == 1


def test_deleted_metrics_are_kept_in_the_dataset(root, tmp_path):
    """The report names such runs."""
    write_stable_pretraining(root / "spt", ["epoch,loss,step", "0,0.5,0", "0,0.25,1"])
    compact(runs_of(root), tmp_path / "data")
    (root / "spt" / "metrics.csv").unlink()

    report = compact(runs_of(root), tmp_path / "data")

    assert [(path.name, problem) for path, problem in report.damaged] == [
        ("spt", "its metrics are gone. The dataset keeps its earlier values.")
    ]
    with open_dataset(tmp_path / "data") as dataset:
        assert len(dataset["spt"].series("loss")) == 2


# Buckets.


@pytest.fixture
def bucket(root, tmp_path, monkeypatch):
    """A bucket with the runs as plain files, and a log of its requests."""
    for name, value in s3_servers.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with s3_servers.moto() as server:
        client = server.client()
        for path in root.rglob("*"):
            if path.is_file() and not path.name.startswith("."):
                key = f"runs/{path.relative_to(root).as_posix()}"
                client.put_object(Bucket=s3_servers.BUCKET, Key=key, Body=path.read_bytes())
        yield server


def test_bucket_is_compacted_without_a_copy_of_its_rows(root, bucket, tmp_path, monkeypatch):
    """Another machine finds nothing to do, and neither keeps what it has read."""
    uri = bucket.uri("runs")
    reports = []
    for machine in ("one", "two"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
        with open_runs(uri) as runs:
            reports.append(compact(runs, tmp_path / "data"))
        copied = {path.name for path in (tmp_path / machine).rglob("*") if path.is_file()}
        assert "sidecar.json" in copied
        assert not copied & {"metrics.csv", "texts.jsonl", "tables.jsonl"}

    assert [(one.added, one.changed, one.updated, one.unchanged) for one in reports] == [
        (3, 0, 0, 0),
        (0, 0, 0, 3),
    ]
    with open_dataset(tmp_path / "data") as dataset:
        for run in runs_of(root):
            assert np.array_equal(dataset[run.run_id].series("loss").value, run.series("loss").value)
            assert dataset[run.run_id].table("wrong") == run.table("wrong")
        links = dataset.sql("SELECT path FROM records WHERE kind = 'image' AND run_id = 'a'").rows
    ((link,),) = links
    assert link.startswith(f"{uri.partition('?')[0]}/a/")


# Series.


@pytest.mark.parametrize("is_dataset", [True, False])
def test_series_of_many_runs_in_one_read(root, tmp_path, monkeypatch, is_dataset):
    """A dataset runs one query; run folders give the same series."""
    compact([*runs_of(root), Run.open(write_shared(tmp_path / "shared"))], tmp_path / "data")
    with open_runs(tmp_path / "data" if is_dataset else root, cache=tmp_path / "cache") as runs:
        runs.records()
        if is_dataset:
            asked, execute = [], type(runs)._execute
            monkeypatch.setattr(
                type(runs), "_execute", lambda self, *rest: asked.append(rest) or execute(self, *rest)
            )
        found = runs.series("loss", ["a", "c"])
        assert runs.series("none", ["a"]) == {}
        if is_dataset:
            assert len(asked) == 2
            shared = Run.open(tmp_path / "shared")
            every = runs.series("loss")
            assert every.keys() == {"a", "b", "c", shared.run_id}
            assert every[shared.run_id].writer.tolist() == shared.series("loss").writer.tolist()

    assert runs_of(root)[0].series("loss").value.tolist() == found["a"].value.tolist()
    assert list(found) == ["a", "c"]
