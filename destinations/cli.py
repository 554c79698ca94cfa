"""The command line: `destinations …`.

Starts without torch, numpy or any store's client: only the parser of the requested group is built, and a
command imports what it needs when it runs.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["build_parser", "main"]

# 128 plus the signal number, as in shells.
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141

GROUPS = {
    "runs": "runs written by RunDirectory, stable-pretraining and Lightning",
    "uploads": "upload spools: files waiting to be uploaded",
    "view": "runs in a browser",
    "completion": "shell completion script",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: command-line arguments; those of this process by default.

    Returns:
        The exit code: 2 usage error, 130 Ctrl-C, 141 broken pipe, else that of the command.
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
        groups: groups whose commands are added; all by default.
    """
    parser = argparse.ArgumentParser(
        prog="destinations", description="Inspect and manage training runs and uploads."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show program's version number and exit")
    subparsers = parser.add_subparsers(required=True, metavar="GROUP")
    wanted = GROUPS if groups is None else groups
    for name, text in GROUPS.items():
        build = {
            "runs": _add_runs,
            "uploads": _add_uploads,
            "view": _add_view,
            "completion": _add_completion,
        }[name]
        if name in wanted:
            build(subparsers, text)
        else:
            subparsers.add_parser(name, help=text)
    return parser


class _Version(argparse.Action):
    """Prints the version; looked up only when asked for, because it is slow."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        import importlib.metadata

        sys.stdout.write(f"{importlib.metadata.version('training-destinations')}\n")
        parser.exit()


def _add_runs(subparsers: Any, text: str) -> None:
    from .runs.commands import EXIT_CODES, add_commands

    runs = subparsers.add_parser(
        "runs", help=text, description="Find, compare and manage runs.", epilog=EXIT_CODES
    )
    add_commands(runs.add_subparsers(required=True, metavar="COMMAND"))


def _add_uploads(subparsers: Any, text: str) -> None:
    from uploads import add_commands

    uploads = subparsers.add_parser(
        "uploads",
        help=text,
        description="Inspect and manage an upload spool.",
        epilog="Exit codes: 0 everything was uploaded, 1 uploads are pending, 3 another process owns the "
        "spool, 4 an upload failed permanently, or an object in the store is missing or differs.",
    )
    add_commands(uploads.add_subparsers(required=True, metavar="COMMAND"))


def _add_view(subparsers: Any, text: str) -> None:
    from .runs.commands import EXIT_CODES
    from .viewer.commands import add_options

    view = subparsers.add_parser(
        "view",
        help=text,
        description="Show runs in a browser, live, until Ctrl-C. Needs the extra `viewer`.",
        epilog=EXIT_CODES,
    )
    add_options(view)


def _add_completion(subparsers: Any, text: str) -> None:
    completion = subparsers.add_parser(
        "completion",
        help=text,
        description="Print a shell completion script. Needs the extra `completion`.",
    )
    completion.add_argument("shell", choices=("bash", "fish", "tcsh", "zsh"), help="shell")
    completion.set_defaults(run=_print_completion)


def _print_completion(options: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError as error:
        sys.stderr.write(
            f"completion needs the package 'shtab': {error}. "
            'Run: pip install "training-destinations[completion]"\n'
        )
        return 1
    if options.shell not in shtab.SUPPORTED_SHELLS:
        sys.stderr.write(
            f"shtab {shtab.__version__} does not support {options.shell}. Run: pip install --upgrade shtab\n"
        )
        return 1
    sys.stdout.write(f"{shtab.complete(build_parser(), options.shell)}\n")
    return 0


def _forget_output() -> None:
    """Redirects stdout to the null device, so that the flush at interpreter exit does not fail again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
