"""Opens untrusted datasets and runs untrusted queries: nothing outside the dataset is read or written."""

import json
import os
import shutil

import pytest

pytest.importorskip("deltalake")

from destinations.runs import DatasetError, open_runs
from destinations.runs.dataset import compact, open_dataset
from destinations.runs.dataset.tables import Location, arrow_schema
from destinations.runs.dataset.writing import DatasetWriter
from tests.test_destinations.runs.folders import write_run

LINE = "1,1.0,0.5\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A dataset with two runs, and the runs."""
    place = tmp_path_factory.mktemp("made")
    for name in ("one", "two"):
        run = write_run(place / "runs" / name, hparams={"lr": 0.1}, summary={"loss": 0.5})
        (run / "metrics.csv").write_text(f"step,time,loss\n{LINE}")
    with open_runs(place / "runs", cache=place / "cache") as runs:
        compact(runs, place / "dataset")
    return place


@pytest.fixture
def dataset(made, tmp_path):
    """A copy of the dataset, beside a file of another table with a secret."""
    shutil.copytree(made / "dataset", tmp_path / "dataset")
    (file,) = (tmp_path / "dataset/metrics").rglob("*.parquet")
    (tmp_path / "secret").mkdir()
    shutil.copy(file, tmp_path / "secret/s.parquet")
    return tmp_path / "dataset"


def change_log(dataset, table, key, **changes):
    """Changes an action in the newest commit of a table."""
    log = max((dataset / table / "_delta_log").glob("*.json"))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if key in line and (key != "txn" or line[key]["appId"].endswith(".metrics")):
            line[key].update(changes)
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def files_of(folder):
    """Returns the content of all files below a folder."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("version", [10**12, 2, -5])
def test_missing_version_is_not_searched_for(dataset, version):
    """A commit of `runs` may name any version, and delta-rs would try every version up to it."""
    change_log(dataset, "runs", "txn", version=version)

    with pytest.raises(DatasetError, match=rf"metrics has no version {version}: the newest is 1"):
        open_dataset(dataset)


@pytest.mark.parametrize(
    "path",
    [
        "../../secret/s.parquet",
        "sub/../../../secret/s.parquet",
        "{outside}/secret/s.parquet",
        "file://{outside}/secret/s.parquet",
        "s3://bucket/s.parquet",
        "%2e%2e/%2e%2e/secret/s.parquet",
        "%252e%252e/%252e%252e/secret/s.parquet",
        "..%2F..%2Fsecret/s.parquet",
        "..",
    ],
)
def test_file_outside_a_table_is_not_read(dataset, path):
    """Neither a query nor a compaction reads it."""
    change_log(dataset, "metrics", "add", path=path.format(outside=dataset.parent))
    before = files_of(dataset.parent)

    with pytest.raises(DatasetError, match="which may be outside of it"):
        open_dataset(dataset)
    with pytest.raises(DatasetError, match="which may be outside of it"):
        compact([], dataset, optimize=True, vacuum_days=0)

    assert files_of(dataset.parent) == before


def _link_table(dataset):
    shutil.move(dataset / "metrics", dataset.parent / "outside")
    (dataset / "metrics").symlink_to(dataset.parent / "outside")


def _link_log(dataset):
    shutil.move(dataset / "metrics/_delta_log", dataset.parent / "outside")
    (dataset / "metrics/_delta_log").symlink_to(dataset.parent / "outside")


def _link_file(dataset):
    (file,) = (dataset / "metrics").rglob("*.parquet")
    file.unlink()
    file.symlink_to(dataset.parent / "secret/s.parquet")


def _link_folder(dataset):
    (dataset / "metrics/old").symlink_to(dataset.parent / "secret")


def _put_pipe(dataset):
    os.mkfifo(dataset / "runs/_delta_log/00000000000000000002.json")


@pytest.mark.parametrize("change", [_link_table, _link_log, _link_file, _link_folder, _put_pipe])
def test_link_or_pipe_in_a_dataset_is_refused(made, dataset, change):
    """The error comes before the tables are listed, because a vacuum would delete files behind a link."""
    change(dataset)
    before = files_of(dataset.parent)

    with pytest.raises(DatasetError, match=r"is a link|is no regular file"):
        open_dataset(dataset)
    with (
        open_runs(made / "runs", cache=dataset.parent / "cache") as runs,
        pytest.raises(DatasetError, match=r"is a link|is no regular file"),
    ):
        compact(runs, dataset, optimize=True, remove_gone=True, vacuum_days=0)

    after = {path: content for path, content in files_of(dataset.parent).items() if "cache" not in path.parts}
    assert after == before


def test_linked_dataset_is_read(dataset):
    """The user chooses the folder."""
    (dataset.parent / "link").symlink_to(dataset)

    with open_dataset(dataset.parent / "link") as opened:
        assert len(opened) == 2


@pytest.mark.parametrize("name", ["d%41", "a%2e%2e%2fdA"])
def test_path_misread_by_delta_is_refused(made, tmp_path, name):
    """delta-rs decodes `%41` to `A`, which may be another dataset."""
    shutil.copytree(made / "dataset", tmp_path / "dA")

    for place in (tmp_path / name, f"s3://bucket/{name}"):
        with pytest.raises(DatasetError, match=r"cannot contain '%"):
            open_dataset(place)
    with pytest.raises(DatasetError, match=r"cannot contain '%"):
        compact([], tmp_path / name)

    assert [path.name for path in tmp_path.iterdir()] == ["dA"]


@pytest.mark.parametrize(
    "query",
    [
        "COPY (SELECT 1) TO '{outside}/new.csv'",
        "COPY metrics TO '{file}' (FORMAT parquet)",
        "EXPLAIN ANALYZE COPY metrics TO '{file}' (FORMAT parquet)",
        "EXPLAIN /* */ (ANALYZE) COPY metrics TO '{file}'",
        "COPY (PIVOT metrics ON metric USING max(value)) TO '{file}' (FORMAT parquet)",
        "SELECT 1; COPY (SELECT 1) TO '{outside}/new.csv'",
        "PREPARE a AS COPY (SELECT 1) TO '{outside}/new.csv'",
        "EXPORT DATABASE '{outside}/new'",
        "ATTACH '{outside}/new.db'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "RESET allowed_paths",
        "PRAGMA enable_profiling",
        "CALL enable_logging(storage = 'file', storage_config = {{'path': '{outside}/new'}})",
        "CREATE OR REPLACE VIEW metrics AS SELECT 1",
        "CREATE PERSISTENT SECRET s (TYPE s3)",
        "DROP VIEW metrics",
        "BEGIN",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM '{outside}/secret/s.parquet'",
        "SELECT * FROM glob('/etc/*')",
        "SELECT * FROM read_csv('https://127.0.0.1:9/x.csv')",
        "SELECT * FROM read_parquet('s3://bucket/x.parquet')",
        "SELECT * FROM enable_logging(storage = 'file', storage_path = '{outside}/new')",
        "SELECT * FROM query('COPY (SELECT 1) TO ''{outside}/new.csv''')",
        "SELECT * FROM before",
    ],
)
def test_query_only_reads_the_dataset(dataset, query):
    """It can't write files, read other files, load or change anything. Later queries still work."""
    (file,) = (dataset / "metrics").rglob("*.parquet")
    before = files_of(dataset.parent)

    with open_dataset(dataset) as opened:
        with pytest.raises(DatasetError, match="query must"):
            opened.sql(query.format(outside=dataset.parent, file=file))
        assert opened.sql("SELECT count(*) FROM metrics").rows == ((2,),)

    assert files_of(dataset.parent) == before


@pytest.mark.parametrize(
    "query",
    [
        "FROM metrics",
        "WITH a AS (SELECT * FROM runs) SELECT run_id FROM a",
        "PIVOT metrics ON metric USING max(value)",
        "DESCRIBE metrics",
        "SUMMARIZE metrics",
        "SHOW TABLES",
        "EXPLAIN SELECT * FROM metrics",
        "SELECT 'copy' AS copy",
    ],
)
def test_all_reading_statements_work(dataset, query):
    """All of DuckDB's SQL that reads can be used."""
    with open_dataset(dataset) as opened:
        assert opened.sql(query).rows


RUN = {"run_id": "x", "path": "/x", "status": "completed", "kind": "run-directory"}


def write_rows(dataset, table, rows):
    """Writes rows to a table as a compaction does."""
    import pyarrow as pa

    work = DatasetWriter(Location.of(dataset, {}))

    def write():
        for name in dict.fromkeys((table, "runs")):
            found = pa.RecordBatch.from_pylist(rows if name == table else [], arrow_schema(name))
            work.write(name, [found])

    work.repeat(write)


@pytest.mark.parametrize(
    ("table", "row"),
    [
        ("runs", RUN | {"run_id": None}),
        ("runs", RUN | {"path": None}),
        ("runs", RUN | {"path": "a\0b"}),
        ("runs", RUN | {"path": ""}),
        ("runs", RUN | {"kind": None, "status": None}),
        ("runs", RUN | {"tags": [None, "a"]}),
        ("runs", RUN | {"created_at": float("nan"), "ended_at": float("inf"), "updated_at": 1e308}),
        ("hparams", {"run_id": "one", "name": "x", "type": "str", "json": "[" * 100_000}),
        ("hparams", {"run_id": "one", "name": "x", "type": "str", "json": "{"}),
        ("hparams", {"run_id": "one", "name": "x", "type": "str", "json": None}),
        ("hparams", {"run_id": "one", "name": "x", "type": "int", "json": "1" * 10_000}),
        ("hparams", {"run_id": "one", "name": "x", "type": "float", "json": '"x"'}),
        ("hparams", {"run_id": "one", "name": "x", "type": "float", "json": "[1]"}),
        ("hparams", {"run_id": "one", "name": "x", "type": "float", "json": "1" * 400}),
        ("hparams", {"run_id": "one", "name": None, "type": "int", "json": "1"}),
        ("summary", {"run_id": "one", "metric": None, "last": 1.0}),
        ("summary", {"run_id": "one", "metric": "loss", "count": -5, "min_step": -(2**63)}),
        ("metrics", {"metric": None, "run_id": None}),
    ],
)
def test_malformed_row_does_not_hide_the_others(dataset, table, row):
    """It is left out or shown as text; all other runs are read."""
    write_rows(dataset, table, [row])

    with open_dataset(dataset) as opened:
        found = opened.query(sort_by="run_id", descending=False)
        described = [(run.hparams, run.summary, run.metric_names()) for run in found]
        opened.to_dicts()
        opened.compare(found)
        opened.best("loss", is_max=True)

        assert {"one", "two"} <= {run.run_id for run in found}
        assert len(described) == len(found) <= 3
        assert opened["two"].hparams == {"lr": 0.1}
