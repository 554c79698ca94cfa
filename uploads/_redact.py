"""Takes secrets out of text that goes to a log, to a file of the spool or to a handle."""

from __future__ import annotations

import re

__all__ = ["is_secret_option", "redact"]

_PATTERNS = (
    # AWS access key ids: four letters that say what kind, then sixteen more.
    (re.compile(r"\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{16}\b"), "<redacted>"),
    # user:password@ in a URL.
    (re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"), "<redacted>"),
    # What makes a presigned URL work.
    (
        re.compile(
            r"(?i)\b(X-Amz-(?:Signature|Credential|Security-Token)|AWSAccessKeyId|Signature|sig|token)=[^&\s'\"]+"
        ),
        r"\1=<redacted>",
    ),
    (
        re.compile(
            r"(?i)\b(aws_secret_access_key|secret_access_key|aws_session_token|password)(['\"]?\s*[:=]\s*['\"]?)[^\s'\",&}]+"
        ),
        r"\1\2<redacted>",
    ),
)

_SECRET_WORDS = ("secret", "token", "password", "passphrase", "access_key", "account_key", "credential")


def redact(text: str) -> str:
    """The text with access keys, passwords in URLs and signatures replaced by `<redacted>`."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def is_secret_option(name: str) -> bool:
    """Whether a store option of this name must not be written to disk or into a URI."""
    return any(word in name.lower() for word in _SECRET_WORDS)
