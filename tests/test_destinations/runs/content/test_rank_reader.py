"""A look at a rank's metrics reports the new rows."""

import itertools
import os

import pytest

from destinations.runs.content.rank_reader import RankReader
from destinations.viewer.columns import ColumnCache
from tests.test_destinations.runs.written import write_csv

HEADER = "step,epoch,time,loss"


def lines(steps, start=1000.0):
    """Returns a header and lines as our writer writes them."""
    return [HEADER, *(f"{step},0,{start + step},{step}.5" for step in steps)]


def new_steps(reader):
    """Looks once; returns the steps of the new rows, and whether the earlier ones are unchanged."""
    with reader.look() as look:
        steps = [row.step for csv, start in look.pieces() for row in csv.rows(start)]
        is_continued = look.is_continued
        look.pass_files()
        return steps, is_continued


def append(folder):
    """Adds a row."""
    with (folder / "metrics.csv").open("a") as file:
        file.write("4,0,1004.0,4.5\n")


def replace(folder):
    """Replaces the CSV with another file."""
    (folder / "metrics.csv").rename(folder / "old.csv")
    write_csv(folder, lines(range(5)))


def rewrite(folder):
    """Writes other rows into the same file, under the same header."""
    (folder / "metrics.csv").write_text("\n".join([*lines(range(5), start=2000.0), ""]))


def cut(folder):
    """Removes the last row."""
    path = folder / "metrics.csv"
    os.truncate(path, path.read_bytes().rindex(b"3,0,"))


def add_column(folder):
    """Writes the file with one more column."""
    text = (folder / "metrics.csv").read_text().replace("\n", ",\n").replace("loss,", "loss,acc")
    (folder / "metrics.csv").write_text(text)


CHANGES = [
    (lambda _: None, [], True),
    (append, [4], True),
    (replace, [4], False),
    (rewrite, [0, 1, 2, 3, 4], False),
    (cut, [], False),
    (add_column, [], False),
    (lambda folder: (folder / "metrics.csv").unlink(), [], False),
]


@pytest.mark.parametrize(("change", "steps", "is_continued"), CHANGES)
def test_changes_of_a_csv_are_noticed(tmp_path, change, steps, is_continued):
    """Only later rows are new; if the first row differs, all rows are new."""
    write_csv(tmp_path, lines(range(4)))
    reader = RankReader(tmp_path, 0)
    first, before = new_steps(reader), reader.extent()

    change(tmp_path)

    assert first == ([0, 1, 2, 3], True)
    assert (reader.extent() == before) == (steps == [] and is_continued)
    assert new_steps(reader) == (steps, is_continued)
    assert new_steps(reader)[0] == []


def test_a_look_that_ends_early_is_repeated(tmp_path):
    """If reading fails in the middle, the next look returns all rows again."""
    write_csv(tmp_path, lines(range(4)))
    reader = RankReader(tmp_path, 0)
    with reader.look() as look:
        first = list(itertools.islice(look.new_rows(), 2))

    with reader.look() as look:
        assert (list(look.new_rows())[:2], look.is_continued) == (first, True)


@pytest.mark.parametrize(("change", "steps"), [(change, steps) for change, steps, _ in CHANGES[1:-1]])
def test_the_page_has_exactly_the_columns_of_the_file(tmp_path, change, steps):
    """Another program may change the CSV between two looks in any way: the page has exactly its rows."""
    write_csv(tmp_path, lines(range(4)))
    cache = ColumnCache()
    cache.read(tmp_path, 0, ["loss"], with_time=True)

    change(tmp_path)
    block = cache.read(tmp_path, 0, ["loss"], with_time=True).block

    rows = [line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines()[1:]]
    assert block.step.tolist() == [int(row[0]) for row in rows]
    assert block.time.tolist() == [float(row[2]) for row in rows]
    assert block.columns["loss"][0].tolist() == [float(row[3]) for row in rows]
