"""The base classes of destinations."""

import inspect

import pytest

from destinations.base import LoggerDestination, RecordDestination
from events import Run
from events.logger.records import RECORD_KINDS

# These have no name, or aren't records.
OTHERS = {"log_metrics", "log_hyperparameters", "upload_file"}


class Noting(RecordDestination):
    """Keeps its arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def log_record(self, kind, arguments):
        self.calls.append((kind, arguments))


@pytest.mark.parametrize("method", sorted(set(RECORD_KINDS) - OTHERS))
def test_a_record_destination_needs_one_method_for_all_kinds(method):
    """Each kind has the arguments of `LoggerDestination`, counts as implemented, and is passed on by name."""
    noting, base = Noting(), getattr(LoggerDestination, method)
    parameters = list(inspect.signature(base).parameters.values())[1:]
    required = {one.name: object() for one in parameters if one.default is one.empty}
    optional = {
        one.name: one.default
        for one in parameters
        if one.default is not one.empty and one.kind is not one.KEYWORD_ONLY
    }

    getattr(noting, method)(*required.values())

    assert noting.calls == [(method.removeprefix("log_"), {**required, **optional})]
    assert inspect.signature(getattr(Noting, method)) == inspect.signature(base)
    assert not hasattr(getattr(noting, method), "is_default")


def test_keyword_only_arguments_are_passed_on_if_given():
    """The logger passes them the same way: a caption of None isn't passed."""
    noting = Noting()

    noting.log_video("clip.avi", 4, "clip", 7, caption="a jump", format="gif")
    noting.log_audio("beep.wav", 8000, caption=None)

    assert noting.calls == [
        (
            "video",
            {"video": "clip.avi", "fps": 4, "name": "clip", "step": 7, "caption": "a jump", "format": "gif"},
        ),
        ("audio", {"audio": "beep.wav", "sample_rate": 8000, "name": "Audio", "step": None}),
    ]


class Both(LoggerDestination):
    """Has a method for texts, and one method for all other kinds."""

    def __init__(self):
        super().__init__()
        self.kinds = []

    def log_text(self, text, name="Text", step=None):
        self.kinds.append("text, by its method")

    def log_record(self, kind, arguments):
        self.kinds.append(kind)


class Further(Both):
    """Inherits both, and has a method for tables too."""

    def log_table(self, columns, rows, name="Table", step=None):
        self.kinds.append("table, by its method")
        super().log_table(columns, rows, name, step)


def test_log_record_gets_each_kind_without_a_method():
    """The class need not be a `RecordDestination`: the method gets every kind that has no other method."""
    both, further = Both(), Further()
    with Run(loggers=[both, further], run_name="mine") as run:
        run.log_text("hello")
        run.log_table(["a"], [[1]])
        run.log_metrics({"loss": 1.0})

    assert both.kinds == ["text, by its method", "table"]
    assert further.kinds == ["text, by its method", "table, by its method", "table"]
