"""Grids, captions and spectrograms."""

import numpy as np
import pytest
import torch

from destinations.pictures import image_grid, spectrogram, with_captions
from events import RecordError


def flat(value, height=2, width=3):
    """Returns an image of one colour."""
    return np.full((height, width), value, np.uint8)


def test_grid_is_as_square_as_possible_and_in_order():
    """Four images make two rows, in order, with lines between."""
    grid = image_grid([flat(10), flat(20), flat(30), flat(40)], separator_pixels=1)

    assert grid.shape == (5, 7, 3)
    assert grid[..., 0].tolist() == [
        [10, 10, 10, 0, 20, 20, 20],
        [10, 10, 10, 0, 20, 20, 20],
        [0] * 7,
        [30, 30, 30, 0, 40, 40, 40],
        [30, 30, 30, 0, 40, 40, 40],
    ]


@pytest.mark.parametrize(
    ("count", "options", "shape"),
    [
        (1, {}, (2, 3, 3)),
        (7, {"max_images": 6, "separator_pixels": 0}, (6, 6, 3)),
        (3, {"columns": 3, "separator_pixels": 2}, (2, 13, 3)),
        (3, {"columns": 9, "separator_pixels": 0}, (2, 9, 3)),
        (2, {"columns": 1, "tile_size": (4, 4), "separator_pixels": 0}, (8, 4, 3)),
        (5, {"max_images": 100, "columns": 5, "separator_pixels": 0}, (2, 15, 3)),
    ],
)
def test_grid_has_the_requested_size(count, options, shape):
    """Columns, limit, tile size and line width are respected."""
    assert image_grid([flat(9)] * count, **options).shape == shape


def test_images_of_many_kinds_and_sizes_share_a_grid():
    """Channels-first tensors, alpha, grey and float images are centred in their tiles."""
    grid = image_grid(
        [torch.ones(4, 4, 4), np.zeros((1, 2, 2)), flat(7, 1, 1)], columns=3, separator_pixels=0
    )

    assert grid.shape == (4, 12, 3)
    assert (grid[:, :4] == 255).all()
    assert np.argwhere(grid[..., 0] == 7).tolist() == [[1, 9]]


def test_tile_keeps_the_aspect_ratio_of_its_image():
    """The rest of the tile is black."""
    grid = image_grid([flat(200, 2, 4)], tile_size=(8, 8))

    assert np.flatnonzero(grid[:, 0, 0]).tolist() == [2, 3, 4, 5]
    assert np.flatnonzero(grid[3, :, 0]).tolist() == list(range(8))


def test_caption_is_below_the_image_in_white():
    """The image is unchanged; letters are grey or white; long texts take more lines."""
    image = np.zeros((3, 10, 40), np.float32)
    image[0] = 1.0

    [short] = with_captions([image], ["cat"])
    [long] = with_captions([image], ["a long story about a cat"])
    [none] = with_captions([image], [""])

    assert np.array_equal(short[:10], none)
    strip = short[10:]
    assert (strip == strip[..., :1]).all()
    assert strip.max() == 255
    assert len(long) > len(short) > len(none) == 10
    assert short.shape[1] == long.shape[1] == 40


def test_a_long_word_is_broken():
    """None of it is cut off."""
    [narrow] = with_captions([np.zeros((4, 20))], ["pneumonoultramicroscopic"])
    [wide] = with_captions([np.zeros((4, 400))], ["pneumonoultramicroscopic"])

    assert len(narrow) > len(wide)
    assert narrow.shape[1] == 20


def test_a_tone_is_a_bright_line_at_its_frequency():
    """A quarter of the rate is in the middle; both channels count; silence is black."""
    times = np.arange(16_000) / 16_000
    tone = np.sin(2 * np.pi * 4000 * times)

    picture = spectrogram(np.stack([tone, tone]), 16_000)

    assert picture.shape == (257, 61)
    assert (picture.argmax(axis=0) == 128).all()
    assert picture.max() == 255
    assert picture[0].max() < 50
    assert spectrogram(np.zeros(100), 16_000).max() == 0


@pytest.mark.parametrize(
    ("act", "complaint"),
    [
        (lambda: image_grid([]), "at least one image"),
        (lambda: image_grid([flat(1)], columns=-1), "must be at least 1"),
        (lambda: image_grid([np.zeros((2, 2, 2, 2, 2))]), "image must have shape"),
        (lambda: with_captions([flat(1)], ["a", "b"]), "1 images need a list"),
        (lambda: with_captions([flat(1)], "a"), "1 images need a list"),
        (lambda: spectrogram([], 8000), "audio must have shape"),
        (lambda: spectrogram([1.0], 0), "must be positive"),
    ],
)
def test_invalid_arguments_raise(act, complaint):
    """The error says what is wrong."""
    with pytest.raises(RecordError, match=complaint):
        act()
