"""Functions as a destination."""

import pytest

from destinations import Functions
from events import Run


def test_each_kind_of_record_goes_to_its_function(tmp_path):
    """The function gets the method's arguments; kinds without a function are not even evaluated."""
    calls = []
    (tmp_path / "a").write_bytes(b"x")
    functions = Functions(
        log_metrics=lambda metrics, step: calls.append(("metrics", dict(metrics), step)),
        log_text=lambda text, name, step: calls.append(("text", text, name, step)),
        upload_file=lambda state, name, path, *, overwrite: calls.append(("file", name, overwrite)),
        flush=lambda: calls.append(("flush",)),
    )

    with Run(functions, run_name="mine") as run:
        run.log_metrics({"loss": lambda: 0.5})
        run.log_text("hello", "note", step=3)
        run.log_images(lambda: pytest.fail("nobody takes images"))
        run.upload_file("a.txt", tmp_path / "a")
        run.logger.flush()

    assert calls == [
        ("metrics", {"loss": 0.5}, 0),
        ("text", "hello", "note", 3),
        ("file", "a.txt", False),
        ("flush",),
    ]


def test_a_function_that_raises_does_not_stop_training(caplog):
    """It's handled like any other destination."""

    def broken(metrics, step):
        raise OSError("no disk")

    seen = []
    with Run(
        [Functions(log_metrics=broken), Functions(log_metrics=lambda *call: seen.append(call))],
        run_name="mine",
    ) as run:
        run.log_metrics({"loss": 0.5})

    assert seen == [({"loss": 0.5}, 0)]
    assert "no disk" in caplog.text


def test_without_upload_file_no_files_are_accepted():
    """Callers therefore don't create files in vain."""
    assert Functions(log_metrics=print).can_upload_files() is False


@pytest.mark.parametrize(
    ("functions", "complaint"),
    [
        ({"log_metric": print}, "Write log_metrics=…"),
        ({"close": print}, "unknown method"),
        ({"log_text": "print"}, "log_text must be a function"),
    ],
)
def test_an_unknown_kind_raises(functions, complaint):
    """The error names the nearest match, if there is one."""
    with pytest.raises(TypeError, match=complaint):
        Functions(**functions)
