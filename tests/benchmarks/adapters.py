"""Measures our destinations in other people's trainers: `python -m tests.benchmarks adapters`.

Each system trains a tiny model for a thousand steps on the CPU, with ten metrics in each. In a round, the systems
run one after another in one process, so that they meet the same load; the median over rounds counts. Tiny steps
make the cost of logging as visible as it can be.
"""

import contextlib
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 1000
METRICS = 10
ROUNDS = 3

System = Callable[[Path], "contextlib.AbstractContextManager[Callable[[], Any]]"]


def main() -> None:
    """Measures each framework in a process of its own, and prints."""
    for framework, name in (("lightning", "Lightning"), ("transformers", "Hugging Face")):
        command = [sys.executable, "-m", "tests.benchmarks.adapters", framework]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        if "ModuleNotFoundError" in done.stderr or "this adapter needs the package" in done.stderr:
            print(f"{name}: not installed")
            continue
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        show(name, json.loads(done.stdout.splitlines()[-1]))
    command = [sys.executable, "-m", "tests.benchmarks.adapters", "calls"]
    print(subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout, end="")


def show(name: str, taken: dict[str, list[list[float]]]) -> None:
    """Prints the medians, and their ratio to training without a logger."""
    print(
        f"{name}, {STEPS:,} steps, {METRICS} metrics in each, ms of processor time a step (median of {ROUNDS} rounds)"
    )
    for system, rounds in taken.items():
        cells = []
        for place, what in enumerate(("training thread", "whole process")):
            median = 1000 * statistics.median(one[place] for one in rounds) / STEPS
            ratio = statistics.median(
                one[place] / none[place] for one, none in zip(rounds, taken["none"], strict=True)
            )
            cells.append(f"{what} {median:6.3f} (ratio to none {ratio:5.2f})")
        print(f"  {system:44} {'   '.join(cells)}")


def measure(systems: dict[str, System]) -> dict[str, list[list[float]]]:
    """Returns the seconds of the training thread and of the process, for each system and round, after one for warmth."""
    taken: dict[str, list[list[float]]] = {name: [] for name in systems}
    for index in range(ROUNDS + 1):
        for name, system in systems.items():
            start = time.thread_time(), time.process_time()
            with tempfile.TemporaryDirectory() as folder, system(Path(folder)) as train:
                # Making a trainer is not counted; closing the destinations is.
                start = time.thread_time(), time.process_time()
                train()
            end = time.thread_time(), time.process_time()
            if index:
                taken[name].append([after - before for before, after in zip(start, end, strict=True)])
    return taken


def print_calls() -> None:
    """Prints what a logger takes by itself: `log_metrics` and `save`, which Lightning calls after each record."""
    from lightning.pytorch.loggers import CSVLogger

    from destinations import RunDirectory
    from destinations.adapters.lightning_logger import LightningLogger

    row = {f"train/m{index}": 0.5 * index for index in range(METRICS)}
    with tempfile.TemporaryDirectory() as folder:
        loggers = {
            "LightningLogger(RunDirectory)": LightningLogger(RunDirectory(Path(folder) / "run")),
            "CSVLogger": CSVLogger(folder),
        }
        print(
            f"Lightning, one record of {METRICS} metrics: log_metrics and save, µs of processor time on the training thread"
        )
        for name, logger in loggers.items():
            times = []
            for step in range(2 * STEPS):
                start = time.thread_time_ns()
                logger.log_metrics(metrics=row, step=step)
                logger.save()
                times.append(time.thread_time_ns() - start)
            print(
                f"  {name:44} p50 {statistics.median(times) / 1000:8.1f}   mean {statistics.fmean(times) / 1000:8.1f}"
            )
        loggers["LightningLogger(RunDirectory)"].close()


# Lightning.


def lightning_systems() -> dict[str, System]:
    """Returns how to train with each logger of Lightning's."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger

    from destinations import RunDirectory
    from destinations.adapters.lightning_logger import LightningLogger

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Tiny(LightningModule):
        """One layer, and ten metrics a step."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            """Logs."""
            loss = self.layer(batch).mean()
            self.log_dict({f"train/m{index}": loss for index in range(METRICS)})
            return loss

        def configure_optimizers(self) -> Any:
            """Gives the cheapest."""
            return torch.optim.SGD(self.parameters(), lr=0.001)

    data = torch.utils.data.DataLoader(torch.randn(STEPS, 4), batch_size=1)

    def trainer(logger: Any, callbacks: list[Any], folder: Path) -> Callable[[], Any]:
        made = Trainer(
            accelerator="cpu",
            logger=logger,
            callbacks=callbacks,
            max_epochs=1,
            log_every_n_steps=1,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        return lambda: made.fit(Tiny(), data)

    @contextlib.contextmanager
    def without(folder: Path) -> Any:
        yield trainer(logger=False, callbacks=[], folder=folder)

    @contextlib.contextmanager
    def csv(folder: Path) -> Any:
        yield trainer(CSVLogger(folder), [], folder)

    @contextlib.contextmanager
    def ours(folder: Path) -> Any:
        with LightningLogger(RunDirectory(folder / "run")) as logger:
            yield trainer(logger, [], folder)

    @contextlib.contextmanager
    def ours_with_events(folder: Path) -> Any:
        with LightningLogger(RunDirectory(folder / "run")) as logger:
            yield trainer(logger, [logger.callback()], folder)

    return {
        "none": without,
        "LightningLogger(RunDirectory)": ours,
        "LightningLogger(RunDirectory) + callback()": ours_with_events,
        "CSVLogger": csv,
    }


# Hugging Face.


def transformers_systems() -> dict[str, System]:
    """Returns how to train with each logger of Hugging Face's."""
    import torch
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    from destinations import RunDirectory
    from destinations.adapters.hugging_face import TransformersCallback

    class Tiny(torch.nn.Module):
        """One layer."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: Any, labels: Any = None) -> Any:
            """Returns a loss, and as many outputs as any model of theirs."""
            outputs = self.layer(x)
            return {"loss": (outputs.squeeze(-1) - labels).square().mean(), "logits": outputs}

    data = [{"x": torch.randn(4), "labels": torch.tensor(0.0)} for _ in range(STEPS)]

    def trainer(report_to: str, callbacks: list[Any], folder: Path) -> Callable[[], Any]:
        class Ten(Trainer):
            """Logs ten values a step."""

            def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
                """Adds what is missing to ten."""
                for index in range(METRICS - len(logs) - 1):
                    logs[f"m{index}"] = 0.5 * index
                super().log(logs, *args, **kwargs)

        arguments = TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=1,
            per_device_train_batch_size=1,
            logging_steps=1,
            report_to=report_to,
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            dataloader_pin_memory=False,
        )
        made = Ten(Tiny(), arguments, train_dataset=data, callbacks=callbacks)
        made.remove_callback(PrinterCallback)
        return made.train

    @contextlib.contextmanager
    def without(folder: Path) -> Any:
        yield trainer("none", [], folder)

    @contextlib.contextmanager
    def ours(folder: Path) -> Any:
        with TransformersCallback(RunDirectory(folder / "run")) as callback:
            yield trainer("none", [callback], folder)

    @contextlib.contextmanager
    def tensorboard(folder: Path) -> Any:
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "tensorboard")
        yield trainer("tensorboard", [], folder)

    return {
        "none": without,
        "TransformersCallback(RunDirectory)": ours,
        'report_to="tensorboard"': tensorboard,
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1] == "calls":
        print_calls()
        sys.exit()
    systems = {"lightning": lightning_systems, "transformers": transformers_systems}[sys.argv[1]]()
    print(json.dumps(measure(systems)))
