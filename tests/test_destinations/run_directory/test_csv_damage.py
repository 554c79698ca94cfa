"""Damaged bytes in `metrics.csv` cost one block of rows: readers name it, and the next session keeps it."""

import json
import random
import shutil

import pytest

from destinations.cli import main
from destinations.history.snapshot import last_rows
from destinations.history.sums import read_sums
from destinations.run_directory import read_rows
from destinations.run_directory.metrics_csv import MetricsCsv
from destinations.runs import Run, open_runs
from destinations.runs.content.series import run_blocks
from destinations.runs.move.ledger import ReadPosition
from destinations.runs.move.stored import records_of
from destinations.runs.summary import computed_summary
from tests.crash.disk_model import HastyDisk
from tests.test_destinations.run_directory.test_parts import Writer
from tests.test_destinations.runs.written import Written

STEPS = 4000


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run with a few blocks."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    with Written(run_dir, flush_seconds=1000) as run:
        for step in range(STEPS):
            run.log({"loss": step / 8, "acc": 1 / (step + 1)}, step)
    return run_dir


@pytest.fixture
def copy(written, tmp_path):
    """A copy of the run that a test may damage."""
    return shutil.copytree(written, tmp_path / "run")


def flip(run_dir, at):
    """Flips a bit, and returns its block."""
    path = run_dir / "metrics.csv"
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)
    (section,) = read_sums(path).sections
    return next(block for block in section.blocks if block.start <= at < block.end)


READINGS = {
    "rows": lambda run_dir: [row.step for row in read_rows(run_dir)],
    "last": lambda run_dir: [row.step for row in last_rows(run_dir, STEPS, 0, {"loss"})],
    "blocks": lambda run_dir: [
        step for block in run_blocks(run_dir) for step in block.step[block.columns["loss"][1]].tolist()
    ],
    "send": lambda run_dir: [item.step for item in records_of(run_dir, ReadPosition())],
    "series": lambda run_dir: Run.open(run_dir).series("loss").step.tolist(),
    "summary": lambda run_dir: list(range(computed_summary(run_dir, 0)["loss"].count)),
}


def test_damage_loses_one_block_and_every_reader_reports_it(copy, caplog, capsys):
    """Rows around it are there; log, API, command line and page name the file and count the lost rows."""
    assert Run.open(copy).problems() == []
    assert [len(read(copy)) for read in READINGS.values()] == [STEPS] * len(READINGS)
    assert caplog.text == ""
    size = (copy / "metrics.csv").stat().st_size
    block = flip(copy, size // 2)
    assert 64 << 10 <= block.end - block.start < 65 << 10
    lost = block.rows

    for name, read in READINGS.items():
        caplog.clear()
        assert len(read(copy)) == STEPS - lost, name
        assert f"the checksum of {lost} rows" in caplog.text, name
    steps = READINGS["rows"](copy)
    first = next(at for at, step in enumerate(steps) if at != step)
    assert steps == [*range(first), *range(first + lost, STEPS)]
    text = f"metrics.csv is damaged: {lost:,} of {STEPS:,} rows cannot be read"
    with open_runs(copy.parent) as runs:
        (problem,) = runs["run"].problems()
    assert problem.startswith(text)
    assert main(["runs", "show", str(copy)]) == 0
    assert text in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(12))
def test_one_changed_bit_anywhere_is_never_silent(copy, caplog, seed):
    """Readers either have the right values or report that they don't."""
    path = copy / "metrics.csv"
    expected = read_rows(copy)
    content = bytearray(path.read_bytes())
    draw = random.Random(seed)
    at = draw.randrange(len(content)) if seed % 3 else draw.randrange(40)
    content[at] ^= 1 << draw.randrange(8)
    path.write_bytes(content)

    rows = read_rows(copy)

    assert rows != expected
    assert "metrics.csv" in caplog.text
    assert "metrics.csv" in "".join(Run.open(copy).problems())


def test_rows_of_a_killed_run_are_compared(tmp_path, caplog):
    """Its position has the checksum of the rows that are in no block yet."""
    writer = Writer(tmp_path)
    writer.log(range(20))
    writer.drain.run()
    writer.log(range(20, 25))
    writer.die()
    path = tmp_path / "metrics.csv"
    whole = path.read_bytes()

    path.write_bytes(whole.replace(b",1.25\n", b",1.26\n"))
    assert [row.step for row in read_rows(tmp_path)] == [20, 21, 22, 23, 24]
    assert "the checksum of 20 rows" in caplog.text
    caplog.clear()
    path.write_bytes(whole[: whole.rindex(b"\n", 0, -1) + 1])
    assert len(read_rows(tmp_path)) == 24
    assert "metrics.csv is cut: 1 of 20 rows are lost" in caplog.text


def test_a_session_keeps_the_damaged_file(copy, caplog):
    """Its rows stay blank and reported; `abandoned/` has the original file, and no other row moves."""
    path = copy / "metrics.csv"
    block = flip(copy, path.stat().st_size // 3)
    damaged = path.read_bytes()
    left = read_rows(copy)

    with Written(copy, batch=STEPS) as run:
        run.log({"loss": -1.0}, STEPS)

    assert f"{block.rows} rows are lost" in caplog.text
    caplog.clear()
    rows = read_rows(copy)
    assert rows[:-1] == left
    assert rows[-1].metrics == {"loss": -1.0}
    assert (copy / "abandoned/metrics.foreign0.csv").read_bytes() == damaged
    text = f"{block.rows:,} rows of metrics.csv were damaged, and are lost"
    assert text in caplog.text
    assert Run.open(copy).problems() == [text]
    assert json.loads((copy / "sidecar.json").read_bytes())["status"] == "completed"
    assert sum(one.rows for one in read_sums(path).sections[0].blocks) == STEPS + 1


def test_a_session_takes_rows_of_earlier_ones_from_their_parts(copy, caplog):
    """`metrics.csv` is a view of the parts, so the next session repairs it without a loss."""
    with Written(copy, batch=STEPS) as run:
        run.log({"loss": -1.0}, STEPS)
    expected = read_rows(copy)
    flip(copy, 1000)
    assert len(read_rows(copy)) < STEPS

    with Written(copy, batch=STEPS + 1) as run:
        run.log({"loss": -2.0}, STEPS + 1)

    assert "0 rows are lost" in caplog.text
    assert read_rows(copy)[:-1] == expected
    assert Run.open(copy).problems() == []


def test_a_file_without_checksums_is_read_as_it_is(copy, caplog):
    """To edit a row, you delete the checksums, as the warning says; the next session writes new ones."""
    path = copy / "metrics.csv"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"\n7,0,", b"\n9,0,", 1))
    read_rows(copy)
    assert "If you have changed them, delete metrics.sums.jsonl" in caplog.text
    (copy / "metrics.sums.jsonl").unlink()
    caplog.clear()

    assert [row.step for row in read_rows(copy)][6:9] == [6, 9, 8]
    with Written(copy, batch=STEPS) as run:
        run.log({"loss": -1.0}, STEPS)
    assert len(read_rows(copy)) == STEPS + 1
    assert caplog.text == ""
    assert sum(one.rows for one in read_sums(path).sections[0].blocks) == STEPS + 1


def test_a_replaced_file_has_new_checksums(tmp_path):
    """After new columns, a session that goes back, and a closed part, the checksums match the file."""
    writer = Writer(tmp_path, part_bytes=1 << 20)
    for step in range(0, 4000, 100):
        writer.log(range(step, step + 100), **{f"m{step // 1000}": 1.0})
        writer.drain.run()
    writer.go_back(2000)
    writer.log(range(2000, 3000))
    writer.drain.run()
    writer.die()

    assert [row.step for row in read_rows(tmp_path)] == list(range(3000))
    (section,) = read_sums(tmp_path / "metrics.csv").sections
    content = (tmp_path / "metrics.csv").read_bytes()
    assert sum(block.rows for block in section.blocks) == content[: section.blocks[-1].end].count(b"\n") - 1
    content = bytearray(content)
    content[-2] ^= 1
    (tmp_path / "metrics.csv").write_bytes(content)
    assert len(read_rows(tmp_path)) < 3000


def test_rows_rewritten_after_an_error_have_new_checksums(tmp_path):
    """The last digit of a time may differ then, and the number of rows may be the same as before."""
    csv = MetricsCsv(tmp_path / "metrics.csv", HastyDisk())
    csv.begin(["loss"])
    size, rows = csv.size, csv.rows
    for digit in "12":
        csv.rewind(size, rows)
        csv.append([f"{step},0,1.{digit},0.5\n".encode() for step in range(10_000)])
        csv.write_sums()
    csv.write_sums(is_last=True)
    csv.close()

    assert [row.step for row in read_rows(tmp_path)] == list(range(10_000))
    (section,) = read_sums(tmp_path / "metrics.csv").sections
    assert sum(block.rows for block in section.blocks) == 10_000


@pytest.mark.parametrize("name", ["sessions.jsonl", "metrics.history.jsonl"])
def test_a_changed_digit_in_a_line_is_detected(copy, caplog, name):
    """A damaged line about sessions or history is ignored; it stays in the file, and readers are warned."""
    with Written(copy, batch=STEPS) as run:
        run.log({"loss": -1.0}, STEPS)
    path = copy / name
    lines = path.read_bytes().splitlines(keepends=True)
    digit = lines[0].index(b"1") if name == "sessions.jsonl" else lines[0].index(b'"view": 0') + 8
    lines[0] = lines[0][:digit] + b"7" + lines[0][digit + 1 :]
    path.write_bytes(b"".join(lines))

    if name == "sessions.jsonl":
        assert len(Run.open(copy).sessions) == 1
        assert Run.open(copy).problems() == ["sessions.jsonl has 1 damaged lines: what they say is not known"]
        with Written(copy, batch=STEPS + 1) as run:
            run.log({"loss": -1.0}, STEPS + 1)
        assert path.read_bytes().startswith(lines[0])
        assert (
            "sessions.jsonl has a damaged line, which is left out: its checksum is another one" in caplog.text
        )
    else:
        with pytest.raises(OSError, match="a line is damaged: its checksum is another one"):
            read_rows(copy)
        with pytest.raises(OSError, match="a line is damaged"):
            Run.open(copy).problems()
