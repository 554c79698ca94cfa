"""`python -m tests.soak`: kills trainers and workers at random until the time is over.

Ends with 1 where anything accepted is missing.

Each round has a run and a spool of its own, three trainers one after the other, and SIGKILL of the trainer,
of its worker, or of both. Every other round goes to S3 through a proxy that resets, refuses and loses
answers, the others to a folder. Afterwards `uploads resume` sends what is left, and each acknowledged file
and row is looked for. `SOAK_MINUTES` bounds it (3), `SOAK_SEED` repeats it.
"""

import contextlib
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from destinations.run_directory import read_rows
from tests.servers import s3_servers
from tests.servers.fault_proxy import Answer, FaultProxy, Reset
from tests.soak.trainer import content
from uploads import command_line as commands
from uploads.errors import SpoolOwnedError
from uploads.spool.ownership import owner_of

LIMIT_SECONDS = 300
TRAINERS = 3


def main() -> int:
    """Runs rounds until the time is over; returns the exit code."""
    minutes = float(os.environ.get("SOAK_MINUTES", "3"))
    seed = int(os.environ.get("SOAK_SEED", str(random.SystemRandom().randrange(1 << 30))))
    chance = random.Random(seed)
    deadline = time.monotonic() + 60 * minutes
    os.environ |= {
        "AWS_ACCESS_KEY_ID": s3_servers.ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": s3_servers.SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    sys.stdout.write(f"seed {seed}\n")
    rounds = 0
    with s3_servers.moto() as moto:
        proxy = FaultProxy(moto.endpoint_url)
        proxy.plan = lambda request: _fault(request, chance)
        try:
            while rounds == 0 or time.monotonic() < deadline:
                is_remote = rounds % 2 == 0
                problems = _round(chance, rounds, moto if is_remote else None, proxy)
                if problems:
                    sys.stdout.write("\n".join(problems) + "\n")
                    return 1
                rounds += 1
        finally:
            proxy.close()
    sys.stdout.write(f"{rounds} rounds, nothing lost\n")
    return 0


def _fault(request, chance):
    draw = chance.random() if request.method == "PUT" else 1.0
    if draw < 0.05:
        return Reset()
    if draw < 0.08:
        return Answer(503, "SlowDown")
    return Answer(500, "InternalError", after_forwarding=True) if draw < 0.1 else None


def _round(chance, number, moto, proxy) -> list[str]:
    """One run with its trainers; returns what is missing. Its folder is kept where anything is."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    prefix = f"round-{number}"
    uri = str(folder / "store") if moto is None else moto.at(proxy.url).uri(prefix)
    rows: set[int] = set()
    files: set[int] = set()
    kills = []
    for _ in range(TRAINERS):
        kills.append(chance.choice(["trainer", "worker", "both"]))
        _train(chance, folder, uri, kills[-1], rows, files)
    code = _resume(folder / "spool")
    objects = _in_folder(folder / "store") if moto is None else moto.objects(prefix)
    problems = [
        f"file n{step} is missing or damaged, in {folder}"
        for step in sorted(files)
        if objects.get(f"n{step}") != content(step)
    ]
    logged = {row.step: row.metrics.get("a") for row in read_rows(folder / "run")}
    problems += [
        f"row {step} is missing or damaged, in {folder}"
        for step in sorted(rows)
        if logged.get(step) != step + 0.5
    ]
    problems += [f"resume ended with {code}, in {folder}"] if code else []
    sys.stdout.write(f"round {number} ({', '.join(kills)}): {len(files)} files, {len(rows)} rows\n")
    sys.stdout.flush()
    if not problems:
        shutil.rmtree(folder)
    return problems


def _train(chance, folder, uri, kill, rows, files) -> None:
    """One trainer, from its start to its death."""
    first = max(rows, default=-1) + 1
    trainer = subprocess.Popen(
        [sys.executable, "-m", "tests.soak.trainer", str(folder), uri, str(first)], stdout=subprocess.PIPE
    )
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
    code = trainer.wait()
    if code != -signal.SIGKILL:
        raise RuntimeError(f"a trainer must live until it is killed, got exit code {code}")


def _hear(trainer, rows, files) -> bool:
    """Takes one line in; whether there was one."""
    line = trainer.stdout.readline()
    if not line.endswith(b"\n"):
        return False
    what, step = line.split()
    (rows if what == b"row" else files).add(int(step))
    return True


def _kill_worker(folder) -> None:
    owner = owner_of(folder / "spool/drain.lock")
    if owner and owner.get("role") == "worker":
        with contextlib.suppress(ProcessLookupError):
            os.kill(owner["pid"], signal.SIGKILL)


def _resume(spool) -> int:
    """Sends the rest, once a worker that outlived its trainer has ended."""
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


if __name__ == "__main__":
    sys.exit(main())
