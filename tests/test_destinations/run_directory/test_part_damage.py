"""Parts that are deleted, cut or replaced: readers and the writer say what is missing, and no reader mixes two branches."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest

from destinations.run_directory import read_rows
from destinations.run_directory.conversion import convert_parts
from destinations.run_directory.layout import part_path, parts_path
from destinations.run_directory.reader import Part, PartChangedError, last_rows, take_snapshot
from destinations.runs import Run
from destinations.runs.content.follow import Follower
from destinations.runs.content.rank_reader import RankReader
from destinations.runs.content.series import run_blocks
from destinations.runs.content.sources import ReadPosition, items_of
from destinations.runs.content.where import Where, values_where
from destinations.runs.summary import computed_summary
from destinations.viewer.columns import ColumnCache
from tests.test_destinations.run_directory.test_parts import Writer, WrittenInParts, convert, numbers

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


@pytest.fixture
def packed(copy):
    """A copy of which all parts are Parquet."""
    convert(copy)
    return copy


def file_of(run_dir, number, suffix=".csv"):
    """Returns the path of a part, or of its index."""
    return part_path(parts_path(run_dir / "metrics.csv"), number).with_suffix(suffix)


def cut(path):
    """Leaves half of the lines."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: len(lines) // 2]))


def halved(path):
    """Leaves half of the bytes."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


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


@pytest.mark.parametrize("damage", [halved, emptied, unlinked])
@pytest.mark.parametrize("has_index", [False, True])
def test_parquet_that_is_damaged_is_a_problem_of_the_run(packed, caplog, damage, has_index):
    """Its rows are lost, and the others are there, for every reader; a session goes on behind it."""
    assert Run.open(packed).record.problem is None
    expected = read_rows(packed)
    with take_snapshot(packed, 0) as snapshot, contextlib.closing(snapshot.parts[1].open()) as file:
        lost = len(list(file.rows()))
    if not has_index:
        file_of(packed, 2, ".npy").unlink()
    damage(file_of(packed, 2, ".parquet"))
    caplog.clear()

    rows = read_rows(packed)

    assert len(rows) == len(expected) - lost
    text = "00000002.csv is missing" if damage is unlinked else "00000002.parquet is damaged"
    assert text in caplog.text
    assert text in Run.open(packed).record.problem
    assert {name: len(read(packed)) for name, read in READINGS.items()} == dict.fromkeys(READINGS, len(rows))
    with WrittenInParts(packed, batch=STEPS - 10) as run:
        run.log({"loss": -1.0}, STEPS - 10)
    assert [row.step for row in read_rows(packed)][-2:] == [STEPS - 11, STEPS - 10]
    assert text in Run.open(packed).record.problem


def test_other_bytes_in_parquet_are_an_error_that_names_the_file(packed):
    """They are not shown as other numbers, and it can be found which part to restore or to delete."""
    path = file_of(packed, 2, ".parquet")
    content = bytearray(path.read_bytes())
    content[100] ^= 255
    path.write_bytes(content)

    with pytest.raises(OSError, match="damaged, or none of ours") as raised:
        read_rows(packed)

    assert raised.value.filename == str(path)
    path.unlink()
    assert len(read_rows(packed)) < STEPS


def test_a_csv_that_was_cut_stays_csv(copy):
    """As Parquet, it would not say any more that rows are missing."""
    cut(file_of(copy, 2))

    reasons = {part.number: reason for part, reason in convert_parts(copy, 0)}

    assert "rows are missing" in reasons[2]
    assert file_of(copy, 2).exists()
    assert "00000002.csv has" in Run.open(copy).record.problem


def test_a_session_does_not_forget_that_a_part_was_cut(copy):
    """It computes what is left, and leaves the index, which says what there was."""
    cut(file_of(copy, 2))
    (copy / "summary.json").unlink()

    with WrittenInParts(copy, batch=STEPS) as run:
        run.log({"loss": -1.0}, STEPS)

    assert "00000002.csv has" in Run.open(copy).record.problem


def test_last_parts_that_are_gone_are_a_problem_of_a_run_that_has_ended(copy):
    """The sidecar says how many there were, also where the indexes are gone too."""
    for path in file_of(copy, 1).parent.iterdir():
        path.unlink()
    assert "parts are missing" in Run.open(copy).record.problem

    shutil.rmtree(copy / "parts")
    assert "parts cannot be read" in Run.open(copy).record.problem


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize(("damage", "text"), DAMAGES)
def test_rows_that_a_part_lost_during_the_run_are_counted(tmp_path, caplog, damage, text, suffix):
    """What another program did to a part is a loss, which the run says at its end."""
    run_dir = tmp_path / "run"
    with WrittenInParts(run_dir, flush_seconds=1000) as run:
        write(run)
        if suffix == ".parquet":
            convert(run_dir)
            damage = halved if damage is cut else damage
        damage(file_of(run_dir, 2, suffix))

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


CONVERSIONS = [(False, False), (True, False), (False, True), (True, True)]
"""Whether parts become Parquet before a resume, and after it."""


@pytest.mark.parametrize(("before", "after"), CONVERSIONS)
def test_a_snapshot_does_not_mix_two_branches(tmp_path, before, after):
    """Parts that a resume removed, and whose numbers are those of others now, are not read by an earlier snapshot."""
    writer = Writer(tmp_path)
    writer.log_and_drain(range(300))
    if before:
        convert(tmp_path)
    with take_snapshot(tmp_path, 0) as snapshot:
        go_back(writer, 105)
        if after:
            convert(tmp_path)
        with pytest.raises(PartChangedError, match="Try again"):
            list(snapshot.rows())
        with pytest.raises(PartChangedError, match="Try again"):
            list(snapshot.files())
    writer.die()


def test_a_snapshot_goes_on_where_parts_become_parquet(tmp_path):
    """The rows are the same: nobody reads them again for that."""
    writer = Writer(tmp_path)
    writer.log_and_drain(range(300))
    writer.die()
    with take_snapshot(tmp_path, 0) as snapshot:
        convert(tmp_path)
        found = [row.step for row in snapshot.rows()]
        assert snapshot.damage() == []

    assert found == list(range(300))


def test_a_part_that_becomes_a_csv_again_is_not_missing(packed, monkeypatch):
    """A snapshot that looks for the CSV before it is there, and for the Parquet after it is gone, looks again."""
    part = Part.find(parts_path(packed / "metrics.csv"), 2)
    looked = []
    lstat = Path.lstat

    def changing_lstat(path):
        try:
            return lstat(path)
        finally:
            if path == part.csv_path and not looked:
                looked.append(path)
                part.csv_path.write_bytes(b"step\n1\n")
                part.parquet_path.unlink()

    monkeypatch.setattr(Path, "lstat", changing_lstat)
    found = Part.find(part.folder, 2)

    assert looked
    assert (found.path, found.is_parquet) == (part.csv_path, False)


@pytest.mark.parametrize("is_converted", [False, True])
def test_a_snapshot_that_is_being_read_keeps_what_a_resume_removes(tmp_path, is_converted):
    """The last parts are held from the first row on."""
    writer = Writer(tmp_path, part_bytes=1000)
    writer.log_and_drain(range(300))
    if is_converted:
        convert(tmp_path)
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


@pytest.mark.parametrize(("before", "after"), CONVERSIONS)
@pytest.mark.parametrize("name", READINGS)
def test_a_reader_begins_again_where_a_resume_comes_between(tmp_path, monkeypatch, name, before, after):
    """Between its look at the folder and the first part that it opens, parts are replaced: it reads those that are there."""
    writer = Writer(tmp_path)
    writer.log_and_drain(range(300))
    if before:
        convert(tmp_path)
    opened = os.open
    seen = []

    def opened_after_a_resume(path, *arguments, **options):
        if not seen and str(path).endswith(".csv") and "/parts/" in str(path):
            seen.append(path)
            go_back(writer, 105)
            if after:
                convert(tmp_path)
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


def test_a_look_goes_on_where_an_earlier_part_became_parquet(tmp_path):
    """Only what was logged since is new, also to a follower; what is not known part by part is read again."""
    writer = Writer(tmp_path)
    writer.log_and_drain(range(200))
    reader = RankReader(tmp_path, 0)
    with Follower(tmp_path) as follower, reader.look() as look:
        reader.note(look)
        follower.poll()
        convert(tmp_path)
        writer.log_and_drain(range(200, 300))
        new = [row.step for row in follower.poll()]
        with reader.look() as later:
            found = [row.step for file, start in later.pieces() for row in file.rows(start)]
    writer.die()

    assert later.is_continued
    assert new == list(range(200, 300))
    assert found == new
