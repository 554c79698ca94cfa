"""`python -m tests.soak`: runs a trainer with all destinations, and kills others, beside a server that fails.

Exits with 1 if anything accepted is missing, or if the long run grows.

The long run has all destinations; it and its worker are stopped and continued now and then. Beside it, each round
has a run and a spool of its own and three trainers in a row; the trainer, its worker or both are killed, and
`uploads resume` sends the rest. The long run and every other round send to S3 through a proxy that does everything
wrong in turn, the others to a folder. The wall clock of all these processes jumps by seconds to a year, and back.
At the end, each acknowledged row and file is looked for. `SOAK_MINUTES` limits the time (3), `SOAK_SEED` repeats the
random choices.
"""

import contextlib
import logging
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from destinations.run_directory import read_rows
from destinations.runs import open_runs
from tests.servers import s3_servers
from tests.servers.fault_proxy import FaultProxy
from tests.soak.faults import FAULTS, FaultsInTurn
from tests.soak.long_run import LongRun
from tests.soak.trainer import difference, values
from uploads import command_line as commands
from uploads.errors import SpoolOwnedError
from uploads.spool.ownership import owner_of

LIMIT_SECONDS = 300
TRAINERS = 3
DAY = 86400.0
JUMPS = (0.0, -1.0, 30.0, -3600.0, DAY, -DAY, 365 * DAY)
JUMP_SECONDS = 5.0
SHOWN = 20
IMPATIENT = "&connect_timeout_seconds=2&read_timeout_seconds=2"


def main() -> int:
    """Runs rounds until the time is up; returns the exit code."""
    minutes = float(os.environ.get("SOAK_MINUTES", "3"))
    seed = int(os.environ.get("SOAK_SEED", str(random.SystemRandom().randrange(1 << 30))))
    chance = random.Random(seed)
    deadline = time.monotonic() + 60 * minutes
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    clock = folder / "clock"
    clock.write_bytes(struct.pack("d", 0.0))
    os.environ |= {
        **s3_servers.ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(Path(__file__).with_name("clock")), os.environ.get("PYTHONPATH")])
        ),
        "SOAK_CLOCK": str(clock),
    }
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    _say(f"seed {seed}, in {folder}")
    with s3_servers.moto() as moto, contextlib.closing(FaultProxy(moto.endpoint_url)) as proxy:
        faults = proxy.plan = FaultsInTurn(proxy, chance)
        with _jumps(clock, random.Random(seed)) as jumps:
            problems = _soak(folder, chance, deadline, moto, proxy, faults)
    _say(
        f"{sum(faults.counts.values())} faults of the store: {dict(faults.counts)}; {jumps[0]} jumps of the clock"
    )
    unseen = {name for name, share, _ in FAULTS if share} - set(faults.counts)
    if unseen:
        _say(f"too short for {', '.join(sorted(unseen))}: give it more SOAK_MINUTES")
    if problems:
        _say("\n".join(problems[:SHOWN]))
        if len(problems) > SHOWN:
            _say(f"and {len(problems) - SHOWN} more")
        return 1
    shutil.rmtree(folder)
    _say("nothing lost, nothing grew")
    return 0


def _soak(folder, chance, deadline, moto, proxy, faults) -> list[str]:
    """Returns what is missing or has grown."""
    (folder / "long").mkdir()
    long_run = LongRun(folder / "long", _uri(moto, proxy, "long"), random.Random(chance.random()))
    problems: list[str] = []
    rounds = 0
    try:
        while not problems and (rounds == 0 or time.monotonic() < deadline):
            is_remote = rounds % 2 == 0
            problems = _round(folder, chance, rounds, moto if is_remote else None, proxy)
            rounds += 1
        faults.stop()
        long_run.end()
    finally:
        long_run.kill()
    problems += long_run.problems(moto.objects("long/soak"))
    _say(long_run.figures())
    _say(f"{rounds} rounds of {TRAINERS} trainers that were killed")
    return problems


def _uri(moto, proxy, prefix) -> str:
    return moto.at(proxy.url).uri(prefix) + IMPATIENT


@contextlib.contextmanager
def _jumps(clock, chance):
    """Sets the clock of all processes that read the file, every few seconds; yields the number of jumps."""
    count, is_over = [0], threading.Event()

    def jump() -> None:
        with clock.open("r+b", buffering=0) as stream:
            while not is_over.wait(JUMP_SECONDS):
                os.pwrite(stream.fileno(), struct.pack("d", chance.choice(JUMPS)), 0)
                count[0] += 1

    thread = threading.Thread(target=jump, daemon=True)
    thread.start()
    try:
        yield count
    finally:
        is_over.set()
        thread.join()


def _round(parent, chance, number, moto, proxy) -> list[str]:
    """Runs the trainers of one run; returns what is missing, and keeps the folder in that case."""
    prefix = f"round-{number}"
    folder = parent / prefix
    folder.mkdir()
    uri = str(folder / "store") if moto is None else _uri(moto, proxy, prefix)
    rows: set[int] = set()
    files: set[int] = set()
    kills = []
    for _ in range(TRAINERS):
        kills.append(chance.choice(["trainer", "worker", "both"]))
        _train(chance, folder, uri, kills[-1], rows, files)
    code = _resume(folder / "spool")
    objects = _in_folder(folder / "store" / "soak") if moto is None else moto.objects(f"{prefix}/soak")
    problems = [
        f"file n{step} {text}, in {folder}"
        for step in sorted(files)
        if (text := difference(objects.get(f"n{step}"), step))
    ]
    logged = {row.step: dict(row.metrics) for row in read_rows(folder / "run")}
    problems += [
        f"row {step} is missing or damaged, in {folder}"
        for step in sorted(rows)
        if logged.get(step) != values(step)
    ]
    problems += [f"resume ended with {code}, in {folder}"] if code else []
    with open_runs(folder, cache=folder / "cache") as runs:
        problems += [f"{run.record.problem}, in {folder}" for run in runs.query() if run.record.problem]
    _say(f"round {number} ({', '.join(kills)}): {len(files)} files, {len(rows)} rows")
    if not problems:
        shutil.rmtree(folder)
    return problems


def _train(chance, folder, uri, kill, rows, files) -> None:
    """Runs one trainer from its start until it is killed."""
    first = max(rows, default=-1) + 1
    command = [sys.executable, "-m", "tests.soak.trainer", str(folder), uri, str(first), "core"]
    with (folder / "stderr.txt").open("ab") as stderr:
        trainer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)
    for count in range(chance.randrange(1, 3000)):
        if not _hear(trainer, rows, files):
            break
        if kill == "worker" and count % 500 == 400:
            _kill_worker(folder)
    if kill == "both":
        _kill_worker(folder)
    trainer.kill()
    while _hear(trainer, rows, files):
        pass
    trainer.stdout.close()
    trainer.stdin.close()
    code = trainer.wait()
    if code != -signal.SIGKILL:
        raise RuntimeError(f"a trainer must live until it is killed, got exit code {code}: see {folder}")


def _hear(trainer, rows, files) -> bool:
    """Reads one line; returns whether there was one."""
    line = trainer.stdout.readline()
    if not line.endswith(b"\n"):
        return False
    what, step = line.split()
    if what != b"begun":
        (rows if what == b"row" else files).add(int(step))
    return True


def _kill_worker(folder) -> None:
    owner = owner_of(folder / "spool/drain.lock")
    if owner and owner.get("role") == "worker":
        with contextlib.suppress(ProcessLookupError):
            os.kill(owner["pid"], signal.SIGKILL)


def _resume(spool) -> int:
    """Sends the remaining files, after a worker that outlived its trainer has ended."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while True:
        try:
            return commands.resume(spool, timeout_seconds=LIMIT_SECONDS)
        except SpoolOwnedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _in_folder(store) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.iterdir()}


def _say(text) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
