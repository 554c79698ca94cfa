"""`Parser`: the parser of `destinations`, and of each of its commands."""

import argparse
import re
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from .completion import commands_of

__all__ = ["Parser"]

_QUOTED = re.compile(r"invalid choice: ('(?:[^'\\]|\\.)*')")


class Parser(argparse.ArgumentParser):
    """A parser with examples at the end of its help, and with suggestions in its errors.

    Its subparsers are of this class too.

    Args:
        examples: arguments of the command, one line each, shown below its help.
        details: returns text that is shown above the examples, and takes long to find.
        of_runs: returns the commands of `runs`, for a user who left out that word.
    """

    def __init__(
        self,
        *args: Any,
        examples: Sequence[str] = (),
        details: Callable[[], str] = str,
        of_runs: Callable[[], Collection[str]] = tuple,
        **options: Any,
    ) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **options)
        lines = [f"  {self.prog} {example}".rstrip() for example in examples]
        if lines:
            self.epilog = "\n".join(("examples:", *lines, self.epilog or ""))
        self._details = details
        self._of_runs = of_runs

    def take(self, names: str, metavar: str | None, text: str, *, group: Any = None, **more: Any) -> None:
        """Adds an argument.

        Args:
            names: its names, separated by spaces.
            metavar: its value in the help; an option without one is a flag, unless it has choices.
            text: its help.
            group: the group of options that exclude each other, if it is in one.
            more: other arguments of `add_argument`.
        """
        if metavar is not None:
            more["metavar"] = metavar
        elif "choices" not in more:
            more.setdefault("action", "store_true")
        (group or self).add_argument(*names.split(), help=text, **more)

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
            if not _near(word, commands) and word in self._of_runs():
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
