"""The index of a part is derived from its rows: whatever is in its place, readers and a resume see these rows."""

import contextlib
import io
import os
import shutil

import numpy as np
import pytest

from destinations.run_directory import read_rows
from destinations.run_directory.layout import part_path
from destinations.run_directory.part_index import OF_COLUMN, OF_ROWS, PartIndex, indexed_files
from destinations.run_directory.reader import take_snapshot
from destinations.runs.content.where import Where, values_where
from destinations.runs.summary import computed_summary
from destinations.viewer import columns
from destinations.viewer.columns import ColumnCache
from tests.test_destinations.run_directory.test_parts import WrittenInParts, numbers

STEPS = 400


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run of several parts, with two entries in the index of the first one."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    with WrittenInParts(run_dir, flush_seconds=1000) as run:
        for step in range(STEPS):
            run.log({"loss": step / 8, "acc": step / 3}, step)
            if step % 20 == 19:
                run.flush()
    assert len(numbers(run_dir)) > 3
    return run_dir


@pytest.fixture
def copy(written, tmp_path):
    """A copy of the run, whose indexes may be damaged."""
    return shutil.copytree(written, tmp_path / "run")


def npy(array, text=""):
    """Returns the file of an array, as NumPy writes it; or with another text in its header."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    data = buffer.getvalue()
    return data[:10] + text.ljust(len(data[10:128]) - 1).encode() + b"\n" + data[128:] if text else data


def with_fields(**fields):
    """Returns what replaces fields in the array of an index, and saves it as NumPy does, or as the writer does."""

    def change(path, file, is_signed):
        index = PartIndex.read(path, file)
        array = np.hstack([index.array, index.array]) if "twice" in fields else index.array.copy()
        for name, value in fields.items():
            if name in OF_ROWS:
                array[OF_ROWS.index(name)] = value
            elif name in OF_COLUMN:
                array[len(OF_ROWS) + OF_COLUMN.index(name) :: len(OF_COLUMN)] = value
        if is_signed:
            PartIndex(index.columns, array).write(path, file)
        else:
            path.write_bytes(npy(array))

    return change


def with_content(content):
    """Returns what replaces the file."""

    def change(path, file, is_signed):
        path.write_bytes(content(np.asarray(PartIndex.read(path, file).array)))

    return change


def npz(array):
    """Returns an archive of arrays."""
    buffer = io.BytesIO()
    np.savez(buffer, a=array)
    return buffer.getvalue()


def in_place(make):
    """Returns what puts something else than a file there."""

    def change(path, file, is_signed):
        path.unlink()
        make(path)

    return change


SHAPE = "{'descr': '<f8', 'fortran_order': False, 'shape': (%s), }"
DAMAGES = {
    "zip": with_content(lambda array: b"PK\x03\x04" + bytes(100)),
    "npz": with_content(npz),
    "pickle": with_content(lambda array: b"\x80\x04."),
    "empty": with_content(lambda array: b""),
    "tokens": with_content(lambda array: npy(array, "{'descr': '<f8', '''")),
    "brackets": with_content(lambda array: npy(array, "((((((((((((((")),
    "large": with_content(lambda array: npy(array, SHAPE % "34, 999999999999999999")),
    "negative": with_content(lambda array: npy(array, SHAPE % "34, -1")),
    "one bit": with_content(lambda array: npy(array)[:-1] + b"\x01"),
    "fifo": in_place(os.mkfifo),
    "folder": in_place(lambda path: path.mkdir()),
    "device": in_place(lambda path: path.symlink_to("/dev/zero")),
}
FORGERIES = {
    "no statistics": with_fields(min=np.nan, max=np.nan),
    "infinite": with_fields(min=np.inf, max=-np.inf),
    "more values than rows": with_fields(count=1e9, finite=1e9),
    "fewer than none": with_fields(finite=-1),
    "twice": with_fields(twice=True),
    "no rows": with_fields(rows=np.nan),
    "rows of no bytes": with_fields(rows=1e12),
    "half a row": with_fields(rows=0.5),
    "elsewhere": with_fields(end=np.nan),
    "before": with_fields(end=-1e300),
    "endless step": with_fields(max_step=np.inf, last_step=np.inf),
    "endless step of a value": with_fields(max_step=np.inf),
}


def put(run_dir, number, name, is_signed):
    """Damages the index of a part."""
    with take_snapshot(run_dir, 0) as snapshot:
        part = snapshot.parts[number - 1]
        with contextlib.closing(part.open()) as file:
            {**DAMAGES, **FORGERIES}[name](part.index_path, file, is_signed)


def readings(run_dir):
    """Returns what the readers say that use indexes."""
    found = ColumnCache().read(run_dir, 0, ["loss", "acc"])
    closed = [
        sum(len(block) for block in one.read(slice(0, len(one.index)), ["loss"], with_time=False))
        for one in found.closed
    ]
    return (
        [one.value.tolist() for one in values_where(run_dir, "loss", Where.parse("value >= 0"))],
        {name: (one.count, one.min, one.max_step) for name, one in computed_summary(run_dir, 0).items()},
        [one.index.of_column("acc").sum() for one in found.closed],
        closed,
    )


@pytest.mark.parametrize("is_signed", [False, True], ids=["unsigned", "signed"])
@pytest.mark.parametrize("name", [*DAMAGES, *FORGERIES])
def test_readers_see_the_rows_of_a_part_whatever_is_in_the_place_of_its_index(
    copy, monkeypatch, name, is_signed
):
    """Nothing waits, fails or is counted twice; also where the checksums are those of what is there."""
    monkeypatch.setattr(columns, "MAX_HELD_BYTES", 0)
    expected = readings(copy)
    put(copy, 1, name, is_signed)

    np.testing.assert_equal(readings(copy), expected)


@pytest.mark.parametrize("name", [*DAMAGES, *FORGERIES])
def test_a_resume_leaves_no_abandoned_row_whatever_is_in_the_place_of_an_index(copy, name):
    """The rows are asked for what is cut."""
    first, *_, last = numbers(copy)
    for number in (first, last):
        put(copy, number, name, is_signed=True)

    with WrittenInParts(copy, batch=210) as run:
        for step in range(210, 220):
            run.log({"loss": -1.0, "acc": -1.0}, step)

    assert [row.step for row in read_rows(copy)] == list(range(220))


def test_an_index_is_a_file_of_numpy(written):
    """Others read it with `numpy.load`; its array is the one that readers take."""
    with take_snapshot(written, 0) as snapshot:
        for part, (_, index) in zip(snapshot.parts, indexed_files(snapshot), strict=False):
            np.testing.assert_array_equal(np.load(part.index_path), index.array)
            with part.index_path.open("rb") as file:
                array, sums = np.load(file), np.load(file)
            assert (array.dtype, sums.dtype, len(sums)) == (np.float64, np.uint32, 1 + len(index.columns))


def test_the_index_of_a_part_with_other_columns_is_not_used(copy):
    """An index has no names: that of a part whose columns are others is not taken for the one of a part."""
    part = part_path(copy / "parts" / "metrics", 1)
    part.write_bytes(part.read_bytes().replace(b"loss,acc", b"acc,loss", 1))

    with take_snapshot(copy, 0) as snapshot:
        (_, first), (_, second), *_ = indexed_files(snapshot)

    assert first is None
    assert second is not None


def test_an_index_is_read_by_column(written):
    """Of a wide part, what was not asked for is left out."""
    with take_snapshot(written, 0) as snapshot:
        (_, every), *_ = indexed_files(snapshot)
        (_, one), *_ = indexed_files(snapshot, ["acc", "missing"])

    assert one.columns == ["acc"]
    np.testing.assert_array_equal(one.of_column("acc"), every.of_column("acc"))
    np.testing.assert_array_equal(one.of_rows("last_step"), every.of_rows("last_step"))
