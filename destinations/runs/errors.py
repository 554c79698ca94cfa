"""The errors of reading runs.

```
RunsError
├── RootError            (OSError)      a root is missing, not a folder, or not readable
├── RunNotFoundError     (KeyError)     no run has this id, name or path
├── AmbiguousRunError    (LookupError)  several runs have it
├── MetricNotFoundError  (KeyError)     no run has this metric, hyperparameter or field
├── WriterNotFoundError  (KeyError)     a run has no writer of this name
├── FilterError          (ValueError)   a filter does not parse
├── CheckpointNotFoundError (LookupError) a run has no such checkpoint, or none that is whole
├── EditError            (OSError)      an edit could not be written into the folder of the run
├── BudgetError          (RuntimeError) an answer exceeds its budget, or nobody waits for it any more
└── DatasetError         (ValueError)   a compacted dataset cannot be read or written
```

`str(error)` is a whole sentence for the user, also of a `KeyError`.
"""

import difflib
from collections.abc import Iterable, Sequence

__all__ = [
    "AmbiguousRunError",
    "BudgetError",
    "CheckpointNotFoundError",
    "DatasetError",
    "EditError",
    "FilterError",
    "MetricNotFoundError",
    "RootError",
    "RunNotFoundError",
    "RunsError",
    "WriterNotFoundError",
    "near_names",
    "suggestion",
]


class RunsError(Exception):
    """Base class of the errors of this package."""

    # KeyError would show the text in quotes.
    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class BudgetError(RunsError, RuntimeError):
    """An answer exceeds its budget, or nobody waits for it any more; see `Budget`."""


class RootError(RunsError, OSError):
    """A root is missing, not a folder, or not readable."""


class RunNotFoundError(RunsError, KeyError):
    """No run has this id, name or path.

    Args:
        wanted: the id, name or path that was asked for.
        known: existing ids and names; the message suggests the closest.
    """

    def __init__(self, wanted: str, known: Iterable[str] = ()) -> None:
        self.wanted = wanted
        self.near = near_names(wanted, known)
        super().__init__(f"no run has the id, name or path {wanted!r}.{suggestion(self.near)}")


class CheckpointNotFoundError(RunsError, LookupError):
    """A run has no such checkpoint, or none that is whole."""


class AmbiguousRunError(RunsError, LookupError):
    """Several runs have this id, prefix of an id, or name.

    Args:
        wanted: the id, name or path that was asked for.
        candidates: texts that tell the runs apart, such as their paths.
    """

    def __init__(self, wanted: str, candidates: Iterable[str]) -> None:
        self.wanted = wanted
        self.candidates = tuple(candidates)
        shown = ", ".join(self.candidates[:5])
        more = f" and {len(self.candidates) - 5} more" if len(self.candidates) > 5 else ""  # noqa: PLR2004
        super().__init__(f"run {wanted!r} is ambiguous: {shown}{more}. Use its path.")


class MetricNotFoundError(RunsError, KeyError):
    """No run has this metric, hyperparameter or field.

    Args:
        wanted: the id, name or path that was asked for.
        known: existing names; the message suggests the closest.
        hint: a sentence that the message ends with.
    """

    def __init__(self, wanted: str, known: Iterable[str] = (), hint: str = "") -> None:
        self.wanted = wanted
        self.near = near_names(wanted, known)
        kind = "hyperparameter" if wanted.startswith("hparams.") else "metric"
        text = f"unknown {kind} {wanted!r}{suggestion(self.near, '; did you mean')}"
        super().__init__(f"{text}. {hint}" if hint else text)


class WriterNotFoundError(RunsError, KeyError):
    """A run has no writer of this name.

    Args:
        wanted: the name.
        known: existing names; the message suggests the closest.
    """

    def __init__(self, wanted: str, known: Iterable[str] = ()) -> None:
        self.wanted = wanted
        self.near = near_names(wanted, known)
        super().__init__(f"this run has no writer {wanted!r}.{suggestion(self.near)}")


class FilterError(RunsError, ValueError):
    """A filter does not parse; the message shows the position.

    Args:
        problem: the mistake, and what to write instead.
        text: the filter.
        position: of the problem in `text`, in characters from 0.
    """

    def __init__(self, problem: str, text: str, position: int) -> None:
        self.problem = problem
        self.text = text
        self.position = position
        shown = "".join(" " if char.isspace() else char for char in text)
        super().__init__(f"{problem}\n  {shown}\n  {' ' * position}^")


class EditError(RunsError, OSError):
    """An edit could not be written into the folder of the run."""


class DatasetError(RunsError, ValueError):
    """A compacted dataset cannot be read or written."""


def near_names(wanted: str, known: Iterable[str]) -> tuple[str, ...]:
    """Returns the three most similar names, the closest first: "val/accuracy" for "accuracy"."""
    names = list(known)
    _, _, last = wanted.rpartition(".")
    ending = [name for name in names if name.endswith((f"/{last}", f".{last}"))]
    close = difflib.get_close_matches(wanted, names)
    return tuple(dict.fromkeys((*ending, *close)))[:3]


def suggestion(near: Sequence[str], start: str = " Did you mean") -> str:
    """Returns a question with the names that the user may have meant; "" if there are none."""
    return f"{start} {' or '.join(repr(name) for name in near)}?" if near else ""
