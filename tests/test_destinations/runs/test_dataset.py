"""Runs as a Parquet dataset, in a folder and in buckets."""

import json

import numpy as np
import pytest

pytest.importorskip("duckdb")

from destinations.runs import DatasetError, EditError, FilterError, MetricNotFoundError, Run, open_runs
from destinations.runs.dataset import compact, is_dataset, open_dataset, sql
from destinations.runs.dataset.manifest import all_names, latest_manifest
from destinations.runs.dataset.store_files import StoreFile
from tests.servers import s3_servers
from tests.test_destinations.runs.written import Written, change_sidecar, copy_as, write_csv, write_stable_pretraining
from uploads import LocalStore, open_store
from uploads.errors import RejectedByStoreError, TransientStoreError

pytestmark = pytest.mark.xdist_group("duckdb")


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A run that has ended, of two ranks, with a metric that goes back in steps and one with values that are no numbers."""
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
    """Three runs that have ended, and one of stable-pretraining."""
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
    """All runs below a folder."""
    return [Run.open(path) for path in sorted(root.iterdir())]


def assert_same_metrics(dataset, runs):
    """Every series of every run is in the dataset, exactly and in its order."""
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
    """Every file below a folder."""
    return sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())


def test_a_dataset_has_what_the_runs_have(root, tmp_path):
    """Series, hyperparameters with their types, summaries and fields come back.

    Points are sorted in the files.
    """
    runs = runs_of(root)

    report = compact(runs, str(tmp_path / "data [set]'s"))

    assert (report.generation, report.runs, report.added, report.alive) == (1, 4, 4, 0)
    assert report.points == 3 * (50 + 50 + 5 + 2) + 2
    with open_dataset(tmp_path / "data [set]'s") as dataset:
        assert_same_metrics(dataset, runs)
        run = dataset["id-b"]
        assert run.hparams == {"optim.lr": 0.1, "optim.name": "adam"}
        assert run.summary["loss"] == Run.open(root / "b").summary["loss"]
        assert (run.record.tags, run.record.notes, run.path) == (("sweep:7",), "notes", root / "b")
        assert not run.alive
        rows = dataset.sql("SELECT metric, run_id, rank, coalesce(step, -1), row FROM metrics").rows
        assert list(rows) == sorted(rows)
        assert dataset.sql("SELECT count(*) AS n FROM runs").to_dicts() == [{"n": 4}]


def test_a_dataset_is_queried_as_folders_are(root, tmp_path):
    """Filters, sorting, names and errors are those of `open_runs` on the folders."""
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
        assert len(dataset) == len(folders) == 4
        assert sorted(dataset.metric_names()) == sorted(folders.metric_names())
        assert dataset["b"].run_id == "id-b"
        assert dataset.compare(["id-a", "id-b"]) == {"hparams.optim.lr": {"id-a": 1.0, "id-b": 0.1}}
        with pytest.raises(FilterError):
            dataset.query(where="hparams.lr >=")
        with pytest.raises(MetricNotFoundError, match=r"'los'.*'loss'"):
            dataset["id-a"].series("los")
        with pytest.raises(EditError, match="compact again"):
            dataset.edit("id-a", notes="x")


def test_sql_over_all_points(root, tmp_path):
    """Any query of DuckDB runs over the tables; a wrong one is an error that says what is wrong."""
    compact(runs_of(root), str(tmp_path / "data"))

    found = sql(
        tmp_path / "data",
        """SELECT number AS lr, min(value) AS best FROM metrics JOIN hparams USING (run_id)
           WHERE metric = ? AND name = 'optim.lr' AND rank = 0 GROUP BY ALL ORDER BY lr""",
        ["loss"],
    )

    assert found.columns == ("lr", "best")
    assert found.rows == ((0.01, 0.02), (0.1, 0.02), (0.2, 0.25), (1.0, 0.02))
    with pytest.raises(DatasetError, match="nothing"):
        sql(tmp_path / "data", "SELECT * FROM nothing")


def test_another_engine_reads_the_files(root, tmp_path):
    """Pyarrow reads the files that the dataset names, and has the same points."""
    arrow = pytest.importorskip("pyarrow.dataset")
    compute = pytest.importorskip("pyarrow.compute")
    compact(runs_of(root), str(tmp_path / "data"))

    with open_dataset(tmp_path / "data") as dataset:
        table = arrow.dataset(dataset.files()).to_table(
            columns=["run_id", "value"],
            filter=(compute.field("metric") == "loss") & (compute.field("rank") == 0),
        )
        wanted = dataset.sql(
            "SELECT run_id, min(value) FROM metrics WHERE metric = 'loss' AND rank = 0 GROUP BY ALL"
        ).rows

    found = table.group_by("run_id").aggregate([("value", "min")]).to_pydict()
    assert set(zip(found["run_id"], found["value_min"], strict=True)) == set(wanted)


def test_nothing_new_is_nothing_written(root, tmp_path):
    """A second compaction of the same runs changes no file."""
    compact(runs_of(root), str(tmp_path / "data"))
    before = files(tmp_path / "data")

    report = compact(runs_of(root), str(tmp_path / "data"))

    assert (report.generation, report.unchanged, report.added, report.changed) == (1, 4, 0, 0)
    assert files(tmp_path / "data") == before


def test_only_what_changed_is_read_again(root, template, tmp_path):
    """New runs are added, changed ones replaced, notes updated without reading points, and runs that are gone stay."""
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

    assert (report.generation, report.runs) == (2, 5)
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


def test_old_states_are_removed_and_the_last_one_stays_readable(root, template, tmp_path):
    """Whoever has a dataset open reads on through the next compaction; after that nothing of it is left."""
    place = tmp_path / "data"
    compact([Run.open(root / "a")], str(place))
    with open_dataset(place) as first:
        compact([Run.open(root / "b")], str(place))
        with (root / "a" / "metrics.csv").open("a") as file:
            file.write("\n")
        assert len(first["id-a"].series("loss")) == 50
        compact([Run.open(root / "a")], str(place))

    store = LocalStore(place)
    present = latest_manifest(store)
    assert present.generation == 3
    assert sorted(name for name in files(place) if name.startswith("manifests/")) == [
        "manifests/00000002.json",
        "manifests/00000003.json",
    ]
    assert present.names() <= set(all_names(store))
    compact([Run.open(root / "c")], str(place))
    assert not any(
        "00000001-" in name and name not in latest_manifest(store).names()
        for name in files(place)
        if "tables" in name
    )


def test_runs_that_are_alive_are_left_out(root, tmp_path):
    """A run that is being written waits for its end; one that was killed has ended."""
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


def test_a_run_id_that_occurs_twice(root, template, tmp_path):
    """The newer of two runs with one id is taken, and the other is named."""
    copy_as(template, root / "copy", "id-a")
    change_sidecar(root / "copy", updated_at=5e9, notes="newer")

    report = compact(runs_of(root), str(tmp_path / "data"))

    assert report.duplicates == (root / "a",)
    with open_dataset(tmp_path / "data") as dataset:
        assert dataset["id-a"].record.notes == "newer"


def test_a_run_without_metrics(tmp_path):
    """A run that logged nothing is in the dataset, which has no points."""
    with Written(tmp_path / "run"):
        pass

    report = compact([Run.open(tmp_path / "run")], str(tmp_path / "data"))

    assert (report.runs, report.points, report.empty) == (1, 0, 1)
    with open_dataset(tmp_path / "data") as dataset:
        assert dataset.sql("SELECT * FROM metrics").rows == ()
        assert [run.status for run in dataset.query()] == ["completed"]


def test_many_small_parts_become_one(root, tmp_path):
    """After many small compactions there are few files, and nothing is lost."""
    folders = []
    for index in range(6):
        write_csv(
            tmp_path / "many" / f"r{index:02d}", ["step,loss", *(f"{step},{index}.5" for step in range(5))]
        )
        folders.append(Run.open(tmp_path / "many" / f"r{index:02d}"))
        compact([folders[-1]], str(tmp_path / "data"), small_parts=4)

    with open_dataset(tmp_path / "data") as dataset:
        assert len(dataset.files()) == 2
        assert_same_metrics(dataset, folders)
        assert dataset.sql("SELECT count(*), count(DISTINCT run_id) FROM metrics").rows == ((30, 6),)
        assert dataset.sql("SELECT count(DISTINCT part) FROM runs").rows == ((len(dataset.manifest.parts),),)


class StoreThatFailsAt(LocalStore):
    """Fails for good at a certain put, as a process that ends there."""

    def __init__(self, root, puts):
        super().__init__(root)
        self.puts = puts

    def put(self, name, body, *, overwrite, notes=None):
        if self.puts == 0:
            raise RejectedByStoreError("no room")
        self.puts -= 1
        return super().put(name, body, overwrite=overwrite, notes=notes)


@pytest.mark.parametrize("puts", range(5))
def test_a_compaction_that_ends_anywhere_changes_nothing(root, tmp_path, puts):
    """Whichever put was the last one, readers see the state before.

    The next compaction does it all, and leaves no rest.
    """
    place = tmp_path / "data"
    compact([Run.open(root / "a")], str(place))

    with pytest.raises(RejectedByStoreError):
        compact(runs_of(root), StoreThatFailsAt(place, puts))

    with open_dataset(place) as dataset:
        assert [run.run_id for run in dataset.query()] == ["id-a"]
        assert_same_metrics(dataset, [Run.open(root / "a")])
    report = compact(runs_of(root), str(place))
    assert (report.generation, report.runs, report.added) == (2, 4, 3)
    with open_dataset(place) as dataset:
        assert_same_metrics(dataset, runs_of(root))
    store = LocalStore(place)
    manifests = [json.loads((place / f"manifests/0000000{number}.json").read_bytes()) for number in (1, 2)]
    named = {file["name"] for one in manifests for part in one["parts"] for file in part["files"]}
    named |= {name for one in manifests for name in one["tables"].values()}
    assert set(all_names(store)) == named | {"manifests/00000001.json", "manifests/00000002.json"}


class StoreWithARival(LocalStore):
    """Another compaction commits just before this one's manifest is put."""

    def __init__(self, root, rival):
        super().__init__(root)
        self.rival = rival

    def put(self, name, body, *, overwrite, notes=None):
        if name.startswith("manifests/") and self.rival is not None:
            rival, self.rival = self.rival, None
            rival()
        return super().put(name, body, overwrite=overwrite, notes=notes)


def test_of_two_compactions_at_once_one_fails(root, tmp_path):
    """The slower one is told, and what the faster one wrote is whole."""
    place = tmp_path / "data"

    with pytest.raises(DatasetError, match="Run this one again"):
        compact(
            [Run.open(root / "a")],
            StoreWithARival(place, lambda: compact([Run.open(root / "b")], str(place))),
        )

    with open_dataset(place) as dataset:
        assert_same_metrics(dataset, [Run.open(root / "b")])
    assert compact([Run.open(root / "a")], str(place)).runs == 2


def test_what_is_no_dataset_is_refused(tmp_path):
    """A folder without one, a manifest of a later version, and a damaged one are errors that say so."""
    with pytest.raises(DatasetError, match="destinations runs compact"):
        open_dataset(tmp_path)
    assert not is_dataset(tmp_path)
    (tmp_path / "manifests").mkdir()
    manifest = tmp_path / "manifests" / "00000001.json"
    for text, problem in (
        ('{"format_version": 2}', "version 2, not 1"),
        ("{", "something else"),
        ('{"format_version": 1}', "damaged"),
    ):
        manifest.write_text(text)
        with pytest.raises(DatasetError, match=problem):
            open_dataset(tmp_path)


class StoreThatStutters(LocalStore):
    """Gives a few bytes, then fails for a moment; every time."""

    def get(self, name, offset=0, version=None):
        for chunk in super().get(name, offset, version):
            yield chunk[:700]
            raise TransientStoreError("reset by peer")


def test_ranges_are_read_through_failures(tmp_path):
    """A file of a store reads any range, as often as the store fails on the way, and sees no more than there is."""
    content = bytes(range(256)) * 20
    (tmp_path / "file").write_bytes(content)
    file = StoreFile(StoreThatStutters(tmp_path), "file", sleep=lambda _: None)

    file.seek(100)
    middle = file.read(3000)
    file.seek(-10, 2)
    end = file.read()

    assert (middle, end, file.read(5)) == (content[100:3100], content[-10:], b"")


@pytest.fixture(scope="module")
def _credentials():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", s3_servers.ACCESS_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", s3_servers.SECRET_KEY)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield


@pytest.fixture(scope="module")
def moto(_credentials):
    """A server that knows conditional puts."""
    with s3_servers.moto() as server:
        yield server


@pytest.fixture(scope="module")
def rclone(_credentials, tmp_path_factory):
    """A server that ignores If-None-Match."""
    with s3_servers.rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.mark.parametrize("server", ["moto", "rclone"])
def test_a_dataset_in_a_bucket(request, server, root, template):
    """Compaction, a second one, queries, series and SQL work over S3, by ranged reads, without any download beforehand."""
    uri = request.getfixturevalue(server).uri("datasets/one")
    runs = runs_of(root)

    first = compact(runs[:3], uri)
    second = compact(runs, uri)

    assert (first.runs, second.runs, second.added, second.unchanged) == (3, 4, 1, 3)
    with open_runs(uri) as dataset:
        assert_same_metrics(dataset, runs)
        best = dataset.query(where="hparams.optim.lr >= 0.05", sort_by="hparams.optim.lr")
        assert [run.hparams["optim.lr"] for run in best] == [0.1, 0.2, 1.0]
        assert dataset.files()[0].startswith("s3://bucket/datasets/one/metrics/")
    assert sql(uri, "SELECT count(*) FROM metrics").rows == ((second.points,),)
    assert latest_manifest(open_store(uri)).generation == 2
