"""Completes commands in a shell: `destinations completion bash` prints the script that asks this module.

The script calls `destinations completion SHELL -- WORD…` at each Tab, so it never falls behind the parser.
Only commands, options and their choices are offered, never names of runs, which a shell might interpret.
"""

import argparse
from collections.abc import Sequence

__all__ = ["SCRIPTS", "commands_of", "complete"]

SCRIPTS = {
    "bash": """\
_destinations() {
    local IFS=$'\\n'
    COMPREPLY=($(destinations completion bash -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _destinations destinations
""",
    "fish": """\
complete -c destinations -a '(destinations completion fish -- (commandline -opc)[2..] (commandline -ct))'
""",
    "zsh": """\
#compdef destinations
_destinations() {
    local -a found
    found=("${(@f)$(destinations completion zsh -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n $found[1] ]]; then compadd -a found; else _files; fi
}
compdef _destinations destinations
""",
}


def complete(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Returns the completions of the last word, sorted; empty if it is free text, such as a file.

    Args:
        parser: the parser of the whole command line.
        words: the words after the program's name; the last one is being typed, and may be empty.
    """
    *before, current = words or [""]
    previous = before[-1] if before else ""
    for word in before:
        parser = commands_of(parser).get(word, parser)
    offered = _offered(parser, previous, current)
    return sorted({word for word in offered if word.startswith(current)})


def _offered(parser: argparse.ArgumentParser, previous: str, current: str) -> list[str]:
    actions = parser._actions  # noqa: SLF001  # argparse shows them nowhere else
    for action in actions:
        if previous in action.option_strings and action.nargs != 0:
            return [str(choice) for choice in action.choices or ()]
    if current.startswith("-"):
        return [name for action in actions for name in action.option_strings]
    positional = [action for action in actions if not action.option_strings]
    return [str(choice) for action in positional for choice in action.choices or ()]


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Returns the parsers of a parser's commands, by name."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:  # noqa: SLF001  # as above
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001  # as above
            found |= action.choices
    return found
