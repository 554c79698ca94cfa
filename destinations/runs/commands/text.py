"""Formats values for a terminal: ages, durations, sizes, sparklines.

Pure functions, independent of runs.
"""

import math
from collections.abc import Sequence
from typing import Any

from destinations.text.formatting import one_line, plain, short

__all__ = [
    "NOTHING",
    "age_text",
    "bytes_text",
    "duration_text",
    "sparkline",
    "value_text",
]

NOTHING = "–"  # noqa: RUF001  # an en dash, unlike the minus sign of a number

_BARS = "▁▂▃▄▅▆▇█"
_GAP = " "
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_KIB = 1024.0


def age_text(seconds: float | None) -> str:
    """Returns an age in its largest unit: "12s", "5m", "3h", "4d"."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    seconds = max(0.0, seconds)
    for unit, size in (("d", _DAY), ("h", _HOUR), ("m", _MINUTE)):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"


def duration_text(seconds: float | None) -> str:
    """Returns a duration in two units: "12s", "5m03s", "3h20m", "4d01h"."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    whole = int(max(0.0, seconds))
    if whole >= _DAY:
        return f"{whole // _DAY}d{whole % _DAY // _HOUR:02d}h"
    if whole >= _HOUR:
        return f"{whole // _HOUR}h{whole % _HOUR // _MINUTE:02d}m"
    if whole >= _MINUTE:
        return f"{whole // _MINUTE}m{whole % _MINUTE:02d}s"
    return f"{whole}s"


def bytes_text(size: float) -> str:
    """Returns a size in binary units: "812 B", "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < _KIB:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= _KIB
    return f"{size:.1f} TiB"


def value_text(value: Any) -> str:
    """Returns any value on one line: floats rounded, None as a dash."""
    if value is None:
        return NOTHING
    if isinstance(value, float):
        return short(value)
    if isinstance(value, dict | list | tuple):
        import json

        return one_line(json.dumps(plain(value), ensure_ascii=False))
    return one_line(str(value))


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Returns a bar chart of a series in one line; each character is the mean of an equal part of the series.

    Non-finite values are skipped; a part without finite values is a space.
    """
    count = len(values)
    width = min(width, count)
    means = []
    for index in range(width):
        part = values[index * count // width : (index + 1) * count // width]
        finite = [float(value) for value in part if math.isfinite(value)]
        # Divided first: the sum may overflow.
        means.append(math.fsum(value / len(finite) for value in finite) if finite else math.nan)
    known = [mean for mean in means if math.isfinite(mean)]
    if not known:
        return ""
    low, high = min(known), max(known)
    # Halved, for the same reason.
    span = high / 2 - low / 2
    return "".join(
        _GAP
        if not math.isfinite(mean)
        else _BARS[round((mean / 2 - low / 2) / (span or 1) * (len(_BARS) - 1))]
        for mean in means
    )
