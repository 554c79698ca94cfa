"""Imports runs and charts of W&B, and compares them with W&B's own reader."""

import base64
import hashlib
import json
import subprocess
import sys
import textwrap
import wave
from collections import Counter

import numpy as np
import pandas as pd
import PIL.Image
import pytest

from destinations.run_directory import read_rows
from destinations.runs import Run
from destinations.runs.imports import import_runs
from destinations.runs.imports.wandb import WANDB
from tests.test_destinations.runs.imports.wandb_logs import artifact, history, log_bytes, metric

PROGRAM = """
import wave
import numpy as np, wandb
with wave.open("tone.wav", "wb") as file:
    file.setnchannels(1)
    file.setsampwidth(2)
    file.setframerate(8000)
    file.writeframes(np.arange(100, dtype="<i2").tobytes())
settings = wandb.Settings(silent=True, x_disable_stats=True, console="off")
run = wandb.init(project="digits", name="The first", config={"lr": 0.1, "net": {"depth": 3}}, tags=["a"],
                 notes="a note", settings=settings)
for step in range(3):
    run.log({"loss": 1 / (step + 1), "nested": {"x": step / 7}})
images = [wandb.Image(np.full((4, 5, 3), shade, np.uint8), caption=f"shade {shade}",
                      masks={"truth": {"mask_data": np.eye(4, 5, dtype=np.uint8), "class_labels": {1: "line"}}})
          for shade in (10, 20)]
run.log({"image": images[0], "images": images, "sound": wandb.Audio("tone.wav", caption="low"),
         "histogram": wandb.Histogram(np_histogram=([1, 2], [0.0, 0.5, 1.0])), "text": "hello",
         "table": wandb.Table(columns=["a", "b"], data=[[1, "x"], [2, None]]),
         "points": wandb.Object3D(np.arange(9.0).reshape(3, 3)), "html": wandb.Html("<b>x</b>", inject=False),
         "nan": float("nan"), "list": [1, 2]}, step=7)
run.tags += ("later",)
run.config.update({"added": 1})
run.summary["best"] = 0.5
run.finish()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which W&B logged a run offline, in a separate process."""
    folder = tmp_path_factory.mktemp("wandb")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("DATA", "CACHE", "CONFIG"):
            patch.setenv(f"WANDB_{name}_DIR", str(folder / name))
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        subprocess.run([sys.executable, "-c", textwrap.dedent(PROGRAM)], cwd=folder, check=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def log(folder):
    """The log of the run."""
    (log,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    return log


@pytest.fixture(scope="module")
def records(log):
    """What W&B's own reader finds."""
    from wandb.util import get_core_path

    command = [get_core_path(), "leet", "inspect", "-json", "-no-observability", "-run-file", str(log)]
    done = subprocess.run(command, check=True, capture_output=True, timeout=300)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def imported(folder, tmp_path_factory):
    """The root, and the report."""
    root = tmp_path_factory.mktemp("imported")
    return root, import_runs(folder / "wandb", root)


@pytest.fixture(scope="module")
def run(imported):
    """The run."""
    return Run.open(imported[0] / "The first")


def test_imported_run_has_the_facts_of_its_log(run, imported, records):
    """The last tags and config count; what a run folder can't hold is counted."""
    (begun,) = {record["run"]["start_time"] for record in records if record["type"] == "run"}
    (run_id,) = {record["run"]["run_id"] for record in records if record["type"] == "run"}

    assert (run.run_id, run.status, run.record.tags, run.record.notes) == (
        run_id,
        "completed",
        ("a", "later"),
        "a note",
    )
    assert run.created_at == pd.Timestamp(begun).timestamp()
    assert run.hyperparameters == {"lr": 0.1, "net": {"depth": 3}, "added": 1}
    assert run.environment["imported"]["project"] == "digits"
    assert imported[1].failures == []
    assert dict(imported[1].left_out) == {"lists": 1}


def test_rows_equal_the_history(run, records):
    """Every number has its step and time; values that only the summary has come last."""
    history = [record["history"]["item"] for record in records if record["type"] == "history"]
    theirs = [(item["_step"], item["_timestamp"], item["loss"], item["nested.x"]) for item in history[:3]]

    rows = list(read_rows(run.path))

    assert [(row.step, row.metrics["loss"], row.metrics["nested.x"]) for row in rows[:3]] == [
        (step, loss, x) for step, _, loss, x in theirs
    ]
    np.testing.assert_allclose([row.time for row in rows[:3]], [time for _, time, *_ in theirs], atol=1e-6)
    assert rows[3].step == 7
    assert np.isnan(rows[3].metrics["nan"])
    assert rows[-1].metrics["best"] == 0.5


def test_media_equal_the_files_of_the_run(run, log):
    """Every pixel and sample is there, with masks, labels and captions."""
    files = log.parent / "files/media"
    single, several = run.images("image"), run.images("images")

    assert [image.caption for image in single + several] == ["shade 10", "shade 10", "shade 20"]
    assert [image.step for image in single + several] == [7, 7, 7]
    theirs = {
        path.name.split("_")[0]: np.array(PIL.Image.open(path)) for path in (files / "images").glob("image_*")
    }
    np.testing.assert_array_equal(single[0].array(), theirs["image"])
    np.testing.assert_array_equal(several[1].array(), np.full((4, 5, 3), 20))
    np.testing.assert_array_equal(single[0].masks["truth"].load(), np.eye(4, 5))
    assert several[0].class_labels == {1: "line"}
    (sound,) = run.audio("sound")
    with wave.open(str(next((files / "audio").iterdir()))) as file:
        samples = np.frombuffer(file.readframes(100), "<i2")
    np.testing.assert_array_equal(sound.load()[0][:, 0], samples)
    assert (sound.caption, sound.sample_rate) == ("low", 8000)


def test_other_records_equal_the_logged_ones(run, log):
    """Tables, histograms, points and texts are there; other media are kept as files."""
    table, (histogram,), (text,) = run.table("table"), run.histograms("histogram"), run.texts("text")
    html = next((log.parent / "files/media/html").iterdir())

    assert (table.columns, table.rows) == (("a", "b"), ((1, "x"), (2, "")))
    assert (histogram.counts.tolist(), histogram.edges.tolist()) == ([1, 2], [0.0, 0.5, 1.0])
    assert (text.text, text.step) == ("hello", 7)
    np.testing.assert_array_equal(run.point_clouds("points")[0].load()[0], np.arange(9.0).reshape(3, 3))
    kept = {artifact.name: artifact.path.read_bytes() for artifact in run.artifacts()}
    assert kept[f"media/html/{html.name}"] == html.read_bytes()


def test_truncated_log_is_read_up_to_its_end(log, tmp_path):
    """A run that did not end is preempted; a log without readable records is a failure."""
    for name, data in (("offline-run-1-cut", log.read_bytes()[:2000]), ("offline-run-2-bad", b"not so")):
        (tmp_path / f"wandb/{name}").mkdir(parents=True)
        (tmp_path / f"wandb/{name}/run-{name[-3:]}.wandb").write_bytes(data)

    report = import_runs(tmp_path / "wandb", tmp_path / "runs")
    (folder,) = (path for path in (tmp_path / "runs").iterdir())

    assert Run.open(folder).status == "preempted"
    assert Run.open(folder).run_id == "cut"
    assert (report.runs, report.failure_count) == (1, 2)
    cut, bad = report.failures
    assert cut.startswith("cut: ")
    assert cut.endswith("of 2000 bytes are damaged or cut off, and could not be read")
    assert bad.startswith("bad: there is no run of W&B in ")


def test_resumed_run_is_one_run(log, tmp_path):
    """Its logs are read in the order of their folders, whose names have the time."""
    for name in ("run-20250102_000000", "offline-run-20250101_000000"):
        folder = tmp_path / f"wandb/{name}-{log.stem.removeprefix('run-')}"
        folder.mkdir(parents=True)
        (folder / log.name).write_bytes(log.read_bytes())

    report = import_runs(tmp_path / "wandb", tmp_path / "runs")

    (folder,) = (tmp_path / "runs").iterdir()
    steps = [row.step for row in read_rows(folder)]
    assert (report.runs, steps) == (1, [0, 1, 2, 7, 0, 1, 2, 7])


def read(folder, *records):
    """Returns the records that are read from a log, and the run."""
    (folder / "run-mine.wandb").write_bytes(log_bytes(records))
    (run,) = WANDB.runs(str(folder), {})
    run.facts(run)
    return list(run.read(run)), run


def test_file_added_later_is_imported(tmp_path):
    """Files beside the log belong to the run."""
    folder = tmp_path / "wandb/run-20250101_000000-mine"
    (folder / "files").mkdir(parents=True)
    (folder / "run-mine.wandb").write_bytes(log_bytes([history(_step=0, loss=0.5)]))
    first, again = (import_runs(tmp_path / "wandb", tmp_path / "runs") for _ in range(2))
    (folder / "files/notes.txt").write_text("later")

    more = import_runs(tmp_path / "wandb", tmp_path / "runs")

    assert (first.runs, again.unchanged, more.runs, dict(more.records)) == (1, 1, 1, {"artifact": 1})


def test_path_out_of_the_folder_is_not_followed(tmp_path):
    """The record is counted as unreadable."""
    (tmp_path / "run").mkdir()
    PIL.Image.new("RGB", (2, 2)).save(tmp_path / "secret.png")
    medium = {"_type": "image-file", "path": "../../secret.png"}

    found, run = read(tmp_path / "run", history(_step=0, x=medium, loss=0.5))

    assert [item.metrics for item in found] == [{"loss": 0.5}, {}]
    assert run.lost == Counter({"unreadable image-file": 1})


def test_linked_folder_of_files_is_not_followed(tmp_path):
    """Neither media nor other files are read through it."""
    (tmp_path / "private").mkdir()
    PIL.Image.new("RGB", (2, 2)).save(tmp_path / "private/secret.png")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/files").symlink_to(tmp_path / "private")

    found, run = read(
        tmp_path / "run", history(_step=0, x={"_type": "image-file", "path": "secret.png"}, loss=0.5)
    )

    assert [item.metrics for item in found] == [{"loss": 0.5}, {}]
    assert (dict(run.lost), dict(run.left_out)) == ({"unreadable image-file": 1}, {"links": 1})


def test_file_that_wandb_keeps_elsewhere_is_read_if_its_digest_matches(tmp_path):
    """An untrusted log may name any file of this machine, but does not know its digest."""
    picture, folder = tmp_path / "picture.png", tmp_path / "run"
    folder.mkdir()
    PIL.Image.new("RGB", (2, 2)).save(picture)
    name = "media/images/a.png"

    def found(digest, local=picture):
        staged = artifact(path=name, local_path=str(local), digest=digest)
        items, run = read(folder, staged, history(_step=0, x={"_type": "image-file", "path": name}))
        pictures = [item.arguments["images"] for item in items if not hasattr(item, "metrics")]
        return pictures, dict(run.lost), dict(run.left_out)

    digest = base64.b64encode(hashlib.md5(picture.read_bytes(), usedforsecurity=False).digest()).decode()
    assert found(digest) == ([[picture]], {}, {})
    assert [found(wrong) for wrong in ("", digest[::-1])] == [([], {"unreadable image-file": 1}, {})] * 2
    elsewhere = {"files of tables, which W&B keeps elsewhere": 1}
    assert found(digest, tmp_path / "gone") == ([], {"unreadable image-file": 1}, elsewhere)


STAR = {"glob_name": "*", "step_metric": "trainer/global_step"}
VAL = {"glob_name": "val/*", "step_metric": "epoch"}
STAND_IN = "x values that are not steps, replaced by W&B's own step"


@pytest.mark.parametrize(
    ("metrics", "rows", "found", "left_out"),
    [
        # Lightning's logger: the axis only serves the other metrics.
        ([STAR], [{"loss": 0.5, "trainer/global_step": 49}], [(49, {"loss": 0.5})], {}),
        ([STAR], [{"trainer/global_step": 49}], [(49, {"trainer/global_step": 49})], {}),
        # A name comes before patterns, and the most specific pattern before the others.
        (
            [STAR, VAL, {"name": "val/x", "step_metric": "own"}],
            [{"loss": 0.5, "val/y": 1, "val/x": 2, "trainer/global_step": 49, "epoch": 3, "own": 7}],
            [(49, {"loss": 0.5, "epoch": 3, "own": 7}), (3, {"val/y": 1}), (7, {"val/x": 2})],
            {},
        ),
        # A definition without an axis, which only configures the summary.
        ([STAR, {"name": "acc"}], [{"acc": 1, "trainer/global_step": 5}], [(5, {"acc": 1})], {}),
        # The axis was logged in an earlier row, goes back, is fractional, or was never logged.
        ([VAL], [{"epoch": 3}, {"val/y": 1}], [(3, {"epoch": 3}), (3, {"val/y": 1})], {}),
        (
            [VAL],
            [{"epoch": 3, "val/y": 1}, {"epoch": 2, "val/y": 0}],
            [(3, {"val/y": 1}), (2, {"val/y": 0})],
            {},
        ),
        ([VAL], [{"epoch": 0.5, "val/y": 1}], [(0, {"epoch": 0.5, "val/y": 1})], {STAND_IN: 1}),
        ([VAL], [{"epoch": -1, "val/y": 1}], [(0, {"epoch": -1, "val/y": 1})], {STAND_IN: 1}),
        ([VAL], [{"val/y": 1}], [(0, {"val/y": 1})], {STAND_IN: 1}),
        ([], [{"loss": 1, "global_step": 7}], [(0, {"loss": 1, "global_step": 7})], {}),
        # Beyond 2^53, where floats have gaps.
        ([STAR], [{"n": 2**53 + 1, "trainer/global_step": 2**53 + 1}], [(2**53 + 1, {"n": 2**53 + 1})], {}),
    ],
)
def test_values_have_the_axis_that_define_metric_sets(tmp_path, metrics, rows, found, left_out):
    """Without one, they have W&B's own step."""
    logged = [history(_step=number, **row) for number, row in enumerate(rows)]

    items, run = read(tmp_path, *logged, *(metric(**one) for one in metrics))

    read_back = [(item.step, dict(item.metrics)) for item in items if item.metrics]
    assert sorted(read_back, key=str) == sorted(found, key=str)
    assert run.left_out == Counter(left_out)


@pytest.mark.parametrize("axis", ["Step", "trainer/global_step", "epoch"])
def test_downloaded_chart_has_a_run_for_each_line(tmp_path, axis):
    """The columns with the smallest and largest value of a point are left out."""
    (tmp_path / "chart.csv").write_text(
        f'"{axis}","calm-1 - loss","calm-1 - loss__MIN","calm-1 - loss__MAX","calm-1 - _step","wild - 2 - loss"\n'
        '"0","0.5","0.5","0.5","7",""\n"1","0.25","0.2","0.3","8","0.75"\n'
    )

    report = import_runs(tmp_path / "chart.csv", tmp_path / "runs")

    rows = {
        path.name: [(row.step, dict(row.metrics)) for row in read_rows(path)]
        for path in (tmp_path / "runs").iterdir()
    }
    assert rows == {
        "calm-1": [(0, {"loss": 0.5}), (1, {"loss": 0.25})],
        "wild - 2": [(1, {"loss": 0.75})],
    }
    assert report.failures == []
