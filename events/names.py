"""Fills in placeholders in names and paths: "{run_name}/ep{epoch}.pt"."""

import difflib
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from .errors import RecordError
from .state import State
from .timestamp import Timestamp

__all__ = [
    "LiteralName",
    "check_placeholders",
    "check_run_name",
    "check_unknown",
    "format_name",
    "format_run_name",
    "format_store",
]

_log = logging.getLogger("events")

_PLACEHOLDER = re.compile(r"\{(\w+)(:[^{}]*)?\}")
_CONSTANTS = ("run_name", "rank", "local_rank", "world_size", "local_world_size", "node_rank")


class LiteralName(str):
    """A file name that is not a template: `{epoch}` in it stays unchanged.

    ```python
    print(format_name(LiteralName("report{epoch}.txt"), State("digits")))  # report{epoch}.txt
    ```

    Use it for the name of a file that comes from a user or another program.
    """

    __slots__ = ()


def format_run_name(template: str, state: State) -> str:
    """Fills in the placeholders that are constant during a run on this rank.

    ```python
    print(format_run_name("runs/{run_name}/{rank}", State(run_name="digits")))  # runs/digits/0
    ```

    These are `{run_name} {rank} {local_rank} {world_size} {local_world_size} {node_rank}`. A format
    specification may follow a colon, `{rank:03d}`; other braces are left as they are.
    """
    return _fill(template, _constants(state))


def check_placeholders(template: str) -> None:
    """Refuses a placeholder that is nearly one of ours, such as `{runname}`; other braces are left alone.

    ```python
    check_placeholders("runs/{run_name}")              # ValueError for "runs/{runname}"
    ```

    Raises:
        ValueError: the message has the placeholder that was probably meant.
    """
    known = (*_CONSTANTS, *Timestamp().to_numbers())
    for name, _ in _PLACEHOLDER.findall(template):
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.8)
        if near and name not in known:
            raise ValueError(f"unknown placeholder {{{name}}} in {template!r}; did you mean {{{near[0]}}}?")


def check_run_name(template: str, state: State) -> None:
    """Refuses a run name that leads out of the folder of a path template, such as `"runs/{run_name}"`.

    ```python
    check_run_name("runs/{run_name}", State(run_name="digits"))      # an error for the name "../digits"
    ```

    Warns of placeholders that `format_run_name` leaves unchanged, such as `{runname}`.

    Raises:
        RecordError: the template has `{run_name}`, and the name is an absolute path or contains ".." or NUL.
    """
    placeholders = [name for name, _ in _PLACEHOLDER.findall(template)]
    for placeholder in placeholders:
        if placeholder not in _CONSTANTS:
            near = difflib.get_close_matches(placeholder, _CONSTANTS, n=1)
            _log.warning(
                "%r has {%s}, which is left as it is; %s",
                template,
                placeholder,
                f"did you mean {{{near[0]}}}?" if near else f"known are {', '.join(_CONSTANTS)}.",
            )
    name = state.run_name
    is_absolute = name.startswith(("/", "\\")) or re.match(r"[A-Za-z]:[/\\]", name)
    if "run_name" in placeholders and (is_absolute or "\0" in name or ".." in re.split(r"[/\\]", name)):
        raise RecordError(
            f'run name {name!r} leads out of the folder of {template!r}. Use a relative name without "..".'
        )


def format_name(template: str, state: State) -> str:
    """Fills in the placeholders of `format_run_name` and of the timestamp.

    ```python
    print(format_name("{run_name}/ep{epoch}.pt", State(run_name="digits")))  # digits/ep0.pt
    ```

    Its counts are integers (`{epoch} {batch} {sample} {token} {iteration}`, `{batch_in_epoch}` and so on),
    its durations seconds (`{total_wct} {epoch_wct} {batch_wct} {iteration_wct}`).
    """
    if "{" not in template or isinstance(template, LiteralName):
        return str(template)
    # In one pass: braces in the run name are not filled in again.
    return _fill(template, _constants(state) | state.timestamp.to_numbers())


def format_store(template: str, state: State) -> str:
    """Fills in the placeholders of `format_run_name` in the URI of a store, or in its path.

    ```python
    print(format_store("s3://bucket/{run_name}", State(run_name="a#1")))  # s3://bucket/a%231
    ```

    Special characters in a name are quoted: a `#`, `?` or `%` becomes part of the prefix and begins no
    options.

    Raises:
        ValueError: a name would leave the folder or prefix it is filled into.
    """

    def value(match: re.Match[str]) -> str:
        filled = format_run_name(match[0], state)
        if filled == match[0]:
            return filled
        if {"..", "."} & set(filled.split("/")):
            raise ValueError(
                f"a name in a store's URI must have no part '..' or '.', got {filled!r} for {match[0]}"
            )
        return quote(filled) if "://" in template else filled

    return _PLACEHOLDER.sub(value, template)


def _constants(state: State) -> dict[str, object]:
    return {name: getattr(state, name) for name in _CONSTANTS}


def _fill(template: str, values: dict[str, object]) -> str:
    def value(match: re.Match[str]) -> str:
        name, spec = match.groups()
        return format(values[name], (spec or ":")[1:]) if name in values else match[0]

    return _PLACEHOLDER.sub(value, template)


def check_unknown(
    owner: str, others: Mapping[str, Any], known: Iterable[str], hints: Mapping[str, str] | None = None
) -> None:
    """Raises TypeError for arguments that a call does not have; the message says what to write instead.

    ```python
    def open_store(uri, *, workers=4, **unknown):
        check_unknown("open_store", unknown, ["uri", "workers"])
    ```

    Args:
        owner: the function or class that was called.
        others: the arguments that it does not have, by name.
        known: the names of the arguments that it has.
        hints: what to do for names that others use; for any other name, the nearest known one is named.

    Raises:
        TypeError: there are others.
    """
    hints = hints or {}
    texts = []
    for name in others:
        near = difflib.get_close_matches(name, [one for one in known if one != "unknown"], n=1, cutoff=0.7)
        hint = hints.get(name) or (f"Did you mean {near[0]!r}?" if near else "")
        texts.append(f"{owner} has no argument {name!r}. {hint}".rstrip())
    if texts:
        raise TypeError(" ".join(texts))
