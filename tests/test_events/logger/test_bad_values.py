"""A bad value is dropped, counted and reported once; the rest of its call is logged, and nothing is raised."""

import csv
import inspect
import io

import numpy as np
import pytest
import torch
from PIL import Image

from destinations import Console, InMemory, LoggerDestination, RunDirectory
from destinations.run_directory import read_series
from events import Engine, Logger, RecordError, Run, State, Trainer, WriteRate


def test_one_bad_metric_among_good_ones(tmp_path, caplog):
    """The good ones are on disk; the bad one is reported once, with the line that logged it."""
    with Run(RunDirectory(tmp_path / "run"), run_name="mine") as run:
        for _ in range(3):
            run.batch_start()
            run.log_metrics({"loss": 0.5, "note": "blue", "accuracy": torch.tensor(0.25)})
            line = inspect.currentframe().f_lineno - 1
            run.batch_end()

    assert [value for _, value in read_series(tmp_path / "run", "loss")] == [0.5] * 3
    assert [value for _, value in read_series(tmp_path / "run", "accuracy")] == [0.25] * 3
    assert run.logger.faults.value_counts == {("note", "RecordError"): 3}
    reports = [message for message in caplog.messages if "'note'" in message]
    assert len(reports) == 2
    assert reports[0].startswith(f"{__file__}:{line}: metric 'note' must be a scalar, got the string 'blue'.")
    assert reports[1] == "'note' could not be logged 3 times: RecordError."


@pytest.mark.parametrize("rate", [None, WriteRate(every_seconds=10, media=True)], ids=["at once", "waits"])
def test_a_record_that_is_bad_as_a_whole_is_counted_once(rate):
    """The number of destinations and the time of delivery don't matter."""
    memories = [InMemory(write_rate=rate), InMemory(write_rate=rate)]
    logger = Logger(State("mine"), memories)

    for _ in range(2):
        logger.log_histogram("no numbers", "h")
        logger.log_histogram(lambda: "no numbers", "called")
    logger.flush()

    assert [memory.records for memory in memories] == [[], []]
    assert logger.faults.value_counts == {("h", "RecordError"): 2, ("called", "RecordError"): 2}


@pytest.mark.parametrize("has_row_destination", [True, False])
def test_a_step_beyond_64_bits_becomes_the_default_step(tmp_path, caplog, has_row_destination):
    """It is counted and reported; later records don't get it as their default step."""
    memory = InMemory()
    destinations = [RunDirectory(tmp_path / "run")] if has_row_destination else []
    with Run([memory, Console("1ba", stream=io.StringIO()), *destinations], run_name="mine") as run:
        run.log_metrics({"a": 1.0}, 3)
        for step in (10**5000, -(2**63)):
            run.log_metrics({"a": 2.0}, step)
            run.log_text("text", "note", step)
        run.log_text("text", "note")
        run.batch_start()
        run.batch_end()

    assert [record.step for record in memory.records] == [3] * 6
    assert run.logger.faults.value_counts == {("step", "RecordError"): 4}
    assert "step must be between -2**63 and 2**63, got an integer of 16610 bits" in caplog.text
    assert not run.logger.faults.counts


def test_one_bad_image_of_a_list_is_dropped():
    """The other images are logged, each with its own mask; so are images with a bad mask."""
    memory = InMemory()
    logger = Logger(State("mine"), memory)
    images = [np.full((4, 5), index / 4) for index in range(3)]
    masks = [np.full((4, 5), index) for index in range(3)]

    logger.log_images([images[0], np.zeros(3), images[2]], "few", masks={"true": masks})
    logger.log_images(images, "all", masks={"true": masks, "pred": masks[:2]})

    few, every = (record.value for record in memory.records)
    assert [image.mean() for image in few["images"]] == [0.0, 0.5]
    assert [mask.mean() for mask in few["masks"]["true"]] == [0.0, 2.0]
    assert len(every["images"]) == 3
    assert list(every["masks"]) == ["true"]
    assert logger.faults.value_counts == {("few", "RecordError"): 1, ("all", "RecordError"): 1}


def test_one_bad_row_of_a_table_is_dropped():
    """A column name that isn't text is converted to text."""
    memory = InMemory()

    Logger(State("mine"), memory).log_table(["a", 2], [[1, 2], [3], "no row", [4, 5]])

    (table,) = memory.tables["Table"]
    assert (table.columns, table.rows) == (["a", "2"], [[1, 2], [4, 5]])


def test_table_cells_keep_the_values_of_the_call(tmp_path):
    """Tensors, arrays and images that the caller changes afterwards do not change what is written."""
    tensor, array, image = torch.tensor([1.0, 2.0]), np.array([[1, 2]]), Image.new("RGB", (3, 2))
    memory = InMemory()
    seen = []

    class Late(LoggerDestination):
        def log_table(self, columns, rows, name="Table", step=None):
            seen.append(rows)

    logger = Logger(State("mine"), [RunDirectory(tmp_path / "run"), memory, Late()])
    engine = Engine(logger.state, logger)
    engine.run_event("init")

    cells = [tensor, {"nested": [array]}, image, torch.tensor(3), np.float32(0.5), None, "text"]
    logger.log_table([*"abcdefg"], [cells])
    tensor.fill_(9)
    array.fill(9)
    image.putpixel((0, 0), (255, 255, 255))
    engine.close()

    ((*plain, picture, number, half, none, text),) = seen[0]
    assert plain == [[1.0, 2.0], {"nested": [[[1, 2]]]}]
    assert picture.getpixel((0, 0)) == (0, 0, 0)
    assert (number, half, none, text) == (3, 0.5, None, "text")
    assert memory.tables["Table"][0].rows[0][:2] == plain
    (path,) = (tmp_path / "run" / "tables").rglob("*.csv")
    assert list(csv.reader(path.read_text().splitlines()))[1] == [
        "[1.0, 2.0]", "{'nested': [[[1, 2]]]}", "RGB image 3x2", "3", "0.5", "", "text",
    ]  # fmt: skip


def test_a_table_cell_of_ten_thousand_values_is_kept():
    """With one value more it is described."""
    memory = InMemory()

    Logger(State("mine"), memory).log_table(["a", "b"], [[torch.zeros(10_000), torch.zeros(10_001)]])

    ((kept, described),) = memory.tables["Table"][0].rows
    assert kept == [0.0] * 10_000
    assert described == "<Tensor of torch.float32, shape (10001,)>"


@pytest.mark.parametrize(("kind", "place"), [(list, 0), (dict, "again")])
def test_a_table_cell_that_contains_itself_ends_with_a_text(kind, place):
    """It ends where it begins again; shallower values and the other cells are kept."""
    seen = []

    class Received(LoggerDestination):
        def log_table(self, columns, rows, name="Table", step=None):
            seen.append(rows)

    cell = {place: None} if kind is dict else [None]
    cell[place] = cell

    Logger(State("mine"), Received(), strict=True).log_table(["a", "b"], [[cell, 1]])

    ((found, beside),) = seen[0]
    assert (found[place], beside) == (f"<{kind.__name__} that contains itself>", 1)


@pytest.mark.parametrize("name", [None, 3, ["a"]])
def test_a_bad_name_becomes_its_text(name):
    """The record is kept under it."""
    memory = InMemory()
    logger = Logger(State("mine"), memory)

    logger.log_text("hello", name=name)
    logger.log_scalar(name, 1.0)

    assert [record.name for record in memory.records] == [repr(name), ""]
    assert memory.most_recent_values == {repr(name): 1.0}
    assert logger.faults.value_counts == {("name", "RecordError"): 2}


def test_run_and_trainer_pass_options_to_their_logger(tmp_path):
    """They pass `strict`, `raise_errors` and `namespace`."""

    class Broken(LoggerDestination):
        def log_text(self, text, name="Text", step=None):
            raise OSError("disk full")

    for owner in (
        Run([Broken(), InMemory()], run_name="mine", strict=True, raise_errors=True, namespace="agent"),
        Trainer(
            torch.nn.Linear(1, 1),
            loggers=[Broken(), InMemory()],
            strict=True,
            raise_errors=True,
            namespace="agent",
        ),
    ):
        memory = owner.logger.destinations[1]
        with pytest.raises(RecordError, match="agent/bad"):
            owner.logger.log_metrics({"good": 1.0, "bad": "x"})
        with pytest.raises(OSError, match="disk full"):
            owner.logger.log_text("hello")
        owner.close()

        assert memory.most_recent_values == {"agent/good": 1.0}


def test_names_that_contain_the_step_are_counted_together(caplog):
    """A million names of bad values are bounded in memory and in the log."""
    logger = Logger(State("mine"), InMemory())

    for step in range(1500):
        logger.log_metrics({f"bad/{step}": None})

    assert len(logger.faults.value_counts) == 1001
    assert logger.faults.value_counts["other names", "errors"] == 500
    assert len(caplog.messages) == 1001


def test_masks_with_a_channel_are_those_without():
    """Losses take masks of shape `(N, 1, H, W)`; they are accepted too."""
    memory = InMemory()

    Logger(State("mine"), memory, strict=True).log_images(
        torch.zeros(2, 3, 4, 5), masks={"true": torch.ones(2, 1, 4, 5)}
    )

    assert memory.records[0].value["masks"]["true"].shape == (2, 4, 5)


@pytest.mark.parametrize(
    "mask",
    [
        np.full((4, 5), 0.5),
        np.full((4, 5), np.nan),
        torch.full((4, 5), 0.5),
        torch.full((4, 5), 0.5, dtype=torch.bfloat16),
        [torch.full((4, 5), torch.inf)],
    ],
)
def test_a_mask_with_fractions_is_reported_with_the_line_that_logged_it(mask, caplog):
    """The thread that writes it would be too late; the image and its other mask are logged."""
    memory = InMemory()
    logger = Logger(State("mine"), memory)

    logger.log_images(np.zeros((4, 5)), masks={"soft": mask, "hard": np.full((4, 5), 2.0)})
    line = inspect.currentframe().f_lineno - 1

    assert list(memory.records[0].value["masks"]) == ["hard"]
    (report,) = caplog.messages
    assert report.startswith(
        f"{__file__}:{line}: mask 'soft' of 'Images' must hold class indices, got fractions."
    )


def test_hyperparameters_without_names_are_logged_with_one_warning(caplog):
    """A text instead of a dict is a mistake; the warning hides a secret in it."""
    memory = InMemory()
    logger = Logger(State("mine"), memory)

    for _ in range(2):
        logger.log_hyperparameters("lr=1 password=hunter22")
    line = inspect.currentframe().f_lineno - 1

    assert list(memory.hyperparameters) == ["value"]
    (report,) = caplog.messages
    assert report.startswith(f"{__file__}:{line}: hyperparameters must have names, got 'lr=1 ")
    assert "hunter22" not in report


def test_the_number_of_bins_may_follow_the_number_of_values():
    """Sturges' rule gives it, without a look at the values."""
    memory = InMemory()

    Logger(State("mine"), memory, strict=True).log_histogram(torch.zeros(10, 100), bins="auto")

    assert memory.records[0].value["bins"] == 11
