"""Redacts secrets in records, before any destination gets them, by the rules of `uploads`.

`uploads` is imported on first use, so that `import events` stays fast. A `Logger` uses it once in its
constructor, so that errors can be redacted also when no file can be opened any more.
"""

import traceback
from collections.abc import Sequence
from typing import Any

from .logger.converters import safe_text

__all__ = [
    "REDACTED",
    "error_text",
    "error_trace",
    "redact",
    "redact_arguments",
    "redact_table",
    "redact_text",
]

REDACTED = "[redacted]"


def redact(value: Any) -> Any:
    """Returns a copy of a value without secrets, in nested mappings, lists, tuples, sets and strings.

    ```python
    print(redact({"lr": 0.1, "password": "hunter2"}))
    ```

    The value of a key that names a secret is redacted, and so is a key that is a secret. Similar names
    (`num_tokens`, `tokenizer`, `primary_key`) are kept. Values nested more than a hundred levels deep, as in
    a structure that contains itself, are replaced by a note.
    """
    import uploads

    return uploads.redact(value)


def redact_text(text: str, *, only_literals: bool = False) -> str:
    """Returns the text with what looks like a secret redacted: keys, passwords in URLs, `token=…`.

    ```python
    print(redact_text("https://me:secret@example.org"))
    ```

    Takes time linear in the length of the text.

    Args:
        text: any text.
        only_literals: for source code, where `token = next(tokens)` is no secret: of assigned values, redacts
            only quoted strings.
    """
    import uploads

    return uploads.redact_text(text, only_literals=only_literals)


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Returns a command line with its secrets replaced, such as those after `--api-key` and `-p`.

    ```python
    print(redact_arguments(["train.py", "--api-key", "abc123", "--lr=0.1"]))
    ```
    """
    import uploads

    return uploads.redact_arguments(arguments)


def redact_table(columns: list[Any], rows: list[list[Any]]) -> tuple[list[Any], list[list[Any]]]:
    """Returns a table without secrets: those in cells, and whole columns that are named like one.

    A column "token" contains words; only cells that look like a secret are redacted.
    """
    import uploads

    return uploads.redact_table(columns, rows)


def error_text(error: BaseException) -> str:
    """Returns type and message of an exception, without secrets: "ValueError: no such metric"."""
    return redact_text(f"{type(error).__name__}: {safe_text(error)}")


def error_trace(error: BaseException) -> str:
    """Returns an exception with its traceback, without secrets."""
    return redact_text("".join(traceback.format_exception(error)).rstrip())
