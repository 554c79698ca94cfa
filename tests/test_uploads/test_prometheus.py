"""Prometheus' text format, and a spool's figures in it."""

import json
import math

from tests.waiting import until
from uploads import Gauge, LocalStore, UploadQueue, exposition, spool_gauges
from uploads.command_line import main


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
    """The figures have the number, size and age of waiting files; the command prints the same."""
    (tmp_path / "file").write_bytes(b"12345")
    queue = UploadQueue(Away(), spool=tmp_path / "spool")
    queue.submit(tmp_path / "file", "file")
    queue.close(timeout_seconds=0)

    found = {one.name: one.value for one in spool_gauges(tmp_path / "spool")}
    main(["status", str(tmp_path / "spool"), "--json"])
    as_json = json.loads(capsys.readouterr().out)
    code = main(["status", str(tmp_path / "spool"), "--prometheus"])

    assert found["destinations_upload_waiting_files"] == 1
    assert found["destinations_upload_waiting_bytes"] == 5
    assert found["destinations_upload_oldest_waiting_seconds"] >= 0
    assert found["destinations_upload_uploader_up"] == 0
    assert math.isnan(found["destinations_upload_last_success_timestamp_seconds"])
    assert as_json["last_success_timestamp_seconds"] is None
    for figure in ("waiting_files", "waiting_bytes", "uploader_up", "paused"):
        assert as_json[figure] == found[f"destinations_upload_{figure}"]
    assert {"oldest_waiting_seconds", "free_bytes"} <= as_json.keys()
    assert code == 1
    assert "\ndestinations_upload_waiting_bytes{spool=" in capsys.readouterr().out


def test_only_a_delivery_is_a_success(tmp_path):
    """Withdrawn and failed entries leave the spool too, without a success."""
    (tmp_path / "file").write_bytes(b"12345")
    queue = UploadQueue(Away(), spool=tmp_path / "spool")
    queue.submit(tmp_path / "file", "file")
    until(lambda: queue.withdraw("file"))
    queue.close(timeout_seconds=0)

    withdrawn = {one.name: one.value for one in spool_gauges(tmp_path / "spool")}
    with UploadQueue(tmp_path / "store", spool=tmp_path / "spool") as queue:
        queue.submit(tmp_path / "file", "file").result(60)
    delivered = {one.name: one.value for one in spool_gauges(tmp_path / "spool")}

    assert math.isnan(withdrawn["destinations_upload_last_success_timestamp_seconds"])
    assert delivered["destinations_upload_last_success_timestamp_seconds"] > 1e9
