"""What logging cost, and what it lost: the parts of `sidecar.json` that say so."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .drain import Drain
    from .journal import Journal

__all__ = ["loss_text", "overhead_receipt", "percentile"]

_WORDS = {"early": "records logged before init", "files": "files", "media": "media and texts", "rows": "rows"}


def loss_text(lost: Mapping[str, int]) -> str:
    """Returns what was accepted and is not in the folder as a part of a sentence; empty where nothing was lost.

    Args:
        lost: how many, by "rows", "media", "files" and "early", as the sidecar has them.
    """
    return ", ".join(f"{count:,} {_WORDS.get(kind, kind)}" for kind, count in sorted(lost.items()) if count)


def percentile(values: list[int], share: float) -> int | None:
    """Returns the value below which a share of them lies, by nearest rank; None of none."""
    if not values:
        return None
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def overhead_receipt(
    journal: "Journal", drain: "Drain", csv_bytes: int, errors: dict[str, Any], media: dict[str, Any]
) -> dict[str, Any]:
    """Returns the receipt of this session.

    `calls` counts the calls of `log_metrics` whose rows are in the CSV. The microseconds are those of a call inside this
    destination, of about one call in 64, most of them with the writer thread at work.
    """
    samples = list(journal.samples_ns)
    p50, p99 = percentile(samples, 0.5), percentile(samples, 0.99)
    return {
        "calls": drain.rows,
        "samples": len(samples),
        "p50_us": None if p50 is None else p50 / 1000,
        "p99_us": None if p99 is None else p99 / 1000,
        "csv_bytes": csv_bytes,
        "csv_rewrites": drain.rewrites,
        "waiting_rows": journal.counts.waiting,
        "dropped": journal.counts.dropped,
        "refused": journal.counts.refused,
        "damaged_bytes": drain.damaged_bytes,
        "safe_on_disk_to_step": drain.durable_step,
        "media": media,
        **errors,
    }
