"""Makes the pictures of terminals in the docs from real runs: `python docs/images/make.py`.

Needs the extra `demo`.
"""

import contextlib
import html
import io
import os
import sys
import tempfile
from pathlib import Path

from destinations import Console, RunDirectory
from destinations.cli import main as destinations
from destinations.commands.demo import Misclassified, Weights, trainer

HERE = Path(__file__).parent
WIDTH, LINE, MARGIN, CHARACTER = 80, 17, 16, 7.25
STYLES = {"Epoch": "#79c0ff", "Eval": "#79c0ff", "Table": "#79c0ff", "$": "#7ee787"}


def main() -> None:
    """Trains twice, and writes `console.svg` and `plot.svg`."""
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


if __name__ == "__main__":
    sys.exit(main())
