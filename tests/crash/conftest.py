"""Servers and programs for tests that kill processes."""

import os
import subprocess
import sys

import pytest

from tests.servers import s3_servers
from tests.servers.counting_s3 import CountingS3
from uploads import command_line as commands


@pytest.fixture(scope="session")
def counting_s3():
    """A fast server that counts requests."""
    server = CountingS3()
    yield server
    server.close()


@pytest.fixture
def environment(tmp_path):
    """The environment that a child process needs to reach the servers."""
    return {
        **os.environ,
        **s3_servers.ENVIRONMENT,
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "no-credentials"),
        "AWS_CONFIG_FILE": str(tmp_path / "no-config"),
    }


@pytest.fixture
def start(environment):
    """Starts Python programs and kills those that are left when the test ends."""
    started = []

    def start(program, *arguments, before=(), **options):
        options = {
            "env": environment,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            **options,
        }
        started.append(
            subprocess.Popen([*before, sys.executable, "-c", program, *map(str, arguments)], **options)
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def resume(start):
    """Runs `python -m uploads resume SPOOL` and returns the finished process."""

    def resume(spool, *options):
        process = start(
            "import sys; from uploads.command_line import main; sys.exit(main(sys.argv[1:]))",
            "resume",
            spool,
            *options,
        )
        process.wait(300)
        return process

    return resume


@pytest.fixture
def resume_here(environment, monkeypatch):
    """Does the same in this process, which has already imported the clients; returns the exit code."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return commands.resume
