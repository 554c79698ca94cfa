"""Runs driven by hand: a state, a logger and an engine around one destination."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from destinations import RunDirectory
from destinations.runs.content.sources import branches_of
from events import Engine, Logger, State, Timestamp


def steps_left(run_dir: Path) -> list[list[int | None]]:
    """Returns the steps of each abandoned branch, by its first step."""
    return [[row.step for file in one.files() for row in file.rows()] for one in branches_of(run_dir)]


def lines_on_a_small_disk(disk: Path, code: str) -> list[str]:
    """Runs a program with the folder of a file system of 24 MiB, and returns the lines that it prints."""
    may_mount = ["unshare", "-m", "true"]
    if os.geteuid() != 0 or subprocess.run(may_mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("this user may not mount a file system in a namespace of its own")
    script = f"mount -t tmpfs -o size=24m tmpfs {disk} && exec {sys.executable} -c '{code}' {disk}"
    command = ["unshare", "-m", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    return [*done.stdout.splitlines(), *([done.stderr] if done.returncode else [])]


class Driven:
    """A run that a test moves: `log`, `flush`, `close`."""

    def __init__(
        self, destination: RunDirectory, *, rank: int = 0, batch: int = 0, others: tuple[Any, ...] = ()
    ) -> None:
        self.destination = destination
        self.state = State("test", rank=rank, world_size=max(1, rank + 1), timestamp=Timestamp(batch=batch))
        self.logger = Logger(self.state, [destination, *others], raise_errors=True, strict=True)
        self.engine = Engine(self.state, self.logger)
        self.engine.run_event("init")

    def fit(self) -> "Driven":
        self.engine.run_event("fit_start")
        return self

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.logger.log_metrics(metrics, step)

    def flush(self) -> None:
        """Flushes, even if that takes longer than the ten seconds that the product waits."""
        self.logger.flush()
        writer = self.destination._writer
        assert writer is None or writer.timer.flush(60)

    def stand_still(self) -> None:
        """Waits until no thread of the run is working.

        With long `flush_seconds`, none starts work before the next request.
        """
        self.flush()
        self.destination._writer._papers.environment.join(60)

    def close(self, exception: BaseException | None = None) -> None:
        self.engine.close(exception)


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside of any repository."""
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(autouse=True)
def _outside_of_any_repository(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares each run three `git` processes, which would describe the repository."""
    monkeypatch.chdir(elsewhere)


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Callable[..., Driven]]:
    """Starts runs in `tmp_path / "run"`, and closes those that a test left open."""
    with contextlib.ExitStack() as stack:

        def begin(
            run_dir: Path | None = None,
            *,
            kind: type[RunDirectory] = RunDirectory,
            rank: int = 0,
            batch: int = 0,
            others: Any = (),
            **options: Any,
        ) -> Driven:
            options = {"flush_seconds": 0.05, "close_seconds": 300.0, "if_exists": "resume", **options}
            destination = kind(run_dir or tmp_path / "run", **options)
            driven = Driven(destination, rank=rank, batch=batch, others=tuple(others))
            stack.callback(driven.engine.close)
            return driven

        yield begin
