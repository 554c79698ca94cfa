"""`verify` finds a changed byte and a missing or truncated file in a run, and nothing in a valid run."""

import json
import shutil

import pytest

from destinations.run_directory.layout import part_path, parts_path
from destinations.runs import Run
from tests.test_destinations.run_directory.test_parts import WrittenInParts
from tests.test_destinations.runs.foreign_runs import command


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run with everything: two sessions, closed parts, later rows, media, tables and files."""
    run_dir = tmp_path_factory.mktemp("runs") / "full"
    file = run_dir.parent / "weights.bin"
    file.write_bytes(bytes(1000))
    for batch in (0, 300):
        with WrittenInParts(run_dir, batch=batch, flush_seconds=1000) as run:
            run.logger.log_hyperparameters({"lr": 0.1})
            for step in range(batch, batch + 300):
                run.log({"loss": step / 8}, step)
                if step % 100 == 99:
                    run.flush()
            run.logger.log_text("hello", "note")
            run.logger.log_table(["a"], [[1], [2]], "table")
            run.logger.upload_file("weights.bin", file, overwrite=True)
    return run_dir


@pytest.fixture
def copy(written, tmp_path):
    """A copy of the run that a test may damage."""
    return shutil.copytree(written, tmp_path / "full")


def flipped(path, at=None):
    """Flips a bit in the middle or elsewhere."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 4
    path.write_bytes(content)


def test_a_valid_run_has_no_findings(written):
    """The command prints no findings, and the exit code is 0."""
    assert list(Run.open(written).verify()) == []
    assert command("verify", str(written)) == (0, "full: no problem\n", "")


DAMAGES = {
    "metrics.csv": "rows are lost",
    "parts/metrics/00000001.parquet": "has other bytes than were written: ",
    "metrics.history.jsonl": "a line is damaged",
    "sessions.jsonl": "a line is damaged",
    "sidecar.json": "cannot be read",
    "environment.json": "cannot be read",
    "hparams.yaml": "cannot be read",
    "texts.jsonl": "1 lines are damaged",
    "artifacts/weights.bin": "has other bytes than were written",
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_changed_bit_is_found(copy, name):
    """The finding names the file, and the exit code is 1."""
    at = {"texts.jsonl": 0, "sidecar.json": 0, "environment.json": 0, "hparams.yaml": -1}.get(name)
    if name == "hparams.yaml":
        (copy / name).write_bytes(b"a: [1\n")
    else:
        flipped(copy / name, at)

    code, output, _ = command("verify", str(copy), "--json")

    assert code == 1
    ((one,),) = ([found for found in run["problems"] if found["is_damage"]] for run in json.loads(output))
    assert (one["file"], DAMAGES[name] in one["text"]) == (name, True)


@pytest.mark.parametrize(
    "name", ["tables/table/00000599_0.csv", "artifacts/weights.bin", "parts", "metrics.csv"]
)
def test_a_missing_file_is_found(copy, name):
    """A truncated file is found too."""
    path = copy / name
    if name.startswith("tables"):
        path = next((copy / "tables").rglob("*.csv"))
    elif name == "parts":
        path = part_path(parts_path(copy / "metrics.csv"), 1)
    content = path.read_bytes()

    path.unlink()
    code, output, _ = command("verify", str(copy))
    assert (code, "missing" in output) == (1, True), output
    path.write_bytes(content[: len(content) // 2])
    code, output, _ = command("verify", str(copy))
    assert (code, path.name in output) == (1, True), output


def test_rows_without_checksums_are_reported(copy):
    """Without a file of checksums, only damage goes unnoticed: the exit code is 0."""
    (copy / "metrics.sums.jsonl").unlink()

    code, output, _ = command("verify", str(copy))

    assert code == 0
    assert output.startswith("full: metrics.sums.jsonl: lacks checksums of ")


def without_last_lines(path, count):
    """Cuts whole lines off the end of a file."""
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-count]))


def test_part_missing_from_the_history_is_reported(copy, caplog):
    """A history truncated at a line doesn't list the last part, whose rows would silently be missing."""
    without_last_lines(copy / "metrics.history.jsonl", 1)

    text = "is in no line of metrics.history.jsonl: its rows are left out"
    assert [found.text.endswith(text) for found in Run.open(copy).verify()] == [True]
    assert len(Run.open(copy).series("loss")) < 600
    assert text in caplog.text


def test_rows_cut_with_their_checksums_are_counted(copy):
    """The summary of a completed run has the number of rows in its CSV."""
    with WrittenInParts(copy, batch=600, flush_seconds=1000) as run:
        for step in range(600, 620):
            run.log({"loss": step / 8}, step)
    assert list(Run.open(copy).verify()) == []
    without_last_lines(copy / "metrics.csv", 5)
    (copy / "metrics.sums.jsonl").unlink()

    found, *_ = Run.open(copy).verify()
    assert found.text.startswith("has 5 rows less than summary.json covers")
    assert "has 5 rows less" in Run.open(copy).problems()[0]
