"""`wandb.plot`: keeps the table of a chart.

```python
from destinations.compat import wandb

with wandb.init(project="shapes", name="plotted") as run:
    matrix = wandb.plot.confusion_matrix(y_true=[0, 1, 1], preds=[0, 1, 0], class_names=["cat", "dog"])
    run.log({"confusion": matrix})
```
"""

from collections import Counter
from typing import Any

from destinations.media import to_numpy

from .data_types import Table
from .elsewhere import missing, say_not_kept

__all__ = ["bar", "confusion_matrix", "histogram", "line", "scatter"]


def line(table: Table, *_: Any, **__: Any) -> Table:
    """Returns the table, and warns once that its chart is not kept."""
    say_not_kept("the chart of wandb.plot", " Its table is.")
    return table


bar = histogram = scatter = line


def confusion_matrix(
    probs: Any = None, y_true: Any = None, preds: Any = None, class_names: Any = None, **_: Any
) -> Table:
    """Returns a table of counts, a row for each pair of an actual and a predicted class.

    With `class_names`, classes are numbers from 0 on. `probs` are `(N, classes)`; the largest is the
    prediction.
    """
    truth = to_numpy(y_true).ravel().tolist()
    guess = (to_numpy(preds).ravel() if probs is None else to_numpy(probs).argmax(axis=1)).tolist()
    classes = sorted({*truth, *guess}) if class_names is None else range(len(class_names))
    names = [f"Class_{one + 1}" for one in range(len(classes))] if class_names is None else class_names
    counts = Counter(zip(truth, guess, strict=True))
    rows = [
        [names[i], names[j], counts[at, to]] for i, at in enumerate(classes) for j, to in enumerate(classes)
    ]
    return line(Table(["Actual", "Predicted", "nPredictions"], rows))


def __getattr__(name: str) -> Any:
    return missing(name, "wandb.plot")
