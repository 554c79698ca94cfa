"""Runs for the tests in a browser, written by the real `RunDirectory`."""

import json
import math

import numpy as np

from tests.test_destinations.runs.written import Written

LONG = 20_000
SPIKE_AT = 12_345
HOSTILE = '<img src=x onerror="document.title=1">'


def write_runs(root):
    """Writes two short runs with media, seeds of one setting, a long run with a spike, and hostile texts."""
    generator = np.random.default_rng(0)
    with Written(root / "alpha", tags=["baseline"]) as run:
        run.logger.log_hyperparameters({"lr": 0.1, "seed": 1, "model": "small"})
        for step in range(200):
            run.log({"loss": 1 / (1 + step), "val/acc": 1 - 1 / (2 + step)}, step)
        for step, shade in [(0, 0.0), (100, 0.5), (199, 1.0)]:
            write_media(run, generator, step, shade)
    with Written(root / "beta") as run:
        run.logger.log_hyperparameters({"lr": 0.01, "seed": 1, "model": "small"})
        for step in range(200):
            run.log({"loss": math.nan if step == 50 else 2 / (1 + step), "val/acc": 1 - 2 / (2 + step)}, step)
        run.logger.log_images(np.full((8, 8), 0.25), "Inputs", step=100)
    for seed in (2, 3):
        with Written(root / f"seed{seed}") as run:
            run.logger.log_hyperparameters({"lr": 0.1, "seed": seed, "model": "small"})
            for step in range(200):
                run.log({"loss": seed / (1 + step)}, step)
    with Written(root / "long") as run:
        for step in range(LONG):
            run.log({"loss": 1000.0 if step == SPIKE_AT else 1.0}, step)
    with Written(root / "hostile", tags=["<b>bold</b>", "javascript:alert(1)"]) as run:
        run.logger.log_hyperparameters({"<script>document.title=1</script>": HOSTILE})
        run.log({HOSTILE: 1.0, "\u202etxet": 2.0, "n" * 10_000: 3.0}, 0)
        run.logger.log_text(HOSTILE, HOSTILE)
        run.logger.log_table([HOSTILE], [[HOSTILE], ["javascript:alert(1)"]], "Hostile")
    sidecar = root / "hostile" / "sidecar.json"
    sidecar.write_text(
        json.dumps({**json.loads(sidecar.read_bytes()), "notes": HOSTILE * 100, "display_name": HOSTILE})
    )


def write_media(run, generator, step, shade):
    """Logs one record of each kind."""
    image = np.full((8, 8), shade)
    image[0, 0] = 1.0
    mask = np.zeros((8, 8), np.int64)
    mask[:4], mask[4:, :4] = 1, 2
    run.logger.log_images(
        image,
        "Inputs",
        step=step,
        masks={"truth": mask},
        mask_class_labels={0: "ground", 1: "sky", 2: "tree"},
    )
    run.logger.log_audio(
        np.sin(np.arange(8000) / 10).astype(np.float32), sample_rate=8000, name="Tone", step=step
    )
    run.logger.log_video(
        generator.integers(0, 255, (10, 3, 32, 32)).astype(np.uint8), fps=10, name="Clip", step=step
    )
    run.logger.log_point_cloud(generator.normal(size=(2000, 3)).astype(np.float32), "Cloud", step=step)
    run.logger.log_histogram(generator.normal(size=1000) + step / 100, "weights", step=step)
    run.logger.log_table(["digit", "share"], [[3, 0.5], [1, 0.9], [2, 0.1]], "Errors", step=step)
    run.logger.log_text(f"step {step}\nsecond line", "Notes", step=step)
