"""The command line: `destinations …`.

Starts without torch, numpy or any store's client: only the parser of the requested group is built, and a
command imports what it needs when it runs.
"""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .commands.completion import commands_of

__all__ = ["Parser", "build_parser", "main"]

# 128 plus the signal number, as in shells.
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141

GROUPS = {
    "runs": "runs written by RunDirectory, stable-pretraining and Lightning",
    "view": "runs in a browser",
    "uploads": "upload spools: files waiting to be uploaded",
    "demo": "train a small network on handwritten digits, and log everything",
    "doctor": "check the installation: packages, extras, disk, credentials, clock",
    "completion": "shell completion script",
}
SHELLS = ("bash", "fish", "zsh")

_EXAMPLES = """examples:
  destinations demo
  destinations view runs

`destinations GROUP --help` and `destinations GROUP COMMAND --help` say more.
"""
_QUOTED = re.compile(r"invalid choice: ('(?:[^'\\]|\\.)*')")


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


class Parser(argparse.ArgumentParser):
    """A parser with examples at the end of its help, and with suggestions in its errors.

    Its subparsers are of this class too.

    Args:
        examples: arguments of the command, one line each, shown below its help.
        details: returns text that is shown above the examples, and takes long to find.
    """

    def __init__(
        self,
        *args: Any,
        examples: Sequence[str] = (),
        details: Callable[[], str] = str,
        **options: Any,
    ) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **options)
        self.examples = tuple(f"{self.prog} {example}".rstrip() for example in examples)
        if self.examples:
            lines = "".join(f"  {example}\n" for example in self.examples)
            self.epilog = f"examples:\n{lines}{self.epilog or ''}"
        self._details = details

    def format_help(self) -> str:
        """Returns the help, with the details."""
        details, self._details = self._details(), str
        if details:
            self.epilog = f"{details}\n{self.epilog or ''}"
        return super().format_help()

    def parse_known_args(  # type: ignore[override]  # the base has overloads
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses arguments; unknown ones are an error, unless the command takes any."""
        found, rest = super().parse_known_args(args, namespace)
        if rest and not getattr(found, "takes_rest", False):
            known = [name for action in self._actions for name in action.option_strings]
            words = [_with_hint(word, known) if word.startswith("-") else repr(word) for word in rest]
            self.error(f"unknown argument {', '.join(words)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Exits with code 2 and a message with the problem, the probable intention, and the help command."""
        from uploads import encodable, one_line

        found, commands = _QUOTED.search(message), list(commands_of(self))
        if found and commands:
            word = found[1][1:-1]
            message = f"unknown command {_with_hint(word, commands)}"
            if not _near(word, commands) and word in commands_of(commands_of(build_parser(["runs"]))["runs"]):
                message += f"; did you mean '{self.prog.partition(' ')[0]} runs {word}'?"
        end = "" if message.endswith(("?", ".")) else "."
        text = encodable(one_line(f"{message}{end} See: {self.prog} --help"), sys.stderr)
        self.exit(2, f"{text}\n")


def _with_hint(word: str, known: Sequence[str]) -> str:
    near = _near(word.partition("=")[0], known)
    return f"{word!r}; did you mean {near!r}?" if near else repr(word)


def _near(word: str, known: Sequence[str]) -> str:
    import difflib

    return next(iter(difflib.get_close_matches(word, known, n=1)), "")


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
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show program's version number and exit")
    parser.set_defaults(run=_Help(parser))
    subparsers = parser.add_subparsers(metavar="GROUP")
    wanted = GROUPS if groups is None else groups
    builders = {
        "runs": _add_runs,
        "view": _add_view,
        "uploads": _add_uploads,
        "demo": _add_demo,
        "doctor": _add_doctor,
        "completion": _add_completion,
    }
    for name, text in GROUPS.items():
        if name in wanted:
            builders[name](subparsers, text)
        else:
            subparsers.add_parser(name, help=text)
    return parser


class _Help:
    """Prints the help of a parser, for a group without a command."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser

    def __call__(self, _options: argparse.Namespace) -> int:
        self._parser.print_help()
        return 0


class _Version(argparse.Action):
    """Prints the version; looked up only when asked for, because it is slow."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        import importlib.metadata

        sys.stdout.write(f"{importlib.metadata.version('training-destinations')}\n")
        parser.exit()


def _add_runs(subparsers: Any, text: str) -> None:
    from .runs.commands import add_commands

    runs = subparsers.add_parser(
        "runs",
        help=text,
        description="Find, compare and manage runs.",
        examples=("ls --where 'summary.loss < 1'", "--root /data/runs show digits"),
    )
    runs.add_argument(
        "--root", action="append", dest="roots_before", metavar="FOLDER", help="folder to search; repeatable"
    )
    runs.set_defaults(run=_Help(runs))
    add_commands(runs.add_subparsers(metavar="COMMAND"))


def _add_uploads(subparsers: Any, text: str) -> None:
    from uploads import add_commands

    uploads = subparsers.add_parser(
        "uploads",
        help=text,
        description="Inspect and manage an upload spool.",
        examples=("status SPOOL", "resume SPOOL --timeout 10m"),
    )
    uploads.set_defaults(run=_Help(uploads))
    add_commands(uploads.add_subparsers(metavar="COMMAND"))


def _add_view(subparsers: Any, text: str) -> None:
    from .viewer.commands import add_options

    view = subparsers.add_parser(
        "view",
        help=text,
        description="Show runs in a browser, live, until Ctrl-C. Needs starlette and uvicorn.",
        examples=("runs --open", "runs s3://bucket/dataset --port 8080"),
    )
    add_options(view)


def _add_demo(subparsers: Any, text: str) -> None:
    demo = subparsers.add_parser(
        "demo",
        help=text,
        description="Train a small network on 1,797 handwritten digits, which are part of scikit-learn, and "
        "log everything into the folder `runs`. Takes half a minute; needs scikit-learn.",
        examples=("", "--epochs 2 --store s3://bucket/prefix"),
    )
    demo.add_argument("--epochs", type=int, default=8, metavar="N", help="epochs to train (default: 8)")
    demo.add_argument(
        "--store",
        default="store",
        metavar="URI",
        help="where checkpoints and the run are uploaded: a folder, s3://bucket/prefix, gs://, az://, "
        "sftp:// (default: the folder `store`)",
    )
    demo.set_defaults(run=_run_demo)


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


def _add_doctor(subparsers: Any, text: str) -> None:
    doctor = subparsers.add_parser(
        "doctor",
        help=text,
        description="Check the installation, and say what will not work and what to do. The exit code is 1 "
        "if something that every run needs is broken.",
        examples=("--store s3://bucket/prefix", "--extra wandb --extra viewer"),
    )
    doctor.add_argument(
        "--root", default="runs", metavar="FOLDER", help="folder of the runs, whose disk is checked"
    )
    doctor.add_argument("--store", metavar="URI", help="also ask this store for an object")
    doctor.add_argument(
        "--extra",
        action="append",
        default=[],
        metavar="NAME",
        help="an extra that you need, such as wandb: a problem where it is not installed; may be repeated",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=_run_doctor)


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


def _add_completion(subparsers: Any, text: str) -> None:
    completion = subparsers.add_parser(
        "completion",
        help=text,
        description="Print a shell completion script.",
        examples=(
            "bash > ~/.local/share/bash-completion/completions/destinations",
            "fish > ~/.config/fish/completions/destinations.fish",
        ),
    )
    completion.add_argument("shell", choices=SHELLS, help="shell")
    completion.add_argument("words", nargs="*", help=argparse.SUPPRESS)  # From the script, at each Tab.
    completion.set_defaults(run=_print_completion)


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


if __name__ == "__main__":
    sys.exit(main())
