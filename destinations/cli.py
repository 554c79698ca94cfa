"""The command line: `destinations …`.

Starts without torch, numpy or any store's client: only the parser of the requested group is built, and a
command imports what it needs when it runs.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from .commands.completion import commands_of
from .commands.parser import Parser

__all__ = ["build_parser", "main"]

# 128 plus the signal number, as in shells.
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141

SHELLS = ("bash", "fish", "zsh")

_EXAMPLES = """examples:
  destinations demo
  destinations view runs

`destinations GROUP --help` and `destinations GROUP COMMAND --help` say more.
"""
_ABOUT_DEMO = """Train a small network on 1,797 handwritten digits, which are part of scikit-learn, and \
log everything into the folder `runs`. Takes half a minute; needs scikit-learn."""
_ABOUT_DOCTOR = """Check the installation, and say what will not work and what to do. The exit code is 1 \
if something that every run needs is broken."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: command-line arguments. Default: `sys.argv`.

    Returns:
        The exit code: 2 for a usage error, 130 for Ctrl-C, 141 for a broken pipe, else the command's.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_output()
        return EXIT_PIPE_CLOSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


def _run(arguments: list[str]) -> int:
    group = next((argument for argument in arguments if not argument.startswith("-")), "")
    options, rest = build_parser([group]).parse_known_args(arguments)
    options.rest = rest
    return int(options.run(options))


def build_parser(groups: Sequence[str] | None = None) -> Parser:
    """Returns the parser of the command line.

    Args:
        groups: groups whose commands are added; all by default.
    """
    from .runs.commands import EXIT_CODES

    parser = Parser(
        prog="destinations",
        description="Inspect and manage training runs and uploads.",
        epilog=f"{_EXAMPLES}\n{EXIT_CODES}",
        of_runs=_commands_of_runs,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show program's version number and exit")
    _print_help_of(parser)
    subparsers = parser.add_subparsers(metavar="GROUP")
    for name, (text, about, examples, fill) in GROUPS.items():
        group = subparsers.add_parser(
            name, help=text, description=about, examples=examples, of_runs=_commands_of_runs
        )
        if groups is None or name in groups:
            fill(group)
    return parser


def _commands_of_runs() -> Collection[str]:
    return commands_of(commands_of(build_parser(["runs"]))["runs"])


def _print_help_of(parser: Parser) -> None:
    """Makes a parser print its help if no command is given."""

    def print_help(_: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(run=print_help)


class _Version(argparse.Action):
    """Prints the version; looked up only when asked for, because it is slow."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        import importlib.metadata

        sys.stdout.write(f"{importlib.metadata.version('training-destinations')}\n")
        parser.exit()


def _fill_runs(parser: Parser) -> None:
    from .runs.commands import add_commands

    parser.take("--root", "FOLDER", "folder to search; repeatable", action="append", dest="roots_before")
    _print_help_of(parser)
    add_commands(parser.add_subparsers(metavar="COMMAND"))


def _fill_view(parser: Parser) -> None:
    from .viewer.commands import add_options

    add_options(parser)


def _fill_uploads(parser: Parser) -> None:
    from uploads import add_commands

    _print_help_of(parser)
    add_commands(parser.add_subparsers(metavar="COMMAND"))


def _fill_demo(parser: Parser) -> None:
    parser.take("--epochs", "N", "epochs to train (default: 8)", type=int, default=8)
    where = "where checkpoints and the run are uploaded: a folder, s3://bucket/prefix, gs://, az://, sftp://"
    parser.take("--store", "URI", f"{where} (default: the folder `store`)", default="store")
    parser.set_defaults(run=_run_demo)


def _run_demo(options: argparse.Namespace) -> int:
    try:
        import sklearn  # noqa: F401  # checked before torch, which takes seconds
    except ImportError as error:
        sys.stderr.write(f"demo needs the package 'scikit-learn': {error}. Run: pip install scikit-learn\n")
        return 1
    if options.epochs < 1:
        sys.stderr.write(f"--epochs must be at least 1, got {options.epochs}.\n")
        return 2
    from .commands.demo import main as demo

    demo(options.store, epochs=options.epochs)
    return 0


def _fill_doctor(parser: Parser) -> None:
    parser.take("--root", "FOLDER", "folder of the runs, whose disk is checked", default="runs")
    parser.take("--store", "URI", "also ask this store for an object")
    text = "an extra that you need, such as wandb: a problem where it is not installed; may be repeated"
    parser.take("--extra", "NAME", text, action="append", default=[])
    parser.take("--json", None, "print JSON")
    parser.set_defaults(run=_run_doctor)


def _run_doctor(options: argparse.Namespace) -> int:
    import attrs

    from .commands.doctor import checks
    from .runs.commands.screen import Screen

    screen = Screen.of()
    found = list(checks(Path(options.root), options.store, options.extra))
    if options.json:
        screen.json([attrs.asdict(check) for check in found])
    else:
        styles = {"ok": "green", "warning": "yellow", "problem": "red"}
        width = max(len(check.name) for check in found)
        for check in found:
            state = screen.styled(f"{check.state:<7}", styles[check.state])
            screen.line(f"{state}  {check.name:<{width}}  {check.text}")
    return int(any(check.state == "problem" for check in found))


def _fill_completion(parser: Parser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="shell")
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)  # From the script, at each Tab.
    parser.set_defaults(run=_print_completion)


def _print_completion(options: argparse.Namespace) -> int:
    from .commands.completion import SCRIPTS, complete

    if options.words:
        found = complete(build_parser(options.words[:1]), options.words)
        sys.stdout.write("".join(f"{word}\n" for word in found))
    else:
        sys.stdout.write(SCRIPTS[options.shell])
    return 0


def _forget_output() -> None:
    """Redirects stdout to the null device, so that the flush at interpreter exit does not fail again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


GROUPS: dict[str, tuple[str, str, tuple[str, ...], Callable[[Parser], None]]] = {
    "runs": (
        "runs written by RunDirectory, stable-pretraining and Lightning",
        "Find, compare and manage runs.",
        ("ls --where 'summary.loss < 1'", "--root /data/runs show digits"),
        _fill_runs,
    ),
    "view": (
        "runs in a browser",
        "Show runs in a browser, live, until Ctrl-C. Needs starlette and uvicorn.",
        ("runs --open", "runs s3://bucket/dataset --port 8080"),
        _fill_view,
    ),
    "uploads": (
        "upload spools: files waiting to be uploaded",
        "Inspect and manage an upload spool.",
        ("status SPOOL", "resume SPOOL --timeout 10m"),
        _fill_uploads,
    ),
    "demo": (
        "train a small network on handwritten digits, and log everything",
        _ABOUT_DEMO,
        ("", "--epochs 2 --store s3://bucket/prefix"),
        _fill_demo,
    ),
    "doctor": (
        "check the installation: packages, extras, disk, credentials, clock",
        _ABOUT_DOCTOR,
        ("--store s3://bucket/prefix", "--extra wandb --extra viewer"),
        _fill_doctor,
    ),
    "completion": (
        "shell completion script",
        "Print a shell completion script.",
        (
            "bash > ~/.local/share/bash-completion/completions/destinations",
            "fish > ~/.config/fish/completions/destinations.fish",
        ),
        _fill_completion,
    ),
}
"""The help of each group, its description, its examples, and what adds its arguments."""


if __name__ == "__main__":
    sys.exit(main())
