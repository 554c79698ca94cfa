"""The hooks of a callback are the events, no more and no less."""

import inspect

import pytest

from destinations import LoggerDestination
from events import Callback, Engine, Event, Logger, Run, State
from events.logger.records import RECORD_KINDS

LIFECYCLE = {"run_event", "close", "post_close", "state_dict", "load_state_dict"}


def _public(kind):
    return {name for name in dir(kind) if not name.startswith("_")}


def test_the_public_methods_are_the_events_and_the_lifecycle():
    """Nothing else is public on a callback."""
    assert _public(Callback) == {event.value for event in Event} | LIFECYCLE | {"state_key"}


def test_a_destination_adds_records_and_files():
    """A destination has Composer's methods, and ours in the same manner; and how often it is written to."""
    added = _public(LoggerDestination) - _public(Callback)

    assert added == {
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
        "download_file",
        "delete_file",
        "file_uri",
        "has_uploaded",
        "list_files",
        "may_drop_files",
        "can_upload_files",
        "keeps_files_here",
        "flush",
        "should_write",
        "write_rate",
        "write_schedule",
        "place",
        "require",
    }


def test_a_hook_takes_state_and_logger():
    """Each hook, and close, is called as (state, logger)."""
    for name in [*(event.value for event in Event), "close"]:
        assert list(inspect.signature(getattr(Callback, name)).parameters) == ["self", "state", "logger"]


def test_the_other_methods_have_composers_signatures():
    """A callback written for Composer overrides these with the same arguments."""
    signatures = {
        name: list(inspect.signature(getattr(Callback, name)).parameters) for name in LIFECYCLE - {"close"}
    }

    assert signatures == {
        "run_event": ["self", "event", "state", "logger"],
        "post_close": ["self"],
        "state_dict": ["self"],
        "load_state_dict": ["self", "state"],
    }


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("log_hyperparameters", "(self, hyperparameters)"),
        ("log_metrics", "(self, metrics, step=None)"),
        ("log_table", "(self, columns, rows, name='Table', step=None, *, caption=None)"),
        (
            "log_images",
            "(self, images, name='Images', channels_last=False, step=None, masks=None, mask_class_labels=None, use_table=True, *, captions=None)",
        ),
        ("log_traces", "(self, traces)"),
        ("upload_file", "(self, state, remote_file_name, file_path, *, overwrite)"),
        ("download_file", "(self, remote_file_name, destination, overwrite=False, progress_bar=True)"),
        ("can_upload_files", "(self)"),
        ("log_text", "(self, text, name='Text', step=None)"),
        ("log_audio", "(self, audio, sample_rate, name='Audio', step=None, *, caption=None)"),
        ("log_video", "(self, video, fps=None, name='Video', step=None, *, caption=None, format='mp4')"),
        ("log_histogram", "(self, values, name='Histogram', step=None, bins=64)"),
        ("log_point_cloud", "(self, points, name='Points', step=None, colors=None, *, caption=None)"),
        ("flush", "(self)"),
    ],
)
def test_a_destination_has_composers_names_and_defaults(name, signature):
    """A destination written for Composer fits with its import changed; what is ours goes by keyword."""
    parameters = inspect.signature(getattr(LoggerDestination, name)).parameters.values()
    bare = inspect.Signature([one.replace(annotation=inspect.Parameter.empty) for one in parameters])

    assert str(bare) == signature


def test_a_callback_that_overrides_nothing_does_nothing():
    """Every hook of the base class is there to be called."""
    state = State("r")
    logger = Logger(state)
    callback = Callback()

    answers = [getattr(callback, event.value)(state, logger) for event in Event]

    assert answers == [None] * 40
    assert callback.close(state, logger) is None
    assert callback.post_close() is None
    assert callback.state_dict() == {}
    assert callback.load_state_dict({"a": 1}) is None


def test_a_destination_that_overrides_nothing_ignores_every_record(tmp_path):
    """What a subclass does not implement is ignored, and it keeps no files."""
    state = State("r")
    file = tmp_path / "f"
    file.write_text("x")
    logger = Logger(state, LoggerDestination(), raise_errors=True)
    engine = Engine(state, logger)

    logger.log_hyperparameters({"a": 1})
    logger.log_metrics({"a": 1.0})
    logger.log_table(["a"], [[1]])
    logger.log_text("t")
    logger.log_traces({"a": 1})
    logger.upload_file("f", file)
    logger.flush()
    engine.close()

    assert not LoggerDestination().can_upload_files()
    with pytest.raises(NotImplementedError, match="LoggerDestination keeps no files"):
        LoggerDestination().download_file("f", str(tmp_path / "g"))


def test_every_record_kind_is_a_method_of_loggers_runs_and_destinations():
    """`RECORD_KINDS` lists all of them, and nothing else."""
    run = Run(run_name="r")

    for one in (Logger, LoggerDestination, run):
        methods = {name for name in dir(one) if name.startswith("log_")} - {"log_scalar", "log_record"}
        assert methods | {"upload_file"} == set(RECORD_KINDS)
