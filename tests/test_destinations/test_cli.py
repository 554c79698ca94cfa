"""The command line, as run in a shell."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from destinations import cli
from uploads import LocalStore, Timeouts, UploadQueue

ROOT = Path(__file__).parents[2]


class Down(LocalStore):
    """An unreachable store."""

    def put(self, *arguments, **options):
        raise ConnectionError("no route to host")


@pytest.fixture
def spool(tmp_path):
    """Returns a spool with one file that couldn't be uploaded."""
    (tmp_path / "file").write_bytes(b"content")
    queue = UploadQueue(
        Down(tmp_path / "store"),
        spool=tmp_path / "spool",
        free_bytes=0,
        timeouts=Timeouts(give_back_seconds=300),
    )
    queue.submit(tmp_path / "file", "one.bin")
    queue.close(timeout_seconds=0)
    return tmp_path / "spool"


def test_commands_finish_a_spool(spool, tmp_path, capsys):
    """`status` lists the file, `resume` uploads it, `verify` confirms it, and `status` then exits with 0."""
    assert cli.main(["uploads", "status", str(spool), "--json"]) == 1
    left = json.loads(capsys.readouterr().out)

    assert cli.main(["uploads", "resume", str(spool)]) == 0
    assert cli.main(["uploads", "verify", str(spool)]) == 0
    assert cli.main(["uploads", "status", str(spool)]) == 0

    assert "one.bin" in json.dumps(left)
    assert (tmp_path / "store" / "one.bin").read_bytes() == b"content"


def test_a_folder_that_is_no_spool_is_named(tmp_path, capsys):
    """The command prints one line and exits with the code for failures."""
    assert cli.main(["uploads", "status", str(tmp_path)]) == 4

    assert capsys.readouterr().err == f"{tmp_path} is not a spool: it has no folder pending/\n"


def test_wrong_usage_exits_with_2(capsys):
    """This is argparse's code."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["downloads"])

    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "unknown command 'downloads'; did you mean 'uploads'? See: destinations --help\n"
    )


def test_help_loads_neither_torch_nor_a_client_of_a_store():
    """The command line is quick because it imports little."""
    code = "import sys; from destinations import cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([name for name in ('torch', 'boto3', 'numpy', 'tqdm', 'PIL') if name in sys.modules])"

    outcome = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )

    assert outcome.stdout.splitlines()[-1] == "[]"
    assert "uploads" in outcome.stdout
