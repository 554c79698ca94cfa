"""The command line: `destinations …`.

Starts without torch, numpy and any store's client: each group of commands is built where it is asked for, and what a command needs
is imported when it runs.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["build_parser", "main"]

# 128 and the number of the signal, as shells have it.
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141

GROUPS = {
    "runs": "runs that were written by RunDirectory, stable-pretraining and Lightning",
    "uploads": "spools of files on their way to a store",
    "completion": "what a shell needs to complete these commands",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: what stands behind the program's name; that of this process where none are given.

    Returns:
        The exit code; 2 is wrong usage, 130 Ctrl-C, 141 that nobody reads on; the others are those of the command.
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
    parser = build_parser([group])
    options, rest = parser.parse_known_args(arguments)
    options.rest = rest
    if rest and not getattr(options, "takes_rest", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return int(options.run(options))


def build_parser(groups: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Returns the parser of the command line.

    Args:
        groups: of which groups the commands are wanted; all where None.
    """
    parser = argparse.ArgumentParser(
        prog="destinations", description="Look at what training runs leave behind, and look after it."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show program's version number and exit")
    subparsers = parser.add_subparsers(required=True, metavar="GROUP")
    wanted = GROUPS if groups is None else groups
    for name, text in GROUPS.items():
        build = {"runs": _add_runs, "uploads": _add_uploads, "completion": _add_completion}[name]
        if name in wanted:
            build(subparsers, text)
        else:
            subparsers.add_parser(name, help=text)
    return parser


class _Version(argparse.Action):
    """Shows the version, which takes a while to find."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        import importlib.metadata

        sys.stdout.write(f"{importlib.metadata.version('training-destinations')}\n")
        parser.exit()


def _add_runs(subparsers: Any, text: str) -> None:
    from .runs.commands import EXIT_CODES, add_commands

    runs = subparsers.add_parser(
        "runs", help=text, description="Find, compare and look after runs.", epilog=EXIT_CODES
    )
    add_commands(runs.add_subparsers(required=True, metavar="COMMAND"))


def _add_uploads(subparsers: Any, text: str) -> None:
    from uploads import add_commands

    uploads = subparsers.add_parser(
        "uploads",
        help=text,
        description="Look after a spool of uploads.",
        epilog="Exit codes: 0 everything was delivered, 1 something is left, 3 another process owns the spool, "
        "4 something failed for good or is not in the store as it was delivered.",
    )
    add_commands(uploads.add_subparsers(required=True, metavar="COMMAND"))


def _add_completion(subparsers: Any, text: str) -> None:
    completion = subparsers.add_parser(
        "completion",
        help=text,
        description='Print a script that completes these commands. Needs: pip install "training-destinations[completion]".',
    )
    completion.add_argument("shell", choices=("bash", "fish", "tcsh", "zsh"), help="the shell")
    completion.set_defaults(run=_print_completion)


def _print_completion(options: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError as error:
        sys.stderr.write(
            f"package 'shtab' must be installed for completion, got: {error}. "
            'Run: pip install "training-destinations[completion]"\n'
        )
        return 1
    if options.shell not in shtab.SUPPORTED_SHELLS:
        sys.stderr.write(
            f"package 'shtab' must know {options.shell}, got {shtab.__version__}. Run: pip install --upgrade shtab\n"
        )
        return 1
    sys.stdout.write(f"{shtab.complete(build_parser(), options.shell)}\n")
    return 0


def _forget_output() -> None:
    """Keeps the interpreter from complaining, when it ends, of what it cannot write either."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
