"""`make bench` finds and starts every program."""

import ast
import importlib
import inspect
import os

from tests.benchmarks.__main__ import FOLDER, _benchmarks


def test_every_program_starts_without_arguments():
    """`python -m tests.benchmarks` starts them so, except `drain`, which needs arguments."""
    found = _benchmarks()

    helpers = {path.stem for path in FOLDER.glob("[!_]*.py")} - set(found)
    assert helpers == {"drain", "report", "timing"}
    for main in found.values():
        inspect.signature(main).bind()


def test_they_need_no_pytest(torch_server):
    """The environment with the peers has no pytest."""
    program = "import sys; sys.modules['pytest'] = None; from tests.benchmarks.__main__ import _benchmarks; _benchmarks()"

    done = torch_server.run(program, env=dict(os.environ), cwd=FOLDER.parents[1])

    assert done.returncode == 0, done.stderr


def test_programs_in_strings_import_existing_names():
    """The type checker doesn't see programs that are passed to another interpreter."""
    missing, found = [], 0
    for path in FOLDER.glob("*.py"):
        for text in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(text, ast.Constant) and isinstance(text.value, str) and "import " in text.value:
                for module, name in _imports_of_ours(text.value):
                    found += 1
                    if not hasattr(importlib.import_module(module), name):
                        missing.append(f"{path.name}:{text.lineno}: {name} of {module}")

    assert missing == []
    assert found


def _imports_of_ours(text):
    """Yields module and name of each `from ... import ...` of our packages in a program; none for prose."""
    try:
        program = ast.parse(text)
    except SyntaxError:
        return
    for one in ast.walk(program):
        if isinstance(one, ast.ImportFrom) and one.module.partition(".")[0] in {
            "destinations",
            "events",
            "uploads",
        }:
            yield from ((one.module, name.name) for name in one.names)
