"""`python -m tests.mutants`: changes one operator, number, condition or statement at a time, and runs the tests.

A change that no test notices is printed: an assertion is missing, or the change makes no difference. Nothing on
disk is changed. Each mutant runs in a fork of one process that has imported torch and the like, and runs only the
tests that reach the changed statement, fastest first, until one fails.

    python -m tests.mutants                                  # all modules of `TESTS`
    python -m tests.mutants journal.py --sample 100 --seed 1 # 100 at random of one module
    python -m tests.mutants journal.py:210-260               # all mutants of some lines
"""

import argparse
import ast
import contextlib
import difflib
import importlib.machinery
import importlib.util
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[1]

_RUN_DIRECTORY = "tests/test_destinations/run_directory"
_LOGGER = "tests/test_events/logger"
_FRAMES = [f"{_RUN_DIRECTORY}/test_frames.py", f"{_RUN_DIRECTORY}/test_row_blocks.py"]
_JOURNAL = [
    *(f"{_RUN_DIRECTORY}/test_{name}.py" for name in ("segment_chain", "metrics", "resume", "faults")),
    "tests/test_destinations/run_directory/test_journal_handover.py",
    "tests/test_destinations/run_directory/test_unwritable_metrics.py",
]
_SPOOL = [
    "tests/test_uploads/spool",
    "tests/test_uploads/spool/test_another_users_spool.py",
    "tests/test_uploads/spool/test_damaged_spool.py",
    "tests/test_uploads/spool/test_hostile_spool.py",
    "tests/test_uploads/spool/test_left_behind.py",
    "tests/test_uploads/test_upload_reports.py",
    "tests/test_uploads/test_commands.py",
]
_RETENTION = [
    f"tests/test_events/trainer/test_{name}.py" for name in ("retention", "remote_folder", "sharded")
]
_CHECKPOINTS = [
    *_RETENTION,
    *(f"tests/test_events/trainer/test_{name}.py" for name in ("checkpoint", "asynchronous", "weights")),
    # Many saves, which test memory only.
    "--deselect=tests/test_events/trainer/test_asynchronous.py::TestMemory::test_it_is_the_same_after_many_saves",
]
_STORES = ["tests/test_uploads/stores", "tests/test_uploads/stores/test_store_answers.py"]
_DELIVERY = [
    _LOGGER,
    "tests/hostile/test_broken_destination.py",
    "tests/test_destinations/test_captions.py",
]
_DRAIN = [
    *(f"{_RUN_DIRECTORY}/test_{name}.py" for name in ("metrics", "resume", "faults", "snapshot")),
    f"{_RUN_DIRECTORY}/test_segment_chain.py",
    *(
        f"{_RUN_DIRECTORY}/test_{name}.py"
        for name in ("journal_handover", "left_in_a_run_folder", "taken_folder", "unwritable_metrics")
    ),
]
TESTS = {
    "destinations/run_directory/drain.py": _DRAIN,
    "destinations/run_directory/frames.py": _FRAMES,
    "destinations/run_directory/journal.py": _JOURNAL,
    "destinations/run_directory/metrics_csv.py": _DRAIN,
    "destinations/run_directory/rank_writer.py": [*_DRAIN, f"{_RUN_DIRECTORY}/test_documents.py"],
    "destinations/run_directory/segments.py": [*_JOURNAL, f"{_RUN_DIRECTORY}/test_snapshot.py"],
    "events/logger/delivery.py": _DELIVERY,
    "events/logger/pacing.py": _DELIVERY,
    "events/logger/values.py": [
        *(f"{_LOGGER}/test_{name}.py" for name in ("host_values", "binned_values", "bad_values", "config")),
        *(f"{_LOGGER}/test_{name}.py" for name in ("device_copies", "lazy_values")),
        "tests/hostile/test_values_that_cannot_be_read.py",
    ],
    "events/timestamp.py": ["tests/test_events/test_timestamp.py"],
    "events/trainer/checkpoint/files.py": _CHECKPOINTS,
    "events/trainer/checkpoint/folder.py": _CHECKPOINTS,
    "events/trainer/checkpoint/publisher.py": _RETENTION,
    "events/trainer/checkpoint/retention.py": _RETENTION,
    "events/trainer/checkpoint/saver.py": _CHECKPOINTS,
    "events/trainer/checkpoint/writing.py": _CHECKPOINTS,
    "uploads/download.py": [
        "tests/test_uploads/test_download.py",
        "tests/test_uploads/stores/test_store_secrets.py::test_a_pointer_cannot_lead_to_a_name_that_submit_refuses",
    ],
    "uploads/drain/retry.py": ["tests/test_uploads/drain/test_retry.py"],
    "uploads/drain/schedule.py": [
        "tests/test_uploads/drain/test_schedule.py",
        "tests/test_uploads/test_reading.py",
    ],
    "uploads/spool/entry.py": _SPOOL,
    "uploads/spool/flush.py": [*_SPOOL, "tests/test_uploads/test_upload_queue.py"],
    "uploads/spool/ownership.py": _SPOOL,
    "uploads/spool/spool.py": [
        *_SPOOL,
        "tests/test_uploads/test_limits.py::test_a_spool_on_a_network_file_system_is_warned_of",
    ],
    "uploads/spool/staging.py": [
        *_SPOOL,
        "tests/test_uploads/spool/test_failing_disk.py",
        "tests/test_uploads/spool/test_moving_sources.py",
        "tests/test_uploads/test_upload_queue.py",
    ],
    "uploads/stores/create_only.py": _STORES,
    "uploads/stores/local.py": _STORES,
    "uploads/stores/s3/parts.py": _STORES,
    "uploads/stores/s3/requests.py": _STORES,
    "uploads/stores/s3/store.py": _STORES,
}
"""The modules, and the tests that are about each; programs that tests start do not see a mutant."""

# Packages of others that the tests import.
_IMPORTED_BEFORE = (
    "boto3",
    "botocore.session",
    "hypothesis",
    "moto.server",
    "numpy",
    "pandas",
    "PIL.Image",
    "torch",
)
# Each replaces an operator by all others; the nearest one is as informative.
_REPLACEMENTS = {
    *("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv", "Pow_Mul", "RShift_LShift"),
    *(
        "LShift_RShift",
        "BitOr_BitAnd",
        "BitAnd_BitOr",
        "BitXor_BitAnd",
        "Eq_NotEq",
        "NotEq_Eq",
        "Lt_LtE",
        "LtE_Lt",
    ),
    *("Gt_GtE", "GtE_Gt", "Is_IsNot", "IsNot_Is", "UAdd_USub", "USub_UAdd", "Delete_Invert", "Delete_Not"),
}
_LEFT_OUT = {"VariableReplacer", "VariableInserter"}
_TIMEOUT_SECONDS = 30
_TIMES_AS_LONG = 8


@attrs.frozen
class Mutant:
    """A module with one change.

    Attributes:
        path: the module, relative to the root.
        line: the changed line.
        operator: the kind of change.
        code: the code of the whole module.
    """

    path: str
    line: int
    operator: str
    code: str

    def difference(self) -> str:
        """Returns the changed lines."""
        before = (ROOT / self.path).read_text(encoding="utf-8").splitlines()
        lines = list(difflib.unified_diff(before, self.code.splitlines(), lineterm="", n=0))[3:]
        return "\n".join(f"    {line}" for line in lines)


@attrs.frozen
class Reach:
    """The tests that reach each line, and their durations.

    Attributes:
        seconds: by test.
        tests: by line; lines that are run on import are not there.
        places: for each line, the lines whose tests can notice a change of it; see `_places`.
    """

    seconds: dict[str, float]
    tests: dict[int, list[str]]
    places: dict[int, set[int]]

    def of(self, line: int) -> list[str]:
        """Returns the tests to run for a line, fastest first; all tests if it runs on import."""
        found = {test for one in self.places.get(line, {line}) for test in self.tests.get(one, ())}
        return sorted(self.seconds if "" in found else found, key=self.seconds.__getitem__)


def mutants_of(
    path: str, places: list[str], sample: int | None, chance: random.Random
) -> tuple[list[Mutant], int]:
    """Returns mutants of a module, and the number of places for one.

    Changes of annotations, and changes without effect, are left out.

    Args:
        path: of the module, from the root.
        places: the lines to change; see `_is_at`.
        sample: how many to return at most.
        chance: draws them.
    """
    import parso
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.operators.operator import Operator
    from cosmic_ray.operators.provider import OperatorProvider

    class RemoveStatement(Operator):
        """Replaces a call, an assignment to an attribute or item, a `del` or a `raise` by `pass`."""

        def mutation_positions(self, node):
            if node.type == "simple_stmt" and _has_effect(node.children[0]):
                yield node.start_pos, node.end_pos

        def mutate(self, node, index):
            prefix = node.get_first_leaf().prefix
            node.children[0] = parso.python.tree.Keyword("pass", node.start_pos, prefix)
            return node

        @classmethod
        def examples(cls):
            return ()

    provider = OperatorProvider()
    operators = [
        provider[name]()
        for name in provider
        if name not in _LEFT_OUT
        and (not name.startswith("Replace") or name.partition("Operator_")[2] in {*_REPLACEMENTS, ""})
    ]
    code = (ROOT / path).read_text(encoding="utf-8")
    tree, meaning, lines = get_ast(code), _meaning(code), code.splitlines()
    positions = [
        (line, operator, occurrence)
        for operator in (*operators, RemoveStatement())
        for occurrence, (line, column) in enumerate(
            start for node in ast_nodes(tree) for start, _ in operator.mutation_positions(node)
        )
        # The star that ends positional arguments isn't an operator.
        if not lines[line - 1].startswith("*,", column) and any(_is_at(line, place) for place in places)
    ]
    if sample is not None:
        chance.shuffle(positions)
    found = []
    for line, operator, occurrence in positions:
        with contextlib.suppress(AttributeError):  # The operators do not know `except errors.SomeError`.
            mutated = mutate_code(code, operator, occurrence)
            if _meaning(mutated) not in {None, meaning}:
                found.append(Mutant(path, line, type(operator).__name__, mutated))
        if len(found) == sample:
            break
    return found, len(positions)


def _has_effect(statement) -> bool:
    if statement.type in {"del_stmt", "raise_stmt"}:
        return True
    if statement.type == "expr_stmt":
        target, sign = statement.children[:2]
        return sign.type != "annassign" and (target.type == "atom_expr" or sign.get_code().strip() != "=")
    return statement.type == "atom_expr" and statement.children[-1].get_code().startswith("(")


def _meaning(code: str) -> str | None:
    """Returns the syntax tree without annotations as text; None if the code has no meaning."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                setattr(node, name, ast.Constant(value=None))
    return ast.dump(tree)


def _places(code: str) -> dict[int, set[int]]:
    """Returns for each line the lines that must run for it to matter.

    These are the lines of its statement, or of the head of its block; for the head of a function, its body; for a
    constant of the module, its uses.
    """
    tree = ast.parse(code)
    sizes, found, uses = {}, {}, {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            uses.setdefault(node.id, set()).add(node.lineno)
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt):
            continue
        body = getattr(node, "body", None)
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
        lines = range(first, body[0].lineno if body else node.end_lineno + 1)
        places = set(lines)
        if isinstance(node, ast.FunctionDef):
            places = set(range(body[0].lineno, node.end_lineno + 1))
        elif node in tree.body and isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
            # Other modules may use a public constant.
            if all(name.startswith("_") for name in names):
                places = {line for name in names for line in uses.get(name, ())} or places
        for line in lines:
            if len(lines) < sizes.get(line, 1 << 30):
                sizes[line], found[line] = len(lines), places
    return found | _cached(tree)


def _cached(tree: ast.Module) -> dict[int, set[int]]:
    """Returns a line that runs on import for each line of a cached function, which runs for the first test only."""
    return {
        line: {node.decorator_list[0].lineno}
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any("cache" in ast.unparse(one) for one in node.decorator_list)
        for line in range(node.lineno, node.end_lineno + 1)
    }


# The children.


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from given code instead of its file."""

    def __init__(self, name: str, path: str, code: str) -> None:
        super().__init__(name, path)
        self._mutated = code

    def get_code(self, fullname):
        return compile(self._mutated, self.path, "exec", dont_inherit=True)


class _Finder:
    """Finds one module, before others find it."""

    def __init__(self, path: str, code: str) -> None:
        self._name = path.removesuffix(".py").replace("/", ".")
        self._path, self._code = str(ROOT / path), code

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        return importlib.util.spec_from_file_location(
            name, self._path, loader=_Loader(name, self._path, self._code)
        )


def _fork(work, folder: Path) -> int:
    """Returns the id of a child, the leader of its own group, that ends with what `work` returns."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = 70
    try:
        os.setpgid(0, 0)
        folder.mkdir()
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        code = int(work())
        sys.stdout.flush()
    finally:
        os._exit(code)


def _pytest(tests, folder: Path, *plugins) -> int:
    import pytest

    options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", f"--basetemp={folder / 'tests'}"]
    return pytest.main([*options, *tests], plugins=[*plugins])


def _end(pid: int, folder: Path) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # What the tests have started.
    shutil.rmtree(folder, ignore_errors=True)


def reach_of(path: str, work: Path) -> Reach:
    """Runs the tests of an unchanged module, and returns which lines they reach.

    Raises:
        SystemExit: the tests fail.
    """
    folder, answer = work / "unchanged", work / "reach.json"

    def watch() -> int:
        import coverage
        import pytest

        seconds, watcher = (
            {},
            coverage.Coverage(data_file=None, include=[str(ROOT / path)], config_file=False),
        )

        class Watch:
            @pytest.hookimpl(wrapper=True)
            def pytest_runtest_protocol(self, item):
                watcher.stop()
                watcher.start()  # A test that traces by itself has ended what was there.
                watcher.switch_context(item.nodeid)
                start = time.monotonic()
                result = yield
                seconds[item.nodeid] = time.monotonic() - start
                watcher.switch_context("")
                return result

        watcher.start()
        code = _pytest(TESTS[path], folder, Watch())
        watcher.stop()
        tests = watcher.get_data().contexts_by_lineno(str(ROOT / path))
        answer.write_text(json.dumps([seconds, tests]))
        return code

    pid = _fork(watch, folder)
    status = os.waitpid(pid, 0)[1]
    if status:
        sys.exit(f"the tests of {path} fail as it is:\n{(folder / 'output').read_text()[-3000:]}")
    _end(pid, folder)
    seconds, tests = json.loads(answer.read_text())
    code = (ROOT / path).read_text(encoding="utf-8")
    return Reach(seconds, {int(line): names for line, names in tests.items()}, _places(code))


def survivors_of(mutants: list[Mutant], reach: Reach, work: Path, jobs: int) -> list[tuple[Mutant, str]]:
    """Runs the tests for each mutant; returns those that no test noticed, with the reason."""
    waiting, running, survivors = list(enumerate(mutants)), {}, []
    while waiting or running:
        while waiting and len(running) < jobs:
            number, mutant = waiting.pop(0)
            tests, folder = reach.of(mutant.line), work / f"mutant-{number}"
            if not tests:
                survivors.append((mutant, "no test reaches it"))
                continue
            finder = _Finder(mutant.path, mutant.code)
            pid = _fork(
                lambda finder=finder, tests=tests, folder=folder: _mutated(finder, tests, folder), folder
            )
            allowed = _TIMEOUT_SECONDS + _TIMES_AS_LONG * max(map(reach.seconds.get, tests))
            running[pid] = mutant, folder, allowed
        for pid, (mutant, folder, allowed) in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended and _silent_seconds(folder) < allowed:
                continue
            if ended and status == 0:
                survivors.append((mutant, "survived"))
                print(f"{mutant.path}:{mutant.line} {mutant.operator}\n{mutant.difference()}", flush=True)
            del running[pid]
            _end(pid, folder)
            if not ended:
                os.waitpid(pid, 0)
        time.sleep(0.02)
    return survivors


def _silent_seconds(folder: Path) -> float:
    """Returns for how many seconds a child has written nothing, not even the dot of a test."""
    try:
        return time.time() - (folder / "output").stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _mutated(finder: _Finder, tests: list[str], folder: Path) -> int:
    sys.meta_path.insert(0, finder)
    return _pytest(tests, folder)


def main() -> int:
    """Makes and tests mutants; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "places", nargs="*", help="the end of a module's path, and lines of it: journal.py:210-260"
    )
    parser.add_argument("--sample", type=int, help="how many of each module, at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many at a time")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as work:
        _warm_up(work)
        for path in TESTS:
            chosen = [one for one in options.places or [path] if path.endswith(one.partition(":")[0])]
            if not chosen:
                continue
            mutants, total = mutants_of(path, chosen, options.sample, random.Random(options.seed))
            survivors = survivors_of(mutants, reach_of(path, Path(work)), Path(work), options.jobs)
            for mutant, reason in survivors:
                if reason != "survived":
                    print(f"{mutant.path}:{mutant.line} {mutant.operator}: {reason}\n{mutant.difference()}")
            rows.append((path, total, len(mutants), len(mutants) - len(survivors)))
            print("{}: {} places, {} mutants, {} noticed".format(*rows[-1]), flush=True)
    print(f"seed {options.seed}: {sum(row[3] for row in rows)} of {sum(row[2] for row in rows)} noticed")
    return 0


def _warm_up(folder: str) -> None:
    """Imports what every fork would import."""
    import pytest

    os.environ["OMP_NUM_THREADS"] = "1"  # Threads do not survive a fork.
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["--collect-only", folder])  # Plugins go first: pytest warns where one is there already.
    for name in _IMPORTED_BEFORE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _is_at(line: int, place: str) -> bool:
    lines = place.partition(":")[2]
    first, _, last = lines.partition("-")
    return not lines or int(first) <= line <= int(last or first)


if __name__ == "__main__":
    sys.exit(main())
