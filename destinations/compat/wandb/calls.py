"""`Run`: the methods of a run of W&B, over a `Run` of this project."""

import atexit
import glob as globs
import json
import logging
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import events
from destinations.run_directory import RunDirectory, read_rows
from destinations.text.formatting import flattened

from .data_types import Artifact, Image, Table, Value
from .elsewhere import NOTHING, Error, missing, say_not_kept
from .items import Items

__all__ = ["ACTIVE", "METHODS", "Run"]

_log = logging.getLogger("destinations")

METHODS = frozenset({"alert", "define_metric", "log", "log_artifact", "log_code", "log_model"}) | {
    "save",
    "unwatch",
    "watch",
}
_NUMBERS = frozenset({bool, int, float})
_GIVEN_AT_INIT = frozenset({"name", "notes", "tags"})

ACTIVE = SimpleNamespace(run=None)
"""The run of the module's functions."""


class Run:
    """A run, with the methods of `wandb.Run`; `init` makes it.

    ```python
    from destinations.compat import wandb

    with wandb.init(project="shapes", name="second", config={"lr": 0.1}) as run:
        run.log({"loss": 0.5})
        print(run.step, run.config.lr)  # 1 0.1
    ```

    **Steps** are W&B's: a call of `log` without `step` ends the step, unless `commit=False`. A call with a
    step goes on to that step, and ends it only with `commit=True`. A call with an earlier step is ignored,
    with a warning. Unlike in W&B, a resumed run whose first call repeats a step continues from it, with the
    new values. Unlike in W&B, a value is safe when the call returns, even if the step has not ended. So a
    metric that is logged twice at one step has two points, where W&B keeps the last.

    **Config and summary** are mappings with attribute access. The summary has the last value of each metric.
    A value that a program sets there becomes the metric "summary/NAME", so that the rows of NAME don't
    change.

    **End.** The run ends at `finish`, at the end of a `with` block, or with the program.

    **Threading.** Any thread may call `log`. **Ranks.** Rank 0 writes.

    It has the arguments of `init` (`name`, `id`, `project`, `entity`, `group`, `job_type`, `tags`, `notes`),
    and `dir`, the folder, `path`, `step`, `starting_step`, `start_time` and `resumed`; `url` is None. A name,
    tags or notes that are set later are not kept, with one warning.
    """

    def __init__(self, run: events.Run, folder: RunDirectory, about: Mapping[str, Any]) -> None:
        self.__dict__.update(about)
        self.url = self.project_url = self.sweep_url = self.sweep_id = None
        self.offline, self.disabled = True, False
        self.start_time = time.time()
        # Guards everything below.
        self._lock = threading.RLock()
        self._run: events.Run | None = run
        run.run_event(events.Event.INIT)
        self.dir, self.id = str(folder.run_dir or ""), folder.run_id or about["id"]
        self.sync_dir = self.dir
        self.path = "/".join(filter(None, (about["entity"], about["project"], self.id)))
        rows = read_rows(self.dir) if self.dir else ()
        # The last step of each metric of a resumed run, until this session logs.
        self._earlier: dict[str, int] = {}
        for row in rows:
            step = -1 if row.step is None else row.step
            for name in row.metrics:
                self._earlier[name] = max(self._earlier.get(name, -1), step)
        self.step = max(self._earlier.values(), default=-1) + 1
        self.starting_step, self.resumed = self.step, self.step > 0
        self.config, self.summary = Items(self._set_config), Items(self._set_summary)
        self.config_static = self.config
        # The metrics of this step; the step metric of metrics, by name or "NAME*", and its last value.
        self._names: set[str] = set()
        self._step_metrics: dict[str, str] = {}
        self._last: dict[str, Any] = {}
        self._saved: dict[Path, tuple[str, float]] = {}
        self._hooks: list[Any] = []
        self._late = 0
        self._versions: Counter[str] = Counter()
        self._uncaught_before = id(getattr(sys, "last_value", None))
        atexit.register(self._end_at_exit)

    # Records.

    def log(self, data: Any, step: int | None = None, commit: bool | None = None, sync: Any = None) -> None:
        """Logs numbers, and other values by their kind; nested names are joined with a ".".

        Strings become texts, arrays of several values histograms, figures and pictures images, and other
        values traces.
        """
        with self._lock:
            run = self._opened("log")
            try:
                at = self.step if step is None else int(step)
            except (TypeError, ValueError, OverflowError) as error:
                at = self.step
                run.logger.faults.refuse("step", events.RecordError(f"step must be a whole number: {error}."))
            if self._earlier and 0 <= at < self.step and isinstance(data, Mapping):
                # A program that continues from a checkpoint repeats the later steps.
                names = flattened(data, keeps_empty=False)
                if any(self._earlier.get(name, -1) >= at for name in names):
                    self.continue_from(at)
            self._earlier = {}
            if at < self.step:
                self._late += 1
                say_not_kept("data of an earlier step", f" Step {at} is before step {self.step}.")
                return
            if at > self.step:
                self._end_step(run, at)
            if not isinstance(data, Mapping):
                run.log_metrics(data, self.step)  # reports the error
                return
            is_plain = _NUMBERS.issuperset(map(type, data.values()))
            numbers = data if is_plain else self._put(run, flattened(data, keeps_empty=False))
            self._advance(run, numbers.get("epoch"))
            if numbers:
                run.log_metrics(numbers, self.step)
                self.summary._values.update(numbers)  # noqa: SLF001  # these are not set by the program
            if self._step_metrics:
                self._names.update(numbers)
                known = self._last.keys() & numbers.keys()
                self._last |= {name: numbers[name] for name in known if not isinstance(numbers[name], bool)}
            if commit or (commit is None and step is None):
                self._end_step(run, self.step + 1)

    def continue_from(self, step: int) -> None:
        """Continues a resumed run at a step; its records from that step on become a branch."""
        self._opened("resume_from").fit_start(batch=step)
        self.step, self._earlier = step, {}

    def _advance(self, run: events.Run, epoch: Any) -> None:
        """Moves the run to the step, and to an epoch that is logged."""
        at = run.state.timestamp
        if self.step > at.batch.value:
            run.state.timestamp = at = at.copy(batch=self.step)
        if isinstance(epoch, int | float) and at.epoch.value + 1 <= epoch < math.inf:
            run.state.timestamp = at.copy(epoch=int(epoch))

    def _put(self, run: events.Run, values: Mapping[str, Any]) -> dict[str, Any]:
        """Logs records, and returns the numbers that are left."""
        numbers = {}
        for name, value in values.items():
            try:
                if self._is_number(run, name, value):
                    numbers[name] = value
            except Exception as error:  # noqa: BLE001  # one bad value must not affect the others
                text = f"{name!r} cannot be logged: {type(error).__name__}: {events.safe_text(error)}"
                run.logger.faults.refuse(name, events.RecordError(text))
        return numbers

    def _is_number(self, run: events.Run, name: str, value: Any) -> bool:
        """Logs a value that is a record; returns whether it remains to be logged."""
        if value is None or value is NOTHING:
            return False
        shape = getattr(value, "shape", None)
        if isinstance(value, str):
            run.log_text(value, name=name, step=self.step)
        elif records := _records_of(value):
            for kind in {type(one): None for one in records}:
                kind.put_all([one for one in records if type(one) is kind], run, name, self.step)
        elif shape is not None and not set(shape) <= {1}:
            run.log_histogram(value, name=name, step=self.step)
        elif isinstance(value, list | tuple | set):
            run.log_traces({name: value})
        else:
            return True
        return False

    def _end_step(self, run: events.Run, following: int) -> None:
        """Adds the step metrics that the step lacks, and goes on."""
        if self._names:
            wanted = {self._step_metric_of(name) for name in self._names} - self._names
            if lacking := {name: self._last[name] for name in wanted if name is not None}:
                run.log_metrics(lacking, self.step)
            self._names.clear()
        self.step = following

    def _step_metric_of(self, name: str) -> str | None:
        of_name = (
            one for one in self._step_metrics if one == name or (one[-1] == "*" and name.startswith(one[:-1]))
        )
        return self._step_metrics.get(next(of_name, ""))

    def define_metric(
        self, name: str, step_metric: Any = None, step_sync: bool | None = None, **more: Any
    ) -> SimpleNamespace:
        """Adds the last value of `step_metric` to each step that has this metric, or metrics "NAME*".

        The page shows the last, min and max of each metric, and any metric as the x axis.
        """
        step_metric = getattr(step_metric, "name", step_metric)
        if step_metric and step_sync is not False:
            self._step_metrics[name] = step_metric
            self._last.setdefault(step_metric, 0)
        return SimpleNamespace(name=name, step_metric=step_metric, step_sync=step_sync, **more)

    def _set_config(self, values: dict[str, Any]) -> None:
        if values:
            self._opened("config").log_hyperparameters(values)

    def _set_summary(self, values: dict[str, Any]) -> None:
        with self._lock:
            run = self._opened("summary")
            if numbers := self._put(
                run,
                {f"summary/{name}": value for name, value in flattened(values, keeps_empty=False).items()},
            ):
                run.log_metrics(numbers, self.step)

    def alert(self, title: str, text: str = "", level: Any = None, wait_duration: Any = None) -> None:
        """Logs a message, at a `wandb.AlertLevel` or as a warning, and a text of the run."""
        number = logging.getLevelNamesMapping().get(str(level).upper(), logging.WARNING)
        _log.log(number, "%s: %s", title, text)
        self._opened("alert").log_text(f"{title}: {text}", name="alert", step=self.step)

    # Files.

    def save(
        self, glob_str: Any = None, base_path: Any = None, policy: str = "live", glob: bool = True
    ) -> list[str]:
        """Copies files into the run; unless `policy` is "now", again at its end if they have changed.

        Without files, as older programs call it once they have set a name, it does nothing.
        """
        if glob_str is None:
            return []
        run, given = self._opened("save"), Path(os.fsdecode(glob_str))
        base = base_path or (given.parent.parent if given.is_absolute() else ".")
        is_pattern = glob and not given.exists()
        found = globs.glob(str(given)) if is_pattern else [str(given)]  # noqa: PTH207  # it may be absolute
        kept = []
        for path in (Path(one).absolute() for one in sorted(found)):
            if path.is_file():
                name = os.path.relpath(path, base)
                if policy != "end":
                    run.upload_file(events.LiteralName(name), path, overwrite=True)
                if policy != "now":
                    self._saved[path] = (name, 0 if policy == "end" else path.stat().st_mtime_ns)
                kept.append(str(Path(self.dir, "artifacts", name)))
        return kept

    def log_artifact(
        self, artifact_or_path: Any, name: str | None = None, type: str = "", aliases: Any = None, **_: Any
    ) -> Artifact:
        """Copies the files of an artifact, a folder or a file to `artifacts/NAME/vN/` of the run."""
        run, artifact = self._opened("log_artifact"), artifact_or_path
        if not isinstance(artifact, Artifact):
            path = Path(artifact_or_path)
            artifact = Artifact(name or f"run-{self.id}-{path.name}", type)
            (artifact.add_dir if path.is_dir() else artifact.add_file)(path)
        artifact.aliases = [aliases] if isinstance(aliases, str) else list(aliases or ["latest"])
        there = len(list(Path(self.dir, "artifacts", artifact.name).glob("v*")))
        number = max(there, self._versions[artifact.name])
        artifact.version, self._versions[artifact.name] = f"v{number}", number + 1
        folder = f"{artifact.name}/{artifact.version}"
        for file, path in artifact.files.items():
            run.upload_file(events.LiteralName(f"{folder}/{file}"), path)
        self._put(run, {f"{folder}/{key}": value for key, value in artifact.values.items()})
        about = {
            key: getattr(artifact, key)
            for key in ("type", "description", "metadata", "aliases", "references")
        }
        run.log_text(json.dumps(about, default=str, indent=1), name=folder, step=self.step)
        return artifact

    def log_model(self, path: Any, name: str | None = None, aliases: Any = None) -> None:
        """Copies a model, a file or a folder, as an artifact."""
        self.log_artifact(path, name, "model", aliases)

    def log_code(self, root: Any = ".", **_: Any) -> None:
        """Adds an archive of the code below a folder."""
        run = self._opened("log_code")
        events.CodeSnapshot(root).init(run.state, run.logger)

    # Models.

    def watch(
        self,
        models: Any,
        criterion: Any = None,
        log: str | None = "gradients",
        log_freq: int = 1000,
        **_: Any,
    ) -> None:
        """Logs histograms of gradients and parameters, with each `log_freq`-th gradient of a parameter."""
        for index, model in enumerate(models if isinstance(models, list | tuple) else [models]):
            for name, parameter in model.named_parameters():
                if log is not None and parameter.requires_grad:
                    hook = self._watcher(parameter, f"graph_{index}{name}" if index else name, log, log_freq)
                    self._hooks.append(parameter.register_hook(hook))

    def _watcher(self, parameter: Any, name: str, log: str, log_freq: int) -> Callable[[Any], None]:
        count = 0

        def watch(gradient: Any) -> None:
            nonlocal count
            count += 1
            if count % log_freq:
                return
            with self._lock:
                if self._run is None:
                    return
                if log != "parameters":
                    self._run.log_histogram(gradient, name=f"gradients/{name}", step=self.step)
                if log != "gradients":
                    self._run.log_histogram(parameter, name=f"parameters/{name}", step=self.step)

        return watch

    def unwatch(self, models: Any = None) -> None:
        """Ends `watch`, of all models."""
        while self._hooks:
            self._hooks.pop().remove()

    # The end.

    def finish(self, exit_code: int | None = None, quiet: bool | None = None) -> None:
        """Ends the run, as failed if the code is not 0; a second call does nothing."""
        self._end(None, events.RunStatus.FAILED if exit_code else None)

    def _end_at_exit(self) -> None:
        uncaught = getattr(sys, "last_value", None)
        self._end(None if id(uncaught) == self._uncaught_before else uncaught)

    def _end(self, exception: BaseException | None, status: events.RunStatus | None = None) -> None:
        with self._lock:
            run, self._run = self._run, None
            if run is None:
                return
            atexit.unregister(self._end_at_exit)
            if ACTIVE.run is self:
                ACTIVE.run = None
            self.unwatch()
            self._end_step(run, self.step)
            if self._late:
                _log.warning("wandb: %d calls of log had earlier steps, and were ignored.", self._late)
            for path, (name, before) in self._saved.items():
                if path.is_file() and path.stat().st_mtime_ns != before:
                    run.upload_file(events.LiteralName(name), path, overwrite=True)
            if status is not None:
                run.state.status = status
            run.close(exception)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, exception: BaseException | None, traceback: object) -> None:
        self._end(exception)

    def _opened(self, action: str) -> events.Run:
        if self._run is None:
            raise Error(f"run {self.dir!r} is finished: {action} needs another wandb.init().")
        return self._run

    def status(self) -> None:
        """Returns None: nothing is sent anywhere."""

    get_url = get_project_url = get_sweep_url = status

    def project_name(self) -> str:
        """Returns the name of the project."""
        return str(self.__dict__["project"])

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _GIVEN_AT_INIT:
            say_not_kept(f"run.{name} that is set after init", f" Give it as wandb.init({name}=...).")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        return missing(name, "wandb.run")


def _records_of(value: Any) -> list[Value]:
    """Returns the records in a value; empty if it has none."""
    records = []
    for one in value if isinstance(value, list | tuple) else [value]:
        picture = events.as_picture(one)
        is_table = hasattr(one, "columns") and not isinstance(one, Value)
        records.append(
            Table(dataframe=one) if is_table else Image(picture) if hasattr(picture, "getbands") else one
        )
    return records if records and all(isinstance(one, Value) for one in records) else []
