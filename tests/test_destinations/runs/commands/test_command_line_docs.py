"""docs/command-line.md agrees with the parser about commands, options and exit codes."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

from destinations.cli import EXIT_INTERRUPTED, EXIT_PIPE_CLOSED, GROUPS, build_parser
from destinations.runs.commands import EXIT_CODES
from destinations.runs.commands.running import EXIT_FAILED, EXIT_OK, EXIT_TIMEOUT, EXIT_USAGE
from uploads.command_line import EXIT_FAILED as EXIT_LEFT_FAILED
from uploads.command_line import EXIT_OWNED

PAGE = (Path(__file__).parents[4] / "docs/command-line.md").read_text(encoding="utf-8")
SHARED = {"--help", "--root", "--json"}


def subparsers_of(parser):
    """Returns the parsers below a parser, by name."""
    (action,) = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    return action.choices


COMMANDS = subparsers_of(subparsers_of(build_parser())["runs"])


def section_of(name):
    """Returns the page's section about a command, or its line in a table."""
    for title in re.findall(r"^### (.+)$", PAGE, re.MULTILINE):
        if name in re.split(" and |, ", title):
            return PAGE.split(f"\n### {title}\n")[1].split("\n### ")[0].split("\n## ")[0]
    return "\n".join(line for line in PAGE.splitlines() if line.startswith(f"| `destinations runs {name} "))


def options_of(parser):
    """Returns the options of a command, without the ones that all commands have."""
    names = {name for action in parser._actions for name in action.option_strings}
    return {name for name in names if name.startswith("--")} - SHARED


def test_every_group_is_on_the_page():
    """The page names it after `destinations`."""
    assert [name for name in GROUPS if f"destinations {name}" not in PAGE] == []


@pytest.mark.parametrize("name", list(COMMANDS))
def test_a_command_is_on_the_page_with_options_that_exist(name):
    """The reference, made from the parser, lists the others."""
    section = section_of(name)
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", section)) - SHARED

    assert re.search(rf"`(destinations runs )?{name}\b|destinations runs {name} ", section)
    names = ("compact", "sql") if name in {"compact", "sql"} else (name,)
    assert shown - set().union(*(options_of(COMMANDS[one]) for one in names)) == set()


def test_every_command_on_the_page_parses():
    """The parser accepts each line of a block of shell commands."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("destinations ")]
    lines += re.findall(r"^\| `(destinations runs [^`]+)`", PAGE, re.MULTILINE)

    for line in lines:
        _, *words = shlex.split(line.split(" > ")[0].split(" && ")[0])
        options, rest = build_parser().parse_known_args(words)
        assert not rest or options.takes_rest, line
    assert len(lines) > 15


def test_every_exit_code_is_on_the_page_and_in_the_help():
    """Neither lists any other code."""
    codes = [
        *(EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_OWNED, EXIT_LEFT_FAILED),
        *(EXIT_TIMEOUT, EXIT_INTERRUPTED, EXIT_PIPE_CLOSED),
    ]

    assert [int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)] == codes
    assert [int(code) for code in re.findall(r"(?:^Exit codes: |[;,]\s)(\d+) ", EXIT_CODES)] == codes


def every_parser():
    """Yields each parser that runs a command, with the words that lead to it."""
    for group, parser in subparsers_of(build_parser()).items():
        if any(isinstance(one, argparse._SubParsersAction) for one in parser._actions):
            for name, command in subparsers_of(parser).items():
                yield pytest.param(command, id=f"{group} {name}")
        else:
            yield pytest.param(parser, id=group)


@pytest.mark.parametrize("parser", list(every_parser()))
def test_every_help_page_has_two_examples_that_parse(parser):
    """Only `destinations --help` has a table of exit codes."""
    text = parser.format_help()

    lines = [line.strip() for line in text.split("examples:\n")[1].splitlines()]
    assert len(lines) == 2
    for line in lines:
        _, *words = shlex.split(line.split(" > ")[0])
        options, rest = build_parser().parse_known_args(words)
        assert options.run, line
        assert not rest or options.takes_rest, line
    assert "Exit codes" not in text
