"""Names that a tracker takes, for names that it does not: no two names become one."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Names", "clean_texts", "short_hash", "without_surrogates"]

_HASH_CHARACTERS = 6


class Names:
    """Gives each name a key that the tracker takes; a name that it takes keeps itself.

    Where the key of another name is the same, the later one has a hash of the name added. Whoever asks for the same names in
    the same order gets the same keys; `take` is for those that an earlier session gave.

    Args:
        clean: makes a key of a name; must leave a good key as it is, and return a good key also for a key with a hash added.
    """

    def __init__(self, clean: Callable[[str], str]) -> None:
        self._clean = clean
        self._keys: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def take(self, name: str, key: str) -> None:
        """Notes a key that a name has."""
        self._keys[name] = key
        self._names[key] = name

    def has(self, name: str) -> bool:
        """Says whether a name has a key already."""
        return name in self._keys

    def key(self, name: str) -> str:
        """Returns the key of a name."""
        found = self._keys.get(name)
        return found if found is not None else self._new(name)

    def name(self, key: str) -> str:
        """Returns the name of a key that was given."""
        return self._names.get(key, key)

    def _new(self, name: str) -> str:
        key = self._clean(name)
        if self._names.get(key, name) != name:
            key = self._clean(f"{key}-{short_hash(name)}")
        self.take(name, key)
        return key


def short_hash(name: str) -> str:
    """Returns six hexadecimal digits that tell a name from others."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_CHARACTERS]


def without_surrogates(text: str) -> str:
    r"""Returns a text that UTF-8 can hold: a lone surrogate is written out, as "\udc80"."""
    return text.encode("utf-8", "backslashreplace").decode()


def clean_texts(value: Any) -> Any:
    """Returns a value in which every text is UTF-8, keys too; other types as they are."""
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, Mapping):
        return {without_surrogates(str(key)): clean_texts(item) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(clean_texts(item) for item in value)
    return value
