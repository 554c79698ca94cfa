"""Tests which values can be logged; a bad shape raises at the call, with a helpful message."""

import pathlib

import numpy as np
import pandas as pd
import PIL.Image
import pytest
import torch

from events import Logger, RecordError, State

IMAGE = np.zeros((3, 8, 6), dtype=np.uint8)
PICTURE = PIL.Image.new("RGB", (6, 8))


@pytest.fixture
def logger():
    """A logger without destinations: the check comes before them."""
    return Logger(State("r"), raise_errors=True, strict=True)


@pytest.fixture
def picture_file(tmp_path, monkeypatch):
    """The file "a.png" in the current folder."""
    monkeypatch.chdir(tmp_path)
    PICTURE.save("a.png")


@pytest.mark.parametrize("make", [np.zeros, torch.zeros], ids=["numpy", "torch"])
@pytest.mark.parametrize(
    ("shape", "channels_last"),
    [
        ((8, 6), False),
        ((1, 8, 6), False),
        ((2, 3, 8, 6), False),
        ((8, 6, 4), True),
        ((2, 8, 6, 3), True),
    ],
)
def test_images_of_these_shapes_are_taken(logger, make, shape, channels_last):
    """An array, a tensor or a list has two to four dimensions, with channels first or last."""
    logger.log_images(make(shape), channels_last=channels_last)
    logger.log_images([make(shape), make(shape)], channels_last=channels_last)


@pytest.mark.parametrize("images", [PICTURE, [PICTURE, IMAGE], "a.png", [pathlib.Path("a.png"), "a.png"]])
@pytest.mark.usefixtures("picture_file")
def test_images_may_be_pictures_and_paths(logger, images):
    """A list may mix them; bf16 and booleans are for the destination to render."""
    logger.log_images(images)


@pytest.mark.parametrize(
    ("images", "channels_last", "complaint"),
    [
        (
            np.zeros(3),
            False,
            r"images 'x' must have shape \(H, W\), \(C, H, W\) or \(N, C, H, W\), got \(3,\)\.",
        ),
        (np.zeros(3), True, r"must have shape \(H, W\), \(H, W, C\) or \(N, H, W, C\), got \(3,\)\."),
        (np.zeros((3, 0, 6)), False, r"got \(3, 0, 6\)"),
        (np.zeros((8, 6, 3)), False, r"must have 1, 3 or 4 channels .* got 8 .* Pass channels_last=True\."),
        (np.zeros((3, 8, 6)), True, r"must have 1, 3 or 4 channels .* got 6 .* Pass channels_last=False\."),
        (np.zeros((5, 8, 6)), False, r"got 5 in shape \(5, 8, 6\)\. Give a batch of grey images a channel"),
        ([], False, "must have at least one image, got an empty list"),
        ([IMAGE, np.zeros(3)], False, r"image 1 of images 'x' must have shape"),
        (None, False, "must be arrays, tensors, PIL images or paths, got NoneType"),
    ],
)
def test_invalid_images_are_refused(logger, images, channels_last, complaint):
    """The message has the name, the given value, and the way out if there is one."""
    with pytest.raises(RecordError, match=complaint):
        logger.log_images(images, "x", channels_last)


@pytest.mark.parametrize(
    ("images", "mask"),
    [
        (IMAGE, np.zeros((8, 6), dtype=int)),
        (IMAGE, np.zeros((1, 8, 6), dtype=int)),
        (PICTURE, torch.zeros(8, 6)),
        (np.zeros((2, 3, 8, 6)), [np.zeros((8, 6)), torch.zeros(8, 6)]),
        ([IMAGE, np.zeros((1, 4, 5))], [np.zeros((8, 6)), np.zeros((4, 5))]),
        (["a.png", IMAGE], [np.zeros((8, 6)), np.zeros((8, 6))]),
    ],
)
@pytest.mark.usefixtures("picture_file")
def test_masks_of_the_size_of_their_images_are_taken(logger, images, mask):
    """There is one mask for each image, even for an image given as a path."""
    logger.log_images(images, masks={"pred": mask, "target": mask}, mask_class_labels={0: "no", 1: "yes"})


def test_masks_follow_the_channel_order_of_their_images(logger):
    """With channels last, height and width come first."""
    logger.log_images(np.zeros((2, 8, 6, 3)), channels_last=True, masks={"pred": np.zeros((2, 8, 6))})


@pytest.mark.parametrize(
    ("masks", "complaint"),
    [
        (
            {"pred": np.zeros((6, 8))},
            r"mask 'pred' of 'x' must have the size of its image \(8, 6\), got \(6, 8\) for image 0",
        ),
        ({"pred": np.zeros((2, 8, 6))}, r"must have one mask for each of 1 images, got 2"),
        ({"pred": np.zeros(8)}, r"must have shape \(H, W\) or \(N, H, W\), got \(8,\)"),
        ({"good": np.zeros((8, 6)), "bad": np.zeros((8, 5))}, r"mask 'bad' of 'x'"),
        (np.zeros((8, 6)), r"masks of 'x' must be a dict from mask name to mask, got ndarray"),
    ],
)
def test_masks_that_do_not_fit_are_refused(logger, masks, complaint):
    """Size, number and shape are all checked."""
    with pytest.raises(RecordError, match=complaint):
        logger.log_images(IMAGE, "x", masks=masks)


@pytest.mark.parametrize(
    "audio",
    [
        np.zeros(10),
        torch.zeros(2, 10),
        pathlib.Path("a.wav"),
        b"RIFF",
    ],
)
@pytest.mark.parametrize("rate", [16_000, np.int64(16_000)])
def test_sounds_of_these_shapes_are_taken(logger, audio, rate):
    """They have one dimension, or channels first, or are a WAV file; the rate may be numpy's."""
    logger.log_audio(audio, rate)


@pytest.mark.parametrize(
    ("audio", "rate", "complaint"),
    [
        (
            np.zeros((1, 2, 3)),
            8000,
            r"audio 'x' must have shape \(samples,\) or \(channels, samples\), .*, got \(1, 2, 3\)",
        ),
        (np.zeros(0), 8000, r"got \(0,\)"),
        (np.zeros((8000, 2)), 8000, r"with up to 64 channels, got \(8000, 2\)"),
        (None, 8000, "got NoneType"),
        ([0.0, 0.1], 8000, "got list"),
        *(
            (np.zeros(5), rate, "audio 'x' must have a sample rate of at least 1 Hz, got ")
            for rate in (0, 8000.0, True)
        ),
    ],
)
def test_invalid_audio_is_refused(logger, audio, rate, complaint):
    """Shape and rate are checked."""
    with pytest.raises(RecordError, match=complaint):
        logger.log_audio(audio, rate, "x")


@pytest.mark.parametrize(
    ("video", "fps"),
    [
        (torch.zeros(2, 3, 8, 6), 29.97),
        (np.zeros((2, 1, 8, 6)), np.int64(24)),
        (pathlib.Path("a.mp4"), None),
        (b"mp4", None),
    ],
)
def test_videos_of_these_shapes_are_taken(logger, video, fps):
    """They are frames with their rate, or an encoded file that knows its own."""
    logger.log_video(video, fps)


@pytest.mark.parametrize(
    ("video", "fps", "complaint"),
    [
        (
            np.zeros((2, 8, 6, 3)),
            30,
            r"video 'x' must be frames \(T, C, H, W\) with 1, 3 or 4 channels.*got \(2, 8, 6, 3\)",
        ),
        (np.zeros((3, 8, 6)), 30, r"got \(3, 8, 6\)"),
        (np.zeros((0, 3, 8, 6)), 30, r"got \(0, 3, 8, 6\)"),
        (None, 30, "got NoneType"),
        *(
            (np.zeros((2, 3, 8, 6)), fps, r"video 'x' must have frames per second, got fps=.*Write fps=30")
            for fps in (None, 0, float("nan"), True)
        ),
    ],
)
def test_invalid_videos_are_refused(logger, video, fps, complaint):
    """Shape and rate are checked."""
    with pytest.raises(RecordError, match=complaint):
        logger.log_video(video, fps, "x")


@pytest.mark.parametrize(
    ("values", "bins"),
    [
        (np.zeros((2, 3)), 64),
        (torch.zeros(4), np.int64(8)),
        ([1, 2.5], [0, 1, 2]),
        (np.float32(1), torch.linspace(0, 1, 5)),
    ],
)
def test_histograms_of_these_values_and_bins_are_taken(logger, values, bins):
    """Numbers may have any shape; bins are a number, or edges that rise."""
    logger.log_histogram(values, bins=bins)


@pytest.mark.parametrize(
    ("values", "bins", "complaint"),
    [
        (None, 64, "histogram 'x' must have an array or list of numbers, got NoneType"),
        ([], 64, "must have at least one value, got an empty list"),
        (np.zeros((0, 3)), 64, r"must have at least one value, got shape \(0, 3\)"),
        ([1], 0, "must have at least one bin, got bins=0"),
        *(
            ([1], bins, "must have a number of bins or increasing edges, got bins=")
            for bins in (
                *(None, True, 10.5, "abc", [1], [1, 1], [0, float("nan"), 1], ["a", "b"]),
                np.zeros((2, 2)),
            )
        ),
    ],
)
def test_invalid_histograms_are_refused(logger, values, bins, complaint):
    """Values and bins are checked."""
    with pytest.raises(RecordError, match=complaint):
        logger.log_histogram(values, "x", bins=bins)


@pytest.mark.parametrize(
    ("points", "colors"),
    [
        (np.zeros((5, 3)), None),
        (torch.zeros(2, 5, 3), None),
        (np.zeros((5, 3)), torch.zeros(5, 4)),
        (np.zeros((2, 5, 3)), np.zeros((2, 5, 4))),
    ],
)
def test_points_of_these_shapes_are_taken(logger, points, colors):
    """One cloud or several are taken, with colours or without."""
    logger.log_point_cloud(points, colors=colors)


@pytest.mark.parametrize(
    ("points", "colors", "complaint"),
    [
        (np.zeros((5, 2)), None, r"point cloud 'x' must have shape \(N, 3\) or \(B, N, 3\), got \(5, 2\)"),
        (np.zeros(3), None, r"got \(3,\)"),
        (np.zeros((0, 3)), None, r"got \(0, 3\)"),
        ([[0, 0, 0]], None, "got list"),
        (np.zeros((5, 3)), np.zeros((4, 3)), r"must have colours of shape \(5, 3\), got \(4, 3\)"),
        (np.zeros((2, 5, 3)), np.zeros((5, 3)), r"must have colours of shape \(2, 5, 3\), got \(5, 3\)"),
        (np.zeros((5, 3)), "red", "got str"),
    ],
)
def test_invalid_point_clouds_are_refused(logger, points, colors, complaint):
    """Points and colours are checked, and that they are as many."""
    with pytest.raises(RecordError, match=complaint):
        logger.log_point_cloud(points, "x", colors=colors)


@pytest.mark.parametrize(
    ("columns", "rows"),
    [
        (["a", "b"], [[1, 2], [3, 4]]),
        (("a",), ((1,),)),
        (["a"], []),
        ([], []),
        (["a", "b"], np.zeros((3, 2))),
        ({"a": 1, "b": 2}.keys(), [{"a": 1, "b": 2}.values()]),
        (pd.Index(["a", "b"]), pd.DataFrame({"a": [1], "b": [2]}).to_numpy()),
        (["image"], [[torch.zeros(2, 2)]]),
    ],
)
def test_tables_of_these_shapes_are_taken(logger, columns, rows):
    """Lists, tuples, arrays and the parts of a dict, with as many values in each row as there are columns."""
    logger.log_table(columns, rows)


@pytest.mark.parametrize(
    ("columns", "rows", "complaint"),
    [
        (
            ["a", "b"],
            [[1, 2], [3]],
            r"table 'x' must have 2 values in each row, got 1 in row 1\. The columns are a, b\.",
        ),
        (["a"], [[1, 2]], "must have 1 values in each row, got 2 in row 0"),
        ("ab", [[1, 2]], "must have a list of strings as its columns, got 'ab'"),
        (["a", 1], [[1, 2]], "must have strings as its columns"),
        (["a"], ["x"], "must have a list for each row, got 'x' as row 0"),
        (["b"], [{"a": 1}], "table must have the column 'b', got 'a'"),
        (["a"], {"a": 1}, "must have a list of values for each column, got int for 'a'"),
        ({"a": "xy"}, None, "must have a list of values for each column, got str for 'a'"),
        ({"a": [1], "b": [1, 2]}, None, "must have columns of the same length, got 'a': 1, 'b': 2"),
        (["a"], None, "must have a list of rows, got NoneType"),
        (["a"], ([1] for _ in range(3)), r"must have a list of rows, got generator\. Write list"),
    ],
)
def test_invalid_tables_are_refused(logger, columns, rows, complaint):
    """Rows of another length are named; a generator is not read empty and lost."""
    with pytest.raises(RecordError, match=complaint):
        logger.log_table(columns, rows, "x")


@pytest.mark.parametrize("text", [None, b"x"])
def test_invalid_texts_are_refused(logger, text):
    """The message says what was given."""
    with pytest.raises(RecordError, match=f"text 'x' must be a string, got {type(text).__name__}"):
        logger.log_text(text, "x")


@pytest.mark.parametrize("traces", ["x", {1: 2}])
def test_traces_without_names_are_refused(logger, traces):
    """They are a dict from name to value."""
    with pytest.raises(RecordError, match="traces must be a dict from name to value, got"):
        logger.log_traces(traces)


def test_a_refused_record_is_our_error_and_a_value_error(logger):
    """`except ValueError` catches it too."""
    with pytest.raises(ValueError, match="must be a string"):
        logger.log_text(None)
