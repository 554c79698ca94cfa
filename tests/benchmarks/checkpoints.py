"""Measures what a checkpoint costs training: `python -m tests.benchmarks.checkpoints [GiB …]`.

Several libraries save a model of so many GiB of parameters with Adam, which makes the state three times as large,
each in a process of its own. The stall is the time in which training can do nothing; the total ends when the file is
complete, "in store" when it is in a store in a folder. "Copy" is the bare copy of the same tensors into existing
memory. "Written" counts the bytes in files until the file is complete, "memory" is the peak above the start. In
shards, two ranks have half of the state each; the figures are rank 0's.

With a CUDA device, the state is on it, "copy" goes into pinned memory, and both it and the stall end when the device
is idle: kernels of the next batch would wait behind queued copies.

`python -m tests.benchmarks.checkpoints --steps [GiB]` trains on while a checkpoint is written and uploaded: a loop of
Python and one that adds to 32 MiB of memory, each in one thread. A step is compared with the same step just before,
when nothing is being written.

All sizes take about six minutes on a quiet machine. If there isn't enough memory for a row, it is left out, with a
line that says how much it needs.
"""

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

SIZES = (0.1, 1.0, 4.0)
# Small states take less time and scatter more, so they are saved more often.
SAVES, SAVES_OF_LARGE = 4, 3
BUDGET = 1.5
GIBIBYTE = 1 << 30
# The limit of one library, for a GiB of parameters.
LIMIT_SECONDS = 600.0
# For the target of the bare copy, torch, and other processes.
SPARE_BYTES = 2 * GIBIBYTE
TARGET_BYTES = GIBIBYTE
COLUMNS = ("copy", "stall", "/ copy", "first", "total", "in store", "written", "memory")
STEPS_SIZE, STEP_BYTES, IDLE_SECONDS, LEAST_STEPS = 0.3, 32 << 20, 1.0, 10
PARTS = 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Matrices, as models have: DCP's planner takes time for each row of a divided tensor.
COLUMNS_OF_PART = 1024


def main(sizes=()) -> bool:
    """Prints a table for each size that fits into memory; returns whether the budget was kept."""
    is_kept = True
    for size in [float(one) for one in sizes] or SIZES:
        print(f"\n{size:g} GiB of parameters with Adam, {size * 3:g} GiB of state", flush=True)
        if problem := _too_large(size, _Ours):
            print(problem, flush=True)
            continue
        print(f"{'':30}" + "".join(f"{name:>11}" for name in COLUMNS), flush=True)
        for kind, saver in SAVERS.items():
            if (size >= 1 and not saver.is_for_large) or (saver.ranks > 1 and DEVICE == "cuda"):
                continue
            if problem := _too_large(size, saver):
                print(f"{kind:30}{problem}", flush=True)
                continue
            found = _in_a_process(kind, size)
            if found is None:
                is_kept = is_kept and kind != "ours"
            else:
                print(f"{kind:30}" + "".join(_cell(found.get(name), name) for name in COLUMNS), flush=True)
                is_kept = is_kept and (kind != "ours" or found["/ copy"] <= BUDGET)
    print(f"\nThe budget of the stall is {BUDGET} of the copy{'.' if is_kept else ': OVER'}")
    steps()
    return is_kept


def steps(size: float = STEPS_SIZE) -> None:
    """Prints how much longer steps are while a checkpoint is written."""
    print(f"\n{size * 3:g} GiB of state: a step while it is written, to the same before", flush=True)
    print(f"{'':30}{'Python':>11}{'memory':>11}{'until':>11}", flush=True)
    for kind, saver in SAVERS.items():
        if not saver.trains_on:
            continue
        if (found := _in_a_process(kind, size, "--one-beside")) is not None:
            until = f"{found['until']:>9.1f} s"
            print(f"{kind:30}{found['Python']:>11.3f}{found['memory']:>11.3f}{until}", flush=True)


def _too_large(size, saver) -> str:
    """Returns why a library cannot save a state of this size here, or an empty text."""
    per_size = 3 * GIBIBYTE * saver.memory
    needed, available = size * per_size + SPARE_BYTES, _available()
    if needed <= available:
        return ""
    return (
        f"left out: it needs {needed / GIBIBYTE:.0f} GiB of memory, {available / GIBIBYTE:.0f} are available; "
        f"{(available - SPARE_BYTES) / per_size:.1f} GiB of parameters fit"
    )


def _cell(value, name: str) -> str:
    if value is None:
        return f"{'-':>11}"
    if name in {"written", "memory"}:
        return f"{value / GIBIBYTE:>7.2f} GiB"
    return f"{value:>11.2f}" if name == "/ copy" else f"{value:>9.3f} s"


def _available() -> int:
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("MemAvailable"))


def _in_a_process(kind: str, size: float, what: str = "--one"):
    """Returns the figures of one library; prints why and returns None if it fails or takes too long."""
    limit = LIMIT_SECONDS * max(1.0, size)
    command = [sys.executable, "-m", "tests.benchmarks.checkpoints", what, kind, str(size)]
    # In a session of its own, processes that the library started end with it.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        found, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        print(f"{kind:30}took more than {limit:.0f} s", flush=True)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    lines = found.splitlines()
    if process.returncode or not lines:
        last = errors.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        print(f"{kind:30}{last[0][:100]}", flush=True)
        return None
    return json.loads(lines[-1])


class _State:
    """A model, its optimizer after a step, and the folder to save to."""

    def __init__(self, size: float, folder: Path):
        torch.manual_seed(0)
        rows = max(1, int(size * GIBIBYTE) // 4 // PARTS // COLUMNS_OF_PART)
        self.folder = folder
        self.model = torch.nn.Module()
        for number in range(PARTS):
            self.model.register_parameter(
                f"part{number}", torch.nn.Parameter(torch.randn(rows, COLUMNS_OF_PART, device=DEVICE))
            )
        if torch.distributed.is_initialized():
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model, mesh=init_device_mesh(DEVICE, (torch.distributed.get_world_size(),)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, foreach=False)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self):
        """Returns what is saved."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self):
        """Returns all tensors of the state; of divided ones, this rank's part."""
        moments = [value for one in self.optimizer.state.values() for value in one.values()]
        every = [*self.model.state_dict().values(), *moments]
        return [one.to_local() if hasattr(one, "to_local") else one for one in every]


def _one(kind: str, size: float) -> None:
    """Saves several times; prints the medians of all but the first as JSON.

    The bare copy is measured before each save, so that other load affects both.
    """
    with contextlib.ExitStack() as stack:
        where = os.environ.get("BENCHMARK_FOLDER")
        name = sys.argv[4:5] or [
            stack.enter_context(tempfile.TemporaryDirectory(prefix="checkpoints-", dir=where))
        ]
        SAVERS[kind].join(kind, size, name[0], stack)
        state = _State(size, Path(name[0]))
        targets = _targets(state.tensors())
        saver = SAVERS[kind](state)
        before, written = _field("self", "VmRSS:"), 0
        rows = []
        saves = SAVES if size < 1 else SAVES_OF_LARGE
        for number in range(saves):
            saver.before(number)
            os.sync()
            begin = time.perf_counter()
            for target, source in zip(targets, state.tensors(), strict=True):
                target.copy_(source, non_blocking=True)
            _synchronize()
            copied = time.perf_counter() - begin
            saver.align()
            written -= _written("self") + _written(saver.writer_pid)
            begin = time.perf_counter()
            saver.save(number)
            _synchronize()
            # A training loop would be busy meanwhile; this one is not.
            stall = time.perf_counter() - begin
            saver.complete()
            rows.append([copied, stall, stall / copied, time.perf_counter() - begin])
            written += _written("self") + _written(saver.writer_pid)
            if saver.has_store:
                saver.store()
                rows[-1].append(time.perf_counter() - begin)
        medians = [statistics.median(column) for column in zip(*rows[1:], strict=True)]
        found = dict(zip(("copy", "stall", "/ copy", "total", "in store"), medians, strict=False))
        # The unshared memory of the other process.
        memory = _field("self", "VmHWM:") - before
        memory += _field(saver.writer_pid, "RssAnon:") if saver.writer_pid else 0
        found |= {"first": rows[0][1], "written": written / saves, "memory": memory}
        saver.close()
        print(json.dumps(found))


def _one_beside(kind: str, size: float) -> None:
    """Saves in turns of both loops; prints the medians of all saves but the first of each as JSON."""
    torch.set_num_threads(1)
    memory = torch.zeros(STEP_BYTES // 4)
    loops = {"Python": _python_step, "memory": lambda: memory.add_(1.0)}
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=os.environ.get("BENCHMARK_FOLDER")) as folder:
        saver = SAVERS[kind](_State(size, Path(folder)))
        found: dict[str, list[float]] = {name: [] for name in (*loops, "until")}
        for turn in range(SAVES):
            for number, (name, step) in enumerate(loops.items(), turn * len(loops)):
                saver.before(number)
                os.sync()
                end = time.perf_counter() + IDLE_SECONDS
                idle = _seconds_of_steps(step, lambda end=end: time.perf_counter() > end)
                saver.save(number)
                begin = time.perf_counter()
                found[name].append(_seconds_of_steps(step, saver.is_complete) / idle)
                saver.complete()
                found["until"].append(time.perf_counter() - begin)
        saver.close()
    print(json.dumps({name: statistics.median(values[1:]) for name, values in found.items()}))


def _python_step() -> float:
    total = 0.0
    for number in range(12_000):
        total += number * 0.5
    return total


def _seconds_of_steps(step, is_over) -> float:
    """Returns the mean of the steps until it is over, of ten at least."""
    count, begin = 0, time.perf_counter()
    while count < LEAST_STEPS or not is_over():
        step()
        count += 1
    return (time.perf_counter() - begin) / count


def _synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _targets(tensors):
    """Returns memory to copy tensors to; large tensors share it, so that it fits beside the state."""
    memory = torch.zeros(min(TARGET_BYTES, sum(one.nbytes for one in tensors)) // 4)
    if DEVICE == "cuda":
        memory = memory.pin_memory()
    targets, start = [], 0
    for one in tensors:
        start = start if start + one.numel() <= len(memory) else 0
        targets.append(memory[start : start + one.numel()].view(one.shape))
        start += one.numel()
    return targets


def _written(process) -> int:
    """Returns the bytes that a process has written to files."""
    if process is None:
        return 0
    return int(Path(f"/proc/{process}/io").read_text(encoding="ascii").split("wchar: ")[1].split()[0])


def _field(process, name: str) -> int:
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


class _Saver:
    """Saves a state in one way."""

    ranks = 1
    has_store = False
    # Whether training goes on while it writes.
    trains_on = False
    writer_pid = None
    is_for_large = True
    # As a multiple of the state, itself included.
    memory = 1.1

    @staticmethod
    def join(kind, size, folder, stack):
        """Starts other ranks."""

    def __init__(self, state):
        self.state = state

    def before(self, number):
        """Prepares a save; not measured."""

    def align(self):
        """Waits for other ranks, whose disks and copies took longer: steps of training keep ranks together."""

    def save(self, number):
        """Returns when training may continue."""

    def complete(self):
        """Waits until the file is complete."""

    def is_complete(self):
        """Returns whether the file is complete, and uploaded if it is uploaded at all, between two steps."""
        return True

    def store(self):
        """Waits until the file is in the store."""

    def close(self):
        """Ends what runs."""

    def path(self, number):
        """Returns where to save; the file before is removed, as retention would."""
        shutil.rmtree(self.state.folder / "saved", ignore_errors=True)
        (self.state.folder / "saved").mkdir()
        return self.state.folder / "saved" / str(number)


class _TorchSave(_Saver):
    def save(self, number):
        torch.save(self.state.values(), self.path(number))


class _Ours(_Saver):
    has_store = True
    trains_on = True
    memory = 2.1
    asynchronous = True
    interval = 2

    def __init__(self, state):
        from destinations import Artifacts
        from events import CheckpointSaver, CheckpointWriting, Engine, Logger, State
        from events.trainer.checkpoint.parts import RunParts

        super().__init__(state)
        self.saver = CheckpointSaver(
            state.folder / "saved",
            save_interval=f"{self.interval}ba",
            keep=1,
            writing=CheckpointWriting(asynchronous=self.asynchronous),
        )
        spool = state.folder / f"spool{os.environ.get('RANK', '0')}"
        self.artifacts = Artifacts(state.folder / "store", spool=spool, free_bytes=0, progress_bar=False)
        self.run = State("benchmark", model=state.model, optimizers=(state.optimizer,))
        self.logger = Logger(self.run, [self.artifacts], raise_errors=True)
        self.run.parts = RunParts(self.run, self.logger, {}, {})
        self.engine = Engine(self.run, self.logger, [self.saver])
        self.engine.run_event("init")
        self.engine.run_event("fit_start")

    @property
    def writer_pid(self):
        return self.saver.writer_pid

    def before(self, number):
        """Trains a batch, so that memory is prepared; a run trains for longer before its first save."""
        if number == 0:
            for _ in range(self.interval - 1):
                self.save(number)
            size = sum(one.nbytes for one in self.state.tensors())
            while self.asynchronous and self._prepared() < size:
                time.sleep(0.1)
        for old in (self.state.folder / "store").rglob("*.pt"):
            old.unlink()

    def _prepared(self):
        return _field("self", "RssShmem:")

    def save(self, number):
        self.run.timestamp = self.run.timestamp.to_next_batch(1)
        self.engine.run_event("batch_checkpoint")

    def complete(self):
        if (pending := self.saver._writing.pending) is not None:
            pending.future.result()

    def is_complete(self):
        if (pending := self.saver._writing.pending) is not None:
            if not pending.future.done():
                return False
            self.save(0)  # As in `store`.
        return self.artifacts.queue.unsettled() == 0

    def store(self):
        self.save(0)  # It is handed on at the next batch, and saved at the one after.
        self.artifacts.queue.drain(600)

    def close(self):
        self.engine.close()


class _OursSynchronous(_Ours):
    trains_on = False
    asynchronous = False
    is_for_large = False
    memory = 1.1


class _OursInShards(_Ours):
    """Rank 0 of two; the other does the same in a process of its own."""

    ranks = 2
    trains_on = False
    interval = 6

    @staticmethod
    def join(kind, size, folder, stack):
        rank = int(os.environ.get("RANK", "0"))
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        if rank == 0:
            command = [sys.executable, "-m", "tests.benchmarks.checkpoints", "--one", kind, str(size), folder]
            other = subprocess.Popen(
                command, env={**os.environ, "RANK": "1", "LOCAL_RANK": "1"}, stdout=subprocess.DEVNULL
            )
            stack.callback(other.wait, LIMIT_SECONDS)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2
        )
        stack.callback(torch.distributed.destroy_process_group)

    def align(self):
        torch.distributed.barrier()

    def complete(self):
        super().complete()
        self.save(0)  # All have written: rank 0 writes the manifest.
        super().complete()

    def store(self):
        for _ in range(self.interval - 2):  # It is handed on, then the pointer to it.
            self.save(0)
            self.artifacts.queue.drain(600)


class _Distributed(_Saver):
    def __init__(self, state):
        super().__init__(state)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{state.folder}/group", rank=0, world_size=1
        )

    def save(self, number):
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state.values(), checkpoint_id=str(self.path(number)))

    def close(self):
        torch.distributed.destroy_process_group()


class _DistributedAsynchronous(_Distributed):
    # Its copy, and the serialized bytes.
    memory = 3
    trains_on = True

    def save(self, number):
        import torch.distributed.checkpoint as dcp

        self.future = dcp.async_save(self.state.values(), checkpoint_id=str(self.path(number)))

    def complete(self):
        self.future.result()

    def is_complete(self):
        return self.future.done()


class _Lightning(_Saver):
    # Its copy, and the whole file in memory, which grows by copying.
    memory = 4
    trains_on = True

    def __init__(self, state):
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        super().__init__(state)
        self.io = AsyncCheckpointIO(TorchCheckpointIO())

    def save(self, number):
        self.target = self.path(number)
        self.io.save_checkpoint(self.state.values(), self.target)
        self.future = self.io._executor.submit(_nothing)

    def complete(self):
        self.future.result()

    def is_complete(self):
        return self.future.done()

    def close(self):
        self.io.teardown()


def _nothing():
    return None


SAVERS = {
    "ours": _Ours,
    "ours, shards of two ranks": _OursInShards,
    "ours, asynchronous=False": _OursSynchronous,
    "torch.save": _TorchSave,
    "dcp.save": _Distributed,
    "dcp.async_save": _DistributedAsynchronous,
    "Lightning, AsyncCheckpointIO": _Lightning,
}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        _one(sys.argv[2], float(sys.argv[3]))
    elif sys.argv[1:2] == ["--one-beside"]:
        _one_beside(sys.argv[2], float(sys.argv[3]))
    elif sys.argv[1:2] == ["--steps"]:
        steps(*map(float, sys.argv[2:]))
    else:
        sys.exit(0 if main(sys.argv[1:]) else 1)
