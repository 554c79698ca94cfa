"""What logging cost: the part of `sidecar.json` that says so."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .drain import Drain
    from .journal import Journal

__all__ = ["overhead_receipt", "percentile"]


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
