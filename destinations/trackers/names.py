"""Maps names and values to what a tracker accepts."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from destinations.text.formatting import plain

__all__ = ["Names", "as_text", "clean_texts", "numbered", "short_hash", "without_surrogates"]


class Names:
    """Maps each name to a valid key; valid names are unchanged.

    If two names have the same key, a hash of the name is appended to the later one. The same names in the
    same order get the same keys; `take` restores keys of an earlier session.

    Args:
        clean: returns the key of a name; must be idempotent, also for a key with an appended hash.
    """

    def __init__(self, clean: Callable[[str], str]) -> None:
        self._clean = clean
        self._keys: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def take(self, name: str, key: str) -> None:
        """Registers the key of a name."""
        self._keys[name] = key
        self._names[key] = name

    def key(self, name: str) -> str:
        """Returns the key of a name."""
        found = self._keys.get(name)
        return found if found is not None else self._new(name)

    def name(self, key: str) -> str:
        """Returns the name of a key."""
        return self._names.get(key, key)

    def _new(self, name: str) -> str:
        key = self._clean(name)
        if self._names.get(key, name) != name:
            key = self._clean(f"{key}-{short_hash(name)}")
        self.take(name, key)
        return key


def short_hash(name: str, digits: int = 6) -> str:
    """Returns the first hexadecimal digits of the SHA-256 of a name."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:digits]


def without_surrogates(text: str) -> str:
    r"""Returns the text with lone surrogates escaped, as "\udc80", so that UTF-8 can encode it."""
    return text.encode("utf-8", "backslashreplace").decode()


def as_text(value: Any, indent: int | None = None) -> str:
    """Returns a text unchanged, and any other value as JSON, with values that JSON lacks as text."""
    if isinstance(value, str):
        return value
    return json.dumps(plain(value), indent=indent, ensure_ascii=False)


def clean_texts(value: Any) -> Any:
    """Applies `without_surrogates` to all strings of a value, including keys."""
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, Mapping):
        return {without_surrogates(str(key)): clean_texts(item) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(clean_texts(item) for item in value)
    return value


def numbered(name: str, values: Sequence[Any]) -> list[tuple[str, Any]]:
    """Returns (name, value) pairs for the values of one call; numbered unless there is only one."""
    if len(values) == 1:
        return [(name, values[0])]
    return [(f"{name}/{index}", value) for index, value in enumerate(values)]
