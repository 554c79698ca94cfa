"""Tests that DuckDB, Polars, Daft on Ray and Spark give equal answers from a dataset: `make test-engines`.

Daft, Ray and Spark are large and have an environment of their own; without it, their tests are skipped.
"""

import itertools
import math
from collections import defaultdict

import pytest

pytest.importorskip("deltalake")

from destinations.runs import open_runs
from destinations.runs.dataset import compact, open_dataset

# The engines warn about their own code.
pytestmark = pytest.mark.filterwarnings("ignore")

RUNS, STEPS, LATE_RUN, LATE_STEP, DELETED = 12, 200, 6, 150, 4
TABLES = ("runs", "metrics", "hparams")
# SQL that every engine understands; Spark quotes names differently.
QUESTIONS = {
    "best of each group": """
        SELECT "hparams.width" AS width, MIN("min.loss") AS best FROM runs
        GROUP BY "hparams.width" ORDER BY width""",
    "mean curve over seeds": """
        SELECT metrics.step AS step, AVG(metrics.value) AS mean
        FROM metrics JOIN runs ON metrics.run_id = runs.run_id
        WHERE metrics.metric = 'loss' AND runs."hparams.width" = 64 GROUP BY metrics.step ORDER BY step""",
    "runs without a metric": """
        SELECT runs.run_id AS run_id FROM runs LEFT JOIN
        (SELECT DISTINCT run_id AS late_id FROM metrics WHERE metric = 'late') AS found
        ON runs.run_id = found.late_id WHERE found.late_id IS NULL ORDER BY run_id""",
    "percentile": """
        SELECT value FROM
        (SELECT value, ROW_NUMBER() OVER (ORDER BY value) AS place FROM metrics WHERE metric = 'loss') AS sorted
        WHERE place = 1980""",
    "a metric that came late": """
        SELECT metrics.run_id AS run_id, MIN(metrics.step) AS first, MAX(runs."summary.late") AS last
        FROM metrics JOIN runs ON metrics.run_id = runs.run_id
        WHERE metrics.metric = 'late' GROUP BY metrics.run_id ORDER BY run_id""",
    "what is left of a deleted run": """
        SELECT COUNT(*) AS count, MIN(step) AS least FROM metrics WHERE run_id = 'id-04'""",
}


def id_of(number):
    """Returns the id of a run; ids sort like their numbers."""
    return f"id-{number:02}"


def loss(number, step):
    """Returns the loss of a run; all are different."""
    return math.sin(number + step / 7) + number / 1000


def width(number):
    """Returns the hyperparameter of a run."""
    return 64 << number % 3


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A dataset that was compacted twice and had one run deleted."""
    folder = tmp_path_factory.mktemp("engines")
    for number in range(RUNS):
        run_dir = folder / "runs" / f"run{number}"
        run_dir.mkdir(parents=True)
        has_late = number >= LATE_RUN
        rows = []
        for step in range(STEPS):
            late = f",{step}" if has_late and step >= LATE_STEP else "," * has_late
            rows.append(f"{step},{loss(number, step)!r}{late}")
        (run_dir / "metrics.csv").write_text("\n".join(["step,loss" + ",late" * has_late, *rows]) + "\n")
        (run_dir / "sidecar.json").write_text(
            f'{{"run_id": "{id_of(number)}", "status": "completed", "format_version": 1, '
            f'"hparams": {{"width": {width(number)}}}, "summary": {{}}}}'
        )
        if number + 1 in {LATE_RUN, RUNS}:
            with open_runs(folder / "runs", cache=folder / "cache") as runs:
                compact(runs, folder / "data", optimize=number + 1 == RUNS)
    with open_dataset(folder / "data") as dataset:
        dataset.delete([id_of(DELETED)])
    return folder / "data"


@pytest.fixture(scope="module")
def answers():
    """The expected answer to each question, from plain lists."""
    there = [number for number in range(RUNS) if number != DELETED]
    best = defaultdict(list)
    for number in there:
        best[width(number)] += [loss(number, step) for step in range(STEPS)]
    seeds = [number for number in there if width(number) == 64]
    every = sorted(loss(number, step) for number in there for step in range(STEPS))
    return {
        "best of each group": [(float(one), min(best[one])) for one in sorted(best)],
        "mean curve over seeds": [
            (step, sum(loss(number, step) for number in seeds) / len(seeds)) for step in range(STEPS)
        ],
        "runs without a metric": [(id_of(number),) for number in there if number < LATE_RUN],
        "percentile": [(every[math.ceil(0.9 * len(every)) - 1],)],
        "a metric that came late": [
            (id_of(number), LATE_STEP, float(STEPS - 1)) for number in there if number >= LATE_RUN
        ],
        "what is left of a deleted run": [(0, None)],
    }


def assert_equal(found, answers):
    """Asserts that answers are equal, up to the order in which means are summed."""
    assert found.keys() == answers.keys()
    for question, wanted in answers.items():
        rows = [tuple(row) for row in found[question]]
        assert len(rows) == len(wanted), question
        for cell, expected in zip(itertools.chain(*rows), itertools.chain(*wanted), strict=True):
            is_same = (
                math.isclose(cell, expected, rel_tol=1e-12)
                if isinstance(expected, float)
                else cell == expected
            )
            assert is_same, (question, cell, expected)


def test_duckdb(place, answers):
    """DuckDB reads the files of the version that is open."""
    with open_dataset(place) as dataset:
        assert_equal({name: dataset.sql(query).rows for name, query in QUESTIONS.items()}, answers)


def versions_of(place):
    """Returns the versions of the tables that belong together."""
    with open_dataset(place) as dataset:
        return dataset.versions


def test_polars(place, answers):
    """Polars reads the tables as Delta Lake."""
    polars = pytest.importorskip("polars")
    versions = versions_of(place)
    tables = {name: polars.scan_delta(str(place / name), version=versions[name]) for name in TABLES}
    context = polars.SQLContext(tables, eager=True)

    assert_equal({name: context.execute(query).rows() for name, query in QUESTIONS.items()}, answers)


def test_daft_on_a_ray_cluster(place, answers, monkeypatch):
    """Daft reads the tables as Delta Lake, on the workers of a local Ray cluster."""
    daft, ray = pytest.importorskip("daft"), pytest.importorskip("ray")
    versions = versions_of(place)
    # A cluster takes a minute to start beside other work, and gives up after half of that.
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "180")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        daft.set_runner_ray()
        tables = {name: daft.read_deltalake(str(place / name), version=versions[name]) for name in TABLES}
        found = {name: daft.sql(query, **tables).to_pydict() for name, query in QUESTIONS.items()}
    finally:
        ray.shutdown()

    assert_equal({name: list(zip(*one.values(), strict=True)) for name, one in found.items()}, answers)


def test_spark(place, answers):
    """Spark reads the Parquet files that the tables name, without the jars of Delta Lake."""
    pytest.importorskip("pyspark")
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
        with open_dataset(place) as dataset:
            for name in TABLES:
                files = spark.read.option("mergeSchema", "true").parquet(*dataset.files(name))
                files.createOrReplaceTempView(name)
        found = {name: spark.sql(query.replace('"', "`")).collect() for name, query in QUESTIONS.items()}
    finally:
        spark.stop()

    assert_equal(found, answers)
