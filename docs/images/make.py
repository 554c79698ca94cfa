"""Makes the pictures of the docs from real runs: `python docs/images/make.py`.

Needs the extras `demo` and `viewer`, playwright, and a Chromium.
"""

import contextlib
import html
import io
import os
import shutil
import sys
import tempfile
from pathlib import Path

from destinations import Console, RunDirectory
from destinations.cli import main as destinations
from destinations.demo import Misclassified, Weights, trainer
from destinations.runs import open_runs
from destinations.viewer.server import Viewer

HERE = Path(__file__).parent
WIDTH, LINE, MARGIN, CHARACTER = 80, 17, 16, 7.25
STYLES = {"Epoch": "#79c0ff", "Eval": "#79c0ff", "Table": "#79c0ff", "$": "#7ee787"}
WINDOW = {"width": 1280, "height": 860}


def main() -> None:
    """Trains twice, and writes `console.svg`, `plot.svg` and `viewer.png`."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        console = io.StringIO()
        for name, epochs in (("first", 3), ("second", 6)):
            loggers = [RunDirectory(f"runs/{name}"), Console(stream=console)]
            callbacks = [Misclassified(), Weights()]
            with trainer(loggers, callbacks, epochs=epochs, save_folder=None, run_name=name) as digits:
                digits.fit()
        lines = console.getvalue().splitlines()
        last = max(index for index, line in enumerate(lines) if line.startswith("Epoch"))
        write_svg("console.svg", ["…", *lines[last:]])
        write_svg("plot.svg", ["$ destinations runs plot 'loss/*'", *printed("runs", "plot", "loss/*")])
        photograph()


def printed(*arguments: str) -> list[str]:
    """Returns the lines that a command prints."""
    os.environ["COLUMNS"] = str(WIDTH)
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        destinations(arguments)
    return stream.getvalue().splitlines()


def write_svg(name: str, lines: list[str]) -> None:
    """Writes lines as a picture of a terminal."""
    rows = []
    for number, line in enumerate(lines, 1):
        style = next((color for start, color in STYLES.items() if line.startswith(start)), "#e6edf3")
        rows.append(
            f'<text x="{MARGIN}" y="{MARGIN + LINE * number}" fill="{style}" xml:space="preserve">'
            f"{html.escape(line)}</text>"
        )
    height = 2 * MARGIN + LINE * (len(lines) + 1)
    (HERE / name).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * MARGIN + WIDTH * CHARACTER:.0f} {height}" '
        'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="12">\n'
        '<rect width="100%" height="100%" rx="8" fill="#0d1117"/>\n' + "\n".join(rows) + "\n</svg>\n",
        encoding="utf-8",
    )


def photograph() -> None:
    """Writes pictures of the page of the viewer: charts of both runs, and images of one."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with open_runs("runs", cache="index") as runs, Viewer(runs, port=0) as viewer, sync_playwright() as api:
        browser = api.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport=WINDOW, bypass_csp=True)
        page.goto(viewer.url)
        rows = page.request.get(f"{viewer.address}/api/runs?limit=10").json()["rows"]
        ids = [row["id"] for row in rows]
        page.goto(f"{viewer.address}/#/charts?{'&'.join(f'run={one}' for one in ids)}")
        page.wait_for_function("() => document.querySelectorAll('.chart .main-svg').length > 3")
        page.screenshot(path=HERE / "viewer.png")
        page.goto(f"{viewer.address}/#/media?run={ids[0]}")
        page.wait_for_function("() => document.querySelectorAll('.media img').length > 3")
        page.screenshot(path=HERE / "images.png")
        browser.close()


if __name__ == "__main__":
    sys.exit(main())
