"""Prometheus' text format, and the figures of a spool in it."""

import pytest

from uploads import Gauge, LocalStore, UploadQueue, exposition, spool_gauges
from uploads.command_line import main
from uploads.errors import SpoolError


def test_the_text_is_what_the_format_says():
    """Gauges of one name stand together, and texts of labels are escaped."""
    gauges = [
        Gauge("a_bytes", "Bytes.", 1, {"path": 'C:\\x "y"\n'}),
        Gauge("b", "A \\ and a\nline.", float("nan")),
        Gauge("a_bytes", "Bytes.", float("inf"), {"path": "z"}),
    ]

    assert exposition(gauges) == (
        "# HELP a_bytes Bytes.\n"
        "# TYPE a_bytes gauge\n"
        'a_bytes{path="C:\\\\x \\"y\\"\\n"} 1.0\n'
        'a_bytes{path="z"} +Inf\n'
        "# HELP b A \\\\ and a\\nline.\n"
        "# TYPE b gauge\n"
        "b NaN\n"
    )


class Away(LocalStore):
    """A store that cannot be reached."""

    def __init__(self):
        super().__init__(".")

    def put(self, *args, **options):
        raise ConnectionError("away")


def test_a_spool_says_what_waits(tmp_path, capsys):
    """Files, bytes and age of what waits; the command prints the same."""
    (tmp_path / "file").write_bytes(b"12345")
    queue = UploadQueue(Away(), spool=tmp_path / "spool")
    queue.submit(tmp_path / "file", "file")
    queue.close(timeout_seconds=0)

    found = {one.name: one.value for one in spool_gauges(tmp_path / "spool")}
    code = main(["status", str(tmp_path / "spool"), "--prometheus"])

    assert found["destinations_upload_waiting_files"] == 1
    assert found["destinations_upload_waiting_bytes"] == 5
    assert found["destinations_upload_oldest_waiting_seconds"] >= 0
    assert found["destinations_upload_uploader_up"] == 0
    assert code == 1
    assert "\ndestinations_upload_waiting_bytes{spool=" in capsys.readouterr().out


def test_what_is_no_spool_is_said(tmp_path):
    """As by the other commands."""
    with pytest.raises(SpoolError, match="not a spool"):
        spool_gauges(tmp_path)
