"""Tests the rules of docs/architecture.md, that importing has no side effects, and that the page is true."""

import ast
import functools
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

import destinations
import events
import uploads
from tests.effort import LONGEST

ROOT = pathlib.Path(events.__file__).resolve().parent.parent
PACKAGES = {"events", "uploads", "destinations"}
# What each package may import from the others, through their front doors only. TYPE_CHECKING is no exception.
ALLOWED = {
    "events": {"uploads", "uploads.disk"},
    "uploads": set(),
    "destinations": {"events", "uploads", "uploads.disk"},
}
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")


def _modules(package):
    return sorted((ROOT / package).rglob("*.py"))


def _name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _place(path):
    return path.relative_to(ROOT).as_posix()


ALL_MODULES = [path for package in sorted(PACKAGES) for path in _modules(package)]


@functools.cache
def _tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def _imports(path):
    """Returns (level, module, imported names, node) of every import anywhere in a file."""
    found = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found += [(0, alias.name, (), node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or "", tuple(alias.name for alias in node.names), node))
    return found


def _is_type_checking(test):
    return ast.unparse(test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def _executed_at_import(body):
    """Yields the imports that run when a module is imported: none in functions, and none for type checkers."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and _is_type_checking(node.test):
            yield from _executed_at_import(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody", "handlers"):
                yield from _executed_at_import(getattr(node, field, None) or ())


def _roots_at_import(path):
    roots = set()
    for node in _executed_at_import(_tree(path).body):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        if isinstance(node, ast.Import) or node.level == 0:
            roots |= {name.split(".")[0] for name in names}
    return roots


def test_the_source_is_found():
    """The other tests would pass if they found no files."""
    assert {path.relative_to(ROOT).parts[0] for path in ALL_MODULES} == PACKAGES
    assert ROOT / "events" / "engine.py" in ALL_MODULES
    assert any(module == "events" for _, module, *_ in _imports(ROOT / "destinations" / "base.py"))


def test_packages_import_each_other_only_as_allowed_and_through_the_front_door():
    """Code says `from events import Event`, never `from events.event import Event`; for type checkers too."""
    wrong = []
    for path in ALL_MODULES:
        package = path.relative_to(ROOT).parts[0]
        for level, module, *_ in _imports(path):
            if level == 0 and module.split(".")[0] in PACKAGES - {package} and module not in ALLOWED[package]:
                wrong.append((_place(path), module))

    assert wrong == []


def test_imports_inside_a_package_are_relative_or_name_a_module_above_in_full():
    """A module imports its neighbours relatively, and modules above its folder by their full name."""
    wrong = []
    for path in ALL_MODULES:
        package, *folders = path.relative_to(ROOT).parts[:-1]
        for level, module, *_ in _imports(path):
            if level > 1 or not (folders or level or module.split(".")[0] != package):
                wrong.append((_place(path), level, module))

    assert wrong == []


def test_names_imported_through_a_front_door_are_in_its_all():
    """`__all__` lists every name that other packages import."""
    doors = {"events": events, "uploads": uploads, "destinations": destinations}

    wrong = [
        (_place(path), module, names)
        for path in ALL_MODULES
        for level, module, names, _ in _imports(path)
        if level == 0 and module in doors and not set(names) <= set(doors[module].__all__)
    ]

    assert wrong == []


def test_uploads_never_imports_torch():
    """Functions don't either, so the worker process stays small."""
    assert [
        _place(path)
        for path in _modules("uploads")
        if any(module.split(".")[0] == "torch" for _, module, *_ in _imports(path))
    ] == []


# The only modules of `events` that import torch at import time.
TORCH_ROOMS = ("events/trainer/", "events/logger/cuda.py")


def test_only_the_training_loop_and_the_cuda_copies_import_torch():
    """Everything else in `events` imports torch, and these modules, inside functions."""
    paths = [path for path in _modules("events") if not _place(path).startswith(TORCH_ROOMS)]

    assert [_place(path) for path in paths if "torch" in _roots_at_import(path)] == []
    assert [
        (_place(path), node.module)
        for path in paths
        for node in _executed_at_import(_tree(path).body)
        if isinstance(node, ast.ImportFrom) and {"trainer", "cuda"} & set((node.module or "").split("."))
    ] == []


def test_events_imports_uploads_only_inside_functions():
    """`import events` does not import `uploads`."""
    assert [_place(path) for path in _modules("events") if "uploads" in _roots_at_import(path)] == []


@pytest.mark.parametrize("room", ["adapters", "compat"])
def test_no_module_imports_adapters_or_compat(room):
    """They are for other people's trainers and loops; only adapters use compat."""
    assert [
        (_place(path), module, names)
        for path in ALL_MODULES
        if not {room, "adapters"} & {*path.relative_to(ROOT).parts}
        for level, module, names, _ in _imports(path)
        if (level or module.split(".")[0] in PACKAGES) and room in (*module.split("."), *names)
    ] == []


READERS = {"runs", "cli", "viewer"}


def _breaks_the_rule_of_readers(is_reader, level, module, names):
    if is_reader:
        return module.split(".")[0] == "torch"
    if level:
        return "runs" in module.split(".") or (level == 1 and not module and "runs" in names)
    return module.split(".")[:2] == ["destinations", "runs"] or (module == "destinations" and "runs" in names)


def test_writers_do_not_import_the_reader_and_the_reader_does_not_import_torch():
    """A writer works without the reader, and the reader starts fast."""
    wrong = []
    for path in _modules("destinations"):
        is_reader = bool(READERS & {part.removesuffix(".py") for part in path.relative_to(ROOT).parts})
        for level, module, names, _ in _imports(path):
            if _breaks_the_rule_of_readers(is_reader, level, module, names):
                wrong.append((_place(path), module, names))

    assert wrong == []


def test_public_names_exist_and_are_sorted():
    """Each name in an `__all__` exists, and the list is sorted."""
    for package in (events, uploads, destinations):
        assert list(package.__all__) == sorted(package.__all__)
        assert all(hasattr(package, name) for name in package.__all__)


def _modules_of_path(heading):
    """Returns the modules on one path of the page, in order, each once."""
    text = PAGE[PAGE.index(heading) :]
    text = text[: text.index("\n\n", text.index("\n\n") + 2)]
    return list(dict.fromkeys(re.findall(r"`((?:events|uploads|destinations)/[\w/]+)`", text)))


@pytest.mark.parametrize(
    ("heading", "most"),
    [
        ("**A row of metrics**", 8),
        ("**A row back**", 8),
        ("**A file**", 12),
        ("**A checkpoint**", 8),
        ("**An event**", 4),
    ],
)
def test_the_paths_of_the_page_are_short_and_name_modules(heading, most):
    """A row and a checkpoint pass at most eight modules, a file at most twelve; each module exists."""
    modules = _modules_of_path(heading)

    assert 2 <= len(modules) <= most
    assert [module for module in modules if not (ROOT / f"{module}.py").is_file()] == []


def test_each_room_of_the_page_exists():
    """The page names existing modules only, and every folder of the packages."""
    named = re.findall(r"^\| `((?:events|uploads|destinations)/.*?)` \|", PAGE, re.MULTILINE)
    places = []
    for cell in named:
        first, *others = cell.split(", ")
        places += [first, *(f"{first.rsplit('/', 1)[0]}/{other}" for other in others)]

    assert [
        place
        for place in places
        if not ((ROOT / place).is_dir() if place.endswith("/") else (ROOT / f"{place}.py").is_file())
    ] == []
    folders = {
        _place(path.parent)
        for package in PACKAGES
        for path in _modules(package)
        if len(path.relative_to(ROOT).parts) == 3
    }
    assert folders <= {place.rstrip("/") for place in places}


def test_the_files_to_begin_in_exist():
    """Each file that the page sends a reader to exists."""
    table = PAGE[PAGE.index("## Where to begin") :]
    files = re.findall(r"`([\w/]+\.py)`", table)

    assert len(files) >= 5
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_no_line_is_longer_than_110_characters():
    """The limit holds for docstrings and comments too."""
    assert [
        f"{_place(path)}:{number}"
        for path in ALL_MODULES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 110
    ] == []


def _graph():
    """Returns the modules that each module imports anywhere, for type checkers too."""
    modules = {_name(path): path for path in ALL_MODULES}
    graph = {}
    for name, path in modules.items():
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        graph[name] = set()
        for level, module, names, _ in _imports(path):
            base = ".".join(filter(None, (package, module))) if level else module
            for imported in names:
                submodule = f"{base}.{imported}"
                graph[name] |= {submodule if submodule in modules else base} & modules.keys()
        graph[name].discard(name)
    return graph


def test_there_are_no_import_cycles():
    """No module imports itself through others, not even for types."""
    remaining = _graph()

    while leaves := {name for name, imports in remaining.items() if not imports & remaining.keys()}:
        remaining = {name: imports for name, imports in remaining.items() if name not in leaves}

    assert remaining == {}


def test_the_longest_tests_exist():
    """Each file in the list of tests that start first exists."""
    assert [name for name in LONGEST if not (ROOT / name).is_file()] == []


# Seen from outside
# -----------------------------------------------------------------------------------------------


def _run_python(program, **options):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **options,
    )


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_importing_a_package_does_nothing(package):
    """It loads neither torch nor boto3, starts no thread, installs no handler, and prints nothing."""
    result = _run_python(f"""
        import atexit, logging, signal, sys, threading
        before = {{name: signal.getsignal(name) for name in signal.valid_signals()}}
        hooks = atexit._ncallbacks()
        import {package}
        assert not {{"torch", "boto3", "botocore"}} & set(sys.modules), "heavy modules"
        assert {package!r} != "events" or "uploads" not in sys.modules, "uploads is imported where it is used"
        assert threading.active_count() == 1, threading.enumerate()
        assert before == {{name: signal.getsignal(name) for name in signal.valid_signals()}}
        assert not logging.getLogger().handlers
        assert not any(logging.getLogger(name).handlers for name in ("events", "uploads", "destinations"))
        assert hooks == atexit._ncallbacks(), "exit hooks"
    """)

    assert (result.stdout, result.stderr, result.returncode) == ("", "", 0)


@pytest.mark.parametrize("name", ["events", "uploads"])
def test_a_foreign_package_with_our_name_is_reported(name, tmp_path):
    """If `events.py` or PyPI's `Events` comes first on the path, the error names the file and says what to do."""
    stranger = tmp_path / f"{name}.py"
    stranger.write_text("", encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}

    result = _run_python("import destinations", cwd=tmp_path, env=environment)

    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(
        f"ImportError: package '{name}' must be the one that comes with training-destinations, got {stranger}"
    )
    assert "Rename that file" in last
