"""Imports what our trackers wrote, and compares it with what was logged."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from destinations.run_directory import read_rows
from destinations.runs import open_runs
from destinations.runs.imports import import_runs
from tests.effort import IS_EXHAUSTIVE, times

PACKAGES = ("tensorboard", "wandb", "mlflow", "trackio", "comet_ml")
# One process for all of them.
pytestmark = [
    pytest.mark.xdist_group("round-trip"),
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, PACKAGES)), reason="needs the packages of all trackers"
    ),
]
ROOT = Path(__file__).parents[4]

STEPS = st.integers(0, 10**6)
NUMBERS = st.floats(width=32)
NAMES = st.sampled_from(["loss", "val/acc", "a b", "lr.x-1", "global_step", "loss@x"])
TEXTS = st.text("aé漢 \t\n<&>`|*#_-'\"{}", max_size=40)
PICTURES = st.integers(0, 2**32 - 1).map(
    lambda seed: np.random.default_rng(seed).integers(0, 256, (1 + seed % 2, 4, 5, 3)).tolist()
)
VALUES = (
    st.integers(-(2**40), 2**40)
    | st.floats(-1e9, 1e9)
    | st.booleans()
    | st.sampled_from(["adam", "0.1", "é"])
)
HPARAMS = st.dictionaries(
    st.sampled_from(["lr", "depth", "name"]),
    VALUES | st.dictionaries(st.sampled_from(["wd", "b"]), VALUES, min_size=1),
)


def _records(names, values):
    """A list of (step, name, value), each name once at a step."""
    one = st.tuples(STEPS, st.sampled_from(names), values)
    return st.lists(one, max_size=2, unique_by=lambda record: record[:2])


RUNS = st.fixed_dictionaries(
    {
        "hyperparameters": HPARAMS,
        "rows": st.lists(
            st.tuples(STEPS, st.dictionaries(NAMES, NUMBERS, min_size=1)),
            min_size=1,
            max_size=4,
            unique_by=lambda row: row[0],
        ),
        "texts": _records(["note", "val/note"], TEXTS),
        "pictures": _records(["pictures", "val/picture"], PICTURES),
        "status": st.sampled_from(["completed", "failed", "interrupted", "stopped"]),
        "tags": st.sampled_from([[], ["vit", "size:1,2"]]),
    }
)


@attrs.frozen
class Trip:
    """What a tracker can't keep."""

    place: str
    statuses: dict[str, str]
    has_tags: bool = True
    has_infinity: bool = True
    has_several_pictures: bool = False


SAME = {"completed": "completed", "failed": "failed", "interrupted": "interrupted", "stopped": "completed"}
TRIPS = {
    "tensorboard": Trip(
        "tensorboard", {**SAME, "interrupted": "failed"}, has_tags=False, has_several_pictures=True
    ),
    "wandb": Trip("wandb", SAME, has_several_pictures=True),
    "mlflow": Trip("mlflow.db", SAME, has_infinity=False),
    "trackio": Trip("trackio", dict.fromkeys(SAME, "preempted"), has_tags=False),
    "comet": Trip("comet", {**SAME, "stopped": "stopped"}),
}


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """The folder, the random runs that were logged there, and their ids."""
    folder, runs = tmp_path_factory.mktemp("logged"), []

    @settings(
        max_examples=times(4, 60),
        phases=[Phase.generate],
        derandomize=not IS_EXHAUSTIVE,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(RUNS)
    def draw(run):
        runs.append({**run, "name": f"run-{len(runs)}"})

    draw()
    (folder / "runs.json").write_text(json.dumps(runs))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "TRACKIO_DIR": str(folder / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    outcome = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("round_trip_child.py")), str(folder)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    return folder, runs, json.loads((folder / "ids.json").read_text())


@pytest.mark.parametrize("source", TRIPS)
def test_imported_runs_equal_the_logged_runs(logged, tmp_path, source):
    """Names, steps, values, texts, pictures, hyperparameters, tags, status and id are equal."""
    folder, drawn, ids = logged
    trip = TRIPS[source]

    report = import_runs(folder / trip.place, tmp_path / "runs")

    assert (report.runs, report.failures, dict(report.left_out)) == (len(drawn), [], {})
    with open_runs(tmp_path / "runs") as runs:
        found = {run.name: _content(run) for run in runs}
        wanted = {run["name"]: _expected(run, trip) for run in drawn}
        for name, content in wanted.items():
            assert found[name] == content
        for one, its_ids in zip(drawn, ids, strict=True):
            assert runs[one["name"]].run_id == its_ids.get(source, runs[one["name"]].run_id)
        assert len({run.run_id for run in runs}) == len(drawn)


def _content(run):
    """Returns the content of a run, without what a tracker adds."""
    return {
        "rows": {
            row.step: {name: _comparable(value) for name, value in row.metrics.items()}
            for row in read_rows(run.path)
        },
        "texts": {(text.step, text.name): text.text for text in run.texts()},
        "pictures": sorted(
            (image.step, image.name, image.array()[..., :3].tolist()) for image in run.images()
        ),
        "hyperparameters": dict(run.record.hparams),
        "status": run.status,
        "tags": sorted(run.record.tags),
    }


def _expected(run, trip):
    """Returns the expected content of a run that went through a tracker."""
    largest = np.inf if trip.has_infinity else np.finfo(float).max
    flat = {}
    for name, value in run["hyperparameters"].items():
        flat |= (
            {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
        )
    pictures = [
        (step, name if trip.has_several_pictures or len(pixels) == 1 else f"{name}/{index}", one)
        for step, name, pixels in run["pictures"]
        for index, one in enumerate(pixels)
    ]
    return {
        "rows": {
            step: {
                name: _comparable(float(np.clip(value, -largest, largest))) for name, value in metrics.items()
            }
            for step, metrics in run["rows"]
        },
        "texts": {(step, name): text for step, name, text in run["texts"]},
        "pictures": sorted(pictures),
        "hyperparameters": flat,
        "status": trip.statuses[run["status"]],
        "tags": sorted(run["tags"]) if trip.has_tags else [],
    }


def _comparable(value):
    return "nan" if np.isnan(value) else value
