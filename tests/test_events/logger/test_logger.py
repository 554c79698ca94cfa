"""Tests that one call reaches every destination with the same arguments; errors raise at the call."""

import pathlib

import numpy as np
import pytest
import torch

from destinations import LoggerDestination
from events import Callback, Engine, EngineClosedError, LiteralName, Logger, RecordError, State, Timestamp
from events.redaction import REDACTED

RECORDS = [
    "log_hyperparameters",
    "log_metrics",
    "log_table",
    "log_images",
    "log_text",
    "log_audio",
    "log_video",
    "log_histogram",
    "log_point_cloud",
    "log_traces",
    "upload_file",
    "flush",
]


def _recording(name):
    def record(self, *args, **kwargs):
        self.calls.append((name, args, kwargs))

    return record


class Records(LoggerDestination):
    """Notes every call with its arguments, as given: by position or by name."""

    def __init__(self, *, uploads=True):
        self.calls = []
        self.uploads = uploads

    def can_upload_files(self):
        return self.uploads


for _name in RECORDS:
    setattr(Records, _name, _recording(_name))


class RefusesAll(LoggerDestination):
    """Refuses every record, as a destination may."""


def _refuse(self, *args, **kwargs):
    raise RecordError("record must be better, got this.")


for _name in RECORDS:
    setattr(RefusesAll, _name, _refuse)


IMAGE = np.zeros((3, 4, 5))
MASK = np.zeros((4, 5), dtype=int)
SOUND = np.zeros(10)
FRAMES = np.zeros((2, 3, 4, 5))
POINTS = np.zeros((6, 3))

# The call, its arguments, and the record that reaches the destination while the timestamp is at batch 7.
CALLS = [
    ("log_metrics", ({"a": 1.0},), {}, ({"a": 1.0}, 7)),
    ("log_metrics", ({"a": 1.0},), {"step": 3}, ({"a": 1.0}, 3)),
    ("log_scalar", ("a", 1.0), {}, ({"a": 1.0}, 7)),
    ("log_scalar", ("a", 1.0, 3), {}, ({"a": 1.0}, 3)),
    ("log_hyperparameters", ({"lr": 0.1},), {}, ({"lr": 0.1},)),
    ("log_table", (["a"], [[1]]), {}, (["a"], [[1]], "Table", 7)),
    ("log_table", (("a",), ((1,),)), {"name": "t", "step": 3}, (["a"], [[1]], "t", 3)),
    ("log_images", (IMAGE,), {}, (IMAGE, "Images", False, 7, None, None, True)),
    (
        "log_images",
        (IMAGE,),
        {"name": "i", "step": 3, "masks": {"m": MASK}, "mask_class_labels": {0: "no"}, "use_table": False},
        (IMAGE, "i", False, 3, {"m": MASK}, {0: "no"}, False),
    ),
    (
        "log_images",
        (np.zeros((4, 5, 3)), "i", True),
        {},
        (np.zeros((4, 5, 3)), "i", True, 7, None, None, True),
    ),
    ("log_text", ("x",), {}, ("x", "Text", 7)),
    ("log_text", ("x", "t", 3), {}, ("x", "t", 3)),
    ("log_audio", (SOUND, 8000), {}, (SOUND, 8000, "Audio", 7)),
    ("log_audio", (SOUND, 8000, "a", 3), {}, (SOUND, 8000, "a", 3)),
    ("log_video", (FRAMES, 30), {}, (FRAMES, 30, "Video", 7)),
    ("log_video", ("a.mp4",), {"name": "v", "step": 3}, ("a.mp4", None, "v", 3)),
    ("log_histogram", (SOUND,), {}, (SOUND, "Histogram", 7, 64)),
    ("log_histogram", (SOUND, "h", 3, [0.0, 1.0]), {}, (SOUND, "h", 3, [0.0, 1.0])),
    ("log_point_cloud", (POINTS,), {}, (POINTS, "Points", 7, None)),
    ("log_point_cloud", (POINTS, "p", 3, POINTS), {}, (POINTS, "p", 3, POINTS)),
    ("log_traces", ({"a": object},), {}, ({"a": object},)),
    ("flush", (), {}, ()),
]
each_call = pytest.mark.parametrize(("method", "args", "kwargs", "expected"), CALLS)


def _reaches(method):
    return "log_metrics" if method == "log_scalar" else method


def _same(one, other):
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return type(one) is type(other) and np.array_equal(one, other)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


@pytest.fixture
def state():
    """A run that has completed seven batches."""
    return State("mine", timestamp=Timestamp(batch=7, epoch=2), rank=0)


# Fan-out
# ---------------------------------------------------------------------------------------------------------


@each_call
def test_every_destination_gets_the_record_by_position(state, method, args, kwargs, expected):
    """All arguments are filled in, in Composer's order, so that a subclass may choose their names."""
    first, second = Records(), Records()
    logger = Logger(state, [first, second], raise_errors=True, strict=True)

    getattr(logger, method)(*args, **kwargs)

    for destination in (first, second):
        ((name, given, named),) = destination.calls
        assert (name, named) == (_reaches(method), {})
        assert _same(given, expected)


@each_call
def test_a_record_that_one_destination_refuses_still_reaches_the_others(
    state, method, args, kwargs, expected
):
    """With `strict` the refusal is raised, once all were called."""
    before, after = Records(), Records()
    logger = Logger(state, [before, RefusesAll(), after], strict=True)

    with pytest.raises(RecordError, match=r"record must be better, got this\."):
        getattr(logger, method)(*args, **kwargs)

    assert [name for name, *_ in before.calls + after.calls] == [_reaches(method)] * 2


@each_call
def test_without_a_destination_nothing_happens(state, method, args, kwargs, expected):
    """Training code need not check whether there are destinations."""
    assert getattr(Logger(state), method)(*args, **kwargs) is None


@each_call
def test_after_close_every_call_is_refused(state, method, args, kwargs, expected):
    """The destination gets nothing, and the message says what to do."""
    destination = Records()
    logger = Logger(state, destination)
    Engine(state, logger).close()

    with pytest.raises(
        EngineClosedError,
        match=rf"{_reaches(method)} was called after the run was closed.*Make a new Trainer or Run",
    ):
        getattr(logger, method)(*args, **kwargs)

    assert destination.calls == []


def test_a_refusal_and_a_bad_metric_are_both_reported(state):
    """Neither hides the other."""
    with pytest.raises(RecordError, match=r"metric 'bad' must be a scalar.* record must be better"):
        Logger(state, RefusesAll(), strict=True).log_metrics({"good": 1, "bad": "x"})


@pytest.mark.parametrize("kind", [list, tuple])
def test_destinations_are_one_or_several(state, kind):
    """The argument takes one, a list or a tuple of them, or nothing."""
    one, other = Records(), Records()

    assert Logger(state).destinations == ()
    assert Logger(state, one).destinations == (one,)
    assert Logger(state, kind([one, other])).destinations == (one, other)


@pytest.mark.parametrize(
    "destination", ["console", Records, Callback(), None, 5], ids=["str", "class", "callback", "None", "int"]
)
def test_other_objects_than_destinations_are_refused(state, destination):
    """For a class that was not called, the message says so."""
    with pytest.raises(TypeError, match="logger destination must be a LoggerDestination, got") as caught:
        Logger(state, [destination])

    assert ("Write Records(...)" in str(caught.value)) is (destination is Records)


# Steps
# -----------------------------------------------------------------------------------------------------------


def test_the_default_step_follows_the_timestamp(state):
    """It is read at each call."""
    destination = Records()
    logger = Logger(state, destination)

    logger.log_metrics({"a": 1.0})
    state.timestamp = state.timestamp.to_next_batch()
    logger.log_metrics({"a": 1.0})

    assert [args[1] for _, args, _ in destination.calls] == [7, 8]


@pytest.mark.parametrize("step", [3, np.int64(3), np.uint8(3), torch.tensor(3)])
def test_a_step_may_be_an_integer_of_any_library(state, step):
    """It arrives as Python's own."""
    destination = Records()
    logger = Logger(state, destination)

    logger.log_metrics({"a": 1.0}, step)
    logger.log_text("x", step=step)

    assert [(args[-1], type(args[-1])) for _, args, _ in destination.calls] == [(3, int)] * 2


@pytest.mark.parametrize("step", [0, -1])
def test_a_step_of_zero_is_a_step(state, step):
    """It isn't mistaken for a missing step."""
    destination = Records()

    Logger(state, destination).log_metrics({"a": 1.0}, step)

    assert destination.calls[0][1] == ({"a": 1.0}, step)


@pytest.mark.parametrize("step", [1.0, "3", np.float32(1), [3]])
@pytest.mark.parametrize("method", ["log_metrics", "log_text"])
def test_a_step_that_is_no_integer_is_dropped(state, step, method, caplog):
    """The record gets the default step; with `strict` the call raises, and nothing is logged."""
    destination, other = Records(), Records()
    value = {"a": 1.0} if method == "log_metrics" else "x"

    getattr(Logger(state, destination), method)(value, step=step)
    with pytest.raises(RecordError, match="step must be a whole number, got"):
        getattr(Logger(state, other, strict=True), method)(value, step=step)

    assert [given[-1] for _, given, _ in destination.calls] == [int(state.timestamp.batch)]
    assert other.calls == []
    assert "step must be a whole number, got" in caplog.text


# Values
# ----------------------------------------------------------------------------------------------------------


def test_tensors_arrive_detached_on_the_host(state):
    """In images, masks, sounds, videos, histograms with their edges, and point clouds."""
    destination = Records()
    logger = Logger(state, destination, raise_errors=True, strict=True)

    def tensor(*shape):
        return torch.zeros(*shape, requires_grad=True)

    logger.log_images([tensor(3, 4, 5)], masks={"m": [tensor(4, 5)]})
    logger.log_audio(tensor(5), 8000)
    logger.log_video(tensor(2, 3, 4, 5), 30)
    logger.log_histogram(tensor(5), bins=torch.linspace(0, 1, 5, requires_grad=True))
    logger.log_point_cloud(tensor(5, 3), colors=tensor(5, 3))

    def leaves(value):
        if isinstance(value, list | tuple):
            return [leaf for item in value for leaf in leaves(item)]
        return leaves(list(value.values())) if isinstance(value, dict) else [value]

    tensors = [
        one for _, args, _ in destination.calls for one in leaves(args) if isinstance(one, torch.Tensor)
    ]
    assert len(tensors) == 8
    assert not any(one.requires_grad for one in tensors)


def test_a_sample_rate_of_numpy_arrives_as_an_int(state):
    """Destinations write it into headers."""
    destination = Records()

    Logger(state, destination).log_audio(SOUND, np.int64(8000))

    assert type(destination.calls[0][1][1]) is int


def test_hyperparameters_are_plain_and_hold_no_secret(state):
    """The type of their container doesn't matter."""
    destination = Records()
    hyperparameters = {"path": pathlib.Path("a"), "wandb": {"api_key": "xyz"}, "num_tokens": 512}

    Logger(state, destination).log_hyperparameters(hyperparameters)

    assert destination.calls[0][1] == ({"path": "a", "wandb": {"api_key": REDACTED}, "num_tokens": 512},)
    assert hyperparameters["wandb"] == {"api_key": "xyz"}


# Files
# -----------------------------------------------------------------------------------------------------------


def test_a_file_is_handed_over_with_state_name_path_and_overwrite(state, tmp_path):
    """The path is a `Path`, and `overwrite` is passed by name."""
    file = tmp_path / "a.pt"
    file.write_text("x")
    destination = Records()
    logger = Logger(state, destination, raise_errors=True, strict=True)

    logger.upload_file("b.pt", str(file))
    logger.upload_file("b.pt", file, overwrite=True)

    assert destination.calls == [
        ("upload_file", (state, "b.pt", file), {"overwrite": False}),
        ("upload_file", (state, "b.pt", file), {"overwrite": True}),
    ]
    assert isinstance(destination.calls[0][1][2], pathlib.Path)


def test_path_of_an_existing_file_is_no_template(state, tmp_path):
    """Placeholders in a local path are filled in only where no such file exists; a remote name always is one."""
    path = tmp_path / "ep{epoch}.pt"
    path.write_text("x")
    (tmp_path / "ep2.pt").write_text("another file")
    destination = Records()
    logger = Logger(state, destination)

    logger.upload_file("{run_name}/ep{epoch}/rank{rank}.pt", path)
    path.unlink()
    logger.upload_file("b.pt", path)

    assert [call[1][1:] for call in destination.calls] == [
        ("mine/ep2/rank0.pt", path),
        ("b.pt", tmp_path / "ep2.pt"),
    ]


def test_literal_name_keeps_its_braces(state, tmp_path):
    """All methods of files take the name that somebody else chose as it is."""
    path = tmp_path / "a.pt"
    path.write_text("x")
    destination, has = Records(), Keeps("{run_name}.pt")

    Logger(state, destination).upload_file(LiteralName("{run_name}.pt"), path)
    Logger(state, has).download_file(LiteralName("{run_name}.pt"), "b.pt")

    assert destination.calls[0][1] == (state, "{run_name}.pt", path)
    assert has.asked == [("{run_name}.pt", "b.pt", False, True)]


def test_a_missing_file_is_refused_if_a_destination_takes_files(state, tmp_path):
    """The message has both names; without an uploader it is no error."""
    missing = tmp_path / "ep{epoch}.pt"

    with pytest.raises(FileNotFoundError, match=r"file to upload as 'mine\.pt' must exist, got '.*ep2\.pt'"):
        Logger(state, Records()).upload_file("{run_name}.pt", missing)
    Logger(state, Records(uploads=False)).upload_file("a.pt", missing)


def test_a_directory_is_refused(state, tmp_path):
    """The call raises; an upload is one file."""
    with pytest.raises(IsADirectoryError, match="is a directory"):
        Logger(state, Records()).upload_file("a", tmp_path)


def test_a_logger_knows_whether_files_go_anywhere(state):
    """One destination that takes files is enough."""
    assert not Logger(state).has_file_upload_destination()
    assert not Logger(state, Records(uploads=False)).has_file_upload_destination()
    assert Logger(state, [Records(uploads=False), Records()]).has_file_upload_destination()


class Keeps(Records):
    """Stores these files and no others."""

    def __init__(self, *names, error=FileNotFoundError):
        super().__init__()
        self.names = names
        self.error = error
        self.asked = []

    def download_file(self, remote_file_name, destination, overwrite=False, progress_bar=True):
        self.asked.append((remote_file_name, destination, overwrite, progress_bar))
        if remote_file_name not in self.names:
            raise self.error(remote_file_name)


def test_a_file_comes_from_the_first_destination_that_has_it(state):
    """Destinations that keep no files aren't asked, and neither are later ones."""
    none = Keeps("a.pt")
    none.uploads = False
    lacks, cannot, has, later = Keeps(), Keeps(error=NotImplementedError), Keeps("a.pt"), Keeps("a.pt")

    Logger(state, [none, lacks, cannot, has, later]).download_file(
        "a.pt", "b.pt", overwrite=True, progress_bar=False
    )

    asked = [("a.pt", "b.pt", True, False)]
    assert [one.asked for one in (none, lacks, cannot, has, later)] == [[], asked, asked, asked, []]


def test_downloads_fill_in_placeholders(state):
    """They are filled in as they were in the upload; the local path is taken as it is."""
    has = Keeps("mine/ep2.pt")

    Logger(state, has).download_file("{run_name}/ep{epoch}.pt", pathlib.Path("{run_name}.pt"))

    assert has.asked == [("mine/ep2.pt", "{run_name}.pt", False, True)]


def test_a_file_that_no_destination_has_is_an_error_that_names_them(state):
    """If no destination stores files, the message says so."""
    with pytest.raises(FileNotFoundError, match=r"file 'a\.pt' was not found; asked: Keeps, Keeps\."):
        Logger(state, [Keeps(), Keeps()]).download_file("a.pt", "b.pt")
    with pytest.raises(FileNotFoundError, match="no destination, for none stores files"):
        Logger(state).download_file("a.pt", "b.pt")


def test_a_local_file_in_the_way_is_for_the_caller_to_know(state):
    """The next destination isn't tried, because it would meet the same file."""
    first, second = Keeps(error=FileExistsError), Keeps("a.pt")

    with pytest.raises(FileExistsError):
        Logger(state, [first, second]).download_file("a.pt", "b.pt")

    assert second.asked == []


def test_files_are_refused_after_close(state, tmp_path):
    """Both directions are: a closed destination is not called."""
    file = tmp_path / "a.pt"
    file.write_text("x")
    destination = Keeps("a.pt")
    logger = Logger(state, destination)
    Engine(state, logger).close()

    with pytest.raises(EngineClosedError, match="upload_file was called after the run was closed"):
        logger.upload_file("a.pt", file)
    with pytest.raises(EngineClosedError, match="download_file was called after the run was closed"):
        logger.download_file("a.pt", "b.pt")

    assert (destination.calls, destination.asked) == ([], [])
