"""Converts names and values to what MLflow accepts, splits requests, and classifies its errors."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from destinations.background import RetryLaterError
from destinations.trackers.names import short_hash, without_surrogates

__all__ = [
    "artifact_key",
    "artifact_path",
    "batches",
    "call_service",
    "cut",
    "entity_key",
    "is_transient",
    "json_bytes",
    "json_list",
    "milliseconds",
    "tag_key",
]

T = TypeVar("T")

# Limits of a request: MLflow REST API, "Log Batch".
_METRICS_AT_ONCE = 1000
_REQUEST_BYTES = 900_000
_BYTES_OF_A_METRIC = 120
_MAX_KEY = 250
_MAX_ARTIFACT_KEY = 80
_TRANSIENT_STATUSES = frozenset({429, 502, 503, 504})
_TRANSIENT_MESSAGES = (
    "failed with exception",
    "database is locked",
    "too many 429",
    "too many 502",
    "too many 503",
    "too many 504",
)


# Names.


def entity_key(name: str) -> str:
    """Returns the key of a metric, parameter or tag: its name, if valid in MLflow.

    Valid are at most 250 letters, digits, "_", "-", ".", ":", " " and "/", the latter not as in "a//b" or
    "../a". Other characters become "_".
    """
    key = "/".join(_parts(re.sub(r"[^/\w.\- :]", "_", name)))
    if len(key) > _MAX_KEY:
        key = f"{key[: _MAX_KEY - 7]}-{short_hash(name)}"
    return key or "unnamed"


def artifact_key(name: str) -> str:
    """Returns a name as a relative path of at most 80 ASCII letters, digits, "_", "-", ".", " " and "/"."""
    key = "/".join(_parts(re.sub(r"[^/A-Za-z0-9_.\- ]", "_", name)))
    if len(key) > _MAX_ARTIFACT_KEY:
        key = f"{key[: _MAX_ARTIFACT_KEY - 7]}-{short_hash(name)}"
    return key if key.strip() else "unnamed"


def _parts(path: str) -> Iterator[str]:
    for part in path.split("/"):
        if part:
            yield "_" * len(part) if part in {".", ".."} else part


def artifact_path(name: str) -> str:
    """Returns the name of a file as a relative artifact path, without characters that servers reject."""
    return "/".join(_parts(re.sub(r"[\x00-\x1f\x7f\"':#%?*<>|\\]", "_", without_surrogates(name)))) or "file"


def tag_key(prefix: str, key: str) -> str:
    """Returns the key of a tag that describes another key."""
    return entity_key(prefix + key)


# Values.


def milliseconds(seconds: float) -> int:
    """Returns a time in milliseconds, as in MLflow."""
    return max(0, round(seconds * 1000))


def cut(text: str, longest: int) -> str:
    """Returns the text truncated to `longest` characters, with an ellipsis."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def batches(metrics: list[Any]) -> Iterator[list[Any]]:
    """Splits metrics into requests, by number and by bytes."""
    batch: list[Any] = []
    size = 0
    for metric in metrics:
        key = metric.key
        more = _BYTES_OF_A_METRIC + (len(key) if key.isascii() else 12 * len(key))
        if batch and (len(batch) == _METRICS_AT_ONCE or size + more > _REQUEST_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(metric)
        size += more
    if batch:
        yield batch


def json_bytes(value: Any) -> bytes:
    """Encodes a value as strict JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def json_list(text: str | None) -> list[dict[str, str]]:
    """Parses a JSON list; returns an empty one if there is none."""
    try:
        found = json.loads(text or "[]")
    except ValueError:
        return []
    return found if isinstance(found, list) else []


# Errors.


def call_service(request: Callable[[], T]) -> T:
    """Calls `request` and returns its result.

    Raises:
        RetryLaterError: transient failure: the server is unreachable or busy.
        Exception: permanent failure.
    """
    try:
        return request()
    except RetryLaterError:
        raise
    except Exception as error:
        if is_transient(error):
            raise RetryLaterError from error
        raise


def is_transient(error: Exception) -> bool:
    """Returns whether a retry may succeed."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    # Errors of Python, requests and urllib3, matched by name to avoid importing the latter two.
    if kinds & {"ConnectionError", "TimeoutError", "Timeout", "RetryError", "MaxRetryError"}:
        return True
    if "MlflowException" not in kinds:
        return False
    status = getattr(error, "get_http_status_code", int)()
    text = str(error)
    return status in _TRANSIENT_STATUSES or any(words in text for words in _TRANSIENT_MESSAGES)
