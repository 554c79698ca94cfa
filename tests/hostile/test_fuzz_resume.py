"""A session resumes a run with damaged files and writes its rows.

`fuzzing` sets the number of examples.
"""

import shutil

import numpy as np
import pytest
from hypothesis import example, given

from destinations import RunDirectory
from destinations.run_directory import read_series
from events import Run
from tests.hostile.fuzzing import changed_text, damaged, fuzz, limit

__all__ = ["limit"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Writes a run of three rows, with hyperparameters, an image, a text and a table."""
    folder = tmp_path_factory.mktemp("written") / "run"
    with Run(RunDirectory(folder), run_name="written") as run:
        run.log_hyperparameters({"lr": 0.1})
        for step in range(3):
            run.log_metrics({"loss": 1.0, "acc": 0.5}, step=step)
        run.log_images(np.zeros((4, 4)), "Inputs", step=1)
        run.log_text("words", "Words")
        run.log_table(["a"], [[1]], "Table")
    return folder


@pytest.mark.parametrize(
    "name",
    ["sidecar.json", "summary.json", "environment.json", "sessions.jsonl", "media.jsonl", "hparams.yaml"],
)
def test_a_run_with_a_damaged_file_is_resumed(written, tmp_path, caplog, name):
    """The CSV has the rows of both sessions, and no error says that the folder can't be written."""
    content = (written / name).read_bytes()
    contents = damaged(content)
    if not name.endswith(".yaml"):
        contents |= changed_text(content)

    @fuzz(12)
    @example(content.replace(b'"mean": 1.0', b'"mean": ["a"]'))
    @example(content.replace(b'"bytes": ', b'"bytes": 1e999, "b": '))
    @given(contents)
    def check(data):
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(written, folder)
        (folder / name).write_bytes(data)
        caplog.clear()
        with Run(RunDirectory(folder, if_exists="resume"), run_name="written") as run:
            run.log_metrics({"loss": 2.0}, step=3)
        assert read_series(folder, "loss") == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0)]
        assert "not writable" not in caplog.text

    check()
