"""Tests the simulated month in miniature."""

from tests.benchmarks import month

SCALE = 1e-5


def test_a_month_is_written_read_shown_and_continued(tmp_path):
    """With 300 rows, every figure is measured, and pictures and checkpoints exist."""
    found = {}
    for part in month.MEASURES.values():
        found |= part(tmp_path, SCALE)

    assert {name for name, _ in month.FIGURES} <= set(found)
    assert (found["rows"], found["pictures"], found["checkpoints"]) == (300, month.PARTS, month.PARTS)
    assert len(found["writer"]) == month.PARTS
    assert len(list((tmp_path / "store").rglob("ep*.pt"))) == month.PARTS
