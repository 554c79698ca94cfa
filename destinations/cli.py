"""The command line: `destinations …`.

Starts without torch and without any store's client; each group of commands is built where it is asked for.
"""

import argparse
import sys
from collections.abc import Sequence

from uploads import add_commands

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: what stands behind the program's name; that of this process where none are given.

    Returns:
        The exit code; 2 is wrong usage, the others are those of the command.
    """
    parser = argparse.ArgumentParser(
        prog="destinations", description="Look after what training runs leave behind."
    )
    parser.add_argument("--version", action="version", version=_version())
    groups = parser.add_subparsers(required=True, metavar="GROUP")
    uploads = groups.add_parser(
        "uploads",
        help="spools of files on their way to a store",
        description="Look after a spool of uploads.",
        epilog="Exit codes: 0 everything was delivered, 1 something is left, 3 another process owns the spool, "
        "4 something failed for good or is not in the store as it was delivered.",
    )
    add_commands(uploads.add_subparsers(required=True, metavar="COMMAND"))
    options = parser.parse_args(arguments)
    return int(options.run(options))


def _version() -> str:
    import importlib.metadata

    return importlib.metadata.version("training-destinations")


if __name__ == "__main__":
    sys.exit(main())
