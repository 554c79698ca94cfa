"""`destinations view`, as a shell runs it."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from destinations import cli
from destinations.runs.views import save_view
from destinations.viewer.catalog import page_id
from tests.test_destinations.runs.folders import write_run

ROOT = Path(__file__).parents[3]
PROGRAM = "import sys; from destinations.cli import main; sys.exit(main())"


@pytest.fixture
def root(tmp_path):
    """A folder with one run."""
    write_run(tmp_path / "runs" / "one")
    return tmp_path / "runs"


def start(root, *options, **variables):
    """Starts the command; returns its process and the printed address."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(root.parent / "cache"),
        **variables,
    }
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "view", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=root.parent,
    )
    lines = [process.stdout.readline().strip() for _ in range(2)]
    return process, lines


def status_of(url, host="127.0.0.1"):
    """Returns the status of the page at an address, after its redirect."""
    found = re.fullmatch(r"http://[^:/]+:(\d+)(/\?token=[\w-]+)", url)
    connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)
    connection.request("GET", found[2], headers={"Host": host})
    cookie = connection.getresponse().headers["Set-Cookie"].partition(";")[0]
    connection.close()
    connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)
    connection.request("GET", "/api/info", headers={"Host": host, "Cookie": cookie})
    status = connection.getresponse().status
    connection.close()
    return status


def test_it_prints_an_address_that_opens_and_ends_with_ctrl_c(root):
    """The default folder is `./runs`."""
    process, (count, url) = start(root, "--port", "0")
    try:
        status = status_of(url)
    finally:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)

    assert count == "1 run in runs"
    assert status == 200
    assert (process.returncode, out, err) == (130, "", "")


def test_a_saved_view_is_in_the_address(root):
    """The address has the fields of the view, and the page's ids of its runs."""
    run_id = json.loads((root / "one" / "sidecar.json").read_text())["run_id"]
    save_view(root, "mine", {"sort": "-summary.loss", "run": [run_id, "gone"]})
    process, (_, url) = start(root, str(root), "--port", "0", "--view", "mine")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)

    found = parse_qs(url.partition("#/runs?")[2])
    expected = {"sort": ["-summary.loss"], "run": [page_id(root / "one", [root])], "view": ["mine"]}
    assert found == expected


def test_a_server_open_to_other_machines_warns(root):
    """The command warns on stderr, and refuses names of other machines by default."""
    everywhere = "0.0.0.0"  # noqa: S104  # what is tested
    process, (_, url) = start(
        root, str(root), "--host", everywhere, "--port", "0", "--allow-host", "box.example"
    )
    try:
        statuses = [status_of(url, host) for host in ("box.example", socket.gethostname())]
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)

    assert statuses == [200, 200]
    assert err.startswith("warning: anyone who has this address and can reach http://")
    assert "not encrypted" in err


def test_a_second_server_takes_another_port(root):
    """Two servers at once have two ports."""
    first, (_, one) = start(root, str(root))
    second, (_, other) = start(root, str(root))
    try:
        statuses = [status_of(one), status_of(other)]
    finally:
        for process in (first, second):
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)

    assert statuses == [200, 200]
    assert one.partition("?")[0] != other.partition("?")[0]


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ("starlette", "pip install starlette uvicorn"),
        ("uvicorn", "pip install starlette uvicorn"),
    ],
)
def test_a_missing_package_is_named_with_what_to_install(root, missing, text):
    """The exit code is 1, and there is no traceback."""
    program = (
        "import sys, importlib.util\n"
        f"sys.modules[{missing!r}] = None\n"
        "find = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *rest: None if name == {missing!r} else find(name, *rest)\n"
        f"{PROGRAM}"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program, "view", str(root), "--port", "0"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=60,
    )

    assert finished.returncode == 1
    assert missing in finished.stderr
    assert text in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_missing_root_is_wrong_usage(tmp_path, capsys):
    """The message names it."""
    assert cli.main(["view", str(tmp_path / "nothing")]) == 2

    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--limit", "--media-mib"])
def test_a_negative_bound_is_wrong_usage(root, tmp_path, capsys, option):
    """Nothing is written."""
    assert cli.main(["view", str(root), "--export", str(tmp_path / "site"), option, "-1"]) == 2

    assert f"{option} must be 0 or more, got -1" in capsys.readouterr().err
    assert not (tmp_path / "site").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_browser_gets_the_token_in_a_file(root, number):
    """The browser gets a private file that leads to the page; the server removes it when it ends."""
    seen, opened = root.parent / "seen", root.parent / "opened"
    os.mkfifo(opened)
    browser = root.parent / "browser"
    browser.write_text(
        f'#!/bin/sh\necho "$1" > {seen}\nstat -c %a "${{1#file://}}" >> {seen}\ncat "${{1#file://}}" >> {seen}\necho opened > {opened}\n'
    )
    browser.chmod(0o755)
    process, (_, url) = start(root, "--port", "0", "--open", BROWSER=f"{browser} %s")
    try:
        status = status_of(url)
        assert opened.read_text() == "opened\n"
    finally:
        process.send_signal(number)
        process.communicate(timeout=60)

    assert process.returncode == 128 + number
    address, mode, content = seen.read_text().splitlines()
    assert status == 200
    assert address.startswith("file:///")
    assert (mode, url in content) == ("600", True)
    assert not Path(address.removeprefix("file://")).exists()
