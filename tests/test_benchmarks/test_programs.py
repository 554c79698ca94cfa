"""`make bench` finds every program, and can start it."""

import inspect
import os

from tests.benchmarks.__main__ import FOLDER, _benchmarks


def test_every_program_can_be_started_without_arguments():
    """As `python -m tests.benchmarks` does.

    `drain` is a program of its own, for it takes what it is to measure.
    """
    found = _benchmarks()

    helpers = {path.stem for path in FOLDER.glob("[!_]*.py")} - set(found)
    assert helpers == {"drain", "report", "timing"}
    for main in found.values():
        inspect.signature(main).bind()


def test_they_need_no_pytest(torch_server):
    """Which an environment with the systems of others has not."""
    program = "import sys; sys.modules['pytest'] = None; from tests.benchmarks.__main__ import _benchmarks; _benchmarks()"

    done = torch_server.run(program, env=dict(os.environ), cwd=FOLDER.parents[1])

    assert done.returncode == 0, done.stderr
