"""SQL, Python, the server and the exported site have the same order and status of runs."""

import itertools
import math

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from destinations.runs import open_runs
from destinations.runs.index.index import Index
from destinations.runs.index.root import Root
from destinations.runs.index.scan import ScanChange
from destinations.runs.order import MISSING, key_of, label_of, sort_rows
from destinations.runs.record import FIELDS, RunRecord, is_terminal, status_of
from destinations.runs.runs import Runs
from destinations.runs.views import RunView
from destinations.viewer.catalog import Catalog
from tests.test_destinations.runs.folders import HOUR, NOW, clock, write_run

HUGE = [2**63 - 1, 2**63, -(2**63), 2**70, 10**400, -(10**400)]
SCALARS = st.one_of(
    st.sampled_from([0, 1, 1.0, -0.0, 0.5, 1e300, math.inf, -math.inf, math.nan, *HUGE]),
    st.integers(-3, 3),
    st.floats(),
    st.sampled_from(
        ["", "1", "1.0", "a", "A", "none", "None", "true", "nan", "\N{EN DASH}", '"1"', "a\0b", "é"]
    ),
    st.booleans(),
    st.none(),
)
TIMES = st.one_of(st.none(), st.sampled_from([NOW - 200, NOW - 100]), st.floats(NOW - HOUR, NOW))
RECORDS = st.lists(
    st.fixed_dictionaries(
        {
            "status": st.sampled_from(["running", "completed", "unknown", "failed"]),
            "kind": st.sampled_from(["run-directory", "lightning-csv"]),
            "created_at": TIMES,
            "ended_at": TIMES,
            "updated_at": TIMES,
            "heartbeat_at": TIMES,
            "archived": st.booleans(),
            "display_name": st.one_of(st.none(), st.sampled_from(["a", "b"])),
            "hparams": st.dictionaries(st.just("x"), SCALARS),
            "summary": st.dictionaries(st.just("x"), st.floats() | st.integers(-2, 2)),
        }
    ),
    min_size=1,
    max_size=9,
)
COLUMNS = [*(name for name, field in FIELDS.items() if field.type != "texts"), "hparams.x", "summary.x"]


def kind_of(value):
    """Returns the rank of a value's kind, as docs/runs.md lists them."""
    if value is MISSING:
        return 5
    if value is None:
        return 3
    if isinstance(value, bool):
        return 2
    if isinstance(value, str):
        return 1
    return 4 if value != value else 0  # noqa: PLR0124  # NaN


@pytest.fixture
def runs_of():
    """Opens runs with the given records in an index in memory."""
    opened = []

    def make(dicts):
        records = [
            RunRecord(run_id=f"r{number}", path=f"/x/a/r{number}", **{"kind": "run-directory"} | fields)
            for number, fields in enumerate(dicts)
        ]
        index = Index("/x", None)
        index.write(
            ScanChange(
                f"a/{one.run_id}",
                attrs.asdict(one, recurse=False),
                None,
                one.heartbeat_at,
                1,
                1,
                "",
                0 if is_terminal(one.status) else 1,
            )
            for one in records
        )
        opened.append(Runs([Root("/x", index)], clock=clock))
        return opened[-1]

    yield make
    for runs in opened:
        runs.close()


@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(RECORDS)
def test_the_server_and_a_site_have_the_same_order_and_groups_in_each_column(runs_of, dicts):
    """The server uses SQL's index; the site computes from the records."""
    runs = runs_of(dicts)
    catalog = Catalog(runs, clock=clock)
    records = runs.records(archived=None)
    cells = [
        name for name in COLUMNS if name in {f"{g}.x" for g in ("hparams", "summary") for d in dicts if d[g]}
    ]
    columns = [name for name in COLUMNS if "." not in name or name in cells]

    orders, _ = catalog.orders(records, cells)

    for name in columns:
        labels = orders[name]["labels"]
        for sort, direction in ((name, "up"), (f"-{name}", "down")):
            rows = catalog.page(RunView(sort=sort, archived=None))["rows"]
            places = orders[name][direction]
            assert [row["run_id"] for row in rows] == [records[place].run_id for place in places], sort
        counted = [
            (label, len(list(group)))
            for label, group in itertools.groupby(labels[p] for p in orders[name]["up"])
        ]
        groups = catalog.groups(RunView(group=(name,), archived=None))["groups"]
        assert [(group["label"], group["total"]) for group in groups] == counted, name


@settings(max_examples=100, deadline=None)
@given(st.lists(SCALARS | st.just(MISSING), max_size=8), st.booleans())
def test_kinds_keep_their_order_and_values_follow_the_direction(values, descending):
    """The kinds are numbers, texts, true and false, none, NaN, missing; equal values keep their order."""
    found = sort_rows([(value, place) for place, value in enumerate(values)], descending=descending)

    kinds = [kind_of(value) for value, _ in found]
    assert kinds == sorted(kinds)
    for kind in range(6):
        same = [(key_of(value)[1], place) for value, place in found if kind_of(value) == kind]
        keys = [key for key, _ in same]
        assert keys == sorted(keys, reverse=descending)
        for _, equal in itertools.groupby(same, key=lambda pair: pair[0]):
            places = [place for _, place in equal]
            assert places == sorted(places)


@settings(max_examples=100, deadline=None)
@given(SCALARS | st.just(MISSING), SCALARS | st.just(MISSING))
def test_equal_numbers_are_equal_and_kinds_differ(one, other):
    """1 equals 1.0 and NaN equals NaN; "1", true and a missing value differ, and so do their labels."""
    is_same_kind = kind_of(one) == kind_of(other)
    is_equal = is_same_kind and (kind_of(one) >= 3 or one == other)

    # Integers beyond 64 bits count as the nearest float.
    if not any(isinstance(value, int) and abs(value) >= 2**63 for value in (one, other)):
        assert (key_of(one) == key_of(other)) == is_equal
    assert (label_of(one) == label_of(other)) == (key_of(one) == key_of(other))


def test_groups_tell_one_text_none_and_missing_apart(runs_of):
    """`1` and `1.0` are one group and "1" another; a hyperparameter that is none isn't missing."""
    values = [1, "1", 1.0, None, "None", True, math.nan]
    runs = runs_of([{"hparams": {"x": value}} for value in values] + [{}])

    assert runs.count_by("hparams.x") == {
        "1": 2,
        '"1"': 1,
        "None": 1,
        "true": 1,
        "none": 1,
        "nan": 1,
        "\N{EN DASH}": 1,
    }


def test_a_row_tells_none_from_a_missing_hyperparameter(runs_of):
    """The table shows none as none, and a missing one as nothing."""
    catalog = Catalog(runs_of([{"hparams": {"x": None}}, {}]), clock=clock)

    rows = catalog.page(RunView(sort="hparams.x"), columns=["hparams.x"])["rows"]

    assert [row["values"] for row in rows] == [{"hparams.x": None}, {}]


def test_runs_are_sorted_by_their_duration(runs_of):
    """Their start doesn't matter; a live run has lasted until now."""
    runs = runs_of(
        [
            {"status": "completed", "created_at": NOW - 1000, "ended_at": NOW - 990},
            {"status": "running", "created_at": NOW - 500, "heartbeat_at": NOW},
            {"status": "completed", "created_at": NOW - 100, "ended_at": NOW - 1},
        ]
    )

    found = [row["duration"] for row in Catalog(runs, clock=clock).page(RunView(sort="duration"))["rows"]]

    assert found == [10.0, 99.0, 500.0]
    assert [run.run_id for run in runs.query(where="duration > 50 and age < 600")] == ["r2", "r1"]


def test_shown_status_is_filtered_sorted_grouped_and_counted(tmp_path):
    """A run with status "running" counts as killed once its heartbeat is old, by the reader's clock."""
    time = [NOW]
    root = tmp_path / "runs"
    for number in range(8):
        status = "running" if number % 2 else "completed"
        write_run(root / f"r{number}", status=status, beat=NOW - 10, created_at=NOW - number)
    with open_runs(root, cache=tmp_path / "cache", clock=lambda: time[0]) as runs:
        catalog = Catalog(runs, clock=lambda: time[0])
        before = runs.count_by("status")
        time[0] = NOW + HOUR

        after = runs.count_by("status")
        rows = catalog.page(RunView(sort="status"))["rows"]
        killed = runs.query(status="killed")

    assert (before, after) == ({"completed": 4, "running": 4}, {"completed": 4, "killed": 4})
    assert [row["status"] for row in rows] == ["completed"] * 4 + ["killed"] * 4
    assert [status_of(run.record, time[0]) for run in killed] == ["killed"] * 4
    assert [run.record.status for run in killed] == ["running"] * 4
