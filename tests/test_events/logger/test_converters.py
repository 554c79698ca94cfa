"""Tests that tables and figures of other libraries are recognised for every destination."""

import datetime as dt
import decimal
import io

import numpy as np
import pandas as pd
import PIL.Image
import polars as pl
import pyarrow as pa
import pytest
import torch
from matplotlib.figure import Figure

from destinations import InMemory
from events import Logger, RecordError, State, as_picture

MOMENT = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
COLUMNS = {
    "count": [1, 2],
    "rate": [0.5, 0.25],
    "text": ["a", None],
    "flag": [True, False],
    "time": [MOMENT, None],
}
ROWS = [[1, 0.5, "a", True, str(MOMENT)], [2, 0.25, None, False, None]]


@pytest.fixture
def memory():
    """Receives the logger's records."""
    return InMemory()


@pytest.fixture
def logger(memory):
    """Raises what it would report otherwise."""
    return Logger(State("mine"), memory, strict=True)


@pytest.mark.parametrize(
    "table",
    [
        COLUMNS,
        [dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)],
        pd.DataFrame(COLUMNS),
        pl.DataFrame(COLUMNS),
        pa.table(COLUMNS),
        pa.RecordBatch.from_pydict(COLUMNS),
    ],
    ids=["dict", "dicts", "pandas", "polars", "pyarrow", "batch"],
)
def test_a_table_of_any_library_keeps_the_types_of_its_cells(logger, memory, table):
    """Integers stay integers beside floats, missing values are None, and times are texts."""
    logger.log_table(table, "scores")

    (found,) = memory.tables["scores"]
    assert (found.columns, found.rows) == (list(COLUMNS), ROWS)
    assert [list(map(type, row)) for row in found.rows] == [list(map(type, row)) for row in ROWS]


@pytest.mark.parametrize(
    "arguments",
    [
        {"columns": COLUMNS, "name": "scores"},
        {"columns": None, "rows": COLUMNS, "name": "scores"},
        {"columns": list(COLUMNS), "rows": COLUMNS, "name": "scores"},
        {"columns": lambda: pd.DataFrame(COLUMNS), "name": "scores"},
    ],
)
def test_a_table_may_stand_for_columns_or_rows(logger, memory, arguments):
    """It may also come from a function."""
    logger.log_table(**arguments)

    assert memory.tables["scores"][0].rows == ROWS


def test_columns_are_selected_from_a_table(logger, memory):
    """They come in the requested order; missing values of a row are None."""
    logger.log_table(["flag", "count"], pd.DataFrame(COLUMNS), "frame")
    logger.log_table(["b", "a"], [{"a": 1}, {"a": 2, "b": 3}, [4, 5]], "dicts")

    assert memory.tables["frame"][0].rows == [[True, 1], [False, 2]]
    assert memory.tables["dicts"][0].rows == [[None, 1], [3, 2], [4, 5]]


@pytest.mark.parametrize(
    ("column", "cells"),
    [
        (pd.array([1, None], dtype="Int64"), [1, None]),
        (pd.array([True, None], dtype="boolean"), [True, None]),
        (pd.array([0.5, None], dtype="Float64"), [0.5, None]),
        (pd.array([1, None], dtype="int64[pyarrow]"), [1, None]),
        (pd.Categorical(["a", None]), ["a", None]),
        (pd.to_timedelta([1, None], unit="s"), ["0 days 00:00:01", None]),
        ([decimal.Decimal("0.10"), dt.date(2026, 1, 2)], ["0.10", "2026-01-02"]),
        ([[1, 2], {"a": np.float32(0.5)}], [[1, 2], {"a": 0.5}]),
    ],
)
def test_columns_of_pandas_of_any_type(logger, memory, column, cells):
    """A value that is missing is None."""
    logger.log_table(pd.DataFrame({"a": column}), "frame")

    assert [cell for (cell,) in memory.tables["frame"][0].rows] == cells


@pytest.mark.parametrize(
    ("column", "cells"),
    [
        (np.array([1, 2], np.uint8), [1, 2]),
        (torch.tensor([0.5, 0.25]), [0.5, 0.25]),
        (pl.Series([1, None]), [1, None]),
        (pd.Series([1, 2], index=["x", "y"]), [1, 2]),
        (np.array(["2026-01-02T03"], "datetime64[ns]"), ["2026-01-02T03:00:00.000000000"]),
        (range(2), [0, 1]),
    ],
)
def test_columns_of_a_dict_of_any_type(logger, memory, column, cells):
    """A column may be any sequence of values, of any library."""
    logger.log_table({"a": column}, "columns")

    assert [cell for (cell,) in memory.tables["columns"][0].rows] == cells


def test_nan_among_floats_is_a_number(logger, memory):
    """A NaN loss is not missing."""
    logger.log_table(pd.DataFrame({"loss": [0.5, float("nan")]}), "losses")

    assert repr(memory.tables["losses"][0].rows) == "[[0.5], [nan]]"


@pytest.mark.parametrize(
    ("frame", "columns", "rows"),
    [
        (pd.DataFrame({"k": ["a", "b"], "n": [1, 2]}).groupby("k").sum(), ["k", "n"], [["a", 1], ["b", 2]]),
        (pd.DataFrame({"n": [1, 2]}, index=["mean", "max"]), ["index", "n"], [["mean", 1], ["max", 2]]),
        (pd.DataFrame({"n": [1, 2, 3]})[1:], ["n"], [[2], [3]]),
        (pd.DataFrame([[1, 2]], columns=["n", "n"]), ["n", "n"], [[1, 2]]),
        (pd.DataFrame([[1, 2]]), ["0", "1"], [[1, 2]]),
        (pd.Series([1, 2], name="n"), ["n"], [[1], [2]]),
        (pl.Series("n", [1, 2]), ["n"], [[1], [2]]),
        (pd.DataFrame({"n": []}), ["n"], []),
    ],
    ids=["group", "index", "numbers", "twice", "unnamed", "series", "polars", "empty"],
)
def test_an_index_that_says_something_is_a_column(logger, memory, frame, columns, rows):
    """The names of groups are kept; numbers of rows are not."""
    logger.log_table(frame, "frame")

    (table,) = memory.tables["frame"]
    assert (table.columns, table.rows) == (columns, rows)


@pytest.fixture
def figure():
    """A red figure of 40 x 20 pixels."""
    return Figure(figsize=(2, 1), dpi=20, facecolor="red")


def test_a_figure_is_a_picture(logger, memory, figure):
    """It is drawn in the call, alone, in lists and by name, and keeps its canvas."""
    canvas = figure.canvas

    logger.log_images(figure, "one")
    logger.log_images([figure, np.zeros((3, 20, 40)), figure.add_subplot()], "several")
    logger.log_images({"named": figure})
    figure.set_facecolor("blue")

    logged = {record.name: record.value["images"] for record in memory.records}
    assert (logged["one"].mode, logged["one"].size) == ("RGB", (40, 20))
    assert logged["one"].getpixel((0, 0)) == (255, 0, 0)
    assert [type(one).__name__ for one in logged["several"]] == ["Image", "ndarray", "Image"]
    assert logged["named"].getpixel((0, 0)) == (255, 0, 0)
    assert figure.canvas is canvas


def test_a_figure_without_a_background_keeps_its_opacity(figure):
    """It looks the same on any page."""
    figure.set_facecolor("none")

    assert as_picture(figure).getpixel((0, 0)) == (255, 255, 255, 0)


def test_a_figure_in_a_cell_is_a_picture(logger, memory, figure):
    """Cells are converted like images."""
    logger.log_table(["plot"], [[figure]])

    ((cell,),) = memory.tables["Table"][0].rows
    assert isinstance(cell, PIL.Image.Image)


def test_a_figure_that_cannot_be_drawn_is_dropped(memory, figure, caplog):
    """The others of its list are logged."""

    class Broken:
        def savefig(self, file, **_):
            raise RuntimeError("no renderer")

    Logger(State("mine"), memory).log_images([Broken(), figure], "plots")

    (record,) = memory.records
    assert len(record.value["images"]) == 1
    assert (
        "image must be an array or a figure that can be drawn, got RuntimeError: no renderer." in caplog.text
    )


def test_objects_that_convert_to_an_array_are_arrays(logger, memory):
    """It needs no shape of its own."""

    class Numbers:
        def __array__(self, dtype=None, copy=None):
            return np.full((2, 3), 7, np.uint8)

    logger.log_images([Numbers()], "numbers")
    logger.log_table(["numbers"], [[Numbers()]])

    assert np.array_equal(memory.records[0].value["images"][0], np.full((2, 3), 7))
    assert memory.tables["Table"][0].rows == [[[[7, 7, 7], [7, 7, 7]]]]


def test_other_values_than_figures_are_unchanged():
    """Nothing else is drawn."""
    for value in (None, np.zeros((2, 2)), PIL.Image.new("L", (1, 1)), "a.png", io.BytesIO()):
        assert as_picture(value) is value


def test_an_unknown_column_is_named(logger):
    """The message lists the existing columns; a single name instead of a list is refused."""
    with pytest.raises(RecordError, match="must have a list of strings as its columns, got 'scores'"):
        logger.log_table("scores", pd.DataFrame(COLUMNS))
    with pytest.raises(RecordError, match="must have the column 'loss', got 'count', 'rate', 'text'"):
        logger.log_table(["count", "loss"], pd.DataFrame(COLUMNS))
