"""The errors of reading runs.

```
RunsError
├── RootError            (OSError)      a root is missing, is no folder, or cannot be read
├── RunNotFoundError     (KeyError)     no run has this id, name or path
├── AmbiguousRunError    (LookupError)  several runs have it
├── MetricNotFoundError  (KeyError)     no run has this metric, hyperparameter or field
├── FilterError          (ValueError)   a filter does not parse
├── EditError            (OSError)      an edit could not be written into the folder of the run
└── DatasetError         (ValueError)   a compacted dataset cannot be read or written
```

The text of each is a whole sentence for the user, `str(error)` of those that are a `KeyError` too.
"""

import difflib
from collections.abc import Iterable

__all__ = [
    "AmbiguousRunError",
    "DatasetError",
    "EditError",
    "FilterError",
    "MetricNotFoundError",
    "RootError",
    "RunNotFoundError",
    "RunsError",
    "near_names",
]


class RunsError(Exception):
    """The root of this package's errors."""

    # KeyError would show the text in quotes.
    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class RootError(RunsError, OSError):
    """A root is missing, is no folder, or cannot be read."""


class RunNotFoundError(RunsError, KeyError):
    """No run has this id, name or path.

    Args:
        wanted: what was asked for.
        known: ids and names that there are; the nearest are offered.
    """

    def __init__(self, wanted: str, known: Iterable[str] = ()) -> None:
        self.wanted = wanted
        self.near = near_names(wanted, known)
        super().__init__(
            f"run must be the id of a run, the beginning of one, a display name or a path, got {wanted!r}."
            f"{_offer(self.near)}"
        )


class AmbiguousRunError(RunsError, LookupError):
    """Several runs have this id, beginning of an id, or name.

    Args:
        wanted: what was asked for.
        candidates: what tells them apart, such as their paths.
    """

    def __init__(self, wanted: str, candidates: Iterable[str]) -> None:
        self.wanted = wanted
        self.candidates = tuple(candidates)
        shown = ", ".join(self.candidates[:5])
        more = f" and {len(self.candidates) - 5} more" if len(self.candidates) > 5 else ""  # noqa: PLR2004
        super().__init__(f"run must be one, got {wanted!r}, which may be {shown}{more}. Name its path.")


class MetricNotFoundError(RunsError, KeyError):
    """No run has this metric, hyperparameter or field.

    Args:
        wanted: what was asked for.
        known: names that there are; the nearest are offered.
    """

    def __init__(self, wanted: str, known: Iterable[str] = ()) -> None:
        self.wanted = wanted
        self.near = near_names(wanted, known)
        super().__init__(f"name must be one that a run has, got {wanted!r}.{_offer(self.near)}")


class FilterError(RunsError, ValueError):
    """A filter does not parse; the text shows where.

    Args:
        problem: *must … got … do …*.
        text: the filter.
        position: where in it, counted in characters from 0.
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


def near_names(wanted: str, known: Iterable[str], most: int = 3) -> tuple[str, ...]:
    """Returns the names most like the one that was asked for, the nearest first."""
    return tuple(difflib.get_close_matches(wanted, list(known), n=most, cutoff=0.6))


def _offer(near: tuple[str, ...]) -> str:
    return f" Did you mean {' or '.join(repr(name) for name in near)}?" if near else ""
