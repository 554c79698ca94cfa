"""Secrets are taken out of what is logged before any destination sees it.

Both keys and values are looked at: a key that names a secret hides its whole value, a value that looks like one hides
itself. Words that only sound like a secret (`num_tokens`, `tokenizer`, `primary_key`) are left alone.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["REDACTED", "redact", "redact_arguments", "redact_text"]

REDACTED = "[redacted]"

# A key is split into words at separators and humps, and the words are compared, so that `num_tokens` is no `token`.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_WORDS = frozenset(
    {"password", "passwd", "passphrase", "secret", "secrets", "credential", "credentials", "token"}
)
_SECRET_PAIRS = frozenset(
    {
        ("api", "key"),
        ("access", "key"),
        ("private", "key"),
        ("secret", "key"),
        ("auth", "key"),
        ("account", "key"),
    }
)
_SECRET_RUNS = frozenset({"apikey", "authtoken", "accesstoken", "accesskey", "secretkey", "privatekey"})
# `token_id`, `token_count`, `pad_token`, `eos_token`: words about a vocabulary, not about access.
_VOCABULARY_WORDS = frozenset(
    {
        *(
            "pad",
            "eos",
            "bos",
            "unk",
            "mask",
            "cls",
            "sep",
            "special",
            "num",
            "max",
            "min",
            "per",
            "total",
            "id",
            "ids",
        ),
        *(
            "count",
            "type",
            "dim",
            "len",
            "length",
            "size",
            "embedding",
            "limit",
            "budget",
            "drop",
            "merge",
            "class",
        ),
        *(
            "image",
            "text",
            "audio",
            "video",
            "in",
            "loss",
            "accuracy",
            "mean",
            "level",
            "wise",
            "learned",
            "mixing",
        ),
    }
)

_SECRET_VALUES = re.compile(
    r"""
      \b(?:AKIA|ASIA)[0-9A-Z]{16}\b                                    # AWS access key id
    | \bgh[pousr]_[A-Za-z0-9]{36,}\b | \bgithub_pat_[A-Za-z0-9_]{22,}\b  # GitHub
    | \bhf_[A-Za-z0-9]{30,}\b                                          # Hugging Face
    | \bsk-[A-Za-z0-9_-]{20,}                                          # OpenAI and others
    | \bxox[abprs]-[A-Za-z0-9-]{10,}                                   # Slack
    | https://hooks\.slack\.com/services/[A-Za-z0-9/_-]+
    | \beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+        # JSON web token
    | -----BEGIN\ [A-Z\ ]*PRIVATE\ KEY-----[\s\S]*?(?:-----END\ [A-Z\ ]*PRIVATE\ KEY-----|\Z)
    """,
    re.VERBOSE,
)
_URL_PASSWORD = re.compile(r"(?P<before>[a-z][a-z0-9+.-]*://[^/\s:@]*:)[^/\s@]+(?=@)", re.IGNORECASE)
_URL_SIGNATURE = re.compile(
    r"(?P<before>[?&](?:X-Amz-(?:Signature|Credential|Security-Token)|Signature|sig|token|api_?key|access_token)=)[^&\s\"']+",
    re.IGNORECASE,
)
_ASSIGNMENT = re.compile(
    r"(?P<before>\b(?P<key>[A-Za-z][\w.-]*)\s*(?:=|:\s)\s*)(?P<quote>[\"']?)(?P<value>[^\s\"',;&]+)(?P=quote)"
)


def redact(value: Any) -> Any:
    """Returns the value without its secrets: nested mappings, lists and tuples are gone through, strings are searched.

    What holds no secret is returned as it is; the caller's containers are never changed.
    """
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        return {
            key: REDACTED if _is_secret_key(key) and not _is_harmless(key, item) else redact(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(redact(item) for item in value)
    return value


def redact_text(text: str) -> str:
    """Returns the text with everything that looks like a secret replaced: keys, passwords in URLs, `token=…`."""
    text = _SECRET_VALUES.sub(REDACTED, text)
    text = _URL_PASSWORD.sub(rf"\g<before>{REDACTED}", text)
    text = _URL_SIGNATURE.sub(rf"\g<before>{REDACTED}", text)
    return _ASSIGNMENT.sub(_without_assigned_secret, text)


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Returns a command line without its secrets: `--api-key VALUE` and `--api-key=VALUE` both lose the value."""
    redacted: list[str] = []
    hide_next = False
    for argument in arguments:
        redacted.append(REDACTED if hide_next and not argument.startswith("-") else redact_text(argument))
        hide_next = argument.startswith("-") and "=" not in argument and _is_secret_key(argument)
    return redacted


def _without_assigned_secret(match: re.Match[str]) -> str:
    if not _is_secret_key(match["key"]) or _is_harmless(match["key"], match["value"]):
        return match[0]
    return f"{match['before']}{match['quote']}{REDACTED}{match['quote']}"


def _is_secret_key(key: object) -> bool:
    if not isinstance(key, str):
        return False
    # The last part of a dotted path is the name; what stands before it is where the name lives.
    words = [word.lower() for word in _WORD.findall(key.rsplit(".", 1)[-1])]
    if "token" in words and _VOCABULARY_WORDS.intersection(words):
        words = [word for word in words if word != "token"]
    return (
        not _SECRET_WORDS.isdisjoint(words)
        or not _SECRET_RUNS.isdisjoint(words)
        or any(pair in _SECRET_PAIRS for pair in itertools.pairwise(words))
    )


def _is_harmless(key: str, value: object) -> bool:
    """Whether the value cannot be a secret: nothing, a switch, or, where the key is about tokens, a number of them."""
    if (
        value is None
        or isinstance(value, bool)
        or str(value).lower() in {"", "true", "false", "none", "null"}
    ):
        return True
    return "token" in key.lower() and re.fullmatch(r"[\d_.e+-]{1,12}", str(value)) is not None
