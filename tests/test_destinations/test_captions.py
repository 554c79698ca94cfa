"""Captions of media: one call reaches every destination in the form that it supports."""

import json
import logging

import numpy as np
import pytest

from destinations import InMemory, LoggerDestination, RunDirectory, TextFile
from destinations.runs import open_runs
from destinations.trackers.tracker import Sink, Tracker
from events import Logger, RecordError, Run, State


def pixels(*shape):
    """Returns black pixels."""
    return np.zeros(shape, np.uint8)


def log_each_with_a_caption(log):
    """Logs one record of each kind that has captions."""
    log.log_images(pixels(2, 3, 8, 8), "cats", captions=["one", ""])
    log.log_audio(pixels(8).astype("float32"), 8000, "tone", caption="low")
    log.log_video(pixels(2, 3, 8, 8), 4, "clip", caption="a jump")
    log.log_point_cloud(pixels(4, 3), "shape", caption="a chair")
    log.log_table(["a"], [[1]], "rows", caption="by hand")


def test_captions_are_written_and_read(tmp_path):
    """The indexes of media and tables have them, and the reader returns them."""
    with Run(loggers=RunDirectory(tmp_path / "run"), run_name="mine") as run:
        log_each_with_a_caption(run)

    lines = [json.loads(line) for line in (tmp_path / "run/media.jsonl").read_text().splitlines()]
    assert [line["caption"] for line in lines] == ["one", None, "low", "a jump", "a chair"]
    (table,) = map(json.loads, (tmp_path / "run/tables.jsonl").read_text().splitlines())
    assert table["caption"] == "by hand"
    found = open_runs(tmp_path)["run"]
    assert [image.caption for image in found.images("cats")] == ["one", None]
    assert found.audio("tone")[0].caption == "low"
    assert found.videos("clip")[0].caption == "a jump"


def test_captions_in_memory_and_in_a_text_file(tmp_path):
    """They are stored with the other arguments of the call."""
    memory = InMemory()
    text = TextFile(str(tmp_path / "log.jsonl"), format="jsonl")
    with Run(loggers=[memory, text], run_name="mine") as run:
        log_each_with_a_caption(run)

    images, audio, video, points, table = memory.records
    assert images.value["captions"] == ["one", ""]
    assert [one.value["caption"] for one in (audio, video, points)] == ["low", "a jump", "a chair"]
    assert table.value.caption == "by hand"
    assert "a chair" in (tmp_path / "log.jsonl").read_text()


class OldDestination(LoggerDestination):
    """A destination written before captions existed."""

    def __init__(self):
        self.images = []

    def log_images(
        self,
        images,
        name="Images",
        channels_last=False,
        step=None,
        masks=None,
        mask_class_labels=None,
        use_table=True,
    ):
        self.images.append(name)


def test_a_destination_without_captions_gets_the_images(caplog):
    """One warning says that its `log_images` accepts no captions."""
    old, memory = OldDestination(), InMemory()
    with caplog.at_level(logging.WARNING, "events"), Run(loggers=[old, memory], run_name="mine") as run:
        for _ in range(3):
            run.log_images(pixels(8, 8), "cat", captions=["a cat"])

    assert old.images == ["cat"] * 3
    assert [one.value["captions"] for one in memory.records] == [["a cat"]] * 3
    assert [one.getMessage() for one in caplog.records] == [
        "OldDestination.log_images has no argument 'captions': it is left out there."
    ]


def test_method_without_a_signature_gets_the_common_arguments():
    """A compiled method is an example."""

    class Opaque(OldDestination):
        def log_images(self, *arguments):
            self.images.append(arguments[1])

        log_images.__signature__ = "none"

    opaque = Opaque()

    Logger(State(run_name="mine"), opaque).log_images(pixels(8, 8), "cat", captions=["a cat"])

    assert opaque.images == ["cat"]


def test_caption_of_a_dropped_image_is_dropped():
    """The other captions stay with their images."""
    memory = InMemory()
    logger = Logger(State(run_name="mine"), memory)

    logger.log_images([pixels(8, 8), "no", pixels(9, 9)], captions=["a", "b", "c"])
    logger.log_images([pixels(8, 8), object(), pixels(9, 9)], captions=["a", "b", "c"])

    assert memory.records[-1].value["captions"] == ["a", "c"]


@pytest.mark.parametrize(
    ("captions", "message"),
    [
        (["a"], "must have a list of 2 captions, one for each image, got 1"),
        ("a", "must have a list of 2 captions, one for each image, got 1"),
        (3, "must have a list of 2 captions, one for each image, got 3"),
        (["a", 3], "caption of 'cats' must be a string, got 3"),
    ],
)
def test_images_with_bad_captions_are_logged(captions, message):
    """Only the captions are dropped."""
    memory = InMemory()
    logger = Logger(State(run_name="mine"), memory, strict=True)

    with pytest.raises(RecordError, match=message):
        logger.log_images(pixels(2, 3, 8, 8), "cats", captions=captions)

    assert memory.records[0].name == "cats"


@pytest.mark.parametrize("images", [{"a": {"b": pixels(8, 8)}}, {3: pixels(8, 8)}])
def test_bad_entries_of_a_dict_of_images_are_dropped(images):
    """A nested dict isn't an image; a name that isn't a string becomes one."""
    memory = InMemory()
    logger = Logger(State(run_name="mine"), memory)

    logger.log_images({**images, "good": pixels(8, 8)})

    assert "good" in [one.name for one in memory.records]
    assert sum(logger.faults.value_counts.values()) == 1


def test_secrets_in_captions_are_redacted():
    """They are redacted like other texts."""
    memory = InMemory()
    logger = Logger(State(run_name="mine"), memory)

    logger.log_images(pixels(8, 8), captions="https://me:hunter22@host")
    logger.log_audio(pixels(8).astype("float32"), 8000, caption="https://me:hunter22@host")

    assert "hunter22" not in repr([one.value for one in memory.records])


class Texts(Sink):
    """Records names and texts."""

    def __init__(self, seen):
        self.seen = seen

    def log_images(self, stamp, images):
        self.seen.append((stamp.name, "images"))

    def log_video(self, stamp, video, fps):
        self.seen.append((stamp.name, video[:4]))

    def log_text(self, stamp, text):
        self.seen.append((stamp.name, text))


class TextTracker(Tracker):
    """A tracker whose sink writes no captions."""

    sink_class = Texts

    def __init__(self):
        super().__init__()
        self.seen = []

    def make_sink(self, state):
        return Texts(self.seen)


def test_tracker_without_captions_gets_them_as_a_text():
    """The text is named after the media."""
    tracker = TextTracker()
    with Run(loggers=tracker, run_name="mine") as run:
        run.log_images(pixels(2, 3, 8, 8), "cats", captions=["one", "two"])

    assert tracker.seen == [("cats", "images"), ("cats/caption", "one\ntwo")]


def test_dict_of_images_is_one_record_per_name():
    """Each name has its own record."""
    memory = InMemory()
    logger = Logger(State(run_name="mine"), memory)

    logger.log_images({"real": pixels(8, 8), "fake": pixels(9, 9)}, captions={"fake": "better"})
    logger.log_images({"real": pixels(8, 8)}, "epoch 3")

    assert [one.name for one in memory.records] == ["real", "fake", "epoch 3/real"]
    assert memory.records[1].value["captions"] == ["better"]
    assert "captions" not in memory.records[0].value


def test_bad_image_in_a_dict_is_dropped():
    """The other names are logged. With `strict`, the error is raised afterwards."""
    memory = InMemory()
    logger = Logger(State(run_name="mine"), memory, strict=True)

    with pytest.raises(RecordError, match="images 'bad'"):
        logger.log_images({"bad": pixels(2), "good": pixels(8, 8)})

    assert [one.name for one in memory.records] == ["good"]


def test_frames_as_gif_in_a_folder_and_in_a_tracker(tmp_path):
    """The background thread encodes them."""
    frames = np.random.default_rng(0).integers(0, 255, (3, 3, 8, 10), np.uint8)
    tracker = TextTracker()
    with Run(loggers=[RunDirectory(tmp_path / "run"), tracker], run_name="mine") as run:
        run.log_video(frames, 5, "clip", format="gif")

    (line,) = map(json.loads, (tmp_path / "run/media.jsonl").read_text().splitlines())
    from PIL import Image

    with Image.open(tmp_path / "run" / line["path"]) as image:
        assert (image.format, image.size, image.n_frames) == ("GIF", (10, 8), 3)
    assert (line["format"], line["fps"], line["shape"]) == ("gif", 5, [3, 3, 8, 10])
    assert tracker.seen == [("clip", b"GIF8")]


def test_unknown_video_format_raises():
    """The error lists the formats."""
    logger = Logger(State(run_name="mine"), InMemory(), strict=True)

    with pytest.raises(RecordError, match='must have the format "mp4" or "gif"'):
        logger.log_video(pixels(2, 3, 8, 8), 4, format="avi")
