"""Checks remote names, in the caller's thread, before anything is staged."""

import functools
import hashlib
import re

from .errors import InvalidRemoteNameError

__all__ = ["MAX_NAME_BYTES", "PARTIAL_PREFIX", "check_remote_name", "name_key"]

MAX_NAME_BYTES = 1024  # S3's limit on a key; the strictest of the stores.

# Files in a store's folder that begin like this are not objects; leftovers are removed.
PARTIAL_PREFIX = ".uploads-partial-"

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_DRIVE = re.compile(r"[A-Za-z]:")


def check_remote_name(name: str) -> str:
    r"""Returns the name if every store keeps it unchanged and under its prefix.

    Names are relative, separated by `/`: unicode and spaces are welcome, `..`, `.`, empty parts, a leading
    `/` or drive letter, backslashes and control characters are not, nor are names of our temporary files.

    Raises:
        InvalidRemoteNameError: With the reason.
    """
    if not isinstance(name, str):
        raise InvalidRemoteNameError(f"a remote name must be a string, got {name!r}. Write {str(name)!r}.")
    reason = _problem(name)
    if reason is not None:
        raise InvalidRemoteNameError(
            f"a remote name must {reason}, got {name!r}. Use a relative name such as 'checkpoints/ep1.pt'."
        )
    return name


def _problem(name: str) -> str | None:
    if not name:
        return "not be empty"
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        return "be encodable as UTF-8"
    if len(encoded) > MAX_NAME_BYTES:
        return f"have at most {MAX_NAME_BYTES} bytes"
    if _CONTROL.search(name):
        return "have no control characters"
    if "\\" in name or name.startswith("/") or _DRIVE.match(name):
        return "be relative, with parts separated by '/'"
    if any(part in {"", ".", ".."} for part in name.split("/")):
        return "have no empty part, '.' or '..'"
    if name.rpartition("/")[2].startswith(PARTIAL_PREFIX):
        return f"not begin with {PARTIAL_PREFIX!r}, as temporary files of stores do"
    return None


@functools.lru_cache(maxsize=1024)
def name_key(name: str) -> str:
    """Returns a hash of the name, 16 hexadecimal digits, for the name of an entry's folder."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]
