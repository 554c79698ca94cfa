"""Answers as strict JSON: by orjson where it is installed, which reads arrays at once."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

__all__ = ["encode"]

_dumps: Callable[[Any], bytes]


def _plain(value: Any) -> Any:
    """Returns a value for strict JSON without arrays and non-finite numbers."""
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value.tolist()]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _dump_plain(value: Any) -> bytes:
    return json.dumps(_plain(value), ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


try:
    import orjson
except ImportError:
    _dumps = _dump_plain
else:
    _OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS

    def _dumps(value: Any) -> bytes:
        try:
            return orjson.dumps(value, option=_OPTIONS)
        except TypeError:  # An integer beyond 64 bits, a lone surrogate, an array that is not contiguous.
            return _dump_plain(value)


def encode(answer: Any) -> bytes:
    """Returns an answer as strict JSON; numbers that are not finite are null."""
    return _dumps(answer)
