"""What a remote name may look like; checked in the caller's thread, before anything is staged."""

from __future__ import annotations

import functools
import hashlib
import re

from .errors import InvalidRemoteNameError

__all__ = ["MAXIMUM_NAME_BYTES", "check_remote_name", "name_key"]

MAXIMUM_NAME_BYTES = 1024  # S3's limit on a key; the strictest of the stores.

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_DRIVE = re.compile(r"[A-Za-z]:")


def check_remote_name(name: str) -> str:
    r"""The name itself, if every store keeps it as it is and no store could leave its root for it.

    Names are relative, separated by `/`: unicode and spaces are welcome, `..`, `.`, empty parts, a leading
    `/` or drive letter, backslashes and control characters are not.

    Raises:
        InvalidRemoteNameError: With the reason.
    """
    reason = _objection(name)
    if reason is not None:
        raise InvalidRemoteNameError(
            f"a remote name must {reason}, got {name!r}. Use a relative name such as 'checkpoints/ep1.pt'."
        )
    return name


def _objection(name: str) -> str | None:
    if not name:
        return "not be empty"
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        return "be encodable as UTF-8"
    if len(encoded) > MAXIMUM_NAME_BYTES:
        return f"have at most {MAXIMUM_NAME_BYTES} bytes"
    if _CONTROL.search(name):
        return "have no control characters"
    if "\\" in name or name.startswith("/") or _DRIVE.match(name):
        return "be relative, with parts separated by '/'"
    if any(part in {"", ".", ".."} for part in name.split("/")):
        return "have no empty part, '.' or '..'"
    return None


@functools.lru_cache(maxsize=1024)
def name_key(name: str) -> str:
    """Sixteen hexadecimal digits that stand for the name in an entry's folder name."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]
