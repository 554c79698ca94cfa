"""docs/trackers.md matches the code: its examples run, and its tables are complete."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from destinations import TensorBoard
from destinations.trackers.event_file import records
from destinations.trackers.tracker import Tracker

PAGE = (Path(__file__).parents[3] / "docs" / "trackers.md").read_text(encoding="utf-8")
BLOCKS = [
    block
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    if "TensorBoard" in block
]


@pytest.mark.parametrize("code", BLOCKS, ids=[str(index) for index in range(len(BLOCKS))])
def test_examples_with_tensorboard_run(code, tmp_path):
    """They run alone, with warnings as errors, and write an event file with scalars."""
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )

    assert (finished.returncode, finished.stderr) == (0, "")
    (path,) = tmp_path.rglob("events.out.tfevents.*")
    assert len(list(records(path))) > 1


def test_every_option_of_tensorboard_is_documented_with_its_default():
    """It is in the page's table and in the docstring of the class or of all trackers."""
    section = PAGE.split("## TensorBoard", 1)[1].split("### Options")[1].split("\n### ")[0]
    documented = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \|", section, re.MULTILINE))

    own, common = (inspect.signature(kind).parameters for kind in (TensorBoard, Tracker))
    options = [one for one in {**common, **own}.values() if one.name != "options"]

    shown = {"256 << 20": 256 << 20, "time.time": "time.time"}
    defaults = {one.name: "time.time" if one.name == "clock" else one.default for one in options}
    assert {name: shown.get(text) or eval(text) for name, text in documented.items()} == defaults  # noqa: S307  # ours
    for name in documented:
        described = f"{inspect.getdoc(TensorBoard)}\n{inspect.getdoc(Tracker)}"
        assert re.search(rf"^    {name}: ", described, re.MULTILINE)
