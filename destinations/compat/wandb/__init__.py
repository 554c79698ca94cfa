"""The calls of the package `wandb`, into run folders: `from destinations.compat import wandb`.

Nothing is patched, and nothing leaves the machine: `init` begins a run folder below `runs/`, and functions
such as `log` are the methods of its `Run`.

Features of W&B's pages or servers are not included. A call that would only show or send something does
nothing and warns once. If a program needs the call's result, as with `use_artifact`, it raises `Error`.
"""

import os
import re
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import events
from destinations.run_directory import RunDirectory
from uploads.disk import read_json

from . import data_types, plot
from .calls import ACTIVE, METHODS, Run
from .data_types import Artifact, Audio, Classes, Histogram, Html, Image, Object3D, Table, Video
from .elsewhere import Error, missing, say_not_kept
from .items import Items, as_dict

__all__ = [
    "Artifact",
    "Audio",
    "Classes",
    "Error",
    "Histogram",
    "Html",
    "Image",
    "Object3D",
    "Run",
    "Table",
    "Video",
    "data_types",
    "finish",
    "init",
    "plot",
]

__version__ = "0.31.0"
"""The version of W&B that the calls follow."""

Config, CommError, UsageError = Items, Error, Error
AlertLevel = SimpleNamespace(INFO="INFO", WARN="WARN", ERROR="ERROR")
util = SimpleNamespace(generate_id=lambda length=8: secrets.token_hex(length)[:length])
errors = SimpleNamespace(Error=Error, CommError=Error, UsageError=Error, AuthenticationError=Error)
# Programs name these as types.
sdk = wandb_sdk = SimpleNamespace(
    wandb_run=SimpleNamespace(Run=Run), wandb_config=SimpleNamespace(Config=Items), data_types=data_types
)

_SILENTLY_IGNORED = frozenset({"allow_val_change", "anonymous", "entity", "force", "mode", "settings"})


def init(
    project: str | None = None,
    name: str | None = None,
    config: Any = None,
    *,
    id: str | None = None,
    dir: Any = None,
    notes: str | None = None,
    tags: Sequence[str] | None = None,
    group: str | None = None,
    job_type: str | None = None,
    resume: bool | str | None = None,
    resume_from: str | None = None,
    reinit: bool | str | None = None,
    save_code: bool = False,
    config_exclude_keys: Sequence[str] = (),
    config_include_keys: Sequence[str] = (),
    **others: Any,
) -> Run:
    """Begins a run, in the folder `runs/PROJECT/NAME`.

    ```python
    from destinations.compat import wandb

    run = wandb.init(project="shapes", name="first", config={"lr": 0.1}, group="sweep")
    wandb.log({"loss": 0.5})
    wandb.finish()
    print(open_runs("runs")["first"].hyperparameters)  # {'lr': 0.1}
    ```

    If another run has that folder, this one gets "NAME-2". Missing arguments are read from `WANDB_PROJECT`,
    `WANDB_NAME`, `WANDB_DIR`, `WANDB_RUN_ID`, `WANDB_RUN_GROUP`, `WANDB_NOTES`, `WANDB_TAGS` and
    `WANDB_RESUME`.

    Args:
        project: a folder below `dir`; default: "uncategorized".
        name: the folder of the run; default: `id`, else a new name.
        config: hyperparameters: a mapping, a namespace, or the path of a YAML file.
        id: the id of the run; default: a new one.
        dir: default: `runs`.
        notes: a text.
        tags: the tags of the run; a group and a job type become the tags "group:NAME" and "job_type:NAME".
        group: see `tags`.
        job_type: see `tags`.
        resume: with an id, "allow", "must", "auto" and True continue its run, and "never" refuses to. Without
            an id, "auto" and True continue an incomplete run of that name.
        resume_from: "ID?_step=STEP" continues a run after that step; its later records become a branch.
        reinit: what to do with an open run: True or "finish_previous", the default in notebooks, ends it;
            "create_new" leaves it open next to the new one; otherwise it is returned.
        save_code: adds an archive of the code.
        config_exclude_keys: hyperparameters that are left out.
        config_include_keys: the only hyperparameters.
        others: `mode`, `entity`, `settings` and the like are ignored; any other is ignored with one warning.

    Raises:
        Error: `resume` is "must", or `resume_from` is given, and there is no run of that id; or `resume` is
            "never", and there is one.
        RunPathError: the folder is not writable.
    """
    if ACTIVE.run is not None and reinit != "create_new":
        if reinit not in {True, "finish_previous"} and not (reinit is None and "ipykernel" in sys.modules):
            return ACTIVE.run  # type: ignore[no-any-return]  # a Run
        ACTIVE.run.finish()
    for what in others.keys() - _SILENTLY_IGNORED:
        if others[what]:
            say_not_kept(f"wandb.init({what}=...)")

    def given(key: str, value: Any) -> Any:
        return os.environ.get(f"WANDB_{key}") if value is None else value

    project = given("PROJECT", project) or "uncategorized"
    root = Path(given("DIR", dir) or "runs", _as_folder(project))
    run_id, name, resume = given("RUN_ID", id), given("NAME", name), given("RESUME", resume)
    if resume_from is not None:
        run_id, _, last_step = resume_from.partition("?_step=")
        if not last_step.isdecimal():
            raise Error(f"resume_from must be 'ID?_step=STEP', got {resume_from!r}.")
        resume = "must"
    about = {"name": name, "id": run_id, "project": project, "entity": others.get("entity") or ""}
    about |= {"group": given("RUN_GROUP", group), "job_type": job_type, "notes": given("NOTES", notes)}
    given_tags = os.environ.get("WANDB_TAGS", "").split(",") if tags is None else tags
    about["tags"] = tuple(filter(None, given_tags))
    folder, if_exists = _folder_of(root, name, run_id, resume)
    directory = RunDirectory(
        folder,
        run_id=run_id,
        tags=[*about["tags"], *(f"{key}:{about[key]}" for key in ("group", "job_type") if about[key])],
        notes=about["notes"] or "",
        if_exists=if_exists,
    )
    about["name"] = name or folder.name
    callbacks = [events.CodeSnapshot()] if save_code else []
    run = Run(events.Run([directory], callbacks, run_name=folder.name), directory, about)
    if resume_from is not None:
        run.continue_from(int(last_step) + 1)
    items = {} if config is None else as_dict(config)
    wanted = set(config_include_keys or items) - set(config_exclude_keys or ())
    run.config.update({key: value for key, value in items.items() if key in wanted})
    ACTIVE.run = ACTIVE.run or run
    return run


def finish(exit_code: int | None = None, quiet: bool | None = None) -> None:
    """Ends the run, as failed if the code is not 0; without a run it does nothing."""
    if ACTIVE.run is not None:
        ACTIVE.run.finish(exit_code)


join = finish


def _folder_of(root: Path, name: str | None, run_id: str | None, resume: Any) -> tuple[Path, Any]:
    """Returns the folder of a run, and what to do if a run is in it."""
    sidecars = root.glob("*/sidecar.json") if run_id is not None else ()
    there = next((path.parent for path in sidecars if read_json(path).get("run_id") == run_id), None)
    if (resume == "must" and there is None) or (resume == "never" and there is not None):
        raise Error(
            f"resume={resume!r}, and there is {'no' if there is None else 'a'} run {run_id!r} in {root}."
        )
    if there is not None and resume:
        return there, "resume"
    new_name = name or run_id or events.agreed_run_name() or events.new_run_name()
    folder = root / _as_folder(new_name)
    is_completed = read_json(folder / "sidecar.json").get("status") == "completed"
    return folder, "resume" if resume in {True, "auto", "true"} and not is_completed else "new"


def _as_folder(name: str) -> str:
    """Returns a name as the name of a single folder, without placeholders."""
    return re.sub(r"[^\w.,=+@ -]", "-", name).strip(". ")[:120] or "unnamed"


def _needed_run(name: str) -> Run:
    if ACTIVE.run is None:
        raise Error(f"wandb.{name} needs a run: call wandb.init() first.")
    return ACTIVE.run  # type: ignore[no-any-return]  # a Run


def _method(name: str) -> Callable[..., Any]:
    """Returns a method of the run that is open when it is called."""

    def call(*arguments: Any, **named: Any) -> Any:
        return getattr(_needed_run(name), name)(*arguments, **named)

    return call


def __getattr__(name: str) -> Any:
    if name == "run":
        return ACTIVE.run
    if name in {"config", "summary"}:
        return getattr(_needed_run(name), name)
    return _method(name) if name in METHODS else missing(name)
