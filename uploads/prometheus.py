"""Prometheus' text exposition format, version 0.0.4, and the figures of a spool in it."""

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

__all__ = ["Gauge", "exposition", "gauges_of_spool"]


@attrs.frozen
class Gauge:
    """A metric of Prometheus that can go up and down.

    ```python
    gauge = Gauge("queue_bytes", "Bytes that wait.", 512, {"queue": "mail"})
    print(exposition([gauge]), end="")
    # # HELP queue_bytes Bytes that wait.
    # # TYPE queue_bytes gauge
    # queue_bytes{queue="mail"} 512.0
    ```

    Attributes:
        name: the name with its unit as suffix, such as `destinations_upload_waiting_bytes`.
        help: a sentence that describes it.
        value: NaN if it is unknown.
        labels: distinguish gauges of the same name.
    """

    name: str
    help: str
    value: float
    labels: Mapping[str, str] = attrs.field(factory=dict)


def exposition(gauges: Iterable[Gauge]) -> str:
    """Returns gauges in the text format of Prometheus, grouped by name.

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


_OF_A_SPOOL = {
    "waiting_files": "Files that wait to be uploaded.",
    "waiting_bytes": "Bytes of these files.",
    "oldest_waiting_seconds": "How long the oldest file has waited; 0 if none waits.",
    "last_success_timestamp_seconds": "When a file was delivered last, in seconds since 1970.",
    "free_bytes": "Free bytes on the disk of the spool.",
    "uploader_up": "Whether a process uploads from the spool.",
    "paused": "Whether uploads are paused, since the store refuses them.",
}


def gauges_of_spool(status: Mapping[str, Any]) -> list[Gauge]:
    """Returns the gauges of a spool from the result of `command_line.status`."""
    labels = {"spool": str(status["spool"]), "store": str(status["store"] or "")}
    found = {name: float("nan") if status[name] is None else status[name] for name in _OF_A_SPOOL}
    return [
        *(
            Gauge(f"destinations_upload_{name}", text, found[name], labels)
            for name, text in _OF_A_SPOOL.items()
        ),
        *(
            Gauge(
                "destinations_upload_failed_files",
                "Files that were given up.",
                count,
                {**labels, "state": state},
            )
            for state, count in status["failed"].items()
        ),
    ]


def _number(value: float) -> str:
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(text := repr(float(value)), text)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', r"\"")
