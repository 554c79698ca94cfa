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
    {
        "password",
        "passwords",
        "passwd",
        "passphrase",
        "secret",
        "secrets",
        "credential",
        "credentials",
        "authorization",
    }
)
_SECRET_PAIRS = frozenset(
    {
        ("api", "key"),
        ("access", "key"),
        ("private", "key"),
        ("secret", "key"),
        ("auth", "key"),
        ("account", "key"),
        ("encryption", "key"),
        ("signing", "key"),
        ("ssh", "key"),
        ("api", "keys"),
        ("connection", "string"),
    }
)
_SECRET_RUNS = frozenset({"apikey", "authtoken", "accesstoken", "accesskey", "secretkey", "privatekey"})
# `pad_token`, `decoder_start_token`, `max_token`: words about a vocabulary or a count, not about access. What stands
# after "token" needs no list: `token_id` and `token_mixer` are not about access either, `hf_token` is.
_VOCABULARY_WORDS = frozenset(
    [
        "pad",
        "eos",
        "bos",
        "unk",
        "mask",
        "cls",
        "sep",
        "eot",
        "eod",
        "special",
        "additional",
        "start",
        "end",
        "stop",
        "begin",
        "prefix",
        "suffix",
        "prompt",
        "image",
        "text",
        "audio",
        "video",
        "first",
        "last",
        "next",
        "previous",
        "new",
        "blank",
        "boundary",
        "placeholder",
        "class",
        "learned",
        "num",
        "max",
        "min",
        "per",
        "total",
        "mean",
        "in",
    ]
)

_SECRET_VALUES = re.compile(
    r"""
      \b(?:AKIA|ASIA)[0-9A-Z]{16}\b                                    # AWS access key id
    | \bgh[pousr]_[A-Za-z0-9]{36,}\b | \bgithub_pat_[A-Za-z0-9_]{22,}\b  # GitHub
    | \bhf_[A-Za-z0-9]{30,}\b                                          # Hugging Face
    | \bglpat-[A-Za-z0-9_-]{20,}                                       # GitLab
    | \bsk-(?=[\w-]*\d)(?=[\w-]*\w{16})[\w-]{20,}                      # OpenAI and others; a name has shorter words
    | \b[sr]k_(?:live|test)_[A-Za-z0-9]{16,}                           # Stripe
    | \bAIza[A-Za-z0-9_-]{35}                                          # Google
    | \bya29\.[A-Za-z0-9_-]{20,}                                       # Google OAuth
    | \bdapi[0-9a-f]{32}                                               # Databricks
    | \bpypi-AgE[A-Za-z0-9_-]{40,} | \bnpm_[A-Za-z0-9]{36}\b           # package registries
    | \bwandb_v1_[A-Za-z0-9_]{20,}                                     # Weights & Biases
    | \b(?:xox[a-z]|xapp)-[A-Za-z0-9-]{10,}                            # Slack
    | https://hooks\.slack\.com/services/[A-Za-z0-9/_-]+
    | https://discord(?:app)?\.com/api/webhooks/[A-Za-z0-9/_-]+
    | \beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+        # JSON web token
    | -----BEGIN\ [A-Z\ ]*PRIVATE\ KEY-----[\s\S]*?(?:-----END\ [A-Z\ ]*PRIVATE\ KEY-----|\Z)
    """,
    re.VERBOSE,
)
# A password may hold an "@" of its own: the last one before the path ends it.
_URL_PASSWORD = re.compile(r"(?P<before>[a-z][a-z0-9+.-]*://[^/\s:@]*:)[^/\s]+(?=@)", re.IGNORECASE)
# The one value of two words that nobody puts in quotes.
_AUTHORIZATION = re.compile(
    r"(?P<before>\bauthorization\s*[:=]\s*)(?:Bearer|Basic|Digest|Token)\s+[^\s\"',]+"
    r"|(?P<bearer>\bBearer\s+)[\w.~+/-]{16,}=*",
    re.IGNORECASE,
)
_URL_SIGNATURE = re.compile(
    r"(?P<before>[?&](?:X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)|Signature|sig|token|api_?key|access_token)=)[^&\s\"']+",
    re.IGNORECASE,
)
# `key=`, `key: `, `"key": ` and `--key `, and the value after it: a quoted one goes to its closing quote, a bare one to the
# next space, without the punctuation that closes a sentence or a bracket.
_KEY = re.compile(
    r"""\b(?P<key>[A-Za-z][\w.-]*)(?:["'][ \t]*:|[ \t]*=|:[ \t])[ \t]*|(?<!\S)--(?P<option>[\w.-]+)[ \t]+(?!-)"""
)
_VALUE = re.compile(
    r"""[bru]{0,2}(?P<quote>["'])(?P<quoted>(?:\\.|(?!(?P=quote)).)*)"""
    r"""|(?P<bare>\[redacted\]|[^\s"'&;]*[^\s"'&;,.)\]}])"""
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
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(**redact(dict(zip(value._fields, value, strict=True))))
    if isinstance(value, list | tuple):
        return type(value)(redact(item) for item in value)
    return value


def redact_text(text: str) -> str:
    """Returns the text with everything that looks like a secret replaced: keys, passwords in URLs, `token=…`."""
    text = _SECRET_VALUES.sub(REDACTED, text)
    text = _AUTHORIZATION.sub(lambda match: (match["before"] or match["bearer"]) + REDACTED, text)
    text = _URL_PASSWORD.sub(rf"\g<before>{REDACTED}", text)
    text = _URL_SIGNATURE.sub(rf"\g<before>{REDACTED}", text)
    return _without_assigned_secrets(text)


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Returns a command line without its secrets: `--api-key VALUE` and `--api-key=VALUE` both lose the value."""
    redacted: list[str] = []
    hide_next = False
    for argument in arguments:
        name, assigns, value = argument.partition("=")
        if hide_next and not argument.startswith("--"):
            redacted.append(argument if _is_harmless(redacted[-1], argument) else REDACTED)
        elif assigns and _is_secret_key(name) and not _is_harmless(name, value):
            # All of it: the shell has taken the quotes away that said where a value with spaces ends.
            redacted.append(f"{name}={REDACTED}")
        else:
            redacted.append(redact_text(argument))
        hide_next = argument.startswith("-") and not assigns and _is_secret_key(argument)
    return redacted


def _without_assigned_secrets(text: str) -> str:
    parts, position = [], 0
    for assignment in _KEY.finditer(text):
        key = assignment["key"] or assignment["option"]
        value = _VALUE.match(text, assignment.end()) if _is_secret_key(key) else None
        if value is None or assignment.start() < position:
            continue
        group = "quoted" if value["quote"] else "bare"
        if not _is_harmless(key, value[group]):
            parts += [text[position : value.start(group)], REDACTED]
            position = value.end(group)
    return "".join((*parts, text[position:]))


def _is_secret_key(key: object) -> bool:
    if not isinstance(key, str):
        return False
    # The last part of a dotted path is the name; what stands before it is where the name lives.
    words = [word.lower() for word in _WORD.findall(key.rsplit(".", 1)[-1])]
    named = [word for word in words if not word.isdigit()]
    return (
        (named[-1:] == ["token"] and _VOCABULARY_WORDS.isdisjoint(named))
        or not _SECRET_WORDS.isdisjoint(words)
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
