"""The `tensorboard` program shows our files, as asked over HTTP.

All tests of the module share one server.
"""

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import numpy as np
import pytest

from destinations import TensorBoard
from destinations.testing import DryRun

pytestmark = pytest.mark.xdist_group("tensorboard")

START_SECONDS = 120.0
ANSWER_SECONDS = 60.0
# The hyperparameter page asks for these statuses.
QUESTION = {
    "allowedStatuses": ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"],
    "startIndex": 0,
    "sliceSize": 10,
    "experimentName": "",
    "colParams": [],
}


class Server:
    """A running `tensorboard`."""

    def __init__(self, address):
        self._address = address

    def get(self, route, **query):
        """Returns the parsed response of a route."""
        url = f"{self._address}data/{route}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:  # noqa: S310  # ours
            return json.loads(answer.read())

    def post(self, route, body):
        """Returns the response to a JSON request."""
        request = urllib.request.Request(  # noqa: S310  # ours
            f"{self._address}data/{route}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:  # noqa: S310  # ours
            return json.loads(answer.read())


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Starts the program on three runs, and waits until it has read them."""
    folder = tmp_path_factory.mktemp("logs")
    _write_runs(folder)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", "0"]
    said = tmp_path_factory.mktemp("server") / "log"
    with said.open("w") as log:
        program = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--reload_interval", "1"], stdout=log, stderr=log
        )
    # Even if something hangs, the process is killed.
    alarm = threading.Timer(2 * START_SECONDS, program.kill)
    alarm.daemon = True
    alarm.start()
    try:
        server = Server(_wait_until(lambda: _address(said), "say where it is", said))
        _wait_until(lambda: _has_read(server), "read all runs", said)
        yield server
    finally:
        program.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(20)
        program.kill()
        program.wait()
        alarm.cancel()


def _wait_until(condition, what, said):
    """Repeats a request until its response is not empty."""
    deadline, pause = time.monotonic() + START_SECONDS, threading.Event()
    while time.monotonic() < deadline:
        if found := condition():
            return found
        pause.wait(0.1)
    return pytest.fail(f"tensorboard must {what}, got {said.read_text()}")


def _address(said):
    """Returns the address that the program prints."""
    found = re.search(r"http://127\.0\.0\.1:\d+/", said.read_text())
    return found and found[0]


def _has_read(server):
    """Returns whether the last scalar of each run is there, and each session's end, which follows it."""
    try:
        tags = server.get("plugin/scalars/tags")
        groups = server.post("plugin/hparams/session_groups", QUESTION)["sessionGroups"]
    except urllib.error.HTTPError:
        # It is still reading.
        return False
    ends = [session["status"] for group in groups for session in group["sessions"]]
    return (
        all("last" in tags.get(run, {}) for run in ("first", "second", "resumed"))
        and len(ends) == 2
        and "STATUS_RUNNING" not in ends
    )


def _write_runs(folder):
    run = DryRun(
        TensorBoard(folder / "first", clock=iter(range(1000, 2000)).__next__, close_seconds=ANSWER_SECONDS)
    )
    run.init()
    log = run.logger
    log.log_hyperparameters({"lr": 0.1, "model": {"name": "cnn"}})
    for step in range(4):
        log.log_metrics({"loss": 1.0 / (step + 1), "accuracy": float(step)}, step)
    image, mask = np.full((3, 6, 8), 200, np.uint8), np.ones((6, 8), np.uint8)
    log.log_images([image, image], "pictures", step=2)
    log.log_images(image, "masked", step=2, masks={"truth": mask}, mask_class_labels={1: "cat"})
    log.log_video(np.arange(2 * 3 * 4 * 4, dtype=np.uint8).reshape(2, 3, 4, 4), 5, "video", 2)
    log.log_audio(np.zeros(80, np.float32), 8000, "sound", 2)
    log.log_histogram([1.0, 2.0, 2.0, 4.0], "weights", 2, bins=3)
    log.log_histogram([float("nan")], "nothing", 2)
    log.log_point_cloud(np.ones((5, 3)), "points", 2)
    log.log_text("some *words*", "words", 2)
    log.log_table(["a", "b"], [[1, 2]], "table", 2)
    log.log_metrics({"last": 1.0}, 9)
    run.close()
    run = DryRun(TensorBoard(folder / "second", close_seconds=ANSWER_SECONDS))
    run.init()
    run.logger.log_hyperparameters({"lr": 0.2, "dropout": 0.5})
    run.logger.log_metrics({"loss": 0.5, "last": 1.0}, 0)
    run.close(ValueError("failed"))
    _write_resumed(folder / "resumed")


def _write_resumed(folder):
    destination = TensorBoard(folder, clock=iter(range(1000, 2000)).__next__, close_seconds=ANSWER_SECONDS)
    run = DryRun(destination)
    run.init()
    for step in range(3):
        run.logger.log_metrics({"loss": float(step)}, step)
    saved = destination.state_dict()
    for step in range(2, 6):
        run.logger.log_metrics({"loss": 90.0 + step}, step)
    run.close()
    run = DryRun(destination)
    run.fire("init", "before_load")
    run.state.timestamp = run.state.timestamp.copy(batch=2, sample=8)
    destination.load_state_dict(saved)
    run.fire("after_load", "fit_start")
    run.logger.log_metrics({"loss": 33.0}, 3)
    run.logger.log_metrics({"last": 1.0}, 9)
    run.close()


def test_the_runs_are_the_folders(server):
    """No other run appears for hyperparameters or anything else."""
    assert sorted(server.get("runs")) == ["first", "resumed", "second"]


def test_scalars_have_their_steps_and_times(server):
    """Values are float32, and times are from the calls."""
    tags = server.get("plugin/scalars/tags")
    loss = server.get("plugin/scalars/scalars", run="first", tag="loss")

    assert sorted(tags["first"]) == ["accuracy", "last", "loss"]
    assert loss == [[1002.0 + step, step, pytest.approx(1.0 / (step + 1))] for step in range(4)]


def test_a_resumed_run_shows_no_step_twice(server):
    """Records after the checkpoint are replaced."""
    loss = server.get("plugin/scalars/scalars", run="resumed", tag="loss")

    assert [(step, value) for _, step, value in loss] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 33.0)]


def test_the_hparams_tab_has_all_hyperparameters_and_metrics(server):
    """It includes names that only one run has, and each run's status."""
    experiment = server.post("plugin/hparams/experiment", {"experimentName": "", "hparamsLimit": 0})
    names = [info["name"] for info in experiment["hparamInfos"]]
    metrics = [info["name"] for info in experiment["metricInfos"]]
    columns = [{"hparam": name} for name in names] + [{"metric": metric} for metric in metrics]

    groups = server.post("plugin/hparams/session_groups", {**QUESTION, "colParams": columns})["sessionGroups"]

    assert sorted(names) == ["dropout", "lr", "model.name"]
    assert sorted(metric["tag"] for metric in metrics) == ["accuracy", "last", "loss"]
    found = {group["name"]: group for group in groups}
    assert {name: group["hparams"] for name, group in found.items()} == {
        "first": {"lr": 0.1, "model.name": "cnn"},
        "second": {"lr": 0.2, "dropout": 0.5},
    }
    assert {name: group["sessions"][0]["status"] for name, group in found.items()} == {
        "first": "STATUS_SUCCESS",
        "second": "STATUS_FAILURE",
    }
