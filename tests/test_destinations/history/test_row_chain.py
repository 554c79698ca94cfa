"""A history decides which rows count; a damaged one is reported."""

import logging
import math

import pytest

from destinations.history.row_chain import ALL, Keep, RowChain, RowPlace, SealedPart, drops, tighter
from destinations.run_directory import RunDirectory, read_rows
from destinations.runs import Run as Opened
from events import Run


def part(number, session, rows):
    """Returns a part of some rows."""
    return SealedPart(number, session, rows, 100, 1, 200)


def test_places_and_limits_decide_which_rows_count():
    """A session continues after some rows of another. A limit also cuts the sessions before it."""
    chain = RowChain()
    chain.add(chain.session("a", None, 0))
    chain.add(chain.part(part(1, "a", 10)))
    chain.add(chain.part(part(2, "a", 10)))
    chain.add(chain.mark(1, 15))
    chain.add(chain.session("b", chain.place("a", 1), 15))
    chain.add(chain.part(part(3, "b", 4)))
    chain.add(chain.session("c", RowPlace("b", None, (7, None)), None))

    kept = [(one.number, keep) for one, keep in chain.kept(chain.before)]
    left = {session: [(one.number, keep) for one, keep in parts] for session, parts in chain.left()}
    limit = (7, None)
    assert kept == [(1, Keep(None, limit)), (2, Keep(5, limit)), (3, Keep(None, limit))]
    assert left == {"a": kept[:2], "b": kept[2:]}
    assert [one.number for one, _ in chain.kept(RowPlace("a", 10))] == [1]
    assert [keep for _, keep in chain.kept(RowPlace("a"))] == [ALL, ALL]
    assert chain.place("a", 2) == RowPlace("a", None)


LIMITS = [None, *((step, time) for step in (4, 5) for time in (None, 1.0, 2.0))]


@pytest.mark.parametrize("first", LIMITS)
@pytest.mark.parametrize("second", LIMITS)
def test_tighter_limit_drops_the_rows_of_both(first, second):
    """A session that many later sessions cut needs only one limit."""
    both = tighter(first, second)

    for step in (3, 4, 5, 6, math.nan):
        for time in (0.5, 1.0, 1.5, 2.0, 3.0, math.nan):
            expected = any(drops(one, step, time) for one in (first, second) if one is not None)
            assert (both is not None and drops(both, step, time)) == expected


class Rolling(RunDirectory):
    """Closes parts after a few kilobytes."""

    _part_bytes = 2000


def log(folder, steps, batch=None):
    """Logs rows in a session of their own."""
    with Run(Rolling(folder, if_exists="resume"), run_name="mine") as run:
        if batch is not None:
            run.fit_start(batch=batch)
        for step in steps:
            run.log_metrics({"loss": float(step)}, step=step)
            if step % 20 == 19:
                run.flush()


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_damaged_history_is_reported_and_loses_no_part(tmp_path, caplog, damage):
    """A reader raises. A writer keeps its rows in the journal, and never takes unlisted parts for garbage."""
    folder = tmp_path / "mine"
    log(folder, range(200))
    log(folder, range(200, 220), batch=200)
    path = folder / "metrics.history.jsonl"
    whole = path.read_bytes()
    before = {one: one.read_bytes() for one in (folder / "parts/metrics").iterdir()}
    lines = whole.splitlines(keepends=True)
    path.write_bytes(lines[0] if damage == "cut" else b"".join([lines[0], b"x" + lines[1], *lines[2:]]))

    if damage == "changed":
        with pytest.raises(OSError, match="a line is damaged"):
            read_rows(folder)
    with caplog.at_level(logging.ERROR):
        log(folder, range(220, 225), batch=220)

    assert {one: one.read_bytes() for one in before} == before
    if damage == "changed":
        assert "a line is damaged" in caplog.text
        path.write_bytes(whole)
        assert [row.step for row in read_rows(folder)] == list(range(225))


def test_deleted_history_is_not_mistaken_for_format_2(tmp_path, caplog):
    """Closed parts may belong to abandoned sessions, so no reader reads them all, and a writer keeps them."""
    folder = tmp_path / "mine"
    log(folder, range(200))
    log(folder, range(100, 120), batch=100)
    path = folder / "metrics.history.jsonl"
    whole = path.read_bytes()
    before = {one: one.read_bytes() for one in (folder / "parts/metrics").iterdir()}
    path.unlink()

    with pytest.raises(OSError, match="it is missing, so that nothing says which rows belong"):
        read_rows(folder)
    assert any("metrics.history.jsonl" in found.file for found in Opened.open(folder).verify())
    with caplog.at_level(logging.ERROR):
        log(folder, range(120, 125), batch=120)

    assert "it is missing" in caplog.text
    assert {one: one.read_bytes() for one in before} == before
    path.write_bytes(whole)
    assert [row.step for row in read_rows(folder)] == list(range(125))


def test_history_shorter_than_its_position_raises(tmp_path):
    """The position of a killed session contains the number of valid bytes."""
    csv = tmp_path / "metrics.csv"
    line = RowChain().session("a", None, 0)
    (tmp_path / "metrics.history.jsonl").write_bytes(line)

    assert RowChain.read(csv, len(line)).newest == "a"
    with pytest.raises(OSError, match=f"{len(line)} of {len(line) + 1} bytes are there"):
        RowChain.read(csv, len(line) + 1)
    (tmp_path / "metrics.history.jsonl").unlink()
    with pytest.raises(OSError, match="0 of 5 bytes are there"):
        RowChain.read(csv, 5)
    assert RowChain.read(csv).size == 0


@pytest.mark.parametrize(
    ("step", "time", "dropped"),
    [(4, 9.0, False), (5, 1.0, False), (5, 2.5, True), (6, 0.0, True), (math.nan, 9.0, False)],
)
def test_limit_drops_later_rows(step, time, dropped):
    """Rows of larger steps are dropped, and rows of the step itself if they are later than the checkpoint."""
    assert drops((5, 2.0), step, time) is dropped
