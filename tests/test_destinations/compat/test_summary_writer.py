"""`destinations.compat.SummaryWriter` beside `torch.utils.tensorboard.SummaryWriter`, with their readers."""

import gc
import inspect
import io
import logging
import wave

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter as Theirs

from destinations.compat import SummaryWriter
from destinations.runs import Run

METHODS = [
    name
    for name, method in inspect.getmembers(Theirs, inspect.isfunction)
    if not name.startswith("_") or name == "__init__"
]


@pytest.fixture
def both(tmp_path):
    """Returns a function that makes the same calls on both writers, and returns what their readers find."""

    def write(*calls, **arguments):
        for kind, folder in ((Theirs, "theirs"), (SummaryWriter, "ours")):
            with kind(str(tmp_path / folder), **arguments) as writer:
                for method, *given in calls:
                    getattr(writer, method)(*given)
        theirs = EventAccumulator(
            str(tmp_path / "theirs"), size_guidance=dict.fromkeys(("images", "audio"), 0)
        )
        return theirs.Reload(), Run.open(tmp_path / "ours")

    return write


def _points(run, name):
    series = run.series(name)
    return list(zip(series.step.tolist(), np.float32(series.value).tolist(), strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_accepts_each_parameter_of_the_original(name):
    """The parameters have the same names, order and defaults."""
    theirs = inspect.signature(getattr(Theirs, name)).parameters.values()

    ours = list(inspect.signature(getattr(SummaryWriter, name)).parameters.values())

    if [one.kind for one in ours[1:]] == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]:
        return  # It accepts anything, and warns that it isn't kept.
    assert [(one.name, one.kind, one.default) for one in ours][: len(theirs)] == [
        (one.name, one.kind, one.default) for one in theirs
    ]


VALUES = {
    "a float": 0.1,
    "a tensor": torch.tensor(0.25),
    "a tensor of one element": torch.tensor([[3.5]]),
    "a tensor with a gradient": torch.tensor(2.0, requires_grad=True),
    "a number of numpy": np.float64(1e-3),
    "a string": "1.5",
    "an integer": 2**20,
    "an infinity": float("inf"),
}


def test_scalars_of_any_type_are_equal(both):
    """Ours keeps each value that the original keeps, here in double precision."""
    theirs, ours = both(
        *(("add_scalar", name, value, 7) for name, value in VALUES.items()),
    )

    want = {name: [(event.step, event.value) for event in theirs.Scalars(name)] for name in VALUES}
    assert {name: _points(ours, name) for name in VALUES} == want
    assert ours.series("a float").value.tolist() == [0.1]


@pytest.mark.parametrize("steps", [(None, None, None), (5, 5, 5), (3, 1, 2, 2)])
def test_every_call_is_a_point_even_at_an_earlier_step(both, steps):
    """Without a step, at the same step, or at an earlier one, no value replaces another."""
    theirs, ours = both(*(("add_scalar", "loss", float(index), step) for index, step in enumerate(steps)))

    assert _points(ours, "loss") == [(event.step, event.value) for event in theirs.Scalars("loss")]


def test_given_walltimes_are_kept(both):
    """A given time applies only to its own row and text."""
    theirs, ours = both(
        ("add_scalar", "loss", 1.0, 1, 1234.5),
        ("add_text", "note", "as it was", 1, 2345.5),
        ("add_scalar", "loss", 2.0, 2),
    )

    times = ours.series("loss").time.tolist()
    assert times[0] == theirs.Scalars("loss")[0].wall_time == 1234.5
    assert times[1] == pytest.approx(theirs.Scalars("loss")[1].wall_time, abs=60)
    assert ours.records("texts")[0].time == 2345.5


def test_scalars_of_a_dict_are_named_below_the_main_tag(tmp_path):
    """The original writes a run for each; here they're metrics of one row."""
    with SummaryWriter(tmp_path / "ours") as writer:
        writer.add_scalars("loss", {"train": 1.0, "eval": torch.tensor(2.0)}, 4)

    run = Run.open(tmp_path / "ours")
    assert {name: _points(run, name) for name in run.metric_names()} == {
        "loss/train": [(4, 1.0)],
        "loss/eval": [(4, 2.0)],
    }


_pixels = np.random.default_rng(0).random((3, 6, 5))
IMAGES = {
    "CHW": _pixels,
    "HWC": torch.tensor(_pixels).permute(1, 2, 0) * 1.5 - 0.2,
    "HW": (_pixels[0] * 255).astype(np.uint8),
    "WH": np.float32(_pixels[0]),
    "NCHW": np.stack([_pixels * part for part in np.linspace(0, 1, 11)]),
    "NHWC": np.stack([_pixels[:1].transpose(1, 2, 0)] * 3),
    "chw": np.repeat(_pixels[:1], 4, axis=0),
}


def test_images_are_equal_pixel_by_pixel(both):
    """Any layout, clipped floats, grey and transparent images and batches have the original's pixels."""
    theirs, ours = both(*(("add_image", name, image, 2, None, name) for name, image in IMAGES.items()))

    for name in IMAGES:
        (event,) = theirs.Images(name)
        (image,) = ours.records("images", name)
        want = np.asarray(Image.open(io.BytesIO(event.encoded_image_string)))
        assert image.step == event.step == 2
        assert np.array_equal(np.asarray(Image.open(image.path)), want), name


def test_figures_are_equal_pixel_by_pixel_and_closed(both):
    """One figure, or two in a grid; each is closed unless `close=False`."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    def figure():
        made, axes = plt.subplots(figsize=(2, 1))
        axes.plot([1, 3, 2])
        return made

    kept = figure()
    theirs, ours = both(
        ("add_figure", "one", kept, 0, False),
        ("add_figure", "two", [figure(), figure()]),
        ("add_figure", "three", kept),
    )

    for name in ("one", "two", "three"):
        want = np.asarray(Image.open(io.BytesIO(theirs.Images(name)[0].encoded_image_string)))
        assert np.array_equal(np.asarray(Image.open(ours.records("images", name)[0].path)), want), name
    assert plt.get_fignums() == []


def test_a_histogram_counts_each_value(both):
    """With the original's bins, a number, edges or a numpy rule, every value is in a bin."""
    values = np.random.default_rng(0).normal(size=1000)
    bins = {"default": "tensorflow", "number": 10, "rule": "fd", "edges": [-10.0, 0.0, 10.0]}
    theirs, ours = both(*(("add_histogram", name, values, 1, how) for name, how in bins.items()))

    for name in bins:
        want = theirs.Histograms(name)[0].histogram_value
        (got,) = ours.records("histograms", name)
        assert sum(got.counts) == sum(want.bucket) == 1000
        moments = [got.moments[key] for key in ("min", "max", "sum")]
        assert moments == pytest.approx([want.min, want.max, want.sum])
    want = theirs.Histograms("edges")[0].histogram_value
    assert ours.records("histograms", "edges")[0].counts.tolist() == want.bucket[-2:]


def test_a_histogram_of_counts_keeps_counts_and_moments(both):
    """Counts from the program are kept as given."""
    theirs, ours = both(
        (
            "add_histogram_raw",
            "raw",
            0.0,
            2.0,
            5,
            6.0,
            9.0,
            torch.tensor([0.5, 1.0, 2.0]),
            np.array([1, 0, 4]),
            3,
        )
    )

    want = theirs.Histograms("raw")[0].histogram_value
    (got,) = ours.records("histograms", "raw")
    assert list(got.counts) == want.bucket
    assert list(got.edges) == [want.min, *want.bucket_limit]
    assert (got.moments["count"], got.moments["mean"]) == (want.num, want.sum / want.num)


def test_texts_and_sounds_are_equal(both):
    """A text is unchanged, and so is each sample of a sound."""
    sound = torch.sin(torch.linspace(0, 40, 800))[None] * 1.2
    theirs, ours = both(("add_text", "note", "# *as* is", 3), ("add_audio", "tone", sound, 3, 8000))

    (event,) = theirs.Tensors("note/text_summary")
    (text,) = ours.records("texts", "note")
    assert (text.step, text.text) == (event.step, event.tensor_proto.string_val[0].decode())
    tone = theirs.Audio("tone")[0].encoded_audio_string
    path = str(ours.records("audio", "tone")[0].path)
    with wave.open(io.BytesIO(tone)) as want, wave.open(path) as got:
        assert got.getframerate() == want.getframerate() == 8000
        assert got.readframes(-1) == want.readframes(-1)


def test_a_precision_recall_curve_is_a_table(both):
    """The table has a row for each threshold, with the counts that the original computes."""
    generator = np.random.default_rng(0)
    labels, predictions = generator.integers(2, size=50), torch.tensor(generator.random(50))
    theirs, ours = both(("add_pr_curve", "curve", labels, predictions, 2, 11))

    proto = theirs.Tensors("curve")[0].tensor_proto
    want = np.array(proto.float_val).reshape(6, 11)
    got = np.array(ours.table("curve", 2).rows)
    assert got[:, 0].tolist() == pytest.approx(np.linspace(0, 1, 11).tolist())
    assert np.allclose(got[:, 1:].T, want)


def test_videos_meshes_and_tensors_are_kept(tmp_path):
    """Two videos are joined side by side; vertices are coloured points; a tensor is a table."""
    with SummaryWriter(tmp_path / "ours") as writer:
        writer.add_video("clip", torch.rand(2, 3, 3, 16, 16), 1)
        writer.add_mesh(
            "shape", torch.rand(1, 4, 3), torch.full((1, 4, 3), 255, dtype=torch.int), global_step=1
        )
        writer.add_tensor("weights", torch.tensor([1.0, 2.0]), 1)
        writer.add_image_with_boxes("boxes", np.zeros((3, 20, 20)), np.array([[2, 2, 10, 10]]), labels="cat")

    run = Run.open(tmp_path / "ours")
    (video,), (points,) = run.records("videos"), run.records("point_clouds")
    assert (video.name, video.step, points.name, points.step) == ("clip", 1, "shape", 1)
    assert run.table("weights").rows == (("[2]", "[1.0, 2.0]"),)
    box = np.asarray(Image.open(run.records("images", "boxes")[0].path))
    assert box[2, 10].tolist() == [255, 0, 0]
    assert box[19, 19].tolist() == [0, 0, 0]


def test_further_hyperparameters_make_runs_in_subfolders(tmp_path):
    """The second call, or one with a name, makes its own run; nothing is overwritten."""
    with SummaryWriter(tmp_path / "sweep") as writer:
        writer.add_hparams({"lr": 0.1, "optimizer": "sgd"}, {"hparam/loss": 1.0})
        writer.add_hparams({"lr": 0.2}, {"hparam/loss": 0.5}, run_name="second", global_step=4)
        writer.add_hparams({"bias": True}, {}, run_name=".")

    first, second = Run.open(tmp_path / "sweep"), Run.open(tmp_path / "sweep/second")
    assert first.hyperparameters == {"lr": 0.1, "optimizer": "sgd", "bias": True}
    assert _points(first, "hparam/loss") == [(0, 1.0)]
    assert second.hyperparameters == {"lr": 0.2}
    assert _points(second, "hparam/loss") == [(4, 0.5)]


def test_rows_from_the_purged_step_on_are_moved_away(tmp_path):
    """A run that restarts at a step shows each step once, as in TensorBoard."""
    for first, arguments in ((0, {}), (3, {"purge_step": 3})):
        with SummaryWriter(tmp_path / "run", **arguments) as writer:
            for step in range(first, 5):
                writer.add_scalar("loss", first + step, step)

    assert _points(Run.open(tmp_path / "run"), "loss") == [(0, 0), (1, 1), (2, 2), (3, 6), (4, 7)]


def test_a_closed_writer_reopens_its_run(tmp_path):
    """A program may close after each epoch, as with the original; repeated steps are kept."""
    writer = SummaryWriter(tmp_path / "run")
    for _ in range(2):
        writer.add_scalar("loss", 1.0, 1)
        writer.flush()
        assert writer.file_writer.get_logdir() == str(tmp_path / "run")
        writer.close()
        writer.close()
        assert writer.file_writer is None

    run = Run.open(tmp_path / "run")
    assert _points(run, "loss") == [(1, 1.0), (1, 1.0)]
    assert run.status == "completed"


def test_an_unclosed_writer_ends_its_run_silently(tmp_path, caplog):
    """Programs written for the original need not close it."""
    writer = SummaryWriter(tmp_path / "run")
    writer.add_scalar("loss", 1.0, 1)

    with caplog.at_level(logging.WARNING):
        del writer
        gc.collect()

    assert Run.open(tmp_path / "run").status == "completed"
    assert caplog.text == ""


def test_an_exception_ends_the_run_as_failed(tmp_path):
    """The status shows how the block ended."""
    with pytest.raises(ZeroDivisionError), SummaryWriter(tmp_path / "run") as writer:
        writer.add_scalar("loss", 1 / 0)

    assert Run.open(tmp_path / "run").status == "failed"


def test_unsupported_calls_warn_once(tmp_path, caplog):
    """A graph, an embedding or a layout costs one line each, and the model isn't traced."""
    with SummaryWriter(tmp_path / "run") as writer, caplog.at_level(logging.WARNING, "destinations"):
        for _ in range(2):
            writer.add_graph(torch.nn.Linear(1, 1), "no input at all")
            writer.add_onnx_graph("model.onnx")
            writer.add_embedding(torch.rand(2, 2))
            writer.add_custom_scalars({})
            writer.add_custom_scalars_multilinechart(["a"])
            writer.add_custom_scalars_marginchart(["a"])

    assert [record.getMessage().split(" is not kept")[0] for record in caplog.records] == [
        "SummaryWriter: a graph",
        "SummaryWriter: an embedding",
        "SummaryWriter: a layout of custom scalars",
    ]


def test_a_bad_value_is_dropped(tmp_path, caplog):
    """An unreadable value raises nothing and is reported; the others are kept."""
    with caplog.at_level(logging.ERROR), SummaryWriter(tmp_path / "run") as writer:
        writer.add_scalar("loss", "many", 1)
        writer.add_image("image", np.zeros((3, 4, 4)), 1, dataformats="HW")
        writer.add_scalar("loss", 1.0, 2)

    run = Run.open(tmp_path / "run")
    assert _points(run, "loss") == [(2, 1.0)]
    assert run.records("images") == []
    assert "dataformats must have one letter" in caplog.text


def test_event_files_are_written_on_request(tmp_path):
    """TensorBoard reads the same scalars from the run folder."""
    with SummaryWriter(tmp_path / "run", event_files=True) as writer:
        writer.add_scalar("loss", 0.5, 3, 1234.5)

    (event,) = EventAccumulator(str(tmp_path / "run")).Reload().Scalars("loss")
    assert (event.step, event.value, event.wall_time) == (3, 0.5, 1234.5)
    assert _points(Run.open(tmp_path / "run"), "loss") == [(3, 0.5)]


def test_the_default_folder_is_named_by_date_host_and_comment(tmp_path, monkeypatch):
    """The constructor creates it, for programs that write beside it."""
    monkeypatch.chdir(tmp_path)

    with SummaryWriter(comment="_lr0.1") as writer:
        assert writer.log_dir == writer.get_logdir()
        assert writer.log_dir.startswith("runs/")
        assert writer.log_dir.endswith("_lr0.1")
        assert (tmp_path / writer.log_dir).is_dir()


def test_a_bucket_url_raises():
    """It would become a local folder of that name."""
    with pytest.raises(ValueError, match="log_dir must be a local folder"):
        SummaryWriter("s3://bucket/run")


# Other people's programs, which find ours in place of PyTorch's.


@pytest.mark.xdist_group("transformers")
def test_the_callback_of_transformers_logs_to_it(tmp_path):
    """Its `TensorBoardCallback` accepts our writer: it logs the arguments, and the loss of each step."""
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from transformers.integrations import TensorBoardCallback

    arguments = TrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to=[])
    state, control = TrainerState(is_world_process_zero=True), TrainerControl()
    callback = TensorBoardCallback(SummaryWriter(tmp_path / "run"))

    callback.on_train_begin(arguments, state, control)
    for state.global_step in range(3):
        callback.on_log(arguments, state, control, logs={"loss": 0.5**state.global_step, "eval_loss": 2.0})
    callback.on_train_end(arguments, state, control)

    run = Run.open(tmp_path / "run")
    assert _points(run, "train/loss") == [(0, 1.0), (1, 0.5), (2, 0.25)]
    assert _points(run, "eval/loss") == [(0, 2.0), (1, 2.0), (2, 2.0)]
    assert run.records("texts")[0].name == "args"
    assert run.status == "completed"


@pytest.mark.xdist_group("lightning")
def test_the_logger_of_lightning_logs_to_it(tmp_path, monkeypatch):
    """Its `TensorBoardLogger` creates our writer, and logs numbers to it."""
    from lightning.pytorch.loggers import TensorBoardLogger

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", SummaryWriter)
    logger = TensorBoardLogger(tmp_path, name="digits", version="first", default_hp_metric=False)

    for step in range(3):
        logger.log_metrics({"loss": torch.tensor(0.5**step)}, step)
    logger.experiment.add_histogram("weights", torch.arange(4.0), 2)
    logger.finalize("success")

    assert isinstance(logger.experiment, SummaryWriter)
    run = Run.open(tmp_path / "digits/first")
    assert _points(run, "loss") == [(0, 1.0), (1, 0.5), (2, 0.25)]
    assert run.records("histograms", "weights")[0].step == 2
