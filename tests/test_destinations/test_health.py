"""`Health`, as a monitor on the same machine sees it."""

import re
import socket
import urllib.error
import urllib.request

import pytest

from destinations import Artifacts, Health, RunDirectory
from destinations.testing import DestinationContract
from events import Run


def ask(health, path, **headers):
    """Returns the server's response."""
    request = urllib.request.Request(health.address + path, headers=headers)  # noqa: S310  # on loopback
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310  # as above
        return answer.read().decode()


def figures(text):
    """Returns the values by name and labels, and asserts that each line is well formed."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r'([a-z_]+)(\{(?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)*\})? (\S+)', line)
            found[match[1], match[2] or ""] = float(match[3])
    return found


def test_a_monitor_sees_the_run_and_its_uploads(tmp_path):
    """During the run it shows the batch, pending uploads and the time of the last successful one."""
    health = Health(0)
    (tmp_path / "file").write_bytes(b"12345")
    loggers = [
        RunDirectory(tmp_path / "run"),
        Artifacts(tmp_path / "store", spool=tmp_path / "spool"),
        health,
    ]
    with Run(loggers=loggers, run_name="digits") as run:
        run.batch_start()
        run.batch_end()
        run.upload_file("file", tmp_path / "file")
        loggers[1].queue.drain(60)

        assert ask(health, "/healthz") == "ok\n"
        found = figures(ask(health, "/metrics"))
        with pytest.raises(urllib.error.HTTPError, match="404"):
            ask(health, "/etc/passwd")
        with pytest.raises(urllib.error.HTTPError, match="403"):
            ask(health, "/metrics", Host="evil.example:9464")

    spool = f'{{spool="{tmp_path / "spool"}",store="{(tmp_path / "store").as_uri()}"}}'
    assert found["destinations_batch", '{run="digits"}'] == 1
    assert found["destinations_last_batch_seconds", '{run="digits"}'] >= 0
    assert found["destinations_upload_lost_files", '{run="digits"}'] == 0
    for what in ("waiting_rows", "dropped", "refused", "lost"):
        labels = f'{{run="digits",destination="RunDirectory",what="{what}"}}'
        assert found["destinations_records", labels] == 0
    assert found["destinations_upload_waiting_bytes", spool] == 0
    assert found["destinations_upload_uploader_up", spool] == 1
    assert found["destinations_upload_last_success_timestamp_seconds", spool] > 1e9
    assert found["destinations_upload_free_bytes", spool] > 0
    assert health.address == ""


def test_a_taken_port_is_reported_and_training_continues(tmp_path, caplog):
    """It's handled like any destination that fails `init`."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with Run(loggers=[Health(taken.getsockname()[1])]) as run:
            run.batch_start()
            run.batch_end()

    assert "Health" in caplog.text


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_out_of_range_raises(port):
    """The constructor raises."""
    with pytest.raises(ValueError, match="from 0 to 65535"):
        Health(port)


class TestHealth(DestinationContract):
    """Health keeps the contract of destinations."""

    @pytest.fixture
    def destination(self):
        """Returns a server on any free port."""
        return Health(0)
