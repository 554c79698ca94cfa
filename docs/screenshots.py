"""Takes the pictures of the viewer in README and docs: trains the demo's network several times, and opens the viewer.

Run it with `make screenshots`; it needs Chromium (`apt-get install chromium fonts-inter`).
"""

import argparse
import itertools
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from destinations import RunDirectory, TextFile
from destinations.commands.demo import Misclassified, Weights, trainer
from destinations.runs import open_runs
from destinations.viewer import Viewer

if TYPE_CHECKING:
    from playwright.sync_api import FloatRect, Page

IMAGES = Path(__file__).resolve().parent / "images"
# Learning rate, dropout and seed.
SETTINGS = list(itertools.product((3e-3, 1e-2, 3e-2, 1e-1), (0.1, 0.3, 0.5), (1, 2)))
CHOSEN = [(1e-2, 0.3, 1), (3e-3, 0.3, 1), (3e-2, 0.1, 1), (1e-1, 0.5, 1)]
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
DRAWN_MS = 1500
WAIT_MS = 120_000
MEDIA_ARE_THERE = """() => [...document.querySelectorAll('.images .of-run')].every((run) => {
    const pictures = [...run.querySelectorAll('.picture')];
    return pictures.length && pictures.every((one) => one.querySelector('img')?.complete && one.querySelector('canvas'));
})"""
WIDTH, HEIGHT, RUN_HEIGHT = 1360, 850, 701


def name_of(lr: float, dropout: float, seed: int) -> str:
    """Returns the name of the run of a setting."""
    return f"lr{lr:g}-d{dropout:g}-seed{seed}"


def train(root: Path, epochs: int) -> None:
    """Trains one network for each setting."""
    torch.set_num_threads(1)
    for lr, dropout, seed in SETTINGS:
        name = name_of(lr, dropout, seed)
        tags = ["baseline"] if (lr, dropout, seed) == CHOSEN[0] else []
        with trainer(
            [RunDirectory(root / name, tags=tags), TextFile(str(root / name / "log.txt"))],
            [Misclassified(), Weights()],
            epochs=epochs,
            lr=lr,
            dropout=dropout,
            seed=seed,
            save_folder=str(root / name / "checkpoints"),
            run_name=name,
        ) as digits_trainer:
            digits_trainer.logger.log_hyperparameters({"lr": lr, "dropout": dropout, "seed": seed})
            digits_trainer.fit()
        print(f"trained {name}")


def shoot(page: "Page", viewer: Viewer, theme: str) -> None:
    """Takes a picture of each view."""
    page.goto(viewer.url)
    page.wait_for_selector(".grid-row[data-run]")
    rows = page.request.get(f"{viewer.address}/api/runs").json()["rows"]
    ids = {row["name"]: row["id"] for row in rows}
    chosen = [ids[name_of(*setting)] for setting in CHOSEN]
    query = "&".join(f"run={one}" for one in chosen)
    metric = "summary.loss/train/total"
    views = {
        "runs": f"runs?{query}",
        "charts": f"charts?{query}&smooth=0.4",
        "media": f"media?{'&'.join(f'run={one}' for one in chosen[1:])}&step=84&opacity=0.35",
        "explore": f"explore?{query}&sx=hparams.lr&sy={metric}&sc=hparams.dropout&logx=1",
        "run": f"run/{chosen[0]}",
    }
    for name, fragment in views.items():
        page.goto(f"{viewer.address}/#/{fragment}")
        page.wait_for_timeout(2 * DRAWN_MS)
        if name == "explore":
            page.wait_for_selector(".importance li")
        if name == "media":
            page.wait_for_function(MEDIA_ARE_THERE)
            page.wait_for_timeout(DRAWN_MS)
        if name == "charts":
            box = page.locator('[data-metric="loss/train/total"] .nsewdrag').bounding_box()
            assert box is not None  # noqa: S101  # the chart is there
            page.mouse.move(box["x"] + box["width"] / 3, box["y"] + box["height"] / 2, steps=3)
            page.wait_for_timeout(DRAWN_MS)
        # The lower part of a run's page shows folders of the machine that trained it.
        height = RUN_HEIGHT if name == "run" else HEIGHT
        clip: FloatRect = {"x": 0, "y": 0, "width": WIDTH, "height": height}
        page.screenshot(path=IMAGES / f"{name}-{theme}.png", clip=clip)
        page.mouse.move(0, 0)
        print(f"{IMAGES.name}/{name}-{theme}.png")


def main(epochs: int, root: Path | None) -> None:
    """Takes the pictures, light and dark; trains first if no runs are given."""
    from playwright.sync_api import sync_playwright

    browser_path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser_path is None:
        raise SystemExit("No browser: apt-get install chromium")
    with tempfile.TemporaryDirectory() as scratch:
        folder = root or Path(scratch) / "digits"
        if root is None:
            train(folder, epochs)
        with (
            open_runs(folder, cache=Path(scratch) / "index") as runs,
            Viewer(runs, port=0) as viewer,
            sync_playwright() as playwright,
        ):
            browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
            for theme in ("light", "dark"):
                context = browser.new_context(
                    viewport={"width": WIDTH, "height": HEIGHT},
                    device_scale_factor=1.5,
                    color_scheme="dark" if theme == "dark" else "light",
                )
                context.set_default_timeout(WAIT_MS)
                page = context.new_page()
                shoot(page, viewer, theme)
                context.close()
            browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=16, help="of each training (default: 16)")
    parser.add_argument("--runs", type=Path, help="runs that are there already; nothing is trained")
    given = parser.parse_args()
    main(given.epochs, given.runs)
