"""Every public name has an example in its docstring, and the examples run."""

import ast
import contextlib
import importlib
import inspect
import io
import json
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIMIT_SECONDS = 240
_LIMIT_OF_ONE = 60
# Replaces `Trainer(...` in examples.
_TRAINER = 'Trainer(model, train_dataloader, max_duration="1ep", loss_fn=loss_fn, optimizers=optimizer'
_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
# A module of the reference, and the names that it shows, unless it shows all.
_ENTRY = re.compile(r"^::: ([\w.]+)(?:\n    options: .*members: \[(.*)\])?", re.MULTILINE)
_PRINTS = re.compile(r"^ *print\(.*\)  # (.+)$", re.MULTILINE)
# Examples that are compiled but not run, and why. The docs run most of these features.
NOT_RUN = {
    "destinations.Comet": "comet_ml takes seconds to import",
    "destinations.MLflow": "mlflow takes seconds to import",
    "destinations.Slack": "needs an account",
    "destinations.Trackio": "trackio takes seconds to import",
    "destinations.WandB": "wandb starts a process",
    "destinations.Webhook": "needs a server",
    "destinations.viewer.Viewer": "serves until Ctrl-C",
    "uploads.exit_on_sigterm": "changes the signals of the process",
}


def public_names():
    """Yields the name and object of each class and function of the reference, except errors."""
    seen = set()
    for page in sorted((ROOT / "docs/reference").glob("*.md")):
        for name, members in _ENTRY.findall(page.read_text(encoding="utf-8")):
            if name.startswith("destinations.adapters"):
                continue
            module = pkgutil.resolve_name(name)
            if inspect.isclass(module):  # a base whose methods are those of public names
                continue
            for public in re.findall(r"\w+", members) or module.__all__:
                found = getattr(module, public)
                is_code = inspect.isclass(found) or inspect.isroutine(found)
                is_error = inspect.isclass(found) and issubclass(found, BaseException)
                if is_code and not is_error and id(found) not in seen:
                    seen.add(id(found))
                    yield f"{name}.{public}", found


def examples_of(found):
    """Returns the examples in a docstring."""
    return _BLOCK.findall(inspect.getdoc(found) or "")


def test_every_public_name_has_an_example_that_runs(outcomes):
    """Its docstring shows how to use it, and a comment after a `print` shows the output."""
    assert [name for name, found in public_names() if not examples_of(found)] == []
    assert {name: failure for name, failure in outcomes.items() if failure} == {}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "destinations/adapters").glob("[!_]*.py")), ids=lambda path: path.stem
)
def test_a_public_name_of_an_adapter_has_an_example(path):
    """The module is parsed, not imported, since its package takes seconds; docs/adapters.md runs each."""
    code = ast.parse(path.read_text(encoding="utf-8"))
    page = (ROOT / "docs/reference/adapters.md").read_text(encoding="utf-8")
    if f"destinations.adapters.{path.stem}" not in page:
        pytest.skip("not in the reference")
    (names,) = [
        ast.literal_eval(node.value)
        for node in code.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    texts = {
        node.name: ast.get_docstring(node)
        for node in code.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in names
    }

    examples = {name: _BLOCK.findall(text or "") for name, text in texts.items()}

    assert [name for name, found in examples.items() if not found] == []
    for found in examples.values():
        for example in found:
            compile(example, path.name, "exec")


@pytest.fixture(scope="module")
def outcomes(torch_python, tmp_path_factory):
    """Runs all examples in one process; returns the traceback of each, or ""."""
    folder = tmp_path_factory.mktemp("examples")
    finished = subprocess.run(
        [torch_python, __file__],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def _namespace():
    """Returns the names that an example can use: the public ones, and those that docs/reference/index.md lists."""
    import argparse
    from datetime import UTC, datetime, timedelta

    import numpy as np
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from destinations.testing import RecordingDestination
    from events import Logger, Run, State, monitor

    namespace = {}
    for module in ("uploads", "destinations.runs", "destinations.run_directory", "destinations", "events"):
        namespace |= _public(module)
    model = torch.nn.Linear(4, 2)
    inputs = torch.rand(16, 4)
    loader = DataLoader(TensorDataset(inputs, inputs.argmax(1) % 2), batch_size=4)
    state = State(run_name="mine")
    return namespace | {
        "DataLoader": DataLoader,
        "Path": Path,
        "Run": Run,
        "UTC": UTC,
        "argparse": argparse,
        "datetime": datetime,
        "destination": RecordingDestination(),
        "eval_dataloader": loader,
        "logger": Logger(state),
        "loss_fn": torch.nn.functional.cross_entropy,
        "model": model,
        "monitor": monitor,
        "np": np,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "os": os,
        "pytest": pytest,
        "state": state,
        "sys": sys,
        "timedelta": timedelta,
        "torch": torch,
        "train_dataloader": loader,
    }


def _public(module):
    """Returns the public names of a module."""
    found = importlib.import_module(module)
    return {name: getattr(found, name) for name in found.__all__}


def _prepare():
    """Writes the files that examples read: a finished run, a checkpoint, and a text."""
    from destinations import RunDirectory
    from events import CheckpointSaver, CheckpointWriting, Run

    saver = CheckpointSaver("checkpoints", writing=CheckpointWriting(asynchronous=False))
    namespace = _namespace() | {"saver": saver}
    exec(_TRAINER + ", callbacks=[saver]).fit()", namespace)  # noqa: S102  # as the examples
    for name in ("body.pt", "head.pt"):
        shutil.copy("checkpoints/ep1-ba4.pt", name)
    Path("notes.txt").write_text("four steps\n")
    with Run(loggers=[RunDirectory("runs/digits")], run_name="digits") as run:
        run.log_hyperparameters({"lr": 0.1})
        for step in range(4):
            run.log_metrics({"loss": 1 / (step + 1)}, step=step)


def _main():
    def hangs(number, frame):
        raise TimeoutError(_LIMIT_OF_ONE)

    signal.signal(signal.SIGALRM, hangs)
    Path("prepared").mkdir()
    with contextlib.chdir("prepared"):
        _prepare()
    outcomes = {}
    names = dict(public_names())
    for number, (name, found) in enumerate(names.items()):
        folder = Path(f"{number}").absolute()
        shutil.copytree("prepared", folder)
        os.chdir(folder)
        outcomes[name] = ""
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                for example in examples_of(found):
                    code = compile(example.replace("Trainer(...", _TRAINER), name, "exec")
                    if name in NOT_RUN:
                        continue
                    printed.truncate(printed.seek(0))
                    namespace = _namespace() | _public(name.rpartition(".")[0])
                    signal.alarm(_LIMIT_OF_ONE)
                    exec(code, namespace)  # noqa: S102  # the examples are ours
                    signal.alarm(0)
                    want = _PRINTS.findall(example)
                    assert not want or printed.getvalue().splitlines() == want, printed.getvalue()
            except BaseException:  # noqa: BLE001  # whatever an example raises is shown
                outcomes[name] = traceback.format_exc()[-2000:]
        os.chdir("..")
    print(json.dumps(outcomes))


if __name__ == "__main__":
    _main()
