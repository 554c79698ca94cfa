"""Text that is safe to show: on one line, in the encoding of a stream, in a log; and durations in texts."""

import contextlib
import functools
import logging
import math
import opcode
import re
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = [
    "encodable",
    "log_error",
    "log_safely",
    "log_warning",
    "missing_name",
    "needs_package",
    "one_line",
    "one_line_json",
    "parse_retry_after",
    "parse_seconds",
]

_log = logging.getLogger("uploads")

# Characters that end a line for some reader, or move a terminal's cursor: C0 and C1 controls, DEL, ...
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\\t",
    # ... line and paragraph separators, and marks that change the direction of the text.
    **{
        code: f"\\u{code:04x}"
        for code in (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
    },
}
_IMPORT_FROM = opcode.opmap["IMPORT_FROM"]
_UNIT_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_PART = re.compile(
    r"(?P<number>\d+(?:\.\d*)?|\.\d+)\s*"
    r"(?P<unit>s|secs?|seconds?|m|mins?|minutes?|h|hrs?|hours?|d|days?|w|weeks?)(?![a-z])\s*"
)
_NOT_ESCAPED_BY_JSON = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def one_line(text: str) -> str:
    r"""Returns the text on one line, with control characters escaped: a newline becomes "\n".

    ```python
    print(one_line("two\nlines"))
    ```
    """
    return text if text.isprintable() else text.translate(_CONTROLS)


def one_line_json(line: str) -> str:
    """Returns a line of JSON with control characters as JSON escapes; they occur only in strings.

    ```python
    print(one_line_json('{"loss": 0.5}'))
    ```
    """
    if line.isprintable():
        return line
    return _NOT_ESCAPED_BY_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", line)


def encodable(text: str, stream: Any) -> str:
    """Returns the text with escapes for characters that the encoding of the stream lacks.

    ```python
    print(encodable("loss ▁▂▃", sys.stdout))
    ```
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text


@contextlib.contextmanager
def needs_package(what: str, *packages: str, note: str = "") -> Iterator[None]:
    """Makes a failed import in a `with` block say how to install the packages.

    ```python
    with needs_package("the report", "numpy"):
        import numpy
    ```

    Args:
        what: what needs them, at the beginning of the message.
        packages: their names on PyPI.
        note: a text after the command.

    Raises:
        ImportError: an import in the block failed.
    """
    try:
        yield
    except ImportError as error:
        names = f"package{'s' * (len(packages) > 1)} {' and '.join(map(repr, packages))}"
        command = f"pip install {' '.join(packages)}{note}"
        raise ImportError(f"{what} needs the {names}: {error}. Run: {command}", name=packages[0]) from error


def missing_name(module: str, name: str, known: Iterable[str]) -> AttributeError | ImportError:
    """Returns the error that a module's `__getattr__` raises for an unknown name, with the nearest name.

    ```python
    print(missing_name("events", "Trainr", ["Trainer", "Run"]))
    ```

    It is an ImportError for `from module import name`, whose own text has no hint; otherwise an
    AttributeError, which `hasattr` needs.
    """
    import difflib
    import sys

    folded = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.7)
    hint = f"; did you mean {folded[near[0]]!r}?" if near else ""
    caller = sys._getframe(2)  # noqa: SLF001  # the only way to tell the two apart
    code = caller.f_code.co_code
    if near and 0 <= caller.f_lasti < len(code) and code[caller.f_lasti] == _IMPORT_FROM:
        return ImportError(f"cannot import name {name!r} from {module!r}{hint}", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}")


def parse_seconds(text: str) -> float:
    """Parses a duration into seconds: "30", "30s", "5m", "1h30m", "7d", "2 weeks".

    ```python
    print(parse_seconds("1h30m"))  # 5400.0
    ```

    Raises:
        ValueError: It isn't a duration, or is infinite.
    """
    given = text.strip().lower()
    parts = list(_PART.finditer(given))
    try:
        if parts and "".join(part[0] for part in parts) == given:
            seconds = sum(float(part["number"]) * _UNIT_SECONDS[part["unit"][0]] for part in parts)
        else:
            seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(
            f"invalid duration {text!r}: expected a number with a unit, such as 30s, 5m, 1h30m or 7d"
        )
    return seconds


def parse_retry_after(header: str | None) -> float | None:
    """Returns the seconds of a `Retry-After` header, a number or a date (RFC 9110, 10.2.3).

    ```python
    print(parse_retry_after("120"), parse_retry_after("soon"))  # 120.0 None
    ```

    None without a header, or with an invalid one. The caller limits the number.
    """
    if not header:
        return None
    from urllib3 import Retry  # It comes with boto3.
    from urllib3.exceptions import InvalidHeader

    try:
        return float(Retry().parse_retry_after(header))
    except (InvalidHeader, ValueError, OverflowError):
        return None


def log_safely(level: int, message: str, *arguments: object, error: BaseException | None = None) -> None:
    """Logs to "uploads"; an exception of a user's log handler is suppressed.

    Args:
        level: Of `logging`.
        message: With `%s` for the arguments.
        arguments: As `Logger.log` takes them.
        error: Logged with its traceback, if any.
    """
    with contextlib.suppress(Exception):
        _log.log(level, message, *arguments, exc_info=error, stacklevel=2)


log_warning = functools.partial(log_safely, logging.WARNING)
log_error = functools.partial(log_safely, logging.ERROR)
