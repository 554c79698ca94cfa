"""Comet's offline experiment in its own process, and the archive that it writes."""

import io
import json
import os
import re
import subprocess
import sys
import textwrap
import wave
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from destinations import Comet

ROOT = Path(__file__).parents[3]

# One process for all tests.
pytestmark = pytest.mark.xdist_group("comet")

EVERYTHING = """
    import sys
    import numpy as np
    from destinations import Comet
    from events import BinnedValues, Run

    comet = Comet(
        "project", offline_dir="comet", tags=["vit"], log_artifacts=True, experiment_key="k" * 32, close_seconds=300
    )
    try:
        with Run(comet, run_name="mine") as run:
            run.log_hyperparameters({"optim": {"lr": 0.1}})
            for loss in (1.0, 0.5):
                run.batch_start()
                run.log_metrics({"loss": loss, "count": 2**60})
                run.batch_end()
            run.log_images(np.full((2, 3, 8, 8), 77, np.uint8), "images", masks={"mask": np.ones((2, 8, 8), int)})
            run.log_audio(np.zeros(100), 8000, "sound")
            run.log_video(np.zeros((4, 3, 16, 16)), 4, "video")
            run.log_text("hello", "text")
            run.log_table(["a", "b"], [[1, "x"]], "table")
            run.log_histogram([1.0, 2.0, float("nan")], "histogram")
            run.log_histogram(BinnedValues([1, 3], [0.0, 1.0, 2.0]), "binned")
            run.log_point_cloud(np.ones((4, 3)), "points", colors=np.ones((4, 3)))
            run.log_traces({"prompt": "why"})
            open("weights.bin", "wb").write(b"weights")
            run.upload_file("sub/weights.bin", "weights.bin")
            open("weights.bin", "wb").write(b"changed")
            assert comet._feed.flush(300)
            counts = comet.counts
            raise ValueError("diverged")
    except ValueError:
        pass
    assert (counts.written_rows, counts.written_records) == (2, counts.records), counts
    assert comet.counts.failed_records == 0, comet.counts
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """Logs every kind of record; returns the archive's description, messages and files."""
    folder = tmp_path_factory.mktemp("comet")
    outcome = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(EVERYTHING)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    (path,) = (folder / "comet").glob("*.zip")
    with zipfile.ZipFile(path) as file:
        messages = [json.loads(line) for line in file.read("messages.json").decode().splitlines()]
        description = json.loads(file.read("experiment.json"))
        files = {name: file.read(name) for name in file.namelist()}
    by_type = {}
    for message in messages:
        by_type.setdefault(message["type"], []).append(message["payload"])
    return path.stem, description, by_type, files


def assets(archive):
    """Returns the step and content of each upload by kind and name; texts have numbers in place of names."""
    _, _, messages, files = archive
    found = {}
    for number, one in enumerate(messages["file_upload"]):
        about = one["additional_params"]
        name = about.get("figName") or about["fileName"]
        key = number if one["upload_type"] == "text-sample" else name
        found[one["upload_type"], key] = (about["step"], files[one["file_path"]])
    return found


def test_the_experiment_is_described(archive):
    """It has a key, project, name, tags and final status."""
    key, description, messages, _ = archive
    others = {one["key"]: one["value"] for one in messages["log_other"]}

    assert key == "k" * 32
    assert (description["project_name"], description["tags"]) == ("project", ["vit"])
    assert (others["Name"], others["status"]) == ("mine", "failed")
    assert others["exception"] == "ValueError: diverged"


def test_metrics_and_hyperparameters_have_their_steps_and_names(archive):
    """Integers are kept; nested names are joined as Comet does."""
    _, _, messages, _ = archive
    metrics = [one["metric"] for one in messages["metric_msg"]]
    parameters = {one["param"]["paramName"]: one["param"]["paramValue"] for one in messages["parameter_msg"]}

    assert [(one["step"], one["metricValue"]) for one in metrics if one["metricName"] == "loss"] == [
        (0, 1.0),
        (1, 0.5),
    ]
    assert {one["metricValue"] for one in metrics if one["metricName"] == "count"} == {float(2**60)}
    assert parameters["optim|lr"] == 0.1


def test_every_kind_of_record_is_in_the_archive(archive):
    """Each has its name and step, and the logged content."""
    found = assets(archive)
    _, _, messages, _ = archive

    for name in ("images/0", "images/1"):
        step, content = found["visualization", name]
        assert (step, Image.open(io.BytesIO(content)).getpixel((3, 3))) == (2, (77, 77, 77))
    assert ("visualization", "images/mask/0") in found
    step, content = found["audio", "sound.wav"]
    with wave.open(io.BytesIO(content)) as sound:
        assert (step, sound.getframerate(), sound.getnframes()) == (2, 8000, 100)
    assert found["video", "video.mp4"][1][4:8] == b"ftyp"
    texts = [content.decode() for (kind, _), (_, content) in found.items() if kind == "text-sample"]
    assert any("hello" in text for text in texts)
    assert any("why" in text for text in texts)
    by_name = {
        name: json.loads(content)
        for (kind, name), (_, content) in found.items()
        if kind == "asset" and name.endswith(".json")
    }
    assert by_name["table.json"] == {"columns": ["a", "b"], "data": [[1, "x"]]}
    assert ("histogram3d", "histogram") in found
    assert by_name["binned.histogram.json"]["counts"] == [1, 3]
    assert [one["name"] for one in messages["3d-image"]] == ["points"]


def test_a_file_is_copied_at_the_call(archive):
    """Later changes to it aren't in the archive."""
    found = assets(archive)

    assert found["asset", "sub/weights.bin"][1] == b"weights"


def test_a_missing_package_or_key_is_reported():
    """Continuing an experiment needs a key."""
    with pytest.raises(ValueError, match="experiment_key"):
        Comet("project", offline_dir="comet", resume=True)


SENDING = """
    import sys
    from pathlib import Path
    from destinations import RunDirectory, cli
    from events import Run

    for steps, options in ((range(3), []), ((), []), (range(3, 5), []), ((), ["--again"])):
        with Run(RunDirectory("runs/digits", run_id="abc", if_exists="resume")) as run:
            for step in steps:
                run.log_metrics({"loss": step / 2}, step=step)
        target = ["--to", "comet:team/project", "--option", "offline_dir=comet"]
        assert cli.main(["runs", "send", "digits", *target, *options]) == 0
        print(sorted(Path("comet").iterdir()))
"""


def test_a_sent_run_is_in_archives(tmp_path):
    """New records go into a further archive of the same experiment; `again` writes a single complete one."""
    outcome = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SENDING)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )

    assert outcome.returncode == 0, outcome.stderr
    sent = re.findall(r"^sent (\d) rows", outcome.stdout, re.MULTILINE)
    assert sent == ["3", "0", "2", "5"]
    keys = [
        [name[:32] for name in re.findall(r"comet/([^']+)", line)]
        for line in outcome.stdout.splitlines()
        if line.startswith("[")
    ]
    assert [len(one) for one in keys] == [1, 1, 2, 1]
    assert {*keys[0]} == {*keys[1]} == {*keys[2]} != {*keys[3]}
    (path,) = (tmp_path / "comet").iterdir()
    with zipfile.ZipFile(path) as file:
        description = json.loads(file.read("experiment.json"))
        messages = [json.loads(line) for line in file.read("messages.json").decode().splitlines()]
    assert (description["project_name"], description["workspace"]) == ("project", "team")
    metrics = [one["payload"]["metric"] for one in messages if one["type"] == "metric_msg"]
    losses = [(one["step"], one["metricValue"]) for one in metrics if one["metricName"] == "loss"]
    assert losses == [(step, step / 2) for step in range(5)]
