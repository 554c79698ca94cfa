"""Turns closed parts into Parquet: beside a run in a process of its own, or here for a run that has ended.

A part is written to a temporary file beside it and read back; where every row is what the CSV reader gives,
it takes the place of the CSV: renamed first, then the CSV is removed, so that a part is there at any moment.
Only who holds the lock of the rank renames and removes. The process, which has descriptors and no paths, only
writes its temporary file; nothing waits for it, and it ends with the run.

`PartConverter` belongs to the writer thread.
"""

import contextlib
import errno
import itertools
import marshal
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import attrs

from uploads.disk import DISK, Disk, give_way, open_regular, open_temporary

from .layout import lock_name, parse_header
from .parquet import ParquetRows, StaysCsvError, write_parquet
from .reader import CsvSnapshot, MetricRow, ParquetSnapshot, Part, parse_rows, take_snapshot

if TYPE_CHECKING:
    from .metrics_csv import MetricsCsv

__all__ = ["LEAST_BYTES", "PartConverter", "convert_part", "convert_parts", "write_verified"]

LEAST_BYTES = 1 << 20
"""A smaller part stays CSV."""

_CHUNK_BYTES = 2 << 20
_LOOK_SECONDS = 10.0
_KILL_SECONDS = 0.5
_NICE = 19
_MOST_FAILURES = 3
_MOST_TEXT = 1000
# How the process ends where the part cannot be converted.
_STAYS_CSV = 3


def write_verified(
    csv: CsvSnapshot,
    fd: int,
    *,
    must_be_smaller: bool = True,
    check: Callable[[], None] = lambda: None,
    disk: Disk = DISK,
) -> None:
    """Writes the rows of a CSV to an empty file as Parquet, and compares all of them.

    Args:
        csv: the rows.
        fd: the file, open for reading and writing; it gets the times of the CSV.
        must_be_smaller: whether Parquet that takes as many bytes as the CSV is an error.
        check: called again and again; what it raises ends the work.
        disk: the disk operations.

    Raises:
        StaysCsvError: the rows cannot be written as they are, or take fewer bytes as CSV.
        OSError: the disk is full, or pyarrow is missing.
    """
    sink = _Sink(fd, disk)
    try:
        write_parquet(sink, csv.header, csv.end, lambda: _checked(csv, check))
    finally:
        sink.close()
    if must_be_smaller and sink.size >= csv.end:
        raise StaysCsvError(f"Parquet takes {sink.size} bytes, and CSV {csv.end}")
    with contextlib.closing(ParquetSnapshot(ParquetRows(os.dup(fd)))) as found:
        if (found.header, found.end) != (csv.header, csv.end):
            raise StaysCsvError("the Parquet has another header than the CSV")
        lines = itertools.chain.from_iterable(map(bytes.splitlines, found.chunks()))
        for chunk in _checked(csv, check):
            _compare(parse_header(csv.header), chunk.splitlines(), lines)
        if next(lines, None) is not None:
            raise StaysCsvError("the Parquet has more rows than the CSV")
    state = os.fstat(csv.fileno())
    os.utime(fd, ns=(state.st_atime_ns, state.st_mtime_ns))
    disk.sync(fd)


def _compare(columns: list[str], expected: list[bytes], found: Iterator[bytes]) -> None:
    """Compares the next lines, as texts and, where these differ, as what the reader makes of them.

    Raises:
        StaysCsvError: a row is missing, or is another one.
    """
    pairs = list(zip(expected, found, strict=False))
    if len(pairs) < len(expected):
        raise StaysCsvError("the Parquet has fewer rows than the CSV")
    different = [pair for pair in pairs if pair[0] != pair[1]]
    rows = [parse_rows(list(columns), [b"\n".join([*lines, b""])]) for lines in zip(*different, strict=True)]
    for one, other in zip(*rows, strict=True):
        if _bits(one) != _bits(other):
            raise StaysCsvError(f"{other} of the Parquet is {one} in the CSV"[:_MOST_TEXT])


def _checked(csv: CsvSnapshot, check: Callable[[], None]) -> Iterator[bytes]:
    for chunk in csv.chunks(chunk_bytes=_CHUNK_BYTES):
        check()
        yield chunk


def _bits(row: MetricRow) -> bytes:
    """Returns a row with each number as its type and bits, so that NaN is itself and 0.0 is not -0.0."""
    return marshal.dumps((row.step, row.epoch, row.time, row.metrics), 2)


class _Sink:
    """What pyarrow writes to: a file, by the disk operations.

    After an error, pyarrow may write the rest when its writer is collected: the descriptor is that of another
    file then. So nothing is written to a sink that is closed.
    """

    def __init__(self, fd: int, disk: Disk) -> None:
        self._fd = fd
        self._disk = disk
        self.closed = False
        self.size = 0

    def write(self, data: Any) -> int:
        if self.closed:
            raise OSError(errno.EBADF, "the Parquet file is closed")
        self._disk.write(self._fd, bytes(data), self.size)
        self.size += len(data)
        return len(data)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Does nothing: all is written."""

    def close(self) -> None:
        """Refuses to write any more; the file is the caller's, and stays open."""
        self.closed = True


@attrs.define(eq=False, slots=False)
class _Conversion:
    """A part and the temporary file that may replace its CSV; a context manager.

    Args:
        part: the part, of which the CSV is there.
        disk: the disk operations.
    """

    part: Part
    _disk: Disk

    def __attrs_post_init__(self) -> None:
        self._is_done = False
        self.csv = open_regular(self.part.csv_path)
        self._state = os.fstat(self.csv)
        try:
            self.parquet, self._name = open_temporary(self.part.parquet_path, self._disk)
        except BaseException:
            os.close(self.csv)
            raise

    def replace(self) -> bool:
        """Puts the file in the place of the CSV; False, with nothing done, if that is another file now."""
        now, csv = os.fstat(self.csv), self.part.csv_path
        is_as_before = (now.st_size, now.st_mtime_ns) == (self._state.st_size, self._state.st_mtime_ns)
        try:
            if not (is_as_before and os.path.samestat(csv.stat(), now)):
                return False
        except FileNotFoundError:
            return False
        self._disk.replace(self._name, self.part.parquet_path)
        self._disk.sync_folder(self.part.folder)
        self._is_done = True
        self._disk.unlink(csv)
        return True

    @property
    def damage(self) -> str | None:
        """What the part lacks, which is said only while it is a CSV."""
        with contextlib.closing(CsvSnapshot.of(os.dup(self.csv))) as file:
            return self.part.damage(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (self.csv, self.parquet):
            os.close(fd)
        if not self._is_done:
            with contextlib.suppress(OSError):
                self._disk.unlink(self._name)


def convert_part(part: Part, *, must_be_smaller: bool = True, disk: Disk = DISK) -> bool:
    """Turns a part into Parquet; to be called by who holds the lock of the rank.

    Args:
        part: of which the CSV is there.
        must_be_smaller: see `write_verified`.
        disk: the disk operations.

    Returns:
        Whether it was; False where its CSV is another file now.

    Raises:
        StaysCsvError: it stays CSV.
        OSError: the CSV cannot be read, the disk is full, or pyarrow is missing.
    """
    with _Conversion(part, disk) as one, contextlib.closing(CsvSnapshot.of(os.dup(one.csv))) as csv:
        if (damage := one.damage) is not None:
            raise StaysCsvError(damage)
        write_verified(csv, one.parquet, must_be_smaller=must_be_smaller, disk=disk)
        return one.replace()


def convert_parts(run_dir: Path, rank: int) -> Iterator[tuple[Part, str]]:
    """Turns the parts of a rank that are CSV into Parquet.

    Args:
        run_dir: the folder of the run, which nobody writes.
        rank: of the rows.

    Yields:
        Each part, with why it stays CSV; empty where it does not.

    Raises:
        RunInUseError: a process writes to the run.
        OSError: see `convert_part`.
    """
    from .folder import WriterLock  # imports `events`, which the process of a run has no use for

    lock = WriterLock(run_dir / lock_name(rank))
    lock.acquire()
    try:
        with take_snapshot(run_dir, rank, with_records=False) as snapshot:
            parts = [part for part in snapshot.parts if part.csv_path.exists()]
        for part in parts:
            try:
                is_done = convert_part(part)
                yield part, "" if is_done else "another program has changed it"
            except StaysCsvError as error:
                yield part, str(error)
    finally:
        lock.release()


# Beside a run.


class PartConverter:
    """Has a process turn the closed parts of a run into Parquet, one after the other.

    No call waits for the process. It is started for one part, gives way to all others, and is killed with
    the run. A part that cannot be converted stays CSV, and is not tried again.

    Args:
        csv: the CSV of the rank.
        on_failed: called with what went wrong.
        least_bytes: a smaller part stays CSV.
        look_seconds: the time between two looks for parts.
        nice: how far the process gives way, see `uploads.disk.give_way`; 0 for not at all.
        clock: monotonic seconds.
        disk: the disk operations.
    """

    def __init__(
        self,
        csv: "MetricsCsv",
        on_failed: Callable[[str], None],
        *,
        least_bytes: int = LEAST_BYTES,
        look_seconds: float = _LOOK_SECONDS,
        nice: int = _NICE,
        clock: Callable[[], float] = time.monotonic,
        disk: Disk = DISK,
    ) -> None:
        self._csv = csv
        self._on_failed = on_failed
        self._least_bytes = least_bytes
        self._look_seconds = look_seconds
        self._nice = nice
        self._clock = clock
        self._disk = disk
        self._look_at = 0.0
        self._job: tuple[subprocess.Popen[bytes], _Conversion] | None = None
        # The files that stay CSV, see `Part.identity`.
        self._left: set[tuple[int, int, int]] = set()
        self.converted = 0
        """The number of parts that were converted."""
        self.failed = 0
        """The number of parts whose conversion failed."""

    @property
    def pid(self) -> int | None:
        """The id of the process, or None if there is none."""
        job = self._job
        return None if job is None else job[0].pid

    def turn(self, *, is_last: bool = False) -> None:
        """Takes what the process has finished, and starts one for the next part.

        Args:
            is_last: whether this is the end, where none is started, and one that has not finished is killed.
        """
        if self._job is not None:
            process, conversion = self._job
            if process.poll() is None:
                if is_last:
                    process.kill()
                return
            self._job = None
            self._attempt(lambda: self._finish(process, conversion))
            self._look_at = 0.0
        if is_last or not self._csv.closed or self.failed >= _MOST_FAILURES:
            return
        if self._clock() >= self._look_at:
            self._look_at = self._clock() + self._look_seconds
            self._attempt(self._begin)

    def stop(self) -> None:
        """Kills the process, if there is one, and hardly waits for its end; its part stays CSV."""
        if self._job is None:
            return
        (process, conversion), self._job = self._job, None
        process.kill()
        try:
            process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            # It waits for a disk, or for a processor that others do not give away, to die.
            process.returncode = -signal.SIGKILL
        if process.stderr is not None:
            process.stderr.close()
        conversion.__exit__()

    def forget_in_child(self) -> None:
        """Drops the process in a forked child: it is the parent's."""
        if self._job is not None:
            self._job[0].returncode = 0  # Not a child of this process: no wait, no ResourceWarning.
            self._job = None

    def _attempt(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001  # the part stays as it is, and rows are written
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, text: str) -> None:
        self.failed += 1
        self._on_failed(text)

    def _begin(self) -> None:
        for part in self._csv.parts():
            identity = part.identity
            if part.is_parquet or identity is None or identity in self._left:
                continue
            if identity[2] >= self._least_bytes:
                self._left.add(identity)
                conversion = _Conversion(part, self._disk)
                if conversion.damage is None:
                    self._start(conversion)
                    return
                conversion.__exit__()

    def _start(self, conversion: _Conversion) -> None:
        home = str(Path(__file__).resolve().parents[2])
        fds = conversion.csv, conversion.parquet
        arguments = *fds, os.getpid(), self._nice
        try:
            # -P: a folder called `destinations` in the working directory must not stand in for this package.
            # A session of its own: Ctrl-C in the terminal is for the training process.
            process = subprocess.Popen(  # noqa: S603  # our own interpreter and module
                [sys.executable, "-P", "-m", __name__, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")])),
                },
                start_new_session=True,
                pass_fds=fds,
            )
        except BaseException:
            conversion.__exit__()
            raise
        self._job = process, conversion

    def _finish(self, process: "subprocess.Popen[bytes]", conversion: _Conversion) -> None:
        with conversion, process:
            if process.returncode == 0:
                if conversion.part.number <= self._csv.closed and conversion.replace():
                    self.converted += 1
            elif process.returncode != _STAYS_CSV:
                said = b"" if process.stderr is None else process.stderr.read(_MOST_TEXT)
                text = said.decode("utf-8", "replace").strip()
                self._fail(text or f"its process ended with exit code {process.returncode}")


def main(arguments: list[str]) -> int:
    """Converts one part, for `PartConverter`; returns the exit code.

    Args:
        arguments: the descriptors of the CSV and of the new file, the id of the process of the run, and how
            far this one gives way.
    """
    csv, parquet, parent, nice = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if nice:
        give_way(nice, is_idle=True)

    def check() -> None:
        if os.getppid() != parent:
            raise SystemExit(1)

    try:
        import pyarrow as pa

        pa.set_cpu_count(1)
        pa.set_io_thread_count(1)
        with contextlib.closing(CsvSnapshot.of(csv)) as file:
            write_verified(file, parquet, check=check)
    except StaysCsvError:
        return _STAYS_CSV
    except Exception as error:  # noqa: BLE001  # said by the process of the run
        sys.stderr.write(f"{type(error).__name__}: {error}"[:_MOST_TEXT])
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # Threads of pyarrow that have just begun would abort a process that ends by itself.
    os._exit(code)
