"""Shared by the tests of destinations: a terminal, and a summary line if there's no browser."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

COLUMNS = 80
NO_BROWSER = "needs a browser"


def pytest_terminal_summary(terminalreporter):
    """Reports in the last lines that the page's tests were skipped, and how to run them."""
    skipped = [one for one in terminalreporter.stats.get("skipped", []) if NO_BROWSER in str(one.longrepr)]
    if skipped:
        terminalreporter.section("no browser")
        terminalreporter.line(
            f"{len(skipped)} tests of the page were skipped: no browser. To have them: apt-get install chromium"
        )


@pytest.fixture
def terminal():
    """Returns a function that runs Python code on a pseudo-terminal and returns the lines on its screen."""
    return _run_on_terminal


def _run_on_terminal(code, rows=50):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, COLUMNS, 0, 0))
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", "NO_COLOR": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    received = b""
    try:
        while chunk := _read(ours):
            received += chunk
    finally:
        os.close(ours)
        status = process.wait(timeout=120)
    screen = _screen(received.decode())
    assert status == 0, screen
    return screen


def _read(descriptor):
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        # Linux raises EIO when the other side is closed.
        return b""


def _screen(text):
    """Returns the lines of a screen that supports only carriage return, newline and cursor up."""
    rows, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", text):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        elif token.startswith("\x1b"):
            assert token == "\x1b[A", f"unexpected control sequence {token!r}"
            row -= 1
        else:
            before, after = rows[row].ljust(column)[:column], rows[row][column + len(token) :]
            rows[row] = before + token + after
            column += len(token)
            assert column <= COLUMNS, f"line too long for the terminal: {rows[row]!r}"
    return [line.rstrip() for line in rows]
