"""A hook of MkDocs: writes the pages that are made from the code.

The command line comes from its parser, the benchmarks from their stored rounds, and the fault tests from the
docstrings of the tests that cause faults.
"""

import argparse
import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from destinations.cli import build_parser

_ROOT = Path(__file__).parents[1]
_COLUMNS = 88
# Files of tests outside tests/crash, tests/hostile and tests/model.
_FAULTS = re.compile(
    "another_users|bad_values|broken|claim|damage|download|exit|fail|fault|fence|foreign|full_spool|hostile"
    "|left_behind|lock|moving|power_loss|resume|secrets|taken|unequal|unreadable|unwritable|verify|wrong_store"
)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Adds to a page what is made from the code."""
    made = {
        "reference/command-line.md": command_line,
        "benchmarks.md": benchmarks,
        "fault-tests.md": fault_tests,
    }
    return markdown + made.get(page.file.src_uri, str)()


def command_line() -> str:
    """Returns a section of Markdown for each command, with its help as the terminal shows it."""
    return "".join(
        f"\n{'#' * min(len(parser.prog.split()) + 1, 3)} {parser.prog}\n\n```text\n{_help(parser)}```\n"
        for parser in _parsers(build_parser())
    )


def _help(parser: argparse.ArgumentParser) -> str:
    parser.formatter_class = lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=_COLUMNS)  # type: ignore[assignment]
    text = re.sub(r"\x1b\[[0-9;]*m", "", parser.format_help())
    # A terminal wraps descriptions, which are as they were written.
    return "".join(f"{textwrap.fill(line, _COLUMNS)}\n" for line in text.splitlines())


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:  # noqa: SLF001  # argparse has no public list of subcommands
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            seen = set()
            for child in action.choices.values():
                # A command has several names.
                if id(child) not in seen:
                    seen.add(id(child))
                    yield from _parsers(child)


def benchmarks() -> str:
    """Returns a section of Markdown for each benchmark, with its tables."""
    import json

    from tests.benchmarks.report import RESULTS, markdown

    return "".join(
        f"\n## {name}\n\n{_first_line(RESULTS.with_name(f'{name}.py'))}\n\n{markdown(result)}\n"
        for name, result in json.loads(RESULTS.read_text(encoding="utf-8")).items()
    )


def fault_tests() -> str:
    """Returns a section of Markdown for each file of tests that causes faults, with a line for each test."""
    files = [path for path in sorted((_ROOT / "tests").rglob("test_*.py")) if _causes_faults(path)]
    return "".join(
        f"\n## {path.relative_to(_ROOT)}\n\n{_first_line(path)}\n\n{_tests(path)}" for path in files
    )


def _causes_faults(path: Path) -> bool:
    return bool({"crash", "hostile", "model"} & set(path.parts)) or _FAULTS.search(path.name) is not None


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def _tests(path: Path) -> str:
    found = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    said = [
        (node.name.removeprefix("test_").replace("_", " "), ast.get_docstring(node) or "") for node in found
    ]
    return "".join(f"- *{name}*: {' '.join(text.split())}\n" for name, text in said)
