"""Foreign run folders, and the commands that read them."""

import functools
import io
import shutil
import wave

import numpy as np

from destinations import cli
from destinations.runs.commands.screen import CommandContext, Screen
from tests.test_destinations.runs.written import Written

__all__ = [
    "NOW",
    "Terminal",
    "command",
    "copy_run",
    "write_full_run",
    "write_killed_run",
    "write_lightning_run",
]

NOW = 1_700_000_000.0


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self):
        return True


def command(*arguments, terminal=False, now=None, ask=None):
    """Runs a command of `destinations runs`; returns exit code, output and messages."""
    output, errors = (Terminal() if terminal else io.StringIO()), io.StringIO()
    clock = {} if now is None else {"clock": lambda: now}
    session = CommandContext(Screen(output, None, terminal, terminal), errors, wait=_never, ask=ask, **clock)
    options, options.rest = _parser().parse_known_args(["runs", *map(str, arguments)])
    code = options.run(options, session)
    return code, output.getvalue(), errors.getvalue()


@functools.cache
def _parser():
    """Returns the parser, which takes as long to build as most commands take to run."""
    return cli.build_parser(["runs"])


def _never(seconds):
    raise AssertionError("nothing to wait for")


def write_full_run(folder, **options):
    """Writes a finished run with every kind of file."""
    sound = folder.parent / "sound.wav"
    sound.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(sound), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(b"\0\1" * 80)
    with Written(folder, keep_files="copy", all_ranks=True, run_id=folder.name, **options) as run:
        run.logger.log_hyperparameters({"optim": {"lr": 0.1, "betas": [0.9, 0.99]}, "name": "adam"})
        for step in range(5):
            run.log({"loss": 2.0**-step, "val/acc": step / 4}, step)
        pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
        run.logger.log_images(
            pixels,
            "Inputs",
            channels_last=True,
            step=3,
            masks={"truth": pixels[..., 0] % 3},
            mask_class_labels={0: "sky"},
        )
        run.logger.log_audio(np.zeros(80, np.float32), 8000, "Sound", 3)
        run.logger.log_table(["a", "b"], [[1, "x"], [2, "y"]], "Table", 3)
        run.logger.log_histogram(np.arange(10.0), "Weights", 3)
        run.logger.log_text("words", "Note", 3)
        run.logger.log_point_cloud(np.zeros((4, 3), np.float32), "Cloud", 3)
        run.logger.upload_file("sound.wav", sound)
        run.flush()
    sound.unlink()
    return folder


def write_killed_run(folder):
    """Writes the folder of a killed run: rows in the CSV, and more in the journal."""
    living = folder.with_name(f"{folder.name}-living")
    with Written(living, run_id=folder.name, flush_seconds=600.0) as run:
        run.log({"loss": 1.0, "val/acc": 0.5}, 0)
        run.flush()
        for step in range(1, 5):
            run.log({"loss": 2.0**-step, "new": float(step)}, step)
        run.wait_for_environment()
        copy_run(living, folder)
    shutil.rmtree(living)
    return folder


def write_lightning_run(folder):
    """Writes a folder of Lightning's `CSVLogger`."""
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("epoch,loss,step\n0,0.5,1\n0,0.25,2\n")
    (folder / "hparams.yaml").write_text("lr: 0.1\nlayers:\n- 1\n- 2\n")
    return folder


def copy_run(source, target):
    """Copies a run, including links."""
    shutil.copytree(source, target, symlinks=True)
    return target
