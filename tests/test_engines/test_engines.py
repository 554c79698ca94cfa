"""Daft on Ray and Spark read a dataset and answer what DuckDB answers: `make test-engines`."""

import math

import pytest

pytest.importorskip(
    "daft", reason="Ray and Spark are large, and have an environment of their own: make test-engines"
)
pytest.importorskip("ray")
pytest.importorskip("pyspark")

import daft

from destinations.runs import open_runs
from destinations.runs.dataset import compact, open_dataset

# The engines warn of much that is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

RUNS, STEPS = 12, 200
# For each hyperparameter, the number of values of a metric, their minimum and mean.
QUERY = """
SELECT h.json AS width, count(*), min(value), avg(value)
FROM metrics m JOIN hparams h ON h.run_id = m.run_id AND h.name = 'width'
WHERE metric = 'loss' AND step >= 50 GROUP BY width ORDER BY width
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A dataset of runs with a hyperparameter, compacted twice and optimized once."""
    folder = tmp_path_factory.mktemp("engines")
    for number in range(RUNS):
        run_dir = folder / "runs" / f"run{number}"
        run_dir.mkdir(parents=True)
        rows = [f"{step},{math.sin(number + step)!r},{step * number}" for step in range(STEPS)]
        (run_dir / "metrics.csv").write_text("\n".join(["step,loss,seen", *rows]) + "\n")
        (run_dir / "sidecar.json").write_text(
            f'{{"run_id": "id-{number}", "status": "completed", "format_version": 1, '
            f'"hparams": {{"width": {64 << number % 3}}}, "summary": {{}}}}'
        )
        if number % 6 == 5:
            with open_runs(folder / "runs", cache=folder / "cache") as runs:
                compact(runs, folder / "data", optimize=number == RUNS - 1)
    return folder / "data"


@pytest.fixture(scope="module")
def dataset(place):
    """The dataset, open."""
    with open_dataset(place) as dataset:
        yield dataset


def assert_same(found, dataset):
    """The answer is DuckDB's; means are added up in another order."""
    wanted = dataset.sql(QUERY).rows
    assert len(wanted) == 3
    assert [row[:3] for row in found] == [row[:3] for row in wanted]
    assert [row[3] for row in found] == pytest.approx([row[3] for row in wanted], rel=1e-12)


def test_daft_on_a_ray_cluster(place, dataset):
    """Daft reads the Delta tables, on the workers of a local Ray cluster."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        daft.set_runner_ray()
        metrics = daft.read_deltalake(str(place / "metrics"), version=dataset.versions["metrics"])
        hparams = daft.read_deltalake(str(place / "hparams"), version=dataset.versions["hparams"])
        widths = hparams.where(daft.col("name") == "width").select("run_id", daft.col("json").alias("width"))
        losses = metrics.where((daft.col("metric") == "loss") & (daft.col("step") >= 50))
        value = daft.col("value")
        found = (
            losses.join(widths, on="run_id")
            .groupby("width")
            .agg(value.count().alias("count"), value.min().alias("min"), value.mean().alias("mean"))
            .sort("width")
            .to_pydict()
        )
    finally:
        ray.shutdown()

    assert_same(list(zip(*found.values(), strict=True)), dataset)


def test_spark(dataset):
    """Spark reads the Parquet files that the tables name, without the jars of Delta Lake."""
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    try:
        for name in ("metrics", "hparams"):
            spark.read.parquet(*dataset.files(name)).createOrReplaceTempView(name)
        found = [tuple(row) for row in spark.sql(QUERY).collect()]
    finally:
        spark.stop()

    assert_same(found, dataset)
