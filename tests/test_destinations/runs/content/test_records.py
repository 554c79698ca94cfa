"""Reads a run's records other than metrics."""

import json

import numpy as np
import pytest

from destinations.runs import MetricNotFoundError, Run
from tests.test_destinations.runs.written import Written

PIXELS = np.linspace(0, 255, 2 * 4 * 5 * 3).reshape(2, 4, 5, 3).astype(np.uint8)
MASK = np.arange(40).reshape(2, 4, 5) % 3
POINTS = np.arange(12, dtype=np.float32).reshape(4, 3)
COLORS = np.arange(12, dtype=np.uint8).reshape(4, 3)
SOUND = np.array([0, 1000, -1000, 32767], np.int16)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with records of every kind, logged by `RunDirectory`."""
    folder = tmp_path_factory.mktemp("runs")
    with Written(folder / "run", keep_files="copy") as written:
        logger = written.logger
        masks = {"prediction": MASK}
        logger.log_images(
            PIXELS,
            "val/Inputs",
            channels_last=True,
            step=3,
            masks=masks,
            mask_class_labels={0: "ground", 2: "sky"},
        )
        logger.log_images(PIXELS[:1] * np.int64(9), "Stretched", channels_last=True, step=4)
        logger.log_audio(SOUND, 8000, "Sound", step=1)
        logger.log_video(b"GIF89a...", fps=4, name="Video", step=2)
        logger.log_point_cloud(POINTS, "Cloud", step=5, colors=COLORS)
        logger.log_point_cloud(POINTS, "Bare", step=5)
        logger.log_histogram(np.array([0.0, 0.5, 1.0, np.nan]), "weights", step=6, bins=2)
        logger.log_text("hello", "Notes", step=7)
        logger.log_traces({"prompt": {"answer": [1, 2]}})
        rows = [[1, 0.5, True, "x", None], [2, None, False, "", None], [None, float("nan"), None, "1", None]]
        logger.log_table(["int", "float", "bool", "text", "none"], rows, "Misclassified", step=9)
        logger.log_table(["int"], [[7]], "Misclassified", step=12)
        source = folder / "model.pt"
        source.write_bytes(b"weights")
        logger.upload_file("weights/model.pt", source)
    return Run.open(folder / "run")


def test_images_come_back(run):
    """Pixels, masks, their classes and the metadata of each image are equal."""
    first, second = run.images("val/Inputs")

    assert (first.step, first.index, second.index, first.shape) == (3, 0, 1, (4, 5, 3))
    assert first.path.parent.parent.parent == run.path
    assert first.size == first.path.stat().st_size == len(first.read_bytes())
    assert np.array_equal(second.array(), PIXELS[1])
    assert first.load().size == (5, 4)
    assert np.array_equal(first.masks["prediction"].load(), MASK[0])
    assert first.masks["prediction"].overlay.exists()
    assert first.class_labels == {0: "ground", 2: "sky"}
    assert first.value_range is None
    assert run.images("Stretched")[0].value_range is not None


def test_images_are_chosen_by_name_and_step(run):
    """You can choose all images, a name, or a step.

    A step without any is empty, an unknown name is an error.
    """
    assert len(run.images()) == 3
    assert [image.name for image in run.images(step=4)] == ["Stretched"]
    assert run.images("Stretched", step=99) == []
    with pytest.raises(MetricNotFoundError, match=r"'val/Input'.*'val/Inputs'"):
        run.images("val/Input")


def test_a_sound_comes_back(run):
    """The WAV file has its samples and its rate."""
    (sound,) = run.audio("Sound")

    samples, rate = sound.load()

    assert (sound.sample_rate, rate, samples.shape) == (8000, 8000, (4, 1))
    assert samples[:, 0].tolist() == SOUND.tolist()


def test_a_point_cloud_comes_back(run):
    """Points and colours are equal; without colours it has None."""
    points, colors = run.point_clouds("Cloud")[0].load()
    _, none = run.point_clouds("Bare")[0].load()

    assert np.array_equal(points, POINTS)
    assert np.array_equal(colors, COLORS)
    assert none is None


def test_a_histogram_comes_back(run):
    """Counts, edges and moments are arrays and numbers."""
    (histogram,) = run.histograms("weights")

    assert (histogram.step, histogram.counts.tolist(), histogram.edges.tolist()) == (
        6,
        [1, 2],
        [0.0, 0.5, 1.0],
    )
    assert (histogram.moments["non_finite"], histogram.moments["mean"]) == (1, 0.5)


def test_texts_and_traces_come_back(run):
    """Each line has its step."""
    (text,) = run.texts("Notes")
    (trace,) = run.traces()

    assert (text.step, text.text) == (7, "hello")
    assert (trace.step, trace.traces) == (0, {"prompt": {"answer": [1, 2]}})


def test_a_video_comes_back(run):
    """A file that was logged unchanged keeps its format."""
    (video,) = run.videos("Video")

    assert (video.step, video.fps, video.format, video.read_bytes()) == (2, 4, "gif", b"GIF89a...")


def test_a_table_comes_back_with_its_types(run):
    """Integers, floats, booleans and texts keep their types; the default is the latest table of a name."""
    table = run.table("Misclassified", step=9)
    latest = run.table("Misclassified")

    assert table.columns == ("int", "float", "bool", "text", "none")
    assert table.rows[:2] == ((1, 0.5, True, "x", None), (2, None, False, "", None))
    assert np.isnan(table.rows[2][1])
    assert (table.rows[2][0], table.rows[2][3]) == (None, "1")
    assert table.to_dicts()[0]["text"] == "x"
    assert (latest.step, latest.rows) == (12, ((7,),))
    assert [(entry.step, entry.row_count) for entry in run.tables()] == [(9, 3), (12, 1)]
    with pytest.raises(MetricNotFoundError, match="Misclassified at step 10"):
        run.table("Misclassified", step=10)


def test_damaged_lines_are_counted_and_never_raise(tmp_path):
    """A torn last line is left out; invalid lines, and lines that lead out of the run, are counted."""
    with Written(tmp_path / "run") as written:
        written.log({"loss": 1.0}, 0)
    good = {"step": 1, "tag": "a", "type": "image", "path": "media/a/1.png"}
    lines = [
        json.dumps(good),
        "{not json",
        "[1, 2]",
        json.dumps({**good, "path": "../../etc/passwd"}),
        json.dumps({"type": "image"}),
        "\udcff\udcfe",
        json.dumps(good)[:20],
    ]
    (tmp_path / "run" / "media.jsonl").write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    (tmp_path / "run" / "texts.jsonl").write_text('{"name": "t", "text": "x"}\n\n{"name": "t"}\n')
    (tmp_path / "run" / "histograms.jsonl").write_text('{"name": "h", "counts": ["x"], "edges": 1}\n')

    run = Run.open(tmp_path / "run")

    assert [image.name for image in run.images()] == ["a"]
    assert [(text.step, text.text) for text in run.texts()] == [(None, "x")]
    assert run.histograms() == []
    assert run.damaged_lines() == {"media.jsonl": 5, "texts.jsonl": 1, "histograms.jsonl": 1}
