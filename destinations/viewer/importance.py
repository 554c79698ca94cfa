"""Which hyperparameter matters: the permutation importance of a small random forest, by scikit-learn.

Hyperparameters and the metric are replaced by their ranks (see `runs.order`). So the forest takes texts,
missing values and numbers of any size. A log scale changes nothing, and a diverged run only comes last.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from destinations.runs.budget import spend
from destinations.runs.order import Kind, key_of, same_values

if TYPE_CHECKING:
    import numpy as np

__all__ = ["LEAST_RUNS", "importance_of"]

LEAST_RUNS = 20
_OF_WORDS = {Kind.TEXT, Kind.OTHER}
_TREES = 50
_FOLDS = 5
_SHUFFLES = 5
_SEED = 0
# The least score of few runs, and of many. Among 120 sweeps of 20 to 50 runs whose metric was noise, one
# reached it, and among 40 sweeps of 100 runs none.
_LEAST_SCORE = 0.3
_LEAST_SCORE_OF_MANY = 0.1
_MANY_RUNS = 100


def importance_of(columns: Mapping[str, Sequence[Any]], values: Sequence[Any]) -> dict[str, Any]:
    """Returns how much each hyperparameter matters for the rank of runs by a metric.

    A random forest learns the ranks of four fifths of the runs and predicts the others, for each fifth in
    turn. `score` is the explained share of the variance: 1 for the right order, 0 or less for guesses. The
    importance of a hyperparameter is the drop of the score when its values are shuffled among the unseen
    runs. Hyperparameters that order the runs alike share one importance. The same runs give the same answer.

    Args:
        columns: the values of each hyperparameter; `MISSING` if a run has none.
        values: the metric of each run.

    Returns:
        `runs`, `score`, and `fields` with `names`, `mean` and `std` over the shuffles, the most important
        first; `problem` tells why there are none.

    Raises:
        BudgetError: the computation takes too long.
    """
    there = [place for place, value in enumerate(values) if key_of(value)[0] is Kind.NUMBER]
    columns = {name: [column[place] for place in there] for name, column in columns.items()}
    values = [values[place] for place in there]
    answer: dict[str, Any] = {"runs": len(there), "score": None, "fields": [], "problem": ""}
    if len(there) < LEAST_RUNS:
        runs = "1 run that has ended has" if len(there) == 1 else f"{len(there)} runs that have ended have"
        return answer | {"problem": f"{runs} a number here. It takes {LEAST_RUNS} to say what matters."}
    if same_values(values):
        return answer | {"problem": f"All {len(there)} runs that have ended have the same value."}
    distinct = _distinct(columns)
    if not distinct:
        return answer | {"problem": f"The {len(there)} runs that have ended differ in no hyperparameter."}
    try:
        import numpy as np
        from sklearn.ensemble import RandomForestRegressor
        from sklearn.model_selection import KFold
    except ImportError as error:
        needs = f"The server needs scikit-learn to rank hyperparameters ({error})"
        return answer | {"problem": f"{needs}: pip install scikit-learn"}

    x = np.array(list(distinct), np.float64).T
    y = np.array(_places(values), np.float64)
    random = np.random.default_rng(_SEED)
    wrong, wrong_shuffled = 0.0, np.zeros((len(distinct), _SHUFFLES))
    for known, unseen in KFold(_FOLDS, shuffle=True, random_state=_SEED).split(x):
        spend()
        forest = RandomForestRegressor(_TREES, random_state=_SEED).fit(x[known], y[known])
        wrong += _squares(forest.predict(x[unseen]) - y[unseen]).sum()
        rows, truth = np.tile(x[unseen], (_SHUFFLES, 1)), np.tile(y[unseen], _SHUFFLES)
        for place in range(len(distinct)):
            spend()
            rows[:, place] = np.concatenate([random.permutation(x[unseen, place]) for _ in range(_SHUFFLES)])
            errors = _squares(forest.predict(rows) - truth)
            wrong_shuffled[place] += errors.reshape(_SHUFFLES, -1).sum(axis=1)
            rows[:, place] = np.tile(x[unseen, place], _SHUFFLES)
    total = _squares(y - y.mean()).sum()
    answer["score"] = float(1 - wrong / total)
    if answer["score"] < (_LEAST_SCORE_OF_MANY if len(there) >= _MANY_RUNS else _LEAST_SCORE):
        found = f"the forest predicts unseen runs with R² {answer['score']:.2f}"
        return answer | {"problem": f"Not enough evidence: {found}, which may be chance."}
    lost = (wrong_shuffled - wrong) / total
    answer["fields"] = [
        {"names": sorted(names, key=len), "mean": float(lost[place].mean()), "std": float(lost[place].std())}
        for place, names in sorted(enumerate(distinct.values()), key=lambda one: -lost[one[0]].mean())
    ]
    return answer


def _places(values: Sequence[Any]) -> list[int]:
    """Returns the place of each value among the different ones, in their order."""
    keys = [key_of(value) for value in values]
    places = {key: place for place, key in enumerate(sorted(set(keys)))}
    return [places[key] for key in keys]


def _distinct(columns: Mapping[str, Sequence[Any]]) -> dict[tuple[int, ...], list[str]]:
    """Returns the names of columns that distinguish runs, grouped if they order the runs alike.

    A text that differs in every run, such as a folder, is a name and not a setting.
    """
    found: dict[tuple[int, ...], list[str]] = {}
    for name, values in columns.items():
        spend()
        places = _places(values)
        count = len(set(places))
        is_name = count == len(places) and any(key_of(value)[0] in _OF_WORDS for value in values)
        if count > 1 and not is_name:
            found.setdefault(tuple(places), []).append(name)
    return found


def _squares(errors: "np.ndarray[Any, np.dtype[np.float64]]") -> "np.ndarray[Any, np.dtype[np.float64]]":
    return errors * errors
