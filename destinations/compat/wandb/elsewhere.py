"""Names that only W&B's servers and pages have: using one warns once, or raises `Error`."""

import logging
from typing import Any, Self

__all__ = ["NOTHING", "Error", "missing", "say_not_kept"]

_log = logging.getLogger("destinations")

_told: set[str] = set()

# Names of the module and of a run that return results programs need.
_NEEDED = (
    "Api agent api apis controller integration keras lightgbm restore sacred sweep use_artifact use_model "
    "wandb_agent wandb_torch xgboost"
)
# These only show, send or set something.
_NOT_KEPT = (
    "ArtifactTTL Bokeh BoundingBoxes2D EvalTable Graph ImageMask JoinedTable Molecule PartitionedTable "
    "Plotly Settings agents analytics attach box3d catboost custom_chart display ensure_configured env "
    "finish_artifact gym helper jupyter line_series link_artifact link_model login mark_preempting patched "
    "pin_config_keys plot_table plots pr_curve profiler proto require roc_curve sagemaker_auth settings "
    "setup sklearn teardown tensorboard tensorflow termerror termlog termsetup termwarn to_html trigger "
    "upsert_artifact visualize wandb_lib write_logs"
)


class Error(Exception):
    """A call needs a run, or a server of W&B."""


class _NotKept:
    """Returns itself for every call and attribute."""

    def __call__(self, *_: Any, **__: Any) -> Self:
        return self

    def __getattr__(self, name: str) -> Self:
        if name == "shape" or name.startswith("__"):
            raise AttributeError(name)
        return self


NOTHING = _NotKept()


def say_not_kept(what: str, hint: str = "") -> None:
    """Warns once that something is not kept."""
    if what not in _told:
        _told.add(what)
        _log.warning("wandb: %s is not kept in a run folder.%s Further calls are not reported.", what, hint)


def missing(name: str, owner: str = "wandb") -> Any:
    """Returns the stand-in for a name of W&B that is not supported.

    Raises:
        Error: a program needs its result.
        AttributeError: W&B has no such name either.
    """
    if name in _NEEDED.split():
        raise Error(
            f"{owner}.{name} needs W&B's server or package, and has no counterpart in a run folder. "
            'The page "Coming from another logger" lists what there is instead.'
        )
    if name not in _NOT_KEPT.split():
        raise AttributeError(f"destinations.compat.{owner} has no {name!r}.")
    say_not_kept(f"{owner}.{name}")
    return NOTHING
