"""A trainer that lives as long as the soak: its memory, threads and descriptors must not grow with it."""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import attrs

from destinations.run_directory import read_rows
from destinations.runs import open_runs
from tests.soak.trainer import NAMES, STEPS_PER_FILE, difference, values
from uploads.spool.ownership import owner_of

_EVERY_SECONDS = 1.0
_STOPPED_SECONDS = 0.5
_SAMPLES_PER_STOP = 15
_BEGIN_SECONDS = 180
_CLOSE_SECONDS = 600
# The allowed growth of the median from the second third of the run to the last.
_GROWTH = {"memory": 8.0, "threads": 2.0, "descriptors": 8.0}
_GROWTH_SHARE = 0.05
_LEAST_SAMPLES = 30


@attrs.frozen
class Sample:
    """The memory of a process in MiB, and its threads and descriptors, at one moment."""

    memory: float
    threads: int
    descriptors: int


def sample_of(pid: int) -> Sample | None:
    """Returns a sample of a process, or None if it has ended."""
    about = Path(f"/proc/{pid}")
    try:
        status = dict(line.split(":", 1) for line in (about / "status").read_text().splitlines())
        return Sample(
            int(status["RssAnon"].split()[0]) / 1024,
            int(status["Threads"]),
            sum(1 for _ in (about / "fd").iterdir()),
        )
    except (OSError, KeyError):
        return None


class LongRun:
    """Starts the trainer, reads what it accepted, and samples it and its worker each second.

    Both are stopped for half a second now and then (SIGSTOP, SIGCONT), as a scheduler or a laptop does.
    """

    def __init__(self, folder: Path, uri: str, chance) -> None:
        self.folder = folder
        self.samples: dict[str, list[Sample]] = {"trainer": [], "worker": []}
        self.spool_bytes: list[int] = []
        self.segments: list[int] = []
        self.stops = 0
        self._chance = chance
        self._last = {"row": -1, "file": -1}
        self._report: dict[str, dict] | None = None
        self._is_over = threading.Event()
        self._has_begun = threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.trainer", str(folder), uri, "0", "all"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "stderr.txt").open("wb"),
        )
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._hear, self._look)]
        for thread in self._threads:
            thread.start()
        if not self._has_begun.wait(_BEGIN_SECONDS) or self._process.poll() is not None:
            self.kill()
            raise RuntimeError(f"the long run did not begin, see {folder}/stderr.txt")

    @property
    def rows(self) -> int:
        return self._last["row"] + 1

    @property
    def files(self) -> int:
        return self._last["file"] // STEPS_PER_FILE + 1

    def end(self) -> None:
        """Makes the trainer close the run, and waits for it."""
        self._is_over.set()
        self._threads[1].join()
        self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        finally:
            self._process.kill()
        self._threads[0].join()

    def kill(self) -> None:
        """Kills the trainer, after something else has failed."""
        self._is_over.set()
        self._process.kill()
        self._process.wait()

    def problems(self, objects: dict[str, bytes]) -> list[str]:
        """Returns what is missing, and what has grown.

        Args:
            objects: the contents of the store, by name.
        """
        found = []
        if self._process.returncode or self._report is None:
            found.append(f"the long run ended with {self._process.returncode}")
        found += self._missing_rows()
        newest = {
            step // STEPS_PER_FILE % NAMES: step for step in range(0, self._last["file"] + 1, STEPS_PER_FILE)
        }
        found += [
            f"n{number} of step {step} {text}"
            for number, step in newest.items()
            if (text := difference(objects.get(f"n{number}"), step))
        ]
        for name, counts in (self._report or {}).items():
            if counts["rows"] != counts["written"] + counts["counted as lost"] or counts["errors"]:
                found.append(f"{name} does not account for its rows: {counts}")
        spool = self.folder / "spool"
        left = [
            path for place in ("pending/*", "inflight/*", "failed/*/*", "tmp/*") for path in spool.glob(place)
        ]
        found += [f"{path} is left in the spool" for path in left]
        for process, samples in self.samples.items():
            found += grown(process, samples)
        return [f"{text}, in {self.folder}" for text in found]

    def figures(self) -> str:
        """Returns the figures of the second and of the last third of the run."""
        lines = [
            f"long run: {self.rows} rows, {self.files} files, stopped and continued {self.stops} times",
            f"  spool at most {max(self.spool_bytes, default=0) / (1 << 20):.1f} MiB",
            f"  journal at most {max(self.segments, default=0)} files",
        ]
        for process, samples in self.samples.items():
            middle, last = thirds(samples)
            lines += [
                f"  {process} {name}: {_median(middle, name):.1f} then {_median(last, name):.1f}"
                for name in _GROWTH
                if middle and last
            ]
        lines += [f"  {name}: {counts}" for name, counts in (self._report or {}).items()]
        return "\n".join(lines)

    def _missing_rows(self) -> list[str]:
        found = []
        with open_runs(self.folder, cache=self.folder / "cache") as runs:
            found_run = next(iter(runs.query()), None)
        if found_run is None or found_run.record.problem or str(found_run.status) != "completed":
            found.append(
                f"the run is not completed and whole: {found_run and (found_run.status, found_run.record.problem)}"
            )
        rows = {row.step: dict(row.metrics) for row in read_rows(self.folder / "run")}
        found += [
            f"row {step} is missing or damaged" for step in range(self.rows) if rows.get(step) != values(step)
        ]
        lines = (self.folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
        count = sum('"b/c"' in line for line in lines)
        if count < self.rows:
            found.append(f"log.jsonl has {count} rows of {self.rows}")
        return found

    def _hear(self) -> None:
        for line in self._process.stdout:
            what, _, rest = line.partition(b" ")
            if what == b"begun":
                self._has_begun.set()
            elif what == b"end":
                self._report = json.loads(rest)
            elif line.endswith(b"\n"):
                self._last[what.decode()] = int(rest)
        self._has_begun.set()  # Or never will.

    def _look(self) -> None:
        if not self._has_begun.wait(_BEGIN_SECONDS):
            return
        while not self._is_over.wait(_EVERY_SECONDS):
            owner = owner_of(self.folder / "spool/drain.lock")
            pids = {"trainer": self._process.pid}
            if owner and owner.get("role") == "worker":
                pids["worker"] = owner["pid"]
            for process, pid in pids.items():
                if (sample := sample_of(pid)) is not None:
                    self.samples[process].append(sample)
            self.spool_bytes.append(_bytes_in(self.folder / "spool"))
            self.segments.append(sum(1 for _ in (self.folder / "run").rglob("*.journal*")))
            if len(self.spool_bytes) % _SAMPLES_PER_STOP == 0:
                self._stop_for_a_moment(self._chance.choice(list(pids.values())))

    def _stop_for_a_moment(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(_STOPPED_SECONDS)
            os.kill(pid, signal.SIGCONT)
            self.stops += 1


def thirds(samples: list[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Returns the second and the last third; in the first, caches fill and packages are imported."""
    third = len(samples) // 3
    return samples[third : 2 * third], samples[2 * third :]


def grown(process: str, samples: list[Sample]) -> list[str]:
    """Returns what grew from the second to the last third, beyond the noise of an allocator."""
    if len(samples) < _LEAST_SAMPLES:
        return []
    middle, last = thirds(samples)
    found = []
    for name, allowed in _GROWTH.items():
        before, after = _median(middle, name), _median(last, name)
        if after > before * (1 + _GROWTH_SHARE) + allowed:
            found.append(f"the {name} of the {process} grew from {before:.1f} to {after:.1f}")
    return found


def _median(samples: list[Sample], name: str) -> float:
    return statistics.median(getattr(sample, name) for sample in samples)


def _bytes_in(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # Which passes over what disappears meanwhile.
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(parent, name)).st_size  # noqa: PTH116, PTH118  # as walk gives it
    return total
