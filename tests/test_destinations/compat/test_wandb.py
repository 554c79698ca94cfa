"""`destinations.compat.wandb` beside `wandb`: steps and rows of both, and how each kind of value is kept."""

import argparse
import contextlib
import dataclasses
import importlib
import json
import logging
import os
import subprocess
import sys
import textwrap

import numpy as np
import polars as pl
import pytest
import torch
from omegaconf import OmegaConf
from packaging import version
from PIL import Image as Pictures

from destinations.compat import wandb
from destinations.runs import Run, open_runs
from destinations.runs.content.sources import branches_of

# A program's calls: `{module}` is imported as wandb. Each run makes random calls of `log`.
RANDOM_CALLS = """
import json
import random

import numpy as np
import torch

{module}

for seed in range(4):
    random.seed(seed)
    run = wandb.init(project="random", name=f"seed{{seed}}", dir={folder!r}, settings={settings})
    if seed % 2:
        wandb.define_metric("loss", step_metric="era")
        wandb.define_metric("val/*", step_metric="round", step_sync=True)
        wandb.define_metric("rate", step_metric="era", step_sync=False)
    for count in range(60):
        names = ["loss", "rate", "era", "round", "val/a", "val/b", "other"]
        values = [float(count), count, np.float32(count / 3), torch.tensor(count / 7), np.int64(count)]
        data = {{name: random.choice(values) for name in random.sample(names, random.randint(0, 3))}}
        if random.random() < 0.2:
            data["nested"] = {{"x": float(count), "y": {{"z": count}}}}
        how = {{}}
        if random.random() < 0.4:
            how["step"] = max(0, run.step + random.randint(-2, 3))
        if random.random() < 0.4:
            how["commit"] = random.choice([True, False])
        wandb.log(data, **how)
    print(json.dumps([run.name, run.step]))
    wandb.finish()
"""
QUIET = (
    'wandb.Settings(x_disable_stats=True, disable_git=True, x_disable_machine_info=True, console="off",'
    " x_save_requirements=False, silent=True)"
)


@pytest.fixture(autouse=True)
def _nothing_is_open(tmp_path, monkeypatch):
    """Each test has its own working directory, without a run or earlier warnings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("destinations.compat.wandb.elsewhere._told", set())
    yield
    if wandb.run is not None:
        wandb.finish()


def _run_program(program, folder, environment=()):
    finished = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=os.environ | dict(environment),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def _points_of_theirs(folder):
    """Returns each run's values by metric and step, as W&B's own reader finds them."""
    from tests.test_destinations.trackers.test_wandb import files_of, records_of

    points = {}
    for path in files_of(folder):
        by_name = points[records_of(path, "run")[0]["display_name"]] = {}
        for row in (record["item"] for record in records_of(path, "history")):
            for name, value in row.items():
                if not name.startswith("_"):
                    by_name.setdefault(name, {})[int(row["_step"])] = np.float32(value)
    return points


def _points(run):
    series = {name: run.series(name) for name in run.metric_names()}
    return {
        name: dict(zip(one.step.tolist(), np.float32(one.value), strict=True)) for name, one in series.items()
    }


@pytest.mark.xdist_group("wandb")
def test_steps_and_values_equal_wandbs(tmp_path):
    """Random calls with and without a step, with and without commit, nested, and with custom step metrics."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    theirs.mkdir()
    quiet = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}

    said = _run_program(
        RANDOM_CALLS.format(
            module="from destinations.compat import wandb", folder=str(ours), settings="None"
        ),
        tmp_path,
    )
    wanted = _run_program(
        RANDOM_CALLS.format(module="import wandb", folder=str(theirs), settings=QUIET), tmp_path, quiet
    )

    assert said == wanted
    points = _points_of_theirs(theirs)
    assert len(points) == 4
    for name, wanted_points in points.items():
        assert _points(Run.open(ours / "random" / name)) == wanted_points, name


def test_a_step_ends_with_the_call_that_commits_it(caplog):
    """A call may have no step, a step, or an earlier step, which is reported and counted."""
    with wandb.init(project="p", name="run") as run:
        run.log({"a": 1.0})
        run.log({"b": 2.0}, commit=False)
        run.log({"c": 3.0})
        run.log({"a": 4.0}, step=10)
        run.log({"b": 5.0}, step=10, commit=True)
        run.log({"a": 6.0}, step=5)
        run.log({"a": 7.0}, step=6)
        assert (run.step, run.summary.a, run.summary["b"]) == (11, 4.0, 5.0)

    assert [record.getMessage() for record in caplog.records] == [
        "wandb: data of an earlier step is not kept in a run folder. Step 5 is before step 11. Further calls are not reported.",
        "wandb: 2 calls of log had earlier steps, and were ignored.",
    ]
    assert _points(Run.open("runs/p/run")) == {"a": {0: 1, 10: 4}, "b": {1: 2, 10: 5}, "c": {1: 3}}


def test_a_logged_epoch_applies_to_later_rows():
    """Rows that don't set an epoch get it too."""
    with wandb.init(project="p", name="run") as run:
        for epoch in range(3):
            run.log({"epoch": epoch, "loss": 0.5})
            run.log({"accuracy": 1.0, "ok": True})

    assert Run.open("runs/p/run").series("epoch").value.tolist() == [0, 0, 1, 1, 2, 2]


def test_logged_records_survive_a_kill(tmp_path):
    """Records of an unfinished step survive too."""
    program = """
        import os
        from destinations.compat import wandb

        wandb.init(project="p", name="run")
        wandb.log({"loss": 1.0}, step=3)
        wandb.log({"rate": 2.0}, commit=False)
        os.kill(os.getpid(), 9)
    """
    finished = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=tmp_path, check=False)

    assert finished.returncode == -9
    assert _points(Run.open("runs/p/run")) == {"loss": {3: 1}, "rate": {3: 2}}


def test_config_is_a_mapping_with_attributes_and_becomes_the_hyperparameters(tmp_path):
    """A dict, a namespace or a file gives it, with some keys excluded; later values replace earlier ones."""
    (tmp_path / "config.yaml").write_text("wandb_version: 1\nlayers:\n  value: 3\nwidth: 8\n")

    run = wandb.init(
        project="p", name="run", config={"lr": 0.1, "dropped": 1}, config_exclude_keys=["dropped"]
    )
    wandb.config.update(argparse.Namespace(lr=0.2, optim={"name": "sgd"}), allow_val_change=True)
    wandb.config.epochs = 5
    wandb.config["seed"] = 1
    run.config.update("config.yaml")
    run.config.setdefaults({"seed": 2, "last": True})
    assert (wandb.config.lr, "dropped" in wandb.config, wandb.config.get("none", 7)) == (0.2, False, 7)
    with pytest.raises(AttributeError, match="no 'missing'"):
        _ = run.config.missing
    wandb.finish()

    want = {
        "lr": 0.2,
        "optim": {"name": "sgd"},
        "epochs": 5,
        "seed": 1,
        "layers": 3,
        "width": 8,
        "last": True,
    }
    assert Run.open("runs/p/run").hyperparameters == want == run.config.as_dict()


def test_a_summary_value_is_a_separate_metric():
    """The metric's rows keep the logged values."""
    with wandb.init(project="p", name="run") as run:
        run.log({"accuracy": torch.tensor(0.5)})
        run.summary["accuracy"] = 0.9
        run.summary.update({"best": {"epoch": 3}, "note": "good"})
        assert dict(run.summary) == {"accuracy": 0.9, "best": {"epoch": 3}, "note": "good"}

    read = Run.open("runs/p/run")
    assert _points(read) == {
        "accuracy": {0: 0.5},
        "summary/accuracy": {1: np.float32(0.9)},
        "summary/best.epoch": {1: 3},
    }
    assert [(text.name, text.text) for text in read.records("texts")] == [("summary/note", "good")]


_FRACTIONS = np.random.default_rng(0).random((6, 5, 3))
_BYTES = (_FRACTIONS * 255).astype(np.uint8)
# The input, its arguments, and the input for the original, which accepts only bytes.
PICTURES = {
    "a fraction": (_FRACTIONS, {}, _BYTES),
    "a signed fraction": (_FRACTIONS * 2 - 1, {}, _BYTES),
    "a byte": (_BYTES, {}, _BYTES),
    "beyond a byte": (_BYTES * 2.0 - 50, {}, (_BYTES * 2.0 - 50).clip(0, 255)),
    "as it is": (np.full((4, 4), 0.5), {"normalize": False}, np.zeros((4, 4))),
    "grey": (_FRACTIONS[..., 0], {}, _BYTES[..., 0]),
    "one channel": (_FRACTIONS[..., :1], {}, _BYTES[..., :1]),
    "transparent": (_BYTES[:3, :, [0, 1, 2, 0]], {}, _BYTES[:3, :, [0, 1, 2, 0]]),
    "a tensor": (torch.tensor(_FRACTIONS).permute(2, 0, 1), {}, torch.tensor(_BYTES).permute(2, 0, 1)),
    "a tensor on the way": (torch.tensor(_BYTES[..., :1]).permute(2, 0, 1), {}, _BYTES[..., 0]),
    "a mode": (_FRACTIONS, {"mode": "L"}, _BYTES),
}


@pytest.mark.xdist_group("wandb")
@pytest.mark.filterwarnings("ignore:Implicitly cleaning up <TemporaryDirectory:ResourceWarning")
def test_pixels_equal_wandbs():
    """Any shape gives the same picture, and numbers are scaled as before W&B 0.30."""
    import wandb as original

    with wandb.init(project="p", name="run"):
        for name, (image, how, _) in PICTURES.items():
            wandb.log({name: wandb.Image(image, **how)})

    run = Run.open("runs/p/run")
    for name, (_, how, pixels) in PICTURES.items():
        (kept,) = run.records("images", name)
        want = original.Image(pixels, mode=how.get("mode")).image
        got = Pictures.open(kept.path)
        assert (got.mode, name) == (want.mode, name)
        assert np.abs(np.asarray(got, int) - np.asarray(want, int)).max() <= 1, name


def test_images_have_captions_and_masks_with_labels():
    """A list is one record; in one record all images have a mask, or none."""
    mask = {"guess": {"mask_data": np.eye(4, dtype=int), "class_labels": {1: "line"}}}
    white = np.ones((4, 4))
    with wandb.init(project="p", name="run") as run:
        run.log({"both": [wandb.Image(white, caption=text, masks=mask) for text in ("one", "two")]})
        run.log({"some": [wandb.Image(white, masks=mask), wandb.Image(white)]})
        run.log(
            {"classes": wandb.Image(white, masks=mask, classes=wandb.Classes([{"id": 0, "name": "none"}]))}
        )

    read = Run.open("runs/p/run")
    found = [(image.step, image.caption, list(image.masks)) for image in read.records("images", "both")]
    assert found == [(0, "one", ["guess"]), (0, "two", ["guess"])]
    assert [list(image.masks) for image in read.records("images", "some")] == [["guess"], []]
    (image,) = read.records("images", "classes")
    assert image.class_labels == {0: "none", 1: "line"}


def test_each_kind_of_value_is_a_record_of_its_kind():
    """This covers a histogram, sound, video, points, page, text, figure, array and list."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1, 1))
    figure.subplots().plot([1, 2])
    with wandb.init(project="p", name="run") as run:
        run.log(
            {
                "histogram": wandb.Histogram(np.arange(10.0), num_bins=5),
                "counted": wandb.Histogram(np_histogram=(np.array([1, 2]), np.array([0.0, 1.0, 2.0]))),
                "weights": torch.arange(10.0),
                "tone": wandb.Audio(np.zeros((800, 2), np.float32), sample_rate=8000, caption="silence"),
                "walk": wandb.Video(np.zeros((2, 4, 3, 16, 16), np.uint8), fps=8),
                "film": wandb.Video(np.zeros((4, 3, 16, 16), np.uint8), format="mp4"),
                "cube": wandb.Object3D(np.zeros((8, 6))),
                "classes": wandb.Object3D.from_point_cloud(np.ones((8, 4))),
                "page": wandb.Html("<b>yes</b>"),
                "text": "as it is",
                "figure": figure,
                "list": [1, 2],
                "nothing": None,
                "number": 1.0,
            }
        )

    read = Run.open("runs/p/run")
    names = {
        kind: sorted(one.name for one in read.records(kind)) for kind in ("histograms", "texts", "videos")
    }
    assert names == {
        "histograms": ["counted", "histogram", "weights"],
        "texts": ["page", "text"],
        "videos": ["film", "walk"],
    }
    assert read.records("histograms", "histogram")[0].counts.tolist() == [2, 2, 2, 2, 2]
    assert read.records("histograms", "counted")[0].counts.tolist() == [1, 2]
    assert [video.path.suffix for video in sorted(read.records("videos"), key=lambda one: one.name)] == [
        ".mp4",
        ".gif",
    ]
    (tone,) = read.records("audio")
    assert (tone.name, tone.caption) == ("tone", "silence")
    assert [points.name for points in read.records("point_clouds")] == ["cube", "classes"]
    assert [image.name for image in read.records("images")] == ["figure"]
    assert _points(read) == {"number": {0: 1}}


@dataclasses.dataclass(slots=True)
class Settings:
    """A class without `__dict__`."""

    lr: float = 0.1


@pytest.mark.parametrize(
    "config",
    [
        {"lr": 0.1},
        Settings(),
        argparse.Namespace(lr=0.1),
        OmegaConf.create({"lr": 0.1, "gone": "${nowhere}"}),
    ],
    ids=lambda config: type(config).__name__,
)
def test_a_configuration_may_have_any_type(config):
    """A value that can't be resolved affects no other."""
    with wandb.init(project="p", name="run", config=config) as run:
        assert run.config.lr == 0.1

    assert Run.open("runs/p/run").hyperparameters["lr"] == 0.1


def test_tables_of_other_libraries_are_tables():
    """They may be logged directly or wrapped in a `Table`; integers stay integers."""
    frame = pl.DataFrame({"class": ["cat", "dog"], "count": [1, 2], "rate": [0.5, 0.25]})
    with wandb.init(project="p", name="run") as run:
        run.log({"frame": frame, "table": wandb.Table(dataframe=frame)})

    read = Run.open("runs/p/run")
    rows = {name: read.table(name).rows for name in ("frame", "table")}
    assert rows == dict.fromkeys(("frame", "table"), (("cat", 1, 0.5), ("dog", 2, 0.25)))


def test_a_table_keeps_its_rows_and_images():
    """It may be made of rows, of columns added later, or of a data frame."""
    pd = pytest.importorskip("pandas")
    table = wandb.Table(columns=["class", "image"])
    for name in ("cat", "dog"):
        table.add_data(name, wandb.Image(np.ones((4, 4)), caption=f"a {name}"))
    table.add_column("score", [0.5, 0.25])
    frame = pd.DataFrame({"x": [1, 2]})
    with wandb.init(project="p", name="run") as run:
        run.log({"animals": table, "frame": frame, "also": wandb.Table(dataframe=frame)})

    read = Run.open("runs/p/run")
    assert read.table("animals").columns == ("class", "image", "score")
    assert read.table("animals").rows == (("cat", "a cat", 0.5), ("dog", "a dog", 0.25))
    assert read.table("frame").rows == read.table("also").rows == ((1,), (2,))
    assert [image.caption for image in read.records("images", "animals/image")] == ["a cat", "a dog"]
    assert (table.get_column("score"), table.get_dataframe().shape) == ([0.5, 0.25], (2, 3))


def test_artifacts_and_saved_files_are_in_the_run(tmp_path):
    """Each version of an artifact is kept; a file that changes later is copied again at the end."""
    (tmp_path / "data/deep").mkdir(parents=True)
    (tmp_path / "data/deep/a.txt").write_text("a")
    (tmp_path / "model.pt").write_text("first")
    run = wandb.init(project="p", name="run")
    artifact = wandb.Artifact("set", type="dataset", metadata={"size": 1})
    artifact.add_dir("data")
    artifact.add_file("model.pt", name="renamed.pt")
    artifact.add(wandb.Table(columns=["x"], data=[[1]]), "rows")
    with artifact.new_file("made.txt") as file:
        file.write("made")
    versions = [wandb.log_artifact(artifact).wait().version for _ in range(2)]
    run.log_model("model.pt", name="best")
    saved = wandb.save("model.pt")
    (tmp_path / "model.pt").write_text("second one")
    wandb.save("model.pt", policy="end")
    (tmp_path / "report{epoch}[1].txt").write_text("no template")
    wandb.save("report{epoch}[1].txt")
    wandb.finish()

    folder = tmp_path / "runs/p/run/artifacts"
    files = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.*")}
    of_set = {"deep/a.txt": "a", "renamed.pt": "first", "made.txt": "made"}
    assert files == {
        **{f"set/{version}/{name}": text for version in ("v0", "v1") for name, text in of_set.items()},
        "best/v0/model.pt": "first",
        "model.pt": "second one",
        "report{epoch}[1].txt": "no template",
    }
    assert (versions, saved) == (["v0", "v1"], [str(folder / "model.pt")])
    read = Run.open("runs/p/run")
    assert read.table("set/v1/rows").rows == ((1,),)
    assert json.loads(read.records("texts", "set/v0")[0].text)["metadata"] == {"size": 1}


def test_watch_logs_gradients_and_parameters():
    """It logs at every second gradient until the run ends."""
    model = torch.nn.Linear(2, 1)
    with wandb.init(project="p", name="run"):
        wandb.watch(model, log="all", log_freq=2)
        for step in range(4):
            model(torch.ones(1, 2) * step).sum().backward()
            wandb.log({"loss": 1.0})
        wandb.unwatch(model)
        model(torch.ones(1, 2)).sum().backward()

    found = Run.open("runs/p/run").records("histograms")
    names = [f"{kind}/{name}" for kind in ("gradients", "parameters") for name in ("weight", "bias")]
    assert sorted((one.name, one.step) for one in found) == sorted(
        (name, step) for name in names for step in (1, 3)
    )


def test_a_run_uses_the_arguments_of_init(monkeypatch):
    """Equal names share a folder, tags and notes are in the run, and the environment supplies defaults."""
    monkeypatch.setenv("WANDB_PROJECT", "../from/outside")
    run = wandb.init(name="a/b {rank}", tags=["x"], notes="why", group="sweep", mode="offline", entity="me")

    assert (run.project, run.name, run.group, run.entity) == ("../from/outside", "a/b {rank}", "sweep", "me")
    assert (run.url, run.resumed, run.step, run.tags) == (None, False, 0, ("x",))
    assert wandb.run is run
    run.finish()
    with open_runs("runs") as runs:
        (read,) = runs.query(tag="group:sweep")
    assert (read.path.parent.name, read.path.name) == ("-from-outside", "a-b -rank-")
    assert (read.run_id, read.record.tags, read.record.notes) == (run.id, ("x", "group:sweep"), "why")


def test_a_run_continues_by_its_id_only_on_request():
    """Otherwise it gets another folder; steps continue after the last one."""
    first = wandb.init(project="p", name="run")
    first.log({"loss": 1.0}, step=4)
    wandb.finish()

    again = wandb.init(project="p", name="run")
    again.log({"loss": 2.0})
    wandb.finish()
    resumed = wandb.init(project="p", id=first.id, resume="must")
    resumed.log({"loss": 3.0})
    wandb.finish()

    assert (again.dir, again.step) == (f"{first.dir}-2", 1)
    assert (resumed.dir, resumed.id, resumed.resumed, resumed.starting_step) == (first.dir, first.id, True, 5)
    assert _points(Run.open(first.dir)) == {"loss": {4: 1, 5: 3}}
    with pytest.raises(wandb.Error, match="there is no run 'other'"):
        wandb.init(project="p", id="other", resume="must")
    with pytest.raises(wandb.Error, match="there is a run"):
        wandb.init(project="p", id=first.id, resume="never")


def test_a_resumed_run_continues_from_the_step_that_it_repeats(capfd):
    """New values count, and repeated ones become a branch; other metrics at earlier steps repeat nothing."""
    first = wandb.init(project="p", name="run")
    for step in range(6):
        first.log({"loss": float(step), "lr": 0.1}, step=step)
    wandb.finish()

    evaluated = wandb.init(project="p", id=first.id, resume="must")
    evaluated.log({"acc": 0.5}, step=2)
    wandb.finish()
    resumed = wandb.init(project="p", id=first.id, resume="must")
    resumed.log({"loss": 13.0}, step=3)
    resumed.log({"loss": 11.0}, step=1)
    wandb.finish()

    run = Run.open(first.dir)
    assert _points(run)["loss"] == {0: 0, 1: 1, 2: 2, 3: 13}
    assert "acc" not in run.record.summary
    assert len(branches_of(run.path)) == 1


def test_resume_from_continues_a_run_after_a_step():
    """It works like W&B's rewind; an unknown form or a missing run raises."""
    first = wandb.init(project="p", name="run")
    for step in range(4):
        first.log({"loss": float(step)}, step=step)
    wandb.finish()

    again = wandb.init(project="p", resume_from=f"{first.id}?_step=1")
    again.log({"loss": 12.0})
    wandb.finish()

    assert (again.dir, _points(Run.open(first.dir))) == (first.dir, {"loss": {0: 0, 1: 1, 2: 12}})
    for wrong in (first.id, f"{first.id}?_step=x", "other?_step=1"):
        with pytest.raises(wandb.Error, match=r"resume_from must be|there is no run .other."):
            wandb.init(project="p", resume_from=wrong)


def test_a_second_init_returns_the_open_run_by_default():
    """The module's functions belong to the first open run."""
    first = wandb.init(project="p", name="first")

    assert wandb.init(project="p", name="second") is first
    beside = wandb.init(project="p", name="beside", reinit="create_new")
    second = wandb.init(project="p", name="second", reinit=True)
    wandb.log({"loss": 1.0})
    beside.finish()

    assert wandb.run is second
    assert {run.name: list(_points(Run.open(run.dir))) for run in (first, beside, second)} == {
        "first": [],
        "beside": [],
        "second": ["loss"],
    }


def test_the_status_shows_how_the_run_ended():
    """`finish`, an exit code and an exception set it; a finished run accepts nothing more."""
    wandb.init(project="p", name="good")
    wandb.finish()
    wandb.init(project="p", name="bad").finish(exit_code=1)
    with pytest.raises(ZeroDivisionError), wandb.init(project="p", name="raised") as run:
        run.log({"loss": 1 / 0})

    assert [Run.open(f"runs/p/{name}").status for name in ("good", "bad", "raised")] == [
        "completed",
        "failed",
        "failed",
    ]
    with pytest.raises(wandb.Error, match="is finished: log needs another"):
        run.log({"loss": 1.0})
    with pytest.raises(wandb.Error, match=r"wandb\.log needs a run"):
        wandb.log({"loss": 1.0})


@pytest.mark.parametrize(
    ("ending", "status"), [("", "completed"), ("raise ValueError('diverged')", "failed")]
)
def test_a_program_without_finish_ends_its_run(tmp_path, ending, status):
    """W&B does the same, without a warning."""
    program = "from destinations.compat import wandb\nwandb.init(project='p', name='run').log({'a': 1})\n"

    finished = subprocess.run(
        [sys.executable, "-c", program + ending], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert Run.open("runs/p/run").status == status
    assert "not closed" not in finished.stderr


def test_calls_without_a_counterpart_warn_once_or_raise(caplog):
    """A chart for W&B's page warns; a call whose result a program needs raises."""
    with caplog.at_level(logging.WARNING), wandb.init(project="p", name="run", monitor_gym=True) as run:
        for _ in range(2):
            run.log({"chart": wandb.plot.roc_curve([1], [2]), "loss": 1.0})
            wandb.login()
            wandb.Image(np.zeros((4, 4)), boxes={"guess": {"box_data": []}})
            wandb.Object3D.from_point_cloud(np.zeros((8, 3)), boxes=[{"corners": []}])
        with pytest.raises(wandb.Error, match=r"wandb\.run\.use_artifact needs W&B's server"):
            run.use_artifact("set:latest")
    with pytest.raises(AttributeError, match="has no 'digest'"):
        _ = wandb.Artifact("set").digest

    assert [record.getMessage().split(" is not kept")[0] for record in caplog.records] == [
        "wandb: wandb.init(monitor_gym=...)",
        "wandb: wandb.plot.roc_curve",
        "wandb: wandb.login",
        "wandb: boxes of an image",
        "wandb: boxes and vectors beside points",
    ]
    assert _points(Run.open("runs/p/run")) == {"loss": {0: 1, 1: 1}}


@pytest.mark.parametrize("owner", ["wandb", "wandb.Run", "wandb.plot", "wandb.data_types"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_each_public_name_of_wandb_exists_or_explains_its_absence(owner):
    """No W&B name raises a bare AttributeError; one whose result a program needs raises `Error`."""
    theirs, ours = importlib.import_module("wandb"), wandb
    for part in owner.split(".")[1:]:
        theirs, ours = getattr(theirs, part), getattr(ours, part)
    one = wandb.init(project="p") if owner == "wandb.Run" else ours
    internal = {"annotations", "wandb", "utils", "viz", "Visualize", "CustomChart", "Media", "WBValue"}
    internal |= {"BatchableMedia", "Node", "WBTraceTree"}

    for name in {name for name in dir(theirs) if name[0] != "_"} - internal:
        with contextlib.suppress(wandb.Error):
            getattr(one, name)
    with pytest.raises(AttributeError, match="has no 'lgo'"):
        _ = one.lgo


def test_programs_may_read_and_set_what_wandb_lets_them(caplog):
    """Names of older programs work; setting name, tags or notes late warns that they aren't kept."""
    assert wandb.finish() is None
    log = wandb.log
    with pytest.raises(wandb.Error, match=r"call wandb\.init"):
        log({"loss": 1.0})
    run: wandb.sdk.wandb_run.Run = wandb.init(project="p", name="run", entity="us", tags=["a"], id="one")
    about = (run.path, run.offline, run.disabled, run.url, run.get_url(), run.project_name())

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            wandb.run.name = f"{run.name}-later"
            wandb.run.save()
            run.tags += ("late",)
        run.alert("high", level=wandb.AlertLevel.ERROR)
    log({"loss": 1.0})
    wandb.finish(1)

    assert about == ("us/p/one", True, False, None, None, "p")
    assert (run.name, run.tags) == ("run-later-later", ("a", "late", "late"))
    assert [(record.levelname, record.getMessage().split(" is not")[0]) for record in caplog.records] == [
        ("WARNING", "wandb: run.name that is set after init"),
        ("WARNING", "wandb: run.tags that is set after init"),
        ("ERROR", "high: "),
    ]
    assert wandb.run is None
    assert (Run.open("runs/p/run").status, _points(Run.open("runs/p/run"))) == ("failed", {"loss": {0: 1}})
    assert version.parse(wandb.__version__) >= version.parse("0.20")


def test_the_table_of_a_chart_is_kept():
    """A chart of a table becomes that table; a confusion matrix has W&B's rows."""
    theirs = importlib.import_module("wandb").plot.confusion_matrix
    truth, guess, names = [0, 1, 1, 2, 2, 2], [0, 1, 0, 2, 1, 2], ["cat", "dog", "cow", "owl"]
    scores = np.eye(4)[guess]
    calls = [
        {"y_true": truth, "preds": guess, "class_names": names},
        {"y_true": truth, "probs": scores, "class_names": names},
        {"y_true": [3, 5, 5], "preds": [5, 5, 3]},
    ]

    with wandb.init(project="p", name="run") as run:
        for index, call in enumerate(calls):
            run.log({f"matrix{index}": wandb.plot.confusion_matrix(**call)})
        run.log({"line": wandb.plot.line(wandb.Table(["x", "y"], [[0, 1]]), "x", "y", title="a line")})

    read = Run.open("runs/p/run")
    for index, call in enumerate(calls):
        wanted = theirs(**call).table
        assert list(read.table(f"matrix{index}").columns) == wanted.columns
        assert [list(row) for row in read.table(f"matrix{index}").rows] == wanted.data
    assert read.table("line").rows == ((0, 1),)


class Unreadable:
    @property
    def shape(self):
        raise ValueError("not now")


BAD = {
    "no shape": Unreadable(),
    "an image of four dimensions": wandb.Image(np.zeros((2, 2, 2, 2))),
    "a sound without a rate": wandb.Audio(np.zeros(8)),
    "a file that is not there": wandb.Object3D("missing.obj"),
    "counts without edges": wandb.Histogram(np_histogram=(1,)),
    "no number": object(),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_dropped(name, caplog):
    """It is reported, no call raises, and the values beside it are logged."""
    with caplog.at_level(logging.ERROR), wandb.init(project="p", name="run") as run:
        run.log({"bad": BAD[name], "loss": 1.0})

    assert _points(Run.open("runs/p/run")) == {"loss": {0: 1}}
    assert caplog.records


def test_a_bad_call_affects_no_other(caplog):
    """An argument that isn't a mapping is dropped; a step that isn't a number leaves the step unchanged."""
    with caplog.at_level(logging.ERROR), wandb.init(project="p", name="run") as run:
        run.log(["no", "mapping"])
        run.log({"loss": 1.0}, step="three")
        run.log({"mixed": [wandb.Html("one"), wandb.Image(np.zeros((4, 4)))]})

    assert len(caplog.records) == 2
    read = Run.open("runs/p/run")
    assert _points(read) == {"loss": {0: 1}}
    assert [read.records(kind)[0].name for kind in ("texts", "images")] == ["mixed", "mixed"]


# Other people's programs, whose `import wandb` finds ours.


@pytest.mark.xdist_group("transformers")
def test_the_tracker_of_accelerate_logs_to_it(monkeypatch):
    """Its `WandBTracker` stores the configuration, numbers, images and tables."""
    from accelerate import Accelerator
    from accelerate.tracking import WandBTracker

    monkeypatch.setitem(sys.modules, "wandb", wandb)
    accelerator = Accelerator(log_with="wandb", cpu=True)

    accelerator.init_trackers("digits", config={"lr": 0.1}, init_kwargs={"wandb": {"name": "run"}})
    for step in range(3):
        accelerator.log({"loss": 0.5**step}, step=step)
    tracker = accelerator.get_tracker("wandb")
    assert isinstance(tracker, WandBTracker)
    tracker.log_images({"digit": [np.zeros((4, 4, 3))]}, step=3)
    tracker.log_table("scores", columns=["class"], data=[["cat"]], step=3)
    accelerator.end_training()

    read = Run.open("runs/digits/run")
    assert _points(read) == {"loss": {0: 1, 1: 0.5, 2: 0.25}}
    assert (read.hyperparameters, read.status) == ({"lr": 0.1}, "completed")
    assert (read.records("images", "digit")[0].step, read.table("scores").rows) == (3, (("cat",),))


@pytest.mark.xdist_group("torchrl")
def test_the_logger_of_torchrl_logs_to_it(monkeypatch):
    """Its `WandbLogger` stores scalars, hyperparameters, texts and histograms."""
    from torchrl.record.loggers import wandb as theirs

    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(theirs, "_has_wandb", True)

    logger = theirs.WandbLogger("cartpole", project="balance")
    logger.log_hparams({"lr": 0.1})
    for step in range(3):
        logger.log_scalar("reward", float(step), step=step)
    logger.log_histogram("actions", torch.arange(4.0), bins=4)
    folder = logger.experiment.dir
    wandb.finish()

    read = Run.open(folder)
    assert [value for _, value in sorted(_points(read)["reward"].items())] == [0.0, 1.0, 2.0]
    assert (read.path.parent.name, read.hyperparameters["lr"]) == ("balance", 0.1)
    assert read.records("histograms", "actions")[0].counts.tolist() == [1, 1, 1, 1]
