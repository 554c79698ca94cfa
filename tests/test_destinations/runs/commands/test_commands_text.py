"""The look of commands: widths, tables, ages, sparklines, colours."""

import io
import json
import math
import unicodedata

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from destinations.runs.commands.screen import (
    NOTHING,
    Cell,
    Column,
    Screen,
    age_text,
    bytes_text,
    duration_text,
    sparkline,
    table_lines,
    value_text,
)
from destinations.text.formatting import cut, pad, width_of
from uploads import parse_seconds

# A slow or busy machine doesn't invalidate a property.
SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    encoding = "utf-8"

    def isatty(self):
        return True


def written(text):
    """Returns a line as a terminal shows it."""
    stream = io.StringIO()
    Screen(stream).line(text)
    return stream.getvalue()


def lines(columns, rows, width=None, *, colors=False):
    """Returns the lines of a table."""
    return table_lines([Column(title) for title in columns], rows, Screen(io.StringIO(), width, colors))


@pytest.mark.parametrize(
    ("text", "width"),
    [
        ("abc", 3),
        ("", 0),
        ("größe", 5),
        ("损失", 4),
        ("한글", 4),
        ("e\u0301", 1),
        ("a\u200db", 2),
        ("ﾊﾟ", 2),
        ("🙂", 2),
    ],
)
def test_a_text_is_as_wide_as_a_terminal_shows_it(text, width):
    """Wide characters take two cells, and combining ones none."""
    assert width_of(text) == width


@SLOW
@given(st.text(), st.integers(0, 30))
def test_a_cut_text_fits(text, width):
    """The result is never wider than requested, and begins like the text."""
    short = cut(text, width)

    assert width_of(short) <= max(width, 0)
    assert short == text or text.startswith(short.removesuffix("…"))


def test_padding_counts_cells():
    """Columns therefore line up."""
    assert (pad("损", 4), pad("损", 4, right=True), pad("long", 2)) == ("损  ", "  损", "long")


def test_a_table_has_columns_as_wide_as_their_cells():
    """Two spaces separate them, and no spaces follow the last one."""
    assert lines(["run", "loss"], [["损失", "1"], ["b", "0.25"]]) == ["run   loss", "损失  1", "b     0.25"]


def test_numbers_are_aligned_to_the_right():
    """Their headings are too."""
    columns = [Column("run"), Column("value", is_right=True)]

    assert table_lines(columns, [["a", "1"]], Screen(io.StringIO())) == ["run  value", "a        1"]


def test_a_table_is_cut_to_the_screen():
    """The widest column shrinks first, and shows that it did."""
    shown = lines(["run", "notes"], [["a-run-id", "these are very long notes indeed"]], 24)

    assert shown == ["run       notes", "a-run-id  these are ver…"]


def test_columns_without_space_are_left_out():
    """The rightmost columns go first, and the headings end with an ellipsis."""
    shown = lines(["aaaaaaaa", "bbbbbbbb", "cccccccc"], [["1" * 8, "2" * 8, "3" * 8]], 16)

    assert shown == ["aaaa…  bbbbb…  …", "1111…  22222…"]


@SLOW
@given(
    st.lists(st.text(max_size=12), min_size=1, max_size=6).flatmap(
        lambda titles: st.tuples(
            st.just(titles),
            st.lists(st.lists(st.text(max_size=30), min_size=len(titles), max_size=len(titles)), max_size=4),
        )
    ),
    st.integers(10, 80),
)
def test_every_table_fits(table, width):
    """This holds for any content from a width of ten cells on."""
    titles, rows = (
        [one.replace("\n", " ") for one in part] if part and isinstance(part[0], str) else part
        for part in table
    )

    shown = lines(titles, rows, width)

    assert len(shown) == 1 + len(rows)
    assert max(map(width_of, shown)) <= width


def test_colours_are_for_terminals(monkeypatch):
    """NO_COLOR or a terminal without colours turns them off."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    on_terminal, in_file = Screen.of(Terminal()), Screen.of(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    without = Screen.of(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")

    assert [on_terminal.has_colors, in_file.has_colors, without.has_colors] == [True, False, False]
    assert not Screen.of(Terminal()).has_colors
    assert written(on_terminal.styled("a", "red")) == "\x1b[31ma\x1b[0m\n"
    assert in_file.styled("a", "red") == "a"


def test_colours_take_no_room(monkeypatch):
    """A coloured table has the same layout as one without colours."""
    rows = [[Cell("running", "green"), "1"], [Cell("failed", "red"), "2"]]

    shown = lines(["status", "n"], rows, colors=True)

    assert written(shown[1]) == "\x1b[32mrunning\x1b[0m  1\n"
    assert written(shown[2]) == "\x1b[31mfailed \x1b[0m  2\n"


def test_only_terminals_have_a_width(monkeypatch):
    """Text in a file is not cut, unless COLUMNS gives a width."""
    monkeypatch.delenv("COLUMNS", raising=False)
    unbounded = Screen.of(io.StringIO()).width
    monkeypatch.setenv("COLUMNS", "55")

    assert (unbounded, Screen.of(io.StringIO()).width, Screen.of(Terminal()).width) == (None, 55, 55)


def test_characters_outside_the_locale_are_escaped():
    """A name with an emoji doesn't crash a command in the C locale."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", newline="")

    Screen(stream).line("größe 🙂")
    stream.flush()

    assert raw.getvalue() == b"gr\\xf6\\xdfe \\U0001f642\n"


def test_json_is_strict():
    """NaN and infinities are strings."""
    stream = io.StringIO()

    Screen(stream).json({"a": math.nan, "b": [math.inf, -math.inf, 1.5, None]})

    assert json.loads(stream.getvalue(), parse_constant=pytest.fail) == {
        "a": "NaN",
        "b": ["Infinity", "-Infinity", 1.5, None],
    }


@pytest.mark.parametrize(
    ("seconds", "age", "duration"),
    [
        (0.4, "0s", "0s"),
        (59, "59s", "59s"),
        (63, "1m", "1m03s"),
        (3600, "1h", "1h00m"),
        (90_000, "1d", "1d01h"),
        (-5, "0s", "0s"),
        (None, NOTHING, NOTHING),
        (math.nan, NOTHING, NOTHING),
    ],
)
def test_ages_and_durations(seconds, age, duration):
    """An age has one unit and a duration two; a wrong clock does no harm."""
    assert (age_text(seconds), duration_text(seconds)) == (age, duration)


def test_sizes():
    """A size has the unit that suits it."""
    assert [bytes_text(size) for size in (0, 1023, 1536, 5 << 20, 1 << 50)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "1024.0 TiB",
    ]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 30), ("1.5", 1.5), ("30s", 30), ("5m", 300), ("12h", 43200), ("7d", 604800), ("2w", 1209600)],
)
def test_durations_are_read(text, seconds):
    """A plain number is seconds."""
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "-1", "nan", "inf", "1y", "five"])
def test_invalid_durations_are_refused(text):
    """The message has an example."""
    with pytest.raises(
        ValueError,
        match=r"^invalid duration .*: expected a number with a unit, such as 30s, 5m, 1h30m or 7d$",
    ):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([1.0], "▁"),
        ([2.0, 2.0], "▁▁"),
        ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
        ([0.0, math.nan, 7.0], "▁ █"),
        ([math.nan, math.inf], ""),
        ([1e308, -1e308], "█▁"),
    ],
)
def test_sparklines(values, line):
    """They span the smallest and largest value; non-finite values leave a gap."""
    assert sparkline(values) == line


def test_a_long_series_is_drawn_by_the_means_of_its_parts():
    """Each part has one character."""
    assert sparkline([float(value) for value in range(1000)], 8) == "▁▂▃▄▅▆▇█"


def test_values_are_one_line():
    """Any value becomes one line."""
    assert [value_text(value) for value in (None, 2.302585, "a\nb", {"a": [1, math.nan]}, True)] == [
        NOTHING,
        "2.303",
        "a\\nb",
        '{"a": [1, "NaN"]}',
        "True",
    ]
    assert all(unicodedata.category(character) != "Cc" for character in value_text("\x1b[31m\t"))
