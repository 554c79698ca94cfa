"""Imports TensorBoard's event files, and compares the runs with TensorBoard's own reader."""

import io
import wave

import numpy as np
import PIL.Image
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto
from torch.utils.tensorboard import SummaryWriter

from destinations.run_directory import read_rows
from destinations.runs import Run
from destinations.runs.imports import import_runs

# Nothing is sampled.
EVERYTHING = dict.fromkeys(("scalars", "images", "audio", "histograms", "tensors"), 0)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Event files of PyTorch's writer, with both forms of values."""
    folder = tmp_path_factory.mktemp("tensorboard")
    random = np.random.default_rng(0)
    with SummaryWriter(folder / "sweep/a") as writer:
        for step in range(5):
            writer.add_scalar("loss", 1 / (step + 1), step, walltime=1000.0 + step)
            writer.add_scalar("acc", step / 7, step, walltime=1000.25 + step, new_style=True)
        writer.add_scalar("nan", float("nan"), 7, walltime=1007.0)
        writer.add_image("image", random.random((3, 8, 9)), 1, walltime=2000.0)
        writer.add_histogram("weights", random.normal(size=100), 2, walltime=2001.0)
        writer.add_histogram("equal", np.ones(10), 2)
        writer.add_audio("tone", np.sin(np.arange(800) / 9)[None], 3, 8000, walltime=2002.0)
        writer.add_text("words", "hello **there**", 4, walltime=2003.0)
        writer.add_pr_curve("curve", np.array([0, 1, 1]), np.array([0.1, 0.5, 0.9]), 1)
        writer.add_hparams({"lr": 0.1, "name": "adam"}, {"best": 0.5}, run_name="tuned")
    return folder


@pytest.fixture(scope="module")
def imported(logs, tmp_path_factory):
    """The runs, and the report."""
    root = tmp_path_factory.mktemp("imported")
    return root, import_runs(logs, root)


@pytest.fixture(scope="module")
def theirs(logs):
    """TensorBoard's own reader."""
    return EventAccumulator(str(logs / "sweep/a"), size_guidance=EVERYTHING).Reload()


@pytest.fixture(scope="module")
def run(imported):
    """The run with everything."""
    return Run.open(imported[0] / "sweep__a")


def test_each_folder_of_event_files_is_a_run(imported):
    """Its id is its path and a hash; what a run folder can't hold is counted."""
    root, report = imported
    runs = {Run.open(path).run_id.rpartition("-")[0]: Run.open(path) for path in root.iterdir()}

    assert runs.keys() == {"sweep/a", "sweep/a/tuned"}
    assert (report.runs, report.values, report.failures) == (2, 12, [])
    assert dict(report.records) == {"image": 1, "histogram": 2, "audio": 1, "text": 1}
    assert dict(report.left_out) == {"pr curves": 1}
    assert runs["sweep/a/tuned"].hyperparameters == {"lr": 0.1, "name": "adam"}
    assert runs["sweep/a/tuned"].status == "completed"
    assert runs["sweep/a"].status == "preempted"


def scalars_of(theirs, name):
    """Returns step, time and value of each scalar, in either form."""
    if name in theirs.Tags()["scalars"]:
        return [(one.step, one.wall_time, one.value) for one in theirs.Scalars(name)]
    return [(one.step, one.wall_time, one.tensor_proto.float_val[0]) for one in theirs.Tensors(name)]


@pytest.mark.parametrize("name", ["loss", "acc", "nan"])
def test_scalars_equal_tensorboards(run, theirs, name):
    """Steps and values are equal in both forms; values that were logged together are one row."""
    rows = [row for row in read_rows(run.path) if name in row.metrics]
    expected = scalars_of(theirs, name)

    np.testing.assert_array_equal(
        [(row.step, row.metrics[name]) for row in rows], [(step, value) for step, _, value in expected]
    )
    assert all(0 <= row.time - time < 1 for row, (_, time, _) in zip(rows, expected, strict=True))


def test_images_texts_and_sounds_equal_tensorboards(run, theirs):
    """Every pixel, sample and character is the same, with step and time."""
    (image,), (text,), (sound,) = run.images("image"), run.texts(), run.audio()
    their_image, their_sound = theirs.Images("image")[0], theirs.Audio("tone")[0]
    (words,) = theirs.Tensors("words/text_summary")[0].tensor_proto.string_val
    with wave.open(io.BytesIO(their_sound.encoded_audio_string)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")

    assert image.array().shape == (their_image.height, their_image.width, 3)
    np.testing.assert_array_equal(
        image.array(), np.array(PIL.Image.open(io.BytesIO(their_image.encoded_image_string)))
    )
    np.testing.assert_array_equal(sound.load()[0][:, 0], samples)
    assert (text.name, text.text, text.step) == ("words/text_summary", words.decode(), 4)
    assert [(one.step, one.time) for one in (image, sound, text)] == [(1, 2000.0), (3, 2002.0), (4, 2003.0)]
    assert sound.sample_rate == their_sound.sample_rate == 8000


def test_histograms_have_tensorboards_buckets(run, theirs):
    """Counts and edges are equal; a single value gets a bucket of width one."""
    their = theirs.Histograms("weights")[0].histogram_value
    (weights,), (equal,) = run.histograms("weights"), run.histograms("equal")

    counts = np.trim_zeros(np.array(their.bucket))
    np.testing.assert_array_equal(weights.counts, counts)
    np.testing.assert_allclose(weights.edges[[0, -1]], [their.min, their.max], rtol=1e-6)
    inner = their.bucket_limit[their.bucket.index(counts[0]) :][: len(counts) - 1]
    np.testing.assert_allclose(weights.edges[1:-1], inner, rtol=1e-6)
    assert (equal.edges.tolist(), equal.counts.tolist()) == ([0.5, 1.5], [10])


def test_resumed_run_has_the_rows_of_its_last_attempt(tmp_path):
    """TensorBoard shows the same after `purge_step`."""
    with SummaryWriter(tmp_path / "logs", filename_suffix=".1") as writer:
        for step in range(4):
            writer.add_scalar("loss", step, step)
    with SummaryWriter(tmp_path / "logs", purge_step=2, filename_suffix=".2") as writer:
        writer.add_scalar("loss", 9, 2)

    import_runs(tmp_path / "logs", tmp_path / "runs")

    theirs = EventAccumulator(str(tmp_path / "logs"), size_guidance=EVERYTHING).Reload()
    (folder,) = (tmp_path / "runs").iterdir()
    ours = [(row.step, row.metrics["loss"]) for row in read_rows(folder)]
    assert ours == [(step, value) for step, _, value in scalars_of(theirs, "loss")]
    assert ours == [(0, 0), (1, 1), (2, 9)]


def test_damaged_values_do_not_stop_the_others(tmp_path):
    """The event files have a broken image, sound, histogram, and hyperparameters."""
    writer = EventFileWriter(str(tmp_path / "logs"))
    for step, (plugin, tensor) in enumerate(
        {
            "images": make_tensor_proto([b"8", b"9", b"not so"]),
            "audio": make_tensor_proto([b"not so"]),
            "histograms": make_tensor_proto([1.0, 2.0]),
            "scalars": make_tensor_proto([1.0, 2.0]),
            "hparams": make_tensor_proto(0.0),
        }.items()
    ):
        value = Summary.Value(tag=plugin, tensor=tensor)
        value.metadata.plugin_data.plugin_name = plugin
        value.metadata.plugin_data.content = b"\xff\xff" if plugin == "hparams" else b""
        writer.add_event(Event(step=step, wall_time=1000.0, summary=Summary(value=[value])))
    good = Summary(value=[Summary.Value(tag="loss", simple_value=0.5)])
    writer.add_event(Event(step=9, wall_time=1000.0, summary=good))
    writer.close()

    report = import_runs(tmp_path / "logs", tmp_path / "runs")

    assert (report.runs, report.values, report.failure_count, dict(report.left_out)) == (1, 1, 5, {})
    assert [text.partition(": ")[2] for text in report.failures] == [
        f"1 unreadable {plugin}" for plugin in ("images", "audio", "histograms", "scalars", "hparams")
    ]


def test_log_that_grew_is_imported_again(tmp_path):
    """A torn end is skipped, and read again later."""
    with SummaryWriter(tmp_path / "logs") as writer:
        writer.add_scalar("loss", 1.0, 0)
        writer.flush()
        first = import_runs(tmp_path / "logs", tmp_path / "runs")
        writer.add_scalar("loss", 0.5, 1)
        writer.add_scalar("loss", 0.25, 2)
    (file,) = (tmp_path / "logs").iterdir()
    file.write_bytes(file.read_bytes()[:-3])

    again = import_runs(tmp_path / "logs", tmp_path / "runs")
    retried = import_runs(tmp_path / "logs", tmp_path / "runs")

    assert len(list(EventFileLoader(str(file)).Load())) == 3
    assert [(one.values, one.failure_count) for one in (first, again, retried)] == [(1, 0), (2, 1), (2, 1)]
