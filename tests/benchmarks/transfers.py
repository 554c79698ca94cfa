"""Measures uploads as ratios within one run: `python -m tests.benchmarks.transfers [SUBJECT ...]`.

The server is `rclone serve s3` on loopback, so that the client is measured. Ratios move with the machine's noise; short
turns are repeated, and the median counts.
"""

import base64
import contextlib
import hashlib
import http.client
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path

import attrs
import boto3
import psutil
from botocore.config import Config

from tests.servers import s3_servers
from uploads import UploadQueue, download_file, open_store
from uploads.stores import Body

from .timing import PRINTED, Row, Table

GIBIBYTE = 1 << 30
SMALL_FILES = 200
SMALL_BYTES = 256 << 10
TURNS = 7
LARGE_TURNS = 3
WAIT_SECONDS = 600


def main(chosen: Sequence[str] = ()) -> None:
    """Runs the chosen subjects, or all, and prints a table."""
    os.environ |= s3_servers.ENVIRONMENT
    subjects = {
        "submit": measure_submit,
        "throughput": measure_throughput,
        "large": measure_large,
        "download": measure_download,
        "folder": measure_folder,
        "stolen": measure_stolen_time,
        "scale": measure_scale,
    }
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARK_FOLDER")) as folder:
        for name in chosen or subjects:
            print(
                f"\n{name}\n{'what':58} {'measured':>12} {'compared with':>14} {'ratio':>7}  budget",
                flush=True,
            )
            place = Path(folder) / name
            place.mkdir()
            rows: list[Row] = []
            _tables.append(rows)
            subjects[name](place)
            PRINTED.append(Table(name, "compared with", tuple(rows)))
            shutil.rmtree(place)


_tables: list[list[Row]] = [[]]


def _row(
    what: str, measured: float, unit: str = "s", compared: float | None = None, budget: str = ""
) -> None:
    _tables[-1].append(Row(what, measured, None, compared, unit))
    reference = f"{compared:.3f} {unit}" if compared is not None else ""
    ratio = f"{measured / compared:.2f}" if compared else ""
    print(f"{what:58} {f'{measured:.3f} {unit}':>12} {reference:>14} {ratio:>7}  {budget}", flush=True)


def _seconds(act) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def _random_file(path: Path, size: int) -> Path:
    with path.open("wb") as stream:
        for _ in range(0, size, 1 << 24):
            stream.write(os.urandom(min(size, 1 << 24)))
    return path


def _local_queue(folder: Path) -> UploadQueue:
    """Returns a queue that doesn't upload, so that only the caller's side is measured."""
    queue = UploadQueue(folder / "store", spool=folder / "spool", free_bytes=0)
    queue._drainer._schedule.pause(3600)
    return queue


def measure_submit(folder: Path) -> None:
    """Staging: a large file copied and moved, and many small ones."""
    source = _random_file(folder / "large", GIBIBYTE)
    queue = _local_queue(folder)
    cp, copied = [], []
    for turn in range(TURNS):
        os.sync()
        cp.append(
            _seconds(lambda: subprocess.run(["cp", "--reflink=never", source, folder / "copy"], check=True))
        )
        (folder / "copy").unlink()
        os.sync()
        copied.append(_seconds(lambda turn=turn: queue.submit(source, f"copy{turn}")))
        _discard(queue)
    _row("submit 1 GiB, copy, against cp", statistics.median(copied), "s", statistics.median(cp), "<= 1.10")
    moved = _seconds(lambda: queue.submit(source, "moved", move=True))
    _row("submit 1 GiB, move=True", moved * 1000, "ms", None, "<= 5 ms")
    small = _random_file(folder / "small", 4 << 10)
    each = _seconds(lambda: [queue.submit(small, f"small{number}") for number in range(1000)])
    _row("submit 1,000 files of 4 KiB, each", each, "ms", None, "<= 1 ms")
    queue.close(0)


def _discard(queue: UploadQueue) -> None:
    for folder in queue.spool.list_pending():
        shutil.rmtree(queue.spool.pending / folder)


def measure_throughput(folder: Path) -> None:
    """Compares with bare boto3 in a thread pool of the same size."""
    small = [_random_file(folder / f"{number}", SMALL_BYTES) for number in range(SMALL_FILES)]
    with s3_servers.rclone(folder / "served") as server:
        client = _client(server)
        kinds = {
            "threads": _remote_queue(server, folder, "threads"),
            "process": _remote_queue(server, folder, "process"),
            "obstore": _remote_queue(server, folder, "threads", "&client=obstore"),
        }
        bare: list[float] = []
        checked: list[float] = []
        lean: list[float] = []
        served: list[float] = []
        ours: dict[str, list[float]] = {kind: [] for kind in kinds}
        processor: dict[str, list[float]] = {kind: [] for kind in ("bare", "lean", *kinds)}
        for turn in range(TURNS):
            before, before_served = _processor_seconds(), _processor_seconds_of(server)
            bare.append(_seconds(lambda: _put_all(client, small, 8)))
            processor["bare"].append(_processor_seconds() - before)
            served.append(_processor_seconds_of(server) - before_served)
            signed = _signed(client, small)
            before = _processor_seconds()
            lean.append(_seconds(lambda signed=signed: _put_all_leanly(signed, 8)))
            processor["lean"].append(_processor_seconds() - before)
            checked.append(_seconds(lambda: _put_all(client, small, 8, checked=True)))
            for kind, queue in kinds.items():
                before = _processor_seconds(queue)
                ours[kind].append(
                    _seconds(
                        lambda queue=queue, kind=kind, turn=turn: _submit_all(queue, small, f"{kind}{turn}")
                    )
                )
                processor[kind].append(_processor_seconds(queue) - before)
        reference = statistics.median(bare)
        _row(
            "200 x 256 KiB, put_object with our checksums, against without",
            statistics.median(checked),
            "s",
            reference,
        )
        what = "200 x 256 KiB, signed before, over bare sockets"
        _row(what, statistics.median(lean), "s", reference)
        _row(
            "200 x 256 KiB, 8 workers, threads, against put_object",
            statistics.median(ours["threads"]),
            "s",
            reference,
            "<= 1.20",
        )
        _row(
            "200 x 256 KiB, 8 workers, process, against put_object",
            statistics.median(ours["process"]),
            "s",
            reference,
            "<= 1.20",
        )
        _row(
            "200 x 256 KiB, 8 workers, obstore, against put_object",
            statistics.median(ours["obstore"]),
            "s",
            reference,
            "<= 0.60",
        )
        per_file = {
            kind: statistics.median(seconds) / SMALL_FILES * 1000 for kind, seconds in processor.items()
        }
        for kind in ("lean", *kinds):
            what = f"200 x 256 KiB: processor time for each, {kind}, all our processes"
            _row(what, per_file[kind], "ms", per_file["bare"])
        each = statistics.median(served) / SMALL_FILES * 1000
        _row("200 x 256 KiB: processor time for each, the server", each, "ms", per_file["bare"])
        for queue in kinds.values():
            queue.close(10)


def measure_large(folder: Path) -> None:
    """One large file to servers that check its CRC-32 as a whole, and the MD5 of its parts."""
    large = _random_file(folder / "large", GIBIBYTE // 2)
    for what in ("CRC-32 of the whole", "MD5"):
        place = folder / what.replace(" ", "-")
        place.mkdir()
        (place / "0").write_bytes(b"warm")
        is_aws = what.startswith("CRC-32")
        with s3_servers.moto_process() if is_aws else s3_servers.rclone(place / "served") as server:
            checksum = "aws" if is_aws else "md5"
            options = server.options.replace("&checksum=md5", "") + f"&checksum={checksum}"
            queue = _remote_queue(attrs.evolve(server, options=options), place, "threads")
            _measure_large(f"512 MiB, {what}", server, _client(server), {"threads": queue}, large)
            queue.close(10)


def measure_download(folder: Path) -> None:
    """One large object back, in turns, each to a new file."""
    large, out = _random_file(folder / "large", GIBIBYTE // 2), folder / "out"
    with s3_servers.rclone(folder / "served") as server:
        client, crc32 = _client(server), zlib.crc32(large.read_bytes())
        ours, leaner = (
            open_store(server.uri("x")),
            open_store(f"{server.uri('x').replace('&checksum=md5', '')}&client=obstore"),
        )
        with Body(large, "entry", crc32=crc32) as body:
            ours.put("large", body, overwrite=True)

        def obstore() -> None:
            import obstore

            with out.open("wb") as stream:
                for chunk in obstore.get(leaner._backend, "x/large").stream(min_chunk_size=8 << 20):
                    stream.write(chunk)

        def download(store):
            return lambda: download_file("large", out, store=store, progress_bar=False)

        acts = {
            "download_file of boto3": lambda: client.download_file(s3_servers.BUCKET, "x/large", str(out)),
            "obstore, one connection": obstore,
            "ours": download(ours),
            "ours, client=obstore": download(leaner),
        }
        _compare("512 MiB back", acts, lambda: out.unlink(missing_ok=True))


def measure_folder(folder: Path) -> None:
    """One large file to a folder on the same disk, from `submit` to `done`."""
    large, source = _random_file(folder / "large", GIBIBYTE // 2), folder / "source"
    queue = UploadQueue(folder / "store", spool=folder / "spool", free_bytes=0)

    def submit(**how):
        return lambda: queue.submit(source, "large", overwrite=True, **how).result(WAIT_SECONDS)

    def copy() -> None:
        command = ["sh", "-c", 'cp --reflink=never "$0" "$1" && sync "$1"', str(source), str(folder / "copy")]
        subprocess.run(command, check=True)

    acts = {"cp and sync": copy, "copied": submit(), "moved": submit(move=True), "linked": submit(link=True)}
    _compare("512 MiB to a folder", acts, lambda: _renew(source, large, folder / "copy"))
    queue.close(10)


def _renew(source: Path, large: Path, copy: Path) -> None:
    copy.unlink(missing_ok=True)
    source.unlink(missing_ok=True)
    shutil.copy(large, source)


def _compare(what: str, acts, prepare) -> None:
    """Runs each in turns, and prints medians of time and processor time relative to the first."""
    seconds: dict[str, list[float]] = {name: [] for name in acts}
    processor: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(LARGE_TURNS):
        for name, act in acts.items():
            prepare()
            os.sync()
            before = _processor_seconds_with_children()
            seconds[name].append(_seconds(act))
            processor[name].append(_processor_seconds_with_children() - before)
    first = next(iter(acts))
    for kind, taken in (("", seconds), (": processor time", processor)):
        reference = statistics.median(taken[first])
        for name in acts:
            _row(f"{what}{kind}, {name}", statistics.median(taken[name]), "s", reference)


def _processor_seconds_with_children() -> float:
    """User and system time of this process and of the children that it waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _measure_large(what: str, server, client, kinds: dict[str, UploadQueue], large: Path) -> None:
    """One large file against `upload_file`, in turns, each onto a disk that has nothing to write and a server that has nothing."""
    kept = [(kind, how) for kind in kinds for how in ("copied", "moved", "linked")]
    seconds: dict[tuple[str, str], list[float]] = {way: [] for way in [("bare", ""), *kept]}
    processor: dict[tuple[str, str], list[float]] = {way: [] for way in seconds}
    served: list[float] = []
    crc32 = zlib.crc32(large.read_bytes())
    for turn in range(LARGE_TURNS):
        for (kind, how), taken in seconds.items():
            source = Path(shutil.copy(large, large.with_name("large-copy")))
            os.sync()
            before, before_served = _processor_seconds(kinds.get(kind)), _processor_seconds_of(server)
            if kind == "bare":
                name = "bare/large"
                now = _seconds(lambda: client.upload_file(str(source), s3_servers.BUCKET, name))  # noqa: B023  # called at once
            else:
                name = f"{kind}-{how}-{turn}"
                now = _large_seconds(kinds[kind], source, name, how, crc32)
            taken.append(now)
            processor[kind, how].append(_processor_seconds(kinds.get(kind)) - before)
            if kind == "bare":
                served.append(_processor_seconds_of(server) - before_served)
            _empty_bucket(client)
    whole = statistics.median(seconds["bare", ""])
    alone = statistics.median(_seconds(lambda: _checksums_of(large)) for _ in range(LARGE_TURNS))
    _row(f"{what}: SHA-256, CRC-32 and MD5 alone, against upload_file", alone, "s", whole)
    for kind, how in kept:
        span = "submit to delivered"
        median = statistics.median(seconds[kind, how])
        _row(f"{what}, {kind}, {how}, {span}", median, "s", whole, "<= 1.05")
    bare = statistics.median(processor["bare", ""])
    for kind, how in kept:
        used = statistics.median(processor[kind, how])
        _row(f"{what}: processor time, {kind}, {how}, all our processes", used, "s", bare, "<= 1.15")
    _row(f"{what}: processor time, the server", statistics.median(served), "s")


def _empty_bucket(client) -> None:
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=s3_servers.BUCKET):
        for found in page.get("Contents", ()):
            client.delete_object(Bucket=s3_servers.BUCKET, Key=found["Key"])


def _checksums_of(file: Path) -> None:
    """Computes the checksums of S3Store for this server, one after the other; upload_file computes none."""
    sha256, md5, crc32 = hashlib.sha256(), hashlib.md5(usedforsecurity=False), 0
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 24):
            sha256.update(chunk)
            md5.update(chunk)
            crc32 = zlib.crc32(chunk, crc32)


def _large_seconds(queue: UploadQueue, source: Path, name: str, how: str, crc32: int) -> float:
    if how == "linked":  # As a checkpoint is, whose CRC-32 its writer knows.
        return _seconds(
            lambda: queue.submit(source, name, overwrite=True, link=True, crc32=crc32).result(WAIT_SECONDS)
        )
    return _seconds(
        lambda: queue.submit(source, name, overwrite=True, move=how == "moved").result(WAIT_SECONDS)
    )


def _worker_pid(queue: UploadQueue) -> int | None:
    """Returns the process of the queue's worker; None if threads upload."""
    worker = getattr(queue._drainer, "_worker", None)
    return None if worker is None else worker.process.pid


def _processor_seconds(queue: UploadQueue | None = None) -> float:
    """User and system time of this process and of the queue's worker, where it has one; not of the server."""
    pid = None if queue is None else _worker_pid(queue)
    worker = psutil.Process(pid).cpu_times() if pid else None
    return time.process_time() + (worker.user + worker.system if worker else 0.0)


def _processor_seconds_of(server) -> float:
    """User and system time of the server."""
    times = psutil.Process(server.pid).cpu_times()
    return times.user + times.system


def _client(server):
    config = Config(
        max_pool_connections=16, request_checksum_calculation="when_required", signature_version="s3v4"
    )
    return boto3.client("s3", endpoint_url=server.endpoint_url, config=config)


def _put_all(client, files, threads, *, checked=False) -> None:
    """With put_object and nothing else, or (`checked`) with the checksums that S3Store sends to this server."""

    def put(file):
        data = file.read_bytes()
        headers = {}
        if checked:
            md5 = hashlib.md5(data, usedforsecurity=False).digest()
            headers["ContentMD5"] = base64.b64encode(md5).decode()
            headers["Metadata"] = {"entry-id": "0" * 16, "sha256": hashlib.sha256(data).hexdigest()}
        client.put_object(Bucket=s3_servers.BUCKET, Key=f"bare/{file.name}", Body=data, **headers)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(put, files))


def _signed(client, files) -> list[tuple[str, bytes]]:
    """Where each file goes, signed, and its bytes."""
    parameters = [{"Bucket": s3_servers.BUCKET, "Key": f"lean/{file.name}"} for file in files]
    urls = [client.generate_presigned_url("put_object", Params=one) for one in parameters]
    return list(zip(urls, [file.read_bytes() for file in files], strict=True))


def _put_all_leanly(signed, threads: int) -> None:
    """The leanest client: requests signed before, over kept connections, without a checksum or a parsed answer."""

    def put(share) -> None:
        place = urllib.parse.urlsplit(signed[0][0])
        with contextlib.closing(http.client.HTTPConnection(place.hostname, place.port)) as connection:
            for url, data in share:
                connection.request("PUT", url.partition(place.netloc)[2], data)
                answer = connection.getresponse()
                if answer.status != HTTPStatus.OK:
                    raise RuntimeError(f"{answer.status}: {answer.read()!r}")
                answer.read()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(put, [signed[number::threads] for number in range(threads)]))


def _remote_queue(server, folder: Path, isolation: str, more: str = "") -> UploadQueue:
    uri = server.uri("ours").replace("&checksum=md5", "") if more else server.uri("ours")
    queue = UploadQueue(
        uri + more,
        spool=folder / f"spool-{isolation}-{more.rpartition('=')[2]}",
        isolation=isolation,
        workers=8,
        free_bytes=0,
    )
    queue.submit(folder / "0", "warm", overwrite=True).result(WAIT_SECONDS)
    return queue


def _submit_all(queue: UploadQueue, files, prefix: str) -> None:
    for file in files:
        queue.submit(file, f"{prefix}/{file.name}", overwrite=True)
    backlog = queue.drain(WAIT_SECONDS)
    if not backlog.is_empty:
        raise RuntimeError(str(backlog))


BARE_UPLOAD = """
import pathlib, sys, boto3
from concurrent.futures import ThreadPoolExecutor
client = boto3.client("s3", endpoint_url=sys.argv[1])
files = sorted(pathlib.Path(sys.argv[2]).glob("small-*"))
client.head_bucket(Bucket="bucket")
print("ready", flush=True)
sys.stdin.readline()
with ThreadPoolExecutor(4) as pool:
    list(pool.map(lambda file: client.put_object(Bucket="bucket", Key="bare/" + file.name, Body=file.read_bytes()), files))
"""


def measure_stolen_time(folder: Path) -> None:
    """Measures the time that uploads take from a loop of 1 ms steps, beyond its idle time."""
    files = [_random_file(folder / f"small-{number}", SMALL_BYTES) for number in range(600)]
    (folder / "0").write_bytes(b"warm")
    with s3_servers.rclone(folder / "served") as server:
        unrelated, own = [], []
        process = _remote_queue(server, folder, "process")
        for turn in range(3):
            unrelated.append(_stolen_by_unrelated(server, folder))
            own.append(_stolen_by(process, files, f"p{turn}"))
        reference = statistics.median(unrelated)
        _row("stolen by an unrelated uploading process", reference)
        _row(
            "stolen by isolation='process', staging not counted",
            statistics.median(own),
            "s",
            reference,
            "<= 1.10",
        )
        for name, more in (("threads", ""), ("CloudStore in threads", "&client=obstore")):
            queue = _remote_queue(server, folder, "threads", more)
            _row(f"stolen by {name}, staging not counted", _stolen_by(queue, files, name[:5]), "s", reference)
            queue.close(10)
        process.close(10)


def _step() -> float:
    total = 0.0
    for number in range(12_000):
        total += number * 0.5
    return total


def _steps_until(over) -> list[float]:
    times = []
    while not over():
        start = time.perf_counter()
        _step()
        times.append(time.perf_counter() - start)
    return times


def _idle_step_seconds() -> float:
    end = time.perf_counter() + 1.0
    return statistics.median(_steps_until(lambda: time.perf_counter() > end))


def _stolen_by(queue: UploadQueue, files, prefix: str) -> float:
    """The files are staged while the uploads are held, so that the steps see all of the uploading and nothing else."""
    idle = _idle_step_seconds()
    with _held(queue):
        for file in files:
            queue.submit(file, f"{prefix}/{file.name}", overwrite=True)
        time.sleep(2)  # The disk has them by then.
    return sum(seconds - idle for seconds in _steps_until(lambda: queue.unsettled() == 0))


@contextlib.contextmanager
def _held(queue: UploadQueue):
    """Holds all uploads: stops the worker, or the schedule of the threads."""
    pid = _worker_pid(queue)
    if pid is None:
        queue._drainer._schedule.pause(3600)
    else:
        os.kill(pid, signal.SIGSTOP)
    yield
    if pid is None:
        queue._drainer._schedule.resume()
    else:
        os.kill(pid, signal.SIGCONT)


def _stolen_by_unrelated(server, folder: Path) -> float:
    idle = _idle_step_seconds()
    process = subprocess.Popen(
        [sys.executable, "-c", BARE_UPLOAD, server.endpoint_url, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    process.stdout.readline()
    process.stdin.write(b"go\n")
    process.stdin.close()
    stolen = sum(seconds - idle for seconds in _steps_until(lambda: process.poll() is not None))
    process.stdout.close()
    return stolen


SCALE = """
import os, pathlib, resource, sys, threading, time
from uploads import LocalStore
from uploads.drain.drain import Drain
from uploads.spool.spool import Spool
spool = Spool(sys.argv[1])
drain = Drain(spool, LocalStore(sys.argv[2]), workers=8)
start = time.perf_counter()
drain.start()
started = time.perf_counter() - start
def now(): return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20, len(os.listdir("/proc/self/fd"))
samples = [now()]
while not drain.wait_idle(1.0) and len(samples) < 60: samples.append(now())
print(started, samples[0][0], max(memory for memory, _ in samples), max(count for _, count in samples), drain.status()["delivered"])
drain.stop()
"""


def _resident_bytes() -> int:
    """Returns how much memory this process has now; its greatest may be of an earlier subject."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure_scale(folder: Path) -> None:
    """A hundred thousand entries, and one file larger than memory."""
    spool_path = folder / "spool"
    queue = UploadQueue(folder / "store", spool=spool_path, free_bytes=0)
    queue._drainer._schedule.pause(3600)
    source = _random_file(folder / "source", 1 << 10)
    before = _resident_bytes()

    def submit_all() -> None:
        for number in range(100_000):
            queue.submit(source, f"n{number}")

    seconds = _seconds(submit_all)
    grown = _resident_bytes() - before
    _row("submit 100,000 entries of 1 KiB, each", seconds / 100, "ms")
    _row("    memory of the submitting process grew by", grown / (1 << 20), "MiB")
    queue.close(0)
    output = subprocess.run(
        [sys.executable, "-c", SCALE, str(spool_path), str(folder / "store")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    started, first, most, descriptors, delivered = (float(word) for word in output.split())
    _row("resume of 100,000 entries: start", started, "s", None, "< 2 s")
    _row("    memory at the start, and the most while draining", most, "MiB", first, "flat")
    _row("    descriptors, the most", descriptors, "", None, "flat")
    _row("    delivered to a folder in the first minute", delivered, "")
    shutil.rmtree(spool_path)
    _sparse(folder)


def _sparse(folder: Path) -> None:
    source = folder / "sparse"
    with source.open("wb") as stream:
        stream.truncate(20 * GIBIBYTE)
    _sparse_to(str(folder / "sparse-store"), folder, source, "20 GiB sparse file to a folder")
    shutil.rmtree(folder / "sparse-store")
    with source.open("wb") as stream:  # Smaller, for the server's sake.
        stream.truncate(4 * GIBIBYTE)
    with s3_servers.rclone(folder / "served") as server:
        _sparse_to(server.uri("sparse"), folder, source, "4 GiB sparse file to S3")


# VmHWM and not ru_maxrss, which has the memory of the process that started this one (getrusage(2),
# proc_pid_status(5)).
SPARSE = """
import pathlib, re, sys
from uploads import UploadQueue
queue = UploadQueue(sys.argv[1], spool=sys.argv[2], isolation="threads", free_bytes=0)
queue.submit(sys.argv[3], "sparse", link=True, overwrite=True)
assert queue.drain(3600).is_empty
print(re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1])
"""


def _sparse_to(store: str, folder: Path, source: Path, what: str) -> None:
    program = SPARSE
    start = time.perf_counter()
    output = subprocess.run(
        [sys.executable, "-c", program, store, str(folder / "sparse-spool"), str(source)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    _row(f"{what}: most memory of the process", int(output) / 1024, "MiB", None, "< 200 MiB")
    _row(f"{what}: time", time.perf_counter() - start)


if __name__ == "__main__":
    main(sys.argv[1:])
