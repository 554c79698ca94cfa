"""A hook of MkDocs: writes the reference of the command line from its parser."""

import argparse
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from destinations.cli import build_parser

_PAGE = "reference/command-line.md"
_COLUMNS = 88


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Adds the commands to their page."""
    return markdown + command_line() if page.file.src_uri == _PAGE else markdown


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
