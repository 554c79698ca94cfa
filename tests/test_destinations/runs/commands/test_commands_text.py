"""The look of commands: widths, tables, ages, sparklines, colours."""

import io
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from destinations.runs.commands.screen import (
    NOTHING,
    Column,
    Screen,
    age_text,
    bytes_text,
    duration_text,
    sparkline,
    table_lines,
)
from destinations.text.formatting import cut, width_of

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


def test_characters_outside_the_locale_are_escaped():
    """A name with an emoji doesn't crash a command in the C locale."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", newline="")

    Screen(stream).line("größe 🙂")
    stream.flush()

    assert raw.getvalue() == b"gr\\xf6\\xdfe \\U0001f642\n"


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
