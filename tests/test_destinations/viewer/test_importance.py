"""Importance of hyperparameters for runs with a known answer, over HTTP and in Python."""

import itertools
import math
import random
import sys
import time

import pytest

from destinations.runs import BudgetError
from destinations.runs.budget import Budget, Limits
from destinations.runs.order import MISSING
from destinations.viewer.importance import LEAST_RUNS, importance_of
from tests.test_destinations.runs.folders import write_run
from tests.test_destinations.viewer.served import served


def settings(runs, seed=0):
    """Random values of three hyperparameters: a rate, a name, and a number without effect."""
    generator = random.Random(seed)
    return {
        "hparams.lr": [10 ** generator.uniform(-4, 0) for _ in range(runs)],
        "hparams.optimizer": [generator.choice(["adam", "sgd"]) for _ in range(runs)],
        "hparams.seed": [generator.randrange(5) for _ in range(runs)],
    }


def loss_of(columns, at):
    """Best at a rate of 0.01, slightly better with adam, and independent of the seed."""
    away = abs(math.log10(columns["hparams.lr"][at]) + 2)
    return away + 0.3 * (columns["hparams.optimizer"][at] == "sgd")


def test_hyperparameters_are_sorted_by_importance():
    """The rate precedes the name, and the seed has no importance; the forest predicts unseen runs well."""
    columns = settings(200)
    found = importance_of(columns, [loss_of(columns, at) for at in range(200)])

    assert found["problem"] == ""
    assert found["runs"] == 200
    assert 0.9 < found["score"] < 1
    assert [field["names"] for field in found["fields"]] == [
        ["hparams.lr"],
        ["hparams.optimizer"],
        ["hparams.seed"],
    ]
    lr, optimizer, seed = (field["mean"] for field in found["fields"])
    assert lr > 1 > optimizer > 0.02 > abs(seed)


def test_only_the_order_of_the_runs_counts():
    """The same runs have the same answer to the last bit, also with huge values and a run that diverged.

    A copy of a hyperparameter under another name shares its importance; a unique text per run is a name.
    """
    columns = settings(60)
    values = [loss_of(columns, at) for at in range(60)]
    worst = max(range(60), key=values.__getitem__)
    diverged = [math.inf if at == worst else math.exp(100 * value) for at, value in enumerate(values)]
    copy = {"hparams.optim.lr": columns["hparams.lr"], "hparams.folder": [f"runs/{at}" for at in range(60)]}

    found, copied = importance_of(columns, values), importance_of(columns | copy, values)

    assert importance_of(columns, diverged) == found
    assert copied["fields"][0]["names"] == ["hparams.lr", "hparams.optim.lr"]
    assert [field["mean"] for field in copied["fields"]] == [field["mean"] for field in found["fields"]]


def test_values_of_any_kind_tell_runs_apart():
    """Numbers, their texts, true and false, none, NaN and missing values are different values."""
    kinds = [1, "1", True, None, math.nan, MISSING, math.inf, 1e308]
    column = [kinds[at % len(kinds)] for at in range(160)]

    found = importance_of({"hparams.a": column}, [float(at % len(kinds)) for at in range(160)])

    assert found["score"] > 0.99
    assert [field["names"] for field in found["fields"]] == [["hparams.a"]]


def test_a_random_search_tells_its_hyperparameters_apart():
    """Numbers that differ in each run are separate settings."""
    generator = random.Random(0)
    columns = {name: [generator.random() for _ in range(100)] for name in ("a", "b")}
    columns["a"][7] = MISSING

    found = importance_of(columns, columns["b"])

    assert [field["names"] for field in found["fields"]] == [["b"], ["a"]]
    assert found["fields"][0]["mean"] > 1
    assert abs(found["fields"][1]["mean"]) < 0.05


@pytest.mark.parametrize(
    ("columns", "values", "problem"),
    [
        (settings(19), list(range(19)), "19 runs that have ended have a number here. It takes 20"),
        (settings(30), [1.0, *[math.nan, MISSING] * 14, 2.0], "2 runs that have ended"),
        (settings(30), [1.0] + [MISSING] * 29, "1 run that has ended has"),
        (settings(30), [0.5] * 30, "All 30 runs that have ended have the same value."),
        (
            {"hparams.lr": [0.1] * 30},
            list(range(30)),
            "The 30 runs that have ended differ in no hyperparameter.",
        ),
        (
            settings(60),
            [hash_ % 7919 for hash_ in range(0, 60 * 104729, 104729)],
            "Not enough evidence: the forest predicts unseen runs with R² -",
        ),
    ],
)
def test_runs_without_evidence_have_a_reason(columns, values, problem):
    """Too few runs, equal runs and noise have a reason instead of importances."""
    found = importance_of(columns, values)

    assert problem in found["problem"]
    assert found["fields"] == []


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    """The answer says what to install; the page works."""
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    columns = settings(LEAST_RUNS)

    found = importance_of(columns, [loss_of(columns, at) for at in range(LEAST_RUNS)])

    assert "pip install scikit-learn" in found["problem"]
    assert (found["runs"], found["score"], found["fields"]) == (LEAST_RUNS, None, [])


def test_the_forest_ends_with_its_budget():
    """A forest of many columns is abandoned when the answer's time is over."""
    columns = settings(60)
    times = itertools.count()

    with (
        Budget(Limits(seconds=8), clock=lambda: next(times)),
        pytest.raises(BudgetError, match="longer than 8 s"),
    ):
        importance_of(columns, [loss_of(columns, at) for at in range(60)])


def test_live_and_unmatched_runs_are_left_out(tmp_path):
    """Only matching runs that have ended count; a metric that no run has is named."""
    columns = settings(80)
    for at in range(80):
        hparams = {name.removeprefix("hparams."): column[at] for name, column in columns.items()}
        live = {"status": "running", "beat": time.time()} if at < 10 else {}
        write_run(
            tmp_path / "runs" / f"run{at:02}", hparams=hparams, summary={"loss": loss_of(columns, at)}, **live
        )
    with served(tmp_path / "runs") as page:
        every = page.get("/api/importance", {"metric": "loss"})
        adam = page.get("/api/importance", {"metric": "loss", "where": "optimizer == 'adam'"})
        wrong = page.get("/api/importance", {"metric": "los"}, status=400)

    assert every["fields"][0]["names"] == ["hparams.lr"]
    assert every["runs"] == 70
    assert [field["names"] for field in adam["fields"]] == [["hparams.lr"], ["hparams.seed"]]
    assert adam["runs"] < every["runs"]
    assert "summary.loss" in wrong["error"]
