"""`TensorBoard` files, read by TensorBoard's own reader and its HPARAMS plugin."""

import errno
import importlib
import io
import itertools
import math
import os
import pickle
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from destinations import TensorBoard
from destinations.background import RetryLaterError
from destinations.testing import DestinationContract, DryRun, RecordingDestination
from destinations.trackers.event_file import new_event_file, records
from destinations.trackers.tensorboard import TensorBoardSink
from events import Run, Timestamp

SECONDS = 60.0


@pytest.fixture(scope="module", autouse=True)
def package():
    """Imports what the first lane would import, which takes part of the time that close is allowed."""
    for name in ("tensorboard.summary.writer.record_writer", "destinations.trackers.tensorboard_summaries"):
        importlib.import_module(name)


def accumulator(folder):
    """Reads a folder as TensorBoard does, without sampling."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sizes = dict.fromkeys(("scalars", "images", "audio", "histograms", "tensors", "compressedHistograms"), 0)
    return EventAccumulator(str(folder), size_guidance=sizes).Reload()


def events(path):
    """Returns the events of a file."""
    from tensorboard.compat.proto.event_pb2 import Event

    return [Event.FromString(data) for data in records(path)]


def rows(folder):
    """Returns step and values of each event with scalars, in order."""
    return [row for path in sorted(Path(folder).glob("events.*")) for row in rows_of(path)]


def rows_of(path):
    """Returns step and values of each event of a file with scalars, in order."""
    found = []
    for event in events(path):
        scalars = [value for value in event.summary.value if value.HasField("simple_value")]
        if scalars:
            found.append((event.step, {value.tag: value.simple_value for value in scalars}))
    return found


def scalars(folder, tag):
    """Returns the steps and values that TensorBoard shows for a tag."""
    return [(point.step, point.value) for point in accumulator(folder).Scalars(tag)]


def logged(folder, *calls, **options):
    """Logs to a new run, closes it, and returns the destination."""
    destination = TensorBoard(folder, **options)
    run = DryRun(destination)
    run.init()
    for call in calls:
        call(run.logger)
    run.close()
    return destination


def resumed(folder, batch, saved, *calls):
    """Continues from a checkpoint, as a Trainer does, and closes the run."""
    destination = TensorBoard(folder)
    run = DryRun(destination)
    run.fire("init", "before_load")
    if batch:
        run.state.timestamp = run.state.timestamp.copy(epoch=1, batch=batch, sample=4 * batch)
        destination.load_state_dict(saved)
    run.fire("after_load", "fit_start")
    for call in calls:
        call(run.logger)
    run.close()


def metric(step, **values):
    """Returns a call that logs metrics."""
    return lambda logger: logger.log_metrics(values, step)


class TestTensorBoard(DestinationContract):
    @pytest.fixture
    def destination(self, tmp_path):
        """Returns a destination with a folder for each run."""
        self.folder = tmp_path / "logs"
        return TensorBoard(self.folder / "{run_name}")

    def read_metrics(self, destination):
        # By the file's number in this process: two folders may have the same tick of the file system's clock.
        files = sorted(self.folder.glob("*/*"), key=lambda path: int(path.name.rpartition(".")[2]))
        found = [row for file in files for row in rows_of(file)]
        # Written to disk, with two kinds of records.
        odd = {"lone\\udc80surrogate/metric": "lone\udc80surrogate"}
        return [(step, {odd.get(tag, tag): one for tag, one in values.items()}) for step, values in found]

    def read_output(self, destination):
        return {str(path): path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}

    def _has_metrics(self, destination, recording, except_names=None):
        """Compares with the values as float32, which is the precision of TensorBoard's scalars."""
        narrowed = RecordingDestination()
        for step, values in recording.metrics:
            with np.errstate(over="ignore"):
                narrowed.log_metrics({name: float(np.float32(one)) for name, one in values.items()}, step)
        super()._has_metrics(destination, narrowed, except_names)


def test_a_call_is_one_event(tmp_path):
    """It has all names of the call, its step and its time; the last event has the run's status."""
    ticks = itertools.count(1000)

    logged(tmp_path, metric(3, a=1.5, b=True), metric(4, b=2.0), clock=lambda: float(next(ticks)))

    (path,) = tmp_path.iterdir()
    first, *others = events(path)
    assert first.file_version == "brain.Event:2"
    assert first.wall_time == 1000.0
    assert [
        (event.step, event.wall_time, [(value.tag, value.simple_value) for value in event.summary.value])
        for event in others
    ] == [
        (3, 1001.0, [("a", 1.5), ("b", 1.0)]),
        (4, 1002.0, [("b", 2.0)]),
        (0, 1003.0, [("_hparams_/session_end_info", 0.0)]),
    ]


def test_the_file_equals_tensorboards_own_byte_for_byte(tmp_path):
    """Checksums are equal too, with either library."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    logged(tmp_path, metric(1, loss=0.5), metric(2, loss=0.25))

    (path,) = tmp_path.iterdir()
    expected = io.BytesIO()
    writer = RecordWriter(expected)
    for data in records(path):
        writer.write(data)
    assert path.read_bytes() == expected.getvalue()


def test_odd_numbers_and_names(tmp_path):
    """Numbers beyond float32 are infinite, other than UTF-8 is escaped, and an empty call writes no event."""
    values = {"huge": 2**2000, "less": -(2**2000), "wide": 1e300, "nan": math.nan, "损失 🙂": 2**53, "": 7}

    destination = logged(
        tmp_path,
        lambda logger: logger.log_metrics(values, 1),
        lambda logger: logger.log_metrics({}, 2),
        lambda logger: logger.log_metrics({"lone\udc80": 1.0}, 3),
        lambda logger: logger.destinations[0].log_metrics({"beyond": 1.0}, 2**70),
        metric(2**40, last=1.0),
    )

    found = rows(tmp_path)
    assert repr(found[0][1]) == repr(
        {"huge": math.inf, "less": -math.inf, "wide": math.inf, "nan": math.nan, "损失 🙂": 2.0**53, "": 7.0}
    )
    assert found[1:] == [(3, {"lone\\udc80": 1.0}), (2**40, {"last": 1.0})]
    assert (destination.counts.written_rows, destination.counts.failed_rows) == (4, 1)
    assert destination.counts.errors == {"metrics: ValueError": 1}


def test_many_sets_of_names_take_bounded_memory(tmp_path):
    """Only the newest sets of names are cached."""
    destination = TensorBoard(tmp_path, flush_seconds=SECONDS)
    run = DryRun(destination)
    run.init()

    for step in range(1000):
        run.logger.log_metrics({f"metric{step}": 1.0}, step)
    assert destination._feed.flush(SECONDS)
    kept = destination._sink._template.cache_info().currsize
    run.close()

    assert kept == 256
    assert [step for step, _ in rows(tmp_path)] == [*range(1000)]


def test_a_name_of_two_kinds_has_two_tags(tmp_path):
    """A TensorBoard tag has one kind of record, so the second kind is appended to its name."""
    logged(
        tmp_path,
        metric(1, loss=1.0),
        lambda logger: logger.log_text("falling", "loss"),
        lambda logger: logger.log_histogram([1.0, 2.0], "loss"),
        metric(2, loss=0.5),
    )

    found = accumulator(tmp_path)
    assert [point.step for point in found.Scalars("loss")] == [1, 2]
    assert found.Tensors("loss/text")[0].tensor_proto.string_val == [b"falling"]
    assert found.Histograms("loss/histogram")[0].histogram_value.num == 2.0


def test_media_are_unchanged(tmp_path):
    """Pixels, samples, counts, points and texts come back, each at its step."""
    image = np.arange(48, dtype=np.uint8).reshape(3, 4, 4)
    mask = np.zeros((4, 4), np.uint8)
    mask[0] = 1
    sound = np.array([[0.0, 0.5, -0.5, 1.0]] * 2, np.float32)
    points = np.arange(12, dtype=np.float32).reshape(4, 3)
    video = np.zeros((3, 3, 8, 10), np.uint8)
    video[1], video[2] = 128, 255

    logged(
        tmp_path,
        lambda logger: logger.log_images(image, "image", step=5),
        lambda logger: logger.log_images(
            image, "masked", step=6, masks={"truth": mask}, mask_class_labels={1: "c|at"}
        ),
        lambda logger: logger.log_images([image, image], "two", step=7),
        lambda logger: logger.log_audio(sound, 8000, "sound", 8),
        lambda logger: logger.log_video(video, 10, "video", 9),
        lambda logger: logger.log_histogram([1.0, 2.0, 2.0, math.nan], "histogram", 10, bins=2),
        lambda logger: logger.log_point_cloud(points, "points", 11, colors=np.ones((4, 4))),
        lambda logger: logger.log_table(["a|b", "c"], [[1, None], ["x\ny", 0.5]], "table", 12),
        lambda logger: logger.log_traces({"trace": {"a": [1, None]}}),
    )

    found = accumulator(tmp_path)
    (plain,) = found.Images("image")
    assert (plain.step, plain.width, plain.height) == (5, 4, 4)
    assert np.array_equal(_pixels(plain.encoded_image_string), np.moveaxis(image, 0, -1))
    (original,), (overlay,) = found.Images("masked"), found.Tensors("masked/truth")
    assert np.array_equal(_pixels(original.encoded_image_string), np.moveaxis(image, 0, -1))
    laid_over = _pixels(overlay.tensor_proto.string_val[2])
    assert np.array_equal(laid_over[1:], np.moveaxis(image, 0, -1)[1:])
    assert not np.array_equal(laid_over[0], np.moveaxis(image, 0, -1)[0])
    assert "| 1 | c\\|at | `#" in found.summary_metadata["masked/truth"].summary_description
    width, height, *pngs = found.Tensors("two")[0].tensor_proto.string_val
    assert (width, height, len(pngs)) == (b"4", b"4", 2)
    (heard,) = found.Audio("sound")
    assert (heard.step, heard.sample_rate, heard.length_frames) == (8, 8000, 4)
    assert heard.encoded_audio_string[:4] == b"RIFF"
    with Image.open(io.BytesIO(found.Images("video")[0].encoded_image_string)) as moving:
        assert (moving.format, moving.n_frames, moving.size, moving.info["duration"]) == (
            "GIF",
            3,
            (10, 8),
            100,
        )
    (histogram,) = found.Histograms("histogram")
    assert histogram.histogram_value.bucket == [1.0, 2.0]
    assert histogram.histogram_value.bucket_limit == [1.5, 2.0]
    assert (histogram.histogram_value.num, histogram.histogram_value.sum) == (3.0, 5.0)
    assert histogram.histogram_value.sum_squares == pytest.approx(9.0)
    vertices, colors = found.Tensors("points_VERTEX")[0], found.Tensors("points_COLOR")[0]
    assert struct.unpack("<12f", vertices.tensor_proto.tensor_content) == tuple(range(12))
    assert colors.tensor_proto.tensor_content == b"\xff" * 12
    assert _text(found, "table") == "| a\\|b | c |\n| --- | --- |\n| 1 | None |\n| x\\\\ny | 0.5 |"
    assert _text(found, "traces/trace") == '    {\n     "a": [\n      1,\n      null\n     ]\n    }\n'


def _pixels(data):
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image)


def _text(found, tag):
    (text,) = found.Tensors(tag)[0].tensor_proto.string_val
    return text.decode()


def test_a_video_file_becomes_a_gif(tmp_path):
    """MP4 is decoded, and GIF is kept; any other file is counted and affects nothing else."""
    from destinations.media import mp4_bytes

    frames = np.zeros((4, 3, 16, 16), np.uint8)
    frames[2:] = 255
    (tmp_path / "video.mp4").write_bytes(mp4_bytes(frames, 8))
    gif = io.BytesIO()
    Image.new("L", (3, 2)).save(gif, "GIF")

    destination = logged(
        tmp_path / "run",
        lambda logger: logger.log_video(tmp_path / "video.mp4", None, "mp4", 1),
        lambda logger: logger.log_video(gif.getvalue(), None, "gif", 1),
        lambda logger: logger.log_video(b"neither", None, "neither", 1),
        metric(1, loss=1.0),
    )

    found = accumulator(tmp_path / "run")
    with Image.open(io.BytesIO(found.Images("mp4")[0].encoded_image_string)) as moving:
        assert (moving.format, moving.size, moving.n_frames) == ("GIF", (16, 16), 2)
    assert found.Images("gif")[0].encoded_image_string == gif.getvalue()
    assert found.Tags()["scalars"] == ["loss"]
    assert destination.counts.errors == {"video 'neither': RecordError": 1}


def test_long_tables_are_cut(tmp_path):
    """They end after a thousand rows, with a line that counts the others."""
    logged(tmp_path, lambda logger: logger.log_table(["a"], [[one] for one in range(1200)], "table"))

    lines = _text(accumulator(tmp_path), "table").splitlines()
    assert len(lines) == 1004
    assert lines[-1] == "(200 more rows)"


def test_hyperparameters_are_in_the_runs_own_file(tmp_path):
    """The metrics' file has joined names, values of each type, and the session's start and end."""
    from tensorboard.plugins.hparams import metadata

    parameters = {"lr": 0.1, "bias": True, "model": {"name": "cnn", "sizes": [1, 2]}, "none": None}
    odd = {"nan": math.nan, "huge": 2**2000, "empty": {}}

    logged(
        tmp_path,
        lambda logger: logger.log_hyperparameters(parameters),
        lambda logger: logger.log_hyperparameters({"model": {"depth": 3}, **odd}),
        metric(1, loss=1.0),
        lambda logger: logger.log_hyperparameters({"late": 1}),
    )

    found = accumulator(tmp_path)
    contents = found.summary_metadata
    start = metadata.parse_session_start_info_plugin_data(
        contents["_hparams_/session_start_info"].plugin_data.content
    )
    end = metadata.parse_session_end_info_plugin_data(
        contents["_hparams_/session_end_info"].plugin_data.content
    )
    values = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}
    assert values == {
        "lr": 0.1,
        "bias": True,
        "model.name": "cnn",
        "model.sizes": "[1, 2]",
        "model.depth": 3.0,
        "none": "null",
        "nan": '"NaN"',
        "huge": str(2**2000),
        "empty": "{}",
    }
    assert end.status == 1
    assert "| late | 1 |" in _text(found, "hyperparameters")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_the_hparams_tab_has_all_hyperparameters_and_metrics(tmp_path):
    """It includes names that only one run has, and each run's status."""
    from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.hparams import api_pb2, backend_context, get_experiment, list_session_groups

    runs = {
        "first": ({"lr": 0.1, "model": {"name": "cnn"}}, None),
        "second": ({"dropout": 0.5}, ValueError()),
    }
    for name, (hyperparameters, error) in runs.items():
        run = DryRun(TensorBoard(tmp_path / name))
        run.init()
        run.logger.log_hyperparameters(hyperparameters)
        run.logger.log_metrics({"loss": 0.5, name: 1.0}, 0)
        run.close(error)
    multiplexer = plugin_event_multiplexer.EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    provider = data_provider.MultiplexerDataProvider(multiplexer, str(tmp_path))
    context = RequestContext(), backend_context.Context(TBContext(data_provider=provider)), "any"

    experiment = get_experiment.Handler(*context, api_pb2.GetExperimentRequest()).run()
    request = api_pb2.ListSessionGroupsRequest(start_index=0, slice_size=9)
    request.allowed_statuses.extend(api_pb2.Status.values())
    for info in experiment.hparam_infos:
        request.col_params.add(hparam=info.name)
    groups = list_session_groups.Handler(*context, request).run().session_groups

    assert sorted(info.name for info in experiment.hparam_infos) == ["dropout", "lr", "model.name"]
    assert sorted(info.name.tag for info in experiment.metric_infos) == ["first", "loss", "second"]
    found = {group.name: (sorted(group.hparams), group.sessions[0].status) for group in groups}
    assert found == {
        "first": (["lr", "model.name"], api_pb2.STATUS_SUCCESS),
        "second": (["dropout"], api_pb2.STATUS_FAILURE),
    }


def test_a_resumed_run_replaces_repeated_steps(tmp_path):
    """Records after the checkpoint disappear; earlier ones stay, even at its step or above."""
    ticks = itertools.count(1000)
    destination = TensorBoard(tmp_path, clock=lambda: float(next(ticks)))
    run = DryRun(destination)
    run.init()
    for step in range(5):
        run.logger.log_metrics({"loss": float(step)}, step)
    run.logger.log_metrics({"by sample": 1.0}, 400)
    run.logger.log_images(np.zeros((4, 4), np.uint8), "eval", step=4)
    saved = pickle.loads(pickle.dumps(destination.state_dict()))  # noqa: S301  # our own bytes
    for step in range(4, 8):
        run.logger.log_metrics({"loss": 90.0 + step}, step)
    run.logger.log_metrics({"by sample": 99.0}, 500)
    run.close()

    resumed(tmp_path, 4, saved, metric(4, loss=44.0), metric(5, loss=55.0), metric(500, **{"by sample": 2.0}))
    # A second resume doesn't restore what the first one replaced.
    resumed(tmp_path, 4, saved, metric(4, loss=444.0))

    found = accumulator(tmp_path)
    loss = [(point.step, point.value) for point in found.Scalars("loss")]
    assert loss == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (4, 444.0)]
    assert [(point.step, point.value) for point in found.Scalars("by sample")] == [(400, 1.0)]
    assert [image.step for image in found.Images("eval")] == [4]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_resumed_trainer_shows_each_batch_once(tmp_path):
    """It resumes from a real checkpoint in the middle, although the first session continued after it."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from events import Trainer

    ticks = itertools.count(1000)

    def fit(**options):
        model = torch.nn.Linear(4, 2)
        data = DataLoader(TensorDataset(torch.randn(12, 4), torch.randint(0, 2, (12,))), batch_size=4)
        trainer = Trainer(
            model,
            data,
            max_duration="2ep",
            loss_fn=torch.nn.functional.cross_entropy,
            optimizers=torch.optim.SGD(model.parameters(), 0.1),
            run_name="mine",
            loggers=[TensorBoard(tmp_path / "logs", clock=lambda: float(next(ticks)))],
            **options,
        )
        with trainer:
            trainer.fit()

    fit(save_folder=tmp_path / "saved", save_interval="1ep")
    first = next(path for path in sorted(tmp_path.glob("saved/**/*")) if "ep1-" in path.name)
    before = scalars(tmp_path / "logs", "loss/train/total")
    fit(load_path=str(first))

    after = scalars(tmp_path / "logs", "loss/train/total")
    assert [step for step, _ in after] == [step for step, _ in before] == [*range(6)]
    assert after[:3] == before[:3]
    assert len(list((tmp_path / "logs").iterdir())) == 2


def test_a_new_run_in_a_folder_replaces_the_old_one(tmp_path):
    """Its first logged step replaces it; hyperparameters, and runs without training, replace nothing."""
    logged(tmp_path, metric(0, loss=1.0), metric(1, loss=2.0), metric(2, loss=3.0))
    logged(tmp_path, metric(1, accuracy=0.5))
    resumed(tmp_path, 0, None, lambda logger: logger.log_hyperparameters({"lr": 0.1}))
    before = scalars(tmp_path, "loss")

    resumed(tmp_path, 0, None, metric(1, loss=20.0))

    assert before == [(0, 1.0), (1, 2.0), (2, 3.0)]
    assert scalars(tmp_path, "loss") == [(0, 1.0), (1, 20.0)]


def test_a_torn_file_is_resumed(tmp_path):
    """A session killed in the middle of a record resumes from the complete ones."""
    logged(tmp_path, *(metric(step, loss=float(step)) for step in range(5)))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-7])

    resumed(tmp_path, 2, {"time": 0.0}, metric(2, loss=22.0))

    assert scalars(tmp_path, "loss") == [(0, 0.0), (1, 1.0), (2, 22.0)]


def test_two_writers_in_one_folder_are_independent(tmp_path):
    """Each has its own file with all its records, and neither replaces the other's."""
    first, second = TensorBoard(tmp_path), TensorBoard(tmp_path)
    runs = [DryRun(first), DryRun(second)]
    for run, destination in zip(runs, (first, second), strict=True):
        run.init()
        assert destination._feed.flush(SECONDS)
        run.fire("fit_start")

    for step in range(100):
        runs[step % 2].logger.log_metrics({f"from/{step % 2}": float(step)}, step)
    for run in runs:
        run.close()

    assert len(list(tmp_path.iterdir())) == 2
    assert sorted(step for step, _ in rows(tmp_path)) == [*range(100)]
    assert len(scalars(tmp_path, "from/0")) == len(scalars(tmp_path, "from/1")) == 50


def test_a_newer_file_sorts_later_even_if_the_clock_was_set_back(tmp_path):
    """TensorBoard reads by name; no name is used twice."""
    paths = []

    for seconds in (2000.0, 2000.0, 1000.0):
        path, descriptor = new_event_file(tmp_path, seconds)
        os.close(descriptor)
        paths.append(path)

    assert paths == sorted(set(paths))


def test_ranks_have_their_own_folders(tmp_path):
    """They have them on request; by default rank 1 writes nothing."""
    for all_ranks in (False, True):
        run = DryRun(TensorBoard(tmp_path / str(all_ranks), all_ranks=all_ranks), rank=1)
        run.init()
        run.logger.log_metrics({"loss": 1.0}, 1)
        run.close()

    assert [path.name for path in tmp_path.iterdir()] == ["True"]
    assert rows(tmp_path / "True" / "rank1") == [(1, {"loss": 1.0})]


def test_the_file_is_uploaded_on_request(tmp_path):
    """It's uploaded at the end of `fit` and at close, under a name of the run's."""
    store = RecordingDestination(stores_files=True)
    run = DryRun(TensorBoard(tmp_path, remote_folder="{run_name}/tensorboard"), store, max_duration="1ep")
    run.init()

    run.fit()
    ((name, at_fit_end),) = store.files.items()
    run.logger.log_metrics({"after": 1.0}, 9)
    run.close()

    (path,) = tmp_path.iterdir()
    assert name == f"dry-run/tensorboard/{path.name}"
    assert path.read_bytes().startswith(at_fit_end)
    assert len(_whole(at_fit_end, tmp_path)) == 4
    assert len(_whole(store.files[name], tmp_path)) == 6
    assert len(store.of("upload_file")) == 2


def _whole(data, folder):
    """Returns the records in a file's bytes; each must be complete."""
    copy = folder / "copy"
    copy.write_bytes(data)
    found = list(records(copy))
    copy.unlink()
    assert sum(len(record) + 16 for record in found) == len(data)
    return found


class FullDisk:
    """An `os.write` of a full disk, which accepts at most three bytes before it raises."""

    def __init__(self):
        self.is_full = False
        self.refused = threading.Semaphore(0)

    def __call__(self, descriptor, data):
        if not self.is_full:
            return os.write(descriptor, data)
        if len(data) % 2:
            return os.write(descriptor, data[:3])
        self.refused.release()
        raise OSError(errno.ENOSPC, "No space left on device")


class OnDisk(TensorBoard):
    """A TensorBoard that writes with a given function."""

    def __init__(self, folder, write, **options):
        super().__init__(folder, **options)
        self.write = write

    def make_sink(self, state):
        return TensorBoardSink(super().make_sink(state).folder, 1.0, self.write)


def test_a_temporarily_full_disk_loses_nothing(tmp_path):
    """Records wait, whole and in order, and training continues."""
    disk = FullDisk()
    destination = OnDisk(tmp_path, disk, flush_seconds=0.01, close_seconds=SECONDS)
    run = DryRun(destination)
    run.init()
    assert destination._feed.flush(SECONDS)
    disk.is_full = True

    for step in range(50):
        run.logger.log_metrics({"loss": float(step)}, step)
    assert disk.refused.acquire(timeout=SECONDS)
    assert disk.refused.acquire(timeout=SECONDS)
    disk.is_full = False
    run.close()

    assert scalars(tmp_path, "loss") == [(step, float(step)) for step in range(50)]
    assert destination.counts.written_rows == 50


def test_a_disk_that_stays_full_does_not_block_close(tmp_path, caplog):
    """At the deadline the waiting records are dropped and reported."""
    disk = FullDisk()
    destination = OnDisk(tmp_path, disk, flush_seconds=0.01, close_seconds=0.2)
    run = DryRun(destination)
    run.init()
    assert destination._feed.flush(SECONDS)
    disk.is_full = True
    run.logger.log_metrics({"loss": 1.0}, 1)
    thread = destination._feed._thread
    assert disk.refused.acquire(timeout=SECONDS)

    run.close()
    thread.join(SECONDS)

    assert not thread.is_alive()
    assert "No space left on device" in caplog.text
    assert "bytes were not written to" in caplog.text


def test_too_much_for_a_full_disk_waits_in_the_queue(tmp_path):
    """Beyond eight MiB in the writer the lane stops, and its own bounds apply."""
    disk = FullDisk()
    sink = TensorBoardSink(tmp_path / "run", 1.0, disk)
    sink.open()
    disk.is_full = True
    metrics = {f"{index:04d}" * 50: 1.0 for index in range(1000)}
    written = 0
    while sink._file.waiting_bytes <= 8 << 20:
        sink.log_metrics([(metrics, written, 1.0)])
        written += 1
    with pytest.raises(RetryLaterError):
        sink.log_metrics([(metrics, written, 1.0)])
    waiting = sink._file.waiting_bytes
    disk.is_full = False
    sink.close()

    assert 8 << 20 < waiting < 9 << 20
    assert [step for step, _ in rows(tmp_path / "run")] == [*range(written)]


def test_a_file_that_cannot_be_created_is_retried(tmp_path):
    """One file is left in the end."""
    (tmp_path / "run").write_text("in the way")
    sink = TensorBoardSink(tmp_path / "run", 1.0)

    with pytest.raises(RetryLaterError):
        sink.open()
    (tmp_path / "run").unlink()
    sink.open()
    sink.open()
    sink.log_metrics([({"loss": 1.0}, 1, 2.0)])
    sink.close()

    assert len(list((tmp_path / "run").iterdir())) == 1
    assert rows(tmp_path / "run") == [(1, {"loss": 1.0})]


# torch warns if this process may use only one processor.
def test_an_impossible_folder_raises_at_init(tmp_path):
    """The error names the obstacle, and the run continues without this destination."""
    (tmp_path / "file").write_text("")
    run = DryRun(TensorBoard(tmp_path / "file" / "run"), raise_errors=False)

    run.init()
    run.fit()
    run.close()

    assert run.logger.faults.counts == {("TensorBoard", "init", "NotADirectoryError"): 1}


def test_log_dir_and_path_are_known_while_the_run_is_open(tmp_path):
    """`log_dir` has its placeholders filled in; `path` is set once the file exists."""
    destination = TensorBoard(tmp_path / "{run_name}")
    run = DryRun(destination)
    before = (destination.log_dir, destination.path)
    run.init()
    assert destination._feed.flush(SECONDS)
    during = (destination.log_dir, destination.path)
    run.close()

    assert before == (destination.log_dir, destination.path) == (None, None)
    assert during == (tmp_path / "dry-run", next((tmp_path / "dry-run").iterdir()))


def test_tensorflow_and_torch_are_not_imported(tmp_path):
    """A whole run imports neither, even if both are installed.

    Importing and creating one doesn't import `tensorboard`.
    """
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('tensorflow was imported')")
    code = f"""
import sys
import destinations
assert "tensorboard" not in sys.modules
destination = destinations.TensorBoard({str(tmp_path / "run")!r}, close_seconds={SECONDS})
assert "tensorboard" not in sys.modules and "numpy" not in sys.modules
from destinations.testing import DryRun
run = DryRun(destination)
run.init()
run.logger.log_hyperparameters({{"lr": 0.1}})
run.fit()
run.close()
assert destination.counts.written_rows == 6, destination.counts
print([name for name in ("tensorflow", "torch") if name in sys.modules])
"""
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[3]}{os.pathsep}{tmp_path}"}

    finished = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=500,
    )

    assert (finished.stdout, finished.stderr) == ("[]\n", "")


@pytest.mark.parametrize("restored", [6, 0])
def test_rows_before_training_are_shown(tmp_path, restored):
    """Training without `batch_start` begins at its first `batch_end`, after its first row."""

    def train(first, steps):
        run = Run(TensorBoard(tmp_path), run_name="mine", raise_errors=True)
        run.state.timestamp = Timestamp(batch=first)
        with run:
            for step in range(first, first + steps):
                run.log_metrics({"loss": float(100 * first + step + steps)}, step)
                run.batch_end()

    train(0, 10)
    train(restored, 3)

    expected = {step: float(step + 10) for step in range(restored)}
    expected |= {step: float(100 * restored + step + 3) for step in range(restored, restored + 3)}
    assert [(point.step, point.value) for point in accumulator(tmp_path).Scalars("loss")] == [
        *expected.items()
    ]
