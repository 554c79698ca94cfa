"""Trackio, in its own process, because it reads its folder at import."""

import contextlib
import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from destinations import Trackio

ROOT = Path(__file__).parents[3]

# One process for all tests.
pytestmark = pytest.mark.xdist_group("trackio")

needs_trackio = pytest.mark.skipif(
    importlib.util.find_spec("trackio") is None, reason="the package trackio is not installed"
)

EVERYTHING = """
    import sys
    import types
    import numpy as np
    from destinations import Trackio
    from events import Run

    trackio = Trackio("project", close_seconds=300)
    with Run(trackio, run_name="mine") as run:
        run.log_hyperparameters({"lr": 0.1, "_private": {"a": 1}})
        for loss in (1.0, float("nan")):
            run.batch_start()
            run.log_metrics({"loss": loss, "count": 2**60})
            run.batch_end()
        run.log_images(np.zeros((2, 3, 8, 8)), "images", masks={"mask": np.ones((2, 8, 8), int)},
            captions=["a cat", "a dog"])
        run.log_audio(np.zeros(100), 8000, "sound", caption="a beep")
        run.log_video(np.zeros((4, 3, 16, 16)), 4, "video")
        run.log_text("hello", "text")
        run.log_table(["a", "b"], [[1, "x"]], "table")
        run.log_histogram([1.0, 2.0, 3.0], "histogram", bins=2)
        run.log_point_cloud(np.ones((4, 3)), "points", colors=np.ones((4, 3)))
        run.log_traces({"prompt": "why"})
        run.log_hyperparameters({"late": 1})
        assert trackio._feed.flush(300)
        counts = trackio.counts
    assert (counts.written_rows, counts.written_records) == (2, counts.records), counts

    class Importing(types.ModuleType):
        # A module that another thread imports: its class is there at the third look.
        looks = 0

        def __getattr__(self, name):
            self.looks += 1
            if name != "BaseFigure" or self.looks < 3:
                raise AttributeError(name)
            return complex

    sys.modules["plotly.basedatatypes"] = Importing("plotly.basedatatypes")
    with Run(Trackio("project", close_seconds=300), run_name="mine") as run:
        run.log_metrics({"loss": 0.5}, step=7)
"""


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Runs a script that logs every kind of record; returns Trackio's rows, configurations and files."""
    folder = tmp_path_factory.mktemp("trackio")
    outcome = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(EVERYTHING)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRACKIO_DIR": str(folder), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    with contextlib.closing(sqlite3.connect(folder / "project.db")) as database:
        metrics = [
            (run, step, json.loads(values))
            for run, step, values in database.execute(
                "select run_name, step, metrics from metrics order by id"
            )
        ]
        configs = [json.loads(config) for (config,) in database.execute("select config from configs")]
    return metrics, configs, sorted(path.suffix for path in folder.glob("media/project/mine/*/*"))


@needs_trackio
def test_metrics_have_their_steps_and_a_resumed_run_continues(logged):
    """NaN is there, large integers keep their digits, and there is one run."""
    metrics, _, _ = logged

    assert [(step, values) for _, step, values in metrics if "loss" in values] == [
        (0, {"loss": 1.0, "count": 2**60}),
        (1, {"loss": "NaN", "count": 2**60}),
        (7, {"loss": 0.5}),
    ]
    assert {run for run, _, _ in metrics} == {"mine"}


@needs_trackio
def test_hyperparameters_are_the_configuration(logged):
    """Late ones are a text; names that Trackio reserves get a prefix."""
    metrics, configs, _ = logged

    assert configs[0]["lr"] == 0.1
    assert configs[0]["+_private"] == {"a": 1}
    [late] = [values["hyperparameters"] for _, _, values in metrics if "hyperparameters" in values]
    assert '"late": 1' in late["_value"]


@needs_trackio
def test_every_kind_of_record_arrives(logged):
    """Each has the matching Trackio type; several images are numbered, masks are overlaid."""
    metrics, _, suffixes = logged

    types = {
        name: value["_type"] for _, step, values in metrics if step == 2 for name, value in values.items()
    }
    assert types == {
        "images/0": "trackio.image",
        "images/1": "trackio.image",
        "images/mask/0": "trackio.image",
        "images/mask/1": "trackio.image",
        "sound": "trackio.audio",
        "video": "trackio.video",
        "text": "trackio.markdown",
        "table": "trackio.table",
        "histogram": "trackio.histogram",
        "points": "trackio.object3d",
        "traces": "trackio.markdown",
        "hyperparameters": "trackio.markdown",
    }
    captions = {
        name: value.get("caption")
        for _, step, values in metrics
        if step == 2
        for name, value in values.items()
        if isinstance(value, dict)
    }
    assert (captions["images/0"], captions["images/1"]) == ("a cat", "a dog")
    assert (captions["sound"], captions["video"]) == ("a beep", None)
    assert suffixes == [".mp4", ".ply", ".png", ".png", ".png", ".png", ".wav"]


SENDING = """
    import sys
    from pathlib import Path
    from destinations import RunDirectory
    from destinations.runs import Run as FolderRun
    from destinations.runs.send import send
    from events import Run

    folder = Path(sys.argv[1])
    for steps in (range(3), range(3, 5)):
        with Run(RunDirectory(folder / "run", run_id="abc", if_exists="resume"), run_name="run") as run:
            run.log_hyperparameters({"lr": 0.1})
            for step in steps:
                run.log_metrics({"loss": step / 2}, step=step)
        for again in (False, False, True):
            report = send(FolderRun.open(folder / "run"), "trackio:project", cache=folder / "cache", again=again)
            print(report.rows, report.failures)
"""


@needs_trackio
def test_a_run_folder_is_sent(tmp_path):
    """New records are sent once; `again` replaces the earlier ones."""
    outcome = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SENDING), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRACKIO_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert outcome.returncode == 0, outcome.stderr
    counts = [line for line in outcome.stdout.splitlines() if line.endswith("[]")]
    assert counts == ["3 []", "0 []", "3 []", "2 []", "0 []", "5 []"]
    with contextlib.closing(sqlite3.connect(tmp_path / "project.db")) as database:
        rows = [
            (name, step, json.loads(values))
            for name, step, values in database.execute(
                "select run_name, step, metrics from metrics order by id"
            )
        ]
    assert [(step, values) for _, step, values in rows if "loss" in values] == [
        (step, {"loss": step / 2}) for step in range(5)
    ]
    (name,) = {name for name, _, _ in rows}
    assert name.startswith("run-")


def test_an_unknown_resume_mode_raises():
    """The constructor raises."""
    with pytest.raises(ValueError, match='resume must be "never"'):
        Trackio("project", resume="always")
