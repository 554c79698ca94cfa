"""Writes the files of a finished sweep in the documented format, without training."""

import json
import os

import numpy as np

RATES = [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1]
SEEDS = 5
METRICS = [
    "loss",
    "val/acc",
    "val/loss",
    "train/acc",
    "grad_norm",
    "time/samples_per_s",
    "mem/peak_gib",
    "config/batch",
]
SPIKE_AT = 1234


def write_sweep(root, runs=200, steps=2000):
    """Writes runs over learning rates, seeds and weight decays; the best one has a rate of 0.01, and one has a spike.

    Runs that differ only in the weight decay share their rows by hard links, so that writing takes a second.
    """
    files = root.parent / f"{root.name}-files"
    files.mkdir(parents=True)
    statistics = {
        (rate, seed): _write_rows(files / f"{rate}-{seed}.csv", rate, seed, steps)
        for rate in RATES
        for seed in range(SEEDS)
    }
    for number in range(runs):
        rate, seed = RATES[number % len(RATES)], number // len(RATES) % SEEDS
        decay = number // (len(RATES) * SEEDS) / 100
        name = f"resnet50-imagenet-baseline-lr{rate:g}-wd{decay:g}-seed{seed}"
        run = root / name
        run.mkdir(parents=True)
        os.link(files / f"{rate}-{seed}.csv", run / "metrics.csv")
        of_run = statistics[rate, seed]
        is_failed = number % 25 == 24
        sidecar = {
            "format_version": 1,
            "run_id": f"{number:012x}",
            "status": "failed" if is_failed else "completed",
            "created_at": 1.7e9 + number,
            "ended_at": 1.7e9 + number + 3600,
            "tags": ["sweep"],
            "hparams": {"lr": rate, "seed": seed, "weight_decay": decay, "model": "resnet50"},
            "summary": {metric: one["last"] for metric, one in of_run.items()},
        }
        (run / "sidecar.json").write_text(json.dumps(sidecar))
        (run / "summary.json").write_text(json.dumps({"metrics": of_run}))


def _write_rows(path, rate, seed, steps):
    """Writes the rows of one run; returns the statistics of its metrics."""
    rng = np.random.default_rng([int(1e6 * rate), seed])
    step = np.arange(steps)
    # How far the rate is from the best one, in decades.
    away = abs(np.log10(rate) + 2)
    fall = np.exp(-3 * step / steps * (1.2 - 0.3 * away))
    loss = 0.2 + 0.3 * away + 2 * fall + rng.normal(0, 0.1, steps)
    if (rate, seed) == (RATES[-1], 0):
        loss[min(SPIKE_AT, steps - 1)] = 50.0
    accuracy = 0.95 - 0.1 * away - 0.8 * fall + rng.normal(0, 0.004, steps) + 0.002 * seed
    curves = np.stack(
        [
            loss,
            accuracy,
            loss + 0.1,
            accuracy + 0.02,
            np.abs(rng.normal(1, 0.3, steps)),
            rng.normal(900, 20, steps),
            np.full(steps, 11.5) + rng.normal(0, 0.01, steps),
            np.full(steps, 256.0),
        ],
        axis=1,
    ).round(6)
    rows = (
        f"{at},{at // 100},{1.7e9 + at:.1f},{','.join(map(str, row))}\n"
        for at, row in enumerate(curves.tolist())
    )
    with path.open("w") as file:
        file.write(f"step,epoch,time,{','.join(METRICS)}\n")
        file.writelines(rows)
    return {
        metric: {
            "last": values[-1],
            "min": values.min(),
            "max": values.max(),
            "min_step": int(values.argmin()),
            "max_step": int(values.argmax()),
            "mean": values.mean(),
            "count": steps,
            "non_finite": 0,
        }
        for metric, values in zip(METRICS, curves.T, strict=True)
    }
