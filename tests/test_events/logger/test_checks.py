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
FRAMES = np.zeros((2, 3, 8, 6))


@pytest.fixture
def logger():
    """A logger without destinations: the check comes before them."""
    return Logger(State("r"), raise_errors=True, strict=True)


@pytest.fixture(autouse=True)
def _picture_file(tmp_path, monkeypatch):
    """The file "a.png" in the current folder."""
    monkeypatch.chdir(tmp_path)
    PICTURE.save("a.png")


def test_images_of_these_shapes_and_kinds_are_taken(logger):
    """Arrays and tensors have two to four dimensions, with channels first or last; a list may mix kinds."""
    for make in (np.zeros, torch.zeros):
        for shape in ((8, 6), (1, 8, 6), (2, 3, 8, 6)):
            logger.log_images([make(shape), make(shape)])
        for shape in ((8, 6, 4), (2, 8, 6, 3)):
            logger.log_images(make(shape), channels_last=True)
    for images in (PICTURE, [PICTURE, IMAGE], "a.png", [pathlib.Path("a.png"), "a.png"]):
        logger.log_images(images)


@pytest.mark.parametrize(
    ("images", "channels_last", "complaint"),
    [
        (
            np.zeros(3),
            False,
            r"images 'x' must have shape \(H, W\), \(C, H, W\) or \(N, C, H, W\), got \(3,\)",
        ),
        (np.zeros(3), True, r"must have shape \(H, W\), \(H, W, C\) or \(N, H, W, C\), got \(3,\)\."),
        (np.zeros((3, 0, 6)), False, r"got \(3, 0, 6\)"),
        (np.zeros((8, 6, 3)), False, r"must have 1, 3 or 4 channels .* got 8 .* Pass channels_last=True\."),
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


def test_masks_of_the_size_of_their_images_are_taken(logger):
    """There is one mask for each image, even for one given as a path; channels may be last."""
    for images, mask in (
        (IMAGE, np.zeros((1, 8, 6), dtype=int)),
        (PICTURE, torch.zeros(8, 6)),
        (FRAMES, [np.zeros((8, 6)), torch.zeros(8, 6)]),
        ([IMAGE, np.zeros((1, 4, 5))], [np.zeros((8, 6)), np.zeros((4, 5))]),
        (["a.png", IMAGE], [np.zeros((8, 6)), np.zeros((8, 6))]),
    ):
        logger.log_images(images, masks={"pred": mask, "target": mask}, mask_class_labels={0: "no", 1: "yes"})
    logger.log_images(np.zeros((2, 8, 6, 3)), channels_last=True, masks={"pred": np.zeros((2, 8, 6))})


@pytest.mark.parametrize(
    ("masks", "complaint"),
    [
        (
            {"good": np.zeros((8, 6)), "pred": np.zeros((6, 8))},
            r"mask 'pred' of 'x' must have the size of its image \(8, 6\), got \(6, 8\) for image 0",
        ),
        ({"pred": np.zeros((2, 8, 6))}, r"must have one mask for each of 1 images, got 2"),
        ({"pred": np.zeros(8)}, r"must have shape \(H, W\) or \(N, H, W\), got \(8,\)"),
        (np.zeros((8, 6)), r"masks of 'x' must be a dict from mask name to mask, got ndarray"),
    ],
)
def test_masks_that_do_not_fit_are_refused(logger, masks, complaint):
    """Size, number and shape are all checked."""
    with pytest.raises(RecordError, match=complaint):
        logger.log_images(IMAGE, "x", masks=masks)


def test_other_values_of_these_shapes_are_taken(logger):
    """Numbers may be numpy's, files have their own rates, and a table has any kind of rows."""
    for sound in (np.zeros(10), torch.zeros(2, 10), pathlib.Path("a.wav"), b"RIFF"):
        logger.log_audio(sound, np.int64(16_000))
    for video, fps in (
        (torch.zeros(2, 1, 8, 6), np.int64(24)),
        (pathlib.Path("a.mp4"), None),
        (b"mp4", None),
    ):
        logger.log_video(video, fps)
    for values, bins in (
        (np.zeros((2, 3)), 64),
        (torch.zeros(4), np.int64(8)),
        ([1, 2.5], [0, 1, 2]),
        (np.float32(1), torch.linspace(0, 1, 5)),
    ):
        logger.log_histogram(values, bins=bins)
    for points, colors in ((torch.zeros(2, 5, 3), None), (np.zeros((5, 3)), torch.zeros(5, 4))):
        logger.log_point_cloud(points, colors=colors)
    for columns, rows in (
        (["a", "b"], [[1, 2], [3, 4]]),
        (("a",), ((1,),)),
        ([], []),
        (["a", "b"], np.zeros((3, 2))),
        ({"a": 1, "b": 2}.keys(), [{"a": 1, "b": 2}.values()]),
        (pd.Index(["a", "b"]), pd.DataFrame({"a": [1], "b": [2]}).to_numpy()),
        (["image"], [[torch.zeros(2, 2)]]),
    ):
        logger.log_table(columns, rows)


@pytest.mark.parametrize(
    ("method", "arguments", "complaint"),
    [
        (
            "audio",
            (np.zeros((1, 2, 3)), 8000),
            r"audio 'x' must have shape \(samples,\) or \(channels, samples\)",
        ),
        ("audio", (np.zeros(0), 8000), r"got \(0,\)"),
        ("audio", (np.zeros((8000, 2)), 8000), r"with up to 64 channels, got \(8000, 2\)"),
        ("audio", ([0.0, 0.1], 8000), "got list"),
        *(
            ("audio", (np.zeros(5), rate), "audio 'x' must have a sample rate of at least 1 Hz, got ")
            for rate in (0, 8000.0, True)
        ),
        (
            "video",
            (np.zeros((2, 8, 6, 3)), 30),
            r"video 'x' must be frames \(T, C, H, W\) .*got \(2, 8, 6, 3\)",
        ),
        ("video", (np.zeros((0, 3, 8, 6)), 30), r"got \(0, 3, 8, 6\)"),
        *(
            ("video", (FRAMES, fps), r"video 'x' must have frames per second, got fps=.*Write fps=30")
            for fps in (None, 0, float("nan"), True)
        ),
        ("histogram", (None,), "histogram 'x' must have an array or list of numbers, got NoneType"),
        ("histogram", ([],), "must have at least one value, got an empty list"),
        ("histogram", (np.zeros((0, 3)),), r"must have at least one value, got shape \(0, 3\)"),
        (
            "point_cloud",
            (np.zeros((5, 2)),),
            r"point cloud 'x' must have shape \(N, 3\) or \(B, N, 3\), got \(5, 2\)",
        ),
        ("point_cloud", (np.zeros((0, 3)),), r"got \(0, 3\)"),
        ("point_cloud", ([[0, 0, 0]],), "got list"),
        (
            "table",
            (["a", "b"], [[1, 2], [3]]),
            r"table 'x' must have 2 values in each row, got 1 in row 1\. The columns are a, b\.",
        ),
        ("table", ("ab", [[1, 2]]), "must have a list of strings as its columns, got 'ab'"),
        ("table", (["a", 1], [[1, 2]]), "must have strings as its columns"),
        ("table", (["a"], ["x"]), "must have a list for each row, got 'x' as row 0"),
        ("table", (["b"], [{"a": 1}]), "table must have the column 'b', got 'a'"),
        ("table", (["a"], {"a": 1}), "must have a list of values for each column, got int for 'a'"),
        (
            "table",
            ({"a": [1], "b": [1, 2]}, None),
            "must have columns of the same length, got 'a': 1, 'b': 2",
        ),
        ("table", (["a"], ([1] for _ in range(3))), r"must have a list of rows, got generator\. Write list"),
        ("text", (b"x",), "text 'x' must be a string, got bytes"),
    ],
)
def test_other_invalid_values_are_refused(logger, method, arguments, complaint):
    """Kind, shape and rate are checked; a generator is not read empty and lost."""
    with pytest.raises(RecordError, match=complaint):
        getattr(logger, f"log_{method}")(*arguments, name="x")


def test_bins_and_colours_are_checked(logger):
    """Bins are a number of them, or edges that rise; there are as many colours as points."""
    for bins in (0, None, True, 10.5, "abc", [1], [1, 1], [0, float("nan"), 1], ["a", "b"], np.zeros((2, 2))):
        with pytest.raises(RecordError, match="must have at least one bin, or increasing edges, got bins="):
            logger.log_histogram([1], "x", bins=bins)
    with pytest.raises(RecordError, match=r"must have colours of shape \(5, 3\), got \(4, 3\)"):
        logger.log_point_cloud(np.zeros((5, 3)), "x", colors=np.zeros((4, 3)))
    with pytest.raises(RecordError, match="got str"):
        logger.log_point_cloud(np.zeros((5, 3)), "x", colors="red")


def test_traces_without_names_are_refused(logger):
    """They are a dict from name to value; the error is a ValueError too."""
    for traces in ("x", {1: 2}):
        with pytest.raises(RecordError, match="traces must be a dict from name to value, got"):
            logger.log_traces(traces)
    with pytest.raises(ValueError, match="must be a string"):
        logger.log_text(None)
