"""Sends a run to Weights & Biases, or into its files where there is no network.

The package `wandb` is imported in the thread of the lane, never in the one that trains. Everything that it does there, and
that can block, blocks only that.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from destinations.trackers.tracker import Sink, Tracker, require_package
from events import State, redact

from .sink import WandBPlan, WandBSink

__all__ = ["WandB"]

_END_SECONDS = 2.0


class WandB(Tracker):
    """Sends everything that is logged to Weights & Biases.

    ```python
    Trainer(..., loggers=[WandB("digits", mode="offline")])
    ```

    Metrics, hyperparameters (as the config), tables, images with masks and class labels, texts, sounds, videos, histograms,
    point clouds, traces; files that are given to `upload_file` with `log_artifacts`. docs/trackers.md says what becomes of
    each.

    **Steps.** W&B's own step only grows, and rows for an earlier one are dropped by it. So each row has a step of W&B's that
    counts rows, and the step that it was logged with as the metric `step_metric`, which all charts have as their x axis:
    nothing is lost whatever the order.

    **Ranks.** Rank 0, or with `all_ranks` each rank as a run of its own; these have the name of the run as their group.

    **Going on.** A run that goes on from a checkpoint has the id that the checkpoint holds, with `resume="allow"`.

    **What it leaves alone.** `wandb.run` and the functions of the module are yours: the run that this class makes is
    `run`, in no global place. What is printed is not captured. The service process of W&B is ended at close, where this run
    started it and no other run is in it.

    Threading, bounds, failures and close are those of `Tracker`: a W&B that hangs or fails costs training nothing.

    Args:
        project: the project.
        entity: the user or team; W&B's default where it is None.
        name: what the run is called; the name of the run where it is None. May hold `{rank}`.
        group: the group of the run.
        tags: tags.
        notes: a text.
        mode: "online", "offline" for files that `wandb sync` sends later, or "disabled".
        run_id: the id of the run, to go on with one; a new one where it is None.
        resume: "allow", "must", "never" or "auto", as `wandb.init` has it; "allow" where there is an id.
        dir: the folder in which W&B makes its folder "wandb"; `WANDB_DIR`, or the working directory, where it is None.
        log_artifacts: whether files given to `upload_file` become artifacts.
        step_metric: the name of the metric that holds the step.
        init_kwargs: more arguments for `wandb.init`, over those above; `settings` may be a dict.
        options: `flush_seconds`, `all_ranks`, `close_seconds`, `max_waiting_values`, `max_waiting_bytes`, `when_full`,
            `wait_seconds`, `clock` and `write_rate`, as in `Tracker`.

    Raises:
        ImportError: the package wandb is not installed.
        ValueError: an argument is out of its range.
    """

    sink_class: ClassVar[type[Sink]] = WandBSink

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
        dir: str | Path | None = None,  # noqa: A002  # wandb's own word
        log_artifacts: bool = False,
        step_metric: str = "global_step",
        init_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        require_package("wandb", "wandb", "WandB")
        if mode not in {"online", "offline", "disabled"}:
            raise ValueError(f'mode must be "online", "offline" or "disabled", got {mode!r}.')
        if not step_metric or step_metric.startswith("_"):
            raise ValueError(f'step_metric must be a name that does not begin with "_", got {step_metric!r}.')
        self._project = project
        self._plan = {
            "entity": entity,
            "group": group,
            "tags": redact(tuple(tags)),
            "notes": redact(notes),
            "mode": mode,
        }
        self._name = name
        self._run_id = run_id
        self._resume_mode = resume
        self._dir = None if dir is None else str(dir)
        self._log_artifacts = log_artifacts
        self._step_metric = step_metric
        self._init_kwargs = dict(init_kwargs or {})
        super().__init__(**options)

    def _forget(self) -> None:
        super()._forget()
        self._sink: WandBSink | None = None

    @property
    def run(self) -> Any:
        """The run of W&B, for what this class has no method for; None before it is made in the lane, and after close."""
        return None if self._sink is None else self._sink.run

    def make_sink(self, state: State) -> WandBSink:
        # Now, for the lane makes the run later; and W&B itself would take what was the directory when it was first used.
        folder = self._dir or os.environ.get("WANDB_DIR") or str(Path.cwd())
        arguments: dict[str, Any] = {"project": self._project, **self._plan, "dir": folder}
        name = state.run_name if self._name is None else self._name.replace("{rank}", str(state.rank))
        run_id = self._run_id
        if self._all_ranks and state.world_size > 1:
            arguments["group"] = arguments["group"] or state.run_name
            name = name if self._name and "{rank}" in self._name else f"{name}-rank{state.rank}"
            run_id = None if run_id is None else f"{run_id}-rank{state.rank}"
        arguments["name"] = name
        plan = WandBPlan(
            arguments, self._init_kwargs, self._resume_mode, self._step_metric, self._close_seconds
        )
        self._sink = WandBSink(plan, run_id)
        return self._sink

    def can_upload_files(self) -> bool:
        return self._log_artifacts

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Copies the file, which takes as long as `cp`; the lane makes a version of an artifact of it."""
        feed, sink = self._feed, self._sink
        if not self._log_artifacts or feed is None or sink is None:
            return
        copy = sink.stage(file_path)
        work = functools.partial(sink.log_file, remote_file_name, copy)
        if not feed.put(f"file {remote_file_name!r}", 0, work, is_kept=True):
            copy.unlink(missing_ok=True)

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        sink, run = self._sink, self._state
        if sink is not None and sink.run_id is not None and run is not None:
            # With its rank: a checkpoint that rank 0 wrote may be loaded by all.
            saved |= {"run_id": sink.run_id, "rank": run.rank}
        return saved

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        run_id, sink, run = state.get("run_id"), self._sink, self._state
        if sink is not None and run is not None and isinstance(run_id, str) and state.get("rank") == run.rank:
            sink.go_on_with(run_id)

    def post_close(self) -> None:
        sink, feed = self._sink, self._feed
        super().post_close()
        if sink is not None and sink.abandon() and feed is not None:
            # Its thread says what became of the run; one that is doing so while the interpreter ends takes it down: "could
            # not acquire lock for ... at interpreter shutdown, possibly due to daemon threads".
            feed.wait_for_end(_END_SECONDS)
