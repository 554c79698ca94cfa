"""Parts that are deleted, cut or replaced: readers and the writer say what is missing, and no reader mixes two branches."""

import contextlib
import json
import os
import shutil

import pytest

from destinations.run_directory import read_rows
from destinations.run_directory.layout import part_path, parts_path
from destinations.run_directory.reader import PartChangedError, last_rows, take_snapshot
from destinations.runs import Run
from destinations.runs.content.follow import Follower
from destinations.runs.content.rank_reader import RankReader
from destinations.runs.content.series import run_blocks
from destinations.runs.content.sources import ReadPosition, items_of
from destinations.runs.content.where import Where, values_where
from destinations.runs.summary import computed_summary
from destinations.viewer.columns import ColumnCache
from tests.test_destinations.run_directory.test_parts import Writer, WrittenInParts, numbers

STEPS = 500


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run of several parts."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    with WrittenInParts(run_dir, flush_seconds=1000) as run:
        write(run)
    assert len(numbers(run_dir)) > 2
    return run_dir


def write(run):
    """Logs and drains."""
    for step in range(STEPS):
        run.log({"loss": step / 8}, step)
        if step % 50 == 49:
            run.flush()


@pytest.fixture
def copy(written, tmp_path):
    """A copy of the run, to be damaged."""
    return shutil.copytree(written, tmp_path / "run")


def file_of(run_dir, number, suffix=".csv"):
    """Returns the path of a part, or of its index."""
    return part_path(parts_path(run_dir / "metrics.csv"), number).with_suffix(suffix)


def cut(path):
    """Leaves half of the lines."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: len(lines) // 2]))


def emptied(path):
    """Leaves nothing."""
    path.write_bytes(b"")


def unlinked(path):
    """Deletes."""
    path.unlink()


DAMAGES = [(cut, r"00000002\.csv has [\d,]+ of [\d,]+ bytes"), (emptied, "of"), (unlinked, "is missing")]


@pytest.mark.parametrize(("damage", "text"), DAMAGES)
def test_rows_that_a_part_lacks_are_a_problem_of_the_run(copy, caplog, damage, text):
    """The scan says it; whoever reads the rows is told in the log, and gets the others."""
    assert Run.open(copy).record.problem is None
    expected = read_rows(copy)
    assert caplog.text == ""
    damage(file_of(copy, 2))

    rows = read_rows(copy)

    assert {row.step for row in rows} < {row.step for row in expected}
    assert "00000002.csv" in caplog.text
    assert "parts/metrics/00000002.csv" in Run.open(copy).record.problem
    assert sum(len(one) for one in values_where(copy, "loss", Where())) == len(rows)
    assert computed_summary(copy, 0)["loss"].count == len(rows)


def test_last_parts_that_are_gone_are_a_problem_of_a_run_that_has_ended(copy):
    """The sidecar says how many there were, also where the indexes are gone too."""
    for path in file_of(copy, 1).parent.iterdir():
        path.unlink()
    assert "parts are missing" in Run.open(copy).record.problem

    shutil.rmtree(copy / "parts")
    assert "parts cannot be read" in Run.open(copy).record.problem


@pytest.mark.parametrize(("damage", "text"), DAMAGES)
def test_rows_that_a_part_lost_during_the_run_are_counted(tmp_path, caplog, damage, text):
    """What another program did to a part is a loss, which the run says at its end."""
    run_dir = tmp_path / "run"
    with WrittenInParts(run_dir, flush_seconds=1000) as run:
        write(run)
        damage(file_of(run_dir, 2))

    lost = STEPS - len(read_rows(run_dir))
    assert lost > 0
    sidecar = json.loads((run_dir / "sidecar.json").read_bytes())
    assert (sidecar["lost"], sidecar["status"]) == ({"rows": lost}, "failed to write")


def test_a_hostile_number_of_parts_takes_no_time(copy):
    """An index of part 99,999,999, or a position after as many, names the first missing parts."""
    shutil.copy(file_of(copy, 1, ".npy"), file_of(copy, 99_999_999, ".npy"))

    with take_snapshot(copy, 0) as snapshot:
        assert len(snapshot.missing) == 100
        assert snapshot.closed == 99_999_999
    assert len(read_rows(copy)) == STEPS


def go_back(writer, step):
    """Resumes from a step, and logs so many rows that parts have the same numbers again."""
    writer.journal.mark_resume(step, None)
    for start in range(step, 400, 10):
        writer.log(range(start, start + 10))
        writer.drain.run()


def test_a_snapshot_does_not_mix_two_branches(tmp_path):
    """Parts that a resume removed, and whose numbers are those of others now, are not read by an earlier snapshot."""
    writer = Writer(tmp_path)
    writer.log_and_drain(range(300))
    with take_snapshot(tmp_path, 0) as snapshot:
        go_back(writer, 105)
        with pytest.raises(PartChangedError, match="Try again"):
            list(snapshot.rows())
        with pytest.raises(PartChangedError, match="Try again"):
            list(snapshot.files())
    writer.die()


def test_a_snapshot_that_is_being_read_keeps_what_a_resume_removes(tmp_path):
    """The last parts are held from the first row on."""
    writer = Writer(tmp_path, part_bytes=1000)
    writer.log_and_drain(range(300))
    with take_snapshot(tmp_path, 0) as snapshot:
        assert 3 < len(snapshot.parts) < 16
        rows = snapshot.rows()
        first = next(rows)
        go_back(writer, 105)
        found = [first.step, *(row.step for row in rows)]
    writer.die()

    assert found == list(range(300))


READINGS = {
    "rows": lambda run_dir: [row.step for row in read_rows(run_dir)],
    "last": lambda run_dir: [row.step for row in last_rows(run_dir, 1000)],
    "blocks": lambda run_dir: [step for block in run_blocks(run_dir) for step in block.step.tolist()],
    "where": lambda run_dir: [
        step for one in values_where(run_dir, "loss", Where()) for step in one.step.tolist()
    ],
    "send": lambda run_dir: [item.step for item in items_of(run_dir, ReadPosition())],
    "summary": lambda run_dir: list(range(computed_summary(run_dir, 0)["loss"].count)),
    "chart": lambda run_dir: ColumnCache().read(run_dir, 0, ["loss"]).block.step.tolist(),
    "follow": lambda run_dir: [row.step for row in _polled(run_dir)],
}


def _polled(run_dir):
    with contextlib.closing(Follower(run_dir)) as follower:
        return follower.poll()


@pytest.mark.parametrize("name", READINGS)
def test_a_reader_begins_again_where_a_resume_comes_between(tmp_path, monkeypatch, name):
    """Between its look at the folder and the first part that it opens, parts are replaced: it reads those that are there."""
    writer = Writer(tmp_path)
    writer.log_and_drain(range(300))
    opened = os.open
    seen = []

    def opened_after_a_resume(path, *arguments, **options):
        if not seen and str(path).endswith(".csv") and "/parts/" in str(path):
            seen.append(path)
            go_back(writer, 105)
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", opened_after_a_resume)
    found = READINGS[name](tmp_path)
    writer.die()

    assert seen
    assert found == list(range(405))


def test_a_look_notices_that_an_earlier_part_was_cut(tmp_path):
    """What a reader holds of a part is not continued where a resume has taken rows out of it."""
    writer = Writer(tmp_path)
    writer.log([10_000])
    writer.log_and_drain(range(1, 200))
    reader = RankReader(tmp_path, 0)
    with reader.look() as look:
        reader.note(look)
    file_of(tmp_path, 1).write_bytes(
        b"".join(file_of(tmp_path, 1).read_bytes().splitlines(keepends=True)[:-1])
    )

    with reader.look() as look:
        assert (look.is_continued, look.is_same_file) == (False, True)
    writer.die()
