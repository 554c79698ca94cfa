"""Takes secrets out of what is logged, before any destination sees it, by the rules of `uploads`.

`uploads` is imported when they are first needed, so that `import events` stays fast; a `Logger` does it when it is made, so that
an error can be reported without secrets also where no file can be opened any more.
"""

from collections.abc import Sequence
from typing import Any

__all__ = ["REDACTED", "redact", "redact_arguments", "redact_table", "redact_text"]

REDACTED = "[redacted]"


def redact(value: Any) -> Any:
    """Returns the value without its secrets: nested mappings, lists, tuples and sets are gone through, strings are searched.

    A key that names a secret hides its value, a key that is a secret is hidden itself; words that only sound like a secret
    (`num_tokens`, `tokenizer`, `primary_key`) are left alone. The caller's containers are never changed. What is nested more
    than a hundred levels deep, as a structure that contains itself, becomes a text that says so.
    """
    import uploads

    return uploads.redact(value)


def redact_text(text: str, *, only_literals: bool = False) -> str:
    """Returns the text with everything that looks like a secret replaced: keys, passwords in URLs, `token=…`.

    Takes time in proportion to the length of the text, whatever it says.

    Args:
        text: any text.
        only_literals: for source code, where `token = next(tokens)` is no secret: of what is assigned to a name, only quoted
            strings are taken out.
    """
    import uploads

    return uploads.redact_text(text, only_literals=only_literals)


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Returns a command line without its secrets: `--api-key VALUE` and `--api-key=VALUE` both lose the value, `-p VALUE` too."""
    import uploads

    return uploads.redact_arguments(arguments)


def redact_table(columns: list[Any], rows: list[list[Any]]) -> tuple[list[Any], list[list[Any]]]:
    """Returns a table without its secrets: those in its cells, and all of a column that is named like one.

    A column "token" is one of words, of which only what looks like a secret is taken out.
    """
    import uploads

    return uploads.redact_table(columns, rows)
