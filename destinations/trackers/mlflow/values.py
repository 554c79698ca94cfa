"""What MLflow takes: names, times, requests of a size; and which of its errors may pass."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from destinations.background import RetryLaterError
from destinations.trackers.names import short_hash, without_surrogates
from destinations.trackers.tracker import Row, RowsRefused

__all__ = [
    "artifact_key",
    "artifact_path",
    "asked",
    "batches",
    "cell_of",
    "cut",
    "entity_key",
    "json_bytes",
    "json_list",
    "log_each",
    "may_pass",
    "merged",
    "milliseconds",
    "tag_key",
]

T = TypeVar("T")

# The limits of one request: docs of MLflow's REST API, "Log Batch".
_METRICS_AT_ONCE = 1000
_REQUEST_BYTES = 900_000
_BYTES_OF_A_METRIC = 120
_LONGEST_KEY = 250
_LONGEST_ARTIFACT_KEY = 80
_STATUSES_THAT_PASS = frozenset({429, 502, 503, 504})
_WORDS_THAT_PASS = (
    "failed with exception",
    "database is locked",
    "too many 429",
    "too many 502",
    "too many 503",
    "too many 504",
)


# --- names ---------------------------------------------------------------------------------------------------------


def entity_key(name: str) -> str:
    """Returns the key of a metric, parameter or tag: its name, where MLflow takes that.

    Taken are letters, digits, "_", "-", ".", ":", " " and "/", which must not make a path that means another; 250 at most.
    Anything else becomes "_".
    """
    key = "/".join(_parts(re.sub(r"[^/\w.\- :]", "_", name)))
    if len(key) > _LONGEST_KEY:
        key = f"{key[: _LONGEST_KEY - 7]}-{short_hash(name)}"
    return key or "unnamed"


def artifact_key(name: str) -> str:
    """Returns a name as a relative path of at most 80 letters and digits of ASCII, "_", "-", ".", " " and "/"."""
    key = "/".join(_parts(re.sub(r"[^/A-Za-z0-9_.\- ]", "_", name)))
    if len(key) > _LONGEST_ARTIFACT_KEY:
        key = f"{key[: _LONGEST_ARTIFACT_KEY - 7]}-{short_hash(name)}"
    return key if key.strip() else "unnamed"


def _parts(path: str) -> Iterator[str]:
    for part in path.split("/"):
        if part:
            yield "_" * len(part) if part in {".", ".."} else part


def artifact_path(name: str) -> str:
    """Returns a file's name as a path among the artifacts that is safe: relative, without what servers refuse."""
    return "/".join(_parts(re.sub(r"[\x00-\x1f\x7f\"':#%?*<>|\\]", "_", without_surrogates(name)))) or "file"


def tag_key(prefix: str, key: str) -> str:
    """Returns the key of a tag about a key."""
    return entity_key(prefix + key)


# --- values --------------------------------------------------------------------------------------------------------


def milliseconds(seconds: float) -> int:
    """Returns a time as MLflow has it."""
    return max(0, round(seconds * 1000))


def cut(text: str, longest: int) -> str:
    """Returns a text of no more than so many characters, with an ellipsis where something is missing."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def batches(metrics: list[Any]) -> Iterator[list[Any]]:
    """Cuts metrics into what one request may hold, by number and by bytes."""
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


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested mappings as one, the new over the old."""
    result = dict(old)
    for key, value in new.items():
        before = result.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            result[key] = merged(before, value)
        else:
            result[key] = value
    return result


def cell_of(value: Any) -> Any:
    """Returns a small array of a table as lists; anything else as it is."""
    if hasattr(value, "tolist") and getattr(value, "size", 0) <= _METRICS_AT_ONCE:
        return value.tolist()
    return value


def log_each(log: Callable[[Sequence[Row]], None], rows: Sequence[Row]) -> None:
    """Logs row by row; what MLflow has already, it does not take twice.

    Raises:
        RowsRefused: some were not taken.
    """
    failed: list[Exception] = []
    for row in rows:
        try:
            log([row])
        except RetryLaterError:
            raise
        except Exception as error:  # noqa: BLE001  # counted below
            failed.append(error)
    if failed:
        raise RowsRefused(len(failed)) from failed[-1]


def json_bytes(value: Any) -> bytes:
    """Returns strict JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def json_list(text: str | None) -> list[dict[str, str]]:
    """Reads a list; an empty one where there is none."""
    try:
        found = json.loads(text or "[]")
    except ValueError:
        return []
    return found if isinstance(found, list) else []


# --- what may pass -------------------------------------------------------------------------------------------------


def asked(request: Callable[[], T]) -> T:
    """Returns what a request returns.

    Raises:
        RetryLaterError: nobody answers, or who does is busy.
        Exception: it was refused.
    """
    try:
        return request()
    except RetryLaterError:
        raise
    except Exception as error:
        if may_pass(error):
            raise RetryLaterError from error
        raise


def may_pass(error: Exception) -> bool:
    """Says whether the same request may succeed later."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    kinds = {kind.__name__ for kind in type(error).__mro__}
    # Those of requests and urllib3, which need not be imported for it.
    if kinds & {"ConnectionError", "Timeout", "RetryError", "MaxRetryError"}:
        return True
    if "MlflowException" not in kinds:
        return False
    status = getattr(error, "get_http_status_code", int)()
    text = str(error)
    return status in _STATUSES_THAT_PASS or any(words in text for words in _WORDS_THAT_PASS)
