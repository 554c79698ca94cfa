"""Images, sounds, videos, points, histograms, tables, texts and traces."""

import io
import json
import logging
import math
import subprocess
import sys
import wave

import av
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from destinations import RunDirectory, media
from destinations.background import Lane
from events import BinnedValues, RecordError, Run


def index_of(tmp_path, name="media.jsonl"):
    """Returns the lines of an index."""
    return [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]


def opened(tmp_path, record):
    """Returns the pixels of a listed image."""
    return np.asarray(Image.open(tmp_path / "run" / record["path"]))


RAMP = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (RAMP, RAMP),
        (RAMP > 100, (RAMP > 100) * 255),
        ((RAMP / 255).astype(np.float32), RAMP),
        (RAMP.astype(np.int16), RAMP),
        (RAMP.astype(np.int64), RAMP),
        (RAMP.astype(np.uint16) * 257, np.round(RAMP / 220 * 255)),
        (RAMP.astype(np.int32) * 10 - 5, np.round(RAMP / 220 * 255)),
        (np.array([[-0.5, 0.2], [2.0, 1.0]], np.float16), np.array([[0, 51], [255, 255]])),
        (np.full((2, 2), 2.0), np.full((2, 2), 255)),
        (np.full((2, 2), 700), np.zeros((2, 2))),
        (np.array([[0.0, math.nan], [1.0, math.inf]]), np.array([[0, 0], [255, 255]])),
        (np.array([[math.nan]]), np.array([[0]])),
    ],
    ids=[
        "uint8",
        "bool",
        "float",
        "int16",
        "int64",
        "uint16",
        "stretched",
        "clipped",
        "white",
        "flat",
        "nan",
        "only nan",
    ],
)
def test_pixels_are_scaled_as_documented(image, expected):
    """uint8 and small integers stay, bools fill the range, floats are clipped, other integers stretched."""
    (pixels,) = media.iter_images(image)

    assert pixels.array.dtype == np.uint8
    assert np.array_equal(pixels.array, expected)


@pytest.mark.parametrize(
    ("images", "channels_last", "shapes"),
    [
        (np.zeros((5, 6)), False, [(5, 6)]),
        (np.zeros((1, 5, 6)), False, [(5, 6)]),
        (np.zeros((3, 5, 6)), False, [(5, 6, 3)]),
        (np.zeros((5, 6, 4)), True, [(5, 6, 4)]),
        (np.zeros((2, 3, 5, 6)), False, [(5, 6, 3)] * 2),
        (np.zeros((2, 5, 6, 3)), True, [(5, 6, 3)] * 2),
        ([np.zeros((5, 6)), torch.zeros(3, 7, 8)], False, [(5, 6), (7, 8, 3)]),
        (torch.zeros(2, 3, 5, 6, dtype=torch.bfloat16, requires_grad=True), False, [(5, 6, 3)] * 2),
        (Image.new("RGB", (6, 5)), False, [(5, 6, 3)]),
        ([Image.new("CMYK", (6, 5)), Image.new("L", (2, 1))], False, [(5, 6, 4), (1, 2)]),
    ],
)
def test_images_come_in_any_layout(images, channels_last, shapes):
    """Images may be grey, CHW, HWC, NCHW, NHWC, lists, torch, bfloat16 and PIL."""
    found = [pixels.array.shape for pixels in media.iter_images(images, channels_last)]

    assert found == shapes


GREY = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_a_file_of_16_bits_is_the_picture_of_its_numbers(tmp_path, suffix):
    """A logged path works too; its file is read during the call."""
    Image.fromarray(GREY).save(tmp_path / f"depth.{suffix}")

    with Run(loggers=[RunDirectory(tmp_path / "run")], run_name="run") as run:
        run.log_images([tmp_path / f"depth.{suffix}", Image.fromarray(GREY), GREY], "depth")

    pictures = [opened(tmp_path, one) for one in index_of(tmp_path)]
    assert [len(np.unique(one)) for one in pictures] == [256] * 3
    assert all(np.array_equal(one, pictures[0]) for one in pictures)
    assert [one["value_range"] for one in index_of(tmp_path)] == [[0.0, 65535.0]] * 3


@pytest.mark.parametrize(
    "image", [np.zeros((2, 5, 6)), np.zeros((5,)), np.array([["a"]]), np.zeros((0, 3)), b"no image"]
)
def test_non_images_raise(image):
    """Arrays of other shapes or types, and bytes in no image format, raise a clear error."""
    with pytest.raises(RecordError, match="image must"):
        list(media.iter_images(image))


def test_images_are_written_and_listed(drive, tmp_path):
    """An image is a PNG with a line: stable-pretraining's fields, then name, index, time, size and shape."""
    images = np.stack([np.full((3, 4, 5), 10, np.uint8), np.full((3, 4, 5), 20, np.uint8)])
    run = drive().fit()

    run.logger.log_images(images, "val/images", step=7)
    images[:] = 0
    run.close()

    first, second = index_of(tmp_path)
    assert {
        key: first[key] for key in ("step", "tag", "type", "path", "caption", "name", "index", "shape")
    } == {
        "step": 7,
        "tag": "val/images",
        "type": "image",
        "path": "media/val__images/00000007_0.png",
        "caption": None,
        "name": "val/images",
        "index": 0,
        "shape": [3, 4, 5],
    }
    assert first["size"] == (tmp_path / "run" / first["path"]).stat().st_size
    assert (opened(tmp_path, first) == 10).all()
    assert (opened(tmp_path, second) == 20).all()


def test_the_same_name_and_step_twice_keeps_both(drive, tmp_path):
    """This also holds in a later session, and for names that are spelled alike on disk."""
    for value in (1, 2):
        run = drive().fit()
        run.logger.log_images(np.full((2, 2), value, np.uint8), "a/b", step=1)
        run.logger.log_images(np.full((2, 2), value + 10, np.uint8), "a__b", step=1)
        run.close()

    records = index_of(tmp_path)
    assert len({record["path"] for record in records}) == 4
    assert [int(opened(tmp_path, record)[0, 0]) for record in records] == [1, 11, 2, 12]


def test_masks_are_indexed_pngs_beside_overlays(drive, tmp_path):
    """Pixel values of the mask file are the classes.

    The overlay only changes pixels of classes other than 0.
    """
    image = np.full((3, 2, 2), 100, np.uint8)
    mask = torch.tensor([[0, 1], [2, 255]])
    run = drive().fit()

    run.logger.log_images(
        image, "seg", step=0, masks={"truth": mask}, mask_class_labels={0: "background", 1: "cat"}
    )
    run.close()

    (record,) = index_of(tmp_path)
    assert record["mask_class_labels"] == {"0": "background", "1": "cat"}
    paths = record["masks"]["truth"]
    indexed = Image.open(tmp_path / "run" / paths["path"])
    overlay = np.asarray(Image.open(tmp_path / "run" / paths["overlay"]))
    assert indexed.mode == "P"
    assert np.array_equal(np.asarray(indexed), mask.numpy())
    assert overlay[0, 0].tolist() == [100, 100, 100]
    assert overlay[0, 1].tolist() != [100, 100, 100]


def test_masks_of_many_classes_are_grey_of_16_bits():
    """A class index above 255 is kept."""
    image = Image.open(io.BytesIO(media.mask_png(np.array([[0, 40_000]], np.uint16))))

    assert np.asarray(image).tolist() == [[0, 40_000]]


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.float32])
def test_pixels_to_ignore_keep_their_mask(dtype):
    """-1 is written as 255."""
    (mask,) = media.iter_masks(np.array([[-1, 3]], dtype))

    assert (mask.dtype, mask.tolist()) == (np.uint16, [[255, 3]])


@pytest.mark.parametrize("mask", [np.array([[0.5]]), np.array([[-2]]), np.array([[70_000]])])
def test_non_masks_raise(mask):
    """Fractions, negative and huge classes are errors."""
    with pytest.raises(RecordError, match="mask must hold class indices"):
        list(media.iter_masks(mask))


@pytest.mark.parametrize(
    ("audio", "channels", "samples"),
    [
        (np.array([0.0, 1.0, -1.0, 2.0, math.nan], np.float32), 1, [0, 32767, -32767, 32767, 0]),
        (torch.tensor([[0.5], [-0.5]], dtype=torch.bfloat16), 2, [16384, -16384]),
        (np.array([1, -2], np.int16), 1, [1, -2]),
        (np.array([1 << 20], np.int32), 1, [16]),
        (np.array([128, 0], np.uint8), 1, [0, -32768]),
    ],
)
def test_sounds_become_wav(audio, channels, samples):
    """Floats are clipped to their range, integers are scaled by theirs, and channels are interleaved."""
    with wave.open(io.BytesIO(media.wav_bytes(audio, 8000))) as file:
        content = np.frombuffer(file.readframes(file.getnframes()), "<i2").tolist()

        assert (file.getnchannels(), file.getframerate(), file.getsampwidth()) == (channels, 8000, 2)
    assert content == samples


def test_a_video_of_frames_becomes_mp4(drive, tmp_path):
    """PyAV reads back the same number of frames, with sides made even, at the same rate."""
    frames = torch.zeros(7, 3, 9, 11)
    frames[:, 0] = torch.linspace(0, 1, 7)[:, None, None]
    run = drive().fit()

    run.logger.log_video(frames, fps=5, name="rollout", step=2)
    run.close()

    (record,) = index_of(tmp_path)
    assert (record["fps"], record["format"], record["shape"]) == (5, "mp4", [7, 3, 9, 11])
    with av.open(str(tmp_path / "run" / record["path"])) as container:
        pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert container.streams.video[0].average_rate == 5
    assert [picture.shape for picture in pictures] == [(10, 12, 3)] * 7
    assert pictures[0][..., 0].mean() < 20
    assert pictures[-1][..., 0].mean() > 200


def test_encoded_videos_are_copied_unchanged(drive, tmp_path):
    """Bytes and files are copied unchecked before the call returns."""
    source = tmp_path / "clip.webm"
    source.write_bytes(b"clip")
    run = drive().fit()

    run.logger.log_video(b"GIF89a", name="gif", step=0)
    run.logger.log_video(source, name="clip", step=0)
    source.unlink()
    run.close()

    gif, clip = index_of(tmp_path)
    assert (gif["format"], (tmp_path / "run" / gif["path"]).read_bytes()) == ("gif", b"GIF89a")
    assert (clip["format"], (tmp_path / "run" / clip["path"]).read_bytes()) == ("webm", b"clip")


def test_a_histogram_of_counts_and_edges_is_written_as_it_is(drive, tmp_path):
    """The values are not binned again."""
    run = drive().fit()

    run.logger.log_histogram(BinnedValues([2, 1], [0.0, 1.0, 4.0], max=3.5), "weights", step=4)
    run.close()

    [record] = index_of(tmp_path, "histograms.jsonl")
    assert (record["counts"], record["edges"], record["max"]) == ([2, 1], [0.0, 1.0, 4.0], 3.5)


def test_histograms_have_counts_edges_and_moments(drive, tmp_path):
    """A million values, some not finite, become one line."""
    values = torch.randn(1_000_000, dtype=torch.float64)
    values[:3] = torch.tensor([math.nan, math.inf, -math.inf])
    run = drive().fit()

    run.logger.log_histogram(values, "weights", step=1, bins=32)
    run.logger.log_histogram(torch.tensor([1, 2, 3, 9]), "edges", step=1, bins=[0, 2, 4])
    run.logger.log_histogram([math.nan], "nothing", step=1)
    run.close()

    weights, edges, nothing = index_of(tmp_path, "histograms.jsonl")
    assert (weights["count"], weights["non_finite"], sum(weights["counts"]), len(weights["edges"])) == (
        10**6,
        3,
        10**6 - 3,
        33,
    )
    assert weights["mean"] == pytest.approx(values[3:].mean().item())
    assert weights["std"] == pytest.approx(values[3:].std(correction=0).item())
    assert (edges["counts"], edges["edges"], edges["max"]) == ([1, 2], [0.0, 2.0, 4.0], 9.0)
    assert (nothing["counts"], nothing["mean"], nothing["non_finite"]) == ([], None, 1)


def test_tables_texts_and_traces_are_written(drive, tmp_path):
    """Tables are CSV with the types of their columns; texts and traces are lines."""
    run = drive().fit()

    run.logger.log_table(["a", "b", "c"], [[1, "x,\n", None], [2.5, 'y"', True]], "results", step=3)
    run.logger.log_text("hello\nworld", "notes", step=4)
    run.logger.log_traces({"stack": {1: {2}}, "nan": math.nan})
    run.close()

    (table,) = index_of(tmp_path, "tables.jsonl")
    (text,) = index_of(tmp_path, "texts.jsonl")
    (trace,) = index_of(tmp_path, "traces.jsonl")
    assert table["columns"] == [
        {"name": "a", "type": "float"},
        {"name": "b", "type": "str"},
        {"name": "c", "type": "bool"},
    ]
    assert pd.read_csv(tmp_path / "run" / table["path"])["b"].tolist() == ["x,\n", 'y"']
    assert (text["step"], text["name"], text["text"]) == (4, "notes", "hello\nworld")
    assert trace["traces"] == {"stack": {"1": "{2}"}, "nan": "NaN"}


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/abs", "..", "C:\\x", "", "a\0b"])
def test_a_name_cannot_leave_the_folder(drive, tmp_path, name):
    """Names that would lead outside are refused at the call, for all kinds of files."""
    run = drive().fit()

    for call in (
        lambda: run.logger.log_images(np.zeros((2, 2)), name),
        lambda: run.logger.log_audio(np.zeros(4), 8000, name),
        lambda: run.logger.log_video(b"x", name=name),
        lambda: run.logger.log_point_cloud(np.zeros((1, 3)), name),
    ):
        with pytest.raises(RecordError, match="leads out of the run folder"):
            call()
    run.close()

    assert {path.name for path in tmp_path.iterdir()} == {"run"}


@pytest.mark.parametrize("name", ["ünï cödé", "a" * 400, ".hidden", "what?*:|", "tab\tname", "新", "x:0"])
def test_any_other_name_has_a_folder(drive, tmp_path, name):
    """Long, hidden, odd and foreign names become files below media/."""
    run = drive().fit()

    run.logger.log_images(np.zeros((2, 2)), name, step=0)
    run.close()

    (record,) = index_of(tmp_path)
    assert record["tag"] == name
    assert (tmp_path / "run" / record["path"]).is_file()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda log: log.log_audio(np.zeros(4), 0), "sample rate"),
        (lambda log: log.log_audio(np.zeros((2, 2, 2)), 8000), "must have shape"),
        (lambda log: log.log_video(np.zeros((2, 3, 4, 4))), "fps"),
        (lambda log: log.log_video(np.zeros((0, 3, 4, 4)), fps=3), "frames"),
        (lambda log: log.log_images(np.zeros((2, 5, 6))), "1, 3 or 4 channels"),
        (lambda log: log.log_images("/no/such/file.png"), "No such file"),
        (lambda log: log.log_histogram(np.array(["a"])), "needs numbers"),
    ],
)
def test_bad_media_raise_at_the_call(drive, call, message):
    """Invalid records raise in the caller's thread."""
    run = drive().fit()

    with pytest.raises(RecordError, match=message):
        call(run.logger)


def test_a_bad_image_is_dropped_alone(tmp_path, caplog):
    """A missing, invalid or cut file in a list is left out with its caption and mask; the others stay."""
    whole, cut, no_image = (tmp_path / name for name in ("whole.png", "cut.png", "text.png"))
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 30), np.uint8)).save(whole)
    cut.write_bytes(whole.read_bytes()[:700])
    no_image.write_text("a text")
    images = [RAMP, tmp_path / "missing.png", no_image, cut, whole]
    masks = [
        np.full(shape, index) for index, shape in enumerate([(3, 4), (1, 1), (1, 1), (40, 30), (40, 30)])
    ]

    with Run(loggers=[RunDirectory(tmp_path / "run")]) as run:
        run.log_images(images, "x", step=0, captions=list("abcde"), masks={"classes": masks})

    lines = index_of(tmp_path)
    assert [(line["caption"], line["shape"]) for line in lines] == [("a", [3, 4]), ("e", [40, 30])]
    of_masks = [Image.open(tmp_path / "run" / line["masks"]["classes"]["path"]) for line in lines]
    assert [np.unique(mask).tolist() for mask in of_masks] == [[0], [4]]
    assert sum("can read" in message for message in caplog.messages) == 1  # Further ones are counted.
    assert sum("image 1 of 'x' was left out" in message for message in caplog.messages) == 1


def test_clipping_is_reported_once():
    """One line with their range covers all images and videos beyond [0, 1] that a program logs."""
    program = (
        "import numpy as np\n"
        "from destinations.media import gif_bytes, iter_images\n"
        "for _ in range(3):\n"
        "    list(iter_images(np.array([[-0.5, 0.5], [np.nan, 3.0]])))\n"
        "    gif_bytes(np.full((2, 1, 4, 4), 2.0), 1)\n"
    )

    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr

    assert said.count("clipped") == 1
    assert "from -0.5 to 3" in said


def test_a_failure_in_the_background_is_counted_reported_once_and_shown(drive, tmp_path, caplog):
    """A file in place of media/ causes one message, and a count in the sidecar."""
    run = drive().fit()
    (tmp_path / "run" / "media").write_text("in the way")

    for step in range(3):
        run.logger.log_images(np.zeros((2, 2)), "a", step=step)
    run.log({"loss": 1.0}, 0)
    run.close()

    receipt = json.loads((tmp_path / "run" / "sidecar.json").read_text())["overhead"]["media"]
    assert (receipt["failed"], sum(receipt["errors"].values())) == (3, 3)
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1


def test_a_full_lane_drops_by_its_policy(caplog):
    """Newest or oldest items are dropped, counted and reported once; the thread lives on after an error."""
    import threading

    gate, started, done = threading.Event(), threading.Event(), []
    newest, oldest = (Lane(policy, limit=2, when_full=policy) for policy in ("drop_newest", "drop_oldest"))

    def block():
        started.set()
        gate.wait(60)

    for lane in (newest, oldest):
        started.clear()
        lane.put(block)
        assert started.wait(60)
        lane.put(lambda: 1 / 0)
        for number in range(3):
            lane.put(lambda lane=lane, number=number: done.append((lane is newest, number)))
    gate.set()
    finished = [lane.stop(60) for lane in (newest, oldest)]

    assert finished == [True, True]
    assert [number for is_newest, number in done if is_newest] == [0]
    assert [number for is_newest, number in done if not is_newest] == [1, 2]
    assert (newest.counts.dropped, oldest.counts.dropped) == (2, 2)
    assert (newest.counts.failed, oldest.counts.failed) == (1, 0)
    assert len([record for record in caplog.records if "queue full" in record.getMessage()]) == 2


def test_a_lane_waits_no_longer_than_it_may():
    """A blocked lane gives up in time, in put, flush and stop, and counts what it drops."""
    import threading

    gate, started = threading.Event(), threading.Event()
    lane = Lane("slow", limit=1, wait_seconds=0.01)
    lane.put(lambda: (started.set(), gate.wait(60)))
    assert started.wait(60)

    taken = [lane.put(lambda: None, size=1) for _ in range(3)]
    flushed, stopped = lane.flush(0.01), lane.stop(0.01)
    gate.set()

    assert (taken, flushed, stopped) == ([True, False, False], False, False)
    assert lane.counts.dropped == 3
    assert lane.put(lambda: None) is False


def test_four_grey_pictures_taken_for_one_are_reported_once():
    """One picture with opacity has the same shape as four grey ones without channels."""
    code = (
        "import numpy as np\n"
        "from destinations.media import iter_images\n"
        "grey = np.zeros((4, 5, 6), np.uint8)\n"
        "for images in (grey, grey, grey[:, None], grey[:3]):\n"
        "    print(len(list(iter_images(images))))\n"
    )

    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert finished.stdout.split() == ["1", "1", "4", "1"]
    assert finished.stderr.count("Four grey pictures have the shape (4, 1, 5, 6)") == 1
