"""Prometheus' text exposition format, version 0.0.4, and the figures of a spool in it."""

import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import attrs

__all__ = ["Gauge", "exposition", "gauges_of_spool"]


@attrs.frozen
class Gauge:
    """A figure that goes up and down.

    ```python
    gauge = Gauge("queue_bytes", "Bytes that wait.", 512, {"queue": "mail"})
    print(exposition([gauge]), end="")
    # # HELP queue_bytes Bytes that wait.
    # # TYPE queue_bytes gauge
    # queue_bytes{queue="mail"} 512.0
    ```

    Attributes:
        name: with its unit as suffix, such as `destinations_upload_waiting_bytes`.
        help: what it is, in a sentence.
        value: NaN where it is unknown.
        labels: what tells it from others of its name.
    """

    name: str
    help: str
    value: float
    labels: Mapping[str, str] = attrs.field(factory=dict)


def exposition(gauges: Iterable[Gauge]) -> str:
    """Returns gauges as text, grouped by name as the format wants.

    ```python
    print(exposition([Gauge("free_bytes", "Free bytes.", 10)]), end="")
    # # HELP free_bytes Free bytes.
    # # TYPE free_bytes gauge
    # free_bytes 10.0
    ```
    """
    by_name: dict[str, list[Gauge]] = {}
    for gauge in gauges:
        by_name.setdefault(gauge.name, []).append(gauge)
    lines = []
    for name, found in by_name.items():
        lines += [f"# HELP {name} {_escaped(found[0].help)}", f"# TYPE {name} gauge"]
        for gauge in found:
            labels = ",".join(f'{key}="{_quoted(text)}"' for key, text in gauge.labels.items())
            lines.append(f"{name}{f'{{{labels}}}' if labels else ''} {_number(gauge.value)}")
    return "".join(f"{line}\n" for line in lines)


def gauges_of_spool(status: Mapping[str, Any], *, now: float | None = None) -> list[Gauge]:
    """Returns the figures of what `command_line.status` says of a spool.

    Args:
        status: of the spool.
        now: seconds since 1970; None for the clock.
    """
    labels = {"spool": str(status["spool"]), "store": str(status["store"] or "")}
    now = time.time() if now is None else now
    oldest, last = status["oldest_submitted_at"], status["last_delivered_at"]
    said = status["last_said"] if status["drained_by"] else {}
    found = {
        "waiting_files": ("Files that wait to be uploaded.", status["pending"] + status["inflight"]),
        "waiting_bytes": ("Bytes of these files.", status["waiting_bytes"]),
        "oldest_waiting_seconds": (
            "How long the oldest file has waited; 0 if none waits.",
            max(0.0, now - datetime.fromisoformat(oldest).timestamp()) if oldest else 0.0,
        ),
        "free_bytes": ("Free bytes on the disk of the spool.", status["free_bytes"]),
        "last_success_timestamp_seconds": (
            "When a file was delivered last, in seconds since 1970.",
            float("nan") if last is None else last,
        ),
        "uploader_up": ("Whether a process uploads from the spool.", status["drained_by"] is not None),
        "paused": (
            "Whether uploads are paused, since the store refuses them.",
            bool(said.get("parked_because")),
        ),
    }
    gauges = [
        Gauge(f"destinations_upload_{name}", text, value, labels) for name, (text, value) in found.items()
    ]
    return gauges + [
        Gauge(
            "destinations_upload_failed_files", "Files that were given up.", count, {**labels, "state": state}
        )
        for state, count in status["failed"].items()
    ]


def _number(value: float) -> str:
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(text := repr(float(value)), text)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', r"\"")
