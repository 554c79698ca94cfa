"""`WandB`: logs a run to Weights & Biases, or offline to its files.

The package `wandb` is imported and called in the background thread only, so that it cannot block training.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from destinations.trackers.names import short_hash
from destinations.trackers.target import Target
from destinations.trackers.tracker import Sink, Tracker, require_package
from events import State, redact

from .sink import WandBSink

__all__ = ["WandB"]

_MODES = ("online", "offline", "disabled")


class _Project(Target):
    """A W&B project; the remote run id is derived from the local one."""

    places = ("PROJECT", "ENTITY/PROJECT")

    @property
    def remote_id(self) -> str:
        """Id of the run in the project: letters, digits and "-"."""
        run_id = self.run.run_id
        return re.sub(r"[^A-Za-z0-9-]", "-", run_id)[:40] + f"-{short_hash(run_id, 8)}"

    def make(self, tracker: type, shared: Mapping[str, Any]) -> Any:
        entity, _, project = self.place.rpartition("/")
        mode = os.environ.get("WANDB_MODE")
        given = {
            "entity": entity or None,
            "name": self.name,
            "tags": self.run.tags,
            "notes": self.run.notes or None,
            "mode": mode if mode in _MODES else "online",
            "run_id": self.remote_id,
            "resume": "allow",
            "init_kwargs": {"resume": None} if self.starts_over else None,
            "log_artifacts": True,
        }
        return tracker(project, **{**given, **shared, **self.options})

    def restart(self) -> None:
        """Does nothing: without `resume`, a run takes the place of the one that has its id."""


class WandB(Tracker):
    """Logs all records to Weights & Biases.

    ```python
    Trainer(..., loggers=[WandB("digits", mode="offline")])
    ```

    Supports metrics, hyperparameters (as the config), tables, images with masks and class labels, texts,
    audio, video, histograms, point clouds and traces; with `log_artifacts` also files passed to
    `upload_file`. See docs/trackers.md.

    **Steps.** W&B drops rows whose step is smaller than the last one. So W&B's own step only counts rows, and
    the logged step is the metric `step_metric`, the x axis of all charts: no row is lost, whatever the order.

    **Ranks.** Rank 0, or with `all_ranks` every rank as a run of its own, grouped by the name of the run.

    **Resume.** A run resumed from a checkpoint continues the run whose id is in the checkpoint, with
    `resume="allow"`.

    **Isolation.** `wandb.run` and the functions of the module are not used: the run of this class is its
    property `run`. Console output is not captured. W&B's own process, `wandb-core`, ends with the program.

    Threading, bounds, failures and close: see `Tracker`.

    Args:
        project: name of the project.
        entity: user or team; default: W&B's.
        name: name in W&B; placeholders as in `events.format_run_name`; default: the name of the run.
        group: group of the run.
        tags: tags of the run.
        notes: notes of the run.
        mode: "online", "offline" for files that `wandb sync` uploads later, or "disabled".
        run_id: id of the run, new or existing; default: a generated one.
        resume: "allow", "must", "never" or "auto", as in `wandb.init`; default: "allow" if there is an id.
        dir: parent of W&B's folder "wandb"; default: `WANDB_DIR`, or the working directory.
        log_artifacts: log files passed to `upload_file` as artifacts.
        step_metric: name of the metric that contains the step.
        init_kwargs: further arguments of `wandb.init`, which take precedence; `settings` may be a dict.
        options: arguments of `Tracker`.

    Raises:
        ImportError: the package wandb is not installed.
        ValueError: an argument is out of its range.
    """

    sink_class: ClassVar[type[Sink]] = WandBSink
    target = _Project

    def __init__(
        self,
        project: str,
        *,
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        notes: str | None = None,
        mode: Literal["online", "offline", "disabled"] = "online",
        run_id: str | None = None,
        resume: str | None = None,
        dir: str | Path | None = None,  # noqa: A002  # the name in wandb.init
        log_artifacts: bool = False,
        step_metric: str = "global_step",
        init_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        require_package("wandb", "wandb", "WandB")
        if mode not in _MODES:
            raise ValueError(f'mode must be "online", "offline" or "disabled", got {mode!r}.')
        if not step_metric or step_metric.startswith("_"):
            raise ValueError(f'step_metric must be a name that does not begin with "_", got {step_metric!r}.')
        self._project = project
        self._options = {
            "entity": entity,
            "group": group,
            "tags": redact(tuple(tags)),
            "notes": redact(notes),
            "mode": mode,
            "resume": resume,
        }
        self._name = name
        self._run_id = run_id
        self._dir = None if dir is None else str(dir)
        self._log_artifacts = log_artifacts
        self._step_metric = step_metric
        self._init_kwargs = dict(init_kwargs or {})
        super().__init__(**options)

    @property
    def run(self) -> Any:
        """The W&B run, for features without a method here; None until it is created, and after close."""
        return None if self._sink is None else self._sink.run

    def make_sink(self, state: State) -> WandBSink:
        # Resolved now: the run is created later, and W&B would use the working directory at its first use.
        folder = self._dir or os.environ.get("WANDB_DIR") or str(Path.cwd())
        arguments: dict[str, Any] = {"project": self._project, **self._options, "dir": folder}
        run_id = self._run_id
        if self._all_ranks and state.world_size > 1:
            arguments["group"] = arguments["group"] or state.run_name
            run_id = None if run_id is None else f"{run_id}-rank{state.rank}"
        arguments |= {"name": self._name_of(self._name, state), **self._init_kwargs}
        return WandBSink(arguments, self._step_metric, self._close_seconds, run_id)

    def post_close(self) -> None:
        sink = self._sink
        super().post_close()
        if sink is not None:
            sink.warn_if_unfinished()
