"""The filter language: its meaning in Python and in SQL, and its errors."""

import math
import operator
import re
from pathlib import Path

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from destinations.runs import FilterError
from destinations.runs.index.filter_sql import Order
from destinations.runs.index.filters import Field, parse_filter
from destinations.runs.index.index import Index
from destinations.runs.index.scan import RUNNING, ScanChange
from destinations.runs.record import RunRecord
from destinations.runs.runs import matches

NOW = 1_700_000_000.0
ROOT = "/runs"
# A slow or busy machine doesn't invalidate a property.
SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def record(**fields):
    """Returns a run."""
    return RunRecord(
        **{"path": Path("/runs/a"), "run_id": "a", "kind": "run-directory", "status": "completed"} | fields
    )


def holds(text, run):
    """Evaluates a filter for one run."""
    return matches(run, text, NOW)


# Meaning.

RUN = record(
    run_id="abc",
    tags=("sweep:7", "baseline"),
    notes="looks good",
    created_at=NOW - 3600,
    status="running",
    heartbeat_at=NOW - 10,
    hparams={
        "optim.lr": 1e-3,
        "n": 3,
        "opt": "adam",
        "flag": True,
        "off": False,
        "none": None,
        "nan": math.nan,
    },
    summary={"val/acc": 0.95, "a b": 1.0, "loss": math.nan, "gain": math.inf},
)


@pytest.mark.parametrize(
    "text",
    [
        "hparams.optim.lr >= 1e-3 and summary.val/acc > 0.9",
        "0.9 < summary.val/acc",
        'status in ("running", "failed")',
        "status not in ['failed']",
        "'sweep:7' in tags",
        "'sweep' not in tags",
        "tags == 'baseline'",
        "tags ~ '^sweep:'",
        "tags in ('x', 'baseline')",
        "alive",
        "not archived",
        "created_at > now-2h",
        "created_at < now - 30m",
        "created_at >= 2020-01-01T10:00:00Z",
        "2020-01-01 < created_at",
        "run_id ~ '^ab'",
        "path == '/runs/a'",
        "notes ~ 'good$'",
        "hparams.flag",
        "hparams.none == null",
        "summary.'a b' == 1",
        'summary."a b" >= 1',
        "summary.`a b` in (1, 2,)",
        "summary.loss == nan",
        "summary.gain == inf",
        "not hparams.missing > 0",
        "hparams.n == 3.0",
        "not hparams.flag == 1",
        "hparams.opt ~ 'D|d'",
        "not hparams.n ~ '3'",
        "alive or archived and archived",
        "not (alive and archived)",
        "not not alive",
        "hparams.n == 1_000 or hparams.n == +3",
    ],
)
def test_filters_select_runs(text):
    """Numbers, texts, truth, times and names work as docs/runs.md describes."""
    assert holds(text, RUN) is True
    assert holds(f"not ({text})", RUN) is False


def test_a_time_without_a_zone_is_the_time_of_this_machine():
    """This is what people mean."""
    at = parse_filter("created_at >= 2026-01-03T10:00:00", NOW).value
    in_zone = parse_filter("created_at >= 2026-01-03T10:00:00+02:00", NOW).value

    import datetime as dt

    assert at == dt.datetime(2026, 1, 3, 10).astimezone().timestamp()
    assert in_zone == dt.datetime(2026, 1, 3, 8, tzinfo=dt.UTC).timestamp()


# Errors.


@pytest.mark.parametrize(
    ("text", "position", "expected"),
    [
        ("", 0, "expected a field, got the end"),
        ("statu == 'x'", 0, "unknown field 'statu'. Did you mean status?"),
        ("sumary.loss < 1", 0, "Did you mean summary.?"),
        ("status", 6, "expected a comparison (== != < <= > >= ~ in) after status"),
        ("status = 'x'", 7, "got =. Write =="),
        ("alive & archived", 6, "got &. Write and."),
        ("!alive", 0, "expected a field, got !"),
        ("summary.loss <", 14, "expected a value, got the end"),
        ("summary.loss < low", 15, 'Put text in quotes: "low"'),
        ("(alive", 6, "expected ), got the end"),
        ("alive archived", 6, "expected and, or, or the end, got archived"),
        ("created_at > 'x'", 13, "expected a time such as now-2d to compare with created_at, got 'x'"),
        ("alive == 1", 9, "expected true or false to compare with alive, got 1"),
        ("tags < 'x'", 7, "< does not apply to tags. Use == or !="),
        ("hparams.x > true", 12, "> does not apply to true, false and none"),
        ("hparams.x ~ '('", 12, "invalid regular expression '('"),
        ("'x", 0, "missing closing '"),
        ("created_at > 2026-13-01", 13, "invalid date '2026-13-01'"),
        ("hparams.x in 3", 13, "expected a list in parentheses after in, got 3"),
        ("hparams.x not 3", 14, "expected in after not, got 3"),
        ("3 in hparams.x", 5, "expected tags or a list after in"),
        ("3", 1, "expected a comparison after 3, got the end"),
        ("hparams. > 3", 0, "unknown field 'hparams.'"),
        ("a; DROP TABLE runs", 1, "unexpected character ';'"),
    ],
)
def test_invalid_filter_names_the_problem_and_its_place(text, position, expected):
    """The error ends with the filter, and a caret below the place."""
    with pytest.raises(FilterError) as caught:
        parse_filter(text, NOW)

    assert expected in caught.value.problem
    assert caught.value.position == position
    assert str(caught.value).splitlines()[-2:] == [f"  {text}", f"  {' ' * position}^"]


@pytest.mark.parametrize(
    "text",
    [
        "(" * 1000 + "alive" + ")" * 1000,
        "not " * 1000 + "alive",
        " or ".join(["alive"] * 2000),
        f"hparams.x in ({'1, ' * 50_000})",
    ],
    ids=["parentheses", "not", "or", "in"],
)
def test_too_large_filter_is_refused(text):
    """Neither Python nor SQLite runs out of resources."""
    with pytest.raises(FilterError, match="more than"):
        parse_filter(text, NOW)


@settings(SLOW, max_examples=200)
@given(st.text(alphabet="ahs.()<>=!~'\"\\ 01-:,andortive\n\x00é", max_size=40))
def test_any_text_parses_or_raises_with_a_position(text):
    """No other exception is raised."""
    position = 0
    try:
        parse_filter(text, NOW)
    except FilterError as error:
        position = error.position

    assert 0 <= position <= len(text)


# Python, SQL, and the tests' own evaluation.

NAMES = ["x", "optim.lr", "val/acc", "a b", "quote'\"", "c0", "; DROP TABLE runs --", "é"]
NUMBERS = st.one_of(
    st.sampled_from(
        [0, 1, -1, 0.5, 1.0, -0.0, 1e300, 2**53, 2**53 + 1, 2**63 - 1, -(2**63) + 1, math.inf, -math.inf]
    ),
    st.integers(-3, 3),
    st.floats(-2, 2),
)
TEXTS = st.sampled_from(
    ["", "a", "A", "adam", "adamw", "b", "1", "true", "é", "\U0001f600", "a\0b", "%", "_", "nan", "'\"\\"]
)
CELLS = st.one_of(NUMBERS, TEXTS, st.booleans(), st.none(), st.just(math.nan))
STATUSES = ["running", "completed", "failed"]
TIMES = st.one_of(st.none(), st.floats(NOW - 1000, NOW + 1000))

RECORDS = st.builds(
    record,
    status=st.sampled_from(STATUSES),
    created_at=TIMES,
    ended_at=TIMES,
    heartbeat_at=TIMES,
    tags=st.lists(TEXTS, max_size=3, unique=True).map(tuple),
    notes=TEXTS,
    display_name=st.one_of(st.none(), TEXTS.filter(bool)),
    archived=st.booleans(),
    hparams=st.dictionaries(st.sampled_from(NAMES), CELLS, max_size=5),
    summary=st.dictionaries(st.sampled_from(NAMES), st.one_of(NUMBERS, st.just(math.nan)), max_size=5),
)


def quoted(text, quote='"'):
    """Returns a text as a filter writes it."""
    escaped = text.replace("\\", "\\\\").replace(quote, f"\\{quote}")
    return f"{quote}{escaped}{quote}"


def written(value):
    """Returns a value as a filter writes it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return quoted(value) if isinstance(value, str) else repr(value)


def kind_of(value):
    """Returns the kind that a value can be compared with."""
    for kind, types in (("none", type(None)), ("bool", bool), ("text", str)):
        if isinstance(value, types):
            return kind
    return "nan" if math.isnan(value) else "number"


def equal(one, other):
    """Evaluates ==."""
    return kind_of(one) == kind_of(other) and (kind_of(one) == "nan" or one == other)


def ordered(compare):
    """Returns a test of < and the like."""

    def test(one, other):
        return kind_of(one) == kind_of(other) and kind_of(one) in {"number", "text"} and compare(one, other)

    return test


OPERATORS = {
    "==": equal,
    "!=": lambda one, other: not equal(one, other),
    "<": ordered(operator.lt),
    "<=": ordered(operator.le),
    ">": ordered(operator.gt),
    ">=": ordered(operator.ge),
}
FLIPPED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
ABSENT = object()


def cell_of(group, name):
    """Returns a function that gets a hyperparameter or metric of a run."""
    return lambda run: getattr(run, group).get(name, ABSENT)


def own(name):
    """Returns a function that gets a field of a run."""

    def get(run):
        value = getattr(run, name)
        if name == "status" and value == "running" and not is_beating(run):
            return "killed"
        return ABSENT if value is None else value

    return get


@st.composite
def fields(draw):
    """Generates a field as a filter writes it, a function that gets its value, and comparable values."""
    group = draw(
        st.sampled_from(
            ["hparams", "summary", "status", "name", "notes", "display_name", "created_at", "ended_at"]
        )
    )
    if group in {"hparams", "summary"}:
        name = draw(st.sampled_from([*NAMES, "missing"]))
        return f"{group}.{quoted(name, draw(st.sampled_from(['`', chr(34)])))}", cell_of(group, name), CELLS
    if group.endswith("_at"):
        return group, own(group), st.floats(NOW - 1000, NOW + 1000)
    return group, own(group), st.sampled_from([*STATUSES, "killed", "a", "adam", ""])


@st.composite
def single_filters(draw):
    """Generates one filter condition, and the same in Python."""
    kind = draw(st.sampled_from(["compare", "compare", "in", "exists", "match", "tags", "flag"]))
    if kind == "tags":
        return draw(tag_filters())
    if kind == "flag":
        return draw(
            st.sampled_from(
                [
                    ("alive", is_beating),
                    ("archived", lambda run: run.archived),
                    ("not alive", lambda run: not is_beating(run)),
                ]
            )
        )
    text, get, values = draw(fields())
    if kind == "exists":
        return f"exists({text})", lambda run: get(run) is not ABSENT
    if kind == "match" and not text.endswith("_at"):
        pattern = draw(st.sampled_from(["^a", "a$", "m", "", "[^a-z]", "é|1"]))
        return (
            f"{text} ~ {quoted(pattern)}",
            lambda run: isinstance(get(run), str) and bool(re.search(pattern, get(run))),
        )
    if kind == "in":
        several = draw(st.lists(values, min_size=1, max_size=3))
        word = draw(st.sampled_from(["in", "not in"]))
        listed = f"{text} {word} ({', '.join(map(written, several))})"
        return (
            listed,
            lambda run: (
                get(run) is not ABSENT and (word == "in") == any(equal(get(run), one) for one in several)
            ),
        )
    value = draw(values)
    choices = ["==", "!="] if value is None or isinstance(value, bool) else list(OPERATORS)
    sign = draw(st.sampled_from(choices))
    if draw(st.booleans()):
        shown = f"{text} {sign} {written(value)}"
    else:
        shown = f"{written(value)} {FLIPPED[sign]} {text}"
    return shown, lambda run: get(run) is not ABSENT and OPERATORS[sign](get(run), value)


@st.composite
def tag_filters(draw):
    """Generates one condition on tags."""
    tag = draw(TEXTS)
    return draw(
        st.sampled_from(
            [
                (f"{quoted(tag)} in tags", lambda run: tag in run.tags),
                (f"{quoted(tag)} not in tags", lambda run: tag not in run.tags),
                (f"tags == {quoted(tag)}", lambda run: tag in run.tags),
                (f"tags != {quoted(tag)}", lambda run: tag not in run.tags),
                (f"tags in ({quoted(tag)}, 'b')", lambda run: tag in run.tags or "b" in run.tags),
                ("tags ~ '^a'", lambda run: any(one.startswith("a") for one in run.tags)),
                ("exists(tags)", lambda run: bool(run.tags)),
            ]
        )
    )


def is_beating(run):
    """Evaluates whether a run is alive."""
    return run.status == "running" and run.heartbeat_at is not None and run.heartbeat_at >= NOW - 180


def combined(parts):
    """Generates filters that combine two others."""
    return st.one_of(
        st.tuples(parts, parts).map(
            lambda two: (f"({two[0][0]}) and {two[1][0]}", lambda run: two[0][1](run) and two[1][1](run))
        ),
        st.tuples(parts, parts).map(
            lambda two: (f"({two[0][0]}) or ({two[1][0]})", lambda run: two[0][1](run) or two[1][1](run))
        ),
        parts.map(lambda one: (f"not ({one[0]})", lambda run: not one[1](run))),
    )


# "(a) and b" only takes b whole if b is no "or".
FILTERS = st.recursive(
    single_filters(), lambda parts: combined(parts.map(lambda one: (f"({one[0]})", one[1]))), max_leaves=6
)


def indexed(records):
    """Returns an index in memory with these runs; the first is number 1."""
    index = Index(ROOT, None)
    found = []
    for number, run in enumerate(records):
        is_open = RUNNING if run.status == "running" else 0
        fields = attrs.asdict(run, recurse=False)
        found.append(ScanChange(f"r{number}/a", fields, None, run.heartbeat_at, 1, 1, "", is_open))
    index.write(found)
    return index


@settings(SLOW, max_examples=150)
@given(st.lists(RECORDS, min_size=1, max_size=6), st.lists(FILTERS, min_size=1, max_size=4))
def test_sql_agrees_with_the_plain_meaning(records, filters):
    """The index and a few lines of Python agree for any runs and any filter."""
    index = indexed(records)
    order = Order(Field("run", "run_id"), descending=False)
    for text, predicate in filters:
        expected = [bool(predicate(run)) for run in records]
        parsed = parse_filter(text, NOW)

        query = index.compile(parsed, order, now=NOW, archived=None)
        numbers = {number for *_, number in index.select(query, None)}
        found = [number + 1 in numbers for number in range(len(records))]

        assert found == expected, text
    index.close()


@settings(SLOW, max_examples=100)
@given(
    st.lists(RECORDS, min_size=1, max_size=8),
    st.sampled_from(NAMES),
    st.sampled_from(["hparams", "summary"]),
    st.booleans(),
    st.integers(0, 9),
)
def test_runs_are_sorted_by_any_cell_with_the_missing_last(records, name, group, descending, limit):
    """Numbers precede texts, each in the requested direction; values that can't be ordered follow.

    Runs without the value come last.
    """
    index = indexed(records)
    field = Field(group, name)
    query = index.compile(None, Order(field, descending), now=NOW, archived=None)

    found = [number for *_, number in index.select(query, limit)]

    index.close()
    values = [getattr(records[number - 1], group).get(name, ABSENT) for number in found]
    ranks = {"number": 0, "text": 1, "nan": 2, "bool": 2, "none": 2}
    kinds = [3 if value is ABSENT else ranks[kind_of(value)] for value in values]
    assert kinds == sorted(kinds)
    for kind in (0, 1):
        same = [value for value, one in zip(values, kinds, strict=True) if one == kind]
        assert same == sorted(same, reverse=descending)
    every = sorted(
        3 if name not in getattr(run, group) else ranks[kind_of(getattr(run, group)[name])] for run in records
    )
    assert kinds == every[:limit]


@settings(SLOW, max_examples=100)
@given(st.lists(RECORDS, min_size=1, max_size=4))
def test_index_returns_the_values_stored(records):
    """Hyperparameters and metrics keep types and values, for any name."""
    index = indexed(records)

    found = dict(index.records(range(1, len(records) + 1)))

    index.close()
    for number, run in enumerate(records, 1):
        assert repr(sorted(found[number].hparams.items())) == repr(sorted(run.hparams.items()))
        assert repr(sorted(found[number].summary.items())) == repr(sorted(run.summary.items()))
        assert (found[number].tags, found[number].notes, found[number].display_name) == (
            run.tags,
            run.notes,
            run.display_name,
        )


def test_a_filter_with_more_names_than_sqlite_joins_tables():
    """One filter has a hundred names, and the runs have all or some of them in different orders."""
    names = [f"h{number}" for number in range(100)]
    records = [
        record(run_id="all", hparams=dict.fromkeys(names, 1)),
        record(run_id="reversed", hparams=dict.fromkeys(reversed(names), 1)),
        record(run_id="wrong", hparams={name: int(name != "h99") for name in names}),
        record(run_id="few", hparams={"h0": 1}),
    ]
    index = indexed(records)
    parsed = parse_filter(" and ".join(f"hparams.{name} == 1" for name in names), NOW)
    order = Order(Field("hparams", "h99"), descending=True)

    query = index.compile(parsed, order, now=NOW, archived=None)
    found = {records[number - 1].run_id for *_, number in index.select(query, None)}

    index.close()
    assert found == {"all", "reversed"}
