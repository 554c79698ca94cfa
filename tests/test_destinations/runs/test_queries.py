"""Queries, lookups, comparisons and edits of runs."""

import itertools
import json
import math
import multiprocessing
import sys

import pytest

from destinations.run_directory.layout import EDITS
from destinations.runs import (
    AmbiguousRunError,
    BudgetError,
    EditError,
    MetricNotFoundError,
    RunNotFoundError,
    open_runs,
)
from destinations.runs.budget import Budget, Limits
from destinations.runs.index.edits import edit_run
from tests.test_destinations.runs.folders import NOW, age, clock, write_run


@pytest.fixture
def root(tmp_path):
    """A folder for runs."""
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.fixture
def opened(root, tmp_path):
    """Opens the runs below the root."""
    made = []

    def make(*more):
        made.append(open_runs(root, *more, cache=tmp_path / "cache", clock=clock))
        return made[-1]

    yield make
    for runs in made:
        runs.close()


def ids(found):
    """Returns the ids of runs, in their order."""
    return [run.record.run_id for run in found]


# Order and limits.


def test_the_newest_run_comes_first(opened, root):
    """You can ask for another order; a run without a creation time comes last."""
    for name, created_at in (("old", 1.0), ("new", 3.0), ("none", None), ("middle", 2.0)):
        write_run(root / name, created_at=created_at)

    runs = opened()

    assert ids(runs.query()) == ids(runs) == ["new", "middle", "old", "none"]
    assert ids(runs.query(sort_by="created_at", descending=False)) == ["old", "middle", "new", "none"]
    assert ids(runs.query(limit=2)) == ["new", "middle"]
    assert ids(runs.query(limit=0)) == []


def test_runs_without_the_metric_come_last_in_both_directions(opened, root):
    """NaN precedes them. A limit applies after sorting, so the best runs are never cut off."""
    for name, summary in (
        ("a", {"loss": 2.0}),
        ("b", {}),
        ("c", {"loss": math.nan}),
        ("d", {"loss": -math.inf}),
        ("e", {"loss": 1}),
    ):
        write_run(root / name, summary=summary)

    runs = opened()

    assert ids(runs.query(sort_by="summary.loss")) == ["a", "e", "d", "c", "b"]
    assert ids(runs.query(sort_by="summary.loss", descending=False)) == ["d", "e", "a", "c", "b"]
    assert ids(runs.query(sort_by="summary.loss", descending=False, limit=1)) == ["d"]


@pytest.mark.parametrize(
    "name", ["module.optim.lr", "val/acc", "it's", 'a"b', "a[0]", "%", "; DROP TABLE runs", "c1", "é"]
)
def test_any_name_sorts_and_filters(name, opened, root):
    """Dots, slashes, quotes and SQL in a name have no special meaning."""
    for number in range(3):
        write_run(root / f"r{number}", hparams={name: (number * 2) % 3}, summary={name: -number})

    runs = opened()

    assert ids(runs.query(sort_by=f"hparams.{name}")) == ["r0", "r2", "r1"]
    assert ids(runs.query(sort_by=f"summary.{name}")) == ["r0", "r1", "r2"]
    escaped = name.replace('"', '\\"')
    assert ids(runs.query(where=f'hparams."{escaped}" == 2')) == ["r1"]


@pytest.mark.parametrize(
    ("sort_by", "near"),
    [
        ("summary.los", ("summary.loss",)),
        ("hparams.optim_lr", ("hparams.optim.lr",)),
        ("createdat", ("created_at",)),
        ("los", ()),
        ("tags", ()),
    ],
)
def test_sorting_by_an_unknown_name_suggests_similar_names(sort_by, near, opened, root):
    """A wrong name never sorts arbitrarily."""
    write_run(root / "a", hparams={"optim.lr": 1}, summary={"loss": 1})

    with pytest.raises(MetricNotFoundError) as caught:
        opened().query(sort_by=sort_by)

    assert caught.value.near[: len(near)] == near
    assert str(caught.value).startswith("unknown ")
    assert f" '{sort_by}'" in str(caught.value)


def test_tag_status_and_filter_hold_together(opened, root):
    """A tag matches literally, without wildcards and in any alphabet."""
    write_run(root / "a", tags=["sweep_7", "größe"], status="failed")
    write_run(root / "b", tags=["sweep:7"], status="failed")
    write_run(root / "c", tags=["sweep_7"], status="completed")

    runs = opened()

    assert sorted(ids(runs.query(tag="sweep_7"))) == ["a", "c"]
    assert ids(runs.query(tag="größe")) == ["a"]
    assert runs.query(tag="sweep%") == []
    assert ids(runs.query(tag="sweep_7", status="failed")) == ["a"]
    assert ids(runs.query(tag="sweep_7", where="status != 'failed'", limit=1)) == ["c"]


def test_several_roots_are_one_set_of_runs(opened, root, tmp_path):
    """They have one order and one limit, whichever root a run is in."""
    for number in range(6):
        folder = root if number % 2 else tmp_path / "more"
        summary = {} if number == 5 else {"loss": number}
        write_run(folder / f"r{number}", created_at=float(number), summary=summary)

    runs = opened(tmp_path / "more")

    assert ids(runs.query()) == ["r5", "r4", "r3", "r2", "r1", "r0"]
    assert ids(runs.query(limit=3)) == ["r5", "r4", "r3"]
    assert ids(runs.query(sort_by="summary.loss", descending=False, limit=5)) == [
        "r0",
        "r1",
        "r2",
        "r3",
        "r4",
    ]
    assert ids(runs.query(sort_by="summary.loss", limit=6)) == ["r4", "r3", "r2", "r1", "r0", "r5"]
    assert (len(runs), runs.metric_names(), runs.report.runs) == (6, ["loss"], 6)


# One run.


def test_a_run_is_found_by_id_name_path_or_the_beginning_of_its_id(opened, root, monkeypatch):
    """They are tried in this order, so an id is never mistaken for the beginning of another."""
    write_run(root / "group" / "digits", run_id="abc1")
    write_run(root / "other", run_id="abc12", display_name="best")
    monkeypatch.chdir(root / "group")

    runs = opened()

    for wanted in (
        "abc1",
        "digits",
        "group/digits",
        str(root / "group" / "digits"),
        root / "group" / "digits",
        "./digits",
    ):
        assert runs[wanted].record.run_id == "abc1"
    for wanted in ("abc12", "best", "../other"):
        assert runs[wanted].record.run_id == "abc12"
    assert runs["abc12"].record.name == "best"


def test_many_runs_are_found_by_their_folders_at_once(opened, root, tmp_path):
    """Folders that are no runs are left out; two roots take one query each."""
    folders = [root / "a", tmp_path / "more" / "b"]
    for folder in folders:
        write_run(folder)
    runs = opened(tmp_path / "more")

    found = runs.many([*folders, root / "c", tmp_path])

    assert {folder: run.name for folder, run in found.items()} == {folders[0]: "a", folders[1]: "b"}


def test_an_unknown_run_is_an_error_with_near_names(opened, root):
    """It is also a KeyError, with a readable text."""
    write_run(root / "digits")

    with pytest.raises(KeyError) as caught:
        opened()["digit5"]

    assert isinstance(caught.value, RunNotFoundError)
    assert str(caught.value).endswith("'digit5'. Did you mean 'digits'?")


@pytest.mark.parametrize("wanted", ["", "\udc00", "/", "..", "no\0thing"])
def test_strange_names_are_unknown_runs(wanted, opened, root):
    """Any text gets the same error."""
    write_run(root / "digits")

    with pytest.raises(RunNotFoundError):
        opened()[wanted]


def test_ambiguous_name_raises_and_lists_the_runs(opened, root):
    """The path distinguishes equal ids; the beginning of an id must be unique."""
    write_run(root / "a", run_id="abc")
    write_run(root / "b", run_id="abc")
    write_run(root / "c", run_id="xyz1")
    write_run(root / "d", run_id="xyz2")

    runs = opened()

    with pytest.raises(AmbiguousRunError, match=r"abc \(.*/a\), abc \(.*/b\). Use its path"):
        runs["abc"]
    with pytest.raises(AmbiguousRunError, match="xyz1"):
        runs["xyz"]
    assert runs["b"].record.path == root / "b"


# Tables.


def test_compare_shows_only_differences(opened, root):
    """1 equals 1.0, and NaN equals NaN; 1 and true differ."""
    same = {"epochs": 3, "data": "mnist"}
    write_run(
        root / "a",
        hparams={**same, "lr": 0.1, "n": 1, "flag": True},
        summary={"loss": math.nan, "acc": 0.5},
        tags=["t"],
    )
    write_run(
        root / "b",
        hparams={**same, "lr": 0.2, "n": 1.0, "flag": 1},
        summary={"loss": math.nan},
        tags=["t"],
        status="failed",
    )

    runs = opened()

    assert runs.compare(["a", runs["b"]]) == {
        "status": {"a": "completed", "b": "failed"},
        "hparams.lr": {"a": 0.1, "b": 0.2},
        "hparams.flag": {"a": True, "b": 1},
        "summary.acc": {"a": 0.5},
    }
    assert runs.compare(["a", "a"]) == {}


def test_runs_as_a_data_frame(opened, root):
    """Columns are fields, hyperparameters, metrics; without runs, only fields."""
    pd = pytest.importorskip("pandas")
    write_run(root / "a", created_at=2.0, hparams={"x": 1}, summary={"loss": 0.5})
    write_run(root / "b", created_at=1.0, hparams={"y": "z"})

    runs = opened()
    frame = runs.to_dataframe()

    assert isinstance(frame, pd.DataFrame)
    assert frame["run_id"].tolist() == ["a", "b"]
    assert list(frame.columns)[-3:] == ["hparams.x", "hparams.y", "summary.loss"]
    empty = runs.to_dataframe(where="archived")
    assert (len(empty), "run_id" in empty.columns) == (0, True)


def test_data_frame_without_pandas_raises_with_advice(opened, root, monkeypatch):
    """Plain dicts need no pandas."""
    monkeypatch.setitem(sys.modules, "pandas", None)

    with pytest.raises(ImportError, match=r"Install pandas, or use to_dicts\(\)"):
        opened().to_dataframe()


# Edits.


def test_an_edit_is_a_file_of_its_own_in_the_folder_of_the_run(opened, root):
    """The run's own files don't change, and the index is updated at once."""
    write_run(root / "a", tags=["own", "bad"], notes="theirs")
    sidecar = (root / "a" / "sidecar.json").read_bytes()
    runs = opened()

    edited = runs.edit("a", tags=["own", "mine"], notes="n", display_name="best", archived=True).record

    assert (edited.tags, edited.notes, edited.display_name, edited.archived) == (
        ("own", "mine"),
        "n",
        "best",
        True,
    )
    assert (root / "a" / "sidecar.json").read_bytes() == sidecar
    assert sorted(path.name for path in (root / "a").iterdir()) == [EDITS, "sidecar.json"]
    assert json.loads((root / "a" / EDITS).read_text()) == {
        "format_version": 1,
        "added_tags": ["mine"],
        "removed_tags": ["bad"],
        "notes": "n",
        "display_name": "best",
        "archived": True,
        "updated_at": NOW,
    }
    assert (runs.query(), ids(runs.query(archived=True)), ids(runs.query(archived=None))) == (
        [],
        ["a"],
        ["a"],
    )
    assert ids(runs.query(tag="mine", archived=None)) == ["a"]


def test_unchanged_values_are_not_written(opened, root):
    """They stay the run's own, so the run may still change them."""
    write_run(root / "a", notes="theirs", tags=["one"])
    runs = opened()

    same = runs.edit("a", notes="theirs", tags=["one"], display_name="", archived=False)

    assert (same.record.notes, (root / "a" / EDITS).exists()) == ("theirs", False)
    runs.edit("a", notes="mine", tags=["one"])
    assert json.loads((root / "a" / EDITS).read_text()).keys() == {"format_version", "notes", "updated_at"}


def test_an_edit_by_another_program_is_read(opened, root, tmp_path):
    """The edit moves with the folder, and needs no index."""
    write_run(root / "a")
    runs = opened()
    edit_run(root / "a", (), notes="from elsewhere", clock=clock)
    (root / "a").rename(root / "b")

    runs.scan()

    assert runs["a"].record.notes == "from elsewhere"


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff"])
def test_damaged_edits_are_a_problem_of_the_run(content, opened, root):
    """The run is listed as written; the next edit replaces the file."""
    write_run(root / "a", notes="n")
    (root / "a" / EDITS).write_bytes(content)
    age(root / "a")

    runs = opened()

    assert runs["a"].record.notes == "n"
    assert runs["a"].record.problem.startswith("edits.json is damaged: ")
    assert runs.edit("a", notes="m").record.problem is None
    assert runs["a"].record.notes == "m"


def test_editing_a_deleted_run_raises(opened, root):
    """The edit doesn't create its folder again."""
    write_run(root / "a")
    runs = opened()
    (root / "a").rename(root / "b")

    with pytest.raises(EditError, match="could not write edits"):
        runs.edit("a", notes="n")

    assert not (root / "a").exists()


def test_tags_must_be_a_list(opened, root):
    """A single text would be split into letters."""
    write_run(root / "a")

    with pytest.raises(TypeError, match=r"Write tags=\['t'\]"):
        opened().edit("a", tags="t")


def _add_tag(folder, number):
    """Adds long notes and one field, again and again."""
    for _ in range(20):
        edit_run(folder, (), **{("notes", "display_name")[number]: "x" * 1000})


def test_concurrent_edits_lose_nothing(root):
    """Each changes another field, and in the end all changes are there."""
    write_run(root / "a")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_add_tag, args=(root / "a", number)) for number in range(2)]

    for process in processes:
        process.start()
    for process in processes:
        process.join(300)

    assert [process.exitcode for process in processes] == [0, 0]
    content = json.loads((root / "a" / EDITS).read_text())
    assert content["notes"] == content["display_name"] == "x" * 1000
    assert sorted(path.name for path in (root / "a").iterdir()) == [EDITS, "sidecar.json"]


def test_a_fingerprint_changes_with_its_run_only(tmp_path):
    """This holds even if another process has updated the index."""
    one, two = (write_run(tmp_path / "runs" / name) for name in ("one", "two"))
    with open_runs(tmp_path / "runs", cache=tmp_path / "cache") as runs:
        before = runs.fingerprints()
        with open_runs(tmp_path / "runs", cache=tmp_path / "cache") as others:
            others.edit("one", notes="new")
            others.scan()
        runs.scan()
        after = runs.fingerprints()

    assert before.keys() == after.keys() == {one.resolve(), two.resolve()}
    assert (before[one.resolve()] == after[one.resolve()], before[two.resolve()] == after[two.resolve()]) == (
        False,
        True,
    )


# The best value of a metric.


def summarize(folder, **metrics):
    """Writes `summary.json` in place, which doesn't change the folder's time."""
    (folder / "summary.json").write_text(
        json.dumps({"metrics": {name: {"count": 9, **one} for name, one in metrics.items()}})
    )


def bests(found):
    """Returns the result of `best`, in its order."""
    return [(one.run.run_id, one.value, one.step) for one in found]


def test_runs_are_ranked_by_the_best_value_at_any_step(opened, root):
    """Smallest or largest; a run without a finite value has no rank, and filters and limits apply."""
    for name, low, high in (("a", 0.5, 9.0), ("b", 0.25, 3.0), ("c", "NaN", None)):
        summarize(write_run(root / name, tags=[name]), loss={"min": low, "min_step": 4, "max": high})
    summarize(write_run(root / "d"), other={"min": 0.0, "max": 0.0})

    runs = opened()

    assert bests(runs.best("loss", is_max=False)) == [("b", 0.25, 4), ("a", 0.5, 4)]
    assert bests(runs.best("loss", is_max=True)) == [("a", 9.0, None), ("b", 3.0, None)]
    assert bests(runs.best("loss", is_max=True, limit=1)) == [("a", 9.0, None)]
    assert bests(runs.best("loss", is_max=True, tag="b")) == [("b", 3.0, None)]


def test_best_reads_only_summaries_of_changed_runs(opened, root):
    """The index keeps the values, even for the next process."""
    for name in ("a", "b"):
        summarize(write_run(root / name), loss={"min": 1.0, "max": 2.0})
        age(root / name)
    assert {one.value for one in opened().best("loss", is_max=False)} == {1.0}
    for name in ("a", "b"):
        summarize(root / name, loss={"min": 0.5, "max": 2.0})
    age(root / "b")

    again = bests(opened().best("loss", is_max=False))

    assert again == [("b", 0.5, None), ("a", 1.0, None)]


def test_best_rereads_live_and_recently_written_runs(opened, root):
    """A live run may have newer rows, and a recent folder time isn't trusted."""
    running = write_run(root / "running", status="running", beat=NOW - 9)
    young = write_run(root / "young", old=False)
    age(running)
    for folder in (running, young):
        summarize(folder, loss={"min": 1.0})
    runs = opened()
    assert len(runs.best("loss", is_max=False)) == 2
    for folder in (running, young):
        summarize(folder, loss={"min": 0.5})
    write_run(running, status="running", beat=NOW)

    runs.scan()

    assert {one.value for one in runs.best("loss", is_max=False)} == {0.5}


def test_best_leaves_out_an_unreadable_run(opened, root, caplog):
    """Each call logs a warning, and ranks the other runs."""
    summarize(write_run(root / "good"), loss={"min": 1.0})
    (write_run(root / "bad") / "metrics.csv").mkdir()
    runs = opened()

    for _ in range(2):
        assert bests(runs.best("loss", is_max=False)) == [("good", 1.0, None)]

    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"skipped run in {root / 'bad'}"
    ] * 2


def test_a_regular_expression_that_backtracks_too_long_is_abandoned(tmp_path):
    """Such a pattern would take years and block all threads; other conditions of the filter still apply."""
    write_run(tmp_path / "runs" / ("a" * 60 + "!"))
    write_run(tmp_path / "runs" / "b")
    with open_runs(tmp_path / "runs", cache=tmp_path / "cache") as runs:
        with Budget(Limits(seconds=0.5)), pytest.raises(BudgetError, match="takes too long"):
            runs.query(where='name ~ "(a+)+$"')

        found = runs.query(where='name ~ "^(a+)+!$" or name ~ "^B$" or name ~ "(?i)^B$"')

    assert sorted(run.name[:1] for run in found) == ["a", "b"]


def test_abandoned_query_ends_at_once(tmp_path):
    """A running expression is interrupted, and a query that waits for its turn doesn't start."""
    write_run(tmp_path / "runs" / ("a" * 60 + "!"))
    looks = itertools.count()
    with open_runs(tmp_path / "runs", cache=tmp_path / "cache") as runs, Budget() as budget:

        def clock():
            if next(looks) == 3:
                budget.end()
            return 0.0

        budget._clock = clock
        with pytest.raises(BudgetError, match="nobody waits"):
            runs.query(where='name ~ "(a+)+$"')
        with pytest.raises(BudgetError, match="nobody waits"):
            len(runs)


def test_a_query_ends_with_its_budget(tmp_path):
    """SQLite stops within a statement, and the index doesn't change."""
    for number in range(50):
        write_run(tmp_path / "runs" / f"run{number}", hparams={"lr": number})
    times = iter([0.0, 0.0, 0.0, *[10.0] * 1000])
    slow = " or ".join(f"hparams.lr == {number}" for number in range(400))
    with open_runs(tmp_path / "runs", cache=tmp_path / "cache") as runs:
        budget = Budget(Limits(seconds=5), clock=lambda: next(times))
        with budget, pytest.raises(BudgetError, match="takes longer than 5 s"):
            runs.query(where=slow)

        assert len(runs.query(where=slow)) == 50
        assert not runs.report.warnings
