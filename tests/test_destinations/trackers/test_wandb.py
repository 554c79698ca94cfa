"""W&B offline: its own reader reads the file written, and W&B's effects on the process are bounded."""

import gc
import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import wave
from datetime import datetime
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from destinations import RunDirectory, WandB
from destinations.runs import Run as FolderRun
from destinations.runs.send import send
from destinations.testing import DestinationContract, DryRun
from destinations.testing.samples import WEIRD_NAMES, every_kind_of_record
from destinations.trackers.names import Names
from destinations.trackers.wandb import artifact_name, few_bins, media_key, metric_key
from events import Run

pytestmark = [
    # The tests of this module share the package and its service.
    pytest.mark.xdist_group("wandb"),
    # W&B keeps its last hundred artifacts with their folders, and deletes a folder when it forgets the
    # artifact.
    pytest.mark.filterwarnings("ignore:Implicitly cleaning up <TemporaryDirectory:ResourceWarning"),
]

PATIENCE_SECONDS = 60
# Time for W&B's service to start, and to finish a run with all its records, on a busy machine.
SERVICE_SECONDS = 300
# W&B's folders, the wait for its service, and no error reports.
WANDB = {
    "WANDB_ERROR_REPORTING": "false",
    "WANDB__SERVICE_WAIT": str(SERVICE_SECONDS),
    "WANDB_INIT_TIMEOUT": str(SERVICE_SECONDS),
}
# These tests neither measure the machine nor ask about it.
QUIET = {
    "x_disable_stats": True,
    "disable_git": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
}


@pytest.fixture(scope="module", autouse=True)
def _collected():
    """Has W&B forget its artifacts, whose folders warn on deletion, before other tests run."""
    yield
    from wandb.sdk.artifacts import artifact_instance_cache as caches

    caches.artifact_instance_cache.clear()
    caches.artifact_instance_cache_by_client_id.clear()
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def service():
    """Keeps W&B's files in a folder of the tests, and one service for all of them."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name in ("DATA", "CACHE", "CONFIG"):
            patch.setenv(f"WANDB_{name}_DIR", f"{folder}/{name}")
        for name, value in WANDB.items():
            patch.setenv(name, value)
        patch.setenv("WANDB_MODE", "offline")
        hooks = sys.exit, sys.excepthook
        import wandb

        wandb.setup()
        yield
        wandb.teardown()
        sys.exit, sys.excepthook = hooks


def make(folder, **options):
    """Returns an offline WandB that writes into a folder."""
    options = {"mode": "offline", "dir": folder, "init_kwargs": {"settings": QUIET}, **options}
    return WandB("tests", close_seconds=2 * PATIENCE_SECONDS, wait_seconds=PATIENCE_SECONDS, **options)


def files_of(folder):
    """Returns the transaction logs of the runs in a folder, oldest first, once each is complete.

    W&B's service completes them a moment after `finish` returns, with the exit record last. Folder times
    therefore don't give the order.
    """
    deadline, pause = time.monotonic() + SERVICE_SECONDS, threading.Event()
    found = []
    for run in Path(folder).glob("wandb/offline-run-*"):
        while not (complete := [path for path in run.glob("*.wandb") if is_complete(path)]):
            assert time.monotonic() < deadline, f"{run} is not complete"
            pause.wait(0.02)
        found += complete
    return found if len(found) == 1 else sorted(found, key=begun_at)


def begun_at(path):
    """Returns when a run began, according to its log."""
    return datetime.fromisoformat(records_of(path, "run")[0]["start_time"])


def is_complete(path):
    """Returns whether the last record is there."""
    done = subprocess.run(inspect(path), check=False, capture_output=True, timeout=PATIENCE_SECONDS)
    return done.returncode == 0 and b'"type":"exit"' in done.stdout


def inspect(path):
    """Returns the command that prints a transaction log with W&B's own reader."""
    from wandb.util import get_core_path

    return [get_core_path(), "leet", "inspect", "-json", "-no-observability", "-run-file", str(path)]


def records_of(path, kind=None):
    """Returns the records that W&B's own reader finds in a transaction log, or the payloads of one kind."""
    text = subprocess.run(inspect(path), check=True, capture_output=True, timeout=PATIENCE_SECONDS).stdout
    records = [json.loads(line) for line in text.splitlines()]
    return records if kind is None else [record[kind] for record in records if record["type"] == kind]


def rows_of(path):
    """Returns the rows of a run's history."""
    return [record["item"] for record in records_of(path, "history")]


def nested(items):
    """Returns the keys "image._type" and "image.width" of a row as a dict under "image"."""
    media = {}
    for key, value in items.items():
        name, dot, field = key.rpartition(".")
        if dot:
            media.setdefault(name, {})[field] = value
    return media


def table_of(path, name):
    """Returns a table from W&B's artifact, with its images."""
    for artifact in records_of(path, "artifact"):
        for entry in artifact["manifest"]["contents"]:
            if entry["path"] == f"{name}.table.json":
                return json.loads(Path(entry["local_path"]).read_text())
    raise AssertionError(f"no table {name}")


def config_of(path):
    """Returns a run's final config."""
    config = {}
    for record in records_of(path, "run"):
        config |= record.get("config", {}).get("update", {})
    for record in records_of(path, "config"):
        config |= record.get("update", {})
    return {key: value for key, value in config.items() if key != "_wandb"}


def number(value):
    """Parses a number as W&B writes it."""
    return float(value.lower()) if isinstance(value, str) else value


class TestWandB(DestinationContract):
    @pytest.fixture
    def destination(self, tmp_path):
        """Returns an offline destination that accepts everything."""
        self.folder = tmp_path
        self.names = Names(lambda name: metric_key(name, "global_step"))
        for name in WEIRD_NAMES:
            self.names.key(name)
        return make(tmp_path)

    def read_metrics(self, destination):
        found = []
        for path in files_of(self.folder):
            for row in rows_of(path):
                if any(key.endswith("._type") for key in row):
                    continue
                step = row.pop("global_step")
                values = {
                    self.names.name(key): number(value)
                    for key, value in row.items()
                    if not key.startswith("_")
                }
                if values:
                    found.append((step, values))
        return found

    def _has_metrics(self, destination, recording, except_names=frozenset()):
        """Compares as W&B keeps them: keys are unordered, and numbers are JSON's, in which 1 equals 1.0."""
        expected = [(step, alike(values, except_names)) for step, values in recording.metrics]
        expected = [(step, values) for step, values in expected if values]
        found = [(step, alike(values, except_names)) for step, values in self.read_metrics(destination)]
        found = [(step, values) for step, values in found if values]
        assert found[len(found) - len(expected) :] == expected

    def read_output(self, destination):
        return {path.name: path.read_bytes() for path in files_of(self.folder)}


def alike(values, except_names=frozenset()):
    """Returns metrics in a form that ignores what W&B can't distinguish: 1 and 1.0, 0.0 and -0.0."""
    return sorted(
        (name, repr(float(value) + 0.0)) for name, value in values.items() if name not in except_names
    )


# Its content.


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """Returns the folder, log, rows and media of one run with one of each kind of record."""
    folder = tmp_path_factory.mktemp("everything")
    now = iter(range(1_000_000_000, 1_000_000_999))
    pixels = np.arange(2 * 3 * 8 * 10, dtype="uint8").reshape(2, 3, 8, 10)
    mask = np.zeros((2, 8, 10), int)
    mask[:, 0, 0] = 1
    (folder / "file.txt").write_text("hello")
    destination = make(
        folder,
        entity="team",
        name="named",
        group="grouped",
        tags=["a", "b"],
        notes="noted",
        run_id="theid",
        log_artifacts=True,
        clock=lambda: float(next(now)),
    )
    with Run([destination], run_name="other", raise_errors=True) as run:
        run.log_hyperparameters(
            {"lr": 0.1, "optimizer": {"name": "sgd"}, "nan": math.nan, "bad\udc80": "\udc80"}
        )
        run.log_metrics({"loss": 0.5, "_step": 7.0, "global_step": 8.0, "": 9.0}, step=5)
        run.log_metrics({"loss": math.nan, "big": 2**60, "yes": True}, step=3)
        run.log_images(pixels, "pictures", step=4, use_table=False, captions=["a cat", "a dog"])
        run.log_images(
            pixels, "masked", masks={"truth": mask}, mask_class_labels={0: "sky", 1: "cat"}, use_table=False
        )
        run.log_images(pixels, "tabled", masks={"truth": mask})
        run.log_images(
            pixels[:1],
            "many classes",
            masks={"m": mask[:1] * 1000},
            mask_class_labels={1000: "z"},
            use_table=False,
        )
        run.log_table(
            ["a", "b"], [[1, "x"], [math.nan, Image.new("L", (3, 3))], [None, [1, 2]]], "table", step=4
        )
        run.log_text("<b> & \udc80", "text")
        run.log_audio(np.zeros(100, "float32"), 8000, "sound")
        run.log_video(np.zeros((2, 3, 8, 8), "uint8"), 5, "video")
        run.log_video(b"GIF89a\x01\x00\x01\x00\x00\x00\x00;", name="gif")
        run.log_histogram(np.array([0.0, 1.0, 1.0, math.nan]), "histogram", bins=2)
        run.log_histogram(np.arange(5000), "fine", bins=1000)
        run.log_histogram(np.array([math.inf]), "nothing finite")
        run.log_point_cloud(
            np.array([[0, 1, 2], [math.nan, 0, 0]]),
            "points",
            colors=np.array([[255, 0, 9], [0, 0, 0]], "uint8"),
        )
        run.log_traces({"a": {"b": [1, None]}})
        run.upload_file("checkpoints/ep 1.pt", folder / "file.txt")
        run.flush()
    (path,) = files_of(folder)
    rows = rows_of(path)
    media = {}
    for row in rows:
        for name, fields in nested(row).items():
            media[name] = {**fields, "step": row["global_step"], "time": row["_timestamp"]}
    return {
        "path": path,
        "rows": rows,
        "media": media,
        "files": path.parent / "files",
        "counts": destination.counts,
    }


def test_every_kind_of_record_is_accepted(everything):
    """Nothing failed."""
    counts = everything["counts"]

    assert counts.errors == {}
    assert (counts.written_rows, counts.dropped_rows, counts.dropped_records) == (2, 0, 0)


def test_metrics_keep_steps_times_and_names(everything):
    """A smaller step after a larger one is kept; names that W&B reserves get a prefix.

    Times are the clock's.
    """
    first, second = everything["rows"][:2]

    assert {key: first[key] for key in first if key != "_runtime"} == {
        "_step": 0,
        "_timestamp": 1_000_000_001,
        "global_step": 5,
        "loss": 0.5,
        "metric/_step": 7,
        "metric/global_step": 8,
        "unnamed": 9,
    }
    assert (second["global_step"], second["_step"], second["_timestamp"]) == (3, 1, 1_000_000_002)
    assert (second["loss"], second["big"], second["yes"]) == ("NaN", 2**60, True)


def test_charts_have_our_step_as_their_axis(everything):
    """The step metric is defined, and is the x-axis of all others."""
    metrics = records_of(everything["path"], "metric")

    assert metrics[0]["name"] == "global_step"
    assert (metrics[1]["glob_name"], metrics[1]["step_metric"]) == ("*", "global_step")


def test_the_run_has_the_given_name(everything):
    """Project, entity, name, group, tags, notes and id are there."""
    (run,) = records_of(everything["path"], "run")
    expected = {
        "project": "tests",
        "entity": "team",
        "display_name": "named",
        "run_group": "grouped",
        "tags": ["a", "b"],
        "notes": "noted",
        "run_id": "theid",
    }

    assert {key: run[key] for key in expected} == expected


def test_hyperparameters_are_the_config(everything):
    """Their nesting is kept; texts that aren't UTF-8 are escaped, and NaN is a text."""
    assert config_of(everything["path"]) == {
        "lr": 0.1,
        "optimizer": {"name": "sgd"},
        "nan": "NaN",
        "bad\\udc80": "\\udc80",
    }


def test_images_are_unchanged(everything):
    """They are equal pixel by pixel, with step and time."""
    media = everything["media"]["pictures"]
    expected = np.arange(480, dtype="uint8").reshape(2, 3, 8, 10).transpose(0, 2, 3, 1)

    found = [np.asarray(Image.open(everything["files"] / name)) for name in media["filenames"]]

    assert np.array_equal(found, expected)
    assert (media["_type"], media["step"]) == ("images/separated", 4)
    assert media["captions"] == ["a cat", "a dog"]


def test_masks_have_pixels_and_labels(everything):
    """Each image has its own; the labels are in the config."""
    media = everything["media"]["masked"]
    (first, _) = media["all_masks"]

    mask = np.asarray(Image.open(everything["files"] / first["truth"]["path"]))

    assert (mask.shape, mask[0, 0], mask.sum()) == ((8, 10), 1, 1)
    assert "cat" in json.dumps(records_of(everything["path"], "config"))


def test_classes_beyond_a_byte_are_renumbered(everything):
    """Their labels keep the original number."""
    media = everything["media"]["many classes"]
    (first,) = media["all_masks"]

    mask = np.asarray(Image.open(everything["files"] / first["m"]["path"]))

    assert (mask[0, 0], mask[1, 1]) == (1, 0)
    assert "1000: z" in json.dumps(records_of(everything["path"], "config"))


def test_images_come_as_a_table_on_request(everything):
    """`use_table` asks for it, and masks are included."""
    media = everything["media"]["tabled"]

    table = table_of(everything["path"], "tabled")

    assert (media["_type"], media["nrows"], table["columns"]) == ("table-file", 2, ["image"])
    assert [row[0]["masks"].keys() for row in table["data"]] == [{"truth"}, {"truth"}]


def test_tables_have_their_cells(everything):
    """Cells are numbers, texts or images; anything else becomes text."""
    media = everything["media"]["table"]

    table = table_of(everything["path"], "table")

    assert (table["columns"], media["step"]) == (["a", "b"], 4)
    assert table["data"][0] == [1, "x"]
    assert table["data"][1][1]["_type"] == "image-file"
    assert table["data"][2] == [None, "[1, 2]"]


def test_texts_are_escaped_html(everything):
    """The logged text is shown, not interpreted."""
    text = (everything["files"] / everything["media"]["text"]["path"]).read_text()

    assert "&lt;b&gt; &amp; \\udc80</pre>" in text


def test_sounds_and_videos_are_files(everything):
    """They are WAV with its rate, MP4, or the unchanged bytes of a file."""
    media, files = everything["media"], everything["files"]

    with wave.open(str(files / media["sound"]["path"])) as sound:
        assert (sound.getframerate(), sound.getnframes()) == (8000, 100)
    assert (files / media["video"]["path"]).read_bytes()[4:8] == b"ftyp"
    assert (files / media["gif"]["path"]).read_bytes().startswith(b"GIF89a")


def test_histograms_have_counts_and_edges(everything):
    """They count finite values; bins beyond W&B's limit are merged without losing a value."""
    row = next(row for row in everything["rows"] if "histogram._type" in row)
    fine = next(row for row in everything["rows"] if "fine._type" in row)

    assert (row["histogram.values"], row["histogram.bins"]) == ([1, 2], [0, 0.5, 1])
    assert len(fine["fine.values"]) == 500
    assert sum(fine["fine.values"]) == 5000
    assert any("nothing finite._type" in row for row in everything["rows"])


def test_points_are_numbers(everything):
    """They have positions and colours; a point without a position is left out, because JSON has no NaN."""
    media = everything["media"]["points"]

    points = json.loads((everything["files"] / "media/object3D" / media["filenames"][0]).read_text())

    assert points == [[0, 1, 2, 255, 0, 9]]


def test_traces_are_a_table(everything):
    """Its columns are name and JSON."""
    table = json.loads((everything["files"] / everything["media"]["traces"]["path"]).read_text())

    assert table["data"] == [["a", '{"b": [1, null]}']]


def test_files_are_artifacts(everything):
    """Each has a name that W&B accepts, and contains the requested path."""
    artifacts = [one for one in records_of(everything["path"], "artifact") if one["type"] == "file"]

    (artifact,) = artifacts
    (entry,) = artifact["manifest"]["contents"]
    assert (artifact["name"], entry["path"]) == ("theid-checkpoints-ep-1.pt", "checkpoints/ep 1.pt")
    assert Path(entry["local_path"]).read_text() == "hello"


def test_a_completed_run_exits_with_zero(everything):
    """See below for the other statuses."""
    assert records_of(everything["path"], "exit")[0].get("exit_code", 0) == 0


# Its end and continuation.


@pytest.mark.parametrize(
    ("exception", "code"),
    [(ValueError("password=hunter2"), 1), (KeyboardInterrupt(), 255), (SystemExit(143), 1)],
)
def test_the_exit_code_shows_how_the_run_ended(tmp_path, exception, code):
    """Failed, interrupted and preempted runs differ.

    The exception is in the summary, without secrets.
    """
    run = DryRun(make(tmp_path), max_duration="1ba")
    run.init()
    run.fit()

    run.close(exception)

    (path,) = files_of(tmp_path)
    text = path.read_bytes()
    assert records_of(path, "exit")[0]["exit_code"] == code
    assert type(exception).__name__.encode() in text
    assert b"hunter2" not in text
    assert (b"preempting" in json.dumps(records_of(path)).encode()) is (
        code == 1 and isinstance(exception, SystemExit)
    )


def test_a_run_continues_with_its_id(tmp_path):
    """A checkpoint has the run's id, and a run that loads it continues under that id.

    Another rank's checkpoint is ignored.
    """
    first = DryRun(make(tmp_path), max_duration="1ba")
    first.init()
    first.fit()
    destination = first.logger.destinations[0]
    assert destination._feed.flush(SERVICE_SECONDS)
    saved = destination.state_dict()
    first.close()
    other = DryRun(make(tmp_path), max_duration="2ba")
    other.fire("init", "before_load")

    other.logger.destinations[0].load_state_dict(saved)
    other.fire("after_load")
    other.fit()
    other.close()
    stranger = DryRun(make(tmp_path), max_duration="1ba")
    stranger.fire("init", "before_load")
    stranger.logger.destinations[0].load_state_dict({**saved, "rank": 1})
    stranger.fit()
    stranger.close()

    ids = [records_of(path, "run")[0]["run_id"] for path in files_of(tmp_path)]
    assert ids[0] == ids[1] == saved["run_id"]
    assert ids[2] != ids[0]


def test_each_rank_is_a_run_of_the_group(tmp_path):
    """With `all_ranks`, the run is named after the rank, and a given id becomes one per rank."""
    destination = make(tmp_path, all_ranks=True, run_id="theid")
    run = DryRun(destination, rank=1, max_duration="1ba")

    run.init()
    run.fit()
    run.close()

    (path,) = files_of(tmp_path)
    (found,) = records_of(path, "run")
    assert (found["run_id"], found["display_name"], found["run_group"]) == (
        "theid-rank1",
        "dry-run-rank1",
        "dry-run",
    )


def test_the_name_may_have_any_placeholder_of_a_run(tmp_path):
    """They are those documented for `format_run_name`; with `{rank}` in it, the rank isn't appended again."""
    run = DryRun(make(tmp_path, all_ranks=True, name="{run_name} {rank:02d}"), rank=1, max_duration="1ba")

    run.init()
    run.fit()
    run.close()

    (found,) = records_of(files_of(tmp_path)[0], "run")
    assert found["display_name"] == "dry-run 01"


def test_online_mode_without_a_key_is_an_error_of_the_lane(tmp_path, monkeypatch, caplog):
    """The terminal shows no prompt; one error says what to do, and training continues."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    destination = make(tmp_path, mode="online")
    run = DryRun(destination)

    run.init()
    run.fit()
    run.close()

    assert "Set WANDB_API_KEY, run `wandb login`, or pass mode='offline'." in caplog.text
    assert destination.counts.written_rows == 0
    assert destination.counts.failed_rows == destination.counts.rows > 0
    assert caplog.messages[-1].startswith("WandB was never open (RuntimeError: WandB needs an API key")


def test_a_required_tracker_without_a_key_stops_the_run_before_training(tmp_path, monkeypatch):
    """The error comes when the run begins, and says what to do."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))

    with pytest.raises(RuntimeError, match="Set WANDB_API_KEY"):
        Run(make(tmp_path, mode="online", require=True), run_name="mine").log_metrics({"loss": 1.0})


def test_it_is_not_the_global_run(tmp_path):
    """`wandb.run` stays the user's; ours is the attribute `run` while the run is open."""
    import wandb

    destination = make(tmp_path, run_id="mine")
    run = DryRun(destination)
    run.init()
    run.logger.log_metrics({"a": 1.0}, step=0)
    assert destination._feed.flush(SERVICE_SECONDS)

    assert wandb.run is None
    assert destination.run.id == "mine"

    run.close()
    assert destination.run is None


# Its effects on the process.

ALONE = """
import sys
import psutil
from destinations import WandB
from destinations.testing import DryRun
settings = {"x_disable_stats": True}
destination = WandB("p", mode="offline", dir=sys.argv[1], init_kwargs={"settings": settings}, close_seconds=300)
assert "wandb" not in sys.modules
run = DryRun(destination)
run.init()
run.fit()
run.logger.flush()
run.close()
print(destination.counts.written_rows, destination.counts.errors)
print(*(one.pid for one in psutil.Process().children()))
"""


def test_w_and_bs_own_process_ends_with_the_program(tmp_path):
    """It uses no network, prints nothing, and doesn't record secrets from the command line."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(0.0)
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("WANDB_")},
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), address),
            **{f"WANDB_{name}_DIR": str(tmp_path / name) for name in ("DATA", "CACHE", "CONFIG")},
            **WANDB,
        }
        done = subprocess.run(
            [sys.executable, "-c", ALONE, str(tmp_path), "--api-key", "hunter2"],
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * SERVICE_SECONDS,
            env=environment,
        )
        with pytest.raises(BlockingIOError):
            proxy.accept()

    # Other libraries may print to stderr too, such as deprecation warnings.
    counts, processes = done.stdout.splitlines()
    assert (done.returncode, counts) == (0, "6 {}"), done.stderr
    assert [pid for pid in processes.split() if psutil.pid_exists(int(pid))] == []
    assert re.findall(r"(?m)^(?:wandb|WandB|Traceback)\b.*", done.stderr) == []
    assert [
        str(path) for path in tmp_path.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()
    ] == []


def test_a_run_that_does_not_finish_in_time_shows_how_to_upload_it(tmp_path, monkeypatch, caplog):
    """The error names W&B's run folder and is counted."""
    destination = make(tmp_path, run_id="mine")
    run = DryRun(destination)
    run.init()
    run.logger.log_metrics({"a": 1.0}, step=0)
    assert destination._feed.flush(SERVICE_SECONDS)
    theirs = destination.run

    def finish(**_):
        raise TimeoutError("Timed out finishing run.")

    with monkeypatch.context() as patch:
        patch.setattr(theirs, "finish", finish)
        run.close()
    theirs.finish()

    assert destination.counts.errors == {"close: TimeoutError": 1}
    assert f"Its data is in {theirs.settings.sync_dir}; upload it with `wandb sync`" in caplog.text


# Arguments and names.


@pytest.mark.parametrize("options", [{"mode": "dryrun"}, {"step_metric": "_step"}, {"step_metric": ""}])
def test_bad_arguments_are_refused(options):
    """The constructor raises."""
    with pytest.raises(ValueError, match=f"^{next(iter(options))} must be"):
        WandB("p", **options)


@pytest.mark.parametrize("name", WEIRD_NAMES)
def test_any_name_becomes_one_that_w_and_b_accepts(name):
    """It's tried as a metric, as a medium (which is also a path), and as an artifact."""
    for key in (metric_key(name, "global_step"), media_key(name)):
        assert key
        assert key.encode()
    assert not media_key(name).startswith(("/", ".."))
    assert len(media_key(name).encode()) <= 60
    assert len(artifact_name(f"id-{name}")) <= 128


@pytest.mark.parametrize("count", [1, 511, 512, 513, 1000, 1024, 1025, 5000])
def test_merged_bins_keep_all_counts(count):
    """Counts add up, and the outer edges stay."""
    counts, edges = few_bins(list(range(count)), [float(edge) for edge in range(count + 1)])

    assert len(counts) <= 512
    assert len(edges) == len(counts) + 1
    assert (sum(counts), edges[0], edges[-1]) == (sum(range(count)), 0.0, count)


def test_a_run_folder_is_sent(tmp_path, monkeypatch):
    """A whole run is sent to W&B, with everything in its folder.

    Sending it again sends and writes nothing.
    """
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    for name in ("DISABLE_GIT", "X_DISABLE_STATS", "X_DISABLE_MACHINE_INFO"):
        monkeypatch.setenv(f"WANDB_{name}", "true")
    written = RunDirectory(tmp_path / "old", run_id="abc", tags=["one"], notes="a note", keep_files="copy")
    with Run(loggers=[written], run_name="old", raise_errors=True) as run:
        run.log_hyperparameters({"optim": {"lr": 0.5}})
        for step in range(5):
            run.log_metrics({"loss": 2.0**-step}, step=step)
        for call in every_kind_of_record(tmp_path):
            call(run.logger)
        (tmp_path / "weights.bin").write_bytes(b"weights")
        run.upload_file("weights.bin", tmp_path / "weights.bin", overwrite=True)
    folder = FolderRun.open(tmp_path / "old")

    first = send(folder, "wandb:tests", cache=tmp_path / "cache")
    (path,) = files_of(tmp_path)
    second = send(folder, "wandb:tests", cache=tmp_path / "cache")

    assert (first.failures, first.missing, first.rows, first.is_over) == ([], [], 5, True)
    assert (second.rows, second.values, dict(second.records)) == (0, 0, {})
    assert files_of(tmp_path) == [path]
    (about,) = records_of(path, "run")[:1]
    assert about["run_id"].startswith("abc-")
    assert config_of(path)["optim"] == {"lr": 0.5}
    rows = rows_of(path)
    assert [(row["global_step"], row["loss"]) for row in rows if "loss" in row] == [
        (step, 2.0**-step) for step in range(5)
    ]
    names = {name.partition(".")[0] for row in rows for name in row}
    assert {"masked", "audio", "table", "text", "edges"} <= names
    assert "weights.bin" in {
        entry["path"]
        for artifact in records_of(path, "artifact")
        for entry in artifact["manifest"]["contents"]
    }
